//! Commits checkpoints that several hosts write: takes this host's part of each from step to step.
//!
//! Terms
//! * The *part* of a host is what its programs have changed in a scope (the names of one checkpoint).
//! * The *ballot* of a scope is a directory in the backing with the published state of each host's part, and the
//!   decision.
//! * The *event* is the close, rename or unlink that completes a checkpoint by its rule.
//! * A *top* is a name of the checkpoint in its directory.
//!
//! One thread, `firn-rule-hosts`, reads the ballots of the scopes that are open here, and takes the step that
//! [`firn_rules::joint::next_step`] returns. Only this thread calls the backing for that. So a backing that hangs
//! delays a close for at most `participants-wait`.
//!
//! Promises
//! * A part is prepared only while no program changes it, and only in the state that its host has published.
//! * A close, rename or unlink that is the event waits while the hosts commit, but does not wait for a host that still
//!   writes. The first change of the next checkpoint waits for that host too, if one transaction would have both.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use firn_backing::backoff::Backoff;
use firn_backing::{Errno, RenameFlags};
use firn_engine::Cached;
use firn_hosts::LeaseUse;
use firn_protocol::path::BytePath;
use firn_rules::joint::{Attempt, EVENT, HostState, JointStep, JointView, OwnPart, next_step};
use firn_rules::{Action, Ending, Operation, ScopeNumber, Writer};
use firn_transact::machine::Pending;
use firn_transact::{
    NamesBallot, NamesView, TransactionError, TransactionHandle, Verdict, parent_of,
};
use serde::{Deserialize, Serialize};

use super::{CommitRules, Transaction, join_paths, last_name};
use crate::host_lease::LivingHosts;
use crate::store::LoggableStore;

/// Pauses between two reads of what other hosts have published.
const READ_RETRY: Backoff = Backoff::new(Duration::from_millis(2), Duration::from_millis(200));
/// Pauses between two attempts to commit.
const ATTEMPT_RETRY: Backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(5));
/// Pause between two checks whether other hosts are alive.
const LIVENESS_CHECK_EVERY: Duration = Duration::from_secs(1);
/// Limit of ended scopes whose result is kept for the threads that wait for it.
const RESULTS_MAX: usize = 1024;

/// Content of the ballot's file `try-N`, which begins attempt N to commit.
#[derive(Serialize, Deserialize)]
struct AttemptContent {
    /// The number of changes that each host has published for its part.
    changes: BTreeMap<String, u64>,
}

/// Content of the ballot's file `event`.
#[derive(Serialize, Deserialize)]
struct EventContent {
    /// Renames of tops within their directory, each with the old and the new path.
    renamed: Vec<[BytePath; 2]>,
}

/// The settings of this mount for commits together with other hosts.
pub(super) struct JointSettings {
    /// The name of this host.
    pub(super) name: String,
    pub(super) hosts_timeout: Duration,
}

/// How a scope that several hosts wrote has ended.
#[derive(Clone, Copy)]
pub(super) struct JointResult {
    is_committed: bool,
    /// The kernel has dropped what it cached of the scope's names.
    is_settled: bool,
}

/// What a program does that may complete a checkpoint.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum EventKind {
    /// A close. It waits until the kernel has dropped what it cached of the names.
    Close,
    /// A change of a name. The kernel locks the directory until the change is answered, so its cache is cleared
    /// afterwards.
    Name,
    /// The first change of the next checkpoint. It waits also for a host that still writes.
    Next,
}

/// What this host knows of one scope.
#[derive(Default)]
pub(super) struct JointCommit {
    /// The attempt that this host is prepared for, and when it was prepared.
    prepared: Option<(u64, Instant)>,
    /// What the commit waits for, for the status.
    pub(super) waits_for: Option<String>,
    /// All hosts have published their state since the event, and the commit still waits for one of them.
    is_answered: bool,
    /// The last attempt was refused.
    is_refused: bool,
    /// The tops have the names that the event gives them.
    has_followed: bool,
    /// A step has failed; the failure was logged.
    is_failing: bool,
    /// When this host last began an attempt.
    tried: Option<Instant>,
}

/// What the thread remembers from one round to the next: dead hosts, and when they were last checked.
struct DeadHostCache {
    living: Option<LivingHosts>,
    dead: BTreeSet<String>,
    looked: Option<Instant>,
}

impl DeadHostCache {
    /// Returns which of `hosts` are dead. They are checked again at most once in [`LIVENESS_CHECK_EVERY`]; this host counts as
    /// alive.
    fn dead_among(&mut self, rules: &CommitRules, hosts: &BTreeSet<String>) -> BTreeSet<String> {
        let own = rules.hosts.as_ref().map(|hosts| hosts.name.as_str());
        let is_due = self
            .looked
            .is_none_or(|at| at.elapsed() > LIVENESS_CHECK_EVERY);
        if is_due {
            self.looked = Some(Instant::now());
            self.dead.clear();
            for host in hosts.iter().filter(|host| Some(host.as_str()) != own) {
                match self.is_living(rules, host) {
                    Ok(true) => {}
                    Ok(false) => drop(self.dead.insert(host.clone())),
                    Err(errno) => {
                        tracing::debug!(%errno, host, "cannot find out whether a host is alive")
                    }
                }
            }
        }
        self.dead.intersection(hosts).cloned().collect()
    }

    /// Returns whether a host has its lease. The leases are opened by the first call.
    fn is_living(&mut self, rules: &CommitRules, host: &str) -> Result<bool, Errno> {
        if self.living.is_none() {
            let own = rules.hosts.as_ref().map_or("", |hosts| &hosts.name);
            let backing = rules.gate.backing();
            let living = LivingHosts::open(backing, LeaseUse::Transactions, own);
            self.living = Some(living.map_err(|_| Errno::IO)?);
        }
        self.living
            .as_ref()
            .map_or(Ok(true), |living| living.is_living(host))
    }
}

impl CommitRules {
    /// Takes scopes of several hosts from step to step, until [`CommitRules::stop`]. This is the main function of the
    /// thread.
    pub(crate) fn watch_hosts(&self) {
        let mut round = DeadHostCache {
            living: None,
            dead: BTreeSet::new(),
            looked: None,
        };
        let mut waits = READ_RETRY.start();
        loop {
            let open: Vec<ScopeNumber> = {
                let table = self.table.lock();
                if table.is_stopped {
                    return;
                }
                table.scopes.keys().copied().collect()
            };
            if let Err(errno) = self.gate.store().leave_applied_commits() {
                tracing::debug!(%errno, "other hosts cannot be informed of a commit yet");
            }
            let mut has_gone_on = false;
            for scope in &open {
                has_gone_on |= self.take_step(*scope, &mut round);
            }
            if has_gone_on {
                waits = READ_RETRY.start();
            }
            let mut table = self.table.lock();
            if std::mem::take(&mut table.is_woken) {
                waits = READ_RETRY.start();
            } else if !table.is_stopped {
                let pause = if open.is_empty() {
                    LIVENESS_CHECK_EVERY
                } else {
                    waits.next_wait()
                };
                table.wait_for(&self.changed, pause);
            }
        }
    }

    /// Returns whether several hosts write checkpoints together in this mount.
    pub(crate) fn has_other_hosts(&self) -> bool {
        self.hosts.is_some()
    }

    /// Makes the thread examine all scopes at once.
    pub(super) fn wake_hosts(&self) {
        self.table.lock().is_woken = true;
        self.changed.notify_all();
    }

    /// Takes one step of one scope, and returns whether a step was taken. A failure is logged once, and shown in the
    /// status.
    fn take_step(&self, scope: ScopeNumber, round: &mut DeadHostCache) -> bool {
        match self.try_step(scope, round) {
            Ok(went_on) => went_on,
            Err(error) => {
                let mut table = self.table.lock();
                let joint = table.joint_commits.entry(scope).or_default();
                if !std::mem::replace(&mut joint.is_failing, true) {
                    tracing::warn!(%error, "a step of a checkpoint of several hosts failed");
                }
                joint.waits_for = Some(error.to_string());
                false
            }
        }
    }

    /// Reads the ballot of a scope and takes the next step. Returns whether a step was taken; `false` means that it
    /// waits.
    fn try_step(
        &self,
        scope: ScopeNumber,
        round: &mut DeadHostCache,
    ) -> Result<bool, TransactionError> {
        let Some(transaction) = self.table.lock().scopes.get(&scope).cloned() else {
            return Ok(false);
        };
        let ballots = &self.gate.store().names_ballots;
        let Some(ballot) = ballots.find(&transaction.key)? else {
            // Another host has aborted the checkpoint and removed the ballot, so the part here is aborted too.
            self.end_joint(
                scope,
                &transaction,
                "other hosts have aborted the checkpoint",
                &BTreeSet::new(),
            );
            return Ok(true);
        };
        let view: NamesView<HostState, AttemptContent> = ballot.view()?;
        if view.has_event && view.decision.is_none() {
            self.follow_renames(scope, &transaction, &ballot)?;
        }
        let dead = round.dead_among(self, &view.joined);
        let Some((own, step)) = self.find_step(scope, &view_of_ballot(&view), &dead) else {
            return Ok(false);
        };
        match step {
            JointStep::Wait(what) => {
                let mut table = self.table.lock();
                let joint = table.joint_commits.entry(scope).or_default();
                // If only the event is missing, the status shows the text of this host's rule instead, which is more
                // exact.
                joint.waits_for = Some(what).filter(|what| what != EVENT);
                let answered = view
                    .joined
                    .iter()
                    .all(|host| view.states.contains_key(host));
                joint.is_answered = view.has_event && answered && joint.prepared.is_none();
                drop(table);
                self.changed.notify_all();
                return Ok(false);
            }
            JointStep::PutEvent => ballot.put_event(&self.event_of(scope))?,
            JointStep::PutState => ballot.put_state(&own.state)?,
            JointStep::Try(Attempt {
                number, changes, ..
            }) => {
                if !self.may_try(scope, number) {
                    return Ok(false);
                }
                ballot.put_attempt(number, &AttemptContent { changes })?;
            }
            JointStep::Publish(number) => {
                self.publish_part(scope, &transaction, number, &own, &ballot)?
            }
            JointStep::GiveUp { number, reason } => ballot.give_up(number, reason)?,
            JointStep::Judge(attempt) => self.judge(&attempt, &transaction, &ballot)?,
            JointStep::Decide { commit, reason } => {
                if !commit {
                    let paths = join_paths(&transaction.paths);
                    tracing::warn!(rule = transaction.rule, %paths, why = reason, "hosts drop a checkpoint");
                }
                ballot.settle(commit)?;
            }
            JointStep::Reopen(_) => self.reopen(scope, &transaction)?,
            JointStep::Apply => {
                // One host removes the checkpoints beyond `keep=N`. If it dies, another does so after the next commit.
                let is_first = view.joined.first() == self.hosts.as_ref().map(|own| &own.name);
                self.apply_joint(scope, &transaction, is_first)?;
            }
            JointStep::Undo => {
                self.end_joint(scope, &transaction, "one of the hosts has failed", &dead);
                ballot.remove_aborted(&dead)?;
            }
        }
        Ok(true)
    }

    /// Returns what this host publishes of the event: the renames of its tops.
    fn event_of(&self, scope: ScopeNumber) -> EventContent {
        let renamed = self.table.lock().machine.renamed_tops(scope);
        let paths = |[from, to]: [Vec<u8>; 2]| [from.as_slice().into(), to.as_slice().into()];
        EventContent {
            renamed: renamed.into_iter().map(paths).collect(),
        }
    }

    /// Renames the tops of this host's part as the host with the event has renamed its own. Each event is followed
    /// once.
    fn follow_renames(
        &self,
        scope: ScopeNumber,
        transaction: &Transaction,
        ballot: &NamesBallot<'_, LoggableStore>,
    ) -> Result<(), TransactionError> {
        let is_done = |joint: &mut JointCommit| std::mem::replace(&mut joint.has_followed, true);
        if is_done(self.table.lock().joint_commits.entry(scope).or_default()) {
            return Ok(());
        }
        let event: Option<EventContent> = ballot.event()?;
        for [from, to] in event.map(|event| event.renamed).unwrap_or_default() {
            let (from, to) = (from.as_bytes(), to.as_bytes());
            let is_beside =
                |path: &[u8]| parent_of(path) == transaction.dir && !last_name(path).is_empty();
            let writer = self.table.lock().machine.writer_of_top(scope, from);
            if let Some(writer) = writer.filter(|_| is_beside(from) && is_beside(to)) {
                self.rename_top(writer, &transaction.dir, [from, to])?;
            }
        }
        Ok(())
    }

    /// Renames one top in the name of the program that wrote it, so that the commit rule sees the change.
    fn rename_top(
        &self,
        writer: Writer,
        dir: &[u8],
        [from, to]: [&[u8]; 2],
    ) -> Result<(), TransactionError> {
        let (located_from, located_to) = (self.rules.locate(from), self.rules.locate(to));
        let operation = Operation::Rename {
            from: &located_from,
            to: &located_to,
        };
        let entered = self
            .table
            .lock()
            .machine
            .enter_operation(writer.process, &operation);
        let Ok(entered) = entered else {
            return Err(Errno::BUSY.into());
        };
        let engine = self.gate.engine();
        let rename = || {
            self.carry_out(entered.actions)?;
            let Some(Cached::Inode(dir)) = engine.tree.cached_at(dir) else {
                return Err(Errno::STALE);
            };
            let names = &engine.namespace;
            names.rename(
                dir,
                &last_name(from),
                dir,
                &last_name(to),
                RenameFlags::empty(),
            )
        };
        let renamed = rename();
        let mut table = self.table.lock();
        let mut more = table.machine.finish_operation(
            writer.process,
            &operation,
            entered.scope,
            renamed.is_ok(),
        );
        // The end of a program is reported only once. If the program has ended already, its end is reported again after
        // the rename.
        if !writer.is_living {
            more.extend(table.machine.note_exit(writer.process, Ending::Success));
        }
        drop(table);
        self.carry_out(more)?;
        let directory = engine.tree.cached_at(dir);
        directory.into_iter().for_each(&*self.invalidate_cache);
        Ok(renamed?)
    }

    /// Returns the state of this host's part and the next step of the scope; `None` if this host has no part in it.
    fn find_step(
        &self,
        scope: ScopeNumber,
        look: &JointView,
        dead: &BTreeSet<String>,
    ) -> Option<(OwnPart, JointStep)> {
        let hosts = self.hosts.as_ref()?;
        let table = self.table.lock();
        let mut own = table.machine.own_part(scope)?;
        let prepared = table
            .joint_commits
            .get(&scope)
            .and_then(|joint| joint.prepared);
        own.prepared_for = prepared.map(|(number, _)| number);
        own.is_late = prepared.is_some_and(|(_, since)| since.elapsed() > hosts.hosts_timeout);
        let obstacle = |states: &BTreeMap<String, HostState>| {
            table.machine.obstacle_among_hosts(scope, states)
        };
        let step = next_step(look, &hosts.name, &own, dead, &obstacle);
        Some((own, step))
    }

    /// Returns whether attempt `number` may begin now. After a failed attempt the pauses grow.
    fn may_try(&self, scope: ScopeNumber, number: u64) -> bool {
        let pause = ATTEMPT_RETRY.after(u32::try_from(number).unwrap_or(u32::MAX));
        let mut table = self.table.lock();
        let joint = table.joint_commits.entry(scope).or_default();
        if number > 1 && joint.tried.is_some_and(|tried| tried.elapsed() < pause) {
            return false;
        }
        joint.tried = Some(Instant::now());
        true
    }

    /// Prepares this host's part for attempt `number` and publishes it. If this fails, all hosts give the attempt up.
    fn publish_part(
        &self,
        scope: ScopeNumber,
        transaction: &Transaction,
        number: u64,
        own: &OwnPart,
        ballot: &NamesBallot<'_, LoggableStore>,
    ) -> Result<(), TransactionError> {
        // A failure of a program counts as a change of the part, so the other hosts must see it before the part is
        // prepared.
        self.note_failures(scope);
        let begun = self
            .table
            .lock()
            .machine
            .begin_attempt(scope, own.state.changes);
        // A change after the state was published would not be in what the hosts agree on.
        if !begun {
            let reason = "its programs have made more changes".to_owned();
            return Ok(ballot.give_up(number, reason)?);
        }
        let store = self.gate.store();
        let (dir, paths) = (&transaction.dir, &transaction.paths);
        let published = self.gate.quiesce_names(dir, paths, Pending::Drain, |_| {
            match store.transaction_numbered(transaction.serial) {
                Some(found) => Ok(found.publish_names(number)?),
                None => Err(Errno::STALE.into()),
            }
        });
        let mut table = self.table.lock();
        table.joint_commits.entry(scope).or_default().prepared = Some((number, Instant::now()));
        drop(table);
        if let Err(error) = published {
            ballot.give_up(number, error.to_string())?;
        }
        Ok(())
    }

    /// Compares what the hosts wrote, and publishes whether two of them conflict.
    fn judge(
        &self,
        attempt: &Attempt,
        transaction: &Transaction,
        ballot: &NamesBallot<'_, LoggableStore>,
    ) -> Result<(), TransactionError> {
        let hosts = attempt.changes.keys().cloned().collect();
        let verdict = ballot.test(attempt.number, &hosts)?;
        if let Verdict::Conflict(report) = &verdict {
            let paths = join_paths(&transaction.paths);
            let conflicts: Vec<String> = report
                .conflicts
                .iter()
                .take(20)
                .map(ToString::to_string)
                .collect();
            tracing::error!(rule = transaction.rule, %paths, ?conflicts, "hosts wrote the same part of a checkpoint");
        }
        ballot.judge(attempt.number, &verdict)?;
        Ok(())
    }

    /// Opens this host's part again after an attempt was given up, so that its programs may continue.
    fn reopen(
        &self,
        scope: ScopeNumber,
        transaction: &Transaction,
    ) -> Result<(), TransactionError> {
        let store = self.gate.store();
        if let Some(TransactionHandle::Prepared(prepared)) =
            store.transaction_numbered(transaction.serial)
        {
            prepared.reopen_names()?;
        }
        let mut table = self.table.lock();
        table.machine.note_commit_failed(scope);
        let joint = table.joint_commits.entry(scope).or_default();
        joint.prepared = None;
        joint.is_refused = true;
        drop(table);
        self.changed.notify_all();
        Ok(())
    }

    /// Commits this host's part after the hosts have decided so, and reports the end to the threads that wait.
    fn apply_joint(
        &self,
        scope: ScopeNumber,
        transaction: &Transaction,
        may_rotate: bool,
    ) -> Result<(), TransactionError> {
        let store = self.gate.store();
        let found = || store.transaction_numbered(transaction.serial);
        let applied = match found() {
            Some(TransactionHandle::Prepared(prepared)) => prepared
                .decide()
                .map_err(TransactionError::from)
                .and_then(|decided| Ok(decided.apply()?)),
            Some(TransactionHandle::Decided(decided)) => decided.apply().map_err(Into::into),
            Some(TransactionHandle::Open(_)) => Err(Errno::STALE.into()),
            None => Ok(()),
        };
        // If the part itself is applied and only the message to other hosts failed, the thread sends that message again
        // later.
        if found().is_some() {
            applied?;
        }
        let mut table = self.table.lock();
        let counts = table.counts.entry(transaction.rule.clone()).or_default();
        counts.commits += u64::from(!transaction.is_rotation);
        counts.removals += u64::from(transaction.is_rotation);
        table.scopes.remove(&scope);
        let mut more = table.machine.note_committed(scope);
        more.retain(|action| may_rotate || !matches!(action, Action::Rotate { .. }));
        table.note_end(scope, true);
        self.publish(table);
        // A rename that was the event holds the kernel's lock of the directory until it is answered, so the end is
        // published first.
        self.forget_names(transaction);
        self.table.lock().settle(scope);
        self.changed.notify_all();
        let paths = join_paths(&transaction.paths);
        tracing::info!(rule = transaction.rule, %paths, "a commit rule has committed a checkpoint of several hosts");
        if let Err(errno) = self.carry_out(more) {
            tracing::warn!(%errno, "an action after a commit of several hosts failed");
        }
        Ok(())
    }

    /// Aborts this host's part, and reports the end to the threads that wait.
    fn end_joint(
        &self,
        scope: ScopeNumber,
        transaction: &Transaction,
        reason: &str,
        dead: &BTreeSet<String>,
    ) {
        let mut table = self.table.lock();
        table.machine.note_aborting(scope);
        // A rename that was the event holds the kernel's lock of the directory until it is answered, so the end is
        // published first.
        table.note_end(scope, false);
        drop(table);
        self.changed.notify_all();
        let reason = match dead.first() {
            Some(host) => format!("{reason}: {host} is dead"),
            None => reason.to_owned(),
        };
        tracing::debug!(
            serial = transaction.serial,
            reason,
            "this host drops its part of a checkpoint of several hosts"
        );
        self.abort(scope, &reason);
    }

    /// Waits for the result of scopes whose event this host has seen, for at most `participants-wait`.
    ///
    /// Returns `Ok` if each scope is committed, or waits for a host that still writes. Fails with EIO if one is aborted
    /// or refused, and with ETIMEDOUT after the wait.
    pub(super) fn await_hosts(
        &self,
        scopes: &[ScopeNumber],
        event: EventKind,
    ) -> Result<(), Errno> {
        let Some(hosts) = &self.hosts else {
            return Ok(());
        };
        let deadline = Instant::now() + hosts.hosts_timeout;
        for scope in scopes {
            let mut table = self.table.lock();
            if let Some(joint) = table.joint_commits.get_mut(scope) {
                joint.is_answered = false;
                joint.is_refused = false;
            }
            loop {
                match table.joint_results.get(scope) {
                    Some(end) if !end.is_committed => return Err(Errno::IO),
                    Some(end) if end.is_settled || event != EventKind::Close => break,
                    Some(_) | None => {}
                }
                let joint = table.joint_commits.get(scope);
                if joint.is_some_and(|joint| joint.is_refused) {
                    return Err(Errno::IO);
                }
                let is_over =
                    !table.scopes.contains_key(scope) && !table.joint_results.contains_key(scope);
                let is_answered = joint.is_some_and(|joint| joint.is_answered);
                if is_over || (is_answered && event != EventKind::Next) {
                    break;
                }
                if Instant::now() >= deadline {
                    return Err(Errno::TIMEDOUT);
                }
                table.wait_for(&self.changed, Duration::from_millis(100));
            }
        }
        Ok(())
    }

    /// Returns whether to repeat a begin that failed because other hosts have not finished the last commit of the
    /// scope.
    ///
    /// Removes what dead hosts have left of it, and sleeps 20 ms. The answer is false after `participants-wait`.
    pub(super) fn may_begin_again(
        &self,
        error: &TransactionError,
        key: &[u8],
        since: Instant,
    ) -> bool {
        let TransactionError::Begin(firn_transact::BeginError::NotOver { hosts }) = error else {
            return false;
        };
        let Some(own) = &self.hosts else {
            return false;
        };
        let mut round = DeadHostCache {
            living: None,
            dead: BTreeSet::new(),
            looked: None,
        };
        let hosts: BTreeSet<String> = hosts.iter().cloned().collect();
        let dead = round.dead_among(self, &hosts);
        if !dead.is_empty()
            && let Err(errno) = self.gate.store().names_ballots.remove_aborted(key, &dead)
        {
            tracing::debug!(%errno, "cannot remove the rest of an aborted checkpoint");
        }
        let is_in_time = since.elapsed() < own.hosts_timeout;
        if is_in_time {
            std::thread::sleep(Duration::from_millis(20));
        }
        is_in_time
    }
}

impl super::Table {
    /// Notes that the kernel has dropped what it cached of the scope's names.
    fn settle(&mut self, scope: ScopeNumber) {
        if let Some(end) = self.joint_results.get_mut(&scope) {
            end.is_settled = true;
        }
    }

    /// Keeps the result of a scope for the threads that wait for it; the oldest results are dropped.
    pub(super) fn note_end(&mut self, scope: ScopeNumber, is_committed: bool) {
        self.joint_commits.remove(&scope);
        let end = JointResult {
            is_committed,
            is_settled: false,
        };
        self.joint_results.insert(scope, end);
        while self.joint_results.len() > RESULTS_MAX {
            self.joint_results.pop_first();
        }
    }
}

/// Turns what the ballot says into the input of [`next_step`].
fn view_of_ballot(view: &NamesView<HostState, AttemptContent>) -> JointView {
    let attempt = view.attempt.as_ref().map(|attempt| Attempt {
        number: attempt.number,
        changes: attempt.content.changes.clone(),
        published: attempt.published.clone(),
        is_clear: attempt
            .verdict
            .as_ref()
            .map(|verdict| *verdict == Verdict::Clear),
        is_conflict: matches!(attempt.verdict, Some(Verdict::Conflict(_))),
    });
    JointView {
        joined: view.joined.clone(),
        states: view.states.clone(),
        has_event: view.has_event,
        attempt,
        decision: view.decision,
    }
}
