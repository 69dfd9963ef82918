//! The journal, a log of metadata records in a byte region: appends records, takes snapshots and replays.
//!
//! Terms
//! * A *record* is one change to names or ranges of files with bytes that are not in the backing directory yet. It
//!   *begins* something, such as a *file id* (the number of a file) or a rename, or *ends* it.
//! * The *medium* is the byte region that contains the journal. It has two *halves*. One half is active.
//! * A *frame* is one encoded record in a half. Records are appended to the active half.
//! * The *ledger* is the table, in memory, that results from all records.
//! * A *snapshot* writes the ledger as records to the other half and makes that half the active one. It makes room,
//!   because it leaves out the records that later records made void.
//! * The *generation* of a half numbers the snapshots. The valid header with the higher generation marks the active
//!   half.
//!
//! Invariants
//! * `snapshot_end <= end <= reserved[half] <= half_bytes`, so memory is allocated for all bytes in use.
//! * A replay of the bytes yields the same ledger and the same append position.

use firn_format::journal::{
    FRAME_HEADER_BYTES, HALF_HEADER_BYTES, decode_half_header, encode_frame, encode_half_header,
    frame_bytes, peek_frame,
};
use firn_format::record::Record;

use super::{Ledger, Medium};

/// The record does not fit, even after a snapshot. Something must be drained first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the journal is full")]
pub struct Full;

/// Damage that a replay found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// Neither half has a valid header.
    #[error("journal: neither half has a valid header")]
    NoHalf,
    /// The header of the active half is damaged. Its records were read nevertheless.
    #[error("journal half {half}: its header is damaged; its records were read nevertheless")]
    Header {
        /// 0 or 1.
        half: usize,
    },
    /// Bytes between two valid records could not be decoded.
    #[error(
        "journal half {half}, byte {offset}: {bytes} bytes are damaged; the records after them were read"
    )]
    Hole {
        /// 0 or 1.
        half: usize,
        /// Offset in the half.
        offset: usize,
        /// Number of bytes that were skipped.
        bytes: usize,
    },
    /// A frame is complete, but its content is invalid.
    #[error("journal half {half}, byte {offset}: {reason}")]
    Record {
        /// 0 or 1.
        half: usize,
        /// Offset in the half.
        offset: usize,
        /// What is invalid.
        reason: String,
    },
}

/// Result of a replay.
#[derive(Clone, Debug, Default)]
pub struct Replay {
    /// State after the last complete record.
    pub ledger: Ledger,
    /// Largest file id in any record.
    pub last_file: u64,
    /// Number of records.
    pub records: u64,
    /// Damage that was found.
    pub damage: Vec<Damage>,
    half: usize,
    generation: u64,
    end: usize,
    sequence: u64,
}

/// Number of bytes at the start of each half that are always allocated, and the least by which a half grows.
const STEP: usize = firn_format::geometry::JOURNAL_STEP as usize;
/// Alignment of frames in a half.
const FRAME_ALIGN: usize = 8;
/// Divisor: a half's memory divided by this is reserved for records that end something, such as a file id or a rename.
const END_RECORDS_SHARE: usize = 16;
/// Divisor: a snapshot that gains less than a half's memory divided by this is not taken for a record that begins
/// something. So there is not a snapshot for each record.
const GAIN_DIVISOR: usize = 64;

/// A journal that is open for appending.
///
/// Memory is allocated only for the reserved bytes of a half. Both halves grow together. Otherwise a snapshot would not
/// fit in the other half, and only a snapshot makes room. Memory far beyond the size of the last snapshot is freed.
pub struct Journal<M: Medium> {
    medium: M,
    ledger: Ledger,
    half: usize,
    generation: u64,
    /// Number of used bytes of the active half, including its header.
    end: usize,
    /// Value of `end` after the last snapshot.
    snapshot_end: usize,
    /// Size of the records that the next snapshot leaves out, because records since the last snapshot made them void.
    ended_bytes: usize,
    sequence: u64,
    /// Number of bytes at the start of each half that are allocated and may be written.
    reserved: [usize; 2],
    /// Number of bytes appended since the invariants were checked.
    unchecked_bytes: usize,
}

/// Whether a record begins something, such as a file id or a rename, or ends what an earlier record has begun.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RecordRole {
    Begin,
    /// The record may use the room that is reserved for such records.
    End,
}

/// The half of a journal that counts.
struct ActiveHalf {
    /// 0 or 1.
    half: usize,
    generation: u64,
    /// The used bytes of the half.
    bytes: Vec<u8>,
    /// Whether the half was recognized by its frames, because its header is damaged.
    is_header_damaged: bool,
}

/// A complete frame in a half.
struct FoundFrame<'a> {
    /// Offset in the half.
    offset: usize,
    sequence: u64,
    /// The encoded record.
    payload: &'a [u8],
}

/// Reads a journal without changing it, and returns the ledger, the state that results from its records.
///
/// The active half is the one with the largest generation in a valid header. Its frames, one encoded record each, are
/// read up to the first place after which no valid one follows. Bytes that are skipped, and contents that are not
/// valid, are reported as damage.
pub fn replay<M: Medium>(medium: &M) -> Replay {
    let Some(active) = find_active_half(medium) else {
        return Replay {
            damage: vec![Damage::NoHalf],
            end: HALF_HEADER_BYTES,
            ..Replay::default()
        };
    };
    let mut replay = Replay {
        half: active.half,
        generation: active.generation,
        end: HALF_HEADER_BYTES,
        ..Replay::default()
    };
    if active.is_header_damaged {
        replay.damage.push(Damage::Header { half: active.half });
    }
    while let Some(frame) = next_frame(
        &active.bytes,
        active.generation,
        replay.end,
        replay.sequence,
    ) {
        replay.apply(&frame);
    }
    replay
}

impl Replay {
    /// Applies the record of the next frame, one encoded record in the journal, to the ledger. Reports bytes that were
    /// skipped before it, and a record that cannot be decoded, as damage.
    fn apply(&mut self, frame: &FoundFrame<'_>) {
        if frame.offset > self.end {
            self.damage.push(Damage::Hole {
                half: self.half,
                offset: self.end,
                bytes: frame.offset - self.end,
            });
        }
        match Record::decode(frame.payload) {
            Ok(record) => {
                if let Record::FileIdBegin { file, .. } = record {
                    self.last_file = self.last_file.max(file);
                }
                self.ledger.apply(&record);
            }
            Err(error) => self.damage.push(Damage::Record {
                half: self.half,
                offset: frame.offset,
                reason: error.to_string(),
            }),
        }
        self.records += 1;
        self.end = frame.offset + frame_bytes(frame.payload.len());
        self.sequence = frame.sequence + 1;
    }
}

/// Finds the active half of a journal, the one to which records are appended, and reads it. Returns `None` if neither
/// half is valid.
///
/// Each half has a header with a generation, which each snapshot raises. The newer generation is active. If its header
/// is damaged, its records show the generation.
fn find_active_half<M: Medium>(medium: &M) -> Option<ActiveHalf> {
    let newest = find_newest_header(medium);
    // The half without the newest header may be the active one with a damaged header: then it has records of the next
    // generation.
    let (candidate_half, candidate_generation) = match newest {
        Some((half, generation)) => (1 - half, generation.saturating_add(1)),
        // Before the first snapshot only half 0 has a header, with generation 1.
        None => (0, 1),
    };
    let candidate_bytes = read_half(medium, candidate_half);
    let has_records =
        || next_frame(&candidate_bytes, candidate_generation, HALF_HEADER_BYTES, 0).is_some();
    if has_damaged_header(&candidate_bytes) && has_records() {
        return Some(ActiveHalf {
            half: candidate_half,
            generation: candidate_generation,
            bytes: candidate_bytes,
            is_header_damaged: true,
        });
    }
    let (half, generation) = newest?;
    Some(ActiveHalf {
        half,
        generation,
        bytes: read_half(medium, half),
        is_header_damaged: false,
    })
}

/// Returns whether the header of a half is damaged. A header with a magic of 0 is not: a crash interrupted the snapshot
/// to that half, and the other half is still the active one.
fn has_damaged_header(half_bytes: &[u8]) -> bool {
    const NO_MAGIC: [u8; 8] = [0; 8];
    decode_half_header(half_bytes).is_none() && half_bytes[..NO_MAGIC.len()] != NO_MAGIC
}

/// Returns the half whose valid header has the largest generation, and that generation.
fn find_newest_header<M: Medium>(medium: &M) -> Option<(usize, u64)> {
    let half_bytes = medium.len() / 2;
    let mut newest: Option<(usize, u64)> = None;
    for half in 0..2 {
        let mut header = [0u8; HALF_HEADER_BYTES];
        medium.read(half * half_bytes, &mut header);
        if let Some(generation) = decode_half_header(&header)
            && newest.is_none_or(|(_, newest_generation)| generation > newest_generation)
        {
            newest = Some((half, generation));
        }
    }
    newest
}

/// Reads the used bytes of a half, at least those of its header.
fn read_half<M: Medium>(medium: &M, half: usize) -> Vec<u8> {
    let half_bytes = medium.len() / 2;
    let start = half * half_bytes;
    let used_bytes = medium.data_len(start, half_bytes);
    let mut bytes = vec![0u8; used_bytes.max(HALF_HEADER_BYTES.min(half_bytes))];
    medium.read(start, &mut bytes);
    bytes
}

/// Returns the next complete frame, one encoded record, at or after the offset `from` of a half of the journal. Returns
/// `None` if none follows.
///
/// The frame's sequence number must be at least `sequence_min`. The generation and the checksum in a frame tell it from
/// old or damaged bytes. So the search skips damage in the middle, and finds nothing after a frame that was torn at the
/// end.
fn next_frame(
    bytes: &[u8],
    generation: u64,
    from: usize,
    sequence_min: u64,
) -> Option<FoundFrame<'_>> {
    // Frames are numbered from 0 and each takes more than one byte, so every number is below this.
    let sequence_limit = bytes.len() as u64;
    let mut offset = from;
    while offset + FRAME_HEADER_BYTES < bytes.len() {
        if let Some((sequence, payload)) = peek_frame(generation, &bytes[offset..])
            && (sequence_min..sequence_limit).contains(&sequence)
        {
            return Some(FoundFrame {
                offset,
                sequence,
                payload,
            });
        }
        offset += FRAME_ALIGN;
    }
    None
}

impl<M: Medium> Journal<M> {
    /// Makes an empty journal in a new region. The first half is active, with the generation 1; the other half has no
    /// valid header.
    pub fn create(mut medium: M) -> Self {
        let half_bytes = medium.len() / 2;
        // A crash between the two writes leaves no valid header, and so no journal.
        medium.write(half_bytes, &[0; HALF_HEADER_BYTES]);
        medium.write(0, &encode_half_header(1));
        Self {
            medium,
            ledger: Ledger::default(),
            half: 0,
            generation: 1,
            end: HALF_HEADER_BYTES,
            snapshot_end: HALF_HEADER_BYTES,
            ended_bytes: 0,
            sequence: 0,
            reserved: [STEP.min(half_bytes); 2],
            unchecked_bytes: 0,
        }
    }

    /// Replays a journal and opens it for appending. Returns the journal, and the replay with the damage that it found.
    ///
    /// Takes a snapshot at once: the state is written to the other half, without a torn tail and damaged records.
    pub fn open(medium: M) -> (Self, Replay) {
        let replayed = replay(&medium);
        let half_bytes = medium.len() / 2;
        let mut journal = Self {
            medium,
            ledger: replayed.ledger.clone(),
            half: replayed.half,
            generation: replayed.generation,
            end: replayed.end,
            snapshot_end: HALF_HEADER_BYTES,
            ended_bytes: 0,
            sequence: replayed.sequence,
            reserved: [STEP.min(half_bytes); 2],
            unchecked_bytes: 0,
        };
        // The active half has memory at least up to its end, because its records were stored there.
        journal.reserved[journal.half] = replayed.end.max(STEP.min(half_bytes));
        // A damaged header is repaired before the other half is cleared, because the other half may have the only valid
        // header.
        let is_header_damaged = replayed
            .damage
            .iter()
            .any(|damage| matches!(damage, Damage::Header { .. }));
        if is_header_damaged {
            journal.write_header();
        }
        journal.clear_unused_bytes();
        // If the snapshot does not fit, the active half stays in use: it is valid up to `end`.
        let _ = journal.snapshot();
        (journal, replayed)
    }

    /// Clears the other half, and frees the memory of the active half beyond its end.
    ///
    /// Frames of the other half that were skipped as damaged would otherwise be valid after those of a snapshot with
    /// the same generation.
    fn clear_unused_bytes(&mut self) {
        let half_bytes = self.half_bytes();
        let other_start = (1 - self.half) * half_bytes;
        let cleared_bytes = STEP.min(half_bytes);
        self.medium.write(other_start, &vec![0; cleared_bytes]);
        self.medium
            .release(other_start + cleared_bytes, half_bytes - cleared_bytes);
        let unused_from = self.end.next_multiple_of(STEP);
        if unused_from < half_bytes {
            let active_start = self.half * half_bytes;
            self.medium
                .release(active_start + unused_from, half_bytes - unused_from);
        }
    }

    /// Returns the ledger.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Returns the byte region.
    pub fn into_medium(self) -> M {
        self.medium
    }

    /// Returns how many bytes of a half a snapshot would leave free now.
    pub fn free_bytes(&self) -> usize {
        let mut snapshot_bytes = 0;
        self.ledger
            .for_each_record(|record| snapshot_bytes += frame_bytes(record.encode().len()));
        (self.half_bytes() - HALF_HEADER_BYTES).saturating_sub(snapshot_bytes)
    }

    /// Appends and applies a record that begins something. Leaves room for records that end what has begun.
    pub fn append(&mut self, record: &Record) -> Result<(), Full> {
        self.append_as(record, RecordRole::Begin)
    }

    /// Appends and applies a record that ends something. It may use the room that is reserved for such records.
    pub fn append_end(&mut self, record: &Record) -> Result<(), Full> {
        self.append_as(record, RecordRole::End)
    }

    /// Appends and applies a record. Fails, and leaves the ledger as it is, if there is no room for a record of this
    /// role.
    fn append_as(&mut self, record: &Record, role: RecordRole) -> Result<(), Full> {
        let payload = record.encode();
        self.make_room(frame_bytes(payload.len()), role)?;
        let mut frame = Vec::with_capacity(frame_bytes(payload.len()));
        encode_frame(self.generation, self.sequence, &payload, &mut frame);
        self.medium
            .write(self.half * self.half_bytes() + self.end, &frame);
        self.end += frame.len();
        self.sequence += 1;
        self.ended_bytes += self.ledger.snapshot_bytes_saved_by(record);
        self.ledger.apply(record);
        self.check_sometimes(frame.len());
        Ok(())
    }

    /// Checks the invariants after an append, in debug builds. A replay reads the whole journal, so it is made only
    /// after as many bytes were appended as the journal has.
    fn check_sometimes(&mut self, appended_bytes: usize) {
        if !cfg!(debug_assertions) {
            return;
        }
        let reserved_bytes = self.reserved[self.half];
        assert!(self.snapshot_end <= self.end);
        assert!(self.end <= reserved_bytes && reserved_bytes <= self.half_bytes());
        self.unchecked_bytes += appended_bytes;
        if self.unchecked_bytes >= self.end {
            self.unchecked_bytes = 0;
            self.assert_replay();
        }
    }

    /// Asserts that a replay of the bytes finds no damage and yields the present state: the ledger and the position of
    /// the next append.
    fn assert_replay(&self) {
        let replayed = replay(&self.medium);
        assert_eq!(
            replayed.damage,
            [],
            "a replay of an intact journal finds no damage"
        );
        let present = (self.half, self.generation, self.end, self.sequence);
        let after_replay = (
            replayed.half,
            replayed.generation,
            replayed.end,
            replayed.sequence,
        );
        assert_eq!(
            present, after_replay,
            "half, generation, end and sequence are those of a replay"
        );
        assert!(
            replayed.ledger == self.ledger,
            "the ledger is that of a replay"
        );
    }

    /// Returns whether `new_bytes` more bytes fit into the active half.
    ///
    /// A record that ends something may fill the half. A record that begins something leaves a share of the half for
    /// records that end something, and must also leave the other half large enough for a snapshot.
    fn fits(&self, new_bytes: usize, role: RecordRole) -> bool {
        let active_bytes = self.reserved[self.half];
        let other_bytes = self.reserved[1 - self.half];
        let limit = match role {
            RecordRole::End => active_bytes,
            RecordRole::Begin => {
                active_bytes.min(other_bytes) / END_RECORDS_SHARE * (END_RECORDS_SHARE - 1)
            }
        };
        self.end + new_bytes <= limit
    }

    /// Makes room for `new_bytes` more bytes in the active half of the journal: by a snapshot, or by more memory for
    /// both halves. Fails if neither is possible; then the caller must drain files first.
    ///
    /// A snapshot writes only the records that still matter to the other half, and makes that half the active one:
    /// * before the halves grow, if it frees half of the used bytes;
    /// * when the halves cannot grow, if it frees a minimum share of them;
    /// * for a record that ends what an earlier one has begun, even if it frees less than that.
    fn make_room(&mut self, new_bytes: usize, role: RecordRole) -> Result<(), Full> {
        if self.fits(new_bytes, role) {
            return Ok(());
        }
        let gained_bytes = self.gained_bytes();
        let gain_min = self.reserved[self.half] / GAIN_DIVISOR;
        let may_take_snapshot = role == RecordRole::End || gained_bytes >= gain_min;
        // A snapshot writes the whole ledger, so growth is preferred to one that gains little.
        let prefers_snapshot = gained_bytes >= self.end / 2;
        if prefers_snapshot {
            // A snapshot that fails changes nothing. Then the loop below tries to grow.
            let _ = self.snapshot();
        }
        while !self.fits(new_bytes, role) {
            if self.grow() {
                continue;
            }
            if !may_take_snapshot || self.gained_bytes() == 0 {
                return Err(Full);
            }
            self.snapshot()?;
        }
        Ok(())
    }

    /// Grows both halves by half of their memory, or by one step if there is less. Returns false if there is no memory,
    /// or if both have their full size.
    fn grow(&mut self) -> bool {
        let reserved = self.reserved[0].min(self.reserved[1]);
        if reserved >= self.half_bytes() {
            return false;
        }
        let large_size = reserved + (reserved / 2).max(STEP);
        let small_size = reserved + STEP;
        self.reserve_both(large_size) || self.reserve_both(small_size)
    }

    /// Allocates memory for the first `bytes` of both halves. Returns false if there is none.
    fn reserve_both(&mut self, bytes: usize) -> bool {
        // The other half first, because a snapshot of the active half must fit into it.
        self.reserve(1 - self.half, bytes) && self.reserve(self.half, bytes)
    }

    /// Allocates memory for the first `bytes` of a half, or for all of it. Returns false if there is none.
    fn reserve(&mut self, half: usize, bytes: usize) -> bool {
        let start = half * self.half_bytes();
        let reserved = self.reserved[half];
        let requested = bytes.next_multiple_of(STEP).min(self.half_bytes());
        if requested <= reserved {
            return true;
        }
        if !self.medium.reserve(start + reserved, requested - reserved) {
            return false;
        }
        self.reserved[half] = requested;
        true
    }

    /// Frees the memory of both halves beyond the first `bytes`.
    fn shrink(&mut self, bytes: usize) {
        let kept_bytes = bytes.next_multiple_of(STEP);
        for half in 0..2 {
            let start = half * self.half_bytes();
            let reserved = self.reserved[half];
            if kept_bytes < reserved {
                self.medium
                    .release(start + kept_bytes, reserved - kept_bytes);
                self.reserved[half] = kept_bytes;
            }
        }
    }

    /// Returns an upper bound of the bytes that a snapshot would gain.
    fn gained_bytes(&self) -> usize {
        self.ended_bytes + (self.end - self.snapshot_end)
    }

    fn half_bytes(&self) -> usize {
        self.medium.len() / 2
    }

    /// Writes the ledger, the state that results from all records, to the other half and makes that half the active
    /// one. The header comes last: until then the old half is the journal. Fails, and leaves the old half active, if
    /// the ledger does not fit.
    fn snapshot(&mut self) -> Result<(), Full> {
        // Only a forged header has the largest generation. No generation follows it, so the active half stays in use.
        let generation = self.generation.checked_add(1).ok_or(Full)?;
        let other_half = 1 - self.half;
        let mut frames = Vec::new();
        let mut sequence = 0;
        self.ledger.for_each_record(|record| {
            encode_frame(generation, sequence, &record.encode(), &mut frames);
            sequence += 1;
        });
        let half_bytes = self.half_bytes();
        let used_bytes = HALF_HEADER_BYTES + frames.len();
        if used_bytes > half_bytes || !self.reserve(other_half, used_bytes) {
            return Err(Full);
        }
        let start = other_half * half_bytes;
        // An old header must not make the new frames count before all of them are there.
        self.medium.write(start, &[0; HALF_HEADER_BYTES]);
        self.medium.write(start + HALF_HEADER_BYTES, &frames);
        self.half = other_half;
        self.generation = generation;
        self.end = used_bytes;
        self.sequence = sequence;
        self.snapshot_end = used_bytes;
        self.ended_bytes = 0;
        // The old half retains its header. If the new header is damaged, a replay derives from the old one which
        // generation to search for.
        self.write_header();
        // Memory is freed only if at least half of it goes, so that growth does not take it back at once.
        let kept_bytes = used_bytes + used_bytes / 2 + STEP;
        if self
            .reserved
            .iter()
            .all(|&reserved| reserved >= 2 * kept_bytes)
        {
            self.shrink(kept_bytes);
        }
        Ok(())
    }

    /// Writes the header of the active half, with its magic last.
    fn write_header(&mut self) {
        const MAGIC_BYTES: usize = 8;
        let start = self.half * self.half_bytes();
        let header = encode_half_header(self.generation);
        self.medium
            .write(start + MAGIC_BYTES, &header[MAGIC_BYTES..]);
        self.medium.write(start, &header[..MAGIC_BYTES]);
    }
}
