//! Moves the bytes of a file from the hosts' logs into the file itself, once no host writes to the logs any more.
//!
//! Terms
//! * The *plain file* is the ordinary file with the name.
//! * A *container* is a directory with the logs of all hosts for this file. For each host, an *index* lists the host's
//!   changes in order.
//! * The *seal* says how many bytes of each index count. A change that is appended later does not count.
//! * To *flatten* the container is to copy the bytes that count into the plain file.
//!
//! All hosts must use the same seal. So they make it by a [`Ballot`], a decision of several hosts that have only a
//! directory in common: what the first host writes into a file counts for all. Here the directory is the container. A
//! host that writes to the container takes part in its ballot, and the seal is the decision. Files of the ballot:
//!
//! ```text
//! in-HOST      HOST is registered as a writer
//! closing      the container accepts no new writers
//! decision     the seal: how many bytes of each index count
//! done-cut     the plain file was cut to the bytes that count
//! claim-N      locked by the host that copies part N of the plain file
//! done-N       part N is in the plain file, durably
//! done-all     the container is flat: all bytes are in the plain file
//! whole        locked by the host that cuts or finishes the plain file, or removes the container
//! time-N       the file's modification time ([`crate::times`])
//! ```
//!
//! Flattening has three stages: the cut of the plain file, the copies of its parts (ranges of equal length, which the
//! hosts share), and the finish, which sets its length and time.
//!
//! Race: one host begins to write while another one ends the container. The writer puts `in-HOST` and then looks for
//! `closing`. The ending host puts `closing` and then looks for `in-HOST`. So at least one of them sees the other, and
//! no host writes to a sealed container unless it was taken for dead.
//!
//! Promises
//! * The bytes of the file are the same before, during and after flattening. Before `done-all` exists, no reader takes
//!   bytes from the plain file that are in a log.
//! * Each step may be repeated by any host, after a crash at any call. Logs do not change, so each repetition writes
//!   the same bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io::IoSlice;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::mpsc::{self, Receiver, Sender};

use firn_backing::{Backing, Errno, PageAdvice, Result, SetTime, Time};
pub(crate) use firn_hosts::ballot::{CLOSING, DONE, JOINED as WRITING};
use firn_hosts::ballot::{decode_decision, encode_decision};
use firn_hosts::{
    Ballot, DecisionStep, ExclusiveWork, Joined, Participation, Plan, Progress, Protocol, Unit,
    VoteDir, ballot, own,
};
use serde::{Deserialize, Serialize};

use crate::container::{Container, Walk};
use crate::names::Writer;
use crate::resolve::{Segment, Source};
use crate::run::FILE_BYTES_MAX;
use crate::writer::write_vectored;
use crate::{tag, times};

/// File in a container: the seal, which is the decision of the container's ballot.
pub(crate) const SEAL_NAME: &str = ballot::DECISION;
/// Units of work that change the plain file as a whole.
const CUT: &str = "cut";
const FINISH: &str = "all";
/// File in a container that is flat.
pub(crate) const DONE_ALL: &str = "done-all";
/// Length of a part, which one host copies at a time. The seal stores it, so that all hosts divide a file in the same
/// way.
pub const UNIT_BYTES: u64 = 256 << 20;
/// Bound on the bytes of a batch. A batch then has enough bytes of each log that a disk does not spend most of its time
/// seeking.
const COPY_BYTES: u64 = 4 << 20;
/// Bound on the segments of a batch, because each takes some memory.
const COPY_PIECES: usize = 4096;

/// What counts of a container: decided once, the same for all hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seal {
    /// How many bytes of each index count, by the index's name.
    indexes: BTreeMap<String, u64>,
    /// Length of the file in bytes.
    pub(crate) len: u64,
    /// Length of a part in bytes.
    unit_bytes: u64,
    /// What was given up because it cannot be read ([`crate::salvage`]).
    #[serde(default, skip_serializing_if = "LostParts::is_empty")]
    pub(crate) lost: LostParts,
}

/// The damaged parts of a container that were given up.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LostParts {
    /// Parts of indexes that contain no frames, by the index's name.
    pub(crate) indexes: BTreeMap<String, Vec<Range<u64>>>,
    /// Positions of blocks of logs that read as zeros, by the log's name.
    pub(crate) logs: BTreeMap<String, BTreeSet<u64>>,
}

impl LostParts {
    pub(crate) fn is_empty(&self) -> bool {
        self.indexes.is_empty() && self.logs.is_empty()
    }

    /// Returns the end of the lost part of an index that contains `offset`.
    pub(crate) fn end_of_lost_part(&self, writer: &Writer, offset: u64) -> Option<u64> {
        if self.indexes.is_empty() {
            return None;
        }
        let parts = self.indexes.get(&writer.index_name())?;
        let part = parts.iter().find(|part| part.contains(&offset))?;
        Some(part.end)
    }

    pub(crate) fn has_block(&self, log: &str, block: u64) -> bool {
        let blocks = self.logs.get(log);
        blocks.is_some_and(|blocks| blocks.contains(&block))
    }

    pub(crate) fn lost_blocks(&self, log: &str) -> BTreeSet<u64> {
        self.logs.get(log).cloned().unwrap_or_default()
    }
}

impl Seal {
    /// Makes a seal without a length, which the caller sets after applying the seal to the container.
    pub(crate) fn new(indexes: BTreeMap<String, u64>, unit_bytes: u64) -> Self {
        Self {
            indexes,
            len: 0,
            unit_bytes,
            lost: LostParts::default(),
        }
    }

    /// Returns how many bytes of an index count.
    pub(crate) fn limit_of(&self, writer: &Writer) -> u64 {
        self.indexes.get(&writer.index_name()).copied().unwrap_or(0)
    }

    /// Returns the writers whose indexes have bytes that count.
    pub(crate) fn writers(&self) -> Vec<Writer> {
        self.indexes
            .iter()
            .filter(|(_, bytes)| **bytes > 0)
            .filter_map(|(name, _)| Writer::from_index_name(name.as_bytes()))
            .collect()
    }

    /// Returns the length of the file in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether the file has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Reads the seal of a sealed container. Fails with ENOENT if there is none, and with EIO if it is damaged.
    pub(crate) fn load<B: Backing>(backing: &B, dir: &B::Inode) -> Result<Self> {
        let bytes = own::read_file(backing, dir, SEAL_NAME)?.ok_or(Errno::NOENT)?;
        Self::decode(&bytes).ok_or_else(|| {
            tracing::error!(
                "logs that are closed for writing cannot be read: their seal, the file `{SEAL_NAME}`, is damaged"
            );
            Errno::IO
        })
    }

    /// Encodes the seal as a decision of a ballot.
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        encode_decision(self)
    }

    /// Decodes a seal. Returns `None` if it is damaged.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let seal: Self = decode_decision(bytes)?;
        let is_valid = seal.unit_bytes > 0 && seal.len <= FILE_BYTES_MAX;
        is_valid.then_some(seal)
    }

    /// Splits a segment at the boundaries of parts. Returns each piece with the number of its part.
    pub(crate) fn split(&self, mut segment: Segment) -> Vec<(u64, Segment)> {
        let mut pieces = Vec::new();
        while !segment.file.is_empty() {
            let part = segment.file.start / self.unit_bytes;
            let end = self.range_of(part).end;
            pieces.push((part, segment.split_off_first(end - segment.file.start)));
        }
        debug_assert!(pieces.is_sorted_by(|(left, _), (right, _)| left < right));
        pieces
    }

    /// Returns the range of the file that is part number `part`.
    fn range_of(&self, part: u64) -> Range<u64> {
        let start = part.saturating_mul(self.unit_bytes);
        start..start.saturating_add(self.unit_bytes)
    }
}

/// What is written into the plain file with one call.
enum Batch {
    /// Bytes of logs that lie one after the other in the file from `start` on.
    Bytes { start: u64, bytes: Vec<u8> },
    /// A range to be zeroed, as far as the plain file reaches.
    Zeros(Range<u64>),
}

/// Result of an attempt to flatten a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlattenProgress {
    /// Other hosts are still copying parts.
    Waits,
    /// All bytes are in the plain file. The container can be removed.
    Done,
}

/// The stages of flattening, as a protocol of the ballot.
#[derive(Default)]
pub(crate) struct Flattening {
    /// Numbers of the parts that have bytes in logs, once they are known.
    parts: OnceLock<Vec<u64>>,
}

impl Protocol for Flattening {
    type Decision = Seal;

    const PRESENCE: Participation = Participation::Living;

    fn plan(&self, _seal: &Seal) -> Plan {
        let part_numbers = self.parts.get().map_or(&[][..], Vec::as_slice);
        let copies = part_numbers
            .iter()
            .map(|number| Unit::Part(number.to_string()))
            .collect();
        Plan {
            stops_first: false,
            stages: vec![vec![Unit::Whole(CUT)], copies, vec![Unit::Whole(FINISH)]],
        }
    }
}

/// The steps in the life of one container: writers register, the container is sealed, flattened and removed.
pub struct Lifecycle<'a, B: Backing> {
    pub(crate) backing: &'a B,
    pub(crate) container: &'a Container<B>,
    ballot: Ballot<'a, B, Flattening>,
}

impl<'a, B: Backing> Lifecycle<'a, B> {
    /// Opens the container `name` in the directory `file_dir`. Returns `None` if the container is removed.
    pub fn open(
        backing: &'a B,
        container: &'a Container<B>,
        file_dir: &B::Inode,
        name: &str,
    ) -> Result<Option<Self>> {
        let Some(votes) = VoteDir::find(backing, file_dir, name, &container.host)? else {
            return Ok(None);
        };
        Ok(Some(Self {
            backing,
            container,
            ballot: Ballot::in_dir(votes, Flattening::default()),
        }))
    }

    /// Returns the directory of the container, with the files of the ballot.
    pub(crate) fn vote_dir(&self) -> &VoteDir<'a, B> {
        self.ballot.dir()
    }

    /// Returns the inode of the container's directory.
    pub(crate) fn container_dir(&self) -> &B::Inode {
        self.vote_dir().dir()
    }

    /// Registers this host as a writer, which keeps other hosts from ending the container. Returns false if the
    /// container accepts no new writers.
    pub fn begin_writing(&self) -> Result<bool> {
        Ok(self.ballot.join(b"")? == Joined::Yes)
    }

    /// Removes this host's registration as a writer.
    pub fn end_writing(&self) -> Result<()> {
        self.ballot.withdraw()
    }

    /// Decides for all hosts which bytes of the container count: puts the seal, or finds that of another host. From
    /// then on this host reads the container by the seal. Returns false, without a seal, if a writer is registered that
    /// `is_alive` reports as alive.
    ///
    /// `inode` is the plain file, the ordinary file into which the bytes are copied later. It is not changed here.
    pub fn seal(
        &self,
        inode: &B::Inode,
        unit_bytes: u64,
        is_alive: &dyn Fn(&str) -> Result<bool>,
    ) -> Result<bool> {
        // With a result of `Decide` or `Decided`, no living host writes, and no new writer can register.
        match self.ballot.close(is_alive)? {
            DecisionStep::Close | DecisionStep::Wait(_) => return Ok(false),
            DecisionStep::Decide => self.decide(inode, unit_bytes)?,
            DecisionStep::Decided => {}
        }
        let seal = Seal::load(self.backing, self.container_dir())?;
        self.container.apply_seal(self.backing, seal)?;
        Ok(true)
    }

    /// Puts a seal with the present lengths of the indexes (lists of each host's changes), unless another host has put
    /// one. The container is closed to writers by then.
    fn decide(&self, inode: &B::Inode, unit_bytes: u64) -> Result<()> {
        let index_lengths = self.container.sync_and_measure_indexes(self.backing)?;
        let mut seal = Seal::new(index_lengths, unit_bytes);
        // A host that was taken for dead may still append. So the length is computed from these bytes of the indexes
        // only.
        self.container.apply_seal(self.backing, seal.clone())?;
        seal.len = self.container.len();
        // The time is read after `closing` exists: a host that sets the time later sees `closing`, and records the time
        // in the container.
        let modified = self.backing.attr_now(inode)?.mtime;
        times::record_first(self.backing, self.container_dir(), modified)?;
        self.ballot.decide(&seal).map(drop)
    }

    /// Makes the container refuse new writers. Returns false if a writer is registered that `is_alive` reports as
    /// alive.
    pub(crate) fn close(&self, is_alive: &dyn Fn(&str) -> Result<bool>) -> Result<bool> {
        Ok(match self.ballot.close(is_alive)? {
            DecisionStep::Close | DecisionStep::Wait(_) => false,
            DecisionStep::Decide | DecisionStep::Decided => true,
        })
    }

    /// Returns whether a writer is registered that `is_alive` reports as alive.
    pub(crate) fn has_writer(&self, is_alive: &dyn Fn(&str) -> Result<bool>) -> Result<bool> {
        for host in self.ballot.joined()? {
            if is_alive(&host)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Does this host's share of the work to flatten a sealed container, to which no host may write: copies bytes of
    /// its logs into the plain file `inode`, which is open as `plain_file`. Returns `Done` if the container is flat,
    /// and `Waits` if other hosts are still copying parts.
    pub fn flatten(&self, inode: &B::Inode, plain_file: &B::File) -> Result<FlattenProgress> {
        let seal = Seal::load(self.backing, self.container_dir())?;
        let names = self.vote_dir().names()?;
        if names.contains(DONE_ALL) {
            return Ok(FlattenProgress::Done);
        }
        self.load_last_time(&names, plain_file)?;
        let parts = self.find_parts(&seal)?;
        // Each of these parts is one unit of the work that the hosts share. The protocol must know them before
        // `carry_out`, which asks it for the units.
        self.ballot.protocol().parts.get_or_init(|| parts);
        let progress = self
            .ballot
            .carry_out(|unit| self.run_unit(unit, &seal, inode, plain_file))?;
        Ok(match progress {
            // A container is removed only after it is flat.
            Progress::Done | Progress::Gone => FlattenProgress::Done,
            Progress::Waits(_) => FlattenProgress::Waits,
        })
    }

    /// Reads the last time record before this host changes the plain file, which changes the plain file's time. Makes
    /// the first record if there is none.
    fn load_last_time(&self, names: &BTreeSet<String>, plain_file: &B::File) -> Result<()> {
        let last_number = match self.last_time_number(names) {
            Some(number) => number,
            None => {
                let modified = self.backing.attr_of_file_now(plain_file)?.mtime;
                times::record_first(self.backing, self.container_dir(), modified)?;
                self.backing.sync_dir(self.container_dir())?;
                times::FIRST_NUMBER
            }
        };
        self.container.load_time(self.backing, Some(last_number))
    }

    /// Runs one unit of the work that hosts share to flatten a container: the cut, the copy of a part, or the finish.
    fn run_unit(
        &self,
        unit: &Unit,
        seal: &Seal,
        inode: &B::Inode,
        plain_file: &B::File,
    ) -> Result<()> {
        match unit {
            Unit::Whole(CUT) => self.cut(plain_file),
            Unit::Whole(_) => self.finish(seal, inode, plain_file),
            Unit::Part(number) => {
                let number = number.parse().map_err(|_| Errno::INVAL)?;
                self.copy_logs(seal.range_of(number), plain_file)?;
                // The bytes are durable before the part is marked as copied.
                let is_data_only = false;
                self.backing.sync(plain_file, is_data_only)
            }
        }
    }

    /// Runs `work` under the container's exclusive lock, for changes of the whole plain file and for removal. Returns
    /// false if another host holds the lock; true also if the container is removed.
    pub(crate) fn run_exclusively(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<bool> {
        Ok(match self.ballot.run_exclusively(work)? {
            ExclusiveWork::Done | ExclusiveWork::Gone => true,
            ExclusiveWork::Busy => false,
        })
    }

    /// Cuts the plain file to the bytes that count. Holes of the file beyond them become holes of the plain file.
    fn cut(&self, plain_file: &B::File) -> Result<()> {
        let visible_bytes = self.container.visible_plain_bytes();
        if self.backing.attr_of_file_now(plain_file)?.size > visible_bytes {
            self.backing.set_len(plain_file, visible_bytes)?;
            let is_data_only = false;
            self.backing.sync(plain_file, is_data_only)?;
        }
        Ok(())
    }

    /// Returns the numbers of the parts (ranges of equal length) of the plain file that have bytes in logs or bytes to
    /// be zeroed. A sparse file may have more parts than could be visited one by one, so the others are left out.
    fn find_parts(&self, seal: &Seal) -> Result<Vec<u64>> {
        let mut parts: Vec<u64> = Vec::new();
        let mut walk = Walk::new(0..seal.len);
        loop {
            let segments = self.container.next_segments(self.backing, &mut walk)?;
            if segments.is_empty() {
                debug_assert!(
                    parts.is_sorted_by(|left, right| left < right),
                    "parts overlap"
                );
                return Ok(parts);
            }
            for Segment { file, source } in segments {
                debug_assert!(file.start < file.end && file.end <= seal.len);
                if matches!(source, Source::Plain | Source::Hole) {
                    continue;
                }
                // The last part of the segment before may be the first one of this segment.
                let next_new_part = parts.last().map_or(0, |last| last + 1);
                let first_part = (file.start / seal.unit_bytes).max(next_new_part);
                let end_part = file.end.div_ceil(seal.unit_bytes);
                parts.extend(first_part..end_part);
            }
        }
    }

    /// Copies the bytes of a range from logs into the plain file. A second thread reads one batch ahead.
    fn copy_logs(&self, range: Range<u64>, plain_file: &B::File) -> Result<()> {
        std::thread::scope(|scope| {
            // The channel holds no batch, so the reader is at most one batch ahead.
            let (sender, receiver) = mpsc::sync_channel(0);
            let (freed_buffers, free_buffers) = mpsc::channel();
            let walk = Walk::new(range.clone());
            let read_ahead = move || {
                let send = |batch| sender.send(batch).map_err(|_| Errno::CANCELED);
                self.read_batches(walk, &free_buffers, &send)
            };
            let spawned = std::thread::Builder::new()
                .name("firn-flatten".into())
                .spawn_scoped(scope, read_ahead);
            // Without a second thread, this one reads and writes by turns.
            let Ok(reader) = spawned else {
                return self.copy_logs_alone(range, plain_file);
            };
            let write = |batch| self.write_batch(batch, plain_file, &freed_buffers);
            let written = receiver.iter().try_for_each(write);
            // The reader may be waiting for its batch to be taken. Dropping the channel ends that wait.
            drop(receiver);
            match reader.join() {
                Ok(outcome) => written.and(outcome),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Copies as [`Self::copy_logs`] does, without a second thread.
    fn copy_logs_alone(&self, range: Range<u64>, plain_file: &B::File) -> Result<()> {
        let (freed_buffers, free_buffers) = mpsc::channel();
        let write = |batch| self.write_batch(batch, plain_file, &freed_buffers);
        self.read_batches(Walk::new(range), &free_buffers, &write)
    }

    /// Reads the batches of a walk (a list of file ranges, made step by step) and passes each to `send`. `free_buffers`
    /// supplies the memory of batches that were written.
    fn read_batches(
        &self,
        mut walk: Walk,
        free_buffers: &Receiver<Vec<u8>>,
        send: &dyn Fn(Batch) -> Result<()>,
    ) -> Result<()> {
        loop {
            let segments = self.container.next_segments(self.backing, &mut walk)?;
            if segments.is_empty() {
                return Ok(());
            }
            let mut batch_segments = Vec::new();
            for segment in segments {
                match segment.source {
                    Source::Log { .. } => {
                        self.add_to_batch(segment, &mut batch_segments, free_buffers, send)?
                    }
                    Source::Zeros => send(Batch::Zeros(segment.file))?,
                    Source::Plain | Source::Hole => {}
                }
            }
            self.read_batch(&mut batch_segments, free_buffers, send)?;
        }
    }

    /// Adds a segment (a range of the file with one source) to the batch. Each time the batch is full, it is read and
    /// sent.
    fn add_to_batch(
        &self,
        mut segment: Segment,
        batch_segments: &mut Vec<Segment>,
        free_buffers: &Receiver<Vec<u8>>,
        send: &dyn Fn(Batch) -> Result<()>,
    ) -> Result<()> {
        while !segment.file.is_empty() {
            let free_bytes = free_bytes_in_batch(batch_segments, segment.file.start);
            if free_bytes == 0 {
                self.read_batch(batch_segments, free_buffers, send)?;
                continue;
            }
            batch_segments.push(segment.split_off_first(free_bytes));
        }
        Ok(())
    }

    /// Reads the segments of the batch, which follow each other in the file, and sends their bytes. Uses the memory of
    /// a written batch if there is one.
    fn read_batch(
        &self,
        batch_segments: &mut Vec<Segment>,
        free_buffers: &Receiver<Vec<u8>>,
        send: &dyn Fn(Batch) -> Result<()>,
    ) -> Result<()> {
        let segments = std::mem::take(batch_segments);
        let (Some(first), Some(last)) = (segments.first(), segments.last()) else {
            return Ok(());
        };
        let file_range = first.file.start..last.file.end;
        let batch_bytes = file_range.end - file_range.start;
        let segment_bytes = segments
            .iter()
            .map(|segment| segment.file.end - segment.file.start);
        debug_assert_eq!(segment_bytes.sum::<u64>(), batch_bytes);
        let mut bytes = free_buffers.try_recv().unwrap_or_default();
        bytes.resize(batch_bytes as usize, 0);
        self.container
            .read_segments(self.backing, &segments, &mut bytes)?;
        let start = file_range.start;
        send(Batch::Bytes { start, bytes })
    }

    /// Writes a batch into the plain file, and returns its memory for a later batch.
    fn write_batch(
        &self,
        batch: Batch,
        plain_file: &B::File,
        freed_buffers: &Sender<Vec<u8>>,
    ) -> Result<()> {
        match batch {
            Batch::Zeros(range) => self.write_zeros(range, plain_file),
            Batch::Bytes { start, bytes } => {
                write_vectored(self.backing, plain_file, vec![IoSlice::new(&bytes)], start)?;
                // Starts writing the pages to the server now, so that the sync at the end waits less.
                let end = start + bytes.len() as u64;
                self.backing
                    .advise(plain_file, start..end, PageAdvice::WriteOut);
                // The send fails if the reader has ended. Then its memory is not needed.
                let _ = freed_buffers.send(bytes);
                Ok(())
            }
        }
    }

    /// Writes zeros into a range of the plain file, as far as the plain file reaches.
    fn write_zeros(&self, range: Range<u64>, plain_file: &B::File) -> Result<()> {
        let end = range
            .end
            .min(self.backing.attr_of_file_now(plain_file)?.size);
        let zeros = vec![0; COPY_BYTES.min(end.saturating_sub(range.start)) as usize];
        let mut start = range.start;
        while start < end {
            let len = (end - start).min(zeros.len() as u64);
            own::write_all(self.backing, plain_file, &zeros[..len as usize], start)?;
            start += len;
        }
        Ok(())
    }

    /// Sets the length and the time of the plain file ([`crate::times`]), and removes its tag, the attribute that names
    /// the container. All parts are copied by then.
    fn finish(&self, seal: &Seal, inode: &B::Inode, plain_file: &B::File) -> Result<()> {
        // A file without changes keeps its length and its times.
        if self.backing.attr_of_file_now(plain_file)?.size != seal.len {
            self.backing.set_len(plain_file, seal.len)?;
        }
        tag::clear(self.backing, inode, &self.container.name)?;
        let names = self.vote_dir().names()?;
        let last_number = self.last_time_number(&names).unwrap_or(times::FIRST_NUMBER);
        // The sync also makes the removal of the tag durable.
        times::finish(
            self.backing,
            self.container_dir(),
            last_number,
            &|modified| {
                self.set_modified(inode, plain_file, modified)?;
                let is_data_only = false;
                self.backing.sync(plain_file, is_data_only)
            },
        )
    }

    /// Sets the plain file's modification time. If firnd may not set it, the plain file keeps its present time.
    fn set_modified(&self, inode: &B::Inode, plain_file: &B::File, modified: Time) -> Result<()> {
        if self.backing.attr_of_file_now(plain_file)?.mtime == modified {
            return Ok(());
        }
        let outcome = self
            .backing
            .set_times(inode, SetTime::Keep, SetTime::At(modified));
        match outcome {
            Err(Errno::PERM | Errno::ACCESS) => Ok(()),
            outcome => outcome,
        }
    }

    /// Returns the number of the last time record among the names in the container.
    fn last_time_number(&self, names: &BTreeSet<String>) -> Option<u64> {
        times::last_record_number(names.iter().map(|name| name.as_bytes()))
    }

    /// Returns whether the container accepts no new writers.
    pub fn is_closing(&self) -> Result<bool> {
        let file = own::find(self.backing, self.container_dir(), OsStr::new(CLOSING))?;
        Ok(file.is_some())
    }

    /// Returns whether all bytes are in the plain file.
    pub fn is_flat(&self) -> Result<bool> {
        let file = own::find(self.backing, self.container_dir(), OsStr::new(DONE_ALL))?;
        Ok(file.is_some())
    }

    /// Removes a flat container, unless another host holds its exclusive lock.
    pub fn remove(&self) -> Result<()> {
        self.ballot.remove_if_over()
    }
}

/// Returns how many bytes of a segment at `start` in the file fit in a batch; 0 if the segment does not continue the
/// batch.
fn free_bytes_in_batch(batch: &[Segment], start: u64) -> u64 {
    let (Some(first), Some(last)) = (batch.first(), batch.last()) else {
        return COPY_BYTES;
    };
    if last.file.end == start && batch.len() < COPY_PIECES {
        COPY_BYTES.saturating_sub(start - first.file.start)
    } else {
        0
    }
}

/// Returns the name of the file that marks a part as copied.
pub(crate) fn done_name(part: u64) -> String {
    Unit::Part(part.to_string()).done_file()
}

/// Returns whether a name in a container marks a part as copied.
pub(crate) fn is_done_part(name: &str) -> bool {
    let part = name.strip_prefix(DONE);
    part.is_some_and(|part| part.parse::<u64>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::{ChangeKey, WriterId};

    fn segment(file: Range<u64>, position: u64) -> Segment {
        let writer = WriterId { host: 1, life: 1 };
        let key = ChangeKey {
            epoch: 1,
            writer,
            frame: 0,
        };
        Segment {
            file,
            source: Source::Log {
                log: 0,
                position,
                key,
            },
        }
    }

    #[test]
    fn a_batch_ends_where_it_is_full_or_the_file_has_a_gap() {
        assert_eq!(free_bytes_in_batch(&[], 7), COPY_BYTES);
        let batch = [segment(100..200, 0)];
        assert_eq!(free_bytes_in_batch(&batch, 200), COPY_BYTES - 100);
        assert_eq!(free_bytes_in_batch(&batch, 201), 0);
        let full = [segment(100..100 + COPY_BYTES, 0)];
        assert_eq!(free_bytes_in_batch(&full, 100 + COPY_BYTES), 0);
        let many = vec![segment(0..1, 0); COPY_PIECES];
        assert_eq!(free_bytes_in_batch(&many, 1), 0);
    }

    #[test]
    fn what_is_left_of_a_segment_goes_on_in_its_log() {
        let mut rest = segment(100..200, 5000);
        assert_eq!(rest.split_off_first(30), segment(100..130, 5000));
        assert_eq!(rest, segment(130..200, 5030));
        assert_eq!(rest.split_off_first(1000), segment(130..200, 5030));
        assert!(rest.file.is_empty());
    }
}
