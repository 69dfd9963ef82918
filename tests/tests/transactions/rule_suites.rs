//! Suites and full disks inside a checkpoint of a rule that is not complete.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use firn_tests::command::wait_until;
use firn_tests::random::env_count;
use firn_tests::suite::{fsx, pjdfstest, pjdfstest_beside};
use firn_tests::tree::{assert_same, snapshot};
use firn_tests::{FirnMount, FsKind, LoopImage, Sandbox, differential, seed};

/// The scope is the directory `work`, complete when `done` is written in it.
const RULE: &str = "suite work/ close:done\n";
const MIB: usize = 1 << 20;

struct Scope {
    sandbox: Sandbox,
    image: LoopImage,
    backing: PathBuf,
}

impl Scope {
    fn new(name: &str, image_mib: u64) -> Self {
        let sandbox = Sandbox::new(name);
        fs::write(sandbox.join("suite.rules"), RULE).expect("write the rule");
        let image = LoopImage::new(&sandbox, FsKind::Ext4, image_mib);
        let backing = image.mkdir("backing");
        Self {
            sandbox,
            image,
            backing,
        }
    }

    fn mount(&self) -> FirnMount<'_> {
        let rules = self.sandbox.join("suite.rules");
        let options = format!(
            "arena-size=32M,chunk-size=1M,drain=commit,allow-other,dev,suid,rules={}",
            rules.display()
        );
        FirnMount::over(&self.sandbox, &self.backing, &options)
    }

    /// The checkpoint as the backing has it.
    fn behind(&self) -> PathBuf {
        self.backing.join("work")
    }
}

fn commits(mount: &FirnMount<'_>) -> u64 {
    mount
        .status()
        .rule_commits
        .get("suite")
        .copied()
        .unwrap_or(0)
}

/// Proves S-rule-1, S-rule-2 and S-rule-3.
#[test]
fn same_as_plain_in_a_checkpoint() {
    let scope = Scope::new("rules-diff", 400);
    let plain = scope.image.mkdir("plain");
    let mount = scope.mount();
    let work = mount.join("work");
    let ops = env_count("FIRN_DIFFERENTIAL_OPS", 1000);
    let seed = seed("differential in a checkpoint");
    let rules = differential::Rules {
        is_wanted: |_| true,
        canonical: |answer| answer,
    };
    fs::create_dir(&work).expect("mkdir");
    for round in 0..3 {
        let before = scope.behind().exists().then(|| snapshot(&scope.behind()));
        fs::write(work.join("begin"), b"").expect("write");
        fs::remove_file(work.join("begin")).expect("remove");
        differential::run_by(seed + round, ops, &work, &plain, &rules);
        let now = scope.behind().exists().then(|| snapshot(&scope.behind()));
        assert!(
            now == before,
            "the backing of a checkpoint that is open, seed {seed}"
        );
        fs::write(work.join("done"), b"").expect("write");
        assert_eq!(commits(&mount), round + 1);
        fs::write(plain.join("done"), b"").expect("write");
        assert_same(
            "after the commit",
            &snapshot(&scope.behind()),
            &snapshot(&plain),
        );
        fs::remove_file(plain.join("done")).expect("remove");
        fs::remove_file(work.join("done")).expect("remove");
    }
    differential::run_by(seed + 9, ops, &work, &plain, &rules);
    let before = snapshot(&scope.behind());
    mount.umount();
    assert_same(
        "after the end of the mount",
        &snapshot(&scope.behind()),
        &before,
    );
}

/// Proves S-rule-1.
#[test]
fn pjdfstest_passes_in_a_checkpoint_as_it_does_natively() {
    let scope = Scope::new("rules-pjd", 400);
    let mount = scope.mount();
    let native = pjdfstest(&scope.image.mkdir("native"), scope.sandbox.path());
    let work = mount.join("work");
    fs::create_dir(&work).expect("mkdir");
    let (through, failures) = pjdfstest_beside(&native, &work, scope.sandbox.path());
    println!(
        "{} ran natively, {} in a checkpoint",
        native.len(),
        through.len()
    );
    assert!(
        failures.is_empty(),
        "fail in a checkpoint and not on ext4: {failures:#?}"
    );
    assert!(!scope.behind().exists());
    mount.umount();
    assert!(!scope.behind().exists());
}

/// Proves S-rule-1.
#[test]
fn fsx_finds_nothing_in_a_checkpoint() {
    let scope = Scope::new("rules-fsx", 400);
    let mount = scope.mount();
    let work = mount.join("work");
    fs::create_dir(&work).expect("mkdir");
    let seed = seed("fsx in a checkpoint");
    let ops = env_count("FIRN_FSX_OPS", 6000).min(100_000);
    fsx(&work.join("file"), scope.sandbox.path(), seed, ops, true).ok();
    assert!(!scope.behind().exists());
    let seen = fs::read(work.join("file")).expect("read");
    fs::write(work.join("done"), b"").expect("write");
    assert!(fs::read(scope.behind().join("file")).expect("read") == seen);
    mount.umount();
}

/// Proves S-rule-17.
#[test]
fn a_checkpoint_larger_than_the_arena_is_staged_and_one_larger_than_the_disk_leaves_the_last_one() {
    let scope = Scope::new("rules-full", 200);
    let mount = scope.mount();
    let work = mount.join("work");
    let python = |mib: usize| {
        let program = format!(
            "import os\nos.makedirs('work', exist_ok=True)\nwith open('work/model', 'wb') as f:\n    for i in range({mib}):\n        f.write(bytes([{mib} % 251]) * {MIB})\nopen('work/done', 'w').close()\n"
        );
        let mut command = Command::new("python3");
        let command = command.arg("-c").arg(program).current_dir(mount.path());
        command.output().expect("python3")
    };
    let first = python(60);
    assert!(
        first.status.success(),
        "{}",
        String::from_utf8_lossy(&first.stderr)
    );
    assert_eq!(commits(&mount), 1);
    let has = |mib: usize| {
        let model = fs::read(scope.behind().join("model")).expect("read");
        model.len() == mib * MIB && model.iter().all(|byte| usize::from(*byte) == mib % 251)
    };
    assert!(has(60));
    let second = python(180);
    assert!(!second.status.success());
    let told = String::from_utf8_lossy(&second.stderr);
    assert!(told.contains("No space left on device"), "{told}");
    assert_eq!(commits(&mount), 1);
    assert!(has(60));
    wait_until("the part is dropped", Duration::from_secs(60), || {
        mount.status().transactions.is_empty()
    });
    assert!(fs::read(work.join("model")).expect("read").len() == 60 * MIB);
    let third = python(70);
    assert!(
        third.status.success(),
        "{}",
        String::from_utf8_lossy(&third.stderr)
    );
    assert!(has(70));
    mount.umount();
}
