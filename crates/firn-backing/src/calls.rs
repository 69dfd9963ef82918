//! The calls of a backing, in one trait for each thing that a reader asks of it.
//!
//! | trait | says |
//! |---|---|
//! | [`Volume`] | what the whole is, and that it is durable |
//! | [`Names`] | which name leads to which object |
//! | [`Attributes`] | what is known of an object beside its data |
//! | [`Files`] | the data of a file, and its locks |
//! | [`Sharing`] | what other hosts and the kernel may see of a file |
//! | [`Placement`] | where the data of a file lies |
//! | [`Backing`] | all of these, and the usual form of some calls |
//!
//! A call takes a value where several calls would do the same: [`Remove`] says what [`Names::remove`] removes,
//! [`AttrChange`] what [`Attributes::set_attr`] changes.
//!
//! Of these traits only [`Backing`] has a default. A layer implements each call, and names in one place the calls that
//! it hands down as they are ([`forward!`](crate::forward)). [`Backing`] is implemented once, for every type that has
//! all the others, so that no layer can have a form of its own.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::ops::Range;
use std::os::fd::OwnedFd;

use crate::{
    Access, Adopted, Attr, AttrChange, Caller, DataPart, DescriptorUse, DirEntry, DurabilityLevel,
    Facts, Features, FileUse, Freshness, KernelReads, LaneIndex, LocateLimits, Located, LockMode,
    LockRequest, NewKind, PageAdvice, Placing, Remove, RenameFlags, Resize, Result, Seek, SetTime,
    StatFs, SyncScope, Target,
};

/// What [`Attributes::stat`] of a backing is asked about.
pub type TargetOf<'a, B> = Target<'a, <B as Volume>::Inode, <B as Volume>::File>;

/// What [`Names::create_placed`] of a backing makes: a file, which is open.
pub type Created<B> = (<B as Volume>::Inode, <B as Volume>::File, Attr);

/// What [`Files::adopt`] of a backing gives.
pub type AdoptedBy<B> = Adopted<<B as Volume>::Inode, <B as Volume>::File>;

/// A directory tree on some file system, as a whole.
pub trait Volume: Send + Sync + 'static {
    /// A reference to an object of any kind (for a directory: an `O_PATH` descriptor).
    type Inode: Clone + Send + Sync + 'static;
    /// An open regular file.
    type File: Send + Sync + 'static;
    /// An open directory stream.
    type Dir: Send + Sync + 'static;

    /// The top directory.
    fn root(&self) -> Self::Inode;
    /// What holds for all files, from the first call to the last. It makes no system call and waits for nothing: it may be asked with locks held.
    fn features(&self) -> Features;
    /// fstatvfs(3).
    fn statfs(&self) -> Result<StatFs>;
    /// Makes what `scope` says durable, data and names, also changes by other programs.
    fn sync_scope(&self, scope: SyncScope<'_, Self::Inode>) -> Result<()>;
}

/// Names, and the objects that they lead to.
pub trait Names: Volume {
    /// Finds `name` in `parent`, without following a final symlink. `name` has no slash.
    fn lookup(&self, parent: &Self::Inode, name: &OsStr) -> Result<(Self::Inode, Attr)>;
    /// Creates and opens a regular file that did not exist (`O_CREAT|O_EXCL`, EEXIST otherwise), for
    /// reading and writing whatever `mode` allows. `mode` is complete: no umask is applied. The owner
    /// becomes `caller` where this process may arrange that. `placing` says where its data goes.
    fn create_placed(
        &self,
        caller: &Caller,
        parent: &Self::Inode,
        name: &OsStr,
        mode: u32,
        placing: Placing<'_, Self::Inode>,
    ) -> Result<Created<Self>>;
    /// Makes an object that nothing is open of: mkdir(2), mknod(2) or symlink(2). Mode and owner are as in
    /// [`Names::create_placed`].
    fn make(
        &self,
        caller: &Caller,
        parent: &Self::Inode,
        name: &OsStr,
        kind: NewKind<'_>,
    ) -> Result<(Self::Inode, Attr)>;
    /// linkat(2): another name for `inode`.
    fn link(&self, inode: &Self::Inode, parent: &Self::Inode, name: &OsStr) -> Result<Attr>;
    /// unlinkat(2).
    fn remove(&self, parent: &Self::Inode, name: &OsStr, what: Remove) -> Result<()>;
    /// renameat2(2).
    fn rename(
        &self,
        parent: &Self::Inode,
        name: &OsStr,
        new_parent: &Self::Inode,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> Result<()>;
    /// The inode that a look-up of `name` would return of an object that was renamed to it. It makes no system call.
    fn moved_to(&self, inode: &Self::Inode, parent: &Self::Inode, name: &OsStr) -> Self::Inode;
    /// readlinkat(2).
    fn readlink(&self, inode: &Self::Inode) -> Result<Vec<u8>>;
    /// opendir(3).
    fn open_dir(&self, inode: &Self::Inode) -> Result<Self::Dir>;
    /// Reads entries, `.` and `..` included, from `cookie` on (0: from the start; else a
    /// [`DirEntry::cookie`] of this directory) until `sink` returns false or the directory ends.
    fn read_dir(
        &self,
        dir: &Self::Dir,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()>;
}

/// Attributes of an object: all that is known of it beside its data.
pub trait Attributes: Volume {
    /// fstat(2) of an object or of an open file.
    fn stat(&self, target: TargetOf<'_, Self>, freshness: Freshness) -> Result<Attr>;
    /// Changes one attribute.
    fn set_attr(&self, inode: &Self::Inode, change: AttrChange<'_>) -> Result<()>;
    /// getxattr(2) into a buffer of the size that the value has.
    fn get_xattr(&self, inode: &Self::Inode, name: &OsStr) -> Result<Vec<u8>>;
    /// listxattr(2): names, each ended by a zero byte.
    fn list_xattr(&self, inode: &Self::Inode) -> Result<Vec<u8>>;
}

/// The data of regular files, and locks of them.
pub trait Files: Volume {
    /// Opens a regular file. `access` is what this process wants, whatever the file's mode says of
    /// others. Never truncates, never creates, never follows a symlink.
    fn open(&self, inode: &Self::Inode, access: Access) -> Result<Self::File>;
    /// pread(2), until `buf` is full or the file ends; returns the bytes read.
    fn read_at(&self, file: &Self::File, buf: &mut [u8], offset: u64) -> Result<usize>;
    /// Writes parts that do not overlap, in whatever order they are in. May write less than asked: the bytes that it
    /// returns, from the first part on, and nothing of the others. After an error none of them counts.
    fn write_parts(&self, file: &Self::File, parts: &[DataPart<'_>]) -> Result<u64>;
    /// Changes the length, or ends a change of it. Returns false where a [`Resize::Finish`] finds that the change was never
    /// made: the file is as it was before that. All others return true.
    fn resize(&self, file: &Self::File, resize: Resize) -> Result<bool>;
    /// fallocate(2) with its `mode` bits.
    fn allocate(&self, file: &Self::File, mode: i32, offset: u64, len: u64) -> Result<()>;
    /// lseek(2) with `SEEK_DATA` or `SEEK_HOLE`.
    fn seek(&self, file: &Self::File, offset: u64, what: Seek) -> Result<u64>;
    /// copy_file_range(2), once.
    fn copy_range(
        &self,
        from: &Self::File,
        from_offset: u64,
        to: &Self::File,
        to_offset: u64,
        len: u64,
    ) -> Result<u64>;
    /// fsync(2), or fdatasync(2) where `data_only`.
    fn sync(&self, file: &Self::File, data_only: bool) -> Result<()>;
    /// Says what becomes of memory that keeps a range. Waits for nothing, and loses nothing.
    fn advise(&self, file: &Self::File, range: Range<u64>, advice: PageAdvice);
    /// Takes, ends or tests a lock, without waiting. False where another owner has one in the way; what this process
    /// has locked stays as it was.
    ///
    /// A layer over another backing has no locks of its own: hosts meet in the one below.
    fn lock(&self, file: &Self::File, request: LockRequest) -> Result<bool>;
    /// A descriptor of the file for another process or the kernel; `None` where there is none.
    fn descriptor(&self, file: &Self::File, purpose: DescriptorUse) -> Option<OwnedFd>;
    /// Goes on with a file of an earlier process, whose [`Files::descriptor`] gave this one for [`DescriptorUse::Keeping`].
    /// The caller vouches for its origin.
    fn adopt(&self, descriptor: OwnedFd) -> Result<AdoptedBy<Self>>;
}

/// Files that several hosts write, or that others than this process read.
pub trait Sharing: Volume {
    /// How far the kernel may read an open file by itself.
    fn kernel_reads(&self, file: &Self::File) -> KernelReads;
    /// Where bytes of `range` lie in files of the backing, as [`Files::read_at`] would give them; `None` where the
    /// kernel reads the file by itself, or only this process can. What is told stays as it is, whatever becomes of the
    /// file, until this host changes it, learns that others have ([`Facts::changes_by_others`]), or [`Located::until`].
    fn locate(
        &self,
        file: &Self::File,
        range: Range<u64>,
        limits: LocateLimits,
    ) -> Result<Option<Located>>;
    /// Says what programs of this host do with a file that is open here.
    fn note_use(&self, file: &Self::File, what: FileUse) -> Result<()>;
    /// The highest level that the file's bytes in the backing can have now: [`DurabilityLevel::Logged`] where some are in
    /// logs, [`DurabilityLevel::Drained`] as long as a transaction may still take them back.
    fn level_max(&self, inode: &Self::Inode) -> DurabilityLevel;
}

/// Where the data of files lies.
pub trait Placement: Volume {
    /// What this process knows of an object. It makes no system call and waits for nothing: it may be asked with locks held.
    fn facts(&self, inode: &Self::Inode) -> Facts;
    /// The lane of a turn, from 0, where turns go round the lanes that take new files; none where this one chooses no
    /// lane for a new file. It makes no system call either.
    fn lane_of_turn(&self, turn: u64) -> Option<LaneIndex>;
}

/// Everything that Firn asks of a backing.
///
/// Its own calls are the usual forms of those above, and nothing else: it is implemented once, below, for all backings.
pub trait Backing: Names + Attributes + Files + Sharing + Placement {
    /// Creates a file whose place is that of its name.
    fn create(
        &self,
        caller: &Caller,
        parent: &Self::Inode,
        name: &OsStr,
        mode: u32,
    ) -> Result<Created<Self>> {
        self.create_placed(caller, parent, name, mode, Placing::ByName)
    }

    /// mkdir(2).
    fn mkdir(
        &self,
        caller: &Caller,
        parent: &Self::Inode,
        name: &OsStr,
        mode: u32,
    ) -> Result<(Self::Inode, Attr)> {
        self.make(caller, parent, name, NewKind::Dir { mode })
    }

    /// symlink(2).
    fn symlink(
        &self,
        caller: &Caller,
        parent: &Self::Inode,
        name: &OsStr,
        target: &OsStr,
    ) -> Result<(Self::Inode, Attr)> {
        self.make(caller, parent, name, NewKind::Symlink { target })
    }

    /// unlink(2).
    fn unlink(&self, parent: &Self::Inode, name: &OsStr) -> Result<()> {
        self.remove(parent, name, Remove::NonDir)
    }

    /// rmdir(2).
    fn rmdir(&self, parent: &Self::Inode, name: &OsStr) -> Result<()> {
        self.remove(parent, name, Remove::Dir)
    }

    /// fstat(2) of an object, as this host knows it.
    fn attr(&self, inode: &Self::Inode) -> Result<Attr> {
        self.stat(Target::Inode(inode), Freshness::Known)
    }

    /// fstat(2) of an open file, as this host knows it.
    fn attr_of_file(&self, file: &Self::File) -> Result<Attr> {
        self.stat(Target::File(file), Freshness::Known)
    }

    /// fstat(2) of an object, asked of the server.
    fn attr_now(&self, inode: &Self::Inode) -> Result<Attr> {
        self.stat(Target::Inode(inode), Freshness::Current)
    }

    /// fstat(2) of an open file, asked of the server.
    fn attr_of_file_now(&self, file: &Self::File) -> Result<Attr> {
        self.stat(Target::File(file), Freshness::Current)
    }

    /// chmod(2).
    fn set_mode(&self, inode: &Self::Inode, mode: u32) -> Result<()> {
        self.set_attr(inode, AttrChange::Mode(mode))
    }

    /// chown(2).
    fn set_owner(&self, inode: &Self::Inode, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        self.set_attr(inode, AttrChange::Owner { uid, gid })
    }

    /// utimensat(2).
    fn set_times(&self, inode: &Self::Inode, atime: SetTime, mtime: SetTime) -> Result<()> {
        self.set_attr(inode, AttrChange::Times { atime, mtime })
    }

    /// setxattr(2).
    fn set_xattr(&self, inode: &Self::Inode, name: &OsStr, value: &[u8], flags: i32) -> Result<()> {
        self.set_attr(inode, AttrChange::SetXattr { name, value, flags })
    }

    /// removexattr(2).
    fn remove_xattr(&self, inode: &Self::Inode, name: &OsStr) -> Result<()> {
        self.set_attr(inode, AttrChange::RemoveXattr { name })
    }

    /// Whether new objects in directory `inode` take their mode from a POSIX default ACL: then the
    /// umask of their maker does not count (acl(5)).
    fn has_default_acl(&self, inode: &Self::Inode) -> bool {
        self.get_xattr(inode, OsStr::new("system.posix_acl_default"))
            .is_ok()
    }

    /// pwritev(2): bytes that follow each other.
    fn write_at(&self, file: &Self::File, data: &[IoSlice<'_>], offset: u64) -> Result<usize> {
        let written = self.write_parts(file, &[DataPart { offset, data }])?;
        Ok(written as usize)
    }

    /// ftruncate(2).
    fn set_len(&self, file: &Self::File, len: u64) -> Result<()> {
        self.resize(file, Resize::To(len)).map(|_| ())
    }

    /// A lock of the whole file ([`LockRequest::File`]).
    fn try_lock(&self, file: &Self::File, mode: LockMode) -> Result<bool> {
        self.lock(file, LockRequest::File(mode))
    }

    /// fsync(2) of a directory ([`SyncScope::Dir`]).
    fn sync_dir(&self, inode: &Self::Inode) -> Result<()> {
        self.sync_scope(SyncScope::Dir(inode))
    }

    /// sync(2) of everything in the backing ([`SyncScope::All`]).
    fn sync_all(&self) -> Result<()> {
        self.sync_scope(SyncScope::All)
    }
}

impl<B: Names + Attributes + Files + Sharing + Placement> Backing for B {}
