//! The calls of a backing (the directory that a mount serves), in one trait for each subject.
//!
//! | trait | calls about |
//! |---|---|
//! | [`Volume`] | the whole tree, and its durability |
//! | [`Names`] | names, and the objects to which they lead |
//! | [`Attributes`] | the attributes of an object |
//! | [`Files`] | the data of a file, and its locks |
//! | [`Sharing`] | what other hosts and the kernel may see of a file |
//! | [`Placement`] | where the data of a file is |
//! | [`Backing`] | all of these, and short forms of frequent calls |
//!
//! Similar operations are one call with an argument that selects the operation: [`Remove`] says what [`Names::remove`]
//! removes, [`AttrChange`] what [`Attributes::set_attr`] changes.
//!
//! A *layer* is a backing that adds work to the calls and passes them on to another backing. Only [`Backing`] has
//! default implementations. A layer implements each call of the other traits, and lists in one place the calls that it
//! forwards unchanged ([`forward!`](crate::forward)). [`Backing`] is implemented once, for every type that has the
//! other traits, so no layer can change the short forms.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::ops::Range;
use std::os::fd::OwnedFd;

use crate::{
    Access, Adopted, Attr, AttrChange, Caller, DataPart, DescriptorUse, DirEntry, DurabilityLevel,
    Facts, Features, FileUse, Freshness, KernelReads, LaneIndex, LocateLimits, Located, LockMode,
    LockRequest, NewKind, PageAdvice, PlacementHint, Remove, RenameFlags, Resize, Result, Seek,
    SetTime, StatFs, SyncScope, Target,
};

/// The argument of [`Attributes::stat`]: an object or an open file of the backing `B`.
pub type TargetOf<'a, B> = Target<'a, <B as Volume>::Inode, <B as Volume>::File>;

/// The result of [`Names::create_placed`]: a new file, which is open.
pub type Created<B> = (<B as Volume>::Inode, <B as Volume>::File, Attr);

/// The result of [`Files::adopt`].
pub type AdoptedBy<B> = Adopted<<B as Volume>::Inode, <B as Volume>::File>;

/// A directory tree on some file system, as a whole.
pub trait Volume: Send + Sync + 'static {
    /// A reference to an object of any kind (for a directory: an `O_PATH` descriptor).
    type Inode: Clone + Send + Sync + 'static;
    /// An open regular file.
    type File: Send + Sync + 'static;
    /// An open directory stream.
    type Dir: Send + Sync + 'static;

    /// Returns the top directory.
    fn root(&self) -> Self::Inode;
    /// Returns properties that never change. Makes no system call and waits for nothing, so it may be called with locks
    /// held.
    fn features(&self) -> Features;
    /// Returns the figures of the file system (fstatvfs(3)).
    fn statfs(&self) -> Result<StatFs>;
    /// Makes the data and names in `scope` durable, including changes by other programs.
    fn sync_scope(&self, scope: SyncScope<'_, Self::Inode>) -> Result<()>;
}

/// Names, and the objects that they lead to.
pub trait Names: Volume {
    /// Returns the object of `name` in `parent`. Does not follow a symbolic link. `name` has no slash.
    fn lookup(&self, parent: &Self::Inode, name: &OsStr) -> Result<(Self::Inode, Attr)>;
    /// Creates a regular file and opens it for reading and writing, whatever `mode` allows. EEXIST if the name exists
    /// (`O_CREAT|O_EXCL`).
    ///
    /// No umask is applied to `mode`. The owner becomes `caller` if this process may do that. `placing` says where the
    /// file's data goes.
    fn create_placed(
        &self,
        caller: &Caller,
        parent: &Self::Inode,
        name: &OsStr,
        mode: u32,
        placing: PlacementHint<'_, Self::Inode>,
    ) -> Result<Created<Self>>;
    /// Makes an object other than an open file: mkdir(2), mknod(2) or symlink(2). Mode and owner are as in
    /// [`Names::create_placed`].
    fn make(
        &self,
        caller: &Caller,
        parent: &Self::Inode,
        name: &OsStr,
        kind: NewKind<'_>,
    ) -> Result<(Self::Inode, Attr)>;
    /// Gives `inode` another name (linkat(2)).
    fn link(&self, inode: &Self::Inode, parent: &Self::Inode, name: &OsStr) -> Result<Attr>;
    /// Removes a name (unlinkat(2)).
    fn remove(&self, parent: &Self::Inode, name: &OsStr, what: Remove) -> Result<()>;
    /// Renames an object (renameat2(2)).
    fn rename(
        &self,
        parent: &Self::Inode,
        name: &OsStr,
        new_parent: &Self::Inode,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> Result<()>;
    /// Returns the inode that a look-up of `name` returns after the object was renamed to it. Makes no system call.
    fn moved_to(&self, inode: &Self::Inode, parent: &Self::Inode, name: &OsStr) -> Self::Inode;
    /// Returns the target of a symbolic link (readlinkat(2)).
    fn readlink(&self, inode: &Self::Inode) -> Result<Vec<u8>>;
    /// Opens a directory for reading (opendir(3)).
    fn open_dir(&self, inode: &Self::Inode) -> Result<Self::Dir>;
    /// Reads entries, including `.` and `..`, until `sink` returns false or the directory ends. `cookie`: 0 to read
    /// from the start, else a [`DirEntry::cookie`] of this directory.
    fn read_dir(
        &self,
        dir: &Self::Dir,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()>;
}

/// Attributes of an object, including extended attributes.
pub trait Attributes: Volume {
    /// Returns the attributes of an object or of an open file (fstat(2)).
    fn stat(&self, target: TargetOf<'_, Self>, freshness: Freshness) -> Result<Attr>;
    /// Changes one attribute.
    fn set_attr(&self, inode: &Self::Inode, change: AttrChange<'_>) -> Result<()>;
    /// Returns the whole value of an extended attribute (getxattr(2)).
    fn get_xattr(&self, inode: &Self::Inode, name: &OsStr) -> Result<Vec<u8>>;
    /// Returns the names of the extended attributes, each with a zero byte after it (listxattr(2)).
    fn list_xattr(&self, inode: &Self::Inode) -> Result<Vec<u8>>;
}

/// The data of regular files, and locks of them.
pub trait Files: Volume {
    /// Opens a regular file for `access`. If this process owns the file, also succeeds if the mode denies that access
    /// to the owner. Never truncates, creates, or follows a symbolic link.
    fn open(&self, inode: &Self::Inode, access: Access) -> Result<Self::File>;
    /// Reads until `buf` is full or the file ends, and returns the number of bytes (pread(2)).
    fn read_at(&self, file: &Self::File, buf: &mut [u8], offset: u64) -> Result<usize>;
    /// Writes parts that do not overlap; they may be in any order. Returns the number of written bytes, counted from
    /// the first part on; it may be less than the length of `parts`. After an error, none of the parts counts as
    /// written.
    fn write_parts(&self, file: &Self::File, parts: &[DataPart<'_>]) -> Result<u64>;
    /// Changes the length, or completes a change of it. Returns false only for a [`Resize::Finish`] whose change was
    /// never made: the file is then unchanged.
    fn resize(&self, file: &Self::File, resize: Resize) -> Result<bool>;
    /// Allocates, punches or zeroes a range (fallocate(2) with the bits of `mode`).
    fn allocate(&self, file: &Self::File, mode: i32, offset: u64, len: u64) -> Result<()>;
    /// Returns the first offset, at or after `offset`, that has data or is in a hole (lseek(2)).
    fn seek(&self, file: &Self::File, offset: u64, what: Seek) -> Result<u64>;
    /// Copies bytes between files by one copy_file_range(2), and returns their number.
    fn copy_range(
        &self,
        from: &Self::File,
        from_offset: u64,
        to: &Self::File,
        to_offset: u64,
        len: u64,
    ) -> Result<u64>;
    /// Makes the file durable: fsync(2), or with `data_only` fdatasync(2).
    fn sync(&self, file: &Self::File, data_only: bool) -> Result<()>;
    /// Advises the kernel about cached pages of a range. Waits for nothing and loses no data.
    fn advise(&self, file: &Self::File, range: Range<u64>, advice: PageAdvice);
    /// Takes, ends or tests a lock, without waiting. Returns false if another owner has a conflicting lock; locks of
    /// this process are then unchanged.
    ///
    /// A layer holds no locks itself. It forwards the call, because locks of several hosts can conflict only in the
    /// backing below.
    fn lock(&self, file: &Self::File, request: LockRequest) -> Result<bool>;
    /// Returns a descriptor of the file for another process or for the kernel; `None` if no descriptor fits the
    /// purpose.
    fn descriptor(&self, file: &Self::File, purpose: DescriptorUse) -> Option<OwnedFd>;
    /// Opens a file again from a descriptor that an earlier process got from [`Files::descriptor`] for
    /// [`DescriptorUse::Keeping`]. The caller guarantees this origin of the descriptor.
    fn adopt(&self, descriptor: OwnedFd) -> Result<AdoptedBy<Self>>;
}

/// Files that several hosts write, or that the kernel or other processes read.
pub trait Sharing: Volume {
    /// Returns whether the kernel may serve reads of an open file by itself.
    fn kernel_reads(&self, file: &Self::File) -> KernelReads;
    /// Returns where the bytes of `range` are in files of the backing: the bytes that [`Files::read_at`] would return.
    /// `None`: the kernel reads the file by itself, or only this process can read it.
    ///
    /// The answer is valid until the first of these: this host changes the file; this host learns that another host
    /// changed it ([`Facts::changes_by_others`]); the time [`Located::until`].
    fn locate(
        &self,
        file: &Self::File,
        range: Range<u64>,
        limits: LocateLimits,
    ) -> Result<Option<Located>>;
    /// Notes how programs of this host use a file that is open here.
    fn report_use(&self, file: &Self::File, what: FileUse) -> Result<()>;
    /// Returns the highest durability level that bytes in the backing can have now: [`DurabilityLevel::Logged`] if some
    /// are in logs, [`DurabilityLevel::Drained`] while a transaction may still undo them.
    fn level_max(&self, inode: &Self::Inode) -> DurabilityLevel;
}

/// Where the data of files is.
pub trait Placement: Volume {
    /// Returns known properties of an object. Makes no system call and waits for nothing, so it may be called with
    /// locks held.
    fn facts(&self, inode: &Self::Inode) -> Facts;
    /// Returns the lane of new file number `turn`, counted from 0, if new files go to the lanes in rotation. `None`:
    /// this backing chooses no lane for new files. Makes no system call.
    fn lane_of_turn(&self, turn: u64) -> Option<LaneIndex>;
}

/// All calls that Firn makes to a backing.
///
/// Its methods are short forms of frequent calls of the traits above. They are implemented once, for all backings.
pub trait Backing: Names + Attributes + Files + Sharing + Placement {
    /// Creates a file; its name decides where its data goes.
    fn create(
        &self,
        caller: &Caller,
        parent: &Self::Inode,
        name: &OsStr,
        mode: u32,
    ) -> Result<Created<Self>> {
        self.create_placed(caller, parent, name, mode, PlacementHint::ByName)
    }

    /// Makes a directory (mkdir(2)).
    fn mkdir(
        &self,
        caller: &Caller,
        parent: &Self::Inode,
        name: &OsStr,
        mode: u32,
    ) -> Result<(Self::Inode, Attr)> {
        self.make(caller, parent, name, NewKind::Dir { mode })
    }

    /// Makes a symbolic link (symlink(2)).
    fn symlink(
        &self,
        caller: &Caller,
        parent: &Self::Inode,
        name: &OsStr,
        target: &OsStr,
    ) -> Result<(Self::Inode, Attr)> {
        self.make(caller, parent, name, NewKind::Symlink { target })
    }

    /// Removes a name of anything but a directory (unlink(2)).
    fn unlink(&self, parent: &Self::Inode, name: &OsStr) -> Result<()> {
        self.remove(parent, name, Remove::NonDir)
    }

    /// Removes an empty directory (rmdir(2)).
    fn rmdir(&self, parent: &Self::Inode, name: &OsStr) -> Result<()> {
        self.remove(parent, name, Remove::Dir)
    }

    /// Returns the attributes of an object (fstat(2)). They may come from a cache of this host.
    fn attr(&self, inode: &Self::Inode) -> Result<Attr> {
        self.stat(Target::Inode(inode), Freshness::Known)
    }

    /// Returns the attributes of an open file (fstat(2)). They may come from a cache of this host.
    fn attr_of_file(&self, file: &Self::File) -> Result<Attr> {
        self.stat(Target::File(file), Freshness::Known)
    }

    /// Returns the present attributes of an object from its server (fstat(2)).
    fn attr_now(&self, inode: &Self::Inode) -> Result<Attr> {
        self.stat(Target::Inode(inode), Freshness::Current)
    }

    /// Returns the present attributes of an open file from its server (fstat(2)).
    fn attr_of_file_now(&self, file: &Self::File) -> Result<Attr> {
        self.stat(Target::File(file), Freshness::Current)
    }

    /// Changes the mode (chmod(2)).
    fn set_mode(&self, inode: &Self::Inode, mode: u32) -> Result<()> {
        self.set_attr(inode, AttrChange::Mode(mode))
    }

    /// Changes the owner (chown(2)).
    fn set_owner(&self, inode: &Self::Inode, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        self.set_attr(inode, AttrChange::Owner { uid, gid })
    }

    /// Changes the times (utimensat(2)).
    fn set_times(&self, inode: &Self::Inode, atime: SetTime, mtime: SetTime) -> Result<()> {
        self.set_attr(inode, AttrChange::Times { atime, mtime })
    }

    /// Sets an extended attribute (setxattr(2)).
    fn set_xattr(&self, inode: &Self::Inode, name: &OsStr, value: &[u8], flags: i32) -> Result<()> {
        self.set_attr(inode, AttrChange::SetXattr { name, value, flags })
    }

    /// Removes an extended attribute (removexattr(2)).
    fn remove_xattr(&self, inode: &Self::Inode, name: &OsStr) -> Result<()> {
        self.set_attr(inode, AttrChange::RemoveXattr { name })
    }

    /// Whether directory `inode` has a POSIX default ACL. New objects then get their mode from it, and the umask of
    /// their creator does not count (acl(5)).
    fn has_default_acl(&self, inode: &Self::Inode) -> bool {
        self.get_xattr(inode, OsStr::new("system.posix_acl_default"))
            .is_ok()
    }

    /// Writes contiguous bytes and returns their number (pwritev(2)).
    fn write_at(&self, file: &Self::File, data: &[IoSlice<'_>], offset: u64) -> Result<usize> {
        let written = self.write_parts(file, &[DataPart { offset, data }])?;
        Ok(written as usize)
    }

    /// Sets the length (ftruncate(2)).
    fn set_len(&self, file: &Self::File, len: u64) -> Result<()> {
        self.resize(file, Resize::To(len)).map(|_| ())
    }

    /// Takes a lock of the whole file if it is free ([`LockRequest::File`]).
    fn try_lock(&self, file: &Self::File, mode: LockMode) -> Result<bool> {
        self.lock(file, LockRequest::File(mode))
    }

    /// Makes a directory durable ([`SyncScope::Dir`]).
    fn sync_dir(&self, inode: &Self::Inode) -> Result<()> {
        self.sync_scope(SyncScope::Dir(inode))
    }

    /// Makes everything in the backing durable ([`SyncScope::All`]).
    fn sync_all(&self) -> Result<()> {
        self.sync_scope(SyncScope::All)
    }
}

impl<B: Names + Attributes + Files + Sharing + Placement> Backing for B {}
