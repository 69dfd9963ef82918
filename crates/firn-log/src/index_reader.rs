//! Reads the frames of an index, as far as they are whole, and looks for one behind a part that is not.

use std::ops::Range;

use firn_backing::{Backing, Errno, Result};

use crate::frame::{FRAME_BYTES_MAX, Frame, MAGIC, Next};
use crate::lag::read_whole;
use crate::resolve::WriterId;

/// Bytes of an index that are read at once; larger than any frame.
pub(crate) const INDEX_READ_BYTES: usize = 2 << 20;
/// Bytes of the first read: frequent looks find nothing or little, and memory for more takes longer than the call.
const INDEX_LOOK_BYTES: usize = 16 << 10;

/// Frames of one index that were not known.
pub(crate) struct FramesRead {
    pub(crate) writer: WriterId,
    pub(crate) from: u64,
    /// Where the last one ends.
    pub(crate) to: u64,
    /// With where they begin.
    pub(crate) frames: Vec<(u64, Frame)>,
    /// Nothing followed them.
    pub(crate) is_all: bool,
}

/// The next frames of an index in a range, as far as they are whole: one reading of them.
pub(crate) fn read_index<B: Backing>(
    base: &B,
    index: &B::File,
    writer: WriterId,
    range: Range<u64>,
) -> Result<FramesRead> {
    read_part(base, index, writer, range.start, range.end, range.end)
}

/// The next frames of an index that begin between `from` and `to` and end no later than `limit`.
pub(crate) fn read_part<B: Backing>(
    base: &B,
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
        is_all: false,
    };
    let mut buf = vec![0; INDEX_LOOK_BYTES];
    let mut count = base.read_at(index, &mut buf, from)?;
    if count == buf.len() {
        buf = vec![0; INDEX_READ_BYTES];
        count = base.read_at(index, &mut buf, from)?;
    }
    let mut rest = &buf[..count];
    while frames_read.to < to
        && let Next::Frame(frame, bytes) = Frame::decode(rest)
        && frames_read.to + bytes as u64 <= limit
    {
        frames_read.frames.push((frames_read.to, frame));
        frames_read.to += bytes as u64;
        rest = &rest[bytes..];
    }
    frames_read.is_all = rest.is_empty() && count < buf.len();
    Ok(frames_read)
}

/// Whether an index goes on after `offset`, where no whole frame is, with one that says that there was one.
pub(crate) fn has_synced_frame_after<B: Backing>(
    base: &B,
    index: &B::File,
    offset: u64,
) -> Result<bool> {
    // An index that ends there, or is being appended to, is the usual case.
    let mut first = [0; 64];
    let count = base.read_at(index, &mut first, offset)?;
    // Unless there is another one behind it: then it is damaged where it says how long it is.
    let is_last =
        count < first.len() && find_magic(first[..count].get(1..).unwrap_or(&[])).is_none();
    if is_last && matches!(Frame::decode(&first[..count]), Next::Incomplete) {
        return Ok(false);
    }
    let is_later = |frame: &Frame| frame.synced > offset;
    Ok(find_frame(base, index, offset + 1, &is_later)?.is_some())
}

/// Where the first whole frame begins at `offset` or behind it that is wanted.
pub(crate) fn find_frame<B: Backing>(
    base: &B,
    index: &B::File,
    offset: u64,
    is_wanted: &dyn Fn(&Frame) -> bool,
) -> Result<Option<u64>> {
    let mut at = offset;
    let mut buf = vec![0; INDEX_READ_BYTES];
    loop {
        let count = base.read_at(index, &mut buf, at)?;
        let is_last = count < buf.len();
        // A frame that begins before here is whole in `buf`.
        let starts = if is_last {
            count
        } else {
            count - FRAME_BYTES_MAX
        };
        let mut from = 0;
        while let Some(found) = find_magic(&buf[from..count]).map(|found| from + found) {
            if found >= starts {
                break;
            }
            match Frame::decode(&buf[found..count]) {
                Next::Frame(frame, _) if is_wanted(&frame) => return Ok(Some(at + found as u64)),
                _ => from = found + 1,
            }
        }
        if is_last {
            return Ok(None);
        }
        at += starts as u64;
    }
}

fn find_magic(bytes: &[u8]) -> Option<usize> {
    bytes
        .windows(MAGIC.len())
        .position(|window| window == MAGIC)
}

pub(crate) fn read_exact<B: Backing>(
    base: &B,
    file: &B::File,
    buf: &mut [u8],
    offset: u64,
) -> Result<()> {
    match read_whole(base, file, buf, offset)? {
        count if count == buf.len() => Ok(()),
        // The end of the log went with the power.
        _ => Err(Errno::IO),
    }
}
