//! Reads bytes of a file by its list: copies them out of the arena, or reads them from files of the backing.
//!
//! The result counts only if the list is current after the last byte was copied, and if no used descriptor was
//! replaced.

use firn_format::data_socket::{Extent, IN_BACKING, IN_MEMORY, TO_BE_ASKED};

use crate::fallback::Fallback;
use crate::list::fetch;
use crate::memory::{Run, Target, Writable};
use crate::report;
use crate::table::LockedEntry;

/// Reads of at least this size are stored past the processor's caches, which is a third faster. They would not fit into
/// the caches, while the program uses the bytes of a smaller read from there.
const STREAM_BYTES_MIN: usize = 16 << 20;

/// Reads `total` bytes from `offset` on, or as many as the file has. Returns their number, or `None` if the list is
/// void or a gap of it could not be read.
pub(crate) fn copy_out<F: Fallback>(
    locked: &mut LockedEntry,
    target: Target<'_>,
    offset: u64,
    total: usize,
) -> Option<usize> {
    let left = locked.list.size.saturating_sub(offset);
    let total = total.min(usize::try_from(left).unwrap_or(usize::MAX));
    let streams = total >= STREAM_BYTES_MIN;
    let mut used_files = 0;
    let mut done = 0;
    for run in target.runs(0, total) {
        let mut filled = 0;
        while filled < run.len() {
            let at = offset.wrapping_add((done + filled) as u64);
            filled += copy_some::<F>(
                locked,
                run.without_first(filled),
                at,
                streams,
                &mut used_files,
            )?;
        }
        done += run.len();
    }
    locked.list.read_bytes = locked.list.read_bytes.wrapping_add(done as u64);
    (locked.list.is_current() && locked.list.have_same_files(used_files)).then_some(done)
}

/// Fills the beginning of a run: from the arena, from a file of the backing, or by the fallback. Returns the number of
/// bytes. `at` is the run's offset in the file. For each used file its bit is set in `used_files`.
fn copy_some<F: Fallback>(
    locked: &mut LockedEntry,
    run: Run<'_, Writable>,
    at: u64,
    streams: bool,
    used_files: &mut u64,
) -> Option<usize> {
    let is_known = fetch::extend_to(locked, at)?;
    let mut next = locked.list.find_extent(at);
    if next.is_some_and(|extent| extent.offset <= at && extent.place == TO_BE_ASKED) {
        next = fetch::request_again(locked, at)?;
    }
    let gap = next.map_or(u64::MAX, |extent| extent.offset.saturating_sub(at));
    let Some(extent) = next.filter(|_| gap == 0) else {
        // The gap may end with the known part, behind which there may be further extents.
        let known = locked.list.end.saturating_sub(at);
        let gap = if is_known { gap.min(known) } else { gap };
        let run = run.first(usize::try_from(gap).unwrap_or(usize::MAX));
        return F::read_at(locked, run, at).ok().filter(|count| *count > 0);
    };
    let skip = at - extent.offset;
    let run = run.first(usize::try_from(extent.len - skip).unwrap_or(usize::MAX));
    if extent.place == IN_MEMORY {
        run.copy_from_arena(locked.list.bytes(&extent, skip, run.len() as u64)?, streams);
        return Some(run.len());
    }
    if extent.place == IN_BACKING
        && let Some(count) = read_backing(locked, run, (&extent, skip), used_files)?
    {
        return Some(count);
    }
    F::read_at(locked, run, at).ok().filter(|count| *count > 0)
}

/// Reads the beginning of a run from a file of the backing.
///
/// Returns the number of bytes. `Some(None)` means that nothing could be read, so that the fallback must find out why.
/// `None` means that the list is void.
fn read_backing(
    locked: &mut LockedEntry,
    run: Run<'_, Writable>,
    (extent, skip): (&Extent, u64),
    used_files: &mut u64,
) -> Option<Option<usize>> {
    if !fetch::is_valid(locked) {
        return None;
    }
    let file = locked.list.file(extent.chunk);
    let place = file.zip(extent.at.checked_add(skip));
    let Some((file, place)) = place.filter(|(_, place)| *place <= i64::MAX as u64) else {
        return Some(None);
    };
    *used_files |= 1 << extent.chunk;
    let result = run.read_from(file.fd, place);
    let count = usize::try_from(result).ok().filter(|count| *count > 0);
    report::count_backing(count.unwrap_or(0));
    Some(count)
}
