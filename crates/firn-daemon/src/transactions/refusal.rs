//! Converts the failure of a request about a transaction to an errno, as `firn.h` defines it, and to a sentence that
//! says what to do.

use firn_backing::Errno;
use firn_protocol::Reply;
use firn_protocol::path::BytePath;
use firn_transact::{
    AbortError, BackupError, BeginError, OwnError, RestoreError, ScopeError, StageError,
    StoreError, TransactionError, VoteError,
};

use crate::owners::AbortCause;
use crate::participants;
use crate::store::shown_scope;

/// Returns the reply to a request about a transaction that failed. `path` is the transaction's scope, the directory
/// that it covers. `firn.h` defines the errno of each failure.
pub(super) fn error_reply(error: &TransactionError, path: &BytePath) -> Reply {
    let scope = shown_scope(path.as_bytes());
    let (errno, message) = match error {
        TransactionError::Scope(error) => refuse_scope(error, &scope),
        TransactionError::Begin(BeginError::Scope(error)) => refuse_scope(error, &scope),
        TransactionError::Begin(BeginError::Store(error)) => refuse_store(error, &scope),
        TransactionError::Begin(error) => refuse_begin(error, &scope),
        TransactionError::Stage(error) | TransactionError::Abort(AbortError::Stage(error)) => {
            refuse_stage(error, &scope)
        }
        TransactionError::Abort(AbortError::Stopping { .. }) => {
            (libc::EBUSY, format!("{scope}: {error}"))
        }
        TransactionError::Vote(error) | TransactionError::Abort(AbortError::Vote(error)) => {
            refuse_vote(error, &scope)
        }
        TransactionError::Restore(RestoreError::NotKept { .. }) => {
            (libc::EINVAL, error.to_string())
        }
        TransactionError::Restore(error) => return error_reply(&error.clone().into(), path),
        TransactionError::Revive(_) => (libc::EIO, format!("{scope}: {error}")),
        TransactionError::Backup(error) | TransactionError::Abort(AbortError::Backup(error)) => {
            refuse_backup(error, &scope)
        }
        TransactionError::Store(error) | TransactionError::Abort(AbortError::Store(error)) => {
            refuse_store(error, &scope)
        }
        TransactionError::AbortedBy { .. } => (libc::ECANCELED, format!("{scope}: {error}")),
        TransactionError::Parent { path, error } => return error_reply(error, path),
        TransactionError::NotWritable { path, errno } => {
            let parent = shown_scope(path.as_bytes());
            let message = format!("no directory can be made in {parent}: {errno}");
            (errno.raw_os_error(), message)
        }
    };
    Reply::Error { errno, message }
}

/// Returns the answer to a prepare or commit of a transaction that was aborted without a request.
pub(super) fn aborted_reply(scope: &[u8], cause: &AbortCause) -> Reply {
    let scope = shown_scope(scope);
    let message = match cause {
        AbortCause::OwnerGone(owner) => format!(
            "{scope}: the owner of the transaction, {owner}, was gone before the transaction was prepared: the transaction is aborted"
        ),
        AbortCause::FirndDied => format!(
            "{scope}: firnd died before the transaction was prepared: it is aborted; begin another one and write again"
        ),
    };
    Reply::Error {
        errno: libc::ECANCELED,
        message,
    }
}

/// An errno, and a sentence that says what to do.
type Refusal = (i32, String);

fn refuse_scope(error: &ScopeError, scope: &str) -> Refusal {
    match error {
        ScopeError::NotTransactional => (libc::EOPNOTSUPP, error.to_string()),
        ScopeError::Missing => (libc::ENOENT, format!("{scope}: {error}")),
        ScopeError::NotDirectory => (libc::ENOTDIR, format!("{scope}: {error}")),
    }
}

fn refuse_stage(error: &StageError, scope: &str) -> Refusal {
    match error {
        StageError::NoTransaction => (
            libc::ENOENT,
            format!("no transaction is open in {scope}: firn begin opens one"),
        ),
        StageError::Undoing | StageError::Decided { .. } => (libc::EBUSY, error.to_string()),
        StageError::OtherId { .. } => (libc::EINVAL, error.to_string()),
    }
}

/// Returns errno and text for a begin that failed. `scope` is the directory that the transaction was to cover.
fn refuse_begin(error: &BeginError, scope: &str) -> Refusal {
    match error {
        BeginError::Overlaps { scope } => {
            let open = shown_scope(scope.as_bytes());
            let message = format!("a transaction is open in {open}: commit or abort it first");
            (libc::EBUSY, message)
        }
        BeginError::NotOver { .. } => (libc::EBUSY, format!("{scope}: {error}")),
        BeginError::Exists => (libc::EEXIST, format!("{scope}: {error}")),
        BeginError::NotAmongHosts => (libc::EOPNOTSUPP, format!("{scope}: {error}")),
        BeginError::InodesDiffer => (libc::EOPNOTSUPP, error.to_string()),
        BeginError::TooManyHosts { .. } => (libc::ECANCELED, format!("{scope}: {error}")),
        BeginError::Scope(error) => refuse_scope(error, scope),
        BeginError::Store(error) => refuse_store(error, scope),
    }
}

/// Returns errno and text for a prepare or commit that failed because of a vote: what a host publishes about its part
/// of a transaction of several hosts.
fn refuse_vote(error: &VoteError, scope: &str) -> Refusal {
    match error {
        VoteError::Stage(error) => refuse_stage(error, scope),
        VoteError::NotVoted { .. } => (libc::EINVAL, error.to_string()),
        VoteError::LastVoteNotOver { .. } => (
            libc::EBUSY,
            format!("{scope}: {error}: run `firn abort` on these hosts"),
        ),
        VoteError::GivenUp { .. } => (
            libc::ECANCELED,
            format!("{scope}: {error}; the transaction is kept: firn abort drops it"),
        ),
        VoteError::Conflict(report) => (
            libc::ECANCELED,
            participants::describe_conflict(report, scope),
        ),
        VoteError::AccessList { .. } => (libc::EIO, error.to_string()),
        VoteError::Store(error) => refuse_store(error, scope),
    }
}

/// Returns errno and text for a failure of the backup, the second directory with the data of transactions.
fn refuse_backup(error: &BackupError, scope: &str) -> Refusal {
    match error {
        BackupError::Refused { source } => (
            errno_of_backing(*source),
            format!(
                "{scope}: the backup reports: {source}; the transaction is unchanged: mend the backup and try again, or abort"
            ),
        ),
        BackupError::NotRemoved { source } => (
            errno_of_backing(*source),
            format!(
                "{scope}: {error}; the transaction is unchanged until then: mend the backup and try again"
            ),
        ),
        BackupError::NoPath { .. } | BackupError::UnknownTransaction { .. } => {
            (libc::EIO, format!("{scope}: {error}"))
        }
        BackupError::Own(error) => refuse_own(error, scope),
        BackupError::Store(error) => refuse_store(error, scope),
    }
}

fn refuse_store(error: &StoreError, scope: &str) -> Refusal {
    match error {
        StoreError::Own(error) => refuse_own(error, scope),
        StoreError::Record { .. } => (libc::EIO, error.to_string()),
    }
}

fn refuse_own(error: &OwnError, scope: &str) -> Refusal {
    match error {
        OwnError::Backing(errno) => (
            errno_of_backing(*errno),
            format!(
                "{scope}: the backing reports: {errno}; the transaction is kept: mend the backing and try again"
            ),
        ),
        OwnError::Distrusted { .. } => (libc::EPERM, format!("{scope}: {error}")),
        OwnError::TooLong { .. } => (libc::EFBIG, format!("{scope}: {error}")),
        OwnError::EarlierVersion { .. } => (libc::EPROTONOSUPPORT, format!("{scope}: {error}")),
    }
}

/// Returns the errno that reports a failure of the backing. A number that has a meaning in `firn.h` ("Errors") is
/// replaced, because the caller would misunderstand it.
fn errno_of_backing(errno: Errno) -> i32 {
    match errno {
        Errno::OPNOTSUPP
        | Errno::NOENT
        | Errno::NOTDIR
        | Errno::ISDIR
        | Errno::XDEV
        | Errno::BUSY
        | Errno::INVAL
        | Errno::CANCELED
        | Errno::STALE
        | Errno::NODEV
        | Errno::NODATA
        | Errno::NOTCONN
        | Errno::AGAIN
        | Errno::PROTO
        | Errno::NOTRECOVERABLE => libc::EIO,
        errno => errno.raw_os_error(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the errno and the message of the reply.
    fn refusal_of(error: &TransactionError) -> (i32, String) {
        match error_reply(error, &"job".into()) {
            Reply::Error { errno, message } => (errno, message),
            reply => panic!("not an error: {reply:?}"),
        }
    }

    /// Proves S-tx-14, S-tx-65.
    #[test]
    fn regression_what_the_backing_says_is_never_told_as_something_about_the_transaction() {
        for errno in [
            Errno::OPNOTSUPP,
            Errno::NOENT,
            Errno::NOTDIR,
            Errno::BUSY,
            Errno::INVAL,
            Errno::CANCELED,
        ] {
            let errors = [
                TransactionError::from(errno),
                BackupError::Refused { source: errno }.into(),
                BackupError::NotRemoved { source: errno }.into(),
            ];
            for error in errors {
                let (number, message) = refusal_of(&error);
                assert_eq!(number, libc::EIO, "{message}");
                assert!(message.contains(&errno.to_string()), "{message}");
                assert!(
                    !message.contains("drain=commit") && !message.contains("no such directory"),
                    "{message}"
                );
            }
        }
        assert_eq!(
            refusal_of(&TransactionError::from(Errno::NOSPC)).0,
            libc::ENOSPC
        );
    }

    #[test]
    fn what_is_wrong_with_the_scope_has_its_own_number_and_advice() {
        let (number, message) = refusal_of(&ScopeError::NotTransactional.into());
        assert_eq!(
            (number, message.contains("drain=commit")),
            (libc::EOPNOTSUPP, true),
            "{message}"
        );
        let (number, message) = refusal_of(&ScopeError::Missing.into());
        assert_eq!(
            (number, message.contains("no such directory")),
            (libc::ENOENT, true),
            "{message}"
        );
        assert_eq!(
            refusal_of(&ScopeError::NotDirectory.into()).0,
            libc::ENOTDIR
        );
    }

    #[test]
    fn what_is_wrong_with_the_directory_above_is_said_of_that() {
        let parent = TransactionError::Parent {
            path: "above".into(),
            error: Box::new(ScopeError::Missing.into()),
        };
        let not_writable = TransactionError::NotWritable {
            path: "above".into(),
            errno: Errno::ACCESS,
        };
        for (error, errno) in [(parent, libc::ENOENT), (not_writable, libc::EACCES)] {
            let (number, message) = refusal_of(&error);
            assert_eq!(number, errno, "{message}");
            assert!(message.contains("above"), "{message}");
            assert!(!message.contains("job"), "{message}");
        }
    }

    /// Proves S-tx-34.
    #[test]
    fn a_transaction_that_another_host_aborted_names_that_host() {
        let host = "node7".to_owned();
        let (number, message) = refusal_of(&TransactionError::AbortedBy { host });
        assert_eq!(number, libc::ECANCELED, "{message}");
        assert!(
            message.contains("node7") && message.contains("job"),
            "{message}"
        );
    }
}
