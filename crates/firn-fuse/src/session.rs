//! A session: the service of one mount, from its start to its end.
//!
//! Promises
//! * When [`Session::mount`] returns, the mount is usable.
//! * When [`Session::wait`] returns, the kernel has ended the mount: no request is under way and none will come.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use firn_backing::Backing;
use firn_engine::ResumedRequests;
use firn_format::live::InitExchange;
use firn_workers::{Class, Workers};
use parking_lot::Mutex;

use crate::adapter::Adapter;
use crate::device;
use crate::transport::dev_fuse::{self, KeepConnection, Origin, Served};

/// Options of a mount that concern the kernel.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// Source of the mount in `/proc/self/mountinfo`: the canonical path of the backing, the directory that the mount
    /// serves.
    pub source: PathBuf,
    /// Number of threads that carry out requests; 0: one for each core. One more thread reads requests.
    pub threads: usize,
    /// Let processes of other users access the mount. The kernel checks permissions in any case.
    pub allow_other: bool,
    /// Mount read-only.
    pub read_only: bool,
    /// Flags of the kernel by their names in mount(8) (`noexec`, `suid`, …). A later flag overrides an earlier one. The
    /// mount begins with `nosuid` and `nodev`.
    pub kernel_flags: Vec<&'static str>,
}

/// Reasons why a session did not start.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// This kernel or container has no FUSE.
    #[error(
        "/dev/fuse is missing: load the module (modprobe fuse), give the container the device (--device /dev/fuse), or mount with --frontend=preload, which needs no FUSE"
    )]
    NoDevice,
    /// Without root a mount needs the program fusermount3, which is missing.
    #[error(
        "mounting without root needs fusermount3, which was not found: install fuse3, or mount as root"
    )]
    NoHelper,
    /// fusermount3 refused to mount.
    #[error("fusermount3 refused: {text}{}", way_without_fuse(text))]
    Helper {
        /// Message of fusermount3.
        text: String,
    },
    /// mount(2) failed.
    #[error("cannot mount on {mount_point}: {source}", mount_point = firn_format::quote::quoted_path(mount_point))]
    Mount {
        /// Directory of the mount.
        mount_point: PathBuf,
        /// Error of mount(2).
        source: io::Error,
    },
    /// The kernel lacks a feature that Firn needs, or a thread could not be started.
    #[error("the FUSE session did not start: {0}")]
    Start(io::Error),
}

/// Advice for a user without access to the device, appended to the message of fusermount3.
fn way_without_fuse(refusal: &str) -> &'static str {
    if refusal.contains("/dev/fuse") {
        "; ask the administrator for access to it, or run without FUSE: `firn run`, or mount with --frontend=preload"
    } else {
        ""
    }
}

/// A connection that an earlier firnd has served.
pub struct ResumedConnection<'a> {
    /// A descriptor of the connection.
    pub device: OwnedFd,
    /// Major and minor number of the mounted file system.
    pub number: (u32, u32),
    /// The INIT request and its answer.
    pub exchange: &'a InitExchange,
    /// Handles and requests that the earlier firnd left.
    pub left: ResumedRequests,
}

/// A mount that is served.
pub struct Session {
    mount_point: PathBuf,
    /// Major and minor number of the file system. The minor number is also that of the connection.
    device: Option<(u32, u32)>,
    /// Descriptor that aborts the connection, even after the mount was taken out of the tree.
    control: Option<OwnedFd>,
    workers: Workers,
    served: Mutex<Option<Served>>,
}

impl Session {
    /// Mounts `adapter` at `mount_point` and serves the mount on its own threads. `keep` stores the connection, so that
    /// a next firnd (the process that serves the mount) can resume the mount if this one dies.
    pub fn mount<B: Backing>(
        adapter: Adapter<B>,
        mount_point: &Path,
        options: &SessionOptions,
        keep: &dyn KeepConnection,
    ) -> Result<Self, SessionError> {
        let mount_point = mount_point.to_owned();
        let connection = device::mount(&mount_point, options)?;
        let dispatcher = adapter.into_dispatcher();
        let workers = dispatcher.workers();
        let threads = thread_count(options.threads);
        let origin = Origin::Mounted { keep };
        let served = match dev_fuse::serve(dispatcher, connection, origin, threads) {
            Ok(served) => served,
            Err(error) => {
                // The error of the start is reported; a failure of this clean-up would only hide it.
                let lazy = true;
                let _ = device::detach(&mount_point, lazy);
                return Err(SessionError::Start(error));
            }
        };
        let device_number = device::device_number(&mount_point);
        if let Some(number) = device_number {
            device::set_readahead(number);
        }
        Ok(Self::new(mount_point, device_number, workers, served))
    }

    /// Resumes a mount that an earlier firnd (the process that serves the mount) has served until it died.
    /// `saved_connection` has the connection to the kernel, and that firnd's unanswered requests and open handles.
    pub fn resume<B: Backing>(
        adapter: Adapter<B>,
        mount_point: &Path,
        options: &SessionOptions,
        saved_connection: ResumedConnection<'_>,
    ) -> Result<Self, SessionError> {
        let dispatcher = adapter.into_dispatcher();
        let workers = dispatcher.workers();
        let threads = thread_count(options.threads);
        let ResumedConnection {
            device,
            number: device_number,
            exchange,
            left,
        } = saved_connection;
        let origin = Origin::Resumed { exchange, left };
        let served =
            dev_fuse::serve(dispatcher, device, origin, threads).map_err(SessionError::Start)?;
        let mount_point = mount_point.to_owned();
        Ok(Self::new(mount_point, Some(device_number), workers, served))
    }

    /// Makes the session of a connection whose threads already run.
    fn new(
        mount_point: PathBuf,
        device: Option<(u32, u32)>,
        workers: Workers,
        served: Served,
    ) -> Self {
        let control = device.and_then(|(_, minor)| device::open_control(minor).ok());
        Self {
            mount_point,
            device,
            control,
            workers,
            served: Mutex::new(Some(served)),
        }
    }

    /// Directory of the mount.
    pub fn mount_point(&self) -> &Path {
        &self.mount_point
    }

    /// Major and minor number of the mounted file system. `None` if the table of mounts did not show it.
    pub fn device(&self) -> Option<(u32, u32)> {
        self.device
    }

    /// Takes the mount out of the tree. With `lazy`, does so even while files are open; without it, open files cause
    /// `EBUSY`.
    pub fn unmount(&self, lazy: bool) -> io::Result<()> {
        device::detach(&self.mount_point, lazy)
    }

    /// Ends all requests and the session at once. Programs with open files get ENOTCONN. On a host without fusectl this
    /// works only while the mount is in the tree.
    pub fn abort(&self) -> io::Result<()> {
        device::abort(&self.mount_point, self.device, self.control.as_ref())
    }

    /// Waits until the session has ended, for whatever reason. Only the first call waits and returns the outcome; later
    /// calls return at once.
    pub fn wait(&self) -> io::Result<()> {
        let Some(served) = self.served.lock().take() else {
            return Ok(());
        };
        let ended = served.join();
        // Requests that were read before the end may still be under way.
        self.workers.wait_until_quiet(&[Class::Call, Class::Memory]);
        ended
    }
}

/// Returns the number of threads for the option `threads`: for 0, one for each core.
fn thread_count(option: usize) -> usize {
    if option > 0 {
        return option;
    }
    std::thread::available_parallelism().map_or(1, |cores| cores.get())
}
