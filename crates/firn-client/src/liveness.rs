//! Checks whether firnd, the process that serves a mount, is alive. The check asks the kernel, so it works even if the
//! sockets or the runtime directory are gone.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use firn_trust::open_private_file;
use rustix::fs::{AtFlags, CWD, FlockOperation, OFlags, StatxFlags, flock, statx};
use rustix::io::Errno;

use crate::find::Mount;
use crate::paths::open_runtime_dir;

/// State of the firnd of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// firnd serves the mount.
    Alive,
    /// firnd has ended, and its mount is still in the mount tree.
    Dead,
    /// firnd does not answer within the time limit.
    Silent,
    /// The kernel returned another error, which says nothing about firnd.
    Unknown(Errno),
}

impl Mount {
    /// Checks whether the firnd of this mount is alive. Returns [`Liveness::Silent`] if the kernel gives no answer
    /// within `timeout`.
    ///
    /// A stub tree (a mount point without FUSE) is not a kernel mount. For it, the lock on the file of the arena, the
    /// mount's memory, gives the answer: firnd has that lock as long as it lives.
    pub fn liveness(&self, timeout: Duration) -> Liveness {
        if self.is_tree {
            return if is_arena_locked(self) {
                Liveness::Alive
            } else {
                Liveness::Dead
            };
        }
        let (sender, answer) = mpsc::channel();
        let mount_point = self.mount_point.clone();
        // The call runs on its own thread, because it blocks for ever if firnd is stopped.
        std::thread::spawn(move || sender.send(check_mount_point(&mount_point)));
        answer.recv_timeout(timeout).unwrap_or(Liveness::Silent)
    }
}

/// Checks whether a mount point is alive, without a time limit.
pub fn check_mount_point(path: &Path) -> Liveness {
    // AT_STATX_FORCE_SYNC is necessary: without it the kernel may answer from cached attributes.
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_FORCE_SYNC;
    match statx(CWD, path, flags, StatxFlags::TYPE) {
        Ok(_) => Liveness::Alive,
        // ECONNABORTED: the connection was aborted by fusectl or by umount -f (fuse_dev.c).
        Err(Errno::NOTCONN | Errno::CONNABORTED) => Liveness::Dead,
        Err(errno) => Liveness::Unknown(errno),
    }
}

/// Returns whether a process has the lock of the arena of a stub tree. firnd has it as long as it lives. Returns
/// false if the arena cannot be opened.
fn is_arena_locked(tree: &Mount) -> bool {
    let Ok(Some(dir)) = open_runtime_dir(&tree.runtime_dir, tree.user_id) else {
        return false;
    };
    let arena_path = tree.files().arena;
    let Some(arena_name) = arena_path.file_name() else {
        return false;
    };
    let Ok(arena) = open_private_file(dir.as_fd(), Path::new(arena_name), OFlags::RDONLY) else {
        return false;
    };
    // firnd has an exclusive lock, so a shared one is refused.
    flock(&arena, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_answers_is_not_a_dead_mount() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(check_mount_point(dir.path()), Liveness::Alive);
        assert_eq!(
            check_mount_point(&dir.path().join("none")),
            Liveness::Unknown(Errno::NOENT)
        );
    }
}
