//! Between the types of the FUSE crate and those of a backing.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use firn_backing::{Access, Attr, Caller, Kind, SetTime, Time};
use fuser::{Errno, FileAttr, FileType, INodeNo, OpenFlags, Request, TimeOrNow};

pub fn errno(errno: firn_backing::Errno) -> Errno {
    Errno::from_i32(errno.raw_os_error())
}

pub fn caller(request: &Request) -> Caller {
    Caller {
        uid: request.uid(),
        gid: request.gid(),
        pid: request.pid(),
    }
}

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

fn system_time(time: Time) -> SystemTime {
    UNIX_EPOCH + Duration::new(time.sec.max(0) as u64, time.nsec)
}

/// `number` is what the kernel knows the object by.
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
        rdev: attr.rdev as u32,
        flags: 0,
        blksize: attr.blksize,
    }
}

pub fn set_time(time: Option<TimeOrNow>) -> SetTime {
    match time {
        None => SetTime::Keep,
        Some(TimeOrNow::Now) => SetTime::Now,
        Some(TimeOrNow::SpecificTime(time)) => {
            let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
            SetTime::At(Time {
                sec: since.as_secs() as i64,
                nsec: since.subsec_nanos(),
            })
        }
    }
}

pub fn access(flags: OpenFlags) -> Access {
    match flags.0 & libc::O_ACCMODE {
        libc::O_RDONLY => Access::Read,
        libc::O_WRONLY => Access::Write,
        _ => Access::ReadWrite,
    }
}
