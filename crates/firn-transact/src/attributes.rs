//! [`Objects`]: attributes of objects, with the changes of a transaction.
//!
//! A changed object has its attributes in its staged copy, which is made at the first change that needs a copy. A file
//! with a few overwritten bytes has no staged copy; its new times are in memory with these bytes. While a commit is
//! being applied, attributes come from the tables, which have those of the copy ([`crate::object::Change::frozen`]).

use std::ffi::OsStr;
use std::sync::Arc;

use firn_backing::{Attr, Backing, Errno, Kind, Placing, Result, SetTime, Time};

use crate::change_log::StagedPath;
use crate::claim::Owning;
use crate::hidden::OwnLinks;
use crate::inline_changes::InlineChanges;
use crate::lower_backing::LowerBacking;
use crate::object::{Change, Inner, Object, StagedCopy};
use crate::scope::Scope;
use crate::shadow::NO_BYTES;
use crate::shadow::save::Originals;
use crate::staging;
use crate::top_names::Tops;
use crate::waiting::Admission;

/// The parts of a change that concern attributes.
struct ChangedAttributes<B: Backing> {
    frozen: Option<Attr>,
    copy: Option<StagedCopy<B>>,
    /// Modification time and change time after the last inline change.
    inline_times: Option<(Time, Time)>,
    links: i64,
    removed: bool,
    names_changed_at: Option<Time>,
    own_names_changed_at: Option<Time>,
}

impl<B: Backing> ChangedAttributes<B> {
    /// Copies the parts that concern attributes from a change.
    fn of(change: &Change<B>) -> Self {
        let times = |inline: &InlineChanges| (inline.mtime, inline.ctime);
        Self {
            frozen: change.frozen,
            copy: change.copy.clone(),
            inline_times: change.inline.as_ref().map(times),
            links: change.links,
            removed: change.removed,
            names_changed_at: change.names_changed_at,
            own_names_changed_at: change.own_names_changed_at,
        }
    }
}

impl<B: Backing> LowerBacking<B> {
    /// Makes a staged object `name` in `staging_dir`, with the attributes and the size of `inode` and without its data.
    /// Returns the attributes of `inode`.
    ///
    /// An object of that name, which an earlier attempt left, is replaced.
    pub(crate) fn copy_object(
        &self,
        kind: Kind,
        inode: &B::Inode,
        staging_dir: &B::Inode,
        name: &OsStr,
    ) -> Result<Attr> {
        let owner = staging::own();
        let attr = self.base.attr(inode)?;
        let make_file = || {
            // The commit copies the written bytes into the file, so the sparse copy is put on the same server.
            let beside = Placing::Beside(inode);
            let made = self
                .base
                .create_placed(&owner, staging_dir, name, 0o600, beside);
            let (copy, file, _) = made?;
            self.base.set_len(&file, attr.size)?;
            Ok(copy)
        };
        let make = || {
            let target = match kind {
                Kind::File => return make_file(),
                Kind::Symlink => self.base.readlink(inode)?,
                _ => Vec::new(),
            };
            let (mode, rdev) = (attr.mode, attr.rdev);
            match staging::make_special(&self.base, staging_dir, name, mode, rdev, &target) {
                // A user other than root may not make a device. A plain file can have the same attributes.
                Err(Errno::PERM) if !matches!(kind, Kind::Dir | Kind::Symlink) => {
                    Ok(self.base.create(&owner, staging_dir, name, 0o600)?.0)
                }
                made => made,
            }
        };
        let copy = match make() {
            // An earlier attempt left an object of this name.
            Err(Errno::EXIST) => {
                match self.base.lookup(staging_dir, name)?.1.kind {
                    Kind::Dir => self.base.rmdir(staging_dir, name)?,
                    _ => self.base.unlink(staging_dir, name)?,
                }
                make()?
            }
            made => made?,
        };
        staging::copy_attributes(&self.base, inode, &copy)?;
        Ok(attr)
    }
}

/// Attributes of objects, and the staged copies and inline changes of those that a transaction changed.
pub(crate) struct Objects<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) originals: Arc<Originals<B>>,
    pub(crate) own_links: Arc<OwnLinks<B>>,
    pub(crate) tops: Arc<Tops<B>>,
    pub(crate) admission: Arc<Admission<B>>,
}

impl<B: Backing> Objects<B> {
    pub(crate) fn new(
        lower: &Arc<LowerBacking<B>>,
        originals: &Arc<Originals<B>>,
        own_links: &Arc<OwnLinks<B>>,
        tops: &Arc<Tops<B>>,
        admission: &Arc<Admission<B>>,
    ) -> Self {
        Self {
            lower: Arc::clone(lower),
            originals: Arc::clone(originals),
            own_links: Arc::clone(own_links),
            tops: Arc::clone(tops),
            admission: Arc::clone(admission),
        }
    }

    /// Returns the attributes of an object as programs see them.
    pub(crate) fn read_attr(&self, object: &Object<B>) -> Result<Attr> {
        let inner = object.inner.share();
        let change = inner.read().change.as_deref().map(ChangedAttributes::of);
        if let Some(attr) = change.as_ref().and_then(|change| change.frozen) {
            return Ok(attr);
        }
        let mut attr = match inner.base() {
            Some(inode) if change.is_none() && self.tops.has_tops_in(object) => {
                self.tops.attr_with_tops(object, &inode)?
            }
            inode => self.read_attr_of(object, inode.as_ref(), change.as_ref())?,
        };
        if object.is_gone() {
            attr.nlink = 0;
        }
        Ok(attr)
    }

    /// Returns the attributes of an object that no transaction has frozen.
    ///
    /// `inode` is the object in the backing, `None` if it is new. `change` is its change in the open transaction. A
    /// changed file has the identity of `inode`, the blocks of both, and all other attributes of the staged copy.
    fn read_attr_of(
        &self,
        object: &Object<B>,
        inode: Option<&B::Inode>,
        change: Option<&ChangedAttributes<B>>,
    ) -> Result<Attr> {
        let base = &self.lower.base;
        let Some(change) = change else {
            return self
                .own_links
                .attr_without_own_links(object, inode.ok_or(Errno::STALE)?);
        };
        let copy = change
            .copy
            .as_ref()
            .map(|copy| base.attr(&copy.inode(base)?))
            .transpose()?;
        let mut attr = match (inode, copy) {
            (None, None) => return Err(Errno::STALE),
            (None, Some(copy)) if object.kind == Kind::Dir => copy,
            // The staged name is not counted as a link.
            (None, Some(copy)) => Attr { nlink: 0, ..copy },
            (Some(inode), None) => {
                let below = self.own_links.attr_without_own_links(object, inode)?;
                match change.inline_times {
                    Some((mtime, ctime)) => Attr {
                        mtime,
                        ctime,
                        ..below
                    },
                    None => below,
                }
            }
            (Some(inode), Some(copy)) => {
                let below = self.own_links.attr_without_own_links(object, inode)?;
                let is_file = object.kind == Kind::File;
                Attr {
                    mode: (below.mode & libc::S_IFMT) | (copy.mode & !libc::S_IFMT),
                    size: if is_file { copy.size } else { below.size },
                    blocks: if is_file {
                        below.blocks + copy.blocks
                    } else {
                        below.blocks
                    },
                    uid: copy.uid,
                    gid: copy.gid,
                    atime: copy.atime,
                    mtime: copy.mtime,
                    ctime: copy.ctime,
                    ..below
                }
            }
        };
        // A link count of 1 means that the file system does not count subdirectories.
        if object.kind != Kind::Dir || attr.nlink > 1 {
            attr.nlink = (i64::from(attr.nlink) + change.links).max(0) as u32;
        }
        if change.removed {
            attr.nlink = 0;
        }
        if let Some(changed_at) = change.names_changed_at {
            (attr.mtime, attr.ctime) = (attr.mtime.max(changed_at), attr.ctime.max(changed_at));
        }
        attr.ctime = attr
            .ctime
            .max(change.own_names_changed_at.unwrap_or(attr.ctime));
        Ok(attr)
    }

    /// Changes the attributes of an object with `change`, in the backing or in its staged copy.
    pub(crate) fn change_attributes(
        &self,
        object: &Arc<Object<B>>,
        change: impl FnOnce(&B::Inode) -> Result<()>,
    ) -> Result<()> {
        self.change_staged_copy(object, change, |change| change.attributes = true)
    }

    /// Calls `change` for the staged copy of an object, and `record_kind` for the object's change in the transaction.
    /// The copy is made first if there is none. Without a transaction in buffer mode, `change` is called for the object
    /// in the backing.
    fn change_staged_copy(
        &self,
        object: &Arc<Object<B>>,
        change: impl FnOnce(&B::Inode) -> Result<()>,
        record_kind: impl FnOnce(&mut Change<B>),
    ) -> Result<()> {
        let (_data, scope) = self.admission.enter_data_change(object)?;
        let Some(scope) = self.originals.buffering_scope(scope, object, NO_BYTES)? else {
            let inner = object.inner.share();
            return change(&inner.inode(&self.lower.base)?);
        };
        let inner = object.inner.own();
        if !object.is_nameless() {
            self.stage_copy(&scope, object, &inner)?;
        }
        change(&inner.inode(&self.lower.base)?)?;
        inner.edit().change.as_deref_mut().map(record_kind);
        drop(inner);
        scope.check_changed(object);
        Ok(())
    }

    /// Sets the times of an object, in memory if the object has inline changes and only its modification time is set.
    pub(crate) fn set_times_of(
        &self,
        object: &Arc<Object<B>>,
        atime: SetTime,
        mtime: SetTime,
    ) -> Result<()> {
        let is_inline = atime == SetTime::Keep && object.inner.share().read().inline().is_some();
        if is_inline && self.set_inline_time(object, mtime)? {
            return Ok(());
        }
        let set = |inode: &B::Inode| self.lower.base.set_times(inode, atime, mtime);
        self.change_staged_copy(object, set, |change| {
            // The requested time counts, whatever changed in the directory before.
            if mtime != SetTime::Keep {
                change.names_changed_at = None;
            }
        })
    }

    /// Makes the staged copy of an object if it has none.
    pub(crate) fn stage_copy(
        &self,
        scope: &Scope<B>,
        object: &Arc<Object<B>>,
        inner: &Owning<'_, Inner<B>>,
    ) -> Result<()> {
        assert!(scope.shadow.is_none(), "shadow mode makes no staged copies");
        let (number, inline) = {
            let mut inner = inner.edit();
            if inner.base.is_none() && inner.change.is_none() {
                return Err(Errno::STALE);
            }
            let change = scope.change(object, &mut inner);
            if change.copy.is_some() {
                return Ok(());
            }
            (change.number, change.inline.clone())
        };
        let Some(inode) = inner.base() else {
            return Ok(());
        };
        let (copy, attr) = self.make_staged_copy(scope, object.kind, &inode, number)?;
        if let Some(inline) = &inline {
            self.write_out_inline(inline, &copy)?;
        }
        let mut inner = inner.edit();
        let change = scope.change(object, &mut inner);
        if let Some(inline) = change.inline.take() {
            Self::forget_inline(scope, &inline);
            for (offset, bytes) in inline.overwrites() {
                change.written.insert(offset..offset + bytes.len() as u64);
            }
        }
        (change.copy, change.cut, change.before) =
            (Some(copy), attr.size, Some((attr.size, attr.mtime)));
        Ok(())
    }

    /// Makes the staged copy of an object of the backing, named by the number of the change. Returns the copy, and the
    /// attributes of the object in the backing.
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
        let copy = StagedCopy {
            staging_dir: staging_dir.inode,
            at: StagedPath {
                dir: staging_dir.name,
                name,
            },
            kept_inode: None,
            final_name: None,
        };
        Ok((copy, attr))
    }
}
