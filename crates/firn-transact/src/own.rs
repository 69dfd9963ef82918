//! What is Firn's own in a backing or a backup: the functions of [`firn_rendezvous::own`], and what their errors mean
//! to a transaction.

pub(crate) use firn_rendezvous::own::*;

use crate::error::BackupError;

/// What it means that `error` happened in a backup.
pub(crate) fn of_backup(error: OwnError) -> BackupError {
    match error.below("the backup") {
        OwnError::Backing(source) => BackupError::Refused { source },
        error => BackupError::Own(error),
    }
}
