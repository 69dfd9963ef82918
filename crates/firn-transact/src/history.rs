//! [`History`]: keeps the logs of the last N commits of each scope (`history=N`), so that they can be undone.
//!
//! * Before a commit is decided, the *undo* parts of its log are added. Old attributes and old bytes are staged in
//!   `new/u/`; the commit also moves removed objects there.
//! * When the commit is applied, one rename turns `tx-N` into `undo-N`. Files that only a redo needed are removed after
//!   it.
//! * A restore renames the log in `undo-N` from `commit` to `undo`, and then `undo-N` to a new `tx-M`. From then on it
//!   is a decided transaction that is applied backward, so a crash during a restore is recovered like one during a
//!   commit.

use std::ffi::OsStr;
use std::sync::Arc;

use firn_backing::{Access, Attr, Backing, Errno, RenameFlags, SetTime};

use crate::change_log::{
    BytesSource, ChangeLog, DataChange, Direction, Entry, EntrySide, LogError, NO_ID, StagedPath,
    WrittenRange,
};
use crate::claim::Claim;
use crate::copy::copy_with_holes;
use crate::error::{RestoreError, StoreError};
use crate::lower_backing::LowerBacking;
use crate::object::Object;
use crate::scope::Scope;
use crate::scopes::Scopes;
use crate::staging;
use crate::transaction::handle::TransactionHandle;
use crate::transactional::TransactionalBacking;
use crate::tree::Tree;
use crate::tree::path_of;
use crate::uses::Area;

/// Directory below `new/` for the old bytes, attributes and objects that undo a commit.
const UNDO_DIR: &str = "u";
/// Prefix of the name of an anchor ([`Entry::anchor_at`]) in `new/`; the number of the object follows.
pub(crate) const ANCHOR: &str = "l";

/// Returns the name of the directory with a kept log.
fn undo_dir_name(serial: u64) -> String {
    format!("undo-{serial}")
}

/// Returns the staged path of an object in `new/u/`.
fn staged_in_undo_dir(name: String) -> StagedPath {
    StagedPath {
        dir: UNDO_DIR.to_owned(),
        name,
    }
}

/// Returns the serial numbers of the logs that lead back from the present state of a scope, newest first. Follows
/// renames of the scope. `logs` are all kept logs, newest first.
fn chain_of(logs: &[(u64, ChangeLog)], scope: &[u8]) -> Vec<u64> {
    let mut chain = Vec::new();
    let mut scope = scope;
    for (serial, log) in logs {
        if log.scope_after(Direction::Redo) != scope {
            continue;
        }
        chain.push(*serial);
        if log.top.as_ref().is_some_and(|top| top.is_new) {
            break;
        }
        scope = &log.scope;
    }
    chain
}

/// The commits that a backing keeps after their application.
pub struct History<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) tree: Arc<Tree<B>>,
    pub(crate) scopes: Arc<Scopes<B>>,
    /// Maximum number of commits of each scope that can be undone.
    pub(crate) commits_max: u32,
    /// The thread that changes the stored numbers of the last commits owns this claim.
    pub(crate) numbers: Claim,
}

impl<B: Backing> History<B> {
    pub(crate) fn new(
        lower: &Arc<LowerBacking<B>>,
        tree: &Arc<Tree<B>>,
        scopes: &Arc<Scopes<B>>,
        commits_max: u32,
    ) -> Self {
        Self {
            lower: Arc::clone(lower),
            tree: Arc::clone(tree),
            scopes: Arc::clone(scopes),
            commits_max,
            numbers: Claim::default(),
        }
    }

    /// Adds the undo sides to a log, and stages the old bytes and attributes that they refer to. Does nothing without a
    /// history.
    pub(crate) fn stage_undo(&self, scope: &Scope<B>, log: &mut ChangeLog) -> Result<(), Errno> {
        if self.commits_max == 0 {
            return Ok(());
        }
        let firn = self.lower.staging_dir()?;
        let is_new = log.top.as_ref().is_some_and(|top| top.is_new);
        if !is_new {
            log.id_before =
                staging::load_commit_numbers(&self.lower.base, &firn)?.remove(&scope.path);
        }
        log.can_be_undone = true;
        let dir = staging::make_dir(&self.lower.base, &scope.new, UNDO_DIR)?;
        // An earlier attempt may have left files.
        staging::clear(&self.lower.base, &dir)?;
        let changed = scope.changed.lock().clone();
        for entry in &mut log.entries {
            let is_here = !entry.identity.elsewhere;
            let object_in_use = || {
                self.tree
                    .known((self.lower.device, entry.identity.ino))
                    .filter(|_| is_here)
            };
            let object = changed.get(&entry.number).cloned().or_else(object_in_use);
            // Directories above the scope are not part of it, so a restore does not change their times.
            let object = object.filter(|object| scope.covers(object));
            self.stage_undo_of(entry, object.as_ref(), &dir)?;
        }
        Ok(())
    }

    /// Adds the undo side to one entry. `object` is its object, if the object is in the scope and in use. `dir` is
    /// `new/u/`.
    fn stage_undo_of(
        &self,
        entry: &mut Entry,
        object: Option<&Arc<Object<B>>>,
        dir: &B::Inode,
    ) -> Result<(), Errno> {
        if entry.new_at.is_some() {
            return Ok(());
        }
        if entry.after.is_empty() && !entry.before.is_empty() {
            entry.kept_at = Some(staged_in_undo_dir(format!("k{}", entry.number)));
        }
        let below = object.and_then(|object| object.base());
        let (Some(object), Some(inode)) = (object, below) else {
            return Ok(());
        };
        let attr = self.lower.base.attr(&inode)?;
        if entry.is_dir {
            entry.undo.atime = Some(attr.atime.into());
            entry.undo.mtime = Some(attr.mtime.into());
        }
        if entry.redo.copy_at.is_some() {
            entry.undo = self.stage_old_copy(entry, object, &inode, dir)?;
        } else if let Some(data) = &entry.redo.data {
            entry.undo.data = Some(self.read_old_bytes(&inode, &attr, data)?);
            entry.undo.mtime = Some(attr.mtime.into());
        }
        Ok(())
    }

    /// Stages a copy with the old attributes and the old bytes of the written ranges, and returns the undo side.
    fn stage_old_copy(
        &self,
        entry: &Entry,
        object: &Object<B>,
        inode: &B::Inode,
        dir: &B::Inode,
    ) -> Result<EntrySide, Errno> {
        let text = entry.number.to_string();
        let name = OsStr::new(&text);
        let old = self.lower.copy_object(object.kind, inode, dir, name)?;
        let mut part = EntrySide {
            copy_at: Some(staged_in_undo_dir(text.clone())),
            ..entry.undo.clone()
        };
        if let Some(data) = &entry.redo.data {
            part.data = Some(self.stage_old_bytes(inode, (dir, name), data, old.size)?);
            // The writes to the copy have changed its times, which the restored file will get.
            let copy = self.lower.base.lookup(dir, name)?.0;
            self.lower
                .base
                .set_times(&copy, SetTime::At(old.atime), SetTime::At(old.mtime))?;
        }
        Ok(part)
    }

    /// Copies the bytes that a commit of `data` overwrites or cuts off to the staged copy. Returns the change that
    /// restores them.
    fn stage_old_bytes(
        &self,
        inode: &B::Inode,
        (dir, copy): (&B::Inode, &OsStr),
        data: &DataChange,
        size: u64,
    ) -> Result<DataChange, Errno> {
        let from = self.lower.base.open(inode, Access::Read)?;
        let copy = self.lower.base.lookup(dir, copy)?.0;
        let to = self.lower.base.open(&copy, Access::ReadWrite)?;
        let cut = data.cut.min(data.size).min(size);
        let overwritten = data
            .written
            .iter()
            .map(|range| WrittenRange::of_copy(range.start, range.end.min(cut)));
        let mut written: Vec<WrittenRange> = overwritten
            .filter(|range| range.start < range.end)
            .collect();
        if cut < size {
            written.push(WrittenRange::of_copy(cut, size));
        }
        for range in &written {
            copy_with_holes(&self.lower.base, &from, &to, range.start..range.end)?;
        }
        Ok(DataChange {
            cut,
            size,
            written,
            grows: false,
        })
    }

    /// Reads the few bytes that a commit overwrites. Returns the change that restores them, with the bytes in the
    /// log itself.
    fn read_old_bytes(
        &self,
        inode: &B::Inode,
        attr: &Attr,
        data: &DataChange,
    ) -> Result<DataChange, Errno> {
        let file = self.lower.base.open(inode, Access::Read)?;
        let mut written = Vec::new();
        for range in &data.written {
            let end = range.end.min(attr.size);
            let mut bytes = vec![0; end.saturating_sub(range.start) as usize];
            let count = self.lower.base.read_at(&file, &mut bytes, range.start)?;
            bytes.truncate(count);
            written.push(WrittenRange {
                start: range.start,
                end: range.start + count as u64,
                source: BytesSource::Inline(bytes),
            });
        }
        Ok(DataChange {
            cut: attr.size,
            size: attr.size,
            written,
            grows: false,
        })
    }

    /// Keeps the log of an applied commit if the commit can be undone, and removes the logs that are too old. Returns
    /// whether the log is kept.
    pub(crate) fn keep_log(
        &self,
        firn: &B::Inode,
        serial: u64,
        log: &ChangeLog,
    ) -> Result<bool, StoreError> {
        let is_kept = log.can_be_undone && self.commits_max > 0;
        if is_kept {
            let from = format!("tx-{serial}");
            let to = undo_dir_name(serial);
            // An earlier attempt may have renamed the directory already.
            if staging::find(&self.lower.base, firn, OsStr::new(&from))?.is_some() {
                let no_flags = RenameFlags::empty();
                self.lower
                    .base
                    .rename(firn, OsStr::new(&from), firn, OsStr::new(&to), no_flags)?;
            }
            self.lower.base.sync_dir(firn)?;
        }
        // A restore cannot go back over a commit that cannot be undone, so all older logs are removed then.
        let count = if is_kept {
            self.commits_max as usize
        } else {
            0
        };
        let scope = log.scope_after(Direction::Redo);
        let logs = self.all_undo_logs()?;
        let chain = chain_of(&logs, if is_kept { scope } else { &log.scope });
        let is_needed = |serial: &u64| chain.iter().take(count).any(|needed| needed == serial);
        // Logs of an earlier directory with the name of the scope do not lead back from the present state, so they are
        // removed too.
        let of_scope = logs.iter().filter(|(serial, log)| {
            log.scope_after(Direction::Redo) == scope || chain.contains(serial)
        });
        for (serial, _) in of_scope.filter(|(serial, _)| !is_needed(serial)) {
            self.remove_undo(firn, &undo_dir_name(*serial))?;
        }
        Ok(is_kept)
    }

    /// Removes the directory of an ended transaction, or only what an undo does not need if its log is kept.
    pub(crate) fn remove_or_keep(
        &self,
        firn: &B::Inode,
        serial: u64,
        dir: &B::Inode,
    ) -> Result<(), Errno> {
        if self.commits_max > 0
            && staging::find(&self.lower.base, firn, OsStr::new(&undo_dir_name(serial)))?.is_some()
        {
            return self.clear_redo(dir);
        }
        self.lower
            .remove_transaction(firn, dir, &format!("tx-{serial}"))
    }

    /// Removes the files of a kept log that only a redo needs.
    fn clear_redo(&self, dir: &B::Inode) -> Result<(), Errno> {
        for mark in [staging::OPEN, staging::ARENA, staging::BACKUP] {
            if staging::find(&self.lower.base, dir, OsStr::new(mark))?.is_some() {
                self.lower.base.unlink(dir, OsStr::new(mark))?;
            }
        }
        let Some((new, _)) = staging::find_dir(&self.lower.base, dir, staging::NEW)? else {
            return Ok(());
        };
        for (staging_dir, ..) in staging::list(&self.lower.base, &new)? {
            let staging_dir = String::from_utf8_lossy(&staging_dir);
            if staging_dir != UNDO_DIR
                && let Some((staging_dir, _)) =
                    staging::find_dir(&self.lower.base, &new, &staging_dir)?
            {
                let is_anchor = |name: &[u8]| name.starts_with(ANCHOR.as_bytes());
                staging::clear_but(&self.lower.base, &staging_dir, &is_anchor)?;
            }
        }
        Ok(())
    }

    /// Removes a kept log with its directory. The log goes first, so that a crash leaves no log without its files.
    fn remove_undo(&self, firn: &B::Inode, undo: &str) -> Result<(), Errno> {
        let dir = staging::must_find_dir(&self.lower.base, firn, undo)?;
        self.lower.forget_records(&dir)?;
        staging::clear(&self.lower.base, &dir)?;
        self.lower.base.rmdir(firn, OsStr::new(undo))
    }

    /// After a crash, completes interrupted work on kept logs: removes redo files, and directories without a log.
    pub(crate) fn clear_kept_logs(&self, firn: &B::Inode) -> Result<(), StoreError> {
        let mut is_synced = false;
        for (undo, ..) in staging::list(&self.lower.base, firn)? {
            let undo = String::from_utf8_lossy(&undo).into_owned();
            let Some(serial) = undo
                .strip_prefix("undo-")
                .and_then(|number| number.parse::<u64>().ok())
            else {
                continue;
            };
            // The rename that kept the log may not be durable, and without it the redo parts count.
            if !is_synced {
                self.lower.base.sync_dir(firn)?;
                is_synced = true;
            }
            // The next transaction must not take a number whose log is kept.
            self.scopes.skip_serial(serial);
            let dir = staging::must_find_dir(&self.lower.base, firn, &undo)
                .map_err(|error| error.below(&self.lower.staging_path()))?;
            let has = |file: &str| staging::find(&self.lower.base, &dir, OsStr::new(file));
            if has(staging::COMMIT)?.is_none() && has(staging::UNDO)?.is_none() {
                self.remove_undo(firn, &undo)?;
            } else {
                self.clear_redo(&dir)?;
            }
        }
        Ok(())
    }

    /// Removes the number of the last commit and the kept logs of a scope whose directory is gone.
    pub(crate) fn forget_commits(&self, scope: &[u8]) -> Result<(), StoreError> {
        let Some(firn) = self.lower.find_staging_dir()? else {
            return Ok(());
        };
        let _numbers = Claim::own(&self.numbers);
        let mut numbers = staging::load_commit_numbers(&self.lower.base, &firn)?;
        if numbers.remove(scope).is_some() {
            staging::store_commit_numbers(&self.lower.base, &firn, &numbers)?;
        }
        for (serial, _) in self.undo_logs(scope)? {
            self.remove_undo(&firn, &undo_dir_name(serial))?;
        }
        Ok(())
    }

    /// Returns the logs that lead back from the present state of a scope, with their serial numbers, newest first.
    fn undo_logs(&self, scope: &[u8]) -> Result<Vec<(u64, ChangeLog)>, StoreError> {
        let mut logs = self.all_undo_logs()?;
        let chain = chain_of(&logs, scope);
        logs.retain(|(serial, _)| chain.contains(serial));
        Ok(logs)
    }

    /// Returns all kept logs with their serial numbers, newest first.
    fn all_undo_logs(&self) -> Result<Vec<(u64, ChangeLog)>, StoreError> {
        let Some(firn) = self.lower.find_staging_dir()? else {
            return Ok(Vec::new());
        };
        let mut logs = Vec::new();
        for (undo, ..) in staging::list(&self.lower.base, &firn)? {
            let text = String::from_utf8_lossy(&undo).into_owned();
            let Some(serial) = text
                .strip_prefix("undo-")
                .and_then(|n| n.parse::<u64>().ok())
            else {
                continue;
            };
            self.scopes.skip_serial(serial);
            let dir = staging::must_find_dir(&self.lower.base, &firn, &text)
                .map_err(|error| error.below(&self.lower.staging_path()))?;
            for file in [staging::COMMIT, staging::UNDO] {
                logs.extend(
                    self.lower
                        .load_record(&dir, &text, file)?
                        .map(|record| (serial, record)),
                );
            }
        }
        logs.sort_by_key(|(serial, _)| std::cmp::Reverse(*serial));
        Ok(logs)
    }

    /// Returns the numbers of the commits to which a scope can be restored, newest first.
    pub fn kept(&self, scope: &[u8]) -> Result<Vec<u64>, StoreError> {
        let undone = self
            .undo_logs(scope)?
            .into_iter()
            .filter_map(|(_, log)| log.id_before);
        Ok(self
            .lower
            .committed(scope)?
            .into_iter()
            .chain(undone)
            .collect())
    }

    /// Returns `Ok` if a scope can be restored to commit `id`, or the reason that it cannot.
    pub fn can_restore(&self, scope: &[u8], id: u64) -> Result<(), RestoreError> {
        self.steps_back(scope, id).map(drop)
    }

    /// Returns the serial numbers of the logs whose undo leads back to commit `id`, in order.
    pub(crate) fn steps_back(&self, scope: &[u8], id: u64) -> Result<Vec<u64>, RestoreError> {
        if self.lower.committed(scope)? == Some(id) {
            return Ok(Vec::new());
        }
        let logs = self.undo_logs(scope)?;
        match logs
            .iter()
            .position(|(_, log)| log.id_before == Some(id) && id != NO_ID)
        {
            Some(last) => Ok(logs[..=last].iter().map(|(serial, _)| *serial).collect()),
            None => Err(RestoreError::NotKept {
                wanted: id,
                kept: self.kept(scope)?,
            }),
        }
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// Undoes the newest commit of the scope at `root`, whose log has this serial number. The caller keeps names and
    /// data.
    ///
    /// From the rename of its directory on, the undo is a decided transaction. If it fails after the rename, it can be
    /// completed by [`Decided::apply`](crate::Decided::apply), the next [`TransactionalBacking::restore`], or the next
    /// mount.
    pub(crate) fn undo_commit(&self, root: &Arc<Object<B>>, serial: u64) -> Result<(), StoreError> {
        let firn = self.lower.staging_dir()?;
        let flags = RenameFlags::empty();
        let undo = undo_dir_name(serial);
        let dir = staging::must_find_dir(&self.lower.base, &firn, &undo)?;
        let from = OsStr::new(staging::COMMIT);
        let to = OsStr::new(staging::UNDO);
        if staging::find(&self.lower.base, &dir, from)?.is_some() {
            self.lower.base.rename(&dir, from, &dir, to, flags)?;
            self.lower.base.sync_dir(&dir)?;
        }
        let missing_log = || StoreError::Record {
            path: format!("{}/{undo}/{}", self.lower.staging_path(), staging::UNDO),
            source: LogError::Damaged,
        };
        let record = self
            .lower
            .load_record(&dir, &undo, staging::UNDO)?
            .ok_or_else(missing_log)?;
        let serial = self.scopes.next_serial();
        let scope = self
            .stored_scopes
            .undoing_scope(serial, root, dir, record)?;
        let transaction = format!("tx-{serial}");
        self.lower.base.rename(
            &firn,
            OsStr::new(&undo),
            &firn,
            OsStr::new(&transaction),
            flags,
        )?;
        self.scopes.add(Arc::new(scope));
        self.commits.apply_undo(serial)
    }

    /// Restores the scope at `root` to the commit `id`.
    ///
    /// If `id` is the number of a prepared or decided transaction, its commit is finished. Otherwise the open
    /// transaction and the commits after `id` are undone, as far as the history has their logs.
    pub fn restore(&self, root: &Arc<Object<B>>, id: u64) -> Result<(), RestoreError> {
        if let Some(TransactionHandle::Decided(commit)) = self.transaction_at(root)
            && commit.is_undo()
        {
            // An earlier restore failed while it undid this commit, so the undo is completed first.
            commit.apply()?;
        }
        let found = self.transaction_at(root);
        if let Some(found) = &found {
            found.apply_commit_before()?;
        }
        if let Some(found) = &found
            && found.id() == Some(id)
        {
            return Ok(found.decide(id)?.apply()?);
        }
        let path = match &found {
            Some(found) => found.scope().to_vec(),
            None => path_of(root),
        };
        let steps = self.history.steps_back(&path, id)?;
        if let Some(found) = found {
            found.abort()?;
        }
        self.backups.withdraw_ended()?;
        let mut parts = vec![Area::Tree(Arc::clone(root))];
        // The undone commit may have given the directory its name.
        parts.extend(root.parent().map(Area::Dir));
        let _quiet = self.tree.quiesce(parts);
        for serial in steps {
            self.undo_commit(root, serial)?;
        }
        Ok(())
    }
}
