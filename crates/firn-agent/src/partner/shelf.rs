//! The copies that a host keeps for others: a directory beside its arena, so in the same kind of memory.
//!
//! ```text
//!   KEY.partner/           mode 0700, looked at before anything in it is used
//!       HOST/              one for each host that this one is, or was, the partner of
//!           NUMBER/        a copy: what was directly in the mount under one name
//!               record     which files, and which changes of them
//!               tree
//!           NUMBER.next/   one in the making: exchanged for NUMBER, or renamed to it, when it is whole
//!           NUMBER.gone/   one that is being removed
//! ```
//!
//! Why not in the arena: what is written through the mount gets names in the backing, which all hosts share, would be
//! drained as its own files are, and takes room from its writers.
//!
//! Invariants
//! * NUMBER has a whole tree and the record of that tree.
//! * The trees, with those in the making, have at most `bytes_max` bytes: of the files as they are opened, whatever they
//!   were listed with.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use firn_protocol::path::BytePath;
use firn_trust::open_beneath;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags, StatxFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::error::PullError;
use crate::key_file::check_host;
use crate::message::{Entry, EntryKind, ErrorKind};
use crate::pull::{local, remove_tree};
use crate::source::{SourceError, check_path, join};

const RECORD: &str = "record";
const NEXT_RECORD: &str = "record.next";
const TREE: &str = "tree";
const NEXT: &str = ".next";
const GONE: &str = ".gone";
/// Bytes that are compared at a time.
const COMPARE_BYTES: usize = 256 << 10;

/// See the head of this file.
pub(crate) struct Shelf {
    dir: PathBuf,
    bytes_max: u64,
    /// Of copies in the making.
    reserved_bytes: Mutex<u64>,
    /// Locked while copies get or lose their names. True: the shelf is closed, and followers change nothing more.
    is_closed: Mutex<bool>,
}

/// What a copy is of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Its name in the mount.
    pub(crate) unit: BytePath,
    /// The arena that held it.
    pub(crate) arena: String,
    /// The firnd that counted the changes.
    pub(crate) incarnation: String,
    /// What is in the tree, as it was listed; the first is the top.
    pub(crate) entries: Vec<Entry>,
}

/// What is called while something takes long; an error ends it.
pub(crate) type Tick<'a> = dyn FnMut() -> Result<(), PullError> + 'a;

/// A whole copy.
pub(crate) struct Copy {
    pub(crate) record: Record,
    path: PathBuf,
}

/// Room for a copy in the making.
pub(crate) struct Room<'a> {
    shelf: &'a Shelf,
    bytes: u64,
}

/// A file of a copy, open for reading. A copy that is removed meanwhile stays for whoever has it open.
pub(crate) struct CopyFile {
    file: File,
    bytes: u64,
}

impl Record {
    /// Bytes of its files.
    pub(crate) fn bytes(&self) -> u64 {
        let sizes = self.entries.iter().map(|entry| match entry.kind {
            EntryKind::File { bytes, .. } => bytes,
            _ => 0,
        });
        sizes.fold(0, u64::saturating_add)
    }

    fn by_path(&self) -> BTreeMap<&BytePath, &Entry> {
        by_path(&self.entries)
    }

    /// Whether it is of all these files, as they are.
    pub(crate) fn covers(&self, incarnation: &str, entries: &[Entry]) -> bool {
        if self.incarnation != incarnation {
            return false;
        }
        let all = self.by_path();
        let is_same = |entry: &Entry| match (&entry.kind, all.get(&entry.path)) {
            // Nothing of it is held.
            _ if entry.held.is_none() => true,
            (EntryKind::File { bytes, .. }, Some(own)) => {
                let is_as_long =
                    matches!(own.kind, EntryKind::File { bytes: known, .. } if known == *bytes);
                is_as_long && own.changes().is_some() && own.changes() == entry.changes()
            }
            (EntryKind::File { .. }, None) => false,
            _ => true,
        };
        entries.iter().all(is_same)
    }

    /// Whether there are files of the same names and lengths in it.
    pub(crate) fn may_be_of(&self, entries: &[Entry]) -> bool {
        let all = self.by_path();
        let is_like = |entry: &Entry| {
            let own = all.get(&entry.path);
            own.is_some_and(|own| match (&own.kind, &entry.kind) {
                (EntryKind::File { bytes, .. }, EntryKind::File { bytes: now, .. }) => bytes == now,
                (own, now) => own == now,
            })
        };
        entries.iter().all(is_like)
    }

    /// The same tree, of which a firnd holds `entries`. It does not hold the others any more: of those no number of
    /// changes says anything.
    pub(crate) fn renewed(&self, incarnation: &str, entries: &[Entry]) -> Self {
        let now = by_path(entries);
        let renew = |own: &Entry| match now.get(&own.path) {
            Some(entry) => (*entry).clone(),
            None => Entry {
                held: None,
                ..own.clone()
            },
        };
        Self {
            incarnation: incarnation.to_owned(),
            entries: self.entries.iter().map(renew).collect(),
            ..self.clone()
        }
    }

    /// Files of it that are not among these.
    pub(crate) fn files_beside(&self, entries: &[Entry]) -> Vec<BytePath> {
        let now = by_path(entries);
        let others = self.files().filter(|own| !now.contains_key(&own.path));
        others.map(|own| own.path.clone()).collect()
    }

    fn files(&self) -> impl Iterator<Item = &Entry> {
        let is_file = |entry: &&Entry| matches!(entry.kind, EntryKind::File { .. });
        self.entries.iter().filter(is_file)
    }
}

fn by_path(entries: &[Entry]) -> BTreeMap<&BytePath, &Entry> {
    entries.iter().map(|entry| (&entry.path, entry)).collect()
}

/// Bytes of memory that a copy of a list takes.
pub(crate) fn stored_bytes(entries: &[Entry]) -> u64 {
    let sizes = entries.iter().map(Entry::stored_bytes);
    sizes.fold(0, u64::saturating_add)
}

impl Shelf {
    /// In this directory, which may not be there yet.
    pub(crate) fn new(dir: PathBuf, bytes_max: u64) -> Self {
        Self {
            dir,
            bytes_max,
            reserved_bytes: Mutex::new(0),
            is_closed: Mutex::new(false),
        }
    }

    /// Beside the arena of a mount.
    pub(crate) fn beside(arena: &Path) -> PathBuf {
        arena.with_extension("partner")
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Whether it is there, and nobody else can have put anything into it, or can put another one in its place: then what
    /// is below is what its paths say.
    fn is_ours(&self) -> bool {
        let above = self.dir.parent().unwrap_or(Path::new("/"));
        firn_trust::open_private_dir(CWD, &self.dir).is_ok()
            && firn_trust::check_place(above).is_ok()
    }

    fn names_in(&self, dir: &Path) -> Vec<String> {
        if !self.is_ours() {
            return Vec::new();
        }
        let Ok(entries) = std::fs::read_dir(dir) else {
            return Vec::new();
        };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.collect()
    }

    fn host_dir(&self, host: &str) -> PathBuf {
        self.dir.join(host)
    }

    fn copy_dir(&self, host: &str, unit: &BytePath, suffix: &str) -> PathBuf {
        let number = xxhash_rust::xxh3::xxh3_128(unit.as_bytes());
        self.host_dir(host).join(format!("{number:032x}{suffix}"))
    }

    /// Hosts of which there are copies.
    pub(crate) fn hosts(&self) -> Vec<String> {
        let names = self.names_in(&self.dir);
        names
            .into_iter()
            .filter(|name| check_host(name).is_ok())
            .collect()
    }

    /// The whole copies of a host's files. One that cannot be read is none.
    pub(crate) fn copies(&self, host: &str) -> Vec<Copy> {
        let dir = self.host_dir(host);
        let names = self.names_in(&dir).into_iter();
        let whole = names.filter(|name| name.bytes().all(|byte| byte.is_ascii_hexdigit()));
        whole.filter_map(|name| load(dir.join(name))).collect()
    }

    pub(crate) fn find(&self, host: &str, unit: &BytePath) -> Option<Copy> {
        if !self.is_ours() {
            return None;
        }
        load(self.copy_dir(host, unit, "")).filter(|copy| copy.record.unit == *unit)
    }

    // ---- room ----------------------------------------------------------------------------------

    /// Room for so many bytes; an error says how many are there and how many there may be.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<Room<'_>, (u64, u64)> {
        let mut reserved = self
            .reserved_bytes
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let whole: u64 = self
            .hosts()
            .iter()
            .flat_map(|host| self.copies(host))
            .map(|copy| stored_bytes(&copy.record.entries))
            .fold(0_u64, u64::saturating_add);
        let used = whole.saturating_add(*reserved);
        if used.saturating_add(bytes) > self.bytes_max {
            return Err((used, self.bytes_max));
        }
        *reserved += bytes;
        Ok(Room { shelf: self, bytes })
    }

    // ---- making and removing -------------------------------------------------------------------

    /// Where a copy is to be made: the name of its tree, which does not exist. What an earlier try left beside it is
    /// used again.
    pub(crate) fn begin(&self, host: &str, unit: &BytePath) -> Result<PathBuf, PullError> {
        let _open = self.lock_open()?;
        firn_trust::check_place(self.dir.parent().unwrap_or(Path::new("/")))?;
        for dir in [
            self.dir.clone(),
            self.host_dir(host),
            self.copy_dir(host, unit, NEXT),
        ] {
            firn_trust::create_private_dir(CWD, &dir)?;
        }
        let next = self.copy_dir(host, unit, NEXT);
        remove_tree(&next.join(TREE))?;
        Ok(next.join(TREE))
    }

    /// The tree that was begun is whole: it takes its place with its record.
    pub(crate) fn finish(&self, host: &str, record: &Record) -> Result<(), PullError> {
        let _open = self.lock_open()?;
        let next = self.copy_dir(host, &record.unit, NEXT);
        let whole = self.copy_dir(host, &record.unit, "");
        let path = next.join(RECORD);
        std::fs::write(&path, encode(record)).map_err(local(&path))?;
        match rustix::fs::renameat_with(CWD, &next, CWD, &whole, RenameFlags::EXCHANGE) {
            Ok(()) => remove_tree(&next),
            Err(Errno::NOENT) => std::fs::rename(&next, &whole).map_err(local(&whole)),
            Err(errno) => Err(local(&whole)(errno.into())),
        }
    }

    /// The tree of a whole copy stays, with another record.
    pub(crate) fn renew(&self, host: &str, record: &Record) -> Result<(), PullError> {
        let _open = self.lock_open()?;
        let whole = self.copy_dir(host, &record.unit, "");
        let next = whole.join(NEXT_RECORD);
        std::fs::write(&next, encode(record)).map_err(local(&next))?;
        std::fs::rename(&next, whole.join(RECORD)).map_err(local(&next))
    }

    /// Gives up what was begun.
    pub(crate) fn abandon(&self, host: &str, unit: &BytePath) -> Result<(), PullError> {
        if self.is_ours() {
            remove_tree(&self.copy_dir(host, unit, NEXT))?;
        }
        Ok(())
    }

    /// Removes a copy: under another name first, so that none is seen in part.
    pub(crate) fn remove(&self, host: &str, unit: &BytePath) -> Result<(), PullError> {
        let _open = self.lock_open()?;
        self.remove_copy(host, unit)
    }

    fn remove_copy(&self, host: &str, unit: &BytePath) -> Result<(), PullError> {
        let whole = self.copy_dir(host, unit, "");
        let gone = self.copy_dir(host, unit, GONE);
        remove_tree(&gone)?;
        match std::fs::rename(&whole, &gone) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(local(&whole)(error));
            }
            _ => {}
        }
        remove_tree(&gone)?;
        remove_tree(&self.copy_dir(host, unit, NEXT))?;
        self.remove_empty_dirs(host);
        Ok(())
    }

    /// Removes what interrupted removals and copies left that nobody goes on with.
    pub(crate) fn sweep(&self, host: &str) -> Result<(), PullError> {
        let _open = self.lock_open()?;
        self.remove_leftovers(host)
    }

    fn remove_leftovers(&self, host: &str) -> Result<(), PullError> {
        let dir = self.host_dir(host);
        for name in self.names_in(&dir) {
            if name.ends_with(GONE) || name.ends_with(NEXT) {
                remove_tree(&dir.join(name))?;
            }
        }
        Ok(())
    }

    // ---- the end -------------------------------------------------------------------------------

    /// Closes the shelf before the agent ends: waits for a follower that is removing a copy, and lets none begin or
    /// finish another one.
    pub(crate) fn close(&self) {
        *self.lock_names() = true;
    }

    /// Removes each copy of a host of which every byte is also below `mount_point`, and what followers left half done.
    /// Returns the bytes of the copies that stay. The shelf is closed.
    pub(crate) fn remove_drained(&self, host: &str, mount_point: &Path) -> Result<u64, PullError> {
        let mut left_bytes = 0;
        for copy in self.copies(host) {
            match copy.is_in(&mount_point.join(&copy.record.unit), &mut || Ok(()))? {
                true => self.remove_copy(host, &copy.record.unit)?,
                false => left_bytes += copy.record.bytes(),
            }
        }
        self.remove_leftovers(host)?;
        self.remove_empty_dirs(host);
        Ok(left_bytes)
    }

    /// Removes the directory of a host, and that of the shelf, where nothing is left in them.
    fn remove_empty_dirs(&self, host: &str) {
        let _ = std::fs::remove_dir(self.host_dir(host));
        let _ = std::fs::remove_dir(&self.dir);
    }

    fn lock_names(&self) -> MutexGuard<'_, bool> {
        self.is_closed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the names of copies, unless the shelf is closed.
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
        let mut copies = self.copies(host);
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
        let has_any = entries.len() > usize::from(below.is_empty());
        match has_any {
            true => Ok(entries),
            false => Err(missing(path)),
        }
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
        let file = file.map_err(|_| missing(path))?;
        let bytes = file.metadata().map_err(|_| missing(path))?.len();
        Ok(CopyFile { file, bytes })
    }
}

impl Copy {
    /// Opens a file of it.
    pub(crate) fn open(&self, below: &Path) -> io::Result<File> {
        let dir = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let top = rustix::fs::open(&self.path, dir, Mode::empty())?;
        let path = match below.as_os_str().is_empty() {
            true => PathBuf::from(TREE),
            false => Path::new(TREE).join(below),
        };
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        Ok(open_beneath(&top, &path, flags, Mode::empty())?.into())
    }

    /// Whether every file of it is below `path`, with the same bytes. `tick` is called all the time: the backing may be
    /// slow.
    pub(crate) fn is_in(&self, path: &Path, tick: &mut Tick<'_>) -> Result<bool, PullError> {
        let files: Vec<_> = self
            .record
            .files()
            .map(|entry| entry.path.clone())
            .collect();
        self.has_files_in(&files, path, tick)
    }

    /// The same for some of its files. Bytes are read only where all lengths are the same.
    pub(crate) fn has_files_in(
        &self,
        files: &[BytePath],
        path: &Path,
        tick: &mut Tick<'_>,
    ) -> Result<bool, PullError> {
        let open = |file: &BytePath| -> io::Result<(File, File)> {
            let other = join(&path.into(), file.as_path());
            Ok((self.open(file.as_path())?, File::open(other)?))
        };
        for file in files {
            tick()?;
            if !open(file)
                .and_then(|(own, other)| has_same_length(&own, &other))
                .unwrap_or(false)
            {
                return Ok(false);
            }
        }
        for file in files {
            let Ok((own, other)) = open(file) else {
                return Ok(false);
            };
            if !has_same_bytes(&own, &other, tick)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl CopyFile {
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Fills `into` with its bytes from `at` on.
    pub(crate) fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(into, at)
    }
}

impl Room<'_> {
    /// Bytes that there is room for.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        let reserved = self.shelf.reserved_bytes.lock();
        *reserved.unwrap_or_else(PoisonError::into_inner) -= self.bytes;
    }
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

/// The directory above is private: what is in it is ours.
fn load(path: PathBuf) -> Option<Copy> {
    let text = std::fs::read(path.join(RECORD)).ok()?;
    let record: Record = serde_json::from_slice(&text).ok()?;
    let is_plain = firn_trust::is_component(record.unit.as_bytes()) && !record.entries.is_empty();
    is_plain.then_some(Copy { record, path })
}

fn encode(record: &Record) -> Vec<u8> {
    serde_json::to_vec(record).expect("it is plain JSON")
}

/// `b` is on a mount, whose kernel may know a length of it from before another host wrote to it.
fn has_same_length(a: &File, b: &File) -> io::Result<bool> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
    let of_b = rustix::fs::statx(b, c"", flags, StatxFlags::SIZE)?.stx_size;
    Ok(of_b == a.metadata()?.len())
}

/// Of files that have the same length. Length and time in the backing do not tell that all bytes are there: a drain that
/// was killed may have written any of them.
fn has_same_bytes(a: &File, b: &File, tick: &mut Tick<'_>) -> Result<bool, PullError> {
    let Ok(bytes) = a.metadata().map(|found| found.len()) else {
        return Ok(false);
    };
    let mut at = 0;
    let mut of_a = vec![0; COMPARE_BYTES];
    let mut of_b = vec![0; COMPARE_BYTES];
    while at < bytes {
        tick()?;
        let count = COMPARE_BYTES.min((bytes - at) as usize);
        let read = a.read_exact_at(&mut of_a[..count], at);
        let read = read.and_then(|()| b.read_exact_at(&mut of_b[..count], at));
        if read.is_err() || of_a[..count] != of_b[..count] {
            return Ok(false);
        }
        at += count as u64;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn copies_where_others_may_write_are_none() {
        let dir = tempfile::tempdir().unwrap();
        let shelf = Shelf::new(dir.path().join("KEY.partner"), 1 << 20);
        let unit = BytePath::from(Path::new("step"));
        assert!(shelf.hosts().is_empty());
        let tree = shelf.begin("n1", &unit).unwrap();
        std::fs::create_dir(tree).unwrap();
        let record = Record {
            unit: unit.clone(),
            arena: "arena".into(),
            incarnation: "firnd".into(),
            entries: vec![Entry::directory()],
        };
        shelf.finish("n1", &record).unwrap();
        let let_in = |mode| {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(shelf.dir(), mode).unwrap();
        };
        assert_eq!(shelf.hosts(), ["n1"]);
        assert!(shelf.find("n1", &unit).is_some());
        let_in(0o777);
        assert!(shelf.hosts().is_empty());
        assert!(shelf.copies("n1").is_empty());
        assert!(shelf.find("n1", &unit).is_none());
        let_in(0o700);
        assert_eq!(shelf.copies("n1").len(), 1);
    }

    #[test]
    fn a_closed_shelf_changes_no_more_and_what_was_half_done_goes() {
        let dir = tempfile::tempdir().unwrap();
        let shelf = Shelf::new(dir.path().join("KEY.partner"), 1 << 20);
        let unit = BytePath::from(Path::new("step"));
        let tree = shelf.begin("n1", &unit).unwrap();
        std::fs::create_dir(&tree).unwrap();
        std::fs::write(tree.join("part"), b"half").unwrap();
        // A follower was killed while it removed this one.
        let gone = shelf.copy_dir("n1", &BytePath::from(Path::new("other")), GONE);
        std::fs::create_dir(&gone).unwrap();
        std::fs::write(gone.join("rest"), b"rest").unwrap();
        shelf.close();
        assert!(shelf.begin("n1", &unit).is_err());
        assert!(shelf.remove("n1", &unit).is_err());
        assert_eq!(shelf.remove_drained("n1", dir.path()).unwrap(), 0);
        assert!(!shelf.dir().exists(), "nothing of it stays");
    }
}
