//! A sorted index: what frames of one index say, by where it is in the file, so that a reader loads only what it needs.
//!
//! ```text
//! blocks of layers   each about 64 KiB, sorted by the first byte in the file
//! blocks of spans    as the frames stood in the index: place and checksums of their bytes
//! directory          lowest and highest byte, last frame, place and checksum of each block; what its cuts left
//! u32 bytes of the directory, u32 CRC32C of it, "FIRNSORT"
//! ```
//!
//! It stands for bytes FROM to TO of the index, as its name says. It is made from the index and can be made again, so
//! its sync is not waited for. A table that is not whole is not used, nor is a damaged block.
//!
//! Invariants
//! * It never changes, and two of the same name have the same bytes.
//! * Layers are sorted by first byte, then by key; spans by frame.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use firn_backing::lock::Mutex;
use firn_backing::{Access, Backing, Errno, Placing, RenameFlags, Result};
use firn_hosts::own;
use quick_cache::sync::Cache;
use serde::{Deserialize, Serialize};

use crate::block::{BLOCK_BYTES, LayerDecoder, LayerEncoder, SpanEncoder, decode_spans};
use crate::cut::{Growths, Limit, Limits};
use crate::frame::{Cut, Span};
use crate::names::Writer;
use crate::resolve::{Key, Layer, Layers, LengthChanges, WriterId};
use crate::run::FILE_BYTES_MAX;

const MAGIC: [u8; 8] = *b"FIRNSORT";
const TRAILER_BYTES: u64 = 16;
/// 2^20 blocks of 64 KiB have some 10^10 pieces.
const DIRECTORY_BYTES_MAX: u64 = 64 << 20;
/// One entry may reach beyond the end that a block is to have.
const BLOCK_BYTES_MAX: u64 = 2 * BLOCK_BYTES as u64;

/// What is in memory of sorted indexes, of all files.
pub(crate) struct BlockCache {
    blocks: Cache<PartId, Arc<[u8]>, Weight>,
    /// Spans that blocks had: each piece that is read needs its own.
    spans: Cache<PartId, Arc<Span>, Weight>,
}

/// The table as this process has numbered it, and a block's position in it or a span's frame.
type PartId = (u64, u64);

#[derive(Clone)]
struct Weight;

impl quick_cache::Weighter<PartId, Arc<[u8]>> for Weight {
    fn weight(&self, _: &PartId, block: &Arc<[u8]>) -> u64 {
        block.len() as u64
    }
}

impl quick_cache::Weighter<PartId, Arc<Span>> for Weight {
    fn weight(&self, _: &PartId, span: &Arc<Span>) -> u64 {
        (size_of::<Span>() + 4 * span.checksums.len()) as u64
    }
}

impl BlockCache {
    /// With at most `bytes` bytes.
    pub(crate) fn new(bytes: u64) -> Self {
        let for_spans = bytes / 8;
        let for_blocks = bytes - for_spans;
        let blocks = for_blocks / BLOCK_BYTES as u64;
        let spans = for_spans / size_of::<Span>() as u64;
        Self {
            blocks: Cache::with_weighter(blocks as usize, for_blocks, Weight),
            spans: Cache::with_weighter(spans as usize, for_spans, Weight),
        }
    }
}

/// What is in a table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Directory {
    /// How often what it has was merged.
    pub level: u8,
    /// The part of the index that it stands for.
    pub from: u64,
    /// Its end.
    pub to: u64,
    /// The largest epoch of a change.
    pub last_epoch: u64,
    /// The first frame that wrote bytes.
    pub first: u64,
    /// The last one.
    pub last: u64,
    /// One after the last byte of the file that was written; 0 if none was.
    pub end: u64,
    /// What its cuts left.
    pub cuts: Cuts,
    /// Blocks of layers.
    pub layers: Vec<LayerBlock>,
    /// Blocks of spans.
    pub spans: Vec<SpanBlock>,
}

/// The effect of the cuts and growths in a part of an index.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cuts {
    /// Where the plain file ends, if there is a cut.
    pub base: Option<u64>,
    /// Where what hosts wrote ends.
    pub limits: BTreeMap<Writer, Limits>,
    /// What made the file longer.
    pub growths: Growths,
}

impl Cuts {
    /// Takes a cut of `writer`, whose frame begins at `frame` in its index.
    pub(crate) fn add_cut(&mut self, writer: &Writer, frame: u64, cut: Cut) {
        let len = cut.len;
        self.limit_base(len);
        let own = (writer.clone(), frame);
        for (writer, until) in cut.seen.into_iter().chain([own]) {
            self.limit(writer, Limit { until, len });
        }
    }

    fn limit_base(&mut self, len: u64) {
        self.base = Some(self.base.map_or(len, |base| base.min(len)));
    }

    fn limit(&mut self, writer: Writer, limit: Limit) {
        if limit.until > 0 {
            self.limits.entry(writer).or_default().add(limit);
        }
    }

    /// Takes what those of another part make of it.
    pub(crate) fn merge(&mut self, other: &Self) {
        if let Some(base) = other.base {
            self.limit_base(base);
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

    /// Tells them of a file; they are of an index of `writer`.
    pub(crate) fn apply_to(&self, writer: WriterId, length_changes: &mut LengthChanges) {
        if let Some(base) = self.base {
            length_changes.limit_base(base);
        }
        for (of, limits) in &self.limits {
            let of = of.id();
            limits
                .iter()
                .for_each(|limit| length_changes.limit(of, limit));
        }
        for growth in self.growths.iter() {
            length_changes.grow(writer, growth);
        }
    }

    fn is_valid(&self) -> bool {
        let is_limited =
            |(writer, limits): (&Writer, &Limits)| writer.is_valid() && limits.is_valid();
        self.base <= Some(FILE_BYTES_MAX)
            && self.limits.iter().all(is_limited)
            && self.growths.is_valid()
    }
}

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockPlace {
    /// In the table.
    pub position: u64,
    /// How many bytes.
    pub bytes: u32,
    /// CRC32C of them.
    pub checksum: [u8; 4],
}

/// A block of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerBlock {
    /// Where it is.
    pub place: BlockPlace,
    /// First byte of the file of any of its layers.
    pub lowest: u64,
    /// One after the last byte of any of them.
    pub highest: u64,
    /// The last frame of any of them.
    pub last: u64,
    /// One after the last byte of any layer in this block or one before it.
    pub reach: u64,
}

/// A block of spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpanBlock {
    /// Where it is.
    pub place: BlockPlace,
    /// The first frame that it has.
    pub first: u64,
}

impl Directory {
    /// Bytes of all blocks.
    fn blocks_bytes(&self) -> u64 {
        let layers = self.layers.iter().map(|block| block.place);
        let spans = self.spans.iter().map(|block| block.place);
        layers
            .chain(spans)
            .map(|place| u64::from(place.bytes))
            .sum()
    }

    /// Appends the end of a table.
    fn encode(&self, bytes: &mut Vec<u8>) {
        let body = postcard::to_allocvec(self).expect("memory is all that it takes");
        let len = u32::try_from(body.len()).expect("blocks are large");
        bytes.extend_from_slice(&body);
        bytes.extend_from_slice(&len.to_le_bytes());
        bytes.extend_from_slice(&crc32c::crc32c(&body).to_le_bytes());
        bytes.extend_from_slice(&MAGIC);
    }

    /// Bytes of the directory before a trailer; none if it is no trailer of a file of this size.
    fn bytes_of_trailer(trailer: &[u8], file_bytes: u64) -> Option<u64> {
        let body = u64::from(u32::from_le_bytes(trailer.get(..4)?.try_into().ok()?));
        let fits = body <= DIRECTORY_BYTES_MAX && body + TRAILER_BYTES <= file_bytes;
        (trailer.get(8..)? == MAGIC && fits).then_some(body)
    }

    /// Reads what `encode` appended to a table of `file_bytes`; none if that is damaged.
    pub fn decode(tail: &[u8], file_bytes: u64) -> Option<Self> {
        let (body, trailer) = tail.split_at_checked(tail.len().checked_sub(16)?)?;
        if Self::bytes_of_trailer(trailer, file_bytes)? != body.len() as u64
            || crc32c::crc32c(body).to_le_bytes() != trailer[4..8]
        {
            return None;
        }
        let (found, rest) = postcard::take_from_bytes::<Self>(body).ok()?;
        let data_bytes = file_bytes - tail.len() as u64;
        (rest.is_empty() && found.is_valid(data_bytes)).then_some(found)
    }

    fn is_valid(&self, data_bytes: u64) -> bool {
        let layers = self.layers.iter().map(|block| block.place);
        let mut places = layers.chain(self.spans.iter().map(|block| block.place));
        let mut reach = 0;
        let has_order = self.layers.iter().all(|block| {
            reach = block.highest.max(reach);
            block.reach == reach && block.lowest < block.highest
        });
        self.from < self.to
            && self.end <= FILE_BYTES_MAX
            && self.first <= self.last
            && has_order
            && self.layers.is_sorted_by_key(|block| block.lowest)
            && self.spans.is_sorted_by_key(|block| block.first)
            && self.cuts.is_valid()
            && places.all(|place| place.is_valid(data_bytes))
    }

    fn note_written(&mut self, layer: &Layer) {
        let frame = layer.key.frame;
        let is_first = self.end == 0;
        self.first = if is_first {
            frame
        } else {
            self.first.min(frame)
        };
        self.last = self.last.max(frame);
        self.end = self.end.max(layer.run.span().end);
    }
}

impl BlockPlace {
    fn is_valid(self, data_bytes: u64) -> bool {
        let end = self.position.checked_add(u64::from(self.bytes));
        u64::from(self.bytes) <= BLOCK_BYTES_MAX && end.is_some_and(|end| end <= data_bytes)
    }

    fn holds(self, bytes: &[u8]) -> bool {
        crc32c::crc32c(bytes).to_le_bytes() == self.checksum
    }
}

/// A table that is open.
pub(crate) struct Table<B: Backing> {
    id: u64,
    pub(crate) name: String,
    pub(crate) writer: WriterId,
    file: B::File,
    pub(crate) directory: Directory,
    /// A block of it was not as it was written.
    is_damaged: AtomicBool,
    /// One after the last byte that cuts left, for those that were asked for last.
    end: Mutex<Option<(Vec<Limit>, u64)>>,
}

/// Why a sorted index, or what is told by it, cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TableError {
    /// It is damaged: the index itself is to be read in its place.
    Damaged,
    /// The change that is asked for is in none that is used any more.
    Unknown,
    /// The backing failed.
    Backing(Errno),
}

pub(crate) type TableResult<T> = std::result::Result<T, TableError>;

impl From<Errno> for TableError {
    fn from(errno: Errno) -> Self {
        Self::Backing(errno)
    }
}

/// Of what is still damaged, or unknown, after all was read anew.
impl From<TableError> for Errno {
    fn from(error: TableError) -> Self {
        match error {
            TableError::Damaged | TableError::Unknown => Self::IO,
            TableError::Backing(errno) => errno,
        }
    }
}

impl<B: Backing> Table<B> {
    /// Opens one that is whole.
    pub(crate) fn open(
        base: &B,
        dir: &B::Inode,
        writer: &Writer,
        part: Range<u64>,
    ) -> Result<Option<Self>> {
        static OPENED: AtomicU64 = AtomicU64::new(0);
        let name = writer.table_name(&part);
        let Some(inode) = own::find_file(base, dir, &name)? else {
            return Ok(None);
        };
        let file = base.open(&inode, Access::Read)?;
        let Some(directory) = load_directory(base, &file)? else {
            tracing::warn!(name, "a sorted index is not whole: it is read unsorted");
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
            end: Mutex::default(),
        }))
    }

    pub(crate) fn part(&self) -> Range<u64> {
        self.directory.from..self.directory.to
    }

    pub(crate) fn is_damaged(&self) -> bool {
        self.is_damaged.load(Ordering::Acquire)
    }

    /// Whether the change that the key is of is in it.
    pub(crate) fn has(&self, key: Key) -> bool {
        key.writer == self.writer && self.part().contains(&key.frame)
    }

    /// Finds the layers that may have bytes in `range`. False if those are too many.
    pub(crate) fn collect(
        &self,
        base: &B,
        cache: &BlockCache,
        range: &Range<u64>,
        layers: &mut Layers,
    ) -> TableResult<bool> {
        let blocks = &self.directory.layers;
        let first = blocks.partition_point(|block| block.reach <= range.start);
        let overlapping = blocks[first..]
            .iter()
            .take_while(|block| block.lowest < range.end);
        for block in overlapping.filter(|block| block.highest > range.start) {
            let bytes = self.load(base, cache, block.place)?;
            for layer in LayerDecoder::new(bytes, self.writer) {
                let layer = layer.map_err(|_| self.reject())?;
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

    /// The range that a change in this table wrote; `None`: the change is not in the table.
    pub(crate) fn span(
        &self,
        base: &B,
        cache: &BlockCache,
        key: Key,
    ) -> TableResult<Option<Arc<Span>>> {
        let id = (self.id, key.frame);
        if let Some(known) = cache.spans.get(&id) {
            return Ok(Some(known));
        }
        let blocks = &self.directory.spans;
        let after = blocks.partition_point(|block| block.first <= key.frame);
        let Some(block) = after.checked_sub(1).map(|number| &blocks[number]) else {
            return Ok(None);
        };
        let bytes = self.load(base, cache, block.place)?;
        for found in decode_spans(&bytes) {
            let (frame, span) = found.map_err(|_| self.reject())?;
            if frame == key.frame {
                let span = Arc::new(span);
                cache.spans.insert(id, Arc::clone(&span));
                return Ok(Some(span));
            }
        }
        Ok(None)
    }

    /// One after the last byte that cuts left of what was written, if that is known without reading.
    pub(crate) fn end(&self, limits: Option<&Limits>) -> Option<u64> {
        let Directory {
            first, last, end, ..
        } = self.directory;
        let Some(limits) = limits else {
            return Some(end);
        };
        // Later frames end nowhere before earlier ones.
        if limits.of(first) == limits.of(last) {
            return Some(end.min(limits.of(last)));
        }
        let known = self.end.lock();
        let known = known.as_ref()?;
        (known.0 == limits.between(first, last)).then_some(known.1)
    }

    /// Finds it, and knows it from then on.
    pub(crate) fn find_end(&self, base: &B, limits: Option<&Limits>) -> TableResult<()> {
        let Some(limits) = limits.filter(|limits| self.end(Some(limits)).is_none()) else {
            return Ok(());
        };
        let mut end = 0;
        for block in &self.directory.layers {
            if block.highest.min(limits.of(block.last)) <= end {
                continue;
            }
            for layer in LayerDecoder::new(self.read(base, block.place)?, self.writer) {
                let layer = layer.map_err(|_| self.reject())?;
                if layer.place.is_some() {
                    end = end.max(layer.run.span().end.min(limits.of(layer.key.frame)));
                }
            }
        }
        let Directory { first, last, .. } = self.directory;
        *self.end.lock() = Some((limits.between(first, last).to_vec(), end));
        Ok(())
    }

    /// A block, from memory if it is there.
    fn load(&self, base: &B, cache: &BlockCache, place: BlockPlace) -> TableResult<Arc<[u8]>> {
        let id = (self.id, place.position);
        if let Some(known) = cache.blocks.get(&id) {
            return Ok(known);
        }
        let block = self.read(base, place)?;
        cache.blocks.insert(id, Arc::clone(&block));
        Ok(block)
    }

    fn read(&self, base: &B, place: BlockPlace) -> TableResult<Arc<[u8]>> {
        let mut block = vec![0; place.bytes as usize];
        let count = base.read_at(&self.file, &mut block, place.position)?;
        if count < block.len() || !place.holds(&block) {
            return Err(self.reject());
        }
        Ok(block.into())
    }

    /// It is not to be used any more.
    fn reject(&self) -> TableError {
        self.is_damaged.store(true, Ordering::Release);
        tracing::warn!(
            name = self.name,
            "a sorted index is damaged: it is read unsorted"
        );
        TableError::Damaged
    }

    /// All its layers, in order, without filling the cache.
    pub(crate) fn layers<'a>(
        &'a self,
        base: &'a B,
    ) -> impl Iterator<Item = TableResult<Layer>> + 'a {
        let blocks = self.directory.layers.iter();
        blocks.flat_map(move |block| {
            let (block, failure) = match self.read(base, block.place) {
                Ok(block) => (Some(block), None),
                Err(error) => (None, Some(Err(error))),
            };
            let decoded = block.map(|block| LayerDecoder::new(block, self.writer));
            let decoded = decoded.into_iter().flatten();
            let decoded = decoded.map(|layer| layer.map_err(|_| self.reject()));
            failure.into_iter().chain(decoded)
        })
    }

    /// All its spans, each with its frame.
    pub(crate) fn spans<'a>(
        &'a self,
        base: &'a B,
    ) -> impl Iterator<Item = TableResult<(u64, Span)>> + 'a {
        let blocks = self.directory.spans.iter();
        blocks.flat_map(move |block| {
            let decoded: Vec<TableResult<(u64, Span)>> = match self.read(base, block.place) {
                Ok(block) => decode_spans(&block)
                    .map(|span| span.map_err(|_| self.reject()))
                    .collect(),
                Err(error) => vec![Err(error)],
            };
            decoded
        })
    }
}

fn load_directory<B: Backing>(base: &B, file: &B::File) -> Result<Option<Directory>> {
    let file_bytes = base.attr_of_file_now(file)?.size;
    let Some(trailer_at) = file_bytes.checked_sub(TRAILER_BYTES) else {
        return Ok(None);
    };
    let mut trailer = [0; TRAILER_BYTES as usize];
    if base.read_at(file, &mut trailer, trailer_at)? < trailer.len() {
        return Ok(None);
    }
    let Some(bytes) = Directory::bytes_of_trailer(&trailer, file_bytes) else {
        return Ok(None);
    };
    let mut tail = vec![0; (bytes + TRAILER_BYTES) as usize];
    let count = base.read_at(file, &mut tail, trailer_at - bytes)?;
    let directory = Directory::decode(&tail, file_bytes);
    Ok(directory.filter(|_| count == tail.len()))
}

/// Makes a table. Layers and spans come in their orders.
pub(crate) struct TableWriter<'a, B: Backing> {
    base: &'a B,
    dir: &'a B::Inode,
    file: B::File,
    working: String,
    position: u64,
    directory: Directory,
    layers: LayerEncoder,
    /// First and last byte in the file, and last frame, of the block that is made.
    current: Option<(u64, u64, u64)>,
    spans: SpanEncoder,
    first_span: Option<u64>,
}

impl<'a, B: Backing> TableWriter<'a, B> {
    /// For this part of an index.
    pub(crate) fn create(
        base: &'a B,
        dir: &'a B::Inode,
        level: u8,
        part: Range<u64>,
        turn: u64,
    ) -> Result<Self> {
        let random = getrandom::u64().map_err(|_| Errno::IO)?;
        let working = format!("new-{random:016x}");
        let me = own::own_caller();
        let name = OsStr::new(&working);
        let made = base.create_placed(&me, dir, name, 0o600, Placing::Turn(turn))?;
        Ok(Self {
            base,
            dir,
            file: made.1,
            working,
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

    pub(crate) fn push_layer(&mut self, layer: &Layer) -> Result<()> {
        let span = layer.run.span();
        let Key { epoch, frame, .. } = layer.key;
        let (lowest, highest, last) = self.current.unwrap_or((span.start, span.end, frame));
        self.current = Some((lowest, highest.max(span.end), last.max(frame)));
        self.note_epoch(epoch);
        if layer.place.is_some() {
            self.directory.note_written(layer);
        }
        self.layers.push(layer);
        if self.layers.is_full() {
            self.end_layers()?;
        }
        Ok(())
    }

    fn end_layers(&mut self) -> Result<()> {
        let (Some(bytes), Some(block)) = (self.layers.take(), self.current.take()) else {
            return Ok(());
        };
        let (lowest, highest, last) = block;
        let before = self.directory.layers.last();
        let reach = before.map_or(highest, |before| before.reach.max(highest));
        debug_assert!(
            before.is_none_or(|before| before.lowest <= lowest),
            "blocks are in order of their first bytes"
        );
        debug_assert!(lowest <= highest && highest <= reach);
        let place = self.write(&bytes)?;
        self.directory.layers.push(LayerBlock {
            place,
            lowest,
            highest,
            last,
            reach,
        });
        Ok(())
    }

    /// After all layers.
    pub(crate) fn push_span(&mut self, frame: u64, span: &Span) -> Result<()> {
        self.end_layers()?;
        self.first_span.get_or_insert(frame);
        self.spans.push(frame, span);
        if self.spans.is_full() {
            self.end_spans()?;
        }
        Ok(())
    }

    fn end_spans(&mut self) -> Result<()> {
        let (Some(bytes), Some(first)) = (self.spans.take(), self.first_span.take()) else {
            return Ok(());
        };
        let place = self.write(&bytes)?;
        let before = self.directory.spans.last();
        debug_assert!(
            before.is_none_or(|before| before.first < first),
            "blocks are in order of their frames"
        );
        self.directory.spans.push(SpanBlock { place, first });
        Ok(())
    }

    /// What the cuts in the part make of the file.
    pub(crate) fn set_cuts(&mut self, cuts: Cuts) {
        self.directory.cuts = cuts;
    }

    /// A change had this epoch.
    pub(crate) fn note_epoch(&mut self, epoch: u64) {
        self.directory.last_epoch = self.directory.last_epoch.max(epoch);
    }

    fn write(&mut self, bytes: &[u8]) -> Result<BlockPlace> {
        let place = BlockPlace {
            position: self.position,
            bytes: bytes.len() as u32,
            checksum: crc32c::crc32c(bytes).to_le_bytes(),
        };
        own::write_all(self.base, &self.file, bytes, self.position)?;
        self.position += bytes.len() as u64;
        Ok(place)
    }

    /// Gives the table its name: from then on readers find it.
    pub(crate) fn finish(mut self, writer: &Writer) -> Result<()> {
        self.end_layers()?;
        self.end_spans()?;
        debug_assert_eq!(
            self.directory.blocks_bytes(),
            self.position,
            "blocks follow each other"
        );
        let mut end = Vec::new();
        self.directory.encode(&mut end);
        own::write_all(self.base, &self.file, &end, self.position)?;
        let name = writer.table_name(&(self.directory.from..self.directory.to));
        self.base.rename(
            self.dir,
            OsStr::new(&self.working),
            self.dir,
            OsStr::new(&name),
            RenameFlags::empty(),
        )
    }

    /// Takes away what was made so far.
    pub(crate) fn abandon(self) {
        let _ = self.base.unlink(self.dir, OsStr::new(&self.working));
    }
}
