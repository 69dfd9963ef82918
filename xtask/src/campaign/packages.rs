//! The packages of `make dist` in a root that has next to nothing, and in an image over it.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Context;

use super::{cargo, cargo_command, require_test, root, target_dir};

/// Release whose packages make the root; debootstrap takes them from the machine's mirror.
const RELEASE: &str = "bookworm";
/// What the tests use there beside the base system: a mount without root, a program with libfirn, rpm, a wheel in a
/// virtual environment.
const INCLUDED: &str = "fuse3,gcc,libc6-dev,pkg-config,python3-venv,rpm";
/// Name of the root, which changes with what is in it.
const ROOT: &str = "bookworm-python";

/// Makes the packages, then runs the tests of packages with them.
pub fn run() -> anyhow::Result<()> {
    let packages = target_dir().join("dist");
    if packages.exists() {
        // Those of another version would be tested too.
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

/// Makes the root `to`, whole or not at all.
fn debootstrap(to: &Path) -> anyhow::Result<()> {
    let half = to.with_extension("half");
    if half.exists() {
        fs::remove_dir_all(&half).context("remove a root that was not finished")?;
    }
    let mut command = Command::new("debootstrap");
    command.args(["--variant=minbase", "--include", INCLUDED, RELEASE]);
    cargo(command.arg(&half)).context("debootstrap (package debootstrap) makes the root")?;
    // fusermount3 asks for it; on a system that boots, systemd makes it.
    std::os::unix::fs::symlink("../proc/self/mounts", half.join("etc/mtab"))
        .context("link mtab")?;
    fs::rename(&half, to).context("name the root")
}
