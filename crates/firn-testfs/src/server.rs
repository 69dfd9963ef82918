//! A FUSE server for tests. It serves a *backing*, an implementation of Firn's trait for file systems, such as a
//! directory.
//!
//! For each request the server first asks a [`Policy`], which may delay or refuse it. Then it makes one call of the
//! backing.
//!
//! Inode numbers are those of the backing, so they are the same after a restart. Only the root has the number 1, as
//! FUSE demands. The server keeps an object of the backing from its first lookup until the kernel forgets it.
//!
//! Relies on: all objects below the root are on one file system. Inode numbers of two file systems could be equal.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::{self, IoSlice};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use firn_backing::{Access, Attr, Backing, LockMode, NewKind, RenameFlags as Flags, Seek};
use fuser::{
    BsdFileFlags, CopyFileRangeFlags, Errno, FileAttr, FileHandle, FileType, Filesystem,
    FopenFlags, Generation, INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags,
    ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry,
    ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use parking_lot::Mutex;

use crate::requests::{caller, errno, file_attr, file_type, set_time};
use crate::{Caching, MAX_WRITE_BYTES, Policy, Transfer};

type Result<T> = std::result::Result<T, Errno>;

/// A FUSE server with its backing, its policy, and the objects that the kernel knows or has open.
pub struct Server<B: Backing, P> {
    backing: B,
    policy: P,
    caching: Caching,
    /// Whether flock(2) locks the file in the backing, so that all mounts of the backing exclude each other.
    has_locks: bool,
    /// Inode number of the root in the backing. For the kernel the root has the number 1.
    root: u64,
    /// The objects that the kernel knows, by their inode number.
    inodes: Mutex<HashMap<u64, Known<B>>>,
    /// Open files by handle.
    files: Mutex<HashMap<u64, Arc<B::File>>>,
    /// Open directories by handle.
    dirs: Mutex<HashMap<u64, Arc<B::Dir>>>,
    next_handle: AtomicU64,
}

/// An object that the kernel knows.
struct Known<B: Backing> {
    inode: B::Inode,
    /// Number of references that the kernel has: one for each reply with this entry.
    lookups: u64,
}

impl<B: Backing, P: Policy<B>> Server<B, P> {
    /// Makes a server for `backing`. Fails if the attributes of the root cannot be read.
    ///
    /// The process must have umask 0, because the kernel has applied the umask of the program already.
    pub fn new(backing: B, policy: P, caching: Caching) -> firn_backing::Result<Self> {
        let root = backing.root();
        let number = backing.attr(&root)?.ino;
        let known = Known {
            inode: root,
            lookups: 1,
        };
        Ok(Self {
            backing,
            policy,
            caching,
            has_locks: false,
            root: number,
            inodes: Mutex::new(HashMap::from([(INodeNo::ROOT.0, known)])),
            files: Mutex::default(),
            dirs: Mutex::default(),
            next_handle: AtomicU64::new(1),
        })
    }

    /// Makes flock(2) lock the files of the backing, so that several mounts of it exclude each other. A lock that would
    /// have to wait fails.
    pub fn with_locks(mut self) -> Self {
        self.has_locks = true;
        self
    }

    /// Returns the inode number that the kernel uses for an object.
    fn number(&self, attr: &Attr) -> u64 {
        if attr.ino == self.root {
            INodeNo::ROOT.0
        } else {
            attr.ino
        }
    }

    fn attr(&self, attr: &Attr) -> FileAttr {
        file_attr(self.number(attr), attr)
    }

    /// Returns how long the kernel may cache names and attributes.
    fn timeout(&self) -> Duration {
        match self.caching {
            Caching::Usual => Duration::from_secs(1),
            Caching::Nothing => Duration::ZERO,
        }
    }

    fn open_flags(&self) -> FopenFlags {
        match self.caching {
            Caching::Usual => FopenFlags::empty(),
            Caching::Nothing => FopenFlags::FOPEN_DIRECT_IO,
        }
    }

    /// Returns the object with this inode number. Fails with ESTALE if the kernel should not know it.
    fn inode(&self, number: INodeNo) -> Result<B::Inode> {
        let inodes = self.inodes.lock();
        let known = inodes.get(&number.0).ok_or(Errno::ESTALE)?;
        Ok(known.inode.clone())
    }

    /// Asks the policy about a request, and returns the object of the request. Fails if the policy refuses it.
    fn admitted(&self, operation: &'static str, number: INodeNo) -> Result<B::Inode> {
        let inode = self.inode(number)?;
        self.policy.admit(operation, &inode, None)?;
        Ok(inode)
    }

    /// Asks the policy about a request that concerns a name, and returns the directory of the name.
    fn admitted_name(
        &self,
        operation: &'static str,
        parent: INodeNo,
        name: &OsStr,
    ) -> Result<B::Inode> {
        let inode = self.inode(parent)?;
        self.policy.admit(operation, &inode, Some(name))?;
        Ok(inode)
    }

    /// Counts one more reference of the kernel to an object, for a reply with this entry. Returns its attributes.
    fn count_lookup(&self, inode: B::Inode, attr: &Attr) -> FileAttr {
        let attr = self.attr(attr);
        let mut inodes = self.inodes.lock();
        let known = inodes
            .entry(attr.ino.0)
            .or_insert(Known { inode, lookups: 0 });
        known.lookups += 1;
        attr
    }

    /// Counts fewer references of the kernel to an object, and drops the object after the last one. The root stays.
    fn forget_lookups(&self, number: INodeNo, lookups: u64) {
        if number == INodeNo::ROOT {
            return;
        }
        let mut inodes = self.inodes.lock();
        let Some(known) = inodes.get_mut(&number.0) else {
            return;
        };
        known.lookups = known.lookups.saturating_sub(lookups);
        if known.lookups == 0 {
            inodes.remove(&number.0);
        }
    }

    /// Stores an open file, and returns the new handle by which requests name it.
    fn keep_file(&self, file: B::File) -> FileHandle {
        let handle = self.next_handle.fetch_add(1, Ordering::Relaxed);
        self.files.lock().insert(handle, Arc::new(file));
        FileHandle(handle)
    }

    fn file(&self, handle: FileHandle) -> Result<Arc<B::File>> {
        let files = self.files.lock();
        files.get(&handle.0).cloned().ok_or(Errno::EBADF)
    }

    fn dir(&self, handle: FileHandle) -> Result<Arc<B::Dir>> {
        let dirs = self.dirs.lock();
        dirs.get(&handle.0).cloned().ok_or(Errno::EBADF)
    }

    /// Asks the policy about a request to an open file, and returns the file. Fails if the policy refuses it.
    fn admitted_file(
        &self,
        operation: &'static str,
        number: INodeNo,
        handle: FileHandle,
    ) -> Result<Arc<B::File>> {
        self.admitted(operation, number)?;
        self.file(handle)
    }

    /// Sets the size of a file, by the open file of the request if it has one.
    fn set_len(&self, inode: &B::Inode, handle: Option<FileHandle>, len: u64) -> Result<()> {
        if let Some(handle) = handle {
            return self
                .backing
                .set_len(&*self.file(handle)?, len)
                .map_err(errno);
        }
        let file = self.backing.open(inode, Access::Write).map_err(errno)?;
        self.backing.set_len(&file, len).map_err(errno)
    }

    /// Replies with an entry, of which the kernel then has one more reference, or with an error.
    fn reply_entry(&self, reply: ReplyEntry, made: Result<(B::Inode, Attr)>) {
        match made {
            Ok((inode, attr)) => {
                let attr = self.count_lookup(inode, &attr);
                reply.entry(&self.timeout(), &attr, Generation(0));
            }
            Err(error) => reply.error(error),
        }
    }

    fn reply_attr(&self, reply: ReplyAttr, found: Result<Attr>) {
        match found {
            Ok(attr) => reply.attr(&self.timeout(), &self.attr(&attr)),
            Err(error) => reply.error(error),
        }
    }
}

fn reply_empty(reply: ReplyEmpty, done: Result<()>) {
    match done {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}

fn reply_written(reply: ReplyWrite, written: Result<u64>) {
    match written {
        Ok(count) => reply.written(count as u32),
        Err(error) => reply.error(error),
    }
}

fn reply_value(reply: ReplyXattr, size: u32, found: Result<Vec<u8>>) {
    match found {
        Ok(bytes) if size == 0 => reply.size(bytes.len() as u32),
        Ok(bytes) if bytes.len() > size as usize => reply.error(Errno::ERANGE),
        Ok(bytes) => reply.data(&bytes),
        Err(error) => reply.error(error),
    }
}

impl<B: Backing, P: Policy<B>> Filesystem for Server<B, P> {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let _ = config.set_max_write(MAX_WRITE_BYTES);
        // Lookups of different names in a directory come side by side, as from other file systems.
        let mut flags = InitFlags::FUSE_PARALLEL_DIROPS;
        if self.caching == Caching::Usual {
            flags |= InitFlags::FUSE_DO_READDIRPLUS | InitFlags::FUSE_READDIRPLUS_AUTO;
        }
        if self.has_locks {
            flags |= InitFlags::FUSE_FLOCK_LOCKS;
        }
        for flag in flags.iter() {
            let _ = config.add_capabilities(flag);
        }
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let name = &*self.policy.stored_name(name);
        let found = self
            .admitted_name("lookup", parent, name)
            .and_then(|dir| self.backing.lookup(&dir, name).map_err(errno));
        self.reply_entry(reply, found);
    }

    fn forget(&self, _: &Request, number: INodeNo, lookups: u64) {
        self.forget_lookups(number, lookups);
    }

    fn getattr(&self, _: &Request, number: INodeNo, handle: Option<FileHandle>, reply: ReplyAttr) {
        let found = self.admitted("getattr", number).and_then(|inode| {
            match handle.and_then(|handle| self.file(handle).ok()) {
                Some(file) => self.backing.attr_of_file(&file).map_err(errno),
                None => self.backing.attr(&inode).map_err(errno),
            }
        });
        self.reply_attr(reply, found);
    }

    /// Sets the attributes that the request gives, in the order size, owner, mode, times. Replies with all attributes.
    ///
    /// The mode comes after the owner, because a change of the owner clears the set-id bits.
    fn setattr(
        &self,
        _: &Request,
        number: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _: Option<SystemTime>,
        handle: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let set = || -> Result<Attr> {
            let inode = self.admitted("setattr", number)?;
            if let Some(size) = size {
                self.set_len(&inode, handle, size)?;
            }
            if uid.is_some() || gid.is_some() {
                self.backing.set_owner(&inode, uid, gid).map_err(errno)?;
            }
            if let Some(mode) = mode {
                self.backing.set_mode(&inode, mode).map_err(errno)?;
            }
            if atime.is_some() || mtime.is_some() {
                let times = (set_time(atime), set_time(mtime));
                self.backing
                    .set_times(&inode, times.0, times.1)
                    .map_err(errno)?;
            }
            self.backing.attr(&inode).map_err(errno)
        };
        self.reply_attr(reply, set());
    }

    fn readlink(&self, _: &Request, number: INodeNo, reply: ReplyData) {
        let target = self
            .admitted("readlink", number)
            .and_then(|inode| self.backing.readlink(&inode).map_err(errno));
        match target {
            Ok(target) => reply.data(&target),
            Err(error) => reply.error(error),
        }
    }

    /// Makes a regular file, FIFO, socket or device, as mknod(2) does, and replies with its entry.
    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let name = &*self.policy.stored_name(name);
        let made = self.admitted_name("mknod", parent, name).and_then(|dir| {
            let node = NewKind::Node {
                mode,
                rdev: rdev.into(),
            };
            let made = self.backing.make(&caller(request), &dir, name, node);
            made.map_err(errno)
        });
        self.reply_entry(reply, made);
    }

    /// Makes a directory, and replies with its entry.
    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        reply: ReplyEntry,
    ) {
        let name = &*self.policy.stored_name(name);
        let made = self.admitted_name("mkdir", parent, name).and_then(|dir| {
            let caller = caller(request);
            self.backing
                .mkdir(&caller, &dir, name, mode & 0o7777)
                .map_err(errno)
        });
        self.reply_entry(reply, made);
    }

    /// Makes a symbolic link to `target`, and replies with its entry.
    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let target = target.as_os_str();
        let stored_name = &*self.policy.stored_name(name);
        let made = self
            .admitted_name("symlink", parent, stored_name)
            .and_then(|dir| {
                self.backing
                    .symlink(&caller(request), &dir, stored_name, target)
                    .map_err(errno)
            });
        self.reply_entry(reply, made);
    }

    fn link(&self, _: &Request, number: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let name = &*self.policy.stored_name(name);
        let linked = self.admitted_name("link", parent, name).and_then(|dir| {
            let inode = self.inode(number)?;
            let attr = self.backing.link(&inode, &dir, name).map_err(errno)?;
            Ok((inode, attr))
        });
        self.reply_entry(reply, linked);
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = &*self.policy.stored_name(name);
        let done = self
            .admitted_name("unlink", parent, name)
            .and_then(|dir| self.backing.unlink(&dir, name).map_err(errno));
        reply_empty(reply, done);
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = &*self.policy.stored_name(name);
        let done = self
            .admitted_name("rmdir", parent, name)
            .and_then(|dir| self.backing.rmdir(&dir, name).map_err(errno));
        reply_empty(reply, done);
    }

    /// Renames an object, with the flags of renameat2(2).
    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let name = &*self.policy.stored_name(name);
        let new_name = &*self.policy.stored_name(new_name);
        let done = self.admitted_name("rename", parent, name).and_then(|from| {
            let to = self.inode(new_parent)?;
            let flags = Flags::from_bits_retain(flags.bits());
            self.backing
                .rename(&from, name, &to, new_name, flags)
                .map_err(errno)
        });
        reply_empty(reply, done);
    }

    /// Makes a regular file and opens it. Replies with its entry and the handle of the open file.
    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        let name = &*self.policy.stored_name(name);
        let made = self.admitted_name("create", parent, name).and_then(|dir| {
            let caller = caller(request);
            self.backing
                .create(&caller, &dir, name, mode & 0o7777)
                .map_err(errno)
        });
        match made {
            Ok((inode, file, attr)) => {
                let attr = self.count_lookup(inode, &attr);
                let handle = self.keep_file(file);
                let flags = self.open_flags();
                reply.created(&self.timeout(), &attr, Generation(0), handle, flags);
            }
            Err(error) => reply.error(error),
        }
    }

    fn open(&self, _: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let opened = self.admitted("open", number);
        let opened =
            opened.and_then(|inode| self.backing.open(&inode, access(flags)).map_err(errno));
        match opened {
            Ok(file) => reply.opened(self.keep_file(file), self.open_flags()),
            Err(error) => reply.error(error),
        }
    }

    /// Replies with bytes of an open file, after the time that the policy takes for their transfer.
    fn read(
        &self,
        _: &Request,
        number: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut buffer = vec![0; size as usize];
        let read = self.admitted_file("read", number, handle).and_then(|file| {
            let count = self
                .backing
                .read_at(&file, &mut buffer, offset)
                .map_err(errno)?;
            if count > 0 {
                let end = offset + count as u64;
                self.policy.transfer(number.0, Transfer::Read(offset..end));
            }
            Ok(count)
        });
        match read {
            Ok(count) => reply.data(&buffer[..count]),
            Err(error) => reply.error(error),
        }
    }

    /// Stores bytes in an open file, after the time that the policy takes for their transfer. Replies with their
    /// number.
    fn write(
        &self,
        _: &Request,
        number: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let written = self
            .admitted_file("write", number, handle)
            .and_then(|file| {
                let end = offset + data.len() as u64;
                self.policy.transfer(number.0, Transfer::Write(offset..end));
                let data = [IoSlice::new(data)];
                self.backing.write_at(&file, &data, offset).map_err(errno)
            });
        reply_written(reply, written.map(|count| count as u64));
    }

    fn flush(&self, _: &Request, number: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply_empty(reply, self.admitted("flush", number).map(drop));
    }

    /// Makes the bytes of an open file durable, and with `data_only` not all of its attributes.
    fn fsync(
        &self,
        _: &Request,
        number: INodeNo,
        handle: FileHandle,
        data_only: bool,
        reply: ReplyEmpty,
    ) {
        let synced = self
            .admitted_file("fsync", number, handle)
            .and_then(|file| {
                self.policy.transfer(number.0, Transfer::Sync);
                self.backing.sync(&file, data_only).map_err(errno)
            });
        reply_empty(reply, synced);
    }

    fn release(
        &self,
        _: &Request,
        number: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        let admitted = self.admitted("release", number).map(drop);
        self.files.lock().remove(&handle.0);
        self.policy.transfer(number.0, Transfer::Close);
        reply_empty(reply, admitted);
    }

    /// Locks a whole file, as flock(2) does. Fails with EAGAIN if another lock prevents that. A lock that should wait
    /// is not supported.
    fn setlk(
        &self,
        _: &Request,
        number: INodeNo,
        handle: FileHandle,
        _: LockOwner,
        _: u64,
        _: u64,
        typ: i32,
        _: u32,
        waits: bool,
        reply: ReplyEmpty,
    ) {
        // The kernel itself manages locks of ranges, so this request always comes from flock(2). The close of the file
        // ends the lock.
        let locked = self
            .admitted_file("setlk", number, handle)
            .and_then(|file| {
                let mode = match typ {
                    libc::F_WRLCK => LockMode::Exclusive,
                    libc::F_RDLCK => LockMode::Shared,
                    _ => return Err(Errno::EOPNOTSUPP),
                };
                match self.backing.try_lock(&file, mode).map_err(errno)? {
                    true => Ok(()),
                    false if waits => Err(Errno::EOPNOTSUPP),
                    false => Err(Errno::EAGAIN),
                }
            });
        reply_empty(reply, locked);
    }

    fn opendir(&self, _: &Request, number: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let opened = self
            .admitted("opendir", number)
            .and_then(|inode| self.backing.open_dir(&inode).map_err(errno));
        match opened {
            Ok(dir) => {
                let handle = self.next_handle.fetch_add(1, Ordering::Relaxed);
                self.dirs.lock().insert(handle, Arc::new(dir));
                reply.opened(FileHandle(handle), FopenFlags::empty());
            }
            Err(error) => reply.error(error),
        }
    }

    /// Replies with the names in a directory after the position `offset`, as many as fit.
    fn readdir(
        &self,
        _: &Request,
        number: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let mut list = || -> Result<()> {
            self.admitted("readdir", number)?;
            let dir = self.dir(handle)?;
            let mut take = |entry: firn_backing::DirEntry<'_>| {
                let kind = entry.kind.map_or(FileType::RegularFile, file_type);
                !reply.add(INodeNo(entry.ino), entry.cookie as u64, kind, entry.name)
            };
            self.backing
                .read_dir(&dir, offset as i64, &mut take)
                .map_err(errno)
        };
        match list() {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    /// Replies with names like `readdir`, and with the attributes of each object. The kernel then has a reference to
    /// each of them.
    fn readdirplus(
        &self,
        _: &Request,
        number: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let mut list = || -> Result<()> {
            let parent = self.admitted("readdirplus", number)?;
            let dir = self.dir(handle)?;
            let attr_of_parent = self.backing.attr(&parent).map_err(errno)?;
            let timeout = self.timeout();
            // Adds one entry to the reply, and returns whether there is room for more.
            let mut add_entry = |entry: firn_backing::DirEntry<'_>| {
                let cookie = entry.cookie as u64;
                if entry.name == "." || entry.name == ".." {
                    // The kernel takes no reference on these two.
                    let attr = file_attr(entry.ino, &attr_of_parent);
                    return !reply.add(
                        attr.ino,
                        cookie,
                        entry.name,
                        &timeout,
                        &attr,
                        Generation(0),
                    );
                }
                let Ok((inode, attr)) = self.backing.lookup(&parent, entry.name) else {
                    // It was removed meanwhile.
                    return true;
                };
                let attr = self.count_lookup(inode, &attr);
                let is_full =
                    reply.add(attr.ino, cookie, entry.name, &timeout, &attr, Generation(0));
                if is_full {
                    self.forget_lookups(attr.ino, 1);
                }
                !is_full
            };
            self.backing
                .read_dir(&dir, offset as i64, &mut add_entry)
                .map_err(errno)
        };
        match list() {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn releasedir(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.dirs.lock().remove(&handle.0);
        reply.ok();
    }

    fn fsyncdir(&self, _: &Request, number: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let synced = self
            .admitted("fsyncdir", number)
            .and_then(|inode| self.backing.sync_dir(&inode).map_err(errno));
        reply_empty(reply, synced);
    }

    /// Replies with the free and used space of the file system.
    fn statfs(&self, _: &Request, number: INodeNo, reply: ReplyStatfs) {
        let found = self
            .admitted("statfs", number)
            .and_then(|_| self.backing.statfs().map_err(errno));
        match found {
            Ok(of) => reply.statfs(
                of.blocks,
                of.blocks_free,
                of.blocks_available,
                of.files,
                of.files_free,
                of.block_size as u32,
                of.name_max,
                of.block_size as u32,
            ),
            Err(error) => reply.error(error),
        }
    }

    /// Sets an extended attribute, with the flags of setxattr(2).
    fn setxattr(
        &self,
        _: &Request,
        number: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _: u32,
        reply: ReplyEmpty,
    ) {
        let set = self.admitted("setxattr", number).and_then(|inode| {
            self.backing
                .set_xattr(&inode, name, value, flags)
                .map_err(errno)
        });
        reply_empty(reply, set);
    }

    fn getxattr(&self, _: &Request, number: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let found = self
            .admitted("getxattr", number)
            .and_then(|inode| self.backing.get_xattr(&inode, name).map_err(errno));
        reply_value(reply, size, found);
    }

    fn listxattr(&self, _: &Request, number: INodeNo, size: u32, reply: ReplyXattr) {
        let found = self
            .admitted("listxattr", number)
            .and_then(|inode| self.backing.list_xattr(&inode).map_err(errno));
        reply_value(reply, size, found);
    }

    fn removexattr(&self, _: &Request, number: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let removed = self
            .admitted("removexattr", number)
            .and_then(|inode| self.backing.remove_xattr(&inode, name).map_err(errno));
        reply_empty(reply, removed);
    }

    /// Reserves, zeroes or frees a range of an open file, as fallocate(2) does.
    fn fallocate(
        &self,
        _: &Request,
        number: INodeNo,
        handle: FileHandle,
        offset: u64,
        len: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let done = self
            .admitted_file("fallocate", number, handle)
            .and_then(|file| {
                self.backing
                    .allocate(&file, mode, offset, len)
                    .map_err(errno)
            });
        reply_empty(reply, done);
    }

    /// Replies with the offset of the next data or hole. The kernel itself serves all other kinds of lseek(2).
    fn lseek(
        &self,
        _: &Request,
        number: INodeNo,
        handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let what = if whence == libc::SEEK_DATA {
            Seek::Data
        } else {
            Seek::Hole
        };
        let found = self
            .admitted_file("lseek", number, handle)
            .and_then(|file| self.backing.seek(&file, offset as u64, what).map_err(errno));
        match found {
            Ok(found) => reply.offset(found as i64),
            Err(error) => reply.error(error),
        }
    }

    /// Copies a range between two open files within the backing, and replies with the number of bytes.
    fn copy_file_range(
        &self,
        _: &Request,
        _: INodeNo,
        from: FileHandle,
        from_offset: u64,
        number: INodeNo,
        to: FileHandle,
        to_offset: u64,
        len: u64,
        _: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let copied = self
            .admitted_file("copy_file_range", number, to)
            .and_then(|to| {
                let from = self.file(from)?;
                self.backing
                    .copy_range(&from, from_offset, &to, to_offset, len)
                    .map_err(errno)
            });
        reply_written(reply, copied);
    }
}

/// What a descriptor with these flags of open(2) may do.
fn access(flags: OpenFlags) -> Access {
    match flags.0 & libc::O_ACCMODE {
        libc::O_RDONLY => Access::Read,
        libc::O_WRONLY => Access::Write,
        _ => Access::ReadWrite,
    }
}
