//! Order of times: ensures that times which the kernel sets are not earlier than times which Firn has set before.
//!
//! On kernels with exact times ([`firn_format::clock`]) Firn sets exact times. The kernel sets only the time of the
//! last tick on a new file, unless it has set an exact time on some file since that tick. So a later change could get
//! an earlier time.
//!
//! The remedy: before the kernel sets a time, make it set an exact time on some file. It does so when it touches a file
//! whose time is that of the last tick and was read since. So a file in memory is touched, its time is read, and the
//! file is touched again.

use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use rustix::fs::{
    AtFlags, MemfdFlags, StatxFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, futimens,
    memfd_create, statx,
};

use crate::{Result, Time};

/// Makes the kernel set only times that are not earlier than all times which [`Time::now`] has returned so far.
pub(super) fn catch_up() {
    static FILE: OnceLock<Option<OwnedFd>> = OnceLock::new();
    if let Some(file) = FILE.get_or_init(create_clock_file) {
        // An error is harmless: times are then only as well ordered as on older kernels.
        let _ = touch_read_touch(file);
    }
}

/// Creates the file in memory that is touched. Returns `None` on kernels without exact times, and if the file cannot be
/// created.
fn create_clock_file() -> Option<OwnedFd> {
    if !Time::is_exact() {
        return None;
    }
    memfd_create(c"firn-clock", MemfdFlags::CLOEXEC).ok()
}

/// Touches a file, reads its times, and touches it again. At the second touch the kernel sets an exact time, because
/// the time was read since the first.
fn touch_read_touch(file: &OwnedFd) -> Result<()> {
    let now = Timestamps {
        last_access: Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_OMIT,
        },
        last_modification: Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_NOW,
        },
    };
    futimens(file, &now)?;
    let times = StatxFlags::MTIME | StatxFlags::CTIME;
    statx(file, c"", AtFlags::EMPTY_PATH, times)?;
    futimens(file, &now)
}
