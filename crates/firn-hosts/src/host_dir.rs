//! The directory of a host in a backing, `.firn/host-NAME/`: its lease, how it mounts ([`crate::publish_terms`]), and what its
//! transactions keep.
//!
//! A host has one such directory in a backing, whatever it uses the backing for. Lanes of a placement have none: the
//! backing that they belong to tells which hosts live.

use firn_backing::{Backing, Errno};

use crate::own::{self, OwnError, TOP};

/// Before the name of a host, in the name of its directory.
const PREFIX: &str = "host-";

/// The name of a host's directory.
pub fn host_dir_name(host: &str) -> String {
    format!("{PREFIX}{host}")
}

/// The host that has the directory of this name; `None`: it is no host's.
pub fn host_of_dir(name: &str) -> Option<&str> {
    name.strip_prefix(PREFIX)
}

/// Opens the directory of a host, made if it is not there.
pub fn make_host_dir<B: Backing>(base: &B, host: &str) -> Result<B::Inode, OwnError> {
    let top = own::dir(base, &base.root(), TOP)?;
    own::dir(base, &top, &host_dir_name(host)).map_err(|error| error.below(TOP))
}

/// The directory of a host, if it is there.
pub fn find_host_dir<B: Backing>(base: &B, host: &str) -> Result<Option<B::Inode>, OwnError> {
    let Some((top, _)) = own::find_dir(base, &base.root(), TOP)? else {
        return Ok(None);
    };
    let found = own::find_dir(base, &top, &host_dir_name(host));
    Ok(found.map_err(|error| error.below(TOP))?.map(|(dir, _)| dir))
}

/// The hosts that have a directory, alive or not.
pub fn list_hosts<B: Backing>(base: &B) -> Result<Vec<String>, OwnError> {
    let Some((top, _)) = own::find_dir(base, &base.root(), TOP)? else {
        return Ok(Vec::new());
    };
    Ok(list_hosts_in(base, &top)?)
}

/// The hosts that have a directory in an open `.firn/`.
pub(crate) fn list_hosts_in<B: Backing>(base: &B, top: &B::Inode) -> Result<Vec<String>, Errno> {
    let names = own::list(base, top)?.into_iter();
    let names = names.filter_map(|(name, ..)| String::from_utf8(name).ok());
    Ok(names
        .filter_map(|name| host_of_dir(&name).map(str::to_owned))
        .collect())
}
