//! [`DirListings`]: listings of directories as programs see them.
//!
//! A listing has the entries of the *backing* (the directory below the mount) without those that a transaction changed,
//! and the changed entries as the transaction has them. The *top* is the uppermost directory of a transaction. Its name
//! is added to its parent or hidden there as [`crate::top_overlay`] says. `.firn`, Firn's own directory, is hidden.
//!
//! Promise: while a program reads an open directory, the listing does not change. It is made anew when the program
//! reads from the start.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;
use std::sync::Arc;

use firn_backing::lock::Mutex;
use firn_backing::{Backing, DirEntry, Errno, Kind, Result};

use crate::claim::ClaimedView;
use crate::lower_backing::LowerBacking;
use crate::object::{Object, ObjectState};
use crate::staging;
use crate::top_overlay::TopOverlay;
use crate::waiting::Admission;

/// One entry of a listing.
pub(crate) struct ListedEntry {
    pub(crate) name: OsString,
    /// Inode number of the object that the name leads to.
    pub(crate) ino: u64,
    /// Kind of the object; `None` if the backing does not say.
    pub(crate) kind: Option<Kind>,
}

impl ListedEntry {
    /// Returns the entry of a directory.
    fn new_dir(name: impl Into<OsString>, ino: u64) -> Self {
        Self {
            name: name.into(),
            ino,
            kind: Some(Kind::Dir),
        }
    }
}

/// An open directory.
pub struct TrackedDir<B: Backing> {
    object: Arc<Object<B>>,
    /// The listing, made at the open and at each read from the start.
    entries: Mutex<Arc<Vec<ListedEntry>>>,
}

/// Makes listings of directories.
pub(crate) struct DirListings<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) top_overlay: Arc<TopOverlay<B>>,
    pub(crate) admission: Arc<Admission<B>>,
}

impl<B: Backing> DirListings<B> {
    pub(crate) fn new(
        lower: &Arc<LowerBacking<B>>,
        top_overlay: &Arc<TopOverlay<B>>,
        admission: &Arc<Admission<B>>,
    ) -> Self {
        Self {
            lower: Arc::clone(lower),
            top_overlay: Arc::clone(top_overlay),
            admission: Arc::clone(admission),
        }
    }

    /// Opens a directory. Fails with ENOTDIR if the object is no directory, and with ESTALE if it no longer exists.
    pub(crate) fn open_tracked_dir(&self, object: &Arc<Object<B>>) -> Result<TrackedDir<B>> {
        let entries = self.list_shown(object)?;
        Ok(TrackedDir {
            object: Arc::clone(object),
            entries: Mutex::new(Arc::new(entries)),
        })
    }

    /// Passes the entries of an open directory from `cookie` on to `sink`, until `sink` returns false. The listing is
    /// made anew for cookie 0, and otherwise stays as it was.
    pub(crate) fn read_tracked_dir(
        &self,
        dir: &TrackedDir<B>,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()> {
        if cookie == 0 {
            let entries = Arc::new(self.list_shown(&dir.object)?);
            *dir.entries.lock() = entries;
        }
        let entries = Arc::clone(&dir.entries.lock());
        // A cookie is the index of the entry that the next read begins with.
        let first_index = usize::try_from(cookie).map_err(|_| Errno::INVAL)?;
        for (index, entry) in entries.iter().enumerate().skip(first_index) {
            let wants_more = sink(DirEntry {
                name: &entry.name,
                ino: entry.ino,
                kind: entry.kind,
                cookie: index as i64 + 1,
            });
            if !wants_more {
                break;
            }
        }
        Ok(())
    }

    /// Returns the listing for programs, which begins with `.` and `..`.
    fn list_shown(&self, object: &Arc<Object<B>>) -> Result<Vec<ListedEntry>> {
        let _names = self.admission.share_names(object);
        let parent = object
            .parent()
            .map_or(object.key.ino, |parent| parent.key.ino);
        let mut entries = vec![
            ListedEntry::new_dir(".", object.key.ino),
            ListedEntry::new_dir("..", parent),
        ];
        entries.append(&mut self.list_entries(object)?);
        Ok(entries)
    }

    /// Returns the entries of a directory as programs see them, without `.` and `..`. The caller is admitted to its
    /// names: no other thread changes them meanwhile. Fails with ESTALE if the directory was made in a transaction that
    /// was aborted.
    pub(crate) fn list_entries(&self, object: &Arc<Object<B>>) -> Result<Vec<ListedEntry>> {
        if object.kind != Kind::Dir {
            return Err(Errno::NOTDIR);
        }
        // The directory has a state in the backing (`base`) and a change of an open transaction, or only one of them.
        let claimed = object.state.acquire_shared();
        let (base, is_changed, is_removed) = {
            let state = claimed.read();
            let change = state.change.as_ref();
            let is_removed = change.is_some_and(|change| change.is_removed);
            (state.base.clone(), change.is_some(), is_removed)
        };
        if is_removed {
            return Ok(Vec::new());
        }
        let mut entries = match &base {
            Some(inode) => self.list_unchanged_entries(object, &claimed, inode)?,
            None if is_changed => Vec::new(),
            None => return Err(Errno::STALE),
        };
        if let Some(change) = &claimed.read().change {
            for (name, name_change) in &change.names {
                let Some(named_object) = &name_change.object else {
                    continue;
                };
                entries.push(ListedEntry {
                    name: name.clone(),
                    ino: named_object.key.ino,
                    kind: Some(named_object.kind),
                });
            }
        }
        Ok(entries)
    }

    /// Returns the entries that the backing has in the directory `inode`, without those that a transaction changed or
    /// that are hidden. The uppermost directories of transactions (*tops*) that programs see there are added.
    fn list_unchanged_entries(
        &self,
        object: &Arc<Object<B>>,
        claimed: &ClaimedView<'_, ObjectState<B>>,
        inode: &B::Inode,
    ) -> Result<Vec<ListedEntry>> {
        let is_backing_top = object.parent().is_none();
        let tops = self.top_overlay.listed_tops_in(object);
        let entries_in_backing = staging::list(&self.lower.base, inode)?;
        let mut entries = Vec::new();
        let state = claimed.read();
        for (name, ino, kind) in entries_in_backing {
            let name = OsString::from_vec(name);
            let is_private_dir = is_backing_top && name == OsStr::new(staging::FIRN_DIR);
            // A transaction shows or hides its uppermost directory under this name.
            let is_name_of_top = tops.iter().any(|top| top.name == name);
            let is_changed = state
                .change
                .as_ref()
                .is_some_and(|change| change.names.contains_key(&name));
            if !is_private_dir && !is_name_of_top && !is_changed {
                entries.push(ListedEntry { name, ino, kind });
            }
        }
        for top in tops {
            if let Some(shown_dir) = top.shown {
                entries.push(ListedEntry::new_dir(top.name, shown_dir.key.ino));
            }
        }
        Ok(entries)
    }

    /// Syncs a directory. In a transaction in buffer mode it does nothing: the names become durable with the prepare.
    pub(crate) fn sync_tracked_dir(&self, object: &Arc<Object<B>>) -> Result<()> {
        let (_data, scope) = self.admission.enter_data_change(object)?;
        if scope.is_some_and(|scope| scope.shadow.is_none()) {
            return Ok(());
        }
        let inode = object.base().ok_or(Errno::STALE)?;
        self.lower.base.sync_dir(&inode)
    }
}
