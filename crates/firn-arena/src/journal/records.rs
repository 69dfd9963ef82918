//! The journal itself: append, snapshot, replay.
//!
//! Invariants
//! * `snapshot_end <= end <= reserved[half] <= half_bytes`: what is in use has memory.
//! * A replay of the bytes gives the ledger, and where the next record goes.

use firn_format::journal::{
    FRAME_HEADER_BYTES, HALF_HEADER_BYTES, decode_half_header, encode_frame, encode_half_header,
    frame_bytes, peek_frame,
};
use firn_format::record::Record;

use super::{Ledger, Medium};

/// The record does not fit, even after a snapshot: something must be drained first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the journal is full")]
pub struct Full;

/// What a replay could not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// Neither half has a valid header.
    #[error("journal: neither half has a valid header")]
    NoHalf,
    /// The header of the half in use is damaged; its records were read all the same.
    #[error("journal half {half}: its header is damaged; its records were read all the same")]
    Header {
        /// 0 or 1.
        half: usize,
    },
    /// Bytes that are no record although records follow them.
    #[error("journal half {half}, byte {at}: {bytes} bytes are damaged, records follow")]
    Hole {
        /// 0 or 1.
        half: usize,
        /// From the start of the half.
        at: usize,
        /// How many were passed over.
        bytes: usize,
    },
    /// A frame is whole and its payload makes no sense.
    #[error("journal half {half}, byte {at}: {why}")]
    Record {
        /// 0 or 1.
        half: usize,
        /// From the start of the half.
        at: usize,
        /// What is wrong.
        why: String,
    },
}

/// What a replay found.
#[derive(Clone, Debug, Default)]
pub struct Replay {
    /// The state after the last whole record.
    pub ledger: Ledger,
    /// Largest file id ever named.
    pub last_file: u64,
    /// Records read.
    pub records: u64,
    /// What could not be read.
    pub damage: Vec<Damage>,
    half: usize,
    generation: u64,
    end: usize,
    sequence: u64,
}

/// Bytes at the start of each half that always have memory; what a half grows by at least.
const STEP: usize = firn_format::geometry::JOURNAL_STEP as usize;

/// A journal open for appending.
///
/// A half has memory for the bytes that were reserved of it. Both grow together, or a snapshot, which is all
/// that makes room, would not fit; and what is far more than a snapshot took goes back.
pub struct Journal<M: Medium> {
    medium: M,
    ledger: Ledger,
    half: usize,
    generation: u64,
    /// Bytes used of the active half, its header included.
    end: usize,
    /// What `end` was after the last snapshot.
    snapshot_end: usize,
    /// Bytes of records that have ended since: the next snapshot does without them.
    ended_bytes: usize,
    sequence: u64,
    /// Bytes from the start of each half that may be written.
    reserved: [usize; 2],
    /// Bytes appended since the invariants were asserted.
    unchecked: usize,
}

/// Reads a journal without changing it.
pub fn replay<M: Medium>(medium: &M) -> Replay {
    let half_bytes = medium.len() / 2;
    let mut header = [0u8; HALF_HEADER_BYTES];
    let mut best: Option<(usize, u64)> = None;
    for half in 0..2 {
        medium.read(half * half_bytes, &mut header);
        if let Some(generation) = decode_half_header(&header)
            && best.is_none_or(|(_, g)| generation > g)
        {
            best = Some((half, generation));
        }
    }
    // Before the first snapshot only half 0 has a header, and its generation is 1.
    let (half, generation) = best.unwrap_or((1, 0));
    let read = |half: usize| {
        let used = medium
            .used(half * half_bytes, half_bytes)
            .max(HALF_HEADER_BYTES.min(half_bytes));
        let mut bytes = vec![0u8; used];
        medium.read(half * half_bytes, &mut bytes);
        bytes
    };
    let other = 1 - half;
    let mut bytes = read(other);
    let mut out = Replay {
        half,
        generation,
        end: HALF_HEADER_BYTES,
        ..Replay::default()
    };
    // A half without a good header that holds the next generation was the active one, and its header
    // is damaged: the half with the good header is older. While a snapshot is written the magic is 0.
    let damaged = decode_half_header(&bytes).is_none() && bytes[..8] != [0; 8];
    let next = generation.saturating_add(1);
    if damaged && next_frame(&bytes, next, HALF_HEADER_BYTES, 0).is_some() {
        out.damage.push(Damage::Header { half: other });
        (out.half, out.generation) = (other, next);
    } else if best.is_none() {
        return Replay {
            damage: vec![Damage::NoHalf],
            end: HALF_HEADER_BYTES,
            ..Replay::default()
        };
    } else {
        bytes = read(half);
    }
    let half = out.half;
    let generation = out.generation;
    while let Some((at, sequence, payload)) = next_frame(&bytes, generation, out.end, out.sequence)
    {
        if at > out.end {
            out.damage.push(Damage::Hole {
                half,
                at: out.end,
                bytes: at - out.end,
            });
        }
        match Record::decode(payload) {
            Ok(record) => {
                if let Record::FileIdBegin { file, .. } = record {
                    out.last_file = out.last_file.max(file);
                }
                out.ledger.apply(&record);
            }
            Err(error) => out.damage.push(Damage::Record {
                half,
                at,
                why: error.to_string(),
            }),
        }
        out.records += 1;
        out.end = at + frame_bytes(payload.len());
        out.sequence = sequence + 1;
    }
    out
}

/// The next whole frame at or after `from` whose sequence is not before `sequence` and is one that a
/// half can hold. A torn tail has none after it; damage in the middle has.
fn next_frame(
    bytes: &[u8],
    generation: u64,
    from: usize,
    sequence: u64,
) -> Option<(usize, u64, &[u8])> {
    let mut at = from;
    while at + FRAME_HEADER_BYTES < bytes.len() {
        if let Some((found, payload)) = peek_frame(generation, &bytes[at..])
            && (sequence..bytes.len() as u64).contains(&found)
        {
            return Some((at, found, payload));
        }
        at += 8;
    }
    None
}

impl<M: Medium> Journal<M> {
    /// An empty journal in a fresh region.
    pub fn create(mut medium: M) -> Self {
        let half_bytes = medium.len() / 2;
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
            unchecked: 0,
        }
    }

    /// Replays a journal and goes on with it. A snapshot is taken at once, so that a torn tail or
    /// damage is left behind.
    pub fn open(medium: M) -> (Self, Replay) {
        let found = replay(&medium);
        let half_bytes = medium.len() / 2;
        let mut journal = Self {
            medium,
            ledger: found.ledger.clone(),
            half: found.half,
            generation: found.generation,
            end: found.end,
            snapshot_end: HALF_HEADER_BYTES,
            ended_bytes: 0,
            sequence: found.sequence,
            reserved: [STEP.min(half_bytes); 2],
            unchecked: 0,
        };
        journal.reserved[journal.half] = found.end.max(STEP.min(half_bytes));
        // A damaged header is mended before the other half, which may have the only good one, goes.
        if found
            .damage
            .iter()
            .any(|d| matches!(d, Damage::Header { .. }))
        {
            journal.write_header();
        }
        // Frames of a half that was passed over for its damage would pass after those of a snapshot
        // with the same generation.
        let other = (1 - journal.half) * half_bytes;
        let first = STEP.min(half_bytes);
        journal.medium.write(other, &vec![0; first]);
        journal.medium.release(other + first, half_bytes - first);
        let after = found.end.next_multiple_of(STEP);
        if after < half_bytes {
            journal
                .medium
                .release(journal.half * half_bytes + after, half_bytes - after);
        }
        // If the snapshot does not fit, the half in use stays: it is valid up to `end`.
        let _ = journal.snapshot();
        (journal, found)
    }

    /// The state.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The bytes below.
    pub fn into_medium(self) -> M {
        self.medium
    }

    /// Bytes that a snapshot of the present state would leave free, 0 if none.
    pub fn free_bytes(&self) -> usize {
        let mut used = 0;
        self.ledger
            .for_each_record(|record| used += frame_bytes(record.encode().len()));
        (self.medium.len() / 2 - HALF_HEADER_BYTES).saturating_sub(used)
    }

    /// Appends and applies a record that begins something. It leaves room for the ends of what has
    /// begun.
    pub fn append(&mut self, record: &Record) -> Result<(), Full> {
        self.append_as(record, false)
    }

    /// Appends and applies a record that ends something: it may use the room kept for that.
    pub fn append_end(&mut self, record: &Record) -> Result<(), Full> {
        self.append_as(record, true)
    }

    fn append_as(&mut self, record: &Record, is_end: bool) -> Result<(), Full> {
        let payload = record.encode();
        self.make_room(frame_bytes(payload.len()), is_end)?;
        let mut frame = Vec::with_capacity(frame_bytes(payload.len()));
        encode_frame(self.generation, self.sequence, &payload, &mut frame);
        self.medium
            .write(self.half * self.half_bytes() + self.end, &frame);
        self.end += frame.len();
        self.sequence += 1;
        self.ended_bytes += self.ledger.bytes_ended_by(record);
        self.ledger.apply(record);
        self.check(frame.len());
        Ok(())
    }

    /// Asserts the invariants after `appended` bytes. A replay reads all there is, so it is made when as much was
    /// appended as there is.
    fn check(&mut self, appended: usize) {
        if !cfg!(debug_assertions) {
            return;
        }
        let used = self.reserved[self.half];
        assert!(self.snapshot_end <= self.end && self.end <= used && used <= self.half_bytes());
        self.unchecked += appended;
        if self.unchecked >= self.end {
            self.unchecked = 0;
            self.assert_replay();
        }
    }

    fn assert_replay(&self) {
        let found = replay(&self.medium);
        assert_eq!(found.damage, [], "a journal that nobody damaged");
        let is = (self.half, self.generation, self.end, self.sequence);
        let will_be = (found.half, found.generation, found.end, found.sequence);
        assert_eq!(
            is, will_be,
            "half, generation, end and sequence are those of a replay"
        );
        assert!(
            found.ledger == self.ledger,
            "the ledger is that of a replay"
        );
    }

    /// Makes room for `frame` more bytes in the half in use: by a snapshot or by more memory.
    fn make_room(&mut self, frame: usize, is_end: bool) -> Result<(), Full> {
        // A sixteenth is kept for ends, and a beginning leaves room for a snapshot in the other half.
        let fits = |of: &Self| {
            let [this, other] = [of.reserved[of.half], of.reserved[1 - of.half]];
            of.end + frame
                <= if is_end {
                    this
                } else {
                    this.min(other) / 16 * 15
                }
        };
        if fits(self) {
            return Ok(());
        }
        // A snapshot writes all there is. It pays when the half is twice as long as one, and as a last
        // resort when it gains something at all; but not one for each record that does not fit.
        let gained = self.gained_bytes();
        let may_help = is_end || gained >= self.reserved[self.half] / 64;
        let _ = gained >= self.end / 2 && self.snapshot().is_ok();
        while !fits(self) {
            if self.grow() {
                continue;
            }
            if !may_help || self.gained_bytes() == 0 {
                return Err(Full);
            }
            self.snapshot()?;
        }
        Ok(())
    }

    /// Gives both halves half as much memory again. False where there is none, or they have all.
    fn grow(&mut self) -> bool {
        let half = self.half;
        let has = self.reserved[0].min(self.reserved[1]);
        has < self.half_bytes()
            && [has + (has / 2).max(STEP), has + STEP]
                .iter()
                .any(|&bytes| self.reserve(1 - half, bytes) && self.reserve(half, bytes))
    }

    /// Makes the first `bytes` of `half` writable, or all of it. False where there is no memory.
    fn reserve(&mut self, half: usize, bytes: usize) -> bool {
        let start = half * self.half_bytes();
        let has = self.reserved[half];
        let wanted = bytes.next_multiple_of(STEP).min(self.half_bytes());
        let is_there = wanted <= has || self.medium.reserve(start + has, wanted - has);
        if is_there {
            self.reserved[half] = wanted.max(has);
        }
        is_there
    }

    /// Gives back the memory of both halves beyond the first `bytes`.
    fn shrink(&mut self, bytes: usize) {
        let kept = bytes.next_multiple_of(STEP);
        for half in 0..2 {
            let start = half * self.half_bytes();
            let has = self.reserved[half];
            if kept < has {
                self.medium.release(start + kept, has - kept);
                self.reserved[half] = kept;
            }
        }
    }

    /// Bytes by which the half in use can be longer than a snapshot, at most.
    fn gained_bytes(&self) -> usize {
        self.ended_bytes + (self.end - self.snapshot_end)
    }

    fn half_bytes(&self) -> usize {
        self.medium.len() / 2
    }

    /// Writes the ledger to the other half and makes it the active one. The header comes last: until
    /// it is there the old half is the journal.
    fn snapshot(&mut self) -> Result<(), Full> {
        // Only a forged header says that there is no next generation; then the half in use stays.
        let other = 1 - self.half;
        let generation = self.generation.checked_add(1).ok_or(Full)?;
        let mut bytes = Vec::new();
        let mut sequence = 0;
        self.ledger.for_each_record(|record| {
            encode_frame(generation, sequence, &record.encode(), &mut bytes);
            sequence += 1;
        });
        let half_bytes = self.half_bytes();
        let used = HALF_HEADER_BYTES + bytes.len();
        if used > half_bytes || !self.reserve(other, used) {
            return Err(Full);
        }
        self.medium
            .write(other * half_bytes, &[0; HALF_HEADER_BYTES]);
        self.medium
            .write(other * half_bytes + HALF_HEADER_BYTES, &bytes);
        (self.half, self.generation) = (other, generation);
        (self.end, self.sequence) = (used, sequence);
        (self.snapshot_end, self.ended_bytes) = (self.end, 0);
        self.write_header();
        // The other header stays: should this one be damaged, it tells which generation to look for.
        let enough = used + used / 2 + STEP;
        if self.reserved.iter().all(|&has| has >= 2 * enough) {
            self.shrink(enough);
        }
        Ok(())
    }

    /// Writes the header of the active half, its magic last.
    fn write_header(&mut self) {
        let start = self.half * self.half_bytes();
        let header = encode_half_header(self.generation);
        self.medium.write(start + 8, &header[8..]);
        self.medium.write(start, &header[..8]);
    }
}
