//! What the tree was when it was last brought into the backing: which stub stands where there.
//!
//! The log holds a record for each change, written before the change is made in the backing; its records,
//! one after the other, are the map. A change that was logged and not made is found out when it is used: the
//! backing does not have it. Renames of a directory are one record. Paths are bytes without a zero, relative
//! to the root, and a record is
//!
//! ```text
//! H BACKING ROOT-ID                the head: of which backing, which tree
//! A ID KIND PATH                   a stub stands at PATH now
//! D PATH                           nothing stands there any more
//! M FROM TO                        what stood at FROM and below stands at TO and below
//! F                                the tree is filled: from here on programs may have changed it
//! ```
//!
//! with each field ended by a zero byte and each record by another. Words of IDs are in hexadecimal.

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
use crate::id::{id_of, id_text};
use crate::path::{Rel, is_private};

/// What orders the changes of a file's bytes.
#[derive(Debug, Default)]
pub struct Changes {
    lock: RwLock<()>,
    first_size: OnceLock<Option<u64>>,
}

impl Changes {
    /// For an append: nothing else changes bytes or length while the guard lives, so the end stays where it is found.
    pub fn alone(&self) -> RwLockWriteGuard<'_, ()> {
        self.lock.write()
    }

    /// For all other changes of bytes or length.
    pub fn together(&self) -> RwLockReadGuard<'_, ()> {
        self.lock.read()
    }

    /// Bytes that the file had when a client first told this firnd of it; `None` where that is not known.
    pub fn first_size(&self) -> Option<u64> {
        self.first_size.get().copied().flatten()
    }

    pub(crate) fn note_size(&self, size: Option<u64>) {
        self.first_size.get_or_init(|| size);
    }
}

/// One object of the tree.
#[derive(Debug)]
pub(crate) struct Item {
    pub kind: Kind,
    /// Where it stands in the backing: more than one for hard links.
    pub paths: Vec<Rel>,
    /// The engine's number, once it was needed: a reference is held.
    pub inode: Option<InodeId>,
    /// Descriptors that clients told of.
    pub opens: u32,
    pub changes: Arc<Changes>,
    /// Time of the last write, by the engine, when the stub was last told.
    pub told_mtime: Option<Time>,
    /// Size and time of bytes that came through the kernel and were ingested.
    pub absorbed: Option<(u64, Time)>,
    /// Time of the stub's last change when its attributes were last synced.
    pub carried: Option<Time>,
}

impl Item {
    pub(crate) fn new(kind: Kind) -> Self {
        Self {
            kind,
            paths: Vec::new(),
            inode: None,
            opens: 0,
            changes: Arc::default(),
            told_mtime: None,
            absorbed: None,
            carried: None,
        }
    }
}

/// The map and its log.
#[derive(Debug)]
pub(crate) struct Map {
    items: HashMap<StubId, Item>,
    at: BTreeMap<Rel, StubId>,
    log: File,
    path: PathBuf,
    records: usize,
}

/// What a log is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub backing: Rel,
    pub root: StubId,
}

/// A log that was found.
#[derive(Debug)]
pub(crate) struct Found {
    pub head: Head,
    /// Whether programs may have used the tree.
    pub filled: bool,
    /// The last change that was logged: it alone may not have been made.
    last: Option<Last>,
    items: HashMap<StubId, Item>,
    at: BTreeMap<Rel, StubId>,
}

/// A change that was logged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Last {
    /// Something was to stand at a path.
    Added(Rel),
    /// Something was to move.
    Moved(Rel, Rel),
}

/// Old records that are kept before the log is written anew: some, so that small trees never are.
const RECORDS_MIN: usize = 4096;

impl Found {
    /// Reads a log; `None`: there is none, or not one of ours.
    pub(crate) fn read(path: &Path) -> io::Result<Option<Self>> {
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut records = records(&bytes);
        let Some(head) = records.next().and_then(|fields| head_of(&fields)) else {
            return Ok(None);
        };
        let mut found = Self {
            head,
            filled: false,
            last: None,
            items: HashMap::new(),
            at: BTreeMap::new(),
        };
        for fields in records {
            found.last = match *fields {
                [b"A", _, _, path] => Some(Last::Added(path.to_vec())),
                [b"M", from, to] => Some(Last::Moved(from.to_vec(), to.to_vec())),
                _ => None,
            };
            match *fields {
                [b"A", id, kind, path] => {
                    if let (Some(id), Some(kind)) = (id_of(id), kind_of(kind)) {
                        put(&mut found.items, &mut found.at, id, kind, path.to_vec());
                    }
                }
                [b"D", path] => {
                    take(&mut found.items, &mut found.at, path);
                }
                [b"M", from, to] => shift(&mut found.items, &mut found.at, from, to),
                [b"F"] => found.filled = true,
                _ => {}
            }
        }
        Ok(Some(found))
    }
}

impl Found {
    /// The change that may not have been made.
    pub(crate) fn last(&self) -> Option<Last> {
        self.last.clone()
    }

    /// Whether there are files whose names were never synced.
    pub(crate) fn has_unnamed(&self) -> bool {
        self.at.keys().any(|path| is_private(path))
    }
}

impl Map {
    /// Begins a log in place of what is at `path`, with what `found` says.
    pub(crate) fn begin(path: &Path, head: &Head, found: Option<Found>) -> io::Result<Self> {
        // An empty tree may be one that programs use already.
        let filled = found.as_ref().is_some_and(|found| found.filled);
        let (items, at) = found
            .map(|found| (found.items, found.at))
            .unwrap_or_default();
        let mut map = Self {
            items,
            at,
            log: temporary(path)?,
            path: path.to_owned(),
            records: 0,
        };
        map.write_all(head, filled)?;
        Ok(map)
    }

    fn write_all(&mut self, head: &Head, filled: bool) -> io::Result<()> {
        let new = temporary(&self.path)?;
        self.log = new;
        self.append(&[b"H", &head.backing, id_text(head.root).as_bytes()])?;
        let all: Vec<(Rel, StubId)> = self
            .at
            .iter()
            .map(|(path, id)| (path.clone(), *id))
            .collect();
        for (path, id) in all {
            let kind = self.items.get(&id).map_or(Kind::File, |item| item.kind);
            self.append(&[b"A", id_text(id).as_bytes(), kind_text(kind), &path])?;
        }
        if filled {
            self.append(&[b"F"])?;
        }
        std::fs::rename(temporary_path(&self.path), &self.path)?;
        self.records = 0;
        Ok(())
    }

    /// Writes the log anew where it is much longer than the map.
    pub(crate) fn trim(&mut self, head: &Head) -> io::Result<()> {
        if self.records > RECORDS_MIN + 4 * self.at.len() {
            self.write_all(head, true)
        } else {
            Ok(())
        }
    }

    /// From here on programs may use the tree.
    pub(crate) fn filled(&mut self) -> io::Result<()> {
        self.append(&[b"F"])
    }

    fn append(&mut self, fields: &[&[u8]]) -> io::Result<()> {
        let mut record = Vec::new();
        for field in fields {
            record.extend_from_slice(field);
            record.push(0);
        }
        record.push(0);
        self.records += 1;
        self.log.write_all(&record)
    }

    pub(crate) fn item(&self, id: StubId) -> Option<&Item> {
        self.items.get(&id)
    }
    pub(crate) fn item_mut(&mut self, id: StubId) -> Option<&mut Item> {
        self.items.get_mut(&id)
    }
    pub(crate) fn items(&self) -> impl Iterator<Item = (StubId, &Item)> {
        self.items.iter().map(|(id, item)| (*id, item))
    }
    /// The stub at a path of the backing.
    pub(crate) fn at(&self, path: &[u8]) -> Option<StubId> {
        self.at.get(path).copied()
    }

    /// A stub is about to stand at `path`.
    pub(crate) fn add(&mut self, id: StubId, kind: Kind, path: &[u8]) -> io::Result<()> {
        self.append(&[b"A", id_text(id).as_bytes(), kind_text(kind), path])?;
        put(&mut self.items, &mut self.at, id, kind, path.to_vec());
        Ok(())
    }

    /// Nothing stands at `path` any more. Gives the item if that was its last path.
    pub(crate) fn remove(&mut self, path: &[u8]) -> io::Result<Option<(StubId, Item)>> {
        self.append(&[b"D", path])?;
        Ok(take(&mut self.items, &mut self.at, path))
    }

    /// Notes that the stub at `from`, and all below, is about to move to `to`.
    pub(crate) fn shift(&mut self, from: &[u8], to: &[u8]) -> io::Result<()> {
        self.append(&[b"M", from, to])?;
        shift(&mut self.items, &mut self.at, from, to);
        Ok(())
    }
}

fn put(
    items: &mut HashMap<StubId, Item>,
    at: &mut BTreeMap<Rel, StubId>,
    id: StubId,
    kind: Kind,
    path: Rel,
) {
    take(items, at, &path);
    let item = items.entry(id).or_insert_with(|| Item::new(kind));
    item.paths.push(path.clone());
    at.insert(path, id);
}

fn take(
    items: &mut HashMap<StubId, Item>,
    at: &mut BTreeMap<Rel, StubId>,
    path: &[u8],
) -> Option<(StubId, Item)> {
    let id = at.remove(path)?;
    let item = items.get_mut(&id)?;
    item.paths.retain(|known| known != path);
    if item.paths.is_empty() {
        items.remove(&id).map(|item| (id, item))
    } else {
        None
    }
}

fn shift(
    items: &mut HashMap<StubId, Item>,
    at: &mut BTreeMap<Rel, StubId>,
    from: &[u8],
    to: &[u8],
) {
    let below = [from, b"/"].concat();
    // '0' follows '/'.
    let behind = [from, b"0"].concat();
    let moved: Vec<Rel> = at
        .range(below..behind)
        .map(|(path, _)| path.clone())
        .chain(at.contains_key(from).then(|| from.to_vec()))
        .collect();
    for path in moved {
        let new = [to, path.get(from.len()..).unwrap_or_default()].concat();
        let Some(id) = at.remove(&path) else { continue };
        if let Some(item) = items.get_mut(&id) {
            for known in item.paths.iter_mut().filter(|known| **known == path) {
                known.clone_from(&new);
            }
        }
        at.insert(new, id);
    }
}

fn temporary_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    PathBuf::from(name)
}

fn temporary(path: &Path) -> io::Result<File> {
    File::options()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(temporary_path(path))
}

fn records(bytes: &[u8]) -> impl Iterator<Item = Vec<&[u8]>> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let mut fields = Vec::new();
        loop {
            let end = rest.iter().position(|byte| *byte == 0)?;
            let field = rest.get(..end)?;
            let behind = rest.get(end + 1..)?;
            rest = behind;
            // An empty field is a path of the root, or the end of the record: fields are never empty but
            // the root's, which is never logged.
            if field.is_empty() {
                return Some(fields);
            }
            fields.push(field);
        }
    })
}

fn head_of(fields: &[&[u8]]) -> Option<Head> {
    match fields {
        [b"H", backing, root] => Some(Head {
            backing: backing.to_vec(),
            root: id_of(root)?,
        }),
        _ => None,
    }
}

fn kind_text(kind: Kind) -> &'static [u8] {
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

fn kind_of(text: &[u8]) -> Option<Kind> {
    use Kind::*;
    [File, Dir, Symlink, Fifo, Socket, CharDevice, BlockDevice]
        .into_iter()
        .find(|kind| kind_text(*kind) == text)
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

    fn head() -> Head {
        Head {
            backing: b"/back".to_vec(),
            root: id(1),
        }
    }

    fn shown(map: &Map) -> Vec<(String, u64)> {
        map.at
            .iter()
            .map(|(path, id)| (String::from_utf8_lossy(path).into_owned(), id.inode))
            .collect()
    }

    #[test]
    fn a_log_gives_back_the_map_that_wrote_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut map = Map::begin(&path, &head(), None).unwrap();
        map.add(id(2), Kind::Dir, b"a").unwrap();
        map.add(id(3), Kind::File, b"a/x").unwrap();
        map.add(id(3), Kind::File, b"link").unwrap();
        map.add(id(4), Kind::Symlink, b"a-b\nc").unwrap();
        map.filled().unwrap();
        map.shift(b"a", b"b").unwrap();
        assert!(map.remove(b"link").unwrap().is_none());
        assert_eq!(
            map.remove(b"a-b\nc").unwrap().map(|(id, _)| id.inode),
            Some(4)
        );
        let expected = vec![("b".to_owned(), 2), ("b/x".to_owned(), 3)];
        assert_eq!(shown(&map), expected);
        let found = Found::read(&path).unwrap().unwrap();
        assert!(found.filled && found.head == head());
        let again = Map::begin(&path, &head(), Some(found)).unwrap();
        assert_eq!(shown(&again), expected);
        assert_eq!(again.item(id(3)).unwrap().paths, [b"b/x".to_vec()]);
    }

    #[test]
    fn a_torn_record_and_a_foreign_file_are_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut map = Map::begin(&path, &head(), None).unwrap();
        map.add(id(2), Kind::Dir, b"a").unwrap();
        let whole = std::fs::read(&path).unwrap();
        map.add(id(3), Kind::File, b"torn").unwrap();
        let longer = std::fs::read(&path).unwrap();
        for cut in whole.len()..longer.len() {
            std::fs::write(&path, &longer[..cut]).unwrap();
            assert_eq!(
                Found::read(&path).unwrap().unwrap().at.len(),
                1,
                "cut at {cut}"
            );
        }
        std::fs::write(&path, b"something else\0\0").unwrap();
        assert!(Found::read(&path).unwrap().is_none());
        assert!(Found::read(&dir.path().join("none")).unwrap().is_none());
    }
}
