//! What a request may wait for: requests that hang together have the same topic.

use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};

use firn_engine::InodeId;

/// What a call may hang for. No call waits for one that is begun later and has the same topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Topic {
    /// A file or directory: its data, its attributes, the names in it.
    Inode(InodeId),
    /// The object that has a name in a directory; the name as a hash.
    Name(InodeId, u64),
    /// Pages of a file in the kernel, which a read of the file holds locked.
    Pages(InodeId),
    /// The backing as a whole.
    Backing,
}

impl Topic {
    /// [`Topic::Name`].
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
