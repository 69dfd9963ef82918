//! Public suites: pjdfstest, fsx, fio and stress-ng, and what counts as a failure of ours.
//!
//! A suite runs on the backing first and then through the mount. A failure through the mount that the
//! backing has not is ours, unless `exclusions/<suite>.txt` lists it with a reason.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command::{Outcome, run, run_within};
use crate::watchdog::test_limit;

/// Configuration of pjdfstest: what Linux has, and two users that every Debian has.
const PJDFSTEST_CONFIG: &str = r#"
[features]
posix_fallocate = {}
rename_ctime = {}
utimensat = {}
utime_now = {}

[settings]
naptime = 0.02
allow_remount = false

[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"]]
"#;

/// Where `scripts/setup` puts Python packages that the distribution has not. They may be installed
/// elsewhere too.
pub fn python_packages() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tools/python")
}

/// Whether the system's Python has PyTorch; says so where it has not. Not every release of Debian and Ubuntu
/// has the package.
pub fn has_torch() -> bool {
    let find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)";
    let found = run(Command::new("/usr/bin/python3").args(["-c", find])).code == 0;
    if !found {
        println!("skipped: /usr/bin/python3 has no torch (the package python3-torch)");
    }
    found
}

/// Whether there is a CRIU that can dump and restore under this kernel; says so where there is none.
pub fn has_criu() -> bool {
    let check = Command::new(tool("criu")).arg("check").output();
    match check {
        Ok(output) if output.status.success() => return true,
        Ok(_) => {
            println!(
                "skipped: criu does not work with this kernel (`criu check`; Linux 6.13 needs CRIU 4.1)"
            )
        }
        Err(error) => println!("skipped: there is no criu (the package criu): {error}"),
    }
    false
}

/// Whether MooseFS is installed; says so where the release has no packages of it.
///
/// # Panics
///
/// If it has them and they are not installed.
#[track_caller]
pub fn has_moosefs() -> bool {
    let is_there = ["mfsmaster", "mfschunkserver", "mfsmount", "mfssetsclass"]
        .iter()
        .all(|program| Command::new(program).arg("-v").output().is_ok());
    if is_there {
        return true;
    }
    let mut apt = Command::new("apt-cache");
    let known = apt.args(["show", "moosefs-master"]).output();
    let is_known = known.is_ok_and(|output| output.status.success());
    assert!(!is_known, "MooseFS is not installed: run scripts/setup");
    println!("skipped: this release has no MooseFS (the package moosefs-master)");
    false
}

/// Whether there are `all` GiB of memory, and `shm` of them in /dev/shm; says so where there are not.
pub fn has_memory_gib(all: u64, shm: u64) -> bool {
    let meminfo = std::fs::read_to_string("/proc/meminfo").expect("read /proc/meminfo");
    let available = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:")?.strip_suffix("kB"));
    let available_kib: u64 = available
        .and_then(|kib| kib.trim().parse().ok())
        .expect("MemAvailable in kB");
    let stat = rustix::fs::statvfs("/dev/shm").expect("statvfs of /dev/shm");
    let enough = available_kib >= all << 20 && stat.f_bavail * stat.f_frsize >= shm << 30;
    if !enough {
        println!("skipped: it takes {all} GiB of memory, {shm} GiB of that in /dev/shm");
    }
    enough
}

/// A tool that `scripts/setup` installs, from `target/tools/bin` or else from PATH.
pub fn tool(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the workspace");
    let installed = root.join("target/tools/bin").join(name);
    if installed.exists() {
        installed
    } else {
        PathBuf::from(name)
    }
}

/// Runs pjdfstest in `dir`: test name to whether it failed.
pub fn pjdfstest(dir: &Path, scratch: &Path) -> BTreeMap<String, bool> {
    let config = scratch.join("pjdfstest.toml");
    std::fs::write(&config, PJDFSTEST_CONFIG).expect("write the configuration");
    let mut command = Command::new(tool("pjdfstest"));
    command.arg("-c").arg(&config).arg("-p").arg(dir);
    let outcome = run_within(&mut command, test_limit());
    let results = parse_pjdfstest(&outcome.stdout);
    assert!(
        results.len() > 300,
        "pjdfstest ran only {} tests: {outcome}",
        results.len()
    );
    results
}

/// Lines are `name   ok|skipped|FAILED`; skipped tests are left out.
fn parse_pjdfstest(output: &str) -> BTreeMap<String, bool> {
    let mut results = BTreeMap::new();
    for line in output.lines() {
        let mut words = line.split_whitespace();
        let (Some(name), Some(verdict), None) = (words.next(), words.next(), words.next()) else {
            continue;
        };
        match verdict {
            "ok" => results.insert(name.to_owned(), false),
            "FAILED" => results.insert(name.to_owned(), true),
            _ => continue,
        };
    }
    results
}

/// Runs pjdfstest in a directory of a mount: what [`pjdfstest`] returns, and the tests that fail there, not on the
/// backing, and are not excluded. The suite has races of its own: what fails must fail again.
pub fn pjdfstest_beside(
    native: &BTreeMap<String, bool>,
    dir: &Path,
    scratch: &Path,
) -> (BTreeMap<String, bool>, BTreeSet<String>) {
    let excluded = exclusions("pjdfstest");
    let through = pjdfstest(dir, scratch);
    let mut failures = new_failures(&through, native, &excluded);
    if !failures.is_empty() {
        println!("once more, for {failures:?}");
        let still = new_failures(&pjdfstest(dir, scratch), native, &excluded);
        failures.retain(|name| still.contains(name));
    }
    (through, failures)
}

/// Tests that fail through the mount, not on the backing, and are not excluded.
fn new_failures(
    through_mount: &BTreeMap<String, bool>,
    on_backing: &BTreeMap<String, bool>,
    excluded: &BTreeMap<String, String>,
) -> BTreeSet<String> {
    let failed = |results: &BTreeMap<String, bool>, name: &str| results.get(name) == Some(&true);
    through_mount
        .keys()
        .filter(|name| {
            failed(through_mount, name)
                && !failed(on_backing, name)
                && !excluded.contains_key(*name)
        })
        .cloned()
        .collect()
}

/// `exclusions/<suite>.txt`: lines `name # reason`; a line without a reason is an error.
pub fn exclusions(suite: &str) -> BTreeMap<String, String> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("exclusions")
        .join(format!("{suite}.txt"));
    let text = std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{file:?}: {e}"));
    let lines = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| match line.split_once('#') {
            Some((name, reason)) if !reason.trim().is_empty() => {
                (name.trim().into(), reason.trim().into())
            }
            _ => panic!("{file:?}: `{line}` gives no reason"),
        })
        .collect()
}

/// fsx on one file with mmap on and every operation it knows, on one byte or more: it takes the EINVAL of
/// posix_fallocate(3) for no bytes, on any file system, for a file system that has none, and ends.
pub fn fsx(file: &Path, scratch: &Path, seed: u64, ops: u64, sync_mapped_writes: bool) -> Outcome {
    let config = scratch.join("fsx.toml");
    let weights = "read = 10\nwrite = 10\nmapread = 10\nmapwrite = 10\ntruncate = 5\nclose_open = 3\n\
        invalidate = 1\nfsync = 0.2\nfdatasync = 0.2\npunch_hole = 3\nsendfile = 3\nposix_fallocate = 2\n\
        posix_fadvise = 1\ncopy_file_range = 5";
    let text = format!(
        "nomsyncafterwrite = {}\n[opsize]\nmin = 1\n[weights]\n{weights}\n",
        !sync_mapped_writes
    );
    std::fs::write(&config, text).expect("write the configuration");
    let mut command = Command::new(tool("fsx"));
    command
        .arg("-f")
        .arg(&config)
        .args(["-S", &seed.to_string(), "-N", &ops.to_string()]);
    command.arg("-P").arg(scratch).arg(file);
    run_within(&mut command, test_limit())
}

/// fio with verification of every block, random writes of mixed sizes by two jobs.
pub fn fio_verify(dir: &Path, scratch: &Path, engine: &str, direct: bool, seed: u64) -> Outcome {
    let mut command = Command::new("fio");
    command.current_dir(scratch);
    command.args([
        "--name=verify",
        "--rw=randwrite",
        "--bsrange=4k-256k",
        "--size=12m",
        "--numjobs=2",
    ]);
    command.args([
        "--verify=crc32c",
        "--verify_fatal=1",
        "--do_verify=1",
        "--group_reporting",
    ]);
    command.args([
        "--verify_state_save=0",
        "--unlink=1",
        &format!("--ioengine={engine}"),
    ]);
    command
        .arg(format!("--randseed={}", seed >> 1))
        .arg(format!("--direct={}", u8::from(direct)));
    command.arg(format!("--directory={}", dir.display()));
    run_within(&mut command, test_limit())
}

/// One stressor of stress-ng with verification, two processes, for `seconds` seconds. `preload` is a library that its
/// processes run with.
pub fn stress(stressor: &str, dir: &Path, seconds: u64, preload: Option<&Path>) -> Outcome {
    let mut command = Command::new("stress-ng");
    // Absolute sizes: its defaults are shares of the file system's free space.
    command.args([
        "--hdd-bytes=16m",
        "--iomix-bytes=16m",
        "--fallocate-bytes=16m",
        "--seek-size=8m",
    ]);
    command.args([
        "--revio-bytes=16m",
        "--readahead-bytes=16m",
        "--mmap-bytes=16m",
        "--sync-file-bytes=8m",
    ]);
    command.args([
        "--verify",
        "--quiet",
        &format!("--timeout={seconds}"),
        &format!("--{stressor}=2"),
    ]);
    command.arg("--temp-path").arg(dir).current_dir(dir);
    if let Some(library) = preload {
        command.env("LD_PRELOAD", library);
    }
    run_within(&mut command, test_limit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_are_read_and_skipped_tests_left_out() {
        let output = "a::b      ok\n\twhy it was skipped today\nc::d     skipped\ne::f   FAILED\nBacktrace:\n";
        let results = parse_pjdfstest(output);
        assert_eq!(
            results,
            BTreeMap::from([("a::b".into(), false), ("e::f".into(), true)])
        );
    }

    #[test]
    fn only_failures_that_the_backing_has_not_are_new() {
        let results =
            |list: [(&str, bool); 3]| list.map(|(name, failed)| (name.to_owned(), failed)).into();
        let through_mount = results([("a", true), ("b", true), ("c", true)]);
        let on_backing = results([("a", false), ("b", true), ("c", false)]);
        let excluded = BTreeMap::from([("c".into(), "a reason".into())]);
        assert_eq!(
            new_failures(&through_mount, &on_backing, &excluded),
            BTreeSet::from(["a".into()])
        );
    }

    #[test]
    fn every_exclusion_has_a_reason() {
        exclusions("pjdfstest");
    }
}
