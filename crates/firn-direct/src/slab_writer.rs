//! Appends bytes to a part of shared memory, and publishes them with one store.
//!
//! Terms
//! * firnd is the process that serves the mount.
//! * A *slab* is a part of the shared memory that one writer fills.
//! * A *lease* is a writer's right to fill a slab, until firnd ends it.
//! * A *piece* is one append of bytes. It has a record, and counts from the moment its *seal* is stored there.
//! * firnd *ingests* a piece when it makes the bytes a part of the file.
//!
//! Promises
//! * No function here allocates memory, takes a lock or uses the standard library's I/O, so it may run in a signal
//!   handler. There is no system call either, except uname(2) at the first query of the clock; [`prepare`] makes that
//!   query in advance.
//! * [`Appended::Bytes`] is returned only for bytes that firnd ingests, even if this process and firnd die at once.
//!   Bytes of an append that returned [`Appended::Revoked`] are never ingested.
//! * No byte is stored into a slab that firnd may have leased to another process.
//!
//! How firnd and a writer agree
//! * The slab's *writer word* is `writer_idle(generation)` while the lease is valid. The writer sets the word to busy
//!   before it stores bytes, and back to idle afterwards. firnd ends the lease by changing the word from idle to 0. If
//!   the writer is busy, firnd leases the slab again only after the word is idle or the process is dead.
//! * A piece is published by a compare-exchange of its seal. If firnd freezes the last seal (`FROZEN`), the writer
//!   begins a new record. If firnd poisons the seal after the last one, the lease has ended.
//!
//! The module `firn_format::append` defines where the bytes go and how a record is published; firnd uses it too.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use firn_format::append::{AppendError, RecordTable, Room, SlabCursor};
use firn_format::clock;
use firn_format::data_socket::{OFFSET_MAX, Slab};
use firn_format::piece::{PIECE_BYTES, Piece};
use firn_format::slab::{WRITER_BUSY, writer_idle};
use rustix::time::ClockId;

use crate::copy::copy;

/// Initializes what the first write of a process needs. The caller does this while it waits for firnd.
pub fn prepare() {
    firn_format::processor::processor();
    // The first query of the clock calls uname(2) and looks up the vDSO.
    let _ = now_ns();
}

/// Result of [`SlabWriter::append`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Appended {
    /// This many bytes were accepted, and are as safe as after write(2). The number is smaller than requested if the
    /// slab ends.
    Bytes(usize),
    /// Nothing was accepted. The slab has no room or no record left: the caller must request another lease. Or the
    /// bytes end beyond `OFFSET_MAX`, where only writes through the kernel are possible.
    Full,
    /// Nothing was accepted, because firnd ended the lease. The caller must return the descriptor's offset to the
    /// kernel, and write through the kernel.
    Revoked,
}

/// The writer of one lease. Only the holder of the lease appends.
#[derive(Debug)]
pub struct SlabWriter {
    base: *mut u8,
    slab: Slab,
    file_id: u64,
    /// Position of the next append. Records are counted from the first record of the lease.
    cursor: SlabCursor,
    /// Time of the last write, in nanoseconds since 1970.
    modified: u64,
}

// SAFETY: the writer is a pointer to shared memory, and numbers. One thread at a time uses it (`&mut self`); it need
// not be the thread that made it.
unsafe impl Send for SlabWriter {}

/// The piece records of the lease in the mapping.
#[derive(Clone, Copy)]
struct Records {
    first: *mut u8,
}

impl RecordTable for Records {
    #[inline(always)]
    fn word(&self, record: u32, word: u64) -> &AtomicU64 {
        let offset = u64::from(record) * PIECE_BYTES + word;
        // SAFETY: the cursor names records of the lease only, and `SlabWriter::new` was promised that they are
        // mapped, aligned, for as long as the writer is used.
        unsafe { AtomicU64::from_ptr(self.first.wrapping_add(offset as usize).cast()) }
    }
}

impl SlabWriter {
    /// Creates the writer of a lease that firnd just granted. `base` is the address at which offset 0 of the arena
    /// would be.
    ///
    /// # Safety
    /// As long as the writer is used, the records, the writer word and the data that `slab` names must be mapped at
    /// their offsets from `base`, readable and writable. No other `SlabWriter` may have the same lease.
    pub unsafe fn new(base: *mut u8, slab: Slab, file_id: u64) -> Self {
        Self {
            base,
            slab,
            file_id,
            cursor: SlabCursor::new(slab.generation, slab.start..slab.end, 0..slab.record_count),
            modified: slab.modified,
        }
    }

    /// Returns the lease.
    pub fn slab(&self) -> &Slab {
        &self.slab
    }

    /// Returns the number of free bytes that the remaining records can describe.
    pub fn free_bytes(&self) -> u32 {
        self.cursor.free_bytes()
    }

    /// Returns whether half of the bytes or of the records are used. Then it is time to request the next lease: the
    /// second half of a chunk of 4 MiB is filled in 130 µs, and a reply of firnd may take as long.
    pub fn is_half_full(&self) -> bool {
        let size = self.slab.end.saturating_sub(self.slab.start);
        let count = self.slab.record_count;
        self.free_bytes() <= size / 2 || self.cursor.next_record() >= count - count / 2
    }

    /// Appends bytes of the file at `offset` to the slab, the part of shared memory that this writer fills. If the slab
    /// ends, only the first bytes are accepted. `Full` means that none fit, or that `offset` is too large. `Revoked`
    /// means that firnd (the serving process) has ended the lease, the right to fill the slab.
    ///
    /// # Safety
    /// `data` must be readable for `len` bytes and must not overlap the slab. A fault during the read of `data`
    /// leaves the slab's writer word busy; the writer must not be used again after that.
    #[inline]
    pub unsafe fn append(&mut self, offset: u64, data: *const u8, len: usize) -> Appended {
        if len == 0 {
            return Appended::Bytes(0);
        }
        let end = offset.checked_add(len as u64);
        if end.is_none_or(|end| end > OFFSET_MAX) {
            return Appended::Full;
        }
        // firnd ends the lease by changing the idle word, so a change to busy succeeds only while the lease is valid.
        let idle_word = writer_idle(self.slab.generation);
        let busy_word = idle_word | WRITER_BUSY;
        let became_busy = self.writer_word().compare_exchange(
            idle_word,
            busy_word,
            Ordering::SeqCst,
            Ordering::Relaxed,
        );
        if became_busy.is_err() {
            return Appended::Revoked;
        }
        // SAFETY: the caller keeps the promises of this function. While the word is busy, only this writer uses the
        // slab.
        let appended = unsafe { self.append_while_busy(offset, data, len) };
        self.writer_word().store(idle_word, Ordering::Release);
        appended
    }

    /// Appends bytes of the file at `offset` to the slab, the part of shared memory that this writer fills. Extends the
    /// last piece (the record of an append) if the bytes continue it, else begins a new one.
    ///
    /// The caller has set the slab's writer word to busy. So firnd does not give the slab to another process meanwhile.
    ///
    /// # Safety
    /// The promises of [`SlabWriter::append`] hold, and the writer word is busy.
    #[inline(always)]
    unsafe fn append_while_busy(&mut self, offset: u64, data: *const u8, len: usize) -> Appended {
        if !self.cursor.continues(self.file_id, offset) {
            // SAFETY: `data` is readable for `len` bytes, as promised to `append`.
            return unsafe { self.begin_piece(offset, data, len, None) };
        }
        let Some(room) = self.cursor.room_behind_last(len as u64) else {
            return Appended::Full;
        };
        // SAFETY: the room lies in the slab and is no longer than `data`.
        unsafe { self.fill_room(room, data) };
        let modified = self.next_time();
        let extended = self
            .cursor
            .extend_piece(&self.records(), room.len, modified);
        match extended {
            Ok(()) => Appended::Bytes(room.len as usize),
            Err(AppendError::Revoked) => Appended::Revoked,
            // firnd has frozen the last piece, so that it cannot be extended.
            // SAFETY: `data` is readable for `len` bytes, and the room that was filled lies in the slab.
            Err(AppendError::Frozen) => unsafe { self.begin_piece(offset, data, len, Some(room)) },
        }
    }

    /// Begins a new piece, which is the record of an append, and publishes it. `filled` is the room into which the
    /// bytes were already copied; `None` if they were not copied.
    ///
    /// # Safety
    /// The promises of `append_while_busy` hold.
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
        // Bytes that were copied behind a frozen piece are usually in the right place already.
        if filled != Some(room) {
            // SAFETY: the room lies in the slab and is no longer than `data`.
            unsafe { self.fill_room(room, data) };
        }
        let piece = Piece {
            file: self.file_id,
            offset,
            // The slab's first record has the sequence of the slab; each further one has the next number.
            sequence: self.slab.sequence + u64::from(self.cursor.next_record()),
            position: room.position,
            len: room.len,
        };
        let modified = self.next_time();
        match self.cursor.publish_piece(&self.records(), piece, modified) {
            Ok(_) => Appended::Bytes(room.len as usize),
            // firnd has ended the lease, so it does not take the piece.
            Err(_) => Appended::Revoked,
        }
    }

    #[inline(always)]
    fn records(&self) -> Records {
        Records {
            first: self.base.wrapping_add(self.slab.records as usize),
        }
    }

    /// Returns the current time of the clock with which the kernel stamps files. The result is later than the time of
    /// the previous write, so a comparison of times detects each write.
    ///
    /// There is no system call, because the kernel keeps this clock in memory (vdso(7)).
    #[inline(always)]
    fn next_time(&mut self) -> u64 {
        self.modified = now_ns().max(self.modified.saturating_add(1));
        self.modified
    }

    /// Copies the first bytes of `data` into `room`.
    ///
    /// # Safety
    /// `room` must be within the slab, and `data` readable for `room.len` bytes.
    #[inline(always)]
    unsafe fn fill_room(&self, room: Room, data: *const u8) {
        let to = self
            .base
            .wrapping_add((self.slab.chunk + u64::from(room.position)) as usize);
        // SAFETY: the slab's data is mapped for writing (`new`). No other thread stores into it while the writer word
        // is busy. `data` is readable, as the caller promises.
        unsafe { copy(to, data, room.len as usize) }
    }

    fn writer_word(&self) -> &AtomicU64 {
        // SAFETY: the caller of `new` promised that the word is mapped, and firnd aligns it.
        unsafe { AtomicU64::from_ptr(self.base.wrapping_add(self.slab.writer as usize).cast()) }
    }
}

/// Nanoseconds in a second.
const NS_PER_S: u64 = 1_000_000_000;

/// Returns the time of the clock with which the kernel stamps files ([`firn_format::clock`]), in nanoseconds.
#[inline(always)]
fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(if is_exact() {
        ClockId::Realtime
    } else {
        ClockId::RealtimeCoarse
    });
    (now.tv_sec as u64)
        .wrapping_mul(NS_PER_S)
        .wrapping_add(now.tv_nsec as u64)
}

/// Returns whether the kernel may stamp files with exact times. The first call, by any thread, asks the kernel.
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

/// Asks the kernel whether it stamps files with exact times. This is a separate function because uname(2) needs 390
/// bytes of stack, which each write would otherwise use.
#[cold]
#[inline(never)]
fn ask_whether_exact() -> bool {
    clock::is_exact(rustix::system::uname().release().to_bytes())
}

#[cfg(test)]
mod tests;
