//! A FUSE server that accepts writes and discards their bytes: the fastest server that the crate `fuser` allows. It is
//! a baseline for Firn.
//!
//! The server copies each write into a pool of memory, as Firn does: chunks of 4 MiB on huge pages, touched in advance.
//! Nothing reads the pool. The mount has the settings of Firn's data path: direct_io, parallel direct writes, requests
//! of 1 MiB, and one thread for each core.
//!
//! Relies on: one flat directory, with files that are written and not read.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyCreate, ReplyEmpty, ReplyEntry, ReplyWrite,
    Request, WriteFlags,
};
use parking_lot::Mutex;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

/// How long the kernel may cache names and attributes.
const TTL: Duration = Duration::from_secs(1);
/// Size of a chunk, the default of CRFS and of Firn.
const CHUNK_BYTES: usize = 4 << 20;
/// Size of a huge page on x86-64.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// The server, and the files that it pretends to have.
pub struct Sink {
    pool: Pool,
    names: Mutex<HashMap<OsString, u64>>,
    files: Mutex<HashMap<u64, Arc<SinkFile>>>,
    next_inode: AtomicU64,
}

/// A file, of which only the size is remembered.
struct SinkFile {
    size: AtomicU64,
    /// Index of the chunk to which the next write is copied, and the offset in that chunk.
    place: Mutex<(usize, usize)>,
}

/// Memory into which writes are copied. All files share its chunks, and chunks are used again and again.
struct Pool {
    chunks: Vec<Mutex<&'static mut [u8]>>,
    next: AtomicUsize,
}

impl Pool {
    /// Maps and touches a pool of `bytes` bytes, but at least 16 chunks, so that no write meets a page fault.
    fn new(bytes: u64) -> io::Result<Self> {
        let count = (bytes as usize / CHUNK_BYTES).max(16);
        let len = count * CHUNK_BYTES + HUGE_PAGE_BYTES;
        // SAFETY: this is a new private mapping at an address that the kernel chooses. It is never unmapped, so
        // references to it may be 'static.
        let memory = unsafe {
            let flags = MapFlags::PRIVATE;
            let start = mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
            )?;
            let skip = start.cast::<u8>().align_offset(HUGE_PAGE_BYTES);
            let aligned = start.cast::<u8>().add(skip);
            // Without transparent huge pages the pool is still warm, only on small pages.
            let _ = madvise(aligned.cast(), count * CHUNK_BYTES, Advice::LinuxHugepage);
            std::slice::from_raw_parts_mut(aligned, count * CHUNK_BYTES)
        };
        memory.fill(1);
        let chunks = memory.chunks_mut(CHUNK_BYTES).map(Mutex::new).collect();
        Ok(Self {
            chunks,
            next: AtomicUsize::new(0),
        })
    }

    /// Returns the index of the next chunk. After the last chunk comes the first one again.
    fn take(&self) -> usize {
        self.next.fetch_add(1, Ordering::Relaxed) % self.chunks.len()
    }

    /// Copies the bytes of a write to `place` (the chunk and the offset of a file) and further chunks, and moves
    /// `place`.
    fn append(&self, place: &mut (usize, usize), mut data: &[u8]) {
        while !data.is_empty() {
            if place.1 == CHUNK_BYTES {
                *place = (self.take(), 0);
            }
            let n = data.len().min(CHUNK_BYTES - place.1);
            self.chunks[place.0].lock()[place.1..][..n].copy_from_slice(&data[..n]);
            place.1 += n;
            data = &data[n..];
        }
    }
}

impl Sink {
    /// Makes a server with a pool of `pool_bytes`, but at least 64 MiB.
    pub fn new(pool_bytes: u64) -> io::Result<Self> {
        Ok(Self {
            pool: Pool::new(pool_bytes)?,
            names: Default::default(),
            files: Default::default(),
            next_inode: AtomicU64::new(INodeNo::ROOT.0 + 1),
        })
    }

    /// Returns the attributes of the directory or of a file; `None` if there is no such file.
    fn attr_of(&self, inode: u64) -> Option<FileAttr> {
        if inode == INodeNo::ROOT.0 {
            return Some(attr(inode, 0, FileType::Directory));
        }
        let file = self.files.lock().get(&inode)?.clone();
        Some(attr(
            inode,
            file.size.load(Ordering::Relaxed),
            FileType::RegularFile,
        ))
    }
}

impl Filesystem for Sink {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let _ = config.set_max_write(crate::MAX_WRITE_BYTES);
        for flag in [
            InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
            InitFlags::FUSE_PARALLEL_DIROPS,
        ] {
            let _ = config.add_capabilities(flag);
        }
        Ok(())
    }

    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let inode = self.names.lock().get(name).copied();
        match inode.and_then(|inode| self.attr_of(inode)) {
            Some(attr) => reply.entry(&TTL, &attr, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attr_of(inode.0) {
            Some(attr) => reply.attr(&TTL, &attr),
            None => reply.error(Errno::ENOENT),
        }
    }

    /// Makes an empty file, and gives it the next chunk of the pool. A file that had the name before loses it.
    fn create(
        &self,
        _: &Request,
        _: INodeNo,
        name: &OsStr,
        _: u32,
        _: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        let inode = self.next_inode.fetch_add(1, Ordering::Relaxed);
        let place = Mutex::new((self.pool.take(), 0));
        let file = Arc::new(SinkFile {
            size: AtomicU64::new(0),
            place,
        });
        self.files.lock().insert(inode, file);
        self.names.lock().insert(name.to_owned(), inode);
        let attr = attr(inode, 0, FileType::RegularFile);
        let flags = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        reply.created(&TTL, &attr, Generation(0), FileHandle(inode), flags);
    }

    /// Copies the bytes into the pool, where nothing reads them, and remembers only the size of the file.
    fn write(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let Some(file) = self.files.lock().get(&inode.0).cloned() else {
            return reply.error(Errno::ENOENT);
        };
        self.pool.append(&mut file.place.lock(), data);
        file.size
            .fetch_max(offset + data.len() as u64, Ordering::Relaxed);
        reply.written(data.len() as u32);
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn unlink(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        match self.names.lock().remove(name) {
            Some(inode) => {
                self.files.lock().remove(&inode);
                reply.ok();
            }
            None => reply.error(Errno::ENOENT),
        }
    }
}

/// Returns attributes as stat(2) shows them. Only size and kind differ between objects.
fn attr(inode: u64, size: u64, kind: FileType) -> FileAttr {
    let perm = if kind == FileType::Directory {
        0o755
    } else {
        0o644
    };
    let time = SystemTime::UNIX_EPOCH;
    FileAttr {
        ino: INodeNo(inode),
        size,
        blocks: size.div_ceil(512),
        atime: time,
        mtime: time,
        ctime: time,
        crtime: time,
        kind,
        perm,
        nlink: 1,
        uid: rustix::process::getuid().as_raw(),
        gid: rustix::process::getgid().as_raw(),
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}
