//! Tests of the simulated backing: it fails at the planned steps, and a power loss loses only what a real one may lose.

use std::ffi::OsStr;
use std::io::IoSlice;

use firn_backing::{Access, Backing, Errno, Files, LockMode, Names, RenameFlags, Volume};
use firn_sim::SimBacking;
use firn_sim::suite::own_caller;
use firn_sim::{Fault, LockReach};

/// Returns a simulated backing with a file `a` of this content, and the open file.
fn with_file(content: &[u8]) -> (SimBacking, <SimBacking as Volume>::File) {
    let sim = SimBacking::new();
    let file = sim
        .create(&own_caller(), &sim.root(), OsStr::new("a"), 0o644)
        .expect("create")
        .1;
    sim.write_at(&file, &[IoSlice::new(content)], 0)
        .expect("write_at");
    (sim, file)
}

#[test]
fn faults_come_at_the_step_and_the_call_that_the_plan_names() {
    let (sim, file) = with_file(b"old");
    assert_eq!(sim.steps(), 2);
    let write = |bytes: &[u8]| sim.write_at(&file, &[IoSlice::new(bytes)], 0);
    sim.set_plan(|op, step| match (op, step) {
        (_, 3) => Some(Fault::Error(Errno::DQUOT)),
        ("write_at", 4) => Some(Fault::ShortWrite(1)),
        (_, 5) => Some(Fault::Crash),
        _ => None,
    });
    assert_eq!(write(b"new").err(), Some(Errno::DQUOT));
    assert_eq!(write(b"new"), Ok(1));
    assert_eq!(write(b"NEW").err(), Some(Errno::IO));
    assert_eq!(
        (sim.attr_of_file(&file).err(), sim.is_dead()),
        (Some(Errno::IO), true)
    );
    sim.revive();
    assert_eq!(sim.tree()[b"a".as_slice()].content, b"nld");
}

#[test]
fn a_full_disk_takes_what_fits_and_then_nothing() {
    let (sim, file) = with_file(b"");
    sim.set_capacity(Some(8192));
    let bytes = [1; 10_000];
    assert_eq!(sim.write_at(&file, &[IoSlice::new(&bytes)], 100), Ok(8092));
    assert_eq!(
        sim.write_at(&file, &[IoSlice::new(&bytes)], 8192).err(),
        Some(Errno::NOSPC)
    );
    assert_eq!(sim.statfs().map(|stats| stats.blocks_free), Ok(0));
    sim.set_read_only(true);
    assert_eq!(sim.set_len(&file, 0).err(), Some(Errno::ROFS));
}

#[test]
fn synced_data_and_names_survive_and_a_rename_is_whole() {
    let mut outcomes = std::collections::BTreeSet::new();
    for seed in 0..200 {
        let (sim, file) = with_file(&[1; 1024]);
        let root = sim.root();
        sim.sync(&file, false).expect("sync");
        sim.sync_dir(&root).expect("sync_dir");
        let old_name = OsStr::new("a");
        let new_name = OsStr::new("b");
        sim.rename(&root, old_name, &root, new_name, RenameFlags::empty())
            .expect("rename");
        sim.write_at(&file, &[IoSlice::new(&[2; 1024])], 0)
            .expect("write_at");
        sim.power_loss(seed);
        sim.fsck()
            .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        let names: Vec<_> = sim
            .tree()
            .into_keys()
            .filter(|name| !name.is_empty())
            .collect();
        assert_eq!(names.len(), 1, "seed {seed}: {names:?}");
        let (inode, _) = sim
            .lookup(&sim.root(), old_name)
            .or(sim.lookup(&sim.root(), new_name))
            .expect("a or b");
        let mut bytes = [0; 1024];
        let open = sim.open(&inode, Access::Read).expect("open");
        assert_eq!(sim.read_at(&open, &mut bytes, 0), Ok(1024));
        for sector in bytes.chunks(512) {
            assert!(
                sector == [1; 512] || sector == [2; 512],
                "seed {seed}: a torn sector"
            );
        }
        outcomes.insert((names, bytes[0], bytes[512]));
    }
    assert_eq!(outcomes.len(), 8, "every outcome that is allowed happens");
}

#[test]
fn a_lock_ends_with_its_process_and_not_with_another_one() {
    let (first, file) = with_file(b"");
    let second = first.another_process();
    let lock_again = || {
        let inode = second
            .lookup(&second.root(), OsStr::new("a"))
            .expect("lookup")
            .0;
        let file = second.open(&inode, Access::ReadWrite).expect("open");
        second.try_lock(&file, LockMode::Exclusive)
    };
    assert_eq!(first.try_lock(&file, LockMode::Exclusive), Ok(true));
    assert_eq!(lock_again(), Ok(false));
    let dying = second.another_process();
    dying.crash_at(1);
    assert_eq!(dying.attr(&dying.root()).err(), Some(Errno::IO));
    assert_eq!((lock_again(), first.is_dead()), (Ok(false), false));
    first.crash_at(0);
    assert_eq!(first.attr_of_file(&file).err(), Some(Errno::IO));
    assert_eq!(lock_again(), Ok(true));
}

#[test]
fn locks_reach_as_far_as_the_server_has_them() {
    let (first, file) = with_file(b"");
    let second = first.another_process();
    let inode = second
        .lookup(&second.root(), OsStr::new("a"))
        .expect("lookup")
        .0;
    let second_file = second.open(&inode, Access::ReadWrite).expect("open");
    let lock = || {
        (
            first.try_lock(&file, LockMode::Exclusive),
            second.try_lock(&second_file, LockMode::Exclusive),
        )
    };
    assert_eq!(lock(), (Ok(true), Ok(false)));
    first.lose_locks();
    assert_eq!(
        first.write_at(&file, &[IoSlice::new(b"x")], 0).err(),
        Some(Errno::IO)
    );
    assert_eq!(lock(), (Ok(true), Ok(false)));
    first.set_lock_reach(LockReach::Host);
    assert_eq!(lock(), (Ok(true), Ok(true)));
    first.set_lock_reach(LockReach::Refused(Errno::NOLCK));
    assert_eq!(lock(), (Err(Errno::NOLCK), Err(Errno::NOLCK)));
}
