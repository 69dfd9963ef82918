//! Tests that after a power loss the data and names that fsync(2) covered are still there.

use crate::common;

use std::ffi::OsStr;

use common::world::World;
use firn_arena::journal::replay;
use firn_backing::{Caller, Names, RenameFlags, Volume};
use firn_engine::{ROOT, Written};
use firn_sim::SimBacking;

const CALLER: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
};
/// Number of simulated power losses. Each loss keeps a different subset of the unsynced changes.
const LOSSES: u64 = 64;

/// Returns, for each of many power losses, whether the path leads to an object afterwards.
fn survives(world: &World, path: &str) -> [bool; LOSSES as usize] {
    std::array::from_fn(|loss| {
        let after = world.backing.fork();
        after.power_loss(loss as u64);
        finds(&after, path)
    })
}

fn finds(backing: &SimBacking, path: &str) -> bool {
    path.split('/')
        .try_fold(backing.root(), |inode, name| {
            Ok::<_, firn_backing::Errno>(backing.lookup(&inode, OsStr::new(name))?.0)
        })
        .is_ok()
}

/// Proves S-fsync-3.
#[test]
fn names_survive_once_their_directory_was_synced() {
    let world = World::new();
    let dir = world
        .engine
        .namespace
        .mkdir(&CALLER, ROOT, OsStr::new("dir"), 0o755)
        .expect("mkdir")
        .inode;
    for name in ["first", "second"] {
        let made = world
            .engine
            .create(&CALLER, dir, OsStr::new(name), 0o644, 2)
            .expect("create");
        world.engine.release(made.1.handle);
    }
    let from = OsStr::new("second");
    let to = OsStr::new("renamed");
    world
        .engine
        .namespace
        .rename(dir, from, dir, to, RenameFlags::empty())
        .expect("rename");
    assert!(
        survives(&world, "dir/first").contains(&false),
        "the test loses nothing"
    );

    world.engine.sync_dir(dir).expect("fsync of the directory");
    for path in ["dir/first", "dir/renamed"] {
        assert_eq!(survives(&world, path), [true; LOSSES as usize], "{path}");
    }
    assert_eq!(survives(&world, "dir/second"), [false; LOSSES as usize]);
}

/// Pieces are partly overwritten, and the file has pending bytes at every moment.
#[test]
fn a_file_that_is_never_wholly_drained_does_not_fill_the_journal() {
    const ROUNDS: u64 = 5000;
    let world = World::new();
    let opened = world
        .engine
        .create(&CALLER, ROOT, OsStr::new("log"), 0o644, 2)
        .expect("create")
        .1;
    let mut most = 0;
    for round in 0..ROUNDS {
        let offset = round % 3 * (64 << 10);
        for (offset, len) in [(offset, 32 << 10), (offset + (28 << 10), 8 << 10)] {
            let written = world
                .engine
                .write(opened.handle, offset, &vec![round as u8; len], None);
            assert_eq!(written, Ok(Written::Bytes(len)), "round {round}");
        }
        while world.engine.figures().held_bytes > 64 << 10 && world.drain_step() {}
        assert_ne!(world.engine.figures().held_bytes, 0, "the file id ended");
        let found = replay(&world.engine.arena().journal_region());
        most = most.max(
            found
                .ledger
                .files()
                .map(|(_, known)| known.drained_ranges.len())
                .max()
                .unwrap_or(0),
        );
    }
    assert!((2..100).contains(&most), "{most} drained ranges");
}
