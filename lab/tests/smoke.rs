//! The experiments run on their models, compare what they say they compare, and leave nothing behind. Figures are not
//! judged here.
//!
//! Needs FUSE. The laboratory builds the `firn` program and the preload library that it measures.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// Runs an experiment in `dir` and returns its report.
fn run(dir: &Path, args: &[&str]) -> Value {
    let report = dir.join("report.json");
    let output = Command::new(env!("CARGO_BIN_EXE_firn-lab"))
        .args(args)
        .args(["--quick", "--repeats", "1"])
        .arg("--dir")
        .arg(dir)
        .arg("--json")
        .arg(&report)
        .output()
        .expect("start firn-lab");
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

#[test]
fn all_figures_are_written_as_reports_and_pictures() {
    let dir = tempfile::tempdir().expect("a directory");
    let out = tempfile::tempdir().expect("a directory");
    let output = Command::new(env!("CARGO_BIN_EXE_firn-lab"))
        .args([
            "all",
            "--quick",
            "--repeats",
            "1",
            "--only",
            "cprfs-figure-7",
        ])
        .arg("--dir")
        .arg(dir.path())
        .arg("--out")
        .arg(out.path())
        .output()
        .expect("start firn-lab");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let report = fs::read_to_string(out.path().join("cprfs-figure-7.json")).expect("a report");
    let report: Value = serde_json::from_str(&report).expect("a report is JSON");
    assert_eq!(
        names(&report["cases"][0]["candidates"])[1],
        "firn",
        "beside the paper's way"
    );
    let picture = fs::read_to_string(out.path().join("cprfs-figure-7.svg")).expect("a picture");
    assert!(picture.starts_with("<svg"), "{picture}");
    assert_nothing_is_left(dir.path());
}
