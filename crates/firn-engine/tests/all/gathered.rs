//! Tests of jobs with distant pieces, on a backing that gathers them: several jobs under way, parts that fail, a stop
//! at any step.
//!
//! `FIRN_SEED` repeats one run.

use crate::common;

use std::ffi::OsStr;
use std::ops::Range;

use common::model::partly;
use common::world::{self, DiskKind, World};
use firn_backing::{Caller, Errno, SetTime};
use firn_engine::{
    EngineOptions, HandleId, InodeId, Job, JobOutcome, LaneIndex, LaneLimits, NextStep, ROOT,
    SetAttr, Written,
};
use firn_sim::Fault;
use firn_sim::SimBacking;
use rand::{RngExt, SeedableRng, rngs::StdRng};

const CALLER: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
};
const O_RDWR: i32 = 2;
const NAME: &str = "shared";
const FILE_MAX: u64 = 150_000;
const SEEDS: u64 = 200;
const JOBS_MAX: usize = 3;

fn gathering(options: EngineOptions) -> World {
    let disk = DiskKind {
        gathers: true,
        ..DiskKind::PLAIN
    };
    World::over(disk, options, false)
}

fn create(world: &World) -> (InodeId, HandleId) {
    let made = world
        .engine
        .create(&CALLER, ROOT, OsStr::new(NAME), 0o644, O_RDWR);
    let (entry, opened) = made.expect("create");
    (entry.inode, opened.handle)
}

fn pick(world: &World) -> Option<Job<SimBacking>> {
    match world
        .engine
        .drainer
        .pick(LaneIndex::FIRST, LaneLimits::NONE)
    {
        NextStep::Job(job) => Some(job),
        NextStep::Idle { .. } => None,
    }
}

const PIECES: u64 = 20;
const PIECE_BYTES: usize = 1000;
const STRIDE: u64 = 5000;

/// Writes records at equal distances, each with different bytes. Returns the expected contents of the file.
fn write_strided(world: &World, handle: HandleId) -> Vec<u8> {
    let mut expected = Vec::new();
    for number in 0..PIECES {
        let data = vec![number as u8 + 1; PIECE_BYTES];
        write_all(world, handle, number * STRIDE, &data);
        expected.resize((number * STRIDE) as usize, 0);
        expected.extend(data);
    }
    expected
}

fn write_all(world: &World, handle: HandleId, offset: u64, data: &[u8]) {
    let written = world.engine.write(handle, offset, data, None);
    assert_eq!(written, Ok(Written::Bytes(data.len())), "there is room");
}

fn span_of(pieces: Range<u64>) -> Range<u64> {
    pieces.start * STRIDE..(pieces.end - 1) * STRIDE + PIECE_BYTES as u64
}

#[test]
fn pieces_that_are_apart_are_one_job_where_the_backing_gathers_them() {
    for gathers in [true, false] {
        let disk = DiskKind {
            gathers,
            ..DiskKind::PLAIN
        };
        let world = World::over(disk, world::options(), false);
        let (_, handle) = create(&world);
        let expected = write_strided(&world, handle);
        world.engine.durability.drain_tree(b"");
        let mut spans = Vec::new();
        while let Some(job) = pick(&world) {
            spans.push(job.span());
            let outcome = job.execute(&world.engine);
            assert_eq!((outcome.written_bytes, outcome.error), (job.len(), None));
            world.engine.drainer.complete(job, outcome);
        }
        if gathers {
            assert_eq!(spans, [span_of(0..PIECES)])
        } else {
            assert_eq!(spans.len() as u64, PIECES)
        }
        assert_eq!(world.engine.figures().held_bytes, 0);
        assert_eq!(world.backing_tree()[NAME], expected);
        world.engine.release(handle);
    }
}

#[test]
fn a_gathered_job_has_no_more_bytes_than_the_mount_allows() {
    let mut options = world::options();
    options.drain_gathered_bytes_max = 3500;
    let world = gathering(options);
    let (_, handle) = create(&world);
    let expected = write_strided(&world, handle);
    world.engine.durability.drain_tree(b"");
    for first in (0..PIECES).step_by(3) {
        let job = pick(&world).expect("there is more");
        assert_eq!(job.span(), span_of(first..(first + 3).min(PIECES)));
        let outcome = job.execute(&world.engine);
        world.engine.drainer.complete(job, outcome);
    }
    assert_eq!(world.backing_tree()[NAME], expected);
    world.engine.release(handle);
}

/// The parts of a failed job that were written are not pending any more, also after a crash.
#[test]
fn of_a_job_that_fails_the_parts_before_the_failure_are_drained() {
    const WRITTEN: u64 = 7;
    let mut world = gathering(world::options());
    let (_, handle) = create(&world);
    let expected = write_strided(&world, handle);
    world.engine.durability.drain_tree(b"");
    let mut left = WRITTEN;
    world.backing.set_plan(move |call, _| {
        let fails = call == "write_at" && left == 0;
        left = left.saturating_sub(u64::from(call == "write_at"));
        fails.then_some(Fault::Error(Errno::NOSPC))
    });
    let job = pick(&world).expect("a job");
    let outcome = job.execute(&world.engine);
    assert_eq!(outcome.error, Some(Errno::NOSPC));
    assert_eq!(outcome.written_bytes, WRITTEN * PIECE_BYTES as u64);
    world.engine.drainer.complete(job, outcome);
    let held = (PIECES - WRITTEN) * PIECE_BYTES as u64;
    assert_eq!(world.engine.figures().held_bytes, held);
    world.stop_now();
    let recovered = world.recover(u64::MAX);
    assert_eq!(recovered.lost, []);
    assert_eq!(world.engine.figures().held_bytes, held, "after a crash");
    world.drain_all();
    assert_eq!(world.backing_tree()[NAME], expected);
}

#[test]
fn newer_bytes_over_a_job_under_way_are_written_after_it() {
    let world = gathering(world::options());
    let (_, handle) = create(&world);
    let mut expected = write_strided(&world, handle);
    world.engine.durability.drain_tree(b"");
    let first = pick(&world).expect("a job");
    let newer = vec![99; 2 * PIECE_BYTES];
    // This write covers the end of one piece and the gap after it.
    let at = 3 * STRIDE + 500;
    write_all(&world, handle, at, &newer);
    expected[at as usize..][..newer.len()].copy_from_slice(&newer);
    world.engine.durability.drain_tree(b"");
    assert!(pick(&world).is_none(), "older bytes are under way there");
    let outcome = first.execute(&world.engine);
    world.engine.drainer.complete(first, outcome);
    let second = pick(&world).expect("the newer bytes");
    assert_eq!(second.span(), at..at + newer.len() as u64);
    let outcome = second.execute(&world.engine);
    world.engine.drainer.complete(second, outcome);
    assert_eq!(world.engine.figures().held_bytes, 0);
    assert_eq!(world.backing_tree()[NAME], expected);
    world.engine.release(handle);
}

/// One file under random writes and truncations, with several jobs of it under way.
struct Run {
    world: World,
    rng: StdRng,
    inode: InodeId,
    handle: HandleId,
    contents: Vec<u8>,
    before: Vec<u8>,
    /// Offset and bytes of a write that was not acknowledged.
    partial: Option<(u64, Vec<u8>)>,
    jobs: Vec<(Job<SimBacking>, Option<JobOutcome>)>,
    fails: bool,
}

impl Run {
    fn begin(seed: u64, stop_in: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut options = world::options();
        options.drain_write_bytes_min = 4096;
        options.drain_gathered_bytes_max = rng.random_range(4096..100_000);
        let world = gathering(options);
        let (inode, handle) = create(&world);
        let fails = seed % 2 == 1;
        if fails {
            world.arm_with_faults(seed);
        }
        world.stop_in(stop_in);
        Self {
            world,
            rng,
            inode,
            handle,
            contents: Vec::new(),
            before: Vec::new(),
            partial: None,
            jobs: Vec::new(),
            fails,
        }
    }

    fn step(&mut self) {
        match self.rng.random_range(0..12) {
            0..5 => self.write(),
            5..7 => self.pick(),
            7 => self.execute(),
            8 => self.complete(),
            9 => self.world.engine.durability.drain_tree(b""),
            10 => self.truncate(),
            _ => self.read(),
        }
    }

    fn write(&mut self) {
        let offset = self.rng.random_range(0..FILE_MAX);
        let data = vec![self.rng.random(); self.rng.random_range(1..3000)];
        self.before = self.contents.clone();
        self.partial = Some((offset, data.clone()));
        let mut done = 0;
        while done < data.len() {
            let at = offset + done as u64;
            match self
                .world
                .engine
                .write(self.handle, at, &data[done..], None)
            {
                _ if self.world.stopped() => return,
                Ok(Written::Bytes(count)) => {
                    let end = at as usize + count;
                    self.contents.resize(self.contents.len().max(end), 0);
                    self.contents[at as usize..end].copy_from_slice(&data[done..done + count]);
                    done += count;
                }
                Ok(Written::Full) => self.make_room(),
                Err(Errno::IO | Errno::NOSPC) if self.fails => return,
                Err(error) => panic!("write: {error}"),
            }
        }
        self.before = self.contents.clone();
        self.partial = None;
    }

    fn make_room(&mut self) {
        while !self.jobs.is_empty() {
            self.execute();
            self.complete();
        }
        self.world.engine.durability.drain_tree(b"");
        while self.world.drain_step() && !self.world.stopped() {}
    }

    fn pick(&mut self) {
        if self.jobs.len() == JOBS_MAX {
            return;
        }
        if let Some(job) = pick(&self.world) {
            for (other, _) in &self.jobs {
                let (a, b) = (job.span(), other.span());
                assert!(a.end <= b.start || b.end <= a.start, "{a:?} and {b:?}");
            }
            self.jobs.push((job, None));
        }
    }

    fn execute(&mut self) {
        let waiting = self.jobs.iter_mut().filter(|job| job.1.is_none());
        if let Some((job, outcome)) = waiting.last() {
            *outcome = Some(job.execute(&self.world.engine));
        }
    }

    fn complete(&mut self) {
        let Some(at) = self.jobs.iter().position(|job| job.1.is_some()) else {
            return;
        };
        if let (job, Some(outcome)) = self.jobs.swap_remove(at) {
            self.world.engine.drainer.complete(job, outcome);
        }
    }

    fn truncate(&mut self) {
        // A truncation would wait for the jobs under way.
        if !self.jobs.is_empty() {
            return;
        }
        let len = self.rng.random_range(0..FILE_MAX);
        self.before = self.contents.clone();
        self.contents.resize(len as usize, 0);
        let cut = SetAttr {
            mode: None,
            uid: None,
            gid: None,
            size: Some(len),
            atime: SetTime::Keep,
            mtime: SetTime::Keep,
        };
        let done = self.world.engine.namespace.set_attr(self.inode, cut, None);
        if self.world.stopped() {
            return;
        }
        match done {
            Ok(_) => self.before = self.contents.clone(),
            Err(_) if self.fails => self.contents = self.before.clone(),
            Err(error) => panic!("truncate: {error}"),
        }
    }

    fn read(&mut self) {
        let mut found = vec![0xee; FILE_MAX as usize + 5000];
        let count = self.world.engine.read(self.handle, 0, &mut found);
        if !self.world.stopped() {
            found.truncate(count.expect("read"));
            assert!(found == self.contents, "bytes of a read");
        }
    }

    /// Crashes the world, recovers it, and checks what reaches the backing.
    fn end(mut self) {
        if !self.world.stopped() {
            self.world.stop_now();
        }
        self.jobs.clear();
        let recovered = self.world.recover(u64::MAX);
        assert_eq!(recovered.lost, []);
        assert_eq!(recovered.damage, Vec::<String>::new());
        self.world.drain_all();
        let tree = self.world.backing_tree();
        let found = &tree[NAME];
        let is_partly = match &self.partial {
            Some((offset, data)) => partly(&self.before, found, *offset, data),
            None => false,
        };
        assert!(
            is_partly || *found == self.before || *found == self.contents,
            "neither what was there before the last call nor what it made: {} bytes, {} before, {} after",
            found.len(),
            self.before.len(),
            self.contents.len()
        );
    }
}

/// Runs random operations with this seed. Returns the number of steps that the world took.
fn run(seed: u64, ops: u64, stop_in: u64) -> u64 {
    let mut run = Run::begin(seed, stop_in);
    let first = run.world.steps();
    for _ in 0..ops {
        run.step();
        if run.world.stopped() {
            break;
        }
    }
    let steps = run.world.steps() - first;
    run.end();
    steps
}

fn first_seed() -> (u64, u64) {
    match std::env::var("FIRN_SEED") {
        Ok(seed) => (seed.parse().expect("a number"), 1),
        Err(_) => (rand::random::<u32>().into(), SEEDS),
    }
}

/// Proves S-write-1, S-crash-4, S-error-1.
#[test]
fn acknowledged_bytes_survive_with_several_gathered_jobs_under_way() {
    let (first, count) = first_seed();
    for seed in first..first + count {
        println!("repeat with FIRN_SEED={seed}");
        let stop = StdRng::seed_from_u64(!seed).random_range(1..3000);
        run(seed, 150, stop);
    }
}

/// Proves S-write-1, S-crash-4.
#[test]
fn a_stop_at_every_step_of_gathered_jobs() {
    let (first, _) = first_seed();
    for seed in first..first + 2 {
        println!("repeat with FIRN_SEED={seed}");
        let steps = run(seed, 30, u64::MAX);
        for stop in 0..steps {
            run(seed, 30, stop);
        }
    }
}
