//! The Python package over the program and the library that cargo built: each of its test programs, and mypy, which knows the
//! frameworks of the adapters by stubs.
//!
//! They need Debian's python3-pytest, python3-fsspec, python3-torch and mypy. The package as a wheel is in dist.rs.

use std::path::{Path, PathBuf};
use std::process::Command;

use firn_tests::sandbox::firn_binary;
use firn_tests::{Outcome, Sandbox, run};

/// The package's directory, python/ in the repository.
fn package() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../python")
}

/// A module of Debian's Python that runs in the package's directory.
fn module(sandbox: &Sandbox, name: &str, args: &[&str]) -> Outcome {
    let library = firn_binary().with_file_name("libfirn.so");
    assert!(
        library.exists(),
        "{library:?} is missing: run `cargo build -p firn-c`"
    );
    let mut command = Command::new("/usr/bin/python3");
    command.args(["-m", name]).args(args).current_dir(package());
    sandbox.environment(&mut command);
    command
        .env("FIRN_BIN", firn_binary())
        .env("FIRN_LIB", library)
        .env("PYTHONPATH", ".")
        .env("PYTHONDONTWRITEBYTECODE", "1");
    run(&mut command)
}

/// Runs one of the package's test programs.
#[track_caller]
fn pytest(name: &str, programs: &[&str]) {
    let sandbox = Sandbox::new(name);
    let temporary = format!("--basetemp={}", sandbox.join("pytest").display());
    let mut args = vec!["-q", "-p", "no:cacheprovider", &temporary];
    args.extend(programs);
    module(&sandbox, "pytest", &args).ok();
    assert!(
        sandbox.arenas().is_empty(),
        "a test of {programs:?} leaves an arena"
    );
    assert!(
        sandbox.processes().is_empty(),
        "a test of {programs:?} leaves a process"
    );
}

#[test]
fn checkpoints_of_python_count_as_a_whole_or_not_at_all() {
    pytest("py-checkpoint", &["tests/test_checkpoint.py"]);
}

#[test]
fn python_sees_states_waits_mounts_and_runs() {
    pytest("py-mount", &["tests/test_mount.py", "tests/test_header.py"]);
}

#[test]
fn fsspec_reads_and_writes_by_url() {
    pytest("py-fsspec", &["tests/test_fsspec.py"]);
}

#[test]
fn distributed_checkpoints_of_torch_count_as_a_whole_or_not_at_all() {
    pytest("py-torch", &["tests/test_torch.py"]);
}

#[test]
fn every_block_of_the_page_of_python_runs() {
    pytest("py-page", &["tests/test_page.py"]);
}

#[test]
fn types_of_the_python_package_are_right() {
    let sandbox = Sandbox::new("py-types");
    let cache = format!("--cache-dir={}", sandbox.join("mypy").display());
    module(&sandbox, "mypy", &["--strict", &cache, "firnfs"]).ok();
}
