//! What several of these tests use.

#![allow(dead_code)] // Not every test uses all of it.

use std::ffi::OsStr;

use firn_backing::sim::{Tree, tree};
use firn_backing::{Backing, SimBacking};

pub fn seen(on: &impl Backing) -> Tree {
    tree(on).expect("tree")
}

/// Seeds of a random test, from `FIRN_SEED` on: `count` of them, or more where `FIRN_OPS` asks for more operations than
/// these have, with `ops_per_seed` each.
pub fn seeds(count: u64, ops_per_seed: u64) -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let first = number("FIRN_SEED").unwrap_or(1);
    let ops = number("FIRN_OPS").unwrap_or(0);
    first..first + count.max(ops / ops_per_seed)
}

/// Names in `.firn/`.
pub fn in_firn(disk: &SimBacking) -> Vec<String> {
    let Ok((firn, _)) = disk.lookup(&disk.root(), OsStr::new(".firn")) else {
        return Vec::new();
    };
    let mut names = Vec::new();
    let dir = disk.open_dir(&firn).expect("open");
    disk.read_dir(&dir, 0, &mut |entry| {
        names.push(entry.name.to_string_lossy().into_owned());
        true
    })
    .expect("list");
    names
}
