//! The directory of a host in a backing, `.firn/host-NAME/`. A *backing* is the directory, perhaps shared by several
//! hosts, that a mount serves.
//!
//! The host's directory holds its *lease* (a locked file that shows that the host is alive), its *terms* (the mount
//! options that hosts compare, [`crate::publish_terms`]) and the state of its transactions.
//!
//! A host has one such directory in a backing, whatever it uses the backing for. A *lane* is a further directory on an
//! I/O server of its own. Lanes have no host directories; the backing that owns the lanes records which hosts are
//! alive.

use firn_backing::{Backing, Errno};

use crate::own::{self, OwnError, TOP};

/// Prefix of the name of a host's directory; the host's name follows.
const PREFIX: &str = "host-";

/// Returns the name of a host's directory.
pub fn host_dir_name(host: &str) -> String {
    format!("{PREFIX}{host}")
}

/// Returns the host whose directory has this name.
///
/// Returns `None` if the name is not the name of a host directory.
pub fn host_of_dir(name: &str) -> Option<&str> {
    name.strip_prefix(PREFIX)
}

/// Opens the directory of a host, and creates the directory if it does not exist.
pub fn make_host_dir<B: Backing>(base: &B, host: &str) -> Result<B::Inode, OwnError> {
    let top = own::make_dir(base, &base.root(), TOP)?;
    own::make_dir(base, &top, &host_dir_name(host)).map_err(|error| error.below(TOP))
}

/// Opens the directory of a host. Returns `None` if the directory does not exist.
pub fn find_host_dir<B: Backing>(base: &B, host: &str) -> Result<Option<B::Inode>, OwnError> {
    let Some((top, _)) = own::find_dir(base, &base.root(), TOP)? else {
        return Ok(None);
    };
    let found =
        own::find_dir(base, &top, &host_dir_name(host)).map_err(|error| error.below(TOP))?;
    Ok(found.map(|(dir, _attr)| dir))
}

/// Returns the names of all hosts that have a directory, whether they are alive or dead.
pub fn list_hosts<B: Backing>(base: &B) -> Result<Vec<String>, OwnError> {
    let Some((top, _)) = own::find_dir(base, &base.root(), TOP)? else {
        return Ok(Vec::new());
    };
    Ok(list_hosts_in(base, &top)?)
}

/// Returns the names of all hosts that have a directory in `top`, an open `.firn/`.
pub(crate) fn list_hosts_in<B: Backing>(base: &B, top: &B::Inode) -> Result<Vec<String>, Errno> {
    let mut hosts = Vec::new();
    for (name, ..) in own::list(base, top)? {
        let Ok(name) = String::from_utf8(name) else {
            continue;
        };
        if let Some(host) = host_of_dir(&name) {
            hosts.push(host.to_owned());
        }
    }
    Ok(hosts)
}
