//! Commits that are decided first and carried out behind programs: what they see meanwhile, what follows, crashes
//! at every call.

mod common;

use std::ffi::OsStr;
use std::io::IoSlice;
use std::sync::atomic::{AtomicBool, Ordering};

use common::Verbs;
use firn_backing::sim::{Fault, Tree, tree};
use firn_backing::{Access, Backing, DirBacking, Errno, SimBacking, suite};
use firn_transact::{
    AbortError, BeginError, Found, PrepareError, Stage, TransactionError, TransactionalBacking,
};

fn seen<B: Backing>(held: &TransactionalBacking<B>) -> Tree {
    tree(held).expect("tree")
}

/// What a transaction is, before it is decided.
struct Middle {
    held: TransactionalBacking<SimBacking>,
    plain: SimBacking,
    old: Tree,
    new: Tree,
}

fn middle(seed: u64, history: u32) -> Middle {
    let (held, _) =
        TransactionalBacking::open_with_history(SimBacking::of_seed(seed), history).expect("open");
    let plain = SimBacking::new();
    suite::differential::run(&held, &plain, seed, 60);
    held.base().sync_all().expect("sync_all");
    let old = seen(&held);
    held.begin(&held.root(), b"").expect("begin");
    suite::differential::run(&held, &plain, seed + 1_000_000, 60);
    let new = seen(&held);
    Middle {
        held,
        plain,
        old,
        new,
    }
}

fn stages(held: &TransactionalBacking<SimBacking>) -> Vec<Stage> {
    held.transactions().iter().map(|one| one.stage).collect()
}

#[test]
fn programs_see_the_tree_after_it_however_far_it_is_carried_out() {
    for seed in common::seeds(12, 2000) {
        for at in 1.. {
            let Middle {
                held, plain, new, ..
            } = middle(seed, (seed % 2) as u32);
            let root = held.root();
            held.decide(&root, 5).expect("decide");
            assert_eq!(seen(&held), new, "seed {seed}: decided");
            let told = format!("seed {seed}, call {at}");
            held.begin(&root, b"").expect("the next one begins at once");
            assert_eq!(stages(&held), [Stage::Decided(5), Stage::Open], "{told}");
            let disk = held.base().clone();
            let begun = disk.steps();
            let mut left = 2;
            // It fails, and goes on where it was, twice.
            disk.set_plan(move |_, step| {
                let now = step >= begun + at && left > 0;
                left -= i32::from(now);
                now.then_some(Fault::Error(Errno::NOSPC))
            });
            let result = held.apply(b"");
            let again = if result.is_err() {
                held.apply(b"")
            } else {
                Ok(())
            };
            disk.clear_plan();
            if again.is_err() {
                let trouble = held.transactions()[0].trouble.clone().expect("it is told");
                assert!(trouble.contains("space"), "{told}: {trouble}");
            }
            assert_eq!(seen(&held), new, "{told}: {result:?}");
            held.apply(b"")
                .unwrap_or_else(|error| panic!("{told}: {error}"));
            assert_eq!(
                (seen(&held), stages(&held)),
                (new, vec![Stage::Open]),
                "{told}"
            );
            suite::differential::run(&held, &plain, seed + 2_000_000, 60);
            held.commit(&root, 6).expect("commit");
            let plain = without_links(plain.tree(), seed);
            assert_eq!(
                without_links(seen(&held), seed),
                plain,
                "{told}: the next one"
            );
            let again = TransactionalBacking::open(disk.fork()).expect("open").0;
            assert_eq!(
                without_links(seen(&again), seed),
                plain,
                "{told}: in the backing"
            );
            assert_eq!(again.committed(b""), Ok(Some(6)));
            disk.fsck().expect("fsck");
            if result.is_ok() {
                println!("seed {seed}: {at} calls");
                break;
            }
        }
    }
}

/// With history, what is kept of an object is one more of its links.
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
                let Middle { held, old, new, .. } = middle(seed, 0);
                let root = held.root();
                let disk = held.base().clone();
                disk.crash_at(disk.steps() + at);
                let run = || -> Result<(), TransactionError> {
                    if prepared {
                        held.prepare(&root, 5)?;
                    }
                    Ok(held.decide(&root, 5)?)
                };
                let decided = run();
                let then = decided.clone().and_then(|()| {
                    if begins {
                        held.begin(&root, b"")?;
                    }
                    Ok(held.apply(b"")?)
                });
                let told =
                    format!("seed {seed}, begins {begins}, call {at}, {decided:?}, {then:?}");
                drop(held);
                disk.revive();
                disk.power_loss(seed * 31 + at);
                let (held, outcome) = TransactionalBacking::open(disk.clone())
                    .unwrap_or_else(|e| panic!("{told}: {e}"));
                let now = seen(&held);
                assert!(
                    now == new || (now == old && decided.is_err()),
                    "{told}: {outcome:?}"
                );
                if outcome.waiting.is_empty() {
                    assert_eq!(held.transactions(), [], "{told}");
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
fn the_next_one_is_aborted_or_prepared_or_restored_from() {
    for seed in common::seeds(40, 2000) {
        let Middle {
            held, plain, new, ..
        } = middle(seed, 0);
        let root = held.root();
        held.decide(&root, 5).expect("decide");
        assert_eq!(
            held.abort(&root),
            Err(AbortError::Decided { id: 5 }),
            "seed {seed}"
        );
        held.begin(&root, b"").expect("begin");
        assert!(
            matches!(held.begin(&root, b""), Err(BeginError::Overlaps { .. })),
            "seed {seed}"
        );
        held.abort(&root).expect("the next one is aborted");
        assert_eq!(
            (seen(&held), stages(&held)),
            (new.clone(), vec![Stage::Decided(5)]),
            "seed {seed}"
        );
        held.begin(&root, b"").expect("begin");
        match seed % 3 {
            0 => held.prepare(&root, 6).expect("prepare"),
            1 => held.commit(&root, 6).expect("commit"),
            _ => held.restore(&root, 5).expect("restore"),
        }
        assert_eq!(seen(&held), new, "seed {seed}");
        if seed % 3 == 0 {
            held.commit(&root, 6).expect("commit");
        }
        assert_eq!(stages(&held), [], "seed {seed}");
        suite::differential::run(&held, &plain, seed + 2_000_000, 60);
        assert_eq!(
            seen(
                &TransactionalBacking::open(held.base().fork())
                    .expect("open")
                    .0
            ),
            plain.tree(),
            "seed {seed}"
        );
    }
}

#[test]
fn readers_go_on_and_changes_wait_while_it_is_carried_out() {
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
        let (held, _) = TransactionalBacking::open(backing).expect("open");
        let plain = SimBacking::new();
        let me = suite::own_caller();
        let root = held.root();
        suite::differential::run(&held, &plain, seed, 200);
        held.begin(&root, b"").expect("begin");
        suite::differential::run(&held, &plain, seed + 1_000_000, 200);
        let new = seen(&held);
        let (file, _) = held
            .lookup(&root, OsStr::new("late"))
            .map_or_else(
                |_| {
                    held.create(&me, &root, OsStr::new("late"), 0o644)
                        .map(|(_, file, attr)| (file, attr))
                },
                |(inode, attr)| Ok((held.open(&inode, Access::ReadWrite)?, attr)),
            )
            .expect("create");
        let with_late = seen(&held);
        assert!(with_late.len() > new.len());
        held.decide(&root, 5).expect("decide");
        held.begin(&root, b"").expect("begin");
        let done = AtomicBool::new(false);
        std::thread::scope(|threads| {
            let held = &held;
            let done = &done;
            let with_late = &with_late;
            let reader = threads.spawn(move || {
                let mut rounds = 0u32;
                loop {
                    let now = seen(held);
                    // Later the write of the next one may be there.
                    let is_decided = held
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
                // It waits until that is over.
                held.write_at(&file, &[IoSlice::new(b"next")], 0)
                    .expect("write");
                held.transactions()
                    .iter()
                    .map(|one| one.stage)
                    .collect::<Vec<_>>()
            });
            held.apply(b"").expect("carry_out");
            assert_eq!(writer.join().expect("join"), [Stage::Open]);
            held.abort(&held.root())
                .expect("the write is of the next one");
            done.store(true, Ordering::Release);
            println!("seed {seed}: {} rounds", reader.join().expect("join"));
        });
        assert_eq!(seen(&held), with_late, "seed {seed}");
    }
}

#[test]
fn a_handle_follows_its_transaction_from_its_begin_to_its_end() {
    let held = TransactionalBacking::open(SimBacking::of_seed(1))
        .expect("open")
        .0;
    let root = held.root();
    let current = || held.current_transaction(b"");
    assert!(current().is_none() && held.first_transaction(b"").is_none());
    let open = held.begin(&root, b"").expect("begin");
    assert!(matches!(current(), Some(Found::Open(_))));
    let prepared = open.prepare(5).expect("prepare");
    assert_eq!(prepared.id(), 5);
    assert!(matches!(current(), Some(Found::Prepared(found)) if found.id() == 5));
    let commit = prepared.decide().expect("decide");
    assert!(matches!(current(), Some(Found::Decided(found)) if found.id() == 5));
    assert_eq!(open.abort(), Err(AbortError::Decided { id: 5 }));
    let next = held.begin(&root, b"").expect("the next one");
    assert!(matches!(held.first_transaction(b""), Some(Found::Decided(found)) if found.id() == 5));
    assert!(matches!(current(), Some(Found::Open(_))));
    assert_eq!(held.open_transactions().len(), 2);
    assert!(held.current_transaction(b"elsewhere").is_none());
    commit.apply().expect("apply");
    assert_eq!(prepared.abort(), Err(AbortError::NoTransaction));
    assert_eq!(commit.apply(), Ok(()), "it is over, and stays so");
    assert!(matches!(held.first_transaction(b""), Some(Found::Open(_))));
    next.abort().expect("abort");
    assert_eq!(next.abort(), Err(AbortError::NoTransaction));
    assert_eq!(next.prepare(6).err(), Some(PrepareError::NoTransaction));
    assert!(current().is_none() && held.open_transactions().is_empty());
}

/// The transaction that follows a commit goes from it to the list of scopes when the commit ends.
#[test]
fn a_scope_is_never_seen_without_a_transaction_while_one_follows_another() {
    const COMMITS: u64 = 300;
    let held = TransactionalBacking::open(SimBacking::new())
        .expect("open")
        .0;
    let root = held.root();
    held.begin(&root, b"").expect("begin");
    std::thread::scope(|threads| {
        let commits = threads.spawn(|| {
            for id in 1..=COMMITS {
                held.decide(&root, id).expect("decide");
                held.begin(&root, b"").expect("the next one");
                held.apply(b"").expect("carry out");
            }
        });
        let mut looks = 0_u64;
        while !commits.is_finished() {
            assert!(held.current_transaction(b"").is_some());
            assert!(held.first_transaction(b"").is_some());
            let count = held.open_transactions().len();
            assert!((1..=2).contains(&count), "{count}");
            looks += 1;
        }
        println!("{looks} looks");
    });
}
