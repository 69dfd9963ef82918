//! The place of a backup, what is there of each transaction, and the files and names in it.

use std::collections::{BTreeSet, HashMap};
use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use firn_backing::{Attr, Backing, Errno, Time};
use parking_lot::Mutex;

use super::MANIFEST;
use crate::change_log::{ChangeLog, Content, LogError, Staged};
use crate::error::BackupError;
use crate::own::OwnError;
use crate::scope::Scope;
use crate::staging;

/// Bytes that are copied at once.
pub(super) const BLOCK: usize = 1 << 20;

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
    /// Why the last round, prepare or commit could not write to the backup.
    pub error: Option<String>,
}

/// Size and times of a file. If they stay the same for a round, so does the content.
pub(super) type Stamp = (u64, Time, Time);

pub(super) fn stamp(attr: &Attr) -> Stamp {
    (attr.size, attr.mtime, attr.ctime)
}

/// The backup's directory for this mount.
pub(crate) struct Mirror<B: Backing> {
    pub(super) store: B,
    pub(super) state: Mutex<State<B>>,
    /// For the status, which does not wait for a round.
    pub(super) told: Mutex<HashMap<u64, (Progress, Option<Instant>)>>,
    /// Somebody waits for the round to end.
    pub(super) hurry: AtomicU32,
}

pub(super) struct State<B: Backing> {
    pub(super) copies: HashMap<u64, Copy<B>>,
    /// Directories of transactions that are over, which could not be removed.
    pub(super) over: BTreeSet<String>,
}

/// What the backup has of one transaction.
pub(super) struct Copy<B: Backing> {
    pub(super) name: String,
    pub(super) dir: B::Inode,
    /// At the last round.
    pub(super) seen: HashMap<String, Stamp>,
    pub(super) copied: HashMap<String, (Stamp, Content)>,
    /// A manifest may be there.
    pub(super) has_manifest: bool,
    /// The manifest and all that it names are durable.
    pub(super) is_whole: bool,
}

pub(super) fn backup_failed(error: impl Into<OwnError>) -> BackupError {
    BackupError::of_backup(error.into())
}

/// Name of the file that has the bytes of a staged one.
pub(super) fn file_name(at: &Staged) -> String {
    format!("{}-{}", at.0, at.1)
}

impl<B: Backing> Mirror<B> {
    /// Locks the state; a round that is under way ends soon.
    pub(super) fn lock(&self) -> parking_lot::MutexGuard<'_, State<B>> {
        self.hurry.fetch_add(1, Ordering::Relaxed);
        let state = self.state.lock();
        self.hurry.fetch_sub(1, Ordering::Relaxed);
        state
    }

    pub(super) fn tell<T>(
        &self,
        scope: &Scope<B>,
        state: &State<B>,
        result: &Result<T, BackupError>,
        left_bytes: u64,
    ) {
        let copy = state.copies.get(&scope.serial);
        let copied = copy.map_or(0, |copy| {
            copy.copied.values().map(|(stamp, _)| stamp.0).sum()
        });
        let mut told = self.told.lock();
        let (progress, at) = told.entry(scope.serial).or_default();
        progress.error = result.as_ref().err().map(ToString::to_string);
        progress.is_whole = copy.is_some_and(|copy| copy.is_whole);
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
        remove(&self.store, &self.store.root(), name)
    }
}

/// Invalidates the directory of a backup, durably.
fn remove_manifest<B: Backing>(store: &B, dir: &B::Inode) -> Result<(), Errno> {
    if staging::find(store, dir, OsStr::new(MANIFEST))?.is_some() {
        store.unlink(dir, OsStr::new(MANIFEST))?;
    }
    // Also where an attempt before this one has removed it.
    store.sync_dir(dir)
}

pub(super) fn remove_manifest_of<B: Backing>(store: &B, name: &str) -> Result<(), BackupError> {
    let stays = |error: OwnError| match error {
        OwnError::Backing(source) => BackupError::NotRemoved { source },
        error => BackupError::of_backup(error),
    };
    match staging::find_dir(store, &store.root(), name).map_err(stays)? {
        Some((dir, _)) => remove_manifest(store, &dir).map_err(|errno| stays(errno.into())),
        None => Ok(()),
    }
}

/// Removes a backup, the manifest first, without which the rest means nothing. What Firn did not put there stays, and
/// then the directory, too: ENOTEMPTY.
pub(super) fn remove<B: Backing>(store: &B, home: &B::Inode, name: &str) -> Result<(), OwnError> {
    let Some((dir, _)) = staging::find_dir(store, home, name)? else {
        return Ok(());
    };
    remove_manifest(store, &dir)?;
    for (file, ..) in staging::list(store, &dir)? {
        let is_ours =
            std::str::from_utf8(&file).is_ok_and(|file| is_file(file) || is_unfinished(file));
        if is_ours {
            store.unlink(&dir, OsStr::from_bytes(&file))?;
        }
    }
    Ok(store.rmdir(home, OsStr::new(name))?)
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
