//! Makes the checkpoints of programs appear at once, by the *commit rules* of the mount's options. A rule says which
//! changes are one checkpoint, and which change completes it. This file begins, commits and aborts the transaction of
//! each checkpoint.
//!
//! Terms
//! * The *machine*, the state machine of the rules, decides what to do after each event, and never calls anything.
//! * The *gate* stops changes of programs during a begin or commit.
//! * A pidfd is a file descriptor by which firnd sees that a process has ended.
//!
//! ```text
//!   firn-fuse ── before, after a change, close ──► CommitRules ──► firn_rules::Machine
//!                                                      │ begin, join, commit, abort
//!   exits of writers (pidfd) ────────────────────► ────┘ ──► gate, firn-transact
//! ```
//!
//! Promises
//! * A change in a scope (the names of one checkpoint) is made only while the transaction of the scope is open;
//!   otherwise it waits. So no change of a program comes between a commit and the begin that follows it.
//! * The lock of the table of transactions is held only briefly, and never during a call of the backing directory.
//! * An abort cannot deadlock with the kernel: the thread that carries it out serves no request of the kernel.

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
    Action, Ending, EnteredOperation, LocatedPath, Machine, NOT_OPEN, Operation, RULES_BYTES_MAX,
    RuleSet, RuleSetError, ScopeNumber, load_rules,
};
use firn_transact::machine::Pending;
use firn_transact::{Expected, TransactionError, TransactionHandle};
use parking_lot::Condvar;

use self::exits::ExitWatcher;
use self::joint::{
    BEGIN_RETRY_EVERY, EventKind, JointCommit, JointOutcome, JointResult, JointSettings,
};
use crate::error::MountError;
use crate::gate::TransactionGate;
use crate::parts::InvalidateCache;
use crate::process::process_of_thread;

/// Maximum time that a close waits for a child's exec. A child that executes no other program keeps its descriptors.
const EXEC_TIMEOUT: Duration = Duration::from_secs(1);
/// The same for a descriptor without FD_CLOEXEC. An exec removes the flag from all descriptors before it closes them.
const INHERITED_TIMEOUT: Duration = Duration::from_millis(50);

/// Value instead of a handle for a change that has not opened its file yet. The machine reads a handle only when a
/// change that was made is finished.
const NO_HANDLE_YET: u64 = 0;

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
pub(crate) struct RuleCounts {
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
    table: Mutex<RuleTable>,
    /// No scope is open. A change that no rule concerns then needs no look into the table.
    has_no_scope: AtomicBool,
    /// Signals changes of the table, such as the begin or the end of a scope.
    changed: Condvar,
    exit_watcher: ExitWatcher,
    /// Set if several hosts write checkpoints together.
    joint_settings: Option<JointSettings>,
}

/// The state that the lock of [`CommitRules`] protects.
struct RuleTable {
    machine: Machine,
    /// The transactions of open scopes. A scope is the set of names that belong to one checkpoint.
    scopes: BTreeMap<ScopeNumber, Transaction>,
    /// Handles that are open in scopes, by number.
    handles: HashMap<u64, OpenHandle>,
    /// Admitted changes that are in progress, by number of the ticket.
    admitted_changes: HashMap<u64, AdmittedChange>,
    last_change_number: u64,
    counts: BTreeMap<String, RuleCounts>,
    /// Rules with the directories in which there may be more checkpoints than the rule keeps.
    rotations: BTreeSet<(usize, Vec<u8>)>,
    /// Aborts for the thread that watches exits, which holds nothing that the kernel waits for.
    deferred: Vec<Action>,
    /// States of open scopes that several hosts write.
    joint_commits: BTreeMap<ScopeNumber, JointCommit>,
    /// Results of scopes that several hosts wrote, after their end.
    joint_results: BTreeMap<ScopeNumber, JointResult>,
    /// Makes the thread that reads the ballots of other hosts begin its next round at once.
    must_read_ballots: bool,
    is_stopped: bool,
}

/// A handle that is open in a scope.
#[derive(Clone, Copy, Debug)]
struct OpenHandle {
    /// The process that opened the handle.
    opener: u32,
    /// The last close by a process that had inherited the handle; `None` if that process is no known writer.
    last_inherited_close: Option<CloseReport>,
    /// Number of closes by processes that had inherited the handle.
    inherited_closes: u64,
}

impl OpenHandle {
    /// Records a close by a process that had inherited the handle; `known_writer_close` is `None` if that process is no
    /// known writer. The handle stays open until the kernel releases it.
    fn record_inherited_close(&mut self, known_writer_close: Option<CloseReport>) {
        self.last_inherited_close = known_writer_close;
        self.inherited_closes += 1;
    }
}

/// Which process closed a handle, and how that process ended, if it ended.
#[derive(Clone, Copy, Debug)]
struct CloseReport {
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
    is_removal: bool,
}

impl RuleTable {
    /// Returns the table of a mount that has just started: no scope is open.
    fn new(machine: Machine) -> Self {
        Self {
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
            must_read_ballots: false,
            is_stopped: false,
        }
    }

    /// Adds to the status which transactions belong to commit rules, and what each of them waits for.
    fn fill_waits(&self, status: &mut Status) {
        for (scope, transaction) in &self.scopes {
            let waiting_scopes = status.rule_waits.entry(transaction.rule.clone());
            *waiting_scopes.or_default() += 1;
            for transaction_status in &mut status.transactions {
                let path = transaction_status.scope.as_bytes();
                if !transaction.paths.contains(path) {
                    continue;
                }
                // While the hosts commit together, the status shows what that commit waits for. Otherwise it shows what
                // the rule waits for on this host.
                let joint_commit = self.joint_commits.get(scope);
                let wait_of_hosts = joint_commit.and_then(|joint| joint.waits_for.clone());
                transaction_status.rule = Some(transaction.rule.clone());
                transaction_status.waits_for =
                    wait_of_hosts.or_else(|| self.machine.obstacle_of_path(path));
            }
        }
    }

    /// Adds the counts of each rule to the status; a count of 0 is left out.
    fn fill_counts(&self, status: &mut Status) {
        for (rule, counts) in &self.counts {
            for (counts_by_rule, count) in [
                (&mut status.rule_commits, counts.commits),
                (&mut status.rule_aborts, counts.aborts),
                (&mut status.rule_failures, counts.failures),
                (&mut status.rule_removals, counts.removals),
            ] {
                if count > 0 {
                    counts_by_rule.insert(rule.clone(), count);
                }
            }
        }
    }

    /// Tells the machine that a handle is closed for good, as `close` says. Returns the actions that follow.
    fn finish_close(&mut self, handle: HandleId, close: CloseReport) -> Vec<Action> {
        let operation = Operation::Close {
            handle: handle.0,
            ending: close.ending,
        };
        // A close is not entered before it is made, so it has no scope.
        let scope = None;
        let is_made = true;
        self.machine
            .finish_operation(close.process, &operation, scope, is_made)
    }

    /// Tells the machine that an entered change is not made. Returns the actions that follow.
    fn withdraw_change(
        &mut self,
        process: u32,
        change: &OwnedChange,
        scope: Option<ScopeNumber>,
    ) -> Vec<Action> {
        let operation = change.operation(NO_HANDLE_YET);
        let is_made = false;
        self.machine
            .finish_operation(process, &operation, scope, is_made)
    }

    /// Returns the number of closes of a handle by processes that had inherited it.
    fn inherited_closes(&self, handle: HandleId) -> u64 {
        match self.handles.get(&handle.0) {
            Some(open_handle) => open_handle.inherited_closes,
            None => 0,
        }
    }
}

/// An admitted change that is in progress.
struct AdmittedChange {
    process: u32,
    change: OwnedChange,
    scope: Option<ScopeNumber>,
}

/// The names of one checkpoint in its directory, as an action of the machine has them.
struct CheckpointNames {
    paths: Vec<Vec<u8>>,
    /// Key under which other hosts know the checkpoint.
    key: Vec<u8>,
}

/// What a name in a directory leads to.
#[derive(Clone, Copy)]
enum NamedObject {
    File,
    /// A directory, or an object of another kind.
    Other,
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
        let (path, new_path) = match self {
            Self::Open(path) | Self::Change(path) | Self::Remove(path) => (path, None),
            Self::Rename(from, to) => (from, Some(to)),
        };
        iter::once(path).chain(new_path)
    }

    /// Returns the change as an operation of the machine. `handle` is the handle of the opened file, or
    /// [`NO_HANDLE_YET`], or [`NOT_OPEN`].
    fn operation(&self, handle: u64) -> Operation<'_> {
        match self {
            Self::Open(path) => Operation::Open { path, handle },
            Self::Change(path) => Operation::Change { path },
            Self::Remove(path) => Operation::Remove { path },
            Self::Rename(from, to) => Operation::Rename { from, to },
        }
    }
}

/// Returns the paths for a log message, separated by spaces.
fn describe_paths(paths: &BTreeSet<Vec<u8>>) -> String {
    let paths: Vec<String> = paths.iter().map(|path| quoted(path)).collect();
    paths.join(" ")
}

/// Returns the last component of a path.
fn last_name(path: &[u8]) -> OsString {
    let name = path.rsplit(|byte| *byte == b'/').next();
    OsStr::from_bytes(name.unwrap_or(path)).to_owned()
}

/// Logs why a transaction failed, and returns the errno for the program.
fn log_and_get_errno(error: &TransactionError) -> Errno {
    tracing::warn!(%error, "a step of a transaction of a commit rule failed");
    match (error.backing_errno(), error) {
        (Some(errno), _) => errno,
        (None, TransactionError::Begin(_)) => Errno::BUSY,
        (None, _) => Errno::IO,
    }
}

impl CommitRules {
    /// Creates the commit rules of a mount, which say which changes are one checkpoint and which change completes it.
    /// They observe all changes from now on, by `gate`, which admits changes before they reach the engine.
    ///
    /// `hosts_timeout` limits how long a program waits for other hosts of the same checkpoint.
    pub(crate) fn new(
        gate: &Arc<TransactionGate>,
        rules: RuleSet,
        invalidate_cache: &InvalidateCache,
        hosts_timeout: Duration,
    ) -> Result<Arc<Self>, MountError> {
        let rules = Arc::new(rules);
        let mut machine = Machine::new(Arc::clone(&rules));
        let mut joint_settings = None;
        if let Some(members) = gate.store().lower.members() {
            machine.set_hosts(match &members.expected {
                Expected::Count(count) => *count,
                Expected::Hosts(hosts) => hosts.len(),
            });
            joint_settings = Some(JointSettings {
                host: members.host.clone(),
                hosts_timeout,
            });
        }
        let exit_watcher = ExitWatcher::new()
            .map_err(|errno| MountError::io("watch the ends of programs")(errno.into()))?;
        let commit_rules = Arc::new(Self {
            gate: Arc::clone(gate),
            invalidate_cache: Arc::clone(invalidate_cache),
            rules,
            table: Mutex::new(RuleTable::new(machine)),
            has_no_scope: AtomicBool::new(true),
            changed: Condvar::new(),
            exit_watcher,
            joint_settings,
        });
        // The rules hold the gate, so the gate holds them only weakly.
        let change_watch: Weak<Self> = Arc::downgrade(&commit_rules);
        gate.set_watch(change_watch);
        Ok(commit_rules)
    }

    /// Adds to the status which transactions belong to commit rules, what each of them waits for, and the counts of
    /// each rule. `status` already has all transactions of the mount.
    pub(crate) fn fill_status(&self, status: &mut Status) {
        let table = self.table.lock();
        table.fill_waits(status);
        table.fill_counts(status);
    }

    /// Counts an abort for the rule that had an open checkpoint in this scope when an earlier firnd died.
    pub(crate) fn count_undone(&self, path: &[u8]) {
        let located = self.rules.locate(path);
        let mut table = self.table.lock();
        let Some((rule, _top)) = table.machine.explain(&located) else {
            return;
        };
        let rule_name = rule.name.clone();
        table.counts.entry(rule_name).or_default().aborts += 1;
    }

    /// Clears the record of aborted checkpoints at these paths, because a later checkpoint was committed there.
    fn clear_undone_scopes(&self, paths: &BTreeSet<Vec<u8>>) {
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
        self.exit_watcher.watch(
            &|process, ending| self.handle_exit(process, ending),
            &|| {
                self.carry_out_deferred();
                self.rotate();
            },
        );
    }

    /// Carries out the actions that were left to the thread which watches exits.
    fn carry_out_deferred(&self) {
        let actions = std::mem::take(&mut self.table.lock().deferred);
        if let Err(errno) = self.carry_out(actions) {
            tracing::warn!(%errno, "cannot act on the failure of a program that wrote a checkpoint");
        }
    }

    /// Stops the threads of the rules.
    pub(crate) fn stop(&self) {
        self.exit_watcher.stop();
        self.table.lock().is_stopped = true;
        self.changed.notify_all();
    }

    /// Carries out what the threads have left to do, and ends all scopes. The threads have been stopped before.
    pub(crate) fn finish(&self) {
        self.carry_out_deferred();
        self.end_all_scopes();
    }

    /// Returns the path of a file, located by the rules; `None` if the file has no name.
    fn locate_file(&self, inode: InodeId) -> Option<LocatedPath> {
        let path = self.gate.engine().tree.path_of(inode)?;
        Some(self.rules.locate_file(&path))
    }

    /// Returns the path of a name in a directory, located by the rules; `None` if the directory has no name.
    fn locate_name(&self, parent: InodeId, name: &OsStr, kind: NamedObject) -> Option<LocatedPath> {
        let path = join_path(&self.gate.engine().tree.path_of(parent)?, name);
        Some(match kind {
            NamedObject::File => self.rules.locate_file(&path),
            NamedObject::Other => self.rules.locate(&path),
        })
    }

    /// Returns what a name in a directory leads to.
    fn kind_of_name(&self, parent: InodeId, name: &OsStr) -> NamedObject {
        if self.gate.engine().tree.leads_to_file(parent, name) {
            NamedObject::File
        } else {
            NamedObject::Other
        }
    }

    /// Replaces the inodes of a change by paths, because the rules recognise a checkpoint by its paths. `None` if an
    /// object has no known name; it is then in no checkpoint.
    ///
    /// A new length (`Cut`) and a new object that is not opened (`Make`) are plain changes for the rules.
    fn resolve_paths(&self, change: &WatchedChange) -> Option<OwnedChange> {
        Some(match change {
            WatchedChange::Open(inode) => OwnedChange::Open(self.locate_file(*inode)?),
            WatchedChange::Cut(inode) => OwnedChange::Change(self.locate_file(*inode)?),
            WatchedChange::Create(dir, name) => {
                OwnedChange::Open(self.locate_name(*dir, name, NamedObject::File)?)
            }
            WatchedChange::Make(dir, name) => {
                OwnedChange::Change(self.locate_name(*dir, name, NamedObject::Other)?)
            }
            WatchedChange::Remove(dir, name) => {
                let kind = self.kind_of_name(*dir, name);
                OwnedChange::Remove(self.locate_name(*dir, name, kind)?)
            }
            WatchedChange::Rename((dir, name), (new_dir, new_name)) => {
                let kind = self.kind_of_name(*dir, name);
                OwnedChange::Rename(
                    self.locate_name(*dir, name, kind)?,
                    self.locate_name(*new_dir, new_name, kind)?,
                )
            }
        })
    }

    /// Returns whether programs see an object at a path.
    fn is_visible(&self, path: &[u8]) -> bool {
        self.gate.engine().tree.object_at(path).is_ok()
    }

    /// Releases the lock after a change of the table: updates the flag that is read without the lock, and wakes the
    /// changes that wait for a scope.
    fn unlock_and_notify(&self, table: MutexGuard<'_, RuleTable>) {
        self.has_no_scope
            .store(table.machine.is_empty(), Ordering::Release);
        // Without the lock, woken threads need not wait for it again.
        drop(table);
        self.changed.notify_all();
    }

    // ---- what the machine asks for -----------------------------------------------------------

    /// Carries out what the rules' state machine has decided, in this order: begins, extends, commits or aborts the
    /// transactions of checkpoints, and removes old checkpoints. After an error the other actions are still carried
    /// out; the first error is returned.
    ///
    /// In an action, `scope` is the machine's number of a checkpoint, and `tops` are the paths of its names in the
    /// directory `dir`. `key` identifies the checkpoint on all hosts. The caller must not hold the lock of the table.
    fn carry_out(&self, actions: Vec<Action>) -> Result<(), Errno> {
        let mut first_error = Ok(());
        for action in actions {
            let result = match action {
                Action::Begin {
                    scope,
                    rule,
                    dir,
                    tops,
                    key,
                } => self.begin_scope(scope, &rule, &dir, CheckpointNames { paths: tops, key }),
                Action::Join { scope, tops } => self.add_names(scope, tops),
                Action::Commit { scope } => self.commit_scope(scope),
                Action::Propose { .. } => {
                    // The thread for checkpoints of several hosts takes the steps of that commit.
                    self.wake_joint_commit_thread();
                    Ok(())
                }
                Action::Abort { scope, reason } => {
                    self.abort_scope(scope, &reason);
                    Ok(())
                }
                // The rule may keep fewer checkpoints than there are in `dir`.
                Action::Rotate { rule, dir } => {
                    self.table.lock().rotations.insert((rule, dir));
                    // The thread that watches exits removes the old checkpoints, so that no program waits.
                    self.exit_watcher.wake();
                    Ok(())
                }
                Action::Remove {
                    scope,
                    rule,
                    tops,
                    key,
                } => self.remove_checkpoint(scope, &rule, CheckpointNames { paths: tops, key }),
            };
            first_error = first_error.and(result);
        }
        first_error
    }

    /// Begins the transaction of one checkpoint, and tells the rules' state machine whether it has begun. `scope` is
    /// the machine's number of the checkpoint.
    ///
    /// `names` are the checkpoint's names in the directory `dir`.
    fn begin_scope(
        &self,
        scope: ScopeNumber,
        rule: &str,
        dir: &[u8],
        CheckpointNames { paths, key }: CheckpointNames,
    ) -> Result<(), Errno> {
        let names: Vec<OsString> = paths.iter().map(|path| last_name(path)).collect();
        // For a checkpoint that existed before, the successful end of its writers is enough to commit it.
        let existed_before = paths.iter().any(|path| self.is_visible(path));
        let paths: BTreeSet<Vec<u8>> = paths.into_iter().collect();
        let begin_result = self.begin_transaction(dir, &names, &paths, &key);
        let mut table = self.table.lock();
        let result = match begin_result {
            Ok(serial) => {
                tracing::info!(rule, paths = %describe_paths(&paths), "a commit rule begins a transaction");
                let transaction = Transaction {
                    rule: rule.to_owned(),
                    serial,
                    dir: dir.to_vec(),
                    paths,
                    key,
                    is_removal: false,
                };
                table.scopes.insert(scope, transaction);
                table.machine.record_begun(scope, existed_before);
                Ok(())
            }
            Err(error) => {
                table.machine.record_aborted(scope);
                table.counts.entry(rule.to_owned()).or_default().failures += 1;
                Err(log_and_get_errno(&error))
            }
        };
        self.unlock_and_notify(table);
        result
    }

    /// Begins the transaction of the names of a checkpoint in `dir`, while no program changes anything below them, and
    /// returns its serial number. `paths` are the paths of `names`, and `key` identifies the checkpoint on all hosts.
    ///
    /// Waits while other hosts have not finished the last commit of these names, for at most `participants-wait`.
    fn begin_transaction(
        &self,
        dir: &[u8],
        names: &[OsString],
        paths: &BTreeSet<Vec<u8>>,
        key: &[u8],
    ) -> Result<u64, TransactionError> {
        let began_waiting = Instant::now();
        loop {
            let begin_result = self.gate.quiesce_names(dir, paths, Pending::Drain, |root| {
                let transaction = self.gate.store().begin_names(root, dir, names, key)?;
                Ok(transaction.serial())
            });
            let error = match begin_result {
                Ok(serial) => return Ok(serial),
                Err(error) => error,
            };
            if !self.prepare_to_begin_again(&error, key, began_waiting) {
                return Err(error);
            }
            std::thread::sleep(BEGIN_RETRY_EVERY);
        }
    }

    /// Returns a copy of the transaction of an open scope.
    fn find_transaction(&self, scope: ScopeNumber) -> Option<Transaction> {
        self.table.lock().scopes.get(&scope).cloned()
    }

    /// Adds further names of a checkpoint to its transaction, and then tells the rules' state machine that programs may
    /// change the checkpoint again. Fails with ESTALE if the transaction has ended.
    ///
    /// `scope` is the machine's number of the checkpoint, and `new_paths` are the paths of the names.
    fn add_names(&self, scope: ScopeNumber, new_paths: Vec<Vec<u8>>) -> Result<(), Errno> {
        let Some(transaction) = self.find_transaction(scope) else {
            return Err(Errno::STALE);
        };
        let names: Vec<OsString> = new_paths.iter().map(|path| last_name(path)).collect();
        let paths: BTreeSet<Vec<u8>> = new_paths.into_iter().collect();
        let store = self.gate.store();
        let result = self
            .gate
            .quiesce_names(&transaction.dir, &paths, Pending::Drain, |_| {
                match store.transaction_numbered(transaction.serial) {
                    Some(TransactionHandle::Open(open)) => Ok(open.add_names(&names)?),
                    _ => Err(Errno::STALE.into()),
                }
            });
        let mut table = self.table.lock();
        if result.is_ok()
            && let Some(transaction) = table.scopes.get_mut(&scope)
        {
            transaction.paths.extend(paths);
        }
        // The machine lets programs continue after this report. It gets the report after a failure too; the checkpoint
        // then keeps the names that it had. `false` leaves what it knows of the names before unchanged.
        let existed_before = false;
        table.machine.record_begun(scope, existed_before);
        self.unlock_and_notify(table);
        result.map_err(|error| log_and_get_errno(&error))
    }

    /// Commits the transaction of one checkpoint, tells the rules' state machine the result, and carries out the
    /// actions that follow. If a process that wrote the checkpoint has failed, nothing is committed here: the report of
    /// that failure decides what happens.
    fn commit_scope(&self, scope: ScopeNumber) -> Result<(), Errno> {
        // Another thread has ended the transaction meanwhile.
        let Some(transaction) = self.find_transaction(scope) else {
            let mut table = self.table.lock();
            table.machine.record_aborted(scope);
            self.unlock_and_notify(table);
            return Ok(());
        };
        if self.report_failed_writers(scope) {
            return Ok(());
        }
        let committed = self.commit_transaction(&transaction);
        let mut table = self.table.lock();
        let counts = table.counts.entry(transaction.rule.clone()).or_default();
        if let Err(error) = committed {
            counts.failures += 1;
            table.machine.record_commit_failed(scope);
            self.unlock_and_notify(table);
            return Err(log_and_get_errno(&error));
        }
        counts.commits += 1;
        table.scopes.remove(&scope);
        let next_actions = table.machine.record_committed(scope);
        self.unlock_and_notify(table);
        // An earlier checkpoint here that was aborted by a death of firnd no longer causes errors of programs.
        self.clear_undone_scopes(&transaction.paths);
        let paths = describe_paths(&transaction.paths);
        tracing::info!(rule = transaction.rule, %paths, "a commit rule has committed a checkpoint");
        self.carry_out(next_actions)
    }

    /// Returns whether a writer of the scope has failed, and its end is not reported to the machine yet. If so, the
    /// failure is reported, and the thread that watches exits aborts the scope.
    fn report_failed_writers(&self, scope: ScopeNumber) -> bool {
        let writers = self.table.lock().machine.living_writers(scope);
        if !writers
            .iter()
            .any(|writer| self.exit_watcher.has_failed(*writer))
        {
            return false;
        }
        let mut table = self.table.lock();
        let abort_actions = table.machine.record_writer_failure(scope);
        table.deferred.extend(abort_actions);
        self.unlock_and_notify(table);
        self.exit_watcher.wake();
        true
    }

    /// Decides the commit of a transaction if it is open, and then applies it: makes its changes in the backing. A
    /// transaction that another thread has ended is no error. The decision is made while no program changes the names.
    fn commit_transaction(&self, transaction: &Transaction) -> Result<(), TransactionError> {
        let store = self.gate.store();
        let Transaction { dir, paths, .. } = transaction;
        let find_open_transaction = || match store.transaction_numbered(transaction.serial) {
            Some(TransactionHandle::Open(open)) => Some(open),
            _ => None,
        };
        // Only an open transaction is still to be decided.
        if find_open_transaction().is_some() {
            self.gate.quiesce_names(dir, paths, Pending::Drain, |_| {
                // Another thread may have ended the transaction before the names were quiesced.
                if let Some(open) = find_open_transaction() {
                    open.decide_unnumbered()?;
                }
                Ok(())
            })?;
        }
        match store.transaction_numbered(transaction.serial) {
            Some(TransactionHandle::Decided(decided)) => Ok(decided.apply()?),
            _ => Ok(()),
        }
    }

    /// Aborts the transaction of one checkpoint, and tells the rules' state machine and the waiting threads that it has
    /// ended. A failure is only logged, because the next mount aborts the transaction.
    fn abort_scope(&self, scope: ScopeNumber, reason: &str) {
        let transaction = self.find_transaction(scope);
        if let Some(transaction) = &transaction {
            let rule = &transaction.rule;
            let paths = describe_paths(&transaction.paths);
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
        table.machine.record_aborted(scope);
        table.scopes.remove(&scope);
        table.record_joint_result(scope, JointOutcome::Aborted);
        if let Some(transaction) = transaction {
            table.counts.entry(transaction.rule).or_default().aborts += 1;
        }
        self.unlock_and_notify(table);
    }

    /// Aborts a transaction with its pending data. A transaction that has ended already counts as aborted.
    fn abort_transaction(&self, transaction: &Transaction) -> Result<(), TransactionError> {
        let store = self.gate.store();
        let Some(handle) = store.transaction_numbered(transaction.serial) else {
            return Ok(());
        };
        let Transaction { dir, paths, .. } = transaction;
        self.gate
            .quiesce_names(dir, paths, Pending::Discard, |_| Ok(handle.abort()?))?;
        self.invalidate_names(transaction);
        Ok(())
    }

    /// Makes the kernel forget names that the transaction has changed without a request of the kernel.
    fn invalidate_names(&self, transaction: &Transaction) {
        let engine = self.gate.engine();
        for path in &transaction.paths {
            let changed_names = engine.namespace.revalidate_names(path);
            changed_names.into_iter().for_each(&*self.invalidate_cache);
        }
        let directory = engine.tree.cached_at(&transaction.dir);
        directory.into_iter().for_each(&*self.invalidate_cache);
    }

    /// Handles the end of a writer. The thread that watches the writers calls this.
    fn handle_exit(&self, process: u32, ending: Ending) {
        let actions = self.table.lock().machine.record_exit(process, ending);
        if let Err(errno) = self.carry_out(actions) {
            tracing::warn!(%errno, process, "cannot act on the end of a program that wrote a checkpoint");
        }
    }

    /// Ends all open scopes, because the mount ends and their events cannot come any more.
    pub(crate) fn end_all_scopes(&self) {
        let actions = self.table.lock().machine.end_all("the mount ends");
        if let Err(errno) = self.carry_out(actions) {
            tracing::warn!(%errno, "cannot end all open checkpoints at the end of the mount");
        }
    }

    /// Locks the table once no begin or end of a scope blocks the change.
    fn lock_when_idle(&self, change: &OwnedChange) -> MutexGuard<'_, RuleTable> {
        let mut table = self.table.lock();
        while table.machine.is_busy(&change.operation(NO_HANDLE_YET)) {
            table.wait(&self.changed);
        }
        table
    }

    /// Locks the table for a change of a program. If the change belongs to the next checkpoint of several hosts, the
    /// previous one is completed first, and this call waits for its commit.
    fn lock_for_change(&self, change: &OwnedChange) -> MutexGuard<'_, RuleTable> {
        let mut table = self.lock_when_idle(change);
        let proposals = table
            .machine
            .end_wide_scope(&change.operation(NO_HANDLE_YET));
        if proposals.is_empty() {
            return table;
        }
        // The hosts' commit needs the lock, and this call waits for it.
        drop(table);
        if let Err(errno) = self.carry_out_and_await_hosts(proposals, EventKind::Next) {
            tracing::warn!(%errno, ?change, "the next checkpoint begins before the previous one is committed: both become one checkpoint");
        }
        self.lock_when_idle(change)
    }

    /// Reports a change of a process to the rules' state machine before it is made. Returns the actions that must be
    /// carried out first, and the scope (checkpoint) of the change if it has one. Fails with EBUSY if a rule refuses
    /// the change.
    ///
    /// Waits while a change in that scope is not allowed. After a success, the caller reports the end of the change
    /// with `finish_operation`, even if the change is not made.
    fn enter_operation(
        &self,
        process: u32,
        change: &OwnedChange,
    ) -> Result<EnteredOperation, Errno> {
        let mut table = self.lock_for_change(change);
        let entered = table
            .machine
            .enter_operation(process, &change.operation(NO_HANDLE_YET));
        match entered {
            Ok(entered) => {
                self.has_no_scope
                    .store(table.machine.is_empty(), Ordering::Release);
                Ok(entered)
            }
            Err(error) => {
                let counts = table.counts.entry(error.rule().to_owned()).or_default();
                counts.failures += 1;
                drop(table);
                tracing::warn!(%error, ?change, process, "a commit rule refuses a change");
                Err(Errno::BUSY)
            }
        }
    }

    /// Finds the job of a process, once for each process.
    fn record_job(&self, process: u32) {
        if self.table.lock().machine.knows_job(process) {
            return;
        }
        let job = jobs::job_of(process);
        self.table.lock().machine.record_job(process, job);
        self.exit_watcher.add(job);
    }

    /// Returns whether `process`, which closes a file, or a descendant has another descriptor of the file for writing.
    /// Then the close does not count yet for the rules, and `process` or that descendant is recorded as a holder.
    ///
    /// A child between its fork and its exec has copies of all descriptors, and the exec closes those with FD_CLOEXEC.
    /// Each thread that starts a program makes such a child. The close waits for the exec, so that it can return the
    /// result of the commit.
    fn is_open_elsewhere(&self, process: u32, handle: HandleId) -> bool {
        let Some(inode) = self.gate.engine().open_files.inode_of_handle(handle) else {
            return false;
        };
        let began_waiting = Instant::now();
        loop {
            // The count is read before /proc, so that a close in between ends the wait below.
            let closes_before = self.table.lock().inherited_closes(handle);
            let Some(holder) = descriptors::find_holder(process, inode.0, mountinfo::FIRN) else {
                return false;
            };
            let timeout = if holder.closes_at_exec {
                EXEC_TIMEOUT
            } else {
                INHERITED_TIMEOUT
            };
            let time_left = timeout.saturating_sub(began_waiting.elapsed());
            let mut table = self.table.lock();
            if holder.process == process || time_left.is_zero() {
                table
                    .machine
                    .record_inherited_handle(holder.process, handle.0);
                // `exit_watcher` has a lock of its own, so this one is released first.
                drop(table);
                self.exit_watcher.add(holder.process);
                return true;
            }
            // The exec closes the child's descriptor, which is reported as a close of the handle.
            if table.inherited_closes(handle) == closes_before {
                table.wait_for(&self.changed, time_left);
            }
        }
    }

    /// Reports to the rules' state machine that a handle is closed for good, and carries out what follows, such as the
    /// commit of a checkpoint that is complete now. `ending` says whether its process closed it, exited or failed. An
    /// error is the result for the closing program.
    ///
    /// A handle that no rule knows has no entry in `table.handles`.
    fn close_handle(&self, handle: HandleId, ending: Ending) -> Result<(), Errno> {
        // All ends are reported first, because the files of writers that have ended do not count for the conditions of
        // a rule.
        if self.knows(handle) && self.exit_watcher.has_unreported_exit() {
            self.exit_watcher.wait_until_reported();
        }
        let mut table = self.table.lock();
        let Some(open_handle) = table.handles.remove(&handle.0) else {
            return Ok(());
        };
        let close_by_opener = CloseReport {
            process: open_handle.opener,
            ending,
        };
        // A known writer that inherited the handle and closed it last counts instead of the opener.
        let close = open_handle.last_inherited_close.unwrap_or(close_by_opener);
        let actions = table.finish_close(handle, close);
        // The actions call the backing and take the lock themselves.
        drop(table);
        self.carry_out_and_await_hosts(actions, EventKind::Close)
    }

    /// Carries out actions after a change that may complete a checkpoint, and waits until the other hosts have
    /// committed the checkpoints that this host has proposed.
    fn carry_out_and_await_hosts(
        &self,
        actions: Vec<Action>,
        event: EventKind,
    ) -> Result<(), Errno> {
        let mut proposed_scopes = Vec::new();
        for action in &actions {
            if let Action::Propose { scope } = action {
                proposed_scopes.push(*scope);
            }
        }
        self.carry_out(actions)?;
        self.await_hosts(&proposed_scopes, event)
    }
}

impl ChangeWatch for CommitRules {
    fn concerns(&self, change: &WatchedChange) -> bool {
        let Some(change) = self.resolve_paths(change) else {
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

    /// Reports a change of a program to the commit rules before it is made, and carries out what must come first, such
    /// as the begin of a checkpoint's transaction. Waits while that checkpoint is being committed.
    ///
    /// Returns the ticket for `end_change`. An error means that the change must not be made.
    fn begin_change(&self, caller: Caller, change: &WatchedChange) -> Result<WatchTicket, Errno> {
        // An object of the change has no name any more.
        let Some(change) = self.resolve_paths(change) else {
            return Err(Errno::STALE);
        };
        let process = process_of_thread(caller.pid);
        self.record_job(process);
        // Waits if the checkpoint (scope) of this change is being committed. The actions may begin its transaction.
        let EnteredOperation { actions, scope } = self.enter_operation(process, &change)?;
        let carried_out = self.carry_out(actions);
        // The end of the process may later complete the checkpoint, or make it fail.
        if scope.is_some() {
            self.exit_watcher.add(process);
        }
        let mut table = self.table.lock();
        if let Err(errno) = carried_out {
            // The actions that had to come first have failed, so the change is not made.
            let actions = table.withdraw_change(process, &change, scope);
            // The actions call the backing and take the lock themselves.
            drop(table);
            self.carry_out(actions)?;
            return Err(errno);
        }
        table.last_change_number += 1;
        let number = table.last_change_number;
        let admitted = AdmittedChange {
            process,
            change,
            scope,
        };
        table.admitted_changes.insert(number, admitted);
        Ok(WatchTicket { number })
    }

    /// Reports the end of a change that `begin_change` has admitted, and carries out what follows, such as the commit
    /// of a checkpoint that is complete now. `handle` is set if the change opened a file for writing; its close is
    /// watched if the file belongs to a checkpoint.
    fn end_change(&self, ticket: WatchTicket, is_made: bool, handle: Option<HandleId>) {
        let mut table = self.table.lock();
        // `begin_change` has added the entry, and has told the rules' state machine of the change.
        let Some(admitted) = table.admitted_changes.remove(&ticket.number) else {
            return;
        };
        if let Some(handle) = handle
            && admitted.scope.is_some()
        {
            let open_handle = OpenHandle {
                opener: admitted.process,
                last_inherited_close: None,
                inherited_closes: 0,
            };
            table.handles.insert(handle.0, open_handle);
        }
        let handle_number = handle.map_or(NOT_OPEN, |handle| handle.0);
        let operation = admitted.change.operation(handle_number);
        let actions =
            table
                .machine
                .finish_operation(admitted.process, &operation, admitted.scope, is_made);
        // The actions call the backing and take the lock themselves.
        drop(table);
        if let Err(errno) = self.carry_out_and_await_hosts(actions, EventKind::Name) {
            tracing::warn!(%errno, "a complete checkpoint is not committed yet");
        }
    }

    fn must_drop_contents(&self, inode: InodeId) -> bool {
        if self.has_no_scope.load(Ordering::Acquire) || !self.exit_watcher.has_unreported_exit() {
            return false;
        }
        let Some(path) = self.gate.engine().tree.path_of(inode) else {
            return false;
        };
        self.table.lock().machine.is_near_scope(&path)
    }

    fn settle(&self, inode: InodeId) {
        if self.must_drop_contents(inode) {
            self.exit_watcher.wait_until_reported();
        }
    }

    fn knows(&self, handle: HandleId) -> bool {
        self.table.lock().handles.contains_key(&handle.0)
    }

    /// Handles a close(2) of a file. If the file belongs to a checkpoint and this close completes it, the checkpoint is
    /// committed, and the result is that of the commit.
    ///
    /// Two processes may close the same handle:
    /// * The opener: the file counts as closed now if the opener was killed, or if no descriptor of it is left in the
    ///   opener and its descendants. Otherwise it counts as closed when the kernel releases the handle.
    /// * A child that has inherited the handle: the close is only recorded, for the release by the kernel.
    fn close(&self, caller: Caller, handle: HandleId, closing: Closing) -> Result<(), Errno> {
        // A close by a killed process means that its file may be incomplete.
        let ending = match closing {
            Closing::Called => Ending::Success,
            Closing::Exited => Ending::Exit,
            Closing::Killed => Ending::Failure,
        };
        let process = process_of_thread(caller.pid);
        let mut table = self.table.lock();
        let is_writer = table.machine.is_writer(process);
        let Some(open_handle) = table.handles.get_mut(&handle.0) else {
            return Ok(());
        };
        // How a child ended counts at the release of the handle, if the child is a known writer.
        if open_handle.opener != process {
            let close = CloseReport { process, ending };
            open_handle.record_inherited_close(is_writer.then_some(close));
            // A thread in `is_open_elsewhere` waits for such a close.
            drop(table);
            self.changed.notify_all();
            return Ok(());
        }
        drop(table);
        // Another process may write more through its copy of the descriptor, so the file counts as closed when the
        // handle is released.
        if ending != Ending::Failure && self.is_open_elsewhere(process, handle) {
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
