//! Hosts die while they remove a logged file or its container. Another host finishes the removal, and nothing that is
//! in use is removed.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::Duration;

use firn_backing::{Access, Backing, Errno, FileUse, Files, Names, RenameFlags, Sharing, Volume};
use firn_hosts::host_dir::make_host_dir;
use firn_hosts::own;
use firn_log::{LogBacking, Setup, WhenClosed};
use firn_sim::{SimBacking, suite};
use parking_lot::Mutex;

use crate::common::{containers, first_container};

type Logged = LogBacking<SimBacking>;
type File = <Logged as Volume>::File;

const DATA: &[u8] = b"what is in the logs of x";

/// A part of a test in which `b` acts.
type Work<'a> = &'a dyn Fn(&mut World);

/// Two hosts over one disk, and the file `x` with bytes in logs of `b`.
struct World {
    disk: SimBacking,
    disk_of_b: SimBacking,
    living: Arc<Mutex<HashSet<&'static str>>>,
    a: Logged,
    b: Logged,
    /// The file, if `b` has it open.
    file: Option<File>,
}

impl World {
    fn new() -> Self {
        let disk = SimBacking::new();
        let disk_of_b = disk.another_process();
        let living = Arc::new(Mutex::new(HashSet::from(["a", "b"])));
        let root = disk.root();
        for name in ["dir", "other"] {
            disk.mkdir(&suite::own_caller(), &root, OsStr::new(name), 0o755)
                .expect("mkdir");
        }
        // The host directories show that the hosts were there.
        for host in ["a", "b"] {
            make_host_dir(&disk, host).expect("make");
        }
        let a = logged(&disk, "a", &living);
        let b = logged(&disk_of_b, "b", &living);
        let name = OsStr::new("x");
        let (_, file, _) = b
            .create(&suite::own_caller(), &b.root(), name, 0o644)
            .expect("create");
        b.report_use(&file, FileUse::OpenedToWrite)
            .expect("report_use");
        b.write_at(&file, &[IoSlice::new(DATA)], 0).expect("write");
        b.sync(&file, false).expect("sync");
        Self {
            disk,
            disk_of_b,
            living,
            a,
            b,
            file: Some(file),
        }
    }

    fn b_dies(&self) {
        self.living.lock().remove("b");
        self.disk_of_b.crash_at(0);
        self.disk_of_b.begin_new_process();
    }

    /// Lets `b` die at one of its next calls, which `work` makes.
    fn b_dies_in(&mut self, call: u64, work: &dyn Fn(&Logged)) {
        self.disk_of_b.crash_at(self.disk_of_b.steps() + call);
        work(&self.b);
        self.file = None;
        self.b_dies();
    }

    /// Checks that `b`, which has removed the file and still has it open, reads all of its bytes, and that nothing is left
    /// after the close.
    fn assert_whole_until_closed(&mut self, at: u64) {
        let mut bytes = vec![0; DATA.len()];
        let file = self.file.as_ref().expect("open");
        let count = self.b.read_at(file, &mut bytes, 0);
        assert_eq!(count, Ok(DATA.len()), "call {at}");
        assert!(bytes == DATA, "call {at}");
        self.file = None;
        assert_eq!(self.b.settle().error, None, "call {at}");
        self.assert_whole_or_gone("x", at);
    }

    /// Checks that the file has all of its bytes, with logs as long as they are needed, or that nothing is left of it.
    fn assert_whole_or_gone(&self, name: &str, at: u64) {
        let found = self.a.lookup(&self.a.root(), OsStr::new(name));
        match found {
            Ok((inode, _)) => {
                assert!(read(&self.a, &inode) == DATA, "call {at}");
                let left = self.a.flatten_below(&self.a.root()).expect("flatten");
                assert!(left.is_empty(), "call {at}: {left:?}");
                assert!(read(&self.a, &inode) == DATA, "call {at}");
            }
            Err(error) => assert_eq!(error, Errno::NOENT, "call {at}"),
        }
        let left = containers(&self.disk);
        assert!(left.is_empty(), "call {at}: {left:?}");
    }
}

fn logged(disk: &SimBacking, host: &str, living: &Arc<Mutex<HashSet<&'static str>>>) -> Logged {
    let living = Arc::clone(living);
    let setup = Setup {
        host: host.to_owned(),
        chooses: Box::new(|_: &OsStr| true),
        is_alive: Box::new(move |host| Ok(living.lock().contains(host))),
        view_age_max: Duration::ZERO,
        lag_max: Duration::ZERO,
        unit_bytes: 4 << 10,
        when_closed: WhenClosed::Keep,
        flattens_read: false,
    };
    LogBacking::open(disk.clone(), setup).expect("open")
}

fn read(host: &Logged, inode: &<Logged as Volume>::Inode) -> Vec<u8> {
    let file = host.open(inode, Access::Read).expect("open");
    let mut bytes = vec![0; 100];
    let count = host.read_at(&file, &mut bytes, 0).expect("read");
    bytes.truncate(count);
    bytes
}

/// Counts the calls that a host makes in some work.
fn count_calls(work: &dyn Fn(&Logged)) -> u64 {
    let world = World::new();
    let before = world.disk_of_b.steps();
    work(&world.b);
    world.disk_of_b.steps() - before
}

fn unlink(host: &Logged) {
    // The host dies in this, or the result does not matter.
    let _ = host.unlink(&host.root(), OsStr::new("x"));
    let _ = host.settle();
}

/// Gives the name of the file to another file.
fn replace(host: &Logged) {
    let root = host.root();
    let made = host.create(&suite::own_caller(), &root, OsStr::new("new"), 0o644);
    drop(made);
    let flags = RenameFlags::empty();
    let _ = host.rename(&root, OsStr::new("new"), &root, OsStr::new("x"), flags);
    let _ = host.settle();
}

/// Proves S-log-71: a host dies at each call of a removal in turn, and a live host finishes the removal.
#[test]
fn a_host_that_lives_ends_the_removal_in_which_another_one_died() {
    for at in 1..=count_calls(&unlink) {
        let mut world = World::new();
        world.b_dies_in(at, &unlink);
        world.a.end_removals().expect("end");
        world.assert_whole_or_gone("x", at);
    }
}

/// Proves S-log-71, for a file whose name another file takes.
#[test]
fn a_host_that_lives_ends_the_replacement_in_which_another_one_died() {
    for at in 1..=count_calls(&replace) {
        let mut world = World::new();
        world.b_dies_in(at, &replace);
        world.a.end_removals().expect("end");
        let (inode, _) = world.a.lookup(&world.a.root(), OsStr::new("x")).expect("x");
        let bytes = read(&world.a, &inode);
        assert!(bytes == DATA || bytes.is_empty(), "call {at}");
        let left = world.a.flatten_below(&world.a.root()).expect("flatten");
        assert!(left.is_empty(), "call {at}: {left:?}");
        let left = containers(&world.disk);
        assert!(left.is_empty(), "call {at}: {left:?}");
    }
}

/// Proves S-log-71: a host dies at each call of a flattening in turn, including the removal of the container.
#[test]
fn what_is_left_of_a_container_goes_with_the_host_that_died() {
    let flatten = |host: &Logged| {
        let _ = host.flatten_below(&host.root());
    };
    let close = |world: &mut World| world.file = None;
    let calls = {
        let mut world = World::new();
        close(&mut world);
        let before = world.disk_of_b.steps();
        flatten(&world.b);
        world.disk_of_b.steps() - before
    };
    let mut retired = 0;
    for at in 1..=calls {
        let mut world = World::new();
        close(&mut world);
        world.b_dies_in(at, &flatten);
        let is_retired = |name: &String| name.starts_with("over-");
        retired += usize::from(containers(&world.disk).iter().any(is_retired));
        world.a.end_removals().expect("end");
        assert!(!containers(&world.disk).iter().any(is_retired), "call {at}");
        world.assert_whole_or_gone("x", at);
    }
    assert!(retired > 0, "it never died in the removal of a container");
}

/// Proves S-log-71: the host that died comes back.
#[test]
fn a_host_that_comes_back_ends_the_removal_in_which_it_died() {
    for at in 1..=count_calls(&unlink) {
        let mut world = World::new();
        world.b_dies_in(at, &unlink);
        world.living.lock().insert("b");
        world.b = logged(&world.disk.another_process(), "b", &world.living);
        world.b.end_removals().expect("end");
        world.assert_whole_or_gone("x", at);
    }
}

/// Proves S-log-71: a host dies while it writes or flattens a file. When it is back, it first removes the file, as it
/// does with files of a transaction. Flat logs had no mark then, and were kept as those of a lost file.
#[test]
fn regression_a_host_that_comes_back_and_removes_a_file_leaves_nothing_of_its_logs() {
    let write = |world: &mut World| {
        let file = world.file.as_ref().expect("open");
        let _ = world.b.write_at(file, &[IoSlice::new(b"more")], 0);
        let _ = world.b.sync(file, false);
    };
    let flatten = |world: &mut World| {
        world.file = None;
        let _ = world.b.flatten_below(&world.b.root());
    };
    let flatten_and_write = |world: &mut World| {
        flatten(world);
        let root = world.b.root();
        let found = world.b.lookup(&root, OsStr::new("x"));
        let Ok(file) = found.and_then(|(inode, _)| world.b.open(&inode, Access::ReadWrite)) else {
            return;
        };
        let _ = world.b.report_use(&file, FileUse::OpenedToWrite);
        let _ = world.b.write_at(&file, &[IoSlice::new(b"more")], 0);
    };
    let works: [(&str, Work<'_>); 3] = [
        ("write", &write),
        ("flatten", &flatten),
        ("flatten, write", &flatten_and_write),
    ];
    for (what, work) in works {
        let calls = {
            let mut world = World::new();
            let before = world.disk_of_b.steps();
            work(&mut world);
            world.disk_of_b.steps() - before
        };
        for at in 1..=calls {
            let mut world = World::new();
            world.disk_of_b.crash_at(world.disk_of_b.steps() + at);
            work(&mut world);
            world.file = None;
            world.b_dies();
            world.living.lock().insert("b");
            world.b = logged(&world.disk.another_process(), "b", &world.living);
            let root = world.b.root();
            world.b.unlink(&root, OsStr::new("x")).expect("unlink");
            world.b.settle();
            world.b.end_removals().expect("end");
            let orphans = world.b.find_orphans().expect("find");
            assert!(orphans.lost.is_empty(), "{what}, call {at}: {orphans:?}");
            let left = containers(&world.disk);
            assert!(left.is_empty(), "{what}, call {at}: {left:?}");
        }
    }
}

/// Proves S-log-71: a host removes a file that it has open, while it makes the first logs of the file. It dies at each
/// call of the removal in turn.
#[test]
fn regression_logs_that_are_made_while_a_file_is_removed_go_with_it() {
    let begin = || {
        let mut world = World::new();
        let made = world.b.create(
            &suite::own_caller(),
            &world.b.root(),
            OsStr::new("new"),
            0o644,
        );
        let (_, file, _) = made.expect("create");
        world.file = Some(file);
        world
    };
    let unlink = |host: &Logged| {
        let _ = host.unlink(&host.root(), OsStr::new("new"));
    };
    let calls = {
        let world = begin();
        let before = world.disk_of_b.steps();
        unlink(&world.b);
        world.disk_of_b.steps() - before
    };
    for at in 1..=calls {
        let mut world = begin();
        let hang = world.disk_of_b.hang_at(world.disk_of_b.steps() + at);
        std::thread::scope(|scope| {
            let removing = scope.spawn(|| unlink(&world.b));
            hang.await_call();
            let file = world.file.as_ref().expect("open");
            let wrote = world.b.write_at(file, &[IoSlice::new(DATA)], 0);
            assert_eq!(wrote, Ok(DATA.len()), "call {at}");
            // The host dies here.
            world.disk_of_b.crash_at(0);
            hang.release();
            removing.join().expect("no panic");
        });
        world.file = None;
        world.b_dies();
        world.a.end_removals().expect("end");
        let orphans = world.a.find_orphans().expect("find");
        assert!(orphans.lost.is_empty(), "call {at}: {orphans:?}");
    }
}

/// Proves S-log-71: removals do not delay a flattening of all files, which does not report them either.
#[test]
fn a_flattening_of_all_files_ends_removals_too() {
    for at in 1..=count_calls(&unlink) {
        let mut world = World::new();
        world.b_dies_in(at, &unlink);
        let left = world.a.flatten_below(&world.a.root()).expect("flatten");
        assert!(left.is_empty(), "call {at}: {left:?}");
        world.assert_whole_or_gone("x", at);
    }
}

#[test]
fn a_removal_of_a_host_that_lives_is_left_to_it() {
    for at in 1..=count_calls(&unlink) {
        let mut world = World::new();
        let hang = world.disk_of_b.hang_at(world.disk_of_b.steps() + at);
        std::thread::scope(|scope| {
            let removing = scope.spawn(|| unlink(&world.b));
            hang.await_call();
            world.a.end_removals().expect("end");
            let orphans = world.a.find_orphans().expect("find");
            assert!(orphans.lost.is_empty(), "call {at}: {orphans:?}");
            hang.release();
            removing.join().expect("no panic");
        });
        world.assert_whole_until_closed(at);
    }
}

/// A host died before it removed a name, and is back. While it ends that removal, a program that has the file open removes
/// the name: the file keeps its logs until the program closes it.
#[test]
fn regression_a_removal_that_begins_again_is_not_ended_as_the_last_one() {
    fn begin() -> (World, SimBacking) {
        let mut world = World::new();
        let (_, dir) = first_container(&world.disk).expect("one");
        own::replace_file(&world.disk, &dir, "dying", b"b").expect("mark");
        world.file = None;
        world.b_dies();
        world.living.lock().insert("b");
        let disk_of_b = world.disk.another_process();
        world.b = logged(&disk_of_b, "b", &world.living);
        let (inode, _) = world.b.lookup(&world.b.root(), OsStr::new("x")).expect("x");
        world.file = Some(world.b.open(&inode, Access::Read).expect("open"));
        (world, disk_of_b)
    }
    let calls = {
        let (world, disk_of_b) = begin();
        let before = disk_of_b.steps();
        world.b.end_removals().expect("end");
        disk_of_b.steps() - before
    };
    for at in 1..=calls {
        let (mut world, disk_of_b) = begin();
        let hang = disk_of_b.hang_at(disk_of_b.steps() + at);
        std::thread::scope(|scope| {
            let ending = scope.spawn(|| world.b.end_removals());
            hang.await_call();
            let removed = world.b.unlink(&world.b.root(), OsStr::new("x"));
            removed.expect("unlink");
            hang.release();
            ending.join().expect("no panic").expect("end");
        });
        assert!(
            !containers(&world.disk).is_empty(),
            "call {at}: a program has the file open"
        );
        world.assert_whole_until_closed(at);
    }
}

/// A host dies before it removes the name. While another host searches for the file, the file is renamed. Its logs
/// stay.
#[test]
fn a_file_that_moves_while_it_is_searched_keeps_its_logs() {
    /// Makes a world in which `b` died before it removed the name of `dir/x`.
    fn begin() -> World {
        let mut world = World::new();
        rename(&world.disk, ("", "x"), ("dir", "x"));
        let (_, dir) = first_container(&world.disk).expect("one");
        own::replace_file(&world.disk, &dir, "dying", b"b").expect("mark");
        world.file = None;
        world.b_dies();
        world
    }

    fn rename(disk: &SimBacking, from: (&str, &str), to: (&str, &str)) {
        let dir = |name: &str| match name {
            "" => disk.root(),
            name => {
                disk.lookup(&disk.root(), OsStr::new(name))
                    .expect("found")
                    .0
            }
        };
        let (old, new) = (OsStr::new(from.1), OsStr::new(to.1));
        disk.rename(&dir(from.0), old, &dir(to.0), new, RenameFlags::empty())
            .expect("rename");
    }
    let calls = {
        let world = begin();
        let before = world.disk.steps();
        world.a.end_removals().expect("end");
        world.disk.steps() - before
    };
    for (from, to) in [("dir", "other"), ("dir", "")] {
        for at in 1..=calls {
            let world = begin();
            let mover = world.disk.another_process();
            let hang = world.disk.hang_at(world.disk.steps() + at);
            std::thread::scope(|scope| {
                let ending = scope.spawn(|| world.a.end_removals());
                hang.await_call();
                rename(&mover, (from, "x"), (to, "x"));
                hang.release();
                ending.join().expect("no panic").expect("end");
            });
            rename(&mover, (to, "x"), ("", "y"));
            let (inode, _) = world.a.lookup(&world.a.root(), OsStr::new("y")).expect("y");
            assert!(read(&world.a, &inode) == DATA, "call {at}");
            world.a.end_removals().expect("end");
            world.assert_whole_or_gone("y", at);
        }
    }
}
