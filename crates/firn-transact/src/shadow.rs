//! Shadow mode of transactions: changes go to the backing (the directory below the mount) at once, after the old state
//! of the object was saved. An abort restores it.
//!
//! This mode is for jobs in which several hosts write parts of the same files and buffered changes would conflict. The
//! saved data is the old state and not a history of changes, so its parts have no order. It has:
//! * the attributes and the size of each changed object;
//! * the names in a changed directory;
//! * the bytes of a changed file, from the lowest changed offset to the old end.
//!
//! So a file that only grows costs no saved bytes, a truncated file costs its tail, and a directory in which a million
//! files are made costs one list. Nothing is saved of objects that the transaction makes.
//!
//! An object is saved as `saved/INO.K`, K = 0, 1, 2 and so on. Each file is a change log with one entry that has an
//! undo side only. Log 0 has the attributes, the size and the names. Each further log has more bytes of a file, which
//! end where the bytes of the log before it begin.
//!
//! Guarantees
//! * The saved state of an object is durable before its first change (`save.rs`).
//! * An object that existed before the transaction is never removed. With its last known name it moves to `kept/`
//!   (`names.rs`).
//! * An undo (`undo.rs`) gives each changed directory its old names, and each object its old attributes and bytes. It
//!   compares the saved state with the present tree and applies one change log backward (module `apply`), so it can be
//!   repeated.
//!
//! Relies on
//! * Hosts save an object once for all of them. A host publishes a log with a link or rename that replaces nothing,
//!   before its own first change of the object.
//! * The inode numbers in a listing of a directory are those of stat(2).

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use firn_backing::lock::Mutex;
use firn_backing::{Backing, Errno, Kind, RenameFlags, Result};

use crate::object::{Object, ObjectKey};
use crate::staging;

pub(crate) mod names;
pub(crate) mod save;
pub(crate) mod shared;
pub(crate) mod undo;

/// Offset that stands for a change of no bytes.
pub(crate) const NO_BYTES: u64 = u64::MAX;

/// Directory with the saved logs, each of one object, and with the old bytes of files.
const SAVED: &str = "saved";
/// Directory of removed objects that existed before the transaction, named by their inode numbers.
const KEPT: &str = "kept";

/// File that marks the directory of a host's transaction as a part of a transaction that several hosts share.
const SHARED: &str = "shared";

/// Where changes go before they are committed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Changes wait in memory and in staged copies until the commit.
    #[default]
    Buffer,
    /// Changes go to the backing at once, after the old state was saved.
    Shadow,
}

/// An object in `kept/`.
pub(crate) struct KeptObject {
    pub(crate) key: ObjectKey,
    /// Name of the object in `kept/`.
    pub(crate) name: String,
    pub(crate) is_dir: bool,
}

/// How much of an object is saved.
#[derive(Clone, Copy, Debug)]
enum SaveState {
    /// The transaction made the object, so nothing needs to be saved.
    New,
    /// The old state is saved, in `log_count` logs. `size` is the old size in bytes. The bytes from `saved_from` to
    /// `size` are saved.
    Saved {
        size: u64,
        saved_from: u64,
        log_count: u32,
    },
}

impl SaveState {
    /// Returns whether the bytes from `offset` on may change without a further save.
    fn covers(self, offset: u64) -> bool {
        match self {
            Self::New => true,
            Self::Saved { saved_from, .. } => offset >= saved_from,
        }
    }
}

/// The saved state of a transaction in shadow mode.
pub(crate) struct Shadow<B: Backing> {
    /// The directory `saved/`.
    saved: B::Inode,
    /// The directory `kept/`.
    kept: B::Inode,
    /// Device number of all objects.
    dev: u64,
    /// The state of each object that is saved or new, by inode number.
    save_states: Mutex<HashMap<u64, SaveState>>,
    /// Directories whose names are saved, by inode number. An abort restores the names in these directories.
    saved_dirs: Mutex<HashMap<u64, Arc<Object<B>>>>,
    /// Number of the last file that was made in `saved/` under a temporary name.
    last_file_number: AtomicU64,
    /// Whether an abort has begun. The abort may have failed with some changes undone.
    is_undo_begun: AtomicBool,
    /// Whether several hosts share the transaction and save in the same directory.
    is_shared: bool,
}

impl<B: Backing> Shadow<B> {
    /// Makes the directories of the saved state in the directory of a transaction.
    pub(crate) fn create_dirs(base: &B, dir: &B::Inode) -> Result<()> {
        staging::make_dir(base, dir, SAVED)?;
        staging::make_dir(base, dir, KEPT)?;
        Ok(())
    }

    /// Returns the saved old state in the directory of a transaction that makes its changes at once (shadow mode).
    /// Returns `None` if the transaction keeps its changes back until the commit (buffer mode).
    pub(crate) fn find_in_dir(base: &B, dir: &B::Inode) -> Result<Option<Self>> {
        let Some((saved, attr)) = staging::find_dir(base, dir, SAVED)? else {
            return Ok(None);
        };
        let kept = staging::make_dir(base, dir, KEPT)?;
        Ok(Some(Self {
            saved,
            kept,
            dev: attr.dev,
            save_states: Mutex::default(),
            saved_dirs: Mutex::default(),
            last_file_number: AtomicU64::new(0),
            is_undo_begun: AtomicBool::new(false),
            is_shared: false,
        }))
    }

    /// Returns whether `dir` is the directory of a transaction in shadow mode.
    pub(crate) fn is_in_dir(base: &B, dir: &B::Inode) -> Result<bool> {
        let marks = [SAVED, SHARED];
        Ok(staging::list(base, dir)?
            .iter()
            .any(|(name, ..)| marks.iter().any(|mark| name == mark.as_bytes())))
    }

    /// Marks the saved state as shared by several hosts.
    pub(crate) fn into_shared(self) -> Self {
        Self {
            is_shared: true,
            ..self
        }
    }

    /// Returns whether several hosts share the transaction.
    pub(crate) fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// Returns whether directories list the same inode numbers that stat(2) returns.
    pub(crate) fn lists_stat_inodes(base: &B, parent: &B::Inode, name: &str) -> Result<bool> {
        let (_, attr) = base.lookup(parent, OsStr::new(name))?;
        let listed = staging::list(base, parent)?
            .into_iter()
            .find(|(listed_name, ..)| listed_name == name.as_bytes());
        Ok(listed.is_some_and(|(_, listed_ino, _)| listed_ino == attr.ino))
    }

    /// Asserts that the tables of saved objects and directories agree. Their old state is saved for an abort.
    pub(crate) fn check_invariants(&self) {
        let save_states = self.save_states.lock();
        for (ino, dir) in self.saved_dirs.lock().iter() {
            assert_eq!(
                dir.key,
                self.object_key(*ino),
                "a directory is listed by its inode"
            );
            assert!(
                matches!(save_states.get(ino), Some(SaveState::Saved { .. })),
                "the names of {ino} are saved"
            );
        }
        for save_state in save_states.values() {
            if let SaveState::Saved { log_count, .. } = save_state {
                assert!(*log_count > 0, "what is saved is in a record");
            }
        }
    }

    /// Returns the number of objects that are saved or new.
    pub(crate) fn saved_count(&self) -> u64 {
        self.save_states.lock().len() as u64
    }

    /// Returns the objects in `kept/`.
    pub(crate) fn list_kept(&self, base: &B) -> Result<Vec<KeptObject>> {
        let mut kept_objects = Vec::new();
        for (name, ino, listed_kind) in staging::list(base, &self.kept)? {
            let kind = match listed_kind {
                Some(kind) => kind,
                None => base.lookup(&self.kept, OsStr::from_bytes(&name))?.1.kind,
            };
            kept_objects.push(KeptObject {
                key: self.object_key(ino),
                name: String::from_utf8_lossy(&name).into_owned(),
                is_dir: kind == Kind::Dir,
            });
        }
        Ok(kept_objects)
    }

    /// Returns the key of the object with this inode number.
    fn object_key(&self, ino: u64) -> ObjectKey {
        ObjectKey { dev: self.dev, ino }
    }

    /// Returns the directory `kept/`.
    pub(crate) fn kept_dir(&self) -> &B::Inode {
        &self.kept
    }

    /// Marks the beginning of an abort. From then on only an abort may change the objects.
    pub(crate) fn begin_undo(&self) {
        self.is_undo_begun.store(true, Ordering::Release);
    }

    pub(crate) fn is_undoing(&self) -> bool {
        self.is_undo_begun.load(Ordering::Acquire)
    }

    fn is_new(&self, ino: u64) -> bool {
        matches!(self.save_states.lock().get(&ino), Some(SaveState::New))
    }

    /// Adds an object that the transaction made.
    pub(crate) fn add_new(&self, ino: u64) {
        self.save_states.lock().insert(ino, SaveState::New);
    }

    /// Removes the name `name` in `dir` of an object that existed before the transaction. The object moves to `kept/`,
    /// from which an abort restores it, unless it has a name there already. `ino` is the object's inode number.
    fn move_to_kept(&self, base: &B, dir: &B::Inode, name: &OsStr, ino: u64) -> Result<()> {
        let kept_name = ino.to_string();
        let kept_name = OsStr::new(&kept_name);
        match base.rename(dir, name, &self.kept, kept_name, RenameFlags::NOREPLACE) {
            Err(Errno::EXIST) => base.unlink(dir, name),
            // The file system has no rename that replaces nothing. A plain rename to another link of the same object
            // would do nothing and leave both names.
            Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => {
                match staging::find(base, &self.kept, kept_name)? {
                    Some(_) => base.unlink(dir, name),
                    None => base.rename(dir, name, &self.kept, kept_name, RenameFlags::empty()),
                }
            }
            renamed => renamed,
        }
    }
}
