//! The *list* of a file says where its bytes are: in the *arena* (the shared memory of the mount) or in files of the
//! *backing* (the directory that the mount serves). firnd sends it, and reads then need no request.
//!
//! A list is *current* while the file's *word* in the arena, which firnd changes with the places of the bytes, equals
//! the word that came with the list. firnd keeps the listed bytes where they are. So a reader copies bytes first and
//! then reads the word: if the word has changed, the copy does not count.
//!
//! Bytes in files of the backing are read by descriptors that came with the list. Other hosts can change these files
//! without changing the word. So such a list is valid for a limited time, and then firnd is asked whether it still is.
//!
//! Holes, and bytes that only firnd can read, are gaps of the list. The descriptor's fallback serves them
//! ([`crate::fallback`]).
//!
//! ```text
//!   0 ......... start ═══ extents and gaps ═══ end ............ size
//!   not requested    this part is known           not requested yet
//! ```
//!
//! A list without files of the backing covers the whole file. A list with such files begins where the program began to
//! read and grows as it reads, because the file may have millions of *extents* (ranges with one place each).
//!
//! Invariants
//! * `count <= LIST_MAX`, and answers of firnd have filled the first `count` extents.
//! * Extents and files are mapped while `extents` is not null.
//! * `file_count <= LIST_FILES_MAX`. The first `file_count` files are open and belong to this list.

pub(crate) mod copy;
pub(crate) mod fetch;
pub(crate) mod files;

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU32, Ordering, fence};

use firn_direct::arena_map::{ArenaBytes, ArenaMap};
use firn_direct::connection::Files;
use firn_direct::syscall::Descriptor;
use firn_format::data_socket::{EXTENTS_MAX, Extent, IN_BACKING, Reply};
use rustix::mm::{MapFlags, ProtFlags};

use self::files::{LIST_FILES_MAX, ListFile};
use crate::sys;

/// Maximum number of extents of a list. If a file has more, the list covers a part of it, or the fallback reads it.
const LIST_MAX: usize = 64 * EXTENTS_MAX;
/// Bytes of the extents of a list.
const EXTENTS_BYTES: usize = LIST_MAX * size_of::<Extent>();
/// Bytes of the memory of a list: its extents, and then its files.
const LIST_BYTES: usize = EXTENTS_BYTES + LIST_FILES_MAX * size_of::<ListFile>();
const _: () = assert!(EXTENTS_BYTES.is_multiple_of(align_of::<ListFile>()));
/// The files that a call has read from are the bits of one word.
const _: () = assert!(LIST_FILES_MAX <= u64::BITS as usize);

/// A read that begins at most this many bytes beyond the end of a list extends the list up to there.
const NEAR_BYTES: u64 = 1 << 20;
/// After more reads outside of the list than this, the list begins anew at the read's offset, even if few bytes were
/// read by it.
const MISSES_MAX: u32 = 16;
/// A list by which at least this fraction of its range was read has paid off, and may begin anew elsewhere.
const READ_FRACTION_DIVISOR: u64 = 4;

/// A read by a list has failed: the list is void, or bytes in one of its gaps could not be read.
pub(crate) struct ListFailed;

/// Where a file's bytes are. All zeros mean that firnd was not asked.
pub(crate) struct List {
    /// Mapped memory for [`LIST_MAX`] extents, and behind them for [`LIST_FILES_MAX`] files; or null.
    extents: *mut Extent,
    /// Number of extents.
    count: usize,
    /// Number of files.
    file_count: usize,
    /// Index of the extent in which the last read ended.
    hint: usize,
    /// Offset in the file at which the known part begins.
    start: u64,
    /// Offset in the file at which the known part ends.
    end: u64,
    /// Bytes by which the last answer has extended the known part.
    last_answer_bytes: u64,
    /// Size of the file.
    size: u64,
    /// The file's word in the arena; `None` before the first answer.
    change_word: Option<&'static AtomicU32>,
    /// Value of the word when the list was made.
    stamp: u32,
    /// Until when the list is valid, in the clock of [`sys::coarse_ns`]; 0 if only the word decides.
    until_ns: u64,
    /// Bytes read by the list since it began at `start`.
    read_bytes: u64,
    /// Reads outside of the known part since then.
    misses: u32,
    /// The mapped arena.
    map: ArenaMap,
}

// SAFETY: the list owns its mapping of extents and files, and no thread is bound to it.
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
            last_answer_bytes: 0,
            size: 0,
            change_word: None,
            stamp: 0,
            until_ns: 0,
            read_bytes: 0,
            misses: 0,
            map: ArenaMap::NONE,
        }
    }

    /// Clears the list: closes its files and unmaps its memory.
    pub(crate) fn unmap_extents(&mut self) {
        for file in self.files() {
            file.close();
        }
        if !self.extents.is_null() {
            // SAFETY: `map_extents` has mapped it with this length, and no slice of it outlives a borrow of this list.
            let _ = unsafe { rustix::mm::munmap(self.extents.cast(), LIST_BYTES) };
        }
        *self = Self::new();
    }

    /// Clears the list and maps memory for a new one. Returns `None` if there is no memory.
    fn map_extents(&mut self) -> Option<()> {
        self.unmap_extents();
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let anywhere = std::ptr::null_mut();
        // SAFETY: the kernel chooses the address of a new mapping, so no other memory is affected.
        let start = unsafe { rustix::mm::mmap_anonymous(anywhere, LIST_BYTES, prot, flags) };
        self.extents = start.ok()?.cast();
        Some(())
    }

    /// Drops the extents. The known part begins, and ends, at `start`.
    fn restart_at(&mut self, start: u64) {
        self.count = 0;
        self.hint = 0;
        self.start = start;
        self.end = start;
        self.last_answer_bytes = 0;
        self.read_bytes = 0;
        self.misses = 0;
    }

    /// Returns the memory for the extents of one more answer; `None` if the list is full.
    fn free_extents(&mut self) -> Option<&mut [MaybeUninit<Extent>]> {
        if self.extents.is_null() || !self.has_capacity() {
            return None;
        }
        let start = self.extents.wrapping_add(self.count).cast();
        // SAFETY: the mapping has room for `EXTENTS_MAX` more extents, as was just checked, and the list is borrowed
        // mutably.
        Some(unsafe { std::slice::from_raw_parts_mut(start, EXTENTS_MAX) })
    }

    fn has_capacity(&self) -> bool {
        self.count + EXTENTS_MAX <= LIST_MAX
    }

    /// Extends the list by an answer of firnd, with further *extents* (ranges of the file and their places). The answer
    /// was received into [`List::free_extents`], and was requested at `requested_ns`. `owner` is the program's
    /// descriptor.
    ///
    /// Returns false if the list is void now: the file has changed since the first answer, or the word in the shared
    /// memory that shows later changes is not mapped.
    fn add_answer(
        &mut self,
        reply: &Reply,
        files: &mut Files,
        requested_ns: u64,
        owner: c_int,
    ) -> bool {
        let is_first_answer = self.change_word.is_none();
        let is_unchanged = self.stamp == reply.stamp && self.size == reply.size;
        let old_count = self.count;
        self.count = (old_count + reply.count as usize).min(LIST_MAX);
        self.adopt_files(files, old_count, owner);
        // In this answer, `slot` is the place of the file's word in the shared memory.
        self.change_word = self.map.word(reply.slot);
        self.stamp = reply.stamp;
        self.size = reply.size;
        self.last_answer_bytes = reply.end.saturating_sub(self.end);
        self.end = self.end.max(reply.end);
        self.prolong_validity(reply, requested_ns);
        (is_first_answer || is_unchanged) && self.change_word.is_some()
    }

    /// Prolongs the validity of the list by an answer with the same stamp, which confirms the whole list.
    fn prolong_validity(&mut self, reply: &Reply, requested_ns: u64) {
        if reply.valid_ns == 0 {
            return;
        }
        let valid_until = requested_ns.saturating_add(reply.valid_ns);
        // The clock may be late by a tick. The result is not 0, which would mean that there is no limit.
        let until_ns = valid_until.saturating_sub(sys::COARSE_TICK_NS).max(1);
        self.until_ns = self.until_ns.max(until_ns);
    }

    /// Takes over the files that came with an answer of firnd: open files of the backing, the directory below the
    /// mount.
    ///
    /// In an extent (a range of bytes) in the backing, the field `chunk` names such a file by its index in the answer.
    /// This function replaces it by the file's index in the list, for all extents from `first_extent` on. If the list
    /// has no room for the file, they get `NO_FILE`, and the fallback (the kernel or firnd) reads their bytes.
    fn adopt_files(&mut self, files: &mut Files, first_extent: usize, owner: c_int) {
        const NO_FILE: u32 = u32::MAX;
        let mut list_indices = [NO_FILE; firn_format::data_socket::FILES_MAX];
        for (answer_index, list_index) in list_indices.iter_mut().enumerate().take(files.count()) {
            if let Some(file) = files.take(answer_index)
                && let Some(index) = self.adopt_file(&file, owner)
            {
                *list_index = index as u32;
            }
        }
        for extent in self.extents_mut().iter_mut().skip(first_extent) {
            if extent.place == IN_BACKING {
                let list_index = list_indices.get(extent.chunk as usize);
                extent.chunk = list_index.copied().unwrap_or(NO_FILE);
            }
        }
    }

    /// Adds a received descriptor, unless the list has one of the same file already. Returns the file's index in the
    /// list; `None` if there is no room for it.
    fn adopt_file(&mut self, received: &Descriptor, owner: c_int) -> Option<usize> {
        let identity = sys::own_identity(received.as_fd().as_raw_fd())?;
        if let Some(index) = self.files().position(|file| file.identity == identity) {
            return Some(index);
        }
        if self.file_count >= LIST_FILES_MAX {
            return None;
        }
        let file = ListFile::copy(received, identity, owner)?;
        let index = self.file_count;
        // SAFETY: the mapping has room for `LIST_FILES_MAX` files, and `index` is less.
        unsafe { self.files_start().add(index).write(file) };
        self.file_count += 1;
        Some(index)
    }

    fn files_start(&self) -> *mut ListFile {
        self.extents.wrapping_add(LIST_MAX).cast()
    }

    fn files(&self) -> impl Iterator<Item = ListFile> + use<> {
        let start = self.files_start();
        // SAFETY: `adopt_file` has written the first `file_count` files. They stay mapped until `unmap_extents`, which
        // uses this iterator up before it unmaps them.
        (0..self.file_count).map(move |index| unsafe { start.add(index).read() })
    }

    /// Returns the file at an index.
    fn file(&self, index: u32) -> Option<ListFile> {
        let index = index as usize;
        // SAFETY: as for `files`.
        (index < self.file_count).then(|| unsafe { self.files_start().add(index).read() })
    }

    /// Whether each file whose bit is set in `used_files` still has its descriptor.
    fn have_same_files(&self, used_files: u64) -> bool {
        if used_files == 0 {
            return true;
        }
        for (index, file) in self.files().enumerate() {
            let is_used = used_files >> index & 1 != 0;
            if is_used && !file.is_same_file() {
                return false;
            }
        }
        true
    }

    /// Moves the file with the number `fd` to another number. If none is free, the list becomes void.
    fn move_file(&mut self, fd: c_int, owner: c_int) {
        let Some(index) = self.files().position(|file| file.fd == fd) else {
            return;
        };
        let Some(mut file) = self.file(index as u32) else {
            return;
        };
        if file.move_away(owner) {
            // SAFETY: `index` is that of a file in the list.
            unsafe { self.files_start().add(index).write(file) };
        } else {
            self.change_word = None;
        }
    }

    /// Whether the list is valid for a limited time, because it names files of the backing.
    fn has_time_limit(&self) -> bool {
        self.until_ns != 0
    }

    /// Whether the time for which the list is valid is over.
    fn is_expired(&self) -> bool {
        self.has_time_limit() && sys::coarse_ns() > self.until_ns
    }

    /// Whether the byte at an offset is in the known part.
    fn covers(&self, offset: u64) -> bool {
        (self.start..self.end).contains(&offset)
    }

    /// Prepares the list for a read at `offset`, outside of the part of the file that the list covers. The list keeps
    /// that part or forgets it; the caller then extends it. Returns false if neither is worthwhile, so that the
    /// fallback (the kernel or firnd) serves the read.
    ///
    /// A list says where the bytes of one part of the file are. If the read is near the end of the part, the caller
    /// extends the list up to there. Otherwise the list may forget the part and begin anew: at 0 if it has room for the
    /// whole file, else at `offset`.
    fn restart_or_extend(&mut self, offset: u64) -> bool {
        let known_bytes = (self.end - self.start).max(1);
        // The whole file has about this many extents (ranges with one place each), if they are alike everywhere.
        let expected_count = (self.count as u64).saturating_mul(self.size.div_ceil(known_bytes));
        let whole_file_fits = expected_count <= (LIST_MAX - EXTENTS_MAX) as u64;
        if offset >= self.end && self.has_capacity() {
            let is_near = offset - self.end <= self.last_answer_bytes.max(NEAR_BYTES);
            if is_near || whole_file_fits {
                return true;
            }
        }
        self.misses += 1;
        if whole_file_fits {
            self.restart_at(0);
            return true;
        }
        // A restart forgets the known part. That is worth it if much of the part was read, or many reads missed it.
        let has_paid_off = self.read_bytes >= known_bytes / READ_FRACTION_DIVISOR;
        if has_paid_off || self.misses > MISSES_MAX {
            self.restart_at(offset);
            return true;
        }
        false
    }

    /// Size of the file.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Bytes read by the list since it began.
    pub(crate) fn read_bytes(&self) -> u64 {
        self.read_bytes
    }

    pub(crate) fn extents(&self) -> &[Extent] {
        if self.extents.is_null() {
            return &[];
        }
        // SAFETY: firnd's answers have filled `count` extents (`add_answer`), and any words are a valid extent.
        unsafe { std::slice::from_raw_parts(self.extents, self.count) }
    }

    fn extents_mut(&mut self) -> &mut [Extent] {
        if self.extents.is_null() {
            return &mut [];
        }
        // SAFETY: as in `extents`, and the list is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.extents, self.count) }
    }

    /// Returns `len` bytes of an extent in the arena, from its byte `skip` on; `None` if they are not mapped.
    fn bytes(&self, extent: &Extent, skip: u64, len: u64) -> Option<ArenaBytes> {
        self.map.bytes(extent.at.checked_add(skip)?, len)
    }

    /// Whether the file is unchanged since it was listed. A reader calls it after it has copied bytes.
    fn is_current(&self) -> bool {
        fence(Ordering::Acquire);
        self.change_word
            .is_some_and(|word| word.load(Ordering::Relaxed) == self.stamp)
    }

    /// Returns the extent that has the byte at `offset`, or the first one behind it. The search begins at the last
    /// result.
    fn find_extent(&mut self, offset: u64) -> Option<Extent> {
        let ends_before = |extent: &Extent| extent.offset.saturating_add(extent.len) <= offset;
        let extents = self.extents();
        let mut index = self.hint;
        let hinted = extents.get(index);
        let is_hint_right = hinted.is_some_and(|extent| !ends_before(extent))
            && (index == 0 || extents.get(index - 1).is_some_and(ends_before));
        if !is_hint_right {
            index = extents.partition_point(ends_before);
        }
        let extent = extents.get(index).copied();
        self.hint = index;
        extent
    }
}
