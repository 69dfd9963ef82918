//! Transactions of a mount: what the control socket asks for.
//!
//! The gate keeps the scope quiet ([`TransactionGate::quiesce`]) while the store takes a transaction from one state to
//! the next. The state is that of a handle ([`Found`]), looked for when a request begins.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use firn_backing::{Caller, DirBacking, Errno};
use firn_engine::Cached;
use firn_format::durability::DurabilityLevel;
use firn_format::tally::Tally;
use firn_protocol::path::BytePath;
use firn_protocol::{Reply, Request, TransactionStatus};
use firn_transact::{
    AbortError, BackupError, BeginError, CommitError, Decided, Found, Mode, OwnError, RestoreError,
    ScopeError, Stage, StageError, StoreError, TopMaker, TransactionError, VoteError, parent_of,
};
use rustix::fs::{Access, AtFlags, CWD, accessat};

use crate::commit_applier::CommitApplier;
use crate::gate::{Pending, ScopeRoot, TransactionGate};
use crate::owners::{ControlPeer, Owners, Refusal, Request as UnderWay};
use crate::participants::{self, patiently};
use crate::store::shown_scope;

/// How long other hosts are waited for at the end of a mount. The next one goes on.
const LAST_PATIENCE: Duration = Duration::from_secs(5);

/// What becomes of a transaction on this host, each counted and, with `log-level=debug`, logged.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    /// It is open.
    Begin,
    /// No change may begin, and those under way are waited for.
    Quiesce,
    /// Nothing changes, and what was written is where it belongs: the backing, or nowhere.
    Drained,
    /// It is durable, its outcome open.
    Prepared,
    /// It is committed.
    Decided,
    /// The backing has it.
    Applied,
    /// It is over.
    Ended,
    /// It is thrown away.
    Undone,
}

static STEPS: Tally<8> = Tally::new([
    "begin", "quiesce", "drained", "prepared", "decided", "applied", "ended", "undone",
]);

/// Counts since firnd began, which serves one mount.
pub(crate) fn steps() -> std::collections::BTreeMap<String, u64> {
    STEPS.figures()
}

/// Notes a step of the transaction in `scope`.
pub(crate) fn note(gate: &TransactionGate, step: Step, scope: &[u8], id: Option<u64>) {
    STEPS.count(step as usize);
    let members = gate.store().members();
    let host = members
        .map(|members| members.host.clone())
        .unwrap_or_default();
    tracing::debug!(step = STEPS.name(step as usize), scope = %shown_scope(scope), ?id, host, "transaction");
}

/// Notes the step with which the transaction in `scope` ended.
fn note_last(gate: &TransactionGate, step: Step, scope: &[u8], id: Option<u64>) {
    note(gate, step, scope, id);
    note(gate, Step::Ended, scope, id);
}

/// The same where this host has ended its part: its accesses need not be noted any more.
fn end_part(gate: &TransactionGate, step: Step, scope: &[u8], id: Option<u64>) {
    note_last(gate, step, scope, id);
    participants::ended(gate, scope);
}

/// [`TransactionGate::quiesce`], with its steps noted.
fn quiesce<T>(
    gate: &TransactionGate,
    path: &[u8],
    pending: Pending,
    work: impl FnOnce(&ScopeRoot) -> Result<T, TransactionError>,
) -> Result<T, TransactionError> {
    note(gate, Step::Quiesce, path, None);
    gate.quiesce(path, pending, |root| {
        note(gate, Step::Drained, path, None);
        work(root)
    })
}

/// Path under which programs see the scope that was at `path` when its transaction began.
fn path_now(gate: &TransactionGate, path: &[u8]) -> Vec<u8> {
    gate.store().path_now(path)
}

/// After names of a scope changed without the kernel: it drops what it has of them, under any of `paths`.
fn forget_names(gate: &TransactionGate, paths: &[&[u8]], forget: &dyn Fn(Cached)) {
    let engine = gate.engine();
    for (at, path) in paths.iter().enumerate() {
        if paths[..at].contains(path) {
            continue;
        }
        engine.revalidate_names(path).into_iter().for_each(forget);
        engine
            .cached_at(parent_of(path))
            .into_iter()
            .for_each(forget);
    }
}

/// The transaction of a scope that programs change things in, or else the commit that is being applied.
fn current<'a>(gate: &'a TransactionGate, path: &[u8]) -> Option<Found<'a, DirBacking>> {
    gate.store().current_transaction(path)
}

/// The transaction of a scope that was begun first.
fn first<'a>(gate: &'a TransactionGate, path: &[u8]) -> Option<Found<'a, DirBacking>> {
    gate.store().first_transaction(path)
}

/// The commit of a scope that is decided and not applied to its end.
fn decided<'a>(gate: &'a TransactionGate, path: &[u8]) -> Option<Decided<'a, DirBacking>> {
    first(gate, path)?.decided()
}

/// Applies the commit of a scope that is decided, if there is one.
pub(crate) fn apply_commit(gate: &TransactionGate, path: &[u8]) -> Result<(), TransactionError> {
    let Some(commit) = decided(gate, path) else {
        return Ok(());
    };
    commit.apply()?;
    note_last(gate, Step::Applied, path, Some(commit.id()));
    Ok(())
}

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

/// Whether the transaction is open; `None`: there is none.
pub(crate) fn is_open(gate: &TransactionGate, path: &[u8]) -> Option<bool> {
    Some(current(gate, path)?.is_open())
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

/// The answer to a prepare or commit of a transaction whose owner is gone.
fn orphaned(scope: &[u8], owner: &str) -> Reply {
    let scope = shown_scope(scope);
    Reply::Error {
        errno: libc::ECANCELED,
        message: format!(
            "{scope}: the owner of the transaction, {owner}, was gone before it was prepared: it is aborted"
        ),
    }
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

/// Makes the kernel write back what programs stored in shared mappings, so that it is part of the transaction. Not while it
/// is prepared: then the writes would wait for the outcome.
fn write_back(gate: &TransactionGate, path: &[u8], forget: &dyn Fn(Cached)) {
    if is_open(gate, path) == Some(true) {
        gate.engine()
            .written_at(&path_now(gate, path))
            .into_iter()
            .map(Cached::Inode)
            .for_each(forget);
    }
}

fn begin(gate: &TransactionGate, path: &[u8], patience: Duration) -> Result<(), TransactionError> {
    // Data written after a commit that is still being applied is not part of the new transaction, and cannot drain yet.
    if decided(gate, path).is_some()
        && gate
            .engine()
            .wait_tree(
                &path_now(gate, path),
                DurabilityLevel::Drained,
                &mut |_, _| false,
            )
            .is_err()
    {
        apply_commit(gate, path)?;
    }
    let deadline = Instant::now() + patience;
    patiently(deadline, || {
        quiesce(gate, path, Pending::Drain, |root| {
            begin_at(gate, root, path)
        })
    })
}

fn begin_at(gate: &TransactionGate, root: &ScopeRoot, path: &[u8]) -> Result<(), TransactionError> {
    gate.store().begin(root, path)?;
    note(gate, Step::Begin, path, None);
    participants::begun(gate, path);
    Ok(())
}

fn prepare(
    gate: &TransactionGate,
    path: &[u8],
    id: u64,
    patience: Duration,
) -> Result<(), TransactionError> {
    apply_commit_before(gate, path)?;
    // Asked again, nothing more is to be part of it.
    let pending = match is_open(gate, path) {
        Some(true) => Pending::Drain,
        Some(false) | None => Pending::Keep,
    };
    let store = gate.store();
    let prepared = quiesce(gate, path, pending, |root| {
        let found = store.transaction_at(root);
        let found = found.ok_or(StageError::NoTransaction)?;
        let prepared = found.prepare(id)?;
        note(gate, Step::Prepared, path, Some(id));
        if found.is_open() {
            participants::note_accesses(gate, &prepared, path);
        }
        Ok(prepared)
    })?;
    participants::vote(gate, &prepared, path, patience)
}

/// A commit before this transaction is applied first, while changes go on: drains of the scope wait for that.
fn apply_commit_before(gate: &TransactionGate, path: &[u8]) -> Result<(), TransactionError> {
    match is_open(gate, path) {
        Some(true) => apply_commit(gate, path),
        Some(false) | None => Ok(()),
    }
}

/// Begins a transaction that makes its own directory; the refusal.
fn begin_created(
    gate: &TransactionGate,
    path: &[u8],
    mode: u32,
    peer: &ControlPeer,
    context: &RequestContext<'_>,
) -> Result<(), Reply> {
    let parent_path = parent_of(path);
    let refuse_parent = |error| refused(&error, &parent_path.into());
    let refuse = |error: BeginError| refused(&error.into(), &path.into());
    let parent = gate.scope_at(parent_path).map_err(refuse_parent)?;
    // The caller's rights count last, as with mkdir(2): they are those of a directory, which no transaction has changed.
    gate.store()
        .can_begin_created(&parent, path)
        .map_err(refuse)?;
    may_make_in(&context.backing.join(OsStr::from_bytes(parent_path)))
        .map_err(|errno| refuse_to_make(errno, parent_path))?;
    let caller = Caller {
        uid: peer.uid,
        gid: peer.gid,
        pid: peer.pid,
    };
    let maker = TopMaker {
        caller: &caller,
        mode,
    };
    gate.store()
        .begin_created(&parent, path, maker)
        .map_err(refuse)?;
    note(gate, Step::Begin, path, None);
    gate.engine()
        .cached_at(parent_path)
        .into_iter()
        .for_each(context.forget);
    Ok(())
}

/// Whether the caller may make names in a directory. The control socket is spoken to by the user of this process, and by
/// root, who may do no less.
fn may_make_in(dir: &Path) -> Result<(), rustix::io::Errno> {
    let wanted = Access::WRITE_OK | Access::EXEC_OK;
    accessat(CWD, dir, wanted, AtFlags::EACCESS)
}

fn refuse_to_make(errno: rustix::io::Errno, parent: &[u8]) -> Reply {
    let parent = shown_scope(parent);
    Reply::Error {
        errno: errno.raw_os_error(),
        message: format!("no directory can be made in {parent}: {errno}"),
    }
}

/// What came of a commit.
struct Committed {
    id: u64,
    /// Hosts that have not applied it.
    not_applied_on: Vec<String>,
    /// Scope of the transaction that was begun after it.
    next: Option<Vec<u8>>,
}

/// What a request to commit asks for.
struct CommitOptions {
    id: Option<u64>,
    /// The next transaction is open before anything can change.
    begins_next: bool,
    /// The backing gets the commit after the answer.
    applies_later: bool,
}

fn commit(
    gate: &TransactionGate,
    path: &[u8],
    options: &CommitOptions,
    context: &RequestContext<'_>,
) -> Result<Committed, TransactionError> {
    let store = gate.store();
    let is_decided = |id| decided(gate, path).is_some_and(|commit| commit.id() == id);
    if options.id.is_none_or(|id| !is_decided(id)) {
        apply_commit_before(gate, path)?;
    }
    let found = current(gate, path);
    let found_id = found.as_ref().and_then(Found::id);
    let id = match options.id.or(found_id) {
        Some(id) => id,
        None => store
            .committed(path)?
            .map_or(1, |last| last.saturating_add(1)),
    };
    let shared = store.members().is_some();
    let mut is_open = found.is_some_and(|found| found.is_open()) && !is_decided(id);
    if shared && is_open {
        prepare(gate, path, id, context.patience)?;
        is_open = false;
    }
    let is_recovered = first(gate, path).is_some_and(|found| found.is_recovered());
    // What several hosts save in one place is to be gone before the next transaction begins.
    let begins_late = options.begins_next && shared && store.mode() == Mode::Shadow;
    let mut place = path.to_vec();
    let mut decide = |root: &ScopeRoot| {
        let found = match first(gate, path) {
            Some(found) if found.id() == Some(id) => Some(found),
            _ => store.transaction_at(root),
        };
        // Nobody renames the top from here on.
        place = store.path_after(path);
        found.ok_or(StageError::NoTransaction)?.decide(id)?;
        note(gate, Step::Decided, path, Some(id));
        // It may have been applied since: then only the transaction that followed is left.
        let is_followed = match current(gate, &place) {
            Some(Found::Open(_) | Found::Prepared(_)) => true,
            Some(Found::Decided(_)) | None => false,
        };
        if !options.begins_next {
            participants::ended(gate, path);
        }
        let begins = options.begins_next && !is_followed && !is_recovered && !begins_late;
        if begins {
            store.begin(root, &place)?;
            note(gate, Step::Begin, path, None);
        }
        Ok(())
    };
    if is_open {
        quiesce(gate, path, Pending::Drain, decide)?;
    } else {
        // What was written since it was prepared comes after it. Who changes more waits already, and the scope would
        // not become quiet before that.
        decide(&gate.scope_at(path)?)?;
    }
    if is_recovered {
        apply_commit(gate, path)?;
        // Programs saw the tree before it until now.
        forget_names(gate, &[path, &place], context.forget);
        if options.begins_next {
            begin(gate, &place, context.patience)?;
        }
    } else if options.applies_later && !begins_late {
        context.applier.wake();
        return Ok(Committed {
            id,
            not_applied_on: Vec::new(),
            next: Some(place),
        });
    } else if let Err(error) = apply_commit(gate, path) {
        // Asked again, it is the commit that is meant and not the one after it.
        if options.begins_next
            && let Some(commit) = decided(gate, path)
        {
            commit.give_up_next();
        }
        return Err(error);
    }
    let not_applied_on = participants::await_other_hosts(gate, path, id, context)?;
    if shared {
        // Programs did not see the parts of other hosts until now.
        forget_names(gate, &[path], context.forget);
    }
    if begins_late && !is_recovered {
        begin(gate, path, context.patience)?;
    }
    Ok(Committed {
        id,
        not_applied_on,
        next: Some(place),
    })
}

fn abort(
    gate: &TransactionGate,
    path: &[u8],
    patience: Duration,
    forget: &dyn Fn(Cached),
) -> Result<(), TransactionError> {
    let store = gate.store();
    let found = current(gate, path);
    match &found {
        Some(Found::Decided(commit)) => {
            let id = commit.id();
            return Err(StageError::Decided { id }.into());
        }
        // Other hosts may have committed it: asked before anything is thrown away.
        Some(Found::Prepared(prepared)) => store.call_commit_off(prepared.id(), path)?,
        Some(Found::Open(_)) | None => {}
    }
    // What is wrong with the path counts more than that there is no transaction.
    gate.scope_at(path)?;
    let found = found.ok_or(StageError::NoTransaction)?;
    // Drains that wait for the outcome are told first, or the data could not be dropped.
    match found.refuse_changes() {
        // The thread that follows the other hosts has ended the transaction first.
        Err(AbortError::Stage(StageError::NoTransaction)) => return Ok(()),
        refused => refused?,
    }
    let place = path_now(gate, path);
    let mut waited = false;
    let attempt = || {
        let ended = quiesce(gate, path, Pending::Discard, |_| {
            found.abort()?;
            end_part(gate, Step::Undone, path, None);
            Ok(())
        });
        match ended {
            // The thread that follows the other hosts was faster.
            Err(TransactionError::Stage(StageError::NoTransaction)) if waited => Ok(()),
            ended => {
                waited = true;
                ended
            }
        }
    };
    patiently(Instant::now() + patience, attempt)?;
    forget_names(gate, &[&place, path], forget);
    Ok(())
}

/// Aborts the transaction of an owner that is gone.
pub(crate) fn abort_orphan(
    gate: &TransactionGate,
    path: &[u8],
    forget: &dyn Fn(Cached),
) -> Result<(), String> {
    write_back(gate, path, forget);
    let scope = shown_scope(path);
    match abort(gate, path, Duration::ZERO, forget) {
        Ok(()) | Err(TransactionError::Stage(StageError::NoTransaction)) => {
            tracing::info!(%scope, "a transaction is aborted: its owner is gone");
            Ok(())
        }
        Err(error) => {
            tracing::warn!(%error, %scope, "the transaction of an owner that is gone cannot be aborted yet");
            Err(error.to_string())
        }
    }
}

/// Ends transactions that other hosts have aborted, as far as that goes now.
pub(crate) fn follow(gate: &TransactionGate, forget: &dyn Fn(Cached)) {
    for scope in gate.store().to_be_stopped() {
        let shown = shown_scope(&scope);
        match abort(gate, &scope, Duration::ZERO, forget) {
            Ok(()) => {
                tracing::info!(scope = %shown, "a transaction of several hosts was aborted and is undone")
            }
            Err(TransactionError::Abort(AbortError::Stopping { hosts })) => {
                tracing::debug!(scope = %shown, ?hosts, "waiting for hosts to stop");
            }
            Err(error) => tracing::warn!(%error, scope = %shown, "a transaction cannot be undone"),
        }
    }
}

/// Finishes a restore that failed: the backing has an older commit in part.
fn finish_restore(
    gate: &TransactionGate,
    path: &[u8],
    forget: &dyn Fn(Cached),
) -> Result<(), TransactionError> {
    let place = gate.store().path_after(path);
    let commit = decided(gate, path);
    if commit.is_some_and(|commit| commit.is_undo()) {
        apply_commit(gate, path)?;
        forget_names(gate, &[&place, path], forget);
    }
    Ok(())
}

fn restore(
    gate: &TransactionGate,
    path: &[u8],
    id: u64,
    patience: Duration,
    forget: &dyn Fn(Cached),
) -> Result<(), TransactionError> {
    let store = gate.store();
    finish_restore(gate, path, forget)?;
    let place = store.path_after(path);
    // Of a commit before the transaction that is open. A commit that is not followed may be the one that is meant.
    apply_commit_before(gate, path)?;
    let found = current(gate, path);
    if let Some(found) = &found
        && found.id() == Some(id)
    {
        return restore_prepared(gate, found, id, forget);
    }
    if let Some(Found::Decided(commit)) = &found {
        let id = commit.id();
        return Err(StageError::Decided { id }.into());
    }
    // Refused before anything is thrown away.
    store.can_restore(path, id)?;
    let pending = match found {
        Some(_) if store.shares() => {
            abort(gate, path, patience, forget)?;
            Pending::Drain
        }
        Some(found) => {
            found.refuse_changes()?;
            Pending::Discard
        }
        None => Pending::Drain,
    };
    quiesce(gate, path, pending, |root| {
        store.restore(root, id)?;
        end_part(gate, Step::Undone, path, Some(id));
        Ok(())
    })?;
    forget_names(gate, &[&place, path], forget);
    Ok(())
}

/// Makes the files those of a transaction that is prepared or committed with `id`: without what was written since.
fn restore_prepared(
    gate: &TransactionGate,
    found: &Found<'_, DirBacking>,
    id: u64,
    forget: &dyn Fn(Cached),
) -> Result<(), TransactionError> {
    let store = gate.store();
    let path = found.scope();
    let place = store.path_after(path);
    found.refuse_changes()?;
    quiesce(gate, path, Pending::Discard, |_| {
        match found.decide(id) {
            // It was applied in the background meanwhile.
            Err(CommitError::Stage(StageError::NoTransaction))
                if store.committed(&place)? == Some(id) => {}
            commit => commit?.apply()?,
        }
        end_part(gate, Step::Applied, path, Some(id));
        Ok(())
    })?;
    forget_names(gate, &[&place, path], forget);
    Ok(())
}

/// For the end of a mount: transactions that are open are undone, those that are prepared wait for the next
/// mount, without what was written after.
pub(crate) fn leave(gate: &TransactionGate) {
    for found in gate.store().open_transactions() {
        let left = match found.look_again() {
            Some(Found::Open(_)) => abort(gate, found.scope(), LAST_PATIENCE, &|_| {}),
            Some(prepared @ Found::Prepared(_)) => discard_pending(gate, &prepared),
            Some(Found::Decided(_)) => apply_commit(gate, found.scope()),
            None => Ok(()),
        };
        if let Err(error) = left {
            tracing::warn!(%error, scope = %shown_scope(found.scope()), "a transaction is left to the next mount");
        }
    }
}

/// Drops what was written in the scope of a transaction since it was prepared.
fn discard_pending(
    gate: &TransactionGate,
    prepared: &Found<'_, DirBacking>,
) -> Result<(), TransactionError> {
    prepared.refuse_changes()?;
    quiesce(gate, prepared.scope(), Pending::Discard, |_| Ok(()))
}

/// Once nothing waits for what [`leave`] could not apply: what was written after it stays in the arena for the next
/// mount, which applies it first.
pub(crate) fn give_up(gate: &TransactionGate) {
    for found in gate.store().open_transactions() {
        if let Found::Decided(_) = found
            && let Err(error) = found.refuse_changes()
        {
            tracing::warn!(%error, scope = %shown_scope(found.scope()), "changes may wait for a commit");
        }
    }
}

/// Has changes in every transaction fail: none of them can end here any more.
pub(crate) fn give_up_all(gate: &TransactionGate) {
    for found in gate.store().open_transactions() {
        if let Err(error) = found.refuse_changes() {
            tracing::warn!(%error, scope = %shown_scope(found.scope()), "changes of a transaction go on");
        }
    }
}

/// Why the mount must not be unmounted. Decided commits are applied first.
pub(crate) fn in_the_way(gate: &TransactionGate) -> Option<String> {
    let mut begun_here = gate.store().open_transactions();
    begun_here.retain(|found| !found.is_recovered());
    let undecided = begun_here.iter().find_map(|found| {
        let scope = shown_scope(&found.path_now());
        match found {
            Found::Prepared(prepared) => Some(format!(
                "a transaction in {scope} is prepared with id {}: firn commit or firn abort it, or --force leaves it to the next mount, without what was written since",
                prepared.id()
            )),
            Found::Open(_) => Some(format!(
                "a transaction is open in {scope}: firn commit or firn abort it, or --force undoes it"
            )),
            Found::Decided(_) => None,
        }
    });
    undecided.or_else(|| {
        begun_here.iter().find_map(|found| {
            let error = apply_commit(gate, found.scope()).err()?;
            let scope = shown_scope(&found.path_now());
            Some(format!(
                "the commit of a transaction in {scope} cannot be applied: {error}; mend the backing and try again, or --force leaves it to the next mount"
            ))
        })
    })
}

/// For the status.
pub(crate) fn status(gate: &Arc<TransactionGate>, owners: &Owners) -> Vec<TransactionStatus> {
    let word = |stage| match stage {
        Stage::Open | Stage::Ended => ("open", None),
        Stage::Prepared(id) => ("prepared", Some(id)),
        Stage::Decided(id) => ("decided", Some(id)),
    };
    let pending = |scope: &[u8]| -> u64 {
        let files = gate.engine().files_below(scope);
        files.iter().map(|file| file.held_bytes).sum()
    };
    let one = |found: firn_transact::Transaction| TransactionStatus {
        owner: owners.status(&found.scope).0,
        age_s: owners.status(&found.scope).1,
        bytes: found.written_bytes + pending(&found.path_now),
        scope: found.path_now.as_slice().into(),
        stage: word(found.stage).0.into(),
        id: word(found.stage).1,
        objects: found.objects,
        states: found
            .states
            .iter()
            .map(|(state, count)| (state.to_string(), *count))
            .collect(),
        recovered: found.is_recovered,
        here: match found.stage {
            Stage::Prepared(id) => here(gate, id, &found.scope),
            _ => Vec::new(),
        },
        error: found.trouble,
        backup: found.backup.map(crate::backup::status),
    };
    let transactions = gate.store().transactions();
    transactions.into_iter().map(one).collect()
}

/// The hosts that have come to the meeting about a transaction, as far as the backing says so at once: the status does
/// not wait for one that hangs.
fn here(gate: &Arc<TransactionGate>, id: u64, scope: &[u8]) -> Vec<String> {
    /// A look at a directory takes a millisecond where a server answers.
    const PATIENCE: Duration = Duration::from_millis(50);
    /// Of one that hangs no more threads ask.
    static ASKING: AtomicUsize = AtomicUsize::new(0);
    const ASKING_MAX: usize = 4;
    if gate.store().members().is_none() {
        return Vec::new();
    }
    if ASKING.fetch_add(1, Ordering::AcqRel) >= ASKING_MAX {
        ASKING.fetch_sub(1, Ordering::AcqRel);
        return Vec::new();
    }
    let (tell, told) = mpsc::channel();
    let gate = Arc::clone(gate);
    let scope = scope.to_owned();
    let asked = std::thread::Builder::new()
        .name("firn-hosts".into())
        .spawn(move || {
            let hosts = gate.store().hosts_published(id, &scope);
            let _ = tell.send(hosts.unwrap_or_default());
            ASKING.fetch_sub(1, Ordering::AcqRel);
        });
    if asked.is_err() {
        ASKING.fetch_sub(1, Ordering::AcqRel);
    }
    told.recv_timeout(PATIENCE).unwrap_or_default()
}

/// The answer to a request that failed: its errno is what `firn.h` says of that failure.
fn refused(error: &TransactionError, path: &BytePath) -> Reply {
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
        TransactionError::Restore(error) => return refused(&error.clone().into(), path),
        TransactionError::Revive(_) => (libc::EIO, format!("{scope}: {error}")),
        TransactionError::Backup(error) | TransactionError::Abort(AbortError::Backup(error)) => {
            refuse_backup(error, &scope)
        }
        TransactionError::Store(error) | TransactionError::Abort(AbortError::Store(error)) => {
            refuse_store(error, &scope)
        }
    };
    Reply::Error { errno, message }
}

/// An errno, and a sentence that says what to do.
type Refused = (i32, String);

fn refuse_scope(error: &ScopeError, scope: &str) -> Refused {
    match error {
        ScopeError::NotTransactional => (libc::EOPNOTSUPP, error.to_string()),
        ScopeError::Missing => (libc::ENOENT, format!("{scope}: {error}")),
        ScopeError::NotDirectory => (libc::ENOTDIR, format!("{scope}: {error}")),
    }
}

fn refuse_stage(error: &StageError, scope: &str) -> Refused {
    match error {
        StageError::NoTransaction => (
            libc::ENOENT,
            format!("no transaction is open in {scope}: firn begin opens one"),
        ),
        StageError::Undoing | StageError::Decided { .. } => (libc::EBUSY, error.to_string()),
        StageError::OtherId { .. } => (libc::EINVAL, error.to_string()),
    }
}

fn refuse_begin(error: &BeginError, scope: &str) -> Refused {
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

fn refuse_vote(error: &VoteError, scope: &str) -> Refused {
    match error {
        VoteError::Stage(error) => refuse_stage(error, scope),
        VoteError::NotVoted { .. } => (libc::EINVAL, error.to_string()),
        VoteError::LastVoteNotOver { .. } => (
            libc::EBUSY,
            format!("{scope}: {error}: firn abort it there"),
        ),
        VoteError::GivenUp { .. } => (
            libc::ECANCELED,
            format!("{scope}: {error}; the transaction is kept: firn abort drops it"),
        ),
        VoteError::Conflict(report) => (
            libc::ECANCELED,
            participants::describe_conflict(report, scope),
        ),
        VoteError::Published { .. } => (libc::EIO, error.to_string()),
        VoteError::Store(error) => refuse_store(error, scope),
    }
}

fn refuse_backup(error: &BackupError, scope: &str) -> Refused {
    match error {
        BackupError::Refused { source } => (
            errno_of_backing(*source),
            format!(
                "{scope}: the backup reports: {source}; the transaction is as it was: mend it and try again, or abort"
            ),
        ),
        BackupError::NotRemoved { source } => (
            errno_of_backing(*source),
            format!(
                "{scope}: {error}; until it can the transaction stays as it is: mend it and try again"
            ),
        ),
        BackupError::NoPath { .. } | BackupError::UnknownTransaction { .. } => {
            (libc::EIO, format!("{scope}: {error}"))
        }
        BackupError::Own(error) => refuse_own(error, scope),
        BackupError::Store(error) => refuse_store(error, scope),
    }
}

fn refuse_store(error: &StoreError, scope: &str) -> Refused {
    match error {
        StoreError::Own(error) => refuse_own(error, scope),
        StoreError::Record { .. } => (libc::EIO, error.to_string()),
    }
}

fn refuse_own(error: &OwnError, scope: &str) -> Refused {
    match error {
        OwnError::Backing(errno) => (
            errno_of_backing(*errno),
            format!(
                "{scope}: the backing reports: {errno}; the transaction is kept: mend it and try again"
            ),
        ),
        OwnError::Distrusted { .. } => (libc::EPERM, format!("{scope}: {error}")),
        OwnError::TooLong { .. } => (libc::EFBIG, format!("{scope}: {error}")),
    }
}

/// The errno that a failure of the backing is reported with. Numbers that have a meaning in `firn.h` ("Errors") are not
/// passed on: a caller would take them for that.
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

    fn told(error: &TransactionError) -> (i32, String) {
        match refused(error, &"job".into()) {
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
                let (number, message) = told(&error);
                assert_eq!(number, libc::EIO, "{message}");
                assert!(message.contains(&errno.to_string()), "{message}");
                assert!(
                    !message.contains("drain=commit") && !message.contains("no such directory"),
                    "{message}"
                );
            }
        }
        assert_eq!(told(&TransactionError::from(Errno::NOSPC)).0, libc::ENOSPC);
    }

    #[test]
    fn what_is_wrong_with_the_scope_has_its_own_number_and_advice() {
        let (number, message) = told(&ScopeError::NotTransactional.into());
        assert_eq!(
            (number, message.contains("drain=commit")),
            (libc::EOPNOTSUPP, true),
            "{message}"
        );
        let (number, message) = told(&ScopeError::Missing.into());
        assert_eq!(
            (number, message.contains("no such directory")),
            (libc::ENOENT, true),
            "{message}"
        );
        assert_eq!(told(&ScopeError::NotDirectory.into()).0, libc::ENOTDIR);
    }
}
