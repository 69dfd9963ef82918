//! One decision of several hosts, from the first that takes part to the removal of its directory.
//!
//! ```text
//! in-HOST        the host takes part; what it brings
//! decision       JSON: what was decided; put once
//! out-HOST       the host changes nothing any more
//! claim-UNIT     JSON: the host that does this unit of work; put once
//! done-UNIT      the unit is done, durably
//! left-HOST      the host has ended its part
//! remover        JSON: the host that removes the directory; put once
//! ```
//!
//! ```text
//! Open ──join──► Open ──decide──► Decided ──stop──► work, unit by unit ──leave──► all left ──► retired
//! ```
//!
//! What a host does next is a pure function of what it sees ([`next`], [`next_join`]). [`Ballot`] looks, does one such
//! action, and looks again. A crash, a faster host or an old listing only changes what the next look says, so recovery
//! is the same loop.
//!
//! Invariants (`ballot/model.rs` checks them in all interleavings of three hosts)
//! * There is one decision, for ever; no unit of work begins before it.
//! * A host that takes part and then looks is seen by each host that decides and then looks, or sees the decision.
//! * With [`Plan::stops_first`], no host that takes part changes anything once a unit of work has begun.
//! * Two hosts never work at the same time, and no unit is begun again after it is done.
//! * The directory goes when every host that took part has left and every unit is done.
//!
//! Relies on [`VoteDir`], and on a host that has changed the directory listing it anew: what another host did before
//! that change is in the listing.

use std::collections::{BTreeMap, BTreeSet};

use firn_backing::{Backing, Errno};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::own::OwnError;
use crate::vote::VoteDir;

#[cfg(test)]
mod model;

/// Version of the names and contents of its files: hosts with different ones do not understand each other.
pub const BALLOT_VERSION: u32 = 1;

const IN: &str = "in-";
const DECISION: &str = "decision";
const OUT: &str = "out-";
const CLAIM: &str = "claim-";
const DONE: &str = "done-";
const LEFT: &str = "left-";
const REMOVER: &str = "remover";

/// What hosts do after a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Work begins when all hosts that take part have stopped.
    pub stops_first: bool,
    /// Units of work in their order. One host does each.
    pub units: &'static [&'static str],
}

/// What a decision is about.
pub trait Protocol {
    /// What is decided.
    type Decision: Serialize + DeserializeOwned;

    /// What follows from a decision.
    fn plan(&self, decision: &Self::Decision) -> Plan;
}

/// What a host sees of a ballot. `H` names a host, `D` is a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View<H: Ord, D> {
    /// Hosts that take part.
    pub joined: BTreeSet<H>,
    /// What was decided.
    pub decision: Option<D>,
    /// Hosts that change nothing any more.
    pub stopped: BTreeSet<H>,
    /// The host that does a unit of work.
    pub claimed: BTreeMap<String, H>,
    /// Units that are done.
    pub done: BTreeSet<String>,
    /// Hosts that have ended their part.
    pub left: BTreeSet<H>,
    /// The host that removes the directory.
    pub remover: Option<H>,
}

impl<H: Ord + Clone, D> View<H, D> {
    /// Whether a host takes part and has not ended its part.
    pub fn is_taking_part(&self, host: &H) -> bool {
        self.joined.contains(host) && !self.left.contains(host)
    }

    /// Hosts that take part and have not stopped.
    pub fn running(&self) -> Vec<H> {
        self.joined.difference(&self.stopped).cloned().collect()
    }

    /// Hosts that take part and have not ended their part.
    pub fn remaining(&self) -> Vec<H> {
        self.joined.difference(&self.left).cloned().collect()
    }
}

/// What a host does next that wants to take part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum JoinStep {
    /// Says that it takes part, and looks again.
    Put,
    /// Takes that back: the ballot was over before it came.
    Withdraw,
    /// Nothing: it takes part.
    Joined,
    /// Nothing: the ballot is over.
    Refused,
}

/// The next step of a host that wants to take part. `has_put`: it has said so; `is_current`: the directory has its name.
pub fn next_join<H: Ord, D>(view: &View<H, D>, has_put: bool, is_current: bool) -> JoinStep {
    match (view.decision.is_none() && is_current, has_put) {
        (true, false) => JoinStep::Put,
        (true, true) => JoinStep::Joined,
        (false, true) => JoinStep::Withdraw,
        (false, false) => JoinStep::Refused,
    }
}

/// What a host does next after it has taken part. Doing it twice does no harm.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Action<H> {
    /// Says that it changes nothing any more.
    Stop,
    /// Claims a unit of work.
    Claim(&'static str),
    /// Does a unit of work, and says so.
    Work(&'static str),
    /// Ends its own part, and says so.
    Leave,
    /// Claims the removal.
    ClaimRemoval,
    /// Removes the directory.
    Retire,
    /// Looks again later.
    Wait(Waiting<H>),
}

/// What a host waits for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Waiting<H> {
    /// A decision.
    Decision,
    /// These hosts have not stopped.
    Stop(Vec<H>),
    /// This host does a unit of work.
    Work(H),
    /// These hosts have not left.
    Leave(Vec<H>),
    /// Work that a host that takes part has to do.
    Unfinished,
    /// This host removes the directory.
    Removal(H),
}

impl Waiting<String> {
    /// The hosts that are waited for.
    pub fn hosts(self) -> Vec<String> {
        match self {
            Self::Decision | Self::Unfinished => Vec::new(),
            Self::Stop(hosts) | Self::Leave(hosts) => hosts,
            Self::Work(host) | Self::Removal(host) => vec![host],
        }
    }
}

/// The next action of the host `me`.
pub fn next<H: Ord + Clone, P: Protocol>(
    view: &View<H, P::Decision>,
    me: &H,
    protocol: &P,
) -> Action<H> {
    let Some(decision) = &view.decision else {
        return Action::Wait(Waiting::Decision);
    };
    let plan = protocol.plan(decision);
    if view.is_taking_part(me) {
        return next_of_member(view, me, plan);
    }
    let remaining = view.remaining();
    if !remaining.is_empty() {
        return Action::Wait(Waiting::Leave(remaining));
    }
    if first_undone(view, plan).is_some() {
        return Action::Wait(Waiting::Unfinished);
    }
    match &view.remover {
        None => Action::ClaimRemoval,
        Some(remover) if remover == me => Action::Retire,
        Some(remover) => Action::Wait(Waiting::Removal(remover.clone())),
    }
}

fn next_of_member<H: Ord + Clone, D>(view: &View<H, D>, me: &H, plan: Plan) -> Action<H> {
    if plan.stops_first && !view.stopped.contains(me) {
        return Action::Stop;
    }
    let Some(unit) = first_undone(view, plan) else {
        return Action::Leave;
    };
    let running = view.running();
    if plan.stops_first && !running.is_empty() {
        return Action::Wait(Waiting::Stop(running));
    }
    match view.claimed.get(unit) {
        None => Action::Claim(unit),
        Some(host) if host == me => Action::Work(unit),
        Some(host) => Action::Wait(Waiting::Work(host.clone())),
    }
}

fn first_undone<H: Ord, D>(view: &View<H, D>, plan: Plan) -> Option<&'static str> {
    plan.units
        .iter()
        .copied()
        .find(|unit| !view.done.contains(*unit))
}

/// Result of an attempt to take part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Joined {
    /// The host takes part.
    Yes,
    /// The ballot was over.
    Over,
}

/// How far a host has come with what was decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The host may end its own part, and leave.
    Done,
    /// Other hosts come first.
    Waits(Waiting<String>),
}

/// One ballot, as one of the hosts sees it.
pub struct Ballot<'a, B: Backing, P: Protocol> {
    dir: VoteDir<'a, B>,
    protocol: P,
}

impl<'a, B: Backing, P: Protocol> Ballot<'a, B, P> {
    /// The ballot that has this directory.
    pub fn in_dir(dir: VoteDir<'a, B>, protocol: P) -> Self {
        Self { dir, protocol }
    }

    /// Its directory.
    pub fn dir(&self) -> &VoteDir<'a, B> {
        &self.dir
    }

    /// What was decided, if anything was.
    pub fn decision(&self) -> Result<Option<P::Decision>, Errno> {
        self.dir.read_json(DECISION)
    }

    /// Hosts that take part.
    pub fn joined(&self) -> Result<Vec<String>, Errno> {
        self.dir.hosts(IN)
    }

    /// Whether this host takes part and has not ended its part.
    pub fn is_taking_part(&self) -> Result<bool, Errno> {
        let names = self.dir.names()?;
        let has = |prefix| names.contains(&self.dir.own_file(prefix));
        Ok(has(IN) && !has(LEFT))
    }

    /// Looks at all of it.
    pub fn view(&self) -> Result<View<String, P::Decision>, Errno> {
        let names = self.dir.names()?;
        let with = |prefix: &str| -> BTreeSet<String> {
            let found = names.iter().filter_map(|name| name.strip_prefix(prefix));
            found.map(Into::into).collect()
        };
        let mut claimed = BTreeMap::new();
        for unit in with(CLAIM) {
            if let Some(host) = self.dir.read_json(&format!("{CLAIM}{unit}"))? {
                claimed.insert(unit, host);
            }
        }
        Ok(View {
            joined: with(IN),
            decision: self.decision()?,
            stopped: with(OUT),
            claimed,
            done: with(DONE),
            left: with(LEFT),
            remover: self.dir.read_json(REMOVER)?,
        })
    }

    /// What a host brought that takes part.
    pub fn brought_by(&self, host: &str) -> Result<Option<Vec<u8>>, OwnError> {
        self.dir.read(&format!("{IN}{host}"))
    }

    /// Takes part and brings `bytes`, unless the ballot is over or is removed meanwhile.
    pub fn join(&self, bytes: &[u8]) -> Result<Joined, Errno> {
        let mut has_put = false;
        loop {
            match next_join(&self.view()?, has_put, self.dir.is_current()?) {
                JoinStep::Put => {
                    self.dir.put_once(&self.dir.own_file(IN), bytes)?;
                    has_put = true;
                }
                JoinStep::Withdraw => {
                    self.withdraw()?;
                    return Ok(Joined::Over);
                }
                JoinStep::Joined => return Ok(Joined::Yes),
                JoinStep::Refused => return Ok(Joined::Over),
            }
        }
    }

    /// Takes part no more. Only for a host that has changed nothing.
    pub fn withdraw(&self) -> Result<(), Errno> {
        self.dir.withdraw(IN)
    }

    /// Decides, if nothing was decided yet. Returns the decision that counts; None if the directory is gone.
    pub fn decide(&self, decision: &P::Decision) -> Result<Option<P::Decision>, Errno> {
        self.dir.put_json(DECISION, decision)?;
        self.decision()
    }

    /// Carries a decision out as far as other hosts let this one. `work` does a unit, and may be asked for one that an
    /// earlier life of this host has begun.
    pub fn carry_out<E: From<Errno>>(
        &self,
        mut work: impl FnMut(&'static str) -> Result<(), E>,
    ) -> Result<Progress, E> {
        loop {
            match self.next()? {
                Action::Stop => self.stop()?,
                Action::Claim(unit) => {
                    self.claim(&format!("{CLAIM}{unit}"))?;
                }
                Action::Work(unit) => {
                    work(unit)?;
                    self.dir.put_once(&format!("{DONE}{unit}"), b"")?;
                }
                Action::Leave | Action::ClaimRemoval | Action::Retire => return Ok(Progress::Done),
                Action::Wait(waiting) => return Ok(Progress::Waits(waiting)),
            }
        }
    }

    /// Says that this host has ended its part, and removes the directory if it is the last one.
    pub fn leave(&self) -> Result<(), Errno> {
        self.dir.put_once(&self.dir.own_file(LEFT), b"")?;
        self.remove_if_over()
    }

    /// Says that this host, which has changed nothing, leaves whatever was decided. Others do the work.
    pub fn leave_unchanged(&self) -> Result<(), Errno> {
        self.stop()?;
        self.leave()
    }

    /// Removes the directory if all hosts have left, or if nothing is in it. Another host may be doing so.
    pub fn remove_if_over(&self) -> Result<(), Errno> {
        match self.remove() {
            Err(Errno::NOENT | Errno::STALE) => Ok(()),
            removed => removed,
        }
    }

    fn remove(&self) -> Result<(), Errno> {
        loop {
            match self.next()? {
                Action::ClaimRemoval => self.claim(REMOVER)?,
                // The next ballot may have the name already.
                Action::Retire if self.dir.is_current()? => return self.dir.retire(),
                Action::Wait(Waiting::Decision) => return self.dir.remove_empty(),
                _ => return Ok(()),
            }
        }
    }

    fn next(&self) -> Result<Action<String>, Errno> {
        let me = self.dir.host().to_owned();
        Ok(next(&self.view()?, &me, &self.protocol))
    }

    fn stop(&self) -> Result<(), Errno> {
        self.dir.put_once(&self.dir.own_file(OUT), b"").map(drop)
    }

    fn claim(&self, name: &str) -> Result<(), Errno> {
        self.dir.put_json(name, &self.dir.host()).map(drop)
    }
}
