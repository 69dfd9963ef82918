//! What the engine tells of itself: figures, without the protocol that carries them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use firn_arena::NumaNodeFigures;
use firn_backing::{Backing, is_below};
use firn_format::durability::DurabilityLevel;
use firn_format::record::Ending;

use crate::Transferred;
use crate::engine::Engine;
use crate::errors::RecordedError;
use crate::grants::DirectAccessFigures;

/// State of a mount's engine; counters since the attach.
#[derive(Clone, Debug)]
pub struct Figures {
    /// Time since the attach.
    pub uptime: Duration,
    /// Lifetimes of firnd that this arena has seen, this one included.
    pub epoch: u64,
    /// Bytes of chunks.
    pub arena_bytes: u64,
    /// Bytes of slabs that are in use.
    pub arena_used_bytes: u64,
    /// Bytes of one chunk.
    pub chunk_bytes: u64,
    /// Bytes written by programs and not yet in the backing.
    pub held_bytes: u64,
    /// Files that have such bytes.
    pub held_files: u64,
    /// Age of the oldest of them.
    pub oldest_held: Option<Duration>,
    /// Bytes that were recovered at the attach.
    pub recovered_bytes: u64,
    /// Bytes whose file was not found at the attach.
    pub lost_file_bytes: u64,
    /// Files that programs have open.
    pub open_files: u64,
    /// Writers that wait for room.
    pub waiting_writers: u64,
    /// Bytes taken from programs.
    pub ingest_bytes: u64,
    /// Writes taken from programs.
    pub ingest_writes: u64,
    /// Bytes written to the backing.
    pub drain_bytes: u64,
    /// Write calls to the backing that succeeded.
    pub drain_writes: u64,
    /// Write calls to the backing that failed.
    pub drain_errors: u64,
    /// How often the drain decided what.
    pub drain_decisions: BTreeMap<String, u64>,
    /// Bytes that were overwritten or removed before they were drained.
    pub cancelled_bytes: u64,
    /// Drained bytes that are still in the arena.
    pub cached_bytes: u64,
    /// Drained bytes that left the arena to make room, or because somebody asked.
    pub evicted_bytes: u64,
    /// Bytes that programs read through the engine.
    pub read_bytes: u64,
    /// Bytes of held files of which the kernel may have a copy in its cache.
    pub kernel_copies_bytes: u64,
    /// The most that they may be.
    pub kernel_copies_bytes_max: u64,
    /// Direct access of processes to the arena.
    pub direct_access: DirectAccessFigures,
    /// Lists of chunks in use.
    pub chunk_lists: u64,
    /// Bytes in memory that they name; those that two of them name count twice.
    pub chunk_list_bytes: u64,
    /// The spill file, where there is one.
    pub spill: Option<SpillFigures>,
    /// NUMA nodes and their parts of the arena.
    pub numa_nodes: Vec<NumaNodeFigures>,
    /// Each lane, in the order of their indices.
    pub lanes: Vec<LaneFigures>,
    /// Errors not yet dealt with, the newest last.
    pub errors: Vec<ErrorFigures>,
}

/// Of the spill file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpillFigures {
    /// Its path.
    pub path: Vec<u8>,
    /// Bytes that it may hold.
    pub bytes: u64,
    /// Bytes of its slots in use.
    pub used_bytes: u64,
    /// Bytes that were moved to it.
    pub moved_bytes: u64,
    /// The last try to write to it failed, or it was found damaged.
    pub is_failing: bool,
}

/// Of one lane.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaneFigures {
    /// Writes under way.
    pub writers: usize,
    /// Time until a file that failed is tried again.
    pub retry_in: Option<Duration>,
    /// Files in line for a write.
    pub queued_files: usize,
    /// Files with pending bytes.
    pub held_files: u64,
    /// Those bytes.
    pub held_bytes: u64,
    /// In sequential order: the file that is being written.
    pub file: Option<Vec<u8>>,
}

/// A recorded error, and whether it is still about something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorFigures {
    /// The error.
    pub error: RecordedError,
    /// Its file has held bytes still.
    pub is_pending: bool,
}

/// One file that the engine has something to do with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileFigures {
    /// Path from the root of the mount.
    pub path: Vec<u8>,
    /// What all of its bytes survive.
    pub level: DurabilityLevel,
    /// Bytes that are not in the backing.
    pub held_bytes: u64,
    /// First byte after the last of them, 0 where there are none.
    pub held_end: u64,
    /// A program has it open.
    pub open: bool,
    /// Whether its writers closed it.
    pub ending: Ending,
    /// Another number after each change of its bytes or its length, and one that no other file of this engine has had.
    pub changes: u64,
}

impl<B: Backing> Engine<B> {
    /// Bytes that came in and that were drained since the attach, and that moved to the spill file.
    pub fn transferred(&self) -> Transferred {
        self.ingest_all_published();
        Transferred {
            ingest_bytes: self.counters.ingest_bytes.load(Ordering::Relaxed),
            drain_bytes: self.counters.drain_bytes.load(Ordering::Relaxed),
            moved_bytes: self
                .arena
                .spill_figures()
                .map_or(0, |spill| spill.moved_bytes),
        }
    }

    /// Asserts that the counters are the sums that they stand for. To be called while nobody else uses the engine.
    pub fn assert_counters(&self) {
        let files = self.files.all();
        let mut cached_bytes = 0;
        let mut granted = 0;
        let mut oldest = None;
        for file in &files {
            let state = file.lock();
            if !state.direct.has_grant() {
                state.pending.assert_time(&self.arena);
            }
            cached_bytes += state.cache.bytes();
            granted += u64::from(state.direct.has_grant());
            assert_eq!(
                state.drain.oldest().is_some(),
                !state.pending.is_empty(),
                "age of a file of {} bytes",
                state.pending.bytes()
            );
            oldest = oldest.into_iter().chain(state.drain.oldest()).min();
        }
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        assert_eq!(
            get(&self.counters.cached_bytes),
            cached_bytes,
            "cached bytes"
        );
        self.grants.assert_files(granted);
        let oldest_queued = self
            .drain
            .figures()
            .iter()
            .filter_map(|lane| lane.oldest)
            .min();
        assert_eq!(oldest_queued, oldest, "the oldest pending byte");
        self.drain.assert_queues(&files);
        self.arena.assert_invariants();
    }

    /// Bytes that are pending.
    pub fn held_bytes(&self) -> u64 {
        self.ingest_all_published();
        self.drain.held_bytes()
    }

    /// Bytes that were drained since the attach.
    pub fn drained_bytes(&self) -> u64 {
        self.counters.drain_bytes.load(Ordering::Relaxed)
    }

    /// All figures. None asks for a lock of each file: they are counters.
    pub fn figures(&self) -> Figures {
        self.ingest_all_published();
        let now = Instant::now();
        let geometry = self.arena.geometry();
        let counters = &self.counters;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let queues = self.drain.figures();
        let oldest = queues.iter().filter_map(|queue| queue.oldest).min();
        let lanes = queues
            .iter()
            .zip(self.drain.lanes())
            .map(|(queue, lane)| {
                let held = &self.drain.queue(lane).held;
                LaneFigures {
                    writers: queue.active,
                    retry_in: queue.retry_in,
                    queued_files: queue.files,
                    held_files: held.files(),
                    held_bytes: held.bytes(),
                    file: queue
                        .turn
                        .as_ref()
                        .map(|file| crate::FileIdentity::path(&*file.inode)),
                }
            })
            .collect();
        let (kernel_copies_bytes, kernel_copies_bytes_max) = self.kernel_copies.bytes();
        Figures {
            uptime: now.duration_since(self.attached),
            epoch: self.epoch,
            arena_bytes: geometry.data_bytes(),
            arena_used_bytes: self.arena.used_bytes(),
            chunk_bytes: geometry.chunk_bytes,
            held_bytes: self.drain.held_bytes(),
            held_files: self.drain.held_files(),
            oldest_held: oldest.map(|at| now.duration_since(at)),
            recovered_bytes: self.recovered_bytes,
            lost_file_bytes: self.lost.bytes(),
            open_files: self.handles.len() as u64,
            waiting_writers: self.space.waiters.count(),
            ingest_bytes: get(&counters.ingest_bytes),
            ingest_writes: get(&counters.ingest_writes),
            drain_bytes: get(&counters.drain_bytes),
            drain_writes: get(&counters.drain_writes),
            drain_errors: get(&counters.drain_errors),
            drain_decisions: counters.drain_decisions.0.figures(),
            cancelled_bytes: get(&counters.cancelled_bytes),
            cached_bytes: get(&counters.cached_bytes),
            evicted_bytes: get(&counters.evicted_bytes),
            read_bytes: get(&counters.read_bytes),
            kernel_copies_bytes,
            kernel_copies_bytes_max,
            direct_access: self.grants.figures(),
            chunk_lists: get(&counters.chunk_lists),
            chunk_list_bytes: get(&counters.chunk_list_bytes),
            spill: self.spill_figures(),
            numa_nodes: self.arena.numa_node_figures(),
            lanes,
            errors: self.error_figures(),
        }
    }

    fn spill_figures(&self) -> Option<SpillFigures> {
        let figures = self.arena.spill_figures()?;
        Some(SpillFigures {
            path: self.arena.superblock().spill_path.clone(),
            bytes: figures.bytes,
            used_bytes: figures.used_bytes,
            moved_bytes: figures.moved_bytes,
            is_failing: self.spill.fails() || self.arena.spill_fault().is_some(),
        })
    }

    fn error_figures(&self) -> Vec<ErrorFigures> {
        let errors = self.errors.list();
        if errors.is_empty() {
            return Vec::new();
        }
        let held: Vec<Vec<u8>> = self
            .files
            .all()
            .iter()
            .filter(|file| file.lock().pending.bytes() > 0)
            .flat_map(|file| file.inode.paths())
            .collect();
        let failing_spill = self
            .spill
            .fails()
            .then(|| self.arena.superblock().spill_path.clone());
        errors
            .into_iter()
            .map(|error| {
                // A lost file is pending for ever; any other while it has held bytes.
                let is_pending = error.is_about_lost_data
                    || held.contains(&error.path)
                    || failing_spill.as_ref() == Some(&error.path);
                ErrorFigures { error, is_pending }
            })
            .collect()
    }

    /// Forgets recorded errors; the data that they are about stays.
    pub fn clear_errors(&self) {
        self.errors.clear();
    }

    /// Files with pending data at or below `path`.
    pub fn files_below(&self, path: &[u8]) -> Vec<FileFigures> {
        let files = self.files.all();
        let mut out = Vec::new();
        self.ingest_all_published();
        for file in files {
            let (held_bytes, held_end, open, pending_level, ending, changes) = {
                let state = file.lock();
                (
                    state.pending.bytes(),
                    state.pending.end(),
                    !state.opens.is_empty(),
                    state.level_of_pending(&self.arena),
                    state.opens.ending(),
                    state.changes,
                )
            };
            let paths = file.inode.paths();
            let Some(known) = paths.iter().find(|p| path.is_empty() || is_below(p, path)) else {
                continue;
            };
            let level = if held_bytes > 0 {
                pending_level
            } else if self.is_logged(&file.inode) {
                DurabilityLevel::Logged
            } else if file.inode.is_durable() {
                DurabilityLevel::Durable
            } else {
                DurabilityLevel::Drained
            };
            let path = known.clone();
            out.push(FileFigures {
                path,
                level,
                held_bytes,
                held_end,
                open,
                ending,
                changes,
            });
        }
        out.sort_by(|a, b| a.path.cmp(&b.path));
        out
    }
}
