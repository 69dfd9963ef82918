//! Reads the durable records of transactions, and removes them in an order in which a crash loses nothing.
//!
//! A *record* is a file in the transaction's directory that says what to do with the transaction after a crash: `open`,
//! `record` (prepared), `commit` (decided) or `undo` (a commit that is undone). All but `open` have a log of changes.
//!
//! Invariants
//! * A log that must still be applied is the last record that is removed. A directory without records is unused, and
//!   the next open removes it.
//! * The number of a commit is stored before its log is removed.

use std::ffi::OsStr;
use std::sync::Arc;

use firn_backing::{Backing, Errno, SyncScope};

use crate::backup::rounds::Backups;
use crate::change_log::{ChangeLog, Direction, NO_ID};
use crate::claim::Claim;
use crate::error::StoreError;
use crate::history::History;
use crate::link_counts::LinkCounts;
use crate::lower_backing::LowerBacking;
use crate::scope::{Scope, Stage};
use crate::scopes::{Leftover, Scopes};
use crate::shadow::Shadow;
use crate::staging;

impl<B: Backing> LowerBacking<B> {
    /// Reads the record `file`, a stored change log, in the directory `dir` of a transaction. Returns `None` if there
    /// is none. `dir_name` is the name of `dir`, for messages.
    pub(crate) fn load_record(
        &self,
        dir: &B::Inode,
        dir_name: &str,
        file: &str,
    ) -> Result<Option<ChangeLog>, StoreError> {
        let dir_path = format!("{}/{dir_name}", self.transactions_path());
        let bytes =
            staging::read_file(&self.base, dir, file).map_err(|error| error.below(&dir_path))?;
        let Some(bytes) = bytes else {
            return Ok(None);
        };
        match ChangeLog::decode(&bytes) {
            Ok(log) => Ok(Some(log)),
            Err(source) => Err(StoreError::Record {
                path: format!("{dir_path}/{file}"),
                source,
            }),
        }
    }

    /// Returns the number of the commit whose files a scope has: the last commit, or an earlier one that was restored.
    pub fn present_commit_id(&self, scope: &[u8]) -> Result<Option<u64>, StoreError> {
        let Some(transactions_dir) = self.find_transactions_dir()? else {
            return Ok(None);
        };
        Ok(staging::load_commit_numbers(&self.base, &transactions_dir)?.remove(scope))
    }

    /// Removes the record of a prepared transaction, durably. The transaction then counts as open.
    pub(crate) fn remove_prepared_record(&self, dir: &B::Inode) -> Result<(), Errno> {
        if staging::find(&self.base, dir, OsStr::new(staging::RECORD))?.is_some() {
            self.base.unlink(dir, OsStr::new(staging::RECORD))?;
        }
        self.base.sync_dir(dir)
    }

    /// Removes all records of a transaction durably: the files in `dir` that say what a recovery must do. The next
    /// mount then treats the directory as unused.
    pub(crate) fn remove_records(&self, dir: &B::Inode) -> Result<(), Errno> {
        let is_shadow = Shadow::is_in_dir(&self.base, dir)?;
        // A log that may still have to be applied is removed last.
        for record in [
            staging::OPEN,
            staging::RECORD,
            staging::COMMIT,
            staging::UNDO,
        ] {
            if staging::find(&self.base, dir, OsStr::new(record))?.is_none() {
                continue;
            }
            self.base.unlink(dir, OsStr::new(record))?;
            // In shadow mode the backing has the changes at once. Each removal must be durable before the next one.
            // Otherwise, after a crash, only `open` could be left, and a recovery would undo changes that count.
            if is_shadow {
                self.base.sync_dir(dir)?;
            }
        }
        self.base.sync_dir(dir)
    }

    /// Removes the directory of a transaction: its records first, then everything else.
    pub(crate) fn remove_transaction(
        &self,
        transactions_dir: &B::Inode,
        dir: &B::Inode,
        name: &str,
    ) -> Result<(), Errno> {
        self.remove_records(dir)?;
        staging::remove_contents(&self.base, dir)?;
        self.base.rmdir(transactions_dir, OsStr::new(name))
    }
}

/// Ends transactions: removes their records, directories and hidden links.
pub(crate) struct Endings<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) scopes: Arc<Scopes<B>>,
    pub(crate) link_counts: Arc<LinkCounts<B>>,
    pub(crate) history: Arc<History<B>>,
    pub(crate) backups: Arc<Backups<B>>,
}

impl<B: Backing> Endings<B> {
    pub(crate) fn new(
        lower: &Arc<LowerBacking<B>>,
        scopes: &Arc<Scopes<B>>,
        link_counts: &Arc<LinkCounts<B>>,
        history: &Arc<History<B>>,
        backups: &Arc<Backups<B>>,
    ) -> Self {
        Self {
            lower: Arc::clone(lower),
            scopes: Arc::clone(scopes),
            link_counts: Arc::clone(link_counts),
            history: Arc::clone(history),
            backups: Arc::clone(backups),
        }
    }

    /// Ends a commit or restore after its log is applied to the backing. Stores the number of the commit that the
    /// transaction's directory has now. Keeps the log if the history wants it for an undo; otherwise removes the
    /// transaction's records.
    pub(crate) fn finish_commit(
        &self,
        dir: &B::Inode,
        log: &ChangeLog,
        direction: Direction,
        serial: u64,
    ) -> Result<(), StoreError> {
        self.lower.base.sync_scope(SyncScope::Changes)?;
        // The backup is dropped before the record is removed. If a crash came between, a backup without a record would
        // look like the only copy of a lost transaction.
        self.backups.drop_backup(serial);
        // Held until the return: no other thread changes the stored numbers of commits.
        let _numbers_claim = Claim::acquire_exclusive(&self.history.numbers_claim);
        let transactions_dir = self.lower.make_transactions_dir()?;
        // The transaction may have renamed its directory, so the number moves from the old path to the new one.
        let mut numbers = staging::load_commit_numbers(&self.lower.base, &transactions_dir)?;
        numbers.remove(log.scope_before(direction));
        let scope = log.scope_after(direction);
        match log.id_after(direction) {
            // A restore led back to the state before the first commit.
            NO_ID => numbers.remove(scope),
            id => numbers.insert(scope.to_vec(), id),
        };
        staging::store_commit_numbers(&self.lower.base, &transactions_dir, &numbers)?;
        if direction == Direction::Redo && self.history.keep_log(&transactions_dir, serial, log)? {
            return Ok(());
        }
        Ok(self.lower.remove_records(dir)?)
    }

    /// Ends a transaction for programs. From now on they see the backing, with the changes of the transaction that
    /// follows.
    pub(crate) fn end_transaction(&self, scope: &Arc<Scope<B>>) {
        self.link_counts.mark_links_ending(scope);
        self.scopes.replace_by_next(scope);
        scope.set_stage(Stage::Ended);
    }

    /// Removes the directory of an ended transaction. Its outcome is durable, so an error is only logged: a later begin
    /// or mount removes the rest.
    pub(crate) fn clean_up(&self, scope: &Scope<B>) {
        let is_removed = match self.lower.make_transactions_dir() {
            Ok(transactions_dir) => {
                self.remove_or_leave(&transactions_dir, scope.serial, &scope.dir)
            }
            Err(error) => {
                tracing::warn!(%error, serial = scope.serial, "cannot remove the staged files of a transaction");
                self.scopes.add_leftover(scope.serial, &scope.dir);
                false
            }
        };
        // The hidden links to objects were in the removed directory. What several hosts share is in another one, which
        // the last host removes.
        let is_shared = scope.shadow.as_ref().is_some_and(Shadow::is_shared);
        if is_removed && !is_shared {
            self.link_counts.remove_links(scope);
        }
    }

    /// Removes the directory of a transaction that is over, and returns whether it is removed. After an error, the next
    /// begin or the next mount tries again.
    pub(crate) fn remove_or_leave(
        &self,
        transactions_dir: &B::Inode,
        serial: u64,
        dir: &B::Inode,
    ) -> bool {
        let removed = self
            .history
            .discard_ended_transaction(transactions_dir, serial, dir);
        if let Err(errno) = removed {
            tracing::warn!(%errno, serial, "cannot remove the staged files of a transaction; firnd tries again");
            self.scopes.add_leftover(serial, dir);
        }
        removed.is_ok()
    }

    /// Tries again to remove the directories of transactions that are over.
    pub(crate) fn remove_leftovers(&self, transactions_dir: &B::Inode) {
        for Leftover { serial, dir } in self.scopes.take_leftovers() {
            self.remove_or_leave(transactions_dir, serial, &dir);
        }
    }
}
