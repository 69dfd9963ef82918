//! Checks whether file locks in a backing exclude other hosts. A *backing* is the directory, perhaps shared by several
//! hosts, that a mount serves.
//!
//! No file system reports how far its locks reach. In these cases the kernel of each host keeps the locks for itself:
//! NFS with `local_lock=`, Lustre without `-o flock`, BeeGFS without global locks, and every FUSE server that does
//! not implement locks. Each host then believes that it is alone. One host can check two things:
//!
//! * Two open files of the same file on this host must exclude each other, and the lock must end when its open file
//!   is closed.
//! * The *leases* of other hosts: files that a living host keeps locked and rewrites with a growing counter, its
//!   *heartbeat*. If the lock is free although the counter grows, the lock does not reach this host.
//!
//! If the locks of two hosts do not reach each other, the host that comes second detects this, provided that the
//! first host is alive. Two hosts that are never alive at the same time need no exclusion.

use std::ffi::OsStr;
use std::time::Duration;

use firn_backing::{Backing, Errno, LockMode};

use crate::host_dir::{host_dir_name, list_hosts_in};
use crate::lease::{Heartbeat, Holder, Lease, WatchedLease, wait_for_heartbeat};
use crate::own::{self, OwnError, TOP};

/// Prefix of the name of the file that is locked for the check; the host's name follows.
const PROBE: &str = "probe-";
/// Number of attempts to lock after the close, because some servers learn of a close with a delay.
const CLOSE_TRIES: u32 = 20;
const CLOSE_RETRY_PAUSE: Duration = Duration::from_millis(50);

/// Why hosts cannot rely on locks in a backing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReachError {
    /// The file system does not support locks.
    #[error("its file system refuses to lock a file: {0}")]
    Refused(#[source] Errno),
    /// Two open files held the same exclusive lock at the same time.
    #[error("its file system grants two open files of this host the same exclusive lock")]
    NotExclusive,
    /// A lock remained after its open file was closed.
    #[error("its file system keeps a lock after the file was closed")]
    NotReleased,
    /// The lock of a living host's lease does not exclude this host.
    #[error(
        "locks of its file system do not reach other hosts: {host} is alive, and its lock does not keep this host out"
    )]
    StaysOnHost {
        /// Name of the living host.
        host: String,
    },
    /// A file or directory that Firn owns is not in the required state, or the backing failed.
    #[error(transparent)]
    Own(#[from] OwnError),
}

impl From<Errno> for ReachError {
    fn from(errno: Errno) -> Self {
        Self::Own(OwnError::Backing(errno))
    }
}

/// Checks how far locks in a backing reach. The check uses a probe file in `.firn/` and the leases of the other
/// hosts.
///
/// `sleep` must wait for the given time.
pub fn check_reach<B: Backing>(
    base: &B,
    me: &Holder,
    sleep: &mut dyn FnMut(Duration),
) -> Result<(), ReachError> {
    let top = own::make_dir(base, &base.root(), TOP)?;
    check_on_this_host(base, &top, &me.host, sleep)?;
    check_other_hosts(base, &top, me, sleep).map_err(|error| match error {
        ReachError::Own(error) => ReachError::Own(error.below(TOP)),
        error => error,
    })
}

/// Checks that two open files of this host exclude each other.
fn check_on_this_host<B: Backing>(
    base: &B,
    dir: &B::Inode,
    host: &str,
    sleep: &mut dyn FnMut(Duration),
) -> Result<(), ReachError> {
    let name = format!("{PROBE}{host}");
    let checked = check_two_files(base, dir, &name, sleep);
    // Removed after a failed check too.
    let removed = base.unlink(dir, OsStr::new(&name));
    checked?;
    Ok(removed?)
}

/// Checks that two open files of this host exclude each other when both lock the file `name` in `dir`. Fails with
/// [`ReachError::NotExclusive`] if they do not, and with [`ReachError::NotReleased`] if the lock stays after the close.
///
/// The function creates the file and does not remove it; the caller removes it. `sleep` must wait for the given time.
pub fn check_two_files<B: Backing>(
    base: &B,
    dir: &B::Inode,
    name: &str,
    sleep: &mut dyn FnMut(Duration),
) -> Result<(), ReachError> {
    let first_file = own::open_or_create(base, dir, name)?;
    let second_file = own::open_or_create(base, dir, name)?;
    let try_lock = |file: &B::File| {
        base.try_lock(file, LockMode::Exclusive)
            .map_err(ReachError::Refused)
    };
    if !try_lock(&first_file)? || try_lock(&second_file)? {
        return Err(ReachError::NotExclusive);
    }
    // The close must end the lock, so that the second file gets it.
    drop(first_file);
    for _ in 0..CLOSE_TRIES {
        if try_lock(&second_file)? {
            return Ok(());
        }
        sleep(CLOSE_RETRY_PAUSE);
    }
    Err(ReachError::NotReleased)
}

/// Checks that the locks of other living hosts exclude this one, by their leases: files that a living host keeps locked
/// and rewrites with heartbeats. Fails with [`ReachError::StaysOnHost`] if this host could lock a lease, and its holder
/// still writes heartbeats.
///
/// A lease is suspect if it is not locked and its holder may nevertheless be alive. All suspect leases are watched
/// together.
fn check_other_hosts<B: Backing>(
    base: &B,
    top: &B::Inode,
    me: &Holder,
    sleep: &mut dyn FnMut(Duration),
) -> Result<(), ReachError> {
    let device = base.attr(top)?.dev;
    let mut suspect_leases = Vec::new();
    for host in list_hosts_in(base, top)? {
        if host == me.host {
            continue;
        }
        let name = host_dir_name(&host);
        let Some((host_dir, _)) = own::find_dir(base, top, &name)? else {
            continue;
        };
        let first_heartbeat =
            Heartbeat::read(base, &host_dir).map_err(|error| error.below(&name))?;
        let Some(first_heartbeat) = first_heartbeat else {
            continue;
        };
        if !first_heartbeat.does_free_lock_prove_end(&me.boot, device)
            && !Lease::is_held(base, &host_dir)?
        {
            suspect_leases.push(WatchedLease {
                lease: host_dir,
                first_heartbeat,
            });
        }
    }
    let read_heartbeat = &mut |host_dir: &B::Inode| Heartbeat::read(base, host_dir);
    let Some(heartbeat) = wait_for_heartbeat(&suspect_leases, sleep, read_heartbeat)? else {
        return Ok(());
    };
    let host = match heartbeat.holder() {
        Some(holder) => holder.host,
        None => "another host".into(),
    };
    Err(ReachError::StaysOnHost { host })
}
