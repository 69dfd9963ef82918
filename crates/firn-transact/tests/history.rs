//! Older commits are brought back, one by one or several at once, also through crashes.

mod common;

use common::Verbs;
use firn_backing::sim::{Tree, tree};
use firn_backing::{Backing, SimBacking, suite};
use firn_transact::{RestoreError, TransactionalBacking};

const HISTORY: u32 = 3;

fn open(base: SimBacking) -> TransactionalBacking<SimBacking> {
    TransactionalBacking::open_with_history(base, HISTORY)
        .expect("open")
        .0
}

fn seen(held: &TransactionalBacking<SimBacking>) -> Tree {
    tree(held).expect("tree")
}

/// Link counts aside: what is kept of an object that has other names is one more of them.
fn without_links(mut tree: Tree) -> Tree {
    tree.values_mut().for_each(|entry| entry.nlink = 0);
    tree
}

/// `commits` transactions with numbers from 1; the trees after each, the one before the first at 0.
fn committed(seed: u64, commits: u64) -> (TransactionalBacking<SimBacking>, Vec<Tree>) {
    let held = open(SimBacking::of_seed(seed));
    random(&held, seed, 60);
    let mut trees = vec![seen(&held)];
    for id in 1..=commits {
        held.begin(&held.root(), b"").expect("begin");
        random(&held, seed + id * 1_000_000, 60);
        held.commit(&held.root(), id).expect("commit");
        trees.push(seen(&held));
    }
    (held, trees)
}

/// Random calls. What is kept holds links, so that counts may differ from a plain backing's.
fn random(held: &TransactionalBacking<SimBacking>, seed: u64, count: usize) {
    suite::differential::run_alone(held, seed, count);
}

#[test]
fn each_commit_that_is_kept_is_restored() {
    for seed in common::seeds(150, 1000) {
        println!("seed {seed}");
        for back in 1..=u64::from(HISTORY) {
            let (held, trees) = committed(seed, 5);
            assert_eq!(held.kept(b""), Ok(vec![5, 4, 3, 2]), "seed {seed}");
            // What is open is thrown away with it.
            if seed % 2 == 0 {
                held.begin(&held.root(), b"").expect("begin");
                random(&held, seed ^ 0xffff, 40);
            }
            held.restore(&held.root(), 5 - back).expect("restore");
            let expected = without_links(trees[(5 - back) as usize].clone());
            assert_eq!(
                without_links(seen(&held)),
                expected,
                "seed {seed}: {back} back"
            );
            let again = open(held.base().fork());
            assert_eq!(
                without_links(seen(&again)),
                expected,
                "seed {seed}: {back} back, opened again"
            );
            assert_eq!(again.committed(b""), Ok(Some(5 - back)));
            held.base().fsck().expect("fsck");
            // And on from there.
            held.begin(&held.root(), b"").expect("begin");
            random(&held, seed ^ 0xaaaa, 40);
            held.commit(&held.root(), 9).expect("commit");
            held.restore(&held.root(), 5 - back).expect("restore");
            assert_eq!(
                without_links(seen(&held)),
                expected,
                "seed {seed}: {back} back, twice"
            );
        }
    }
}

#[test]
fn what_is_not_kept_is_refused_and_nothing_changes() {
    let (held, trees) = committed(7, 5);
    for id in [0, 1, 6, u64::MAX] {
        let kept = vec![5, 4, 3, 2];
        assert_eq!(
            held.restore(&held.root(), id),
            Err(RestoreError::NotKept { wanted: id, kept })
        );
    }
    assert_eq!(seen(&held), trees[5]);
}

#[test]
fn a_crash_at_any_call_of_a_restore_leaves_one_of_the_commits_and_it_can_be_done_again() {
    for seed in common::seeds(4, 1000) {
        for at in 1.. {
            let (held, trees) = committed(seed, 4);
            let disk = held.base().clone();
            disk.crash_at(disk.steps() + at);
            let result = held.restore(&held.root(), 2);
            drop(held);
            disk.revive();
            disk.power_loss(seed * 31 + at);
            disk.fsck().expect("fsck");
            let held = open(disk.clone());
            let now = held.committed(b"").expect("it answers").expect("a number");
            let expected = without_links(trees[now as usize].clone());
            assert_eq!(
                without_links(seen(&held)),
                expected,
                "seed {seed}, call {at}: {now}"
            );
            assert!(result.is_err() || now == 2, "seed {seed}, call {at}");
            held.restore(&held.root(), 2).expect("again");
            assert_eq!(
                without_links(seen(&held)),
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
            let (held, mut trees) = committed(seed, 3);
            held.base().sync_all().expect("sync_all");
            held.begin(&held.root(), b"").expect("begin");
            random(&held, seed ^ 0x5555, 60);
            trees.push(seen(&held));
            let disk = held.base().clone();
            disk.crash_at(disk.steps() + at);
            let result = held.commit(&held.root(), 4);
            drop(held);
            disk.revive();
            disk.power_loss(seed * 37 + at);
            let held = open(disk.clone());
            let now = held.committed(b"").expect("it answers").expect("a number");
            let expected = without_links(trees[now as usize].clone());
            assert_eq!(
                without_links(seen(&held)),
                expected,
                "seed {seed}, call {at}"
            );
            assert!(result.is_err() || now == 4);
            for id in [3, 2, 1] {
                held.restore(&held.root(), id).expect("restore");
                let expected = without_links(trees[id as usize].clone());
                assert_eq!(
                    without_links(seen(&held)),
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
