//! The mapping and the few ways to touch it.
//!
//! Invariants
//! * Every access is within the mapping: checked here, once, by an assertion.
//! * Words that change while others read them are touched only as atomics.

use crate::journal::Medium;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use firn_format::geometry::{DATA_ALIGN, PAGE};
use firn_format::quote::quoted_path;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::ArenaError;

#[cfg(feature = "probe")]
thread_local! {
    static PROBE: std::cell::RefCell<Option<Box<dyn FnMut()>>> = const { std::cell::RefCell::new(None) };
}

/// From now on `f` is called before each store that this thread makes to any arena.
#[cfg(feature = "probe")]
pub fn set_probe(f: Option<Box<dyn FnMut()>>) {
    PROBE.with(|probe| *probe.borrow_mut() = f);
}

/// A store to the arena is about to be made.
pub(crate) fn probe() {
    #[cfg(feature = "probe")]
    PROBE.with(|probe| {
        if let Some(f) = &mut *probe.borrow_mut() {
            f();
        }
    });
}

/// A shared mapping of a whole file.
pub(crate) struct Map {
    base: NonNull<u8>,
    len: usize,
    file: OwnedFd,
}

// SAFETY: the mapping is plain memory that lives as long as the value; all shared mutation goes
// through atomics or through ranges that one lease owns.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    pub(crate) fn new(
        path: &Path,
        file: OwnedFd,
        len: u64,
        writable: bool,
    ) -> Result<Self, ArenaError> {
        let prot = if writable {
            ProtFlags::READ | ProtFlags::WRITE
        } else {
            ProtFlags::READ
        };
        let fail = |source| ArenaError::Io {
            path: quoted_path(path),
            what: "map it",
            source,
        };
        // Huge pages need an address that is congruent to the file offset modulo their size, and the
        // kernel gives that by itself only where they are always on: reserve more, then choose.
        let room = len as usize + DATA_ALIGN as usize;
        let reserve = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let reserved = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), room, ProtFlags::empty(), reserve)
        }
        .map_err(fail)?;
        let skip = reserved.cast::<u8>().align_offset(DATA_ALIGN as usize);
        // SAFETY: `skip` is below DATA_ALIGN, so this stays within what was just reserved.
        let aligned = unsafe { reserved.cast::<u8>().add(skip) };
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: it replaces pages of the reservation, which nothing refers to.
        let base = unsafe { rustix::mm::mmap(aligned.cast(), len as usize, prot, flags, &file, 0) };
        let used = if base.is_ok() {
            skip..skip + (len as usize).next_multiple_of(PAGE as usize)
        } else {
            0..0
        };
        // What is left on both sides goes back: a process that attaches often runs out of mappings.
        for rest in [0..used.start, used.end..room] {
            if !rest.is_empty() {
                // SAFETY: a part of the reservation that nothing refers to and no file was mapped over.
                let _ = unsafe {
                    rustix::mm::munmap(reserved.cast::<u8>().add(rest.start).cast(), rest.len())
                };
            }
        }
        let base = base.map_err(fail)?;
        let base = NonNull::new(base.cast()).expect("mmap never returns null");
        Ok(Self {
            base,
            len: len as usize,
            file,
        })
    }

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// A pointer to `len` bytes at `at`.
    pub(crate) fn at(&self, at: u64, len: u64) -> *mut u8 {
        let end = at.checked_add(len).expect("no overflow");
        assert!(
            end <= self.len as u64,
            "access {at}+{len} leaves the arena of {}",
            self.len
        );
        // SAFETY: the assertion above keeps the `len` bytes within the mapping.
        unsafe { self.base.as_ptr().add(at as usize) }
    }

    pub(crate) fn u32(&self, at: u64) -> &AtomicU32 {
        assert_eq!(at % 4, 0);
        // SAFETY: in range, aligned, and every access to this word is atomic.
        unsafe { AtomicU32::from_ptr(self.at(at, 4).cast()) }
    }

    pub(crate) fn u64(&self, at: u64) -> &AtomicU64 {
        assert_eq!(at % 8, 0);
        // SAFETY: in range and aligned; every access to this word is atomic, as words of 8 bytes are used by `u64` alone.
        unsafe { AtomicU64::from_ptr(self.at(at, 8).cast()) }
    }

    pub(crate) fn write(&self, at: u64, bytes: &[u8]) {
        probe();
        let to = self.at(at, bytes.len() as u64);
        // SAFETY: in range; the caller owns this range of the file.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    }

    /// Copies bytes to another place, which is the caller's.
    pub(crate) fn copy_within(&self, from: u64, to: u64, len: u64) {
        probe();
        assert!(from + len <= to || to + len <= from, "a copy onto itself");
        let (source, target) = (self.at(from, len), self.at(to, len));
        // SAFETY: both in range, and apart as just asserted; the caller owns the target.
        unsafe { std::ptr::copy_nonoverlapping(source, target, len as usize) }
    }

    pub(crate) fn read(&self, at: u64, bytes: &mut [u8]) {
        let from = self.at(at, bytes.len() as u64);
        // SAFETY: in range; `bytes` is ours and does not overlap the mapping.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) }
    }

    /// Gives the range memory, now, and huge pages where the kernel can (docs/PERFORMANCE.md: cold
    /// 4 KiB pages halve the copy speed). Advice: failure is not an error here.
    pub(crate) fn populate(&self, at: u64, len: u64) -> rustix::io::Result<()> {
        self.populate_small(at, len)?;
        self.collapse(at, len);
        Ok(())
    }

    fn populate_small(&self, at: u64, len: u64) -> rustix::io::Result<()> {
        const MADV_POPULATE_WRITE: i32 = 23;
        let base = self.at(at, len).cast::<libc::c_void>();
        // SAFETY: in range; populating changes no contents.
        if unsafe { libc::madvise(base, len as usize, MADV_POPULATE_WRITE) } != 0 {
            return Err(no_memory());
        }
        Ok(())
    }
}

impl Map {
    /// Maps bytes of another file where the range was.
    pub(crate) fn map_over(
        &self,
        at: u64,
        len: u64,
        file: BorrowedFd<'_>,
        offset: u64,
    ) -> rustix::io::Result<()> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: in range, of whole pages, and replaced in one step: a thread that touches it finds the one or the other
        // file. The caller knows that the bytes that were there are not needed.
        unsafe {
            rustix::mm::mmap(
                self.at(at, len).cast(),
                len as usize,
                prot,
                flags,
                file,
                offset,
            )
        }
        .map(drop)
    }

    /// Maps the arena's own bytes again where another file was.
    pub(crate) fn map_back(&self, at: u64, len: u64) -> rustix::io::Result<()> {
        self.map_over(at, len, self.file(), at)
    }

    /// Gives a range without memory some, in huge pages where the kernel can: a page of each is touched and the rest comes
    /// with the huge page, which costs half of what [`Map::populate`] does.
    pub(crate) fn populate_huge(&self, at: u64, len: u64) -> rustix::io::Result<()> {
        for start in (at..at + len).step_by(DATA_ALIGN as usize) {
            self.populate_small(start, PAGE)?;
        }
        // Once for all of them: each call waits for all CPUs.
        self.collapse(at, len);
        self.populate_small(at, len)
    }

    fn collapse(&self, at: u64, len: u64) {
        const MADV_COLLAPSE: i32 = 25;
        let base = self.at(at, len).cast::<libc::c_void>();
        // SAFETY: in range; collapsing changes no contents.
        unsafe { libc::madvise(base, len as usize, MADV_COLLAPSE) };
    }

    /// Pages of the range that are still to come are taken from NUMA node `id`, or from others where it
    /// has none left (mbind(2)). For a file on tmpfs this holds for every process that touches them.
    pub(crate) fn prefer_numa_node(&self, at: u64, len: u64, id: u32) -> rustix::io::Result<()> {
        const MPOL_PREFERRED: libc::c_int = 1;
        const BITS: u32 = u64::BITS;
        let mut mask = vec![0u64; (id / BITS + 1) as usize];
        mask[(id / BITS) as usize] = 1 << (id % BITS);
        let base = self.at(at, len).cast::<libc::c_void>();
        // The kernel reads one bit less than it is told.
        let bits = mask.len() as u64 * u64::from(BITS) + 1;
        // SAFETY: in range; a policy changes no contents; the mask has the bits that are told.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                base,
                len,
                MPOL_PREFERRED,
                mask.as_ptr(),
                bits,
                0,
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

/// Why madvise(2) gave a page no memory. EFAULT is what a touch would be SIGBUS for: the file system is full.
fn no_memory() -> rustix::io::Errno {
    match std::io::Error::last_os_error().raw_os_error() {
        Some(libc::EFAULT) | None => rustix::io::Errno::NOSPC,
        Some(errno) => rustix::io::Errno::from_raw_os_error(errno),
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `new` and nothing refers to it any more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// The bytes of the arena that belong to the journal.
pub struct JournalRegion {
    pub(crate) map: Arc<Map>,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Medium for JournalRegion {
    fn len(&self) -> usize {
        self.len as usize
    }

    fn write(&mut self, at: usize, bytes: &[u8]) {
        assert!(at as u64 + bytes.len() as u64 <= self.len);
        match <[u8; 8]>::try_from(bytes) {
            Ok(word) if at.is_multiple_of(8) => {
                let word = u64::from_ne_bytes(word);
                probe();
                self.map
                    .u64(self.offset + at as u64)
                    .store(word, std::sync::atomic::Ordering::Release);
            }
            _ => self.map.write(self.offset + at as u64, bytes),
        }
        // A later store must not become visible before this one.
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    fn read(&self, at: usize, bytes: &mut [u8]) {
        assert!(at as u64 + bytes.len() as u64 <= self.len);
        // Not by the mapping: a page that is only looked at there gets memory.
        let mut done = 0;
        while done < bytes.len() {
            let from = self.offset + (at + done) as u64;
            match rustix::io::pread(self.map.file(), &mut bytes[done..], from) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                Err(_) => {
                    // Rather by the mapping than not at all.
                    self.map.read(from, &mut bytes[done..]);
                    return;
                }
            }
        }
        bytes[done..].fill(0);
    }

    fn reserve(&mut self, at: usize, len: usize) -> bool {
        assert!(at as u64 + len as u64 <= self.len);
        let at = self.offset + at as u64;
        rustix::fs::fallocate(self.map.file(), FallocateFlags::empty(), at, len as u64).is_ok()
    }

    fn release(&mut self, at: usize, len: usize) {
        assert!(at as u64 + len as u64 <= self.len);
        if len == 0 {
            return;
        }
        probe();
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if rustix::fs::fallocate(self.map.file(), hole, self.offset + at as u64, len as u64)
            .is_err()
        {
            // Its file system makes no holes. What was never written is zeros already.
            let used = self.used(at, len);
            self.map.write(self.offset + at as u64, &vec![0; used]);
        }
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    fn used(&self, at: usize, len: usize) -> usize {
        let start = self.offset + at as u64;
        let end = self.offset + (at + len) as u64;
        let mut from = start;
        let mut used = start;
        while from < end {
            let data = match rustix::fs::seek(self.map.file(), SeekFrom::Data(from)) {
                Ok(data) if data < end => data,
                // Nothing but a hole from here on.
                Ok(_) | Err(Errno::NXIO) => break,
                Err(_) => return len,
            };
            match rustix::fs::seek(self.map.file(), SeekFrom::Hole(data)) {
                Ok(hole) => (used, from) = (hole.min(end), hole),
                Err(_) => return len,
            }
        }
        (used - start) as usize
    }
}
