//! Which bytes a file has: the order of the changes of all hosts.
//!
//! Changes are ordered by [`Key`]: by epoch, then by writer, then as the writer made them. A host that opens the file
//! or syncs it takes an epoch that is larger than all that it can see. So what it writes from then on is newer than
//! what others had published before: MPI-IO's sync, barrier, sync. Changes that did not know of each other have an
//! order too, and it is the same for every reader and for the flat file.
//!
//! Cuts have no part in that order. One hides what its host had seen ([`crate::cut`]), as if that had never been there; a
//! write that it had not seen counts, wherever it is in the order. The file ends where the last change that is left does.

use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use crate::cut::{Growth, Growths, Limit, Limits};
use crate::frame::{Change, Cut, Frame, Span};
use crate::run::Run;

/// When a change was made, among those of all hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// As in the frame.
    pub epoch: u64,
    /// Writer that made the frame.
    pub writer: WriterId,
    /// Where the frame begins in the writer's index.
    pub frame: u64,
}

/// A host in one of its lives: from one attachment to the backing to its end. All hosts know it by the same number, and
/// a later life of a host comes after its earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WriterId {
    /// From the host's name.
    pub host: u64,
    /// Number of the life, from 1.
    pub life: u64,
}

/// Where bytes of a file are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// In a log.
    Log {
        /// Index among the writer's logs.
        log: u32,
        /// Where in it.
        position: u64,
        /// The change that wrote them, and so the writer.
        key: Key,
    },
    /// Nowhere: a host made them zero.
    Zeros,
    /// In the plain file, at the same offset.
    Plain,
    /// Nowhere: they are zero.
    Hole,
}

/// A range of a file, and where its bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Where in the file.
    pub file: Range<u64>,
    /// Where its first byte is; the others follow.
    pub source: Source,
}

impl Segment {
    /// Takes at most `bytes` bytes from the front, and leaves the others.
    pub(crate) fn take_first(&mut self, bytes: u64) -> Self {
        let mut first = self.clone();
        let end = self.file.end.min(self.file.start + bytes);
        if let Source::Log { position, .. } = &mut self.source {
            *position += end - self.file.start;
        }
        first.file.end = end;
        self.file.start = end;
        debug_assert!(first.file.end <= self.file.end, "no byte is added");
        first
    }
}

/// Where the bytes of a run are, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Index among the writer's logs.
    pub log: u32,
    /// Where they begin in it.
    pub position: u64,
}

/// A run that a change wrote, or made zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// The change.
    pub key: Key,
    /// What it wrote.
    pub run: Run,
    /// None if it is zeros.
    pub place: Option<Place>,
}

/// Any two pieces are a run, which may reach over the whole file: a run of fewer pieces is sorted piece by piece, so that
/// a block has what lies near each other.
const SORTED_RUN_MIN: u64 = 8;

impl Layer {
    /// Where the byte is that comes `at` bytes after the beginning of its run in the log.
    fn source(&self, at: u64) -> Source {
        match self.place {
            None => Source::Zeros,
            Some(Place { log, position }) => Source::Log {
                log,
                position: position + at,
                key: self.key,
            },
        }
    }

    /// Itself, or its pieces.
    pub(crate) fn split_short(self) -> impl Iterator<Item = Self> {
        let is_short = (2..SORTED_RUN_MIN).contains(&self.run.count());
        let pieces = is_short.then(|| self.run.pieces().enumerate());
        let len = self.run.bytes() / self.run.count();
        let split = pieces
            .into_iter()
            .flatten()
            .map(move |(number, piece)| Self {
                key: self.key,
                run: Run::of_piece(piece),
                place: self.place.map(|place| Place {
                    position: place.position + len * number as u64,
                    ..place
                }),
            });
        split.chain((!is_short).then_some(self))
    }
}

/// The layers of a change.
pub(crate) fn layers_of(
    key: Key,
    span: Option<&Span>,
    runs: &[Run],
) -> impl Iterator<Item = Layer> {
    let log = span.map(|span| span.log);
    let mut position = span.map_or(0, |span| span.position);
    runs.iter().map(move |run| {
        let place = log.map(|log| Place { log, position });
        position += run.bytes();
        Layer {
            key,
            run: *run,
            place,
        }
    })
}

/// Layers that may have bytes in a range, as many as one wants in memory.
#[derive(Debug)]
pub(crate) struct Layers {
    found: Vec<Layer>,
    pieces: u64,
    pieces_max: u64,
}

impl Layers {
    pub(crate) fn new(pieces_max: u64) -> Self {
        Self {
            found: Vec::new(),
            pieces: 0,
            pieces_max,
        }
    }

    /// Takes a layer, if it has pieces in `range`. False if there are too many.
    pub(crate) fn take(&mut self, layer: Layer, range: &Range<u64>) -> bool {
        let pieces = layer.run.count_in(range);
        if pieces > 0 {
            self.pieces = self.pieces.saturating_add(pieces);
            self.found.push(layer);
        }
        self.pieces <= self.pieces_max
    }

    pub(crate) fn pieces(&self) -> u64 {
        self.pieces
    }
}

/// What counts of each change, and of the plain file.
#[derive(Clone, Debug)]
pub(crate) struct LengthChanges {
    /// Bytes of the plain file that count where no host wrote.
    base_bytes: u64,
    /// The shortest length of all cuts: each host had seen the plain file.
    base_limit: u64,
    limits: HashMap<WriterId, Limits>,
    growths: HashMap<WriterId, Growths>,
    /// The largest epoch of a cut or growth.
    last_epoch: Option<u64>,
}

impl Default for LengthChanges {
    fn default() -> Self {
        Self {
            base_bytes: 0,
            base_limit: u64::MAX,
            limits: HashMap::new(),
            growths: HashMap::new(),
            last_epoch: None,
        }
    }
}

impl LengthChanges {
    /// Takes a cut, which hides the frames of its own index before it.
    fn add_cut(&mut self, key: Key, cut: &Cut) {
        self.note_epoch(key.epoch);
        self.limit_base(cut.len);
        let len = cut.len;
        let until = key.frame;
        self.limit(key.writer, Limit { until, len });
        for (writer, &until) in &cut.seen {
            self.limit(writer.id(), Limit { until, len });
        }
    }

    pub(crate) fn limit_base(&mut self, len: u64) {
        self.base_limit = self.base_limit.min(len);
    }

    pub(crate) fn limit(&mut self, writer: WriterId, limit: Limit) {
        self.limits.entry(writer).or_default().add(limit);
    }

    pub(crate) fn grow(&mut self, writer: WriterId, growth: Growth) {
        self.growths.entry(writer).or_default().add(growth);
    }

    fn note_epoch(&mut self, epoch: u64) {
        self.last_epoch = self.last_epoch.max(Some(epoch));
    }

    /// Takes what another one has.
    fn merge(&mut self, other: &Self) {
        self.limit_base(other.base_limit);
        self.last_epoch = self.last_epoch.max(other.last_epoch);
        for (writer, limits) in &other.limits {
            limits.iter().for_each(|limit| self.limit(*writer, limit));
        }
        for (writer, growths) in &other.growths {
            growths.iter().for_each(|growth| self.grow(*writer, growth));
        }
    }

    /// What cuts left of the frames of an index.
    pub(crate) fn limits_of(&self, writer: WriterId) -> Option<&Limits> {
        self.limits.get(&writer)
    }

    /// Where what a change wrote ends.
    fn limit_of(&self, key: Key) -> u64 {
        let limits = self.limits_of(key.writer);
        limits.map_or(u64::MAX, |limits| limits.of(key.frame))
    }

    /// Bytes of the plain file that count: those that no host has cut.
    fn base_end(&self) -> u64 {
        self.base_bytes.min(self.base_limit)
    }

    /// Bytes that the file has whatever was written.
    fn least_len(&self) -> u64 {
        let growths = self.growths.iter();
        let grown = growths.map(|(writer, growths)| growths.end(self.limits_of(*writer)));
        self.base_end().max(grown.max().unwrap_or(0))
    }

    /// Where the bytes of `range` are, which the file has: in order and without gaps.
    pub(crate) fn resolve(&self, range: Range<u64>, layers: Layers) -> Vec<Segment> {
        let mut found = layers.found;
        // The oldest first. Layers of one change do not overlap, and if they do, all readers must see the same.
        found.sort_unstable_by_key(|layer| (layer.key, layer.place));
        let mut parts = Vec::new();
        for (rank, layer) in found.iter().enumerate() {
            let end = range.end.min(self.limit_of(layer.key));
            let its = layer.run.parts_in(range.start..end);
            parts.extend(its.map(|part| VisiblePart {
                rank,
                file_start: part.file.start,
                file_end: part.file.end,
                at: part.at,
            }));
        }
        // Those of a layer are in order already, which this sort makes use of.
        parts.sort_by_key(|part| part.file_start);
        self.choose_newest(range, &found, parts)
    }

    /// Goes through a range: of the parts that have a byte the newest counts.
    fn choose_newest(
        &self,
        range: Range<u64>,
        layers: &[Layer],
        parts: Vec<VisiblePart>,
    ) -> Vec<Segment> {
        let mut segments = Segments::default();
        let mut later = parts.into_iter().peekable();
        let mut open = BinaryHeap::new();
        let mut at = range.start;
        while at < range.end {
            while let Some(part) = later.next_if(|part| part.file_start <= at) {
                open.push(part);
            }
            while open.peek().is_some_and(|part| part.file_end <= at) {
                open.pop();
            }
            let next = later.peek().map_or(range.end, |part| part.file_start);
            let end = match open.peek() {
                Some(part) => {
                    let end = part.file_end.min(next);
                    segments.push(at..end, layers[part.rank].source(part.at_in_run(at)));
                    end
                }
                None => {
                    self.add_below(at..next, &mut segments);
                    next
                }
            };
            debug_assert!(at < end && end <= range.end, "each part has a byte");
            at = end;
        }
        debug_assert!(
            segments.is_all_of(&range),
            "a range is told without gaps, once"
        );
        segments.0
    }

    /// What a range has that no host wrote.
    fn add_below(&self, range: Range<u64>, segments: &mut Segments) {
        let plain_end = self.base_end().clamp(range.start, range.end);
        segments.push(range.start..plain_end, Source::Plain);
        segments.push(plain_end..range.end, Source::Hole);
    }
}

/// A part of a layer that no cut took. Of two, the one that counts is the larger one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct VisiblePart {
    /// The index of the layer among those that were found, from the oldest to the newest.
    rank: usize,
    file_start: u64,
    file_end: u64,
    /// Bytes from the beginning of the run in the log to its first byte.
    at: u64,
}

impl VisiblePart {
    /// Bytes from the beginning of the run in the log to a byte of the file that it has.
    fn at_in_run(&self, file: u64) -> u64 {
        self.at + (file - self.file_start)
    }
}

/// What hosts said of one file, as far as it is in memory.
#[derive(Clone, Debug, Default)]
pub struct Resolver {
    /// Shared with readers.
    length_changes: Arc<LengthChanges>,
    changes: BTreeMap<Key, ByteChange>,
    /// Length of the file.
    len: u64,
    /// Least length of the file by what is not in memory.
    outside_end: u64,
}

/// A change of bytes.
#[derive(Clone, Debug)]
struct ByteChange {
    /// From its first byte to its last, in the file.
    covers: Range<u64>,
    runs: Vec<Run>,
    /// None if it is zeros.
    span: Option<Arc<Span>>,
}

impl Resolver {
    /// For a file whose plain file has `base_bytes` bytes that count.
    pub fn new(base_bytes: u64) -> Self {
        let length_changes = LengthChanges {
            base_bytes,
            ..LengthChanges::default()
        };
        Self {
            length_changes: Arc::new(length_changes),
            len: base_bytes,
            ..Self::default()
        }
    }

    /// Sets how many bytes of the plain file count.
    pub fn set_base(&mut self, bytes: u64) {
        if self.length_changes.base_bytes != bytes {
            self.update_length_changes(|length_changes| length_changes.base_bytes = bytes);
        }
    }

    /// The last that it was told of the plain file's length.
    pub fn base_bytes(&self) -> u64 {
        self.length_changes.base_bytes
    }

    /// Takes a change, whose frame begins at `offset` in the writer's index; in whatever order they come.
    pub fn add(&mut self, writer: WriterId, offset: u64, frame: Frame) {
        let key = Key {
            epoch: frame.epoch,
            writer,
            frame: offset,
        };
        match frame.change {
            Change::Cut(cut) => {
                return self
                    .update_length_changes(|length_changes| length_changes.add_cut(key, &cut));
            }
            Change::Grown(len) => {
                return self.update_length_changes(|length_changes| {
                    length_changes.note_epoch(key.epoch);
                    length_changes.grow(writer, Growth { frame: offset, len });
                });
            }
            Change::Synced => return,
            Change::Written(_) | Change::Zeroed(_) => {}
        }
        let (span, runs) = frame.change.split();
        let spans = || runs.iter().map(Run::span);
        let start = spans().map(|span| span.start).min();
        let end = spans().map(|span| span.end).max();
        let change = ByteChange {
            covers: start.unwrap_or(0)..end.unwrap_or(0),
            runs,
            span: span.map(Arc::new),
        };
        self.len = self.len.max(self.end_of(key, &change));
        self.changes.insert(key, change);
    }

    /// Takes what is known of cuts and growths.
    pub(crate) fn update_length_changes(&mut self, change: impl FnOnce(&mut LengthChanges)) {
        change(Arc::make_mut(&mut self.length_changes));
        self.len = self.find_len();
    }

    /// Forgets changes of bytes of a writer that are found elsewhere: those whose frames begin before `to`.
    pub(crate) fn forget(&mut self, writer: WriterId, to: u64) {
        self.changes
            .retain(|key, _| key.writer != writer || key.frame >= to);
    }

    /// Takes what another one has: all cuts and growths, and changes of bytes of a writer whose frames begin at `from` or
    /// later.
    pub(crate) fn take_changes(&mut self, other: &Self, writer: WriterId, from: u64) {
        let changes = other.changes.iter();
        let later = changes.filter(|(key, _)| key.writer == writer && key.frame >= from);
        self.changes
            .extend(later.map(|(key, change)| (*key, change.clone())));
        self.update_length_changes(|length_changes| length_changes.merge(&other.length_changes));
    }

    /// Sets the least length of the file by what is not in memory.
    pub(crate) fn set_outside_end(&mut self, end: u64) {
        self.outside_end = end;
        self.len = self.find_len();
    }

    /// What a change wrote, if it wrote anything.
    pub fn span(&self, key: Key) -> Option<Arc<Span>> {
        self.changes.get(&key)?.span.clone()
    }

    /// Bytes of the file.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The largest epoch of a change.
    pub fn last_epoch(&self) -> Option<u64> {
        let change = self.changes.keys().next_back().map(|key| key.epoch);
        self.length_changes.last_epoch.max(change)
    }

    fn find_len(&self) -> u64 {
        let changes = self.changes.iter();
        let end = changes.map(|(key, change)| self.end_of(*key, change));
        let least = self.length_changes.least_len().max(self.outside_end);
        least.max(end.max().unwrap_or(0))
    }

    /// Least length of the file because of a change: zeros make no file longer.
    fn end_of(&self, key: Key, change: &ByteChange) -> u64 {
        match change.span {
            Some(_) => change.covers.end.min(self.length_changes.limit_of(key)),
            None => 0,
        }
    }

    /// Bytes of the plain file that count: those that no host has cut.
    pub fn base_end(&self) -> u64 {
        self.length_changes.base_end()
    }

    pub(crate) fn length_changes(&self) -> Arc<LengthChanges> {
        Arc::clone(&self.length_changes)
    }

    /// Finds the layers that may have bytes in `range`. False if those are too many.
    pub(crate) fn collect(&self, range: &Range<u64>, layers: &mut Layers) -> bool {
        let overlaps = |covers: &Range<u64>| covers.start < range.end && covers.end > range.start;
        let changes = self.changes.iter();
        let mut near = changes.filter(|(_, change)| overlaps(&change.covers));
        near.all(|(key, change)| {
            layers_of(*key, change.span.as_deref(), &change.runs)
                .all(|layer| layers.take(layer, range))
        })
    }

    /// Where the bytes of `range` are, in order and without gaps, up to the end of the file, by what is in memory.
    pub fn find(&self, range: Range<u64>) -> Vec<Segment> {
        let range = range.start..range.end.min(self.len);
        if range.is_empty() {
            return Vec::new();
        }
        let mut layers = Layers::new(u64::MAX);
        self.collect(&range, &mut layers);
        self.length_changes.resolve(range, layers)
    }
}

/// Segments one after the other; neighbours that go on in the same place are one.
#[derive(Default)]
struct Segments(Vec<Segment>);

impl Segments {
    fn push(&mut self, file: Range<u64>, source: Source) {
        let next = Segment { file, source };
        match self.0.last_mut() {
            _ if next.file.is_empty() => {}
            Some(last) if last.goes_on_with(&next) => last.file.end = next.file.end,
            _ => self.0.push(next),
        }
    }
}

impl Segments {
    /// Whether they follow each other from the beginning of a range to its end.
    fn is_all_of(&self, range: &Range<u64>) -> bool {
        let mut at = range.start;
        let follow = self.0.iter().all(|segment| {
            let follows = segment.file.start == at && segment.file.end > at;
            at = segment.file.end;
            follows
        });
        follow && at == range.end.max(range.start)
    }
}

impl Segment {
    fn goes_on_with(&self, next: &Self) -> bool {
        self.file.end == next.file.start
            && self.source.advance(self.file.end - self.file.start) == next.source
    }
}

impl Source {
    /// Where the byte is that comes `bytes` bytes later.
    fn advance(self, bytes: u64) -> Self {
        match self {
            Self::Log { log, position, key } => Self::Log {
                log,
                position: position + bytes,
                key,
            },
            other => other,
        }
    }
}
