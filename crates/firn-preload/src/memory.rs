//! Memory of the program: what it gave to a call, to be read or to be written by it.
//!
//! Made once, in a hook, where the promise of the call is known; all code below is safe. The memory is never seen
//! as a Rust reference: other threads of the program may use it meanwhile, and it may not be mapped at all. The
//! kernel answers EFAULT then; a copy here dies of SIGSEGV, as the program's own would, where [`probe`] did not
//! find it before.

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;

use firn_direct::arena_map::ArenaBytes;
use firn_direct::connection::{Incoming, Outgoing};
use firn_direct::slab_writer::{Appended, SlabWriter};
use libc::iovec;

use crate::probe;
use crate::sys;

/// What the kernel takes in one call at most (`MAX_RW_COUNT`).
pub(crate) const CALL_BYTES_MAX: usize = 0x7fff_f000;
/// Vectors in one call (`UIO_MAXIOV`).
pub(crate) const PARTS_MAX: c_int = 1024;

/// The call reads it: write(2) and its kin.
pub(crate) enum Readable {}
/// The call writes it: read(2) and its kin.
pub(crate) enum Writable {}

/// All that one call was given.
pub(crate) struct ProgramMemory<'a, Access> {
    parts: &'a [iovec],
    access: PhantomData<Access>,
}

/// What a call reads.
pub(crate) type Source<'a> = ProgramMemory<'a, Readable>;
/// What a call writes.
pub(crate) type Target<'a> = ProgramMemory<'a, Writable>;

/// A run of bytes of it.
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
    /// # Safety
    /// The program gave `parts` to a call that does with them what `Access` says, and that call lasts for `'a`.
    #[inline(always)]
    pub(crate) unsafe fn new(parts: &'a [iovec]) -> Self {
        Self {
            parts,
            access: PhantomData,
        }
    }

    /// Bytes, as the kernel counts them; `None` where it would refuse them.
    pub(crate) fn total(self) -> Option<usize> {
        let total = self
            .parts
            .iter()
            .try_fold(0usize, |sum, part| sum.checked_add(part.iov_len))?;
        (total <= isize::MAX as usize).then_some(total.min(CALL_BYTES_MAX))
    }

    /// Whether a part of it lies where no process has memory.
    pub(crate) fn is_outside(self) -> bool {
        const USER_END: usize = 1 << 56;
        self.parts.iter().any(|part| {
            let end = (part.iov_base as usize).checked_add(part.iov_len);
            end.is_none_or(|end| end > USER_END)
        })
    }

    /// Its runs from byte `skip` on, `len` bytes at most.
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
    /// Whether the ends of its parts can be read.
    pub(crate) fn is_good(self) -> bool {
        self.parts
            .iter()
            .all(|part| probe::is_readable(part.iov_base, part.iov_len))
    }
}

impl Target<'_> {
    /// Whether the ends of its parts can be written, as far as the first `len` bytes go.
    pub(crate) fn is_good(self, len: usize) -> bool {
        self.runs(0, len)
            .all(|run| probe::is_writable(run.start.cast(), run.len))
    }
}

impl<'a, Access> Run<'a, Access> {
    /// # Safety
    /// As for [`ProgramMemory::new`], of one part.
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

    /// As a vector for the kernel.
    pub(crate) fn as_part(self) -> iovec {
        iovec {
            iov_base: self.start.cast(),
            iov_len: self.len,
        }
    }

    /// All but the first `done` bytes.
    pub(crate) fn rest(self, done: usize) -> Self {
        let done = done.min(self.len);
        Self {
            start: self.start.wrapping_add(done),
            len: self.len - done,
            ..self
        }
    }

    /// The first bytes, `len` at most.
    pub(crate) fn first(self, len: usize) -> Self {
        Self {
            len: self.len.min(len),
            ..self
        }
    }
}

impl<'a> Run<'a, Readable> {
    /// Bytes of the library's own.
    pub(crate) fn of_bytes(bytes: &'a [u8]) -> Self {
        Self {
            start: bytes.as_ptr().cast_mut(),
            len: bytes.len(),
            access: PhantomData,
        }
    }

    #[inline(always)]
    pub(crate) fn is_good(self) -> bool {
        probe::is_readable(self.start.cast(), self.len)
    }

    /// Appends it to a leased slab as bytes of the file from `offset` on.
    #[inline(always)]
    pub(crate) fn append_to(self, writer: &mut SlabWriter, offset: u64) -> Appended {
        // SAFETY: the program gave the bytes to be read (`new`), and its memory is no part of the arena's
        // mapping, which it does not know; `probe` says which bad pointers fault.
        unsafe { writer.append(offset, self.start, self.len) }
    }

    /// As what a packet carries.
    pub(crate) fn as_outgoing(self) -> Outgoing<'a> {
        // SAFETY: the program gave the bytes to be written to a file (`new`), and firnd writes them.
        unsafe { Outgoing::from_raw(self.start, self.len) }
    }

    /// pwrite(2).
    pub(crate) fn write_to(self, fd: c_int, at: u64) -> isize {
        sys::pwrite(fd, self.start.cast_const().cast(), self.len, at)
    }
}

impl<'a> Run<'a, Writable> {
    /// Copies bytes of the arena to its beginning, past the caches if `streams`.
    pub(crate) fn fill_from(self, from: ArenaBytes, streams: bool) {
        let len = self.len.min(from.len());
        // SAFETY: the source is mapped for as many bytes (`ArenaBytes`), and no part of the program's memory, which
        // does not know it; the program gave the target to be written (`new`).
        unsafe {
            if streams {
                firn_direct::copy(self.start, from.start(), len);
            } else {
                std::ptr::copy_nonoverlapping(from.start(), self.start, len);
            }
        }
    }

    /// As room for what a packet carries.
    pub(crate) fn as_incoming(self) -> Incoming<'a> {
        // SAFETY: the program gave the bytes to be written (`new`).
        unsafe { Incoming::from_raw(self.start, self.len) }
    }

    /// pread(2).
    pub(crate) fn read_from(self, fd: c_int, at: u64) -> isize {
        // SAFETY: the program gave the bytes to be written (`new`); the kernel answers EFAULT where it cannot.
        unsafe { sys::pread(fd, self.start.cast(), self.len, at) }
    }
}

impl<Access> Run<'_, Access> {
    /// The run as all that a call was given.
    #[inline(always)]
    pub(crate) fn as_memory<R>(self, then: impl FnOnce(ProgramMemory<'_, Access>) -> R) -> R {
        let parts = [self.as_part()];
        then(ProgramMemory {
            parts: &parts,
            access: PhantomData,
        })
    }
}
