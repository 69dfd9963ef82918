//! One of two backings, chosen when a mount begins: a layer that is there or is not.
//!
//! ```text
//!   Either::Lower(directory)            the directory alone
//!   Either::Upper(Lanes<directory>)     the same below a layer
//! ```
//!
//! Layers are stacked by nesting: each may be there or not, whatever the others are.
//!
//! Invariant: a value is of one side from its first call to its last, and so is all that it gives out.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};

use crate::{
    Access, Attr, Backing, Caller, DataPart, DirEntry, KernelReads, LaneIndex, LocateLimits,
    Located, LockMode, LockRange, Placing, RenameFlags, Result, Seek, SetTime, StatFs, SyncWay,
};

/// A backing without a layer, or with it.
pub enum Either<L, U> {
    /// What the layer would lie over.
    Lower(L),
    /// The layer.
    Upper(U),
}

impl<L: Clone, U: Clone> Clone for Either<L, U> {
    fn clone(&self) -> Self {
        match self {
            Self::Lower(lower) => Self::Lower(lower.clone()),
            Self::Upper(upper) => Self::Upper(upper.clone()),
        }
    }
}

impl<L, U> Either<L, U> {
    /// The layer, where it is there.
    pub fn upper(&self) -> Option<&U> {
        match self {
            Self::Lower(_) => None,
            Self::Upper(upper) => Some(upper),
        }
    }

    /// What there is without the layer.
    pub fn lower(&self) -> Option<&L> {
        match self {
            Self::Lower(lower) => Some(lower),
            Self::Upper(_) => None,
        }
    }
}

/// Something that the other side gave out.
fn foreign() -> ! {
    unreachable!("a backing is called with what it gave out")
}

/// Calls the side that `$of`, an inode, a file or a directory, is of.
macro_rules! call {
    ($self:ident($of:ident), |$side:ident| $call:expr) => {
        match ($self, $of) {
            (Self::Lower($side), Either::Lower($of)) => $call,
            (Self::Upper($side), Either::Upper($of)) => $call,
            _ => foreign(),
        }
    };
    ($self:ident($one:ident, $other:ident), |$side:ident| $call:expr) => {
        match ($self, $one, $other) {
            (Self::Lower($side), Either::Lower($one), Either::Lower($other)) => $call,
            (Self::Upper($side), Either::Upper($one), Either::Upper($other)) => $call,
            _ => foreign(),
        }
    };
    ($self:ident, |$side:ident| $call:expr) => {
        match $self {
            Self::Lower($side) => $call,
            Self::Upper($side) => $call,
        }
    };
}

/// The same for a call that gives out something: a file, a directory, or an object with its attributes.
macro_rules! give {
    ($self:ident($of:ident), |$side:ident| $call:expr) => {
        match ($self, $of) {
            (Self::Lower($side), Either::Lower($of)) => $call.map(Either::Lower),
            (Self::Upper($side), Either::Upper($of)) => $call.map(Either::Upper),
            _ => foreign(),
        }
    };
}

macro_rules! give_object {
    ($self:ident($of:ident), |$side:ident| $call:expr) => {
        match ($self, $of) {
            (Self::Lower($side), Either::Lower($of)) => {
                $call.map(|(inode, attr)| (Either::Lower(inode), attr))
            }
            (Self::Upper($side), Either::Upper($of)) => {
                $call.map(|(inode, attr)| (Either::Upper(inode), attr))
            }
            _ => foreign(),
        }
    };
}

macro_rules! give_file {
    ($self:ident($of:ident), |$side:ident| $call:expr) => {
        match ($self, $of) {
            (Self::Lower($side), Either::Lower($of)) => {
                $call.map(|(inode, file, attr)| (Either::Lower(inode), Either::Lower(file), attr))
            }
            (Self::Upper($side), Either::Upper($of)) => {
                $call.map(|(inode, file, attr)| (Either::Upper(inode), Either::Upper(file), attr))
            }
            _ => foreign(),
        }
    };
}

#[deny(clippy::missing_trait_methods)]
impl<L: Backing, U: Backing> Backing for Either<L, U> {
    type Inode = Either<L::Inode, U::Inode>;
    type File = Either<L::File, U::File>;
    type Dir = Either<L::Dir, U::Dir>;

    fn root(&self) -> Self::Inode {
        match self {
            Self::Lower(lower) => Either::Lower(lower.root()),
            Self::Upper(upper) => Either::Upper(upper.root()),
        }
    }

    fn lookup(&self, parent: &Self::Inode, name: &OsStr) -> Result<(Self::Inode, Attr)> {
        give_object!(self(parent), |side| side.lookup(parent, name))
    }

    fn create(
        &self,
        caller: &Caller,
        parent: &Self::Inode,
        name: &OsStr,
        mode: u32,
    ) -> Result<(Self::Inode, Self::File, Attr)> {
        give_file!(self(parent), |side| side.create(caller, parent, name, mode))
    }

    fn mkdir(
        &self,
        caller: &Caller,
        parent: &Self::Inode,
        name: &OsStr,
        mode: u32,
    ) -> Result<(Self::Inode, Attr)> {
        give_object!(self(parent), |side| side.mkdir(caller, parent, name, mode))
    }

    fn mknod(
        &self,
        caller: &Caller,
        parent: &Self::Inode,
        name: &OsStr,
        mode: u32,
        rdev: u64,
    ) -> Result<(Self::Inode, Attr)> {
        give_object!(self(parent), |side| side
            .mknod(caller, parent, name, mode, rdev))
    }

    fn symlink(
        &self,
        caller: &Caller,
        parent: &Self::Inode,
        name: &OsStr,
        target: &OsStr,
    ) -> Result<(Self::Inode, Attr)> {
        give_object!(self(parent), |side| side
            .symlink(caller, parent, name, target))
    }

    fn link(&self, inode: &Self::Inode, parent: &Self::Inode, name: &OsStr) -> Result<Attr> {
        call!(self(inode, parent), |side| side.link(inode, parent, name))
    }

    fn unlink(&self, parent: &Self::Inode, name: &OsStr) -> Result<()> {
        call!(self(parent), |side| side.unlink(parent, name))
    }

    fn rmdir(&self, parent: &Self::Inode, name: &OsStr) -> Result<()> {
        call!(self(parent), |side| side.rmdir(parent, name))
    }

    fn rename(
        &self,
        parent: &Self::Inode,
        name: &OsStr,
        new_parent: &Self::Inode,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> Result<()> {
        call!(self(parent, new_parent), |side| side
            .rename(parent, name, new_parent, new_name, flags))
    }

    fn moved_to(&self, inode: &Self::Inode, parent: &Self::Inode, name: &OsStr) -> Self::Inode {
        match (self, inode, parent) {
            (Self::Lower(side), Either::Lower(inode), Either::Lower(parent)) => {
                Either::Lower(side.moved_to(inode, parent, name))
            }
            (Self::Upper(side), Either::Upper(inode), Either::Upper(parent)) => {
                Either::Upper(side.moved_to(inode, parent, name))
            }
            _ => foreign(),
        }
    }

    fn readlink(&self, inode: &Self::Inode) -> Result<Vec<u8>> {
        call!(self(inode), |side| side.readlink(inode))
    }

    fn attr(&self, inode: &Self::Inode) -> Result<Attr> {
        call!(self(inode), |side| side.attr(inode))
    }

    fn attr_of_file(&self, file: &Self::File) -> Result<Attr> {
        call!(self(file), |side| side.attr_of_file(file))
    }

    fn attr_now(&self, inode: &Self::Inode) -> Result<Attr> {
        call!(self(inode), |side| side.attr_now(inode))
    }

    fn attr_of_file_now(&self, file: &Self::File) -> Result<Attr> {
        call!(self(file), |side| side.attr_of_file_now(file))
    }

    fn set_mode(&self, inode: &Self::Inode, mode: u32) -> Result<()> {
        call!(self(inode), |side| side.set_mode(inode, mode))
    }

    fn set_owner(&self, inode: &Self::Inode, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        call!(self(inode), |side| side.set_owner(inode, uid, gid))
    }

    fn set_times(&self, inode: &Self::Inode, atime: SetTime, mtime: SetTime) -> Result<()> {
        call!(self(inode), |side| side.set_times(inode, atime, mtime))
    }

    fn get_xattr(&self, inode: &Self::Inode, name: &OsStr) -> Result<Vec<u8>> {
        call!(self(inode), |side| side.get_xattr(inode, name))
    }

    fn set_xattr(&self, inode: &Self::Inode, name: &OsStr, value: &[u8], flags: i32) -> Result<()> {
        call!(self(inode), |side| side
            .set_xattr(inode, name, value, flags))
    }

    fn list_xattr(&self, inode: &Self::Inode) -> Result<Vec<u8>> {
        call!(self(inode), |side| side.list_xattr(inode))
    }

    fn remove_xattr(&self, inode: &Self::Inode, name: &OsStr) -> Result<()> {
        call!(self(inode), |side| side.remove_xattr(inode, name))
    }

    fn has_default_acl(&self, inode: &Self::Inode) -> bool {
        call!(self(inode), |side| side.has_default_acl(inode))
    }

    fn open_dir(&self, inode: &Self::Inode) -> Result<Self::Dir> {
        give!(self(inode), |side| side.open_dir(inode))
    }

    fn read_dir(
        &self,
        dir: &Self::Dir,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()> {
        call!(self(dir), |side| side.read_dir(dir, cookie, sink))
    }

    fn sync_dir(&self, inode: &Self::Inode) -> Result<()> {
        call!(self(inode), |side| side.sync_dir(inode))
    }

    fn open(&self, inode: &Self::Inode, access: Access) -> Result<Self::File> {
        give!(self(inode), |side| side.open(inode, access))
    }

    fn read_at(&self, file: &Self::File, buf: &mut [u8], offset: u64) -> Result<usize> {
        call!(self(file), |side| side.read_at(file, buf, offset))
    }

    fn write_at(&self, file: &Self::File, data: &[IoSlice<'_>], offset: u64) -> Result<usize> {
        call!(self(file), |side| side.write_at(file, data, offset))
    }

    fn write_parts(&self, file: &Self::File, parts: &[DataPart<'_>]) -> Result<u64> {
        call!(self(file), |side| side.write_parts(file, parts))
    }

    fn gathers(&self, inode: &Self::Inode) -> bool {
        call!(self(inode), |side| side.gathers(inode))
    }

    fn set_len(&self, file: &Self::File, len: u64) -> Result<()> {
        call!(self(file), |side| side.set_len(file, len))
    }

    fn grow(&self, file: &Self::File, len: u64) -> Result<()> {
        call!(self(file), |side| side.grow(file, len))
    }

    fn finish_set_len(&self, file: &Self::File, len: u64) -> Result<bool> {
        call!(self(file), |side| side.finish_set_len(file, len))
    }

    fn rewrite_nothing(&self, file: &Self::File) -> Result<()> {
        call!(self(file), |side| side.rewrite_nothing(file))
    }

    fn allocate(&self, file: &Self::File, mode: i32, offset: u64, len: u64) -> Result<()> {
        call!(self(file), |side| side.allocate(file, mode, offset, len))
    }

    fn seek(&self, file: &Self::File, offset: u64, what: Seek) -> Result<u64> {
        call!(self(file), |side| side.seek(file, offset, what))
    }

    fn copy_range(
        &self,
        from: &Self::File,
        from_offset: u64,
        to: &Self::File,
        to_offset: u64,
        len: u64,
    ) -> Result<u64> {
        call!(self(from, to), |side| side.copy_range(
            from,
            from_offset,
            to,
            to_offset,
            len
        ))
    }

    fn sync(&self, file: &Self::File, data_only: bool) -> Result<()> {
        call!(self(file), |side| side.sync(file, data_only))
    }

    fn begin_sync(&self, file: &Self::File, offset: u64, len: u64) {
        call!(self(file), |side| side.begin_sync(file, offset, len))
    }

    fn forget_pages(&self, file: &Self::File, offset: u64, len: u64) {
        call!(self(file), |side| side.forget_pages(file, offset, len))
    }

    fn try_lock(&self, file: &Self::File, mode: LockMode) -> Result<bool> {
        call!(self(file), |side| side.try_lock(file, mode))
    }

    fn lock_range(
        &self,
        file: &Self::File,
        range: LockRange,
        mode: Option<LockMode>,
    ) -> Result<bool> {
        call!(self(file), |side| side.lock_range(file, range, mode))
    }

    fn is_range_locked(&self, file: &Self::File, range: LockRange, mode: LockMode) -> Result<bool> {
        call!(self(file), |side| side.is_range_locked(file, range, mode))
    }

    fn reading_fd(&self, file: &Self::File) -> Option<OwnedFd> {
        call!(self(file), |side| side.reading_fd(file))
    }

    fn locate(
        &self,
        file: &Self::File,
        range: Range<u64>,
        limits: LocateLimits,
    ) -> Result<Option<Located>> {
        call!(self(file), |side| side.locate(file, range, limits))
    }

    fn kernel_reads(&self, file: &Self::File) -> KernelReads {
        call!(self(file), |side| side.kernel_reads(file))
    }

    fn note_opened(&self, file: &Self::File, writes: bool) -> Result<()> {
        call!(self(file), |side| side.note_opened(file, writes))
    }

    fn changes_by_others(&self, inode: &Self::Inode) -> u64 {
        call!(self(inode), |side| side.changes_by_others(inode))
    }

    fn finishes_files(&self) -> bool {
        call!(self, |side| side.finishes_files())
    }

    fn note_written(&self, file: &Self::File) {
        call!(self(file), |side| side.note_written(file))
    }

    fn finish_file(&self, file: &Self::File) -> Result<()> {
        call!(self(file), |side| side.finish_file(file))
    }

    fn is_logged(&self, inode: &Self::Inode) -> bool {
        call!(self(inode), |side| side.is_logged(inode))
    }

    fn lane_count(&self) -> u16 {
        call!(self, |side| side.lane_count())
    }

    fn lane_of(&self, inode: &Self::Inode) -> LaneIndex {
        call!(self(inode), |side| side.lane_of(inode))
    }

    fn lane_of_turn(&self, turn: u64) -> Option<LaneIndex> {
        call!(self, |side| side.lane_of_turn(turn))
    }

    fn statfs(&self) -> Result<StatFs> {
        call!(self, |side| side.statfs())
    }

    fn sync_all(&self) -> Result<()> {
        call!(self, |side| side.sync_all())
    }

    fn sync_changes(&self) -> Result<()> {
        call!(self, |side| side.sync_changes())
    }

    fn sync_tree(&self, inode: &Self::Inode) -> Result<()> {
        call!(self(inode), |side| side.sync_tree(inode))
    }

    fn sync_way(&self) -> SyncWay {
        call!(self, |side| side.sync_way())
    }

    fn fd<'a>(&self, file: &'a Self::File) -> Option<BorrowedFd<'a>> {
        call!(self(file), |side| side.fd(file))
    }

    fn create_placed(
        &self,
        caller: &Caller,
        parent: &Self::Inode,
        name: &OsStr,
        mode: u32,
        placing: Placing<'_, Self::Inode>,
    ) -> Result<(Self::Inode, Self::File, Attr)> {
        match (self, parent) {
            (Self::Lower(side), Either::Lower(parent)) => {
                let placing = placing.map(|inode| inode.lower().unwrap_or_else(|| foreign()));
                let made = side.create_placed(caller, parent, name, mode, placing);
                made.map(|(inode, file, attr)| (Either::Lower(inode), Either::Lower(file), attr))
            }
            (Self::Upper(side), Either::Upper(parent)) => {
                let placing = placing.map(|inode| inode.upper().unwrap_or_else(|| foreign()));
                let made = side.create_placed(caller, parent, name, mode, placing);
                made.map(|(inode, file, attr)| (Either::Upper(inode), Either::Upper(file), attr))
            }
            _ => foreign(),
        }
    }
}
