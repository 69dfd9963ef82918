//! Topics of calls: calls of the backing (the directory that the mount serves) that may hang for the same reason have
//! the same topic.
//!
//! The workers, a pool of threads, limit how many calls of one topic run at a time. So a hanging file blocks few
//! threads.

use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};

use firn_engine::InodeId;

/// What a call may wait for. No call waits for a later call of the same topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Topic {
    /// A file or directory: its data, its attributes, and the names in it.
    Inode(InodeId),
    /// The object that has a name in a directory: the directory, and a hash of the name.
    Name(InodeId, u64),
    /// Pages of a file in the kernel's cache. A read of the file holds them locked.
    Pages(InodeId),
    /// The backing as a whole.
    Backing,
}

impl Topic {
    /// Makes the [`Topic::Name`] of a name.
    pub(crate) fn name(parent: InodeId, name: &OsStr) -> Self {
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        Self::Name(parent, hasher.finish())
    }
}

impl From<Topic> for firn_workers::Topic {
    fn from(topic: Topic) -> Self {
        let (kind, id, part) = match topic {
            Topic::Inode(inode) => (0, inode.0, 0),
            Topic::Name(parent, hash) => (1, parent.0, hash),
            Topic::Pages(inode) => (2, inode.0, 0),
            Topic::Backing => (3, 0, 0),
        };
        Self { kind, id, part }
    }
}
