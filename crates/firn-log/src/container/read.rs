//! Reads bytes of logs, which must be as they were written.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use firn_backing::{Access, Backing, Errno, PageAdvice, Result};
use firn_hosts::own;

use super::ahead::{AHEAD_BYTES_MIN, GAP_BYTES_MAX, Window};
use super::{Container, Walk};
use crate::behind::read_whole;
use crate::frame::{CHECKED_BYTES, Span};
use crate::index_reader::read_exact;
use crate::locate::{Check, Holder, Locating, Room};
use crate::resolve::{Key, Segment, Source, WriterId};
use crate::seal::Lost;
use crate::table::{TableError, TableResult};

/// Blocks whose checksums were right that are remembered.
const CHECKED_MAX: usize = 1 << 16;

/// Bytes of a log that are read at once.
const TOGETHER_BYTES_MAX: u64 = 1 << 20;

/// Whether the pages of logs are kept in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pages {
    Keep,
    /// The bytes move to the plain file next, and the logs go: their pages would only take the room of those that it
    /// needs.
    Forget,
}

impl Pages {
    /// A part of a log was read.
    fn note_read<B: Backing>(self, base: &B, file: &B::File, offset: u64, len: usize) {
        if self == Self::Forget {
            base.advise(file, offset..offset + len as u64, PageAdvice::Forget);
        }
    }
}

/// Bytes of a change that are to be read.
struct Wanted<'a> {
    key: Key,
    /// In the log.
    position: u64,
    buf: &'a mut [u8],
}

/// Where the bytes of a change are.
struct KeyLog<B: Backing> {
    /// None if it is gone.
    file: Option<Arc<B::File>>,
    span: Arc<Span>,
    /// Blocks that were given up.
    lost: BTreeSet<u64>,
    is_own: bool,
}

/// What a list says of the bytes of a block.
#[derive(Clone, Copy, Debug)]
enum BlockHolder {
    /// They are in the file with this index among those of the list.
    File(usize),
    /// The bytes have to be asked for.
    ToBeAsked,
    /// Nothing: firnd reads them.
    Unlisted,
}

/// A change whose bytes are listed.
struct ListedChange<B: Backing> {
    source: KeyLog<B>,
    /// Its block that was listed last, in which its next piece mostly lies.
    last_block: Option<(u64, BlockHolder)>,
}

/// The bytes of a range that lie in one block. Positions count from the first byte that the change wrote.
struct BlockPart {
    block: u64,
    /// Where the block begins.
    block_start: u64,
    bytes: Range<u64>,
}

impl BlockPart {
    /// The parts of a range, in order.
    fn split(range: Range<u64>) -> impl Iterator<Item = Self> {
        let blocks = range.start / CHECKED_BYTES..range.end.div_ceil(CHECKED_BYTES);
        blocks.map(move |block| {
            let block_start = block * CHECKED_BYTES;
            let end = (block_start + CHECKED_BYTES).min(range.end);
            Self {
                block,
                block_start,
                bytes: block_start.max(range.start)..end,
            }
        })
    }
}

/// Where `len` bytes from `position` of the log on are in a span; EIO if it does not have them.
fn range_in_span(span: &Span, position: u64, len: u64) -> Result<Range<u64>> {
    let start = position.checked_sub(span.position).ok_or(Errno::IO)?;
    let end = start + len;
    if end > span.bytes {
        return Err(Errno::IO);
    }
    Ok(start..end)
}

/// Bytes of a block that has not been checked.
struct Unchecked<'a> {
    key: Key,
    span: Arc<Span>,
    /// Block of the span.
    block: u64,
    /// In the block.
    position: usize,
    buf: &'a mut [u8],
}

/// Bytes of a log that are to be read.
struct LogPiece<'a, B: Backing> {
    /// Writer, log, and place in the log.
    place: (WriterId, u32, u64),
    /// Up to here the log has bytes that are as they were written.
    limit: u64,
    file: Arc<B::File>,
    buf: &'a mut [u8],
}

impl<B: Backing> LogPiece<'_, B> {
    /// End in the log.
    fn end(&self) -> u64 {
        self.place.2 + self.buf.len() as u64
    }
}

/// A part of a file in a block of a log that cannot be read.
pub(crate) struct Unreadable {
    /// In the file.
    pub(crate) file: Range<u64>,
    pub(crate) host: String,
    pub(crate) log: String,
    /// Where the block begins in the log.
    pub(crate) block: u64,
}

/// Whether the bytes of a piece are read with those before it, which come earlier in the same log.
fn goes_with<B: Backing>(together: &[LogPiece<'_, B>], piece: &LogPiece<'_, B>) -> bool {
    let (Some(first), Some(last)) = (together.first(), together.last()) else {
        return true;
    };
    let (writer, log, _) = last.place;
    (writer, log) == (piece.place.0, piece.place.1)
        && piece.place.2 <= last.end() + GAP_BYTES_MAX
        && piece.end() <= first.place.2 + TOGETHER_BYTES_MAX
}

impl<B: Backing> Container<B> {
    /// Reads until `buf` is full or the file ends. `below` reads the file as it was when the container was made, into
    /// a buffer from an offset, and says how many bytes it has there.
    pub fn read(
        &self,
        base: &B,
        below: &dyn Fn(&mut [u8], u64) -> Result<usize>,
        buf: &mut [u8],
        offset: u64,
    ) -> Result<usize> {
        let mut walk = Walk::new(offset..offset.saturating_add(buf.len() as u64));
        let mut rest = buf;
        let mut done = 0;
        loop {
            let segments = self.find_next(base, &mut walk)?;
            if segments.is_empty() {
                return Ok(done);
            }
            let mut wanted = Vec::new();
            for segment in segments {
                let len = (segment.file.end - segment.file.start) as usize;
                let (part, later) = rest.split_at_mut(len);
                rest = later;
                done += len;
                match segment.source {
                    Source::Hole | Source::Zeros => part.fill(0),
                    Source::Plain => {
                        let count = below(part, segment.file.start)?;
                        // Cut by a program that does not know of the container.
                        part[count..].fill(0);
                    }
                    Source::Log { position, key, .. } => wanted.push(Wanted {
                        key,
                        position,
                        buf: part,
                    }),
                }
            }
            self.read_logs(base, wanted, Pages::Keep)?;
        }
    }

    /// Finds where `range` lies, as far as there is room. `below` does so in the file as it was when the container was
    /// made.
    pub(crate) fn locate(
        &self,
        base: &B,
        below: &dyn Fn(Range<u64>, &mut Locating) -> Result<Room>,
        range: Range<u64>,
        found: &mut Locating,
    ) -> Result<Room> {
        let mut walk = Walk::in_steps(range);
        let mut changes = BTreeMap::new();
        loop {
            let segments = self.find_next(base, &mut walk)?;
            if segments.is_empty() {
                return Ok(Room::Left);
            }
            for Segment { file, source } in segments {
                let room = match source {
                    Source::Hole | Source::Zeros => found.skip(file),
                    Source::Plain => below(file, found)?,
                    Source::Log { position, key, .. } => {
                        let change = match changes.entry(key) {
                            Entry::Occupied(known) => known.into_mut(),
                            Entry::Vacant(new) => new.insert(ListedChange {
                                source: self.find_log(base, key)?,
                                last_block: None,
                            }),
                        };
                        self.locate_in_log(base, (key, change), position, file, found)?
                    }
                };
                if room == Room::Full {
                    return Ok(room);
                }
            }
        }
    }

    /// Finds the places of a change's bytes, which begin at `position` of its log. It goes block by block: some
    /// blocks were given up, others have to be read first.
    fn locate_in_log(
        &self,
        base: &B,
        (key, change): (Key, &mut ListedChange<B>),
        position: u64,
        range: Range<u64>,
        found: &mut Locating,
    ) -> Result<Room> {
        let ListedChange { source, last_block } = change;
        let in_span = range_in_span(&source.span, position, range.end - range.start)?;
        let file_start = range.start;
        let start = in_span.start;
        for BlockPart { block, bytes, .. } in BlockPart::split(in_span) {
            let part = file_start + (bytes.start - start)..file_start + (bytes.end - start);
            let holder = match *last_block {
                Some((known, holder)) if known == block => holder,
                _ => {
                    let Some(holder) = self.locate_block(base, key, source, block, found)? else {
                        return Ok(Room::Full);
                    };
                    *last_block = Some((block, holder));
                    holder
                }
            };
            let room = match holder {
                BlockHolder::File(index) => {
                    found.add(part, index, source.span.position + bytes.start)
                }
                BlockHolder::ToBeAsked => found.add_unchecked(part),
                BlockHolder::Unlisted => found.skip(part),
            };
            if room == Room::Full {
                return Ok(room);
            }
        }
        Ok(Room::Left)
    }

    /// What a list says of a block of a change, whose bytes come next; `None`: it ends before them.
    fn locate_block(
        &self,
        base: &B,
        key: Key,
        log: &KeyLog<B>,
        block: u64,
        found: &mut Locating,
    ) -> Result<Option<BlockHolder>> {
        let file = log.file.as_ref().ok_or(Errno::IO)?;
        let position = log.span.position + block * CHECKED_BYTES;
        if log.lost.contains(&position) {
            return Ok(Some(BlockHolder::Unlisted));
        }
        if !log.is_own && !self.is_checked(key, block) {
            match found.take_block(key.writer) {
                Check::Now => {
                    let bytes = self.load_block(base, key, &log.span, block, Pages::Keep)?;
                    if bytes.is_none() {
                        // A read of the damaged one through firnd reports the error.
                        return Ok(Some(BlockHolder::Unlisted));
                    }
                }
                Check::Later => return Ok(Some(BlockHolder::ToBeAsked)),
                Check::Enough => return Ok(None),
            }
        }
        let holder = Holder::Log(self.number, key.writer, log.span.log);
        let index = found.index_of(base, holder, file);
        Ok(Some(index.map_or(BlockHolder::Unlisted, BlockHolder::File)))
    }

    /// Whether a block of a change was compared with its checksum, and was right.
    fn is_checked(&self, key: Key, block: u64) -> bool {
        self.view.lock().checked.contains(&(key, block))
    }

    /// Reads segments that are in logs, one after the other, into `buf`, which has their size. They are not read again.
    pub(crate) fn read_segments(
        &self,
        base: &B,
        segments: &[Segment],
        buf: &mut [u8],
    ) -> Result<()> {
        let mut rest = buf;
        let mut wanted = Vec::with_capacity(segments.len());
        for Segment { file, source } in segments {
            let Source::Log { position, key, .. } = *source else {
                return Err(Errno::INVAL);
            };
            let (buf, later) = rest.split_at_mut((file.end - file.start) as usize);
            rest = later;
            wanted.push(Wanted { key, position, buf });
        }
        self.read_logs(base, wanted, Pages::Forget)
    }

    /// Reads bytes of changes, which must be as they were written. Those that were given up as lost are zeros. What lies
    /// near each other in a log is read at once, whatever its order in the file is.
    fn read_logs(&self, base: &B, wanted: Vec<Wanted<'_>>, pages: Pages) -> Result<()> {
        let mut logs: BTreeMap<Key, KeyLog<B>> = BTreeMap::new();
        let mut pieces = Vec::with_capacity(wanted.len());
        let mut unchecked = Vec::new();
        for wanted in wanted {
            let log = match logs.entry(wanted.key) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(self.find_log(base, wanted.key)?),
            };
            self.split_blocks(log, wanted, &mut pieces, &mut unchecked)?;
        }
        self.read_unchecked(base, unchecked, pages)?;
        pieces.sort_unstable_by_key(|piece| piece.place);
        let mut together = Vec::new();
        for piece in pieces {
            if !goes_with(&together, &piece) {
                self.read_together(base, std::mem::take(&mut together), pages)?;
            }
            together.push(piece);
        }
        self.read_together(base, together, pages)
    }

    /// Where the bytes of a change are.
    fn find_log(&self, base: &B, key: Key) -> Result<KeyLog<B>> {
        let span = self.find_span(base, key)?;
        Ok(KeyLog {
            file: self.open_log(base, key.writer, span.log)?,
            lost: self.lost_blocks(key.writer, span.log),
            is_own: self.is_own(key.writer),
            span,
        })
    }

    /// Wanted ranges, by block: zeros where the block was given up, else by whether the block was checked.
    fn split_blocks<'a>(
        &self,
        log: &KeyLog<B>,
        wanted: Wanted<'a>,
        pieces: &mut Vec<LogPiece<'a, B>>,
        unchecked: &mut Vec<Unchecked<'a>>,
    ) -> Result<()> {
        let Wanted { key, position, buf } = wanted;
        let span = &log.span;
        let range = range_in_span(span, position, buf.len() as u64)?;
        let mut rest = buf;
        for BlockPart {
            block,
            block_start,
            bytes,
        } in BlockPart::split(range)
        {
            let (part, later) = rest.split_at_mut((bytes.end - bytes.start) as usize);
            rest = later;
            if log.lost.contains(&(span.position + block_start)) {
                part.fill(0);
            } else if log.is_own || self.is_checked(key, block) {
                pieces.push(LogPiece {
                    place: (key.writer, span.log, span.position + bytes.start),
                    limit: span.position + (block_start + CHECKED_BYTES).min(span.bytes),
                    file: log.file.clone().ok_or(Errno::IO)?,
                    buf: part,
                });
            } else {
                unchecked.push(Unchecked {
                    key,
                    span: Arc::clone(span),
                    block,
                    position: (bytes.start - block_start) as usize,
                    buf: part,
                });
            }
        }
        Ok(())
    }

    /// Reads each block whole, once, which its checksum is of.
    fn read_unchecked(
        &self,
        base: &B,
        mut unchecked: Vec<Unchecked<'_>>,
        pages: Pages,
    ) -> Result<()> {
        unchecked.sort_unstable_by_key(|piece| (piece.key, piece.block));
        let is_same = |a: &Unchecked<'_>, b: &Unchecked<'_>| (a.key, a.block) == (b.key, b.block);
        for pieces in unchecked.chunk_by_mut(is_same) {
            let Unchecked {
                key, span, block, ..
            } = &pieces[0];
            let whole = self.load_block(base, *key, span, *block, pages)?;
            // A reader of a part of the block reads the rest next.
            let window = Arc::new(Window {
                start: span.position + block * CHECKED_BYTES,
                bytes: whole.ok_or(Errno::IO)?,
            });
            let id = (self.number, key.writer, span.log);
            self.memory.ahead.keep(id, &window);
            for Unchecked { position, buf, .. } in pieces {
                buf.copy_from_slice(&window.bytes[*position..*position + buf.len()]);
            }
        }
        Ok(())
    }

    /// Reads pieces that lie near each other in one log. Where they follow what was read last, more is read ahead: a
    /// program that reads a file, or its own pieces of it, in order goes through each log in order.
    fn read_together(
        &self,
        base: &B,
        mut pieces: Vec<LogPiece<'_, B>>,
        pages: Pages,
    ) -> Result<()> {
        let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else {
            return Ok(());
        };
        let (writer, log, start) = first.place;
        let end = last.end();
        let limit = last.limit;
        let file = Arc::clone(&first.file);
        let ahead = &self.memory.ahead;
        let id = (self.number, writer, log);
        let window = match ahead.find(id) {
            Some(known) if known.has(start..end) => known,
            _ if pieces.len() == 1 && end - start >= AHEAD_BYTES_MIN => {
                read_exact(base, &file, pieces[0].buf, start)?;
                pages.note_read(base, &file, start, pieces[0].buf.len());
                return Ok(());
            }
            known => {
                let last = known.filter(|known| known.is_followed_by(start));
                let wanted = last.map_or(0, |last| ahead.bytes_after(&last));
                let to = start.saturating_add(wanted).min(limit).max(end);
                let window = Arc::new(Window::read(base, &file, start..to)?);
                pages.note_read(base, &file, start, window.bytes.len());
                ahead.keep(id, &window);
                window
            }
        };
        for piece in pieces {
            let at = (piece.place.2 - window.start) as usize;
            let bytes = window.bytes.get(at..at + piece.buf.len());
            // The end of the log went with the power.
            piece.buf.copy_from_slice(bytes.ok_or(Errno::IO)?);
        }
        Ok(())
    }

    /// A block of a change; none if it is not as it was written.
    fn load_block(
        &self,
        base: &B,
        key: Key,
        span: &Span,
        block: u64,
        pages: Pages,
    ) -> Result<Option<Vec<u8>>> {
        let at = block * CHECKED_BYTES;
        let mut whole = vec![0; CHECKED_BYTES.min(span.bytes - at) as usize];
        let count = match self.open_log(base, key.writer, span.log)? {
            Some(file) => {
                let count = read_whole(base, &file, &mut whole, span.position + at)?;
                pages.note_read(base, &file, span.position + at, count);
                count
            }
            None => 0,
        };
        if count < whole.len() || crc32c::crc32c(&whole) != span.checksums[block as usize] {
            self.tell_damage(&key, span.log, span.position + at);
            return Ok(None);
        }
        let mut view = self.view.lock();
        if view.checked.len() >= CHECKED_MAX {
            view.checked.clear();
        }
        view.checked.insert((key, block));
        Ok(Some(whole))
    }

    /// Blocks of a log that were given up as lost, by where they begin.
    fn lost_blocks(&self, writer: WriterId, log: u32) -> BTreeSet<u64> {
        let view = self.view.lock();
        let Some(seal) = view.seal.as_ref().filter(|seal| !seal.lost.is_empty()) else {
            return BTreeSet::new();
        };
        let tail = view.tails.get(&writer);
        let name = tail.map(|tail| tail.writer.log_name(log));
        name.map_or_else(BTreeSet::new, |name| seal.lost.blocks_of(&name))
    }

    /// The parts of a segment, block by block, that are not as they were written, if it is in a log. `known` are blocks
    /// of which that is known. Where the backing fails nothing is said of them.
    pub(crate) fn find_unreadable(
        &self,
        base: &B,
        segment: &Segment,
        known: &Lost,
    ) -> Result<Vec<Unreadable>> {
        let Source::Log { position, key, .. } = segment.source else {
            return Ok(Vec::new());
        };
        let span = self.find_span(base, key)?;
        let (host, log) = self.log_of(key.writer, span.log)?;
        let start = position.checked_sub(span.position).ok_or(Errno::IO)?;
        let end = start + (segment.file.end - segment.file.start);
        let mut found = Vec::new();
        let parts = BlockPart::split(start..end);
        for part in parts.take_while(|part| part.block_start < span.bytes) {
            let BlockPart { block, bytes, .. } = part;
            let position = span.position + part.block_start;
            let is_lost = known.has_block(&log, position)
                || (!self.is_checked(key, block)
                    && self
                        .load_block(base, key, &span, block, Pages::Keep)?
                        .is_none());
            if !is_lost {
                continue;
            }
            let file_start = segment.file.start;
            found.push(Unreadable {
                file: file_start + (bytes.start - start)..file_start + (bytes.end - start),
                host: host.clone(),
                log: log.clone(),
                block: position,
            });
        }
        Ok(found)
    }

    /// The host that wrote a log, and the log's name.
    fn log_of(&self, writer: WriterId, log: u32) -> Result<(String, String)> {
        let view = self.view.lock();
        let writer = &view.tails.get(&writer).ok_or(TableError::Unknown)?.writer;
        Ok((writer.host().to_owned(), writer.log_name(log)))
    }

    fn tell_damage(&self, key: &Key, log: u32, offset: u64) {
        let name = {
            let view = self.view.lock();
            view.tails
                .get(&key.writer)
                .map(|tail| tail.writer.log_name(log))
        };
        self.note_fault(format!(
            "a log does not have the bytes that its index says: they are not read: container {}, log {}, offset {offset}",
            self.name,
            name.unwrap_or_default()
        ));
    }

    /// What a change wrote, by sound indexes.
    fn find_span(&self, base: &B, key: Key) -> Result<Arc<Span>> {
        loop {
            match self.span(base, key) {
                Err(TableError::Damaged) => self.read_again(base, None)?,
                Err(TableError::Unknown) if self.has_damaged() => self.read_again(base, None)?,
                found => return Ok(found?),
            }
        }
    }

    /// The span that a change wrote, by the indexes in use.
    fn span(&self, base: &B, key: Key) -> TableResult<Arc<Span>> {
        let tables = {
            let view = self.view.lock();
            if let Some(span) = view.resolver.span(key) {
                return Ok(span);
            }
            Arc::clone(&view.tables)
        };
        let table = tables.iter().find(|table| table.has(key));
        let span = match table {
            Some(table) => table.span(base, &self.memory.blocks, key)?,
            None => None,
        };
        span.ok_or(TableError::Unknown)
    }

    /// None if it is gone.
    fn open_log(&self, base: &B, writer: WriterId, log: u32) -> Result<Option<Arc<B::File>>> {
        let name = {
            let view = self.view.lock();
            let tail = view.tails.get(&writer).ok_or(TableError::Unknown)?;
            if let Some(file) = tail.logs.get(&log) {
                return Ok(Some(Arc::clone(file)));
            }
            tail.writer.log_name(log)
        };
        let Some(inode) = own::find_file(base, &self.dir, &name)? else {
            return Ok(None);
        };
        let file = Arc::new(base.open(&inode, Access::Read)?);
        if let Some(tail) = self.view.lock().tails.get_mut(&writer) {
            tail.logs.entry(log).or_insert_with(|| Arc::clone(&file));
        }
        Ok(Some(file))
    }
}
