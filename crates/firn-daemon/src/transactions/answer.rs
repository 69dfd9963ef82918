//! The answers to requests about transactions, which may have an owner.

use std::time::Duration;

use firn_backing::Caller;
use firn_engine::Cached;
use firn_format::live::Transaction;
use firn_protocol::path::BytePath;
use firn_protocol::{Reply, Request};
use firn_transact::machine::{Answer, CommitOptions, Verb};
use firn_transact::{ScopeError, TopMaker};

use super::refusal::{aborted, refused};
use super::{is_open, run};
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

/// Answers a request about a transaction. The path in the request is that of the scope at the begin of the transaction.
/// After a commit, its present path is returned too.
fn answer(
    gate: &TransactionGate,
    request: &Request,
    peer: &ControlPeer,
    context: &RequestContext<'_>,
) -> (Reply, Option<Vec<u8>>) {
    let caller = Caller {
        uid: peer.uid,
        gid: peer.gid,
        pid: peer.pid,
    };
    let (verb, path) = verb_of(request, &caller);
    match run(gate, verb, path.as_bytes(), context) {
        Ok(Answer::Done) => (Reply::Done, None),
        Ok(Answer::Committed(committed)) => {
            let reply = Reply::Committed {
                id: committed.id,
                not_applied_on: committed.not_applied_on,
            };
            (reply, Some(committed.path_after))
        }
        Err(error) => (refused(&error, path), None),
    }
}

fn verb_of<'a>(request: &'a Request, caller: &'a Caller) -> (Verb<'a>, &'a BytePath) {
    match request {
        Request::Begin { path, create, .. } => {
            let create = create.map(|mode| Verb::Create(TopMaker { caller, mode }));
            (create.unwrap_or(Verb::Begin), path)
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
    let needs_owner = matches!(request, Request::Prepare { .. } | Request::Commit { .. });
    let request_guard = loop {
        match owners.begin_request(scope) {
            Ok(request_guard) => break request_guard,
            Err(RequestRefusal::Aborted { owner }) if needs_owner => {
                return aborted(scope, &AbortCause::OwnerGone(owner));
            }
            Err(RequestRefusal::Aborted { .. }) if matches!(request, Request::Abort { .. }) => {
                return Reply::Done;
            }
            Err(RequestRefusal::Aborted { .. }) => {}
            Err(RequestRefusal::NotAborted { owner, error }) => {
                let scope = shown_scope(scope);
                let message = format!(
                    "{scope}: {owner} is gone, and its transaction cannot be aborted yet: {error}; firnd tries again each second"
                );
                return Reply::Error {
                    errno: libc::EBUSY,
                    message,
                };
            }
        }
    };
    let owner = match request {
        Request::Begin { owner, .. } => match RequestGuard::find_owner(*owner, peer) {
            Ok(found) => Some(found),
            Err(errno) => {
                let message = format!(
                    "the owner of a transaction must be a running process that firnd can see: {errno}"
                );
                return Reply::Error {
                    errno: libc::ESRCH,
                    message,
                };
            }
        },
        _ => None,
    };
    let (mut reply, path_after) = answer(gate, request, peer, context);
    let mut is_refused_as_aborted = false;
    match (request, &reply, owner) {
        (Request::Begin { .. }, Reply::Done, Some(owner)) => {
            request_guard.record_begin(owner);
            note_begun(gate, owners, scope);
        }
        (Request::Commit { begin: true, .. }, Reply::Committed { .. }, _) => {
            let next = path_after.as_deref().unwrap_or(scope);
            request_guard.record_next_begin(next);
            note_begun(gate, owners, next);
        }
        (_, Reply::Error { .. }, _) if needs_owner && is_open(gate, scope).is_none() => {
            let is_undone = gate.is_undone_scope(scope);
            let cause = owners.abort_cause(scope);
            if let Some(cause) = cause.or(is_undone.then_some(AbortCause::FirndDied)) {
                reply = aborted(scope, &cause);
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
    forget_ended(gate);
    reply
}

/// Stores a begun transaction in the live table, before its owner gets the answer. If firnd dies later, the next firnd
/// continues the transaction.
fn note_begun(gate: &TransactionGate, owners: &Owners, scope: &[u8]) {
    if let Some(live) = gate.engine().live()
        && let Some(found) = gate.store().current_transaction(scope)
    {
        live.note_transaction(Transaction {
            serial: found.serial(),
            owner: owners.stored_owner(scope),
            is_ending: false,
        });
    }
}

/// Removes transactions that are over from the live table, so that the next firnd does not continue them.
pub(super) fn forget_ended(gate: &TransactionGate) {
    if let Some(live) = gate.engine().live() {
        let is_there = |serial| gate.store().transaction_numbered(serial).is_some();
        live.retain_transactions(is_there);
    }
}

/// Returns the answer of a mount without transactions.
pub(crate) fn answer_without(request: &Request) -> Reply {
    match request {
        Request::Begin { path, .. }
        | Request::Prepare { path, .. }
        | Request::Commit { path, .. }
        | Request::Abort { path }
        | Request::Restore { path, .. } => refused(&ScopeError::NotTransactional.into(), path),
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
