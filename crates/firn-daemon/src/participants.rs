//! Several hosts that commit together: what firnd does about the others.
//!
//! The hosts vote in the backing (`firn_transact`); here they are waited for, and here what processes read and
//! wrote goes from the gate's log to the transaction.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use firn_backing::is_below;
use firn_config::{Kind, Options, Participants};
use firn_conflict::{Report, Used};
use firn_transact::{AbortError, BeginError, Expected, Members, TransactionError, Vote, VoteError};

use crate::error::AttachError;
use crate::gate::{ScopeRoot, TransactionGate};
use crate::host_lease::Liveness;
use crate::transactions::Means;

/// The others are looked for as often at first, and ever less often down to the last.
const LOOK_FIRST: Duration = Duration::from_millis(2);
const LOOK_LAST: Duration = Duration::from_millis(200);
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

/// What this host is called among others: as the option says, or like the host.
pub(crate) fn host_name(options: &Options) -> Result<String, AttachError> {
    if let Some(host) = &options.host {
        return Ok(host.clone());
    }
    let host = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    Kind::Host
        .parse(&host)
        .map_err(|why| AttachError::HostName { why })?;
    Ok(host)
}

/// A transaction was begun: from now on counts what processes use.
pub(crate) fn begun(gate: &TransactionGate, path: &[u8]) {
    if is_tested(gate) {
        gate.accesses().take(|found| is_below(found, path));
        gate.accesses().switch(true);
    }
}

/// Whether accesses of processes may conflict with those of other hosts.
fn is_tested(gate: &TransactionGate) -> bool {
    gate.store().members().is_some() && gate.store().mode() == firn_transact::Mode::Buffer
}

/// It was prepared: what processes used until now is part of it.
pub(crate) fn prepared(
    gate: &TransactionGate,
    root: &ScopeRoot,
    path: &[u8],
) -> Result<(), TransactionError> {
    match gate.store().members() {
        Some(_) => {
            let used = by_process(gate.accesses().take(|found| is_below(found, path)));
            Ok(gate.store().note_accesses(root, used)?)
        }
        None => Ok(()),
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
        gate.accesses().take(|found| is_below(found, path));
        let transactions = gate.store().open_transactions();
        let are_counted = transactions.iter().any(|one| one.is_undecided());
        gate.accesses().switch(are_counted);
    }
}

/// Tells the others, waits for them and for the verdict. Where they do not agree or do not come the transaction is
/// open again.
pub(crate) fn vote(
    gate: &TransactionGate,
    path: &[u8],
    id: u64,
    patience: Duration,
) -> Result<(), TransactionError> {
    if gate.store().members().is_none() {
        return Ok(());
    }
    let result = wait_for_verdict(gate, path, id, Instant::now() + patience);
    if result.is_err() {
        // Not in a turn: it would wait for programs whose changes wait for this.
        let host = gate.scope_at(path)?;
        match gate.store().reopen(&host, id) {
            Ok(used) => gate.accesses().put_back(used),
            Err(error) => tracing::debug!(%error, id, "the transaction stays prepared"),
        }
    }
    result
}

fn wait_for_verdict(
    gate: &TransactionGate,
    path: &[u8],
    id: u64,
    deadline: Instant,
) -> Result<(), TransactionError> {
    let store = gate.store();
    patiently(deadline, || {
        let scope = gate.scope_at(path)?;
        Ok(store.publish_accesses(&scope, id)?)
    })?;
    let mut pause = Pause::default();
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
            Vote::Waiting { .. } => pause.rest(),
        }
    }
}

/// Waits until the other hosts have carried out a commit as well; those that have not after a while, or have no
/// firnd that could.
pub(crate) fn await_other_hosts(
    gate: &TransactionGate,
    path: &[u8],
    id: u64,
    means: &Means<'_>,
) -> Result<Vec<String>, TransactionError> {
    let store = gate.store();
    let deadline = Instant::now() + means.patience;
    let Some(members) = store.members() else {
        return Ok(Vec::new());
    };
    let liveness = Liveness::over(means.backing, members)?;
    let mut pause = Pause::default();
    loop {
        let behind = store.hosts_behind(id, path)?;
        if Instant::now() >= deadline || !behind.iter().any(|host| liveness.is_living(host)) {
            return Ok(behind);
        }
        pause.rest();
    }
}

/// Tries again as long as other hosts have something to end.
pub(crate) fn patiently<T>(
    deadline: Instant,
    mut attempt: impl FnMut() -> Result<T, TransactionError>,
) -> Result<T, TransactionError> {
    let mut pause = Pause::default();
    loop {
        match attempt() {
            Err(
                TransactionError::Vote(VoteError::LastVoteNotOver { .. })
                | TransactionError::Begin(BeginError::NotOver { .. })
                | TransactionError::Abort(AbortError::Stopping { .. }),
            ) if Instant::now() < deadline => {
                pause.rest();
            }
            done => return done,
        }
    }
}

/// Ever longer.
pub(crate) struct Pause(Duration);

impl Default for Pause {
    fn default() -> Self {
        Self(LOOK_FIRST)
    }
}

impl Pause {
    pub(crate) fn rest(&mut self) {
        std::thread::sleep(self.0);
        self.0 = (self.0 * 3 / 2).min(LOOK_LAST);
    }
}

/// Conflicts in words.
pub(crate) fn told(report: &Report, scope: &str) -> String {
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
