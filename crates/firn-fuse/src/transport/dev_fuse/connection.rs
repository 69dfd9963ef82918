//! The connection to the kernel: one open file of `/dev/fuse`, which several threads read.
//!
//! When the last descriptor of that open file is closed, the kernel ends the requests that were read from it and not
//! answered. The keeper (the process that starts the next firnd when one dies) also has a descriptor. So the requests
//! survive the death of firnd, the process that serves the mount. An open file for each thread (FUSE_DEV_IOC_CLONE) had
//! no measurable benefit.

use std::fs::File;
use std::io::{self, IoSlice, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

use rustix::io::Errno;
use rustix::ioctl::{Opcode, Setter, ioctl, opcode};
use zerocopy::IntoBytes;

use crate::transport::dev_fuse::abi::{BackingMap, OutHeader, notification};

/// Type number of the ioctls of the device.
const IOCTLS: u8 = 229;
const IOC_BACKING_OPEN: Opcode = opcode::write::<BackingMap>(IOCTLS, 1);
const IOC_BACKING_CLOSE: Opcode = opcode::write::<u32>(IOCTLS, 2);

/// Maximum number of parts of a message's payload.
const PAYLOAD_PARTS_MAX: usize = 3;

/// An open file of `/dev/fuse`.
#[derive(Debug)]
pub(super) struct Connection(File);

/// Result of a read of the device.
pub(super) enum Received {
    /// One request of this many bytes.
    Request(usize),
    /// The kernel has ended the connection.
    Ended,
}

impl Connection {
    pub(super) fn new(device: OwnedFd) -> Arc<Self> {
        Arc::new(Self(device.into()))
    }

    /// Makes the kernel send requests again that were read and not answered. The kernel sends them before all other
    /// requests.
    pub(super) fn request_resend(&self) -> io::Result<()> {
        self.notify(notification::RESEND, &[])
    }

    /// Waits for the next request and reads all of it into `buffer`.
    pub(super) fn receive(&self, buffer: &mut [u8]) -> io::Result<Received> {
        loop {
            match (&self.0).read(buffer) {
                Ok(len) => return Ok(Received::Request(len)),
                Err(error) => match Errno::from_io_error(&error) {
                    // NOENT: the kernel abandoned the request while it was read.
                    Some(Errno::NOENT | Errno::INTR | Errno::AGAIN) => {}
                    Some(Errno::NODEV) => return Ok(Received::Ended),
                    _ => return Err(error),
                },
            }
        }
    }

    /// Sends the answer to a request. `errno`: positive for an error, 0 for success.
    pub(super) fn answer(&self, unique: u64, errno: i32, payload: &[&[u8]]) {
        match self.send(unique, -errno, payload) {
            Ok(()) => {}
            // The mount is gone, or the caller has an early answer.
            Err(error)
                if matches!(
                    Errno::from_io_error(&error),
                    Some(Errno::NODEV | Errno::NOENT)
                ) =>
            {
                tracing::debug!(unique, %error, "an answer was not sent: the mount has ended, or the caller has got an early answer");
            }
            Err(error) => tracing::error!(unique, %error, "the kernel refused an answer"),
        }
    }

    /// Ends an unanswered request of an earlier firnd. Does nothing if no request of this number was read.
    pub(super) fn refuse_orphan(&self, unique: u64) {
        match self.send(unique, -libc::EIO, &[]) {
            Ok(()) => tracing::warn!(
                unique,
                "a request ends with EIO: an earlier firnd died before it answered"
            ),
            Err(error) => {
                tracing::trace!(unique, %error, "the kernel has no unanswered request with this number")
            }
        }
    }

    /// Sends a notification: a message without a request.
    pub(super) fn notify(&self, code: i32, payload: &[&[u8]]) -> io::Result<()> {
        self.send(0, code, payload)
    }

    /// Writes a message to the kernel: an answer to the request `unique`, or a notification (`unique` is 0). `error` is
    /// an errno as a negative number, or the code of a notification.
    fn send(&self, unique: u64, error: i32, payload: &[&[u8]]) -> io::Result<()> {
        let payload_bytes: usize = payload.iter().map(|part| part.len()).sum();
        let len = size_of::<OutHeader>() + payload_bytes;
        let header = OutHeader {
            len: u32::try_from(len).map_err(|_| Errno::MSGSIZE)?,
            error,
            unique,
        };
        let mut buffers = [IoSlice::new(&[]); 1 + PAYLOAD_PARTS_MAX];
        buffers[0] = IoSlice::new(header.as_bytes());
        for (buffer, part) in buffers[1..].iter_mut().zip(payload) {
            *buffer = IoSlice::new(part);
        }
        let message = &buffers[..1 + payload.len()];
        // In one call, because the kernel accepts only whole messages.
        rustix::io::retry_on_intr(|| rustix::io::writev(&self.0, message))?;
        Ok(())
    }

    /// Makes the id of a file that an earlier firnd has registered with the kernel.
    pub(super) fn adopt_backing(self: &Arc<Self>, id: i32) -> BackingId {
        BackingId {
            id,
            connection: Arc::downgrade(self),
        }
    }

    /// Registers a file with the kernel, which may then read it itself.
    pub(super) fn register_backing(self: &Arc<Self>, file: &OwnedFd) -> io::Result<BackingId> {
        let map = BackingMap {
            fd: file.as_raw_fd(),
            ..BackingMap::default()
        };
        // SAFETY: the kernel reads a `BackingMap`, and answers with a number.
        let id = unsafe { ioctl(&self.0, Registration(map)) }?;
        Ok(BackingId {
            id,
            connection: Arc::downgrade(self),
        })
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A registered file that the kernel reads itself. A drop ends the registration.
#[derive(Debug)]
pub(crate) struct BackingId {
    id: i32,
    connection: Weak<Connection>,
}

impl BackingId {
    pub(super) fn number(&self) -> i32 {
        self.id
    }
}

impl Drop for BackingId {
    fn drop(&mut self) {
        let Some(connection) = self.connection.upgrade() else {
            return;
        };
        let id = self.id as u32;
        // SAFETY: the kernel reads four bytes, and returns an error for an unknown number.
        let closed = unsafe {
            let close = Setter::<IOC_BACKING_CLOSE, u32>::new(id);
            ioctl(&connection.0, close)
        };
        if let Err(error) = closed {
            tracing::debug!(%error, "the kernel did not end the registration of a passthrough file");
        }
    }
}

/// Argument of FUSE_DEV_IOC_BACKING_OPEN. The ioctl returns the number of the registered file.
struct Registration(BackingMap);

// SAFETY: opcode and argument are those of the kernel's header; it only reads the argument.
unsafe impl rustix::ioctl::Ioctl for Registration {
    type Output = i32;

    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        IOC_BACKING_OPEN
    }

    fn as_ptr(&mut self) -> *mut rustix::ffi::c_void {
        (&raw mut self.0).cast()
    }

    unsafe fn output_from_ptr(
        out: rustix::ioctl::IoctlOutput,
        _: *mut rustix::ffi::c_void,
    ) -> rustix::io::Result<i32> {
        Ok(out)
    }
}
