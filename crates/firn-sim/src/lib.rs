//! A simulated file system for tests: in memory and deterministic, with faults, crashes and lost writes. It is a
//! *backing*, the trait for file systems below a mount.
//!
//! Terms
//! * A *step* is one call of the backing by one process. Each process counts its steps.
//! * A *plan* is a function that sees the name and number of each step and may return a fault for it ([`Plan`]).
//! * A *process* is a user of the disk with its own steps, plan, hangs and locks.
//!
//! What a test can do
//! * Make calls fail, or stop the process at a call ([`SimBacking::revive`] ends that).
//! * Make a call hang until the test releases it ([`SimBacking::hang`]).
//! * Cut the power: [`SimBacking::power_loss`] leaves one of the states that a real disk may have afterwards.
//! * Copy the disk: [`SimBacking::fork`] returns a backing over the copy, which then changes independently.
//! * Add a process or host on the same disk: [`SimBacking::another_process`].
//! * Divide the files over several lanes (storage servers), each of which may fail ([`SimBacking::set_lanes`]).
//! * Let a process see old listings of directories ([`SimBacking::set_listing_lag`]), or old attributes and old names
//!   in directories ([`SimBacking::set_attribute_lag`]).
//!
//! A call panics if the calling thread holds a lock that must not be held across calls of a backing. Permissions are
//! not checked, as if the caller were root.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use firn_backing::unsynced::Unsynced;
use firn_backing::{Errno, LaneIndex, Result};

mod calls;
mod data;
mod disk;
mod lag;
mod locks;
mod power;
mod rename;
pub mod suite;
mod tree;

pub use calls::{SimDir, SimFile, SimInode};
pub use data::PAGE_BYTES;
pub use disk::Disk;
pub use locks::LockReach;
pub use tree::{Tree, TreeEntry, tree};

/// The fault of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The call fails and changes nothing.
    Error(Errno),
    /// `write_at` writes at most this many bytes. Other calls are not affected.
    ShortWrite(usize),
    /// The process dies: this call and all later ones change nothing and fail with EIO, until [`SimBacking::revive`].
    Crash,
}

/// Returns the fault of a call, from the call's name and the number of its step; the first step is 1. A call with
/// variants has a name for each: [`firn_backing::Names::make`] is `mkdir`, `mknod` or `symlink`.
pub type Plan = Box<dyn FnMut(&'static str, u64) -> Option<Fault> + Send>;

/// The simulated backing, as one process uses it. Clones belong to the same process.
#[derive(Clone, Default)]
pub struct SimBacking {
    state: Arc<Mutex<DiskState>>,
    /// Index of this process in [`DiskState::processes`].
    process: usize,
    /// Number of open files.
    open: Arc<AtomicUsize>,
    /// Number of directory entries that this process has read.
    entries_read: Arc<AtomicU64>,
    /// Whether syncfs(2) has no effect, so that each object is synced separately.
    is_synced_one_by_one: Arc<AtomicBool>,
    unsynced: Arc<Unsynced>,
    lanes: Arc<SimLanes>,
    gathers: Arc<AtomicBool>,
    lag: Arc<Mutex<lag::Lag>>,
}

/// The lanes of a simulated backing.
#[derive(Default)]
struct SimLanes {
    /// Number of lanes besides the first.
    further: AtomicU16,
    /// A bit for each lane whose files cannot be written.
    failing: AtomicU64,
}

struct DiskState {
    disk: Disk,
    /// The processes; at least one.
    processes: Vec<Process>,
    locks: locks::Locks,
}

impl Default for DiskState {
    fn default() -> Self {
        Self {
            disk: Disk::default(),
            processes: vec![Process::default()],
            locks: locks::Locks::default(),
        }
    }
}

/// State of one process: its steps, and the faults and hangs of its next calls.
#[derive(Default)]
struct Process {
    steps: u64,
    plan: Option<Plan>,
    dead: bool,
    /// Calls that are to hang. The next call that matches one begins only after its [`Hang`] is released.
    hangs: Vec<(HangTrigger, Arc<HangState>)>,
}

/// Which call is to hang.
#[derive(Clone, Copy, PartialEq, Eq)]
enum HangTrigger {
    Op(&'static str),
    Step(u64),
}

/// A call that is to hang, see [`SimBacking::hang`]. Dropping this value lets the call continue.
pub struct Hang(Arc<HangState>);

#[derive(Default)]
struct HangState {
    progress: Mutex<HangProgress>,
    changed: Condvar,
}

#[derive(Default)]
struct HangProgress {
    reached: bool,
    released: bool,
}

impl Hang {
    /// Waits until a call hangs.
    pub fn await_call(&self) {
        let mut progress = self.0.progress.lock();
        while !progress.reached {
            self.0.changed.wait(&mut progress);
        }
    }

    /// Whether a call hangs now.
    pub fn is_reached(&self) -> bool {
        self.0.progress.lock().reached
    }

    /// Lets the call continue.
    pub fn release(self) {}
}

impl Drop for Hang {
    fn drop(&mut self) {
        self.0.progress.lock().released = true;
        self.0.changed.notify_all();
    }
}

impl HangState {
    fn wait(&self) {
        let mut progress = self.progress.lock();
        progress.reached = true;
        self.changed.notify_all();
        while !progress.released {
            self.changed.wait(&mut progress);
        }
    }
}

impl SimBacking {
    /// Returns a backing over an empty disk without a bound of its capacity and without faults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the same as [`SimBacking::new`]. If `seed` is odd, syncfs(2) has no effect on its file system.
    pub fn from_seed(seed: u64) -> Self {
        let sim = Self::new();
        sim.sync_one_by_one(seed % 2 == 1);
        sim
    }

    /// Returns a backing over a copy of a disk.
    pub fn from_disk(disk: Disk) -> Self {
        let state = DiskState {
            disk,
            ..DiskState::default()
        };
        Self {
            state: Arc::new(Mutex::new(state)),
            ..Self::default()
        }
    }

    /// Returns a copy of the disk and its cache, as they are now.
    pub fn snapshot(&self) -> Disk {
        self.state.lock().disk.clone()
    }

    /// Returns a new backing over a copy of the disk, with one process that has no plan and no steps.
    pub fn fork(&self) -> Self {
        let fork = Self::from_disk(self.snapshot());
        fork.sync_one_by_one(self.is_synced_one_by_one.load(Ordering::Relaxed));
        fork
    }

    /// Returns another process over the same disk, on this host or another one. The process has its own steps, plan and
    /// hangs, and its locks exclude those of this process. One of the two may crash while the other one continues.
    pub fn another_process(&self) -> Self {
        let process = {
            let mut state = self.state.lock();
            state.processes.push(Process::default());
            state.processes.len() - 1
        };
        Self {
            state: Arc::clone(&self.state),
            process,
            open: Arc::default(),
            entries_read: Arc::default(),
            is_synced_one_by_one: Arc::clone(&self.is_synced_one_by_one),
            unsynced: Arc::default(),
            lanes: Arc::clone(&self.lanes),
            gathers: Arc::clone(&self.gathers),
            lag: Arc::default(),
        }
    }

    /// Makes this process sometimes see old listings of directories, chosen by `seed`. `None` ends that.
    pub fn set_listing_lag(&self, seed: Option<u64>) {
        self.lag.lock().set(seed, false);
    }

    /// Makes this process sometimes see old attributes, which include lengths, and old names in directories, instead of
    /// old listings ([`firn_backing::Freshness`]). `None` ends that.
    pub fn set_attribute_lag(&self, seed: Option<u64>) {
        self.lag.lock().set(seed, true);
    }

    /// Makes the backing report that pieces of every file are to be gathered ([`firn_backing::Facts::gathers`]), or
    /// ends that.
    pub fn set_gathers(&self, gathers: bool) {
        self.gathers.store(gathers, Ordering::Relaxed);
    }

    /// Spreads the files over `count` lanes, at most 64, by their inode numbers.
    pub fn set_lanes(&self, count: u16) {
        assert!((1..=64).contains(&count));
        self.lanes.further.store(count - 1, Ordering::Relaxed);
    }

    /// Makes writes to the files of a lane fail with EIO, or ends that.
    pub fn fail_lane(&self, lane: LaneIndex, fails: bool) {
        let bit = 1 << lane.index();
        if fails {
            self.lanes.failing.fetch_or(bit, Ordering::Relaxed);
        } else {
            self.lanes.failing.fetch_and(!bit, Ordering::Relaxed);
        }
    }

    fn lane_of_number(&self, ino: u64) -> LaneIndex {
        LaneIndex::new((ino % u64::from(self.lanes.further.load(Ordering::Relaxed) + 1)) as u16)
    }

    fn lane_fails(&self, ino: u64) -> bool {
        let failing = self.lanes.failing.load(Ordering::Relaxed);
        failing >> self.lane_of_number(ino).index() & 1 == 1
    }

    /// Sets the time between two consecutive changes; the default is one second.
    pub fn set_tick(&self, tick: Duration) {
        self.state.lock().disk.tick = tick;
    }

    /// Lets time pass without a change.
    pub fn pass(&self, time: Duration) {
        self.state.lock().disk.pass(time);
    }

    /// Sets which processes see a lock, for all processes over this disk.
    pub fn set_lock_reach(&self, reach: LockReach) {
        self.state.lock().locks.reach = reach;
    }

    /// Makes the server release the locks of this process, as after a long time without contact. The process is not
    /// notified; its writes to files that it had locked fail with EIO.
    pub fn lose_locks(&self) {
        self.state.lock().locks.end_locks_of_process(self.process);
    }

    /// Makes syncfs(2) ineffective, as over FUSE, or ends that.
    pub fn sync_one_by_one(&self, is_so: bool) {
        self.is_synced_one_by_one.store(is_so, Ordering::Relaxed);
    }

    /// Simulates that this process ends and another one continues with the same disk. The new process does not know
    /// which changes are not synced. The locks of the old process are released.
    pub fn begin_new_process(&self) {
        self.unsynced.reset();
        self.lose_locks();
    }

    /// Returns the number of calls so far.
    pub fn steps(&self) -> u64 {
        self.this_process(&mut self.state.lock()).steps
    }

    /// Returns the number of files that are open now.
    pub fn open_files(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Returns the number of directory entries that this process has read.
    pub fn entries_read(&self) -> u64 {
        self.entries_read.load(Ordering::Relaxed)
    }

    /// Sets the plan that decides the fault of each later call.
    pub fn set_plan(&self, plan: impl FnMut(&'static str, u64) -> Option<Fault> + Send + 'static) {
        self.this_process(&mut self.state.lock()).plan = Some(Box::new(plan));
    }

    /// Removes the plan: later calls have no fault.
    pub fn clear_plan(&self) {
        self.this_process(&mut self.state.lock()).plan = None;
    }

    /// Crashes at step `n` (counted from the first call), as [`Fault::Crash`] does.
    pub fn crash_at(&self, n: u64) {
        self.set_plan(move |_, step| (step >= n).then_some(Fault::Crash));
    }

    /// Makes the next call with this name hang until the returned value is dropped. Other calls do not wait.
    pub fn hang(&self, op: &'static str) -> Hang {
        self.add_hang(HangTrigger::Op(op))
    }

    /// Makes the call that would be step `n` hang, whatever its name is. Until the returned value is dropped, the call
    /// does nothing and is not counted as a step.
    pub fn hang_at(&self, n: u64) -> Hang {
        self.add_hang(HangTrigger::Step(n))
    }

    fn this_process<'a>(&self, state: &'a mut DiskState) -> &'a mut Process {
        &mut state.processes[self.process]
    }

    fn add_hang(&self, trigger: HangTrigger) -> Hang {
        let hang = Arc::new(HangState::default());
        let mut state = self.state.lock();
        self.this_process(&mut state)
            .hangs
            .push((trigger, Arc::clone(&hang)));
        Hang(hang)
    }

    /// Whether a crash has happened.
    pub fn is_dead(&self) -> bool {
        self.this_process(&mut self.state.lock()).dead
    }

    /// Ends a crash, and removes the plan. Unsynced changes remain; [`SimBacking::power_loss`] drops some of them.
    pub fn revive(&self) {
        self.begin_new_process();
        let mut state = self.state.lock();
        let process = self.this_process(&mut state);
        process.dead = false;
        process.plan = None;
    }

    /// Simulates a power loss: drops some of the unsynced changes, chosen by `seed`. Inodes and files from before must
    /// not be used any more; they give ESTALE if the object is gone.
    pub fn power_loss(&self, seed: u64) {
        self.begin_new_process();
        self.state.lock().disk.power_loss(seed);
    }

    /// Limits the bytes in files, counted in pages. A write beyond the limit fails with ENOSPC. `None` removes the
    /// limit.
    pub fn set_capacity(&self, bytes: Option<u64>) {
        self.state.lock().disk.capacity_bytes = bytes;
    }

    /// Gives the disk another device number, as if it had been unmounted and mounted again.
    pub fn set_device(&self, device: u64) {
        self.begin_new_process();
        self.state.lock().disk.device = device;
    }

    /// Makes every change fail with EROFS, or ends that.
    pub fn set_read_only(&self, read_only: bool) {
        self.state.lock().disk.read_only = read_only;
    }

    /// Checks the disk's invariants. The error describes the first one that is broken.
    pub fn fsck(&self) -> std::result::Result<(), String> {
        self.state.lock().disk.fsck()
    }

    /// Returns all objects at and below the root, for comparison. Takes no steps.
    pub fn tree(&self) -> Tree {
        tree(&self.fork()).expect("a fork has no faults")
    }
}

impl Process {
    /// Returns the hang that applies to this call, and removes it from the list.
    fn remove_hang(&mut self, op: &'static str) -> Option<Arc<HangState>> {
        let triggers = [HangTrigger::Op(op), HangTrigger::Step(self.steps + 1)];
        let index = self
            .hangs
            .iter()
            .position(|(trigger, _)| triggers.contains(trigger))?;
        let (_, hang) = self.hangs.swap_remove(index);
        Some(hang)
    }

    /// Counts a step (a call of this process) and applies the fault that the test's plan has for it. Returns the
    /// maximum number of bytes that a write may write.
    fn step(&mut self, op: &'static str) -> Result<usize> {
        self.steps += 1;
        if self.dead {
            return Err(Errno::IO);
        }
        let steps = self.steps;
        match self.plan.as_mut().and_then(|plan| plan(op, steps)) {
            None => Ok(usize::MAX),
            Some(Fault::Error(errno)) => Err(errno),
            Some(Fault::ShortWrite(bytes)) => Ok(bytes),
            Some(Fault::Crash) => {
                self.dead = true;
                Err(Errno::IO)
            }
        }
    }
}

impl DiskState {
    /// Runs [`Process::step`] for one process. If the process is dead after this step, its locks end.
    fn step(&mut self, process: usize, op: &'static str) -> Result<usize> {
        let bytes_max = self.processes[process].step(op);
        if self.processes[process].dead {
            self.locks.end_locks_of_process(process);
        }
        bytes_max
    }
}
