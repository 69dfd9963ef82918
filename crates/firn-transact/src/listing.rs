//! [`Dirs`]: listings of directories as programs see them.
//!
//! A listing has the entries of the backing without those that the transaction changed, and the changed entries as the
//! transaction has them. Names of scopes' tops are added or hidden as [`crate::top_names`] says, and `.firn` is hidden.
//!
//! Promise: while a program reads an open directory, the listing does not change. It is made anew when the program
//! reads from the start.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;
use std::sync::Arc;

use firn_backing::lock::Mutex;
use firn_backing::{Backing, DirEntry, Errno, Kind, Result};

use crate::lower_backing::LowerBacking;
use crate::object::Object;
use crate::staging;
use crate::top_names::Tops;
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
    fn of_dir(name: impl Into<OsString>, ino: u64) -> Self {
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
pub(crate) struct Dirs<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) tops: Arc<Tops<B>>,
    pub(crate) admission: Arc<Admission<B>>,
}

impl<B: Backing> Dirs<B> {
    pub(crate) fn new(
        lower: &Arc<LowerBacking<B>>,
        tops: &Arc<Tops<B>>,
        admission: &Arc<Admission<B>>,
    ) -> Self {
        Self {
            lower: Arc::clone(lower),
            tops: Arc::clone(tops),
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

    /// Passes the entries from `cookie` on to `sink`, until it returns false.
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
        let from = usize::try_from(cookie).map_err(|_| Errno::INVAL)?;
        for (index, entry) in entries.iter().enumerate().skip(from) {
            let entry = DirEntry {
                name: &entry.name,
                ino: entry.ino,
                kind: entry.kind,
                cookie: index as i64 + 1,
            };
            if !sink(entry) {
                break;
            }
        }
        Ok(())
    }

    /// Returns the listing for programs, which begins with `.` and `..`.
    fn list_shown(&self, object: &Arc<Object<B>>) -> Result<Vec<ListedEntry>> {
        let _names = self.admission.share_names(object);
        let parent = object.parent().map_or(object.key.1, |parent| parent.key.1);
        let mut entries = vec![
            ListedEntry::of_dir(".", object.key.1),
            ListedEntry::of_dir("..", parent),
        ];
        entries.append(&mut self.list_entries(object)?);
        Ok(entries)
    }

    /// Returns the entries of a directory, without `.` and `..`. The caller is admitted to its names.
    pub(crate) fn list_entries(&self, object: &Arc<Object<B>>) -> Result<Vec<ListedEntry>> {
        if object.kind != Kind::Dir {
            return Err(Errno::NOTDIR);
        }
        let inner = object.inner.share();
        let (base, is_changed, is_removed) = {
            let inner = inner.read();
            let change = inner.change.as_ref();
            let is_removed = change.is_some_and(|change| change.removed);
            (inner.base.clone(), change.is_some(), is_removed)
        };
        let mut entries = Vec::new();
        if is_removed {
            return Ok(entries);
        }
        if let Some(inode) = &base {
            let is_top = object.parent().is_none();
            let tops = self.tops.top_names_in(object);
            let entries_in_backing = staging::list(&self.lower.base, inode)?;
            let inner = inner.read();
            let change = inner.change.as_ref();
            for (name, ino, kind) in entries_in_backing {
                let name = OsString::from_vec(name);
                let is_hidden = is_top && name == OsStr::new(staging::TOP);
                let is_hidden = is_hidden || tops.iter().any(|top| top.name == name);
                if !is_hidden && change.is_none_or(|change| !change.names.contains_key(&name)) {
                    entries.push(ListedEntry { name, ino, kind });
                }
            }
            let shown = tops
                .into_iter()
                .filter_map(|top| Some((top.name, top.shown?)));
            entries.extend(shown.map(|(name, root)| ListedEntry::of_dir(name, root.key.1)));
        } else if !is_changed {
            return Err(Errno::STALE);
        }
        if let Some(change) = &inner.read().change {
            let added = change
                .names
                .iter()
                .filter_map(|(name, named)| Some((name, named.object.as_ref()?)));
            entries.extend(added.map(|(name, object)| ListedEntry {
                name: name.clone(),
                ino: object.key.1,
                kind: Some(object.kind),
            }));
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
