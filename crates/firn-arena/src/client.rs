//! Leases of client processes: with a lease, a client writes to the arena itself, without a request to firnd.
//!
//! The *arena* is shared memory with the bytes that are not in the backing directory yet. *firnd* is the process that
//! serves the mount. A client stores bytes into its leased slab and publishes piece records for them. firnd reads the
//! records and accepts those that obey the rules of the lease. Only firnd ends a lease.
//!
//! Terms
//! * A *slab* is a part of the arena's memory that one writer fills. A *piece* is a range of a file's bytes in it.
//! * The *seal* is the last word of a piece record. The record is published once its seal matches the lease.
//! * A *frozen* record cannot grow; a *poisoned* one can never be published in this lease.
//! * The *writer word* of a slab says whether its client is idle, is storing bytes, or may store none any more.
//!
//! Promises
//! * firnd accepts every record that a client published before the end of its lease, and none after it.
//! * A slab is not used again while a client may still store bytes into it. This also holds if the client is stopped
//!   (SIGSTOP) in the middle of a copy, or outlives the firnd that granted the lease.
//! * firnd checks each record against the lease before it uses the record. A client can damage only its own bytes.
//!
//! Relies on: clients publish the records of a slab in order, as firn-direct's `slab_writer` does and explains.
//! docs/FORMAT.md says what a crash leaves.

use std::sync::atomic::{AtomicU64, Ordering};

use firn_format::data_socket::{OFFSET_MAX, Slab};
use firn_format::piece::{CheckedPiece, FROZEN, Piece, poison_seal};
use firn_format::slab::{Class, SlabState, writer_idle};
use firn_format::superblock::state_word;

use crate::arena::Arena;
use crate::lease::Lease;
use crate::lingering::{LingeringWriter, try_clear_writer_word, try_poison};
use crate::map::crash_point;
use crate::refs::{PieceRef, SlabRef};

/// A client's right to fill a slab. It ends with [`Arena::end_client`]: if it is dropped, its slab remains in use for
/// ever.
#[derive(Debug)]
#[must_use = "a lease that is dropped keeps its slab for ever"]
pub struct ClientLease {
    slab_lease: Lease,
    file_id: u64,
    pid: u32,
    /// Sequence number of the first record; each further record has the next number.
    first_sequence: u64,
    /// Index of the first record in the chunk's piece table.
    first_record: u32,
    /// How many records the client may publish.
    record_count: u32,
    /// How many records were accepted.
    accepted_count: u32,
    /// The last accepted record while the client may still extend it. `None` before the first record, and after a
    /// freeze.
    open_record: Option<Piece>,
    /// Where the bytes of the last accepted record end, in bytes from the start of the chunk.
    accepted_end: u32,
    /// Whether the client can no longer begin to store bytes, and is not storing any.
    is_stopped: bool,
    /// Whether the lease was revoked.
    is_revoked: bool,
}

/// Bytes that a client published and that firnd accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceptedBytes {
    /// The record of the piece that contains them.
    pub piece: PieceRef,
    /// Offset of the bytes in the file.
    pub offset: u64,
    /// Offset of the bytes in the chunk.
    pub position: u32,
    /// Length in bytes.
    pub len: u32,
    /// Sequence number of the piece.
    pub sequence: u64,
    /// Time of the write according to the client, in nanoseconds since 1970. firnd has not checked it: the caller
    /// limits it.
    pub modified: u64,
}

/// The record breaks the rules of its client's lease. Records that the client published before it remain accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("record {} of chunk {}, which a program with direct access wrote, is not valid", .0.record, .0.slab.chunk)]
pub struct InvalidRecord(pub PieceRef);

impl ClientLease {
    /// Returns the process that has the lease.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns the leased slab.
    pub fn slab(&self) -> SlabRef {
        self.slab_lease.slab()
    }

    /// Returns whether the lease was revoked.
    pub fn is_over(&self) -> bool {
        self.is_revoked
    }

    fn record_ref(&self, index: u32) -> PieceRef {
        PieceRef {
            slab: self.slab_lease.slab(),
            record: self.first_record + index,
        }
    }
}

impl Arena {
    /// Leases a slab (a part of shared memory) near `cpu` to process `pid`, which then writes the file `file_id` into
    /// it without requests to firnd. The slab is of `class`, or of a smaller class if no slab of `class` is free.
    /// `None` means that no slab is free.
    ///
    /// Each record of the slab gets its sequence number now, so the client needs no number from firnd.
    pub fn lease_client(
        &self,
        class: Class,
        file_id: u64,
        pid: u32,
        cpu: Option<u32>,
    ) -> Option<ClientLease> {
        let slab_lease = self.lease_slab_near(class, cpu)?;
        let slab = slab_lease.slab();
        let records = self.tables.records_of(slab_lease.class(), slab.slab);
        let record_count = records.len() as u32;
        let first_sequence = self
            .map
            .u64(state_word::SEQUENCE)
            .fetch_add(record_count.into(), Ordering::AcqRel)
            + 1;
        crash_point();
        // The process is stored before the writer word: if firnd dies, the next firnd finds a writer word, and looks
        // whether this process is alive.
        self.tables.client_pid(slab).store(pid, Ordering::Relaxed);
        self.tables
            .writer(slab)
            .store(writer_idle(slab_lease.generation()), Ordering::Release);
        Some(ClientLease {
            accepted_end: slab_lease.start(),
            slab_lease,
            file_id,
            pid,
            first_sequence,
            first_record: records.start,
            record_count,
            accepted_count: 0,
            open_record: None,
            is_stopped: false,
            is_revoked: false,
        })
    }

    /// Describes the lease to the client, the process that fills the slab: where the bytes, the records and the writer
    /// word are. `modified` is the time of the file's last write.
    ///
    /// `chunk`, `records` and `writer` of the result are offsets in the arena's file. `start` and `end` are offsets in
    /// the chunk.
    pub fn client_slab(&self, lease: &ClientLease, modified: u64) -> Slab {
        let slab = lease.slab();
        Slab {
            chunk: self.data_offset(slab.chunk),
            records: self
                .geometry()
                .record_offset(slab.chunk, lease.first_record),
            writer: self.tables.writer_offset(slab),
            generation: lease.slab_lease.generation(),
            sequence: lease.first_sequence,
            start: lease.slab_lease.start(),
            end: lease.slab_lease.end(),
            record_count: lease.record_count,
            reserved: 0,
            modified,
        }
    }

    /// Accepts the records that a client process has published since the last call. A record describes a range of a
    /// file that the client has stored in shared memory. Passes the bytes to `sink`, and counts them as live: not in
    /// the backing yet.
    ///
    /// Fails at the first record that breaks the rules of the lease; `sink` got all that precedes it. Does nothing for
    /// a revoked lease.
    pub fn accept_published(
        &self,
        lease: &mut ClientLease,
        sink: &mut dyn FnMut(AcceptedBytes),
    ) -> Result<(), InvalidRecord> {
        while !lease.is_revoked {
            // The next record is read before the length of the last one. A client publishes a record only after the
            // record before it has its final length. So if the next record is there, the length that is read after it
            // is final.
            let next_piece = self.read_client_piece(lease, lease.accepted_count)?;
            self.accept_extension(lease, sink)?;
            let Some(piece) = next_piece else { break };
            let record_ref = lease.record_ref(lease.accepted_count);
            // Records must not share bytes: each begins at or after the end of the one before it.
            if piece.position < lease.accepted_end {
                return Err(InvalidRecord(record_ref));
            }
            lease.accepted_count += 1;
            lease.accepted_end = piece.position + piece.len;
            lease.open_record = Some(piece);
            let known_len = 0;
            self.count_and_pass_on(lease, piece, known_len, sink);
        }
        Ok(())
    }

    /// Accepts the bytes by which the client extended the last accepted record, and passes them to `sink`. Does nothing
    /// if the client can no longer extend that record. Fails if anything but the length changed, or if the length
    /// shrank.
    fn accept_extension(
        &self,
        lease: &mut ClientLease,
        sink: &mut dyn FnMut(AcceptedBytes),
    ) -> Result<(), InvalidRecord> {
        let Some(accepted_piece) = lease.open_record else {
            return Ok(());
        };
        let last_index = lease.accepted_count - 1;
        let invalid_record = InvalidRecord(lease.record_ref(last_index));
        let Some(current_piece) = self.read_client_piece(lease, last_index)? else {
            return Err(invalid_record);
        };
        let with_accepted_len = Piece {
            len: accepted_piece.len,
            ..current_piece
        };
        if with_accepted_len != accepted_piece || current_piece.len < accepted_piece.len {
            return Err(invalid_record);
        }
        if current_piece.len > accepted_piece.len {
            lease.open_record = Some(current_piece);
            lease.accepted_end = current_piece.position + current_piece.len;
            self.count_and_pass_on(lease, current_piece, accepted_piece.len, sink);
        }
        Ok(())
    }

    /// Counts the new bytes of the last accepted record as live (not in the backing yet), and passes them to `sink`.
    /// `piece` is that record; its first `known_len` bytes were counted before.
    fn count_and_pass_on(
        &self,
        lease: &ClientLease,
        piece: Piece,
        known_len: u32,
        sink: &mut dyn FnMut(AcceptedBytes),
    ) {
        let len = piece.len - known_len;
        self.uses.add(lease.slab(), len.into());
        let record_ref = lease.record_ref(lease.accepted_count - 1);
        // The offset counts from the start of the file, the position from the start of the chunk.
        sink(AcceptedBytes {
            piece: record_ref,
            offset: piece.offset + u64::from(known_len),
            position: piece.position + known_len,
            len,
            sequence: piece.sequence,
            // The client stores this time before it stores the seal. A newer time belongs to a write under way.
            modified: self.modified(record_ref),
        });
    }

    /// Returns the piece of record `index` of the lease: which range of the file the client stored where. Returns
    /// `None` if it is not published, or the lease has no such record. Fails if it breaks the rules of the lease.
    fn read_client_piece(
        &self,
        lease: &ClientLease,
        index: u32,
    ) -> Result<Option<Piece>, InvalidRecord> {
        if index >= lease.record_count {
            return Ok(None);
        }
        let record_ref = lease.record_ref(index);
        let Ok(checked) = self.tables.load(record_ref).check(
            lease.slab_lease.generation(),
            lease.slab_lease.start().into(),
            lease.slab_lease.end().into(),
        ) else {
            // Not published: its words are of an earlier lease, or the client has stored only some of them.
            return Ok(None);
        };
        // A client may not publish a record without bytes.
        let CheckedPiece::Live(piece) = checked else {
            return Err(InvalidRecord(record_ref));
        };
        let obeys_lease = piece.file == lease.file_id
            && piece.sequence == lease.first_sequence + u64::from(index)
            && piece.offset + u64::from(piece.len) <= OFFSET_MAX;
        if !obeys_lease {
            return Err(InvalidRecord(record_ref));
        }
        Ok(Some(piece))
    }

    /// Returns whether the client has published anything in this lease.
    pub fn client_has_begun(&self, lease: &ClientLease) -> bool {
        lease.accepted_count > 0 || !matches!(self.read_client_piece(lease, 0), Ok(None))
    }

    /// Freezes the client's last record: it cannot grow any more, so the client's next bytes begin a new record.
    /// Accepts all records published before, and passes their bytes to `sink`. Fails if a record breaks the rules of
    /// the lease.
    ///
    /// The client publishes at the same time, so a record may follow between the accept and the freeze. Then that
    /// record is frozen in turn. The loop ends at the latest when all records of the lease are used.
    pub fn freeze_client(
        &self,
        lease: &mut ClientLease,
        sink: &mut dyn FnMut(AcceptedBytes),
    ) -> Result<(), InvalidRecord> {
        self.accept_published(lease, sink)?;
        while lease.open_record.is_some() {
            let count_before = lease.accepted_count;
            let last_index = count_before - 1;
            crash_point();
            // The client extends a record by a compare-and-swap of the same word, which fails once the flag is set.
            self.record_seal(lease, last_index)
                .fetch_or(FROZEN, Ordering::SeqCst);
            self.accept_published(lease, sink)?;
            // No new record came, so the frozen record is the last one.
            if lease.accepted_count == count_before {
                lease.open_record = None;
            }
        }
        Ok(())
    }

    /// Ends the lease of a client, the process that fills a slab: when this returns, the client can publish nothing
    /// more, and `sink` got all that it published. Does nothing for a lease that was revoked.
    ///
    /// If this fails with [`InvalidRecord`], the lease is ended as well. The record that breaks the rules and all later
    /// ones are void.
    pub fn revoke_client(
        &self,
        lease: &mut ClientLease,
        sink: &mut dyn FnMut(AcceptedBytes),
    ) -> Result<(), InvalidRecord> {
        if lease.is_revoked {
            return Ok(());
        }
        // From here on the client begins no copy. A copy under way may go on, even after the end of the lease.
        self.stop_client(lease);
        // A poisoned record can never be published, nor can any record after it.
        let result = self.poison_next_record(lease, sink);
        if result.is_err() {
            self.void_unaccepted_records(lease);
        }
        lease.open_record = None;
        lease.is_revoked = true;
        crash_point();
        self.tables
            .published(lease.slab())
            .store(lease.accepted_count, Ordering::Release);
        result
    }

    /// Poisons all records after the accepted ones, and freezes the last accepted one. A later attach reads the records
    /// again, and must not accept the invalid record or any after it.
    fn void_unaccepted_records(&self, lease: &ClientLease) {
        let poison = poison_seal(lease.slab_lease.generation());
        for index in lease.accepted_count..lease.record_count {
            self.record_seal(lease, index)
                .store(poison, Ordering::Release);
        }
        if lease.accepted_count > 0 {
            self.record_seal(lease, lease.accepted_count - 1)
                .fetch_or(FROZEN, Ordering::SeqCst);
        }
    }

    /// Poisons the first record that is not published: stores a seal in it after which the client can publish nothing
    /// more in this lease. The client may publish that record first: then it is accepted, and the next one is tried.
    ///
    /// Fails if the client breaks the rules of its lease: by an invalid record, or by more changes than it has records.
    fn poison_next_record(
        &self,
        lease: &mut ClientLease,
        sink: &mut dyn FnMut(AcceptedBytes),
    ) -> Result<(), InvalidRecord> {
        let generation = lease.slab_lease.generation();
        // A client that obeys the rules can be faster at most once for each record. One that is faster more often
        // breaks them.
        for _ in 0..=lease.record_count {
            self.freeze_client(lease, sink)?;
            if lease.accepted_count == lease.record_count {
                return Ok(());
            }
            let seal = self.record_seal(lease, lease.accepted_count);
            let seal_before = seal.load(Ordering::Acquire);
            // The client published this record since the last accept. The next round accepts it.
            if self
                .read_client_piece(lease, lease.accepted_count)?
                .is_some()
            {
                continue;
            }
            crash_point();
            if try_poison(seal, seal_before, generation) {
                return Ok(());
            }
        }
        Err(InvalidRecord(lease.record_ref(lease.accepted_count)))
    }

    /// Revokes the client's right to begin to store bytes. `is_stopped` remains false if the client is storing bytes
    /// now.
    fn stop_client(&self, lease: &mut ClientLease) {
        crash_point();
        lease.is_stopped =
            try_clear_writer_word(&self.tables, lease.slab(), lease.slab_lease.generation());
    }

    /// Returns a revoked lease to the arena ([`Arena::revoke_client`] comes first). The slab is freed when nothing in
    /// it is pending and the client can no longer store bytes into it. Until then a client in the middle of a copy is
    /// listed as lingering.
    pub fn end_client(&self, mut lease: ClientLease) {
        assert!(lease.is_revoked, "a lease is revoked before it ends");
        // The client was in the middle of a copy when the lease was revoked. It may have finished since.
        if !lease.is_stopped {
            self.stop_client(&mut lease);
        }
        if lease.is_stopped {
            return self.seal_slab(lease.slab_lease);
        }
        let slab = lease.slab();
        crash_point();
        self.tables.set_state(slab, SlabState::Sealed);
        self.lingering.add(LingeringWriter {
            slab,
            generation: lease.slab_lease.generation(),
            pid: lease.pid,
        });
    }

    /// Frees the slabs of ended leases whose clients have stopped or died. Returns how many slabs still wait.
    pub fn free_lingering_slabs(&self) -> usize {
        if self.lingering.count() == 0 {
            return 0;
        }
        for slab in self.lingering.take_finished(&self.tables) {
            self.end_lease(slab);
        }
        self.lingering.count()
    }

    fn record_seal(&self, lease: &ClientLease, index: u32) -> &AtomicU64 {
        self.tables.seal(lease.record_ref(index))
    }

    // ---- words of files ----------------------------------------------------------------------

    /// Returns the offset of word `index` in the arena's file, and its value.
    pub fn file_word(&self, index: u32) -> (u64, u32) {
        let offset = self.geometry().word_offset(index);
        (offset, self.map.u32(offset).load(Ordering::Acquire))
    }

    /// Raises a file word, so that direct readers discard the chunk lists of the word's files. The caller must do this
    /// before the bytes change and before their memory is used again.
    pub fn raise_file_word(&self, index: u32) {
        let word = self.map.u32(self.geometry().word_offset(index));
        word.fetch_add(1, Ordering::SeqCst);
        // A reader must not see new bytes before it sees the raised word.
        std::sync::atomic::fence(Ordering::SeqCst);
    }
}
