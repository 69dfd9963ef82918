//! Writes past the kernel: bytes into a leased slab, published by one store.
//!
//! Promises
//! * Nothing here allocates, locks, calls the system or the standard library's I/O: it may run in a
//!   signal handler.
//! * [`Appended::Bytes`] is told only of bytes that firnd takes in, also when this process and firnd die
//!   at once. Of [`Appended::Revoked`] nothing is taken in, now or later.
//! * No byte is stored into a slab that firnd may have given to somebody else.
//!
//! How firnd and a writer agree
//! * The slab's *writer word* is `writer_idle(generation)` while the lease stands. The writer makes it
//!   busy before it stores bytes and idle afterwards; firnd ends the lease by taking it from idle to 0. A
//!   slab whose writer is busy is not given away before it is idle or its process is dead.
//! * A piece is published by a compare-exchange of its seal. firnd freezes the last seal (`FROZEN`): the
//!   writer begins a new record. firnd poisons the seal after the last one: the lease is over.
//!
//! Records: `firn_format::piece` and docs/FORMAT.md.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use firn_format::data_socket::{OFFSET_MAX, Slab};
use firn_format::geometry::PAGE;
use firn_format::piece::{PIECE_BYTES, Piece, Seals, poison, word};
use firn_format::slab::{WRITER_BUSY, writer_idle};

use crate::copy::copy;

/// Asks the processor what it can do, for [`copy()`] and checksums. It does so once in a process, and a virtual
/// machine answers late: 40 µs, better spent while firnd works.
pub fn prepare() {
    crate::copy::prepare();
    // Where the kernel keeps its clock is looked up at the first question.
    let _ = now_ns();
    // The checksum's own question.
    std::hint::black_box(Seals::new(
        &Piece {
            file: 0,
            offset: 0,
            sequence: 0,
            position: 0,
            len: 0,
        },
        0,
    ));
}

/// What became of [`SlabWriter::append`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Appended {
    /// So many bytes were taken and are as safe as after write(2); fewer than given where the slab ends.
    Bytes(usize),
    /// Nothing was taken: no room or no record is left, or the bytes end beyond `OFFSET_MAX`, where only
    /// the kernel's way goes. Ask for another lease.
    Full,
    /// Nothing was taken: firnd ended the lease. Give the offset back and write through the kernel.
    Revoked,
}

/// The piece that the next bytes may continue.
#[derive(Clone, Copy, Debug)]
struct Last {
    /// Offset in the file behind its last byte.
    end: u64,
    /// As it was stored here.
    seal: u64,
    seals: Seals,
    /// Bytes.
    len: u32,
    /// Index of its record in the lease.
    record: u32,
}

/// The writing end of one lease. Whoever holds it is the only one who appends.
#[derive(Debug)]
pub struct SlabWriter {
    base: *mut u8,
    slab: Slab,
    file_id: u64,
    /// Next free byte, from the start of the chunk.
    next: u32,
    /// Next free record, its index in the lease.
    record: u32,
    last: Option<Last>,
    /// Time of the last write, nanoseconds since 1970.
    modified: u64,
}

// SAFETY: it is a pointer to shared memory and numbers; the writer is used by one thread at a time
// (`&mut self`), whichever that is.
unsafe impl Send for SlabWriter {}

/// What a try to publish a record met.
enum Publish {
    Done,
    Frozen,
    Revoked,
}

impl SlabWriter {
    /// Begins a lease that firnd just granted. `base` is the address where offset 0 of the arena would be.
    ///
    /// # Safety
    /// As long as the writer is used, the records, the writer word and the data that `slab` names are mapped
    /// at their offsets from `base`, readable and writable, and no other `SlabWriter` has the same lease.
    pub unsafe fn new(base: *mut u8, slab: Slab, file_id: u64) -> Self {
        Self {
            base,
            slab,
            file_id,
            next: slab.start,
            record: 0,
            last: None,
            modified: slab.modified,
        }
    }

    /// The lease.
    pub fn slab(&self) -> &Slab {
        &self.slab
    }

    /// Bytes that are still free, as far as records suffice.
    pub fn free_bytes(&self) -> u32 {
        self.slab.end.saturating_sub(self.next)
    }

    /// Whether half of the bytes or of the records are used: time to ask for the next lease. Of a chunk of
    /// 4 MiB what is left is copied in 130 µs, and an answer of firnd may take as long.
    pub fn is_half_full(&self) -> bool {
        let size = self.slab.end.saturating_sub(self.slab.start);
        let count = self.slab.record_count;
        self.free_bytes() <= size / 2 || self.record >= count - count / 2
    }

    /// Takes bytes of the file at `offset`, the first ones of them where the slab ends.
    ///
    /// # Safety
    /// `data` is readable for `len` bytes and does not overlap the slab. A fault while it is read leaves the
    /// slab's writer word busy: then the writer is not used again but with [`SlabWriter::abandon`].
    #[inline]
    pub unsafe fn append(&mut self, offset: u64, data: *const u8, len: usize) -> Appended {
        if len == 0 {
            return Appended::Bytes(0);
        }
        if offset
            .checked_add(len as u64)
            .is_none_or(|end| end > OFFSET_MAX)
        {
            return Appended::Full;
        }
        let idle = writer_idle(self.slab.generation);
        let busy = idle | WRITER_BUSY;
        if self
            .writer()
            .compare_exchange(idle, busy, Ordering::SeqCst, Ordering::Relaxed)
            .is_err()
        {
            return Appended::Revoked;
        }
        // SAFETY: as promised by the caller; the slab is ours until the word is idle.
        let outcome = unsafe { self.append_busy(offset, data, len) };
        self.writer().store(idle, Ordering::Release);
        outcome
    }

    /// After a fault in [`SlabWriter::append`]: nothing of that write counts and the lease goes on.
    pub fn abandon(&mut self) {
        let idle = writer_idle(self.slab.generation);
        let busy = idle | WRITER_BUSY;
        let _ = self
            .writer()
            .compare_exchange(busy, idle, Ordering::Release, Ordering::Relaxed);
    }

    /// # Safety
    /// As for [`SlabWriter::append`], and the writer word is busy.
    #[inline(always)]
    unsafe fn append_busy(&mut self, offset: u64, data: *const u8, len: usize) -> Appended {
        let Some(last) = self.last.filter(|last| last.end == offset) else {
            // SAFETY: the caller's promise.
            return unsafe { self.begin(offset, data, len, None) };
        };
        let taken = len.min(self.free_bytes() as usize);
        if taken == 0 {
            return Appended::Full;
        }
        // SAFETY: `taken` bytes from `next` on lie in the slab.
        unsafe { self.fill(self.next, data, taken) };
        match self.extend(last, taken as u32) {
            Publish::Done => Appended::Bytes(taken),
            Publish::Revoked => Appended::Revoked,
            // SAFETY: the caller's promise.
            Publish::Frozen => unsafe { self.begin(offset, data, len, Some((self.next, taken))) },
        }
    }

    /// Begins a piece. `filled`: where bytes of it lie already, and how many.
    ///
    /// # Safety
    /// As for `append_busy`.
    unsafe fn begin(
        &mut self,
        offset: u64,
        data: *const u8,
        len: usize,
        filled: Option<(u32, usize)>,
    ) -> Appended {
        if self.record >= self.slab.record_count {
            return Appended::Full;
        }
        let position = self.place(offset, len);
        let room = u64::from(self.slab.end).saturating_sub(position);
        let taken = (len as u64).min(room) as usize;
        if taken == 0 {
            return Appended::Full;
        }
        let position = position as u32;
        // What was copied behind a frozen piece lies where it belongs already, mostly.
        if filled != Some((position, taken)) {
            // SAFETY: `taken` bytes from `position` on lie in the slab.
            unsafe { self.fill(position, data, taken) };
        }
        match self.publish(offset, position, taken as u32) {
            Publish::Done => Appended::Bytes(taken),
            _ => Appended::Revoked,
        }
    }

    /// Where a new piece begins: a page or more, and the first of a slab, congruent to its offset.
    fn place(&self, offset: u64, len: usize) -> u64 {
        let next = u64::from(self.next);
        if len as u64 >= PAGE || self.last.is_none() {
            next + (offset % PAGE + PAGE - next % PAGE) % PAGE
        } else {
            next
        }
    }

    #[inline(always)]
    fn extend(&mut self, last: Last, more: u32) -> Publish {
        let end = last.end + u64::from(more);
        let len = last.len + more;
        let seal = last.seals.at(len);
        let modified = self.now();
        self.u64(last.record, word::MODIFIED)
            .store(modified, Ordering::Relaxed);
        let word = self.seal_of(last.record);
        if word
            .compare_exchange(last.seal, seal, Ordering::Release, Ordering::Relaxed)
            .is_ok()
        {
            self.last = Some(Last {
                end,
                seal,
                len,
                ..last
            });
            self.next += more;
            return Publish::Done;
        }
        // It is frozen, or overwritten by somebody mad; both end the piece.
        if self.is_poisoned() {
            Publish::Revoked
        } else {
            Publish::Frozen
        }
    }

    fn publish(&mut self, offset: u64, position: u32, len: u32) -> Publish {
        let record = self.record;
        let found = self.seal_of(record).load(Ordering::Acquire);
        if found == poison(self.slab.generation) {
            return Publish::Revoked;
        }
        let sequence = self.slab.sequence + u64::from(record);
        let piece = Piece {
            file: self.file_id,
            offset,
            sequence,
            position,
            len,
        };
        self.u64(record, word::WHO)
            .store(piece.who(), Ordering::Relaxed);
        self.u64(record, word::OFFSET)
            .store(piece.offset, Ordering::Relaxed);
        self.u64(record, word::PLACE)
            .store(piece.place(), Ordering::Relaxed);
        let modified = self.now();
        self.u64(record, word::MODIFIED)
            .store(modified, Ordering::Relaxed);
        let seals = Seals::new(&piece, self.slab.generation);
        let seal = seals.at(len);
        let stored = self.seal_of(record).compare_exchange(
            found,
            seal,
            Ordering::Release,
            Ordering::Relaxed,
        );
        if stored.is_err() {
            return Publish::Revoked;
        }
        self.last = Some(Last {
            end: offset + u64::from(len),
            seal,
            seals,
            len,
            record,
        });
        self.next = position + len;
        self.record += 1;
        Publish::Done
    }

    /// The time, as the kernel stamps files with it, but later than that of the write before: who compares sees each
    /// write. No call of the system: the kernel keeps this clock in memory (vdso(7)).
    #[inline(always)]
    fn now(&mut self) -> u64 {
        self.modified = now_ns().max(self.modified.saturating_add(1));
        self.modified
    }

    /// Whether firnd ended the lease while this writer was busy.
    fn is_poisoned(&self) -> bool {
        // The freeze came before the poison; who sees the one must look for the other in this order.
        fence(Ordering::Acquire);
        self.record < self.slab.record_count
            && self.seal_of(self.record).load(Ordering::Acquire) == poison(self.slab.generation)
    }

    /// # Safety
    /// `position..position + len` lies in the slab, and `data` is readable for `len` bytes.
    #[inline(always)]
    unsafe fn fill(&self, position: u32, data: *const u8, len: usize) {
        let to = self
            .base
            .wrapping_add((self.slab.chunk + u64::from(position)) as usize);
        // SAFETY: the caller's promise and that of `new`.
        unsafe { copy(to, data, len) }
    }

    fn writer(&self) -> &AtomicU64 {
        // SAFETY: mapped as promised in `new`; firnd aligns it.
        unsafe { AtomicU64::from_ptr(self.base.wrapping_add(self.slab.writer as usize).cast()) }
    }

    fn seal_of(&self, record: u32) -> &AtomicU64 {
        self.u64(record, word::SEAL)
    }

    fn u64(&self, record: u32, word: u64) -> &AtomicU64 {
        // SAFETY: a word of one of this lease's records, mapped as promised in `new`.
        unsafe { AtomicU64::from_ptr(self.at(record, word).cast()) }
    }

    fn at(&self, record: u32, word: u64) -> *mut u8 {
        let offset = self.slab.records + u64::from(record) * PIECE_BYTES + word;
        self.base.wrapping_add(offset as usize)
    }
}

/// `CLOCK_REALTIME_COARSE` in nanoseconds.
#[inline(always)]
fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    (now.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(now.tv_nsec as u64)
}

#[cfg(test)]
mod tests;
