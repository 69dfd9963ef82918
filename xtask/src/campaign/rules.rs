//! Unmodified programs under commit rules. The trainers are installed first, below `target`, and the simulations from the distribution:
//! both are too large for CI.

use std::path::PathBuf;
use std::process::Command;

use anyhow::ensure;

use super::{cargo, system_with, target_dir};

/// What the trainers are made of. The versions are those of the day: it is they that users install.
const PACKAGES: [&str; 5] = [
    "ckpt-chaos",
    "torch",
    "transformers",
    "accelerate",
    "lightning",
];
/// Compilers for GPUs and headers, which no trainer on a CPU loads.
const UNUSED: [&str; 3] = ["triton", "torch/include", "torch/test"];

/// Debian's packages of the simulations.
const SIMULATIONS: [&str; 4] = [
    "gromacs",
    "openfoam",
    "quantum-espresso",
    "quantum-espresso-data",
];

/// Installs the trainers and the simulations where they are not yet, and runs the tests of programs with them.
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
