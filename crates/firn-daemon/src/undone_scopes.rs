//! Scopes of transactions that ended with an earlier firnd, as long as a program that was in one may not know it.
//!
//! A transaction in buffer mode is in the memory of its firnd, and the next one undoes it. A program that goes on would
//! make the rest of its changes outside of any transaction, or in a new checkpoint of a commit rule. So it is told:
//!
//! | change in such a scope | answer |
//! |---|---|
//! | by a handle that could write there when firnd died, and was lost with it | ECANCELED, until it is closed |
//! | the kernel sends it again: it was under way when firnd died | ECANCELED |
//! | the first one of a process that ran when firnd died | ECANCELED |
//! | any other one | is made |
//!
//! Promise: the live table has which processes are to be told, so a kill of this firnd changes nothing.
//!
//! Relies on: a scope is forgotten with the next request about its transaction, or the next checkpoint that is committed there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use firn_arena::live::LiveTable;
use firn_backing::{Caller, Errno};
use firn_format::live::{PathSum, UndoneScope};
use firn_format::quote::quoted;

use crate::process::process_of;

/// What a change is about, for [`UndoneScopes::admit`].
pub(crate) struct AskedChange<'a> {
    pub(crate) caller: Caller,
    /// None: what it is about lost its name with the transaction, and may be in any scope.
    pub(crate) path: Option<&'a [u8]>,
    /// The key of the commit rule's checkpoint that the path belongs to.
    pub(crate) checkpoint_key: Option<&'a [u8]>,
    /// An earlier firnd had the request already.
    pub(crate) is_repeated: bool,
}

/// The scopes of one mount.
pub(crate) struct UndoneScopes {
    table: Arc<LiveTable>,
    has_some: AtomicBool,
}

impl UndoneScopes {
    pub(crate) fn of(table: &Arc<LiveTable>) -> Self {
        let found = Self {
            table: Arc::clone(table),
            has_some: AtomicBool::new(false),
        };
        found.look();
        found
    }

    fn look(&self) {
        let has_some = !self.table.undone_scopes().is_empty();
        self.has_some.store(has_some, Ordering::Release);
    }

    pub(crate) fn has_some(&self) -> bool {
        self.has_some.load(Ordering::Acquire)
    }

    /// Refuses a change of a program that is to be told.
    pub(crate) fn admit(&self, change: &AskedChange<'_>) -> Result<(), Errno> {
        let noted = self.table.undone_scopes();
        let is_covering = |scope: &&UndoneScope| match change.path {
            Some(path) => {
                let has_key = change.checkpoint_key.is_some_and(|key| scope.covers(key));
                scope.covers(path) || has_key
            }
            None => true,
        };
        let covering = noted.iter().filter(is_covering);
        let (told, scopes): (Vec<&UndoneScope>, _) = covering.partition(|one| one.told.is_some());
        let Some(last) = scopes
            .iter()
            .max_by_key(|scope: &&&UndoneScope| scope.died_ticks)
        else {
            return Ok(());
        };
        let process = process_of(change.caller.pid);
        let was_told = told
            .iter()
            .any(|one| one.told == Some(process) && one.died_ticks == last.died_ticks);
        if !change.is_repeated && (was_told || !ran_at(process, last.died_ticks)) {
            return Ok(());
        }
        for scope in scopes {
            self.table.note_undone_scope(UndoneScope {
                told: Some(process),
                ..*scope
            });
        }
        if !was_told {
            let path = change.path.map(quoted);
            tracing::warn!(
                process,
                path,
                "a change is refused: its transaction was aborted when firnd died"
            );
        }
        Err(Errno::CANCELED)
    }

    /// The program that a transaction was for knows of its end.
    pub(crate) fn settle(&self, path: &[u8]) {
        if self.has_some() {
            self.table.forget_undone_scope(PathSum::of(path));
            self.look();
        }
    }
}

/// Whether a process had begun by a time in clock ticks. One that is not seen may have.
fn ran_at(process: u32, ticks: u64) -> bool {
    let began = firn_client::start_ticks_of(process);
    !began.is_ok_and(|began| began > ticks)
}
