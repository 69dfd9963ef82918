//! The arena in this process's memory.

use std::ffi::c_int;

use firn_format::data_socket::Arena;

use crate::sys::syscall;

const PAGE: u64 = 4096;
/// Huge pages need addresses that agree with the file's offsets modulo their size.
const HUGE: u64 = 2 << 20;

/// What a connection maps. Children of fork(2) do not have it, and core dumps leave it out.
#[derive(Clone, Copy)]
pub(crate) struct Mapping {
    /// Where offset 0 of the arena would be, for what may be written.
    pub(crate) shared: *mut u8,
    /// The same for the words that are only read.
    pub(crate) words: *const u8,
    /// Offsets from here …
    words_start: u64,
    /// … to here lie in `words`.
    words_end: u64,
    shared_start: u64,
    shared_end: u64,
}

impl Mapping {
    pub(crate) const NONE: Self = Self {
        shared: std::ptr::null_mut(),
        words: std::ptr::null(),
        words_start: 0,
        words_end: 0,
        shared_start: 0,
        shared_end: 0,
    };

    /// Maps the arena behind `fd`; `None` where that is not possible.
    pub(crate) fn of(fd: c_int, arena: &Arena) -> Option<Self> {
        let words_end = arena.words_offset.checked_add(arena.words_bytes)?;
        let aligned =
            arena.words_offset.is_multiple_of(PAGE) && arena.shared_offset.is_multiple_of(PAGE);
        if !aligned || words_end > arena.file_bytes || arena.shared_offset >= arena.file_bytes {
            return None;
        }
        let shared_bytes = arena.file_bytes - arena.shared_offset;
        let words = map(fd, arena.words_offset, arena.words_bytes, libc::PROT_READ)?;
        let shared = map(
            fd,
            arena.shared_offset,
            shared_bytes,
            libc::PROT_READ | libc::PROT_WRITE,
        )?;
        Some(Self {
            shared: (shared as *mut u8).wrapping_sub(arena.shared_offset as usize),
            words: (words as *const u8).wrapping_sub(arena.words_offset as usize),
            words_start: arena.words_offset,
            words_end,
            shared_start: arena.shared_offset,
            shared_end: arena.file_bytes,
        })
    }

    /// Whether so many bytes from an offset of the arena on may be written.
    pub(crate) fn has_shared(&self, offset: u64, len: u64) -> bool {
        offset >= self.shared_start
            && offset
                .checked_add(len)
                .is_some_and(|end| end <= self.shared_end)
    }

    /// Whether a word lies at an offset of the arena.
    pub(crate) fn has_word(&self, offset: u64) -> bool {
        let inside = offset >= self.words_start
            && offset
                .checked_add(4)
                .is_some_and(|end| end <= self.words_end);
        inside && offset.is_multiple_of(4)
    }
}

/// Maps a part of a file at an address that suits huge pages.
fn map(fd: c_int, offset: u64, len: u64, prot: c_int) -> Option<usize> {
    let room = len.checked_add(HUGE)?.checked_next_multiple_of(PAGE)?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: new memory, wherever the kernel likes.
    let start = unsafe {
        syscall!(
            libc::SYS_mmap,
            0usize,
            room,
            libc::PROT_NONE,
            flags,
            -1isize,
            0usize
        )
    };
    if start < 0 {
        return None;
    }
    let start = start as usize;
    let shift = (offset as usize).wrapping_sub(start) % HUGE as usize;
    let at = start.checked_add(shift)?;
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    // SAFETY: replaces a part of what was just mapped.
    let mapped = unsafe { syscall!(libc::SYS_mmap, at, len, prot, flags, fd, offset) };
    // SAFETY: unmaps the rest of what was just mapped, or all of it; the advice is about that too.
    unsafe {
        if mapped < 0 {
            syscall!(libc::SYS_munmap, start, room);
            return None;
        }
        let end = at.checked_add((len as usize).next_multiple_of(PAGE as usize))?;
        if shift > 0 {
            syscall!(libc::SYS_munmap, start, shift);
        }
        let rest = start.checked_add(room as usize)?.saturating_sub(end);
        if rest > 0 {
            syscall!(libc::SYS_munmap, end, rest);
        }
        syscall!(libc::SYS_madvise, at, len, libc::MADV_DONTFORK);
        syscall!(libc::SYS_madvise, at, len, libc::MADV_DONTDUMP);
    }
    Some(at)
}
