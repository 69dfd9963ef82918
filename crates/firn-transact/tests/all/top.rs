//! A transaction creates or renames the top of its scope. All short sequences of calls against a plain directory, a
//! crash at every call, faults, history, and refused calls.

use crate::common;

use std::ffi::OsStr;
use std::io::IoSlice;

use common::{Verbs, seen};
use firn_backing::{Access, Backing, Errno, Names, RenameFlags, Volume};
use firn_sim::{Fault, Tree};
use firn_sim::{SimBacking, suite};
use firn_transact::{
    BeginError, Mode, Object, Opening, RecoveryOutcome, ScopeError, Stage, TopMaker,
    TransactionError, TransactionalBacking,
};

const MODES: [Mode; 2] = [Mode::Buffer, Mode::Shadow];
/// The parent of all scopes in these tests.
const PARENT: &str = "p";
const NO_FLAGS: RenameFlags = RenameFlags::empty();

/// The state of the scope when its transaction begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    /// The transaction creates the scope.
    Created,
    /// The scope exists, with a file and a directory.
    There,
}

const STARTS: [Start; 2] = [Start::Created, Start::There];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Create(&'static str),
    Mkdir(&'static str),
    Write(&'static str),
    Unlink(&'static str),
    RenameInside(&'static str, &'static str),
    Mode(u32),
    RenameTop(&'static str),
    /// Makes a directory beside the scope, which is not part of the transaction.
    MakeOutside,
}

use Call::*;

fn at<B: Backing>(b: &B, path: &str) -> Result<B::Inode, Errno> {
    let mut inode = b.root();
    for name in path.split('/').filter(|name| !name.is_empty()) {
        inode = b.lookup(&inode, OsStr::new(name))?.0;
    }
    Ok(inode)
}

fn make_file<B: Backing>(b: &B, dir: &B::Inode, name: &str, content: &[u8]) -> Result<(), Errno> {
    let (_, file, _) = b.create(&suite::own_caller(), dir, OsStr::new(name), 0o644)?;
    b.write_at(&file, &[IoSlice::new(content)], 0).map(drop)
}

fn make_dir<B: Backing>(b: &B, dir: &B::Inode, name: &str) -> Result<B::Inode, Errno> {
    let made = b.mkdir(&suite::own_caller(), dir, OsStr::new(name), 0o755);
    made.map(|(inode, _)| inode)
}

/// Runs one call. `top` is the present name of the scope.
fn run<B: Backing>(b: &B, top: &mut &'static str, call: Call) -> Result<(), Errno> {
    let parent = at(b, PARENT)?;
    let dir = at(b, &format!("{PARENT}/{top}"))?;
    let open = |name: &str| {
        let inode = b.lookup(&dir, OsStr::new(name))?.0;
        b.open(&inode, Access::ReadWrite)
    };
    match call {
        Create(name) => make_file(b, &dir, name, b"new"),
        Mkdir(name) => make_dir(b, &dir, name).map(drop),
        Write(name) => b
            .write_at(&open(name)?, &[IoSlice::new(b"written")], 2)
            .map(drop),
        Unlink(name) => b.unlink(&dir, OsStr::new(name)),
        RenameInside(from, to) => b.rename(&dir, OsStr::new(from), &dir, OsStr::new(to), NO_FLAGS),
        Mode(mode) => b.set_mode(&dir, mode),
        RenameTop(name) => {
            b.rename(
                &parent,
                OsStr::new(*top),
                &parent,
                OsStr::new(name),
                NO_FLAGS,
            )?;
            *top = name;
            Ok(())
        }
        MakeOutside => make_file(b, &parent, "outside", b"beside"),
    }
}

fn fresh(seed: u64, start: Start) -> SimBacking {
    let sim = SimBacking::from_seed(seed);
    let parent = make_dir(&sim, &sim.root(), PARENT).expect("parent");
    let other = make_dir(&sim, &parent, "other").expect("other");
    make_file(&sim, &other, "x", b"of another").expect("file");
    make_file(&sim, &parent, "file", b"a file").expect("file");
    make_dir(&sim, &parent, "empty").expect("empty");
    if start == Start::There {
        let dir = make_dir(&sim, &parent, "d").expect("scope");
        make_file(&sim, &dir, "x", b"0123456789").expect("file");
        let below = make_dir(&sim, &dir, "s").expect("below");
        make_file(&sim, &below, "y", b"abc").expect("file");
    }
    sim.sync_all().expect("sync");
    sim
}

fn begin(backing: &TransactionalBacking<SimBacking>, start: Start) -> Result<(), BeginError> {
    let caller = suite::own_caller();
    match start {
        Start::Created => {
            let parent = at(backing, PARENT)?;
            let maker = TopMaker {
                caller: &caller,
                mode: 0o755,
            };
            backing.begin_created(&parent, b"p/d", maker).map(drop)
        }
        Start::There => backing.begin(&at(backing, "p/d")?, b"p/d").map(drop),
    }
}

/// Like a begin, but without a transaction.
fn begin_plain(plain: &SimBacking, start: Start) {
    if start == Start::Created {
        let parent = at(plain, PARENT).expect("parent");
        make_dir(plain, &parent, "d").expect("mkdir");
    }
}

fn open(
    disk: SimBacking,
    mode: Mode,
    history: u32,
) -> (TransactionalBacking<SimBacking>, RecoveryOutcome) {
    let opening = Opening {
        history,
        ..Opening::default()
    };
    let (backing, outcome) =
        TransactionalBacking::open_with(disk, opening, |_| Ok::<(), TransactionError>(()))
            .expect("open");
    (backing.in_mode(mode), outcome)
}

fn without_own(tree: Tree) -> Tree {
    tree.into_iter()
        .filter(|(path, _)| !path.starts_with(b".firn"))
        .collect()
}

fn content(tree: &Tree) -> Vec<(Vec<u8>, Vec<u8>)> {
    tree.iter()
        .map(|(path, entry)| (path.clone(), entry.content.clone()))
        .collect()
}

/// Returns the tree without link counts: an object that the history keeps has one more link.
fn without_links(mut tree: Tree) -> Tree {
    tree.values_mut().for_each(|entry| entry.nlink = 0);
    tree
}

/// A transaction with changes, and the trees that may result from its end.
struct Middle {
    backing: TransactionalBacking<SimBacking>,
    old: Tree,
    new: Tree,
    top: &'static str,
    root: std::sync::Arc<Object<SimBacking>>,
}

fn middle(seed: u64, mode: Mode, start: Start, history: u32, calls: &[Call]) -> Middle {
    let disk = fresh(seed, start);
    let plain = disk.fork();
    let outside = disk.fork();
    let backing = open(disk, mode, history).0;
    begin(&backing, start).expect("begin");
    begin_plain(&plain, start);
    let (mut top, mut plain_top, mut outside_top) = ("d", "d", "other");
    for &call in calls {
        let here = run(&backing, &mut top, call);
        let there = run(&plain, &mut plain_top, call);
        assert_eq!(here, there, "{mode:?}, {start:?}, {calls:?}: {call:?}");
        assert_eq!(
            seen(&backing),
            plain.tree(),
            "{mode:?}, {start:?}, {calls:?}: after {call:?}"
        );
        if call == MakeOutside {
            let _ = run(&outside, &mut outside_top, call);
        }
    }
    let root = at(&backing, &format!("{PARENT}/{top}")).expect("scope");
    let new = plain.tree();
    let old = outside.tree();
    if mode == Mode::Buffer {
        let below = without_own(backing.base().tree());
        assert_eq!(
            content(&below),
            content(&old),
            "{calls:?}: the backing shows nothing"
        );
    }
    Middle {
        backing,
        old,
        new,
        top,
        root,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Commit,
    Abort,
    PrepareThenCommit,
    PrepareThenAbort,
    /// The next firnd recovers the open transaction.
    RecoverOpen,
    RecoverThenCommit,
    RecoverThenAbort,
}

const ENDS: [End; 7] = [
    End::Commit,
    End::Abort,
    End::PrepareThenCommit,
    End::PrepareThenAbort,
    End::RecoverOpen,
    End::RecoverThenCommit,
    End::RecoverThenAbort,
];

fn finish(middle: Middle, mode: Mode, end: End, told: &str) {
    let Middle {
        backing,
        old,
        new,
        root,
        top,
    } = middle;
    let (backing, is_committed) = match end {
        End::Commit => {
            backing.commit(&root, 7).expect("commit");
            (backing, true)
        }
        End::Abort => {
            backing.abort(&root).expect("abort");
            (backing, false)
        }
        End::PrepareThenCommit => {
            backing.prepare(&root, 7).expect("prepare");
            backing.commit(&root, 7).expect("commit");
            (backing, true)
        }
        End::PrepareThenAbort => {
            backing.prepare(&root, 7).expect("prepare");
            backing.abort(&root).expect("abort");
            (backing, false)
        }
        End::RecoverOpen => {
            let disk = backing.base().clone();
            drop(backing);
            (open(disk, mode, 0).0, false)
        }
        End::RecoverThenCommit | End::RecoverThenAbort => {
            backing.prepare(&root, 7).expect("prepare");
            let disk = backing.base().clone();
            drop(backing);
            let (backing, outcome) = open(disk, mode, 0);
            assert_eq!(outcome.waiting, [(7, b"p/d".to_vec())], "{told}");
            let shown = if mode == Mode::Buffer { &old } else { &new };
            assert_eq!(&seen(&backing), shown, "{told}: prepared");
            // The transaction is found by each name of the scope.
            for path in [b"p/d".to_vec(), format!("p/{top}").into_bytes()] {
                assert_eq!(backing.path_at_begin(&path), b"p/d", "{told}");
            }
            let root = backing.top_overlay.top_at_path(b"p/d").expect("it waits");
            if end == End::RecoverThenCommit {
                backing.commit(&root, 7).expect("commit");
            } else {
                backing.abort(&root).expect("abort");
            }
            (backing, end == End::RecoverThenCommit)
        }
    };
    let expected = if is_committed { &new } else { &old };
    assert_eq!(&seen(&backing), expected, "{told}");
    assert_eq!(backing.transactions(), [], "{told}");
    assert_eq!(
        without_own(backing.base().tree()),
        without_own_nlink(expected, &backing),
        "{told}: in the backing"
    );
    let path = if is_committed {
        format!("p/{top}")
    } else {
        "p/d".into()
    };
    let number = backing.lower.present_commit_id(path.as_bytes());
    assert_eq!(number, Ok(is_committed.then_some(7)), "{told}");
    if is_committed && top != "d" {
        assert_eq!(backing.lower.present_commit_id(b"p/d"), Ok(None), "{told}");
    }
    backing.base().fsck().expect("fsck");
}

/// Adjusts the link count of the backing's top, which has the hidden subdirectory `.firn`.
fn without_own_nlink(tree: &Tree, backing: &TransactionalBacking<SimBacking>) -> Tree {
    let mut tree = tree.clone();
    let below = backing.base().tree();
    if let (Some(top), Some(now)) = (tree.get_mut(&b""[..]), below.get(&b""[..])) {
        top.nlink = now.nlink;
    }
    tree
}

const SEQUENCES: [Call; 9] = [
    Create("a"),
    Write("x"),
    Unlink("x"),
    RenameInside("x", "z"),
    Mode(0o700),
    RenameTop("d"),
    RenameTop("e"),
    RenameTop("f"),
    MakeOutside,
];

fn sequence(number: usize, len: u32) -> Vec<Call> {
    let count = SEQUENCES.len();
    (0..len)
        .map(|place| SEQUENCES[number / count.pow(place) % count])
        .collect()
}

/// Proves S-tx-100, S-tx-102, S-tx-106.
#[test]
fn every_sequence_of_calls_in_and_on_the_top_ends_as_on_a_plain_directory_or_as_before() {
    let len = 3;
    let mut count = 0;
    for (mode, start) in MODES
        .into_iter()
        .flat_map(|mode| STARTS.map(|start| (mode, start)))
    {
        for number in 0..SEQUENCES.len().pow(len) {
            let calls = sequence(number, len);
            for end in ENDS {
                let told = format!("{mode:?}, {start:?}, {calls:?}, {end:?}");
                finish(middle(1, mode, start, 0, &calls), mode, end, &told);
                count += 1;
            }
        }
    }
    println!("{count} transactions");
}

/// Proves S-tx-105.
#[test]
fn a_restore_brings_the_name_of_the_top_back() {
    for number in 0..SEQUENCES.len().pow(3) {
        let mut calls = sequence(number, 3);
        calls.retain(|call| *call != MakeOutside);
        let disk = fresh(1, Start::There);
        let backing = open(disk, Mode::Buffer, 3).0;
        let scope = at(&backing, "p/d").expect("scope");
        backing.begin(&scope, b"p/d").expect("begin");
        run(&backing, &mut "d", Create("first")).expect("create");
        backing.commit(&scope, 1).expect("commit");
        let old = seen(&backing);
        begin(&backing, Start::There).expect("begin");
        let mut top = "d";
        for &call in &calls {
            let _ = run(&backing, &mut top, call);
        }
        let told = format!("{calls:?}");
        let scope = at(&backing, &format!("p/{top}")).expect("scope");
        backing.commit(&scope, 2).expect("commit");
        let path = format!("p/{top}").into_bytes();
        assert_eq!(
            backing.history.restorable_commits(&path),
            Ok(vec![2, 1]),
            "{told}"
        );
        // One more commit, so that a restore goes back over both names.
        backing.begin(&scope, &path).expect("begin");
        run(&backing, &mut top, Create("third")).expect("create");
        backing.commit(&scope, 3).expect("commit");
        assert_eq!(
            backing.history.restorable_commits(&path),
            Ok(vec![3, 2, 1]),
            "{told}"
        );
        backing.restore(&scope, 1).expect("restore");
        assert_eq!(
            without_links(seen(&backing)),
            without_links(old.clone()),
            "{told}"
        );
        let again = open(backing.base().fork(), Mode::Buffer, 3).0;
        assert_eq!(
            without_links(seen(&again)),
            without_links(old),
            "{told}: opened again"
        );
        assert_eq!(again.lower.present_commit_id(b"p/d"), Ok(Some(1)), "{told}");
    }
}

const CRASH_SEQUENCES: [&[Call]; 5] = [
    &[],
    &[Create("a"), Mkdir("m"), Create("b")],
    &[RenameTop("e")],
    &[
        Create("a"),
        RenameTop("e"),
        Mkdir("m"),
        RenameTop("f"),
        Create("b"),
    ],
    &[
        Write("x"),
        RenameTop("e"),
        RenameTop("d"),
        Mode(0o700),
        RenameTop("f"),
    ],
];

/// Runs a whole transaction, from its begin to its end.
fn all_of_it(
    backing: &TransactionalBacking<SimBacking>,
    start: Start,
    calls: &[Call],
    end: End,
) -> Result<(), TransactionError> {
    begin(backing, start)?;
    let mut top = "d";
    for &call in calls {
        match run(backing, &mut top, call) {
            Ok(()) | Err(Errno::NOENT | Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    let root = at(backing, &format!("{PARENT}/{top}"))?;
    match end {
        End::Commit => backing.commit(&root, 7)?,
        End::Abort => backing.abort(&root)?,
        End::PrepareThenCommit => {
            backing.prepare(&root, 7)?;
            backing.commit(&root, 7)?;
        }
        _ => backing.prepare(&root, 7)?,
    }
    Ok(())
}

/// Returns the trees before and after.
fn both_trees(start: Start, calls: &[Call]) -> (Tree, Tree) {
    let plain = fresh(1, start);
    let old = plain.tree();
    begin_plain(&plain, start);
    let mut top = "d";
    for &call in calls {
        let _ = run(&plain, &mut top, call);
    }
    (old, plain.tree())
}

/// Proves S-tx-41, S-tx-100, S-tx-102, S-tx-106.
#[test]
fn a_crash_at_any_call_leaves_the_old_name_and_tree_or_the_new_ones() {
    let ends = [
        End::Commit,
        End::Abort,
        End::PrepareThenCommit,
        End::RecoverThenAbort,
    ];
    for (mode, start) in MODES
        .into_iter()
        .flat_map(|mode| STARTS.map(|start| (mode, start)))
    {
        for (calls, end) in CRASH_SEQUENCES
            .into_iter()
            .flat_map(|calls| ends.map(|end| (calls, end)))
        {
            let (old, new) = both_trees(start, calls);
            for step in 1.. {
                let disk = fresh(1, start);
                let backing = open(disk.clone(), mode, 0).0;
                disk.crash_at(disk.steps() + step);
                let result = all_of_it(&backing, start, calls, end);
                let is_over = !disk.is_dead();
                drop(backing);
                let told = format!("{mode:?}, {start:?}, {calls:?}, {end:?}, call {step}");
                let backing = recover(&disk, mode, step, &told);
                let now = seen(&backing);
                assert!(now == old || now == new, "{told}: {now:?}");
                assert!(
                    end != End::Abort || now == old || !backing.transactions().is_empty(),
                    "{told}"
                );
                let is_committed = matches!(end, End::Commit | End::PrepareThenCommit);
                assert!(!(is_committed && result.is_ok()) || now == new, "{told}");
                if let Some(root) = backing.top_overlay.top_at_path(b"p/d") {
                    let shown = if mode == Mode::Buffer { &old } else { &new };
                    assert_eq!(&now, shown, "{told}: it waits");
                    backing.abort(&root).expect("abort");
                    assert_eq!(seen(&backing), old, "{told}: aborted");
                }
                backing.base().fsck().expect("fsck");
                if is_over {
                    break;
                }
            }
        }
    }
}

/// Simulates a power loss, and opens the backing in a new firnd. A first attempt may crash.
fn recover(
    disk: &SimBacking,
    mode: Mode,
    step: u64,
    told: &str,
) -> TransactionalBacking<SimBacking> {
    disk.revive();
    disk.power_loss(step * 31);
    if step.is_multiple_of(3) {
        disk.crash_at(disk.steps() + 1 + step % 40);
        if TransactionalBacking::open(disk.clone()).is_err() {
            assert!(disk.is_dead(), "{told}: only the crash may stop it");
        }
        disk.revive();
        disk.power_loss(step * 37);
    }
    disk.fsck().expect("fsck");
    open(disk.clone(), mode, 0).0
}

#[test]
fn what_the_backing_refuses_at_any_call_leaves_the_transaction_whole() {
    for (mode, start) in MODES
        .into_iter()
        .flat_map(|mode| STARTS.map(|start| (mode, start)))
    {
        for calls in CRASH_SEQUENCES {
            let (old, _) = both_trees(start, calls);
            for step in 1.. {
                let disk = fresh(1, start);
                let backing = open(disk.clone(), mode, 0).0;
                let begun = disk.steps();
                let mut left = 1;
                disk.set_plan(move |_, now| {
                    let is_it = now >= begun + step && left > 0;
                    left -= i32::from(is_it);
                    is_it.then_some(Fault::Error(Errno::NOSPC))
                });
                let result = all_of_it(&backing, start, calls, End::PrepareThenCommit);
                disk.clear_plan();
                let told = format!("{mode:?}, {start:?}, {calls:?}, call {step}: {result:?}");
                if result.is_ok() {
                    break;
                }
                // Either none or all of the changes are there, and an open transaction can be ended.
                if let Some(root) = backing.top_overlay.top_at_path(b"p/d") {
                    match backing.transactions()[0].stage {
                        Stage::Decided(id) => backing.commit(&root, id).expect("commit"),
                        _ => {
                            backing
                                .abort(&root)
                                .unwrap_or_else(|error| panic!("{told}: {error}"));
                            assert_eq!(seen(&backing), old, "{told}");
                        }
                    }
                } else {
                    assert_eq!(seen(&backing), old, "{told}");
                }
                assert_eq!(backing.transactions(), [], "{told}");
                let now = seen(&backing);
                let again = open(disk, mode, 0).0;
                assert_eq!(seen(&again), now, "{told}: opened again");
            }
        }
    }
}

/// Proves S-tx-10 for a new top: programs see it in its parent exactly once, at whatever step of the application.
#[test]
fn programs_see_the_new_name_however_far_the_commit_is_applied() {
    for start in STARTS {
        for calls in CRASH_SEQUENCES {
            for step in 1.. {
                let Middle {
                    backing,
                    new,
                    root,
                    top,
                    ..
                } = middle(1, Mode::Buffer, start, 0, calls);
                backing.decide(&root, 7).expect("decide");
                let path = format!("p/{top}").into_bytes();
                backing
                    .begin(&root, &path)
                    .expect("the next one begins at once");
                let disk = backing.base().clone();
                let begun = disk.steps();
                let mut left = 1;
                disk.set_plan(move |_, now| {
                    let is_it = now >= begun + step && left > 0;
                    left -= i32::from(is_it);
                    is_it.then_some(Fault::Error(Errno::NOSPC))
                });
                let result = backing.apply(&path);
                disk.clear_plan();
                let told = format!("{start:?}, {calls:?}, call {step}: {result:?}");
                assert_eq!(seen(&backing), new, "{told}");
                backing.apply(&path).expect("again");
                assert_eq!(seen(&backing), new, "{told}: applied");
                backing.abort(&root).expect("abort of what followed");
                assert_eq!(seen(&backing), new, "{told}: only the commit is left");
                assert_eq!(backing.transactions(), [], "{told}");
                if result.is_ok() {
                    break;
                }
            }
        }
    }
}

/// Proves S-tx-102 and S-tx-103 for a transaction that follows a commit: the backing may not yet have the top's name
/// from that commit.
#[test]
fn the_top_keeps_its_name_until_the_commit_before_the_transaction_is_applied() {
    for start in STARTS {
        for calls in [&[][..], &[RenameTop("e")]] {
            let told = format!("{start:?}, {calls:?}");
            let Middle {
                backing, root, top, ..
            } = middle(1, Mode::Buffer, start, 0, calls);
            let parent = at(&backing, PARENT).expect("parent");
            let rename = || {
                let from = OsStr::new(top);
                let to = OsStr::new("g");
                backing.rename(&parent, from, &parent, to, NO_FLAGS)
            };
            backing.decide(&root, 7).expect("decide");
            let path = format!("p/{top}").into_bytes();
            backing
                .begin(&root, &path)
                .expect("begin of the next transaction");
            let tree = seen(&backing);
            assert_eq!(rename(), Err(Errno::BUSY), "{told}: decided");
            assert_eq!(seen(&backing), tree, "{told}: nothing is changed");
            backing.apply(&path).expect("apply");
            rename().expect("the next transaction may rename the top");
            assert_eq!(at(&backing, &format!("p/{top}")).err(), Some(Errno::NOENT));
            backing.commit(&root, 8).expect("commit");
            let below = backing.base();
            assert!(at(below, "p/g").is_ok(), "{told}");
            let old = at(below, &format!("p/{top}")).err();
            assert_eq!(old, Some(Errno::NOENT), "{told}");
        }
    }
}

/// Proves S-tx-101, S-tx-103, S-tx-104.
#[test]
fn what_cannot_be_made_or_renamed_is_refused_with_the_number_that_says_why() {
    for mode in MODES {
        let backing = open(fresh(1, Start::There), mode, 0).0;
        let caller = suite::own_caller();
        let maker = TopMaker {
            caller: &caller,
            mode: 0o755,
        };
        let parent = at(&backing, PARENT).expect("parent");
        let create = |path: &[u8]| backing.begin_created(&parent, path, maker).map(drop);
        let tree = seen(&backing);
        for there in [&b"p/d"[..], b"p/file", b"p/empty"] {
            assert_eq!(create(there), Err(BeginError::Exists), "{mode:?}");
        }
        let file = at(&backing, "p/file").expect("file");
        let in_file = backing.begin_created(&file, b"p/file/d", maker).map(drop);
        assert_eq!(in_file, Err(ScopeError::NotDirectory.into()));
        assert_eq!(seen(&backing), tree, "{mode:?}: nothing is made");

        begin(&backing, Start::There).expect("begin");
        create(b"p/n").expect("beside another transaction");
        let within = at(&backing, "p/d").expect("scope");
        let nested = backing.begin_created(&within, b"p/d/n", maker).map(drop);
        assert!(
            matches!(nested, Err(BeginError::Overlaps { .. })),
            "{mode:?}: {nested:?}"
        );
        let above = backing.begin(&parent, b"p").map(drop);
        assert!(
            matches!(above, Err(BeginError::Overlaps { .. })),
            "{mode:?}: {above:?}"
        );

        let rename = |from: &str, to: &str, flags| {
            backing.rename(&parent, OsStr::new(from), &parent, OsStr::new(to), flags)
        };
        let tree = seen(&backing);
        for top in ["d", "n"] {
            let told = format!("{mode:?}: {top}");
            assert_eq!(rename(top, "file", NO_FLAGS), Err(Errno::NOTDIR), "{told}");
            assert_eq!(
                rename(top, "other", NO_FLAGS),
                Err(Errno::NOTEMPTY),
                "{told}"
            );
            assert_eq!(rename(top, "empty", NO_FLAGS), Err(Errno::BUSY), "{told}");
            let flags = RenameFlags::NOREPLACE;
            assert_eq!(rename(top, "empty", flags), Err(Errno::EXIST), "{told}");
            let flags = RenameFlags::EXCHANGE;
            assert_eq!(rename(top, "empty", flags), Err(Errno::BUSY), "{told}");
            assert_eq!(rename(top, "none", flags), Err(Errno::NOENT), "{told}");
            assert_eq!(rename("empty", top, NO_FLAGS), Err(Errno::BUSY), "{told}");
            assert_eq!(rename("empty", top, flags), Err(Errno::BUSY), "{told}");
            let other = at(&backing, "p/other").expect("other");
            let elsewhere =
                backing.rename(&parent, OsStr::new(top), &other, OsStr::new(top), NO_FLAGS);
            assert_eq!(elsewhere, Err(Errno::BUSY), "{told}");
            assert_eq!(
                backing.rmdir(&parent, OsStr::new(top)),
                Err(Errno::BUSY),
                "{told}"
            );
            assert_eq!(
                backing.unlink(&parent, OsStr::new(top)),
                Err(Errno::ISDIR),
                "{told}"
            );
            assert_eq!(
                make_dir(&backing, &parent, top).err(),
                Some(Errno::EXIST),
                "{told}"
            );
            let file = at(&backing, "p/file").expect("file");
            let linked = backing.link(&file, &parent, OsStr::new(top));
            assert_eq!(linked.err(), Some(Errno::EXIST), "{told}");
            let root = backing.root();
            let above = backing.rename(&root, OsStr::new(PARENT), &root, OsStr::new("q"), NO_FLAGS);
            assert_eq!(above, Err(Errno::BUSY), "{told}");
        }
        assert_eq!(seen(&backing), tree, "{mode:?}: nothing is changed");
        // No other object can get a name that the top has or had.
        rename("d", "e", NO_FLAGS).expect("rename");
        rename("n", "m", NO_FLAGS).expect("rename");
        let tree = seen(&backing);
        for (top, first) in [("e", "d"), ("m", "n")] {
            let told = format!("{mode:?}: {top}");
            assert_eq!(
                at(&backing, &format!("p/{first}")).err(),
                Some(Errno::NOENT),
                "{told}"
            );
            assert_eq!(
                make_dir(&backing, &parent, first).err(),
                Some(Errno::BUSY),
                "{told}"
            );
            assert_eq!(rename("empty", first, NO_FLAGS), Err(Errno::BUSY), "{told}");
            assert_eq!(rename(first, "free", NO_FLAGS), Err(Errno::NOENT), "{told}");
            assert_eq!(
                backing.rmdir(&parent, OsStr::new(first)),
                Err(Errno::NOENT),
                "{told}"
            );
            assert_eq!(
                backing.unlink(&parent, OsStr::new(first)),
                Err(Errno::NOENT),
                "{told}"
            );
            let again = create(format!("p/{first}").as_bytes());
            assert!(
                matches!(again, Err(BeginError::Overlaps { .. })),
                "{told}: {again:?}"
            );
        }
        assert_eq!(rename("e", "n", NO_FLAGS), Err(Errno::BUSY), "{mode:?}");
        assert_eq!(rename("e", "m", NO_FLAGS), Err(Errno::BUSY), "{mode:?}");
        // After the prepare the top cannot be renamed.
        let prepared = at(&backing, "p/e").expect("scope");
        backing.prepare(&prepared, 1).expect("prepare");
        assert_eq!(rename("e", "g", NO_FLAGS), Err(Errno::BUSY), "{mode:?}");
        assert_eq!(seen(&backing), tree, "{mode:?}: nothing is changed");
        backing.commit(&prepared, 1).expect("commit");
        rename("e", "g", NO_FLAGS).expect("it is over");
    }
}

/// Proves S-tx-44 for a renamed top.
#[test]
fn an_arena_drops_what_was_written_below_any_name_of_the_top() {
    for mode in MODES {
        let disk = fresh(1, Start::There);
        let arena = Some([1; 16]);
        let opening = || Opening {
            arena,
            ..Opening::default()
        };
        let nothing = |_: &[Vec<u8>]| Ok::<(), TransactionError>(());
        let backing = TransactionalBacking::open_with(disk.clone(), opening(), nothing)
            .expect("open")
            .0
            .in_mode(mode);
        begin(&backing, Start::There).expect("begin");
        let mut top = "d";
        for name in ["e", "f"] {
            run(&backing, &mut top, RenameTop(name)).expect("rename");
        }
        drop(backing);
        let mut dropped = Vec::new();
        let note = |scopes: &[Vec<u8>]| {
            dropped.extend(
                scopes
                    .iter()
                    .map(|scope| String::from_utf8_lossy(scope).into_owned()),
            );
            Ok::<(), TransactionError>(())
        };
        TransactionalBacking::open_with(disk, opening(), note).expect("open");
        dropped.sort();
        assert_eq!(dropped, ["p/d", "p/e", "p/f"], "{mode:?}");
    }
}

/// Proves S-tx-100: a new top gets the group that mkdir(2) in the parent would give it.
#[test]
fn a_new_top_inherits_from_its_parent() {
    for mode in MODES {
        let disk = fresh(1, Start::Created);
        let parent = at(&disk, PARENT).expect("parent");
        disk.set_owner(&parent, None, Some(4321)).expect("chown");
        disk.set_mode(&parent, 0o2775).expect("chmod");
        disk.sync_all().expect("sync");
        let backing = open(disk, mode, 0).0;
        begin(&backing, Start::Created).expect("begin");
        let attr = backing
            .attr(&at(&backing, "p/d").expect("scope"))
            .expect("attr");
        assert_eq!((attr.gid, attr.mode & 0o7777), (4321, 0o2755), "{mode:?}");
        let root = at(&backing, "p/d").expect("scope");
        backing.commit(&root, 1).expect("commit");
        let attr = backing
            .base()
            .attr(&at(backing.base(), "p/d").expect("scope"))
            .expect("attr");
        assert_eq!((attr.gid, attr.mode & 0o7777), (4321, 0o2755), "{mode:?}");
    }
}
