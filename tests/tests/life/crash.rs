//! kill -9 of firnd, and of writers, at random moments under eight writers: nothing acknowledged is lost,
//! through the mount, over each stack of layers without transactions, and by direct access.
//!
//! `FIRN_CRASH_ROUNDS` sets the rounds (`cargo xtask campaign crash --rounds 200`), `FIRN_SEED` the seed.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use firn_tests::ack::{Verified, returned_operations, verify};
use firn_tests::command::wait_child;
use firn_tests::preloaded::DIRECT_AFTER;
use firn_tests::random::{env_count, generator};
use firn_tests::sandbox::{is_mounted, preload_library, unmount_lazily};
use firn_tests::{
    FirnMount, Layers, Sandbox, helper_binary, on_every_layers, run, seed, wait_until,
};
use rand::RngExt;

const WRITERS: u64 = 8;
/// With direct access.
const ROUNDS_DEFAULT: u64 = 10;
/// With each of the layers: one round of each way to recover.
const ROUNDS_OF_LAYERS: u64 = 3;
/// Options drawn per round: a roomy arena, one that is always full, both answers of close, an
/// early and a late drain.
const OPTIONS: [&str; 5] = [
    "arena-size=64M,chunk-size=4M",
    "arena-size=16M,chunk-size=1M",
    "arena-size=64M,chunk-size=4M,close=held,drain-age=10min",
    "arena-size=128M,chunk-size=4M,close=held,drain-age=50ms",
    "arena-size=16M,chunk-size=1M,close=held,io-threads=1",
];

/// Past the kernel also: memory that is never drained unasked, large enough for all writers and not.
const DIRECT_OPTIONS: [&str; 6] = [
    "arena-size=64M,chunk-size=4M",
    "arena-size=16M,chunk-size=1M,close=held",
    "arena-size=64M,chunk-size=1M,close=held,drain-age=10min",
    "memory=512M,chunk-size=1M,drain=demand",
    "memory=64M,chunk-size=1M,drain=demand",
    "memory=512M,chunk-size=1M,drain=demand,memory-files=64K",
];

struct Job {
    writers: Vec<(Child, PathBuf, String)>,
}

impl Job {
    fn start(sandbox: &Sandbox, mount: &FirnMount<'_>, seed: u64) -> Self {
        Self::start_with(sandbox, mount, seed, |_| false)
    }

    /// The writers that `preload` names have direct access where it is granted.
    fn start_with(
        sandbox: &Sandbox,
        mount: &FirnMount<'_>,
        seed: u64,
        preload: impl Fn(u64) -> bool,
    ) -> Self {
        let mut writers = Vec::new();
        for index in 0..WRITERS {
            let name = format!("w{index}");
            let log = sandbox.join(format!("log{index}"));
            std::fs::create_dir(mount.join(&name)).expect("mkdir");
            let mut command = Command::new(helper_binary());
            command
                .arg("writer")
                .arg(mount.join(&name))
                .arg(&log)
                .arg((seed ^ index).to_string());
            if preload(index) {
                command.env("LD_PRELOAD", preload_library());
                // Some go from the kernel to direct access in the middle of a file.
                command.env(
                    DIRECT_AFTER,
                    if seed >> index & 1 == 0 { "0" } else { "20000" },
                );
            }
            writers.push((command.spawn().expect("start a writer"), log, name));
        }
        Self { writers }
    }

    /// Waits until some operations of each writer have returned.
    fn wait_for_operations(&self) {
        let all_at_work = || {
            let mut logs = self.writers.iter().map(|(_, log, _)| log);
            logs.all(|log| returned_operations(log) >= 30)
        };
        wait_until("writers are at work", Duration::from_secs(60), all_at_work);
    }

    /// Waits for the writers, which end at the first error.
    fn end(&mut self) {
        for (child, ..) in &mut self.writers {
            wait_child(child, Duration::from_secs(60))
                .expect("a writer hangs after firnd was killed");
        }
    }

    /// kill -9 of the writers, one after the other, with pauses up to `pause_us`.
    fn kill(&mut self, rng: &mut impl RngExt, pause_us: u64) {
        for (child, ..) in &mut self.writers {
            child.kill().expect("kill a writer");
            std::thread::sleep(Duration::from_micros(rng.random_range(0..=pause_us)));
        }
    }

    /// What a process reads that has the library, and so reads by direct access what is in the arena.
    fn verify_preloaded(&self, dir: &Path) {
        for (_, log, name) in &self.writers {
            let mut command = Command::new(helper_binary());
            command
                .arg("verify")
                .arg(dir.join(name))
                .arg(log)
                .env("LD_PRELOAD", preload_library())
                .env(DIRECT_AFTER, "0");
            run(&mut command).ok();
        }
    }

    fn verify(&self, backing: &std::path::Path) -> Verified {
        let mut sum = Verified::default();
        for (_, log, name) in &self.writers {
            let verified = verify(&backing.join(name), log);
            sum.ops += verified.ops;
            sum.bytes += verified.bytes;
        }
        sum
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for (child, ..) in &mut self.writers {
            child.kill().ok();
            child.wait().ok();
        }
    }
}

/// One round; returns what was verified.
fn round(seed: u64, number: u64, layers: Layers) -> Verified {
    let mut rng = generator(seed.wrapping_add(number));
    let sandbox = Sandbox::new("crash");
    let lanes = ["lane0", "lane1", "lane2"].map(|name| sandbox.mkdir(name));
    let drawn = OPTIONS[rng.random_range(0..OPTIONS.len())];
    let options = &layers.options(&lanes, drawn);
    let moment = Duration::from_millis(rng.random_range(20..1500));
    let mount = FirnMount::new(&sandbox, options);
    let mut job = Job::start(&sandbox, &mount, rng.random());
    // The random moment is the point of the test, not a wait for a condition.
    std::thread::sleep(moment);
    let backing = mount.kill();
    job.end();

    let what = match number % 3 {
        0 => {
            sandbox.run(["recover".as_ref(), backing.as_os_str()]).ok();
            "recover"
        }
        1 => {
            // Files stay in their lanes and logs, whatever this mount says of them.
            FirnMount::new(&sandbox, drawn).umount();
            "mount, umount"
        }
        _ => {
            // Without being asked: the new firnd drains what it found, whatever the drain's age.
            let mount = FirnMount::new(&sandbox, options);
            wait_until("drained by itself", Duration::from_secs(60), || {
                mount.status().held_bytes == 0
            });
            // What is drained to logs is not plain yet.
            let verified = if layers.has_logs() {
                job.verify(mount.path())
            } else {
                job.verify(mount.backing())
            };
            assert!(verified.ops > 0);
            mount.umount();
            "mount, drained by itself"
        }
    };
    if layers.has_logs() {
        flatten_all(&sandbox, &backing);
    }
    let verified = job.verify(&backing);
    println!("round {number}: killed after {moment:?} with {options}; {what}; {verified:?}");
    if layers.has_lanes() {
        assert_no_orphans(&backing, &lanes);
    }
    verified
}

/// Makes the files in logs plain; no logs are left.
fn flatten_all(sandbox: &Sandbox, backing: &Path) {
    let args = ["flatten", "--all", "--backing"].map(OsStr::new);
    sandbox
        .run(args.into_iter().chain([backing.as_os_str()]))
        .ok();
    let entries = std::fs::read_dir(backing.join(".firn/log")).expect("list .firn/log");
    let names = entries.map(|entry| entry.expect("an entry").file_name());
    // Containers begin with the inode number of their file.
    let containers: Vec<_> = names
        .filter(|name| name.as_encoded_bytes()[0].is_ascii_hexdigit())
        .collect();
    assert!(containers.is_empty(), "{containers:?}");
}

/// Each file in a lane has a link that leads to it, and none waits for its link.
fn assert_no_orphans(backing: &Path, lanes: &[PathBuf]) {
    let mut named = BTreeSet::new();
    let mut dirs = vec![backing.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(&dir).expect("list").flatten() {
            let kind = entry.file_type().expect("kind");
            if kind.is_dir() {
                dirs.push(entry.path());
            } else if kind.is_symlink() {
                named.insert(std::fs::read_link(entry.path()).expect("readlink"));
            }
        }
    }
    let is_file = |entry: &std::fs::DirEntry| !is_marker(&entry.file_name());
    let entries = lanes
        .iter()
        .flat_map(|lane| std::fs::read_dir(lane).expect("list").flatten());
    let files: BTreeSet<PathBuf> = entries.filter(is_file).map(|entry| entry.path()).collect();
    // The others say which host is at something (`.firn/log`).
    named.retain(|link| link.is_absolute());
    let staged = |path: &&PathBuf| path.components().any(|part| part.as_os_str() == "placing");
    assert_eq!(named.iter().find(staged), None);
    assert_eq!(
        files.difference(&named).next(),
        None,
        "a file without a link"
    );
    assert_eq!(
        named.difference(&files).next(),
        None,
        "a link without a file"
    );
    assert!(!files.is_empty(), "no file was placed");
}

fn is_marker(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b".firn-")
}

on_every_layers! {
    /// Proves S-write-1, S-crash-2, S-crash-4, S-name-6.
    every_acknowledged_byte_is_in_the_backing_after_kill_9: killed_under_writers(None);
    /// Proves S-log-16, S-log-7.
    every_acknowledged_byte_is_in_its_logs_after_kill_9: killed_under_writers(Logs);
    /// Proves S-place-2, S-place-5.
    every_acknowledged_byte_is_in_its_lane_after_kill_9: killed_under_writers(Lanes);
    /// Proves S-log-16, S-log-7, S-place-5.
    every_acknowledged_byte_is_in_logs_in_lanes_after_kill_9: killed_under_writers(LogsInLanes);
}

fn killed_under_writers(layers: Layers) {
    let seed = seed(&format!("crash with {layers:?}"));
    let mut sum = Verified::default();
    let start = Instant::now();
    let rounds = env_count("FIRN_CRASH_ROUNDS", ROUNDS_OF_LAYERS);
    for number in 0..rounds {
        let verified = round(seed, number, layers);
        sum.ops += verified.ops;
        sum.bytes += verified.bytes;
    }
    println!(
        "{layers:?}: {rounds} rounds in {:?}, {} operations, {} bytes",
        start.elapsed(),
        sum.ops,
        sum.bytes
    );
}

/// The process that is killed in a round with direct access.
#[derive(Clone, Copy, Debug)]
enum Killed {
    Writers,
    Firnd,
    WritersThenFirnd,
    FirndThenWriters,
}

/// The same with writers of which some, or all, write by direct access.
fn direct_round(seed: u64, number: u64) -> Verified {
    const KILLED: [Killed; 4] = [
        Killed::Writers,
        Killed::Firnd,
        Killed::WritersThenFirnd,
        Killed::FirndThenWriters,
    ];
    let mut rng = generator(seed.wrapping_add(number));
    let sandbox = Sandbox::new("crashdirect");
    let spill = sandbox.mkdir("spill");
    let options = match rng.random_range(0..DIRECT_OPTIONS.len() + 1) {
        at if at < DIRECT_OPTIONS.len() => DIRECT_OPTIONS[at].to_owned(),
        _ => format!(
            "memory=32M,chunk-size=1M,drain=demand,spill={},spill-size=256M",
            spill.display()
        ),
    };
    let mixed: u64 = rng.random();
    let every = rng.random();
    let killed = KILLED[rng.random_range(0..KILLED.len())];
    let moment = Duration::from_millis(rng.random_range(20..1500));
    let late = rng.random();
    let pause_us = [0, 100, 20_000][rng.random_range(0..3)];
    let what = format!("killed {killed:?} after {moment:?}, pauses {pause_us} us, with {options}");

    let mount = FirnMount::new(&sandbox, &options);
    let preload = |index| every || mixed >> index & 1 == 1;
    let mut job = Job::start_with(&sandbox, &mount, rng.random(), preload);
    // The random moment is the point of the test, not a wait for a condition.
    std::thread::sleep(moment);
    let mount = match killed {
        Killed::Writers => {
            job.kill(&mut rng, pause_us);
            mount
        }
        Killed::Firnd | Killed::WritersThenFirnd | Killed::FirndThenWriters => {
            if matches!(killed, Killed::WritersThenFirnd) {
                job.kill(&mut rng, pause_us);
            }
            mount.kill();
            if matches!(killed, Killed::FirndThenWriters) {
                job.kill(&mut rng, pause_us);
            }
            // A process with direct access goes on in its slabs until a firnd attaches to the arena. Its writes that
            // returned count.
            if late {
                job.end();
            }
            FirnMount::new(&sandbox, &options)
        }
    };
    job.end();
    job.verify(mount.path());
    job.verify_preloaded(mount.path());
    let backing = mount.umount();
    let verified = job.verify(&backing);
    println!("round {number}: {what}; {verified:?}");
    verified
}

/// Proves S-direct-1, S-write-1, S-demand-5.
#[test]
fn every_acknowledged_byte_by_direct_access_is_there_after_kill_9() {
    let seed = seed("crash with direct access");
    let mut sum = Verified::default();
    for number in 0..env_count("FIRN_CRASH_ROUNDS", ROUNDS_DEFAULT) {
        let verified = direct_round(seed, number);
        sum.ops += verified.ops;
        sum.bytes += verified.bytes;
    }
    assert!(sum.ops > 0);
    println!("verified: {} operations, {} bytes", sum.ops, sum.bytes);
}

/// Proves S-write-1, S-crash-2.
#[test]
fn killed_again_and_again_while_recovering() {
    let seed = seed("crash twice");
    let mut rng = generator(seed);
    let sandbox = Sandbox::new("again");
    let options = "arena-size=64M,chunk-size=4M,close=held,drain-age=10min";
    let mount = FirnMount::new(&sandbox, options);
    let mut job = Job::start(&sandbox, &mount, rng.random());
    job.wait_for_operations();
    let backing = mount.kill();
    job.end();
    for _ in 0..5 {
        let mut recover = sandbox.firn(["recover".as_ref(), backing.as_os_str()]);
        let mut child = recover.spawn().expect("firn recover");
        std::thread::sleep(Duration::from_millis(rng.random_range(0..60)));
        child.kill().expect("kill");
        child.wait().expect("wait");
    }
    sandbox.run(["recover".as_ref(), backing.as_os_str()]).ok();
    job.verify(&backing);
}

/// Proves S-crash-1.
#[test]
fn a_dead_mount_answers_with_an_error_and_mounting_again_replaces_it() {
    let sandbox = Sandbox::new("dead");
    let mount = FirnMount::new(
        &sandbox,
        "arena-size=32M,chunk-size=1M,close=held,drain-age=10min",
    );
    std::fs::write(mount.join("file"), "kept").expect("write");
    let point = mount.path().to_owned();
    firn_tests::sandbox::kill(mount.pid(), libc::SIGKILL);
    mount.wait_for_end();
    let error = std::fs::read(point.join("file")).expect_err("nobody answers");
    // Which of the two depends on whether the kernel had the answer to a name in its cache.
    assert!(
        matches!(
            error.raw_os_error(),
            Some(libc::ENOTCONN | libc::ECONNABORTED)
        ),
        "{error}"
    );
    assert!(
        is_mounted(&point),
        "the dead mount stays until someone mounts again"
    );
    mount.abandon();
    let again = FirnMount::new(&sandbox, "arena-size=32M,chunk-size=1M");
    assert_eq!(std::fs::read(again.join("file")).expect("read"), b"kept");
    again.umount();
    unmount_lazily(&point);
}

/// Proves S-write-1.
#[test]
fn a_killed_writer_loses_nothing_that_write_returned() {
    let sandbox = Sandbox::new("writer");
    let mount = FirnMount::new(&sandbox, "arena-size=64M,chunk-size=4M");
    let mut job = Job::start(&sandbox, &mount, seed("killed writers"));
    job.wait_for_operations();
    for (child, ..) in &mut job.writers {
        child.kill().expect("kill a writer");
        child.wait().expect("wait");
    }
    let backing = mount.umount();
    assert!(job.verify(&backing).ops > 0);
}
