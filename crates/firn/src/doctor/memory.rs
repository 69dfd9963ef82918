//! Checks whether this host has the memory that an arena needs.
//!
//! An arena is a file on a tmpfs, so both the tmpfs and the memory of the host limit its size. A cgroup of this process
//! may limit the memory further. Pulls by RDMA also lock the arena's memory.

use std::path::{Path, PathBuf};

use firn_client::RuntimeFiles;
use firn_config::{Options, size_text};
use firn_format::geometry::Geometry;
use firn_format::quantity;
use firn_format::quote::quoted_path;
use rustix::process::{Resource, getrlimit};

use crate::doctor::{CheckSubject, Finding};

/// `f_type` of statfs(2) of the file systems whose pages are in memory.
const MEMORY_MAGICS: [u64; 3] = [
    0x0102_1994, // tmpfs
    0x8584_58f6, // ramfs
    0x9584_58f6, // hugetlbfs
];
/// Paths at which distributions install libfabric.
const LIBFABRIC: [&str; 4] = [
    "/usr/lib/x86_64-linux-gnu/libfabric.so.1",
    "/usr/lib/aarch64-linux-gnu/libfabric.so.1",
    "/usr/lib64/libfabric.so.1",
    "/usr/lib/libfabric.so.1",
];

/// Reports whether there is space for the arena that a mount would create now.
pub(crate) fn check_room(subject: &CheckSubject<'_>) -> Vec<Finding> {
    let options = subject.options;
    if let Some(arena) = own_arena(subject) {
        let arena = quoted_path(&arena);
        return vec![Finding::ok(format!(
            "the arena of this backing exists already: {arena}"
        ))];
    }
    let dir = match arena_dir(options) {
        Ok(dir) => dir,
        Err(text) => return vec![Finding::refused(text)],
    };
    let geometry = match geometry(options) {
        Ok(geometry) => geometry,
        Err(text) => return vec![Finding::refused(text)],
    };
    let needed = geometry.allocated_bytes();
    let mut findings = vec![judge_free_space(&dir, options, &geometry)];
    let limits = [
        ("this host", available_memory_bytes()),
        ("the cgroup of this process", cgroup_bytes_left()),
    ];
    for (whose, left) in limits {
        if let Some(left) = left.filter(|left| *left < needed) {
            findings.push(Finding::note(
                format!(
                    "{whose} has {} of memory left, but the arena needs {}",
                    quantity::bytes(left),
                    quantity::bytes(needed)
                ),
                smaller_arena_advice(&geometry, left),
            ));
        }
    }
    findings
}

/// Judges the free space of the directory `dir`, in which the arena would be created.
fn judge_free_space(dir: &Path, options: &Options, geometry: &Geometry) -> Finding {
    let name = quoted_path(dir);
    let (stat, kind) = match (rustix::fs::statvfs(dir), rustix::fs::statfs(dir)) {
        (Ok(stat), Ok(kind)) => (stat, kind.f_type as u64),
        (Err(errno), _) | (_, Err(errno)) => {
            let text = format!("{name} cannot be used for arenas: {errno}");
            return Finding::wrong(text, "mount a tmpfs at /dev/shm, or set FIRN_RUNTIME_DIR");
        }
    };
    let size = size_text(options.arena_bytes);
    if !MEMORY_MAGICS.contains(&kind) {
        let text = format!("{name} is not a tmpfs: arenas there are on a disk, and slow");
        return Finding::note(text, "set FIRN_RUNTIME_DIR or arena-dir to a tmpfs");
    }
    let needed = geometry.allocated_bytes();
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let is_limited = stat.f_blocks > 0;
    if is_limited && free < needed {
        let text = format!(
            "arena-size={size} needs {} in {name}, which has {} free",
            quantity::bytes(needed),
            quantity::bytes(free)
        );
        let enlarge = "or enlarge it (`mount -o remount,size=SIZE /dev/shm` as root; `docker run --shm-size=SIZE`)";
        return Finding::wrong(
            text,
            format!("{}, {enlarge}", smaller_arena_advice(geometry, free)),
        );
    }
    let free = if is_limited {
        quantity::bytes(free)
    } else {
        "no limit".into()
    };
    let needed = quantity::bytes(needed);
    Finding::ok(format!(
        "arena-size={size} needs {needed} in {name} ({free} free)"
    ))
}

/// Returns advice how to get an arena that fits into `free` bytes. If no arena is that small, the advice is to free
/// memory.
fn smaller_arena_advice(geometry: &Geometry, free: u64) -> String {
    match geometry.proposed_arena_bytes(free) {
        None => "free memory there: `firn status` lists what earlier mounts left".into(),
        Some(bytes) => format!("mount with -o arena-size={}M", bytes >> 20),
    }
}

/// Returns the arena that a mount of the backing has now, or would find from an earlier mount.
fn own_arena(subject: &CheckSubject<'_>) -> Option<PathBuf> {
    let backing = subject.backing?.canonicalize().ok()?;
    let files = RuntimeFiles::of(&backing, subject.options.arena_dir.as_deref()).ok()?;
    files.arena.exists().then_some(files.arena)
}

/// Returns the directory in which the arena would be created, or its nearest ancestor that exists. The error says why
/// there is no such directory.
fn arena_dir(options: &Options) -> Result<PathBuf, String> {
    let dir = match &options.arena_dir {
        Some(dir) => dir.clone(),
        None => firn_client::paths::runtime_dir().map_err(|error| error.to_string())?,
    };
    let existing = dir.ancestors().find(|dir| dir.is_dir());
    Ok(existing.unwrap_or(Path::new("/")).to_owned())
}

/// Returns the sizes of the parts of an arena with these options. The error says why the options are not possible.
fn geometry(options: &Options) -> Result<Geometry, String> {
    Geometry::new(options.arena_bytes, options.chunk_bytes).map_err(|error| error.to_string())
}

/// Returns how many bytes of memory this host has available (MemAvailable of /proc/meminfo). Returns `None` if this
/// is not known.
fn available_memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kib << 10)
}

/// Returns how many bytes of memory the limits of this process's cgroup and its ancestors still allow (cgroup v2).
/// Returns `None` if no limit is set.
fn cgroup_bytes_left() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let group = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let top = Path::new("/sys/fs/cgroup");
    let group = top.join(group);
    let groups = group.ancestors().take_while(|dir| dir.starts_with(top));
    let bytes_left = groups.filter_map(|dir| {
        let read_number = |name: &str| -> Option<u64> {
            let text = std::fs::read_to_string(dir.join(name)).ok()?;
            text.trim().parse().ok()
        };
        // Without a limit, `memory.max` is the word "max", which is not a number.
        let limit = read_number("memory.max")?;
        Some(limit.saturating_sub(read_number("memory.current")?))
    });
    bytes_left.min()
}

/// Reports how much memory may be locked. Only reads by libfabric need locked memory.
pub(crate) fn check_locked(_: &CheckSubject<'_>) -> Vec<Finding> {
    let Some(limit) = getrlimit(Resource::Memlock).current else {
        return vec![Finding::ok("no limit on locked memory (ulimit -l)")];
    };
    let limit = quantity::bytes(limit);
    let has_libfabric = LIBFABRIC.iter().any(|path| Path::new(path).exists());
    vec![if has_libfabric {
        Finding::note(
            format!(
                "at most {limit} can be locked (ulimit -l), and `firn pull` by RDMA locks the whole arena"
            ),
            "only for pulls by RDMA: `ulimit -l unlimited`; in a service LimitMEMLOCK=infinity; under Slurm PropagateResourceLimitsExcept=MEMLOCK",
        )
    } else {
        Finding::ok(format!(
            "at most {limit} can be locked (ulimit -l); only pulls by RDMA lock memory, and libfabric is not installed"
        ))
    }]
}
