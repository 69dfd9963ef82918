//! Transactions of names in a directory that is in no transaction itself: several at a time, each with its own outcome.

use std::ffi::{OsStr, OsString};
use std::io::IoSlice;

use firn_backing::{Backing, Names, RenameFlags, Volume};
use firn_sim::{SimBacking, Tree, suite, tree};
use firn_transact::{
    BeginError, Open, OpenError, Opening, TransactionHandle, TransactionalBacking,
};

type Store = TransactionalBacking<SimBacking>;

fn open(disk: &SimBacking) -> Store {
    TransactionalBacking::open(disk.clone()).expect("open").0
}

fn names(names: &[&str]) -> Vec<OsString> {
    names.iter().map(OsString::from).collect()
}

fn begin<'a>(store: &'a Store, tops: &[&str]) -> Open<'a, SimBacking> {
    store
        .begin_names(&store.root(), b"", &names(tops), b"")
        .expect("begin")
}

/// Makes a file with these bytes in the top directory.
fn put(store: &Store, name: &str, bytes: &[u8]) {
    let caller = suite::own_caller();
    let made = store.create(&caller, &store.root(), OsStr::new(name), 0o644);
    let (_, file, _) = made.expect("create");
    let written = store.write_at(&file, &[IoSlice::new(bytes)], 0);
    assert_eq!(written, Ok(bytes.len()));
}

fn rename(store: &Store, from: &str, to: &str) {
    let root = store.root();
    let flags = RenameFlags::empty();
    store
        .rename(&root, OsStr::new(from), &root, OsStr::new(to), flags)
        .expect("rename");
}

fn commit(transaction: &Open<'_, SimBacking>) {
    let decided = transaction.decide_unnumbered().expect("decide");
    decided.apply().expect("apply");
}

fn seen(store: &Store) -> Tree {
    tree(store).expect("tree")
}

fn below(store: &Store) -> Tree {
    let mut found = tree(store.base()).expect("tree");
    found.retain(|path, _| !path.starts_with(b".firn") && !path.is_empty());
    found
}

fn has(tree: &Tree, names: &[&str]) -> Vec<bool> {
    let is_there = |name: &&str| tree.contains_key(name.as_bytes());
    names.iter().map(is_there).collect()
}

#[test]
fn names_in_one_directory_are_committed_and_aborted_each_by_itself() {
    let store = open(&SimBacking::new());
    put(&store, "outside", b"1");
    let first = begin(&store, &["a", "latest"]);
    let second = begin(&store, &["b"]);
    put(&store, "a", b"2");
    put(&store, "b", b"3");
    put(&store, "latest", b"a");
    put(&store, "beside", b"4");
    let all = ["a", "b", "latest", "beside", "outside"];
    assert_eq!(has(&seen(&store), &all), [true; 5]);
    assert_eq!(has(&below(&store), &all), [false, false, false, true, true]);
    commit(&first);
    assert_eq!(has(&below(&store), &all), [true, false, true, true, true]);
    second.abort().expect("abort");
    assert_eq!(has(&seen(&store), &all), [true, false, true, true, true]);
    assert_eq!(store.transactions(), []);
    assert_eq!(seen(&store).len(), below(&store).len() + 1);
}

#[test]
fn a_name_is_in_one_transaction_and_a_rename_stays_in_it() {
    let store = open(&SimBacking::new());
    let first = begin(&store, &["a"]);
    let taken = store.begin_names(&store.root(), b"", &names(&["b", "a"]), b"");
    assert!(matches!(taken, Err(BeginError::Overlaps { .. })));
    let second = begin(&store, &["b"]);
    assert!(first.add_names(&names(&["b"])).is_err());
    put(&store, "a", b"1");
    let root = store.root();
    let moved = store.rename(
        &root,
        OsStr::new("a"),
        &root,
        OsStr::new("b"),
        RenameFlags::empty(),
    );
    assert_eq!(moved, Err(firn_backing::Errno::XDEV));
    first.add_names(&names(&["c"])).expect("add");
    rename(&store, "a", "c");
    commit(&first);
    commit(&second);
    assert_eq!(has(&below(&store), &["a", "b", "c"]), [false, false, true]);
    assert_eq!(below(&store), {
        let mut now = seen(&store);
        now.remove(&b""[..]);
        now
    });
}

#[test]
fn a_directory_comes_and_goes_with_its_transaction() {
    let store = open(&SimBacking::new());
    let caller = suite::own_caller();
    let first = begin(&store, &["dir"]);
    let (dir, _) = store
        .mkdir(&caller, &store.root(), OsStr::new("dir"), 0o755)
        .expect("mkdir");
    store
        .create(&caller, &dir, OsStr::new("file"), 0o644)
        .expect("create");
    let links = store.attr(&store.root()).expect("attr").nlink;
    commit(&first);
    assert_eq!(store.attr(&store.root()).expect("attr").nlink, links);
    assert_eq!(has(&below(&store), &["dir", "dir/file"]), [true, true]);
    let second = begin(&store, &["dir"]);
    let (dir, _) = store
        .lookup(&store.root(), OsStr::new("dir"))
        .expect("lookup");
    store.unlink(&dir, OsStr::new("file")).expect("unlink");
    store
        .rmdir(&store.root(), OsStr::new("dir"))
        .expect("rmdir");
    assert_eq!(has(&below(&store), &["dir", "dir/file"]), [true, true]);
    second.abort().expect("abort");
    assert_eq!(has(&seen(&store), &["dir", "dir/file"]), [true, true]);
}

/// Moves the old file away, writes a new one, and writes a pointer to it, as GROMACS and other programs do.
fn change(store: &Store) -> u64 {
    let transaction = begin(store, &["x"]);
    transaction
        .add_names(&names(&["x.old", "latest"]))
        .expect("add");
    rename(store, "x", "x.old");
    put(store, "x", b"the new one");
    put(store, "latest", b"x");
    transaction.serial()
}

#[test]
fn a_crash_at_any_call_of_a_commit_leaves_the_old_names_or_the_new_ones() {
    for seed in 1..4 {
        for at in 1.. {
            let disk = SimBacking::from_seed(seed);
            let store = open(&disk);
            put(&store, "x", b"the old one");
            disk.sync_all().expect("sync");
            let old = below(&store);
            // Another transaction is open all the time.
            let _open = begin(&store, &["other"]);
            put(&store, "other", b"not complete");
            let serial = change(&store);
            let mut new = seen(&store);
            new.retain(|path, _| !path.is_empty() && path != b"other");
            disk.crash_at(disk.steps() + at);
            let committed = (|| {
                let Some(TransactionHandle::Open(transaction)) = store.transaction_numbered(serial)
                else {
                    return false;
                };
                let decided = transaction.decide_unnumbered();
                decided.is_ok_and(|decided| decided.apply().is_ok())
            })();
            disk.revive();
            disk.power_loss(seed.wrapping_mul(31) + at);
            disk.fsck().expect("fsck");
            let store = open(&disk);
            let now = below(&store);
            let told = format!("seed {seed}, call {at}, {committed}");
            assert!(now == new || (now == old && !committed), "{told}: {now:?}");
            assert_eq!(store.transactions(), [], "{told}");
            if committed {
                println!("seed {seed}: {at} calls");
                break;
            }
        }
    }
}

#[test]
fn a_crash_drops_what_is_pending_below_all_names_of_what_was_not_decided() {
    let disk = SimBacking::from_seed(7);
    let opening = || Opening {
        arena: Some([1; 16]),
        ..Opening::default()
    };
    let opened = TransactionalBacking::open_with::<OpenError>(disk.clone(), opening(), |_| Ok(()));
    let (store, _) = opened.expect("open");
    put(&store, "x", b"old");
    change(&store);
    drop(store);
    disk.power_loss(1);
    disk.fsck().expect("fsck");
    let mut dropped = Vec::new();
    let opened = TransactionalBacking::open_with::<OpenError>(disk, opening(), |scopes| {
        dropped = scopes.to_vec();
        Ok(())
    });
    opened.expect("open");
    dropped.sort();
    let expected: [&[u8]; 3] = [b"latest", b"x", b"x.old"];
    assert_eq!(dropped, expected);
}
