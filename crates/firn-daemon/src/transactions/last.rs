//! Transactions at the end of a mount: what is in its way, and what is left to the next one.

use std::time::Duration;

use firn_transact::{Found, TransactionError};

use super::{abort, apply_commit, quiesce};
use crate::gate::{Pending, TransactionGate};
use crate::store::{LoggableStore, shown_scope};

/// How long other hosts are waited for at the end of a mount. The next one goes on.
const LAST_PATIENCE: Duration = Duration::from_secs(5);

/// For the end of a mount: transactions that are open are undone, those that are prepared wait for the next
/// mount, without what was written after.
pub(crate) fn leave(gate: &TransactionGate) {
    for found in gate.store().open_transactions() {
        let left = match found.look_again() {
            Some(Found::Open(_)) => abort(gate, found.scope(), LAST_PATIENCE, &|_| {}),
            Some(prepared @ Found::Prepared(_)) => discard_pending(gate, &prepared),
            Some(Found::Decided(_)) => apply_commit(gate, found.scope()),
            None => Ok(()),
        };
        if let Err(error) = left {
            tracing::warn!(%error, scope = %shown_scope(found.scope()), "a transaction is left to the next mount");
        }
    }
}

/// Drops what was written in the scope of a transaction since it was prepared.
fn discard_pending(
    gate: &TransactionGate,
    prepared: &Found<'_, LoggableStore>,
) -> Result<(), TransactionError> {
    prepared.refuse_changes()?;
    quiesce(gate, prepared.scope(), Pending::Discard, |_| Ok(()))
}

/// Once nothing waits for what [`leave`] could not apply: what was written after it stays in the arena for the next
/// mount, which applies it first.
pub(crate) fn give_up(gate: &TransactionGate) {
    for found in gate.store().open_transactions() {
        if let Found::Decided(_) = found
            && let Err(error) = found.refuse_changes()
        {
            tracing::warn!(%error, scope = %shown_scope(found.scope()), "changes may wait for a commit");
        }
    }
}

/// Has changes in every transaction fail: none of them can end here any more.
pub(crate) fn give_up_all(gate: &TransactionGate) {
    for found in gate.store().open_transactions() {
        if let Err(error) = found.refuse_changes() {
            tracing::warn!(%error, scope = %shown_scope(found.scope()), "changes of a transaction go on");
        }
    }
}

/// Why the mount must not be unmounted. Decided commits are applied first.
pub(crate) fn in_the_way(gate: &TransactionGate) -> Option<String> {
    let mut begun_here = gate.store().open_transactions();
    begun_here.retain(|found| !found.is_recovered());
    let undecided = begun_here.iter().find_map(|found| {
        let scope = shown_scope(&found.path_now());
        match found {
            Found::Prepared(prepared) => Some(format!(
                "a transaction in {scope} is prepared with id {}: firn commit or firn abort it, or --force leaves it to the next mount, without what was written since",
                prepared.id()
            )),
            Found::Open(_) => Some(format!(
                "a transaction is open in {scope}: firn commit or firn abort it, or --force undoes it"
            )),
            Found::Decided(_) => None,
        }
    });
    undecided.or_else(|| {
        begun_here.iter().find_map(|found| {
            let error = apply_commit(gate, found.scope()).err()?;
            let scope = shown_scope(&found.path_now());
            Some(format!(
                "the commit of a transaction in {scope} cannot be applied: {error}; mend the backing and try again, or --force leaves it to the next mount"
            ))
        })
    })
}
