//! Attributes of the object of a descriptor, which may be an `O_PATH` one (statx(2)).

use std::os::fd::AsFd;

use rustix::fs::{AtFlags, StatxFlags, StatxTimestamp, makedev, statx};

use crate::{Attr, Errno, Kind, Result, Time};

/// Returns the attributes, with the time of creation if the file system records it.
pub(super) fn attr(fd: impl AsFd) -> Result<Attr> {
    call_statx(fd, AtFlags::empty())
}

/// Returns the present attributes from the server: NFS, CephFS and FUSE must not answer from their caches.
pub(super) fn attr_now(fd: impl AsFd) -> Result<Attr> {
    call_statx(fd, AtFlags::STATX_FORCE_SYNC)
}

/// Reads the attributes of the object of a descriptor by statx(2), with additional `flags`. Fails with EIO for an
/// object of an unknown kind.
fn call_statx(fd: impl AsFd, flags: AtFlags) -> Result<Attr> {
    let mask = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let stat = statx(fd, c"", AtFlags::EMPTY_PATH | flags, mask)?;
    let mode = u32::from(stat.stx_mode);
    Ok(Attr {
        dev: makedev(stat.stx_dev_major, stat.stx_dev_minor),
        ino: stat.stx_ino,
        kind: Kind::from_mode(mode).ok_or(Errno::IO)?,
        mode,
        nlink: stat.stx_nlink,
        uid: stat.stx_uid,
        gid: stat.stx_gid,
        rdev: makedev(stat.stx_rdev_major, stat.stx_rdev_minor),
        size: stat.stx_size,
        blocks: stat.stx_blocks,
        blksize: stat.stx_blksize,
        atime: time(stat.stx_atime),
        mtime: time(stat.stx_mtime),
        ctime: time(stat.stx_ctime),
        btime: (stat.stx_mask & StatxFlags::BTIME.bits() != 0).then(|| time(stat.stx_btime)),
    })
}

/// Translates a time of statx(2).
fn time(timestamp: StatxTimestamp) -> Time {
    Time {
        sec: timestamp.tv_sec,
        nsec: timestamp.tv_nsec,
    }
}

/// Returns the number of names of an object. It may come from a cache of this host.
pub(super) fn links(fd: impl AsFd) -> Result<u64> {
    let stat = statx(
        fd,
        c"",
        AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC,
        StatxFlags::NLINK,
    )?;
    Ok(u64::from(stat.stx_nlink))
}
