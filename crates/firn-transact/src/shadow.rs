//! Shadow mode: changes go to the backing at once, and what brings the old state back is saved before.
//!
//! For jobs on several hosts that share parts of files, where held changes conflict. Saved is the old state, not a
//! history of changes, so nothing in it has an order. It has attributes and size of each object that changes, the names
//! in a directory, and the bytes of a file from the lowest changed offset to the old end. So a file that only grows
//! costs no bytes, one that is cut costs its tail, and a directory in which a million files are made costs one list. Of
//! new objects nothing is saved.
//!
//! Promises
//! * What is saved of an object is durable before its first change (`save.rs`).
//! * An object that was there is never removed: with its last known name it goes to `kept/` (`names.rs`).
//! * Putting back (`undo.rs`) makes each directory that was touched have its old names, and each object its old
//!   attributes and bytes. It makes one change log of what is saved and of what is there, and applies it backward
//!   (module `apply`), so it can be done over and over.
//!
//! An object is saved as `saved/INO.K`: change logs of one entry with an undo part only. Log 0 has the attributes, the
//! size and, of a directory, the names. Each further one has more bytes of a file: from the lowest that is saved
//! there up to where the log before begins.
//!
//! Relies on
//! * What is saved of an object is saved once, for all hosts. A host publishes the record under the inode's number
//!   before its own first change, with a link or rename that replaces nothing.
//! * Directories naming the inode numbers that stat(2) tells.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use firn_backing::lock::Mutex;
use firn_backing::{Backing, Errno, Kind, RenameFlags, Result};

use crate::object::{Key, Object};
use crate::staging;

pub(crate) mod names;
pub(crate) mod save;
pub(crate) mod shared;
pub(crate) mod undo;

/// Offset that stands for a change of no bytes.
pub(crate) const NO_BYTES: u64 = u64::MAX;

/// Directory of the saved logs, of one object each, and of the old bytes of files.
const SAVED: &str = "saved";
/// Directory of removed old objects, named by their inode numbers.
const KEPT: &str = "kept";

/// File in the directory of a host's transaction that marks it as a part of a shared one.
const SHARED: &str = "shared";

/// What becomes of changes before they are committed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Changes are held until the commit.
    #[default]
    Buffer,
    /// Changes go to the backing at once, after the old state was saved.
    Shadow,
}

/// An object in `kept/`: see [`Shadow::kept`].
type KeptObject = (Key, String, bool);

/// How much is saved of an object.
#[derive(Clone, Copy, Debug)]
enum Known {
    /// Nothing needs to be saved: it was made in the transaction.
    New,
    /// A file of `size` bytes: those from `low` to the old end. `count` logs tell it.
    Saved { size: u64, low: u64, count: u32 },
}

impl Known {
    /// Whether bytes from `from` on may change.
    fn covers(self, from: u64) -> bool {
        match self {
            Self::New => true,
            Self::Saved { low, .. } => from >= low,
        }
    }
}

/// The saved state of a transaction in shadow mode.
pub(crate) struct Shadow<B: Backing> {
    saved: B::Inode,
    kept: B::Inode,
    /// Device of all objects.
    dev: u64,
    known: Mutex<HashMap<u64, Known>>,
    /// Directories of which the names are saved; an abort brings objects back to them.
    dirs: Mutex<HashMap<u64, Arc<Object<B>>>>,
    last_number: AtomicU64,
    /// Whether an abort has begun; it may have failed half-way.
    undoing: AtomicBool,
    /// Whether other hosts save in the same directory.
    several: bool,
}

impl<B: Backing> Shadow<B> {
    /// Makes room for it in the directory of a transaction.
    pub(crate) fn make(base: &B, dir: &B::Inode) -> Result<()> {
        staging::make_dir(base, dir, SAVED)?;
        staging::make_dir(base, dir, KEPT)?;
        Ok(())
    }

    /// What is saved in the directory of a transaction; `None` where that holds its changes.
    pub(crate) fn find(base: &B, dir: &B::Inode) -> Result<Option<Self>> {
        let Some((saved, attr)) = staging::find_dir(base, dir, SAVED)? else {
            return Ok(None);
        };
        let kept = staging::make_dir(base, dir, KEPT)?;
        Ok(Some(Self {
            saved,
            kept,
            dev: attr.dev,
            known: Mutex::default(),
            dirs: Mutex::default(),
            last_number: AtomicU64::new(0),
            undoing: AtomicBool::new(false),
            several: false,
        }))
    }

    /// Whether a transaction's directory is that of one in shadow mode.
    pub(crate) fn is_at(base: &B, dir: &B::Inode) -> Result<bool> {
        let marks = [SAVED, SHARED];
        Ok(staging::list(base, dir)?
            .iter()
            .any(|(name, ..)| marks.iter().any(|mark| name == mark.as_bytes())))
    }

    pub(crate) fn of_several(self) -> Self {
        Self {
            several: true,
            ..self
        }
    }

    pub(crate) fn is_of_several(&self) -> bool {
        self.several
    }

    /// Returns whether directories list the same inode numbers that stat(2) returns.
    pub(crate) fn tells_inodes(base: &B, parent: &B::Inode, name: &str) -> Result<bool> {
        let (_, attr) = base.lookup(parent, OsStr::new(name))?;
        let listed = staging::list(base, parent)?
            .into_iter()
            .find(|(found, ..)| found == name.as_bytes());
        Ok(listed.is_some_and(|(_, ino, _)| ino == attr.ino))
    }

    /// Asserts what is known of what is saved.
    pub(crate) fn check_invariants(&self) {
        let known = self.known.lock();
        for (ino, dir) in self.dirs.lock().iter() {
            assert_eq!(
                dir.key,
                (self.dev, *ino),
                "a directory is listed by its inode"
            );
            assert!(
                matches!(known.get(ino), Some(Known::Saved { .. })),
                "the names of {ino} are saved"
            );
        }
        let counts = known.values().filter_map(|known| match known {
            Known::New => None,
            Known::Saved { count, .. } => Some(*count),
        });
        assert!(
            counts.into_iter().all(|count| count > 0),
            "what is saved is in a record"
        );
    }

    /// Objects of which something is saved, or that are new.
    pub(crate) fn saved_count(&self) -> u64 {
        self.known.lock().len() as u64
    }

    /// The objects that would be gone: device and inode, their name in [`Shadow::kept_dir`], and whether it is a
    /// directory.
    pub(crate) fn list_kept(&self, base: &B) -> Result<Vec<KeptObject>> {
        let mut found = Vec::new();
        for (name, ino, kind) in staging::list(base, &self.kept)? {
            let kind = match kind {
                Some(kind) => kind,
                None => base.lookup(&self.kept, OsStr::from_bytes(&name))?.1.kind,
            };
            let name = String::from_utf8_lossy(&name).into_owned();
            found.push(((self.dev, ino), name, kind == Kind::Dir));
        }
        Ok(found)
    }

    /// Where they are.
    pub(crate) fn kept_dir(&self) -> &B::Inode {
        &self.kept
    }

    /// Notes that an abort has begun, so that only an abort may change anything from now on.
    pub(crate) fn begin_undo(&self) {
        self.undoing.store(true, Ordering::Release);
    }

    pub(crate) fn is_undoing(&self) -> bool {
        self.undoing.load(Ordering::Acquire)
    }

    fn is_new(&self, ino: u64) -> bool {
        matches!(self.known.lock().get(&ino), Some(Known::New))
    }

    /// Notes an object that was made in the transaction.
    pub(crate) fn note_new(&self, ino: u64) {
        self.known.lock().insert(ino, Known::New);
    }

    /// Takes a name from an object that was there before: to `kept/`, if it is not there yet.
    fn move_to_kept(&self, base: &B, dir: &B::Inode, name: &OsStr, ino: u64) -> Result<()> {
        let text = ino.to_string();
        let kept_name = OsStr::new(&text);
        match base.rename(dir, name, &self.kept, kept_name, RenameFlags::NOREPLACE) {
            Err(Errno::EXIST) => base.unlink(dir, name),
            // Not every file system can do without replacing. Onto itself a rename does nothing.
            Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => {
                match staging::find(base, &self.kept, kept_name)? {
                    Some(_) => base.unlink(dir, name),
                    None => base.rename(dir, name, &self.kept, kept_name, RenameFlags::empty()),
                }
            }
            other => other,
        }
    }
}
