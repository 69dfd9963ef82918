//! Writes answers to requests in the form that the kernel reads, to `/dev/fuse`.
//!
//! A [`Responder`] belongs to one request and sends its one answer: an error, or a payload whose layout `abi`
//! describes.
//!
//! Promises
//! * The kernel accepts each answer: an errno is replaced if the kernel or a program would misunderstand it
//!   ([`errno_to_send`]).
//! * A listing is no longer than the kernel asked for.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Duration;

use firn_backing::{Attr, Errno, Kind, LockMode, StatFs};
use firn_hosts::ConflictingLock;
use zerocopy::IntoBytes;

use crate::reply::{self, Answer, Attributes, CloseBehavior, HandleMode, ListedEntry};
use crate::transport::dev_fuse::abi::{
    self, AttrOut, DIRENT_ALIGN, Dirent, EntryOut, FileLock, GetxattrOut, IoctlOut, LseekOut,
    OpenOut, StatfsOut, WriteOut, open_flags,
};
use crate::transport::dev_fuse::connection::{BackingId, Connection};
use crate::unanswered::EarlyAnswer;

/// Largest errno that the kernel accepts from a FUSE server. It refuses an answer with a larger one (fs/fuse/dev.c),
/// and the caller would wait for ever.
const ERRNO_MAX: i32 = 511;
/// Generation of all inodes. An inode number is not used again while the kernel knows it, so one value is enough.
const GENERATION: u64 = 0;

/// Returns the errno to send for an error. The kernel accepts the result, whatever the error is.
///
/// * ENOSYS would make the kernel stop sending the operation for the life of the mount, although only the file system
///   of one object lacks it. Programs get EOPNOTSUPP, which they handle in the same way.
/// * EMFILE concerns firnd's table of descriptors, but a program would apply it to its own table. Programs get ENFILE.
fn errno_to_send(error: Errno) -> i32 {
    match error.raw_os_error() {
        libc::ENOSYS => libc::EOPNOTSUPP,
        libc::EMFILE => libc::ENFILE,
        raw @ 1..=ERRNO_MAX => raw,
        _ => libc::EIO,
    }
}

/// Sends the one answer to a request.
pub(crate) struct Responder {
    connection: Arc<Connection>,
    unique: u64,
    /// The entries that were added so far, as bytes.
    listing: Vec<u8>,
    listing_bytes_max: usize,
}

impl Responder {
    pub(super) fn new(connection: &Arc<Connection>, unique: u64, listing_bytes_max: usize) -> Self {
        Self {
            connection: Arc::clone(connection),
            unique,
            listing: Vec::new(),
            listing_bytes_max,
        }
    }

    /// Sends a successful answer whose payload is the concatenation of these parts.
    fn answer(&self, payload: &[&[u8]]) {
        self.connection.answer(self.unique, 0, payload);
    }

    /// Adds a directory entry to the answer, with `prefix` (the attributes of readdirplus) before it. Returns false if
    /// there is no room.
    fn push_entry(&mut self, prefix: &[u8], entry: &ListedEntry<'_>) -> bool {
        let name = entry.name.as_bytes();
        let entry_bytes = prefix.len() + size_of::<Dirent>() + name.len();
        let padded_bytes = entry_bytes.next_multiple_of(DIRENT_ALIGN);
        let listing_bytes = self.listing.len() + padded_bytes;
        if listing_bytes > self.listing_bytes_max {
            return false;
        }
        if self.listing.capacity() == 0 {
            self.listing.reserve_exact(self.listing_bytes_max);
        }
        let dirent = Dirent {
            ino: entry.ino,
            offset: entry.cookie as u64,
            name_len: name.len() as u32,
            kind: file_type(entry.kind.unwrap_or(Kind::File)) >> FILE_TYPE_SHIFT,
        };
        self.listing.extend_from_slice(prefix);
        self.listing.extend_from_slice(dirent.as_bytes());
        self.listing.extend_from_slice(name);
        self.listing.resize(listing_bytes, 0);
        true
    }
}

impl reply::Responder for Responder {
    type BackingId = BackingId;

    /// Sends an answer as the message that the kernel expects for the operation.
    fn send(self, answer: Answer<'_, BackingId>) {
        match answer {
            Answer::Done => self.answer(&[]),
            Answer::Attributes(attributes) => self.answer(&[attr_out(&attributes).as_bytes()]),
            Answer::Entry(attributes) => self.answer(&[entry_out(&attributes).as_bytes()]),
            Answer::Opened {
                handle,
                mode,
                close_behavior,
            } => {
                self.answer(&[open_out(handle.0, &mode, close_behavior).as_bytes()]);
            }
            Answer::Created {
                entry,
                handle,
                mode,
            } => self.answer(&[
                entry_out(&entry).as_bytes(),
                open_out(handle.0, &mode, CloseBehavior::SendsFlush).as_bytes(),
            ]),
            Answer::Data(data) => self.answer(&[data]),
            Answer::Size(size) => self.answer(&[GetxattrOut { size, padding: 0 }.as_bytes()]),
            Answer::Written(size) => self.answer(&[WriteOut { size, padding: 0 }.as_bytes()]),
            Answer::Position(offset) => self.answer(&[LseekOut { offset }.as_bytes()]),
            Answer::FileSystem(figures) => self.answer(&[statfs_out(figures).as_bytes()]),
            Answer::Ioctl(data) => self.answer(&[IoctlOut::default().as_bytes(), data]),
            Answer::Lock(conflicting) => self.answer(&[lock_out(conflicting).as_bytes()]),
            Answer::Listed => self.answer(&[&self.listing]),
        }
    }

    fn refuse(self, error: Errno) {
        self.connection
            .answer(self.unique, errno_to_send(error), &[]);
    }

    fn add_entry(&mut self, entry: &ListedEntry<'_>) -> bool {
        self.push_entry(&[], entry)
    }

    fn add_entry_plus(&mut self, entry: &ListedEntry<'_>, attributes: &Attributes) -> bool {
        // The listing of the backing may not contain the kind of an entry, for example with files in lanes. The look-up
        // does.
        let entry = ListedEntry {
            ino: attributes.inode.0,
            kind: Some(attributes.attr.kind),
            ..*entry
        };
        self.push_entry(entry_out(attributes).as_bytes(), &entry)
    }

    fn early_answer(&self) -> Arc<dyn EarlyAnswer> {
        Arc::<Connection>::clone(&self.connection)
    }

    fn register_backing(&self, file: OwnedFd) -> io::Result<BackingId> {
        self.connection.register_backing(&file)
    }

    fn backing_number(id: &BackingId) -> i32 {
        id.number()
    }
}

/// Position of the file type in a mode; a listed entry has the type without the other bits.
const FILE_TYPE_SHIFT: u32 = 12;

/// The bits of a mode that tell the kind of an object (inode(7)).
fn file_type(kind: Kind) -> u32 {
    match kind {
        Kind::File => libc::S_IFREG,
        Kind::Dir => libc::S_IFDIR,
        Kind::Symlink => libc::S_IFLNK,
        Kind::Fifo => libc::S_IFIFO,
        Kind::Socket => libc::S_IFSOCK,
        Kind::CharDevice => libc::S_IFCHR,
        Kind::BlockDevice => libc::S_IFBLK,
    }
}

/// Makes the attributes, in the form that the kernel reads, of the object that the kernel knows by `number`.
fn kernel_attr(number: u64, attr: &Attr) -> abi::Attr {
    abi::Attr {
        ino: number,
        size: attr.size,
        blocks: attr.blocks,
        // As in the kernel, nanoseconds count forwards from the second, before 1970 too.
        atime: attr.atime.sec,
        mtime: attr.mtime.sec,
        ctime: attr.ctime.sec,
        atime_ns: attr.atime.nsec,
        mtime_ns: attr.mtime.nsec,
        ctime_ns: attr.ctime.nsec,
        mode: file_type(attr.kind) | attr.mode & 0o7777,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        // The kernel has 32 bits for a device number. They are the low half of the C library's number, for all majors
        // below 2^12.
        rdev: attr.rdev as u32,
        block_bytes: attr.blksize,
        flags: 0,
    }
}

fn attr_out(attributes: &Attributes) -> AttrOut {
    AttrOut {
        valid_s: attributes.ttl.as_secs(),
        valid_ns: attributes.ttl.subsec_nanos(),
        padding: 0,
        attr: kernel_attr(attributes.inode.0, &attributes.attr),
    }
}

/// Makes the answer to F_GETLK: a conflicting lock, or none. The pid is 0 if the lock's process is on another host.
fn lock_out(conflicting: Option<ConflictingLock>) -> FileLock {
    let Some(lock) = conflicting else {
        return FileLock {
            kind: libc::F_UNLCK as u32,
            ..FileLock::default()
        };
    };
    let kind = match lock.mode {
        LockMode::Shared => libc::F_RDLCK,
        LockMode::Exclusive => libc::F_WRLCK,
    };
    FileLock {
        first: lock.range.first,
        last: lock.range.last,
        kind: kind as u32,
        pid: lock.pid.unwrap_or(0),
    }
}

fn entry_out(attributes: &Attributes) -> EntryOut {
    let (ttl, name_ttl): (Duration, Duration) = (attributes.ttl, attributes.name_ttl);
    EntryOut {
        nodeid: attributes.inode.0,
        generation: GENERATION,
        entry_valid_s: name_ttl.as_secs(),
        attr_valid_s: ttl.as_secs(),
        entry_valid_ns: name_ttl.subsec_nanos(),
        attr_valid_ns: ttl.subsec_nanos(),
        attr: kernel_attr(attributes.inode.0, &attributes.attr),
    }
}

/// Makes the answer to open: the handle, what serves its reads and writes (Firn, the page cache or the kernel), and
/// whether its closes send a FLUSH.
fn open_out(fh: u64, mode: &HandleMode<BackingId>, close_behavior: CloseBehavior) -> OpenOut {
    const NO_BACKING_ID: i32 = 0;
    const DIRECT: u32 = open_flags::DIRECT_IO | open_flags::PARALLEL_DIRECT_WRITES;
    let (serving_flags, backing_id) = match mode {
        HandleMode::Direct => (DIRECT, NO_BACKING_ID),
        HandleMode::CachedKeep => (open_flags::KEEP_CACHE, NO_BACKING_ID),
        HandleMode::Cached => (0, NO_BACKING_ID),
        HandleMode::Passthrough(id) => (open_flags::PASSTHROUGH, id.number()),
        HandleMode::PassthroughMappings(id) => (open_flags::PASSTHROUGH | DIRECT, id.number()),
    };
    let closing_flags = match close_behavior {
        CloseBehavior::SendsFlush => 0,
        CloseBehavior::SendsNothing => open_flags::NOFLUSH,
    };
    OpenOut {
        fh,
        open_flags: serving_flags | closing_flags,
        backing_id,
    }
}

fn statfs_out(figures: &StatFs) -> StatfsOut {
    let block_bytes = figures.block_size as u32;
    StatfsOut {
        blocks: figures.blocks,
        blocks_free: figures.blocks_free,
        blocks_available: figures.blocks_available,
        files: figures.files,
        files_free: figures.files_free,
        block_bytes,
        name_max: figures.name_max,
        fragment_bytes: block_bytes,
        ..StatfsOut::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_errno_becomes_one_that_the_kernel_accepts() {
        for raw in 1..4096 {
            let code = errno_to_send(Errno::from_raw_os_error(raw));
            assert!((1..=ERRNO_MAX).contains(&code), "{raw} became {code}");
            assert_ne!(code, libc::ENOSYS);
        }
        assert_eq!(errno_to_send(Errno::STALE), libc::ESTALE);
        assert_eq!(errno_to_send(Errno::DQUOT), libc::EDQUOT);
        assert_eq!(errno_to_send(Errno::from_raw_os_error(512)), libc::EIO);
    }

    #[test]
    fn regression_an_entry_that_was_looked_up_is_of_the_kind_that_was_found() {
        let device = std::fs::File::open("/dev/null").unwrap();
        let connection = Connection::new(device.into());
        let mut responder = Responder::new(&connection, 2, 4096);
        let entry = ListedEntry {
            ino: 5,
            cookie: 1,
            kind: Some(Kind::File),
            name: std::ffi::OsStr::new("a"),
        };
        let kind_of_look_up = Some(Kind::Symlink);
        let attributes =
            crate::dispatcher::listing::bare_attributes(7, kind_of_look_up, Duration::ZERO);
        assert!(reply::Responder::add_entry_plus(
            &mut responder,
            &entry,
            &attributes
        ));
        let kind = size_of::<EntryOut>() + size_of::<Dirent>() - size_of::<u32>();
        assert_eq!(
            u32::from(responder.listing[kind]),
            libc::S_IFLNK >> FILE_TYPE_SHIFT
        );
    }

    #[test]
    fn entries_are_aligned_and_end_where_there_is_no_room() {
        let device = std::fs::File::open("/dev/null").unwrap();
        let connection = Connection::new(device.into());
        let mut responder = Responder::new(&connection, 2, 64);
        let entry = |name| ListedEntry {
            ino: 5,
            cookie: 1,
            kind: Some(Kind::Dir),
            name: std::ffi::OsStr::new(name),
        };
        assert!(reply::Responder::add_entry(&mut responder, &entry("a")));
        assert_eq!(responder.listing.len(), 32);
        assert_eq!(
            &responder.listing[16..32],
            b"\x01\0\0\0\x04\0\0\0a\0\0\0\0\0\0\0"
        );
        // The name alone would fit, but not the entry with its header.
        assert!(!reply::Responder::add_entry(
            &mut responder,
            &entry("ninebytes")
        ));
        assert!(reply::Responder::add_entry(
            &mut responder,
            &entry("eightbyt")
        ));
        assert_eq!(responder.listing.len(), 64);
        assert!(!reply::Responder::add_entry(&mut responder, &entry("b")));
    }
}
