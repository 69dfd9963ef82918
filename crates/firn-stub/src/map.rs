//! The map: which stub (empty stand-in for a file, on tmpfs) is at which path of the *backing*, the directory that the
//! mount serves. It has a log, so it survives firnd, the process that serves the mount.
//!
//! The log has one record for each change. A new path or a move is logged before it is made in the backing, a removal
//! afterwards. Reading the records in order restores the map. If firnd dies, only the last logged change may be missing
//! in the backing ([`LoggedChange`]).
//!
//! A rename of a directory is one record. Paths are relative to the root and contain no zero byte. The records:
//!
//! ```text
//! H BACKING ROOT-ID                head: the backing, and the identity of the tree's root
//! A ID KIND PATH                   the stub ID is at PATH
//! D PATH                           no stub is at PATH any more
//! M FROM TO                        the stub at FROM, and all stubs below, are at TO and below
//! F                                the tree is filled: from here on programs may have changed it
//! ```
//!
//! Each field ends with a zero byte, and each record with another one. IDs are hexadecimal.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use firn_backing::{Kind, Time};
use firn_engine::InodeId;
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::StubId;
use crate::id::{format_id, parse_id};
use crate::path::{RelPath, is_private};

/// Orders changes of a file's bytes: an append excludes all other changes.
#[derive(Debug, Default)]
pub struct Changes {
    lock: RwLock<()>,
    first_size: OnceLock<Option<u64>>,
}

impl Changes {
    /// Locks for an append. While the guard lives, no other change is made, so the end of the file does not move.
    pub fn lock_exclusive(&self) -> RwLockWriteGuard<'_, ()> {
        self.lock.write()
    }

    /// Locks for any other change of bytes or length.
    pub fn lock_shared(&self) -> RwLockReadGuard<'_, ()> {
        self.lock.read()
    }

    /// Returns the length that the file had when a client of this firnd first opened it; `None` if it is not known.
    pub fn first_size(&self) -> Option<u64> {
        self.first_size.get().copied().flatten()
    }

    /// Records the length for [`Changes::first_size`]; later calls do nothing.
    pub(crate) fn record_first_size(&self, size: Option<u64>) {
        self.first_size.get_or_init(|| size);
    }
}

/// A stub of the map.
#[derive(Debug)]
pub(crate) struct MappedStub {
    pub kind: Kind,
    /// Paths of the stub's object in the backing: several for hard links.
    pub paths: Vec<RelPath>,
    /// Inode of the engine, from its first use on. The map holds a reference to it.
    pub inode: Option<InodeId>,
    /// Number of descriptors that clients have adopted.
    pub adopted_count: u32,
    pub changes: Arc<Changes>,
    /// Time of the last write that the stub already shows as its modification time. `None`: not known since the start
    /// of this firnd.
    pub shown_mtime: Option<Time>,
    /// Size and modification time of the stub when bytes that the kernel had written to it were last ingested.
    pub ingested: Option<IngestedState>,
    /// Change time of the stub when its attributes were last synced.
    pub synced_ctime: Option<Time>,
}

/// State of a stub when its bytes were ingested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IngestedState {
    pub size: u64,
    pub mtime: Time,
}

impl MappedStub {
    pub(crate) fn new(kind: Kind) -> Self {
        Self {
            kind,
            paths: Vec::new(),
            inode: None,
            adopted_count: 0,
            changes: Arc::default(),
            shown_mtime: None,
            ingested: None,
            synced_ctime: None,
        }
    }
}

/// The map of a tree, and its log.
#[derive(Debug)]
pub(crate) struct Map {
    paths: PathTable,
    log: File,
    path: PathBuf,
    record_count: usize,
}

/// Head of a log: identifies the backing and the tree that the log describes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LogHead {
    pub backing: RelPath,
    pub root: StubId,
}

/// The map of an earlier firnd, as read from its log.
#[derive(Debug)]
pub(crate) struct SavedMap {
    pub head: LogHead,
    /// Whether the tree was filled, so that programs may have used it.
    pub is_filled: bool,
    /// The last logged change: the only one that may not have been made in the backing.
    last_change: Option<LoggedChange>,
    paths: PathTable,
}

/// The stubs of a map and their paths. Each path of a stub is also a key of `id_by_path`.
#[derive(Debug, Default)]
struct PathTable {
    stubs: HashMap<StubId, MappedStub>,
    id_by_path: BTreeMap<RelPath, StubId>,
}

/// A logged change that may not have been made in the backing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LoggedChange {
    /// A stub was to be added at this path.
    Added(RelPath),
    /// The stub at the first path was to move to the second.
    Moved(RelPath, RelPath),
}

/// A log is rewritten once it has more than `RECORDS_MIN` records and [`RECORDS_PER_PATH_MAX`] for each path of the
/// map. The logs of small trees are therefore never rewritten.
const RECORDS_MIN: usize = 4096;
/// Number of records for each path of the map, beside `RECORDS_MIN`, up to which a log is not rewritten.
const RECORDS_PER_PATH_MAX: usize = 4;

impl SavedMap {
    /// Reads the log that an earlier firnd (the process that serves a mount) left, and restores from it which stub is
    /// at which path. Returns `None` if there is no file, or the file is no log of a stub tree.
    pub(crate) fn read(path: &Path) -> io::Result<Option<Self>> {
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut records = split_records(&bytes);
        let Some(head) = records.next().and_then(|fields| parse_head(&fields)) else {
            return Ok(None);
        };
        let mut saved = Self {
            head,
            is_filled: false,
            last_change: None,
            paths: PathTable::default(),
        };
        for fields in records {
            saved.apply(&fields);
        }
        Ok(Some(saved))
    }

    /// Repeats the change of one record of the log, given as its fields: the kind letter first. `A` adds a stub, `D`
    /// deletes a path, `M` moves paths, `F` marks the tree as filled. Ignores a record that it does not know or cannot
    /// parse.
    fn apply(&mut self, fields: &[&[u8]]) {
        // Only these two kinds of changes are made in the backing after they are logged, so the last one may be missing
        // there.
        self.last_change = match *fields {
            [b"A", _, _, path] => Some(LoggedChange::Added(path.to_vec())),
            [b"M", from, to] => Some(LoggedChange::Moved(from.to_vec(), to.to_vec())),
            _ => None,
        };
        match *fields {
            [b"A", id, kind, path] => {
                if let (Some(id), Some(kind)) = (parse_id(id), parse_kind(kind)) {
                    self.paths.insert(id, kind, path.to_vec());
                }
            }
            [b"D", path] => {
                self.paths.remove(path);
            }
            [b"M", from, to] => self.paths.move_paths(from, to),
            [b"F"] => self.is_filled = true,
            _ => {}
        }
    }
}

impl SavedMap {
    /// Returns the last logged change, which may not have been made in the backing.
    pub(crate) fn last_change(&self) -> Option<LoggedChange> {
        self.last_change.clone()
    }

    /// Whether some files have private paths. The names of these files were never synced.
    pub(crate) fn has_unnamed(&self) -> bool {
        self.paths.id_by_path.keys().any(|path| is_private(path))
    }
}

impl Map {
    /// Begins a new log at `path`, in place of an old one. The map begins with that of an earlier firnd (`saved`), if
    /// there is one.
    pub(crate) fn begin(path: &Path, head: &LogHead, saved: Option<SavedMap>) -> io::Result<Self> {
        // `is_filled` comes from the log and not from the map, because a filled tree may be empty.
        let (paths, is_filled) = match saved {
            Some(saved) => (saved.paths, saved.is_filled),
            None => (PathTable::default(), false),
        };
        let mut map = Self {
            paths,
            log: create_new_log(path)?,
            path: path.to_owned(),
            record_count: 0,
        };
        map.rewrite_log(head, is_filled)?;
        Ok(map)
    }

    /// Writes a new log with the whole map (which stub is at which path), and replaces the old log by it with a rename.
    ///
    /// Later changes go to the new log, also if this function fails after it has created it. Until the rename, the old
    /// log remains complete. `is_filled`: the tree has stubs for everything, so programs may have used it.
    fn rewrite_log(&mut self, head: &LogHead, is_filled: bool) -> io::Result<()> {
        self.log = create_new_log(&self.path)?;
        self.append(&[b"H", &head.backing, format_id(head.root).as_bytes()])?;
        let mut entries = Vec::with_capacity(self.paths.id_by_path.len());
        for (path, id) in &self.paths.id_by_path {
            let kind = self.get(*id).map_or(Kind::File, |mapped| mapped.kind);
            entries.push((path.clone(), *id, kind));
        }
        for (path, id, kind) in entries {
            self.append(&[b"A", format_id(id).as_bytes(), kind_letter(kind), &path])?;
        }
        if is_filled {
            self.append(&[b"F"])?;
        }
        std::fs::rename(new_log_path(&self.path), &self.path)?;
        self.record_count = 0;
        Ok(())
    }

    /// Rewrites the log if it is much longer than the map.
    pub(crate) fn shorten_log(&mut self, head: &LogHead) -> io::Result<()> {
        let path_count = self.paths.id_by_path.len();
        if self.record_count <= RECORDS_MIN + RECORDS_PER_PATH_MAX * path_count {
            return Ok(());
        }
        // Only the log of a filled tree grows that long.
        let is_filled = true;
        self.rewrite_log(head, is_filled)
    }

    /// Logs that the tree is filled. Called before programs may use it.
    pub(crate) fn log_filled(&mut self) -> io::Result<()> {
        self.append(&[b"F"])
    }

    /// Appends a record to the log.
    fn append(&mut self, fields: &[&[u8]]) -> io::Result<()> {
        let mut record = Vec::new();
        for field in fields {
            record.extend_from_slice(field);
            record.push(0);
        }
        record.push(0);
        self.record_count += 1;
        self.log.write_all(&record)
    }

    pub(crate) fn get(&self, id: StubId) -> Option<&MappedStub> {
        self.paths.stubs.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: StubId) -> Option<&mut MappedStub> {
        self.paths.stubs.get_mut(&id)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (StubId, &MappedStub)> {
        self.paths.stubs.iter().map(|(id, mapped)| (*id, mapped))
    }

    /// Returns the stub at a path of the backing.
    pub(crate) fn id_at(&self, path: &[u8]) -> Option<StubId> {
        self.paths.id_by_path.get(path).copied()
    }

    /// Logs and records that a stub is about to be added at `path`.
    pub(crate) fn insert(&mut self, id: StubId, kind: Kind, path: &[u8]) -> io::Result<()> {
        self.append(&[b"A", format_id(id).as_bytes(), kind_letter(kind), path])?;
        self.paths.insert(id, kind, path.to_vec());
        Ok(())
    }

    /// Logs and records that no stub is at `path` any more. Returns the stub if that was its last path.
    pub(crate) fn remove(&mut self, path: &[u8]) -> io::Result<Option<MappedStub>> {
        self.append(&[b"D", path])?;
        Ok(self.paths.remove(path))
    }

    /// Logs and records that the stub at `from`, and all stubs below it, are about to move to `to`.
    pub(crate) fn move_paths(&mut self, from: &[u8], to: &[u8]) -> io::Result<()> {
        self.append(&[b"M", from, to])?;
        self.paths.move_paths(from, to);
        Ok(())
    }
}

impl PathTable {
    /// Adds a path of a stub. Another stub that was at the path loses it.
    fn insert(&mut self, id: StubId, kind: Kind, path: RelPath) {
        self.remove(&path);
        let new_stub = || MappedStub::new(kind);
        let mapped = self.stubs.entry(id).or_insert_with(new_stub);
        mapped.paths.push(path.clone());
        self.id_by_path.insert(path, id);
    }

    /// Removes a path. Returns its stub if that was the last path of the stub.
    fn remove(&mut self, path: &[u8]) -> Option<MappedStub> {
        let id = self.id_by_path.remove(path)?;
        let mapped = self.stubs.get_mut(&id)?;
        mapped.paths.retain(|mapped_path| mapped_path != path);
        if !mapped.paths.is_empty() {
            return None;
        }
        self.stubs.remove(&id)
    }

    /// Moves all paths at or below `from` to `to`, as the rename of a directory does. Paths are in the backing, the
    /// directory that the mount serves.
    fn move_paths(&mut self, from: &[u8], to: &[u8]) {
        // All paths were collected before the first one changes.
        for old_path in self.paths_at_or_below(from) {
            let path_below = old_path.get(from.len()..).unwrap_or_default();
            let new_path = [to, path_below].concat();
            let Some(id) = self.id_by_path.remove(&old_path) else {
                continue;
            };
            if let Some(mapped) = self.stubs.get_mut(&id) {
                for mapped_path in &mut mapped.paths {
                    if *mapped_path == old_path {
                        mapped_path.clone_from(&new_path);
                    }
                }
            }
            self.id_by_path.insert(new_path, id);
        }
    }

    fn paths_at_or_below(&self, top: &[u8]) -> Vec<RelPath> {
        let first_below = [top, b"/"].concat();
        // '0' is the byte after '/': all paths below `top` sort before this.
        let end = [top, b"0"].concat();
        let paths_below = self.id_by_path.range(first_below..end);
        let mut paths: Vec<RelPath> = paths_below.map(|(path, _)| path.clone()).collect();
        if self.id_by_path.contains_key(top) {
            paths.push(top.to_vec());
        }
        paths
    }
}

/// Path of a new log before it replaces the old one.
fn new_log_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    PathBuf::from(name)
}

/// Creates the file of a new log.
fn create_new_log(path: &Path) -> io::Result<File> {
    File::options()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(new_log_path(path))
}

/// Splits a log into records, each a list of its fields. A torn record at the end is left out.
fn split_records(bytes: &[u8]) -> impl Iterator<Item = Vec<&[u8]>> {
    let mut unread = bytes;
    std::iter::from_fn(move || {
        let mut fields = Vec::new();
        loop {
            let end = unread.iter().position(|byte| *byte == 0)?;
            let field = unread.get(..end)?;
            unread = unread.get(end + 1..)?;
            // An empty field ends a record. No logged field is empty: only the path of the root is, and it is never
            // logged.
            if field.is_empty() {
                return Some(fields);
            }
            fields.push(field);
        }
    })
}

/// Parses the head of a log.
fn parse_head(fields: &[&[u8]]) -> Option<LogHead> {
    match fields {
        [b"H", backing, root] => Some(LogHead {
            backing: backing.to_vec(),
            root: parse_id(root)?,
        }),
        _ => None,
    }
}

/// Letter of a kind in the log.
fn kind_letter(kind: Kind) -> &'static [u8] {
    match kind {
        Kind::File => b"f",
        Kind::Dir => b"d",
        Kind::Symlink => b"l",
        Kind::Fifo => b"p",
        Kind::Socket => b"s",
        Kind::CharDevice => b"c",
        Kind::BlockDevice => b"b",
    }
}

/// Parses the letter of a kind.
fn parse_kind(text: &[u8]) -> Option<Kind> {
    use Kind::*;
    [File, Dir, Symlink, Fifo, Socket, CharDevice, BlockDevice]
        .into_iter()
        .find(|kind| kind_letter(*kind) == text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(inode: u64) -> StubId {
        StubId {
            inode,
            generation: inode as u32 ^ 0xffff_ffff,
        }
    }

    fn head() -> LogHead {
        LogHead {
            backing: b"/back".to_vec(),
            root: id(1),
        }
    }

    fn shown(map: &Map) -> Vec<(String, u64)> {
        map.paths
            .id_by_path
            .iter()
            .map(|(path, id)| (String::from_utf8_lossy(path).into_owned(), id.inode))
            .collect()
    }

    #[test]
    fn a_log_gives_back_the_map_that_wrote_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut map = Map::begin(&path, &head(), None).unwrap();
        map.insert(id(2), Kind::Dir, b"a").unwrap();
        map.insert(id(3), Kind::File, b"a/x").unwrap();
        map.insert(id(3), Kind::File, b"link").unwrap();
        map.insert(id(4), Kind::Symlink, b"a-b\nc").unwrap();
        map.log_filled().unwrap();
        map.move_paths(b"a", b"b").unwrap();
        assert!(map.remove(b"link").unwrap().is_none());
        let removed = map.remove(b"a-b\nc").unwrap();
        assert_eq!(removed.unwrap().kind, Kind::Symlink);
        let expected = vec![("b".to_owned(), 2), ("b/x".to_owned(), 3)];
        assert_eq!(shown(&map), expected);
        let saved = SavedMap::read(&path).unwrap().unwrap();
        assert!(saved.is_filled && saved.head == head());
        let again = Map::begin(&path, &head(), Some(saved)).unwrap();
        assert_eq!(shown(&again), expected);
        assert_eq!(again.get(id(3)).unwrap().paths, [b"b/x".to_vec()]);
    }

    #[test]
    fn a_torn_record_and_a_foreign_file_are_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut map = Map::begin(&path, &head(), None).unwrap();
        map.insert(id(2), Kind::Dir, b"a").unwrap();
        let whole = std::fs::read(&path).unwrap();
        map.insert(id(3), Kind::File, b"torn").unwrap();
        let longer = std::fs::read(&path).unwrap();
        for cut in whole.len()..longer.len() {
            std::fs::write(&path, &longer[..cut]).unwrap();
            assert_eq!(
                SavedMap::read(&path)
                    .unwrap()
                    .unwrap()
                    .paths
                    .id_by_path
                    .len(),
                1,
                "cut at {cut}"
            );
        }
        std::fs::write(&path, b"something else\0\0").unwrap();
        assert!(SavedMap::read(&path).unwrap().is_none());
        assert!(SavedMap::read(&dir.path().join("none")).unwrap().is_none());
    }
}
