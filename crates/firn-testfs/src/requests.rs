//! Converts between the types of a backing (a file system of Firn's trait) and those of the crate `fuser`: errnos,
//! attributes and kinds to `fuser`, callers and times of requests from it.
//!
//! Promises
//! * The kernel accepts every errno that [`errno`] gives.
//! * A time of a request, before 1970 too, is stored exactly.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use firn_backing::{Attr, Caller, Errno, Kind, SetTime, Time};
use fuser::{FileAttr, FileType, INodeNo, Request, TimeOrNow};

/// Largest errno that the kernel accepts from a FUSE server. It refuses larger ones (fs/fuse/dev.c), and the caller
/// would wait for ever.
const ERRNO_MAX: i32 = 511;

/// Returns the errno of a reply for an errno of a backing. The kernel accepts every errno that this function returns.
///
/// After `ENOSYS` the kernel would not send the operation any more for the life of the mount, although only one
/// object's file system may lack it. Programs get `EOPNOTSUPP` instead, for which they have the same fallbacks.
///
/// `EMFILE` concerns the descriptors of the server, and the program would believe that it concerns its own.
pub fn errno(error: Errno) -> fuser::Errno {
    match error.raw_os_error() {
        libc::ENOSYS => fuser::Errno::from_i32(libc::EOPNOTSUPP),
        libc::EMFILE => fuser::Errno::from_i32(libc::ENFILE),
        raw @ 1..=ERRNO_MAX => fuser::Errno::from_i32(raw),
        _ => fuser::Errno::EIO,
    }
}

/// Converts attributes for the kernel. `number` is the inode number that stat(2) shows; fuser also sends it as the node
/// id of the object.
pub fn file_attr(number: u64, attr: &Attr) -> FileAttr {
    FileAttr {
        ino: INodeNo(number),
        size: attr.size,
        blocks: attr.blocks,
        atime: system_time(attr.atime),
        mtime: system_time(attr.mtime),
        ctime: system_time(attr.ctime),
        crtime: UNIX_EPOCH,
        kind: file_type(attr.kind),
        perm: (attr.mode & 0o7777) as u16,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        // The kernel's 32-bit encoding is the low half of the C library's, for all majors below 2^12.
        rdev: attr.rdev as u32,
        blksize: attr.blksize,
        flags: 0,
    }
}

/// Converts the kind of an object.
pub fn file_type(kind: Kind) -> FileType {
    match kind {
        Kind::File => FileType::RegularFile,
        Kind::Dir => FileType::Directory,
        Kind::Symlink => FileType::Symlink,
        Kind::Fifo => FileType::NamedPipe,
        Kind::Socket => FileType::Socket,
        Kind::CharDevice => FileType::CharDevice,
        Kind::BlockDevice => FileType::BlockDevice,
    }
}

/// Returns the user, group and process that a request comes from.
pub fn caller(request: &Request) -> Caller {
    Caller {
        uid: request.uid(),
        gid: request.gid(),
        pid: request.pid(),
    }
}

/// Converts a time of a request to set attributes. `None` leaves the time as it is.
pub fn set_time(time: Option<TimeOrNow>) -> SetTime {
    match time {
        None => SetTime::Keep,
        Some(TimeOrNow::Now) => SetTime::Now,
        Some(TimeOrNow::SpecificTime(time)) => SetTime::At(from_request(time)),
    }
}

/// Converts a time, before 1970 too. A time that [`SystemTime`] cannot represent becomes the epoch.
fn system_time(time: Time) -> SystemTime {
    let whole = Duration::from_secs(time.sec.unsigned_abs());
    let start = if time.sec < 0 {
        UNIX_EPOCH.checked_sub(whole)
    } else {
        UNIX_EPOCH.checked_add(whole)
    };
    start
        .and_then(|t| t.checked_add(Duration::from_nanos(time.nsec.into())))
        .unwrap_or(UNIX_EPOCH)
}

/// Returns the time that a request contains, and corrects an error of fuser for times before 1970.
///
/// For such a time fuser 0.18 computes `epoch - (|sec| + nsec)` (src/time.rs), but `epoch - |sec| + nsec` is meant.
fn from_request(time: SystemTime) -> Time {
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => Time {
            sec: after.as_secs() as i64,
            nsec: after.subsec_nanos(),
        },
        Err(before) => {
            let before = before.duration();
            Time {
                sec: -(before.as_secs() as i64),
                nsec: before.subsec_nanos(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_errno_becomes_one_that_the_kernel_accepts() {
        for raw in (-600..=600).filter(|raw| *raw != 0) {
            if (1..4096).contains(&raw) {
                let code = errno(Errno::from_raw_os_error(raw)).code();
                assert!((1..=ERRNO_MAX).contains(&code), "{raw} became {code}");
                assert_ne!(code, libc::ENOSYS);
            }
        }
        assert_eq!(errno(Errno::STALE).code(), libc::ESTALE);
        assert_eq!(errno(Errno::DQUOT).code(), libc::EDQUOT);
        assert_eq!(errno(Errno::from_raw_os_error(512)).code(), libc::EIO);
    }

    #[test]
    fn times_before_1970_keep_their_fraction() {
        let time = Time {
            sec: -2,
            nsec: 500_000_000,
        };
        assert_eq!(
            UNIX_EPOCH.duration_since(system_time(time)).unwrap(),
            Duration::from_millis(1500)
        );
        // What fuser hands over for the same time.
        let request = UNIX_EPOCH - Duration::new(2, 500_000_000);
        assert_eq!(from_request(request), time);
    }

    #[test]
    fn times_after_1970_pass_both_ways() {
        let time = Time {
            sec: 1_700_000_000,
            nsec: 999_999_999,
        };
        assert_eq!(from_request(system_time(time)), time);
    }

    #[test]
    fn a_time_that_cannot_be_told_does_not_panic() {
        system_time(Time {
            sec: i64::MIN,
            nsec: 0,
        });
        system_time(Time {
            sec: i64::MAX,
            nsec: 999_999_999,
        });
    }
}
