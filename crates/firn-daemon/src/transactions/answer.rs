//! The answers to requests about transactions. A transaction may have an owner: a connection or a process. The end of
//! the owner aborts it while it is open.

use std::time::Duration;

use firn_backing::Caller;
use firn_engine::Cached;
use firn_format::live::Transaction;
use firn_protocol::path::BytePath;
use firn_protocol::{Reply, Request};
use firn_transact::machine::{Answer, CommitOptions, Verb};
use firn_transact::{ScopeError, TopMaker};

use super::refusal::{aborted_reply, error_reply};
use super::{is_open, run_request};
use crate::gate::TransactionGate;
use crate::owners::{AbortCause, ControlPeer, Owners, RequestGuard, RequestRefusal};
use crate::store::shown_scope;

/// Parts of the mount that an answer uses.
pub(crate) struct RequestContext<'a> {
    /// Has a commit applied in the background after the answer.
    pub(crate) apply_later: &'a dyn Fn(),
    /// Maximum wait for other hosts.
    pub(crate) hosts_timeout: Duration,
    /// Makes the kernel drop what it has cached.
    pub(crate) invalidate_cache: &'a dyn Fn(Cached),
}

/// The result of a request about a transaction.
struct RequestResult {
    reply: Reply,
    /// After a commit: the path of the scope now, because its top may have been renamed.
    path_after: Option<Vec<u8>>,
}

/// Carries out a request about a transaction on behalf of `peer`, the process that asks, and returns the reply. The
/// path in the request is that of the scope (the directory that the transaction covers) at the begin of the
/// transaction. After a commit the result also has the scope's present path, because programs may have renamed it.
fn carry_out(
    gate: &TransactionGate,
    request: &Request,
    peer: &ControlPeer,
    context: &RequestContext<'_>,
) -> RequestResult {
    let caller = Caller {
        uid: peer.uid,
        gid: peer.gid,
        pid: peer.pid,
    };
    let (verb, path) = verb_from_request(request, &caller);
    let reply = match run_request(gate, verb, path.as_bytes(), context) {
        Ok(Answer::Done) => Reply::Done,
        Ok(Answer::Committed(committed)) => {
            return RequestResult {
                reply: Reply::Committed {
                    id: committed.id,
                    not_applied_on: committed.not_applied_on,
                },
                path_after: Some(committed.path_after),
            };
        }
        Err(error) => error_reply(&error, path),
    };
    RequestResult {
        reply,
        path_after: None,
    }
}

/// Returns the verb of the transactions' state machine for a request, and the path of the scope, the directory that the
/// transaction covers. `caller` owns a directory that the request creates. The request must be about a transaction.
fn verb_from_request<'a>(request: &'a Request, caller: &'a Caller) -> (Verb<'a>, &'a BytePath) {
    match request {
        Request::Begin { path, create, .. } => {
            let verb = match *create {
                Some(mode) => Verb::Create(TopMaker { caller, mode }),
                None => Verb::Begin,
            };
            (verb, path)
        }
        Request::Prepare { path, id } => (Verb::Prepare(*id), path),
        Request::Commit {
            path,
            id,
            begin,
            apply_later,
        } => {
            let options = CommitOptions {
                id: *id,
                begins_next: *begin,
                applies_later: *apply_later,
            };
            (Verb::Commit(options), path)
        }
        Request::Abort { path } => (Verb::Abort, path),
        Request::Restore { path, id } => (Verb::Restore(*id), path),
        _ => unreachable!("only requests about transactions come here"),
    }
}

/// Answers a request about a transaction that may have an owner. Once the owner is gone, the transaction is neither
/// prepared nor committed.
pub(crate) fn answer_owned(
    gate: &TransactionGate,
    owners: &Owners,
    request: &Request,
    peer: &ControlPeer,
    context: &RequestContext<'_>,
) -> Reply {
    let (Request::Begin { path, .. }
    | Request::Prepare { path, .. }
    | Request::Commit { path, .. }
    | Request::Abort { path }
    | Request::Restore { path, .. }) = request
    else {
        unreachable!("only requests about transactions come here");
    };
    // A transaction is identified by its path at the begin, even if its top was renamed since.
    let scope = &gate.store().path_at_begin(path.as_bytes())[..];
    let request = &with_path(request, scope);
    let request_guard = match begin_request(owners, request, scope) {
        RequestStart::Begun(request_guard) => request_guard,
        RequestStart::Answered(reply) => return reply,
    };
    let owner = match request {
        Request::Begin { owner, .. } => match RequestGuard::find_owner(*owner, peer) {
            Ok(owner) => Some(owner),
            Err(errno) => return no_such_owner_reply(errno),
        },
        _ => None,
    };
    let RequestResult {
        mut reply,
        path_after,
    } = carry_out(gate, request, peer, context);
    let mut is_refused_as_aborted = false;
    match (request, &reply, owner) {
        (Request::Begin { .. }, Reply::Done, Some(owner)) => {
            request_guard.record_begin(owner);
            store_in_live_table(gate, owners, scope);
        }
        (Request::Commit { begin: true, .. }, Reply::Committed { .. }, _) => {
            let next_scope = path_after.as_deref().unwrap_or(scope);
            request_guard.record_next_begin(next_scope);
            store_in_live_table(gate, owners, next_scope);
        }
        (_, Reply::Error { .. }, _) if completes_transaction(request) => {
            if let Some(cause) = find_abort_cause(gate, owners, scope) {
                reply = aborted_reply(scope, &cause);
                is_refused_as_aborted = true;
            }
        }
        _ => {}
    }
    request_guard.finish(is_open(gate, scope));
    // If firnd dies before the answer is sent, the repeated request gets the same answer.
    if is_refused_as_aborted {
        gate.record_refused_request(scope);
    } else {
        gate.forget_undone_scope(scope);
    }
    remove_ended_from_live_table(gate);
    reply
}

/// Returns whether a request prepares or commits a transaction.
fn completes_transaction(request: &Request) -> bool {
    matches!(request, Request::Prepare { .. } | Request::Commit { .. })
}

/// Begins a request about the transaction that covers the directory `scope`. Until the returned guard is dropped, the
/// transaction is not aborted, even if its owner (a connection or process) ends. If the owner has ended already, the
/// request may be answered at once.
///
/// A begin or a restore does not need the earlier owner: once the earlier transaction is aborted, the request begins.
fn begin_request<'a>(owners: &'a Owners, request: &Request, scope: &[u8]) -> RequestStart<'a> {
    loop {
        match owners.begin_request(scope) {
            Ok(request_guard) => return RequestStart::Begun(request_guard),
            Err(RequestRefusal::Aborted { owner }) => {
                if completes_transaction(request) {
                    let reply = aborted_reply(scope, &AbortCause::OwnerGone(owner));
                    return RequestStart::Answered(reply);
                }
                if matches!(request, Request::Abort { .. }) {
                    return RequestStart::Answered(Reply::Done);
                }
                // A begin or a restore tries again: the earlier transaction has no entry any more.
            }
            Err(RequestRefusal::NotAborted { owner, error }) => {
                let scope = shown_scope(scope);
                let message = format!(
                    "{scope}: {owner} is gone, and its transaction cannot be aborted yet: {error}; firnd tries again each second"
                );
                return RequestStart::Answered(Reply::Error {
                    errno: libc::EBUSY,
                    message,
                });
            }
        }
    }
}

/// Result of [`begin_request`].
enum RequestStart<'a> {
    /// The request is in progress until the guard is dropped.
    Begun(RequestGuard<'a>),
    /// The request needs no further work; this is its reply.
    Answered(Reply),
}

/// Returns the reply to a begin that names an owner which is no running process.
fn no_such_owner_reply(errno: impl std::fmt::Display) -> Reply {
    let message =
        format!("the owner of a transaction must be a running process that firnd can see: {errno}");
    Reply::Error {
        errno: libc::ESRCH,
        message,
    }
}

/// Returns why the last transaction of a scope was aborted without a request; `None` if it was not, or if the scope has
/// a transaction now.
fn find_abort_cause(gate: &TransactionGate, owners: &Owners, scope: &[u8]) -> Option<AbortCause> {
    if is_open(gate, scope).is_some() {
        return None;
    }
    let is_undone = gate.is_undone_scope(scope);
    match owners.abort_cause(scope) {
        Some(cause) => Some(cause),
        None if is_undone => Some(AbortCause::FirndDied),
        None => None,
    }
}

/// Stores a begun transaction in the live table, before its owner gets the answer. If firnd dies later, the next firnd
/// continues the transaction.
fn store_in_live_table(gate: &TransactionGate, owners: &Owners, scope: &[u8]) {
    if let Some(live) = gate.engine().live()
        && let Some(transaction) = gate.store().current_transaction(scope)
    {
        live.record_transaction(Transaction {
            serial: transaction.serial(),
            owner: owners.stored_owner(scope),
            is_ending: false,
        });
    }
}

/// Removes transactions that are over from the live table, so that the next firnd does not continue them.
pub(super) fn remove_ended_from_live_table(gate: &TransactionGate) {
    if let Some(live) = gate.engine().live() {
        live.retain_transactions(|serial| gate.store().transaction_numbered(serial).is_some());
    }
}

/// Returns the answer of a mount without transactions.
pub(crate) fn answer_without_transactions(request: &Request) -> Reply {
    match request {
        Request::Begin { path, .. }
        | Request::Prepare { path, .. }
        | Request::Commit { path, .. }
        | Request::Abort { path }
        | Request::Restore { path, .. } => error_reply(&ScopeError::NotTransactional.into(), path),
        _ => unreachable!("only requests about transactions come here"),
    }
}

/// Returns the same request for another path.
fn with_path(request: &Request, scope: &[u8]) -> Request {
    let mut request = request.clone();
    if let Request::Begin { path, .. }
    | Request::Prepare { path, .. }
    | Request::Commit { path, .. }
    | Request::Abort { path }
    | Request::Restore { path, .. } = &mut request
    {
        *path = scope.into();
    }
    request
}
