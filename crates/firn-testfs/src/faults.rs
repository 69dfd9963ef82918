//! A passthrough that fails on command, steered by files.
//!
//! No device mapper is needed to get an I/O error out of a file system this way, and killing the process that serves
//! makes the backing vanish (ENOTCONN) as a lost network mount does.
//!
//! A [`Control`] has three files:
//! * one with the name of the errno that every write and fsync gives (`EIO`, `ENOSPC`, `EDQUOT`, `ESTALE`); empty for
//!   health;
//! * with the extension `hang`: an operation and the beginning of a path, relative to the directory that is served.
//!   The operation does not return for any such path before the file says something else;
//! * with the extension `hung`: a byte for each call that came to hang.

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

/// How often the server looks whether calls that hang still shall.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Tells a server what shall fail.
#[derive(Clone, Debug)]
pub struct Control {
    path: PathBuf,
}

impl Control {
    /// The files at `path`, of a server that runs or will.
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Its path, for [`serve`].
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// From now on every write and fsync fails with the errno of this name; empty heals.
    pub fn fail_writes(&self, errno: &str) -> io::Result<()> {
        fs::write(&self.path, errno)
    }

    /// From now on `operation` (the request's name) hangs for all paths that begin with `path`, until
    /// [`Control::let_go`].
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

    /// Calls that came to hang since [`Control::hang`].
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

    /// Whether `operation` on `path` shall hang now.
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

/// Does what a [`Control`] says.
struct Faults {
    control: Control,
    /// The directory that is served, as the kernel names it.
    source: PathBuf,
    /// Held by the one hung call that watches the rule, so that hundreds of them cost no more than one.
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
    /// Returns when the request may go on.
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
        loop {
            let _watch = self.watch.lock();
            if !self.control.hangs(operation, &path) {
                return;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

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

/// Serves `source` at `mount_point` until the process is killed, with `threads` threads: one more than calls may hang
/// at a time.
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
