//! Both backings pass the suite, and agree with each other.
//!
//! `FIRN_BACKING_DIR` names a directory in which the tests of real directories run instead of `/tmp` and `/dev/shm`:
//! one on the file system that Firn shall be put over.

use std::path::{Path, PathBuf};

use firn_backing::{Access, Backing, DirBacking, Files, Volume};
use firn_sim::{SimBacking, suite};
use tempfile::TempDir;

/// Where real directories are made: the one that `FIRN_BACKING_DIR` names, or ext4 (whatever holds `/tmp`) and tmpfs.
fn places() -> Vec<PathBuf> {
    match std::env::var_os("FIRN_BACKING_DIR") {
        Some(dir) => vec![dir.into()],
        None => vec!["/tmp".into(), "/dev/shm".into()],
    }
}

fn fresh(place: &Path) -> (TempDir, DirBacking) {
    rustix::process::umask(rustix::fs::Mode::empty());
    let dir = tempfile::Builder::new()
        .prefix("firn-backing-")
        .tempdir_in(place)
        .expect("tempdir");
    let backing = DirBacking::open(dir.path()).expect("open");
    // As the simulated root has it; the umask of 0 gave the directory more.
    backing.set_mode(&backing.root(), 0o755).expect("set_mode");
    (dir, backing)
}

#[test]
fn the_simulated_backing_conforms() {
    suite::run(SimBacking::new);
}

#[test]
fn a_real_directory_conforms() {
    for place in &places() {
        let kept = std::cell::RefCell::new(Vec::new());
        suite::run(|| {
            let (dir, backing) = fresh(place);
            kept.borrow_mut().push(dir);
            backing
        });
    }
}

#[test]
fn locks_exclude_each_other_until_their_file_is_dropped() {
    suite::run_locks(&SimBacking::new());
    for place in &places() {
        let (_dir, backing) = fresh(place);
        suite::run_locks(&backing);
    }
}

/// A directory's locks of ranges take two processes: the system tests have them.
#[test]
fn ranges_that_a_process_has_locked_exclude_others() {
    let one = SimBacking::new();
    suite::run_range_locks(&one, &one.another_process());
}

#[test]
fn the_simulated_backing_does_what_a_real_one_does() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: the simulated caller is root");
        return;
    }
    let first: u64 = std::env::var("FIRN_SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or(1);
    for seed in first..first + 60 {
        for place in &places() {
            let (_dir, real) = fresh(place);
            let sim = SimBacking::new();
            println!("seed {seed} in {}", place.display());
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
        let quiet = sim.fork();
        quiet.power_loss(seed);
        assert_eq!(quiet.tree(), synced);
        suite::differential::run(&sim, &sim.fork(), seed + 1000, 150);
        sim.power_loss(seed);
        sim.fsck().expect("fsck");
    }
}

#[test]
fn an_owner_opens_a_file_whose_mode_denies_it() {
    // As root the mode never denies; the case counts when the tests run as a user.
    for place in &places() {
        let (_dir, b) = fresh(place);
        let name = std::ffi::OsStr::new("a");
        let made = b
            .create(&suite::own_caller(), &b.root(), name, 0o040)
            .expect("create");
        for access in [Access::Read, Access::Write, Access::ReadWrite] {
            assert_eq!(b.open(&made.0, access).map(|f| f.access()), Ok(access));
        }
        assert_eq!(b.attr(&made.0).map(|a| a.mode & 0o7777), Ok(0o040));
    }
}
