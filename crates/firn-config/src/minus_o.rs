//! `-o key=value,key,…` of `firn mount`, mount.firn and fstab.
//!
//! Keys are the names of the table, with hyphens or underscores; beside them stand `ro` and `rw`, flags
//! of the kernel and words that mount(8) and systemd put there for themselves.

use crate::error::ConfigError;
use crate::kernel::{KernelFlag, is_skipped};
use crate::resolve::{Given, Origin};
use crate::suggest::nearest;
use crate::table::row;
use crate::value::Kind;

/// A parsed list.
#[derive(Clone, Debug, Default)]
pub struct MinusO {
    /// Options of the table, in order.
    pub given: Vec<Given>,
    /// Flags of the kernel, in order.
    pub kernel_flags: Vec<KernelFlag>,
    /// Words nobody knows, if those are tolerated.
    pub tolerated: Vec<String>,
}

/// What to do with a word nobody knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unknown {
    /// It is an error.
    Refuse,
    /// Note and skip it (`mount -s`).
    Tolerate,
}

/// Parses a list; empty words are skipped, as mount(8) does.
pub fn parse_minus_o(text: &str, unknown: Unknown) -> Result<MinusO, ConfigError> {
    let mut parsed = MinusO::default();
    for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
        if let Some(flag) = KernelFlag::parse(word) {
            parsed.kernel_flags.push(flag);
        } else if is_skipped(word) {
            // Meant for others.
        } else {
            match given(word) {
                Ok(given) => parsed.given.push(given),
                Err(ConfigError::Unknown { .. }) if unknown == Unknown::Tolerate => {
                    parsed.tolerated.push(word.to_owned())
                }
                Err(error) => return Err(error),
            }
        }
    }
    Ok(parsed)
}

impl MinusO {
    /// Appends what a later `-o` says.
    pub fn extend(&mut self, later: MinusO) {
        self.given.extend(later.given);
        self.kernel_flags.extend(later.kernel_flags);
        self.tolerated.extend(later.tolerated);
    }
}

fn given(word: &str) -> Result<Given, ConfigError> {
    let (key, value) = match word.split_once('=') {
        Some((key, value)) => (key, Some(value)),
        None => (word, None),
    };
    let (name, value) = match (key, value) {
        ("ro", None) => ("read-only", Some("yes")),
        ("rw", None) => ("read-only", Some("no")),
        _ => (key, value),
    };
    let Some(row) = row(name) else {
        return Err(ConfigError::Unknown {
            origin: Origin::MinusO,
            name: name.to_owned(),
            nearest: nearest(name),
        });
    };
    let text = match (value, row.kind) {
        (Some(value), _) => value.to_owned(),
        (None, Kind::Switch) => "yes".to_owned(),
        (None, kind) => {
            let why = format!("lacks a value: write {}={}", row.name, kind.value_name());
            return Err(ConfigError::Value { origin: Origin::MinusO, name: row.name, why });
        }
    };
    Ok(Given { row, text })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(parsed: &MinusO) -> Vec<(&str, &str)> {
        parsed.given.iter().map(|given| (given.row.name, given.text.as_str())).collect()
    }

    #[test]
    fn a_list_keeps_its_order_and_takes_underscores() {
        let parsed = parse_minus_o("arena_size=1G, close=held,,allow_other", Unknown::Refuse).unwrap();
        assert_eq!(names(&parsed), [("arena-size", "1G"), ("close", "held"), ("allow-other", "yes")]);
    }

    #[test]
    fn words_of_fstab_are_accepted() {
        let line = "defaults,rw,_netdev,nofail,noauto,auto,user,users,owner,group,x-systemd.automount,\
                    x-systemd.device-timeout=5,nodev,nosuid,noexec,noatime,relatime,comment=mine";
        let parsed = parse_minus_o(line, Unknown::Refuse).unwrap();
        assert_eq!(names(&parsed), [("read-only", "no")]);
        assert_eq!(
            parsed.kernel_flags,
            [KernelFlag::NoDev, KernelFlag::NoSuid, KernelFlag::NoExec, KernelFlag::NoAtime]
        );
    }

    #[test]
    fn an_unknown_word_is_refused_with_the_nearest_name_or_tolerated() {
        let error = parse_minus_o("chunksize=4M", Unknown::Refuse).unwrap_err();
        assert_eq!(error.to_string(), "-o: unknown option `chunksize`, did you mean `chunk-size`?");
        let error = parse_minus_o("qwertyuiop", Unknown::Refuse).unwrap_err();
        assert_eq!(error.to_string(), "-o: unknown option `qwertyuiop` (`firn config` lists the options)");
        let parsed = parse_minus_o("qwertyuiop,ro", Unknown::Tolerate).unwrap();
        assert_eq!(parsed.tolerated, ["qwertyuiop"]);
        assert_eq!(names(&parsed), [("read-only", "yes")]);
    }

    #[test]
    fn a_key_without_its_value_says_how_to_write_it() {
        let error = parse_minus_o("arena-size", Unknown::Refuse).unwrap_err();
        assert_eq!(error.to_string(), "-o: arena-size: lacks a value: write arena-size=SIZE");
    }
}
