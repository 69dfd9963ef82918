//! Transactions of a mount: what the control socket asks for.
//!
//! `firn_transact` takes a request from step to step ([`firn_transact::machine`]). Here requests become verbs of that
//! machine, its answers replies, and its failures an errno and a sentence; and here the steps get what only the mount can
//! do ([`StepsOfMount`]). No rule of a transaction is in this module.

mod answer;
mod last;
mod mount;
mod refusal;
mod status;
mod steps;

use firn_engine::Cached;
use firn_transact::machine::{Answer, Verb};
use firn_transact::{AbortError, Decided, Machine, StageError, TransactionError};

use self::mount::StepsOfMount;
use crate::gate::TransactionGate;
use crate::store::{LoggableStore, shown_scope};

pub(crate) use self::answer::{RequestContext, answer_owned, answer_without};
pub(crate) use self::last::{ends_with_firnd, give_up, give_up_all, in_the_way, leave};
pub(crate) use self::status::status;
pub(crate) use self::steps::{note_undone, steps};

/// Takes a request of a client through its steps.
fn run(
    gate: &TransactionGate,
    verb: Verb<'_>,
    path: &[u8],
    context: &RequestContext<'_>,
) -> Result<Answer, TransactionError> {
    let mount = StepsOfMount {
        patience: context.patience,
        forget: context.forget,
        apply_later: context.apply_later,
        ..StepsOfMount::of(gate)
    };
    Machine::new(gate.store(), &mount).run(verb, path)
}

/// Applies a commit, unless that is done.
pub(crate) fn apply_commit(
    gate: &TransactionGate,
    commit: &Decided<'_, LoggableStore>,
) -> Result<(), TransactionError> {
    let mount = StepsOfMount::of(gate);
    Machine::new(gate.store(), &mount).apply(commit)
}

/// Whether the transaction is open; `None`: there is none.
pub(crate) fn is_open(gate: &TransactionGate, path: &[u8]) -> Option<bool> {
    Some(gate.store().current_transaction(path)?.is_open())
}

/// Aborts the transaction of an owner that is gone.
pub(crate) fn abort_orphan(
    gate: &TransactionGate,
    path: &[u8],
    forget: &dyn Fn(Cached),
) -> Result<(), String> {
    let mount = StepsOfMount {
        forget,
        ..StepsOfMount::of(gate)
    };
    let scope = shown_scope(path);
    let aborted = Machine::new(gate.store(), &mount).run(Verb::Abort, path);
    answer::forget_ended(gate);
    match aborted {
        Ok(_) | Err(TransactionError::Stage(StageError::NoTransaction)) => {
            tracing::info!(%scope, "a transaction is aborted: its owner is gone");
            Ok(())
        }
        Err(error) => {
            tracing::warn!(%error, %scope, "the transaction of an owner that is gone cannot be aborted yet");
            Err(error.to_string())
        }
    }
}

/// Ends transactions that other hosts have aborted, as far as that goes now.
pub(crate) fn follow(gate: &TransactionGate, forget: &dyn Fn(Cached)) {
    let mount = StepsOfMount {
        forget,
        ..StepsOfMount::of(gate)
    };
    for scope in gate.store().to_be_stopped() {
        let Some(found) = gate.store().current_transaction(&scope) else {
            continue;
        };
        let shown = shown_scope(&scope);
        match Machine::new(gate.store(), &mount).abort(found) {
            Ok(()) => {
                tracing::info!(scope = %shown, "a transaction of several hosts was aborted and is undone")
            }
            Err(TransactionError::Abort(AbortError::Stopping { hosts })) => {
                tracing::debug!(scope = %shown, ?hosts, "waiting for hosts to stop");
            }
            Err(error) => tracing::warn!(%error, scope = %shown, "a transaction cannot be undone"),
        }
    }
}
