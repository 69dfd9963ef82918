//! Everything at or below a path at once: for whoever ends what stands for a whole tree, or changed one beside the engine.
//!
//! Promises
//! * A file without a name is part of every tree: it may have been anywhere.
//! * What the kernel may have cached of a tree is named completely ([`Engine::revalidate_names`]), names before inodes.

use std::ffi::OsStr;
use std::sync::Arc;

use firn_backing::{Backing, is_below};

use crate::engine::Engine;
use crate::file::File;
use crate::names::Inode;
use crate::{Cached, InodeId, Result};

impl<B: Backing> Engine<B> {
    /// The object of a path below the mount.
    pub fn object_at(&self, path: &[u8]) -> Result<B::Inode> {
        self.object(&*self.find(path)?)
    }

    /// What the kernel may have cached of the attributes and names of the object at a path.
    pub fn cached_at(&self, path: &[u8]) -> Option<Cached> {
        self.find(path).ok().map(|inode| Cached::Inode(inode.id))
    }

    /// Holds up renames of `path` and of the directories above it, until the guard is dropped.
    pub fn hold_path(&self, path: &[u8]) -> impl Drop + '_ {
        let path = path.to_vec();
        self.paths.stay(move || vec![path.clone()])
    }

    /// Whether an inode is at or below `path`, as far as its names tell. One without a name may have been anywhere, and so
    /// may one that is not known any more. Asks the backing for nothing.
    pub fn may_be_at(&self, inode: InodeId, path: &[u8]) -> bool {
        if path.is_empty() {
            return true;
        }
        let Ok(inode) = self.inode(inode) else {
            return true;
        };
        let paths = inode.paths();
        paths.is_empty() || paths.iter().any(|known| is_below(known, path))
    }

    /// Revokes what direct access processes have to files at or below `path`: all that they wrote is ingested.
    pub fn revoke_grants_in_tree(&self, path: &[u8]) {
        for file in self.files_at(path) {
            self.end_grant(&file);
        }
    }

    /// Drops what is pending at or below `path`. Of a file that has no name any more it is drained instead, if it can
    /// be: such a file need not be one of the tree's.
    pub fn discard_tree(&self, path: &[u8]) {
        for file in self.files_at(path) {
            let is_nameless = file.lock().unlinked;
            if !is_nameless || self.drain_and_wait(&file).is_err() {
                self.discard(&file);
            }
            self.drop_if_unused(&file);
        }
        self.wake_writers();
    }

    /// The files at or below `path` that are open for writing: a program may have stored to a mapping of them what
    /// only the kernel has.
    pub fn written_at(&self, path: &[u8]) -> Vec<InodeId> {
        let handles = self.handles.all();
        let is_at = |inode: &Inode<B>| {
            path.is_empty() || inode.paths().iter().any(|known| is_below(known, path))
        };
        let written = handles
            .iter()
            .filter(|handle| handle.writable && is_at(&handle.file.inode));
        written.map(|handle| handle.file.inode.id).collect()
    }

    /// After names at or below `path` changed in the backing without the engine: it drops those that are not
    /// so any more. Returns what the kernel may have cached of the tree before; names come first, so that nobody
    /// finds new attributes under an old name.
    pub fn revalidate_names(&self, path: &[u8]) -> Vec<Cached> {
        let _names_stay = self.paths.change(|| vec![path.to_vec()]);
        // Before the inodes are listed: whoever found a name earlier and enters it only now sees this and looks again.
        self.names.note_changes_below();
        let mut names = Vec::new();
        let mut inodes = Vec::new();
        for inode in self.names.all() {
            let paths = inode.paths();
            // Without a name it may have been anywhere, and may have a name again.
            let is_at = path.is_empty()
                || paths.is_empty()
                || paths.iter().any(|known| is_below(known, path));
            if !is_at {
                continue;
            }
            inodes.push(Cached::Inode(inode.id));
            for (parent, name) in inode.known_names() {
                if self.drop_wrong_name(&parent, &name, &inode) {
                    names.push(Cached::Name {
                        parent: parent.id,
                        name: name.to_os_string(),
                    });
                }
            }
        }
        names.extend(inodes);
        names
    }

    /// Drops a name that does not lead to `inode` any more; whether it was one.
    pub(crate) fn drop_wrong_name(
        &self,
        parent: &Arc<Inode<B>>,
        name: &OsStr,
        inode: &Inode<B>,
    ) -> bool {
        if self.leads_to(parent, name, inode) {
            return false;
        }
        // A file that is open, or has data, is still meant.
        let held = self.with_descriptor(|| {
            self.names
                .hold_if_last(&self.backing, inode, parent.id, name)
        });
        if let Err(errno) = held {
            tracing::warn!(%errno, "an object whose name is gone cannot be held");
        }
        self.names.drop_name(parent.id, name, inode);
        true
    }

    fn leads_to(&self, parent: &Arc<Inode<B>>, name: &OsStr, inode: &Inode<B>) -> bool {
        let found = self
            .object(parent)
            .and_then(|dir| self.backing.lookup(&dir, name));
        found.is_ok_and(|(_, attr)| inode.is(&attr))
    }

    fn files_at(&self, path: &[u8]) -> Vec<Arc<File<B>>> {
        let files = self.files.all();
        let is_at = |file: &Arc<File<B>>| {
            let paths = file.inode.paths();
            // Without a name it may have been anywhere.
            path.is_empty() || paths.is_empty() || paths.iter().any(|known| is_below(known, path))
        };
        files.into_iter().filter(is_at).collect()
    }
}
