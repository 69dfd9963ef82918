//! Tables: parts of an index, sorted by offset in the file, so that a reader loads only the blocks it needs.
//!
//! Terms
//! * An *index* lists the changes that one host made to a file. Each entry is a *frame*.
//! * A *layer* is a part of a change: pieces of the file at equal distances. Their bytes follow each other in a log.
//! * A *span* is the range of a log with the bytes of one change, and their checksums.
//!
//! ```text
//! blocks of layers   each about 64 KiB, sorted by the first byte in the file
//! blocks of spans    in the order of the frames in the index: places and checksums of the written bytes
//! directory          of each block: bounds, position and checksum; also the effect of all cuts
//! trailer            u32 length of the directory, u32 CRC32C of it, "FIRNSORT"
//! ```
//!
//! A table holds the changes of bytes FROM to TO of an index. Its name says which. A table can be made again from the
//! index, so no host waits for a sync of it. A table that is incomplete or has a damaged block is not used: readers use
//! the index instead.
//!
//! Invariants
//! * A table never changes. Two tables with the same name have the same bytes.
//! * Layers are sorted by first byte, then by key, the order of changes ([`ChangeKey`]). Spans are sorted by frame.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use firn_backing::lock::Mutex;
use firn_backing::{Access, Backing, Errno, PlacementHint, RenameFlags, Result};
use firn_hosts::own;
use quick_cache::sync::Cache;
use serde::{Deserialize, Serialize};

use crate::block::{BLOCK_BYTES, LayerDecoder, LayerEncoder, SpanEncoder, decode_spans};
use crate::cut::{GrowthList, Limit, LimitList};
use crate::frame::{Cut, Span};
use crate::names::Writer;
use crate::resolve::{ChangeKey, Layer, LayersInRange, LengthChanges, WriterId};
use crate::run::FILE_BYTES_MAX;

const MAGIC: [u8; 8] = *b"FIRNSORT";
/// Length of the trailer.
const TRAILER_BYTES: u64 = 16;
/// Bound on the length of a directory. It suffices for 2^20 blocks, which hold some 10^10 pieces.
const DIRECTORY_BYTES_MAX: u64 = 64 << 20;
/// The part of a cache that is for spans, as a divisor of its bytes.
const SPAN_SHARE: u64 = 8;
/// Bound on the length of a block. An encoder ends a block after the entry that exceeds [`BLOCK_BYTES`].
const BLOCK_BYTES_MAX: u64 = 2 * BLOCK_BYTES as u64;

/// Blocks of tables and single spans in memory, of all files.
pub(crate) struct BlockCache {
    blocks: Cache<CacheId, Arc<[u8]>, ByteWeight>,
    /// Spans that were found in blocks. A read of scattered pieces needs a different span for each.
    spans: Cache<CacheId, Arc<Span>, ByteWeight>,
}

/// Identifies an entry: the number of the table in this process, and a block's position or a span's frame.
type CacheId = (u64, u64);

/// Weighs an entry by its bytes in memory.
#[derive(Clone)]
struct ByteWeight;

impl quick_cache::Weighter<CacheId, Arc<[u8]>> for ByteWeight {
    fn weight(&self, _: &CacheId, block: &Arc<[u8]>) -> u64 {
        block.len() as u64
    }
}

impl quick_cache::Weighter<CacheId, Arc<Span>> for ByteWeight {
    fn weight(&self, _: &CacheId, span: &Arc<Span>) -> u64 {
        (size_of::<Span>() + 4 * span.checksums.len()) as u64
    }
}

impl BlockCache {
    /// Makes a cache of at most `bytes` bytes. An eighth of them is for spans.
    pub(crate) fn new(bytes: u64) -> Self {
        let for_spans = bytes / SPAN_SHARE;
        let for_blocks = bytes - for_spans;
        let blocks = for_blocks / BLOCK_BYTES as u64;
        let spans = for_spans / size_of::<Span>() as u64;
        Self {
            blocks: Cache::with_weighter(blocks as usize, for_blocks, ByteWeight),
            spans: Cache::with_weighter(spans as usize, for_spans, ByteWeight),
        }
    }
}

/// The directory of a table: what the table holds, and where.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Directory {
    /// How often the contents were merged; 0 for a table made from frames.
    pub level: u8,
    /// Beginning of the part of the index that the table holds.
    pub from: u64,
    /// End of that part.
    pub to: u64,
    /// The largest epoch of the changes.
    pub last_epoch: u64,
    /// Position in the index of the first frame that wrote bytes.
    pub first: u64,
    /// Position of the last frame that wrote bytes.
    pub last: u64,
    /// End in the file of the last byte that was written; 0 if none was.
    pub end: u64,
    /// The effect of the cuts and growths.
    pub length_changes: StoredLengthChanges,
    /// The blocks of layers, in order.
    pub layers: Vec<LayerBlock>,
    /// The blocks of spans, in order.
    pub spans: Vec<SpanBlock>,
}

/// The effect of the cuts (changes that shorten the file) and growths in a part of an index.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredLengthChanges {
    /// The shortest length of the cuts, which also cut the plain file; `None` without a cut.
    pub plain_limit: Option<u64>,
    /// What the cuts hide of the changes of each writer.
    pub limits: BTreeMap<Writer, LimitList>,
    /// The changes that made the file longer.
    pub growths: GrowthList,
}

impl StoredLengthChanges {
    /// Adds a cut by `writer`, whose frame begins at `frame` in the writer's index.
    pub(crate) fn add_cut(&mut self, writer: &Writer, frame: u64, cut: Cut) {
        let len = cut.len;
        self.limit_plain(len);
        let own_index = (writer.clone(), frame);
        for (limited_writer, until) in cut.seen.into_iter().chain([own_index]) {
            self.limit(limited_writer, Limit { until, len });
        }
    }

    fn limit_plain(&mut self, len: u64) {
        self.plain_limit = Some(
            self.plain_limit
                .map_or(len, |plain_limit| plain_limit.min(len)),
        );
    }

    fn limit(&mut self, writer: Writer, limit: Limit) {
        if limit.until > 0 {
            self.limits.entry(writer).or_default().add(limit);
        }
    }

    /// Adds the effect of another part.
    pub(crate) fn merge(&mut self, other: &Self) {
        if let Some(plain_limit) = other.plain_limit {
            self.limit_plain(plain_limit);
        }
        for (writer, limits) in &other.limits {
            for limit in limits.iter() {
                self.limit(writer.clone(), limit);
            }
        }
        for growth in other.growths.iter() {
            self.growths.add(growth);
        }
    }

    /// Adds the effect to the length changes of a file. `writer` is the writer of the index.
    pub(crate) fn apply_to(&self, writer: WriterId, length_changes: &mut LengthChanges) {
        if let Some(plain_limit) = self.plain_limit {
            length_changes.limit_plain(plain_limit);
        }
        for (limited_writer, limits) in &self.limits {
            for limit in limits.iter() {
                length_changes.limit(limited_writer.id(), limit);
            }
        }
        for growth in self.growths.iter() {
            length_changes.grow(writer, growth);
        }
    }

    fn is_valid(&self) -> bool {
        let is_limited =
            |(writer, limits): (&Writer, &LimitList)| writer.is_valid() && limits.is_valid();
        self.plain_limit <= Some(FILE_BYTES_MAX)
            && self.limits.iter().all(is_limited)
            && self.growths.is_valid()
    }
}

/// Where a block lies in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockLocation {
    /// Position of the first byte in the table.
    pub position: u64,
    /// Length in bytes.
    pub bytes: u32,
    /// CRC32C of the bytes.
    pub checksum: [u8; 4],
}

/// A block of layers, with the bounds of its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerBlock {
    /// Where the block lies.
    pub location: BlockLocation,
    /// Offset in the file of the first byte of its layers.
    pub lowest: u64,
    /// End in the file of the last byte of its layers.
    pub highest: u64,
    /// Position in the index of the last frame of its layers.
    pub last: u64,
    /// The largest `highest` of this block and all blocks before it.
    pub reach: u64,
}

/// A block of spans, with its first frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpanBlock {
    /// Where the block lies.
    pub location: BlockLocation,
    /// Position in the index of its first frame.
    pub first: u64,
}

impl Directory {
    /// Returns the total length of all blocks.
    fn total_block_bytes(&self) -> u64 {
        self.block_locations()
            .map(|location| u64::from(location.bytes))
            .sum()
    }

    /// Returns where all blocks lie: those of layers, then those of spans.
    fn block_locations(&self) -> impl Iterator<Item = BlockLocation> {
        let layer_blocks = self.layers.iter().map(|block| block.location);
        let span_blocks = self.spans.iter().map(|block| block.location);
        layer_blocks.chain(span_blocks)
    }

    /// Appends the encoded directory and the trailer to `bytes`.
    fn encode(&self, bytes: &mut Vec<u8>) {
        let body = postcard::to_allocvec(self).expect("memory is all that it takes");
        let len = u32::try_from(body.len()).expect("blocks are large");
        bytes.extend_from_slice(&body);
        bytes.extend_from_slice(&len.to_le_bytes());
        bytes.extend_from_slice(&crc32c::crc32c(&body).to_le_bytes());
        bytes.extend_from_slice(&MAGIC);
    }

    /// Returns the length of the directory by the trailer of a table of `file_bytes`. Returns `None` if the trailer is
    /// not valid.
    fn directory_bytes(trailer: &[u8], file_bytes: u64) -> Option<u64> {
        let len_field = trailer.get(..4)?.try_into().ok()?;
        let directory_bytes = u64::from(u32::from_le_bytes(len_field));
        let has_magic = trailer.get(8..)? == MAGIC;
        let fits =
            directory_bytes <= DIRECTORY_BYTES_MAX && directory_bytes + TRAILER_BYTES <= file_bytes;
        (has_magic && fits).then_some(directory_bytes)
    }

    /// Decodes the directory of a table of `file_bytes`. `tail` is the directory and the trailer. Returns `None` if it
    /// is damaged.
    pub fn decode(tail: &[u8], file_bytes: u64) -> Option<Self> {
        let (body, trailer) = tail.split_last_chunk::<{ TRAILER_BYTES as usize }>()?;
        let has_right_len = Self::directory_bytes(trailer, file_bytes)? == body.len() as u64;
        let has_right_checksum = crc32c::crc32c(body).to_le_bytes() == trailer[4..8];
        if !has_right_len || !has_right_checksum {
            return None;
        }
        let (directory, rest) = postcard::take_from_bytes::<Self>(body).ok()?;
        let data_bytes = file_bytes - tail.len() as u64;
        (rest.is_empty() && directory.is_valid(data_bytes)).then_some(directory)
    }

    /// Returns whether a decoded directory is consistent. `data_bytes` is the length of all blocks.
    fn is_valid(&self, data_bytes: u64) -> bool {
        self.from < self.to
            && self.end <= FILE_BYTES_MAX
            && self.first <= self.last
            && self.has_valid_bounds()
            && self.layers.is_sorted_by_key(|block| block.lowest)
            && self.spans.is_sorted_by_key(|block| block.first)
            && self.length_changes.is_valid()
            && self
                .block_locations()
                .all(|location| location.is_valid(data_bytes))
    }

    /// Returns whether no block of layers is empty, and each has the right `reach`.
    fn has_valid_bounds(&self) -> bool {
        let mut reach = 0;
        for block in &self.layers {
            reach = block.highest.max(reach);
            if block.reach != reach || block.lowest >= block.highest {
                return false;
            }
        }
        true
    }

    /// Extends the bounds of the written bytes by a layer.
    fn extend_written_bounds(&mut self, layer: &Layer) {
        let frame = layer.key.frame;
        let is_first_layer = self.end == 0;
        if is_first_layer || frame < self.first {
            self.first = frame;
        }
        self.last = self.last.max(frame);
        self.end = self.end.max(layer.run.span().end);
    }
}

impl BlockLocation {
    fn is_valid(self, data_bytes: u64) -> bool {
        let end = self.position.checked_add(u64::from(self.bytes));
        u64::from(self.bytes) <= BLOCK_BYTES_MAX && end.is_some_and(|end| end <= data_bytes)
    }

    fn matches(self, bytes: &[u8]) -> bool {
        crc32c::crc32c(bytes).to_le_bytes() == self.checksum
    }
}

/// An open table.
pub(crate) struct Table<B: Backing> {
    id: u64,
    pub(crate) name: String,
    pub(crate) writer: WriterId,
    file: B::File,
    pub(crate) directory: Directory,
    /// Whether a block was found damaged, so that the table must not be used.
    is_damaged: AtomicBool,
    /// The end of the table's bytes in the file that was computed last.
    computed_end: Mutex<Option<ComputedEnd>>,
}

/// The end of the bytes in the file that cuts do not hide, for one set of limits.
struct ComputedEnd {
    /// The limits that apply to the table's frames.
    limits: Vec<Limit>,
    end: u64,
}

/// Why a table, or something in it, cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TableError {
    /// The table is damaged. The index must be read in its place.
    Damaged,
    /// No table in use holds the change that was asked for.
    Unknown,
    /// A call of the backing failed.
    Backing(Errno),
}

pub(crate) type TableResult<T> = std::result::Result<T, TableError>;

impl From<Errno> for TableError {
    fn from(errno: Errno) -> Self {
        Self::Backing(errno)
    }
}

/// For errors that remain after the view was built again without damaged tables.
impl From<TableError> for Errno {
    fn from(error: TableError) -> Self {
        match error {
            TableError::Damaged | TableError::Unknown => Self::IO,
            TableError::Backing(errno) => errno,
        }
    }
}

impl<B: Backing> Table<B> {
    /// Opens the table of a part of an index, which has that part sorted. Returns `None` if the table is missing or
    /// damaged.
    pub(crate) fn open(
        backing: &B,
        dir: &B::Inode,
        writer: &Writer,
        part: Range<u64>,
    ) -> Result<Option<Self>> {
        static OPENED: AtomicU64 = AtomicU64::new(0);
        let name = writer.table_name(&part);
        let Some(inode) = own::find_file(backing, dir, &name)? else {
            return Ok(None);
        };
        let file = backing.open(&inode, Access::Read)?;
        let Some(directory) = load_directory(backing, &file)? else {
            tracing::warn!(
                name,
                "a sorted index is incomplete: the unsorted index is read instead"
            );
            return Ok(None);
        };
        if (directory.from, directory.to) != (part.start, part.end) {
            return Ok(None);
        }
        Ok(Some(Self {
            id: OPENED.fetch_add(1, Ordering::Relaxed),
            name,
            writer: writer.id(),
            file,
            directory,
            is_damaged: AtomicBool::new(false),
            computed_end: Mutex::default(),
        }))
    }

    pub(crate) fn part(&self) -> Range<u64> {
        self.directory.from..self.directory.to
    }

    pub(crate) fn is_damaged(&self) -> bool {
        self.is_damaged.load(Ordering::Acquire)
    }

    /// Returns whether the table holds the change with this key, by its frame.
    pub(crate) fn holds(&self, key: ChangeKey) -> bool {
        key.writer == self.writer && self.part().contains(&key.frame)
    }

    /// Adds this table's changes of bytes in `range` to `layers`; a layer is a part of one change. Returns false if the
    /// range has more pieces than `layers` may hold. The caller then asks for a shorter range.
    pub(crate) fn collect(
        &self,
        backing: &B,
        cache: &BlockCache,
        range: &Range<u64>,
        layers: &mut LayersInRange,
    ) -> TableResult<bool> {
        let blocks = &self.directory.layers;
        // No block before this one reaches into the range.
        let first_block = blocks.partition_point(|block| block.reach <= range.start);
        for block in &blocks[first_block..] {
            if block.lowest >= range.end {
                break;
            }
            if block.highest <= range.start {
                continue;
            }
            let bytes = self.load_block(backing, cache, block.location)?;
            for decoded in LayerDecoder::new(bytes, self.writer) {
                let layer = decoded.map_err(|_| self.mark_damaged())?;
                if layer.run.offset() >= range.end {
                    break;
                }
                if !layers.add(layer, range) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Returns the span of a change: where its bytes lie in a log. Returns `None` if the table has none for it.
    pub(crate) fn span(
        &self,
        backing: &B,
        cache: &BlockCache,
        key: ChangeKey,
    ) -> TableResult<Option<Arc<Span>>> {
        let id = (self.id, key.frame);
        if let Some(known) = cache.spans.get(&id) {
            return Ok(Some(known));
        }
        let blocks = &self.directory.spans;
        let blocks_up_to_frame = blocks.partition_point(|block| block.first <= key.frame);
        let Some(block) = blocks[..blocks_up_to_frame].last() else {
            return Ok(None);
        };
        let bytes = self.load_block(backing, cache, block.location)?;
        for decoded in decode_spans(&bytes) {
            let (frame, span) = decoded.map_err(|_| self.mark_damaged())?;
            if frame == key.frame {
                let span = Arc::new(span);
                cache.spans.insert(id, Arc::clone(&span));
                return Ok(Some(span));
            }
        }
        Ok(None)
    }

    /// Returns where the last visible byte of this table ends in the file; the length of the file follows from these
    /// ends. `limits` say which bytes later cuts of the file hide.
    ///
    /// Returns `None` if blocks must be read to find the end. [`Table::compute_visible_end`] reads them, and a later
    /// call of this function with the same limits then returns the end.
    pub(crate) fn visible_end(&self, limits: Option<&LimitList>) -> Option<u64> {
        let Directory {
            first: first_frame,
            last: last_frame,
            end: end_without_cuts,
            ..
        } = self.directory;
        let Some(limits) = limits else {
            return Some(end_without_cuts);
        };
        // Limits grow with the frames. If they are equal for the first and the last frame, they are equal for all.
        let last_limit = limits.len_limit_at(last_frame);
        if limits.len_limit_at(first_frame) == last_limit {
            return Some(end_without_cuts.min(last_limit));
        }
        let computed_end = self.computed_end.lock();
        let computed = computed_end.as_ref()?;
        let is_for_same_limits = computed.limits == limits.between(first_frame, last_frame);
        is_for_same_limits.then_some(computed.end)
    }

    /// Makes sure that [`Table::visible_end`] returns an end for these `limits`, which say which bytes later cuts of
    /// the file hide. Reads blocks of the table if necessary, and stores the result.
    pub(crate) fn compute_visible_end(
        &self,
        backing: &B,
        limits: Option<&LimitList>,
    ) -> TableResult<()> {
        let Some(limits) = limits else {
            return Ok(());
        };
        if self.visible_end(Some(limits)).is_some() {
            return Ok(());
        }
        let mut end = 0;
        for block in &self.directory.layers {
            // Where bytes of this block end at most. `last` is the block's last frame, for which the limit is largest.
            let end_max = block.highest.min(limits.len_limit_at(block.last));
            // The block has no byte beyond the end that was found so far.
            if end_max <= end {
                continue;
            }
            let bytes = self.read_block(backing, block.location)?;
            for decoded in LayerDecoder::new(bytes, self.writer) {
                let layer = decoded.map_err(|_| self.mark_damaged())?;
                if layer.location.is_some() {
                    let limit = limits.len_limit_at(layer.key.frame);
                    end = end.max(layer.run.span().end.min(limit));
                }
            }
        }
        let Directory { first, last, .. } = self.directory;
        *self.computed_end.lock() = Some(ComputedEnd {
            limits: limits.between(first, last).to_vec(),
            end,
        });
        Ok(())
    }

    /// Returns a block, from the cache if it is there.
    fn load_block(
        &self,
        backing: &B,
        cache: &BlockCache,
        location: BlockLocation,
    ) -> TableResult<Arc<[u8]>> {
        let id = (self.id, location.position);
        if let Some(known) = cache.blocks.get(&id) {
            return Ok(known);
        }
        let block = self.read_block(backing, location)?;
        cache.blocks.insert(id, Arc::clone(&block));
        Ok(block)
    }

    /// Reads a block and compares its checksum, without the cache.
    fn read_block(&self, backing: &B, location: BlockLocation) -> TableResult<Arc<[u8]>> {
        let mut block = vec![0; location.bytes as usize];
        let count = backing.read_at(&self.file, &mut block, location.position)?;
        if count < block.len() || !location.matches(&block) {
            return Err(self.mark_damaged());
        }
        Ok(block.into())
    }

    /// Marks the table as damaged, so that it is not used any more.
    fn mark_damaged(&self) -> TableError {
        self.is_damaged.store(true, Ordering::Release);
        tracing::warn!(
            name = self.name,
            "a sorted index is damaged: the unsorted index is read instead"
        );
        TableError::Damaged
    }

    /// Reads the whole table, and returns its layers (pieces of changes) in order. They are read once, so the blocks do
    /// not go to the cache.
    pub(crate) fn layers<'a>(
        &'a self,
        backing: &'a B,
    ) -> impl Iterator<Item = TableResult<Layer>> + 'a {
        self.directory.layers.iter().flat_map(move |block| {
            // Of these two, one is `Some`. If the block cannot be read, the error takes the place of its layers.
            let (bytes, read_error) = match self.read_block(backing, block.location) {
                Ok(bytes) => (Some(bytes), None),
                Err(error) => (None, Some(error)),
            };
            let decoded_layers = bytes
                .into_iter()
                .flat_map(|bytes| LayerDecoder::new(bytes, self.writer))
                .map(|layer| layer.map_err(|_| self.mark_damaged()));
            // A chain, because both cases must have the same type.
            read_error.map(Err).into_iter().chain(decoded_layers)
        })
    }

    /// Returns all spans in order, each with its frame, without filling the cache.
    pub(crate) fn spans<'a>(
        &'a self,
        backing: &'a B,
    ) -> impl Iterator<Item = TableResult<(u64, Span)>> + 'a {
        self.directory.spans.iter().flat_map(move |block| {
            let bytes = match self.read_block(backing, block.location) {
                Ok(bytes) => bytes,
                Err(error) => return vec![Err(error)],
            };
            decode_spans(&bytes)
                .map(|span| span.map_err(|_| self.mark_damaged()))
                .collect()
        })
    }
}

/// Reads the directory of a table, the list of its blocks. Returns `None` if it is damaged or incomplete.
fn load_directory<B: Backing>(backing: &B, file: &B::File) -> Result<Option<Directory>> {
    let file_bytes = backing.attr_of_file_now(file)?.size;
    // The trailer is at the end of the file, and says how long the directory before it is.
    let Some(trailer_position) = file_bytes.checked_sub(TRAILER_BYTES) else {
        return Ok(None);
    };
    let mut trailer = [0; TRAILER_BYTES as usize];
    if backing.read_at(file, &mut trailer, trailer_position)? < trailer.len() {
        return Ok(None);
    }
    let Some(directory_bytes) = Directory::directory_bytes(&trailer, file_bytes) else {
        return Ok(None);
    };
    let mut tail = vec![0; (directory_bytes + TRAILER_BYTES) as usize];
    let count = backing.read_at(file, &mut tail, trailer_position - directory_bytes)?;
    if count < tail.len() {
        return Ok(None);
    }
    Ok(Directory::decode(&tail, file_bytes))
}

/// Writes a table under a temporary name. All layers come before all spans, each kind in its order.
pub(crate) struct TableWriter<'a, B: Backing> {
    backing: &'a B,
    dir: &'a B::Inode,
    file: B::File,
    temporary_name: String,
    position: u64,
    directory: Directory,
    layers: LayerEncoder,
    /// Bounds of the layers in the present block.
    current: Option<BlockBounds>,
    spans: SpanEncoder,
    first_span: Option<u64>,
}

/// Bounds of the layers in a block that is not yet written.
#[derive(Clone, Copy)]
struct BlockBounds {
    /// Offset in the file of the first byte.
    lowest: u64,
    /// End in the file of the last byte.
    highest: u64,
    /// Position in the index of the last frame.
    last: u64,
}

impl<'a, B: Backing> TableWriter<'a, B> {
    /// Begins a table of a part of an index, under a temporary name. `turn` selects its lane, the server of its data.
    /// `level` is how often its contents were merged.
    pub(crate) fn create(
        backing: &'a B,
        dir: &'a B::Inode,
        level: u8,
        part: Range<u64>,
        turn: u64,
    ) -> Result<Self> {
        let random = getrandom::u64().map_err(|_| Errno::IO)?;
        let temporary_name = format!("new-{random:016x}");
        let caller = own::own_caller();
        let name = OsStr::new(&temporary_name);
        let (_, file, _) =
            backing.create_placed(&caller, dir, name, 0o600, PlacementHint::Turn(turn))?;
        Ok(Self {
            backing,
            dir,
            file,
            temporary_name,
            position: 0,
            directory: Directory {
                level,
                from: part.start,
                to: part.end,
                ..Directory::default()
            },
            layers: LayerEncoder::default(),
            current: None,
            spans: SpanEncoder::default(),
            first_span: None,
        })
    }

    /// Adds a layer (pieces of one change at equal distances), and writes the block if it is full.
    pub(crate) fn push_layer(&mut self, layer: &Layer) -> Result<()> {
        let span = layer.run.span();
        let ChangeKey { epoch, frame, .. } = layer.key;
        let bounds = self.current.get_or_insert(BlockBounds {
            lowest: span.start,
            highest: span.end,
            last: frame,
        });
        bounds.highest = bounds.highest.max(span.end);
        bounds.last = bounds.last.max(frame);
        self.record_epoch(epoch);
        // Zeros lie in no log, and never make the file longer.
        if layer.location.is_some() {
            self.directory.extend_written_bounds(layer);
        }
        self.layers.push(layer);
        if self.layers.is_full() {
            self.finish_layer_block()?;
        }
        Ok(())
    }

    /// Writes the present block of layers (pieces of changes), if it has any, and adds it to the directory, the list of
    /// blocks.
    fn finish_layer_block(&mut self) -> Result<()> {
        let (Some(bytes), Some(bounds)) = (self.layers.finish_block(), self.current.take()) else {
            return Ok(());
        };
        let BlockBounds {
            lowest,
            highest,
            last,
        } = bounds;
        let last_block = self.directory.layers.last();
        let reach = last_block.map_or(highest, |block| block.reach.max(highest));
        debug_assert!(
            last_block.is_none_or(|block| block.lowest <= lowest),
            "blocks are in order of their first bytes"
        );
        debug_assert!(lowest <= highest && highest <= reach);
        let location = self.write_block(&bytes)?;
        self.directory.layers.push(LayerBlock {
            location,
            lowest,
            highest,
            last,
            reach,
        });
        Ok(())
    }

    /// Adds a span, and writes the block if it is full. No layer may follow.
    pub(crate) fn push_span(&mut self, frame: u64, span: &Span) -> Result<()> {
        self.finish_layer_block()?;
        self.first_span.get_or_insert(frame);
        self.spans.push(frame, span);
        if self.spans.is_full() {
            self.finish_span_block()?;
        }
        Ok(())
    }

    /// Writes the present block of spans, if it has any.
    fn finish_span_block(&mut self) -> Result<()> {
        let (Some(bytes), Some(first)) = (self.spans.finish_block(), self.first_span.take()) else {
            return Ok(());
        };
        let location = self.write_block(&bytes)?;
        let last_block = self.directory.spans.last();
        debug_assert!(
            last_block.is_none_or(|block| block.first < first),
            "blocks are in order of their frames"
        );
        self.directory.spans.push(SpanBlock { location, first });
        Ok(())
    }

    /// Sets the effect of the cuts and growths in the part.
    pub(crate) fn set_length_changes(&mut self, length_changes: StoredLengthChanges) {
        self.directory.length_changes = length_changes;
    }

    /// Notes the epoch of a change in the part.
    pub(crate) fn record_epoch(&mut self, epoch: u64) {
        self.directory.last_epoch = self.directory.last_epoch.max(epoch);
    }

    /// Writes a block after those before it.
    fn write_block(&mut self, bytes: &[u8]) -> Result<BlockLocation> {
        let location = BlockLocation {
            position: self.position,
            bytes: bytes.len() as u32,
            checksum: crc32c::crc32c(bytes).to_le_bytes(),
        };
        own::write_all(self.backing, &self.file, bytes, self.position)?;
        self.position += bytes.len() as u64;
        Ok(location)
    }

    /// Writes the last blocks and the directory, the list of blocks. Then gives the table its name. Readers find it
    /// from then on.
    pub(crate) fn finish(mut self, writer: &Writer) -> Result<()> {
        self.finish_layer_block()?;
        self.finish_span_block()?;
        debug_assert_eq!(
            self.directory.total_block_bytes(),
            self.position,
            "blocks follow each other"
        );
        let mut tail = Vec::new();
        self.directory.encode(&mut tail);
        own::write_all(self.backing, &self.file, &tail, self.position)?;
        let name = writer.table_name(&(self.directory.from..self.directory.to));
        self.backing.rename(
            self.dir,
            OsStr::new(&self.temporary_name),
            self.dir,
            OsStr::new(&name),
            RenameFlags::empty(),
        )
    }

    /// Removes the unfinished table.
    pub(crate) fn abandon(self) {
        let _ = self
            .backing
            .unlink(self.dir, OsStr::new(&self.temporary_name));
    }
}
