//! Reads bytes of a file by its *list*, which says where they are: copies them out of the arena (the mount's shared
//! memory), or reads them from files of the backing (the directory that the mount serves).
//!
//! The result counts only if the list still is current (the bytes have not moved) after the last byte was copied, and
//! if no descriptor that was read from has become another file.

use firn_format::data_socket::{Extent, IN_BACKING, IN_MEMORY, TO_BE_ASKED};

use crate::fallback::Fallback;
use crate::list::{ListFailed, fetch};
use crate::memory::{Run, Target, Writable};
use crate::report;
use crate::table::LockedEntry;

/// Reads of at least this size are stored past the processor's caches, which is a third faster. They would not fit into
/// the caches, while the program uses the bytes of a smaller read from there.
const STREAM_BYTES_MIN: usize = 16 << 20;

/// Reads up to `total` bytes of a file by its *list*, which says where its bytes are in shared memory or in files below
/// the mount. Returns the number of bytes, which is smaller at the end of the file. The error means that the bytes in
/// `target` do not count: the list has become void, or one of its gaps could not be read.
pub(crate) fn copy_out<F: Fallback>(
    locked: &mut LockedEntry,
    target: Target<'_>,
    offset: u64,
    total: usize,
) -> Result<usize, ListFailed> {
    let bytes_to_end = locked.list.size.saturating_sub(offset);
    let total = total.min(usize::try_from(bytes_to_end).unwrap_or(usize::MAX));
    let mut read = ListRead {
        bypass_caches: total >= STREAM_BYTES_MIN,
        used_files: 0,
    };
    let mut done = 0;
    for run in target.runs(0, total) {
        let mut filled = 0;
        while filled < run.len() {
            let file_offset = offset.wrapping_add((done + filled) as u64);
            filled +=
                read.copy_from_one_place::<F>(locked, run.without_first(filled), file_offset)?;
        }
        done += run.len();
    }
    locked.list.read_bytes = locked.list.read_bytes.wrapping_add(done as u64);
    // Checked after the copy: the bytes of a current list have not moved, so the copy is right.
    if locked.list.is_current() && locked.list.have_same_files(read.used_files) {
        Ok(done)
    } else {
        Err(ListFailed)
    }
}

/// State of one read by a list.
struct ListRead {
    /// Whether bytes of the arena are stored past the processor's caches.
    bypass_caches: bool,
    /// The files of the backing that were read so far, as bits.
    used_files: u64,
}

impl ListRead {
    /// Reads bytes of a file from `offset` on into the beginning of `run` (memory of the program), as many as are in
    /// one place. Returns their number.
    ///
    /// The list says where the bytes are: in the arena (shared memory), in a file of the backing (the directory below
    /// the mount), or in a gap, which the fallback (the kernel or firnd) reads. The error means that the list is void,
    /// or that the fallback could not read.
    fn copy_from_one_place<F: Fallback>(
        &mut self,
        locked: &mut LockedEntry,
        run: Run<'_, Writable>,
        offset: u64,
    ) -> Result<usize, ListFailed> {
        let is_covered = fetch::extend_to(locked, offset)?;
        // The extent (a range of the file and its place) that has the byte at `offset`, or the next one behind it.
        let mut next_extent = locked.list.find_extent(offset);
        if let Some(extent) = next_extent
            && extent.offset <= offset
            && extent.place == TO_BE_ASKED
        {
            // firnd left out this extent's place; a request from an offset in it gets the place.
            next_extent = fetch::request_again(locked, offset)?;
        }
        // Without an extent at `offset`, the byte is in a gap, which the fallback fills up to the next extent.
        let extent = match next_extent {
            Some(extent) if extent.offset <= offset => extent,
            _ => {
                let gap_end = next_extent.map_or(u64::MAX, |extent| extent.offset);
                // The gap may end with the known part, behind which there may be further extents.
                let gap_end = if is_covered {
                    gap_end.min(locked.list.end)
                } else {
                    gap_end
                };
                let gap_bytes =
                    usize::try_from(gap_end.saturating_sub(offset)).unwrap_or(usize::MAX);
                return read_by_fallback::<F>(locked, run.first(gap_bytes), offset);
            }
        };
        let skipped_bytes = offset - extent.offset;
        let extent_bytes = usize::try_from(extent.len - skipped_bytes).unwrap_or(usize::MAX);
        let run = run.first(extent_bytes);
        if extent.place == IN_MEMORY {
            let arena_bytes = locked.list.bytes(&extent, skipped_bytes, run.len() as u64);
            run.copy_from_arena(arena_bytes.ok_or(ListFailed)?, self.bypass_caches);
            return Ok(run.len());
        }
        if extent.place == IN_BACKING
            && let Some(count) = self.read_backing(locked, run, &extent, skipped_bytes)?
        {
            return Ok(count);
        }
        read_by_fallback::<F>(locked, run, offset)
    }

    /// Reads the beginning of a run from a file of the backing, the directory below the mount. `extent` is the range of
    /// the file that is there, and `skipped_bytes` is the position in it.
    ///
    /// Returns the number of bytes; `None` if nothing could be read, so that the fallback must find out why. The error
    /// means that the list is not valid any more.
    fn read_backing(
        &mut self,
        locked: &mut LockedEntry,
        run: Run<'_, Writable>,
        extent: &Extent,
        skipped_bytes: u64,
    ) -> Result<Option<usize>, ListFailed> {
        if !fetch::revalidate(locked) {
            return Err(ListFailed);
        }
        // In the backing, `chunk` is the index of the file in the list.
        let file_index = extent.chunk;
        let Some(file) = locked.list.file(file_index) else {
            return Ok(None);
        };
        let backing_offset = match extent.at.checked_add(skipped_bytes) {
            Some(offset) if offset <= i64::MAX as u64 => offset,
            _ => return Ok(None),
        };
        // Noted before the read: after the read it is checked that the descriptor still is the same file.
        self.used_files |= 1 << file_index;
        let result = run.read_from(file.fd, backing_offset);
        let count = usize::try_from(result).unwrap_or(0);
        report::count_backing(count);
        Ok((count > 0).then_some(count))
    }
}

/// Reads the bytes of a run by the fallback. An error, and the end of the file, end the read by the list.
fn read_by_fallback<F: Fallback>(
    locked: &mut LockedEntry,
    run: Run<'_, Writable>,
    offset: u64,
) -> Result<usize, ListFailed> {
    match F::read_at(locked, run, offset) {
        Ok(count) if count > 0 => Ok(count),
        _ => Err(ListFailed),
    }
}
