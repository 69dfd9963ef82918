//! Transactions of a mount: what the control socket asks for.
//!
//! The gate keeps the scope quiet ([`TransactionGate::quiesce`]) while the store takes a transaction from one state to
//! the next. The state is that of a handle ([`Found`]), looked for when a request begins.

mod answer;
mod last;
mod refusal;
mod status;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use firn_backing::Caller;
use firn_engine::Cached;
use firn_format::durability::DurabilityLevel;
use firn_format::tally::Tally;
use firn_protocol::Reply;
use firn_transact::{
    AbortError, BeginError, CommitError, Decided, Found, Mode, StageError, TopMaker,
    TransactionError, parent_of,
};
use rustix::fs::{Access, AtFlags, CWD, accessat};

use self::refusal::{refuse_to_make, refused};
use crate::gate::{Pending, ScopeRoot, TransactionGate};
use crate::owners::ControlPeer;
use crate::participants::{self, patiently};
use crate::store::{LoggableStore, shown_scope};

pub(crate) use self::answer::{RequestContext, answer_owned, answer_without};
pub(crate) use self::last::{give_up, give_up_all, in_the_way, leave};
pub(crate) use self::status::status;

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
fn current<'a>(gate: &'a TransactionGate, path: &[u8]) -> Option<Found<'a, LoggableStore>> {
    gate.store().current_transaction(path)
}

/// The transaction of a scope that was begun first.
fn first<'a>(gate: &'a TransactionGate, path: &[u8]) -> Option<Found<'a, LoggableStore>> {
    gate.store().first_transaction(path)
}

/// The commit of a scope that is decided and not applied to its end.
fn decided<'a>(gate: &'a TransactionGate, path: &[u8]) -> Option<Decided<'a, LoggableStore>> {
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

/// Whether the transaction is open; `None`: there is none.
pub(crate) fn is_open(gate: &TransactionGate, path: &[u8]) -> Option<bool> {
    Some(current(gate, path)?.is_open())
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
    found: &Found<'_, LoggableStore>,
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
