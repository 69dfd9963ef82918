//! Tests of reads that race with changes of the file: a read must return the file as it was at one moment.

use crate::common;

use std::ffi::OsStr;

use common::world::{self, DiskKind, World};
use firn_backing::{Caller, SetTime};
use firn_engine::{
    HandleId, InodeId, Job, LaneIndex, LaneLimits, NextStep, ROOT, SetAttr, Written,
};
use firn_sim::SimBacking;

const CALLER: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
};
const O_RDWR: i32 = 2;
const OLD: u8 = 1;
const NEW: u8 = 2;
/// Number of pieces. They are distant from each other, so each is drained by a separate write.
const PIECES: u64 = 4;
const PIECE_BYTES: usize = 1000;
const STRIDE: u64 = 5000;
const FILE_BYTES: u64 = PIECES * STRIDE;

struct Raced {
    world: World,
    inode: InodeId,
    handle: HandleId,
}

impl Raced {
    /// Makes a world with a file of `bytes` bytes, all of them in the backing.
    fn new(bytes: u64) -> Self {
        let world = World::over(DiskKind::PLAIN, world::options(), false);
        let made = world
            .engine
            .create(&CALLER, ROOT, OsStr::new("raced"), 0o644, O_RDWR);
        let (entry, opened) = made.expect("create");
        let raced = Self {
            world,
            inode: entry.inode,
            handle: opened.handle,
        };
        raced.write(0, &vec![OLD; bytes as usize]);
        raced.world.drain_all();
        raced
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let written = self.world.engine.write(self.handle, offset, data, None);
        assert_eq!(written, Ok(Written::Bytes(data.len())), "there is room");
    }

    fn cut(&self) {
        let cut = SetAttr {
            mode: None,
            uid: None,
            gid: None,
            size: Some(0),
            atime: SetTime::Keep,
            mtime: SetTime::Keep,
        };
        let done = self.world.engine.namespace.set_attr(self.inode, cut, None);
        done.expect("cut");
    }

    fn pick(&self) -> Job<SimBacking> {
        match self
            .world
            .engine
            .drainer
            .pick(LaneIndex::FIRST, LaneLimits::NONE)
        {
            NextStep::Job(job) => job,
            NextStep::Idle { .. } => panic!("all pieces are to be drained"),
        }
    }

    fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0xee; FILE_BYTES as usize];
        let count = self.world.engine.read(self.handle, 0, &mut bytes);
        bytes.truncate(count.expect("read"));
        bytes
    }
}

/// Asserts that no piece contains zeros: it has old bytes or new bytes, or the file ends before it. Between the pieces
/// there may be holes.
fn assert_of_one_moment(bytes: &[u8], what: &str) {
    for number in 0..PIECES {
        let start = (number * STRIDE) as usize;
        let piece = bytes.iter().skip(start).take(PIECE_BYTES);
        let zeros = piece.filter(|byte| **byte == 0).count();
        assert_eq!(zeros, 0, "{what}: piece {number} has zeros");
    }
}

/// Proves S-read-5: at each call of a read, the file is truncated, written again and partly drained.
#[test]
fn a_read_that_races_a_cut_has_no_zeros_that_were_not_written() {
    for (cuts, bytes) in [(true, FILE_BYTES), (false, 100)] {
        let calls = {
            let raced = Raced::new(bytes);
            let before = raced.world.backing.steps();
            raced.read();
            raced.world.backing.steps() - before
        };
        assert!(calls > 0, "the backing is read");
        for at in 1..=calls {
            for drained in 0..PIECES {
                let what = format!("cuts: {cuts}, call {at}, {drained} drained");
                let raced = Raced::new(bytes);
                let backing = &raced.world.backing;
                let hang = backing.hang_at(backing.steps() + at);
                std::thread::scope(|scope| {
                    let reading = scope.spawn(|| raced.read());
                    hang.await_call();
                    if cuts {
                        raced.cut();
                    }
                    for number in 0..PIECES {
                        raced.write(number * STRIDE, &[NEW; PIECE_BYTES]);
                    }
                    raced.world.engine.durability.drain_tree(b"");
                    // The last pieces reach the backing before the others.
                    let mut jobs: Vec<_> = (0..PIECES).map(|_| raced.pick()).collect();
                    for job in jobs.drain((PIECES - drained) as usize..) {
                        let outcome = job.execute(&raced.world.engine);
                        raced.world.engine.drainer.complete(job, outcome);
                    }
                    hang.release();
                    assert_of_one_moment(&reading.join().expect("no panic"), &what);
                    for job in jobs {
                        let outcome = job.execute(&raced.world.engine);
                        raced.world.engine.drainer.complete(job, outcome);
                    }
                });
                assert_of_one_moment(&raced.read(), &what);
                raced.world.engine.release(raced.handle);
            }
        }
    }
}
