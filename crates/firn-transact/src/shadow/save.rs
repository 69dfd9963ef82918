//! [`Originals`]: saves the old state of an object durably, before its first change in shadow mode.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::{Access, Backing, Errno, Kind, RenameFlags, Result};

use super::{Known, SAVED, Shadow};
use crate::change_log::{
    BytesSource, ChangeLog, DataChange, Entry, EntrySide, Identity, Link, WrittenRange,
};
use crate::copy::copy_with_holes;
use crate::lower_backing::LowerBacking;
use crate::object::Object;
use crate::scope::Scope;
use crate::staging;

/// Records of a file after which all the rest of its bytes is saved at once, so that a program that writes downwards
/// does not wait for a sync with each write.
const RECORDS_MAX: u32 = 4;
/// Bytes are saved from a multiple of this on, so that the backing can share blocks instead of copying.
const ALIGN: u64 = 4096;

/// What objects were before a transaction in shadow mode changes them.
pub(crate) struct Originals<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
}

impl<B: Backing> Originals<B> {
    pub(crate) fn new(lower: &Arc<LowerBacking<B>>) -> Self {
        Self {
            lower: Arc::clone(lower),
        }
    }

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
        self.save_object(scope, shadow, object, from)?;
        Ok(None)
    }

    pub(super) fn save_object(
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
        // One at a time, and no thread has the object's data in flight below the offset that is saved.
        let inner = object.inner.own();
        if object.is_nameless() {
            return Ok(());
        }
        let mut known = shadow.known.lock().get(&ino).copied();
        while !known.is_some_and(|known| known.covers(from)) {
            // What another host saved counts. It may have been published and not be durable yet.
            let found = self.saved_by_others(shadow, ino, known)?;
            if found.is_some() {
                self.lower.base.sync_dir(&shadow.saved)?;
                known = found;
            } else if let Some(mine) =
                self.save_more(scope, shadow, (object, inner.base()), known, from)?
            {
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
        let (mut size, mut low, first) = match known {
            Some(Known::Saved { size, low, count }) => (size, low, count),
            _ => (0, 0, 0),
        };
        let mut count = first;
        while let Some(bytes) =
            staging::read_file(&self.lower.base, &shadow.saved, &format!("{ino}.{count}"))?
        {
            let saved = ChangeLog::decode(&bytes).map_err(|_| Errno::IO)?;
            for data in saved
                .entries
                .iter()
                .filter_map(|one| one.undo.data.as_ref())
            {
                size = data.size;
                low = if count == 0 { size } else { low };
                low = data.written.first().map_or(low, |range| range.start);
            }
            count += 1;
        }
        Ok((count > first).then_some(Known::Saved { size, low, count }))
    }

    /// Publishes one record more; `None` where another host was faster.
    fn save_more(
        &self,
        scope: &Scope<B>,
        shadow: &Shadow<B>,
        (object, inode): (&Arc<Object<B>>, Option<B::Inode>),
        known: Option<Known>,
        from: u64,
    ) -> Result<Option<Known>> {
        let inode = inode.ok_or(Errno::STALE)?;
        let (mut part, size, to, count) = match known {
            Some(Known::Saved { size, low, count }) => (EntrySide::default(), size, low, count),
            _ => {
                let (part, size) = self.original(object, &inode)?;
                (part, size, size, 0)
            }
        };
        let mut copied = None;
        if object.kind == Kind::File {
            if from < to {
                let from = if count + 1 >= RECORDS_MAX {
                    0
                } else {
                    from - from % ALIGN
                };
                copied = Some((from, self.copy_bytes(shadow, &inode, from, to)?));
            }
            let written = copied.iter().map(|(start, name)| WrittenRange {
                start: *start,
                end: to,
                source: BytesSource::File((SAVED.to_owned(), name.clone())),
            });
            part.data = Some(DataChange {
                cut: size,
                size,
                written: written.collect(),
                grows: false,
            });
        }
        let low = copied.as_ref().map_or(to, |(from, _)| *from);
        let name = format!("{}.{count}", object.key.1);
        let published = self.publish_log(shadow, &log_of(scope, object, part), &name);
        if let (Some((_, copy)), Err(_) | Ok(false)) = (&copied, &published) {
            // Nothing tells of it, unless only the sync failed: then it stays.
            if matches!(published, Ok(false)) || !self.is_published(shadow, &name) {
                let _ = self.lower.base.unlink(&shadow.saved, OsStr::new(copy));
            }
        }
        let count = count + 1;
        Ok(published?.then_some(Known::Saved { size, low, count }))
    }

    /// The attributes of an object, and of a directory its names; and its size.
    fn original(&self, object: &Arc<Object<B>>, inode: &B::Inode) -> Result<(EntrySide, u64)> {
        let attr = self.lower.base.attr(inode)?;
        let names = match object.kind {
            Kind::Dir => Some(self.names_of(object, inode)?),
            _ => None,
        };
        let part = EntrySide {
            attributes: Some(staging::read_attributes(&self.lower.base, inode, &attr)?),
            names,
            ..EntrySide::default()
        };
        Ok((part, attr.size))
    }

    fn names_of(&self, dir: &Arc<Object<B>>, inode: &B::Inode) -> Result<Vec<Link>> {
        let is_top = dir.parent().is_none();
        let listed = staging::list(&self.lower.base, inode)?.into_iter();
        let shown = listed.filter(|(name, ..)| !(is_top && name == staging::TOP.as_bytes()));
        Ok(shown.map(|(name, ino, _)| (name, ino)).collect())
    }

    /// Copies bytes to a file of their own, durably but for its name, which it returns.
    fn copy_bytes(
        &self,
        shadow: &Shadow<B>,
        inode: &B::Inode,
        from: u64,
        to: u64,
    ) -> Result<String> {
        let (name, copy) = self.make_file(shadow, "data")?;
        let copied = self
            .lower
            .base
            .open(inode, Access::Read)
            .and_then(|source| {
                copy_with_holes(&self.lower.base, &source, &copy, from..to)?;
                self.lower.base.sync(&copy, false)
            });
        match copied {
            Ok(()) => Ok(name),
            Err(errno) => {
                let _ = self.lower.base.unlink(&shadow.saved, OsStr::new(&name));
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
                .lower
                .base
                .create(&staging::own(), &shadow.saved, OsStr::new(&name), 0o600)
            {
                Ok((_, file, _)) => return Ok((name, file)),
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Puts a log in its place, durably; false where there is one.
    fn publish_log(&self, shadow: &Shadow<B>, log: &ChangeLog, name: &str) -> Result<bool> {
        let (new, file) = self.make_file(shadow, "new")?;
        let written = staging::write_all(&self.lower.base, &file, &log.encode(), 0)
            .and_then(|()| self.lower.base.sync(&file, false))
            .and_then(|()| self.name_log(shadow, &new, name));
        if written != Ok(true) {
            let _ = self.lower.base.unlink(&shadow.saved, OsStr::new(&new));
        }
        let is_mine = written?;
        self.lower.base.sync_dir(&shadow.saved)?;
        Ok(is_mine)
    }

    /// Gives a file its name, if no other has it.
    fn name_log(&self, shadow: &Shadow<B>, new: &str, name: &str) -> Result<bool> {
        let dir = &shadow.saved;
        let new = OsStr::new(new);
        let name = OsStr::new(name);
        let named = match self
            .lower
            .base
            .rename(dir, new, dir, name, RenameFlags::NOREPLACE)
        {
            // Not every file system can do this; a link replaces nothing on any.
            Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => {
                let (inode, _) = self.lower.base.lookup(dir, new)?;
                self.lower
                    .base
                    .link(&inode, dir, name)
                    .and_then(|_| self.lower.base.unlink(dir, new))
            }
            other => other,
        };
        match named {
            Ok(()) => Ok(true),
            Err(Errno::EXIST) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    fn is_published(&self, shadow: &Shadow<B>, name: &str) -> bool {
        !matches!(
            staging::find(&self.lower.base, &shadow.saved, OsStr::new(name)),
            Ok(None)
        )
    }
}

/// The log that says what undoes changes of one object.
fn log_of<B: Backing>(scope: &Scope<B>, object: &Arc<Object<B>>, undo: EntrySide) -> ChangeLog {
    let ino = object.key.1;
    let identity = Identity {
        ino,
        elsewhere: false,
    };
    let entry = Entry {
        path: path(scope, object),
        undo,
        ..Entry::new(ino, identity, object.kind == Kind::Dir)
    };
    ChangeLog {
        scope: scope.path.clone(),
        can_be_undone: true,
        entries: vec![entry],
        ..ChangeLog::default()
    }
}

/// The way from the scope's top down to an object.
fn path<B: Backing>(scope: &Scope<B>, object: &Arc<Object<B>>) -> Vec<Link> {
    let mut path = Vec::new();
    let mut at = Arc::clone(object);
    while !Arc::ptr_eq(&at, &scope.root) {
        let Some((parent, name)) = at.location.lock().clone() else {
            break;
        };
        path.push((name.as_bytes().to_vec(), at.key.1));
        at = parent;
    }
    path.reverse();
    path
}
