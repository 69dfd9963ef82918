//! Threads that write behind: the network goes on while the disk takes a block.
//!
//! Invariants
//! * There are [`BUFFERS`] buffers of a block each, and no others: a disk that is slower than the network stops it.
//! * A file has one thread at a time, which does its jobs in their order: its lock is not fought for, and its end
//!   (length, mode, time, sync) comes after all its blocks.
//! * Where a job may be done and a thread sleeps, one was woken; no more than that, as each wake takes longer than some
//!   blocks.

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
use crate::pull::staging::{finish_file, local};

/// 64 MiB on their way to the disk.
const BUFFERS: usize = (64 << 20) / BLOCK_BYTES as usize;
/// One writes while others sync files that have ended.
const THREADS: usize = 3;

/// A file that is being written.
pub(crate) struct StagedFile {
    path: PathBuf,
    file: File,
    /// The file opened a second time, for writes past the page cache.
    direct: Option<DirectFile>,
    /// A thread has it. Changed under the lock of the queue only.
    is_taken: AtomicBool,
}

impl StagedFile {
    /// An open file and its path.
    pub(crate) fn new(path: PathBuf, file: File, direct: Option<DirectFile>) -> Arc<Self> {
        Arc::new(Self {
            path,
            file,
            direct,
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
    pub(crate) buffer: Buffer,
    /// What of the buffer is to be written.
    pub(crate) parts: Vec<Range<usize>>,
}

impl Block {
    /// Bytes from the start of the buffer on, where that is all that is to be written.
    fn only_part(&self) -> Option<usize> {
        match self.parts.as_slice() {
            [part] if part.start == 0 => Some(part.end),
            _ => None,
        }
    }
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
    pool: Arc<Pool>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<WritersState>,
    /// Wakes a sleeping thread for a job.
    added: Condvar,
    /// Signals the waiting puller that there is a buffer, or that nothing is left.
    landed: Condvar,
    is_synced: bool,
}

struct WritersState {
    queue: VecDeque<Job>,
    /// Jobs that a thread has.
    under_way: usize,
    /// Free buffers. The last one that came back is still in the processor's cache and is taken first.
    free: Vec<Buffer>,
    failure: Option<PullError>,
    is_over: bool,
    /// Threads that wait for a job.
    asleep: usize,
    is_awaited: bool,
}

impl WritersState {
    /// The first job whose file no thread has.
    fn take_job(&mut self) -> Option<Job> {
        let at = self.queue.iter().position(Job::may_be_done)?;
        let job = self.queue.remove(at)?;
        job.file.is_taken.store(true, Ordering::Relaxed);
        self.under_way += 1;
        Some(job)
    }
}

impl Job {
    fn may_be_done(&self) -> bool {
        !self.file.is_taken.load(Ordering::Relaxed)
    }
}

impl Writers {
    /// Starts them; what they finish is durable with `is_synced`.
    pub(crate) fn start(is_synced: bool) -> io::Result<Self> {
        let free = Pool::create(BUFFERS, BLOCK_BYTES as usize)?;
        let pool = Arc::clone(free[0].pool());
        let state = WritersState {
            queue: VecDeque::new(),
            under_way: 0,
            free,
            failure: None,
            is_over: false,
            asleep: 0,
            is_awaited: false,
        };
        let mut writers = Self {
            shared: Arc::new(Shared {
                state: Mutex::new(state),
                added: Condvar::new(),
                landed: Condvar::new(),
                is_synced,
            }),
            pool,
            threads: Vec::new(),
        };
        for _ in 0..THREADS {
            let shared = Arc::clone(&writers.shared);
            let thread = std::thread::Builder::new().name("pull-writer".into());
            writers.threads.push(thread.spawn(move || shared.work())?);
        }
        Ok(writers)
    }

    /// What all buffers are of.
    pub(crate) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// A buffer for a block; waits until the disk has taken one.
    pub(crate) fn take_buffer(&self) -> Result<Buffer, PullError> {
        let mut state = self.shared.lock();
        loop {
            if let Some(failure) = state.failure.take() {
                return Err(failure);
            }
            if let Some(buffer) = state.free.pop() {
                return Ok(buffer);
            }
            state = self.shared.wait_landed(state);
        }
    }

    /// Gives one back that has nothing in it.
    pub(crate) fn return_buffer(&self, buffer: Buffer) {
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
        let mut state = self.shared.lock();
        state.queue.push_back(Job { file, work });
        self.shared.wake_thread(&state);
    }

    /// Waits until all is written and finished.
    pub(crate) fn wait(&self) -> Result<(), PullError> {
        let mut state = self.shared.lock();
        while !state.queue.is_empty() || state.under_way > 0 {
            state = self.shared.wait_landed(state);
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
        self.shared.added.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, WritersState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Called by the puller only, which is one thread.
    fn wait_landed<'a>(
        &self,
        mut state: MutexGuard<'a, WritersState>,
    ) -> MutexGuard<'a, WritersState> {
        state.is_awaited = true;
        let waited = self.landed.wait(state);
        waited.unwrap_or_else(PoisonError::into_inner)
    }

    fn wake_thread(&self, state: &WritersState) {
        if state.asleep > 0 && state.queue.iter().any(Job::may_be_done) {
            self.added.notify_one();
        }
    }

    fn work(&self) {
        while let Some(Job { file, work }) = self.next_job() {
            let (done, buffer) = match work {
                Work::Block(mut block) => (self.write(&file, &mut block), Some(block.buffer)),
                Work::Finish(finish) => (self.finish(&file, &finish), None),
            };
            let mut state = self.lock();
            file.is_taken.store(false, Ordering::Relaxed);
            state.under_way -= 1;
            state.free.extend(buffer);
            if let Err(failure) = done {
                state.failure.get_or_insert(failure);
            }
            if std::mem::take(&mut state.is_awaited) {
                self.landed.notify_one();
            }
        }
    }

    /// `None`: it is over, and nothing is left.
    fn next_job(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.take_job() {
                // The file that this thread had last may be free for another one now.
                self.wake_thread(&state);
                return Some(job);
            }
            if state.is_over && state.queue.is_empty() {
                return None;
            }
            state.asleep += 1;
            let woken = self.added.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
            state.asleep -= 1;
        }
    }

    fn write(&self, staged: &StagedFile, block: &mut Block) -> Result<(), PullError> {
        let StagedFile {
            path, file, direct, ..
        } = staged;
        if let (Some(direct), Some(bytes)) = (direct, block.only_part()) {
            let written = direct.write(&mut block.buffer, bytes, block.offset);
            return written
                .or_else(|_| file.write_all_at(&block.buffer[..bytes], block.offset))
                .map_err(local(path));
        }
        for part in &block.parts {
            let at = block.offset + part.start as u64;
            let bytes = &block.buffer[part.clone()];
            file.write_all_at(bytes, at).map_err(local(path))?;
            if self.is_synced {
                begin_writeback(file, at, bytes.len() as u64);
            }
        }
        Ok(())
    }

    fn finish(&self, staged: &StagedFile, finish: &Finish) -> Result<(), PullError> {
        let StagedFile { path, file, .. } = staged;
        let done = || {
            file.set_len(finish.bytes)?;
            finish_file(file, &finish.entry)?;
            if self.is_synced {
                file.sync_all()
            } else {
                Ok(())
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

    /// A file as it is to become.
    struct Expected {
        staged: Arc<StagedFile>,
        data: Vec<u8>,
        /// Something of it was there before.
        was_there: bool,
    }

    impl Expected {
        fn make(dir: &Path, number: u32, rng: &mut StdRng) -> Self {
            let mut data = vec![0; rng.random_range(0..4 * BLOCK)];
            rng.fill(&mut data[..]);
            // Holes are whole pages, or begin and end anywhere.
            for _ in 0..rng.random_range(0..4) {
                let at = rng.random_range(0..=data.len());
                let end = data.len().min(at + rng.random_range(0..BLOCK));
                data[at..end].fill(0);
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

        /// What of a block comes, without the zeros that need not.
        fn parts(&self, block: usize) -> Vec<Range<usize>> {
            let bytes = &self.data[block * BLOCK..];
            let bytes = &bytes[..BLOCK.min(bytes.len())];
            if self.was_there {
                return std::iter::once(0..bytes.len()).collect();
            }
            let mut parts = Vec::new();
            let mut at = 0;
            for run in bytes.chunk_by(|a, b| (*a == 0) == (*b == 0)) {
                if run.len() < 512 || run[0] != 0 {
                    parts.push(at..at + run.len());
                }
                at += run.len();
            }
            parts
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

    fn receive_all(dir: &Path, seed: u64) {
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
                parts: file.parts(block),
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
                receive_all(dir.path(), seed);
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
            parts: std::iter::once(0..1).collect(),
        };
        writers.write(&staged, block);
        assert!(matches!(writers.wait(), Err(PullError::Local { .. })));
        assert!(writers.wait().is_ok(), "it was told");
        let buffers: Vec<_> = (0..BUFFERS)
            .map(|_| writers.take_buffer().unwrap())
            .collect();
        assert_eq!(buffers.len(), BUFFERS, "none is lost");
    }
}
