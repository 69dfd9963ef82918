//! [`Object`]: a file, directory, link or special file of the tree, as programs see it.
//!
//! Terms
//! * The *base* is the object's inode in the backing, outside of staging.
//! * The *change* is what the open transaction changes in the object.
//! * The *staged copy* of a change is an inode below `.firn/`. For an object without a base, the staged copy is the
//!   object itself, and a commit moves it into place. For other objects it has the new attributes and, of a file, the
//!   size and the written bytes.
//! * A *nameless* object was made in a transaction and has lost its last name. It belongs to no transaction any more.
//!
//! Invariants
//! * An inode that is in use has exactly one [`Object`], even if it has several names.
//! * An object without a base exists only in a transaction. An object without base and change was made in an aborted
//!   one.
//! * A nameless object has a base and no change. It lives as long as a reference to it.
//! * A change has a staged copy or inline bytes ([`InlineChanges`]), never both.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use firn_backing::lock::Mutex;
use firn_backing::{Access, Attr, Backing, Errno, Kind, LaneIndex, Result, Time};

use crate::change_log::StagedPath;
use crate::claim::{Claimed, View};
use crate::conflict::RangeSet;
use crate::inline_changes::InlineChanges;

/// Bit of [`Object::hides`]: the object may have links below `.firn/`. The other bits count the changes of these links.
pub(crate) const HAS_LINKS: u64 = 1;

/// Device number and inode number of an object.
pub(crate) type Key = (u64, u64);

/// The directory that an object was last seen in, and its name there.
pub(crate) type Location<B> = (Arc<Object<B>>, OsString);

/// One object of the tree, as programs see it.
pub struct Object<B: Backing> {
    pub(crate) key: Key,
    pub(crate) kind: Kind,
    /// The lane (I/O server) that had the object's data when the object was looked up or made.
    pub(crate) lane: LaneIndex,
    pub(crate) location: Mutex<Option<Location<B>>>,
    pub(crate) inner: Claimed<Inner<B>>,
    /// Whether the object may have hidden links, and how often they changed; see [`crate::hidden_links`].
    pub(crate) hides: AtomicU64,
    /// Whether the object is nameless. The owner of `inner` sets it, and no thread clears it.
    nameless: AtomicBool,
    /// Number of open handles on the object.
    opens: AtomicUsize,
    files: Mutex<Files<B>>,
}

/// The state of an object that its claim guards.
pub(crate) struct Inner<B: Backing> {
    /// The inode in the backing, outside of staging; `None` for an object that was made in a transaction.
    pub(crate) base: Option<B::Inode>,
    /// What the transaction changes; `None` if nothing.
    pub(crate) change: Option<Box<Change<B>>>,
}

/// What the open transaction changes in an object.
pub(crate) struct Change<B: Backing> {
    /// Number of the change in its transaction.
    pub(crate) number: u64,
    /// Directory and name of the object at its first change, if it had a name in the backing.
    pub(crate) origin: Option<Location<B>>,
    /// The staged copy, if the change has one.
    pub(crate) copy: Option<StagedCopy<B>>,
    /// The few overwritten bytes of a file of the backing that has no staged copy.
    pub(crate) inline: Option<InlineChanges>,
    /// Names of a directory that differ from those in the backing.
    pub(crate) names: BTreeMap<OsString, Named<B>>,
    /// Number of added names minus number of removed names, compared with the backing. For a directory, the change of
    /// its number of subdirectories.
    pub(crate) links: i64,
    /// Whether the directory was removed.
    pub(crate) removed: bool,
    /// Time of the last change of names in the directory.
    pub(crate) names_changed_at: Option<Time>,
    /// Time of the last change of the object's own names.
    pub(crate) own_names_changed_at: Option<Time>,
    /// Number of bytes from the start of the old content that are not cut off. `u64::MAX` if nothing was cut off.
    pub(crate) cut: u64,
    /// Ranges that were written, in bytes.
    pub(crate) written: RangeSet,
    /// Size in bytes and time of the last change of the backing's object, when its staged copy was made.
    pub(crate) before: Option<(u64, Time)>,
    /// Whether owner, mode or extended attributes were changed.
    pub(crate) attributes: bool,
    /// The attributes that programs see while the commit is being applied.
    pub(crate) frozen: Option<Attr>,
}

/// One name of a directory that a transaction has changed.
pub(crate) struct Named<B: Backing> {
    /// The object that has the name. `None` if the name was removed; that is noted only if the backing has the name.
    pub(crate) object: Option<Arc<Object<B>>>,
    /// Whether the directory has this name in the backing.
    pub(crate) hides_old: bool,
    /// Serial number of the transaction that changed the name.
    pub(crate) serial: u64,
}

impl<B: Backing> Change<B> {
    pub(crate) fn new(number: u64, origin: Option<Location<B>>) -> Self {
        Self {
            number,
            origin,
            copy: None,
            inline: None,
            names: BTreeMap::new(),
            links: 0,
            removed: false,
            names_changed_at: None,
            own_names_changed_at: None,
            cut: u64::MAX,
            written: RangeSet::default(),
            before: None,
            attributes: false,
            frozen: None,
        }
    }
}

impl<B: Backing> Change<B> {
    /// Returns a copy of the change without its names.
    pub(crate) fn clone_without_names(&self) -> Self {
        Self {
            number: self.number,
            origin: self.origin.clone(),
            copy: self.copy.clone(),
            inline: self.inline.clone(),
            names: BTreeMap::new(),
            links: self.links,
            removed: self.removed,
            names_changed_at: self.names_changed_at,
            own_names_changed_at: self.own_names_changed_at,
            cut: self.cut,
            written: self.written.clone(),
            before: self.before,
            attributes: self.attributes,
            frozen: self.frozen,
        }
    }
}

/// A staged object, known by its name. It is looked up for each use, because there may be more staged objects than a
/// process may have descriptors.
pub(crate) struct StagedCopy<B: Backing> {
    /// The directory below `.firn/` that has the object.
    pub(crate) staging_dir: B::Inode,
    /// Path of the object below `new/`.
    pub(crate) at: StagedPath,
    /// The inode itself, kept because the staged name is about to be removed or is removed.
    pub(crate) kept_inode: Option<B::Inode>,
    /// Directory and name that the commit being applied moves the object to.
    pub(crate) final_name: Option<(B::Inode, OsString)>,
}

impl<B: Backing> Clone for StagedCopy<B> {
    fn clone(&self) -> Self {
        Self {
            staging_dir: self.staging_dir.clone(),
            at: self.at.clone(),
            kept_inode: self.kept_inode.clone(),
            final_name: self.final_name.clone(),
        }
    }
}

impl<B: Backing> StagedCopy<B> {
    /// Returns the staged inode: the kept handle, or what the staged name or the name after the commit leads to.
    pub(crate) fn inode(&self, base: &B) -> Result<B::Inode> {
        if let Some(inode) = &self.kept_inode {
            return Ok(inode.clone());
        }
        match (
            base.lookup(&self.staging_dir, OsStr::new(&self.at.name)),
            &self.final_name,
        ) {
            // The commit has moved the object with one rename since the first look-up.
            (Err(Errno::NOENT), Some((dir, name))) => Ok(base.lookup(dir, name)?.0),
            (found, _) => Ok(found?.0),
        }
    }
}

/// Files of the backing that are open for this object. All handles on the object share them.
struct Files<B: Backing> {
    reader: Option<Arc<B::File>>,
    writer: Option<Arc<B::File>>,
    copy: Option<Arc<B::File>>,
}

impl<B: Backing> Files<B> {
    const NONE: Self = Self {
        reader: None,
        writer: None,
        copy: None,
    };

    /// Returns the selected file, or `None` in its place if it is not open.
    fn slot(&mut self, which: LowerFile) -> &mut Option<Arc<B::File>> {
        match which {
            LowerFile::Reader => &mut self.reader,
            LowerFile::Writer => &mut self.writer,
            LowerFile::StagedCopy => &mut self.copy,
        }
    }
}

/// Selects one of an object's open files in the backing.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum LowerFile {
    /// The backing's file, open for reading.
    Reader,
    /// The backing's file, open for reading and writing.
    Writer,
    /// The staged copy, open for reading and writing.
    StagedCopy,
}

impl<B: Backing> Object<B> {
    pub(crate) fn new(
        key: Key,
        kind: Kind,
        inner: Inner<B>,
        location: Option<Location<B>>,
    ) -> Self {
        Self {
            key,
            kind,
            lane: LaneIndex::FIRST,
            location: Mutex::new(location),
            inner: Claimed::new(inner),
            hides: AtomicU64::new(0),
            nameless: AtomicBool::new(false),
            opens: AtomicUsize::new(0),
            files: Mutex::new(Files::NONE),
        }
    }

    /// Returns the object with its lane set to `lane`.
    pub(crate) fn in_lane(self, lane: LaneIndex) -> Self {
        Self { lane, ..self }
    }

    pub(crate) fn parent(&self) -> Option<Arc<Self>> {
        self.location
            .lock()
            .as_ref()
            .map(|(parent, _)| Arc::clone(parent))
    }

    pub(crate) fn move_to(&self, parent: &Arc<Self>, name: &OsStr) {
        *self.location.lock() = Some((Arc::clone(parent), name.to_owned()));
    }

    /// Returns whether this object is `other` or is below it.
    pub(crate) fn is_below(self: &Arc<Self>, other: &Arc<Self>) -> bool {
        let mut current = Some(Arc::clone(self));
        while let Some(object) = current {
            if Arc::ptr_eq(&object, other) {
                return true;
            }
            current = object.parent();
        }
        false
    }

    pub(crate) fn is_nameless(&self) -> bool {
        self.nameless.load(Ordering::Acquire)
    }

    /// Returns whether one of the object's links may be Firn's own, below `.firn/`.
    pub(crate) fn may_hide_links(&self) -> bool {
        self.hides.load(Ordering::Acquire) & HAS_LINKS != 0
    }

    /// Returns whether the object is nameless, or is a removed directory that shadow mode keeps in `kept/`.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_nameless()
            || self.kind == Kind::Dir && self.may_hide_links() && self.parent().is_some()
    }

    /// Makes an object of a transaction nameless after the loss of its last name. `inode` becomes its base.
    pub(crate) fn become_nameless(&self, inner: &mut Inner<B>, inode: B::Inode) {
        inner.change = None;
        inner.base = Some(inode);
        self.nameless.store(true, Ordering::Release);
        // Open handles continue with the staged copy, which is now the file itself.
        let mut files = self.files.lock();
        if let Some(copy) = files.copy.take() {
            (files.reader, files.writer) = (Some(Arc::clone(&copy)), Some(copy));
        }
    }

    pub(crate) fn count_open(&self) {
        self.opens.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn is_open(&self) -> bool {
        self.opens.load(Ordering::Acquire) > 0
    }

    pub(crate) fn count_close(&self) {
        if self.opens.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.close_lower_files();
        }
    }

    /// Closes the object's open files in the backing. The next use opens them again.
    pub(crate) fn close_lower_files(&self) {
        let closed = std::mem::replace(&mut *self.files.lock(), Files::NONE);
        drop(closed);
    }

    /// Returns the selected file of the backing, and opens it if need be.
    ///
    /// The caller shares or owns `inner`, so that the object does not get another base or staged copy meanwhile.
    pub(crate) fn lower_file(
        &self,
        base: &B,
        inner: &View<'_, Inner<B>>,
        which: LowerFile,
    ) -> Result<Arc<B::File>> {
        let open_file = self.files.lock().slot(which).clone();
        if let Some(file) = open_file {
            return Ok(file);
        }
        let (inode, access) = match which {
            LowerFile::Reader => (inner.base().ok_or(Errno::STALE)?, Access::Read),
            LowerFile::Writer => (inner.base().ok_or(Errno::STALE)?, Access::ReadWrite),
            LowerFile::StagedCopy => {
                let copy = inner.staged_copy().ok_or(Errno::STALE)?;
                (copy.inode(base)?, Access::ReadWrite)
            }
        };
        let opened = Arc::new(base.open(&inode, access)?);
        // Race: another thread may have opened the file since the check. Its handle is then used, and this one is
        // closed.
        let mut files = self.files.lock();
        let slot = files.slot(which);
        Ok(Arc::clone(slot.get_or_insert_with(|| Arc::clone(&opened))))
    }

    /// Returns the object's inode in the backing, outside of staging; `None` if it has none.
    pub(crate) fn base(&self) -> Option<B::Inode> {
        self.inner.share().base()
    }

    /// Returns the inode that has the object's attributes; see [`View::inode`].
    pub(crate) fn inode(&self, base: &B) -> Result<B::Inode> {
        self.inner.share().inode(base)
    }
}

impl<B: Backing> Inner<B> {
    pub(crate) fn staged_copy(&self) -> Option<&StagedCopy<B>> {
        self.change.as_ref()?.copy.as_ref()
    }

    pub(crate) fn inline(&self) -> Option<&InlineChanges> {
        self.change.as_ref()?.inline.as_ref()
    }

    /// Selects the file of the backing that a write in a transaction goes to: the staged copy, or the file itself if
    /// the object became nameless since.
    pub(crate) fn target(&self) -> LowerFile {
        if self.staged_copy().is_some() {
            LowerFile::StagedCopy
        } else {
            LowerFile::Writer
        }
    }
}

impl<B: Backing> View<'_, Inner<B>> {
    pub(crate) fn base(&self) -> Option<B::Inode> {
        self.read().base.clone()
    }

    pub(crate) fn staged_copy(&self) -> Option<StagedCopy<B>> {
        self.read().staged_copy().cloned()
    }

    /// Returns the inode that has the attributes that programs see: the staged copy if there is one, otherwise the
    /// base.
    pub(crate) fn inode(&self, base: &B) -> Result<B::Inode> {
        match self.staged_copy() {
            Some(copy) => copy.inode(base),
            None => self.base().ok_or(Errno::STALE),
        }
    }
}
