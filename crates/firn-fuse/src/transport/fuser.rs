//! Requests and answers over the `fuser` crate, the only module that names it.
//!
//! [`Transport`] makes a [`Request`] of each of fuser's calls. fuser has a type of reply for each form of answer;
//! [`responder::Responder`] is one of them.

mod negotiate;
mod responder;

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use firn_backing::Backing;
use firn_engine::{HandleId, InodeId, SetAttr};
use fuser::{
    AccessFlags, BsdFileFlags, Config, CopyFileRangeFlags, FileHandle, Filesystem, INodeNo,
    IoctlFlags, KernelConfig, LockOwner, OpenFlags, PollEvents, PollFlags, PollNotifier, ReplyAttr,
    ReplyBmap, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry,
    ReplyIoctl, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite, ReplyXattr, SessionACL,
    TimeOrNow, WriteFlags,
};

use crate::coherence::Notifier;
use crate::dispatcher::Dispatcher;
use crate::request::{CopyRange, Fallocate, Name, NewMode, Operation, Read, Request, Write};
use crate::transport::fuser::negotiate::negotiate;

pub(crate) use responder::Responder;

/// A session that is served by threads of its own.
pub(crate) struct Served(fuser::BackgroundSession);

impl Served {
    /// Returns when the kernel has let go of the mount.
    pub(crate) fn join(self) -> io::Result<()> {
        self.0.join()
    }
}

/// Agrees with the kernel behind `device` and serves it from `threads` threads and one more.
pub(crate) fn serve<B: Backing>(
    dispatcher: Dispatcher<B, Responder>,
    device: OwnedFd,
    allow_other: bool,
    threads: usize,
) -> io::Result<Served> {
    let acl = if allow_other {
        SessionACL::All
    } else {
        SessionACL::Owner
    };
    let mut config = Config::default();
    config.acl = acl;
    config.n_threads = Some(threads + 1);
    config.clone_fd = true;
    dispatcher.set_threads(threads);
    let coherence = dispatcher.coherence();
    let session = fuser::Session::from_fd(Transport { dispatcher }, device, acl, config)?;
    coherence.start(Arc::new(session.notifier()));
    Ok(Served(session.spawn()?))
}

impl Notifier for fuser::Notifier {
    fn invalidate_name(&self, parent: InodeId, name: &OsStr) -> io::Result<()> {
        self.inval_entry(INodeNo(parent.0), name)
    }

    fn invalidate_attributes(&self, inode: InodeId) -> io::Result<()> {
        self.inval_inode(INodeNo(inode.0), -1, 0)
    }

    fn invalidate_pages(&self, inode: InodeId, offset: u64, len: u64) -> io::Result<()> {
        self.inval_inode(INodeNo(inode.0), offset as i64, len as i64)
    }

    fn store(&self, inode: InodeId, offset: u64, data: &[u8]) -> io::Result<()> {
        fuser::Notifier::store(self, INodeNo(inode.0), offset, data)
    }
}

struct Transport<B: Backing> {
    dispatcher: Dispatcher<B, Responder>,
}

impl<B: Backing> Transport<B> {
    fn dispatch(
        &self,
        request: &fuser::Request,
        operation: Operation<'_>,
        responder: impl Into<Responder>,
    ) {
        let request = Request {
            unique: request.unique().0,
            caller: firn_fuser::caller(request),
            operation,
        };
        self.dispatcher.dispatch(request, responder.into());
    }
}

fn inode_of(number: INodeNo) -> InodeId {
    InodeId(number.0)
}

fn handle_of(number: FileHandle) -> HandleId {
    HandleId(number.0)
}

fn name_in(parent: INodeNo, name: &OsStr) -> Name<'_> {
    Name {
        parent: inode_of(parent),
        name,
    }
}

impl<B: Backing> Filesystem for Transport<B> {
    fn init(&mut self, _: &fuser::Request, config: &mut KernelConfig) -> io::Result<()> {
        let asked = self.dispatcher.asks_passthrough();
        self.dispatcher.set_negotiated(negotiate(config, asked)?);
        Ok(())
    }

    fn forget(&self, _: &fuser::Request, inode: INodeNo, count: u64) {
        self.dispatcher.forget(inode_of(inode), count);
    }

    fn lookup(&self, request: &fuser::Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.dispatch(request, Operation::Lookup(name_in(parent, name)), reply);
    }

    fn getattr(
        &self,
        request: &fuser::Request,
        inode: INodeNo,
        handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        let inode = inode_of(inode);
        let handle = handle.map(handle_of);
        self.dispatch(request, Operation::Getattr { inode, handle }, reply);
    }

    fn setattr(
        &self,
        request: &fuser::Request,
        inode: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let set = SetAttr {
            mode: mode.map(|mode| mode & 0o7777),
            uid,
            gid,
            size,
            atime: firn_fuser::set_time(atime),
            mtime: firn_fuser::set_time(mtime),
        };
        let inode = inode_of(inode);
        self.dispatch(request, Operation::Setattr { inode, set }, reply);
    }

    fn readlink(&self, request: &fuser::Request, inode: INodeNo, reply: ReplyData) {
        let inode = inode_of(inode);
        self.dispatch(request, Operation::Readlink { inode }, reply);
    }

    fn mknod(
        &self,
        request: &fuser::Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        device: u32,
        reply: ReplyEntry,
    ) {
        let operation = Operation::Mknod {
            at: name_in(parent, name),
            mode: NewMode { mode, umask },
            device: device.into(),
        };
        self.dispatch(request, operation, reply);
    }

    fn mkdir(
        &self,
        request: &fuser::Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let at = name_in(parent, name);
        let mode = NewMode { mode, umask };
        self.dispatch(request, Operation::Mkdir { at, mode }, reply);
    }

    fn unlink(&self, request: &fuser::Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.dispatch(request, Operation::Unlink(name_in(parent, name)), reply);
    }

    fn rmdir(&self, request: &fuser::Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.dispatch(request, Operation::Rmdir(name_in(parent, name)), reply);
    }

    fn symlink(
        &self,
        request: &fuser::Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let at = name_in(parent, name);
        let target = target.as_os_str();
        self.dispatch(request, Operation::Symlink { at, target }, reply);
    }

    fn rename(
        &self,
        request: &fuser::Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: fuser::RenameFlags,
        reply: ReplyEmpty,
    ) {
        let operation = Operation::Rename {
            from: name_in(parent, name),
            to: name_in(new_parent, new_name),
            flags: flags.bits(),
        };
        self.dispatch(request, operation, reply);
    }

    fn link(
        &self,
        request: &fuser::Request,
        inode: INodeNo,
        parent: INodeNo,
        name: &OsStr,
        reply: ReplyEntry,
    ) {
        let inode = inode_of(inode);
        let at = name_in(parent, name);
        self.dispatch(request, Operation::Link { inode, at }, reply);
    }

    fn open(&self, request: &fuser::Request, inode: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let inode = inode_of(inode);
        let flags = flags.0;
        self.dispatch(request, Operation::Open { inode, flags }, reply);
    }

    fn read(
        &self,
        request: &fuser::Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let read = Read {
            inode: inode_of(inode),
            handle: handle_of(handle),
            offset,
            size,
        };
        self.dispatch(request, Operation::Read(read), reply);
    }

    fn write(
        &self,
        request: &fuser::Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        flags: WriteFlags,
        _open_flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let write = Write {
            inode: inode_of(inode),
            handle: handle_of(handle),
            offset,
            data,
            from_cache: flags.contains(WriteFlags::FUSE_WRITE_CACHE),
            kills_set_id: flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID),
        };
        self.dispatch(request, Operation::Write(write), reply);
    }

    fn flush(
        &self,
        request: &fuser::Request,
        inode: INodeNo,
        handle: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        let inode = inode_of(inode);
        let handle = handle_of(handle);
        self.dispatch(request, Operation::Flush { inode, handle }, reply);
    }

    fn release(
        &self,
        request: &fuser::Request,
        inode: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        let inode = inode_of(inode);
        let handle = handle_of(handle);
        self.dispatch(request, Operation::Release { inode, handle }, reply);
    }

    fn fsync(
        &self,
        request: &fuser::Request,
        inode: INodeNo,
        handle: FileHandle,
        data_only: bool,
        reply: ReplyEmpty,
    ) {
        let operation = Operation::Fsync {
            inode: inode_of(inode),
            handle: handle_of(handle),
            data_only,
        };
        self.dispatch(request, operation, reply);
    }

    fn opendir(&self, request: &fuser::Request, inode: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let inode = inode_of(inode);
        self.dispatch(request, Operation::Opendir { inode }, reply);
    }

    fn readdir(
        &self,
        request: &fuser::Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        reply: ReplyDirectory,
    ) {
        let operation = Operation::Readdir {
            inode: inode_of(inode),
            handle: handle_of(handle),
            cookie: offset as i64,
        };
        self.dispatch(request, operation, reply);
    }

    fn readdirplus(
        &self,
        request: &fuser::Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        reply: ReplyDirectoryPlus,
    ) {
        let operation = Operation::Readdirplus {
            inode: inode_of(inode),
            handle: handle_of(handle),
            cookie: offset as i64,
        };
        self.dispatch(request, operation, reply);
    }

    fn releasedir(
        &self,
        request: &fuser::Request,
        inode: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        let inode = inode_of(inode);
        let handle = handle_of(handle);
        self.dispatch(request, Operation::Releasedir { inode, handle }, reply);
    }

    fn fsyncdir(
        &self,
        request: &fuser::Request,
        inode: INodeNo,
        _handle: FileHandle,
        _data_only: bool,
        reply: ReplyEmpty,
    ) {
        let inode = inode_of(inode);
        self.dispatch(request, Operation::Fsyncdir { inode }, reply);
    }

    fn statfs(&self, request: &fuser::Request, inode: INodeNo, reply: ReplyStatfs) {
        let inode = inode_of(inode);
        self.dispatch(request, Operation::Statfs { inode }, reply);
    }

    fn setxattr(
        &self,
        request: &fuser::Request,
        inode: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let operation = Operation::Setxattr {
            inode: inode_of(inode),
            name,
            value,
            flags,
        };
        self.dispatch(request, operation, reply);
    }

    fn getxattr(
        &self,
        request: &fuser::Request,
        inode: INodeNo,
        name: &OsStr,
        size: u32,
        reply: ReplyXattr,
    ) {
        let inode = inode_of(inode);
        self.dispatch(request, Operation::Getxattr { inode, name, size }, reply);
    }

    fn listxattr(&self, request: &fuser::Request, inode: INodeNo, size: u32, reply: ReplyXattr) {
        let inode = inode_of(inode);
        self.dispatch(request, Operation::Listxattr { inode, size }, reply);
    }

    fn removexattr(
        &self,
        request: &fuser::Request,
        inode: INodeNo,
        name: &OsStr,
        reply: ReplyEmpty,
    ) {
        let inode = inode_of(inode);
        self.dispatch(request, Operation::Removexattr { inode, name }, reply);
    }

    /// Never asked under `default_permissions`.
    fn access(&self, _: &fuser::Request, _: INodeNo, _: AccessFlags, reply: ReplyEmpty) {
        reply.error(fuser::Errno::ENOSYS);
    }

    fn create(
        &self,
        request: &fuser::Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let operation = Operation::Create {
            at: name_in(parent, name),
            mode: NewMode { mode, umask },
            flags,
        };
        self.dispatch(request, operation, reply);
    }

    fn bmap(&self, _: &fuser::Request, _: INodeNo, _: u32, _: u64, reply: ReplyBmap) {
        reply.error(fuser::Errno::ENOSYS);
    }

    fn ioctl(
        &self,
        request: &fuser::Request,
        inode: INodeNo,
        handle: FileHandle,
        _flags: IoctlFlags,
        command: u32,
        _in_data: &[u8],
        out_size: u32,
        reply: ReplyIoctl,
    ) {
        let operation = Operation::Ioctl {
            inode: inode_of(inode),
            handle: handle_of(handle),
            command,
            out_size,
        };
        self.dispatch(request, operation, reply);
    }

    /// The kernel then answers by itself that files are always ready.
    fn poll(
        &self,
        _: &fuser::Request,
        _: INodeNo,
        _: FileHandle,
        _: PollNotifier,
        _: PollEvents,
        _: PollFlags,
        reply: ReplyPoll,
    ) {
        reply.error(fuser::Errno::ENOSYS);
    }

    fn fallocate(
        &self,
        request: &fuser::Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        len: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let fallocate = Fallocate {
            inode: inode_of(inode),
            handle: handle_of(handle),
            offset,
            len,
            mode,
        };
        self.dispatch(request, Operation::Fallocate(fallocate), reply);
    }

    fn lseek(
        &self,
        request: &fuser::Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let operation = Operation::Lseek {
            inode: inode_of(inode),
            handle: handle_of(handle),
            offset,
            whence,
        };
        self.dispatch(request, operation, reply);
    }

    fn copy_file_range(
        &self,
        request: &fuser::Request,
        _from_inode: INodeNo,
        from: FileHandle,
        from_offset: u64,
        to_inode: INodeNo,
        to: FileHandle,
        to_offset: u64,
        len: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let copy = CopyRange {
            from: handle_of(from),
            from_offset,
            to_inode: inode_of(to_inode),
            to: handle_of(to),
            to_offset,
            len,
        };
        self.dispatch(request, Operation::CopyRange(copy), reply);
    }
}
