//! Resolves a file: finds which change gave each byte its value, from the changes of all hosts. Each host lists its
//! changes in an *index* of its own.
//!
//! Order of changes. Changes are ordered by [`ChangeKey`]: by epoch (a counter that each change stores), then by
//! writer, then by position in the writer's index. A host that opens or syncs the file takes an epoch larger than all
//! that it has read. So its later writes are newer than all changes published before, as MPI-IO demands for sync,
//! barrier, sync. Changes that did not know of each other have an order too. It is the same for all readers, and for
//! the plain file to which the bytes are copied later.
//!
//! Cuts. A *cut* is a change that shortens the file. It has no place in that order. It hides the bytes beyond its
//! length, but only those of changes that its host had seen ([`crate::cut`]). A change that its host had not seen
//! counts, whatever its key is.
//!
//! Length. The length of the file is the largest end of its visible bytes: those that no cut hides. Growths count as
//! bytes here ([`crate::cut::Growth`]).
//!
//! Terms
//! * Run: pieces of one length at equal distances in the file.
//! * Layer: one run of one change. Newer layers cover older ones.
//! * Segment: a range of the file whose bytes come from one source.

use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use crate::cut::{Growth, GrowthList, Limit, LimitList};
use crate::frame::{Change, Cut, Frame, Span};
use crate::run::Run;

/// Identifies a change and orders it among the changes of all hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChangeKey {
    /// Epoch of the frame. A larger epoch is newer.
    pub epoch: u64,
    /// The writer of the frame.
    pub writer: WriterId,
    /// Position of the frame in the writer's index.
    pub frame: u64,
}

/// A host in one of its lives. A host begins a new life each time it opens the container to write.
///
/// All hosts compute the same id. A later life of a host is ordered after its earlier lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WriterId {
    /// Hash of the host's name.
    pub host: u64,
    /// Number of the life, counted from 1.
    pub life: u64,
}

/// Where the bytes of a segment come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// From a log.
    Log {
        /// Number of the log among the writer's logs.
        log: u32,
        /// Position of the first byte in the log.
        position: u64,
        /// The change that wrote the bytes, which also names the writer.
        key: ChangeKey,
    },
    /// The bytes are zeros because a host zeroed them.
    Zeros,
    /// From the plain file, at the same offset.
    Plain,
    /// The bytes are zeros because no host wrote them.
    Hole,
}

/// A range of the file whose bytes come from one source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The range in the file.
    pub file: Range<u64>,
    /// Where the first byte comes from. If it is in a log, the further bytes follow it there.
    pub source: Source,
}

impl Segment {
    /// Removes at most `bytes` bytes from the front of the segment, and returns them as a segment.
    pub(crate) fn split_off_first(&mut self, bytes: u64) -> Self {
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

/// The position in a log where the bytes of a run begin. They follow each other without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LogLocation {
    /// Number of the log among the writer's logs.
    pub log: u32,
    /// Position of the first byte in the log.
    pub position: u64,
}

/// One run of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// The change.
    pub key: ChangeKey,
    /// The pieces that the change wrote or zeroed.
    pub run: Run,
    /// Where the bytes lie, or `None` if the change zeroed them.
    pub location: Option<LogLocation>,
}

/// Runs with fewer pieces are sorted as single pieces. Any two pieces form a run, and that run may reach over the whole
/// file. A block of a table would then hold layers that lie far apart.
const SORTED_RUN_MIN: u64 = 8;

impl Layer {
    /// Returns the source of the byte that is `run_offset` bytes into the run, as counted in the log.
    fn source(&self, run_offset: u64) -> Source {
        match self.location {
            None => Source::Zeros,
            Some(LogLocation { log, position }) => Source::Log {
                log,
                position: position + run_offset,
                key: self.key,
            },
        }
    }

    /// Splits the layer into one layer for each piece if its run is short. Otherwise returns it unchanged.
    pub(crate) fn split_if_short(self) -> impl Iterator<Item = Self> {
        let pieces = self.run.count();
        let is_short = pieces > 1 && pieces < SORTED_RUN_MIN;
        let (split_layers, whole_layer) = if is_short {
            (Some(self.split()), None)
        } else {
            (None, Some(self))
        };
        split_layers.into_iter().flatten().chain(whole_layer)
    }

    /// Splits the layer into one layer for each piece.
    fn split(self) -> impl Iterator<Item = Self> {
        let piece_bytes = self.run.len();
        self.run
            .pieces()
            .enumerate()
            .map(move |(number, piece)| Self {
                key: self.key,
                run: Run::from_piece(piece),
                location: self.location.map(|location| LogLocation {
                    position: location.position + piece_bytes * number as u64,
                    ..location
                }),
            })
    }
}

/// Splits a change into layers, one for each of its runs, which are pieces of the file at equal distances. The bytes of
/// the runs follow each other in `span`, the range of a log with the written bytes.
pub(crate) fn layers_of(
    key: ChangeKey,
    span: Option<&Span>,
    runs: &[Run],
) -> impl Iterator<Item = Layer> {
    let mut next_location = span.map(|span| LogLocation {
        log: span.log,
        position: span.position,
    });
    runs.iter().map(move |run| {
        let location = next_location;
        if let Some(next) = &mut next_location {
            next.position += run.bytes();
        }
        Layer {
            key,
            run: *run,
            location,
        }
    })
}

/// Collects the layers that have pieces in a range, up to a number of pieces.
#[derive(Debug)]
pub(crate) struct LayersInRange {
    layers: Vec<Layer>,
    pieces: u64,
    pieces_max: u64,
}

impl LayersInRange {
    pub(crate) fn new(pieces_max: u64) -> Self {
        Self {
            layers: Vec::new(),
            pieces: 0,
            pieces_max,
        }
    }

    /// Adds a layer if it has pieces in `range`. Returns false if there are more pieces than allowed.
    pub(crate) fn add(&mut self, layer: Layer, range: &Range<u64>) -> bool {
        let pieces = layer.run.count_in(range);
        if pieces > 0 {
            self.pieces = self.pieces.saturating_add(pieces);
            self.layers.push(layer);
        }
        self.pieces <= self.pieces_max
    }

    /// Returns how many pieces the layers have in the range.
    pub(crate) fn pieces(&self) -> u64 {
        self.pieces
    }
}

/// The effects of all cuts and growths on the changes of each writer and on the plain file.
#[derive(Clone, Debug)]
pub(crate) struct LengthChanges {
    /// Length of the plain file that was set last.
    plain_bytes: u64,
    /// The shortest length of all cuts. Each host that cuts has seen the plain file, so each cut applies to it.
    plain_limit: u64,
    /// What cuts hide of the changes of each writer.
    limits: HashMap<WriterId, LimitList>,
    /// How far growths by each writer extend the file.
    growths: HashMap<WriterId, GrowthList>,
    /// The largest epoch of all cuts and growths.
    last_epoch: Option<u64>,
}

impl Default for LengthChanges {
    fn default() -> Self {
        Self {
            plain_bytes: 0,
            plain_limit: u64::MAX,
            limits: HashMap::new(),
            growths: HashMap::new(),
            last_epoch: None,
        }
    }
}

impl LengthChanges {
    /// Adds a cut. It applies to the plain file, to earlier frames of its own index, and to the frames of other indexes
    /// that its host had read.
    fn add_cut(&mut self, key: ChangeKey, cut: &Cut) {
        self.record_epoch(key.epoch);
        let len = cut.len;
        self.limit_plain(len);
        let own_limit = Limit {
            until: key.frame,
            len,
        };
        self.limit(key.writer, own_limit);
        for (writer, &until) in &cut.seen {
            self.limit(writer.id(), Limit { until, len });
        }
    }

    /// Hides the bytes of the plain file from `len` on.
    pub(crate) fn limit_plain(&mut self, len: u64) {
        self.plain_limit = self.plain_limit.min(len);
    }

    /// Adds a limit to the changes of one writer.
    pub(crate) fn limit(&mut self, writer: WriterId, limit: Limit) {
        self.limits.entry(writer).or_default().add(limit);
    }

    /// Adds a growth by one writer.
    pub(crate) fn grow(&mut self, writer: WriterId, growth: Growth) {
        self.growths.entry(writer).or_default().add(growth);
    }

    fn record_epoch(&mut self, epoch: u64) {
        self.last_epoch = self.last_epoch.max(Some(epoch));
    }

    /// Adds all cuts and growths of `other`.
    fn merge(&mut self, other: &Self) {
        self.limit_plain(other.plain_limit);
        self.last_epoch = self.last_epoch.max(other.last_epoch);
        for (writer, limits) in &other.limits {
            for limit in limits.iter() {
                self.limit(*writer, limit);
            }
        }
        for (writer, growths) in &other.growths {
            for growth in growths.iter() {
                self.grow(*writer, growth);
            }
        }
    }

    /// Returns what cuts hide of the changes of a writer, or `None` if they hide nothing.
    pub(crate) fn limits_of(&self, writer: WriterId) -> Option<&LimitList> {
        self.limits.get(&writer)
    }

    /// Returns the offset in the file from which on cuts hide the bytes of a change; `u64::MAX` if no cut hides any.
    fn limit_of(&self, key: ChangeKey) -> u64 {
        match self.limits_of(key.writer) {
            Some(limits) => limits.len_limit_at(key.frame),
            None => u64::MAX,
        }
    }

    /// Returns how many bytes of the plain file count: those that no cut hides.
    fn visible_plain_bytes(&self) -> u64 {
        self.plain_bytes.min(self.plain_limit)
    }

    /// Returns the length of the file by the plain file and by growths, without changes of bytes.
    fn min_len(&self) -> u64 {
        let mut len = self.visible_plain_bytes();
        for (writer, growths) in &self.growths {
            len = len.max(growths.end(self.limits_of(*writer)));
        }
        len
    }

    /// Finds from where each byte of `range` comes. Returns segments, ranges with one source each, in order and without
    /// gaps. `layers` has all changes of bytes in the range. The file must have the whole range.
    pub(crate) fn resolve(&self, range: Range<u64>, layers: LayersInRange) -> Vec<Segment> {
        let mut layers = layers.layers;
        // The oldest comes first. Layers of one change should not overlap; if a damaged index has such layers, the
        // order by location makes all readers see the same bytes.
        layers.sort_unstable_by_key(|layer| (layer.key, layer.location));
        let mut parts = Vec::new();
        for (rank, layer) in layers.iter().enumerate() {
            // A cut that had seen the change hides its bytes beyond this limit.
            let visible_end = range.end.min(self.limit_of(layer.key));
            for part in layer.run.parts_in(range.start..visible_end) {
                parts.push(VisiblePart {
                    rank,
                    file_start: part.file.start,
                    file_end: part.file.end,
                    run_offset: part.run_offset,
                });
            }
        }
        // A stable sort is fast here, because the parts of one layer are in order already.
        parts.sort_by_key(|part| part.file_start);
        self.choose_newest(range, &layers, parts)
    }

    /// Returns the segments of `range`, which are ranges with one source each. The value of a byte comes from the
    /// newest of `parts`, pieces of changes, that contains it.
    ///
    /// Goes through the range once, with a heap of the parts that contain the present position, the newest on top.
    fn choose_newest(
        &self,
        range: Range<u64>,
        layers: &[Layer],
        parts: Vec<VisiblePart>,
    ) -> Vec<Segment> {
        let mut segments = Segments::default();
        let mut later_parts = parts.into_iter().peekable();
        let mut current_parts = BinaryHeap::new();
        let mut position = range.start;
        while position < range.end {
            while let Some(part) = later_parts.next_if(|part| part.file_start <= position) {
                current_parts.push(part);
            }
            while current_parts
                .peek()
                .is_some_and(|part| part.file_end <= position)
            {
                current_parts.pop();
            }
            let next_start = later_parts.peek().map_or(range.end, |part| part.file_start);
            let end = match current_parts.peek() {
                Some(newest) => {
                    let end = newest.file_end.min(next_start);
                    let source = layers[newest.rank].source(newest.run_offset_at(position));
                    segments.push(position..end, source);
                    end
                }
                None => {
                    self.add_unwritten(position..next_start, &mut segments);
                    next_start
                }
            };
            debug_assert!(position < end && end <= range.end, "each part has a byte");
            position = end;
        }
        debug_assert!(
            segments.covers(&range),
            "the segments cover the range once, without gaps"
        );
        segments.0
    }

    /// Adds the segments of a range that no layer covers: bytes of the plain file, then a hole.
    fn add_unwritten(&self, range: Range<u64>, segments: &mut Segments) {
        let plain_end = self.visible_plain_bytes().clamp(range.start, range.end);
        segments.push(range.start..plain_end, Source::Plain);
        segments.push(plain_end..range.end, Source::Hole);
    }
}

/// A part of a layer that no cut hides. The ordering is by rank, so the largest part is the newest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct VisiblePart {
    /// Index of the layer in the list from the oldest layer to the newest.
    rank: usize,
    file_start: u64,
    file_end: u64,
    /// Offset of the part's first byte in the run, as counted in the log.
    run_offset: u64,
}

impl VisiblePart {
    /// Returns the offset in the run of the byte at `position` in the file, as counted in the log.
    fn run_offset_at(&self, position: u64) -> u64 {
        self.run_offset + (position - self.file_start)
    }
}

/// All changes of one file that are in memory: those in no table, and all cuts and growths.
#[derive(Clone, Debug, Default)]
pub struct Resolver {
    /// Shared with readers: a change replaces it while they use the old one.
    length_changes: Arc<LengthChanges>,
    changes: BTreeMap<ChangeKey, ByteChange>,
    /// Length of the file.
    len: u64,
    /// Length of the file by the tables, whose changes are not in memory.
    tables_end: u64,
}

/// A change that wrote or zeroed bytes.
#[derive(Clone, Debug)]
struct ByteChange {
    /// The range from the first byte to the last in the file. There may be gaps in it.
    covers: Range<u64>,
    runs: Vec<Run>,
    /// Where the bytes lie in a log, or `None` if the change zeroed them.
    span: Option<Arc<Span>>,
}

impl ByteChange {
    fn from_change(change: Change) -> Self {
        let (span, runs) = change.split();
        let start = runs.iter().map(|run| run.span().start).min();
        let end = runs.iter().map(|run| run.span().end).max();
        Self {
            covers: start.unwrap_or(0)..end.unwrap_or(0),
            runs,
            span: span.map(Arc::new),
        }
    }

    /// Returns whether the change may have bytes in `range`.
    fn may_overlap(&self, range: &Range<u64>) -> bool {
        self.covers.start < range.end && self.covers.end > range.start
    }
}

impl Resolver {
    /// Makes a resolver without changes. `plain_bytes` is the length of the plain file.
    pub fn new(plain_bytes: u64) -> Self {
        let length_changes = LengthChanges {
            plain_bytes,
            ..LengthChanges::default()
        };
        Self {
            length_changes: Arc::new(length_changes),
            len: plain_bytes,
            ..Self::default()
        }
    }

    /// Sets the length of the plain file.
    pub fn set_plain_bytes(&mut self, bytes: u64) {
        if self.length_changes.plain_bytes != bytes {
            self.update_length_changes(|length_changes| length_changes.plain_bytes = bytes);
        }
    }

    /// Returns the length of the plain file that was set last.
    pub fn plain_bytes(&self) -> u64 {
        self.length_changes.plain_bytes
    }

    /// Adds the change of a frame, an entry at `offset` of the writer's index. Changes may be added in any order.
    pub fn add(&mut self, writer: WriterId, offset: u64, frame: Frame) {
        let key = ChangeKey {
            epoch: frame.epoch,
            writer,
            frame: offset,
        };
        match frame.change {
            Change::Synced => {}
            Change::Cut(cut) => self.update_length_changes(|changes| changes.add_cut(key, &cut)),
            Change::Grown(len) => self.update_length_changes(|changes| {
                changes.record_epoch(key.epoch);
                changes.grow(writer, Growth { frame: offset, len });
            }),
            change @ (Change::Written(_) | Change::Zeroed(_)) => {
                self.add_byte_change(key, ByteChange::from_change(change));
            }
        }
    }

    /// Adds a change that wrote or zeroed bytes.
    fn add_byte_change(&mut self, key: ChangeKey, change: ByteChange) {
        self.len = self.len.max(self.min_len_by(key, &change));
        self.changes.insert(key, change);
    }

    /// Applies `update` to the cuts and growths, and computes the length of the file again.
    pub(crate) fn update_length_changes(&mut self, update: impl FnOnce(&mut LengthChanges)) {
        update(Arc::make_mut(&mut self.length_changes));
        self.len = self.compute_len();
    }

    /// Drops changes of bytes by a writer whose frames begin before `to`, because they are in a table.
    pub(crate) fn drop_changes_before(&mut self, writer: WriterId, to: u64) {
        self.changes
            .retain(|key, _| key.writer != writer || key.frame >= to);
    }

    /// Copies from `other` all cuts and growths, and the changes of bytes by a writer whose frames begin at `from` or
    /// later.
    pub(crate) fn copy_from(&mut self, other: &Self, writer: WriterId, from: u64) {
        for (key, change) in &other.changes {
            if key.writer == writer && key.frame >= from {
                self.changes.insert(*key, change.clone());
            }
        }
        self.update_length_changes(|length_changes| length_changes.merge(&other.length_changes));
    }

    /// Sets the length of the file by the tables.
    pub(crate) fn set_tables_end(&mut self, end: u64) {
        self.tables_end = end;
        self.len = self.compute_len();
    }

    /// Returns where the bytes of a change lie in a log, or `None` if the change is not in memory or zeroed bytes.
    pub fn span(&self, key: ChangeKey) -> Option<Arc<Span>> {
        self.changes.get(&key)?.span.clone()
    }

    /// Returns the length of the file in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether the file has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the largest epoch of all changes in memory.
    pub fn last_epoch(&self) -> Option<u64> {
        // Keys are ordered by epoch first.
        let last_byte_change = self.changes.keys().next_back().map(|key| key.epoch);
        self.length_changes.last_epoch.max(last_byte_change)
    }

    /// Computes the length of the file by the plain file, the tables and all changes in memory.
    fn compute_len(&self) -> u64 {
        let mut len = self.length_changes.min_len().max(self.tables_end);
        for (key, change) in &self.changes {
            len = len.max(self.min_len_by(*key, change));
        }
        len
    }

    /// Returns how long a change makes the file. Zeroed bytes do not make a file longer.
    fn min_len_by(&self, key: ChangeKey, change: &ByteChange) -> u64 {
        match change.span {
            Some(_) => change.covers.end.min(self.length_changes.limit_of(key)),
            None => 0,
        }
    }

    /// Returns how many bytes of the plain file count: those that no cut hides.
    pub fn visible_plain_bytes(&self) -> u64 {
        self.length_changes.visible_plain_bytes()
    }

    pub(crate) fn length_changes(&self) -> Arc<LengthChanges> {
        Arc::clone(&self.length_changes)
    }

    /// Adds the layers in memory that have pieces in `range`. Returns false if there are more pieces than allowed.
    pub(crate) fn collect(&self, range: &Range<u64>, layers: &mut LayersInRange) -> bool {
        for (key, change) in &self.changes {
            if !change.may_overlap(range) {
                continue;
            }
            for layer in layers_of(*key, change.span.as_deref(), &change.runs) {
                if !layers.add(layer, range) {
                    return false;
                }
            }
        }
        true
    }

    /// Returns the segments of `range`, in order and without gaps, up to the end of the file. Ignores the tables.
    pub fn find(&self, range: Range<u64>) -> Vec<Segment> {
        let range = range.start..range.end.min(self.len);
        if range.is_empty() {
            return Vec::new();
        }
        let mut layers = LayersInRange::new(u64::MAX);
        self.collect(&range, &mut layers);
        self.length_changes.resolve(range, layers)
    }
}

/// A list of segments. A segment that continues the last one from the same source is joined with it.
#[derive(Default)]
struct Segments(Vec<Segment>);

impl Segments {
    /// Adds a segment at the end. It becomes a part of the last segment if it continues that one.
    fn push(&mut self, file: Range<u64>, source: Source) {
        if file.is_empty() {
            return;
        }
        let segment = Segment { file, source };
        match self.0.last_mut() {
            Some(last) if last.is_continued_by(&segment) => last.file.end = segment.file.end,
            _ => self.0.push(segment),
        }
    }
}

impl Segments {
    /// Returns whether the segments follow each other without gaps from the beginning of a range to its end.
    fn covers(&self, range: &Range<u64>) -> bool {
        let mut position = range.start;
        for segment in &self.0 {
            if segment.file.start != position || segment.file.end <= position {
                return false;
            }
            position = segment.file.end;
        }
        position == range.end.max(range.start)
    }
}

impl Segment {
    fn is_continued_by(&self, next: &Self) -> bool {
        self.file.end == next.file.start
            && self.source.advance(self.file.end - self.file.start) == next.source
    }
}

impl Source {
    /// Returns the source of the byte that is `bytes` bytes further on.
    fn advance(self, bytes: u64) -> Self {
        match self {
            Self::Log { log, position, key } => Self::Log {
                log,
                position: position + bytes,
                key,
            },
            // Each byte of the plain file, a hole or a zeroed range has the same source.
            Self::Zeros | Self::Plain | Self::Hole => self,
        }
    }
}
