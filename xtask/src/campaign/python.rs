//! The Python package with the real frameworks: the oldest and the newest releases that it is tested with, and its bench.
//!
//! `python/tests/frameworks` has the lists of releases. Each goes into a virtual environment below `target/tools`, by uv of PyPI.
//! 5 GB of disk are needed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use super::{build_release, cargo, root, target_dir};

/// What installs the releases.
const UV: &str = "uv==0.13.9";
/// The lists, the one first whose stubs are compared.
const SETS: [&str; 2] = ["newest", "oldest"];

/// How long a campaign is.
pub struct Length {
    /// Kills of a rank that overwrites a checkpoint.
    pub rounds: u64,
    /// Saves of each kind that are measured; 0: none.
    pub saves: u32,
}

/// Runs the tests with both sets, then the bench with the newest.
pub fn run(length: &Length) -> anyhow::Result<()> {
    build_release(&["firn", "firn-preload", "firn-c"])?;
    let tools = target_dir().join("tools/python-adapters");
    let uv = install_uv(&tools)?;
    for set in SETS {
        let python = install_set(&uv, &tools, set)?;
        let mut tests = test_command(&python, length.rounds);
        if set == SETS[0] {
            compare_stubs(&python)?;
            // Not all of them had a release when the others had their oldest.
            tests.env("ALL_FRAMEWORKS", "1");
        }
        run_with_arenas(&mut tests)?;
    }
    if length.saves > 0 {
        measure(&python_of(&tools, SETS[0]), length.saves)?;
    }
    Ok(())
}

fn frameworks() -> PathBuf {
    root().join("python/tests/frameworks")
}

fn python_of(tools: &Path, set: &str) -> PathBuf {
    tools.join(set).join("bin/python")
}

fn install_uv(tools: &Path) -> anyhow::Result<PathBuf> {
    let to = tools.join("uv");
    let uv = to.join("bin/uv");
    if !uv.exists() {
        let mut pip = Command::new("/usr/bin/python3");
        pip.args(["-m", "pip", "install", "--quiet", "--no-deps"])
            .args(["--only-binary", ":all:", "--target"])
            .arg(&to)
            .arg(UV);
        cargo(&mut pip).context("install uv")?;
    }
    Ok(uv)
}

/// Makes the environment of a set, whole or not at all; gives its Python.
fn install_set(uv: &Path, tools: &Path, set: &str) -> anyhow::Result<PathBuf> {
    let list = frameworks().join(set).with_extension("txt");
    let wanted = fs::read(&list).context("read the list of releases")?;
    let python = python_of(tools, set);
    let done = tools.join(set).join("installed.txt");
    if fs::read(&done).is_ok_and(|found| found == wanted) {
        return Ok(python);
    }
    let mut venv = Command::new(uv);
    venv.args(["venv", "--quiet", "--clear", "--python", "/usr/bin/python3"]);
    cargo(venv.arg(tools.join(set)))?;
    let mut install = Command::new(uv);
    install
        .args(["pip", "install", "--quiet", "--no-cache", "--python"])
        .arg(&python)
        .arg("--override")
        .arg(frameworks().join("no_cuda.txt"))
        .arg("--requirement")
        .arg(&list);
    cargo(&mut install)?;
    let mut names = Command::new(&python);
    names.arg(frameworks().join("without_cuda.py"));
    cargo(names.arg(site_packages(&python)?))?;
    fs::write(&done, wanted).context("note what is installed")?;
    Ok(python)
}

fn site_packages(python: &Path) -> anyhow::Result<PathBuf> {
    let lib = python.with_file_name("../lib");
    for entry in fs::read_dir(&lib).with_context(|| format!("list {}", lib.display()))? {
        let found = entry?.path().join("site-packages");
        if found.is_dir() {
            return Ok(found);
        }
    }
    bail!("{} has no site-packages", lib.display())
}

/// The adapters are checked against stubs where no framework is: those are what the newest frameworks have.
fn compare_stubs(python: &Path) -> anyhow::Result<()> {
    let mut stubs = Command::new(python);
    stubs.arg(root().join("python/tests/make_stubs.py"));
    cargo(stubs.arg("--check").arg(site_packages(python)?))
}

fn test_command(python: &Path, rounds: u64) -> Command {
    let mut pytest = command(python);
    pytest
        .args(["-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"])
        .arg("--basetemp")
        .arg(target_dir().join("tmp/campaign-python"))
        .args(["tests/test_torch.py", "tests/test_fsspec.py"])
        .args(["tests/test_page.py", "tests/frameworks"])
        .env("FIRN_CRASH_ROUNDS", rounds.to_string());
    pytest
}

fn measure(python: &Path, rounds: u32) -> anyhow::Result<()> {
    for words in [&["bench/saves.py", "--preload"][..], &["bench/loads.py"]] {
        let mut bench = command(python);
        bench.args(words).arg("--rounds").arg(rounds.to_string());
        bench.arg("--work").arg(target_dir().join("tmp/saves"));
        run_with_arenas(&mut bench)?;
    }
    Ok(())
}

/// A Python program in the package's directory, which finds the release build.
fn command(python: &Path) -> Command {
    let built = target_dir().join("release");
    let mut command = Command::new(python);
    command
        .current_dir(root().join("python"))
        .env("PYTHONPATH", ".:tests")
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("JAX_PLATFORMS", "cpu")
        .env("FIRN_BIN", built.join("firn"))
        .env("FIRN_LIB", built.join("libfirn.so"));
    command
}

/// Runs a program whose arenas are in a directory of its own.
fn run_with_arenas(command: &mut Command) -> anyhow::Result<()> {
    let runtime = Runtime::new()?;
    cargo(command.env("FIRN_RUNTIME_DIR", &runtime.0))
}

/// Where the arenas of a program are; gone with it.
struct Runtime(PathBuf);

impl Runtime {
    fn new() -> anyhow::Result<Self> {
        use std::os::unix::fs::DirBuilderExt;

        let path = PathBuf::from(format!("/dev/shm/firn-campaign-{}", std::process::id()));
        let mut builder = fs::DirBuilder::new();
        builder.mode(0o700).create(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
