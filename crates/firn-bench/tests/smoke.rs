//! The benchmarks run, compare what they say they compare, and leave nothing behind. Figures are not judged here.
//!
//! Needs FUSE, and the `firn` program and the preload library built beside `firn-bench` (`cargo build`).

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;

/// Runs a benchmark in `dir` and returns its report.
fn run(dir: &Path, args: &[&str]) -> Value {
    let report = dir.join("report.json");
    let output = Command::new(env!("CARGO_BIN_EXE_firn-bench"))
        .args(args)
        .args(["--quick", "--repeats", "1"])
        .arg("--dir")
        .arg(dir)
        .arg("--json")
        .arg(&report)
        .output()
        .expect("start firn-bench");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {errors}");
    let text = fs::read_to_string(&report).expect("read the report");
    fs::remove_file(&report).expect("remove the report");
    serde_json::from_str(&text).expect("a report is JSON")
}

fn names(list: &Value) -> Vec<&str> {
    let list = list.as_array().expect("a list");
    list.iter()
        .map(|one| one["name"].as_str().expect("a name"))
        .collect()
}

fn assert_nothing_is_left(dir: &Path) {
    let left: Vec<_> = fs::read_dir(dir).expect("list").collect();
    assert!(left.is_empty(), "{left:?}");
    let mounts = fs::read_to_string("/proc/self/mounts").expect("the table of mounts");
    assert!(
        !mounts.contains(dir.to_str().expect("a plain path")),
        "{mounts}"
    );
}

#[test]
fn a_checkpoint_stands_beside_native_writes_with_the_same_figures() {
    let dir = tempfile::tempdir().expect("a directory");
    let report = run(dir.path(), &["checkpoint", "--processes", "2"]);
    let candidates = report["cases"][0]["candidates"].as_array();
    let candidates = candidates.expect("candidates");
    let found = names(&report["cases"][0]["candidates"]);
    assert_eq!(found[0], "native");
    assert!(
        found.iter().any(|name| name.starts_with("firn")),
        "{found:?}"
    );
    for candidate in candidates {
        let metric = &candidate["metrics"][0];
        assert_eq!(metric["name"], candidates[0]["metrics"][0]["name"]);
        assert!(
            metric["median"].as_f64().expect("a number") > 0.0,
            "{candidate}"
        );
    }
    assert_nothing_is_left(dir.path());
}

#[test]
fn a_report_on_standard_output_is_json_alone() {
    let dir = tempfile::tempdir().expect("a directory");
    let output = Command::new(env!("CARGO_BIN_EXE_firn-bench"))
        .args(["read", "--quick", "--repeats", "1", "--json", "-", "--dir"])
        .arg(dir.path())
        .output()
        .expect("start firn-bench");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON and nothing else");
    assert_eq!(report["benchmark"], "read");
    assert_nothing_is_left(dir.path());
}

#[test]
fn pauses_stand_beside_a_mount_that_is_made_again_and_rates_beside_those_without() {
    let dir = tempfile::tempdir().expect("a directory");
    let report = run(dir.path(), &["takeover", "--kills", "1"]);
    let cases = report["cases"].as_array().expect("cases");
    let candidates = |case: &Value| names(&case["candidates"]).join(", ");
    let found: Vec<String> = cases.iter().map(candidates).collect();
    let pauses = "mounted again, files lost, takeover=auto";
    let rates = "takeover=no, takeover=auto";
    assert_eq!(found, [pauses, pauses, rates, rates]);
    assert_nothing_is_left(dir.path());
}

/// A benchmark that is going to be ended.
struct Running {
    child: Child,
    dir: tempfile::TempDir,
}

impl Running {
    /// Begins to write checkpoints natively, to a sink and through several mounts of Firn: long enough to be ended.
    fn start(more: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let mut command = Command::new(env!("CARGO_BIN_EXE_firn-bench"));
        command.args(["checkpoint", "--image-size", "64M", "--repeats", "1000"]);
        command.args(more).arg("--dir").arg(dir.path());
        let child = command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("start firn-bench");
        Self { child, dir }
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Returns all processes below, and theirs.
    fn descendants(&self) -> Vec<Pid> {
        let mut found = vec![self.pid()];
        let mut at = 0;
        while let Some(&parent) = found.get(at) {
            found.extend(children_of(parent));
            at += 1;
        }
        found.split_off(1)
    }

    fn mounts(&self) -> usize {
        let mounts = fs::read_to_string("/proc/self/mounts").expect("the table of mounts");
        let dir = self.dir.path().to_str().expect("a plain path");
        mounts.lines().filter(|line| line.contains(dir)).count()
    }

    fn has_directory(&self) -> bool {
        let mut entries = fs::read_dir(self.dir.path()).expect("list");
        entries.next().is_some()
    }

    fn has_worker(&self) -> bool {
        let is_worker = |pid: &Pid| {
            let line = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero()));
            line.is_ok_and(|line| line.starts_with(b"firn-bench-worker"))
        };
        self.descendants().iter().any(is_worker)
    }

    fn wait_until(&mut self, what: &str, holds: impl Fn(&Self) -> bool) {
        let begin = Instant::now();
        while !holds(self) {
            let ended = self.child.try_wait().expect("look after it");
            assert!(ended.is_none(), "it ended before {what}");
            assert!(begin.elapsed() < Duration::from_secs(100), "no {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Sends it a signal, waits for its end and looks for what is left.
    fn end(self, signal: Signal) {
        let processes = self.descendants();
        kill_process(self.pid(), signal).expect("a signal");
        let code = self.assert_removed(&processes);
        assert_eq!(code, Some(128 + signal.as_raw()));
    }

    /// Waits for its end: its exit status. `processes` were its own.
    fn assert_removed(mut self, processes: &[Pid]) -> Option<i32> {
        let status = self.child.wait().expect("it ends");
        for &pid in processes {
            assert!(test_kill_process(pid).is_err(), "{pid:?} lives");
            let arenas = format!("firn-bench-{}", pid.as_raw_nonzero());
            let mut kept = fs::read_dir("/dev/shm").expect("list").flatten();
            let kept = kept.find(|entry| {
                let name = entry.file_name().to_string_lossy().into_owned();
                name == arenas || name.starts_with(&format!("{arenas}-"))
            });
            assert!(kept.is_none(), "{kept:?}");
        }
        assert_nothing_is_left(self.dir.path());
        status.code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // After a failed assertion.
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = kill_process(self.pid(), Signal::TERM);
            let _ = self.child.wait();
        }
    }
}

fn children_of(parent: Pid) -> Vec<Pid> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").expect("list").flatten() {
        let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        let found_parent = fields.split_whitespace().nth(1);
        if found_parent == Some(&parent.as_raw_pid().to_string()) {
            let pid = entry.file_name().to_string_lossy().parse();
            found.extend(pid.ok().and_then(Pid::from_raw));
        }
    }
    found
}

#[test]
fn a_benchmark_that_is_ended_leaves_nothing_wherever_it_was() {
    let mut running = Running::start(&[]);
    running.wait_until("a directory", Running::has_directory);
    running.end(Signal::TERM);
    let signals = [Signal::INT, Signal::TERM, Signal::HUP];
    for (count, signal) in (1..=5).zip(signals.into_iter().cycle()) {
        let mut running = Running::start(&[]);
        let what = format!("{count} mounts");
        running.wait_until(&what, |running| running.mounts() >= count);
        running.end(signal);
    }
    for more in [&["--baseline-only"][..], &[]] {
        let mut running = Running::start(more);
        running.wait_until("a worker", Running::has_worker);
        running.end(Signal::TERM);
    }
}

#[test]
fn a_benchmark_that_is_killed_leaves_nothing_either() {
    let mut running = Running::start(&[]);
    running.wait_until("a worker", Running::has_worker);
    let processes = running.descendants();
    let benchmark = children_of(running.pid())[0];
    kill_process(benchmark, Signal::KILL).expect("a signal");
    let code = running.assert_removed(&processes);
    assert_eq!(code, Some(128 + Signal::KILL.as_raw()));
}

#[test]
fn an_unknown_directory_is_an_error_that_names_the_option() {
    let output = Command::new(env!("CARGO_BIN_EXE_firn-bench"))
        .args(["checkpoint", "--dir", "/no/such/directory"])
        .output()
        .expect("start firn-bench");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("name another --dir"), "{errors}");
}
