//! The directory `.firn/tokens/` in the backing, the directory that a mount serves. It has the name that identifies
//! this backing at an external lock service, such as etcd, which keeps locks for several hosts.

use crate::own::{self, TOP};
use crate::{OwnError, VoteDir};
use firn_backing::{Backing, Errno};

/// Name of the directory in `.firn/`.
const DIR: &str = "tokens";
/// File that holds the group name: the prefix of all lock names of this backing at an external lock service. Hosts
/// create it once and never change it.
const GROUP: &str = "group";
/// Number of hexadecimal digits in the group name.
const GROUP_DIGITS: usize = 16;

/// Opens `.firn/tokens/`, and creates it if it does not exist.
pub fn make_dir<B: Backing>(base: &B) -> Result<B::Inode, OwnError> {
    let top = own::make_dir(base, &base.root(), TOP)?;
    own::make_dir(base, &top, DIR).map_err(|error| error.below(TOP))
}

/// Returns the group name of this backing: the prefix of all its lock names at an external lock service. The first host
/// that calls this generates the name at random; all hosts get the same name.
///
/// Fails with EBADMSG if the stored name does not have the form of a group name, and with EIO if a name that was just
/// stored is missing.
pub fn find_or_make_group<B: Backing>(base: &B, host: &str) -> Result<String, OwnError> {
    let top = own::make_dir(base, &base.root(), TOP)?;
    // Through a vote directory, the first host that stores a file decides its content for all hosts.
    let vote_dir = VoteDir::make(base, &top, DIR, host).map_err(|error| error.below(TOP))?;
    let read_group = || {
        vote_dir
            .read(GROUP)
            .map_err(|error| error.below(DIR).below(TOP))
    };
    let stored = match read_group()? {
        Some(stored) => stored,
        None => {
            let number = getrandom::u64().map_err(|_| Errno::IO)?;
            let group = format!("{number:0width$x}", width = GROUP_DIGITS);
            vote_dir.put_once(GROUP, group.as_bytes())?;
            // The stored name counts: another host may have put its name first. No host removes the file, so the file
            // must exist now.
            read_group()?.ok_or(Errno::IO)?
        }
    };
    match String::from_utf8(stored) {
        Ok(group) if is_group_name(&group) => Ok(group),
        _ => Err(Errno::BADMSG.into()),
    }
}

/// Returns whether a text has the form of a group name.
fn is_group_name(text: &str) -> bool {
    text.len() == GROUP_DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}
