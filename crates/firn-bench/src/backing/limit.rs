//! A limit of writes per second on one block device, by the kernel's cgroups.
//!
//! * Version 2: `io.max` of a group that this process moves into, so that all it starts is limited.
//! * Version 1 (blkio): the limit is put on the root group and on this process's own, because there
//!   the root group can be limited, and kernel threads that write back are in it. Only the benchmark's
//!   own device is named, so nothing else on the machine is slowed.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use firn_testfs::cleanup::{Guard, Leftover, expect};

const V2: &str = "/sys/fs/cgroup";
const V1: &str = "/sys/fs/cgroup/blkio";

/// A limit in force.
pub struct Limited {
    /// Take it away.
    pub guards: Vec<Guard>,
    /// The controller that enforces it.
    pub controller: &'static str,
}

/// Limits `device`.
pub fn writes_per_s(device: &str, writes: u64) -> anyhow::Result<Limited> {
    let number = std::fs::metadata(device)?.rdev();
    let major = rustix::fs::major(number);
    let minor = rustix::fs::minor(number);
    let device = format!("{major}:{minor}");
    let controllers = std::fs::read_to_string(format!("{V2}/cgroup.controllers"));
    if controllers.is_ok_and(|list| list.split_whitespace().any(|word| word == "io")) {
        return unified(&device, writes);
    }
    if Path::new(V1)
        .join("blkio.throttle.write_iops_device")
        .exists()
    {
        return version_1(&device, writes);
    }
    bail!("no cgroup controller limits I/O here; mount cgroup2 with its io controller")
}

fn unified(device: &str, writes: u64) -> anyhow::Result<Limited> {
    let before = own_group("")?;
    let group = PathBuf::from(format!("{V2}/firn-bench-{}", std::process::id()));
    let back = Leftover::Setting {
        file: format!("{V2}{before}/cgroup.procs").into(),
        text: std::process::id().to_string(),
    };
    // In the list the group must come first: what comes last is removed first.
    let removed = expect(Leftover::Cgroup(group.clone()));
    let guards = vec![expect(back), removed];
    // Already on, on most systems.
    let _ = std::fs::write(format!("{V2}/cgroup.subtree_control"), "+io");
    std::fs::create_dir(&group).context("cannot make a cgroup; run as root")?;
    put(&group.join("io.max"), &format!("{device} wiops={writes}"))?;
    put(&group.join("cgroup.procs"), &std::process::id().to_string())?;
    Ok(Limited {
        guards,
        controller: "cgroup v2 io.max",
    })
}

fn version_1(device: &str, writes: u64) -> anyhow::Result<Limited> {
    let own = own_group("blkio")?;
    let mut files = vec![PathBuf::from(format!(
        "{V1}/blkio.throttle.write_iops_device"
    ))];
    if own != "/" {
        files.push(PathBuf::from(format!(
            "{V1}{own}/blkio.throttle.write_iops_device"
        )));
    }
    let unlimited = |file: &PathBuf| {
        expect(Leftover::Setting {
            file: file.clone(),
            text: format!("{device} 0"),
        })
    };
    let guards = files.iter().map(unlimited).collect();
    for file in &files {
        put(file, &format!("{device} {writes}"))?;
    }
    Ok(Limited {
        guards,
        controller: "cgroup v1 blkio.throttle",
    })
}

/// Path of this process's group in the hierarchy of `controller` (empty: version 2).
fn own_group(controller: &str) -> anyhow::Result<String> {
    let table = std::fs::read_to_string("/proc/self/cgroup")?;
    let mut lines = table.lines().filter_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        controllers
            .split(',')
            .any(|name| name == controller)
            .then_some(path)
    });
    Ok(lines.next().unwrap_or("/").to_owned())
}

fn put(file: &Path, line: &str) -> anyhow::Result<()> {
    std::fs::write(file, line)
        .with_context(|| format!("cannot write {line:?} to {}; run as root", file.display()))
}
