//! Where the bytes of a file are, as firnd listed them.
//!
//! What is listed stays where it is, and is what the file holds as long as the file's word in the arena is the list's
//! stamp: the word is looked at after the copy. Bytes that are in files of the backing are read by descriptors that
//! came with the list. Changes by other hosts are not seen here, so such a list holds for a while only, and then firnd
//! is asked whether it still does. Holes, and bytes that only firnd can read, come from the descriptor's fallback
//! ([`crate::fallback`]).
//!
//! ```text
//!   0 ......... start ═══ extents, and gaps ═══ end ............ size
//!   not asked for    all is known of this part     not asked for yet
//! ```
//!
//! A list without files of the backing is of the whole file. One with them begins where the program began to read, and
//! gets longer as it reads: a file may have millions of pieces.
//!
//! Invariants
//! * `count <= LIST_MAX`, and answers of firnd wrote the first `count` extents.
//! * Extents and files are mapped while `extents` is not null.
//! * `file_count <= LIST_FILES_MAX`; the first `file_count` files are open, and this list's own.

pub(crate) mod copy;
pub(crate) mod fetch;
pub(crate) mod files;

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use firn_direct::arena_map::{ArenaBytes, ArenaMap};
use firn_direct::connection::Files;
use firn_format::data_socket::{EXTENTS_MAX, Extent, IN_BACKING, Reply};
use rustix::mm::{MapFlags, ProtFlags};

use self::files::{LIST_FILES_MAX, ListFile};
use crate::sys;

/// Extents of one file; with more of them the fallback reads, or the list is of a part of the file.
const LIST_MAX: usize = 64 * EXTENTS_MAX;
const EXTENTS_BYTES: usize = LIST_MAX * size_of::<Extent>();
const LIST_BYTES: usize = EXTENTS_BYTES + LIST_FILES_MAX * size_of::<ListFile>();
const _: () = assert!(EXTENTS_BYTES.is_multiple_of(align_of::<ListFile>()));
/// Which files a call read by is a word of bits.
const _: () = assert!(LIST_FILES_MAX <= u64::BITS as usize);

/// A read that begins no further than this beyond the end of a list extends the list by what lies between.
const NEAR_BYTES: u64 = 1 << 20;
/// After this many reads elsewhere, a list begins anew there, though little was read by it.
const MISSES_MAX: u32 = 16;

/// Where a file's bytes are. Zeros: not asked for.
pub(crate) struct List {
    /// Room for [`LIST_MAX`] extents, and [`LIST_FILES_MAX`] files behind them; or null.
    extents: *mut Extent,
    count: usize,
    file_count: usize,
    /// The extent that the last read ended in.
    hint: usize,
    /// Offset in the file from which the list knows all …
    start: u64,
    /// … and the offset where that ends.
    end: u64,
    /// Bytes that the last answer added.
    last_bytes: u64,
    /// Bytes of the file.
    size: u64,
    /// The file's word in the arena; none: not asked for.
    word: Option<&'static AtomicU32>,
    stamp: u32,
    /// When others may have changed the file, by [`sys::coarse_ns`]; 0: only the word tells.
    until_ns: u64,
    /// Bytes that were read by the list since it began at `start`.
    read_bytes: u64,
    /// Reads elsewhere since then.
    misses: u32,
    map: ArenaMap,
}

// SAFETY: the extents and files are this list's own mapping, and belong to no thread.
unsafe impl Send for List {}

impl List {
    pub(crate) const fn new() -> Self {
        Self {
            extents: std::ptr::null_mut(),
            count: 0,
            file_count: 0,
            hint: 0,
            start: 0,
            end: 0,
            last_bytes: 0,
            size: 0,
            word: None,
            stamp: 0,
            until_ns: 0,
            read_bytes: 0,
            misses: 0,
            map: ArenaMap::NONE,
        }
    }

    /// Forgets the list, closes its files and gives its memory back.
    pub(crate) fn unmap_extents(&mut self) {
        for file in self.files() {
            file.close();
        }
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

    /// Forgets the extents: the list begins at `start`.
    fn begin_at(&mut self, start: u64) {
        self.count = 0;
        self.hint = 0;
        self.start = start;
        self.end = start;
        self.last_bytes = 0;
        self.read_bytes = 0;
        self.misses = 0;
    }

    /// Room for the extents of one more answer; `None` where the list is full.
    fn room(&mut self) -> Option<&mut [MaybeUninit<Extent>]> {
        if self.extents.is_null() || !self.has_room() {
            return None;
        }
        let room = self.extents.wrapping_add(self.count).cast();
        // SAFETY: the mapping has room for `EXTENTS_MAX` more, as just compared, and is borrowed with this list alone.
        Some(unsafe { std::slice::from_raw_parts_mut(room, EXTENTS_MAX) })
    }

    fn has_room(&self) -> bool {
        self.count + EXTENTS_MAX <= LIST_MAX
    }

    /// Takes over an answer for what comes at the end of the list, which was asked for at `asked_ns`, and whose extents lie
    /// in [`List::room`]. `false`: the file changed since the first answer, or its word is not mapped.
    fn add_answer(
        &mut self,
        reply: &Reply,
        files: &mut Files,
        asked_ns: u64,
        owner: c_int,
    ) -> bool {
        let is_first = self.word.is_none();
        let is_same = is_first || (self.stamp == reply.stamp && self.size == reply.size);
        let before = self.count;
        self.count = (self.count + reply.count as usize).min(LIST_MAX);
        self.keep_files(files, before, owner);
        self.word = self.map.word(reply.slot);
        self.stamp = reply.stamp;
        self.size = reply.size;
        self.last_bytes = reply.end.saturating_sub(self.end);
        self.end = self.end.max(reply.end);
        self.note_valid(reply, asked_ns);
        is_same && self.word.is_some()
    }

    /// Another answer with the same stamp says that all of the list holds that long.
    fn note_valid(&mut self, reply: &Reply, asked_ns: u64) {
        if reply.valid_ns != 0 {
            let until = asked_ns.saturating_add(reply.valid_ns);
            let until = until.saturating_sub(sys::COARSE_TICK_NS).max(1);
            self.until_ns = self.until_ns.max(until);
        }
    }

    /// Takes the descriptors of an answer over, whose extents are those from `first` on, and has these name files of the
    /// list. What was known of a file stays: each answer brings the descriptors that it names.
    fn keep_files(&mut self, files: &mut Files, first: usize, owner: c_int) {
        const NONE: u32 = u32::MAX;
        let mut index_of = [NONE; firn_format::data_socket::FILES_MAX];
        for (index, of) in index_of.iter_mut().enumerate().take(files.count()) {
            let known = files.take(index).and_then(|fd| self.keep_file(&fd, owner));
            *of = known.map_or(NONE, |known| known as u32);
        }
        for extent in self.extents_mut().iter_mut().skip(first) {
            if extent.place == IN_BACKING {
                let known = index_of.get(extent.chunk as usize);
                extent.chunk = known.copied().unwrap_or(NONE);
            }
        }
    }

    /// The index of a file that came; `None` where there is no room for it.
    fn keep_file(
        &mut self,
        received: &firn_direct::syscall::Descriptor,
        owner: c_int,
    ) -> Option<usize> {
        use std::os::fd::{AsFd, AsRawFd};
        let identity = sys::own_identity(received.as_fd().as_raw_fd())?;
        let is_it = |file: &ListFile| file.identity == identity;
        if let Some(known) = self.files().position(|file| is_it(&file)) {
            return Some(known);
        }
        if self.file_count >= LIST_FILES_MAX {
            return None;
        }
        let file = ListFile::keep(received, identity, owner)?;
        let index = self.file_count;
        // SAFETY: `index` is less than `LIST_FILES_MAX`, the number of files for which the mapping has room.
        unsafe { self.files_start().add(index).write(file) };
        self.file_count += 1;
        Some(index)
    }

    fn files_start(&self) -> *mut ListFile {
        self.extents.wrapping_add(LIST_MAX).cast()
    }

    fn files(&self) -> impl Iterator<Item = ListFile> + use<> {
        let start = self.files_start();
        // SAFETY: `keep_file` wrote the first `file_count` files; they stay mapped until `unmap_extents`, which is done
        // with these.
        (0..self.file_count).map(move |index| unsafe { start.add(index).read() })
    }

    /// A file by its index.
    fn file(&self, index: u32) -> Option<ListFile> {
        let index = index as usize;
        // SAFETY: as for `files`.
        (index < self.file_count).then(|| unsafe { self.files_start().add(index).read() })
    }

    /// Whether those files whose bits are set are what they were.
    fn are_same(&self, used: u64) -> bool {
        let is_used = |index: usize| used >> index & 1 != 0;
        used == 0
            || self
                .files()
                .enumerate()
                .all(|(index, file)| !is_used(index) || file.is_same())
    }

    /// Gives a file with this number another one; where there is none, the list ends.
    fn move_file(&mut self, fd: c_int, owner: c_int) {
        let Some(index) = self.files().position(|file| file.fd == fd) else {
            return;
        };
        let Some(mut file) = self.file(index as u32) else {
            return;
        };
        if file.move_away(owner) {
            // SAFETY: `index` is that of a file that was written.
            unsafe { self.files_start().add(index).write(file) };
        } else {
            self.word = None;
        }
    }

    /// Whether the list holds for a while only: it names files of the backing.
    fn is_limited(&self) -> bool {
        self.until_ns != 0
    }

    /// Whether that while is over.
    fn is_expired(&self) -> bool {
        self.is_limited() && sys::coarse_ns() > self.until_ns
    }

    /// Whether it tells of the byte at an offset.
    fn covers(&self, at: u64) -> bool {
        (self.start..self.end).contains(&at)
    }

    /// Makes the next answers, which extend the list at its end, reach `at`, which the list does not cover. False where
    /// that is not worth it.
    fn make_way(&mut self, at: u64) -> bool {
        let is_near =
            at >= self.end && at - self.end <= self.last_bytes.max(NEAR_BYTES) && self.has_room();
        let known = (self.end - self.start).max(1);
        let whole = (self.count as u64).saturating_mul(self.size.div_ceil(known));
        let whole_fits = whole <= (LIST_MAX - EXTENTS_MAX) as u64;
        if is_near || (at >= self.end && whole_fits && self.has_room()) {
            return true;
        }
        self.misses += 1;
        if whole_fits {
            self.begin_at(0);
        } else if self.read_bytes >= known / 4 || self.misses > MISSES_MAX {
            self.begin_at(at);
        } else {
            return false;
        }
        true
    }

    /// Bytes of the file.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Bytes that were read by it since it began.
    pub(crate) fn read_bytes(&self) -> u64 {
        self.read_bytes
    }

    pub(crate) fn extents(&self) -> &[Extent] {
        if self.extents.is_null() {
            return &[];
        }
        // SAFETY: firnd's answers filled `count` extents (`add_answer`), and extents are words of any value.
        unsafe { std::slice::from_raw_parts(self.extents, self.count) }
    }

    fn extents_mut(&mut self) -> &mut [Extent] {
        if self.extents.is_null() {
            return &mut [];
        }
        // SAFETY: as for `extents`, and the list is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.extents, self.count) }
    }

    /// Bytes of the arena that an extent names, `len` from `skip` on; `None` where they are not mapped.
    fn bytes(&self, extent: &Extent, skip: u64, len: u64) -> Option<ArenaBytes> {
        self.map.bytes(extent.at.checked_add(skip)?, len)
    }

    /// Whether the list still is what the file holds. A copy calls this after it has copied.
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
