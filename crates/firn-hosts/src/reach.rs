//! Whether locks of files in a backing keep other hosts out.
//!
//! No file system says how far its locks reach. The kernel of each host keeps them with NFS and `local_lock=`, Lustre
//! without `-o flock`, BeeGFS without global locks and every FUSE server that has no locks of its own. Each host then
//! believes that it is alone. Two things can be seen from one host:
//!
//! * Two open files of one file here: they must exclude each other, and the lock must end with its open file.
//! * The leases of other hosts: where a lock is free whose holder beats, it does not reach this host.
//!
//! So hosts whose locks do not reach each other are found out when the second of them comes, as long as the first one
//! lives. Two that never live at the same time have nothing to exclude.

use std::ffi::OsStr;
use std::time::Duration;

use firn_backing::{Backing, Errno, LockMode};

use crate::host_dir::{host_dir_name, list_hosts_in};
use crate::lease::{Beat, Holder, Lease, find_living};
use crate::own::{self, OwnError, TOP};

/// The file that is locked to see what comes of it, before the name of the host.
const PROBE: &str = "probe-";
/// Some servers hear of a close a little later.
const CLOSE_TRIES: u32 = 20;
const CLOSE_REST: Duration = Duration::from_millis(50);

/// Why hosts cannot rely on locks in a backing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReachError {
    /// The file system has none.
    #[error("its file system refuses to lock a file: {0}")]
    Refused(#[source] Errno),
    /// Two open files have the same lock.
    #[error("its file system lets two open files of this host lock the same file")]
    NotExclusive,
    /// A lock outlives what it belongs to.
    #[error("its file system keeps a file locked that was closed")]
    NotReleased,
    /// A host that lives does not keep this one out.
    #[error(
        "locks of its file system stay on their host: {host} is alive and does not keep this one out"
    )]
    StaysOnHost {
        /// Its name.
        host: String,
    },
    /// A file of Firn's own is not as it must be, or the backing failed.
    #[error(transparent)]
    Own(#[from] OwnError),
}

impl From<Errno> for ReachError {
    fn from(errno: Errno) -> Self {
        Self::Own(OwnError::Backing(errno))
    }
}

/// Looks how far locks in a backing reach, by files in `.firn/` and by the leases of the other hosts. `rest` waits for so
/// long.
pub fn check_reach<B: Backing>(
    base: &B,
    me: &Holder,
    rest: &mut dyn FnMut(Duration),
) -> Result<(), ReachError> {
    let top = own::dir(base, &base.root(), TOP)?;
    check_here(base, &top, &me.host, rest)?;
    check_others(base, &top, me, rest).map_err(|error| match error {
        ReachError::Own(error) => ReachError::Own(error.below(TOP)),
        error => error,
    })
}

/// What can be seen of two open files of this host.
fn check_here<B: Backing>(
    base: &B,
    dir: &B::Inode,
    host: &str,
    rest: &mut dyn FnMut(Duration),
) -> Result<(), ReachError> {
    let name = format!("{PROBE}{host}");
    let checked = check_two_files(base, dir, &name, rest);
    let removed = base.unlink(dir, OsStr::new(&name));
    checked?;
    Ok(removed?)
}

/// Whether two open files of this host exclude each other by locks of the file `name` in `dir`, which is made, and left to
/// the caller.
pub fn check_two_files<B: Backing>(
    base: &B,
    dir: &B::Inode,
    name: &str,
    rest: &mut dyn FnMut(Duration),
) -> Result<(), ReachError> {
    let first = own::open_or_create(base, dir, name)?;
    let second = own::open_or_create(base, dir, name)?;
    let lock = |file: &B::File| {
        base.try_lock(file, LockMode::Exclusive)
            .map_err(ReachError::Refused)
    };
    if !lock(&first)? || lock(&second)? {
        return Err(ReachError::NotExclusive);
    }
    drop(first);
    for _ in 0..CLOSE_TRIES {
        if lock(&second)? {
            return Ok(());
        }
        rest(CLOSE_REST);
    }
    Err(ReachError::NotReleased)
}

/// Looks for leases whose locks are free and whose holders beat.
fn check_others<B: Backing>(
    base: &B,
    top: &B::Inode,
    me: &Holder,
    rest: &mut dyn FnMut(Duration),
) -> Result<(), ReachError> {
    let device = base.attr(top)?.dev;
    let mut in_doubt = Vec::new();
    for host in list_hosts_in(base, top)? {
        if host == me.host {
            continue;
        }
        let name = host_dir_name(&host);
        let Some((host_dir, _)) = own::find_dir(base, top, &name)? else {
            continue;
        };
        let beat = Beat::read(base, &host_dir).map_err(|error| error.below(&name))?;
        let Some(beat) = beat else {
            continue;
        };
        if !beat.is_settled_by_lock(&me.boot, device) && !Lease::is_held(base, &host_dir)? {
            in_doubt.push((host_dir, beat));
        }
    }
    let read = &mut |host_dir: &B::Inode| Beat::read(base, host_dir);
    match find_living(&in_doubt, rest, read)? {
        None => Ok(()),
        Some(beat) => Err(ReachError::StaysOnHost {
            host: beat
                .holder()
                .map_or_else(|| "another host".into(), |holder| holder.host),
        }),
    }
}
