//! Refuses changes of programs that have not been informed yet that their transaction was aborted.
//!
//! A transaction in buffer mode lives in the memory of its firnd. If that firnd dies, the next one aborts the transaction.
//! A program in the transaction may not have noticed. It would make the rest of its changes outside of any transaction,
//! or in a new checkpoint of a commit rule. So firnd informs the program by an error:
//!
//! | change in the scope of an aborted transaction | answer |
//! |---|---|
//! | through a handle that could write in the scope when firnd died | ECANCELED, until the handle is closed |
//! | a request that the kernel sends again, because firnd died during it | ECANCELED |
//! | the first change of a process that was running when firnd died | ECANCELED |
//! | any other change | is made |
//!
//! Promise: the live table stores the aborted scopes and the processes that were informed. A kill of this firnd loses
//! neither.
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

use crate::process::process_of;

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

/// The aborted scopes of one mount.
pub(crate) struct UndoneScopes {
    table: Arc<LiveTable>,
    /// Whether the table has an aborted scope in which a change may have to be refused. Read for each change, so that
    /// most changes do not lock the table.
    has_some: AtomicBool,
}

impl UndoneScopes {
    pub(crate) fn of(table: &Arc<LiveTable>) -> Self {
        let scopes = Self {
            table: Arc::clone(table),
            has_some: AtomicBool::new(false),
        };
        scopes.update_has_some();
        scopes
    }

    fn update_has_some(&self) {
        let entries = self.table.undone_scopes();
        let has_some = entries.iter().any(|entry| needs_check(entry, &entries));
        self.has_some.store(has_some, Ordering::Release);
    }

    /// Returns whether the table has no entry.
    pub(crate) fn is_empty(&self) -> bool {
        self.table.undone_scopes().is_empty()
    }

    /// Returns whether a change may have to be refused.
    pub(crate) fn has_some(&self) -> bool {
        self.has_some.load(Ordering::Acquire)
    }

    /// Fails with ECANCELED if the program has to be informed of an abort, and notes that its process was informed.
    pub(crate) fn check_change(&self, change: &RequestedChange<'_>) -> Result<(), Errno> {
        let noted = self.table.undone_scopes();
        let is_covering = |scope: &&UndoneScope| match change.path {
            Some(path) => {
                let has_key = change.checkpoint_key.is_some_and(|key| scope.covers(key));
                scope.covers(path) || has_key
            }
            None => true,
        };
        let covering = noted.iter().filter(|entry| {
            is_covering(entry) && (entry.informed.is_some() || needs_check(entry, &noted))
        });
        let (informed, scopes): (Vec<&UndoneScope>, _) =
            covering.partition(|scope| scope.informed.is_some());
        let Some(last) = scopes
            .iter()
            .max_by_key(|scope: &&&UndoneScope| scope.died_ticks)
        else {
            return Ok(());
        };
        let process = process_of(change.caller.pid);
        let was_informed = informed
            .iter()
            .any(|entry| entry.informed == Some(process) && entry.died_ticks == last.died_ticks);
        if !change.is_repeated && (was_informed || !was_running_at(process, last.died_ticks)) {
            return Ok(());
        }
        for scope in scopes {
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
        let path = PathSum::of(path);
        let entries = self.table.undone_scopes();
        entries.iter().any(|entry| entry.path == path)
    }

    /// Notes that a request about the aborted transaction at `path` is refused, so that no change is refused any more.
    pub(crate) fn note_refused_request(&self, path: &[u8]) {
        let path = PathSum::of(path);
        for scope in self.table.undone_scopes() {
            if scope.path == path && scope.informed.is_none() {
                self.table.note_undone_scope(UndoneScope {
                    informed: Some(ALL_PROCESSES),
                    ..scope
                });
            }
        }
        self.update_has_some();
    }

    /// Forgets the scope at `path`: its program has made a request about the transaction, and so knows of the abort.
    pub(crate) fn forget(&self, path: &[u8]) {
        if self.is_aborted(path) {
            self.table.forget_undone_scope(PathSum::of(path));
            self.update_has_some();
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

/// Returns whether a process started before a time, in clock ticks since the host started. True also if firnd does not see
/// the process.
fn was_running_at(process: u32, ticks: u64) -> bool {
    let started = firn_client::start_ticks_of(process);
    !started.is_ok_and(|started| started > ticks)
}
