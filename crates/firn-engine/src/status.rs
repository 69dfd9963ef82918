//! What the engine tells of itself.

use std::sync::atomic::Ordering;
use std::time::Instant;

use firn_backing::{Backing, is_below};
use firn_format::path::BytePath;
use firn_format::protocol::{FileStatus, LaneStatus, NumaNodeStatus, Rung, SpillStatus, Status};

use crate::Transferred;
use crate::engine::{ClosePolicy, DrainPolicy, Engine, FsyncPolicy};

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
        let files: Vec<_> = self.files.lock().values().cloned().collect();
        let mut held_bytes = 0;
        let mut held_files = 0;
        let mut cached_bytes = 0;
        let mut doors = 0;
        let mut oldest = None;
        for file in &files {
            let state = file.lock();
            if state.door.is_none() {
                state.assert_time(&self.arena);
            }
            held_bytes += state.pending;
            held_files += u64::from(state.pending > 0);
            cached_bytes += state.cache.bytes();
            doors += u64::from(state.door.is_some());
            assert_eq!(
                state.oldest.is_some(),
                state.pending > 0,
                "age of a file of {} bytes",
                state.pending
            );
            oldest = oldest.into_iter().chain(state.oldest).min();
        }
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        assert_eq!(get(&self.counters.held_bytes), held_bytes, "held bytes");
        assert_eq!(get(&self.counters.held_files), held_files, "held files");
        assert_eq!(
            get(&self.counters.cached_bytes),
            cached_bytes,
            "cached bytes"
        );
        assert_eq!(
            self.doors.load(Ordering::Relaxed),
            doors,
            "files with a door"
        );
        assert_eq!(
            self.door_files.lock().len() as u64,
            doors,
            "files with a door"
        );
        assert_eq!(
            self.queue.lock().oldest(),
            oldest,
            "the oldest pending byte"
        );
        self.assert_queue(&files);
        self.arena.assert_invariants();
    }

    /// Bytes that are pending.
    pub fn held_bytes(&self) -> u64 {
        self.ingest_all_published();
        self.counters.held_bytes.load(Ordering::Relaxed)
    }

    /// The engine's part of a mount's status; paths, rates and process are the daemon's. No figure asks for a lock
    /// of each file: they are counters.
    pub fn status(&self) -> Status {
        self.ingest_all_published();
        let c = &self.counters;
        let (door_files, door_leases) = self.door_counts();
        let now = Instant::now();
        let geometry = self.arena.geometry();
        let (active, retry_in, oldest) = {
            let queue = self.queue.lock();
            (queue.active as u32, queue.retry_in(), queue.oldest())
        };
        let spill = self.arena.spill_figures().map(|figures| SpillStatus {
            path: self.spill_path(),
            bytes: figures.bytes,
            used_bytes: figures.used_bytes,
            moved_bytes: figures.moved_bytes,
            moved_bytes_per_s: 0.0,
            failing: self.spill_fails() || self.arena.spill_fault().is_some(),
        });
        let numa_nodes =
            self.arena
                .numa_node_figures()
                .into_iter()
                .map(|numa_node| NumaNodeStatus {
                    numa_node: numa_node.id,
                    bytes: numa_node.bytes,
                    used_bytes: numa_node.used_bytes,
                    foreign_slabs: numa_node.foreign_slabs,
                });
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        Status {
            arena: self.arena.path().into(),
            uptime_s: now.duration_since(self.attached).as_secs_f64(),
            epoch: self.epoch,
            options: vec![
                format!(
                    "drain={}",
                    if self.options.drain == DrainPolicy::Eager {
                        "eager"
                    } else {
                        "demand"
                    }
                ),
                format!(
                    "close={}",
                    if self.options.close == ClosePolicy::Drain {
                        "drain"
                    } else {
                        "held"
                    }
                ),
                format!(
                    "fsync={}",
                    if self.options.fsync == FsyncPolicy::Durable {
                        "durable"
                    } else {
                        "held"
                    }
                ),
                format!("drain-age={}", self.options.drain_age.as_millis()),
                format!(
                    "passthrough={}",
                    if self.passthrough.load(Ordering::Relaxed) {
                        "on"
                    } else {
                        "off"
                    }
                ),
            ],
            arena_bytes: geometry.data_bytes(),
            arena_used_bytes: self.arena.used_bytes(),
            chunk_bytes: geometry.chunk_bytes,
            held_bytes: get(&c.held_bytes),
            held_files: get(&c.held_files),
            oldest_held_ms: oldest.map(|at| now.duration_since(at).as_millis() as u64),
            recovered_bytes: self.recovered_bytes,
            lost_file_bytes: self.lost_bytes(),
            open_files: self.handles.read().len() as u64,
            waiting_writers: get(&c.waiting_writers),
            ingest_bytes: get(&c.ingest_bytes),
            ingest_writes: get(&c.ingest_writes),
            drain_bytes: get(&c.drain_bytes),
            drain_writes: get(&c.drain_writes),
            drain_errors: get(&c.drain_errors),
            drain_decisions: c.drain_decisions.0.figures(),
            cancelled_bytes: get(&c.cancelled_bytes),
            cached_bytes: get(&c.cached_bytes),
            evicted_bytes: get(&c.evicted_bytes),
            read_bytes: get(&c.read_bytes),
            direct_files: door_files,
            direct_leases: door_leases,
            direct_errors: get(&c.door_errors),
            chunk_lists: get(&c.chunk_lists),
            spill,
            numa_nodes: numa_nodes.collect(),
            lanes: vec![LaneStatus {
                writers: active,
                retry_in_ms: retry_in.map(|d| d.as_millis() as u64),
                ..LaneStatus::default()
            }],
            errors: self.errors(now),
            ..Status::default()
        }
    }

    fn errors(&self, now: Instant) -> Vec<firn_format::protocol::ErrorStatus> {
        if self.recorded_errors.lock().is_empty() {
            return Vec::new();
        }
        let failing: Vec<BytePath> = self
            .files
            .lock()
            .values()
            .filter(|file| file.lock().pending > 0)
            .flat_map(|file| file.inode.paths())
            .map(BytePath::from)
            .collect();
        let spill = self.spill_fails().then(|| self.spill_path());
        self.recorded_errors
            .lock()
            .iter()
            .map(|recorded| {
                let mut status = recorded.status.clone();
                status.age_s = now.duration_since(recorded.last).as_secs_f64();
                // A lost file is pending for ever; any other while it has held bytes.
                status.pending = recorded.lost
                    || failing.contains(&status.path)
                    || spill.as_ref().is_some_and(|path| *path == status.path);
                status
            })
            .collect()
    }

    /// Forgets recorded errors; the data that they are about stays.
    pub fn clear_errors(&self) {
        self.recorded_errors.lock().retain(|recorded| recorded.lost);
    }

    /// Files with pending data at or below `path`.
    pub fn files_below(&self, path: &[u8]) -> Vec<FileStatus> {
        let files: Vec<_> = self.files.lock().values().cloned().collect();
        let mut out = Vec::new();
        self.ingest_all_published();
        for file in files {
            let (held_bytes, held_end, open, spilled, ending) = {
                let state = file.lock();
                let spilled = state
                    .extents
                    .iter()
                    .all(|(_, e)| self.arena.is_spilled(e.piece.slab.chunk));
                (
                    state.pending,
                    state.extents.end(),
                    !state.handles.is_empty(),
                    spilled,
                    state.ending,
                )
            };
            let paths = file.inode.paths();
            let Some(known) = paths.iter().find(|p| path.is_empty() || is_below(p, path)) else {
                continue;
            };
            let state = if held_bytes > 0 {
                if spilled { Rung::Spilled } else { Rung::Held }
            } else if file.inode.durable.load(Ordering::Acquire) {
                Rung::Durable
            } else {
                Rung::Drained
            };
            let path = known.as_slice().into();
            out.push(FileStatus {
                path,
                state,
                held_bytes,
                held_end,
                open,
                ending,
            });
        }
        out.sort_by(|a, b| a.path.cmp(&b.path));
        out
    }
}
