//! Copies out of the arena, and reads files of the backing, by a list: bytes count only if the list still held after the copy.

use firn_format::data_socket::{Extent, IN_BACKING, IN_MEMORY, TO_BE_ASKED};

use crate::fallback::Fallback;
use crate::list::fetch;
use crate::memory::{Run, Target, Writable};
use crate::report;
use crate::table::Held;

/// From here on what is read does not fit into the caches and is better not put there: stores past them are
/// a third faster then. What fits is used from there by the program next.
const STREAM_BYTES_MIN: usize = 16 << 20;

/// Copies `total` bytes from `offset` on, or as many as the file has; `None`: the list does not hold any more, or
/// a gap could not be read.
pub(crate) fn copy_out<F: Fallback>(
    held: &mut Held,
    target: Target<'_>,
    offset: u64,
    total: usize,
) -> Option<usize> {
    let left = held.list.size.saturating_sub(offset);
    let total = total.min(usize::try_from(left).unwrap_or(usize::MAX));
    let streams = total >= STREAM_BYTES_MIN;
    let mut used = 0;
    let mut done = 0;
    for run in target.runs(0, total) {
        let mut filled = 0;
        while filled < run.len() {
            let at = offset.wrapping_add((done + filled) as u64);
            filled += copy_some::<F>(held, run.rest(filled), at, streams, &mut used)?;
        }
        done += run.len();
    }
    held.list.read_bytes = held.list.read_bytes.wrapping_add(done as u64);
    (held.list.is_current() && held.list.are_same(used)).then_some(done)
}

/// Fills the beginning of a run, which lies in the file, from the arena, from a file of the backing or by the fallback.
/// The bits of such files are set in `used`.
fn copy_some<F: Fallback>(
    held: &mut Held,
    run: Run<'_, Writable>,
    at: u64,
    streams: bool,
    used: &mut u64,
) -> Option<usize> {
    let is_known = fetch::reach(held, at)?;
    let mut next = held.list.find_extent(at);
    if next.is_some_and(|extent| extent.offset <= at && extent.place == TO_BE_ASKED) {
        next = fetch::ask_again(held, at)?;
    }
    let gap = next.map_or(u64::MAX, |extent| extent.offset.saturating_sub(at));
    let Some(extent) = next.filter(|_| gap == 0) else {
        // Behind the end of the list there may be more.
        let known = held.list.end.saturating_sub(at);
        let gap = if is_known { gap.min(known) } else { gap };
        let run = run.first(usize::try_from(gap).unwrap_or(usize::MAX));
        return F::read_at(held, run, at).ok().filter(|got| *got > 0);
    };
    let skip = at - extent.offset;
    let run = run.first(usize::try_from(extent.len - skip).unwrap_or(usize::MAX));
    if extent.place == IN_MEMORY {
        run.fill_from(held.list.bytes(&extent, skip, run.len() as u64)?, streams);
        return Some(run.len());
    }
    if extent.place == IN_BACKING
        && let Some(got) = read_backing(held, run, (&extent, skip), used)?
    {
        return Some(got);
    }
    F::read_at(held, run, at).ok().filter(|got| *got > 0)
}

/// Reads the beginning of a run from a file of the backing; `Some(None)`: the fallback tells what is wrong. `None`: the
/// list does not hold any more.
fn read_backing(
    held: &mut Held,
    run: Run<'_, Writable>,
    (extent, skip): (&Extent, u64),
    used: &mut u64,
) -> Option<Option<usize>> {
    if !fetch::is_valid(held) {
        return None;
    }
    let file = held.list.file(extent.chunk);
    let place = file.zip(extent.at.checked_add(skip));
    let Some((file, place)) = place.filter(|(_, place)| *place <= i64::MAX as u64) else {
        return Some(None);
    };
    *used |= 1 << extent.chunk;
    let got = run.read_from(file.fd, place);
    let got = usize::try_from(got).ok().filter(|got| *got > 0);
    report::count_backing(got.unwrap_or(0));
    Some(got)
}
