//! Requests without an answer yet, and which of them are answered early because of a signal.
//!
//! Once firnd, the process that serves the mount, has read a request, its caller waits in the kernel until there is an
//! answer, whatever signal it gets. The kernel only reports the first signal to firnd (FUSE_INTERRUPT). The thread that
//! works on the request may hang for ever in the backing, the directory that the mount serves. So the caller may get an
//! *early answer* without that thread; the later outcome is then discarded ([`crate::reply::Reply`]).
//!
//! When a caller gets an early answer depends on what the signal does to it ([`SignalEffect`]):
//!
//! 1. The caller is about to die. It gets EINTR at once, and never sees it. A change may or may not happen.
//! 2. The caller is about to stop or to be frozen, or it runs a handler for a signal that asks it to end. A request
//!    that changes nothing ([`OperationKind::is_change`] is false) ends with EINTR. A change continues, because its
//!    answer must be true. All this happens only [`STOP_GRACE`] after the signal: most answers come earlier, and then a
//!    program sees no EINTR.
//! 3. The caller runs another handler. The request continues. Local file systems behave like that too: only a deadly
//!    signal interrupts their calls. Programs with a timer or with child processes get signals often and do not expect
//!    EINTR.
//!
//! A request that waits in a queue (for room in the shared memory, or for a lock) is *withdrawn* instead: it leaves the
//! queue, and the queue answers it. That happens in cases 1 and 2, and for a wait for a program's lock also in case 3.
//!
//! A process that exits closes its files, and from then on the kernel drops all signals to it, even SIGKILL. So its
//! close waits for a drain (the write of held bytes to the backing) only while the drain makes progress
//! ([`EXIT_DRAIN_TIMEOUT`]).
//!
//! Invariants
//! * A request is in the table from before its work begins until it is answered.
//! * The thread that removes a request from the table answers it: so there is exactly one answer.
//! * An interrupted request that remains in the table is checked every [`CHECK_INTERVAL`], because the kernel reports
//!   no second signal.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_backing::Errno;
use firn_workers::spawn_thread;
use parking_lot::Mutex;

use crate::caller::{SignalEffect, signal_effect};
use crate::request::OperationKind;

/// Time from the signal to the early answer of a caller that stops but does not die.
const STOP_GRACE: Duration = Duration::from_secs(1);
/// If no byte is drained for this time, a process that exits stops waiting for the drain of its file.
const EXIT_DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Time between two checks of the interrupted requests.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Number of a calling thread that is in a PID namespace which firnd does not see.
const UNSEEN_CALLER: u32 = 0;
/// Number of parts of the table, each of which has a lock.
const SHARDS: usize = 64;
/// Number of interrupts that each part remembers although their request is not in the table. Such a request was read
/// and is about to be added, or it was answered and its number never comes again.
const EARLY_INTERRUPTS_MAX: usize = 64;

/// Answers a request while another thread is still at work on it.
pub(crate) trait EarlyAnswer: Send + Sync {
    /// Answers the request with an error.
    fn refuse(&self, unique: u64, errno: Errno);

    /// Answers a request with success, without data.
    fn accept(&self, unique: u64);
}

/// Removes a request from the queue in which it waits, and answers it. Returns false if the request is not in the
/// queue.
pub(crate) type Withdraw = Arc<dyn Fn() -> bool + Send + Sync>;

/// A request without an answer yet.
struct WaitingRequest {
    /// The calling thread, or [`UNSEEN_CALLER`].
    caller: u32,
    operation: OperationKind,
    added_at: Instant,
    early_answer: Arc<dyn EarlyAnswer>,
    /// Removes the request from its queue. Set if the request may wait in a queue.
    withdraw: Option<Withdraw>,
    /// Time of the last reported signal.
    interrupted_at: Option<Instant>,
    /// When the wait of a caller that exits began; `None` if the caller does not exit.
    exit_wait_started_at: Option<Instant>,
}

impl WaitingRequest {
    /// Whether the caller is a process that exits, and the drain (the write of pending bytes to the backing) has made
    /// no progress for [`EXIT_DRAIN_TIMEOUT`]. Such a process gets an early answer, because no signal can end it. False
    /// if the progress is not known.
    fn is_exit_stalled(&self, progress: Option<&Progress>) -> bool {
        let (Some(exit_wait_started_at), Some(progress)) = (self.exit_wait_started_at, progress)
        else {
            return false;
        };
        let stalled_since = exit_wait_started_at.max(progress.changed_at);
        stalled_since.elapsed() >= EXIT_DRAIN_TIMEOUT
    }
}

/// A thread of a program that waits for the answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingThread {
    /// The thread's number (gettid(2)).
    pub thread: u32,
    /// Name of the operation, as in the log.
    pub operation: &'static str,
    /// Time since firnd read the request.
    pub waited: Duration,
}

/// Finds the threads of programs that wait for answers.
#[derive(Clone)]
pub struct WaitingThreads(pub(crate) Arc<Unanswered>);

impl WaitingThreads {
    /// Returns at most `count_max` threads that have waited at least `waited_min` for the answer to a request, the
    /// longest waits first. Threads in a PID namespace that firnd (the serving process) does not see are left out.
    /// Never blocks.
    pub fn find(&self, waited_min: Duration, count_max: usize) -> Vec<WaitingThread> {
        let mut threads = Vec::new();
        for shard in &self.0.shards {
            for request in shard.lock().waiting.values() {
                let waited = request.added_at.elapsed();
                if request.caller == UNSEEN_CALLER || waited < waited_min {
                    continue;
                }
                threads.push(WaitingThread {
                    thread: request.caller,
                    operation: request.operation.name(),
                    waited,
                });
            }
        }
        threads.sort_by_key(|thread| std::cmp::Reverse(thread.waited));
        threads.truncate(count_max);
        threads
    }
}

/// One part of the table.
#[derive(Default)]
struct Shard {
    /// Unanswered requests by their number.
    waiting: HashMap<u64, WaitingRequest>,
    /// Numbers of requests that were interrupted before they were added, the newest first.
    interrupted_early: VecDeque<u64>,
}

/// The table of unanswered requests of a mount.
pub(crate) struct Unanswered {
    shards: [Mutex<Shard>; SHARDS],
    watched: Mutex<Watched>,
    /// Returns the number of bytes drained since the mount.
    drained_bytes: Box<dyn Fn() -> u64 + Send + Sync>,
}

/// Requests that are checked every [`CHECK_INTERVAL`].
#[derive(Default)]
struct Watched {
    requests: Vec<u64>,
    /// Whether a thread runs that checks them.
    has_thread: bool,
}

/// The last progress of the drain that a check has observed.
struct Progress {
    drained_bytes: u64,
    changed_at: Instant,
}

/// What to do with an unanswered request now.
enum EarlyAnswerDecision {
    /// Let the request wait.
    Wait,
    /// Withdraw the request from its queue. If it is in no queue, let it wait.
    Withdraw,
    /// Withdraw the request from its queue. If it is in no queue, answer with EINTR.
    Refuse,
    /// Answer with success, although the drain is not done.
    Accept,
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
        // The kernel gives requests even numbers.
        &self.shards[(unique >> 1) as usize % SHARDS]
    }

    /// Adds a request that has no answer yet, so that a signal to its caller can end it early by `early_answer`. Called
    /// before the work on the request. `caller` is the calling thread, or [`UNSEEN_CALLER`].
    pub(crate) fn add(
        self: &Arc<Self>,
        unique: u64,
        caller: u32,
        operation: OperationKind,
        early_answer: Arc<dyn EarlyAnswer>,
    ) {
        let mut shard = self.shard(unique).lock();
        // Another thread may have read the notice of a signal before this thread added the request.
        let is_interrupted = shard.interrupted_early.contains(&unique);
        let request = WaitingRequest {
            caller,
            operation,
            added_at: Instant::now(),
            early_answer,
            withdraw: None,
            interrupted_at: is_interrupted.then(Instant::now),
            exit_wait_started_at: None,
        };
        shard.waiting.insert(unique, request);
        // `watch` takes another lock.
        drop(shard);
        if is_interrupted {
            self.watch(unique);
        }
    }

    /// Removes a request. Returns true if it was in the table: then the calling thread must answer it.
    pub(crate) fn remove(&self, unique: u64) -> bool {
        self.take(unique).is_some()
    }

    fn take(&self, unique: u64) -> Option<WaitingRequest> {
        self.shard(unique).lock().waiting.remove(&unique)
    }

    /// Whether a request has no answer yet.
    fn contains(&self, unique: u64) -> bool {
        self.shard(unique).lock().waiting.contains_key(&unique)
    }

    /// Sets the function that withdraws the request from its queue. It is called on any thread, without a lock of this
    /// table.
    pub(crate) fn set_withdraw(&self, unique: u64, withdraw: Withdraw) {
        if let Some(request) = self.shard(unique).lock().waiting.get_mut(&unique) {
            request.withdraw = Some(withdraw);
        }
    }

    /// Records that the caller of the request is a process that exits.
    pub(crate) fn record_exiting_caller(self: &Arc<Self>, unique: u64) {
        if let Some(request) = self.shard(unique).lock().waiting.get_mut(&unique) {
            request.exit_wait_started_at = Some(Instant::now());
        }
        self.watch(unique);
    }

    /// Records that the caller of the request got a signal. Answers the request early if that is due at once.
    pub(crate) fn interrupt(self: &Arc<Self>, unique: u64) {
        let mut shard = self.shard(unique).lock();
        let Some(request) = shard.waiting.get_mut(&unique) else {
            // The notice is read before the request is added (`add` looks here), or after its answer. So old ones go.
            shard.interrupted_early.truncate(EARLY_INTERRUPTS_MAX - 1);
            shard.interrupted_early.push_front(unique);
            return;
        };
        request.interrupted_at = Some(Instant::now());
        // `end_if_due` takes the lock itself.
        drop(shard);
        if !self.end_if_due(unique, None) {
            self.watch(unique);
        }
    }

    /// Lets a request be checked periodically until it is answered. Starts the thread that does so, unless it runs
    /// already.
    fn watch(self: &Arc<Self>, unique: u64) {
        let mut watched = self.watched.lock();
        watched.requests.push(unique);
        if std::mem::replace(&mut watched.has_thread, true) {
            return;
        }
        // Unlocked, because the code below takes the lock if the thread cannot start.
        drop(watched);
        let table = Arc::clone(self);
        if let Err(error) = spawn_thread("firn-interrupt", move || table.check_watched()) {
            tracing::warn!(%error, "cannot start the thread that ends requests of interrupted callers: these may have to wait for the backing");
            self.watched.lock().has_thread = false;
        }
    }

    /// Checks every [`CHECK_INTERVAL`] whether a request of an interrupted or exiting caller is to be answered early,
    /// while its work goes on. Runs on a thread of its own, and returns when no such request is left.
    fn check_watched(&self) {
        let mut progress = Progress {
            drained_bytes: (self.drained_bytes)(),
            changed_at: Instant::now(),
        };
        loop {
            std::thread::sleep(CHECK_INTERVAL);
            let drained_bytes = (self.drained_bytes)();
            if drained_bytes != progress.drained_bytes {
                progress = Progress {
                    drained_bytes,
                    changed_at: Instant::now(),
                };
            }
            // Taken out, because the checks read files in /proc and must not hold the lock.
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

    /// Answers a request early, while its work may still go on, if that is due now because of a signal or an exit of
    /// its caller. Returns whether the request is answered. `progress` is that of the drain (the write of pending bytes
    /// to the backing), if known.
    fn end_if_due(&self, unique: u64, progress: Option<&Progress>) -> bool {
        let shard = self.shard(unique).lock();
        let Some(request) = shard.waiting.get(&unique) else {
            return true;
        };
        let caller = request.caller;
        let operation = request.operation;
        let withdraw = request.withdraw.clone();
        let interrupted_at = request.interrupted_at;
        let is_exit_stalled = request.is_exit_stalled(progress);
        // From here on without the lock, because `signal_effect` reads files in /proc. Also, `withdraw` takes the lock
        // of its queue, and removes the request from this table.
        drop(shard);
        let decision = if is_exit_stalled {
            EarlyAnswerDecision::Accept
        } else if let Some(interrupted_at) = interrupted_at {
            decide(signal_effect(caller), interrupted_at.elapsed(), operation)
        } else {
            EarlyAnswerDecision::Wait
        };
        // Removes the request from its queue and answers it. Returns false if the request waits in no queue.
        let try_withdraw = || withdraw.is_some_and(|withdraw| withdraw());
        match decision {
            EarlyAnswerDecision::Wait => false,
            EarlyAnswerDecision::Withdraw => try_withdraw(),
            EarlyAnswerDecision::Refuse => {
                if !try_withdraw() {
                    self.refuse_interrupted(unique);
                }
                true
            }
            EarlyAnswerDecision::Accept => {
                self.accept_exiting(unique);
                true
            }
        }
    }

    /// Answers a request with EINTR, unless another thread has answered it.
    fn refuse_interrupted(&self, unique: u64) {
        if let Some(request) = self.take(unique) {
            tracing::debug!(
                unique,
                "a request ends early with EINTR, because its caller got a signal"
            );
            request.early_answer.refuse(unique, Errno::INTR);
        }
    }

    /// Answers the close of a process that exits, although the file is not drained.
    fn accept_exiting(&self, unique: u64) {
        if let Some(request) = self.take(unique) {
            tracing::warn!(
                pid = request.caller,
                "a process exits before its file is drained: nothing was drained for {} s; the file stays held",
                EXIT_DRAIN_TIMEOUT.as_secs()
            );
            request.early_answer.accept(unique);
        }
    }
}

/// Applies the cases at the head of this file. `since_signal`: time since the caller got the signal.
fn decide(
    effect: SignalEffect,
    since_signal: Duration,
    operation: OperationKind,
) -> EarlyAnswerDecision {
    let waits_for_lock = operation.is_ended_by_any_signal();
    match effect {
        SignalEffect::Dies => EarlyAnswerDecision::Refuse,
        _ if waits_for_lock => EarlyAnswerDecision::Withdraw,
        SignalEffect::Stops if since_signal < STOP_GRACE => EarlyAnswerDecision::Wait,
        SignalEffect::Stops if operation.is_change() => EarlyAnswerDecision::Withdraw,
        SignalEffect::Stops => EarlyAnswerDecision::Refuse,
        SignalEffect::Continues => EarlyAnswerDecision::Wait,
    }
}

/// Tells whether the caller of a request still waits for the answer.
#[derive(Clone)]
pub(crate) struct CallerStatus {
    table: Arc<Unanswered>,
    unique: u64,
}

impl CallerStatus {
    pub(crate) fn new(table: &Arc<Unanswered>, unique: u64) -> Self {
        Self {
            table: Arc::clone(table),
            unique,
        }
    }

    pub(crate) fn is_waiting(&self) -> bool {
        self.table.contains(self.unique)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    struct SentAnswers(mpsc::Sender<(u64, Option<Errno>)>);

    impl EarlyAnswer for SentAnswers {
        fn refuse(&self, unique: u64, errno: Errno) {
            let _ = self.0.send((unique, Some(errno)));
        }

        fn accept(&self, unique: u64) {
            let _ = self.0.send((unique, None));
        }
    }

    /// Early answers: the number of the request, and the error if it is one.
    type Answers = mpsc::Receiver<(u64, Option<Errno>)>;

    fn table() -> (Arc<Unanswered>, Arc<dyn EarlyAnswer>, Answers) {
        let (sender, answers) = mpsc::channel();
        (
            Unanswered::new(|| 0),
            Arc::new(SentAnswers(sender)),
            answers,
        )
    }

    #[test]
    fn a_request_is_answered_once_early_or_late() {
        let (table, early_answer, answers) = table();
        table.add(
            2,
            UNSEEN_CALLER,
            OperationKind::Fsync,
            Arc::clone(&early_answer),
        );
        table.add(4, UNSEEN_CALLER, OperationKind::Fsync, early_answer);
        table.interrupt(2);
        assert_eq!(answers.recv().unwrap(), (2, Some(Errno::INTR)));
        assert!(!table.remove(2));
        assert!(table.remove(4));
        table.interrupt(4);
        assert!(answers.try_recv().is_err());
    }

    #[test]
    fn an_interruption_that_is_read_before_its_request_is_not_lost() {
        let (table, early_answer, answers) = table();
        for other in 1..EARLY_INTERRUPTS_MAX as u64 {
            table.interrupt(2 + 2 * SHARDS as u64 * other);
        }
        table.interrupt(2);
        table.add(2, UNSEEN_CALLER, OperationKind::Lookup, early_answer);
        let answer = answers.recv_timeout(Duration::from_secs(60)).unwrap();
        assert_eq!(answer, (2, Some(Errno::INTR)));
    }

    #[test]
    fn what_can_be_withdrawn_is_answered_by_whom_it_waits_for() {
        let (table, early_answer, answers) = table();
        table.add(
            2,
            UNSEEN_CALLER,
            OperationKind::Write,
            Arc::clone(&early_answer),
        );
        let weak = Arc::downgrade(&table);
        table.set_withdraw(2, Arc::new(move || weak.upgrade().unwrap().remove(2)));
        table.interrupt(2);
        assert!(answers.try_recv().is_err());
        assert!(!CallerStatus::new(&table, 2).is_waiting());
        // The second request has left its queue. Its caller dies, so it is answered all the same.
        table.add(4, UNSEEN_CALLER, OperationKind::Write, early_answer);
        table.set_withdraw(4, Arc::new(|| false));
        table.interrupt(4);
        assert_eq!(answers.recv().unwrap(), (4, Some(Errno::INTR)));
    }

    #[test]
    fn only_a_deadly_signal_ends_a_change_and_only_a_stop_or_an_end_anything() {
        let late = STOP_GRACE;
        let soon = Duration::ZERO;
        let (asks, changes) = (OperationKind::Fsync, OperationKind::Write);
        for operation in [asks, changes] {
            assert!(matches!(
                decide(SignalEffect::Dies, soon, operation),
                EarlyAnswerDecision::Refuse
            ));
            assert!(matches!(
                decide(SignalEffect::Stops, soon, operation),
                EarlyAnswerDecision::Wait
            ));
            assert!(matches!(
                decide(SignalEffect::Continues, late, operation),
                EarlyAnswerDecision::Wait
            ));
        }
        assert!(matches!(
            decide(SignalEffect::Stops, late, asks),
            EarlyAnswerDecision::Refuse
        ));
        assert!(matches!(
            decide(SignalEffect::Stops, late, changes),
            EarlyAnswerDecision::Withdraw
        ));
        for effect in [SignalEffect::Stops, SignalEffect::Continues] {
            let lock = decide(effect, soon, OperationKind::Setlk);
            assert!(matches!(lock, EarlyAnswerDecision::Withdraw));
        }
    }
}
