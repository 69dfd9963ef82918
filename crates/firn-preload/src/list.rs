//! Where the bytes of a file are, as firnd listed them, and copies of them out of the arena.
//!
//! What is listed stays where it is, and is what the file holds as long as the file's word in the arena is the
//! list's stamp: the word is looked at after the copy. Holes, and bytes that are only in the backing, come from
//! the descriptor's [`Fallback`].

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use firn_direct::arena_map::ArenaMap;
use firn_format::data_socket::{EXTENTS_MAX, Extent, IN_MEMORY, Op, Reply, Status};

use crate::connect;
use crate::descriptor::Fallback;
use crate::memory::{Run, Target, Writable};
use crate::opened;
use crate::sys::syscall;
use crate::table::{Held, TABLE};

/// Extents of one file; with more of them the fallback reads.
const LIST_MAX: usize = 64 * EXTENTS_MAX;
/// From here on what is read does not fit into the caches and is better not put there: stores past them are
/// a third faster then. What fits is used from there by the program next.
const STREAM_BYTES_MIN: usize = 16 << 20;

/// Where a file's bytes are. Zeros: not asked for.
pub(crate) struct List {
    /// Room for [`LIST_MAX`] extents, or null.
    extents: *mut Extent,
    count: usize,
    /// The extent that the last read ended in.
    hint: usize,
    /// Bytes of the file.
    size: u64,
    /// The file's word in the arena; none: not asked for.
    word: Option<&'static AtomicU32>,
    stamp: u32,
    map: ArenaMap,
}

impl List {
    pub(crate) const fn new() -> Self {
        Self {
            extents: std::ptr::null_mut(),
            count: 0,
            hint: 0,
            size: 0,
            word: None,
            stamp: 0,
            map: ArenaMap::NONE,
        }
    }

    /// Forgets the list.
    pub(crate) fn unmap(&mut self) {
        if !self.extents.is_null() {
            // SAFETY: mapped by `map` with this length, and no slice of it is left.
            unsafe {
                syscall!(
                    libc::SYS_munmap,
                    self.extents,
                    LIST_MAX * size_of::<Extent>()
                )
            };
        }
        *self = Self::new();
    }

    /// Begins a new list; its room.
    fn map(&mut self) -> Option<&mut [MaybeUninit<Extent>]> {
        self.unmap();
        let (prot, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        let bytes = LIST_MAX * size_of::<Extent>();
        let flags = flags | libc::MAP_NORESERVE;
        // SAFETY: a new mapping wherever the kernel likes: nothing else is there.
        let at = unsafe { syscall!(libc::SYS_mmap, 0usize, bytes, prot, flags, -1isize, 0usize) };
        if at > 0 {
            self.extents = at as *mut Extent;
        }
        self.room()
    }

    /// Room for the extents of one more answer.
    fn room(&mut self) -> Option<&mut [MaybeUninit<Extent>]> {
        if self.extents.is_null() || self.count + EXTENTS_MAX > LIST_MAX {
            return None;
        }
        let room = self
            .extents
            .wrapping_add(self.count)
            .cast::<MaybeUninit<Extent>>();
        // SAFETY: the map has room for so many more, and nobody else has the list.
        Some(unsafe { std::slice::from_raw_parts_mut(room, EXTENTS_MAX) })
    }

    /// Bytes of the file.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    pub(crate) fn extents(&self) -> &[Extent] {
        if self.extents.is_null() {
            return &[];
        }
        // SAFETY: firnd's answers filled so many.
        unsafe { std::slice::from_raw_parts(self.extents, self.count) }
    }

    /// Whether the list still is what the file holds. Whoever copied asks afterwards.
    fn is_current(&self) -> bool {
        fence(Ordering::Acquire);
        self.word
            .is_some_and(|word| word.load(Ordering::Relaxed) == self.stamp)
    }

    /// The extent that holds `offset`, or the first one behind it.
    fn find(&mut self, offset: u64) -> Option<Extent> {
        let ends_before = |extent: &Extent| extent.offset.saturating_add(extent.len) <= offset;
        let list = self.extents();
        let mut index = self.hint;
        let right = list.get(index).is_some_and(|extent| !ends_before(extent))
            && (index == 0 || list.get(index - 1).is_some_and(ends_before));
        if !right {
            index = list.partition_point(ends_before);
        }
        let found = list.get(index).copied();
        self.hint = index;
        found
    }
}

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
    let next = held.list.find(at);
    let gap = next.map_or(u64::MAX, |extent| extent.offset.saturating_sub(at));
    if let Some(extent) = next.filter(|extent| gap == 0 && extent.place == IN_MEMORY) {
        let skip = at - extent.offset;
        let run = run.first(usize::try_from(extent.len - skip).unwrap_or(usize::MAX));
        let from = extent.at.checked_add(skip)?;
        run.fill(held.list.map.bytes(from, run.len() as u64)?, streams);
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

/// Fetches the whole list; how firnd answered.
pub(crate) fn fetch(held: &mut Held) -> Option<Status> {
    let token = TABLE
        .devices
        .first_token(held.token)
        .or_else(|| opened::token(held.fd))?;
    let room = held.list.map()?;
    let (link, first) = TABLE.links.to_read(&token, room)?;
    (held.link, held.token) = (link, token.token);
    fetch_from(held, first)
}

/// The same where the token is known.
pub(crate) fn fetch_known(held: &mut Held) -> Option<Status> {
    held.list.map()?;
    fetch_from(held, None)
}

/// Fetches the list, whose first part may be there already.
fn fetch_from(held: &mut Held, mut first: Option<Reply>) -> Option<Status> {
    held.list.map = connect::arena_map(held.link)?;
    let mut from = 0;
    loop {
        let reply = first.take().or_else(|| fetch_some(held, from))?;
        let status = Status::from_word(reply.status);
        if status != Status::Ok {
            return Some(status);
        }
        held.list.count += reply.count as usize;
        let changed = from > 0 && reply.stamp != held.list.stamp;
        held.list.word = held.list.map.word(reply.slot);
        if changed || held.list.word.is_none() {
            return Some(Status::Busy);
        }
        (held.list.stamp, held.list.size) = (reply.stamp, reply.size);
        let ends = held
            .list
            .extents()
            .last()
            .map_or(0, |extent| extent.offset.saturating_add(extent.len));
        if (reply.count as usize) < EXTENTS_MAX || ends <= from {
            return Some(Status::Ok);
        }
        from = ends;
    }
}

/// Fetches the extents from an offset on, behind those that are there.
fn fetch_some(held: &mut Held, from: u64) -> Option<Reply> {
    let link = held.link;
    let token = held.token;
    connect::ask_extents(link, token, (Op::Extents, from), held.list.room()?)
}
