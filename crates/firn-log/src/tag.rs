//! The tag of a plain file that has bytes in a container: an attribute that names the container and its directory.
//!
//! The directory with containers is in the backing. Another user with permission to rename there can take it away, and
//! the plain file alone would be read as if it were whole. With its tag the file is refused until the directory is
//! back.
//!
//! * A host sets the tag after the first sync of its log, and removes it before a container counts as flat.
//! * A tag that names another directory than the present one says that containers are missing. One that names the present
//!   directory says nothing: its listing tells.
//! * A file system without attributes keeps no tags, and a file that firnd may not change gets none.

use std::ffi::OsStr;

use firn_backing::{Attr, Backing, Errno, Result};

use crate::file_id::FileId;
use crate::lag::is_gone;

const NAME: &str = "user.firn.logged";

/// The directory with containers, as a tag names it: its inode number, and when it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Home {
    ino: u64,
    birth: u64,
}

impl Home {
    pub(crate) fn of(attr: &Attr) -> Self {
        Self {
            ino: attr.ino,
            birth: attr.btime.map_or(0, |time| time.to_ns()),
        }
    }

    fn tag(self, container: &str) -> String {
        format!("{:016x}-{:016x} {container}", self.ino, self.birth)
    }
}

/// Whether an attribute is the tag, which programs do not see through a mount.
pub(crate) fn is_tag(attribute: &OsStr) -> bool {
    attribute == NAME
}

/// Names of attributes, each ended by a zero byte, without that of the tag.
pub(crate) fn without_tag(names: &[u8]) -> Vec<u8> {
    let all = names.split_inclusive(|byte| *byte == 0);
    let others = all.filter(|name| name.strip_suffix(b"\0") != Some(NAME.as_bytes()));
    others.flatten().copied().collect()
}

/// Tags a plain file. A tag that cannot be set is none: the file has its bytes all the same.
pub(crate) fn set<B: Backing>(base: &B, inode: &B::Inode, home: Home, container: &str) {
    let tag = home.tag(container);
    if let Err(error) = base.set_xattr(inode, OsStr::new(NAME), tag.as_bytes(), 0) {
        tracing::debug!(container, %error, "the plain file of a container gets no tag");
    }
}

/// Removes the tag of a container that is flat. The tag of a later container stays.
pub(crate) fn clear<B: Backing>(base: &B, inode: &B::Inode, container: &str) -> Result<()> {
    let names_container = |(_, named): (Home, String)| named == container;
    if !load(base, inode)?.is_some_and(names_container) {
        return Ok(());
    }
    match base.remove_xattr(inode, OsStr::new(NAME)) {
        Err(Errno::NODATA) => Ok(()),
        Err(error) if is_gone(error) => Ok(()),
        removed => removed,
    }
}

/// EIO if a file without containers in `home` has bytes in a container elsewhere.
pub(crate) fn check<B: Backing>(base: &B, inode: &B::Inode, id: FileId, home: Home) -> Result<()> {
    let Some((other, container)) = load(base, inode)? else {
        return Ok(());
    };
    // One that was copied with its file says nothing of the copy.
    let is_of_file =
        FileId::of_container(container.as_bytes()).is_some_and(|(named, _)| named == id);
    if !is_of_file || other == home {
        return Ok(());
    }
    tracing::error!(
        ino = id.ino,
        container,
        "bytes of a file are in a container that is not in .firn/log: that directory was renamed or replaced; put the \
         earlier .firn back, or remove the attribute {NAME} of the file to read it without those bytes"
    );
    Err(Errno::IO)
}

fn load<B: Backing>(base: &B, inode: &B::Inode) -> Result<Option<(Home, String)>> {
    match base.get_xattr(inode, OsStr::new(NAME)) {
        Ok(tag) => Ok(decode(&tag)),
        // It has no name any more, or no attributes: its tag is unknown.
        Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS | Errno::ACCESS | Errno::PERM) => {
            Ok(None)
        }
        Err(error) if is_gone(error) => Ok(None),
        Err(error) => Err(error),
    }
}

fn decode(tag: &[u8]) -> Option<(Home, String)> {
    let (home, container) = std::str::from_utf8(tag).ok()?.split_once(' ')?;
    let (ino, birth) = home.split_once('-')?;
    let home = Home {
        ino: u64::from_str_radix(ino, 16).ok()?,
        birth: u64::from_str_radix(birth, 16).ok()?,
    };
    Some((home, container.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tag_is_left_out_of_a_list() {
        let all = b"user.a\0user.firn.logged\0user.firn.log\0";
        assert_eq!(without_tag(all), b"user.a\0user.firn.log\0");
        assert_eq!(without_tag(b""), b"");
    }

    #[test]
    fn a_tag_is_read_as_it_was_written() {
        let home = Home {
            ino: 7,
            birth: u64::MAX,
        };
        let tag = home.tag("container");
        assert_eq!(decode(tag.as_bytes()), Some((home, "container".to_owned())));
        for damaged in ["", "1-2", "x-1 c", "1 c", "\u{fffd}"] {
            assert_eq!(decode(damaged.as_bytes()), None, "{damaged}");
        }
    }
}
