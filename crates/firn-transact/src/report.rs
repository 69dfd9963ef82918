//! Figures of the transactions of a mount, for the status.
//!
//! Promise: it waits for no lock that is held during a call of the backing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::Backing;

use crate::backup::Progress;
use crate::scope::{Scope, Stage};
use crate::scopes::Scopes;
use crate::shadow::Shadow;
use crate::state::NameState;
use crate::transactional::TransactionalBacking;

/// Figures of a transaction that is not over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transaction {
    /// Path of its scope at the begin, relative to the backing.
    pub scope: Vec<u8>,
    /// Path under which programs see it.
    pub path_now: Vec<u8>,
    /// How far it is.
    pub stage: Stage,
    /// Bytes written in it since it began, overwritten ones too.
    pub written_bytes: u64,
    /// Objects that it changes.
    pub objects: u64,
    /// How many names of files are in each state.
    pub states: BTreeMap<NameState, u64>,
    /// An earlier firnd prepared it.
    pub is_recovered: bool,
    /// Why it could not be applied when that was tried last.
    pub trouble: Option<String>,
    /// Where there is a backup: how far it is.
    pub backup: Option<Progress>,
}

impl<B: Backing> Scopes<B> {
    /// Paths under which programs see the scopes of the transactions that are not over.
    pub fn scopes_now(&self) -> Vec<Vec<u8>> {
        let all = self.in_order().into_iter();
        all.map(|(scope, _)| scope.path_now()).collect()
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// For reports: the transactions that are not over; one that is to be applied comes before the next one of its
    /// scope. A caller that acts on one asks for its handle ([`TransactionalBacking::current_transaction`]).
    pub fn transactions(&self) -> Vec<Transaction> {
        let one = |(scope, stage): (Arc<Scope<B>>, Stage)| Transaction {
            scope: scope.path.clone(),
            path_now: scope.path_now(),
            stage,
            objects: match &scope.recovered {
                Some(record) => record.entries.len() as u64,
                None => scope
                    .shadow
                    .as_ref()
                    .map_or(scope.changed.lock().len() as u64, Shadow::saved_count),
            },
            written_bytes: scope.written_bytes.load(Ordering::Relaxed),
            states: scope.count_states(),
            is_recovered: scope.recovered.is_some(),
            trouble: scope.application.trouble(),
            backup: self.backups.backup_progress(&scope),
        };
        self.scopes.in_order().into_iter().map(one).collect()
    }
}
