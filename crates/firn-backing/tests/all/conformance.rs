//! Tests that a real directory and the simulated backing both pass the suite, and that they behave alike.
//!
//! The tests of real directories run in `/tmp` and `/dev/shm`. `FIRN_BACKING_DIR` names another directory for them, for
//! example on the file system over which Firn will be mounted.

use std::path::{Path, PathBuf};

use firn_backing::{Access, Backing, DirBacking, Files, Volume};
use firn_sim::{SimBacking, suite};
use tempfile::TempDir;

/// The directories in which real backings are made: the one of `FIRN_BACKING_DIR`, or `/tmp` (a disk) and `/dev/shm` (tmpfs).
fn parent_dirs() -> Vec<PathBuf> {
    match std::env::var_os("FIRN_BACKING_DIR") {
        Some(dir) => vec![dir.into()],
        None => vec!["/tmp".into(), "/dev/shm".into()],
    }
}

/// Returns a new real backing in a directory below `parent`.
fn new_backing(parent: &Path) -> (TempDir, DirBacking) {
    rustix::process::umask(rustix::fs::Mode::empty());
    let dir = tempfile::Builder::new()
        .prefix("firn-backing-")
        .tempdir_in(parent)
        .expect("tempdir");
    let backing = DirBacking::open(dir.path()).expect("open");
    // The simulated root has this mode. With the umask of 0, the directory was made with a wider mode.
    backing.set_mode(&backing.root(), 0o755).expect("set_mode");
    (dir, backing)
}

#[test]
fn the_simulated_backing_conforms() {
    suite::run(SimBacking::new);
}

#[test]
fn a_real_directory_conforms() {
    for parent in &parent_dirs() {
        let kept = std::cell::RefCell::new(Vec::new());
        suite::run(|| {
            let (dir, backing) = new_backing(parent);
            kept.borrow_mut().push(dir);
            backing
        });
    }
}

#[test]
fn locks_exclude_each_other_until_their_file_is_dropped() {
    suite::run_locks(&SimBacking::new());
    for parent in &parent_dirs() {
        let (_dir, backing) = new_backing(parent);
        suite::run_locks(&backing);
    }
}

/// Only the simulated backing is tested here: range locks of a real directory need two processes, so the system tests
/// cover them.
#[test]
fn ranges_that_a_process_has_locked_exclude_others() {
    let first_process = SimBacking::new();
    suite::run_range_locks(&first_process, &first_process.another_process());
}

#[test]
fn the_simulated_backing_does_what_a_real_one_does() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: the simulated caller is root");
        return;
    }
    let first_seed: u64 = std::env::var("FIRN_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(1);
    for seed in first_seed..first_seed + 60 {
        for parent in &parent_dirs() {
            let (_dir, real) = new_backing(parent);
            let sim = SimBacking::new();
            println!("seed {seed} in {}", parent.display());
            suite::differential::run(&real, &sim, seed, 300);
            sim.fsck().expect("fsck");
        }
    }
}

#[test]
fn after_a_power_loss_what_was_synced_is_there() {
    for seed in 0..300 {
        println!("seed {seed}");
        let sim = SimBacking::new();
        suite::differential::run(&sim, &sim.fork(), seed, 150);
        sim.sync_all().expect("sync_all");
        let synced = sim.tree();
        let unchanged = sim.fork();
        unchanged.power_loss(seed);
        assert_eq!(unchanged.tree(), synced);
        suite::differential::run(&sim, &sim.fork(), seed + 1000, 150);
        sim.power_loss(seed);
        sim.fsck().expect("fsck");
    }
}

#[test]
fn an_owner_opens_a_file_whose_mode_denies_it() {
    // A mode denies nothing to root, so this test is only effective if the tests run as another user.
    for parent in &parent_dirs() {
        let (_dir, backing) = new_backing(parent);
        let name = std::ffi::OsStr::new("a");
        let (inode, _, _) = backing
            .create(&suite::own_caller(), &backing.root(), name, 0o040)
            .expect("create");
        for access in [Access::Read, Access::Write, Access::ReadWrite] {
            assert_eq!(
                backing.open(&inode, access).map(|file| file.access()),
                Ok(access)
            );
        }
        assert_eq!(
            backing.attr(&inode).map(|attr| attr.mode & 0o7777),
            Ok(0o040)
        );
    }
}
