//! A backing that fails on command: a FUSE view of a directory, steered by a control file.
//!
//! No device mapper is needed to get an I/O error out of a file system this way, and killing the
//! program makes the backing vanish (ENOTCONN) as a lost network mount does.
//!
//! The control file holds one word: empty for health, else the errno that every write shall give
//! (`EIO`, `ENOSPC`, `EDQUOT`, `ESTALE`). Beside it, in a file with the extension `hang`, an operation and the
//! beginning of a path: that operation does not return for any such path before the file says something else. Each
//! call that came to hang adds a byte to the file with the extension `hung`.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    BsdFileFlags, Config, CopyFileRangeFlags, Errno, FileAttr, FileHandle, FileType, Filesystem,
    FopenFlags, Generation, INodeNo, InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags,
    RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry,
    ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, SessionACL, TimeOrNow,
    WriteFlags,
};
use rustix::fs::{FallocateFlags, SeekFrom};

use crate::command::wait_until;
use crate::sandbox::{Sandbox, helper_binary, is_mounted, is_stopped, kill, unmount_lazily};
use crate::watchdog::Watchdog;

/// Calls that may hang at a time, and one more.
const THREADS: usize = 160;
/// How often a call that hangs looks whether it still shall.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Nothing is cached, so that a change of the control file acts at once.
const TTL: Duration = Duration::ZERO;

/// A running failing file system; ends with the value.
pub struct FaultFs {
    source: PathBuf,
    mount_point: PathBuf,
    control: PathBuf,
    child: Option<Child>,
}

impl FaultFs {
    /// Serves `<sandbox>/source` at `<sandbox>/faulty`.
    pub fn new(sandbox: &Sandbox) -> Self {
        Self::of(sandbox, sandbox.mkdir("source"))
    }

    /// Serves `source`, which other servers may serve too, at `<sandbox>/faulty`.
    pub fn of(sandbox: &Sandbox, source: PathBuf) -> Self {
        let control = sandbox.join("control");
        fs::write(&control, "").expect("write the control file");
        let mut fault = Self {
            source,
            mount_point: sandbox.mkdir("faulty"),
            control,
            child: None,
        };
        fault.start();
        fault
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.mount_point
    }

    /// The directory behind it.
    pub fn source(&self) -> &Path {
        &self.source
    }

    /// From now on every write fails with this errno's name; empty heals.
    pub fn fail_writes(&self, errno: &str) {
        fs::write(&self.control, errno).expect("write the control file");
    }

    /// From now on every access waits, until [`FaultFs::go_on`].
    pub fn stall(&self) {
        self.signal(libc::SIGSTOP);
        // A thread that is in the middle of an answer stops only when it is scheduled.
        let tasks = format!("/proc/{}/task", self.child.as_ref().expect("it runs").id());
        wait_until(
            "every thread of the failing file system stops",
            Duration::from_secs(20),
            || {
                let mut threads = fs::read_dir(&tasks).expect("its threads");
                threads.all(|thread| is_stopped(&thread.expect("a thread").path()))
            },
        );
    }

    /// Ends a [`FaultFs::stall`].
    pub fn go_on(&self) {
        self.signal(libc::SIGCONT);
    }

    /// From now on this operation of the server (`lookup`, `open`, …) hangs for all paths that begin with `path`,
    /// relative to the source, until [`FaultFs::let_go`].
    pub fn hang(&self, operation: &str, path: &str) {
        fs::write(hung(&self.control), "").expect("begin to count what hangs");
        let next = self.control.with_extension("next");
        fs::write(&next, format!("{operation} {path}")).expect("write what hangs");
        fs::rename(next, hang(&self.control)).expect("let it hang");
    }

    /// Ends a [`FaultFs::hang`].
    pub fn let_go(&self) {
        fs::remove_file(hang(&self.control)).expect("let it go");
    }

    /// Calls that came to hang since [`FaultFs::hang`].
    pub fn hung_count(&self) -> u64 {
        fs::metadata(hung(&self.control)).map_or(0, |meta| meta.len())
    }

    /// Kills the server, and with it all that hangs in it, after `limit`: for tests of what hangs, in which nothing
    /// else may end.
    pub fn watchdog(&self, limit: Duration) -> Watchdog {
        let pid = self.child.as_ref().expect("it runs").id();
        Watchdog::arm(limit, move || kill(pid, libc::SIGKILL))
    }

    fn signal(&self, signal: i32) {
        kill(self.child.as_ref().expect("it runs").id(), signal);
    }

    /// Kills the server: every access to the backing now gives ENOTCONN.
    pub fn vanish(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("kill the failing file system");
            child.wait().expect("wait for it");
        }
    }

    /// Brings it back after [`FaultFs::vanish`], with the files it had.
    pub fn start(&mut self) {
        unmount_lazily(&self.mount_point);
        let mut command = Command::new(helper_binary());
        command
            .arg("faultfs")
            .args([&self.source, &self.mount_point, &self.control]);
        self.child = Some(command.spawn().expect("start the failing file system"));
        let ready = || is_mounted(&self.mount_point) && fs::metadata(&self.mount_point).is_ok();
        wait_until(
            "the failing file system is mounted",
            Duration::from_secs(10),
            ready,
        );
    }
}

impl Drop for FaultFs {
    fn drop(&mut self) {
        self.vanish();
        unmount_lazily(&self.mount_point);
    }
}

/// Serves until it is killed.
pub fn serve(source: &Path, mount_point: &Path, control: &Path) {
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName("firn-faultfs".into()),
        MountOption::DefaultPermissions,
    ];
    config.acl = SessionACL::All;
    config.n_threads = Some(THREADS);
    config.clone_fd = true;
    let fs = FaultServer {
        control: control.to_owned(),
        paths: Mutex::new(HashMap::from([(1, source.to_owned())])),
        open: Mutex::new(HashMap::new()),
        next: AtomicU64::new(1),
    };
    fuser::mount(fs, mount_point, &config).expect("mount the failing file system");
}

/// What hangs.
fn hang(control: &Path) -> PathBuf {
    control.with_extension("hang")
}

/// What came to hang.
fn hung(control: &Path) -> PathBuf {
    control.with_extension("hung")
}

struct FaultServer {
    control: PathBuf,
    /// Inode numbers are those of the source, so that they survive a restart; 1 is the root.
    paths: Mutex<HashMap<u64, PathBuf>>,
    open: Mutex<HashMap<u64, File>>,
    next: AtomicU64,
}

impl FaultServer {
    fn path(&self, inode: INodeNo) -> Result<PathBuf, Errno> {
        self.paths
            .lock()
            .expect("lock")
            .get(&inode.0)
            .cloned()
            .ok_or(Errno::ESTALE)
    }

    fn child(&self, parent: INodeNo, name: &OsStr) -> Result<PathBuf, Errno> {
        Ok(self.path(parent)?.join(name))
    }

    fn attr(&self, path: &Path) -> Result<FileAttr, Errno> {
        let meta = fs::symlink_metadata(path).map_err(Errno::from)?;
        let mut paths = self.paths.lock().expect("lock");
        if paths.get(&1).map(PathBuf::as_path) == Some(path) {
            return Ok(attr_of(1, &meta));
        }
        paths.insert(meta.ino(), path.to_owned());
        Ok(attr_of(meta.ino(), &meta))
    }

    fn keep(&self, file: File) -> FileHandle {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.open.lock().expect("lock").insert(number, file);
        FileHandle(number)
    }

    fn file(&self, handle: FileHandle) -> Result<File, Errno> {
        let open = self.open.lock().expect("lock");
        open.get(&handle.0)
            .ok_or(Errno::EBADF)?
            .try_clone()
            .map_err(Errno::from)
    }

    /// Returns when this operation may go on.
    fn gate(&self, operation: &str, inode: INodeNo, name: Option<&OsStr>) {
        let hang = hang(&self.control);
        let Ok(mut what) = fs::read_to_string(&hang) else {
            return;
        };
        let root = self
            .paths
            .lock()
            .expect("lock")
            .get(&1)
            .cloned()
            .unwrap_or_default();
        let Ok(mut path) = self.path(inode) else {
            return;
        };
        path.extend(name);
        let path = path
            .strip_prefix(&root)
            .unwrap_or(&path)
            .display()
            .to_string();
        let hangs = |what: &str| {
            let (hanging, beginning) = what.split_once(' ').unwrap_or_default();
            hanging == operation && path.starts_with(beginning)
        };
        if !hangs(&what) {
            return;
        }
        let mut count = OpenOptions::new()
            .append(true)
            .create(true)
            .open(hung(&self.control))
            .expect("count");
        count.write_all(b".").expect("count");
        while hangs(&what) {
            std::thread::sleep(LOOK_AGAIN);
            what = fs::read_to_string(&hang).unwrap_or_default();
        }
    }

    /// The errno that writes shall give now.
    fn fault(&self) -> Result<(), Errno> {
        match fs::read_to_string(&self.control).unwrap_or_default().trim() {
            "" => Ok(()),
            "ENOSPC" => Err(Errno::ENOSPC),
            "EDQUOT" => Err(Errno::EDQUOT),
            "ESTALE" => Err(Errno::ESTALE),
            _ => Err(Errno::EIO),
        }
    }

    fn truncate(&self, inode: INodeNo, handle: Option<FileHandle>, size: u64) -> Result<(), Errno> {
        let file = match handle {
            Some(handle) => self.file(handle)?,
            None => OpenOptions::new()
                .write(true)
                .open(self.path(inode)?)
                .map_err(Errno::from)?,
        };
        file.set_len(size).map_err(Errno::from)
    }
}

fn io_errno(errno: rustix::io::Errno) -> Errno {
    Errno::from(std::io::Error::from(errno))
}

fn attr_of(inode: u64, meta: &Metadata) -> FileAttr {
    let time = |s: i64, ns: i64| UNIX_EPOCH + Duration::new(s.max(0) as u64, ns as u32);
    let kind = meta.file_type();
    FileAttr {
        ino: INodeNo(inode),
        size: meta.size(),
        blocks: meta.blocks(),
        atime: time(meta.atime(), meta.atime_nsec()),
        mtime: time(meta.mtime(), meta.mtime_nsec()),
        ctime: time(meta.ctime(), meta.ctime_nsec()),
        crtime: UNIX_EPOCH,
        kind: match () {
            () if kind.is_dir() => FileType::Directory,
            () if kind.is_symlink() => FileType::Symlink,
            () if kind.is_fifo() => FileType::NamedPipe,
            () => FileType::RegularFile,
        },
        perm: (meta.mode() & 0o7777) as u16,
        nlink: meta.nlink() as u32,
        uid: meta.uid(),
        gid: meta.gid(),
        rdev: 0,
        flags: 0,
        blksize: 4096,
    }
}

/// Answers with the value or the errno.
macro_rules! answer {
    ($reply:ident, $result:expr, $value:pat => $send:expr) => {
        match $result {
            Ok($value) => $send,
            Err(errno) => $reply.error(errno),
        }
    };
}

impl Filesystem for FaultServer {
    /// Look-ups of different names in a directory come side by side, as from other file systems.
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        let _ = config.add_capabilities(InitFlags::FUSE_PARALLEL_DIROPS);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.gate("lookup", parent, Some(name));
        let found = self.child(parent, name).and_then(|path| self.attr(&path));
        answer!(reply, found, attr => reply.entry(&TTL, &attr, Generation(0)));
    }

    fn getattr(&self, _: &Request, ino: INodeNo, fh: Option<FileHandle>, reply: ReplyAttr) {
        self.gate("getattr", ino, None);
        let found = match fh {
            Some(handle) => self
                .file(handle)
                .and_then(|f| Ok(attr_of(ino.0, &f.metadata().map_err(Errno::from)?))),
            None => self.path(ino).and_then(|path| self.attr(&path)),
        };
        answer!(reply, found, attr => reply.attr(&TTL, &attr));
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        fh: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        self.gate("setattr", ino, None);
        let set = || {
            if let Some(size) = size {
                self.truncate(ino, fh, size)?;
            }
            let path = self.path(ino)?;
            if let Some(mode) = mode {
                fs::set_permissions(&path, fs::Permissions::from_mode(mode))
                    .map_err(Errno::from)?;
            }
            match fh {
                Some(handle) => Ok(attr_of(
                    ino.0,
                    &self.file(handle)?.metadata().map_err(Errno::from)?,
                )),
                None => self.attr(&path),
            }
        };
        answer!(reply, set(), attr => reply.attr(&TTL, &attr));
    }

    fn mkdir(&self, _: &Request, parent: INodeNo, name: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        self.gate("mkdir", parent, Some(name));
        let made = self.child(parent, name).and_then(|path| {
            fs::create_dir(&path).map_err(Errno::from)?;
            self.attr(&path)
        });
        answer!(reply, made, attr => reply.entry(&TTL, &attr, Generation(0)));
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.gate("unlink", parent, Some(name));
        let done = self
            .child(parent, name)
            .and_then(|path| fs::remove_file(path).map_err(Errno::from));
        answer!(reply, done, () => reply.ok());
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.gate("rmdir", parent, Some(name));
        let done = self
            .child(parent, name)
            .and_then(|path| fs::remove_dir(path).map_err(Errno::from));
        answer!(reply, done, () => reply.ok());
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        _: RenameFlags,
        reply: ReplyEmpty,
    ) {
        self.gate("rename", parent, Some(name));
        let done = self.child(parent, name).and_then(|from| {
            let to = self.child(newparent, newname)?;
            fs::rename(from, &to).map_err(Errno::from)?;
            self.attr(&to).map(drop)
        });
        answer!(reply, done, () => reply.ok());
    }

    fn open(&self, _: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        self.gate("open", ino, None);
        let opened = self.path(ino).and_then(|path| {
            let write = flags.0 & libc::O_ACCMODE != libc::O_RDONLY;
            OpenOptions::new()
                .read(true)
                .write(write)
                .open(path)
                .map_err(Errno::from)
        });
        answer!(reply, opened, file => reply.opened(self.keep(file), FopenFlags::FOPEN_DIRECT_IO));
    }

    fn create(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        self.gate("create", parent, Some(name));
        let made = self.child(parent, name).and_then(|path| {
            let mut options = OpenOptions::new();
            let file = options
                .read(true)
                .write(true)
                .create_new(true)
                .open(&path)
                .map_err(Errno::from)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(mode & 0o7777))
                .map_err(Errno::from)?;
            Ok((self.attr(&path)?, file))
        });
        answer!(reply, made, (attr, file) => {
            reply.created(&TTL, &attr, Generation(0), self.keep(file), FopenFlags::FOPEN_DIRECT_IO);
        });
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.gate("read", ino, None);
        let mut buf = vec![0; size as usize];
        let got = self
            .file(fh)
            .and_then(|file| file.read_at(&mut buf, offset).map_err(Errno::from));
        answer!(reply, got, count => reply.data(&buf[..count]));
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.gate("write", ino, None);
        let write = || {
            self.file(fh)?
                .write_all_at(data, offset)
                .map_err(Errno::from)
        };
        answer!(reply, self.fault().and_then(|()| write()), () => reply.written(data.len() as u32));
    }

    fn flush(&self, _: &Request, ino: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        self.gate("flush", ino, None);
        reply.ok();
    }

    fn fsync(&self, _: &Request, ino: INodeNo, fh: FileHandle, _: bool, reply: ReplyEmpty) {
        self.gate("fsync", ino, None);
        let synced = self
            .fault()
            .and_then(|()| self.file(fh)?.sync_all().map_err(Errno::from));
        answer!(reply, synced, () => reply.ok());
    }

    fn release(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.gate("release", ino, None);
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
        self.gate("readdir", ino, None);
        let Ok(entries) = self
            .path(ino)
            .and_then(|path| fs::read_dir(path).map_err(Errno::from))
        else {
            return reply.error(Errno::EIO);
        };
        let mut names: Vec<_> = entries.flatten().map(|entry| entry.file_name()).collect();
        names.sort();
        names.splice(0..0, [".".into(), "..".into()]);
        for (index, name) in names.iter().enumerate().skip(offset as usize) {
            let path = self.child(ino, name).unwrap_or_default();
            let (inode, kind) = fs::symlink_metadata(path)
                .map_or((1, FileType::RegularFile), |meta| {
                    (meta.ino(), attr_of(1, &meta).kind)
                });
            if reply.add(INodeNo(inode), index as u64 + 1, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _: &Request, ino: INodeNo, reply: ReplyStatfs) {
        self.gate("statfs", ino, None);
        reply.statfs(1 << 20, 1 << 19, 1 << 19, 1 << 16, 1 << 15, 4096, 255, 4096);
    }

    fn fsyncdir(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.gate("fsyncdir", ino, None);
        reply.ok();
    }

    fn symlink(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        self.gate("symlink", parent, Some(name));
        let made = self.child(parent, name).and_then(|path| {
            std::os::unix::fs::symlink(target, &path).map_err(Errno::from)?;
            self.attr(&path)
        });
        answer!(reply, made, attr => reply.entry(&TTL, &attr, Generation(0)));
    }

    fn readlink(&self, _: &Request, ino: INodeNo, reply: ReplyData) {
        self.gate("readlink", ino, None);
        let read = self
            .path(ino)
            .and_then(|path| fs::read_link(path).map_err(Errno::from));
        answer!(reply, read, target => reply.data(target.as_os_str().as_encoded_bytes()));
    }

    fn link(
        &self,
        _: &Request,
        ino: INodeNo,
        newparent: INodeNo,
        newname: &OsStr,
        reply: ReplyEntry,
    ) {
        self.gate("link", newparent, Some(newname));
        let made = self.child(newparent, newname).and_then(|path| {
            fs::hard_link(self.path(ino)?, &path).map_err(Errno::from)?;
            self.attr(&path)
        });
        answer!(reply, made, attr => reply.entry(&TTL, &attr, Generation(0)));
    }

    fn fallocate(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        self.gate("fallocate", ino, None);
        let flags = FallocateFlags::from_bits_retain(mode as u32);
        let done = self
            .file(fh)
            .and_then(|file| rustix::fs::fallocate(file, flags, offset, length).map_err(io_errno));
        answer!(reply, done, () => reply.ok());
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
        self.gate("lseek", ino, None);
        let to = if whence == libc::SEEK_DATA {
            SeekFrom::Data(offset as u64)
        } else {
            SeekFrom::Hole(offset as u64)
        };
        let found = self
            .file(fh)
            .and_then(|file| rustix::fs::seek(file, to).map_err(io_errno));
        answer!(reply, found, at => reply.offset(at as i64));
    }

    fn copy_file_range(
        &self,
        _: &Request,
        _: INodeNo,
        fh_in: FileHandle,
        offset_in: u64,
        ino_out: INodeNo,
        fh_out: FileHandle,
        offset_out: u64,
        len: u64,
        _: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        self.gate("copy_file_range", ino_out, None);
        let copy = || {
            let from = self.file(fh_in)?;
            let to = self.file(fh_out)?;
            let mut at = offset_in;
            let mut into = offset_out;
            rustix::fs::copy_file_range(from, Some(&mut at), to, Some(&mut into), len as usize)
                .map_err(io_errno)
        };
        answer!(reply, copy(), count => reply.written(count as u32));
    }

    fn getxattr(&self, _: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        self.gate("getxattr", ino, None);
        let mut value = vec![0; 1 << 16];
        let read = self.path(ino).and_then(|path| {
            let len = rustix::fs::lgetxattr(path, name, &mut value[..]).map_err(io_errno)?;
            value.truncate(len);
            Ok(value)
        });
        answer!(reply, read, value => match size {
            0 => reply.size(value.len() as u32),
            size if value.len() > size as usize => reply.error(Errno::ERANGE),
            _ => reply.data(&value),
        });
    }
}
