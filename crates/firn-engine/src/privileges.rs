//! Privileges of files: set-id bits and capabilities. A change of a file removes them, as on a local file system.
//!
//! | change | set-user-id | set-group-id | capabilities |
//! |---|---|---|---|
//! | contents | cleared (1) | cleared (1, 2) | removed |
//! | owner or group | cleared | cleared (3) | removed (4) |
//! | access ACL | kept | cleared (5) | kept |
//!
//! 1. Kept if the process has CAP_FSETID. A change of contents is a write, truncation, fallocate(2) or copy.
//! 2. Without group execute, also kept for members of the group.
//! 3. Without group execute, kept for members of the old group, and for a process with CAP_FSETID.
//! 4. The backing's chown(2) removes them.
//! 5. Kept for members of the group, and for a process with CAP_FSETID.
//!
//! These are the rules of `setattr_should_drop_suidgid`, `setattr_should_drop_sgid`, `file_remove_privs` and
//! `posix_acl_update_mode` of Linux. A store to a mapping removes nothing in Linux, and removes nothing here.
//!
//! Promises
//! * Before any byte of the change is visible, lost privileges are removed in the backing and from the kernel's cache.
//!   So new contents are never executed with old privileges.
//! * If a file gets privileges, the drain of older writes does not remove them.
//! * For a file that is known to have no privileges, a write costs one comparison. This is known from the file's
//!   creation or first write on, until any file of the mount gets privileges ([`Privileges::begin_epoch`]).
//!
//! The kernel applies a part of these rules itself, to the mode that it has cached. It does not do so for a direct
//! write, for `O_TRUNC`, and for set-group-id without group execute. So the engine applies all rules.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use firn_backing::Attr;
use firn_backing::lock::RwLock;

use crate::InodeId;

pub(crate) const SET_USER_ID: u32 = 0o4000;
pub(crate) const SET_GROUP_ID: u32 = 0o2000;
pub(crate) const GROUP_EXECUTE: u32 = 0o010;
pub(crate) const SET_ID_BITS: u32 = SET_USER_ID | SET_GROUP_ID;
/// The bits of `st_mode` that chmod(2) can set.
pub(crate) const MODE_BITS: u32 = 0o7777;

/// The process that changes a file: its properties decide which privileges the file keeps.
pub trait Principal {
    /// Returns whether the process has CAP_FSETID, for the cases in which the kernel checks it.
    fn has_cap_fsetid(&self) -> bool;
    /// Returns whether the group is the process's own, or one of its supplementary groups.
    fn is_in_group(&self, gid: u32) -> bool;
    /// Returns whether the process was killed or has stopped waiting. If so, work that has not begun is skipped.
    fn has_left(&self) -> bool {
        false
    }
}

/// An unknown process, which keeps no privilege.
pub(crate) struct AnyPrincipal;

impl Principal for AnyPrincipal {
    fn has_cap_fsetid(&self) -> bool {
        false
    }

    fn is_in_group(&self, _: u32) -> bool {
        false
    }
}

/// Callback with an inode whose attributes the kernel must drop.
pub(crate) type AttributesChanged = Arc<dyn Fn(InodeId) + Send + Sync>;

/// What the engine has recorded about the privileges of all files.
pub(crate) struct Privileges {
    /// Number of times that any file may have got privileges, counted from 1. A file with the epoch 0 is one whose
    /// privileges are not known.
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
    /// Returns the present epoch. A file that was seen without privileges in this epoch still has none.
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Sets the callback for attributes that the kernel must drop.
    pub(crate) fn set_observer(&self, observer: AttributesChanged) {
        *self.attributes_changed.write() = Some(observer);
    }

    pub(crate) fn report_attributes_changed(&self, inode_id: InodeId) {
        let observer = self.attributes_changed.read().clone();
        if let Some(observe) = observer {
            observe(inode_id);
        }
    }

    /// Begins a new epoch, so that all files are checked again at their next write. Called after a file got privileges,
    /// and before the call that set them is answered.
    pub(crate) fn begin_epoch(&self) {
        self.epoch.fetch_add(1, Ordering::AcqRel);
    }
}

/// Returns the mode after the process `principal` changed the contents.
pub(crate) fn mode_after_content_change(attr: &Attr, principal: &dyn Principal) -> u32 {
    let mode = attr.mode & MODE_BITS;
    if mode & SET_ID_BITS == 0 || principal.has_cap_fsetid() {
        return mode;
    }
    let keeps_set_group_id =
        mode & GROUP_EXECUTE == 0 && mode & SET_GROUP_ID != 0 && principal.is_in_group(attr.gid);
    if keeps_set_group_id {
        mode & !SET_USER_ID
    } else {
        mode & !SET_ID_BITS
    }
}

/// Returns whether the process `principal` may leave set-group-id on an object of this group, if no other rule clears
/// the bit.
pub(crate) fn can_keep_set_group_id(gid: u32, principal: &dyn Principal) -> bool {
    principal.is_in_group(gid) || principal.has_cap_fsetid()
}

pub(crate) fn has_set_id_bits(attr: &Attr) -> bool {
    attr.mode & SET_ID_BITS != 0
}
