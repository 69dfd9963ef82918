//! A FUSE server for tests that passes requests to a directory, and lets them fail or hang on command.
//!
//! So a test gets I/O errors of a file system without the device mapper. If the test kills the server, calls fail with
//! ENOTCONN, as on a lost network mount.
//!
//! The test gives its commands in files ([`Control`]); `PATH` is the path that it chooses for them:
//! * `PATH` has the name of the errno with which every write and fsync fails (`EIO`, `ENOSPC`, `EDQUOT`, `ESTALE`). If
//!   it is empty, they succeed.
//! * `PATH.hang` has an operation and the beginning of a path, relative to the served directory. The operation hangs
//!   for all these paths until the file is removed or changed.
//! * `PATH.hung` gets one byte from the server for each call that begins to hang.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_backing::{DirBacking, Volume};
use fuser::{Errno, SessionACL};
use parking_lot::Mutex;

use crate::{Caching, Policy, Server, mount_settings};

/// Interval at which the server checks whether a hanging call must still hang.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The files by which a test commands a server (head of this file).
#[derive(Clone, Debug)]
pub struct Control {
    path: PathBuf,
}

impl Control {
    /// Returns the control over the server that reads its commands at `path`. The server need not run yet.
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Returns the path of the commands, for [`serve`].
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes every write and fsync fail with the errno of this name from now on. An empty name ends that.
    pub fn fail_writes(&self, errno: &str) -> io::Result<()> {
        fs::write(&self.path, errno)
    }

    /// Makes the request `operation` hang for all paths that begin with `path`, until [`Control::let_go`].
    pub fn hang(&self, operation: &str, path: &str) -> io::Result<()> {
        fs::write(self.hung_file(), "")?;
        let next = self.path.with_extension("next");
        fs::write(&next, format!("{operation} {path}"))?;
        fs::rename(next, self.hang_file())
    }

    /// Ends [`Control::hang`].
    pub fn let_go(&self) -> io::Result<()> {
        fs::remove_file(self.hang_file())
    }

    /// Returns how many calls have begun to hang since [`Control::hang`].
    pub fn hung_count(&self) -> u64 {
        fs::metadata(self.hung_file()).map_or(0, |meta| meta.len())
    }

    fn hang_file(&self) -> PathBuf {
        self.path.with_extension("hang")
    }

    fn hung_file(&self) -> PathBuf {
        self.path.with_extension("hung")
    }

    fn count_hung(&self) -> io::Result<()> {
        let mut options = OpenOptions::new();
        let mut file = options.append(true).create(true).open(self.hung_file())?;
        file.write_all(b".")
    }

    /// Returns whether the command of the test makes `operation` on `path` hang now.
    fn hangs(&self, operation: &str, path: &str) -> bool {
        let rule = fs::read_to_string(self.hang_file()).unwrap_or_default();
        let (hanging, beginning) = rule.split_once(' ').unwrap_or_default();
        hanging == operation && path.starts_with(beginning)
    }

    fn write_fault(&self) -> Result<(), Errno> {
        match fs::read_to_string(&self.path).unwrap_or_default().trim() {
            "" => Ok(()),
            "ENOSPC" => Err(Errno::ENOSPC),
            "EDQUOT" => Err(Errno::EDQUOT),
            "ESTALE" => Err(Errno::ESTALE),
            _ => Err(Errno::EIO),
        }
    }
}

/// The policy of the server: lets requests fail or hang as a [`Control`] says.
struct Faults {
    control: Control,
    /// Canonical path of the served directory.
    source: PathBuf,
    /// Held by the one hanging call that polls the file. The others wait for the lock, so hundreds of them cost no
    /// more.
    watch: Mutex<()>,
}

impl Policy<DirBacking> for Faults {
    fn admit(
        &self,
        operation: &'static str,
        inode: &<DirBacking as Volume>::Inode,
        name: Option<&OsStr>,
    ) -> Result<(), Errno> {
        self.hang(operation, inode, name);
        match operation {
            "write" | "fsync" => self.control.write_fault(),
            _ => Ok(()),
        }
    }
}

impl Faults {
    /// Delays a request as long as the test's command makes it hang. Any other request is not delayed.
    fn hang(&self, operation: &str, inode: &<DirBacking as Volume>::Inode, name: Option<&OsStr>) {
        if !self.control.hang_file().exists() {
            return;
        }
        let Some(path) = self.relative_path(inode, name) else {
            return;
        };
        if !self.control.hangs(operation, &path) {
            return;
        }
        self.control.count_hung().expect("count what hangs");
        // The lock lets only one of the hanging calls poll the file; the others wait for the lock.
        loop {
            let _watch = self.watch.lock();
            if !self.control.hangs(operation, &path) {
                return;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns the path of an object, or of `name` in it, relative to the served directory.
    fn relative_path(
        &self,
        inode: &<DirBacking as Volume>::Inode,
        name: Option<&OsStr>,
    ) -> Option<String> {
        let link = format!("/proc/self/fd/{}", inode.as_fd().as_raw_fd());
        let mut path = fs::read_link(link).ok()?;
        path.extend(name);
        let relative = path.strip_prefix(&self.source).unwrap_or(&path);
        Some(relative.display().to_string())
    }
}

/// Serves the directory `source` at `mount_point` until the process is killed.
///
/// A hanging call occupies a thread. So `threads` must be larger than the number of calls that hang at a time.
pub fn serve(source: &Path, mount_point: &Path, control: &Path, threads: usize) -> io::Result<()> {
    rustix::process::umask(rustix::fs::Mode::empty());
    let policy = Faults {
        control: Control::new(control.to_owned()),
        source: source.canonicalize()?,
        watch: Mutex::new(()),
    };
    let server = Server::new(DirBacking::open(source)?, policy, Caching::Nothing)?;
    let settings = mount_settings("firn-faultfs", SessionACL::All, threads);
    fuser::mount(server, mount_point, &settings)
}
