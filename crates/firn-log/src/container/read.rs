//! Reads bytes from logs, and compares each block of another host's log with its checksum before its first use.
//!
//! Terms
//! * Log: a file with the bytes that one host wrote. Its index lists them.
//! * Change: one entry of an index. Its bytes are contiguous in one log.
//! * Span: the range of a log with the bytes of one change, and their checksums.
//! * Block: [`CHECKED_BYTES`] of a span, or less at its end. A block has one checksum.
//! * Lost block: a block that was given up as damaged. It reads as zeros.
//!
//! A host's own blocks are not checked: the host wrote them in this life. Segments (ranges of the file with one source
//! each) that lie near each other in a log are read with one call. Reads in order are read ahead ([`super::ahead`]).

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
use crate::locate::{BlockCheck, DataFile, ListStatus, LocatedList, LogId};
use crate::names::Writer;
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
    fn release_after_read<B: Backing>(self, backing: &B, file: &B::File, offset: u64, len: usize) {
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
    key: ChangeKey,
    span: Arc<Span>,
    /// The open log, or `None` if its file is gone.
    file: Option<Arc<B::File>>,
    /// Positions in the log of blocks that were given up.
    lost: BTreeSet<u64>,
    /// Whether this process wrote the log.
    is_own: bool,
}

impl<B: Backing> ChangeLocation<B> {
    fn block(&self, number: u64) -> Block<'_> {
        Block {
            key: self.key,
            span: &self.span,
            number,
        }
    }
}

/// One block of a change.
#[derive(Clone, Copy)]
struct Block<'a> {
    key: ChangeKey,
    span: &'a Span,
    /// Number of the block in the span.
    number: u64,
}

impl Block<'_> {
    /// Returns the position of the first byte in the log.
    fn position(&self) -> u64 {
        self.span.position + self.number * CHECKED_BYTES
    }

    /// Returns the length in bytes.
    fn len(&self) -> u64 {
        CHECKED_BYTES.min(self.span.bytes - self.number * CHECKED_BYTES)
    }

    /// Returns whether `bytes` have the checksum of the block.
    fn matches(&self, bytes: &[u8]) -> bool {
        crc32c::crc32c(bytes) == self.span.checksums[self.number as usize]
    }
}

/// How a list tells a program to read the bytes of a block.
#[derive(Clone, Copy, Debug)]
enum BlockListing {
    /// The program reads them from the file with this index in the list.
    InFile(usize),
    /// The program asks firnd, which checks the block first.
    Unchecked,
    /// The list leaves the bytes out, so the program reads them through firnd.
    Omitted,
}

/// A change whose bytes are being listed.
struct ListedChange<B: Backing> {
    location: ChangeLocation<B>,
    /// Number and listing of the block that was listed last. The next piece of the change usually lies in it too.
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
struct UncheckedPiece<'a> {
    key: ChangeKey,
    span: Arc<Span>,
    /// Number of the block in the span.
    block: u64,
    /// Position of the wanted bytes in the block.
    offset_in_block: usize,
    buf: &'a mut [u8],
}

/// Wanted bytes of a log that need no check.
struct LogPiece<'a, B: Backing> {
    log_id: LogId,
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
    last.log_id == piece.log_id
        && piece.position <= last.end() + GAP_BYTES_MAX
        && piece.end() <= first.position + GROUP_BYTES_MAX
}

/// Copies the bytes of pieces from a window of their log. Fails with EIO if the window ends before.
fn copy_from_window<B: Backing>(window: &Window, pieces: Vec<LogPiece<'_, B>>) -> Result<()> {
    for piece in pieces {
        let start = (piece.position - window.start) as usize;
        let end = start + piece.buf.len();
        // The log may be too short, because its end was lost at a power failure.
        let bytes = window.bytes.get(start..end).ok_or(Errno::IO)?;
        piece.buf.copy_from_slice(bytes);
    }
    Ok(())
}

impl<B: Backing> Container<B> {
    /// Reads from `offset` until `buf` is full or the file ends, and returns the number of bytes read.
    ///
    /// `read_plain` reads the plain file below the container. It fills a buffer from an offset and returns the number
    /// of bytes read.
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
            let segments = self.next_segments(backing, &mut walk)?;
            if segments.is_empty() {
                return Ok(bytes_read);
            }
            let mut wanted = Vec::new();
            for segment in segments {
                let len = (segment.file.end - segment.file.start) as usize;
                let (buf, remaining) = unfilled.split_at_mut(len);
                unfilled = remaining;
                bytes_read += len;
                match segment.source {
                    Source::Hole | Source::Zeros => buf.fill(0),
                    Source::Plain => {
                        let plain_bytes = read_plain(buf, segment.file.start)?;
                        // If the plain file is shorter than the container's head says, a program truncated it without
                        // Firn.
                        buf[plain_bytes..].fill(0);
                    }
                    Source::Log { position, key, .. } => {
                        wanted.push(WantedBytes { key, position, buf })
                    }
                }
            }
            self.read_logs(backing, wanted, PageUse::Keep)?;
        }
    }

    /// Finds where the bytes of `range` lie, until the list `located` is full. `locate_plain` does the same for a range
    /// of the plain file below the container.
    pub(crate) fn locate(
        &self,
        backing: &B,
        locate_plain: &dyn Fn(Range<u64>, &mut LocatedList) -> Result<ListStatus>,
        range: Range<u64>,
        located: &mut LocatedList,
    ) -> Result<ListStatus> {
        // The list may be full soon.
        let mut walk = Walk::with_short_steps(range);
        let mut changes = BTreeMap::new();
        loop {
            let segments = self.next_segments(backing, &mut walk)?;
            if segments.is_empty() {
                return Ok(ListStatus::Open);
            }
            for Segment { file, source } in segments {
                let status = match source {
                    Source::Hole | Source::Zeros => located.skip(file),
                    Source::Plain => locate_plain(file, located)?,
                    Source::Log { position, key, .. } => {
                        let change = match changes.entry(key) {
                            Entry::Occupied(known) => known.into_mut(),
                            Entry::Vacant(new) => new.insert(ListedChange {
                                location: self.locate_change(backing, key)?,
                                last_block: None,
                            }),
                        };
                        self.locate_in_log(backing, change, position, file, located)?
                    }
                };
                if status == ListStatus::Full {
                    return Ok(status);
                }
            }
        }
    }

    /// Lists where the bytes of `range` lie in the log of a change, from `position` on. Decides about each block, a
    /// part of the log with one checksum, on its own: a block may be lost, or must be compared with its checksum first.
    fn locate_in_log(
        &self,
        backing: &B,
        change: &mut ListedChange<B>,
        position: u64,
        range: Range<u64>,
        located: &mut LocatedList,
    ) -> Result<ListStatus> {
        let ListedChange {
            location,
            last_block,
        } = change;
        let span_range = range_in_span(&location.span, position, range.end - range.start)?;
        let first_offset_in_span = span_range.start;
        let to_file_offset =
            |offset_in_span: u64| range.start + (offset_in_span - first_offset_in_span);
        for BlockPart { block, bytes, .. } in BlockPart::split(span_range) {
            let listing = match *last_block {
                Some((last_number, last_listing)) if last_number == block => last_listing,
                _ => match self.list_block(backing, location, block, located)? {
                    Some(listing) => listing,
                    None => return Ok(ListStatus::Full),
                },
            };
            *last_block = Some((block, listing));
            let file_range = to_file_offset(bytes.start)..to_file_offset(bytes.end);
            let status = match listing {
                BlockListing::InFile(index) => {
                    located.add(file_range, index, location.span.position + bytes.start)
                }
                BlockListing::Unchecked => located.add_unchecked(file_range),
                BlockListing::Omitted => located.skip(file_range),
            };
            if status == ListStatus::Full {
                return Ok(status);
            }
        }
        Ok(ListStatus::Open)
    }

    /// Decides how a program that has the list gets the bytes of block number `block_number` of a change: from the
    /// log's file, from firnd after a check, or by a read through the mount. Returns `None` if the list must end before
    /// the block.
    ///
    /// A block is a part of a log with one checksum, which is compared before a program reads another host's bytes.
    /// This function reads and checks the block itself if its host's bytes begin the list.
    fn list_block(
        &self,
        backing: &B,
        location: &ChangeLocation<B>,
        block_number: u64,
        located: &mut LocatedList,
    ) -> Result<Option<BlockListing>> {
        let file = location.file.as_ref().ok_or(Errno::IO)?;
        let block = location.block(block_number);
        // The block was given up as damaged.
        if location.lost.contains(&block.position()) {
            return Ok(Some(BlockListing::Omitted));
        }
        let writer = location.key.writer;
        if !location.is_own && !self.is_checked(block) {
            match located.decide_check(writer) {
                BlockCheck::AskFirnd => return Ok(Some(BlockListing::Unchecked)),
                BlockCheck::EndList => return Ok(None),
                BlockCheck::CheckNow => {
                    let checked_bytes = self.load_block(backing, block, PageUse::Keep)?;
                    if checked_bytes.is_none() {
                        // A later read through firnd finds the damage again, and returns its error.
                        return Ok(Some(BlockListing::Omitted));
                    }
                }
            }
        }
        let log = DataFile::Log(self.log_id(writer, location.span.log));
        Ok(Some(match located.find_or_add_file(backing, log, file) {
            Some(index) => BlockListing::InFile(index),
            // The log has no descriptor, or the list has too many.
            None => BlockListing::Omitted,
        }))
    }

    /// Returns the identity of a log in this container.
    fn log_id(&self, writer: WriterId, log: u32) -> LogId {
        LogId {
            container: self.instance_id,
            writer,
            log,
        }
    }

    /// Returns whether a block was compared with its checksum and was right.
    fn is_checked(&self, block: Block<'_>) -> bool {
        self.view
            .lock()
            .checked
            .contains(&(block.key, block.number))
    }

    /// Reads segments (ranges of the file with one source each) that lie in logs into `buf`, one after the other. The
    /// caller does not read them again, so their pages are dropped.
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

    /// Reads bytes of changes from logs into their buffers. Bytes of lost blocks (given up as damaged) become zeros.
    ///
    /// Pieces are sorted by their position in the logs, so that pieces near each other are read with one call.
    fn read_logs(&self, backing: &B, wanted: Vec<WantedBytes<'_>>, pages: PageUse) -> Result<()> {
        let mut locations: BTreeMap<ChangeKey, ChangeLocation<B>> = BTreeMap::new();
        let mut pieces = Vec::with_capacity(wanted.len());
        let mut unchecked_pieces = Vec::new();
        for wanted_bytes in wanted {
            let location = match locations.entry(wanted_bytes.key) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(self.locate_change(backing, wanted_bytes.key)?),
            };
            self.split_blocks(location, wanted_bytes, &mut pieces, &mut unchecked_pieces)?;
        }
        self.read_unchecked(backing, unchecked_pieces, pages)?;
        pieces.sort_unstable_by_key(|piece| (piece.log_id, piece.position));
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
    fn locate_change(&self, backing: &B, key: ChangeKey) -> Result<ChangeLocation<B>> {
        let span = self.find_span(backing, key)?;
        Ok(ChangeLocation {
            key,
            file: self.open_log(backing, key.writer, span.log)?,
            lost: self.lost_blocks(key.writer, span.log),
            is_own: self.is_own(key.writer),
            span,
        })
    }

    /// Splits wanted bytes at the boundaries of blocks, which have one checksum each. Bytes of lost blocks become
    /// zeros. The others go to `pieces` if their block needs no check, else to `unchecked_pieces`.
    fn split_blocks<'a>(
        &self,
        location: &ChangeLocation<B>,
        wanted: WantedBytes<'a>,
        pieces: &mut Vec<LogPiece<'a, B>>,
        unchecked_pieces: &mut Vec<UncheckedPiece<'a>>,
    ) -> Result<()> {
        let WantedBytes { key, position, buf } = wanted;
        let span = &location.span;
        let range = range_in_span(span, position, buf.len() as u64)?;
        let mut unfilled = buf;
        for part in BlockPart::split(range) {
            let BlockPart { block, bytes, .. } = part;
            let (buf, remaining) = unfilled.split_at_mut((bytes.end - bytes.start) as usize);
            unfilled = remaining;
            let block = location.block(block);
            if location.lost.contains(&block.position()) {
                buf.fill(0);
            } else if location.is_own || self.is_checked(block) {
                pieces.push(LogPiece {
                    log_id: self.log_id(key.writer, span.log),
                    position: span.position + bytes.start,
                    limit: block.position() + block.len(),
                    file: location.file.clone().ok_or(Errno::IO)?,
                    buf,
                });
            } else {
                unchecked_pieces.push(UncheckedPiece {
                    key,
                    span: Arc::clone(span),
                    block: block.number,
                    offset_in_block: (bytes.start - part.block_start) as usize,
                    buf,
                });
            }
        }
        Ok(())
    }

    /// Reads all of each block that was not compared with its checksum yet, because the checksum covers the whole
    /// block, and copies the wanted bytes.
    fn read_unchecked(
        &self,
        backing: &B,
        mut unchecked_pieces: Vec<UncheckedPiece<'_>>,
        pages: PageUse,
    ) -> Result<()> {
        unchecked_pieces.sort_unstable_by_key(|piece| (piece.key, piece.block));
        let is_same_block = |left: &UncheckedPiece<'_>, right: &UncheckedPiece<'_>| {
            (left.key, left.block) == (right.key, right.block)
        };
        for pieces_of_block in unchecked_pieces.chunk_by_mut(is_same_block) {
            let first = &pieces_of_block[0];
            let block = Block {
                key: first.key,
                span: &first.span,
                number: first.block,
            };
            let block_bytes = self.load_block(backing, block, pages)?.ok_or(Errno::IO)?;
            // A reader of a part of a block usually reads the rest next, so the block stays in memory.
            let window = Arc::new(Window {
                start: block.position(),
                bytes: block_bytes,
            });
            let log_id = self.log_id(block.key.writer, block.span.log);
            self.memory.ahead.insert(log_id, &window);
            for piece in pieces_of_block {
                let start = piece.offset_in_block;
                let end = start + piece.buf.len();
                piece.buf.copy_from_slice(&window.bytes[start..end]);
            }
        }
        Ok(())
    }

    /// Reads pieces that lie near each other in one log into their buffers, with at most one call of the backing.
    ///
    /// A long single piece is read straight into its buffer. All others are copied from a *window*: the bytes of the
    /// log that were read last, which stay in memory for the next read. If the window lacks some of the pieces, a new
    /// one is read. It also has bytes after the pieces (read-ahead) if these continue the old window.
    fn read_group(
        &self,
        backing: &B,
        mut pieces: Vec<LogPiece<'_, B>>,
        pages: PageUse,
    ) -> Result<()> {
        let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else {
            return Ok(());
        };
        let log_id = first.log_id;
        let wanted = first.position..last.end();
        // A read ahead must not go beyond this position.
        let limit = last.limit;
        let file = Arc::clone(&first.file);
        let known_window = self.memory.ahead.find(log_id);
        let is_in_memory = known_window
            .as_ref()
            .is_some_and(|known| known.contains(wanted.clone()));
        let is_long = wanted.end - wanted.start >= AHEAD_BYTES_MIN;
        if let [piece] = &mut pieces[..]
            && is_long
            && !is_in_memory
        {
            // A window would only add a copy.
            read_exact(backing, &file, piece.buf, wanted.start)?;
            pages.release_after_read(backing, &file, wanted.start, piece.buf.len());
            return Ok(());
        }
        let window = match known_window {
            Some(known) if is_in_memory => known,
            last_window => {
                let end = self.end_of_read_ahead(last_window, &wanted, limit);
                let window = Arc::new(Window::read(backing, &file, wanted.start..end)?);
                pages.release_after_read(backing, &file, wanted.start, window.bytes.len());
                self.memory.ahead.insert(log_id, &window);
                window
            }
        };
        copy_from_window(&window, pieces)
    }

    /// Returns where a read of the wanted bytes ends: beyond them, up to `limit`, if they continue the last read of the
    /// log.
    fn end_of_read_ahead(
        &self,
        last_window: Option<Arc<Window>>,
        wanted: &Range<u64>,
        limit: u64,
    ) -> u64 {
        match last_window {
            Some(last) if last.is_continued_at(wanted.start) => {
                let ahead_bytes = self.memory.ahead.bytes_after(&last);
                let end = wanted.start.saturating_add(ahead_bytes);
                end.min(limit).max(wanted.end)
            }
            _ => wanted.end,
        }
    }

    /// Reads a block, a part of a log, and compares it with its checksum. Returns `None` if bytes of the block are
    /// missing, or if the checksum differs; the damage is then recorded as a fault.
    fn load_block(&self, backing: &B, block: Block<'_>, pages: PageUse) -> Result<Option<Vec<u8>>> {
        let position = block.position();
        let mut bytes = vec![0; block.len() as usize];
        let mut count = 0;
        if let Some(file) = self.open_log(backing, block.key.writer, block.span.log)? {
            count = read_whole(backing, &file, &mut bytes, position)?;
            pages.release_after_read(backing, &file, position, count);
        }
        if count < bytes.len() || !block.matches(&bytes) {
            self.record_damaged_block(block);
            return Ok(None);
        }
        let mut view = self.view.lock();
        if view.checked.len() >= CHECKED_BLOCKS_MAX {
            // The set has no order of use. Dropping all of it costs only that blocks are checked again.
            view.checked.clear();
        }
        view.checked.insert((block.key, block.number));
        Ok(Some(bytes))
    }

    /// Returns the positions of the lost blocks of a log.
    fn lost_blocks(&self, writer: WriterId, log: u32) -> BTreeSet<u64> {
        let view = self.view.lock();
        let Some(seal) = &view.seal else {
            return BTreeSet::new();
        };
        if seal.lost.is_empty() {
            return BTreeSet::new();
        }
        match view.indexes.get(&writer) {
            Some(index) => seal.lost.lost_blocks(&index.writer.log_name(log)),
            None => BTreeSet::new(),
        }
    }

    /// Returns the parts of a segment (a range of the file with one source) whose blocks are damaged, if the segment
    /// lies in a log. Blocks in `known_lost` are taken as damaged without a read. Fails if the backing fails.
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
        let writer = self.known_writer(key.writer)?;
        let log = writer.log_name(span.log);
        let span_start = position.checked_sub(span.position).ok_or(Errno::IO)?;
        let span_end = span_start + (segment.file.end - segment.file.start);
        let to_file_offset = |in_span: u64| segment.file.start + (in_span - span_start);
        let mut unreadable = Vec::new();
        for part in BlockPart::split(span_start..span_end) {
            // A damaged index may name more bytes than the span has.
            if part.block_start >= span.bytes {
                break;
            }
            let block = Block {
                key,
                span: &span,
                number: part.block,
            };
            if known_lost.has_block(&log, block.position()) || !self.is_readable(backing, block)? {
                unreadable.push(UnreadableRange {
                    file: to_file_offset(part.bytes.start)..to_file_offset(part.bytes.end),
                    host: writer.host().to_owned(),
                    log: log.clone(),
                    block: block.position(),
                });
            }
        }
        Ok(unreadable)
    }

    /// Returns whether a block has the right checksum. Reads the block unless it was checked before.
    fn is_readable(&self, backing: &B, block: Block<'_>) -> Result<bool> {
        if self.is_checked(block) {
            return Ok(true);
        }
        let bytes = self.load_block(backing, block, PageUse::Keep)?;
        Ok(bytes.is_some())
    }

    /// Returns the writer with this id. Fails if the container has no index of it.
    fn known_writer(&self, id: WriterId) -> Result<Writer> {
        let view = self.view.lock();
        let index = view.indexes.get(&id).ok_or(TableError::Unknown)?;
        Ok(index.writer.clone())
    }

    /// Records a fault that names the damaged block.
    fn record_damaged_block(&self, block: Block<'_>) {
        let log = self
            .known_writer(block.key.writer)
            .map(|writer| writer.log_name(block.span.log))
            .unwrap_or_default();
        self.record_fault(format!(
            "cannot read bytes of a logged file, because a block of its logs is damaged or missing: container {}, log \
             {log}, offset {}",
            self.name,
            block.position()
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
        let Some(table) = tables.iter().find(|table| table.holds(key)) else {
            return Err(TableError::Unknown);
        };
        table
            .span(backing, &self.memory.blocks, key)?
            .ok_or(TableError::Unknown)
    }

    /// Opens a log of a writer, or returns the file if it is open already. Returns `None` if the log's file is gone.
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
