//! Paths below the root of a tree, and the private ones of files that have no name in the backing yet, or any more.

use crate::id::{StubId, id_text};

/// A path below the root, without slashes at its ends; empty: the root.
pub(crate) type Rel = Vec<u8>;

/// Where files wait in the backing for the first name that is synced, and where removed ones stay that are still open.
pub(crate) const PRIVATE: &[u8] = b".firn/stub";

/// The directory part and the last name of a path.
pub(crate) fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => (
            path.get(..at).unwrap_or_default(),
            path.get(at + 1..).unwrap_or_default(),
        ),
        None => (b"", path),
    }
}

/// The path of a name in a directory.
pub(crate) fn join(dir: &[u8], name: &[u8]) -> Rel {
    if dir.is_empty() {
        name.to_vec()
    } else {
        [dir, b"/", name].concat()
    }
}

/// Where a file waits in the backing.
pub(crate) fn private_path(id: StubId) -> Rel {
    join(PRIVATE, id_text(id).as_bytes())
}

/// Whether a path is one of [`private_path`].
pub(crate) fn is_private(path: &[u8]) -> bool {
    path.strip_prefix(PRIVATE)
        .is_some_and(|rest| rest.first() == Some(&b'/'))
}
