//! Who waits for room in the arena, and what wakes it.

mod common;

use std::ffi::OsStr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::world::World;
use firn_backing::Caller;
use firn_engine::{HandleId, LaneIndex, LaneLimits, Pick, ROOT, Written};

const CALLER: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
};
const O_RDWR: i32 = 2;
/// Too few for a drain that nobody asks for, and many of them fill the arena.
const SMALL: [u8; 12 << 10] = [1; 12 << 10];
/// Enough for one.
const LARGE: [u8; 16 << 10] = [2; 16 << 10];

fn create(world: &World, name: &str) -> HandleId {
    let made = world
        .engine
        .create(&CALLER, ROOT, OsStr::new(name), 0o644, O_RDWR);
    made.expect("create").1.handle
}

/// Writes small files until there is no room.
fn fill(world: &World, prefix: &str) {
    for number in 0.. {
        let handle = create(world, &format!("{prefix}{number}"));
        if world.engine.write(handle, 0, &SMALL, None).expect("write") == Written::Full {
            return;
        }
    }
}

/// The last file that stood in the queue has nothing to drain any more: then another one must go.
#[test]
fn a_queue_of_drained_files_does_not_make_a_writer_wait_for_ever() {
    let world = World::draining_after(Duration::from_secs(3600));
    let large = create(&world, "large");
    assert_eq!(
        world.engine.write(large, 0, &LARGE, None),
        Ok(Written::Bytes(LARGE.len()))
    );
    let Pick::Job(job) = world.engine.pick(LaneIndex::FIRST, LaneLimits::NONE) else {
        panic!("a large write is drained")
    };
    fill(&world, "before");
    let outcome = job.execute(&world.engine);
    world.engine.complete(job, outcome);
    fill(&world, "after");
    let told = Arc::new(Mutex::new(None));
    let tell = Arc::clone(&told);
    world
        .engine
        .on_space(Box::new(move |result| *tell.lock().unwrap() = Some(result)));
    // What an IO thread does before it sleeps.
    while world.drain_step() {}
    assert_eq!(
        *told.lock().unwrap(),
        Some(Ok(())),
        "{:?}",
        world.engine.figures()
    );
}
