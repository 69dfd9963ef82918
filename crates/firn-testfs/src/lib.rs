//! FUSE servers for tests and benchmarks.
//!
//! * [`Server`] serves any [`firn_backing::Backing`]: a directory ([`firn_backing::DirBacking`]) is a passthrough, the
//!   simulated disk a server whose power can be cut (`power`). A [`Policy`] is asked before each request and may
//!   delay it or answer with an error (`faults`).
//! * [`moosefs::MooseFs`] is a MooseFS with servers of its own, in a network namespace.
//! * [`slow::serve`] serves a directory as slowly as a network file system; the program `firn-slowfs` does.
//! * [`trace::Trace`] is a policy that records which client writes when.
//! * [`sink::Sink`] takes writes and forgets them: the least that a server written with the same crate can do.
//!
//! None of them is a file system to keep data in.

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

/// What the kernel may keep of what a server answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    /// Names and attributes for a second, pages while a file is open, as in a mount of Firn.
    Usual,
    /// Nothing: each access is a request.
    Nothing,
}

/// Is asked before each request is served.
pub trait Policy<B: Backing>: Send + Sync + 'static {
    /// Returns when `operation` (the request's name: `lookup`, `write`, …) on `inode`, or on `name` in it, may be
    /// served; an error is the answer instead.
    fn admit(
        &self,
        operation: &'static str,
        inode: &B::Inode,
        name: Option<&OsStr>,
    ) -> Result<(), Errno>;

    /// The name under which `name` is stored: file systems that do not tell upper from lower case store one for several.
    fn stored_name<'n>(&self, name: &'n OsStr) -> Cow<'n, OsStr> {
        Cow::Borrowed(name)
    }

    /// Returns when `transfer` of the file with this inode number has taken its time.
    fn transfer(&self, _file: u64, _transfer: Transfer) {}
}

/// What happens to the data of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// These bytes are there, and are going to be sent.
    Read(Range<u64>),
    /// These bytes are going to be stored.
    Write(Range<u64>),
    /// What was written is going to be synced.
    Sync,
    /// A descriptor is closed.
    Close,
}

/// Every request is served at once.
pub struct Admit;

impl<B: Backing> Policy<B> for Admit {
    fn admit(&self, _: &'static str, _: &B::Inode, _: Option<&OsStr>) -> Result<(), Errno> {
        Ok(())
    }
}

/// Every request is served at once, and upper and lower case of ASCII letters are the same in names.
pub struct FoldCase;

impl<B: Backing> Policy<B> for FoldCase {
    fn admit(&self, _: &'static str, _: &B::Inode, _: Option<&OsStr>) -> Result<(), Errno> {
        Ok(())
    }

    fn stored_name<'n>(&self, name: &'n OsStr) -> Cow<'n, OsStr> {
        Cow::Owned(name.to_ascii_lowercase())
    }
}

/// The settings of a mount that is called `name` in the table of mounts.
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

/// Mounts `source` for one of several clients, each with a policy of its own: nothing is cached, and a lock of one keeps
/// the others out. It is served until the session is dropped. The process must have umask 0.
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

/// Takes a mount out of the tree, also where programs still use it.
pub fn unmount_lazily(mount_point: &Path) {
    use rustix::mount::{UnmountFlags, unmount};
    if unmount(mount_point, UnmountFlags::DETACH) == Err(rustix::io::Errno::PERM) {
        run_quietly(
            "fusermount3",
            &["-u", "-z", "-q", &mount_point.to_string_lossy()],
        );
    }
}

/// Runs a program to its end; an error says what it printed.
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

/// Runs a program whose result does not matter.
fn run_quietly(program: &str, args: &[&str]) {
    let _ = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
}
