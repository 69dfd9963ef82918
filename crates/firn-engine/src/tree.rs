//! The tree of names: inodes, their objects in the backing (the directory that the mount serves), paths below the
//! mount, and claims on paths. A *claim* says that a thread relies on a path, or is about to change it.
//!
//! This part uses only names and the backing. Open files and pending data belong to parts above it
//! ([`Namespace`](crate::Namespace)).

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use firn_backing::{Backing, Errno, Kind, is_below};
use firn_format::quote::quoted;

use crate::base::Base;
use crate::claims::PathClaims;
use crate::file::File;
use crate::names::{Fingerprint, Inode, Names};
use crate::size::whole_size;
use crate::{Cached, InodeId, Result};

/// The extended attribute with the capabilities of a file.
pub(crate) const CAPABILITIES: &str = "security.capability";

/// State of a file in the backing when a sync of it begins. The sync covers these contents.
#[derive(Clone, Copy)]
pub(crate) struct SyncSnapshot {
    pub fingerprint: Fingerprint,
    /// Length of the file in bytes.
    pub bytes: u64,
}

/// The known inodes and their paths.
pub struct NameTree<B: Backing> {
    /// Data that all parts share: the backing, the arena, options and counters.
    pub(crate) base: Arc<Base<B>>,
    /// The tables of inodes.
    pub(crate) names: Names<B>,
    /// Claims on paths. A thread claims that a path does not change while it writes the path to the journal; a rename
    /// claims to change its paths.
    pub(crate) claims: PathClaims,
}

impl<B: Backing> NameTree<B> {
    pub(crate) fn new(base: &Arc<Base<B>>, names: Names<B>) -> Self {
        Self {
            base: Arc::clone(base),
            names,
            claims: PathClaims::default(),
        }
    }

    /// Returns a path of an inode for messages, or of `name` in it if the inode is a directory. An unknown inode is
    /// shown as `(inode N)`.
    pub fn shown_path(&self, inode_id: InodeId, name: Option<&OsStr>) -> String {
        let mut path = match self.names.get(inode_id) {
            Some(inode) => inode.paths().into_iter().next().unwrap_or_default(),
            None => format!("(inode {})", inode_id.0).into_bytes(),
        };
        if let Some(name) = name {
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(name.as_encoded_bytes());
        }
        quoted(&path)
    }

    /// Returns a path of an inode below the mount, or `None` if no name of it is known.
    pub fn path_of(&self, id: InodeId) -> Option<Vec<u8>> {
        self.names.get(id)?.paths().into_iter().next()
    }

    /// Returns whether a name is known to lead to an object other than a directory. Makes no call of the backing.
    pub fn leads_to_file(&self, parent: InodeId, name: &OsStr) -> bool {
        let child = self.names.child(parent, name);
        child.is_some_and(|inode| inode.kind != Kind::Dir)
    }

    /// Returns the inode with this number. Fails with ESTALE if there is none.
    pub(crate) fn inode(&self, id: InodeId) -> Result<Arc<Inode<B>>> {
        self.names.get(id).ok_or(Errno::STALE)
    }

    /// Returns the object of an inode in the backing. Fails with ESTALE if no known name leads to it any more.
    pub(crate) fn object(&self, inode: &Inode<B>) -> Result<B::Inode> {
        self.names.find_object(&self.base.backing, inode)
    }

    /// Returns the object of an inode by its number.
    pub fn object_of(&self, id: InodeId) -> Result<B::Inode> {
        self.object(&*self.inode(id)?)
    }

    /// Returns the present fingerprint of a file's content in the backing.
    pub(crate) fn fingerprint(&self, inode: &Inode<B>) -> Result<Fingerprint> {
        Ok(self.take_sync_snapshot(inode)?.fingerprint)
    }

    /// Returns the state of the file in the backing, which a sync that begins now covers.
    pub(crate) fn take_sync_snapshot(&self, inode: &Inode<B>) -> Result<SyncSnapshot> {
        let attr = self.base.backing.attr(&self.object(inode)?)?;
        Ok(SyncSnapshot {
            fingerprint: Fingerprint::from_attr(&attr),
            bytes: attr.size,
        })
    }

    /// Returns the length of a file whose pending bytes end at `pending_end`.
    pub(crate) fn size_with_pending(&self, inode: &Inode<B>, pending_end: u64) -> Result<u64> {
        let attr = self.base.backing.attr(&self.object(inode)?)?;
        Ok(whole_size(&attr, pending_end))
    }

    /// Returns the inode of a path below the mount, looked up in the backing.
    pub(crate) fn inode_at(&self, path: &[u8]) -> Result<Arc<Inode<B>>> {
        let mut inode = Arc::clone(self.names.root());
        for name in path.split(|b| *b == b'/').filter(|name| !name.is_empty()) {
            // The kernel resolves these names itself. In a path from elsewhere they could lead out of the backing.
            if matches!(name, b"." | b"..") {
                return Err(Errno::NOENT);
            }
            inode = self.inode_in_dir(&inode, name)?;
        }
        Ok(inode)
    }

    pub(crate) fn inode_in_dir(&self, dir: &Arc<Inode<B>>, name: &[u8]) -> Result<Arc<Inode<B>>> {
        let name = OsStr::from_bytes(name);
        let (object, attr) = self.base.backing.lookup(&self.object(dir)?, name)?;
        Ok(self.names.register(object, &attr, dir, name, 0))
    }

    /// Returns the object of a path below the mount.
    pub fn object_at(&self, path: &[u8]) -> Result<B::Inode> {
        self.object(&*self.inode_at(path)?)
    }

    /// Returns the attributes and pages to drop from the kernel's cache for the object at a path; `None` if there is no
    /// object.
    pub fn cached_at(&self, path: &[u8]) -> Option<Cached> {
        self.inode_at(path)
            .ok()
            .map(|inode| Cached::Inode(inode.id))
    }

    /// Prevents renames of `path` and of the directories above it until the guard is dropped.
    pub fn prevent_renames_of(&self, path: &[u8]) -> impl Drop + '_ {
        let path = path.to_vec();
        self.claims.claim_unchanged(move || vec![path.clone()])
    }

    /// Returns whether an inode may be at or below `path`. An unknown inode, or one without a name, may be anywhere.
    /// Makes no call of the backing.
    pub fn may_be_at(&self, inode_id: InodeId, path: &[u8]) -> bool {
        if path.is_empty() {
            return true;
        }
        let Ok(inode) = self.inode(inode_id) else {
            return true;
        };
        let paths = inode.paths();
        paths.is_empty() || paths.iter().any(|known| is_below(known, path))
    }

    /// Returns whether a name leads to this inode in the backing.
    pub(crate) fn leads_to(&self, parent: &Arc<Inode<B>>, name: &OsStr, inode: &Inode<B>) -> bool {
        let result = self
            .object(parent)
            .and_then(|dir| self.base.backing.lookup(&dir, name));
        result.is_ok_and(|(_, attr)| inode.is_object(&attr))
    }

    /// Returns whether the file has names in the backing but none of them is known here. Recovery could not find such a
    /// file again. False for a file that already has a file id in the journal, and for a file that has lost its last
    /// name.
    pub(crate) fn has_no_known_name(&self, file: &File<B>) -> Result<bool> {
        let may_need_name = {
            let state = file.lock();
            state.pending.file_id().is_none() && !state.unlinked
        };
        Ok(may_need_name
            && file.inode.paths().is_empty()
            && self.base.backing.attr(&self.object(&file.inode)?)?.nlink > 0)
    }

    /// Returns whether a file has capabilities. As in the kernel, any error of the backing means that it has none.
    pub(crate) fn has_capabilities(&self, object: &B::Inode) -> bool {
        self.base
            .backing
            .get_xattr(object, OsStr::new(CAPABILITIES))
            .is_ok_and(|value| !value.is_empty())
    }
}
