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
//! * What goes is gone from the backing, and the kernel was told, before a byte of the change can be seen: nobody
//!   executes new contents with old privileges, whatever the kernel may keep.
//! * Privileges that are given to a file are not taken away by the drain of what was written before.
//! * A file that is known to have none costs one comparison a write. It is known from its creation, or from the
//!   first write, until something gives privileges to any file of the mount ([`Privileges::note_given`]).
//!
//! The kernel does some of this by itself, from the mode that it has cached, and never for a direct write, for
//! `O_TRUNC`, and for set-group-id without group execute. So all of it is done here.

use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use firn_backing::lock::RwLock;
use firn_backing::{Attr, Backing, Errno, Kind};

use crate::engine::Engine;
use crate::file::File;
use crate::names::Inode;
use crate::{InodeId, Result};

const SET_USER_ID: u32 = 0o4000;
const SET_GROUP_ID: u32 = 0o2000;
const GROUP_EXECUTE: u32 = 0o010;
const SET_ID_BITS: u32 = SET_USER_ID | SET_GROUP_ID;
const CAPABILITIES: &str = "security.capability";
const ACCESS_ACL: &str = "system.posix_acl_access";

/// The process that changes a file, as far as it matters for what the file may keep.
pub trait Principal {
    /// It has CAP_FSETID where the kernel asks for it.
    fn has_cap_fsetid(&self) -> bool;
    /// The group is its own, or one of its supplementary groups.
    fn is_in_group(&self, gid: u32) -> bool;
}

/// Somebody of whom nothing is known, for whom nothing stays.
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

/// What the engine knows of privileges of all files.
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

    /// Whoever knows that a file has no privileges has to look again. To be called once they are given, before the call
    /// that gave them is answered.
    pub(crate) fn note_given(&self) {
        self.epoch.fetch_add(1, Ordering::AcqRel);
    }
}

/// The mode after `by` changed the contents.
fn after_contents(attr: &Attr, by: &dyn Principal) -> u32 {
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
fn keeps_group(gid: u32, by: &dyn Principal) -> bool {
    by.is_in_group(gid) || by.has_cap_fsetid()
}

pub(crate) fn has_set_id_bits(attr: &Attr) -> bool {
    attr.mode & SET_ID_BITS != 0
}

impl<B: Backing> Engine<B> {
    /// Calls `f` when an object lost privileges by a change of something else: the kernel is to drop the attributes
    /// that it has of it before `f` returns.
    pub fn on_attributes_changed(&self, f: Arc<dyn Fn(InodeId) + Send + Sync>) {
        *self.privileges.attributes_changed.write() = Some(f);
    }

    fn tell_attributes_changed(&self, inode: &Inode<B>) {
        let call = self.privileges.attributes_changed.read().clone();
        if let Some(call) = call {
            call(inode.id);
        }
    }

    /// Objects may have got set-id bits or capabilities in the backing without a request to the engine.
    pub fn note_privileges_given(&self) {
        self.privileges.note_given();
    }

    /// Before privileges are given to a file: what was written before must not take them away when it is drained.
    fn drain_before_giving(&self, inode: &Inode<B>) -> Result<()> {
        let Some(file) = self.known_file(inode) else {
            return Ok(());
        };
        let is_pending = file.lock().pending.bytes() > 0;
        if is_pending {
            self.drain_and_wait(&file)
        } else {
            Ok(())
        }
    }

    /// Nobody writes the object directly from here on, either: who got the grant meanwhile took it for plain.
    fn privileges_given_to(&self, inode: &Inode<B>) {
        self.privileges.note_given();
        if let Some(file) = self.known_file(inode) {
            self.end_grant(&file);
        }
    }

    /// Before `by` changes the contents of a regular file by anything but a write, which does this itself.
    pub fn drop_privileges(&self, inode: InodeId, by: &dyn Principal) -> Result<()> {
        let inode = self.inode(inode)?;
        if inode.kind != Kind::File {
            return Ok(());
        }
        let file = self.file_with(&inode, |_| {});
        let dropped = self.drop_privileges_of(&file, by);
        self.drop_if_unused(&file);
        dropped
    }

    /// The same for one whose file is at hand.
    pub(crate) fn drop_privileges_of(&self, file: &Arc<File<B>>, by: &dyn Principal) -> Result<()> {
        let epoch = self.privileges.epoch();
        if file.lock().plain_in == epoch {
            return Ok(());
        }
        if self.strip(file, by)? {
            file.lock().plain_in = epoch;
        }
        Ok(())
    }

    /// Set-id bits that were given to a file beside the mount count from when the mount shows them.
    pub(crate) fn see_privileges(&self, file: &File<B>, attr: &Attr) {
        if has_set_id_bits(attr) {
            file.lock().plain_in = 0;
        }
    }

    /// Whether a change of the contents by `by` takes something away.
    pub(crate) fn would_strip(&self, file: &File<B>, by: &dyn Principal) -> Result<bool> {
        let attr = self.with_descriptor(|| self.backing.attr(&self.object(&file.inode)?))?;
        let loses_bits = after_contents(&attr, by) != attr.mode & 0o7777;
        Ok(loses_bits || self.has_capabilities(&self.object(&file.inode)?))
    }

    /// Takes away what `by` may not leave when it changes the contents. Returns whether nothing is left.
    fn strip(&self, file: &Arc<File<B>>, by: &dyn Principal) -> Result<bool> {
        let inode = &*file.inode;
        let attr = self.with_descriptor(|| self.backing.attr(&self.object(inode)?))?;
        let mode = attr.mode & 0o7777;
        let kept = after_contents(&attr, by);
        let object = self.object(inode)?;
        let is_capable = self.has_capabilities(&object);
        if kept == mode && !is_capable {
            return Ok(mode & SET_ID_BITS == 0);
        }
        let stripped = match self.strip_object(&object, is_capable, (kept != mode).then_some(kept))
        {
            // A firnd without rights may not. For it the kernel takes away all of them when it changes the contents,
            // also where nothing becomes different.
            Err(Errno::PERM) => self.with_exclusive_file(file, |target| {
                let len = self.backing.attr_of_file(target)?.size;
                self.backing.set_len(target, len)
            }),
            done => done,
        };
        self.tell_attributes_changed(inode);
        stripped.map(|()| kept & SET_ID_BITS == 0)
    }

    fn strip_object(&self, object: &B::Inode, is_capable: bool, mode: Option<u32>) -> Result<()> {
        let of_capabilities = || match is_capable
            .then(|| self.backing.remove_xattr(object, OsStr::new(CAPABILITIES)))
        {
            // Another change was quicker.
            None | Some(Err(Errno::NODATA)) => Ok(()),
            Some(removed) => removed,
        };
        let of_mode = || mode.map_or(Ok(()), |mode| self.backing.set_mode(object, mode));
        of_capabilities().and_then(|()| of_mode())
    }

    /// As the kernel asks it: whatever else the backing says means that there are none.
    pub(crate) fn has_capabilities(&self, object: &B::Inode) -> bool {
        self.backing
            .get_xattr(object, OsStr::new(CAPABILITIES))
            .is_ok_and(|value| !value.is_empty())
    }

    /// Changes owner and group, and with them the mode, as chown(2) of `by` does.
    pub(crate) fn set_owner(
        &self,
        inode: &Inode<B>,
        (uid, gid): (Option<u32>, Option<u32>),
        by: Option<&dyn Principal>,
    ) -> Result<()> {
        let object = self.object(inode)?;
        let Some(by) = by.filter(|_| inode.kind != Kind::Dir) else {
            return self.backing.set_owner(&object, uid, gid);
        };
        let before = self.backing.attr(&object)?;
        self.backing.set_owner(&object, uid, gid)?;
        if !has_set_id_bits(&before) {
            return Ok(());
        }
        let stays = before.mode & GROUP_EXECUTE == 0 && keeps_group(before.gid, by);
        let lost = if stays { SET_USER_ID } else { SET_ID_BITS };
        // The kernel of the backing knows firnd only, and may have left more.
        let mode = self.backing.attr(&object)?.mode & 0o7777;
        if mode & lost != 0 {
            self.backing.set_mode(&object, mode & !lost)
        } else {
            Ok(())
        }
    }

    /// Changes the mode along with what takes privileges away: it gives none back. Only the kernel does so, which
    /// knows less of them.
    pub(crate) fn set_mode_besides(&self, inode: &Inode<B>, mode: u32) -> Result<()> {
        let object = self.object(inode)?;
        let now = self.backing.attr(&object)?.mode & 0o7777;
        let mode = mode & (now | !SET_ID_BITS);
        if mode != now {
            self.backing.set_mode(&object, mode)
        } else {
            Ok(())
        }
    }

    /// Changes the mode. The kernel asks for it in the name of a process that does something else, too, and then
    /// leaves set-group-id where group execute is missing, whatever group the process is in.
    pub(crate) fn set_mode(
        &self,
        inode: &Inode<B>,
        mode: u32,
        by: Option<&dyn Principal>,
    ) -> Result<()> {
        let object = self.object(inode)?;
        let is_unusual =
            inode.kind == Kind::File && mode & (SET_GROUP_ID | GROUP_EXECUTE) == SET_GROUP_ID;
        let lost = match by.filter(|_| is_unusual) {
            Some(by) if !keeps_group(self.backing.attr(&object)?.gid, by) => SET_GROUP_ID,
            _ => 0,
        };
        let gives = inode.kind == Kind::File && mode & SET_ID_BITS != 0;
        if gives {
            self.drain_before_giving(inode)?;
        }
        let done = self.backing.set_mode(&object, mode & !lost);
        if gives {
            self.privileges_given_to(inode);
        }
        done
    }

    /// Sets an extended attribute, as setxattr(2) of `by` does.
    pub(crate) fn set_xattr_of(
        &self,
        inode: &Inode<B>,
        (name, value, flags): (&OsStr, &[u8], i32),
        by: Option<&dyn Principal>,
    ) -> Result<()> {
        let object = self.object(inode)?;
        let gives = name == CAPABILITIES;
        if gives {
            self.drain_before_giving(inode)?;
        }
        let done = self.backing.set_xattr(&object, name, value, flags);
        if gives {
            self.privileges_given_to(inode);
        }
        done?;
        let Some(by) = by.filter(|_| name == ACCESS_ACL) else {
            return Ok(());
        };
        let attr = self.backing.attr(&object)?;
        if attr.mode & SET_GROUP_ID != 0 && !keeps_group(attr.gid, by) {
            self.backing
                .set_mode(&object, attr.mode & 0o7777 & !SET_GROUP_ID)?;
            self.tell_attributes_changed(inode);
        }
        Ok(())
    }
}
