//! The modification time of a logged file is kept, whichever host sets it, and while any host flattens the file.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use firn_backing::{Access, Backing, FileUse, Files, Names, SetTime, Sharing, Time, Volume};
use firn_log::{LogBacking, Setup, WhenClosed};
use firn_sim::{SimBacking, suite};

use crate::common::containers;

type Logged = LogBacking<SimBacking>;

/// A time before 1970, as files from archives may have.
const GIVEN: Time = Time {
    sec: -86_400,
    nsec: 123_456_789,
};

fn logged(disk: &SimBacking, host: &str, b_lives: &Arc<AtomicBool>) -> Logged {
    let b_lives = Arc::clone(b_lives);
    let setup = Setup {
        host: host.to_owned(),
        chooses: Box::new(|_: &OsStr| true),
        is_alive: Box::new(move |host| Ok(host != "b" || b_lives.load(Ordering::Relaxed))),
        view_age_max: Duration::ZERO,
        lag_max: Duration::ZERO,
        unit_bytes: 4 << 10,
        when_closed: WhenClosed::Flatten,
        flattens_read: false,
    };
    LogBacking::open(disk.clone(), setup).expect("open")
}

/// A file `x` that two hosts have written, and that `b` is to flatten.
struct World {
    disk: SimBacking,
    a: Logged,
    /// The disk as host `b` sees it.
    disk_of_b: SimBacking,
    b: Logged,
    b_lives: Arc<AtomicBool>,
}

impl World {
    fn new() -> Self {
        let disk = SimBacking::new();
        let disk_of_b = disk.another_process();
        let b_lives = Arc::new(AtomicBool::new(true));
        let a = logged(&disk, "a", &b_lives);
        let b = logged(&disk_of_b, "b", &b_lives);
        let me = suite::own_caller();
        let name = OsStr::new("x");
        let (_, file, _) = a.create(&me, &a.root(), name, 0o644).expect("create");
        write(&a, &file, 0, b"of a");
        let (inode, _) = b.lookup(&b.root(), name).expect("lookup");
        let of_b = b.open(&inode, Access::ReadWrite).expect("open");
        write(&b, &of_b, 9_000, b"of b");
        drop(file);
        assert_eq!(a.settle().error, None);
        drop(of_b);
        Self {
            disk,
            a,
            disk_of_b,
            b,
            b_lives,
        }
    }

    /// Lets host `b` die at one of the calls of its flattening.
    fn flatten_and_die(&self, at: u64) {
        self.disk_of_b.crash_at(self.disk_of_b.steps() + at);
        self.b.settle();
        self.disk_of_b.begin_new_process();
        self.b_lives.store(false, Ordering::Relaxed);
    }

    /// Sets the time on host `a`, and checks that `a` sees it.
    fn set_time(&self) {
        let inode = inode(&self.a);
        let given = SetTime::At(GIVEN);
        self.a
            .set_times(&inode, SetTime::Keep, given)
            .expect("set_times");
        assert_eq!(modified(&self.a), GIVEN, "at once");
    }

    /// Flattens the file on host `a` or others, and returns its time.
    fn end(&self, at: u64) -> Time {
        let c = logged(&self.disk.another_process(), "c", &self.b_lives);
        let seen = modified(&c);
        for host in [&self.a, &c] {
            assert_eq!(host.settle().error, None, "call {at}");
            host.end_removals().expect("end");
            let left = host.flatten_below(&host.root()).expect("flatten");
            assert!(left.is_empty(), "call {at}: {left:?}");
        }
        let containers = containers(&self.disk);
        assert!(containers.is_empty(), "call {at}: {containers:?}");
        let plain = self.disk.lookup(&self.disk.root(), OsStr::new("x"));
        let plain = plain.expect("lookup").1.mtime;
        assert_eq!(seen, plain, "call {at}: flat, and as it was shown before");
        assert_eq!(modified(&self.a), plain, "call {at}");
        plain
    }

    /// Counts the calls of a flattening.
    fn count_calls() -> u64 {
        let world = Self::new();
        let before = world.disk_of_b.steps();
        assert_eq!(world.b.settle().error, None);
        assert!(containers(&world.disk).is_empty(), "it is flat");
        world.disk_of_b.steps() - before
    }
}

fn inode(host: &Logged) -> <Logged as Volume>::Inode {
    host.lookup(&host.root(), OsStr::new("x"))
        .expect("lookup")
        .0
}

fn modified(host: &Logged) -> Time {
    host.attr(&inode(host)).expect("attr").mtime
}

fn write(host: &Logged, file: &<Logged as Volume>::File, offset: u64, data: &[u8]) {
    host.report_use(file, FileUse::OpenedToWrite)
        .expect("note_opened");
    let count = host.write_at(file, &[IoSlice::new(data)], offset);
    assert_eq!(count, Ok(data.len()));
}

/// Proves S-log-70.
#[test]
fn a_time_that_is_set_at_any_call_of_a_flattening_is_kept() {
    for at in 1..=World::count_calls() {
        let world = World::new();
        let hang = world.disk_of_b.hang_at(world.disk_of_b.steps() + at);
        std::thread::scope(|scope| {
            let flattening = scope.spawn(|| world.b.settle());
            hang.await_call();
            world.set_time();
            hang.release();
            assert_eq!(
                flattening.join().expect("no panic").error,
                None,
                "call {at}"
            );
        });
        assert_eq!(modified(&world.a), GIVEN, "call {at}");
        assert_eq!(modified(&world.b), GIVEN, "call {at}");
        assert_eq!(world.end(at), GIVEN, "call {at}");
    }
}

#[test]
fn a_time_is_kept_at_any_call_of_whose_setting_the_file_becomes_flat() {
    let world = World::new();
    let before = world.disk.steps();
    world.set_time();
    let mut flat = 0;
    for at in 1..=world.disk.steps() - before {
        let world = World::new();
        let hang = world.disk.hang_at(world.disk.steps() + at);
        std::thread::scope(|scope| {
            let setting = scope.spawn(|| world.set_time());
            hang.await_call();
            world.b.settle();
            flat += u64::from(containers(&world.disk).is_empty());
            hang.release();
            setting.join().expect("no panic");
        });
        assert_eq!(world.end(at), GIVEN, "call {at}");
    }
    assert!(flat > 0, "it never became flat meanwhile");
}

/// Proves S-log-70, for a host that dies while it flattens.
#[test]
fn a_time_that_is_set_after_a_host_died_in_a_flattening_is_kept() {
    for at in 1..=World::count_calls() {
        let world = World::new();
        world.flatten_and_die(at);
        world.set_time();
        assert_eq!(world.end(at), GIVEN, "call {at}");
    }
}

#[test]
fn a_file_whose_host_dies_in_a_flattening_keeps_its_time() {
    for at in 1..=World::count_calls() {
        let world = World::new();
        let before = modified(&world.a);
        world.flatten_and_die(at);
        assert_eq!(modified(&world.a), before, "call {at}");
        assert_eq!(world.end(at), before, "call {at}");
    }
}

/// A write during the flattening of earlier bytes goes to the next generation, and is the last change.
#[test]
fn the_time_of_a_write_while_the_file_is_flattened_is_not_put_back() {
    let calls = World::count_calls();
    let mut written = 0;
    for at in 1..=calls {
        let world = World::new();
        let before = modified(&world.a);
        let d = logged(&world.disk.another_process(), "d", &world.b_lives);
        let file = d.open(&inode(&d), Access::ReadWrite).expect("open");
        let hang = world.disk_of_b.hang_at(world.disk_of_b.steps() + at);
        let is_written = std::thread::scope(|scope| {
            let flattening = scope.spawn(|| world.b.settle());
            hang.await_call();
            // If the other host hangs in the removal of the container, there is no next generation yet.
            let write = d.write_at(&file, &[IoSlice::new(b"later")], 100);
            hang.release();
            flattening.join().expect("no panic");
            write.is_ok()
        });
        written += u64::from(is_written);
        if !is_written {
            continue;
        }
        let after = modified(&d);
        assert!(after > before, "call {at}: {after:?}, {before:?}");
        drop(file);
        assert_eq!(d.settle().error, None, "call {at}");
        let end = world.end(at);
        assert!(end > before, "call {at}: {end:?}, {before:?}");
    }
    assert!(written > calls / 2, "{written} of {calls}");
}

#[test]
fn an_allocation_sets_the_time_also_where_every_byte_stays() {
    let world = World::new();
    let file = world.a.open(&inode(&world.a), Access::ReadWrite);
    let file = file.expect("open");
    let opened = world.a.report_use(&file, FileUse::OpenedToWrite);
    opened.expect("report_use");
    let beyond = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    for (mode, offset) in [(0, 10), (libc::FALLOC_FL_KEEP_SIZE, 0), (beyond, 1 << 20)] {
        world.set_time();
        let allocated = world.a.allocate(&file, mode, offset, 20);
        allocated.expect("allocate");
        assert_ne!(modified(&world.a), GIVEN, "{mode}");
    }
}
