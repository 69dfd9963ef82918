//! The baseline of `meta`: a plain passthrough file system, one system call for each request.
//!
//! Inodes are `O_PATH` descriptors found by (device, inode), as in libfuse's `passthrough_hp`; entries
//! and attributes live one second in the kernel, as in Firn; nothing else is cached.
//!
//! Relies on: only what the benchmark calls is there. It is no file system to keep data in.

use std::collections::HashMap;
use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request,
    TimeOrNow, WriteFlags,
};
use parking_lot::Mutex;
use rustix::fs::{AtFlags, Dir, Mode, OFlags, Stat};

const TTL: Duration = Duration::from_secs(1);

/// See the module.
pub struct Plain {
    table: Mutex<Table>,
    files: Mutex<HashMap<u64, Arc<OwnedFd>>>,
    dirs: Mutex<HashMap<u64, Arc<Mutex<Dir>>>>,
    next_handle: AtomicU64,
}

#[derive(Default)]
struct Table {
    inodes: HashMap<u64, Inode>,
    by_identity: HashMap<(u64, u64), u64>,
    next: u64,
}

struct Inode {
    fd: Arc<OwnedFd>,
    identity: (u64, u64),
    lookups: u64,
}

type Result<T> = std::result::Result<T, Errno>;

fn errno(error: rustix::io::Errno) -> Errno {
    Errno::from_i32(error.raw_os_error())
}

impl Plain {
    /// Passes on to `source`.
    pub fn new(source: &Path) -> anyhow::Result<Self> {
        let fd = rustix::fs::open(
            source,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        let stat = rustix::fs::fstat(&fd)?;
        let identity = (stat.st_dev, stat.st_ino);
        let root = Inode {
            fd: Arc::new(fd),
            identity,
            lookups: 1,
        };
        let mut table = Table {
            next: INodeNo::ROOT.0 + 1,
            ..Default::default()
        };
        table.inodes.insert(INodeNo::ROOT.0, root);
        table.by_identity.insert(identity, INodeNo::ROOT.0);
        Ok(Self {
            table: Mutex::new(table),
            files: Default::default(),
            dirs: Default::default(),
            next_handle: AtomicU64::new(1),
        })
    }

    fn inode(&self, inode: INodeNo) -> Result<Arc<OwnedFd>> {
        self.table
            .lock()
            .inodes
            .get(&inode.0)
            .map(|n| n.fd.clone())
            .ok_or(Errno::ESTALE)
    }

    fn file(&self, handle: FileHandle) -> Result<Arc<OwnedFd>> {
        self.files
            .lock()
            .get(&handle.0)
            .cloned()
            .ok_or(Errno::EBADF)
    }

    fn find(&self, parent: &OwnedFd, name: &OsStr) -> Result<FileAttr> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(parent, name, flags, Mode::empty()).map_err(errno)?;
        let stat = rustix::fs::fstat(&fd).map_err(errno)?;
        let identity = (stat.st_dev, stat.st_ino);
        let mut table = self.table.lock();
        let inode = match table.by_identity.get(&identity) {
            Some(inode) => *inode,
            None => {
                let inode = table.next;
                table.next += 1;
                table.by_identity.insert(identity, inode);
                table.inodes.insert(
                    inode,
                    Inode {
                        fd: Arc::new(fd),
                        identity,
                        lookups: 0,
                    },
                );
                inode
            }
        };
        table
            .inodes
            .get_mut(&inode)
            .expect("it was found or made above")
            .lookups += 1;
        Ok(attr(inode, &stat))
    }

    fn open_inode(&self, inode: INodeNo, flags: OFlags) -> Result<OwnedFd> {
        let inode = self.inode(inode)?;
        // An O_PATH descriptor is opened for good through its entry in /proc.
        let path =
            CString::new(format!("/proc/self/fd/{}", inode.as_raw_fd())).expect("no zero byte");
        rustix::fs::open(
            &path,
            (flags - OFlags::NOFOLLOW) | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(errno)
    }

    fn keep_file(&self, fd: OwnedFd) -> FileHandle {
        let handle = self.next_handle.fetch_add(1, Ordering::Relaxed);
        self.files.lock().insert(handle, Arc::new(fd));
        FileHandle(handle)
    }

    /// Hands entries from `offset` on to `sink` until it is full.
    fn list(
        &self,
        handle: FileHandle,
        offset: u64,
        mut sink: impl FnMut(u64, u64, FileType, &OsStr) -> Result<bool>,
    ) -> Result<()> {
        let dir = self
            .dirs
            .lock()
            .get(&handle.0)
            .cloned()
            .ok_or(Errno::EBADF)?;
        let mut dir = dir.lock();
        dir.seek(offset as i64).map_err(errno)?;
        while let Some(entry) = dir.read() {
            let entry = entry.map_err(errno)?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if sink(
                entry.ino(),
                entry.offset() as u64,
                kind_of(entry.file_type()),
                name,
            )? {
                break;
            }
        }
        Ok(())
    }
}

impl Filesystem for Plain {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let _ = config.set_max_write(super::MAX_WRITE_BYTES);
        let flags = [
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_ATOMIC_O_TRUNC,
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_READDIRPLUS_AUTO,
        ];
        for flag in flags {
            let _ = config.add_capabilities(flag);
        }
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self
            .inode(parent)
            .and_then(|parent| self.find(&parent, name))
        {
            Ok(attr) => reply.entry(&TTL, &attr, Generation(0)),
            Err(error) => reply.error(error),
        }
    }

    fn forget(&self, _: &Request, number: INodeNo, count: u64) {
        let mut table = self.table.lock();
        let Some(inode) = table.inodes.get_mut(&number.0) else {
            return;
        };
        inode.lookups = inode.lookups.saturating_sub(count);
        if inode.lookups == 0 {
            let identity = inode.identity;
            table.inodes.remove(&number.0);
            table.by_identity.remove(&identity);
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let stat = self
            .inode(inode)
            .and_then(|inode| rustix::fs::fstat(&*inode).map_err(errno));
        match stat {
            Ok(stat) => reply.attr(&TTL, &attr(inode.0, &stat)),
            Err(error) => reply.error(error),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        inode: INodeNo,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let set = || -> Result<FileAttr> {
            if let Some(size) = size {
                let file = self.open_inode(inode, OFlags::WRONLY)?;
                rustix::fs::ftruncate(&file, size).map_err(errno)?;
            }
            let stat = rustix::fs::fstat(&*self.inode(inode)?).map_err(errno)?;
            Ok(attr(inode.0, &stat))
        };
        match set() {
            Ok(attr) => reply.attr(&TTL, &attr),
            Err(error) => reply.error(error),
        }
    }

    fn mkdir(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let made = self.inode(parent).and_then(|parent| {
            let mode = Mode::from_raw_mode(mode & !umask);
            rustix::fs::mkdirat(&*parent, name, mode).map_err(errno)?;
            self.find(&parent, name)
        });
        match made {
            Ok(attr) => reply.entry(&TTL, &attr, Generation(0)),
            Err(error) => reply.error(error),
        }
    }

    fn create(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let made = self.inode(parent).and_then(|parent| {
            let flags = OFlags::from_bits_retain(flags as u32) | OFlags::CREATE | OFlags::CLOEXEC;
            let mode = Mode::from_raw_mode(mode & !umask);
            let fd = rustix::fs::openat(&*parent, name, flags, mode).map_err(errno)?;
            Ok((self.find(&parent, name)?, self.keep_file(fd)))
        });
        match made {
            Ok((attr, handle)) => {
                reply.created(&TTL, &attr, Generation(0), handle, FopenFlags::empty())
            }
            Err(error) => reply.error(error),
        }
    }

    fn open(&self, _: &Request, inode: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        match self.open_inode(inode, OFlags::from_bits_retain(flags.0 as u32)) {
            Ok(fd) => reply.opened(self.keep_file(fd), FopenFlags::empty()),
            Err(error) => reply.error(error),
        }
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut buffer = vec![0; size as usize];
        let read = self
            .file(handle)
            .and_then(|file| rustix::io::pread(&*file, &mut buffer[..], offset).map_err(errno));
        match read {
            Ok(n) => reply.data(&buffer[..n]),
            Err(error) => reply.error(error),
        }
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let written = self
            .file(handle)
            .and_then(|file| rustix::io::pwrite(&*file, data, offset).map_err(errno));
        match written {
            Ok(n) => reply.written(n as u32),
            Err(error) => reply.error(error),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.files.lock().remove(&handle.0);
        reply.ok();
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let done = self.inode(parent).and_then(|parent| {
            rustix::fs::unlinkat(&*parent, name, AtFlags::empty()).map_err(errno)
        });
        match done {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    /// As libfuse's passthrough_hp does: by the link in /proc, then a lookup.
    fn link(&self, _: &Request, inode: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let linked = self.inode(inode).and_then(|inode| {
            let parent = self.inode(parent)?;
            let path = format!("/proc/self/fd/{}", inode.as_raw_fd());
            rustix::fs::linkat(
                rustix::fs::CWD,
                path,
                &*parent,
                name,
                AtFlags::SYMLINK_FOLLOW,
            )
            .map_err(errno)?;
            self.find(&parent, name)
        });
        match linked {
            Ok(attr) => reply.entry(&TTL, &attr, Generation(0)),
            Err(error) => reply.error(error),
        }
    }

    fn opendir(&self, _: &Request, inode: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let opened = self.open_inode(inode, OFlags::RDONLY | OFlags::DIRECTORY);
        match opened.and_then(|fd| Dir::new(fd).map_err(errno)) {
            Ok(dir) => {
                let handle = self.next_handle.fetch_add(1, Ordering::Relaxed);
                self.dirs.lock().insert(handle, Arc::new(Mutex::new(dir)));
                reply.opened(FileHandle(handle), FopenFlags::empty());
            }
            Err(error) => reply.error(error),
        }
    }

    fn readdir(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let listed = self.list(handle, offset, |inode, next, kind, name| {
            Ok(reply.add(INodeNo(inode), next, kind, name))
        });
        match listed {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn readdirplus(
        &self,
        request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let listed = self.inode(inode).and_then(|parent| {
            self.list(handle, offset, |number, next, kind, name| {
                if name == "." || name == ".." {
                    // The kernel takes no reference on these two.
                    let mut attr = attr(number, &rustix::fs::fstat(parent.as_fd()).map_err(errno)?);
                    attr.kind = kind;
                    return Ok(reply.add(INodeNo(number), next, name, &TTL, &attr, Generation(0)));
                }
                let attr = self.find(&parent, name)?;
                let full = reply.add(attr.ino, next, name, &TTL, &attr, Generation(0));
                if full {
                    self.forget(request, attr.ino, 1);
                }
                Ok(full)
            })
        });
        match listed {
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
}

fn kind_of(kind: rustix::fs::FileType) -> FileType {
    match kind {
        rustix::fs::FileType::Directory => FileType::Directory,
        rustix::fs::FileType::Symlink => FileType::Symlink,
        _ => FileType::RegularFile,
    }
}

fn time(seconds: i64, nanoseconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::new(seconds.max(0) as u64, nanoseconds as u32)
}

fn attr(inode: u64, stat: &Stat) -> FileAttr {
    FileAttr {
        ino: INodeNo(inode),
        size: stat.st_size as u64,
        blocks: stat.st_blocks as u64,
        atime: time(stat.st_atime, stat.st_atime_nsec),
        mtime: time(stat.st_mtime, stat.st_mtime_nsec),
        ctime: time(stat.st_ctime, stat.st_ctime_nsec),
        crtime: SystemTime::UNIX_EPOCH,
        kind: kind_of(rustix::fs::FileType::from_raw_mode(stat.st_mode)),
        perm: (stat.st_mode & 0o7777) as u16,
        nlink: stat.st_nlink as u32,
        uid: stat.st_uid,
        gid: stat.st_gid,
        rdev: stat.st_rdev as u32,
        blksize: stat.st_blksize as u32,
        flags: 0,
    }
}
