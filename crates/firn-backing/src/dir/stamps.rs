//! The order of times that the kernel gives and those that Firn gives.
//!
//! Where times may be exact ([`firn_format::clock`]), Firn's are, and the kernel gives a new file one of the last tick,
//! unless a file got a later one from the kernel since. So before the kernel stamps something, it is asked for an exact
//! time. It gives one to a file that has the time of the last tick and whose time was read since: so a file in memory
//! is touched, looked at, and touched again.

use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use rustix::fs::{
    AtFlags, MemfdFlags, StatxFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, futimens,
    memfd_create, statx,
};

use crate::Time;

/// From here on the kernel stamps nothing with an earlier time than [`Time::now`] has given until now.
pub(super) fn catch_up() {
    static FILE: OnceLock<Option<OwnedFd>> = OnceLock::new();
    let file = FILE.get_or_init(|| {
        let make = || memfd_create(c"firn-clock", MemfdFlags::CLOEXEC).ok();
        Time::is_exact().then(make).flatten()
    });
    let Some(file) = file else {
        return;
    };
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
    let look = || {
        let times = StatxFlags::MTIME | StatxFlags::CTIME;
        statx(file, c"", AtFlags::EMPTY_PATH, times)
    };
    // What fails leaves the order as it is on older kernels.
    let _ = futimens(file, &now)
        .and_then(|()| look())
        .and_then(|_| futimens(file, &now));
}
