//! [`Object`]: a file, directory, link or special file of the mount, as programs see it.
//!
//! Terms
//! * The *backing* is the directory that the mount serves. Below its `.firn/` are the files of open transactions.
//! * The *base* is the object's inode in the backing, outside of `.firn/`.
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
use crate::claim::{Claimed, ClaimedView};
use crate::conflict::RangeSet;
use crate::inline_changes::InlineChanges;

/// Bit of [`Object::hidden_links_version`]: the object may have links below `.firn/`. The other bits count the changes
/// of these links.
pub(crate) const MAY_HAVE_HIDDEN_LINKS: u64 = 1;

/// Identity of an object: its inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ObjectKey {
    /// Device number.
    pub(crate) dev: u64,
    /// Inode number.
    pub(crate) ino: u64,
}

impl ObjectKey {
    pub(crate) fn from_attr(attr: &Attr) -> Self {
        Self {
            dev: attr.dev,
            ino: attr.ino,
        }
    }
}

/// The directory that an object was last seen in, and its name there.
pub(crate) type Location<B> = (Arc<Object<B>>, OsString);

/// One object of the tree, as programs see it.
pub struct Object<B: Backing> {
    pub(crate) key: ObjectKey,
    pub(crate) kind: Kind,
    /// The lane (I/O server) that had the object's data when the object was looked up or made.
    pub(crate) lane: LaneIndex,
    pub(crate) location: Mutex<Option<Location<B>>>,
    pub(crate) state: Claimed<ObjectState<B>>,
    /// Whether the object may have hidden links, and how often they changed; see [`crate::hidden_links`].
    pub(crate) hidden_links_version: AtomicU64,
    /// Whether the object is nameless. A thread with exclusive use of `state` sets it, and no thread clears it.
    nameless: AtomicBool,
    /// Number of open handles on the object.
    open_handles: AtomicUsize,
    lower_files: Mutex<LowerFiles<B>>,
}

/// The state of an object that its claim guards.
pub(crate) struct ObjectState<B: Backing> {
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
    pub(crate) staged_copy: Option<StagedCopy<B>>,
    /// The few overwritten bytes of a file of the backing that has no staged copy.
    pub(crate) inline: Option<InlineChanges>,
    /// Names of a directory that differ from those in the backing.
    pub(crate) names: BTreeMap<OsString, NameChange<B>>,
    /// Number of added names minus number of removed names, compared with the backing. For a directory, the change of
    /// its number of subdirectories.
    pub(crate) link_delta: i64,
    /// Whether the directory was removed.
    pub(crate) is_removed: bool,
    /// Time of the last change of names in the directory.
    pub(crate) entries_changed_at: Option<Time>,
    /// Time of the last change of the object's own names.
    pub(crate) links_changed_at: Option<Time>,
    /// Number of bytes from the start of the old content that are not cut off. `u64::MAX` if nothing was cut off.
    pub(crate) cut: u64,
    /// Ranges that were written, in bytes.
    pub(crate) written: RangeSet,
    /// The backing's object as it was when its staged copy was made.
    pub(crate) original: Option<OriginalVersion>,
    /// Whether owner, mode or extended attributes were changed.
    pub(crate) changes_attributes: bool,
    /// The attributes that programs see while the commit is being applied.
    pub(crate) frozen_attr: Option<Attr>,
}

/// Size and modification time of an object of the backing before its first change.
#[derive(Clone, Copy)]
pub(crate) struct OriginalVersion {
    /// Size in bytes.
    pub(crate) size: u64,
    pub(crate) mtime: Time,
}

/// One name of a directory that a transaction has changed.
pub(crate) struct NameChange<B: Backing> {
    /// The object that has the name; `None` if the name was removed. A removed name is entered only if the backing has
    /// it.
    pub(crate) object: Option<Arc<Object<B>>>,
    /// Whether the directory has this name in the backing.
    pub(crate) is_in_backing: bool,
    /// Serial number of the transaction that changed the name.
    pub(crate) serial: u64,
}

impl<B: Backing> Change<B> {
    /// Makes an entry without any change for an object of a transaction. `number` is the entry's number in the
    /// transaction, and `origin` the object's name in the backing, if it has one.
    pub(crate) fn new(number: u64, origin: Option<Location<B>>) -> Self {
        Self {
            number,
            origin,
            staged_copy: None,
            inline: None,
            names: BTreeMap::new(),
            link_delta: 0,
            is_removed: false,
            entries_changed_at: None,
            links_changed_at: None,
            cut: u64::MAX,
            written: RangeSet::default(),
            original: None,
            changes_attributes: false,
            frozen_attr: None,
        }
    }

    /// Returns a copy of the change without the names in the directory, which may be very many.
    pub(crate) fn clone_without_names(&self) -> Self {
        Self {
            number: self.number,
            origin: self.origin.clone(),
            staged_copy: self.staged_copy.clone(),
            inline: self.inline.clone(),
            names: BTreeMap::new(),
            link_delta: self.link_delta,
            is_removed: self.is_removed,
            entries_changed_at: self.entries_changed_at,
            links_changed_at: self.links_changed_at,
            cut: self.cut,
            written: self.written.clone(),
            original: self.original,
            changes_attributes: self.changes_attributes,
            frozen_attr: self.frozen_attr,
        }
    }
}

/// A staged object, known by its name. It is looked up for each use, because there may be more staged objects than a
/// process may have descriptors.
pub(crate) struct StagedCopy<B: Backing> {
    /// The directory below `.firn/` that has the object.
    pub(crate) staging_dir: B::Inode,
    /// Path of the object below `new/`.
    pub(crate) path: StagedPath,
    /// The inode itself, kept because the staged name is about to be removed or is removed.
    pub(crate) kept_inode: Option<B::Inode>,
    /// Directory and name that the commit being applied moves the object to.
    pub(crate) final_name: Option<(B::Inode, OsString)>,
}

impl<B: Backing> Clone for StagedCopy<B> {
    fn clone(&self) -> Self {
        Self {
            staging_dir: self.staging_dir.clone(),
            path: self.path.clone(),
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
        let staged = base.lookup(&self.staging_dir, OsStr::new(&self.path.name));
        let (inode, _) = match (staged, &self.final_name) {
            // The application of the commit has moved the object to its final name.
            (Err(Errno::NOENT), Some((dir, name))) => base.lookup(dir, name)?,
            (staged, _) => staged?,
        };
        Ok(inode)
    }
}

/// Files of the backing that are open for this object. All handles on the object share them.
struct LowerFiles<B: Backing> {
    reader: Option<Arc<B::File>>,
    writer: Option<Arc<B::File>>,
    staged_copy: Option<Arc<B::File>>,
}

impl<B: Backing> LowerFiles<B> {
    const NONE: Self = Self {
        reader: None,
        writer: None,
        staged_copy: None,
    };

    /// Returns the selected file, or `None` in its place if it is not open.
    fn file_mut(&mut self, which: LowerFile) -> &mut Option<Arc<B::File>> {
        match which {
            LowerFile::Reader => &mut self.reader,
            LowerFile::Writer => &mut self.writer,
            LowerFile::StagedCopy => &mut self.staged_copy,
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
    /// Makes an object as programs see it. `key` is its inode, and `location` its directory and name; `None` for the
    /// top of the backing and for an object without a name.
    pub(crate) fn new(
        key: ObjectKey,
        kind: Kind,
        state: ObjectState<B>,
        location: Option<Location<B>>,
    ) -> Self {
        Self {
            key,
            kind,
            lane: LaneIndex::FIRST,
            location: Mutex::new(location),
            state: Claimed::new(state),
            hidden_links_version: AtomicU64::new(0),
            nameless: AtomicBool::new(false),
            open_handles: AtomicUsize::new(0),
            lower_files: Mutex::new(LowerFiles::NONE),
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
        self.hidden_links_version.load(Ordering::Acquire) & MAY_HAVE_HIDDEN_LINKS != 0
    }

    /// Returns whether the object is nameless, or is a removed directory that shadow mode keeps in `kept/`.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_nameless()
            || self.kind == Kind::Dir && self.may_hide_links() && self.parent().is_some()
    }

    /// Makes an object of a transaction nameless after the loss of its last name. `inode` becomes its base.
    pub(crate) fn become_nameless(&self, state: &mut ObjectState<B>, inode: B::Inode) {
        state.change = None;
        state.base = Some(inode);
        self.nameless.store(true, Ordering::Release);
        // Open handles continue with the staged copy, which is now the file itself.
        let mut lower_files = self.lower_files.lock();
        if let Some(file) = lower_files.staged_copy.take() {
            lower_files.reader = Some(Arc::clone(&file));
            lower_files.writer = Some(file);
        }
    }

    pub(crate) fn count_open(&self) {
        self.open_handles.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn is_open(&self) -> bool {
        self.open_handles.load(Ordering::Acquire) > 0
    }

    pub(crate) fn count_close(&self) {
        if self.open_handles.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.close_lower_files();
        }
    }

    /// Closes the object's open files in the backing. The next use opens them again.
    pub(crate) fn close_lower_files(&self) {
        // The files are closed after the lock is released, because a close calls the backing.
        let closed = std::mem::replace(&mut *self.lower_files.lock(), LowerFiles::NONE);
        drop(closed);
    }

    /// Returns the selected open file of an object: its file in the backing, for reading or writing, or its staged
    /// copy, which has a transaction's changes. Opens it if need be. Fails with ESTALE if the object has no such file.
    ///
    /// The caller has acquired the object's state, so that the object does not get another base or staged copy
    /// meanwhile.
    pub(crate) fn lower_file(
        &self,
        base: &B,
        state: &ClaimedView<'_, ObjectState<B>>,
        which: LowerFile,
    ) -> Result<Arc<B::File>> {
        let open_file = self.lower_files.lock().file_mut(which).clone();
        if let Some(file) = open_file {
            return Ok(file);
        }
        let (inode, access) = match which {
            LowerFile::Reader => (state.base().ok_or(Errno::STALE)?, Access::Read),
            LowerFile::Writer => (state.base().ok_or(Errno::STALE)?, Access::ReadWrite),
            LowerFile::StagedCopy => {
                let copy = state.staged_copy().ok_or(Errno::STALE)?;
                (copy.inode(base)?, Access::ReadWrite)
            }
        };
        let opened = Arc::new(base.open(&inode, access)?);
        // Race: another thread may have opened the file since the check. Its handle is then used, and this one is
        // closed.
        let mut lower_files = self.lower_files.lock();
        let file = lower_files.file_mut(which);
        Ok(Arc::clone(file.get_or_insert_with(|| Arc::clone(&opened))))
    }

    /// Returns the object's inode in the backing, outside of staging; `None` if it has none.
    pub(crate) fn base(&self) -> Option<B::Inode> {
        self.state.acquire_shared().base()
    }

    /// Returns the inode that has the object's attributes; see [`ClaimedView::inode`].
    pub(crate) fn inode(&self, base: &B) -> Result<B::Inode> {
        self.state.acquire_shared().inode(base)
    }
}

impl<B: Backing> ObjectState<B> {
    pub(crate) fn staged_copy(&self) -> Option<&StagedCopy<B>> {
        self.change.as_ref()?.staged_copy.as_ref()
    }

    pub(crate) fn staged_copy_mut(&mut self) -> Option<&mut StagedCopy<B>> {
        self.change.as_mut()?.staged_copy.as_mut()
    }

    pub(crate) fn inline(&self) -> Option<&InlineChanges> {
        self.change.as_ref()?.inline.as_ref()
    }

    /// Selects the file of the backing that a write in a transaction goes to: the staged copy, or the file itself if
    /// the object became nameless since.
    pub(crate) fn write_target(&self) -> LowerFile {
        if self.staged_copy().is_some() {
            LowerFile::StagedCopy
        } else {
            LowerFile::Writer
        }
    }
}

impl<B: Backing> ClaimedView<'_, ObjectState<B>> {
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
