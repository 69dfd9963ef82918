//! The copies that a host keeps for others: a directory beside its arena, so in the same kind of memory.
//!
//! ```text
//!   KEY.partner/           mode 0700, looked at before anything in it is used
//!       HOST/              a directory of copies for each host that this one is, or was, the partner of
//!           NUMBER/        a copy: what was directly in the mount under one name
//!               record     which files, and which changes of them
//!               tree
//! ```
//!
//! Why not in the arena: what is written through the mount gets names in the backing, which all hosts share, would be
//! drained as its own files are, and takes room from its writers.
//!
//! Invariants
//! * NUMBER has a whole tree and the record of that tree.
//! * The trees, with those in the making, have at most `bytes_max` bytes: of the files as they are opened, whatever they
//!   were listed with.

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

/// See the head of this file.
pub(crate) struct Copies {
    dir: PathBuf,
    bytes_max: u64,
    /// Bytes reserved for copies in the making.
    reserved_bytes: Mutex<u64>,
    /// Locked while copies get or lose their names. True: followers change nothing more.
    is_closed: Mutex<bool>,
}

/// Room for a copy in the making, given back when it is dropped.
pub(crate) struct Room {
    copies: Arc<Copies>,
    bytes: u64,
}

/// The copies and those in the making leave less room than is asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NoRoom {
    pub(crate) used_bytes: u64,
    pub(crate) bytes_max: u64,
}

impl Copies {
    /// In this directory, which may not be there yet.
    pub(crate) fn new(dir: PathBuf, bytes_max: u64) -> Self {
        Self {
            dir,
            bytes_max,
            reserved_bytes: Mutex::new(0),
            is_closed: Mutex::new(false),
        }
    }

    /// The directory beside the arena of a mount.
    pub(crate) fn beside(arena: &Path) -> PathBuf {
        arena.with_extension("partner")
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    fn check_place(&self) -> Result<(), PullError> {
        let above = self.dir.parent().unwrap_or(Path::new("/"));
        Ok(firn_trust::check_place(above)?)
    }

    /// Hosts of which there are copies; none where others can have put something there.
    pub(crate) fn hosts(&self) -> Vec<String> {
        let names = || -> Option<Vec<OsString>> {
            self.check_place().ok()?;
            names_in(open_private_dir(CWD, &self.dir).ok()?).ok()
        };
        let hosts = names().into_iter().flatten();
        hosts
            .filter_map(|name| name.into_string().ok())
            .filter(|name| check_host(name).is_ok())
            .collect()
    }

    /// The directory of a host; none where it is not there, or others can have put something there.
    fn find_directory(&self, host: &str) -> Option<Arc<CopyDirectory>> {
        self.check_place().ok()?;
        let dir = open_private_dir(CWD, &self.dir).ok()?;
        let dir = open_private_dir(dir, Path::new(host)).ok()?;
        Some(Arc::new(CopyDirectory::in_memory(dir, self.dir.join(host))))
    }

    fn make_directory(&self, host: &str) -> Result<CopyDirectory, PullError> {
        self.check_place()?;
        let path = self.dir.join(host);
        let dir = create_private_dir(CWD, &self.dir)?;
        let dir = create_private_dir(dir, Path::new(host)).map_err(|error| error.at(&path))?;
        Ok(CopyDirectory::in_memory(dir, path))
    }

    /// The whole copies of a host's files. One that cannot be read is none.
    pub(crate) fn copies_of(&self, host: &str) -> Vec<Copy> {
        let Some(directory) = self.find_directory(host) else {
            return Vec::new();
        };
        let names = directory.names().unwrap_or_default();
        let copies = names.iter().filter_map(|name| load(&directory, name));
        copies.collect()
    }

    /// The copy of what was directly in the mount of a host under this name.
    pub(crate) fn find(&self, host: &str, unit: &BytePath) -> Option<Copy> {
        let directory = self.find_directory(host)?;
        load(&directory, &name_of(unit)).filter(|copy| copy.record.unit == *unit)
    }

    // ---- room ----------------------------------------------------------------------------------

    /// Reserves room for `bytes` bytes.
    pub(crate) fn reserve(self: &Arc<Self>, bytes: u64) -> Result<Room, NoRoom> {
        let mut reserved_bytes = self.lock_reserved();
        let whole_bytes: u64 = self
            .hosts()
            .iter()
            .flat_map(|host| self.copies_of(host))
            .map(|copy| stored_bytes(&copy.record.entries))
            .fold(0_u64, u64::saturating_add);
        let used_bytes = whole_bytes.saturating_add(*reserved_bytes);
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

    /// Begins a copy. Returns the name of its tree, which does not exist.
    pub(crate) fn begin(&self, host: &str, unit: &BytePath) -> Result<PathBuf, PullError> {
        let _open = self.lock_open()?;
        let next = self.make_directory(host)?.begin(&name_of(unit))?;
        create_private_dir(CWD, &next)?;
        Ok(next.join(TREE))
    }

    /// Gives the tree that was begun, and is whole, its name and its record.
    pub(crate) fn finish(&self, host: &str, record: &Record) -> Result<(), PullError> {
        let _open = self.lock_open()?;
        let directory = self.make_directory(host)?;
        let name = name_of(&record.unit);
        let next = next_name(&name);
        write_record(&directory, &Path::new(&next).join(RECORD), record)?;
        directory.finish(&name)
    }

    /// Gives the tree of a whole copy another record.
    pub(crate) fn renew(&self, host: &str, record: &Record) -> Result<(), PullError> {
        let _open = self.lock_open()?;
        let directory = self.make_directory(host)?;
        let name = PathBuf::from(name_of(&record.unit));
        let next = name.join(NEXT_RECORD);
        write_record(&directory, &next, record)?;
        rustix::fs::renameat(&directory, &next, &directory, name.join(RECORD))
            .map_err(directory.failed(next.as_os_str()))
    }

    /// Gives up what was begun.
    pub(crate) fn abandon(&self, host: &str, unit: &BytePath) -> Result<(), PullError> {
        match self.find_directory(host) {
            Some(directory) => directory.abandon(&name_of(unit)),
            None => Ok(()),
        }
    }

    /// Removes a copy.
    pub(crate) fn remove(&self, host: &str, unit: &BytePath) -> Result<(), PullError> {
        let _open = self.lock_open()?;
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

    /// Removes what interrupted removals and copies left and no follower continues.
    pub(crate) fn sweep(&self, host: &str) -> Result<(), PullError> {
        let _open = self.lock_open()?;
        self.remove_leftovers(host)
    }

    fn remove_leftovers(&self, host: &str) -> Result<(), PullError> {
        let directory = self.find_directory(host);
        let failures = directory.map_or_else(Vec::new, |directory| directory.sweep());
        failures.into_iter().next().map_or(Ok(()), Err)
    }

    // ---- the end -------------------------------------------------------------------------------

    /// Ends all changes before the agent ends: waits for a follower that is removing a copy, and lets none begin or
    /// finish another one.
    pub(crate) fn close(&self) {
        *self.lock_names() = true;
    }

    /// Removes each copy of a host of which every byte is also below `mount_point`, and what followers left half done.
    /// Returns the bytes of the copies that stay. No follower changes anything any more.
    pub(crate) fn remove_drained(&self, host: &str, mount_point: &Path) -> Result<u64, PullError> {
        let mut left_bytes = 0;
        for copy in self.copies_of(host) {
            if copy.is_in(&mount_point.join(&copy.record.unit), &mut || Ok(()))? {
                self.remove_copy(host, &copy.record.unit)?;
            } else {
                left_bytes += copy.record.bytes();
            }
        }
        self.remove_leftovers(host)?;
        self.remove_empty_dirs(host);
        Ok(left_bytes)
    }

    /// Removes the directory of a host, and the directory of all, where nothing is left in them.
    fn remove_empty_dirs(&self, host: &str) {
        let _ = std::fs::remove_dir(self.dir.join(host));
        let _ = std::fs::remove_dir(&self.dir);
    }

    fn lock_names(&self) -> MutexGuard<'_, bool> {
        self.is_closed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the names of copies, unless the agent is ending.
    fn lock_open(&self) -> Result<MutexGuard<'_, bool>, PullError> {
        let is_closed = self.lock_names();
        if *is_closed {
            let error = io::Error::other("the agent of this host is ending");
            return Err(local(&self.dir)(error));
        }
        Ok(is_closed)
    }

    // ---- reading -------------------------------------------------------------------------------

    /// What there is of a host at and below `HOST` or `HOST/path`, parents first.
    pub(crate) fn list(&self, path: &BytePath) -> Result<Vec<Entry>, SourceError> {
        let (host, below) = split(path)?;
        let top = below.as_path();
        let mut entries = Vec::new();
        if below.is_empty() {
            entries.push(Entry::directory());
        }
        let mut copies = self.copies_of(host);
        copies.sort_by(|a, b| a.record.unit.cmp(&b.record.unit));
        for copy in copies {
            for entry in copy.record.entries {
                let full = join(&copy.record.unit, entry.path.as_path());
                let Ok(shown) = full.as_path().strip_prefix(top) else {
                    continue;
                };
                entries.push(Entry {
                    path: shown.into(),
                    ..entry
                });
            }
        }
        if entries.len() == usize::from(below.is_empty()) {
            return Err(missing(path));
        }
        Ok(entries)
    }

    /// Opens a file of a copy.
    pub(crate) fn open(&self, path: &BytePath) -> Result<CopyFile, SourceError> {
        let (host, below) = split(path)?;
        let mut components = below.as_path().components();
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

/// Name of a copy in its directory. A name of the mount may be as long as a name can be, and leaves no room for a prefix.
fn name_of(unit: &BytePath) -> OsString {
    let number = xxhash_rust::xxh3::xxh3_128(unit.as_bytes());
    format!("{number:032x}").into()
}

/// The directory is private: what is in it is ours.
fn load(directory: &Arc<CopyDirectory>, name: &OsStr) -> Option<Copy> {
    let path = Path::new(name).join(RECORD);
    let file = open_beneath(directory, &path, OFlags::RDONLY, Mode::empty()).ok()?;
    let text = io::read_to_string(File::from(file)).ok()?;
    let record: Record = serde_json::from_str(&text).ok()?;
    let is_plain = firn_trust::is_component(record.unit.as_bytes()) && !record.entries.is_empty();
    is_plain.then(|| Copy::new(record, directory, name))
}

fn write_record(directory: &CopyDirectory, path: &Path, record: &Record) -> Result<(), PullError> {
    let text = serde_json::to_vec(record).expect("it is plain JSON");
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC;
    let file = open_beneath(directory, path, flags, Mode::RUSR | Mode::WUSR)
        .map_err(directory.failed(path.as_os_str()))?;
    let shown = directory.path().join(path);
    File::from(file).write_all(&text).map_err(local(&shown))
}

/// `HOST`, and what comes after it.
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
    fn copies_where_others_may_write_are_none() {
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
        let let_in = |mode| {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(copies.dir(), mode).unwrap();
        };
        assert_eq!(copies.hosts(), ["n1"]);
        assert!(copies.find("n1", &unit).is_some());
        let_in(0o777);
        assert!(copies.hosts().is_empty());
        assert!(copies.copies_of("n1").is_empty());
        assert!(copies.find("n1", &unit).is_none());
        let_in(0o700);
        assert_eq!(copies.copies_of("n1").len(), 1);
    }

    #[test]
    fn once_closed_nothing_changes_any_more_and_what_was_half_done_goes() {
        let dir = tempfile::tempdir().unwrap();
        let copies = Copies::new(dir.path().join("KEY.partner"), 1 << 20);
        let unit = BytePath::from(Path::new("step"));
        let tree = copies.begin("n1", &unit).unwrap();
        std::fs::create_dir(&tree).unwrap();
        std::fs::write(tree.join("part"), b"half").unwrap();
        // A follower was killed while it removed this one.
        let gone = removed_name(&name_of(&BytePath::from(Path::new("other"))));
        let gone = copies.dir().join("n1").join(gone);
        std::fs::create_dir(&gone).unwrap();
        std::fs::write(gone.join("rest"), b"rest").unwrap();
        copies.close();
        assert!(copies.begin("n1", &unit).is_err());
        assert!(copies.remove("n1", &unit).is_err());
        assert_eq!(copies.remove_drained("n1", dir.path()).unwrap(), 0);
        assert!(!copies.dir().exists(), "nothing of it stays");
    }
}
