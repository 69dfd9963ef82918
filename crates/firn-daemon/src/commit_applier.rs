//! Applies commits in the background after `firn commit --async`, while the programs of the mount continue. To apply a
//! commit is to make its changes in the backing directory.
//!
//! One thread applies all commits, one after the other; the first asynchronous commit starts it.
//!
//! A failed attempt is repeated after 0.1 s; the pause doubles up to 30 s. A new commit ends the pause at once. The
//! thread also tells other hosts that a commit is applied, with the same repetitions.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use firn_backing::backoff::Backoff;
use parking_lot::{Condvar, Mutex};

use crate::gate::TransactionGate;
use crate::store::shown_scope;

const RETRY: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(30));

/// The background thread and what wakes it.
pub(crate) struct CommitApplier {
    gate: Arc<TransactionGate>,
    shared: Arc<ApplierShared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct ApplierShared {
    flags: Mutex<ApplierFlags>,
    changed: Condvar,
}

/// Flags for the thread.
#[derive(Default)]
struct ApplierFlags {
    /// There may be a commit to apply.
    has_work: bool,
    is_stopping: bool,
}

impl CommitApplier {
    pub(crate) fn new(gate: Arc<TransactionGate>) -> Self {
        Self {
            gate,
            shared: Arc::default(),
            thread: Mutex::default(),
        }
    }

    /// Records that there is a commit to apply (to make its changes in the backing), and starts the thread if it is not
    /// running. If no thread can be started, this call applies the commit itself.
    pub(crate) fn wake(&self) {
        self.shared.flags.lock().has_work = true;
        self.shared.changed.notify_all();
        let mut thread = self.thread.lock();
        if thread.is_some() {
            return;
        }
        let gate = Arc::clone(&self.gate);
        let shared = Arc::clone(&self.shared);
        match std::thread::Builder::new()
            .name("firn-commit".into())
            .spawn(move || shared.apply_until_stopped(&gate))
        {
            Ok(started) => *thread = Some(started),
            Err(error) => {
                tracing::warn!(%error, "cannot start a thread: the commit is applied now");
                apply_and_announce_commits(&self.gate);
            }
        }
    }

    /// Stops the thread after its current commit, and waits for its end.
    pub(crate) fn stop(&self) {
        self.shared.flags.lock().is_stopping = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that applies commits panicked");
        }
    }
}

impl ApplierShared {
    /// Makes the changes of decided commits in the backing, until [`CommitApplier::stop`]. This is the main function of
    /// the thread.
    fn apply_until_stopped(&self, gate: &TransactionGate) {
        let mut backoff = RETRY.start();
        loop {
            let mut flags = self.flags.lock();
            while !flags.has_work && !flags.is_stopping {
                self.changed.wait(&mut flags);
            }
            if flags.is_stopping {
                return;
            }
            flags.has_work = false;
            // The backing may be slow, so the lock is not held during the attempt.
            drop(flags);
            if apply_and_announce_commits(gate) {
                backoff.reset();
                continue;
            }
            // The attempt failed: the thread pauses, and a new commit or the stop ends the pause.
            let mut flags = self.flags.lock();
            if !flags.has_work && !flags.is_stopping {
                self.changed.wait_for(&mut flags, backoff.next_wait());
            }
            if flags.has_work {
                backoff.reset();
            }
            // The failed commit is still to be applied.
            flags.has_work = true;
        }
    }
}

/// Applies all commits that wait: makes their changes in the backing. Then informs other hosts of the applied commits.
/// Returns false if something failed, so that the caller tries again.
fn apply_and_announce_commits(gate: &TransactionGate) -> bool {
    let mut all_succeeded = true;
    for commit in gate.store().commits_to_apply() {
        let last_error = commit.last_error();
        if let Err(error) = crate::transactions::apply_commit(gate, &commit) {
            all_succeeded = false;
            // A repeated failure of the same cause is logged once.
            if last_error.as_deref() != Some(&error.to_string()) {
                let scope = shown_scope(commit.scope());
                tracing::warn!(%error, id = commit.id(), %scope, "a commit cannot be applied yet; firnd tries again");
            }
        }
    }
    if let Err(error) = gate.store().leave_applied_commits() {
        all_succeeded = false;
        // Applying the commit included a first attempt to inform them, and its failure was logged then.
        tracing::debug!(%error, "other hosts cannot be informed of an applied commit; firnd tries again");
    }
    all_succeeded
}
