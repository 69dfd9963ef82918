//! Threads that write behind: the network goes on while the disk takes a block.
//!
//! Invariants
//! * There are [`BUFFERS`] buffers of a block each, and no others: a disk that is slower than the network stops it.
//! * A file has one thread at a time, which does its jobs in their order: its lock is not fought for, and its end
//!   (length, mode, time, sync) comes after all its blocks.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::error::PullError;
use crate::message::{BLOCK_BYTES, Entry};
use crate::pull::staging::{finish_file, local};

/// 64 MiB on their way to the disk.
const BUFFERS: usize = (64 << 20) / BLOCK_BYTES as usize;
/// One writes while others sync files that have ended.
const THREADS: usize = 3;

/// A file that is being written.
pub(crate) struct StagedFile {
    path: PathBuf,
    file: File,
    /// A thread has it. Changed under the lock of the queue only.
    is_taken: AtomicBool,
}

impl StagedFile {
    /// An open file and its path, for messages.
    pub(crate) fn new(path: PathBuf, file: File) -> Arc<Self> {
        Arc::new(Self {
            path,
            file,
            is_taken: AtomicBool::new(false),
        })
    }

    /// For reading what is there.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }
}

/// A block's worth of bytes.
pub(crate) struct Block {
    /// Offset of the buffer's first byte in the file.
    pub(crate) offset: u64,
    pub(crate) buffer: Vec<u8>,
    /// What of the buffer is to be written.
    pub(crate) parts: Vec<Range<usize>>,
}

/// What a file is at its end.
pub(crate) struct Finish {
    pub(crate) bytes: u64,
    pub(crate) entry: Entry,
}

enum Work {
    Block(Block),
    Finish(Finish),
}

struct Job {
    file: Arc<StagedFile>,
    work: Work,
}

/// See the head of this file.
pub(crate) struct Writers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    is_synced: bool,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    /// Jobs that a thread has.
    under_way: usize,
    /// The one that came back last is still in the processor's cache and is taken first.
    free: Vec<Vec<u8>>,
    failure: Option<PullError>,
    is_over: bool,
}

impl State {
    /// The first job whose file no thread has.
    fn take_job(&mut self) -> Option<Job> {
        let is_free = |job: &Job| !job.file.is_taken.load(Ordering::Relaxed);
        let at = self.queue.iter().position(is_free)?;
        let job = self.queue.remove(at)?;
        job.file.is_taken.store(true, Ordering::Relaxed);
        self.under_way += 1;
        Some(job)
    }
}

impl Writers {
    /// Starts them; what they finish is durable with `is_synced`.
    pub(crate) fn start(is_synced: bool) -> io::Result<Self> {
        let state = State {
            free: vec![Vec::new(); BUFFERS],
            ..State::default()
        };
        let mut writers = Self {
            shared: Arc::new(Shared {
                state: Mutex::new(state),
                changed: Condvar::new(),
                is_synced,
            }),
            threads: Vec::new(),
        };
        for _ in 0..THREADS {
            let shared = Arc::clone(&writers.shared);
            let thread = std::thread::Builder::new().name("pull-writer".into());
            writers.threads.push(thread.spawn(move || shared.work())?);
        }
        Ok(writers)
    }

    /// A buffer for a block; waits until the disk has taken one.
    pub(crate) fn take_buffer(&self) -> Result<Vec<u8>, PullError> {
        let mut state = self.shared.lock();
        loop {
            if let Some(failure) = state.failure.take() {
                return Err(failure);
            }
            if let Some(mut buffer) = state.free.pop() {
                drop(state);
                buffer.resize(BLOCK_BYTES as usize, 0);
                return Ok(buffer);
            }
            state = self.shared.wait(state);
        }
    }

    /// Gives one back that has nothing in it.
    pub(crate) fn return_buffer(&self, buffer: Vec<u8>) {
        self.shared.lock().free.push(buffer);
    }

    /// Writes a block, later.
    pub(crate) fn write(&self, file: &Arc<StagedFile>, block: Block) {
        self.add(file, Work::Block(block));
    }

    /// Finishes a file after its last block, of which there are no more.
    pub(crate) fn finish(&self, file: &Arc<StagedFile>, finish: Finish) {
        self.add(file, Work::Finish(finish));
    }

    fn add(&self, file: &Arc<StagedFile>, work: Work) {
        let file = Arc::clone(file);
        self.shared.lock().queue.push_back(Job { file, work });
        self.shared.changed.notify_all();
    }

    /// Waits until all is written and finished.
    pub(crate) fn wait(&self) -> Result<(), PullError> {
        let mut state = self.shared.lock();
        while !state.queue.is_empty() || state.under_way > 0 {
            state = self.shared.wait(state);
        }
        match state.failure.take() {
            Some(failure) => Err(failure),
            None => Ok(()),
        }
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        self.shared.lock().is_over = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed
            .wait(state)
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        while let Some(Job { file, work }) = self.next_job() {
            let done = match work {
                Work::Block(block) => self.write(&file, block),
                Work::Finish(finish) => self.finish(&file, &finish),
            };
            let mut state = self.lock();
            file.is_taken.store(false, Ordering::Relaxed);
            state.under_way -= 1;
            if let Err(failure) = done {
                state.failure.get_or_insert(failure);
            }
            self.changed.notify_all();
        }
    }

    /// `None`: it is over, and nothing is left.
    fn next_job(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.take_job() {
                return Some(job);
            }
            if state.is_over && state.queue.is_empty() {
                return None;
            }
            state = self.wait(state);
        }
    }

    fn write(&self, staged: &StagedFile, block: Block) -> Result<(), PullError> {
        let StagedFile { path, file, .. } = staged;
        let mut written = Ok(());
        for part in block.parts {
            let at = block.offset + part.start as u64;
            let bytes = &block.buffer[part];
            written = written.and_then(|()| file.write_all_at(bytes, at));
            if self.is_synced {
                begin_writeback(file, at, bytes.len() as u64);
            }
        }
        self.lock().free.push(block.buffer);
        written.map_err(local(path))
    }

    fn finish(&self, staged: &StagedFile, finish: &Finish) -> Result<(), PullError> {
        let StagedFile { path, file, .. } = staged;
        let done = || {
            file.set_len(finish.bytes)?;
            finish_file(file, &finish.entry)?;
            match self.is_synced {
                true => file.sync_all(),
                false => Ok(()),
            }
        };
        done().map_err(local(path))
    }
}

/// Lets the disk begin: by itself the kernel would wait until much is dirty, and the network would not overlap with it.
fn begin_writeback(file: &File, at: u64, bytes: u64) {
    // SAFETY: three integers and a descriptor that is open; no memory is touched. It is a hint: no error counts.
    unsafe {
        libc::sync_file_range(
            file.as_raw_fd(),
            at as i64,
            bytes as i64,
            libc::SYNC_FILE_RANGE_WRITE,
        )
    };
}
