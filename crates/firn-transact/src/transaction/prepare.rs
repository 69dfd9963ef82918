//! Preparing a transaction: durable, its outcome open.

use std::ffi::OsStr;
use std::sync::Arc;

use firn_backing::{Backing, Errno, RenameFlags, SyncScope};

use crate::error::{BackupError, PrepareError, StageError};
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

    /// Makes what is staged durable, and a record that tells of it, which is in force once it is in its place.
    pub(crate) fn write_record(&self, scope: &Scope<B>, id: u64) -> Result<(), BackupError> {
        let mut record = self.differences.make_record(scope, id)?;
        self.history.stage_undo(scope, &mut record)?;
        self.home.base.sync_scope(SyncScope::Changes)?;
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
