//! Parses messages of the kernel (requests, and notices without an answer) from the bytes that `/dev/fuse` returned.
//!
//! No message is trusted to be complete. A message that is too short for its kind is [`Message::Unsupported`], and its
//! sender gets an error. No message panics.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use firn_backing::{Caller, LockMode, LockRange, SetTime, Time};
use firn_engine::{HandleId, InodeId, SetAttr};
use firn_hosts::LockKind;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use crate::request::{CopyRange, Fallocate, Lock, Name, NewMode, Operation, Read, Request, Write};
use crate::transport::dev_fuse::abi::{
    BatchForgetIn, CopyFileRangeIn, CreateIn, FSYNC_DATA, FallocateIn, FlushIn, ForgetIn,
    ForgetOne, FsyncIn, GETATTR_FH, GetattrIn, GetxattrIn, IOCTL_UNRESTRICTED, InHeader, InitIn,
    InterruptIn, IoctlIn, LOCK_FLOCK, LinkIn, LockIn, LseekIn, MkdirIn, MknodIn, OpenIn, ReadIn,
    ReleaseIn, Rename2In, RenameIn, SetattrIn, SetxattrIn, WRITE_CACHE, WRITE_KILL_SUIDGID,
    WriteIn, opcode, setattr_valid as valid,
};

/// A message of the kernel.
pub(super) enum Message<'a> {
    /// A request that has an answer.
    Request {
        request: Request<'a>,
        /// Size of the kernel's buffer for a listing; 0 for other requests.
        listing_bytes_max: usize,
    },
    /// The kernel gives back look-ups of inodes. Has no answer.
    Forget(Forgotten<'a>),
    /// The caller of this request got a signal. Has no answer.
    Interrupt { unique: u64 },
    /// The first message of a connection.
    Init { unique: u64, init: InitIn },
    /// The last message of a connection.
    Destroy { unique: u64 },
    /// A message without an answer and without a meaning for Firn.
    Ignored,
    /// A request that Firn leaves to the kernel, or does not know.
    Unsupported { unique: u64 },
    /// A request with an offset that no file can have.
    Invalid { unique: u64 },
}

/// Inodes whose look-ups the kernel gives back, and the number of look-ups of each.
pub(super) struct Forgotten<'a> {
    /// The only inode of a FORGET.
    single: Option<ForgetOne>,
    /// Bytes of the inodes of a BATCH_FORGET.
    batch: &'a [u8],
}

impl Iterator for Forgotten<'_> {
    type Item = (InodeId, u64);

    fn next(&mut self) -> Option<Self::Item> {
        let forgotten = self.single.take().or_else(|| {
            let (forgotten, rest) = ForgetOne::read_from_prefix(self.batch).ok()?;
            self.batch = rest;
            Some(forgotten)
        })?;
        Some((InodeId(forgotten.nodeid), forgotten.lookups))
    }
}

/// Returns the number of the request in a message. For an interruption: the number of the interrupted request.
pub(super) fn number_of(bytes: &[u8]) -> Option<u64> {
    /// Bit that the kernel sets in the number of an interruption.
    const INTERRUPTION: u64 = 1;
    let (header, _) = InHeader::read_from_prefix(bytes).ok()?;
    Some(header.unique & !INTERRUPTION)
}

/// The bytes after the header of a message that are not parsed yet.
struct Arguments<'a>(&'a [u8]);

impl<'a> Arguments<'a> {
    /// Takes a structure; `None` if the bytes are too few.
    fn take<T: FromBytes + Immutable>(&mut self) -> Option<T> {
        let (value, rest) = T::read_from_prefix(self.0).ok()?;
        self.0 = rest;
        Some(value)
    }

    /// Takes a name, which ends with a zero byte.
    fn take_name(&mut self) -> Option<&'a OsStr> {
        let end = self.0.iter().position(|byte| *byte == 0)?;
        let name = OsStr::from_bytes(&self.0[..end]);
        self.0 = &self.0[end + 1..];
        Some(name)
    }

    /// Takes `len` bytes.
    fn take_bytes(&mut self, len: u32) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len as usize)?;
        self.0 = rest;
        Some(bytes)
    }

    /// Takes a structure to which later kernels have added fields. Missing fields are zero.
    fn take_padded<T: FromZeros + IntoBytes + FromBytes>(&mut self) -> T {
        let mut value = T::new_zeroed();
        let bytes = value.as_mut_bytes();
        let len = bytes.len().min(self.0.len());
        bytes[..len].copy_from_slice(&self.0[..len]);
        value
    }
}

/// Parses a message. `None`: it is too short even for its header.
pub(super) fn parse(bytes: &[u8]) -> Option<Message<'_>> {
    let mut arguments = Arguments(bytes);
    let header: InHeader = arguments.take()?;
    let unique = header.unique;
    let message = match header.opcode {
        opcode::INIT => Message::Init {
            unique,
            init: arguments.take_padded(),
        },
        opcode::DESTROY => Message::Destroy { unique },
        opcode::INTERRUPT => match arguments.take::<InterruptIn>() {
            Some(interrupt) => Message::Interrupt {
                unique: interrupt.unique,
            },
            None => Message::Ignored,
        },
        opcode::FORGET => match arguments.take::<ForgetIn>() {
            Some(forget) => Message::Forget(Forgotten {
                single: Some(ForgetOne {
                    nodeid: header.nodeid,
                    lookups: forget.lookups,
                }),
                batch: &[],
            }),
            None => Message::Ignored,
        },
        opcode::BATCH_FORGET => match arguments.take::<BatchForgetIn>() {
            Some(batch) => {
                let len = (batch.count as usize).saturating_mul(size_of::<ForgetOne>());
                Message::Forget(Forgotten {
                    single: None,
                    batch: &arguments.0[..len.min(arguments.0.len())],
                })
            }
            None => Message::Ignored,
        },
        opcode::NOTIFY_REPLY => Message::Ignored,
        _ => match parse_operation(&header, &mut arguments) {
            Some((operation, _)) if !is_in_bounds(&operation) => Message::Invalid { unique },
            Some((operation, listing_bytes_max)) => Message::Request {
                request: Request {
                    unique,
                    caller: Caller {
                        uid: header.uid,
                        gid: header.gid,
                        pid: header.pid,
                    },
                    operation,
                },
                listing_bytes_max,
            },
            None => Message::Unsupported { unique },
        },
    };
    Some(message)
}

/// Parses an operation. Returns it with the size of the kernel's buffer for a listing. `None`: unsupported.
fn parse_operation<'a>(
    header: &InHeader,
    arguments: &mut Arguments<'a>,
) -> Option<(Operation<'a>, usize)> {
    let inode = InodeId(header.nodeid);
    let mut listing_bytes_max = 0;
    let operation = match header.opcode {
        opcode::LOOKUP => Operation::Lookup(name_in(inode, arguments)?),
        opcode::GETATTR => {
            let getattr: GetattrIn = arguments.take()?;
            let handle = (getattr.flags & GETATTR_FH != 0).then_some(HandleId(getattr.fh));
            Operation::Getattr { inode, handle }
        }
        opcode::SETATTR => Operation::Setattr {
            inode,
            set: attributes_to_set(&arguments.take()?),
        },
        opcode::READLINK => Operation::Readlink { inode },
        opcode::SYMLINK => Operation::Symlink {
            child: name_in(inode, arguments)?,
            target: arguments.take_name()?,
        },
        opcode::MKNOD => {
            let mknod: MknodIn = arguments.take()?;
            Operation::Mknod {
                child: name_in(inode, arguments)?,
                mode: NewMode {
                    mode: mknod.mode,
                    umask: mknod.umask,
                },
                device: mknod.rdev.into(),
            }
        }
        opcode::MKDIR => {
            let mkdir: MkdirIn = arguments.take()?;
            Operation::Mkdir {
                child: name_in(inode, arguments)?,
                mode: NewMode {
                    mode: mkdir.mode,
                    umask: mkdir.umask,
                },
            }
        }
        opcode::UNLINK => Operation::Unlink(name_in(inode, arguments)?),
        opcode::RMDIR => Operation::Rmdir(name_in(inode, arguments)?),
        opcode::RENAME => {
            let rename: RenameIn = arguments.take()?;
            Operation::Rename {
                from: name_in(inode, arguments)?,
                to: name_in(InodeId(rename.new_dir), arguments)?,
                flags: 0,
            }
        }
        opcode::RENAME2 => {
            let rename: Rename2In = arguments.take()?;
            Operation::Rename {
                from: name_in(inode, arguments)?,
                to: name_in(InodeId(rename.new_dir), arguments)?,
                flags: rename.flags,
            }
        }
        opcode::LINK => {
            let link: LinkIn = arguments.take()?;
            Operation::Link {
                inode: InodeId(link.old_nodeid),
                child: name_in(inode, arguments)?,
            }
        }
        opcode::OPEN => {
            let open: OpenIn = arguments.take()?;
            Operation::Open {
                inode,
                flags: open.flags as i32,
            }
        }
        opcode::CREATE => {
            let create: CreateIn = arguments.take()?;
            Operation::Create {
                child: name_in(inode, arguments)?,
                mode: NewMode {
                    mode: create.mode,
                    umask: create.umask,
                },
                flags: create.flags as i32,
            }
        }
        opcode::READ => {
            let read: ReadIn = arguments.take()?;
            Operation::Read(Read {
                inode,
                handle: HandleId(read.fh),
                offset: read.offset,
                size: read.size,
            })
        }
        opcode::WRITE => {
            let write: WriteIn = arguments.take()?;
            Operation::Write(Write {
                inode,
                handle: HandleId(write.fh),
                offset: write.offset,
                data: arguments.take_bytes(write.size)?,
                from_cache: write.write_flags & WRITE_CACHE != 0,
                kills_set_id: write.write_flags & WRITE_KILL_SUIDGID != 0,
                appends: write.flags & libc::O_APPEND as u32 != 0,
            })
        }
        opcode::FLUSH => {
            let flush: FlushIn = arguments.take()?;
            Operation::Flush {
                inode,
                handle: HandleId(flush.fh),
                owner: flush.lock_owner,
            }
        }
        opcode::RELEASE => {
            let release: ReleaseIn = arguments.take()?;
            let handle = HandleId(release.fh);
            Operation::Release { inode, handle }
        }
        opcode::FSYNC => {
            let fsync: FsyncIn = arguments.take()?;
            Operation::Fsync {
                inode,
                handle: HandleId(fsync.fh),
                data_only: fsync.flags & FSYNC_DATA != 0,
            }
        }
        opcode::OPENDIR => Operation::Opendir { inode },
        opcode::READDIR | opcode::READDIRPLUS => {
            let read: ReadIn = arguments.take()?;
            listing_bytes_max = read.size as usize;
            let handle = HandleId(read.fh);
            let cookie = read.offset as i64;
            if header.opcode == opcode::READDIR {
                Operation::Readdir {
                    inode,
                    handle,
                    cookie,
                }
            } else {
                Operation::Readdirplus {
                    inode,
                    handle,
                    cookie,
                }
            }
        }
        opcode::RELEASEDIR => {
            let release: ReleaseIn = arguments.take()?;
            let handle = HandleId(release.fh);
            Operation::Releasedir { inode, handle }
        }
        opcode::FSYNCDIR => Operation::Fsyncdir { inode },
        opcode::STATFS => Operation::Statfs { inode },
        opcode::SETXATTR => {
            let setxattr: SetxattrIn = arguments.take()?;
            Operation::Setxattr {
                inode,
                name: arguments.take_name()?,
                value: arguments.take_bytes(setxattr.size)?,
                flags: setxattr.flags as i32,
            }
        }
        opcode::GETXATTR => {
            let getxattr: GetxattrIn = arguments.take()?;
            let name = arguments.take_name()?;
            let size = getxattr.size;
            Operation::Getxattr { inode, name, size }
        }
        opcode::LISTXATTR => {
            let listxattr: GetxattrIn = arguments.take()?;
            let size = listxattr.size;
            Operation::Listxattr { inode, size }
        }
        opcode::REMOVEXATTR => Operation::Removexattr {
            inode,
            name: arguments.take_name()?,
        },
        opcode::IOCTL => {
            let ioctl: IoctlIn = arguments.take()?;
            if ioctl.flags & IOCTL_UNRESTRICTED != 0 {
                return None;
            }
            Operation::Ioctl {
                inode,
                handle: HandleId(ioctl.fh),
                command: ioctl.command,
                out_size: ioctl.out_size,
            }
        }
        opcode::FALLOCATE => {
            let fallocate: FallocateIn = arguments.take()?;
            Operation::Fallocate(Fallocate {
                inode,
                handle: HandleId(fallocate.fh),
                offset: fallocate.offset,
                len: fallocate.len,
                mode: fallocate.mode as i32,
            })
        }
        opcode::LSEEK => {
            let lseek: LseekIn = arguments.take()?;
            Operation::Lseek {
                inode,
                handle: HandleId(lseek.fh),
                offset: lseek.offset as i64,
                whence: lseek.whence as i32,
            }
        }
        opcode::COPY_FILE_RANGE => {
            let copy: CopyFileRangeIn = arguments.take()?;
            Operation::CopyRange(CopyRange {
                from: HandleId(copy.fh_in),
                from_offset: copy.offset_in,
                to_inode: InodeId(copy.nodeid_out),
                to: HandleId(copy.fh_out),
                to_offset: copy.offset_out,
                len: copy.len,
            })
        }
        opcode::GETLK => Operation::Getlk(lock_from_message(inode, &arguments.take()?)),
        opcode::SETLK | opcode::SETLKW => Operation::Setlk {
            lock: lock_from_message(inode, &arguments.take()?),
            waits: header.opcode == opcode::SETLKW,
        },
        // Access, bmap and poll: after ENOSYS the kernel carries them out itself. It never sends access, because of
        // `default_permissions`.
        _ => return None,
    };
    Some((operation, listing_bytes_max))
}

fn name_in<'a>(parent: InodeId, arguments: &mut Arguments<'a>) -> Option<Name<'a>> {
    let name = arguments.take_name()?;
    Some(Name { parent, name })
}

/// Returns the lock that a message of the kernel asks about. Its form is the same for F_GETLK, F_SETLK and flock(2).
/// The mode is `None` in a request to unlock.
fn lock_from_message(inode: InodeId, lock_in: &LockIn) -> Lock {
    let file_lock = lock_in.lock;
    let kind = if lock_in.flags & LOCK_FLOCK == 0 {
        LockKind::Bytes
    } else {
        LockKind::Flock
    };
    let mode = match file_lock.kind as i32 {
        libc::F_RDLCK => Some(LockMode::Shared),
        libc::F_WRLCK => Some(LockMode::Exclusive),
        // F_UNLCK
        _ => None,
    };
    Lock {
        inode,
        handle: HandleId(lock_in.fh),
        owner: lock_in.owner,
        pid: file_lock.pid,
        kind,
        range: LockRange {
            first: file_lock.first,
            last: file_lock.last,
        },
        mode,
    }
}

/// Whether all offsets of an operation are offsets in a file, whose length is at most 2^63 - 1 bytes.
fn is_in_bounds(operation: &Operation<'_>) -> bool {
    const OFFSET_MAX: u64 = i64::MAX as u64;
    match operation {
        Operation::Read(read) => read.offset <= OFFSET_MAX,
        Operation::Write(write) => write.offset <= OFFSET_MAX,
        Operation::Fallocate(request) => request.offset <= OFFSET_MAX && request.len <= OFFSET_MAX,
        Operation::CopyRange(copy) => {
            copy.from_offset <= OFFSET_MAX && copy.to_offset <= OFFSET_MAX
        }
        Operation::Getlk(lock) | Operation::Setlk { lock, .. } => {
            lock.range.first <= lock.range.last && lock.range.last <= LockRange::LAST
        }
        _ => true,
    }
}

/// Returns the attributes that a setattr sets. `valid` has a bit for each of them.
fn attributes_to_set(setattr: &SetattrIn) -> SetAttr {
    let is_set = |flag: u32| setattr.valid & flag != 0;
    let atime = Time {
        sec: setattr.atime,
        nsec: setattr.atime_ns,
    };
    let mtime = Time {
        sec: setattr.mtime,
        nsec: setattr.mtime_ns,
    };
    let time_to_set = |flag: u32, now_flag: u32, time: Time| {
        if !is_set(flag) {
            SetTime::Keep
        } else if is_set(now_flag) {
            SetTime::Now
        } else {
            SetTime::At(time)
        }
    };
    SetAttr {
        mode: is_set(valid::MODE).then_some(setattr.mode & PERMISSION_BITS),
        uid: is_set(valid::UID).then_some(setattr.uid),
        gid: is_set(valid::GID).then_some(setattr.gid),
        size: is_set(valid::SIZE).then_some(setattr.size),
        atime: time_to_set(valid::ATIME, valid::ATIME_NOW, atime),
        mtime: time_to_set(valid::MTIME, valid::MTIME_NOW, mtime),
    }
}

/// Bits of a mode that chmod(2) can set.
const PERMISSION_BITS: u32 = 0o7777;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::dev_fuse::abi::FileLock;

    /// Makes a message of the kernel.
    fn message(opcode: u32, arguments: &[&[u8]]) -> Vec<u8> {
        let arguments = arguments.concat();
        let header = InHeader {
            len: (size_of::<InHeader>() + arguments.len()) as u32,
            opcode,
            unique: 12,
            nodeid: 7,
            uid: 1,
            gid: 2,
            pid: 3,
            ..InHeader::default()
        };
        [header.as_bytes(), &arguments].concat()
    }

    fn operation_of(bytes: &[u8]) -> Operation<'_> {
        match parse(bytes) {
            Some(Message::Request { request, .. }) => request.operation,
            _ => panic!("no request"),
        }
    }

    #[test]
    fn names_and_bytes_lie_where_the_kernel_puts_them() {
        let rename = Rename2In {
            new_dir: 9,
            flags: 1,
            padding: 0,
        };
        let bytes = message(opcode::RENAME2, &[rename.as_bytes(), b"old\0new\0"]);
        let Operation::Rename { from, to, flags } = operation_of(&bytes) else {
            panic!("another operation");
        };
        assert_eq!((from.parent, from.name), (InodeId(7), OsStr::new("old")));
        assert_eq!((to.parent, to.name), (InodeId(9), OsStr::new("new")));
        assert_eq!(flags, 1);

        let write = WriteIn {
            fh: 5,
            offset: 100,
            size: 4,
            write_flags: WRITE_KILL_SUIDGID,
            ..WriteIn::default()
        };
        let bytes = message(opcode::WRITE, &[write.as_bytes(), b"data"]);
        let Operation::Write(write) = operation_of(&bytes) else {
            panic!("another operation");
        };
        assert_eq!(
            (write.handle, write.offset, write.data),
            (HandleId(5), 100, &b"data"[..])
        );
        assert!(write.kills_set_id && !write.from_cache);

        let set = SetxattrIn { size: 3, flags: 2 };
        let bytes = message(opcode::SETXATTR, &[set.as_bytes(), b"user.x\0abc"]);
        let Operation::Setxattr {
            name, value, flags, ..
        } = operation_of(&bytes)
        else {
            panic!("another operation");
        };
        assert_eq!((name, value, flags), (OsStr::new("user.x"), &b"abc"[..], 2));
    }

    #[test]
    fn locks_are_told_apart_and_appends_known() {
        let mut lock = LockIn {
            fh: 5,
            owner: 6,
            lock: FileLock {
                first: 10,
                last: 19,
                kind: libc::F_WRLCK as u32,
                pid: 3,
            },
            flags: 0,
            padding: 0,
        };
        let bytes = message(opcode::SETLKW, &[lock.as_bytes()]);
        let Operation::Setlk {
            lock: parsed,
            waits,
        } = operation_of(&bytes)
        else {
            panic!("another operation");
        };
        let (first, last) = (10, 19);
        assert_eq!(parsed.range, LockRange { first, last });
        assert_eq!(parsed.mode, Some(LockMode::Exclusive));
        assert_eq!((parsed.owner, parsed.kind), (6, LockKind::Bytes));
        assert!(waits);

        lock.flags = LOCK_FLOCK;
        lock.lock.kind = libc::F_UNLCK as u32;
        let bytes = message(opcode::SETLK, &[lock.as_bytes()]);
        let Operation::Setlk {
            lock: parsed,
            waits,
        } = operation_of(&bytes)
        else {
            panic!("another operation");
        };
        assert_eq!((parsed.mode, parsed.kind), (None, LockKind::Flock));
        assert!(!waits);

        lock.lock.last = 9;
        let bytes = message(opcode::GETLK, &[lock.as_bytes()]);
        assert!(matches!(parse(&bytes), Some(Message::Invalid { .. })));

        let write = WriteIn {
            flags: libc::O_APPEND as u32,
            ..WriteIn::default()
        };
        let bytes = message(opcode::WRITE, &[write.as_bytes()]);
        assert!(matches!(operation_of(&bytes), Operation::Write(write) if write.appends));
    }

    #[test]
    fn times_before_1970_are_exact() {
        let setattr = SetattrIn {
            valid: valid::MTIME | valid::ATIME | valid::ATIME_NOW | valid::MODE,
            mtime: -2,
            mtime_ns: 500_000_000,
            mode: 0o100_644,
            ..SetattrIn::default()
        };
        let set = attributes_to_set(&setattr);
        let time = Time {
            sec: -2,
            nsec: 500_000_000,
        };
        assert_eq!((set.mtime, set.atime), (SetTime::At(time), SetTime::Now));
        assert_eq!((set.mode, set.size, set.uid), (Some(0o644), None, None));
    }

    #[test]
    fn no_message_that_is_cut_or_made_up_panics() {
        let write = WriteIn {
            size: 4,
            ..WriteIn::default()
        };
        let whole = message(opcode::WRITE, &[write.as_bytes(), b"data"]);
        for len in 0..whole.len() {
            let parsed = parse(&whole[..len]);
            assert_eq!(parsed.is_none(), len < size_of::<InHeader>());
            assert!(!matches!(parsed, Some(Message::Request { .. })));
        }
        for code in 0..60 {
            for len in 0..70 {
                let _ = parse(&message(code, &[&vec![0xff; len]]));
            }
        }
        // The message claims more inodes than it has.
        let batch = BatchForgetIn {
            count: u32::MAX,
            padding: 0,
        };
        let one = ForgetOne {
            nodeid: 4,
            lookups: 2,
        };
        let bytes = message(opcode::BATCH_FORGET, &[batch.as_bytes(), one.as_bytes()]);
        let Some(Message::Forget(forgotten)) = parse(&bytes) else {
            panic!("another message");
        };
        assert_eq!(forgotten.collect::<Vec<_>>(), [(InodeId(4), 2)]);
    }

    #[test]
    fn an_offset_that_no_file_has_is_refused() {
        let read = ReadIn {
            offset: 1 << 63,
            ..ReadIn::default()
        };
        let bytes = message(opcode::READ, &[read.as_bytes()]);
        assert!(matches!(
            parse(&bytes),
            Some(Message::Invalid { unique: 12 })
        ));
    }

    #[test]
    fn an_init_of_an_older_kernel_is_read_as_far_as_it_goes() {
        let init = [7u32, 31, 4096, 3];
        let Some(Message::Init { init, .. }) = parse(&message(opcode::INIT, &[init.as_bytes()]))
            .map(|message| match message {
                Message::Init { unique, init } => Message::Init { unique, init },
                _ => panic!("another message"),
            })
        else {
            panic!("no message");
        };
        assert_eq!((init.minor, init.flags, init.flags2), (31, 3, 0));
    }
}
