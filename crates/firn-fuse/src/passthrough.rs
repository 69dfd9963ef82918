//! Backing files that the kernel reads itself.
//!
//! Invariants
//! * All passthrough handles of a node share one [`BackingId`]: the kernel answers EIO to an open of
//!   the same inode with another one.
//! * The id lives until the last of these handles is released.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use firn_engine::{HandleId, NodeId};
use fuser::BackingId;
use parking_lot::Mutex;

/// The nodes that are passed through now.
#[derive(Default)]
pub(crate) struct Passthrough {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    nodes: HashMap<NodeId, (Arc<BackingId>, usize)>,
    handles: HashMap<HandleId, NodeId>,
}

impl Passthrough {
    /// The id for a new handle of `node`; registers the file that `fd` gives if it is the first.
    /// `None`: the kernel or the backing's file system refuses.
    pub(crate) fn acquire(
        &self,
        node: NodeId,
        handle: HandleId,
        fd: impl FnOnce() -> Option<OwnedFd>,
        register: impl FnOnce(OwnedFd) -> std::io::Result<BackingId>,
    ) -> Option<Arc<BackingId>> {
        let mut table = self.table.lock();
        let id = match table.nodes.get_mut(&node) {
            Some((id, handles)) => {
                *handles += 1;
                Arc::clone(id)
            }
            None => {
                // Under the lock: two first opens must not register the file twice.
                let id = register(fd()?)
                    .inspect_err(|error| tracing::debug!(%error, "passthrough refused"))
                    .map(Arc::new)
                    .ok()?;
                table.nodes.insert(node, (Arc::clone(&id), 1));
                id
            }
        };
        table.handles.insert(handle, node);
        Some(id)
    }

    /// The handle is gone.
    pub(crate) fn release(&self, handle: HandleId) {
        let mut table = self.table.lock();
        let Some(node) = table.handles.remove(&handle) else { return };
        let Some((_, handles)) = table.nodes.get_mut(&node) else { return };
        *handles -= 1;
        if *handles == 0 {
            table.nodes.remove(&node);
        }
    }
}
