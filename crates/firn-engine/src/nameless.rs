//! Open files without a name, which outlive firnd by a descriptor that the keeper of the mount has.
//!
//! Promises
//! * A file is given to the keeper before its last name goes, and taken back once no handle is open on it.
//! * The next firnd believes a descriptor only where it is open on the object that the live table names.
//! * Bytes that were pending when firnd died are pending again: recovery finds the file by its identity.
//!
//! A file that is opened while its last name is being removed is given to the keeper after the removal.

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
    /// Keeps a descriptor, in the place of an earlier one of the same node.
    fn keep_file(&self, node: InodeId, descriptor: BorrowedFd<'_>) -> io::Result<()>;
    /// Keeps it no longer.
    fn drop_file(&self, node: InodeId);
}

/// A file that an earlier firnd had given to the keeper.
#[derive(Debug)]
pub struct KeptFile {
    /// Its number in the live table.
    pub node: InodeId,
    /// The open file.
    pub descriptor: OwnedFd,
}

impl<B: Backing> OpenFiles<B> {
    /// Before a name of a file goes that may be its last one.
    pub(crate) fn keep_before_removal(&self, file: &File<B>) {
        if self.keeper.get().is_none() || file.lock().opens.is_empty() {
            return;
        }
        let links = self
            .tree
            .object(&file.inode)
            .and_then(|object| self.base.backing.attr(&object))
            .map(|attr| attr.nlink);
        if links == Ok(1) {
            self.open_nameless(file);
        }
    }

    /// A file that programs have open loses its last name, or has lost it: it keeps what it has open from here on.
    pub(crate) fn open_nameless(&self, file: &File<B>) {
        let writes = {
            let state = file.lock();
            if state.is_kept {
                return;
            }
            state.opens.has_writers() || !state.pending.is_empty()
        };
        if let Err(errno) = self.open_below(file, writes) {
            // It is held as an object, and opened by that when it is used.
            tracing::debug!(%errno, "a file without a name is not open below");
        }
        self.give_to_keeper(file);
    }

    fn give_to_keeper(&self, file: &File<B>) {
        let Some(keeper) = self.keeper.get() else {
            return;
        };
        let open = file.lock().open_any();
        let descriptor = open.and_then(|open| {
            self.base
                .backing
                .descriptor(&open.file, DescriptorUse::Keeping)
        });
        let kept = match descriptor {
            None => Err(io::ErrorKind::Unsupported.into()),
            Some(descriptor) => keeper.keep_file(file.inode.id, descriptor.as_fd()),
        };
        if let Err(error) = &kept {
            let path = file.shown();
            tracing::warn!(%error, path, "if firnd dies, a file without a name is lost to its programs");
        }
        let mut state = file.lock();
        let is_open = !state.opens.is_empty();
        state.is_kept = kept.is_ok() && is_open;
        drop(state);
        if !is_open {
            keeper.drop_file(file.inode.id);
        }
    }

    /// The keeper has a file no longer that is closed, or has a name after all.
    pub(crate) fn take_from_keeper(&self, file: &File<B>) {
        let was_kept = std::mem::take(&mut file.lock().is_kept);
        if let Some(keeper) = self.keeper.get().filter(|_| was_kept) {
            keeper.drop_file(file.inode.id);
        }
    }
}

impl<B: Backing> Engine<B> {
    /// From now on open files without a name are given to `keeper`. To be called before the first request.
    pub fn keep_files_by(&self, keeper: Arc<dyn FileKeeper>) {
        let _ = self.open_files.keeper.set(keeper);
    }

    /// Goes on with files without a name, whose handles and nodes are there again.
    pub(crate) fn resume_nameless(&self, files: &[KeptFile]) {
        for kept in files {
            if let Err(errno) = self.resume_nameless_file(kept) {
                tracing::info!(%errno, node = kept.node.0, "a file that was kept is not needed");
                if let Some(keeper) = self.open_files.keeper.get() {
                    keeper.drop_file(kept.node);
                }
            }
        }
    }

    fn resume_nameless_file(&self, kept: &KeptFile) -> Result<()> {
        let inode = self.tree.inode(kept.node)?;
        let file = self.open_files.known_file(&inode).ok_or(Errno::BADF)?;
        let descriptor = kept.descriptor.try_clone();
        let descriptor = descriptor.map_err(|_| Errno::MFILE)?;
        let adopted = self.base.backing.adopt(descriptor)?;
        if !is_same_object(&identity_of(&adopted.attr), &inode.identity()) {
            return Err(Errno::STALE);
        }
        if adopted.attr.nlink > 0 {
            // firnd died before the name went. It is found by that, and kept again when that goes.
            return Err(Errno::EXIST);
        }
        self.restore_nameless(&inode, &file, adopted);
        Ok(())
    }

    fn restore_nameless(&self, inode: &Arc<Inode<B>>, file: &Arc<File<B>>, adopted: AdoptedBy<B>) {
        for (parent, name) in inode.known_names() {
            self.tree.names.unlinked(parent.id, &name);
        }
        self.tree.names.hold(inode, adopted.inode);
        let opened = BackingFile {
            file: adopted.file,
            access: adopted.access,
        };
        if opened.access == firn_backing::Access::Read {
            file.keep_reader(opened);
        } else {
            file.keep_writer(opened);
        }
        let mut state = file.lock();
        state.unlinked = true;
        state.is_kept = true;
    }

    /// The file with this identity that is open and has no name.
    pub(crate) fn find_nameless(&self, key: crate::names::Key) -> Option<Arc<Inode<B>>> {
        let inode = self.tree.names.by_key(key)?;
        let file = self.open_files.known_file(&inode)?;
        let state = file.lock();
        (state.unlinked && state.is_kept).then_some(inode)
    }
}
