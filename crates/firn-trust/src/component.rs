//! Checks names in stored records: each must be one path component, so that it cannot lead out of its directory.

use std::ffi::OsStr;

/// Error for a stored name that would lead out of its directory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a stored name is not a single path component: {name:?}")]
pub struct BadComponent {
    /// The name, in which invalid UTF-8 is replaced.
    pub name: String,
}

/// Returns whether `name` is a single path component: not empty, not `.` or `..`, and without slash and NUL.
pub fn is_component(name: &[u8]) -> bool {
    !matches!(name, b"" | b"." | b"..") && !name.iter().any(|byte| matches!(byte, b'/' | 0))
}

/// Checks a name that was decoded from a record, and returns it. A checked name cannot lead out of its directory.
pub fn check_component(name: &[u8]) -> Result<&OsStr, BadComponent> {
    use std::os::unix::ffi::OsStrExt;
    if is_component(name) {
        return Ok(OsStr::from_bytes(name));
    }
    Err(BadComponent {
        name: String::from_utf8_lossy(name).into_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_leave_a_directory_are_refused() {
        for name in [
            &b""[..],
            b".",
            b"..",
            b"/",
            b"a/b",
            b"../x",
            b"/etc",
            b"a\0b",
        ] {
            assert!(check_component(name).is_err(), "{name:?}");
        }
        for name in [&b"a"[..], b"...", b"..a", b"a b", b"\xff", b".firn"] {
            assert!(check_component(name).is_ok(), "{name:?}");
        }
    }
}
