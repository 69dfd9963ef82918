//! Which file systems syncfs(2) reaches.
//!
//! For a file system that has nothing of its own to say, syncfs(2) writes the pages that the kernel holds and
//! returns 0. Whether a server, or what lies below, has made them durable, or knows the new names at all, is another
//! matter. So only file systems are listed here whose kernel code answers for both; what is not listed is synced
//! file by file, which is never wrong.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use firn_format::mountinfo;
use parking_lot::Mutex;
use rustix::fs::{fstatfs, syncfs};

use super::reopen;
use crate::Result;

/// `f_type` of statfs(2) (linux/magic.h, and the file systems' own sources).
///
/// Left out, with the reason:
/// * FUSE (0x65735546): SYNCFS is sent to virtiofs only (fs/fuse/inode.c, `fuse_sync_fs`: `fc->sync_fs` is set by
///   virtio_fs.c and fuseblk), which has the same number as all the others.
/// * overlayfs (0x794c7630) syncs the file system of its upper layer, which may be any; ecryptfs (0xf15f) has no
///   `sync_fs` at all.
/// * Lustre, 9p, SMB, AFS, GPFS, and what is not in the kernel: no `sync_fs` that asks the server.
/// * NFS (0x6969) has no `sync_fs`: its write-back commits what is dirty, but kernels before 5.8 tell no error of it.
const REACHED: [u32; 14] = [
    0x0000_ef53, // ext2, ext3, ext4
    0x5846_5342, // xfs
    0x9123_683e, // btrfs
    0xf2f5_2010, // f2fs
    0xca45_1a4e, // bcachefs
    0x2fc1_2fc1, // zfs
    0x3153_464a, // jfs
    0x5265_4973, // reiserfs
    0x0000_3434, // nilfs2
    0x0116_1970, // gfs2
    0x7461_636f, // ocfs2
    0x00c3_6400, // CephFS: `ceph_sync_fs` waits for the servers' journals and objects
    0x0102_1994, // tmpfs: nothing is durable, whatever is called
    0x8584_58f6, // ramfs
];

/// The file systems that a backing has met, by device number.
#[derive(Debug)]
pub(super) struct Devices {
    root_dev: u64,
    is_root_one_by_one: bool,
    /// Opened for reading: syncfs(2) does not take `O_PATH`.
    readable_root: OwnedFd,
    /// Whether their files are synced one by one.
    others: Mutex<HashMap<u64, bool>>,
}

/// Unknown where statfs(2) fails: the safe way.
fn is_reached(fd: BorrowedFd<'_>) -> bool {
    // `f_type` has another width on some machines; the numbers have 32 bits.
    fstatfs(fd).is_ok_and(|stat| REACHED.contains(&(stat.f_type as u32)))
}

impl Devices {
    pub(super) fn new(root_dev: u64, readable_root: OwnedFd) -> Result<Self> {
        let is_root_one_by_one = !is_reached(readable_root.as_fd());
        Ok(Self {
            root_dev,
            is_root_one_by_one,
            readable_root,
            others: Mutex::default(),
        })
    }

    /// Whether files of the file system `dev`, which `fd` is on, are synced one by one.
    pub(super) fn is_synced_one_by_one(&self, dev: u64, fd: BorrowedFd<'_>) -> bool {
        if dev == self.root_dev {
            return self.is_root_one_by_one;
        }
        if let Some(known) = self.others.lock().get(&dev) {
            return *known;
        }
        let is_one_by_one = !is_reached(fd);
        self.others.lock().insert(dev, is_one_by_one);
        is_one_by_one
    }

    /// syncfs(2) of the file system `dev`, which the directory `fd` is on; `None` where that does not reach it.
    pub(super) fn syncfs(&self, dev: u64, fd: BorrowedFd<'_>) -> Option<Result<()>> {
        if self.is_synced_one_by_one(dev, fd) {
            return None;
        }
        if dev == self.root_dev {
            return Some(syncfs(&self.readable_root));
        }
        Some(reopen::dir_to_sync(fd).and_then(syncfs))
    }
}

/// Where other file systems are mounted below `top`, which is below `root`: paths from `root`. All are absolute.
/// Without mounts of Firn, which have their own backing, and those that are only there when they are used.
pub(super) fn mounts_below(top: &[u8], root: &[u8]) -> Vec<Vec<u8>> {
    let text = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    let entries = mountinfo::parse(&text);
    entries
        .iter()
        .filter_map(|entry| path_below(entry, top, root))
        .collect()
}

fn path_below(mount: &mountinfo::Entry, top: &[u8], root: &[u8]) -> Option<Vec<u8>> {
    if matches!(mount.fs_type.as_str(), mountinfo::FIRN | "autofs") {
        return None;
    }
    let mount_point = mount.mount_point.as_os_str().as_bytes();
    let strip = |top: &[u8]| {
        let top = if top == b"/" { b"" } else { top };
        mount_point
            .strip_prefix(top)?
            .strip_prefix(b"/")
            .map(<[u8]>::to_vec)
    };
    strip(top)?;
    strip(root).filter(|path| !path.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_below_a_directory_are_found_in_mountinfo() {
        let mount = |at: &str, kind: &str| {
            let line = format!("36 35 98:0 / {at} rw,noatime master:1 - {kind} source rw");
            mountinfo::parse(line.as_bytes()).remove(0)
        };
        let found = |at, kind| path_below(&mount(at, kind), b"/data/top", b"/data");
        assert_eq!(
            found("/data/top/a\\040b", "ext4"),
            Some(b"top/a b".to_vec())
        );
        assert_eq!(found("/data/top/a", "fuse.sshfs"), Some(b"top/a".to_vec()));
        assert_eq!(found("/data/top/a", "fuse.firn"), None);
        assert_eq!(found("/data/topper", "ext4"), None);
        assert_eq!(found("/data/top", "ext4"), None);
        assert_eq!(
            path_below(&mount("/x", "ext4"), b"/", b"/"),
            Some(b"x".to_vec())
        );
    }
}
