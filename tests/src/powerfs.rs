//! A file server whose power can be cut: a FUSE view of the simulated disk, which loses what was not synced.
//!
//! The kernel passes no syncfs(2) on to it, as to sshfs and the clients of most parallel file systems. After
//! [`PowerFs::cut`] the disk holds one of the states that a real one may hold: of the data and names that no fsync(2)
//! covered any subset is gone ([`firn_backing::SimBacking::power_loss`]).

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, IoSlice, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use firn_backing::sim::SimInode;
use firn_backing::{
    Access, Attr, Backing, Caller, Kind, RenameFlags as Flags, Seek, SetTime, SimBacking, Time,
};
use fuser::{
    BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, LockOwner, MountOption, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate,
    ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs,
    ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};

use crate::sandbox::{Sandbox, helper_binary, unmount_lazily};

/// Nothing is cached: the tests look at what the server has.
const TTL: Duration = Duration::ZERO;

/// A running server; ends with the value, and its disk with it.
pub struct PowerFs {
    mount_point: PathBuf,
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl PowerFs {
    /// Serves an empty disk at `<sandbox>/<name>`.
    pub fn new(sandbox: &Sandbox, name: &str) -> Self {
        let mount_point = sandbox.mkdir(name);
        let mut command = Command::new(helper_binary());
        command
            .arg("powerfs")
            .arg(&mount_point)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().expect("start the server");
        let commands = child.stdin.take().expect("a pipe");
        let answers = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut server = Self {
            mount_point,
            child,
            commands,
            answers,
        };
        server.wait_for_answer();
        server
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.mount_point
    }

    /// Cuts the power, and comes back with what is left. Nobody may use it meanwhile.
    pub fn cut(&mut self, seed: u64) {
        writeln!(self.commands, "cut {seed}").expect("tell the server");
        self.wait_for_answer();
    }

    /// fsync and fsyncdir requests that have come so far.
    pub fn syncs(&mut self) -> u64 {
        writeln!(self.commands, "syncs").expect("ask the server");
        self.wait_for_answer().trim().parse().expect("a number")
    }

    fn wait_for_answer(&mut self) -> String {
        let mut line = String::new();
        self.answers
            .read_line(&mut line)
            .expect("the server answers");
        assert!(!line.is_empty(), "the server ended");
        line
    }
}

impl Drop for PowerFs {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        unmount_lazily(&self.mount_point);
    }
}

static SYNCS: AtomicU64 = AtomicU64::new(0);

/// Serves until standard input ends.
pub fn serve(mount_point: &Path) {
    let disk = SimBacking::new();
    let mount = || {
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::FSName("firn-powerfs".into()),
            MountOption::DefaultPermissions,
        ];
        config.acl = fuser::SessionACL::All;
        let root = disk.root();
        let server = Server {
            disk: disk.clone(),
            inodes: Mutex::new(HashMap::from([(1, root)])),
            open: Mutex::default(),
            next: AtomicU64::new(1),
        };
        fuser::spawn_mount(server, mount_point, &config).expect("mount")
    };
    let mut session = Some(mount());
    println!("ready");
    for line in std::io::stdin().lines() {
        let line = line.expect("a command");
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["cut", seed] => {
                unmount_lazily(mount_point);
                drop(session.take());
                disk.power_loss(seed.parse().expect("a seed"));
                disk.fsck().expect("the disk is whole");
                session = Some(mount());
                println!("ready");
            }
            ["syncs"] => println!("{}", SYNCS.load(Ordering::Relaxed)),
            _ => panic!("what is {line:?}?"),
        }
    }
}

struct Server {
    disk: SimBacking,
    inodes: Mutex<HashMap<u64, SimInode>>,
    open: Mutex<HashMap<u64, std::sync::Arc<firn_backing::sim::SimFile>>>,
    next: AtomicU64,
}

type Result<T> = std::result::Result<T, Errno>;

fn errno(errno: firn_backing::Errno) -> Errno {
    Errno::from_i32(errno.raw_os_error())
}

impl Server {
    fn inode(&self, ino: INodeNo) -> Result<SimInode> {
        self.inodes
            .lock()
            .expect("lock")
            .get(&ino.0)
            .cloned()
            .ok_or(Errno::ESTALE)
    }

    fn know(&self, (inode, attr): (SimInode, Attr)) -> FileAttr {
        self.inodes
            .lock()
            .expect("lock")
            .entry(attr.ino)
            .or_insert(inode);
        file_attr(&attr)
    }

    fn keep(&self, file: firn_backing::sim::SimFile) -> FileHandle {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.open
            .lock()
            .expect("lock")
            .insert(number, std::sync::Arc::new(file));
        FileHandle(number)
    }

    fn file(&self, handle: FileHandle) -> Result<std::sync::Arc<firn_backing::sim::SimFile>> {
        self.open
            .lock()
            .expect("lock")
            .get(&handle.0)
            .cloned()
            .ok_or(Errno::EBADF)
    }
}

fn caller(request: &Request) -> Caller {
    Caller {
        uid: request.uid(),
        gid: request.gid(),
        pid: request.pid(),
    }
}

fn file_type(kind: Kind) -> FileType {
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

fn file_attr(attr: &Attr) -> FileAttr {
    let time = |time: Time| UNIX_EPOCH + Duration::new(time.sec.max(0) as u64, time.nsec);
    FileAttr {
        ino: INodeNo(attr.ino),
        size: attr.size,
        blocks: attr.blocks,
        atime: time(attr.atime),
        mtime: time(attr.mtime),
        ctime: time(attr.ctime),
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

fn set_time(time: Option<TimeOrNow>) -> SetTime {
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

fn entry(reply: ReplyEntry, made: Result<FileAttr>) {
    match made {
        Ok(attr) => reply.entry(&TTL, &attr, Generation(0)),
        Err(errno) => reply.error(errno),
    }
}

fn empty(reply: ReplyEmpty, done: Result<()>) {
    match done {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(errno),
    }
}

fn value(reply: ReplyXattr, size: u32, found: Result<Vec<u8>>) {
    match found {
        Ok(bytes) if size == 0 => reply.size(bytes.len() as u32),
        Ok(bytes) if bytes.len() > size as usize => reply.error(Errno::ERANGE),
        Ok(bytes) => reply.data(&bytes),
        Err(errno) => reply.error(errno),
    }
}

impl Filesystem for Server {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self
            .inode(parent)
            .and_then(|dir| self.disk.lookup(&dir, name).map_err(errno));
        entry(reply, found.map(|found| self.know(found)));
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self
            .inode(ino)
            .and_then(|inode| self.disk.attr(&inode).map_err(errno))
        {
            Ok(attr) => reply.attr(&TTL, &file_attr(&attr)),
            Err(errno) => reply.error(errno),
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
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let set = |inode: SimInode| {
            if let Some(size) = size {
                let file = self.disk.open(&inode, Access::ReadWrite)?;
                self.disk.set_len(&file, size)?;
            }
            if uid.is_some() || gid.is_some() {
                self.disk.set_owner(&inode, uid, gid)?;
            }
            if let Some(mode) = mode {
                self.disk.set_mode(&inode, mode)?;
            }
            if atime.is_some() || mtime.is_some() {
                self.disk
                    .set_times(&inode, set_time(atime), set_time(mtime))?;
            }
            self.disk.attr(&inode)
        };
        match self.inode(ino).and_then(|inode| set(inode).map_err(errno)) {
            Ok(attr) => reply.attr(&TTL, &file_attr(&attr)),
            Err(errno) => reply.error(errno),
        }
    }

    fn readlink(&self, _: &Request, ino: INodeNo, reply: ReplyData) {
        match self
            .inode(ino)
            .and_then(|inode| self.disk.readlink(&inode).map_err(errno))
        {
            Ok(target) => reply.data(&target),
            Err(errno) => reply.error(errno),
        }
    }

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
        let make = |dir| {
            self.disk
                .mknod(&caller(request), &dir, name, mode, u64::from(rdev))
                .map_err(errno)
        };
        entry(
            reply,
            self.inode(parent)
                .and_then(make)
                .map(|made| self.know(made)),
        );
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        reply: ReplyEntry,
    ) {
        let make = |dir| {
            self.disk
                .mkdir(&caller(request), &dir, name, mode)
                .map_err(errno)
        };
        entry(
            reply,
            self.inode(parent)
                .and_then(make)
                .map(|made| self.know(made)),
        );
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        empty(
            reply,
            self.inode(parent)
                .and_then(|dir| self.disk.unlink(&dir, name).map_err(errno)),
        );
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        empty(
            reply,
            self.inode(parent)
                .and_then(|dir| self.disk.rmdir(&dir, name).map_err(errno)),
        );
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let target = OsStr::from_bytes(target.as_os_str().as_bytes());
        let make = |dir| {
            self.disk
                .symlink(&caller(request), &dir, name, target)
                .map_err(errno)
        };
        entry(
            reply,
            self.inode(parent)
                .and_then(make)
                .map(|made| self.know(made)),
        );
    }

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
        let rename = || {
            let from = self.inode(parent)?;
            let to = self.inode(new_parent)?;
            let flags = Flags::from_bits_retain(flags.bits());
            self.disk
                .rename(&from, name, &to, new_name, flags)
                .map_err(errno)
        };
        empty(reply, rename());
    }

    fn link(&self, _: &Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let link = || {
            let inode = self.inode(ino)?;
            let dir = self.inode(parent)?;
            self.disk
                .link(&inode, &dir, name)
                .map(|attr| file_attr(&attr))
                .map_err(errno)
        };
        entry(reply, link());
    }

    fn open(&self, _: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let access = match flags.0 & libc::O_ACCMODE {
            libc::O_RDONLY => Access::Read,
            libc::O_WRONLY => Access::Write,
            _ => Access::ReadWrite,
        };
        match self
            .inode(ino)
            .and_then(|inode| self.disk.open(&inode, access).map_err(errno))
        {
            Ok(file) => reply.opened(self.keep(file), FopenFlags::FOPEN_DIRECT_IO),
            Err(errno) => reply.error(errno),
        }
    }

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
        let make = |dir| {
            self.disk
                .create(&caller(request), &dir, name, mode)
                .map_err(errno)
        };
        match self.inode(parent).and_then(make) {
            Ok((inode, file, attr)) => {
                let attr = self.know((inode, attr));
                reply.created(
                    &TTL,
                    &attr,
                    Generation(0),
                    self.keep(file),
                    FopenFlags::FOPEN_DIRECT_IO,
                );
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut buf = vec![0; size as usize];
        match self
            .file(fh)
            .and_then(|file| self.disk.read_at(&file, &mut buf, offset).map_err(errno))
        {
            Ok(count) => reply.data(&buf[..count]),
            Err(errno) => reply.error(errno),
        }
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let data = [IoSlice::new(data)];
        match self
            .file(fh)
            .and_then(|file| self.disk.write_at(&file, &data, offset).map_err(errno))
        {
            Ok(count) => reply.written(count as u32),
            Err(errno) => reply.error(errno),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, fh: FileHandle, data_only: bool, reply: ReplyEmpty) {
        SYNCS.fetch_add(1, Ordering::Relaxed);
        empty(
            reply,
            self.file(fh)
                .and_then(|file| self.disk.sync(&file, data_only).map_err(errno)),
        );
    }

    fn fsyncdir(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        SYNCS.fetch_add(1, Ordering::Relaxed);
        empty(
            reply,
            self.inode(ino)
                .and_then(|inode| self.disk.sync_dir(&inode).map_err(errno)),
        );
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.open.lock().expect("lock").remove(&fh.0);
        reply.ok();
    }

    fn readdir(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let mut list = |inode: SimInode| {
            let dir = self.disk.open_dir(&inode)?;
            self.disk.read_dir(&dir, offset as i64, &mut |entry| {
                let kind = entry.kind.map_or(FileType::RegularFile, file_type);
                !reply.add(INodeNo(entry.ino), entry.cookie as u64, kind, entry.name)
            })
        };
        let listed = self.inode(ino).and_then(|inode| list(inode).map_err(errno));
        match listed {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        reply.statfs(1 << 20, 1 << 19, 1 << 19, 1 << 16, 1 << 15, 4096, 255, 4096);
    }

    fn setxattr(
        &self,
        _: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _: u32,
        reply: ReplyEmpty,
    ) {
        let set = |inode| {
            self.disk
                .set_xattr(&inode, name, value, flags)
                .map_err(errno)
        };
        empty(reply, self.inode(ino).and_then(set));
    }

    fn getxattr(&self, _: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        value(
            reply,
            size,
            self.inode(ino)
                .and_then(|inode| self.disk.get_xattr(&inode, name).map_err(errno)),
        );
    }

    fn listxattr(&self, _: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        value(
            reply,
            size,
            self.inode(ino)
                .and_then(|inode| self.disk.list_xattr(&inode).map_err(errno)),
        );
    }

    fn removexattr(&self, _: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        empty(
            reply,
            self.inode(ino)
                .and_then(|inode| self.disk.remove_xattr(&inode, name).map_err(errno)),
        );
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        len: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let done = self
            .file(fh)
            .and_then(|file| self.disk.allocate(&file, mode, offset, len).map_err(errno));
        empty(reply, done);
    }

    fn lseek(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let what = if whence == libc::SEEK_DATA {
            Seek::Data
        } else {
            Seek::Hole
        };
        match self
            .file(fh)
            .and_then(|file| self.disk.seek(&file, offset as u64, what).map_err(errno))
        {
            Ok(found) => reply.offset(found as i64),
            Err(errno) => reply.error(errno),
        }
    }
}
