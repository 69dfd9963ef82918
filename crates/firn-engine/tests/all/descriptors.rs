//! Tests of the number of files of the backing that are open.

use crate::common;

use std::ffi::OsStr;

use common::world::{World, options};
use firn_backing::{Access, Caller, Errno, Files, Names, SetTime, Volume};
use firn_engine::{HandleId, InodeId, ROOT, SetAttr, Written};
use firn_sim::Fault;

const CALLER: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
};
const FILES: usize = 20;
/// Number of files that are open at once: small enough that each has its own slab in the arena.
const OPEN: usize = 8;

fn create(world: &World, index: usize) -> (InodeId, HandleId) {
    let name = format!("rank{index}");
    let (entry, opened) = world
        .engine
        .create(&CALLER, ROOT, OsStr::new(&name), 0o644, 2)
        .expect("create");
    assert!(matches!(
        world.engine.write(opened.handle, 0, b"some", None),
        Ok(Written::Bytes(4))
    ));
    (entry.inode, opened.handle)
}

/// Makes files with held data, closes them, and returns their inodes.
fn hold(world: &World) -> Vec<InodeId> {
    let made = (0..FILES).map(|index| create(world, index));
    made.map(|(inode, handle)| {
        world.engine.release(handle);
        inode
    })
    .collect()
}

#[test]
fn files_that_are_held_need_no_descriptor_each() {
    let world = World::on_demand();
    hold(&world);
    assert!(
        world.backing.open_files() <= options().objects_max,
        "{} are open",
        world.backing.open_files()
    );
    world.engine.durability.drain_tree(b"");
    while world.drain_step() {}
    assert_eq!(
        world.backing.open_files(),
        0,
        "drained files that are kept in memory"
    );
    for index in 0..FILES {
        let name = format!("rank{index}");
        let (inode, attr) = world
            .backing
            .lookup(&world.backing.root(), OsStr::new(&name))
            .expect("its name");
        let file = world.backing.open(&inode, Access::Read).expect("open");
        let mut bytes = [0; 8];
        let read = world.backing.read_at(&file, &mut bytes, 0).expect("read");
        assert_eq!((attr.size, &bytes[..read]), (4, b"some".as_slice()));
    }
}

#[test]
fn a_file_whose_mode_changes_while_it_is_held_is_opened_before() {
    let world = World::on_demand();
    let inodes = hold(&world);
    let before = world.backing.open_files();
    let last = *inodes.last().expect("there are some");
    let uid = None;
    let gid = None;
    let size = None;
    let keep = SetTime::Keep;
    let read_only = SetAttr {
        mode: Some(0o444),
        uid,
        gid,
        size,
        atime: keep,
        mtime: keep,
    };
    world
        .engine
        .namespace
        .set_attr(last, read_only, None)
        .expect("chmod");
    assert_eq!(world.backing.open_files(), before + 1);
}

#[test]
fn a_file_that_cannot_be_opened_again_stays_open() {
    let world = World::on_demand();
    hold(&world);
    let before = world.backing.open_files();
    let (_, handle) = create(&world, FILES);
    world
        .backing
        .set_plan(|call, _| (call == "open").then_some(Fault::Error(Errno::ACCESS)));
    world.engine.release(handle);
    world.backing.clear_plan();
    assert_eq!(world.backing.open_files(), before + 1);
}

#[test]
fn regression_files_that_programs_have_open_need_no_descriptor_each() {
    let world = World::with_few_open_files();
    let open: Vec<_> = (0..OPEN).map(|index| create(&world, index)).collect();
    assert!(
        world.backing.open_files() <= 5,
        "{} are open",
        world.backing.open_files()
    );
    for round in 0..3_u8 {
        for (_, handle) in &open {
            assert!(matches!(
                world.engine.write(*handle, 1, &[round; 6], None),
                Ok(Written::Bytes(6))
            ));
        }
        world.drain_all();
        for (inode, _) in &open {
            let uid = None;
            let gid = None;
            let keep = SetTime::Keep;
            let set = SetAttr {
                mode: None,
                uid,
                gid,
                size: Some(7),
                atime: keep,
                mtime: keep,
            };
            world
                .engine
                .namespace
                .set_attr(*inode, set, None)
                .expect("truncate");
            assert!(
                world.backing.open_files() <= 5,
                "{} are open",
                world.backing.open_files()
            );
        }
        for (_, handle) in &open {
            world.engine.sync_file(*handle, false).expect("fsync");
            let mut bytes = [0; 8];
            assert_eq!(world.engine.read(*handle, 0, &mut bytes), Ok(7));
            assert_eq!(bytes, [b's', round, round, round, round, round, round, 0]);
        }
        assert!(
            world.backing.open_files() <= 5,
            "{} are open",
            world.backing.open_files()
        );
    }
}

#[test]
fn regression_a_file_without_a_name_stays_open_however_many_others_are() {
    let world = World::with_few_open_files();
    let (_, first) = create(&world, 0);
    world.drain_all();
    world
        .engine
        .namespace
        .unlink(ROOT, OsStr::new("rank0"))
        .expect("unlink");
    let others: Vec<_> = (1..OPEN).map(|index| create(&world, index).1).collect();
    let mut bytes = [0; 4];
    for handle in others {
        assert_eq!(world.engine.read(handle, 0, &mut bytes), Ok(4));
    }
    assert!(matches!(
        world.engine.write(first, 2, b"ul", None),
        Ok(Written::Bytes(2))
    ));
    assert_eq!(world.engine.read(first, 0, &mut bytes), Ok(4));
    assert_eq!(&bytes, b"soul");
}

#[test]
fn a_call_without_a_descriptor_left_is_enfile_and_not_emfile() {
    let world = World::with_few_open_files();
    let open: Vec<_> = (0..4).map(|index| create(&world, index)).collect();
    let mut failures = 1;
    world.backing.set_plan(move |call, _| {
        let fails = call == "create" && failures > 0;
        failures -= usize::from(fails);
        fails.then_some(Fault::Error(Errno::MFILE))
    });
    create(&world, 5);
    assert!(
        world.backing.open_files() <= 1,
        "what is not in use was closed for it"
    );
    world
        .backing
        .set_plan(|call, _| (call == "create").then_some(Fault::Error(Errno::MFILE)));
    let made = world
        .engine
        .create(&CALLER, ROOT, OsStr::new("no"), 0o644, 2);
    assert_eq!(made.err(), Some(Errno::NFILE));
    world.backing.clear_plan();
    for (_, handle) in open {
        let mut bytes = [0; 4];
        assert_eq!(world.engine.read(handle, 0, &mut bytes), Ok(4));
    }
}
