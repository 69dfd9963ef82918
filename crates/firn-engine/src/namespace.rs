//! Names, attributes, directories: passed to the backing, with pending data counted in.

use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::{
    Attr, Backing, Caller, DirEntry, Errno, Kind, NewKind, RenameFlags, SetTime, StatFs, Time,
};
use firn_format::durability::DurabilityLevel;
use firn_format::record::Record;

use crate::engine::Engine;
use crate::file::File;
use crate::names::Inode;
use crate::size::whole_size;
use crate::{Entry, HandleId, InodeId, Principal, Result, SetAttr};

impl<B: Backing> Engine<B> {
    // ---- attributes --------------------------------------------------------------------------

    /// Resolves a name; the inode's lookup count goes up by one.
    pub fn lookup(&self, parent: InodeId, name: &OsStr) -> Result<Entry> {
        let dir = self.inode(parent)?;
        loop {
            let before = self.names.changes();
            let found = self.with_descriptor(|| self.backing.lookup(&self.object(&dir)?, name));
            let (object, attr) = found?;
            let inode = self.names.register(object, &attr, &dir, name, 1);
            if self.is_name_current(before, &dir, name, &inode) {
                return Ok(Entry {
                    inode: inode.id,
                    attr: self.overlay(&inode, attr)?,
                });
            }
            self.names.forget(inode.id, 1);
        }
    }

    /// Whether a name that was entered for `inode` counts: either no names changed below the engine since `before`
    /// was read, and the next such change will find this one, or the name leads to the inode all the same.
    fn is_name_current(
        &self,
        before: u64,
        dir: &Arc<Inode<B>>,
        name: &OsStr,
        inode: &Inode<B>,
    ) -> bool {
        self.names.changes() == before || !self.drop_wrong_name(dir, name, inode)
    }

    /// The kernel drops `count` references to an inode.
    pub fn forget(&self, inode: InodeId, count: u64) {
        self.names.forget(inode, count);
    }

    /// Attributes.
    pub fn attr(&self, inode: InodeId, _handle: Option<HandleId>) -> Result<Attr> {
        let inode = self.inode(inode)?;
        self.attr_of(&inode)
    }

    fn attr_of(&self, inode: &Arc<Inode<B>>) -> Result<Attr> {
        let attr = self.with_descriptor(|| self.backing.attr(&self.object(inode)?))?;
        self.overlay(inode, attr)
    }

    /// Counts pending data in. What is pending is looked at first and the backing afterwards, again
    /// if need be: a drain between the two must not make the file look short.
    fn overlay(&self, inode: &Arc<Inode<B>>, attr: Attr) -> Result<Attr> {
        let Some(file) = (inode.kind == Kind::File)
            .then(|| self.known_file(inode))
            .flatten()
        else {
            return Ok(attr);
        };
        let (pending, end, mtime) = {
            let mut state = file.lock();
            self.ingest_published(&file, &mut state);
            (
                state.pending.bytes(),
                state.pending.end(),
                state.pending.mtime(),
            )
        };
        let object = self.object(inode)?;
        let mut attr = self.backing.attr(&object)?;
        self.see_changes_by_others(inode, &object);
        self.end_lists_before_changes(&file, &object);
        self.see_privileges(&file, &attr);
        if pending == 0 {
            return Ok(attr);
        }
        attr.size = whole_size(&attr, end);
        // Programs take a file of no blocks for one hole.
        attr.blocks += pending.div_ceil(512);
        if let Some(mtime) = mtime {
            attr.mtime = mtime;
            attr.ctime = attr.ctime.max(mtime);
        }
        Ok(attr)
    }

    /// Sets attributes and returns all of them. `by`: whose call it is, which takes privileges of the object away.
    pub fn set_attr(
        &self,
        inode: InodeId,
        set: SetAttr,
        by: Option<&dyn Principal>,
    ) -> Result<Attr> {
        let inode = self.inode(inode)?;
        if let Some(by) = by.filter(|_| set.is_empty()) {
            // Before the kernel changes contents by itself (passthrough), and for set-group-id without group execute.
            self.drop_privileges(inode.id, by)?;
        }
        if let Some(size) = set.size {
            let file = self.file_with(&inode, |_| {});
            let dropped = by.map_or(Ok(()), |by| self.drop_privileges_of(&file, by));
            let result = dropped.and_then(|()| self.truncate_file(&file, size));
            self.drop_if_unused(&file);
            result?;
        }
        if (set.mode.is_some() || set.uid.is_some() || set.gid.is_some())
            && let Some(file) = self.known_file(&inode)
        {
            // Set-id bits must go with the next write, which only the kernel's way can do.
            self.end_grant(&file);
            self.open_before_mode_change(&file);
        }
        let changes_owner = set.uid.is_some() || set.gid.is_some();
        if changes_owner {
            self.set_owner(&inode, (set.uid, set.gid), by)?;
        }
        match set.mode {
            Some(mode) if by.is_some() && (changes_owner || set.size.is_some()) => {
                self.set_mode_besides(&inode, mode)?;
            }
            Some(mode) => self.set_mode(&inode, mode, by)?,
            None => {}
        }
        if set.atime != SetTime::Keep || set.mtime != SetTime::Keep {
            self.set_times(&inode, set.atime, set.mtime)?;
        }
        self.attr_of(&inode)
    }

    fn set_times(&self, inode: &Arc<Inode<B>>, atime: SetTime, mtime: SetTime) -> Result<()> {
        let Some(file) = self.known_file(inode) else {
            return self.backing.set_times(&self.object(inode)?, atime, mtime);
        };
        let time = match mtime {
            SetTime::Keep => None,
            SetTime::Now => Some(Time::now()),
            SetTime::At(time) => Some(time),
        };
        let before = self.expect_mtime(&file, time);
        let result = self
            .object(inode)
            .and_then(|object| self.backing.set_times(&object, atime, mtime));
        let mut state = file.lock();
        if result.is_ok() {
            state.cache.trust();
        }
        // A write since then has a later time of its own.
        if time.is_some() && !state.pending.is_empty() && state.pending.mtime() == time {
            match &result {
                Ok(()) => self.journal.record_time(&state),
                Err(_) => state.pending.set_mtime(before),
            }
        }
        result
    }

    /// Before a time is set in the backing: a drain that ends meanwhile puts this one there too, and not an older
    /// one. Returns what it replaces.
    fn expect_mtime(&self, file: &Arc<File<B>>, time: Option<Time>) -> Option<Time> {
        let mut state = file.lock_to_set_times();
        self.ingest_published(file, &mut state);
        if time.is_some() {
            // What the client writes from here on has to be told from what it wrote before: by its next lease.
            self.revoke_grant(file, &mut state);
        }
        let before = state.pending.mtime();
        if time.is_some() && !state.pending.is_empty() {
            state.pending.set_mtime(time);
        }
        before
    }

    /// What all bytes of an inode survive.
    pub fn state_of(&self, inode: InodeId) -> Result<DurabilityLevel> {
        let inode = self.inode(inode)?;
        let pending = self.known_file(&inode).and_then(|file| {
            let mut state = file.lock();
            self.ingest_published(&file, &mut state);
            (!state.pending.is_empty()).then(|| state.level_of_pending(&self.arena))
        });
        Ok(if let Some(level) = pending {
            level
        } else if self.is_logged(&inode) {
            DurabilityLevel::Logged
        } else if inode.is_durable() {
            DurabilityLevel::Durable
        } else {
            DurabilityLevel::Drained
        })
    }

    /// Whether bytes of it are in logs.
    pub(crate) fn is_logged(&self, inode: &Inode<B>) -> bool {
        let asks = || {
            self.object(inode)
                .map(|object| self.backing.is_logged(&object))
        };
        self.backing.features().finishes_files && asks().unwrap_or(false)
    }

    // ---- names -------------------------------------------------------------------------------

    /// Enters an object that was just made. ESTALE where it is gone with its transaction already: the kernel then
    /// looks the path up anew.
    pub(crate) fn register_created(
        &self,
        before: u64,
        dir: &Arc<Inode<B>>,
        name: &OsStr,
        object: B::Inode,
        attr: &Attr,
    ) -> Result<Arc<Inode<B>>> {
        let inode = self.names.register(object, attr, dir, name, 1);
        if !self.is_name_current(before, dir, name, &inode) {
            self.names.forget(inode.id, 1);
            return Err(Errno::STALE);
        }
        inode.name_unsynced.store(true, Ordering::Release);
        Ok(inode)
    }

    /// mkdir(2).
    pub fn mkdir(
        &self,
        caller: &Caller,
        parent: InodeId,
        name: &OsStr,
        mode: u32,
    ) -> Result<Entry> {
        let dir = self.inode(parent)?;
        let before = self.names.changes();
        let (object, attr) =
            self.with_descriptor(|| self.backing.mkdir(caller, &self.object(&dir)?, name, mode))?;
        let inode = self.register_created(before, &dir, name, object, &attr)?;
        Ok(Entry {
            inode: inode.id,
            attr,
        })
    }

    /// mknod(2).
    pub fn mknod(
        &self,
        caller: &Caller,
        parent: InodeId,
        name: &OsStr,
        mode: u32,
        rdev: u64,
    ) -> Result<Entry> {
        let dir = self.inode(parent)?;
        let before = self.names.changes();
        let node = NewKind::Node { mode, rdev };
        let (object, attr) =
            self.with_descriptor(|| self.backing.make(caller, &self.object(&dir)?, name, node))?;
        let inode = self.register_created(before, &dir, name, object, &attr)?;
        Ok(Entry {
            inode: inode.id,
            attr,
        })
    }

    /// symlink(2).
    pub fn symlink(
        &self,
        caller: &Caller,
        parent: InodeId,
        name: &OsStr,
        target: &OsStr,
    ) -> Result<Entry> {
        let dir = self.inode(parent)?;
        let before = self.names.changes();
        let (object, attr) = self.with_descriptor(|| {
            self.backing
                .symlink(caller, &self.object(&dir)?, name, target)
        })?;
        let inode = self.register_created(before, &dir, name, object, &attr)?;
        Ok(Entry {
            inode: inode.id,
            attr,
        })
    }

    /// link(2): one more name for an inode; its pending data stays one.
    pub fn link(&self, inode: InodeId, parent: InodeId, name: &OsStr) -> Result<Entry> {
        let inode = self.inode(inode)?;
        let dir = self.inode(parent)?;
        let _path_stays = self.paths.stay(|| dir.path_of(name).into_iter().collect());
        // The new name leads to this very object: it need not be looked up.
        let object = self.object(&inode)?;
        let attr = self.backing.link(&object, &self.object(&dir)?, name)?;
        let linked = self.names.register(object, &attr, &dir, name, 1);
        linked.name_unsynced.store(true, Ordering::Release);
        if let Some(file) = self.known_file(&linked) {
            let mut state = file.lock();
            state.unlinked = false;
            if let Some(file_id) = state.pending.file_id()
                && let Some(path) = dir.path_of(name)
            {
                // Kept or the name must not be relied on: a full journal fails the next removal instead.
                self.journal.append_note(&Record::NameAdded {
                    file: file_id.get(),
                    path,
                });
            }
        }
        Ok(Entry {
            inode: linked.id,
            attr: self.overlay(&linked, attr)?,
        })
    }

    /// unlink(2).
    pub fn unlink(&self, parent: InodeId, name: &OsStr) -> Result<()> {
        let dir = self.inode(parent)?;
        let _path_stays = self.paths.stay(|| dir.path_of(name).into_iter().collect());
        let file = self.prepare_name_removal(&dir, name)?;
        let parent = self.object(&dir)?;
        self.with_descriptor(|| self.names.hold_last(&self.backing, dir.id, name))?;
        self.backing.unlink(&parent, name)?;
        self.names.unlinked(dir.id, name);
        if let Some(file) = file {
            self.note_removed_name(&file);
        }
        Ok(())
    }

    /// The file that is about to lose a name, prepared for that.
    fn prepare_name_removal(
        &self,
        dir: &Arc<Inode<B>>,
        name: &OsStr,
    ) -> Result<Option<Arc<File<B>>>> {
        let Some(inode) = self.names.child(dir.id, name) else {
            return Ok(None);
        };
        let Some(file) = self.known_file(&inode) else {
            return Ok(None);
        };
        if let Some(path) = dir.path_of(name) {
            self.record_name_removal(&file, path)?;
        }
        Ok(Some(file))
    }

    /// Makes sure that recovery finds a file with pending data without this name: by the others that
    /// are known here, some of which the kernel may have looked up only after the file got its id. If
    /// there is another name and none is known, the data is drained first.
    fn record_name_removal(&self, file: &Arc<File<B>>, path: Vec<u8>) -> Result<()> {
        let file_id = {
            let mut state = file.lock();
            self.ingest_published(file, &mut state);
            state
                .pending
                .file_id()
                .filter(|_| !state.pending.is_empty() || state.direct.has_grant())
        };
        let Some(file_id) = file_id else {
            return Ok(());
        };
        let others: Vec<Vec<u8>> = file
            .inode
            .paths()
            .into_iter()
            .filter(|known| *known != path)
            .collect();
        if others.is_empty() && self.backing.attr(&self.object(&file.inode)?)?.nlink > 1 {
            self.end_grant(file);
            return self.drain_and_wait(file);
        }
        let file = file_id.get();
        let added = others
            .into_iter()
            .map(|path| Record::NameAdded { file, path });
        let removed = Record::NameRemoved { file, path };
        self.journal.append_all(added.chain([removed]))
    }

    /// A name of this file is gone. Without name and handle its pending data is of no use to anyone.
    fn note_removed_name(&self, file: &Arc<File<B>>) {
        let gone = match self
            .object(&file.inode)
            .and_then(|object| self.backing.attr(&object))
        {
            Ok(attr) => attr.nlink == 0,
            // Where the backing cannot say, its data is kept.
            Err(errno) => matches!(errno, Errno::STALE | Errno::NOENT),
        };
        if !gone {
            return;
        }
        let unused = {
            let mut state = file.lock();
            state.unlinked = true;
            state.opens.is_empty()
        };
        if !unused {
            // It keeps what it has open from here on.
            self.open_nameless(file);
        }
        if unused {
            self.discard(file);
            self.drop_if_unused(file);
            self.wake_writers();
        }
    }

    /// rmdir(2).
    pub fn rmdir(&self, parent: InodeId, name: &OsStr) -> Result<()> {
        let dir = self.inode(parent)?;
        let parent = self.object(&dir)?;
        self.with_descriptor(|| self.names.hold_last(&self.backing, dir.id, name))?;
        self.backing.rmdir(&parent, name)?;
        self.names.unlinked(dir.id, name);
        Ok(())
    }

    /// renameat2(2).
    pub fn rename(
        &self,
        parent: InodeId,
        name: &OsStr,
        new_parent: InodeId,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> Result<()> {
        let dir = self.inode(parent)?;
        let new_dir = self.inode(new_parent)?;
        let exchange = flags.contains(RenameFlags::EXCHANGE);
        let from = self.object(&dir)?;
        let to = self.object(&new_dir)?;
        let both = || {
            [dir.path_of(name), new_dir.path_of(new_name)]
                .into_iter()
                .flatten()
                .collect()
        };
        let _paths_change = self.paths.change(both);
        let moved = self.names.child(dir.id, name);
        let target = self.names.child(new_dir.id, new_name);
        if moved.is_some_and(|a| target.is_some_and(|b| Arc::ptr_eq(&a, &b))) {
            // Two names of one file: nothing changes, whatever the backing says.
            return self.backing.rename(&from, name, &to, new_name, flags);
        }
        let replaced = match exchange {
            true => None,
            false => self
                .names
                .child(new_dir.id, new_name)
                .and_then(|inode| self.known_file(&inode)),
        };
        if let Some(file) = &replaced
            && let Some(path) = new_dir.path_of(new_name)
        {
            self.record_name_removal(file, path)?;
        }
        if !exchange {
            self.with_descriptor(|| self.names.hold_last(&self.backing, new_dir.id, new_name))?;
        }
        let id = self.journal.new_rename_id();
        let journaled = !self.journal.is_empty();
        if journaled {
            let paths = (dir.path_of(name), new_dir.path_of(new_name));
            let (Some(old), Some(new)) = paths else {
                return Err(Errno::STALE);
            };
            let record = Record::RenameBegin {
                id,
                from: old,
                to: new,
                exchange,
            };
            self.journal.append(&record)?;
        }
        let result = self
            .names
            .rename((&dir, name), (&new_dir, new_name), exchange, || {
                self.backing.rename(&from, name, &to, new_name, flags)
            });
        if journaled {
            self.journal.append_end(&Record::RenameEnd {
                id,
                done: result.is_ok(),
            });
        }
        result?;
        if let Some(file) = replaced {
            self.note_removed_name(&file);
        }
        Ok(())
    }

    /// readlink(2).
    pub fn readlink(&self, inode: InodeId) -> Result<Vec<u8>> {
        self.backing.readlink(&self.object_of(inode)?)
    }

    // ---- extended attributes -----------------------------------------------------------------

    /// getxattr(2).
    pub fn get_xattr(&self, inode: InodeId, name: &OsStr) -> Result<Vec<u8>> {
        self.backing.get_xattr(&self.object_of(inode)?, name)
    }
    /// setxattr(2).
    pub fn set_xattr(
        &self,
        inode: InodeId,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        by: Option<&dyn Principal>,
    ) -> Result<()> {
        let inode = self.inode(inode)?;
        // It may be one that a write through the kernel takes away, or an ACL.
        if let Some(file) = self.known_file(&inode) {
            self.end_grant(&file);
            self.open_before_mode_change(&file);
        }
        self.set_xattr_of(&inode, (name, value, flags), by)
    }
    /// listxattr(2).
    pub fn list_xattr(&self, inode: InodeId) -> Result<Vec<u8>> {
        self.backing.list_xattr(&self.object_of(inode)?)
    }
    /// removexattr(2).
    pub fn remove_xattr(&self, inode: InodeId, name: &OsStr) -> Result<()> {
        self.backing.remove_xattr(&self.object_of(inode)?, name)
    }

    // ---- directories -------------------------------------------------------------------------

    /// opendir(3).
    pub fn open_dir(&self, inode: InodeId) -> Result<HandleId> {
        let dir = self.with_descriptor(|| self.backing.open_dir(&self.object_of(inode)?))?;
        Ok(self.handles.insert_dir(dir))
    }
    /// Reads entries from `cookie` on until `sink` returns false or the directory ends.
    pub fn read_dir(
        &self,
        handle: HandleId,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()> {
        let dir = self.handles.dir(handle)?;
        self.backing.read_dir(&dir, cookie, sink)
    }
    /// closedir(3).
    pub fn release_dir(&self, handle: HandleId) {
        self.handles.remove_dir(handle);
    }

    /// statvfs(3) of the backing.
    pub fn statfs(&self) -> Result<StatFs> {
        self.backing.statfs()
    }
}
