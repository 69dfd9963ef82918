//! The seam to the transport: a mounted adapter and its threads.
//!
//! Promises
//! * When [`Session::mount`] returns, the mount is usable.
//! * [`Session::wait`] returns when the kernel has let go of the mount for good: no request is in
//!   flight and none will come.

use std::io;
use std::path::{Path, PathBuf};

use firn_backing::Backing;
use fuser::{Config, SessionACL};
use parking_lot::Mutex;

use crate::adapter::Adapter;
use crate::device;
use crate::workers::Workers;

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
    #[error("fusermount3 refused: {text}")]
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
    /// The kernel and we could not agree, or threads could not be started.
    #[error("the FUSE session did not start: {0}")]
    Start(io::Error),
}

/// A mount that is served.
pub struct Session {
    mount_point: PathBuf,
    /// The kernel's number of this connection, under which it can be aborted.
    connection: Option<u32>,
    workers: Workers,
    background: Mutex<Option<fuser::BackgroundSession>>,
}

impl Session {
    /// Mounts `adapter` at `mount_point` and serves it from threads of its own.
    pub fn mount<B: Backing>(
        adapter: Adapter<B>,
        mount_point: &Path,
        options: &SessionOptions,
    ) -> Result<Self, SessionError> {
        let mount_point = mount_point.to_owned();
        let device = device::mount(&mount_point, options)?;
        let workers = adapter.workers();
        match start(adapter, device, options) {
            Ok(background) => {
                let connection = device::connection(&mount_point);
                Ok(Self {
                    mount_point,
                    connection,
                    workers,
                    background: Mutex::new(Some(background)),
                })
            }
            Err(error) => {
                let _ = device::detach(&mount_point, true);
                Err(SessionError::Start(error))
            }
        }
    }

    /// Takes the mount out of the tree. Without `lazy`, `EBUSY` while files are open.
    pub fn unmount(&self, lazy: bool) -> io::Result<()> {
        device::detach(&self.mount_point, lazy)
    }

    /// Ends all requests and the session at once; programs with open files get ENOTCONN. To be called
    /// before the mount is taken out of the tree.
    pub fn abort(&self) -> io::Result<()> {
        device::abort(&self.mount_point, self.connection)
    }

    /// Waits until the session ended, by whatever cause. One caller gets the outcome; for others it
    /// is over at once.
    pub fn wait(&self) -> io::Result<()> {
        let Some(background) = self.background.lock().take() else {
            return Ok(());
        };
        let ended = background.join();
        // What was read before the end may still be carried out.
        self.workers.wait_until_quiet();
        ended
    }
}

fn start<B: Backing>(
    adapter: Adapter<B>,
    device: std::os::fd::OwnedFd,
    options: &SessionOptions,
) -> io::Result<fuser::BackgroundSession> {
    let mut config = Config::default();
    config.acl = if options.allow_other {
        SessionACL::All
    } else {
        SessionACL::Owner
    };
    let cores = || std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let threads = if options.threads == 0 {
        cores()
    } else {
        options.threads
    };
    adapter.serving().set_threads(threads);
    config.n_threads = Some(threads + 1);
    config.clone_fd = true;
    let coherence = adapter.coherence();
    let session = fuser::Session::from_fd(adapter, device, config.acl, config)?;
    coherence.start(session.notifier());
    session.spawn()
}
