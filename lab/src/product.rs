//! The firn program and its library that the laboratory measures: those of this repository, built as this program was.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use firn_bench::supervisor::FIRN_VARIABLE;

/// Builds them where cargo started this program, and returns where firn is.
pub fn build() -> anyhow::Result<PathBuf> {
    if let Some(program) = std::env::var_os(FIRN_VARIABLE) {
        return Ok(program.into());
    }
    if let Some(cargo) = std::env::var_os("CARGO") {
        let mut command = Command::new(cargo);
        command
            .args(["build", "--quiet", "-p", "firn", "-p", "firn-preload"])
            .current_dir(repository());
        if !cfg!(debug_assertions) {
            command.arg("--release");
        }
        let status = command.status().context("cannot start cargo")?;
        ensure!(status.success(), "{command:?} failed");
    }
    let program = target_dir().join(profile()).join("firn");
    ensure!(
        program.is_file(),
        "{} is missing: run the laboratory by `cargo run`, or name --firn",
        program.display()
    );
    Ok(program)
}

/// Where the repository lies.
pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("lab/ lies in the repository")
}

/// Where cargo builds the workspace of the repository.
pub fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => repository().join(dir),
        None => repository().join("target"),
    }
}

fn profile() -> &'static str {
    if cfg!(debug_assertions) {
        "debug"
    } else {
        "release"
    }
}
