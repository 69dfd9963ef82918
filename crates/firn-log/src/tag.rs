//! The tag: an attribute of a plain file that names a container with bytes of the file.
//!
//! The *plain file* is the ordinary file with the name and the attributes. A *container* is a directory with logs,
//! which have newer bytes of the file.
//!
//! Containers lie below `.firn/log` in the backing. A user with permission to rename there may move that directory
//! away. The plain file would then be read as if it had all bytes. Because of the tag, an open fails with EIO until the
//! directory is back.
//!
//! Rules
//! * A host sets the tag after the first sync of its log, and removes it before the container counts as flat.
//! * A tag that names another directory than the present one means that containers are missing. A tag that names the
//!   present directory has no meaning: the listing of that directory shows which containers exist.
//! * A file system without attributes has no tags. A file that firnd may not change gets no tag.

use std::ffi::OsStr;

use firn_backing::{Attr, Backing, Errno, Result};

use crate::file_id::FileId;
use crate::lag::is_gone;

/// Name of the attribute.
const NAME: &str = "user.firn.logged";

/// Identity of the directory with all containers, as a tag stores it: its inode number and its birth time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ContainersDirId {
    ino: u64,
    birth: u64,
}

impl ContainersDirId {
    pub(crate) fn from_attr(attr: &Attr) -> Self {
        Self {
            ino: attr.ino,
            birth: attr.btime.map_or(0, |time| time.to_ns()),
        }
    }

    /// Returns the text of the tag that names a container in this directory.
    fn encode_tag(self, container: &str) -> String {
        format!("{:016x}-{:016x} {container}", self.ino, self.birth)
    }
}

/// Returns whether an attribute is the tag. Programs do not see the tag through a mount.
pub(crate) fn is_tag(attribute: &OsStr) -> bool {
    attribute == NAME
}

/// Removes the tag's name from a list of attribute names, each of which ends with a zero byte.
pub(crate) fn without_tag(names: &[u8]) -> Vec<u8> {
    let split_names = names.split_inclusive(|byte| *byte == 0);
    let other_names = split_names.filter(|name| name.strip_suffix(b"\0") != Some(NAME.as_bytes()));
    other_names.flatten().copied().collect()
}

/// Sets the tag of a plain file. A failure is only logged, because the tag is an extra safeguard.
pub(crate) fn set<B: Backing>(
    backing: &B,
    inode: &B::Inode,
    containers_dir_id: ContainersDirId,
    container: &str,
) {
    let tag = containers_dir_id.encode_tag(container);
    if let Err(error) = backing.set_xattr(inode, OsStr::new(NAME), tag.as_bytes(), 0) {
        tracing::debug!(container, %error, "the plain file of a container gets no tag");
    }
}

/// Removes the tag if it names this container. A tag that names a later container stays.
pub(crate) fn clear<B: Backing>(backing: &B, inode: &B::Inode, container: &str) -> Result<()> {
    match load(backing, inode)? {
        Some(tag) if tag.container == container => {}
        _ => return Ok(()),
    }
    match backing.remove_xattr(inode, OsStr::new(NAME)) {
        Err(Errno::NODATA) => Ok(()),
        Err(error) if is_gone(error) => Ok(()),
        removed => removed,
    }
}

/// Fails with EIO if the tag of a file, an attribute, names a container (directory with logs) in another directory than
/// `containers_dir_id`. Called for a file that has no containers in that directory.
pub(crate) fn check<B: Backing>(
    backing: &B,
    inode: &B::Inode,
    id: FileId,
    containers_dir_id: ContainersDirId,
) -> Result<()> {
    let Some(Tag {
        containers_dir_id: tagged_dir_id,
        container,
    }) = load(backing, inode)?
    else {
        return Ok(());
    };
    // A tag may have been copied with its file. It then names a container of another file.
    let is_of_file = FileId::parse_container_name(container.as_bytes())
        .is_some_and(|(tagged_id, _)| tagged_id == id);
    if !is_of_file || tagged_dir_id == containers_dir_id {
        return Ok(());
    }
    tracing::error!(
        ino = id.ino,
        container,
        "bytes of a file are in logs that are not in .firn/log: that directory was renamed or replaced; put the \
         earlier .firn back, or remove the attribute {NAME} of the file to read it without those bytes"
    );
    Err(Errno::IO)
}

/// Reads the tag of a plain file. Returns `None` if it has none or the tag cannot be read.
fn load<B: Backing>(backing: &B, inode: &B::Inode) -> Result<Option<Tag>> {
    match backing.get_xattr(inode, OsStr::new(NAME)) {
        Ok(tag) => Ok(decode(&tag)),
        // Attributes are not supported or not permitted here.
        Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS | Errno::ACCESS | Errno::PERM) => {
            Ok(None)
        }
        Err(error) if is_gone(error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A decoded tag.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Tag {
    /// The directory with the container.
    containers_dir_id: ContainersDirId,
    /// Name of the container.
    container: String,
}

/// Decodes a tag. Returns `None` if it is malformed.
fn decode(tag: &[u8]) -> Option<Tag> {
    let (dir_id, container) = std::str::from_utf8(tag).ok()?.split_once(' ')?;
    let (ino, birth) = dir_id.split_once('-')?;
    let containers_dir_id = ContainersDirId {
        ino: u64::from_str_radix(ino, 16).ok()?,
        birth: u64::from_str_radix(birth, 16).ok()?,
    };
    Some(Tag {
        containers_dir_id,
        container: container.to_owned(),
    })
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
        let containers_dir_id = ContainersDirId {
            ino: 7,
            birth: u64::MAX,
        };
        let tag = containers_dir_id.encode_tag("container");
        let decoded = Tag {
            containers_dir_id,
            container: "container".to_owned(),
        };
        assert_eq!(decode(tag.as_bytes()), Some(decoded));
        for damaged in ["", "1-2", "x-1 c", "1 c", "\u{fffd}"] {
            assert_eq!(decode(damaged.as_bytes()), None, "{damaged}");
        }
    }
}
