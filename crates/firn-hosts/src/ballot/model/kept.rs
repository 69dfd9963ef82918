//! Model of a ballot whose hosts take part until they leave, even if they die before ([`Participation::Kept`]). An
//! example is a ballot on a transaction that is undone after an abort.
//!
//! A *ballot* is one decision of several hosts, taken by creating files in a shared directory. Here the decision is
//! `true` to commit and `false` to abort. After an abort there is one *unit* of work, which one host does: the undo of
//! all changes. A host *claims* the unit before it does it.
//!
//! A host that crashed comes back, and knows only whether its transaction had begun. A host that crashed while it
//! removed the directory never comes back.

use super::*;

/// Largest number of changes of other hosts that a listing may miss.
const LAG_MAX: usize = 2;
const CRASHES_MAX: u8 = 2;
/// Name of the only unit of work.
const UNDO: &str = "undo";

/// Protocol of the model: a commit needs no further work. After an abort all hosts stop, and then one host undoes the
/// changes.
struct Shadow;

impl Protocol for Shadow {
    type Decision = bool;

    fn plan(&self, commit: &bool) -> Plan {
        let undo = || vec![Unit::Part(UNDO.to_owned())];
        Plan {
            stops_first: !commit,
            stages: (!commit).then(undo).into_iter().collect(),
        }
    }
}

/// The directory of a ballot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Dir {
    /// Number of the ballot, counted from 1 among the ballots of this name.
    number: u8,
    joined: Hosts,
    decision: Option<bool>,
    stopped: Hosts,
    claimed: Option<u8>,
    is_done: bool,
    left: Hosts,
    /// Hosts that found that they take part. Only the checks use this, no host reads it.
    took_part: Hosts,
}

impl Dir {
    /// Returns the directory of this ballot, a decision of several hosts, as one host sees it in a listing. Hosts are
    /// numbers here, and the decision is `true` to commit or `false` to abort.
    ///
    /// After an abort there is one unit of work, named [`UNDO`], which one host claims and then does. `locked_by_me` is
    /// this host, if it has locked the ballot as a whole, as the removal of the directory requires.
    fn view(&self, locked_by_me: Option<u8>) -> View<u8, bool> {
        let mut claimed = BTreeMap::new();
        if let Some(host) = self.claimed {
            let undo = Unit::Part(UNDO.to_owned());
            claimed.insert(undo.claim(), Claimant::Host(host));
        }
        if let Some(host) = locked_by_me {
            claimed.insert(WHOLE.to_owned(), Claimant::Host(host));
        }
        let mut done = BTreeSet::new();
        if self.is_done {
            done.insert(UNDO.to_owned());
        }
        View {
            joined: set(self.joined),
            is_closing: false,
            decision: self.decision,
            stopped: set(self.stopped),
            claimed,
            done,
            left: set(self.left),
        }
    }
}

/// The call that a host makes next, as its last listing made it choose ([`Action`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Pending {
    Stop,
    Claim,
    Work,
    Leave,
    ClaimRemoval,
    Retire,
    /// Renames the directory that now has the name.
    Rename,
    RemoveEmpty,
}

/// The phase of a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Phase {
    /// The host does not take part.
    #[default]
    Idle,
    /// The host is about to join.
    Joining {
        has_put: bool,
        /// The step that followed from the last listing.
        step: Option<JoinStep>,
    },
    /// The host makes changes that an abort undoes.
    Active,
    /// The host has seen a decision.
    Ending(Option<Pending>),
    /// The host undoes the changes.
    Working,
    /// The host's process has ended. `has_begun` says whether its own directory shows that its transaction had begun.
    Crashed { has_begun: bool },
    /// The host's process has ended, and no other one comes.
    Gone,
    /// The host came back, saw no decision, and had changed nothing.
    Withdrawing,
    /// The host came back, saw a decision, and had changed nothing. It stops, and then leaves.
    LeavingUnchanged { has_stopped: bool },
}

/// Only a ballot as a whole is ever locked, so there is one claim.
type State = World<Dir, Phase, 1, { LAG_MAX + 1 }>;
const WHOLE_CLAIM: usize = 0;

impl State {
    /// Returns whether a host has locked its ballot as a whole.
    fn locks_whole(&self, host: usize) -> bool {
        let number = usize::from(self.hosts[host].number);
        number > 0 && self.locks[number - 1][WHOLE_CLAIM] == Some(host as u8)
    }

    /// Returns whether a host is in this phase of this ballot.
    fn is_in(&self, host: usize, number: u8, phase: &Phase) -> bool {
        self.hosts[host].number == number && self.hosts[host].phase == *phase
    }

    /// Adds the state after a crash of a host, while crashes are left. A host that is idle or has crashed already adds
    /// none. A host that had locked the whole ballot to remove its directory never comes back.
    fn crash(&self, index: usize, add: &mut dyn FnMut(Self)) {
        let has_begun = match &self.hosts[index].phase {
            Phase::Idle | Phase::Crashed { .. } | Phase::Gone => return,
            Phase::Joining { .. } | Phase::Withdrawing | Phase::LeavingUnchanged { .. } => false,
            Phase::Active | Phase::Ending(_) | Phase::Working => true,
        };
        if self.crashes == CRASHES_MAX {
            return;
        }
        let mut next = *self;
        next.crashes += 1;
        let phase = if self.locks_whole(index) {
            Phase::Gone
        } else {
            Phase::Crashed { has_begun }
        };
        next.unlock(index);
        next.enter(index, phase);
        add(next);
    }

    /// Adds the states to which a host's next call or listing of the ballot's directory leads. The host's phase decides
    /// which it is: in a phase without a chosen step the host lists, and otherwise makes the chosen call.
    fn step_host(&self, index: usize, add: &mut dyn FnMut(Self)) {
        match &self.hosts[index].phase {
            Phase::Gone => {}
            Phase::Idle => self.open(index, add),
            Phase::Joining {
                has_put,
                step: None,
            } => self.list_and_choose(index, add, &|next, dir| {
                let is_open = dir.view(None).is_open() && next.dir(index).is_some();
                let step = next_join(is_open, *has_put);
                Some(match step {
                    // The host checks whether the last ballot is over, and removes it then.
                    JoinStep::Refused => Phase::Ending(None),
                    step => Phase::Joining {
                        has_put: *has_put,
                        step: Some(step),
                    },
                })
            }),
            Phase::Joining {
                step: Some(step), ..
            } => self.join(index, *step, add),
            Phase::Active => self.decide(index, add),
            Phase::Ending(None) => {
                self.list_and_choose(index, add, &|next, dir| next.choose_call(index, dir))
            }
            Phase::Ending(Some(pending)) => self.make_call(index, *pending, add),
            Phase::Working => {
                let mut next = *self;
                next.put(index, |dir| dir.is_done = true);
                next.enter(index, Phase::Ending(None));
                add(next);
            }
            Phase::Crashed { has_begun } => self.recover(index, *has_begun, add),
            Phase::Withdrawing => {
                let mut next = *self;
                next.put(index, |dir| dir.joined &= !(1 << index));
                next.forget_ballot(index);
                add(next);
            }
            Phase::LeavingUnchanged { has_stopped } => {
                let mut next = *self;
                if *has_stopped {
                    next.put(index, |dir| dir.left |= 1 << index);
                    next.enter(index, Phase::Ending(None));
                } else {
                    next.put(index, |dir| dir.stopped |= 1 << index);
                    next.enter(index, Phase::LeavingUnchanged { has_stopped: true });
                }
                add(next);
            }
        }
    }

    /// Adds the state after a host has opened the ballot's directory, which it makes if there is none. Adds none if all
    /// ballots of the model were made.
    fn open(&self, index: usize, add: &mut dyn FnMut(Self)) {
        let mut next = *self;
        let number = match self.history.current() {
            Some(dir) => dir.number,
            None if self.made < BALLOTS_MAX => {
                next.made += 1;
                let dir = Dir {
                    number: next.made,
                    ..Dir::default()
                };
                next.history.change(index, Some(dir));
                next.made
            }
            None => return,
        };
        next.hosts[index].number = number;
        let joining = Phase::Joining {
            has_put: false,
            step: None,
        };
        next.enter(index, joining);
        add(next);
    }

    /// Adds the states after a host has listed its directory, one for each state that the listing may return.
    ///
    /// `choose` returns the phase that follows from the listed directory. If it returns `None`, or if the directory is
    /// gone, the host has no more work for the ballot.
    fn list_and_choose(
        &self,
        index: usize,
        add: &mut dyn FnMut(Self),
        choose: &dyn Fn(&Self, Dir) -> Option<Phase>,
    ) {
        let number = self.hosts[index].number;
        for lag in 0..=self.history.lag_of(index) {
            let mut next = *self;
            let listed_dir = next.history.list(index, lag);
            match listed_dir.filter(|dir| dir.number == number) {
                Some(dir) => {
                    let phase = choose(&next, dir);
                    next.enter_or_forget(index, phase);
                }
                // This listing is from before the directory was made, so it says nothing.
                None if lag > 0 => continue,
                // The directory is removed. Its listing is empty but for the host's own files, or fails.
                None => {
                    let mut with_remains = next;
                    let phase = choose(&with_remains, self.remains(index));
                    with_remains.enter_or_forget(index, phase);
                    add(with_remains);
                    next.forget_ballot(index);
                }
            }
            add(next);
        }
    }

    /// Sets the phase of a host, or ends its work for the ballot if there is none.
    fn enter_or_forget(&mut self, index: usize, phase: Option<Phase>) {
        match phase {
            Some(phase) => self.enter(index, phase),
            None => self.forget_ballot(index),
        }
    }

    /// Returns the directory as a host may list it while it is removed: empty but for the host's own put.
    fn remains(&self, index: usize) -> Dir {
        let has_put = matches!(
            self.hosts[index].phase,
            Phase::Joining { has_put: true, .. }
        );
        Dir {
            number: self.hosts[index].number,
            joined: Hosts::from(has_put) << index,
            ..Dir::default()
        }
    }

    /// Adds the state after a host has taken a step to join the ballot: put its file, withdrawn it, or found that it
    /// takes part or is refused.
    fn join(&self, index: usize, step: JoinStep, add: &mut dyn FnMut(Self)) {
        let mut next = *self;
        match step {
            JoinStep::Put => {
                next.put(index, |dir| dir.joined |= 1 << index);
                let joining = Phase::Joining {
                    has_put: true,
                    step: None,
                };
                next.enter(index, joining);
            }
            JoinStep::Withdraw => {
                next.put(index, |dir| dir.joined &= !(1 << index));
                next.forget_ballot(index);
            }
            JoinStep::Joined => {
                let number = next.hosts[index].number;
                if let Some(dir) = next.history.current_mut() {
                    assert_eq!(dir.number, number, "it takes part in nothing");
                    dir.took_part |= 1 << index;
                }
                next.enter(index, Phase::Active);
            }
            // The host checks whether the last ballot is over, and removes it then.
            JoinStep::Refused => next.enter(index, Phase::Ending(None)),
        }
        add(next);
    }

    /// Adds the states after a host has tried to decide, once for an abort and once for a commit. An earlier decision
    /// counts.
    fn decide(&self, index: usize, add: &mut dyn FnMut(Self)) {
        for commit in [false, true] {
            let mut next = *self;
            next.put(index, |dir| {
                dir.decision.get_or_insert(commit);
            });
            next.enter(index, Phase::Ending(None));
            add(next);
        }
    }

    /// Returns the phase that follows if a host lists its directory as `dir`. [`next`], the function that is checked,
    /// chooses the call. Returns `None` if the host has no more work for the ballot.
    fn choose_call(&self, index: usize, dir: Dir) -> Option<Phase> {
        let locked_by_me = self.locks_whole(index).then_some(index as u8);
        let pending = match next(&dir.view(locked_by_me), &(index as u8), &Shadow) {
            Action::Stop => Pending::Stop,
            Action::Claim(_) => Pending::Claim,
            Action::Work(_) => Pending::Work,
            Action::Leave => Pending::Leave,
            Action::ClaimRemoval => Pending::ClaimRemoval,
            Action::Retire => Pending::Retire,
            Action::Wait(waiting) => {
                let takes_part = dir.joined & !dir.left & (1 << index) != 0;
                if !takes_part && waiting == Waiting::Decision {
                    return Some(Phase::Ending(Some(Pending::RemoveEmpty)));
                }
                // The host lists the directory again, unless it has left.
                return takes_part.then_some(Phase::Ending(None));
            }
        };
        Some(Phase::Ending(Some(pending)))
    }

    /// Adds the state after a host has made the call that it chose from its last listing. Other hosts may have acted
    /// since that listing, so the call may come too late.
    fn make_call(&self, index: usize, pending: Pending, add: &mut dyn FnMut(Self)) {
        let host = index as u8;
        let mut next = *self;
        let mut phase = Phase::Ending(None);
        match pending {
            Pending::Stop => next.put(index, |dir| dir.stopped |= 1 << host),
            // The claim of another host, if there is one, remains: a claim is put once.
            Pending::Claim => next.put(index, |dir| {
                dir.claimed.get_or_insert(host);
            }),
            Pending::Work => phase = Phase::Working,
            Pending::Leave => next.put(index, |dir| dir.left |= 1 << host),
            Pending::ClaimRemoval => {
                if !next.lock(index, WHOLE_CLAIM) {
                    // Another host removes the directory.
                    next.forget_ballot(index);
                    return add(next);
                }
            }
            Pending::Retire => match next.dir(index) {
                Some(_) => phase = Phase::Ending(Some(Pending::Rename)),
                None => {
                    next.forget_ballot(index);
                    return add(next);
                }
            },
            Pending::Rename => {
                let dir = next.dir(index).expect("another ballot is removed");
                assert_eq!(dir.took_part & !dir.left, 0, "removed before all had left");
                let is_finished = dir.decision == Some(true) || dir.is_done;
                assert!(is_finished, "removed before all was done");
                next.history.change(index, None);
                next.forget_ballot(index);
                return add(next);
            }
            Pending::RemoveEmpty => {
                let is_empty = |dir: Dir| {
                    let number = dir.number;
                    dir == Dir {
                        number,
                        ..Dir::default()
                    }
                };
                // The removal is by name, so it may remove a later directory.
                if next.history.current().is_some_and(is_empty) {
                    next.history.change(index, None);
                }
                next.forget_ballot(index);
                return add(next);
            }
        }
        next.enter(index, phase);
        add(next);
    }

    /// Adds the states after a crashed host has come back and listed the directory of its ballot, a decision of several
    /// hosts. `has_begun` says whether its transaction had begun.
    ///
    /// A host whose transaction had begun aborts it, because nothing is prepared in this model. A host that had changed
    /// nothing withdraws before a decision, and leaves after one.
    fn recover(&self, index: usize, has_begun: bool, add: &mut dyn FnMut(Self)) {
        let takes_part = |dir: Dir| dir.joined & !dir.left & (1 << index) != 0;
        let mut next_states = Vec::new();
        self.list_and_choose(index, &mut |next| next_states.push(next), &|_, dir| {
            if has_begun || !takes_part(dir) {
                return Some(Phase::Ending(None));
            }
            Some(match dir.decision {
                None => Phase::Withdrawing,
                Some(_) => Phase::LeavingUnchanged { has_stopped: false },
            })
        });
        for mut next in next_states {
            let is_ending = next.hosts[index].phase == Phase::Ending(None);
            if has_begun && is_ending && next.dir(index).is_some_and(takes_part) {
                // The transaction was not prepared, so it is aborted.
                next.put(index, |dir| {
                    dir.decision.get_or_insert(false);
                });
            }
            add(next);
        }
    }
}

impl Directory for Dir {
    fn number(&self) -> u8 {
        self.number
    }

    fn reordered(self, order: [u8; HOSTS]) -> Self {
        let hosts = |hosts| reordered(hosts, order);
        let host = |host: u8| order[usize::from(host)];
        Self {
            joined: hosts(self.joined),
            stopped: hosts(self.stopped),
            claimed: self.claimed.map(host),
            left: hosts(self.left),
            took_part: hosts(self.took_part),
            ..self
        }
    }
}

impl Model for State {
    fn new() -> Self {
        Self::empty()
    }

    fn steps(&self) -> Vec<(Self, bool)> {
        let mut steps = Vec::new();
        for index in 0..HOSTS {
            self.step_host(index, &mut |next| steps.push((next, false)));
            self.crash(index, &mut |next| steps.push((next, true)));
        }
        steps
    }

    // After an abort, one host undoes the changes alone, once, and when no host changes anything any more.
    /// Panics if this state breaks a promise of the ballot: one host at a time undoes the changes, only after an abort,
    /// and no host still makes changes then.
    fn check(&self) {
        let count = |phase: &Phase| {
            self.hosts
                .iter()
                .filter(|host| host.phase == *phase)
                .count()
        };
        assert!(
            count(&Phase::Working) <= 1,
            "two hosts work at the same time"
        );
        for index in 0..HOSTS {
            let number = self.hosts[index].number;
            let dir = self.dir(index);
            if self.is_in(index, number, &Phase::Working) {
                let dir = dir.expect("a ballot was removed that a host works for");
                assert_eq!(dir.decision, Some(false), "work without an abort");
                assert!(!dir.is_done, "work after it was done");
                assert_eq!(count(&Phase::Active), 0, "a host changes what is undone");
            }
            if self.is_in(index, number, &Phase::Active) {
                let dir = dir.expect("a ballot was removed that a host takes part in");
                assert!(!dir.is_done, "a host changes what was undone");
                assert!(
                    dir.joined & (1 << index) != 0,
                    "a host takes part that others do not see"
                );
            }
        }
    }

    fn is_over(&self) -> bool {
        let is_idle = |host: &Host<Phase>| matches!(host.phase, Phase::Idle | Phase::Gone);
        let is_gone = self.history.current().is_none();
        self.made == BALLOTS_MAX && is_gone && self.hosts.iter().all(is_idle)
    }

    fn reordered(&self, order: [u8; HOSTS]) -> Self {
        self.renumbered(order)
    }
}

#[test]
fn three_hosts_that_crash_and_see_old_listings_keep_all_invariants_and_come_to_an_end() {
    explore_to_the_end::<State>();
}
