//! The FUSE operations, each as an engine call.
//!
//! One method an operation, in the order of the kernel's table. A method that may ask the backing, or wait, says of
//! what, and does so where [`Serving`] lets it: here or on another thread. One that waits for a drain hands its
//! reply to a callback. All others (forgetting, counting, closing) answer before they return and wait for nobody.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime};

use firn_backing::{Backing, Errno, RenameFlags, Seek};
use firn_conflict::Access;
use firn_engine::{
    Closing, Engine, Entry, FsyncPolicy, HandleId, InodeId, OpenMode, Opened, SetAttr,
};
use firn_format::data_socket::{IOCTL_TOKEN, Token};
use firn_format::durability::DurabilityLevel;
use fuser::{
    AccessFlags, BackingId, BsdFileFlags, CopyFileRangeFlags, FileHandle, Filesystem, FopenFlags,
    Generation, INodeNo, IoctlFlags, KernelConfig, LockOwner, OpenFlags, PollEvents, PollFlags,
    PollNotifier, ReplyAttr, ReplyBmap, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite,
    ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use zerocopy::IntoBytes;

use crate::caller::{Process, caller, closing, masked};
use crate::coherence::{Coherence, Forgetter, Target};
use crate::convert;
use crate::door::{self, DoorPlace};
use crate::failures::{Answer, Failures, Operation};
use crate::listing;
use crate::negotiate::{Agreed, negotiate};
use crate::passthrough::Passthrough;
use crate::serving::Serving;
use crate::stall::{Stalled, Write};
use crate::workers::{Topic, Workers};

/// The attribute that tells the durability level of a file.
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
    serving: Serving,
    stalled: Arc<Stalled<B>>,
    coherence: Arc<Coherence<B>>,
    passthrough: Arc<Passthrough>,
    door: Option<DoorPlace>,
    failures: Arc<Failures>,
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
        let told = Arc::downgrade(&coherence);
        engine.on_attributes_changed(Arc::new(move |inode| {
            if let Some(coherence) = told.upgrade() {
                coherence.forget_attributes(inode);
            }
        }));
        let stalled = Stalled::new(Arc::clone(&engine), workers.clone(), Arc::clone(&coherence));
        let agreed = Agreed::default();
        let passthrough = Arc::default();
        let serving = Serving::new(workers.clone());
        Self {
            engine,
            options,
            agreed,
            workers,
            serving,
            stalled,
            coherence,
            passthrough,
            door: None,
            failures: Arc::default(),
        }
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

    pub(crate) fn serving(&self) -> &Serving {
        &self.serving
    }

    pub(crate) fn workers(&self) -> Workers {
        self.workers.clone()
    }

    /// Number of writes that wait for room in the arena, kept current.
    pub fn waiting_writers(&self) -> Arc<AtomicU64> {
        self.stalled.count()
    }

    /// The requests that failed.
    pub fn failures(&self) -> Arc<Failures> {
        Arc::clone(&self.failures)
    }

    /// A reply that counts and logs the failure of what it answers.
    fn answer<R>(
        &self,
        operation: Operation,
        inode: INodeNo,
        name: Option<&OsStr>,
        reply: R,
    ) -> Answer<B, R> {
        Answer::new(
            &self.engine,
            &self.failures,
            operation,
            (InodeId(inode.0), name),
            reply,
        )
    }

    /// Runs what asks the backing for something that `topic` means.
    fn asking(&self, topic: Topic, call: impl FnOnce(&Engine<B>) + Send + 'static) {
        match self.serving.here() {
            Some(_here) => call(&self.engine),
            None => {
                let engine = Arc::clone(&self.engine);
                self.serving
                    .elsewhere(topic, Box::new(move || call(&engine)));
            }
        }
    }

    /// Runs what is known to take long.
    fn aside(&self, topic: Topic, call: impl FnOnce(&Engine<B>) + Send + 'static) {
        let engine = Arc::clone(&self.engine);
        self.workers.run_about(topic, move || call(&engine));
    }

    /// Runs a change of names or attributes: of the object, or of the names in the directory. Where it may wait for a
    /// transaction it does so aside: the threads that answer the kernel stay free for who only reads.
    fn changing(&self, inode: InodeId, call: impl FnOnce(&Engine<B>) + Send + 'static) {
        if self.engine.changes_wait() {
            self.aside(Topic::Inode(inode), call);
        } else {
            self.asking(Topic::Inode(inode), call);
        }
    }

    /// The same for one that answers with what it made in a directory.
    fn making(
        &self,
        parent: InodeId,
        reply: Answer<B, ReplyEntry>,
        call: impl FnOnce(&Engine<B>) -> Result<Entry, Errno> + Send + 'static,
    ) {
        let options = self.options;
        self.changing(parent, move |engine| {
            entry(engine, options, call(engine), reply)
        });
    }

    /// What is needed to tell the kernel of a new handle.
    fn opener(&self) -> Opener {
        let passthrough = self
            .agreed
            .passthrough
            .then(|| Arc::clone(&self.passthrough));
        Opener {
            passthrough,
            options: self.options,
        }
    }

    /// Runs `call` at once if the file has nothing pending (then it is as quick as the backing), else on
    /// a worker, where it may wait for the drain.
    fn run_drained(
        &self,
        inode: InodeId,
        handle: HandleId,
        call: impl FnOnce(&Engine<B>) + Send + 'static,
    ) {
        if self.engine.needs_drain(handle) {
            self.aside(Topic::Inode(inode), call);
        } else {
            self.asking(Topic::Inode(inode), call);
        }
    }
}

/// Tells the kernel of new handles.
struct Opener {
    /// Where kernel and adapter agreed on that.
    passthrough: Option<Arc<Passthrough>>,
    options: AdapterOptions,
}

impl Opener {
    /// The flags and, for passthrough, the backing id with which a new handle is told to the kernel.
    fn flags<B: Backing>(
        &self,
        engine: &Engine<B>,
        inode: InodeId,
        opened: Opened,
        register: impl FnOnce(OwnedFd) -> std::io::Result<BackingId>,
    ) -> (FopenFlags, Option<Arc<BackingId>>) {
        if opened.mode == OpenMode::Passthrough {
            let acquired = self.passthrough.as_ref().and_then(|passthrough| {
                passthrough.acquire(
                    inode,
                    opened.handle,
                    || engine.backing_fd(opened.handle),
                    register,
                )
            });
            if let Some(id) = acquired {
                return (FopenFlags::empty(), Some(id));
            }
            engine.no_passthrough(opened.handle);
        }
        (kernel_flags(opened), None)
    }

    /// Answers create(2).
    fn created<B: Backing>(
        &self,
        engine: &Engine<B>,
        made: Result<(Entry, Opened), Errno>,
        reply: Answer<B, ReplyCreate>,
    ) {
        let (mut entry, opened) = match made {
            Ok(made) => made,
            Err(error) => return reply.error(error),
        };
        let (flags, id) = self.flags(engine, entry.inode, opened, |fd| reply.open_backing(fd));
        // The kernel takes the attributes of this answer for the newest in any case.
        entry.attr.size = entry.attr.size.max(opened.size.unwrap_or(0));
        let attr = convert::attr(entry.inode, &entry.attr);
        let handle = FileHandle(opened.handle.0);
        let ttl = &ttl(engine, self.options, entry.inode);
        match id {
            Some(id) => {
                reply
                    .success()
                    .created_passthrough(ttl, &attr, Generation(0), handle, flags, &id)
            }
            None => reply
                .success()
                .created(ttl, &attr, Generation(0), handle, flags),
        }
    }

    /// Answers open(2).
    fn opened<B: Backing>(
        &self,
        engine: &Engine<B>,
        coherence: &Coherence<B>,
        inode: InodeId,
        opened: Result<Opened, Errno>,
        reply: Answer<B, ReplyOpen>,
    ) {
        let opened = match opened {
            Ok(opened) => opened,
            Err(error) => return reply.error(error),
        };
        let (flags, id) = self.flags(engine, inode, opened, |fd| reply.open_backing(fd));
        let handle = FileHandle(opened.handle.0);
        coherence.tell_size(inode, opened.handle, opened.size, move || match id {
            Some(id) => reply.success().opened_passthrough(handle, flags, &id),
            None => reply.success().opened(handle, flags),
        });
    }
}

fn entry<B: Backing>(
    engine: &Engine<B>,
    options: AdapterOptions,
    result: Result<Entry, Errno>,
    reply: Answer<B, ReplyEntry>,
) {
    match result {
        Ok(entry) => {
            let attr = convert::attr(entry.inode, &entry.attr);
            reply
                .success()
                .entry(&ttl(engine, options, entry.inode), &attr, Generation(0));
        }
        Err(error) => reply.error(error),
    }
}

/// How long the kernel may keep attributes. Asked after they were taken: what came past the kernel meanwhile shows.
fn ttl<B: Backing>(engine: &Engine<B>, options: AdapterOptions, inode: InodeId) -> Duration {
    if engine.is_written_past_the_kernel(inode) {
        Duration::ZERO
    } else {
        options.attr_timeout
    }
}

/// How the kernel treats a handle that it does not read by itself.
fn kernel_flags(opened: Opened) -> FopenFlags {
    match opened.mode {
        OpenMode::Cached { keep: true } => FopenFlags::FOPEN_KEEP_CACHE,
        OpenMode::Cached { keep: false } => FopenFlags::empty(),
        _ => FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES,
    }
}

fn empty<B: Backing>(result: Result<(), Errno>, reply: Answer<B, ReplyEmpty>) {
    match result {
        Ok(()) => reply.success().ok(),
        Err(error) => reply.error(error),
    }
}

fn xattr<B: Backing>(result: Result<Vec<u8>, Errno>, size: u32, reply: Answer<B, ReplyXattr>) {
    match result {
        Ok(value) if size == 0 => reply.success().size(value.len() as u32),
        Ok(value) if value.len() > size as usize => reply.error(Errno::RANGE),
        Ok(value) => reply.success().data(&value),
        Err(error) => reply.error(error),
    }
}

impl<B: Backing> Filesystem for Adapter<B> {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        self.agreed = negotiate(config, self.options.passthrough)?;
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let reply = self.answer(Operation::Lookup, parent, Some(name), reply);
        let parent = InodeId(parent.0);
        let name = name.to_owned();
        let options = self.options;
        self.asking(Topic::name(parent, &name), move |engine| {
            entry(engine, options, engine.lookup(parent, &name), reply);
        });
    }

    fn forget(&self, _: &Request, ino: INodeNo, count: u64) {
        self.engine.forget(InodeId(ino.0), count);
    }

    fn getattr(&self, _: &Request, ino: INodeNo, fh: Option<FileHandle>, reply: ReplyAttr) {
        let reply = self.answer(Operation::Getattr, ino, None, reply);
        let (inode, handle, options) = (InodeId(ino.0), fh.map(|fh| HandleId(fh.0)), self.options);
        self.asking(Topic::Inode(inode), move |engine| {
            match engine.attr(inode, handle) {
                Ok(attr) => reply
                    .success()
                    .attr(&ttl(engine, options, inode), &convert::attr(inode, &attr)),
                Err(error) => reply.error(error),
            }
        });
    }

    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let reply = self.answer(Operation::Setattr, ino, None, reply);
        let atime = convert::set_time(atime);
        let mtime = convert::set_time(mtime);
        let mode = mode.map(|mode| mode & 0o7777);
        let set = SetAttr {
            mode,
            uid,
            gid,
            size,
            atime,
            mtime,
        };
        let inode = InodeId(ino.0);
        let options = self.options;
        let by = Process::of(request);
        self.changing(inode, move |engine| {
            match engine.set_attr(inode, set, Some(&by)) {
                Ok(attr) => reply
                    .success()
                    .attr(&ttl(engine, options, inode), &convert::attr(inode, &attr)),
                Err(error) => reply.error(error),
            }
        });
    }

    fn readlink(&self, _: &Request, ino: INodeNo, reply: ReplyData) {
        let reply = self.answer(Operation::Readlink, ino, None, reply);
        let inode = InodeId(ino.0);
        self.asking(Topic::Inode(inode), move |engine| {
            match engine.readlink(inode) {
                Ok(target) => reply.success().data(&target),
                Err(error) => reply.error(error),
            }
        });
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
        let reply = self.answer(Operation::Mknod, parent, Some(name), reply);
        let parent = InodeId(parent.0);
        let umask = self.agreed.umask.then_some(umask);
        let caller = caller(request);
        let name = name.to_owned();
        self.making(parent, reply, move |engine| {
            let mode = masked(engine, parent, mode, umask);
            engine.mknod(&caller, parent, &name, mode, rdev.into())
        });
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
        let reply = self.answer(Operation::Mkdir, parent, Some(name), reply);
        let parent = InodeId(parent.0);
        let umask = self.agreed.umask.then_some(umask);
        let caller = caller(request);
        let name = name.to_owned();
        self.making(parent, reply, move |engine| {
            let mode = masked(engine, parent, mode, umask);
            engine.mkdir(&caller, parent, &name, mode)
        });
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let reply = self.answer(Operation::Unlink, parent, Some(name), reply);
        let parent = InodeId(parent.0);
        let name = name.to_owned();
        self.changing(parent, move |engine| {
            empty(engine.unlink(parent, &name), reply)
        });
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let reply = self.answer(Operation::Rmdir, parent, Some(name), reply);
        let parent = InodeId(parent.0);
        let name = name.to_owned();
        self.changing(parent, move |engine| {
            empty(engine.rmdir(parent, &name), reply)
        });
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let reply = self.answer(Operation::Symlink, parent, Some(name), reply);
        let caller = caller(request);
        let parent = InodeId(parent.0);
        let name = name.to_owned();
        let target = target.as_os_str().to_owned();
        self.making(parent, reply, move |engine| {
            engine.symlink(&caller, parent, &name, &target)
        });
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
        let reply = self.answer(Operation::Rename, parent, Some(name), reply);
        let Some(flags) = RenameFlags::from_bits(flags.bits()) else {
            return reply.error(Errno::INVAL);
        };
        let parent = InodeId(parent.0);
        let new_parent = InodeId(new_parent.0);
        let name = name.to_owned();
        let new_name = new_name.to_owned();
        self.changing(parent, move |engine| {
            empty(
                engine.rename(parent, &name, new_parent, &new_name, flags),
                reply,
            );
        });
    }

    fn link(&self, _: &Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let reply = self.answer(Operation::Link, parent, Some(name), reply);
        let inode = InodeId(ino.0);
        let parent = InodeId(parent.0);
        let name = name.to_owned();
        self.making(parent, reply, move |engine| {
            engine.link(inode, parent, &name)
        });
    }

    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let reply = self.answer(Operation::Open, ino, None, reply);
        let inode = InodeId(ino.0);
        let flags = flags.0;
        let opener = self.opener();
        let coherence = Arc::clone(&self.coherence);
        if flags & libc::O_TRUNC != 0 {
            let by = Process::of(request);
            self.changing(inode, move |engine| {
                let opened = engine
                    .drop_privileges(inode, &by)
                    .and_then(|()| engine.open(inode, flags));
                opener.opened(engine, &coherence, inode, opened, reply);
            });
        } else {
            self.asking(Topic::Inode(inode), move |engine| {
                opener.opened(engine, &coherence, inode, engine.open(inode, flags), reply);
            });
        }
    }

    fn read(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let reply = self.answer(Operation::Read, ino, None, reply);
        let range = offset..offset.saturating_add(size.into());
        self.engine
            .accessed(HandleId(fh.0), request.pid(), Access::Read, range);
        let handle = HandleId(fh.0);
        let size = size as usize;
        let call = move |engine: &Engine<B>, buffer: &mut [u8]| match engine
            .read(handle, offset, buffer)
        {
            Ok(len) => reply.success().data(&buffer[..len]),
            Err(error) => reply.error(error),
        };
        match self.serving.here() {
            Some(_here) => READ_BUFFER.with_borrow_mut(|buffer| {
                if buffer.len() < size {
                    buffer.resize(size, 0);
                }
                call(&self.engine, &mut buffer[..size]);
            }),
            None => {
                let engine = Arc::clone(&self.engine);
                let call = Box::new(move || call(&engine, &mut vec![0; size]));
                self.serving.elsewhere(Topic::Inode(InodeId(ino.0)), call);
            }
        }
    }

    fn write(
        &self,
        request: &Request,
        inode: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        flags: WriteFlags,
        _open_flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let reply = self.answer(Operation::Write, inode, None, reply);
        let from_cache = flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        let target = Target {
            inode,
            handle: HandleId(fh.0),
            offset,
            from_cache,
        };
        // The kernel writes pages of mappings for nobody in particular.
        let pid = if from_cache { 0 } else { request.pid() };
        let end = offset.saturating_add(data.len() as u64);
        self.engine
            .accessed(target.handle, pid, Access::Write, offset..end);
        let may_keep = !flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        let by = (!from_cache).then(|| Process::of(request).known_to_have_cap_fsetid(may_keep));
        let write = Write { target, by, reply };
        match self.serving.here() {
            Some(_here) => self.stalled.write(write, data),
            // What only memory is needed for goes on without a copy, whatever hangs.
            None if !self.engine.write_may_wait(target.handle, end, write.by()) => {
                self.stalled.write(write, data);
            }
            None => {
                let stalled = Arc::clone(&self.stalled);
                let data = data.to_vec();
                let call = Box::new(move || stalled.write(write, &data));
                self.serving.elsewhere(Topic::Inode(InodeId(inode.0)), call);
            }
        }
    }

    fn flush(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        let reply = self.answer(Operation::Flush, ino, None, reply);
        let handle = HandleId(fh.0);
        let by = if self.engine.is_writer(handle) {
            closing(request)
        } else {
            Closing::Called
        };
        self.engine
            .flush(handle, by, Box::new(move |result| empty(result, reply)));
    }

    fn release(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        // The id first: once the engine counts no passthrough handle it may choose the other mode.
        let handle = HandleId(fh.0);
        self.passthrough.release(handle);
        match self.serving.here() {
            Some(_here) => {
                self.engine.release(handle);
                reply.ok();
            }
            None => {
                // Nobody waits for the answer, and the kernel holds back what it reads ahead, of any file, while
                // many such answers are missing.
                reply.ok();
                let engine = Arc::clone(&self.engine);
                let call = Box::new(move || engine.release(handle));
                self.serving.elsewhere(Topic::Inode(InodeId(ino.0)), call);
            }
        }
    }

    fn fsync(&self, _: &Request, ino: INodeNo, fh: FileHandle, data_only: bool, reply: ReplyEmpty) {
        let reply = self.answer(Operation::Fsync, ino, None, reply);
        let handle = HandleId(fh.0);
        let topic = Topic::Inode(InodeId(ino.0));
        let engine = Arc::clone(&self.engine);
        let workers = self.workers.clone();
        let durable = engine.options().fsync == FsyncPolicy::Durable;
        let drained = Box::new(move |result: Result<(), Errno>| match result {
            Ok(()) if durable => {
                workers.run_about(topic, move || {
                    empty(engine.sync_file(handle, data_only), reply)
                });
            }
            result => empty(result, reply),
        });
        self.engine.fsync(handle, drained);
    }

    fn opendir(&self, _: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let reply = self.answer(Operation::Opendir, ino, None, reply);
        let inode = InodeId(ino.0);
        self.asking(Topic::Inode(inode), move |engine| {
            match engine.open_dir(inode) {
                Ok(handle) => reply
                    .success()
                    .opened(FileHandle(handle.0), FopenFlags::empty()),
                Err(error) => reply.error(error),
            }
        });
    }

    fn readdir(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        reply: ReplyDirectory,
    ) {
        let reply = self.answer(Operation::Readdir, ino, None, reply);
        let call =
            move |engine: &Engine<B>| listing::readdir(engine, HandleId(fh.0), offset, reply);
        self.asking(Topic::Inode(InodeId(ino.0)), call);
    }

    fn readdirplus(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        reply: ReplyDirectoryPlus,
    ) {
        let reply = self.answer(Operation::Readdir, ino, None, reply);
        let inode = InodeId(ino.0);
        let dir = HandleId(fh.0);
        let ttl = self.options.attr_timeout;
        self.asking(Topic::Inode(inode), move |engine| {
            listing::readdirplus(engine, inode, dir, offset, &ttl, reply);
        });
    }

    fn releasedir(
        &self,
        _: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.engine.release_dir(HandleId(fh.0));
        reply.ok();
    }

    fn fsyncdir(
        &self,
        _: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        _data_only: bool,
        reply: ReplyEmpty,
    ) {
        let reply = self.answer(Operation::Fsyncdir, ino, None, reply);
        let inode = InodeId(ino.0);
        self.aside(Topic::Inode(inode), move |engine| {
            empty(engine.sync_dir(inode), reply)
        });
    }

    fn statfs(&self, _: &Request, ino: INodeNo, reply: ReplyStatfs) {
        let reply = self.answer(Operation::Statfs, ino, None, reply);
        self.asking(Topic::Backing, move |engine| match engine.statfs() {
            Ok(s) => {
                let block = s.block_size as u32;
                let free = s.blocks_free;
                let available = s.blocks_available;
                let files = s.files;
                let files_free = s.files_free;
                reply.success().statfs(
                    s.blocks, free, available, files, files_free, block, s.name_max, block,
                );
            }
            Err(error) => reply.error(error),
        });
    }

    fn setxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let reply = self.answer(Operation::Setxattr, ino, None, reply);
        if name == STATE_XATTR {
            return reply.error(Errno::OPNOTSUPP);
        }
        let inode = InodeId(ino.0);
        let name = name.to_owned();
        let value = value.to_owned();
        let by = Process::of(request);
        self.changing(inode, move |engine| {
            empty(
                engine.set_xattr(inode, &name, &value, flags, Some(&by)),
                reply,
            );
        });
    }

    fn getxattr(&self, _: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let reply = self.answer(Operation::Getxattr, ino, None, reply);
        let inode = InodeId(ino.0);
        if name == STATE_XATTR {
            return xattr(
                self.engine
                    .state_of(inode)
                    .map(|level| DurabilityLevel::as_str(level).into()),
                size,
                reply,
            );
        }
        let name = name.to_owned();
        self.asking(Topic::Inode(inode), move |engine| {
            xattr(engine.get_xattr(inode, &name), size, reply)
        });
    }

    fn listxattr(&self, _: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let reply = self.answer(Operation::Listxattr, ino, None, reply);
        let inode = InodeId(ino.0);
        self.asking(Topic::Inode(inode), move |engine| {
            xattr(engine.list_xattr(inode), size, reply)
        });
    }

    fn removexattr(&self, _: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let reply = self.answer(Operation::Removexattr, ino, None, reply);
        if name == STATE_XATTR {
            return reply.error(Errno::OPNOTSUPP);
        }
        let inode = InodeId(ino.0);
        let name = name.to_owned();
        self.changing(inode, move |engine| {
            empty(engine.remove_xattr(inode, &name), reply)
        });
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
        let reply = self.answer(Operation::Create, parent, Some(name), reply);
        let parent = InodeId(parent.0);
        let umask = self.agreed.umask.then_some(umask);
        let caller = caller(request);
        let name = name.to_owned();
        let opener = self.opener();
        self.changing(parent, move |engine| {
            let mode = masked(engine, parent, mode, umask);
            opener.created(
                engine,
                engine.create(&caller, parent, &name, mode, flags),
                reply,
            );
        });
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
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        len: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let reply = self.answer(Operation::Fallocate, ino, None, reply);
        let handle = HandleId(fh.0);
        if mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) != 0 {
            let range = offset..offset.saturating_add(len);
            self.engine
                .accessed(handle, request.pid(), Access::Write, range);
        }
        let inode = InodeId(ino.0);
        let by = Process::of(request);
        self.run_drained(inode, handle, move |engine| {
            let ready = engine.drop_privileges(inode, &by);
            empty(
                ready.and_then(|()| engine.allocate(handle, mode, offset, len)),
                reply,
            );
        });
    }

    fn lseek(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let reply = self.answer(Operation::Lseek, ino, None, reply);
        let what = match whence {
            libc::SEEK_DATA => Seek::Data,
            libc::SEEK_HOLE => Seek::Hole,
            // The kernel does the others itself.
            _ => return reply.error(Errno::INVAL),
        };
        let Ok(offset) = u64::try_from(offset) else {
            return reply.error(Errno::NXIO);
        };
        let handle = HandleId(fh.0);
        self.run_drained(InodeId(ino.0), handle, move |engine| {
            match engine.seek(handle, offset, what) {
                Ok(found) => reply.success().offset(found as i64),
                Err(error) => reply.error(error),
            }
        });
    }

    fn copy_file_range(
        &self,
        request: &Request,
        _ino_in: INodeNo,
        fh_in: FileHandle,
        offset_in: u64,
        ino_out: INodeNo,
        fh_out: FileHandle,
        offset_out: u64,
        len: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let reply = self.answer(Operation::Copy, ino_out, None, reply);
        let from = HandleId(fh_in.0);
        let to = HandleId(fh_out.0);
        let len = len.min(COPY_BYTES_MAX);
        let range = |offset: u64| offset..offset.saturating_add(len);
        self.engine
            .accessed(from, request.pid(), Access::Read, range(offset_in));
        self.engine
            .accessed(to, request.pid(), Access::Write, range(offset_out));
        // Always aside: without reflinks the backing copies for as long as it takes.
        let inode = InodeId(ino_out.0);
        let by = Process::of(request);
        self.aside(Topic::Inode(inode), move |engine| {
            let ready = engine.drop_privileges(inode, &by);
            match ready.and_then(|()| engine.copy_range(from, offset_in, to, offset_out, len)) {
                Ok(copied) => reply.success().written(copied as u32),
                Err(error) => reply.error(error),
            }
        });
    }
}
