//! The gate of a mount with transactions: what changes pass before they come to the engine.
//!
//! The engine and its backing know nothing of it. The assembly of the mount makes the one [`Gate`], and hands it to
//! everything that programs come in by; a mount without transactions has none, and takes no lock for it.
//!
//! | request | passes |
//! |---|---|
//! | write(2), direct access | [`Gate::enter`]: they go on while a transaction is prepared, for they are held in memory |
//! | truncation, fallocate(2), copy, a write that changes the backing first | [`Gate::enter_change`] |
//! | names and attributes | nothing: the backing says how long they wait; [`Gate::holds_up_changes`] finds them a thread |
//! | reads | nothing |
//!
//! Promises of an implementation
//! * No thread waits for the outcome of a transaction with a [`Pass`]: the one that quiesces a directory waits for all
//!   that are below it.
//! * A change waits only for what is done with a directory above the object that it changes.
//! * While a pass is held, no change comes to wait that was let in before.

use std::ffi::OsStr;
use std::ops::Range;
use std::sync::Arc;

use firn_backing::{Caller, Errno};
use firn_engine::{HandleId, InodeId};

use crate::request::{COPY_BYTES_MAX, CopyRange, Fallocate, Name, Operation, Read, Write};
use crate::watch::ChangeWatch;

/// What a request does with a range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeAccess {
    /// It reads the range.
    Read,
    /// It writes the range.
    Write,
}

/// What a request changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangedObject<'a> {
    /// A name in a directory.
    Name(InodeId, &'a OsStr),
    /// An object, by its number.
    Inode(InodeId),
    /// A file, by a handle that may have been lost with an earlier firnd.
    Handle(InodeId, HandleId),
}

/// Leave to make one change. Held while the engine makes it; a thread has one at a time.
pub struct Pass<'a> {
    gate: &'a dyn Gate,
    number: u64,
}

impl<'a> Pass<'a> {
    /// A pass that `gate` knows by this number.
    pub fn new(gate: &'a dyn Gate, number: u64) -> Self {
        Self { gate, number }
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.gate.leave(self.number);
    }
}

/// What stands before the changes of programs.
pub trait Gate: Send + Sync {
    /// Whether no change of an object is let in now: [`Gate::enter`] would wait.
    fn is_quiescing(&self, inode: InodeId) -> bool;

    /// Whether changes of names or attributes may have to wait now for the outcome of a transaction.
    fn holds_up_changes(&self) -> bool;

    /// Waits while a directory above an object is quiesced.
    fn enter(&self, inode: InodeId) -> Pass<'_>;

    /// Gives a pass back. Only [`Pass`] calls it.
    fn leave(&self, number: u64);

    /// Waits until the contents of an object may be changed in the backing; an error where that does not come.
    fn enter_change(&self, inode: InodeId) -> Result<Pass<'_>, Errno>;

    /// Whether transactions may have ended with an earlier firnd: then [`Gate::admit`] is asked about each change.
    fn checks_changes(&self) -> bool {
        false
    }

    /// Refuses a change that belonged to a transaction which has ended with an earlier firnd. `is_repeated`: that firnd had
    /// the request already.
    fn admit(&self, _: Caller, _is_repeated: bool, _: ChangedObject<'_>) -> Result<(), Errno> {
        Ok(())
    }

    /// What watches changes of names and files, on a mount with commit rules.
    fn watch(&self) -> Option<Arc<dyn ChangeWatch>> {
        None
    }

    /// Notes that process `pid` (0: unknown) uses a range of an open file.
    fn note_access(&self, handle: HandleId, pid: u32, access: RangeAccess, range: Range<u64>);
}

/// [`Gate::enter_change`], where there is a gate.
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

/// What an operation changes; a sync or close of a file ends changes of it. Every operation is named: a new one has to decide
/// here whether it changes something.
fn changed_objects<'a>(operation: &Operation<'a>) -> [Option<ChangedObject<'a>>; 2] {
    let name = |at: &Name<'a>| Some(ChangedObject::Name(at.parent, at.name));
    match operation {
        Operation::Unlink(at)
        | Operation::Rmdir(at)
        | Operation::Mknod { at, .. }
        | Operation::Mkdir { at, .. }
        | Operation::Symlink { at, .. }
        | Operation::Create { at, .. } => [name(at), None],
        Operation::Link { inode, at } => [name(at), Some(ChangedObject::Inode(*inode))],
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
        | Operation::Flush { inode, handle, .. }
        | Operation::Fsync { inode, handle, .. } => {
            [Some(ChangedObject::Handle(*inode, *handle)), None]
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

/// Notes which bytes a request uses. Every operation is named: a new operation has to decide here whether two hosts can
/// conflict over it.
pub(crate) fn note_accesses(gate: &dyn Gate, caller: Caller, operation: &Operation<'_>) {
    let note = |handle, pid, access, offset: u64, len: u64| {
        gate.note_access(handle, pid, access, offset..offset.saturating_add(len));
    };
    match operation {
        Operation::Read(Read {
            handle,
            offset,
            size,
            ..
        }) => note(
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
            // The kernel writes pages of mappings for no process in particular.
            let pid = if *from_cache { 0 } else { caller.pid };
            note(*handle, pid, RangeAccess::Write, *offset, data.len() as u64);
        }
        Operation::Fallocate(Fallocate {
            handle,
            offset,
            len,
            mode,
            ..
        }) if mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) != 0 => {
            note(*handle, caller.pid, RangeAccess::Write, *offset, *len);
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
            note(*from, caller.pid, RangeAccess::Read, *from_offset, len);
            note(*to, caller.pid, RangeAccess::Write, *to_offset, len);
        }
        // Other modes give room and change no byte.
        Operation::Fallocate(_) => {}
        // What a host changes of names, attributes and lengths is in its transaction's change log.
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
        // They use no byte of a file.
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
