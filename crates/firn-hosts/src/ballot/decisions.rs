//! What a host does next at a ballot: pure functions of what it sees, without a path or a call of a backing.
//!
//! `ballot/model.rs` goes through all of what may come of them.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{CLAIM, DONE, WHOLE};

/// How long a host takes part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// Until it says that it has left, also after its death. What it says and claims is durable.
    Kept,
    /// While it lives. What it says means nothing after a power loss, and what it claims is locked.
    Living,
}

/// A part of the work after a decision, which one host does.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Unit {
    /// Other hosts may do others of the same stage at the same time.
    Part(String),
    /// Excludes all other work.
    Whole(&'static str),
}

impl Unit {
    /// Its name.
    pub fn name(&self) -> &str {
        match self {
            Self::Part(name) => name,
            Self::Whole(name) => name,
        }
    }

    /// What is claimed to do it.
    pub(super) fn claim(&self) -> String {
        match self {
            Self::Part(name) => format!("{CLAIM}{name}"),
            Self::Whole(_) => WHOLE.to_owned(),
        }
    }

    /// What says that it is done.
    pub fn done_file(&self) -> String {
        format!("{DONE}{}", self.name())
    }
}

/// What hosts do after a decision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Work begins when all hosts that take part have stopped.
    pub stops_first: bool,
    /// Units of work, in stages: those of one stage in any order, when all of the earlier ones are done.
    pub stages: Vec<Vec<Unit>>,
}

/// What a decision is about.
pub trait Protocol {
    /// What is decided.
    type Decision: Serialize + DeserializeOwned;

    /// How long a host takes part.
    const PRESENCE: Presence = Presence::Kept;

    /// What follows from a decision.
    fn plan(&self, decision: &Self::Decision) -> Plan;
}

/// What a host sees of a ballot. `H` names a host, `D` is a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View<H: Ord, D> {
    /// Hosts that take part.
    pub joined: BTreeSet<H>,
    /// New participants are refused.
    pub is_closing: bool,
    /// What was decided.
    pub decision: Option<D>,
    /// Hosts that change nothing any more.
    pub stopped: BTreeSet<H>,
    /// What is claimed, and by whom.
    pub claimed: BTreeMap<String, Claimant<H>>,
    /// Units that are done.
    pub done: BTreeSet<String>,
    /// Hosts that have ended their part.
    pub left: BTreeSet<H>,
}

/// The host that has claimed a unit.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Claimant<H> {
    /// This host.
    Host(H),
    /// An unknown process that has it locked.
    Unknown,
}

impl<H: Ord + Clone, D> View<H, D> {
    /// Whether a host that comes now may take part.
    pub fn is_open(&self) -> bool {
        self.decision.is_none() && !self.is_closing
    }

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

    /// The units of the first stage that is not done; none if all is.
    fn undone<'p>(&self, plan: &'p Plan) -> Vec<&'p Unit> {
        let undone = |stage: &'p Vec<Unit>| -> Vec<&'p Unit> {
            let units = stage.iter();
            units
                .filter(|unit| !self.done.contains(unit.name()))
                .collect()
        };
        let mut stages = plan.stages.iter().map(undone);
        stages.find(|units| !units.is_empty()).unwrap_or_default()
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

/// The next step of a host that wants to take part. `is_open`: the ballot is neither decided nor closed, and the
/// directory has its name; `has_put`: the host has said that it takes part.
pub fn next_join(is_open: bool, has_put: bool) -> JoinStep {
    match (is_open, has_put) {
        (true, false) => JoinStep::Put,
        (true, true) => JoinStep::Joined,
        (false, true) => JoinStep::Withdraw,
        (false, false) => JoinStep::Refused,
    }
}

/// The next step of a host that wants a decision about a ballot without participants.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DecisionStep<H> {
    /// Puts `closing`, and looks again.
    Close,
    /// Decides.
    Decide,
    /// Nothing: these hosts live and take part.
    Wait(Vec<H>),
    /// Nothing: it is decided.
    Decided,
}

/// The next step on the way to a decision of a ballot in which hosts take part while they live. `living`: those that take
/// part and live, as was asked after the look.
pub fn next_decision<H: Ord + Clone, D>(view: &View<H, D>, living: Vec<H>) -> DecisionStep<H> {
    if !living.is_empty() {
        return DecisionStep::Wait(living);
    }
    if !view.is_closing {
        return DecisionStep::Close;
    }
    match &view.decision {
        None => DecisionStep::Decide,
        Some(_) => DecisionStep::Decided,
    }
}

/// What a host does next when there may be a decision. Doing it twice does no harm.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Action<H> {
    /// Says that it changes nothing any more.
    Stop,
    /// Claims a unit of work.
    Claim(Unit),
    /// Does a unit of work, and says so.
    Work(Unit),
    /// Ends its own part, and says so.
    Leave,
    /// Claims the removal, as long as this process lives.
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
    /// This host does a unit of work, or some.
    Work(Claimant<H>),
    /// These hosts have not left.
    Leave(Vec<H>),
    /// Work that a host that takes part has to do.
    Unfinished,
    /// Another process removes the directory, or does a unit that concerns the whole.
    Removal,
}

impl Waiting<String> {
    /// The hosts that are waited for, as far as they are known.
    pub fn hosts(self) -> Vec<String> {
        match self {
            Self::Decision | Self::Unfinished | Self::Removal => Vec::new(),
            Self::Stop(hosts) | Self::Leave(hosts) => hosts,
            Self::Work(Claimant::Host(host)) => vec![host],
            Self::Work(Claimant::Unknown) => Vec::new(),
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
    match P::PRESENCE {
        Presence::Living => next_of_living(view, me, &plan),
        Presence::Kept if view.is_taking_part(me) => next_of_member(view, me, &plan),
        Presence::Kept => next_of_other(view, me, &plan),
    }
}

/// Next action of a host that takes part.
fn next_of_member<H: Ord + Clone, D>(view: &View<H, D>, me: &H, plan: &Plan) -> Action<H> {
    if plan.stops_first && !view.stopped.contains(me) {
        return Action::Stop;
    }
    let undone = view.undone(plan);
    if undone.is_empty() {
        return Action::Leave;
    }
    let running = view.running();
    if plan.stops_first && !running.is_empty() {
        return Action::Wait(Waiting::Stop(running));
    }
    next_of_worker(view, me, &undone)
}

/// Of a host that takes part no more, or never did.
fn next_of_other<H: Ord + Clone, D>(view: &View<H, D>, me: &H, plan: &Plan) -> Action<H> {
    let remaining = view.remaining();
    if !remaining.is_empty() {
        return Action::Wait(Waiting::Leave(remaining));
    }
    if !view.undone(plan).is_empty() {
        return Action::Wait(Waiting::Unfinished);
    }
    next_of_remover(view, me)
}

/// Next action of any host, in a ballot whose work is done by the living hosts.
fn next_of_living<H: Ord + Clone, D>(view: &View<H, D>, me: &H, plan: &Plan) -> Action<H> {
    let undone = view.undone(plan);
    if !undone.is_empty() {
        return next_of_worker(view, me, &undone);
    }
    next_of_remover(view, me)
}

/// Next action of any host, when all is over.
fn next_of_remover<H: Ord + Clone, D>(view: &View<H, D>, me: &H) -> Action<H> {
    match view.claimed.get(WHOLE) {
        None => Action::ClaimRemoval,
        Some(Claimant::Host(host)) if host == me => Action::Retire,
        Some(_) => Action::Wait(Waiting::Removal),
    }
}

/// Next action of a host that may work: a unit that it has claimed, or else an unclaimed one.
fn next_of_worker<H: Ord + Clone, D>(view: &View<H, D>, me: &H, undone: &[&Unit]) -> Action<H> {
    let claimant = |unit: &Unit| view.claimed.get(&unit.claim());
    let is_mine = |unit: &Unit| claimant(unit) == Some(&Claimant::Host(me.clone()));
    if let Some(unit) = undone.iter().find(|unit| is_mine(unit)) {
        return Action::Work((*unit).clone());
    }
    if let Some(unit) = undone.iter().find(|unit| claimant(unit).is_none()) {
        return Action::Claim((*unit).clone());
    }
    let others = undone.iter().find_map(|unit| claimant(unit));
    Action::Wait(Waiting::Work(others.cloned().unwrap_or(Claimant::Unknown)))
}
