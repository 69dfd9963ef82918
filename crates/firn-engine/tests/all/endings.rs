//! Tests of the ending of files: open, closed, or cut.

use crate::common;

use std::ffi::OsStr;

use common::world::World;
use firn_backing::Caller;
use firn_engine::{Closing, HandleId, InodeId, ROOT, Written};
use firn_format::record::Ending;

const CALLER: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
};
const O_RDWR: i32 = 2;

/// Creates a file, writes some bytes, and returns its open handle.
fn open(world: &World, dir: InodeId, name: &str) -> HandleId {
    let (_, opened) = world
        .engine
        .create(&CALLER, dir, OsStr::new(name), 0o644, O_RDWR)
        .expect("create");
    assert!(matches!(
        world.engine.write(opened.handle, 0, b"some", None),
        Ok(Written::Bytes(4))
    ));
    opened.handle
}

fn flush(world: &World, handle: HandleId, by: Closing) {
    if by == Closing::Killed {
        world.engine.record_killed_closer(handle);
    }
    world.engine.flush(handle, by, Box::new(|_| {}));
}

fn end(world: &World, handle: HandleId, by: Closing) {
    flush(world, handle, by);
    world.engine.release(handle);
}

fn ending(world: &World, path: &str) -> Ending {
    world.engine.files_below(path.as_bytes())[0].ending
}

/// Proves S-demand-7.
#[test]
fn a_descriptor_is_as_the_last_process_left_it() {
    let world = World::on_demand();
    let handle = open(&world, ROOT, "file");
    flush(&world, handle, Closing::Killed);
    assert_eq!(ending(&world, "file"), Ending::Open);
    end(&world, handle, Closing::Called);
    assert_eq!(ending(&world, "file"), Ending::Closed);
}

/// Proves S-demand-7.
#[test]
fn regression_a_close_after_a_killed_process_was_answered_counts() {
    let world = World::on_demand();
    let handle = open(&world, ROOT, "file");
    // A killed process ends when its close is answered. The engine processes the close later, after the close of
    // another process.
    world.engine.record_killed_closer(handle);
    flush(&world, handle, Closing::Called);
    let later = Box::new(|_| {});
    world.engine.flush(handle, Closing::Killed, later);
    world.engine.release(handle);
    assert_eq!(ending(&world, "file"), Ending::Closed);
}

/// Proves S-demand-7.
#[test]
fn one_killed_writer_of_several_cuts_a_file_until_it_is_made_anew() {
    let world = World::on_demand();
    let one = open(&world, ROOT, "file");
    let other = open(&world, ROOT, "file");
    end(&world, one, Closing::Killed);
    assert_eq!(ending(&world, "file"), Ending::Open);
    end(&world, other, Closing::Called);
    assert_eq!(ending(&world, "file"), Ending::Cut);
    end(&world, open(&world, ROOT, "file"), Closing::Called);
    assert_eq!(ending(&world, "file"), Ending::Cut, "appended to");
    let inode = world
        .engine
        .namespace
        .lookup(ROOT, OsStr::new("file"))
        .expect("lookup")
        .inode;
    let anew = world
        .engine
        .open(inode, O_RDWR | 0o1000)
        .expect("open")
        .handle;
    assert!(matches!(
        world.engine.write(anew, 0, b"anew", None),
        Ok(Written::Bytes(4))
    ));
    end(&world, anew, Closing::Called);
    assert_eq!(ending(&world, "file"), Ending::Closed);
}
