//! What a transaction asks of the engine: that nothing changes below a directory while one begins, is prepared or ends.
//!
//! Transactions themselves are the backing's (`firn-transact`): the engine's drains and names go to a backing
//! that holds them. The engine only has to see to it that no byte is taken for one of the other side of
//! such an instant.

use std::ffi::OsStr;
use std::ops::Range;
use std::sync::Arc;

use firn_backing::{Backing, Errno, is_below};
use firn_conflict::Access;
use firn_format::durability::DurabilityLevel;

use crate::engine::Engine;
use crate::file::File;
use crate::names::Inode;
use crate::{Cached, HandleId, InodeId, Result};

/// What becomes of the data that is pending below a directory before that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pending {
    /// It goes to the backing.
    Drain,
    /// It is dropped.
    Discard,
    /// It stays, and counts as written after it.
    Keep,
}

/// Why nothing, or not all, was done while a directory was quiet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QuiesceError<E> {
    /// The path does not lead to anything.
    Scope(Errno),
    /// What is pending cannot be drained.
    Drain(Errno),
    /// The work failed.
    Work(E),
}

impl<B: Backing> Engine<B> {
    /// The object of a path below the mount.
    pub fn object_at(&self, path: &[u8]) -> Result<B::Inode> {
        self.object(&*self.find(path)?)
    }

    /// Whether changes of names or attributes may wait for a transaction.
    pub fn changes_wait(&self) -> bool {
        self.backing.changes_wait()
    }

    /// Runs `work` while nobody writes to files at or below `path`, all of whose pending data is treated as
    /// `pending` says before. Writers wait meanwhile. Where data cannot be drained, `work` does not run.
    pub fn quiesce<T, E>(
        &self,
        path: &[u8],
        pending: Pending,
        work: impl FnOnce(&B::Inode) -> std::result::Result<T, E>,
    ) -> std::result::Result<T, QuiesceError<E>> {
        let object = self.object_at(path).map_err(QuiesceError::Scope)?;
        let _quiet = self.writing.write();
        // Whatever programs have open: the work gets the descriptors that are kept only to be faster.
        self.close_all_idle();
        for file in self.files_at(path) {
            self.end_grant(&file);
        }
        match pending {
            Pending::Drain => {
                self.wait_tree(path, DurabilityLevel::Drained, &mut |_, _| true)
                    .map_err(QuiesceError::Drain)?;
            }
            Pending::Discard => {
                for file in self.files_at(path) {
                    // The work may have nothing to do with a file that has no name any more, and its bytes.
                    let is_nameless = file.lock().unlinked;
                    if !is_nameless || self.drain_and_wait(&file).is_err() {
                        self.discard(&file);
                    }
                    self.drop_if_unused(&file);
                }
                self.wake_writers();
            }
            Pending::Keep => {}
        }
        let done = work(&object).map_err(QuiesceError::Work);
        // It may have brought privileges back.
        self.privileges.note_given();
        done
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

    /// Takes down that process `pid` uses a range of an open file; 0: nobody knows which process.
    pub fn accessed(&self, handle: HandleId, pid: u32, access: Access, range: Range<u64>) {
        if self.accesses.is_on()
            && let Ok(handle) = self.handle(handle)
        {
            self.note_access(&handle.file.inode, pid, access, range);
        }
    }

    pub(crate) fn note_access(
        &self,
        inode: &Inode<B>,
        pid: u32,
        access: Access,
        range: Range<u64>,
    ) {
        let path = || inode.paths().into_iter().next().unwrap_or_default();
        self.accesses.add(inode.key.1, path, pid, access, range);
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
