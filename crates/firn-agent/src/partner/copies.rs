//! The store of *partner copies*: copies that this host keeps of the files that other hosts have in memory only. It is
//! a directory beside the *arena*, the shared memory of this host's mount, in the same kind of memory.
//!
//! A *unit* of a host is a name at the top of its mount, with everything below it. There is one copy for each unit.
//!
//! ```text
//!   KEY.partner/           mode 0700; its owner and mode are checked before anything in it is used
//!       HOST/              directory of copies for each host whose partner this host is, or was
//!           NUMBER/        a copy of one unit of HOST; NUMBER is a hash of the unit's name
//!               record     the files of the copy, and the number of changes of each
//!               tree       the files
//! ```
//!
//! Copies are not in the arena itself. Files that are written through the mount would get names in the backing, the
//! served directory, which all hosts share. Their bytes would also be written there, and would take room in the arena
//! from the writers of this host.
//!
//! Invariants
//! * NUMBER always has a complete tree and the record of that tree.
//! * All copies, including those being made, have at most `bytes_max` bytes. A file counts with its size when it was
//!   opened, not with the listed size.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use firn_protocol::path::BytePath;
use firn_trust::{create_private_dir, list_names, open_beneath, open_private_dir};
use rustix::fs::{CWD, Mode, OFlags};

use crate::copy_directory::{CopyDirectory, unfinished_name};
use crate::error::PullError;
use crate::key_file::check_host;
use crate::message::{Entry, ErrorKind};
use crate::partner::copy::{CopyFile, PartnerCopy, TREE};
use crate::partner::record::{CopyRecord, stored_bytes};
use crate::pull::local_error;
use crate::source::{SourceError, check_path, join};

const RECORD: &str = "record";
const NEW_RECORD: &str = "record.next";

/// The store of partner copies; see the head of this file.
pub(crate) struct CopyStore {
    dir: PathBuf,
    bytes_max: u64,
    /// Bytes reserved for copies that are being made.
    reserved_bytes: Mutex<u64>,
    /// Locked while a copy gets or loses its name. Once the value is true, the threads that copy from other hosts may
    /// change no names any more.
    is_closed: Mutex<bool>,
}

/// Bytes reserved for a copy that is being made. Dropping the value releases them.
pub(crate) struct SpaceReservation {
    store: Arc<CopyStore>,
    bytes: u64,
}

/// Error: the store has less free space than a copy needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InsufficientSpace {
    pub(crate) used_bytes: u64,
    pub(crate) bytes_max: u64,
}

impl CopyStore {
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
    pub(crate) fn path_beside_arena(arena: &Path) -> PathBuf {
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

    /// Opens the store. Returns `None` if it does not exist, or if another user may have changed it.
    fn open_if_trusted(&self) -> Option<OwnedFd> {
        self.check_parents().ok()?;
        open_private_dir(CWD, &self.dir).ok()
    }

    /// Returns the hosts of which there are copies. Returns none if another user may have changed the store.
    pub(crate) fn hosts(&self) -> Vec<String> {
        let Some(store_dir) = self.open_if_trusted() else {
            return Vec::new();
        };
        let names = list_names(store_dir).unwrap_or_default();
        names
            .into_iter()
            .filter_map(|name| name.into_string().ok())
            .filter(|name| check_host(name).is_ok())
            .collect()
    }

    /// Opens the directory of copies of a host. Returns `None` if the directory does not exist, or if another user may
    /// have changed it.
    fn find_directory(&self, host: &str) -> Option<Arc<CopyDirectory>> {
        let store_dir = self.open_if_trusted()?;
        let host_dir = open_private_dir(store_dir, Path::new(host)).ok()?;
        let path = self.dir.join(host);
        Some(Arc::new(CopyDirectory::from_checked_memory_dir(
            host_dir, path,
        )))
    }

    /// Opens the directory of copies of a host, and creates it if it does not exist.
    fn create_directory(&self, host: &str) -> Result<CopyDirectory, PullError> {
        self.check_parents()?;
        let path = self.dir.join(host);
        let store_dir = create_private_dir(CWD, &self.dir)?;
        let host_dir =
            create_private_dir(store_dir, Path::new(host)).map_err(|error| error.at(&path))?;
        Ok(CopyDirectory::from_checked_memory_dir(host_dir, path))
    }

    /// Returns the complete copies of a host's units. A copy without a readable record does not count.
    pub(crate) fn copies_of(&self, host: &str) -> Vec<PartnerCopy> {
        let Some(directory) = self.find_directory(host) else {
            return Vec::new();
        };
        let names = directory.copy_names().unwrap_or_default();
        names
            .iter()
            .filter_map(|name| load_copy(&directory, name))
            .collect()
    }

    /// Returns the copy of one unit of a host.
    pub(crate) fn find_copy(&self, host: &str, unit: &BytePath) -> Option<PartnerCopy> {
        let directory = self.find_directory(host)?;
        let copy = load_copy(&directory, &copy_name(unit))?;
        // The name is a hash, which another unit may have too.
        if copy.record.unit == *unit {
            Some(copy)
        } else {
            None
        }
    }

    // ---- space ---------------------------------------------------------------------------------

    /// Reserves `bytes` for a copy of another host's files. The reservation is to live until the copy is complete or
    /// aborted; from then on the copy itself counts.
    ///
    /// Fails if all copies together, including those that are being made, would exceed the bound of the store.
    pub(crate) fn reserve(
        self: &Arc<Self>,
        bytes: u64,
    ) -> Result<SpaceReservation, InsufficientSpace> {
        let mut reserved_bytes = self.lock_reserved();
        let mut used_bytes = *reserved_bytes;
        for host in self.hosts() {
            for copy in self.copies_of(&host) {
                used_bytes = used_bytes.saturating_add(stored_bytes(&copy.record.entries));
            }
        }
        if used_bytes.saturating_add(bytes) > self.bytes_max {
            return Err(InsufficientSpace {
                used_bytes,
                bytes_max: self.bytes_max,
            });
        }
        *reserved_bytes += bytes;
        Ok(SpaceReservation {
            store: Arc::clone(self),
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
    pub(crate) fn begin_copy(&self, host: &str, unit: &BytePath) -> Result<PathBuf, PullError> {
        let _names_lock = self.lock_names_for_follower()?;
        let copy_dir = self.create_directory(host)?.begin_copy(&copy_name(unit))?;
        create_private_dir(CWD, &copy_dir)?;
        Ok(copy_dir.join(TREE))
    }

    /// Writes the record of a complete copy, and renames the copy to its name. Replaces an earlier copy.
    pub(crate) fn commit_copy(&self, host: &str, record: &CopyRecord) -> Result<(), PullError> {
        let _names_lock = self.lock_names_for_follower()?;
        let directory = self.create_directory(host)?;
        let name = copy_name(&record.unit);
        let record_path = Path::new(&unfinished_name(&name)).join(RECORD);
        write_record(&directory, &record_path, record)?;
        directory.commit_copy(&name)
    }

    /// Replaces the record of a complete copy by one rename.
    pub(crate) fn replace_record(&self, host: &str, record: &CopyRecord) -> Result<(), PullError> {
        let _names_lock = self.lock_names_for_follower()?;
        let directory = self.create_directory(host)?;
        let copy_dir = PathBuf::from(copy_name(&record.unit));
        let new_record = copy_dir.join(NEW_RECORD);
        write_record(&directory, &new_record, record)?;
        rustix::fs::renameat(&directory, &new_record, &directory, copy_dir.join(RECORD))
            .map_err(directory.error_at(new_record.as_os_str()))
    }

    /// Removes the unfinished copy of a unit.
    pub(crate) fn abort_copy(&self, host: &str, unit: &BytePath) -> Result<(), PullError> {
        match self.find_directory(host) {
            Some(directory) => directory.abort_copy(&copy_name(unit)),
            None => Ok(()),
        }
    }

    /// Removes a copy of a unit, finished or not.
    pub(crate) fn remove_copy(&self, host: &str, unit: &BytePath) -> Result<(), PullError> {
        let _names_lock = self.lock_names_for_follower()?;
        self.remove_copy_locked(host, unit)
    }

    /// Removes a copy of a unit. Either the names are locked, or the store is closed.
    fn remove_copy_locked(&self, host: &str, unit: &BytePath) -> Result<(), PullError> {
        if let Some(directory) = self.find_directory(host) {
            directory.abort_copy(&copy_name(unit))?;
            directory.remove_copy(&copy_name(unit))?;
        }
        self.remove_empty_dirs(host);
        Ok(())
    }

    /// Removes the remains of interrupted copies and removals of a host. No copy of the host may be under way.
    pub(crate) fn remove_leftovers(&self, host: &str) -> Result<(), PullError> {
        let _names_lock = self.lock_names_for_follower()?;
        self.remove_leftovers_locked(host)
    }

    /// Tries to remove all leftovers, and returns the first error. Either the names are locked, or the store is closed.
    fn remove_leftovers_locked(&self, host: &str) -> Result<(), PullError> {
        let Some(directory) = self.find_directory(host) else {
            return Ok(());
        };
        match directory.remove_leftovers().into_iter().next() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    // ---- the end -------------------------------------------------------------------------------

    /// Ends all changes by followers. Waits for a follower that is changing names, and refuses all later changes.
    pub(crate) fn close(&self) {
        *self.lock_names() = true;
    }

    /// Removes all unfinished copies, and the copies of a host whose every byte is also below `mount_point`. Returns
    /// the number of bytes of the remaining copies. [`CopyStore::close`] must have been called.
    pub(crate) fn remove_drained(&self, host: &str, mount_point: &Path) -> Result<u64, PullError> {
        let mut remaining_bytes = 0;
        for copy in self.copies_of(host) {
            let unit_path = mount_point.join(&copy.record.unit);
            let is_drained = copy.has_all_files_in(&unit_path, &mut || Ok(()))?;
            if is_drained {
                self.remove_copy_locked(host, &copy.record.unit)?;
            } else {
                remaining_bytes += copy.record.bytes();
            }
        }
        self.remove_leftovers_locked(host)?;
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

    /// Locks the names of copies, so that a follower may change them. Fails after the store was closed.
    fn lock_names_for_follower(&self) -> Result<MutexGuard<'_, bool>, PullError> {
        let is_closed = self.lock_names();
        if *is_closed {
            let error = io::Error::other("the agent of this host is ending");
            return Err(local_error(&self.dir)(error));
        }
        Ok(is_closed)
    }

    // ---- reading -------------------------------------------------------------------------------

    /// Lists the copied files of the host `HOST`, at and below the path `HOST` or `HOST/path`, parents first. Paths in
    /// the list are relative to `path`.
    ///
    /// There is one copy for each unit (a name at the top of the host's mount). Fails if there is no file at the path.
    pub(crate) fn list(&self, path: &BytePath) -> Result<Vec<Entry>, SourceError> {
        let PathOfHost { host, path: top } = PathOfHost::parse(path)?;
        let mut entries = Vec::new();
        let mut copies = self.copies_of(host);
        copies.sort_by(|a, b| a.record.unit.cmp(&b.record.unit));
        for copy in copies {
            for entry in copy.record.entries {
                let full_path = join(&copy.record.unit, entry.path.as_path());
                let Ok(relative_path) = full_path.as_path().strip_prefix(top.as_path()) else {
                    continue;
                };
                entries.push(Entry {
                    path: relative_path.into(),
                    ..entry
                });
            }
        }
        if entries.is_empty() {
            return Err(no_such_copy(path));
        }
        if top.is_empty() {
            // A list begins with the listed directory, here the one that has the copies of all units.
            entries.insert(0, Entry::directory());
        }
        Ok(entries)
    }

    /// Opens the copy of a file of another host. `path` is `HOST/path`, with the path of the file in that host's mount.
    ///
    /// The first component of the file's path is its unit, and there is one copy for each unit. Fails if there is no
    /// copy of the file.
    pub(crate) fn open(&self, path: &BytePath) -> Result<CopyFile, SourceError> {
        let PathOfHost {
            host,
            path: unit_and_file,
        } = PathOfHost::parse(path)?;
        let mut components = unit_and_file.as_path().components();
        let Some(unit) = components.next() else {
            return Err(no_such_copy(path));
        };
        let unit = BytePath::from(Path::new(unit.as_os_str()));
        let Some(copy) = self.find_copy(host, &unit) else {
            return Err(no_such_copy(path));
        };
        copy.open(components.as_path())
            .and_then(CopyFile::new)
            .map_err(|_| no_such_copy(path))
    }
}

impl Drop for SpaceReservation {
    fn drop(&mut self) {
        *self.store.lock_reserved() -= self.bytes;
    }
}

/// Returns the name of a unit's copy in its directory. The name is a hash, because the unit's own name may be too long
/// for a prefix.
fn copy_name(unit: &BytePath) -> OsString {
    let hash = xxhash_rust::xxh3::xxh3_128(unit.as_bytes());
    format!("{hash:032x}").into()
}

/// Reads the record of a copy. Returns `None` if there is no valid record.
fn load_copy(directory: &Arc<CopyDirectory>, name: &OsStr) -> Option<PartnerCopy> {
    let path = Path::new(name).join(RECORD);
    // The directory is private, so the record was written by this user.
    let file = open_beneath(directory, &path, OFlags::RDONLY, Mode::empty()).ok()?;
    let json = io::read_to_string(File::from(file)).ok()?;
    let record: CopyRecord = serde_json::from_str(&json).ok()?;
    if !firn_trust::is_component(record.unit.as_bytes()) || record.entries.is_empty() {
        return None;
    }
    Some(PartnerCopy::new(record, directory, name))
}

/// Writes a record to a path relative to a directory of copies.
fn write_record(
    directory: &CopyDirectory,
    path: &Path,
    record: &CopyRecord,
) -> Result<(), PullError> {
    let json = serde_json::to_vec(record).expect("a record is plain JSON");
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC;
    let file = open_beneath(directory, path, flags, Mode::RUSR | Mode::WUSR)
        .map_err(directory.error_at(path.as_os_str()))?;
    let full_path = directory.path().join(path);
    File::from(file)
        .write_all(&json)
        .map_err(local_error(&full_path))
}

/// A path `HOST/path` of a puller, in its two parts.
struct PathOfHost<'a> {
    host: &'a str,
    /// Path on the mount of the host.
    path: BytePath,
}

impl<'a> PathOfHost<'a> {
    /// Divides a path. Fails if its first component is not the name of a host.
    fn parse(path: &'a BytePath) -> Result<Self, SourceError> {
        check_path(path)?;
        let mut components = path.as_path().components();
        let first = components.next();
        let Some(host) = first.and_then(|component| component.as_os_str().to_str()) else {
            return Err(no_such_copy(path));
        };
        if check_host(host).is_err() {
            return Err(no_such_copy(path));
        }
        Ok(Self {
            host,
            path: components.as_path().into(),
        })
    }
}

fn no_such_copy(path: &BytePath) -> SourceError {
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
        let copies = CopyStore::new(dir.path().join("KEY.partner"), 1 << 20);
        let unit = BytePath::from(Path::new("step"));
        assert!(copies.hosts().is_empty());
        let tree = copies.begin_copy("n1", &unit).unwrap();
        std::fs::create_dir(tree).unwrap();
        let record = CopyRecord {
            unit: unit.clone(),
            arena: "arena".into(),
            incarnation: "firnd".into(),
            entries: vec![Entry::directory()],
        };
        copies.commit_copy("n1", &record).unwrap();
        let set_mode = |mode| {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(copies.dir(), mode).unwrap();
        };
        assert_eq!(copies.hosts(), ["n1"]);
        assert!(copies.find_copy("n1", &unit).is_some());
        set_mode(0o777);
        assert!(copies.hosts().is_empty());
        assert!(copies.copies_of("n1").is_empty());
        assert!(copies.find_copy("n1", &unit).is_none());
        set_mode(0o700);
        assert_eq!(copies.copies_of("n1").len(), 1);
    }

    #[test]
    fn a_closed_store_refuses_changes_and_its_unfinished_copies_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let copies = CopyStore::new(dir.path().join("KEY.partner"), 1 << 20);
        let unit = BytePath::from(Path::new("step"));
        let tree = copies.begin_copy("n1", &unit).unwrap();
        std::fs::create_dir(&tree).unwrap();
        std::fs::write(tree.join("part"), b"half").unwrap();
        // The state after a process was killed during the removal of another copy.
        let half_removed = removed_name(&copy_name(&BytePath::from(Path::new("other"))));
        let half_removed = copies.dir().join("n1").join(half_removed);
        std::fs::create_dir(&half_removed).unwrap();
        std::fs::write(half_removed.join("rest"), b"rest").unwrap();
        copies.close();
        assert!(copies.begin_copy("n1", &unit).is_err());
        assert!(copies.remove_copy("n1", &unit).is_err());
        assert_eq!(copies.remove_drained("n1", dir.path()).unwrap(), 0);
        assert!(!copies.dir().exists(), "the empty store is removed");
    }
}
