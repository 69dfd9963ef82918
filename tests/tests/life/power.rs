//! What "durable" says over a file system that syncfs(2) does not reach: a FUSE server loses its power right after
//! the answer, and with it, of all that was not synced, any subset.
//!
//! `FIRN_SEED` chooses the subsets.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use firn_tests::fsops::open_rw;
use firn_tests::powerfs::PowerFs;
use firn_tests::random::bytes;
use firn_tests::transaction::firn_with as firn;
use firn_tests::{FirnMount, Sandbox, seed};

const COMMIT: &str = "arena-size=32M,chunk-size=1M,drain=commit";
const SHADOW: &str = "arena-size=32M,chunk-size=1M,drain=commit,mode=shadow";

/// A record of a transaction knows objects by device and inode number, and the kernel gives a FUSE mount the lowest
/// number that is free: one server at a time comes back with the one that it had.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Firn over a server, which a test cuts off.
struct Machine {
    server: PowerFs,
    sandbox: Sandbox,
    seed: u64,
    _alone: MutexGuard<'static, ()>,
}

impl Machine {
    fn new(name: &str) -> Self {
        let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let sandbox = Sandbox::new(name);
        let server = PowerFs::new(&sandbox, "server");
        Self {
            _alone: alone,
            sandbox,
            server,
            seed: seed(name),
        }
    }

    fn mount(&self, options: &str) -> FirnMount<'_> {
        FirnMount::over(&self.sandbox, self.server.path(), options)
    }

    /// The host and the server lose their power. `mount` ends with it.
    fn cut(&mut self) {
        for arena in self.sandbox.arenas() {
            fs::remove_file(arena).expect("remove the arena, which is memory");
        }
        self.seed += 1;
        self.server.cut(self.seed);
    }
}

/// Files, new directories, a rename, a link and a removal.
fn change(dir: &Path, round: u64) {
    for at in 0..20 {
        fs::write(
            dir.join(format!("file{at}")),
            bytes(round * 100 + at, 5000 + at as usize),
        )
        .expect("write");
    }
    let sub = dir.join(format!("dir{round}"));
    fs::create_dir(&sub).expect("mkdir");
    for at in 0..10 {
        fs::write(
            sub.join(format!("inner{at}")),
            bytes(round * 1000 + at, 3000),
        )
        .expect("write");
    }
    fs::rename(sub.join("inner0"), dir.join(format!("moved{round}"))).expect("rename");
    fs::hard_link(sub.join("inner1"), sub.join("linked")).expect("link");
    fs::remove_file(sub.join("inner2")).expect("unlink");
    open_rw(&sub.join("inner3")).set_len(100).expect("truncate");
}

/// The control: without a sync the server does lose.
fn must_lose(machine: &mut Machine) {
    let mount = machine.mount("");
    change(mount.path(), 1);
    mount.wait("drained", mount.path()).ok();
    let before = contents(mount.path());
    mount.kill();
    machine.cut();
    assert_ne!(
        contents(machine.server.path()),
        before,
        "the server loses nothing, so the test shows nothing"
    );
}

/// Proves S-fsync-1, S-fsync-2, S-fsync-5.
#[test]
fn regression_what_is_durable_survives_the_power_of_a_fuse_server() {
    must_lose(&mut Machine::new("powercontrol"));
    for options in ["", "close=held", "drain=demand", "drain=commit"] {
        let options = &format!(
            "arena-size=32M,chunk-size=1M{}{options}",
            if options.is_empty() { "" } else { "," }
        );
        for what in ["mount", "directory", "file", "fsync", "fdatasync"] {
            println!("{options}: {what}");
            let mut machine = Machine::new("powerwait");
            let mount = machine.mount(options);
            change(mount.path(), 1);
            let wait = |path: &Path| mount.wait("durable", path).ok();
            let kept = match what {
                "mount" => {
                    drop(wait(mount.path()));
                    ""
                }
                "directory" => {
                    drop(wait(&mount.join("dir1")));
                    "dir1"
                }
                "file" => {
                    drop(wait(&mount.join("dir1/inner4")));
                    "dir1/inner4"
                }
                _ => {
                    let file = open_rw(&mount.join("dir1/inner4"));
                    file.write_all_at(b"more", 3000).expect("write");
                    let synced = if what == "fsync" {
                        file.sync_all()
                    } else {
                        file.sync_data()
                    };
                    synced.expect("fsync");
                    "dir1/inner4"
                }
            };
            let before = contents(&mount.join(kept));
            mount.kill();
            machine.cut();
            assert_eq!(
                contents(&machine.server.path().join(kept)),
                before,
                "{options}: {what}"
            );
        }
    }
}

/// Names and bytes at or below a path, without Firn's own.
fn contents(path: &Path) -> Vec<(std::path::PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    let mut todo = vec![path.to_owned()];
    while let Some(at) = todo.pop() {
        let name = at.strip_prefix(path).expect("below").to_owned();
        if at.is_dir() {
            found.push((name, Vec::new()));
            let entries = fs::read_dir(&at)
                .expect("list")
                .map(|entry| entry.expect("entry").path());
            todo.extend(entries.filter(|path| !path.ends_with(".firn")));
        } else {
            found.push((name, fs::read(&at).expect("read")));
        }
    }
    found.sort();
    found
}

/// Proves S-fsync-5, S-fsync-7: what an earlier firnd drained, and did not sync.
#[test]
fn regression_a_wait_covers_what_a_killed_firnd_drained() {
    let mut machine = Machine::new("powerearlier");
    let mount = machine.mount("");
    change(mount.path(), 1);
    mount.wait("drained", mount.path()).ok();
    mount.kill();
    let mount = machine.mount("");
    mount.wait("durable", mount.path()).ok();
    let before = contents(mount.path());
    mount.kill();
    machine.cut();
    assert_eq!(contents(machine.server.path()), before);
}

/// Proves S-tx-2, S-tx-22, S-tx-41.
#[test]
fn regression_a_commit_survives_the_power_of_a_fuse_server() {
    for options in [COMMIT, SHADOW] {
        for history in [false, true] {
            if history && options == SHADOW {
                continue;
            }
            let options = &format!("{options}{}", if history { ",history=2" } else { "" });
            let mut machine = Machine::new("powercommit");
            for (round, more) in [
                (1, &["--id", "1"][..]),
                (2, &["--id", "2"]),
                (3, &["--id", "3", "--async"]),
            ] {
                println!("{options}: {more:?}");
                let mount = machine.mount(options);
                firn(&machine.sandbox, "begin", mount.path(), &[]).ok();
                change(mount.path(), round);
                let before = contents(mount.path());
                firn(&machine.sandbox, "commit", mount.path(), more).ok();
                mount.kill();
                machine.cut();
                let mount = machine.mount(options);
                assert_eq!(contents(mount.path()), before, "{options}: {more:?}");
                mount.umount();
                assert_eq!(
                    contents(machine.server.path()),
                    before,
                    "{options}: {more:?}"
                );
            }
        }
    }
}

/// Proves S-tx-3, S-tx-4, S-tx-21, S-tx-23, S-tx-46, S-tx-74.
#[test]
fn regression_a_prepare_survives_the_power_of_a_fuse_server() {
    for options in [COMMIT, SHADOW] {
        for end in ["commit", "abort", "open"] {
            println!("{options}: {end}");
            let mut machine = Machine::new("powerprepare");
            let mount = machine.mount(options);
            change(mount.path(), 1);
            mount.wait("durable", mount.path()).ok();
            let old = contents(mount.path());
            firn(&machine.sandbox, "begin", mount.path(), &[]).ok();
            change(mount.path(), 2);
            let new = contents(mount.path());
            if end != "open" {
                firn(&machine.sandbox, "prepare", mount.path(), &["--id", "7"]).ok();
            }
            mount.kill();
            machine.cut();
            let mount = machine.mount(options);
            if end != "open" {
                let id: &[&str] = if end == "commit" { &["--id", "7"] } else { &[] };
                firn(&machine.sandbox, end, mount.path(), id).ok();
            }
            mount.kill();
            machine.cut();
            let mount = machine.mount(options);
            assert_eq!(
                contents(mount.path()) == new,
                end == "commit",
                "{options}: {end}"
            );
            assert_eq!(
                contents(mount.path()) == old,
                end != "commit",
                "{options}: {end}"
            );
        }
    }
}

/// Proves S-tx-11, S-tx-57.
#[test]
fn regression_a_backup_survives_the_power_of_a_fuse_server() {
    let mut machine = Machine::new("powerbackup");
    let source = machine.sandbox.mkdir("source");
    let options = format!("{COMMIT},backup={}", machine.server.path().display());
    let mount = FirnMount::over(&machine.sandbox, &source, &options);
    firn(&machine.sandbox, "begin", mount.path(), &[]).ok();
    change(mount.path(), 1);
    firn(&machine.sandbox, "prepare", mount.path(), &["--id", "7"]).ok();
    let seen = contents(mount.path());
    mount.kill();
    machine.cut();
    let other = machine.sandbox.mkdir("other");
    let home = machine.server.path().to_str().expect("a path");
    let other_text = other.to_str().expect("a path");
    machine
        .sandbox
        .run(["recover", "--from-backup", home, other_text, "--id", "7"])
        .ok();
    assert_eq!(contents(&other), seen);
}

/// S-fsync-5 over many files, timed.
#[test]
fn ten_thousand_files_become_durable_in_a_time_that_can_be_waited_for() {
    const FILES: u64 = 10_000;
    let mut machine = Machine::new("powermany");
    let options = "arena-size=128M,close=held";
    let mount = FirnMount::over(&machine.sandbox, machine.server.path(), options);
    for dir in 0..100 {
        let path = mount.join(format!("dir{dir}"));
        fs::create_dir(&path).expect("mkdir");
        for at in 0..FILES / 100 {
            fs::write(path.join(format!("{at}")), format!("{dir}-{at}")).expect("write");
        }
    }
    mount.wait("drained", mount.path()).ok();
    let mut took = Vec::new();
    let mut syncs = Vec::new();
    for _ in 0..3 {
        let before = machine.server.syncs();
        let began = Instant::now();
        mount.wait("durable", mount.path()).ok();
        took.push(began.elapsed());
        syncs.push(machine.server.syncs() - before);
        fs::write(mount.join("dir7/7"), b"again").expect("write");
        mount.wait("drained", mount.path()).ok();
    }
    println!("{FILES} files: first, then one of them changed each: {took:?}; requests {syncs:?}");
    assert!(
        syncs[0] >= FILES && syncs[1] < 20 && syncs[2] < 20,
        "{syncs:?}"
    );
    let before = contents(&mount.join("dir3"));
    mount.kill();
    machine.cut();
    assert_eq!(contents(&machine.server.path().join("dir3")), before);
}
