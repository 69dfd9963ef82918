//! Tests of writers that wait for room in the arena, and of their wake-up.

use crate::common;

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::world::World;
use firn_arena::{Arena, Identity};
use firn_backing::Caller;
use firn_engine::{
    Engine, EngineOptions, HandleId, LaneIndex, LaneLimits, NextStep, ROOT, Written,
};
use firn_format::geometry::Geometry;
use firn_sim::SimBacking;

const CALLER: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
};
const O_RDWR: i32 = 2;
/// Too few bytes for a drain without a request. Many such writes fill the arena.
const SMALL: [u8; 12 << 10] = [1; 12 << 10];
/// Enough bytes for a drain without a request.
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

/// If the last file in the queue has nothing to drain any more, another file must be drained to make room.
#[test]
fn a_queue_of_drained_files_does_not_make_a_writer_wait_for_ever() {
    let world = World::draining_after(Duration::from_secs(3600));
    let large = create(&world, "large");
    assert_eq!(
        world.engine.write(large, 0, &LARGE, None),
        Ok(Written::Bytes(LARGE.len()))
    );
    let NextStep::Job(job) = world
        .engine
        .drainer
        .pick(LaneIndex::FIRST, LaneLimits::NONE)
    else {
        panic!("a large write is drained")
    };
    fill(&world, "before");
    let outcome = job.execute(&world.engine);
    world.engine.drainer.complete(job, outcome);
    fill(&world, "after");
    let told = Arc::new(Mutex::new(None));
    let tell = Arc::clone(&told);
    world
        .engine
        .room
        .call_when_space_is_free(Box::new(move |result| *tell.lock().unwrap() = Some(result)));
    // An I/O thread makes these steps before it sleeps.
    while world.drain_step() {}
    assert_eq!(
        *told.lock().unwrap(),
        Some(Ok(())),
        "{:?}",
        world.engine.figures()
    );
}

/// The arena of CRFS, a checkpoint file system: 16 MiB in 4 chunks, for 8 writers.
#[test]
fn writers_share_a_small_arena_by_slabs_instead_of_waiting_for_whole_chunks() {
    const CHUNK_BYTES: u64 = 4 << 20;
    const WRITERS: usize = 8;
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on tmpfs");
    let identity = Identity {
        backing: PathBuf::from("/backing"),
        dev: 1,
        ino: 1,
    };
    let geometry = Geometry::new(4 * CHUNK_BYTES, CHUNK_BYTES).expect("a valid geometry");
    let arena = Arena::create(&dir.path().join("arena"), geometry, &identity).expect("an arena");
    let options = EngineOptions::new(CHUNK_BYTES);
    let engine = Engine::begin(SimBacking::new(), arena, options).expect("an engine");
    let data = vec![3; 1 << 20];
    for writer in 0..WRITERS {
        let name = format!("rank{writer}");
        let (_, opened) = engine
            .create(&CALLER, ROOT, OsStr::new(&name), 0o644, O_RDWR)
            .expect("create");
        assert_eq!(
            engine.write(opened.handle, 0, &data, None),
            Ok(Written::Bytes(data.len())),
            "writer {writer}"
        );
    }
    // The last writers have written their share of the arena, which is enough for a drain. So the arena is not full of
    // files that have too few bytes for one.
    let mut jobs = 0;
    while let NextStep::Job(job) = engine.drainer.pick(LaneIndex::FIRST, LaneLimits::NONE) {
        let outcome = job.execute(&engine);
        engine.drainer.complete(job, outcome);
        jobs += 1;
    }
    assert!(jobs > 0, "nothing is worth a write");
}
