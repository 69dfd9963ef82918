//! The arena in a client's memory.
//!
//! Promises
//! * What is mapped stays mapped as long as the process lives, so words of it may be borrowed for ever. Children of
//!   fork(2) do not have what may be written, and core dumps leave it out.
//! * An offset from another process is compared with the mapping before anything is read or written there.

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;
use std::sync::atomic::AtomicU32;

use firn_format::data_socket::{Arena, Slab};
use firn_format::piece::PIECE_BYTES;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::slab_writer::SlabWriter;

const PAGE: u64 = 4096;
/// Huge pages need addresses that agree with the file's offsets modulo their size.
const HUGE: u64 = 2 << 20;

/// What a connection maps.
#[derive(Clone, Copy, Debug)]
pub struct ArenaMap {
    /// Where offset 0 of the arena would be, for what may be written.
    shared: *mut u8,
    /// The same for the words that are only read.
    words: *const u8,
    /// Offsets from here …
    words_start: u64,
    /// … to here lie in `words`.
    words_end: u64,
    shared_start: u64,
    shared_end: u64,
}

// SAFETY: the memory that it points to belongs to no thread and stays mapped; each writer says why its stores are
// allowed (`SlabWriter`).
unsafe impl Send for ArenaMap {}

/// Bytes of the arena in this process's memory. firnd or other processes may change them while they are read.
#[derive(Clone, Copy, Debug)]
pub struct ArenaBytes {
    /// Mapped for `len` bytes as long as the process lives.
    start: *const u8,
    len: usize,
}

impl ArenaBytes {
    /// Where they begin.
    pub fn start(self) -> *const u8 {
        self.start
    }

    /// How many there are.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }
}

impl ArenaMap {
    /// Nothing is mapped. All zeros.
    pub const NONE: Self = Self {
        shared: ptr::null_mut(),
        words: ptr::null(),
        words_start: 0,
        words_end: 0,
        shared_start: 0,
        shared_end: 0,
    };

    /// Maps the arena behind `fd`; `None` where that is not possible.
    pub fn map(fd: impl AsFd, arena: &Arena) -> Option<Self> {
        let fd = fd.as_fd();
        let words_end = arena.words_offset.checked_add(arena.words_bytes)?;
        let is_aligned =
            arena.words_offset.is_multiple_of(PAGE) && arena.shared_offset.is_multiple_of(PAGE);
        if !is_aligned || words_end > arena.file_bytes || arena.shared_offset >= arena.file_bytes {
            return None;
        }
        let shared_bytes = arena.file_bytes - arena.shared_offset;
        let words = map_part(fd, arena.words_offset, arena.words_bytes, ProtFlags::READ)?;
        let shared = map_part(
            fd,
            arena.shared_offset,
            shared_bytes,
            ProtFlags::READ | ProtFlags::WRITE,
        )?;
        Some(Self {
            shared: shared.wrapping_sub(arena.shared_offset as usize),
            words: words.wrapping_sub(arena.words_offset as usize),
            words_start: arena.words_offset,
            words_end,
            shared_start: arena.shared_offset,
            shared_end: arena.file_bytes,
        })
    }

    /// Where offset 0 of the arena would be: of its piece tables and chunks, which may be written.
    pub fn base(&self) -> *mut u8 {
        self.shared
    }

    /// Bytes of piece tables and chunks; `None` where they are not mapped.
    pub fn bytes(&self, offset: u64, len: u64) -> Option<ArenaBytes> {
        self.has_shared(offset, len).then(|| ArenaBytes {
            start: self.shared.wrapping_add(offset as usize),
            len: len as usize,
        })
    }

    /// The word of a file (`Reply::slot`); `None` where none lies at that offset.
    pub fn word(&self, offset: u64) -> Option<&'static AtomicU32> {
        let end = offset.checked_add(size_of::<AtomicU32>() as u64)?;
        let is_word =
            offset >= self.words_start && end <= self.words_end && offset.is_multiple_of(4);
        let word = self.words.wrapping_add(offset as usize);
        // SAFETY: four aligned bytes of the mapping of words, as just asked, which is never unmapped. Only loads are
        // made of them: firnd alone may write there.
        is_word.then(|| unsafe { AtomicU32::from_ptr(word.cast_mut().cast()) })
    }

    /// The writing end of a lease; `None` where it does not lie in the mapping.
    ///
    /// # Safety
    /// firnd granted the lease to this process, and no other [`SlabWriter`] was made of it.
    pub unsafe fn slab_writer(&self, slab: Slab, file_id: u64) -> Option<SlabWriter> {
        let records_bytes = u64::from(slab.record_count).checked_mul(PIECE_BYTES)?;
        let is_mapped = slab.start < slab.end
            && self.has_shared(slab.chunk, u64::from(slab.end))
            && self.has_shared(slab.records, records_bytes)
            && self.has_shared(slab.writer, 8)
            && slab.records.is_multiple_of(8)
            && slab.writer.is_multiple_of(8);
        // SAFETY: data, records and writer word lie in the mapping, as just asked, which is never unmapped, and the
        // caller has no other writer of the lease.
        is_mapped.then(|| unsafe { SlabWriter::new(self.shared, slab, file_id) })
    }

    /// Whether `len` bytes from `offset` of the arena on may be written.
    fn has_shared(&self, offset: u64, len: u64) -> bool {
        let end = offset.checked_add(len);
        offset >= self.shared_start && end.is_some_and(|end| end <= self.shared_end)
    }
}

/// Maps a part of a file, for good, at an address that suits huge pages.
fn map_part(fd: BorrowedFd<'_>, offset: u64, len: u64, prot: ProtFlags) -> Option<*mut u8> {
    let len_mapped = usize::try_from(len.checked_next_multiple_of(PAGE)?).ok()?;
    // SAFETY: a new mapping where the kernel finds room replaces nothing.
    let at = unsafe {
        rustix::mm::mmap(
            ptr::null_mut(),
            len as usize,
            prot,
            MapFlags::SHARED,
            fd,
            offset,
        )
    };
    let mut at = at.ok()?;
    // Kernels before 6.7, and those that use no huge pages for this file, take any page.
    if len >= HUGE && !(at as u64 ^ offset).is_multiple_of(HUGE) {
        let aligned = map_aligned(fd, (offset, len_mapped), prot);
        // SAFETY: all of what was just mapped; known to this function only.
        let _ = unsafe { rustix::mm::munmap(at, len as usize) };
        at = aligned?;
    }
    // A read-only mapping harms no child, and a core dump leaves it out anyway: it is a file.
    let advices = [Advice::LinuxDontFork, Advice::LinuxDontDump];
    for advice in advices
        .into_iter()
        .filter(|_| prot.contains(ProtFlags::WRITE))
    {
        // SAFETY: of what was just mapped; neither changes what is in memory here.
        let _ = unsafe { rustix::mm::madvise(at, len as usize, advice) };
    }
    Some(at.cast())
}

/// The same with an address chosen here, out of more room than needed.
#[cold]
fn map_aligned(
    fd: BorrowedFd<'_>,
    (offset, len): (u64, usize),
    prot: ProtFlags,
) -> Option<*mut c_void> {
    let room = len.checked_add(HUGE as usize)?;
    let reserve = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: new memory where the kernel finds room replaces nothing.
    let start =
        unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), room, ProtFlags::empty(), reserve) };
    let start = start.ok()?;
    let shift = (offset as usize).wrapping_sub(start as usize) % HUGE as usize;
    let at = start.wrapping_byte_add(shift);
    let flags = MapFlags::SHARED | MapFlags::FIXED;
    // SAFETY: replaces a part of what was just reserved: `shift` is less than the room beyond `len`.
    let mapped = unsafe { rustix::mm::mmap(at, len, prot, flags, fd, offset) };
    if mapped.is_err() {
        // SAFETY: all of what was just reserved; known to this function only.
        let _ = unsafe { rustix::mm::munmap(start, room) };
        return None;
    }
    // The reservation around it stays, without access: unmapping it takes two system calls, and it costs addresses only.
    Some(at)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::Ordering;

    use super::*;

    fn map_of_pages() -> (std::fs::File, ArenaMap) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8 * PAGE).unwrap();
        let arena = Arena {
            uuid: [0; 16],
            file_bytes: 8 * PAGE,
            words_offset: PAGE,
            words_bytes: PAGE,
            shared_offset: 2 * PAGE,
            page_bytes: PAGE,
            chunk_bytes: PAGE,
        };
        let map = ArenaMap::map(&file, &arena).unwrap();
        (file, map)
    }

    #[test]
    fn only_what_lies_in_the_mapping_is_given() {
        let (file, map) = map_of_pages();
        file.write_all_at(&7u32.to_ne_bytes(), PAGE + 8).unwrap();
        assert_eq!(map.word(PAGE + 8).unwrap().load(Ordering::Relaxed), 7);
        assert!(map.word(2 * PAGE - 4).is_some());
        for outside in [0, PAGE - 4, PAGE + 2, 2 * PAGE - 2, 2 * PAGE, u64::MAX - 3] {
            assert!(map.word(outside).is_none(), "{outside}");
        }
        assert_eq!(
            map.bytes(2 * PAGE, 6 * PAGE).unwrap().len(),
            6 * PAGE as usize
        );
        for (offset, len) in [(2 * PAGE - 1, 1), (8 * PAGE, 1), (3 * PAGE, u64::MAX)] {
            assert!(map.bytes(offset, len).is_none(), "{offset} {len}");
        }
        assert!(ArenaMap::NONE.word(0).is_none());
        assert!(ArenaMap::NONE.bytes(0, 1).is_none());
    }

    #[test]
    fn a_lease_that_reaches_out_of_the_mapping_is_refused() {
        let (_file, map) = map_of_pages();
        let good = Slab {
            chunk: 4 * PAGE,
            records: 3 * PAGE,
            writer: 2 * PAGE,
            start: 0,
            end: PAGE as u32,
            record_count: 10,
            ..Slab::default()
        };
        // SAFETY: only these writers use the mapping of this test, and they are dropped at once.
        let is_given = |slab| unsafe { map.slab_writer(slab, 1) }.is_some();
        assert!(is_given(good));
        for bad in [
            Slab {
                chunk: 8 * PAGE,
                ..good
            },
            Slab {
                chunk: u64::MAX,
                ..good
            },
            Slab {
                start: good.end,
                ..good
            },
            Slab {
                records: PAGE,
                ..good
            },
            Slab {
                records: good.records + 4,
                ..good
            },
            Slab {
                record_count: u32::MAX,
                ..good
            },
            Slab {
                writer: 8 * PAGE - 4,
                ..good
            },
            Slab {
                writer: good.writer + 1,
                ..good
            },
        ] {
            assert!(!is_given(bad), "{bad:?}");
        }
    }

    #[test]
    fn an_arena_of_impossible_sizes_is_not_mapped() {
        let (file, _map) = map_of_pages();
        let arena = |file_bytes, words_offset, words_bytes, shared_offset| Arena {
            uuid: [0; 16],
            file_bytes,
            words_offset,
            words_bytes,
            shared_offset,
            page_bytes: PAGE,
            chunk_bytes: PAGE,
        };
        for bad in [
            arena(8 * PAGE, 1, PAGE, 2 * PAGE),
            arena(8 * PAGE, PAGE, 8 * PAGE, 2 * PAGE),
            arena(8 * PAGE, PAGE, u64::MAX, 2 * PAGE),
            arena(8 * PAGE, PAGE, PAGE, 8 * PAGE),
            arena(8 * PAGE, PAGE, PAGE, 2 * PAGE + 1),
            arena(u64::MAX, PAGE, PAGE, 2 * PAGE),
        ] {
            assert!(ArenaMap::map(&file, &bad).is_none(), "{bad:?}");
        }
    }
}
