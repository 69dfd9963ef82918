//! Finds a process that still has a file open for writing after one of its descriptors was closed.
//!
//! FUSE reports each close(2). It reports the end of the last descriptor only after that close has returned. A
//! descriptor that was duplicated by dup(2) or fork(2) may still write. So at a close firnd reads /proc of the process
//! and of its descendants.
//!
//! The kernel removes a descriptor from the process's table before it reports the close, so the closed descriptor is
//! not found.
//!
//! Links in /proc are read and not followed, so no call here waits for a file system.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::ffi::OsStrExt;

/// Limit of processes that are examined; further descendants are ignored.
const PROCESSES_MAX: usize = 4096;

/// Returns `process` or a descendant that has the file at `path` of a mount open for writing; `None` if there is none.
pub(super) fn find_holder(process: u32, path: &[u8]) -> Option<u32> {
    let mut seen = BTreeSet::from([process]);
    let mut next = vec![process];
    while let Some(process) = next.pop() {
        if has_open(process, path) {
            return Some(process);
        }
        for child in children_of(process) {
            if seen.len() < PROCESSES_MAX && seen.insert(child) {
                next.push(child);
            }
        }
    }
    None
}

/// Returns the children of all threads of a process.
fn children_of(process: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{process}/task"));
    let threads = threads.into_iter().flatten().flatten();
    let lists =
        threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    let numbers = |list: String| -> Vec<u32> {
        let words = list.split_ascii_whitespace();
        words.filter_map(|word| word.parse().ok()).collect()
    };
    lists.flat_map(numbers).collect()
}

/// Returns whether a process has the file open for writing. The answer for an unreadable process is false.
fn has_open(process: u32, path: &[u8]) -> bool {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{process}/fd")) else {
        return false;
    };
    descriptors.flatten().any(|descriptor| {
        let target = fs::read_link(descriptor.path());
        let is_file = target.is_ok_and(|target| is_path(target.as_os_str().as_bytes(), path));
        let number = descriptor.file_name();
        is_file && is_for_writing(process, &number.to_string_lossy())
    })
}

/// Returns whether a path of the system ends with `path`, which is relative to a mount point.
fn is_path(found: &[u8], path: &[u8]) -> bool {
    let above = found.strip_suffix(path);
    above.is_some_and(|above| above.ends_with(b"/"))
}

/// Returns whether a descriptor was opened for writing.
fn is_for_writing(process: u32, descriptor: &str) -> bool {
    let info = fs::read_to_string(format!("/proc/{process}/fdinfo/{descriptor}"));
    let info = info.unwrap_or_default();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & libc::O_ACCMODE != libc::O_RDONLY)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::process::{Command, Stdio, id};

    use super::*;

    #[test]
    fn a_file_is_held_by_a_duplicate_and_by_a_child_and_not_by_a_reader() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("held-on-by-a-copy");
        let name = b"held-on-by-a-copy";
        let file = File::create(&path).expect("create");
        let copy = file.try_clone().expect("dup");
        drop(file);
        assert_eq!(find_holder(id(), name), Some(id()));
        let mut child = {
            let mut command = Command::new("cat");
            command.stdin(Stdio::piped()).stdout(copy);
            command.spawn().expect("cat")
        };
        drop(File::open(&path).expect("open"));
        let reader = File::open(&path).expect("open");
        assert_eq!(find_holder(id(), name), Some(child.id()));
        drop(child.stdin.take());
        child.wait().expect("wait");
        assert_eq!(find_holder(id(), name), None);
        drop(reader);
    }
}
