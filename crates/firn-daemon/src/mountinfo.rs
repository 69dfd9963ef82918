//! Finds the Firn mounts in `/proc/self/mountinfo`.

use std::path::{Path, PathBuf};

use firn_format::mountinfo::{self, FIRN};

/// A Firn mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FirnMount {
    /// The mount point.
    pub(crate) mount_point: PathBuf,
    /// The backing.
    pub(crate) backing: PathBuf,
}

/// Returns all mounts that this process can see, of any file system.
pub(crate) fn all_mounts() -> Vec<mountinfo::Entry> {
    mountinfo::parse(&std::fs::read("/proc/self/mountinfo").unwrap_or_default())
}

/// Returns all Firn mounts that this process can see; a later one covers an earlier one at the same place.
pub(crate) fn firn_mounts() -> Vec<FirnMount> {
    parse(&std::fs::read("/proc/self/mountinfo").unwrap_or_default())
}

/// Returns the newest Firn mount at `mount_point`, if there is one.
pub(crate) fn find_firn_mount(mount_point: &Path) -> Option<FirnMount> {
    firn_mounts()
        .into_iter()
        .rev()
        .find(|mount| mount.mount_point == mount_point)
}

fn parse(text: &[u8]) -> Vec<FirnMount> {
    let firn = mountinfo::parse(text)
        .into_iter()
        .filter(|entry| entry.fs_type == FIRN);
    firn.map(|entry| FirnMount {
        mount_point: entry.mount_point,
        backing: entry.source,
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_firn_mounts_are_found_and_their_paths_are_unescaped() {
        let text = b"25 30 0:23 / /proc rw - proc proc rw\n\
            98 30 0:51 / /mnt/a\\040b rw,nosuid shared:1 - fuse.firn /scratch/r\\134x rw,user_id=0\n";
        let expected = FirnMount {
            mount_point: "/mnt/a b".into(),
            backing: "/scratch/r\\x".into(),
        };
        assert_eq!(parse(text), [expected]);
    }
}
