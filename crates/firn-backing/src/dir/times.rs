//! utimensat(2) of the object behind an `O_PATH` descriptor.

use std::os::fd::AsFd;

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, utimensat};

use super::proc::FdPath;
use crate::{Result, SetTime};

/// Sets the times; through `/proc`, because `AT_EMPTY_PATH` came to this call only with Linux 5.8.
pub(super) fn set(inode: impl AsFd, atime: SetTime, mtime: SetTime) -> Result<()> {
    let times = Timestamps {
        last_access: timespec(atime),
        last_modification: timespec(mtime),
    };
    utimensat(CWD, FdPath::of(inode).as_c_str(), &times, AtFlags::empty())
}

fn timespec(time: SetTime) -> Timespec {
    match time {
        SetTime::Keep => Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_OMIT,
        },
        SetTime::Now => Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_NOW,
        },
        SetTime::At(t) => Timespec {
            tv_sec: t.sec,
            tv_nsec: i64::from(t.nsec),
        },
    }
}
