//! Checks of the memory that an arena needs: free space, limits of cgroups, and locked memory.

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
            "the arena of this backing is there: {arena}"
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
    let mut findings = vec![room_in(&dir, options, &geometry)];
    let limits = [
        ("this host", available_bytes()),
        ("the cgroup of this process", cgroup_bytes()),
    ];
    for (whose, left) in limits {
        if let Some(left) = left.filter(|left| *left < needed) {
            findings.push(Finding::note(
                format!(
                    "{whose} has {} of memory left, and the arena takes {}",
                    quantity::bytes(left),
                    quantity::bytes(needed)
                ),
                smaller(&geometry, left),
            ));
        }
    }
    findings
}

/// Judges the free space of the directory `dir`, in which the arena would be created.
fn room_in(dir: &Path, options: &Options, geometry: &Geometry) -> Finding {
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
        let text = format!("{name} is no tmpfs: arenas there are on a disk, and slow");
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
        return Finding::wrong(text, format!("{}, {enlarge}", smaller(geometry, free)));
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

/// Returns advice for a smaller arena that fits into `free` bytes.
fn smaller(geometry: &Geometry, free: u64) -> String {
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

/// Returns the nearest existing ancestor of the directory that would hold the arena. The error says why there is none.
fn arena_dir(options: &Options) -> Result<PathBuf, String> {
    let dir = match &options.arena_dir {
        Some(dir) => dir.clone(),
        None => firn_client::paths::runtime_dir().map_err(|error| error.to_string())?,
    };
    let existing = dir.ancestors().find(|dir| dir.is_dir());
    Ok(existing.unwrap_or(Path::new("/")).to_owned())
}

fn geometry(options: &Options) -> Result<Geometry, String> {
    Geometry::new(options.arena_bytes, options.chunk_bytes).map_err(|error| error.to_string())
}

/// Returns MemAvailable of /proc/meminfo in bytes.
fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kib << 10)
}

/// Returns the bytes that the limits of this process's cgroup and of its ancestors leave (cgroup v2).
fn cgroup_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let group = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let top = Path::new("/sys/fs/cgroup");
    let group = top.join(group);
    let groups = group.ancestors().take_while(|dir| dir.starts_with(top));
    let left = groups.filter_map(|dir| {
        let read = |name: &str| -> Option<u64> {
            let text = std::fs::read_to_string(dir.join(name)).ok()?;
            text.trim().parse().ok()
        };
        Some(read("memory.max")?.saturating_sub(read("memory.current")?))
    });
    left.min()
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
            "at most {limit} can be locked (ulimit -l); only pulls by RDMA lock memory, and libfabric is not here"
        ))
    }]
}
