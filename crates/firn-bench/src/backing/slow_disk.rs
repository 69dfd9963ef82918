//! Sets up a disk with few operations per second: ext4 on a loop device whose writes the kernel limits.
//!
//! The file system is mounted with `-o sync`, so that each write costs operations of the disk, as on a server that
//! does not buffer writes. Without this option the local page cache would combine native writes just as Firn does.

use super::{Prepared, limit, run, text};
use crate::options::WorkDir;
use firn_testfs::cleanup::{Leftover, expect};

/// Size of the disk. It has room for two sets of the largest images and for the journal. The image file is sparse.
const IMAGE_BYTES: u64 = 6 << 30;

/// Makes the disk below `work` and mounts it.
pub fn prepare(writes_per_s: u64, work: &WorkDir) -> anyhow::Result<Prepared> {
    let image = work.path().join("disk.img");
    std::fs::File::create(&image)?.set_len(IMAGE_BYTES)?;
    run(
        "mkfs.ext4",
        &[
            "-q",
            "-F",
            "-E",
            "lazy_itable_init=0,lazy_journal_init=0",
            text(&image),
        ],
    )?;
    let point = work.subdir("disk")?;
    let detach = expect(Leftover::LoopDevices(image.clone()));
    let device = run("losetup", &["--find", "--show", text(&image)])?;
    let unmount = expect(Leftover::Mount(point.clone()));
    run("mount", &["-o", "sync", &device, text(&point)])?;
    let limited = limit::limit_writes(&device, writes_per_s)?;
    let note = format!(
        "backing: ext4 with -o sync on a loop device limited to {writes_per_s} writes/s by {}",
        limited.controller
    );
    Ok(Prepared {
        dir: point,
        note,
        _parts: vec![
            Box::new(limited.guards),
            Box::new(unmount),
            Box::new(detach),
        ],
    })
}
