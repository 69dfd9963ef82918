//! Prepare of a transaction: all of its changes become durable, and its outcome stays open.
//!
//! A prepare writes the change log to a new file in the transaction's directory `.firn/tx-N/`. It syncs the log with
//! all new data there, and renames it to `tx-N/record`. That rename prepares the transaction. The backup, if the mount
//! has one, is complete before the rename.
//!
//! Promise: after an error the transaction is open, with one exception: if the record can neither be synced nor
//! removed, the transaction counts as prepared.

use std::ffi::OsStr;
use std::sync::Arc;

use firn_backing::{Backing, Errno, RenameFlags, SyncScope};

use crate::error::{BackupError, PrepareError, StageError, VoteError};
use crate::lower_backing::LowerBacking;
use crate::scope::{Scope, Stage};
use crate::staging;
use crate::transactional::TransactionalBacking;

impl<B: Backing> LowerBacking<B> {
    /// Renames the newly written record to `name`: `record` for a prepare, `commit` for a decision. Does not sync.
    pub(crate) fn place_record(&self, scope: &Scope<B>, name: &str) -> Result<(), Errno> {
        let temporary_name = staging::new_name(staging::RECORD);
        self.base.rename(
            &scope.dir,
            OsStr::new(&temporary_name),
            &scope.dir,
            OsStr::new(name),
            RenameFlags::empty(),
        )
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// Prepares a transaction under the number `id`: its changes become durable, and its outcome stays open. See
    /// [`Open::prepare`](crate::Open::prepare).
    ///
    /// Returns `Ok` if it is prepared under this number already. Fails if it has another number, is over or is being
    /// undone.
    pub(super) fn prepare_scope(&self, scope: &Arc<Scope<B>>, id: u64) -> Result<(), PrepareError> {
        // A decided commit that the transaction follows comes first.
        self.commits.apply_commit_before(scope)?;
        // From here on no program changes what the transaction covers.
        let _quiet = self.tree.quiesce(vec![scope.area()]);
        self.tree.check_all(scope);
        // An abort has begun and failed, so some changes are gone.
        if !scope.has_all_changes() {
            return Err(StageError::Undoing.into());
        }
        match *scope.stage.lock() {
            Stage::Open => {}
            Stage::Prepared(found) if found == id => return Ok(()),
            Stage::Prepared(found) | Stage::Decided(found) => {
                return Err(StageError::OtherId { found, wanted: id }.into());
            }
            Stage::Ended => return Err(StageError::NoTransaction.into()),
        }
        self.write_record(scope, id)?;
        // This rename prepares the transaction. If it fails, the backup of the transaction is withdrawn, so that the
        // transaction cannot be committed from there.
        self.lower
            .place_record(scope, staging::RECORD)
            .inspect_err(|_| self.backups.withdraw_backup(scope))?;
        if let Err(errno) = self.lower.base.sync_dir(&scope.dir) {
            self.withdraw_failed_prepare(scope, id);
            return Err(errno.into());
        }
        scope.set_stage(Stage::Prepared(id));
        Ok(())
    }

    /// Removes the record of a transaction after a failed prepare under the number `id`, so that it remains open. If
    /// the record cannot be removed, a later firnd could decide it, so the transaction then counts as prepared.
    fn withdraw_failed_prepare(&self, scope: &Arc<Scope<B>>, id: u64) {
        let removed = self
            .lower
            .base
            .unlink(&scope.dir, OsStr::new(staging::RECORD));
        match removed {
            Ok(()) => self.backups.withdraw_backup(scope),
            Err(_) => scope.set_stage(Stage::Prepared(id)),
        }
    }

    /// Publishes what a prepared transaction of names in a directory changed, for attempt `attempt` of the hosts to
    /// commit it; see [`TransactionHandle::publish_names`](crate::TransactionHandle::publish_names).
    ///
    /// Fails with `NoTransaction` on a mount of one host, or if the hosts' ballot or the stored change log is gone.
    pub(super) fn publish_names(
        &self,
        scope: &Arc<Scope<B>>,
        attempt: u64,
    ) -> Result<(), PrepareError> {
        let (Some(key), Some(members)) = (&scope.key, &self.lower.members) else {
            return Err(StageError::NoTransaction.into());
        };
        let dir_name = format!("tx-{}", scope.serial);
        let record = self
            .lower
            .load_record(&scope.dir, &dir_name, staging::RECORD)?
            .ok_or(StageError::NoTransaction)?;
        // The accesses of programs are not recorded for transactions of names, so only the changes are published.
        let list = self.votes.list_accesses(members, &record, &[])?;
        let ballot = self
            .names_ballots
            .find(key)?
            .ok_or(StageError::NoTransaction)?;
        Ok(ballot.publish(attempt, &list)?)
    }

    /// Makes a prepared transaction of names open again; see [`Prepared::reopen_names`](crate::Prepared::reopen_names).
    /// Does nothing to any other transaction.
    pub(super) fn reopen_names(&self, scope: &Arc<Scope<B>>) -> Result<(), VoteError> {
        let _quiet = self.tree.quiesce(vec![scope.area()]);
        if scope.key.is_none() || !matches!(scope.stage(), Stage::Prepared(_)) {
            return Ok(());
        }
        self.lower.remove_prepared_record(&scope.dir)?;
        scope.set_stage(Stage::Open);
        Ok(())
    }

    /// Syncs all new bytes and objects of the transaction, and writes its record, the change log, under a temporary
    /// name. Completes the backup, too.
    ///
    /// The record takes effect when [`LowerBacking::place_record`] renames it.
    pub(crate) fn write_record(&self, scope: &Scope<B>, id: u64) -> Result<(), BackupError> {
        let mut record = self.differences.build_change_log(scope, id)?;
        self.history.stage_undo_sides(scope, &mut record)?;
        // A firnd that took the mount over does not know which changes its predecessor had not synced.
        let synced = if scope.is_revived {
            SyncScope::All
        } else {
            SyncScope::Changes
        };
        self.lower.base.sync_scope(synced)?;
        staging::write_new_file(
            &self.lower.base,
            &scope.dir,
            staging::RECORD,
            &record.encode(),
        )?;
        self.lower.sync_transactions_dir()?;
        // The backup comes last, because after this step only the rename of the record can fail.
        self.backups.back_up(scope, &record)
    }
}
