//! Describes the machine and the file system on which a benchmark ran. Every report contains them, because figures
//! can only be compared on the same machine.

use std::path::Path;

use anyhow::Context;
use serde::Serialize;

/// The description of the machine at the head of every report.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// Processor model according to /proc/cpuinfo.
    pub processor: String,
    /// Number of CPUs that this process may use.
    pub cores: usize,
    /// Size of the main memory in GiB, rounded.
    pub memory_gib: u64,
    /// Kernel release.
    pub kernel: String,
    /// Whether this program is an optimised build.
    pub optimised: bool,
}

impl Machine {
    /// Describes this machine.
    pub fn here() -> Self {
        Self {
            processor: field("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown".into()),
            cores: cores(),
            memory_gib: memory_kib().div_ceil(1 << 20),
            kernel: rustix::system::uname()
                .release()
                .to_string_lossy()
                .into_owned(),
            optimised: !cfg!(debug_assertions),
        }
    }
}

impl std::fmt::Display for Machine {
    /// Writes the machine as one line of a report. A debug build of the benchmark is marked, because it is too slow.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            processor,
            cores,
            memory_gib,
            kernel,
            optimised,
        } = self;
        write!(
            f,
            "{processor}, {cores} cores, {memory_gib} GiB, Linux {kernel}"
        )?;
        if !optimised {
            write!(
                f,
                " (debug build: figures are for testing the benchmark only)"
            )?;
        }
        Ok(())
    }
}

/// Returns the number of CPUs that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// Returns the type of the file system that contains `path`, as the mount table names it. Returns `unknown` if no mount
/// contains it.
pub fn file_system_of(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let table = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    // The mount with the longest mount point that contains the path.
    let (mut longest, mut file_system) = (0, "unknown");
    for line in table.lines() {
        let mut fields = line.split(' ').skip(1);
        let (Some(point), Some(kind)) = (fields.next(), fields.next()) else {
            continue;
        };
        // A later mount over the same point hides the earlier one, hence `>=`.
        if path.starts_with(point) && point.len() >= longest {
            (longest, file_system) = (point.len(), kind);
        }
    }
    file_system.to_owned()
}

/// Returns the size of the main memory in KiB. Returns 0 if it is unknown.
fn memory_kib() -> u64 {
    kib_in("/proc/meminfo", "MemTotal").unwrap_or(0)
}

/// Returns the number in the line `name` of a file of /proc, such as `MemTotal:  16384 kB`.
fn kib_in(file: &str, name: &str) -> Option<u64> {
    field(file, name)?.split(' ').next()?.parse().ok()
}

/// Returns the text after the colon in the first line of a file of /proc that begins with `name`.
fn field(file: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// Returns the bytes of memory of a process that no file backs (RssAnon of proc_pid_status(5)).
pub fn private_bytes(pid: u32) -> anyhow::Result<u64> {
    let path = format!("/proc/{pid}/status");
    let kib = kib_in(&path, "RssAnon").with_context(|| format!("{path} has no RssAnon"))?;
    Ok(kib << 10)
}

/// Returns the bytes in the page cache that the kernel has not written to a device yet.
pub fn unwritten_bytes() -> anyhow::Result<u64> {
    let kib = |name| {
        kib_in("/proc/meminfo", name).with_context(|| format!("/proc/meminfo has no {name}"))
    };
    Ok((kib("Dirty")? + kib("Writeback")?) << 10)
}
