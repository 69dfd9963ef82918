//! The logs of all hosts for one file: a directory that each host appends to in files of its own.
//!
//! Promises
//! * What a host wrote is seen by its own reads when the write has returned, and by other hosts after they looked
//!   ([`Container::refresh`]).
//! * Whatever the order in which hosts look, they come to the same bytes ([`crate::resolve`]).
//! * Bytes that are not as they were written (a log that lost its end with the power) are an error to the reader, and
//!   never shown.

mod ahead;
mod look;
mod read;
mod sorting;
mod view;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use firn_backing::lock::Mutex;
use firn_backing::{Backing, DataPart, Errno, Result, Time};
use firn_hosts::own;
use parking_lot::Condvar;

pub(crate) use self::read::Unreadable;

use self::ahead::ReadAhead;
use self::view::{Tail, View};
use crate::frame::{Change, Cut};
use crate::names::Writer;
use crate::resolve::{Layers, Segment, WriterId};
use crate::run::Piece;
use crate::seal::{CLOSING, Seal};
use crate::table::{BlockCache, TableError, TableResult};
use crate::times::{self, Record};
use crate::writer::{Appended, OwnLog};

/// A range of at least this many bytes is found at once, whatever its pieces are.
const WALK_BYTES_MIN: u64 = 4096;
/// First step of a search that may stop before the end of its range; each further step is twice as long.
const FIRST_STEP_BYTES: u64 = 16 << 10;
/// A sorted index that is found to be damaged is read unsorted. Bound on those retries: there are fewer sorted indexes.
const TRIES_MAX: usize = 1000;

/// Why a change does not count, or may not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// What counts in the container is decided, or about to be, maybe without the change.
    #[error("the container is sealed")]
    Sealed,
    /// A call of the backing failed.
    #[error("{0}")]
    Failed(#[from] Errno),
}

/// Result of a change of a container.
pub type Changed = std::result::Result<(), ChangeError>;

/// See the module.
pub struct Container<B: Backing> {
    /// Among those that this process has opened.
    number: u64,
    pub(crate) dir: B::Inode,
    pub(crate) name: String,
    pub(crate) host: String,
    memory: Arc<Memory>,
    /// Says which lane this host's files go to, where there are lanes.
    turn: u64,
    view: Mutex<View<B>>,
    own: Mutex<OwnState<B>>,
    own_made: Condvar,
    is_sorting: AtomicBool,
    /// The last look found that all bytes are in the plain file.
    was_seen_flat: AtomicBool,
    /// Fault that the last look found; a backing that is behind may be the reason.
    fault: Mutex<Option<String>>,
    /// The last record of the file's time that this host knows of, and its number.
    time: Mutex<Option<(u64, Record)>>,
    /// The last [`next_change`] with which bytes were found that this host did not have before.
    news: AtomicU64,
    /// Epoch of what this host writes.
    epoch: AtomicU64,
    /// Bytes of the file that this host has written to logs since it opened the container.
    own_bytes: AtomicU64,
}

/// How much is in memory of indexes, of all containers that share it.
pub struct Memory {
    blocks: BlockCache,
    ahead: ReadAhead,
    bytes: u64,
}

impl Memory {
    /// With at most `bytes` bytes of sorted indexes. What is unsorted, and what one call needs, is a part of that for
    /// each host that writes.
    pub fn new(bytes: u64) -> Arc<Self> {
        let blocks = BlockCache::new(bytes);
        let ahead = ReadAhead::default();
        Arc::new(Self {
            blocks,
            ahead,
            bytes,
        })
    }

    /// A host sorts its index when this many bytes of it are unsorted.
    fn sort_bytes(&self) -> u64 {
        self.bytes / 128
    }

    /// What a host has unsorted when it ends writing is sorted from this size on: less costs readers little.
    fn sort_last_bytes(&self) -> u64 {
        self.bytes / 512
    }

    /// A host sorts another host's index when this many bytes of it are unsorted: that host died, or could not sort.
    fn sort_others_bytes(&self) -> u64 {
        self.bytes / 32
    }

    /// Pieces of a file that are found at once.
    fn pieces_max(&self) -> u64 {
        self.bytes / 512
    }
}

enum OwnState<B: Backing> {
    /// This host has written nothing.
    None,
    /// A thread is making its index.
    Making,
    Made(Arc<OwnLog<B>>),
}

/// Goes through the segments of a range with little memory ([`Container::find_next`]).
pub struct Walk {
    range: Range<u64>,
    /// Bytes that are found at once.
    step: u64,
}

impl Walk {
    /// Through `range`, as far as the file has it.
    pub fn new(range: Range<u64>) -> Self {
        let step = range.end.saturating_sub(range.start);
        Self {
            range,
            step: step.max(WALK_BYTES_MIN),
        }
    }

    /// Walks `range` with short first steps, for a reader that may not want all of it.
    pub(crate) fn in_steps(range: Range<u64>) -> Self {
        let step = FIRST_STEP_BYTES;
        Self { range, step }
    }

    fn part(&self) -> Range<u64> {
        let end = self.range.start.saturating_add(self.step);
        self.range.start..end.min(self.range.end)
    }
}

/// A number larger than all before, of all files: a file that is flat for a while, and a container with the number of an
/// earlier directory, never seem unchanged.
pub(crate) fn next_change() -> u64 {
    static CHANGES: AtomicU64 = AtomicU64::new(0);
    CHANGES.fetch_add(1, Ordering::AcqRel) + 1
}

impl<B: Backing> Container<B> {
    /// The container in the directory `dir` with this name, seen by `host`. The plain file has `base_bytes` that count.
    pub fn open(
        base: &B,
        dir: B::Inode,
        name: &str,
        host: &str,
        base_bytes: u64,
        memory: &Arc<Memory>,
    ) -> Result<Self> {
        let container = Self::open_unread(dir, name, host, base_bytes, memory);
        container.take_epoch(base)?;
        Ok(container)
    }

    /// Opens a container without reading it.
    pub(crate) fn open_unread(
        dir: B::Inode,
        name: &str,
        host: &str,
        base_bytes: u64,
        memory: &Arc<Memory>,
    ) -> Self {
        Self::unread(dir, name, host, memory, View::new(base_bytes))
    }

    /// Sets the turn, whose lane gets what this host writes.
    pub(crate) fn in_turn(self, turn: u64) -> Self {
        Self { turn, ..self }
    }

    fn unread(dir: B::Inode, name: &str, host: &str, memory: &Arc<Memory>, view: View<B>) -> Self {
        static OPENED: AtomicU64 = AtomicU64::new(0);
        Self {
            number: OPENED.fetch_add(1, Ordering::Relaxed),
            dir,
            name: name.to_owned(),
            host: host.to_owned(),
            memory: Arc::clone(memory),
            turn: 0,
            view: Mutex::new(view),
            own: Mutex::new(OwnState::None),
            own_made: Condvar::new(),
            is_sorting: AtomicBool::new(false),
            was_seen_flat: AtomicBool::new(false),
            fault: Mutex::default(),
            time: Mutex::default(),
            news: AtomicU64::new(next_change()),
            epoch: AtomicU64::new(0),
            own_bytes: AtomicU64::new(0),
        }
    }

    /// The file below has `bytes` bytes now.
    pub(crate) fn set_base(&self, bytes: u64) {
        self.view.lock().resolver.set_base(bytes);
    }

    /// Grows each time this host finds that others have changed the file.
    pub fn news(&self) -> u64 {
        self.news.load(Ordering::Acquire)
    }

    fn note_news(&self) {
        self.news.fetch_max(next_change(), Ordering::AcqRel);
    }

    /// Bytes of the file, as far as this host has looked.
    pub fn len(&self) -> u64 {
        self.view.lock().resolver.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn note_fault(&self, fault: String) {
        tracing::debug!("{fault}");
        *self.fault.lock() = Some(fault);
    }

    /// Fault found since the last call of this.
    pub(crate) fn take_fault(&self) -> Option<String> {
        self.fault.lock().take()
    }

    /// The file's modification time, where the plain file has another one because it is being flattened.
    pub(crate) fn modified(&self) -> Option<Time> {
        match *self.time.lock() {
            Some((_, Record::Time(time))) => Some(time),
            Some((_, Record::End)) | None => None,
        }
    }

    /// Records that the file was given a time. A record exists where the plain file takes its time from the container
    /// ([`crate::times`]).
    pub(crate) fn add_time(&self, base: &B, time: Time) -> Result<()> {
        let from = (*self.time.lock()).map(|(number, _)| number);
        let added = times::add(base, &self.dir, from, time)?;
        self.note_time(added.number, added.record);
        Ok(())
    }

    /// The container is gone: the plain file has the time of the file.
    pub(crate) fn end_time(&self) {
        self.note_time(u64::MAX, Record::End);
    }

    fn note_time(&self, number: u64, record: Record) {
        let mut known = self.time.lock();
        if known.is_none_or(|(last, _)| last < number) {
            *known = Some((number, record));
        }
    }

    /// What this host writes from now on is newer than all that others published until now. To be called when the file
    /// is opened for writing, and after it was synced.
    pub fn take_epoch(&self, base: &B) -> Result<()> {
        self.refresh(base)?;
        self.raise_epoch();
        Ok(())
    }

    /// What this host writes from now on is newer than all that it has read of indexes.
    pub(crate) fn raise_epoch(&self) {
        let last = self.view.lock().last_epoch();
        let next = last.map_or(0, |last| last + 1);
        self.epoch.fetch_max(next, Ordering::AcqRel);
    }

    /// Writes bytes that do not overlap and are not empty, with one frame. After an error none of them counts.
    pub fn write(&self, base: &B, parts: &[DataPart<'_>]) -> Changed {
        let own = self.own_log(base)?;
        let appended = own.write(base, self.epoch.load(Ordering::Acquire), parts)?;
        let bytes = parts.iter().map(DataPart::len).sum();
        self.own_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.add_own(base, &own, appended)
    }

    /// Bytes of the file that this host has written to logs since it opened the container.
    pub(crate) fn own_bytes(&self) -> u64 {
        self.own_bytes.load(Ordering::Relaxed)
    }

    /// Cuts the file, or makes it longer, beside what others write: what this host has not seen stays. Where the file has
    /// that length nothing becomes of it.
    pub fn set_len(&self, base: &B, len: u64) -> Changed {
        let seen = self.look_anew(base)?;
        if len >= self.len() {
            return self.grow_seen(base, len);
        }
        let own = self.own_log(base)?;
        for part in (Cut { len, seen }).split() {
            let appended = own.note(base, self.epoch.load(Ordering::Acquire), Change::Cut(part))?;
            self.add_own(base, &own, appended)?;
        }
        match self.settle_len(base) {
            Err(TableError::Damaged) => Ok(self.read_again(base, None)?),
            settled => Ok(settled.map_err(Errno::from)?),
        }
    }

    /// Makes the file at least `len` bytes long.
    pub fn grow(&self, base: &B, len: u64) -> Changed {
        self.look_anew(base)?;
        self.grow_seen(base, len)
    }

    /// [`Container::grow`] after a look at the indexes.
    fn grow_seen(&self, base: &B, len: u64) -> Changed {
        if len <= self.len() {
            return Ok(());
        }
        let own = self.own_log(base)?;
        let epoch = self.epoch.load(Ordering::Acquire);
        let appended = own.note(base, epoch, Change::Grown(len))?;
        self.add_own(base, &own, appended)
    }

    /// Sees all that was there when it is called, where listings lag too: after a change of its own a host lists anew. How
    /// much was read of the indexes of others.
    fn look_anew(&self, base: &B) -> Result<BTreeMap<Writer, u64>> {
        own::touch(base, &self.dir, &format!("look-{}", self.host))?;
        let seen = self.see_settled(base)?;
        self.raise_epoch();
        Ok(seen)
    }

    /// Makes bytes zero, as far as the file has them.
    pub fn zero(&self, base: &B, piece: Piece) -> Changed {
        let own = self.own_log(base)?;
        let change = Change::Zeroed(piece);
        let appended = own.note(base, self.epoch.load(Ordering::Acquire), change)?;
        self.add_own(base, &own, appended)
    }

    /// Makes what this host wrote durable and known to others, and sees what others wrote.
    pub fn sync(&self, base: &B) -> Result<()> {
        self.sync_own(base)?;
        self.take_epoch(base)
    }

    /// Makes what this host wrote durable and known to others.
    pub(crate) fn sync_own(&self, base: &B) -> Result<()> {
        if let Some(own) = self.made_own() {
            let appended = own.sync(base, self.epoch.load(Ordering::Acquire))?;
            if let Some(appended) = appended {
                self.note_appended(&own, appended);
            }
        }
        Ok(())
    }

    /// Whether the last look found that all bytes are in the plain file.
    pub(crate) fn was_seen_flat(&self) -> bool {
        self.was_seen_flat.load(Ordering::Acquire)
    }

    /// Bytes of the file below that count.
    pub(crate) fn base_end(&self) -> u64 {
        self.view.lock().resolver.base_end()
    }

    /// Where the next bytes of a walk are, in order and without gaps; nothing at its end or that of the file.
    pub fn find_next(&self, base: &B, walk: &mut Walk) -> Result<Vec<Segment>> {
        for _ in 0..TRIES_MAX {
            match self.find_part(base, walk) {
                Err(TableError::Damaged) => self.read_again(base, None)?,
                outcome => return Ok(outcome?),
            }
        }
        Err(Errno::IO)
    }

    /// Gives the segments of the next part of a walk; empty at its end. A part with more pieces than memory has room for is halved
    /// until it fits, and the next one is larger again.
    fn find_part(&self, base: &B, walk: &mut Walk) -> TableResult<Vec<Segment>> {
        loop {
            let mut range = walk.part();
            let pieces_max = self.memory.pieces_max();
            let mut layers = Layers::new(match range.end - range.start {
                // The smallest range cannot be halved: it has to fit.
                ..=WALK_BYTES_MIN => u64::MAX,
                _ => pieces_max,
            });
            let (outline, tables, mut fits) = {
                let view = self.view.lock();
                range.end = range.end.min(view.resolver.len());
                if range.start >= range.end {
                    return Ok(Vec::new());
                }
                let fits = view.resolver.collect(&range, &mut layers);
                (view.resolver.outline(), Arc::clone(&view.tables), fits)
            };
            for table in tables.iter() {
                fits = fits && table.collect(base, &self.memory.blocks, &range, &mut layers)?;
            }
            if !fits {
                walk.step = (walk.step.min(range.end - range.start) / 2).max(WALK_BYTES_MIN);
                continue;
            }
            if layers.pieces() < pieces_max / 4 {
                walk.step = walk.step.saturating_mul(2);
            }
            walk.range.start = range.end;
            return Ok(outline.paint(range, layers));
        }
    }

    /// What counts of each index, as far as this host has looked.
    pub fn seal(&self) -> Option<Arc<Seal>> {
        self.view.lock().seal.clone()
    }

    /// Bytes of an index that are in sorted ones which are used.
    pub(crate) fn covered(&self, writer: &Writer) -> u64 {
        let view = self.view.lock();
        view.tails.get(&writer.id()).map_or(0, Tail::covered)
    }

    /// Whether this host has written to it.
    pub(crate) fn has_own_log(&self) -> bool {
        self.made_own().is_some()
    }

    fn made_own(&self) -> Option<Arc<OwnLog<B>>> {
        match &*self.own.lock() {
            OwnState::Made(own) => Some(Arc::clone(own)),
            OwnState::None | OwnState::Making => None,
        }
    }

    /// This host's own logs, made if it has none.
    fn own_log(&self, base: &B) -> std::result::Result<Arc<OwnLog<B>>, ChangeError> {
        if self.view.lock().seal.is_some() {
            return Err(ChangeError::Sealed);
        }
        let mut own = self.own.lock();
        loop {
            match &*own {
                OwnState::Made(log) => return Ok(Arc::clone(log)),
                OwnState::Making => own.wait(&self.own_made),
                OwnState::None => {
                    *own = OwnState::Making;
                    let made = own.unlocked(|| self.make_own(base));
                    *own = match &made {
                        Ok(log) => OwnState::Made(Arc::clone(log)),
                        Err(_) => OwnState::None,
                    };
                    self.own_made.notify_all();
                    return Ok(made?);
                }
            }
        }
    }

    /// Begins a life of this host in the container.
    fn make_own(&self, base: &B) -> Result<Arc<OwnLog<B>>> {
        let names = own::list(base, &self.dir)?;
        let lives = names.iter().filter_map(|(name, ..)| Writer::of_any(name));
        let own_lives = lives.filter(|writer| writer.host() == self.host);
        let last = own_lives.map(|writer| writer.id().life).max().unwrap_or(0);
        let writer = Writer::new(&self.host, last + 1);
        let made = Arc::new(OwnLog::create(base, &self.dir, writer.clone(), self.turn)?);
        let tail = Tail::new(writer.clone(), true);
        self.view.lock().tails.insert(writer.id(), tail);
        Ok(made)
    }

    /// Takes what this host appended, unless what counts may have been decided without this frame. A sealing host puts
    /// `closing` before it looks how long indexes are: a frame that is there before `closing` counts, also that of a host
    /// that is taken for dead.
    fn add_own(&self, base: &B, own: &OwnLog<B>, appended: Appended) -> Changed {
        let is_closing = own::find(base, &self.dir, OsStr::new(CLOSING))?.is_some();
        if is_closing || self.view.lock().seal.is_some() {
            return Err(ChangeError::Sealed);
        }
        let is_due = self.note_appended(own, appended);
        if is_due {
            self.sort(base, &own.writer, self.memory.sort_bytes());
        }
        Ok(())
    }

    /// Takes what this host appended; returns whether enough is unsorted to be sorted.
    fn note_appended(&self, own: &OwnLog<B>, appended: Appended) -> bool {
        let Appended {
            frame,
            offset,
            bytes,
        } = appended;
        let id = own.writer.id();
        let mut view = self.view.lock();
        if view.seal.is_some() {
            return false;
        }
        view.add(id, offset, frame);
        let Some(tail) = view.tails.get_mut(&id) else {
            return false;
        };
        tail.offset = tail.offset.max(offset + bytes);
        tail.is_due(self.memory.sort_bytes())
    }

    fn is_own(&self, writer: WriterId) -> bool {
        let view = self.view.lock();
        view.tails.get(&writer).is_some_and(|tail| tail.is_own)
    }
}
