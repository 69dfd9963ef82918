//! Quantities and names for people.

use std::path::Path;

pub use firn_format::quantity::{bytes, count, rate, seconds};
use firn_format::quote::quoted;
use firn_protocol::figures::Unit;

/// The value of a figure in the unit that its name says.
pub fn figure(name: &str, value: f64) -> String {
    match Unit::of(name) {
        Unit::BytesPerSecond => rate(value),
        Unit::Bytes => bytes(value as u64),
        Unit::Seconds => seconds(value),
        Unit::Count => value.to_string(),
    }
}

/// A name that cannot break a line or steer a terminal, and is shown like no other.
pub fn name(path: &str) -> String {
    quoted(path.as_bytes())
}

/// The same for a path.
pub fn path(path: &Path) -> String {
    quoted(path.as_os_str().as_encoded_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_break_its_line() {
        assert_eq!(name("a\nb\x1b[31m"), r"a\nb\x1b[31m");
    }
}
