//! An option as a source (a flag, `-o`, a variable or a file) gives it, before its value is checked, and the source.
//! All parsers of options produce these.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use firn_format::quote::quoted_path;

use crate::table::Row;

/// The source of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A flag on the command line.
    Flag,
    /// `-o` on the command line, or in fstab.
    MinusO,
    /// The environment variable of this name.
    Environment(String),
    /// The user's or the system's file, with this path.
    File(PathBuf),
    /// The option of this name implies the value.
    Implied(&'static str),
    /// The default in the table.
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

/// An option as a source gives it; its value is not checked yet.
#[derive(Clone, Debug)]
pub struct UncheckedOption {
    /// The option's row of the table.
    pub row: &'static Row,
    /// The value as written.
    pub text: OsString,
}
