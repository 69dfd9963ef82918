//! Tests of set-id bits and capabilities: when the engine reads them from the backing, and when it makes the kernel
//! drop its cached attributes.

use crate::common;

use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::world::World;
use firn_backing::{Backing, Caller, Errno, SetTime};
use firn_engine::{Engine, HandleId, InodeId, Principal, ROOT, SetAttr, Written};
use firn_sim::Fault;

const ROOT_CALLER: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
};
const O_RDWR: i32 = 2;
const CAPABILITY: &str = "security.capability";
const NOTHING: SetAttr = SetAttr {
    mode: None,
    uid: None,
    gid: None,
    size: None,
    atime: SetTime::Keep,
    mtime: SetTime::Keep,
};

/// A process without CAP_FSETID, which is in one group.
struct User {
    group: u32,
}

impl Principal for User {
    fn has_cap_fsetid(&self) -> bool {
        false
    }

    fn is_in_group(&self, gid: u32) -> bool {
        self.group == gid
    }
}

const USER: User = User { group: 7 };

/// A process that was killed during a call of the backing.
struct Gone;

impl Principal for Gone {
    fn has_cap_fsetid(&self) -> bool {
        false
    }

    fn is_in_group(&self, _: u32) -> bool {
        false
    }

    fn has_left(&self) -> bool {
        true
    }
}

/// Proves S-kill-7.
#[test]
fn bytes_of_a_process_that_left_while_the_backing_was_asked_are_not_written() {
    let world = World::new();
    let (inode, made) = create(&world, "file");
    world.drain_all();
    world.engine.release(made);
    let again = world.engine.open(inode, O_RDWR).expect("open").handle;
    let written = world.engine.write(again, 0, b"late", Some(&Gone));
    assert_eq!(written.unwrap_err(), Errno::INTR);
    assert_eq!(world.engine.held_bytes(), 0);
}

fn create(world: &World, name: &str) -> (InodeId, HandleId) {
    let (entry, opened) = world
        .engine
        .create(&ROOT_CALLER, ROOT, OsStr::new(name), 0o777, O_RDWR)
        .expect("create");
    (entry.inode, opened.handle)
}

fn write<B: Backing>(engine: &Engine<B>, handle: HandleId, offset: u64) {
    assert_eq!(
        engine.write(handle, offset, b"some", Some(&USER)),
        Ok(Written::Bytes(4))
    );
}

fn chmod(world: &World, inode: InodeId, mode: u32) {
    world
        .engine
        .namespace
        .set_attr(
            inode,
            SetAttr {
                mode: Some(mode),
                ..NOTHING
            },
            None,
        )
        .expect("chmod");
}

fn mode(world: &World, inode: InodeId) -> u32 {
    world.engine.namespace.attr(inode, None).expect("attr").mode & 0o7777
}

/// Returns the number of calls of the backing that `work` makes.
fn calls(world: &World, work: impl FnOnce()) -> u64 {
    let before = world.backing.steps();
    work();
    world.backing.steps() - before
}

#[test]
fn writes_to_a_file_without_privileges_ask_the_backing_nothing() {
    let world = World::new();
    let (inode, made) = create(&world, "file");
    assert_eq!(
        calls(&world, || (0..100).for_each(|at| write(
            &world.engine,
            made,
            at * 4
        ))),
        0,
        "a new file"
    );
    world.drain_all();
    world.engine.release(made);
    let again = world.engine.open(inode, O_RDWR).expect("open").handle;
    assert!(
        calls(&world, || write(&world.engine, again, 0)) > 0,
        "the first write"
    );
    assert_eq!(
        calls(&world, || (0..100).for_each(|at| write(
            &world.engine,
            again,
            at * 4
        ))),
        0,
        "the others"
    );
    assert!(!world.engine.writes.can_write_wait(again, 400, Some(&USER)));
}

/// Proves S-write-9, S-write-11.
#[test]
fn what_is_given_to_a_file_that_is_open_goes_with_the_next_write_and_the_kernel_hears_of_it() {
    let world = World::new();
    let (inode, handle) = create(&world, "file");
    let told = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&told);
    world
        .engine
        .privilege_rules
        .on_attributes_changed(Arc::new(move |changed| {
            assert_eq!(changed, inode);
            count.fetch_add(1, Ordering::Relaxed);
        }));
    let mut expected = 0;
    let mut goes = |given: &str, give: &dyn Fn()| {
        write(&world.engine, handle, 0);
        give();
        assert!(
            world.engine.writes.can_write_wait(handle, 4, Some(&USER)),
            "{given}"
        );
        write(&world.engine, handle, 0);
        expected += 1;
        assert_eq!(mode(&world, inode), 0o777, "{given}");
        assert!(
            world
                .engine
                .namespace
                .get_xattr(inode, OsStr::new(CAPABILITY))
                .is_err(),
            "{given}"
        );
        assert_eq!(told.load(Ordering::Relaxed), expected, "{given}");
        assert_eq!(
            calls(&world, || write(&world.engine, handle, 0)),
            0,
            "{given}, and once more"
        );
    };
    goes("set-user-id", &|| chmod(&world, inode, 0o4777));
    goes("both", &|| chmod(&world, inode, 0o6777));
    goes("a capability", &|| {
        world
            .engine
            .namespace
            .set_xattr(inode, OsStr::new(CAPABILITY), b"cap", 0, None)
            .expect("setcap");
    });
    goes("set-user-id, beside the mount", &|| {
        let object = world.engine.tree.object_at(b"file").expect("object");
        world
            .engine
            .backing()
            .set_mode(&object, 0o4777)
            .expect("chmod");
        assert_eq!(mode(&world, inode), 0o4777, "the mount shows it");
    });
    goes("set-user-id, by a transaction that ends", &|| {
        let object = world.engine.tree.object_at(b"file").expect("object");
        let given = world.engine.backing().set_mode(&object, 0o4777);
        given.expect("chmod");
        world.engine.privilege_rules.record_privileges_given();
    });
}

#[test]
fn set_group_id_without_group_execute_stays_for_members() {
    let world = World::new();
    let (inode, handle) = create(&world, "file");
    let group = world.engine.namespace.attr(inode, None).expect("attr").gid;
    chmod(&world, inode, 0o6767);
    let member = User { group };
    assert_eq!(
        world.engine.write(handle, 0, b"some", Some(&member)),
        Ok(Written::Bytes(4))
    );
    assert_eq!(mode(&world, inode), 0o2767);
    write(&world.engine, handle, 0);
    assert_eq!(mode(&world, inode), 0o767);
}

/// On Linux, a store to a mapping removes no privileges, whichever process makes it.
#[test]
fn a_page_that_the_kernel_writes_takes_nothing_away() {
    let world = World::new();
    let (inode, handle) = create(&world, "file");
    chmod(&world, inode, 0o6777);
    assert_eq!(
        world.engine.write(handle, 0, b"some", None),
        Ok(Written::Bytes(4))
    );
    assert_eq!(mode(&world, inode), 0o6777);
}

/// A firnd without root may be allowed to write another user's file, but not to change its mode. Then the backing's
/// kernel removes the bits, when firnd truncates the file.
#[test]
fn a_firnd_without_rights_leaves_it_to_the_kernel_below() {
    let world = World::new();
    let (inode, handle) = create(&world, "file");
    chmod(&world, inode, 0o6777);
    let truncated = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&truncated);
    world.backing.set_plan(move |call, _| {
        count.fetch_add(u64::from(call == "set_len"), Ordering::Relaxed);
        (call == "set_mode").then_some(Fault::Error(Errno::PERM))
    });
    write(&world.engine, handle, 0);
    assert_eq!(truncated.load(Ordering::Relaxed), 1);
    world.backing.clear_plan();
}
