//! Copies out of the arena by a list: bytes count only if the list still held after the copy.

use firn_format::data_socket::IN_MEMORY;

use crate::fallback::Fallback;
use crate::memory::{Run, Target, Writable};
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
    let mut done = 0;
    for run in target.runs(0, total) {
        let mut filled = 0;
        while filled < run.len() {
            let at = offset.wrapping_add((done + filled) as u64);
            filled += copy_some::<F>(held, run.rest(filled), at, streams)?;
        }
        done += run.len();
    }
    held.list.is_current().then_some(done)
}

/// Fills the beginning of a run, which lies in the file, from the arena or by the fallback.
fn copy_some<F: Fallback>(
    held: &mut Held,
    run: Run<'_, Writable>,
    at: u64,
    streams: bool,
) -> Option<usize> {
    let next = held.list.find_extent(at);
    let gap = next.map_or(u64::MAX, |extent| extent.offset.saturating_sub(at));
    if let Some(extent) = next.filter(|extent| gap == 0 && extent.place == IN_MEMORY) {
        let skip = at - extent.offset;
        let run = run.first(usize::try_from(extent.len - skip).unwrap_or(usize::MAX));
        run.fill_from(held.list.bytes(&extent, skip, run.len() as u64)?, streams);
        return Some(run.len());
    }
    let gap = if gap == 0 {
        next.map_or(0, |extent| extent.len - (at - extent.offset))
    } else {
        gap
    };
    let run = run.first(usize::try_from(gap).unwrap_or(usize::MAX));
    F::read_at(held, run, at).ok().filter(|got| *got > 0)
}
