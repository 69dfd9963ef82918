//! Older commits are restored, one by one or several at once, and also after crashes.

use crate::common;

use common::Verbs;
use firn_backing::{Backing, Volume};
use firn_sim::{SimBacking, suite};
use firn_sim::{Tree, tree};
use firn_transact::{RestoreError, TransactionalBacking};

const HISTORY: u32 = 3;

fn open(base: SimBacking) -> TransactionalBacking<SimBacking> {
    TransactionalBacking::open_with_history(base, HISTORY)
        .expect("open")
        .0
}

fn seen(backing: &TransactionalBacking<SimBacking>) -> Tree {
    tree(backing).expect("tree")
}

/// Returns the tree without link counts: an object that the history keeps has one more link.
fn without_links(mut tree: Tree) -> Tree {
    tree.values_mut().for_each(|entry| entry.nlink = 0);
    tree
}

/// Commits `commits` transactions, numbered from 1. Returns the tree after each of them; index 0 has the tree before
/// the first.
fn committed(seed: u64, commits: u64) -> (TransactionalBacking<SimBacking>, Vec<Tree>) {
    let backing = open(SimBacking::from_seed(seed));
    random(&backing, seed, 60);
    let mut trees = vec![seen(&backing)];
    for id in 1..=commits {
        backing.begin(&backing.root(), b"").expect("begin");
        random(&backing, seed + id * 1_000_000, 60);
        backing.commit(&backing.root(), id).expect("commit");
        trees.push(seen(&backing));
    }
    (backing, trees)
}

/// Makes random calls. They are not compared with a plain backing, because links of the history change link counts.
fn random(backing: &TransactionalBacking<SimBacking>, seed: u64, count: usize) {
    suite::differential::run_alone(backing, seed, count);
}

#[test]
fn each_commit_that_is_kept_is_restored() {
    for seed in common::seeds(150, 1000) {
        println!("seed {seed}");
        for back in 1..=u64::from(HISTORY) {
            let (backing, trees) = committed(seed, 5);
            assert_eq!(
                backing.history.restorable_commits(b""),
                Ok(vec![5, 4, 3, 2]),
                "seed {seed}"
            );
            // A restore also drops the open transaction.
            if seed % 2 == 0 {
                backing.begin(&backing.root(), b"").expect("begin");
                random(&backing, seed ^ 0xffff, 40);
            }
            backing.restore(&backing.root(), 5 - back).expect("restore");
            let expected = without_links(trees[(5 - back) as usize].clone());
            assert_eq!(
                without_links(seen(&backing)),
                expected,
                "seed {seed}: {back} back"
            );
            let again = open(backing.base().fork());
            assert_eq!(
                without_links(seen(&again)),
                expected,
                "seed {seed}: {back} back, opened again"
            );
            assert_eq!(again.lower.present_commit_id(b""), Ok(Some(5 - back)));
            backing.base().fsck().expect("fsck");
            // New commits are possible after a restore.
            backing.begin(&backing.root(), b"").expect("begin");
            random(&backing, seed ^ 0xaaaa, 40);
            backing.commit(&backing.root(), 9).expect("commit");
            backing.restore(&backing.root(), 5 - back).expect("restore");
            assert_eq!(
                without_links(seen(&backing)),
                expected,
                "seed {seed}: {back} back, twice"
            );
        }
    }
}

#[test]
fn a_restore_of_what_is_not_kept_is_refused_and_changes_nothing() {
    let (backing, trees) = committed(7, 5);
    for id in [0, 1, 6, u64::MAX] {
        let kept = vec![5, 4, 3, 2];
        assert_eq!(
            backing.restore(&backing.root(), id),
            Err(RestoreError::NotKept { wanted: id, kept })
        );
    }
    assert_eq!(seen(&backing), trees[5]);
}

#[test]
fn a_crash_at_any_call_of_a_restore_leaves_one_of_the_commits_and_it_can_be_repeated() {
    for seed in common::seeds(4, 1000) {
        for at in 1.. {
            let (backing, trees) = committed(seed, 4);
            let disk = backing.base().clone();
            disk.crash_at(disk.steps() + at);
            let result = backing.restore(&backing.root(), 2);
            drop(backing);
            disk.revive();
            disk.power_loss(seed * 31 + at);
            disk.fsck().expect("fsck");
            let backing = open(disk.clone());
            let now = backing
                .lower
                .present_commit_id(b"")
                .expect("it answers")
                .expect("a number");
            let expected = without_links(trees[now as usize].clone());
            assert_eq!(
                without_links(seen(&backing)),
                expected,
                "seed {seed}, call {at}: {now}"
            );
            assert!(result.is_err() || now == 2, "seed {seed}, call {at}");
            backing.restore(&backing.root(), 2).expect("again");
            assert_eq!(
                without_links(seen(&backing)),
                without_links(trees[2].clone()),
                "seed {seed}, call {at}"
            );
            if result.is_ok() {
                println!("seed {seed}: {at} calls");
                break;
            }
        }
    }
}

#[test]
fn a_crash_at_any_call_of_a_commit_keeps_the_ones_before() {
    for seed in common::seeds(3, 1000) {
        for at in 1.. {
            let (backing, mut trees) = committed(seed, 3);
            backing.base().sync_all().expect("sync_all");
            backing.begin(&backing.root(), b"").expect("begin");
            random(&backing, seed ^ 0x5555, 60);
            trees.push(seen(&backing));
            let disk = backing.base().clone();
            disk.crash_at(disk.steps() + at);
            let result = backing.commit(&backing.root(), 4);
            drop(backing);
            disk.revive();
            disk.power_loss(seed * 37 + at);
            let backing = open(disk.clone());
            let now = backing
                .lower
                .present_commit_id(b"")
                .expect("it answers")
                .expect("a number");
            let expected = without_links(trees[now as usize].clone());
            assert_eq!(
                without_links(seen(&backing)),
                expected,
                "seed {seed}, call {at}"
            );
            assert!(result.is_err() || now == 4);
            for id in [3, 2, 1] {
                backing.restore(&backing.root(), id).expect("restore");
                let expected = without_links(trees[id as usize].clone());
                assert_eq!(
                    without_links(seen(&backing)),
                    expected,
                    "seed {seed}, call {at}: {id}"
                );
            }
            if result.is_ok() {
                break;
            }
        }
    }
}
