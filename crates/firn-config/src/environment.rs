//! Names of all environment variables that Firn reads, and suggestions for misspelt ones.
//!
//! Every variable is in one of three places: a row of [`TABLE`] (the options of a mount) if it sets an option,
//! [`VARIABLES`] if it is documented but sets no option, or [`INTERNAL`] if only tests, benchmarks, scripts and
//! examples read it. A test searches the sources for variables that are in none of these places.

use std::ffi::OsStr;

use crate::table::TABLE;

/// Prefix of the name of every variable.
const PREFIX: &str = "FIRN_";

/// A documented variable that sets no option.
#[derive(Clone, Copy, Debug)]
pub struct Variable {
    /// Name of the variable.
    pub name: &'static str,
    /// Meaning of the variable, in Markdown.
    pub meaning: &'static str,
}

/// Documented variables that set no option.
pub static VARIABLES: [Variable; 9] = [
    Variable {
        name: "FIRN_RUNTIME_DIR",
        meaning: "runtime directory instead of `/dev/shm/firn-UID`; it must be on tmpfs, belong to you and have mode 0700",
    },
    Variable {
        name: "FIRN_PREFIX",
        meaning: "the directory to write to, which `firn run` sets for its command",
    },
    Variable {
        name: "FIRN_JOB",
        meaning: "for the Python package, if no launcher sets one: a value that all ranks of a job share, new at each start",
    },
    Variable {
        name: "FIRN_BIN",
        meaning: "for the Python package and tests: the program to start instead of the installed `firn`",
    },
    Variable {
        name: "FIRN_LIB",
        meaning: "for the Python package: the library to load instead of the installed `libfirn.so`",
    },
    Variable {
        name: "FIRN_PRELOAD",
        meaning: "`off` turns the preload library off",
    },
    Variable {
        name: "FIRN_PRELOAD_REPORT",
        meaning: "`1`: at exit the preload library prints how many calls it served, and how many went to the kernel",
    },
    Variable {
        name: "FIRN_PRELOAD_DIRECT_AFTER",
        meaning: "bytes of an open file that go through the mount before the preload library asks for direct access; default 65536, 0: at the first call. A call counts as 8192 bytes at least. Before the process is connected to firnd, a call counts with an eighth of its bytes",
    },
    Variable {
        name: "FIRN_PRELOAD_WAIT",
        meaning: "seconds that a call in a stub tree waits for a firnd that was killed",
    },
];

/// Variables of tests, benchmarks, scripts and examples.
static INTERNAL: &[&str] = &[
    "FIRN_AGENT_REQUESTS",
    "FIRN_AGENT_ROUNDS",
    "FIRN_AGENT_TAMPER_ROUNDS",
    "FIRN_BACKING_DIR",
    "FIRN_BENCH_DIR",
    "FIRN_BENCH_LEFTOVERS",
    "FIRN_BENCH_PROGRAM",
    "FIRN_CALLS",
    "FIRN_CHECKPOINT",
    "FIRN_CRASH_ROUNDS",
    "FIRN_DEMO_DIR",
    "FIRN_DIFFERENTIAL_OPS",
    "FIRN_DIR",
    "FIRN_DIST_PACKAGES",
    "FIRN_DIST_ROOT",
    "FIRN_FSX_OPS",
    "FIRN_HOSTS_RANGES",
    "FIRN_OPS",
    "FIRN_PARTNER_ROUNDS",
    "FIRN_PLACE_STAGING",
    "FIRN_RECORD",
    "FIRN_RULES_KILLS",
    "FIRN_RULES_PYTHON",
    "FIRN_RUN_HOSTS",
    "FIRN_SEED",
    "FIRN_STRESS_SECONDS",
    "FIRN_TAKEOVER_KILLS",
    "FIRN_TEMPORARY",
    "FIRN_TEST_CREATE",
    "FIRN_TEST_LIMIT_S",
    "FIRN_TEST_STEP",
    "FIRN_TRACE",
];

/// A variable with the prefix `FIRN_` that nothing reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownVariable {
    /// Name of the variable, as found in the environment.
    pub name: String,
    /// Variable that was probably meant.
    pub nearest: Option<String>,
}

/// Returns the variables among `names` that have the prefix `FIRN_` and that nothing reads, sorted by name.
pub fn unknown_variables<S: AsRef<OsStr>>(
    names: impl IntoIterator<Item = S>,
) -> Vec<UnknownVariable> {
    let known_names: Vec<String> = variable_names().collect();
    let mut unknown = Vec::new();
    for name in names {
        let Some(name) = name.as_ref().to_str() else {
            continue;
        };
        if !name.starts_with(PREFIX) || known_names.iter().any(|known| known == name) {
            continue;
        }
        unknown.push(UnknownVariable {
            name: name.to_owned(),
            nearest: nearest(name, &known_names),
        });
    }
    unknown.sort_by(|first, second| first.name.cmp(&second.name));
    unknown
}

/// Returns one message for each variable of this process that resembles one of Firn's. A variable that resembles none
/// belongs to another program: environment modules set `FIRN_ROOT` and the like.
pub fn misspelt_variables() -> Vec<String> {
    let names = std::env::vars_os().map(|(name, _)| name);
    let message_of = |unknown: UnknownVariable| {
        let UnknownVariable { name, nearest } = unknown;
        let nearest = nearest?;
        let name = firn_format::quote::quoted(name.as_bytes());
        Some(format!(
            "the variable {name} has no effect: did you mean {nearest}?"
        ))
    };
    unknown_variables(names)
        .into_iter()
        .filter_map(message_of)
        .collect()
}

/// Returns the names of all variables.
fn variable_names() -> impl Iterator<Item = String> {
    let options = TABLE.iter().map(|row| row.env());
    let others = VARIABLES.iter().map(|variable| variable.name.to_owned());
    let internal = INTERNAL.iter().map(|name| (*name).to_owned());
    options.chain(others).chain(internal)
}

/// Returns the documented variable whose name is most similar, or `None` if none is similar enough. Underscores do not
/// count, and two letters in the wrong order count as one mistake.
fn nearest(name: &str, known_names: &[String]) -> Option<String> {
    let letters = |name: &str| name.trim_start_matches(PREFIX).replace('_', "");
    let misspelt = letters(name);
    let (nearest, distance) = known_names
        .iter()
        .filter(|known| !INTERNAL.contains(&known.as_str()))
        .map(|known| (known, strsim::osa_distance(&misspelt, &letters(known))))
        .min_by_key(|(_, distance)| *distance)?;
    // The allowed distance grows with the length, because short names are similar by chance: ROOT is two letters from
    // HOST.
    let distance_max = letters(nearest).len().div_ceil(5);
    (distance <= distance_max).then(|| nearest.clone())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    fn meant(name: &str) -> Option<String> {
        let [unknown] = &unknown_variables([name])[..] else {
            panic!("{name} is known")
        };
        unknown.nearest.clone()
    }

    #[test]
    fn a_misspelt_variable_finds_the_one_that_was_meant() {
        for (typed, right) in [
            ("FIRN_ARENASIZE", "FIRN_ARENA_SIZE"),
            ("FIRN_ARENA_SISE", "FIRN_ARENA_SIZE"),
            ("FIRN_RUNTIMEDIR", "FIRN_RUNTIME_DIR"),
            ("FIRN_COLSE", "FIRN_CLOSE"),
            ("FIRN_PRELOAD_REPORTS", "FIRN_PRELOAD_REPORT"),
        ] {
            assert_eq!(meant(typed).as_deref(), Some(right), "{typed}");
        }
        for other in ["FIRN_ROOT", "FIRN_HOME", "FIRN_VERSION", "FIRN_"] {
            assert_eq!(meant(other), None, "{other}");
        }
        let known = ["FIRN_ARENA_SIZE", "FIRN_SEED", "PATH", "FIRNLIKE"];
        assert_eq!(unknown_variables(known), []);
    }

    /// Looks for names in quotes in Rust sources, and for names that scripts expand.
    #[test]
    fn every_variable_that_the_sources_name_is_listed() {
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
        let mut named = BTreeSet::new();
        for dir in ["crates", "tests", "xtask", "examples", "scripts"] {
            collect(&root.join(dir), &mut named);
        }
        assert!(named.contains("FIRN_SEED"), "{named:?}");
        let unknown: Vec<_> = unknown_variables(&named)
            .into_iter()
            .map(|unknown| unknown.name)
            .filter(|name| !NOT_READ.contains(&name.as_str()))
            .collect();
        assert!(
            unknown.is_empty(),
            "list them in crates/firn-config/src/environment.rs: {unknown:?}"
        );
    }

    /// Names in quotes that are not variables: a constant of C, and names that tests misspell.
    const NOT_READ: &[&str] = &["FIRN_NEXT_ID", "FIRN_ARENASIZE", "FIRN_COLSE", "FIRN_ROOT"];

    fn collect(dir: &Path, named: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(dir).unwrap().map(Result::unwrap) {
            let path = entry.path();
            if path.is_dir() {
                collect(&path, named);
                continue;
            }
            // This source file is not searched, because it has misspelt names and names of tests.
            if path.ends_with("environment.rs") || entry.metadata().unwrap().len() > 1 << 20 {
                continue;
            }
            let Ok(text) = std::fs::read_to_string(&path) else {
                continue;
            };
            let is_rust = path.extension().is_some_and(|extension| extension == "rs");
            for (at, _) in text.match_indices(PREFIX) {
                let end = text[at..]
                    .find(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'));
                let name = &text[at..at + end.unwrap_or(text.len() - at)];
                let before = text[..at].chars().next_back();
                let after = text[at + name.len()..].chars().next();
                let is_read = if is_rust {
                    before == Some('"') && after == Some('"')
                } else {
                    matches!(before, Some('$' | '{')) && text.starts_with("#!")
                };
                if is_read && name.len() > PREFIX.len() {
                    named.insert(name.to_owned());
                }
            }
        }
    }
}
