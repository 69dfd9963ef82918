//! A checkpoint that several hosts write together: the state that each host publishes about its part, and the next
//! step of each host.
//!
//! Terms
//! * *part*: the files of the checkpoint that the programs of one host wrote.
//! * *event*: the change that completes the checkpoint.
//! * *needs*: the conditions for its commit, such as a number of files.
//! * *attempt*: one try to commit all parts together. Its *verdict* is whether the parts have no conflict.
//! * *decision*: the final commit or abort. There is one for each checkpoint.
//!
//! Each host has its own machine (the state machine of commit rules), which sees the changes of that host's programs.
//! The hosts share a directory of the backing, the file system below the mount (`firn_transact::NamesBallot`). Each
//! host joins there before its first change. No host sends requests to another host.
//!
//! ```text
//!   writing ──event──► each host publishes the state of its part ──all closed, needs hold──► attempt N
//!      ▲                                                                                    │ each prepares, publishes
//!      └───────── refused: a part changed, a conflict, a host did not publish ◄─────────────┤
//!                                                                                           ▼ no conflict
//!   any host has failed or is dead ──► aborted                                          committed
//! ```
//!
//! The next step of a host is a pure function of what the host sees ([`next_step`]). A crash, a faster host or an
//! outdated listing changes only what the host sees when it reads the shared state again.
//!
//! Invariants
//! * There is one decision. It is a commit only after a verdict that the parts of all participating hosts have no
//!   conflict.
//! * A published part does not change until the verdict or the decision is known.
//! * If a host fails or dies before the decision, all hosts abort.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

#[cfg(test)]
mod model;

/// Name of the event in the text of a wait ([`JointStep::Wait`]): no host has seen it yet.
pub const EVENT: &str = "the event";

/// Number of files that a condition counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NeedCount {
    /// Files that exist now.
    pub found: usize,
    /// Files of the previous committed checkpoint.
    pub before: usize,
}

/// State of a host's part, as the host publishes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostState {
    /// Counter of changes of the part.
    pub changes: u64,
    /// Number of files that are open for writing, and of changes in progress.
    pub open: usize,
    /// Number of living writers; at least 1 for a removal, so that the hosts do not abort it.
    pub living: usize,
    /// Number of jobs that still run although their writers have ended successfully.
    pub idle_jobs: usize,
    /// Number of living writers without that minimum, for conditions that count writers.
    pub writers: usize,
    /// Number of writers of the previous checkpoint.
    pub writers_before: usize,
    /// Counts for the conditions of the rule, in their order.
    pub needs: Vec<NeedCount>,
}

/// An attempt to commit.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Attempt {
    /// Number of the attempt, counted from 1.
    pub number: u64,
    /// The participating hosts, with the change count that each had published.
    pub changes: BTreeMap<String, u64>,
    /// The hosts that have published their part.
    pub published: BTreeSet<String>,
    /// The verdict: whether the attempt may become a commit. `None` if there is no verdict yet.
    pub is_clear: Option<bool>,
    /// The attempt may not become a commit, because two hosts changed the same object.
    pub is_conflict: bool,
}

impl Attempt {
    /// Returns whether the attempt may still become a commit.
    pub fn is_open(&self) -> bool {
        self.is_clear != Some(false)
    }
}

/// The state of a joint checkpoint as a host sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JointView {
    /// Hosts that take part.
    pub joined: BTreeSet<String>,
    /// The published states of their parts.
    pub states: BTreeMap<String, HostState>,
    /// A host has seen the event.
    pub has_event: bool,
    /// The last attempt.
    pub attempt: Option<Attempt>,
    /// The decision: whether the checkpoint is committed. `None` if there is no decision yet.
    pub decision: Option<bool>,
}

/// A host's own part.
#[derive(Clone, Debug, Default)]
pub struct OwnPart {
    /// State of the part.
    pub state: HostState,
    /// The machine of this host has seen the event.
    pub has_event: bool,
    /// A writer on this host has failed.
    pub has_failed: bool,
    /// The end of all writers with success also counts as the event.
    pub ends_with_writers: bool,
    /// The attempt for which this host has prepared its part.
    pub prepared_for: Option<u64>,
    /// The attempt has lasted longer than the time for which hosts wait for each other.
    pub is_late: bool,
}

/// The next step of a host.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum JointStep {
    /// Wait for the condition that the text names.
    Wait(String),
    /// Record that the event was seen.
    PutEvent,
    /// Publish the state of the host's part.
    PutState,
    /// Begin an attempt.
    Try(Attempt),
    /// Prepare the host's part for the attempt with this number, and publish it.
    Publish(u64),
    /// Record that the attempt fails.
    GiveUp {
        /// The attempt.
        number: u64,
        /// The reason, as a text for people.
        reason: String,
    },
    /// Check whether the parts of the hosts conflict.
    Judge(Attempt),
    /// Store the decision.
    Decide {
        /// Whether it is a commit.
        commit: bool,
        /// Reason of an abort.
        reason: String,
    },
    /// Open the part again, because the attempt with this number has failed.
    Reopen(u64),
    /// Apply the commit, and end the host's part in the checkpoint.
    Apply,
    /// Undo the host's part, and end it.
    Undo,
}

/// Returns the reason why the parts of the hosts do not allow the commit; `None` if they do.
pub type Obstacle<'a> = &'a dyn Fn(&BTreeMap<String, HostState>) -> Option<String>;

/// Returns the next step of the host `me` towards the common commit or abort of one checkpoint. Changes nothing: the
/// caller takes the step, looks at the shared state again, and calls again.
///
/// A decision is carried out first. Without one, a dead host or a failed writer leads to an abort, and an open attempt
/// to commit is continued. Otherwise the host publishes the event and the state of its part, and then begins an
/// attempt.
///
/// `view` is the shared state as read by this host, and `own` its own part. `dead` are the hosts that have died.
/// `obstacle` says why the parts do not allow the commit.
pub fn next_step(
    view: &JointView,
    me: &str,
    own: &OwnPart,
    dead: &BTreeSet<String>,
    obstacle: Obstacle<'_>,
) -> JointStep {
    match view.decision {
        Some(true) => return JointStep::Apply,
        Some(false) => return JointStep::Undo,
        None => {}
    }
    if let Some(host) = view.joined.iter().find(|host| dead.contains(*host)) {
        return abort(format!("host {host} is dead"));
    }
    if own.has_failed {
        return abort(format!("a writer on {me} has failed"));
    }
    if let Some(attempt) = &view.attempt
        && (attempt.is_open() || own.prepared_for == Some(attempt.number))
    {
        return next_step_of_attempt(attempt, view, me, own);
    }
    if own.has_event && !view.has_event {
        return JointStep::PutEvent;
    }
    // Before the event a state would soon be outdated, unless no writer is left that could change it.
    let publishes_state = view.has_event || own.state.living == 0;
    if publishes_state && view.states.get(me) != Some(&own.state) {
        return JointStep::PutState;
    }
    next_step_between_attempts(view, own, obstacle)
}

/// Returns the step that decides an abort.
fn abort(reason: String) -> JointStep {
    JointStep::Decide {
        commit: false,
        reason,
    }
}

/// Returns the step that waits for the first host which has not published the state of its part. Returns `None` if all
/// hosts have.
fn wait_for_missing_state(view: &JointView) -> Option<JointStep> {
    let host = view
        .joined
        .iter()
        .find(|host| !view.states.contains_key(*host))?;
    Some(JointStep::Wait(format!("host {host}")))
}

/// Returns the next step while no attempt is open: begins an attempt if the event has come, no file is open, and the
/// parts of all hosts allow the commit.
fn next_step_between_attempts(
    view: &JointView,
    own: &OwnPart,
    obstacle: Obstacle<'_>,
) -> JointStep {
    if !view.has_event && own.state.living > 0 {
        return JointStep::Wait(EVENT.to_owned());
    }
    if let Some(wait) = wait_for_missing_state(view) {
        return wait;
    }
    let states: BTreeMap<String, HostState> = view
        .states
        .iter()
        .filter(|(host, _)| view.joined.contains(*host))
        .map(|(host, state)| (host.clone(), state.clone()))
        .collect();
    let have_writers_ended = states.values().all(|state| state.living == 0);
    let have_jobs_ended = have_writers_ended && states.values().all(|state| state.idle_jobs == 0);
    if !view.has_event {
        return if have_writers_ended && own.ends_with_writers {
            JointStep::PutEvent
        } else if have_jobs_ended {
            abort("all its writers have ended, but its event has not occurred".into())
        } else {
            JointStep::Wait(EVENT.to_owned())
        };
    }
    let open_part = states.iter().find(|(_, state)| state.open > 0);
    let obstacle = match open_part {
        Some((host, state)) => Some(format!("{} files to be closed on {host}", state.open)),
        None => obstacle(&states),
    };
    match obstacle {
        Some(obstacle) if have_jobs_ended => abort(format!(
            "all its writers have ended, but it still waits for {obstacle}"
        )),
        Some(obstacle) => JointStep::Wait(obstacle),
        None => try_to_commit(view, &states, have_jobs_ended),
    }
}

/// Returns the step that begins the next attempt to commit, unless the last attempt failed because the same parts
/// conflict.
fn try_to_commit(
    view: &JointView,
    states: &BTreeMap<String, HostState>,
    have_jobs_ended: bool,
) -> JointStep {
    let changes: BTreeMap<String, u64> = states
        .iter()
        .map(|(host, state)| (host.clone(), state.changes))
        .collect();
    let mut number = 1;
    if let Some(last) = &view.attempt {
        // A conflict remains until a part changes. A host that did not publish in time may do so in the next attempt.
        let is_same_conflict = last.is_conflict && last.changes == changes;
        if is_same_conflict && have_jobs_ended {
            return abort("all its writers have ended, but the parts of the hosts conflict".into());
        }
        if is_same_conflict {
            return JointStep::Wait("a change, because the parts of the hosts conflict".into());
        }
        number = last.number + 1;
    }
    JointStep::Try(Attempt {
        number,
        changes,
        published: BTreeSet::new(),
        is_clear: None,
        is_conflict: false,
    })
}

/// Returns the next step while an attempt is open, or after it has failed for this host.
fn next_step_of_attempt(attempt: &Attempt, view: &JointView, me: &str, own: &OwnPart) -> JointStep {
    let number = attempt.number;
    match attempt.is_clear {
        Some(true) => {
            return JointStep::Decide {
                commit: true,
                reason: String::new(),
            };
        }
        Some(false) => return JointStep::Reopen(number),
        None => {}
    }
    // Both are sorted by the names of the hosts.
    if !view.joined.iter().eq(attempt.changes.keys()) {
        let reason = "another host has begun to take part".to_owned();
        return JointStep::GiveUp { number, reason };
    }
    if !attempt.published.contains(me) {
        if attempt.changes.get(me) != Some(&own.state.changes) || own.state.open > 0 {
            let reason = format!("programs on {me} have made more changes");
            return JointStep::GiveUp { number, reason };
        }
        return JointStep::Publish(number);
    }
    let missing_host = attempt
        .changes
        .keys()
        .find(|host| !attempt.published.contains(*host));
    match missing_host {
        None => JointStep::Judge(attempt.clone()),
        Some(host) if own.is_late => JointStep::GiveUp {
            number,
            reason: format!("host {host} did not publish its part in time"),
        },
        Some(host) => JointStep::Wait(format!("host {host}")),
    }
}
