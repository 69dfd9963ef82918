//! Checks the owner and the permissions of a file or directory before Firn uses its content.
//!
//! Any user may create names in `/dev/shm`, in `/tmp`, in a group's project directory, and therefore in many backings
//! (the directories that mounts serve). An object that Firn finds there under one of its names may have been planted.
//! The functions of this crate therefore open everything that Firn owns: the runtime directory, the arena (shared
//! memory with bytes that are in no file yet), the spill file (on disk, for bytes without room there), `.firn/`,
//! backups and sockets.
//!
//! Promises
//! * No symbolic link is followed in the last component. The check is made on the descriptor and never on a path, so
//!   the checked object is the opened object.
//! * Only objects that belong to the effective user and are closed to group and others are opened. A wrong mode is
//!   never repaired, because other users may already have put files into such a directory.
//! * Files that Firn keeps at a path outside the backing lie where no other user can replace them ([`check_place`]).
//!   Objects below a checked directory are reached by its descriptor ([`open_beneath`]).
//! * [`FileMetadata::check`] and [`open_dir_raw`] allocate no memory and do not change `errno`, for the preload library.
//!
//! docs/SECURITY.md describes the attackers and the defences.

mod beneath;
mod component;
mod open;
mod peer;
mod place;

pub use beneath::{ObjectId, list_names, remove_beneath, remove_object, visit_own};
pub use beneath::{open_beneath, open_dir_beneath, open_parent_beneath};
pub use component::{BadComponent, check_component, is_component};
pub use open::{RawError, TrustError, create_private_dir, create_private_file};
pub use open::{
    open_dir_raw, open_file_raw, open_private_dir, open_private_dir_of, open_private_file,
};
pub use peer::{Peer, PeerError, check_peer, socket_peer};
pub use place::{check_place, check_place_of, check_shared_parent};
use rustix::fs::{FileType, Stat};

/// Permission bits of group and others, which a private object must not have.
const GROUP_AND_OTHERS: u32 = 0o077;
/// Permission bits that let group and others write.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// The kind of object that is expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// A directory.
    Directory,
    /// A regular file with one name.
    File,
    /// A symbolic link. Its permission bits are not checked, because they mean nothing.
    Symlink,
}

/// The attributes from fstat(2) that decide whether an object is trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileMetadata {
    /// `st_mode`: type and permission bits.
    pub mode: u32,
    /// User id of the owner.
    pub uid: u32,
    /// Number of names (hard links).
    pub nlink: u64,
}

/// The reason why an object is not trusted. The text continues a sentence that begins with the name of the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Distrust {
    /// The object is of another kind.
    #[error("is {found} instead of {expected}")]
    Kind {
        /// The kind that was found, such as "a symbolic link".
        found: &'static str,
        /// The expected kind.
        expected: &'static str,
    },
    /// The object belongs to another user.
    #[error("belongs to user {found} instead of user {expected}")]
    Owner {
        /// The owner.
        found: u32,
        /// The expected owner.
        expected: u32,
    },
    /// Other users may change or read the object.
    #[error("has mode {found:04o}, which lets others in")]
    Mode {
        /// Permission bits of the object.
        found: u32,
    },
    /// The object may have another name in a place that other users can reach.
    #[error("has {found} names (hard links) instead of one")]
    Links {
        /// Number of names.
        found: u64,
    },
    /// Other users may rename and remove the entries of the directory, and replace them.
    #[error("has mode {found:04o}: others may replace what is in it, because it has no sticky bit")]
    Replaceable {
        /// Permission bits of the directory.
        found: u32,
    },
}

impl FileMetadata {
    /// Takes the attributes from a stat structure.
    pub fn from_stat(stat: &Stat) -> Self {
        // The width of these fields differs between architectures.
        #[allow(clippy::unnecessary_cast)]
        Self {
            mode: stat.st_mode as u32,
            uid: stat.st_uid,
            nlink: stat.st_nlink as u64,
        }
    }

    /// Checks that the object is `expected`, belongs to user `uid`, and is closed to all others.
    pub fn check(&self, expected: Expected, uid: u32) -> Result<(), Distrust> {
        self.check_kind(expected)?;
        if self.uid != uid {
            return Err(Distrust::Owner {
                found: self.uid,
                expected: uid,
            });
        }
        if expected != Expected::Symlink && self.mode & GROUP_AND_OTHERS != 0 {
            return Err(Distrust::Mode {
                found: self.mode & 0o7777,
            });
        }
        if expected == Expected::File && self.nlink != 1 {
            return Err(Distrust::Links { found: self.nlink });
        }
        Ok(())
    }

    /// Checks that no other user can replace Firn's entries in this directory.
    ///
    /// The directory must belong to `uid` or root. Group and others must not have write permission, unless the sticky
    /// bit is set: then they can only add names.
    pub fn check_parent(&self, uid: u32) -> Result<(), Distrust> {
        const STICKY: u32 = 0o1000;
        self.check_kind(Expected::Directory)?;
        self.check_owner_or_root(uid)?;
        if self.mode & WRITABLE_BY_OTHERS != 0 && self.mode & STICKY == 0 {
            return Err(Distrust::Replaceable {
                found: self.mode & 0o7777,
            });
        }
        Ok(())
    }

    /// Checks that the object is a program file that only `uid` and root can change.
    pub fn check_program(&self, uid: u32) -> Result<(), Distrust> {
        self.check_kind(Expected::File)?;
        self.check_owner_or_root(uid)?;
        if self.mode & WRITABLE_BY_OTHERS != 0 {
            return Err(Distrust::Mode {
                found: self.mode & 0o7777,
            });
        }
        Ok(())
    }

    /// Checks that the object belongs to user `uid` or to root.
    fn check_owner_or_root(&self, uid: u32) -> Result<(), Distrust> {
        if self.uid != uid && self.uid != 0 {
            return Err(Distrust::Owner {
                found: self.uid,
                expected: uid,
            });
        }
        Ok(())
    }

    fn check_kind(&self, expected: Expected) -> Result<(), Distrust> {
        let expected_type = match expected {
            Expected::Directory => FileType::Directory,
            Expected::File => FileType::RegularFile,
            Expected::Symlink => FileType::Symlink,
        };
        let found_type = FileType::from_raw_mode(self.mode);
        if found_type != expected_type {
            return Err(Distrust::Kind {
                found: words_for_type(found_type),
                expected: words_for_type(expected_type),
            });
        }
        Ok(())
    }
}

/// Returns a type of object as words for a message.
fn words_for_type(file_type: FileType) -> &'static str {
    match file_type {
        FileType::RegularFile => "a regular file",
        FileType::Directory => "a directory",
        FileType::Symlink => "a symbolic link",
        FileType::Fifo => "a named pipe",
        FileType::Socket => "a socket",
        FileType::CharacterDevice => "a character device",
        FileType::BlockDevice => "a block device",
        FileType::Unknown => "an object of an unknown kind",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIR: FileMetadata = FileMetadata {
        mode: libc::S_IFDIR | 0o700,
        uid: 7,
        nlink: 5,
    };
    const FILE: FileMetadata = FileMetadata {
        mode: libc::S_IFREG | 0o600,
        uid: 7,
        nlink: 1,
    };

    #[test]
    fn a_program_is_believed_if_only_its_user_and_root_can_change_it() {
        let of = |mode, uid| FileMetadata { mode, uid, ..FILE };
        assert_eq!(of(libc::S_IFREG | 0o755, 7).check_program(7), Ok(()));
        assert_eq!(of(libc::S_IFREG | 0o755, 0).check_program(7), Ok(()));
        assert!(of(libc::S_IFREG | 0o755, 8).check_program(7).is_err());
        assert!(of(libc::S_IFREG | 0o775, 7).check_program(7).is_err());
        assert!(of(libc::S_IFREG | 0o757, 0).check_program(7).is_err());
        assert!(DIR.check_program(7).is_err());
    }

    #[test]
    fn only_what_is_ours_and_closed_to_others_is_believed() {
        assert_eq!(DIR.check(Expected::Directory, 7), Ok(()));
        assert_eq!(FILE.check(Expected::File, 7), Ok(()));
        assert!(matches!(
            FILE.check(Expected::Directory, 7),
            Err(Distrust::Kind { .. })
        ));
        assert_eq!(
            DIR.check(Expected::Directory, 0),
            Err(Distrust::Owner {
                found: 7,
                expected: 0
            })
        );
        for mode in [0o701, 0o710, 0o720, 0o604] {
            let open = FileMetadata {
                mode: libc::S_IFDIR | mode,
                ..DIR
            };
            assert_eq!(
                open.check(Expected::Directory, 7),
                Err(Distrust::Mode { found: mode })
            );
        }
        let linked = FileMetadata { nlink: 2, ..FILE };
        assert_eq!(
            linked.check(Expected::File, 7),
            Err(Distrust::Links { found: 2 })
        );
    }

    #[test]
    fn a_parent_may_be_shared_only_with_the_sticky_bit() {
        let of = |uid, mode| FileMetadata {
            mode: libc::S_IFDIR | mode,
            uid,
            nlink: 2,
        };
        for (uid, mode) in [(7, 0o755), (0, 0o1777), (7, 0o1777), (0, 0o755)] {
            assert_eq!(of(uid, mode).check_parent(7), Ok(()), "{uid} {mode:o}");
        }
        for mode in [0o777, 0o775, 0o722] {
            assert_eq!(
                of(7, mode).check_parent(7),
                Err(Distrust::Replaceable { found: mode })
            );
        }
        assert_eq!(
            of(8, 0o755).check_parent(7),
            Err(Distrust::Owner {
                found: 8,
                expected: 7
            })
        );
        assert!(matches!(FILE.check_parent(7), Err(Distrust::Kind { .. })));
    }
}
