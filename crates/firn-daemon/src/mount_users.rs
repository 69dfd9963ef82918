//! Finds the processes that use a mount, in all mount namespaces.
//!
//! A mount namespace that is created while a Firn is mounted (a container, `unshare -m`) has its own copy of the mount.
//! An unmount here removes neither that copy nor the files that programs have open there. The kernel ends the
//! connection only when the last copy is gone. Bind mounts are copies too.
//!
//! All answers come from /proc, so no call here waits for the mount itself. A descriptor or directory is identified by
//! its mount number, a mapping by its device. Of other users' processes only root's firnd sees the files. A namespace
//! without processes has no users.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use firn_format::mountinfo;
use firn_format::quote::quoted_path;
use rustix::fs::{Mode, OFlags};

/// Limit of users that a message names; the rest are counted.
const NAMED_MAX: usize = 5;

/// The mounts of one file system in all namespaces that have processes.
pub(crate) struct FileSystemMounts {
    device: (u32, u32),
    mount_point: PathBuf,
    /// The numbers of the mounts; a number is unique among all namespaces.
    ids: HashSet<u64>,
    /// The mounts that an unmount by this firnd does not remove.
    copies: Vec<MountCopy>,
}

/// A further mount of the same file system, beside that of this firnd.
struct MountCopy {
    path: PathBuf,
    /// A process in whose namespace the copy is.
    seen_by: u32,
    /// The copy is a bind mount in firnd's own mount namespace.
    is_bound: bool,
}

/// A process that uses a mount.
pub(crate) struct MountUser {
    pid: u32,
    command: String,
    usage: Usage,
}

/// How a process uses a mount. Paths are relative to the mount point if they lie below it.
#[derive(Debug, PartialEq, Eq)]
enum Usage {
    /// The process has this file open.
    Open(PathBuf),
    /// The current directory of the process, or its root, is this directory.
    In(PathBuf),
    /// The process has this file mapped but not open.
    Maps(PathBuf),
}

impl FileSystemMounts {
    /// Finds the mounts of `device`, which this firnd has mounted at `mount_point`.
    pub(crate) fn find(device: (u32, u32), mount_point: &Path) -> Self {
        let mut mounts = Self {
            device,
            mount_point: mount_point.to_owned(),
            ids: HashSet::new(),
            copies: Vec::new(),
        };
        let own = std::process::id();
        let own_entries = mountinfo::parse(&mount_table(own));
        let top = mountinfo::on_top(&own_entries, mount_point).map(|entry| entry.id);
        // The tables are compared, and not the links `ns/mnt`: reading such a link waits for an exec of its process, which
        // another mount may hold up (`firn_process::has_memory`).
        let mut seen_tables = HashSet::new();
        for pid in std::iter::once(own).chain(processes()) {
            let table = mount_table(pid);
            if seen_tables.contains(&table) {
                continue;
            }
            for entry in mountinfo::parse(&table) {
                // A number is unique among all namespaces. A process with another root sees a part of its namespace.
                if entry.device == device && mounts.ids.insert(entry.id) && Some(entry.id) != top {
                    mounts.copies.push(MountCopy {
                        path: entry.mount_point,
                        seen_by: pid,
                        is_bound: pid == own,
                    });
                }
            }
            seen_tables.insert(table);
        }
        mounts
    }

    /// Returns whether there are mounts in addition to that of this firnd.
    pub(crate) fn has_copies(&self) -> bool {
        !self.copies.is_empty()
    }

    /// Describes one of the copies for a message; there must be one.
    pub(crate) fn describe_copies(&self) -> String {
        let first = &self.copies[0];
        let path = quoted_path(&first.path);
        let others = match self.copies.len() - 1 {
            0 => String::new(),
            others => format!(", and {others} more"),
        };
        if first.is_bound {
            format!("{path}{others}")
        } else {
            format!(
                "{path} in the mount namespace of process {}{others}",
                first.seen_by
            )
        }
    }

    /// Returns where copies are bound in this namespace, without those below another mount.
    pub(crate) fn bound_copy_paths(&self) -> Vec<&Path> {
        let entries = mountinfo::parse(&fs::read("/proc/self/mountinfo").unwrap_or_default());
        let is_on_top = |path: &Path| {
            mountinfo::on_top(&entries, path).is_some_and(|top| top.device == self.device)
        };
        let bound = self.copies.iter().filter(|copy| copy.is_bound);
        bound
            .map(|copy| copy.path.as_path())
            .filter(|path| is_on_top(path))
            .collect()
    }

    /// Returns the processes that use one of the mounts, without this one.
    pub(crate) fn users(&self) -> Vec<MountUser> {
        let own = std::process::id();
        let others = processes().filter(|pid| *pid != own);
        others
            .filter_map(|pid| {
                Some(MountUser {
                    pid,
                    command: fs::read_to_string(format!("/proc/{pid}/comm"))
                        .unwrap_or_default()
                        .trim_end()
                        .to_owned(),
                    usage: self.usage(pid)?,
                })
            })
            .collect()
    }

    /// Returns how a process uses one of the mounts; `None` if it does not.
    fn usage(&self, pid: u32) -> Option<Usage> {
        let process = PathBuf::from(format!("/proc/{pid}"));
        let open_file = || self.open_file(&process).map(Usage::Open);
        let directory = || self.directory(&process).map(Usage::In);
        let mapped_file = || self.mapped_file(&process).map(Usage::Maps);
        open_file().or_else(directory).or_else(mapped_file)
    }

    /// Returns the first file of the mounts that the process has open.
    fn open_file(&self, process: &Path) -> Option<PathBuf> {
        let mut descriptors = fs::read_dir(process.join("fdinfo")).ok()?.flatten();
        let found = descriptors.find(|descriptor| self.is_mount_of(&descriptor.path()))?;
        Some(self.path_of(&process.join("fd").join(found.file_name())))
    }

    /// Returns the current directory or the root of the process, if it is in one of the mounts.
    fn directory(&self, process: &Path) -> Option<PathBuf> {
        let link = ["cwd", "root"].iter().find(|link| {
            let path = process.join(link);
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            let path: Result<OwnedFd, _> = rustix::fs::open(path, flags, Mode::empty());
            path.is_ok_and(|path| {
                self.is_mount_of(Path::new(&format!(
                    "/proc/self/fdinfo/{}",
                    path.as_raw_fd()
                )))
            })
        })?;
        Some(self.path_of(&process.join(link)))
    }

    /// Returns the target of a link in /proc, relative to the mount point. The kernel answers without calling the
    /// mount.
    fn path_of(&self, link: &Path) -> PathBuf {
        let path = fs::read_link(link).unwrap_or_default();
        self.below_mount_point(&path)
    }

    fn below_mount_point(&self, path: &Path) -> PathBuf {
        let below = path.strip_prefix(&self.mount_point);
        below.unwrap_or(path).to_owned()
    }

    /// Returns whether a descriptor belongs to one of the mounts, from its fdinfo (proc(5)).
    fn is_mount_of(&self, fdinfo: &Path) -> bool {
        let text = fs::read_to_string(fdinfo).unwrap_or_default();
        let id = text.lines().find_map(|line| line.strip_prefix("mnt_id:"));
        id.and_then(|id| id.trim().parse().ok())
            .is_some_and(|id| self.ids.contains(&id))
    }

    fn mapped_file(&self, process: &Path) -> Option<PathBuf> {
        let maps = fs::read(process.join("maps")).unwrap_or_default();
        let mut lines = maps.split(|byte| *byte == b'\n');
        let line = lines.find(|line| mapped_device(line) == Some(self.device))?;
        let start = line
            .iter()
            .position(|byte| *byte == b'/')
            .unwrap_or(line.len());
        Some(self.below_mount_point(Path::new(OsStr::from_bytes(&line[start..]))))
    }
}

/// Returns the device in a line of /proc/PID/maps: the fourth field, in hexadecimal.
fn mapped_device(line: &[u8]) -> Option<(u32, u32)> {
    let mut fields = line.split(|byte| *byte == b' ');
    let (major, minor) = std::str::from_utf8(fields.nth(3)?).ok()?.split_once(':')?;
    Some((
        u32::from_str_radix(major, 16).ok()?,
        u32::from_str_radix(minor, 16).ok()?,
    ))
}

/// Describes users in a sentence: `python3 (process 12) has step_3/rank_0 open, bash (process 13) is in step_3`.
pub(crate) fn describe_users(users: &[MountUser]) -> String {
    let named = users.iter().take(NAMED_MAX);
    let mut words: Vec<_> = named
        .map(|user| {
            let command = quoted_path(Path::new(&user.command));
            format!("{command} (process {}) {}", user.pid, user.usage)
        })
        .collect();
    if users.len() > NAMED_MAX {
        words.push(format!("and {} more", users.len() - NAMED_MAX));
    }
    words.join(", ")
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open(path) if is_top(path) => f.write_str("has the top directory open"),
            Self::Open(path) => write!(f, "has {} open", quoted_path(path)),
            Self::In(path) if is_top(path) => f.write_str("is in it (its current directory)"),
            Self::In(path) => write!(f, "is in {} (its current directory)", quoted_path(path)),
            Self::Maps(path) => write!(f, "has {} mapped", quoted_path(path)),
        }
    }
}

/// Returns whether a path below the mount point is empty, which is the mount point itself.
fn is_top(path: &Path) -> bool {
    path.as_os_str().is_empty()
}

/// Returns the numbers of all visible processes.
fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns the mounts that a process sees, as mountinfo(5) shows them; empty if the process is not visible.
fn mount_table(process: u32) -> Vec<u8> {
    fs::read(format!("/proc/{process}/mountinfo")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_tells_its_device_in_hexadecimal() {
        let line = b"7f0000000000-7f0000001000 r--p 00000000 00:4f 12                 /mnt/a file";
        assert_eq!(mapped_device(line), Some((0, 0x4f)));
        assert_eq!(mapped_device(b""), None);
    }

    #[test]
    fn a_process_that_is_in_a_mount_uses_it_and_many_are_counted() {
        let entries = mountinfo::parse(&fs::read("/proc/self/mountinfo").unwrap());
        let here = std::env::current_dir().unwrap();
        let mount = mountinfo::holding(&entries, &here).unwrap();
        let mounts = FileSystemMounts::find(mount.device, &mount.mount_point);
        assert!(mounts.ids.contains(&mount.id));
        let own = mounts.usage(std::process::id());
        assert!(own.is_some());
        assert_eq!(
            mounts.directory(Path::new("/proc/self")),
            Some(mounts.below_mount_point(&here))
        );
        let nowhere = FileSystemMounts {
            device: (0, 0),
            mount_point: PathBuf::new(),
            ids: HashSet::new(),
            copies: Vec::new(),
        };
        // Anonymous memory has the device 0:0.
        assert!(!nowhere.has_copies() && nowhere.directory(Path::new("/proc/self")).is_none());
        let user = |pid| MountUser {
            pid,
            command: "python3".into(),
            usage: Usage::Open("step_3/rank_0".into()),
        };
        let many: Vec<_> = (1..9).map(user).collect();
        assert!(
            describe_users(&many)
                .ends_with("python3 (process 5) has step_3/rank_0 open, and 3 more")
        );
    }
}
