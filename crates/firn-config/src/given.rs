//! One option as a source gives it, and which source that is: what every parser of options produces.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use firn_format::quote::quoted_path;

use crate::table::Row;

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A flag on the command line.
    Flag,
    /// `-o` on the command line, or in fstab.
    MinusO,
    /// This variable.
    Environment(String),
    /// The user's or the system's file.
    File(PathBuf),
    /// The option of this name brings it along.
    Implied(&'static str),
    /// The table.
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag => f.write_str("command line"),
            Self::MinusO => f.write_str("-o"),
            Self::Environment(name) => f.write_str(name),
            Self::File(path) => f.write_str(&quoted_path(path)),
            Self::Implied(name) => write!(f, "for {name}"),
            Self::Default => f.write_str("default"),
        }
    }
}

/// One option as a source gives it, not yet checked.
#[derive(Clone, Debug)]
pub struct Given {
    /// The option.
    pub row: &'static Row,
    /// As written.
    pub text: OsString,
}
