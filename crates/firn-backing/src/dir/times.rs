//! Sets the times of the object of an `O_PATH` descriptor (utimensat(2)).

use std::os::fd::AsFd;

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, utimensat};

use super::proc::FdPath;
use crate::{Result, SetTime};

/// Sets the times. Uses the path in `/proc`, because utimensat(2) takes `AT_EMPTY_PATH` only since Linux 5.8.
pub(super) fn set(inode: impl AsFd, atime: SetTime, mtime: SetTime) -> Result<()> {
    let times = Timestamps {
        last_access: timespec(atime),
        last_modification: timespec(mtime),
    };
    utimensat(
        CWD,
        FdPath::from_fd(inode).as_c_str(),
        &times,
        AtFlags::empty(),
    )
}

/// Returns the argument of utimensat(2) that keeps a time, sets the present time, or sets the given time.
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
        SetTime::At(time) => Timespec {
            tv_sec: time.sec,
            tv_nsec: i64::from(time.nsec),
        },
    }
}
