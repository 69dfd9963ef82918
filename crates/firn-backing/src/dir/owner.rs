//! New objects that belong to the calling process.
//!
//! Invariants
//! * Only a root process changes owners; any other makes objects of its own, as the kernel would.
//! * The thread's ids are its own again after every call, also when the call panics ([`AsCaller`]).
//! * No object is left behind that belongs to the wrong user: where it cannot be given away, it is
//!   removed and the errno told.
//!
//! The first try runs with the caller's file system ids, because that is what a network server, a quota and a POSIX
//! default ACL judge by. EACCES then may only mean that the caller has its rights from a supplementary group, which
//! this thread lacks. The kernel has already checked the caller at the mount, so the second try is made as root and the
//! object given away.

use std::marker::PhantomData;

use crate::{Attr, Caller, Errno, Result};

/// While it lives, this thread touches files as the caller would.
pub(super) struct AsCaller {
    old_uid: u32,
    old_gid: u32,
    /// Ids belong to a thread, so the guard must not leave it.
    _stay: PhantomData<*const ()>,
}

impl AsCaller {
    /// Takes on `uid` and `gid`; `None` where the kernel refuses (no capability, unmapped id).
    pub(super) fn new(uid: u32, gid: u32) -> Option<Self> {
        // The group first: after the user has changed, the right to change it may be gone.
        let old_gid = set_fsgid(gid);
        let old_uid = set_fsuid(uid);
        let guard = Self {
            old_uid,
            old_gid,
            _stay: PhantomData,
        };
        // The calls tell no errors; an invalid id changes nothing and returns what is in force.
        (set_fsuid(u32::MAX) == uid && set_fsgid(u32::MAX) == gid).then_some(guard)
    }
}

impl Drop for AsCaller {
    fn drop(&mut self) {
        set_fsuid(self.old_uid);
        set_fsgid(self.old_gid);
    }
}

// The system calls, not the wrappers, so that only this thread changes whatever the C library does.
fn set_fsuid(uid: u32) -> u32 {
    // SAFETY: changes this thread's file system user id only; no memory is involved.
    unsafe { libc::syscall(libc::SYS_setfsuid, uid) as u32 }
}

fn set_fsgid(gid: u32) -> u32 {
    // SAFETY: changes this thread's file system group id only; no memory is involved.
    unsafe { libc::syscall(libc::SYS_setfsgid, gid) as u32 }
}

/// This process's effective ids.
pub(super) fn own_ids() -> (u32, u32) {
    (
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    )
}

/// Whether what this thread makes belongs to `caller`.
pub(super) fn has_ids_of(caller: &Caller) -> bool {
    // An invalid id changes nothing and returns what is in force.
    (set_fsuid(u32::MAX), set_fsgid(u32::MAX)) == (caller.uid, caller.gid)
}

/// Object, user, group, mode.
type Give<'a, T> = dyn Fn(&T, u32, Option<u32>, Option<u32>) -> Result<Attr> + 'a;

/// The three steps that differ between kinds of objects.
pub(super) struct Steps<'a, T> {
    /// Makes the object with these mode bits and returns it with its attributes.
    pub(super) make: &'a dyn Fn(u32) -> Result<(T, Attr)>,
    /// Gives the object to a user and, unless `None`, to a group; then sets the mode, if there is one.
    pub(super) give: &'a Give<'a, T>,
    /// Removes the object again.
    pub(super) undo: &'a dyn Fn(),
}

const SET_ID_BITS: u32 = libc::S_ISUID | libc::S_ISGID;

/// Makes an object for `caller` as the module describes. `own` makes it as this process at once:
/// a device file, which the caller's ids have no capability for.
pub(super) fn make_for<T>(
    caller: &Caller,
    mode: u32,
    parent_is_setgid: impl Fn() -> Result<bool>,
    own: bool,
    steps: &Steps<'_, T>,
) -> Result<(T, Attr)> {
    let (uid, gid) = own_ids();
    if uid != 0 || (caller.uid, caller.gid) == (uid, gid) {
        return (steps.make)(mode);
    }
    if !own && let Some(made) = make_as_caller(caller, mode, steps) {
        return made;
    }
    // Without set-id bits until it is given away: never, not for an instant, a set-id file of root.
    let (made, attr) = (steps.make)(mode & !SET_ID_BITS)?;
    // The parent's setgid bit or mount option `grpid` has chosen the group; leave it so.
    let given = parent_is_setgid().and_then(|setgid| {
        let group = (!setgid && attr.gid == gid).then_some(caller.gid);
        let set_id = mode & SET_ID_BITS;
        let mode = (set_id != 0).then_some(attr.mode & 0o7777 | set_id);
        (steps.give)(&made, caller.uid, group, mode)
    });
    match given {
        Ok(attr) => Ok((made, attr)),
        Err(e) => {
            (steps.undo)();
            Err(e)
        }
    }
}

/// The first try; `None`: make it as root.
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
        // The kernel takes the setgid bit from callers outside the group. The mount has already asked
        // that of the real caller, supplementary groups included, so what it let through is due.
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
