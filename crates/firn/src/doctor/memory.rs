//! Checks whether this host has the memory that an arena needs.
//!
//! An arena is the file in shared memory with the data of a mount that is not in the backing yet. It is on a tmpfs, so
//! both the tmpfs and the memory of the host limit its size. A cgroup of this process may limit the memory further. A
//! pull (a copy by another host) that uses RDMA also locks the arena's memory.

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

/// Reports whether there is memory for the arena that a mount would create now. The arena is the file in shared memory
/// with the data that is not in the backing yet.
pub(crate) fn check_arena_memory(subject: &CheckSubject<'_>) -> Vec<Finding> {
    let options = subject.options;
    if let Some(arena) = existing_arena(subject) {
        return vec![Finding::ok(format!(
            "the arena of this backing exists already: {}",
            quoted_path(&arena)
        ))];
    }
    let dir = match arena_dir(options) {
        Ok(dir) => dir,
        Err(text) => return vec![Finding::refused(text)],
    };
    // The layout of the arena, from which the size of its memory follows.
    let geometry = match Geometry::new(options.arena_bytes, options.chunk_bytes) {
        Ok(geometry) => geometry,
        Err(error) => return vec![Finding::refused(error.to_string())],
    };
    let needed_bytes = geometry.allocated_bytes();
    let mut findings = vec![judge_free_space(&dir, options, &geometry)];
    let memory_limits = [
        ("this host", available_memory_bytes()),
        ("the cgroup of this process", cgroup_bytes_left()),
    ];
    for (limit_name, bytes_left) in memory_limits {
        let Some(bytes_left) = bytes_left else {
            // This limit does not exist, or cannot be read.
            continue;
        };
        if bytes_left < needed_bytes {
            findings.push(Finding::note(
                format!(
                    "{limit_name} has {} of memory left, but the arena needs {}",
                    quantity::bytes(bytes_left),
                    quantity::bytes(needed_bytes)
                ),
                smaller_arena_advice(&geometry, bytes_left),
            ));
        }
    }
    findings
}

/// Returns the finding on whether an arena (the file with the data of the mount) would fit in the directory `dir`, and
/// whether `dir` is in memory. `geometry` is the layout of that arena, and says how many bytes it needs.
fn judge_free_space(dir: &Path, options: &Options, geometry: &Geometry) -> Finding {
    let quoted_dir = quoted_path(dir);
    let (capacity, file_system) = match (rustix::fs::statvfs(dir), rustix::fs::statfs(dir)) {
        (Ok(capacity), Ok(file_system)) => (capacity, file_system),
        (Err(errno), _) | (_, Err(errno)) => {
            let text = format!("{quoted_dir} cannot be used for arenas: {errno}");
            return Finding::wrong(text, "mount a tmpfs at /dev/shm, or set FIRN_RUNTIME_DIR");
        }
    };
    if !MEMORY_MAGICS.contains(&(file_system.f_type as u64)) {
        let text = format!("{quoted_dir} is not a tmpfs: arenas there are on a disk, and slow");
        return Finding::note(text, "set FIRN_RUNTIME_DIR or arena-dir to a tmpfs");
    }
    let arena_size = size_text(options.arena_bytes);
    let needed_bytes = geometry.allocated_bytes();
    let needed = quantity::bytes(needed_bytes);
    // A tmpfs without a size limit reports 0 blocks.
    if capacity.f_blocks == 0 {
        return Finding::ok(format!(
            "arena-size={arena_size} needs {needed} in {quoted_dir}, a file system without a limit"
        ));
    }
    let free_bytes = capacity.f_bavail.saturating_mul(capacity.f_frsize);
    let free = quantity::bytes(free_bytes);
    if free_bytes >= needed_bytes {
        return Finding::ok(format!(
            "arena-size={arena_size} needs {needed} in {quoted_dir} ({free} free)"
        ));
    }
    Finding::wrong(
        format!("arena-size={arena_size} needs {needed} in {quoted_dir}, which has {free} free"),
        format!(
            "{}, or enlarge it (`mount -o remount,size=SIZE /dev/shm` as root; `docker run --shm-size=SIZE`)",
            smaller_arena_advice(geometry, free_bytes)
        ),
    )
}

/// Returns advice how to get an arena that fits into `free_bytes`. If no arena is that small, the advice is to free
/// memory.
fn smaller_arena_advice(geometry: &Geometry, free_bytes: u64) -> String {
    match geometry.proposed_arena_bytes(free_bytes) {
        None => "free memory there: `firn status` lists what earlier mounts left".into(),
        Some(bytes) => format!("mount with -o arena-size={}M", bytes >> 20),
    }
}

/// Returns the arena that a mount of the backing has now, or would find from an earlier mount.
fn existing_arena(subject: &CheckSubject<'_>) -> Option<PathBuf> {
    let backing = subject.backing?.canonicalize().ok()?;
    let files = RuntimeFiles::for_backing(&backing, subject.options.arena_dir.as_deref()).ok()?;
    files.arena.exists().then_some(files.arena)
}

/// Returns the directory in which the arena would be created, or its nearest ancestor that exists. The error says why
/// there is no such directory.
fn arena_dir(options: &Options) -> Result<PathBuf, String> {
    let dir = match &options.arena_dir {
        Some(dir) => dir.clone(),
        None => firn_client::paths::runtime_dir().map_err(|error| error.to_string())?,
    };
    let existing_dir = dir.ancestors().find(|dir| dir.is_dir());
    Ok(existing_dir.unwrap_or(Path::new("/")).to_owned())
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
    let own_group = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let root_dir = Path::new("/sys/fs/cgroup");
    let own_dir = root_dir.join(own_group);
    own_dir
        .ancestors()
        .take_while(|dir| dir.starts_with(root_dir))
        .filter_map(bytes_left_in_group)
        .min()
}

/// Returns how many bytes of memory the limit of the cgroup at `dir` still allows, or `None` if it has no limit.
fn bytes_left_in_group(dir: &Path) -> Option<u64> {
    let read_number = |name: &str| -> Option<u64> {
        let text = std::fs::read_to_string(dir.join(name)).ok()?;
        text.trim().parse().ok()
    };
    // Without a limit, `memory.max` is the word "max", which is not a number.
    let limit = read_number("memory.max")?;
    Some(limit.saturating_sub(read_number("memory.current")?))
}

/// Reports how much memory this user may lock. Only `firn pull` by RDMA, which uses libfabric, locks memory: all of the
/// arena, the file in shared memory with a mount's data.
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
