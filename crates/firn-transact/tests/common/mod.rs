//! What tests of several hosts look at.

#![allow(dead_code)] // Not every test uses all of it.

use std::ffi::OsStr;

use firn_backing::sim::{Tree, tree};
use firn_backing::{Backing, SimBacking};

pub fn seen(on: &impl Backing) -> Tree {
    tree(on).expect("tree")
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
