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
pub(crate) const PARTS_MAX: c_int = 1024;
/// Addresses from here on belong to no process on the supported machines.
const USER_ADDRESS_END: usize = 1 << 56;

/// Access of a call that reads the memory: write(2) and its kin.
pub(crate) enum Readable {}
/// Access of a call that writes the memory: read(2) and its kin.
pub(crate) enum Writable {}

/// All memory that one call was given, as one or more vectors.
pub(crate) struct ProgramMemory<'a, Access> {
    parts: &'a [iovec],
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
    /// The program passed `parts` to a call that reads or writes them as `Access` says, and that call lasts for `'a`.
    #[inline(always)]
    pub(crate) unsafe fn new(parts: &'a [iovec]) -> Self {
        Self {
            parts,
            access: PhantomData,
        }
    }

    /// Returns the number of bytes that the kernel would move; `None` if it would refuse the lengths.
    pub(crate) fn total(self) -> Option<usize> {
        let total = self
            .parts
            .iter()
            .try_fold(0usize, |sum, part| sum.checked_add(part.iov_len))?;
        (total <= isize::MAX as usize).then_some(total.min(CALL_BYTES_MAX))
    }

    /// Whether a part is at an address at which no process has memory.
    pub(crate) fn is_outside(self) -> bool {
        self.parts.iter().any(|part| {
            let end = (part.iov_base as usize).checked_add(part.iov_len);
            end.is_none_or(|end| end > USER_ADDRESS_END)
        })
    }

    /// Returns the runs from byte `skip` on, with at most `len` bytes together.
    pub(crate) fn runs(self, skip: usize, len: usize) -> impl Iterator<Item = Run<'a, Access>> {
        let mut skip = skip;
        let mut left = len;
        self.parts.iter().filter_map(move |part| {
            let start = skip.min(part.iov_len);
            skip -= start;
            let len = (part.iov_len - start).min(left);
            left -= len;
            (len > 0).then(|| Run {
                start: part.iov_base.cast::<u8>().wrapping_add(start),
                len,
                access: PhantomData,
            })
        })
    }
}

impl Source<'_> {
    /// Whether the first and the last byte of each part can be read.
    pub(crate) fn is_accessible(self) -> bool {
        self.parts
            .iter()
            .all(|part| probe::is_readable(part.iov_base, part.iov_len))
    }
}

impl Target<'_> {
    /// Whether the first and the last byte of each part can be written, within the first `len` bytes.
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
    pub(crate) fn as_part(self) -> iovec {
        iovec {
            iov_base: self.start.cast(),
            iov_len: self.len,
        }
    }

    /// Returns the run without its first `done` bytes.
    pub(crate) fn rest(self, done: usize) -> Self {
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
    pub(crate) fn of_bytes(bytes: &'a [u8]) -> Self {
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
    pub(crate) fn write_to(self, fd: c_int, at: u64) -> isize {
        sys::pwrite(fd, self.start.cast_const().cast(), self.len, at)
    }
}

impl<'a> Run<'a, Writable> {
    /// Copies bytes of the arena to the begin of the run. With `streams` they are stored past the processor's caches.
    pub(crate) fn fill_from(self, from: ArenaBytes, streams: bool) {
        let len = self.len.min(from.len());
        // SAFETY: the source has as many mapped bytes (`ArenaBytes`). It does not overlap the program's memory, because
        // the program does not know the arena's mapping. The program passed the target to be written (`new`).
        unsafe {
            if streams {
                firn_direct::copy(self.start, from.start(), len);
            } else {
                std::ptr::copy_nonoverlapping(from.start(), self.start, len);
            }
        }
    }

    /// Returns the run as a buffer for the data of a packet.
    pub(crate) fn as_incoming(self) -> Incoming<'a> {
        // SAFETY: the program passed the bytes to be written (`new`).
        unsafe { Incoming::from_raw(self.start, self.len) }
    }

    /// pread(2).
    pub(crate) fn read_from(self, fd: c_int, at: u64) -> isize {
        // SAFETY: the program passed the bytes to be written (`new`), and the kernel returns EFAULT if it cannot write
        // them.
        unsafe { sys::pread(fd, self.start.cast(), self.len, at) }
    }
}

impl<Access> Run<'_, Access> {
    /// Calls `then` with the run as all memory of a call.
    #[inline(always)]
    pub(crate) fn as_memory<R>(self, then: impl FnOnce(ProgramMemory<'_, Access>) -> R) -> R {
        let parts = [self.as_part()];
        then(ProgramMemory {
            parts: &parts,
            access: PhantomData,
        })
    }
}
