//! The store of partner copies: a directory beside the arena of this host, in the same kind of memory.
//!
//! ```text
//!   KEY.partner/           mode 0700; its owner and mode are checked before anything in it is used
//!       HOST/              directory of copies for each host whose partner this host is, or was
//!           NUMBER/        a copy of one unit of HOST; NUMBER is a hash of the unit's name
//!               record     the files of the copy, and the number of changes of each
//!               tree       the files
//! ```
//!
//! Copies are not in the arena itself. Files that are written through the mount would get names in the backing, which
//! all hosts share. They would also be drained, and would take room from the writers of this host.
//!
//! Invariants
//! * NUMBER always has a complete tree and the record of that tree.
//! * All copies, including those being made, have at most `bytes_max` bytes. A file counts with its size when it was
//!   opened, not with the listed size.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use firn_protocol::path::BytePath;
use firn_trust::{create_private_dir, names_in, open_beneath, open_private_dir};
use rustix::fs::{CWD, Mode, OFlags};

use crate::copy_directory::{CopyDirectory, next_name};
use crate::error::PullError;
use crate::key_file::check_host;
use crate::message::{Entry, ErrorKind};
use crate::partner::copy::{Copy, CopyFile, TREE};
use crate::partner::record::{Record, stored_bytes};
use crate::pull::local;
use crate::source::{SourceError, check_path, join};

const RECORD: &str = "record";
const NEXT_RECORD: &str = "record.next";

/// The store of partner copies; see the head of this file.
pub(crate) struct Copies {
    dir: PathBuf,
    bytes_max: u64,
    /// Bytes reserved for copies that are being made.
    reserved_bytes: Mutex<u64>,
    /// Locked while a copy gets or loses its name. Once the value is true, followers may change no names any more.
    is_closed: Mutex<bool>,
}

/// Bytes reserved for a copy that is being made. Dropping the value releases them.
pub(crate) struct Room {
    copies: Arc<Copies>,
    bytes: u64,
}

/// Error: the copies leave less room than is necessary.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NoRoom {
    pub(crate) used_bytes: u64,
    pub(crate) bytes_max: u64,
}

impl Copies {
    /// Makes a store in a directory. The directory may be missing.
    pub(crate) fn new(dir: PathBuf, bytes_max: u64) -> Self {
        Self {
            dir,
            bytes_max,
            reserved_bytes: Mutex::new(0),
            is_closed: Mutex::new(false),
        }
    }

    /// Returns the path of the store beside an arena.
    pub(crate) fn beside(arena: &Path) -> PathBuf {
        arena.with_extension("partner")
    }

    /// Path of the store.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Checks that no other user may replace the directories above the store.
    fn check_parents(&self) -> Result<(), PullError> {
        let parent = self.dir.parent().unwrap_or(Path::new("/"));
        Ok(firn_trust::check_place(parent)?)
    }

    /// Returns the hosts of which there are copies. Returns none if another user may have changed the store.
    pub(crate) fn hosts(&self) -> Vec<String> {
        let names = || -> Option<Vec<OsString>> {
            self.check_parents().ok()?;
            names_in(open_private_dir(CWD, &self.dir).ok()?).ok()
        };
        let hosts = names().into_iter().flatten();
        hosts
            .filter_map(|name| name.into_string().ok())
            .filter(|name| check_host(name).is_ok())
            .collect()
    }

    /// Opens the directory of copies of a host. Returns `None` if the directory does not exist, or if another user may
    /// have changed it.
    fn find_directory(&self, host: &str) -> Option<Arc<CopyDirectory>> {
        self.check_parents().ok()?;
        let dir = open_private_dir(CWD, &self.dir).ok()?;
        let dir = open_private_dir(dir, Path::new(host)).ok()?;
        Some(Arc::new(CopyDirectory::in_memory(dir, self.dir.join(host))))
    }

    /// Opens the directory of copies of a host, and creates it if it does not exist.
    fn make_directory(&self, host: &str) -> Result<CopyDirectory, PullError> {
        self.check_parents()?;
        let path = self.dir.join(host);
        let dir = create_private_dir(CWD, &self.dir)?;
        let dir = create_private_dir(dir, Path::new(host)).map_err(|error| error.at(&path))?;
        Ok(CopyDirectory::in_memory(dir, path))
    }

    /// Returns the complete copies of a host's units. A copy without a readable record does not count.
    pub(crate) fn copies_of(&self, host: &str) -> Vec<Copy> {
        let Some(directory) = self.find_directory(host) else {
            return Vec::new();
        };
        let names = directory.names().unwrap_or_default();
        let copies = names.iter().filter_map(|name| load(&directory, name));
        copies.collect()
    }

    /// Returns the copy of one unit of a host.
    pub(crate) fn find(&self, host: &str, unit: &BytePath) -> Option<Copy> {
        let directory = self.find_directory(host)?;
        load(&directory, &name_of(unit)).filter(|copy| copy.record.unit == *unit)
    }

    // ---- room ----------------------------------------------------------------------------------

    /// Reserves `bytes` for a copy. Fails if all copies together would exceed the bound.
    pub(crate) fn reserve(self: &Arc<Self>, bytes: u64) -> Result<Room, NoRoom> {
        let mut reserved_bytes = self.lock_reserved();
        let stored_bytes_sum: u64 = self
            .hosts()
            .iter()
            .flat_map(|host| self.copies_of(host))
            .map(|copy| stored_bytes(&copy.record.entries))
            .fold(0_u64, u64::saturating_add);
        let used_bytes = stored_bytes_sum.saturating_add(*reserved_bytes);
        if used_bytes.saturating_add(bytes) > self.bytes_max {
            return Err(NoRoom {
                used_bytes,
                bytes_max: self.bytes_max,
            });
        }
        *reserved_bytes += bytes;
        Ok(Room {
            copies: Arc::clone(self),
            bytes,
        })
    }

    fn lock_reserved(&self) -> MutexGuard<'_, u64> {
        self.reserved_bytes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    // ---- making and removing -------------------------------------------------------------------

    /// Begins a copy. Returns the path at which its tree is to be made.
    pub(crate) fn begin(&self, host: &str, unit: &BytePath) -> Result<PathBuf, PullError> {
        let _names = self.lock_open()?;
        let next = self.make_directory(host)?.begin(&name_of(unit))?;
        create_private_dir(CWD, &next)?;
        Ok(next.join(TREE))
    }

    /// Writes the record of a complete copy, and renames the copy to its name. Replaces an earlier copy.
    pub(crate) fn finish(&self, host: &str, record: &Record) -> Result<(), PullError> {
        let _names = self.lock_open()?;
        let directory = self.make_directory(host)?;
        let name = name_of(&record.unit);
        let next = next_name(&name);
        write_record(&directory, &Path::new(&next).join(RECORD), record)?;
        directory.finish(&name)
    }

    /// Replaces the record of a complete copy.
    pub(crate) fn renew(&self, host: &str, record: &Record) -> Result<(), PullError> {
        let _names = self.lock_open()?;
        let directory = self.make_directory(host)?;
        let name = PathBuf::from(name_of(&record.unit));
        let next = name.join(NEXT_RECORD);
        write_record(&directory, &next, record)?;
        rustix::fs::renameat(&directory, &next, &directory, name.join(RECORD))
            .map_err(directory.failed(next.as_os_str()))
    }

    /// Removes a copy that was begun and is not finished.
    pub(crate) fn abandon(&self, host: &str, unit: &BytePath) -> Result<(), PullError> {
        match self.find_directory(host) {
            Some(directory) => directory.abandon(&name_of(unit)),
            None => Ok(()),
        }
    }

    /// Removes a copy of a unit, finished or not.
    pub(crate) fn remove(&self, host: &str, unit: &BytePath) -> Result<(), PullError> {
        let _names = self.lock_open()?;
        self.remove_copy(host, unit)
    }

    fn remove_copy(&self, host: &str, unit: &BytePath) -> Result<(), PullError> {
        if let Some(directory) = self.find_directory(host) {
            directory.abandon(&name_of(unit))?;
            directory.remove(&name_of(unit))?;
        }
        self.remove_empty_dirs(host);
        Ok(())
    }

    /// Removes what interrupted copies and removals of a host have left. No copy of the host may be under way.
    pub(crate) fn sweep(&self, host: &str) -> Result<(), PullError> {
        let _names = self.lock_open()?;
        self.remove_leftovers(host)
    }

    fn remove_leftovers(&self, host: &str) -> Result<(), PullError> {
        let directory = self.find_directory(host);
        let failures = directory.map_or_else(Vec::new, |directory| directory.sweep());
        failures.into_iter().next().map_or(Ok(()), Err)
    }

    // ---- the end -------------------------------------------------------------------------------

    /// Ends all changes by followers. Waits for a follower that is changing names, and refuses all later changes.
    pub(crate) fn close(&self) {
        *self.lock_names() = true;
    }

    /// Removes all unfinished copies, and the copies of a host whose every byte is also below `mount_point`. Returns
    /// the number of bytes of the remaining copies. [`Copies::close`] must have been called.
    pub(crate) fn remove_drained(&self, host: &str, mount_point: &Path) -> Result<u64, PullError> {
        let mut remaining_bytes = 0;
        for copy in self.copies_of(host) {
            if copy.is_in(&mount_point.join(&copy.record.unit), &mut || Ok(()))? {
                self.remove_copy(host, &copy.record.unit)?;
            } else {
                remaining_bytes += copy.record.bytes();
            }
        }
        self.remove_leftovers(host)?;
        self.remove_empty_dirs(host);
        Ok(remaining_bytes)
    }

    /// Removes the directory of a host and the store itself, if they are empty.
    fn remove_empty_dirs(&self, host: &str) {
        // rmdir(2) usually fails, because the directory is not empty.
        let _ = std::fs::remove_dir(self.dir.join(host));
        let _ = std::fs::remove_dir(&self.dir);
    }

    fn lock_names(&self) -> MutexGuard<'_, bool> {
        self.is_closed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the names of copies. Fails after the store was closed.
    fn lock_open(&self) -> Result<MutexGuard<'_, bool>, PullError> {
        let is_closed = self.lock_names();
        if *is_closed {
            let error = io::Error::other("the agent of this host is ending");
            return Err(local(&self.dir)(error));
        }
        Ok(is_closed)
    }

    // ---- reading -------------------------------------------------------------------------------

    /// Lists the copied files at and below `HOST` or `HOST/path`, parents first.
    pub(crate) fn list(&self, path: &BytePath) -> Result<Vec<Entry>, SourceError> {
        let (host, path_of_host) = split(path)?;
        let top = path_of_host.as_path();
        let mut entries = Vec::new();
        if path_of_host.is_empty() {
            entries.push(Entry::directory());
        }
        let mut copies = self.copies_of(host);
        copies.sort_by(|a, b| a.record.unit.cmp(&b.record.unit));
        for copy in copies {
            for entry in copy.record.entries {
                let full_path = join(&copy.record.unit, entry.path.as_path());
                let Ok(relative) = full_path.as_path().strip_prefix(top) else {
                    continue;
                };
                entries.push(Entry {
                    path: relative.into(),
                    ..entry
                });
            }
        }
        // Only the entry of the host's directory itself was added.
        if entries.len() == usize::from(path_of_host.is_empty()) {
            return Err(missing(path));
        }
        Ok(entries)
    }

    /// Opens the file `HOST/path` of a copy.
    pub(crate) fn open(&self, path: &BytePath) -> Result<CopyFile, SourceError> {
        let (host, path_of_host) = split(path)?;
        let mut components = path_of_host.as_path().components();
        let Some(unit) = components.next() else {
            return Err(missing(path));
        };
        let unit = BytePath::from(Path::new(unit.as_os_str()));
        let copy = self.find(host, &unit).ok_or_else(|| missing(path))?;
        let file = copy.open(components.as_path());
        file.and_then(CopyFile::new).map_err(|_| missing(path))
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        *self.copies.lock_reserved() -= self.bytes;
    }
}

/// Returns the name of a unit's copy in its directory. The name is a hash, because the unit's own name may be too long
/// for a prefix.
fn name_of(unit: &BytePath) -> OsString {
    let number = xxhash_rust::xxh3::xxh3_128(unit.as_bytes());
    format!("{number:032x}").into()
}

/// Reads the record of a copy. The directory is private, so the record was written by this user.
fn load(directory: &Arc<CopyDirectory>, name: &OsStr) -> Option<Copy> {
    let path = Path::new(name).join(RECORD);
    let file = open_beneath(directory, &path, OFlags::RDONLY, Mode::empty()).ok()?;
    let text = io::read_to_string(File::from(file)).ok()?;
    let record: Record = serde_json::from_str(&text).ok()?;
    let is_plain = firn_trust::is_component(record.unit.as_bytes()) && !record.entries.is_empty();
    is_plain.then(|| Copy::new(record, directory, name))
}

/// Writes a record to a path relative to a directory of copies.
fn write_record(directory: &CopyDirectory, path: &Path, record: &Record) -> Result<(), PullError> {
    let text = serde_json::to_vec(record).expect("it is plain JSON");
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC;
    let file = open_beneath(directory, path, flags, Mode::RUSR | Mode::WUSR)
        .map_err(directory.failed(path.as_os_str()))?;
    let shown = directory.path().join(path);
    File::from(file).write_all(&text).map_err(local(&shown))
}

/// Splits a path into its first component, which is the name of a host, and the rest.
fn split(path: &BytePath) -> Result<(&str, BytePath), SourceError> {
    check_path(path)?;
    let mut components = path.as_path().components();
    let host = components.next().and_then(|host| host.as_os_str().to_str());
    match host.filter(|host| check_host(host).is_ok()) {
        Some(host) => Ok((host, components.as_path().into())),
        None => Err(missing(path)),
    }
}

fn missing(path: &BytePath) -> SourceError {
    SourceError {
        kind: ErrorKind::Missing,
        message: format!("there is no partner copy {path} here"),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::copy_directory::removed_name;

    #[test]
    fn copies_in_a_directory_that_others_may_write_do_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let copies = Copies::new(dir.path().join("KEY.partner"), 1 << 20);
        let unit = BytePath::from(Path::new("step"));
        assert!(copies.hosts().is_empty());
        let tree = copies.begin("n1", &unit).unwrap();
        std::fs::create_dir(tree).unwrap();
        let record = Record {
            unit: unit.clone(),
            arena: "arena".into(),
            incarnation: "firnd".into(),
            entries: vec![Entry::directory()],
        };
        copies.finish("n1", &record).unwrap();
        let set_mode = |mode| {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(copies.dir(), mode).unwrap();
        };
        assert_eq!(copies.hosts(), ["n1"]);
        assert!(copies.find("n1", &unit).is_some());
        set_mode(0o777);
        assert!(copies.hosts().is_empty());
        assert!(copies.copies_of("n1").is_empty());
        assert!(copies.find("n1", &unit).is_none());
        set_mode(0o700);
        assert_eq!(copies.copies_of("n1").len(), 1);
    }

    #[test]
    fn a_closed_store_refuses_changes_and_its_unfinished_copies_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let copies = Copies::new(dir.path().join("KEY.partner"), 1 << 20);
        let unit = BytePath::from(Path::new("step"));
        let tree = copies.begin("n1", &unit).unwrap();
        std::fs::create_dir(&tree).unwrap();
        std::fs::write(tree.join("part"), b"half").unwrap();
        // The state after a process was killed during the removal of another copy.
        let half_removed = removed_name(&name_of(&BytePath::from(Path::new("other"))));
        let half_removed = copies.dir().join("n1").join(half_removed);
        std::fs::create_dir(&half_removed).unwrap();
        std::fs::write(half_removed.join("rest"), b"rest").unwrap();
        copies.close();
        assert!(copies.begin("n1", &unit).is_err());
        assert!(copies.remove("n1", &unit).is_err());
        assert_eq!(copies.remove_drained("n1", dir.path()).unwrap(), 0);
        assert!(!copies.dir().exists(), "the empty store is removed");
    }
}
