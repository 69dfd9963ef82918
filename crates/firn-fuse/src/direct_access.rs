//! Keeps the kernel's attributes right on a mount with *direct access*: processes then write and read the mount's
//! shared memory (the arena) themselves. Also tells processes at which socket to request direct access.
//!
//! Promises
//! * The kernel caches no attributes of a file that processes write directly: it asks for them each time. Attributes
//!   that it cached earlier are dropped before the first direct write.
//! * A program that opens a file with O_APPEND appends at the file's end. For such a write the kernel uses the length
//!   that it has recorded, without asking firnd, which serves the mount. So an open of a file with direct writes is
//!   answered only after the kernel has got the length.
//!
//! Only a store of at least one byte into the kernel's cache raises the length that the kernel has recorded
//! (fs/fuse/dev.c, `fuse_notify_store`). So the last byte of the file is stored, and its page is dropped again.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use firn_backing::{Backing, Caller};
use firn_engine::{Engine, HandleId, InodeId};
use firn_format::data_socket::{DATA_SOCKET_VERSION, Token};
use firn_workers::Class;
use zerocopy::FromZeros;

use crate::caller::Process;
use crate::coherence::{Coherence, Notifier};
use crate::topic::Topic;

/// Where processes ask for direct access, in the form of an answer to `IOCTL_TOKEN`, the ioctl(2) of a process that
/// looks for direct access.
#[derive(Clone)]
pub(crate) struct DataSocket {
    arena: [u8; 16],
    /// Path of the socket, with at least one zero byte after it.
    path: [u8; SOCKET_PATH_FIELD_BYTES],
}

/// Length of `sun_path` in a socket address (unix(7)), rounded up to that of the field in [`Token`].
const SOCKET_PATH_FIELD_BYTES: usize = 112;
/// Maximum length of a socket's path, without the zero byte after it (unix(7)).
const SOCKET_PATH_BYTES_MAX: usize = 107;
impl DataSocket {
    /// Returns `None` if the path is too long for a socket.
    pub(crate) fn new(arena: [u8; 16], socket: &Path) -> Option<Self> {
        let path = socket.as_os_str().as_bytes();
        let mut field = [0; SOCKET_PATH_FIELD_BYTES];
        if path.len() > SOCKET_PATH_BYTES_MAX {
            return None;
        }
        field[..path.len()].copy_from_slice(path);
        Some(Self { arena, path: field })
    }
}

/// Returns the answer to `IOCTL_TOKEN`. Only processes of firnd's own user have direct access: a process of another
/// user, and any process on a mount without direct access, gets a token of zeros.
pub(crate) fn token(socket: Option<&DataSocket>, caller: Caller, handle: HandleId) -> Token {
    let own_user = rustix::process::geteuid().as_raw();
    let is_own_user = Process::from_caller(caller).file_system_uid() == Some(own_user);
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
    /// Raises the kernel's length of a file (`i_size`) to at least `size`, and then calls `answer`, which answers a
    /// request. Without a `size`, calls `answer` at once. If the length cannot be raised, warns and answers.
    ///
    /// The kernel does not notice direct writes (into shared memory). It would write an append at its old length, and
    /// so overwrite their bytes. The length is raised by a store of the file's last byte in the kernel's cache.
    pub(crate) fn raise_kernel_size(
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
        // On a worker: a store waits for a page that this thread may have to fill.
        self.workers().run_on_topic(Class::Call, Topic::Pages(inode), move || {
            if let Some(last_offset) = size.checked_sub(1)
                && let Err(error) = store_byte_in_kernel(&*engine, &*notifier, inode, handle, last_offset)
            {
                tracing::warn!(%error, inode = inode.0, size, "cannot make the kernel record the length of a file: an append may overwrite bytes of direct writes");
                return answer();
            }
            engine.kernel_cache.record_kernel_size(inode);
            answer();
        });
    }
}

/// Stores one byte of a file in the kernel's cache, so that the kernel records a length that includes the byte. The
/// page of the byte is not kept.
fn store_byte_in_kernel<B: Backing>(
    engine: &Engine<B>,
    notifier: &dyn Notifier,
    inode: InodeId,
    handle: HandleId,
    offset: u64,
) -> io::Result<()> {
    // A mapping may have changed this byte in the kernel's cache. The first drop writes such a page back, so the byte
    // that is then read and stored is the newest.
    notifier.invalidate_pages(inode, offset, 1)?;
    let byte = engine.byte_at(handle, offset).unwrap_or(0);
    notifier.store(inode, offset, &[byte])?;
    notifier.invalidate_pages(inode, offset, 1)
}
