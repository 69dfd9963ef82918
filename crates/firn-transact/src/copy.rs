//! Copying data from one file to another, in the same backing or between a backing and its backup.

use std::ops::{ControlFlow, Range};

use firn_backing::{Backing, Errno, Result, data_ranges};

use crate::staging::write_all;

/// Bytes of one read and write of a copy through memory.
pub(crate) const BLOCK: usize = 1 << 20;

/// An open file, with what it is in.
pub(crate) struct OpenFile<'a, B: Backing> {
    pub(crate) backing: &'a B,
    pub(crate) file: &'a B::File,
}

/// Why a copy between two backings ended before its range did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyError {
    /// The file that is copied cannot be read.
    Read(Errno),
    /// The copy cannot be written.
    Write(Errno),
    /// The file that is copied ends there.
    EndsAt(u64),
    /// The caller wanted no more.
    Stopped,
}

/// Copies a range through memory. The caller sees each block before it is written, and may end the copy there.
pub(crate) fn copy_blocks<B: Backing>(
    from: OpenFile<'_, B>,
    to: OpenFile<'_, B>,
    range: Range<u64>,
    visit: &mut dyn FnMut(&[u8]) -> ControlFlow<()>,
) -> std::result::Result<(), CopyError> {
    let mut at = range.start;
    let mut block = vec![0; BLOCK.min(usize::try_from(range.end - at).unwrap_or(BLOCK))];
    while at < range.end {
        let len = block.len().min((range.end - at) as usize);
        let read = from.backing.read_at(from.file, &mut block[..len], at);
        let count = read.map_err(CopyError::Read)?;
        if count == 0 {
            return Err(CopyError::EndsAt(at));
        }
        let bytes = &block[..count];
        if visit(bytes).is_break() {
            return Err(CopyError::Stopped);
        }
        write_all(to.backing, to.file, bytes, at).map_err(CopyError::Write)?;
        at += count as u64;
    }
    Ok(())
}

/// Copies a range to another file of the same backing; what is a hole there becomes one here.
pub(crate) fn copy_with_holes<B: Backing>(
    base: &B,
    from: &B::File,
    to: &B::File,
    range: Range<u64>,
) -> Result<()> {
    let mut at = range.start;
    for data in data_ranges(base, from, range.clone()) {
        clear(base, to, at..data.start)?;
        at = data.end;
        copy_data(base, from, to, data)?;
    }
    clear(base, to, at..range.end)
}

fn copy_data<B: Backing>(base: &B, from: &B::File, to: &B::File, data: Range<u64>) -> Result<()> {
    let Range { start: mut at, end } = data;
    while at < end {
        match base.copy_range(from, at, to, at, end - at) {
            Ok(count) if count > 0 => at += count,
            Ok(_) | Err(Errno::XDEV | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {
                return copy_data_through_memory(base, from, to, at..end);
            }
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

fn copy_data_through_memory<B: Backing>(
    base: &B,
    from: &B::File,
    to: &B::File,
    data: Range<u64>,
) -> Result<()> {
    let side = |file| OpenFile {
        backing: base,
        file,
    };
    let go_on = &mut |_: &[u8]| ControlFlow::Continue(());
    match copy_blocks(side(from), side(to), data.clone(), go_on) {
        Ok(()) | Err(CopyError::Stopped) => Ok(()),
        // Past its end a file reads as zeros here.
        Err(CopyError::EndsAt(at)) => clear(base, to, at..data.end),
        Err(CopyError::Read(errno) | CopyError::Write(errno)) => Err(errno),
    }
}

/// Makes a range a hole, or zeros where the backing cannot.
fn clear<B: Backing>(base: &B, to: &B::File, range: Range<u64>) -> Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    match base.allocate(to, punch, range.start, range.end - range.start) {
        Ok(()) => return Ok(()),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
        Err(errno) => return Err(errno),
    }
    let zeros = vec![0; BLOCK];
    let mut at = range.start;
    while at < range.end {
        let count = (range.end - at).min(BLOCK as u64);
        write_all(base, to, &zeros[..count as usize], at)?;
        at += count;
    }
    Ok(())
}
