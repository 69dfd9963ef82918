//! MPI programs that need locks between hosts: shared file pointers, atomic mode and data sieving, of ROMIO and OMPIO, by ranks on two
//! hosts through mounts with `layout=log`.
//!
//! Each rank runs in a mount namespace of its own, where the job's directory is the mount of its host.
//!
//! Needs root, FUSE and Debian's openmpi-bin and libopenmpi-dev.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::PoisonError;

use crate::ONE_JOB;

use firn_tests::preloaded::{compile, source};
use firn_tests::{FirnMount, Sandbox, run};

const HOSTS: usize = 2;
const RANKS: usize = 4;
const OPTIONS: &str = "arena-size=64M,chunk-size=1M,layout=log";

/// What an implementation of MPI-IO in Open MPI does with locks of files.
struct Library {
    /// Of Open MPI's framework `io`.
    component: &'static str,
    verbs: &'static [&'static str],
}

const LIBRARIES: [Library; 2] = [
    Library {
        component: "romio321",
        verbs: &["shared", "ordered", "atomic", "sieved"],
    },
    // Its atomic mode hangs on any file system.
    Library {
        component: "ompio",
        verbs: &["shared", "ordered"],
    },
];

/// Runs the program with one library after the other, each time over a new file.
fn run_all(shared: &Sandbox, dirs: &[PathBuf]) {
    let program = compile("mpicc", "mpi_shared.c", shared.path());
    let common = shared.mkdir("common");
    for library in &LIBRARIES {
        for verb in library.verbs {
            let mut command = Command::new("mpirun");
            shared.environment(&mut command);
            command
                .args(["--allow-run-as-root", "--oversubscribe", "-n"])
                .arg(RANKS.to_string())
                .args(["--mca", "io", library.component])
                .args(["--mca", "fbtl_posix_write_datasieving", "false"])
                // What OMPIO takes where ranks run on several hosts.
                .args(["--mca", "sharedfp", "lockedfile"])
                .arg(source("on_host.sh"))
                .arg(&common)
                .args(dirs)
                .arg("--")
                .arg(&program)
                .arg(verb)
                .arg(common.join(format!("{}-{verb}", library.component)))
                .arg("romio_ds_write=enable");
            let alone = ONE_JOB.lock().unwrap_or_else(PoisonError::into_inner);
            let outcome = run(&mut command).ok();
            drop(alone);
            let agreed = format!("{RANKS} ranks agree");
            assert!(outcome.stdout.contains(&agreed), "{outcome}");
        }
    }
}

#[test]
fn what_mpi_locks_is_right_on_a_plain_directory() {
    let shared = Sandbox::new("mpi-shared-plain");
    let plain = shared.mkdir("plain");
    run_all(&shared, &[plain]);
}

/// Proves S-log-44.
#[test]
fn what_mpi_locks_is_right_on_two_hosts() {
    let shared = Sandbox::new("mpi-shared");
    let hosts: Vec<Sandbox> = (0..HOSTS)
        .map(|at| Sandbox::on_host(&format!("mpi-shared{at}"), &format!("n{at}")))
        .collect();
    let backing = shared.join("backing");
    let mount = |host| FirnMount::over(host, &backing, OPTIONS);
    let mounts: Vec<FirnMount<'_>> = hosts.iter().map(mount).collect();
    let dirs: Vec<PathBuf> = mounts.iter().map(|mount| mount.path().to_owned()).collect();
    run_all(&shared, &dirs);
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
    assert_empty(&backing.join(".firn/locks"));
}

fn assert_empty(dir: &Path) {
    let names = fs::read_dir(dir).expect("list");
    let names: Vec<_> = names
        .map(|entry| entry.expect("entry").file_name())
        .collect();
    assert!(names.is_empty(), "{names:?}");
}
