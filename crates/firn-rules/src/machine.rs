//! The state machine of commit rules, which say what files are one checkpoint and when it is complete. Its input is the
//! operations of programs; its output is begins, commits and aborts of checkpoints. It does no I/O.
//!
//! Terms
//! * A *scope* is one checkpoint that programs write: some names in a directory and all below them. These names are its
//!   *tops*.
//! * The *event* of a rule is the operation after which a scope counts as complete. The *conditions* (`needs`) of a
//!   rule say which files a complete scope must have.
//! * A *removal* is a scope in which programs have only removed names of an earlier, committed scope.
//! * A *job* is a process and all processes that it has started. The job has the number of this first process.
//!
//! ```text
//!                first change                     event, needs hold
//!    (nothing) ───────────────► open ──────────────────────────────► committed
//!                                │  all writers gone, no event
//!                                └──────────────────────────────────► aborted
//!
//!                a name of a committed scope is removed first
//!    committed ───────────────► removal ── a newer one is committed, and the removal has ended ► removed
//!                                   ├───── its programs ended well, and the mount ends ────────► removed
//!                                   └───── the remover was killed, a newer one failed ─────────► as before
//! ```
//!
//! Before an operation the caller calls [`Machine::enter_operation`] and carries out the returned actions. Then the
//! caller makes the operation and calls [`Machine::finish_operation`]. Until its commit a scope is visible only to the
//! programs that write it.
//!
//! Invariants
//! * A top belongs to at most one open scope.
//! * A scope commits once, and only while no descriptor in it is open for writing.
//! * The scope that was committed last is removed only after a newer one is committed. There is one exception:
//!   programs that ended well removed it, the mount ends, and no newer scope was begun.
//! * Two jobs never write the same file of a scope.
//! * `keep=N` never removes a scope that is open, that was committed last, or to which a link leads.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::joint::{HostState, NeedCount, OwnPart};
use crate::language::{
    Condition, EventTarget, FoundScope, RequiredCount, Rule, RuleEvent, ScopeIdentity, parent_of,
    relative,
};
use crate::pattern::Captures;
use crate::rule_set::{LocatedPath, PathRole, RuleSet};

/// Number of a scope. A number is never reused.
pub type ScopeNumber = u64;

/// Replaces the handle of a file that the program created without opening it for writing.
pub const NOT_OPEN: u64 = u64::MAX;

/// How a process ended, or how a file was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The file was closed by close(2), or the process exited with status 0.
    Success,
    /// The end of the process closed the file. The exit status, which is reported separately, shows whether it
    /// succeeded.
    Exit,
    /// The process ended by a signal, with another exit status, or in an unknown way.
    Failure,
}

/// An operation of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation<'a> {
    /// Opens a file for writing, or creates one.
    ///
    /// `handle` is the caller's number of the open file. It is [`NOT_OPEN`] if the program created a file without
    /// writing to it.
    Open { path: &'a LocatedPath, handle: u64 },
    /// Closes an open file, or ends while the file is open.
    Close { handle: u64, ending: Ending },
    /// Creates a directory or a link, or changes attributes or the length of a file.
    Change { path: &'a LocatedPath },
    /// Renames a file or directory, possibly over an existing one.
    Rename {
        from: &'a LocatedPath,
        to: &'a LocatedPath,
    },
    /// Removes a name.
    Remove { path: &'a LocatedPath },
}

impl<'a> Operation<'a> {
    /// Returns the paths that the operation changes. A close changes none.
    fn paths(&self) -> [Option<&'a LocatedPath>; 2] {
        match *self {
            Self::Close { .. } => [None, None],
            Self::Open { path, .. } | Self::Change { path } | Self::Remove { path } => {
                [Some(path), None]
            }
            Self::Rename { from, to } => [Some(from), Some(to)],
        }
    }
}

/// An action that the caller must carry out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Begin a transaction to which the names `tops` in the directory `dir` belong from now on.
    Begin {
        scope: ScopeNumber,
        rule: String,
        dir: Vec<u8>,
        tops: Vec<Vec<u8>>,
        /// Key under which other hosts know the scope.
        key: Vec<u8>,
    },
    /// Add these names to the transaction.
    Join {
        scope: ScopeNumber,
        tops: Vec<Vec<u8>>,
    },
    /// Commit the scope. Commits must be carried out in the order of the actions.
    Commit { scope: ScopeNumber },
    /// Ask all hosts to decide ([`crate::joint`]). As far as this host has seen, the scope is complete or has failed.
    Propose { scope: ScopeNumber },
    /// Abort the scope: undo all its changes.
    Abort { scope: ScopeNumber, reason: String },
    /// Check for checkpoints beyond the number that the rule keeps: list the directory and call [`Machine::rotate`].
    Rotate { rule: usize, dir: Vec<u8> },
    /// Remove these names, all or none. Then call [`Machine::record_committed`] or [`Machine::record_aborted`].
    Remove {
        scope: ScopeNumber,
        rule: String,
        tops: Vec<Vec<u8>>,
        /// Key under which other hosts know the checkpoint.
        key: Vec<u8>,
    },
}

/// The actions that must come before an operation, and the scope of the operation.
#[derive(Debug, Default)]
pub struct EnteredOperation {
    /// The actions, in the order in which they must be carried out.
    pub actions: Vec<Action>,
    /// The scope, to be passed to [`Machine::finish_operation`].
    pub scope: Option<ScopeNumber>,
}

/// The reason why an operation is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The names of the operation are in two scopes.
    #[error(
        "it would move a file from one incomplete checkpoint into another (rule `{rule}`): wait until one of them is complete"
    )]
    TwoScopes {
        /// The rule of the first scope.
        rule: String,
    },
    /// A living process of another job has written the same file of the scope.
    #[error(
        "another job writes {path} of this incomplete checkpoint (rule `{rule}`): let that job end first, or give each job a separate directory"
    )]
    OtherJob {
        /// The rule.
        rule: String,
        /// The file.
        path: String,
    },
    /// A writer of the scope has failed. What another process adds would be dropped with the scope.
    #[error(
        "a writer of this checkpoint has failed, and other writers still run (rule `{rule}`): the checkpoint is dropped when all have ended; write it again then"
    )]
    Failed {
        /// The rule.
        rule: String,
    },
}

impl Refusal {
    /// Returns the name of the rule.
    pub fn rule(&self) -> &str {
        match self {
            Self::TwoScopes { rule } | Self::Failed { rule } | Self::OtherJob { rule, .. } => rule,
        }
    }
}

/// Identifies a scope among those of all rules.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ScopeKey {
    rule: usize,
    dir: Vec<u8>,
    identity: ScopeIdentity,
}

/// The scope to which the rules assign a path.
struct AssignedScope {
    key: ScopeKey,
    /// The name in the scope's directory that contains the path.
    top: Vec<u8>,
}

/// What programs have done in an open scope so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScopePurpose {
    /// Programs write a checkpoint.
    Write,
    /// Programs have only removed names of a committed scope.
    Removal,
    /// Programs that have ended well removed a part of a committed scope. The rest is complete.
    PartialRemoval,
}

/// What a change does that lies in the names of an open scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NextChangeEffect {
    /// It belongs to the open scope.
    JoinsOpenScope,
    /// The open scope is ending, so the change begins a new one.
    BeginsScope,
}

/// An open scope.
#[derive(Debug)]
struct Scope {
    key: ScopeKey,
    purpose: ScopePurpose,

    // Names and files.
    /// Names in the directory of the scope that belong to it, with all below them.
    tops: BTreeSet<Vec<u8>>,
    /// Tops that do not exist now, because programs removed them or gave them other names.
    removed_tops: BTreeSet<Vec<u8>>,
    /// Tops that were renamed within their directory: old and new name.
    renamed_tops: Vec<[Vec<u8>; 2]>,
    /// Files that exist, as far as the machine has seen them.
    files: BTreeSet<Vec<u8>>,
    /// Files of the last commit of this checkpoint that programs have not written again yet. The condition `renewed`
    /// requires that this set is empty.
    unwritten: BTreeSet<Vec<u8>>,
    /// Files that are open for writing, by handle.
    open: BTreeMap<u64, Vec<u8>>,
    /// The last file that was refused to another job.
    last_refused_file: Option<String>,

    writers: ScopeWriters,

    // State. The flags are independent of each other.
    /// Whether a checkpoint of this name existed before.
    existed_before: bool,
    /// Whether the event of the rule has happened, so that the scope counts as complete. Some later changes set it to
    /// false again, such as the first change for the next checkpoint in the same scope.
    event_seen: bool,
    /// Whether a writer failed. The scope is then aborted once all its writers have ended.
    has_failed: bool,
    /// Only used by a removal: whether a newer checkpoint was begun after the removal, and was aborted.
    has_newer_failed: bool,
    /// Whether the scope contains, besides its own checkpoint, the next one, of which the other hosts do not know. The
    /// next checkpoint is complete only after the next event.
    is_extended: bool,
    /// Whether the caller is still beginning the scope, or adding a name to it. Operations in the scope wait.
    is_beginning: bool,
    /// Whether the caller was instructed to commit or abort the scope. Operations in the scope wait.
    is_ending: bool,
    /// Number of operations in the scope that were allowed by [`Machine::enter_operation`] and not ended by
    /// [`Machine::finish_operation`].
    operations_under_way: usize,
    /// Counter of changes and of ends of writers. It shows whether the scope has changed since a host published it.
    changes: u64,
}

/// Processes and jobs that write an open scope.
#[derive(Debug, Default)]
struct ScopeWriters {
    /// Living processes that changed something in the scope.
    living: BTreeSet<u32>,
    /// All processes that changed something in the scope.
    all: BTreeSet<u32>,
    /// Jobs that still run although their writers have ended successfully, such as a shell script between two commands.
    idle_jobs: BTreeSet<u32>,
    /// Jobs that opened files for writing, by path of the file.
    file_jobs: BTreeMap<Vec<u8>, u32>,
    /// Files that were closed by the end of a process, by process. They wait until its exit status is known.
    closed_by_exit: BTreeMap<u32, Vec<Vec<u8>>>,
}

/// A scope that was committed.
#[derive(Clone, Debug)]
struct CommittedScope {
    key: ScopeKey,
    tops: BTreeSet<Vec<u8>>,
    files: BTreeSet<Vec<u8>>,
    /// Number of writers that were alive at the commit.
    writers: usize,
}

/// A process that wrote in a scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Writer {
    /// Process id.
    pub process: u32,
    /// Whether the process is alive.
    pub is_living: bool,
}

/// State of a scope for the status and for people.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ScopeState {
    /// Number of the scope.
    pub scope: ScopeNumber,
    /// The name of its rule.
    pub rule: String,
    /// Name of the scope: its first top.
    pub path: String,
    /// Number of descriptors that are open for writing.
    pub open: usize,
    /// The condition that the commit waits for.
    pub waits_for: String,
}

/// The state machine for the operations of one mount.
#[derive(Debug)]
pub struct Machine {
    rules: Arc<RuleSet>,
    last_number: ScopeNumber,
    scopes: BTreeMap<ScopeNumber, Scope>,
    /// Committed scopes, the newest last.
    committed: Vec<CommittedScope>,
    /// The job of each process that writes. All other processes belong to one job with the number 0.
    jobs: BTreeMap<u32, u32>,
    /// The jobs whose first process is alive.
    living_jobs: BTreeSet<u32>,
    /// Number of hosts that write a checkpoint together. 0 means that this host writes alone.
    hosts: usize,
}

/// Maximum number of commits of one rule in one directory that the machine remembers.
const COMMITTED_MAX: usize = 64;

/// Sort key of a checkpoint by its step: by the number, or by the characters if the step is not a number.
struct StepOrder {
    /// Infinite if the step is not a number.
    number: f64,
    text: String,
}

impl StepOrder {
    fn new(text: &str) -> Self {
        Self {
            number: text.parse().unwrap_or(f64::INFINITY),
            text: text.to_owned(),
        }
    }

    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        let numbers = self.number.total_cmp(&other.number);
        numbers.then_with(|| self.text.cmp(&other.text))
    }
}

impl Scope {
    /// Creates a scope (the files of one checkpoint) without names, files and writers. `purpose` is whether programs
    /// write it or remove it. All flags are false; the fields have docs at the definition of [`Scope`].
    fn new(key: ScopeKey, purpose: ScopePurpose) -> Self {
        Self {
            key,
            purpose,
            // Names and files.
            tops: BTreeSet::new(),
            removed_tops: BTreeSet::new(),
            renamed_tops: Vec::new(),
            files: BTreeSet::new(),
            unwritten: BTreeSet::new(),
            open: BTreeMap::new(),
            last_refused_file: None,
            writers: ScopeWriters::default(),
            // State.
            existed_before: false,
            event_seen: false,
            has_failed: false,
            has_newer_failed: false,
            is_extended: false,
            is_beginning: false,
            is_ending: false,
            operations_under_way: 0,
            changes: 0,
        }
    }

    /// Returns whether a path is one of the scope's tops or lies below one.
    fn contains(&self, path: &[u8]) -> bool {
        self.tops.iter().any(|top| {
            // Not all paths are below the empty name, which is the root of the mount.
            let is_below_top = !top.is_empty() && relative(path, top).is_some();
            path == top || is_below_top
        })
    }

    /// Returns a path relative to its top. If the scope consists of files, the path is relative to their directory.
    fn path_in_scope<'a>(&self, path: &'a [u8], is_dir: bool) -> Option<&'a [u8]> {
        if is_dir {
            self.tops.iter().find_map(|top| relative(path, top))
        } else {
            relative(path, &self.key.dir)
        }
    }

    /// Returns how many files of the scope count for a condition: those that exist, or for `renewed` those that are not
    /// written again yet. `is_dir` says whether the tops are directories.
    fn count_for(&self, need: &Condition, is_dir: bool) -> usize {
        let files = match need.count {
            RequiredCount::Renewed => &self.unwritten,
            RequiredCount::Writers | RequiredCount::Same | RequiredCount::Number(_) => &self.files,
        };
        let files = ScopeFiles {
            files,
            tops: &self.tops,
            dir: &self.key.dir,
            is_dir,
        };
        files.count_for(need)
    }

    /// Returns whether programs that ended well removed the whole scope, and no newer scope was begun and dropped
    /// since.
    fn is_complete_removal(&self) -> bool {
        let has_ended =
            self.operations_under_way == 0 && !self.is_beginning && self.writers.living.is_empty();
        let has_failed = self.has_failed || self.has_newer_failed;
        has_ended && !has_failed && self.removed_tops == self.tops
    }

    /// Updates the paths of files in the scope after a rename of `from`, a file or directory, to `to`.
    ///
    /// The renamed files count as written again: they are no longer `unwritten`. So does a file that the rename
    /// replaced at `to`.
    fn rename_files(&mut self, from: &[u8], to: &[u8]) {
        let new_path = |path: &[u8]| [to, &path[from.len()..]].concat();
        let renamed_files: Vec<Vec<u8>> = self
            .files
            .iter()
            .filter(|file| is_at_or_below(file, from))
            .cloned()
            .collect();
        self.unwritten.remove(to);
        for file in &renamed_files {
            self.unwritten.remove(file);
            self.files.remove(file);
            self.files.insert(new_path(file));
        }
        if renamed_files.is_empty() {
            // This state machine has not seen the file yet, for example because it existed before the scope began.
            self.files.insert(to.to_vec());
        }
        // Open files and the writers of files are recorded by path too.
        for path in self.open.values_mut() {
            if is_at_or_below(path, from) {
                *path = new_path(path);
            }
        }
        for (path, job) in std::mem::take(&mut self.writers.file_jobs) {
            let path = if is_at_or_below(&path, from) {
                new_path(&path)
            } else {
                path
            };
            self.writers.file_jobs.insert(path, job);
        }
    }

    /// Updates the tops after a rename from `from` to `to`. A top that lost its name counts as removed, and a top that
    /// got its name again does not.
    fn rename_top(&mut self, from: &[u8], to: &[u8]) {
        if self.tops.contains(from) {
            self.removed_tops.insert(from.to_vec());
            self.renamed_tops.push([from.to_vec(), to.to_vec()]);
        }
        self.removed_tops.remove(to);
    }

    /// Adds a living process to the writers of the scope.
    fn add_writer(&mut self, process: u32) {
        self.writers.living.insert(process);
        self.writers.all.insert(process);
    }
}

/// Files of a scope, to be counted for the conditions of its rule.
struct ScopeFiles<'a> {
    files: &'a BTreeSet<Vec<u8>>,
    tops: &'a BTreeSet<Vec<u8>>,
    /// The directory of the tops.
    dir: &'a [u8],
    /// Whether the tops are directories. The patterns of conditions are relative to a top then, and otherwise to `dir`.
    is_dir: bool,
}

impl ScopeFiles<'_> {
    /// Returns how many of the files match the pattern of a condition.
    fn count_for(&self, need: &Condition) -> usize {
        let mut count = 0;
        for path in self.files {
            let path_in_scope = if self.is_dir {
                self.tops.iter().find_map(|top| relative(path, top))
            } else {
                relative(path, self.dir)
            };
            if path_in_scope.is_some_and(|path| need.files.matches(path)) {
                count += 1;
            }
        }
        count
    }
}

/// Returns whether `path` is `ancestor` or lies below it.
fn is_at_or_below(path: &[u8], ancestor: &[u8]) -> bool {
    path == ancestor || relative(path, ancestor).is_some()
}

impl CommittedScope {
    /// Returns how many files the scope had at its commit that count for a condition.
    fn count_for(&self, need: &Condition, is_dir: bool) -> usize {
        let files = ScopeFiles {
            files: &self.files,
            tops: &self.tops,
            dir: &self.key.dir,
            is_dir,
        };
        files.count_for(need)
    }
}

/// Returns the text of an obstacle: this many files have not been written again.
fn describe_not_renewed(found: usize, need: &Condition) -> String {
    format!("{found} files to be written again for `{}`", need.text)
}

/// Returns the text of an obstacle: the scope has fewer files than a condition requires.
fn describe_too_few(found: usize, required: usize, need: &Condition) -> String {
    format!("{found} files of {required} for `{}`", need.text)
}

/// Returns whether a scope has these values of captures. A scope that is identified by its path has no captures, so
/// every value fits it.
fn matches_captures(captures: &Captures, identity: &ScopeIdentity) -> bool {
    match identity {
        ScopeIdentity::Captures(scope_captures) => captures
            .iter()
            .all(|(name, value)| scope_captures.get(name) == Some(value)),
        ScopeIdentity::Path(_) => true,
    }
}

impl Machine {
    /// Creates a machine with an empty history.
    pub fn new(rules: Arc<RuleSet>) -> Self {
        Self {
            rules,
            last_number: 0,
            scopes: BTreeMap::new(),
            committed: Vec::new(),
            jobs: BTreeMap::new(),
            living_jobs: BTreeSet::new(),
            hosts: 0,
        }
    }

    /// Sets the number of hosts that write a checkpoint together. Then no host commits a checkpoint alone.
    pub fn set_hosts(&mut self, hosts: usize) {
        self.hosts = hosts;
    }

    /// Returns this host's part of a scope (the files of one checkpoint) that several hosts write and commit together
    /// ([`crate::joint`]). Returns `None` if there is no such scope.
    ///
    /// The caller must set `prepared_for` and `is_late`: they describe attempts to commit, which the machine does not
    /// know.
    pub fn own_part(&self, number: ScopeNumber) -> Option<OwnPart> {
        let scope = self.scopes.get(&number)?;
        let is_write = scope.purpose == ScopePurpose::Write;
        let has_event = if is_write {
            scope.event_seen
        } else {
            // A removal has no event. Instead it is complete once nothing prevents its commit.
            self.obstacle(number).is_none()
        };
        Some(OwnPart {
            state: self.host_state(scope),
            has_event,
            has_failed: scope.has_failed,
            ends_with_writers: is_write
                && (self.ends_with_next(scope.key.rule) || scope.existed_before),
            prepared_for: None,
            is_late: false,
        })
    }

    /// Returns the state of this host's part of a scope (the files of one checkpoint that several hosts write). The
    /// host publishes it to the other hosts.
    ///
    /// The published state has no field for two cases. Both are expressed by a count that is too high:
    /// * The scope waits for another event: one more open file. The hosts commit only without open files.
    /// * The scope is a removal, which waits for a newer checkpoint: one living writer if there is none. While a writer
    ///   lives, the hosts do not abort a scope because it is incomplete.
    fn host_state(&self, scope: &Scope) -> HostState {
        let rule = &self.rules.rules()[scope.key.rule];
        let newest = self.newest_committed(scope.key.rule, &scope.key.dir);
        let is_write = scope.purpose == ScopePurpose::Write;
        let living_writers = scope.writers.living.len();
        // The scope was extended after its event was published. An event cannot be withdrawn, so the hosts must wait
        // for the next one.
        let awaits_event = scope.is_extended && !scope.event_seen && living_writers > 0;
        let extra_open = usize::from(awaits_event);
        let open_files =
            scope.open.len() + scope.operations_under_way + scope.writers.closed_by_exit.len();
        let is_removal = !is_write;
        let min_living_writers = usize::from(is_removal);
        let mut needs = Vec::new();
        if is_write {
            for need in &rule.needs {
                let before = newest.map_or(0, |newest| newest.count_for(need, rule.scope.is_dir));
                needs.push(NeedCount {
                    found: scope.count_for(need, rule.scope.is_dir),
                    before,
                });
            }
        }
        HostState {
            changes: scope.changes,
            open: open_files + extra_open,
            living: living_writers.max(min_living_writers),
            idle_jobs: scope.writers.idle_jobs.len(),
            writers: living_writers,
            writers_before: newest.map_or(0, |newest| newest.writers),
            needs,
        }
    }

    /// Returns the tops of a scope that were renamed. The other hosts rename their parts in the same way.
    pub fn renamed_tops(&self, number: ScopeNumber) -> Vec<[Vec<u8>; 2]> {
        match self.scopes.get(&number) {
            Some(scope) => scope.renamed_tops.clone(),
            None => Vec::new(),
        }
    }

    /// Returns the process to which this host attributes a rename that it repeats after another host. The process is a
    /// writer of the scope that has the top `from`.
    pub fn writer_of_top(&self, number: ScopeNumber, from: &[u8]) -> Option<Writer> {
        let scope = self.scopes.get(&number)?;
        let exists = scope.tops.contains(from) && !scope.removed_tops.contains(from);
        if !exists || scope.is_ending || scope.is_beginning {
            return None;
        }
        // A living writer is preferred.
        let &process = scope
            .writers
            .living
            .iter()
            .chain(&scope.writers.all)
            .next()?;
        Some(Writer {
            process,
            is_living: scope.writers.living.contains(&process),
        })
    }

    /// Returns the reason why the parts of all hosts do not allow the commit of a scope (the files of one checkpoint).
    /// Returns `None` if the commit is possible, or if this host has no such scope.
    pub fn obstacle_among_hosts(
        &self,
        number: ScopeNumber,
        states: &BTreeMap<String, HostState>,
    ) -> Option<String> {
        let scope = self.scopes.get(&number)?;
        // A host that has only removed names publishes no counts. A removal has no conditions to check.
        let is_removal = states.values().all(|state| state.needs.is_empty());
        if is_removal {
            return None;
        }
        self.rules.rules()[scope.key.rule]
            .needs
            .iter()
            .enumerate()
            .find_map(|(index, need)| self.unmet_condition_of_hosts(index, need, states))
    }

    /// Returns the reason why a condition for a commit is not met by the parts of all hosts together; `None` if it is
    /// met. `index` is the place of the condition in its rule, and `states` has what each host published of its part.
    fn unmet_condition_of_hosts(
        &self,
        index: usize,
        need: &Condition,
        states: &BTreeMap<String, HostState>,
    ) -> Option<String> {
        let sum = |count: &dyn Fn(&HostState) -> usize| states.values().map(count).sum::<usize>();
        // A host that has only removed names publishes no counts.
        let has_written = |state: &HostState| !state.needs.is_empty();
        let need_count = |state: &HostState| state.needs.get(index).copied().unwrap_or_default();
        let found = sum(&|state| need_count(state).found);
        let required = match need.count {
            RequiredCount::Renewed => {
                // If all writers have ended well, they did not intend to write more files.
                let has_living_writer = states
                    .values()
                    .any(|state| state.living > 0 && has_written(state));
                let is_missing = found > 0 && has_living_writer;
                return is_missing.then(|| describe_not_renewed(found, need));
            }
            RequiredCount::Number(number) => number,
            // Each host of the job is expected to write.
            RequiredCount::Writers => sum(&|state| state.writers)
                .max(sum(&|state| state.writers_before))
                .max(self.hosts),
            RequiredCount::Same => sum(&|state| need_count(state).before),
        };
        (found < required).then(|| describe_too_few(found, required, need))
    }

    /// Freezes a scope for an attempt to commit: programs cannot change it until [`Machine::record_commit_failed`].
    ///
    /// Returns false if the scope has changed since the change count `changes`.
    pub fn begin_attempt(&mut self, number: ScopeNumber, changes: u64) -> bool {
        let Some(part) = self.own_part(number) else {
            return false;
        };
        let has_changed = part.state.changes != changes || part.state.open > 0;
        let scope = self.scopes.get_mut(&number).expect("found above");
        // Programs or the caller are changing the scope, so the published state is out of date.
        if has_changed || scope.is_ending || scope.is_beginning {
            return false;
        }
        scope.is_ending = true;
        true
    }

    /// Records the job of a process until the process ends. The caller must also report the end of the job's first
    /// process, `job`.
    pub fn record_job(&mut self, process: u32, job: u32) {
        self.jobs.insert(process, job);
        self.living_jobs.insert(job);
    }

    /// Returns whether the job of a process is known.
    pub fn knows_job(&self, process: u32) -> bool {
        self.jobs.contains_key(&process)
    }

    /// Returns the job of a process; 0 if the process is in no known job.
    fn job_of(&self, process: u32) -> u32 {
        self.jobs.get(&process).copied().unwrap_or(0)
    }

    /// Returns a file of a scope, at or below `path`, that a job other than that of `process` has written and may
    /// write again. The other job must have a living writer, or continue between two writers.
    fn file_of_other_job(&self, process: u32, path: &[u8], scope: &Scope) -> Option<Vec<u8>> {
        let own_job = self.job_of(process);
        for (file, &job) in &scope.writers.file_jobs {
            if is_at_or_below(file, path) && job != own_job && self.may_job_write_again(job, scope)
            {
                return Some(file.clone());
            }
        }
        None
    }

    /// Returns whether a job has a living writer in a scope, or continues between two writers.
    fn may_job_write_again(&self, job: u32, scope: &Scope) -> bool {
        scope.writers.idle_jobs.contains(&job)
            || scope
                .writers
                .living
                .iter()
                .any(|&writer| self.job_of(writer) == job)
    }

    /// Refuses an operation on a file of an unfinished checkpoint that another job (a process with all that it started)
    /// writes. The scope records the file, for the status.
    fn refuse_second_job(
        &mut self,
        process: u32,
        operation: &Operation<'_>,
    ) -> Result<(), Refusal> {
        for path in operation.paths().into_iter().flatten() {
            let path = path.path();
            let Some(number) = self.open_scope_of(path) else {
                continue;
            };
            let Some(file) = self.file_of_other_job(process, path, &self.scopes[&number]) else {
                continue;
            };
            let file = String::from_utf8_lossy(&file).into_owned();
            let scope = self.scopes.get_mut(&number).expect("found above");
            scope.last_refused_file = Some(file.clone());
            return Err(Refusal::OtherJob {
                rule: self.rules.rules()[scope.key.rule].name.clone(),
                path: file,
            });
        }
        Ok(())
    }

    /// Returns the rules.
    pub fn rules(&self) -> &Arc<RuleSet> {
        &self.rules
    }

    /// Returns the rule of the scope that a change of `path` would belong to, and the top that contains the path.
    pub fn explain(&self, path: &LocatedPath) -> Option<(&Rule, Vec<u8>)> {
        let AssignedScope { key, top } = self.scope_for_path(path)?;
        Some((&self.rules.rules()[key.rule], top))
    }

    /// Returns whether a change of this path belongs to a scope, or begins one.
    pub fn concerns(&self, path: &LocatedPath) -> bool {
        self.open_scope_of(path.path()).is_some() || self.scope_for_path(path).is_some()
    }

    /// Returns whether `path` is a directory with names of an open scope, or is in an open scope.
    pub fn is_near_scope(&self, path: &[u8]) -> bool {
        self.scopes
            .values()
            .any(|scope| scope.key.dir == path || scope.contains(path))
    }

    /// Returns whether no scope is open. Then a path is of interest only if a pattern of the rules matches it.
    pub fn is_empty(&self) -> bool {
        self.scopes.is_empty()
    }

    /// Returns whether a process has changed something in an open scope.
    pub fn is_writer(&self, process: u32) -> bool {
        self.scopes
            .values()
            .any(|scope| scope.writers.living.contains(&process))
    }

    /// Returns the open scope that contains a path.
    fn open_scope_of(&self, path: &[u8]) -> Option<ScopeNumber> {
        self.find_open_scope(|scope| scope.contains(path))
    }

    /// Returns the open scope with this key.
    fn open_scope_with(&self, key: &ScopeKey) -> Option<ScopeNumber> {
        self.find_open_scope(|scope| scope.key == *key)
    }

    /// Returns the first open scope that `is_wanted` accepts.
    fn find_open_scope(&self, is_wanted: impl Fn(&Scope) -> bool) -> Option<ScopeNumber> {
        for (&number, scope) in &self.scopes {
            if !scope.is_ending && is_wanted(scope) {
                return Some(number);
            }
        }
        None
    }

    /// Returns the scope (the files of one checkpoint) to which the rules assign a path. The scope need not be open.
    /// Returns `None` if no rule matches.
    ///
    /// A *top* is a name in the scope's directory that belongs to it, with all below it. If several rules match, the
    /// one with the shortest top decides: a file in a directory that is a scope belongs to that scope, whatever the
    /// file's own name is.
    fn scope_for_path(&self, path: &LocatedPath) -> Option<AssignedScope> {
        let mut outermost: Option<AssignedScope> = None;
        for rule_match in &path.matches {
            let found_scope = match &rule_match.role {
                PathRole::Scope(found_scope) => Some(found_scope.clone()),
                PathRole::Marker(captures) => {
                    self.scope_of_marker(rule_match.rule, path.path(), captures)
                }
            };
            let Some(FoundScope { dir, top, identity }) = found_scope else {
                continue;
            };
            let is_outermost = outermost
                .as_ref()
                .is_none_or(|assigned| top.len() < assigned.top.len());
            if is_outermost {
                let rule = rule_match.rule;
                let key = ScopeKey {
                    rule,
                    dir,
                    identity,
                };
                outermost = Some(AssignedScope { key, top });
            }
        }
        outermost
    }

    /// Returns the scope (the files of one checkpoint) to which a *marker* refers: a file beside the checkpoint, which
    /// the program writes when the checkpoint is complete. The marker is one of the scope's tops (names).
    ///
    /// For example, `latest` has no captures (variable parts), so it refers to the newest open scope in its directory.
    /// `done-10` refers to the newest open scope with the captured step 10; if none is open, to the scope of step 10.
    ///
    /// Returns `None` if no such scope is open and the marker has no captures.
    fn scope_of_marker(&self, rule: usize, path: &[u8], captures: &Captures) -> Option<FoundScope> {
        let dir = parent_of(path);
        let newest_open = self.scopes.values().rev().find(|scope| {
            scope.key.rule == rule
                && scope.key.dir == dir
                && !scope.is_ending
                && scope.purpose == ScopePurpose::Write
                && matches_captures(captures, &scope.key.identity)
        });
        let identity = match newest_open {
            Some(scope) => scope.key.identity.clone(),
            None if captures.is_empty() => return None,
            None => ScopeIdentity::Captures(captures.clone()),
        };
        Some(FoundScope {
            dir: dir.to_vec(),
            top: path.to_vec(),
            identity,
        })
    }

    /// Refuses an operation of a new writer in a scope (the files of one checkpoint) in which a writer has failed.
    fn refuse_failed_scope(&self, process: u32, operation: &Operation<'_>) -> Result<(), Refusal> {
        // Of a rename, the old name decides.
        let [Some(path), _] = operation.paths() else {
            return Ok(());
        };
        let number = self
            .open_scope_of(path.path())
            .or_else(|| self.open_scope_with(&self.scope_for_path(path)?.key));
        let Some(number) = number else {
            return Ok(());
        };
        let scope = &self.scopes[&number];
        if scope.has_failed && !scope.writers.all.contains(&process) {
            return Err(Refusal::Failed {
                rule: self.rules.rules()[scope.key.rule].name.clone(),
            });
        }
        Ok(())
    }

    /// Returns whether an operation must wait, because the scope (the files of one checkpoint) of one of its paths is
    /// beginning or ending.
    pub fn is_busy(&self, operation: &Operation<'_>) -> bool {
        let is_changing_state = |scope: &&Scope| scope.is_beginning || scope.is_ending;
        for scope in self.scopes.values().filter(is_changing_state) {
            for path in operation.paths().into_iter().flatten() {
                let is_assigned = || {
                    self.scope_for_path(path)
                        .is_some_and(|assigned| assigned.key == scope.key)
                };
                if scope.contains(path.path()) || is_assigned() {
                    return true;
                }
            }
        }
        false
    }

    /// Records that a program is about to make an operation. Returns the actions that the caller must carry out
    /// first, and the scope of the operation. The operation must not be busy ([`Machine::is_busy`]).
    ///
    /// When a scope has begun and has its names, the caller must call [`Machine::record_begun`]. The caller must call
    /// [`Machine::finish_operation`] even if the operation was not made.
    pub fn enter_operation(
        &mut self,
        process: u32,
        operation: &Operation<'_>,
    ) -> Result<EnteredOperation, Refusal> {
        let mut actions = Vec::new();
        let scope = self.enter_scopes_of(process, operation, &mut actions)?;
        if let Some(scope) = scope.and_then(|number| self.scopes.get_mut(&number)) {
            scope.operations_under_way += 1;
            scope.changes += 1;
        }
        Ok(EnteredOperation { actions, scope })
    }

    /// Returns the scope (the files of one checkpoint) that an operation belongs to, and adds the actions that begin or
    /// extend it. Changes nothing if the operation is refused.
    fn enter_scopes_of(
        &mut self,
        process: u32,
        operation: &Operation<'_>,
        actions: &mut Vec<Action>,
    ) -> Result<Option<ScopeNumber>, Refusal> {
        self.refuse_failed_scope(process, operation)?;
        self.refuse_second_job(process, operation)?;
        let entered = match *operation {
            Operation::Close { .. } => None,
            Operation::Open { path, .. } | Operation::Change { path } => {
                self.enter_scope(process, path, ScopePurpose::Write, actions)
            }
            Operation::Remove { path } => {
                self.enter_scope(process, path, ScopePurpose::Removal, actions)
            }
            Operation::Rename { from, to } => {
                self.enter_scope_of_rename(process, from, to, actions)?
            }
        };
        Ok(entered)
    }

    /// Returns the scope (the files of one checkpoint) that a rename belongs to, and adds the actions that begin or
    /// extend it. Returns `None` if no rule concerns either name. Refuses a rename from one open scope into another.
    fn enter_scope_of_rename(
        &mut self,
        process: u32,
        from: &LocatedPath,
        to: &LocatedPath,
        actions: &mut Vec<Action>,
    ) -> Result<Option<ScopeNumber>, Refusal> {
        let scope_of_from = self.open_scope_of(from.path());
        let scope_of_to = self.open_scope_of(to.path());
        if let (Some(from_number), Some(to_number)) = (scope_of_from, scope_of_to)
            && from_number != to_number
        {
            let rule = self.scopes[&from_number].key.rule;
            return Err(Refusal::TwoScopes {
                rule: self.rules.rules()[rule].name.clone(),
            });
        }
        // An open scope has precedence over one that would begin, and the old name over the new one.
        let entered = scope_of_from
            .or(scope_of_to)
            .or_else(|| self.enter_scope(process, from, ScopePurpose::Write, actions))
            .or_else(|| self.enter_scope(process, to, ScopePurpose::Write, actions));
        if let Some(number) = entered {
            self.convert_removal_to_write(number, process);
            // Only one of the names may lie in the scope. With both, an abort undoes the whole rename.
            self.add_tops(number, &[from.path(), to.path()], actions);
        }
        Ok(entered)
    }

    /// Records that the caller has begun a scope or added names to it. `existed_before` says whether one of the
    /// names existed before.
    pub fn record_begun(&mut self, number: ScopeNumber, existed_before: bool) {
        if let Some(scope) = self.scopes.get_mut(&number) {
            scope.is_beginning = false;
            scope.existed_before |= existed_before;
        }
    }

    /// Returns the condition that the open scope of a path waits for. Returns `None` if the path is in no open
    /// scope.
    pub fn obstacle_of_path(&self, path: &[u8]) -> Option<String> {
        Some(self.describe_wait(self.open_scope_of(path)?))
    }

    /// Aborts all open scopes (each has the files of one checkpoint) at the end of the mount, for `reason`. Returns the
    /// actions that the caller must carry out.
    ///
    /// There is one exception. The removal of a whole checkpoint by programs that ended well is committed, unless a
    /// newer checkpoint was begun after it and is incomplete.
    pub fn end_all(&mut self, reason: &str) -> Vec<Action> {
        let mut actions = Vec::new();
        let (removals, others): (Vec<ScopeNumber>, Vec<ScopeNumber>) = self
            .open_scopes()
            .into_iter()
            .filter(|number| !self.scopes[number].is_ending)
            .partition(|number| self.scopes[number].purpose == ScopePurpose::Removal);
        // The others first: `abort_scope` sets `has_newer_failed` in removals, which prevents their commit.
        for number in others {
            self.abort_scope(number, reason, &mut actions);
        }
        for number in removals {
            let scope = self.scopes.get_mut(&number).expect("listed above");
            // Several hosts commit only together, so this host commits nothing alone.
            let is_single_host = self.hosts == 0;
            if is_single_host && scope.is_complete_removal() {
                scope.is_ending = true;
                actions.push(Action::Commit { scope: number });
            } else {
                self.abort_scope(number, reason, &mut actions);
            }
        }
        actions
    }

    /// Records that a process has inherited an open descriptor, so that the process counts as a writer.
    pub fn record_inherited_handle(&mut self, process: u32, handle: u64) {
        let mut scopes = self.scopes.values_mut();
        if let Some(scope) = scopes.find(|scope| scope.open.contains_key(&handle)) {
            scope.add_writer(process);
        }
    }

    /// Makes a process a writer of the scope (the files of one checkpoint) to which a path belongs, and returns the
    /// scope. Returns `None` if no rule concerns the path.
    ///
    /// There are three cases: the path lies in an open scope; or it is a new name of an open scope; or it begins a
    /// scope. `actions` gets what the caller must do before the operation: begin or extend the scope, or commit earlier
    /// ones.
    fn enter_scope(
        &mut self,
        process: u32,
        path: &LocatedPath,
        purpose: ScopePurpose,
        actions: &mut Vec<Action>,
    ) -> Option<ScopeNumber> {
        if let Some(number) = self.open_scope_of(path.path()) {
            let effect = self.prepare_wide_scope(number, path, purpose, actions);
            if effect == NextChangeEffect::JoinsOpenScope {
                self.join_scope(number, process, purpose);
                return Some(number);
            }
        }
        let AssignedScope { key, top } = self.scope_for_path(path)?;
        if let Some(number) = self.open_scope_with(&key) {
            // The path is a further name of an open scope.
            self.join_scope(number, process, purpose);
            self.add_tops(number, &[&top], actions);
            return Some(number);
        }
        // Under some rules the begin of a scope completes those before it, so they are committed here.
        self.complete_earlier_scopes(&key, actions);
        Some(self.begin_scope(process, key, top, purpose, actions))
    }

    /// Makes a process a writer of an open scope. If it writes, a removal becomes the beginning of a new checkpoint.
    fn join_scope(&mut self, number: ScopeNumber, process: u32, purpose: ScopePurpose) {
        let Some(scope) = self.scopes.get_mut(&number) else {
            return;
        };
        if purpose == ScopePurpose::Write {
            scope.purpose = ScopePurpose::Write;
        }
        scope.add_writer(process);
    }

    /// Begins a scope (the files of one checkpoint) with one name and one writer. Returns its number.
    ///
    /// If the same checkpoint was committed before, its files exist, and none of them is written again yet.
    fn begin_scope(
        &mut self,
        process: u32,
        key: ScopeKey,
        top: Vec<u8>,
        purpose: ScopePurpose,
        actions: &mut Vec<Action>,
    ) -> ScopeNumber {
        self.last_number += 1;
        let number = self.last_number;
        let earlier = self.committed.iter().rev().find(|scope| scope.key == key);
        let files = earlier.map(|scope| scope.files.clone()).unwrap_or_default();
        let existed_before = earlier.is_some();
        let scope = Scope {
            tops: BTreeSet::from([top.clone()]),
            unwritten: files.clone(),
            files,
            writers: ScopeWriters {
                living: BTreeSet::from([process]),
                all: BTreeSet::from([process]),
                ..ScopeWriters::default()
            },
            existed_before,
            is_beginning: true,
            ..Scope::new(key.clone(), purpose)
        };
        self.scopes.insert(number, scope);
        actions.push(Action::Begin {
            key: self.shared_key(&key),
            scope: number,
            rule: self.rules.rules()[key.rule].name.clone(),
            dir: key.dir,
            tops: vec![top],
        });
        number
    }

    /// Returns the key under which each host knows a scope.
    fn shared_key(&self, key: &ScopeKey) -> Vec<u8> {
        let mut words = vec![self.rules.rules()[key.rule].name.as_bytes(), &key.dir];
        match &key.identity {
            ScopeIdentity::Path(path) => words.push(path),
            ScopeIdentity::Captures(captures) => {
                for (name, value) in captures {
                    words.push(name.as_bytes());
                    words.push(value);
                }
            }
        }
        // No path and no name contains a zero byte.
        words.join(&0)
    }

    /// Commits or extends an open scope of several directories before a change in it that belongs to the next
    /// checkpoint. Has no effect on other scopes and other changes.
    ///
    /// The scope's transaction covers all these directories, so the next checkpoint cannot have a second transaction
    /// there. If the rule allows it, the scope is committed. Otherwise both checkpoints become one scope, which the
    /// next event completes. With several hosts, the caller has tried the commit before ([`Machine::end_wide_scope`]).
    fn prepare_wide_scope(
        &mut self,
        number: ScopeNumber,
        path: &LocatedPath,
        purpose: ScopePurpose,
        actions: &mut Vec<Action>,
    ) -> NextChangeEffect {
        if purpose != ScopePurpose::Write {
            return NextChangeEffect::JoinsOpenScope;
        }
        let Some(key) = self.next_key_in_several_dirs(number, path) else {
            return NextChangeEffect::JoinsOpenScope;
        };
        let is_written = self.scopes[&number].purpose == ScopePurpose::Write;
        let is_single_host = self.hosts == 0;
        if is_written && is_single_host && self.ends_with_next(key.rule) {
            self.complete_earlier_scopes(&key, actions);
        }
        let Some(scope) = self.scopes.get_mut(&number) else {
            return NextChangeEffect::JoinsOpenScope;
        };
        if scope.is_ending {
            return NextChangeEffect::BeginsScope;
        }
        // From here on the scope is that of the next checkpoint, and waits for a further event.
        scope.key = key;
        scope.event_seen = false;
        scope.is_extended = true;
        NextChangeEffect::JoinsOpenScope
    }

    /// Returns the key of the checkpoint that a path belongs to, if the path lies in the directories of an open scope
    /// of several directories that has another key.
    fn next_key_in_several_dirs(
        &self,
        number: ScopeNumber,
        path: &LocatedPath,
    ) -> Option<ScopeKey> {
        let key = self.scope_for_path(path)?.key;
        let scope = self.scopes.get(&number)?;
        let is_wide = self.rules.rules()[key.rule].scope.is_wide();
        let is_in_same_dir = key.rule == scope.key.rule && key.dir == scope.key.dir;
        if !is_wide || !is_in_same_dir || key == scope.key {
            return None;
        }
        Some(key)
    }

    /// Completes an open scope of several directories that several hosts write, before an operation that belongs to the
    /// next checkpoint in these directories.
    ///
    /// The caller lets the operation wait until the hosts have committed the scope or cannot commit it. In the second
    /// case both checkpoints become one, which the next event completes.
    pub fn end_wide_scope(&mut self, operation: &Operation<'_>) -> Vec<Action> {
        let mut actions = Vec::new();
        let (Operation::Open { path, .. } | Operation::Change { path }) = *operation else {
            return actions;
        };
        if self.hosts > 0
            && let Some(number) = self.open_scope_of(path.path())
            && let Some(next_key) = self.next_key_in_several_dirs(number, path)
        {
            self.complete_earlier_scopes(&next_key, &mut actions);
        }
        actions
    }

    /// Makes the process a writer of a scope. A removal becomes the beginning of a new checkpoint.
    fn convert_removal_to_write(&mut self, number: ScopeNumber, process: u32) {
        self.join_scope(number, process, ScopePurpose::Write);
    }

    /// Adds those of `paths` that are directly in the scope's directory to its tops, the names that belong to it with
    /// all below them. A path that lies in the scope already is ignored.
    ///
    /// If any name is new, adds the action that extends the scope's transaction. The scope counts as beginning until
    /// the caller has carried it out.
    fn add_tops(&mut self, number: ScopeNumber, paths: &[&[u8]], actions: &mut Vec<Action>) {
        let Some(scope) = self.scopes.get_mut(&number) else {
            return;
        };
        let mut new_tops = Vec::new();
        for path in paths {
            if !scope.contains(path) && parent_of(path) == scope.key.dir {
                scope.tops.insert(path.to_vec());
                new_tops.push(path.to_vec());
            }
        }
        if !new_tops.is_empty() {
            scope.is_beginning = true;
            actions.push(Action::Join {
                scope: number,
                tops: new_tops,
            });
        }
    }

    /// Completes the open scopes with the rule and directory of `key` if the rule's event is a change in the next
    /// scope. Each of them that has no other obstacle is committed.
    fn complete_earlier_scopes(&mut self, key: &ScopeKey, actions: &mut Vec<Action>) {
        if !self.ends_with_next(key.rule) {
            return;
        }
        let numbers: Vec<ScopeNumber> = self.scopes.keys().copied().collect();
        for number in numbers {
            let scope = self.scopes.get_mut(&number).expect("listed above");
            if scope.key.rule == key.rule && scope.key.dir == key.dir && !scope.is_ending {
                scope.event_seen |= scope.purpose == ScopePurpose::Write;
                self.try_commit(number, actions);
            }
        }
    }

    /// Returns whether the scopes of the rule are complete when the next one begins. That includes idle scopes of
    /// several files without conditions.
    fn ends_with_next(&self, rule: usize) -> bool {
        let rule = &self.rules.rules()[rule];
        match rule.event {
            RuleEvent::Next => true,
            RuleEvent::Idle => !rule.is_idle_enough(),
            _ => false,
        }
    }

    /// Records that an operation has ended, and returns the actions that follow from it.
    ///
    /// `entered` is the scope (the files of one checkpoint) that [`Machine::enter_operation`] returned. `is_made` is
    /// false if the operation failed or was not made.
    pub fn finish_operation(
        &mut self,
        process: u32,
        operation: &Operation<'_>,
        entered: Option<ScopeNumber>,
        is_made: bool,
    ) -> Vec<Action> {
        let mut actions = Vec::new();
        if let Some(scope) = entered.and_then(|number| self.scopes.get_mut(&number)) {
            scope.operations_under_way -= 1;
            scope.changes += 1;
        }
        if is_made {
            self.apply_operation(process, operation, &mut actions);
        }
        // The scope may have waited for this operation.
        if let Some(number) = entered {
            self.try_commit(number, &mut actions);
            self.end_if_abandoned(number, &mut actions);
        }
        actions
    }

    /// Updates the scopes (each has the files of one checkpoint) after an operation was made. Commits a scope that the
    /// operation completes.
    fn apply_operation(
        &mut self,
        process: u32,
        operation: &Operation<'_>,
        actions: &mut Vec<Action>,
    ) {
        match *operation {
            Operation::Open { path, handle } => self.apply_open(process, path.path(), handle),
            Operation::Close { handle, ending } => {
                self.close_handle(process, handle, ending, actions)
            }
            Operation::Change { path } => self.apply_change(path.path(), actions),
            Operation::Remove { path } => self.apply_removal(path.path(), actions),
            Operation::Rename { from, to } => self.apply_rename(from.path(), to.path(), actions),
        }
    }

    /// Updates the open scope (the files of one checkpoint) of a file that was created or opened for writing. Does
    /// nothing if the file is in no open scope. `handle` is [`NOT_OPEN`] if the file was only created.
    fn apply_open(&mut self, process: u32, path: &[u8], handle: u64) {
        let job = self.job_of(process);
        let Some(number) = self.open_scope_of(path) else {
            return;
        };
        let scope = self.scopes.get_mut(&number).expect("found above");
        scope.files.insert(path.to_vec());
        scope.unwritten.remove(path);
        scope.removed_tops.remove(path);
        if handle != NOT_OPEN {
            scope.open.insert(handle, path.to_vec());
        }
        scope.writers.file_jobs.insert(path.to_vec(), job);
        // The event `idle` means that no file is open. A file is open again, so the scope is no longer complete.
        if matches!(self.rules.rules()[scope.key.rule].event, RuleEvent::Idle) {
            scope.event_seen = false;
        }
        // `enter_operation` has usually made the process a writer. It may have ended since, so it must not become a
        // living writer again.
        if !scope.writers.all.contains(&process) {
            scope.add_writer(process);
        }
    }

    /// Updates the open scope of a name that was created or changed, and commits the scope if it is complete.
    fn apply_change(&mut self, path: &[u8], actions: &mut Vec<Action>) {
        let Some(number) = self.open_scope_of(path) else {
            return;
        };
        let scope = self.scopes.get_mut(&number).expect("found above");
        scope.removed_tops.remove(path);
        scope.unwritten.remove(path);
        self.try_commit(number, actions);
    }

    /// Updates the scope (the files of one checkpoint) of an open file that was closed. Commits the scope if the close
    /// completes it. `handle` identifies the open file.
    ///
    /// If the end of a process closed the file, the close counts only after the process is known to have succeeded.
    fn close_handle(
        &mut self,
        process: u32,
        handle: u64,
        ending: Ending,
        actions: &mut Vec<Action>,
    ) {
        let numbers: Vec<ScopeNumber> = self
            .scopes
            .iter()
            .filter(|(_, scope)| scope.open.contains_key(&handle))
            .map(|(number, _)| *number)
            .collect();
        for number in numbers {
            let scope = self.scopes.get_mut(&number).expect("found above");
            let Some(path) = scope.open.remove(&handle) else {
                continue;
            };
            scope.changes += 1;
            if scope.is_ending {
                continue;
            }
            match ending {
                Ending::Exit if scope.writers.living.contains(&process) => {
                    scope
                        .writers
                        .closed_by_exit
                        .entry(process)
                        .or_default()
                        .push(path);
                }
                // If the process has exited, its end was reported before. If it failed, the scope has failed already.
                Ending::Success | Ending::Exit => self.apply_close(number, &path, actions),
                Ending::Failure => scope.has_failed = true,
            }
        }
    }

    /// Records the event of a scope, the change that completes a checkpoint, if this close of a file is the event.
    /// Commits the scope if it is complete.
    fn apply_close(&mut self, number: ScopeNumber, path: &[u8], actions: &mut Vec<Action>) {
        let Some(scope) = self.scopes.get_mut(&number) else {
            return;
        };
        let is_last_close = !scope.open.values().any(|open_path| open_path == path);
        let rule = &self.rules.rules()[scope.key.rule];
        let is_event = match &rule.event {
            RuleEvent::Close(target) => {
                is_last_close && is_event_target(scope, target, path, rule.scope.is_dir)
            }
            RuleEvent::Idle => rule.is_idle_enough() && scope.open.is_empty(),
            _ => false,
        };
        scope.event_seen |= is_event && scope.purpose == ScopePurpose::Write;
        self.try_commit(number, actions);
    }

    /// Updates the open scope (the files of one checkpoint) of a name that was removed. Commits the scope if the
    /// removal completes it. A *top* is a name in the scope's directory that belongs to it.
    fn apply_removal(&mut self, path: &[u8], actions: &mut Vec<Action>) {
        let Some(number) = self.open_scope_of(path) else {
            return;
        };
        let scope = self.scopes.get_mut(&number).expect("found above");
        scope.files.remove(path);
        scope.writers.file_jobs.remove(path);
        scope.unwritten.remove(path);
        if scope.tops.contains(path) {
            scope.removed_tops.insert(path.to_vec());
        }
        let rule = &self.rules.rules()[scope.key.rule];
        if let RuleEvent::Unlink(target) = &rule.event
            && is_event_target(scope, target, path, rule.scope.is_dir)
        {
            // The removal of the only name removes the whole checkpoint, so it does not complete it.
            let has_other_names = scope.tops.len() > 1;
            scope.event_seen |= scope.purpose == ScopePurpose::Write || has_other_names;
        }
        self.try_commit(number, actions);
    }

    /// Updates the open scope (the files of one checkpoint) of a rename: its files, open files and tops (its names in
    /// its directory) get their new names. Commits the scope if the rename completes it.
    fn apply_rename(&mut self, from: &[u8], to: &[u8], actions: &mut Vec<Action>) {
        let Some(number) = self.open_scope_of(to).or_else(|| self.open_scope_of(from)) else {
            return;
        };
        let scope = self.scopes.get_mut(&number).expect("found above");
        scope.rename_files(from, to);
        scope.rename_top(from, to);
        // `tops` still has the old name, so the event can be decided by either name.
        let rule = &self.rules.rules()[scope.key.rule];
        let is_event = match &rule.event {
            // The whole checkpoint, written under a temporary name, gets its final name.
            RuleEvent::Rename(EventTarget::Itself) => {
                scope.tops.contains(from) && is_scope_name(scope, from)
            }
            RuleEvent::Rename(target) => is_event_target(scope, target, to, rule.scope.is_dir),
            // A complete file, written under another name, now gets its final name, as by torch.save and os.replace.
            RuleEvent::Idle => {
                rule.is_idle_enough() && scope.open.is_empty() && is_scope_name(scope, to)
            }
            _ => false,
        };
        scope.event_seen |= is_event;
        self.try_commit(number, actions);
    }

    /// Records the end of a process, and returns the commits and aborts of checkpoints that follow from it. A job has
    /// the process id of its first process, so the end of that process also ends the job.
    pub fn record_exit(&mut self, process: u32, ending: Ending) -> Vec<Action> {
        let mut actions = Vec::new();
        let job = self.jobs.remove(&process);
        self.living_jobs.remove(&process);
        // The job of a process that has succeeded survives if the job's first process is alive.
        let surviving_job = match job {
            Some(job) if ending == Ending::Success && self.living_jobs.contains(&job) => Some(job),
            _ => None,
        };
        for number in self.open_scopes() {
            let scope = self.scopes.get_mut(&number).expect("listed above");
            let was_idle_job = scope.writers.idle_jobs.remove(&process);
            let was_writer = scope.writers.living.remove(&process);
            if was_writer {
                scope.writers.idle_jobs.extend(surviving_job);
            }
            if scope.is_ending {
                continue;
            }
            if was_writer {
                self.end_writer(number, process, ending, &mut actions);
            } else if was_idle_job {
                self.end_if_abandoned(number, &mut actions);
            }
        }
        actions
    }

    /// Updates an open scope (the files of one checkpoint) after the end of a process that wrote in it. The process is
    /// not among the living writers any more. Commits or aborts the scope if that decides it.
    fn end_writer(
        &mut self,
        number: ScopeNumber,
        process: u32,
        ending: Ending,
        actions: &mut Vec<Action>,
    ) {
        let scope = self.scopes.get_mut(&number).expect("the scope is open");
        scope.has_failed |= ending != Ending::Success;
        scope.changes += 1;
        let closed_files = scope
            .writers
            .closed_by_exit
            .remove(&process)
            .unwrap_or_default();
        if ending == Ending::Success {
            for path in closed_files {
                self.apply_close(number, &path, actions);
            }
        }
        // One writer less is required now, so the conditions may be met.
        let scope = &self.scopes[&number];
        if scope.purpose == ScopePurpose::Write && !scope.writers.living.is_empty() {
            self.try_commit(number, actions);
        }
        self.end_if_abandoned(number, actions);
    }

    /// Ends a scope (the files of one checkpoint) once all its writers have ended and none of their operations is in
    /// progress. Commits the scope if it is complete, and aborts it otherwise.
    ///
    /// With several hosts, asks them to decide together instead. Does nothing while the scope is still beginning: the
    /// call that begins it calls this function again at its end.
    fn end_if_abandoned(&mut self, number: ScopeNumber, actions: &mut Vec<Action>) {
        let Some(scope) = self.scopes.get(&number) else {
            return;
        };
        let is_abandoned = scope.writers.living.is_empty() && scope.operations_under_way == 0;
        if !is_abandoned || scope.is_ending || scope.is_beginning {
            return;
        }
        let must_ask_other_hosts = self.hosts > 0 && scope.purpose == ScopePurpose::Write;
        if must_ask_other_hosts {
            actions.push(Action::Propose { scope: number });
            return;
        }
        match scope.purpose {
            ScopePurpose::Removal if scope.has_failed => {
                self.abort_scope(number, "its removal was cut off", actions);
            }
            ScopePurpose::Removal => {
                let scope = self.scopes.get_mut(&number).expect("found above");
                if scope.removed_tops != scope.tops {
                    // The program succeeded, so it removed only what it meant to remove. The remaining part is
                    // complete.
                    scope.purpose = ScopePurpose::PartialRemoval;
                }
                self.try_commit(number, actions);
            }
            ScopePurpose::PartialRemoval => self.try_commit(number, actions),
            ScopePurpose::Write => self.end_abandoned_write(number, actions),
        }
    }

    /// Commits a written scope (the files of one checkpoint) that has no living writers, if it is complete. Aborts it
    /// otherwise, unless a job (a process with all that it started) that has succeeded so far continues.
    fn end_abandoned_write(&mut self, number: ScopeNumber, actions: &mut Vec<Action>) {
        let rule = self.scopes[&number].key.rule;
        let ends_with_next = self.ends_with_next(rule);
        let scope = self.scopes.get_mut(&number).expect("the scope is open");
        // A program that changes a complete checkpoint and succeeds leaves it complete. Under some rules the success of
        // all writers completes a new one too.
        let completes_without_event = ends_with_next || scope.existed_before;
        scope.event_seen |= completes_without_event && !scope.has_failed;
        if scope.event_seen {
            self.try_commit(number, actions);
        }
        let scope = &self.scopes[&number];
        let may_job_write_more = !scope.has_failed && !scope.writers.idle_jobs.is_empty();
        if !scope.is_ending && !may_job_write_more {
            let reason = self.reason_of_abort(number);
            self.abort_scope(number, &reason, actions);
        }
    }

    /// Returns the reason that is reported when a scope without writers is aborted.
    fn reason_of_abort(&self, number: ScopeNumber) -> String {
        format!(
            "all its writers have ended, but it still waits for {}",
            self.describe_wait(number)
        )
    }

    /// Adds the abort of a scope (the files of one checkpoint) to the actions. Open removals of checkpoints of the same
    /// rule and directory record that a newer checkpoint failed, so that they are not committed at the end of the
    /// mount.
    fn abort_scope(&mut self, number: ScopeNumber, reason: &str, actions: &mut Vec<Action>) {
        let Some(scope) = self.scopes.get_mut(&number) else {
            return;
        };
        scope.is_ending = true;
        actions.push(Action::Abort {
            scope: number,
            reason: reason.to_owned(),
        });
        let rule = scope.key.rule;
        let dir = scope.key.dir.clone();
        // Other scopes get the flag too, but only removals read it.
        for other in self.scopes.values_mut() {
            if other.key.rule == rule && other.key.dir == dir {
                other.has_newer_failed = true;
            }
        }
    }

    /// Returns the scope of a rule in a directory that was committed last.
    fn newest_committed(&self, rule: usize, dir: &[u8]) -> Option<&CommittedScope> {
        self.committed
            .iter()
            .rev()
            .find(|scope| scope.key.rule == rule && scope.key.dir == dir)
    }

    /// Returns what a scope waits for, if it cannot be committed now. The text completes the sentence "it waits for …".
    /// Returns `None` if the scope can be committed.
    fn obstacle(&self, number: ScopeNumber) -> Option<String> {
        let scope = &self.scopes[&number];
        if scope.operations_under_way > 0 {
            return Some("changes that are under way".to_owned());
        }
        match scope.purpose {
            ScopePurpose::Write => self.obstacle_of_write(scope),
            ScopePurpose::Removal => self.obstacle_of_removal(scope),
            ScopePurpose::PartialRemoval => None,
        }
    }

    /// Returns what the removal of a checkpoint by programs waits for; `None` if it can be committed now. The text
    /// completes the sentence "it waits for …".
    ///
    /// The last complete checkpoint is removed only after a newer one is committed.
    fn obstacle_of_removal(&self, scope: &Scope) -> Option<String> {
        if scope.removed_tops != scope.tops {
            return Some("the end of its removal".to_owned());
        }
        if let Some(newest) = self.newest_committed(scope.key.rule, &scope.key.dir)
            && newest.key != scope.key
        {
            return None;
        }
        let waits_for = if scope.is_complete_removal() {
            "a newer checkpoint, or the end of the mount: it is the last complete one"
        } else {
            "a newer checkpoint: it is the last complete one"
        };
        Some(waits_for.to_owned())
    }

    /// Returns what a written checkpoint waits for; `None` if it can be committed now. The text completes the sentence
    /// "it waits for …".
    ///
    /// Its *event* is the change that completes it, and its conditions say which files it must have.
    fn obstacle_of_write(&self, scope: &Scope) -> Option<String> {
        let rule = &self.rules.rules()[scope.key.rule];
        if scope.has_failed {
            return Some("the end of its other writers: one has failed".to_owned());
        }
        if !scope.event_seen {
            return Some(rule.describe_event());
        }
        if !scope.writers.closed_by_exit.is_empty() {
            return Some("the end of a process that had files open".to_owned());
        }
        if let Some(path) = scope.open.values().next() {
            let path = String::from_utf8_lossy(path);
            let count = scope.open.len();
            // The path is an example.
            return Some(format!("{count} files to be closed, as {path}"));
        }
        // If several hosts write the scope, its conditions are counted over all hosts.
        if self.hosts > 0 {
            return None;
        }
        rule.needs
            .iter()
            .find_map(|need| self.unmet_condition(scope, need, rule.scope.is_dir))
    }

    /// Returns the files that a condition for the commit of a scope (the files of one checkpoint) still requires;
    /// `None` if it is met. The text completes the sentence "it waits for …".
    ///
    /// `is_dir` says whether the rule's scopes are directories.
    fn unmet_condition(&self, scope: &Scope, need: &Condition, is_dir: bool) -> Option<String> {
        let newest = self.newest_committed(scope.key.rule, &scope.key.dir);
        let found = scope.count_for(need, is_dir);
        let required = match need.count {
            RequiredCount::Renewed => {
                // If all writers have ended well, they did not intend to write more files.
                let is_missing = found > 0 && !scope.writers.living.is_empty();
                return is_missing.then(|| describe_not_renewed(found, need));
            }
            RequiredCount::Number(number) => number,
            RequiredCount::Writers => {
                let writers_before = newest.map_or(0, |newest| newest.writers);
                scope.writers.living.len().max(writers_before)
            }
            RequiredCount::Same => newest.map_or(0, |newest| newest.count_for(need, is_dir)),
        };
        (found < required).then(|| describe_too_few(found, required, need))
    }

    /// Returns the condition that a scope waits for, as a text for people.
    fn describe_wait(&self, number: ScopeNumber) -> String {
        let obstacle = self.obstacle(number);
        let waits_for = obstacle.unwrap_or_else(|| "its commit".to_owned());
        match &self.scopes[&number].last_refused_file {
            Some(path) => format!("{waits_for}; another job was refused {path}"),
            None => waits_for,
        }
    }

    /// Adds the commit of a scope to the actions, if nothing prevents the commit. With several hosts, adds the
    /// proposal to decide instead.
    fn try_commit(&mut self, number: ScopeNumber, actions: &mut Vec<Action>) {
        let is_ending = self.scopes.get(&number).is_none_or(|scope| scope.is_ending);
        if is_ending || self.obstacle(number).is_some() {
            return;
        }
        if self.hosts > 0 {
            actions.push(Action::Propose { scope: number });
            return;
        }
        let scope = self.scopes.get_mut(&number).expect("found above");
        scope.is_ending = true;
        actions.push(Action::Commit { scope: number });
    }

    /// Records that the caller has committed a scope (the files of one checkpoint, or their removal). Returns the
    /// actions that this makes possible: commits of other scopes, and a check for excess checkpoints.
    pub fn record_committed(&mut self, number: ScopeNumber) -> Vec<Action> {
        let mut actions = Vec::new();
        let Some(scope) = self.scopes.remove(&number) else {
            return actions;
        };
        let rule = scope.key.rule;
        let dir = scope.key.dir.clone();
        let is_removal = scope.purpose == ScopePurpose::Removal;
        self.update_history(scope);
        if is_removal {
            return actions;
        }
        // A removal may have waited for this newer checkpoint.
        for other in self.open_scopes() {
            let key = &self.scopes[&other].key;
            if key.rule == rule && key.dir == dir {
                self.try_commit(other, &mut actions);
            }
        }
        self.forget_oldest_commit(rule, &dir);
        if self.rules.rules()[rule].keep.is_some() {
            actions.push(Action::Rotate { rule, dir });
        }
        actions
    }

    /// Updates the list of commits after the commit of a scope (the files of one checkpoint, or their removal). An
    /// earlier commit of the same checkpoint is replaced. After a removal there is no checkpoint to remember.
    fn update_history(&mut self, scope: Scope) {
        let has_same_key = |committed: &CommittedScope| committed.key == scope.key;
        // The list is in the order of commits. A checkpoint that this machine did not see committed is the oldest.
        let earlier_index = self.committed.iter().position(has_same_key).unwrap_or(0);
        self.committed.retain(|committed| !has_same_key(committed));
        let index = match scope.purpose {
            ScopePurpose::Removal => return,
            ScopePurpose::Write => self.committed.len(),
            // A checkpoint from which a part was removed keeps its place in the order of commits.
            ScopePurpose::PartialRemoval => self.committed.len().min(earlier_index),
        };
        let remaining_tops: BTreeSet<Vec<u8>> = scope
            .tops
            .difference(&scope.removed_tops)
            .cloned()
            .collect();
        let committed = CommittedScope {
            writers: scope.writers.living.len(),
            tops: remaining_tops,
            files: scope.files,
            key: scope.key,
        };
        self.committed.insert(index, committed);
    }

    /// Returns the removals of the complete checkpoints in a directory beyond the number that the rule keeps, the
    /// oldest first. Returns none if the rule keeps all.
    ///
    /// `names` are the names in the directory. `linked` are the tops (names of checkpoints) to which a link in it
    /// leads. Checkpoints with such tops, and open checkpoints, are kept. The removals begin at once; changes of these
    /// checkpoints wait until the checkpoints are removed.
    pub fn rotate(
        &mut self,
        rule: usize,
        dir: &[u8],
        names: &[LocatedPath],
        linked: &BTreeSet<Vec<u8>>,
    ) -> Vec<Action> {
        let Some(keep) = self.rules.rules()[rule].keep else {
            return Vec::new();
        };
        let mut excess = self.complete_scopes(rule, dir, names);
        // The oldest come first, so the last `keep` of the list remain.
        excess.truncate(excess.len().saturating_sub(keep));
        excess.retain(|complete| {
            let is_open = self.scopes.values().any(|scope| scope.key == complete.key);
            !is_open && complete.tops.is_disjoint(linked)
        });
        excess
            .into_iter()
            .map(|complete| self.begin_removal(complete))
            .collect()
    }

    /// Returns the complete checkpoints in a directory, the oldest first.
    ///
    /// Checkpoints that existed before this machine come first, in the order of their steps (the numbers in their
    /// names). Those that this machine saw committed follow, in the order of their commits. Names without a step are
    /// left out, so they are never removed as excess.
    fn complete_scopes(
        &self,
        rule: usize,
        dir: &[u8],
        names: &[LocatedPath],
    ) -> Vec<CommittedScope> {
        let mut committed = self.committed_in(rule, dir, names);
        let mut earlier: Vec<(StepOrder, CommittedScope)> = Vec::new();
        for path in names {
            let Some((found, key)) = self.scope_of_name(path, rule, dir) else {
                continue;
            };
            let mut listed = committed
                .iter_mut()
                .chain(earlier.iter_mut().map(|(_, scope)| scope));
            if let Some(scope) = listed.find(|scope| scope.key == key) {
                // A further name of a checkpoint that is listed already.
                scope.tops.insert(found.top.clone());
            } else if let Some(step) = found.step() {
                let scope = CommittedScope {
                    tops: BTreeSet::from([found.top.clone()]),
                    files: BTreeSet::new(),
                    writers: 0,
                    key,
                };
                earlier.push((StepOrder::new(&step), scope));
            }
        }
        earlier.sort_by(|(first, _), (second, _)| first.cmp(second));
        let mut complete: Vec<CommittedScope> =
            earlier.into_iter().map(|(_, scope)| scope).collect();
        complete.append(&mut committed);
        complete
    }

    /// Returns the scope of which `path` is a name in the directory, and its key. Returns `None` if the name is in no
    /// scope of this rule.
    fn scope_of_name<'p>(
        &self,
        path: &'p LocatedPath,
        rule: usize,
        dir: &[u8],
    ) -> Option<(&'p FoundScope, ScopeKey)> {
        let found = found_scope_of(path, rule)?;
        // Another rule may claim this name: the rule with the shortest top decides.
        let AssignedScope { key, .. } = self.scope_for_path(path)?;
        let is_name_in_dir = found.dir == dir && found.top == path.path();
        (is_name_in_dir && key.rule == rule).then_some((found, key))
    }

    /// Returns the scopes of a rule in a directory that this machine saw committed, without the tops that are not in
    /// `names` any more.
    fn committed_in(&self, rule: usize, dir: &[u8], names: &[LocatedPath]) -> Vec<CommittedScope> {
        let exists = |top: &Vec<u8>| names.iter().any(|name| name.path() == top);
        let mut committed = self.committed.clone();
        committed.retain_mut(|scope| {
            scope.tops.retain(exists);
            scope.key.rule == rule && scope.key.dir == dir && !scope.tops.is_empty()
        });
        committed
    }

    /// Begins the removal of a complete checkpoint, because the rule keeps fewer. Returns the action for the caller. No
    /// program can change the checkpoint until the caller reports the result.
    fn begin_removal(&mut self, complete: CommittedScope) -> Action {
        self.last_number += 1;
        let number = self.last_number;
        let rule = self.rules.rules()[complete.key.rule].name.clone();
        let key = self.shared_key(&complete.key);
        let tops: Vec<Vec<u8>> = complete.tops.iter().cloned().collect();
        let mut scope = Scope::new(complete.key, ScopePurpose::Removal);
        scope.tops = complete.tops;
        scope.is_ending = true;
        self.scopes.insert(number, scope);
        Action::Remove {
            scope: number,
            rule,
            tops,
            key,
        }
    }

    /// Records that this host has removed the names of [`Action::Remove`]. With several hosts, the hosts then decide.
    pub fn record_removal_made(&mut self, number: ScopeNumber) {
        if let Some(scope) = self.scopes.get_mut(&number) {
            scope.removed_tops = scope.tops.clone();
            scope.is_ending = false;
        }
    }

    /// Forgets the oldest commit of a rule in a directory if there are more than [`COMMITTED_MAX`].
    fn forget_oldest_commit(&mut self, rule: usize, dir: &[u8]) {
        let is_of_dir = |scope: &CommittedScope| scope.key.rule == rule && scope.key.dir == dir;
        let count = self
            .committed
            .iter()
            .filter(|scope| is_of_dir(scope))
            .count();
        if count > COMMITTED_MAX
            && let Some(oldest) = self.committed.iter().position(is_of_dir)
        {
            self.committed.remove(oldest);
        }
    }

    /// Records that the caller is about to abort a scope. No program changes the scope any more.
    pub fn record_abort_begun(&mut self, number: ScopeNumber) {
        if let Some(scope) = self.scopes.get_mut(&number) {
            scope.is_ending = true;
        }
    }

    /// Records that the caller has aborted a scope, or could not begin it.
    pub fn record_aborted(&mut self, number: ScopeNumber) {
        self.scopes.remove(&number);
    }

    /// Returns the processes that write in a scope and are not known to have ended.
    pub fn living_writers(&self, number: ScopeNumber) -> Vec<u32> {
        match self.scopes.get(&number) {
            Some(scope) if scope.purpose == ScopePurpose::Write => {
                scope.writers.living.iter().copied().collect()
            }
            _ => Vec::new(),
        }
    }

    /// Records that a writer of a scope failed. The scope is not committed, and is aborted once all its writers have
    /// ended.
    ///
    /// The writers may have ended already: an end that is reported during a commit does not end the scope.
    pub fn record_writer_failure(&mut self, number: ScopeNumber) -> Vec<Action> {
        let mut actions = Vec::new();
        if let Some(scope) = self.scopes.get_mut(&number) {
            scope.has_failed = true;
            scope.is_ending = false;
            scope.changes += 1;
            self.end_if_abandoned(number, &mut actions);
        }
        actions
    }

    /// Records that the commit of a scope failed. Programs may change the scope again.
    pub fn record_commit_failed(&mut self, number: ScopeNumber) {
        if let Some(scope) = self.scopes.get_mut(&number) {
            scope.is_ending = false;
        }
    }

    /// Returns the states of the open scopes, the oldest first.
    pub fn states(&self) -> Vec<ScopeState> {
        let mut states = Vec::new();
        for (&number, scope) in &self.scopes {
            let first_top = scope.tops.first().map_or(&[][..], Vec::as_slice);
            states.push(ScopeState {
                scope: number,
                rule: self.rules.rules()[scope.key.rule].name.clone(),
                path: String::from_utf8_lossy(first_top).into_owned(),
                open: scope.open.len(),
                waits_for: self.describe_wait(number),
            });
        }
        states
    }

    /// Returns the numbers of the open scopes.
    pub fn open_scopes(&self) -> Vec<ScopeNumber> {
        self.scopes.keys().copied().collect()
    }
}

/// Returns the scope of a path for one rule, if the path is in a scope of that rule.
fn found_scope_of(path: &LocatedPath, rule: usize) -> Option<&FoundScope> {
    path.matches
        .iter()
        .find_map(|rule_match| match &rule_match.role {
            PathRole::Scope(found) if rule_match.rule == rule => Some(found),
            _ => None,
        })
}

/// Returns whether `path` is the top after which the scope is named.
fn is_scope_name(scope: &Scope, path: &[u8]) -> bool {
    match &scope.key.identity {
        ScopeIdentity::Path(name) => name == path,
        ScopeIdentity::Captures(_) => true,
    }
}

/// Returns whether `path` is the subject of an event of the scope. `is_dir` says whether the scope's tops are
/// directories.
fn is_event_target(scope: &Scope, target: &EventTarget, path: &[u8], is_dir: bool) -> bool {
    match target {
        EventTarget::Itself => scope.tops.contains(path) && is_scope_name(scope, path),
        EventTarget::Inside(pattern) => scope
            .path_in_scope(path, is_dir)
            .is_some_and(|path_in_scope| pattern.matches(path_in_scope)),
        EventTarget::Beside(pattern) => relative(path, &scope.key.dir)
            .and_then(|name| pattern.captures(name))
            .is_some_and(|captures| matches_captures(&captures, &scope.key.identity)),
    }
}

impl Rule {
    /// Returns whether closed files suffice for the event `idle`. They do for a scope of one file, and for a rule
    /// that names the needed files.
    fn is_idle_enough(&self) -> bool {
        let is_one_file = !self.scope.is_dir && !self.scope.has_captures();
        let names_needed_files = self
            .needs
            .iter()
            .any(|need| !matches!(need.count, RequiredCount::Same | RequiredCount::Renewed));
        is_one_file || names_needed_files
    }

    /// Returns a text for people that says which event completes a scope of the rule.
    fn describe_event(&self) -> String {
        let mut words = self.text.split_ascii_whitespace();
        let event = words.nth(2).unwrap_or_default();
        match self.event {
            RuleEvent::Next => {
                "the first change in the next one, or the end of its writers".to_owned()
            }
            RuleEvent::Idle if !self.is_idle_enough() => {
                "the first change in the next one, or the end of its writers".to_owned()
            }
            RuleEvent::Idle => "its files to be closed".to_owned(),
            _ => format!("`{event}`"),
        }
    }
}
