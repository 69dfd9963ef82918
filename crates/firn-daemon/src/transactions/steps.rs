//! Counts the steps of this mount's transactions (begin, prepare, decision and so on) for the status, and logs each
//! step with `log-level=debug`. A decision and an undo are also events of the mount.

use std::collections::BTreeMap;

use firn_format::tally::Tally;
use firn_protocol::events::TARGET;
use firn_transact::machine::Event;

use crate::gate::TransactionGate;
use crate::store::shown_scope;

/// The counts of steps, in the order of [`step_index`].
static STEPS: Tally<8> = Tally::new([
    "begin", "quiesce", "drained", "prepared", "decided", "applied", "ended", "undone",
]);

/// Returns the counts since the start of firnd, which serves one mount.
pub(crate) fn steps() -> BTreeMap<String, u64> {
    STEPS.figures()
}

/// Returns the index of a step in [`STEPS`].
fn step_index(event: Event) -> usize {
    match event {
        Event::Begin => 0,
        Event::Quiesce => 1,
        Event::Drained => 2,
        Event::Prepared => 3,
        Event::Decided => 4,
        Event::Applied => 5,
        Event::Ended => 6,
        Event::Undone => 7,
    }
}

/// Logs an event of the mount if a step decides a transaction (it is committed) or undoes it (it is aborted). Other
/// steps are not logged here.
fn log_end_of_transaction(event: Event, scope: &str, id: Option<u64>) {
    match (event, id) {
        (Event::Decided, id) => {
            let id = id.unwrap_or_default();
            tracing::info!(target: TARGET, kind = "committed", scope, id, "a transaction was decided");
        }
        (Event::Undone, Some(id)) => {
            tracing::info!(target: TARGET, kind = "aborted", scope, id, "a transaction was undone");
        }
        (Event::Undone, None) => {
            tracing::info!(target: TARGET, kind = "aborted", scope, "a transaction was undone");
        }
        _ => {}
    }
}

/// Records that a transaction in `scope` was undone, because it could not continue without the firnd that died.
pub(crate) fn record_undone(gate: &TransactionGate, scope: &[u8]) {
    let shown = shown_scope(scope);
    tracing::warn!(scope = %shown, "firnd died while a transaction was open: it is aborted, and its programs get errors");
    record_step(gate, Event::Undone, scope, None);
}

/// Counts a step of the transaction in `scope`, the path that it covers, and logs it with `log-level=debug`. `id` is
/// the number of a prepared transaction.
pub(super) fn record_step(gate: &TransactionGate, event: Event, scope: &[u8], id: Option<u64>) {
    let index = step_index(event);
    STEPS.count(index);
    // Without other hosts, this host has no name in the log.
    let host = match gate.store().lower.members() {
        Some(members) => members.host.clone(),
        None => String::new(),
    };
    let shown = shown_scope(scope);
    log_end_of_transaction(event, &shown, id);
    tracing::debug!(step = STEPS.name(index), scope = %shown, ?id, host, "transaction");
}
