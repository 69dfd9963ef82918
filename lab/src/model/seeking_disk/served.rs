//! The disk with a clock: requests of a file server wait here for as long as the model says.
//!
//! A thread is the disk. It sleeps until the time at which its work so far would be done, so what it oversleeps is not
//! added up. Writers enter the cache in the order in which they came.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use firn_backing::Backing;
use fuser::Errno;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::readers::{ReadRequest, ReadStep, Readers};
use super::{Disk, DiskModel, Run};
use firn_testfs::{Policy, Transfer};

/// Sent when a request is done.
type Done = SyncSender<()>;

/// A disk that serves. Its clones are the same disk; the last one ends it.
#[derive(Clone)]
pub struct SeekingDisk(Arc<Owner>);

struct Owner {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    model: DiskModel,
    state: Mutex<State>,
    /// There may be something to do.
    work: Condvar,
}

struct State {
    disk: Disk,
    readers: Readers<Done>,
    /// Writers that found the cache full.
    writers: VecDeque<WaitingWrite>,
    /// Syncs, in the order in which they end.
    syncs: VecDeque<WaitingSync>,
    /// Bytes that the cache ever took, and those of them that sweeps have brought to the disk. Sweeps take what
    /// arrived first.
    arrived: u64,
    swept: u64,
    ends: bool,
}

struct WaitingWrite {
    file: u64,
    offset: u64,
    len: u64,
    done: Done,
}

struct WaitingSync {
    /// It ends when this many bytes were swept.
    target: u64,
    done: Done,
}

enum Work {
    Read(ReadRequest<Done>),
    Sweep(Vec<Run>),
}

/// Until when the disk is busy.
struct Clock {
    free_at: Instant,
}

impl SeekingDisk {
    /// An empty disk.
    pub fn start(model: DiskModel) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            model,
            state: Mutex::new(State {
                disk: Disk::new(model),
                readers: Readers::default(),
                writers: VecDeque::new(),
                syncs: VecDeque::new(),
                arrived: 0,
                swept: 0,
                ends: false,
            }),
            work: Condvar::new(),
        });
        let of_thread = shared.clone();
        let thread = std::thread::Builder::new()
            .name("seeking-disk".into())
            .spawn(move || of_thread.serve())?;
        Ok(Self(Arc::new(Owner {
            shared,
            thread: Some(thread),
        })))
    }

    /// Seeks so far.
    pub fn seeks(&self) -> u64 {
        self.0.shared.state.lock().disk.seeks()
    }

    fn write(&self, file: u64, offset: u64, len: u64) {
        let shared = &self.0.shared;
        shared.wait_for(|state, done| {
            state.writers.push_back(WaitingWrite {
                file,
                offset,
                len,
                done,
            });
            state.admit_writers(shared.model.is_synced);
        });
    }

    fn read(&self, file: u64, offset: u64, len: u64) {
        self.0.shared.wait_for(|state, reply| {
            let runs = state.disk.find(file, offset, len);
            state.readers.push(ReadRequest { file, runs, reply });
        });
    }

    fn sync(&self) {
        self.0.shared.wait_for(|state, done| {
            let target = state.arrived;
            state.syncs.push_back(WaitingSync { target, done });
            state.end_syncs();
        });
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.shared.state.lock().ends = true;
        self.shared.work.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl<B: Backing> Policy<B> for SeekingDisk {
    fn admit(
        &self,
        _: &'static str,
        _: &B::Inode,
        _: Option<&std::ffi::OsStr>,
    ) -> Result<(), Errno> {
        Ok(())
    }

    fn transfer(&self, file: u64, transfer: Transfer) {
        match transfer {
            Transfer::Read(range) => self.read(file, range.start, range.end - range.start),
            Transfer::Write(range) => self.write(file, range.start, range.end - range.start),
            Transfer::Sync => self.sync(),
            Transfer::Close => self.0.shared.state.lock().disk.close(file),
        }
    }
}

impl Shared {
    /// Enters a request and returns when it is done.
    fn wait_for(&self, enter: impl FnOnce(&mut State, Done)) {
        let (done, wait) = sync_channel(1);
        enter(&mut self.state.lock(), done);
        self.work.notify_one();
        // A disk that ends answers by going away.
        let _ = wait.recv();
    }

    fn serve(&self) {
        let mut clock = Clock {
            free_at: Instant::now(),
        };
        while let Some(work) = self.next_work(&mut clock) {
            match work {
                Work::Read(request) => self.serve_read(request, &mut clock),
                Work::Sweep(runs) => self.serve_sweep(&runs, &mut clock),
            }
        }
    }

    /// Waits until there is something to do; `None` at the end.
    fn next_work(&self, clock: &mut Clock) -> Option<Work> {
        let mut state = self.state.lock();
        loop {
            if state.ends {
                return None;
            }
            let step = state.readers.next(&self.model, clock.free_at);
            if let ReadStep::Serve(request) = step {
                return Some(Work::Read(request));
            }
            let is_asked = !state.writers.is_empty() || !state.syncs.is_empty();
            if is_asked || state.disk.wants_sweep() {
                return Some(Work::Sweep(state.disk.take_sweep()));
            }
            self.wait(&mut state, step);
            clock.note_idle();
        }
    }

    fn wait(&self, state: &mut MutexGuard<'_, State>, step: ReadStep<Done>) {
        match step {
            ReadStep::IdleUntil(until) => drop(self.work.wait_until(state, until)),
            _ => self.work.wait(state),
        }
    }

    fn serve_read(&self, request: ReadRequest<Done>, clock: &mut Clock) {
        for run in &request.runs {
            let time = self.state.lock().disk.move_head(*run);
            clock.spend(time);
        }
        self.state
            .lock()
            .readers
            .note_served(&self.model, clock.free_at);
        let _ = request.reply.send(());
    }

    fn serve_sweep(&self, runs: &[Run], clock: &mut Clock) {
        if let Some(first) = runs.first() {
            let turn = self.state.lock().disk.turn_to(*first);
            clock.spend(turn);
        }
        for run in runs {
            let time = self.state.lock().disk.move_head(*run);
            clock.spend(time);
            let mut state = self.state.lock();
            state.disk.complete_write(*run);
            state.admit_writers(self.model.is_synced);
        }
        let mut state = self.state.lock();
        state.swept += runs.iter().map(|run| run.len).sum::<u64>();
        state.end_syncs();
    }
}

impl State {
    /// Lets writers in, in the order in which they came, as long as there is room. A client that syncs waits for the
    /// disk.
    fn admit_writers(&mut self, is_synced: bool) {
        while let Some(first) = self.writers.front()
            && self.disk.has_room(first.len)
        {
            let first = self.writers.pop_front().expect("it is there");
            self.disk.write(first.file, first.offset, first.len);
            self.arrived += first.len;
            if is_synced {
                self.syncs.push_back(WaitingSync {
                    target: self.arrived,
                    done: first.done,
                });
            } else {
                let _ = first.done.send(());
            }
        }
    }

    fn end_syncs(&mut self) {
        while self
            .syncs
            .front()
            .is_some_and(|sync| sync.target <= self.swept)
        {
            let sync = self.syncs.pop_front().expect("it is there");
            let _ = sync.done.send(());
        }
    }
}

impl Clock {
    /// The disk is busy for `time` more.
    fn spend(&mut self, time: Duration) {
        self.free_at += time;
        std::thread::sleep(self.free_at.saturating_duration_since(Instant::now()));
    }

    /// The disk had nothing to do until now.
    fn note_idle(&mut self) {
        self.free_at = self.free_at.max(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// So small that the test takes no time: 64 KiB of cache, 16 KiB of queue.
    fn small_disk() -> SeekingDisk {
        SeekingDisk::start(DiskModel::SATA_2010.scaled(4096)).expect("start the disk")
    }

    #[test]
    fn a_sync_returns_when_everything_before_it_is_on_the_disk() {
        let disk = small_disk();
        std::thread::scope(|scope| {
            for file in 0..8 {
                let disk = &disk;
                scope.spawn(move || {
                    // Four times the cache in all, so writers wait for room.
                    for step in 0..8 {
                        disk.write(file, step * 4096, 4096);
                        assert!(disk.0.shared.state.lock().disk.dirty_bytes() <= 64 << 10);
                    }
                });
            }
        });
        disk.sync();
        let state = disk.0.shared.state.lock();
        assert_eq!((state.arrived, state.swept), (256 << 10, 256 << 10));
        assert_eq!(state.disk.dirty_bytes(), 0);
    }

    #[test]
    fn a_server_that_syncs_answers_when_the_bytes_are_on_the_disk() {
        let model = DiskModel::SATA_2010.scaled(4096).synced();
        let disk = SeekingDisk::start(model).expect("start the disk");
        std::thread::scope(|scope| {
            for file in 0..4 {
                let disk = &disk;
                scope.spawn(move || {
                    for step in 0..4u64 {
                        disk.write(file, step * 512, 512);
                        assert!(disk.0.shared.state.lock().swept >= (step + 1) * 512);
                    }
                });
            }
        });
        let state = disk.0.shared.state.lock();
        assert_eq!((state.arrived, state.swept), (8 << 10, 8 << 10));
    }

    #[test]
    fn readers_are_served_where_their_bytes_lie() {
        let disk = small_disk();
        disk.write(1, 0, 8192);
        disk.write(2, 0, 8192);
        disk.sync();
        let seeks = disk.seeks();
        std::thread::scope(|scope| {
            for file in [1, 2] {
                let disk = &disk;
                scope.spawn(move || {
                    disk.read(file, 0, 4096);
                    disk.read(file, 4096, 4096);
                });
            }
        });
        assert!(disk.seeks() > seeks);
    }
}
