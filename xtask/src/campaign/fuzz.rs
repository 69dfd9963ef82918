//! Campaign: fuzzes each parser of stored or received bytes for some time.
//!
//! The fuzzer runs without a sanitizer, because sanitizers are not stable in rustc. The parsers are safe Rust, so it
//! can find panics, overflows and broken invariants, and assertions report all of these.

use anyhow::{Context, bail, ensure};

use super::{cargo, cargo_command, root, target_dir};

/// Builds all fuzz targets, and runs the `wanted` ones for `seconds` each, or all if `wanted` is empty. The first
/// failure ends the campaign.
///
/// Useful inputs are stored in fuzz/corpus, from which the next run begins. An input that fails is stored in
/// fuzz/artifacts.
pub fn run(seconds: u64, wanted: &[String], seed: Option<u64>) -> anyhow::Result<()> {
    // For libFuzzer 0 means no limit, so the second target would never run.
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
    // For the file of the target `arena`. libFuzzer ends by abort after a finding, so the target cannot remove it.
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
        // An input that takes 30 seconds counts as a hang. The default of libFuzzer is 20 minutes.
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
