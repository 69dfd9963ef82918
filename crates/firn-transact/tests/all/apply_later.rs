//! Commits that are decided first and applied while programs run: what programs see meanwhile, the transaction that
//! follows, and a crash at every call.

use crate::common;

use std::ffi::OsStr;
use std::io::IoSlice;
use std::sync::atomic::{AtomicBool, Ordering};

use common::Verbs;
use firn_backing::{Access, Backing, DirBacking, Errno, Files, Names, Volume};
use firn_sim::{Fault, Tree, tree};
use firn_sim::{SimBacking, suite};
use firn_transact::{
    BeginError, Stage, StageError, TransactionError, TransactionHandle, TransactionalBacking,
};

fn seen<B: Backing>(backing: &TransactionalBacking<B>) -> Tree {
    tree(backing).expect("tree")
}

/// A transaction before its decision, with the trees before and after it.
struct Middle {
    backing: TransactionalBacking<SimBacking>,
    plain: SimBacking,
    old: Tree,
    new: Tree,
}

fn middle(seed: u64, history: u32) -> Middle {
    let (backing, _) =
        TransactionalBacking::open_with_history(SimBacking::from_seed(seed), history)
            .expect("open");
    let plain = SimBacking::new();
    suite::differential::run(&backing, &plain, seed, 60);
    backing.base().sync_all().expect("sync_all");
    let old = seen(&backing);
    backing.begin(&backing.root(), b"").expect("begin");
    suite::differential::run(&backing, &plain, seed + 1_000_000, 60);
    let new = seen(&backing);
    Middle {
        backing,
        plain,
        old,
        new,
    }
}

fn stages(backing: &TransactionalBacking<SimBacking>) -> Vec<Stage> {
    backing.transactions().iter().map(|one| one.stage).collect()
}

#[test]
fn programs_see_the_new_tree_however_far_the_commit_is_applied() {
    for seed in common::seeds(12, 2000) {
        for at in 1.. {
            let Middle {
                backing,
                plain,
                new,
                ..
            } = middle(seed, (seed % 2) as u32);
            let root = backing.root();
            backing.decide(&root, 5).expect("decide");
            assert_eq!(seen(&backing), new, "seed {seed}: decided");
            let told = format!("seed {seed}, call {at}");
            backing
                .begin(&root, b"")
                .expect("the next one begins at once");
            assert_eq!(stages(&backing), [Stage::Decided(5), Stage::Open], "{told}");
            let disk = backing.base().clone();
            let begun = disk.steps();
            let mut left = 2;
            // The application fails at two calls. Each time the next attempt continues it.
            disk.set_plan(move |_, step| {
                let now = step >= begun + at && left > 0;
                left -= i32::from(now);
                now.then_some(Fault::Error(Errno::NOSPC))
            });
            let result = backing.apply(b"");
            let again = if result.is_err() {
                backing.apply(b"")
            } else {
                Ok(())
            };
            disk.clear_plan();
            if again.is_err() {
                let trouble = backing.transactions()[0]
                    .trouble
                    .clone()
                    .expect("it is told");
                assert!(trouble.contains("space"), "{told}: {trouble}");
            }
            assert_eq!(seen(&backing), new, "{told}: {result:?}");
            backing
                .apply(b"")
                .unwrap_or_else(|error| panic!("{told}: {error}"));
            assert_eq!(
                (seen(&backing), stages(&backing)),
                (new, vec![Stage::Open]),
                "{told}"
            );
            suite::differential::run(&backing, &plain, seed + 2_000_000, 60);
            backing.commit(&root, 6).expect("commit");
            let plain = without_links(plain.tree(), seed);
            assert_eq!(
                without_links(seen(&backing), seed),
                plain,
                "{told}: the next one"
            );
            let again = TransactionalBacking::open(disk.fork()).expect("open").0;
            assert_eq!(
                without_links(seen(&again), seed),
                plain,
                "{told}: in the backing"
            );
            assert_eq!(again.lower.present_commit_id(b""), Ok(Some(6)));
            disk.fsck().expect("fsck");
            if result.is_ok() {
                println!("seed {seed}: {at} calls");
                break;
            }
        }
    }
}

/// With a history, an object that the history keeps has one more link, so link counts are not compared.
fn without_links(mut tree: Tree, seed: u64) -> Tree {
    if seed % 2 == 1 {
        tree.values_mut().for_each(|entry| entry.nlink = 0);
    }
    tree
}

#[test]
fn a_crash_at_any_call_keeps_what_was_decided_and_undoes_what_followed() {
    for seed in common::seeds(12, 2000) {
        for (begins, prepared) in [(false, false), (true, false), (true, true)] {
            for at in 1.. {
                let Middle {
                    backing, old, new, ..
                } = middle(seed, 0);
                let root = backing.root();
                let disk = backing.base().clone();
                disk.crash_at(disk.steps() + at);
                let run = || -> Result<(), TransactionError> {
                    if prepared {
                        backing.prepare(&root, 5)?;
                    }
                    Ok(backing.decide(&root, 5)?)
                };
                let decided = run();
                let then = decided.clone().and_then(|()| {
                    if begins {
                        backing.begin(&root, b"")?;
                    }
                    Ok(backing.apply(b"")?)
                });
                let told =
                    format!("seed {seed}, begins {begins}, call {at}, {decided:?}, {then:?}");
                drop(backing);
                disk.revive();
                disk.power_loss(seed * 31 + at);
                let (backing, outcome) = TransactionalBacking::open(disk.clone())
                    .unwrap_or_else(|e| panic!("{told}: {e}"));
                let now = seen(&backing);
                assert!(
                    now == new || (now == old && decided.is_err()),
                    "{told}: {outcome:?}"
                );
                if outcome.waiting.is_empty() {
                    assert_eq!(backing.transactions(), [], "{told}");
                } else {
                    assert!(decided.is_err() && prepared, "{told}");
                }
                if then.is_ok() {
                    assert_eq!(
                        outcome.undone.len(),
                        usize::from(begins),
                        "{told}: {outcome:?}"
                    );
                    println!("seed {seed}, begins {begins}, prepared {prepared}: {at} calls");
                    break;
                }
            }
        }
    }
}

#[test]
fn the_transaction_that_follows_is_aborted_prepared_or_restored_from() {
    for seed in common::seeds(40, 2000) {
        let Middle {
            backing,
            plain,
            new,
            ..
        } = middle(seed, 0);
        let root = backing.root();
        backing.decide(&root, 5).expect("decide");
        assert_eq!(
            backing.abort(&root),
            Err(StageError::Decided { id: 5 }.into()),
            "seed {seed}"
        );
        backing.begin(&root, b"").expect("begin");
        assert!(
            matches!(backing.begin(&root, b""), Err(BeginError::Overlaps { .. })),
            "seed {seed}"
        );
        backing.abort(&root).expect("the next one is aborted");
        assert_eq!(
            (seen(&backing), stages(&backing)),
            (new.clone(), vec![Stage::Decided(5)]),
            "seed {seed}"
        );
        backing.begin(&root, b"").expect("begin");
        match seed % 3 {
            0 => backing.prepare(&root, 6).expect("prepare"),
            1 => backing.commit(&root, 6).expect("commit"),
            _ => backing.restore(&root, 5).expect("restore"),
        }
        assert_eq!(seen(&backing), new, "seed {seed}");
        if seed % 3 == 0 {
            backing.commit(&root, 6).expect("commit");
        }
        assert_eq!(stages(&backing), [], "seed {seed}");
        suite::differential::run(&backing, &plain, seed + 2_000_000, 60);
        assert_eq!(
            seen(
                &TransactionalBacking::open(backing.base().fork())
                    .expect("open")
                    .0
            ),
            plain.tree(),
            "seed {seed}"
        );
    }
}

#[test]
fn readers_go_on_and_changes_wait_while_a_commit_is_applied() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: the simulated caller is root");
        return;
    }
    rustix::process::umask(rustix::fs::Mode::empty());
    for seed in common::seeds(20, 2000) {
        let dir = tempfile::Builder::new()
            .prefix("firn-transact-")
            .tempdir_in("/dev/shm")
            .expect("tempdir");
        let backing = DirBacking::open(dir.path()).expect("open");
        backing.set_mode(&backing.root(), 0o755).expect("set_mode");
        let (backing, _) = TransactionalBacking::open(backing).expect("open");
        let plain = SimBacking::new();
        let me = suite::own_caller();
        let root = backing.root();
        suite::differential::run(&backing, &plain, seed, 200);
        backing.begin(&root, b"").expect("begin");
        suite::differential::run(&backing, &plain, seed + 1_000_000, 200);
        let new = seen(&backing);
        let (file, _) = backing
            .lookup(&root, OsStr::new("late"))
            .map_or_else(
                |_| {
                    backing
                        .create(&me, &root, OsStr::new("late"), 0o644)
                        .map(|(_, file, attr)| (file, attr))
                },
                |(inode, attr)| Ok((backing.open(&inode, Access::ReadWrite)?, attr)),
            )
            .expect("create");
        let with_late = seen(&backing);
        assert!(with_late.len() > new.len());
        backing.decide(&root, 5).expect("decide");
        backing.begin(&root, b"").expect("begin");
        let done = AtomicBool::new(false);
        std::thread::scope(|threads| {
            let backing = &backing;
            let done = &done;
            let with_late = &with_late;
            let reader = threads.spawn(move || {
                let mut rounds = 0u32;
                loop {
                    let now = seen(backing);
                    // After the commit has ended, the write of the next transaction may be there.
                    let is_decided = backing
                        .transactions()
                        .iter()
                        .any(|one| one.stage == Stage::Decided(5));
                    if !is_decided {
                        if done.load(Ordering::Acquire) {
                            return rounds;
                        }
                        continue;
                    }
                    assert_eq!(&now, with_late, "seed {seed}, round {rounds}");
                    rounds += 1;
                }
            });
            let writer = threads.spawn(move || {
                // This write waits until the application is over.
                backing
                    .write_at(&file, &[IoSlice::new(b"next")], 0)
                    .expect("write");
                backing
                    .transactions()
                    .iter()
                    .map(|one| one.stage)
                    .collect::<Vec<_>>()
            });
            backing.apply(b"").expect("apply");
            assert_eq!(writer.join().expect("join"), [Stage::Open]);
            backing
                .abort(&backing.root())
                .expect("the write is of the next one");
            done.store(true, Ordering::Release);
            println!("seed {seed}: {} rounds", reader.join().expect("join"));
        });
        assert_eq!(seen(&backing), with_late, "seed {seed}");
    }
}

#[test]
fn a_handle_follows_its_transaction_from_its_begin_to_its_end() {
    let backing = TransactionalBacking::open(SimBacking::from_seed(1))
        .expect("open")
        .0;
    let root = backing.root();
    let current = || backing.current_transaction(b"");
    assert!(current().is_none() && backing.first_transaction(b"").is_none());
    let open = backing.begin(&root, b"").expect("begin");
    assert!(matches!(current(), Some(TransactionHandle::Open(_))));
    let prepared = open.prepare(5).expect("prepare");
    assert_eq!(prepared.id(), 5);
    assert!(matches!(current(), Some(TransactionHandle::Prepared(found)) if found.id() == 5));
    let commit = prepared.decide().expect("decide");
    assert!(matches!(current(), Some(TransactionHandle::Decided(found)) if found.id() == 5));
    assert_eq!(open.abort(), Err(StageError::Decided { id: 5 }.into()));
    let next = backing.begin(&root, b"").expect("the next one");
    assert!(
        matches!(backing.first_transaction(b""), Some(TransactionHandle::Decided(found)) if found.id() == 5)
    );
    assert!(matches!(current(), Some(TransactionHandle::Open(_))));
    assert_eq!(backing.open_transactions().len(), 2);
    assert!(backing.current_transaction(b"elsewhere").is_none());
    commit.apply().expect("apply");
    assert_eq!(prepared.abort(), Err(StageError::NoTransaction.into()));
    assert_eq!(commit.apply(), Ok(()), "it is over, and stays so");
    assert!(matches!(
        backing.first_transaction(b""),
        Some(TransactionHandle::Open(_))
    ));
    next.abort().expect("abort");
    assert_eq!(next.abort(), Err(StageError::NoTransaction.into()));
    assert_eq!(
        next.prepare(6).err(),
        Some(StageError::NoTransaction.into())
    );
    assert!(current().is_none() && backing.open_transactions().is_empty());
}

/// When a commit ends, the transaction that follows it takes its place in the list of scopes.
#[test]
fn a_scope_is_never_seen_without_a_transaction_while_one_follows_another() {
    const COMMITS: u64 = 300;
    let backing = TransactionalBacking::open(SimBacking::new())
        .expect("open")
        .0;
    let root = backing.root();
    backing.begin(&root, b"").expect("begin");
    std::thread::scope(|threads| {
        let commits = threads.spawn(|| {
            for id in 1..=COMMITS {
                backing.decide(&root, id).expect("decide");
                backing.begin(&root, b"").expect("the next one");
                backing.apply(b"").expect("apply");
            }
        });
        let mut looks = 0_u64;
        while !commits.is_finished() {
            assert!(backing.current_transaction(b"").is_some());
            assert!(backing.first_transaction(b"").is_some());
            let count = backing.open_transactions().len();
            assert!((1..=2).contains(&count), "{count}");
            looks += 1;
        }
        println!("{looks} looks");
    });
}
