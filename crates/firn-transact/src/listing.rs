//! Directories as programs see them: the backing's names and those of the transaction.

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

/// A name, the inode number and the kind of what it leads to.
pub(crate) type Listed = (OsString, u64, Option<Kind>);

/// An open directory of a tracked tree. What it lists is how the directory was when it was read from its
/// start.
pub struct TrackedDir<B: Backing> {
    object: Arc<Object<B>>,
    entries: Mutex<Arc<Vec<Listed>>>,
}

/// Listings of directories.
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

    pub(crate) fn open_tracked_dir(&self, object: &Arc<Object<B>>) -> Result<TrackedDir<B>> {
        let entries = self.list_entries(object, true)?;
        Ok(TrackedDir {
            object: Arc::clone(object),
            entries: Mutex::new(Arc::new(entries)),
        })
    }

    pub(crate) fn read_tracked_dir(
        &self,
        dir: &TrackedDir<B>,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()> {
        if cookie == 0 {
            let now = Arc::new(self.list_entries(&dir.object, true)?);
            *dir.entries.lock() = now;
        }
        let entries = Arc::clone(&dir.entries.lock());
        let from = usize::try_from(cookie).map_err(|_| Errno::INVAL)?;
        for (at, (name, ino, kind)) in entries.iter().enumerate().skip(from) {
            if !sink(DirEntry {
                name,
                ino: *ino,
                kind: *kind,
                cookie: at as i64 + 1,
            }) {
                break;
            }
        }
        Ok(())
    }

    /// What is in a directory; `.` and `..` first if they are `wanted`.
    pub(crate) fn list_entries(
        &self,
        object: &Arc<Object<B>>,
        wanted: bool,
    ) -> Result<Vec<Listed>> {
        let _names = wanted.then(|| self.admission.share_names(object));
        if object.kind != Kind::Dir {
            return Err(Errno::NOTDIR);
        }
        let inner = object.inner.share();
        let (base, is_changed, is_removed) = {
            let inner = inner.look();
            let change = inner.change.as_ref();
            let is_removed = change.is_some_and(|change| change.removed);
            (inner.base.clone(), change.is_some(), is_removed)
        };
        let mut entries = Vec::new();
        if wanted {
            let parent = object.parent().map_or(object.key.1, |parent| parent.key.1);
            entries.push((OsString::from("."), object.key.1, Some(Kind::Dir)));
            entries.push((OsString::from(".."), parent, Some(Kind::Dir)));
        }
        if is_removed {
            return Ok(entries);
        }
        if let Some(inode) = &base {
            let is_top = object.parent().is_none();
            let tops = self.tops.top_names_in(object);
            let below = staging::list(&self.lower.base, inode)?;
            let inner = inner.look();
            let change = inner.change.as_ref();
            for (name, ino, kind) in below {
                let name = OsString::from_vec(name);
                let is_hidden = is_top && name == OsStr::new(staging::TOP);
                let is_hidden = is_hidden || tops.iter().any(|top| top.name == name);
                if !is_hidden && change.is_none_or(|change| !change.names.contains_key(&name)) {
                    entries.push((name, ino, kind));
                }
            }
            let shown = tops
                .into_iter()
                .filter_map(|top| Some((top.name, top.shown?)));
            entries.extend(shown.map(|(name, root)| (name, root.key.1, Some(Kind::Dir))));
        } else if !is_changed {
            return Err(Errno::STALE);
        }
        if let Some(change) = &inner.look().change {
            let made = change
                .names
                .iter()
                .filter_map(|(name, named)| Some((name, named.object.as_ref()?)));
            entries
                .extend(made.map(|(name, object)| (name.clone(), object.key.1, Some(object.kind))));
        }
        Ok(entries)
    }

    /// fsync(2) of a directory. Where its transaction holds them, its names are durable when that is prepared.
    pub(crate) fn sync_tracked_dir(&self, object: &Arc<Object<B>>) -> Result<()> {
        let (_data, scope) = self.admission.enter_data_change(object)?;
        if scope.is_some_and(|scope| scope.shadow.is_none()) {
            return Ok(());
        }
        let inode = object.base().ok_or(Errno::STALE)?;
        self.lower.base.sync_dir(&inode)
    }
}
