//! One checkpoint that several hosts write: what each host says of its part, and what it does next.
//!
//! Each host has a machine of its own, which sees the changes of its own programs. Hosts meet in a directory of the backing
//! (`firn_transact::NamesBallot`), where each takes part before its first change. No host asks another one.
//!
//! ```text
//!   writing ──event──► each host says how its part is ──all closed, needs hold──► attempt N
//!      ▲                                                                             │ each prepares, publishes
//!      └───────── refused: one had changed, a conflict, one did not come ◄───────────┤
//!                                                                                    ▼ all go together
//!   any host has failed or is dead ──► aborted                                    committed
//! ```
//!
//! What a host does next is a pure function of what it sees ([`next_step`]): a crash, a faster host or an old listing only changes
//! what the next look says.
//!
//! Invariants
//! * There is one decision. It is a commit only after a verdict that the parts of all hosts that take part go together.
//! * A part that is published does not change until the verdict or the decision is known.
//! * A host that fails or dies before the decision ends in an abort for all.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

#[cfg(test)]
mod model;

/// What hosts wait for that have seen no event.
pub const EVENT: &str = "the event";

/// Files that a need counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NeedCount {
    /// There now.
    pub found: usize,
    /// In the checkpoint that was committed before.
    pub before: usize,
}

/// What a host says of its part.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostState {
    /// Grows with each change of the part.
    pub changes: u64,
    /// Files that are open for writing, and changes that are under way.
    pub open: usize,
    /// Writers that live.
    pub living: usize,
    /// Jobs that go on, of writers that have ended well.
    pub idle_jobs: usize,
    /// Writers that a need counts: those that live.
    pub writers: usize,
    /// Those of the checkpoint before.
    pub writers_before: usize,
    /// One for each need of the rule.
    pub needs: Vec<NeedCount>,
}

/// An attempt to commit.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Attempt {
    /// From 1.
    pub number: u64,
    /// The hosts that take part, and what they had said.
    pub changes: BTreeMap<String, u64>,
    /// Those that have published their part.
    pub published: BTreeSet<String>,
    /// Whether it may become a commit; none: that is open.
    pub is_clear: Option<bool>,
    /// It may not, because hosts changed the same.
    pub is_conflict: bool,
}

impl Attempt {
    /// It may still become a commit.
    pub fn is_open(&self) -> bool {
        self.is_clear != Some(false)
    }
}

/// What a host sees.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// Hosts that take part.
    pub joined: BTreeSet<String>,
    /// What they say of their parts.
    pub states: BTreeMap<String, HostState>,
    /// One has seen the event.
    pub has_event: bool,
    /// The last attempt.
    pub attempt: Option<Attempt>,
    /// Whether it is committed.
    pub decision: Option<bool>,
}

/// A host's own part.
#[derive(Clone, Debug, Default)]
pub struct OwnPart {
    /// How it is.
    pub state: HostState,
    /// Its machine has seen the event.
    pub has_event: bool,
    /// One of its writers has failed.
    pub has_failed: bool,
    /// The event has come, too, when all writers have ended well.
    pub ends_with_writers: bool,
    /// The attempt that it is prepared for.
    pub prepared_for: Option<u64>,
    /// The attempt has stood for longer than other hosts are waited for.
    pub is_late: bool,
}

/// What a host does next.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Nothing, as this is not there yet.
    Wait(String),
    /// Says that the event has come.
    PutEvent,
    /// Says how its part is.
    PutState,
    /// Begins an attempt.
    Try(Attempt),
    /// Prepares its part, and publishes it.
    Publish(u64),
    /// Says that there is no commit in this attempt.
    GiveUp {
        /// The attempt.
        number: u64,
        /// Why.
        why: String,
    },
    /// Tests whether the parts go together.
    Judge(Attempt),
    /// Decides.
    Decide {
        /// Whether it is a commit.
        commit: bool,
        /// Why not.
        why: String,
    },
    /// Opens its part again: this attempt has failed.
    Reopen(u64),
    /// Carries the commit out, and leaves.
    Apply,
    /// Drops its part, and leaves.
    Undo,
}

/// What of the hosts' parts keeps the checkpoint from its commit; none: nothing.
pub type Obstacle<'a> = &'a dyn Fn(&BTreeMap<String, HostState>) -> Option<String>;

/// What host `me` does next. `dead`: hosts that are gone.
pub fn next_step(
    look: &Look,
    me: &str,
    own: &OwnPart,
    dead: &BTreeSet<String>,
    obstacle: Obstacle<'_>,
) -> Step {
    match look.decision {
        Some(true) => return Step::Apply,
        Some(false) => return Step::Undo,
        None => {}
    }
    if let Some(host) = look.joined.iter().find(|host| dead.contains(*host)) {
        return abort(format!("host {host} is dead"));
    }
    if own.has_failed {
        return abort(format!("a writer on {me} has failed"));
    }
    if let Some(attempt) = &look.attempt
        && (attempt.is_open() || own.prepared_for == Some(attempt.number))
    {
        return next_of_attempt(attempt, look, me, own);
    }
    if own.has_event && !look.has_event {
        return Step::PutEvent;
    }
    let says_state = look.has_event || own.state.living == 0;
    if says_state && look.states.get(me) != Some(&own.state) {
        return Step::PutState;
    }
    next_of_open(look, own, obstacle)
}

fn abort(why: String) -> Step {
    Step::Decide { commit: false, why }
}

/// Hosts of which it is not known how their part is.
fn unknown(look: &Look) -> Option<Step> {
    let mut unknown = look.joined.iter();
    let host = unknown.find(|host| !look.states.contains_key(*host))?;
    Some(Step::Wait(format!("host {host}")))
}

fn next_of_open(look: &Look, own: &OwnPart, obstacle: Obstacle<'_>) -> Step {
    if !look.has_event && own.state.living > 0 {
        return Step::Wait(EVENT.to_owned());
    }
    if let Some(wait) = unknown(look) {
        return wait;
    }
    let joined = look.states.iter();
    let states: BTreeMap<String, HostState> = joined
        .filter(|(host, _)| look.joined.contains(*host))
        .map(|(host, state)| (host.clone(), state.clone()))
        .collect();
    let have_ended = states.values().all(|state| state.living == 0);
    let are_gone = have_ended && states.values().all(|state| state.idle_jobs == 0);
    if !look.has_event {
        return if have_ended && own.ends_with_writers {
            Step::PutEvent
        } else if !are_gone {
            Step::Wait(EVENT.to_owned())
        } else {
            abort("all its writers are gone, and its event has not come".into())
        };
    }
    let is_busy = states.iter().find(|(_, state)| state.open > 0);
    let obstacle = match is_busy {
        Some((host, state)) => Some(format!("{} files to be closed on {host}", state.open)),
        None => obstacle(&states),
    };
    let changes: BTreeMap<String, u64> = states
        .iter()
        .map(|(host, state)| (host.clone(), state.changes))
        .collect();
    let last = look.attempt.as_ref();
    // A conflict stays one until something changes; a host that did not come may come the next time.
    let is_tried = last.is_some_and(|last| last.is_conflict && last.changes == changes);
    match obstacle {
        Some(what) if are_gone => {
            abort(format!("all its writers are gone, and it waits for {what}"))
        }
        Some(what) => Step::Wait(what),
        None if is_tried && are_gone => {
            abort("all its writers are gone, and the hosts do not agree".into())
        }
        None if is_tried => {
            Step::Wait("a change: the parts of the hosts do not go together".into())
        }
        None => Step::Try(Attempt {
            number: last.map_or(1, |last| last.number + 1),
            changes,
            published: BTreeSet::new(),
            is_clear: None,
            is_conflict: false,
        }),
    }
}

fn next_of_attempt(attempt: &Attempt, look: &Look, me: &str, own: &OwnPart) -> Step {
    let number = attempt.number;
    match attempt.is_clear {
        Some(true) => {
            return Step::Decide {
                commit: true,
                why: String::new(),
            };
        }
        Some(false) => return Step::Reopen(number),
        None => {}
    }
    let hosts: BTreeSet<&String> = attempt.changes.keys().collect();
    if look.joined.iter().collect::<BTreeSet<_>>() != hosts {
        let why = "another host has begun to take part".to_owned();
        return Step::GiveUp { number, why };
    }
    if !attempt.published.contains(me) {
        if attempt.changes.get(me) != Some(&own.state.changes) || own.state.open > 0 {
            let why = format!("programs on {me} have changed more");
            return Step::GiveUp { number, why };
        }
        return Step::Publish(number);
    }
    let missing = attempt
        .changes
        .keys()
        .find(|host| !attempt.published.contains(*host));
    match missing {
        None => Step::Judge(attempt.clone()),
        Some(host) if own.is_late => Step::GiveUp {
            number,
            why: format!("host {host} did not come"),
        },
        Some(host) => Step::Wait(format!("host {host}")),
    }
}
