//! [`History`]: keeps the change logs of the last N commits of a directory (`history=N`), so that they can be undone.
//!
//! The files of a transaction are in `.firn/tx-N/` until its commit is applied. The *scope* is the directory that it
//! covers.
//! * Before a commit is decided, the *undo* parts of its log are added: what the old tree had. Old attributes and old
//!   bytes are saved in `tx-N/new/u/`; the commit also moves removed objects there.
//! * When the commit is applied, one rename turns `tx-N` into `undo-N`. Files that only a redo needed are removed after
//!   it.
//! * A restore renames the log in `undo-N` from `commit` to `undo`, and then `undo-N` to a new `tx-M`. From then on it
//!   is a decided transaction that is applied backward, so a crash during a restore is recovered like one during a
//!   commit.

use std::cmp::Reverse;
use std::ffi::OsStr;
use std::sync::Arc;

use firn_backing::{Access, Attr, Backing, Errno, RenameFlags, SetTime};

use crate::change_log::{
    BytesSource, ChangeLog, DataChange, Direction, Entry, EntrySide, Identity, LogError, NO_ID,
    StagedPath, WrittenRange,
};
use crate::claim::Claim;
use crate::copy::copy_with_holes;
use crate::error::{RestoreError, StoreError};
use crate::lower_backing::LowerBacking;
use crate::object::{Object, ObjectKey};
use crate::scope::Scope;
use crate::scopes::Scopes;
use crate::staging;
use crate::transaction::handle::TransactionHandle;
use crate::transactional::TransactionalBacking;
use crate::tree::{Tree, path_of};
use crate::uses::Area;

/// Directory below `new/` for the old bytes, attributes and objects that undo a commit.
const UNDO_DIR: &str = "u";
/// Prefix of the name of a removed object in `new/u/`, which an undo moves back; the number of the object follows.
const KEPT_OBJECT_PREFIX: &str = "k";
/// Prefix of the name of an anchor ([`Entry::anchor_at`]) in `new/`; the number of the object follows.
pub(crate) const ANCHOR: &str = "l";

/// Prefix of the name of a directory with a kept log; the serial number of its transaction follows.
const KEPT_LOG_PREFIX: &str = "undo-";

/// Returns the name of the directory with a kept log.
fn kept_log_dir_name(serial: u64) -> String {
    format!("{KEPT_LOG_PREFIX}{serial}")
}

/// Returns the serial number in the name of a directory with a kept log; `None` for any other name.
fn kept_log_serial(dir_name: &str) -> Option<u64> {
    dir_name.strip_prefix(KEPT_LOG_PREFIX)?.parse().ok()
}

/// Returns the staged path of an object in `new/u/`.
fn staged_in_undo_dir(name: String) -> StagedPath {
    StagedPath {
        dir: UNDO_DIR.to_owned(),
        name,
    }
}

/// The log of an applied commit, kept for its undo.
struct KeptLog {
    /// Serial number of the transaction.
    serial: u64,
    log: ChangeLog,
}

/// Returns the serial numbers of the commits of a directory that can be undone in turn, newest first. Follows renames
/// of the directory. `logs` are all change logs that the history has, newest first; `scope` is the directory's path.
fn serials_leading_back(logs: &[KeptLog], scope: &[u8]) -> Vec<u64> {
    let mut serials = Vec::new();
    let mut path_after_commit = scope;
    for KeptLog { serial, log } in logs {
        if log.scope_after(Direction::Redo) != path_after_commit {
            continue;
        }
        serials.push(*serial);
        // Before this commit the scope did not exist.
        if creates_top(log) {
            break;
        }
        path_after_commit = &log.scope;
    }
    serials
}

/// Returns whether the transaction of a log creates the top of its scope.
fn creates_top(log: &ChangeLog) -> bool {
    log.top.as_ref().is_some_and(|top| top.is_new)
}

/// The commits that a backing keeps after their application.
pub struct History<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) tree: Arc<Tree<B>>,
    pub(crate) scopes: Arc<Scopes<B>>,
    /// Maximum number of commits of each scope that can be undone.
    pub(crate) commits_max: u32,
    /// The thread that changes the stored numbers of the last commits holds this claim exclusively.
    pub(crate) numbers_claim: Claim,
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
            numbers_claim: Claim::default(),
        }
    }

    /// Adds to the change log of a commit what an undo of it needs, and copies old bytes and attributes to the
    /// transaction's directory in the backing. Does nothing if the mount keeps no history of commits.
    ///
    /// `scope` is the transaction, which is not committed yet.
    pub(crate) fn stage_undo_sides(
        &self,
        scope: &Scope<B>,
        log: &mut ChangeLog,
    ) -> Result<(), Errno> {
        if self.commits_max == 0 {
            return Ok(());
        }
        let transactions_dir = self.lower.make_transactions_dir()?;
        // The number of the commit to which the undo leads back. A directory that the transaction creates has none.
        if !creates_top(log) {
            log.id_before = staging::load_commit_numbers(&self.lower.base, &transactions_dir)?
                .remove(&scope.path);
        }
        log.can_be_undone = true;
        let undo_dir = staging::make_dir(&self.lower.base, &scope.new, UNDO_DIR)?;
        // An earlier attempt may have left files.
        staging::remove_contents(&self.lower.base, &undo_dir)?;
        let changed = scope.changed.lock().clone();
        for entry in &mut log.entries {
            let object = match changed.get(&entry.number) {
                Some(object) => Some(Arc::clone(object)),
                None => self.find_object_in_use(entry.identity),
            };
            // Directories above the scope are not part of it, so a restore does not change their times.
            let object_in_scope = object.filter(|object| scope.covers(object));
            self.stage_undo_side(entry, object_in_scope.as_ref(), &undo_dir)?;
        }
        Ok(())
    }

    /// Returns the object with this identity if it is in use and on the file system of the backing's top.
    fn find_object_in_use(&self, identity: Identity) -> Option<Arc<Object<B>>> {
        if identity.elsewhere {
            return None;
        }
        self.tree.find_object(ObjectKey {
            dev: self.lower.device,
            ino: identity.ino,
        })
    }

    /// Adds to one entry of a change log how an undo of the commit restores the entry's object.
    /// * If the commit removes the object, `kept_at` says where it moves instead.
    /// * Old times, bytes and attributes go to `entry.undo`, or to a file in `undo_dir` (`new/u/`) to which it refers.
    ///
    /// `object` is the entry's object; `None` if the transaction does not cover it or no program uses it.
    fn stage_undo_side(
        &self,
        entry: &mut Entry,
        object: Option<&Arc<Object<B>>>,
        undo_dir: &B::Inode,
    ) -> Result<(), Errno> {
        // The undo removes an object that the commit made.
        let is_new = entry.new_at.is_some();
        if is_new {
            return Ok(());
        }
        let loses_all_names = entry.after.is_empty() && !entry.before.is_empty();
        if loses_all_names {
            let kept_name = format!("{KEPT_OBJECT_PREFIX}{}", entry.number);
            entry.kept_at = Some(staged_in_undo_dir(kept_name));
        }
        let Some(object) = object else {
            return Ok(());
        };
        let Some(inode) = object.base() else {
            return Ok(());
        };
        let attr = self.lower.base.attr(&inode)?;
        if entry.is_dir {
            entry.undo.atime = Some(attr.atime.into());
            entry.undo.mtime = Some(attr.mtime.into());
        }
        if entry.redo.copy_at.is_some() {
            // The result includes the times that were set above.
            entry.undo = self.stage_old_copy(entry, object, &inode, undo_dir)?;
        } else if let Some(data) = &entry.redo.data {
            // A commit of a few bytes needs no file: the change log itself gets the old ones.
            entry.undo.data = Some(self.read_old_bytes(&inode, &attr, data)?);
            entry.undo.mtime = Some(attr.mtime.into());
        }
        Ok(())
    }

    /// Copies the old attributes of an object, and the old bytes of the ranges that the commit writes, to a new object
    /// in `undo_dir`. Returns `entry.undo` with a reference to this copy, and with the change that restores the bytes.
    ///
    /// `entry` is the object's entry in the change log, and `inode` the object in the backing.
    fn stage_old_copy(
        &self,
        entry: &Entry,
        object: &Object<B>,
        inode: &B::Inode,
        undo_dir: &B::Inode,
    ) -> Result<EntrySide, Errno> {
        let copy_name = entry.number.to_string();
        let copy_os_name = OsStr::new(&copy_name);
        let old_attr = self
            .lower
            .copy_object(object.kind, inode, undo_dir, copy_os_name)?;
        let mut undo_side = EntrySide {
            copy_at: Some(staged_in_undo_dir(copy_name.clone())),
            // The times of a directory, which the caller has set.
            ..entry.undo.clone()
        };
        if let Some(data) = &entry.redo.data {
            let dir_and_name = (undo_dir, copy_os_name);
            undo_side.data =
                Some(self.stage_old_bytes(inode, dir_and_name, data, old_attr.size)?);
            // An undo gives the file the times of the copy. The writes to the copy have changed them.
            let (copy, _) = self.lower.base.lookup(undo_dir, copy_os_name)?;
            self.lower.base.set_times(
                &copy,
                SetTime::At(old_attr.atime),
                SetTime::At(old_attr.mtime),
            )?;
        }
        Ok(undo_side)
    }

    /// Copies the bytes that a commit of `data` overwrites or cuts off to the file `copy_name` in `undo_dir`. Returns
    /// the change that restores them. `inode` is the file in the backing, which has `old_size` bytes before the commit.
    fn stage_old_bytes(
        &self,
        inode: &B::Inode,
        (undo_dir, copy_name): (&B::Inode, &OsStr),
        data: &DataChange,
        old_size: u64,
    ) -> Result<DataChange, Errno> {
        let source = self.lower.base.open(inode, Access::Read)?;
        let (copy, _) = self.lower.base.lookup(undo_dir, copy_name)?;
        let target = self.lower.base.open(&copy, Access::ReadWrite)?;
        // Old bytes from here on do not survive the commit, so all of them are copied.
        let cut = data.cut.min(data.size).min(old_size);
        let mut written: Vec<WrittenRange> = data
            .written
            .iter()
            .map(|range| WrittenRange::of_copy(range.start, range.end.min(cut)))
            .filter(|range| range.start < range.end)
            .collect();
        if cut < old_size {
            written.push(WrittenRange::of_copy(cut, old_size));
        }
        for range in &written {
            copy_with_holes(&self.lower.base, &source, &target, range.start..range.end)?;
        }
        Ok(DataChange {
            cut,
            size: old_size,
            written,
            grows: false,
        })
    }

    /// Reads the few bytes of `inode`, a file in the backing, that a commit of `data` overwrites. Returns the change
    /// that restores them, with the old bytes in the change log itself. `attr` has the file's present size.
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
        // These few bytes are written in place: the size does not change, and nothing is cut off.
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
        transactions_dir: &B::Inode,
        serial: u64,
        log: &ChangeLog,
    ) -> Result<bool, StoreError> {
        let is_kept = log.can_be_undone && self.commits_max > 0;
        if is_kept {
            self.rename_to_kept_log(transactions_dir, serial)?;
        }
        self.remove_old_logs(transactions_dir, log, is_kept)?;
        Ok(is_kept)
    }

    /// Renames the directory `tx-N` of a committed transaction, in the backing, to `undo-N`, durably. It keeps the
    /// change log for an undo.
    fn rename_to_kept_log(
        &self,
        transactions_dir: &B::Inode,
        serial: u64,
    ) -> Result<(), StoreError> {
        let transaction_name = format!("tx-{serial}");
        let old_name = OsStr::new(&transaction_name);
        // An earlier attempt may have renamed the directory already.
        if staging::find(&self.lower.base, transactions_dir, old_name)?.is_some() {
            self.lower.base.rename(
                transactions_dir,
                old_name,
                transactions_dir,
                OsStr::new(&kept_log_dir_name(serial)),
                RenameFlags::empty(),
            )?;
        }
        Ok(self.lower.base.sync_dir(transactions_dir)?)
    }

    /// Removes the logs of a directory that no restore can use after the commit with `log`: all but the newest
    /// `commits_max`. `has_log` says whether the log of that commit itself is kept.
    ///
    /// A restore cannot go back over a commit without a log, so without `has_log` all logs are removed.
    fn remove_old_logs(
        &self,
        transactions_dir: &B::Inode,
        log: &ChangeLog,
        has_log: bool,
    ) -> Result<(), StoreError> {
        let scope_after = log.scope_after(Direction::Redo);
        let kept_logs = self.load_all_logs()?;
        let (newest_scope, needed_count) = if has_log {
            (scope_after, self.commits_max as usize)
        } else {
            (&log.scope[..], 0)
        };
        let serials = serials_leading_back(&kept_logs, newest_scope);
        let needed_serials = &serials[..serials.len().min(needed_count)];
        for kept_log in &kept_logs {
            let serial = kept_log.serial;
            // An earlier directory may have had the same path. Its logs do not lead back from the present state, so
            // they are removed too.
            let is_of_scope = kept_log.log.scope_after(Direction::Redo) == scope_after
                || serials.contains(&serial);
            if is_of_scope && !needed_serials.contains(&serial) {
                self.remove_kept_log(transactions_dir, &kept_log_dir_name(serial))?;
            }
        }
        Ok(())
    }

    /// Removes the files of a transaction that has ended. If the history keeps its log, removes only what an undo of
    /// the commit does not need; otherwise removes its whole directory.
    ///
    /// `dir` is that directory in the backing. It is named `tx-N`, or `undo-N` if the log is kept.
    pub(crate) fn discard_ended_transaction(
        &self,
        transactions_dir: &B::Inode,
        serial: u64,
        dir: &B::Inode,
    ) -> Result<(), Errno> {
        if self.commits_max > 0 {
            let kept_log_name = kept_log_dir_name(serial);
            let kept_log_dir = staging::find(
                &self.lower.base,
                transactions_dir,
                OsStr::new(&kept_log_name),
            )?;
            if kept_log_dir.is_some() {
                return self.remove_redo_files(dir);
            }
        }
        self.lower
            .remove_transaction(transactions_dir, dir, &format!("tx-{serial}"))
    }

    /// Removes the files in `dir` that an undo of the commit does not need: the files `open`, `arena` and `backup`,
    /// and the new bytes, which the commit has moved or copied to the tree.
    fn remove_redo_files(&self, dir: &B::Inode) -> Result<(), Errno> {
        // An undo finds objects by their anchors, so these remain.
        let is_anchor = |name: &[u8]| name.starts_with(ANCHOR.as_bytes());
        for mark in [staging::OPEN, staging::ARENA, staging::BACKUP] {
            if staging::find(&self.lower.base, dir, OsStr::new(mark))?.is_some() {
                self.lower.base.unlink(dir, OsStr::new(mark))?;
            }
        }
        let Some((new, _)) = staging::find_dir(&self.lower.base, dir, staging::NEW)? else {
            return Ok(());
        };
        for (name, ..) in staging::list(&self.lower.base, &new)? {
            let name = String::from_utf8_lossy(&name);
            if name == UNDO_DIR {
                continue;
            }
            if let Some((staging_dir, _)) = staging::find_dir(&self.lower.base, &new, &name)? {
                staging::remove_contents_except(&self.lower.base, &staging_dir, &is_anchor)?;
            }
        }
        Ok(())
    }

    /// Removes a kept log with its directory. The log goes first, so that a crash leaves no log without its files.
    fn remove_kept_log(&self, transactions_dir: &B::Inode, name: &str) -> Result<(), Errno> {
        let dir = staging::must_find_dir(&self.lower.base, transactions_dir, name)?;
        self.lower.remove_records(&dir)?;
        staging::remove_contents(&self.lower.base, &dir)?;
        self.lower.base.rmdir(transactions_dir, OsStr::new(name))
    }

    /// After a crash, completes the clean-up of the logs that are kept for an undo of commits: removes files that an
    /// undo does not need, and directories without a log.
    pub(crate) fn finish_log_cleanup(&self, transactions_dir: &B::Inode) -> Result<(), StoreError> {
        let mut is_synced = false;
        for (name, ..) in staging::list(&self.lower.base, transactions_dir)? {
            let name = String::from_utf8_lossy(&name).into_owned();
            let Some(serial) = kept_log_serial(&name) else {
                continue;
            };
            // The rename from `tx-N` to `undo-N` must be durable before files in the directory are removed. If the
            // rename were lost, the next recovery would apply the commit once more and need these files.
            if !is_synced {
                self.lower.base.sync_dir(transactions_dir)?;
                is_synced = true;
            }
            // The next transaction must not take the number of a kept log.
            self.scopes.skip_serial(serial);
            let dir = staging::must_find_dir(&self.lower.base, transactions_dir, &name)
                .map_err(|error| error.below(&self.lower.transactions_path()))?;
            let find_record =
                |record: &str| staging::find(&self.lower.base, &dir, OsStr::new(record));
            if find_record(staging::COMMIT)?.is_none() && find_record(staging::UNDO)?.is_none() {
                self.remove_kept_log(transactions_dir, &name)?;
            } else {
                self.remove_redo_files(&dir)?;
            }
        }
        Ok(())
    }

    /// Removes the number of the last commit and the kept logs of a scope whose directory is gone.
    pub(crate) fn remove_scope_history(&self, scope: &[u8]) -> Result<(), StoreError> {
        let Some(transactions_dir) = self.lower.find_transactions_dir()? else {
            return Ok(());
        };
        let _numbers_claim = Claim::acquire_exclusive(&self.numbers_claim);
        let mut numbers = staging::load_commit_numbers(&self.lower.base, &transactions_dir)?;
        if numbers.remove(scope).is_some() {
            staging::store_commit_numbers(&self.lower.base, &transactions_dir, &numbers)?;
        }
        for KeptLog { serial, .. } in self.kept_logs(scope)? {
            self.remove_kept_log(&transactions_dir, &kept_log_dir_name(serial))?;
        }
        Ok(())
    }

    /// Returns the logs that lead back from the present state of a scope, newest first.
    fn kept_logs(&self, scope: &[u8]) -> Result<Vec<KeptLog>, StoreError> {
        let mut kept_logs = self.load_all_logs()?;
        let serials = serials_leading_back(&kept_logs, scope);
        kept_logs.retain(|kept_log| serials.contains(&kept_log.serial));
        Ok(kept_logs)
    }

    /// Loads the change logs of all applied commits that can be undone, newest first. Also ensures that no new
    /// transaction gets the serial number of one of them.
    fn load_all_logs(&self) -> Result<Vec<KeptLog>, StoreError> {
        let Some(transactions_dir) = self.lower.find_transactions_dir()? else {
            return Ok(Vec::new());
        };
        let mut kept_logs = Vec::new();
        for (name, ..) in staging::list(&self.lower.base, &transactions_dir)? {
            let name = String::from_utf8_lossy(&name).into_owned();
            let Some(serial) = kept_log_serial(&name) else {
                continue;
            };
            self.scopes.skip_serial(serial);
            let dir = staging::must_find_dir(&self.lower.base, &transactions_dir, &name)
                .map_err(|error| error.below(&self.lower.transactions_path()))?;
            // A log has one of two names: a restore renames it from `commit` to `undo`, and may have failed afterwards.
            for record in [staging::COMMIT, staging::UNDO] {
                if let Some(log) = self.lower.load_record(&dir, &name, record)? {
                    kept_logs.push(KeptLog { serial, log });
                }
            }
        }
        kept_logs.sort_by_key(|kept_log| Reverse(kept_log.serial));
        Ok(kept_logs)
    }

    /// Returns the numbers of the commits to which a scope can be restored, newest first.
    pub fn restorable_commits(&self, scope: &[u8]) -> Result<Vec<u64>, StoreError> {
        let earlier_ids = self
            .kept_logs(scope)?
            .into_iter()
            .filter_map(|kept_log| kept_log.log.id_before);
        let present_id = self.lower.present_commit_id(scope)?;
        Ok(present_id.into_iter().chain(earlier_ids).collect())
    }

    /// Returns `Ok` if a scope can be restored to commit `id`, or the reason that it cannot.
    pub fn can_restore(&self, scope: &[u8], id: u64) -> Result<(), RestoreError> {
        self.serials_to_undo(scope, id).map(drop)
    }

    /// Returns the serial numbers of the commits that must be undone, in this order, to restore the directory at path
    /// `scope` to commit `id`. The list is empty if the directory has that state now. Fails with `NotKept` if the
    /// history has no logs that lead back to this commit.
    pub(crate) fn serials_to_undo(&self, scope: &[u8], id: u64) -> Result<Vec<u64>, RestoreError> {
        if self.lower.present_commit_id(scope)? == Some(id) {
            return Ok(Vec::new());
        }
        let kept_logs = self.kept_logs(scope)?;
        // The last commit to undo is the one that followed `id`. `NO_ID` stands for "no commit", so nothing is restored
        // to it.
        let last_index = kept_logs
            .iter()
            .position(|kept_log| kept_log.log.id_before == Some(id) && id != NO_ID);
        let Some(last_index) = last_index else {
            return Err(RestoreError::NotKept {
                wanted: id,
                kept: self.restorable_commits(scope)?,
            });
        };
        Ok(kept_logs[..=last_index]
            .iter()
            .map(|kept_log| kept_log.serial)
            .collect())
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// Undoes the newest commit of the directory `root`. `serial` is the serial number of its log. The caller has
    /// quiesced names and data: no program changes them meanwhile.
    /// 1. The log is renamed from `commit` to `undo`.
    /// 2. Its directory is renamed from `undo-N` to `tx-M`. From here on the undo is a decided transaction, which
    ///    [`Decided::apply`](crate::Decided::apply), a further [`TransactionalBacking::restore`] or the next mount
    ///    completes after an error.
    /// 3. The log is applied backward.
    pub(crate) fn undo_commit(&self, root: &Arc<Object<B>>, serial: u64) -> Result<(), StoreError> {
        let base = &self.lower.base;
        let transactions_dir = self.lower.make_transactions_dir()?;
        let kept_log_name = kept_log_dir_name(serial);
        let dir = staging::must_find_dir(base, &transactions_dir, &kept_log_name)?;
        let commit_record = OsStr::new(staging::COMMIT);
        // An earlier attempt may have renamed the record already.
        if staging::find(base, &dir, commit_record)?.is_some() {
            let undo_record = OsStr::new(staging::UNDO);
            base.rename(&dir, commit_record, &dir, undo_record, RenameFlags::empty())?;
            base.sync_dir(&dir)?;
        }
        let record = self
            .lower
            .load_record(&dir, &kept_log_name, staging::UNDO)?;
        let Some(record) = record else {
            let transactions_path = self.lower.transactions_path();
            return Err(StoreError::Record {
                path: format!("{transactions_path}/{kept_log_name}/{}", staging::UNDO),
                source: LogError::Damaged,
            });
        };
        let undo_serial = self.scopes.next_serial();
        let scope = self
            .stored_scopes
            .undoing_scope(undo_serial, root, dir, record)?;
        base.rename(
            &transactions_dir,
            OsStr::new(&kept_log_name),
            &transactions_dir,
            OsStr::new(&format!("tx-{undo_serial}")),
            RenameFlags::empty(),
        )?;
        self.scopes.add(Arc::new(scope));
        self.commits.apply_undo(undo_serial)
    }

    /// Restores the directory `root` to the state after the commit `id` of a transaction that covered it. Fails if the
    /// history does not reach that far; nothing is dropped then.
    ///
    /// If `id` is the number of a prepared or decided transaction, its commit is finished. Otherwise the open
    /// transaction and the commits after `id` are undone, as far as the history has their logs.
    pub fn restore(&self, root: &Arc<Object<B>>, id: u64) -> Result<(), RestoreError> {
        if let Some(TransactionHandle::Decided(commit)) = self.transaction_at(root)
            && commit.is_undo()
        {
            // An earlier restore failed while it undid this commit, so the undo is completed first. Afterwards the
            // directory has another transaction or none.
            commit.apply()?;
        }
        let transaction = self.transaction_at(root);
        if let Some(transaction) = &transaction {
            transaction.apply_commit_before()?;
            if transaction.id() == Some(id) {
                return Ok(transaction.decide(id)?.apply()?);
            }
        }
        let path = match &transaction {
            Some(transaction) => transaction.scope().to_vec(),
            None => path_of(root),
        };
        // All checks come before the abort, so a restore that fails here has dropped nothing.
        let serials = self.history.serials_to_undo(&path, id)?;
        if let Some(transaction) = transaction {
            transaction.abort()?;
        }
        // The number of the last commit shows which backups are of applied commits. The restore changes this number, so
        // these backups are withdrawn first.
        self.backups.withdraw_backups_of_applied()?;
        let mut areas = vec![Area::Tree(Arc::clone(root))];
        // The undone commit may have given the directory its name.
        areas.extend(root.parent().map(Area::Dir));
        // From here on no program changes the directory.
        let _quiet = self.tree.quiesce(areas);
        for serial in serials {
            self.undo_commit(root, serial)?;
        }
        Ok(())
    }
}
