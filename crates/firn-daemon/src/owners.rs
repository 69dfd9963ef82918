//! The owners of this mount's transactions: when an owner ends, its open transaction is aborted.
//!
//! A transaction belongs to a connection of the control socket or to a process, or it has no owner. One thread waits
//! for the end of all owners. When the owner of an open transaction is gone, the transaction is aborted at once. A
//! transaction that is prepared (complete, but without a decision) or decided remains as it is; both are *settled*
//! below.
//!
//! ```text
//!            begin          owner gone, no request under way
//! (none) ───────────► open ─────────────────────────────────► aborting ──► (none)
//!                     │  ▲                                        │ the backing refused: tried again
//!             prepare │  │ the vote failed                        └───────────────────────────────►
//!                     ▼  │
//!                   settled ──► (none)
//! ```
//!
//! Invariants
//! * A transaction is aborted for the end of its owner only while no request about it is in progress. No request begins
//!   during the abort.
//! * A request about an open transaction that begins after the owner's end finds the transaction aborted. So changes of
//!   a dead owner that were not prepared are never committed.
//! * A process is identified by a pidfd and its start time, never by its number alone.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use firn_format::live::TransactionOwner;
use firn_protocol::{Owner, OwnerStatus};
use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Seconds until a failed abort is tried again.
const RETRY_SECONDS: i64 = 1;

/// A connection of the control socket, as an owner.
#[derive(Clone, Debug)]
pub(crate) struct ControlPeer {
    pub(crate) stream: Arc<UnixStream>,
    /// Number of the process that connected; 0 if it is in a PID namespace that firnd does not see.
    pub(crate) pid: u32,
    /// Effective user and group of that process.
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// Why a transaction was aborted without a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AbortCause {
    /// The owner, which the text describes, had ended.
    OwnerGone(String),
    /// The transaction could not continue without the firnd that died.
    FirndDied,
}

/// Why a request about a transaction is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RequestRefusal {
    /// The owner was gone, so the transaction was aborted.
    Aborted {
        /// Description of the owner.
        owner: String,
    },
    /// The owner is gone, but the abort has failed so far.
    NotAborted { owner: String, error: String },
}

/// An owner with a watched end.
#[derive(Debug)]
enum WatchedOwner {
    Connection {
        peer: ControlPeer,
        /// The process that connected. It is watched too, because a child of it may keep the socket open.
        process: Option<OwnedFd>,
    },
    Process {
        pid: u32,
        process: OwnedFd,
    },
    /// The owner had ended when this firnd began. 0 stands for an unknown process.
    Gone {
        pid: u32,
    },
}

impl WatchedOwner {
    fn from_connection(peer: &ControlPeer) -> Self {
        Self::Connection {
            peer: peer.clone(),
            process: open_process(peer.pid).ok(),
        }
    }

    /// Watches the process with this number and start time. Fails with ESRCH if the process has ended, or if its number
    /// belongs to another process by now.
    fn from_process(pid: u32, start_ticks: u64) -> Result<Self, Errno> {
        let process = open_process(pid)?;
        // The start time is read after the descriptor was opened. If it is the expected one, the descriptor belongs to
        // the right process.
        if firn_client::start_ticks_of(pid).is_ok_and(|ticks| ticks == start_ticks) {
            Ok(Self::Process { pid, process })
        } else {
            Err(Errno::SRCH)
        }
    }

    /// Returns the descriptors to poll for the end of the owner, each with the event that reports the end.
    fn poll_fds(&self) -> Vec<PollFd<'_>> {
        let poll_process = |process| PollFd::new(process, PollFlags::IN);
        match self {
            Self::Connection { peer, process } => {
                let mut fds = vec![PollFd::new(&peer.stream, PollFlags::RDHUP)];
                fds.extend(process.as_ref().map(poll_process));
                fds
            }
            Self::Process { process, .. } => vec![poll_process(process)],
            Self::Gone { .. } => Vec::new(),
        }
    }

    /// Returns the owner as the next firnd can identify it. A connection ends with this firnd, so its process is stored
    /// instead.
    fn to_stored(&self) -> TransactionOwner {
        let pid = self.status().pid;
        match firn_client::start_ticks_of(pid) {
            Ok(start_ticks) if pid != 0 => TransactionOwner::Process { pid, start_ticks },
            _ => TransactionOwner::Connection,
        }
    }

    /// Returns the owner that an earlier firnd has stored; `None` if the transaction has no owner.
    fn from_stored(owner: TransactionOwner) -> Option<Self> {
        match owner {
            TransactionOwner::Unowned => None,
            TransactionOwner::Connection => Some(Self::Gone { pid: 0 }),
            TransactionOwner::Process { pid, start_ticks } => {
                Some(Self::from_process(pid, start_ticks).unwrap_or(Self::Gone { pid }))
            }
        }
    }

    /// Returns whether the owner has ended; the call does not wait.
    fn is_gone(&self) -> bool {
        if let Self::Gone { .. } = self {
            return true;
        }
        let no_wait = Timespec::default();
        poll(&mut self.poll_fds(), Some(&no_wait)).is_ok_and(|ready| ready > 0)
    }

    fn status(&self) -> OwnerStatus {
        match self {
            Self::Connection { peer, .. } => OwnerStatus {
                pid: peer.pid,
                connection: true,
            },
            Self::Process { pid, .. } | Self::Gone { pid } => OwnerStatus {
                pid: *pid,
                connection: false,
            },
        }
    }

    fn describe(&self) -> String {
        match self {
            Self::Connection { peer, .. } => format!("the connection of process {}", peer.pid),
            Self::Process { pid, .. } | Self::Gone { pid } => format!("process {pid}"),
        }
    }
}

/// Opens a pidfd of a process. Fails with ESRCH if there is no such process.
fn open_process(pid: u32) -> Result<OwnedFd, Errno> {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return Err(Errno::SRCH);
    };
    pidfd_open(pid, PidfdFlags::empty())
}

/// The transaction of a scope, and its owner.
#[derive(Debug)]
struct OwnedTransaction {
    owner: Option<Arc<WatchedOwner>>,
    began: Instant,
    /// The transaction is not prepared yet.
    is_open: bool,
    is_gone: bool,
    is_aborting: bool,
    /// Why the last attempt to abort it failed.
    abort_error: Option<String>,
}

impl OwnedTransaction {
    fn new(owner: Option<Arc<WatchedOwner>>) -> Self {
        Self {
            owner,
            began: Instant::now(),
            is_open: true,
            is_gone: false,
            is_aborting: false,
            abort_error: None,
        }
    }

    /// Returns whether the owner is gone and the transaction is to be aborted.
    fn is_orphan(&mut self) -> bool {
        if let Some(owner) = &self.owner {
            self.is_gone = self.is_gone || owner.is_gone();
        }
        self.is_open && self.is_gone
    }

    /// Returns whether a request about the transaction may begin. `has_other_request` says whether another one is in
    /// progress; while it runs, the thread does not abort the transaction.
    fn request_access(&mut self, has_other_request: bool) -> RequestAccess {
        let is_orphan = self.is_orphan() && !has_other_request;
        if self.is_aborting {
            return RequestAccess::AwaitAbort;
        }
        match (is_orphan, &self.abort_error) {
            (false, _) => RequestAccess::Allowed,
            (true, Some(error)) => RequestAccess::AbortFailed(error.clone()),
            (true, None) => RequestAccess::AwaitAbort,
        }
    }

    /// Describes the owner for a message; empty if there is none.
    fn describe_owner(&self) -> String {
        match &self.owner {
            Some(owner) => owner.describe(),
            None => String::new(),
        }
    }
}

/// Whether a request about an owned transaction may begin.
enum RequestAccess {
    Allowed,
    /// The transaction is being aborted, or will be, because its owner is gone.
    AwaitAbort,
    /// The owner is gone, and the last attempt to abort the transaction has failed with this error.
    AbortFailed(String),
}

#[derive(Debug, Default)]
struct OwnerTable {
    owned: HashMap<Vec<u8>, OwnedTransaction>,
    /// Number of requests in progress, by scope.
    requests: HashMap<Vec<u8>, u32>,
    /// Why the last transaction of a scope was aborted without a request.
    aborted: HashMap<Vec<u8>, AbortCause>,
    is_stopped: bool,
}

/// The owners of all transactions of a mount.
#[derive(Debug)]
pub(crate) struct Owners {
    table: Mutex<OwnerTable>,
    changed: Condvar,
    /// An eventfd that wakes the thread which watches the owners.
    wake: OwnedFd,
}

/// The transactions of the mount, as the thread uses them.
pub(crate) trait ScopeActions {
    /// Returns whether the transaction of a scope is open; `None` if there is no transaction.
    fn is_open(&self, scope: &[u8]) -> Option<bool>;
    /// Aborts the transaction of a scope. The error is a text.
    fn abort(&self, scope: &[u8]) -> Result<(), String>;
}

impl Owners {
    pub(crate) fn new() -> Result<Self, Errno> {
        Ok(Self {
            table: Mutex::default(),
            changed: Condvar::new(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Watches the owner of a transaction of an earlier firnd. If the owner has ended meanwhile, the thread finds out.
    pub(crate) fn resume(&self, scope: &[u8], owner: TransactionOwner, is_open: bool) {
        let owned = OwnedTransaction {
            is_open,
            ..OwnedTransaction::new(WatchedOwner::from_stored(owner).map(Arc::new))
        };
        self.table.lock().owned.insert(scope.to_vec(), owned);
    }

    /// Returns the owner of a scope's transaction, as the next firnd can identify it.
    pub(crate) fn stored_owner(&self, scope: &[u8]) -> TransactionOwner {
        let owner = {
            let table = self.table.lock();
            table.owned.get(scope).and_then(|owned| owned.owner.clone())
        };
        owner.map_or(TransactionOwner::Unowned, |owner| owner.to_stored())
    }

    /// Begins a request about the transaction that covers the path `scope`. Until the returned guard is dropped, the
    /// transaction is not aborted, even if its owner ends: the connection or process for which it was begun.
    ///
    /// Fails if the owner of an open transaction has ended already: the transaction was aborted, or cannot be aborted
    /// yet. Waits for an abort that is in progress.
    pub(crate) fn begin_request(&self, scope: &[u8]) -> Result<RequestGuard<'_>, RequestRefusal> {
        let mut table = self.table.lock();
        loop {
            let request_count = table.requests.get(scope).copied().unwrap_or_default();
            let Some(owned) = table.owned.get_mut(scope) else {
                break;
            };
            let has_other_request = request_count > 0;
            let access = owned.request_access(has_other_request);
            if matches!(access, RequestAccess::Allowed) {
                break;
            }
            let owner = owned.describe_owner();
            if let RequestAccess::AbortFailed(error) = access {
                return Err(RequestRefusal::NotAborted { owner, error });
            }
            // The thread aborts the transaction, and then notifies this one.
            self.wake();
            self.changed.wait(&mut table);
            // An aborted transaction has no entry any more. If the entry is still there, its new state is read.
            if !table.owned.contains_key(scope) {
                return Err(RequestRefusal::Aborted { owner });
            }
        }
        *table.requests.entry(scope.to_owned()).or_default() += 1;
        Ok(RequestGuard {
            owners: self,
            scope: scope.to_owned(),
            state_after: None,
        })
    }

    /// Records that a transaction of an earlier firnd was undone.
    pub(crate) fn record_undone(&self, scope: &[u8]) {
        let mut table = self.table.lock();
        table.aborted.insert(scope.to_vec(), AbortCause::FirndDied);
    }

    /// Returns why the last transaction of a scope was aborted without a request. `None` if it was not, or if another
    /// one was begun since.
    pub(crate) fn abort_cause(&self, scope: &[u8]) -> Option<AbortCause> {
        self.table.lock().aborted.get(scope).cloned()
    }

    /// Returns the owner of a scope's transaction for the status; `None` if it has no owner.
    pub(crate) fn owner_status(&self, scope: &[u8]) -> Option<OwnerStatus> {
        let table = self.table.lock();
        let owner = table.owned.get(scope)?.owner.as_ref()?;
        Some(owner.status())
    }

    /// Returns the age of a scope's transaction in seconds; `None` if no request has begun it.
    pub(crate) fn age_seconds(&self, scope: &[u8]) -> Option<f64> {
        let table = self.table.lock();
        Some(table.owned.get(scope)?.began.elapsed().as_secs_f64())
    }

    /// Returns whether a connection owns a transaction that would be aborted at the end of the connection.
    pub(crate) fn owns_open_transaction(&self, stream: &Arc<UnixStream>) -> bool {
        let is_owner = |owned: &OwnedTransaction| match owned.owner.as_deref() {
            Some(WatchedOwner::Connection { peer, .. }) => {
                owned.is_open && Arc::ptr_eq(&peer.stream, stream)
            }
            _ => false,
        };
        self.table.lock().owned.values().any(is_owner)
    }

    /// Stops the thread: from now on nothing is aborted, because the mount ends.
    pub(crate) fn stop(&self) {
        self.table.lock().is_stopped = true;
        self.wake();
    }

    fn wake(&self) {
        // The write fails only if the counter of the eventfd is full. The thread wakes then anyway.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Aborts transactions after their owners have ended, until [`Owners::stop`]. No lock is held while `actions` is
    /// called.
    pub(crate) fn watch(&self, actions: &dyn ScopeActions) {
        loop {
            let mut table = self.table.lock();
            if table.is_stopped {
                return;
            }
            let orphans = table.mark_orphans();
            let living_owners = table.living_owners();
            // An abort takes long, and requests need the lock.
            drop(table);
            let has_failed_abort = self.abort_orphans(actions, &orphans);
            if orphans.is_empty() || has_failed_abort {
                self.wait_for_end_events(&living_owners, has_failed_abort);
            }
        }
    }

    /// Aborts the open transactions of `orphans`: scopes (paths that a transaction covers) without a living owner.
    /// Returns whether one of them could not be aborted; the caller tries again later. No request about them begins
    /// meanwhile.
    fn abort_orphans(&self, actions: &dyn ScopeActions, orphans: &[Vec<u8>]) -> bool {
        let mut has_failed_abort = false;
        for scope in orphans {
            let state_before = TransactionState::from_is_open(actions.is_open(scope));
            let abort_result = match state_before {
                TransactionState::Open => actions.abort(scope),
                TransactionState::NoTransaction | TransactionState::Settled => Ok(()),
            };
            // The abort may fail after it has removed the transaction, and a prepared transaction is left as it is.
            let state_after = TransactionState::from_is_open(actions.is_open(scope));
            let mut table = self.table.lock();
            if abort_result.is_ok() && state_after == TransactionState::NoTransaction {
                table.record_abort(scope);
            } else {
                // The abort has failed, and is tried again while the transaction is open; or the transaction was
                // prepared meanwhile and stays.
                let owned = table
                    .owned
                    .get_mut(scope)
                    .expect("only ended by this thread");
                owned.is_aborting = false;
                owned.is_open = state_after == TransactionState::Open;
                owned.abort_error = abort_result.err();
                has_failed_abort |= owned.is_open;
            }
            self.changed.notify_all();
        }
        has_failed_abort
    }

    /// Sleeps until an owner ends or the thread is woken, and with `has_failed_abort` for at most [`RETRY_SECONDS`].
    fn wait_for_end_events(&self, owners: &[Arc<WatchedOwner>], has_failed_abort: bool) {
        let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN)];
        for owner in owners {
            fds.extend(owner.poll_fds());
        }
        let retry = Timespec {
            tv_sec: RETRY_SECONDS,
            tv_nsec: 0,
        };
        let _ = poll(&mut fds, has_failed_abort.then_some(&retry));
        // The read sets the counter of the eventfd to 0, so that the next wake is noticed.
        let mut wake_count = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut wake_count);
    }
}

impl OwnerTable {
    /// Records the state of a scope's transaction after a request.
    fn set_state(&mut self, scope: &[u8], state: TransactionState) {
        let is_open = match state {
            TransactionState::NoTransaction => {
                self.owned.remove(scope);
                return;
            }
            TransactionState::Open => true,
            TransactionState::Settled => false,
        };
        if let Some(owned) = self.owned.get_mut(scope) {
            owned.is_open = is_open;
        }
    }

    /// Returns the living owners of open transactions, which the thread watches.
    fn living_owners(&self) -> Vec<Arc<WatchedOwner>> {
        let mut owners = Vec::new();
        for owned in self.owned.values() {
            if owned.is_open && !owned.is_gone {
                owners.extend(owned.owner.clone());
            }
        }
        owners
    }

    /// Marks the transactions that are to be aborted now, and returns their scopes.
    fn mark_orphans(&mut self) -> Vec<Vec<u8>> {
        let Self {
            owned, requests, ..
        } = self;
        let mut orphans = Vec::new();
        for (scope, owned) in owned {
            if owned.is_orphan() && !requests.contains_key(scope) {
                owned.is_aborting = true;
                orphans.push(scope.clone());
            }
        }
        orphans
    }

    /// Removes an aborted transaction, and records why it was aborted.
    fn record_abort(&mut self, scope: &[u8]) {
        let owned = self.owned.remove(scope);
        if let Some(owner) = owned.and_then(|owned| owned.owner) {
            let cause = AbortCause::OwnerGone(owner.describe());
            self.aborted.insert(scope.to_owned(), cause);
        }
    }
}

/// The state of the transaction of a scope.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TransactionState {
    NoTransaction,
    Open,
    /// The transaction is prepared or decided.
    Settled,
}

impl TransactionState {
    /// Converts from whether the transaction is open; `None` means that there is no transaction.
    fn from_is_open(is_open: Option<bool>) -> Self {
        match is_open {
            None => Self::NoTransaction,
            Some(true) => Self::Open,
            Some(false) => Self::Settled,
        }
    }
}

/// A request in progress about the transaction of a scope. Its drop ends the request.
pub(crate) struct RequestGuard<'a> {
    owners: &'a Owners,
    scope: Vec<u8>,
    /// The state of the transaction after the request; `None` if [`RequestGuard::finish`] was not called.
    state_after: Option<TransactionState>,
}

impl RequestGuard<'_> {
    /// Returns the owner that a begin request names. Fails with ESRCH if that process is not running.
    pub(crate) fn find_owner(owner: Owner, peer: &ControlPeer) -> Result<LookedUpOwner, Errno> {
        Ok(LookedUpOwner(match owner {
            Owner::None => None,
            Owner::Connection => Some(Arc::new(WatchedOwner::from_connection(peer))),
            Owner::Process { pid, start_ticks } => {
                Some(Arc::new(WatchedOwner::from_process(pid, start_ticks)?))
            }
        }))
    }

    /// Records that a transaction was begun for this owner.
    pub(crate) fn record_begin(&self, owner: LookedUpOwner) {
        let mut table = self.owners.table.lock();
        table.aborted.remove(&self.scope);
        table
            .owned
            .insert(self.scope.clone(), OwnedTransaction::new(owner.0));
    }

    /// Records that the transaction was committed, and the next one begun for the same owner. The scope of the next one
    /// is `next_scope`, because its top may have been renamed.
    pub(crate) fn record_next_begin(&self, next_scope: &[u8]) {
        let mut table = self.owners.table.lock();
        let owner = match table.owned.remove(&self.scope) {
            Some(committed) => committed.owner,
            None => None,
        };
        table.aborted.remove(next_scope);
        table
            .owned
            .insert(next_scope.to_vec(), OwnedTransaction::new(owner));
    }

    /// Ends the request. `is_open` says whether the transaction is open now; `None` means that there is no transaction.
    pub(crate) fn finish(mut self, is_open: Option<bool>) {
        self.state_after = Some(TransactionState::from_is_open(is_open));
    }
}

impl Drop for RequestGuard<'_> {
    fn drop(&mut self) {
        let mut table = self.owners.table.lock();
        if let Some(state_after) = self.state_after {
            table.set_state(&self.scope, state_after);
        }
        if let Some(request_count) = table.requests.get_mut(&self.scope) {
            *request_count -= 1;
            if *request_count == 0 {
                table.requests.remove(&self.scope);
            }
        }
        self.owners.wake();
    }
}

/// An owner that was running when it was looked up.
pub(crate) struct LookedUpOwner(Option<Arc<WatchedOwner>>);
