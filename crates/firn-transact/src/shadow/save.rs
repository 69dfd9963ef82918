//! [`Originals`]: saves the old state of an object durably, before its first change in shadow mode.
//!
//! The state is saved as numbered logs, `saved/INO.0`, `saved/INO.1` and so on ([`super`]). Log 0 has the attributes.
//! Each further log adds bytes of the file, from a lower offset up to the lowest offset that is saved already.
//!
//! Race: several hosts may save the same object at the same time. A log is published with a rename or link that
//! replaces nothing, so one host wins. The other one reads the published log and continues after it. It syncs `saved/`
//! first, because the winner may not have done so yet.

use std::ffi::OsStr;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::{Access, Backing, Errno, Kind, RenameFlags, Result};

use super::{SAVED, SaveState, Shadow};
use crate::change_log::{
    BytesSource, ChangeLog, DataChange, Entry, EntrySide, Identity, Link, StagedPath, WrittenRange,
};
use crate::copy::copy_with_holes;
use crate::lower_backing::LowerBacking;
use crate::object::Object;
use crate::scope::Scope;
use crate::staging;

/// Maximum number of logs of a file. The last log saves all remaining bytes. Without a maximum, a program that writes
/// from the end of a file to its start would wait for a sync at each write.
const LOGS_MAX: u32 = 4;
/// Saved ranges start at a multiple of this size in bytes, so that the backing can share blocks instead of copying.
const ALIGNMENT_BYTES: u64 = 4096;

/// Saves the state of objects before a transaction in shadow mode changes them.
pub(crate) struct Originals<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
}

impl<B: Backing> Originals<B> {
    pub(crate) fn new(lower: &Arc<LowerBacking<B>>) -> Self {
        Self {
            lower: Arc::clone(lower),
        }
    }

    /// Prepares a change of an object, whose bytes from `from` on may change. `scope` is the transaction that has the
    /// object.
    ///
    /// Returns the scope of a transaction in buffer mode, which must get the change. Returns `None` if the change goes
    /// to the backing at once: outside of transactions, and in shadow mode after the old state was saved.
    pub(crate) fn buffering_scope(
        &self,
        scope: Option<Arc<Scope<B>>>,
        object: &Arc<Object<B>>,
        from: u64,
    ) -> Result<Option<Arc<Scope<B>>>> {
        if let Some(scope) = &scope
            && let Some(shadow) = &scope.shadow
        {
            self.save_object(scope, shadow, object, from)?;
            return Ok(None);
        }
        Ok(scope)
    }

    /// Saves the old state of an object durably, including its bytes from `from` on, unless they are saved already.
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
                .save_states
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
        // The claim excludes other threads that save the object. To own it, this thread waits until all writes of the
        // object have ended, so the copied bytes do not change meanwhile.
        let inner = object.inner.own();
        if object.is_nameless() {
            return Ok(());
        }
        let mut known = shadow.save_states.lock().get(&ino).copied();
        while !known.is_some_and(|known| known.covers(from)) {
            let saved_by_others = self.read_logs_of_others(shadow, ino, known)?;
            if saved_by_others.is_some() {
                // Another host has published these logs. They may not be durable yet.
                self.lower.base.sync_dir(&shadow.saved)?;
                known = saved_by_others;
                continue;
            }
            let inode = inner.base().ok_or(Errno::STALE)?;
            let saved_here = self.save_next_log(scope, shadow, object, &inode, known, from)?;
            // `None` means that another host published the log first. The next round reads that log.
            known = saved_here.or(known);
        }
        shadow
            .save_states
            .lock()
            .insert(ino, known.expect("the loop ends when the bytes are saved"));
        if object.kind == Kind::Dir {
            shadow.dirs.lock().insert(ino, Arc::clone(object));
        }
        Ok(())
    }

    /// Reads the logs of an object that follow the known ones. Returns `None` if there are none.
    fn read_logs_of_others(
        &self,
        shadow: &Shadow<B>,
        ino: u64,
        known: Option<SaveState>,
    ) -> Result<Option<SaveState>> {
        let (mut size, mut saved_from, first_unknown) = match known {
            Some(SaveState::Saved {
                size,
                saved_from,
                log_count,
            }) => (size, saved_from, log_count),
            _ => (0, 0, 0),
        };
        let mut log_count = first_unknown;
        while let Some(bytes) = staging::read_file(
            &self.lower.base,
            &shadow.saved,
            &format!("{ino}.{log_count}"),
        )? {
            let log = ChangeLog::decode(&bytes).map_err(|_| Errno::IO)?;
            let changes = log
                .entries
                .iter()
                .filter_map(|entry| entry.undo.data.as_ref());
            for data in changes {
                size = data.size;
                // Log 0 saves no bytes of the file, unless it has a range.
                if log_count == 0 {
                    saved_from = size;
                }
                if let Some(range) = data.written.first() {
                    saved_from = range.start;
                }
            }
            log_count += 1;
        }
        Ok((log_count > first_unknown).then_some(SaveState::Saved {
            size,
            saved_from,
            log_count,
        }))
    }

    /// Publishes the next log of an object. Returns `None` if another host has published it first.
    fn save_next_log(
        &self,
        scope: &Scope<B>,
        shadow: &Shadow<B>,
        object: &Arc<Object<B>>,
        inode: &B::Inode,
        known: Option<SaveState>,
        from: u64,
    ) -> Result<Option<SaveState>> {
        // `saved_from` is the lowest offset whose bytes are saved. At first no bytes of a file are saved, so it is the
        // size.
        let (mut undo_side, size, saved_from, log_count) = match known {
            Some(SaveState::Saved {
                size,
                saved_from,
                log_count,
            }) => (EntrySide::default(), size, saved_from, log_count),
            _ => {
                let (undo_side, size) = self.read_original(object, inode)?;
                (undo_side, size, size, 0)
            }
        };
        let mut copied = None;
        if object.kind == Kind::File {
            if from < saved_from {
                let start = if log_count + 1 >= LOGS_MAX {
                    0
                } else {
                    from - from % ALIGNMENT_BYTES
                };
                copied = Some((start, self.copy_bytes(shadow, inode, start..saved_from)?));
            }
            let written = copied.iter().map(|(start, name)| WrittenRange {
                start: *start,
                end: saved_from,
                source: BytesSource::File(StagedPath {
                    dir: SAVED.to_owned(),
                    name: name.clone(),
                }),
            });
            undo_side.data = Some(DataChange {
                cut: size,
                size,
                written: written.collect(),
                grows: false,
            });
        }
        let new_saved_from = copied.as_ref().map_or(saved_from, |(start, _)| *start);
        let name = format!("{}.{log_count}", object.key.1);
        let published = self.publish_log(shadow, &log_of(scope, object, undo_side), &name);
        if let (Some((_, copy)), Err(_) | Ok(false)) = (&copied, &published) {
            // No log refers to the copy, so it is removed. If only the sync failed, the log exists and needs the copy.
            let is_unused = matches!(published, Ok(false)) || !self.is_published(shadow, &name);
            if is_unused {
                let _ = self.lower.base.unlink(&shadow.saved, OsStr::new(copy));
            }
        }
        Ok(published?.then_some(SaveState::Saved {
            size,
            saved_from: new_saved_from,
            log_count: log_count + 1,
        }))
    }

    /// Returns the attributes of an object, with the names in a directory, and the size of the object.
    fn read_original(&self, object: &Arc<Object<B>>, inode: &B::Inode) -> Result<(EntrySide, u64)> {
        let attr = self.lower.base.attr(inode)?;
        let names = match object.kind {
            Kind::Dir => Some(self.names_of(object, inode)?),
            _ => None,
        };
        let undo_side = EntrySide {
            attributes: Some(staging::read_attributes(&self.lower.base, inode, &attr)?),
            names,
            ..EntrySide::default()
        };
        Ok((undo_side, attr.size))
    }

    /// Returns the names in a directory, without `.firn` in the top of the backing.
    fn names_of(&self, dir: &Arc<Object<B>>, inode: &B::Inode) -> Result<Vec<Link>> {
        let is_top = dir.parent().is_none();
        let listed = staging::list(&self.lower.base, inode)?.into_iter();
        let shown = listed.filter(|(name, ..)| !(is_top && name == staging::TOP.as_bytes()));
        Ok(shown.map(|(name, ino, _)| (name, ino)).collect())
    }

    /// Copies a range of bytes to a new file in `saved/`, and returns the name of that file. The bytes are durable
    /// then; the name becomes durable when the log is published.
    fn copy_bytes(
        &self,
        shadow: &Shadow<B>,
        inode: &B::Inode,
        range: Range<u64>,
    ) -> Result<String> {
        let (name, copy) = self.make_file(shadow, "data")?;
        let copied = self
            .lower
            .base
            .open(inode, Access::Read)
            .and_then(|source| {
                copy_with_holes(&self.lower.base, &source, &copy, range)?;
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

    /// Makes a new file in `saved/`, with a name that begins with `prefix` and that no other host uses.
    fn make_file(&self, shadow: &Shadow<B>, prefix: &str) -> Result<(String, B::File)> {
        loop {
            let number = shadow.last_number.fetch_add(1, Ordering::Relaxed) + 1;
            let name = format!("{prefix}-{number}");
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

    /// Publishes a log under `name`, durably. Returns false if there is a log of that name already.
    fn publish_log(&self, shadow: &Shadow<B>, log: &ChangeLog, name: &str) -> Result<bool> {
        let (new, file) = self.make_file(shadow, "new")?;
        let written = staging::write_all(&self.lower.base, &file, &log.encode(), 0)
            .and_then(|()| self.lower.base.sync(&file, false))
            .and_then(|()| self.name_log(shadow, &new, name));
        if written != Ok(true) {
            let _ = self.lower.base.unlink(&shadow.saved, OsStr::new(&new));
        }
        let is_published = written?;
        self.lower.base.sync_dir(&shadow.saved)?;
        Ok(is_published)
    }

    /// Renames a file in `saved/` from `new` to `name`. Returns false if `name` exists already.
    fn name_log(&self, shadow: &Shadow<B>, new: &str, name: &str) -> Result<bool> {
        let dir = &shadow.saved;
        let new = OsStr::new(new);
        let name = OsStr::new(name);
        let named = match self
            .lower
            .base
            .rename(dir, new, dir, name, RenameFlags::NOREPLACE)
        {
            // The file system has no rename that replaces nothing. A link never replaces a name.
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

    /// Returns whether the log `name` exists. An error counts as yes.
    fn is_published(&self, shadow: &Shadow<B>, name: &str) -> bool {
        !matches!(
            staging::find(&self.lower.base, &shadow.saved, OsStr::new(name)),
            Ok(None)
        )
    }
}

/// Returns the log that undoes the changes of one object.
fn log_of<B: Backing>(scope: &Scope<B>, object: &Arc<Object<B>>, undo: EntrySide) -> ChangeLog {
    let ino = object.key.1;
    let identity = Identity {
        ino,
        elsewhere: false,
    };
    let entry = Entry {
        path: path_from_top(scope, object),
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

/// Returns the names from the top of the scope down to an object, each with its inode number.
fn path_from_top<B: Backing>(scope: &Scope<B>, object: &Arc<Object<B>>) -> Vec<Link> {
    let mut path = Vec::new();
    let mut current = Arc::clone(object);
    while !Arc::ptr_eq(&current, &scope.root) {
        let Some((parent, name)) = current.location.lock().clone() else {
            break;
        };
        path.push((name.as_bytes().to_vec(), current.key.1));
        current = parent;
    }
    path.reverse();
    path
}
