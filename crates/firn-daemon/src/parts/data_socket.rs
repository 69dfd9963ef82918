//! The data socket as a part of a mount: it serves processes that use the arena (shared memory) themselves, and
//! programs of a stub tree (empty files on tmpfs).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_protocol::Status;
use parking_lot::Mutex;

use crate::data_socket::DataSocket;
use crate::part::{Part, StopContext};

/// The listening data socket, and the number of its connections.
pub(crate) struct DataClients {
    socket: Mutex<Option<DataSocket>>,
    count: Arc<AtomicU64>,
}

impl DataClients {
    pub(crate) fn new(socket: DataSocket, count: Arc<AtomicU64>) -> Arc<Self> {
        Arc::new(Self {
            socket: Mutex::new(Some(socket)),
            count,
        })
    }
}

impl Part for DataClients {
    fn fill_status(&self, status: &mut Status) {
        status.direct_clients = self.count.load(Ordering::Relaxed);
    }

    fn stop(&self, _: &mut StopContext) {
        let socket = self.socket.lock().take();
        drop(socket);
    }
}
