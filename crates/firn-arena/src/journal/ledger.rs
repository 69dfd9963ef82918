//! What the records of a journal add up to.
//!
//! Invariants
//! * A file id has at least the names it began with, until they are removed or renamed away.
//! * A doubtful name may or may not lead to the file; recovery looks and compares the identity.
//! * A rename changes names when it ends, and only if it was done. Until then the names to which it may have led follow
//!   from it ([`Ledger::possible_paths`]): noted one by one, they would double with each rename.
//! * Renames that are under way at the same time are about different names: the engine makes the others wait. One that
//!   overlaps another was left by a firnd that was killed.

use std::collections::BTreeMap;

use firn_format::journal::frame_bytes;
use firn_format::record::{Ending, Identity, Record, Timestamp};
use smallvec::SmallVec;
use thin_vec::ThinVec;

/// How sure a name is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathState {
    /// The file is there.
    Sure,
    /// An unlink or rename that takes it away had begun.
    Doubtful,
}

/// A range whose older pieces are not pending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainedRange {
    /// Start of the range in the file.
    pub offset: u64,
    /// Its length; `u64::MAX - offset` reaches to the end of any file.
    pub len: u64,
    /// Pieces up to this sequence are drained there.
    pub sequence: u64,
}

/// A name of a file and how sure it is.
pub type Path = (Box<[u8]>, PathState);

/// A file with pending data. There may be very many: what few of them have takes a word in the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownFile {
    /// What it is in the backing.
    pub identity: Identity,
    /// Where it may be found, best first.
    pub paths: SmallVec<[Path; 1]>,
    /// See [`DrainedRange`].
    pub drained_ranges: ThinVec<DrainedRange>,
    /// A truncation that had begun: sequence and size.
    pub truncating: ThinVec<(u64, u64)>,
    /// The modification time that counts until a piece has one later than [`ModifiedAt::written`].
    pub modified_at: Option<Box<ModifiedAt>>,
    /// Whether its writers closed it.
    pub ending: Ending,
}

const _: () = assert!(size_of::<KnownFile>() <= 104);

/// A modification time that does not follow from the pieces: a program set it, or those that had it are gone. Boxed:
/// few files have one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModifiedAt {
    /// The time.
    pub time: Timestamp,
    /// Time of the last write until then, nanoseconds since 1970.
    pub written: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Rename {
    from: Vec<u8>,
    to: Vec<u8>,
    exchange: bool,
}

impl Rename {
    /// Where a name leads to once the rename is done; `None` where it stays.
    fn destination(&self, path: &[u8]) -> Option<Vec<u8>> {
        let there = moved(path, &self.from, &self.to);
        there.or_else(|| moved(path, &self.to, &self.from).filter(|_| self.exchange))
    }

    /// Whether a name is another one once the rename is done.
    fn moves(&self, path: &[u8]) -> bool {
        below(path, &self.from) || self.exchange && below(path, &self.to)
    }

    fn overlaps(&self, other: &Self) -> bool {
        [&self.from, &self.to].iter().any(|mine| {
            let theirs = [&other.from, &other.to];
            theirs
                .iter()
                .any(|path| below(path, mine) || below(mine, path))
        })
    }

    /// Adds the names to which those of a file may have come.
    fn add_destinations(&self, paths: &mut SmallVec<[Path; 1]>) {
        let there: Vec<_> = paths
            .iter()
            .filter_map(|(path, _)| self.destination(path))
            .collect();
        for path in there {
            add_path(paths, path.into(), PathState::Doubtful);
        }
    }
}

/// Adds a name, or makes it as sure as the new one is.
fn add_path(paths: &mut SmallVec<[Path; 1]>, path: Box<[u8]>, state: PathState) {
    match paths.iter_mut().find(|(known, _)| *known == path) {
        Some((_, known)) if state == PathState::Sure => *known = state,
        Some(_) => {}
        None => paths.push((path, state)),
    }
}

/// The state of the journal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    /// Boxed: half of the room in a tree's hosts is empty.
    files: BTreeMap<u64, Box<KnownFile>>,
    renames: BTreeMap<u64, Rename>,
}

impl Ledger {
    /// All file ids.
    pub fn files(&self) -> impl Iterator<Item = (u64, &KnownFile)> {
        self.files.iter().map(|(file, known)| (*file, &**known))
    }
    /// State of one file id.
    pub fn file(&self, file: u64) -> Option<&KnownFile> {
        self.files.get(&file).map(|known| &**known)
    }
    /// Number of file ids.
    pub fn len(&self) -> usize {
        self.files.len()
    }
    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }
    /// The best name of a file id.
    pub fn path(&self, file: u64) -> Option<&[u8]> {
        let paths = &self.files.get(&file)?.paths;
        let sure = paths.iter().find(|(_, state)| *state == PathState::Sure);
        sure.or(paths.first()).map(|(path, _)| &**path)
    }

    /// Takes one record in. Records about file ids that are not there are ignored: their file was
    /// unbound while the record was on its way.
    pub fn apply(&mut self, record: &Record) {
        match record {
            Record::FileIdBegin {
                file,
                identity,
                paths,
                ending,
            } => {
                let paths = paths
                    .iter()
                    .map(|p| (p.as_slice().into(), PathState::Sure))
                    .collect();
                let known = KnownFile {
                    identity: *identity,
                    paths,
                    drained_ranges: ThinVec::new(),
                    truncating: ThinVec::new(),
                    modified_at: None,
                    ending: *ending,
                };
                self.files.insert(*file, Box::new(known));
            }
            Record::NameAdded { file, path } => {
                if let Some(known) = self.files.get_mut(file) {
                    known.paths.retain(|(p, _)| **p != **path);
                    known.paths.push((path.as_slice().into(), PathState::Sure));
                }
            }
            Record::NameRemoved { file, path } => {
                if let Some(known) = self.files.get_mut(file) {
                    known.doubt(path);
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
                self.settle_renames(|other_id, other| other_id == *id || other.overlaps(&rename));
                if !exchange {
                    for known in self.files.values_mut() {
                        known.doubt(to);
                    }
                }
                self.renames.insert(*id, rename);
            }
            Record::RenameEnd { id, done } => {
                if let Some(rename) = self.renames.remove(id).filter(|_| *done) {
                    self.carry_out(&rename);
                }
            }
            Record::TruncateBegin {
                file,
                sequence,
                size,
            } => {
                if let Some(known) = self.files.get_mut(file) {
                    known.truncating.push((*sequence, *size));
                }
            }
            Record::TruncateEnd {
                file,
                sequence,
                size,
                done,
            } => {
                if let Some(known) = self.files.get_mut(file) {
                    known.truncating.retain(|(s, _)| s != sequence);
                    if *done {
                        let drained = DrainedRange {
                            offset: *size,
                            len: u64::MAX - size,
                            sequence: *sequence,
                        };
                        known.drained_ranges.push(drained);
                    }
                }
            }
            Record::DrainedRange {
                file,
                offset,
                len,
                sequence,
            } => {
                if let Some(known) = self.files.get_mut(file) {
                    known.drained_ranges.push(DrainedRange {
                        offset: *offset,
                        len: *len,
                        sequence: *sequence,
                    });
                }
            }
            Record::DrainedRangesForgotten { file, sequence } => {
                if let Some(known) = self.files.get_mut(file) {
                    known
                        .drained_ranges
                        .retain(|drained| drained.sequence > *sequence);
                }
            }
            Record::ModifiedAt {
                file,
                time,
                written,
            } => {
                if let Some(known) = self.files.get_mut(file) {
                    known.modified_at = Some(Box::new(ModifiedAt {
                        time: *time,
                        written: *written,
                    }));
                }
            }
            Record::Ended { file, ending } => {
                if let Some(known) = self.files.get_mut(file) {
                    known.ending = *ending;
                }
            }
            Record::FileIdEnd { file } => {
                self.files.remove(file);
            }
        }
    }

    /// Every name that may lead to a file, those of renames that are under way included.
    pub fn possible_paths(&self, known: &KnownFile) -> SmallVec<[Path; 1]> {
        let mut paths = known.paths.clone();
        for rename in self.renames.values() {
            rename.add_destinations(&mut paths);
        }
        paths
    }

    /// Forgets the renames that are under way, and notes the names to which they may have led.
    pub fn settle_all_renames(&mut self) {
        self.settle_renames(|_, _| true);
    }

    fn settle_renames(&mut self, which: impl Fn(u64, &Rename) -> bool) {
        let settled = self.renames.extract_if(.., |id, rename| which(*id, rename));
        for (_, rename) in settled {
            for known in self.files.values_mut() {
                rename.add_destinations(&mut known.paths);
            }
        }
    }

    /// Names follow a rename that was done.
    fn carry_out(&mut self, rename: &Rename) {
        for known in self.files.values_mut() {
            if !known.paths.iter().any(|(path, _)| rename.moves(path)) {
                continue;
            }
            for (path, state) in std::mem::take(&mut known.paths) {
                let path = rename
                    .destination(&path)
                    .map_or(path, Vec::into_boxed_slice);
                add_path(&mut known.paths, path, state);
            }
        }
    }

    /// Bytes of records that a snapshot can do without once `record` is taken in, beside what it repeats itself.
    pub(crate) fn bytes_ended_by(&self, record: &Record) -> usize {
        match record {
            Record::FileIdEnd { file } => self.files.get(file).map_or(0, |known| {
                let mut bytes = 0;
                known.for_each_record(*file, &mut |record| {
                    bytes += frame_bytes(record.encode().len())
                });
                bytes
            }),
            Record::DrainedRangesForgotten { file, sequence } => {
                self.files.get(file).map_or(0, |known| {
                    let passed = known
                        .drained_ranges
                        .iter()
                        .filter(|drained| drained.sequence <= *sequence)
                        .count();
                    let drained = Record::DrainedRange {
                        file: *file,
                        offset: 0,
                        len: 0,
                        sequence: 0,
                    };
                    passed * frame_bytes(drained.encode().len())
                })
            }
            Record::RenameEnd { id, .. } => self.renames.get(id).map_or(0, |rename| {
                let paths = self.files.values().flat_map(|known| &known.paths);
                let moved = paths.filter(|(p, _)| rename.moves(p));
                // They become shorter at most, each as a name and as one that was removed.
                moved.map(|(p, _)| 2 * frame_bytes(p.len())).sum()
            }),
            _ => 0,
        }
    }

    /// The records that add up to this ledger.
    pub fn records(&self) -> Vec<Record> {
        let mut out = Vec::new();
        self.for_each_record(|record| out.push(record));
        out
    }

    /// Tells the records that add up to this ledger one by one: together they take more memory than the ledger.
    pub fn for_each_record(&self, mut tell: impl FnMut(Record)) {
        for (&id, rename) in &self.renames {
            let from = rename.from.clone();
            let to = rename.to.clone();
            tell(Record::RenameBegin {
                id,
                from,
                to,
                exchange: rename.exchange,
            });
        }
        for (&file, known) in &self.files {
            known.for_each_record(file, &mut tell);
        }
    }
}

impl KnownFile {
    /// Tells the records that this file id takes.
    fn for_each_record(&self, file: u64, tell: &mut impl FnMut(Record)) {
        let paths = self.paths.iter().map(|(p, _)| p.to_vec()).collect();
        tell(Record::FileIdBegin {
            file,
            identity: self.identity,
            paths,
            ending: self.ending,
        });
        for (path, state) in &self.paths {
            if *state == PathState::Doubtful {
                tell(Record::NameRemoved {
                    file,
                    path: path.to_vec(),
                });
            }
        }
        for drained in &self.drained_ranges {
            tell(Record::DrainedRange {
                file,
                offset: drained.offset,
                len: drained.len,
                sequence: drained.sequence,
            });
        }
        for &(sequence, size) in &self.truncating {
            tell(Record::TruncateBegin {
                file,
                sequence,
                size,
            });
        }
        if let Some(ModifiedAt { time, written }) = self.modified_at.as_deref().copied() {
            tell(Record::ModifiedAt {
                file,
                time,
                written,
            });
        }
    }

    fn doubt(&mut self, path: &[u8]) {
        for (p, state) in &mut self.paths {
            if **p == *path {
                *state = PathState::Doubtful;
            }
        }
    }
}

/// Whether `path` is `top` or below it.
fn below(path: &[u8], top: &[u8]) -> bool {
    path.strip_prefix(top)
        .is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}

/// `path` with `from` at its start replaced by `to`; `None` where it is not at or below `from`.
fn moved(path: &[u8], from: &[u8], to: &[u8]) -> Option<Vec<u8>> {
    below(path, from).then(|| [to, &path[from.len()..]].concat())
}
