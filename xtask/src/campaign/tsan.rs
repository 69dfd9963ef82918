//! Campaign: runs the tests of crates with threads that share memory under ThreadSanitizer, which finds data races.
//!
//! ThreadSanitizer is not stable in rustc yet. `RUSTC_BOOTSTRAP` lets the stable compiler use it, so no second
//! toolchain is needed. The standard library is not instrumented, which causes false reports; `xtask/tsan.supp`
//! suppresses them. llvm-symbolizer must be installed, because the suppressions name functions.

use std::process::Command;

use anyhow::{Context, ensure};

use super::{cargo, cargo_command, root, target_dir};

/// Arguments of cargo for each run. Of the engine only the tests in which clients write at the same time are run,
/// because its other tests have one thread.
const RUNS: [&[&str]; 2] = [
    &["--tests", "-p", "firn-arena", "-p", "firn-drain"],
    &["--test", "all", "-p", "firn-engine", "under_threads"],
];

/// Flags of the compiler. With the last one, rustix makes system calls through libc. There the sanitizer sees which
/// memory a call uses, and that an address was unmapped.
const FLAGS: &str =
    "-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer --cfg=rustix_use_libc";

/// Builds the tests with the sanitizer, and runs them `rounds` times. The first report of a race ends the campaign.
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

/// Returns the target for which rustc compiles by default.
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
