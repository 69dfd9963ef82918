//! What tokens have in the backing: `.firn/tokens/`, whichever service keeps them.

use crate::own::{self, TOP};
use crate::{OwnError, VoteDir};
use firn_backing::{Backing, Errno};

const DIR: &str = "tokens";
/// Put once: the name of the backing's tokens outside of it.
const GROUP: &str = "group";
/// Hexadecimal digits of that name.
const GROUP_DIGITS: usize = 16;

/// Opens the directory, made if it is not there.
pub fn make_dir<B: Backing>(base: &B) -> Result<B::Inode, OwnError> {
    let top = own::dir(base, &base.root(), TOP)?;
    own::dir(base, &top, DIR).map_err(|error| error.below(TOP))
}

/// A name for the tokens of this backing, the same on all hosts: the first one makes it up.
pub fn find_group<B: Backing>(base: &B, host: &str) -> Result<String, OwnError> {
    let top = own::dir(base, &base.root(), TOP)?;
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
