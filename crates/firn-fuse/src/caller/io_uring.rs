//! Finds programs that use io_uring, whose files must go through the page cache.
//!
//! A FUSE file without page cache has a bug in the kernel: an asynchronous request at the current file offset does not
//! advance the offset, because each request has a copy of it (`fuse_direct_IO` in fs/fuse/file.c, Linux 6.18). So each
//! write of io_uring at the current offset would overwrite the write before. I/O through the page cache has no such
//! bug. It costs memory, and half of the throughput or more. So only files that a program with an io_uring opens use
//! the page cache.

use std::collections::HashMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How long a result for a thread is valid. A program makes a ring before it opens the files to use with it, and most
/// programs make their rings at their start.
const VALID_FOR: Duration = Duration::from_secs(1);
/// Maximum number of results that are remembered.
const REMEMBERED_MAX: usize = 1024;

/// Target of the link in /proc/PID/fd for the descriptor of a ring.
const RING: &[u8] = b"anon_inode:[io_uring]";

/// Recent results, by the thread that opened a file.
#[derive(Default)]
pub(crate) struct IoUringUsers(Mutex<HashMap<u32, RingResult>>);

/// Whether the process of a thread had an io_uring at some time.
#[derive(Clone, Copy)]
struct RingResult {
    read_at: Instant,
    has_ring: bool,
}

impl IoUringUsers {
    /// Whether the process of a thread has an io_uring. False if firnd (the process that serves the mount) may not read
    /// that.
    pub(crate) fn contains(&self, thread: u32) -> bool {
        let now = Instant::now();
        let last_result = self.0.lock().get(&thread).copied();
        if let Some(result) = last_result
            && now.duration_since(result.read_at) < VALID_FOR
        {
            return result.has_ring;
        }
        let result = RingResult {
            read_at: now,
            has_ring: has_ring(thread),
        };
        let mut results = self.0.lock();
        if results.len() >= REMEMBERED_MAX {
            results.clear();
        }
        results.insert(thread, result);
        result.has_ring
    }
}

/// Looks for the descriptor of a ring among those of a thread's process.
fn has_ring(thread: u32) -> bool {
    let descriptors = fs::read_dir(format!("/proc/{thread}/fd"));
    let mut links = descriptors.into_iter().flatten().flatten();
    links.any(|link| {
        fs::read_link(link.path()).is_ok_and(|target| target.as_os_str().as_bytes() == RING)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_no_ring_and_many_threads_are_not_remembered_for_ever() {
        let users = IoUringUsers::default();
        assert!(!users.contains(std::process::id()));
        for thread in 0..3 * REMEMBERED_MAX as u32 {
            // This process has no io_uring threads.
            assert!(!users.contains(u32::MAX - thread));
        }
        assert!(users.0.lock().len() <= REMEMBERED_MAX);
    }
}
