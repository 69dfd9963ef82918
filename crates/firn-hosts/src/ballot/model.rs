//! All interleavings of three hosts at ballots of one name, with crashes and old listings.
//!
//! A state is what the server has and how far each host is. Each step is one call that changes the server, or one look
//! that chooses it: other hosts act between a look and the action that comes of it. The decisions are those of the
//! product ([`next`], [`next_join`]); the model only does what they say.
//!
//! * A host may crash before and after each action, so often as [`CRASHES_MAX`] says. It comes back knowing only
//!   whether its transaction had begun.
//! * A listing may be [`LAG_MAX`] changes of other hosts old. It has all that came before the host's own last change.
//! * A put into a directory that was removed meanwhile is lost, and says nothing of it. A host that has it open may find
//!   it empty but for that.
//!
//! Hosts are alike: of states that differ only in which host is which, one is looked at.

use std::collections::HashMap;

use super::*;

const HOSTS: usize = 3;
const LAG_MAX: usize = 2;
const CRASHES_MAX: u8 = 2;
/// Ballots under the same name, one after the other.
const BALLOTS_MAX: u8 = 2;
const UNDO: &str = "undo";

/// Commits need nothing more; an abort is undone by one host, after all have stopped.
struct Shadow;

impl Protocol for Shadow {
    type Decision = bool;

    fn plan(&self, commit: &bool) -> Plan {
        Plan {
            stops_first: !commit,
            units: if *commit { &[] } else { &[UNDO] },
        }
    }
}

/// A set of hosts, as bits.
type Hosts = u8;

fn set(hosts: Hosts) -> BTreeSet<u8> {
    (0..HOSTS as u8)
        .filter(|host| hosts & (1 << host) != 0)
        .collect()
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
    remover: Option<u8>,
    /// Hosts that found that they take part; no host reads it.
    took_part: Hosts,
}

impl Dir {
    fn view(&self) -> View<u8, bool> {
        let unit = || UNDO.to_owned();
        View {
            joined: set(self.joined),
            decision: self.decision,
            stopped: set(self.stopped),
            claimed: self
                .claimed
                .map(|host| (unit(), host))
                .into_iter()
                .collect(),
            done: self.is_done.then(unit).into_iter().collect(),
            left: set(self.left),
            remover: self.remover,
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
    RemoveEmpty,
}

/// What a host does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Phase {
    /// It takes no part.
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
    /// It came back and saw no decision, and had changed nothing.
    Withdrawing,
    /// It came back and saw a decision, and had changed nothing: it stops, then leaves.
    LeavingUnchanged { has_stopped: bool },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Host {
    phase: Phase,
    /// The ballot whose directory it has open.
    number: u8,
    /// How many changes of others its next listing may miss.
    lag: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct State {
    /// What has the name of the ballot, now and before the last changes, newest first.
    seen: [Option<Dir>; LAG_MAX + 1],
    hosts: [Host; HOSTS],
    /// Ballots that were made.
    made: u8,
    crashes: u8,
}

impl State {
    fn new() -> Self {
        let host = Host {
            phase: Phase::Idle,
            number: 0,
            lag: 0,
        };
        Self {
            seen: [None; LAG_MAX + 1],
            hosts: [host; HOSTS],
            made: 0,
            crashes: 0,
        }
    }

    /// The directory that a host has open, if it has its name.
    fn dir(&self, host: usize) -> Option<Dir> {
        self.seen[0].filter(|dir| dir.number == self.hosts[host].number)
    }

    /// Puts another directory in the place of the last one, by a host.
    fn change(&mut self, host: usize, dir: Option<Dir>) {
        if self.seen[0] == dir {
            // A file that is there already: the host has asked the server all the same.
            self.hosts[host].lag = 0;
            return self.forget();
        }
        self.seen.rotate_right(1);
        self.seen[0] = dir;
        for (index, other) in self.hosts.iter_mut().enumerate() {
            other.lag = if index == host {
                0
            } else {
                (other.lag + 1).min(LAG_MAX as u8)
            };
        }
        self.forget();
    }

    /// Forgets what no host can see any more.
    fn forget(&mut self) {
        let lag = self.hosts.iter().map(|host| host.lag).max().unwrap_or(0);
        self.seen[usize::from(lag) + 1..].fill(None);
    }

    /// A host changes the directory that it has open. Where that has no name any more the change is lost.
    fn put(&mut self, host: usize, put: impl FnOnce(&mut Dir)) {
        if let Some(mut dir) = self.dir(host) {
            put(&mut dir);
            self.change(host, Some(dir));
        } else {
            self.hosts[host].lag = 0;
            self.forget();
        }
    }

    fn enter(&mut self, host: usize, phase: Phase) {
        self.hosts[host].phase = phase;
    }

    /// A host has nothing to do with the ballot any more.
    fn forget_ballot(&mut self, host: usize) {
        self.hosts[host] = Host {
            phase: Phase::Idle,
            number: 0,
            lag: self.hosts[host].lag,
        };
    }

    fn is_in(&self, host: usize, number: u8, phase: &Phase) -> bool {
        self.hosts[host].number == number && self.hosts[host].phase == *phase
    }

    /// What must hold in every state.
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

    /// The next states, and whether each came of a crash.
    fn steps(&self) -> Vec<(Self, bool)> {
        let mut steps = Vec::new();
        for index in 0..HOSTS {
            self.step_host(index, &mut |next| steps.push((next, false)));
            self.crash(index, &mut |next| steps.push((next, true)));
        }
        steps
    }

    fn crash(&self, index: usize, add: &mut dyn FnMut(Self)) {
        let has_begun = match &self.hosts[index].phase {
            Phase::Idle | Phase::Crashed { .. } => return,
            Phase::Joining { .. } | Phase::Withdrawing | Phase::LeavingUnchanged { .. } => false,
            Phase::Active | Phase::Ending(_) | Phase::Working => true,
        };
        if self.crashes < CRASHES_MAX {
            let mut next = *self;
            next.crashes += 1;
            next.enter(index, Phase::Crashed { has_begun });
            add(next);
        }
    }

    fn step_host(&self, index: usize, add: &mut dyn FnMut(Self)) {
        match &self.hosts[index].phase {
            Phase::Idle => self.open(index, add),
            Phase::Joining {
                has_put,
                step: None,
            } => self.look(index, add, &|next, dir| {
                let is_current = next.dir(index).is_some();
                let step = next_join(&dir.view(), *has_put, is_current);
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
            Phase::Ending(None) => self.look(index, add, &|_, dir| Self::choose(index, dir)),
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
        let number = match self.seen[0] {
            Some(dir) => dir.number,
            None if self.made < BALLOTS_MAX => {
                next.made += 1;
                let dir = Dir {
                    number: next.made,
                    ..Dir::default()
                };
                next.change(index, Some(dir));
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
        for lag in 0..=self.hosts[index].lag {
            let mut next = *self;
            // It never sees anything older later.
            next.hosts[index].lag = lag;
            match self.seen[usize::from(lag)].filter(|dir| dir.number == number) {
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
                    late.forget();
                    add(late);
                    next.forget_ballot(index);
                }
            }
            next.forget();
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
                if let Some(dir) = &mut next.seen[0] {
                    assert_eq!(
                        dir.number, next.hosts[index].number,
                        "it takes part in nothing"
                    );
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
    fn choose(index: usize, dir: Dir) -> Option<Phase> {
        let pending = match next(&dir.view(), &(index as u8), &Shadow) {
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
            Pending::ClaimRemoval => next.put(index, |dir| {
                dir.remover.get_or_insert(host);
            }),
            Pending::Retire => {
                if let Some(dir) = next.dir(index) {
                    assert_eq!(dir.took_part & !dir.left, 0, "removed before all had left");
                    let is_finished = dir.decision == Some(true) || dir.is_done;
                    assert!(is_finished, "removed before all was done");
                    next.change(index, None);
                }
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
                if next.seen[0].is_some_and(is_empty) {
                    next.change(index, None);
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

    /// Whether no host has to do anything more, and nothing is left.
    fn is_over(&self) -> bool {
        let is_idle = |host: &Host| host.phase == Phase::Idle;
        self.made == BALLOTS_MAX && self.seen[0].is_none() && self.hosts.iter().all(is_idle)
    }
}

/// All orders of the hosts.
const ORDERS: [[u8; HOSTS]; 6] = [
    [0, 1, 2],
    [0, 2, 1],
    [1, 0, 2],
    [1, 2, 0],
    [2, 0, 1],
    [2, 1, 0],
];

impl Dir {
    /// The same with other numbers of hosts: host `i` is `order[i]`.
    fn reordered(self, order: [u8; HOSTS]) -> Self {
        let hosts = |hosts: Hosts| -> Hosts {
            let of_host = |host: usize| (hosts >> host & 1) << order[host];
            (0..HOSTS).map(of_host).sum()
        };
        let host = |host: u8| order[usize::from(host)];
        Self {
            joined: hosts(self.joined),
            stopped: hosts(self.stopped),
            claimed: self.claimed.map(host),
            left: hosts(self.left),
            remover: self.remover.map(host),
            took_part: hosts(self.took_part),
            ..self
        }
    }
}

impl State {
    fn reordered(&self, order: [u8; HOSTS]) -> Self {
        let mut hosts = self.hosts;
        for (host, new) in self.hosts.iter().zip(order) {
            hosts[usize::from(new)] = *host;
        }
        Self {
            seen: self.seen.map(|dir| dir.map(|dir| dir.reordered(order))),
            hosts,
            ..*self
        }
    }

    /// The first of the states that differ only in which host is which.
    fn canonical(&self) -> Self {
        let all = ORDERS.map(|order| self.reordered(order));
        all.into_iter().min().unwrap_or(*self)
    }
}

/// All states, and from each those that it leads to without a crash.
fn explore() -> (Vec<State>, Vec<Vec<u32>>) {
    let mut states = vec![State::new()];
    let mut numbers = HashMap::from([(State::new(), 0_u32)]);
    let mut followers = Vec::new();
    let mut at = 0;
    while at < states.len() {
        let mut following = Vec::new();
        for (next, is_crash) in states[at].steps() {
            let number = *numbers.entry(next.canonical()).or_insert_with_key(|next| {
                next.check();
                states.push(*next);
                states.len() as u32 - 1
            });
            if !is_crash {
                following.push(number);
            }
        }
        followers.push(following);
        at += 1;
    }
    (states, followers)
}

/// How many of the states lead to an end, if all hosts that crashed come back and no more do.
fn count_that_end(states: &[State], followers: &[Vec<u32>]) -> usize {
    let mut before = vec![Vec::new(); states.len()];
    for (number, following) in followers.iter().enumerate() {
        for next in following {
            before[*next as usize].push(number as u32);
        }
    }
    let over = |number: &usize| states[*number].is_over();
    let mut queue: Vec<usize> = (0..states.len()).filter(over).collect();
    let mut is_known = vec![false; states.len()];
    queue.iter().for_each(|number| is_known[*number] = true);
    let mut count = 0;
    while let Some(number) = queue.pop() {
        count += 1;
        for earlier in &before[number] {
            let earlier = *earlier as usize;
            if !std::mem::replace(&mut is_known[earlier], true) {
                queue.push(earlier);
            }
        }
    }
    count
}

#[test]
fn three_hosts_that_crash_and_see_old_listings_keep_all_invariants_and_come_to_an_end() {
    let (states, followers) = explore();
    println!("{} states", states.len());
    assert_eq!(count_that_end(&states, &followers), states.len());
}
