//! Errors of options. Each message names the source and the option, and what would be right.

use crate::unchecked_option::Origin;

/// An error of an option.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// There is no option of this name.
    #[error("{origin}: unknown option `{name}`{}", hint(nearest))]
    Unknown {
        /// Source of the option.
        origin: Origin,
        /// The name as written.
        name: String,
        /// Option that was probably meant.
        nearest: Option<&'static str>,
    },
    /// The option cannot have this value.
    #[error("{origin}: {name}: {why}")]
    Value {
        /// Source of the option.
        origin: Origin,
        /// The option.
        name: &'static str,
        /// What values are allowed.
        why: String,
    },
    /// A flag and `-o` give different values.
    #[error(
        "{name} is given twice, as `--{name} {flag}` and as `-o {name}={minus_o}`: give it once"
    )]
    Twice {
        /// The option.
        name: &'static str,
        /// Value of the flag.
        flag: String,
        /// Value after `-o`.
        minus_o: String,
    },
    /// Two options contradict each other.
    #[error("{first} and {second} contradict each other: {advice}")]
    Contradiction {
        /// The first option, with value and source.
        first: String,
        /// The second option, with value and source.
        second: String,
        /// What to change.
        advice: &'static str,
    },
    /// The options cannot change while the mount exists.
    #[error(
        "{names}: cannot change while programs have the mount: unmount, and mount again with the new value"
    )]
    Fixed {
        /// Names of the options.
        names: String,
    },
    /// A file cannot be read or parsed.
    #[error("{path}: {message}")]
    File {
        /// Path of the file.
        path: String,
        /// What is wrong.
        message: String,
    },
}

/// Returns the end of the message about an unknown name: the option that was probably meant.
fn hint(nearest: &Option<&'static str>) -> String {
    nearest.map_or_else(
        || " (`firn config` lists the options)".to_owned(),
        |name| format!(", did you mean `{name}`?"),
    )
}
