//! Why a transaction could not be begun, prepared, committed, aborted or restored.

use firn_backing::Errno;
use firn_format::quote::quoted;
use firn_protocol::path::BytePath;
use firn_trust::Distrust;

use crate::change_log::LogError;
use crate::own::{FILE_BYTES_MAX, OwnError};

/// Why a transaction could not be begun, prepared, committed or aborted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeldError {
    /// The backing is one without transactions.
    #[error("this mount has no transactions: mount it with drain=commit")]
    NotTransactional,
    /// There is nothing where a transaction was to begin or end.
    #[error("no such directory in this mount")]
    ScopeMissing,
    /// There is something else.
    #[error("a transaction covers a directory, and this is none")]
    ScopeNotDirectory,
    /// There is no transaction where one is needed.
    #[error("no transaction is open there: begin one first")]
    None,
    /// One is open that covers the same objects.
    #[error("a transaction is open in {scope:?}: commit or abort it first")]
    Open {
        /// Its scope.
        scope: BytePath,
    },
    /// Its outcome is decided.
    #[error(
        "the transaction is committed with id {id} and not yet carried out: firn commit goes on with it"
    )]
    Decided {
        /// Its number.
        id: u64,
    },
    /// It is prepared with another number.
    #[error("the transaction is prepared with id {found}, not {wanted}")]
    OtherId {
        /// What it was prepared with.
        found: u64,
        /// What was asked for.
        wanted: u64,
    },
    /// An abort came half way.
    #[error("the transaction is being undone: firn abort goes on with it")]
    Undoing,
    /// Several hosts abort together, and these have not stopped changing things, or not undone them.
    #[error(
        "the transaction of all hosts is aborted, and undone when {} stopped: it goes on when that host's firnd runs, \
         or firn recover --inode ends its part",
        match &hosts[..] { [one] => format!("{one} has"), hosts => format!("{} have", hosts.join(", ")) }
    )]
    Stopping {
        /// Which.
        hosts: Vec<String>,
    },
    /// The last transaction of several hosts is not over.
    #[error("the last transaction of these hosts is not over{}", on(hosts))]
    NotOver {
        /// Where.
        hosts: Vec<String>,
    },
    /// Shadow mode does not work on this file system.
    #[error(
        "directories of the backing name other inode numbers than stat(2) tells: only mode=buffer works there"
    )]
    Inodes,
    /// The checkpoint is not kept.
    #[error("the files of checkpoint {wanted} are not kept; {}", told(kept))]
    NotKept {
        /// What was asked for.
        wanted: u64,
        /// Those that are, newest first.
        kept: Vec<u64>,
    },
    /// The hosts do not go together.
    #[error("{} with other hosts", match .0.total { 1 => "1 conflict".to_owned(), n => format!("{n} conflicts") })]
    Conflict(Box<firn_conflict::Report>),
    /// There is no commit because of one of the hosts.
    #[error("{by} gave the commit up: {why}")]
    GivenUp {
        /// Which.
        by: String,
        /// What it said.
        why: String,
    },
    /// Several hosts commit together, and this one has not voted with the others.
    #[error("the hosts have not voted on {id}: firn prepare comes first, on each of them")]
    NotMet {
        /// The number.
        id: u64,
    },
    /// The last vote on the same number is not over.
    #[error("other hosts have not ended the last transaction with id {id}")]
    Leaving {
        /// The number.
        id: u64,
    },
    /// A host's list cannot be read.
    #[error("{host}: {source}")]
    List {
        /// Whose.
        host: String,
        /// What is wrong.
        source: firn_conflict::ListError,
    },
    /// The backup refused something.
    #[error("the backup failed: {source}")]
    Backup {
        /// What it said.
        source: Errno,
    },
    /// What is over could not be taken back from the backup. Until it can, nothing new is decided.
    #[error("what is over cannot be removed from the backup: {source}")]
    BackupStays {
        /// What it said.
        source: Errno,
    },
    /// An object has no name by which it could be found elsewhere.
    #[error(
        "object {number} of the transaction has no name in the backing, and cannot be in the backup"
    )]
    BackupPath {
        /// Its number.
        number: u64,
    },
    /// The backing does not know a transaction that is in the backup.
    #[error(
        "the backup has a transaction prepared with id {id} that the backing does not know ({name})"
    )]
    BackupWaits {
        /// The number.
        id: u64,
        /// Its directory in the backup.
        name: String,
    },
    /// The transaction of the backup was committed and carried out.
    #[error("commit {id} was carried out before")]
    BackupDone {
        /// The number.
        id: u64,
    },
    /// The tree is not the one before the transaction of a backup.
    #[error(
        "{}: {what}: the backup goes with the tree as it was before the transaction",
        quoted(path)
    )]
    BackupTree {
        /// Where, from the top of the backing.
        path: Vec<u8>,
        /// What is wrong.
        what: String,
    },
    /// A piece of a backup is missing or changed.
    #[error("{file} in the backup is missing or damaged")]
    BackupDamaged {
        /// Which.
        file: String,
    },
    /// Something in the place of what is Firn's own is not as that must be.
    #[error(
        "{name} {why}; nothing in it is believed: mount as the user whose it is, or look at what it is and move it away"
    )]
    Distrusted {
        /// Its name, with the directories above it as far as they are known.
        name: String,
        /// What is wrong with it.
        why: Distrust,
    },
    /// A file in the place of one of Firn's own is longer than those are.
    #[error(
        "{name} has {bytes} bytes, and Firn writes no more than {FILE_BYTES_MAX}: look at what it is and move it away"
    )]
    TooLong {
        /// Its name, as above.
        name: String,
        /// Its size.
        bytes: u64,
    },
    /// The backing refused something. Whatever it said, it is nothing that is known of the transaction.
    #[error("the backing failed: {0}")]
    Backing(#[from] Errno),
    /// A record cannot be read.
    #[error("{path}: {source}; move it away to give that transaction up")]
    Record {
        /// Where it is in the backing.
        path: String,
        /// What is wrong.
        source: LogError,
    },
}

impl From<OwnError> for HeldError {
    fn from(error: OwnError) -> Self {
        match error {
            OwnError::Distrusted { name, why } => Self::Distrusted { name, why },
            OwnError::TooLong { name, bytes } => Self::TooLong { name, bytes },
            OwnError::Backing(errno) => Self::Backing(errno),
        }
    }
}

fn on(hosts: &[String]) -> String {
    if hosts.is_empty() {
        String::new()
    } else {
        format!(" on {}", hosts.join(", "))
    }
}

fn told(kept: &[u64]) -> String {
    match kept {
        [] => "none are".into(),
        kept => format!(
            "those are: {}",
            kept.iter()
                .map(u64::to_string)
                .collect::<Vec<_>>()
                .join(", ")
        ),
    }
}
