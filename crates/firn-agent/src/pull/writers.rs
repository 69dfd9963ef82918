//! Threads that write blocks of files to the disk while the next blocks are received from another host.
//!
//! The *puller*, the thread that receives, takes a free buffer, fills it with a block (at most 1 MiB of a file), and
//! queues it as a *job*. A writer thread does the job and returns the buffer.
//! The first error of a job is stored; the next call that waits returns it.
//!
//! Invariants
//! * There are exactly [`BUFFERS`] buffers of one block. A disk that is slower than the network therefore slows the
//!   network down.
//! * At most one thread works on a file at a time, and does the file's jobs in their order. Therefore no two threads
//!   contend for the lock of an inode, and the last job (length, mode, time, sync) follows all blocks.
//! * If a job can be started while a thread sleeps, a thread was woken for it. Only one thread is woken for each job,
//!   because a wake costs more time than a small block.

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

use crate::ofi::{Buffer, Pool};

use crate::error::PullError;
use crate::message::{BLOCK_BYTES, Entry};
use crate::pull::direct::DirectFile;
use crate::pull::staging::{local_error, set_mode_and_time};

/// Number of buffers: up to 64 MiB wait for the disk.
const BUFFERS: usize = (64 << 20) / BLOCK_BYTES as usize;
/// Number of threads. One thread can write while others wait for the sync of finished files.
const THREADS: usize = 3;

/// A file of the staging directory that is being written.
pub(crate) struct StagedFile {
    path: PathBuf,
    file: File,
    /// The file opened a second time, for writes past the page cache; `None` if they are not possible.
    direct: Option<DirectFile>,
    /// Whether a thread works on this file. Accessed only under the lock of the queue.
    is_busy: AtomicBool,
}

impl StagedFile {
    /// Makes a file of its path, its descriptor, and where possible its descriptor for direct writes.
    pub(crate) fn new(path: PathBuf, file: File, direct: Option<DirectFile>) -> Arc<Self> {
        Arc::new(Self {
            path,
            file,
            direct,
            is_busy: AtomicBool::new(false),
        })
    }

    /// Returns the open file, from which bytes of an earlier pull can be read.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }
}

/// A received block of a file.
pub(crate) struct Block {
    /// Offset of the buffer's first byte in the file.
    pub(crate) offset: u64,
    pub(crate) buffer: Buffer,
    /// Ranges of the buffer to write. The bytes between them remain a hole.
    pub(crate) write_ranges: Vec<Range<usize>>,
}

impl Block {
    /// Returns the number of bytes to write if they are one range from the start of the buffer; otherwise `None`.
    fn single_range_bytes(&self) -> Option<usize> {
        match self.write_ranges.as_slice() {
            [range] if range.start == 0 => Some(range.end),
            _ => None,
        }
    }
}

/// The final state of a file: its length, and the entry with its mode and time.
pub(crate) struct Finish {
    pub(crate) bytes: u64,
    pub(crate) entry: Entry,
}

enum Work {
    Block(Block),
    Finish(Finish),
}

/// One step of the work on a file.
struct Job {
    file: Arc<StagedFile>,
    work: Work,
}

/// The threads, their queue and their buffers; see the head of this file.
pub(crate) struct Writers {
    shared: Arc<Shared>,
    pool: Arc<Pool>,
    threads: Vec<JoinHandle<()>>,
}

/// State that the threads and the puller share.
struct Shared {
    state: Mutex<WritersState>,
    /// Wakes a sleeping thread when a job can be started.
    job_added: Condvar,
    /// Wakes the puller after each job, if it waits for a buffer or for the end of all jobs.
    job_done: Condvar,
    /// Whether finished files are made durable.
    is_synced: bool,
}

struct WritersState {
    /// Jobs that no thread has taken.
    queue: VecDeque<Job>,
    /// Number of jobs that a thread is doing.
    active_jobs: usize,
    /// Free buffers. The last one that was returned is used first, because it is still in the processor's cache.
    free_buffers: Vec<Buffer>,
    /// The first error of a job that no call has returned yet.
    first_error: Option<PullError>,
    /// Whether the threads must end when the queue is empty.
    is_stopping: bool,
    /// Number of threads that wait for a job.
    idle_threads: usize,
    /// Whether the puller waits for `job_done`.
    is_puller_waiting: bool,
}

impl WritersState {
    /// Starts the first job whose file no thread works on. Returns `None` if there is none.
    fn start_job(&mut self) -> Option<Job> {
        let index = self.queue.iter().position(Job::can_start)?;
        let job = self.queue.remove(index)?;
        job.file.is_busy.store(true, Ordering::Relaxed);
        self.active_jobs += 1;
        Some(job)
    }
}

impl Job {
    /// Whether no thread works on the job's file.
    fn can_start(&self) -> bool {
        !self.file.is_busy.load(Ordering::Relaxed)
    }
}

impl Writers {
    /// Starts the threads that write received blocks of files to the disk, and makes their buffers. With `is_synced`
    /// each finished file is made durable. The threads end when the result is dropped.
    pub(crate) fn start(is_synced: bool) -> io::Result<Self> {
        let free_buffers = Pool::create(BUFFERS, BLOCK_BYTES as usize)?;
        let pool = Arc::clone(free_buffers[0].pool());
        let state = WritersState {
            queue: VecDeque::new(),
            active_jobs: 0,
            free_buffers,
            first_error: None,
            is_stopping: false,
            idle_threads: 0,
            is_puller_waiting: false,
        };
        let mut writers = Self {
            shared: Arc::new(Shared {
                state: Mutex::new(state),
                job_added: Condvar::new(),
                job_done: Condvar::new(),
                is_synced,
            }),
            pool,
            threads: Vec::new(),
        };
        for _ in 0..THREADS {
            let shared = Arc::clone(&writers.shared);
            let thread = std::thread::Builder::new()
                .name("pull-writer".into())
                .spawn(move || shared.do_jobs())?;
            writers.threads.push(thread);
        }
        Ok(writers)
    }

    /// Returns the memory that all buffers are parts of, which libfabric must register.
    pub(crate) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Takes a buffer for a block. Waits until one is free. Fails with the error of an earlier job if there is one.
    pub(crate) fn take_buffer(&self) -> Result<Buffer, PullError> {
        let mut state = self.shared.lock();
        loop {
            if let Some(error) = state.first_error.take() {
                return Err(error);
            }
            if let Some(buffer) = state.free_buffers.pop() {
                return Ok(buffer);
            }
            state = self.shared.wait_for_job_end(state);
        }
    }

    /// Returns a buffer whose content need not be written.
    pub(crate) fn return_buffer(&self, buffer: Buffer) {
        self.shared.lock().free_buffers.push(buffer);
    }

    /// Queues a block to be written.
    pub(crate) fn write(&self, file: &Arc<StagedFile>, block: Block) {
        self.queue_job(file, Work::Block(block));
    }

    /// Queues the end of a file. No block of the file may follow.
    pub(crate) fn finish(&self, file: &Arc<StagedFile>, finish: Finish) {
        self.queue_job(file, Work::Finish(finish));
    }

    fn queue_job(&self, file: &Arc<StagedFile>, work: Work) {
        let file = Arc::clone(file);
        let mut state = self.shared.lock();
        state.queue.push_back(Job { file, work });
        self.shared.wake_idle_thread(&state);
    }

    /// Waits until all jobs are done. Returns the first error among them.
    pub(crate) fn wait(&self) -> Result<(), PullError> {
        let mut state = self.shared.lock();
        while !state.queue.is_empty() || state.active_jobs > 0 {
            state = self.shared.wait_for_job_end(state);
        }
        match state.first_error.take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        self.shared.lock().is_stopping = true;
        self.shared.job_added.notify_all();
        for thread in self.threads.drain(..) {
            // An error means that the thread has panicked, which was reported then.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, WritersState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the end of a job. Only the puller's thread calls it, so one flag and one wake are enough.
    fn wait_for_job_end<'a>(
        &self,
        mut state: MutexGuard<'a, WritersState>,
    ) -> MutexGuard<'a, WritersState> {
        state.is_puller_waiting = true;
        let woken = self.job_done.wait(state);
        woken.unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes an idle thread if a job can be started.
    fn wake_idle_thread(&self, state: &WritersState) {
        if state.idle_threads > 0 && state.queue.iter().any(Job::can_start) {
            self.job_added.notify_one();
        }
    }

    /// Does jobs until the pull is over: the body of each thread. A job writes one block, or finishes a file (length,
    /// mode, time). An error does not end the thread; the first one is kept for the thread that receives blocks.
    fn do_jobs(&self) {
        while let Some(Job { file, work }) = self.next_job() {
            let result;
            let mut used_buffer = None;
            match work {
                Work::Block(mut block) => {
                    result = self.write_block(&file, &mut block);
                    used_buffer = Some(block.buffer);
                }
                Work::Finish(finish) => {
                    result = self
                        .finish_file(&file.file, &finish)
                        .map_err(local_error(&file.path));
                }
            }
            let mut state = self.lock();
            // The flag is only used under the lock, so any ordering is enough.
            file.is_busy.store(false, Ordering::Relaxed);
            state.active_jobs -= 1;
            state.free_buffers.extend(used_buffer);
            if let Err(error) = result {
                state.first_error.get_or_insert(error);
            }
            // The receiving thread waits for a buffer, or for the end of all jobs, and checks again.
            if std::mem::take(&mut state.is_puller_waiting) {
                self.job_done.notify_one();
            }
        }
    }

    /// Waits for a job that can be started: no other thread works on its file. The file is then marked as busy.
    /// Returns `None` when the pull is over and the queue is empty.
    fn next_job(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.start_job() {
                // This thread has just finished the work on another file, so a further job may be startable.
                self.wake_idle_thread(&state);
                return Some(job);
            }
            if state.is_stopping && state.queue.is_empty() {
                return None;
            }
            state.idle_threads += 1;
            let woken = self.job_added.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
            state.idle_threads -= 1;
        }
    }

    /// Writes a block (up to 1 MiB) to its file in the staging directory, without its holes. A single range from the
    /// start is written past the page cache if the file allows it, everything else through the page cache.
    fn write_block(&self, staged: &StagedFile, block: &mut Block) -> Result<(), PullError> {
        let StagedFile {
            path, file, direct, ..
        } = staged;
        if let Some(direct) = direct
            && let Some(bytes) = block.single_range_bytes()
        {
            if direct.write(&mut block.buffer, bytes, block.offset).is_ok() {
                return Ok(());
            }
            // A file system may refuse direct writes although it has announced them. The bytes are then written to the
            // page cache.
            let written = file.write_all_at(&block.buffer[..bytes], block.offset);
            return written.map_err(local_error(path));
        }
        for range in &block.write_ranges {
            let offset = block.offset + range.start as u64;
            let bytes = &block.buffer[range.clone()];
            file.write_all_at(bytes, offset)
                .map_err(local_error(path))?;
            if self.is_synced {
                start_writeback(file, offset, bytes.len() as u64);
            }
        }
        Ok(())
    }

    /// Sets the length, mode and time of a file, and makes the file durable if the pull is synced.
    fn finish_file(&self, file: &File, finish: &Finish) -> io::Result<()> {
        file.set_len(finish.bytes)?;
        set_mode_and_time(file, &finish.entry)?;
        if self.is_synced {
            file.sync_all()?;
        }
        Ok(())
    }
}

/// Starts the writeback of a range. By itself the kernel would wait until many pages are dirty, and the disk would be
/// idle in the meantime.
fn start_writeback(file: &File, offset: u64, bytes: u64) {
    // SAFETY: the arguments are three integers and an open descriptor, so no memory is accessed. The call is only a
    // hint, and its error is ignored.
    unsafe {
        libc::sync_file_range(
            file.as_raw_fd(),
            offset as i64,
            bytes as i64,
            libc::SYNC_FILE_RANGE_WRITE,
        )
    };
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use firn_format::record::Ending;
    use rand::rngs::StdRng;
    use rand::seq::SliceRandom;
    use rand::{RngExt, SeedableRng};

    use super::*;
    use crate::message::EntryKind;

    const BLOCK: usize = BLOCK_BYTES as usize;

    /// A file and the bytes that it must have at the end.
    struct Expected {
        staged: Arc<StagedFile>,
        data: Vec<u8>,
        /// Whether the file had other bytes before the pull. If so, its zeros must be written too.
        was_there: bool,
    }

    impl Expected {
        fn make(dir: &Path, number: u32, rng: &mut StdRng) -> Self {
            let mut data = vec![0; rng.random_range(0..4 * BLOCK)];
            rng.fill(&mut data[..]);
            // Runs of zeros begin and end at any byte.
            for _ in 0..rng.random_range(0..4) {
                let start = rng.random_range(0..=data.len());
                let end = data.len().min(start + rng.random_range(0..BLOCK));
                data[start..end].fill(0);
            }
            let path = dir.join(number.to_string());
            let was_there = rng.random();
            if was_there {
                std::fs::write(&path, vec![5; rng.random_range(1..5 * BLOCK)]).unwrap();
            }
            let file = File::options()
                .create(true)
                .truncate(false)
                .write(true)
                .open(&path)
                .unwrap();
            let direct = DirectFile::open(&file);
            Self {
                staged: StagedFile::new(path, file, direct),
                data,
                was_there,
            }
        }

        /// Ranges of a block that a puller would write. Long zeros are left out if the file was empty before.
        fn write_ranges(&self, block: usize) -> Vec<Range<usize>> {
            let bytes = &self.data[block * BLOCK..];
            let bytes = &bytes[..BLOCK.min(bytes.len())];
            if self.was_there {
                return std::iter::once(0..bytes.len()).collect();
            }
            let mut ranges = Vec::new();
            let mut start = 0;
            for run in bytes.chunk_by(|a, b| (*a == 0) == (*b == 0)) {
                if run.len() < 512 || run[0] != 0 {
                    ranges.push(start..start + run.len());
                }
                start += run.len();
            }
            ranges
        }

        fn finish(&self) -> Finish {
            let bytes = self.data.len() as u64;
            let entry = Entry {
                kind: EntryKind::File {
                    bytes,
                    ending: Ending::Closed,
                },
                mode: 0o640,
                ..Entry::directory()
            };
            Finish { bytes, entry }
        }
    }

    /// Writes the blocks of some files in a random order, and compares the files.
    fn write_and_compare(dir: &Path, seed: u64) {
        let mut rng = StdRng::seed_from_u64(seed);
        let writers = Writers::start(rng.random()).unwrap();
        let files: Vec<_> = (0..rng.random_range(1..5))
            .map(|number| Expected::make(dir, number, &mut rng))
            .collect();
        let mut blocks = Vec::new();
        for file in &files {
            blocks.extend((0..file.data.len().div_ceil(BLOCK)).map(|block| (file, block)));
        }
        blocks.shuffle(&mut rng);
        for (file, block) in blocks {
            let mut buffer = writers.take_buffer().unwrap();
            let bytes = &file.data[block * BLOCK..];
            let bytes = &bytes[..BLOCK.min(bytes.len())];
            buffer[..bytes.len()].copy_from_slice(bytes);
            let block = Block {
                offset: (block * BLOCK) as u64,
                buffer,
                write_ranges: file.write_ranges(block),
            };
            writers.write(&file.staged, block);
        }
        for file in &files {
            writers.finish(&file.staged, file.finish());
        }
        writers.wait().unwrap();
        for file in &files {
            let path = &file.staged.path;
            assert!(
                std::fs::read(path).unwrap() == file.data,
                "{path:?}, seed {seed}"
            );
            let mode = path.metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o640, "{path:?}, seed {seed}");
        }
    }

    #[test]
    fn files_become_what_was_received_on_disks_and_in_memory() {
        for parent in [std::env::temp_dir(), "/dev/shm".into()] {
            for seed in 0..8 {
                let dir = tempfile::tempdir_in(&parent).unwrap();
                write_and_compare(dir.path(), seed);
            }
        }
    }

    #[test]
    fn a_file_that_cannot_be_written_fails_the_pull_and_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, b"").unwrap();
        let staged = StagedFile::new(path.clone(), File::open(&path).unwrap(), None);
        let writers = Writers::start(true).unwrap();
        let block = Block {
            offset: 0,
            buffer: writers.take_buffer().unwrap(),
            write_ranges: std::iter::once(0..1).collect(),
        };
        writers.write(&staged, block);
        assert!(matches!(writers.wait(), Err(PullError::Local { .. })));
        assert!(writers.wait().is_ok(), "the error is returned once");
        let buffers: Vec<_> = (0..BUFFERS)
            .map(|_| writers.take_buffer().unwrap())
            .collect();
        assert_eq!(buffers.len(), BUFFERS, "none is lost");
    }
}
