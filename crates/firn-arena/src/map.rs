//! The mapping of the arena's file, and all ways to access it. The *arena* is a file of shared memory with the bytes
//! that are not in the backing directory yet.
//!
//! Invariants
//! * Every access is within the mapping. An assertion here checks it, so callers need not.
//! * A word that changes while other threads or processes read it is accessed only as an atomic.

use crate::journal::Medium;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use firn_format::geometry::{DATA_ALIGN, PAGE};
use firn_format::quote::quoted_path;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{FallocateFlags, OFlags, SeekFrom};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::ArenaError;

#[cfg(feature = "probe")]
thread_local! {
    /// The function that a test has set for this thread.
    static PROBE: std::cell::RefCell<Option<Box<dyn FnMut()>>> = const { std::cell::RefCell::new(None) };
}

/// Sets the function that [`crash_point`] calls on this thread, for any arena. `None` removes the function.
#[cfg(feature = "probe")]
pub fn set_probe(f: Option<Box<dyn FnMut()>>) {
    PROBE.with(|probe| *probe.borrow_mut() = f);
}

/// Marks an instant at which a crash is to be tested: the thread is about to store a word of the arena.
///
/// Does nothing in a normal build. With the feature `probe`, calls the test's function (`set_probe`). A test copies the
/// arena there and attaches the copy, as after a crash between two stores.
pub(crate) fn crash_point() {
    #[cfg(feature = "probe")]
    PROBE.with(|probe| {
        if let Some(f) = &mut *probe.borrow_mut() {
            f();
        }
    });
}

/// Whether a file is only read, or also changed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileAccess {
    ReadOnly,
    ReadWrite,
}

impl FileAccess {
    /// Returns the flags of open(2) for this access.
    pub(crate) fn open_flags(self) -> OFlags {
        match self {
            Self::ReadOnly => OFlags::RDONLY,
            Self::ReadWrite => OFlags::RDWR,
        }
    }
}

/// A shared mapping of a whole file.
pub(crate) struct Map {
    base: NonNull<u8>,
    len: usize,
    file: OwnedFd,
}

// SAFETY: the mapping is plain memory and lasts as long as the value. Shared memory is changed only through atomics, or
// in ranges that one lease owns.
unsafe impl Send for Map {}
// SAFETY: the same argument as for `Send`.
unsafe impl Sync for Map {}

impl Map {
    /// Maps the first `len` bytes of `file`, which is at `path`, at an address that permits huge pages.
    pub(crate) fn new(
        path: &Path,
        file: OwnedFd,
        len: u64,
        access: FileAccess,
    ) -> Result<Self, ArenaError> {
        let prot = match access {
            FileAccess::ReadOnly => ProtFlags::READ,
            FileAccess::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        let fail = |source| ArenaError::Io {
            path: quoted_path(path),
            what: "map it",
            source,
        };
        let len = len as usize;
        // Huge pages need an address that is congruent to the file offset modulo their size. The kernel chooses such an
        // address only if huge pages are always on. So more address space is reserved, and the address chosen within
        // it.
        let reserved_len = len + DATA_ALIGN as usize;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses a free address, so the reservation replaces nothing.
        let reservation = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                reserved_len,
                ProtFlags::empty(),
                flags,
            )
        }
        .map_err(fail)?
        .cast::<u8>();
        let skipped_len = reservation.align_offset(DATA_ALIGN as usize);
        // SAFETY: `skipped_len` is less than `DATA_ALIGN`, so the address is within the reservation.
        let aligned = unsafe { reservation.add(skipped_len) };
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the mapping replaces pages of the reservation, to which nothing refers.
        let mapped = unsafe { rustix::mm::mmap(aligned.cast(), len, prot, flags, &file, 0) };
        let mapped_range = if mapped.is_ok() {
            skipped_len..skipped_len + len.next_multiple_of(PAGE as usize)
        } else {
            0..0
        };
        // The rest of the reservation on both sides is unmapped, because a process that attaches often would run out of
        // mappings.
        for unused in [0..mapped_range.start, mapped_range.end..reserved_len] {
            if !unused.is_empty() {
                // A failure only leaves address space in use.
                // SAFETY: this is a part of the reservation without a file, to which nothing refers.
                let _ = unsafe {
                    rustix::mm::munmap(reservation.add(unused.start).cast(), unused.len())
                };
            }
        }
        let base = NonNull::new(mapped.map_err(fail)?.cast()).expect("mmap never returns null");
        Ok(Self { base, len, file })
    }

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns the address of `len` bytes at `offset` of the file.
    pub(crate) fn address(&self, offset: u64, len: u64) -> *mut u8 {
        let end = offset.checked_add(len).expect("no overflow");
        assert!(
            end <= self.len as u64,
            "access {offset}+{len} leaves the arena of {}",
            self.len
        );
        // SAFETY: the assertion above says that the `len` bytes are within the mapping.
        unsafe { self.base.as_ptr().add(offset as usize) }
    }

    pub(crate) fn u32(&self, offset: u64) -> &AtomicU32 {
        assert_eq!(offset % 4, 0);
        // SAFETY: the word is in range and aligned, and every access to it is atomic.
        unsafe { AtomicU32::from_ptr(self.address(offset, 4).cast()) }
    }

    pub(crate) fn u64(&self, offset: u64) -> &AtomicU64 {
        assert_eq!(offset % 8, 0);
        // SAFETY: the word is in range and aligned. Every access to it is atomic, because only this function returns
        // words of 8 bytes.
        unsafe { AtomicU64::from_ptr(self.address(offset, 8).cast()) }
    }

    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        crash_point();
        let target = self.address(offset, bytes.len() as u64);
        // SAFETY: the range is in the mapping, and the caller owns it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) }
    }

    /// Copies bytes within the file. The caller owns the target, and the ranges must not overlap.
    pub(crate) fn copy_within(&self, source_offset: u64, target_offset: u64, len: u64) {
        crash_point();
        let is_disjoint =
            source_offset + len <= target_offset || target_offset + len <= source_offset;
        assert!(is_disjoint, "a copy onto itself");
        let source = self.address(source_offset, len);
        let target = self.address(target_offset, len);
        // SAFETY: both ranges are in the mapping and do not overlap, as asserted. The caller owns the target.
        unsafe { std::ptr::copy_nonoverlapping(source, target, len as usize) }
    }

    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) {
        let source = self.address(offset, bytes.len() as u64);
        // SAFETY: the range is in the mapping, and `bytes` does not overlap the mapping.
        unsafe { std::ptr::copy_nonoverlapping(source, bytes.as_mut_ptr(), bytes.len()) }
    }

    /// Allocates memory for a range now, in huge pages if the kernel can: cold 4 KiB pages halve the copy speed
    /// (docs/PERFORMANCE.md). Fails only if there is no memory; it succeeds without huge pages.
    pub(crate) fn populate(&self, offset: u64, len: u64) -> rustix::io::Result<()> {
        self.populate_pages(offset, len)?;
        self.advise_huge_pages(offset, len);
        Ok(())
    }

    /// Allocates memory for a range in pages of any size.
    fn populate_pages(&self, offset: u64, len: u64) -> rustix::io::Result<()> {
        const MADV_POPULATE_WRITE: i32 = 23;
        let base = self.address(offset, len).cast::<libc::c_void>();
        // SAFETY: the range is in the mapping, and the call changes no contents.
        if unsafe { libc::madvise(base, len as usize, MADV_POPULATE_WRITE) } != 0 {
            return Err(madvise_errno());
        }
        Ok(())
    }
}

impl Map {
    /// Maps another file, from `file_offset` on, in place of a range of this mapping. So the range shows bytes of a
    /// memory file, or those of the arena's file again. The old bytes must not be needed any more.
    pub(crate) fn map_file_at(
        &self,
        offset: u64,
        len: u64,
        file: BorrowedFd<'_>,
        file_offset: u64,
    ) -> rustix::io::Result<()> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the range is in the mapping and consists of whole pages. The kernel replaces it in one step, so each
        // access finds one file or the other. The caller knows that the old bytes are not needed.
        unsafe {
            rustix::mm::mmap(
                self.address(offset, len).cast(),
                len as usize,
                prot,
                flags,
                file,
                file_offset,
            )
        }
        .map(drop)
    }

    /// Maps the arena's file again in a range where another file was mapped.
    pub(crate) fn map_arena_file_at(&self, offset: u64, len: u64) -> rustix::io::Result<()> {
        self.map_file_at(offset, len, self.file(), offset)
    }

    /// Allocates memory for a range that has none, in huge pages if the kernel can. It touches one page of each huge
    /// page and then asks for huge pages, which costs half of what [`Map::populate`] costs.
    pub(crate) fn populate_huge(&self, offset: u64, len: u64) -> rustix::io::Result<()> {
        for start in (offset..offset + len).step_by(DATA_ALIGN as usize) {
            self.populate_pages(start, PAGE)?;
        }
        // One call for the whole range, because each call waits for all CPUs.
        self.advise_huge_pages(offset, len);
        self.populate_pages(offset, len)
    }

    /// Asks the kernel for huge pages in a range. Advice only: an error is ignored.
    fn advise_huge_pages(&self, offset: u64, len: u64) {
        const MADV_COLLAPSE: i32 = 25;
        let base = self.address(offset, len).cast::<libc::c_void>();
        // SAFETY: the range is in the mapping, and the call changes no contents.
        unsafe { libc::madvise(base, len as usize, MADV_COLLAPSE) };
    }

    /// Asks the kernel to allocate pages of the range in the memory of NUMA node `id` (mbind(2)). If that node is full,
    /// the pages come from another one. Pages that have memory already are not moved. For a file on tmpfs this holds
    /// for every process.
    pub(crate) fn prefer_numa_node(
        &self,
        offset: u64,
        len: u64,
        id: u32,
    ) -> rustix::io::Result<()> {
        const MPOL_PREFERRED: libc::c_int = 1;
        const NO_FLAGS: libc::c_int = 0;
        let word_index = (id / u64::BITS) as usize;
        let mut node_mask = vec![0u64; word_index + 1];
        node_mask[word_index] = 1 << (id % u64::BITS);
        let base = self.address(offset, len).cast::<libc::c_void>();
        // The kernel reads one bit less than this number.
        let mask_bits = node_mask.len() as u64 * u64::from(u64::BITS) + 1;
        // SAFETY: the range is in the mapping, the call changes no contents, and the mask has the given number of bits.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                base,
                len,
                MPOL_PREFERRED,
                node_mask.as_ptr(),
                mask_bits,
                NO_FLAGS,
            )
        };
        if result == 0 {
            return Ok(());
        }
        let errno = std::io::Error::last_os_error().raw_os_error();
        Err(rustix::io::Errno::from_raw_os_error(
            errno.unwrap_or(libc::EIO),
        ))
    }
}

/// Returns why madvise(2) has just failed to allocate memory. Its EFAULT means that the file system is full, where an
/// access would be a SIGBUS.
fn madvise_errno() -> rustix::io::Errno {
    match std::io::Error::last_os_error().raw_os_error() {
        Some(libc::EFAULT) | None => rustix::io::Errno::NOSPC,
        Some(errno) => rustix::io::Errno::from_raw_os_error(errno),
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: `new` made the mapping, and nothing refers to it any more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// The part of the arena that the journal uses, as the medium of the journal.
pub struct JournalRegion {
    pub(crate) map: Arc<Map>,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Medium for JournalRegion {
    fn len(&self) -> usize {
        self.len as usize
    }

    fn write(&mut self, position: usize, bytes: &[u8]) {
        assert!(position as u64 + bytes.len() as u64 <= self.len);
        match <[u8; 8]>::try_from(bytes) {
            Ok(word) if position.is_multiple_of(8) => {
                let word = u64::from_ne_bytes(word);
                crash_point();
                self.map
                    .u64(self.offset + position as u64)
                    .store(word, std::sync::atomic::Ordering::Release);
            }
            _ => self.map.write(self.offset + position as u64, bytes),
        }
        // No later store may become visible before this one.
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    /// Reads bytes of the region from `position` on, without allocating memory for pages that were never written. Bytes
    /// beyond the end of the file read as zeros.
    fn read(&self, position: usize, bytes: &mut [u8]) {
        assert!(position as u64 + bytes.len() as u64 <= self.len);
        // With pread(2) and not through the mapping: a mere load of an unused page would allocate memory for it.
        let mut read_bytes = 0;
        while read_bytes < bytes.len() {
            let offset = self.offset + (position + read_bytes) as u64;
            match rustix::io::pread(self.map.file(), &mut bytes[read_bytes..], offset) {
                Ok(0) => break,
                Ok(count) => read_bytes += count,
                Err(Errno::INTR) => {}
                Err(_) => {
                    // After any error the bytes are read through the mapping.
                    self.map.read(offset, &mut bytes[read_bytes..]);
                    return;
                }
            }
        }
        bytes[read_bytes..].fill(0);
    }

    fn reserve(&mut self, position: usize, len: usize) -> bool {
        assert!(position as u64 + len as u64 <= self.len);
        let offset = self.offset + position as u64;
        rustix::fs::fallocate(self.map.file(), FallocateFlags::empty(), offset, len as u64).is_ok()
    }

    /// Frees the memory of a range of the region. The range reads as zeros from now on.
    fn release(&mut self, position: usize, len: usize) {
        assert!(position as u64 + len as u64 <= self.len);
        if len == 0 {
            return;
        }
        crash_point();
        let offset = self.offset + position as u64;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let punched = rustix::fs::fallocate(self.map.file(), flags, offset, len as u64);
        if punched.is_err() {
            // The file system makes no holes, so zeros are written instead. Bytes that were never written are zeros
            // already, so the write ends with the last used byte.
            let used_len = self.data_len(position, len);
            self.map.write(offset, &vec![0; used_len]);
        }
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    /// Returns the length of the range up to the end of its last data; all bytes after that are zero. Returns `len` if
    /// the file system cannot say where data is.
    fn data_len(&self, position: usize, len: usize) -> usize {
        let start = self.offset + position as u64;
        let end = self.offset + (position + len) as u64;
        // A file on tmpfs consists of ranges with data and holes. The loop steps over all of them.
        let mut offset = start;
        let mut last_data_end = start;
        while offset < end {
            let data_start = match rustix::fs::seek(self.map.file(), SeekFrom::Data(offset)) {
                Ok(data_start) if data_start < end => data_start,
                // The rest is a hole.
                Ok(_) | Err(Errno::NXIO) => break,
                Err(_) => return len,
            };
            let Ok(hole_start) = rustix::fs::seek(self.map.file(), SeekFrom::Hole(data_start))
            else {
                return len;
            };
            last_data_end = hole_start.min(end);
            offset = hole_start;
        }
        (last_data_end - start) as usize
    }
}
