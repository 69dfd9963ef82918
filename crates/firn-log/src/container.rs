//! A container: the logs and indexes of all hosts for one file. A *log* has the bytes that a host wrote.
//!
//! A container is a directory. A file gets another one, its next *generation*, when a host writes after the last one
//! was closed. Each host appends bytes to its own data logs in it, and to its own index, which says what the bytes are.
//! Parts of an index are also stored sorted by file offset, as tables ([`crate::table`]).
//!
//! Parts
//! * `view`: what this host has read of all indexes.
//! * `refresh`: reads what other hosts added to their indexes.
//! * `read`, `ahead`: read bytes from logs.
//! * `sorting`: makes tables.
//!
//! Promises
//! * A host sees its own write when the write returns. Other hosts see it after their next [`Container::refresh`].
//! * All hosts find the same bytes, in whatever order they read the indexes ([`crate::resolve`]).
//! * A reader never gets bytes that differ from the bytes written, for example of a log that lost its end at a power
//!   failure. The reader gets an error instead.

mod ahead;
mod read;
mod refresh;
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

pub(crate) use self::read::UnreadableRange;

use self::ahead::ReadAhead;
use self::view::{IndexState, View};
use crate::frame::{Change, Cut};
use crate::names::Writer;
use crate::resolve::{LayersInRange, Segment, WriterId};
use crate::run::Piece;
use crate::seal::{CLOSING, Seal};
use crate::table::{BlockCache, TableError, TableResult};
use crate::times::{self, LastRecord, Record};
use crate::writer::{Appended, OwnLog};

/// Smallest step of a [`Walk`], which goes through a range of the file in steps. A step is not made shorter than this,
/// however many pieces lie in it.
const WALK_BYTES_MIN: u64 = 4096;
/// First step of a search that may stop before the end of its range; each further step is twice as long.
const FIRST_STEP_BYTES: u64 = 16 << 10;
/// Maximum number of rebuilds of the view (what this host has read of all indexes) in one call. Each rebuild rejects at
/// least one damaged table, and a container has fewer tables than this.
const REBUILDS_MAX: usize = 1000;

/// Why a change of a container failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// The container is sealed, or is about to be. The change may not count, so it must go to the next generation
    /// (container).
    #[error("the container is sealed")]
    Sealed,
    /// A call of the backing failed.
    #[error("{0}")]
    Failed(#[from] Errno),
}

/// Result of a change of a container.
pub type ChangeResult = std::result::Result<(), ChangeError>;

/// One container, as this host sees it.
pub struct Container<B: Backing> {
    /// Identifies the container among all containers that this process has opened.
    instance_id: u64,
    /// The directory of the container.
    pub(crate) dir: B::Inode,
    /// Name of that directory.
    pub(crate) name: String,
    /// Name of this host.
    pub(crate) host: String,
    /// Bounded memory for indexes and read-ahead.
    memory: Arc<Memory>,
    /// Selects the lane of this host's files, where the backing has lanes ([`crate::turn`]).
    turn: u64,
    /// What this host has read of the indexes of all hosts.
    view: Mutex<View<B>>,
    /// This host's own logs in the container.
    own_log: Mutex<OwnLogState<B>>,
    /// Signals that a thread has finished the creation of this host's logs.
    own_log_created: Condvar,
    /// Whether a thread is sorting an index of the container.
    is_sorting: AtomicBool,
    /// Whether the last refresh found that all bytes are in the plain file.
    was_seen_flat: AtomicBool,
    /// The fault that the last refresh found. A lag of the backing may be its cause.
    fault: Mutex<Option<String>>,
    /// The last known record of the file's modification time.
    last_time: Mutex<Option<LastRecord>>,
    /// Number of the last refresh that found changes of other hosts ([`next_change`]).
    last_change: AtomicU64,
    /// Epoch of this host's next changes.
    epoch: AtomicU64,
    /// Bytes that this host has written to logs since it opened the container.
    own_bytes: AtomicU64,
}

/// Memory for indexes and read-ahead, shared by all containers of a mount.
pub struct Memory {
    blocks: BlockCache,
    ahead: ReadAhead,
    /// Bound on the bytes of table blocks. All other limits are fractions of it.
    bytes: u64,
}

/// Shares of the memory for table blocks, as divisors of its bytes. They bound the unsorted bytes of an index, and the
/// pieces in one step of a walk.
const SORT_SHARE: u64 = 128;
const FINAL_SORT_SHARE: u64 = 512;
const FOREIGN_SORT_SHARE: u64 = 32;
const PIECES_SHARE: u64 = 512;

impl Memory {
    /// Makes memory for at most `bytes` bytes of table blocks. Unsorted parts of indexes, and one call's needs, take a
    /// fraction of these bytes for each writing host.
    pub fn new(bytes: u64) -> Arc<Self> {
        let blocks = BlockCache::new(bytes);
        let ahead = ReadAhead::default();
        Arc::new(Self {
            blocks,
            ahead,
            bytes,
        })
    }

    /// Returns the number of unsorted bytes at which a host sorts its own index.
    fn own_sort_threshold(&self) -> u64 {
        self.bytes / SORT_SHARE
    }

    /// Returns the number of unsorted bytes at which a host sorts its own index when it ends writing. Fewer bytes cost
    /// readers little.
    fn final_sort_threshold(&self) -> u64 {
        self.bytes / FINAL_SORT_SHARE
    }

    /// Returns the number of unsorted bytes at which a host sorts the index of another host, which died or could not
    /// sort.
    fn foreign_sort_threshold(&self) -> u64 {
        self.bytes / FOREIGN_SORT_SHARE
    }

    /// Returns how many pieces one step of a [`Walk`] may hold in memory.
    fn pieces_max(&self) -> u64 {
        self.bytes / PIECES_SHARE
    }
}

/// Whether this host has logs in the container.
enum OwnLogState<B: Backing> {
    /// This host has not written.
    None,
    /// A thread is creating the logs. Other threads wait for it.
    Creating,
    Created(Arc<OwnLog<B>>),
}

/// Progress of a search through a range of the file, step by step, with bounded memory ([`Container::next_segments`]).
pub struct Walk {
    range: Range<u64>,
    /// Length of the next step in bytes.
    step: u64,
}

impl Walk {
    /// Makes a walk through `range` that tries to find all of it in the first step.
    pub fn new(range: Range<u64>) -> Self {
        let step = range.end.saturating_sub(range.start);
        Self {
            range,
            step: step.max(WALK_BYTES_MIN),
        }
    }

    /// Makes a walk through `range` with short first steps, for a reader that may stop early.
    pub(crate) fn with_short_steps(range: Range<u64>) -> Self {
        let step = FIRST_STEP_BYTES;
        Self { range, step }
    }

    /// Returns the range of the next step.
    fn next_range(&self) -> Range<u64> {
        let end = self.range.start.saturating_add(self.step);
        self.range.start..end.min(self.range.end)
    }

    /// Halves the next step, after a step of `bytes` bytes had too many pieces.
    fn halve_step(&mut self, bytes: u64) {
        self.step = (self.step.min(bytes) / 2).max(WALK_BYTES_MIN);
    }

    fn double_step(&mut self) {
        self.step = self.step.saturating_mul(2);
    }
}

/// Returns a number larger than all earlier results in this process.
///
/// The number is not counted by file or container. So a file that is flat for a while, or a directory that takes the
/// place of a removed one, never seems unchanged.
pub(crate) fn next_change() -> u64 {
    static CHANGES: AtomicU64 = AtomicU64::new(0);
    CHANGES.fetch_add(1, Ordering::AcqRel) + 1
}

impl<B: Backing> Container<B> {
    /// Opens the container `name` in the directory `dir` for `host`, and reads its indexes. The first `plain_bytes`
    /// bytes of the plain file count.
    pub fn open(
        backing: &B,
        dir: B::Inode,
        name: &str,
        host: &str,
        plain_bytes: u64,
        memory: &Arc<Memory>,
    ) -> Result<Self> {
        let container = Self::open_unread(dir, name, host, plain_bytes, memory);
        container.refresh_and_raise_epoch(backing)?;
        Ok(container)
    }

    /// Opens a container without reading its indexes.
    pub(crate) fn open_unread(
        dir: B::Inode,
        name: &str,
        host: &str,
        plain_bytes: u64,
        memory: &Arc<Memory>,
    ) -> Self {
        Self::with_view(dir, name, host, memory, View::new(plain_bytes))
    }

    /// Sets this host's turn, which selects the lane of its files.
    pub(crate) fn with_turn(self, turn: u64) -> Self {
        Self { turn, ..self }
    }

    /// Makes a container to which this host has not written, with a given view: what this host has read of the indexes.
    fn with_view(
        dir: B::Inode,
        name: &str,
        host: &str,
        memory: &Arc<Memory>,
        view: View<B>,
    ) -> Self {
        static OPENED: AtomicU64 = AtomicU64::new(0);
        Self {
            instance_id: OPENED.fetch_add(1, Ordering::Relaxed),
            dir,
            name: name.to_owned(),
            host: host.to_owned(),
            memory: Arc::clone(memory),
            turn: 0,
            view: Mutex::new(view),
            own_log: Mutex::new(OwnLogState::None),
            own_log_created: Condvar::new(),
            is_sorting: AtomicBool::new(false),
            was_seen_flat: AtomicBool::new(false),
            fault: Mutex::default(),
            last_time: Mutex::default(),
            last_change: AtomicU64::new(next_change()),
            epoch: AtomicU64::new(0),
            own_bytes: AtomicU64::new(0),
        }
    }

    /// Sets the length of the file below this container.
    pub(crate) fn set_plain_bytes(&self, bytes: u64) {
        self.view.lock().resolver.set_plain_bytes(bytes);
    }

    /// Returns a number that grows each time this host finds that other hosts have changed the file.
    pub fn changes_by_others(&self) -> u64 {
        self.last_change.load(Ordering::Acquire)
    }

    fn record_change_by_others(&self) {
        self.last_change.fetch_max(next_change(), Ordering::AcqRel);
    }

    /// Returns the length of the file in bytes, as of the last refresh and this host's own changes.
    pub fn len(&self) -> u64 {
        self.view.lock().resolver.len()
    }

    /// Returns whether the file has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Logs a fault and stores it for [`Container::take_fault`].
    fn record_fault(&self, fault: String) {
        tracing::debug!("{fault}");
        *self.fault.lock() = Some(fault);
    }

    /// Returns the last fault since the previous call of this function.
    pub(crate) fn take_fault(&self) -> Option<String> {
        self.fault.lock().take()
    }

    /// Returns the file's modification time, if the plain file has another one because it is being flattened.
    pub(crate) fn modified(&self) -> Option<Time> {
        match self.last_time.lock().as_ref()?.record {
            Record::Time(time) => Some(time),
            Record::End => None,
        }
    }

    /// Records `time` as the file's modification time. While the file is flattened, the plain file takes its time from
    /// these records ([`crate::times`]).
    pub(crate) fn add_time(&self, backing: &B, time: Time) -> Result<()> {
        let last_number = self.last_time_number();
        let last_record = times::append_time(backing, &self.dir, last_number, time)?;
        self.store_last_time(last_record);
        Ok(())
    }

    /// Returns the number of the last known time record.
    fn last_time_number(&self) -> Option<u64> {
        let last_record = self.last_time.lock();
        last_record.as_ref().map(|last| last.number)
    }

    /// Records that the container is removed, so that the time of the plain file counts.
    pub(crate) fn use_plain_time(&self) {
        self.store_last_time(LastRecord {
            // No later record takes the place of this one.
            number: u64::MAX,
            record: Record::End,
        });
    }

    /// Stores a time record, unless a later one is known.
    fn store_last_time(&self, record: LastRecord) {
        let mut last_record = self.last_time.lock();
        if last_record
            .as_ref()
            .is_none_or(|last| last.number < record.number)
        {
            *last_record = Some(record);
        }
    }

    /// Refreshes the container, and orders this host's later changes after all that other hosts have published.
    ///
    /// Called when the file is opened for writing, and after it was synced.
    pub fn refresh_and_raise_epoch(&self, backing: &B) -> Result<()> {
        self.refresh(backing)?;
        self.raise_epoch();
        Ok(())
    }

    /// Orders this host's later changes after all changes that this host has read from indexes.
    pub(crate) fn raise_epoch(&self) {
        let last_epoch = self.view.lock().last_epoch();
        let next_epoch = last_epoch.map_or(0, |last| last + 1);
        self.epoch.fetch_max(next_epoch, Ordering::AcqRel);
    }

    /// Returns the epoch of this host's next change.
    fn current_epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Appends `parts` to this host's log with one frame. The parts are not empty and do not overlap. After an error
    /// none of them counts.
    pub fn write(&self, backing: &B, parts: &[DataPart<'_>]) -> ChangeResult {
        let own_log = self.own_log(backing)?;
        let appended = own_log.write(backing, self.current_epoch(), parts)?;
        let bytes = parts.iter().map(DataPart::len).sum();
        self.own_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.add_appended(backing, &own_log, appended)
    }

    /// Returns how many bytes this host has written to logs since it opened the container.
    pub(crate) fn own_bytes(&self) -> u64 {
        self.own_bytes.load(Ordering::Relaxed)
    }

    /// Sets the length of the file, while other hosts may write. A shorter length is recorded as a cut, which hides
    /// only writes that this host has seen, and a longer one as a growth. If the file has that length already, nothing
    /// is recorded.
    pub fn set_len(&self, backing: &B, len: u64) -> ChangeResult {
        let seen = self.refresh_before_resize(backing)?;
        if len >= self.len() {
            return self.grow_seen(backing, len);
        }
        let own_log = self.own_log(backing)?;
        for part in (Cut { len, seen }).split() {
            self.append_change(backing, &own_log, Change::Cut(part))?;
        }
        match self.update_len(backing) {
            Err(TableError::Damaged) => Ok(self.rebuild_view(backing, None)?),
            updated => Ok(updated.map_err(Errno::from)?),
        }
    }

    /// Extends the file to at least `len` bytes, if it is shorter.
    pub fn grow(&self, backing: &B, len: u64) -> ChangeResult {
        self.refresh_before_resize(backing)?;
        self.grow_seen(backing, len)
    }

    /// Extends the file as [`Container::grow`] does, after the caller has refreshed the container.
    fn grow_seen(&self, backing: &B, len: u64) -> ChangeResult {
        if len <= self.len() {
            return Ok(());
        }
        let own_log = self.own_log(backing)?;
        self.append_change(backing, &own_log, Change::Grown(len))
    }

    /// Refreshes the container so that all earlier changes are seen, and returns how far each other host's index was
    /// read.
    ///
    /// A client may cache a listing for a moment, but lists again after its own change. So this host first makes a
    /// change: it touches a file.
    fn refresh_before_resize(&self, backing: &B) -> Result<BTreeMap<Writer, u64>> {
        own::force_fresh_listing(backing, &self.dir, &format!("look-{}", self.host))?;
        let offsets = self.refresh_until_stable(backing)?;
        self.raise_epoch();
        Ok(offsets)
    }

    /// Makes the bytes of `piece` zero, as far as the file reaches.
    pub fn zero(&self, backing: &B, piece: Piece) -> ChangeResult {
        let own_log = self.own_log(backing)?;
        self.append_change(backing, &own_log, Change::Zeroed(piece))
    }

    /// Appends a change without bytes in a log to this host's index, and adds it to the view.
    fn append_change(&self, backing: &B, own_log: &OwnLog<B>, change: Change) -> ChangeResult {
        let appended = own_log.append_change(backing, self.current_epoch(), change)?;
        self.add_appended(backing, own_log, appended)
    }

    /// Makes this host's changes durable and visible to other hosts, and reads what other hosts have published.
    pub fn sync(&self, backing: &B) -> Result<()> {
        self.sync_own(backing)?;
        self.refresh_and_raise_epoch(backing)
    }

    /// Makes this host's changes durable and visible to other hosts.
    pub(crate) fn sync_own(&self, backing: &B) -> Result<()> {
        if let Some(own_log) = self.existing_own_log() {
            let appended = own_log.sync(backing, self.current_epoch())?;
            if let Some(appended) = appended {
                self.add_to_view(&own_log, appended);
            }
        }
        Ok(())
    }

    /// Returns whether the last refresh found that all bytes are in the plain file.
    pub(crate) fn was_seen_flat(&self) -> bool {
        self.was_seen_flat.load(Ordering::Acquire)
    }

    /// Returns how many bytes of the file below this container count.
    pub(crate) fn visible_plain_bytes(&self) -> u64 {
        self.view.lock().resolver.visible_plain_bytes()
    }

    /// Returns the segments of the walk's next step, in order and without gaps. Empty at the end of the walk or of the
    /// file.
    pub fn next_segments(&self, backing: &B, walk: &mut Walk) -> Result<Vec<Segment>> {
        for _ in 0..REBUILDS_MAX {
            match self.try_next_segments(backing, walk) {
                Err(TableError::Damaged) => self.rebuild_view(backing, None)?,
                outcome => return Ok(outcome?),
            }
        }
        Err(Errno::IO)
    }

    /// Finds from where each byte of the file comes (a log, the plain file, a hole), for the next range of `walk`.
    /// Returns ranges with one source each. The list is empty at the end of the walk or of the file.
    ///
    /// First collects the *layers* of the range, which are groups of its pieces: those of recent changes from memory
    /// (the resolver), then those of older changes from sorted files (the tables). If there are too many pieces for the
    /// memory, tries again with half of the range. After a range with few pieces, the next one is twice as long.
    fn try_next_segments(&self, backing: &B, walk: &mut Walk) -> TableResult<Vec<Segment>> {
        loop {
            let mut range = walk.next_range();
            let pieces_max = self.memory.pieces_max();
            // The shortest step cannot be halved, so it may hold any number of pieces.
            let is_shortest_step = range.end - range.start <= WALK_BYTES_MIN;
            let pieces_max_of_step = if is_shortest_step {
                u64::MAX
            } else {
                pieces_max
            };
            let mut layers = LayersInRange::new(pieces_max_of_step);
            // `pieces_fit` becomes false when `layers` has the maximum number of pieces.
            let (length_changes, tables, mut pieces_fit) = {
                let view = self.view.lock();
                range.end = range.end.min(view.resolver.len());
                if range.start >= range.end {
                    return Ok(Vec::new());
                }
                let pieces_fit = view.resolver.collect(&range, &mut layers);
                let length_changes = view.resolver.length_changes();
                (length_changes, Arc::clone(&view.tables), pieces_fit)
            };
            for table in tables.iter() {
                if !pieces_fit {
                    break;
                }
                pieces_fit = table.collect(backing, &self.memory.blocks, &range, &mut layers)?;
            }
            if !pieces_fit {
                walk.halve_step(range.end - range.start);
                continue;
            }
            let has_few_pieces = layers.pieces() < pieces_max / 4;
            if has_few_pieces {
                walk.double_step();
            }
            walk.range.start = range.end;
            // Of layers that cover the same bytes, the newest counts.
            return Ok(length_changes.resolve(range, layers));
        }
    }

    /// Returns the seal, if the last refresh found one.
    pub fn seal(&self) -> Option<Arc<Seal>> {
        self.view.lock().seal.clone()
    }

    /// Returns how many bytes of an index are also in tables that are in use.
    pub(crate) fn sorted_end(&self, writer: &Writer) -> u64 {
        let view = self.view.lock();
        view.indexes
            .get(&writer.id())
            .map_or(0, IndexState::sorted_end)
    }

    /// Returns whether this host has written to the container.
    pub(crate) fn has_own_log(&self) -> bool {
        self.existing_own_log().is_some()
    }

    /// Returns this host's logs, if it has written.
    fn existing_own_log(&self) -> Option<Arc<OwnLog<B>>> {
        match &*self.own_log.lock() {
            OwnLogState::Created(own_log) => Some(Arc::clone(own_log)),
            OwnLogState::None | OwnLogState::Creating => None,
        }
    }

    /// Returns this host's logs in the container, and creates them at its first write. Other threads wait meanwhile.
    /// Fails if the container is sealed: no host may write to it any more.
    fn own_log(&self, backing: &B) -> std::result::Result<Arc<OwnLog<B>>, ChangeError> {
        if self.view.lock().seal.is_some() {
            return Err(ChangeError::Sealed);
        }
        let mut own = self.own_log.lock();
        loop {
            match &*own {
                OwnLogState::Created(own_log) => return Ok(Arc::clone(own_log)),
                OwnLogState::Creating => own.wait(&self.own_log_created),
                OwnLogState::None => {
                    *own = OwnLogState::Creating;
                    let created = own.unlocked(|| self.create_own_log(backing));
                    *own = match &created {
                        Ok(own_log) => OwnLogState::Created(Arc::clone(own_log)),
                        Err(_) => OwnLogState::None,
                    };
                    self.own_log_created.notify_all();
                    return Ok(created?);
                }
            }
        }
    }

    /// Creates logs and an index, the list of their changes, for a new life of this host. Lives are numbered, and this
    /// one follows the host's last life in the container.
    fn create_own_log(&self, backing: &B) -> Result<Arc<OwnLog<B>>> {
        let last_life = own::list(backing, &self.dir)?
            .iter()
            .filter_map(|(name, ..)| Writer::from_any_name(name))
            .filter(|writer| writer.host() == self.host)
            .map(|writer| writer.id().life)
            .max()
            .unwrap_or(0);
        let writer = Writer::new(&self.host, last_life + 1);
        let own_log = Arc::new(OwnLog::create(
            backing,
            &self.dir,
            writer.clone(),
            self.turn,
        )?);
        let is_own = true;
        let state = IndexState::new(writer.clone(), is_own);
        self.view.lock().indexes.insert(writer.id(), state);
        Ok(own_log)
    }

    /// Adds an appended frame to the view. Fails with [`ChangeError::Sealed`] if the seal may leave the frame out.
    ///
    /// Race: another host may seal the container meanwhile. That host puts `closing` before it measures the indexes. So
    /// a frame that was appended before `closing` appeared counts, also if its host was taken for dead.
    fn add_appended(&self, backing: &B, own_log: &OwnLog<B>, appended: Appended) -> ChangeResult {
        let is_closing = own::find(backing, &self.dir, OsStr::new(CLOSING))?.is_some();
        if is_closing || self.view.lock().seal.is_some() {
            return Err(ChangeError::Sealed);
        }
        let should_sort = self.add_to_view(own_log, appended);
        if should_sort {
            self.sort(backing, &own_log.writer, self.memory.own_sort_threshold());
        }
        Ok(())
    }

    /// Adds a frame that this host has appended to the view (what this host knows of all indexes). Returns whether this
    /// host's index has enough unsorted bytes to be sorted.
    fn add_to_view(&self, own_log: &OwnLog<B>, appended: Appended) -> bool {
        let Appended {
            frame,
            offset,
            bytes,
        } = appended;
        let id = own_log.writer.id();
        let mut view = self.view.lock();
        // With a seal, only the bytes that it names count, and the view is read anew.
        if view.seal.is_some() {
            return false;
        }
        view.add(id, offset, frame);
        let Some(index) = view.indexes.get_mut(&id) else {
            return false;
        };
        index.offset = index.offset.max(offset + bytes);
        index.should_sort(self.memory.own_sort_threshold())
    }

    /// Returns whether this process is writing the index of `writer`.
    fn is_own(&self, writer: WriterId) -> bool {
        let view = self.view.lock();
        view.indexes.get(&writer).is_some_and(|state| state.is_own)
    }
}
