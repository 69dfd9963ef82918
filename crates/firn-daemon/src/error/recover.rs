//! The errors of `firn recover`, which copies or discards data that an ended mount has left on the host.

use std::io;
use std::path::PathBuf;

use firn_client::PathsError;
use firn_format::quote::quoted_path;
use firn_transact::{BackupError, CommitError, StoreError, TransactionError};
use firn_trust::TrustError;

use crate::error::{AttachError, BUSY, CheckError, FAILED, NOT_FIRN, USAGE, attach_failures};

/// Why [`crate::recover()`], [`crate::recover_host`], [`crate::recover_from_backup`] or [`crate::discard()`] failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each text says what the variant is")]
pub enum RecoverError {
    #[error(transparent)]
    Attach(#[from] AttachError),
    #[error(
        "{dir} has no complete backup of a transaction{wanted}{others}: name the directory that was given as backup", dir = quoted_path(dir))]
    NoMatchingBackup {
        dir: PathBuf,
        wanted: String,
        others: String,
    },
    #[error("there are several backups: {all}: choose one with --id, or name its directory")]
    SeveralBackups { all: String },
    #[error("{backing} has another transaction in {scope}: mount it, and end that transaction with firn commit or firn abort", backing = quoted_path(backing))]
    ScopeBusy { scope: String, backing: PathBuf },
    #[error("{arena} is the arena of an earlier mount of {backing}: run `firn recover {backing}` first", arena = quoted_path(arena), backing = quoted_path(backing))]
    ArenaExists { arena: PathBuf, backing: PathBuf },
    #[error(
        "{backing} has neither a lease nor a transaction of a dead host {host}: check the name (its host name, or \
         host= of its mount)", backing = quoted_path(backing))]
    NoSuchHost { host: String, backing: PathBuf },
    #[error(transparent)]
    Check(#[from] CheckError),
    #[error("no arena of this user was made for {path}{others}", path = quoted_path(path))]
    NoArena { path: PathBuf, others: String },
    #[error("cannot copy held data to {to}: {source}: the data is still in the arena; name another directory", to = quoted_path(to))]
    SaveLost { to: PathBuf, source: io::Error },
}

attach_failures!(RecoverError: PathsError, BackupError, CommitError, StoreError, TransactionError, TrustError);

impl RecoverError {
    /// Returns the exit status of firn for this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Attach(error) => error.exit_code(),
            Self::Check(error) => error.exit_code(),
            Self::NoArena { .. } => NOT_FIRN,
            Self::SaveLost { .. } | Self::NoMatchingBackup { .. } => FAILED,
            Self::SeveralBackups { .. } | Self::NoSuchHost { .. } => USAGE,
            Self::ScopeBusy { .. } | Self::ArenaExists { .. } => BUSY,
        }
    }
}
