//! The ledger: the state that results when the records of a journal are applied in order.
//!
//! It has the files with bytes that are not yet in the *backing*, the directory that a mount serves. Each has a *file
//! id*, and the names of the file in the backing. The ledger also has the renames that are under way. After a crash,
//! the *recovery* reads from the ledger which file gets which bytes.
//!
//! A *piece* is a range of a file's bytes that is *pending*, not in the backing yet. A range is *drained* once it is in
//! the backing.
//!
//! Invariants
//! * A file keeps the names with which its file id began, until a record removes or renames them.
//! * A *doubtful* name may or may not lead to the file. Recovery looks there and compares the identity.
//! * A rename changes names when it ends, and only if it was done. The names that a rename under way may have produced
//!   are computed ([`Ledger::possible_paths`]). If they were stored, each rename would double the number of names.
//! * Renames that are under way at the same time concern different names, because the engine delays a rename that
//!   overlaps another one. So a rename that overlaps a new one was left by a killed firnd.

use std::collections::BTreeMap;

use firn_format::journal::frame_bytes;
use firn_format::record::{Ending, Identity, Record, Timestamp};
use smallvec::SmallVec;
use thin_vec::ThinVec;

/// Whether a name leads to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathState {
    /// The name leads to the file.
    Sure,
    /// The name may lead to the file: an unlink or rename of it has begun.
    Doubtful,
}

/// A range of a file in which older pieces are not pending any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainedRange {
    /// Offset of the range in the file.
    pub offset: u64,
    /// Length of the range. `u64::MAX - offset` reaches to the end of any file.
    pub len: u64,
    /// In the range, pieces up to this sequence are drained.
    pub sequence: u64,
}

/// A name of a file, its path in the backing, and whether the name leads to the file.
pub type KnownName = (Box<[u8]>, PathState);

/// A file with pending data. There may be very many such files, so a field that few of them need takes only a word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownFile {
    /// Identity of the file in the backing.
    pub identity: Identity,
    /// Names under which it may be found, the best first.
    pub paths: SmallVec<[KnownName; 1]>,
    /// Ranges in which older pieces are not pending any more.
    pub drained_ranges: ThinVec<DrainedRange>,
    /// Truncations that have begun and not ended: the sequence number of each, and the new length of the file.
    pub truncating: ThinVec<(u64, u64)>,
    /// Modification time that counts until a piece has one later than [`ModifiedAt::written`].
    pub modified_at: Option<Box<ModifiedAt>>,
    /// Whether the file is open for writing, closed, or was open when firnd died.
    pub ending: Ending,
}

const _: () = assert!(size_of::<KnownFile>() <= 104);

/// A modification time that does not follow from the pieces: a program set it, or its pieces are gone. Boxed, because
/// few files have one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModifiedAt {
    /// The time.
    pub time: Timestamp,
    /// Time of the last write before a program set the time, in nanoseconds since 1970.
    pub written: u64,
}

/// A rename that is under way.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rename {
    from: Vec<u8>,
    to: Vec<u8>,
    exchange: bool,
}

impl Rename {
    /// Returns the new path of a name if the rename is done. Returns `None` if the name does not change.
    fn destination(&self, path: &[u8]) -> Option<Vec<u8>> {
        if let Some(new_path) = replace_prefix(path, &self.from, &self.to) {
            return Some(new_path);
        }
        if !self.exchange {
            return None;
        }
        replace_prefix(path, &self.to, &self.from)
    }

    /// Returns whether the rename changes a name.
    fn moves(&self, path: &[u8]) -> bool {
        is_below(path, &self.from) || self.exchange && is_below(path, &self.to)
    }

    /// Returns whether both renames concern a common name.
    fn overlaps(&self, other: &Self) -> bool {
        for path in [&self.from, &self.to] {
            for other_path in [&other.from, &other.to] {
                if is_below(other_path, path) || is_below(path, other_path) {
                    return true;
                }
            }
        }
        false
    }

    /// Adds the names that files may have because of the rename.
    fn add_destinations(&self, paths: &mut SmallVec<[KnownName; 1]>) {
        let new_paths: Vec<_> = paths
            .iter()
            .filter_map(|(path, _)| self.destination(path))
            .collect();
        for path in new_paths {
            add_path(paths, path.into(), PathState::Doubtful);
        }
    }
}

/// Adds a name. If the name is in the list already, it becomes sure if `state` is sure.
fn add_path(paths: &mut SmallVec<[KnownName; 1]>, path: Box<[u8]>, state: PathState) {
    match paths.iter_mut().find(|(name, _)| *name == path) {
        Some((_, known_state)) if state == PathState::Sure => *known_state = state,
        Some(_) => {}
        None => paths.push((path, state)),
    }
}

/// The state of a journal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    /// Boxed, because half of the space in the nodes of a tree is unused.
    files: BTreeMap<u64, Box<KnownFile>>,
    renames: BTreeMap<u64, Rename>,
}

impl Ledger {
    /// Returns all file ids with their files.
    pub fn files(&self) -> impl Iterator<Item = (u64, &KnownFile)> {
        self.files
            .iter()
            .map(|(file, known_file)| (*file, &**known_file))
    }

    /// Returns the file of a file id.
    pub fn file(&self, file: u64) -> Option<&KnownFile> {
        self.files.get(&file).map(|known_file| &**known_file)
    }

    /// Returns the number of file ids.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Returns whether there is no file id.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Returns the best name of a file id.
    pub fn path(&self, file: u64) -> Option<&[u8]> {
        let paths = &self.files.get(&file)?.paths;
        let (path, _) = paths
            .iter()
            .find(|(_, state)| *state == PathState::Sure)
            .or(paths.first())?;
        Some(path)
    }

    /// Applies one record. A record about an unknown file id is ignored: the file id ended while the record was on its
    /// way.
    pub fn apply(&mut self, record: &Record) {
        match record {
            Record::FileIdBegin {
                file,
                identity,
                paths,
                ending,
            } => {
                let known_file = KnownFile::new(*identity, paths, *ending);
                self.files.insert(*file, Box::new(known_file));
            }
            Record::NameAdded { file, path } => {
                if let Some(known_file) = self.files.get_mut(file) {
                    known_file.paths.retain(|(known, _)| **known != **path);
                    known_file
                        .paths
                        .push((path.as_slice().into(), PathState::Sure));
                }
            }
            Record::NameRemoved { file, path } => {
                if let Some(known_file) = self.files.get_mut(file) {
                    // The record precedes the unlink, which may have failed: the name may still lead to the file.
                    known_file.doubt(path);
                }
            }
            Record::RenameBegin {
                id,
                from,
                to,
                exchange,
            } => {
                let rename = Rename {
                    from: from.clone(),
                    to: to.clone(),
                    exchange: *exchange,
                };
                self.begin_rename(*id, rename);
            }
            Record::RenameEnd { id, done } => {
                if let Some(rename) = self.renames.remove(id)
                    && *done
                {
                    self.apply_rename(&rename);
                }
            }
            Record::TruncateBegin {
                file,
                sequence,
                size,
            } => {
                if let Some(known_file) = self.files.get_mut(file) {
                    known_file.truncating.push((*sequence, *size));
                }
            }
            Record::TruncateEnd {
                file,
                sequence,
                size,
                done,
            } => {
                if let Some(known_file) = self.files.get_mut(file) {
                    known_file.end_truncation(*sequence, *size, *done);
                }
            }
            Record::DrainedRange {
                file,
                offset,
                len,
                sequence,
            } => {
                if let Some(known_file) = self.files.get_mut(file) {
                    known_file.drained_ranges.push(DrainedRange {
                        offset: *offset,
                        len: *len,
                        sequence: *sequence,
                    });
                }
            }
            Record::DrainedRangesForgotten { file, sequence } => {
                if let Some(known_file) = self.files.get_mut(file) {
                    known_file
                        .drained_ranges
                        .retain(|drained| drained.sequence > *sequence);
                }
            }
            Record::ModifiedAt {
                file,
                time,
                written,
            } => {
                if let Some(known_file) = self.files.get_mut(file) {
                    known_file.modified_at = Some(Box::new(ModifiedAt {
                        time: *time,
                        written: *written,
                    }));
                }
            }
            Record::Ended { file, ending } => {
                if let Some(known_file) = self.files.get_mut(file) {
                    known_file.ending = *ending;
                }
            }
            Record::FileIdEnd { file } => {
                self.files.remove(file);
            }
        }
    }

    /// Adds a rename that has begun. A successful rename replaces the object at its target, unless it is an exchange,
    /// so that name becomes doubtful.
    fn begin_rename(&mut self, id: u64, rename: Rename) {
        // Renames under way can end in any order. So an earlier rename that touches the same names is settled first.
        self.settle_renames(|other_id, other| other_id == id || other.overlaps(&rename));
        if !rename.exchange {
            for known_file in self.files.values_mut() {
                known_file.doubt(&rename.to);
            }
        }
        self.renames.insert(id, rename);
    }

    /// Returns every name that may lead to a file, including those that renames under way may have produced.
    pub fn possible_paths(&self, known_file: &KnownFile) -> SmallVec<[KnownName; 1]> {
        let mut paths = known_file.paths.clone();
        for rename in self.renames.values() {
            rename.add_destinations(&mut paths);
        }
        paths
    }

    /// Forgets all renames under way, and adds the names that files may have because of them.
    pub fn settle_all_renames(&mut self) {
        self.settle_renames(|_, _| true);
    }

    /// Forgets the renames under way that match, and adds the names that files may have because of them.
    fn settle_renames(&mut self, is_settled: impl Fn(u64, &Rename) -> bool) {
        let settled = self
            .renames
            .extract_if(.., |id, rename| is_settled(*id, rename));
        for (_, rename) in settled {
            for known_file in self.files.values_mut() {
                rename.add_destinations(&mut known_file.paths);
            }
        }
    }

    /// Changes the names according to a rename that was done.
    fn apply_rename(&mut self, rename: &Rename) {
        for known_file in self.files.values_mut() {
            if !known_file.paths.iter().any(|(path, _)| rename.moves(path)) {
                continue;
            }
            for (path, state) in std::mem::take(&mut known_file.paths) {
                let path = rename
                    .destination(&path)
                    .map_or(path, Vec::into_boxed_slice);
                add_path(&mut known_file.paths, path, state);
            }
        }
    }

    /// Returns how many bytes `record` saves in the next snapshot: the size of the earlier records that it makes void.
    /// A snapshot rewrites the journal without such records.
    ///
    /// Called before the record is applied. For the end of a rename, the result is an upper bound.
    pub(crate) fn snapshot_bytes_saved_by(&self, record: &Record) -> usize {
        match record {
            Record::FileIdEnd { file } => self
                .files
                .get(file)
                .map_or(0, |known_file| known_file.encoded_bytes(*file)),
            Record::DrainedRangesForgotten { file, sequence } => {
                self.files.get(file).map_or(0, |known_file| {
                    known_file.drained_range_bytes(*file, *sequence)
                })
            }
            Record::RenameEnd { id, .. } => self
                .renames
                .get(id)
                .map_or(0, |rename| self.moved_name_bytes(rename)),
            // What other records save is not counted.
            _ => 0,
        }
    }

    /// Returns an upper bound of the bytes that a snapshot saves once `rename` has ended.
    fn moved_name_bytes(&self, rename: &Rename) -> usize {
        // At most the whole path of a moved name is saved. It counts twice: in the record of the name, and in that of
        // its removal.
        self.files
            .values()
            .flat_map(|known_file| &known_file.paths)
            .filter(|(path, _)| rename.moves(path))
            .map(|(path, _)| 2 * frame_bytes(path.len()))
            .sum()
    }

    /// Returns the records from which this ledger can be rebuilt.
    pub fn records(&self) -> Vec<Record> {
        let mut records = Vec::new();
        self.for_each_record(|record| records.push(record));
        records
    }

    /// Passes each record that is needed to rebuild this ledger to `sink`. One by one, because all records together
    /// take more memory than the ledger.
    pub fn for_each_record(&self, mut sink: impl FnMut(Record)) {
        for (&id, rename) in &self.renames {
            let from = rename.from.clone();
            let to = rename.to.clone();
            sink(Record::RenameBegin {
                id,
                from,
                to,
                exchange: rename.exchange,
            });
        }
        for (&file, known_file) in &self.files {
            known_file.for_each_record(file, &mut sink);
        }
    }
}

impl KnownFile {
    /// Returns a file with these names, of which all lead to the file.
    fn new(identity: Identity, paths: &[Vec<u8>], ending: Ending) -> Self {
        Self {
            identity,
            paths: paths
                .iter()
                .map(|path| (path.as_slice().into(), PathState::Sure))
                .collect(),
            drained_ranges: ThinVec::new(),
            truncating: ThinVec::new(),
            modified_at: None,
            ending,
        }
    }

    /// Ends a truncation. If it was done, it dropped all older pieces beyond the new length `size`.
    fn end_truncation(&mut self, sequence: u64, size: u64, done: bool) {
        self.truncating
            .retain(|(begun_sequence, _)| *begun_sequence != sequence);
        if done {
            self.drained_ranges.push(DrainedRange {
                offset: size,
                len: u64::MAX - size,
                sequence,
            });
        }
    }

    /// Returns the size of the frames that are needed to rebuild this file id.
    fn encoded_bytes(&self, file: u64) -> usize {
        let mut bytes = 0;
        self.for_each_record(file, &mut |record| {
            bytes += frame_bytes(record.encode().len());
        });
        bytes
    }

    /// Returns the size of the frames of the drained ranges up to `sequence`.
    fn drained_range_bytes(&self, file: u64, sequence: u64) -> usize {
        let range_count = self
            .drained_ranges
            .iter()
            .filter(|drained| drained.sequence <= sequence)
            .count();
        // The frames of all drained ranges have the same size.
        let record = Record::DrainedRange {
            file,
            offset: 0,
            len: 0,
            sequence: 0,
        };
        range_count * frame_bytes(record.encode().len())
    }

    /// Passes each record that is needed to rebuild the entry of the file with the id `file` to `sink`. The record that
    /// begins the file id comes first, with all names.
    fn for_each_record(&self, file: u64, sink: &mut impl FnMut(Record)) {
        let paths = self.paths.iter().map(|(path, _)| path.to_vec()).collect();
        sink(Record::FileIdBegin {
            file,
            identity: self.identity,
            paths,
            ending: self.ending,
        });
        for (path, state) in &self.paths {
            // This record makes a name doubtful: its removal has begun.
            if *state == PathState::Doubtful {
                sink(Record::NameRemoved {
                    file,
                    path: path.to_vec(),
                });
            }
        }
        for drained in &self.drained_ranges {
            sink(Record::DrainedRange {
                file,
                offset: drained.offset,
                len: drained.len,
                sequence: drained.sequence,
            });
        }
        for &(sequence, size) in &self.truncating {
            sink(Record::TruncateBegin {
                file,
                sequence,
                size,
            });
        }
        if let Some(ModifiedAt { time, written }) = self.modified_at.as_deref().copied() {
            sink(Record::ModifiedAt {
                file,
                time,
                written,
            });
        }
    }

    /// Makes a name doubtful.
    fn doubt(&mut self, path: &[u8]) {
        for (name, state) in &mut self.paths {
            if **name == *path {
                *state = PathState::Doubtful;
            }
        }
    }
}

/// Returns whether `path` is `ancestor` or below it.
fn is_below(path: &[u8], ancestor: &[u8]) -> bool {
    path.strip_prefix(ancestor)
        .is_some_and(|suffix| suffix.is_empty() || suffix[0] == b'/')
}

/// Returns `path` with `from` at its start replaced by `to`. Returns `None` if it is not at or below `from`.
fn replace_prefix(path: &[u8], from: &[u8], to: &[u8]) -> Option<Vec<u8>> {
    is_below(path, from).then(|| [to, &path[from.len()..]].concat())
}
