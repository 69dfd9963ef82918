//! The FUSE operations, each as an engine call.
//!
//! One method an operation, in the order of the kernel's table. A method that may have to wait hands
//! its reply to a callback or a worker; all others answer before they return.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime};

use firn_backing::{Backing, Errno, RenameFlags, Seek};
use firn_conflict::Access;
use firn_engine::{Closing, Engine, Entry, FsyncPolicy, HandleId, NodeId, OpenMode, Opened, SetAttr};
use firn_format::door::{IOCTL_TOKEN, Token};
use firn_format::protocol::Rung;
use fuser::{
    AccessFlags, BackingId, BsdFileFlags, CopyFileRangeFlags, FileHandle, Filesystem, FopenFlags, Generation,
    INodeNo, IoctlFlags, KernelConfig, LockOwner, OpenFlags, PollEvents, PollFlags, PollNotifier, ReplyAttr,
    ReplyBmap, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry,
    ReplyIoctl, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow,
    WriteFlags,
};
use zerocopy::IntoBytes;

use crate::caller::{caller, closing, masked};
use crate::coherence::{Coherence, Target};
use crate::convert::{self, errno};
use crate::door::{self, DoorPlace, Forgetter};
use crate::listing;
use crate::negotiate::{Agreed, negotiate};
use crate::passthrough::Passthrough;
use crate::stall::{Stalled, Write};
use crate::workers::Workers;

/// The attribute that tells on which rung of durability a file stands.
const STATE_XATTR: &str = "user.firn.state";
/// Bytes that one copy_file_range reply covers: its count is 32 bits wide, and a request of this
/// length is done in reasonable time on any backing.
const COPY_BYTES_MAX: u64 = 1 << 30;

/// What the mount decides about the adapter.
#[derive(Clone, Copy, Debug)]
pub struct AdapterOptions {
    /// How long the kernel may keep names and attributes without asking.
    pub attr_timeout: Duration,
    /// Ask the kernel to read drained files itself (it needs CAP_SYS_ADMIN).
    pub passthrough: bool,
}

/// Translates kernel requests for one engine.
pub struct Adapter<B: Backing> {
    engine: Arc<Engine<B>>,
    options: AdapterOptions,
    agreed: Agreed,
    workers: Workers,
    stalled: Arc<Stalled<B>>,
    coherence: Arc<Coherence<B>>,
    passthrough: Passthrough,
    door: Option<DoorPlace>,
}

thread_local! {
    /// Where a FUSE thread reads into; grows to the largest request and is used again.
    static READ_BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl<B: Backing> Adapter<B> {
    /// An adapter that is not mounted yet.
    pub fn new(engine: Arc<Engine<B>>, options: AdapterOptions) -> Self {
        let workers = Workers::default();
        let coherence = Coherence::new(Arc::clone(&engine), workers.clone());
        let stalled = Stalled::new(Arc::clone(&engine), workers.clone(), Arc::clone(&coherence));
        let (agreed, passthrough) = (Agreed::default(), Passthrough::default());
        Self { engine, options, agreed, workers, stalled, coherence, passthrough, door: None }
    }

    /// Tells processes that they may write and read the files of `arena` past the kernel, and where to
    /// ask. Whoever answers there drops attributes with the [`Forgetter`].
    pub fn open_door(&mut self, arena: [u8; 16], socket: &Path) -> Forgetter {
        self.door = DoorPlace::new(arena, socket);
        Forgetter::new(self.coherence())
    }

    pub(crate) fn coherence(&self) -> Arc<Coherence<B>> {
        Arc::clone(&self.coherence)
    }

    /// Number of writes that wait for room in the arena, kept current.
    pub fn waiting_writers(&self) -> Arc<AtomicU64> {
        self.stalled.count()
    }

    fn ttl(&self, node: NodeId) -> Duration {
        ttl(&self.engine, self.options, node)
    }

    /// Runs a change of names or attributes: here, or on a worker where it may wait for a transaction. Then the
    /// threads that answer the kernel stay free for who only reads.
    fn changing(&self, call: impl FnOnce(&Engine<B>) + Send + 'static) {
        if self.engine.changes_wait() {
            let engine = Arc::clone(&self.engine);
            self.workers.run(move || call(&engine));
        } else {
            call(&self.engine);
        }
    }

    /// The same for one that answers with what it made.
    fn making(
        &self,
        reply: ReplyEntry,
        call: impl FnOnce(&Engine<B>) -> Result<Entry, Errno> + Send + 'static,
    ) {
        let options = self.options;
        self.changing(move |engine| entry(engine, options, call(engine), reply));
    }

    /// The flags and, for passthrough, the backing id with which a new handle is told to the kernel.
    fn opening(
        &self,
        node: NodeId,
        opened: Opened,
        register: impl FnOnce(std::os::fd::OwnedFd) -> std::io::Result<BackingId>,
    ) -> (FopenFlags, Option<Arc<BackingId>>) {
        if opened.mode == OpenMode::Passthrough {
            let fd = || if self.agreed.passthrough { self.engine.backing_fd(opened.handle) } else { None };
            if let Some(id) = self.passthrough.acquire(node, opened.handle, fd, register) {
                return (FopenFlags::empty(), Some(id));
            }
            self.engine.no_passthrough(opened.handle);
        }
        (kernel_flags(opened), None)
    }

    /// Runs `call` here if the file has nothing pending (then it is as quick as the backing), else on
    /// a worker, where it may wait for the drain.
    fn run_drained(&self, handle: HandleId, call: impl FnOnce(&Engine<B>) + Send + 'static) {
        if self.engine.needs_drain(handle) {
            let engine = Arc::clone(&self.engine);
            self.workers.run(move || call(&engine));
        } else {
            call(&self.engine);
        }
    }
}

fn entry<B: Backing>(
    engine: &Engine<B>,
    options: AdapterOptions,
    result: Result<Entry, Errno>,
    reply: ReplyEntry,
) {
    match result {
        Ok(entry) => {
            let attr = convert::attr(entry.node, &entry.attr);
            reply.entry(&ttl(engine, options, entry.node), &attr, Generation(0));
        }
        Err(error) => reply.error(errno(error)),
    }
}

/// How long the kernel may keep attributes. Asked after they were taken: what came past the kernel meanwhile shows.
fn ttl<B: Backing>(engine: &Engine<B>, options: AdapterOptions, node: NodeId) -> Duration {
    if engine.is_written_past_the_kernel(node) { Duration::ZERO } else { options.attr_timeout }
}

/// A new file is open, and the kernel does not read it by itself.
fn created<B: Backing>(
    engine: &Engine<B>,
    options: AdapterOptions,
    made: Result<(Entry, Opened), Errno>,
    reply: ReplyCreate,
) {
    let (mut entry, opened) = match made {
        Ok(made) => made,
        Err(error) => return reply.error(errno(error)),
    };
    if opened.mode == OpenMode::Passthrough {
        engine.no_passthrough(opened.handle);
    }
    entry.attr.size = entry.attr.size.max(opened.size.unwrap_or(0));
    let (attr, handle) = (convert::attr(entry.node, &entry.attr), FileHandle(opened.handle.0));
    let ttl = ttl(engine, options, entry.node);
    reply.created(&ttl, &attr, Generation(0), handle, kernel_flags(opened));
}

/// How the kernel treats a handle that it does not read by itself.
fn kernel_flags(opened: Opened) -> FopenFlags {
    match opened.mode {
        OpenMode::Cached { keep: true } => FopenFlags::FOPEN_KEEP_CACHE,
        OpenMode::Cached { keep: false } => FopenFlags::empty(),
        _ => FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES,
    }
}

fn empty(result: Result<(), Errno>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(errno(error)),
    }
}

fn xattr(result: Result<Vec<u8>, Errno>, size: u32, reply: ReplyXattr) {
    match result {
        Ok(value) if size == 0 => reply.size(value.len() as u32),
        Ok(value) if value.len() > size as usize => reply.error(fuser::Errno::ERANGE),
        Ok(value) => reply.data(&value),
        Err(error) => reply.error(errno(error)),
    }
}

impl<B: Backing> Filesystem for Adapter<B> {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        self.agreed = negotiate(config, self.options.passthrough)?;
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        entry(&self.engine, self.options, self.engine.lookup(NodeId(parent.0), name), reply);
    }

    fn forget(&self, _: &Request, ino: INodeNo, count: u64) {
        self.engine.forget(NodeId(ino.0), count);
    }

    fn getattr(&self, _: &Request, ino: INodeNo, fh: Option<FileHandle>, reply: ReplyAttr) {
        match self.engine.attr(NodeId(ino.0), fh.map(|fh| HandleId(fh.0))) {
            Ok(attr) => reply.attr(&self.ttl(NodeId(ino.0)), &convert::attr(NodeId(ino.0), &attr)),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let (atime, mtime) = (convert::set_time(atime), convert::set_time(mtime));
        let mode = mode.map(|mode| mode & 0o7777);
        let set = SetAttr { mode, uid, gid, size, atime, mtime };
        let (node, options) = (NodeId(ino.0), self.options);
        self.changing(move |engine| match engine.set_attr(node, fh.map(|fh| HandleId(fh.0)), set) {
            Ok(attr) => reply.attr(&ttl(engine, options, node), &convert::attr(node, &attr)),
            Err(error) => reply.error(errno(error)),
        });
    }

    fn readlink(&self, _: &Request, ino: INodeNo, reply: ReplyData) {
        match self.engine.readlink(NodeId(ino.0)) {
            Ok(target) => reply.data(&target),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let parent = NodeId(parent.0);
        let mode = if self.agreed.umask { masked(&self.engine, parent, mode, umask) } else { mode };
        let (caller, name) = (caller(request), name.to_owned());
        self.making(reply, move |engine| engine.mknod(&caller, parent, &name, mode, rdev.into()));
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let parent = NodeId(parent.0);
        let mode = if self.agreed.umask { masked(&self.engine, parent, mode, umask) } else { mode };
        let (caller, name) = (caller(request), name.to_owned());
        self.making(reply, move |engine| engine.mkdir(&caller, parent, &name, mode));
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.to_owned();
        self.changing(move |engine| empty(engine.unlink(NodeId(parent.0), &name), reply));
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.to_owned();
        self.changing(move |engine| empty(engine.rmdir(NodeId(parent.0), &name), reply));
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let (caller, name, target) = (caller(request), name.to_owned(), target.as_os_str().to_owned());
        self.making(reply, move |engine| engine.symlink(&caller, NodeId(parent.0), &name, &target));
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: fuser::RenameFlags,
        reply: ReplyEmpty,
    ) {
        let Some(flags) = RenameFlags::from_bits(flags.bits()) else {
            return reply.error(fuser::Errno::EINVAL);
        };
        let (parent, new_parent) = (NodeId(parent.0), NodeId(new_parent.0));
        let (name, new_name) = (name.to_owned(), new_name.to_owned());
        self.changing(move |engine| empty(engine.rename(parent, &name, new_parent, &new_name, flags), reply));
    }

    fn link(&self, _: &Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let name = name.to_owned();
        self.making(reply, move |engine| engine.link(NodeId(ino.0), NodeId(parent.0), &name));
    }

    fn open(&self, _: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if flags.0 & libc::O_TRUNC != 0 && self.engine.changes_wait() {
            let coherence = Arc::clone(&self.coherence);
            return self.changing(move |engine| match engine.open(NodeId(ino.0), flags.0) {
                Ok(opened) => {
                    if opened.mode == OpenMode::Passthrough {
                        engine.no_passthrough(opened.handle);
                    }
                    let (flags, handle) = (kernel_flags(opened), FileHandle(opened.handle.0));
                    let answer = move || reply.opened(handle, flags);
                    coherence.tell_size(NodeId(ino.0), opened.handle, opened.size, answer);
                }
                Err(error) => reply.error(errno(error)),
            });
        }
        let opened = match self.engine.open(NodeId(ino.0), flags.0) {
            Ok(opened) => opened,
            Err(error) => return reply.error(errno(error)),
        };
        let (flags, id) = self.opening(NodeId(ino.0), opened, |fd| reply.open_backing(fd));
        let handle = FileHandle(opened.handle.0);
        self.coherence.tell_size(NodeId(ino.0), opened.handle, opened.size, move || match id {
            Some(id) => reply.opened_passthrough(handle, flags, &id),
            None => reply.opened(handle, flags),
        });
    }

    fn read(
        &self,
        request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let range = offset..offset.saturating_add(size.into());
        self.engine.accessed(HandleId(fh.0), request.pid(), Access::Read, range);
        READ_BUFFER.with_borrow_mut(|buffer| {
            if buffer.len() < size as usize {
                buffer.resize(size as usize, 0);
            }
            let buffer = &mut buffer[..size as usize];
            match self.engine.read(HandleId(fh.0), offset, buffer) {
                Ok(len) => reply.data(&buffer[..len]),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn write(
        &self,
        request: &Request,
        node: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        flags: WriteFlags,
        _open_flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let clear_suid = flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        let from_cache = flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        let target = Target { node, handle: HandleId(fh.0), offset, from_cache };
        // The kernel writes pages of mappings for nobody in particular.
        let pid = if from_cache { 0 } else { request.pid() };
        self.engine.accessed(
            target.handle,
            pid,
            Access::Write,
            offset..offset.saturating_add(data.len() as u64),
        );
        self.stalled.write(Write { target, clear_suid, reply }, data);
    }

    fn flush(&self, request: &Request, _ino: INodeNo, fh: FileHandle, _owner: LockOwner, reply: ReplyEmpty) {
        let handle = HandleId(fh.0);
        let by = if self.engine.is_writer(handle) { closing(request) } else { Closing::Called };
        self.engine.flush(handle, by, Box::new(move |result| empty(result, reply)));
    }

    fn release(
        &self,
        _: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        // The id first: once the engine counts no passthrough handle it may choose the other mode.
        self.passthrough.release(HandleId(fh.0));
        self.engine.release(HandleId(fh.0));
        reply.ok();
    }

    fn fsync(&self, _: &Request, _ino: INodeNo, fh: FileHandle, data_only: bool, reply: ReplyEmpty) {
        let handle = HandleId(fh.0);
        let (engine, workers) = (Arc::clone(&self.engine), self.workers.clone());
        let durable = engine.options().fsync == FsyncPolicy::Durable;
        let drained = Box::new(move |result: Result<(), Errno>| match result {
            Ok(()) if durable => workers.run(move || empty(engine.sync_file(handle, data_only), reply)),
            result => empty(result, reply),
        });
        self.engine.fsync(handle, drained);
    }

    fn opendir(&self, _: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        match self.engine.open_dir(NodeId(ino.0)) {
            Ok(handle) => reply.opened(FileHandle(handle.0), FopenFlags::empty()),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn readdir(&self, _: &Request, _ino: INodeNo, fh: FileHandle, offset: u64, reply: ReplyDirectory) {
        listing::readdir(&self.engine, HandleId(fh.0), offset, reply);
    }

    fn readdirplus(&self, _: &Request, ino: INodeNo, fh: FileHandle, offset: u64, reply: ReplyDirectoryPlus) {
        let (node, dir) = (NodeId(ino.0), HandleId(fh.0));
        listing::readdirplus(&self.engine, node, dir, offset, &self.options.attr_timeout, reply);
    }

    fn releasedir(&self, _: &Request, _ino: INodeNo, fh: FileHandle, _flags: OpenFlags, reply: ReplyEmpty) {
        self.engine.release_dir(HandleId(fh.0));
        reply.ok();
    }

    fn fsyncdir(&self, _: &Request, ino: INodeNo, _fh: FileHandle, _data_only: bool, reply: ReplyEmpty) {
        let engine = Arc::clone(&self.engine);
        self.workers.run(move || empty(engine.sync_dir(NodeId(ino.0)), reply));
    }

    fn statfs(&self, _: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        match self.engine.statfs() {
            Ok(s) => {
                let block = s.block_size as u32;
                let (free, available) = (s.blocks_free, s.blocks_available);
                reply.statfs(s.blocks, free, available, s.files, s.files_free, block, s.name_max, block);
            }
            Err(error) => reply.error(errno(error)),
        }
    }

    fn setxattr(
        &self,
        _: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        if name == STATE_XATTR {
            return reply.error(fuser::Errno::EOPNOTSUPP);
        }
        let (name, value) = (name.to_owned(), value.to_owned());
        self.changing(move |engine| empty(engine.set_xattr(NodeId(ino.0), &name, &value, flags), reply));
    }

    fn getxattr(&self, _: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let node = NodeId(ino.0);
        if name == STATE_XATTR {
            return xattr(self.engine.state_of(node).map(|rung| Rung::as_str(rung).into()), size, reply);
        }
        xattr(self.engine.get_xattr(node, name), size, reply);
    }

    fn listxattr(&self, _: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        xattr(self.engine.list_xattr(NodeId(ino.0)), size, reply);
    }

    fn removexattr(&self, _: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        if name == STATE_XATTR {
            return reply.error(fuser::Errno::EOPNOTSUPP);
        }
        let name = name.to_owned();
        self.changing(move |engine| empty(engine.remove_xattr(NodeId(ino.0), &name), reply));
    }

    /// Never asked under `default_permissions`.
    fn access(&self, _: &Request, _ino: INodeNo, _mask: AccessFlags, reply: ReplyEmpty) {
        reply.error(fuser::Errno::ENOSYS);
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let parent = NodeId(parent.0);
        let mode = if self.agreed.umask { masked(&self.engine, parent, mode, umask) } else { mode };
        if self.engine.changes_wait() {
            let (caller, name, options) = (caller(request), name.to_owned(), self.options);
            return self.changing(move |engine| {
                created(engine, options, engine.create(&caller, parent, &name, mode, flags), reply);
            });
        }
        let (mut entry, opened) = match self.engine.create(&caller(request), parent, name, mode, flags) {
            Ok(created) => created,
            Err(error) => return reply.error(errno(error)),
        };
        let (flags, id) = self.opening(entry.node, opened, |fd| reply.open_backing(fd));
        // The kernel takes the attributes of this answer for the newest in any case.
        entry.attr.size = entry.attr.size.max(opened.size.unwrap_or(0));
        let (attr, handle) = (convert::attr(entry.node, &entry.attr), FileHandle(opened.handle.0));
        let ttl = &self.ttl(entry.node);
        match id {
            Some(id) => reply.created_passthrough(ttl, &attr, Generation(0), handle, flags, &id),
            None => reply.created(ttl, &attr, Generation(0), handle, flags),
        }
    }

    fn bmap(&self, _: &Request, _ino: INodeNo, _blocksize: u32, _idx: u64, reply: ReplyBmap) {
        reply.error(fuser::Errno::ENOSYS);
    }

    fn ioctl(
        &self,
        request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: IoctlFlags,
        cmd: u32,
        _in_data: &[u8],
        out_size: u32,
        reply: ReplyIoctl,
    ) {
        if cmd != IOCTL_TOKEN || (out_size as usize) < size_of::<Token>() {
            return reply.error(fuser::Errno::ENOTTY);
        }
        reply.ioctl(0, door::token(self.door.as_ref(), request, fh.0).as_bytes());
    }

    /// The kernel then answers by itself that files are always ready.
    fn poll(
        &self,
        _: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _notifier: PollNotifier,
        _events: PollEvents,
        _flags: PollFlags,
        reply: ReplyPoll,
    ) {
        reply.error(fuser::Errno::ENOSYS);
    }

    fn fallocate(
        &self,
        request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        len: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let handle = HandleId(fh.0);
        if mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) != 0 {
            let range = offset..offset.saturating_add(len);
            self.engine.accessed(handle, request.pid(), Access::Write, range);
        }
        self.run_drained(handle, move |engine| empty(engine.allocate(handle, mode, offset, len), reply));
    }

    fn lseek(&self, _: &Request, _ino: INodeNo, fh: FileHandle, offset: i64, whence: i32, reply: ReplyLseek) {
        let what = match whence {
            libc::SEEK_DATA => Seek::Data,
            libc::SEEK_HOLE => Seek::Hole,
            // The kernel does the others itself.
            _ => return reply.error(fuser::Errno::EINVAL),
        };
        let Ok(offset) = u64::try_from(offset) else { return reply.error(fuser::Errno::ENXIO) };
        let handle = HandleId(fh.0);
        self.run_drained(handle, move |engine| match engine.seek(handle, offset, what) {
            Ok(found) => reply.offset(found as i64),
            Err(error) => reply.error(errno(error)),
        });
    }

    fn copy_file_range(
        &self,
        request: &Request,
        _ino_in: INodeNo,
        fh_in: FileHandle,
        offset_in: u64,
        _ino_out: INodeNo,
        fh_out: FileHandle,
        offset_out: u64,
        len: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let engine = Arc::clone(&self.engine);
        let (from, to, len) = (HandleId(fh_in.0), HandleId(fh_out.0), len.min(COPY_BYTES_MAX));
        let range = |offset: u64| offset..offset.saturating_add(len);
        self.engine.accessed(from, request.pid(), Access::Read, range(offset_in));
        self.engine.accessed(to, request.pid(), Access::Write, range(offset_out));
        // Always aside: without reflinks the backing copies for as long as it takes.
        self.workers.run(move || match engine.copy_range(from, offset_in, to, offset_out, len) {
            Ok(copied) => reply.written(copied as u32),
            Err(error) => reply.error(errno(error)),
        });
    }
}
