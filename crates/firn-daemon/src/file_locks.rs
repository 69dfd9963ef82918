//! Decides which mounts have file locks that reach other hosts ([`firn_hosts::FileLocks`]), and starts these locks.
//!
//! A mount with logs has them, because several hosts may write the files of its backing. On all other mounts the kernel
//! manages the locks of this host without firnd.
//!
//! If firnd dies, the next one resumes the locks: the keeper of the mount holds the lock files, and the live table has
//! the locks of each program.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

use firn_arena::live::LiveTable;
use firn_backing::{LockMode, LockRange, Volume};
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

/// What the locks of a mount need.
pub(crate) struct MountWithLocks<'a> {
    pub(crate) backing: &'a Path,
    pub(crate) engine: &'a Engine<Store>,
    pub(crate) options: &'a Options,
    pub(crate) link: Option<&'a Arc<KeeperLink>>,
    pub(crate) taken_over: Option<&'a TakenOverMount>,
}

/// Returns the file locks of a mount; `None` if the kernel manages them. A read-only mount refuses all locks.
pub(crate) fn start(mount: &MountWithLocks<'_>) -> Result<Option<Arc<FileLocks>>, AttachError> {
    let &MountWithLocks {
        backing,
        engine,
        options,
        link,
        taken_over,
    } = mount;
    if engine.backing().logged().is_none() {
        return Ok(None);
    }
    if options.read_only {
        return Ok(Some(FileLocks::refused()));
    }
    let host = host_name(options)?;
    let base = open_backing(backing)?;
    let refused = own_error(backing);
    let firn = own::make_dir(&base, &base.root(), TOP).map_err(&refused)?;
    let dir = own::make_dir(&base, &firn, FILE_LOCKS);
    let dir = dir.map_err(|error| refused(error.below(TOP)))?;
    let hosts = LivingHosts::open(backing, LeaseUse::Logs, &host)?;
    let keeping = engine.live().zip(link).map(|(table, link)| {
        let keeping = LocksForNextFirnd {
            table: Arc::clone(table),
            link: Arc::clone(link),
        };
        Box::new(keeping) as Box<dyn LockKeeping>
    });
    let setup = LockSetup {
        base,
        dir,
        host,
        other_hosts: Box::new(move || hosts.others_living()),
        keeping,
        kept: taken_over
            .map(|taken| take_kept_locks(taken, engine))
            .unwrap_or_default(),
    };
    FileLocks::start(setup)
        .map(Some)
        .map_err(AttachError::io("start the thread of locks"))
}

/// Stores locks in the live table, and lock files in the keeper of the mount.
struct LocksForNextFirnd {
    table: Arc<LiveTable>,
    link: Arc<KeeperLink>,
}

impl LockKeeping for LocksForNextFirnd {
    fn keep_lock_file(&self, lock_file: u64, descriptor: BorrowedFd<'_>) {
        if let Err(error) = self.link.keep_descriptor(label_of(lock_file), descriptor) {
            tracing::warn!(%error, "cannot store a lock of a file: if firnd dies, the program loses it");
        }
    }

    fn drop_lock_file(&self, lock_file: u64) {
        self.link.drop_descriptor(label_of(lock_file));
    }

    fn note_locks(&self, lock_file: u64, key: LockFileKey, locks: &[HeldLock]) -> bool {
        let locks = locks.iter().map(|lock| FileLock {
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
            .set_file_locks(lock_file, &locks.collect::<Vec<_>>())
    }
}

fn label_of(lock_file: u64) -> Label {
    Label {
        tag: Tag::LockFile,
        number: lock_file,
    }
}

/// Takes the locks of the earlier firnd. A lock whose handle or lock file is gone leaves the live table, and the lock thread
/// releases it in the backing.
fn take_kept_locks(taken: &TakenOverMount, engine: &Engine<Store>) -> KeptLocks {
    let files = std::mem::take(&mut *taken.lock_files.lock());
    let resumed = &taken.resumed;
    let goes_on = |lock: &FileLock| {
        let locked = engine.open_files.number_of(HandleId(lock.handle));
        locked == Ok(lock.file) && files.iter().any(|file| file.ino == lock.lock_file)
    };
    resumed.table.retain_file_locks(goes_on);
    let mut locks: HashMap<LockFileKey, Vec<HeldLock>> = HashMap::new();
    for stored in &resumed.contents.file_locks {
        let lock = &stored.entry;
        if let Some(kind) = LockKind::of_number(lock.kind).filter(|_| goes_on(lock)) {
            let file = lock.file;
            let key = LockFileKey { file, kind };
            locks.entry(key).or_default().push(held_lock(lock));
        }
    }
    KeptLocks { files, locks }
}

/// Converts a lock of the live table.
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
