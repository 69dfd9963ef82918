//! Saving what an object was, durably, before it changes first.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::{Access, Backing, Errno, Kind, RenameFlags, Result};

use super::saved::{Original, Saved, Segment};
use super::{Known, Shadow};
use crate::apply::Apply;
use crate::object::{Inner, Object};
use crate::scope::{Held, Scope};
use crate::staging;

/// For a change that leaves all bytes as they are.
pub(crate) const NO_BYTES: u64 = u64::MAX;

/// Records of a file after which all that is left of its bytes is saved at once: who writes downwards does not
/// wait for a sync with each write.
const RECORDS_MAX: u32 = 4;
/// Bytes are saved from a multiple of this on, so that the backing can share blocks instead of copying.
const ALIGN: u64 = 4096;

impl<B: Backing> Held<B> {
    /// The transaction that an object is changed in, if that holds the change. In shadow mode none does: what
    /// undoes it is saved first, and it goes through. Bytes before `from` do not change.
    pub(crate) fn holding(
        &self,
        scope: Option<Arc<Scope<B>>>,
        object: &Arc<Object<B>>,
        from: u64,
    ) -> Result<Option<Arc<Scope<B>>>> {
        let Some(shadow) = scope.as_ref().and_then(|scope| scope.shadow.as_ref()) else {
            return Ok(scope);
        };
        let scope = scope.as_ref().expect("it has a shadow");
        self.save(scope, shadow, object, from)?;
        Ok(None)
    }

    pub(super) fn save(
        &self,
        scope: &Scope<B>,
        shadow: &Shadow<B>,
        object: &Arc<Object<B>>,
        from: u64,
    ) -> Result<()> {
        let (dev, ino) = object.key;
        let is_saved = || {
            shadow
                .known
                .lock()
                .get(&ino)
                .is_some_and(|known| known.covers(from))
        };
        if is_saved() {
            return Ok(());
        }
        if dev != shadow.dev {
            return Err(Errno::XDEV);
        }
        // One at a time, and nobody has the object's data in flight below the offset that is saved.
        let inner = object.inner.write();
        if object.is_nameless() {
            return Ok(());
        }
        let mut known = shadow.known.lock().get(&ino).copied();
        while !known.is_some_and(|known| known.covers(from)) {
            // What another host saved counts. It may have been published and not be durable yet.
            let found = self.saved_by_others(shadow, ino, known)?;
            if found.is_some() {
                self.base.sync_dir(&shadow.saved)?;
                known = found;
            } else if let Some(mine) = self.save_more(scope, shadow, object, &inner, known, from)? {
                known = Some(mine);
            }
        }
        shadow
            .known
            .lock()
            .insert(ino, known.expect("the loop ends with it"));
        if object.kind == Kind::Dir {
            shadow.dirs.lock().insert(ino, Arc::clone(object));
        }
        Ok(())
    }

    /// What the records behind those that are `known` add; `None` where there is none.
    fn saved_by_others(
        &self,
        shadow: &Shadow<B>,
        ino: u64,
        known: Option<Known>,
    ) -> Result<Option<Known>> {
        let (mut low, first) = match known {
            Some(Known::Saved { low, count }) => (low, count),
            _ => (0, 0),
        };
        let mut count = first;
        while let Some(bytes) = staging::load(&self.base, &shadow.saved, &format!("{ino}.{count}"))?
        {
            let saved = Saved::decode(&bytes).map_err(|_| Errno::IO)?;
            if let Some(original) = &saved.original {
                low = original.size;
            }
            low = saved.segment.map_or(low, |segment| segment.from);
            count += 1;
        }
        Ok((count > first).then_some(Known::Saved { low, count }))
    }

    /// Publishes one record more; `None` where another host was faster.
    fn save_more(
        &self,
        scope: &Scope<B>,
        shadow: &Shadow<B>,
        object: &Arc<Object<B>>,
        inner: &Inner<B>,
        known: Option<Known>,
        from: u64,
    ) -> Result<Option<Known>> {
        let inode = inner.base.clone().ok_or(Errno::STALE)?;
        let (original, to, count) = match known {
            Some(Known::Saved { low, count }) => (None, low, count),
            _ => {
                let original = self.original(object, &inode)?;
                let size = original.size;
                (Some(original), size, 0)
            }
        };
        let mut saved = Saved {
            ino: object.key.1,
            path: path(scope, object),
            original,
            segment: None,
        };
        if object.kind == Kind::File && from < to {
            let from = if count + 1 >= RECORDS_MAX {
                0
            } else {
                from - from % ALIGN
            };
            saved.segment = Some(self.copy_bytes(shadow, &inode, from, to)?);
        }
        let low = saved.segment.as_ref().map_or(to, |segment| segment.from);
        let published = self.publish_record(shadow, &saved, count);
        if let (Some(segment), Err(_) | Ok(false)) = (&saved.segment, &published) {
            // Nothing tells of it, unless only the sync failed: then it stays.
            if matches!(published, Ok(false)) || !self.is_published(shadow, &saved, count) {
                let _ = self.base.unlink(&shadow.saved, OsStr::new(&segment.at));
            }
        }
        Ok(published?.then_some(Known::Saved {
            low,
            count: count + 1,
        }))
    }

    fn original(&self, object: &Arc<Object<B>>, inode: &B::Inode) -> Result<Original> {
        let attr = self.base.attr(inode)?;
        let mut names = Vec::new();
        if object.kind == Kind::Dir {
            let is_top = object.parent().is_none();
            let listed = staging::list(&self.base, inode)?
                .into_iter()
                .map(|(name, ino, _)| (name, ino));
            names.extend(listed.filter(|(name, _)| !(is_top && name == staging::TOP.as_bytes())));
        }
        Ok(Original {
            mode: attr.mode,
            uid: attr.uid,
            gid: attr.gid,
            size: attr.size,
            times: [attr.atime, attr.mtime].map(|time| (time.sec, time.nsec)),
            xattrs: match object.kind {
                Kind::Symlink => Vec::new(),
                _ => staging::xattrs(&self.base, inode)?,
            },
            names,
        })
    }

    /// Copies bytes to a file of their own, durably but for its name.
    fn copy_bytes(
        &self,
        shadow: &Shadow<B>,
        inode: &B::Inode,
        from: u64,
        to: u64,
    ) -> Result<Segment> {
        let (at, copy) = self.make_file(shadow, "data")?;
        let copied = self.base.open(inode, Access::Read).and_then(|source| {
            Apply::copy(&self.base, &source, &copy, from, to)?;
            self.base.sync(&copy, false)
        });
        match copied {
            Ok(()) => Ok(Segment { from, to, at }),
            Err(errno) => {
                let _ = self.base.unlink(&shadow.saved, OsStr::new(&at));
                Err(errno)
            }
        }
    }

    /// Makes a file in `saved/` with a name that no host has.
    fn make_file(&self, shadow: &Shadow<B>, what: &str) -> Result<(String, B::File)> {
        loop {
            let number = shadow.last_number.fetch_add(1, Ordering::Relaxed) + 1;
            let name = format!("{what}-{number}");
            match self
                .base
                .create(&staging::own(), &shadow.saved, OsStr::new(&name), 0o600)
            {
                Ok((_, file, _)) => return Ok((name, file)),
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Puts a record in its place, durably; false where there is one.
    fn publish_record(&self, shadow: &Shadow<B>, saved: &Saved, count: u32) -> Result<bool> {
        let (new, file) = self.make_file(shadow, "new")?;
        let written = staging::write_all(&self.base, &file, &saved.encode(), 0)
            .and_then(|()| self.base.sync(&file, false))
            .and_then(|()| self.name_record(shadow, &new, &format!("{}.{count}", saved.ino)));
        if written != Ok(true) {
            let _ = self.base.unlink(&shadow.saved, OsStr::new(&new));
        }
        let is_mine = written?;
        self.base.sync_dir(&shadow.saved)?;
        Ok(is_mine)
    }

    /// Gives a file its name, if no other has it.
    fn name_record(&self, shadow: &Shadow<B>, new: &str, name: &str) -> Result<bool> {
        let (dir, new, name) = (&shadow.saved, OsStr::new(new), OsStr::new(name));
        let named = match self
            .base
            .rename(dir, new, dir, name, RenameFlags::NOREPLACE)
        {
            // Not every file system can do this; links replace nothing anywhere.
            Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => {
                let (inode, _) = self.base.lookup(dir, new)?;
                self.base
                    .link(&inode, dir, name)
                    .and_then(|_| self.base.unlink(dir, new))
            }
            other => other,
        };
        match named {
            Ok(()) => Ok(true),
            Err(Errno::EXIST) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    fn is_published(&self, shadow: &Shadow<B>, saved: &Saved, count: u32) -> bool {
        let name = format!("{}.{count}", saved.ino);
        !matches!(
            staging::find(&self.base, &shadow.saved, OsStr::new(&name)),
            Ok(None)
        )
    }
}

/// The way from the scope's top down to an object.
fn path<B: Backing>(scope: &Scope<B>, object: &Arc<Object<B>>) -> Vec<super::saved::Entry> {
    let mut path = Vec::new();
    let mut at = Arc::clone(object);
    while !Arc::ptr_eq(&at, &scope.root) {
        let Some((parent, name)) = at.seat.lock().clone() else {
            break;
        };
        path.push((name.as_bytes().to_vec(), at.key.1));
        at = parent;
    }
    path.reverse();
    path
}
