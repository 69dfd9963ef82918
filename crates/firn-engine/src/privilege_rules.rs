//! Privileges of single files (set-id bits and capabilities): removes them before contents or owners change, and sets
//! them on request.
//!
//! The rules are in [`crate::privileges`].

use std::ffi::OsStr;
use std::sync::Arc;

use firn_backing::{Attr, Backing, Errno, Kind, Resize};

use crate::base::Base;
use crate::drainer::Drainer;
use crate::exclusive::Exclusive;
use crate::file::File;
use crate::intake::Intake;
use crate::names::Inode;
use crate::open_files::OpenFiles;
use crate::privileges::{
    GROUP_EXECUTE, MODE_BITS, Principal, Privileges, SET_GROUP_ID, SET_ID_BITS, SET_USER_ID,
    can_keep_set_group_id, has_set_id_bits, mode_after_content_change,
};
use crate::tree::{CAPABILITIES, NameTree};
use crate::{InodeId, Result};

const ACCESS_ACL: &str = "system.posix_acl_access";

/// Removes the privileges of files before contents or owners change, and sets them on request.
pub struct PrivilegeRules<B: Backing> {
    /// Data that all parts share: the backing, the arena, options and counters.
    pub(crate) base: Arc<Base<B>>,
    /// Inodes and their names.
    pub(crate) tree: Arc<NameTree<B>>,
    /// Knows whether files may have set-id bits or capabilities.
    pub(crate) privileges: Arc<Privileges>,
    /// Accepts bytes that client processes write to the arena (shared memory) themselves.
    pub(crate) intake: Arc<Intake<B>>,
    /// Open files and handles.
    pub(crate) open_files: Arc<OpenFiles<B>>,
    /// Writes pending bytes to the backing.
    pub(crate) drainer: Arc<Drainer<B>>,
    /// Changes files while no drain writes to them.
    pub(crate) exclusive: Arc<Exclusive<B>>,
}

impl<B: Backing> PrivilegeRules<B> {
    pub(crate) fn new(exclusive: &Arc<Exclusive<B>>, privileges: &Arc<Privileges>) -> Self {
        Self {
            base: Arc::clone(&exclusive.base),
            tree: Arc::clone(&exclusive.intake.tree),
            privileges: Arc::clone(privileges),
            intake: Arc::clone(&exclusive.intake),
            open_files: Arc::clone(&exclusive.open_files),
            drainer: Arc::clone(&exclusive.drainer),
            exclusive: Arc::clone(exclusive),
        }
    }

    /// Sets the callback that makes the kernel drop its cached attributes of an object, for example after the object
    /// lost privileges. The callback must return only after the kernel has dropped them.
    pub fn on_attributes_changed(&self, observer: Arc<dyn Fn(InodeId) + Send + Sync>) {
        self.privileges.set_observer(observer);
    }

    /// Records that any object may have got set-id bits or capabilities in the backing without a request to the engine.
    pub fn record_privileges_given(&self) {
        self.privileges.begin_epoch();
    }

    /// Drains a file before it gets privileges. Otherwise a later drain of older writes would remove them again.
    fn drain_before_giving(&self, inode: &Inode<B>) -> Result<()> {
        let Some(file) = self.open_files.known_file(inode) else {
            return Ok(());
        };
        let has_pending_bytes = file.lock().pending.bytes() > 0;
        if !has_pending_bytes {
            return Ok(());
        }
        self.drainer.drain_and_wait(&file)
    }

    /// Records that an object got privileges, and ends direct writes to it: a client may have got the grant meanwhile,
    /// for a file without privileges.
    fn record_privileges_given_to(&self, inode: &Inode<B>) {
        self.privileges.begin_epoch();
        if let Some(file) = self.open_files.known_file(inode) {
            self.intake.end_grant(&file);
        }
    }

    /// Removes the privileges that a regular file loses. Called before the process `principal` changes its contents by
    /// anything but a write, because a write removes them itself.
    pub fn drop_privileges(&self, inode_id: InodeId, principal: &dyn Principal) -> Result<()> {
        let inode = self.tree.inode(inode_id)?;
        if inode.kind != Kind::File {
            return Ok(());
        }
        let file = self.open_files.acquire_file(&inode);
        let dropped = self.drop_privileges_of(&file, principal);
        self.open_files.drop_if_unused(&file);
        dropped
    }

    /// Does the work of [`PrivilegeRules::drop_privileges`] for a file whose state the caller already has.
    pub(crate) fn drop_privileges_of(
        &self,
        file: &Arc<File<B>>,
        principal: &dyn Principal,
    ) -> Result<()> {
        let epoch = self.privileges.epoch();
        if file.lock().unprivileged_epoch == epoch {
            return Ok(());
        }
        let has_set_id_bits_left = self.strip_privileges(file, principal)?;
        if !has_set_id_bits_left {
            file.lock().unprivileged_epoch = epoch;
        }
        Ok(())
    }

    /// If `attr` has set-id bits, makes the next write check the file: a program that does not use the mount may have
    /// set them.
    pub(crate) fn record_privileges_in_backing(&self, file: &File<B>, attr: &Attr) {
        if has_set_id_bits(attr) {
            file.lock().unprivileged_epoch = 0;
        }
    }

    /// Returns whether the file loses a privilege if the process `principal` changes its contents.
    pub(crate) fn would_lose_privileges(
        &self,
        file: &File<B>,
        principal: &dyn Principal,
    ) -> Result<bool> {
        let attr = self
            .open_files
            .with_descriptor(|| self.base.backing.attr(&self.tree.object(&file.inode)?))?;
        let loses_bits = mode_after_content_change(&attr, principal) != attr.mode & MODE_BITS;
        Ok(loses_bits || self.tree.has_capabilities(&self.tree.object(&file.inode)?))
    }

    /// Removes the privileges (set-id bits and capabilities) that a file loses if the process `principal` changes its
    /// contents. Returns whether the file still has a set-id bit, which this process may keep.
    fn strip_privileges(&self, file: &Arc<File<B>>, principal: &dyn Principal) -> Result<bool> {
        let inode = &*file.inode;
        let attr = self
            .open_files
            .with_descriptor(|| self.base.backing.attr(&self.tree.object(inode)?))?;
        let old_mode = attr.mode & MODE_BITS;
        let new_mode = mode_after_content_change(&attr, principal);
        let object = self.tree.object(inode)?;
        let has_capabilities = self.tree.has_capabilities(&object);
        if new_mode == old_mode && !has_capabilities {
            return Ok(old_mode & SET_ID_BITS != 0);
        }
        let remove_privileges = || {
            if has_capabilities {
                self.remove_capabilities(&object)?;
            }
            if new_mode != old_mode {
                self.base.backing.set_mode(&object, new_mode)?;
            }
            Ok(())
        };
        let mut result = remove_privileges();
        if result == Err(Errno::PERM) {
            // A firnd that is not root may not change mode and attributes of another user's file. But it may write to
            // the file, and then the kernel removes the privileges, even if the bytes remain the same.
            result = self.exclusive.with_exclusive_file(file, |backing_file| {
                self.base.backing.resize(backing_file, Resize::Unchanged)?;
                Ok(())
            });
        }
        // Also after an error, because a part of the privileges may be removed.
        self.privileges.report_attributes_changed(inode.id);
        result?;
        Ok(new_mode & SET_ID_BITS != 0)
    }

    /// Removes the capabilities of an object.
    fn remove_capabilities(&self, object: &B::Inode) -> Result<()> {
        let name = OsStr::new(CAPABILITIES);
        match self.base.backing.remove_xattr(object, name) {
            // Another change has already removed the capabilities.
            Err(Errno::NODATA) => Ok(()),
            result => result,
        }
    }

    /// Changes owner and group of an object in the backing, and clears the set-id bits that a chown(2) by the process
    /// `principal` clears. Without `principal`, clears no bit here.
    pub(crate) fn set_owner(
        &self,
        inode: &Inode<B>,
        uid: Option<u32>,
        gid: Option<u32>,
        principal: Option<&dyn Principal>,
    ) -> Result<()> {
        let object = self.tree.object(inode)?;
        let principal = match principal {
            Some(principal) if inode.kind != Kind::Dir => principal,
            // chown(2) keeps these bits on a directory.
            _ => return self.base.backing.set_owner(&object, uid, gid),
        };
        let old_attr = self.base.backing.attr(&object)?;
        self.base.backing.set_owner(&object, uid, gid)?;
        if !has_set_id_bits(&old_attr) {
            return Ok(());
        }
        let keeps_set_group_id =
            old_attr.mode & GROUP_EXECUTE == 0 && can_keep_set_group_id(old_attr.gid, principal);
        let bits_to_clear = if keeps_set_group_id {
            SET_USER_ID
        } else {
            SET_ID_BITS
        };
        // For the backing the caller is firnd and not `principal`, so it may not have cleared the bits.
        let mode = self.base.backing.attr(&object)?.mode & MODE_BITS;
        if mode & bits_to_clear == 0 {
            return Ok(());
        }
        self.base.backing.set_mode(&object, mode & !bits_to_clear)
    }

    /// Sets the mode as a part of a change that removes privileges. Sets no set-id bit that is gone: `mode` comes from
    /// the kernel, which may still have the bits in its cache.
    pub(crate) fn set_mode_without_new_privileges(
        &self,
        inode: &Inode<B>,
        mode: u32,
    ) -> Result<()> {
        let object = self.tree.object(inode)?;
        let present_mode = self.base.backing.attr(&object)?.mode & MODE_BITS;
        let new_mode = mode & (present_mode | !SET_ID_BITS);
        if new_mode == present_mode {
            return Ok(());
        }
        self.base.backing.set_mode(&object, new_mode)
    }

    /// Sets the mode, as chmod(2) by the process `principal` does. A set-group-id bit without group execute is cleared
    /// if the process may not keep it.
    ///
    /// The kernel also requests a mode here for other changes than chmod(2). Such a mode may have the bit although the
    /// process may not keep it.
    pub(crate) fn set_mode(
        &self,
        inode: &Inode<B>,
        mode: u32,
        principal: Option<&dyn Principal>,
    ) -> Result<()> {
        let object = self.tree.object(inode)?;
        let may_lose_set_group_id =
            inode.kind == Kind::File && mode & (SET_GROUP_ID | GROUP_EXECUTE) == SET_GROUP_ID;
        let mut new_mode = mode;
        if may_lose_set_group_id
            && let Some(principal) = principal
            && !can_keep_set_group_id(self.base.backing.attr(&object)?.gid, principal)
        {
            new_mode &= !SET_GROUP_ID;
        }
        let gives_privileges = inode.kind == Kind::File && mode & SET_ID_BITS != 0;
        if gives_privileges {
            self.drain_before_giving(inode)?;
        }
        let result = self.base.backing.set_mode(&object, new_mode);
        if gives_privileges {
            // Also after an error, after which it is not certain that the mode is the old one.
            self.record_privileges_given_to(inode);
        }
        result
    }

    /// Sets an extended attribute, as setxattr(2) by the process `principal` does. A new access ACL may clear the
    /// set-group-id bit.
    pub(crate) fn set_xattr(
        &self,
        inode: &Inode<B>,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        principal: Option<&dyn Principal>,
    ) -> Result<()> {
        let object = self.tree.object(inode)?;
        let gives_privileges = name == CAPABILITIES;
        if gives_privileges {
            self.drain_before_giving(inode)?;
        }
        let result = self.base.backing.set_xattr(&object, name, value, flags);
        if gives_privileges {
            self.record_privileges_given_to(inode);
        }
        result?;
        let principal = match principal {
            Some(principal) if name == ACCESS_ACL => principal,
            _ => return Ok(()),
        };
        let attr = self.base.backing.attr(&object)?;
        if attr.mode & SET_GROUP_ID != 0 && !can_keep_set_group_id(attr.gid, principal) {
            self.base
                .backing
                .set_mode(&object, attr.mode & MODE_BITS & !SET_GROUP_ID)?;
            self.privileges.report_attributes_changed(inode.id);
        }
        Ok(())
    }
}
