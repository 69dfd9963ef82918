//! What can be wrong with options. Every text says which source, what, and what would be right.

use crate::given::Origin;

/// An option that cannot be taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// No such option.
    #[error("{origin}: unknown option `{name}`{}", hint(nearest))]
    Unknown {
        /// Where it stands.
        origin: Origin,
        /// As it is written.
        name: String,
        /// What was probably meant.
        nearest: Option<&'static str>,
    },
    /// The option cannot hold that.
    #[error("{origin}: {name}: {why}")]
    Value {
        /// Where it stands.
        origin: Origin,
        /// The option.
        name: &'static str,
        /// What is allowed.
        why: String,
    },
    /// Flag and `-o` disagree.
    #[error(
        "{name} is given twice, as `--{name} {flag}` and as `-o {name}={minus_o}`: give it once"
    )]
    Twice {
        /// The option.
        name: &'static str,
        /// By the flag.
        flag: String,
        /// By `-o`.
        minus_o: String,
    },
    /// Two options exclude each other.
    #[error("{first} and {second} contradict each other: {advice}")]
    Contradiction {
        /// One option, with value and origin.
        first: String,
        /// The other.
        second: String,
        /// What to do.
        advice: &'static str,
    },
    /// A mount that programs have keeps them as they are.
    #[error(
        "{names}: cannot change while programs have the mount; unmount, and mount with the new value"
    )]
    Fixed {
        /// The options.
        names: String,
    },
    /// A file cannot be read or parsed.
    #[error("{path}: {message}")]
    File {
        /// Path of the file.
        path: String,
        /// Why.
        message: String,
    },
}

fn hint(nearest: &Option<&'static str>) -> String {
    nearest.map_or_else(
        || " (`firn config` lists the options)".to_owned(),
        |name| format!(", did you mean `{name}`?"),
    )
}
