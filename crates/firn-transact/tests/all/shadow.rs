//! Shadow mode: the state that undoes a change is durable before the change, whatever is lost and whatever fails.

use crate::common;

use std::ffi::OsStr;
use std::io::IoSlice;

use common::Verbs;
use firn_backing::{Access, Backing, Errno, Files, Names, RenameFlags, SetTime, Time, Volume};
use firn_sim::{Fault, Tree, tree};
use firn_sim::{SimBacking, suite};
use firn_transact::{LivingTransactions, Mode, Opening, TransactionError, TransactionalBacking};

fn seen(backing: &TransactionalBacking<SimBacking>) -> Tree {
    tree(backing).expect("tree")
}

/// Asserts that two trees are equal. Otherwise panics with the paths that differ and how they differ.
fn assert_same(now: &Tree, old: &Tree, told: &str) {
    let paths: std::collections::BTreeSet<_> = now.keys().chain(old.keys()).collect();
    let differ = paths
        .into_iter()
        .filter(|path| now.get(*path) != old.get(*path));
    let shown = |tree: &Tree, path| {
        tree.get(path).map(|entry| {
            let content = entry
                .content
                .iter()
                .fold(0u64, |sum, &b| sum.wrapping_mul(31).wrapping_add(b.into()));
            format!(
                "{:?} {:o} {:?} {} links, {} bytes {content:x} {:?}",
                entry.kind,
                entry.mode,
                entry.owner,
                entry.nlink,
                entry.content.len(),
                entry.xattrs
            )
        })
    };
    let differ: Vec<_> = differ
        .map(|path| {
            (
                String::from_utf8_lossy(path),
                shown(now, path),
                shown(old, path),
            )
        })
        .collect();
    assert!(differ.is_empty(), "{told}: path, now, before: {differ:#?}");
}

fn open(disk: SimBacking) -> TransactionalBacking<SimBacking> {
    TransactionalBacking::open(disk)
        .expect("open")
        .0
        .in_mode(Mode::Shadow)
}

/// Returns a tree made from `seed`; some of it is not durable.
fn before(seed: u64) -> (TransactionalBacking<SimBacking>, Tree) {
    let backing = open(SimBacking::from_seed(seed));
    suite::differential::run_alone(&backing, seed, 60);
    let old = seen(&backing);
    (backing, old)
}

/// Simulates a power loss, and opens the backing in a new firnd. If `again` is given, a first attempt crashes at that
/// call.
fn power_fails(
    disk: &SimBacking,
    seed: u64,
    again: Option<u64>,
) -> TransactionalBacking<SimBacking> {
    disk.revive();
    disk.power_loss(seed);
    if let Some(again) = again {
        disk.crash_at(disk.steps() + again);
        let opened = TransactionalBacking::open(disk.clone());
        assert!(
            opened.is_ok() || disk.is_dead(),
            "only the crash may stop it"
        );
        drop(opened);
        disk.revive();
        disk.power_loss(seed ^ 0x5555);
    }
    disk.fsck().expect("fsck");
    open(disk.clone())
}

#[test]
fn a_crash_at_any_call_in_a_transaction_leaves_the_tree_before() {
    for seed in common::seeds(10, 2000) {
        for at in 1.. {
            let (backing, old) = before(seed);
            backing.begin(&backing.root(), b"").expect("begin");
            let disk = backing.base().clone();
            disk.crash_at(disk.steps() + at);
            suite::differential::run_alone(&backing, seed + 1_000_000, 60);
            let is_over = !disk.is_dead();
            drop(backing);
            let backing = power_fails(&disk, seed * 31 + at, (at % 3 == 0).then_some(1 + at % 60));
            assert_same(&seen(&backing), &old, &format!("seed {seed}, call {at}"));
            assert_eq!(backing.transactions(), [], "seed {seed}, call {at}");
            if is_over {
                println!("seed {seed}: {at} calls");
                break;
            }
        }
    }
}

/// The process dies, and the next one takes over its open transaction, which has the serial number `serial`.
fn go_on(disk: &SimBacking, serial: u64) -> TransactionalBacking<SimBacking> {
    disk.revive();
    let opening = Opening {
        living: LivingTransactions {
            open: [serial].into(),
            ..LivingTransactions::default()
        },
        ..Opening::default()
    };
    let opened =
        TransactionalBacking::open_with(disk.clone(), opening, |_| Ok::<(), TransactionError>(()));
    let (backing, outcome) = opened.expect("open");
    assert_eq!(outcome.continuing, [serial]);
    assert_eq!(outcome.undone, [] as [Vec<u8>; 0]);
    backing.in_mode(Mode::Shadow)
}

/// How a transaction ends that a second process took over.
#[derive(Clone, Copy, Debug)]
enum End {
    Abort,
    PowerFails,
    Commit,
    PrepareAndCommit,
}

#[test]
fn a_transaction_goes_on_whose_process_dies_at_any_call_and_ends_as_without_that() {
    const ENDS: [End; 4] = [
        End::Abort,
        End::PowerFails,
        End::Commit,
        End::PrepareAndCommit,
    ];
    for seed in common::seeds(8, 1000) {
        for at in 1.. {
            let (backing, old) = before(seed);
            let serial = backing.begin(&backing.root(), b"").expect("begin").serial();
            let disk = backing.base().clone();
            disk.crash_at(disk.steps() + at);
            suite::differential::run_alone(&backing, seed + 1_000_000, 60);
            let is_over = !disk.is_dead();
            drop(backing);
            let backing = go_on(&disk, serial);
            // A second process takes over. The first process dies between two calls.
            suite::differential::run_alone(&backing, seed + 2_000_000, 40);
            drop(backing);
            let mut backing = go_on(&disk, serial);
            suite::differential::run_alone(&backing, seed + 3_000_000, 40);
            let new = seen(&backing);
            let end = ENDS[at as usize % ENDS.len()];
            let told = format!("seed {seed}, call {at}, {end:?}");
            let wanted = match end {
                End::Abort => {
                    backing.abort(&backing.root()).expect(&told);
                    &old
                }
                End::PowerFails => {
                    drop(backing);
                    backing = power_fails(&disk, seed * 31 + at, None);
                    &old
                }
                End::Commit => {
                    backing.commit(&backing.root(), 5).expect(&told);
                    &new
                }
                End::PrepareAndCommit => {
                    backing.prepare(&backing.root(), 5).expect(&told);
                    drop(backing);
                    backing = go_on(&disk, serial);
                    backing.commit(&backing.root(), 5).expect(&told);
                    &new
                }
            };
            assert_same(&seen(&backing), wanted, &told);
            assert_eq!(backing.transactions(), [], "{told}");
            drop(backing);
            let backing = power_fails(&disk, seed + at, None);
            assert_same(&seen(&backing), wanted, &told);
            if is_over {
                println!("seed {seed}: {at} calls");
                break;
            }
        }
    }
}

#[test]
fn a_crash_at_any_call_of_putting_back_is_finished_by_the_next() {
    for seed in common::seeds(6, 2000) {
        for at in 1.. {
            let (backing, old) = before(seed);
            backing.begin(&backing.root(), b"").expect("begin");
            suite::differential::run_alone(&backing, seed + 1_000_000, 100);
            let disk = backing.base().clone();
            drop(backing);
            disk.power_loss(seed * 37 + at);
            disk.crash_at(disk.steps() + at);
            let is_over = TransactionalBacking::open(disk.clone()).is_ok();
            let backing = power_fails(&disk, seed + at, Some(1 + at * 7 % 80));
            assert_same(&seen(&backing), &old, &format!("seed {seed}, call {at}"));
            if is_over {
                println!("seed {seed}: {at} calls");
                break;
            }
        }
    }
}

#[test]
fn what_cannot_be_saved_is_not_changed() {
    for seed in common::seeds(8, 2000) {
        for at in 1.. {
            let (backing, old) = before(seed);
            backing.begin(&backing.root(), b"").expect("begin");
            let disk = backing.base().clone();
            let begun = disk.steps();
            let mut left = 3;
            disk.set_plan(move |_, step| {
                let now = step >= begun + at && left > 0;
                left -= i32::from(now);
                now.then_some(Fault::Error(Errno::NOSPC))
            });
            suite::differential::run_alone(&backing, seed + 1_000_000, 60);
            let is_over = disk.steps() < begun + at;
            disk.clear_plan();
            let crashed = power_fails(&disk.fork(), seed * 41 + at, None);
            assert_same(
                &seen(&crashed),
                &old,
                &format!("seed {seed}, call {at}: after a crash"),
            );
            backing.abort(&backing.root()).expect("abort");
            assert_same(
                &seen(&backing),
                &old,
                &format!("seed {seed}, call {at}: aborted"),
            );
            backing.base().fsck().expect("fsck");
            if is_over {
                println!("seed {seed}: {at} calls");
                break;
            }
        }
    }
}

#[test]
fn after_an_abort_that_failed_only_another_abort_is_allowed() {
    for seed in common::seeds(6, 2000) {
        for at in 1.. {
            let (backing, old) = before(seed);
            backing.begin(&backing.root(), b"").expect("begin");
            suite::differential::run_alone(&backing, seed + 1_000_000, 60);
            let disk = backing.base().clone();
            let begun = disk.steps();
            let mut left = 1;
            disk.set_plan(move |_, step| {
                let now = step >= begun + at && left > 0;
                left -= i32::from(now);
                now.then_some(Fault::Error(Errno::IO))
            });
            let result = backing.abort(&backing.root());
            disk.clear_plan();
            if result.is_err() {
                let made = backing.create(
                    &suite::own_caller(),
                    &backing.root(),
                    OsStr::new("x"),
                    0o600,
                );
                assert!(made.is_err_and(|e| e == Errno::CANCELED));
                assert!(
                    backing.commit(&backing.root(), 1).is_err()
                        && backing.prepare(&backing.root(), 1).is_err()
                );
                backing.abort(&backing.root()).expect("again");
            }
            assert_same(
                &seen(&backing),
                &old,
                &format!("seed {seed}, call {at}: {result:?}"),
            );
            if result.is_ok() {
                break;
            }
        }
    }
}

fn file(backing: &TransactionalBacking<SimBacking>, name: &str, content: &[u8]) {
    let (_, file, _) = backing
        .create(
            &suite::own_caller(),
            &backing.root(),
            OsStr::new(name),
            0o644,
        )
        .expect("create");
    backing
        .write_at(&file, &[IoSlice::new(content)], 0)
        .expect("write");
}

fn write(
    backing: &TransactionalBacking<SimBacking>,
    name: &str,
    content: &[u8],
    at: u64,
) -> Result<usize, Errno> {
    let (inode, _) = backing.lookup(&backing.root(), OsStr::new(name))?;
    backing.write_at(
        &backing.open(&inode, Access::ReadWrite)?,
        &[IoSlice::new(content)],
        at,
    )
}

/// Returns the number of saved old bytes that are not zero.
fn saved_bytes(backing: &TransactionalBacking<SimBacking>) -> usize {
    let below = backing.base().tree();
    let saved = below
        .iter()
        .filter(|(path, _)| path.windows(12).any(|part| part == b"/saved/data-"));
    saved
        .map(|(_, entry)| entry.content.iter().filter(|&&byte| byte != 0).count())
        .sum()
}

#[test]
fn only_bytes_that_change_are_saved() {
    let backing = open(SimBacking::new());
    let old = vec![7; 100_000];
    for name in ["grows", "cut", "written", "new"] {
        file(&backing, name, &old);
    }
    let before = seen(&backing);
    backing.begin(&backing.root(), b"").expect("begin");
    write(&backing, "grows", b"more", 100_000).expect("append");
    assert_eq!(saved_bytes(&backing), 0, "a file that grows");
    let cut = |name: &str, len| {
        let (inode, _) = backing
            .lookup(&backing.root(), OsStr::new(name))
            .expect("lookup");
        backing
            .set_len(&backing.open(&inode, Access::ReadWrite).expect("open"), len)
            .expect("truncate");
    };
    cut("cut", 81_920);
    assert_eq!(saved_bytes(&backing), 100_000 - 81_920, "a tail");
    cut("cut", 40_960);
    write(&backing, "cut", b"again", 50_000).expect("write");
    assert_eq!(
        saved_bytes(&backing),
        100_000 - 40_960,
        "and the rest of it"
    );
    backing
        .unlink(&backing.root(), OsStr::new("new"))
        .expect("unlink");
    file(&backing, "new", &old);
    cut("new", 0);
    assert_eq!(
        saved_bytes(&backing),
        100_000 - 40_960,
        "nothing of a new file, nor of one that is removed"
    );
    write(&backing, "written", b"x", 5000).expect("write");
    assert_eq!(
        saved_bytes(&backing),
        100_000 - 40_960 + 100_000 - 4096,
        "from where it is changed"
    );
    backing.abort(&backing.root()).expect("abort");
    assert_eq!(seen(&backing), before);
}

#[test]
fn times_and_open_files_come_back() {
    let backing = open(SimBacking::new());
    file(&backing, "a", b"old");
    let root = backing.root();
    let (dir, _) = backing
        .mkdir(&suite::own_caller(), &root, OsStr::new("dir"), 0o755)
        .expect("mkdir");
    let (inode, _) = backing.lookup(&root, OsStr::new("a")).expect("lookup");
    let at = |sec| SetTime::At(Time { sec, nsec: 5 });
    backing.set_times(&inode, at(1), at(2)).expect("times");
    backing.set_times(&dir, at(3), at(4)).expect("times");
    let open_file = backing.open(&inode, Access::ReadWrite).expect("open");
    let times = |inode| {
        backing
            .attr(inode)
            .map(|attr| (attr.atime, attr.mtime, attr.nlink))
            .expect("attr")
    };
    let old = [times(&inode), times(&dir)];
    backing.begin(&root, b"").expect("begin");
    backing
        .write_at(&open_file, &[IoSlice::new(b"newer")], 0)
        .expect("write");
    for inode in [&inode, &dir] {
        backing.set_times(inode, at(11), at(12)).expect("times");
        assert_eq!(times(inode).1, Time { sec: 12, nsec: 5 });
    }
    backing.link(&inode, &dir, OsStr::new("b")).expect("link");
    backing.unlink(&root, OsStr::new("a")).expect("unlink");
    backing.unlink(&dir, OsStr::new("b")).expect("unlink");
    assert_eq!(times(&inode).2, 0, "it has no name for programs");
    backing
        .rename(
            &root,
            OsStr::new("dir"),
            &root,
            OsStr::new("moved"),
            RenameFlags::empty(),
        )
        .expect("rename");
    backing.rmdir(&root, OsStr::new("moved")).expect("rmdir");
    assert_eq!(backing.attr(&dir).map(|attr| attr.nlink), Ok(0));
    let made = backing.create(&suite::own_caller(), &dir, OsStr::new("x"), 0o600);
    assert_eq!(
        made.err(),
        Some(Errno::NOENT),
        "nothing is made where there is no directory any more"
    );
    backing
        .write_at(&open_file, &[IoSlice::new(b"still open")], 0)
        .expect("write");
    let (gone, gone_file, _) = backing
        .create(&suite::own_caller(), &root, OsStr::new("new"), 0o600)
        .expect("create");
    backing.abort(&root).expect("abort");
    assert_eq!([times(&inode), times(&dir)], old);
    let mut content = [0; 9];
    assert_eq!(backing.read_at(&open_file, &mut content, 0), Ok(3));
    assert_eq!(&content[..3], b"old");
    assert_eq!(backing.attr(&gone).err(), Some(Errno::STALE));
    assert_eq!(
        backing.write_at(&gone_file, &[IoSlice::new(b"x")], 0).err(),
        Some(Errno::STALE)
    );
}

#[test]
fn scopes_are_undone_on_their_own() {
    for seed in common::seeds(20, 2000) {
        let backing = open(SimBacking::new());
        let root = backing.root();
        let me = suite::own_caller();
        for name in ["one", "two"] {
            backing
                .mkdir(&me, &root, OsStr::new(name), 0o755)
                .expect("mkdir");
        }
        let inode = |name: &str| backing.lookup(&root, OsStr::new(name)).expect("lookup").0;
        for name in ["one", "two"] {
            backing.begin(&inode(name), name.as_bytes()).expect("begin");
            let (_, file, _) = backing
                .create(&me, &inode(name), OsStr::new("f"), 0o644)
                .expect("create");
            backing
                .write_at(&file, &[IoSlice::new(name.as_bytes())], 0)
                .expect("write");
        }
        let renamed = backing.rename(
            &inode("one"),
            OsStr::new("f"),
            &inode("two"),
            OsStr::new("g"),
            RenameFlags::empty(),
        );
        assert_eq!(renamed.err(), Some(Errno::XDEV));
        if seed % 2 == 0 {
            backing.abort(&inode("one")).expect("abort");
            backing.commit(&inode("two"), 1).expect("commit");
        } else {
            backing.commit(&inode("two"), 1).expect("commit");
            let disk = backing.base().clone();
            disk.power_loss(seed);
            let backing = open(disk);
            assert!(backing.lookup(&backing.root(), OsStr::new("two")).is_ok());
            assert_eq!(
                seen(&backing)
                    .keys()
                    .filter(|path| path.ends_with(b"/f"))
                    .count(),
                1,
                "seed {seed}"
            );
            continue;
        }
        let names: Vec<Vec<u8>> = seen(&backing).into_keys().collect();
        assert_eq!(
            names,
            [&b""[..], b"one", b"two", b"two/f"].map(<[u8]>::to_vec),
            "seed {seed}"
        );
    }
}

/// Two hosts in one transaction make random changes in turns. They share one directory of saved states.
fn two_hosts(
    seed: u64,
    crash: Option<u64>,
) -> (SimBacking, TransactionalBacking<SimBacking>, Tree) {
    let (backing, old) = before(seed);
    let disk = backing.base().clone();
    drop(backing);
    let hosts = [open(disk.clone()), open(disk.clone())];
    for inode in &hosts {
        inode.begin(&inode.root(), b"").expect("begin");
    }
    if let Some(at) = crash {
        disk.crash_at(disk.steps() + at);
    }
    for turn in 0..24 {
        suite::differential::run_alone(&hosts[turn % 2], seed + 1_000_000 + turn as u64, 5);
    }
    let [first, _] = hosts;
    (disk, first, old)
}

#[test]
fn what_two_hosts_change_is_saved_once_and_put_back() {
    for seed in common::seeds(60, 2000) {
        let (_, inode, old) = two_hosts(seed, None);
        inode.abort(&inode.root()).expect("abort");
        assert_same(&seen(&inode), &old, &format!("seed {seed}: aborted"));
        inode.base().fsck().expect("fsck");
    }
    for seed in common::seeds(4, 2000) {
        for at in 1.. {
            let (disk, inode, old) = two_hosts(seed, Some(at));
            drop(inode);
            let is_over = !disk.is_dead();
            let backing = power_fails(&disk, seed * 43 + at, None);
            assert_same(&seen(&backing), &old, &format!("seed {seed}, call {at}"));
            if is_over {
                println!("seed {seed}: {at} calls");
                break;
            }
        }
    }
}
