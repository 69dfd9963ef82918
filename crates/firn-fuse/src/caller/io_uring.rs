//! Which programs use io_uring.
//!
//! For a FUSE file without page cache, the kernel does not advance the file offset after an io_uring request at the current
//! offset: each asynchronous request has a copy of the offset (`fuse_direct_IO` in fs/fuse/file.c, Linux 6.18). Every write
//! would overwrite the one before. I/O through the page cache is right, so files that a program with an io_uring opens get the
//! page cache. That costs memory, and half of the throughput or more.

use std::collections::HashMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How long an answer about a thread is valid. A program makes its rings before it opens files for them, most do when
/// they start.
const HOLDS_FOR: Duration = Duration::from_secs(1);
/// Threads that are remembered at most.
const REMEMBERED_MAX: usize = 1024;

/// What a descriptor of a ring shows in /proc/PID/fd.
const RING: &[u8] = b"anon_inode:[io_uring]";

/// Threads whose processes were looked at lately, with what was seen.
#[derive(Default)]
pub(crate) struct IoUringUsers(Mutex<HashMap<u32, (Instant, bool)>>);

impl IoUringUsers {
    /// Whether the process of a thread has an io_uring; false where firnd may not look.
    pub(crate) fn contains(&self, thread: u32) -> bool {
        let now = Instant::now();
        let known = self.0.lock().get(&thread).copied();
        if let Some((seen, uses)) = known
            && now.duration_since(seen) < HOLDS_FOR
        {
            return uses;
        }
        let uses = has_ring(thread);
        let mut remembered = self.0.lock();
        if remembered.len() >= REMEMBERED_MAX {
            remembered.clear();
        }
        remembered.insert(thread, (now, uses));
        uses
    }
}

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
            // No such threads.
            assert!(!users.contains(u32::MAX - thread));
        }
        assert!(users.0.lock().len() <= REMEMBERED_MAX);
    }
}
