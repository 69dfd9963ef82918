//! `keep=N` of a commit rule, and `firn ls --checkpoints`.
//!
//! `FIRN_CRASH_ROUNDS` sets how often firnd is killed, `FIRN_SEED` the seed.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_tests::command::wait_until;
use firn_tests::random::{env_count, generator};
use firn_tests::{FirnMount, Sandbox, seed};
use rand::RngExt;
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);
const PARTS: [&str; 3] = ["model", "optimizer", "rng"];

/// A mount with one rule: `step-N/` is complete once `done` is closed.
fn options(sandbox: &Sandbox, words: &str) -> String {
    let rules = sandbox.path().join("site.rules");
    fs::write(&rules, format!("a  step-*/  close:done  {words}\n")).expect("write the rules");
    format!("arena-size=64M,chunk-size=1M,rules={}", rules.display())
}

fn bytes_of(step: u64, part: &str) -> Vec<u8> {
    let first = step as usize * 31 + part.len();
    (first..first + 30_000)
        .map(|number| (number % 251) as u8)
        .collect()
}

fn write_step(dir: &Path, step: u64) {
    let at = dir.join(format!("step-{step}"));
    fs::create_dir(&at).expect("mkdir");
    fs::create_dir(at.join("below")).expect("mkdir");
    for part in PARTS {
        fs::write(at.join("below").join(part), bytes_of(step, part)).expect("write");
    }
    fs::write(at.join("done"), "yes").expect("write");
}

fn steps_in(dir: &Path) -> Vec<u64> {
    let names = fs::read_dir(dir).expect("read_dir");
    let names = names.filter_map(|entry| {
        let name = entry.expect("an entry").file_name().into_string().ok()?;
        name.strip_prefix("step-")?.parse().ok()
    });
    let mut steps: Vec<u64> = names.collect();
    steps.sort_unstable();
    steps
}

#[track_caller]
fn assert_whole(dir: &Path, step: u64, told: &str) {
    let at = dir.join(format!("step-{step}"));
    for part in PARTS {
        let found = fs::read(at.join("below").join(part)).unwrap_or_default();
        assert!(
            found == bytes_of(step, part),
            "{told}: {part} of step {step}"
        );
    }
    assert!(at.join("done").exists(), "{told}: the end of step {step}");
}

fn wait_for_steps(dir: &Path, steps: &[u64]) {
    wait_until(&format!("{} has {steps:?}", dir.display()), LIMIT, || {
        steps_in(dir) == steps
    });
}

/// Proves S-rule-6.
#[test]
fn keep_removes_old_checkpoints_and_readers_and_links_keep_theirs() {
    let sandbox = Sandbox::new("rules-keep");
    let mount = FirnMount::new(&sandbox, &options(&sandbox, "keep=2"));
    write_step(mount.path(), 1);
    write_step(mount.path(), 2);
    let mut reader = File::open(mount.join("step-1/below/model")).expect("open");
    std::os::unix::fs::symlink("step-2", mount.join("best")).expect("symlink");
    write_step(mount.path(), 3);
    wait_for_steps(mount.path(), &[2, 3]);
    wait_for_steps(mount.backing(), &[2, 3]);
    let mut read = Vec::new();
    reader.read_to_end(&mut read).expect("read");
    assert!(read == bytes_of(1, "model"), "a reader reads on");
    drop(reader);
    write_step(mount.path(), 4);
    write_step(mount.path(), 5);
    // What a link leads to stays, and counts.
    wait_for_steps(mount.path(), &[2, 4, 5]);
    assert_whole(&mount.join("best").join(".."), 2, "by the link");
    wait_until("both removals are counted", LIMIT, || {
        mount.status().rule_removals.get("a") == Some(&2)
    });
    fs::remove_file(mount.join("best")).expect("unlink");
    let backing = mount.umount();
    assert_eq!(steps_in(&backing), [2, 4, 5]);
    // The next mount has not seen those commits: their steps say which are old.
    let mount = FirnMount::over(&sandbox, &backing, &options(&sandbox, "keep=2"));
    write_step(mount.path(), 6);
    wait_for_steps(mount.path(), &[5, 6]);
    let explained = sandbox.run([
        "rules".as_ref(),
        "explain".as_ref(),
        mount.join("step-6/done").as_os_str(),
    ]);
    assert!(
        explained
            .stdout
            .contains("the newest 2 complete checkpoints stay"),
        "{}",
        explained.stdout
    );
    mount.umount();
}

/// Proves S-rule-6.
#[test]
fn a_firnd_killed_while_it_removes_leaves_each_checkpoint_whole_or_gone() {
    let seed = seed("rules_keep");
    let mut random = generator(seed);
    let sandbox = Sandbox::new("rules-keep-kill");
    let options = options(&sandbox, "keep=1");
    let backing: PathBuf = sandbox.mkdir("kept");
    let mut newest = 0;
    for round in 0..env_count("FIRN_CRASH_ROUNDS", 6) {
        let told = format!("round {round}, seed {seed}");
        let mount = FirnMount::over(&sandbox, &backing, &options);
        for _ in 0..3 {
            newest += 1;
            write_step(mount.path(), newest);
        }
        // Within what one removal takes: the moment decides how far it is.
        std::thread::sleep(Duration::from_micros(random.random_range(0..20_000)));
        mount.kill();
        FirnMount::over(&sandbox, &backing, &options).umount();
        let steps = steps_in(&backing);
        assert_eq!(steps.last(), Some(&newest), "{told}: the newest is there");
        for step in steps {
            assert_whole(&backing, step, &told);
        }
    }
    let mount = FirnMount::over(&sandbox, &backing, &options);
    write_step(mount.path(), newest + 1);
    wait_for_steps(mount.path(), &[newest + 1]);
    mount.umount();
}

fn listed(sandbox: &Sandbox, mount: &FirnMount<'_>) -> Vec<Value> {
    let told = sandbox.run([
        "ls".as_ref(),
        "--checkpoints".as_ref(),
        "--json".as_ref(),
        mount.path().as_os_str(),
    ]);
    assert_eq!(told.code, 0, "{}", told.stderr);
    serde_json::from_str(&told.stdout).expect("a list")
}

#[test]
fn checkpoints_are_listed_with_what_they_wait_for() {
    let sandbox = Sandbox::new("rules-list");
    let mount = FirnMount::new(&sandbox, &options(&sandbox, ""));
    write_step(mount.path(), 10);
    fs::write(mount.join("other"), "no checkpoint").expect("write");
    fs::create_dir(mount.join("step-9")).expect("mkdir");
    let writer = File::create(mount.join("step-9/model")).expect("create");
    let all = listed(&sandbox, &mount);
    assert_eq!(all.len(), 2, "{all:?}");
    let [nine, ten] = &all[..] else {
        unreachable!("2 are there")
    };
    assert_eq!(nine["step"], "9");
    assert_eq!(nine["open"], 1);
    assert_eq!(nine["complete"], false);
    assert_eq!(nine["durable"], false);
    assert_eq!(nine["waits_for"], "`close:done`");
    assert_eq!(ten["step"], "10");
    assert_eq!(ten["rule"], "a");
    assert_eq!(ten["files"], 4);
    assert_eq!(ten["bytes"], 90_003);
    assert_eq!(ten["complete"], true);
    assert_eq!(ten["durable"], true);
    assert_eq!(mount.status().rule_waits.get("a"), Some(&1));
    drop(writer);
    fs::write(mount.join("step-9/done"), "yes").expect("write");
    let all = listed(&sandbox, &mount);
    assert!(
        all.iter()
            .all(|one| one["complete"] == true && one["durable"] == true)
    );
    let table = sandbox.run([
        "ls".as_ref(),
        "--checkpoints".as_ref(),
        mount.path().as_os_str(),
    ]);
    let lines: Vec<&str> = table.stdout.lines().collect();
    assert_eq!(lines.len(), 3, "{}", table.stdout);
    assert!(
        lines[0].starts_with("STEP  RULE  FILES"),
        "{}",
        table.stdout
    );
    mount.umount();
}
