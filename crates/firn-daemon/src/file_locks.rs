//! Starts the file locks that exclude programs on other hosts too, for the mounts that need them. The locks survive the
//! death of firnd, the process that serves the mount.
//!
//! Only a mount with logs (`layout=log`) has such locks, because several hosts may write the same file of its backing.
//! On all other mounts the kernel manages the locks of this host without firnd.
//!
//! Terms
//! * A *lock* is what a program has on a file, by fcntl(2) or flock(2).
//! * A *lock file* is a file in the backing's `.firn` that stands for the locked file. firnd locks it for its programs,
//!   and all hosts see that ([`firn_hosts::FileLocks`]).
//! * The *keeper* is the process that starts the next firnd. It holds the lock files open, so their locks stay.
//! * The *live table* is a mapped file for the next firnd. It lists which program has which lock.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

use firn_arena::live::LiveTable;
use firn_backing::{DirBacking, LockMode, LockRange, Volume};
use firn_config::Options;
use firn_engine::{Engine, HandleId};
use firn_format::live::FileLock;
use firn_hosts::own::{self, TOP};
use firn_hosts::{
    FILE_LOCKS, FileLocks, HeldLock, KeptLocks, LeaseUse, LockFileKey, LockKeeping, LockKind,
    LockSetup, Owner,
};

use crate::error::AttachError;
use crate::host_lease::{LivingHosts, open_backing, own_error};
use crate::host_name::host_name;
use crate::keeper::{KeeperLink, Label, Tag};
use crate::store::{Layers as _, Store};
use crate::takeover::TakenOverMount;

/// The parts of a mount from which its file locks are made.
pub(crate) struct FileLockParams<'a> {
    pub(crate) backing: &'a Path,
    pub(crate) engine: &'a Engine<Store>,
    pub(crate) options: &'a Options,
    /// The connection to the keeper; `None` without a keeper.
    pub(crate) link: Option<&'a Arc<KeeperLink>>,
    /// The mount of a dead firnd that this firnd continues.
    pub(crate) taken_over: Option<&'a TakenOverMount>,
}

/// Starts the file locks that exclude programs on other hosts too, and returns them. `None` if the mount keeps no logs
/// of writes: the kernel then manages locks for this host. A read-only mount gets locks that are always refused.
///
/// A lock of a program is held as a lock of a *lock file*, a file in the backing's `.firn` that all hosts use. If this
/// process continues the mount of a dead firnd, `taken_over` has the locks of its programs.
pub(crate) fn start(params: &FileLockParams<'_>) -> Result<Option<Arc<FileLocks>>, AttachError> {
    let &FileLockParams {
        backing,
        engine,
        options,
        link,
        taken_over,
    } = params;
    if engine.backing().log_layer().is_none() {
        return Ok(None);
    }
    if options.read_only {
        return Ok(Some(FileLocks::refused()));
    }
    let host = host_name(options)?;
    let base = open_backing(backing)?;
    let dir = make_lock_file_dir(&base, backing)?;
    let hosts = LivingHosts::open(backing, LeaseUse::Logs, &host)?;
    // Without a live table or a keeper, no next firnd continues the mount, and the locks end with this one.
    let lock_keeping: Option<Box<dyn LockKeeping>> = match (engine.live(), link) {
        (Some(table), Some(link)) => Some(Box::new(LocksForNextFirnd {
            table: Arc::clone(table),
            link: Arc::clone(link),
        })),
        _ => None,
    };
    let setup = LockSetup {
        base,
        dir,
        host,
        other_hosts: Box::new(move || hosts.others_living()),
        keeping: lock_keeping,
        kept: match taken_over {
            Some(taken_over) => take_kept_locks(taken_over, engine),
            None => KeptLocks::default(),
        },
    };
    FileLocks::start(setup)
        .map(Some)
        .map_err(AttachError::io("start the thread of locks"))
}

/// Makes the directory of lock files in the backing's `.firn` if it is missing, and returns it.
fn make_lock_file_dir(
    base: &DirBacking,
    backing: &Path,
) -> Result<<DirBacking as Volume>::Inode, AttachError> {
    let to_error = own_error(backing);
    let firn_dir = own::make_dir(base, &base.root(), TOP).map_err(&to_error)?;
    own::make_dir(base, &firn_dir, FILE_LOCKS).map_err(|error| to_error(error.below(TOP)))
}

/// Keeps the locks of programs for the next firnd: the live table lists them, and the keeper holds the lock files, by
/// which the backing has these locks, open.
struct LocksForNextFirnd {
    table: Arc<LiveTable>,
    link: Arc<KeeperLink>,
}

impl LockKeeping for LocksForNextFirnd {
    fn keep_lock_file(&self, lock_file: u64, descriptor: BorrowedFd<'_>) {
        if let Err(error) = self
            .link
            .keep_descriptor(lock_file_label(lock_file), descriptor)
        {
            tracing::warn!(%error, "cannot store a lock of a file: if firnd dies, the program loses it");
        }
    }

    fn drop_lock_file(&self, lock_file: u64) {
        self.link.drop_descriptor(lock_file_label(lock_file));
    }

    fn record_locks(&self, lock_file: u64, key: LockFileKey, locks: &[HeldLock]) -> bool {
        let entries = locks.iter().map(|lock| FileLock {
            file: key.file,
            lock_file,
            kind: key.kind as u8,
            is_exclusive: lock.mode == LockMode::Exclusive,
            owner: lock.owner.number,
            handle: lock.owner.handle,
            pid: lock.owner.pid,
            first: lock.range.first,
            last: lock.range.last,
        });
        self.table
            .set_file_locks(lock_file, &entries.collect::<Vec<_>>())
    }
}

/// Returns the label under which the keeper holds a lock file.
fn lock_file_label(lock_file: u64) -> Label {
    Label {
        tag: Tag::LockFile,
        number: lock_file,
    }
}

/// Returns the locks of programs that this firnd continues after the death of the one that served the mount.
///
/// All hosts see a program's lock as a lock of a second file in the backing, its *lock file*. The keeper, the process
/// that started this firnd, has kept the lock files open. The live table, a mapped file, lists which program has which
/// lock.
///
/// A lock that lacks its lock file, or its program's open file, is not returned: it is removed from the live table, and
/// the lock thread releases it in the backing.
fn take_kept_locks(taken_over: &TakenOverMount, engine: &Engine<Store>) -> KeptLocks {
    let kept_lock_files = std::mem::take(&mut *taken_over.lock_files.lock());
    let resumed = &taken_over.resumed;
    // The program still has the locked file open by the same handle, and the keeper has kept the lock file open.
    let can_continue = |lock: &FileLock| {
        let locked_ino = engine
            .open_files
            .backing_inode_number(HandleId(lock.handle));
        let has_lock_file = || {
            kept_lock_files
                .iter()
                .any(|file| file.ino == lock.lock_file)
        };
        locked_ino == Ok(lock.file) && has_lock_file()
    };
    // This drops all other locks from the live table.
    resumed.table.retain_file_locks(can_continue);
    let mut locks: HashMap<LockFileKey, Vec<HeldLock>> = HashMap::new();
    for stored in &resumed.contents.file_locks {
        let lock = &stored.entry;
        // A later version may have stored an unknown kind.
        let Some(kind) = LockKind::from_number(lock.kind) else {
            continue;
        };
        if can_continue(lock) {
            let file = lock.file;
            // A file has one lock file for each kind of lock.
            let key = LockFileKey { file, kind };
            locks.entry(key).or_default().push(held_lock(lock));
        }
    }
    KeptLocks {
        files: kept_lock_files,
        locks,
    }
}

/// Converts a lock of a program from the form of the live table, a mapped file in which the earlier firnd listed it, to
/// the form of the lock thread. Which file is locked is not in the result.
fn held_lock(lock: &FileLock) -> HeldLock {
    HeldLock {
        owner: Owner {
            number: lock.owner,
            handle: lock.handle,
            pid: lock.pid,
        },
        range: LockRange {
            first: lock.first,
            last: lock.last,
        },
        mode: if lock.is_exclusive {
            LockMode::Exclusive
        } else {
            LockMode::Shared
        },
    }
}
