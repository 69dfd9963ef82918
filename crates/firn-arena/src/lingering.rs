//! Clients that may still store bytes into a slab although their lease is over.
//!
//! Terms
//! * *firnd* is the process that serves the mount. A *client* is a process that writes to shared memory itself, without
//!   a request to firnd.
//! * A *slab* is a part of that memory, the *arena*. A *lease* is the right of one writer to fill a slab.
//! * A client *lingers* if its lease has ended in the middle of a copy.
//! * The *writer word* of a slab says whether its client is storing bytes at this moment.
//!
//! Promises
//! * A slab is not used again while a client may still store bytes into it. So a client does no harm if it was stopped
//!   in the middle of a copy, or if its firnd died.
//! * After [`revoke_all`], no client publishes a record in a lease of an earlier firnd.
//!
//! Relies on: a caller that adds a slab here has pinned it, and unpins it when [`LingeringWriters::take_finished`]
//! returns it.

use std::sync::atomic::{AtomicU64, Ordering};

use firn_format::data_socket::OFFSET_MAX;
use firn_format::geometry::WORDS_COUNT;
use firn_format::piece::{CheckedPiece, FROZEN, poison_seal};
use firn_format::slab::{Class, WRITER_BUSY, writer_idle};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags};

use crate::map::crash_point;
use crate::refs::{PieceRef, SlabRef};
use crate::tables::Tables;

/// A client whose lease of a slab is over, and that was storing bytes when last seen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LingeringWriter {
    pub(crate) slab: SlabRef,
    /// Generation of the lease that is over.
    pub(crate) generation: u64,
    pub(crate) pid: u32,
}

/// The list of lingering clients. It has each slab at most once.
#[derive(Default)]
pub(crate) struct LingeringWriters {
    writers: Mutex<Vec<LingeringWriter>>,
}

impl LingeringWriters {
    pub(crate) fn new(writers: Vec<LingeringWriter>) -> Self {
        Self {
            writers: Mutex::new(writers),
        }
    }

    /// Adds a writer. No other lingering writer may have its slab.
    pub(crate) fn add(&self, writer: LingeringWriter) {
        let mut writers = self.writers.lock();
        debug_assert!(
            writers.iter().all(|known| known.slab != writer.slab),
            "{:?} was leased again while its client lingers",
            writer.slab
        );
        writers.push(writer);
    }

    pub(crate) fn count(&self) -> usize {
        self.writers.lock().len()
    }

    /// Takes the clients that have stopped or died off the list, and clears their writer words. Returns their slabs.
    /// No process stores bytes into these any more, and the caller may free them.
    pub(crate) fn take_finished(&self, tables: &Tables) -> Vec<SlabRef> {
        let mut writers = self.writers.lock();
        // The test itself clears the word of a client that is not storing bytes, so the client cannot begin again.
        let has_finished = |writer: &mut LingeringWriter| {
            try_clear_writer_word(tables, writer.slab, writer.generation) || !is_alive(writer.pid)
        };
        let slabs: Vec<SlabRef> = writers
            .extract_if(.., has_finished)
            .map(|writer| writer.slab)
            .collect();
        // The slabs are not in the list any more, so the rest needs no lock.
        drop(writers);
        // The word of a client that died during a copy still says that it is storing bytes.
        for slab in &slabs {
            tables.writer(*slab).store(0, Ordering::Release);
        }
        slabs
    }
}

/// Clears the writer word of a slab, and so revokes the client's right to store bytes. Returns false, and changes
/// nothing, if the client is storing bytes at this moment.
pub(crate) fn try_clear_writer_word(tables: &Tables, slab: SlabRef, generation: u64) -> bool {
    let idle_word = writer_idle(generation);
    let busy_word = idle_word | WRITER_BUSY;
    let cleared =
        tables
            .writer(slab)
            .compare_exchange(idle_word, 0, Ordering::SeqCst, Ordering::Acquire);
    match cleared {
        Ok(_) => true,
        // Any other word is not of this lease, so its client has no right to store bytes.
        Err(current_word) => current_word != busy_word,
    }
}

/// Returns whether a process is alive. A process that cannot be seen from here counts as alive, because it could still
/// store bytes.
fn is_alive(pid: u32) -> bool {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return true;
    };
    let process = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(process) => process,
        Err(errno) => return errno != rustix::io::Errno::SRCH,
    };
    // The descriptor is readable once the process has ended, even if its parent has not waited for it yet.
    let mut poll_fds = [PollFd::new(&process, PollFlags::IN)];
    let no_wait = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    rustix::event::poll(&mut poll_fds, Some(&no_wait)) == Ok(0)
}

/// Revokes all client leases, and all chunk lists that readers have. An attach calls this before it reads any record.
/// `classes` lists the chunks that are divided, with their class. Returns the clients that may be storing bytes now.
pub(crate) fn revoke_all(tables: &Tables, classes: &[(u32, Class)]) -> Vec<LingeringWriter> {
    for index in 0..WORDS_COUNT {
        let word = tables.geometry().word_offset(index);
        tables.map().u32(word).fetch_add(1, Ordering::SeqCst);
    }
    let mut lingering = Vec::new();
    for &(chunk, class) in classes {
        for slab in 0..tables.slab_count(class) {
            lingering.extend(revoke_slab(tables, SlabRef { chunk, slab }, class));
        }
    }
    lingering
}

/// Ends the lease that a client of an earlier firnd may have of a slab, a part of shared memory. The client can publish
/// nothing more in it. Returns the client if it may be storing bytes now; the slab must then not be used again. Returns
/// `None` if there is no such client.
fn revoke_slab(tables: &Tables, slab: SlabRef, class: Class) -> Option<LingeringWriter> {
    let writer = tables.writer(slab);
    if writer.load(Ordering::Acquire) == 0 {
        return None;
    }
    let generation = tables.generation(slab).load(Ordering::Acquire);
    crash_point();
    // Records beyond the largest file offset must be voided before the writer word is cleared: a later attach skips a
    // slab without a writer word, so after a crash they would remain valid. They are voided again after it, because the
    // client may have published more in between.
    void_records_beyond_offset_max(tables, slab, class, generation);
    let was_idle = try_clear_writer_word(tables, slab, generation);
    void_records_beyond_offset_max(tables, slab, class, generation);
    let pid = tables.client_pid(slab).load(Ordering::Acquire);
    if was_idle || !is_alive(pid) {
        writer.store(0, Ordering::Release);
        return None;
    }
    poison_slab(tables, slab, class, generation);
    Some(LingeringWriter {
        slab,
        generation,
        pid,
    })
}

/// Voids the records of a slab that describe bytes beyond the largest file offset: their seal becomes the poison seal,
/// with which a record never counts. firnd would not have accepted them from the client. As pending bytes they could be
/// neither written to the backing nor dropped.
fn void_records_beyond_offset_max(tables: &Tables, slab: SlabRef, class: Class, generation: u64) {
    let bytes = tables.bytes_of(class, slab.slab);
    for record in tables.records_of(class, slab.slab) {
        let record_ref = PieceRef { slab, record };
        let raw = tables.load(record_ref);
        let Ok(CheckedPiece::Live(piece)) =
            raw.check(generation, bytes.start.into(), bytes.end.into())
        else {
            continue;
        };
        if piece.offset + u64::from(piece.len) <= OFFSET_MAX {
            continue;
        }
        tracing::warn!(
            ?slab,
            record,
            "a program with direct access wrote beyond the largest file offset; these bytes are dropped"
        );
        crash_point();
        tables
            .seal(record_ref)
            .store(poison_seal(generation), Ordering::SeqCst);
    }
}

/// Poisons a record that is not published, so that it never can be. Returns false, without a change, if the client has
/// changed its seal since `seal_before` was read.
pub(crate) fn try_poison(seal: &AtomicU64, seal_before: u64, generation: u64) -> bool {
    let poison = poison_seal(generation);
    seal.compare_exchange(seal_before, poison, Ordering::SeqCst, Ordering::Relaxed)
        .is_ok()
}

/// Makes sure that the client of a slab can publish nothing more in this lease. Each published record is frozen: it
/// remains valid, but cannot grow. The first record that is not published is poisoned: it can never be published. A
/// client publishes the records in order, so none can follow it.
fn poison_slab(tables: &Tables, slab: SlabRef, class: Class, generation: u64) {
    let bytes = tables.bytes_of(class, slab.slab);
    for record in tables.records_of(class, slab.slab) {
        let record_ref = PieceRef { slab, record };
        let seal = tables.seal(record_ref);
        // Ends when the record is frozen or poisoned. A retry is needed only if the client publishes it at this
        // instant.
        loop {
            let seal_before = seal.load(Ordering::Acquire);
            let is_published = tables
                .load(record_ref)
                .check(generation, bytes.start.into(), bytes.end.into())
                .is_ok();
            crash_point();
            if is_published {
                seal.fetch_or(FROZEN, Ordering::SeqCst);
                break;
            }
            if try_poison(seal, seal_before, generation) {
                return;
            }
        }
    }
}
