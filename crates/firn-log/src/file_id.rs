//! The identity of a logged file (a file with bytes in logs, one log for each host), and the names of its containers
//! and of their directory.
//!
//! A *container* is a directory with logs of the file, for one *generation*. A file gets the next generation when a
//! host writes to it while other hosts copy the newest one to the plain file, the ordinary file with the name.

use std::ffi::OsStr;

use firn_backing::{Attr, Backing, Errno, Kind, Result};

/// Attribute with a file's number (8 bytes), on file systems without birth times.
const NUMBER_ATTRIBUTE: &str = "user.firn.log";

/// The identity of a file: its inode number, and a value that differs for a later file with the same inode number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct FileId {
    pub(crate) ino: u64,
    /// Birth time in nanoseconds, or the number from the attribute; 0 if the file has neither.
    pub(crate) birth: u64,
}

impl FileId {
    /// Returns the identity of a file, or `None` for another kind of object.
    ///
    /// Inode numbers are reused. On a file system without birth times, each file that may get containers therefore has
    /// a random number in an attribute.
    pub(crate) fn read<B: Backing>(
        backing: &B,
        inode: &B::Inode,
        attr: &Attr,
    ) -> Result<Option<Self>> {
        if attr.kind != Kind::File {
            return Ok(None);
        }
        let birth = match attr.btime {
            Some(time) => time.to_ns(),
            None => load_number(backing, inode)?.unwrap_or(0),
        };
        let ino = attr.ino;
        Ok(Some(Self { ino, birth }))
    }

    /// Returns the identity of a file that is to get containers, the directories with its logs. If the file system
    /// stores no birth times, assigns a number to the file. Returns `None` for an object that is no file.
    pub(crate) fn read_or_assign<B: Backing>(
        backing: &B,
        inode: &B::Inode,
        attr: &Attr,
    ) -> Result<Option<Self>> {
        let id = Self::read(backing, inode, attr)?;
        if attr.btime.is_some() || id.is_none_or(|id| id.birth != 0) {
            return Ok(id);
        }
        // 0 stands for "no number", so it is never assigned.
        let number = getrandom::u64().map_err(|_| Errno::IO)?.max(1);
        let name = OsStr::new(NUMBER_ATTRIBUTE);
        match backing.set_xattr(inode, name, &number.to_le_bytes(), libc::XATTR_CREATE) {
            // Another host may have assigned a number to the file meanwhile, which counts.
            Ok(()) | Err(Errno::EXIST) => Self::read(backing, inode, attr),
            Err(error) => {
                tracing::error!(ino = attr.ino, %error, "the file system stores neither birth times nor \
                    `{NUMBER_ATTRIBUTE}`: layout=log cannot distinguish a file from a removed one with its inode number");
                Err(error)
            }
        }
    }

    /// Returns the name of the file's directory in `.firn/log`.
    pub(crate) fn dir_name(self) -> String {
        format!("{:016x}-{:016x}", self.ino, self.birth)
    }

    /// Returns the name of a container in that directory. The name includes the directory's name, so a message can name
    /// a container alone.
    pub(crate) fn container_name(self, generation: u32) -> String {
        format!("{}-{generation:08x}", self.dir_name())
    }

    /// Parses the name of a file's directory in `.firn/log`.
    pub(crate) fn parse_dir_name(name: &[u8]) -> Option<Self> {
        let name = std::str::from_utf8(name).ok()?;
        let (ino, birth) = name.split_once('-')?;
        let id = Self {
            ino: u64::from_str_radix(ino, 16).ok()?,
            birth: u64::from_str_radix(birth, 16).ok()?,
        };
        (id.dir_name() == name).then_some(id)
    }

    /// Parses the name of a container into its file and generation.
    pub(crate) fn parse_container_name(name: &[u8]) -> Option<(Self, u32)> {
        let name = std::str::from_utf8(name).ok()?;
        let (dir, generation) = name.rsplit_once('-')?;
        let id = Self::parse_dir_name(dir.as_bytes())?;
        let generation = u32::from_str_radix(generation, 16).ok()?;
        (id.container_name(generation) == name).then_some((id, generation))
    }
}

/// Reads the number of a file from its attribute.
fn load_number<B: Backing>(backing: &B, inode: &B::Inode) -> Result<Option<u64>> {
    match backing.get_xattr(inode, OsStr::new(NUMBER_ATTRIBUTE)) {
        Ok(bytes) => Ok(bytes.try_into().ok().map(u64::from_le_bytes)),
        Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns whether a name in `.firn/log` is that of a file's directory.
pub fn is_file_dir(name: &[u8]) -> bool {
    FileId::parse_dir_name(name).is_some()
}
