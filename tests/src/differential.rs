//! The same random operations on two directories of one file system, answer by answer.
//!
//! [`Op`] is drawn without looking at either directory, so that both get the same, errors included;
//! [`Side::perform`] does it on one of them and gives everything a program could see of it.

mod op;
mod side;

pub use op::{Op, draw};
pub use side::{Answer, Side};

use std::path::Path;

use crate::random::generator;
use crate::tree::{assert_same, snapshot};

/// Operations between two comparisons of the whole trees.
const COMPARE_EVERY: u64 = 500;

/// Does `count` operations on both directories; panics where answers or trees differ.
#[track_caller]
pub fn run(seed: u64, count: u64, found: &Path, expected: &Path) {
    run_by(
        seed,
        count,
        found,
        expected,
        &Rules {
            is_wanted: |_| true,
            canonical: |answer| answer,
        },
    );
}

/// Whether ext4, xfs, tmpfs and files in logs all do this: some make holes, and do nothing else to ranges.
pub fn is_known_to_all(op: &Op) -> bool {
    const KEEP_SIZE: u32 = libc::FALLOC_FL_KEEP_SIZE as u32;
    const PUNCH_HOLE: u32 = libc::FALLOC_FL_PUNCH_HOLE as u32;
    match op {
        Op::Allocate { mode, .. } => mode & !(KEEP_SIZE | PUNCH_HOLE) == 0,
        _ => true,
    }
}

/// What is left out of a comparison.
pub struct Rules {
    /// The operations that are done.
    pub is_wanted: fn(&Op) -> bool,
    /// Makes answers equal that mean the same.
    pub canonical: fn(Answer) -> Answer,
}

/// The same by `rules`.
#[track_caller]
pub fn run_by(seed: u64, count: u64, found: &Path, expected: &Path, rules: &Rules) {
    let mut rng = generator(seed);
    let mut under_test = Side::new(found);
    let mut plain = Side::new(expected);
    let mut recent = Vec::new();
    for number in 0..count {
        let op = draw(&mut rng);
        if !(rules.is_wanted)(&op) {
            continue;
        }
        recent.push(format!("{number}: {op:?}"));
        let is = under_test.perform(&op);
        let should = plain.perform(&op);
        let is = (rules.canonical)(is);
        let should = (rules.canonical)(should);
        assert!(
            is == should,
            "seed {seed}: answers differ\n  found    {is:?}\n  expected {should:?}\nthe last operations:\n{}",
            recent[recent.len().saturating_sub(40)..].join("\n")
        );
        if number % COMPARE_EVERY == COMPARE_EVERY - 1 {
            let what = format!(
                "seed {seed}: trees differ after operation {number}, the last ones:\n{}",
                recent[recent.len().saturating_sub(60)..].join("\n")
            );
            assert_same(&what, &snapshot(found), &snapshot(expected));
        }
    }
    drop((under_test, plain));
    assert_same(
        &format!("seed {seed}: trees differ at the end"),
        &snapshot(found),
        &snapshot(expected),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_plain_directories_never_differ() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        for seed in 0..3 {
            let a = dir.path().join(format!("a{seed}"));
            let b = dir.path().join(format!("b{seed}"));
            std::fs::create_dir(&a).expect("mkdir");
            std::fs::create_dir(&b).expect("mkdir");
            run(seed, 2000, &a, &b);
        }
    }

    #[test]
    fn a_difference_is_found() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let a = dir.path().join("a");
        let b = dir.path().join("b");
        std::fs::create_dir_all(a.join("d0")).expect("mkdir");
        std::fs::create_dir(&b).expect("mkdir");
        assert!(std::panic::catch_unwind(|| run(1, 2000, &a, &b)).is_err());
    }
}
