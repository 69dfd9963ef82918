//! What the engine tells of itself: its part of the status, whose table is in `firn_protocol::status`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use firn_backing::{Backing, is_below};
use firn_format::durability::DurabilityLevel;
use firn_format::record::Ending;
use firn_protocol::{ErrorStatus, LaneStatus, NumaNodeStatus, SpillStatus, Status};

use crate::Transferred;
use crate::engine::Engine;

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
        self.intake.ingest_all_published();
        Transferred {
            ingest_bytes: self.base.counters.ingest_bytes.load(Ordering::Relaxed),
            drain_bytes: self.base.counters.drain_bytes.load(Ordering::Relaxed),
            moved_bytes: self
                .base
                .arena
                .spill_figures()
                .map_or(0, |spill| spill.moved_bytes),
        }
    }

    /// Asserts that the counters are the sums that they stand for. To be called while nobody else uses the engine.
    pub fn assert_counters(&self) {
        let files = self.open_files.files.all();
        let mut cached_bytes = 0;
        let mut granted = 0;
        let mut oldest = None;
        for file in &files {
            let state = file.lock();
            if !state.direct.has_grant() {
                state.pending.assert_time(&self.base.arena);
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
            get(&self.base.counters.cached_bytes),
            cached_bytes,
            "cached bytes"
        );
        self.intake.grants.assert_files(granted);
        let oldest_queued = self
            .drain
            .figures()
            .iter()
            .filter_map(|lane| lane.oldest)
            .min();
        assert_eq!(oldest_queued, oldest, "the oldest pending byte");
        self.drain.assert_queues(&files);
        self.base.arena.assert_invariants();
    }

    /// Bytes that are pending.
    pub fn held_bytes(&self) -> u64 {
        self.intake.ingest_all_published();
        self.drain.held_bytes()
    }

    /// Bytes that were drained since the attach.
    pub fn drained_bytes(&self) -> u64 {
        self.base.counters.drain_bytes.load(Ordering::Relaxed)
    }

    /// Time that closes waited for the backing, each for itself.
    pub fn close_wait(&self) -> Duration {
        Duration::from_micros(self.base.counters.close_wait_us.load(Ordering::Relaxed))
    }

    /// The engine's part of a status; what only firnd knows is left out. The figures are counters, and need no lock of each
    /// file. Two things do: bytes by direct access are ingested first, which locks the files that have some, and recorded
    /// errors, where there are any, are compared with all files.
    pub fn figures(&self) -> Status {
        self.intake.ingest_all_published();
        let now = Instant::now();
        let geometry = self.base.arena.geometry();
        let counters = &self.base.counters;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let queues = self.drain.figures();
        let oldest = queues.iter().filter_map(|queue| queue.oldest).min();
        let lanes = queues.iter().zip(self.drain.lanes()).map(|(queue, lane)| {
            let held = &self.drain.queue(lane).held;
            let turn = queue.turn.as_ref();
            LaneStatus {
                writers: queue.active as u32,
                retry_seconds: queue.retry_in.map(|wait| wait.as_secs_f64()),
                queued_files: queue.files as u64,
                held_files: held.files(),
                held_bytes: held.bytes(),
                file: turn.map(|file| crate::FileIdentity::path(&*file.inode).into()),
                ..LaneStatus::default()
            }
        });
        let (kernel_copies_bytes, kernel_copies_max_bytes) =
            self.kernel_cache.kernel_copies.bytes();
        let direct_access = self.intake.grants.figures();
        Status {
            uptime_seconds: now.duration_since(self.attached).as_secs_f64(),
            epoch: self.epoch,
            arena_bytes: geometry.data_bytes(),
            arena_used_bytes: self.base.arena.used_bytes(),
            chunk_bytes: geometry.chunk_bytes,
            held_bytes: self.drain.held_bytes(),
            held_files: self.drain.held_files(),
            oldest_held_seconds: oldest.map(|at| now.duration_since(at).as_secs_f64()),
            recovered_bytes: self.recovered_bytes,
            lost_file_bytes: self.lost.bytes(),
            open_files: self.open_files.handles.len() as u64,
            waiting_writers: self.room.space.waiters.count(),
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
            close_wait_seconds: get(&counters.close_wait_us) as f64 / 1e6,
            kernel_copies_bytes,
            kernel_copies_max_bytes,
            direct_files: direct_access.files,
            direct_leases: direct_access.leases,
            direct_errors: direct_access.errors,
            chunk_lists: get(&counters.chunk_lists),
            chunk_list_bytes: get(&counters.chunk_list_bytes),
            spill: self.spill_status(),
            numa_nodes: self.numa_node_status(),
            lanes: lanes.collect(),
            errors: self.error_status(),
            ..Status::default()
        }
    }

    fn spill_status(&self) -> Option<SpillStatus> {
        let figures = self.base.arena.spill_figures()?;
        Some(SpillStatus {
            path: self.base.arena.superblock().spill_path.clone().into(),
            bytes: figures.bytes,
            used_bytes: figures.used_bytes,
            moved_bytes: figures.moved_bytes,
            failing: self.room.spill.fails() || self.base.arena.spill_fault().is_some(),
            ..SpillStatus::default()
        })
    }

    fn numa_node_status(&self) -> Vec<NumaNodeStatus> {
        let figures = self.base.arena.numa_node_figures();
        let status = figures.iter().map(|node| NumaNodeStatus {
            numa_node: node.id,
            bytes: node.bytes,
            used_bytes: node.used_bytes,
            foreign_slabs: node.foreign_slabs,
        });
        status.collect()
    }

    fn error_status(&self) -> Vec<ErrorStatus> {
        let errors = self.base.errors.list();
        if errors.is_empty() {
            return Vec::new();
        }
        let held: Vec<Vec<u8>> = self
            .open_files
            .files
            .all()
            .iter()
            .filter(|file| file.lock().pending.bytes() > 0)
            .flat_map(|file| file.inode.paths())
            .collect();
        let failing_spill = self
            .room
            .spill
            .fails()
            .then(|| self.base.arena.superblock().spill_path.clone());
        errors
            .into_iter()
            .map(|error| {
                // A lost file is pending for ever; any other while it has held bytes.
                let pending = error.is_about_lost_data
                    || held.contains(&error.path)
                    || failing_spill.as_ref() == Some(&error.path);
                ErrorStatus {
                    path: error.path.into(),
                    errno: error.errno.raw_os_error(),
                    message: error.message,
                    repeats: error.count,
                    age_seconds: error.last.elapsed().as_secs_f64(),
                    pending,
                }
            })
            .collect()
    }

    /// Forgets recorded errors; the data that they are about stays.
    pub fn clear_errors(&self) {
        self.base.errors.clear();
    }

    /// Files with pending data at or below `path`.
    pub fn files_below(&self, path: &[u8]) -> Vec<FileFigures> {
        let files = self.open_files.files.all();
        let mut out = Vec::new();
        self.intake.ingest_all_published();
        for file in files {
            let (held_bytes, held_end, open, pending_level, ending, changes) = {
                let state = file.lock();
                (
                    state.pending.bytes(),
                    state.pending.end(),
                    !state.opens.is_empty(),
                    state.level_of_pending(&self.base.arena),
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
            } else if self.tree.is_logged(&file.inode) {
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
