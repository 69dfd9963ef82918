//! Copies data from one file to another, in the same backing (the directory below a mount) or between a backing and its
//! backup.

use std::ops::{ControlFlow, Range};

use firn_backing::{Backing, Errno, Result, data_ranges};

use crate::staging::write_all;

/// Size of each read and write when data is copied through memory.
const BLOCK_BYTES: usize = 1 << 20;

/// An open file, with the backing that has it.
pub(crate) struct OpenFile<'a, B: Backing> {
    pub(crate) backing: &'a B,
    pub(crate) file: &'a B::File,
}

impl<B: Backing> Clone for OpenFile<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backing> Copy for OpenFile<'_, B> {}

/// Why a copy ended before the end of its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyError {
    /// The file that is copied cannot be read.
    Read(Errno),
    /// The copy cannot be written.
    Write(Errno),
    /// The file that is copied ends at this offset.
    EndsAt(u64),
    /// The caller stopped the copy.
    Stopped,
}

/// Copies a range of a file to the same range of another file, through memory. Calls `visit` with each block before the
/// block is written; `visit` may stop the copy. The error says whether the source or the target failed.
pub(crate) fn copy_blocks<B: Backing>(
    source: OpenFile<'_, B>,
    target: OpenFile<'_, B>,
    range: Range<u64>,
    visit: &mut dyn FnMut(&[u8]) -> ControlFlow<()>,
) -> std::result::Result<(), CopyError> {
    let mut offset = range.start;
    let range_len = usize::try_from(range.end - offset).unwrap_or(usize::MAX);
    let mut block = vec![0; range_len.min(BLOCK_BYTES)];
    while offset < range.end {
        let len = block.len().min((range.end - offset) as usize);
        let count = source
            .backing
            .read_at(source.file, &mut block[..len], offset)
            .map_err(CopyError::Read)?;
        if count == 0 {
            return Err(CopyError::EndsAt(offset));
        }
        let bytes = &block[..count];
        if visit(bytes).is_break() {
            return Err(CopyError::Stopped);
        }
        write_all(target.backing, target.file, bytes, offset).map_err(CopyError::Write)?;
        offset += count as u64;
    }
    Ok(())
}

/// Copies a range to another file of the same backing. Holes of the source become holes of the copy.
pub(crate) fn copy_with_holes<B: Backing>(
    base: &B,
    source: &B::File,
    target: &B::File,
    range: Range<u64>,
) -> Result<()> {
    let mut offset = range.start;
    for data in data_ranges(base, source, range.clone()) {
        let hole = offset..data.start;
        clear_range(base, target, hole)?;
        offset = data.end;
        copy_data(base, source, target, data)?;
    }
    clear_range(base, target, offset..range.end)
}

/// Copies a range without holes to the same range of another file: by a call of the backing (the file system that has
/// both) if it supports that, otherwise through memory.
fn copy_data<B: Backing>(
    base: &B,
    source: &B::File,
    target: &B::File,
    data: Range<u64>,
) -> Result<()> {
    let mut offset = data.start;
    while offset < data.end {
        match base.copy_range(source, offset, target, offset, data.end - offset) {
            Ok(count) if count > 0 => offset += count,
            // The backing cannot copy between these files, or copies nothing.
            Ok(_) | Err(Errno::XDEV | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {
                return copy_data_through_memory(base, source, target, offset..data.end);
            }
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Copies a range of a file to the same range of another file, by reads and writes of this process. Bytes after the end
/// of the source count as zeros.
fn copy_data_through_memory<B: Backing>(
    base: &B,
    source: &B::File,
    target: &B::File,
    data: Range<u64>,
) -> Result<()> {
    let open_file = |file| OpenFile {
        backing: base,
        file,
    };
    let continue_copy = &mut |_: &[u8]| ControlFlow::Continue(());
    let copied = copy_blocks(
        open_file(source),
        open_file(target),
        data.clone(),
        continue_copy,
    );
    match copied {
        Ok(()) | Err(CopyError::Stopped) => Ok(()),
        // The source is shorter than the range.
        Err(CopyError::EndsAt(offset)) => clear_range(base, target, offset..data.end),
        Err(CopyError::Read(errno) | CopyError::Write(errno)) => Err(errno),
    }
}

/// Makes a range of a file a hole. If the backing `base`, the file system that has the file, cannot do so, writes
/// zeros.
fn clear_range<B: Backing>(base: &B, file: &B::File, range: Range<u64>) -> Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    let punch_hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    match base.allocate(file, punch_hole, range.start, range.end - range.start) {
        Ok(()) => return Ok(()),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
        Err(errno) => return Err(errno),
    }
    let zeros = vec![0; BLOCK_BYTES];
    let mut offset = range.start;
    while offset < range.end {
        let count = (range.end - offset).min(BLOCK_BYTES as u64);
        write_all(base, file, &zeros[..count as usize], offset)?;
        offset += count;
    }
    Ok(())
}
