//! Paths in a stub tree, and private paths in the *backing*, the directory that the mount serves.
//!
//! A *stub* is an empty file on tmpfs that stands for a file of the backing. The names of stubs are copied (synced) to
//! the backing from time to time. A file has a *private path* in the backing before the name of its stub is synced for
//! the first time. It has one again if the stub was removed and is still open.

use crate::id::{StubId, format_id};

/// A path relative to the root, without slashes at its ends. Empty: the root.
pub(crate) type RelPath = Vec<u8>;

/// Directory of the private paths in the backing.
pub(crate) const PRIVATE: &[u8] = b".firn/stub";

/// Splits a path into its directory and its last name.
pub(crate) fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => (
            path.get(..slash).unwrap_or_default(),
            path.get(slash + 1..).unwrap_or_default(),
        ),
        None => (b"", path),
    }
}

/// The path of a name in a directory.
pub(crate) fn join(dir: &[u8], name: &[u8]) -> RelPath {
    if dir.is_empty() {
        name.to_vec()
    } else {
        [dir, b"/", name].concat()
    }
}

/// Returns the private path of a stub's file.
pub(crate) fn private_path(id: StubId) -> RelPath {
    join(PRIVATE, format_id(id).as_bytes())
}

/// Whether a path is a private one.
pub(crate) fn is_private(path: &[u8]) -> bool {
    path.strip_prefix(PRIVATE)
        .is_some_and(|rest| rest.first() == Some(&b'/'))
}
