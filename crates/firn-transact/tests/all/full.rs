//! Transactions on a full backing: an abort needs no space, and a commit that finds no space loses nothing.

use std::ffi::OsStr;
use std::io::IoSlice;

use common::{Verbs, seen};
use firn_backing::{Access, Backing, Errno, Files, Names, Volume};
use firn_sim::{SimBacking, suite};
use firn_transact::{Mode, TransactionError, TransactionalBacking};

use crate::common;

const PAGE_BYTES: u64 = 4096;
const PAGE: [u8; PAGE_BYTES as usize] = [7; PAGE_BYTES as usize];

/// Makes a file of `pages` pages.
fn make(backing: &TransactionalBacking<SimBacking>, name: &str, pages: u64) {
    let (_, file, _) = backing
        .create(
            &suite::own_caller(),
            &backing.root(),
            OsStr::new(name),
            0o600,
        )
        .expect("create");
    for at in 0..pages {
        backing
            .write_at(&file, &[IoSlice::new(&PAGE)], at * PAGE_BYTES)
            .expect("write");
    }
}

fn open(
    backing: &TransactionalBacking<SimBacking>,
    name: &str,
) -> <TransactionalBacking<SimBacking> as Volume>::File {
    let (inode, _) = backing
        .lookup(&backing.root(), OsStr::new(name))
        .expect("look up");
    backing.open(&inode, Access::ReadWrite).expect("open")
}

/// Truncates an existing file, and fills all space with another existing file.
fn fill(backing: &TransactionalBacking<SimBacking>) {
    backing.set_len(&open(backing, "cut"), 0).expect("cut");
    let filler = open(backing, "filler");
    for at in 0.. {
        match backing.write_at(&filler, &[IoSlice::new(&PAGE)], at * PAGE_BYTES) {
            Ok(_) => {}
            Err(errno) => return assert_eq!(errno, Errno::NOSPC),
        }
    }
}

/// Proves S-tx-16.
#[test]
fn an_abort_needs_no_room_and_a_commit_that_finds_none_can_be_repeated() {
    let mut refused = 0;
    let mut aborted = 0;
    for (seed, mode) in (1..200).flat_map(|seed| [(seed, Mode::Buffer), (seed, Mode::Shadow)]) {
        let disk = SimBacking::from_seed(seed);
        let backing = TransactionalBacking::open(disk.clone())
            .expect("open")
            .0
            .in_mode(mode);
        let root = backing.root();
        suite::differential::run_alone(&backing, seed, 60);
        make(&backing, "cut", 40);
        make(&backing, "filler", 1);
        let old = seen(&backing);
        backing.begin(&root, b"").expect("begin");
        // Leaves space for Firn's own names, and for some of the data that programs write.
        let used: u64 = old
            .values()
            .map(|entry| entry.content.len() as u64 + PAGE_BYTES)
            .sum();
        disk.set_capacity(Some(used + 128 * PAGE_BYTES));
        suite::differential::run_alone(&backing, seed + 1_000_000, 60);
        fill(&backing);
        let new = seen(&backing);
        let told = format!("seed {seed}, {mode:?}");
        if seed.is_multiple_of(2) {
            backing
                .abort(&root)
                .unwrap_or_else(|error| panic!("{told}: {error}"));
            assert!(seen(&backing) == old, "{told}: aborted");
            aborted += 1;
            continue;
        }
        match backing.commit(&root, 1) {
            Ok(()) => {}
            Err(error) => {
                let error = TransactionError::from(error);
                assert_eq!(error.backing_errno(), Some(Errno::NOSPC), "{told}");
                assert!(seen(&backing) == new, "{told}: nothing is lost");
                refused += 1;
                disk.set_capacity(None);
                backing
                    .commit(&root, 1)
                    .unwrap_or_else(|error| panic!("{told}: with room: {error}"));
            }
        }
        assert!(seen(&backing) == new, "{told}: committed");
        assert!(
            seen(&TransactionalBacking::open(disk.clone()).expect("open").0) == new,
            "{told}: in the backing"
        );
    }
    println!("{aborted} aborted, {refused} commits refused at first");
    assert!(aborted > 0 && refused > 0);
}
