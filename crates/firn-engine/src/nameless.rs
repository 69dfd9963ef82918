//! Open files without a name. They survive the death of firnd, the process that serves the mount, because another
//! process (the keeper) has a descriptor of each.
//!
//! The *keeper* is the process that starts the next firnd. The *live table* is a mapped file that records the inodes
//! and handles that the kernel has. A *hidden* file is one of which the keeper has a descriptor.
//!
//! Promises
//! * The keeper gets a descriptor of a file before its last name is removed, and closes it when the file has no open
//!   handle.
//! * The next firnd accepts a descriptor only if it belongs to the object that the live table records.
//! * Bytes that were pending when firnd died are pending again: recovery finds the file by its identity.
//!
//! Race: if a file is opened while its last name is being removed, the keeper gets the descriptor only after the
//! removal. If firnd dies in between, the file is lost.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use firn_backing::{AdoptedBy, Backing, DescriptorUse, Errno};

use crate::engine::Engine;
use crate::file::{BackingFile, File};
use crate::live::{identity_of, is_same_object};
use crate::names::Inode;
use crate::open_files::OpenFiles;
use crate::{InodeId, Result};

/// Keeps descriptors of files for the next firnd.
pub trait FileKeeper: Send + Sync {
    /// Keeps a descriptor of the file with the inode `node`. It replaces an earlier descriptor of the same file.
    fn keep_file(&self, node: InodeId, descriptor: BorrowedFd<'_>) -> io::Result<()>;

    /// Closes the descriptor of a node.
    fn drop_file(&self, node: InodeId);
}

/// An open file without a name, as the keeper returns it after the death of an earlier firnd.
#[derive(Debug)]
pub struct HiddenFile {
    /// Number of the file's inode in the live table.
    pub node: InodeId,
    /// The open file.
    pub descriptor: OwnedFd,
}

impl<B: Backing> OpenFiles<B> {
    /// Gives a descriptor of a file to the keeper (the process that starts the next firnd) before the file may lose its
    /// last name. Does nothing if the file is not open or has another name.
    pub(crate) fn send_to_keeper_before_removal(&self, file: &File<B>) {
        if self.keeper.get().is_none() || file.lock().opens.is_empty() {
            return;
        }
        let attr = self
            .tree
            .object(&file.inode)
            .and_then(|object| self.base.backing.attr(&object));
        if attr.is_ok_and(|attr| attr.nlink == 1) {
            self.open_and_send_to_keeper(file);
        }
    }

    /// Opens a file in the backing that loses or has lost its last name, and gives its descriptor to the keeper.
    pub(crate) fn open_and_send_to_keeper(&self, file: &File<B>) {
        let needs_writer = {
            let state = file.lock();
            if state.is_kept {
                return;
            }
            state.opens.has_writers() || !state.pending.is_empty()
        };
        if let Err(errno) = self.open_in_backing(file, needs_writer) {
            // The object of the file's inode remains open, and the next use opens the file through this object.
            tracing::debug!(%errno, "a file without a name could not be opened in the backing; its next use tries again");
        }
        self.send_to_keeper(file);
    }

    /// Gives the keeper (the process that starts the next firnd) a descriptor of an open file without a name. If that
    /// fails, programs still use the file as long as this firnd lives.
    fn send_to_keeper(&self, file: &File<B>) {
        let Some(keeper) = self.keeper.get() else {
            return;
        };
        let backing_file = file.lock().open_any();
        let descriptor = backing_file.and_then(|backing_file| {
            self.base
                .backing
                .descriptor(&backing_file.file, DescriptorUse::Keeping)
        });
        let Some(descriptor) = descriptor else {
            // The backing has no such descriptor, for one of two reasons. The data of the file lies on another I/O
            // server, so the file consists of two objects. Or another host has removed the file.
            tracing::debug!(
                path = file.shown(),
                "no descriptor of a file without a name can be kept for the next firnd"
            );
            return;
        };
        let result = keeper.keep_file(file.inode.id, descriptor.as_fd());
        if let Err(error) = &result {
            let path = file.shown();
            tracing::warn!(%error, path, "cannot pass a file without a name to the keeper, which restarts firnd: \
                programs lose the file if firnd dies");
        }
        let mut state = file.lock();
        // The last handle may have been closed meanwhile; then the keeper must not have the file.
        let is_open = !state.opens.is_empty();
        state.is_kept = result.is_ok() && is_open;
        // The lock is released, because the keeper is called with no lock held.
        drop(state);
        if !is_open {
            keeper.drop_file(file.inode.id);
        }
    }

    /// Makes the keeper close the descriptor of a file that is not open any more, or still has a name.
    pub(crate) fn remove_from_keeper(&self, file: &File<B>) {
        let was_kept = std::mem::take(&mut file.lock().is_kept);
        if was_kept && let Some(keeper) = self.keeper.get() {
            keeper.drop_file(file.inode.id);
        }
    }
}

impl<B: Backing> Engine<B> {
    /// Gives descriptors of open files without a name to `keeper` from now on. Called before the first request.
    pub fn set_file_keeper(&self, keeper: Arc<dyn FileKeeper>) {
        let _ = self.open_files.keeper.set(keeper);
    }

    /// Restores files without a name, after their handles and nodes were restored.
    pub(crate) fn resume_nameless(&self, files: &[HiddenFile]) {
        for kept in files {
            if let Err(errno) = self.resume_nameless_file(kept) {
                tracing::info!(%errno, node = kept.node.0, "the keeper, which restarts firnd, had a file open that is \
                    not needed any more: it is closed");
                if let Some(keeper) = self.open_files.keeper.get() {
                    keeper.drop_file(kept.node);
                }
            }
        }
    }

    /// Restores one open file without a name, from the descriptor that another process has kept while firnd was dead.
    /// Fails with ESTALE if the descriptor belongs to another object, with EEXIST if the file still has a name.
    fn resume_nameless_file(&self, kept: &HiddenFile) -> Result<()> {
        let inode = self.tree.inode(kept.node)?;
        let file = self.open_files.known_file(&inode).ok_or(Errno::BADF)?;
        let Ok(descriptor) = kept.descriptor.try_clone() else {
            return Err(Errno::MFILE);
        };
        let adopted = self.base.backing.adopt(descriptor)?;
        if !is_same_object(&identity_of(&adopted.attr), &inode.identity()) {
            return Err(Errno::STALE);
        }
        if adopted.attr.nlink > 0 {
            // firnd died before the name was removed. The file is found by its name, and the keeper gets it again when
            // the name is removed.
            return Err(Errno::EXIST);
        }
        self.restore_nameless(&inode, &file, adopted);
        Ok(())
    }

    /// Restores a file without a name from its descriptor, which the backing has adopted: removes its old names from
    /// the tables, and stores its open object and file.
    fn restore_nameless(&self, inode: &Arc<Inode<B>>, file: &Arc<File<B>>, adopted: AdoptedBy<B>) {
        for (parent, name) in inode.names_with_parents() {
            self.tree.names.record_unlink(parent.id, &name);
        }
        self.tree.names.keep_object_open(inode, adopted.inode);
        let opened = BackingFile {
            file: adopted.file,
            access: adopted.access,
        };
        if opened.access == firn_backing::Access::Read {
            file.store_reader(opened);
        } else {
            file.store_writer(opened);
        }
        let mut state = file.lock();
        state.unlinked = true;
        state.is_kept = true;
    }

    /// Returns the inode with this identity, if its file is open and has no name.
    pub(crate) fn find_nameless(&self, key: crate::names::ObjectKey) -> Option<Arc<Inode<B>>> {
        let inode = self.tree.names.by_key(key)?;
        let file = self.open_files.known_file(&inode)?;
        let state = file.lock();
        if !state.unlinked || !state.is_kept {
            return None;
        }
        Some(inode)
    }
}
