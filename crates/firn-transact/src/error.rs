//! Why a transaction could not be begun, prepared, voted on, committed, aborted or restored.
//!
//! Each verb has an enum of what its caller can tell apart. Any verb can also fail because of Firn's stored records
//! or the backing: that is a [`StoreError`]. A caller that runs different verbs takes [`TransactionError`].

use firn_backing::Errno;
use firn_format::quote::quoted;
use firn_protocol::path::BytePath;

use crate::change_log::LogError;
use crate::own::OwnError;

/// The backing failed, or what Firn has stored in it is not as Firn leaves it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// Something of Firn's own could not be used. Whatever errno the backing gave, it says nothing of the transaction.
    #[error(transparent)]
    Own(#[from] OwnError),
    /// A record cannot be read.
    #[error("{path}: {source}; move it away to give that transaction up")]
    Record {
        /// Where it is in the backing.
        path: String,
        /// What is wrong.
        source: LogError,
    },
}

impl From<Errno> for StoreError {
    fn from(errno: Errno) -> Self {
        Self::Own(errno.into())
    }
}

impl StoreError {
    /// The errno that the backing gave.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Own(OwnError::Backing(errno)) => Some(*errno),
            Self::Own(_) | Self::Record { .. } => None,
        }
    }
}

/// Why a directory is not the scope of a transaction.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScopeError {
    /// The mount has no transactions.
    #[error("this mount has no transactions: mount it with drain=commit")]
    NotTransactional,
    /// Nothing has that path.
    #[error("no such directory in this mount")]
    Missing,
    /// Something else has that path.
    #[error("a transaction covers a directory, and this is none")]
    NotDirectory,
}

/// Why a transaction is not in a stage that allows what was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StageError {
    /// No transaction is open.
    #[error("no transaction is open there: begin one first")]
    NoTransaction,
    /// An abort failed half-way.
    #[error("the transaction is being undone: firn abort continues that")]
    Undoing,
    /// It is prepared or committed with another number.
    #[error("the transaction is prepared with id {found}, not {wanted}")]
    OtherId {
        /// The number that it has.
        found: u64,
        /// The number that was asked for.
        wanted: u64,
    },
    /// It is committed.
    #[error(
        "the transaction is committed with id {id} and not yet applied: firn commit continues that"
    )]
    Decided {
        /// The number of the commit.
        id: u64,
    },
}

/// Why a transaction did not begin.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BeginError {
    /// The transaction cannot have that scope.
    #[error(transparent)]
    Scope(#[from] ScopeError),
    /// A transaction is open that covers some of the same objects.
    #[error("a transaction is open in {scope:?}: commit or abort it first")]
    Overlaps {
        /// The scope of the other transaction.
        scope: BytePath,
    },
    /// Something has the name of the directory that the transaction was to make.
    #[error(
        "it exists: firn begin without --create opens a transaction in a directory that is there"
    )]
    Exists,
    /// Several hosts commit together, and each of them would make the directory.
    #[error(
        "with participants each host would make the directory: make it first, then firn begin without --create"
    )]
    NotAmongHosts,
    /// Shadow mode does not work on this file system.
    #[error(
        "directories of the backing name other inode numbers than stat(2) tells: only mode=buffer works there"
    )]
    InodesDiffer,
    /// The last transaction of several hosts is not over.
    #[error(
        "the last transaction of these hosts is not over{}",
        list_hosts_on(hosts)
    )]
    NotOver {
        /// The hosts that have not ended their part.
        hosts: Vec<String>,
    },
    /// More hosts begin than take part.
    #[error("more hosts take part than expected: {}", hosts.join(", "))]
    TooManyHosts {
        /// The hosts that have begun.
        hosts: Vec<String>,
    },
    /// See [`StoreError`].
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why a transaction was not prepared. It is as it was.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrepareError {
    /// The transaction is not in a stage that allows it.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// It could not be brought to the backup.
    #[error(transparent)]
    Backup(BackupError),
    /// See [`StoreError`].
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why hosts that commit together did not agree, or not yet.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VoteError {
    /// The transaction is not in a stage that allows it.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// There is no verdict of the hosts, as on a part that an earlier firnd prepared before it could vote. `firn commit` of an
    /// open transaction prepares and votes by itself.
    #[error(
        "the hosts have not voted on {id}: run `firn prepare` or `firn commit` with this number on each of them"
    )]
    NotVoted {
        /// The number of the transaction.
        id: u64,
    },
    /// The last vote on the same number is not over.
    #[error("other hosts have not ended the last transaction with id {id}")]
    LastVoteNotOver {
        /// The number.
        id: u64,
    },
    /// There is no commit because of one of the hosts.
    #[error("{by} gave the commit up: {why}")]
    GivenUp {
        /// The host.
        by: String,
        /// The reason that it gave.
        why: String,
    },
    /// The accesses of the hosts conflict.
    #[error("{} with other hosts", match .0.total { 1 => "1 conflict".to_owned(), n => format!("{n} conflicts") })]
    Conflict(Box<crate::conflict::ConflictReport>),
    /// The access list of a host cannot be decoded.
    #[error("{host}: {source}")]
    AccessList {
        /// The host.
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
    /// The transaction is not in a stage that allows it.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// The other hosts do not agree.
    #[error(transparent)]
    Vote(VoteError),
    /// It could not be brought to the backup.
    #[error(transparent)]
    Backup(BackupError),
    /// See [`StoreError`].
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why a transaction was not aborted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AbortError {
    /// The transaction is not in a stage that allows it.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// Several hosts abort together, and these have not stopped changing things, or not undone them.
    #[error(
        "the transaction of all hosts is aborted, and undone when {} stopped: it goes on when that host's firnd runs, \
         or firn recover --host ends its part",
        match &hosts[..] { [one] => format!("{one} has"), hosts => format!("{} have", hosts.join(", ")) }
    )]
    Stopping {
        /// The hosts.
        hosts: Vec<String>,
    },
    /// The other hosts could not be told.
    #[error(transparent)]
    Vote(VoteError),
    /// What is in the backup still counts.
    #[error(transparent)]
    Backup(BackupError),
    /// See [`StoreError`].
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why the files of a checkpoint were not restored.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// The commits are not kept.
    #[error("the files of checkpoint {wanted} are not kept; {}", list_kept(kept))]
    NotKept {
        /// The checkpoint that was asked for.
        wanted: u64,
        /// Kept commits, newest first.
        kept: Vec<u64>,
    },
    /// What was prepared with that number could not be committed.
    #[error(transparent)]
    Commit(CommitError),
    /// What came after it could not be aborted.
    #[error(transparent)]
    Abort(AbortError),
    /// What is in the backup still counts.
    #[error(transparent)]
    Backup(BackupError),
    /// See [`StoreError`].
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why a backing with transactions could not be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// A transaction of several hosts is aborted, and cannot be undone before they have stopped.
    #[error(transparent)]
    Abort(AbortError),
    /// The other hosts could not be told, or asked.
    #[error(transparent)]
    Vote(VoteError),
    /// See [`StoreError`].
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why the backup does not have, or still has, a transaction.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackupError {
    /// The backup refused something.
    #[error("the backup failed: {source}")]
    Refused {
        /// The errno that it gave.
        source: Errno,
    },
    /// What is over could not be taken back from the backup. Until it can, nothing new is decided.
    #[error("what is over cannot be removed from the backup: {source}")]
    NotRemoved {
        /// The errno that it gave.
        source: Errno,
    },
    /// An object in the backup is not as Firn leaves it.
    #[error(transparent)]
    Own(OwnError),
    /// An object has no name by which it could be found elsewhere.
    #[error(
        "object {number} of the transaction has no name in the backing, and cannot be in the backup"
    )]
    NoPath {
        /// Its number in the change log.
        number: u64,
    },
    /// The backing does not know a transaction that is in the backup.
    #[error(
        "the backup has a transaction prepared with id {id} that the backing does not know ({name})"
    )]
    UnknownTransaction {
        /// The number of the transaction.
        id: u64,
        /// Its directory in the backup.
        name: String,
    },
    /// See [`StoreError`].
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl BackupError {
    /// Error of an action in the backup.
    pub(crate) fn of_backup(error: OwnError) -> Self {
        match error.below("the backup") {
            OwnError::Backing(source) => Self::Refused { source },
            error => Self::Own(error),
        }
    }
}

/// Why a transaction could not be taken out of its backup. The backing is as it was.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReviveError {
    /// A transaction is open that covers some of the same objects.
    #[error("a transaction is open in {scope:?}: commit or abort it first")]
    Overlaps {
        /// The scope of that one.
        scope: BytePath,
    },
    /// The transaction of the backup was committed and applied.
    #[error("commit {id} was applied before")]
    Applied {
        /// The number of the commit.
        id: u64,
    },
    /// The tree is not the one before the transaction of the backup.
    #[error(
        "{}: {what}: the backup goes with the tree as it was before the transaction",
        quoted(path)
    )]
    OtherTree {
        /// Path from the top of the backing.
        path: Vec<u8>,
        /// What is wrong there.
        what: String,
    },
    /// A piece of the backup is missing or changed.
    #[error("{file} in the backup is missing or damaged")]
    Damaged {
        /// The file in the backup.
        file: String,
    },
    /// The backup could not be read.
    #[error(transparent)]
    Backup(BackupError),
    /// See [`StoreError`].
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why one verb or another failed.
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
    /// Another host aborted it, for all hosts.
    #[error("{host} aborted the transaction; it is undone on all hosts")]
    AbortedBy { host: String },
    /// The directory that a scope is to be made in cannot be used.
    #[error("{path}: {error}")]
    Parent {
        path: BytePath,
        #[source]
        error: Box<Self>,
    },
    /// The client has no write permission in that directory.
    #[error("no directory can be made in {path}: {errno}")]
    NotWritable { path: BytePath, errno: Errno },
}

impl TransactionError {
    /// The errno of the backing that this comes down to.
    pub fn backing_errno(&self) -> Option<Errno> {
        match self {
            Self::Store(error) => error.errno(),
            _ => None,
        }
    }
}

/// A failure of the backing, or of something of Firn's own in it, is a failure of the store.
macro_rules! store_failures {
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
store_failures!(
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

/// What the enum of one verb takes from another. A variant that both have stays what it is, so that a failure of the
/// store, say, has one place in each of them, wherever it happened.
macro_rules! take_from {
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
take_from!(
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

fn list_hosts_on(hosts: &[String]) -> String {
    if hosts.is_empty() {
        String::new()
    } else {
        format!(" on {}", hosts.join(", "))
    }
}

fn list_kept(kept: &[u64]) -> String {
    match kept {
        [] => "none are".into(),
        kept => {
            let numbers: Vec<_> = kept.iter().map(u64::to_string).collect();
            format!("those are: {}", numbers.join(", "))
        }
    }
}
