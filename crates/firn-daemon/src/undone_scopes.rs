//! Refuses changes of programs that do not know yet that their transaction was aborted.
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
//! Relies on: a scope is forgotten at the next request about its transaction, and at the next checkpoint that a rule
//! commits in it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use firn_arena::live::LiveTable;
use firn_backing::{Caller, Errno};
use firn_format::live::{PathSum, UndoneScope};
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
    /// Whether the table has an aborted scope. Read for each change, so that most changes do not lock the table.
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
        let has_some = !self.table.undone_scopes().is_empty();
        self.has_some.store(has_some, Ordering::Release);
    }

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
        let covering = noted.iter().filter(is_covering);
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

    /// Forgets the scope at `path`: its program has made a request about the transaction, and so knows of the abort.
    pub(crate) fn forget(&self, path: &[u8]) {
        if self.has_some() {
            self.table.forget_undone_scope(PathSum::of(path));
            self.update_has_some();
        }
    }
}

/// Returns whether a process started before a time, in clock ticks since the host started. True also if firnd does not see
/// the process.
fn was_running_at(process: u32, ticks: u64) -> bool {
    let started = firn_client::start_ticks_of(process);
    !started.is_ok_and(|started| started > ticks)
}
