//! What the kernel and processes must be told where processes have direct access to files.
//!
//! Promises
//! * Attributes of such a file are not kept: the kernel asks each time, and what it kept from before is
//!   dropped before the first byte is written by direct access.
//! * An opener appends where the file ends. The kernel takes the end for an O_APPEND write from what it believes and
//!   does not ask; so an open of such a file is answered only after the kernel was told. Only a store into its cache
//!   raises what it believes (fs/fuse/dev.c, `fuse_notify_store`), and only one of at least one byte: the file's own
//!   last one, which is dropped again.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use firn_backing::{Backing, Caller};
use firn_engine::{HandleId, InodeId};
use firn_format::data_socket::{DATA_SOCKET_VERSION, Token};
use firn_workers::Class;
use zerocopy::FromZeros;

use crate::caller::Process;
use crate::coherence::Coherence;
use crate::topic::Topic;

/// Where processes ask for direct access.
#[derive(Clone)]
pub(crate) struct DataSocket {
    arena: [u8; 16],
    /// Ends with a zero byte.
    path: [u8; 112],
}

impl DataSocket {
    /// `None` where the path does not fit.
    pub(crate) fn new(arena: [u8; 16], socket: &Path) -> Option<Self> {
        let path = socket.as_os_str().as_bytes();
        let mut bytes = [0; 112];
        // One byte ends it, and the kernel takes no more than 107 (unix(7)).
        bytes
            .get_mut(..path.len())
            .filter(|_| path.len() <= 107)?
            .copy_from_slice(path);
        Some(Self { arena, path: bytes })
    }
}

/// The answer to `IOCTL_TOKEN`: direct access is for processes of firnd's own user. All zero: there is none.
pub(crate) fn token(socket: Option<&DataSocket>, caller: Caller, handle: HandleId) -> Token {
    let own_user = rustix::process::geteuid().as_raw();
    let is_own_user = Process::of(caller).file_system_uid() == Some(own_user);
    match socket.filter(|_| is_own_user) {
        Some(data_socket) => Token {
            token: handle.0,
            version: DATA_SOCKET_VERSION,
            pid: std::process::id(),
            arena: data_socket.arena,
            socket: data_socket.path,
        },
        None => Token::new_zeroed(),
    }
}

impl<B: Backing> Coherence<B> {
    /// Calls `answer` once the kernel knows that the file is at least `size` bytes long.
    pub(crate) fn tell_size(
        &self,
        inode: InodeId,
        handle: HandleId,
        size: Option<u64>,
        answer: impl FnOnce() + Send + 'static,
    ) {
        let (Some(size), Some(notifier)) = (size, self.notifier().cloned()) else {
            return answer();
        };
        let engine = Arc::clone(self.engine());
        // Not on this thread: a store waits for a page that a FUSE thread may have to fill.
        self.workers().run_about(Class::Call, Topic::Pages(inode), move || {
            if let Some(last) = size.checked_sub(1) {
                // A mapping may have changed the byte in the kernel's cache: that page is written first.
                let told = notifier
                    .invalidate_pages(inode, last, 1)
                    .and_then(|()| {
                        let byte = engine.byte_at(handle, last).unwrap_or(0);
                        notifier.store(inode, last, &[byte])
                    })
                    .and_then(|()| notifier.invalidate_pages(inode, last, 1));
                if let Err(error) = told {
                    tracing::warn!(%error, inode = inode.0, size, "cannot tell the kernel how long a file is");
                    return answer();
                }
            }
            engine.kernel_cache.note_kernel_size(inode);
            answer();
        });
    }
}
