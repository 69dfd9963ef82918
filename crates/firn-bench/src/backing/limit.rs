//! Limits the writes per second to one block device, by means of the control groups of the kernel.
//!
//! * With cgroup version 2, this process moves into a group with a limit in `io.max`. The limit applies to all
//!   processes that it starts.
//! * With cgroup version 1 (blkio), the limit is set for the root group and for the group of this process. In version 1
//!   the root group can have a limit, and it contains the kernel threads that write back. The limit names only the
//!   device of the benchmark, so it slows down nothing else on the machine.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use firn_testfs::cleanup::{Guard, Leftover, expect};

/// Directory of the cgroup hierarchy of version 2.
const CGROUP_V2: &str = "/sys/fs/cgroup";
/// Directory of the blkio hierarchy of version 1.
const CGROUP_V1: &str = "/sys/fs/cgroup/blkio";

/// A limit that is in effect.
pub struct Limited {
    /// Guards that remove the limit when they are dropped.
    pub guards: Vec<Guard>,
    /// The controller that enforces the limit.
    pub controller: &'static str,
}

/// Limits the writes per second to a block device. Fails if the kernel has no controller for it, or without the rights
/// of root.
pub fn limit_writes(device: &str, writes: u64) -> anyhow::Result<Limited> {
    let number = std::fs::metadata(device)?.rdev();
    let major = rustix::fs::major(number);
    let minor = rustix::fs::minor(number);
    let device = format!("{major}:{minor}");
    let controllers = std::fs::read_to_string(format!("{CGROUP_V2}/cgroup.controllers"));
    if controllers.is_ok_and(|list| list.split_whitespace().any(|word| word == "io")) {
        return limit_by_v2(&device, writes);
    }
    if Path::new(CGROUP_V1)
        .join("blkio.throttle.write_iops_device")
        .exists()
    {
        return limit_by_v1(&device, writes);
    }
    bail!("no cgroup controller limits I/O here; mount cgroup2 with its io controller")
}

/// Sets the limit with cgroup version 2. `device` is `MAJOR:MINOR`.
fn limit_by_v2(device: &str, writes: u64) -> anyhow::Result<Limited> {
    let old_group = own_group("")?;
    let group = PathBuf::from(format!("{CGROUP_V2}/firn-bench-{}", std::process::id()));
    let restore_group = Leftover::Setting {
        file: format!("{CGROUP_V2}{old_group}/cgroup.procs").into(),
        text: std::process::id().to_string(),
    };
    // This process must leave the group before the group is removed. The cleanup after a crash begins with the last
    // entry, so the group is registered first. Guards are dropped from the first to the last.
    let remove_group = expect(Leftover::Cgroup(group.clone()));
    let guards = vec![expect(restore_group), remove_group];
    // The error is ignored: on most systems the controller is on already, and if not, the next writes fail.
    let _ = std::fs::write(format!("{CGROUP_V2}/cgroup.subtree_control"), "+io");
    std::fs::create_dir(&group).context("cannot make a cgroup; run as root")?;
    write_line(&group.join("io.max"), &format!("{device} wiops={writes}"))?;
    write_line(&group.join("cgroup.procs"), &std::process::id().to_string())?;
    Ok(Limited {
        guards,
        controller: "cgroup v2 io.max",
    })
}

/// Sets the limit with cgroup version 1: for the root group, which has the kernel threads that write back, and for the
/// group of this process. `device` is `MAJOR:MINOR`.
fn limit_by_v1(device: &str, writes: u64) -> anyhow::Result<Limited> {
    let own_group = own_group("blkio")?;
    let mut files = vec![PathBuf::from(format!(
        "{CGROUP_V1}/blkio.throttle.write_iops_device"
    ))];
    if own_group != "/" {
        files.push(PathBuf::from(format!(
            "{CGROUP_V1}{own_group}/blkio.throttle.write_iops_device"
        )));
    }
    let restore_on_drop = |file: &PathBuf| {
        expect(Leftover::Setting {
            file: file.clone(),
            text: format!("{device} 0"),
        })
    };
    let guards = files.iter().map(restore_on_drop).collect();
    for file in &files {
        write_line(file, &format!("{device} {writes}"))?;
    }
    Ok(Limited {
        guards,
        controller: "cgroup v1 blkio.throttle",
    })
}

/// Returns the path of the group of this process in the hierarchy of `controller`. An empty `controller` means version
/// 2.
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

/// Writes a line to a file of a control group.
fn write_line(file: &Path, line: &str) -> anyhow::Result<()> {
    std::fs::write(file, line)
        .with_context(|| format!("cannot write {line:?} to {}; run as root", file.display()))
}
