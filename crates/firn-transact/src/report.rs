//! [`TransactionFigures`]: stage, sizes and counts of each transaction of a mount, for the status.
//!
//! Promise: the status never waits for a lock that a thread may hold during a call of the backing (the file system
//! below the mount). So the status answers even if the backing hangs.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use firn_backing::Backing;

use crate::backup::Progress;
use crate::scope::{Scope, Stage};
use crate::scopes::Scopes;
use crate::state::NameState;
use crate::transactional::TransactionalBacking;

/// Stage, sizes and counts of a transaction that has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransactionFigures {
    /// Path of its scope at the begin, relative to the backing.
    pub scope: Vec<u8>,
    /// Path under which programs see the scope.
    pub path_now: Vec<u8>,
    /// Stage of the transaction.
    pub stage: Stage,
    /// Bytes that programs wrote since the begin; bytes that were written twice count twice.
    pub written_bytes: u64,
    /// Number of objects that the transaction changes.
    pub objects: u64,
    /// Number of names of files in each state.
    pub states: BTreeMap<NameState, u64>,
    /// Whether an earlier firnd prepared the transaction.
    pub is_recovered: bool,
    /// Error of the last attempt to apply the commit; `None` if it succeeded or there was none.
    pub trouble: Option<String>,
    /// Progress of the backup; `None` on a mount without a backup.
    pub backup: Option<Progress>,
}

impl<B: Backing> Scopes<B> {
    /// Returns the paths under which programs see the scopes of the transactions that have not ended.
    pub fn scopes_now(&self) -> Vec<Vec<u8>> {
        self.in_order()
            .iter()
            .map(|(scope, _)| scope.path_now())
            .collect()
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// Returns the figures of the transactions that have not ended. A commit that is being applied comes before the
    /// transaction that follows it.
    ///
    /// A caller that acts on a transaction asks for its handle ([`TransactionalBacking::current_transaction`]).
    pub fn transactions(&self) -> Vec<TransactionFigures> {
        self.scopes
            .in_order()
            .iter()
            .map(|(scope, stage)| self.figures_of(scope, *stage))
            .collect()
    }

    /// Returns the figures of one transaction in this stage, for the status. Takes no lock that a thread may hold
    /// during a call of the backing.
    fn figures_of(&self, scope: &Scope<B>, stage: Stage) -> TransactionFigures {
        // An earlier firnd prepared a recovered transaction, so only its record has the changes. In shadow mode the
        // saved objects count.
        let objects = match (&scope.recovered, &scope.shadow) {
            (Some(record), _) => record.entries.len() as u64,
            (None, Some(shadow)) => shadow.saved_count(),
            (None, None) => scope.changed.lock().len() as u64,
        };
        TransactionFigures {
            scope: scope.path.clone(),
            path_now: scope.path_now(),
            stage,
            objects,
            written_bytes: scope.written_bytes.load(Ordering::Relaxed),
            states: scope.count_states(),
            is_recovered: scope.recovered.is_some(),
            trouble: scope.apply_state.last_error(),
            backup: self.backups.backup_progress(scope),
        }
    }
}
