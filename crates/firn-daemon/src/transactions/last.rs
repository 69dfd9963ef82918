//! Transactions at the end of a mount: what is in its way, and what is left to the next one.

use std::time::Duration;

use firn_transact::{Machine, TransactionHandle};

use super::apply_commit;
use super::mount::StepsOfMount;
use crate::gate::TransactionGate;
use crate::store::shown_scope;

/// How long other hosts are waited for at the end of a mount. The next one goes on.
const LAST_PATIENCE: Duration = Duration::from_secs(5);

/// For the end of a mount: transactions come to the end that this mount can give them.
pub(crate) fn leave(gate: &TransactionGate) {
    let mount = StepsOfMount {
        patience: LAST_PATIENCE,
        ..StepsOfMount::of(gate)
    };
    let machine = Machine::new(gate.store(), &mount);
    for found in gate.store().open_transactions() {
        if let Err(error) = machine.end_at_unmount(&found) {
            tracing::warn!(%error, scope = %shown_scope(found.scope()), "a transaction is left to the next mount");
        }
    }
}

/// Once nothing waits for what [`leave`] could not apply: what was written after it stays in the arena for the next
/// mount, which applies it first.
pub(crate) fn give_up(gate: &TransactionGate) {
    for found in gate.store().open_transactions() {
        if let TransactionHandle::Decided(_) = found
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

/// The first transaction that would be aborted, or lose what waits for its outcome, if another firnd went on with the mount.
pub(crate) fn ends_with_firnd(gate: &TransactionGate) -> Option<String> {
    let all = gate.store().open_transactions();
    let found = all.iter().find(|found| !found.outlives_firnd())?;
    let scope = shown_scope(&found.path_now());
    Some(if found.is_of_names() {
        format!("a checkpoint of a commit rule is open in {scope}: try again when it is complete")
    } else {
        format!("a transaction is open in {scope}: firn commit or firn abort it first")
    })
}

/// Why the mount must not be unmounted. Decided commits are applied first.
pub(crate) fn in_the_way(gate: &TransactionGate) -> Option<String> {
    let mut begun_here = gate.store().open_transactions();
    // What commit rules have begun ends with the mount.
    begun_here.retain(|found| {
        let is_of_a_rule = found.is_open() && found.is_of_names();
        !found.is_recovered() && !is_of_a_rule
    });
    let undecided = begun_here.iter().find_map(|found| {
        let scope = shown_scope(&found.path_now());
        match found {
            TransactionHandle::Prepared(prepared) => Some(format!(
                "a transaction in {scope} is prepared with id {}: firn commit or firn abort it, or --force leaves it to the next mount, without what was written since",
                prepared.id()
            )),
            TransactionHandle::Open(_) => Some(format!(
                "a transaction is open in {scope}: firn commit or firn abort it, or --force undoes it"
            )),
            TransactionHandle::Decided(_) => None,
        }
    });
    undecided.or_else(|| {
        begun_here.into_iter().find_map(|found| {
            let scope = shown_scope(&found.path_now());
            let error = apply_commit(gate, &found.decided()?).err()?;
            Some(format!(
                "the commit of a transaction in {scope} cannot be applied: {error}; mend the backing and try again, or --force leaves it to the next mount"
            ))
        })
    })
}
