//! Statistics of the engine for the status of the mount, and of single files.
//!
//! Most of these numbers come from counters, so that a status does not lock each file. `firn_protocol::status`
//! describes all of them.
//!
//! Terms: data is *pending* while only the arena (shared memory) has it, and *drained* when the backing has it. In the
//! status, pending data is called *held*.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use firn_backing::{Backing, Kind, LaneIndex, is_below};
use firn_format::durability::DurabilityLevel;
use firn_format::record::Ending;
use firn_protocol::record::Bucket;
use firn_protocol::{ErrorStatus, LaneStatus, NumaNodeStatus, SpillStatus, Status};

use crate::Transferred;
use crate::counters::{Decision, RequestTimes};
use crate::drain::QueueFigures;
use crate::engine::Engine;
use crate::file::File;
use crate::names::Inode;

/// Facts about one file that differ from the backing's facts, because the engine has newer ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileFigures {
    /// Path from the root of the mount.
    pub path: Vec<u8>,
    /// Durability level of all bytes of the file.
    pub level: DurabilityLevel,
    /// Pending bytes, which are not in the backing.
    pub held_bytes: u64,
    /// Offset after the last pending byte; 0 if there is none.
    pub held_end: u64,
    /// Whether a program has the file open.
    pub open: bool,
    /// Whether the writers of the file closed it, have it open, or were killed.
    pub ending: Ending,
    /// Version number of the file's bytes and length. Each change sets a number that no file of this engine has had. 0
    /// if the file is not open and has no byte in the arena.
    pub changes: u64,
}

impl<B: Backing> Engine<B> {
    /// Returns the numbers of bytes that were accepted from programs, drained (written to the backing), and moved to
    /// the spill file since the engine's start.
    pub fn transferred(&self) -> Transferred {
        self.intake.ingest_all_published();
        Transferred {
            ingest_bytes: self.base.counters.ingest.bytes(),
            drain_bytes: self.base.counters.drain_bytes.load(Ordering::Relaxed),
            moved_bytes: self
                .base
                .arena
                .spill_figures()
                .map_or(0, |spill| spill.moved_bytes),
        }
    }

    /// Returns the counters from which the record of the run is made: sums since the start of the engine, and the bytes
    /// held now (in memory, not in the backing). `waiting_writers` is 0, as only the frontends have that number.
    pub fn activity(&self) -> Bucket {
        // Bytes that client processes have stored in the arena, without a request, count as written too.
        self.intake.ingest_all_published();
        let counters = &self.base.counters;
        let times = &counters.request_times;
        let microseconds = |time: Duration| time.as_micros() as u64;
        let spill = self.base.arena.spill_figures();
        Bucket {
            ingest_bytes: counters.ingest.bytes(),
            ingest_writes: counters.ingest.count(),
            drain_bytes: counters.drain_bytes.load(Ordering::Relaxed),
            drain_writes: counters.drain_writes.load(Ordering::Relaxed),
            read_bytes: counters.read_bytes.load(Ordering::Relaxed),
            spill_bytes: spill.map_or(0, |spill| spill.moved_bytes),
            write_us: microseconds(times.write.sum()),
            close_us: microseconds(times.close.sum()),
            fsync_us: microseconds(times.fsync.sum()),
            drain_us: microseconds(counters.drain_times.sum()),
            held_bytes: self.drain.pending_bytes(),
            waiting_writers: 0,
        }
    }

    /// Returns the number of writers that wait for room in the engine.
    pub fn waiting_writers(&self) -> u64 {
        self.room.space.waiters.count()
    }

    /// Returns the number of drains that failed since the attach.
    pub fn drain_errors(&self) -> u64 {
        self.base.counters.drain_errors.load(Ordering::Relaxed)
    }

    /// Returns how often, since the attach, writers that waited for room got an error.
    pub fn errors_given_up(&self) -> u64 {
        self.base
            .counters
            .drain_decisions
            .count_of(Decision::WritersFailed)
    }

    /// Returns whether a write to the backing failed and waits for its next try.
    pub fn waits_for_retry(&self) -> bool {
        self.drain
            .figures()
            .iter()
            .any(|lane| lane.retry_in.is_some())
    }

    /// Returns path, errno and text of the latest error.
    pub fn newest_error(&self) -> Option<(Vec<u8>, i32, String)> {
        let errors = self.base.errors.list().into_iter();
        let newest_error = errors.max_by_key(|error| error.last)?;
        let errno = newest_error.errno.raw_os_error();
        Some((newest_error.path, errno, newest_error.message))
    }

    /// Asserts that each counter equals the sum over the files that it represents. No other thread may use the engine
    /// meanwhile.
    pub fn assert_counters(&self) {
        let files = self.open_files.files.all();
        let mut cached_bytes = 0;
        let mut granted_files = 0;
        let mut oldest_write: Option<Instant> = None;
        for file in &files {
            let state = file.lock();
            if !state.direct.has_grant() {
                state.pending.assert_time(&self.base.arena);
            }
            cached_bytes += state.cache.bytes();
            granted_files += u64::from(state.direct.has_grant());
            assert_eq!(
                state.drain.oldest().is_some(),
                !state.pending.is_empty(),
                "age of a file of {} bytes",
                state.pending.bytes()
            );
            oldest_write = oldest_write.into_iter().chain(state.drain.oldest()).min();
        }
        let counted_bytes = self.base.counters.cached_bytes.load(Ordering::Relaxed);
        assert_eq!(counted_bytes, cached_bytes, "cached bytes");
        self.intake.grants.assert_files(granted_files);
        let queues = self.drain.figures();
        let oldest_queued = queues.iter().filter_map(|queue| queue.oldest).min();
        assert_eq!(oldest_queued, oldest_write, "the oldest pending byte");
        self.drain.assert_queues(&files);
        self.base.arena.assert_invariants();
    }

    /// Returns the number of pending bytes.
    pub fn held_bytes(&self) -> u64 {
        self.intake.ingest_all_published();
        self.drain.pending_bytes()
    }

    /// Returns the number of bytes that were drained since the attach.
    pub fn drained_bytes(&self) -> u64 {
        self.base.counters.drain_bytes.load(Ordering::Relaxed)
    }

    /// Returns the times of calls of programs, which the frontends count.
    pub fn request_times(&self) -> &Arc<RequestTimes> {
        &self.base.counters.request_times
    }

    /// Returns the time since the arena was attached.
    pub fn uptime(&self) -> Duration {
        self.attached_at.elapsed()
    }

    /// Returns the sum of the times that closes waited for the backing.
    pub fn close_wait(&self) -> Duration {
        Duration::from_micros(self.base.counters.close_wait_us.load(Ordering::Relaxed))
    }

    /// Returns the engine's part of a status. firnd adds its own figures.
    ///
    /// Most figures are counters, which need no lock of a file. Locks of files are taken in two cases: to ingest bytes
    /// of direct access, and to compare recorded errors with all files.
    pub fn figures(&self) -> Status {
        self.intake.ingest_all_published();
        let now = Instant::now();
        let geometry = self.base.arena.geometry();
        let counters = &self.base.counters;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let queues = self.drain.figures();
        let oldest_write = queues.iter().filter_map(|queue| queue.oldest).min();
        let lanes = queues
            .iter()
            .zip(self.drain.lanes())
            .map(|(queue, lane)| self.lane_status(queue, lane));
        let direct_access = self.intake.grants.figures();
        let synced = self.tree.names.count_synced();
        Status {
            uptime_seconds: now.duration_since(self.attached_at).as_secs_f64(),
            epoch: self.epoch,
            arena_bytes: geometry.data_bytes(),
            arena_used_bytes: self.base.arena.used_bytes(),
            chunk_bytes: geometry.chunk_bytes,
            held_bytes: self.drain.pending_bytes(),
            held_files: self.drain.pending_files(),
            oldest_held_seconds: oldest_write
                .map(|written| now.duration_since(written).as_secs_f64()),
            durable_files: synced.files,
            durable_bytes: synced.bytes,
            recovered_bytes: self.recovered_bytes,
            lost_file_bytes: self.lost.bytes(),
            open_files: self.open_files.handles.len() as u64,
            waiting_writers: self.room.space.waiters.count(),
            ingest_bytes: counters.ingest.bytes(),
            ingest_writes: counters.ingest.count(),
            ingest_write_bytes: counters.ingest.counts().into(),
            write_seconds: counters.request_times.write.counts().into(),
            close_seconds: counters.request_times.close.counts().into(),
            fsync_seconds: counters.request_times.fsync.counts().into(),
            drain_write_bytes: counters.drain_sizes.counts().into(),
            drain_seconds: counters.drain_times.counts().into(),
            drain_bytes: get(&counters.drain_bytes),
            drain_writes: get(&counters.drain_writes),
            drain_errors: get(&counters.drain_errors),
            drain_decisions: counters.drain_decisions.0.figures(),
            cancelled_bytes: get(&counters.cancelled_bytes),
            cached_bytes: get(&counters.cached_bytes),
            evicted_bytes: get(&counters.evicted_bytes),
            read_bytes: get(&counters.read_bytes),
            close_wait_seconds: get(&counters.close_wait_us) as f64 / 1e6,
            memory_file_bytes: self.base.arena.memory_file_figures().bytes,
            settled_bytes: self.room.settle.settled_bytes(),
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

    /// Returns the status of a lane (one I/O server), with the figures of its queue.
    fn lane_status(&self, queue: &QueueFigures<File<B>>, lane: LaneIndex) -> LaneStatus {
        let pending = &self.drain.queue(lane).pending_totals;
        let file_with_turn = queue.turn.as_ref();
        LaneStatus {
            writers: queue.active as u32,
            retry_seconds: queue.retry_in.map(|wait| wait.as_secs_f64()),
            queued_files: queue.files as u64,
            held_files: pending.files(),
            held_bytes: pending.bytes(),
            file: file_with_turn.map(|file| crate::FileIdentity::path(&*file.inode).into()),
            ..LaneStatus::default()
        }
    }

    /// Returns the status of the spill file; `None` if the mount has none.
    fn spill_status(&self) -> Option<SpillStatus> {
        let figures = self.base.arena.spill_figures()?;
        Some(SpillStatus {
            path: self.base.arena.superblock().spill_path.clone().into(),
            bytes: figures.bytes,
            used_bytes: figures.used_bytes,
            moved_bytes: figures.moved_bytes,
            failing: self.room.spill.has_failed() || self.base.arena.spill_fault().is_some(),
            ..SpillStatus::default()
        })
    }

    /// Returns the status of the arena's memory on each NUMA node.
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

    /// Returns the recorded errors, and for each whether its data is still pending (not in the backing).
    fn error_status(&self) -> Vec<ErrorStatus> {
        let errors = self.base.errors.list();
        if errors.is_empty() {
            return Vec::new();
        }
        let pending_paths = self.pending_paths();
        // An error of the spill file is recorded under the path of the spill file.
        let failed_spill_path = if self.room.spill.has_failed() {
            Some(self.base.arena.superblock().spill_path.clone())
        } else {
            None
        };
        let mut status = Vec::with_capacity(errors.len());
        for error in errors {
            // Data of a lost file remains until the user discards or restores it. Any other error matters while the
            // file has pending bytes.
            let is_pending = error.is_about_lost_data
                || pending_paths.contains(&error.path)
                || failed_spill_path.as_ref() == Some(&error.path);
            status.push(ErrorStatus {
                path: error.path.into(),
                errno: error.errno.raw_os_error(),
                message: error.message,
                repeats: error.count,
                age_seconds: error.last.elapsed().as_secs_f64(),
                pending: is_pending,
            });
        }
        status
    }

    /// Returns all paths of the files with pending bytes.
    fn pending_paths(&self) -> Vec<Vec<u8>> {
        let files = self.open_files.files.all();
        files
            .iter()
            .filter(|file| file.lock().pending.bytes() > 0)
            .flat_map(|file| file.inode.paths())
            .collect()
    }

    /// Forgets recorded errors, without a change of the data that they concern.
    pub fn clear_errors(&self) {
        self.base.errors.clear();
    }

    /// Returns the pending bytes at or below `path`.
    pub fn held_bytes_below(&self, path: &[u8]) -> u64 {
        let files = self.durability.pending_below(path);
        files.iter().map(|file| file.lock().pending.bytes()).sum()
    }

    /// Returns at most `count_max` names of files that programs have open for writing, and the number of all such
    /// files.
    pub fn files_being_written(&self, count_max: usize) -> (Vec<Vec<u8>>, u64) {
        let mut names = Vec::new();
        let mut file_count = 0;
        for file in self.open_files.files.all() {
            let is_open_for_writing = {
                let state = file.lock();
                !state.opens.is_empty() && state.opens.ending() == Ending::Open
            };
            if !is_open_for_writing {
                continue;
            }
            file_count += 1;
            if names.len() < count_max {
                names.extend(file.inode.paths().into_iter().next());
            }
        }
        (names, file_count)
    }

    /// Returns figures of those files at or below `path` about which the engine knows more than the backing. They are
    /// open, have bytes in the arena, were synced, or were cut (left incomplete). All bytes of any other file are in
    /// the backing.
    ///
    /// A file with several known names is in the result once for each name. The call waits for the backing.
    pub fn files_below(&self, path: &[u8]) -> Vec<FileFigures> {
        let mut figures = Vec::new();
        let mut inodes_in_use = HashSet::new();
        // Bytes that client processes have stored in the arena, without a request, count as written too.
        self.intake.ingest_all_published();
        for file in self.open_files.files.all() {
            inodes_in_use.insert(Arc::as_ptr(&file.inode));
            for known_path in paths_below(&file.inode, path) {
                figures.push(self.figures_of_file(&file, known_path));
            }
        }
        for inode in self.tree.names.all_inodes() {
            let is_in_use = inodes_in_use.contains(&Arc::as_ptr(&inode));
            if inode.kind != Kind::File || !inode.is_remembered() || is_in_use {
                continue;
            }
            for known_path in self.valid_paths(&inode) {
                if path.is_empty() || is_below(&known_path, path) {
                    figures.push(self.figures_of_idle_file(&inode, known_path));
                }
            }
        }
        figures.sort_by(|a, b| a.path.cmp(&b.path));
        figures
    }

    /// Returns the known paths of an inode that still lead to the inode in the backing. A program that does not use the
    /// mount may have given a name to another file.
    fn valid_paths(&self, inode: &Arc<Inode<B>>) -> impl Iterator<Item = Vec<u8>> {
        let names = inode.names_with_parents().into_iter();
        names
            .filter(|(dir, name)| self.tree.leads_to(dir, name, inode))
            .filter_map(|(dir, name)| dir.path_of(&name))
    }

    /// Returns the figures of the files at or below `path` that are open or have bytes in the arena, each under one of
    /// its names.
    pub fn files_in_use_below(&self, path: &[u8]) -> Vec<FileFigures> {
        self.intake.ingest_all_published();
        let files = self.open_files.files.all();
        let figures = files.iter().filter_map(|file| {
            let path = paths_below(&file.inode, path).next()?;
            Some(self.figures_of_file(file, path))
        });
        let mut sorted: Vec<_> = figures.collect();
        sorted.sort_by(|a, b| a.path.cmp(&b.path));
        sorted
    }

    /// Returns the figures of a file that is open or has bytes in the arena, under this path.
    fn figures_of_file(&self, file: &File<B>, path: Vec<u8>) -> FileFigures {
        let state = file.lock();
        let mut figures = FileFigures {
            path,
            level: state.durability_of_pending(&self.base.arena),
            held_bytes: state.pending.bytes(),
            held_end: state.pending.end(),
            open: !state.opens.is_empty(),
            ending: state.opens.ending(),
            changes: state.changes,
        };
        drop(state);
        if figures.held_bytes == 0 {
            // The level is that of the backing, which is called without the lock.
            figures.level = self.durability.level_in_backing(&file.inode);
        }
        figures
    }

    /// Returns the figures of a file that is not open and has no bytes in the arena.
    fn figures_of_idle_file(&self, inode: &Inode<B>, path: Vec<u8>) -> FileFigures {
        let is_cut = inode.is_cut.load(Ordering::Acquire);
        FileFigures {
            path,
            level: self.durability.level_of(inode),
            held_bytes: 0,
            held_end: 0,
            open: false,
            ending: if is_cut { Ending::Cut } else { Ending::Closed },
            changes: 0,
        }
    }
}

/// Returns the paths of an inode that are at or below `top`.
fn paths_below<B: Backing>(inode: &Inode<B>, top: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    let paths = inode.paths().into_iter();
    paths.filter(move |path| top.is_empty() || is_below(path, top))
}
