//! The file system of the backing comes back with another device number. The result of a transaction does not change.

use crate::common;
use firn_backing::Volume;

use common::Verbs;
use firn_sim::{SimBacking, suite};
use firn_sim::{Tree, tree};
use firn_transact::{Mode, RestoreError, Stage, TransactionError, TransactionalBacking};

const MODES: [Mode; 2] = [Mode::Buffer, Mode::Shadow];
const SEEDS: std::ops::Range<u64> = 1..30;

/// Returns the tree without link counts: an object that the history keeps has one more link.
fn seen(backing: &TransactionalBacking<SimBacking>) -> Tree {
    let mut tree = tree(backing).expect("tree");
    tree.values_mut().for_each(|entry| entry.nlink = 0);
    tree
}

/// Begins and changes a transaction. Returns the backing, the tree before the transaction and the changed tree.
fn begun(seed: u64, mode: Mode, history: u32) -> (TransactionalBacking<SimBacking>, Tree, Tree) {
    let backing = TransactionalBacking::open_with_history(SimBacking::from_seed(seed), history)
        .expect("open")
        .0
        .in_mode(mode);
    suite::differential::run_alone(&backing, seed, 60);
    let old = seen(&backing);
    backing.begin(&backing.root(), b"").expect("begin");
    suite::differential::run_alone(&backing, seed + 1_000_000, 60);
    let new = seen(&backing);
    (backing, old, new)
}

/// Ends firnd, and opens the backing again, with the device number `device`.
fn come_back(
    backing: TransactionalBacking<SimBacking>,
    device: u64,
    history: u32,
) -> TransactionalBacking<SimBacking> {
    let disk = backing.base().clone();
    drop(backing);
    disk.revive();
    disk.set_device(device);
    TransactionalBacking::open_with_history(disk.clone(), history)
        .unwrap_or_else(|error| panic!("device {device}: {error}"))
        .0
}

/// Proves S-tx-15.
#[test]
fn regression_a_prepared_transaction_is_ended_on_a_device_of_another_number() {
    for (seed, mode) in SEEDS.flat_map(|seed| MODES.map(|mode| (seed, mode))) {
        for commits in [true, false] {
            let told = format!("seed {seed}, {mode:?}, commits: {commits}");
            let (backing, old, new) = begun(seed, mode, 0);
            backing.prepare(&backing.root(), 5).expect("prepare");
            let backing = come_back(backing, 7, 0);
            assert_eq!(
                backing.transactions()[0].stage,
                Stage::Prepared(5),
                "{told}"
            );
            let root = backing.root();
            let ended = if commits {
                backing.commit(&root, 5).map_err(TransactionError::from)
            } else {
                backing.abort(&root).map_err(TransactionError::from)
            };
            ended.unwrap_or_else(|error| panic!("{told}: {error}"));
            let expected = if commits { &new } else { &old };
            assert_eq!(seen(&backing), *expected, "{told}");
            assert_eq!(
                seen(&come_back(backing, 8, 0)),
                *expected,
                "{told}: opened again"
            );
        }
    }
}

/// Proves S-tx-15.
#[test]
fn regression_what_was_decided_or_open_is_ended_on_a_device_of_another_number() {
    for (seed, mode) in SEEDS.flat_map(|seed| MODES.map(|mode| (seed, mode))) {
        for at in (1..).step_by(7) {
            let told = format!("seed {seed}, {mode:?}, call {at}");
            let (backing, old, new) = begun(seed, mode, 0);
            let disk = backing.base().clone();
            disk.crash_at(disk.steps() + at);
            let result = backing.commit(&backing.root(), 5);
            let now = seen(&come_back(backing, 7, 0));
            assert!(
                now == new || (result.is_err() && now == old),
                "{told}: {result:?}"
            );
            if result.is_ok() {
                break;
            }
        }
    }
}

/// Proves S-tx-15.
#[test]
fn regression_a_commit_is_undone_on_a_device_of_another_number() {
    for seed in SEEDS {
        let (backing, _, first) = begun(seed, Mode::Buffer, 2);
        backing.commit(&backing.root(), 1).expect("commit");
        backing.begin(&backing.root(), b"").expect("begin");
        suite::differential::run_alone(&backing, seed + 2_000_000, 60);
        backing.commit(&backing.root(), 2).expect("commit");
        let backing = come_back(backing, 7, 2);
        backing
            .restore(&backing.root(), 1)
            .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        assert_eq!(seen(&backing), first, "seed {seed}");
        assert_eq!(
            backing
                .restore(&backing.root(), 2)
                .err()
                .map(|error| matches!(error, RestoreError::NotKept { .. })),
            Some(true)
        );
        assert_eq!(
            seen(&come_back(backing, 8, 2)),
            first,
            "seed {seed}: opened again"
        );
    }
}
