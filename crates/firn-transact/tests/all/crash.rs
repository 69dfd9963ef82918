//! A crash at every call of prepare, commit, abort and open. Any subset of the unsynced data is lost. Afterwards the
//! tree is the old one or the new one.

use crate::common;

use common::Verbs;
use firn_backing::{Backing, Volume};
use firn_sim::{SimBacking, suite};
use firn_sim::{Tree, tree};
use firn_transact::{Mode, RecoveryOutcome, StageError, TransactionalBacking};

/// How a round ends its transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Commit,
    PrepareThenCommit,
    Prepare,
    PrepareThenAbort,
    Abort,
}

const ENDS: [End; 5] = [
    End::Commit,
    End::PrepareThenCommit,
    End::Prepare,
    End::PrepareThenAbort,
    End::Abort,
];

const MODES: [Mode; 2] = [Mode::Buffer, Mode::Shadow];

fn seen(backing: &TransactionalBacking<SimBacking>) -> Tree {
    tree(backing).expect("tree")
}

/// A backing during a transaction that was made from a seed, with the trees before and after.
struct Middle {
    mode: Mode,
    backing: TransactionalBacking<SimBacking>,
    old: Tree,
    new: Tree,
}

fn middle(seed: u64, calls: usize, mode: Mode) -> Middle {
    let backing = TransactionalBacking::open(SimBacking::from_seed(seed))
        .expect("open")
        .0
        .in_mode(mode);
    let plain = SimBacking::new();
    suite::differential::run(&backing, &plain, seed, 60);
    backing.base().sync_all().expect("sync_all");
    let old = seen(&backing);
    backing.begin(&backing.root(), b"").expect("begin");
    suite::differential::run(&backing, &plain, seed + 1_000_000, calls);
    let new = seen(&backing);
    Middle {
        mode,
        backing,
        old,
        new,
    }
}

/// Ends a transaction as `how` says. Returns `Ok` if every verb reported success.
fn end(
    backing: &TransactionalBacking<SimBacking>,
    how: End,
) -> Result<(), firn_transact::TransactionError> {
    let root = backing.root();
    if let End::PrepareThenCommit | End::Prepare | End::PrepareThenAbort = how {
        backing.prepare(&root, 5)?;
    }
    match how {
        End::Commit | End::PrepareThenCommit => backing.commit(&root, 5)?,
        End::Abort | End::PrepareThenAbort => backing.abort(&root)?,
        End::Prepare => {}
    }
    Ok(())
}

/// Opens the backing after a crash. If `again` is given, a first attempt crashes at that call, and a second one
/// succeeds.
fn recover(
    disk: &SimBacking,
    seed: u64,
    again: Option<u64>,
) -> (TransactionalBacking<SimBacking>, RecoveryOutcome) {
    let power_fails = |life: u64| {
        disk.revive();
        disk.power_loss(seed.wrapping_mul(31).wrapping_add(life));
        disk.fsck().expect("fsck");
        // The file system comes back with another device number.
        disk.set_device(2 + life + seed % 3);
    };
    power_fails(0);
    if let Some(again) = again {
        disk.crash_at(disk.steps() + again);
        if TransactionalBacking::open(disk.clone()).is_err() {
            assert!(disk.is_dead(), "seed {seed}: only the crash may stop it");
            power_fails(1);
        }
        disk.revive();
    }
    TransactionalBacking::open(disk.clone()).unwrap_or_else(|error| panic!("seed {seed}: {error}"))
}

fn settle(
    backing: &TransactionalBacking<SimBacking>,
    middle: &Middle,
    outcome: &RecoveryOutcome,
    seed: u64,
    told: &str,
) {
    let now = seen(backing);
    let is_old = now == middle.old;
    let is_new = now == middle.new;
    assert!(
        is_old || is_new,
        "{told}: neither old nor new\nold {:?}\nnew {:?}\nnow {now:?}",
        middle.old,
        middle.new
    );
    if outcome.waiting.is_empty() {
        assert_eq!(backing.transactions(), [], "{told}");
        assert_eq!(
            backing.lower.present_commit_id(b""),
            Ok(is_new.then_some(5)),
            "{told}: its number tells it"
        );
        return;
    }
    // A prepared transaction can still be committed or aborted.
    let is_shown = if middle.mode == Mode::Buffer {
        is_old
    } else {
        is_new
    };
    assert_eq!(
        (outcome.waiting.as_slice(), is_shown),
        (&[(5, Vec::new())][..], true),
        "{told}"
    );
    let root = backing.root();
    if seed.is_multiple_of(2) {
        backing.restore(&root, 5).expect("restore");
        assert_eq!(seen(backing), middle.new, "{told}: restored");
    } else {
        backing.abort(&root).expect("abort");
        assert_eq!(seen(backing), middle.old, "{told}: aborted");
    }
}

fn each(count: u64) -> impl Iterator<Item = (u64, Mode)> {
    common::seeds(count, 2000).flat_map(|seed| MODES.map(|mode| (seed, mode)))
}

#[test]
fn a_crash_at_any_call_leaves_the_old_tree_or_the_new_one() {
    for (seed, mode) in each(12) {
        for how in ENDS {
            let whole = middle(seed, 60, mode);
            let begun = whole.backing.base().steps();
            end(&whole.backing, how).expect("without a crash it ends");
            let steps = whole.backing.base().steps() - begun;
            println!("seed {seed}, {mode:?}, {how:?}: {steps} calls");
            for at in 1..=steps + 1 {
                let middle = middle(seed, 60, mode);
                let disk = middle.backing.base().clone();
                disk.crash_at(begun + at);
                let result = end(&middle.backing, how);
                let told =
                    format!("seed {seed}, {mode:?}, {how:?}, call {at} of {steps}, {result:?}");
                let lives = seed + at;
                let (backing, outcome) =
                    recover(&disk, lives, (at % 3 == 0).then_some(1 + lives % 40));
                let now = seen(&backing);
                // A verb that reported success is durable.
                let committed =
                    matches!(how, End::Commit | End::PrepareThenCommit) && result.is_ok();
                assert!(!committed || now == middle.new, "{told}");
                assert!(how != End::Abort || now == middle.old, "{told}");
                let prepared = how == End::Prepare && result.is_ok();
                assert!(
                    !prepared || outcome.waiting == [(5, Vec::new())],
                    "{told}: {outcome:?}"
                );
                // Only a transaction that was prepared may wait for a decision.
                let may_wait = !matches!(how, End::Commit | End::Abort);
                assert!(
                    may_wait || outcome.waiting.is_empty(),
                    "{told}: {outcome:?}"
                );
                settle(&backing, &middle, &outcome, lives, &told);
            }
        }
    }
}

#[test]
fn a_crash_while_a_transaction_is_open_leaves_the_old_tree() {
    for (seed, mode) in each(200) {
        println!("seed {seed}, {mode:?}");
        let middle = middle(seed, 100, mode);
        let disk = middle.backing.base().clone();
        let (backing, outcome) = recover(&disk, seed, None);
        assert!(
            outcome.finished.is_empty() && outcome.waiting.is_empty(),
            "seed {seed}, {mode:?}: {outcome:?}"
        );
        assert_eq!(seen(&backing), middle.old, "seed {seed}, {mode:?}");
    }
}

#[test]
fn a_crash_while_what_was_prepared_is_restored_leaves_the_old_tree_or_the_new_one() {
    for (seed, mode) in each(6) {
        for at in 1.. {
            let middle = middle(seed, 60, mode);
            end(&middle.backing, End::Prepare).expect("prepare");
            let disk = middle.backing.base().clone();
            let (backing, outcome) = recover(&disk, seed + at, None);
            assert_eq!(outcome.waiting, [(5, Vec::new())]);
            disk.crash_at(disk.steps() + at);
            let result = backing.restore(&backing.root(), 5);
            let (backing, outcome) = recover(&disk, seed + at, None);
            assert!(
                result.is_err() || seen(&backing) == middle.new,
                "seed {seed}, {mode:?}, call {at}"
            );
            settle(
                &backing,
                &middle,
                &outcome,
                seed + at,
                &format!("seed {seed}, {mode:?}, call {at}"),
            );
            if result.is_ok() {
                println!("seed {seed}, {mode:?}: {at} calls");
                break;
            }
        }
    }
}

#[test]
fn a_step_that_the_backing_refuses_can_be_repeated() {
    use firn_backing::Errno;
    use firn_sim::Fault;
    for (seed, mode) in each(6) {
        for how in [End::PrepareThenCommit, End::Commit] {
            for at in 1.. {
                let middle = middle(seed, 60, mode);
                let disk = middle.backing.base().clone();
                let begun = disk.steps();
                let mut left = 1;
                disk.set_plan(move |_, step| {
                    let now = step >= begun + at && left > 0;
                    left -= i32::from(now);
                    now.then_some(Fault::Error(Errno::NOSPC))
                });
                let result = end(&middle.backing, how);
                disk.clear_plan();
                let is_over = result.is_ok();
                if !is_over {
                    middle.backing.commit(&middle.backing.root(), 5).unwrap_or_else(|error| {
                        panic!("seed {seed}, {mode:?}, {how:?}, call {at}: after {result:?}: {error}")
                    });
                }
                assert_eq!(
                    seen(&middle.backing),
                    middle.new,
                    "seed {seed}, {mode:?}, {how:?}, call {at}"
                );
                let (backing, _) = recover(&disk, seed, None);
                assert_eq!(
                    seen(&backing),
                    middle.new,
                    "seed {seed}, {mode:?}, {how:?}, call {at}"
                );
                if is_over {
                    break;
                }
            }
        }
    }
}

#[test]
fn regression_a_transaction_whose_abort_failed_half_way_cannot_be_committed() {
    for mode in MODES {
        let middle = middle(1, 60, mode);
        let backing = &middle.backing;
        let root = middle.backing.root();
        // An abort begins with this call. It then drops pending data, and may fail after that.
        backing.refuse(&root).expect("refuse");
        assert_eq!(
            backing.prepare(&root, 5),
            Err(StageError::Undoing.into()),
            "{mode:?}"
        );
        assert_eq!(
            backing.commit(&root, 5),
            Err(StageError::Undoing.into()),
            "{mode:?}"
        );
        backing.abort(&root).expect("abort");
        assert_eq!(seen(backing), middle.old, "{mode:?}");
    }
}
