//! Sequential order: a lane writes one file after the other, and an awaited file comes first.
//!
//! `FIRN_SEED` repeats one run.

use crate::common;

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::world::{self, DiskKind, World};
use firn_backing::{Caller, Placement};
use firn_engine::{HandleId, InodeId, Job, LaneIndex, LaneLimits, NextStep, Order, ROOT, Written};
use firn_sim::SimBacking;
use rand::{RngExt, SeedableRng, rngs::StdRng};

const CALLER: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
};
const O_RDWR: i32 = 2;
/// Number of files. All of them fit into the arena.
const FILES: usize = 8;
const FILE_BYTES_MAX: usize = 30_000;

/// Record of the turns of one lane.
#[derive(Default)]
struct Trace {
    /// Files in the order in which their turns began.
    turns: Vec<InodeId>,
    /// Files for which a caller waits and whose turn has not begun since, in the order in which the waits began.
    awaited: VecDeque<InodeId>,
    under_way: Vec<Job<SimBacking>>,
}

struct Run {
    world: World,
    rng: StdRng,
    files: Vec<(InodeId, HandleId)>,
    lanes: BTreeMap<usize, Trace>,
    answered: Arc<AtomicUsize>,
    waiting: usize,
}

impl Run {
    fn new(seed: u64, lanes: u16) -> Self {
        let mut options = world::options();
        options.order = Order::Sequential;
        // Runs have a few kilobytes, and no write begins without a request.
        options.drain_write_bytes_max = 4096;
        options.drain_write_bytes_min = 1 << 20;
        let disk = DiskKind {
            lanes,
            ..DiskKind::PLAIN
        };
        let world = World::over(disk, options, false);
        Self {
            world,
            rng: StdRng::seed_from_u64(seed),
            files: Vec::new(),
            lanes: (0..usize::from(lanes))
                .map(|lane| (lane, Trace::default()))
                .collect(),
            answered: Arc::default(),
            waiting: 0,
        }
    }

    fn write_files(&mut self) {
        for number in 0..FILES {
            let name = format!("file_{number}");
            let engine = &self.world.engine;
            let (entry, opened) = engine
                .create(&CALLER, ROOT, OsStr::new(&name), 0o644, O_RDWR)
                .expect("create");
            let mut offset = 0;
            let bytes = self.rng.random_range(1..FILE_BYTES_MAX);
            while offset < bytes {
                // Each write makes a separate piece.
                let len = (bytes - offset).min(self.rng.random_range(1000..4000));
                let written = engine.write(opened.handle, offset as u64, &vec![7; len], None);
                assert_eq!(written, Ok(Written::Bytes(len)), "there is room");
                offset += len;
            }
            self.files.push((entry.inode, opened.handle));
        }
    }

    fn lane_of(&self, inode: InodeId) -> usize {
        let object = self
            .world
            .engine
            .tree
            .object_of(inode)
            .expect("it is there");
        self.world.backing.facts(&object).lane.index()
    }

    /// Lets a caller begin to wait for one of the files.
    fn wait_for_one(&mut self) {
        let (inode, handle) = self.files[self.rng.random_range(0..self.files.len())];
        let lane = self.lane_of(inode);
        let path = self.world.engine.tree.shown_path(inode, None);
        let held = self.world.engine.files_below(path.as_bytes());
        let answered = Arc::clone(&self.answered);
        self.waiting += 1;
        self.world.engine.drained(
            handle,
            Box::new(move |_| {
                answered.fetch_add(1, Ordering::SeqCst);
            }),
        );
        let is_pending = held.iter().any(|file| file.held_bytes > 0);
        let trace = self.lanes.get_mut(&lane).expect("a lane");
        let has_turn = trace.turns.last() == Some(&inode);
        if is_pending && !has_turn && !trace.awaited.contains(&inode) {
            trace.awaited.push_back(inode);
        }
    }

    /// Picks the next write of a lane. Returns false if there is none.
    fn pick(&mut self, lane: usize) -> bool {
        let index = LaneIndex::new(lane as u16);
        let NextStep::Job(job) = self.world.engine.drainer.pick(index, LaneLimits::NONE) else {
            return false;
        };
        let inode = job.inode();
        assert_eq!(self.lane_of(inode), lane, "a job of another lane");
        let trace = self.lanes.get_mut(&lane).expect("a lane");
        for other in &trace.under_way {
            assert_eq!(other.inode(), inode, "two files are written at once");
        }
        if trace.turns.last() != Some(&inode) {
            assert!(!trace.turns.contains(&inode), "a file has a second turn");
            trace.turns.push(inode);
            if let Some(first) = trace.awaited.pop_front() {
                assert_eq!(inode, first, "the first awaited is served first");
            }
        }
        trace.under_way.push(job);
        true
    }

    fn complete_one(&mut self, lane: usize) {
        let trace = self.lanes.get_mut(&lane).expect("a lane");
        if !trace.under_way.is_empty() {
            let at = self.rng.random_range(0..trace.under_way.len());
            let job = trace.under_way.swap_remove(at);
            let outcome = job.execute(&self.world.engine);
            self.world.engine.drainer.complete(job, outcome);
        }
    }

    fn is_idle(&self) -> bool {
        self.lanes.values().all(|trace| trace.under_way.is_empty())
    }
}

fn run(seed: u64) {
    let lanes = 1 + (seed % 3) as u16;
    let mut run = Run::new(seed, lanes);
    // Maximum number of writes that are under way in a lane at a time.
    let writers = run.rng.random_range(1..4);
    run.write_files();
    run.world.engine.durability.drain_tree(b"");
    loop {
        let lane = run.rng.random_range(0..usize::from(lanes));
        match run.rng.random_range(0..10) {
            0 => run.wait_for_one(),
            1..6 if run.lanes[&lane].under_way.len() < writers => {
                let picked = run.pick(lane);
                if !picked && run.is_idle() && run.world.engine.figures().held_bytes == 0 {
                    break;
                }
            }
            _ => run.complete_one(lane),
        }
    }
    assert_eq!(run.answered.load(Ordering::SeqCst), run.waiting);
    let turns: usize = run.lanes.values().map(|trace| trace.turns.len()).sum();
    assert_eq!(turns, FILES, "each file has one turn");
    for (_, handle) in &run.files {
        run.world.engine.release(*handle);
    }
}

/// Proves S-order-1, S-order-2.
#[test]
fn each_file_is_written_in_one_turn_and_the_first_awaited_is_served_first() {
    let seed = std::env::var("FIRN_SEED").ok();
    let first = seed
        .as_ref()
        .map_or_else(rand::random, |seed| seed.parse::<u64>().expect("a number"));
    for seed in first..first.saturating_add(if seed.is_some() { 1 } else { 200 }) {
        println!("repeat with FIRN_SEED={seed}");
        run(seed);
    }
}

/// Proves S-order-3.
#[test]
fn a_file_that_fails_does_not_keep_its_lane() {
    let mut run = Run::new(1, 2);
    run.write_files();
    let failing = LaneIndex::new(1);
    run.world.backing.fail_lane(failing, true);
    run.world.engine.durability.drain_tree(b"");
    for lane in 0..2 {
        while run.pick(lane) {
            run.complete_one(lane);
        }
    }
    let left = run.world.engine.figures().lanes;
    assert_eq!(left[0].held_bytes, 0, "the other lane goes on");
    assert_eq!(left[1].held_files as usize, run.lanes[&1].turns.len());
    assert!(left[1].held_files > 1, "each of its files was tried");
    assert!(left[1].retry_seconds.is_some());
    run.world.backing.fail_lane(failing, false);
    run.world.drain_all();
    for (_, handle) in &run.files {
        run.world.engine.release(*handle);
    }
}
