//! Changes options of a mount while programs use it.
//!
//! Promise: the changed options are checked as for a new mount. If one change concerns a fixed option
//! ([`FIXED_OPTIONS`]), all changes are refused.

use crate::error::ConfigError;
use crate::minus_o::MinusO;
use crate::options::Options;
use crate::resolve::Resolved;
use crate::table::row;

/// Options that cannot change while the mount exists, because the kernel, the arena (the mount's shared memory) or open
/// files depend on their values.
pub const FIXED_OPTIONS: [&str; 21] = [
    "frontend",
    "takeover",
    "read-only",
    "allow-other",
    "arena-size",
    "chunk-size",
    "arena-dir",
    "numa-topology",
    "spill",
    "spill-size",
    "memory-files",
    "drain",
    "mode",
    "layout",
    "log-files",
    "placement",
    "lanes",
    "lane-map",
    "servers",
    "participants",
    "host",
];

/// Returns `options` with `changes` applied, checked as for a new mount. Fails if an option that cannot change while
/// the mount exists ([`FIXED_OPTIONS`]) would get another value, or if `changes` has flags of mount(8).
pub fn change_options(options: &Options, changes: &MinusO) -> Result<Options, ConfigError> {
    let changed = Resolved::change(options, changes)?;
    let mut refused_names = Vec::new();
    for option_row in FIXED_OPTIONS.into_iter().filter_map(row) {
        if (option_row.get)(options) != (option_row.get)(&changed) {
            refused_names.push(option_row.name);
        }
    }
    if !changes.kernel_flags.is_empty() {
        refused_names.push("flags of mount(8)");
    }
    if refused_names.is_empty() {
        Ok(changed)
    } else {
        Err(ConfigError::Fixed {
            names: refused_names.join(", "),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::minus_o::{Unknown, parse_minus_o};

    fn change(options: &Options, text: &str) -> Result<Options, ConfigError> {
        change_options(options, &parse_minus_o(text, Unknown::Refuse).unwrap())
    }

    #[test]
    fn what_is_fixed_is_an_option_and_is_named_if_it_changes() {
        for name in FIXED_OPTIONS {
            assert!(row(name).is_some(), "{name}");
        }
        let mut options = Options::default();
        options.settle();
        let error = change(&options, "arena-size=1G,close=held,ro,noexec").unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("read-only, arena-size, flags of mount(8)"),
            "{text}"
        );
        // A fixed option may be given again with its present value.
        let same = format!("arena-size={}", options.arena_bytes);
        assert_eq!(change(&options, &same).unwrap(), options);
    }

    #[test]
    fn others_change_and_must_fit_together() {
        let options = Options::default();
        let changed = change(&options, "drain-age=7s,io-threads=3").unwrap();
        assert_eq!((changed.drain_age_ms, changed.io_threads), (7_000, 3));
        assert_eq!(changed.arena_bytes, options.arena_bytes);
        assert!(change(&options, "history=3").is_err());
    }
}
