//! Every fuzz target in turn, each for a while.
//!
//! Without a sanitizer: that works with the stable compiler, and the parsers are safe Rust, so what a
//! fuzzer can find are panics, overflows and broken invariants, all of which are assertions here.

use anyhow::{Context, bail, ensure};

use super::{cargo, cargo_command, root, target_dir};

/// Builds all targets and runs each of `wanted` for `seconds`; all where `wanted` is empty. Inputs worth keeping go to
/// fuzz/corpus and serve the next run; inputs that failed go to fuzz/artifacts.
pub fn run(seconds: u64, wanted: &[String], seed: Option<u64>) -> anyhow::Result<()> {
    // libFuzzer takes 0 for no limit, and would never come to the second target.
    ensure!(seconds > 0, "--seconds must be at least 1");
    let mut targets = targets()?;
    if !wanted.is_empty() {
        if let Some(unknown) = wanted.iter().find(|name| !targets.contains(name)) {
            bail!(
                "there is no target `{unknown}`; there are: {}",
                targets.join(", ")
            );
        }
        targets.retain(|target| wanted.contains(target));
    }
    let target_dir = target_dir().join("fuzz");
    let target_dir = target_dir
        .to_str()
        .context("the target directory is not UTF-8")?;
    // The arena target's file; libFuzzer leaves by abort when it found something.
    let temporary = tempfile::tempdir().context("make a temporary directory")?;
    let fuzz = |verb| {
        let mut command = cargo_command(&[
            "fuzz",
            verb,
            "--sanitizer",
            "none",
            "--target-dir",
            target_dir,
        ]);
        command
            .current_dir(root())
            .env("PATH", tools_path())
            .env("TMPDIR", temporary.path());
        command
    };
    cargo(&mut fuzz("build")).context("if cargo-fuzz is missing, run scripts/setup")?;
    for target in targets {
        eprintln!("xtask: fuzz {target} for {seconds} s");
        let mut run = fuzz("run");
        // An input that takes half a minute is a hang; libFuzzer itself waits twenty.
        run.args([
            &target,
            "--",
            &format!("-max_total_time={seconds}"),
            "-timeout=30",
        ]);
        if let Some(seed) = seed {
            run.arg(format!("-seed={seed}"));
        }
        cargo(&mut run)?;
    }
    Ok(())
}

/// The names of the files in fuzz/fuzz_targets.
fn targets() -> anyhow::Result<Vec<String>> {
    let mut targets = Vec::new();
    for entry in
        std::fs::read_dir(root().join("fuzz/fuzz_targets")).context("read fuzz/fuzz_targets")?
    {
        let name = entry?
            .file_name()
            .into_string()
            .ok()
            .context("a target's name is not UTF-8")?;
        targets.extend(name.strip_suffix(".rs").map(str::to_owned));
    }
    targets.sort();
    Ok(targets)
}

/// PATH with the tools of scripts/setup before it.
fn tools_path() -> std::ffi::OsString {
    let mut path = root().join("target/tools/bin").into_os_string();
    if let Some(rest) = std::env::var_os("PATH") {
        path.push(":");
        path.push(rest);
    }
    path
}
