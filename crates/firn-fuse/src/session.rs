//! A mount: the device, the transport that serves it, and its end.
//!
//! Promises
//! * When [`Session::mount`] returns, the mount is usable.
//! * [`Session::wait`] returns when the kernel has let go of the mount for good: no request is in
//!   flight and none will come.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use firn_backing::Backing;
use firn_engine::ResumedRequests;
use firn_format::live::Exchange;
use firn_workers::{Class, Workers};
use parking_lot::Mutex;

use crate::adapter::Adapter;
use crate::device;
use crate::transport::dev_fuse::{self, KeepConnection, Origin, Served};

/// How to mount.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// What `/proc/self/mountinfo` shows as the source: the canonical backing path.
    pub source: PathBuf,
    /// Threads that carry out requests; 0: one a core. One more reads them.
    pub threads: usize,
    /// Let other users in; the kernel checks permissions in any case.
    pub allow_other: bool,
    /// Mount read-only.
    pub read_only: bool,
    /// Flags of the kernel by their mount(8) names (`noexec`, `suid`, …), later ones over earlier
    /// ones. Without any, `nosuid` and `nodev` hold.
    pub kernel_flags: Vec<&'static str>,
}

/// Why there is no mount.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// No FUSE in this kernel or container.
    #[error(
        "/dev/fuse is missing: load the module (modprobe fuse), give the container the device (--device /dev/fuse), or mount with --frontend=preload, which needs no FUSE"
    )]
    NoDevice,
    /// Not root, and nothing that mounts for others.
    #[error(
        "mounting without root needs fusermount3, which was not found: install fuse3, or mount as root"
    )]
    NoHelper,
    /// It was asked and refused.
    #[error("fusermount3 refused: {text}{}", way_without_fuse(text))]
    Helper {
        /// Its words.
        text: String,
    },
    /// mount(2) failed.
    #[error("cannot mount on {mount_point}: {source}", mount_point = firn_format::quote::quoted_path(mount_point))]
    Mount {
        /// Where.
        mount_point: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The kernel lacks what Firn needs, or threads could not be started.
    #[error("the FUSE session did not start: {0}")]
    Start(io::Error),
}

/// What a user does that may not open the device.
fn way_without_fuse(refusal: &str) -> &'static str {
    if refusal.contains("/dev/fuse") {
        "; ask the administrator for access to it, or run without FUSE: `firn run`, or mount with --frontend=preload"
    } else {
        ""
    }
}

/// A connection that an earlier firnd served.
pub struct KeptConnection<'a> {
    /// A descriptor of it.
    pub device: OwnedFd,
    /// Major and minor number of the mounted file system.
    pub number: (u32, u32),
    /// INIT and its answer.
    pub exchange: &'a Exchange,
    /// Handles and requests.
    pub left: ResumedRequests,
}

/// A mount that is served.
pub struct Session {
    mount_point: PathBuf,
    /// The device of the file system; the minor number is that of the connection.
    device: Option<(u32, u32)>,
    /// Aborts the connection, also when the mount is out of the tree.
    control: Option<OwnedFd>,
    workers: Workers,
    served: Mutex<Option<Served>>,
}

impl Session {
    /// Mounts `adapter` at `mount_point` and serves it from threads of its own. `keep` gets what another firnd needs to
    /// go on with the mount.
    pub fn mount<B: Backing>(
        adapter: Adapter<B>,
        mount_point: &Path,
        options: &SessionOptions,
        keep: &dyn KeepConnection,
    ) -> Result<Self, SessionError> {
        let mount_point = mount_point.to_owned();
        let device = device::mount(&mount_point, options)?;
        let dispatcher = adapter.into_dispatcher();
        let workers = dispatcher.workers();
        let threads = thread_count(options.threads);
        match dev_fuse::serve(dispatcher, device, Origin::Mounted { keep }, threads) {
            Ok(served) => {
                let device = device::device_number(&mount_point);
                device.inspect(|number| device::set_readahead(*number));
                Ok(Self::of(mount_point, device, workers, served))
            }
            Err(error) => {
                let _ = device::detach(&mount_point, true);
                Err(SessionError::Start(error))
            }
        }
    }

    /// Goes on with a mount that an earlier firnd served.
    pub fn resume<B: Backing>(
        adapter: Adapter<B>,
        mount_point: &Path,
        options: &SessionOptions,
        kept: KeptConnection<'_>,
    ) -> Result<Self, SessionError> {
        let dispatcher = adapter.into_dispatcher();
        let workers = dispatcher.workers();
        let threads = thread_count(options.threads);
        let KeptConnection {
            device,
            number,
            exchange,
            left,
        } = kept;
        let origin = Origin::Resumed { exchange, left };
        let served =
            dev_fuse::serve(dispatcher, device, origin, threads).map_err(SessionError::Start)?;
        let mount_point = mount_point.to_owned();
        Ok(Self::of(mount_point, Some(number), workers, served))
    }

    fn of(
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

    /// Where it is mounted.
    pub fn mount_point(&self) -> &Path {
        &self.mount_point
    }

    /// Major and minor number of the mounted file system, where the table of mounts told it.
    pub fn device(&self) -> Option<(u32, u32)> {
        self.device
    }

    /// Takes the mount out of the tree. Without `lazy`, `EBUSY` while files are open.
    pub fn unmount(&self, lazy: bool) -> io::Result<()> {
        device::detach(&self.mount_point, lazy)
    }

    /// Ends all requests and the session at once; programs with open files get ENOTCONN. Where
    /// fusectl is not mounted, that can be done only before the mount is taken out of the tree.
    pub fn abort(&self) -> io::Result<()> {
        device::abort(&self.mount_point, self.device, self.control.as_ref())
    }

    /// Waits until the session ended, by whatever cause. One caller gets the outcome; for others it
    /// is over at once.
    pub fn wait(&self) -> io::Result<()> {
        let Some(served) = self.served.lock().take() else {
            return Ok(());
        };
        let ended = served.join();
        // What was read before the end may still be carried out.
        self.workers.wait_until_quiet(&[Class::Call, Class::Memory]);
        ended
    }
}

fn thread_count(option: usize) -> usize {
    if option > 0 {
        return option;
    }
    std::thread::available_parallelism().map_or(1, |cores| cores.get())
}
