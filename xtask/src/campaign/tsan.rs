//! ThreadSanitizer over the tests of the crates whose threads share memory.
//!
//! The sanitizer is not yet stable in rustc; `RUSTC_BOOTSTRAP` lets the stable compiler use it, so no
//! second toolchain is needed. The standard library stays as it was compiled: what that leads to is
//! in `xtask/tsan.supp`. Symbols in reports, and so the suppressions, need llvm-symbolizer.

use std::process::Command;

use anyhow::{Context, ensure};

use super::{cargo, cargo_command, root, target_dir};

/// What is run of crates with threads over the arena. Of the engine, clients that publish while it takes in: the
/// rest of its tests have one thread.
const RUNS: [&[&str]; 2] = [
    &["--tests", "-p", "firn-arena", "-p", "firn-drain"],
    &["--test", "all", "-p", "firn-engine", "under_threads"],
];

/// System calls go through libc, where the sanitizer sees which memory they touch, and that an address
/// of a mapping that ended is another's now.
const FLAGS: &str =
    "-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer --cfg=rustix_use_libc";

/// Builds and runs the tests `rounds` times.
pub fn run(rounds: u64) -> anyhow::Result<()> {
    ensure!(rounds > 0, "--rounds must be at least 1");
    let host = host()?;
    for round in 1..=rounds {
        eprintln!("xtask: tsan, round {round} of {rounds}");
        for run in RUNS {
            // --target keeps the flags away from build scripts and macros.
            let mut test = cargo_command(&["test", "--target", &host]);
            test.args(run)
                .env("RUSTC_BOOTSTRAP", "1")
                .env("RUSTFLAGS", FLAGS)
                .env("CARGO_TARGET_DIR", target_dir().join("tsan"))
                .env(
                    "TSAN_OPTIONS",
                    format!("suppressions={}/xtask/tsan.supp", root().display()),
                );
            cargo(&mut test)?;
        }
    }
    Ok(())
}

/// The machine that rustc builds for unless told.
fn host() -> anyhow::Result<String> {
    let said = Command::new("rustc")
        .arg("-vV")
        .output()
        .context("cannot start rustc")?;
    let said = String::from_utf8_lossy(&said.stdout);
    said.lines()
        .find_map(|line| line.strip_prefix("host: "))
        .map(str::to_owned)
        .context("`rustc -vV` names no host")
}
