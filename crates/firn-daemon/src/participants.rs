//! Several hosts that commit together: what firnd does about the others.
//!
//! The hosts vote in the backing (`firn_transact`); here they are waited for, and here what processes read and
//! wrote goes from the gate's log to the transaction.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use firn_backing::backoff::Backoff;
use firn_backing::is_below;
use firn_config::{Options, Participants};
use firn_conflict::{Report, Used};
use firn_transact::{
    AbortError, BeginError, Expected, Found, Members, Prepared, TransactionError, Vote, VoteError,
};

use crate::error::AttachError;
use crate::gate::TransactionGate;
use crate::host_lease::Liveness;
use crate::host_name::host_name;
use crate::store::LoggableStore;
use crate::transactions::RequestContext;

/// Between looks for the other hosts.
pub(crate) const LOOK_AGAIN: Backoff =
    Backoff::new(Duration::from_millis(2), Duration::from_millis(200));
/// Conflicts in an error message; all that were found are in the verdict.
const TOLD_MAX: usize = 20;

/// The hosts that commit together, as the options say; `None`: this one alone.
pub(crate) fn members(options: &Options) -> Result<Option<Members>, AttachError> {
    let expected = match &options.participants {
        Participants::Off => return Ok(None),
        Participants::Count(count) => Expected::Count(*count as usize),
        Participants::Hosts(hosts) => Expected::Hosts(hosts.clone()),
    };
    let host = host_name(options)?;
    if let Expected::Hosts(hosts) = &expected
        && !hosts.contains(&host)
    {
        return Err(AttachError::NoParticipant {
            host,
            participants: hosts.join(", "),
        });
    }
    Ok(Some(Members { host, expected }))
}

/// A transaction was begun: from now on counts what processes use.
pub(crate) fn begun(gate: &TransactionGate, path: &[u8]) {
    if is_tested(gate) {
        gate.switch_accesses(|accesses| {
            accesses.take(|found| is_below(found, path));
            accesses.switch(true);
        });
    }
}

/// Whether accesses of processes may conflict with those of other hosts.
fn is_tested(gate: &TransactionGate) -> bool {
    gate.store().members().is_some() && gate.store().mode() == firn_transact::Mode::Buffer
}

/// What processes used until a transaction was prepared is part of it.
pub(crate) fn note_accesses(
    gate: &TransactionGate,
    prepared: &Prepared<'_, LoggableStore>,
    path: &[u8],
) {
    if gate.store().members().is_some() {
        let used = gate.accesses().take(|found| is_below(found, path));
        prepared.note_accesses(by_process(used));
    }
}

/// The kernel tells which thread asks. Of threads that have ended their own numbers are left.
fn by_process(mut used: Vec<Used>) -> Vec<Used> {
    let mut processes = HashMap::new();
    for file in &mut used {
        for (thread, accesses) in std::mem::take(&mut file.processes) {
            let process = *processes
                .entry(thread)
                .or_insert_with(|| process_of(thread).unwrap_or(thread));
            let known = file.processes.entry(process).or_default();
            known.read.extend(&accesses.read);
            known.written.extend(&accesses.written);
        }
    }
    used
}

fn process_of(thread: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    status
        .lines()
        .find_map(|line| line.strip_prefix("Tgid:"))?
        .trim()
        .parse()
        .ok()
}

/// It is over.
pub(crate) fn ended(gate: &TransactionGate, path: &[u8]) {
    if is_tested(gate) {
        gate.switch_accesses(|accesses| {
            accesses.take(|found| is_below(found, path));
            let transactions = gate.store().open_transactions();
            let is_undecided =
                |found: &Found<'_, LoggableStore>| !matches!(found, Found::Decided(_));
            accesses.switch(transactions.iter().any(is_undecided));
        });
    }
}

/// Tells the others, waits for them and for the verdict. Where they do not agree or do not come the transaction is
/// open again.
pub(crate) fn vote(
    gate: &TransactionGate,
    prepared: &Prepared<'_, LoggableStore>,
    path: &[u8],
    patience: Duration,
) -> Result<(), TransactionError> {
    if gate.store().members().is_none() {
        return Ok(());
    }
    let result = wait_for_verdict(gate, prepared, path, Instant::now() + patience);
    if result.is_err() {
        // The scope is not quiesced: that would wait for programs whose changes wait for this.
        match prepared.reopen() {
            Ok(used) => gate.accesses().put_back(used),
            Err(error) => {
                tracing::debug!(%error, id = prepared.id(), "the transaction stays prepared");
            }
        }
    }
    result
}

fn wait_for_verdict(
    gate: &TransactionGate,
    prepared: &Prepared<'_, LoggableStore>,
    path: &[u8],
    deadline: Instant,
) -> Result<(), TransactionError> {
    let store = gate.store();
    let id = prepared.id();
    patiently(deadline, || Ok(prepared.publish_accesses()?))?;
    let mut waits = LOOK_AGAIN.start();
    loop {
        match store.poll_vote(id, path)? {
            Vote::Over(verdict) => return Ok(verdict.agreed()?),
            Vote::Waiting {
                published,
                expected,
                missing,
            } if Instant::now() >= deadline => {
                let who = if missing.is_empty() {
                    String::new()
                } else {
                    format!(", {} missing", missing.join(", "))
                };
                store.give_vote_up(
                    id,
                    path,
                    format!("only {} of {expected} hosts came{who}", published.len()),
                )?;
            }
            Vote::Waiting { .. } => waits.sleep(),
        }
    }
}

/// Waits until the other hosts have applied a commit as well. Returns those that have not after a while, or have no
/// firnd that could.
pub(crate) fn await_other_hosts(
    gate: &TransactionGate,
    path: &[u8],
    id: u64,
    context: &RequestContext<'_>,
) -> Result<Vec<String>, TransactionError> {
    let store = gate.store();
    let deadline = Instant::now() + context.patience;
    let Some(members) = store.members() else {
        return Ok(Vec::new());
    };
    let liveness = Liveness::over(context.backing, members)?;
    let mut waits = LOOK_AGAIN.start();
    loop {
        let not_applied_on = store.hosts_not_applied(id, path)?;
        if Instant::now() >= deadline || !not_applied_on.iter().any(|host| liveness.is_living(host))
        {
            return Ok(not_applied_on);
        }
        waits.sleep();
    }
}

/// Tries again as long as other hosts have something to end.
pub(crate) fn patiently<T>(
    deadline: Instant,
    mut attempt: impl FnMut() -> Result<T, TransactionError>,
) -> Result<T, TransactionError> {
    let mut waits = LOOK_AGAIN.start();
    loop {
        match attempt() {
            Err(
                TransactionError::Vote(VoteError::LastVoteNotOver { .. })
                | TransactionError::Begin(BeginError::NotOver { .. })
                | TransactionError::Abort(AbortError::Stopping { .. }),
            ) if Instant::now() < deadline => {
                waits.sleep();
            }
            done => return done,
        }
    }
}

/// Conflicts in words.
pub(crate) fn describe_conflict(report: &Report, scope: &str) -> String {
    let mut text = match report.total {
        1 => format!("{scope}: no commit, 1 conflict between hosts"),
        total => format!("{scope}: no commit, {total} conflicts between hosts"),
    };
    for conflict in report.conflicts.iter().take(TOLD_MAX) {
        text += &format!("\n  {conflict}");
    }
    let listed = report.conflicts.len().min(TOLD_MAX) as u64;
    if report.total > listed {
        text += &format!("\n  and {} more", report.total - listed);
    }
    text + "\nthe transaction is kept: firn abort drops it; programs of several hosts that use the same bytes before a \
            commit need mode=shadow"
}
