//! Which file a container is of, and the names of containers and of their directories.

use std::ffi::OsStr;

use firn_backing::{Attr, Backing, Errno, Kind, Result};

/// The attribute with a file's number, 8 bytes.
const NUMBER: &str = "user.firn.log";

/// Which file a container is of: an inode number, and what tells it from a later file with the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct FileId {
    pub(crate) ino: u64,
    pub(crate) birth: u64,
}

impl FileId {
    /// Which file an inode is; none if it is no file.
    ///
    /// Where a file system does not tell when a file was made, a file that has or may get containers has a number of
    /// its own in an attribute: inode numbers are used again.
    pub(crate) fn of<B: Backing>(base: &B, inode: &B::Inode, attr: &Attr) -> Result<Option<Self>> {
        if attr.kind != Kind::File {
            return Ok(None);
        }
        let birth = match attr.btime {
            Some(time) => time.to_ns(),
            None => load_number(base, inode)?.unwrap_or(0),
        };
        let ino = attr.ino;
        Ok(Some(Self { ino, birth }))
    }

    /// The id of a file that is to get containers; assigns a number if it needs one.
    pub(crate) fn assign<B: Backing>(
        base: &B,
        inode: &B::Inode,
        attr: &Attr,
    ) -> Result<Option<Self>> {
        let id = Self::of(base, inode, attr)?;
        if attr.btime.is_some() || id.is_none_or(|id| id.birth != 0) {
            return Ok(id);
        }
        // 0 is none.
        let number = getrandom::u64().map_err(|_| Errno::IO)?.max(1);
        let stored = number.to_le_bytes();
        match base.set_xattr(inode, OsStr::new(NUMBER), &stored, libc::XATTR_CREATE) {
            // Another host was first.
            Ok(()) | Err(Errno::EXIST) => Self::of(base, inode, attr),
            Err(error) => {
                tracing::error!(ino = attr.ino, %error, "the file system tells neither when a file was made nor \
                    keeps `{NUMBER}`: layout=log cannot tell files with the same inode number apart");
                Err(error)
            }
        }
    }

    /// Name of the directory in `.firn/log` that has the containers.
    pub(crate) fn dir_name(self) -> String {
        format!("{:016x}-{:016x}", self.ino, self.birth)
    }

    /// Name of a container in that directory. It has the name of the file too, so messages need no path.
    pub(crate) fn container_name(self, generation: u32) -> String {
        format!("{}-{generation:08x}", self.dir_name())
    }

    /// The file that a directory in `.firn/log` is of.
    pub(crate) fn of_dir(name: &[u8]) -> Option<Self> {
        let name = std::str::from_utf8(name).ok()?;
        let (ino, birth) = name.split_once('-')?;
        let id = Self {
            ino: u64::from_str_radix(ino, 16).ok()?,
            birth: u64::from_str_radix(birth, 16).ok()?,
        };
        (id.dir_name() == name).then_some(id)
    }

    /// The file and the generation that a container's name is of.
    pub(crate) fn of_container(name: &[u8]) -> Option<(Self, u32)> {
        let name = std::str::from_utf8(name).ok()?;
        let (dir, generation) = name.rsplit_once('-')?;
        let id = Self::of_dir(dir.as_bytes())?;
        let generation = u32::from_str_radix(generation, 16).ok()?;
        (id.container_name(generation) == name).then_some((id, generation))
    }
}

fn load_number<B: Backing>(base: &B, inode: &B::Inode) -> Result<Option<u64>> {
    match base.get_xattr(inode, OsStr::new(NUMBER)) {
        Ok(bytes) => Ok(bytes.try_into().ok().map(u64::from_le_bytes)),
        Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether a name in `.firn/log` is that of the directory of a file.
pub fn is_file_dir(name: &[u8]) -> bool {
    FileId::of_dir(name).is_some()
}
