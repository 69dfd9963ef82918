//! The mark of a file in a lane (a directory for the data of files): an extended attribute with the identity of the
//! symbolic link that leads to the file.
//!
//! A link in the primary (the directory with all names) counts as Firn's own only if the file has the matching mark.
//! The search for orphans uses the marks to find files whose link is gone.

use std::ffi::OsStr;

use firn_backing::{Backing, Errno, Result};

/// Name of the attribute. Users of [`crate::Lanes`] do not see it.
pub const XATTR: &str = "user.firn.link";

/// Length of a stored mark, in bytes.
const BYTES: usize = 24;

/// Identifies the link that a file in a lane belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Id of the primary that contains the link.
    pub primary: u128,
    /// Inode number of the link.
    pub link: u64,
}

impl Mark {
    fn to_bytes(self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        bytes[..16].copy_from_slice(&self.primary.to_le_bytes());
        bytes[16..].copy_from_slice(&self.link.to_le_bytes());
        bytes
    }

    /// Parses the bytes of a mark. Returns `None` if they have the wrong length.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (primary, link) = bytes.split_at_checked(16)?;
        Some(Self {
            primary: u128::from_le_bytes(primary.try_into().ok()?),
            link: u64::from_le_bytes(link.try_into().ok()?),
        })
    }
}

/// Writes the mark of a file.
pub fn write_mark<B: Backing>(lane: &B, file: &B::Inode, mark: Mark) -> Result<()> {
    lane.set_xattr(file, OsStr::new(XATTR), &mark.to_bytes(), 0)
}

/// Reads the mark of a file. Returns `None` if Firn did not place the file.
pub fn read_mark<B: Backing>(lane: &B, file: &B::Inode) -> Result<Option<Mark>> {
    match lane.get_xattr(file, OsStr::new(XATTR)) {
        Ok(bytes) => Ok(Mark::from_bytes(&bytes)),
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_read_as_it_was_written() {
        let mark = Mark {
            primary: u128::MAX / 3,
            link: 7 << 40,
        };
        assert_eq!(Mark::from_bytes(&mark.to_bytes()), Some(mark));
        assert_eq!(Mark::from_bytes(&mark.to_bytes()[1..]), None);
        assert_eq!(Mark::from_bytes(b""), None);
    }
}
