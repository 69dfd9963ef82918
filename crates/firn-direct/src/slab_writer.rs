//! The writing end of a lease: bytes into a leased slab, published by one store.
//!
//! Promises
//! * Nothing here allocates, locks, calls the system or the standard library's I/O: it may run in a
//!   signal handler.
//! * [`Appended::Bytes`] is told only of bytes that firnd ingests, also when this process and firnd die
//!   at once. Of [`Appended::Revoked`] nothing is ingested, now or later.
//! * No byte is stored into a slab that firnd may have given to another process.
//!
//! How firnd and a writer agree
//! * The slab's *writer word* is `writer_idle(generation)` while the lease stands. The writer makes it
//!   busy before it stores bytes and idle afterwards; firnd ends the lease by taking it from idle to 0. A
//!   slab whose writer is busy is not given away before it is idle or its process is dead.
//! * A piece is published by a compare-exchange of its seal. firnd freezes the last seal (`FROZEN`): the
//!   writer begins a new record. firnd poisons the seal after the last one: the lease is over.
//!
//! Where the bytes go and how a record is published: `firn_format::append`, which firnd uses too.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use firn_format::append::{AppendError, RecordTable, Room, SlabCursor};
use firn_format::clock;
use firn_format::data_socket::{OFFSET_MAX, Slab};
use firn_format::piece::{PIECE_BYTES, Piece};
use firn_format::slab::{WRITER_BUSY, writer_idle};
use rustix::time::ClockId;

use crate::copy::copy;

/// What only the first write of a process waits for, better done while firnd works.
pub fn prepare() {
    firn_format::processor::processor();
    // Where the kernel keeps its clock is looked up at the first question.
    let _ = now_ns();
}

/// What became of [`SlabWriter::append`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Appended {
    /// This many bytes were taken and are as safe as after write(2); fewer than given where the slab ends.
    Bytes(usize),
    /// Nothing was taken: no room or no record is left, or the bytes end beyond `OFFSET_MAX`, where only
    /// the kernel's way goes. Ask for another lease.
    Full,
    /// Nothing was taken: firnd ended the lease. Give the offset back and write through the kernel.
    Revoked,
}

/// The writing end of one lease. Only its holder appends.
#[derive(Debug)]
pub struct SlabWriter {
    base: *mut u8,
    slab: Slab,
    file_id: u64,
    /// Records are counted from the first of the lease.
    cursor: SlabCursor,
    /// Time of the last write, nanoseconds since 1970.
    modified: u64,
}

// SAFETY: it is a pointer to shared memory and numbers; the writer is used by one thread at a time
// (`&mut self`), whichever that is.
unsafe impl Send for SlabWriter {}

/// The lease's piece records in the mapping.
#[derive(Clone, Copy)]
struct Records {
    first: *mut u8,
}

impl RecordTable for Records {
    #[inline(always)]
    fn word(&self, record: u32, word: u64) -> &AtomicU64 {
        let at = u64::from(record) * PIECE_BYTES + word;
        // SAFETY: the cursor names records of the lease only, and `SlabWriter::new` was promised that they are
        // mapped, aligned, for as long as the writer is used.
        unsafe { AtomicU64::from_ptr(self.first.wrapping_add(at as usize).cast()) }
    }
}

impl SlabWriter {
    /// Begins a lease that firnd just granted. `base` is the address where offset 0 of the arena would be.
    ///
    /// # Safety
    /// As long as the writer is used, the records, the writer word and the data that `slab` names are mapped at their
    /// offsets from `base`, readable and writable. No other `SlabWriter` has the same lease.
    pub unsafe fn new(base: *mut u8, slab: Slab, file_id: u64) -> Self {
        Self {
            base,
            slab,
            file_id,
            cursor: SlabCursor::new(slab.generation, slab.start..slab.end, 0..slab.record_count),
            modified: slab.modified,
        }
    }

    /// The lease.
    pub fn slab(&self) -> &Slab {
        &self.slab
    }

    /// Bytes that are still free, as far as records suffice.
    pub fn free_bytes(&self) -> u32 {
        self.cursor.free_bytes()
    }

    /// Whether half of the bytes or of the records are used: time to ask for the next lease. Of a chunk of
    /// 4 MiB what is left is copied in 130 µs, and an answer of firnd may take as long.
    pub fn is_half_full(&self) -> bool {
        let size = self.slab.end.saturating_sub(self.slab.start);
        let count = self.slab.record_count;
        self.free_bytes() <= size / 2 || self.cursor.next_record() >= count - count / 2
    }

    /// Takes bytes of the file at `offset`, the first ones of them where the slab ends.
    ///
    /// # Safety
    /// `data` is readable for `len` bytes and does not overlap the slab. A fault while it is read leaves the
    /// slab's writer word busy: then the writer is not used again.
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

    /// # Safety
    /// As for [`SlabWriter::append`], and the writer word is busy.
    #[inline(always)]
    unsafe fn append_busy(&mut self, offset: u64, data: *const u8, len: usize) -> Appended {
        if !self.cursor.continues(self.file_id, offset) {
            // SAFETY: `data` is readable for `len` bytes, as promised to `append`.
            return unsafe { self.begin_piece(offset, data, len, None) };
        }
        let Some(room) = self.cursor.room_behind_last(len as u64) else {
            return Appended::Full;
        };
        // SAFETY: the room lies in the slab and is no longer than `data`.
        unsafe { self.fill(room, data) };
        let modified = self.next_time();
        match self
            .cursor
            .extend_piece(&self.records(), room.len, modified)
        {
            Ok(()) => Appended::Bytes(room.len as usize),
            Err(AppendError::Revoked) => Appended::Revoked,
            // SAFETY: `data` is readable for `len` bytes, and the room that was filled lies in the slab.
            Err(AppendError::Frozen) => unsafe { self.begin_piece(offset, data, len, Some(room)) },
        }
    }

    /// Begins a piece. `filled`: where bytes of it lie already.
    ///
    /// # Safety
    /// As for `append_busy`.
    unsafe fn begin_piece(
        &mut self,
        offset: u64,
        data: *const u8,
        len: usize,
        filled: Option<Room>,
    ) -> Appended {
        let Some(room) = self.cursor.room_for_piece(offset, len as u64) else {
            return Appended::Full;
        };
        // Bytes copied behind a frozen piece mostly lie in their place already.
        if filled != Some(room) {
            // SAFETY: the room lies in the slab and is no longer than `data`.
            unsafe { self.fill(room, data) };
        }
        let piece = Piece {
            file: self.file_id,
            offset,
            sequence: self.slab.sequence + u64::from(self.cursor.next_record()),
            position: room.position,
            len: room.len,
        };
        let modified = self.next_time();
        match self.cursor.publish_piece(&self.records(), piece, modified) {
            Ok(_) => Appended::Bytes(room.len as usize),
            Err(_) => Appended::Revoked,
        }
    }

    #[inline(always)]
    fn records(&self) -> Records {
        Records {
            first: self.base.wrapping_add(self.slab.records as usize),
        }
    }

    /// The time, as the kernel stamps files with it, but later than that of the write before: a comparison of times
    /// sees each write. No call of the system: the kernel keeps this clock in memory (vdso(7)).
    #[inline(always)]
    fn next_time(&mut self) -> u64 {
        self.modified = now_ns().max(self.modified.saturating_add(1));
        self.modified
    }

    /// # Safety
    /// `room` lies in the slab, and `data` is readable for as many bytes.
    #[inline(always)]
    unsafe fn fill(&self, room: Room, data: *const u8) {
        let to = self
            .base
            .wrapping_add((self.slab.chunk + u64::from(room.position)) as usize);
        // SAFETY: the slab's data is mapped for writing (`new`), no other thread stores into it while the writer word
        // is busy, and `data` is what the caller promises.
        unsafe { copy(to, data, room.len as usize) }
    }

    fn writer(&self) -> &AtomicU64 {
        // SAFETY: mapped as promised in `new`; firnd aligns it.
        unsafe { AtomicU64::from_ptr(self.base.wrapping_add(self.slab.writer as usize).cast()) }
    }
}

/// The clock that the kernel stamps files with ([`firn_format::clock`]), in nanoseconds.
#[inline(always)]
fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(if is_exact() {
        ClockId::Realtime
    } else {
        ClockId::RealtimeCoarse
    });
    (now.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(now.tv_nsec as u64)
}

/// Whether the kernel may stamp files with exact times. Asked at the first call, by any thread.
#[inline(always)]
fn is_exact() -> bool {
    const EXACT: u8 = 1;
    const OF_TICKS: u8 = 2;
    static KNOWN: AtomicU8 = AtomicU8::new(0);
    match KNOWN.load(Ordering::Relaxed) {
        0 => {
            let is_exact = ask_whether_exact();
            KNOWN.store(if is_exact { EXACT } else { OF_TICKS }, Ordering::Relaxed);
            is_exact
        }
        known => known == EXACT,
    }
}

/// Not a part of its caller, which would have the 390 bytes of uname(2) on its stack at each write.
#[cold]
#[inline(never)]
fn ask_whether_exact() -> bool {
    clock::is_exact(rustix::system::uname().release().to_bytes())
}

#[cfg(test)]
mod tests;
