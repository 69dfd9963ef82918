//! Campaign: installs, uses and removes the packages of `make dist` in a minimal Debian system, and in a container
//! image that is made from it.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Context;

use super::{cargo, cargo_command, require_test, root, target_dir};

/// Release of Debian that is installed. debootstrap takes its packages from the mirror of this machine.
const RELEASE: &str = "bookworm";
/// Packages that the tests need beside the base system: to mount without root, to compile a program with libfirn, and
/// to install an rpm package and a Python wheel.
const INCLUDED: &str = "fuse3,gcc,libc6-dev,pkg-config,python3-venv,rpm";
/// Directory of the installed system. It gets another name when [`INCLUDED`] changes, so that a new system is made.
const ROOT: &str = "bookworm-python";

/// Builds the packages and the Debian system, and then runs the system tests of packages and containers.
pub fn run() -> anyhow::Result<()> {
    let packages = target_dir().join("dist");
    if packages.exists() {
        // Packages of an earlier version would be tested too.
        fs::remove_dir_all(&packages).context("remove the packages made before")?;
    }
    cargo(Command::new("make").arg("dist").current_dir(root()))?;
    let debian = target_dir().join("roots").join(ROOT);
    if !debian.exists() {
        debootstrap(&debian)?;
    }
    let target = ["test", "-p", "firn-tests", "--test", "life"];
    for tests in ["dist::", "containers::"] {
        require_test(&target, tests)?;
    }
    let mut test = cargo_command(&target);
    test.args([
        "--",
        "--nocapture",
        "--test-threads=1",
        "dist::",
        "containers::",
    ]);
    test.env("FIRN_DIST_PACKAGES", &packages)
        .env("FIRN_DIST_ROOT", &debian);
    cargo(&mut test)
}

/// Installs the Debian system in the directory `to`. If that fails, `to` does not exist.
fn debootstrap(to: &Path) -> anyhow::Result<()> {
    let half = to.with_extension("half");
    if half.exists() {
        fs::remove_dir_all(&half).context("remove a root that was not finished")?;
    }
    let mut command = Command::new("debootstrap");
    command.args(["--variant=minbase", "--include", INCLUDED, RELEASE]);
    cargo(command.arg(&half)).context("debootstrap (package debootstrap) makes the root")?;
    // fusermount3 needs this link. On a system that boots, systemd creates it.
    std::os::unix::fs::symlink("../proc/self/mounts", half.join("etc/mtab"))
        .context("link mtab")?;
    fs::rename(&half, to).context("name the root")
}
