//! Hosts that take part until they leave, also after their death ([`Presence::Kept`]): ballots on a transaction that is
//! undone after an abort.
//!
//! A host that crashed comes back knowing only whether its transaction had begun. One that crashed while it removed the
//! directory never comes back.

use super::*;

const LAG_MAX: usize = 2;
const CRASHES_MAX: u8 = 2;
const UNDO: &str = "undo";

/// Commits need nothing more; an abort is undone by one host, after all have stopped.
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
    /// Which ballot of this name it is of, from 1 on.
    number: u8,
    joined: Hosts,
    decision: Option<bool>,
    stopped: Hosts,
    claimed: Option<u8>,
    is_done: bool,
    left: Hosts,
    /// Hosts that found that they take part; no host reads it.
    took_part: Hosts,
}

impl Dir {
    /// What the host that has it locked as a whole sees, or another one.
    fn view(&self, locked_by_me: Option<u8>) -> View<u8, bool> {
        let undo = Unit::Part(UNDO.to_owned());
        let undoer = self.claimed.map(|host| (undo.claim(), host));
        let remover = locked_by_me.map(|host| (WHOLE.to_owned(), host));
        let claims = undoer.into_iter().chain(remover);
        View {
            joined: set(self.joined),
            is_closing: false,
            decision: self.decision,
            stopped: set(self.stopped),
            claimed: claims
                .map(|(claim, host)| (claim, Claimant::Host(host)))
                .collect(),
            done: self.is_done.then(|| UNDO.to_owned()).into_iter().collect(),
            left: set(self.left),
        }
    }
}

/// What a host is about to do after a look: an [`Action`] that changes something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Pending {
    Stop,
    Claim,
    Work,
    Leave,
    ClaimRemoval,
    Retire,
    /// Renames what has the directory's name.
    Rename,
    RemoveEmpty,
}

/// What a host does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Phase {
    /// It takes no part.
    #[default]
    Idle,
    Joining {
        has_put: bool,
        /// What the last look said.
        step: Option<JoinStep>,
    },
    /// It changes what is to be undone after an abort.
    Active,
    /// It saw a decision.
    Ending(Option<Pending>),
    /// It undoes.
    Working,
    /// Its process has ended. `has_begun`: its own directory says that its transaction had begun.
    Crashed { has_begun: bool },
    /// Its process has ended, and no other one comes.
    Gone,
    /// It came back and saw no decision, and had changed nothing.
    Withdrawing,
    /// It came back and saw a decision, and had changed nothing: it stops, then leaves.
    LeavingUnchanged { has_stopped: bool },
}

/// Only a ballot as a whole is ever locked.
type State = World<Dir, Phase, 1, { LAG_MAX + 1 }>;
const WHOLE_CLAIM: usize = 0;

impl State {
    /// Whether a host has its ballot locked as a whole.
    fn locks_whole(&self, host: usize) -> bool {
        let number = usize::from(self.hosts[host].number);
        number > 0 && self.locks[number - 1][WHOLE_CLAIM] == Some(host as u8)
    }

    fn is_in(&self, host: usize, number: u8, phase: &Phase) -> bool {
        self.hosts[host].number == number && self.hosts[host].phase == *phase
    }

    fn crash(&self, index: usize, add: &mut dyn FnMut(Self)) {
        let has_begun = match &self.hosts[index].phase {
            Phase::Idle | Phase::Crashed { .. } | Phase::Gone => return,
            Phase::Joining { .. } | Phase::Withdrawing | Phase::LeavingUnchanged { .. } => false,
            Phase::Active | Phase::Ending(_) | Phase::Working => true,
        };
        if self.crashes < CRASHES_MAX {
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
    }

    fn step_host(&self, index: usize, add: &mut dyn FnMut(Self)) {
        match &self.hosts[index].phase {
            Phase::Gone => {}
            Phase::Idle => self.open(index, add),
            Phase::Joining {
                has_put,
                step: None,
            } => self.look(index, add, &|next, dir| {
                let is_open = dir.view(None).is_open() && next.dir(index).is_some();
                let step = next_join(is_open, *has_put);
                Some(match step {
                    // It looks whether the last ballot is over, and removes that.
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
            Phase::Ending(None) => self.look(index, add, &|next, dir| next.choose(index, dir)),
            Phase::Ending(Some(pending)) => self.act(index, *pending, add),
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

    /// A host opens the directory, made if there is none.
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

    /// A host lists its directory, as it is or was, and is in another phase then. Without a phase, or where the directory
    /// is gone, it has nothing to do with the ballot any more.
    fn look(
        &self,
        index: usize,
        add: &mut dyn FnMut(Self),
        choose: &dyn Fn(&Self, Dir) -> Option<Phase>,
    ) {
        let number = self.hosts[index].number;
        for lag in 0..=self.history.lag_of(index) {
            let mut next = *self;
            let seen = next.history.look(index, lag);
            match seen.filter(|dir| dir.number == number) {
                Some(dir) => match choose(&next, dir) {
                    Some(phase) => next.enter(index, phase),
                    None => next.forget_ballot(index),
                },
                // Not yet made, as this listing says.
                None if lag > 0 => continue,
                None => {
                    let mut late = next;
                    match choose(&late, self.remains(index)) {
                        Some(phase) => late.enter(index, phase),
                        None => late.forget_ballot(index),
                    }
                    add(late);
                    next.forget_ballot(index);
                }
            }
            add(next);
        }
    }

    /// What a host finds in a directory that is being removed: what it has put there since.
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
            // It looks whether the last ballot is over, and removes that.
            JoinStep::Refused => next.enter(index, Phase::Ending(None)),
        }
        add(next);
    }

    /// A host decides, or finds what was decided.
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

    /// What a host does about a directory that it sees so; none: it has nothing to do with it any more.
    fn choose(&self, index: usize, dir: Dir) -> Option<Phase> {
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
                // It looks again, unless it has left.
                return takes_part.then_some(Phase::Ending(None));
            }
        };
        Some(Phase::Ending(Some(pending)))
    }

    fn act(&self, index: usize, pending: Pending, add: &mut dyn FnMut(Self)) {
        let host = index as u8;
        let mut next = *self;
        let mut phase = Phase::Ending(None);
        match pending {
            Pending::Stop => next.put(index, |dir| dir.stopped |= 1 << host),
            Pending::Claim => next.put(index, |dir| {
                dir.claimed.get_or_insert(host);
            }),
            Pending::Work => phase = Phase::Working,
            Pending::Leave => next.put(index, |dir| dir.left |= 1 << host),
            Pending::ClaimRemoval => {
                if !next.lock(index, WHOLE_CLAIM) {
                    // Another one removes it.
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
                // By name: it may be a later directory.
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

    /// A host comes back.
    fn recover(&self, index: usize, has_begun: bool, add: &mut dyn FnMut(Self)) {
        let bit = 1 << index;
        let mut seen = Vec::new();
        self.look(index, &mut |next| seen.push(next), &|_, dir| {
            let takes_part = dir.joined & !dir.left & bit != 0;
            Some(match (takes_part && !has_begun, dir.decision) {
                (true, None) => Phase::Withdrawing,
                (true, Some(_)) => Phase::LeavingUnchanged { has_stopped: false },
                (false, _) => Phase::Ending(None),
            })
        });
        for mut next in seen {
            let takes_part = |dir: Dir| dir.joined & !dir.left & bit != 0;
            let is_ending = next.hosts[index].phase == Phase::Ending(None);
            if has_begun && is_ending && next.dir(index).is_some_and(takes_part) {
                // What was not prepared is aborted.
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

    fn check(&self) {
        let count = |phase: &Phase| {
            let in_phase = self.hosts.iter().filter(|host| host.phase == *phase);
            in_phase.count()
        };
        let working = count(&Phase::Working);
        assert!(working <= 1, "two hosts work at the same time");
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
