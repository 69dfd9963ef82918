//! What the engine tells of itself.

use std::sync::atomic::Ordering;
use std::time::Instant;

use firn_backing::{Backing, is_below};
use firn_format::protocol::{FileStatus, LaneStatus, NodeStatus, Rung, SpillStatus, Status};

use crate::engine::{ClosePolicy, DrainPolicy, Engine, FsyncPolicy};

impl<B: Backing> Engine<B> {
    /// The engine's part of a mount's status; paths, rates and process are the daemon's.
    pub fn status(&self) -> Status {
        self.look_at_all();
        let c = &self.counters;
        let (door_files, door_leases) = self.door_counts();
        let now = Instant::now();
        let geometry = self.arena.geometry();
        let oldest = self.files.lock().values().filter_map(|f| f.lock().oldest).min();
        let (active, retry_in) = {
            let queue = self.queue.lock();
            (queue.active as u32, queue.retry_in())
        };
        let cached_bytes = self.files.lock().values().map(|file| file.lock().cache.bytes()).sum();
        let spill = self.arena.spill_figures().map(|figures| SpillStatus {
            path: self.spill_path(),
            bytes: figures.bytes,
            used_bytes: figures.used_bytes,
            moved_bytes: figures.moved_bytes,
            moved_bytes_per_s: 0.0,
            failing: self.spill_fails() || self.arena.spill_fault().is_some(),
        });
        let nodes = self.arena.node_figures().into_iter().map(|node| NodeStatus {
            node: node.id,
            bytes: node.bytes,
            used_bytes: node.used_bytes,
            foreign_slabs: node.foreign_slabs,
        });
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        Status {
            arena: self.arena.path().display().to_string(),
            uptime_s: now.duration_since(self.attached).as_secs_f64(),
            epoch: self.epoch,
            options: vec![
                format!(
                    "drain={}",
                    if self.options.drain == DrainPolicy::Eager { "eager" } else { "demand" }
                ),
                format!("close={}", if self.options.close == ClosePolicy::Drain { "drain" } else { "held" }),
                format!(
                    "fsync={}",
                    if self.options.fsync == FsyncPolicy::Durable { "durable" } else { "held" }
                ),
                format!("drain-age={}", self.options.drain_age.as_millis()),
                format!(
                    "passthrough={}",
                    if self.passthrough.load(Ordering::Relaxed) { "on" } else { "off" }
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
            cancelled_bytes: get(&c.cancelled_bytes),
            cached_bytes,
            evicted_bytes: get(&c.evicted_bytes),
            read_bytes: get(&c.read_bytes),
            door_files,
            door_leases,
            door_errors: get(&c.door_errors),
            chunk_lists: get(&c.chunk_lists),
            spill,
            nodes: nodes.collect(),
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
        let failing: Vec<String> = self
            .files
            .lock()
            .values()
            .filter(|file| file.lock().pending > 0)
            .flat_map(|file| file.node.paths())
            .map(|path| String::from_utf8_lossy(&path).into_owned())
            .collect();
        let spill = self.spill_fails().then(|| self.spill_path());
        self.troubles
            .lock()
            .iter()
            .map(|trouble| {
                let mut status = trouble.status.clone();
                status.age_s = now.duration_since(trouble.last).as_secs_f64();
                // A lost file is pending for ever; any other while it has held bytes.
                status.pending = trouble.lost
                    || failing.contains(&status.path)
                    || spill.as_ref().is_some_and(|path| *path == status.path);
                status
            })
            .collect()
    }

    /// Forgets recorded errors; the data that they are about stays.
    pub fn clear_errors(&self) {
        self.troubles.lock().retain(|trouble| trouble.lost);
    }

    /// Files with pending data at or below `path`.
    pub fn files_below(&self, path: &[u8]) -> Vec<FileStatus> {
        let files: Vec<_> = self.files.lock().values().cloned().collect();
        let mut out = Vec::new();
        self.look_at_all();
        for file in files {
            let (held_bytes, open, spilled, ending) = {
                let state = file.lock();
                let spilled = state.extents.iter().all(|(_, e)| self.arena.is_spilled(e.piece.slab.chunk));
                (state.pending, !state.handles.is_empty(), spilled, state.ending)
            };
            let paths = file.node.paths();
            let Some(known) = paths.iter().find(|p| path.is_empty() || is_below(p, path)) else {
                continue;
            };
            let state = if held_bytes > 0 {
                if spilled { Rung::Spilled } else { Rung::Held }
            } else if file.node.durable.load(Ordering::Acquire) {
                Rung::Durable
            } else {
                Rung::Drained
            };
            out.push(FileStatus {
                path: String::from_utf8_lossy(known).into_owned(),
                state,
                held_bytes,
                open,
                ending,
            });
        }
        out.sort_by(|a, b| a.path.cmp(&b.path));
        out
    }
}
