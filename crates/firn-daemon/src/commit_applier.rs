//! Applies what was committed asynchronously, while the programs of the mount go on.
//!
//! A commit that the backing refuses is tried again after 0.1 s, doubling to 30 s, and at once when another one comes.
//! The same holds for what other hosts are to be told of an applied one. One thread does all, one scope after the
//! other; the first such commit starts it.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use firn_backing::backoff::Backoff;
use parking_lot::{Condvar, Mutex};

use crate::gate::TransactionGate;
use crate::store::shown_scope;

const RETRY: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(30));

pub(crate) struct CommitApplier {
    gate: Arc<TransactionGate>,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    asked: bool,
    stopping: bool,
}

impl CommitApplier {
    pub(crate) fn new(gate: Arc<TransactionGate>) -> Self {
        Self {
            gate,
            shared: Arc::default(),
            thread: Mutex::default(),
        }
    }

    /// There is a commit to apply.
    pub(crate) fn wake(&self) {
        self.shared.state.lock().asked = true;
        self.shared.changed.notify_all();
        let mut thread = self.thread.lock();
        if thread.is_some() {
            return;
        }
        let gate = Arc::clone(&self.gate);
        let shared = Arc::clone(&self.shared);
        match std::thread::Builder::new()
            .name("firn-commit".into())
            .spawn(move || shared.serve(&gate))
        {
            Ok(started) => *thread = Some(started),
            Err(error) => {
                tracing::warn!(%error, "cannot start a thread: the commit is applied now");
                apply_commits(&self.gate);
            }
        }
    }

    /// Ends it after the commit it is at.
    pub(crate) fn stop(&self) {
        self.shared.state.lock().stopping = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that applies commits panicked");
        }
    }
}

impl Shared {
    fn serve(&self, gate: &TransactionGate) {
        let mut waits = RETRY.start();
        loop {
            let mut state = self.state.lock();
            while !state.asked && !state.stopping {
                self.changed.wait(&mut state);
            }
            if state.stopping {
                return;
            }
            state.asked = false;
            drop(state);
            if apply_commits(gate) {
                waits.reset();
                continue;
            }
            let mut state = self.state.lock();
            if !state.asked && !state.stopping {
                self.changed.wait_for(&mut state, waits.next_wait());
            }
            if state.asked {
                waits.reset();
            }
            state.asked = true;
        }
    }
}

/// Whether nothing is left.
fn apply_commits(gate: &TransactionGate) -> bool {
    let mut all = true;
    for commit in gate.store().commits_to_apply() {
        let trouble = commit.trouble();
        if let Err(error) = crate::transactions::apply_commit(gate, &commit) {
            all = false;
            // Each cause once.
            if trouble.as_deref() != Some(&error.to_string()) {
                let scope = shown_scope(commit.scope());
                tracing::warn!(%error, id = commit.id(), %scope, "a commit cannot be applied; it is tried again");
            }
        }
    }
    if let Err(error) = gate.store().leave_applied_commits() {
        all = false;
        // The failure of the first attempt was one of the commit.
        tracing::debug!(%error, "other hosts cannot be told of an applied commit; it is tried again");
    }
    all
}
