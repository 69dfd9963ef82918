//! A transaction is a tree like any other: it passes the suite of all backings. A commit leaves in the backing what
//! programs saw; an abort leaves the tree from before.

use crate::common;

use std::ffi::OsStr;

use common::Verbs;
use firn_backing::{Access, Backing, Caller, DirBacking, Files, Names, SetTime, Time, Volume};
use firn_sim::{SimBacking, suite};
use firn_sim::{Tree, tree};
use firn_transact::{Mode, PlainBacking, TransactionalBacking};
use tempfile::TempDir;

const ME: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
};
const MODES: [Mode; 2] = [Mode::Buffer, Mode::Shadow];
/// Directories on the file system of `/tmp` and on tmpfs.
const PLACES: [&str; 2] = ["/tmp", "/dev/shm"];

fn fresh(place: &str) -> (TempDir, DirBacking) {
    rustix::process::umask(rustix::fs::Mode::empty());
    let dir = tempfile::Builder::new()
        .prefix("firn-transact-")
        .tempdir_in(place)
        .expect("tempdir");
    let backing = DirBacking::open(dir.path()).expect("open");
    backing.set_mode(&backing.root(), 0o755).expect("set_mode");
    (dir, backing)
}

fn open<B: Backing>(base: B) -> TransactionalBacking<B> {
    TransactionalBacking::open(base).expect("open").0
}

/// Returns a backing whose whole tree is in a transaction.
fn begun<B: Backing>(base: B, mode: Mode) -> TransactionalBacking<B> {
    let backing = open(base).in_mode(mode);
    backing.begin(&backing.root(), b"").expect("begin");
    backing
}

#[test]
fn what_is_not_in_a_transaction_conforms() {
    suite::run(|| PlainBacking::new(SimBacking::new()));
    suite::run(|| open(SimBacking::new()));
}

#[test]
fn a_transaction_conforms() {
    for mode in MODES {
        suite::run(|| begun(SimBacking::new(), mode));
    }
}

/// Checks that a layer over a backing has the lanes of that backing.
fn check_lanes<B: Backing>(over: impl Fn(SimBacking) -> B) {
    const LANES: u16 = 3;
    let below = SimBacking::new();
    below.set_lanes(LANES);
    let backing = over(below.clone());
    assert_eq!(backing.features().lane_count, LANES);
    let lanes: Vec<_> = (0..2 * LANES)
        .map(|number| {
            let name = format!("file_{number}");
            let caller = suite::own_caller();
            let root = backing.root();
            let made = backing.create(&caller, &root, OsStr::new(&name), 0o644);
            let (made, _, attr) = made.expect("create");
            let lane = backing.facts(&made).lane;
            assert_eq!(lane.index() as u64, attr.ino % u64::from(LANES));
            lane.index()
        })
        .collect();
    assert!(lanes.iter().any(|lane| *lane != lanes[0]), "{lanes:?}");
}

#[test]
fn lanes_are_those_of_the_backing_below() {
    check_lanes(PlainBacking::new);
    check_lanes(open);
    for mode in MODES {
        check_lanes(|below| begun(below, mode));
    }
}

#[test]
fn a_transaction_in_a_real_directory_conforms() {
    for (place, mode) in PLACES
        .into_iter()
        .flat_map(|place| MODES.map(|mode| (place, mode)))
    {
        let kept = std::cell::RefCell::new(Vec::new());
        suite::run(|| {
            let (dir, backing) = fresh(place);
            kept.borrow_mut().push(dir);
            begun(backing, mode)
        });
    }
}

fn seen<B: Backing>(backing: &TransactionalBacking<B>) -> Tree {
    tree(backing).expect("tree")
}

/// Makes random calls before and in a transaction. A plain backing gets the same calls, and is returned.
fn run<B: Backing>(backing: &TransactionalBacking<B>, seed: u64) -> SimBacking {
    let plain = SimBacking::new();
    suite::differential::run(backing, &plain, seed, 100);
    backing.begin(&backing.root(), b"").expect("begin");
    suite::differential::run(backing, &plain, seed + 1_000_000, 200);
    plain
}

#[test]
fn after_a_commit_the_backing_is_as_a_plain_one_after_the_same_calls() {
    for (seed, mode) in common::seeds(300, 200).flat_map(|seed| MODES.map(|mode| (seed, mode))) {
        println!("seed {seed}, {mode:?}");
        let backing = open(SimBacking::new()).in_mode(mode);
        let plain = run(&backing, seed);
        backing.commit(&backing.root(), 7).expect("commit");
        assert_eq!(seen(&backing), plain.tree(), "seed {seed}: as it is seen");
        backing.base().fsck().expect("fsck");
        let again = open(backing.base().fork());
        assert_eq!(seen(&again), plain.tree(), "seed {seed}: in the backing");
        assert_eq!(again.lower.present_commit_id(b""), Ok(Some(7)));
        // Files that were opened before can still be used.
        suite::differential::run(&backing, &plain, seed + 2_000_000, 100);
    }
}

#[test]
fn after_an_abort_the_backing_is_as_it_was() {
    for (seed, mode) in common::seeds(200, 200).flat_map(|seed| MODES.map(|mode| (seed, mode))) {
        println!("seed {seed}, {mode:?}");
        let backing = open(SimBacking::new()).in_mode(mode);
        let plain = SimBacking::new();
        suite::differential::run(&backing, &plain, seed, 100);
        let before = seen(&backing);
        backing.begin(&backing.root(), b"").expect("begin");
        suite::differential::run(&backing, &plain, seed + 1_000_000, 200);
        if seed % 2 == 0 {
            backing.prepare(&backing.root(), 3).expect("prepare");
        }
        backing.abort(&backing.root()).expect("abort");
        assert_eq!(seen(&backing), before, "seed {seed}");
        assert_eq!(seen(&open(backing.base().fork())), before, "seed {seed}");
        backing.base().fsck().expect("fsck");
    }
}

#[test]
fn commits_follow_each_other_in_a_real_directory() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    for seed in common::seeds(20, 200) {
        for (place, mode) in PLACES
            .into_iter()
            .flat_map(|place| MODES.map(|mode| (place, mode)))
        {
            println!("seed {seed} in {place}, {mode:?}");
            let (_dir, real) = fresh(place);
            let backing = open(real).in_mode(mode);
            let plain = run(&backing, seed);
            for round in 0..3 {
                backing.commit(&backing.root(), round).expect("commit");
                assert_eq!(seen(&backing), plain.tree(), "seed {seed}, round {round}");
                backing.begin(&backing.root(), b"").expect("begin");
                suite::differential::run(&backing, &plain, seed + 3_000_000 + round, 100);
            }
        }
    }
}

/// A directory in which a name was made and removed counts as changed.
#[test]
fn regression_a_directory_keeps_the_time_of_names_that_came_and_went() {
    let old = SetTime::At(Time {
        sec: 1_000,
        nsec: 0,
    });
    for mode in MODES {
        let (_dir, backing) = fresh("/dev/shm");
        let (dir, _) = backing
            .mkdir(&ME, &backing.root(), OsStr::new("dir"), 0o755)
            .expect("mkdir");
        backing.set_times(&dir, old, old).expect("set_times");
        let backing = begun(backing, mode);
        let find = || {
            backing
                .lookup(&backing.root(), OsStr::new("dir"))
                .expect("lookup")
        };
        let (dir, _) = find();
        backing
            .create(&ME, &dir, OsStr::new("x"), 0o644)
            .expect("create");
        backing.unlink(&dir, OsStr::new("x")).expect("unlink");
        let seen = find().1.mtime;
        assert!(seen.sec > 1_000, "{mode:?}");
        backing.commit(&backing.root(), 1).expect("commit");
        assert_eq!(find().1.mtime, seen, "{mode:?}");
    }
}

#[test]
fn regression_a_staged_object_inherits_from_its_directory_only() {
    fn groups<B: Backing>(b: &B, begin: impl Fn(&B)) -> [u32; 2] {
        let me = suite::own_caller();
        let file = std::ffi::OsStr::new("file");
        b.set_owner(&b.root(), None, Some(7)).expect("chown");
        b.set_mode(&b.root(), 0o2755).expect("chmod");
        let (dir, _) = b
            .mkdir(&me, &b.root(), std::ffi::OsStr::new("dir"), 0o755)
            .expect("mkdir");
        b.set_mode(&dir, 0o755).expect("chmod");
        begin(b);
        [dir, b.root()].map(|dir| b.create(&me, &dir, file, 0o644).expect("create").2.gid)
    }
    let plain = groups(&SimBacking::new(), |_| {});
    let begin = |backing: &TransactionalBacking<SimBacking>| {
        drop(backing.begin(&backing.root(), b"").expect("begin"))
    };
    assert_eq!(groups(&open(SimBacking::new()), begin), plain);
    if rustix::process::geteuid().is_root() {
        let (_dir, real) = fresh("/tmp");
        let begin = |backing: &TransactionalBacking<DirBacking>| {
            drop(backing.begin(&backing.root(), b"").expect("begin"))
        };
        assert_eq!(groups(&open(real), begin), plain);
    }
}

/// Found as a bug: after the commit, a program that had the file open read the old bytes.
#[test]
fn regression_a_file_that_lost_its_name_keeps_its_bytes_while_it_is_open() {
    for (len, history) in [(5, 0), (40_000, 0), (5, 1), (40_000, 1)] {
        let sim = SimBacking::new();
        let (_, made, _) = sim
            .create(&ME, &sim.root(), OsStr::new("file"), 0o644)
            .expect("create");
        sim.write_at(&made, &[std::io::IoSlice::new(&[b'o'; 40_000])], 0)
            .expect("write");
        let backing = TransactionalBacking::open_with_history(sim, history)
            .expect("open")
            .0;
        let root = backing.root();
        backing.begin(&root, b"").expect("begin");
        backing.commit(&root, 1).expect("commit");
        backing.begin(&root, b"").expect("begin");
        let (inode, _) = backing.lookup(&root, OsStr::new("file")).expect("lookup");
        let file = backing.open(&inode, Access::ReadWrite).expect("open");
        backing
            .write_at(&file, &[std::io::IoSlice::new(&vec![b'n'; len])], 0)
            .expect("write");
        backing.unlink(&root, OsStr::new("file")).expect("unlink");
        backing.commit(&root, 2).expect("commit");
        let mut content = vec![0; 40_000];
        backing.read_at(&file, &mut content, 0).expect("read");
        assert_eq!(content.iter().filter(|&&byte| byte == b'n').count(), len);
        if history == 0 {
            assert_eq!(backing.attr_of_file(&file).expect("fstat").nlink, 0);
        }
        drop((file, inode));
        assert!(
            tree(&backing).expect("a tree").keys().all(Vec::is_empty),
            "nothing is left"
        );
        if history > 0 {
            backing.restore(&root, 1).expect("restore");
            assert_eq!(
                tree(&backing).expect("a tree")[&b"file"[..]].content,
                vec![b'o'; 40_000]
            );
        }
        backing.base().fsck().expect("fsck");
    }
}
