//! Campaign: tests and measures Firn's Python package with the real frameworks, such as PyTorch.
//!
//! There are two sets of frameworks: the oldest and the newest releases with which the package is tested.
//! `python/tests/frameworks` has their lists. Each set is installed in a virtual environment below `target/tools`, by
//! uv from PyPI. This needs 5 GB of disk space.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use super::{build_release, cargo, root, target_dir};

/// The installer of Python packages, with its version.
const UV: &str = "uv==0.13.9";
/// The sets of frameworks, by the names of their lists. The first one is also compared with the stubs, and measured.
const SETS: [&str; 2] = ["newest", "oldest"];

/// How long a campaign is.
pub struct Length {
    /// Kills of a rank that overwrites a checkpoint.
    pub rounds: u64,
    /// Saves of each kind that are measured; 0: none.
    pub saves: u32,
}

/// Runs the tests with both sets of frameworks, and then the benchmark with the newest set.
pub fn run(length: &Length) -> anyhow::Result<()> {
    build_release(&["firn", "firn-preload", "firn-c"])?;
    let tools = target_dir().join("tools/python-adapters");
    let uv = install_uv(&tools)?;
    for set in SETS {
        let python = install_set(&uv, &tools, set)?;
        let mut tests = test_command(&python, length.rounds);
        if set == SETS[0] {
            compare_stubs(&python)?;
            // Only this set has all frameworks: some had no release yet at the time of the oldest set.
            tests.env("ALL_FRAMEWORKS", "1");
        }
        run_with_arenas(&mut tests)?;
    }
    if length.saves > 0 {
        measure(&python_of(&tools, SETS[0]), length.saves)?;
    }
    Ok(())
}

/// Returns the directory with the lists of frameworks.
fn frameworks() -> PathBuf {
    root().join("python/tests/frameworks")
}

/// Returns the path of the Python in the virtual environment of a set.
fn python_of(tools: &Path, set: &str) -> PathBuf {
    tools.join(set).join("bin/python")
}

/// Installs uv below `tools`, unless it is there, and returns its path.
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

/// Installs a set of frameworks in a virtual environment, and returns the path of its Python.
///
/// A copy of the list is written last. If it equals the list, the set is complete, and nothing is done.
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

/// Returns the directory in which a virtual environment has its packages.
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

/// Checks that the stubs of the frameworks equal the newest releases. Type checks without the frameworks use these
/// stubs.
fn compare_stubs(python: &Path) -> anyhow::Result<()> {
    let mut stubs = Command::new(python);
    stubs.arg(root().join("python/tests/make_stubs.py"));
    cargo(stubs.arg("--check").arg(site_packages(python)?))
}

/// Returns the command that runs the tests of the package. `rounds` is the number of kills.
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

/// Runs the benchmarks of saves and loads, with `rounds` measurements of each kind.
fn measure(python: &Path, rounds: u32) -> anyhow::Result<()> {
    for words in [&["bench/saves.py", "--preload"][..], &["bench/loads.py"]] {
        let mut bench = command(python);
        bench.args(words).arg("--rounds").arg(rounds.to_string());
        bench.arg("--work").arg(target_dir().join("tmp/saves"));
        run_with_arenas(&mut bench)?;
    }
    Ok(())
}

/// Returns a command that runs a Python program in the directory of the package, with the release build of Firn.
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

/// Runs a program with a separate runtime directory, so that no arena (memory file of a mount) is left afterwards.
fn run_with_arenas(command: &mut Command) -> anyhow::Result<()> {
    let runtime = Runtime::new()?;
    cargo(command.env("FIRN_RUNTIME_DIR", &runtime.0))
}

/// A runtime directory of Firn, which is removed when this value is dropped.
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
