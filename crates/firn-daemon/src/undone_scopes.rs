//! Informs programs that their transaction was aborted because firnd, the process that serves the mount, died: their
//! next change in the transaction's scope fails.
//!
//! A transaction in buffer mode keeps its changes in the memory of its firnd until the commit. If that firnd dies, the
//! next one aborts the transaction. Without an error, a program in the transaction would not notice. It would make the
//! rest of its changes outside of any transaction, or in a new checkpoint of a commit rule. So a change may fail:
//!
//! | change in the scope of an aborted transaction | answer |
//! |---|---|
//! | through a handle that could write in the scope when firnd died | ECANCELED, until the handle is closed |
//! | a request that the kernel sends again, because firnd died during it | ECANCELED |
//! | the first change of a process that was running when firnd died | ECANCELED |
//! | any other change | is made |
//!
//! Promise: the live table, a mapped file for the next firnd, stores the aborted scopes (paths that a transaction
//! covered) and the processes that were informed. A kill of this firnd loses neither.
//!
//! A prepare or commit of the aborted transaction is refused too. After that refusal, changes are made again. A
//! repeated request gets the same answer, because firnd may have died before it sent the first one. The next begin or
//! abort in the scope, or the next checkpoint that a rule commits there, ends all of this.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use firn_arena::live::LiveTable;
use firn_backing::{Caller, Errno};
use firn_format::live::{ALL_PROCESSES, PathSum, UndoneScope};
use firn_format::quote::quoted;

use crate::process::process_of_thread;

/// A change that a program requests.
pub(crate) struct RequestedChange<'a> {
    pub(crate) caller: Caller,
    /// Path of the changed object. `None`: the object lost its name with the transaction, so it may be in any scope.
    pub(crate) path: Option<&'a [u8]>,
    /// The key of the commit rule's checkpoint that the path belongs to.
    pub(crate) checkpoint_key: Option<&'a [u8]>,
    /// Whether an earlier firnd received the request already.
    pub(crate) is_repeated: bool,
}

impl RequestedChange<'_> {
    /// Returns whether the change is, or may be, in the scope of an entry.
    fn may_be_in(&self, entry: &UndoneScope) -> bool {
        let Some(path) = self.path else {
            return true;
        };
        entry.covers(path) || self.checkpoint_key.is_some_and(|key| entry.covers(key))
    }
}

/// The aborted scopes of one mount.
pub(crate) struct UndoneScopes {
    table: Arc<LiveTable>,
    /// Whether the table has an aborted scope in which a change may have to be refused. Read for each change, so that
    /// most changes do not lock the table.
    has_uninformed_scope: AtomicBool,
}

impl UndoneScopes {
    /// Returns the aborted scopes that the live table (the state for the next firnd) has.
    pub(crate) fn from_table(table: &Arc<LiveTable>) -> Self {
        let scopes = Self {
            table: Arc::clone(table),
            has_uninformed_scope: AtomicBool::new(false),
        };
        scopes.update_uninformed_flag();
        scopes
    }

    fn update_uninformed_flag(&self) {
        let entries = self.table.undone_scopes();
        let has_uninformed_scope = entries.iter().any(|entry| needs_check(entry, &entries));
        self.has_uninformed_scope
            .store(has_uninformed_scope, Ordering::Release);
    }

    /// Returns whether the table has no entry.
    pub(crate) fn is_empty(&self) -> bool {
        self.table.undone_scopes().is_empty()
    }

    /// Returns whether a change may have to be refused.
    pub(crate) fn has_uninformed_scope(&self) -> bool {
        self.has_uninformed_scope.load(Ordering::Acquire)
    }

    /// Refuses a change with ECANCELED if its transaction was aborted when firnd, the serving process, died and the
    /// program does not know that yet. Each process gets this error once: the live table, a mapped file for the next
    /// firnd, records which processes were informed.
    ///
    /// Only processes that ran at that death are informed. A request that an earlier firnd had received already
    /// (`is_repeated`) is always refused.
    pub(crate) fn check_change(&self, change: &RequestedChange<'_>) -> Result<(), Errno> {
        let entries = self.table.undone_scopes();
        // An entry with `informed` records a process that was informed; one without it is an aborted scope, the path
        // that a transaction covered.
        let mut informed_entries = Vec::new();
        let mut aborted_scopes = Vec::new();
        for entry in entries.iter().filter(|entry| change.may_be_in(entry)) {
            if entry.informed.is_some() {
                informed_entries.push(entry);
            } else if needs_check(entry, &entries) {
                aborted_scopes.push(entry);
            }
        }
        // A process must be informed if it ran at the last death that has aborted one of these scopes.
        let Some(last_death) = aborted_scopes.iter().map(|scope| scope.died_ticks).max() else {
            return Ok(());
        };
        let process = process_of_thread(change.caller.pid);
        let was_informed = informed_entries
            .iter()
            .any(|entry| entry.informed == Some(process) && entry.died_ticks == last_death);
        let must_refuse =
            change.is_repeated || (!was_informed && was_running_at(process, last_death));
        if !must_refuse {
            return Ok(());
        }
        // The process counts as informed before it gets the error, so a kill of this firnd does not repeat the error.
        for scope in aborted_scopes {
            self.table.note_undone_scope(UndoneScope {
                informed: Some(process),
                ..*scope
            });
        }
        if !was_informed {
            let path = change.path.map(quoted);
            tracing::warn!(
                process,
                path,
                "a change is refused: its transaction was aborted when firnd died"
            );
        }
        Err(Errno::CANCELED)
    }

    /// Returns whether the last transaction of the scope at `path` was aborted because its firnd died.
    pub(crate) fn is_aborted(&self, path: &[u8]) -> bool {
        let path_sum = PathSum::from_path(path);
        let entries = self.table.undone_scopes();
        entries.iter().any(|entry| entry.path == path_sum)
    }

    /// Records that a request about the aborted transaction at `path` is refused, so that no change is refused any
    /// more.
    pub(crate) fn record_refused_request(&self, path: &[u8]) {
        let path_sum = PathSum::from_path(path);
        for scope in self.table.undone_scopes() {
            if scope.path == path_sum && scope.informed.is_none() {
                self.table.note_undone_scope(UndoneScope {
                    informed: Some(ALL_PROCESSES),
                    ..scope
                });
            }
        }
        self.update_uninformed_flag();
    }

    /// Forgets the scope at `path`: its program has made a request about the transaction, and so knows of the abort.
    pub(crate) fn remove(&self, path: &[u8]) {
        if self.is_aborted(path) {
            self.table.forget_undone_scope(PathSum::from_path(path));
            self.update_uninformed_flag();
        }
    }
}

/// Returns whether an entry is an aborted scope of which not all processes are informed.
fn needs_check(entry: &UndoneScope, entries: &[UndoneScope]) -> bool {
    let informs_all = UndoneScope {
        informed: Some(ALL_PROCESSES),
        ..*entry
    };
    entry.informed.is_none() && !entries.contains(&informs_all)
}

/// Returns whether a process started before a time, in clock ticks since the host started. True also if firnd does not
/// see the process.
fn was_running_at(process: u32, ticks: u64) -> bool {
    match firn_client::start_ticks_of(process) {
        Ok(start_ticks) => start_ticks <= ticks,
        Err(_) => true,
    }
}
