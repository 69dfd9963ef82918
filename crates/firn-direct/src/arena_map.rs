//! Maps the arena into a client process. The *arena* is shared memory with the bytes that are in no file of the backing
//! yet. firnd, the process that serves the mount, owns it.
//!
//! Two parts of the arena are mapped. The part with *counters* (words of 4 bytes) is written only by firnd, and is
//! mapped read-only. The *shared* part has chunks, which hold bytes of files, and piece tables, which say what the
//! bytes are. Clients and firnd write it.
//!
//! Promises
//! * A mapping lasts as long as the process, so references into it may be `'static`. Children of fork(2) do not have
//!   the shared part, and core dumps leave it out.
//! * An offset from firnd is compared with the mapping before any byte is read or written there.

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;
use std::sync::atomic::AtomicU32;

use firn_format::data_socket::{Arena, Slab};
use firn_format::piece::PIECE_BYTES;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::slab_writer::SlabWriter;

/// Smallest page of the kernel; the parts of the arena are aligned to it.
const PAGE_BYTES: u64 = 4096;
/// Size of a huge page. The kernel uses huge pages only if address and file offset are equal modulo this size.
const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// The mapped parts of an arena.
#[derive(Clone, Copy, Debug)]
pub struct ArenaMap {
    /// Address at which offset 0 of the arena would be, for the shared part.
    shared: *mut u8,
    /// Address at which offset 0 of the arena would be, for the counters.
    counters: *const u8,
    /// The counters occupy the offsets from `counters_start` up to `counters_end`.
    counters_start: u64,
    counters_end: u64,
    /// The shared part occupies the offsets from `shared_start` up to `shared_end`.
    shared_start: u64,
    shared_end: u64,
}

// SAFETY: the memory stays mapped as long as the process lives, and every thread may use it. Only `SlabWriter` stores
// into it; its comments say why that is sound.
unsafe impl Send for ArenaMap {}

/// A range of the mapped arena. firnd or other processes may change its bytes while they are read.
#[derive(Clone, Copy, Debug)]
pub struct ArenaBytes {
    /// Address of the first byte; `len` bytes from here stay mapped.
    start: *const u8,
    len: usize,
}

impl ArenaBytes {
    /// Returns the address of the first byte.
    pub fn start(self) -> *const u8 {
        self.start
    }

    /// Returns the number of bytes.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }
}

impl ArenaMap {
    /// No mapping; all fields are zero.
    pub const NONE: Self = Self {
        shared: ptr::null_mut(),
        counters: ptr::null(),
        counters_start: 0,
        counters_end: 0,
        shared_start: 0,
        shared_end: 0,
    };

    /// Maps the arena, firnd's shared memory, by its descriptor `fd`. Returns `None` if its sizes are impossible or the
    /// kernel refuses.
    pub fn map(fd: impl AsFd, arena: &Arena) -> Option<Self> {
        let fd = fd.as_fd();
        let counters_end = arena.words_offset.checked_add(arena.words_bytes)?;
        let is_aligned = arena.words_offset.is_multiple_of(PAGE_BYTES)
            && arena.shared_offset.is_multiple_of(PAGE_BYTES);
        if !is_aligned || counters_end > arena.file_bytes || arena.shared_offset >= arena.file_bytes
        {
            return None;
        }
        let shared_bytes = arena.file_bytes - arena.shared_offset;
        let read_write = ProtFlags::READ | ProtFlags::WRITE;
        let counters = map_part(fd, arena.words_offset, arena.words_bytes, ProtFlags::READ)?;
        let shared = map_part(fd, arena.shared_offset, shared_bytes, read_write)?;
        // Both addresses are those at which offset 0 of the arena would be.
        Some(Self {
            shared: shared.wrapping_sub(arena.shared_offset as usize),
            counters: counters.wrapping_sub(arena.words_offset as usize),
            counters_start: arena.words_offset,
            counters_end,
            shared_start: arena.shared_offset,
            shared_end: arena.file_bytes,
        })
    }

    /// Returns the address at which offset 0 of the arena would be, for piece tables and chunks.
    pub fn base(&self) -> *mut u8 {
        self.shared
    }

    /// Returns a range of piece tables and chunks; `None` if it is not mapped.
    pub fn bytes(&self, offset: u64, len: u64) -> Option<ArenaBytes> {
        self.has_shared(offset, len).then(|| ArenaBytes {
            start: self.shared.wrapping_add(offset as usize),
            len: len as usize,
        })
    }

    /// Returns the counter of a file, at the offset that `Reply::slot` gives; `None` if no counter can be there.
    pub fn word(&self, offset: u64) -> Option<&'static AtomicU32> {
        let end = offset.checked_add(size_of::<AtomicU32>() as u64)?;
        let is_word =
            offset >= self.counters_start && end <= self.counters_end && offset.is_multiple_of(4);
        let word = self.counters.wrapping_add(offset as usize);
        // SAFETY: `is_word` says that these are four aligned bytes of the counters, which stay mapped. The caller only
        // loads from them: only firnd stores there.
        is_word.then(|| unsafe { AtomicU32::from_ptr(word.cast_mut().cast()) })
    }

    /// Returns the writer of a lease; `None` if the lease is not within the mapping.
    ///
    /// # Safety
    /// firnd must have granted the lease to this process, and no other [`SlabWriter`] may be made of it.
    pub unsafe fn slab_writer(&self, slab: Slab, file_id: u64) -> Option<SlabWriter> {
        let records_bytes = u64::from(slab.record_count).checked_mul(PIECE_BYTES)?;
        let is_mapped = slab.start < slab.end
            && self.has_shared(slab.chunk, u64::from(slab.end))
            && self.has_shared(slab.records, records_bytes)
            && self.has_shared(slab.writer, 8)
            && slab.records.is_multiple_of(8)
            && slab.writer.is_multiple_of(8);
        // SAFETY: `is_mapped` says that data, records and writer word are within the mapping, which lasts. The caller
        // has no other writer of the lease.
        is_mapped.then(|| unsafe { SlabWriter::new(self.shared, slab, file_id) })
    }

    /// Whether `len` bytes from `offset` on are in the shared part.
    fn has_shared(&self, offset: u64, len: u64) -> bool {
        let end = offset.checked_add(len);
        offset >= self.shared_start && end.is_some_and(|end| end <= self.shared_end)
    }
}

/// Maps a part of a file for the life of the process, at an address that allows huge pages. Returns `None` if the
/// kernel refuses.
fn map_part(fd: BorrowedFd<'_>, offset: u64, len: u64, prot: ProtFlags) -> Option<*mut u8> {
    let page_aligned_len = usize::try_from(len.checked_next_multiple_of(PAGE_BYTES)?).ok()?;
    // SAFETY: the kernel chooses a free address, so the mapping replaces nothing.
    let mapped = unsafe {
        rustix::mm::mmap(
            ptr::null_mut(),
            len as usize,
            prot,
            MapFlags::SHARED,
            fd,
            offset,
        )
    };
    let mut address = mapped.ok()?;
    // Kernels before 6.7, and kernels without huge pages for this file, choose an address that is not aligned for them.
    // A huge page can be mapped only if address and offset have the same position within a huge page.
    let is_aligned = (address as u64 ^ offset).is_multiple_of(HUGE_PAGE_BYTES);
    if len >= HUGE_PAGE_BYTES && !is_aligned {
        let aligned_address = map_aligned(fd, offset, page_aligned_len, prot);
        // SAFETY: this unmaps the whole new mapping, which only this function knows.
        let _ = unsafe { rustix::mm::munmap(address, len as usize) };
        address = aligned_address?;
    }
    // A read-only mapping harms no child, and core dumps leave out read-only file mappings anyway. The kernel accepts
    // this advice for every mapping of a file.
    if prot.contains(ProtFlags::WRITE) {
        for advice in [Advice::LinuxDontFork, Advice::LinuxDontDump] {
            // SAFETY: the advice is about the new mapping, and changes no memory.
            let _ = unsafe { rustix::mm::madvise(address, len as usize, advice) };
        }
    }
    Some(address.cast())
}

/// Maps like [`map_part`], at an aligned address: reserves more address space than needed, and maps within it.
#[cold]
fn map_aligned(
    fd: BorrowedFd<'_>,
    offset: u64,
    len: usize,
    prot: ProtFlags,
) -> Option<*mut c_void> {
    let reserved_bytes = len.checked_add(HUGE_PAGE_BYTES as usize)?;
    let no_access = ProtFlags::empty();
    let reserve_flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: the kernel chooses a free address, so the reservation replaces nothing.
    let reservation = unsafe {
        rustix::mm::mmap_anonymous(ptr::null_mut(), reserved_bytes, no_access, reserve_flags)
    };
    let reserved_start = reservation.ok()?;
    let padding =
        (offset as usize).wrapping_sub(reserved_start as usize) % HUGE_PAGE_BYTES as usize;
    let address = reserved_start.wrapping_byte_add(padding);
    let flags = MapFlags::SHARED | MapFlags::FIXED;
    // SAFETY: the mapping replaces a part of the reservation: `padding` is less than the bytes reserved beyond `len`.
    let mapped = unsafe { rustix::mm::mmap(address, len, prot, flags, fd, offset) };
    if mapped.is_err() {
        // SAFETY: this unmaps the whole reservation, which only this function knows.
        let _ = unsafe { rustix::mm::munmap(reserved_start, reserved_bytes) };
        return None;
    }
    // The unused part of the reservation remains, without access. It costs only addresses; to unmap it would cost two
    // system calls.
    Some(address)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::Ordering;

    use super::*;

    fn map_of_pages() -> (std::fs::File, ArenaMap) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8 * PAGE_BYTES).unwrap();
        let arena = Arena {
            uuid: [0; 16],
            file_bytes: 8 * PAGE_BYTES,
            words_offset: PAGE_BYTES,
            words_bytes: PAGE_BYTES,
            shared_offset: 2 * PAGE_BYTES,
            page_bytes: PAGE_BYTES,
            chunk_bytes: PAGE_BYTES,
        };
        let map = ArenaMap::map(&file, &arena).unwrap();
        (file, map)
    }

    #[test]
    fn only_what_lies_in_the_mapping_is_given() {
        let (file, map) = map_of_pages();
        file.write_all_at(&7u32.to_ne_bytes(), PAGE_BYTES + 8)
            .unwrap();
        assert_eq!(map.word(PAGE_BYTES + 8).unwrap().load(Ordering::Relaxed), 7);
        assert!(map.word(2 * PAGE_BYTES - 4).is_some());
        for outside in [
            0,
            PAGE_BYTES - 4,
            PAGE_BYTES + 2,
            2 * PAGE_BYTES - 2,
            2 * PAGE_BYTES,
            u64::MAX - 3,
        ] {
            assert!(map.word(outside).is_none(), "{outside}");
        }
        assert_eq!(
            map.bytes(2 * PAGE_BYTES, 6 * PAGE_BYTES).unwrap().len(),
            6 * PAGE_BYTES as usize
        );
        for (offset, len) in [
            (2 * PAGE_BYTES - 1, 1),
            (8 * PAGE_BYTES, 1),
            (3 * PAGE_BYTES, u64::MAX),
        ] {
            assert!(map.bytes(offset, len).is_none(), "{offset} {len}");
        }
        assert!(ArenaMap::NONE.word(0).is_none());
        assert!(ArenaMap::NONE.bytes(0, 1).is_none());
    }

    #[test]
    fn a_lease_that_reaches_out_of_the_mapping_is_refused() {
        let (_file, map) = map_of_pages();
        let good = Slab {
            chunk: 4 * PAGE_BYTES,
            records: 3 * PAGE_BYTES,
            writer: 2 * PAGE_BYTES,
            start: 0,
            end: PAGE_BYTES as u32,
            record_count: 10,
            ..Slab::default()
        };
        // SAFETY: only these writers use the mapping of this test, and they are dropped at once.
        let is_given = |slab| unsafe { map.slab_writer(slab, 1) }.is_some();
        assert!(is_given(good));
        for bad in [
            Slab {
                chunk: 8 * PAGE_BYTES,
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
                records: PAGE_BYTES,
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
                writer: 8 * PAGE_BYTES - 4,
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
            page_bytes: PAGE_BYTES,
            chunk_bytes: PAGE_BYTES,
        };
        for bad in [
            arena(8 * PAGE_BYTES, 1, PAGE_BYTES, 2 * PAGE_BYTES),
            arena(8 * PAGE_BYTES, PAGE_BYTES, 8 * PAGE_BYTES, 2 * PAGE_BYTES),
            arena(8 * PAGE_BYTES, PAGE_BYTES, u64::MAX, 2 * PAGE_BYTES),
            arena(8 * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES, 8 * PAGE_BYTES),
            arena(8 * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES, 2 * PAGE_BYTES + 1),
            arena(u64::MAX, PAGE_BYTES, PAGE_BYTES, 2 * PAGE_BYTES),
        ] {
            assert!(ArenaMap::map(&file, &bad).is_none(), "{bad:?}");
        }
    }
}
