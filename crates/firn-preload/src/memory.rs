//! Memory that the program passed to a call, for the call to read or to write.
//!
//! A hook makes one [`ProgramMemory`] of the arguments of its call. That is the only unsafe step; the code below it is
//! safe. No Rust reference to the memory is ever made, because other threads of the program may change it, and it may
//! not be mapped.
//!
//! For memory that is not mapped the kernel returns EFAULT. A copy in this library would die of SIGSEGV, as a copy in
//! the program would. So [`probe`] checks the memory before a copy.

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;

use firn_direct::arena_map::ArenaBytes;
use firn_direct::connection::{Incoming, Outgoing};
use firn_direct::slab_writer::{Appended, SlabWriter};
use libc::iovec;

use crate::probe;
use crate::sys;

/// Maximum number of bytes that the kernel moves in one call (`MAX_RW_COUNT`).
pub(crate) const CALL_BYTES_MAX: usize = 0x7fff_f000;
/// Maximum number of vectors of one call (`UIO_MAXIOV`).
pub(crate) const VECTORS_MAX: c_int = 1024;
/// Addresses from here on belong to no process on the supported machines.
const USER_ADDRESS_END: usize = 1 << 56;

/// Access of a call that reads the memory: write(2) and its kin.
pub(crate) enum Readable {}
/// Access of a call that writes the memory: read(2) and its kin.
pub(crate) enum Writable {}

/// All memory that one call was given, as one or more vectors.
pub(crate) struct ProgramMemory<'a, Access> {
    vectors: &'a [iovec],
    access: PhantomData<Access>,
}

/// Memory that a call reads.
pub(crate) type Source<'a> = ProgramMemory<'a, Readable>;
/// Memory that a call writes.
pub(crate) type Target<'a> = ProgramMemory<'a, Writable>;

/// Contiguous bytes of the memory that one call was given.
pub(crate) struct Run<'a, Access> {
    start: *mut u8,
    len: usize,
    access: PhantomData<(&'a [u8], Access)>,
}

impl<Access> Clone for ProgramMemory<'_, Access> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Access> Copy for ProgramMemory<'_, Access> {}

impl<Access> Clone for Run<'_, Access> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Access> Copy for Run<'_, Access> {}

impl<'a, Access> ProgramMemory<'a, Access> {
    /// Makes the memory of a call.
    ///
    /// # Safety
    /// The program passed `vectors` to a call that reads or writes them as `Access` says, and that call lasts for `'a`.
    #[inline(always)]
    pub(crate) unsafe fn new(vectors: &'a [iovec]) -> Self {
        Self {
            vectors,
            access: PhantomData,
        }
    }

    /// Returns the number of bytes that the kernel would move; `None` if it would refuse the lengths.
    pub(crate) fn total(self) -> Option<usize> {
        let total = self
            .vectors
            .iter()
            .try_fold(0usize, |sum, vector| sum.checked_add(vector.iov_len))?;
        (total <= isize::MAX as usize).then_some(total.min(CALL_BYTES_MAX))
    }

    /// Whether a vector is at an address at which no process has memory.
    pub(crate) fn is_outside(self) -> bool {
        self.vectors.iter().any(|vector| {
            let end = (vector.iov_base as usize).checked_add(vector.iov_len);
            end.is_none_or(|end| end > USER_ADDRESS_END)
        })
    }

    /// Returns the runs (parts of contiguous bytes, one for each vector) from byte `start` on, with at most `len` bytes
    /// together. Runs without bytes are left out.
    pub(crate) fn runs(self, start: usize, len: usize) -> impl Iterator<Item = Run<'a, Access>> {
        let mut bytes_to_skip = start;
        let mut remaining_bytes = len;
        self.vectors.iter().filter_map(move |vector| {
            let skipped_bytes = bytes_to_skip.min(vector.iov_len);
            bytes_to_skip -= skipped_bytes;
            let run_bytes = (vector.iov_len - skipped_bytes).min(remaining_bytes);
            remaining_bytes -= run_bytes;
            if run_bytes == 0 {
                return None;
            }
            Some(Run {
                start: vector.iov_base.cast::<u8>().wrapping_add(skipped_bytes),
                len: run_bytes,
                access: PhantomData,
            })
        })
    }
}

impl Source<'_> {
    /// Whether the first and the last byte of each vector can be read.
    pub(crate) fn is_accessible(self) -> bool {
        self.vectors
            .iter()
            .all(|vector| probe::is_readable(vector.iov_base, vector.iov_len))
    }
}

impl Target<'_> {
    /// Whether the first and the last byte of each vector can be written, within the first `len` bytes.
    pub(crate) fn is_accessible(self, len: usize) -> bool {
        self.runs(0, len)
            .all(|run| probe::is_writable(run.start.cast(), run.len))
    }
}

impl<'a, Access> Run<'a, Access> {
    /// Makes a run of one buffer.
    ///
    /// # Safety
    /// The same as for [`ProgramMemory::new`], for this buffer.
    #[inline(always)]
    pub(crate) unsafe fn new(start: *mut c_void, len: usize) -> Self {
        Self {
            start: start.cast(),
            len,
            access: PhantomData,
        }
    }

    #[inline(always)]
    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// Returns the run as a vector for the kernel.
    pub(crate) fn as_vector(self) -> iovec {
        iovec {
            iov_base: self.start.cast(),
            iov_len: self.len,
        }
    }

    /// Returns the run without its first `done` bytes.
    pub(crate) fn without_first(self, done: usize) -> Self {
        let done = done.min(self.len);
        Self {
            start: self.start.wrapping_add(done),
            len: self.len - done,
            ..self
        }
    }

    /// Returns the first `len` bytes of the run, or all if it has fewer.
    pub(crate) fn first(self, len: usize) -> Self {
        Self {
            len: self.len.min(len),
            ..self
        }
    }
}

impl<'a> Run<'a, Readable> {
    /// Makes a run of bytes of this library.
    pub(crate) fn from_bytes(bytes: &'a [u8]) -> Self {
        Self {
            start: bytes.as_ptr().cast_mut(),
            len: bytes.len(),
            access: PhantomData,
        }
    }

    /// Whether the first and the last byte can be read.
    #[inline(always)]
    pub(crate) fn is_accessible(self) -> bool {
        probe::is_readable(self.start.cast(), self.len)
    }

    /// Appends the run to a leased slab, as bytes of the file from `offset` on.
    #[inline(always)]
    pub(crate) fn append_to(self, writer: &mut SlabWriter, offset: u64) -> Appended {
        // SAFETY: the program passed the bytes to be read (`new`). They do not overlap the arena's mapping, which the
        // program does not know. Bad pointers that `probe` does not find fault as in the program itself.
        unsafe { writer.append(offset, self.start, self.len) }
    }

    /// Returns the run as the data of a packet.
    pub(crate) fn as_outgoing(self) -> Outgoing<'a> {
        // SAFETY: the program passed the bytes to be read (`new`).
        unsafe { Outgoing::from_raw(self.start, self.len) }
    }

    /// pwrite(2).
    pub(crate) fn write_to(self, fd: c_int, offset: u64) -> isize {
        sys::pwrite(fd, self.start.cast_const().cast(), self.len, offset)
    }
}

impl<'a> Run<'a, Writable> {
    /// Copies bytes of the arena to the beginning of the run. With `bypass_caches` the stores go past the processor's
    /// caches.
    pub(crate) fn copy_from_arena(self, source: ArenaBytes, bypass_caches: bool) {
        let len = self.len.min(source.len());
        // SAFETY: the source has as many mapped bytes (`ArenaBytes`). It does not overlap the program's memory, because
        // the program does not know the arena's mapping. The program passed the target to be written (`new`).
        unsafe {
            if bypass_caches {
                firn_direct::copy(self.start, source.start(), len);
            } else {
                std::ptr::copy_nonoverlapping(source.start(), self.start, len);
            }
        }
    }

    /// Returns the run as a buffer for the data of a packet.
    pub(crate) fn as_incoming(self) -> Incoming<'a> {
        // SAFETY: the program passed the bytes to be written (`new`).
        unsafe { Incoming::from_raw(self.start, self.len) }
    }

    /// pread(2).
    pub(crate) fn read_from(self, fd: c_int, offset: u64) -> isize {
        // SAFETY: the program passed the bytes to be written (`new`), and the kernel returns EFAULT if it cannot write
        // them.
        unsafe { sys::pread(fd, self.start.cast(), self.len, offset) }
    }
}

impl<Access> Run<'_, Access> {
    /// Calls `then` with the run as all memory of a call.
    #[inline(always)]
    pub(crate) fn as_memory<R>(self, then: impl FnOnce(ProgramMemory<'_, Access>) -> R) -> R {
        let vectors = [self.as_vector()];
        then(ProgramMemory {
            vectors: &vectors,
            access: PhantomData,
        })
    }
}
