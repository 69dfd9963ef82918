//! One simulated machine: it can be crashed at any store to the arena and any call of the backing.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use firn_arena::journal::Medium;
use firn_arena::{Arena, Identity};
use firn_backing::{Errno, Files, Names, Volume};
use firn_engine::{
    DrainPolicy, Engine, EngineOptions, Entry, Executor, InodeId, LaneIndex, LaneLimits, NextStep,
    ROOT, Recovered, SettleStep, SpillStep,
};
use firn_format::geometry::Geometry;
use firn_sim::{Fault, SimBacking};

/// Counts steps: stores to the arena and calls of the backing. Stops the world at a chosen step.
#[derive(Clone)]
pub struct Fuse {
    steps: Arc<AtomicU64>,
    stop_at: Arc<AtomicU64>,
    stopped: Arc<AtomicBool>,
    arena: Arc<Mutex<PathBuf>>,
}

impl Fuse {
    fn step(&self) -> bool {
        if self.stopped.load(Ordering::Relaxed) {
            return true;
        }
        let step = self.steps.fetch_add(1, Ordering::Relaxed);
        if step < self.stop_at.load(Ordering::Relaxed) {
            return false;
        }
        // After the crash, the next life finds the arena as it is now.
        let path = self.arena.lock().unwrap().clone();
        std::fs::copy(&path, path.with_extension("crashed")).expect("the arena is copied");
        let spill = path.with_file_name(SPILL);
        if spill.exists() {
            std::fs::copy(&spill, spill.with_extension("crashed"))
                .expect("the spill file is copied");
        }
        for memory_file in memory_files_of(&path) {
            let mut to = memory_file.clone().into_os_string();
            to.push(CRASHED);
            std::fs::copy(&memory_file, to).expect("the memory file is copied");
        }
        self.stopped.store(true, Ordering::Relaxed);
        true
    }
}

/// Suffix of the copy of a memory file that was made at a crash.
const CRASHED: &str = ".crashed";

/// Returns the memory files of an arena, and their copies that were made at a crash.
fn memory_files_of(arena: &Path) -> Vec<PathBuf> {
    let mut prefix = arena.file_name().expect("a name").to_owned();
    prefix.push(".m");
    let dir = std::fs::read_dir(arena.parent().expect("a directory")).expect("a directory");
    let names = dir.map(|entry| entry.expect("an entry").path());
    let is_of_arena = |path: &PathBuf| {
        let name = path.file_name().expect("a name").as_encoded_bytes();
        name.starts_with(prefix.as_encoded_bytes())
    };
    names.filter(is_of_arena).collect()
}

/// Renames the copies of memory files from the last life's crash for the next life, and removes the originals.
fn take_over_memory_files(last: &Path, next: &Path) {
    for path in memory_files_of(last) {
        let name = path.file_name().expect("a name").to_str().expect("text");
        let Some(number) = name.strip_suffix(CRASHED) else {
            std::fs::remove_file(&path).expect("removed");
            continue;
        };
        let number = number.rsplit_once(".m").expect("a number").1;
        let mut to = next.as_os_str().to_owned();
        to.push(format!(".m{number}"));
        std::fs::rename(&path, to).expect("the crashed memory file");
    }
}

/// An executor that drains only when a test calls for a step. A caller that waits for a drain makes the missing steps
/// itself.
struct Stepper(Weak<Engine<SimBacking>>);

impl Stepper {
    fn attach(engine: &Arc<Engine<SimBacking>>) {
        engine
            .drainer
            .set_executor(Arc::new(Self(Arc::downgrade(engine))));
    }
}

impl Executor for Stepper {
    fn wake(&self, _: LaneIndex) {}

    fn wait_for(&self, outcome: &Receiver<Result<(), Errno>>) -> Result<(), Errno> {
        const PATIENCE: Duration = Duration::from_secs(60);
        const LOOK_AGAIN: Duration = Duration::from_millis(1);
        let engine = self.0.upgrade().expect("its engine waits");
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Ok(result) = outcome.try_recv() {
                return result;
            }
            // The awaited job may be under way in another thread.
            if !drain_step(&engine)
                && let Ok(result) = outcome.recv_timeout(LOOK_AGAIN)
            {
                return result;
            }
            assert!(Instant::now() < deadline, "a drain does not end");
        }
    }
}

thread_local! {
    /// Number of drain steps that this thread has made. It selects the lane with which the next step begins, so that
    /// lanes alternate.
    static STEPS: Cell<usize> = const { Cell::new(0) };
}

/// Makes one step of the drain. Returns whether there was work.
fn drain_step(engine: &Engine<SimBacking>) -> bool {
    let lanes: Vec<LaneIndex> = engine.drainer.lanes().collect();
    let first = STEPS.replace(STEPS.get() + 1);
    // Each lane is tried twice, because a try of one lane may put a file of another lane into line.
    let mut in_turn = (0..2 * lanes.len()).map(|step| lanes[(first + step) % lanes.len()]);
    in_turn.any(|lane| drain_lane(engine, lane))
}

fn drain_lane(engine: &Engine<SimBacking>, lane: LaneIndex) -> bool {
    match engine.drainer.pick(lane, LaneLimits::NONE) {
        NextStep::Job(job) => {
            let outcome = job.execute(engine);
            engine.drainer.complete(job, outcome);
            true
        }
        NextStep::Idle { .. } => false,
    }
}

pub struct World {
    dir: tempfile::TempDir,
    pub backing: SimBacking,
    pub engine: Arc<Engine<SimBacking>>,
    pub fuse: Fuse,
    options: EngineOptions,
    disk: DiskKind,
    lives: u32,
}

/// Answers of the simulated backing about the placement of data.
#[derive(Clone, Copy)]
pub struct DiskKind {
    pub lanes: u16,
    /// Whether the backing may write distant pieces in one call.
    pub gathers: bool,
}

impl DiskKind {
    pub const PLAIN: Self = Self {
        lanes: 1,
        gathers: false,
    };

    fn apply(self, backing: &SimBacking) {
        backing.set_lanes(self.lanes);
        backing.set_gathers(self.gathers);
    }
}

pub fn options() -> EngineOptions {
    let mut options = EngineOptions::new(CHUNK);
    // Runs are small, so that a short test makes several writes to the backing.
    options.drain_write_bytes_min = 16 << 10;
    options.drain_write_bytes_max = 64 << 10;
    // Fewer than there are files, so that objects are closed and looked up again.
    options.objects_max = 4;
    options
}

pub const CHUNK: u64 = 128 << 10;
const CHUNKS: u64 = 6;
/// Number of chunks in memory, and in the spill file, in a world with a spill file.
const SPILLING: (u64, u64) = (3, 5);
const SPILL: &str = "spill";

fn path_in(dir: &Path, life: u32) -> PathBuf {
    dir.join(format!("arena{life}"))
}

impl World {
    /// Makes a world with the drain policy *eager*.
    pub fn new() -> Self {
        Self::with(options(), false)
    }

    /// Makes a world that drains only on request.
    #[allow(dead_code, reason = "not every test needs it")]
    pub fn on_demand() -> Self {
        Self::with(
            EngineOptions {
                drain: DrainPolicy::Demand,
                ..options()
            },
            false,
        )
    }

    /// Makes a world with this drain policy, less memory, and a spill file.
    #[allow(dead_code, reason = "not every test needs it")]
    pub fn spilling(drain: DrainPolicy) -> Self {
        Self::with(EngineOptions { drain, ..options() }, true)
    }

    /// Makes a world that drains data of this age.
    #[allow(dead_code, reason = "not every test needs it")]
    pub fn draining_after(drain_age: std::time::Duration) -> Self {
        Self::with(
            EngineOptions {
                drain_age,
                ..options()
            },
            false,
        )
    }

    /// Makes a world that keeps few files of the backing open.
    pub fn with_few_open_files() -> Self {
        Self::with(
            EngineOptions {
                open_files_max: 4,
                ..options()
            },
            false,
        )
    }

    fn with(options: EngineOptions, spilling: bool) -> Self {
        Self::over(DiskKind::PLAIN, options, spilling)
    }

    /// Makes a world over a backing of this kind.
    pub fn over(disk: DiskKind, options: EngineOptions, spilling: bool) -> Self {
        STEPS.set(0);
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on tmpfs");
        let backing = SimBacking::new();
        disk.apply(&backing);
        let path = path_in(dir.path(), 0);
        let identity = Identity {
            backing: PathBuf::from("/sim"),
            dev: 1,
            ino: 1,
        };
        let (memory, spill) = if spilling { SPILLING } else { (CHUNKS, 0) };
        let geometry =
            Geometry::with_spill(memory * CHUNK, CHUNK, spill * CHUNK).expect("a valid geometry");
        let arena = Arena::create_with_spill(&path, geometry, &identity, &dir.path().join(SPILL));
        let arena = arena.expect("an arena");
        let engine = Engine::begin(backing.clone(), arena, options.clone()).expect("an engine");
        Stepper::attach(&engine);
        let fuse = Fuse {
            steps: Arc::default(),
            stop_at: Arc::new(AtomicU64::new(u64::MAX)),
            stopped: Arc::default(),
            arena: Arc::new(Mutex::new(path)),
        };
        let world = Self {
            dir,
            backing,
            engine,
            fuse,
            options,
            disk,
            lives: 0,
        };
        world.arm();
        world
    }

    /// Makes the world stop after `steps` more steps.
    pub fn stop_in(&self, steps: u64) {
        let now = self.fuse.steps.load(Ordering::Relaxed);
        self.fuse
            .stop_at
            .store(now.saturating_add(steps), Ordering::Relaxed);
    }

    /// Returns the number of recoveries so far.
    pub fn lives(&self) -> u32 {
        self.lives
    }

    pub fn steps(&self) -> u64 {
        self.fuse.steps.load(Ordering::Relaxed)
    }

    pub fn stopped(&self) -> bool {
        self.fuse.stopped.load(Ordering::Relaxed)
    }

    fn arm(&self) {
        let fuse = self.fuse.clone();
        firn_arena::set_probe(Some(Box::new(move || {
            fuse.step();
        })));
        let fuse = self.fuse.clone();
        self.backing
            .set_plan(move |_, _| fuse.step().then_some(Fault::Crash));
    }

    /// Makes calls of the backing fail at random, as `seed` determines.
    pub fn arm_with_faults(&self, seed: u64) {
        use rand::{RngExt, SeedableRng};
        let fuse = self.fuse.clone();
        let mut rng = rand::rngs::StdRng::seed_from_u64(seed);
        self.backing.set_plan(move |call, _| {
            if fuse.step() {
                return Some(Fault::Crash);
            }
            match (call, rng.random_range(0..10)) {
                ("write_at", 0) => Some(Fault::Error(Errno::IO)),
                ("write_at", 1) => Some(Fault::Error(Errno::NOSPC)),
                ("write_at", 2..4) => Some(Fault::ShortWrite(rng.random_range(1..5000))),
                ("set_len" | "sync" | "rename" | "unlink", 0) => Some(Fault::Error(Errno::IO)),
                _ => None,
            }
        });
    }

    /// Begins the next life from the state that the last one left. The world stops again after `steps` steps, even
    /// during the recovery. In that case the recovery is repeated with twice as many steps, until it completes.
    pub fn recover(&mut self, mut steps: u64) -> Recovered {
        loop {
            firn_arena::set_probe(None);
            let crashed = self.fuse.arena.lock().unwrap().with_extension("crashed");
            self.lives += 1;
            let path = path_in(self.dir.path(), self.lives);
            std::fs::rename(&crashed, &path).expect("the crashed arena");
            let last = path_in(self.dir.path(), self.lives - 1);
            let _ = std::fs::remove_file(&last);
            take_over_memory_files(&last, &path);
            let spill = self.dir.path().join(SPILL);
            if spill.exists() {
                std::fs::rename(spill.with_extension("crashed"), spill)
                    .expect("the crashed spill file");
            }
            *self.fuse.arena.lock().unwrap() = path.clone();
            self.backing = SimBacking::from_disk(self.backing.snapshot());
            self.disk.apply(&self.backing);
            self.fuse.stopped.store(false, Ordering::Relaxed);
            self.stop_in(steps);
            self.arm();
            let (arena, stored, damage) = Arena::attach(&path).expect("the arena attaches");
            assert_eq!(damage, [], "a crash is no damage");
            if std::env::var_os("FIRN_TRACE").is_some() {
                eprintln!(
                    "life {}: {:#?}",
                    self.lives,
                    stored.iter().map(|s| s.piece).collect::<Vec<_>>()
                );
                let mut bytes = vec![0; arena.journal_region().len()];
                arena.journal_region().read(0, &mut bytes);
                eprintln!(
                    "{:?}",
                    firn_arena::journal::replay(&firn_arena::journal::Memory(bytes)).ledger
                );
            }
            let attached =
                Engine::attach(self.backing.clone(), arena, &stored, self.options.clone());
            if self.stopped() {
                steps = steps.max(8).saturating_mul(2);
                continue;
            }
            let (engine, recovered) = attached.expect("the engine attaches");
            Stepper::attach(&engine);
            self.engine = engine;
            return recovered;
        }
    }

    /// Stops the world now, as a crash would, with no operation under way.
    pub fn stop_now(&self) {
        self.fuse.stop_at.store(0, Ordering::Relaxed);
        self.fuse.step();
    }

    /// Makes one step of the drain. Returns whether there was work.
    pub fn drain_step(&self) -> bool {
        drain_step(&self.engine)
    }

    /// Moves chunks to the spill file as long as memory is short.
    pub fn spill(&self) {
        while self.engine.room.spill_step() == SpillStep::More && !self.stopped() {}
    }

    /// Moves files into memory files, for `steps` steps or until no file is left to move.
    pub fn settle(&self, steps: u32) {
        for _ in 0..steps {
            if self.stopped() || matches!(self.engine.room.settle_step(), SettleStep::Idle { .. }) {
                return;
            }
        }
    }

    /// Drains until nothing is held.
    pub fn drain_all(&self) {
        for _ in 0..10_000 {
            if self.engine.figures().held_bytes == 0 || self.stopped() {
                return;
            }
            self.engine.durability.drain_tree(b"");
            while self.drain_step() && !self.stopped() {}
        }
        panic!("the drain does not end: {:?}", self.engine.figures());
    }

    /// Returns the inode of a path.
    pub fn find(&self, path: &str) -> Result<InodeId, Errno> {
        let mut inode = ROOT;
        for name in path.split('/').filter(|n| !n.is_empty()) {
            let Entry { inode: next, .. } =
                self.engine.namespace.lookup(inode, OsStr::new(name))?;
            inode = next;
        }
        Ok(inode)
    }

    /// Returns the inode of the directory, and the last name, of a path.
    pub fn parent<'a>(&self, path: &'a str) -> Result<(InodeId, &'a OsStr), Errno> {
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        Ok((self.find(dir)?, OsStr::new(name)))
    }

    /// Returns the contents of all regular files in the backing.
    pub fn backing_tree(&self) -> BTreeMap<String, Vec<u8>> {
        let files = self.backing_files().into_iter();
        files
            .map(|(path, (_, contents))| (path, contents))
            .collect()
    }

    /// Returns the inode numbers and contents of all regular files in the backing.
    pub fn backing_files(&self) -> BTreeMap<String, (u64, Vec<u8>)> {
        let quiet = self.backing.fork();
        let mut out = BTreeMap::new();
        let todo = Rc::new(Cell::new(vec![(String::new(), quiet.root())]));
        loop {
            let mut list = todo.take();
            let Some((path, inode)) = list.pop() else {
                break;
            };
            let dir = quiet.open_dir(&inode).expect("a directory opens");
            let mut names = Vec::new();
            quiet
                .read_dir(&dir, 0, &mut |entry| {
                    names.push(entry.name.to_owned());
                    true
                })
                .expect("a directory is read");
            for name in names.iter().filter(|n| *n != "." && *n != "..") {
                let (child, attr) = quiet.lookup(&inode, name).expect("an entry is there");
                let text = name.to_str().expect("names are text");
                let full = if path.is_empty() {
                    text.to_owned()
                } else {
                    format!("{path}/{text}")
                };
                match attr.kind {
                    firn_backing::Kind::Dir => list.push((full, child)),
                    firn_backing::Kind::File => {
                        let file = quiet
                            .open(&child, firn_backing::Access::Read)
                            .expect("a file opens");
                        let mut contents = vec![0; attr.size as usize];
                        let n = quiet
                            .read_at(&file, &mut contents, 0)
                            .expect("a file is read");
                        assert_eq!(n, contents.len());
                        out.insert(full, (attr.ino, contents));
                    }
                    _ => {}
                }
            }
            todo.set(list);
        }
        out
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if !std::thread::panicking() && !self.stopped() {
            self.engine.assert_counters();
        }
        firn_arena::set_probe(None);
    }
}
