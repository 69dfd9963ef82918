//! Reads bytes from logs, and compares each block of another host's log with its checksum before its first use.
//!
//! Terms
//! * Change: one frame of an index. Its bytes are contiguous in one log.
//! * Span: the range of a log with the bytes of one change, and their checksums.
//! * Block: [`CHECKED_BYTES`] of a span, or less at its end. A block has one checksum.
//! * Lost block: a block that was given up as damaged. It reads as zeros.
//!
//! A host's own blocks are not checked: the host wrote them in this life. Segments that lie near each other in a log
//! are read with one call. Reads in order are read ahead ([`super::ahead`]).

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use firn_backing::{Access, Backing, Errno, PageAdvice, Result};
use firn_hosts::own;

use super::ahead::{AHEAD_BYTES_MIN, GAP_BYTES_MAX, Window};
use super::{Container, Walk};
use crate::frame::{CHECKED_BYTES, Span};
use crate::index_reader::read_exact;
use crate::lag::read_whole;
use crate::locate::{Check, DataFile, LocatedList, Room};
use crate::resolve::{ChangeKey, Segment, Source, WriterId};
use crate::seal::LostParts;
use crate::table::{TableError, TableResult};

/// Bound on the number of remembered blocks whose checksum was right.
const CHECKED_BLOCKS_MAX: usize = 1 << 16;

/// Bound on the bytes of a log that are read with one call for several pieces.
const GROUP_BYTES_MAX: u64 = 1 << 20;

/// Whether the kernel keeps the pages of a log after they are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PageUse {
    Keep,
    /// The pages are dropped. The bytes go to the plain file next, whose pages need the memory, and the log is removed.
    Forget,
}

impl PageUse {
    /// Drops the pages of a range that was read, if they are not to be kept.
    fn release_pages<B: Backing>(self, backing: &B, file: &B::File, offset: u64, len: usize) {
        if self == Self::Forget {
            backing.advise(file, offset..offset + len as u64, PageAdvice::Forget);
        }
    }
}

/// Bytes of one change that a caller reads into `buf`.
struct WantedBytes<'a> {
    key: ChangeKey,
    /// Position of the first byte in the log.
    position: u64,
    buf: &'a mut [u8],
}

/// The log with the bytes of a change.
struct ChangeLocation<B: Backing> {
    /// The open log, or `None` if its file is gone.
    file: Option<Arc<B::File>>,
    span: Arc<Span>,
    /// Positions in the log of blocks that were given up.
    lost: BTreeSet<u64>,
    is_own: bool,
}

/// How a list tells a program to read the bytes of a block.
#[derive(Clone, Copy, Debug)]
enum BlockListing {
    /// From the file with this index in the list.
    File(usize),
    /// From firnd, which must check the block first.
    UncheckedByFirnd,
    /// From firnd, because the list does not say where the bytes are.
    Unlisted,
}

/// A change whose bytes are being listed.
struct ListedChange<B: Backing> {
    source: ChangeLocation<B>,
    /// The block that was listed last. The next piece of the change usually lies in it too.
    last_block: Option<(u64, BlockListing)>,
}

/// The part of a range that lies in one block. Positions count from the beginning of the span.
struct BlockPart {
    /// Number of the block in the span.
    block: u64,
    /// Position where the block begins.
    block_start: u64,
    bytes: Range<u64>,
}

impl BlockPart {
    /// Splits a range at the boundaries of blocks.
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

/// Returns where `len` bytes from `position` of the log lie in a span. Fails with EIO if the span does not contain
/// them.
fn range_in_span(span: &Span, position: u64, len: u64) -> Result<Range<u64>> {
    let start = position.checked_sub(span.position).ok_or(Errno::IO)?;
    let end = start + len;
    if end > span.bytes {
        return Err(Errno::IO);
    }
    Ok(start..end)
}

/// Wanted bytes of a block whose checksum was not compared yet.
struct Unchecked<'a> {
    key: ChangeKey,
    span: Arc<Span>,
    /// Number of the block in the span.
    block: u64,
    /// Position of the wanted bytes in the block.
    position: usize,
    buf: &'a mut [u8],
}

/// Wanted bytes of a log that need no check.
struct LogPiece<'a, B: Backing> {
    writer: WriterId,
    /// Number of the log among the writer's logs.
    log: u32,
    /// Position of the first byte in the log.
    position: u64,
    /// Where the bytes end that may be read ahead: the end of the checked block.
    limit: u64,
    file: Arc<B::File>,
    buf: &'a mut [u8],
}

impl<B: Backing> LogPiece<'_, B> {
    /// Returns the position after the last byte.
    fn end(&self) -> u64 {
        self.position + self.buf.len() as u64
    }
}

/// A part of the file whose bytes lie in a damaged block of a log.
pub(crate) struct UnreadableRange {
    /// The range of the file.
    pub(crate) file: Range<u64>,
    pub(crate) host: String,
    pub(crate) log: String,
    /// Position of the block in the log.
    pub(crate) block: u64,
}

/// Returns whether a piece is read with the same call as `group`, whose pieces come before it in the log.
fn is_near<B: Backing>(group: &[LogPiece<'_, B>], piece: &LogPiece<'_, B>) -> bool {
    let (Some(first), Some(last)) = (group.first(), group.last()) else {
        return true;
    };
    (last.writer, last.log) == (piece.writer, piece.log)
        && piece.position <= last.end() + GAP_BYTES_MAX
        && piece.end() <= first.position + GROUP_BYTES_MAX
}

impl<B: Backing> Container<B> {
    /// Reads from `offset` until `buf` is full or the file ends, and returns the number of bytes read.
    ///
    /// `read_plain` reads the plain file below the container. It fills a buffer from an offset and returns the number of
    /// bytes read.
    pub fn read(
        &self,
        backing: &B,
        read_plain: &dyn Fn(&mut [u8], u64) -> Result<usize>,
        buf: &mut [u8],
        offset: u64,
    ) -> Result<usize> {
        let mut walk = Walk::new(offset..offset.saturating_add(buf.len() as u64));
        let mut unfilled = buf;
        let mut bytes_read = 0;
        loop {
            let segments = self.find_next(backing, &mut walk)?;
            if segments.is_empty() {
                return Ok(bytes_read);
            }
            let mut wanted = Vec::new();
            for segment in segments {
                let len = (segment.file.end - segment.file.start) as usize;
                let (part, remaining) = unfilled.split_at_mut(len);
                unfilled = remaining;
                bytes_read += len;
                match segment.source {
                    Source::Hole | Source::Zeros => part.fill(0),
                    Source::Plain => {
                        let count = read_plain(part, segment.file.start)?;
                        // If the plain file is shorter than the container's head says, a program truncated it without
                        // Firn.
                        part[count..].fill(0);
                    }
                    Source::Log { position, key, .. } => wanted.push(WantedBytes {
                        key,
                        position,
                        buf: part,
                    }),
                }
            }
            self.read_logs(backing, wanted, PageUse::Keep)?;
        }
    }

    /// Finds where the bytes of `range` lie, until `located` is full. `locate_plain` does the same for a range of the plain
    /// file below the container.
    pub(crate) fn locate(
        &self,
        backing: &B,
        locate_plain: &dyn Fn(Range<u64>, &mut LocatedList) -> Result<Room>,
        range: Range<u64>,
        located: &mut LocatedList,
    ) -> Result<Room> {
        let mut walk = Walk::in_steps(range);
        let mut changes = BTreeMap::new();
        loop {
            let segments = self.find_next(backing, &mut walk)?;
            if segments.is_empty() {
                return Ok(Room::Left);
            }
            for Segment { file, source } in segments {
                let room = match source {
                    Source::Hole | Source::Zeros => located.skip(file),
                    Source::Plain => locate_plain(file, located)?,
                    Source::Log { position, key, .. } => {
                        let change = match changes.entry(key) {
                            Entry::Occupied(known) => known.into_mut(),
                            Entry::Vacant(new) => new.insert(ListedChange {
                                source: self.find_log(backing, key)?,
                                last_block: None,
                            }),
                        };
                        self.locate_in_log(backing, (key, change), position, file, located)?
                    }
                };
                if room == Room::Full {
                    return Ok(room);
                }
            }
        }
    }

    /// Finds where the bytes of a change lie that begin at `position` of its log, block by block: some blocks are lost,
    /// and others must be checked first.
    fn locate_in_log(
        &self,
        backing: &B,
        (key, change): (ChangeKey, &mut ListedChange<B>),
        position: u64,
        range: Range<u64>,
        located: &mut LocatedList,
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
                    let Some(holder) = self.locate_block(backing, key, source, block, located)?
                    else {
                        return Ok(Room::Full);
                    };
                    *last_block = Some((block, holder));
                    holder
                }
            };
            let room = match holder {
                BlockListing::File(index) => {
                    located.add(part, index, source.span.position + bytes.start)
                }
                BlockListing::UncheckedByFirnd => located.add_unchecked(part),
                BlockListing::Unlisted => located.skip(part),
            };
            if room == Room::Full {
                return Ok(room);
            }
        }
        Ok(Room::Left)
    }

    /// Decides how a program reads a block of a change. Returns `None` if the list must end before the block.
    fn locate_block(
        &self,
        backing: &B,
        key: ChangeKey,
        log: &ChangeLocation<B>,
        block: u64,
        located: &mut LocatedList,
    ) -> Result<Option<BlockListing>> {
        let file = log.file.as_ref().ok_or(Errno::IO)?;
        let position = log.span.position + block * CHECKED_BYTES;
        if log.lost.contains(&position) {
            return Ok(Some(BlockListing::Unlisted));
        }
        if !log.is_own && !self.is_checked(key, block) {
            match located.check_block(key.writer) {
                Check::Now => {
                    let bytes = self.load_block(backing, key, &log.span, block, PageUse::Keep)?;
                    if bytes.is_none() {
                        // A later read through firnd finds the damage again, and returns its error.
                        return Ok(Some(BlockListing::Unlisted));
                    }
                }
                Check::Later => return Ok(Some(BlockListing::UncheckedByFirnd)),
                Check::Enough => return Ok(None),
            }
        }
        let holder = DataFile::Log(self.number, key.writer, log.span.log);
        let index = located.index_of(backing, holder, file);
        Ok(Some(
            index.map_or(BlockListing::Unlisted, BlockListing::File),
        ))
    }

    /// Returns whether a block of a change was compared with its checksum and was right.
    fn is_checked(&self, key: ChangeKey, block: u64) -> bool {
        self.view.lock().checked.contains(&(key, block))
    }

    /// Reads segments that lie in logs into `buf`, one after the other. The caller does not read them again, so their
    /// pages are dropped.
    pub(crate) fn read_segments(
        &self,
        backing: &B,
        segments: &[Segment],
        buf: &mut [u8],
    ) -> Result<()> {
        let mut unfilled = buf;
        let mut wanted = Vec::with_capacity(segments.len());
        for Segment { file, source } in segments {
            let Source::Log { position, key, .. } = *source else {
                return Err(Errno::INVAL);
            };
            let (buf, remaining) = unfilled.split_at_mut((file.end - file.start) as usize);
            unfilled = remaining;
            wanted.push(WantedBytes { key, position, buf });
        }
        self.read_logs(backing, wanted, PageUse::Forget)
    }

    /// Reads bytes of changes into their buffers. Bytes of lost blocks become zeros.
    ///
    /// Pieces are sorted by their position in the logs, so that pieces near each other are read with one call.
    fn read_logs(&self, backing: &B, wanted: Vec<WantedBytes<'_>>, pages: PageUse) -> Result<()> {
        let mut logs: BTreeMap<ChangeKey, ChangeLocation<B>> = BTreeMap::new();
        let mut pieces = Vec::with_capacity(wanted.len());
        let mut unchecked = Vec::new();
        for wanted in wanted {
            let log = match logs.entry(wanted.key) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(self.find_log(backing, wanted.key)?),
            };
            self.split_blocks(log, wanted, &mut pieces, &mut unchecked)?;
        }
        self.read_unchecked(backing, unchecked, pages)?;
        pieces.sort_unstable_by_key(|piece| (piece.writer, piece.log, piece.position));
        let mut group = Vec::new();
        for piece in pieces {
            if !is_near(&group, &piece) {
                self.read_group(backing, std::mem::take(&mut group), pages)?;
            }
            group.push(piece);
        }
        self.read_group(backing, group, pages)
    }

    /// Finds the log with the bytes of a change, and opens it.
    fn find_log(&self, backing: &B, key: ChangeKey) -> Result<ChangeLocation<B>> {
        let span = self.find_span(backing, key)?;
        Ok(ChangeLocation {
            file: self.open_log(backing, key.writer, span.log)?,
            lost: self.lost_blocks(key.writer, span.log),
            is_own: self.is_own(key.writer),
            span,
        })
    }

    /// Splits wanted bytes at block boundaries. Bytes of lost blocks become zeros. The others go to `pieces` if their
    /// block needs no check, else to `unchecked`.
    fn split_blocks<'a>(
        &self,
        log: &ChangeLocation<B>,
        wanted: WantedBytes<'a>,
        pieces: &mut Vec<LogPiece<'a, B>>,
        unchecked: &mut Vec<Unchecked<'a>>,
    ) -> Result<()> {
        let WantedBytes { key, position, buf } = wanted;
        let span = &log.span;
        let range = range_in_span(span, position, buf.len() as u64)?;
        let mut unfilled = buf;
        for BlockPart {
            block,
            block_start,
            bytes,
        } in BlockPart::split(range)
        {
            let (part, remaining) = unfilled.split_at_mut((bytes.end - bytes.start) as usize);
            unfilled = remaining;
            if log.lost.contains(&(span.position + block_start)) {
                part.fill(0);
            } else if log.is_own || self.is_checked(key, block) {
                pieces.push(LogPiece {
                    writer: key.writer,
                    log: span.log,
                    position: span.position + bytes.start,
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

    /// Reads each unchecked block whole, because the checksum covers all of it, and copies the wanted bytes.
    fn read_unchecked(
        &self,
        backing: &B,
        mut unchecked: Vec<Unchecked<'_>>,
        pages: PageUse,
    ) -> Result<()> {
        unchecked.sort_unstable_by_key(|piece| (piece.key, piece.block));
        let is_same = |a: &Unchecked<'_>, b: &Unchecked<'_>| (a.key, a.block) == (b.key, b.block);
        for pieces in unchecked.chunk_by_mut(is_same) {
            let Unchecked {
                key, span, block, ..
            } = &pieces[0];
            let block_bytes = self.load_block(backing, *key, span, *block, pages)?;
            // A reader of a part of a block usually reads the rest next, so the block stays in memory.
            let window = Arc::new(Window {
                start: span.position + block * CHECKED_BYTES,
                bytes: block_bytes.ok_or(Errno::IO)?,
            });
            let id = (self.number, key.writer, span.log);
            self.memory.ahead.insert(id, &window);
            for Unchecked { position, buf, .. } in pieces {
                buf.copy_from_slice(&window.bytes[*position..*position + buf.len()]);
            }
        }
        Ok(())
    }

    /// Reads pieces that lie near each other in one log. Reads ahead if the pieces continue the last read of that log.
    fn read_group(
        &self,
        backing: &B,
        mut pieces: Vec<LogPiece<'_, B>>,
        pages: PageUse,
    ) -> Result<()> {
        let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else {
            return Ok(());
        };
        let LogPiece {
            writer,
            log,
            position: start,
            ..
        } = *first;
        let end = last.end();
        let limit = last.limit;
        let file = Arc::clone(&first.file);
        let ahead = &self.memory.ahead;
        let id = (self.number, writer, log);
        let window = match ahead.find(id) {
            Some(known) if known.contains(start..end) => known,
            _ if pieces.len() == 1 && end - start >= AHEAD_BYTES_MIN => {
                // A long piece is read straight into the caller's buffer. A window would only add a copy.
                read_exact(backing, &file, pieces[0].buf, start)?;
                pages.release_pages(backing, &file, start, pieces[0].buf.len());
                return Ok(());
            }
            known => {
                let continued = known.filter(|known| known.is_continued_at(start));
                let ahead_bytes = continued.map_or(0, |window| ahead.bytes_after(&window));
                let to = start.saturating_add(ahead_bytes).min(limit).max(end);
                let window = Arc::new(Window::read(backing, &file, start..to)?);
                pages.release_pages(backing, &file, start, window.bytes.len());
                ahead.insert(id, &window);
                window
            }
        };
        for piece in pieces {
            let start = (piece.position - window.start) as usize;
            let bytes = window.bytes.get(start..start + piece.buf.len());
            // The log is too short: its end was lost at a power failure.
            piece.buf.copy_from_slice(bytes.ok_or(Errno::IO)?);
        }
        Ok(())
    }

    /// Reads a block of a change and compares it with its checksum. Returns `None` if bytes of the block are missing, or if
    /// the checksum differs; the damage is then recorded as a fault.
    fn load_block(
        &self,
        backing: &B,
        key: ChangeKey,
        span: &Span,
        block: u64,
        pages: PageUse,
    ) -> Result<Option<Vec<u8>>> {
        let block_start = block * CHECKED_BYTES;
        let mut block_bytes = vec![0; CHECKED_BYTES.min(span.bytes - block_start) as usize];
        let count = match self.open_log(backing, key.writer, span.log)? {
            Some(file) => {
                let count = read_whole(
                    backing,
                    &file,
                    &mut block_bytes,
                    span.position + block_start,
                )?;
                pages.release_pages(backing, &file, span.position + block_start, count);
                count
            }
            None => 0,
        };
        if count < block_bytes.len()
            || crc32c::crc32c(&block_bytes) != span.checksums[block as usize]
        {
            self.record_damaged_block(&key, span.log, span.position + block_start);
            return Ok(None);
        }
        let mut view = self.view.lock();
        if view.checked.len() >= CHECKED_BLOCKS_MAX {
            // The set has no order of use. Dropping all of it costs only that blocks are checked again.
            view.checked.clear();
        }
        view.checked.insert((key, block));
        Ok(Some(block_bytes))
    }

    /// Returns the positions of the lost blocks of a log.
    fn lost_blocks(&self, writer: WriterId, log: u32) -> BTreeSet<u64> {
        let view = self.view.lock();
        let Some(seal) = view.seal.as_ref().filter(|seal| !seal.lost.is_empty()) else {
            return BTreeSet::new();
        };
        let state = view.indexes.get(&writer);
        let name = state.map(|state| state.writer.log_name(log));
        name.map_or_else(BTreeSet::new, |name| seal.lost.lost_blocks(&name))
    }

    /// Returns the parts of a segment whose blocks are damaged, if the segment lies in a log. Blocks in `known_lost` are
    /// taken as damaged without a read. Fails if the backing fails.
    pub(crate) fn find_unreadable(
        &self,
        backing: &B,
        segment: &Segment,
        known_lost: &LostParts,
    ) -> Result<Vec<UnreadableRange>> {
        let Source::Log { position, key, .. } = segment.source else {
            return Ok(Vec::new());
        };
        let span = self.find_span(backing, key)?;
        let (host, log) = self.log_of(key.writer, span.log)?;
        let start = position.checked_sub(span.position).ok_or(Errno::IO)?;
        let end = start + (segment.file.end - segment.file.start);
        let mut unreadable = Vec::new();
        let parts = BlockPart::split(start..end);
        for part in parts.take_while(|part| part.block_start < span.bytes) {
            let BlockPart { block, bytes, .. } = part;
            let position = span.position + part.block_start;
            let is_lost = known_lost.has_block(&log, position)
                || (!self.is_checked(key, block)
                    && self
                        .load_block(backing, key, &span, block, PageUse::Keep)?
                        .is_none());
            if !is_lost {
                continue;
            }
            let file_start = segment.file.start;
            unreadable.push(UnreadableRange {
                file: file_start + (bytes.start - start)..file_start + (bytes.end - start),
                host: host.clone(),
                log: log.clone(),
                block: position,
            });
        }
        Ok(unreadable)
    }

    /// Returns the host that wrote a log, and the log's name.
    fn log_of(&self, writer: WriterId, log: u32) -> Result<(String, String)> {
        let view = self.view.lock();
        let writer = &view.indexes.get(&writer).ok_or(TableError::Unknown)?.writer;
        Ok((writer.host().to_owned(), writer.log_name(log)))
    }

    /// Records a fault that names the damaged block.
    fn record_damaged_block(&self, key: &ChangeKey, log: u32, offset: u64) {
        let name = {
            let view = self.view.lock();
            view.indexes
                .get(&key.writer)
                .map(|state| state.writer.log_name(log))
        };
        self.record_fault(format!(
            "a block of a log is damaged or missing, so its bytes cannot be read: container {}, log {}, offset {offset}",
            self.name,
            name.unwrap_or_default()
        ));
    }

    /// Finds the span of a change. Builds the view again if a table in use is damaged.
    fn find_span(&self, backing: &B, key: ChangeKey) -> Result<Arc<Span>> {
        loop {
            match self.span(backing, key) {
                Err(TableError::Damaged) => self.rebuild_view(backing, None)?,
                Err(TableError::Unknown) if self.has_damaged_table() => {
                    self.rebuild_view(backing, None)?
                }
                span => return Ok(span?),
            }
        }
    }

    /// Finds the span of a change in the indexes and tables in use.
    fn span(&self, backing: &B, key: ChangeKey) -> TableResult<Arc<Span>> {
        let tables = {
            let view = self.view.lock();
            if let Some(span) = view.resolver.span(key) {
                return Ok(span);
            }
            Arc::clone(&view.tables)
        };
        let table = tables.iter().find(|table| table.holds(key));
        let span = match table {
            Some(table) => table.span(backing, &self.memory.blocks, key)?,
            None => None,
        };
        span.ok_or(TableError::Unknown)
    }

    /// Opens a log, or returns the open file. Returns `None` if the log's file is gone.
    fn open_log(&self, backing: &B, writer: WriterId, log: u32) -> Result<Option<Arc<B::File>>> {
        let name = {
            let view = self.view.lock();
            let state = view.indexes.get(&writer).ok_or(TableError::Unknown)?;
            if let Some(file) = state.logs.get(&log) {
                return Ok(Some(Arc::clone(file)));
            }
            state.writer.log_name(log)
        };
        let Some(inode) = own::find_file(backing, &self.dir, &name)? else {
            return Ok(None);
        };
        let file = Arc::new(backing.open(&inode, Access::Read)?);
        if let Some(state) = self.view.lock().indexes.get_mut(&writer) {
            state.logs.entry(log).or_insert_with(|| Arc::clone(&file));
        }
        Ok(Some(file))
    }
}
