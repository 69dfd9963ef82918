//! Transactions at the end of a mount: which of them prevent the end, and which are left to the next mount.

use std::time::Duration;

use firn_transact::{Machine, TransactionHandle};

use super::apply_commit;
use super::mount::MountActions;
use crate::gate::TransactionGate;
use crate::store::{LoggableStore, shown_scope};

/// Maximum wait for other hosts at the end of a mount. The next mount continues what is unfinished then.
const LAST_HOSTS_TIMEOUT: Duration = Duration::from_secs(5);

/// Ends the transactions at the end of a mount, as far as this mount can.
pub(crate) fn end_transactions(gate: &TransactionGate) {
    let mount = MountActions {
        hosts_timeout: LAST_HOSTS_TIMEOUT,
        ..MountActions::from_gate(gate)
    };
    let machine = Machine::new(gate.store(), &mount);
    for transaction in gate.store().open_transactions() {
        if let Err(error) = machine.end_at_unmount(&transaction) {
            tracing::warn!(%error, scope = %shown_scope(transaction.scope()), "a transaction cannot be ended and is left to the next mount");
        }
    }
}

/// Makes changes fail that wait for a commit which [`end_transactions`] could not apply. Data that was written after
/// this commit stays in the arena for the next mount, which applies the commit first.
pub(crate) fn refuse_changes_after_decided_commits(gate: &TransactionGate) {
    for transaction in gate.store().open_transactions() {
        if let TransactionHandle::Decided(_) = transaction
            && let Err(error) = transaction.refuse_changes()
        {
            tracing::warn!(%error, scope = %shown_scope(transaction.scope()), "cannot refuse changes in a transaction, \
                so programs that make them may wait for its commit");
        }
    }
}

/// Makes changes in all transactions fail, because no transaction can end on this host any more.
pub(crate) fn refuse_all_changes(gate: &TransactionGate) {
    for transaction in gate.store().open_transactions() {
        if let Err(error) = transaction.refuse_changes() {
            tracing::warn!(%error, scope = %shown_scope(transaction.scope()), "cannot refuse changes in a transaction, \
                so programs that make them may wait");
        }
    }
}

/// Describes the first transaction that does not outlive this firnd; `None` if there is none. Another firnd would abort
/// it, or drop the data that waits for its outcome.
pub(crate) fn find_upgrade_obstacle(gate: &TransactionGate) -> Option<String> {
    let transactions = gate.store().open_transactions();
    let transaction = transactions
        .iter()
        .find(|transaction| !transaction.outlives_firnd())?;
    let scope = shown_scope(&transaction.path_now());
    Some(if transaction.is_of_names() {
        format!("a checkpoint of a commit rule is open in {scope}: try again when it is complete")
    } else {
        format!("a transaction is open in {scope}: run `firn commit` or `firn abort` there first")
    })
}

/// Prepares the transactions for an unmount: applies the decided commits (makes their changes in the backing), unless
/// an undecided transaction prevents the unmount. Describes that transaction, or the commit that fails; `None` if there
/// is none.
pub(crate) fn apply_commits_or_find_obstacle(gate: &TransactionGate) -> Option<String> {
    let mut transactions = gate.store().open_transactions();
    // Transactions that commit rules have begun end with the mount, so they do not prevent its end.
    transactions.retain(|transaction| {
        let is_of_a_rule = transaction.is_open() && transaction.is_of_names();
        !transaction.is_recovered() && !is_of_a_rule
    });
    // An undecided transaction prevents the unmount, so no commit is applied if there is one.
    if let Some(obstacle) = transactions.iter().find_map(describe_undecided) {
        return Some(obstacle);
    }
    for transaction in transactions {
        let scope = shown_scope(&transaction.path_now());
        let Some(decided) = transaction.decided() else {
            continue;
        };
        if let Err(error) = apply_commit(gate, &decided) {
            return Some(format!(
                "the commit of a transaction in {scope} cannot be applied: {error}; mend the backing and try again, or use --force, which leaves it to the next mount"
            ));
        }
    }
    None
}

/// Describes a transaction that the user must end before an unmount; `None` if it is decided.
fn describe_undecided(transaction: &TransactionHandle<'_, LoggableStore>) -> Option<String> {
    let scope = shown_scope(&transaction.path_now());
    match transaction {
        TransactionHandle::Prepared(prepared) => Some(format!(
            "a transaction in {scope} is prepared with id {}: run `firn commit` or `firn abort`, or use --force, which \
             leaves it to the next mount without the data written since",
            prepared.id()
        )),
        TransactionHandle::Open(_) => Some(format!(
            "a transaction is open in {scope}: run `firn commit` or `firn abort`, or use --force, which undoes it"
        )),
        TransactionHandle::Decided(_) => None,
    }
}
