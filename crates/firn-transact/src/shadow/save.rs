//! [`Originals`]: saves the old state of an object durably, before its first change in shadow mode.
//!
//! In *shadow mode* a transaction's changes go to the backing (the directory below the mount) at once; an abort
//! restores the saved state. In *buffer mode* they are kept back until the commit, and nothing is saved.
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
use crate::claim::ExclusiveValue;
use crate::copy::copy_with_holes;
use crate::lower_backing::LowerBacking;
use crate::object::{Object, ObjectState};
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

    /// Prepares a change of an object, which may change its bytes from `from_offset` on. `scope` is the transaction
    /// that covers the object; `None` outside of transactions.
    ///
    /// Returns the transaction if it is in buffer mode, which means that it must get the change. Returns `None` if the
    /// change goes to the backing at once: outside of transactions, and in shadow mode after the old state was saved.
    pub(crate) fn save_unless_buffering(
        &self,
        scope: Option<Arc<Scope<B>>>,
        object: &Arc<Object<B>>,
        from_offset: u64,
    ) -> Result<Option<Arc<Scope<B>>>> {
        if let Some(scope) = &scope
            && let Some(shadow) = &scope.shadow
        {
            self.save_object(scope, shadow, object, from_offset)?;
            return Ok(None);
        }
        Ok(scope)
    }

    /// Saves the old state of an object of the backing durably, including its bytes from `from_offset` on, unless they
    /// are saved already. An abort of the transaction restores them.
    ///
    /// `shadow` has the state that is saved so far. Several hosts may save the same object; the first log counts. Fails
    /// with EXDEV if the object is on another device.
    pub(super) fn save_object(
        &self,
        scope: &Scope<B>,
        shadow: &Shadow<B>,
        object: &Arc<Object<B>>,
        from_offset: u64,
    ) -> Result<()> {
        let ino = object.key.ino;
        let known_state = || shadow.save_states.lock().get(&ino).copied();
        if known_state().is_some_and(|state| state.covers(from_offset)) {
            return Ok(());
        }
        if object.key.dev != shadow.dev {
            return Err(Errno::XDEV);
        }
        // Exclusive use of the object excludes other threads that save it. All writes of the object have ended then, so
        // the copied bytes do not change meanwhile.
        let claimed = object.state.acquire_exclusive();
        // An object without names belongs to no transaction any more.
        if object.is_nameless() {
            return Ok(());
        }
        // Another thread may have saved the object before the state was acquired.
        let known = known_state();
        let state = self.save_from(scope, shadow, object, &claimed, known, from_offset)?;
        shadow.save_states.lock().insert(ino, state);
        if object.kind == Kind::Dir {
            shadow.saved_dirs.lock().insert(ino, Arc::clone(object));
        }
        Ok(())
    }

    /// Saves an object until its bytes from `from_offset` on are saved, here or by other hosts. Returns how much is
    /// saved then; `known` says how much was known to be saved before.
    fn save_from(
        &self,
        scope: &Scope<B>,
        shadow: &Shadow<B>,
        object: &Arc<Object<B>>,
        claimed: &ExclusiveValue<'_, ObjectState<B>>,
        known: Option<SaveState>,
        from_offset: u64,
    ) -> Result<SaveState> {
        let mut saved = known;
        loop {
            if let Some(state) = saved
                && state.covers(from_offset)
            {
                return Ok(state);
            }
            let saved_by_others = self.read_logs_of_others(shadow, object.key.ino, saved)?;
            if saved_by_others.is_some() {
                // The logs that were just read may not be durable yet.
                self.lower.base.sync_dir(&shadow.saved)?;
                saved = saved_by_others;
                continue;
            }
            let inode = claimed.base().ok_or(Errno::STALE)?;
            let saved_here =
                self.save_next_log(scope, shadow, object, &inode, saved, from_offset)?;
            // `None` means that another host published the log first. The next round reads that log.
            saved = saved_here.or(saved);
        }
    }

    /// Finds out how much of an object's old state other hosts of the transaction have saved, or an earlier firnd
    /// (server of the mount). Returns `None` if that is no more than `known`.
    ///
    /// Reads the logs `saved/INO.0`, `saved/INO.1` and so on that follow those in `known`. The bytes of a file are
    /// saved from `saved_from` to the old end (`size`), and each further log lowers `saved_from`.
    fn read_logs_of_others(
        &self,
        shadow: &Shadow<B>,
        ino: u64,
        known: Option<SaveState>,
    ) -> Result<Option<SaveState>> {
        let (mut size, mut saved_from, known_count) = match known {
            Some(SaveState::Saved {
                size,
                saved_from,
                log_count,
            }) => (size, saved_from, log_count),
            // Nothing is known, so the logs are read from log 0 on, which sets size and offset.
            _ => (0, 0, 0),
        };
        let mut log_count = known_count;
        loop {
            let name = format!("{ino}.{log_count}");
            let Some(bytes) = staging::read_file(&self.lower.base, &shadow.saved, &name)? else {
                break;
            };
            let log = ChangeLog::decode(&bytes).map_err(|_| Errno::IO)?;
            for entry in &log.entries {
                let Some(data) = &entry.undo.data else {
                    continue;
                };
                size = data.size;
                // Log 0 may have no range: then no bytes of the file are saved, only its size.
                if log_count == 0 {
                    saved_from = size;
                }
                // A log has one range at most: the bytes before those that earlier logs saved.
                if let Some(range) = data.written.first() {
                    saved_from = range.start;
                }
            }
            log_count += 1;
        }
        if log_count == known_count {
            return Ok(None);
        }
        Ok(Some(SaveState::Saved {
            size,
            saved_from,
            log_count,
        }))
    }

    /// Saves the bytes of an object from `from_offset` on, which `known` does not have, and publishes the next log of
    /// the object. Returns the new state, or `None` if another host has published that log first.
    fn save_next_log(
        &self,
        scope: &Scope<B>,
        shadow: &Shadow<B>,
        object: &Arc<Object<B>>,
        inode: &B::Inode,
        known: Option<SaveState>,
        from_offset: u64,
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
        let mut copy = None;
        if object.kind == Kind::File {
            if from_offset < saved_from {
                let start = first_offset_to_save(from_offset, log_count);
                let name = self.copy_bytes(shadow, inode, start..saved_from)?;
                copy = Some(CopiedBytes { start, name });
            }
            let written = copy.iter().map(|copy| WrittenRange {
                start: copy.start,
                end: saved_from,
                source: BytesSource::File(StagedPath {
                    dir: SAVED.to_owned(),
                    name: copy.name.clone(),
                }),
            });
            undo_side.data = Some(DataChange {
                cut: size,
                size,
                written: written.collect(),
                grows: false,
            });
        }
        let log_name = format!("{}.{log_count}", object.key.ino);
        let published = self.publish_log(shadow, &undo_log(scope, object, undo_side), &log_name);
        if let (Some(copy), Err(_) | Ok(false)) = (&copy, &published) {
            // No log refers to the copy, so it is removed. If only the sync failed, the log exists and needs the copy.
            let is_unused = matches!(published, Ok(false)) || !self.is_published(shadow, &log_name);
            if is_unused {
                let _ = self
                    .lower
                    .base
                    .unlink(&shadow.saved, OsStr::new(&copy.name));
            }
        }
        if !published? {
            return Ok(None);
        }
        Ok(Some(SaveState::Saved {
            size,
            saved_from: copy.map_or(saved_from, |copy| copy.start),
            log_count: log_count + 1,
        }))
    }

    /// Returns the attributes of an object, with the names in a directory, and the size of the object.
    fn read_original(&self, object: &Arc<Object<B>>, inode: &B::Inode) -> Result<(EntrySide, u64)> {
        let attr = self.lower.base.attr(inode)?;
        let names = match object.kind {
            Kind::Dir => Some(self.list_names(object, inode)?),
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
    fn list_names(&self, dir: &Arc<Object<B>>, inode: &B::Inode) -> Result<Vec<Link>> {
        let is_backing_top = dir.parent().is_none();
        let mut names = Vec::new();
        for (name, ino, _) in staging::list(&self.lower.base, inode)? {
            let is_private_dir = is_backing_top && name == staging::FIRN_DIR.as_bytes();
            if !is_private_dir {
                names.push((name, ino));
            }
        }
        Ok(names)
    }

    /// Copies a range of the old bytes of `inode` to a new file in `saved/`, the directory of saved states, and returns
    /// the name of that file. The bytes are durable then; the name becomes durable when the log that refers to it is
    /// published.
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
                // If the file remains, no log refers to it.
                let _ = self.lower.base.unlink(&shadow.saved, OsStr::new(&name));
                Err(errno)
            }
        }
    }

    /// Makes a new file in `saved/`, the directory of saved states, with a name that begins with `prefix` and that no
    /// other host of the transaction uses.
    fn make_file(&self, shadow: &Shadow<B>, prefix: &str) -> Result<(String, B::File)> {
        loop {
            let number = shadow.last_file_number.fetch_add(1, Ordering::Relaxed) + 1;
            let name = format!("{prefix}-{number}");
            let created = self.lower.base.create(
                &staging::daemon_caller(),
                &shadow.saved,
                OsStr::new(&name),
                0o600,
            );
            match created {
                Ok((_, file, _)) => return Ok((name, file)),
                // Another host uses this name.
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Publishes a log under `name`, durably. Returns false if there is a log of that name already.
    fn publish_log(&self, shadow: &Shadow<B>, log: &ChangeLog, name: &str) -> Result<bool> {
        let (temporary_name, file) = self.make_file(shadow, "new")?;
        let published = staging::write_all(&self.lower.base, &file, &log.encode(), 0)
            .and_then(|()| self.lower.base.sync(&file, false))
            .and_then(|()| self.rename_log(shadow, &temporary_name, name));
        if published != Ok(true) {
            let _ = self
                .lower
                .base
                .unlink(&shadow.saved, OsStr::new(&temporary_name));
        }
        let is_published = published?;
        self.lower.base.sync_dir(&shadow.saved)?;
        Ok(is_published)
    }

    /// Publishes a saved state: renames a file in `saved/` from `temporary_name` to `name`. Returns false if `name`
    /// exists already, because another host of the transaction was first.
    fn rename_log(&self, shadow: &Shadow<B>, temporary_name: &str, name: &str) -> Result<bool> {
        let base = &self.lower.base;
        let dir = &shadow.saved;
        let temporary_name = OsStr::new(temporary_name);
        let name = OsStr::new(name);
        let renamed = match base.rename(dir, temporary_name, dir, name, RenameFlags::NOREPLACE) {
            // The file system has no rename that replaces nothing. A link never replaces a name.
            Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => {
                let (inode, _) = base.lookup(dir, temporary_name)?;
                base.link(&inode, dir, name)
                    .and_then(|_| base.unlink(dir, temporary_name))
            }
            renamed => renamed,
        };
        match renamed {
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

/// Bytes of a file that were copied to a new file in `saved/`.
struct CopiedBytes {
    /// Offset of the first copied byte.
    start: u64,
    /// Name of the copy.
    name: String,
}

/// Returns the offset from which on the log after `log_count` logs saves the bytes of a file, so that the bytes from
/// `from` on may change.
fn first_offset_to_save(from: u64, log_count: u32) -> u64 {
    let is_last_log = log_count + 1 >= LOGS_MAX;
    if is_last_log {
        0
    } else {
        from - from % ALIGNMENT_BYTES
    }
}

/// Returns a change log that restores the old state `undo` of one object. The object is found by its path below the
/// directory that the transaction `scope` covers.
fn undo_log<B: Backing>(scope: &Scope<B>, object: &Arc<Object<B>>, undo: EntrySide) -> ChangeLog {
    let ino = object.key.ino;
    let identity = Identity {
        ino,
        // Objects on another device are never saved.
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
        path.push((name.as_bytes().to_vec(), current.key.ino));
        current = parent;
    }
    path.reverse();
    path
}
