//! Answers requests of the control socket about transactions.
//!
//! The state machine [`firn_transact::machine`] takes a request from step to step. This module converts requests to
//! verbs of that machine, its answers to replies, and its failures to an errno and a sentence. It also supplies the
//! steps with actions that only the mount can do ([`MountActions`]), such as stopping changes. No rule of a transaction
//! is in this module.

mod answer;
mod last;
mod mount;
mod refusal;
mod status;
mod steps;

use firn_engine::Cached;
use firn_transact::machine::{Answer, Verb};
use firn_transact::{AbortError, Decided, Machine, StageError, TransactionError};

use self::mount::MountActions;
use crate::gate::TransactionGate;
use crate::store::{LoggableStore, shown_scope};

pub(crate) use self::answer::{RequestContext, answer_owned, answer_without_transactions};
pub(crate) use self::last::{
    apply_commits_or_find_obstacle, end_transactions, find_upgrade_obstacle, refuse_all_changes,
    refuse_changes_after_decided_commits,
};
pub(crate) use self::status::transaction_statuses;
pub(crate) use self::steps::{record_undone, steps};

/// Runs a request of a client on the machine.
fn run_request(
    gate: &TransactionGate,
    verb: Verb<'_>,
    path: &[u8],
    context: &RequestContext<'_>,
) -> Result<Answer, TransactionError> {
    let mount = MountActions {
        hosts_timeout: context.hosts_timeout,
        invalidate_cache: context.invalidate_cache,
        apply_later: context.apply_later,
        ..MountActions::from_gate(gate)
    };
    Machine::new(gate.store(), &mount).run(verb, path)
}

/// Applies a commit, unless it is applied already.
pub(crate) fn apply_commit(
    gate: &TransactionGate,
    commit: &Decided<'_, LoggableStore>,
) -> Result<(), TransactionError> {
    let mount = MountActions::from_gate(gate);
    Machine::new(gate.store(), &mount).apply(commit)
}

/// Returns whether the transaction is open; `None` if there is no transaction.
pub(crate) fn is_open(gate: &TransactionGate, path: &[u8]) -> Option<bool> {
    Some(gate.store().current_transaction(path)?.is_open())
}

/// Aborts the open transaction at `path` because its owner (a connection or process) has ended. A transaction that is
/// gone already is a success. The error is a text for the next request about it.
pub(crate) fn abort_orphan(
    gate: &TransactionGate,
    path: &[u8],
    invalidate_cache: &dyn Fn(Cached),
) -> Result<(), String> {
    let mount = MountActions {
        invalidate_cache,
        ..MountActions::from_gate(gate)
    };
    let scope = shown_scope(path);
    let aborted = Machine::new(gate.store(), &mount).run(Verb::Abort, path);
    answer::remove_ended_from_live_table(gate);
    match aborted {
        Ok(_) | Err(TransactionError::Stage(StageError::NoTransaction)) => {
            tracing::info!(%scope, "a transaction is aborted: its owner is gone");
            Ok(())
        }
        Err(error) => {
            tracing::warn!(%error, %scope, "a transaction whose owner is gone cannot be aborted yet");
            Err(error.to_string())
        }
    }
}

/// Undoes this host's part of transactions that other hosts have aborted, as far as that is possible now: all hosts
/// must have stopped their changes first. The caller repeats this periodically.
pub(crate) fn undo_transactions_aborted_elsewhere(
    gate: &TransactionGate,
    invalidate_cache: &dyn Fn(Cached),
) {
    let mount = MountActions {
        invalidate_cache,
        ..MountActions::from_gate(gate)
    };
    for path in gate.store().scopes_to_stop() {
        let Some(transaction) = gate.store().current_transaction(&path) else {
            continue;
        };
        let scope = shown_scope(&path);
        match Machine::new(gate.store(), &mount).abort(transaction) {
            Ok(()) => {
                tracing::info!(%scope, "a transaction of several hosts was aborted and is undone")
            }
            Err(TransactionError::Abort(AbortError::Stopping { hosts })) => {
                tracing::debug!(%scope, ?hosts, "waiting until other hosts have stopped an aborted transaction");
            }
            Err(error) => {
                tracing::warn!(%error, %scope, "a transaction that another host has aborted cannot be undone")
            }
        }
    }
}
