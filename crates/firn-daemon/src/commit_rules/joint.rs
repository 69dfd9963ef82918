//! Commits checkpoints that several hosts write: takes this host's part of each from step to step.
//!
//! Terms
//! * The *part* of a host is what its programs have changed in a scope (the names of one checkpoint).
//! * The *ballot* of a scope is a directory in the backing with the published state of each host's part, and the
//!   decision.
//! * The *event* is the close, rename or unlink that completes a checkpoint by its rule.
//! * A *top* is a name of the checkpoint in its directory, such as `step_5`.
//! * A part is *prepared* when its changes are complete and wait for the decision.
//!
//! ```text
//!   event ──► state of each host ──► attempt N ──► each host prepares ──► verdict ──► decision ──► apply or abort
//!                                        ▲                    │ given up
//!                                        └── open again ◄─────┘
//! ```
//!
//! One thread, `firn-rule-hosts`, reads the ballots of the scopes that are open here, and takes the step that
//! [`firn_rules::joint::next_step`] returns. Only this thread calls the backing (the directory that all hosts share)
//! for that. So a backing that hangs delays a close for at most `participants-wait`.
//!
//! Promises
//! * A part is prepared only while no program changes it, and only in the state that its host has published.
//! * The program that makes the event waits while the hosts commit, but does not wait for a host that still writes. The
//!   first change of the next checkpoint waits for that host too, if one transaction would have both.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use firn_backing::backoff::Backoff;
use firn_backing::{Errno, RenameFlags};
use firn_engine::Cached;
use firn_hosts::LeaseUse;
use firn_protocol::path::BytePath;
use firn_rules::joint::{Attempt, EVENT, HostState, JointStep, JointView, OwnPart, next_step};
use firn_rules::{Action, Ending, EnteredOperation, Operation, ScopeNumber, Writer};
use firn_transact::machine::Pending;
use firn_transact::{
    NamesBallot, NamesView, TransactionError, TransactionHandle, Verdict, parent_of,
};
use serde::{Deserialize, Serialize};

use super::{CommitRules, Transaction, describe_paths, last_name};
use crate::host_lease::LivingHosts;
use crate::store::LoggableStore;

/// Pauses between two reads of what other hosts have published.
const READ_RETRY: Backoff = Backoff::new(Duration::from_millis(2), Duration::from_millis(200));
/// Pauses between two attempts to commit.
const ATTEMPT_RETRY: Backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(5));
/// Pause between two checks of a program's thread that waits for other hosts. Each change of the table ends the pause.
const WAIT_CHECK_EVERY: Duration = Duration::from_millis(100);
/// Pause between two attempts to begin a scope of which other hosts have not finished the last commit.
pub(super) const BEGIN_RETRY_EVERY: Duration = Duration::from_millis(20);
/// Pause between two checks whether other hosts are alive.
const LIVENESS_CHECK_EVERY: Duration = Duration::from_secs(1);
/// Limit of conflicts that the log names.
const LOGGED_CONFLICTS_MAX: usize = 20;
/// Limit of results of ended scopes that are kept for the threads that wait for them.
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
    pub(super) host: String,
    /// Maximum wait of a program for other hosts (`participants-wait`).
    pub(super) hosts_timeout: Duration,
}

/// How a scope that several hosts wrote has ended.
#[derive(Clone, Copy)]
pub(super) struct JointResult {
    outcome: JointOutcome,
    /// The kernel has dropped what it cached of the scope's names.
    is_cache_clear: bool,
}

/// Whether the hosts have committed a scope.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum JointOutcome {
    Committed,
    Aborted,
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

/// What this host knows of the commit of one open scope.
#[derive(Default)]
pub(super) struct JointCommit {
    /// The attempt that this host is prepared for.
    prepared: Option<PreparedAttempt>,
    /// What the commit waits for, for the status.
    pub(super) waits_for: Option<String>,
    /// All hosts have published their state since the event, and the commit still waits for one of them.
    is_answered: bool,
    /// The last attempt was refused.
    is_refused: bool,
    /// The tops were renamed as the host with the event has renamed its own.
    has_followed_renames: bool,
    /// A step has failed; the failure was logged.
    is_failing: bool,
    /// When this host last began an attempt.
    last_attempt: Option<Instant>,
}

/// An attempt to commit that this host is prepared for.
#[derive(Clone, Copy)]
struct PreparedAttempt {
    number: u64,
    since: Instant,
}

/// The dead hosts of the last check, which is repeated at most once in [`LIVENESS_CHECK_EVERY`].
#[derive(Default)]
struct DeadHostCache {
    /// Reads the leases of other hosts; opened by the first check.
    living_hosts: Option<LivingHosts>,
    dead: BTreeSet<String>,
    last_check: Option<Instant>,
}

impl DeadHostCache {
    /// Returns which of `hosts` are dead. This host counts as alive.
    fn find_dead(&mut self, rules: &CommitRules, hosts: &BTreeSet<String>) -> BTreeSet<String> {
        let is_check_due = match self.last_check {
            Some(last_check) => last_check.elapsed() > LIVENESS_CHECK_EVERY,
            None => true,
        };
        if is_check_due {
            self.last_check = Some(Instant::now());
            self.check_hosts(rules, hosts);
        }
        self.dead.intersection(hosts).cloned().collect()
    }

    /// Checks which of `hosts` are dead. A host counts as alive if its state cannot be read.
    fn check_hosts(&mut self, rules: &CommitRules, hosts: &BTreeSet<String>) {
        let own_host = rules.joint_settings.as_ref().map(|settings| &settings.host);
        self.dead.clear();
        for host in hosts.iter().filter(|host| Some(*host) != own_host) {
            match self.is_living(rules, host) {
                Ok(true) => {}
                Ok(false) => {
                    self.dead.insert(host.clone());
                }
                Err(errno) => {
                    tracing::debug!(%errno, host, "cannot find out whether a host is alive")
                }
            }
        }
    }

    /// Returns whether a host has its lease.
    fn is_living(&mut self, rules: &CommitRules, host: &str) -> Result<bool, Errno> {
        let living_hosts = match self.living_hosts.take() {
            Some(living_hosts) => living_hosts,
            None => {
                let settings = rules.joint_settings.as_ref();
                let own_host = settings.map_or("", |settings| &settings.host);
                let backing = rules.gate.backing();
                LivingHosts::open(backing, LeaseUse::Transactions, own_host)
                    .map_err(|_| Errno::IO)?
            }
        };
        self.living_hosts.insert(living_hosts).is_living(host)
    }
}

impl CommitRules {
    /// Runs the thread that commits checkpoints which several hosts write, until [`CommitRules::stop`]. In each round
    /// it reads what the other hosts have published about each open checkpoint, and takes the next step of its commit.
    ///
    /// Only this thread calls the backing for these steps.
    pub(crate) fn run_joint_commits(&self) {
        let mut dead_hosts = DeadHostCache::default();
        // The pauses between reads of the ballots become longer; after each step they are short again.
        let mut backoff = READ_RETRY.start();
        loop {
            let open_scopes: Vec<ScopeNumber> = {
                let table = self.table.lock();
                if table.is_stopped {
                    return;
                }
                table.scopes.keys().copied().collect()
            };
            // Repeats messages to other hosts that could not be sent when a commit was applied.
            if let Err(errno) = self.gate.store().leave_applied_commits() {
                tracing::debug!(%errno, "other hosts cannot be informed of a commit yet");
            }
            let mut has_taken_step = false;
            for scope in &open_scopes {
                has_taken_step |= self.take_step(*scope, &mut dead_hosts);
            }
            if has_taken_step {
                backoff.reset();
            }
            let mut table = self.table.lock();
            if std::mem::take(&mut table.must_read_ballots) {
                backoff.reset();
            } else if !table.is_stopped {
                // `changed` ends the pause at each change of the table.
                let pause = if open_scopes.is_empty() {
                    LIVENESS_CHECK_EVERY
                } else {
                    backoff.next_wait()
                };
                table.wait_for(&self.changed, pause);
            }
        }
    }

    /// Returns whether several hosts write checkpoints together in this mount.
    pub(crate) fn has_other_hosts(&self) -> bool {
        self.joint_settings.is_some()
    }

    /// Makes the thread that commits with other hosts examine all scopes at once.
    pub(super) fn wake_joint_commit_thread(&self) {
        self.table.lock().must_read_ballots = true;
        self.changed.notify_all();
    }

    /// Takes one step of one scope, and returns whether a step was taken. A failure is logged once, and shown in the
    /// status.
    fn take_step(&self, scope: ScopeNumber, dead_hosts: &mut DeadHostCache) -> bool {
        let error = match self.try_step(scope, dead_hosts) {
            Ok(has_taken_step) => return has_taken_step,
            Err(error) => error,
        };
        let mut table = self.table.lock();
        let joint = table.joint_commits.entry(scope).or_default();
        if !joint.is_failing {
            tracing::warn!(%error, "cannot go on with a checkpoint of several hosts; firnd tries again");
        }
        joint.is_failing = true;
        joint.waits_for = Some(error.to_string());
        false
    }

    /// Reads the ballot of a scope and takes the next step. Returns whether a step was taken; `false` means that it
    /// waits.
    fn try_step(
        &self,
        scope: ScopeNumber,
        dead_hosts: &mut DeadHostCache,
    ) -> Result<bool, TransactionError> {
        let Some(transaction) = self.find_transaction(scope) else {
            return Ok(false);
        };
        let ballots = &self.gate.store().names_ballots;
        let Some(ballot) = ballots.find(&transaction.key)? else {
            // Another host has aborted the checkpoint and removed the ballot, so the part here is aborted too.
            let reason = "other hosts have aborted the checkpoint";
            self.abort_part(scope, &transaction, reason, &BTreeSet::new());
            return Ok(true);
        };
        let view: BallotView = ballot.view()?;
        if view.has_event && view.decision.is_none() {
            self.follow_renames(scope, &transaction, &ballot)?;
        }
        let dead = dead_hosts.find_dead(self, &view.joined);
        let Some((own_part, step)) = self.find_step(scope, &joint_view(&view), &dead) else {
            return Ok(false);
        };
        match step {
            JointStep::Wait(obstacle) => {
                self.record_wait(scope, &view, obstacle);
                return Ok(false);
            }
            JointStep::PutEvent => ballot.put_event(&self.event_content(scope))?,
            JointStep::PutState => ballot.put_state(&own_part.state)?,
            JointStep::Try(Attempt {
                number, changes, ..
            }) => {
                if !self.may_begin_attempt(scope, number) {
                    return Ok(false);
                }
                ballot.put_attempt(number, &AttemptContent { changes })?;
            }
            JointStep::Publish(number) => {
                self.publish_part(scope, &transaction, number, &own_part, &ballot)?
            }
            JointStep::GiveUp { number, reason } => ballot.give_up(number, reason)?,
            JointStep::Judge(attempt) => self.judge_conflicts(&attempt, &transaction, &ballot)?,
            JointStep::Decide { commit, reason } => {
                if !commit {
                    let paths = describe_paths(&transaction.paths);
                    tracing::warn!(rule = transaction.rule, %paths, why = reason, "all hosts drop a checkpoint");
                }
                ballot.settle(commit)?;
            }
            JointStep::Reopen(_) => self.reopen_part(scope, &transaction)?,
            JointStep::Apply => {
                // One host removes the checkpoints beyond `keep=N`. If it dies, another does so after the next commit.
                let own_host = self.joint_settings.as_ref().map(|settings| &settings.host);
                let may_rotate = view.joined.first() == own_host;
                self.apply_part(scope, &transaction, may_rotate)?;
            }
            JointStep::Undo => {
                self.abort_part(scope, &transaction, "one of the hosts has failed", &dead);
                ballot.remove_aborted(&dead)?;
            }
        }
        Ok(true)
    }

    /// Records what the commit of a scope waits for, and notifies the threads that wait for its result.
    fn record_wait(&self, scope: ScopeNumber, view: &BallotView, obstacle: String) {
        let have_all_published = view
            .joined
            .iter()
            .all(|host| view.states.contains_key(host));
        let mut table = self.table.lock();
        let joint = table.joint_commits.entry(scope).or_default();
        // If only the event is missing, the status shows the text of this host's rule instead, which is more exact.
        joint.waits_for = Some(obstacle).filter(|obstacle| obstacle != EVENT);
        joint.is_answered = view.has_event && have_all_published && joint.prepared.is_none();
        drop(table);
        self.changed.notify_all();
    }

    /// Returns what this host publishes of the event: the renames of its tops.
    fn event_content(&self, scope: ScopeNumber) -> EventContent {
        let renamed_tops = self.table.lock().machine.renamed_tops(scope);
        let mut renamed = Vec::new();
        for [from, to] in renamed_tops {
            renamed.push([from.as_slice().into(), to.as_slice().into()]);
        }
        EventContent { renamed }
    }

    /// Renames this host's names of a checkpoint as another host has renamed its own, for example from `step_5.tmp` to
    /// `step_5`. The other host has recorded its renames in the `ballot` (the directory in which the hosts agree), with
    /// the event that completes the checkpoint.
    ///
    /// The renames are made once for each checkpoint. After an error the next call tries again.
    fn follow_renames(
        &self,
        scope: ScopeNumber,
        transaction: &Transaction,
        ballot: &NamesBallot<'_, LoggableStore>,
    ) -> Result<(), TransactionError> {
        let mut table = self.table.lock();
        let joint = table.joint_commits.entry(scope).or_default();
        let has_followed = std::mem::replace(&mut joint.has_followed_renames, true);
        // The ballot is in the backing, which may be slow.
        drop(table);
        if has_followed {
            return Ok(());
        }
        let followed = self.rename_tops_of_event(scope, transaction, ballot);
        if followed.is_err() {
            let mut table = self.table.lock();
            let joint = table.joint_commits.entry(scope).or_default();
            joint.has_followed_renames = false;
        }
        followed
    }

    /// Makes the renames of the ballot's event, as far as this host has not made them yet.
    fn rename_tops_of_event(
        &self,
        scope: ScopeNumber,
        transaction: &Transaction,
        ballot: &NamesBallot<'_, LoggableStore>,
    ) -> Result<(), TransactionError> {
        let Some(event): Option<EventContent> = ballot.event()? else {
            return Ok(());
        };
        let is_in_dir =
            |path: &[u8]| parent_of(path) == transaction.dir && !last_name(path).is_empty();
        for [from, to] in &event.renamed {
            let from = from.as_bytes();
            let to = to.as_bytes();
            let writer = self.table.lock().machine.writer_of_top(scope, from);
            // The ballot comes from another host, so its paths are checked.
            if let Some(writer) = writer
                && is_in_dir(from)
                && is_in_dir(to)
            {
                self.rename_top(writer, &transaction.dir, from, to)?;
            }
        }
        Ok(())
    }

    /// Renames one name of a checkpoint on behalf of the program `writer` that wrote it. The rules' state machine is
    /// told of the change before and after it, as for a change of a program. Fails with EBUSY if a rule refuses it.
    fn rename_top(
        &self,
        writer: Writer,
        dir: &[u8],
        from: &[u8],
        to: &[u8],
    ) -> Result<(), TransactionError> {
        let located_from = self.rules.locate(from);
        let located_to = self.rules.locate(to);
        let operation = Operation::Rename {
            from: &located_from,
            to: &located_to,
        };
        let mut table = self.table.lock();
        let entered = table.machine.enter_operation(writer.process, &operation);
        // The actions and the rename take the lock themselves.
        drop(table);
        let Ok(EnteredOperation { actions, scope }) = entered else {
            return Err(Errno::BUSY.into());
        };
        let engine = self.gate.engine();
        let rename = || {
            self.carry_out(actions)?;
            let Some(Cached::Inode(dir_inode)) = engine.tree.cached_at(dir) else {
                return Err(Errno::STALE);
            };
            let flags = RenameFlags::empty();
            let namespace = &engine.namespace;
            namespace.rename(
                dir_inode,
                &last_name(from),
                dir_inode,
                &last_name(to),
                flags,
            )
        };
        let renamed = rename();
        let mut table = self.table.lock();
        let mut next_actions =
            table
                .machine
                .finish_operation(writer.process, &operation, scope, renamed.is_ok());
        // The end of a program is reported only once. If the program has ended already, its end is reported again after
        // the rename.
        if !writer.is_living {
            next_actions.extend(table.machine.record_exit(writer.process, Ending::Success));
        }
        drop(table);
        self.carry_out(next_actions)?;
        let directory = engine.tree.cached_at(dir);
        directory.into_iter().for_each(&*self.invalidate_cache);
        Ok(renamed?)
    }

    /// Decides the next step of a checkpoint's commit on this host. Also returns the state of this host's part: what
    /// its programs wrote. `None` if this host has no part.
    ///
    /// `published` is what the hosts have published, and `dead` are the hosts that do not live any more.
    fn find_step(
        &self,
        scope: ScopeNumber,
        published: &JointView,
        dead: &BTreeSet<String>,
    ) -> Option<(OwnPart, JointStep)> {
        let settings = self.joint_settings.as_ref()?;
        let table = self.table.lock();
        let mut own_part = table.machine.own_part(scope)?;
        let joint = table.joint_commits.get(&scope);
        let prepared = joint.and_then(|joint| joint.prepared);
        own_part.prepared_for = prepared.map(|prepared| prepared.number);
        own_part.is_late =
            prepared.is_some_and(|prepared| prepared.since.elapsed() > settings.hosts_timeout);
        let find_obstacle = |states: &BTreeMap<String, HostState>| {
            table.machine.obstacle_among_hosts(scope, states)
        };
        let step = next_step(published, &settings.host, &own_part, dead, &find_obstacle);
        Some((own_part, step))
    }

    /// Returns whether attempt `number` may begin now. After a failed attempt the pauses grow.
    fn may_begin_attempt(&self, scope: ScopeNumber, number: u64) -> bool {
        let pause = ATTEMPT_RETRY.after(u32::try_from(number).unwrap_or(u32::MAX));
        let mut table = self.table.lock();
        let joint = table.joint_commits.entry(scope).or_default();
        let is_first_attempt = number <= 1;
        if !is_first_attempt
            && let Some(last_attempt) = joint.last_attempt
            && last_attempt.elapsed() < pause
        {
            return false;
        }
        joint.last_attempt = Some(Instant::now());
        true
    }

    /// Prepares this host's part of a checkpoint (what its programs wrote) for attempt `number` to commit, and
    /// publishes that in the ballot, the directory in which the hosts agree. Until the attempt ends, no program changes
    /// the part. If this fails, all hosts give the attempt up.
    fn publish_part(
        &self,
        scope: ScopeNumber,
        transaction: &Transaction,
        number: u64,
        own_part: &OwnPart,
        ballot: &NamesBallot<'_, LoggableStore>,
    ) -> Result<(), TransactionError> {
        if !self.close_part(scope, own_part) {
            let reason = "its programs have made more changes".to_owned();
            return Ok(ballot.give_up(number, reason)?);
        }
        let store = self.gate.store();
        let Transaction { dir, paths, .. } = transaction;
        let published = self.gate.quiesce_names(dir, paths, Pending::Drain, |_| {
            match store.transaction_numbered(transaction.serial) {
                Some(handle) => Ok(handle.publish_names(number)?),
                None => Err(Errno::STALE.into()),
            }
        });
        // A closed part counts as prepared, even if it could not be published. So it is opened again once the attempt
        // is given up.
        self.record_prepared(scope, number);
        if let Err(error) = published {
            ballot.give_up(number, error.to_string())?;
        }
        Ok(())
    }

    /// Closes this host's part of a checkpoint: its programs must wait before they change it again. Returns false if
    /// they have changed it since its state was published, or may still change it: the hosts agree on that state only.
    fn close_part(&self, scope: ScopeNumber, own_part: &OwnPart) -> bool {
        // A failure of a program counts as a change of the part, so the other hosts must see it before the part is
        // prepared.
        self.report_failed_writers(scope);
        let mut table = self.table.lock();
        table.machine.begin_attempt(scope, own_part.state.changes)
    }

    /// Records that this host's part is prepared for attempt `number`.
    fn record_prepared(&self, scope: ScopeNumber, number: u64) {
        let mut table = self.table.lock();
        table.joint_commits.entry(scope).or_default().prepared = Some(PreparedAttempt {
            number,
            since: Instant::now(),
        });
    }

    /// Compares what the hosts wrote of a checkpoint, and publishes the verdict in the ballot, the directory in which
    /// the hosts agree. A conflict means that two hosts wrote the same part, and is logged.
    fn judge_conflicts(
        &self,
        attempt: &Attempt,
        transaction: &Transaction,
        ballot: &NamesBallot<'_, LoggableStore>,
    ) -> Result<(), TransactionError> {
        let hosts = attempt.changes.keys().cloned().collect();
        let verdict = ballot.test(attempt.number, &hosts)?;
        if let Verdict::Conflict(report) = &verdict {
            let paths = describe_paths(&transaction.paths);
            let first_conflicts = report.conflicts.iter().take(LOGGED_CONFLICTS_MAX);
            let conflicts: Vec<String> = first_conflicts.map(ToString::to_string).collect();
            tracing::error!(rule = transaction.rule, %paths, ?conflicts, "hosts wrote the same part of a checkpoint");
        }
        ballot.judge(attempt.number, &verdict)?;
        Ok(())
    }

    /// Opens this host's part of a checkpoint again after an attempt to commit was given up, so that its programs may
    /// continue to change it. Programs that wait for the commit get an error.
    fn reopen_part(
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
        table.machine.record_commit_failed(scope);
        let joint = table.joint_commits.entry(scope).or_default();
        joint.prepared = None;
        joint.is_refused = true;
        // Programs that wait see now that the attempt was refused.
        drop(table);
        self.changed.notify_all();
        Ok(())
    }

    /// Commits this host's part of a checkpoint after the hosts have decided so, and reports the end to the threads of
    /// programs that wait. With `may_rotate` old checkpoints that the rule no longer keeps are removed afterwards.
    fn apply_part(
        &self,
        scope: ScopeNumber,
        transaction: &Transaction,
        may_rotate: bool,
    ) -> Result<(), TransactionError> {
        let apply_result = self.decide_and_apply(transaction);
        // If the transaction is gone, the part is applied, so an error means only that the message to other hosts has
        // failed. The thread sends that message again later.
        let store = self.gate.store();
        if store.transaction_numbered(transaction.serial).is_some() {
            apply_result?;
        }
        let mut table = self.table.lock();
        let counts = table.counts.entry(transaction.rule.clone()).or_default();
        if transaction.is_removal {
            counts.removals += 1;
        } else {
            counts.commits += 1;
        }
        table.scopes.remove(&scope);
        let mut next_actions = table.machine.record_committed(scope);
        next_actions.retain(|action| may_rotate || !matches!(action, Action::Rotate { .. }));
        table.record_joint_result(scope, JointOutcome::Committed);
        self.unlock_and_notify(table);
        // The program that completed the checkpoint by a rename still waits in the kernel, which keeps the directory
        // locked. So that program is woken before the kernel is told to forget names.
        self.invalidate_names(transaction);
        self.table.lock().record_cache_cleared(scope);
        self.changed.notify_all();
        let paths = describe_paths(&transaction.paths);
        tracing::info!(rule = transaction.rule, %paths, "a commit rule has committed a checkpoint of several hosts");
        if let Err(errno) = self.carry_out(next_actions) {
            tracing::warn!(%errno, "cannot do all that follows a commit of several hosts");
        }
        Ok(())
    }

    /// Decides and applies the commit of a transaction that is prepared or decided. Does nothing if it has ended
    /// already.
    fn decide_and_apply(&self, transaction: &Transaction) -> Result<(), TransactionError> {
        let store = self.gate.store();
        match store.transaction_numbered(transaction.serial) {
            Some(TransactionHandle::Prepared(prepared)) => Ok(prepared.decide()?.apply()?),
            Some(TransactionHandle::Decided(decided)) => Ok(decided.apply()?),
            Some(TransactionHandle::Open(_)) => Err(Errno::STALE.into()),
            None => Ok(()),
        }
    }

    /// Aborts this host's part of a checkpoint (undoes what its programs wrote), and reports the end to the threads of
    /// programs that wait. `dead` are hosts that do not live any more; the first is added to the logged `reason`.
    fn abort_part(
        &self,
        scope: ScopeNumber,
        transaction: &Transaction,
        reason: &str,
        dead: &BTreeSet<String>,
    ) {
        let mut table = self.table.lock();
        table.machine.record_abort_begun(scope);
        // The program that completed the checkpoint by a rename may still wait in the kernel, which keeps the directory
        // locked. So that program is woken before the abort, which tells the kernel to forget names.
        table.record_joint_result(scope, JointOutcome::Aborted);
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
        self.abort_scope(scope, &reason);
    }

    /// Lets a program wait until the hosts have committed checkpoints, for at most `participants-wait`. `scopes` are
    /// their numbers, and `event` is what the program has done.
    ///
    /// Does not wait for a host that still writes its part, unless `event` is the first change of the next checkpoint.
    /// Fails with EIO if a checkpoint is aborted or its commit refused, and with ETIMEDOUT after the wait.
    pub(super) fn await_hosts(
        &self,
        scopes: &[ScopeNumber],
        event: EventKind,
    ) -> Result<(), Errno> {
        let Some(settings) = &self.joint_settings else {
            return Ok(());
        };
        let deadline = Instant::now() + settings.hosts_timeout;
        for scope in scopes {
            let mut table = self.table.lock();
            // The flags may be older than this event, so they are cleared. The thread of the commit sets them again.
            if let Some(joint) = table.joint_commits.get_mut(scope) {
                joint.is_answered = false;
                joint.is_refused = false;
            }
            while table.must_wait_for_hosts(*scope, event)? {
                if Instant::now() >= deadline {
                    return Err(Errno::TIMEDOUT);
                }
                table.wait_for(&self.changed, WAIT_CHECK_EVERY);
            }
        }
        Ok(())
    }

    /// Returns whether to repeat a begin of a transaction, after a pause of [`BEGIN_RETRY_EVERY`]: it failed because
    /// other hosts have not finished the last commit of the same names. Removes what dead hosts have left of that
    /// commit. `key` identifies the names on all hosts.
    ///
    /// Returns false for any other error, and once `participants-wait` has passed since `began_waiting`.
    pub(super) fn prepare_to_begin_again(
        &self,
        error: &TransactionError,
        key: &[u8],
        began_waiting: Instant,
    ) -> bool {
        let TransactionError::Begin(firn_transact::BeginError::NotOver { hosts }) = error else {
            return false;
        };
        let Some(settings) = &self.joint_settings else {
            return false;
        };
        let hosts: BTreeSet<String> = hosts.iter().cloned().collect();
        let dead = DeadHostCache::default().find_dead(self, &hosts);
        if !dead.is_empty()
            && let Err(errno) = self.gate.store().names_ballots.remove_aborted(key, &dead)
        {
            tracing::debug!(%errno, "cannot remove the rest of an aborted checkpoint");
        }
        began_waiting.elapsed() < settings.hosts_timeout
    }
}

impl super::RuleTable {
    /// Returns whether a program must wait longer for the other hosts of a checkpoint. `event` is what the program has
    /// done: the change that completes the checkpoint, or the first change of the next one.
    ///
    /// Returns false once the checkpoint is committed, or waits for a host that still writes. Fails with EIO if it is
    /// aborted, or if the last attempt to commit it was refused. The caller holds the lock of this table.
    fn must_wait_for_hosts(&self, scope: ScopeNumber, event: EventKind) -> Result<bool, Errno> {
        let result = self.joint_results.get(&scope);
        if let Some(result) = result {
            if result.outcome == JointOutcome::Aborted {
                return Err(Errno::IO);
            }
            // After a close, programs must see the committed names. So the close also waits until the kernel's cache is
            // clear.
            if result.is_cache_clear || event != EventKind::Close {
                return Ok(false);
            }
        }
        if let Some(joint) = self.joint_commits.get(&scope) {
            if joint.is_refused {
                return Err(Errno::IO);
            }
            // All hosts have answered, and one of them still writes. Only the next checkpoint waits for that host.
            if joint.is_answered && event != EventKind::Next {
                return Ok(false);
            }
        }
        // A checkpoint without an open scope or a result has no commit to wait for.
        let is_known = result.is_some() || self.scopes.contains_key(&scope);
        Ok(is_known)
    }

    /// Records that the kernel has dropped what it cached of the scope's names.
    fn record_cache_cleared(&mut self, scope: ScopeNumber) {
        if let Some(result) = self.joint_results.get_mut(&scope) {
            result.is_cache_clear = true;
        }
    }

    /// Keeps the result of a scope for the threads that wait for it; the oldest results are dropped.
    pub(super) fn record_joint_result(&mut self, scope: ScopeNumber, outcome: JointOutcome) {
        self.joint_commits.remove(&scope);
        let result = JointResult {
            outcome,
            is_cache_clear: false,
        };
        self.joint_results.insert(scope, result);
        while self.joint_results.len() > RESULTS_MAX {
            self.joint_results.pop_first();
        }
    }
}

/// What the ballot of a scope says.
type BallotView = NamesView<HostState, AttemptContent>;

/// Converts what the hosts have published in a ballot (the directory in which they agree on a commit) to the input of
/// [`next_step`].
fn joint_view(view: &BallotView) -> JointView {
    // The verdict says whether the hosts' changes conflict. It is `None` until one host has compared them.
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
