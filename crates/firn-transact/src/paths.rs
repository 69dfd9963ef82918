//! Paths relative to the backing, as bytes: names with single slashes between them, none for the top.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

/// Path of the directory that has the object at `path`.
pub fn parent_of(path: &[u8]) -> &[u8] {
    let slash = path.iter().rposition(|&byte| byte == b'/');
    &path[..slash.unwrap_or(0)]
}

/// The last name of a path; `None` for the top.
pub(crate) fn last_name(path: &[u8]) -> Option<OsString> {
    let name = path.rsplit(|&byte| byte == b'/').next()?;
    (!name.is_empty()).then(|| OsStr::from_bytes(name).to_owned())
}

/// The path of `name` in the directory at `parent`.
pub(crate) fn join(parent: &[u8], name: &[u8]) -> Vec<u8> {
    let slash: &[u8] = if parent.is_empty() { b"" } else { b"/" };
    [parent, slash, name].concat()
}

/// The names on the way from the top to the object at `path`.
pub(crate) fn names_in(path: &[u8]) -> impl Iterator<Item = &OsStr> {
    let names = path.split(|&byte| byte == b'/');
    names.filter(|name| !name.is_empty()).map(OsStr::from_bytes)
}
