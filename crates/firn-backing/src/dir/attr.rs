//! statx(2) of a descriptor, of `O_PATH` ones too.

use std::os::fd::AsFd;

use rustix::fs::{AtFlags, StatxFlags, StatxTimestamp, makedev, statx};

use crate::{Attr, Errno, Kind, Result, Time};

/// The object's attributes, with its birth time where the file system records one.
pub(super) fn attr(fd: impl AsFd) -> Result<Attr> {
    ask(fd, AtFlags::empty())
}

/// The object's attributes as the server has them: NFS, CephFS and FUSE do not answer from their caches.
pub(super) fn attr_now(fd: impl AsFd) -> Result<Attr> {
    ask(fd, AtFlags::STATX_FORCE_SYNC)
}

fn ask(fd: impl AsFd, how: AtFlags) -> Result<Attr> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let s = statx(fd, c"", AtFlags::EMPTY_PATH | how, wanted)?;
    let mode = u32::from(s.stx_mode);
    Ok(Attr {
        dev: makedev(s.stx_dev_major, s.stx_dev_minor),
        ino: s.stx_ino,
        kind: Kind::from_mode(mode).ok_or(Errno::IO)?,
        mode,
        nlink: s.stx_nlink,
        uid: s.stx_uid,
        gid: s.stx_gid,
        rdev: makedev(s.stx_rdev_major, s.stx_rdev_minor),
        size: s.stx_size,
        blocks: s.stx_blocks,
        blksize: s.stx_blksize,
        atime: time(s.stx_atime),
        mtime: time(s.stx_mtime),
        ctime: time(s.stx_ctime),
        btime: (s.stx_mask & StatxFlags::BTIME.bits() != 0).then(|| time(s.stx_btime)),
    })
}

fn time(t: StatxTimestamp) -> Time {
    Time {
        sec: t.tv_sec,
        nsec: t.tv_nsec,
    }
}

/// How many names an object has, without asking a server again.
pub(super) fn links(fd: impl AsFd) -> Result<u64> {
    let s = statx(
        fd,
        c"",
        AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC,
        StatxFlags::NLINK,
    )?;
    Ok(u64::from(s.stx_nlink))
}
