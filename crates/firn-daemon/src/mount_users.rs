//! Finds the processes that use a mount, in all mount namespaces.
//!
//! A mount namespace that is created while the mount exists (a container, `unshare -m`) has its own copy of the mount.
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
use std::os::fd::AsRawFd;
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
    /// A process that has the copy in its namespace.
    seen_by: u32,
    /// The copy is a bind mount in firnd's own mount namespace.
    is_bound: bool,
}

/// A process that uses a mount.
pub(crate) struct MountUser {
    pid: u32,
    command: String,
    usage: MountUsage,
}

/// How a process uses a mount. Paths are relative to the mount point if they lie below it.
#[derive(Debug, PartialEq, Eq)]
enum MountUsage {
    /// The process has this file open.
    Open(PathBuf),
    /// The current directory of the process, or its root, is this directory.
    In(PathBuf),
    /// The process has this file mapped but not open.
    Maps(PathBuf),
}

impl FileSystemMounts {
    /// Finds all mounts of the file system `device`, in all mount namespaces that have processes. This process has
    /// mounted it at `mount_point`; the other mounts are its copies.
    pub(crate) fn find(device: (u32, u32), mount_point: &Path) -> Self {
        let mut mounts = Self {
            device,
            mount_point: mount_point.to_owned(),
            ids: HashSet::new(),
            copies: Vec::new(),
        };
        let own_pid = std::process::id();
        let own_entries = mountinfo::parse(&mount_table(own_pid));
        let own_mount_id = mountinfo::on_top(&own_entries, mount_point).map(|entry| entry.id);
        // The tables are compared, and not the links `ns/mnt`: reading such a link waits for an exec of its process,
        // which another mount may hold up (`firn_process::has_memory`).
        let mut seen_tables = HashSet::new();
        for pid in std::iter::once(own_pid).chain(visible_processes()) {
            let table = mount_table(pid);
            if seen_tables.contains(&table) {
                continue;
            }
            for entry in mountinfo::parse(&table) {
                // A number is unique among all namespaces. A process with another root sees a part of its namespace.
                let is_new = entry.device == device && mounts.ids.insert(entry.id);
                if is_new && Some(entry.id) != own_mount_id {
                    mounts.copies.push(MountCopy {
                        path: entry.mount_point,
                        seen_by: pid,
                        is_bound: pid == own_pid,
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

    /// Describes one of the copies of the mount (other mounts of the same file system) for a message; there must be
    /// one.
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
        let mut paths = Vec::new();
        for copy in &self.copies {
            if copy.is_bound && is_on_top(&copy.path) {
                paths.push(copy.path.as_path());
            }
        }
        paths
    }

    /// Returns the processes that use one of the mounts (an open file, a mapping, or their directory), without this
    /// process. A process that cannot be read is left out.
    pub(crate) fn users(&self) -> Vec<MountUser> {
        let own_pid = std::process::id();
        let mut users = Vec::new();
        for pid in visible_processes() {
            if pid == own_pid {
                continue;
            }
            let Some(usage) = self.find_usage(pid) else {
                continue;
            };
            let command = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            users.push(MountUser {
                pid,
                command: command.trim_end().to_owned(),
                usage,
            });
        }
        users
    }

    /// Returns how a process uses one of the mounts; `None` if it does not.
    fn find_usage(&self, pid: u32) -> Option<MountUsage> {
        let process = PathBuf::from(format!("/proc/{pid}"));
        if let Some(path) = self.find_open_file(&process) {
            return Some(MountUsage::Open(path));
        }
        if let Some(path) = self.find_directory(&process) {
            return Some(MountUsage::In(path));
        }
        let path = self.find_mapped_file(&process)?;
        Some(MountUsage::Maps(path))
    }

    /// Returns the first file of the mounts that the process has open.
    fn find_open_file(&self, process: &Path) -> Option<PathBuf> {
        let mut descriptors = fs::read_dir(process.join("fdinfo")).ok()?.flatten();
        let descriptor = descriptors.find(|entry| self.has_fd_in_mounts(&entry.path()))?;
        Some(self.path_of_link(&process.join("fd").join(descriptor.file_name())))
    }

    /// Returns the current directory or the root of the process, if it is in one of the mounts.
    fn find_directory(&self, process: &Path) -> Option<PathBuf> {
        for link_name in ["cwd", "root"] {
            let link = process.join(link_name);
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            let Ok(descriptor) = rustix::fs::open(&link, flags, Mode::empty()) else {
                continue;
            };
            let fdinfo = format!("/proc/self/fdinfo/{}", descriptor.as_raw_fd());
            if self.has_fd_in_mounts(Path::new(&fdinfo)) {
                return Some(self.path_of_link(&link));
            }
        }
        None
    }

    /// Returns the target of a link in /proc, relative to the mount point. The kernel answers without calling the
    /// mount.
    fn path_of_link(&self, link: &Path) -> PathBuf {
        let target = fs::read_link(link).unwrap_or_default();
        self.below_mount_point(&target)
    }

    /// Returns a path relative to the mount point if it lies below it, or else the path as it is.
    fn below_mount_point(&self, path: &Path) -> PathBuf {
        path.strip_prefix(&self.mount_point)
            .unwrap_or(path)
            .to_owned()
    }

    /// Returns whether a descriptor belongs to one of the mounts, from its fdinfo (proc(5)).
    fn has_fd_in_mounts(&self, fdinfo: &Path) -> bool {
        let text = fs::read_to_string(fdinfo).unwrap_or_default();
        let Some(mount_id) = text.lines().find_map(|line| line.strip_prefix("mnt_id:")) else {
            return false;
        };
        match mount_id.trim().parse() {
            Ok(mount_id) => self.ids.contains(&mount_id),
            Err(_) => false,
        }
    }

    /// Returns the first file of the mounts that the process has mapped.
    fn find_mapped_file(&self, process: &Path) -> Option<PathBuf> {
        let maps = fs::read(process.join("maps")).unwrap_or_default();
        let mut lines = maps.split(|byte| *byte == b'\n');
        let line = lines.find(|line| mapped_device(line) == Some(self.device))?;
        // The path is the last field. It begins with the first slash of the line.
        let path_start = line
            .iter()
            .position(|byte| *byte == b'/')
            .unwrap_or(line.len());
        let path = Path::new(OsStr::from_bytes(&line[path_start..]));
        Some(self.below_mount_point(path))
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
    let mut descriptions = Vec::new();
    for user in users.iter().take(NAMED_MAX) {
        let command = quoted_path(Path::new(&user.command));
        descriptions.push(format!("{command} (process {}) {}", user.pid, user.usage));
    }
    if users.len() > NAMED_MAX {
        descriptions.push(format!("and {} more", users.len() - NAMED_MAX));
    }
    descriptions.join(", ")
}

impl fmt::Display for MountUsage {
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
fn visible_processes() -> impl Iterator<Item = u32> {
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
        let own = mounts.find_usage(std::process::id());
        assert!(own.is_some());
        assert_eq!(
            mounts.find_directory(Path::new("/proc/self")),
            Some(mounts.below_mount_point(&here))
        );
        let nowhere = FileSystemMounts {
            device: (0, 0),
            mount_point: PathBuf::new(),
            ids: HashSet::new(),
            copies: Vec::new(),
        };
        // Anonymous memory has the device 0:0.
        assert!(!nowhere.has_copies() && nowhere.find_directory(Path::new("/proc/self")).is_none());
        let user = |pid| MountUser {
            pid,
            command: "python3".into(),
            usage: MountUsage::Open("step_3/rank_0".into()),
        };
        let many: Vec<_> = (1..9).map(user).collect();
        assert!(
            describe_users(&many)
                .ends_with("python3 (process 5) has step_3/rank_0 open, and 3 more")
        );
    }
}
