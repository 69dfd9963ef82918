//! What is left after a loss of power: what fsync(2) covered.

mod common;

use std::ffi::OsStr;

use common::world::World;
use firn_backing::{Backing, Caller, RenameFlags, SimBacking};
use firn_engine::ROOT;

const CALLER: Caller = Caller { uid: 0, gid: 0, pid: 1 };
/// Each loss keeps another subset of what was not synced.
const LOSSES: u64 = 64;

/// Whether a path leads to something after each of many losses of power.
fn survives(world: &World, path: &str) -> [bool; LOSSES as usize] {
    std::array::from_fn(|loss| {
        let after = world.backing.fork();
        after.power_loss(loss as u64);
        finds(&after, path)
    })
}

fn finds(backing: &SimBacking, path: &str) -> bool {
    path.split('/')
        .try_fold(backing.root(), |node, name| {
            Ok::<_, firn_backing::Errno>(backing.lookup(&node, OsStr::new(name))?.0)
        })
        .is_ok()
}

/// Proves S-fsync-3.
#[test]
fn names_survive_once_their_directory_was_synced() {
    let world = World::new();
    let dir = world.engine.mkdir(&CALLER, ROOT, OsStr::new("dir"), 0o755).expect("mkdir").node;
    for name in ["first", "second"] {
        let made = world.engine.create(&CALLER, dir, OsStr::new(name), 0o644, 2).expect("create");
        world.engine.release(made.1.handle);
    }
    let (from, to) = (OsStr::new("second"), OsStr::new("renamed"));
    world.engine.rename(dir, from, dir, to, RenameFlags::empty()).expect("rename");
    assert!(survives(&world, "dir/first").contains(&false), "the test loses nothing");

    world.engine.sync_dir(dir).expect("fsync of the directory");
    for path in ["dir/first", "dir/renamed"] {
        assert_eq!(survives(&world, path), [true; LOSSES as usize], "{path}");
    }
    assert_eq!(survives(&world, "dir/second"), [false; LOSSES as usize]);
}
