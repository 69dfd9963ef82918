//! [`Mirror`]: the backup directory of a mount, and what it has of each transaction.
//!
//! Terms
//! * The *copy* of a transaction is its directory in the backup ([`TransactionCopy`]).
//! * The *manifest* of a copy is its list of files and changes.
//! * A copy is *complete* if its manifest and everything that the manifest refers to are durable. The commit can then
//!   be finished from the backup.
//! * To *withdraw* a copy is to remove its manifest, durably. The files remain for a later prepare.
//!
//! Invariants
//! * One thread at a time works with a copy ([`Mirror::with_copy`]). Threads that work with other copies do not wait.
//! * The status takes only the lock of [`Mirror::progress`], so it waits for no call of the backing or the backup.

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
use crate::change_log::{BackupContent, ChangeLog, LogError, StagedPath};
use crate::claim::Exclusive;
use crate::error::BackupError;
use crate::own::OwnError;
use crate::scope::Scope;
use crate::staging;

/// Progress of the backup of one transaction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// The copy is complete: the commit can be finished from the backup.
    pub is_complete: bool,
    /// Time since the last complete round.
    pub age: Option<Duration>,
    /// Bytes that the backup has of this transaction.
    pub copied_bytes: u64,
    /// Bytes that a prepare would still have to copy.
    pub left_bytes: u64,
    /// Error of the last round, prepare or commit that could not write to the backup. `None` after a later one could.
    pub error: Option<String>,
}

/// Size and times of a staged file. A file with the same values in two rounds has not changed between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileVersion {
    pub(super) size: u64,
    mtime: Time,
    ctime: Time,
}

impl FileVersion {
    /// Returns the version of the file with these attributes.
    pub(super) fn from_attr(attr: &Attr) -> Self {
        Self {
            size: attr.size,
            mtime: attr.mtime,
            ctime: attr.ctime,
        }
    }
}

/// The backup directory of a mount.
pub(crate) struct Mirror<B: Backing> {
    pub(super) store: B,
    /// Copies by the serial numbers of their transactions.
    slots: Mutex<HashMap<u64, Arc<CopySlot<B>>>>,
    /// Names of the directories of ended transactions that are not removed yet.
    pub(super) ended_dirs: Mutex<BTreeSet<String>>,
    /// Progress for the status, by the serial numbers of the transactions.
    pub(super) progress: Mutex<HashMap<u64, ProgressEntry>>,
}

/// Progress of one transaction, without the age, which is computed when the status asks.
#[derive(Clone, Debug, Default)]
pub(super) struct ProgressEntry {
    pub(super) progress: Progress,
    /// Time of the end of the last round without an error; `None` before the first.
    pub(super) last_round: Option<Instant>,
}

/// The copy of one transaction, which one thread at a time works with.
struct CopySlot<B: Backing> {
    state: Exclusive<CopyState<B>>,
    /// Number of threads that wait for a round of this transaction to end. The round stops early for them.
    waiting_threads: AtomicU32,
}

/// The contents of a [`CopySlot`], for the thread that works with the copy.
pub(super) struct CopyState<B: Backing> {
    /// `None` before the first round and after the end of the transaction.
    pub(super) copy: Option<TransactionCopy<B>>,
    /// Whether the slot was removed from the table because its transaction ended. A thread that waited for the slot
    /// must look the copy up again.
    is_removed: bool,
}

impl<B: Backing> CopyState<B> {
    pub(super) fn is_complete(&self) -> bool {
        self.copy.as_ref().is_some_and(|copy| copy.is_complete)
    }

    /// Returns the total size of the files that were copied.
    fn copied_bytes(&self) -> u64 {
        self.copy.as_ref().map_or(0, |copy| {
            copy.copied.values().map(|file| file.version.size).sum()
        })
    }
}

/// The directory of one transaction in the backup.
pub(super) struct TransactionCopy<B: Backing> {
    /// Name of the directory: `tx-N-TOKEN`.
    pub(super) name: String,
    pub(super) dir: B::Inode,
    /// Versions of the staged files at the last round, by the names of their files in the backup.
    pub(super) seen_versions: HashMap<String, FileVersion>,
    /// Files that were copied, by their names in the backup.
    pub(super) copied: HashMap<String, CopiedFile>,
    /// Whether the directory may have a manifest.
    pub(super) has_manifest: bool,
    /// Whether the manifest and everything that it refers to are durable.
    pub(super) is_complete: bool,
}

/// A staged file that was copied to the backup.
pub(super) struct CopiedFile {
    /// Version of the staged file when it was copied.
    pub(super) version: FileVersion,
    pub(super) content: BackupContent,
}

impl<B: Backing> TransactionCopy<B> {
    /// Returns the copy in the directory `dir`. A manifest that exists counts as complete. Other files are unknown and
    /// are copied again.
    pub(super) fn new(name: String, dir: B::Inode, has_manifest: bool) -> Self {
        Self {
            name,
            dir,
            seen_versions: HashMap::new(),
            copied: HashMap::new(),
            has_manifest,
            is_complete: has_manifest,
        }
    }

    /// Returns the copied content of a file; `None` if the file was not copied in this version.
    pub(super) fn find_copied(&self, file: &str, version: FileVersion) -> Option<&BackupContent> {
        let copied = self.copied.get(file)?;
        (copied.version == version).then_some(&copied.content)
    }
}

/// Returns the error of a call of the backup, as opposed to the backing.
pub(super) fn backup_failed(error: impl Into<OwnError>) -> BackupError {
    BackupError::of_backup(error.into())
}

/// Returns the name of the file in the backup for the bytes of a staged file.
pub(super) fn backup_file_name(path: &StagedPath) -> String {
    format!("{}-{}", path.dir, path.name)
}

impl<B: Backing> Mirror<B> {
    pub(super) fn new(store: B) -> Self {
        Self {
            store,
            slots: Mutex::default(),
            ended_dirs: Mutex::default(),
            progress: Mutex::default(),
        }
    }

    /// Adds the copy of a transaction that an earlier process has made.
    pub(super) fn insert(&self, serial: u64, copy: TransactionCopy<B>) {
        self.with_copy(serial, |state| state.copy = Some(copy));
    }

    /// Waits until no other thread works with the copy of a transaction, and calls `work` with the copy. A round that
    /// works with the copy ends early.
    pub(super) fn with_copy<T>(&self, serial: u64, work: impl FnOnce(&mut CopyState<B>) -> T) -> T {
        loop {
            let slot = self.get_or_add_slot(serial);
            // A round that has the copy sees this number and ends early.
            slot.waiting_threads.fetch_add(1, Ordering::Relaxed);
            let mut state = slot.state.acquire();
            slot.waiting_threads.fetch_sub(1, Ordering::Relaxed);
            // A slot that was removed during the wait no longer counts; the next attempt makes a new one.
            if !state.is_removed {
                let result = work(&mut state);
                self.remove_if_empty(serial, &mut state);
                return result;
            }
        }
    }

    /// Waits and calls `work` as [`Self::with_copy`] does, but lets a round end by itself. `work` also gets the number
    /// of threads that wait for its end.
    pub(super) fn with_copy_in_round<T>(
        &self,
        serial: u64,
        work: impl FnOnce(&mut CopyState<B>, &AtomicU32) -> T,
    ) -> T {
        loop {
            let slot = self.get_or_add_slot(serial);
            let mut state = slot.state.acquire();
            if !state.is_removed {
                let result = work(&mut state, &slot.waiting_threads);
                self.remove_if_empty(serial, &mut state);
                return result;
            }
        }
    }

    /// Removes the slot of a transaction that has no copy.
    fn remove_if_empty(&self, serial: u64, state: &mut CopyState<B>) {
        if state.copy.is_none() {
            state.is_removed = true;
            self.slots.lock().remove(&serial);
        }
    }

    /// Returns the slot of a transaction, and makes it if there is none.
    fn get_or_add_slot(&self, serial: u64) -> Arc<CopySlot<B>> {
        let new_slot = || {
            let state = CopyState {
                copy: None,
                is_removed: false,
            };
            Arc::new(CopySlot {
                state: Exclusive::new(state),
                waiting_threads: AtomicU32::new(0),
            })
        };
        let mut slots = self.slots.lock();
        Arc::clone(slots.entry(serial).or_insert_with(new_slot))
    }

    /// Returns the names of the directories of ended transactions that are not removed yet.
    pub(super) fn ended_dir_names(&self) -> Vec<String> {
        self.ended_dirs.lock().iter().cloned().collect()
    }

    /// Records for the status how many bytes of a transaction the backup has, and the last error. Called after the
    /// prepare, and after each *round*: a periodic copy of files while the transaction is open.
    ///
    /// `result` is that of the round or prepare. `left_bytes` is the number of bytes that it left for later.
    pub(super) fn record_progress<T>(
        &self,
        scope: &Scope<B>,
        state: &CopyState<B>,
        result: &Result<T, BackupError>,
        left_bytes: u64,
    ) {
        let copied_bytes = state.copied_bytes();
        let mut entries = self.progress.lock();
        let entry = entries.entry(scope.serial).or_default();
        let progress = &mut entry.progress;
        // A success clears an earlier error only if it shows that the backup can be written. A round that copied
        // nothing and left bytes for later does not show that.
        let has_written = left_bytes == 0 || copied_bytes > progress.copied_bytes;
        match result {
            Err(error) => progress.error = Some(error.to_string()),
            Ok(_) if has_written => progress.error = None,
            Ok(_) => {}
        }
        progress.is_complete = state.is_complete();
        progress.copied_bytes = copied_bytes;
        progress.left_bytes = left_bytes;
        if result.is_ok() {
            entry.last_round = Some(Instant::now());
        }
    }

    /// Withdraws a copy: removes its manifest, durably.
    pub(super) fn withdraw(&self, copy: &mut TransactionCopy<B>) -> Result<(), Errno> {
        if !copy.has_manifest {
            return Ok(());
        }
        copy.is_complete = false;
        remove_manifest(&self.store, &copy.dir)?;
        copy.has_manifest = false;
        Ok(())
    }

    /// Removes the directory `name`. Succeeds if another thread removed it.
    fn remove(&self, name: &str) -> Result<(), OwnError> {
        let removed = remove_directory(&self.store, &self.store.root(), name);
        ignore_if_removed(&self.store, name, removed)
    }

    /// Removes the directory of an ended transaction. After an error the next round tries again.
    pub(super) fn remove_ended(&self, name: &str) -> Result<(), OwnError> {
        // The name is recorded before the removal, because the manifest may remain until the directory is removed.
        self.ended_dirs.lock().insert(name.to_owned());
        self.remove(name)?;
        self.ended_dirs.lock().remove(name);
        Ok(())
    }
}

/// Returns the result of a removal in the directory `name`, or `Ok` if the directory no longer exists. A round and a
/// prepare of another transaction may both remove the directory of the same ended transaction.
fn ignore_if_removed<B: Backing>(
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

/// Removes the manifest in the directory of a transaction, durably. Without it the other files have no meaning.
fn remove_manifest<B: Backing>(store: &B, dir: &B::Inode) -> Result<(), Errno> {
    if staging::find(store, dir, OsStr::new(MANIFEST))?.is_some() {
        unlink_if_exists(store, dir, OsStr::new(MANIFEST))?;
    }
    // An earlier attempt may have removed the manifest and failed to sync.
    store.sync_dir(dir)
}

/// Removes a file. Succeeds if there is none.
pub(super) fn unlink_if_exists<B: Backing>(
    store: &B,
    dir: &B::Inode,
    name: &OsStr,
) -> Result<(), Errno> {
    match store.unlink(dir, name) {
        Err(Errno::NOENT) => Ok(()),
        unlinked => unlinked,
    }
}

/// Removes the manifest of the transaction whose directory is `name`, durably. Succeeds if there is no directory.
pub(super) fn remove_manifest_of<B: Backing>(store: &B, name: &str) -> Result<(), BackupError> {
    let not_removed = |error: OwnError| match error {
        OwnError::Backing(source) => BackupError::NotRemoved { source },
        error => BackupError::of_backup(error),
    };
    let found = staging::find_dir(store, &store.root(), name).map_err(not_removed)?;
    let Some((dir, _)) = found else {
        return Ok(());
    };
    let removed = remove_manifest(store, &dir).map_err(OwnError::from);
    ignore_if_removed(store, name, removed).map_err(not_removed)
}

/// Removes the directory `name` of a transaction in the backup `store`, and its manifest (the list of files and
/// changes) first. Without the manifest, the backup does not count. Succeeds if there is no directory.
///
/// Files that Firn did not make are left alone. Fails with ENOTEMPTY if there are any.
pub(super) fn remove_directory<B: Backing>(
    store: &B,
    parent: &B::Inode,
    name: &str,
) -> Result<(), OwnError> {
    let Some((dir, _)) = staging::find_dir(store, parent, name)? else {
        return Ok(());
    };
    remove_manifest(store, &dir)?;
    for (file, ..) in staging::list(store, &dir)? {
        let is_made_by_firn = std::str::from_utf8(&file)
            .is_ok_and(|file| is_backup_file_name(file) || is_unfinished_manifest(file));
        if is_made_by_firn {
            unlink_if_exists(store, &dir, OsStr::from_bytes(&file))?;
        }
    }
    Ok(store.rmdir(parent, OsStr::new(name))?)
}

/// Returns whether a name is that of the directory of a transaction: `tx-N-TOKEN`.
pub(super) fn is_directory_name(name: &str) -> bool {
    let is_token = |token: &str| {
        token.len() == TOKEN_DIGITS && token.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let serial_and_token = name
        .strip_prefix("tx-")
        .and_then(|suffix| suffix.split_once('-'));
    serial_and_token.is_some_and(|(serial, token)| is_number(serial) && is_token(token))
}

/// Returns whether a name is that of a file with the bytes of a staged file: `DIR-M` ([`backup_file_name`]).
fn is_backup_file_name(name: &str) -> bool {
    let Some((staging_dir, staged_name)) = name.split_once('-') else {
        return false;
    };
    staging_dir.strip_prefix('d').is_some_and(is_number) && is_number(staged_name)
}

/// Returns whether a name is that of a manifest which was not renamed into place ([`staging::new_name`]).
fn is_unfinished_manifest(name: &str) -> bool {
    name.strip_suffix(".new") == Some(MANIFEST)
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Reads the manifest in the directory of a transaction. Returns `None` if there is none, and `Some(Err(_))` if it
/// cannot be decoded.
pub(super) fn load_manifest<B: Backing>(
    store: &B,
    dir: &B::Inode,
) -> Result<Option<Result<ChangeLog, LogError>>, BackupError> {
    let decode = |bytes: Vec<u8>| {
        let log = ChangeLog::decode(&bytes)?;
        log.check_portable().map(|()| log)
    };
    Ok(staging::read_file(store, dir, MANIFEST)
        .map_err(backup_failed)?
        .map(decode))
}

/// Reads the name of the backup directory from the directory of a stored transaction in the backing.
pub(super) fn load_directory_name<B: Backing>(
    base: &B,
    dir: &B::Inode,
) -> Result<Option<String>, OwnError> {
    Ok(staging::read_file(base, dir, staging::BACKUP)?
        .and_then(|bytes| String::from_utf8(bytes).ok()))
}

/// Number of hexadecimal digits of a token.
const TOKEN_DIGITS: usize = 16;

/// Returns a random number in hexadecimal digits, so that no other transaction has the same directory name.
pub(super) fn new_token() -> Result<String, Errno> {
    let mut bytes = [0; 8];
    let mut random = std::fs::File::open("/dev/urandom").map_err(|_| Errno::NOENT)?;
    random.read_exact(&mut bytes).map_err(|_| Errno::IO)?;
    Ok(format!("{:0TOKEN_DIGITS$x}", u64::from_le_bytes(bytes)))
}
