//! Names, attributes, directories: passed to the backing, with pending data counted in.

use std::ffi::OsStr;
use std::sync::Arc;

use firn_backing::{
    Attr, Backing, Caller, DirEntry, Errno, Kind, NewKind, RenameFlags, SetTime, StatFs, Time,
    is_below,
};
use firn_format::record::Record;

use crate::base::Base;
use crate::drainer::Drainer;
use crate::exclusive::Exclusive;
use crate::file::File;
use crate::intake::Intake;
use crate::kernel_cache::KernelCache;
use crate::names::{Fingerprint, Inode};
use crate::open_files::OpenFiles;
use crate::privilege_rules::PrivilegeRules;
use crate::size::whole_size;
use crate::space::Room;
use crate::tree::NameTree;
use crate::{Cached, Entry, HandleId, InodeId, Principal, Result, SetAttr};

/// Names, attributes and directories as programs see them.
pub struct Namespace<B: Backing> {
    pub(crate) base: Arc<Base<B>>,
    pub(crate) tree: Arc<NameTree<B>>,
    pub(crate) intake: Arc<Intake<B>>,
    pub(crate) open_files: Arc<OpenFiles<B>>,
    pub(crate) kernel_cache: Arc<KernelCache<B>>,
    pub(crate) room: Arc<Room<B>>,
    pub(crate) drainer: Arc<Drainer<B>>,
    pub(crate) exclusive: Arc<Exclusive<B>>,
    pub(crate) privilege_rules: Arc<PrivilegeRules<B>>,
}

impl<B: Backing> Namespace<B> {
    pub(crate) fn new(privilege_rules: &Arc<PrivilegeRules<B>>) -> Self {
        Self {
            base: Arc::clone(&privilege_rules.base),
            tree: Arc::clone(&privilege_rules.tree),
            intake: Arc::clone(&privilege_rules.intake),
            open_files: Arc::clone(&privilege_rules.open_files),
            kernel_cache: Arc::clone(&privilege_rules.drainer.kernel_cache),
            room: Arc::clone(&privilege_rules.drainer.room),
            drainer: Arc::clone(&privilege_rules.drainer),
            exclusive: Arc::clone(&privilege_rules.exclusive),
            privilege_rules: Arc::clone(privilege_rules),
        }
    }

    /// Resolves a name; the inode's lookup count goes up by one.
    pub fn lookup(&self, parent: InodeId, name: &OsStr) -> Result<Entry> {
        let dir = self.tree.inode(parent)?;
        loop {
            let before = self.tree.names.changes();
            let found = self
                .open_files
                .with_descriptor(|| self.base.backing.lookup(&self.tree.object(&dir)?, name));
            let (object, attr) = found?;
            let inode = self.tree.names.register(object, &attr, &dir, name, 1);
            if self.is_name_current(before, &dir, name, &inode) {
                return Ok(Entry {
                    inode: inode.id,
                    attr: self.overlay(&inode, attr)?,
                });
            }
            self.tree.names.forget(inode.id, 1);
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
        self.tree.names.changes() == before || !self.drop_wrong_name(dir, name, inode)
    }

    /// The kernel drops `count` references to an inode.
    pub fn forget(&self, inode: InodeId, count: u64) {
        self.tree.names.forget(inode, count);
    }

    /// Attributes.
    pub fn attr(&self, inode: InodeId, _handle: Option<HandleId>) -> Result<Attr> {
        let inode = self.tree.inode(inode)?;
        self.attr_of(&inode)
    }

    fn attr_of(&self, inode: &Arc<Inode<B>>) -> Result<Attr> {
        let attr = self
            .open_files
            .with_descriptor(|| self.base.backing.attr(&self.tree.object(inode)?))?;
        self.overlay(inode, attr)
    }

    /// Counts pending data in. What is pending is looked at first and the backing afterwards, again
    /// if need be: a drain between the two must not make the file look short.
    fn overlay(&self, inode: &Arc<Inode<B>>, attr: Attr) -> Result<Attr> {
        let Some(file) = (inode.kind == Kind::File)
            .then(|| self.open_files.known_file(inode))
            .flatten()
        else {
            return Ok(attr);
        };
        let (pending, end, mtime) = {
            let mut state = file.lock();
            self.intake.ingest_published(&file, &mut state);
            (
                state.pending.bytes(),
                state.pending.end(),
                state.pending.mtime(),
            )
        };
        let object = self.tree.object(inode)?;
        let mut attr = self.base.backing.attr(&object)?;
        self.kernel_cache.see_changes_by_others(inode, &object);
        self.intake.end_lists_before_changes(&file, &object);
        self.privilege_rules.see_privileges(&file, &attr);
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
        let inode = self.tree.inode(inode)?;
        if let Some(by) = by.filter(|_| set.is_empty()) {
            // Before the kernel changes contents by itself (passthrough), and for set-group-id without group execute.
            self.privilege_rules.drop_privileges(inode.id, by)?;
        }
        if let Some(size) = set.size {
            let file = self.open_files.file_with(&inode, |_| {});
            let dropped = by.map_or(Ok(()), |by| {
                self.privilege_rules.drop_privileges_of(&file, by)
            });
            let result = dropped.and_then(|()| self.exclusive.truncate_file(&file, size));
            self.open_files.drop_if_unused(&file);
            result?;
        }
        if (set.mode.is_some() || set.uid.is_some() || set.gid.is_some())
            && let Some(file) = self.open_files.known_file(&inode)
        {
            // Set-id bits must go with the next write, which only the kernel's way can do.
            self.intake.end_grant(&file);
            self.open_files.open_before_mode_change(&file);
        }
        let changes_owner = set.uid.is_some() || set.gid.is_some();
        if changes_owner {
            self.privilege_rules
                .set_owner(&inode, (set.uid, set.gid), by)?;
        }
        match set.mode {
            Some(mode) if by.is_some() && (changes_owner || set.size.is_some()) => {
                self.privilege_rules.set_mode_besides(&inode, mode)?;
            }
            Some(mode) => self.privilege_rules.set_mode(&inode, mode, by)?,
            None => {}
        }
        if set.atime != SetTime::Keep || set.mtime != SetTime::Keep {
            self.set_times(&inode, set.atime, set.mtime)?;
        }
        self.attr_of(&inode)
    }

    /// The bytes of the file stay what they are, and what is known of them.
    fn set_times(&self, inode: &Arc<Inode<B>>, atime: SetTime, mtime: SetTime) -> Result<()> {
        let is_as_synced = |synced: &Fingerprint| self.tree.fingerprint(inode) == Ok(*synced);
        let synced = inode.synced.get().filter(is_as_synced);
        self.change_times(inode, atime, mtime)?;
        if let Some(synced) = synced
            && let Ok(now) = self.tree.fingerprint(inode)
        {
            inode.synced.replace(synced, now);
        }
        Ok(())
    }

    fn change_times(&self, inode: &Arc<Inode<B>>, atime: SetTime, mtime: SetTime) -> Result<()> {
        let Some(file) = self.open_files.known_file(inode) else {
            return self
                .base
                .backing
                .set_times(&self.tree.object(inode)?, atime, mtime);
        };
        let time = match mtime {
            SetTime::Keep => None,
            SetTime::Now => Some(Time::now()),
            SetTime::At(time) => Some(time),
        };
        let before = self.expect_mtime(&file, time);
        let result = self
            .tree
            .object(inode)
            .and_then(|object| self.base.backing.set_times(&object, atime, mtime));
        let mut state = file.lock();
        if result.is_ok() {
            state.cache.trust();
        }
        // A write since then has a later time of its own.
        if time.is_some() && !state.pending.is_empty() && state.pending.mtime() == time {
            match &result {
                Ok(()) => self.base.journal.record_time(&state),
                Err(_) => state.pending.set_mtime(before),
            }
        }
        result
    }

    /// Before a time is set in the backing: a drain that ends meanwhile puts this one there too, and not an older
    /// one. Returns what it replaces.
    fn expect_mtime(&self, file: &Arc<File<B>>, time: Option<Time>) -> Option<Time> {
        let mut state = file.lock_to_set_times();
        self.intake.ingest_published(file, &mut state);
        if time.is_some() {
            // What the client writes from here on has to be told from what it wrote before: by its next lease.
            self.intake.revoke_grant(file, &mut state);
        }
        let before = state.pending.mtime();
        if time.is_some() && !state.pending.is_empty() {
            state.pending.set_mtime(time);
        }
        before
    }

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
        let inode = self.tree.names.register(object, attr, dir, name, 1);
        if !self.is_name_current(before, dir, name, &inode) {
            self.tree.names.forget(inode.id, 1);
            return Err(Errno::STALE);
        }
        inode.note_name_change();
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
        let dir = self.tree.inode(parent)?;
        let before = self.tree.names.changes();
        let (object, attr) = self.open_files.with_descriptor(|| {
            self.base
                .backing
                .mkdir(caller, &self.tree.object(&dir)?, name, mode)
        })?;
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
        let dir = self.tree.inode(parent)?;
        let before = self.tree.names.changes();
        let (object, attr) = self.open_files.with_descriptor(|| {
            self.base.backing.make(
                caller,
                &self.tree.object(&dir)?,
                name,
                NewKind::Node { mode, rdev },
            )
        })?;
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
        let dir = self.tree.inode(parent)?;
        let before = self.tree.names.changes();
        let (object, attr) = self.open_files.with_descriptor(|| {
            self.base
                .backing
                .symlink(caller, &self.tree.object(&dir)?, name, target)
        })?;
        let inode = self.register_created(before, &dir, name, object, &attr)?;
        Ok(Entry {
            inode: inode.id,
            attr,
        })
    }

    /// link(2): one more name for an inode; its pending data stays one.
    pub fn link(&self, inode: InodeId, parent: InodeId, name: &OsStr) -> Result<Entry> {
        let inode = self.tree.inode(inode)?;
        let dir = self.tree.inode(parent)?;
        let _path_stays = self
            .tree
            .paths
            .stay(|| dir.path_of(name).into_iter().collect());
        // The new name leads to this very object: it need not be looked up.
        let object = self.tree.object(&inode)?;
        let attr = self
            .base
            .backing
            .link(&object, &self.tree.object(&dir)?, name)?;
        let linked = self.tree.names.register(object, &attr, &dir, name, 1);
        linked.note_name_change();
        if let Some(file) = self.open_files.known_file(&linked) {
            let mut state = file.lock();
            state.unlinked = false;
            if let Some(file_id) = state.pending.file_id()
                && let Some(path) = dir.path_of(name)
            {
                // Kept or the name must not be relied on: a full journal fails the next removal instead.
                self.base.journal.append_note(&Record::NameAdded {
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
        let dir = self.tree.inode(parent)?;
        let _path_stays = self
            .tree
            .paths
            .stay(|| dir.path_of(name).into_iter().collect());
        let file = self.prepare_name_removal(&dir, name)?;
        let parent = self.tree.object(&dir)?;
        self.open_files
            .with_descriptor(|| self.tree.names.hold_last(&self.base.backing, dir.id, name))?;
        let removed = self.base.backing.unlink(&parent, name);
        if let (Err(_), Some(file)) = (&removed, &file) {
            self.open_files.take_from_keeper(file);
        }
        removed?;
        self.tree.names.unlinked(dir.id, name);
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
        let Some(inode) = self.tree.names.child(dir.id, name) else {
            return Ok(None);
        };
        let Some(file) = self.open_files.known_file(&inode) else {
            return Ok(None);
        };
        if let Some(path) = dir.path_of(name) {
            self.record_name_removal(&file, path)?;
        }
        self.open_files.keep_before_removal(&file);
        Ok(Some(file))
    }

    /// Makes sure that recovery finds a file with pending data without this name: by the others that
    /// are known here, some of which the kernel may have looked up only after the file got its id. If
    /// there is another name and none is known, the data is drained first.
    fn record_name_removal(&self, file: &Arc<File<B>>, path: Vec<u8>) -> Result<()> {
        let file_id = {
            let mut state = file.lock();
            self.intake.ingest_published(file, &mut state);
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
        if others.is_empty()
            && self
                .base
                .backing
                .attr(&self.tree.object(&file.inode)?)?
                .nlink
                > 1
        {
            self.intake.end_grant(file);
            return self.drainer.drain_and_wait(file);
        }
        let file = file_id.get();
        let added = others
            .into_iter()
            .map(|path| Record::NameAdded { file, path });
        let removed = Record::NameRemoved { file, path };
        self.base.journal.append_all(added.chain([removed]))
    }

    /// A name of this file is gone. Without name and handle its pending data is of no use to anyone.
    pub(crate) fn note_removed_name(&self, file: &Arc<File<B>>) {
        let gone = match self
            .tree
            .object(&file.inode)
            .and_then(|object| self.base.backing.attr(&object))
        {
            Ok(attr) => attr.nlink == 0,
            // Where the backing cannot say, its data is kept.
            Err(errno) => matches!(errno, Errno::STALE | Errno::NOENT),
        };
        if !gone {
            self.open_files.take_from_keeper(file);
            return;
        }
        let unused = {
            let mut state = file.lock();
            state.unlinked = true;
            state.opens.is_empty()
        };
        if !unused {
            self.open_files.open_nameless(file);
        }
        if unused {
            self.exclusive.discard(file);
            self.open_files.drop_if_unused(file);
            self.room.wake_writers();
        }
    }

    /// rmdir(2).
    pub fn rmdir(&self, parent: InodeId, name: &OsStr) -> Result<()> {
        let dir = self.tree.inode(parent)?;
        let parent = self.tree.object(&dir)?;
        self.open_files
            .with_descriptor(|| self.tree.names.hold_last(&self.base.backing, dir.id, name))?;
        self.base.backing.rmdir(&parent, name)?;
        self.tree.names.unlinked(dir.id, name);
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
        let dir = self.tree.inode(parent)?;
        let new_dir = self.tree.inode(new_parent)?;
        let exchange = flags.contains(RenameFlags::EXCHANGE);
        let from = self.tree.object(&dir)?;
        let to = self.tree.object(&new_dir)?;
        let both = || {
            [dir.path_of(name), new_dir.path_of(new_name)]
                .into_iter()
                .flatten()
                .collect()
        };
        let _paths_change = self.tree.paths.change(both);
        let moved = self.tree.names.child(dir.id, name);
        let target = self.tree.names.child(new_dir.id, new_name);
        if moved.is_some_and(|a| target.is_some_and(|b| Arc::ptr_eq(&a, &b))) {
            // Two names of one file: nothing changes, whatever the backing says.
            return self.base.backing.rename(&from, name, &to, new_name, flags);
        }
        let replaced = if exchange {
            None
        } else {
            let replaced = self.tree.names.child(new_dir.id, new_name);
            replaced.and_then(|inode| self.open_files.known_file(&inode))
        };
        if let Some(file) = &replaced
            && let Some(path) = new_dir.path_of(new_name)
        {
            self.record_name_removal(file, path)?;
            self.open_files.keep_before_removal(file);
        }
        if !exchange {
            self.open_files.with_descriptor(|| {
                self.tree
                    .names
                    .hold_last(&self.base.backing, new_dir.id, new_name)
            })?;
        }
        let recorded = self.record_rename((&dir, name), (&new_dir, new_name), exchange)?;
        let result = self
            .tree
            .names
            .rename((&dir, name), (&new_dir, new_name), exchange, || {
                self.base.backing.rename(&from, name, &to, new_name, flags)
            });
        if let Some(id) = recorded {
            let done = result.is_ok();
            let journal = &self.base.journal;
            journal.append_end(&Record::RenameEnd { id, done });
        }
        if let (Err(_), Some(file)) = (&result, &replaced) {
            self.open_files.take_from_keeper(file);
        }
        result?;
        if let Some(file) = replaced {
            self.note_removed_name(&file);
        }
        Ok(())
    }

    /// Tells the journal of a rename that begins. Returns its number; none where no file has pending data that it could
    /// be about.
    fn record_rename(
        &self,
        (dir, name): (&Inode<B>, &OsStr),
        (new_dir, new_name): (&Inode<B>, &OsStr),
        exchange: bool,
    ) -> Result<Option<u64>> {
        let journal = &self.base.journal;
        if journal.is_empty() {
            return Ok(None);
        }
        let from = dir.path_of(name).ok_or(Errno::STALE)?;
        let to = new_dir.path_of(new_name).ok_or(Errno::STALE)?;
        let id = journal.new_rename_id();
        journal.append(&Record::RenameBegin {
            id,
            from,
            to,
            exchange,
        })?;
        Ok(Some(id))
    }

    /// readlink(2).
    pub fn readlink(&self, inode: InodeId) -> Result<Vec<u8>> {
        self.base.backing.readlink(&self.tree.object_of(inode)?)
    }

    /// getxattr(2).
    pub fn get_xattr(&self, inode: InodeId, name: &OsStr) -> Result<Vec<u8>> {
        self.base
            .backing
            .get_xattr(&self.tree.object_of(inode)?, name)
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
        let inode = self.tree.inode(inode)?;
        // It may be one that a write through the kernel takes away, or an ACL.
        if let Some(file) = self.open_files.known_file(&inode) {
            self.intake.end_grant(&file);
            self.open_files.open_before_mode_change(&file);
        }
        self.privilege_rules
            .set_xattr_of(&inode, (name, value, flags), by)
    }

    /// listxattr(2).
    pub fn list_xattr(&self, inode: InodeId) -> Result<Vec<u8>> {
        self.base.backing.list_xattr(&self.tree.object_of(inode)?)
    }

    /// removexattr(2).
    pub fn remove_xattr(&self, inode: InodeId, name: &OsStr) -> Result<()> {
        self.base
            .backing
            .remove_xattr(&self.tree.object_of(inode)?, name)
    }

    /// opendir(3).
    pub fn open_dir(&self, inode: InodeId) -> Result<HandleId> {
        let dir = self
            .open_files
            .with_descriptor(|| self.base.backing.open_dir(&self.tree.object_of(inode)?))?;
        Ok(self.open_files.handles.insert_dir(dir))
    }

    /// Reads entries from `cookie` on until `sink` returns false or the directory ends.
    pub fn read_dir(
        &self,
        handle: HandleId,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()> {
        let dir = self.open_files.handles.dir(handle)?;
        self.base.backing.read_dir(&dir, cookie, sink)
    }

    /// closedir(3).
    pub fn release_dir(&self, handle: HandleId) {
        if let Some(live) = self.tree.names.live() {
            live.forget_handle(handle.0);
        }
        self.open_files.handles.remove_dir(handle);
    }

    /// statvfs(3) of the backing.
    pub fn statfs(&self) -> Result<StatFs> {
        self.base.backing.statfs()
    }

    /// Drops the names at or below `path` that the backing no longer has, after a change without the engine.
    ///
    /// Returns what the kernel may have cached. Names come first, so that no program finds new attributes under an old
    /// name.
    pub fn revalidate_names(&self, path: &[u8]) -> Vec<Cached> {
        let _names_stay = self.tree.paths.change(|| vec![path.to_vec()]);
        // Before the inodes are listed: a thread that found a name earlier and enters it now sees this and looks again.
        self.tree.names.note_changes_below();
        let mut names = Vec::new();
        let mut inodes = Vec::new();
        for inode in self.tree.names.all() {
            let paths = inode.paths();
            // Without a name it may have been anywhere, and may have a name again.
            let is_at = path.is_empty()
                || paths.is_empty()
                || paths.iter().any(|known| is_below(known, path));
            if !is_at {
                continue;
            }
            inodes.push(Cached::Inode(inode.id));
            for (parent, name) in inode.known_names() {
                if self.drop_wrong_name(&parent, &name, &inode) {
                    names.push(Cached::Name {
                        parent: parent.id,
                        name: name.to_os_string(),
                    });
                }
            }
        }
        names.extend(inodes);
        names
    }

    /// Drops a name that does not lead to `inode` any more; whether it was one.
    pub(crate) fn drop_wrong_name(
        &self,
        parent: &Arc<Inode<B>>,
        name: &OsStr,
        inode: &Inode<B>,
    ) -> bool {
        if self.tree.leads_to(parent, name, inode) {
            return false;
        }
        // A file that is open, or has data, is still meant.
        let held = self.open_files.with_descriptor(|| {
            self.tree
                .names
                .hold_if_last(&self.base.backing, inode, parent.id, name)
        });
        if let Err(errno) = held {
            tracing::warn!(%errno, "an object whose name is gone cannot be held");
        }
        self.tree.names.drop_name(parent.id, name, inode);
        true
    }
}
