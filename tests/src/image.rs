//! File systems on loop images: real backings of a size that a test chooses.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command::run;
use crate::sandbox::{Sandbox, make_dirs, unmount_lazily};

/// Which file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FsKind {
    /// mkfs.ext4
    Ext4,
    /// mkfs.xfs, which refuses images below 300 MiB
    Xfs,
    /// mkfs.btrfs, which refuses images below 109 MiB
    Btrfs,
    /// no image: a tmpfs of that size
    Tmpfs,
}

impl FsKind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Ext4, Self::Xfs, Self::Btrfs, Self::Tmpfs];

    /// As mount(8) calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
            Self::Tmpfs => "tmpfs",
        }
    }
}

/// A mounted file system that is unmounted and forgotten on drop.
pub struct LoopImage {
    image: Option<PathBuf>,
    mount_point: PathBuf,
}

impl LoopImage {
    /// Makes and mounts a file system of `size_mib` at `<sandbox>/<kind>`. The image is sparse.
    pub fn new(sandbox: &Sandbox, kind: FsKind, size_mib: u64) -> Self {
        let mount_point = sandbox.mkdir(kind.name());
        let mut mount = Command::new("mount");
        let image = match kind {
            FsKind::Tmpfs => {
                mount.args([
                    "-t",
                    "tmpfs",
                    "-o",
                    &format!("size={size_mib}m"),
                    "firn-test",
                ]);
                None
            }
            _ => {
                let image = sandbox.join(format!("{}.img", kind.name()));
                let file = File::create(&image).expect("create the image");
                file.set_len(size_mib << 20).expect("size the image");
                // mkfs.btrfs asks every mount, and fails at one of another test whose server was killed.
                let without_fuse = "umount -a -l -t fuse,fuse.firn; exec \"$@\"";
                run(Command::new("unshare")
                    .args(["--mount", "sh", "-c", without_fuse, "sh"])
                    .arg(format!("mkfs.{}", kind.name()))
                    .arg("-q")
                    .arg(&image))
                .ok();
                mount.args(["-o", "loop"]).arg(&image);
                Some(image)
            }
        };
        run(mount.arg(&mount_point)).ok();
        Self { image, mount_point }
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.mount_point
    }

    /// A new directory in it.
    pub fn mkdir(&self, name: &str) -> PathBuf {
        let path = self.mount_point.join(name);
        make_dirs(&path);
        path
    }

    /// mount(8) with `-o remount,<options>`.
    pub fn remount(&self, options: &str) {
        let options = format!("remount,{options}");
        run(Command::new("mount")
            .args(["-o", &options])
            .arg(&self.mount_point))
        .ok();
    }

    /// The image file; none for a tmpfs.
    pub fn image(&self) -> Option<&Path> {
        self.image.as_deref()
    }
}

impl Drop for LoopImage {
    fn drop(&mut self) {
        // `mount -o loop` marked the loop device to go with the last user of the file system.
        unmount_lazily(&self.mount_point);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::is_mounted;

    #[test]
    fn every_kind_mounts_and_goes_away() {
        for kind in FsKind::ALL {
            let sandbox = Sandbox::new("image");
            let image = LoopImage::new(&sandbox, kind, 320);
            let path = image.path().to_owned();
            assert!(is_mounted(&path));
            std::fs::write(path.join("file"), "text").expect("write");
            drop(image);
            assert!(!is_mounted(&path));
        }
    }
}
