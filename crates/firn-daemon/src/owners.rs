//! The owners of this mount's transactions.
//!
//! A transaction belongs to a connection of the control socket or to a process, or it has no owner. One thread waits
//! for the end of all owners. When the owner of an open transaction is gone, the transaction is aborted at once. A
//! prepared or decided transaction remains as it is.
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
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
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
const RETRY_S: i64 = 1;

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
pub(crate) enum Refusal {
    /// The owner was gone, so the transaction was aborted.
    Aborted {
        /// Description of the owner.
        owner: String,
    },
    /// The owner is gone, but the abort has failed so far.
    NotAborted { owner: String, error: String },
}

/// An owner whose end is watched.
#[derive(Debug)]
enum Watched {
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

impl Watched {
    fn of_connection(peer: &ControlPeer) -> Self {
        Self::Connection {
            peer: peer.clone(),
            process: open_process(peer.pid).ok(),
        }
    }

    /// Watches a process. ESRCH means that the process has ended, or that its number belongs to another process by now.
    fn of_process(pid: u32, start_ticks: u64) -> Result<Self, Errno> {
        let process = open_process(pid)?;
        // The start time is read after the descriptor was opened. If it is the expected one, the descriptor belongs to
        // the right process.
        match firn_client::start_ticks_of(pid) {
            Ok(found) if found == start_ticks => Ok(Self::Process { pid, process }),
            _ => Err(Errno::SRCH),
        }
    }

    /// Returns descriptors, and the event on each of them that reports the end of the owner.
    fn ends(&self) -> Vec<(BorrowedFd<'_>, PollFlags)> {
        match self {
            Self::Connection { peer, process } => {
                let mut ends = vec![(peer.stream.as_fd(), PollFlags::RDHUP)];
                ends.extend(
                    process
                        .iter()
                        .map(|process| (process.as_fd(), PollFlags::IN)),
                );
                ends
            }
            Self::Process { process, .. } => vec![(process.as_fd(), PollFlags::IN)],
            Self::Gone { .. } => Vec::new(),
        }
    }

    /// Returns the owner as the next firnd can identify it. A connection ends with this firnd, so its process is stored
    /// instead.
    fn stored(&self) -> TransactionOwner {
        let pid = self.status().pid;
        match firn_client::start_ticks_of(pid) {
            Ok(start_ticks) if pid != 0 => TransactionOwner::Process { pid, start_ticks },
            _ => TransactionOwner::Connection,
        }
    }

    fn of_stored(owner: TransactionOwner) -> Option<Self> {
        match owner {
            TransactionOwner::Unowned => None,
            TransactionOwner::Connection => Some(Self::Gone { pid: 0 }),
            TransactionOwner::Process { pid, start_ticks } => {
                Some(Self::of_process(pid, start_ticks).unwrap_or(Self::Gone { pid }))
            }
        }
    }

    fn is_gone(&self) -> bool {
        if let Self::Gone { .. } = self {
            return true;
        }
        let mut fds: Vec<PollFd<'_>> = self
            .ends()
            .into_iter()
            .map(|(fd, event)| PollFd::from_borrowed_fd(fd, event))
            .collect();
        let now = Timespec::default();
        poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
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

    fn in_words(&self) -> String {
        match self {
            Self::Connection { peer, .. } => format!("the connection of process {}", peer.pid),
            Self::Process { pid, .. } | Self::Gone { pid } => format!("process {pid}"),
        }
    }
}

fn open_process(pid: u32) -> Result<OwnedFd, Errno> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pidfd_open(pid.ok_or(Errno::SRCH)?, PidfdFlags::empty())
}

/// The transaction of a scope, and its owner.
#[derive(Debug)]
struct Owned {
    owner: Option<Arc<Watched>>,
    began: Instant,
    /// The transaction is not prepared yet.
    is_open: bool,
    is_gone: bool,
    is_aborting: bool,
    /// Why the last attempt to abort it failed.
    trouble: Option<String>,
}

impl Owned {
    fn new(owner: Option<Arc<Watched>>) -> Self {
        Self {
            owner,
            began: Instant::now(),
            is_open: true,
            is_gone: false,
            is_aborting: false,
            trouble: None,
        }
    }

    /// Returns whether the owner is gone and the transaction is to be aborted.
    fn is_orphan(&mut self) -> bool {
        if let Some(owner) = &self.owner {
            self.is_gone = self.is_gone || owner.is_gone();
        }
        self.is_open && self.is_gone
    }
}

#[derive(Debug, Default)]
struct Table {
    owned: HashMap<Vec<u8>, Owned>,
    /// Number of requests in progress, by scope.
    requests: HashMap<Vec<u8>, u32>,
    /// Why the last transaction of a scope was aborted without a request.
    aborted: HashMap<Vec<u8>, AbortCause>,
    is_stopped: bool,
}

/// The owners of all transactions of a mount.
#[derive(Debug)]
pub(crate) struct Owners {
    table: Mutex<Table>,
    changed: Condvar,
    /// An eventfd that wakes the thread which watches the owners.
    wake: OwnedFd,
}

/// The transactions of the mount, as the thread uses them.
pub(crate) trait Scopes {
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
        let owned = Owned {
            is_open,
            ..Owned::new(Watched::of_stored(owner).map(Arc::new))
        };
        self.table.lock().owned.insert(scope.to_vec(), owned);
    }

    /// Returns the owner of a scope's transaction, as the next firnd can identify it.
    pub(crate) fn stored_owner(&self, scope: &[u8]) -> TransactionOwner {
        let owner = {
            let table = self.table.lock();
            table.owned.get(scope).and_then(|owned| owned.owner.clone())
        };
        owner.map_or(TransactionOwner::Unowned, |owner| owner.stored())
    }

    /// Begins a request about the transaction of a scope; dropping the returned value ends it. Waits for an abort that
    /// is in progress. Fails if the owner is gone and its open transaction was aborted, or must be.
    pub(crate) fn enter(&self, scope: &[u8]) -> Result<Request<'_>, Refusal> {
        let mut table = self.table.lock();
        loop {
            let requests = table.requests.get(scope).copied().unwrap_or_default();
            let Some(owned) = table.owned.get_mut(scope) else {
                break;
            };
            let is_orphan = owned.is_orphan() && requests == 0;
            if !owned.is_aborting && !is_orphan {
                break;
            }
            let owner = owned.owner.as_ref().map(|owner| owner.in_words());
            let owner = owner.unwrap_or_default();
            if let (Some(error), false) = (&owned.trouble, owned.is_aborting) {
                let error = error.clone();
                return Err(Refusal::NotAborted { owner, error });
            }
            self.wake();
            self.changed.wait(&mut table);
            if !table.owned.contains_key(scope) {
                return Err(Refusal::Aborted { owner });
            }
        }
        *table.requests.entry(scope.to_owned()).or_default() += 1;
        Ok(Request {
            owners: self,
            scope: scope.to_owned(),
            is_open: None,
        })
    }

    /// Records that a transaction of an earlier firnd was undone.
    pub(crate) fn note_undone(&self, scope: &[u8]) {
        let mut table = self.table.lock();
        table.aborted.insert(scope.to_vec(), AbortCause::FirndDied);
    }

    /// Returns why the last transaction of a scope was aborted without a request. `None` if it was not, or if another
    /// one was begun since.
    pub(crate) fn abort_cause(&self, scope: &[u8]) -> Option<AbortCause> {
        self.table.lock().aborted.get(scope).cloned()
    }

    /// Returns the owner of a scope's transaction, and the transaction's age in seconds.
    pub(crate) fn status(&self, scope: &[u8]) -> (Option<OwnerStatus>, Option<f64>) {
        match self.table.lock().owned.get(scope) {
            None => (None, None),
            Some(owned) => {
                let owner = owned.owner.as_ref().map(|owner| owner.status());
                (owner, Some(owned.began.elapsed().as_secs_f64()))
            }
        }
    }

    /// Returns whether a connection owns a transaction that would be aborted at the end of the connection.
    pub(crate) fn has_owned(&self, stream: &Arc<UnixStream>) -> bool {
        let is_owner = |owned: &Owned| match owned.owner.as_deref() {
            Some(Watched::Connection { peer, .. }) => {
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

    /// Aborts transactions whose owners are gone, until [`Owners::stop`]. No lock is held while `scopes` is called.
    pub(crate) fn watch(&self, scopes: &dyn Scopes) {
        loop {
            let (watched, orphans) = {
                let mut table = self.table.lock();
                if table.is_stopped {
                    return;
                }
                let orphans = table.take_orphans();
                (table.watched(), orphans)
            };
            let has_trouble = self.abort_all(scopes, &orphans);
            if orphans.is_empty() || has_trouble {
                self.sleep(&watched, has_trouble);
            }
        }
    }

    /// Aborts the transactions of `orphans`. Returns whether one of them could not be aborted.
    fn abort_all(&self, scopes: &dyn Scopes, orphans: &[Vec<u8>]) -> bool {
        let mut has_trouble = false;
        for scope in orphans {
            let aborted = match scopes.is_open(scope) {
                Some(true) => scopes.abort(scope),
                _ => Ok(()),
            };
            let is_open = scopes.is_open(scope);
            let mut table = self.table.lock();
            match (aborted, is_open) {
                (Ok(()), None) => table.end_aborted(scope),
                (result, is_open) => {
                    let owned = table
                        .owned
                        .get_mut(scope)
                        .expect("only ended by this thread");
                    owned.is_aborting = false;
                    owned.is_open = is_open.unwrap_or_default();
                    owned.trouble = result.err();
                    has_trouble |= owned.is_open;
                }
            }
            self.changed.notify_all();
        }
        has_trouble
    }

    /// Sleeps until an owner ends or the thread is woken, and with `has_trouble` for at most [`RETRY_S`].
    fn sleep(&self, watched: &[Arc<Watched>], has_trouble: bool) {
        let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN)];
        for owner in watched {
            let ends = owner.ends().into_iter();
            fds.extend(ends.map(|(fd, event)| PollFd::from_borrowed_fd(fd, event)));
        }
        let retry = Timespec {
            tv_sec: RETRY_S,
            tv_nsec: 0,
        };
        let _ = poll(&mut fds, has_trouble.then_some(&retry));
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut count);
    }
}

impl Table {
    /// Returns the owners whose end is watched.
    fn watched(&self) -> Vec<Arc<Watched>> {
        let lives = |owned: &&Owned| owned.is_open && !owned.is_gone;
        let owners = self.owned.values().filter(lives);
        owners.filter_map(|owned| owned.owner.clone()).collect()
    }

    /// Marks the transactions that are to be aborted now, and returns their scopes.
    fn take_orphans(&mut self) -> Vec<Vec<u8>> {
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

    fn end_aborted(&mut self, scope: &[u8]) {
        let owned = self.owned.remove(scope);
        if let Some(owner) = owned.and_then(|owned| owned.owner) {
            let cause = AbortCause::OwnerGone(owner.in_words());
            self.aborted.insert(scope.to_owned(), cause);
        }
    }
}

/// A request in progress about the transaction of a scope.
pub(crate) struct Request<'a> {
    owners: &'a Owners,
    scope: Vec<u8>,
    /// The argument of [`Request::end`].
    is_open: Option<Option<bool>>,
}

impl Request<'_> {
    /// Returns the owner that a begin request names. Fails with ESRCH if that process is not running.
    pub(crate) fn find_owner(owner: Owner, peer: &ControlPeer) -> Result<FoundOwner, Errno> {
        Ok(FoundOwner(match owner {
            Owner::None => None,
            Owner::Connection => Some(Arc::new(Watched::of_connection(peer))),
            Owner::Process { pid, start_ticks } => {
                Some(Arc::new(Watched::of_process(pid, start_ticks)?))
            }
        }))
    }

    /// Records that a transaction was begun for this owner.
    pub(crate) fn begun(&self, owner: FoundOwner) {
        let mut table = self.owners.table.lock();
        table.aborted.remove(&self.scope);
        table.owned.insert(self.scope.clone(), Owned::new(owner.0));
    }

    /// Records that the transaction was committed, and the next one begun for the same owner. The scope of the next one
    /// is `next`, because its top may have been renamed.
    pub(crate) fn begun_next(&self, next: &[u8]) {
        let mut table = self.owners.table.lock();
        let owned = table.owned.remove(&self.scope);
        let owner = owned.and_then(|owned| owned.owner);
        table.aborted.remove(next);
        table.owned.insert(next.to_vec(), Owned::new(owner));
    }

    /// Ends the request. `is_open` is the state of the transaction now; `None` means that there is no transaction.
    pub(crate) fn end(mut self, is_open: Option<bool>) {
        self.is_open = Some(is_open);
    }
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        let mut table = self.owners.table.lock();
        match self.is_open {
            Some(None) => {
                table.owned.remove(&self.scope);
            }
            Some(Some(is_open)) => {
                if let Some(owned) = table.owned.get_mut(&self.scope) {
                    owned.is_open = is_open;
                }
            }
            None => {}
        }
        if let Some(requests) = table.requests.get_mut(&self.scope) {
            *requests -= 1;
            if *requests == 0 {
                table.requests.remove(&self.scope);
            }
        }
        self.owners.wake();
    }
}

/// An owner that was running when it was looked up.
pub(crate) struct FoundOwner(Option<Arc<Watched>>);
