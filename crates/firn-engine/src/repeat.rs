//! Repeated requests: changes of names that the kernel sends again, because firnd (the process that serves the mount)
//! died before it answered them.
//!
//! Promise: a change takes effect once, and its caller gets the answer of a request that is not repeated. The live
//! table, a mapped file that outlives firnd, records when the change began, and the object to which the name then led.
//! A comparison with the object to which the name leads now shows whether the change was made. Other changes of the
//! names through the mount wait meanwhile, because the kernel holds the lock of the directory.
//!
//! | change | was made if |
//! |---|---|
//! | mkdir, mknod, symlink, create | the name leads to an object of that kind and target, made since then |
//! | link | the name leads to the linked object |
//! | unlink, rmdir | the name led to an object and does not lead to it any more |
//! | rename | the old name does not lead to the object, and the new one does |
//! | exchange | each name leads to the former object of the other name |
//!
//! Relies on: the backing stamps new objects with this host's clock. With another clock, a repeated request may get
//! EEXIST for the object that it made itself. It may also accept an object that another host made under the same name
//! meanwhile.

use std::ffi::OsStr;
use std::sync::Arc;

use firn_backing::{Attr, Backing, Caller, Errno, Kind, RenameFlags};
use firn_format::live::{FileTime, ObjectIdentity, Request};

use crate::live::{identity_of, is_same_object, moment};
use crate::names::{DirName, Inode};
use crate::namespace::Namespace;
use crate::privileges::MODE_BITS;
use crate::{Entry, InodeId, Result};

/// User number of a caller that is not known.
const UNKNOWN_UID: u32 = u32::MAX;

/// An object that a request may have made already.
#[derive(Clone, Copy, Debug)]
pub struct CreatedObject<'a> {
    /// The directory.
    pub parent: InodeId,
    /// The name in it.
    pub name: &'a OsStr,
    /// Its kind.
    pub kind: Kind,
    /// Target of a symbolic link.
    pub target: Option<&'a OsStr>,
}

/// The request that may have made the object.
#[derive(Clone, Copy, Debug)]
pub struct Creation<'a> {
    /// Process that requested the object.
    pub caller: &'a Caller,
    /// Permission bits in the request.
    pub mode: u32,
    /// Time at which the request began.
    pub began: FileTime,
}

impl<B: Backing> Namespace<B> {
    /// Returns the identity of the object to which a name leads, for the record of a request. `None`: the name does not
    /// exist.
    pub fn identify_name(&self, parent: InodeId, name: &OsStr) -> Option<ObjectIdentity> {
        if let Some(child) = self.tree.names.child(parent, name) {
            return Some(child.identity());
        }
        let dir = self.tree.inode(parent).ok()?;
        self.look_up_in_backing(&dir, name)
            .map(|attr| identity_of(&attr))
    }

    /// Looks a name up in the backing, without adding it to the tables.
    fn look_up_in_backing(&self, dir: &Arc<Inode<B>>, name: &OsStr) -> Option<Attr> {
        let result = self.open_files.with_descriptor(|| {
            let dir_object = self.tree.object(dir)?;
            self.base.backing.lookup(&dir_object, name)
        });
        let (_, attr) = result.ok()?;
        Some(attr)
    }

    /// Returns whether a name leads to this object now.
    fn leads_to_object(&self, dir: &Arc<Inode<B>>, name: &OsStr, object: &ObjectIdentity) -> bool {
        let attr = self.look_up_in_backing(dir, name);
        attr.is_some_and(|attr| is_same_object(&identity_of(&attr), object))
    }

    /// Returns the object that a request made, and counts one lookup of it. `None`: the request had not made the
    /// object.
    pub fn find_created_object(
        &self,
        wanted: CreatedObject<'_>,
        creation: Creation<'_>,
    ) -> Option<Entry> {
        let entry = self.lookup(wanted.parent, wanted.name).ok()?;
        if self.is_from_request(&entry, wanted, creation) {
            self.finish_owner_and_mode(&entry, creation);
            return Some(entry);
        }
        // The kernel does not get this object, so the lookup does not count.
        self.forget(entry.inode, 1);
        None
    }

    /// Returns whether an object has the kind and target of the requested one, and was made since the request began.
    /// Then it counts as made for this request by an earlier firnd, which died before it answered.
    fn is_from_request(
        &self,
        entry: &Entry,
        wanted: CreatedObject<'_>,
        creation: Creation<'_>,
    ) -> bool {
        let creation_time = moment(entry.attr.btime.unwrap_or(entry.attr.ctime));
        if entry.attr.kind != wanted.kind || creation_time < creation.began {
            return false;
        }
        let Some(requested_target) = wanted.target else {
            return true;
        };
        let target = self.readlink(entry.inode);
        target.is_ok_and(|target| target == requested_target.as_encoded_bytes())
    }

    /// Sets owner and mode of an object that an earlier firnd made, because it may have died before it set them. An
    /// error is only logged.
    fn finish_owner_and_mode(&self, entry: &Entry, creation: Creation<'_>) {
        let caller = creation.caller;
        // Only root can set the owner of an object. Any other firnd makes all objects for its own user.
        let is_root = rustix::process::geteuid().is_root();
        let is_caller_known = caller.uid != UNKNOWN_UID;
        let has_owner = entry.attr.uid == caller.uid;
        if !is_root || !is_caller_known || has_owner {
            return;
        }
        let Ok(object) = self.tree.object_of(entry.inode) else {
            return;
        };
        let backing = &self.base.backing;
        let mut result = backing.set_owner(&object, Some(caller.uid), Some(caller.gid));
        // A symbolic link has no mode of its own.
        if result.is_ok() && entry.attr.kind != Kind::Symlink {
            result = backing.set_mode(&object, creation.mode & MODE_BITS);
        }
        if let Err(errno) = result {
            tracing::warn!(%errno, "cannot set the owner of a new object, which belongs to firnd's user now");
        }
    }

    /// Repeats link(2). A name that already leads to the inode counts as success.
    pub fn repeat_link(&self, inode_id: InodeId, parent: InodeId, name: &OsStr) -> Result<Entry> {
        match self.link(inode_id, parent, name) {
            Err(Errno::EXIST) => {
                let entry = self.lookup(parent, name)?;
                if entry.inode == inode_id {
                    return Ok(entry);
                }
                self.forget(entry.inode, 1);
                Err(Errno::EXIST)
            }
            linked => linked,
        }
    }

    /// Repeats unlink(2) or rmdir(2), because an earlier firnd (the process that serves the mount) died before it
    /// answered. If the name no longer leads to the object, the removal was made, and only the tables are updated.
    pub fn repeat_remove(
        &self,
        parent: InodeId,
        name: &OsStr,
        kind: Kind,
        request: Request,
    ) -> Result<()> {
        let dir = self.tree.inode(parent)?;
        if let Some(removed_object) = request.subject
            && !self.leads_to_object(&dir, name, &removed_object)
        {
            self.record_earlier_removal(&dir, name);
            return Ok(());
        }
        if kind == Kind::Dir {
            self.rmdir(parent, name)
        } else {
            self.unlink(parent, name)
        }
    }

    /// Updates the tables after an earlier firnd removed a name.
    fn record_earlier_removal(&self, dir: &Arc<Inode<B>>, name: &OsStr) {
        let child = self.tree.names.child(dir.id, name);
        self.tree.names.record_unlink(dir.id, name);
        let file = child.and_then(|child| self.open_files.known_file(&child));
        if let Some(file) = file {
            self.record_removed_name(&file);
        }
    }

    /// Repeats renameat2(2), because an earlier firnd (the process that serves the mount) died before it answered. If
    /// the rename was made, only the tables are updated.
    pub fn repeat_rename(
        &self,
        (parent, name): (InodeId, &OsStr),
        (new_parent, new_name): (InodeId, &OsStr),
        flags: RenameFlags,
        request: Request,
    ) -> Result<()> {
        let dir = self.tree.inode(parent)?;
        let new_dir = self.tree.inode(new_parent)?;
        let is_exchange = flags.contains(RenameFlags::EXCHANGE);
        let from = DirName { dir: &dir, name };
        let to = DirName {
            dir: &new_dir,
            name: new_name,
        };
        if !self.was_rename_made(from, to, is_exchange, &request) {
            return self.rename(parent, name, new_parent, new_name, flags);
        }
        self.record_earlier_rename(from, to, is_exchange);
        Ok(())
    }

    /// Returns whether an earlier firnd (the process that served the mount) made the rename of this request before it
    /// died. Compares the objects to which the names lead now with those to which they led when the request began.
    fn was_rename_made(
        &self,
        from: DirName<'_, B>,
        to: DirName<'_, B>,
        is_exchange: bool,
        request: &Request,
    ) -> bool {
        let Some(moved_object) = request.subject else {
            return false;
        };
        let target_object = request.other;
        let is_old_name_as_after_rename = match target_object {
            // After an exchange, the old name leads to the object that the new name had.
            Some(target) if is_exchange => self.leads_to_object(from.dir, from.name, &target),
            // After any other rename, the old name does not lead to the moved object.
            _ => !self.leads_to_object(from.dir, from.name, &moved_object),
        };
        // A rename between two names of one object changes nothing, so it may be repeated.
        let is_one_object =
            target_object.is_some_and(|target| is_same_object(&moved_object, &target));
        !is_one_object
            && is_old_name_as_after_rename
            && self.leads_to_object(to.dir, to.name, &moved_object)
    }

    /// Updates the tables of names after a rename in the backing that an earlier firnd made. The tables may still have
    /// the moved inode under its old name, or already under the new one, because recovery has found it there.
    fn record_earlier_rename(&self, from: DirName<'_, B>, to: DirName<'_, B>, is_exchange: bool) {
        let names = &self.tree.names;
        let moved = names.child(from.dir.id, from.name);
        let target = names.child(to.dir.id, to.name);
        // The inode that the tables have under the new name is the moved one if that name leads to it in the backing.
        // Otherwise it is the replaced one.
        let is_under_new_name = moved.is_none()
            || target
                .as_ref()
                .is_some_and(|target| self.leads_to_object(to.dir, to.name, &target.identity()));
        if is_under_new_name && !is_exchange {
            // Only the old name is left to be removed.
            names.record_unlink(from.dir.id, from.name);
            return;
        }
        names.record_rename(from, to, is_exchange);
        if is_exchange {
            return;
        }
        let replaced_file = target.and_then(|target| self.open_files.known_file(&target));
        if let Some(file) = replaced_file {
            self.record_removed_name(&file);
        }
    }

    /// Returns whether an attribute has this value, for a repeated setxattr(2) with XATTR_CREATE.
    pub fn has_value(&self, inode_id: InodeId, name: &OsStr, value: &[u8]) -> bool {
        let present_value = self.get_xattr(inode_id, name);
        present_value.is_ok_and(|present_value| present_value == value)
    }
}
