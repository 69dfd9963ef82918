//! The file systems that syncfs(2) makes durable.
//!
//! syncfs(2) writes the kernel's pages and returns 0, even if the file system's own sync does nothing more. Its server
//! may then not have made the pages durable, and may not even know of new names. So [`SYNCFS_SUFFICES`] lists only file
//! systems with kernel code that handles both. On any other file system each file is synced separately, which is always
//! right.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use firn_format::mountinfo;
use parking_lot::Mutex;
use rustix::fs::{fstatfs, syncfs};

use super::lock::RangeOwner;
use super::reopen;
use crate::Result;

/// Numbers (`f_type` of statfs(2)) of the file systems that syncfs(2) makes durable. They are from linux/magic.h and
/// the sources of the file systems.
///
/// Left out, with the reason:
/// * FUSE (0x65735546): the kernel sends SYNCFS only to virtiofs and fuseblk (fs/fuse/inode.c, `fuse_sync_fs`), which
///   have the same number as all other FUSE file systems.
/// * overlayfs (0x794c7630): it syncs the file system of its upper layer, which may be any. ecryptfs (0xf15f) has no
///   `sync_fs`.
/// * Lustre, 9p, SMB, AFS, GPFS, and file systems outside the kernel: they have no `sync_fs` that makes the server
///   sync.
/// * NFS (0x6969): it has no `sync_fs`. Its write-back commits dirty pages, but kernels before 5.8 report no error of
///   it.
const SYNCFS_SUFFICES: [u32; 14] = [
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
    0x0102_1994, // tmpfs: never durable, so separate syncs would achieve nothing more
    0x8584_58f6, // ramfs: likewise
];

/// File systems that were seen in a backing, by device number.
#[derive(Debug)]
pub(super) struct Devices {
    root_dev: u64,
    /// Whether each file of the root's file system is synced separately.
    is_root_synced_one_by_one: bool,
    /// The owner of range locks in the file system of the root.
    pub(super) range_owner: RangeOwner,
    /// The top directory of the backing, opened for reading, because syncfs(2) refuses an `O_PATH` descriptor.
    readable_root: OwnedFd,
    /// For each other file system: whether its files are synced one by one.
    others: Mutex<HashMap<u64, bool>>,
}

/// Returns the number of the file system of `fd` (`f_type` of statfs(2)); `None` if statfs(2) fails.
fn file_system_type(fd: BorrowedFd<'_>) -> Option<u32> {
    // The width of `f_type` differs between architectures; the numbers have 32 bits.
    fstatfs(fd).ok().map(|stat| stat.f_type as u32)
}

/// Returns whether syncfs(2) makes a file system durable. False, which is always right, if its type is unknown.
fn syncfs_suffices(file_system: Option<u32>) -> bool {
    file_system.is_some_and(|number| SYNCFS_SUFFICES.contains(&number))
}

impl Devices {
    pub(super) fn new(root_dev: u64, readable_root: OwnedFd) -> Result<Self> {
        let file_system = file_system_type(readable_root.as_fd());
        Ok(Self {
            root_dev,
            is_root_synced_one_by_one: !syncfs_suffices(file_system),
            range_owner: RangeOwner::in_file_system(file_system),
            readable_root,
            others: Mutex::default(),
        })
    }

    /// Whether files of the file system `dev` are synced one by one. `fd` is an object on it.
    pub(super) fn is_synced_one_by_one(&self, dev: u64, fd: BorrowedFd<'_>) -> bool {
        if dev == self.root_dev {
            return self.is_root_synced_one_by_one;
        }
        if let Some(is_one_by_one) = self.others.lock().get(&dev) {
            return *is_one_by_one;
        }
        let is_one_by_one = !syncfs_suffices(file_system_type(fd));
        self.others.lock().insert(dev, is_one_by_one);
        is_one_by_one
    }

    /// Calls syncfs(2) on the file system `dev`; `fd` is a directory on it. `None`: syncfs(2) does not make it durable.
    pub(super) fn syncfs(&self, dev: u64, fd: BorrowedFd<'_>) -> Option<Result<()>> {
        if self.is_synced_one_by_one(dev, fd) {
            return None;
        }
        if dev == self.root_dev {
            return Some(syncfs(&self.readable_root));
        }
        Some(reopen::open_dir_to_sync(fd).and_then(syncfs))
    }
}

/// Returns the mount points of other file systems below `top`, as paths from `root`. `top` is `root` or below it; both
/// are absolute. Leaves out mounts of Firn, which have their own backing, and mounts that appear only when they are
/// used (autofs).
pub(super) fn mounts_below(top: &[u8], root: &[u8]) -> Vec<Vec<u8>> {
    let text = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    let entries = mountinfo::parse(&text);
    entries
        .iter()
        .filter_map(|entry| sync_path_of_mount(entry, top, root))
        .collect()
}

/// Returns the path of a mount point, relative to `root`, if its file system must be synced with the tree at `top`.
/// Returns `None` if it is not below `top`, or is a mount of Firn or of automount.
fn sync_path_of_mount(mount: &mountinfo::Entry, top: &[u8], root: &[u8]) -> Option<Vec<u8>> {
    if matches!(mount.fs_type.as_str(), mountinfo::FIRN | "autofs") {
        return None;
    }
    let mount_point = mount.mount_point.as_os_str().as_bytes();
    let is_below_top = relative_path(mount_point, top).is_some();
    if !is_below_top {
        return None;
    }
    relative_path(mount_point, root)
        .filter(|path| !path.is_empty())
        .map(<[u8]>::to_vec)
}

/// Returns the path of `path` from the directory `dir`. Returns `None` if it is not below `dir`. Both are absolute.
fn relative_path<'a>(path: &'a [u8], dir: &[u8]) -> Option<&'a [u8]> {
    let prefix = if dir == b"/" { b"" } else { dir };
    path.strip_prefix(prefix)?.strip_prefix(b"/")
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
        let found = |at, kind| sync_path_of_mount(&mount(at, kind), b"/data/top", b"/data");
        assert_eq!(
            found("/data/top/a\\040b", "ext4"),
            Some(b"top/a b".to_vec())
        );
        assert_eq!(found("/data/top/a", "fuse.sshfs"), Some(b"top/a".to_vec()));
        assert_eq!(found("/data/top/a", "fuse.firn"), None);
        assert_eq!(found("/data/topper", "ext4"), None);
        assert_eq!(found("/data/top", "ext4"), None);
        assert_eq!(
            sync_path_of_mount(&mount("/x", "ext4"), b"/", b"/"),
            Some(b"x".to_vec())
        );
    }
}
