//! Preparing a transaction: durable, its outcome open.

use std::ffi::OsStr;
use std::sync::Arc;

use firn_backing::{Backing, Errno, RenameFlags, SyncScope};

use crate::error::{BackupError, PrepareError, StageError, VoteError};
use crate::scope::{Scope, Stage};
use crate::staging;
use crate::staging_dir::Home;
use crate::transactional::TransactionalBacking;

impl<B: Backing> Home<B> {
    pub(crate) fn place_record(&self, scope: &Scope<B>, name: &str) -> Result<(), Errno> {
        let new = staging::new_name(staging::RECORD);
        let flags = RenameFlags::empty();
        self.base.rename(
            &scope.dir,
            OsStr::new(&new),
            &scope.dir,
            OsStr::new(name),
            flags,
        )
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// [`Open::prepare`](crate::Open::prepare), of one that may be prepared already.
    pub(super) fn prepare_scope(&self, scope: &Arc<Scope<B>>, id: u64) -> Result<(), PrepareError> {
        self.commits.apply_commit_before(scope)?;
        let _quiet = self.tree.quiesce(vec![scope.area()]);
        self.tree.check_all(scope);
        if !scope.is_whole() {
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
        self.home
            .place_record(scope, staging::RECORD)
            .inspect_err(|_| self.backups.withdraw_backup(scope))?;
        if let Err(errno) = self.home.base.sync_dir(&scope.dir) {
            // The caller was not told: either the record is removed, or it stays and can be decided.
            if self
                .home
                .base
                .unlink(&scope.dir, OsStr::new(staging::RECORD))
                .is_err()
            {
                scope.set_stage(Stage::Prepared(id));
            } else {
                self.backups.withdraw_backup(scope);
            }
            return Err(errno.into());
        }
        scope.set_stage(Stage::Prepared(id));
        Ok(())
    }

    /// [`Found::publish_names`](crate::Found::publish_names), of one that is prepared.
    pub(super) fn publish_names(
        &self,
        scope: &Arc<Scope<B>>,
        attempt: u64,
    ) -> Result<(), PrepareError> {
        let (Some(key), Some(members)) = (&scope.key, &self.home.members) else {
            return Err(StageError::NoTransaction.into());
        };
        let tx = format!("tx-{}", scope.serial);
        let record = self.home.load_record(&scope.dir, &tx, staging::RECORD)?;
        let record = record.ok_or(StageError::NoTransaction)?;
        let list = self.votes.list_accesses(members, &record, &[])?;
        let ballot = self.names_ballots.find(key)?;
        let ballot = ballot.ok_or(StageError::NoTransaction)?;
        Ok(ballot.publish(attempt, &list)?)
    }

    /// [`Prepared::reopen_names`](crate::Prepared::reopen_names).
    pub(super) fn reopen_names(&self, scope: &Arc<Scope<B>>) -> Result<(), VoteError> {
        let _quiet = self.tree.quiesce(vec![scope.area()]);
        if scope.key.is_none() || !matches!(scope.stage(), Stage::Prepared(_)) {
            return Ok(());
        }
        self.home.forget_record(&scope.dir)?;
        scope.set_stage(Stage::Open);
        Ok(())
    }

    /// Makes what is staged durable, and a record that tells of it, which is in force once it is in its place.
    pub(crate) fn write_record(&self, scope: &Scope<B>, id: u64) -> Result<(), BackupError> {
        let mut record = self.differences.make_record(scope, id)?;
        self.history.stage_undo(scope, &mut record)?;
        let changes = if scope.is_revived {
            SyncScope::All
        } else {
            SyncScope::Changes
        };
        self.home.base.sync_scope(changes)?;
        staging::write(
            &self.home.base,
            &scope.dir,
            staging::RECORD,
            &record.encode(),
        )?;
        self.home.sync_staging_dir()?;
        // The backup comes last, so that little can fail after it.
        self.backups.back_up(scope, &record)
    }
}
