//! What to write to the backing next, and what becomes of it.
//!
//! Files stand in a queue, first in, first out. A file is in it when a run of its pending bytes is
//! long enough for a write, when someone waits for it, when its data is old, or when the arena is
//! short of room. [`Engine::pick`] takes the next run of the next file; contiguous extents of several
//! slabs become one vectored write.
//!
//! Invariants
//! * A file stands in `ready` once while `queued` is set in its state, which is set with it, under the file's lock, and
//!   cleared by whoever has taken it from there.
//! * `active` counts the files that were taken from `ready` and are looked at, and the jobs that are not completed: so
//!   the ranges in flight of all files, but for those that are being picked.
//! * `oldest` has what the state of each file with pending bytes says, and nothing else.
//! * A file that failed is in `retry` at its time.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io::IoSlice;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use firn_arena::{PieceRef, Place};
use firn_backing::lock::MutexGuard;
use firn_backing::{Access, Backing, Errno, SetTime};
use firn_format::path::BytePath;
use firn_format::protocol::ErrorStatus;
use firn_format::record::Record;
use thin_vec::ThinVec;

use crate::engine::{Decision, DrainPolicy, Engine, RecordedError};
use crate::extents::Extent;
use crate::file::{BackingFile, Failure, File, FileState, Waiter};

/// Most parts of one vectored write (`UIO_MAXIOV`).
const PARTS_MAX: usize = 1024;
/// First wait before a failed file is tried again; it doubles each time.
pub(crate) const RETRY_FIRST: Duration = Duration::from_millis(100);
/// Longest wait.
pub(crate) const RETRY_MAX: Duration = Duration::from_secs(30);
/// Errors that `firn status` remembers.
const RECORDED_ERRORS_MAX: usize = 64;
/// Void ranges of a file before the first look whether they can be forgotten.
const VOIDS_KEPT: usize = 8;

/// Files to drain.
pub(crate) struct Queue<B: Backing> {
    ready: VecDeque<Arc<File<B>>>,
    retry: Vec<(Instant, Arc<File<B>>)>,
    aging: VecDeque<(Instant, Weak<File<B>>)>,
    pub(crate) active: usize,
    /// When the oldest pending byte of each file was written, about, with the file's address.
    oldest: BTreeSet<(Instant, usize)>,
}

impl<B: Backing> Queue<B> {
    pub(crate) fn new() -> Self {
        Self {
            ready: VecDeque::new(),
            retry: Vec::new(),
            aging: VecDeque::new(),
            active: 0,
            oldest: BTreeSet::new(),
        }
    }
    /// Lets a file stand in line. It does not yet.
    fn push(&mut self, file: Arc<File<B>>) {
        const LOOKED_AT: usize = 32;
        let stands = |known: &Arc<File<B>>| Arc::ptr_eq(known, &file);
        debug_assert!(
            !self.ready.iter().rev().take(LOOKED_AT).any(stands),
            "a file stands in line twice"
        );
        self.ready.push_back(file);
    }
    /// The first one in line, to be looked at until [`Queue::done`].
    fn pop(&mut self) -> Option<Arc<File<B>>> {
        let file = self.ready.pop_front()?;
        self.active += 1;
        Some(file)
    }
    fn done(&mut self) {
        assert!(self.active > 0, "more was completed than picked");
        self.active -= 1;
    }
    /// Looks at a file again at `when`.
    pub(crate) fn note_age(&mut self, when: Instant, file: &Arc<File<B>>) {
        self.aging.push_back((when, Arc::downgrade(file)));
    }
    pub(crate) fn retry_in(&self) -> Option<Duration> {
        let next = self.retry.iter().map(|(at, _)| *at).min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }
    /// When the oldest pending byte of all was written.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.oldest.first().map(|(at, _)| *at)
    }
    fn next_wake(&self) -> Option<Instant> {
        let retry = self.retry.iter().map(|(at, _)| *at).min();
        let age = self.aging.front().map(|(at, _)| *at);
        retry.into_iter().chain(age).min()
    }
}

/// What a drain thread shall do.
pub enum Pick<B: Backing> {
    /// This I/O.
    Job(Job<B>),
    /// Nothing now; look again after `retry`, or when woken.
    Idle {
        /// Time to the next retry or age limit.
        retry: Option<Duration>,
    },
}

struct Part {
    extent: Extent,
    offset: u64,
}

/// One write to the backing.
pub struct Job<B: Backing> {
    file: Arc<File<B>>,
    parts: Vec<Part>,
    /// Where the parts are, and their bytes; valid while the slabs are pinned, that is until the job is
    /// completed. The mapping outlives the job: the engine owns it.
    places: Vec<(Place, usize)>,
    range: Range<u64>,
}

/// Bytes written before the end or the error.
pub struct Outcome {
    /// Bytes that reached the backing.
    pub written: u64,
    /// Calls that did something.
    pub writes: u64,
    /// Why it stopped early.
    pub error: Option<Errno>,
    /// The error is that of the spill file.
    pub unreadable: bool,
}

/// The spilled parts of a job.
struct Loaded {
    /// Their bytes; empty for a part in memory.
    spilled: Vec<Vec<u8>>,
    /// Bytes of all parts, those in memory too, before the first that cannot be read.
    bytes: u64,
    error: Option<Errno>,
}

impl<B: Backing> Job<B> {
    /// Offset in the file.
    pub fn offset(&self) -> u64 {
        self.range.start
    }
    /// Bytes.
    pub fn len(&self) -> u64 {
        self.range.end - self.range.start
    }
    /// Never: a job has bytes.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Does the write: one vectored call, more where the backing takes less at once. Opens the file if need be.
    pub fn execute(&self, engine: &Engine<B>) -> Outcome {
        let mut outcome = Outcome {
            written: 0,
            writes: 0,
            error: None,
            unreadable: false,
        };
        let target = match engine.writer(&self.file) {
            Ok(target) => target,
            Err(errno) => {
                return Outcome {
                    error: Some(errno),
                    ..outcome
                };
            }
        };
        let loaded = self.load();
        while outcome.written < loaded.bytes {
            let slices = self.slices(&loaded.spilled, outcome.written);
            match engine
                .backing
                .write_at(&target.file, &slices, self.range.start + outcome.written)
            {
                Ok(0) => {
                    outcome.error = Some(Errno::IO);
                    break;
                }
                Ok(n) => {
                    outcome.written += n as u64;
                    outcome.writes += 1;
                }
                Err(Errno::INTR) => {}
                Err(errno) => {
                    outcome.error = Some(errno);
                    break;
                }
            }
        }
        if outcome.error.is_none() && loaded.error.is_some() {
            outcome.error = loaded.error;
            outcome.unreadable = true;
        }
        outcome
    }

    /// Reads what is spilled, up to the first part that cannot be read.
    fn load(&self) -> Loaded {
        let mut loaded = Loaded {
            spilled: Vec::new(),
            bytes: 0,
            error: None,
        };
        for (place, len) in &self.places {
            let part = match place {
                Place::Memory(_) => Ok(Vec::new()),
                Place::Spill(file, at) => {
                    let mut part = vec![0; *len];
                    file.read(*at, &mut part).map(|()| part)
                }
                Place::Nowhere => Err(Errno::IO),
            };
            match part {
                Ok(part) => loaded.spilled.push(part),
                Err(errno) => {
                    loaded.error = Some(errno);
                    break;
                }
            }
            loaded.bytes += *len as u64;
        }
        loaded
    }

    fn slices<'a>(&'a self, spilled: &'a [Vec<u8>], skip: u64) -> Vec<IoSlice<'a>> {
        let mut skip = skip as usize;
        let mut slices = Vec::with_capacity(self.places.len());
        for ((place, len), part) in self.places.iter().zip(spilled) {
            if skip >= *len {
                skip -= len;
                continue;
            }
            let bytes = match place {
                // SAFETY: the slab is pinned until the job is completed, and bytes in flight are not
                // overwritten in place.
                Place::Memory(address) => unsafe {
                    std::slice::from_raw_parts(address.add(skip), len - skip)
                },
                _ => &part[skip..],
            };
            slices.push(IoSlice::new(bytes));
            skip = 0;
        }
        slices
    }
}

impl<B: Backing> Engine<B> {
    /// The next write, if there is one. `lane`: index of the I/O server, 0 as long as there is one.
    pub fn pick(&self, _lane: usize) -> Pick<B> {
        loop {
            // Each time round: while a file was looked at that has nothing to drain, somebody may have begun to
            // wait for room, and have left it to this thread.
            self.wake_writers();
            let Some(file) = self.next_file() else {
                let wake = self.queue.lock().next_wake();
                return Pick::Idle {
                    retry: wake.map(|at| at.saturating_duration_since(Instant::now())),
                };
            };
            let mut state = file.lock();
            assert!(state.queued, "a file was in line and does not know");
            state.queued = false;
            if let Some(job) = self.choose(&file, &mut state) {
                drop(state);
                self.counters.drain_decisions.count(Decision::Picked);
                let bytes = job.range.end - job.range.start;
                tracing::debug!(path = %file.shown(), offset = job.range.start, bytes, "drain: picked");
                return Pick::Job(job);
            }
            let told = self.fail_unreadable_file(&file, &mut state);
            drop(state);
            for waiter in told {
                (waiter.done)(Err(Errno::IO));
            }
            self.queue.lock().done();
        }
    }

    /// Asserts the invariants of the queue. To be called while nobody else uses the engine.
    pub(crate) fn assert_queue(&self, files: &[Arc<File<B>>]) {
        let queue = self.queue.lock();
        let ready = queue.ready.clone();
        let oldest = queue.oldest.clone();
        let active = queue.active;
        let retry: Vec<_> = queue
            .retry
            .iter()
            .map(|(at, file)| (*at, Arc::as_ptr(file)))
            .collect();
        drop(queue);
        let mut inflight = 0;
        let mut aged = BTreeSet::new();
        for file in files {
            let stands = ready
                .iter()
                .filter(|known| Arc::ptr_eq(known, file))
                .count();
            let state = file.lock();
            assert_eq!(
                stands,
                usize::from(state.queued),
                "times that a file stands in line"
            );
            inflight += state.inflight.len();
            aged.extend(state.oldest.map(|at| (at, Arc::as_ptr(file) as usize)));
            if let Some(failure) = state.failure {
                let waits = retry.contains(&(failure.retry_at, Arc::as_ptr(file)));
                assert!(
                    waits || failure.retry_at <= Instant::now(),
                    "nobody tries a file again"
                );
            }
        }
        assert_eq!(active, inflight, "jobs that are not completed");
        assert_eq!(oldest, aged, "ages of files");
    }

    fn next_file(&self) -> Option<Arc<File<B>>> {
        let now = Instant::now();
        let mut aged = Vec::new();
        let mut queue = self.queue.lock();
        let (due, later) = std::mem::take(&mut queue.retry)
            .into_iter()
            .partition(|(at, _)| *at <= now);
        queue.retry = later;
        while queue.aging.front().is_some_and(|(at, _)| *at <= now) {
            aged.extend(queue.aging.pop_front().and_then(|(_, weak)| weak.upgrade()));
        }
        drop(queue);
        let due: Vec<(Instant, Arc<File<B>>)> = due;
        for (_, file) in due {
            self.counters.drain_decisions.count(Decision::Retried);
            tracing::debug!(path = %file.shown(), "drain: retried");
            let mut state = file.lock();
            self.enqueue(&file, &mut state);
        }
        for file in aged {
            self.age(&file, now);
        }
        self.queue.lock().pop()
    }

    fn age(&self, file: &Arc<File<B>>, now: Instant) {
        let mut state = file.lock();
        state.aging = false;
        self.ingest_published(file, &mut state);
        let Some(oldest) = state.oldest else {
            if state.door.is_some() {
                self.note_age(file, &mut state, now + self.options.drain_age);
            }
            return;
        };
        let due = oldest + self.options.drain_age;
        if due > now {
            self.note_age(file, &mut state, due);
            return;
        }
        self.force(file, &mut state);
        self.set_oldest(file, &mut state, Some(now));
        self.note_age(file, &mut state, now + self.options.drain_age);
    }

    /// Looks at a file again at `when`, if that is not to be done already.
    pub(crate) fn note_age(&self, file: &Arc<File<B>>, state: &mut FileState<B>, when: Instant) {
        if !std::mem::replace(&mut state.aging, true) {
            self.queue.lock().note_age(when, file);
        }
    }

    /// Notes when the oldest pending byte of a file was written; `None`: it has none.
    pub(crate) fn set_oldest(
        &self,
        file: &Arc<File<B>>,
        state: &mut FileState<B>,
        at: Option<Instant>,
    ) {
        if state.oldest == at {
            return;
        }
        let address = Arc::as_ptr(file) as usize;
        let before = std::mem::replace(&mut state.oldest, at);
        let mut queue = self.queue.lock();
        if let Some(before) = before {
            queue.oldest.remove(&(before, address));
        }
        if let Some(at) = at {
            queue.oldest.insert((at, address));
        }
    }

    /// Puts a file into the queue, unless it waits for its retry.
    pub(crate) fn enqueue(&self, file: &Arc<File<B>>, state: &mut FileState<B>) {
        let waits = state.failure.is_some_and(|f| f.retry_at > Instant::now());
        if state.queued || state.pending == 0 || waits {
            return;
        }
        state.queued = true;
        self.queue.lock().push(Arc::clone(file));
        self.wake_drain();
    }

    /// Drains all that a file has pending now, however little.
    pub(crate) fn force(&self, file: &Arc<File<B>>, state: &mut FileState<B>) {
        state.force_to = state
            .extents
            .iter()
            .map(|(_, e)| e.sequence)
            .max()
            .unwrap_or(0)
            .max(state.force_to);
        self.enqueue(file, state);
    }

    fn choose(&self, file: &Arc<File<B>>, state: &mut FileState<B>) -> Option<Job<B>> {
        self.freeze_published(file, state);
        if state.exclusive
            || state.pending == 0
            || state.inflight.len() >= self.options.file_writes_max
        {
            return None;
        }
        let parts = self.next_run(state)?;
        let range = parts[0].offset..parts.last().map_or(0, |p| p.offset + p.extent.len);
        let places = parts
            .iter()
            .map(|p| {
                self.arena.pin(p.extent.piece.slab);
                let len = p.extent.len as usize;
                (
                    self.arena
                        .place(p.extent.piece.slab, p.extent.position, len as u32),
                    len,
                )
            })
            .collect();
        state.inflight.push(range.clone());
        state.cursor = range.end;
        // Its sequence is about to be used to cut: later bytes need a later one.
        state.tail = None;
        self.enqueue(file, state);
        Some(Job {
            file: Arc::clone(file),
            parts,
            places,
            range,
        })
    }

    /// The next run of contiguous extents that is worth a write, from the cursor on and round.
    fn next_run(&self, state: &FileState<B>) -> Option<Vec<Part>> {
        self.next_run_from(state, state.cursor)
            .or_else(|| self.next_run_from(state, 0))
    }

    fn next_run_from(&self, state: &FileState<B>, start: u64) -> Option<Vec<Part>> {
        let max = self.options.drain_write_bytes_max;
        let mut run: Vec<Part> = Vec::new();
        let mut bytes = 0;
        let mut forced = false;
        for (offset, extent) in state.extents.from(start) {
            let range = offset..offset + extent.len;
            let joins = run.last().is_none_or(|p| p.offset + p.extent.len == offset);
            let fits = run.len() < PARTS_MAX && bytes + extent.len <= max;
            let busy =
                state.is_inflight(&range) || !self.arena.is_readable(extent.piece.slab.chunk);
            if !run.is_empty() && (!joins || !fits || busy) {
                if forced || self.is_worth_a_write(bytes) {
                    return Some(run);
                }
                run.clear();
                (bytes, forced) = (0, false);
            }
            if busy {
                continue;
            }
            bytes += extent.len;
            forced |= extent.sequence <= state.force_to;
            run.push(Part { extent, offset });
        }
        (!run.is_empty() && (forced || self.is_worth_a_write(bytes))).then_some(run)
    }

    /// Whether a run of so many bytes goes to the backing though nobody asked for it.
    fn is_worth_a_write(&self, bytes: u64) -> bool {
        self.options.drain == DrainPolicy::Eager && bytes >= self.options.drain_write_bytes_min
    }

    /// The backing file for writing, opened if need be.
    pub(crate) fn writer(&self, file: &File<B>) -> std::result::Result<Arc<BackingFile<B>>, Errno> {
        let open = file.lock().writer.clone();
        if let Some(writer) = open {
            return Ok(writer);
        }
        self.close_excess_files();
        let opened = self.with_descriptor(|| {
            let object = &self.object(&file.inode)?;
            match self.backing.open(object, Access::ReadWrite) {
                Ok(file) => Ok(BackingFile {
                    file,
                    access: Access::ReadWrite,
                }),
                Err(Errno::ACCESS | Errno::PERM) => {
                    let file = self.backing.open(object, Access::Write)?;
                    Ok(BackingFile {
                        file,
                        access: Access::Write,
                    })
                }
                Err(errno) => Err(errno),
            }
        })?;
        self.open_files.note();
        Ok(file.keep_writer(opened))
    }

    /// Takes the outcome of a job in.
    pub fn complete(&self, job: Job<B>, outcome: Outcome) {
        let Job {
            file, parts, range, ..
        } = job;
        let counters = &self.counters;
        if outcome.written > 0 {
            counters.drain_decisions.count(Decision::Written);
            let bytes = outcome.written;
            tracing::debug!(path = %file.shown(), offset = range.start, bytes, "drain: written");
        }
        counters
            .drain_bytes
            .fetch_add(outcome.written, Ordering::Relaxed);
        counters
            .drain_writes
            .fetch_add(outcome.writes, Ordering::Relaxed);
        let mut state = file.lock();
        let before = state.pending;
        state.inflight.retain(|r| *r != range);
        let written = range.start..range.start + outcome.written;
        let mut error = outcome.error;
        if !written.is_empty() {
            if !self.remove_drained(&mut state, &parts, written) {
                // The journal is full: tried again later, like any other failure.
                error = error.or(Some(Errno::NOSPC));
            }
            file.inode.data_unsynced.store(true, Ordering::Release);
        }
        for part in &parts {
            self.arena.unpin(part.extent.piece.slab);
        }
        let mut told = ThinVec::new();
        match error {
            // A failure of another part stays until everything is drained: it must not go untold.
            None => self.enqueue(&file, &mut state),
            Some(errno) => {
                counters.drain_errors.fetch_add(1, Ordering::Relaxed);
                self.schedule_retry(&file, &mut state, errno, outcome.unreadable);
                told = std::mem::take(&mut state.waiters);
                if let Some(failure) = &mut state.failure {
                    failure.told |= !told.is_empty();
                }
            }
        }
        self.count_held(before, state.pending);
        let satisfied = self.finish_drained(&file, &mut state);
        if error.is_some() {
            // The next write tells the program, and only those through the kernel can.
            self.revoke(&file, &mut state);
        }
        file.io_ended();
        let done = state.pending == 0;
        let cached = !state.cache.is_empty();
        drop(state);
        if done {
            self.close_if_unused(&file);
        }
        if cached {
            self.note_cached(&file);
            if done {
                self.confirm_cache(&file);
            }
        }
        self.queue.lock().done();
        for waiter in satisfied {
            (waiter.done)(Ok(()));
        }
        for waiter in told {
            (waiter.done)(Err(error.unwrap_or(Errno::IO)));
        }
        self.drop_if_unused(&file);
        self.close_excess_files();
        self.wake_writers();
        self.signal_progress();
    }

    /// These bytes are in the backing: they are not pending any more. False where the journal could
    /// not take that in: they stay pending and are written again, slow but never wrong.
    fn remove_drained(
        &self,
        state: &mut FileState<B>,
        parts: &[Part],
        written: Range<u64>,
    ) -> bool {
        let mut gone: Vec<(u64, Extent)> = Vec::new();
        for part in parts {
            let end = (part.offset + part.extent.len).min(written.end);
            for (offset, extent) in state.extents.within(part.offset..end.max(part.offset)) {
                // A newer write over the same bytes has its own piece and stays.
                if extent.piece == part.extent.piece {
                    gone.push((offset, extent));
                }
            }
        }
        // Does any piece stay with a part pending? Then the journal must say what is void, or recovery
        // would take the drained part of it for pending.
        let mut taken: HashMap<PieceRef, u64> = HashMap::new();
        for (_, extent) in &gone {
            *taken.entry(extent.piece).or_default() += extent.len;
        }
        let mut partial = state.partial;
        for (piece, bytes) in &taken {
            let used = state.pieces.get(piece).expect("an extent's piece is known");
            let before = used.live < used.len;
            let after = used.live > *bytes;
            partial = partial + usize::from(after && !before) - usize::from(before && !after);
        }
        let partial = partial > 0;
        if partial && let Some(file) = state.bound {
            let sequence = parts.iter().map(|p| p.extent.sequence).max().unwrap_or(0);
            let record = Record::Void {
                file,
                offset: written.start,
                len: written.end - written.start,
                sequence,
            };
            if self.journal.lock().append(&record).is_err() {
                return false;
            }
            state.voids += 1;
        }
        // Older pieces die first: after a crash between two of them the newer one is still there and
        // covers the older, which must not come back over what was drained.
        gone.sort_by_key(|(_, extent)| extent.sequence);
        if gone.iter().map(|(_, extent)| extent.len).sum::<u64>() == state.pending {
            // No piece will tell it any more, and the backing has the time of the drain until it is set there.
            self.record_time(state);
        }
        for (offset, extent) in gone {
            state
                .extents
                .remove(offset..offset + extent.len, &mut |_, e| {
                    e.piece == extent.piece
                });
            match self.options.drain {
                DrainPolicy::Eager => state.retire(&self.arena, extent.piece, extent.len),
                DrainPolicy::Demand => {
                    state.settle_piece(&self.arena, extent.piece, extent.len);
                    state
                        .cache
                        .insert(&self.arena, &self.counters.cached_bytes, offset, extent);
                }
            }
        }
        state.check();
        self.forget_voids(state);
        true
    }

    /// A file that is written and drained for ever, and never has nothing pending, would fill the
    /// journal with what is void.
    fn forget_voids(&self, state: &mut FileState<B>) {
        // The search is paid for by as many drains. A client's piece may have bytes that were not taken in.
        if state.voids < VOIDS_KEPT.max(state.pieces.len() / 16) || state.door.is_some() {
            return;
        }
        let (Some(file), Some(oldest)) = (
            state.bound,
            state.extents.iter().map(|(_, e)| e.sequence).min(),
        ) else {
            return;
        };
        let record = Record::VoidsPassed {
            file,
            sequence: oldest.saturating_sub(1),
        };
        if self.journal.lock().append_end(&record).is_ok() {
            state.voids = 0;
        }
    }

    /// After a change of what is pending: who waited for it, and what ends with the last byte.
    ///
    /// Lets go of the lock while the backing works. Whoever comes meanwhile leaves the rest, its own waiters
    /// too, to the caller that was first.
    pub(crate) fn finish_drained(
        &self,
        file: &Arc<File<B>>,
        state: &mut MutexGuard<'_, FileState<B>>,
    ) -> ThinVec<Waiter> {
        if state.settling {
            return ThinVec::new();
        }
        while state.pending == 0 {
            self.set_oldest(file, state, None);
            state.fresh = 0;
            state.force_to = 0;
            state.failure = None;
            let drained = file.inode.data_unsynced.load(Ordering::Acquire);
            let Some(mtime) = state.mtime.take().filter(|_| drained) else {
                self.unbind(state);
                break;
            };
            // The backing stamped the drain; programs saw the time of their write. A refusal (not the
            // owner) leaves the backing's time.
            state.settling = true;
            let _ = state.unlocked(|| {
                let object = self.object(&file.inode)?;
                self.backing
                    .set_times(&object, SetTime::Keep, SetTime::At(mtime))
            });
            state.settling = false;
            file.io_ended();
        }
        state.take_satisfied_waiters()
    }

    pub(crate) fn schedule_retry(
        &self,
        file: &Arc<File<B>>,
        state: &mut FileState<B>,
        errno: Errno,
        unreadable: bool,
    ) {
        let now = Instant::now();
        let earlier = state.failure.filter(|failure| failure.retry_at > now);
        if let Some(failure) = &mut state.failure
            && earlier.is_some()
        {
            // Another write of the same try: it waits for the same next one.
            (failure.errno, failure.told) = (errno, false);
        }
        let count = state.failure.map_or(0, |f| f.count) + u32::from(earlier.is_none());
        let wait = RETRY_FIRST
            .saturating_mul(1 << (count - 1).min(16))
            .min(RETRY_MAX);
        if earlier.is_none() {
            let retry_at = now + wait;
            state.failure = Some(Failure {
                errno,
                told: false,
                count,
                retry_at,
            });
            self.queue.lock().retry.push((retry_at, Arc::clone(file)));
        }
        self.counters.drain_decisions.count(Decision::Waits);
        let path = file.inode.paths().into_iter().next().unwrap_or_default();
        let what = if unreadable {
            "read from the spill file"
        } else {
            "write to the backing"
        };
        let wait_ms = wait.as_millis() as u64;
        tracing::warn!(path = %file.shown(), %errno, count, wait_ms, what, "drain failed; the data is kept and tried again");
        self.record_error(
            path.into(),
            errno,
            format!("{what} failed: {errno}; the data is kept and tried again"),
        );
    }

    pub(crate) fn record_error(&self, path: BytePath, errno: Errno, message: String) {
        let mut recorded_errors = self.recorded_errors.lock();
        let errno = errno.raw_os_error();
        if let Some(known) = recorded_errors
            .iter_mut()
            .find(|t| t.status.path == path && t.status.errno == errno)
        {
            known.status.count += 1;
            known.last = Instant::now();
            return;
        }
        if recorded_errors.len() == RECORDED_ERRORS_MAX {
            recorded_errors.remove(0);
        }
        let status = ErrorStatus {
            path,
            errno,
            message,
            count: 1,
            age_s: 0.0,
            pending: true,
        };
        recorded_errors.push(RecordedError {
            status,
            last: Instant::now(),
            lost: false,
        });
    }

    /// Makes room: gives back slabs that hold nothing; if no drain is under way, drains the file that
    /// holds most. Tells waiting writers when nothing can be drained.
    pub(crate) fn reclaim(&self) {
        {
            let queue = self.queue.lock();
            if queue.active > 0 || !queue.ready.is_empty() {
                return;
            }
        }
        self.end_all_doors();
        if self.options.drain == DrainPolicy::Demand {
            return self.reclaim_on_demand();
        }
        let files: Vec<Arc<File<B>>> = self.files.lock().values().cloned().collect();
        let now = Instant::now();
        let mut best: Option<(u64, Arc<File<B>>)> = None;
        let mut errno = None;
        for file in files {
            let state = file.lock();
            if state.pending == 0 {
                continue;
            }
            match state.failure {
                Some(failure) if failure.retry_at > now => errno = Some(failure.errno),
                _ if best.as_ref().is_none_or(|(most, _)| state.pending > *most) => {
                    let pending = state.pending;
                    drop(state);
                    best = Some((pending, file));
                }
                _ => {}
            }
        }
        self.give_back_leases(best.as_ref().map(|(_, file)| file));
        if let Some((_, file)) = best {
            let mut state = file.lock();
            self.force(&file, &mut state);
        } else if !self.space_freed.load(Ordering::Acquire) && !self.note_room() {
            // Everything that is held waits for a backing that refuses it.
            self.refuse_space(errno.unwrap_or(Errno::NOSPC));
        }
    }

    /// Seals the leases that hold nothing, and those of `file`.
    fn give_back_leases(&self, file: Option<&Arc<File<B>>>) {
        for lease in std::mem::take(&mut *self.parked.lock()) {
            self.arena.seal(lease);
        }
        let handles: Vec<_> = self.handles.read().values().cloned().collect();
        for handle in handles {
            let Some(mut slot) = handle.lease.try_lock() else {
                continue;
            };
            let give_back = slot.as_ref().is_some_and(|lease| {
                self.arena.is_idle(lease)
                    || file.is_some_and(|file| Arc::ptr_eq(file, &handle.file))
            });
            if give_back && let Some(lease) = slot.take() {
                self.arena.seal(lease);
            }
        }
    }

    /// Makes room where nothing drains unasked: drained bytes are dropped. What is not drained stays, and
    /// who waits is told that the arena is full.
    fn reclaim_on_demand(&self) {
        self.give_back_leases(None);
        self.evict_for(firn_format::slab::Class::Small);
        if !self.space_freed.load(Ordering::Acquire) && !self.note_room() {
            self.refuse_space(Errno::NOSPC);
        }
    }

    /// Tells those who wait for a tree that something happened.
    pub(crate) fn signal_progress(&self) {
        *self.progress.0.lock() += 1;
        self.progress.1.notify_all();
    }
}
