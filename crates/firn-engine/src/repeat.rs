//! Repeated changes of names, which the kernel sends again because firnd died before it answered.
//!
//! Promise: a change takes effect once, and its caller gets the answer of a request that is not repeated. The live
//! table in the arena records when the change began, and the object to which the name then led. A comparison with the
//! object to which the name leads now shows whether the change was made. Other changes of the names through the mount
//! wait meanwhile, because the kernel holds the lock of the directory.
//!
//! | change | was made if |
//! |---|---|
//! | mkdir, mknod, symlink, create | the name leads to an object of that kind that was made since the change began, with the same target |
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
use firn_format::live::{Moment, ObjectIdentity, Request};

use crate::live::{identity_of, is_same_object, moment};
use crate::names::{DirName, Inode};
use crate::namespace::Namespace;
use crate::{Entry, InodeId, Result};

/// An object that a request may have made already.
#[derive(Clone, Copy, Debug)]
pub struct MadeObject<'a> {
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
    pub began: Moment,
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
        let found = self.open_files.with_descriptor(|| {
            let dir = self.tree.object(dir)?;
            self.base.backing.lookup(&dir, name)
        });
        found.ok().map(|(_, attr)| attr)
    }

    /// Whether a name leads to this object now.
    fn leads_to_object(&self, dir: &Arc<Inode<B>>, name: &OsStr, object: &ObjectIdentity) -> bool {
        let found = self.look_up_in_backing(dir, name);
        found.is_some_and(|attr| is_same_object(&identity_of(&attr), object))
    }

    /// Returns the object that a request made, and counts one lookup of it. `None`: the request had not made the
    /// object.
    pub fn find_made(&self, made: MadeObject<'_>, by: Creation<'_>) -> Option<Entry> {
        let entry = self.lookup(made.parent, made.name).ok()?;
        if self.is_made_by(&entry, made, by) {
            self.finish_owner(&entry, by);
            return Some(entry);
        }
        self.forget(entry.inode, 1);
        None
    }

    fn is_made_by(&self, entry: &Entry, made: MadeObject<'_>, by: Creation<'_>) -> bool {
        let born = moment(entry.attr.btime.unwrap_or(entry.attr.ctime));
        if entry.attr.kind != made.kind || born < by.began {
            return false;
        }
        made.target.is_none_or(|target| {
            self.readlink(entry.inode)
                .is_ok_and(|found| found == target.as_encoded_bytes())
        })
    }

    /// Sets owner and mode of an object, because the earlier firnd may have died after it made the object and before it
    /// set these.
    fn finish_owner(&self, entry: &Entry, by: Creation<'_>) {
        let is_root = rustix::process::geteuid().is_root();
        if !is_root || by.caller.uid == u32::MAX || entry.attr.uid == by.caller.uid {
            return;
        }
        let Ok(object) = self.tree.object_of(entry.inode) else {
            return;
        };
        let backing = &self.base.backing;
        let owner = backing.set_owner(&object, Some(by.caller.uid), Some(by.caller.gid));
        let mode = by.mode & 0o7777;
        let done = owner.and_then(|()| match entry.attr.kind {
            Kind::Symlink => Ok(()),
            _ => backing.set_mode(&object, mode),
        });
        if let Err(errno) = done {
            tracing::warn!(%errno, "cannot set the owner of a new object, which belongs to firnd's user now");
        }
    }

    /// Repeats link(2). A name that already leads to the inode counts as success.
    pub fn link_again(&self, inode: InodeId, parent: InodeId, name: &OsStr) -> Result<Entry> {
        match self.link(inode, parent, name) {
            Err(Errno::EXIST) => {
                let entry = self.lookup(parent, name)?;
                if entry.inode == inode {
                    return Ok(entry);
                }
                self.forget(entry.inode, 1);
                Err(Errno::EXIST)
            }
            linked => linked,
        }
    }

    /// Repeats unlink(2) or rmdir(2). If the name no longer leads to the object, only the tables are updated.
    pub fn remove_again(
        &self,
        parent: InodeId,
        name: &OsStr,
        kind: Kind,
        before: Request,
    ) -> Result<()> {
        let removed = before.subject;
        let dir = self.tree.inode(parent)?;
        match removed {
            Some(object) if !self.leads_to_object(&dir, name, &object) => {
                self.record_earlier_removal(&dir, name);
                Ok(())
            }
            _ if kind == Kind::Dir => self.rmdir(parent, name),
            _ => self.unlink(parent, name),
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

    /// Repeats renameat2(2). If the rename was made, only the tables are updated.
    pub fn rename_again(
        &self,
        (parent, name): (InodeId, &OsStr),
        (new_parent, new_name): (InodeId, &OsStr),
        flags: RenameFlags,
        Request { subject, other, .. }: Request,
    ) -> Result<()> {
        let dir = self.tree.inode(parent)?;
        let new_dir = self.tree.inode(new_parent)?;
        let exchange = flags.contains(RenameFlags::EXCHANGE);
        let was_made = subject.is_some_and(|subject| {
            let is_one_file = other.is_some_and(|other| is_same_object(&subject, &other));
            let has_left = match other.filter(|_| exchange) {
                Some(other) => self.leads_to_object(&dir, name, &other),
                None => !self.leads_to_object(&dir, name, &subject),
            };
            !is_one_file && has_left && self.leads_to_object(&new_dir, new_name, &subject)
        });
        if !was_made {
            return self.rename(parent, name, new_parent, new_name, flags);
        }
        let from = DirName { dir: &dir, name };
        let to = DirName {
            dir: &new_dir,
            name: new_name,
        };
        self.record_earlier_rename(from, to, exchange);
        Ok(())
    }

    /// Updates the tables after an earlier firnd renamed. The tables may have the inode under either name.
    fn record_earlier_rename(&self, from: DirName<'_, B>, to: DirName<'_, B>, exchange: bool) {
        let names = &self.tree.names;
        let moved = names.child(from.dir.id, from.name);
        let target = names.child(to.dir.id, to.name);
        // Recovery has already found the inode under the new name.
        let is_noted = moved.is_none() || self.is_at(&target, to);
        if is_noted && !exchange {
            names.record_unlink(from.dir.id, from.name);
            return;
        }
        names.record_rename(from, to, exchange);
        let file = target
            .filter(|_| !exchange)
            .and_then(|inode| self.open_files.known_file(&inode));
        if let Some(file) = file {
            self.record_removed_name(&file);
        }
    }

    /// Whether a name leads to this inode in the backing.
    fn is_at(&self, inode: &Option<Arc<Inode<B>>>, at: DirName<'_, B>) -> bool {
        inode
            .as_ref()
            .is_some_and(|inode| self.leads_to_object(at.dir, at.name, &inode.identity()))
    }

    /// Whether an attribute has this value, for a repeated setxattr(2) with XATTR_CREATE.
    pub fn has_value(&self, inode: InodeId, name: &OsStr, value: &[u8]) -> bool {
        self.get_xattr(inode, name)
            .is_ok_and(|found| found == value)
    }
}
