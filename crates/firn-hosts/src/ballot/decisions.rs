//! Pure functions that return the next step of a host in a ballot, from the host's view of the ballot. They make no
//! calls of a file system.
//!
//! A *ballot* is one decision of several hosts, taken by creating files in a shared directory, with the work that
//! follows from it. A *unit* is a part of that work, which one host does. A *claim* gives a unit to one host.
//!
//! `ballot/model.rs` explores all sequences of these steps.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{CLAIM, DONE, WHOLE};

/// How long a host counts as a participant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Participation {
    /// Until the host records that it has left, even after its death. Its files and claims are durable.
    Kept,
    /// While the host is alive. Its files mean nothing after a power loss, and its claims are locks.
    Living,
}

/// A part of the work after a decision, which one host does.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Unit {
    /// A unit that may run in parallel with other units of the same stage.
    Part(String),
    /// A unit that excludes all other work. All such units share one claim, the lock of the whole ballot.
    Whole(&'static str),
}

impl Unit {
    /// Returns the name of the unit.
    pub fn name(&self) -> &str {
        match self {
            Self::Part(name) => name,
            Self::Whole(name) => name,
        }
    }

    /// Returns the name of the claim that a host needs to do this unit.
    pub(super) fn claim(&self) -> String {
        match self {
            Self::Part(name) => format!("{CLAIM}{name}"),
            Self::Whole(_) => WHOLE.to_owned(),
        }
    }

    /// Returns the name of the file that marks this unit as done.
    pub fn done_file(&self) -> String {
        format!("{DONE}{}", self.name())
    }
}

/// The work that hosts do after a decision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Whether work begins only after all participants have stopped.
    pub stops_first: bool,
    /// Units of work, in stages. The units of one stage may be done in any order, after all units of the earlier
    /// stages.
    pub stages: Vec<Vec<Unit>>,
}

/// Defines a kind of decision and the work that follows from it.
pub trait Protocol {
    /// The content of a decision.
    type Decision: Serialize + DeserializeOwned;

    /// How long a host counts as a participant.
    const PRESENCE: Participation = Participation::Kept;

    /// Returns the work that follows from a decision.
    fn plan(&self, decision: &Self::Decision) -> Plan;
}

/// The state of a ballot as one host sees it: the content of the files in the ballot's directory. `H` names a host; `D`
/// is a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View<H: Ord, D> {
    /// Hosts that have joined the ballot, including those that have left since.
    pub joined: BTreeSet<H>,
    /// Whether new participants are refused. Set by a host that wants a decision, and never taken back.
    pub is_closing: bool,
    /// The decision. `None` if there is none yet.
    pub decision: Option<D>,
    /// Hosts that have recorded that they make no more changes, so that the work may begin ([`Plan::stops_first`]).
    pub stopped: BTreeSet<H>,
    /// The host that each claim gives its unit to, by the name of the claim.
    pub claimed: BTreeMap<String, Claimant<H>>,
    /// Names of the units that are done.
    pub done: BTreeSet<String>,
    /// Hosts that have recorded that they have left. No other host waits for them any more.
    pub left: BTreeSet<H>,
}

/// The host that has claimed a unit.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Claimant<H> {
    /// The named host.
    Host(H),
    /// An unknown process, which has the claim locked.
    Unknown,
}

impl<H: Ord + Clone, D> View<H, D> {
    /// Returns whether a host may join now.
    pub fn is_open(&self) -> bool {
        self.decision.is_none() && !self.is_closing
    }

    /// Returns whether a host takes part and has not ended its part.
    pub fn is_taking_part(&self, host: &H) -> bool {
        self.joined.contains(host) && !self.left.contains(host)
    }

    /// Returns the hosts that take part and have not stopped.
    pub fn running(&self) -> Vec<H> {
        self.joined.difference(&self.stopped).cloned().collect()
    }

    /// Returns the hosts that take part and have not ended their part.
    pub fn remaining(&self) -> Vec<H> {
        self.joined.difference(&self.left).cloned().collect()
    }

    /// Returns the undone units of the first stage that is not done. Returns an empty list if all stages are done.
    fn undone<'p>(&self, plan: &'p Plan) -> Vec<&'p Unit> {
        for stage in &plan.stages {
            let undone: Vec<&Unit> = stage
                .iter()
                .filter(|unit| !self.done.contains(unit.name()))
                .collect();
            if !undone.is_empty() {
                return undone;
            }
        }
        Vec::new()
    }
}

/// The next step of a host that wants to take part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum JoinStep {
    /// Put the file that says that the host takes part, then look again.
    Put,
    /// Remove that file again, because the ballot was over before the host joined.
    Withdraw,
    /// Do nothing, because the host takes part.
    Joined,
    /// Do nothing, because the ballot is over.
    Refused,
}

/// Returns the next step of a host that wants to take part.
///
/// `is_open` says whether the ballot is neither decided nor closed and its directory still has its name. `has_put` says
/// whether the host has put its file.
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
    /// Put `closing`, then look again.
    Close,
    /// Put the decision.
    Decide,
    /// Wait, because these living hosts take part.
    Wait(Vec<H>),
    /// Do nothing, because the ballot is decided.
    Decided,
}

/// Returns the next step towards a decision, in a ballot in which hosts take part while they are alive.
///
/// `living` are the participants that are alive. The caller must determine them after it has read `view`.
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

/// The next action of a host when there may be a decision. An action may safely be repeated.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Action<H> {
    /// Record that this host changes nothing any more.
    Stop,
    /// Claim a unit of work.
    Claim(Unit),
    /// Do a unit of work, and record that it is done.
    Work(Unit),
    /// End the host's own part, and record that.
    Leave,
    /// Claim the removal of the directory. The claim ends with this process.
    ClaimRemoval,
    /// Remove the directory.
    Retire,
    /// List the directory again later, because the host waits for this.
    Wait(Waiting<H>),
}

/// The event or the hosts that a host waits for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Waiting<H> {
    /// A decision.
    Decision,
    /// These hosts must stop first.
    Stop(Vec<H>),
    /// This host is doing at least one unit of work.
    Work(Claimant<H>),
    /// These hosts must leave first.
    Leave(Vec<H>),
    /// A participant must do the remaining work.
    Unfinished,
    /// Another process is removing the directory, or doing a unit that concerns the whole.
    Removal,
}

impl Waiting<String> {
    /// Returns the hosts that are waited for, as far as they are known.
    pub fn hosts(self) -> Vec<String> {
        match self {
            Self::Decision | Self::Unfinished | Self::Removal => Vec::new(),
            Self::Stop(hosts) | Self::Leave(hosts) => hosts,
            Self::Work(Claimant::Host(host)) => vec![host],
            Self::Work(Claimant::Unknown) => Vec::new(),
        }
    }
}

/// Returns the next action of the host `me`, after it has read the state of the ballot from its directory as `view`.
/// The host does that action, and reads again.
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
        Participation::Living => next_of_living(view, me, &plan),
        Participation::Kept if view.is_taking_part(me) => next_of_member(view, me, &plan),
        Participation::Kept => next_of_other(view, me, &plan),
    }
}

/// Returns the next action of a host that takes part.
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

/// Returns the next action of a host that does not take part, or takes part no more.
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

/// Returns the next action of any host, in a ballot whose work the living hosts do.
fn next_of_living<H: Ord + Clone, D>(view: &View<H, D>, me: &H, plan: &Plan) -> Action<H> {
    let undone = view.undone(plan);
    if !undone.is_empty() {
        return next_of_worker(view, me, &undone);
    }
    next_of_remover(view, me)
}

/// Returns the next action of any host, when all work is done.
fn next_of_remover<H: Ord + Clone, D>(view: &View<H, D>, me: &H) -> Action<H> {
    match view.claimed.get(WHOLE) {
        None => Action::ClaimRemoval,
        Some(Claimant::Host(host)) if host == me => Action::Retire,
        Some(_) => Action::Wait(Waiting::Removal),
    }
}

/// Returns the next action of a host that may work. The host first does a unit that it has claimed; otherwise it
/// claims a free unit.
fn next_of_worker<H: Ord + Clone, D>(view: &View<H, D>, me: &H, undone: &[&Unit]) -> Action<H> {
    let claimant_of = |unit: &Unit| view.claimed.get(&unit.claim());
    let is_mine = |unit: &Unit| claimant_of(unit) == Some(&Claimant::Host(me.clone()));
    if let Some(&unit) = undone.iter().find(|unit| is_mine(unit)) {
        return Action::Work(unit.clone());
    }
    if let Some(&unit) = undone.iter().find(|unit| claimant_of(unit).is_none()) {
        return Action::Claim(unit.clone());
    }
    let busy_claimant = undone.iter().find_map(|unit| claimant_of(unit));
    Action::Wait(Waiting::Work(
        busy_claimant.cloned().unwrap_or(Claimant::Unknown),
    ))
}
