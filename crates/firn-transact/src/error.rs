//! The errors of transactions.
//!
//! Each verb (begin, prepare, vote, commit, abort, restore, open, revive) has an enum, with a variant for each error
//! that its caller can distinguish. Each enum has a variant `Store` for a failure of the backing (the directory below
//! the mount) or of Firn's own files in it ([`StoreError`]). [`TransactionError`] is for callers that run different
//! verbs.
//!
//! Promises
//! * A failure of the backing is a `Store` in every enum, whichever verb it happened in.
//! * If the user can do something about an error, its text says what.

use firn_backing::Errno;
use firn_format::quote::quoted;
use firn_protocol::path::BytePath;

use crate::change_log::LogError;
use crate::own::OwnError;

/// A failure of the backing, or of the files that Firn keeps in it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The backing failed, or a file of Firn's own has another owner, kind or mode than Firn gives it.
    #[error(transparent)]
    Own(#[from] OwnError),
    /// A stored change log cannot be decoded.
    #[error("{path}: {source}. To abandon the transaction of this file, move the file away")]
    Record {
        /// Path of the change log in the backing.
        path: String,
        /// The reason.
        source: LogError,
    },
}

impl From<Errno> for StoreError {
    fn from(errno: Errno) -> Self {
        Self::Own(errno.into())
    }
}

impl StoreError {
    /// Returns the errno of the backing; `None` if the backing did not fail.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Own(OwnError::Backing(errno)) => Some(*errno),
            Self::Own(_) | Self::Record { .. } => None,
        }
    }
}

/// Why an object cannot be the scope of a transaction.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScopeError {
    /// The mount has no transactions.
    #[error("this mount has no transactions: mount it with drain=commit")]
    NotTransactional,
    /// No object has the path.
    #[error("no such directory in this mount")]
    Missing,
    /// The object at the path is not a directory.
    #[error("a transaction covers a directory, but this is not a directory")]
    NotDirectory,
}

/// Why the stage of a transaction does not allow the request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StageError {
    /// No transaction is open in the scope.
    #[error("no transaction is open there: begin one first")]
    NoTransaction,
    /// An abort has begun, and may have failed half-way. The transaction can only be aborted.
    #[error("an abort of the transaction has begun: run firn abort to complete it")]
    Undoing,
    /// The transaction is prepared or committed with another number.
    #[error("the transaction is prepared with id {found}, not {wanted}")]
    OtherId {
        /// The number of the transaction.
        found: u64,
        /// The number in the request.
        wanted: u64,
    },
    /// The transaction is committed and not applied yet.
    #[error(
        "the transaction is committed with id {id} and not yet applied: run firn commit to apply it"
    )]
    Decided {
        /// The number of the commit.
        id: u64,
    },
}

/// Why a transaction did not begin.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BeginError {
    /// The object cannot be the scope of a transaction.
    #[error(transparent)]
    Scope(#[from] ScopeError),
    /// The scope of another transaction has objects of this scope.
    #[error("a transaction is open in {scope:?}: commit or abort it first")]
    Overlaps {
        /// The scope of the other transaction.
        scope: BytePath,
    },
    /// The directory that the transaction was to make exists.
    #[error(
        "it exists already; `firn begin` without --create opens a transaction in an existing directory"
    )]
    Exists,
    /// A transaction cannot create its directory on a mount with several hosts, because each host would create it.
    #[error(
        "with participants, every host would make the directory: make it first, then run firn begin without --create"
    )]
    NotAmongHosts,
    /// Shadow mode does not work on this file system, because its directories have other inode numbers than `stat`.
    #[error(
        "directories of the backing list other inode numbers than stat(2) returns: only mode=buffer works there"
    )]
    InodesDiffer,
    /// The last transaction of several hosts has not ended on all of them.
    #[error(
        "the previous transaction of these hosts has not ended{}",
        list_hosts_on(hosts)
    )]
    NotOver {
        /// The hosts that have not ended their part.
        hosts: Vec<String>,
    },
    /// More hosts have begun the transaction than are to take part.
    #[error("more hosts take part than expected: {}", hosts.join(", "))]
    TooManyHosts {
        /// The hosts that have begun.
        hosts: Vec<String>,
    },
    /// See [`StoreError`].
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why a transaction was not prepared. The transaction stays open.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrepareError {
    /// The stage of the transaction does not allow the request.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// The transaction could not be copied to the backup.
    #[error(transparent)]
    Backup(BackupError),
    /// See [`StoreError`].
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why the vote of several hosts did not end in a commit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VoteError {
    /// The stage of the transaction does not allow the request.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// The vote has no verdict, because this host or another one has not published its accesses. This happens if an
    /// earlier firnd prepared the part and ended before it voted. `firn commit` of an open transaction prepares and
    /// votes by itself.
    #[error(
        "not all hosts have agreed to commit {id}: run `firn prepare` or `firn commit` with this number on each host"
    )]
    NotVoted {
        /// The number of the transaction.
        id: u64,
    },
    /// An earlier vote on the same number has not ended on all hosts.
    #[error("other hosts have not ended the earlier transaction with id {id}")]
    LastVoteNotOver {
        /// The number of the transaction.
        id: u64,
    },
    /// A host ended the vote without a commit, or aborted its part.
    #[error("{by} gave the commit up: {reason}")]
    GivenUp {
        /// Name of the host.
        by: String,
        /// The reason, for messages.
        reason: String,
    },
    /// The accesses of the hosts conflict.
    #[error("{} with other hosts", match .0.total { 1 => "1 conflict".to_owned(), n => format!("{n} conflicts") })]
    Conflict(Box<crate::conflict::ConflictReport>),
    /// The access list of a host cannot be decoded.
    #[error("{host}: {source}")]
    AccessList {
        /// Name of the host.
        host: String,
        /// The reason.
        source: crate::conflict::AccessListError,
    },
    /// See [`StoreError`].
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why a transaction was not committed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    /// The stage of the transaction does not allow the request.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// The vote of the hosts did not end in a commit.
    #[error(transparent)]
    Vote(VoteError),
    /// The transaction could not be copied to the backup.
    #[error(transparent)]
    Backup(BackupError),
    /// See [`StoreError`].
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why a transaction was not aborted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AbortError {
    /// The stage of the transaction does not allow the request.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// The abort is decided for all hosts, and some of them have not stopped their changes or not undone them.
    #[error(
        "the transaction is aborted for all hosts, but cannot be undone until {} stopped writing: start firnd on that \
         host, or end its part with `firn recover --host`",
        match &hosts[..] { [one] => format!("{one} has"), hosts => format!("{} have", hosts.join(", ")) }
    )]
    Stopping {
        /// Names of those hosts.
        hosts: Vec<String>,
    },
    /// The abort could not be decided in the vote of the hosts.
    #[error(transparent)]
    Vote(VoteError),
    /// The manifest of the transaction could not be removed from the backup.
    #[error(transparent)]
    Backup(BackupError),
    /// See [`StoreError`].
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why the files of a checkpoint were not restored.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// The history does not have the commits that lead back to the checkpoint.
    #[error("the files of checkpoint {wanted} are not kept; {}", list_kept(kept))]
    NotKept {
        /// Number of the checkpoint in the request.
        wanted: u64,
        /// Numbers of the checkpoints that can be restored, newest first.
        kept: Vec<u64>,
    },
    /// The checkpoint is prepared and not applied yet, and its commit failed.
    #[error(transparent)]
    Commit(CommitError),
    /// The open transaction could not be aborted.
    #[error(transparent)]
    Abort(AbortError),
    /// The manifest of a transaction could not be removed from the backup.
    #[error(transparent)]
    Backup(BackupError),
    /// See [`StoreError`].
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why a backing with transactions could not be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// An aborted transaction of several hosts cannot be undone yet, because some hosts have not stopped.
    #[error(transparent)]
    Abort(AbortError),
    /// A vote of the hosts could not be read or left.
    #[error(transparent)]
    Vote(VoteError),
    /// See [`StoreError`].
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why a transaction could not be copied to the backup or removed from it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackupError {
    /// A call of the backup failed.
    #[error("the backup failed: {source}")]
    Refused {
        /// The errno of the call.
        source: Errno,
    },
    /// The manifest of an ended transaction could not be removed. Until it is, no transaction is prepared or committed.
    #[error("cannot remove an ended transaction from the backup: {source}")]
    NotRemoved {
        /// The errno of the backup.
        source: Errno,
    },
    /// A file or directory in the backup has another owner, kind or mode than Firn gives it.
    #[error(transparent)]
    Own(OwnError),
    /// No path of an object is known, so the backup could not identify the object.
    #[error(
        "the transaction changes a file that has no name any more (object {number}): it cannot be backed up"
    )]
    NoPath {
        /// Number of the object in the change log.
        number: u64,
    },
    /// The backup has a prepared transaction that the backing does not know.
    #[error(
        "the backup has a prepared transaction with id {id} that the backing does not have ({name})"
    )]
    UnknownTransaction {
        /// The number of the transaction.
        id: u64,
        /// Name of its directory in the backup.
        name: String,
    },
    /// See [`StoreError`].
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl BackupError {
    /// Returns the error of a call of the backup.
    pub(crate) fn of_backup(error: OwnError) -> Self {
        match error.below("the backup") {
            OwnError::Backing(source) => Self::Refused { source },
            error => Self::Own(error),
        }
    }
}

/// Why a transaction could not be prepared again from its backup. The backing is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReviveError {
    /// The scope of another transaction has objects of this scope.
    #[error("a transaction is open in {scope:?}: commit or abort it first")]
    Overlaps {
        /// The scope of the other transaction.
        scope: BytePath,
    },
    /// The transaction of the backup was committed and applied.
    #[error("commit {id} is applied already")]
    Applied {
        /// The number of the commit.
        id: u64,
    },
    /// The backing does not have the tree from before the transaction.
    #[error(
        "{}: {what}. The backup can be used only on the tree from before the transaction",
        quoted(path)
    )]
    OtherTree {
        /// Path of the object that differs, from the top of the backing.
        path: Vec<u8>,
        /// What differs, for messages.
        what: String,
    },
    /// A file of the backup is missing, or its bytes are not those that were copied.
    #[error("{file} in the backup is missing or damaged")]
    Damaged {
        /// Name of the file in the backup.
        file: String,
    },
    /// A call of the backup failed.
    #[error(transparent)]
    Backup(BackupError),
    /// See [`StoreError`].
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The error of any verb.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(
    missing_docs,
    reason = "each variant is the error of the verb or thing that it names"
)]
pub enum TransactionError {
    #[error(transparent)]
    Scope(#[from] ScopeError),
    #[error(transparent)]
    Stage(#[from] StageError),
    #[error(transparent)]
    Begin(BeginError),
    #[error(transparent)]
    Vote(VoteError),
    #[error(transparent)]
    Abort(AbortError),
    #[error(transparent)]
    Restore(RestoreError),
    #[error(transparent)]
    Revive(ReviveError),
    #[error(transparent)]
    Backup(BackupError),
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Another host aborted the transaction for all hosts.
    #[error("{host} aborted the transaction; it is undone on all hosts")]
    AbortedBy { host: String },
    /// The directory in which the scope is to be made cannot be used.
    #[error("{path}: {error}")]
    Parent {
        path: BytePath,
        #[source]
        error: Box<Self>,
    },
    /// The client may not make a directory in the parent of the scope.
    #[error("no directory can be made in {path}: {errno}")]
    NotWritable { path: BytePath, errno: Errno },
}

impl TransactionError {
    /// Returns the errno of the backing; `None` if the backing did not fail.
    pub fn backing_errno(&self) -> Option<Errno> {
        match self {
            Self::Store(error) => error.errno(),
            _ => None,
        }
    }
}

/// Makes `?` turn a failure of the backing or of Firn's own files into the `Store` variant of each error.
macro_rules! from_store_failures {
    ($($error:ty),*) => {$(
        impl From<Errno> for $error {
            fn from(errno: Errno) -> Self {
                Self::Store(errno.into())
            }
        }

        impl From<OwnError> for $error {
            fn from(error: OwnError) -> Self {
                Self::Store(error.into())
            }
        }
    )*};
}
from_store_failures!(
    BeginError,
    PrepareError,
    VoteError,
    CommitError,
    AbortError,
    RestoreError,
    OpenError,
    BackupError,
    ReviveError,
    TransactionError
);

/// Makes `?` turn the error of one verb (`$inner`) into that of a verb that calls it (`$outer`).
///
/// The listed variants become the variants of the same name. All other variants are wrapped in `$wrap`.
macro_rules! from_inner_error {
    ($($outer:ident::$wrap:ident($inner:ident { $($same:ident),* })),* $(,)?) => {$(
        impl From<$inner> for $outer {
            fn from(error: $inner) -> Self {
                match error {
                    $($inner::$same(error) => Self::$same(error),)*
                    error => Self::$wrap(error),
                }
            }
        }
    )*};
}
from_inner_error!(
    PrepareError::Backup(BackupError { Store }),
    CommitError::Backup(BackupError { Store }),
    AbortError::Backup(BackupError { Store }),
    ReviveError::Backup(BackupError { Store }),
    RestoreError::Backup(BackupError { Store }),
    RestoreError::Commit(CommitError { Store, Backup }),
    RestoreError::Abort(AbortError { Store, Backup }),
    CommitError::Vote(VoteError { Store, Stage }),
    AbortError::Vote(VoteError { Store, Stage }),
    OpenError::Vote(VoteError { Store }),
    OpenError::Abort(AbortError { Store, Vote }),
    TransactionError::Begin(BeginError { Store, Scope }),
    TransactionError::Vote(VoteError { Store, Stage }),
    TransactionError::Abort(AbortError {
        Store,
        Stage,
        Backup,
        Vote
    }),
    TransactionError::Revive(ReviveError { Store, Backup }),
    TransactionError::Backup(BackupError { Store }),
);

impl From<PrepareError> for TransactionError {
    fn from(error: PrepareError) -> Self {
        match error {
            PrepareError::Stage(error) => Self::Stage(error),
            PrepareError::Backup(error) => error.into(),
            PrepareError::Store(error) => Self::Store(error),
        }
    }
}

impl From<CommitError> for TransactionError {
    fn from(error: CommitError) -> Self {
        match error {
            CommitError::Stage(error) => Self::Stage(error),
            CommitError::Vote(error) => error.into(),
            CommitError::Backup(error) => error.into(),
            CommitError::Store(error) => Self::Store(error),
        }
    }
}

impl From<RestoreError> for TransactionError {
    fn from(error: RestoreError) -> Self {
        match error {
            RestoreError::Commit(error) => error.into(),
            RestoreError::Abort(error) => error.into(),
            RestoreError::Backup(error) => error.into(),
            RestoreError::Store(error) => Self::Store(error),
            RestoreError::NotKept { .. } => Self::Restore(error),
        }
    }
}

impl From<OpenError> for TransactionError {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Abort(error) => error.into(),
            OpenError::Vote(error) => error.into(),
            OpenError::Store(error) => Self::Store(error),
        }
    }
}

/// Returns ` on HOST, HOST`, or nothing without hosts.
fn list_hosts_on(hosts: &[String]) -> String {
    if hosts.is_empty() {
        String::new()
    } else {
        format!(" on {}", hosts.join(", "))
    }
}

/// Returns the end of the message of [`RestoreError::NotKept`].
fn list_kept(kept: &[u64]) -> String {
    match kept {
        [] => "no checkpoint is kept".into(),
        kept => {
            let numbers: Vec<_> = kept.iter().map(u64::to_string).collect();
            format!("the kept checkpoints are: {}", numbers.join(", "))
        }
    }
}
