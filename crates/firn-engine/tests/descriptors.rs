//! How many files of the backing are open.

mod common;

use std::ffi::OsStr;

use common::world::{World, options};
use firn_backing::sim::Fault;
use firn_backing::{Access, Backing, Caller, Errno, SetTime};
use firn_engine::{HandleId, NodeId, ROOT, SetAttr, Written};

const CALLER: Caller = Caller { uid: 0, gid: 0, pid: 1 };
const FILES: usize = 20;

fn create(world: &World, index: usize) -> (NodeId, HandleId) {
    let name = format!("rank{index}");
    let (entry, opened) = world.engine.create(&CALLER, ROOT, OsStr::new(&name), 0o644, 2).expect("create");
    assert!(matches!(world.engine.write(opened.handle, 0, b"some", false), Ok(Written::Bytes(4))));
    (entry.node, opened.handle)
}

/// Closed files that are held.
fn hold(world: &World) -> Vec<NodeId> {
    let made = (0..FILES).map(|index| create(world, index));
    made.map(|(node, handle)| {
        world.engine.release(handle);
        node
    })
    .collect()
}

#[test]
fn files_that_are_held_need_no_descriptor_each() {
    let world = World::on_demand();
    hold(&world);
    assert!(world.backing.open_files() <= options().objects_max, "{} are open", world.backing.open_files());
    world.engine.drain_tree(b"");
    while world.drain_step() {}
    assert_eq!(world.backing.open_files(), 0, "drained files that are kept in memory");
    for index in 0..FILES {
        let name = format!("rank{index}");
        let (node, attr) = world.backing.lookup(&world.backing.root(), OsStr::new(&name)).expect("its name");
        let file = world.backing.open(&node, Access::Read).expect("open");
        let mut bytes = [0; 8];
        let read = world.backing.read_at(&file, &mut bytes, 0).expect("read");
        assert_eq!((attr.size, &bytes[..read]), (4, b"some".as_slice()));
    }
}

#[test]
fn a_file_whose_mode_changes_while_it_is_held_is_opened_before() {
    let world = World::on_demand();
    let nodes = hold(&world);
    let before = world.backing.open_files();
    let last = *nodes.last().expect("there are some");
    let (uid, gid, size, keep) = (None, None, None, SetTime::Keep);
    let read_only = SetAttr { mode: Some(0o444), uid, gid, size, atime: keep, mtime: keep };
    world.engine.set_attr(last, None, read_only).expect("chmod");
    assert_eq!(world.backing.open_files(), before + 1);
}

#[test]
fn a_file_that_cannot_be_opened_again_stays_open() {
    let world = World::on_demand();
    hold(&world);
    let before = world.backing.open_files();
    let (_, handle) = create(&world, FILES);
    world.backing.set_plan(|call, _| (call == "open").then_some(Fault::Error(Errno::ACCESS)));
    world.engine.release(handle);
    world.backing.clear_plan();
    assert_eq!(world.backing.open_files(), before + 1);
}
