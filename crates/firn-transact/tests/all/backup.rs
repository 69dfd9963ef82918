//! A prepared transaction can be finished from its backup, on another copy of the tree from before the transaction.

use crate::common;

use std::collections::{BTreeSet, HashMap};
use std::ffi::OsStr;
use std::io::IoSlice;
use std::os::unix::ffi::OsStrExt;

use common::Verbs;
use firn_backing::{
    Access, Backing, DirBacking, Errno, Files, Kind, Names, NewKind, SetTime, Volume,
};
use firn_sim::{SimBacking, suite};
use firn_sim::{Tree, tree};
use firn_transact::backup::MANIFEST;
use firn_transact::change_log::ChangeLog;
use firn_transact::{BackupError, PlainBacking, ReviveError, TopMaker, TransactionalBacking};

fn entries<B: Backing>(b: &B, dir: &B::Inode) -> Vec<Vec<u8>> {
    let mut names = Vec::new();
    let mut sink = |entry: firn_backing::DirEntry<'_>| {
        if !matches!(entry.name.as_bytes(), b"." | b"..") {
            names.push(entry.name.as_bytes().to_vec());
        }
        true
    };
    b.read_dir(&b.open_dir(dir).expect("open_dir"), 0, &mut sink)
        .expect("read_dir");
    names
}

/// Copies a tree. An object with several names is one object in the copy too.
fn copy<A: Backing, B: Backing>(from: &A, to: &B) {
    let mut known = HashMap::new();
    copy_dir(from, &from.root(), to, &to.root(), &mut known);
    attributes(from, &from.root(), to, &to.root());
}

fn copy_dir<A: Backing, B: Backing>(
    from: &A,
    dir: &A::Inode,
    to: &B,
    target: &B::Inode,
    known: &mut HashMap<(u64, u64), B::Inode>,
) {
    let me = suite::own_caller();
    for name in entries(from, dir) {
        let name = OsStr::from_bytes(&name);
        let (inode, attr) = from.lookup(dir, name).expect("lookup");
        if name == ".firn" {
            continue;
        }
        if let Some(there) = known.get(&(attr.dev, attr.ino)) {
            to.link(there, target, name).expect("link");
            continue;
        }
        let there = match attr.kind {
            Kind::Dir => to.mkdir(&me, target, name, 0o700).expect("mkdir").0,
            Kind::Symlink => {
                let text = from.readlink(&inode).expect("readlink");
                to.symlink(&me, target, name, OsStr::from_bytes(&text))
                    .expect("symlink")
                    .0
            }
            Kind::File => {
                let (there, file, _) = to.create(&me, target, name, 0o600).expect("create");
                let mut bytes = vec![0; attr.size as usize];
                let open = from.open(&inode, Access::Read).expect("open");
                let count = from.read_at(&open, &mut bytes, 0).expect("read");
                to.set_len(&file, attr.size).expect("set_len");
                to.write_at(&file, &[IoSlice::new(&bytes[..count])], 0)
                    .expect("write");
                there
            }
            _ => {
                let node = NewKind::Node {
                    mode: (attr.mode & libc::S_IFMT) | 0o600,
                    rdev: attr.rdev,
                };
                to.make(&me, target, name, node).expect("mknod").0
            }
        };
        if attr.kind == Kind::Dir {
            copy_dir(from, &inode, to, &there, known);
        }
        attributes(from, &inode, to, &there);
        known.insert((attr.dev, attr.ino), there);
    }
}

fn attributes<A: Backing, B: Backing>(from: &A, inode: &A::Inode, to: &B, there: &B::Inode) {
    let attr = from.attr(inode).expect("attr");
    to.set_owner(there, Some(attr.uid), Some(attr.gid))
        .expect("chown");
    if attr.kind != Kind::Symlink {
        let names = from.list_xattr(inode).unwrap_or_default();
        for name in names
            .split(|&byte| byte == 0)
            .filter(|name| !name.is_empty())
        {
            let name = OsStr::from_bytes(name);
            to.set_xattr(there, name, &from.get_xattr(inode, name).expect("get"), 0)
                .expect("set");
        }
        to.set_mode(there, attr.mode & 0o7777).expect("chmod");
    }
    to.set_times(there, SetTime::At(attr.atime), SetTime::At(attr.mtime))
        .expect("times");
}

/// Returns a copy of a tree whose objects have other inode numbers.
fn elsewhere<B: Backing>(from: &B) -> SimBacking {
    let sim = SimBacking::new();
    for at in 0..7 {
        let name = format!("shift{at}");
        sim.create(&suite::own_caller(), &sim.root(), OsStr::new(&name), 0o600)
            .expect("create");
        sim.unlink(&sim.root(), OsStr::new(&name)).expect("unlink");
    }
    copy(from, &sim);
    sim
}

fn backed<B: Backing>(base: B, store: B) -> TransactionalBacking<B> {
    TransactionalBacking::open(base)
        .expect("open")
        .0
        .backed_up(store, &BTreeSet::new())
        .expect("a backup")
}

/// Returns the directory and the manifest of the only backup in the store.
fn only<B: Backing>(store: &B) -> (B::Inode, ChangeLog) {
    let names = entries(store, &store.root());
    assert_eq!(names.len(), 1, "backups");
    let (dir, _) = store
        .lookup(&store.root(), OsStr::from_bytes(&names[0]))
        .expect("lookup");
    let manifest = TransactionalBacking::manifest(store, &dir)
        .expect("read")
        .expect("a manifest")
        .expect("whole");
    (dir, manifest)
}

fn revived<B: Backing>(base: B, store: &B) -> TransactionalBacking<B> {
    let backing = TransactionalBacking::open(base).expect("open").0;
    let (dir, manifest) = only(store);
    backing
        .revival
        .revive(store, &dir, OsStr::new("it"), &manifest)
        .expect("revive");
    backing
}

fn put<B: Backing>(b: &B, name: &str, bytes: &[u8]) {
    put_in(b, &b.root(), name, bytes);
}

fn put_in<B: Backing>(b: &B, dir: &B::Inode, name: &str, bytes: &[u8]) {
    let file = match b.lookup(dir, OsStr::new(name)) {
        Ok((inode, _)) => b.open(&inode, Access::ReadWrite).expect("open"),
        Err(_) => {
            b.create(&suite::own_caller(), dir, OsStr::new(name), 0o640)
                .expect("create")
                .1
        }
    };
    b.write_at(&file, &[IoSlice::new(bytes)], 0).expect("write");
}

/// Makes random calls in a transaction. Returns the tree before, the tree after, and the backing with the backup.
fn lost<B: Backing>(
    base: B,
    store: B,
    seed: u64,
) -> (SimBacking, SimBacking, TransactionalBacking<B>) {
    let backing = backed(base, store);
    let plain = SimBacking::new();
    suite::differential::run(&backing, &plain, seed, 100);
    let before = elsewhere(&backing);
    backing.begin(&backing.root(), b"").expect("begin");
    for part in 1..4 {
        suite::differential::run(&backing, &plain, seed + part * 1_000_000, 70);
        for _ in 0..seed % 3 {
            backing.backups.back_up_ahead();
        }
    }
    (before, plain, backing)
}

/// Proves S-tx-11, S-tx-57.
#[test]
fn what_was_prepared_is_finished_from_the_backup_on_another_copy_of_the_tree() {
    let mut objects = 0;
    for seed in common::seeds(300, 200) {
        println!("seed {seed}");
        let (before, plain, backing) = lost(SimBacking::new(), SimBacking::new(), seed);
        backing.prepare(&backing.root(), 5).expect("prepare");
        let store = backing.backups.directory().expect("a backup").fork();
        objects += only(&store).1.entries.len();
        drop(backing);
        let old = tree(&PlainBacking::new(before.fork())).expect("tree");

        let inode = revived(before.fork(), &store);
        assert_eq!(tree(&inode), Ok(old.clone()), "seed {seed}: undecided");
        // The next mount decides the outcome.
        let (inode, outcome) = TransactionalBacking::open(inode.base().fork()).expect("open");
        assert_eq!(outcome.waiting, [(5, Vec::new())]);
        let undone = TransactionalBacking::open(inode.base().fork())
            .expect("open")
            .0;
        undone.abort(&undone.root()).expect("abort");
        assert_eq!(tree(&undone), Ok(old), "seed {seed}: aborted");
        inode.commit(&inode.root(), 5).expect("commit");
        assert_eq!(tree(&inode), Ok(plain.tree()), "seed {seed}: committed");
        inode.base().fsck().expect("fsck");
    }
    println!("{objects} objects in all records");
}

#[test]
fn a_prepared_transaction_is_finished_from_the_backup_in_a_real_directory() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: the simulated caller is root");
        return;
    }
    rustix::process::umask(rustix::fs::Mode::empty());
    for seed in common::seeds(15, 200) {
        for (place, other) in [("/tmp", "/dev/shm"), ("/dev/shm", "/tmp")] {
            println!("seed {seed} in {place}");
            let dirs = [place, other, other].map(|place| {
                let dir = tempfile::Builder::new()
                    .prefix("firn-backup-")
                    .tempdir_in(place)
                    .expect("tempdir");
                let backing = DirBacking::open(dir.path()).expect("open");
                backing.set_mode(&backing.root(), 0o755).expect("chmod");
                (dir, backing)
            });
            let [(_a, base), (kept, store), (_b, target)] = dirs;
            let (before, plain, backing) = lost(base, store, seed);
            backing.prepare(&backing.root(), 5).expect("prepare");
            drop(backing);
            copy(&before, &target);
            let store = DirBacking::open(kept.path()).expect("open");
            let inode = revived(target, &store);
            inode.commit(&inode.root(), 5).expect("commit");
            assert_eq!(tree(&inode), Ok(plain.tree()), "seed {seed}: committed");
        }
    }
}

/// Prepares a transaction under the number 5, with a changed file, a renamed one and a new one. Returns a copy of the
/// tree from before, and the backing with the backup.
fn prepared() -> (SimBacking, TransactionalBacking<SimBacking>) {
    let backing = backed(SimBacking::new(), SimBacking::new());
    put(&backing, "changed", b"before");
    put(&backing, "rewritten", &[1; 40_000]);
    put(&backing, "moved", b"moved");
    let before = elsewhere(&backing);
    backing.begin(&backing.root(), b"").expect("begin");
    put(&backing, "changed", b"AFTER");
    put(&backing, "rewritten", &[2; 30_000]);
    put(&backing, "new", b"new");
    let root = backing.root();
    let flags = firn_backing::RenameFlags::empty();
    backing
        .rename(&root, OsStr::new("moved"), &root, OsStr::new("away"), flags)
        .expect("rename");
    backing.prepare(&root, 5).expect("prepare");
    (before, backing)
}

/// Makes the directory `p`, and the scope `p/d` in it if `has_scope`.
fn parent_with_scope<B: Backing>(b: &B, has_scope: bool) {
    let me = suite::own_caller();
    let (parent, _) = b
        .mkdir(&me, &b.root(), OsStr::new("p"), 0o755)
        .expect("mkdir");
    if has_scope {
        let (scope, _) = b
            .mkdir(&me, &parent, OsStr::new("d"), 0o755)
            .expect("mkdir");
        put_in(b, &scope, "file", b"before");
    }
}

/// Changes the scope, renames its top, and makes further changes below the new name.
fn change_and_rename<B: Backing>(b: &B) {
    let parent = b.lookup(&b.root(), OsStr::new("p")).expect("lookup").0;
    let scope = b.lookup(&parent, OsStr::new("d")).expect("lookup").0;
    put_in(b, &scope, "file", b"AFTER!");
    let flags = firn_backing::RenameFlags::empty();
    b.rename(&parent, OsStr::new("d"), &parent, OsStr::new("n"), flags)
        .expect("rename");
    let scope = b.lookup(&parent, OsStr::new("n")).expect("lookup").0;
    put_in(b, &scope, "more", &[3; 20_000]);
}

/// Returns the tree without the entry of the backing's top, whose attributes depend on `.firn`.
fn tree_in(b: &impl Backing) -> Tree {
    let mut all = tree(b).expect("tree");
    all.remove(&b""[..]);
    all
}

/// Proves S-tx-11, S-tx-100, S-tx-102: a new or renamed top of the scope is restored from the backup, too.
#[test]
fn a_new_top_and_a_new_name_of_a_top_are_finished_from_the_backup() {
    let me = suite::own_caller();
    for is_new in [false, true] {
        let backing = backed(SimBacking::new(), SimBacking::new());
        parent_with_scope(&backing, !is_new);
        let before = elsewhere(&backing);
        let plain = before.fork();
        let parent = backing
            .lookup(&backing.root(), OsStr::new("p"))
            .expect("p")
            .0;
        if is_new {
            let maker = TopMaker {
                caller: &me,
                mode: 0o755,
            };
            let begun = backing.begin_created(&parent, b"p/d", maker);
            drop(begun.expect("begin"));
            let parent = plain.lookup(&plain.root(), OsStr::new("p")).expect("p").0;
            plain
                .mkdir(&me, &parent, OsStr::new("d"), 0o755)
                .expect("mkdir");
        } else {
            let scope = backing.lookup(&parent, OsStr::new("d")).expect("d").0;
            drop(backing.begin(&scope, b"p/d").expect("begin"));
        }
        backing.backups.back_up_ahead();
        change_and_rename(&backing);
        backing.backups.back_up_ahead();
        change_and_rename(&plain);
        let top = |backing: &TransactionalBacking<SimBacking>| {
            backing
                .top_overlay
                .top_at_path(b"p/d")
                .expect("a transaction")
        };
        backing.prepare(&top(&backing), 5).expect("prepare");
        let store = backing.backups.directory().expect("a backup").fork();
        drop(backing);
        let old = tree_in(&PlainBacking::new(before.fork()));

        let undecided = revived(before.fork(), &store);
        assert_eq!(tree_in(&undecided), old, "{is_new}: undecided");
        let disk = undecided.base().fork();
        let (dir, manifest) = only(&store);
        let again = undecided
            .revival
            .revive(&store, &dir, OsStr::new("it"), &manifest);
        assert!(
            matches!(again, Err(ReviveError::Overlaps { .. })),
            "{is_new}: {again:?}"
        );
        // The next mount decides the outcome.
        let (undone, outcome) = TransactionalBacking::open(disk.fork()).expect("open");
        assert_eq!(outcome.waiting, [(5, b"p/d".to_vec())], "{is_new}");
        undone.abort(&top(&undone)).expect("abort");
        assert_eq!(tree_in(&undone), old, "{is_new}: aborted");
        let done = TransactionalBacking::open(disk).expect("open").0;
        done.commit(&top(&done), 5).expect("commit");
        assert_eq!(tree_in(&done), tree_in(&plain), "{is_new}: committed");
        done.base().fsck().expect("fsck");
        assert_eq!(
            done.lower.present_commit_id(b"p/n"),
            Ok(Some(5)),
            "{is_new}"
        );
        let again = done
            .revival
            .revive(&store, &dir, OsStr::new("it"), &manifest);
        assert_eq!(again, Err(ReviveError::Applied { id: 5 }), "{is_new}");
    }
}

/// Proves S-tx-12.
#[test]
fn a_backup_is_there_only_while_its_transaction_is_prepared() {
    let (_, backing) = prepared();
    let store = || backing.backups.directory().expect("a backup");
    only(store());
    backing.abort(&backing.root()).expect("abort");
    assert!(entries(store(), &store().root()).is_empty(), "aborted");
    backing.begin(&backing.root(), b"").expect("begin");
    put(&backing, "new", b"new");
    for _ in 0..3 {
        backing.backups.back_up_ahead();
    }
    let names = entries(store(), &store().root());
    let (dir, _) = store()
        .lookup(&store().root(), OsStr::from_bytes(&names[0]))
        .expect("lookup");
    assert_eq!(entries(store(), &dir).len(), 1, "copied ahead");
    assert!(
        TransactionalBacking::manifest(store(), &dir)
            .expect("read")
            .is_none(),
        "and not to be used"
    );
    backing.decide(&backing.root(), 6).expect("decide");
    only(store());
    backing.apply(b"").expect("apply");
    assert!(entries(store(), &store().root()).is_empty(), "carried out");
}

/// Proves S-tx-58.
#[test]
fn a_backup_that_is_torn_or_has_lost_a_piece_is_refused() {
    let (before, backing) = prepared();
    let store = backing.backups.directory().expect("a backup");
    let (dir, manifest) = only(store);
    let old = before.tree();
    let bytes = manifest.encode();
    for len in [0, 10, bytes.len() - 1] {
        let torn = store.fork();
        let (inode, _) = torn.lookup(&dir, OsStr::new(MANIFEST)).expect("manifest");
        torn.set_len(
            &torn.open(&inode, Access::ReadWrite).expect("open"),
            len as u64,
        )
        .expect("cut");
        assert!(
            TransactionalBacking::manifest(&torn, &dir)
                .expect("read")
                .expect("there")
                .is_err(),
            "{len} bytes"
        );
    }
    let pieces: Vec<_> = manifest
        .staged
        .iter()
        .filter_map(|one| one.content.clone())
        .collect();
    assert_eq!(pieces.len(), 2);
    for piece in &pieces {
        let name = OsStr::new(&piece.file);
        for change in 0..3 {
            let bad = store.fork();
            let open = || {
                bad.open(&bad.lookup(&dir, name).expect("piece").0, Access::ReadWrite)
                    .expect("open")
            };
            match change {
                0 => bad.unlink(&dir, name).expect("unlink"),
                1 => bad.set_len(&open(), 1).expect("cut"),
                _ => drop(
                    bad.write_at(&open(), &[IoSlice::new(b"?")], 0)
                        .expect("write"),
                ),
            }
            let target = TransactionalBacking::open(before.fork()).expect("open").0;
            let refused = target
                .revival
                .revive(&bad, &dir, OsStr::new("it"), &manifest)
                .expect_err("must be refused");
            assert_eq!(
                refused,
                ReviveError::Damaged {
                    file: piece.file.clone()
                }
            );
            assert_eq!(tree(&target), Ok(old.clone()));
            assert_eq!(
                TransactionalBacking::open(target.base().fork())
                    .expect("open")
                    .1,
                Default::default()
            );
        }
    }
}

/// Proves S-tx-58.
#[test]
fn a_tree_that_is_not_the_one_before_is_refused() {
    let (before, backing) = prepared();
    let store = backing.backups.directory().expect("a backup");
    let (dir, manifest) = only(store);
    let refused = |change: fn(&SimBacking), word: &str| {
        let other = before.fork();
        change(&other);
        let old = other.tree();
        let target = TransactionalBacking::open(other).expect("open").0;
        let error = target
            .revival
            .revive(store, &dir, OsStr::new("it"), &manifest)
            .expect_err("must be refused")
            .to_string();
        assert!(error.contains(word), "{error}");
        assert_eq!(tree(&target), Ok(old));
    };
    refused(
        |b| b.unlink(&b.root(), OsStr::new("moved")).expect("unlink"),
        "moved: it is not there",
    );
    refused(
        |b| put(b, "changed", b"longer than before"),
        "changed: it has another size",
    );
    refused(|b| put(b, "new", b"x"), "new: the transaction makes it");
    let as_dir = |b: &SimBacking| {
        b.unlink(&b.root(), OsStr::new("moved")).expect("unlink");
        b.mkdir(&suite::own_caller(), &b.root(), OsStr::new("moved"), 0o700)
            .expect("mkdir");
    };
    refused(as_dir, "moved: it is of another kind");

    // A second revival finds the transaction of the first one.
    let target = revived(before.fork(), store);
    let again = target
        .revival
        .revive(store, &dir, OsStr::new("it"), &manifest);
    assert!(
        matches!(again, Err(ReviveError::Overlaps { .. })),
        "{again:?}"
    );
    target.commit(&target.root(), 5).expect("commit");
    let after: Result<Tree, Errno> = tree(&target);
    let late = target
        .revival
        .revive(store, &dir, OsStr::new("it"), &manifest);
    assert_eq!(late, Err(ReviveError::Applied { id: 5 }));
    assert_eq!(tree(&target), after);
    target.begin(&target.root(), b"").expect("begin");
    target.commit(&target.root(), 6).expect("commit");
    let late = target
        .revival
        .revive(store, &dir, OsStr::new("it"), &manifest)
        .expect_err("refused")
        .to_string();
    assert!(late.contains("its last commit is 6"), "{late}");
}

/// Proves S-tx-61: a mount does not remove a backup if nothing else may be left of its transaction.
#[test]
fn a_backup_that_the_backing_does_not_know_is_not_removed() {
    let (before, backing) = prepared();
    let store = backing.backups.directory().expect("a backup").fork();
    let base = backing.base().fork();
    drop(backing);
    let known = TransactionalBacking::known_backups(&base, None).expect("known");
    assert_eq!(known.len(), 1);
    let lost = TransactionalBacking::open(before.fork())
        .expect("open")
        .0
        .backed_up(store.fork(), &BTreeSet::new());
    assert!(matches!(
        lost.err(),
        Some(BackupError::UnknownTransaction { id: 5, .. })
    ));

    let back = TransactionalBacking::open(base)
        .expect("open")
        .0
        .backed_up(store, &known)
        .expect("it waits");
    only(back.backups.directory().expect("a backup"));
    back.commit(&back.root(), 5).expect("commit");
    let store = back.backups.directory().expect("a backup");
    assert!(entries(store, &store.root()).is_empty());

    // A transaction that was prepared without a backup is copied to a backup that is added later.
    let (_, backing) = prepared();
    let base = backing.base().fork();
    let again = TransactionalBacking::open(base)
        .expect("open")
        .0
        .backed_up(SimBacking::new(), &BTreeSet::new())
        .expect("open");
    only(again.backups.directory().expect("a backup"));
}
