//! Threads that write behind: the network goes on while the disk takes a block.
//!
//! Invariants
//! * There are [`BUFFERS`] buffers of a block each, and no others: a disk that is slower than the network stops it.
//! * A file is finished (length, mode, time, sync) once, after all its blocks were written.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::error::PullError;
use crate::message::{BLOCK_BYTES, Entry};
use crate::pull::staging::{finish_file, local};

/// 64 MiB on their way to the disk.
const BUFFERS: usize = 16;
const THREADS: usize = 2;

/// A file that is being written.
pub(crate) struct StagedFile {
    path: PathBuf,
    file: File,
    progress: Mutex<FileProgress>,
}

#[derive(Default)]
struct FileProgress {
    /// Blocks that are not written yet.
    blocks: usize,
    /// What is done after the last of them.
    finish: Option<Finish>,
}

impl StagedFile {
    /// An open file and its path, for messages.
    pub(crate) fn new(path: PathBuf, file: File) -> Arc<Self> {
        Arc::new(Self {
            path,
            file,
            progress: Mutex::default(),
        })
    }

    /// For reading what is there.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    fn progress(&self) -> MutexGuard<'_, FileProgress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A block's worth of bytes.
pub(crate) struct Block {
    pub(crate) file: Arc<StagedFile>,
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

enum Job {
    Block(Block),
    Finish(Arc<StagedFile>, Finish),
}

/// See the head of this file.
pub(crate) struct Writers {
    jobs: Option<Sender<Job>>,
    free: Receiver<Vec<u8>>,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    jobs: Mutex<Receiver<Job>>,
    free: Mutex<Sender<Vec<u8>>>,
    state: Mutex<State>,
    changed: Condvar,
    is_synced: bool,
}

#[derive(Default)]
struct State {
    /// Blocks that are not written and files that are not finished.
    jobs: usize,
    failure: Option<PullError>,
}

impl Writers {
    /// Starts them; what they finish is durable with `is_synced`.
    pub(crate) fn start(is_synced: bool) -> io::Result<Self> {
        let (jobs, taken) = channel();
        let (returned, free) = channel();
        for _ in 0..BUFFERS {
            let _ = returned.send(Vec::new());
        }
        let shared = Arc::new(Shared {
            jobs: Mutex::new(taken),
            free: Mutex::new(returned),
            state: Mutex::default(),
            changed: Condvar::new(),
            is_synced,
        });
        let mut writers = Self {
            jobs: Some(jobs),
            free,
            shared,
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
        let mut buffer = self.free.recv().expect("the writers give all back");
        self.check()?;
        buffer.resize(BLOCK_BYTES as usize, 0);
        Ok(buffer)
    }

    /// Gives one back that has nothing in it.
    pub(crate) fn return_buffer(&self, buffer: Vec<u8>) {
        self.shared.give_back(buffer);
    }

    /// Writes a block, later.
    pub(crate) fn write(&self, block: Block) {
        block.file.progress().blocks += 1;
        self.shared.lock().jobs += 1;
        self.send(Job::Block(block));
    }

    /// Finishes a file after its last block, of which there are no more.
    pub(crate) fn finish(&self, file: &Arc<StagedFile>, finish: Finish) {
        self.shared.lock().jobs += 1;
        let mut progress = file.progress();
        if progress.blocks > 0 {
            progress.finish = Some(finish);
            return;
        }
        drop(progress);
        self.send(Job::Finish(Arc::clone(file), finish));
    }

    fn send(&self, job: Job) {
        let jobs = self
            .jobs
            .as_ref()
            .expect("they work until they are dropped");
        jobs.send(job).expect("the receiver lives as long");
    }

    /// Waits until all is written and finished.
    pub(crate) fn wait(&self) -> Result<(), PullError> {
        let mut state = self.shared.lock();
        while state.jobs > 0 {
            state = self.shared.wait(state);
        }
        drop(state);
        self.check()
    }

    fn check(&self) -> Result<(), PullError> {
        match self.shared.lock().failure.take() {
            Some(failure) => Err(failure),
            None => Ok(()),
        }
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        self.jobs.take();
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

    fn give_back(&self, buffer: Vec<u8>) {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        // Nobody takes one any more when the pull ends.
        let _ = free.send(buffer);
    }

    fn next_job(&self) -> Option<Job> {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.recv().ok()
    }

    fn work(&self) {
        while let Some(job) = self.next_job() {
            match job {
                Job::Block(block) => {
                    let file = Arc::clone(&block.file);
                    self.end_job(self.write(block));
                    if let Some(finish) = last_of(&file) {
                        self.end_job(self.finish(&file, &finish));
                    }
                }
                Job::Finish(file, finish) => self.end_job(self.finish(&file, &finish)),
            }
        }
    }

    fn end_job(&self, done: Result<(), PullError>) {
        let mut state = self.lock();
        state.jobs -= 1;
        if let Err(failure) = done {
            state.failure.get_or_insert(failure);
        }
        self.changed.notify_all();
    }

    fn write(&self, block: Block) -> Result<(), PullError> {
        let Block {
            file,
            offset,
            buffer,
            parts,
        } = block;
        let mut written = Ok(());
        for part in parts {
            let at = offset + part.start as u64;
            let bytes = &buffer[part];
            written = written.and_then(|()| file.file.write_all_at(bytes, at));
            if self.is_synced {
                begin_writeback(&file.file, at, bytes.len() as u64);
            }
        }
        self.give_back(buffer);
        written.map_err(local(&file.path))
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

/// What is to be done now that a block of the file was written.
fn last_of(file: &StagedFile) -> Option<Finish> {
    let mut progress = file.progress();
    progress.blocks -= 1;
    match progress.blocks {
        0 => progress.finish.take(),
        _ => None,
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
