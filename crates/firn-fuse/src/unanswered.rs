//! Requests that are not answered yet, and callers among them that are to end or to stop.
//!
//! Once a request was read, the kernel holds its caller until there is an answer, whatever signal the caller gets. It
//! tells of the first signal (FUSE_INTERRUPT) and leaves the rest to firnd. What a thread of firnd waits for, or what
//! hangs in the backing, may take for ever; so the caller is answered without that, and the late outcome is discarded
//! ([`crate::reply::Reply`]).
//!
//! | the caller is about to | its request waits for room or a lock | asks or waits ([`OperationKind::changes`] is false) | changes something |
//! |---|---|---|---|
//! | die | withdrawn at once | EINTR at once | EINTR at once: it is never seen, and the change may or may not happen |
//! | stop, be frozen, or run a handler for a signal that asks it to end | withdrawn | EINTR | goes on: the answer must be true |
//! | run another handler | goes on; a wait for a program's lock is withdrawn at once | goes on | goes on |
//!
//! The second row takes effect [`STOP_GRACE`] later: most answers come by then, and a program sees no EINTR for them.
//! Local file systems do not return early for any signal but a deadly one, and programs with a timer or children do
//! not expect it; hence the third row.
//!
//! **Exits.** A process that exits closes its files, and the kernel drops all signals to it from then on, SIGKILL too.
//! So its close waits for a drain only as long as anything is drained at all ([`EXIT_PATIENCE`]).
//!
//! Invariants
//! * A request is in the table from before it is carried out until it is answered. The thread that takes it out answers
//!   it.
//! * An interrupted request that stays is looked at again every [`LOOK_AGAIN`]: the kernel tells of no further signal.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_backing::Errno;
use firn_workers::spawn_thread;
use parking_lot::Mutex;

use crate::caller::{Fate, fate};
use crate::request::OperationKind;

/// A signal that does not kill makes a request end early only after this time.
const STOP_GRACE: Duration = Duration::from_secs(1);
/// A process that exits waits for a drain that stands still no longer than this.
const EXIT_PATIENCE: Duration = Duration::from_secs(10);
/// Time between two looks at the callers that were interrupted.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Parts of the table with a lock each.
const SHARDS: usize = 64;
/// Interruptions of requests that are not in the table, remembered in each part. Either the thread that read such a
/// request enters it in a moment, or it was answered and its number comes never again.
const EARLY_MAX: usize = 64;

/// How a request is answered while another thread is still at work on it.
pub(crate) trait EarlyAnswer: Send + Sync {
    /// Answers the request with an error.
    fn refuse(&self, unique: u64, errno: Errno);

    /// Answers a request that has nothing to tell.
    fn accept(&self, unique: u64);
}

/// Takes a request out of whatever it waits in and answers it; false where it does not wait there.
pub(crate) type Withdraw = Arc<dyn Fn() -> bool + Send + Sync>;

/// A request that is not answered.
struct Waiting {
    /// Its thread; 0 where firnd cannot see it.
    caller: u32,
    operation: OperationKind,
    /// When it was entered.
    since: Instant,
    early: Arc<dyn EarlyAnswer>,
    withdraw: Option<Withdraw>,
    /// When its caller got a signal.
    interrupted_at: Option<Instant>,
    /// When its caller, which exits, began to wait.
    exits_at: Option<Instant>,
}

/// A thread of a program that has waited for an answer for a while.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingThread {
    /// Its number.
    pub thread: u32,
    /// What it called, as the log has it.
    pub operation: &'static str,
    /// Time since firnd took its request.
    pub waited: Duration,
}

/// Tells which threads wait.
#[derive(Clone)]
pub struct WaitingThreads(pub(crate) Arc<Unanswered>);

impl WaitingThreads {
    /// Threads that wait for at least `waited_min`, the longest first; `count_max` of them at most. Returns at once.
    pub fn find(&self, waited_min: Duration, count_max: usize) -> Vec<WaitingThread> {
        let mut found = Vec::new();
        for shard in &self.0.shards {
            let shard = shard.lock();
            found.extend(shard.waiting.values().filter_map(|waiting| {
                let waited = waiting.since.elapsed();
                (waiting.caller != 0 && waited >= waited_min).then(|| WaitingThread {
                    thread: waiting.caller,
                    operation: waiting.operation.name(),
                    waited,
                })
            }));
        }
        found.sort_by_key(|waiting| std::cmp::Reverse(waiting.waited));
        found.truncate(count_max);
        found
    }
}

#[derive(Default)]
struct Shard {
    waiting: HashMap<u64, Waiting>,
    /// Interrupted before they were entered.
    early: VecDeque<u64>,
}

/// The table of a mount.
pub(crate) struct Unanswered {
    shards: [Mutex<Shard>; SHARDS],
    watched: Mutex<Watched>,
    /// Bytes drained so far.
    drained_bytes: Box<dyn Fn() -> u64 + Send + Sync>,
}

/// Requests that are looked at again.
#[derive(Default)]
struct Watched {
    requests: Vec<u64>,
    has_thread: bool,
}

/// When the drain went on last.
struct Progress {
    drained_bytes: u64,
    at: Instant,
}

/// What becomes of an unanswered request now.
enum Verdict {
    Waits,
    /// Ends if it can be withdrawn.
    Withdraws,
    /// Ends.
    Refuses,
    Accepts,
}

impl Unanswered {
    pub(crate) fn new(drained_bytes: impl Fn() -> u64 + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self {
            shards: std::array::from_fn(|_| Mutex::default()),
            watched: Mutex::default(),
            drained_bytes: Box::new(drained_bytes),
        })
    }

    fn shard(&self, unique: u64) -> &Mutex<Shard> {
        // Numbers of requests are even.
        &self.shards[(unique >> 1) as usize % SHARDS]
    }

    /// Enters a request of a thread; 0: unknown thread.
    pub(crate) fn add(
        self: &Arc<Self>,
        unique: u64,
        caller: u32,
        operation: OperationKind,
        early: Arc<dyn EarlyAnswer>,
    ) {
        let mut shard = self.shard(unique).lock();
        let is_interrupted = shard.early.contains(&unique);
        let waiting = Waiting {
            caller,
            operation,
            since: Instant::now(),
            early,
            withdraw: None,
            interrupted_at: is_interrupted.then(Instant::now),
            exits_at: None,
        };
        shard.waiting.insert(unique, waiting);
        drop(shard);
        if is_interrupted {
            self.watch(unique);
        }
    }

    /// Takes a request out; a caller that gets true answers it.
    pub(crate) fn remove(&self, unique: u64) -> bool {
        self.take(unique).is_some()
    }

    fn take(&self, unique: u64) -> Option<Waiting> {
        self.shard(unique).lock().waiting.remove(&unique)
    }

    /// Whether a request was not answered yet.
    fn contains(&self, unique: u64) -> bool {
        self.shard(unique).lock().waiting.contains_key(&unique)
    }

    /// From now on the request can be withdrawn. It may be called from any thread, with no lock held.
    pub(crate) fn set_withdraw(&self, unique: u64, withdraw: Withdraw) {
        if let Some(waiting) = self.shard(unique).lock().waiting.get_mut(&unique) {
            waiting.withdraw = Some(withdraw);
        }
    }

    /// The caller of the request is a process that exits.
    pub(crate) fn note_exit(self: &Arc<Self>, unique: u64) {
        if let Some(waiting) = self.shard(unique).lock().waiting.get_mut(&unique) {
            waiting.exits_at = Some(Instant::now());
        }
        self.watch(unique);
    }

    /// The caller of the request got a signal.
    pub(crate) fn interrupt(self: &Arc<Self>, unique: u64) {
        {
            let mut shard = self.shard(unique).lock();
            match shard.waiting.get_mut(&unique) {
                Some(waiting) => waiting.interrupted_at = Some(Instant::now()),
                None => {
                    shard.early.truncate(EARLY_MAX - 1);
                    shard.early.push_front(unique);
                    return;
                }
            }
        }
        if !self.end_if_due(unique, None) {
            self.watch(unique);
        }
    }

    /// Looks at a request again from time to time, until it is answered.
    fn watch(self: &Arc<Self>, unique: u64) {
        let mut watched = self.watched.lock();
        watched.requests.push(unique);
        if std::mem::replace(&mut watched.has_thread, true) {
            return;
        }
        drop(watched);
        let table = Arc::clone(self);
        if let Err(error) = spawn_thread("firn-interrupt", move || table.look_at_watched()) {
            tracing::warn!(%error, "no thread looks at programs that wait and are to end");
            self.watched.lock().has_thread = false;
        }
    }

    /// Ends when nothing is left to be looked at.
    fn look_at_watched(&self) {
        let mut progress = Progress {
            drained_bytes: (self.drained_bytes)(),
            at: Instant::now(),
        };
        loop {
            std::thread::sleep(LOOK_AGAIN);
            let drained_bytes = (self.drained_bytes)();
            if drained_bytes != progress.drained_bytes {
                progress = Progress {
                    drained_bytes,
                    at: Instant::now(),
                };
            }
            let mut requests = std::mem::take(&mut self.watched.lock().requests);
            requests.retain(|unique| !self.end_if_due(*unique, Some(&progress)));
            let mut watched = self.watched.lock();
            watched.requests.append(&mut requests);
            if watched.requests.is_empty() {
                watched.has_thread = false;
                return;
            }
        }
    }

    /// Ends a request if its caller is to go on without an answer; whether it is answered.
    fn end_if_due(&self, unique: u64, progress: Option<&Progress>) -> bool {
        let (verdict, withdraw) = {
            let shard = self.shard(unique).lock();
            let Some(waiting) = shard.waiting.get(&unique) else {
                return true;
            };
            let (caller, interrupted_at) = (waiting.caller, waiting.interrupted_at);
            let (operation, withdraw) = (waiting.operation, waiting.withdraw.clone());
            let is_stuck_exit = waiting
                .exits_at
                .zip(progress)
                .is_some_and(|(since, progress)| since.max(progress.at).elapsed() >= EXIT_PATIENCE);
            drop(shard);
            let verdict = if is_stuck_exit {
                Verdict::Accepts
            } else {
                interrupted_at.map_or(Verdict::Waits, |at| {
                    judge(fate(caller), at.elapsed(), operation)
                })
            };
            (verdict, withdraw)
        };
        let withdraws = || withdraw.is_some_and(|withdraw| withdraw());
        match verdict {
            Verdict::Waits => false,
            Verdict::Withdraws => withdraws(),
            Verdict::Refuses => {
                if !withdraws()
                    && let Some(waiting) = self.take(unique)
                {
                    tracing::debug!(unique, "a caller that got a signal does not wait any more");
                    waiting.early.refuse(unique, Errno::INTR);
                }
                true
            }
            Verdict::Accepts => {
                if let Some(waiting) = self.take(unique) {
                    tracing::warn!(
                        pid = waiting.caller,
                        "a process exits before its file is drained: nothing was drained for {} s; the file stays held",
                        EXIT_PATIENCE.as_secs()
                    );
                    waiting.early.accept(unique);
                }
                true
            }
        }
    }
}

/// The table of this file's head. `waited`: since the signal.
fn judge(fate: Fate, waited: Duration, operation: OperationKind) -> Verdict {
    let changes = operation.changes();
    match fate {
        Fate::Dies => Verdict::Refuses,
        _ if operation.ends_with_any_signal() => Verdict::Withdraws,
        Fate::Stops if waited < STOP_GRACE => Verdict::Waits,
        Fate::Stops if changes => Verdict::Withdraws,
        Fate::Stops => Verdict::Refuses,
        Fate::GoesOn => Verdict::Waits,
    }
}

/// Says of a request whether its caller still waits for the answer.
#[derive(Clone)]
pub(crate) struct StillWaits {
    table: Arc<Unanswered>,
    unique: u64,
}

impl StillWaits {
    pub(crate) fn new(table: &Arc<Unanswered>, unique: u64) -> Self {
        Self {
            table: Arc::clone(table),
            unique,
        }
    }

    pub(crate) fn get(&self) -> bool {
        self.table.contains(self.unique)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    struct Told(mpsc::Sender<(u64, Option<Errno>)>);

    impl EarlyAnswer for Told {
        fn refuse(&self, unique: u64, errno: Errno) {
            let _ = self.0.send((unique, Some(errno)));
        }

        fn accept(&self, unique: u64) {
            let _ = self.0.send((unique, None));
        }
    }

    /// Early answers, by request.
    type Answers = mpsc::Receiver<(u64, Option<Errno>)>;

    fn table() -> (Arc<Unanswered>, Arc<dyn EarlyAnswer>, Answers) {
        let (tell, told) = mpsc::channel();
        (Unanswered::new(|| 0), Arc::new(Told(tell)), told)
    }

    /// A caller of whom firnd sees nothing counts as one that dies.
    const UNSEEN: u32 = 0;

    #[test]
    fn a_request_is_answered_once_early_or_late() {
        let (table, early, told) = table();
        table.add(2, UNSEEN, OperationKind::Fsync, Arc::clone(&early));
        table.add(4, UNSEEN, OperationKind::Fsync, early);
        table.interrupt(2);
        assert_eq!(told.recv().unwrap(), (2, Some(Errno::INTR)));
        assert!(!table.remove(2));
        assert!(table.remove(4));
        table.interrupt(4);
        assert!(told.try_recv().is_err());
    }

    #[test]
    fn an_interruption_that_is_read_before_its_request_is_not_lost() {
        let (table, early, told) = table();
        for other in 1..EARLY_MAX as u64 {
            table.interrupt(2 + 2 * SHARDS as u64 * other);
        }
        table.interrupt(2);
        table.add(2, UNSEEN, OperationKind::Lookup, early);
        let answer = told.recv_timeout(Duration::from_secs(60)).unwrap();
        assert_eq!(answer, (2, Some(Errno::INTR)));
    }

    #[test]
    fn what_can_be_withdrawn_is_answered_by_whom_it_waits_for() {
        let (table, early, told) = table();
        table.add(2, UNSEEN, OperationKind::Write, Arc::clone(&early));
        let weak = Arc::downgrade(&table);
        table.set_withdraw(2, Arc::new(move || weak.upgrade().unwrap().remove(2)));
        table.interrupt(2);
        assert!(told.try_recv().is_err());
        assert!(!StillWaits::new(&table, 2).get());
        // It does not wait there any more, and its caller dies all the same.
        table.add(4, UNSEEN, OperationKind::Write, early);
        table.set_withdraw(4, Arc::new(|| false));
        table.interrupt(4);
        assert_eq!(told.recv().unwrap(), (4, Some(Errno::INTR)));
    }

    #[test]
    fn only_a_deadly_signal_ends_a_change_and_only_a_stop_or_an_end_anything() {
        let late = STOP_GRACE;
        let soon = Duration::ZERO;
        let (asks, changes) = (OperationKind::Fsync, OperationKind::Write);
        for operation in [asks, changes] {
            assert!(matches!(
                judge(Fate::Dies, soon, operation),
                Verdict::Refuses
            ));
            assert!(matches!(
                judge(Fate::Stops, soon, operation),
                Verdict::Waits
            ));
            assert!(matches!(
                judge(Fate::GoesOn, late, operation),
                Verdict::Waits
            ));
        }
        assert!(matches!(judge(Fate::Stops, late, asks), Verdict::Refuses));
        assert!(matches!(
            judge(Fate::Stops, late, changes),
            Verdict::Withdraws
        ));
        for fate in [Fate::Stops, Fate::GoesOn] {
            let lock = judge(fate, soon, OperationKind::Setlk);
            assert!(matches!(lock, Verdict::Withdraws));
        }
    }
}
