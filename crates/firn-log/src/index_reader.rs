//! Reads the frames of an index, and searches for frames after a damaged part.
//!
//! An *index* is a file with the changes that one host made to a logged file, in the order in which they were made.
//! Each entry is a *frame* ([`crate::frame`]).

use std::ops::Range;

use firn_backing::{Backing, Errno, Result};

use crate::frame::{DecodedFrame, FRAME_BYTES_MAX, Frame, MAGIC};
use crate::lag::read_whole;
use crate::resolve::WriterId;

/// Length of a read of an index. It is larger than any frame.
pub(crate) const INDEX_READ_BYTES: usize = 2 << 20;
/// Length of the first read. Most reads find little or nothing, and allocating a larger buffer takes longer than the
/// call.
const FIRST_READ_BYTES: usize = 16 << 10;
/// Length of the read that finds out whether an index ends at a position.
const SHORT_READ_BYTES: usize = 64;

/// Frames that one read found in an index.
pub(crate) struct FramesRead {
    pub(crate) writer: WriterId,
    /// Position in the index where the read began.
    pub(crate) start: u64,
    /// Position where the last frame ends.
    pub(crate) end: u64,
    /// The frames, each with its position.
    pub(crate) frames: Vec<(u64, Frame)>,
    /// Whether the index has no bytes after the last frame.
    pub(crate) reached_end: bool,
}

/// Reads the next valid frames in a range of an index, as many as one read finds.
pub(crate) fn read_index<B: Backing>(
    backing: &B,
    index: &B::File,
    writer: WriterId,
    range: Range<u64>,
) -> Result<FramesRead> {
    let limit = range.end;
    read_part(backing, index, writer, range, limit)
}

/// Reads the next valid frames (entries) of an index that begin in `range` and end no later than `limit`.
pub(crate) fn read_part<B: Backing>(
    backing: &B,
    index: &B::File,
    writer: WriterId,
    range: Range<u64>,
    limit: u64,
) -> Result<FramesRead> {
    let mut buf = vec![0; FIRST_READ_BYTES];
    let mut count = backing.read_at(index, &mut buf, range.start)?;
    // A full buffer means that more may follow, so the range is read again with a large one.
    if count == buf.len() {
        buf = vec![0; INDEX_READ_BYTES];
        count = backing.read_at(index, &mut buf, range.start)?;
    }
    let mut undecoded = &buf[..count];
    let mut frames = Vec::new();
    let mut end = range.start;
    while end < range.end
        && let DecodedFrame::Complete(frame, bytes) = Frame::decode(undecoded)
        && end + bytes as u64 <= limit
    {
        frames.push((end, frame));
        end += bytes as u64;
        undecoded = &undecoded[bytes..];
    }
    Ok(FramesRead {
        writer,
        start: range.start,
        end,
        frames,
        reached_end: undecoded.is_empty() && count < buf.len(),
    })
}

/// Returns whether an index is damaged at `offset`, where no valid frame (entry) begins. It is damaged if a later frame
/// notes a sync that made bytes after `offset` durable. Otherwise the index ordinarily ends at `offset`.
pub(crate) fn has_synced_frame_after<B: Backing>(
    backing: &B,
    index: &B::File,
    offset: u64,
) -> Result<bool> {
    // Usually the index ends here, or a frame is just being appended. Then a short read suffices.
    let mut first_bytes = [0; SHORT_READ_BYTES];
    let count = backing.read_at(index, &mut first_bytes, offset)?;
    let index_ends_here = count < first_bytes.len();
    let bytes_at_offset = &first_bytes[..count];
    // Another frame may follow in these bytes. The frame at `offset` is then not at the end, but its stored length is
    // damaged.
    let is_followed_by_frame = find_magic(bytes_at_offset.get(1..).unwrap_or(&[])).is_some();
    // There are no bytes, or only the beginning of one frame, which its writer is appending or could not complete.
    if index_ends_here
        && !is_followed_by_frame
        && Frame::decode(bytes_at_offset) == DecodedFrame::Incomplete
    {
        return Ok(false);
    }
    let was_appended_after_sync = |frame: &Frame| frame.synced > offset;
    Ok(find_frame(backing, index, offset + 1, &was_appended_after_sync)?.is_some())
}

/// Returns the position of the first valid frame (entry of the index) at or after `offset` for which `matches` returns
/// true.
pub(crate) fn find_frame<B: Backing>(
    backing: &B,
    index: &B::File,
    offset: u64,
    matches: &dyn Fn(&Frame) -> bool,
) -> Result<Option<u64>> {
    let mut buf_offset = offset;
    let mut buf = vec![0; INDEX_READ_BYTES];
    loop {
        let count = backing.read_at(index, &mut buf, buf_offset)?;
        let reached_end = count < buf.len();
        // A frame that begins before `search_end` lies in `buf` with all of its bytes.
        let search_end = if reached_end {
            count
        } else {
            count - FRAME_BYTES_MAX
        };
        let mut search_start = 0;
        while let Some(distance) = find_magic(&buf[search_start..count]) {
            let frame_start = search_start + distance;
            if frame_start >= search_end {
                break;
            }
            if let DecodedFrame::Complete(frame, _) = Frame::decode(&buf[frame_start..count])
                && matches(&frame)
            {
                return Ok(Some(buf_offset + frame_start as u64));
            }
            search_start = frame_start + 1;
        }
        if reached_end {
            return Ok(None);
        }
        buf_offset += search_end as u64;
    }
}

/// Returns the position of the first bytes that may begin a frame.
fn find_magic(bytes: &[u8]) -> Option<usize> {
    bytes
        .windows(MAGIC.len())
        .position(|window| window == MAGIC)
}

/// Fills `buf` from `offset`. Fails with EIO if the file ends before that.
pub(crate) fn read_exact<B: Backing>(
    backing: &B,
    file: &B::File,
    buf: &mut [u8],
    offset: u64,
) -> Result<()> {
    if read_whole(backing, file, buf, offset)? < buf.len() {
        // The log is too short: its end was lost at a power failure.
        return Err(Errno::IO);
    }
    Ok(())
}
