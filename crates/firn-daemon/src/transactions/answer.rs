//! The answers to requests about transactions, which may have an owner.

use std::path::Path;
use std::time::Duration;

use firn_engine::Cached;
use firn_protocol::path::BytePath;
use firn_protocol::{Reply, Request};
use firn_transact::ScopeError;

use super::refusal::{orphaned, refused};
use super::{
    CommitOptions, abort, begin, begin_created, commit, current, finish_restore, is_open, prepare,
    restore, write_back,
};
use crate::commit_applier::CommitApplier;
use crate::gate::TransactionGate;
use crate::owners::{ControlPeer, Owners, Refusal, Request as UnderWay};
use crate::store::shown_scope;

/// Parts of the mount that an answer uses.
pub(crate) struct RequestContext<'a> {
    pub(crate) applier: &'a CommitApplier,
    /// How long other hosts are waited for.
    pub(crate) patience: Duration,
    /// The backing directory.
    pub(crate) backing: &'a Path,
    /// Makes the kernel drop what it has cached.
    pub(crate) forget: &'a dyn Fn(Cached),
}

/// An answer, and the scope of the transaction that was begun after a commit.
struct Answered {
    reply: Reply,
    next: Option<Vec<u8>>,
}

/// The answer to a request about a transaction, whose path is that of the scope at its begin.
fn answer(
    gate: &TransactionGate,
    request: &Request,
    peer: &ControlPeer,
    context: &RequestContext<'_>,
) -> Answered {
    let &RequestContext {
        patience, forget, ..
    } = context;
    if let Request::Prepare { path, .. }
    | Request::Commit { path, .. }
    | Request::Abort { path }
    | Request::Restore { path, .. } = request
    {
        write_back(gate, path.as_bytes(), forget);
    }
    let mut next = None;
    let (path, result) = match request {
        Request::Begin {
            path,
            create: Some(mode),
            ..
        } => {
            let reply = begin_created(gate, path.as_bytes(), *mode, peer, context)
                .map_or_else(|refusal| refusal, |()| Reply::Done);
            return Answered { reply, next };
        }
        Request::Begin { path, .. } => {
            let begun = finish_restore(gate, path.as_bytes(), forget)
                .and_then(|()| begin(gate, path.as_bytes(), patience));
            (path, begun.map(|()| Reply::Done))
        }
        Request::Prepare { path, id } => (
            path,
            prepare(gate, path.as_bytes(), *id, patience).map(|()| Reply::Done),
        ),
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
            let committed = commit(gate, path.as_bytes(), &options, context);
            let reply = committed.map(|committed| {
                next = committed.next;
                Reply::Committed {
                    id: committed.id,
                    not_applied_on: committed.not_applied_on,
                }
            });
            (path, reply)
        }
        Request::Abort { path } => (
            path,
            abort(gate, path.as_bytes(), patience, forget).map(|()| Reply::Done),
        ),
        Request::Restore { path, id } => (
            path,
            restore(gate, path.as_bytes(), *id, patience, forget).map(|()| Reply::Done),
        ),
        _ => unreachable!("only requests about transactions come here"),
    };
    let result = match result {
        Err(error) => undone_by_another(gate, request, path, patience, forget).ok_or(error),
        done => done,
    };
    let reply = result.unwrap_or_else(|error| refused(&error, path));
    Answered { reply, next }
}

/// [`answer`] for a transaction that may have an owner: once the owner is gone it is neither prepared nor committed.
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
    // A transaction is known by the path at its begin, whatever its top is called since.
    let scope = &gate.store().path_at_begin(path.as_bytes())[..];
    let request = &with_path(request, scope);
    let needs_owner = matches!(request, Request::Prepare { .. } | Request::Commit { .. });
    let under_way = loop {
        match owners.enter(scope) {
            Ok(under_way) => break under_way,
            Err(Refusal::Aborted { owner }) if needs_owner => return orphaned(scope, &owner),
            Err(Refusal::Aborted { .. }) if matches!(request, Request::Abort { .. }) => {
                return Reply::Done;
            }
            Err(Refusal::Aborted { .. }) => {}
            Err(Refusal::NotAborted { owner, error }) => {
                let scope = shown_scope(scope);
                let message = format!(
                    "{scope}: {owner} is gone, and its transaction cannot be aborted yet: {error}; it is tried again each second"
                );
                return Reply::Error {
                    errno: libc::EBUSY,
                    message,
                };
            }
        }
    };
    let owner = match request {
        Request::Begin { owner, .. } => match UnderWay::find_owner(*owner, peer) {
            Ok(found) => Some(found),
            Err(errno) => {
                let message = format!(
                    "the owner of a transaction must be a process that runs, as firnd sees it: {errno}"
                );
                return Reply::Error {
                    errno: libc::ESRCH,
                    message,
                };
            }
        },
        _ => None,
    };
    let Answered { mut reply, next } = answer(gate, request, peer, context);
    match (request, &reply, owner) {
        (Request::Begin { .. }, Reply::Done, Some(owner)) => under_way.begun(owner),
        (Request::Commit { begin: true, .. }, Reply::Committed { .. }, _) => {
            under_way.begun_next(next.as_deref().unwrap_or(scope));
        }
        (_, Reply::Error { .. }, _) if needs_owner && current(gate, scope).is_none() => {
            if let Some(owner) = owners.aborted_for(scope) {
                reply = orphaned(scope, &owner);
            }
        }
        _ => {}
    }
    under_way.end(is_open(gate, scope));
    reply
}

/// The answer of a mount without transactions.
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

/// The same request about another path.
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

/// Why nothing comes of a transaction in shadow mode that another host has aborted, for all hosts. It may not be over
/// here yet.
fn undone_by_another(
    gate: &TransactionGate,
    request: &Request,
    path: &BytePath,
    patience: Duration,
    forget: &dyn Fn(Cached),
) -> Option<Reply> {
    let store = gate.store();
    if store
        .to_be_stopped()
        .iter()
        .any(|scope| scope == path.as_bytes())
        && !matches!(request, Request::Abort { .. })
        && let Err(error) = abort(gate, path.as_bytes(), patience, forget)
    {
        return Some(refused(&error, path));
    }
    let by = store.stopped_by(path.as_bytes())?;
    match request {
        _ if current(gate, path.as_bytes()).is_some() => None,
        Request::Abort { .. } => Some(Reply::Done),
        Request::Prepare { .. } | Request::Commit { .. } => {
            let scope = shown_scope(path.as_bytes());
            let message =
                format!("{scope}: {by} aborted the transaction; it is undone on all hosts");
            Some(Reply::Error {
                errno: libc::ECANCELED,
                message,
            })
        }
        _ => None,
    }
}
