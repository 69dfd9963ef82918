//! Reads the frames of an index, and searches for frames after a damaged part.

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

/// Frames that one read found in an index.
pub(crate) struct FramesRead {
    pub(crate) writer: WriterId,
    /// Position in the index where the read began.
    pub(crate) from: u64,
    /// Position where the last frame ends.
    pub(crate) to: u64,
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
    read_part(backing, index, writer, range.start, range.end, range.end)
}

/// Reads the next valid frames of an index that begin before `to` and end no later than `limit`.
pub(crate) fn read_part<B: Backing>(
    backing: &B,
    index: &B::File,
    writer: WriterId,
    from: u64,
    to: u64,
    limit: u64,
) -> Result<FramesRead> {
    let mut frames_read = FramesRead {
        writer,
        from,
        to: from,
        frames: Vec::new(),
        reached_end: false,
    };
    let mut buf = vec![0; FIRST_READ_BYTES];
    let mut count = backing.read_at(index, &mut buf, from)?;
    if count == buf.len() {
        buf = vec![0; INDEX_READ_BYTES];
        count = backing.read_at(index, &mut buf, from)?;
    }
    let mut rest = &buf[..count];
    while frames_read.to < to
        && let DecodedFrame::Complete(frame, bytes) = Frame::decode(rest)
        && frames_read.to + bytes as u64 <= limit
    {
        frames_read.frames.push((frames_read.to, frame));
        frames_read.to += bytes as u64;
        rest = &rest[bytes..];
    }
    frames_read.reached_end = rest.is_empty() && count < buf.len();
    Ok(frames_read)
}

/// Returns whether an index is damaged at `offset`, where no valid frame begins: a later frame says that bytes after
/// `offset` were synced.
pub(crate) fn has_synced_frame_after<B: Backing>(
    backing: &B,
    index: &B::File,
    offset: u64,
) -> Result<bool> {
    // Usually the index ends here, or a frame is just being appended. Then a short read suffices.
    let mut first = [0; 64];
    let count = backing.read_at(index, &mut first, offset)?;
    // Another frame may follow in these bytes. The frame at `offset` is then not at the end, but its stored length is
    // damaged.
    let is_last =
        count < first.len() && find_magic(first[..count].get(1..).unwrap_or(&[])).is_none();
    if is_last && matches!(Frame::decode(&first[..count]), DecodedFrame::Incomplete) {
        return Ok(false);
    }
    let is_later = |frame: &Frame| frame.synced > offset;
    Ok(find_frame(backing, index, offset + 1, &is_later)?.is_some())
}

/// Returns the position of the first valid frame at or after `offset` for which `matches` returns true.
pub(crate) fn find_frame<B: Backing>(
    backing: &B,
    index: &B::File,
    offset: u64,
    matches: &dyn Fn(&Frame) -> bool,
) -> Result<Option<u64>> {
    let mut position = offset;
    let mut buf = vec![0; INDEX_READ_BYTES];
    loop {
        let count = backing.read_at(index, &mut buf, position)?;
        let is_last = count < buf.len();
        // A frame that begins before `end` lies in `buf` with all of its bytes.
        let end = if is_last {
            count
        } else {
            count - FRAME_BYTES_MAX
        };
        let mut from = 0;
        while let Some(start) = find_magic(&buf[from..count]).map(|distance| from + distance) {
            if start >= end {
                break;
            }
            match Frame::decode(&buf[start..count]) {
                DecodedFrame::Complete(frame, _) if matches(&frame) => {
                    return Ok(Some(position + start as u64));
                }
                _ => from = start + 1,
            }
        }
        if is_last {
            return Ok(None);
        }
        position += end as u64;
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
