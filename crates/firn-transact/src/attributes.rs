//! Attributes of files and directories as programs see them, with the changes of an open transaction ([`Objects`]).
//!
//! The *backing* is the directory below the mount. The *scope* of a transaction is what it covers.
//!
//! A changed object has its attributes in its *staged copy*: a file or directory in the transaction's own directory,
//! which is made at the first change that needs a copy. A file with a few overwritten bytes has no staged copy; its new
//! times are in memory with these bytes (*inline changes*). While a commit is being applied, attributes come from the
//! tables in memory, which have those of the copy ([`crate::object::Change::frozen_attr`]).

use std::ffi::OsStr;
use std::sync::Arc;

use firn_backing::{Attr, Backing, Errno, Kind, PlacementHint, Result, SetTime, Time};

use crate::claim::ExclusiveValue;
use crate::link_counts::LinkCounts;
use crate::lower_backing::LowerBacking;
use crate::object::{Change, Object, ObjectState, OriginalVersion, StagedCopy};
use crate::scope::Scope;
use crate::shadow::NO_BYTES;
use crate::shadow::save::Originals;
use crate::staging;
use crate::top_overlay::TopOverlay;
use crate::waiting::Admission;

/// A copy of the fields of a [`Change`] that attributes depend on, so that its lock need not be held meanwhile.
struct AttributeSnapshot<B: Backing> {
    /// The attributes that programs see while the commit is being applied.
    frozen_attr: Option<Attr>,
    /// The object that has the changed attributes; `None` before the first change that needs a copy.
    staged_copy: Option<StagedCopy<B>>,
    /// Times after the last inline change; `None` without inline changes.
    inline_times: Option<InlineTimes>,
    /// What the transaction adds to the link count.
    link_delta: i64,
    /// Whether the directory was removed.
    is_removed: bool,
    /// Time of the last change of a name in the directory.
    entries_changed_at: Option<Time>,
    /// Time of the last change of a name of the object itself.
    links_changed_at: Option<Time>,
}

/// Modification time and change time of a file with inline changes.
struct InlineTimes {
    mtime: Time,
    ctime: Time,
}

impl<B: Backing> AttributeSnapshot<B> {
    /// Copies the parts that concern attributes from a change.
    fn from_change(change: &Change<B>) -> Self {
        Self {
            frozen_attr: change.frozen_attr,
            staged_copy: change.staged_copy.clone(),
            inline_times: change.inline.as_ref().map(|inline| InlineTimes {
                mtime: inline.mtime,
                ctime: inline.ctime,
            }),
            link_delta: change.link_delta,
            is_removed: change.is_removed,
            entries_changed_at: change.entries_changed_at,
            links_changed_at: change.links_changed_at,
        }
    }
}

impl<B: Backing> LowerBacking<B> {
    /// Makes a copy `name` of an object in `staging_dir`, a directory of the transaction, with the attributes and the
    /// size of `inode` and without its data. Returns the attributes of `inode`.
    ///
    /// An object of that name, which an earlier attempt left, is replaced.
    pub(crate) fn copy_object(
        &self,
        kind: Kind,
        inode: &B::Inode,
        staging_dir: &B::Inode,
        name: &OsStr,
    ) -> Result<Attr> {
        let attr = self.base.attr(inode)?;
        let copy = match self.make_empty_copy(kind, inode, &attr, staging_dir, name) {
            // An earlier attempt left an object of this name.
            Err(Errno::EXIST) => {
                match self.base.lookup(staging_dir, name)?.1.kind {
                    Kind::Dir => self.base.rmdir(staging_dir, name)?,
                    _ => self.base.unlink(staging_dir, name)?,
                }
                self.make_empty_copy(kind, inode, &attr, staging_dir, name)?
            }
            made => made?,
        };
        staging::copy_attributes(&self.base, inode, &copy)?;
        Ok(attr)
    }

    /// Makes an object `name` in `staging_dir`, a directory of the transaction, of the same kind as `inode`. A regular
    /// file gets the same size and no bytes; a symbolic link gets the same target.
    ///
    /// `kind` and `attr` are those of `inode`. Of `attr` only the kind, the size and the device number are used.
    fn make_empty_copy(
        &self,
        kind: Kind,
        inode: &B::Inode,
        attr: &Attr,
        staging_dir: &B::Inode,
        name: &OsStr,
    ) -> Result<B::Inode> {
        let caller = staging::daemon_caller();
        if kind == Kind::File {
            // The commit copies the written bytes into the file, so the sparse copy is put on the same server.
            let placing = PlacementHint::Beside(inode);
            let (copy, file, _) =
                self.base
                    .create_placed(&caller, staging_dir, name, 0o600, placing)?;
            self.base.set_len(&file, attr.size)?;
            return Ok(copy);
        }
        let link_target = if kind == Kind::Symlink {
            self.base.readlink(inode)?
        } else {
            Vec::new()
        };
        let (mode, rdev) = (attr.mode, attr.rdev);
        match staging::make_non_file(&self.base, staging_dir, name, mode, rdev, &link_target) {
            // A user other than root may not make a device. An empty file can have the same attributes.
            Err(Errno::PERM) if !matches!(kind, Kind::Dir | Kind::Symlink) => {
                Ok(self.base.create(&caller, staging_dir, name, 0o600)?.0)
            }
            made => made,
        }
    }
}

/// Attributes of objects, and the staged copies and inline changes of those that a transaction changed.
pub(crate) struct Objects<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) originals: Arc<Originals<B>>,
    pub(crate) link_counts: Arc<LinkCounts<B>>,
    pub(crate) top_overlay: Arc<TopOverlay<B>>,
    pub(crate) admission: Arc<Admission<B>>,
}

impl<B: Backing> Objects<B> {
    pub(crate) fn new(
        lower: &Arc<LowerBacking<B>>,
        originals: &Arc<Originals<B>>,
        link_counts: &Arc<LinkCounts<B>>,
        top_overlay: &Arc<TopOverlay<B>>,
        admission: &Arc<Admission<B>>,
    ) -> Self {
        Self {
            lower: Arc::clone(lower),
            originals: Arc::clone(originals),
            link_counts: Arc::clone(link_counts),
            top_overlay: Arc::clone(top_overlay),
            admission: Arc::clone(admission),
        }
    }

    /// Returns the attributes of an object as programs see them, with the changes of an open transaction. Fails with
    /// ESTALE if the object was made in a transaction that was aborted.
    ///
    /// A *top* is the uppermost directory of a transaction. Its parent shows it even if the backing does not have it.
    pub(crate) fn read_attr(&self, object: &Object<B>) -> Result<Attr> {
        let claimed = object.state.acquire_shared();
        let change = claimed
            .read()
            .change
            .as_deref()
            .map(AttributeSnapshot::from_change);
        // While a commit is applied to the backing, programs see the attributes that were copied before its first step.
        if let Some(frozen_attr) = change.as_ref().and_then(|change| change.frozen_attr) {
            return Ok(frozen_attr);
        }
        let mut attr = match (claimed.base(), &change) {
            // Unchanged, but with subdirectories that only a transaction has.
            (Some(inode), None) if self.top_overlay.has_tops_in(object) => {
                self.top_overlay.attr_with_tops(object, &inode)?
            }
            // Unchanged.
            (Some(inode), None) => self.link_counts.attr_without_hidden_links(object, &inode)?,
            // Made in a transaction that was aborted.
            (None, None) => return Err(Errno::STALE),
            // Changed or made in an open transaction.
            (inode, Some(change)) => self.read_changed_attr(object, inode.as_ref(), change)?,
        };
        if object.is_gone() {
            attr.nlink = 0;
        }
        Ok(attr)
    }

    /// Returns the attributes of an object that an open transaction has changed, as programs see them.
    ///
    /// `inode` is the object in the backing; `None` if it is new. `change` has the rest. [`Self::read_staged_attr`]
    /// combines the attributes of the two; the changes of names are added here, to the link count and the times.
    fn read_changed_attr(
        &self,
        object: &Object<B>,
        inode: Option<&B::Inode>,
        change: &AttributeSnapshot<B>,
    ) -> Result<Attr> {
        let mut attr = self.read_staged_attr(object, inode, change)?;
        // A link count of 1 means that the file system does not count subdirectories.
        if object.kind != Kind::Dir || attr.nlink > 1 {
            // The two numbers are not read at one instant, so a negative sum is raised to 0.
            attr.nlink = (i64::from(attr.nlink) + change.link_delta).max(0) as u32;
        }
        if change.is_removed {
            attr.nlink = 0;
        }
        if let Some(changed_at) = change.entries_changed_at {
            attr.mtime = attr.mtime.max(changed_at);
            attr.ctime = attr.ctime.max(changed_at);
        }
        if let Some(changed_at) = change.links_changed_at {
            attr.ctime = attr.ctime.max(changed_at);
        }
        Ok(attr)
    }

    /// Returns the attributes of an object that a transaction has changed, as if no names had changed. They come from
    /// the backing's object `inode` and from its staged copy, which has the changed bytes and attributes until the
    /// commit.
    ///
    /// `inode` is `None` if the object is new; all of it is then in the staged copy.
    fn read_staged_attr(
        &self,
        object: &Object<B>,
        inode: Option<&B::Inode>,
        change: &AttributeSnapshot<B>,
    ) -> Result<Attr> {
        let base = &self.lower.base;
        let copy_attr = match &change.staged_copy {
            Some(copy) => Some(base.attr(&copy.inode(base)?)?),
            None => None,
        };
        let Some(inode) = inode else {
            let mut new_attr = copy_attr.ok_or(Errno::STALE)?;
            if object.kind != Kind::Dir {
                // The staged name is not counted as a link.
                new_attr.nlink = 0;
            }
            return Ok(new_attr);
        };
        let base_attr = self.link_counts.attr_without_hidden_links(object, inode)?;
        Ok(match (copy_attr, &change.inline_times) {
            (Some(copy_attr), _) => merge_attr(object.kind, &base_attr, &copy_attr),
            (None, Some(InlineTimes { mtime, ctime })) => Attr {
                mtime: *mtime,
                ctime: *ctime,
                ..base_attr
            },
            (None, None) => base_attr,
        })
    }

    /// Changes the attributes of an object with `change`, in the backing or in its staged copy.
    pub(crate) fn change_attributes(
        &self,
        object: &Arc<Object<B>>,
        change: impl FnOnce(&B::Inode) -> Result<()>,
    ) -> Result<()> {
        self.change_staged_copy(object, change, |change| change.changes_attributes = true)
    }

    /// Changes attributes of an object: calls `set` with the inode that has to change, and returns its result.
    ///
    /// If a transaction keeps its changes of the object back until the commit, that is the staged copy, an object in
    /// the transaction's directory, which is made if there is none. Then `record` is called to note the change in
    /// memory. In any other case it is the object in the backing.
    fn change_staged_copy(
        &self,
        object: &Arc<Object<B>>,
        set: impl FnOnce(&B::Inode) -> Result<()>,
        record: impl FnOnce(&mut Change<B>),
    ) -> Result<()> {
        // Waits while a transaction of the object is prepared or being committed.
        let (_data, scope) = self.admission.enter_data_change(object)?;
        // In shadow mode this saves the old attributes and returns `None`. No bytes of the file change.
        let Some(scope) = self
            .originals
            .save_unless_buffering(scope, object, NO_BYTES)?
        else {
            let claimed = object.state.acquire_shared();
            return set(&claimed.inode(&self.lower.base)?);
        };
        let claimed = object.state.acquire_exclusive();
        // An object without a name is not part of the commit, so it needs no copy.
        if !object.is_nameless() {
            self.stage_copy(&scope, object, &claimed)?;
        }
        set(&claimed.inode(&self.lower.base)?)?;
        if let Some(change) = &mut claimed.edit().change {
            record(change);
        }
        // The check acquires the object's state itself.
        drop(claimed);
        scope.check_changed(object);
        Ok(())
    }

    /// Sets the times of an object: in the backing, or in the object's staged copy if a transaction keeps its changes
    /// back until the commit. If the file has inline changes (a few new bytes in memory), a modification time is set in
    /// memory, too.
    pub(crate) fn set_times_of(
        &self,
        object: &Arc<Object<B>>,
        atime: SetTime,
        mtime: SetTime,
    ) -> Result<()> {
        // Inline changes have no access time.
        let may_be_inline =
            atime == SetTime::Keep && object.state.acquire_shared().read().inline().is_some();
        if may_be_inline && self.set_inline_time(object, mtime)? {
            return Ok(());
        }
        let set_times = |inode: &B::Inode| self.lower.base.set_times(inode, atime, mtime);
        self.change_staged_copy(object, set_times, |change| {
            // The requested time counts, whatever changed in the directory before.
            if mtime != SetTime::Keep {
                change.entries_changed_at = None;
            }
        })
    }

    /// Makes the staged copy of an object if it has none: an object in the transaction's directory, which has the
    /// changed bytes and attributes until the commit. Inline changes, which are in memory, are written to the copy.
    ///
    /// `scope` is the transaction, and `claimed` the exclusive lock of the object's state. Fails with ESTALE if the
    /// object was made in a transaction that was aborted.
    pub(crate) fn stage_copy(
        &self,
        scope: &Scope<B>,
        object: &Arc<Object<B>>,
        claimed: &ExclusiveValue<'_, ObjectState<B>>,
    ) -> Result<()> {
        assert!(scope.shadow.is_none(), "shadow mode makes no staged copies");
        let (number, inline) = {
            let mut state = claimed.edit();
            if state.base.is_none() && state.change.is_none() {
                return Err(Errno::STALE);
            }
            let change = scope.get_or_create_change(object, &mut state);
            if change.staged_copy.is_some() {
                return Ok(());
            }
            (change.number, change.inline.clone())
        };
        // A new object is a staged copy itself.
        let Some(inode) = claimed.base() else {
            return Ok(());
        };
        let (staged_copy, attr) = self.make_staged_copy(scope, object.kind, &inode, number)?;
        if let Some(inline) = &inline {
            self.write_out_inline(inline, &staged_copy)?;
        }
        // `edit` locks the state only for a short time, so the lock was released during the calls of the backing above.
        let mut state = claimed.edit();
        let change = scope.get_or_create_change(object, &mut state);
        // The copy has the inline bytes now, so they become a written range of the copy.
        if let Some(inline) = change.inline.take() {
            Self::subtract_inline_bytes(scope, &inline);
            for (offset, bytes) in inline.overwrites() {
                change.written.insert(offset..offset + bytes.len() as u64);
            }
        }
        change.staged_copy = Some(staged_copy);
        // No old byte is cut off yet.
        change.cut = attr.size;
        change.original = Some(OriginalVersion {
            size: attr.size,
            mtime: attr.mtime,
        });
        Ok(())
    }

    /// Makes the staged copy of an object of the backing, in the directory of the transaction `scope`. The copy has the
    /// attributes and the size of `inode` and no data. Its name is `number`, that of the object's change.
    ///
    /// Returns the copy, and the attributes of the object in the backing.
    fn make_staged_copy(
        &self,
        scope: &Scope<B>,
        kind: Kind,
        inode: &B::Inode,
        number: u64,
    ) -> Result<(StagedCopy<B>, Attr)> {
        let staging_dir = scope.plain_staging_dir(&self.lower.base)?;
        let name = number.to_string();
        let attr = self
            .lower
            .copy_object(kind, inode, &staging_dir.inode, OsStr::new(&name))?;
        Ok((staging_dir.into_copy(name), attr))
    }
}

/// Returns the attributes of an object that a transaction has changed: the identity of the object in the backing, and
/// the other attributes of its staged copy, which has the changes until the commit. Only a copy of a file has the
/// object's size; a file has the blocks of both.
fn merge_attr(kind: Kind, base_attr: &Attr, copy_attr: &Attr) -> Attr {
    let (size, blocks) = if kind == Kind::File {
        (copy_attr.size, base_attr.blocks + copy_attr.blocks)
    } else {
        (base_attr.size, base_attr.blocks)
    };
    Attr {
        mode: (base_attr.mode & libc::S_IFMT) | (copy_attr.mode & !libc::S_IFMT),
        size,
        blocks,
        uid: copy_attr.uid,
        gid: copy_attr.gid,
        atime: copy_attr.atime,
        mtime: copy_attr.mtime,
        ctime: copy_attr.ctime,
        ..*base_attr
    }
}
