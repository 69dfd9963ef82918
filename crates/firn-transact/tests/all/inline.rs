//! Inline changes: the few overwritten bytes of a file are in memory until they move to the record or a staged copy.

use crate::common;

use std::ffi::OsStr;
use std::io::IoSlice;
use std::os::unix::ffi::OsStrExt;

use common::Verbs;
use firn_backing::{Access, Backing, Errno, Files, Names, Seek, SetTime, Time, Volume};
use firn_sim::tree;
use firn_sim::{SimBacking, suite};
use firn_transact::TransactionalBacking;

const NAME: &str = "file";
/// Number of bytes that is too large for an inline change.
const LARGE: usize = 20_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Small,
    Other,
    Large,
    Longer,
    Cut,
    Hole,
    Mode,
    Xattr,
    Times,
    Time,
    Into,
    Sync,
}

const CALLS: [Call; 12] = [
    Call::Small,
    Call::Other,
    Call::Large,
    Call::Longer,
    Call::Cut,
    Call::Hole,
    Call::Mode,
    Call::Xattr,
    Call::Times,
    Call::Time,
    Call::Into,
    Call::Sync,
];

fn run<B: Backing>(b: &B, call: Call, step: usize) -> Result<(), Errno> {
    let (inode, _) = b.lookup(&b.root(), OsStr::new(NAME))?;
    let file = b.open(&inode, Access::ReadWrite)?;
    let fill = |len: usize| vec![b'0' + step as u8; len];
    let time = |sec| SetTime::At(Time { sec, nsec: 7 });
    match call {
        Call::Small => b
            .write_at(
                &file,
                &[IoSlice::new(&fill(100)), IoSlice::new(&fill(3))],
                990,
            )
            .map(drop),
        Call::Other => b
            .write_at(&file, &[IoSlice::new(&fill(40))], 1070 + 7 * step as u64)
            .map(drop),
        Call::Large => b
            .write_at(&file, &[IoSlice::new(&fill(LARGE))], 500)
            .map(drop),
        Call::Longer => b
            .write_at(&file, &[IoSlice::new(&fill(60))], 29_970)
            .map(drop),
        Call::Cut => b.set_len(&file, 1010),
        Call::Hole => b.allocate(
            &file,
            libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
            1000,
            30,
        ),
        Call::Mode => b.set_mode(&inode, 0o600 + step as u32),
        Call::Xattr => b.set_xattr(&inode, OsStr::new("user.step"), &fill(4), 0),
        Call::Times => b.set_times(&inode, time(1000), time(2000 + step as i64)),
        Call::Time => b.set_times(&inode, SetTime::Keep, time(3000 + step as i64)),
        Call::Into => b.copy_range(&file, 0, &file, 2000, 50).map(drop),
        Call::Sync => b.sync(&file, false),
    }
}

/// Returns a disk with a file of 30,000 bytes.
fn start() -> SimBacking {
    let sim = SimBacking::new();
    let made = sim
        .create(&suite::own_caller(), &sim.root(), OsStr::new(NAME), 0o644)
        .expect("create");
    for at in [0, 15_000] {
        sim.write_at(&made.1, &[IoSlice::new(&[b'.'; 15_000])], at)
            .expect("write");
    }
    sim
}

/// Returns the modification time of the file if it was set. Checks that ranges without data read as zeros.
fn seen<B: Backing>(b: &B) -> Option<Time> {
    let (inode, attr) = b.lookup(&b.root(), OsStr::new(NAME)).expect("lookup");
    let file = b.open(&inode, Access::Read).expect("open");
    let mut content = vec![0; attr.size as usize];
    b.read_at(&file, &mut content, 0).expect("read");
    for at in [0, 980, 1000, 1020, 1090, 1200] {
        let data = b
            .seek(&file, at, Seek::Data)
            .unwrap_or(attr.size)
            .min(attr.size);
        let skipped = content.get(at as usize..data as usize).unwrap_or_default();
        assert!(
            skipped.iter().all(|&byte| byte == 0),
            "{skipped:?} skipped from {at} on"
        );
        let hole = b.seek(&file, at, Seek::Hole);
        assert!(
            hole.is_err() || (at..=attr.size).contains(&hole.unwrap_or(0)),
            "a hole at {hole:?}"
        );
    }
    (1000..10_000)
        .contains(&attr.mtime.sec)
        .then_some(attr.mtime)
}

/// Makes each sequence of three calls. Compares with a plain file in the transaction, after an abort, and after a
/// commit by this firnd or the next one.
#[test]
fn whatever_follows_inline_changes_a_file_reads_as_a_plain_one() {
    let before = start();
    for number in 0..CALLS.len().pow(3) {
        let calls = [0, 1, 2].map(|at| CALLS[number / CALLS.len().pow(at) % CALLS.len()]);
        let plain = before.fork();
        let backing = TransactionalBacking::open(before.fork()).expect("open").0;
        backing.begin(&backing.root(), b"").expect("begin");
        for (step, call) in calls.into_iter().enumerate() {
            assert_eq!(
                run(&backing, call, step),
                run(&plain, call, step),
                "{calls:?}, call {step}"
            );
            assert_eq!(tree(&backing), Ok(plain.tree()), "{calls:?}, call {step}");
            assert_eq!(seen(&backing), seen(&plain), "{calls:?}, call {step}");
        }
        let root = backing.root();
        if number % 3 == 0 {
            backing.abort(&root).expect("abort");
            assert_eq!(tree(&backing), Ok(before.tree()), "{calls:?}: aborted");
            continue;
        }
        backing.prepare(&root, 5).expect("prepare");
        let next = if number % 3 == 1 {
            Some(
                TransactionalBacking::open(backing.base().fork())
                    .expect("open")
                    .0,
            )
        } else {
            None
        };
        let backing = next.as_ref().unwrap_or(&backing);
        backing.commit(&backing.root(), 5).expect("commit");
        assert_eq!(tree(backing), Ok(plain.tree()), "{calls:?}: committed");
        assert_eq!(seen(backing), seen(&plain), "{calls:?}: committed");
        backing.base().fsck().expect("fsck");
    }
}

/// An inline change makes no staged copy, and a restored checkpoint has the old bytes.
#[test]
fn inline_changes_stage_nothing_and_are_undone_by_a_restore() {
    let backing = TransactionalBacking::open_with_history(start(), 2)
        .expect("open")
        .0;
    let root = backing.root();
    let content = || {
        tree(&backing).expect("a tree")[NAME.as_bytes()]
            .content
            .clone()
    };
    backing.begin(&root, b"").expect("begin");
    run(&backing, Call::Other, 1).expect("write");
    backing.commit(&root, 1).expect("commit");
    let first = content();
    backing.begin(&root, b"").expect("begin");
    let objects = || backing.base().tree().len();
    let before = objects();
    run(&backing, Call::Small, 2).expect("write");
    run(&backing, Call::Time, 2).expect("set the time");
    assert_eq!(objects(), before, "no staged copy");
    run(&backing, Call::Large, 2).expect("write");
    assert!(objects() > before, "a staged copy");
    backing.abort(&root).expect("abort");
    backing.begin(&root, b"").expect("begin");
    run(&backing, Call::Small, 2).expect("write");
    backing.commit(&root, 2).expect("commit");
    assert_ne!(content(), first);
    backing.restore(&root, 1).expect("restore");
    assert_eq!(content(), first);
}

/// Number of files; it is large enough that a commit writes several files at a time.
const MANY: usize = 150;

/// Overwrites a few bytes of each of the `MANY` files.
fn change_many<B: Backing>(b: &B) {
    for index in 0..MANY {
        let name = format!("many{index}");
        let (inode, _) = b.lookup(&b.root(), OsStr::new(&name)).expect("lookup");
        let file = b.open(&inode, Access::ReadWrite).expect("open");
        let bytes = [IoSlice::new(name.as_bytes())];
        b.write_at(&file, &bytes, 5).expect("write");
        let time = Time {
            sec: 1_000 + index as i64,
            nsec: 1,
        };
        b.set_times(&inode, SetTime::Keep, SetTime::At(time))
            .expect("set_times");
    }
}

/// Proves S-tx-41 for files that are written several at a time: whichever file a crash interrupts, the next process has
/// the new bytes and times of all files.
#[test]
fn a_crash_while_many_files_are_written_at_a_time_ends_in_the_new_tree() {
    let disk = SimBacking::from_seed(1);
    for index in 0..MANY {
        let name = format!("many{index}");
        let caller = suite::own_caller();
        let (_, file, _) = disk
            .create(&caller, &disk.root(), OsStr::new(&name), 0o644)
            .expect("create");
        let bytes = [IoSlice::new(&[b'.'; 64])];
        disk.write_at(&file, &bytes, 0).expect("write");
    }
    disk.sync_all().expect("sync");
    let expected = {
        let plain = disk.fork();
        change_many(&plain);
        contents(&plain)
    };
    let decided = |disk: SimBacking| {
        let backing = TransactionalBacking::open(disk).expect("open").0;
        let root = backing.root();
        backing.begin(&root, b"").expect("begin");
        change_many(&backing);
        backing.decide(&root, 1).expect("decide");
        backing
    };
    let whole = decided(disk.fork());
    let before = whole.base().steps();
    whole.apply(b"").expect("apply");
    let steps = whole.base().steps() - before;
    assert_eq!(contents(whole.base()), expected);
    // An attempt makes more calls than there are files. The step is a prime number, so that crashes hit each kind of
    // call.
    for step in (1..steps).step_by(31) {
        let backing = decided(disk.fork());
        let disk = backing.base().clone();
        disk.crash_at(disk.steps() + step);
        // Leftovers that cannot be removed after the last step are no error.
        let _ = backing.apply(b"");
        assert!(disk.is_dead(), "call {step} of {steps}");
        disk.revive();
        disk.power_loss(step);
        drop(backing);
        let again = TransactionalBacking::open(disk).expect("open again").0;
        assert_eq!(contents(again.base()), expected, "crash at call {step}");
        again.base().fsck().expect("fsck");
    }
}

/// Returns the names, bytes and modification times that programs see.
fn contents(disk: &SimBacking) -> Vec<(Vec<u8>, Vec<u8>, Time)> {
    let mut files = Vec::new();
    for index in 0..MANY {
        let name = format!("many{index}").into_bytes();
        let (inode, attr) = disk
            .lookup(&disk.root(), OsStr::from_bytes(&name))
            .expect("lookup");
        let file = disk.open(&inode, Access::Read).expect("open");
        let mut bytes = vec![0; 128];
        let len = disk.read_at(&file, &mut bytes, 0).expect("read");
        bytes.truncate(len);
        files.push((name, bytes, attr.mtime));
    }
    files
}
