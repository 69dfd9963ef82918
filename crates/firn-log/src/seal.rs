//! The end of a container: its writers, what counts of it, and its way into the plain file.
//!
//! A container is a [`Ballot`] in which hosts take part while they live:
//!
//! ```text
//! in-HOST      the host may write
//! closing      no host begins to write any more
//! decision     the seal: how many bytes of each index count
//! done-cut     the plain file was cut to what counts of it
//! claim-N      locked by the host that writes this part of the plain file
//! done-N       the part is in the plain file, durably
//! done-all     the plain file is the file
//! whole        locked by the host that cuts the plain file, ends with it, or removes the container
//! time-N       what time the file has ([`crate::times`])
//! ```
//!
//! The stages of its work are the cut, the parts, and the end. A host that begins to write and one that ends the container
//! see at least one of each other, so no host writes to a sealed container unless it was taken for dead.
//!
//! Promises
//! * The bytes of the file are the same before, while and after it is flattened. Until `done-all` is there, no reader
//!   takes from the plain file what is in a log.
//! * Each step may be repeated, by any host, after a crash at any call: logs do not change, and a part of the plain file
//!   is written with the same bytes each time.

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
    Alone, Ballot, DecisionStep, Joined, Plan, Presence, Progress, Protocol, Unit, VoteDir, ballot,
    own,
};
use serde::{Deserialize, Serialize};

use crate::container::{Container, Walk};
use crate::names::Writer;
use crate::resolve::{Segment, Source};
use crate::run::FILE_BYTES_MAX;
use crate::writer::write_vectored;
use crate::{tag, times};

/// In a container: the seal.
pub(crate) const SEAL_NAME: &str = ballot::DECISION;
/// Units of work that concern the whole plain file.
const CUT: &str = "cut";
const END: &str = "all";
/// In a container: the plain file is the file.
pub(crate) const DONE_ALL: &str = "done-all";
/// Bytes of the plain file that one host writes at a time. The seal names them, so hosts divide a file in one way.
pub const UNIT_BYTES: u64 = 256 << 20;
/// Bytes that are read from logs before they are written: enough of each log that a disk does not seek for most of its
/// time.
const COPY_BYTES: u64 = 4 << 20;
/// Pieces of them, each of which takes some memory.
const COPY_PIECES: usize = 4096;

/// What counts of a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seal {
    /// Bytes of each index, by its name.
    indexes: BTreeMap<String, u64>,
    /// Bytes of the file.
    pub(crate) len: u64,
    /// Bytes of the plain file that one host writes at a time.
    unit_bytes: u64,
    /// What was given up ([`crate::salvage`]).
    #[serde(default, skip_serializing_if = "Lost::is_empty")]
    pub(crate) lost: Lost,
}

/// What of a container cannot be read, and is given up.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Lost {
    /// Parts of indexes that are no frames, by the index's name.
    pub(crate) indexes: BTreeMap<String, Vec<Range<u64>>>,
    /// Blocks of logs, by the log's name and where they begin. Their bytes are zeros.
    pub(crate) logs: BTreeMap<String, BTreeSet<u64>>,
}

impl Lost {
    pub(crate) fn is_empty(&self) -> bool {
        self.indexes.is_empty() && self.logs.is_empty()
    }

    /// Where the part of an index ends that begins at `offset`.
    pub(crate) fn end_of_part(&self, writer: &Writer, offset: u64) -> Option<u64> {
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

    pub(crate) fn blocks_of(&self, log: &str) -> BTreeSet<u64> {
        self.logs.get(log).cloned().unwrap_or_default()
    }
}

impl Seal {
    /// What counts of each index, of a file that is to be changed no more: its length is not known yet.
    pub(crate) fn new(indexes: BTreeMap<String, u64>, unit_bytes: u64) -> Self {
        Self {
            indexes,
            len: 0,
            unit_bytes,
            lost: Lost::default(),
        }
    }

    pub(crate) fn limit_of(&self, writer: &Writer) -> u64 {
        self.indexes.get(&writer.index_name()).copied().unwrap_or(0)
    }

    /// Writers whose indexes count.
    pub(crate) fn writers(&self) -> Vec<Writer> {
        let counting = self.indexes.iter().filter(|(_, bytes)| **bytes > 0);
        counting
            .filter_map(|(name, _)| Writer::of_index(name.as_bytes()))
            .collect()
    }

    /// Bytes of the file.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The seal in a container that has one.
    pub(crate) fn load<B: Backing>(base: &B, dir: &B::Inode) -> Result<Self> {
        let bytes = own::load(base, dir, SEAL_NAME)?.ok_or(Errno::NOENT)?;
        Self::decode(&bytes).ok_or_else(|| {
            tracing::error!("what counts of a container cannot be read: `{SEAL_NAME}` is damaged");
            Errno::IO
        })
    }

    /// As a decision is stored.
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        encode_decision(self)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let seal: Self = decode_decision(bytes)?;
        let is_right = seal.unit_bytes > 0 && seal.len <= FILE_BYTES_MAX;
        is_right.then_some(seal)
    }

    /// What a segment has in each unit.
    pub(crate) fn split(&self, mut segment: Segment) -> Vec<(u64, Segment)> {
        let mut parts = Vec::new();
        while !segment.file.is_empty() {
            let unit = segment.file.start / self.unit_bytes;
            let end = self.range_of(unit).end;
            parts.push((unit, segment.take_first(end - segment.file.start)));
        }
        debug_assert!(parts.is_sorted_by(|(one, _), (next, _)| one < next));
        parts
    }

    fn range_of(&self, unit: u64) -> Range<u64> {
        let start = unit.saturating_mul(self.unit_bytes);
        start..start.saturating_add(self.unit_bytes)
    }
}

/// What goes into the plain file at once.
enum Batch {
    /// From `start` on.
    Bytes { start: u64, bytes: Vec<u8> },
    /// Zeros, as far as the plain file has bytes there.
    Zeros(Range<u64>),
}

/// How far a container is on its way into the plain file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flat {
    /// Other hosts have parts to write.
    Waits,
    /// The plain file is the file; the container may go.
    Done,
}

/// What hosts do with a sealed container.
#[derive(Default)]
pub(crate) struct Flattening {
    /// Numbers of the parts of the plain file that bytes in logs go to, once they were looked for.
    parts: OnceLock<Vec<u64>>,
}

impl Protocol for Flattening {
    type Decision = Seal;

    const PRESENCE: Presence = Presence::Living;

    fn plan(&self, _seal: &Seal) -> Plan {
        let parts = self.parts.get().map_or(&[][..], Vec::as_slice);
        let parts = parts.iter().map(|part| Unit::Part(part.to_string()));
        Plan {
            stops_first: false,
            stages: vec![
                vec![Unit::Whole(CUT)],
                parts.collect(),
                vec![Unit::Whole(END)],
            ],
        }
    }
}

/// One container, as it comes to its end.
pub struct Ending<'a, B: Backing> {
    pub(crate) base: &'a B,
    pub(crate) container: &'a Container<B>,
    ballot: Ballot<'a, B, Flattening>,
}

impl<'a, B: Backing> Ending<'a, B> {
    /// `name` is that of the container in the directory `top`; none if it is gone.
    pub fn of(
        base: &'a B,
        container: &'a Container<B>,
        top: &B::Inode,
        name: &str,
    ) -> Result<Option<Self>> {
        let votes = VoteDir::find(base, top, name, &container.host)?;
        Ok(votes.map(|votes| Self {
            base,
            container,
            ballot: Ballot::in_dir(votes, Flattening::default()),
        }))
    }

    /// The directory of the container.
    pub(crate) fn votes(&self) -> &VoteDir<'a, B> {
        self.ballot.dir()
    }

    /// Says that this host may write, to hosts that live. False if no host may begin to any more.
    pub fn begin_writing(&self) -> Result<bool> {
        Ok(self.ballot.join(b"")? == Joined::Yes)
    }

    /// Says that this host writes no more.
    pub fn end_writing(&self) -> Result<()> {
        self.ballot.withdraw()
    }

    /// Ends the container of the plain file `inode`, unless a host writes to it that `is_alive` says to live.
    pub fn seal(
        &self,
        inode: &B::Inode,
        unit_bytes: u64,
        is_alive: &dyn Fn(&str) -> Result<bool>,
    ) -> Result<bool> {
        match self.ballot.close(is_alive)? {
            DecisionStep::Close | DecisionStep::Wait(_) => return Ok(false),
            DecisionStep::Decide => self.decide(inode, unit_bytes)?,
            DecisionStep::Decided => {}
        }
        let seal = Seal::load(self.base, self.votes().dir())?;
        self.container.apply_seal(self.base, seal)?;
        Ok(true)
    }

    /// Puts a seal by what the indexes have now, if there is none.
    fn decide(&self, inode: &B::Inode, unit_bytes: u64) -> Result<()> {
        let lengths = self.container.sync_and_measure_indexes(self.base)?;
        let indexes = lengths
            .iter()
            .map(|(writer, bytes)| (writer.index_name(), *bytes))
            .collect();
        let mut seal = Seal::new(indexes, unit_bytes);
        // The length is that of these bytes of the indexes, whatever a host that was taken for dead adds meanwhile.
        self.container.apply_seal(self.base, seal.clone())?;
        seal.len = self.container.len();
        // Asked for after `closing` is there: a later change of the time is recorded in the container.
        let modified = self.base.attr_now(inode)?.mtime;
        times::begin(self.base, self.votes().dir(), modified)?;
        self.ballot.decide(&seal).map(drop)
    }

    /// Refuses new writers from here on; false if a host writes that `is_alive` says to live.
    pub(crate) fn close(&self, is_alive: &dyn Fn(&str) -> Result<bool>) -> Result<bool> {
        Ok(match self.ballot.close(is_alive)? {
            DecisionStep::Close | DecisionStep::Wait(_) => false,
            DecisionStep::Decide | DecisionStep::Decided => true,
        })
    }

    /// Whether a host that `is_alive` says to live says that it may write.
    pub(crate) fn has_writer(&self, is_alive: &dyn Fn(&str) -> Result<bool>) -> Result<bool> {
        for host in self.ballot.joined()? {
            if is_alive(&host)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Writes what this host can of a sealed container into the plain file, `inode`, open as `plain`.
    pub fn flatten(&self, inode: &B::Inode, plain: &B::File) -> Result<Flat> {
        let seal = Seal::load(self.base, self.votes().dir())?;
        let names = self.votes().names()?;
        if names.contains(DONE_ALL) {
            return Ok(Flat::Done);
        }
        let last_time = self.last_time(&names);
        if last_time.is_none() {
            let modified = self.base.attr_of_file_now(plain)?.mtime;
            times::begin(self.base, self.votes().dir(), modified)?;
            self.base.sync_dir(self.votes().dir())?;
        }
        // From here on the plain file has another time than the file.
        let last_time = last_time.or(Some(0));
        self.container.load_time(self.base, last_time)?;
        let parts = self.find_parts(&seal)?;
        self.ballot.protocol().parts.get_or_init(|| parts);
        let progress = self
            .ballot
            .carry_out(|unit| self.do_unit(unit, &seal, inode, plain))?;
        Ok(match progress {
            // The host that removed the container has ended it before.
            Progress::Done | Progress::Gone => Flat::Done,
            Progress::Waits(_) => Flat::Waits,
        })
    }

    fn do_unit(&self, unit: &Unit, seal: &Seal, inode: &B::Inode, plain: &B::File) -> Result<()> {
        match unit {
            Unit::Whole(CUT) => self.cut(plain),
            Unit::Whole(_) => self.finish(seal, inode, plain),
            Unit::Part(number) => {
                let number = number.parse().map_err(|_| Errno::INVAL)?;
                self.copy_logs(seal.range_of(number), plain)?;
                self.base.sync(plain, false)
            }
        }
    }

    /// Runs `work`, which changes the plain file as a whole or removes the container, under the container's exclusive
    /// lock. False if another host holds the lock, or the container is gone.
    pub(crate) fn alone(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<bool> {
        Ok(match self.ballot.do_alone(work)? {
            Alone::Done | Alone::Gone => true,
            Alone::Busy => false,
        })
    }

    /// Cuts from the plain file what counts no more, so that holes of the file are holes there.
    fn cut(&self, plain: &B::File) -> Result<()> {
        let counts = self.container.base_end();
        if self.base.attr_of_file_now(plain)?.size > counts {
            self.base.set_len(plain, counts)?;
            self.base.sync(plain, false)?;
        }
        Ok(())
    }

    /// The parts of the plain file of which bytes are in a log, or are to be zeros: a sparse file may have as many parts as
    /// there are numbers.
    fn find_parts(&self, seal: &Seal) -> Result<Vec<u64>> {
        let mut parts: Vec<u64> = Vec::new();
        let mut walk = Walk::new(0..seal.len);
        loop {
            let segments = self.container.find_next(self.base, &mut walk)?;
            if segments.is_empty() {
                debug_assert!(parts.is_sorted_by(|one, next| one < next), "parts overlap");
                return Ok(parts);
            }
            for Segment { file, source } in segments {
                debug_assert!(file.start < file.end && file.end <= seal.len);
                if matches!(source, Source::Plain | Source::Hole) {
                    continue;
                }
                let next = parts.last().map_or(0, |last| last + 1);
                let first = (file.start / seal.unit_bytes).max(next);
                parts.extend(first..file.end.div_ceil(seal.unit_bytes));
            }
        }
    }

    /// Brings what is in logs of a range of the file into the plain file. A thread reads, one batch ahead.
    fn copy_logs(&self, range: Range<u64>, plain: &B::File) -> Result<()> {
        std::thread::scope(|scope| {
            let (batches, read) = mpsc::sync_channel(0);
            let (used, unused) = mpsc::channel();
            let walk = Walk::new(range.clone());
            let reader = std::thread::Builder::new().name("firn-flatten".into());
            let reader = reader.spawn_scoped(scope, move || {
                let send = |batch| batches.send(batch).map_err(|_| Errno::CANCELED);
                self.read_batches(walk, &unused, &send)
            });
            let Ok(reader) = reader else {
                return self.copy_logs_alone(range, plain);
            };
            let write = |batch| self.write_batch(batch, plain, &used);
            let written = read.iter().try_for_each(write);
            // Otherwise the reader would wait for its next batch to be taken.
            drop(read);
            match reader.join() {
                Ok(outcome) => written.and(outcome),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// [`Self::copy_logs`] without a second thread.
    fn copy_logs_alone(&self, range: Range<u64>, plain: &B::File) -> Result<()> {
        let (used, unused) = mpsc::channel();
        let write = |batch| self.write_batch(batch, plain, &used);
        self.read_batches(Walk::new(range), &unused, &write)
    }

    /// Reads what is in logs along a walk. `unused` has memory of batches that were written.
    fn read_batches(
        &self,
        mut walk: Walk,
        unused: &Receiver<Vec<u8>>,
        send: &dyn Fn(Batch) -> Result<()>,
    ) -> Result<()> {
        loop {
            let segments = self.container.find_next(self.base, &mut walk)?;
            if segments.is_empty() {
                return Ok(());
            }
            let mut gathered = Vec::new();
            for segment in segments {
                match segment.source {
                    Source::Log { .. } => self.gather(segment, &mut gathered, unused, send)?,
                    Source::Zeros => send(Batch::Zeros(segment.file))?,
                    Source::Plain | Source::Hole => {}
                }
            }
            self.read_batch(&mut gathered, unused, send)?;
        }
    }

    /// Adds a segment to those that are copied at once, and reads what is enough.
    fn gather(
        &self,
        mut segment: Segment,
        gathered: &mut Vec<Segment>,
        unused: &Receiver<Vec<u8>>,
        send: &dyn Fn(Batch) -> Result<()>,
    ) -> Result<()> {
        while !segment.file.is_empty() {
            let room = room_in(gathered, segment.file.start);
            if room == 0 {
                self.read_batch(gathered, unused, send)?;
                continue;
            }
            gathered.push(segment.take_first(room));
        }
        Ok(())
    }

    /// Reads segments of logs that follow each other in the file.
    fn read_batch(
        &self,
        gathered: &mut Vec<Segment>,
        unused: &Receiver<Vec<u8>>,
        send: &dyn Fn(Batch) -> Result<()>,
    ) -> Result<()> {
        let gathered = std::mem::take(gathered);
        let (Some(first), Some(last)) = (gathered.first(), gathered.last()) else {
            return Ok(());
        };
        let start = first.file.start;
        let mut bytes = unused.try_recv().unwrap_or_default();
        let its_bytes = gathered.iter().map(|part| part.file.end - part.file.start);
        debug_assert_eq!(its_bytes.sum::<u64>(), last.file.end - start);
        bytes.resize((last.file.end - start) as usize, 0);
        self.container
            .read_segments(self.base, &gathered, &mut bytes)?;
        send(Batch::Bytes { start, bytes })
    }

    /// Writes a batch, and gives its memory back.
    fn write_batch(&self, batch: Batch, plain: &B::File, used: &Sender<Vec<u8>>) -> Result<()> {
        match batch {
            Batch::Zeros(file) => self.write_zeros(file, plain),
            Batch::Bytes { start, bytes } => {
                write_vectored(self.base, plain, vec![IoSlice::new(&bytes)], start)?;
                // The sync at the end of the unit has less to wait for.
                let end = start + bytes.len() as u64;
                self.base.advise(plain, start..end, PageAdvice::WriteOut);
                // The reader may have read the last one.
                let _ = used.send(bytes);
                Ok(())
            }
        }
    }

    /// As far as the plain file has bytes there.
    fn write_zeros(&self, file: Range<u64>, plain: &B::File) -> Result<()> {
        let end = file.end.min(self.base.attr_of_file_now(plain)?.size);
        let zeros = vec![0; COPY_BYTES.min(end.saturating_sub(file.start)) as usize];
        let mut start = file.start;
        while start < end {
            let len = (end - start).min(zeros.len() as u64);
            own::write_all(self.base, plain, &zeros[..len as usize], start)?;
            start += len;
        }
        Ok(())
    }

    /// Everything is in the plain file: it gets its length and its time ([`crate::times`]).
    fn finish(&self, seal: &Seal, inode: &B::Inode, plain: &B::File) -> Result<()> {
        // A file without writes keeps all of its times.
        if self.base.attr_of_file_now(plain)?.size != seal.len {
            self.base.set_len(plain, seal.len)?;
        }
        tag::clear(self.base, inode, &self.container.name)?;
        let last = self.last_time(&self.votes().names()?).unwrap_or(0);
        // Makes durable that the tag is gone, too.
        times::settle(self.base, self.votes().dir(), last, &|modified| {
            self.set_modified(inode, plain, modified)?;
            self.base.sync(plain, false)
        })
    }

    /// Gives the plain file its time. A refusal (firnd is not the owner) leaves it the time that it has.
    fn set_modified(&self, inode: &B::Inode, plain: &B::File, modified: Time) -> Result<()> {
        if self.base.attr_of_file_now(plain)?.mtime == modified {
            return Ok(());
        }
        let modified = SetTime::At(modified);
        match self.base.set_times(inode, SetTime::Keep, modified) {
            Err(Errno::PERM | Errno::ACCESS) => Ok(()),
            set => set,
        }
    }

    fn last_time(&self, names: &BTreeSet<String>) -> Option<u64> {
        times::last(names.iter().map(|name| name.as_bytes()))
    }

    /// Whether no host may begin to write any more.
    pub fn is_closing(&self) -> Result<bool> {
        let found = own::find(self.base, self.votes().dir(), OsStr::new(CLOSING))?;
        Ok(found.is_some())
    }

    /// Whether the plain file is the file.
    pub fn is_flat(&self) -> Result<bool> {
        let found = own::find(self.base, self.votes().dir(), OsStr::new(DONE_ALL))?;
        Ok(found.is_some())
    }

    /// Removes a container whose bytes are all in the plain file, unless another host is at it.
    pub fn remove(&self) -> Result<()> {
        self.ballot.remove_if_over()
    }
}

/// Bytes that a batch takes of a segment that begins at `start` in the file.
fn room_in(batch: &[Segment], start: u64) -> u64 {
    let (Some(first), Some(last)) = (batch.first(), batch.last()) else {
        return COPY_BYTES;
    };
    if last.file.end == start && batch.len() < COPY_PIECES {
        COPY_BYTES.saturating_sub(start - first.file.start)
    } else {
        0
    }
}

/// What says that a part is in the plain file.
pub(crate) fn done_name(part: u64) -> String {
    Unit::Part(part.to_string()).done_file()
}

/// Whether a name in a container says so of any part.
pub(crate) fn is_done_part(name: &str) -> bool {
    let part = name.strip_prefix(DONE);
    part.is_some_and(|part| part.parse::<u64>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::{Key, WriterId};

    fn segment(file: Range<u64>, position: u64) -> Segment {
        let writer = WriterId { host: 1, life: 1 };
        let key = Key {
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
        assert_eq!(room_in(&[], 7), COPY_BYTES);
        let batch = [segment(100..200, 0)];
        assert_eq!(room_in(&batch, 200), COPY_BYTES - 100);
        assert_eq!(room_in(&batch, 201), 0);
        let full = [segment(100..100 + COPY_BYTES, 0)];
        assert_eq!(room_in(&full, 100 + COPY_BYTES), 0);
        let many = vec![segment(0..1, 0); COPY_PIECES];
        assert_eq!(room_in(&many, 1), 0);
    }

    #[test]
    fn what_is_left_of_a_segment_goes_on_in_its_log() {
        let mut rest = segment(100..200, 5000);
        assert_eq!(rest.take_first(30), segment(100..130, 5000));
        assert_eq!(rest, segment(130..200, 5030));
        assert_eq!(rest.take_first(1000), segment(130..200, 5030));
        assert!(rest.file.is_empty());
    }
}
