//! Real programs, unchanged, on the mount; what they wrote is whole in the backing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use firn_tests::fsops::{assert_same_bytes, read};
use firn_tests::mount::SMALL;
use firn_tests::preloaded::compile;
use firn_tests::random::bytes;
use firn_tests::tree::{assert_same, snapshot};
use firn_tests::{FirnMount, Sandbox, run, wait_until};

/// Source of a program of these tests.
fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("programs")
        .join(name)
}

/// A tree with files of many sizes, links and modes.
fn sample_tree(root: &Path) {
    for dir in ["a/b/c", "empty", "d"] {
        fs::create_dir_all(root.join(dir)).expect("mkdir");
    }
    for (index, len) in [0, 1, 100, 4096, 70_000, 1_500_000].into_iter().enumerate() {
        fs::write(
            root.join(format!("a/b/file{index}")),
            bytes(index as u64, len),
        )
        .expect("write");
    }
    for index in 0..150u64 {
        fs::write(
            root.join(format!("d/small{index}")),
            bytes(index, index as usize * 37),
        )
        .expect("write");
    }
    fs::hard_link(root.join("a/b/file3"), root.join("a/hard")).expect("link");
    std::os::unix::fs::symlink("b/file4", root.join("a/soft")).expect("symlink");
    run(Command::new("touch")
        .args(["-d", "2001-02-03 04:05:06"])
        .arg(root.join("a/b/file2")))
    .ok();
    run(Command::new("chmod")
        .arg("6750")
        .arg(root.join("a/b/file1")))
    .ok();
}

#[test]
fn tar_packs_and_unpacks_a_tree() {
    let sandbox = Sandbox::new("tar");
    sample_tree(&sandbox.mkdir("sample"));
    let mount = FirnMount::new(&sandbox, SMALL);
    let archive = mount.join("sample.tar");
    run(Command::new("tar")
        .arg("-C")
        .arg(sandbox.path())
        .arg("-cf")
        .arg(&archive)
        .arg("sample"))
    .ok();
    run(Command::new("tar")
        .arg("-C")
        .arg(mount.path())
        .arg("-xpf")
        .arg(&archive))
    .ok();
    assert_same(
        "unpacked",
        &snapshot(&mount.join("sample")),
        &snapshot(&sandbox.join("sample")),
    );
    let backing = mount.umount();
    assert_same(
        "in the backing",
        &snapshot(&backing.join("sample")),
        &snapshot(&sandbox.join("sample")),
    );
}

#[test]
fn rsync_copies_updates_and_finds_nothing_to_do() {
    let sandbox = Sandbox::new("rsync");
    let sample = sandbox.mkdir("sample");
    sample_tree(&sample);
    let mount = FirnMount::new(&sandbox, SMALL);
    let from = format!("{}/", sample.display());
    let copy = mount.join("copy");
    let rsync = |extra: &str| {
        run(Command::new("rsync")
            .args(["-aHX", "--checksum", extra, &from])
            .arg(&copy))
        .ok()
    };
    rsync("--delete");
    fs::write(sample.join("a/b/file5"), bytes(99, 1_400_000)).expect("change");
    fs::remove_file(sample.join("d/small7")).expect("remove");
    run(Command::new("rsync")
        .args(["-aHX", "--inplace", "--no-whole-file", "--delete", &from])
        .arg(&copy))
    .ok();
    let nothing = rsync("-i").stdout;
    assert!(nothing.trim().is_empty(), "still different: {nothing}");
    let backing = mount.umount();
    assert_same(
        "in the backing",
        &snapshot(&backing.join("copy")),
        &snapshot(&sample),
    );
}

#[test]
fn git_clones_into_the_mount_commits_and_checks_itself() {
    let sandbox = Sandbox::new("git");
    let origin = sandbox.mkdir("origin");
    sample_tree(&origin);
    let mount = FirnMount::new(&sandbox, SMALL);
    let clone = mount.join("clone");
    let git = |dir: &Path, args: &[&str]| {
        let mut command = Command::new("git");
        sandbox.environment(&mut command);
        command.args(["-c", "user.name=Test", "-c", "user.email=test@example.org"]);
        run(command.arg("-C").arg(dir).args(args)).ok()
    };
    git(&origin, &["init", "-q"]);
    git(&origin, &["add", "."]);
    git(&origin, &["commit", "-qm", "sample"]);
    git(
        sandbox.path(),
        &[
            "clone",
            "-q",
            "--no-local",
            "origin",
            clone.to_str().expect("UTF-8"),
        ],
    );
    assert_eq!(git(&clone, &["status", "--porcelain"]).stdout, "");
    fs::write(clone.join("more"), "text").expect("write");
    git(&clone, &["add", "more"]);
    git(&clone, &["commit", "-qm", "more"]);
    git(&clone, &["gc", "-q"]);
    git(&clone, &["fsck", "--strict"]);
    let backing = mount.umount();
    git(&backing.join("clone"), &["fsck", "--strict"]);
    assert_eq!(
        git(&backing.join("clone"), &["status", "--porcelain"]).stdout,
        ""
    );
}

#[test]
fn sqlite_keeps_its_database_whole_with_journal_and_wal() {
    let sandbox = Sandbox::new("sqlite");
    let mount = FirnMount::new(&sandbox, SMALL);
    for (journal, name) in [("delete", "rollback.db"), ("wal", "wal.db")] {
        let script = format!(
            "pragma journal_mode={journal}; create table t(a integer primary key, b text);
             with recursive n(i) as (select 1 union all select i+1 from n where i<20000)
             insert into t select i, hex(randomblob(20)) from n;
             update t set b='changed' where a%7=0; delete from t where a%11=0; vacuum;
             begin; delete from t; rollback; select count(*) from t; pragma integrity_check;"
        );
        let answer = run(Command::new("sqlite3").arg(mount.join(name)).arg(&script))
            .ok()
            .stdout;
        assert_eq!(answer.lines().collect::<Vec<_>>(), [journal, "18182", "ok"]);
    }
    let backing = mount.umount();
    for name in ["rollback.db", "wal.db"] {
        let check = "select count(*) from t; pragma integrity_check";
        let answer = run(Command::new("sqlite3").arg(backing.join(name)).arg(check))
            .ok()
            .stdout;
        assert_eq!(answer, "18182\nok\n");
    }
}

#[test]
fn dd_of_odd_sizes_arrives_byte_for_byte() {
    let sandbox = Sandbox::new("dd");
    let data = bytes(3, 3_000_017);
    fs::write(sandbox.join("data"), &data).expect("write");
    let mount = FirnMount::new(&sandbox, SMALL);
    for (size, conv) in [
        ("777", "fsync"),
        ("4097", "notrunc"),
        ("65535", "sparse"),
        ("1000003", "fdatasync"),
    ] {
        let target = mount.join(format!("by{size}"));
        let from = format!("if={}", sandbox.join("data").display());
        let to = format!("of={}", target.display());
        let size = format!("bs={size}");
        run(Command::new("dd")
            .args([&from, &to, &size, "status=none"])
            .arg(format!("conv={conv}")))
        .ok();
        assert_same_bytes(&size, &read(&target), &data);
    }
    let backing = mount.umount();
    for size in ["777", "4097", "65535", "1000003"] {
        assert_same_bytes(size, &read(&backing.join(format!("by{size}"))), &data);
    }
}

/// Proves S-write-13.
#[test]
fn regression_io_uring_reads_and_writes_every_byte_and_moves_the_offset() {
    const NO_IO_URING: i32 = 77;
    let sandbox = Sandbox::new("uring");
    let program = compile("cc", "uring.c", sandbox.path());
    let plain = sandbox.join("plain");
    let expected = run(Command::new(&program).arg(&plain));
    if expected.code == NO_IO_URING {
        println!("this machine has no io_uring");
        return;
    }
    let mount = FirnMount::new(&sandbox, SMALL);
    let found = run(Command::new(&program).arg(mount.join("file")));
    assert_eq!((found.code, found.stdout), (0, expected.ok().stdout));
    let data = read(&plain);
    assert_same_bytes("io_uring", &read(&mount.join("file")), &data);
    let backing = mount.umount();
    assert_same_bytes("io_uring, drained", &read(&backing.join("file")), &data);
}

#[test]
fn h5py_datasets_written_grown_and_changed_are_read_back() {
    let sandbox = Sandbox::new("h5py");
    let mount = FirnMount::new(&sandbox, SMALL);
    // Debian's interpreter, whatever PATH says: it is the one that has python3-h5py.
    let python = |verb: &str, file: PathBuf| {
        run(Command::new("/usr/bin/python3")
            .arg(source("datasets.py"))
            .arg(verb)
            .arg(file))
        .ok()
    };
    python("write", mount.join("model.h5"));
    python("check", mount.join("model.h5"));
    python("check", mount.umount().join("model.h5"));
}

/// Proves S-mmap-1.
#[test]
fn numpy_saves_and_maps_arrays() {
    let sandbox = Sandbox::new("numpy");
    let mount = FirnMount::new(&sandbox, SMALL);
    let script =
        "import numpy as np, sys, os; d=sys.argv[1]; a=np.arange(300000.0).reshape(600,500)
np.save(d+'/a.npy', a); np.savez(d+'/b.npz', a=a, b=a.T); m=np.load(d+'/a.npy', mmap_mode='r+')
assert (m==a).all(); m[7]=1; m.flush(); a[7]=1; assert (np.load(d+'/a.npy')==a).all()
assert (np.load(d+'/b.npz')['b'][0]==np.arange(600)*500.0).all()";
    run(Command::new("/usr/bin/python3")
        .args(["-c", script])
        .arg(mount.path()))
    .ok();
    mount.umount();
}

#[test]
fn an_mpi_program_writes_one_file_a_rank() {
    let sandbox = Sandbox::new("mpi");
    let program = sandbox.join("ranks");
    run(Command::new("mpicc")
        .args(["-O1", "-o"])
        .arg(&program)
        .arg(source("ranks.c")))
    .ok();
    let mount = FirnMount::new(&sandbox, SMALL);
    let mut mpirun = Command::new("mpirun");
    mpirun
        .args(["--allow-run-as-root", "--oversubscribe", "-n", "4"])
        .arg(&program);
    let answer = run(mpirun.arg(mount.path()).arg("6")).ok();
    assert!(answer.stdout.contains("4 ranks agree"), "{answer}");
    let backing = mount.umount();
    for rank in 0..4 {
        let len = fs::metadata(backing.join(format!("rank.{rank}")))
            .expect("a rank's file")
            .len();
        assert_eq!(len, 6 << 20);
    }
}

/// LAMMPS on one core; `from` is a restart file.
fn lammps(out: &Path, checkpoints: &Path, from: Option<&Path>) -> Command {
    let mut command = Command::new("lmp");
    command
        .env("OMP_NUM_THREADS", "1")
        .args(["-log", "none", "-screen", "none", "-in"]);
    command
        .arg(source("melt.in"))
        .arg("-var")
        .arg("out")
        .arg(out)
        .arg("-var")
        .arg("ck")
        .arg(checkpoints);
    let fresh = if from.is_none() { "1" } else { "0" };
    command
        .args(["-var", "fresh", fresh, "-var", "from"])
        .arg(from.unwrap_or(Path::new("none")));
    command
}

fn restart_steps(dir: &Path) -> Vec<u64> {
    let step = |name: String| {
        name.strip_prefix("melt.")?
            .strip_suffix(".restart")?
            .parse()
            .ok()
    };
    let names = fs::read_dir(dir)
        .expect("readdir")
        .map(|e| e.expect("entry").file_name());
    let mut steps: Vec<u64> = names
        .filter_map(|name| step(name.into_string().ok()?))
        .collect();
    steps.sort_unstable();
    steps
}

/// Proves S-write-1, S-crash-2.
#[test]
fn lammps_killed_with_firnd_restarts_to_the_same_result() {
    let sandbox = Sandbox::new("lammps");
    let plain = sandbox.mkdir("plain");
    run(&mut lammps(&sandbox.join("uninterrupted"), &plain, None)).ok();

    let mount = FirnMount::new(&sandbox, SMALL);
    let mut job = lammps(&sandbox.join("unused"), mount.path(), None);
    let mut job = job.stdout(Stdio::null()).spawn().expect("start lmp");
    wait_until(
        "some checkpoints are written",
        Duration::from_secs(60),
        || {
            restart_steps(mount.path())
                .last()
                .is_some_and(|step| *step >= 300)
        },
    );
    job.kill().expect("kill -9 of the job");
    job.wait().expect("wait");
    mount.kill();

    let mount = FirnMount::new(&sandbox, SMALL);
    let steps = restart_steps(mount.path());
    // The newest may have been in writing when the job died; the one before was closed.
    let newest_whole = steps[steps.len() - 2];
    assert!(
        (250..1200).contains(&newest_whole),
        "checkpoints: {steps:?}"
    );
    let from = mount.join(format!("melt.{newest_whole}.restart"));
    run(&mut lammps(
        &mount.join("continued"),
        mount.path(),
        Some(&from),
    ))
    .ok();
    let backing = mount.umount();
    assert_same_bytes(
        "positions and velocities after the restart",
        &read(&backing.join("continued")),
        &read(&sandbox.join("uninterrupted")),
    );
}
