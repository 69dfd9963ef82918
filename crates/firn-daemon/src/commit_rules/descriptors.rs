//! Finds a process that still has a file open for writing after one of its descriptors was closed.
//!
//! FUSE reports each close(2). It reports the end of the last descriptor only after that close has returned. A
//! descriptor that was duplicated by dup(2) or fork(2) may still write. So at a close firnd (the process that serves
//! the mount) reads /proc of the closing process and of its descendants.
//!
//! The kernel removes a descriptor from the process's table before it reports the close, so the closed descriptor is
//! not found.
//!
//! The process may close the descriptor because it executes another program. So only files in /proc are read that do
//! not wait for the end of an exec (see [`firn_process::has_memory`]); a link `fd/N` would.

use std::collections::BTreeSet;
use std::fs;

use firn_format::mountinfo;

/// Limit of processes that are examined; further descendants are ignored.
const PROCESSES_MAX: usize = 4096;

/// A process that has a file open for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Holder {
    pub(super) process: u32,
    /// Whether all its descriptors of the file are closed when it executes a program (FD_CLOEXEC).
    pub(super) closes_at_exec: bool,
}

/// Returns a process that has the file open for writing, among `process` and its descendants; `None` if there is none.
///
/// The file is identified by its inode number and the type of its file system. If another mount of Firn has a file of
/// the same number, a close here counts only with the release of the last descriptor.
pub(super) fn find_holder(process: u32, inode: u64, fs_type: &str) -> Option<Holder> {
    let mut known_processes = BTreeSet::from([process]);
    let mut to_examine = vec![process];
    while let Some(process) = to_examine.pop() {
        let flags = flags_of_writing_descriptors(process, inode, fs_type);
        if !flags.is_empty() {
            return Some(Holder {
                process,
                closes_at_exec: flags.iter().all(|flags| flags & libc::O_CLOEXEC != 0),
            });
        }
        for child in children_of(process) {
            if known_processes.len() < PROCESSES_MAX && known_processes.insert(child) {
                to_examine.push(child);
            }
        }
    }
    None
}

/// Returns the children of all threads of a process.
fn children_of(process: u32) -> Vec<u32> {
    let mut children = Vec::new();
    let Ok(threads) = fs::read_dir(format!("/proc/{process}/task")) else {
        return children;
    };
    for thread in threads.flatten() {
        let Ok(numbers) = fs::read_to_string(thread.path().join("children")) else {
            continue;
        };
        children.extend(
            numbers
                .split_ascii_whitespace()
                .filter_map(|number| number.parse::<u32>().ok()),
        );
    }
    children
}

/// Returns the open(2) flags of each descriptor by which a process has the file with this inode number open for
/// writing; empty if the process cannot be read. `fs_type` is the type of the file's file system.
fn flags_of_writing_descriptors(process: u32, inode: u64, fs_type: &str) -> Vec<i32> {
    let mut flags = Vec::new();
    let Ok(entries) = fs::read_dir(format!("/proc/{process}/fdinfo")) else {
        return flags;
    };
    for entry in entries.flatten() {
        let fdinfo = fs::read_to_string(entry.path()).unwrap_or_default();
        let Some(descriptor) = Descriptor::parse(&fdinfo) else {
            continue;
        };
        if descriptor.is_for_writing()
            && descriptor.inode.is_none_or(|number| number == inode)
            && is_mount_of_type(process, descriptor.mount_id, fs_type)
        {
            flags.push(descriptor.flags);
        }
    }
    flags
}

/// Returns whether mount `mount_id`, as a process sees it, has the file system type `fs_type`.
fn is_mount_of_type(process: u32, mount_id: u64, fs_type: &str) -> bool {
    let table = fs::read(format!("/proc/{process}/mountinfo")).unwrap_or_default();
    let entries = mountinfo::parse(&table);
    entries
        .iter()
        .any(|entry| entry.id == mount_id && entry.fs_type == fs_type)
}

/// A descriptor as /proc/PID/fdinfo shows it (proc(5)).
struct Descriptor {
    mount_id: u64,
    /// `None` before Linux 5.14.
    inode: Option<u64>,
    /// Flags of open(2), with O_CLOEXEC.
    flags: i32,
}

impl Descriptor {
    /// Parses the text of a file in fdinfo; `None` if a field is missing.
    fn parse(fdinfo: &str) -> Option<Self> {
        let value = |field| {
            let mut lines = fdinfo.lines();
            lines.find_map(|line| Some(line.strip_prefix(field)?.trim()))
        };
        Some(Self {
            mount_id: value("mnt_id:")?.parse().ok()?,
            inode: value("ino:").and_then(|inode| inode.parse().ok()),
            flags: i32::from_str_radix(value("flags:")?, 8).ok()?,
        })
    }

    fn is_for_writing(&self) -> bool {
        self.flags & libc::O_ACCMODE != libc::O_RDONLY
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;
    use std::process::{Command, Stdio, id};
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_file_is_held_by_a_duplicate_and_by_a_child_and_not_by_a_reader() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("held-on-by-a-copy");
        let file = File::create(&path).expect("create");
        let inode = file.metadata().expect("metadata").ino();
        let entries = mountinfo::parse(&fs::read("/proc/self/mountinfo").expect("read"));
        let mount = mountinfo::holding(&entries, dir.path()).expect("a mount");
        // Other tests of this process start programs, which have copies of all descriptors until their exec ends.
        let wait_for_holder = |expected: Option<Holder>| {
            let deadline = Instant::now() + Duration::from_secs(10);
            loop {
                let found = find_holder(id(), inode, &mount.fs_type);
                if found == expected {
                    return;
                }
                assert!(Instant::now() < deadline, "{found:?}, not {expected:?}");
                thread::sleep(Duration::from_millis(1));
            }
        };
        let copy = file.try_clone().expect("dup");
        drop(file);
        let holder = Holder {
            process: id(),
            closes_at_exec: true,
        };
        wait_for_holder(Some(holder));
        assert_eq!(find_holder(id(), inode, "another"), None);
        let mut child = {
            let mut command = Command::new("cat");
            command.stdin(Stdio::piped()).stdout(copy);
            command.spawn().expect("cat")
        };
        drop(File::open(&path).expect("open"));
        let reader = File::open(&path).expect("open");
        let holder = Holder {
            process: child.id(),
            closes_at_exec: false,
        };
        wait_for_holder(Some(holder));
        drop(child.stdin.take());
        child.wait().expect("wait");
        wait_for_holder(None);
        drop(reader);
    }
}
