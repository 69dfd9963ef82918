//! One object of the tree, as programs see it.
//!
//! Invariants
//! * One [`Object`] for each inode, whatever its number of names, while it is referred to.
//! * `base` is the object in the backing, outside of staging; an object without it exists in a transaction
//!   only, and one without base and change was made in a transaction that was aborted.
//! * An object that was made in a transaction and has lost its last name is *nameless*. It belongs to no transaction
//!   any more, has a base and no change, and lives as long as a reference to it.
//! * The *staged copy* of a change is a staged object of its own inode. For an object without base it is the
//!   object itself, which a commit moves into place; else it has the new attributes and, of a file, the size
//!   and the bytes that were written. A change has a staged copy or has inline bytes ([`InlineChanges`]), never both.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use firn_backing::lock::Mutex;
use firn_backing::{Access, Attr, Backing, Errno, Kind, LaneIndex, Result, Time};

use crate::change_log::Staged;
use crate::claim::{Claimed, View};
use crate::conflict::Ranges;
use crate::inline_changes::InlineChanges;

/// In [`Object::hides`]: there may be links. The rest of the number changes with each change of them.
pub(crate) const HAS_LINKS: u64 = 1;

/// Device and inode.
pub(crate) type Key = (u64, u64);

/// The directory that an object was last seen in, and its name there.
pub(crate) type Location<B> = (Arc<Object<B>>, OsString);

/// One object of a tracked tree.
pub struct Object<B: Backing> {
    pub(crate) key: Key,
    pub(crate) kind: Kind,
    /// The lane that its data lay in when it was found or made.
    pub(crate) lane: LaneIndex,
    pub(crate) location: Mutex<Option<Location<B>>>,
    pub(crate) inner: Claimed<Inner<B>>,
    /// Whether it has links of Firn's that are not shown, and how often that changed: see [`crate::hidden_links`].
    pub(crate) hides: AtomicU64,
    /// It was made in a transaction and lost its last name. Set by the owner of `inner`, and never unset.
    nameless: AtomicBool,
    /// Handles on it.
    opens: AtomicUsize,
    files: Mutex<Files<B>>,
}

pub(crate) struct Inner<B: Backing> {
    pub(crate) base: Option<B::Inode>,
    pub(crate) change: Option<Box<Change<B>>>,
}

/// What the open transaction changes in an object.
pub(crate) struct Change<B: Backing> {
    pub(crate) number: u64,
    /// Place of the object at its first change: a name of the backing's, if it has one.
    pub(crate) origin: Option<Location<B>>,
    pub(crate) copy: Option<StagedCopy<B>>,
    /// Of a file of the backing that has no staged copy: what little was overwritten.
    pub(crate) inline: Option<InlineChanges>,
    /// Of a directory: names that differ from the backing's.
    pub(crate) names: BTreeMap<OsString, Named<B>>,
    /// Names more than the backing's object has; of a directory: subdirectories.
    pub(crate) links: i64,
    /// The directory is gone.
    pub(crate) removed: bool,
    /// When names in the directory changed.
    pub(crate) touched: Option<Time>,
    /// When names of the object changed.
    pub(crate) named: Option<Time>,
    /// Bytes of the old content that still count where nothing was written.
    pub(crate) cut: u64,
    pub(crate) written: Ranges,
    /// Size and last change of the backing's object when its staged copy was made.
    pub(crate) before: Option<(u64, Time)>,
    /// Owner, mode or extended attributes were changed.
    pub(crate) attributes: bool,
    /// The attributes that programs see while the commit is applied and they read on.
    pub(crate) frozen: Option<Attr>,
}

/// What a name of a directory leads to in a transaction.
pub(crate) struct Named<B: Backing> {
    /// `None`: there is no such name any more, which is noted only where it hides one of the backing's.
    pub(crate) object: Option<Arc<Object<B>>>,
    /// The directory has this name in the backing, too.
    pub(crate) hides_old: bool,
    /// The transaction that it belongs to.
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
            touched: None,
            named: None,
            cut: u64::MAX,
            written: Ranges::default(),
            before: None,
            attributes: false,
            frozen: None,
        }
    }
}

impl<B: Backing> Change<B> {
    /// A copy without the names.
    pub(crate) fn clone_without_names(&self) -> Self {
        Self {
            number: self.number,
            origin: self.origin.clone(),
            copy: self.copy.clone(),
            inline: self.inline.clone(),
            names: BTreeMap::new(),
            links: self.links,
            removed: self.removed,
            touched: self.touched,
            named: self.named,
            cut: self.cut,
            written: self.written.clone(),
            before: self.before,
            attributes: self.attributes,
            frozen: self.frozen,
        }
    }
}

/// A staged object. There may be more of them than a process may hold descriptors: it is looked up when it is
/// used.
pub(crate) struct StagedCopy<B: Backing> {
    /// The directory that it is staged in.
    pub(crate) staging_dir: B::Inode,
    pub(crate) at: Staged,
    /// The object, where its staged name is gone.
    pub(crate) held: Option<B::Inode>,
    /// Where a commit that is being applied moves it to.
    pub(crate) goes_to: Option<(B::Inode, OsString)>,
}

impl<B: Backing> Clone for StagedCopy<B> {
    fn clone(&self) -> Self {
        Self {
            staging_dir: self.staging_dir.clone(),
            at: self.at.clone(),
            held: self.held.clone(),
            goes_to: self.goes_to.clone(),
        }
    }
}

impl<B: Backing> StagedCopy<B> {
    pub(crate) fn inode(&self, base: &B) -> Result<B::Inode> {
        if let Some(inode) = &self.held {
            return Ok(inode.clone());
        }
        match (
            base.lookup(&self.staging_dir, OsStr::new(&self.at.1)),
            &self.goes_to,
        ) {
            // It moved there meanwhile, with one rename.
            (Err(Errno::NOENT), Some((dir, name))) => Ok(base.lookup(dir, name)?.0),
            (found, _) => Ok(found?.0),
        }
    }
}

/// Files that are open below, shared by all handles.
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

    fn slot(&mut self, which: LowerFile) -> &mut Option<Arc<B::File>> {
        match which {
            LowerFile::Reader => &mut self.reader,
            LowerFile::Writer => &mut self.writer,
            LowerFile::StagedCopy => &mut self.copy,
        }
    }
}

/// The file below that is meant.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum LowerFile {
    /// The backing's, for reading.
    Reader,
    /// The backing's, for writing.
    Writer,
    /// The staged copy's, for both.
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

    /// The object, with its data in `lane`.
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

    /// Whether `other` is this object or above it.
    pub(crate) fn is_below(self: &Arc<Self>, other: &Arc<Self>) -> bool {
        let mut at = Some(Arc::clone(self));
        while let Some(object) = at {
            if Arc::ptr_eq(&object, other) {
                return true;
            }
            at = object.parent();
        }
        false
    }

    pub(crate) fn is_nameless(&self) -> bool {
        self.nameless.load(Ordering::Acquire)
    }

    /// One of its names may be Firn's.
    pub(crate) fn may_hide_links(&self) -> bool {
        self.hides.load(Ordering::Acquire) & HAS_LINKS != 0
    }

    /// An object without a name, or a directory that was removed and is kept.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_nameless()
            || self.kind == Kind::Dir && self.may_hide_links() && self.parent().is_some()
    }

    /// The object, which a transaction made, has lost its last name; `inode` is what is left of it.
    pub(crate) fn become_nameless(&self, inner: &mut Inner<B>, inode: B::Inode) {
        inner.change = None;
        inner.base = Some(inode);
        self.nameless.store(true, Ordering::Release);
        // Handles go on with the file that they have open.
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

    /// Closes what is open below; it is opened again when it is used.
    pub(crate) fn close_lower_files(&self) {
        let closed = std::mem::replace(&mut *self.files.lock(), Files::NONE);
        drop(closed);
    }

    /// The file below, opened if need be. The caller shares or owns `inner`, so that it stays the right one.
    pub(crate) fn lower_file(
        &self,
        base: &B,
        inner: &View<'_, Inner<B>>,
        which: LowerFile,
    ) -> Result<Arc<B::File>> {
        let known = self.files.lock().slot(which).clone();
        if let Some(file) = known {
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
        // Another caller may have opened it, too: the first one stays, and the other is closed.
        let mut files = self.files.lock();
        let slot = files.slot(which);
        Ok(Arc::clone(slot.get_or_insert_with(|| Arc::clone(&opened))))
    }

    /// What the object is in the backing.
    pub(crate) fn base(&self) -> Option<B::Inode> {
        self.inner.share().base()
    }

    /// What to ask for attributes and their like: see [`View::inode`].
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

    /// The file below that takes what is written in a transaction. One that became nameless meanwhile is as good
    /// as outside.
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
        self.look().base.clone()
    }

    pub(crate) fn staged_copy(&self) -> Option<StagedCopy<B>> {
        self.look().staged_copy().cloned()
    }

    /// What to ask for attributes and their like: the staged copy where there is one.
    pub(crate) fn inode(&self, base: &B) -> Result<B::Inode> {
        match self.staged_copy() {
            Some(copy) => copy.inode(base),
            None => self.base().ok_or(Errno::STALE),
        }
    }
}
