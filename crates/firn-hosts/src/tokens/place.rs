//! The directory `.firn/tokens/` in the backing. It has the name that identifies this backing at an outside lock service.

use crate::own::{self, TOP};
use crate::{OwnError, VoteDir};
use firn_backing::{Backing, Errno};

/// Name of the directory in `.firn/`.
const DIR: &str = "tokens";
/// File that holds the group name: the prefix of all lock names of this backing at an outside lock service. Hosts create it
/// once and never change it.
const GROUP: &str = "group";
/// Number of hexadecimal digits in the group name.
const GROUP_DIGITS: usize = 16;

/// Opens `.firn/tokens/`, and creates it if it does not exist.
pub fn make_dir<B: Backing>(base: &B) -> Result<B::Inode, OwnError> {
    let top = own::make_dir(base, &base.root(), TOP)?;
    own::make_dir(base, &top, DIR).map_err(|error| error.below(TOP))
}

/// Returns the group name of this backing. The first host that calls this generates the name at random; all hosts get
/// the same name. Fails with EBADMSG if the file holds no group name.
pub fn find_or_make_group<B: Backing>(base: &B, host: &str) -> Result<String, OwnError> {
    let top = own::make_dir(base, &base.root(), TOP)?;
    let in_top = |error: OwnError| error.below(TOP);
    let vote = VoteDir::make(base, &top, DIR, host).map_err(in_top)?;
    let in_dir = |error: OwnError| error.below(DIR).below(TOP);
    let stored = match vote.read(GROUP).map_err(in_dir)? {
        Some(stored) => stored,
        None => {
            let number = getrandom::u64().map_err(|_| Errno::IO)?;
            vote.put_once(GROUP, format!("{number:0GROUP_DIGITS$x}").as_bytes())?;
            vote.read(GROUP).map_err(in_dir)?.ok_or(Errno::IO)?
        }
    };
    match String::from_utf8(stored) {
        Ok(group) if is_group(&group) => Ok(group),
        _ => Err(Errno::BADMSG.into()),
    }
}

fn is_group(text: &str) -> bool {
    text.len() == GROUP_DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}
