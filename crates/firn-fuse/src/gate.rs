//! Makes changes of files wait while a transaction is prepared or applied in their directory.
//!
//! Terms
//! * A *transaction* makes all changes of a checkpoint visible at once, or none of them.
//! * While it is prepared or applied, its directory is *quiesced*: no change below it is under way.
//! * The [`Gate`] of a mount makes new changes wait meanwhile. A [`Pass`] is the right to make one change.
//!
//! firnd, the process that serves the mount, makes one gate for a mount with transactions. It hands the gate to every
//! frontend (FUSE, and the socket for direct access). The engine, which holds the files, does not use it. A mount
//! without transactions has no gate, and takes no lock.
//!
//! Which pass a request needs. The *backing* is the directory below the mount.
//!
//! | request | pass | why |
//! |---|---|---|
//! | write(2), direct access | [`Gate::enter`] | the bytes remain in memory, so a prepared transaction permits them |
//! | truncation, fallocate(2), copy, write that changes the backing first | [`Gate::enter_change`] | backing changes |
//! | change of names or attributes | none | the backing itself makes the change wait, [`Gate::holds_up_changes`] |
//! | read | none | nothing changes |
//!
//! Promises of an implementation
//! * No thread that holds a [`Pass`] waits for the outcome of a transaction. Otherwise both would wait for ever: to
//!   quiesce a directory, the gate waits until all passes below it are returned.
//! * A change waits only while a directory above the changed object is quiesced.
//! * A change never has to wait while it holds a pass.

use std::ffi::OsStr;
use std::ops::Range;
use std::sync::Arc;

use firn_backing::{Caller, Errno};
use firn_engine::{HandleId, InodeId};

use crate::request::{COPY_BYTES_MAX, CopyRange, Fallocate, Name, Operation, Read, Write};
use crate::watch::ChangeWatch;

/// How a request uses a range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeAccess {
    /// The request reads the range.
    Read,
    /// The request writes the range.
    Write,
}

/// What a request changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangedObject<'a> {
    /// A name in a directory.
    Name(InodeId, &'a OsStr),
    /// An object, by its inode id.
    Inode(InodeId),
    /// A file that is changed through a handle. The handle may be from an earlier firnd, which has died.
    Handle(InodeId, HandleId),
    /// A file that is closed, which ends the changes through this handle. Nothing may be read from /proc about the
    /// process: an exec closes descriptors while most of /proc of its process is locked.
    Closed(InodeId, HandleId),
}

/// The right to make one change. Held while the engine makes the change; a thread holds at most one.
pub struct Pass<'a> {
    gate: &'a dyn Gate,
    number: u64,
}

impl<'a> Pass<'a> {
    /// Makes the pass that `gate` knows by `number`.
    pub fn new(gate: &'a dyn Gate, number: u64) -> Self {
        Self { gate, number }
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.gate.leave(self.number);
    }
}

/// Admits changes of programs, or makes them wait for a transaction.
pub trait Gate: Send + Sync {
    /// Whether a directory above `inode` is quiesced now, so that [`Gate::enter`] would wait.
    fn is_quiescing(&self, inode: InodeId) -> bool;

    /// Whether a change of names or attributes may now have to wait for the outcome of a transaction.
    fn holds_up_changes(&self) -> bool;

    /// Returns a pass for a change of `inode` that remains in memory. Waits while a directory above `inode` is
    /// quiesced.
    fn enter(&self, inode: InodeId) -> Pass<'_>;

    /// Returns the pass with this number to the gate. Only [`Pass`] calls this.
    fn leave(&self, number: u64);

    /// Returns a pass for a change of contents in the backing itself, the directory below the mount. Waits until no
    /// transaction forbids the change. Fails if such a transaction can no longer end.
    fn enter_change(&self, inode: InodeId) -> Result<Pass<'_>, Errno>;

    /// Whether [`Gate::admit`] must be called for each change. This is so if an earlier firnd, which served this mount
    /// and died, may have had open transactions: they ended with it.
    fn checks_changes(&self) -> bool {
        false
    }

    /// Refuses a change that belonged to a transaction which has ended with an earlier firnd. `is_repeated`: that firnd
    /// had the request already.
    fn admit(&self, _: Caller, _is_repeated: bool, _: ChangedObject<'_>) -> Result<(), Errno> {
        Ok(())
    }

    /// Returns the watch over changes of names and files. `None` without commit rules.
    fn watch(&self) -> Option<Arc<dyn ChangeWatch>> {
        None
    }

    /// Records that process `pid` (0: unknown) uses a range of an open file. Conflicts between hosts are found by these
    /// records.
    fn record_access(&self, handle: HandleId, pid: u32, access: RangeAccess, range: Range<u64>);
}

/// Calls [`Gate::enter_change`] if the mount has a gate. Returns no pass if it has none.
pub(crate) fn enter_change(
    gate: Option<&dyn Gate>,
    inode: InodeId,
) -> Result<Option<Pass<'_>>, Errno> {
    gate.map(|gate| gate.enter_change(inode)).transpose()
}

/// [`Gate::admit`] for all that a request changes.
pub(crate) fn admit(
    gate: &dyn Gate,
    caller: Caller,
    is_repeated: bool,
    operation: &Operation<'_>,
) -> Result<(), Errno> {
    let mut changed = changed_objects(operation).into_iter().flatten();
    changed.try_for_each(|object| gate.admit(caller, is_repeated, object))
}

/// Returns the objects that an operation changes. A sync or close of a file counts as the end of its changes. The match
/// names every operation, so that the author of a new one decides here whether it changes an object.
fn changed_objects<'a>(operation: &Operation<'a>) -> [Option<ChangedObject<'a>>; 2] {
    let name = |child: &Name<'a>| Some(ChangedObject::Name(child.parent, child.name));
    match operation {
        Operation::Unlink(child)
        | Operation::Rmdir(child)
        | Operation::Mknod { child, .. }
        | Operation::Mkdir { child, .. }
        | Operation::Symlink { child, .. }
        | Operation::Create { child, .. } => [name(child), None],
        Operation::Link { inode, child } => [name(child), Some(ChangedObject::Inode(*inode))],
        Operation::Rename { from, to, .. } => [name(from), name(to)],
        Operation::Setattr { inode, .. }
        | Operation::Setxattr { inode, .. }
        | Operation::Removexattr { inode, .. } => [Some(ChangedObject::Inode(*inode)), None],
        Operation::Open { inode, flags } if flags & libc::O_ACCMODE != libc::O_RDONLY => {
            [Some(ChangedObject::Inode(*inode)), None]
        }
        Operation::Write(Write { inode, handle, .. })
        | Operation::Fallocate(Fallocate { inode, handle, .. })
        | Operation::CopyRange(CopyRange {
            to_inode: inode,
            to: handle,
            ..
        })
        | Operation::Fsync { inode, handle, .. } => {
            [Some(ChangedObject::Handle(*inode, *handle)), None]
        }
        Operation::Flush { inode, handle, .. } => {
            [Some(ChangedObject::Closed(*inode, *handle)), None]
        }
        Operation::Lookup(_)
        | Operation::Getattr { .. }
        | Operation::Readlink { .. }
        | Operation::Open { .. }
        | Operation::Opendir { .. }
        | Operation::Read(_)
        | Operation::Release { .. }
        | Operation::Readdir { .. }
        | Operation::Readdirplus { .. }
        | Operation::Releasedir { .. }
        | Operation::Fsyncdir { .. }
        | Operation::Statfs { .. }
        | Operation::Getxattr { .. }
        | Operation::Listxattr { .. }
        | Operation::Ioctl { .. }
        | Operation::Lseek { .. }
        | Operation::Getlk(_)
        | Operation::Setlk { .. } => [None, None],
    }
}

/// Tells the gate which bytes of files a request uses.
///
/// The match names every operation, so that the author of a new operation decides here whether two hosts can conflict
/// over it.
pub(crate) fn record_accesses(gate: &dyn Gate, caller: Caller, operation: &Operation<'_>) {
    let record = |handle, pid, access, offset: u64, len: u64| {
        gate.record_access(handle, pid, access, offset..offset.saturating_add(len));
    };
    match operation {
        Operation::Read(Read {
            handle,
            offset,
            size,
            ..
        }) => record(
            *handle,
            caller.pid,
            RangeAccess::Read,
            *offset,
            u64::from(*size),
        ),
        Operation::Write(Write {
            handle,
            offset,
            data,
            from_cache,
            ..
        }) => {
            // The kernel writes back dirty pages of a mapping; the request does not say which process changed them.
            let pid = if *from_cache { 0 } else { caller.pid };
            record(*handle, pid, RangeAccess::Write, *offset, data.len() as u64);
        }
        Operation::Fallocate(Fallocate {
            handle,
            offset,
            len,
            mode,
            ..
        }) if mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) != 0 => {
            record(*handle, caller.pid, RangeAccess::Write, *offset, *len);
        }
        Operation::CopyRange(CopyRange {
            from,
            from_offset,
            to,
            to_offset,
            len,
            ..
        }) => {
            let len = (*len).min(COPY_BYTES_MAX);
            record(*from, caller.pid, RangeAccess::Read, *from_offset, len);
            record(*to, caller.pid, RangeAccess::Write, *to_offset, len);
        }
        // Fallocate in its other modes allocates space and changes no byte.
        Operation::Fallocate(_) => {}
        // For changes of names, attributes and lengths, the change logs of the transactions are compared instead.
        Operation::Lookup(_)
        | Operation::Getattr { .. }
        | Operation::Setattr { .. }
        | Operation::Readlink { .. }
        | Operation::Mknod { .. }
        | Operation::Mkdir { .. }
        | Operation::Unlink(_)
        | Operation::Rmdir(_)
        | Operation::Symlink { .. }
        | Operation::Rename { .. }
        | Operation::Link { .. }
        | Operation::Create { .. }
        | Operation::Setxattr { .. }
        | Operation::Getxattr { .. }
        | Operation::Listxattr { .. }
        | Operation::Removexattr { .. } => {}
        // These operations use no byte of a file.
        Operation::Open { .. }
        | Operation::Release { .. }
        | Operation::Flush { .. }
        | Operation::Fsync { .. }
        | Operation::Opendir { .. }
        | Operation::Readdir { .. }
        | Operation::Readdirplus { .. }
        | Operation::Releasedir { .. }
        | Operation::Fsyncdir { .. }
        | Operation::Statfs { .. }
        | Operation::Ioctl { .. }
        | Operation::Getlk(_)
        | Operation::Setlk { .. }
        | Operation::Lseek { .. } => {}
    }
}
