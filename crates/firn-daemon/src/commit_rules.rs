//! Commit rules at work: what programs change drives transactions of the mount.
//!
//! ```text
//!   firn-fuse ── before, after a change, close ──► CommitRules ──► firn_rules::Machine
//!                                                      │ begin, join, commit, abort
//!   exits of writers (pidfd) ────────────────────► ────┘ ──► gate, firn-transact
//! ```
//!
//! Promises
//! * A change in a scope is made while its transaction is open, or waits: no change of a program comes between a commit and the
//!   begin that follows it.
//! * The lock of the table is held for an instant, and no call of the backing is made with it.
//! * An abort is carried out by the thread of this module, which holds nothing that the kernel waits for.

mod exits;
mod rotation;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read as _};
use std::iter;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use firn_backing::lock::{Mutex, MutexGuard};
use firn_backing::{Caller, Errno};
use firn_engine::{Closing, HandleId, InodeId};
use firn_format::quote::quoted;
use firn_fuse::{ChangeWatch, WatchTicket, WatchedChange};
use firn_protocol::Status;
use firn_rules::{
    Action, Ending, LocatedPath, Machine, Operation, RULES_BYTES_MAX, RuleSet, RuleSetError,
    ScopeNumber, load_rules,
};
use firn_transact::machine::Pending;
use firn_transact::{Found, TransactionError};
use parking_lot::Condvar;

use self::exits::Exits;
use crate::error::MountError;
use crate::gate::TransactionGate;
use crate::parts::Forget;

/// The rules that the option names.
pub(crate) fn load(words: &[String]) -> Result<RuleSet, RuleSetError> {
    load_rules(&words.join(","), read_rules)
}

/// A little more than a file of rules may have, so that a longer one is seen.
fn read_rules(path: &str) -> io::Result<String> {
    let mut text = String::new();
    let file = File::open(path)?;
    file.take(RULES_BYTES_MAX as u64 + 1)
        .read_to_string(&mut text)?;
    Ok(text)
}

/// What became of scopes of a rule.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) commits: u64,
    pub(crate) aborts: u64,
    pub(crate) failures: u64,
    /// Checkpoints that `keep` removed.
    pub(crate) removals: u64,
}

/// The commit rules of one mount.
pub(crate) struct CommitRules {
    gate: Arc<TransactionGate>,
    forget: Forget,
    /// What paths are looked up in, without the lock of the table.
    rules: Arc<RuleSet>,
    table: Mutex<Table>,
    /// No scope is open: what no rule has to do with is free without a look into the table.
    has_no_scope: AtomicBool,
    /// A scope has begun or ended.
    changed: Condvar,
    exits: Exits,
}

struct Table {
    machine: Machine,
    scopes: BTreeMap<ScopeNumber, Transaction>,
    /// Processes of the handles that are open in scopes.
    handles: HashMap<u64, u32>,
    /// Changes that were let in.
    tickets: HashMap<u64, Ticket>,
    last_ticket: u64,
    counts: BTreeMap<String, Counts>,
    /// Rules and directories in which there may be more than the rule keeps.
    rotations: BTreeSet<(usize, Vec<u8>)>,
}

/// The transaction of a scope.
#[derive(Clone)]
struct Transaction {
    rule: String,
    serial: u64,
    dir: Vec<u8>,
    paths: BTreeSet<Vec<u8>>,
}

/// A change that was let in.
struct Ticket {
    process: u32,
    change: OwnedChange,
    scope: Option<ScopeNumber>,
}

/// A change with the paths that it is about.
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

    /// `handle`: of the file that is open, once that is known.
    fn operation(&self, handle: u64) -> Operation<'_> {
        match self {
            Self::Open(path) => Operation::Open { path, handle },
            Self::Change(path) => Operation::Change { path },
            Self::Remove(path) => Operation::Remove { path },
            Self::Rename(from, to) => Operation::Rename { from, to },
        }
    }
}

fn shown(paths: &BTreeSet<Vec<u8>>) -> String {
    let paths: Vec<String> = paths.iter().map(|path| quoted(path)).collect();
    paths.join(" ")
}

fn name_of(path: &[u8]) -> OsString {
    let name = path.rsplit(|byte| *byte == b'/').next();
    OsStr::from_bytes(name.unwrap_or(path)).to_owned()
}

/// The process of a thread; the thread where that cannot be seen.
fn process_of(thread: u32) -> u32 {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status"));
    let status = status.unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Tgid:"));
    line.and_then(|text| text.trim().parse().ok())
        .unwrap_or(thread)
}

fn errno_of(error: &TransactionError) -> Errno {
    tracing::warn!(%error, "a transaction of a commit rule");
    match (error.backing_errno(), error) {
        (Some(errno), _) => errno,
        (None, TransactionError::Begin(_)) => Errno::BUSY,
        (None, _) => Errno::IO,
    }
}

impl CommitRules {
    /// Watches the changes of a mount from now on.
    pub(crate) fn new(
        gate: &Arc<TransactionGate>,
        rules: RuleSet,
        forget: &Forget,
    ) -> Result<Arc<Self>, MountError> {
        let exits = Exits::new()
            .map_err(|errno| MountError::io("watch the ends of programs")(errno.into()))?;
        let rules = Arc::new(rules);
        let made = Arc::new(Self {
            gate: Arc::clone(gate),
            forget: Arc::clone(forget),
            rules: Arc::clone(&rules),
            table: Mutex::new(Table {
                machine: Machine::new(rules),
                scopes: BTreeMap::new(),
                handles: HashMap::new(),
                tickets: HashMap::new(),
                last_ticket: 0,
                counts: BTreeMap::new(),
                rotations: BTreeSet::new(),
            }),
            has_no_scope: AtomicBool::new(true),
            changed: Condvar::new(),
            exits,
        });
        let watch: Weak<Self> = Arc::downgrade(&made);
        gate.set_watch(watch);
        Ok(made)
    }

    /// Says which transactions of the status are of rules, and what each waits for.
    pub(crate) fn show(&self, shown: &mut Status) {
        let table = self.table.lock();
        for transaction in table.scopes.values() {
            *shown
                .rule_waits
                .entry(transaction.rule.clone())
                .or_default() += 1;
            let is_of = |path: &[u8]| transaction.paths.contains(path);
            let found = shown.transactions.iter_mut();
            for one in found.filter(|one| is_of(one.scope.as_bytes())) {
                one.rule = Some(transaction.rule.clone());
                one.waits_for = table.machine.waits_of(one.scope.as_bytes());
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

    /// Waits for the ends of writers, until [`CommitRules::stop`].
    pub(crate) fn watch_exits(&self) {
        self.exits
            .watch(&|process, ending| self.exited(process, ending), &|| {
                self.rotate()
            });
    }

    /// `is_unseen`: no program saw the mount.
    pub(crate) fn stop(&self, is_unseen: bool) {
        self.exits.stop();
        if !is_unseen {
            self.abort_all();
        }
    }

    fn locate_at(&self, inode: InodeId) -> Option<LocatedPath> {
        let path = self.gate.engine().tree.path_of(inode)?;
        Some(self.rules.locate(&path))
    }

    fn locate_name(&self, parent: InodeId, name: &OsStr) -> Option<LocatedPath> {
        let mut path = self.gate.engine().tree.path_of(parent)?;
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name.as_bytes());
        Some(self.rules.locate(&path))
    }

    /// None where the names of it are not known: then it is in no scope.
    fn change_of(&self, change: &WatchedChange) -> Option<OwnedChange> {
        Some(match change {
            WatchedChange::Open(inode) => OwnedChange::Open(self.locate_at(*inode)?),
            WatchedChange::Cut(inode) => OwnedChange::Change(self.locate_at(*inode)?),
            WatchedChange::Create(dir, name) => OwnedChange::Open(self.locate_name(*dir, name)?),
            WatchedChange::Make(dir, name) => OwnedChange::Change(self.locate_name(*dir, name)?),
            WatchedChange::Remove(dir, name) => OwnedChange::Remove(self.locate_name(*dir, name)?),
            WatchedChange::Rename((dir, name), (new_dir, new_name)) => OwnedChange::Rename(
                self.locate_name(*dir, name)?,
                self.locate_name(*new_dir, new_name)?,
            ),
        })
    }

    /// Whether there is something at a path, for programs.
    fn is_there(&self, path: &[u8]) -> bool {
        self.gate.engine().tree.object_at(path).is_ok()
    }

    /// Stores what is read without the lock, and wakes changes that wait for a scope.
    fn publish(&self, table: MutexGuard<'_, Table>) {
        self.has_no_scope
            .store(table.machine.is_empty(), Ordering::Release);
        drop(table);
        self.changed.notify_all();
    }

    // ---- what the machine asks for -----------------------------------------------------------

    /// Carries actions out, in their order. What fails is told the machine.
    fn carry_out(&self, actions: Vec<Action>) -> Result<(), Errno> {
        let mut first = Ok(());
        for action in actions {
            let done = match action {
                Action::Begin {
                    scope,
                    rule,
                    dir,
                    tops,
                } => self.begin(scope, &rule, &dir, tops),
                Action::Join { scope, tops } => self.join(scope, tops),
                Action::Commit { scope } => self.commit(scope),
                Action::Abort { scope, reason } => {
                    self.abort(scope, &reason);
                    Ok(())
                }
                Action::Rotate { rule, dir } => {
                    self.table.lock().rotations.insert((rule, dir));
                    self.exits.wake();
                    Ok(())
                }
                Action::Remove { scope, rule, tops } => self.remove(scope, &rule, tops),
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
        tops: Vec<Vec<u8>>,
    ) -> Result<(), Errno> {
        let names: Vec<OsString> = tops.iter().map(|top| name_of(top)).collect();
        let was_there = tops.iter().any(|top| self.is_there(top));
        let paths: BTreeSet<Vec<u8>> = tops.into_iter().collect();
        let begun = self
            .gate
            .quiesce_names(dir, &paths, Pending::Drain, |root| {
                Ok(self.gate.store().begin_names(root, dir, &names)?.serial())
            });
        let mut table = self.table.lock();
        let done = match begun {
            Ok(serial) => {
                tracing::info!(rule, paths = %shown(&paths), "a commit rule begins a transaction");
                let transaction = Transaction {
                    rule: rule.to_owned(),
                    serial,
                    dir: dir.to_vec(),
                    paths,
                };
                table.scopes.insert(scope, transaction);
                table.machine.begun(scope, was_there);
                Ok(())
            }
            Err(error) => {
                table.machine.aborted(scope);
                table.counts.entry(rule.to_owned()).or_default().failures += 1;
                Err(errno_of(&error))
            }
        };
        self.publish(table);
        done
    }

    fn join(&self, scope: ScopeNumber, tops: Vec<Vec<u8>>) -> Result<(), Errno> {
        let Some(transaction) = self.table.lock().scopes.get(&scope).cloned() else {
            return Err(Errno::STALE);
        };
        let names: Vec<OsString> = tops.iter().map(|top| name_of(top)).collect();
        let paths: BTreeSet<Vec<u8>> = tops.into_iter().collect();
        let joined = self
            .gate
            .quiesce_names(&transaction.dir, &paths, Pending::Drain, |_| {
                match self.gate.store().transaction_numbered(transaction.serial) {
                    Some(Found::Open(open)) => Ok(open.add_names(&names)?),
                    _ => Err(Errno::STALE.into()),
                }
            });
        let mut table = self.table.lock();
        if joined.is_ok()
            && let Some(transaction) = table.scopes.get_mut(&scope)
        {
            transaction.paths.extend(paths);
        }
        table.machine.begun(scope, false);
        self.publish(table);
        joined.map_err(|error| errno_of(&error))
    }

    fn commit(&self, scope: ScopeNumber) -> Result<(), Errno> {
        let transaction = self.table.lock().scopes.get(&scope).cloned();
        let Some(transaction) = transaction else {
            let mut table = self.table.lock();
            table.machine.aborted(scope);
            self.publish(table);
            return Ok(());
        };
        let committed = self.commit_transaction(&transaction);
        let mut table = self.table.lock();
        let counts = table.counts.entry(transaction.rule.clone()).or_default();
        let more = match &committed {
            Ok(()) => {
                counts.commits += 1;
                table.scopes.remove(&scope);
                table.machine.committed(scope)
            }
            Err(_) => {
                counts.failures += 1;
                table.machine.not_committed(scope);
                Vec::new()
            }
        };
        self.publish(table);
        match committed {
            Ok(()) => {
                let paths = shown(&transaction.paths);
                tracing::info!(rule = transaction.rule, %paths, "a commit rule has committed a checkpoint");
                self.carry_out(more)
            }
            Err(error) => Err(errno_of(&error)),
        }
    }

    fn commit_transaction(&self, transaction: &Transaction) -> Result<(), TransactionError> {
        let store = self.gate.store();
        let (dir, paths) = (&transaction.dir, &transaction.paths);
        let is_open = || match store.transaction_numbered(transaction.serial) {
            Some(Found::Open(open)) => Some(open),
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
            Some(Found::Decided(decided)) => Ok(decided.apply()?),
            _ => Ok(()),
        }
    }

    fn abort(&self, scope: ScopeNumber, reason: &str) {
        let transaction = self.table.lock().scopes.get(&scope).cloned();
        if let Some(transaction) = &transaction {
            let (rule, paths) = (&transaction.rule, shown(&transaction.paths));
            match self.abort_transaction(transaction) {
                Ok(()) => {
                    tracing::warn!(rule, %paths, reason, "a commit rule drops a checkpoint that is not complete");
                }
                Err(error) => {
                    tracing::error!(%error, rule, %paths, "a checkpoint that is not complete cannot be dropped; the next mount does");
                }
            }
        }
        let mut table = self.table.lock();
        table.machine.aborted(scope);
        table.scopes.remove(&scope);
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
        let engine = self.gate.engine();
        for path in paths {
            let wrong = engine.namespace.revalidate_names(path);
            wrong.into_iter().for_each(&*self.forget);
        }
        let directory = engine.tree.cached_at(dir);
        directory.into_iter().for_each(&*self.forget);
        Ok(())
    }

    /// A writer is gone. Called by the thread that watches them.
    fn exited(&self, process: u32, ending: Ending) {
        let actions = self.table.lock().machine.exited(process, ending);
        if let Err(errno) = self.carry_out(actions) {
            tracing::warn!(%errno, process, "after the end of a process");
        }
    }

    /// Nothing that is open now comes to its event any more: the mount ends.
    pub(crate) fn abort_all(&self) {
        let actions = self.table.lock().machine.abort_all("the mount ends");
        if let Err(errno) = self.carry_out(actions) {
            tracing::warn!(%errno, "at the end of the mount");
        }
    }

    /// Waits until an operation is not held up by the begin or end of a scope.
    fn wait_until_free(&self, change: &OwnedChange) -> MutexGuard<'_, Table> {
        let mut table = self.table.lock();
        while table.machine.is_busy(&change.operation(0)) {
            table.wait(&self.changed);
        }
        table
    }

    fn close_handle(&self, handle: HandleId, ending: Ending) -> Result<(), Errno> {
        let mut table = self.table.lock();
        let Some(process) = table.handles.remove(&handle.0) else {
            return Ok(());
        };
        let operation = Operation::Close {
            handle: handle.0,
            ending,
        };
        let actions = table.machine.after(process, &operation, None, true);
        drop(table);
        self.carry_out(actions)
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

    fn begin_change(&self, caller: Caller, change: &WatchedChange) -> Result<WatchTicket, Errno> {
        let change = self.change_of(change).ok_or(Errno::STALE)?;
        let process = process_of(caller.pid);
        let mut table = self.wait_until_free(&change);
        let entered = table.machine.before(process, &change.operation(0));
        let entered = entered.map_err(|error| {
            tracing::warn!(%error, ?change, "a change is refused");
            Errno::BUSY
        })?;
        self.has_no_scope
            .store(table.machine.is_empty(), Ordering::Release);
        drop(table);
        let done = self.carry_out(entered.actions);
        if entered.scope.is_some() {
            self.exits.add(process);
        }
        let mut table = self.table.lock();
        if let Err(errno) = done {
            let more = table
                .machine
                .after(process, &change.operation(0), entered.scope, false);
            drop(table);
            self.carry_out(more)?;
            return Err(errno);
        }
        table.last_ticket += 1;
        let number = table.last_ticket;
        let ticket = Ticket {
            process,
            change,
            scope: entered.scope,
        };
        table.tickets.insert(number, ticket);
        Ok(WatchTicket { number })
    }

    fn end_change(&self, ticket: WatchTicket, is_made: bool, handle: Option<HandleId>) {
        let mut table = self.table.lock();
        let Some(ticket) = table.tickets.remove(&ticket.number) else {
            return;
        };
        if let (Some(handle), Some(_)) = (handle, ticket.scope) {
            table.handles.insert(handle.0, ticket.process);
        }
        let operation = ticket.change.operation(handle.map_or(0, |handle| handle.0));
        let actions = table
            .machine
            .after(ticket.process, &operation, ticket.scope, is_made);
        drop(table);
        if let Err(errno) = self.carry_out(actions) {
            tracing::warn!(%errno, "a checkpoint that is complete is not committed yet");
        }
    }

    fn must_settle(&self, inode: InodeId) -> bool {
        if self.has_no_scope.load(Ordering::Acquire) || !self.exits.has_untold_end() {
            return false;
        }
        let path = self.gate.engine().tree.path_of(inode);
        path.is_some_and(|path| self.table.lock().machine.is_near_scope(&path))
    }

    fn settle(&self, inode: InodeId) {
        if self.must_settle(inode) {
            self.exits.wait_until_told();
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
        // A child that closes what it has inherited leaves the file to its parent.
        let opener = self.table.lock().handles.get(&handle.0).copied();
        if opener != Some(process_of(caller.pid)) {
            return Ok(());
        }
        self.close_handle(handle, ending)
    }

    fn release(&self, handle: HandleId) {
        if let Err(errno) = self.close_handle(handle, Ending::Success) {
            tracing::warn!(%errno, "a checkpoint that is complete is not committed yet");
        }
    }
}
