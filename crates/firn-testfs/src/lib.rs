//! FUSE servers for tests and benchmarks.
//!
//! * [`Server`] serves any [`firn_backing::Backing`]: a directory ([`firn_backing::DirBacking`]) is a passthrough, the
//!   simulated disk is a server that can lose its power (`power`). A [`Policy`] is asked before each request and may
//!   delay it or answer with an error (`faults`).
//! * [`moosefs::MooseFs`] is a MooseFS with servers of its own, in a network namespace.
//! * [`slow::serve`] serves a directory as slowly as a network file system, for the program `firn-slowfs`.
//! * [`trace::Trace`] is a policy that records which file is written when.
//! * [`sink::Sink`] accepts writes and discards their bytes. It shows how fast any server written with `fuser` can be.
//!
//! None of them is for data that must not be lost.

pub mod cleanup;
pub mod faults;
pub mod moosefs;
pub mod namespace;
#[cfg(feature = "power")]
pub mod power;
mod requests;
mod server;
pub mod sink;
pub mod slow;
pub mod trace;

use std::borrow::Cow;
use std::ffi::OsStr;
use std::ops::Range;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use firn_backing::{Backing, DirBacking};
use fuser::{Config, MountOption, SessionACL};

pub use fuser::{BackgroundSession, Errno};
pub use server::Server;

/// Largest write request: the kernel's default cap, and what firnd asks for.
pub const MAX_WRITE_BYTES: u32 = 1 << 20;

/// Which answers of a server the kernel may cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    /// Names and attributes for a second, pages while a file is open, as in a mount of Firn.
    Usual,
    /// Nothing: each access is a request.
    Nothing,
}

/// Decides before each request whether and when it is served.
pub trait Policy<B: Backing>: Send + Sync + 'static {
    /// Blocks until a request may be served: `operation` (`lookup`, `write`, …) on `inode`, or on `name` in it. An
    /// error becomes the answer to the request.
    fn admit(
        &self,
        operation: &'static str,
        inode: &B::Inode,
        name: Option<&OsStr>,
    ) -> Result<(), Errno>;

    /// Returns the name under which `name` is stored. A file system without a difference between upper and lower case
    /// stores one name for several.
    fn stored_name<'n>(&self, name: &'n OsStr) -> Cow<'n, OsStr> {
        Cow::Borrowed(name)
    }

    /// Blocks as long as this use of data should take, in the file with this inode number. By default it takes no time.
    fn transfer(&self, _file: u64, _transfer: Transfer) {}
}

/// A use of a file's data for which a [`Policy`] may charge time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// This range was read, and will be sent to the kernel.
    Read(Range<u64>),
    /// This range will be stored.
    Write(Range<u64>),
    /// The written bytes will be synced.
    Sync,
    /// A descriptor is closed.
    Close,
}

/// Policy that serves every request at once.
pub struct Admit;

impl<B: Backing> Policy<B> for Admit {
    fn admit(&self, _: &'static str, _: &B::Inode, _: Option<&OsStr>) -> Result<(), Errno> {
        Ok(())
    }
}

/// Policy that serves every request at once, and treats upper and lower case of ASCII letters in names as equal.
pub struct FoldCase;

impl<B: Backing> Policy<B> for FoldCase {
    fn admit(&self, _: &'static str, _: &B::Inode, _: Option<&OsStr>) -> Result<(), Errno> {
        Ok(())
    }

    fn stored_name<'n>(&self, name: &'n OsStr) -> Cow<'n, OsStr> {
        Cow::Owned(name.to_ascii_lowercase())
    }
}

/// Returns the settings of a mount that has the name `name` in the kernel's table of mounts.
pub fn mount_settings(name: &str, acl: SessionACL, threads: usize) -> Config {
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName(name.to_owned()),
        MountOption::Subtype(name.to_owned()),
        MountOption::DefaultPermissions,
    ];
    config.acl = acl;
    config.n_threads = Some(threads);
    // Each thread reads requests from a descriptor of its own.
    config.clone_fd = true;
    config
}

/// Mounts the directory `source` as one of several clients sees it. The mount exists until the session is dropped.
///
/// Nothing is cached, and file locks of one client exclude the others. Each client has its own policy. The process must
/// have umask 0.
pub fn mount_client(
    source: &Path,
    mount_point: &Path,
    policy: impl Policy<DirBacking>,
    threads: usize,
) -> anyhow::Result<BackgroundSession> {
    let server = Server::new(DirBacking::open(source)?, policy, Caching::Nothing)?.with_locks();
    let settings = mount_settings("firn-model", SessionACL::Owner, threads);
    fuser::spawn_mount(server, mount_point, &settings)
        .with_context(|| format!("cannot mount {}", mount_point.display()))
}

/// Detaches a mount from its mount point, even if programs still use it.
pub fn unmount_lazily(mount_point: &Path) {
    use rustix::mount::{UnmountFlags, unmount};
    if unmount(mount_point, UnmountFlags::DETACH) == Err(rustix::io::Errno::PERM) {
        run_quietly(
            "fusermount3",
            &["-u", "-z", "-q", &mount_point.to_string_lossy()],
        );
    }
}

/// Runs a program to its end, and returns its output without trailing white space. If the program fails, the error has
/// its error output.
pub fn run(program: &str, args: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {program}; is it installed?"))?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr);
        bail!(
            "`{program} {}` failed: {}",
            args.join(" "),
            message.trim_end()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout)
        .trim_end()
        .to_owned())
}

/// Runs a program without input and output, and ignores its result.
fn run_quietly(program: &str, args: &[&str]) {
    let _ = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
}
