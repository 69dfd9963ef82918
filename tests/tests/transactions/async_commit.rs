//! `firn commit --async`: decided and durable at once, applied while programs go on.
//!
//! `FIRN_CRASH_ROUNDS` sets the rounds of kill -9, `FIRN_SEED` the seed.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use firn_tests::command::{wait_child, wait_until};
use firn_tests::differential;
use firn_tests::fsops::{assert_same_bytes, open_rw, read};
use firn_tests::random::{bytes, env_count, generator};
use firn_tests::sandbox::{kill, wait_for_request};
use firn_tests::transaction::{behind, firn_with as firn};
use firn_tests::tree::{assert_same, snapshot};
use firn_tests::{FirnMount, FsKind, LoopImage, Sandbox, seed};
use rand::RngExt;

const COMMIT: &str = "arena-size=64M,chunk-size=1M,drain=commit";
const MIB: usize = 1 << 20;

fn stages(mount: &FirnMount<'_>) -> Vec<&'static str> {
    mount
        .status()
        .transactions
        .into_iter()
        .map(|one| one.stage.as_str())
        .collect()
}

/// A mount in a transaction whose commit cannot be applied: it overwrites a sparse file, and the backing has no
/// room for the bytes twice. `filler` takes the room.
struct Stuck<'a> {
    image: LoopImage,
    sandbox: &'a Sandbox,
    content: Vec<u8>,
}

impl<'a> Stuck<'a> {
    fn new(sandbox: &'a Sandbox) -> Self {
        Self {
            image: LoopImage::new(sandbox, FsKind::Ext4, 100),
            sandbox,
            content: bytes(3, 24 * MIB),
        }
    }

    fn commit(&self, more: &[&str]) -> FirnMount<'a> {
        let mount = FirnMount::over(self.sandbox, &self.image.mkdir("backing"), COMMIT);
        fs::File::create(mount.join("file"))
            .and_then(|f| f.set_len(24 * MIB as u64))
            .expect("a sparse file");
        fs::write(mount.join("stays"), b"stays").expect("write");
        firn(self.sandbox, "begin", mount.path(), &[]).ok();
        open_rw(&mount.join("file"))
            .write_all_at(&self.content, 0)
            .expect("write");
        fs::write(mount.join("new"), b"new").expect("write");
        firn(self.sandbox, "wait", mount.path(), &[]).ok();
        let filler = fs::File::create(self.filler()).expect("create");
        let block = vec![1; MIB];
        let mut room: Vec<u8> = block;
        while !room.is_empty() {
            let mut at = &filler;
            if std::io::Write::write_all(&mut at, &room).is_err() {
                room.truncate(room.len() / 2);
            }
        }
        // The record needs some.
        let len = filler.metadata().expect("stat").len();
        filler.set_len(len - 4 * MIB as u64).expect("set_len");
        filler.sync_all().expect("sync");
        firn(self.sandbox, "commit", mount.path(), more).ok();
        mount
    }

    fn filler(&self) -> std::path::PathBuf {
        self.image.mkdir("rest").join("filler")
    }

    fn room(&self) {
        fs::remove_file(self.filler()).expect("remove");
    }
}

/// Proves S-tx-10, S-tx-52, S-tx-53, S-tx-54: what programs see, what waits, retries, the end of the mount.
#[test]
fn reads_and_the_next_transaction_do_not_wait_for_a_commit_that_is_being_applied() {
    let sandbox = Sandbox::new("txasync");
    let stuck = Stuck::new(&sandbox);
    let mount = stuck.commit(&["--async", "--id", "7", "--begin"]);
    wait_until("the failure is shown", Duration::from_secs(60), || {
        mount.status().transactions[0].error.is_some()
    });
    assert_eq!(stages(&mount), ["decided", "open"]);
    let shown = sandbox
        .run([OsStr::new("status"), mount.path().as_os_str()])
        .ok()
        .stdout;
    assert!(
        shown.contains("No space left") && shown.contains("decided as 7"),
        "{shown}"
    );

    // Reads and writes of data go on, with more programs than threads that answer the kernel.
    let waiting: Vec<_> = (0..20)
        .map(|at| {
            let path = mount.join(format!("later{at}"));
            std::thread::spawn(move || fs::write(path, b"later"))
        })
        .collect();
    assert_same_bytes("the file", &read(&mount.join("file")), &stuck.content);
    assert_eq!(fs::read(mount.join("new")).expect("read"), b"new");
    let file = open_rw(&mount.join("file"));
    file.write_all_at(b"next", 0)
        .expect("a write goes to the arena");
    assert_eq!(&read(&mount.join("file"))[..4], b"next");
    assert!(
        waiting.iter().all(|one| !one.is_finished()),
        "new names wait"
    );
    firn(&sandbox, "commit", mount.path(), &["--id", "7"])
        .code(1)
        .says("No space left");
    firn(&sandbox, "umount", mount.path(), &[])
        .code(11)
        .says("transaction is open");

    stuck.room();
    firn(&sandbox, "commit", mount.path(), &["--id", "7"]).ok();
    waiting
        .into_iter()
        .for_each(|one| one.join().expect("join").expect("it goes on"));
    assert_eq!(stages(&mount), ["open"]);
    assert_eq!(fs::read(mount.backing().join("new")).expect("read"), b"new");
    drop(file);
    firn(&sandbox, "abort", mount.path(), &[]).ok();
    assert_same_bytes(
        "what was written after it is undone",
        &read(&mount.join("file")),
        &stuck.content,
    );
    assert!(!mount.join("later0").exists());
    mount.umount();
}

/// Proves S-tx-10, S-tx-54, S-tx-55: nothing is lost if the mount ends, by force or by a crash, before it is applied.
#[test]
fn a_commit_that_cannot_be_applied_is_finished_by_the_next_mount() {
    for (how, begin) in [
        ("kill", true),
        ("kill", false),
        ("force", true),
        ("force", false),
        ("mend", false),
    ] {
        let sandbox = Sandbox::new("txasyncend");
        let stuck = Stuck::new(&sandbox);
        let args: &[&str] = if begin {
            &["--async", "--begin"]
        } else {
            &["--async"]
        };
        let mount = stuck.commit(args);
        wait_until("the failure is shown", Duration::from_secs(60), || {
            mount.status().transactions[0].error.is_some()
        });
        let after = open_rw(&mount.join("stays"));
        after.write_all_at(b"after", 0).expect("write");
        drop(after);
        let backing = mount.backing().to_owned();
        match how {
            "kill" => {
                mount.kill();
                stuck.room();
            }
            "force" => {
                sandbox.run([
                    OsStr::new("umount"),
                    OsStr::new("--force"),
                    mount.path().as_os_str(),
                ]);
                mount.wait_for_end();
                drop(mount);
                stuck.room();
            }
            _ => {
                firn(&sandbox, "umount", mount.path(), &[])
                    .code(11)
                    .says("cannot be applied");
                stuck.room();
                // By the background alone.
                wait_until("it is tried again", Duration::from_secs(60), || {
                    stages(&mount).is_empty()
                });
                mount.umount();
            }
        }
        let mount = FirnMount::over(&sandbox, &backing, COMMIT);
        assert_same_bytes("the file", &read(&mount.join("file")), &stuck.content);
        assert_eq!(fs::read(mount.join("new")).expect("read"), b"new", "{how}");
        let expected = if begin { b"stays" } else { b"after" };
        assert_eq!(
            fs::read(mount.join("stays")).expect("read"),
            expected,
            "{how}, begin {begin}"
        );
        assert!(stages(&mount).is_empty());
        mount.umount();
    }
}

/// Proves S-tx-5: a truncation of a file while the outcome is open waits too, and does not hold the commit up.
#[test]
fn regression_a_truncation_that_waits_does_not_hold_up_the_commit_that_it_waits_for() {
    let sandbox = Sandbox::new("txcut");
    let mount = FirnMount::new(&sandbox, COMMIT);
    fs::write(mount.join("file"), b"long enough").expect("write");
    for more in [&["--id", "3"][..], &["--id", "3", "--begin", "--async"]] {
        firn(&sandbox, "begin", mount.path(), &[]).ok();
        fs::write(mount.join("file"), b"in it, and long").expect("write");
        firn(&sandbox, "prepare", mount.path(), &["--id", "3"]).ok();
        // Of another process: a child that this one starts would close its copy of the file first.
        let mut cutter = std::process::Command::new("truncate");
        let mut cutter = cutter
            .args(["-s", "5"])
            .arg(mount.join("file"))
            .spawn()
            .expect("truncate");
        let process = format!("/proc/{0}/task/{0}", cutter.id());
        wait_for_request(Path::new(&process));
        // firnd answers other requests meanwhile: this one is not just on its way.
        for _ in 0..10 {
            mount.status();
        }
        assert!(
            cutter.try_wait().expect("wait").is_none(),
            "it waits for the outcome"
        );
        firn(&sandbox, "commit", mount.path(), more).ok();
        assert!(
            wait_child(&mut cutter, Duration::from_secs(60))
                .expect("it goes on")
                .success()
        );
        assert_eq!(fs::read(mount.join("file")).expect("read"), b"in it");
    }
    firn(&sandbox, "abort", mount.path(), &[]).ok();
    assert_eq!(
        fs::read(mount.join("file")).expect("read"),
        b"in it, and long"
    );
    mount.umount();
}

/// Whether the backing has a commit that is decided and not yet applied.
fn is_decided(backing: &Path) -> bool {
    snapshot(backing)
        .keys()
        .any(|path| path.starts_with(".firn") && path.ends_with("committed"))
}

/// Proves S-tx-2, S-tx-10, S-tx-41, S-tx-52.
#[test]
fn a_commit_that_returned_survives_kill_9_of_firnd_while_it_is_applied() {
    let rounds = env_count("FIRN_CRASH_ROUNDS", 12);
    let seed = seed("kill -9 behind commits");
    let mut rng = generator(seed);
    let sandbox = Sandbox::new("txasynckill");
    let plain = sandbox.mkdir("plain");
    let options = format!("{COMMIT},allow-other,dev,suid");
    let mut decided = 0;
    for round in 0..rounds {
        let told = format!("seed {seed}, round {round}");
        let mount = FirnMount::new(&sandbox, &options);
        assert_same(
            &format!("{told}: at the begin"),
            &snapshot(mount.path()),
            &snapshot(&plain),
        );
        firn(&sandbox, "begin", mount.path(), &[]).ok();
        differential::run(seed + round, 300, mount.path(), &plain);
        let new = snapshot(&plain);
        let begin = round % 2 == 0;
        let args: &[&str] = if begin {
            &["--async", "--begin"]
        } else {
            &["--async"]
        };
        let pid = mount.pid();
        let before = Instant::now();
        firn(&sandbox, "commit", mount.path(), args).ok();
        let took = before.elapsed();
        match rng.random_range(0..4) {
            // Applied or not, programs see the tree after the commit.
            0 => assert_same(
                &format!("{told}: what programs see"),
                &snapshot(mount.path()),
                &new,
            ),
            1 => std::thread::sleep(took.mul_f64(rng.random())),
            _ => {}
        }
        kill(pid, libc::SIGKILL);
        let backing = mount.kill();
        decided += u64::from(is_decided(&backing));
        let mount = FirnMount::new(&sandbox, &options);
        assert_same(
            &format!("{told}: after the crash"),
            &snapshot(mount.path()),
            &new,
        );
        let backing = mount.umount();
        assert_same(&format!("{told}: in the backing"), &behind(&backing), &new);
    }
    println!("{rounds} rounds, {decided} killed before the commit was applied");
    assert!(
        decided > 0,
        "seed {seed}: every kill came after the commit was applied and shows nothing"
    );
}
