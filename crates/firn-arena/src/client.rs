//! Leases of client processes: a client stores bytes into a slab and publishes records of them. firnd accepts the records, and
//! only firnd ends a lease.
//!
//! Promises
//! * Every record that a client published before the end of its lease is accepted, and none after it.
//! * A slab is not used again while a client may still store bytes into it. This holds if the client is stopped (SIGSTOP) in
//!   a copy, and if it outlives the firnd that granted the lease.
//! * Each record is checked against the lease before it is used. A client can spoil its own bytes and no others.
//!
//! The client's side, and how both agree, is in firn-direct's `slab_writer`; docs/FORMAT.md says what a crash
//! leaves.

use std::sync::atomic::{AtomicU64, Ordering};

use firn_format::data_socket::{OFFSET_MAX, Slab};
use firn_format::piece::{Checked, FROZEN, Piece, poison};
use firn_format::slab::{Class, SlabState, writer_idle};
use firn_format::superblock::state_word;

use crate::arena::Arena;
use crate::lease::Lease;
use crate::lingering::{LingeringWriter, take_writer_word};
use crate::map::probe;
use crate::refs::{PieceRef, SlabRef};

/// A client's right to fill a slab. Not dropped but ended with [`Arena::end_client`].
#[derive(Debug)]
#[must_use = "a lease that is dropped keeps its slab for ever"]
pub struct ClientLease {
    lease: Lease,
    file_id: u64,
    pid: u32,
    /// Sequence of the first record.
    sequence: u64,
    /// Index of the first record.
    first: u32,
    /// Records that the client may publish.
    count: u32,
    /// Records that are accepted.
    taken: u32,
    /// The last accepted record; `None` once it cannot grow any more.
    open: Option<Piece>,
    /// End of the last accepted record, from the start of the chunk.
    end: u32,
    /// Whether the client was seen idle and cannot begin to store bytes again.
    stopped: bool,
    over: bool,
}

/// Bytes that a client published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// The piece that they are in.
    pub piece: PieceRef,
    /// Bytes from the start of the file.
    pub offset: u64,
    /// Bytes from the start of the chunk.
    pub position: u32,
    /// Length in bytes.
    pub len: u32,
    /// Sequence of the piece.
    pub sequence: u64,
    /// When the client says that it wrote them, in nanoseconds since 1970: the caller bounds it.
    pub modified: u64,
}

/// A client broke the rules of its lease; what it published before stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a client's piece record {} of chunk {} breaks the rules of its lease", .0.record, .0.slab.chunk)]
pub struct Wrong(pub PieceRef);

impl ClientLease {
    /// The process that has it.
    pub fn pid(&self) -> u32 {
        self.pid
    }
    /// The slab.
    pub fn slab(&self) -> SlabRef {
        self.lease.slab()
    }
    /// Whether the lease was revoked.
    pub fn is_over(&self) -> bool {
        self.over
    }
    fn at(&self, index: u32) -> PieceRef {
        PieceRef {
            slab: self.lease.slab(),
            record: self.first + index,
        }
    }
}

impl Arena {
    /// Leases a slab of `class`, or of a smaller one where that is all there is, to process `pid` for
    /// the file of `file_id`, near `cpu`.
    pub fn lease_client(
        &self,
        class: Class,
        file_id: u64,
        pid: u32,
        cpu: Option<u32>,
    ) -> Option<ClientLease> {
        let lease = self.lease_slab_near(class, cpu)?;
        let slab = lease.slab();
        let records = self.tables.records_of(lease.class(), slab.slab);
        let count = records.len() as u32;
        let sequence = self
            .map
            .u64(state_word::SEQUENCE)
            .fetch_add(count.into(), Ordering::AcqRel)
            + 1;
        probe();
        self.tables.holder(slab).store(pid, Ordering::Relaxed);
        self.tables
            .writer(slab)
            .store(writer_idle(lease.generation()), Ordering::Release);
        Some(ClientLease {
            end: lease.start(),
            lease,
            file_id,
            pid,
            sequence,
            first: records.start,
            count,
            taken: 0,
            open: None,
            stopped: false,
            over: false,
        })
    }

    /// What the client is told of its lease of a file whose last write was at `modified`.
    pub fn client_slab(&self, lease: &ClientLease, modified: u64) -> Slab {
        let slab = lease.slab();
        Slab {
            chunk: self.data_offset(slab.chunk),
            records: self.geometry().record_offset(slab.chunk, lease.first),
            writer: self.tables.writer_offset(slab),
            generation: lease.lease.generation(),
            sequence: lease.sequence,
            start: lease.lease.start(),
            end: lease.lease.end(),
            record_count: lease.count,
            reserved: 0,
            modified,
        }
    }

    /// Tells `sink` of what the client published since the last look; the slab counts the bytes as live.
    pub fn take_client(
        &self,
        lease: &mut ClientLease,
        sink: &mut dyn FnMut(Taken),
    ) -> Result<(), Wrong> {
        while !lease.over {
            // The next record first: once it is there, the one before it has its final length.
            let next = self.client_piece(lease, lease.taken)?;
            self.take_growth(lease, sink)?;
            let Some(piece) = next else { break };
            let at = lease.at(lease.taken);
            if piece.position < lease.end {
                return Err(Wrong(at));
            }
            lease.taken += 1;
            lease.end = piece.position + piece.len;
            lease.open = Some(piece);
            self.enter(lease, piece, 0, sink);
        }
        Ok(())
    }

    fn take_growth(
        &self,
        lease: &mut ClientLease,
        sink: &mut dyn FnMut(Taken),
    ) -> Result<(), Wrong> {
        let Some(before) = lease.open else {
            return Ok(());
        };
        let wrong = Wrong(lease.at(lease.taken - 1));
        let now = self.client_piece(lease, lease.taken - 1)?.ok_or(wrong)?;
        if (Piece {
            len: before.len,
            ..now
        }) != before
            || now.len < before.len
        {
            return Err(wrong);
        }
        if now.len > before.len {
            lease.open = Some(now);
            lease.end = now.position + now.len;
            self.enter(lease, now, before.len, sink);
        }
        Ok(())
    }

    fn enter(&self, lease: &ClientLease, piece: Piece, from: u32, sink: &mut dyn FnMut(Taken)) {
        let len = piece.len - from;
        self.uses.add(lease.slab(), len.into());
        let at = lease.at(lease.taken - 1);
        sink(Taken {
            piece: at,
            offset: piece.offset + u64::from(from),
            position: piece.position + from,
            len,
            sequence: piece.sequence,
            // Stored before the seal that was read, or for a write that is still under way.
            modified: self.modified(at),
        });
    }

    /// The piece of a record, if it is published.
    fn client_piece(&self, lease: &ClientLease, index: u32) -> Result<Option<Piece>, Wrong> {
        if index >= lease.count {
            return Ok(None);
        }
        let at = lease.at(index);
        let raw = self.tables.load(at);
        let generation = lease.lease.generation();
        match raw.check(
            generation,
            lease.lease.start().into(),
            lease.lease.end().into(),
        ) {
            Ok(Checked::Live(piece))
                if piece.file == lease.file_id
                    && piece.sequence == lease.sequence + u64::from(index)
                    && piece.offset + u64::from(piece.len) <= OFFSET_MAX =>
            {
                Ok(Some(piece))
            }
            Ok(_) => Err(Wrong(at)),
            // Not published yet: left over from an earlier lease, or half made.
            Err(_) => Ok(None),
        }
    }

    /// Whether the client has published anything in this lease.
    pub fn client_has_begun(&self, lease: &ClientLease) -> bool {
        lease.taken > 0 || !matches!(self.client_piece(lease, 0), Ok(None))
    }

    /// Lets the last piece not grow any more: what comes next begins a new one.
    pub fn freeze_client(
        &self,
        lease: &mut ClientLease,
        sink: &mut dyn FnMut(Taken),
    ) -> Result<(), Wrong> {
        self.take_client(lease, sink)?;
        while lease.open.is_some() {
            let frozen = lease.taken;
            let seal = self.client_seal(lease, frozen - 1);
            probe();
            seal.fetch_or(FROZEN, Ordering::SeqCst);
            self.take_client(lease, sink)?;
            if lease.taken == frozen {
                lease.open = None;
            }
        }
        Ok(())
    }

    /// Ends the lease: nothing is published any more when this returns, and all that was is taken in. After
    /// [`Wrong`] too, where what breaks the rules is made void.
    pub fn revoke_client(
        &self,
        lease: &mut ClientLease,
        sink: &mut dyn FnMut(Taken),
    ) -> Result<(), Wrong> {
        if lease.over {
            return Ok(());
        }
        self.stop_client(lease);
        let result = self.poison_client(lease, sink);
        if result.is_err() {
            // Nothing from the first bad record on may count after a crash either.
            for index in lease.taken..lease.count {
                self.client_seal(lease, index)
                    .store(poison(lease.lease.generation()), Ordering::Release);
            }
            if lease.taken > 0 {
                self.client_seal(lease, lease.taken - 1)
                    .fetch_or(FROZEN, Ordering::SeqCst);
            }
        }
        lease.open = None;
        lease.over = true;
        probe();
        self.tables
            .published(lease.slab())
            .store(lease.taken, Ordering::Release);
        result
    }

    fn poison_client(
        &self,
        lease: &mut ClientLease,
        sink: &mut dyn FnMut(Taken),
    ) -> Result<(), Wrong> {
        let generation = lease.lease.generation();
        // A client that keeps to the rules can be too early only once for each record.
        for _ in 0..=lease.count {
            self.freeze_client(lease, sink)?;
            if lease.taken == lease.count {
                return Ok(());
            }
            let seal = self.client_seal(lease, lease.taken);
            let found = seal.load(Ordering::Acquire);
            if self.client_piece(lease, lease.taken)?.is_some() {
                continue;
            }
            probe();
            let success = Ordering::SeqCst;
            let failure = Ordering::Relaxed;
            if seal
                .compare_exchange(found, poison(generation), success, failure)
                .is_ok()
            {
                return Ok(());
            }
        }
        Err(Wrong(lease.at(lease.taken)))
    }

    /// Keeps the client from beginning to store bytes, if it is not at it.
    fn stop_client(&self, lease: &mut ClientLease) {
        probe();
        lease.stopped = take_writer_word(&self.tables, lease.slab(), lease.lease.generation());
    }

    /// Gives a revoked lease back. The slab is freed when nothing of it is pending and the client is
    /// known not to touch it.
    pub fn end_client(&self, mut lease: ClientLease) {
        assert!(lease.over, "a lease is revoked before it ends");
        if !lease.stopped {
            self.stop_client(&mut lease);
        }
        if lease.stopped {
            return self.seal_slab(lease.lease);
        }
        let slab = lease.slab();
        probe();
        self.tables.set_state(slab, SlabState::Sealed);
        self.lingering.add(LingeringWriter {
            slab,
            generation: lease.lease.generation(),
            pid: lease.pid,
        });
    }

    /// Frees the slabs of ended leases whose clients have stopped or died; how many still wait for theirs.
    pub fn free_lingering_slabs(&self) -> usize {
        if self.lingering.count() == 0 {
            return 0;
        }
        for slab in self.lingering.take_gone(&self.tables) {
            self.end_lease(slab);
        }
        self.lingering.count()
    }

    fn client_seal(&self, lease: &ClientLease, index: u32) -> &AtomicU64 {
        self.tables.seal(lease.at(index))
    }

    // ---- words of files ----------------------------------------------------------------------

    /// Where word `index` lies, and what stands in it.
    pub fn file_word(&self, index: u32) -> (u64, u32) {
        let at = self.geometry().word_offset(index);
        (at, self.map.u32(at).load(Ordering::Acquire))
    }

    /// What was told of the files with this word does not hold any more. To be called before the bytes
    /// change or their room is used again.
    pub fn raise_file_word(&self, index: u32) {
        self.map
            .u32(self.geometry().word_offset(index))
            .fetch_add(1, Ordering::SeqCst);
        // Stores of new bytes must not be seen before the word.
        std::sync::atomic::fence(Ordering::SeqCst);
    }
}
