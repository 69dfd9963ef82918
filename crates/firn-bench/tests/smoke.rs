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
fn alternatives_stand_beside_firn_with_the_same_figures() {
    let dir = tempfile::tempdir().expect("a directory");
    let report = run(
        dir.path(),
        &["alternatives", "--backing", "local", "--processes", "2"],
    );
    let case = &report["cases"][0];
    let candidates = case["candidates"].as_array().expect("candidates");
    assert_eq!(
        names(&case["candidates"]),
        [
            "directly",
            "tmpfs, then cp",
            "plain FUSE passthrough",
            "firn",
            "firn + preload",
            "firn + preload, drain=demand"
        ]
    );
    for candidate in candidates {
        assert_eq!(
            names(&candidate["metrics"]),
            names(&candidates[0]["metrics"])
        );
        let figure = |name: &str| {
            let metrics = candidate["metrics"].as_array().expect("figures");
            let found = metrics.iter().find(|metric| metric["name"] == name);
            found.expect(name)["median"].as_f64().expect("a number")
        };
        assert!(figure("closed") > 0.0, "{candidate}");
        assert!(figure("durable") >= figure("closed"), "{candidate}");
        assert!(figure("restart") > 0.0, "{candidate}");
    }
    assert_nothing_is_left(dir.path());
}

#[test]
fn a_checkpoint_is_orchestrated_on_models_of_disks() {
    let dir = tempfile::tempdir().expect("a directory");
    let report = run(dir.path(), &["orchestrate", "--figure", "2b,3a,restart"]);
    let cases = report["cases"].as_array().expect("cases");
    let candidates = |case: &Value| -> Vec<String> {
        let names = names(&case["candidates"]);
        names.into_iter().map(str::to_owned).collect()
    };
    let [few, many, one_disk, restart] = &cases[..] else {
        panic!("{:?}", names(&report["cases"]));
    };
    assert_eq!(candidates(few), candidates(many));
    assert_eq!(
        candidates(few)[..3],
        ["striped", "vertical, natively", "Firn, vertical"]
    );
    assert_eq!(candidates(one_disk)[..1], ["interleaved, natively"]);
    assert_eq!(candidates(restart)[..1], ["striped"]);
    for candidate in cases.iter().flat_map(|case| case["candidates"].as_array()) {
        for candidate in candidate {
            let metrics = candidate["metrics"].as_array().expect("figures");
            // No disk is faster than its rate.
            let of_bytes = metrics
                .iter()
                .find(|metric| metric["name"] == "of the bytes' time");
            let found = of_bytes.expect("a figure")["median"].as_f64();
            assert!(found.expect("a number") >= 0.99, "{candidate}");
        }
    }
    assert_nothing_is_left(dir.path());
}

#[test]
fn a_file_that_clients_share_is_written_in_each_layout_on_each_model() {
    let dir = tempfile::tempdir().expect("a directory");
    let report = run(
        dir.path(),
        &[
            "shared",
            "--on",
            "local,disk,cached-disk,locks,index",
            "--block",
            "4K,64K",
        ],
    );
    let cases = report["cases"].as_array().expect("cases");
    let (index, cases) = cases.split_last().expect("cases");
    assert_eq!(cases.len(), 4 * 2);
    for case in cases {
        let found = names(&case["candidates"]);
        assert_eq!(
            found[..3],
            ["native", "Firn, plain", "Firn, logs"],
            "{case}"
        );
        let reads = !case["name"].as_str().expect("a name").contains("disk");
        let columns = names(&case["candidates"][2]["metrics"]);
        assert_eq!(columns.contains(&"read by others"), reads, "{columns:?}");
        for candidate in &case["candidates"].as_array().expect("candidates")[..3] {
            let written = candidate["metrics"][0]["median"].as_f64();
            assert!(written.expect("a number") > 0.0, "{candidate}");
        }
    }
    let patterns = names(&index["candidates"]);
    assert_eq!(patterns[0], "strided");
    let bytes = |at: usize| index["candidates"][at]["metrics"][0]["median"].as_f64();
    // Regular patterns are found.
    assert!(bytes(0).expect("a number") < bytes(3).expect("a number"));
    assert_nothing_is_left(dir.path());
}

/// A benchmark that is going to be ended.
struct Running {
    child: Child,
    dir: tempfile::TempDir,
}

impl Running {
    /// Begins to write to the model of locks, of which each of three clients has a mount; through Firn each has one more.
    fn start(layout: &str) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let args = ["shared", "--on", "locks", "--clients", "3", "--block", "4K"];
        let mut command = Command::new(env!("CARGO_BIN_EXE_firn-bench"));
        command.args(args).args(["--objects", "20000"]);
        command.args(["--layout", layout]);
        command.arg("--dir").arg(dir.path());
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

    /// All processes below, and theirs.
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
    let mut running = Running::start("log");
    running.wait_until("a directory", Running::has_directory);
    running.end(Signal::TERM);
    let signals = [Signal::INT, Signal::TERM, Signal::HUP];
    for (count, signal) in (1..=6).zip(signals.into_iter().cycle()) {
        let mut running = Running::start("log");
        let what = format!("{count} mounts");
        running.wait_until(&what, |running| running.mounts() >= count);
        running.end(signal);
    }
    for layout in ["native", "log"] {
        let mut running = Running::start(layout);
        running.wait_until("a worker", Running::has_worker);
        running.end(Signal::TERM);
    }
}

#[test]
fn a_benchmark_that_is_killed_leaves_nothing_either() {
    let mut running = Running::start("log");
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
