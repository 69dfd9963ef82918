//! Backing files that the kernel reads itself.
//!
//! Invariants
//! * All passthrough handles of a host share one [`BackingId`]: the kernel answers EIO to an open of
//!   the same inode with another one.
//! * The id lives until the last of these handles is released.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use firn_engine::{HandleId, InodeId};
use fuser::BackingId;
use parking_lot::Mutex;

/// The hosts that are passed through now.
#[derive(Default)]
pub(crate) struct Passthrough {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    inodes: HashMap<InodeId, (Arc<BackingId>, usize)>,
    handles: HashMap<HandleId, InodeId>,
}

impl Passthrough {
    /// The id for a new handle of `inode`; registers the file that `fd` gives if it is the first.
    /// `None`: the kernel or the backing's file system refuses.
    pub(crate) fn acquire(
        &self,
        inode: InodeId,
        handle: HandleId,
        fd: impl Fn() -> Option<OwnedFd>,
        register: impl FnOnce(OwnedFd) -> std::io::Result<BackingId>,
    ) -> Option<Arc<BackingId>> {
        let (mut table, id) = loop {
            // Without the lock, and in vain where another first open is quicker: it may ask the backing.
            let is_first = !self.table.lock().inodes.contains_key(&inode);
            let file = if is_first { Some(fd()?) } else { None };
            let mut table = self.table.lock();
            if let Some((id, handles)) = table.inodes.get_mut(&inode) {
                *handles += 1;
                let id = Arc::clone(id);
                break (table, id);
            }
            // Under the lock: two first opens must not register the file twice. Without a file the last handle was
            // released since the look above.
            if let Some(file) = file {
                let id = register(file)
                    .inspect_err(|error| tracing::debug!(%error, "passthrough refused"))
                    .map(Arc::new)
                    .ok()?;
                table.inodes.insert(inode, (Arc::clone(&id), 1));
                break (table, id);
            }
        };
        table.handles.insert(handle, inode);
        Some(id)
    }

    /// The handle is gone.
    pub(crate) fn release(&self, handle: HandleId) {
        let mut table = self.table.lock();
        let Some(inode) = table.handles.remove(&handle) else {
            return;
        };
        let Some((_, handles)) = table.inodes.get_mut(&inode) else {
            return;
        };
        *handles -= 1;
        if *handles == 0 {
            table.inodes.remove(&inode);
        }
    }
}
