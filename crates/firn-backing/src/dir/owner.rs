//! Owners of new objects: creates objects so that they belong to the process that requested them (the caller).
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

/// Returns whether objects that this thread makes belong to `caller`.
pub(super) fn has_ids_of(caller: &Caller) -> bool {
    // A call with an invalid id changes nothing and returns the id in force.
    (set_fsuid(u32::MAX), set_fsgid(u32::MAX)) == (caller.uid, caller.gid)
}

/// Owner, group and mode that a new object gets after its creation.
#[derive(Clone, Copy)]
pub(super) struct NewOwner {
    pub(super) uid: u32,
    /// `None`: the group is not changed.
    pub(super) gid: Option<u32>,
    /// `None`: the mode is not changed.
    pub(super) mode: Option<u32>,
}

/// Sets the owner of an object, and returns its new attributes.
type SetOwner<'a, T> = dyn Fn(&T, NewOwner) -> Result<Attr> + 'a;

/// The three steps of the creation of an object, which differ between kinds of objects.
pub(super) struct CreationSteps<'a, T> {
    /// Creates the object with these mode bits, and returns it with its attributes.
    pub(super) create: &'a dyn Fn(u32) -> Result<(T, Attr)>,
    /// Sets the owner of the object.
    pub(super) set_owner: &'a SetOwner<'a, T>,
    /// Removes the object again.
    pub(super) remove: &'a dyn Fn(),
}

/// The ids with which an object is created first.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum FirstTry {
    /// The file system ids of the caller.
    AsCaller,
    /// The ids of this process.
    AsProcess,
}

const SET_ID_BITS: u32 = libc::S_ISUID | libc::S_ISGID;
/// The bits of a mode without the file type: permissions, set-id bits and sticky bit.
pub(super) const MODE_BITS: u32 = 0o7777;

/// Creates an object so that it belongs to `caller`. If this process is not root, the object belongs to this process
/// instead.
///
/// As root: creates it with the caller's ids, and if that is denied, as root with a change of the owner. If the owner
/// cannot be set, removes the object and returns the error.
pub(super) fn create_for_caller<T>(
    caller: &Caller,
    mode: u32,
    parent_is_setgid: impl Fn() -> Result<bool>,
    first_try: FirstTry,
    steps: &CreationSteps<'_, T>,
) -> Result<(T, Attr)> {
    let (uid, gid) = own_ids();
    // Only root can change owners. Root's own objects need no change.
    if uid != 0 || (caller.uid, caller.gid) == (uid, gid) {
        return (steps.create)(mode);
    }
    if first_try == FirstTry::AsCaller
        && let FirstResult::Created(object, attr) = create_with_ids_of_caller(caller, mode, steps)?
    {
        return Ok((object, attr));
    }
    // Set-id bits are added only after the change of owner, so that at no time a set-id file of root exists.
    let (object, attr) = (steps.create)(mode & !SET_ID_BITS)?;
    let owned = parent_is_setgid().and_then(|takes_group_of_parent| {
        // A group that the parent's setgid bit or the mount option `grpid` has chosen is not changed.
        let has_default_group = !takes_group_of_parent && attr.gid == gid;
        let owner = owner_to_set(caller, mode, &attr, has_default_group);
        (steps.set_owner)(&object, owner)
    });
    let new_attr = owned.inspect_err(|_| (steps.remove)())?;
    Ok((object, new_attr))
}

/// Returns what must be changed in an object that root has made without the set-id bits of `mode`, so that it belongs
/// to `caller`. The group is changed only with `has_default_group`.
fn owner_to_set(caller: &Caller, mode: u32, attr: &Attr, has_default_group: bool) -> NewOwner {
    let set_id_bits = mode & SET_ID_BITS;
    NewOwner {
        uid: caller.uid,
        gid: has_default_group.then_some(caller.gid),
        mode: (set_id_bits != 0).then_some(attr.mode & MODE_BITS | set_id_bits),
    }
}

/// Result of the creation of an object with the caller's ids.
enum FirstResult<T> {
    /// The object exists and belongs to the caller.
    Created(T, Attr),
    /// The caller's ids cannot be set, or are denied access: the object must be created as root.
    NeedsRoot,
}

/// Creates an object with the caller's file system ids. If the setgid bit is lost in this, sets it again; if that
/// fails, removes the object and returns the error.
fn create_with_ids_of_caller<T>(
    caller: &Caller,
    mode: u32,
    steps: &CreationSteps<'_, T>,
) -> Result<FirstResult<T>> {
    let created = {
        let Some(_ids) = AsCaller::new(caller.uid, caller.gid) else {
            return Ok(FirstResult::NeedsRoot);
        };
        (steps.create)(mode)
    };
    let (object, attr) = match created {
        Ok(created) => created,
        // The caller may have the right by a supplementary group, which this thread lacks.
        Err(Errno::ACCESS) => return Ok(FirstResult::NeedsRoot),
        Err(errno) => return Err(errno),
    };
    let wants_setgid = mode & libc::S_ISGID != 0;
    let has_setgid = attr.mode & libc::S_ISGID != 0;
    if !wants_setgid || has_setgid {
        return Ok(FirstResult::Created(object, attr));
    }
    // The kernel removes the setgid bit if the thread is not in the file's group. At the mount the kernel has already
    // checked that for the real caller, with its supplementary groups. So the bit is set again.
    let owner = NewOwner {
        uid: caller.uid,
        gid: None,
        mode: Some(attr.mode & MODE_BITS | libc::S_ISGID),
    };
    let new_attr = (steps.set_owner)(&object, owner).inspect_err(|_| (steps.remove)())?;
    Ok(FirstResult::Created(object, new_attr))
}
