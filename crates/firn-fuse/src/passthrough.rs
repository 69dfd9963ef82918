//! Files that the kernel reads itself (passthrough), and the kernel's ids of these files.
//!
//! The transport registers such a file with the kernel, which returns an id. The answer to an open names the id.
//!
//! Invariants
//! * All passthrough handles of an inode have the same id. The kernel answers EIO to an open of an inode with another
//!   id.
//! * The id lives until the last of these handles is released.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use firn_engine::{HandleId, InodeId};
use parking_lot::Mutex;

/// Passthrough inodes and handles of a mount. `I`: the transport's id of a registered file.
pub(crate) struct Passthrough<I> {
    table: Mutex<Table<I>>,
}

struct Table<I> {
    inodes: HashMap<InodeId, SharedId<I>>,
    handles: HashMap<HandleId, InodeId>,
}

/// The id of an inode's file, and the number of handles that use it.
struct SharedId<I> {
    id: Arc<I>,
    handles: usize,
}

impl<I> Default for Passthrough<I> {
    fn default() -> Self {
        Self {
            table: Mutex::new(Table {
                inodes: HashMap::new(),
                handles: HashMap::new(),
            }),
        }
    }
}

impl<I> Passthrough<I> {
    /// Returns the kernel's id of the file that it reads itself (passthrough), for a new handle of `inode`. All handles
    /// of an inode share the id. For the first one, `open_file` opens the file and `register` registers it with the
    /// kernel. Returns `None` if there is no such file, or if the kernel refuses it.
    pub(crate) fn acquire(
        &self,
        inode: InodeId,
        handle: HandleId,
        open_file: impl Fn() -> Option<OwnedFd>,
        register: impl FnOnce(OwnedFd) -> std::io::Result<I>,
    ) -> Option<Arc<I>> {
        loop {
            // The file is opened without the lock, because the open may call the backing. If another first open is
            // quicker, this file is closed unused.
            let is_first = !self.table.lock().inodes.contains_key(&inode);
            let file = if is_first { Some(open_file()?) } else { None };
            let mut table = self.table.lock();
            if let Some(shared) = table.inodes.get_mut(&inode) {
                shared.handles += 1;
                let id = Arc::clone(&shared.id);
                table.handles.insert(handle, inode);
                return Some(id);
            }
            let Some(file) = file else {
                // The last handle was released after `is_first` was read.
                continue;
            };
            // Registered under the lock, so that two first opens do not register the file twice.
            let id = match register(file) {
                Ok(id) => Arc::new(id),
                Err(error) => {
                    tracing::debug!(%error, "the kernel refused passthrough of a file");
                    return None;
                }
            };
            let shared = SharedId {
                id: Arc::clone(&id),
                handles: 1,
            };
            table.inodes.insert(inode, shared);
            table.handles.insert(handle, inode);
            return Some(id);
        }
    }

    /// Adds a handle of an earlier firnd, whose file the kernel knows under this id.
    pub(crate) fn restore(&self, inode: InodeId, handle: HandleId, id: &Arc<I>) {
        let mut table = self.table.lock();
        let shared = table.inodes.entry(inode).or_insert_with(|| SharedId {
            id: Arc::clone(id),
            handles: 0,
        });
        shared.handles += 1;
        table.handles.insert(handle, inode);
    }

    /// Removes a handle. The id is dropped with the last handle of its inode.
    pub(crate) fn release(&self, handle: HandleId) {
        let mut table = self.table.lock();
        let Some(inode) = table.handles.remove(&handle) else {
            return;
        };
        let Some(shared) = table.inodes.get_mut(&inode) else {
            return;
        };
        shared.handles -= 1;
        if shared.handles == 0 {
            table.inodes.remove(&inode);
        }
    }
}
