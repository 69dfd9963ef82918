//! [`Mirror`]: the backup directory of a mount, with the state of each transaction's copy, and its file names.

use std::collections::{BTreeSet, HashMap};
use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use firn_backing::lock::Mutex;
use firn_backing::{Attr, Backing, Errno, Time};

use super::MANIFEST;
use crate::change_log::{BackupContent, ChangeLog, LogError, Staged};
use crate::claim::Exclusive;
use crate::error::BackupError;
use crate::own::OwnError;
use crate::scope::Scope;
use crate::staging;

/// How far the backup of a transaction is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// The backup has all of it, so that the commit can be finished from it.
    pub is_whole: bool,
    /// Time since the last complete round.
    pub age: Option<Duration>,
    /// Bytes that the backup has.
    pub copied_bytes: u64,
    /// Bytes that a prepare would have to copy.
    pub left_bytes: u64,
    /// Why a round, prepare or commit could not write to the backup; kept until a later one writes to it.
    pub error: Option<String>,
}

/// Size and times of a file. If they stay the same for a round, so does the content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    pub(super) size: u64,
    mtime: Time,
    ctime: Time,
}

impl Stamp {
    pub(super) fn of(attr: &Attr) -> Self {
        Self {
            size: attr.size,
            mtime: attr.mtime,
            ctime: attr.ctime,
        }
    }
}

/// The backup's directory for this mount.
pub(crate) struct Mirror<B: Backing> {
    pub(super) store: B,
    /// Copies by the serial numbers of their transactions.
    copies: Mutex<HashMap<u64, Arc<Slot<B>>>>,
    /// Directories of transactions that are over, which are not removed yet.
    pub(super) over: Mutex<BTreeSet<String>>,
    /// For the status, which does not wait for a round.
    pub(super) told: Mutex<HashMap<u64, Told>>,
}

/// What the status says of a transaction.
#[derive(Clone, Debug, Default)]
pub(super) struct Told {
    pub(super) progress: Progress,
    /// When the last complete round ended.
    pub(super) at: Option<Instant>,
}

/// Where the copy of one transaction is. Transactions do not wait for each other's copies.
struct Slot<B: Backing> {
    place: Exclusive<SlotState<B>>,
    /// Callers that wait for a round of this transaction to end.
    hurry: AtomicU32,
}

/// What a caller has of a [`Slot`] alone.
pub(super) struct SlotState<B: Backing> {
    pub(super) copy: Option<Copy<B>>,
    /// The slot is not in the table any more.
    is_removed: bool,
}

impl<B: Backing> SlotState<B> {
    pub(super) fn is_whole(&self) -> bool {
        self.copy.as_ref().is_some_and(|copy| copy.is_whole)
    }
}

/// What the backup has of one transaction.
pub(super) struct Copy<B: Backing> {
    pub(super) name: String,
    pub(super) dir: B::Inode,
    /// What the last round saw.
    pub(super) seen: HashMap<String, Stamp>,
    pub(super) copied: HashMap<String, CopiedFile>,
    /// A manifest may be there.
    pub(super) has_manifest: bool,
    /// The manifest and all that it names are durable.
    pub(super) is_whole: bool,
}

/// What the backup has of a staged file, and what that was when it was copied.
pub(super) struct CopiedFile {
    pub(super) stamp: Stamp,
    pub(super) content: BackupContent,
}

impl<B: Backing> Copy<B> {
    /// Nothing is known of the files in it; they count if there is a manifest.
    pub(super) fn new(name: String, dir: B::Inode, has_manifest: bool) -> Self {
        Self {
            name,
            dir,
            seen: HashMap::new(),
            copied: HashMap::new(),
            has_manifest,
            is_whole: has_manifest,
        }
    }

    /// What the backup has of a file, if the file is unchanged.
    pub(super) fn find_copied(&self, file: &str, now: Stamp) -> Option<&BackupContent> {
        let copied = self.copied.get(file)?;
        (copied.stamp == now).then_some(&copied.content)
    }
}

pub(super) fn backup_failed(error: impl Into<OwnError>) -> BackupError {
    BackupError::of_backup(error.into())
}

/// Name of the file that has the bytes of a staged one.
pub(super) fn file_name(at: &Staged) -> String {
    format!("{}-{}", at.0, at.1)
}

impl<B: Backing> Mirror<B> {
    pub(super) fn new(store: B) -> Self {
        Self {
            store,
            copies: Mutex::default(),
            over: Mutex::default(),
            told: Mutex::default(),
        }
    }

    /// Takes up the copy of a transaction that an earlier process has made.
    pub(super) fn adopt(&self, serial: u64, copy: Copy<B>) {
        self.with_place(serial, |place| place.copy = Some(copy));
    }

    /// Works with the copy of a transaction, alone. A round of it that is under way ends soon.
    pub(super) fn with_place<T>(
        &self,
        serial: u64,
        work: impl FnOnce(&mut SlotState<B>) -> T,
    ) -> T {
        self.work_in_slot(serial, true, |place, _| work(place))
    }

    /// Works with the copy of a transaction alone, for a round. `work` learns how many callers wait for its end.
    pub(super) fn with_place_in_round<T>(
        &self,
        serial: u64,
        work: impl FnOnce(&mut SlotState<B>, &AtomicU32) -> T,
    ) -> T {
        self.work_in_slot(serial, false, work)
    }

    fn work_in_slot<T>(
        &self,
        serial: u64,
        hurries: bool,
        work: impl FnOnce(&mut SlotState<B>, &AtomicU32) -> T,
    ) -> T {
        loop {
            let slot = self.slot(serial);
            slot.hurry.fetch_add(u32::from(hurries), Ordering::Relaxed);
            let mut place = slot.place.take();
            slot.hurry.fetch_sub(u32::from(hurries), Ordering::Relaxed);
            // Its transaction ended during the wait.
            if place.is_removed {
                continue;
            }
            let result = work(&mut place, &slot.hurry);
            if place.copy.is_none() {
                place.is_removed = true;
                self.copies.lock().remove(&serial);
            }
            return result;
        }
    }

    fn slot(&self, serial: u64) -> Arc<Slot<B>> {
        let new_slot = || {
            let place = SlotState {
                copy: None,
                is_removed: false,
            };
            Arc::new(Slot {
                place: Exclusive::new(place),
                hurry: AtomicU32::new(0),
            })
        };
        let mut copies = self.copies.lock();
        Arc::clone(copies.entry(serial).or_insert_with(new_slot))
    }

    /// Names of the directories of transactions that are over.
    pub(super) fn names_of_over(&self) -> Vec<String> {
        self.over.lock().iter().cloned().collect()
    }

    pub(super) fn tell<T>(
        &self,
        scope: &Scope<B>,
        place: &SlotState<B>,
        result: &Result<T, BackupError>,
        left_bytes: u64,
    ) {
        let copied = place.copy.as_ref().map_or(0, |copy| {
            copy.copied.values().map(|file| file.stamp.size).sum()
        });
        let mut told = self.told.lock();
        let Told { progress, at } = told.entry(scope.serial).or_default();
        // A round that left all bytes has not written: its obstacle may last.
        let has_written = left_bytes == 0 || copied > progress.copied_bytes;
        if let Err(error) = result {
            progress.error = Some(error.to_string());
        } else if has_written {
            progress.error = None;
        }
        progress.is_whole = place.is_whole();
        (progress.copied_bytes, progress.left_bytes) = (copied, left_bytes);
        if result.is_ok() {
            *at = Some(Instant::now());
        }
    }

    /// Invalidates a copy.
    pub(super) fn withdraw(&self, copy: &mut Copy<B>) -> Result<(), Errno> {
        if !copy.has_manifest {
            return Ok(());
        }
        copy.is_whole = false;
        remove_manifest(&self.store, &copy.dir)?;
        copy.has_manifest = false;
        Ok(())
    }

    pub(super) fn remove(&self, name: &str) -> Result<(), OwnError> {
        let removed = remove(&self.store, &self.store.root(), name);
        if_still_there(&self.store, name, removed)
    }

    /// Removes the directory of a transaction that is over; it is tried again where that fails.
    pub(super) fn remove_over(&self, name: &str) -> Result<(), OwnError> {
        // First: until it is removed, its manifest may be there.
        self.over.lock().insert(name.to_owned());
        self.remove(name)?;
        self.over.lock().remove(name);
        Ok(())
    }
}

/// A round and a prepare of another transaction may both remove what is over: an error counts only where the directory
/// is still there.
fn if_still_there<B: Backing>(
    store: &B,
    name: &str,
    removed: Result<(), OwnError>,
) -> Result<(), OwnError> {
    match removed {
        Err(OwnError::Backing(Errno::NOENT | Errno::STALE))
            if staging::find_dir(store, &store.root(), name)?.is_none() =>
        {
            Ok(())
        }
        removed => removed,
    }
}

/// Invalidates the directory of a backup, durably.
fn remove_manifest<B: Backing>(store: &B, dir: &B::Inode) -> Result<(), Errno> {
    if staging::find(store, dir, OsStr::new(MANIFEST))?.is_some() {
        unlink_if_there(store, dir, OsStr::new(MANIFEST))?;
    }
    // Also where an attempt before this one has removed it.
    store.sync_dir(dir)
}

pub(super) fn unlink_if_there<B: Backing>(
    store: &B,
    dir: &B::Inode,
    name: &OsStr,
) -> Result<(), Errno> {
    match store.unlink(dir, name) {
        Err(Errno::NOENT) => Ok(()),
        unlinked => unlinked,
    }
}

pub(super) fn remove_manifest_of<B: Backing>(store: &B, name: &str) -> Result<(), BackupError> {
    let stays = |error: OwnError| match error {
        OwnError::Backing(source) => BackupError::NotRemoved { source },
        error => BackupError::of_backup(error),
    };
    match staging::find_dir(store, &store.root(), name).map_err(stays)? {
        Some((dir, _)) => {
            let removed = remove_manifest(store, &dir).map_err(OwnError::from);
            if_still_there(store, name, removed).map_err(stays)
        }
        None => Ok(()),
    }
}

/// Removes a backup, the manifest first, without which the rest means nothing. What Firn did not put there stays, and
/// then the directory, too: ENOTEMPTY.
pub(super) fn remove<B: Backing>(store: &B, parent: &B::Inode, name: &str) -> Result<(), OwnError> {
    let Some((dir, _)) = staging::find_dir(store, parent, name)? else {
        return Ok(());
    };
    remove_manifest(store, &dir)?;
    for (file, ..) in staging::list(store, &dir)? {
        let is_ours =
            std::str::from_utf8(&file).is_ok_and(|file| is_file(file) || is_unfinished(file));
        if is_ours {
            unlink_if_there(store, &dir, OsStr::from_bytes(&file))?;
        }
    }
    Ok(store.rmdir(parent, OsStr::new(name))?)
}

/// Whether a directory is that of a transaction: `tx-N-TOKEN`.
pub(super) fn is_name(name: &str) -> bool {
    let is_token = |token: &str| {
        token.len() == TOKEN_DIGITS && token.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let parts = name
        .strip_prefix("tx-")
        .and_then(|rest| rest.split_once('-'));
    parts.is_some_and(|(serial, token)| is_number(serial) && is_token(token))
}

/// Whether a file has the bytes of a staged one: `DIR-M` ([`file_name`]).
fn is_file(name: &str) -> bool {
    let parts = name.split_once('-');
    parts.is_some_and(|(staging_dir, name)| {
        staging_dir.strip_prefix('d').is_some_and(is_number) && is_number(name)
    })
}

/// Whether a file was being written ([`staging::new_name`]).
fn is_unfinished(name: &str) -> bool {
    name.strip_suffix(".new") == Some(MANIFEST)
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// The manifest in a directory, if there is one.
pub(super) fn load<B: Backing>(
    store: &B,
    dir: &B::Inode,
) -> Result<Option<Result<ChangeLog, LogError>>, BackupError> {
    let decode = |bytes: Vec<u8>| {
        let log = ChangeLog::decode(&bytes)?;
        log.check_portable().map(|()| log)
    };
    Ok(staging::load(store, dir, MANIFEST)
        .map_err(backup_failed)?
        .map(decode))
}

pub(super) fn load_name<B: Backing>(base: &B, dir: &B::Inode) -> Result<Option<String>, OwnError> {
    Ok(staging::load(base, dir, staging::BACKUP)?.and_then(|bytes| String::from_utf8(bytes).ok()))
}

/// Hexadecimal digits of a random number that no other transaction has.
const TOKEN_DIGITS: usize = 16;

pub(super) fn token() -> Result<String, Errno> {
    let mut bytes = [0; 8];
    let mut random = std::fs::File::open("/dev/urandom").map_err(|_| Errno::NOENT)?;
    random.read_exact(&mut bytes).map_err(|_| Errno::IO)?;
    Ok(format!("{:0TOKEN_DIGITS$x}", u64::from_le_bytes(bytes)))
}
