//! Whether the firnd of a mount lives: asked of the kernel, which knows it whatever became of sockets and runtime
//! directories.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use firn_trust::open_private_file;
use rustix::fs::{AtFlags, CWD, FlockOperation, OFlags, StatxFlags, flock, statx};
use rustix::io::Errno;

use crate::find::Mount;
use crate::paths::open_runtime_dir;

/// What is known of the firnd of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// It serves the mount.
    Living,
    /// It has ended, and its mount is still in the tree.
    Dead,
    /// It does not answer within the time.
    Silent,
    /// The kernel does not sender.
    Unknown(Errno),
}

impl Mount {
    /// Asks the kernel, for `patience` at most. A stub tree is no mount: whether its arena is locked tells.
    pub fn liveness(&self, patience: Duration) -> Liveness {
        if self.is_tree {
            return if is_locked(self) {
                Liveness::Living
            } else {
                Liveness::Dead
            };
        }
        let (sender, answer) = mpsc::channel();
        let mount_point = self.mount_point.clone();
        // On a thread of its own: a stopped firnd makes it wait for ever.
        std::thread::spawn(move || sender.send(of_mount_point(&mount_point)));
        answer.recv_timeout(patience).unwrap_or(Liveness::Silent)
    }
}

/// Asks the kernel whether a mount point is alive, without a time limit.
pub fn of_mount_point(path: &Path) -> Liveness {
    // AT_STATX_FORCE_SYNC: without it the kernel may answer from what it remembers of the directory.
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_FORCE_SYNC;
    match statx(CWD, path, flags, StatxFlags::TYPE) {
        Ok(_) => Liveness::Living,
        // ECONNABORTED: the connection was aborted by fusectl or by umount -f (fuse_dev.c).
        Err(Errno::NOTCONN | Errno::CONNABORTED) => Liveness::Dead,
        Err(errno) => Liveness::Unknown(errno),
    }
}

fn is_locked(tree: &Mount) -> bool {
    let Ok(Some(dir)) = open_runtime_dir(&tree.runtime_dir, tree.user_id) else {
        return false;
    };
    let name = tree.files().arena;
    let Some(name) = name.file_name() else {
        return false;
    };
    let Ok(arena) = open_private_file(dir.as_fd(), Path::new(name), OFlags::RDONLY) else {
        return false;
    };
    flock(&arena, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_answers_is_not_a_dead_mount() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(of_mount_point(dir.path()), Liveness::Living);
        assert_eq!(
            of_mount_point(&dir.path().join("none")),
            Liveness::Unknown(Errno::NOENT)
        );
    }
}
