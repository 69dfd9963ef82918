//! Set-id bits and the capabilities of a file, which it loses when it is changed, as on a local file system.
//!
//! | change | set-user-id | set-group-id | `security.capability` |
//! |---|---|---|---|
//! | contents: write, truncation, fallocate, copy | goes, but for CAP_FSETID | goes, but for CAP_FSETID; without group execute it stays for members of the group too | goes |
//! | owner or group | goes | goes; without group execute it stays for members of the old group and for CAP_FSETID | goes (the backing's chown sees to it) |
//! | access ACL | stays | stays for members of the group and for CAP_FSETID only | stays |
//!
//! That is `setattr_should_drop_suidgid`, `setattr_should_drop_sgid`, `file_remove_privs` and `posix_acl_update_mode` of
//! Linux. A store to a mapping takes nothing away there, and so not here.
//!
//! Promises
//! * Privileges that go are gone from the backing, and the kernel was told, before a byte of the change can be seen. So
//!   new contents are never executed with old privileges, whatever the kernel may keep.
//! * Privileges that are given to a file are not taken away by the drain of what was written before.
//! * A file that is known to have none costs one comparison a write. It is known from its creation, or from the
//!   first write, until something gives privileges to any file of the mount ([`Privileges::note_given`]).
//!
//! The kernel does some of this by itself, from the mode that it has cached, and never for a direct write, for
//! `O_TRUNC`, and for set-group-id without group execute. So all of it is done here.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use firn_backing::Attr;
use firn_backing::lock::RwLock;

use crate::InodeId;

pub(crate) const SET_USER_ID: u32 = 0o4000;
pub(crate) const SET_GROUP_ID: u32 = 0o2000;
pub(crate) const GROUP_EXECUTE: u32 = 0o010;
pub(crate) const SET_ID_BITS: u32 = SET_USER_ID | SET_GROUP_ID;

/// The process that changes a file, as far as it matters for what the file may keep.
pub trait Principal {
    /// It has CAP_FSETID where the kernel asks for it.
    fn has_cap_fsetid(&self) -> bool;
    /// The group is its own, or one of its supplementary groups.
    fn is_in_group(&self, gid: u32) -> bool;
    /// The caller was killed, or stopped waiting for another reason: work that was not begun is not done.
    fn has_left(&self) -> bool {
        false
    }
}

/// An unknown caller, for which nothing stays.
pub(crate) struct Anybody;

impl Principal for Anybody {
    fn has_cap_fsetid(&self) -> bool {
        false
    }
    fn is_in_group(&self, _: u32) -> bool {
        false
    }
}

/// Told the inode of which the kernel has attributes that are no longer so.
pub(crate) type AttributesChanged = Arc<dyn Fn(InodeId) + Send + Sync>;

/// The engine's knowledge of the privileges of all files.
pub(crate) struct Privileges {
    /// How often some file may have got set-id bits or capabilities; never 0, which no file knows of.
    epoch: AtomicU32,
    attributes_changed: RwLock<Option<AttributesChanged>>,
}

impl Default for Privileges {
    fn default() -> Self {
        Self {
            epoch: AtomicU32::new(1),
            attributes_changed: RwLock::new(None),
        }
    }
}

impl Privileges {
    /// The state of the mount in which a file that has no privileges is known to have none.
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Whom to tell of attributes that are no longer so.
    pub(crate) fn set_observer(&self, observer: AttributesChanged) {
        *self.attributes_changed.write() = Some(observer);
    }

    pub(crate) fn tell_attributes_changed(&self, inode: InodeId) {
        let call = self.attributes_changed.read().clone();
        if let Some(call) = call {
            call(inode);
        }
    }

    /// Makes every earlier look that found no privileges void. To be called once privileges are given, before the call
    /// that gave them is answered.
    pub(crate) fn note_given(&self) {
        self.epoch.fetch_add(1, Ordering::AcqRel);
    }
}

/// The mode after `by` changed the contents.
pub(crate) fn after_contents(attr: &Attr, by: &dyn Principal) -> u32 {
    let mode = attr.mode & 0o7777;
    if mode & SET_ID_BITS == 0 || by.has_cap_fsetid() {
        return mode;
    }
    let keeps_group =
        mode & GROUP_EXECUTE == 0 && mode & SET_GROUP_ID != 0 && by.is_in_group(attr.gid);
    if keeps_group {
        mode & !SET_USER_ID
    } else {
        mode & !SET_ID_BITS
    }
}

/// Whether `by` may leave set-group-id on an object of this group, where nothing else takes it away.
pub(crate) fn keeps_group(gid: u32, by: &dyn Principal) -> bool {
    by.is_in_group(gid) || by.has_cap_fsetid()
}

pub(crate) fn has_set_id_bits(attr: &Attr) -> bool {
    attr.mode & SET_ID_BITS != 0
}
