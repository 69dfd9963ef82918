//! A transaction in one directory never delays work in another directory, whichever call of the backing hangs.

use crate::common;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::IoSlice;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use common::Verbs;
use firn_backing::{Access, Backing, Files, Names, RenameFlags, SetTime, Volume};
use firn_sim::{SimBacking, suite};
use firn_transact::{Mode, Object, TransactionalBacking};

/// Longer than any step of these tests; only a hang takes this long.
const HANGS_AFTER: Duration = Duration::from_secs(60);

type Store = TransactionalBacking<SimBacking>;

fn name(text: &str) -> &OsStr {
    OsStr::new(text)
}

fn find(backing: &Store, dir: &str) -> Arc<Object<SimBacking>> {
    let found = backing.lookup(&backing.root(), name(dir));
    found.expect("lookup").0
}

fn write(backing: &Store, dir: &Arc<Object<SimBacking>>, file: &str, bytes: &[u8]) {
    let me = suite::own_caller();
    let file = match backing.lookup(dir, name(file)) {
        Ok((inode, _)) => backing.open(&inode, Access::ReadWrite).expect("open"),
        Err(_) => {
            let made = backing.create(&me, dir, name(file), 0o644);
            made.expect("create").1
        }
    };
    let written = backing.write_at(&file, &[IoSlice::new(bytes)], 0);
    assert_eq!(written, Ok(bytes.len()));
}

/// Makes three directories: `a` with a changed transaction, `b` with another transaction, and `plain` without one.
fn world(mode: Mode) -> Store {
    let opened = TransactionalBacking::open_with_history(SimBacking::new(), 2);
    let backing = opened.expect("open").0.in_mode(mode);
    let me = suite::own_caller();
    for dir in ["a", "b", "plain"] {
        let made = backing.mkdir(&me, &backing.root(), name(dir), 0o755);
        write(&backing, &made.expect("mkdir").0, "old", &[1; 100_000]);
    }
    for dir in ["a", "b"] {
        let root = find(&backing, dir);
        backing.begin(&root, dir.as_bytes()).expect("begin");
        let old = backing.lookup(&root, name("old")).expect("lookup").0;
        let old = backing.open(&old, Access::ReadWrite).expect("open");
        backing.set_len(&old, 0).expect("set_len");
        write(&backing, &root, "old", &[2; 50_000]);
        write(&backing, &root, "new", b"new");
    }
    backing
}

/// Makes each kind of call that programs make in a directory.
fn use_dir(backing: &Store, dir: &str) {
    let me = suite::own_caller();
    let root = backing.root();
    let dir = find(backing, dir);
    backing.attr(&dir).expect("attr");
    let (old, _) = backing.lookup(&dir, name("old")).expect("lookup");
    let file = backing.open(&old, Access::ReadWrite).expect("open");
    backing.read_at(&file, &mut [0; 100], 0).expect("read");
    write(backing, &dir, "old", b"once more");
    write(backing, &dir, "made", b"made");
    let (sub, _) = backing.mkdir(&me, &dir, name("sub"), 0o755).expect("mkdir");
    write(backing, &sub, "below", b"below");
    let flags = RenameFlags::empty();
    let renamed = backing.rename(&dir, name("sub"), &dir, name("sub2"), flags);
    renamed.expect("rename a directory");
    let renamed = backing.rename(&dir, name("made"), &dir, name("made2"), flags);
    renamed.expect("rename a file");
    backing.unlink(&sub, name("below")).expect("unlink");
    backing.unlink(&dir, name("made2")).expect("unlink");
    backing.rmdir(&dir, name("sub2")).expect("rmdir");
    backing.set_mode(&old, 0o600).expect("set_mode");
    let now = SetTime::Now;
    backing.set_times(&old, now, now).expect("set_times");
    for dir in [&dir, &root] {
        let stream = backing.open_dir(dir).expect("open_dir");
        let listed = backing.read_dir(&stream, 0, &mut |_| true);
        listed.expect("read_dir");
    }
    backing.sync_dir(&dir).expect("sync_dir");
}

/// Uses the other directories in a separate thread. If that thread hangs, the test fails without waiting for it.
fn others_go_on(backing: &Arc<Store>, told: &str) {
    let (sender, receiver) = mpsc::channel();
    let user = Arc::clone(backing);
    let thread = std::thread::spawn(move || {
        for dir in ["plain", "b"] {
            use_dir(&user, dir);
        }
        sender.send(()).expect("somebody waits");
    });
    match receiver.recv_timeout(HANGS_AFTER) {
        Ok(()) => thread.join().expect("no panic"),
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("{told}: other directories wait"),
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            thread.join().expect("it says what went wrong");
        }
    }
}

/// A step of a transaction, and what must be done before the step.
struct Verb {
    name: &'static str,
    before: fn(&Store),
    run: fn(&Store),
}

fn root_of_a(backing: &Store) -> Arc<Object<SimBacking>> {
    find(backing, "a")
}

const VERBS: [Verb; 8] = [
    Verb {
        name: "prepare",
        before: |_| {},
        run: |backing| backing.prepare(&root_of_a(backing), 7).expect("prepare"),
    },
    Verb {
        name: "decide at once",
        before: |_| {},
        run: |backing| backing.decide(&root_of_a(backing), 7).expect("decide"),
    },
    Verb {
        name: "decide what is prepared",
        before: |backing| backing.prepare(&root_of_a(backing), 7).expect("prepare"),
        run: |backing| backing.decide(&root_of_a(backing), 7).expect("decide"),
    },
    Verb {
        name: "apply",
        before: |backing| backing.decide(&root_of_a(backing), 7).expect("decide"),
        run: |backing| backing.apply(b"a").expect("apply"),
    },
    Verb {
        name: "abort",
        before: |_| {},
        run: |backing| backing.abort(&root_of_a(backing)).expect("abort"),
    },
    Verb {
        name: "reopen",
        before: |backing| backing.prepare(&root_of_a(backing), 7).expect("prepare"),
        run: |backing| {
            backing.reopen(&root_of_a(backing), 7).expect("reopen");
        },
    },
    Verb {
        name: "begin",
        before: |backing| backing.commit(&root_of_a(backing), 7).expect("commit"),
        run: |backing| {
            let root = root_of_a(backing);
            backing.begin(&root, b"a").expect("begin");
        },
    },
    Verb {
        name: "change",
        before: |_| {},
        run: |backing| use_dir(backing, "a"),
    },
];

/// Proves S-tx-120.
#[test]
fn whatever_hangs_in_one_directory_others_are_used() {
    for mode in [Mode::Buffer, Mode::Shadow] {
        for verb in &VERBS {
            let steps_of = |backing: &Store| backing.base().steps();
            let backing = world(mode);
            (verb.before)(&backing);
            let before = steps_of(&backing);
            (verb.run)(&backing);
            let calls = steps_of(&backing) - before;
            assert!(calls > 0, "{}: it calls the backing", verb.name);
            for call in 1..=calls {
                let told = format!("{:?}, {}, call {call} of {calls}", mode, verb.name);
                let backing = Arc::new(world(mode));
                (verb.before)(&backing);
                let hang = backing.base().hang_at(steps_of(&backing) + call);
                std::thread::scope(|scope| {
                    let busy = Arc::clone(&backing);
                    scope.spawn(move || (verb.run)(&busy));
                    hang.await_call();
                    let done = catch_unwind(AssertUnwindSafe(|| others_go_on(&backing, &told)));
                    drop(hang);
                    done.expect("others go on");
                });
            }
        }
    }
}

/// A begin of a transaction waits for a change that hangs below its directory. Nothing else waits for that change.
#[test]
fn a_begin_waits_for_changes_below_and_for_no_others() {
    let backing = Arc::new(world(Mode::Buffer));
    let me = suite::own_caller();
    let root = backing.root();
    backing.mkdir(&me, &root, name("c"), 0o755).expect("mkdir");
    let c = find(&backing, "c");
    let hang = backing.base().hang("mkdir");
    std::thread::scope(|scope| {
        let (busy, dir) = (Arc::clone(&backing), Arc::clone(&c));
        scope.spawn(move || {
            busy.mkdir(&suite::own_caller(), &dir, name("sub"), 0o755)
                .expect("mkdir")
        });
        hang.await_call();
        let beginning = Arc::clone(&backing);
        let dir = Arc::clone(&c);
        let begun = scope.spawn(move || beginning.begin(&dir, b"c").map(drop).expect("begin"));
        let done = catch_unwind(AssertUnwindSafe(|| others_go_on(&backing, "begin")));
        drop(hang);
        done.expect("others go on");
        begun.join().expect("it begins");
    });
    assert!(backing.transaction_at(&c).is_some());
}

/// Like [`world`], but with a backup.
fn world_with_backup() -> (Store, SimBacking) {
    let store = SimBacking::new();
    let backing = world(Mode::Buffer).backed_up(store.clone(), &BTreeSet::new());
    (backing.expect("a backup"), store)
}

/// Prepares the other directory in a separate thread. If that thread hangs, the test fails without waiting for it.
fn other_is_prepared(backing: &Arc<Store>, told: &str) {
    let (sender, receiver) = mpsc::channel();
    let other = Arc::clone(backing);
    let thread = std::thread::spawn(move || {
        let dir = find(&other, "b");
        other.prepare(&dir, 9).expect("prepare");
        sender.send(()).expect("somebody waits");
    });
    match receiver.recv_timeout(HANGS_AFTER) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("{told}: the other transaction waits"),
        Ok(()) | Err(mpsc::RecvTimeoutError::Disconnected) => {
            thread.join().expect("it says what went wrong");
        }
    }
}

/// Proves S-tx-121.
#[test]
fn a_backup_that_hangs_holds_up_no_prepare_of_another_directory() {
    let (backing, store) = world_with_backup();
    let before = store.steps();
    backing.prepare(&root_of_a(&backing), 7).expect("prepare");
    let calls = store.steps() - before;
    assert!(calls > 0, "it calls the backup");
    for call in 1..=calls {
        let told = format!("call {call} of {calls}");
        let (backing, store) = world_with_backup();
        let backing = Arc::new(backing);
        let hang = store.hang_at(store.steps() + call);
        std::thread::scope(|scope| {
            let busy = Arc::clone(&backing);
            scope.spawn(move || busy.prepare(&root_of_a(&busy), 7).expect("prepare"));
            hang.await_call();
            let done = catch_unwind(AssertUnwindSafe(|| other_is_prepared(&backing, &told)));
            drop(hang);
            done.expect("the other transaction goes on");
        });
    }
}

/// Proves S-tx-121.
#[test]
fn a_round_that_hangs_holds_up_no_prepare_of_another_directory() {
    let (backing, store) = world_with_backup();
    let backing = Arc::new(backing);
    // A round copies only files that have not changed since the round before, so a first round is needed.
    backing.backups.back_up_ahead();
    let hang = store.hang("create");
    std::thread::scope(|scope| {
        let busy = Arc::clone(&backing);
        scope.spawn(move || busy.backups.back_up_ahead());
        hang.await_call();
        let done = catch_unwind(AssertUnwindSafe(|| other_is_prepared(&backing, "a round")));
        drop(hang);
        done.expect("the other transaction goes on");
    });
}
