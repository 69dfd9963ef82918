//! The change log of a transaction: what to do to commit it, and what to do to undo it.
//!
//! A log is the difference between two trees, object by object. Each [`Entry`] has the names that its object has only
//! before and only after the transaction. The *redo* part of an entry has the data and attributes after the
//! transaction, the *undo* part those before. Both refer to bytes in the log itself or in *staged copies*, files in the
//! transaction's directory `tx-N`. A log does not change while it is applied. So after a crash the same log is applied
//! again from its start.
//!
//! In *buffer mode* changes are kept back until the commit. In *shadow mode* they are made at once, and the old state
//! is saved.
//!
//! | use | file | entries |
//! |---|---|---|
//! | buffer mode | `tx-N/record`, `tx-N/commit` | all objects, redo parts; with `history` undo parts, too |
//! | shadow mode | `tx-N/saved/INO.K` | one object before its first change, the undo part only |
//! | restore | `undo-N/commit`, `tx-N/undo` | the log of a commit, applied backward |
//! | backup | `tx-N-TOKEN/manifest` | all objects by path, redo parts, and a table of the staged copies |
//!
//! A file with a log is sealed ([`firn_format::sealed`]) with the magic `FIRNTXLG`; the payload is [`ChangeLog`] as
//! postcard writes it. Every name in a log that was decoded is a single path component.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use firn_backing::{Attr, Time};
use firn_format::sealed::Seal;

use crate::own::is_path;
use crate::paths::parent_of;

pub use firn_format::sealed::SealError as LogError;

/// The header of a file with a log.
pub const SEAL: Seal = Seal {
    magic: *b"FIRNTXLG",
    version: 6,
};

/// Magic numbers of the files that Firn 0.1 wrote in place of change logs: redo records, saved objects, manifests of
/// backups.
const RETIRED_MAGICS: [&[u8; 8]; 3] = [b"FIRNREDO", b"FIRNSAVE", b"FIRNBKUP"];

/// Stands for a commit without a number, and for the state before the first commit of a scope.
pub(crate) const NO_ID: u64 = u64::MAX;

/// Number of the top of the backing in each log ([`Entry::number`]).
pub(crate) const BACKING_TOP_NUMBER: u64 = 0;

/// A name in a directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EntryName {
    /// Number of the directory's object in the log.
    pub dir: u64,
    /// Bytes of the name.
    pub name: Vec<u8>,
}

impl EntryName {
    /// Returns `name` in the directory with this number.
    pub fn new(dir: u64, name: impl Into<Vec<u8>>) -> Self {
        Self {
            dir,
            name: name.into(),
        }
    }
}

/// Path of a staged object, below the directory `new/` of its transaction.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StagedPath {
    /// Name of the staging directory.
    pub dir: String,
    /// Name of the object in it.
    pub name: String,
}

/// A name, and the number of the inode that it leads to.
pub type Link = (Vec<u8>, u64);

/// Identity of an object in the backing.
///
/// A log outlives a mount of the file system and is read on other hosts. Its device number is left out, because the
/// same file system may have another one on another host or after the next mount.
///
/// The birth time is left out too. Overlayfs makes a file anew at its first write, for example while a log is applied,
/// and only the inode number remains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Identity {
    /// Inode number.
    pub ino: u64,
    /// Whether the object is on another file system than the top of the backing.
    pub elsewhere: bool,
}

impl Identity {
    /// Identity of an object that does not exist yet.
    pub(crate) const NONE: Self = Self {
        ino: 0,
        elsewhere: false,
    };

    /// Returns the identity of an object. `device` is the device number of the backing's top.
    pub(crate) fn from_attr(attr: &Attr, device: u64) -> Self {
        Self {
            ino: attr.ino,
            elsewhere: attr.dev != device,
        }
    }
}

/// A point in time, as it is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StoredTime {
    /// Seconds since the epoch.
    pub sec: i64,
    /// Nanoseconds after that.
    pub nsec: u32,
}

impl From<Time> for StoredTime {
    fn from(time: Time) -> Self {
        Self {
            sec: time.sec,
            nsec: time.nsec,
        }
    }
}

impl From<StoredTime> for Time {
    fn from(time: StoredTime) -> Self {
        Self {
            sec: time.sec,
            nsec: time.nsec,
        }
    }
}

/// Where the bytes of a written range are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BytesSource {
    /// The bytes are in the staged copy of this side ([`EntrySide::copy_at`]), at the same offset.
    Copy,
    /// The bytes are in another staged file, at the same offset.
    File(StagedPath),
    /// The bytes are in the log itself.
    Inline(#[serde(with = "serde_bytes")] Vec<u8>),
}

/// A range of a file that an application of the log writes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrittenRange {
    /// Offset of the first byte.
    pub start: u64,
    /// Offset behind the last byte.
    pub end: u64,
    /// Source of the bytes.
    pub source: BytesSource,
}

impl WrittenRange {
    /// Returns a range whose bytes are in the staged copy.
    pub fn of_copy(start: u64, end: u64) -> Self {
        Self {
            start,
            end,
            source: BytesSource::Copy,
        }
    }
}

/// The change of a file's bytes, in this order: the bytes from `cut` on are cut off, the file gets its new size, and
/// ranges are written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataChange {
    /// Offset from which on the old bytes are cut off.
    pub cut: u64,
    /// Size of the file after the application, in bytes.
    pub size: u64,
    /// The ranges that are written.
    pub written: Vec<WrittenRange>,
    /// Whether nothing of the old content was cut off. If so, bytes that another host of the same commit appended
    /// remain in the file.
    pub grows: bool,
}

/// Attributes of an object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attributes {
    /// `st_mode`: type and permission bits.
    pub mode: u32,
    /// User id of the owner.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Time of the last access.
    pub atime: StoredTime,
    /// Time of the last change of the content.
    pub mtime: StoredTime,
    /// Names and values of the extended attributes.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// One side of an entry: what becomes of data and attributes of the object when the log is applied in this direction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntrySide {
    /// The staged copy, which has the attributes and the bytes of [`BytesSource::Copy`].
    pub copy_at: Option<StagedPath>,
    /// Change of the bytes; `None` if they do not change.
    pub data: Option<DataChange>,
    /// Attributes, if they change and there is no staged copy.
    pub attributes: Option<Attributes>,
    /// Access time that is set after names in a directory have changed.
    pub atime: Option<StoredTime>,
    /// Modification time that is set after bytes or names have changed.
    pub mtime: Option<StoredTime>,
    /// Whether owner, mode or extended attributes change, as opposed to times only.
    pub changes_attributes: bool,
    /// Modification time of the object before its first change in the transaction.
    pub mtime_before: Option<StoredTime>,
    /// All names in a directory, if its changes are not listed name by name.
    pub names: Option<Vec<Link>>,
}

impl EntrySide {
    /// Returns whether data or attributes of an object of the backing change.
    pub(crate) fn changes_in_place(&self) -> bool {
        self.copy_at.is_some() || self.data.is_some() || self.attributes.is_some()
    }

    /// Returns the paths of the staged objects that this side refers to.
    fn staged_paths(&self) -> impl Iterator<Item = &StagedPath> {
        let written = self.data.iter().flat_map(|data| &data.written);
        let paths_of_data = written.filter_map(|range| match &range.source {
            BytesSource::File(path) => Some(path),
            BytesSource::Copy | BytesSource::Inline(_) => None,
        });
        self.copy_at.iter().chain(paths_of_data)
    }
}

/// Identifies an object of the backing in a copy of the tree, which has other inode numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortableIdentity {
    /// Type of the object, as in `st_mode`.
    pub kind: u32,
    /// Size of the file in bytes; `None` if its content does not change. A file of another size is not the same object.
    pub size: Option<u64>,
    /// Paths of the object before the transaction, from the top of the backing.
    pub paths: Vec<Vec<u8>>,
}

/// The changes of one object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Number of the object in this log; 0 stands for the top of the backing.
    pub number: u64,
    /// Identity of the object.
    pub identity: Identity,
    /// Whether the object is a directory.
    pub is_dir: bool,
    /// Names that the object has only before the transaction.
    pub before: Vec<EntryName>,
    /// Names that the object has only after the transaction.
    pub after: Vec<EntryName>,
    /// A name that the object has before and after the transaction, by which it can be found.
    pub unchanged_name: Option<EntryName>,
    /// Names on the way from the scope's top down to the object, without the top.
    pub path: Vec<Link>,
    /// Place of a new object before the transaction is applied.
    pub new_at: Option<StagedPath>,
    /// Place of a removed object after the transaction is applied, if the log may be undone.
    pub kept_at: Option<StagedPath>,
    /// A further link, in staging, to an object of the backing of which no other name is known.
    pub anchor_at: Option<StagedPath>,
    /// Identity in a copy of the tree; only in the log of a backup.
    pub portable: Option<PortableIdentity>,
    /// What the commit does to data and attributes.
    pub redo: EntrySide,
    /// What the undo does to data and attributes.
    pub undo: EntrySide,
}

impl Entry {
    /// Returns the entry of an object without any change. `number` is that of the object in the log, and `identity` its
    /// inode number in the backing.
    pub fn new(number: u64, identity: Identity, is_dir: bool) -> Self {
        Self {
            number,
            identity,
            is_dir,
            before: Vec::new(),
            after: Vec::new(),
            unchanged_name: None,
            path: Vec::new(),
            new_at: None,
            kept_at: None,
            anchor_at: None,
            portable: None,
            redo: EntrySide::default(),
            undo: EntrySide::default(),
        }
    }

    /// Checks that no name of this entry leads out of its directory; fails with [`LogError`] otherwise. A decoded log
    /// may be damaged.
    fn check_names(&self) -> Result<(), LogError> {
        for entry_name in self.names() {
            check_name(&entry_name.name)?;
        }
        // The path from the top of the scope to the object.
        for (name, _) in &self.path {
            check_name(name)?;
        }
        // The names in the directory, before and after the commit.
        for names in [&self.redo.names, &self.undo.names].into_iter().flatten() {
            for (name, _) in names {
                check_name(name)?;
            }
        }
        for path in self.staged_paths() {
            check_staged(path)?;
        }
        // Paths by which the object is found in a copy of the backing.
        for path in self.portable.iter().flat_map(|identity| &identity.paths) {
            must_be(!path.is_empty() && is_path(path))?;
        }
        Ok(())
    }

    /// Returns the names that the object has before the transaction, as far as the log has them.
    pub(crate) fn names_before(&self) -> impl Iterator<Item = &EntryName> {
        self.before.iter().chain(&self.unchanged_name)
    }

    /// Returns all names of the object that the log has.
    pub(crate) fn names(&self) -> impl Iterator<Item = &EntryName> {
        self.names_before().chain(&self.after)
    }

    /// Returns the paths of all staged objects that the entry refers to.
    fn staged_paths(&self) -> impl Iterator<Item = &StagedPath> {
        let paths_of_object = [&self.new_at, &self.kept_at, &self.anchor_at];
        let paths_of_sides = [&self.redo, &self.undo]
            .into_iter()
            .flat_map(EntrySide::staged_paths);
        paths_of_object.into_iter().flatten().chain(paths_of_sides)
    }
}

/// The bytes of a staged file in a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupContent {
    /// Name of the file in the backup. Each byte is at the same offset.
    pub file: String,
    /// Size of the file.
    pub size: u64,
    /// Start and end of each range that has bytes, in order. The rest of the file is a hole.
    pub ranges: Vec<(u64, u64)>,
    /// CRC32C of the bytes of all ranges.
    pub crc: u32,
}

/// A staged object in a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StagedObject {
    /// Place in the staging directory.
    pub at: StagedPath,
    /// Attributes of the object. The files of a backup have other owners and modes, and only plain files are copied.
    pub attributes: Attributes,
    /// Device number, for a device file.
    pub rdev: u64,
    /// Target of a symbolic link.
    pub target: Vec<u8>,
    /// Bytes of a file; `None` for other objects.
    pub content: Option<BackupContent>,
}

/// The direction in which a log is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the tree before to the one after.
    Redo,
    /// From the tree after to the one before.
    Undo,
}

/// What a transaction does to the name of its scope's top.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopChange {
    /// Path of the scope after the transaction, relative to the backing.
    pub path_after: Vec<u8>,
    /// Whether the transaction makes the top.
    pub is_new: bool,
    /// Number of the entry of the top; `None` in shadow mode, where the backing has the name already.
    pub entry: Option<u64>,
}

/// The changes of one transaction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeLog {
    /// Number of the transaction, which the user gave it.
    pub id: u64,
    /// Number of the commit of the scope before this one.
    pub id_before: Option<u64>,
    /// Path of the scope before the transaction, relative to the backing.
    pub scope: Vec<u8>,
    /// Change of the name of the scope's top; `None` if the transaction does not change it.
    pub top: Option<TopChange>,
    /// Whether other hosts commit parts of the same transaction. If so, their changes of the same objects are retained.
    pub shared: bool,
    /// Whether the log has its undo sides and all staged objects that they refer to.
    pub can_be_undone: bool,
    /// The changed objects, and those that their names refer to.
    pub entries: Vec<Entry>,
    /// Staged objects that the redo sides refer to; only in the log of a backup.
    pub staged: Vec<StagedObject>,
}

impl ChangeLog {
    /// Returns the number of the commit whose files the scope has after the log is applied.
    pub(crate) fn id_after(&self, direction: Direction) -> u64 {
        match direction {
            Direction::Redo => self.id,
            Direction::Undo => self.id_before.unwrap_or(NO_ID),
        }
    }

    /// Returns the path of the scope after the log is applied.
    pub(crate) fn scope_after(&self, direction: Direction) -> &[u8] {
        match (&self.top, direction) {
            (Some(top), Direction::Redo) => &top.path_after,
            _ => &self.scope,
        }
    }

    /// Returns the path of the scope before the log is applied.
    pub(crate) fn scope_before(&self, direction: Direction) -> &[u8] {
        match direction {
            Direction::Redo => &self.scope,
            Direction::Undo => self.scope_after(Direction::Redo),
        }
    }

    /// Returns the log as it is stored.
    pub fn encode(&self) -> Vec<u8> {
        SEAL.seal(&postcard::to_stdvec(self).expect("plain data"))
    }

    /// Decodes a stored log. Fails if the bytes are not a log of this version, or if a name leads out of its directory.
    pub fn decode(bytes: &[u8]) -> Result<Self, LogError> {
        let payload = SEAL.unseal(bytes).map_err(|error| match error {
            LogError::Magic => retired_version(bytes).unwrap_or(LogError::Magic),
            other => other,
        })?;
        let log: Self = postcard::from_bytes(payload).map_err(|_| LogError::Damaged)?;
        log.check_names()?;
        Ok(log)
    }

    /// Checks that no name of this log leads out of the scope, the directory that the transaction covers. The one
    /// exception is a new name of the scope itself (`top`) in its parent.
    pub(crate) fn check_names(&self) -> Result<(), LogError> {
        must_be(is_path(&self.scope))?;
        if let Some(top) = &self.top {
            // The top changes its name in its parent, and nothing else.
            must_be(is_path(&top.path_after))?;
            must_be(!self.scope.is_empty() && !top.path_after.is_empty())?;
            must_be(parent_of(&self.scope) == parent_of(&top.path_after))?;
        }
        for entry in &self.entries {
            entry.check_names()?;
        }
        for object in &self.staged {
            check_staged(&object.at)?;
            if let Some(content) = &object.content {
                check_name(content.file.as_bytes())?;
            }
        }
        Ok(())
    }

    /// Checks that a log can be applied to a copy of the backing: each old object has a path, and each staged object is
    /// in the table.
    pub(crate) fn check_portable(&self) -> Result<(), LogError> {
        let numbers: BTreeSet<u64> = self.entries.iter().map(|entry| entry.number).collect();
        let staged: BTreeSet<&StagedPath> = self.staged.iter().map(|object| &object.at).collect();
        let has_unique_numbers = numbers.len() == self.entries.len();
        must_be(has_unique_numbers && !self.can_be_undone)?;
        for entry in &self.entries {
            entry.check_portable(&numbers, &staged)?;
        }
        for object in &self.staged {
            if let Some(content) = &object.content {
                content.check_ranges()?;
            }
        }
        Ok(())
    }
}

impl Entry {
    /// Checks the entry of a portable log, which can be applied to a copy of the backing because it finds objects by
    /// path. Fails with [`LogError`] if the entry refers to anything else.
    ///
    /// `numbers` are the objects that the log has, and `staged` the paths of the new bytes that come with it.
    fn check_portable(
        &self,
        numbers: &BTreeSet<u64>,
        staged: &BTreeSet<&StagedPath>,
    ) -> Result<(), LogError> {
        let is_backing_top = self.number == BACKING_TOP_NUMBER;
        let is_new = self.new_at.is_some();
        let has_path = self
            .portable
            .as_ref()
            .is_some_and(|identity| !identity.paths.is_empty());
        // A new object has no path yet; any other is found by its path only.
        must_be(is_backing_top || is_new != has_path)?;
        // A portable log has nothing for an undo.
        must_be(self.kept_at.is_none() && self.undo == EntrySide::default())?;
        for path in self.new_at.iter().chain(&self.redo.copy_at) {
            must_be(staged.contains(path))?;
        }
        for range in self.redo.data.iter().flat_map(|data| &data.written) {
            must_be(!matches!(range.source, BytesSource::File(_)))?;
        }
        for EntryName { dir, .. } in self.names() {
            must_be(*dir == BACKING_TOP_NUMBER || numbers.contains(dir))?;
        }
        Ok(())
    }
}

impl BackupContent {
    /// Checks that the ranges are in order, do not overlap, and are in the file.
    fn check_ranges(&self) -> Result<(), LogError> {
        let mut last_end = 0;
        for &(start, end) in &self.ranges {
            must_be(last_end <= start && start < end && end <= self.size)?;
            last_end = end;
        }
        Ok(())
    }
}

/// Returns the error for a file that Firn 0.1 wrote; `None` for other bytes.
fn retired_version(bytes: &[u8]) -> Option<LogError> {
    let (magic, bytes_after_magic) = bytes.split_first_chunk::<8>()?;
    let version = u32::from_le_bytes(*bytes_after_magic.first_chunk()?);
    if !RETIRED_MAGICS.contains(&magic) {
        return None;
    }
    Some(LogError::Version {
        found: version,
        wanted: SEAL.version,
    })
}

/// Returns `Damaged` unless `is_valid`.
fn must_be(is_valid: bool) -> Result<(), LogError> {
    if is_valid {
        Ok(())
    } else {
        Err(LogError::Damaged)
    }
}

/// Returns `Damaged` unless `name` is a single component of a path.
fn check_name(name: &[u8]) -> Result<(), LogError> {
    must_be(firn_trust::is_component(name))
}

/// Returns `Damaged` if the path leads out of `new/`.
fn check_staged(path: &StagedPath) -> Result<(), LogError> {
    check_name(path.dir.as_bytes())?;
    check_name(path.name.as_bytes())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ELSEWHERE: [&str; 7] = ["", ".", "..", "../../etc", "/etc", "a/b", "a\0"];

    fn staged(dir: &str, name: &str) -> StagedPath {
        StagedPath {
            dir: dir.to_owned(),
            name: name.to_owned(),
        }
    }

    fn attributes(value: &[u8]) -> Attributes {
        Attributes {
            mode: 0o100_640,
            uid: 1,
            gid: 2,
            atime: StoredTime { sec: 1, nsec: 2 },
            mtime: StoredTime { sec: -3, nsec: 4 },
            xattrs: vec![(b"user.a".to_vec(), value.to_vec())],
        }
    }

    /// Returns a log with a value in each field.
    fn full() -> ChangeLog {
        let identity = Identity {
            ino: 77,
            elsewhere: false,
        };
        let data = DataChange {
            cut: 10,
            size: 4096,
            written: vec![
                WrittenRange::of_copy(0, 5),
                WrittenRange {
                    start: 5,
                    end: 10,
                    source: BytesSource::Inline(b"bytes".to_vec()),
                },
                WrittenRange {
                    start: 100,
                    end: 4096,
                    source: BytesSource::File(staged("saved", "data-3")),
                },
            ],
            grows: true,
        };
        let part = EntrySide {
            copy_at: Some(staged("plain", "3")),
            data: Some(data),
            attributes: Some(attributes(b"\0")),
            atime: Some(StoredTime { sec: 7, nsec: 8 }),
            mtime: Some(StoredTime { sec: 9, nsec: 1 }),
            changes_attributes: true,
            mtime_before: Some(StoredTime { sec: 5, nsec: 6 }),
            names: Some(vec![(b"\xff\n".to_vec(), 9)]),
        };
        let entry = Entry {
            before: vec![EntryName::new(0, b"a")],
            after: vec![EntryName::new(2, b"\xff\n")],
            unchanged_name: Some(EntryName::new(0, b"b")),
            path: vec![(b"dir".to_vec(), 7), (b"file".to_vec(), 77)],
            new_at: Some(staged("d0", "3")),
            kept_at: Some(staged("u", "k3")),
            anchor_at: Some(staged("d0", "l3")),
            portable: Some(PortableIdentity {
                kind: 0o100_000,
                size: Some(7),
                paths: vec![b"dir/file".to_vec()],
            }),
            redo: part.clone(),
            undo: part,
            ..Entry::new(3, identity, false)
        };
        ChangeLog {
            id: 17,
            id_before: Some(16),
            scope: b"work".to_vec(),
            top: Some(TopChange {
                path_after: b"done".to_vec(),
                is_new: true,
                entry: Some(3),
            }),
            shared: true,
            can_be_undone: true,
            entries: vec![entry],
            staged: vec![object("3", None)],
        }
    }

    fn object(name: &str, content: Option<BackupContent>) -> StagedObject {
        StagedObject {
            at: staged("d0", name),
            attributes: attributes(b"v"),
            rdev: 0,
            target: b"there".to_vec(),
            content,
        }
    }

    /// Returns a log that can be applied to any copy of the tree.
    fn portable(id: u64, name: Vec<u8>, size: u64, crc: u32) -> ChangeLog {
        let changed = Entry {
            before: vec![EntryName::new(0, name.clone())],
            after: vec![EntryName::new(4, b"there")],
            portable: Some(PortableIdentity {
                kind: 0o100_000,
                size: Some(7),
                paths: vec![name.clone()],
            }),
            redo: EntrySide {
                copy_at: Some(staged("d0", "3")),
                data: Some(DataChange {
                    cut: 1,
                    size,
                    written: vec![WrittenRange::of_copy(0, size)],
                    grows: false,
                }),
                ..EntrySide::default()
            },
            ..Entry::new(3, Identity::NONE, false)
        };
        let made = Entry {
            new_at: Some(staged("d0", "4")),
            after: vec![EntryName::new(0, b"dir")],
            ..Entry::new(4, Identity::NONE, true)
        };
        let content = BackupContent {
            file: "d0-3".into(),
            size,
            ranges: vec![(0, size)],
            crc,
        };
        ChangeLog {
            id,
            id_before: Some(id / 2),
            scope: name,
            entries: vec![changed, made],
            staged: vec![object("3", Some(content)), object("4", None)],
            ..ChangeLog::default()
        }
    }

    #[test]
    fn a_log_is_decoded_as_it_was_encoded() {
        assert_eq!(ChangeLog::decode(&full().encode()), Ok(full()));
    }

    proptest! {
        #[test]
        fn a_portable_log_is_decoded_as_it_was_encoded(
            id: u64,
            name in proptest::collection::vec(1u8..46, 3..20),
            size in 1u64..,
            crc: u32,
        ) {
            let log = portable(id, name, size, crc);
            prop_assert_eq!(log.check_portable(), Ok(()));
            prop_assert_eq!(ChangeLog::decode(&log.encode()), Ok(log));
        }
    }

    #[test]
    fn regression_a_log_whose_names_lead_elsewhere_is_none() {
        type Change = fn(&mut Entry, &str);
        let changes: [Change; 15] = [
            |entry, name| entry.before[0].name = name.into(),
            |entry, name| entry.after[0].name = name.into(),
            |entry, name| entry.unchanged_name = Some(EntryName::new(0, name)),
            |entry, name| entry.path[1].0 = name.into(),
            |entry, name| entry.new_at = Some(staged("d0", name)),
            |entry, name| entry.new_at = Some(staged(name, "1")),
            |entry, name| entry.anchor_at = Some(staged("d0", name)),
            |entry, name| entry.kept_at = Some(staged("u", name)),
            |entry, name| entry.redo.copy_at = Some(staged("d0", name)),
            |entry, name| entry.undo.copy_at = Some(staged(name, "3")),
            |entry, name| entry.redo.names.as_mut().expect("some")[0].0 = name.into(),
            |entry, name| entry.undo.names.as_mut().expect("some")[0].0 = name.into(),
            |entry, name| {
                entry.redo.data.as_mut().expect("some").written[2].source =
                    BytesSource::File(staged("saved", name))
            },
            |entry, name| {
                entry.undo.data.as_mut().expect("some").written[2].source =
                    BytesSource::File(staged(name, "data-3"))
            },
            |entry, name| {
                // A portable path may have several components, so a valid name of two components is replaced by one
                // that leads out.
                let bad = if name == "a/b" { "../a" } else { name };
                entry.portable.as_mut().expect("some").paths[0] = bad.into();
            },
        ];
        for change in changes {
            for name in ELSEWHERE {
                let mut bad = full();
                change(&mut bad.entries[0], name);
                let decoded = ChangeLog::decode(&bad.encode());
                assert_eq!(decoded, Err(LogError::Damaged), "{name:?}");
            }
        }
        for scope in ["..", "a/../b", "/a", "a//b", "a/", "a\0"] {
            let bad = ChangeLog {
                scope: scope.into(),
                ..full()
            };
            let decoded = ChangeLog::decode(&bad.encode());
            assert_eq!(decoded, Err(LogError::Damaged), "{scope:?}");
        }
        let top = |path: &[u8]| {
            Some(TopChange {
                path_after: path.to_vec(),
                is_new: false,
                entry: None,
            })
        };
        for path in ["", "..", "a/done", "/a", "a//b", "a\0"] {
            let bad = ChangeLog {
                top: top(path.as_bytes()),
                ..full()
            };
            let decoded = ChangeLog::decode(&bad.encode());
            assert_eq!(decoded, Err(LogError::Damaged), "{path:?}");
        }
        let whole = ChangeLog {
            scope: b"a/b c/..d".to_vec(),
            top: top(b"a/b c/e"),
            ..full()
        };
        assert_eq!(ChangeLog::decode(&whole.encode()), Ok(whole));
    }

    #[test]
    fn a_log_that_is_cut_or_changed_is_none() {
        let bytes = full().encode();
        for len in 0..bytes.len() {
            assert!(ChangeLog::decode(&bytes[..len]).is_err(), "{len} bytes");
        }
        for at in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[at / 8] ^= 1 << (at % 8);
            assert!(ChangeLog::decode(&bad).is_err(), "bit {at}");
        }
    }

    #[test]
    fn a_backup_that_names_what_is_not_in_it_is_none() {
        let whole = portable(7, b"a".to_vec(), 9, 1);
        assert_eq!(whole.check_portable(), Ok(()));
        type Change = fn(&mut ChangeLog);
        let changes: [Change; 5] = [
            |bad| bad.entries[0].portable = None,
            |bad| drop(bad.staged.pop()),
            |bad| bad.entries[0].after[0].dir = 9,
            |bad| bad.entries[1].number = 3,
            |bad| bad.staged[0].content.as_mut().expect("a file").ranges = vec![(5, 10)],
        ];
        for change in changes {
            let mut bad = whole.clone();
            change(&mut bad);
            assert_eq!(bad.check_portable(), Err(LogError::Damaged));
        }
        let mut bad = whole;
        bad.staged[0].content.as_mut().expect("a file").file = "../x".into();
        assert_eq!(ChangeLog::decode(&bad.encode()), Err(LogError::Damaged));
    }

    #[test]
    fn a_file_of_an_earlier_version_is_reported_as_such_and_not_as_damaged() {
        for magic in RETIRED_MAGICS {
            let old = Seal {
                magic: *magic,
                version: 4,
            };
            let decoded = ChangeLog::decode(&old.seal(b"payload"));
            let told = LogError::Version {
                found: 4,
                wanted: SEAL.version,
            };
            assert_eq!(decoded, Err(told));
        }
    }
}
