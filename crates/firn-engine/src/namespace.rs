//! Operations on names, attributes and directories: lookup, mkdir, unlink, rename, attributes and so on.
//!
//! Each operation is carried out by the backing (the directory that the mount serves). Its answer is corrected by the
//! pending bytes, which only the arena (shared memory) has.
//!
//! Promises
//! * After each operation that changes names, recovery can find each file with pending data. A removal or a rename is
//!   recorded in the journal before the backing makes it.
//! * A file without name and handle has no pending data; its bytes are discarded.
//!
//! Races: names may change in the backing without a request, as when a transaction is aborted. A thread that adds a
//! name to the tables compares the count of such changes before and after its lookup ([`Namespace::revalidate_names`]).

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
use crate::names::{DirName, Inode};
use crate::open_files::OpenFiles;
use crate::privilege_rules::PrivilegeRules;
use crate::size::whole_size;
use crate::space::Room;
use crate::tree::NameTree;
use crate::{Cached, Entry, HandleId, InodeId, Principal, Result, SetAttr};

/// Unit of the block count of a file (`st_blocks`), in bytes.
const BLOCK_BYTES: u64 = 512;

/// Names, attributes and directories as programs see them.
pub struct Namespace<B: Backing> {
    /// Data that all parts share: the backing, the arena, options and counters.
    pub(crate) base: Arc<Base<B>>,
    /// Inodes and their names.
    pub(crate) tree: Arc<NameTree<B>>,
    /// Accepts bytes that client processes write to the arena (shared memory) themselves.
    pub(crate) intake: Arc<Intake<B>>,
    /// Open files and handles.
    pub(crate) open_files: Arc<OpenFiles<B>>,
    /// What the kernel caches.
    pub(crate) kernel_cache: Arc<KernelCache<B>>,
    /// Makes space in the arena.
    pub(crate) room: Arc<Room<B>>,
    /// Writes pending bytes to the backing.
    pub(crate) drainer: Arc<Drainer<B>>,
    /// Changes files while no drain writes to them.
    pub(crate) exclusive: Arc<Exclusive<B>>,
    /// Removes set-id bits and capabilities before changes.
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

    /// Looks a name up, and returns the inode and its attributes. The kernel gets one more reference to the inode.
    ///
    /// Fails with the errno of the backing, for example NOENT.
    pub fn lookup(&self, parent: InodeId, name: &OsStr) -> Result<Entry> {
        let dir = self.tree.inode(parent)?;
        loop {
            // The lookup is repeated if names changed in the backing meanwhile and this name now leads to another
            // object.
            let changes_before = self.tree.names.backing_name_changes();
            let (object, attr) = self
                .open_files
                .with_descriptor(|| self.base.backing.lookup(&self.tree.object(&dir)?, name))?;
            let new_references = 1;
            let inode = self
                .tree
                .names
                .register(object, &attr, &dir, name, new_references);
            if self.is_name_current(changes_before, &dir, name, &inode) {
                return Ok(Entry {
                    inode: inode.id,
                    attr: self.add_pending_data(&inode, attr)?,
                });
            }
            // The kernel does not get this inode, so its reference does not count.
            self.tree.names.forget(inode.id, 1);
        }
    }

    /// Returns whether a name that was just added for `inode` leads to it. Drops a wrong name.
    ///
    /// `changes_before` is the count of name changes in the backing before the name was looked up. If the count is
    /// still the same, the name is right: a later change will find and check it. Otherwise the name is looked up again
    /// here.
    fn is_name_current(
        &self,
        changes_before: u64,
        dir: &Arc<Inode<B>>,
        name: &OsStr,
        inode: &Inode<B>,
    ) -> bool {
        self.tree.names.backing_name_changes() == changes_before
            || !self.drop_wrong_name(dir, name, inode)
    }

    /// Takes back `count` references that the kernel had to an inode.
    pub fn forget(&self, inode_id: InodeId, count: u64) {
        self.tree.names.forget(inode_id, count);
    }

    /// Returns the attributes of an inode, with pending data counted in.
    pub fn attr(&self, inode_id: InodeId, _handle: Option<HandleId>) -> Result<Attr> {
        let inode = self.tree.inode(inode_id)?;
        self.attr_of(&inode)
    }

    /// Returns the attributes of an inode, with pending data counted in.
    fn attr_of(&self, inode: &Arc<Inode<B>>) -> Result<Attr> {
        let attr = self
            .open_files
            .with_descriptor(|| self.base.backing.attr(&self.tree.object(inode)?))?;
        self.add_pending_data(inode, attr)
    }

    /// Returns the attributes of an object with its pending data (bytes that only the arena has) counted in.
    /// `attr_before` are the backing's attributes. They are returned if the object is not a file that is open or has
    /// bytes in the arena. For such a file, the attributes are read again, and changes that they show are recorded.
    fn add_pending_data(&self, inode: &Arc<Inode<B>>, attr_before: Attr) -> Result<Attr> {
        if inode.kind != Kind::File {
            return Ok(attr_before);
        }
        let Some(file) = self.open_files.known_file(inode) else {
            return Ok(attr_before);
        };
        let mut state = file.lock();
        // Bytes that a client process has stored in the arena, without a request, count as written too.
        self.intake.ingest_published(&file, &mut state);
        let pending_bytes = state.pending.bytes();
        let pending_end = state.pending.end();
        let pending_mtime = state.pending.mtime();
        // The lock is released, because the next steps call the backing.
        drop(state);
        let object = self.tree.object(inode)?;
        // The attributes are read after the pending data. In the other order, bytes that are drained in between would
        // be missing in both, and the file would look too short.
        let mut attr = self.base.backing.attr(&object)?;
        // The call of the backing may have shown changes by other hosts, or set-id bits that the file got.
        self.kernel_cache.record_changes_by_others(inode, &object);
        self.intake.end_lists_before_changes(&file, &object);
        self.privilege_rules
            .record_privileges_in_backing(&file, &attr);
        if pending_bytes == 0 {
            return Ok(attr);
        }
        attr.size = whole_size(&attr, pending_end);
        // Many programs assume that a file without blocks is one hole, and then do not read it.
        attr.blocks += pending_bytes.div_ceil(BLOCK_BYTES);
        if let Some(mtime) = pending_mtime {
            attr.mtime = mtime;
            attr.ctime = attr.ctime.max(mtime);
        }
        Ok(attr)
    }

    /// Sets attributes in the order length, owner, mode, times, and returns all attributes. After an error, the
    /// attributes before the failed one are set.
    ///
    /// `principal` is the process that makes the change, if the change removes set-id bits and capabilities
    /// (privileges) of the object.
    pub fn set_attr(
        &self,
        inode_id: InodeId,
        set: SetAttr,
        principal: Option<&dyn Principal>,
    ) -> Result<Attr> {
        let inode = self.tree.inode(inode_id)?;
        if set.is_empty()
            && let Some(principal) = principal
        {
            // An empty change is the kernel's request to drop privileges. The kernel makes it before it writes to the
            // file itself (passthrough), for example.
            self.privilege_rules.drop_privileges(inode.id, principal)?;
        }
        if let Some(size) = set.size {
            let file = self.open_files.acquire_file(&inode);
            let result = self.truncate_as(&file, size, principal);
            self.open_files.drop_if_unused(&file);
            result?;
        }
        let changes_owner = set.uid.is_some() || set.gid.is_some();
        if set.mode.is_some() || changes_owner {
            self.prepare_access_change(&inode);
        }
        if changes_owner {
            self.privilege_rules
                .set_owner(&inode, set.uid, set.gid, principal)?;
        }
        if let Some(mode) = set.mode {
            let removes_privileges = changes_owner || set.size.is_some();
            if principal.is_some() && removes_privileges {
                self.privilege_rules
                    .set_mode_without_new_privileges(&inode, mode)?;
            } else {
                self.privilege_rules.set_mode(&inode, mode, principal)?;
            }
        }
        if set.atime != SetTime::Keep || set.mtime != SetTime::Keep {
            self.set_times(&inode, set.atime, set.mtime)?;
        }
        self.attr_of(&inode)
    }

    /// Prepares a file for a change of its owner, mode, capabilities or access list: ends the grant of a client process
    /// (its right to write the file directly), and opens the backing's file.
    fn prepare_access_change(&self, inode: &Inode<B>) {
        let Some(file) = self.open_files.known_file(inode) else {
            return;
        };
        // After the change, a write may have to remove set-id bits or capabilities, which a direct write cannot do.
        self.intake.end_grant(&file);
        // After the change, firnd may not be allowed to open the file.
        self.open_files.open_before_access_change(&file);
    }

    /// Sets the length of a file, after removing the privileges that the file loses if the process `principal` changes
    /// its contents.
    fn truncate_as(
        &self,
        file: &Arc<File<B>>,
        size: u64,
        principal: Option<&dyn Principal>,
    ) -> Result<()> {
        if let Some(principal) = principal {
            self.privilege_rules.drop_privileges_of(file, principal)?;
        }
        self.exclusive.truncate_file(file, size)
    }

    /// Sets times. The contents do not change, so a file that counts as synced still counts as synced afterwards.
    fn set_times(&self, inode: &Arc<Inode<B>>, atime: SetTime, mtime: SetTime) -> Result<()> {
        let synced_fingerprint = inode
            .synced
            .get()
            .filter(|synced| self.tree.fingerprint(inode) == Ok(*synced));
        self.change_times(inode, atime, mtime)?;
        if let Some(old_fingerprint) = synced_fingerprint
            && let Ok(new_fingerprint) = self.tree.fingerprint(inode)
        {
            inode.synced.replace(old_fingerprint, new_fingerprint);
        }
        Ok(())
    }

    /// Sets times in the backing. If the file has pending data (bytes that only the arena has), also replaces its
    /// pending modification time, which the drain of the last byte will set. If the backing refuses, restores the
    /// pending time.
    fn change_times(&self, inode: &Arc<Inode<B>>, atime: SetTime, mtime: SetTime) -> Result<()> {
        let Some(file) = self.open_files.known_file(inode) else {
            return self
                .base
                .backing
                .set_times(&self.tree.object(inode)?, atime, mtime);
        };
        let new_mtime = match mtime {
            SetTime::Keep => None,
            SetTime::Now => Some(Time::now()),
            SetTime::At(time) => Some(time),
        };
        let old_mtime = self.replace_pending_mtime(&file, new_mtime);
        let result = self
            .tree
            .object(inode)
            .and_then(|object| self.base.backing.set_times(&object, atime, mtime));
        let mut state = file.lock();
        if result.is_ok() {
            // The cached bytes remain valid: this call changed the times, and not a program that does not use the
            // mount.
            state.cache.accept_backing_state();
        }
        // If a program wrote in the meantime, the pending time is that of the write, and must remain.
        let is_still_new_mtime = new_mtime.is_some() && state.pending.mtime() == new_mtime;
        if is_still_new_mtime && !state.pending.is_empty() {
            match &result {
                Ok(()) => self.base.journal.record_time(&state),
                Err(_) => state.pending.set_mtime(old_mtime),
            }
        }
        result
    }

    /// Replaces the pending modification time by `new_mtime`, if there is one, and returns the old time. Called before
    /// the new time is set in the backing, so that a drain that ends meanwhile does not set an older time.
    fn replace_pending_mtime(&self, file: &Arc<File<B>>, new_mtime: Option<Time>) -> Option<Time> {
        let mut state = file.lock_to_set_times();
        self.intake.ingest_published(file, &mut state);
        if new_mtime.is_some() {
            // Writes of the client before this call must be distinguished from later ones. After the revocation, the
            // client gets a new lease for later writes.
            self.intake.revoke_grant(file, &mut state);
        }
        let old_mtime = state.pending.mtime();
        if new_mtime.is_some() && !state.pending.is_empty() {
            state.pending.set_mtime(new_mtime);
        }
        old_mtime
    }

    /// Adds an object that was just made in the backing to the tables, and returns its inode, to which the kernel has
    /// one more reference. `changes_before` is the count of name changes in the backing before the object was made.
    ///
    /// Fails with ESTALE if the object was removed meanwhile with its transaction. The kernel then looks the path up
    /// again.
    pub(crate) fn register_created(
        &self,
        changes_before: u64,
        dir: &Arc<Inode<B>>,
        name: &OsStr,
        object: B::Inode,
        attr: &Attr,
    ) -> Result<Arc<Inode<B>>> {
        let new_references = 1;
        let inode = self
            .tree
            .names
            .register(object, attr, dir, name, new_references);
        if !self.is_name_current(changes_before, dir, name, &inode) {
            self.tree.names.forget(inode.id, 1);
            return Err(Errno::STALE);
        }
        inode.record_name_change();
        Ok(inode)
    }

    /// Makes a directory (mkdir(2)). Returns its entry, to which the kernel has one reference.
    pub fn mkdir(
        &self,
        caller: &Caller,
        parent: InodeId,
        name: &OsStr,
        mode: u32,
    ) -> Result<Entry> {
        let dir = self.tree.inode(parent)?;
        // Read first, so that it shows a change of names in the backing during the call.
        let changes_before = self.tree.names.backing_name_changes();
        let (object, attr) = self.open_files.with_descriptor(|| {
            self.base
                .backing
                .mkdir(caller, &self.tree.object(&dir)?, name, mode)
        })?;
        let inode = self.register_created(changes_before, &dir, name, object, &attr)?;
        Ok(Entry {
            inode: inode.id,
            attr,
        })
    }

    /// Makes a file, device, pipe or socket (mknod(2)). Returns its entry, to which the kernel has one reference.
    pub fn mknod(
        &self,
        caller: &Caller,
        parent: InodeId,
        name: &OsStr,
        mode: u32,
        rdev: u64,
    ) -> Result<Entry> {
        let dir = self.tree.inode(parent)?;
        // Read first, so that it shows a change of names in the backing during the call.
        let changes_before = self.tree.names.backing_name_changes();
        let (object, attr) = self.open_files.with_descriptor(|| {
            self.base.backing.make(
                caller,
                &self.tree.object(&dir)?,
                name,
                NewKind::Node { mode, rdev },
            )
        })?;
        let inode = self.register_created(changes_before, &dir, name, object, &attr)?;
        Ok(Entry {
            inode: inode.id,
            attr,
        })
    }

    /// Makes a symbolic link (symlink(2)). Returns its entry, to which the kernel has one reference.
    pub fn symlink(
        &self,
        caller: &Caller,
        parent: InodeId,
        name: &OsStr,
        target: &OsStr,
    ) -> Result<Entry> {
        let dir = self.tree.inode(parent)?;
        // Read first, so that it shows a change of names in the backing during the call.
        let changes_before = self.tree.names.backing_name_changes();
        let (object, attr) = self.open_files.with_descriptor(|| {
            self.base
                .backing
                .symlink(caller, &self.tree.object(&dir)?, name, target)
        })?;
        let inode = self.register_created(changes_before, &dir, name, object, &attr)?;
        Ok(Entry {
            inode: inode.id,
            attr,
        })
    }

    /// Makes another name of an inode (link(2)), and returns its entry, to which the kernel has one more reference.
    /// Both names lead to the same pending data.
    pub fn link(&self, inode_id: InodeId, parent: InodeId, name: &OsStr) -> Result<Entry> {
        let inode = self.tree.inode(inode_id)?;
        let dir = self.tree.inode(parent)?;
        // No rename changes the path of the new name before it is recorded.
        let _path_claim = self
            .tree
            .claims
            .claim_unchanged(|| dir.path_of(name).into_iter().collect());
        // The new name leads to this very object, so no lookup is needed.
        let object = self.tree.object(&inode)?;
        let attr = self
            .base
            .backing
            .link(&object, &self.tree.object(&dir)?, name)?;
        let new_references = 1;
        let linked = self
            .tree
            .names
            .register(object, &attr, &dir, name, new_references);
        // The next sync of the file must cover the new name.
        linked.record_name_change();
        if let Some(file) = self.open_files.known_file(&linked) {
            // If the file has pending bytes, recovery must know the new name.
            self.record_added_name(&file, &dir, name);
        }
        Ok(Entry {
            inode: linked.id,
            attr: self.add_pending_data(&linked, attr)?,
        })
    }

    /// Records in the state of a file, and in the journal if the path is known, that the file has a new name.
    fn record_added_name(&self, file: &File<B>, dir: &Inode<B>, name: &OsStr) {
        let mut state = file.lock();
        state.unlinked = false;
        if let Some(file_id) = state.pending.file_id()
            && let Some(path) = dir.path_of(name)
        {
            // If the journal is full, recovery needs no such record: it still has the older names. The removal of the
            // last older name is then refused.
            self.base.journal.append_note(&Record::NameAdded {
                file: file_id.get(),
                path,
            });
        }
    }

    /// Removes a name (unlink(2)). The removal is recorded in the journal first, so that recovery does not take the
    /// file for lost. Pending data is discarded if the file has neither a name nor a handle afterwards.
    pub fn unlink(&self, parent: InodeId, name: &OsStr) -> Result<()> {
        let dir = self.tree.inode(parent)?;
        // No rename changes the path of the name before the removal is recorded.
        let _path_claim = self
            .tree
            .claims
            .claim_unchanged(|| dir.path_of(name).into_iter().collect());
        let file = self.prepare_name_removal(&dir, name)?;
        let dir_object = self.tree.object(&dir)?;
        // An object without a name cannot be opened again, so it is opened now and kept open.
        self.open_files.with_descriptor(|| {
            self.tree
                .names
                .keep_open_before_removal(&self.base.backing, dir.id, name)
        })?;
        let result = self.base.backing.unlink(&dir_object, name);
        if result.is_err()
            && let Some(file) = &file
        {
            // The file still has the name, so the next firnd needs no descriptor of it.
            self.open_files.remove_from_keeper(file);
        }
        result?;
        self.tree.names.record_unlink(dir.id, name);
        if let Some(file) = file {
            self.record_removed_name(&file);
        }
        Ok(())
    }

    /// Prepares the removal of a name: records it in the journal, and gives the keeper (the process that starts the
    /// next firnd) a descriptor of an open file. Returns the file; `None` if it is neither open nor has bytes in the
    /// arena. The caller prevents renames of the path.
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
            self.prepare_loss_of_name(&file, path)?;
        }
        self.open_files.send_to_keeper_before_removal(&file);
        Ok(Some(file))
    }

    /// Ensures that recovery can find a file with pending data (bytes that only the arena has) after the file loses
    /// this name. The caller removes the name afterwards. There are two cases:
    ///
    /// * The file has other names, but none of them is known: ends direct access and drains the file.
    /// * Otherwise: records in the journal the known other names, of which it may lack some, and the removal.
    fn prepare_loss_of_name(&self, file: &Arc<File<B>>, path: Vec<u8>) -> Result<()> {
        let mut state = file.lock();
        // Bytes that a client process has stored in the arena, without a request, count as written too.
        self.intake.ingest_published(file, &mut state);
        let Some(file_id) = state.pending.file_id() else {
            return Ok(());
        };
        if state.pending.is_empty() && !state.direct.has_grant() {
            return Ok(());
        }
        // The lock is released, because the next steps may call the backing and wait.
        drop(state);
        let mut other_paths = file.inode.paths();
        other_paths.retain(|known| *known != path);
        let no_other_path_known = other_paths.is_empty();
        if no_other_path_known && self.has_several_names(&file.inode)? {
            self.intake.end_grant(file);
            return self.drainer.drain_and_wait(file);
        }
        let number = file_id.get();
        let added = other_paths
            .into_iter()
            .map(|path| Record::NameAdded { file: number, path });
        let removed = Record::NameRemoved { file: number, path };
        self.base.journal.append_all(added.chain([removed]))
    }

    /// Returns whether an object has more than one name in the backing.
    fn has_several_names(&self, inode: &Inode<B>) -> Result<bool> {
        let attr = self.base.backing.attr(&self.tree.object(inode)?)?;
        Ok(attr.nlink > 1)
    }

    /// Updates a file after the removal of one of its names in the backing and in the tables. A file that lost its last
    /// name is marked as nameless. If it has no handle either, its pending data is discarded.
    pub(crate) fn record_removed_name(&self, file: &Arc<File<B>>) {
        let attr = self
            .tree
            .object(&file.inode)
            .and_then(|object| self.base.backing.attr(&object));
        let has_lost_last_name = match attr {
            Ok(attr) => attr.nlink == 0,
            Err(Errno::STALE | Errno::NOENT) => true,
            // The backing cannot tell whether the file still exists, so its data is kept.
            Err(_) => false,
        };
        if !has_lost_last_name {
            // The file still has a name, so the next firnd needs no descriptor of it.
            self.open_files.remove_from_keeper(file);
            return;
        }
        let is_open = {
            let mut state = file.lock();
            state.unlinked = true;
            !state.opens.is_empty()
        };
        if is_open {
            // Programs still use the file. The keeper (the process that starts the next firnd) gets a descriptor, so
            // that they can use it after firnd dies, too.
            self.open_files.open_and_send_to_keeper(file);
            return;
        }
        self.exclusive.discard(file);
        self.open_files.drop_if_unused(file);
        // Writers may wait for the space that the discarded data took.
        self.room.wake_writers();
    }

    /// Removes an empty directory (rmdir(2)).
    pub fn rmdir(&self, parent: InodeId, name: &OsStr) -> Result<()> {
        let dir = self.tree.inode(parent)?;
        let dir_object = self.tree.object(&dir)?;
        self.open_files.with_descriptor(|| {
            self.tree
                .names
                .keep_open_before_removal(&self.base.backing, dir.id, name)
        })?;
        self.base.backing.rmdir(&dir_object, name)?;
        self.tree.names.record_unlink(dir.id, name);
        Ok(())
    }

    /// Renames a file or directory (renameat2(2)).
    ///
    /// The journal (from which recovery reads names after a crash) gets a record before and after the rename, so that
    /// recovery searches for moved files under both names. A file that loses its name to the rename is treated as in
    /// [`Self::unlink`].
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
        let is_exchange = flags.contains(RenameFlags::EXCHANGE);
        let dir_object = self.tree.object(&dir)?;
        let new_dir_object = self.tree.object(&new_dir)?;
        let rename_in_backing = || {
            self.base
                .backing
                .rename(&dir_object, name, &new_dir_object, new_name, flags)
        };
        let both_paths = || {
            [dir.path_of(name), new_dir.path_of(new_name)]
                .into_iter()
                .flatten()
                .collect()
        };
        // Until this function returns, no other thread changes these paths or writes them to the journal.
        let _path_claim = self.tree.claims.claim_change(both_paths);
        if self.are_same_inode((dir.id, name), (new_dir.id, new_name)) {
            // Both names lead to one file, so rename(2) changes nothing. The answer comes from the backing.
            return rename_in_backing();
        }
        // An exchange removes no name. In any other rename, only the replaced object may lose its last name.
        let replaced_file = if is_exchange {
            None
        } else {
            self.prepare_replacement(&new_dir, new_name)?
        };
        let from = DirName { dir: &dir, name };
        let to = DirName {
            dir: &new_dir,
            name: new_name,
        };
        let rename_id = self.record_rename_begin(from, to, is_exchange)?;
        let result = self
            .tree
            .names
            .rename(from, to, is_exchange, rename_in_backing);
        self.record_rename_end(rename_id, replaced_file, result.is_ok());
        result
    }

    /// Records whether a rename succeeded. The journal gets an end record if it has the begin of the rename
    /// (`rename_id`). `replaced_file` is the file that lost its name to the rename; without success, it still has the
    /// name.
    fn record_rename_end(
        &self,
        rename_id: Option<u64>,
        replaced_file: Option<Arc<File<B>>>,
        is_renamed: bool,
    ) {
        if let Some(id) = rename_id {
            self.base.journal.append_end(&Record::RenameEnd {
                id,
                done: is_renamed,
            });
        }
        let Some(file) = replaced_file else {
            return;
        };
        if is_renamed {
            self.record_removed_name(&file);
        } else {
            // The file still has its name, so the keeper's descriptor is not needed.
            self.open_files.remove_from_keeper(&file);
        }
    }

    /// Returns whether two names are known to lead to one inode.
    fn are_same_inode(&self, a: (InodeId, &OsStr), b: (InodeId, &OsStr)) -> bool {
        let a_inode = self.tree.names.child(a.0, a.1);
        let b_inode = self.tree.names.child(b.0, b.1);
        match (a_inode, b_inode) {
            (Some(a_inode), Some(b_inode)) => Arc::ptr_eq(&a_inode, &b_inode),
            _ => false,
        }
    }

    /// Prepares a rename that replaces the object with this name: records the removal of the name in the journal, and
    /// keeps the object open if the name is its last one. Returns the file; `None` if it is neither open nor has bytes
    /// in the arena.
    fn prepare_replacement(
        &self,
        dir: &Arc<Inode<B>>,
        name: &OsStr,
    ) -> Result<Option<Arc<File<B>>>> {
        let replaced_inode = self.tree.names.child(dir.id, name);
        let replaced_file = replaced_inode.and_then(|inode| self.open_files.known_file(&inode));
        if let Some(file) = &replaced_file
            && let Some(path) = dir.path_of(name)
        {
            self.prepare_loss_of_name(file, path)?;
            // The keeper (the process that starts the next firnd) gets a descriptor of an open file, so that programs
            // can use it after firnd dies, too.
            self.open_files.send_to_keeper_before_removal(file);
        }
        self.open_files.with_descriptor(|| {
            self.tree
                .names
                .keep_open_before_removal(&self.base.backing, dir.id, name)
        })?;
        Ok(replaced_file)
    }

    /// Records in the journal that a rename begins, and returns the number of the rename. Returns `None` if no file has
    /// pending data (bytes that only the arena has), so that no record is needed.
    ///
    /// Fails with ESTALE if a directory no longer has a known path.
    fn record_rename_begin(
        &self,
        from: DirName<'_, B>,
        to: DirName<'_, B>,
        is_exchange: bool,
    ) -> Result<Option<u64>> {
        let journal = &self.base.journal;
        if journal.is_empty() {
            return Ok(None);
        }
        let from_path = from.path().ok_or(Errno::STALE)?;
        let to_path = to.path().ok_or(Errno::STALE)?;
        let id = journal.new_rename_id();
        journal.append(&Record::RenameBegin {
            id,
            from: from_path,
            to: to_path,
            exchange: is_exchange,
        })?;
        Ok(Some(id))
    }

    /// Returns the target of a symbolic link (readlink(2)).
    pub fn readlink(&self, inode_id: InodeId) -> Result<Vec<u8>> {
        self.base.backing.readlink(&self.tree.object_of(inode_id)?)
    }

    /// Returns the value of an extended attribute (getxattr(2)).
    pub fn get_xattr(&self, inode_id: InodeId, name: &OsStr) -> Result<Vec<u8>> {
        self.base
            .backing
            .get_xattr(&self.tree.object_of(inode_id)?, name)
    }

    /// Sets an extended attribute (setxattr(2)). `principal` is the caller, if the change may remove privileges.
    pub fn set_xattr(
        &self,
        inode_id: InodeId,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        principal: Option<&dyn Principal>,
    ) -> Result<()> {
        let inode = self.tree.inode(inode_id)?;
        // The attribute may be a capability or an access list.
        self.prepare_access_change(&inode);
        self.privilege_rules
            .set_xattr(&inode, name, value, flags, principal)
    }

    /// Returns the names of the extended attributes (listxattr(2)), each ended by a zero byte.
    pub fn list_xattr(&self, inode_id: InodeId) -> Result<Vec<u8>> {
        self.base
            .backing
            .list_xattr(&self.tree.object_of(inode_id)?)
    }

    /// Removes an extended attribute (removexattr(2)).
    pub fn remove_xattr(&self, inode_id: InodeId, name: &OsStr) -> Result<()> {
        self.base
            .backing
            .remove_xattr(&self.tree.object_of(inode_id)?, name)
    }

    /// Opens a directory (opendir(3)), and returns a handle for [`Namespace::read_dir`].
    pub fn open_dir(&self, inode_id: InodeId) -> Result<HandleId> {
        let dir = self
            .open_files
            .with_descriptor(|| self.base.backing.open_dir(&self.tree.object_of(inode_id)?))?;
        Ok(self.open_files.handles.insert_dir(dir))
    }

    /// Reads entries from `cookie` on, until `sink` returns false or the directory ends.
    pub fn read_dir(
        &self,
        handle_id: HandleId,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()> {
        let dir = self.open_files.handles.dir(handle_id)?;
        self.base.backing.read_dir(&dir, cookie, sink)
    }

    /// Closes a handle of a directory (closedir(3)).
    pub fn release_dir(&self, handle_id: HandleId) {
        if let Some(live) = self.tree.names.live() {
            live.forget_handle(handle_id.0);
        }
        self.open_files.handles.remove_dir(handle_id);
    }

    /// Returns the space and limits of the backing (statvfs(3)).
    pub fn statfs(&self) -> Result<StatFs> {
        self.base.backing.statfs()
    }

    /// Drops the names at or below `path` that no longer lead to their inodes. Called after names changed in the
    /// backing although the kernel requested no change, for example because a transaction was aborted.
    ///
    /// Returns the dropped names, then all inodes at or below `path`. The caller must make the kernel drop its cached
    /// data of these, in this order, so that no program finds new attributes under an old name.
    pub fn revalidate_names(&self, path: &[u8]) -> Vec<Cached> {
        let _path_claim = self.tree.claims.claim_change(|| vec![path.to_vec()]);
        // Counted before the inodes are listed. A thread that looked up an old name, and adds it only after the list
        // was made, then sees another count and looks the name up again.
        self.tree.names.record_backing_name_change();
        let mut invalidations = Vec::new();
        let mut inodes = Vec::new();
        for inode in self.tree.names.all_inodes() {
            let paths = inode.paths();
            // An inode without a known name may have been anywhere in the tree, and may have a name again.
            let may_be_below = path.is_empty()
                || paths.is_empty()
                || paths.iter().any(|known| is_below(known, path));
            if !may_be_below {
                continue;
            }
            inodes.push(Cached::Inode(inode.id));
            for (parent, name) in inode.names_with_parents() {
                if self.drop_wrong_name(&parent, &name, &inode) {
                    invalidations.push(Cached::Name {
                        parent: parent.id,
                        name: name.to_os_string(),
                    });
                }
            }
        }
        invalidations.extend(inodes);
        invalidations
    }

    /// Drops a name from the tables if it no longer leads to `inode` in the backing. Returns whether it was dropped.
    pub(crate) fn drop_wrong_name(
        &self,
        parent: &Arc<Inode<B>>,
        name: &OsStr,
        inode: &Inode<B>,
    ) -> bool {
        if self.tree.leads_to(parent, name, inode) {
            return false;
        }
        // A file that is open or has pending data is still used without the name, so its object is kept open.
        let result = self.open_files.with_descriptor(|| {
            self.tree
                .names
                .keep_open_if_last_name(&self.base.backing, inode, parent.id, name)
        });
        if let Err(errno) = result {
            tracing::warn!(%errno, "cannot keep an object open that has lost its name");
        }
        self.tree.names.drop_name(parent.id, name, inode);
        true
    }
}
