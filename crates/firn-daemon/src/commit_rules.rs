//! Runs the commit rules of a mount: changes of programs begin, commit and abort transactions.
//!
//! ```text
//!   firn-fuse ── before, after a change, close ──► CommitRules ──► firn_rules::Machine
//!                                                      │ begin, join, commit, abort
//!   exits of writers (pidfd) ────────────────────► ────┘ ──► gate, firn-transact
//! ```
//!
//! Promises
//! * A change in a scope is made only while the transaction of the scope is open; otherwise it waits. So no change of a
//!   program comes between a commit and the begin that follows it.
//! * The lock of the table is held only briefly, and never during a call of the backing.
//! * A thread that carries out an abort answers no request, so the kernel waits for nothing that it holds.

mod descriptors;
mod exits;
mod jobs;
mod joint;
mod rotation;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read as _};
use std::iter;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use firn_backing::lock::{Mutex, MutexGuard};
use firn_backing::{Caller, Errno, join_path};
use firn_engine::{Closing, HandleId, InodeId};
use firn_format::mountinfo;
use firn_format::quote::quoted;
use firn_fuse::{ChangeWatch, WatchTicket, WatchedChange};
use firn_protocol::Status;
use firn_rules::{
    Action, Ending, LocatedPath, Machine, NOT_OPEN, Operation, RULES_BYTES_MAX, RuleSet,
    RuleSetError, ScopeNumber, load_rules,
};
use firn_transact::machine::Pending;
use firn_transact::{Expected, TransactionError, TransactionHandle};
use parking_lot::Condvar;

use self::exits::ExitWatcher;
use self::joint::{EventKind, JointCommit, JointResult, JointSettings};
use crate::error::MountError;
use crate::gate::TransactionGate;
use crate::parts::InvalidateCache;
use crate::process::find_process;

/// Maximum time that a close waits for a child's exec. A child that executes no other program keeps its descriptors.
const EXEC_TIMEOUT: Duration = Duration::from_secs(1);
/// The same for a descriptor without FD_CLOEXEC. An exec removes the flag from all descriptors before it closes them.
const INHERITED_TIMEOUT: Duration = Duration::from_millis(50);

/// Loads the rules that the option `rules` names.
pub(crate) fn load(words: &[String]) -> Result<RuleSet, RuleSetError> {
    load_rules(&words.join(","), read_rules)
}

/// Reads at most one byte more than a file of rules may have, so that a longer file is detected.
fn read_rules(path: &str) -> io::Result<String> {
    let mut text = String::new();
    let file = File::open(path)?;
    file.take(RULES_BYTES_MAX as u64 + 1)
        .read_to_string(&mut text)?;
    Ok(text)
}

/// Numbers of the outcomes of a rule's scopes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) commits: u64,
    pub(crate) aborts: u64,
    pub(crate) failures: u64,
    /// Number of checkpoints that were removed because of `keep`.
    pub(crate) removals: u64,
}

/// The commit rules of one mount.
pub(crate) struct CommitRules {
    gate: Arc<TransactionGate>,
    invalidate_cache: InvalidateCache,
    /// The rules, for look-ups of paths without the lock of the table.
    rules: Arc<RuleSet>,
    table: Mutex<Table>,
    /// No scope is open. A change that no rule concerns then needs no look into the table.
    has_no_scope: AtomicBool,
    /// Signals changes of the table, such as the begin or the end of a scope.
    changed: Condvar,
    exits: ExitWatcher,
    /// Set if several hosts write checkpoints together.
    hosts: Option<JointSettings>,
}

struct Table {
    machine: Machine,
    scopes: BTreeMap<ScopeNumber, Transaction>,
    /// Handles that are open in scopes, by number.
    handles: HashMap<u64, OpenHandle>,
    /// Admitted changes that are in progress, by number of the ticket.
    admitted_changes: HashMap<u64, AdmittedChange>,
    last_change_number: u64,
    counts: BTreeMap<String, Counts>,
    /// Rules with the directories in which there may be more checkpoints than the rule keeps.
    rotations: BTreeSet<(usize, Vec<u8>)>,
    /// Aborts for the thread that watches exits, which holds nothing that the kernel waits for.
    deferred: Vec<Action>,
    /// States of open scopes that several hosts write.
    joint_commits: BTreeMap<ScopeNumber, JointCommit>,
    /// Results of scopes that several hosts wrote, after their end.
    joint_results: BTreeMap<ScopeNumber, JointResult>,
    /// Makes the thread that reads the ballots of other hosts begin its next round at once.
    is_woken: bool,
    is_stopped: bool,
}

/// A handle that is open in a scope.
#[derive(Clone, Copy, Debug)]
struct OpenHandle {
    /// The process that opened the handle.
    opener: u32,
    /// The last close by a process that had inherited the handle; `None` if that process is no known writer.
    last: Option<LastClose>,
    /// Number of closes by processes that had inherited the handle.
    inherited_closes: u64,
}

/// A close by a process that had inherited the descriptor.
#[derive(Clone, Copy, Debug)]
struct LastClose {
    process: u32,
    ending: Ending,
}

/// The transaction of a scope.
#[derive(Clone)]
struct Transaction {
    rule: String,
    serial: u64,
    dir: Vec<u8>,
    paths: BTreeSet<Vec<u8>>,
    /// The key by which other hosts identify the scope.
    key: Vec<u8>,
    /// The transaction removes a checkpoint that the rule no longer keeps.
    is_rotation: bool,
}

impl Table {
    /// Returns the number of closes of a handle by processes that had inherited it.
    fn inherited_closes(&self, handle: HandleId) -> u64 {
        let open = self.handles.get(&handle.0);
        open.map_or(0, |open| open.inherited_closes)
    }
}

/// An admitted change that is in progress.
struct AdmittedChange {
    process: u32,
    change: OwnedChange,
    scope: Option<ScopeNumber>,
}

/// A change, with the paths that it concerns.
#[derive(Clone, Debug)]
enum OwnedChange {
    Open(LocatedPath),
    Change(LocatedPath),
    Remove(LocatedPath),
    Rename(LocatedPath, LocatedPath),
}

impl OwnedChange {
    fn paths(&self) -> impl Iterator<Item = &LocatedPath> {
        let (first, second) = match self {
            Self::Open(path) | Self::Change(path) | Self::Remove(path) => (path, None),
            Self::Rename(from, to) => (from, Some(to)),
        };
        iter::once(first).chain(second)
    }

    /// Returns the change as an operation of the machine. `handle` is the handle of the opened file, if there is one.
    fn operation(&self, handle: u64) -> Operation<'_> {
        match self {
            Self::Open(path) => Operation::Open { path, handle },
            Self::Change(path) => Operation::Change { path },
            Self::Remove(path) => Operation::Remove { path },
            Self::Rename(from, to) => Operation::Rename { from, to },
        }
    }
}

fn join_paths(paths: &BTreeSet<Vec<u8>>) -> String {
    let paths: Vec<String> = paths.iter().map(|path| quoted(path)).collect();
    paths.join(" ")
}

fn last_name(path: &[u8]) -> OsString {
    let name = path.rsplit(|byte| *byte == b'/').next();
    OsStr::from_bytes(name.unwrap_or(path)).to_owned()
}

fn log_and_get_errno(error: &TransactionError) -> Errno {
    tracing::warn!(%error, "a transaction of a commit rule failed");
    match (error.backing_errno(), error) {
        (Some(errno), _) => errno,
        (None, TransactionError::Begin(_)) => Errno::BUSY,
        (None, _) => Errno::IO,
    }
}

impl CommitRules {
    /// Creates the rules of a mount, which observe its changes from now on.
    pub(crate) fn new(
        gate: &Arc<TransactionGate>,
        rules: RuleSet,
        invalidate_cache: &InvalidateCache,
        hosts_timeout: Duration,
    ) -> Result<Arc<Self>, MountError> {
        let rules = Arc::new(rules);
        let mut machine = Machine::new(Arc::clone(&rules));
        let members = gate.store().lower.members();
        let hosts = members.map(|members| {
            machine.set_hosts(match &members.expected {
                Expected::Count(count) => *count,
                Expected::Hosts(hosts) => hosts.len(),
            });
            JointSettings {
                name: members.host.clone(),
                hosts_timeout,
            }
        });
        let exits = ExitWatcher::new()
            .map_err(|errno| MountError::io("watch the ends of programs")(errno.into()))?;
        let made = Arc::new(Self {
            gate: Arc::clone(gate),
            invalidate_cache: Arc::clone(invalidate_cache),
            rules,
            table: Mutex::new(Table {
                machine,
                scopes: BTreeMap::new(),
                handles: HashMap::new(),
                admitted_changes: HashMap::new(),
                last_change_number: 0,
                counts: BTreeMap::new(),
                rotations: BTreeSet::new(),
                deferred: Vec::new(),
                joint_commits: BTreeMap::new(),
                joint_results: BTreeMap::new(),
                is_woken: false,
                is_stopped: false,
            }),
            has_no_scope: AtomicBool::new(true),
            changed: Condvar::new(),
            exits,
            hosts,
        });
        let watch: Weak<Self> = Arc::downgrade(&made);
        gate.set_watch(watch);
        Ok(made)
    }

    /// Adds to the status which transactions belong to rules, and what each of them waits for.
    pub(crate) fn show(&self, shown: &mut Status) {
        let table = self.table.lock();
        for (scope, transaction) in &table.scopes {
            let joint = table.joint_commits.get(scope);
            *shown
                .rule_waits
                .entry(transaction.rule.clone())
                .or_default() += 1;
            let is_of = |path: &[u8]| transaction.paths.contains(path);
            let found = shown.transactions.iter_mut();
            for one in found.filter(|one| is_of(one.scope.as_bytes())) {
                one.rule = Some(transaction.rule.clone());
                let among_hosts = joint.and_then(|joint| joint.waits_for.clone());
                let here = || table.machine.obstacle_of_path(one.scope.as_bytes());
                one.waits_for = among_hosts.or_else(here);
            }
        }
        for (rule, counts) in &table.counts {
            for (shown, count) in [
                (&mut shown.rule_commits, counts.commits),
                (&mut shown.rule_aborts, counts.aborts),
                (&mut shown.rule_failures, counts.failures),
                (&mut shown.rule_removals, counts.removals),
            ] {
                if count > 0 {
                    shown.insert(rule.clone(), count);
                }
            }
        }
    }

    /// Counts an abort for the rule whose checkpoint was open in this scope when an earlier firnd died.
    pub(crate) fn count_undone(&self, path: &[u8]) {
        let located = self.rules.locate(path);
        let mut table = self.table.lock();
        let rule = table
            .machine
            .explain(&located)
            .map(|(rule, _)| rule.name.clone());
        if let Some(rule) = rule {
            table.counts.entry(rule).or_default().aborts += 1;
        }
    }

    /// Forgets aborted checkpoints at these paths, because a later checkpoint was committed there.
    fn forget_undone(&self, paths: &BTreeSet<Vec<u8>>) {
        if !self.gate.has_undone_scopes() {
            return;
        }
        for path in paths {
            self.gate.forget_undone_scope(path);
            if let Some(key) = self.rules.checkpoint_key(path) {
                self.gate.forget_undone_scope(&key);
            }
        }
    }

    /// Watches the ends of writers until [`CommitRules::stop`]. This is the main function of the thread.
    pub(crate) fn watch_exits(&self) {
        self.exits
            .watch(&|process, ending| self.exited(process, ending), &|| {
                self.carry_out_deferred();
                self.rotate();
            });
    }

    fn carry_out_deferred(&self) {
        let actions = std::mem::take(&mut self.table.lock().deferred);
        if let Err(errno) = self.carry_out(actions) {
            tracing::warn!(%errno, "an action after the failure of a writer failed");
        }
    }

    /// Stops the threads of the rules, and ends all scopes unless no program has seen the mount (`is_unseen`).
    pub(crate) fn stop(&self, is_unseen: bool) {
        self.exits.stop();
        self.table.lock().is_stopped = true;
        self.changed.notify_all();
        if !is_unseen {
            self.carry_out_deferred();
            self.end_all();
        }
    }

    fn locate_file(&self, inode: InodeId) -> Option<LocatedPath> {
        let path = self.gate.engine().tree.path_of(inode)?;
        Some(self.rules.locate_file(&path))
    }

    fn locate_name(&self, (parent, name): (InodeId, &OsStr), is_file: bool) -> Option<LocatedPath> {
        let path = join_path(&self.gate.engine().tree.path_of(parent)?, name);
        Some(if is_file {
            self.rules.locate_file(&path)
        } else {
            self.rules.locate(&path)
        })
    }

    /// Returns a change with its paths. `None` if the name of an object is unknown; the object is then in no scope.
    fn change_of(&self, change: &WatchedChange) -> Option<OwnedChange> {
        let tree = &self.gate.engine().tree;
        Some(match change {
            WatchedChange::Open(inode) => OwnedChange::Open(self.locate_file(*inode)?),
            WatchedChange::Cut(inode) => OwnedChange::Change(self.locate_file(*inode)?),
            WatchedChange::Create(dir, name) => {
                OwnedChange::Open(self.locate_name((*dir, name), true)?)
            }
            WatchedChange::Make(dir, name) => {
                OwnedChange::Change(self.locate_name((*dir, name), false)?)
            }
            WatchedChange::Remove(dir, name) => {
                let is_file = tree.leads_to_file(*dir, name);
                OwnedChange::Remove(self.locate_name((*dir, name), is_file)?)
            }
            WatchedChange::Rename((dir, name), (new_dir, new_name)) => {
                let is_file = tree.leads_to_file(*dir, name);
                OwnedChange::Rename(
                    self.locate_name((*dir, name), is_file)?,
                    self.locate_name((*new_dir, new_name), is_file)?,
                )
            }
        })
    }

    /// Returns whether programs see an object at a path.
    fn is_there(&self, path: &[u8]) -> bool {
        self.gate.engine().tree.object_at(path).is_ok()
    }

    /// Updates the flag that is read without the lock, and wakes changes that wait for a scope.
    fn publish(&self, table: MutexGuard<'_, Table>) {
        self.has_no_scope
            .store(table.machine.is_empty(), Ordering::Release);
        drop(table);
        self.changed.notify_all();
    }

    // ---- what the machine asks for -----------------------------------------------------------

    /// Carries out actions in their order, reports the results to the machine, and returns the first error.
    fn carry_out(&self, actions: Vec<Action>) -> Result<(), Errno> {
        let mut first = Ok(());
        for action in actions {
            let done = match action {
                Action::Begin {
                    scope,
                    rule,
                    dir,
                    tops,
                    key,
                } => self.begin(scope, &rule, &dir, (tops, key)),
                Action::Join { scope, tops } => self.join(scope, tops),
                Action::Commit { scope } => self.commit(scope),
                Action::Propose { .. } => {
                    self.wake_hosts();
                    Ok(())
                }
                Action::Abort { scope, reason } => {
                    self.abort(scope, &reason);
                    Ok(())
                }
                Action::Rotate { rule, dir } => {
                    self.table.lock().rotations.insert((rule, dir));
                    self.exits.wake();
                    Ok(())
                }
                Action::Remove {
                    scope,
                    rule,
                    tops,
                    key,
                } => self.remove(scope, &rule, (tops, key)),
            };
            first = first.and(done);
        }
        first
    }

    fn begin(
        &self,
        scope: ScopeNumber,
        rule: &str,
        dir: &[u8],
        (tops, key): (Vec<Vec<u8>>, Vec<u8>),
    ) -> Result<(), Errno> {
        let names: Vec<OsString> = tops.iter().map(|top| last_name(top)).collect();
        let was_there = tops.iter().any(|top| self.is_there(top));
        let paths: BTreeSet<Vec<u8>> = tops.into_iter().collect();
        let try_begin = || {
            self.gate
                .quiesce_names(dir, &paths, Pending::Drain, |root| {
                    let begun = self.gate.store().begin_names(root, dir, &names, &key);
                    Ok(begun?.serial())
                })
        };
        let since = Instant::now();
        let begun = loop {
            match try_begin() {
                Err(error) if self.may_begin_again(&error, &key, since) => {}
                begun => break begun,
            }
        };
        let mut table = self.table.lock();
        let done = match begun {
            Ok(serial) => {
                tracing::info!(rule, paths = %join_paths(&paths), "a commit rule begins a transaction");
                let transaction = Transaction {
                    rule: rule.to_owned(),
                    serial,
                    dir: dir.to_vec(),
                    paths,
                    key,
                    is_rotation: false,
                };
                table.scopes.insert(scope, transaction);
                table.machine.note_begun(scope, was_there);
                Ok(())
            }
            Err(error) => {
                table.machine.note_aborted(scope);
                table.counts.entry(rule.to_owned()).or_default().failures += 1;
                Err(log_and_get_errno(&error))
            }
        };
        self.publish(table);
        done
    }

    fn join(&self, scope: ScopeNumber, tops: Vec<Vec<u8>>) -> Result<(), Errno> {
        let Some(transaction) = self.table.lock().scopes.get(&scope).cloned() else {
            return Err(Errno::STALE);
        };
        let names: Vec<OsString> = tops.iter().map(|top| last_name(top)).collect();
        let paths: BTreeSet<Vec<u8>> = tops.into_iter().collect();
        let joined = self
            .gate
            .quiesce_names(&transaction.dir, &paths, Pending::Drain, |_| {
                match self.gate.store().transaction_numbered(transaction.serial) {
                    Some(TransactionHandle::Open(open)) => Ok(open.add_names(&names)?),
                    _ => Err(Errno::STALE.into()),
                }
            });
        let mut table = self.table.lock();
        if joined.is_ok()
            && let Some(transaction) = table.scopes.get_mut(&scope)
        {
            transaction.paths.extend(paths);
        }
        table.machine.note_begun(scope, false);
        self.publish(table);
        joined.map_err(|error| log_and_get_errno(&error))
    }

    fn commit(&self, scope: ScopeNumber) -> Result<(), Errno> {
        let transaction = self.table.lock().scopes.get(&scope).cloned();
        let Some(transaction) = transaction else {
            let mut table = self.table.lock();
            table.machine.note_aborted(scope);
            self.publish(table);
            return Ok(());
        };
        if self.note_failures(scope) {
            return Ok(());
        }
        let committed = self.commit_transaction(&transaction);
        let mut table = self.table.lock();
        let counts = table.counts.entry(transaction.rule.clone()).or_default();
        let more = match &committed {
            Ok(()) => {
                counts.commits += 1;
                table.scopes.remove(&scope);
                table.machine.note_committed(scope)
            }
            Err(_) => {
                counts.failures += 1;
                table.machine.note_commit_failed(scope);
                Vec::new()
            }
        };
        self.publish(table);
        match committed {
            Ok(()) => {
                self.forget_undone(&transaction.paths);
                let paths = join_paths(&transaction.paths);
                tracing::info!(rule = transaction.rule, %paths, "a commit rule has committed a checkpoint");
                self.carry_out(more)
            }
            Err(error) => Err(log_and_get_errno(&error)),
        }
    }

    /// Returns whether a living writer of the scope has failed, even if its end is not reported yet. If so, the machine
    /// is informed, and the scope is not committed.
    fn note_failures(&self, scope: ScopeNumber) -> bool {
        let writers = self.table.lock().machine.living_writers(scope);
        if !writers.iter().any(|writer| self.exits.has_failed(*writer)) {
            return false;
        }
        let mut table = self.table.lock();
        let actions = table.machine.note_failure(scope);
        table.deferred.extend(actions);
        self.publish(table);
        self.exits.wake();
        true
    }

    fn commit_transaction(&self, transaction: &Transaction) -> Result<(), TransactionError> {
        let store = self.gate.store();
        let (dir, paths) = (&transaction.dir, &transaction.paths);
        let is_open = || match store.transaction_numbered(transaction.serial) {
            Some(TransactionHandle::Open(open)) => Some(open),
            _ => None,
        };
        if is_open().is_some() {
            self.gate
                .quiesce_names(dir, paths, Pending::Drain, |_| match is_open() {
                    Some(open) => Ok(open.decide_unnumbered().map(drop)?),
                    None => Ok(()),
                })?;
        }
        match store.transaction_numbered(transaction.serial) {
            Some(TransactionHandle::Decided(decided)) => Ok(decided.apply()?),
            _ => Ok(()),
        }
    }

    fn abort(&self, scope: ScopeNumber, reason: &str) {
        let transaction = self.table.lock().scopes.get(&scope).cloned();
        if let Some(transaction) = &transaction {
            let (rule, paths) = (&transaction.rule, join_paths(&transaction.paths));
            match self.abort_transaction(transaction) {
                Ok(()) => {
                    tracing::warn!(rule, %paths, reason, "a commit rule drops an incomplete checkpoint");
                }
                Err(error) => {
                    tracing::error!(%error, rule, %paths, "an incomplete checkpoint cannot be dropped; the next mount drops it");
                }
            }
        }
        let mut table = self.table.lock();
        table.machine.note_aborted(scope);
        table.scopes.remove(&scope);
        table.note_end(scope, false);
        if let Some(transaction) = transaction {
            table.counts.entry(transaction.rule).or_default().aborts += 1;
        }
        self.publish(table);
    }

    fn abort_transaction(&self, transaction: &Transaction) -> Result<(), TransactionError> {
        let store = self.gate.store();
        let Some(found) = store.transaction_numbered(transaction.serial) else {
            return Ok(());
        };
        let (dir, paths) = (&transaction.dir, &transaction.paths);
        self.gate
            .quiesce_names(dir, paths, Pending::Discard, |_| Ok(found.abort()?))?;
        self.forget_names(transaction);
        Ok(())
    }

    /// Makes the kernel forget names that the transaction has changed without a request of the kernel.
    fn forget_names(&self, transaction: &Transaction) {
        let engine = self.gate.engine();
        for path in &transaction.paths {
            let wrong = engine.namespace.revalidate_names(path);
            wrong.into_iter().for_each(&*self.invalidate_cache);
        }
        let directory = engine.tree.cached_at(&transaction.dir);
        directory.into_iter().for_each(&*self.invalidate_cache);
    }

    /// Handles the end of a writer. The thread that watches the writers calls this.
    fn exited(&self, process: u32, ending: Ending) {
        let actions = self.table.lock().machine.note_exit(process, ending);
        if let Err(errno) = self.carry_out(actions) {
            tracing::warn!(%errno, process, "an action after the end of a process failed");
        }
    }

    /// Ends all open scopes, because the mount ends and their events cannot come any more.
    pub(crate) fn end_all(&self) {
        let actions = self.table.lock().machine.end_all("the mount ends");
        if let Err(errno) = self.carry_out(actions) {
            tracing::warn!(%errno, "cannot end all checkpoints at the end of the mount");
        }
    }

    /// Waits while the begin or end of a scope blocks an operation.
    fn wait_until_free(&self, change: &OwnedChange) -> MutexGuard<'_, Table> {
        let mut table = self.table.lock();
        while table.machine.is_busy(&change.operation(0)) {
            table.wait(&self.changed);
        }
        table
    }

    /// Finds the job of a process, once for each process.
    fn note_job(&self, process: u32) {
        if self.table.lock().machine.knows_job(process) {
            return;
        }
        let job = jobs::job_of(process);
        self.table.lock().machine.note_job(process, job);
        self.exits.add(job);
    }

    /// Returns whether the process that closes a file, or a descendant, still has it open for writing.
    ///
    /// A child between its fork and its exec has copies of all descriptors, and the exec closes those with FD_CLOEXEC.
    /// Each thread that starts a program makes such a child. The close waits for the exec, so that it can return the
    /// result of the commit.
    fn is_held_on(&self, process: u32, handle: HandleId) -> bool {
        let Some(inode) = self.gate.engine().open_files.inode_of_handle(handle) else {
            return false;
        };
        let since = Instant::now();
        loop {
            let closes = self.table.lock().inherited_closes(handle);
            let Some(holder) = descriptors::find_holder(process, inode.0, mountinfo::FIRN) else {
                return false;
            };
            let hosts_timeout = if holder.closes_at_exec {
                EXEC_TIMEOUT
            } else {
                INHERITED_TIMEOUT
            };
            let left = hosts_timeout.saturating_sub(since.elapsed());
            let mut table = self.table.lock();
            if holder.process == process || left.is_zero() {
                table.machine.note_inherited(holder.process, handle.0);
                drop(table);
                self.exits.add(holder.process);
                return true;
            }
            if table.inherited_closes(handle) == closes {
                table.wait_for(&self.changed, left);
            }
        }
    }

    fn close_handle(&self, handle: HandleId, ending: Ending) -> Result<(), Errno> {
        // All ends are reported first, because the files of writers that have ended do not count for the conditions of
        // a rule.
        if self.knows(handle) && self.exits.has_unreported_exit() {
            self.exits.wait_until_reported();
        }
        let mut table = self.table.lock();
        let Some(open) = table.handles.remove(&handle.0) else {
            return Ok(());
        };
        let LastClose { process, ending } = open.last.unwrap_or(LastClose {
            process: open.opener,
            ending,
        });
        let operation = Operation::Close {
            handle: handle.0,
            ending,
        };
        let actions = table
            .machine
            .finish_operation(process, &operation, None, true);
        drop(table);
        self.carry_out_event(actions, EventKind::Close)
    }

    /// Does the same as [`CommitRules::carry_out`] after a change that may be an event: also waits for the other hosts.
    fn carry_out_event(&self, actions: Vec<Action>, event: EventKind) -> Result<(), Errno> {
        let proposed = actions.iter().filter_map(|action| match action {
            Action::Propose { scope } => Some(*scope),
            _ => None,
        });
        let proposed: Vec<ScopeNumber> = proposed.collect();
        self.carry_out(actions)?;
        self.await_hosts(&proposed, event)
    }
}

impl ChangeWatch for CommitRules {
    fn concerns(&self, change: &WatchedChange) -> bool {
        let Some(change) = self.change_of(change) else {
            return false;
        };
        if self.has_no_scope.load(Ordering::Acquire) && change.paths().all(LocatedPath::is_free) {
            return false;
        }
        let machine = &self.table.lock().machine;
        change.paths().any(|path| machine.concerns(path))
    }

    fn checkpoint_key(&self, path: &[u8]) -> Option<Vec<u8>> {
        self.rules.checkpoint_key(path)
    }

    fn begin_change(&self, caller: Caller, change: &WatchedChange) -> Result<WatchTicket, Errno> {
        let change = self.change_of(change).ok_or(Errno::STALE)?;
        let process = find_process(caller.pid);
        self.note_job(process);
        let mut table = self.wait_until_free(&change);
        let proposed = table.machine.end_wide_scope(&change.operation(0));
        if !proposed.is_empty() {
            drop(table);
            if let Err(errno) = self.carry_out_event(proposed, EventKind::Next) {
                tracing::warn!(%errno, ?change, "the next checkpoint begins before the previous one is committed: both become one checkpoint");
            }
            table = self.wait_until_free(&change);
        }
        let entered = table.machine.enter_operation(process, &change.operation(0));
        let entered = match entered {
            Ok(entered) => entered,
            Err(error) => {
                let counts = table.counts.entry(error.rule().to_owned()).or_default();
                counts.failures += 1;
                drop(table);
                tracing::warn!(%error, ?change, process, "a commit rule refuses a change");
                return Err(Errno::BUSY);
            }
        };
        self.has_no_scope
            .store(table.machine.is_empty(), Ordering::Release);
        drop(table);
        let done = self.carry_out(entered.actions);
        if entered.scope.is_some() {
            self.exits.add(process);
        }
        let mut table = self.table.lock();
        if let Err(errno) = done {
            let more =
                table
                    .machine
                    .finish_operation(process, &change.operation(0), entered.scope, false);
            drop(table);
            self.carry_out(more)?;
            return Err(errno);
        }
        table.last_change_number += 1;
        let number = table.last_change_number;
        let ticket = AdmittedChange {
            process,
            change,
            scope: entered.scope,
        };
        table.admitted_changes.insert(number, ticket);
        Ok(WatchTicket { number })
    }

    fn end_change(&self, ticket: WatchTicket, is_made: bool, handle: Option<HandleId>) {
        let mut table = self.table.lock();
        let Some(ticket) = table.admitted_changes.remove(&ticket.number) else {
            return;
        };
        if let (Some(handle), Some(_)) = (handle, ticket.scope) {
            let open = OpenHandle {
                opener: ticket.process,
                last: None,
                inherited_closes: 0,
            };
            table.handles.insert(handle.0, open);
        }
        let operation = ticket
            .change
            .operation(handle.map_or(NOT_OPEN, |handle| handle.0));
        let actions =
            table
                .machine
                .finish_operation(ticket.process, &operation, ticket.scope, is_made);
        drop(table);
        if let Err(errno) = self.carry_out_event(actions, EventKind::Name) {
            tracing::warn!(%errno, "a complete checkpoint is not committed yet");
        }
    }

    fn must_settle(&self, inode: InodeId) -> bool {
        if self.has_no_scope.load(Ordering::Acquire) || !self.exits.has_unreported_exit() {
            return false;
        }
        let path = self.gate.engine().tree.path_of(inode);
        path.is_some_and(|path| self.table.lock().machine.is_near_scope(&path))
    }

    fn settle(&self, inode: InodeId) {
        if self.must_settle(inode) {
            self.exits.wait_until_reported();
        }
    }

    fn knows(&self, handle: HandleId) -> bool {
        self.table.lock().handles.contains_key(&handle.0)
    }

    fn close(&self, caller: Caller, handle: HandleId, by: Closing) -> Result<(), Errno> {
        let ending = match by {
            Closing::Called => Ending::Success,
            Closing::Exited => Ending::Exit,
            Closing::Killed => Ending::Failure,
        };
        let process = find_process(caller.pid);
        let mut table = self.table.lock();
        let is_writer = table.machine.is_writer(process);
        let Some(open) = table.handles.get_mut(&handle.0) else {
            return Ok(());
        };
        // A handle that a child has inherited counts as closed when it is released. How that child ended counts then,
        // if the child is a known writer.
        if open.opener != process {
            open.last = is_writer.then_some(LastClose { process, ending });
            open.inherited_closes += 1;
            drop(table);
            self.changed.notify_all();
            return Ok(());
        }
        drop(table);
        // Another process may write more through its copy of the descriptor, so the file counts as closed when the
        // handle is released.
        if ending != Ending::Failure && self.is_held_on(process, handle) {
            return Ok(());
        }
        self.close_handle(handle, ending)
    }

    fn release(&self, handle: HandleId) {
        if let Err(errno) = self.close_handle(handle, Ending::Success) {
            tracing::warn!(%errno, "a complete checkpoint is not committed yet");
        }
    }
}
