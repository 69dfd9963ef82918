//! Campaign: unmodified training and simulation programs on a mount with commit rules, which say when a checkpoint is
//! complete.
//!
//! The programs are too large for CI, so this campaign installs them first: the trainers below `target` by pip, and the
//! simulations from the packages of Debian.

use std::path::PathBuf;
use std::process::Command;

use anyhow::ensure;

use super::{cargo, system_with, target_dir};

/// Python packages of the trainers. Their newest versions are installed, as users install them.
const PACKAGES: [&str; 5] = [
    "ckpt-chaos",
    "torch",
    "transformers",
    "accelerate",
    "lightning",
];
/// Parts of these packages that no trainer on a CPU loads, such as compilers for GPUs. They are removed to save space.
const UNUSED: [&str; 3] = ["triton", "torch/include", "torch/test"];

/// Packages of Debian with the simulation programs.
const SIMULATIONS: [&str; 4] = [
    "gromacs",
    "openfoam",
    "quantum-espresso",
    "quantum-espresso-data",
];

/// Installs the programs that are missing, and runs the system tests that use them. `kills` is how often each program
/// is killed.
pub(super) fn run(kills: u64, seed: Option<u64>) -> anyhow::Result<()> {
    let python = install_trainers()?;
    let mut install = Command::new("apt-get");
    install.args(["install", "--yes", "--no-install-recommends"]);
    cargo(install.args(SIMULATIONS))?;
    let variables = [
        ("FIRN_RULES_KILLS", kills.to_string()),
        ("FIRN_RULES_PYTHON", python.display().to_string()),
    ];
    system_with("transactions", "rules_programs", &variables, seed)
}

/// Installs the trainers into a virtual environment below `target`, and returns its Python. Does nothing if that Python
/// can import all of them.
fn install_trainers() -> anyhow::Result<PathBuf> {
    let venv = target_dir().join("tools/rules-venv");
    let python = venv.join("bin/python");
    let check = "import ckpt_chaos, torch, transformers, accelerate, lightning";
    let mut found = Command::new(&python);
    if found
        .args(["-c", check])
        .output()
        .is_ok_and(|found| found.status.success())
    {
        return Ok(python);
    }
    let mut make = Command::new("python3");
    cargo(make.args(["-m", "venv"]).arg(&venv))?;
    let mut install = Command::new(&python);
    install.args(["-m", "pip", "install", "--quiet", "--no-cache-dir"]);
    cargo(install.args(PACKAGES))?;
    let mut site = Command::new(&python);
    let site = site.args([
        "-c",
        "import sysconfig; print(sysconfig.get_paths()['purelib'])",
    ]);
    let site = String::from_utf8(site.output()?.stdout)?;
    ensure!(!site.trim().is_empty(), "{} says nothing", python.display());
    for unused in UNUSED {
        let path = PathBuf::from(site.trim()).join(unused);
        if path.exists() {
            std::fs::remove_dir_all(path)?;
        }
    }
    Ok(python)
}
