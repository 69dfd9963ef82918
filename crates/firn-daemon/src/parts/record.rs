//! The record of the run, a summary of the mount's life: samples counters several times a second, answers requests for
//! the record, and stores it at the end.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use firn_config::RecordPlace;
use firn_engine::Engine;
use firn_format::quote::quoted;
use firn_protocol::events::TARGET;
use firn_protocol::record::{Bucket, RECORD_BYTES_MAX, RECORD_VERSION, RunRecord};
use firn_protocol::{Reply, Request};
use firn_workers::Workers;
use parking_lot::Mutex;

use crate::answers::MountIdentity;
use crate::checkpoint_log::CheckpointLog;
use crate::error::MountError;
use crate::log;
use crate::part::{ClientRequest, Part, Parts, StopContext};
use crate::record_file::{record_name, store_in_backing, store_on_host};
use crate::single_job::SingleJob;
use crate::store::Store;
use crate::timeline::Timeline;

/// Longest time between two copies of the record in the backing while the mount is used.
const STORE_EVERY: Duration = Duration::from_secs(60);

/// Counts the programs that wait for room in the arena.
pub(crate) type WaitingWriters = Box<dyn Fn() -> u64 + Send + Sync>;

/// The record of a run, its thread, and where it is stored.
pub(crate) struct Record {
    recorder: Arc<Recorder>,
    workers: Workers,
    /// Whether a copy goes to the backing.
    copy_place: RecordPlace,
    /// Path of the record in the runtime directory.
    runtime_file: PathBuf,
    /// The job that copies the record to the backing; it runs at most once at a time.
    store_job: SingleJob,
    /// When the last copy was begun.
    stored_at: Mutex<Instant>,
    thread: Mutex<Option<SampleThread>>,
}

/// The thread that takes samples.
struct SampleThread {
    /// The drop of the sender ends the thread.
    stop: Sender<()>,
    handle: JoinHandle<()>,
}

/// Takes samples of a mount and makes the record from them. The part and its thread share it.
struct Recorder {
    identity: MountIdentity,
    waiting_writers: WaitingWriters,
    began_unix_us: u64,
    state: Mutex<RecorderState>,
    /// Bytes that came in or went out, at the last copy in the backing.
    stored_bytes: AtomicU64,
}

/// Whether the mount of a record goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RunStage {
    Running,
    Ended,
}

/// The samples so far, and what is needed to notice changes.
struct RecorderState {
    timeline: Timeline,
    checkpoints: CheckpointLog,
    /// Since when writers have waited for room; `None` if no writer waits.
    full_since: Option<Instant>,
    /// Since when writes to the backing have failed; `None` if they succeed.
    failing_since: Option<Instant>,
    /// Number of failed drains at the last sample.
    drain_errors: u64,
    /// Number of errors that waiting writers had got at the last sample.
    errors_given_up: u64,
}

impl Record {
    /// Returns the part that makes the record of the run, a summary of the mount's life. `copy_place` says whether a
    /// copy goes to the backing, and `runtime_file` is the copy on this host. The times of the record begin when the
    /// engine began.
    pub(crate) fn new(
        identity: MountIdentity,
        waiting_writers: WaitingWriters,
        copy_place: RecordPlace,
        runtime_file: PathBuf,
        workers: &Workers,
    ) -> Arc<Self> {
        let engine = &identity.engine;
        // The start of the engine, by the clock of intervals and by that of the day.
        let start = Instant::now()
            .checked_sub(engine.uptime())
            .unwrap_or_else(Instant::now);
        let start_time = SystemTime::now().checked_sub(start.elapsed());
        let recorder = Recorder {
            identity,
            waiting_writers,
            began_unix_us: unix_microseconds(start_time.unwrap_or(UNIX_EPOCH)),
            state: Mutex::new(RecorderState::new(start)),
            stored_bytes: AtomicU64::new(0),
        };
        // Takes the first sample now: later samples count from it, so it comes before any program opens a checkpoint
        // file.
        recorder.take_sample();
        Arc::new(Self {
            recorder: Arc::new(recorder),
            workers: workers.clone(),
            copy_place,
            runtime_file,
            store_job: SingleJob::default(),
            stored_at: Mutex::new(Instant::now()),
            thread: Mutex::new(None),
        })
    }
}

/// Returns the microseconds from 1970 to `time`.
fn unix_microseconds(time: SystemTime) -> u64 {
    let since_epoch = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    since_epoch.as_micros() as u64
}

impl Part for Record {
    /// Starts the thread that takes samples of counters, for the summary of the mount's life. Each sample says how long
    /// the pause before the next one is.
    fn start(&self, _: &Parts) -> Result<(), MountError> {
        let recorder = Arc::clone(&self.recorder);
        let (stop, stopped) = channel();
        let take_samples = move || {
            let mut pause = recorder.take_sample();
            // The loop ends when the part drops `stop`, the other end of the channel.
            while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                pause = recorder.take_sample();
            }
        };
        let handle = std::thread::Builder::new()
            .name("firn-record".into())
            .spawn(take_samples)
            .map_err(MountError::io("start a thread"))?;
        *self.thread.lock() = Some(SampleThread { stop, handle });
        Ok(())
    }

    fn run_due(&self) {
        let now = Instant::now();
        let mut stored_at = self.stored_at.lock();
        if self.copy_place == RecordPlace::Host || now.duration_since(*stored_at) < STORE_EVERY {
            return;
        }
        *stored_at = now;
        let recorder = Arc::clone(&self.recorder);
        self.store_job.start(&self.workers, move || {
            if recorder.has_new_traffic() {
                recorder.store_in_backing(RunStage::Running);
            }
        });
    }

    fn answer(&self, client_request: &mut ClientRequest<'_>) -> Option<Reply> {
        let Request::Record = client_request.request else {
            return None;
        };
        self.recorder.take_sample();
        let record = self.recorder.make_record(RunStage::Running);
        Some(Reply::Record(Box::new(record)))
    }

    /// Ends the samples, and stores the record of the run, a summary of the mount's life. All data that will go to the
    /// backing is there by now.
    fn stop(&self, context: &mut StopContext) {
        if let Some(SampleThread { stop, handle }) = self.thread.lock().take() {
            // The end of the channel ends the thread.
            drop(stop);
            // A panic of the thread costs samples only.
            let _ = handle.join();
        }
        if context.was_never_visible {
            return;
        }
        self.recorder.take_sample();
        let held_bytes = self.recorder.identity.engine.held_bytes();
        tracing::info!(target: TARGET, kind = "unmounted", held_bytes, "the mount has ended");
        let record = encode(&self.recorder.make_record(RunStage::Ended));
        if let Err(error) = store_on_host(&self.runtime_file, &record) {
            tracing::warn!(%error, "cannot store the record of the run in the runtime directory");
        }
        if self.copy_place == RecordPlace::Backing {
            let recorder = Arc::clone(&self.recorder);
            context.run_backing_work(move || recorder.store_in_backing(RunStage::Ended));
        }
    }
}

/// Returns the record as JSON for [`RunRecord::parse`]. If it is too long, the oldest checkpoints are dropped and
/// counted as forgotten.
fn encode(record: &RunRecord) -> Vec<u8> {
    let mut record = record.clone();
    loop {
        let json = serde_json::to_vec(&record).unwrap_or_default();
        let is_short_enough = json.len() as u64 <= RECORD_BYTES_MAX;
        if is_short_enough || record.checkpoints.is_empty() {
            return json;
        }
        let older_half = record.checkpoints.len().div_ceil(2);
        record.checkpoints.drain(..older_half);
        record.forgotten += older_half as u64;
    }
}

impl Recorder {
    fn engine(&self) -> &Engine<Store> {
        &self.identity.engine
    }

    /// Takes one sample of counters and of the events of files, for the summary of the mount's life. Returns the time
    /// until the next one. Logs an event if the shared memory (arena) has become full, or if the backing fails.
    fn take_sample(&self) -> Duration {
        let engine = self.engine();
        // The lock is held for the whole sample, so that samples are added in the order of their time.
        let mut state = self.state.lock();
        let now = Instant::now();
        let counters = Bucket {
            waiting_writers: (self.waiting_writers)(),
            ..engine.activity()
        };
        let (events, dropped) = engine.take_file_events();
        state.timeline.add(now, counters);
        state.checkpoints.apply(events, dropped);
        state.log_arena_state(now, counters);
        state.log_backing_state(now, engine);
        state.log_given_up_errors(engine);
        state.timeline.sample_every()
    }

    /// Returns whether bytes came in or went out since the last copy in the backing.
    fn has_new_traffic(&self) -> bool {
        let activity = self.engine().activity();
        let bytes = activity.ingest_bytes.wrapping_add(activity.drain_bytes);
        self.stored_bytes.swap(bytes, Ordering::Relaxed) != bytes
    }

    /// Returns the record of the run (a summary of the mount's life) as it is now. `stage` says whether the mount has
    /// ended.
    fn make_record(&self, stage: RunStage) -> RunRecord {
        let figures = self.engine().figures();
        let newest_events = log::events::newest();
        let state = self.state.lock();
        let identity = &self.identity;
        RunRecord {
            version: RECORD_VERSION,
            firn_version: env!("CARGO_PKG_VERSION").into(),
            host: identity.host.clone(),
            mount_point: identity.mount_point.as_path().into(),
            backing: identity.backing.as_path().into(),
            options: identity.options.clone(),
            began_unix_us: self.began_unix_us,
            lasted_seconds: state.timeline.span_to_last_sample().as_secs_f64(),
            has_ended: stage == RunStage::Ended,
            arena_bytes: figures.arena_bytes,
            held_bytes: figures.held_bytes + figures.lost_file_bytes,
            cancelled_bytes: figures.cancelled_bytes,
            recovered_bytes: figures.recovered_bytes,
            drain_errors: figures.drain_errors,
            bucket_ms: state.timeline.bucket_length().as_millis() as u64,
            buckets: state.timeline.buckets().to_vec(),
            ingest_write_bytes: figures.ingest_write_bytes,
            drain_write_bytes: figures.drain_write_bytes,
            write_seconds: figures.write_seconds,
            close_seconds: figures.close_seconds,
            fsync_seconds: figures.fsync_seconds,
            drain_seconds: figures.drain_seconds,
            close_wait_seconds: figures.close_wait_seconds,
            checkpoints: state.checkpoints.records(),
            events: newest_events.events,
            forgotten: state.checkpoints.forgotten() + newest_events.forgotten,
        }
    }

    /// Stores the record in the backing; a failure is only logged.
    fn store_in_backing(&self, stage: RunStage) {
        let identity = &self.identity;
        let record = encode(&self.make_record(stage));
        let incarnation = self.engine().incarnation();
        let name = record_name(&identity.host, self.began_unix_us, &incarnation);
        let now = unix_microseconds(SystemTime::now());
        if let Err(error) = store_in_backing(&identity.backing, &name, now, &record) {
            tracing::warn!(%error, "cannot store the record of the run in the backing");
        }
    }
}

impl RecorderState {
    /// Returns the state of a run that began at `start`, before its first sample.
    fn new(start: Instant) -> Self {
        Self {
            timeline: Timeline::new(start),
            checkpoints: CheckpointLog::new(start),
            full_since: None,
            failing_since: None,
            drain_errors: 0,
            errors_given_up: 0,
        }
    }

    /// Logs an event when the arena (the shared memory of the mount) becomes full, so that writers wait, and when it
    /// has room again.
    fn log_arena_state(&mut self, now: Instant, counters: Bucket) {
        let waiting_writers = counters.waiting_writers;
        match self.full_since {
            None if waiting_writers > 0 => {
                self.full_since = Some(now);
                let held_bytes = counters.held_bytes;
                tracing::info!(target: TARGET, kind = "arena_full", waiting_writers, held_bytes, "writers wait for room in the arena");
            }
            Some(since) if waiting_writers == 0 => {
                self.full_since = None;
                let waited_seconds = now.duration_since(since).as_secs_f64();
                tracing::info!(target: TARGET, kind = "arena_has_room", waited_seconds, "no writer waits for room in the arena any more");
            }
            _ => {}
        }
    }

    /// Logs an event when writes to the backing begin to fail, and when they succeed again.
    fn log_backing_state(&mut self, now: Instant, engine: &Engine<Store>) {
        let drain_errors = engine.drain_errors();
        let has_failed = drain_errors > self.drain_errors;
        self.drain_errors = drain_errors;
        match self.failing_since {
            None if has_failed => {
                self.failing_since = Some(now);
                let (path, errno, text) = engine.newest_error().unwrap_or_default();
                let path = quoted(&path);
                tracing::warn!(target: TARGET, kind = "backing_failed", path, errno, text, "a write to the backing failed");
            }
            Some(since) if !has_failed && !engine.waits_for_retry() => {
                self.failing_since = None;
                let failed_seconds = now.duration_since(since).as_secs_f64();
                tracing::info!(target: TARGET, kind = "backing_works", failed_seconds, "writes to the backing succeed again");
            }
            _ => {}
        }
    }

    /// Logs an event when an error of the backing was given to programs that waited for room in memory.
    fn log_given_up_errors(&mut self, engine: &Engine<Store>) {
        let errors_given_up = engine.errors_given_up();
        if errors_given_up > self.errors_given_up {
            let count = errors_given_up - self.errors_given_up;
            tracing::warn!(target: TARGET, kind = "error_given_up", count, "an error was reported to programs that waited for room");
        }
        self.errors_given_up = errors_given_up;
    }
}
