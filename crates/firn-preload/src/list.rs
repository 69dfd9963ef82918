//! Where the bytes of a file are, as firnd listed them.
//!
//! What is listed stays where it is, and is what the file holds as long as the file's word in the arena is the
//! list's stamp: the word is looked at after the copy. Holes, and bytes that are only in the backing, come from
//! the descriptor's fallback ([`crate::fallback`]).
//!
//! Invariants
//! * `count <= LIST_MAX`, and so many extents were written by answers of firnd.
//! * Extents are mapped while `extents` is not null.

pub(crate) mod copy;
pub(crate) mod fetch;

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use firn_direct::arena_map::{ArenaBytes, ArenaMap};
use firn_format::data_socket::{EXTENTS_MAX, Extent, Reply};
use rustix::mm::{MapFlags, ProtFlags};

/// Extents of one file; with more of them the fallback reads.
const LIST_MAX: usize = 64 * EXTENTS_MAX;
const LIST_BYTES: usize = LIST_MAX * size_of::<Extent>();

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

// SAFETY: the extents are this list's own mapping, and belong to no thread.
unsafe impl Send for List {}

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

    /// Forgets the list and gives its memory back.
    pub(crate) fn unmap_extents(&mut self) {
        if !self.extents.is_null() {
            // SAFETY: mapped by `map_extents` with this length, and no slice of it outlives a borrow of this list.
            let _ = unsafe { rustix::mm::munmap(self.extents.cast(), LIST_BYTES) };
        }
        *self = Self::new();
    }

    /// Begins a new list of extents in an arena; `None` where there is no memory.
    fn map_extents(&mut self) -> Option<()> {
        self.unmap_extents();
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let anywhere = std::ptr::null_mut();
        // SAFETY: new memory where the kernel finds room replaces nothing.
        let start = unsafe { rustix::mm::mmap_anonymous(anywhere, LIST_BYTES, prot, flags) };
        self.extents = start.ok()?.cast();
        Some(())
    }

    /// Room for the extents of one more answer; `None` where the list is full.
    fn room(&mut self) -> Option<&mut [MaybeUninit<Extent>]> {
        if self.extents.is_null() || self.count + EXTENTS_MAX > LIST_MAX {
            return None;
        }
        let room = self.extents.wrapping_add(self.count).cast();
        // SAFETY: the mapping has room for so many more, as just compared, and is borrowed with this list alone.
        Some(unsafe { std::slice::from_raw_parts_mut(room, EXTENTS_MAX) })
    }

    /// Takes an answer over whose extents lie in [`List::room`]. `false`: the file changed since the first answer, or
    /// its word is not mapped.
    fn add_answer(&mut self, reply: &Reply) -> bool {
        let is_first = self.word.is_none();
        let is_same = is_first || self.stamp == reply.stamp;
        self.count = (self.count + reply.count as usize).min(LIST_MAX);
        self.word = self.map.word(reply.slot);
        self.stamp = reply.stamp;
        self.size = reply.size;
        is_same && self.word.is_some()
    }

    /// Bytes of the file.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    pub(crate) fn extents(&self) -> &[Extent] {
        if self.extents.is_null() {
            return &[];
        }
        // SAFETY: firnd's answers filled so many (`add_answer`), and extents are words of any value.
        unsafe { std::slice::from_raw_parts(self.extents, self.count) }
    }

    /// Where the last extent ends.
    fn end(&self) -> u64 {
        let last = self.extents().last();
        last.map_or(0, |extent| extent.offset.saturating_add(extent.len))
    }

    /// Bytes of the arena that an extent names, `len` from `skip` on; `None` where they are not mapped.
    fn bytes(&self, extent: &Extent, skip: u64, len: u64) -> Option<ArenaBytes> {
        self.map.bytes(extent.at.checked_add(skip)?, len)
    }

    /// Whether the list still is what the file holds. Whoever copied asks afterwards.
    fn is_current(&self) -> bool {
        fence(Ordering::Acquire);
        self.word
            .is_some_and(|word| word.load(Ordering::Relaxed) == self.stamp)
    }

    /// The extent that holds `offset`, or the first one behind it.
    fn find_extent(&mut self, offset: u64) -> Option<Extent> {
        let ends_before = |extent: &Extent| extent.offset.saturating_add(extent.len) <= offset;
        let list = self.extents();
        let mut index = self.hint;
        let is_hint_right = list.get(index).is_some_and(|extent| !ends_before(extent))
            && (index == 0 || list.get(index - 1).is_some_and(ends_before));
        if !is_hint_right {
            index = list.partition_point(ends_before);
        }
        let found = list.get(index).copied();
        self.hint = index;
        found
    }
}
