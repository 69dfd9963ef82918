//! Makes new objects that belong to the calling process.
//!
//! Invariants
//! * Only a root process changes owners. Objects that any other process makes belong to that process, as usual.
//! * After every call, even one that panics, the thread has its own ids again ([`AsCaller`]).
//! * No object remains with a wrong owner: if its owner cannot be set, the object is removed, and the errno returned.
//!
//! The first try uses the caller's file system ids, because network servers, quotas and default ACLs depend on them.
//! EACCES may then only mean that the caller gets its right from a supplementary group, which this thread lacks. The
//! kernel has already checked the caller's rights at the mount. So the second try makes the object as root and sets the
//! caller as its owner.

use std::marker::PhantomData;

use crate::{Attr, Caller, Errno, Result};

/// While this lives, the thread has the file system ids of the caller.
pub(super) struct AsCaller {
    old_uid: u32,
    old_gid: u32,
    /// Keeps the guard in its thread (not `Send`), because ids belong to a thread.
    _stays_in_thread: PhantomData<*const ()>,
}

impl AsCaller {
    /// Sets the ids of this thread. `None`: the kernel refuses (no capability, or an unmapped id).
    pub(super) fn new(uid: u32, gid: u32) -> Option<Self> {
        // The group first: after a change of the user, the thread may have no right to change the group.
        let old_gid = set_fsgid(gid);
        let old_uid = set_fsuid(uid);
        let guard = Self {
            old_uid,
            old_gid,
            _stays_in_thread: PhantomData,
        };
        // These calls return no error. A call with an invalid id changes nothing and returns the id in force.
        (set_fsuid(u32::MAX) == uid && set_fsgid(u32::MAX) == gid).then_some(guard)
    }
}

impl Drop for AsCaller {
    fn drop(&mut self) {
        set_fsuid(self.old_uid);
        set_fsgid(self.old_gid);
    }
}

// System calls and not the functions of the C library, which may change the ids of all threads.
fn set_fsuid(uid: u32) -> u32 {
    // SAFETY: the call changes the thread's file system user id and accesses no memory.
    unsafe { libc::syscall(libc::SYS_setfsuid, uid) as u32 }
}

fn set_fsgid(gid: u32) -> u32 {
    // SAFETY: the call changes the thread's file system group id and accesses no memory.
    unsafe { libc::syscall(libc::SYS_setfsgid, gid) as u32 }
}

/// Returns the effective user and group id of this process.
pub(super) fn own_ids() -> (u32, u32) {
    (
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    )
}

/// Whether objects that this thread makes belong to `caller`.
pub(super) fn has_ids_of(caller: &Caller) -> bool {
    // A call with an invalid id changes nothing and returns the id in force.
    (set_fsuid(u32::MAX), set_fsgid(u32::MAX)) == (caller.uid, caller.gid)
}

/// Sets the user of an object, then its group and its mode unless they are `None`. Arguments: object, user, group,
/// mode.
type Give<'a, T> = dyn Fn(&T, u32, Option<u32>, Option<u32>) -> Result<Attr> + 'a;

/// The three steps of making an object, which differ between kinds of objects.
pub(super) struct Steps<'a, T> {
    /// Makes the object with these mode bits and returns it with its attributes.
    pub(super) make: &'a dyn Fn(u32) -> Result<(T, Attr)>,
    /// Sets user and, unless `None`, group of the object. Then sets the mode, unless `None`.
    pub(super) give: &'a Give<'a, T>,
    /// Removes the object again.
    pub(super) undo: &'a dyn Fn(),
}

const SET_ID_BITS: u32 = libc::S_ISUID | libc::S_ISGID;

/// Makes an object for `caller`, as the head of this file describes. `as_process`: leave out the first try. This is for
/// device files, for which the caller's ids have no capability.
pub(super) fn make_for<T>(
    caller: &Caller,
    mode: u32,
    parent_is_setgid: impl Fn() -> Result<bool>,
    as_process: bool,
    steps: &Steps<'_, T>,
) -> Result<(T, Attr)> {
    let (uid, gid) = own_ids();
    if uid != 0 || (caller.uid, caller.gid) == (uid, gid) {
        return (steps.make)(mode);
    }
    if !as_process && let Some(made) = make_as_caller(caller, mode, steps) {
        return made;
    }
    // Set-id bits are added only after the change of owner, so that at no time a set-id file of root exists.
    let (made, attr) = (steps.make)(mode & !SET_ID_BITS)?;
    // A group that the parent's setgid bit or the mount option `grpid` has chosen is not changed.
    let given = parent_is_setgid().and_then(|setgid| {
        let group = (!setgid && attr.gid == gid).then_some(caller.gid);
        let set_id = mode & SET_ID_BITS;
        let mode = (set_id != 0).then_some(attr.mode & 0o7777 | set_id);
        (steps.give)(&made, caller.uid, group, mode)
    });
    match given {
        Ok(attr) => Ok((made, attr)),
        Err(errno) => {
            (steps.undo)();
            Err(errno)
        }
    }
}

/// Makes an object with the caller's ids. `None`: the object must be made as root.
fn make_as_caller<T>(
    caller: &Caller,
    mode: u32,
    steps: &Steps<'_, T>,
) -> Option<Result<(T, Attr)>> {
    let made = {
        let _ids = AsCaller::new(caller.uid, caller.gid)?;
        (steps.make)(mode)
    };
    match made {
        Err(Errno::ACCESS) => None,
        // The kernel removes the setgid bit if the thread is not in the file's group. At the mount the kernel has already
        // checked that for the real caller, with its supplementary groups. So the bit is set again.
        Ok((made, attr)) if mode & libc::S_ISGID & !attr.mode != 0 => {
            let mode = attr.mode & 0o7777 | libc::S_ISGID;
            let given = (steps.give)(&made, caller.uid, None, Some(mode));
            if given.is_err() {
                (steps.undo)();
            }
            Some(given.map(|attr| (made, attr)))
        }
        made => Some(made),
    }
}
