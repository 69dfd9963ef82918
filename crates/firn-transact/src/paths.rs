//! Paths relative to the backing, as bytes.
//!
//! A path is a list of names with one slash between two names and none at the ends. The path of the backing's top is
//! empty.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

/// Returns the path of the directory that contains the object at `path`; empty for an object in the top.
pub fn parent_of(path: &[u8]) -> &[u8] {
    let slash = path.iter().rposition(|&byte| byte == b'/');
    &path[..slash.unwrap_or(0)]
}

/// Returns the last name of a path; `None` for the top.
pub(crate) fn last_name(path: &[u8]) -> Option<OsString> {
    let name = last_name_bytes(path);
    (!name.is_empty()).then(|| OsStr::from_bytes(name).to_owned())
}

/// Returns the bytes of the last name of a path; empty for the top.
pub(crate) fn last_name_bytes(path: &[u8]) -> &[u8] {
    let slash = path.iter().rposition(|&byte| byte == b'/');
    slash.map_or(path, |slash| &path[slash + 1..])
}

/// Returns the path of `name` in the directory at `parent`.
pub(crate) fn join(parent: &[u8], name: &[u8]) -> Vec<u8> {
    let slash: &[u8] = if parent.is_empty() { b"" } else { b"/" };
    [parent, slash, name].concat()
}

/// Returns the names on the way from the top to the object at `path`.
pub(crate) fn names_in(path: &[u8]) -> impl Iterator<Item = &OsStr> {
    let names = path.split(|&byte| byte == b'/');
    names.filter(|name| !name.is_empty()).map(OsStr::from_bytes)
}
