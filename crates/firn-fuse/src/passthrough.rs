//! Backing files that the kernel reads itself.
//!
//! Invariants
//! * All passthrough handles of an inode share one id: the kernel answers EIO to an open of
//!   the same inode with another one.
//! * The id lives until the last of these handles is released.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use firn_engine::{HandleId, InodeId};
use parking_lot::Mutex;

/// The inodes that are passed through now, with the transport's ids (`I`) of their files.
pub(crate) struct Passthrough<I> {
    table: Mutex<Table<I>>,
}

struct Table<I> {
    inodes: HashMap<InodeId, Shared<I>>,
    handles: HashMap<HandleId, InodeId>,
}

/// The id of an inode's file, and how many handles use it.
struct Shared<I> {
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
    /// The id for a new handle of `inode`; registers the file that `fd` gives if it is the first.
    /// `None`: the kernel or the backing's file system refuses.
    pub(crate) fn acquire(
        &self,
        inode: InodeId,
        handle: HandleId,
        fd: impl Fn() -> Option<OwnedFd>,
        register: impl FnOnce(OwnedFd) -> std::io::Result<I>,
    ) -> Option<Arc<I>> {
        let (mut table, id) = loop {
            // Without the lock, and in vain where another first open is quicker: it may ask the backing.
            let is_first = !self.table.lock().inodes.contains_key(&inode);
            let file = if is_first { Some(fd()?) } else { None };
            let mut table = self.table.lock();
            if let Some(shared) = table.inodes.get_mut(&inode) {
                shared.handles += 1;
                let id = Arc::clone(&shared.id);
                break (table, id);
            }
            // Under the lock: two first opens must not register the file twice. Without a file the last handle was
            // released since the look above.
            if let Some(file) = file {
                let id = register(file)
                    .inspect_err(|error| tracing::debug!(%error, "passthrough refused"))
                    .map(Arc::new)
                    .ok()?;
                let shared = Shared {
                    id: Arc::clone(&id),
                    handles: 1,
                };
                table.inodes.insert(inode, shared);
                break (table, id);
            }
        };
        table.handles.insert(handle, inode);
        Some(id)
    }

    /// A handle of an earlier firnd, whose file the kernel has under this id.
    pub(crate) fn restore(&self, inode: InodeId, handle: HandleId, id: &Arc<I>) {
        let mut table = self.table.lock();
        let shared = table.inodes.entry(inode).or_insert_with(|| Shared {
            id: Arc::clone(id),
            handles: 0,
        });
        shared.handles += 1;
        table.handles.insert(handle, inode);
    }

    /// The handle is gone.
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
