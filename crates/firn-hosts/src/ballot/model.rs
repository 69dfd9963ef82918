//! All interleavings of three hosts at ballots of one name, with crashes and old listings.
//!
//! A state is what the server has and how far each host is. Each step is one call that changes the server, or one look
//! that chooses it: other hosts act between a look and the action that comes of it. The decisions are those of the
//! product ([`next`], [`next_join`], [`next_decision`]); the models only do what they say. There is one for each
//! [`Presence`].
//!
//! * A host may crash before and after each action, once or twice. Its locks end with it.
//! * A listing may be one or two changes of other hosts old. It has all that came before the host's own last change.
//!   Locks, and whether a directory has its name, are asked of the server.
//! * A put into a directory that was removed meanwhile is lost, and says nothing of it. A host that has it open may find
//!   it empty but for that.
//! * A directory is renamed by its name: that may lead to a later one.
//!
//! Hosts are alike: of states that differ only in which host is which, one is looked at.

use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;

use super::*;

mod kept;
mod living;

const HOSTS: usize = 3;
/// Ballots under the same name, one after the other.
const BALLOTS_MAX: u8 = 2;

/// A set of hosts, as bits.
type Hosts = u8;

fn set(hosts: Hosts) -> BTreeSet<u8> {
    (0..HOSTS as u8)
        .filter(|host| hosts & (1 << host) != 0)
        .collect()
}

/// The set after renumbering: host `i` becomes `order[i]`.
fn reordered(hosts: Hosts, order: [u8; HOSTS]) -> Hosts {
    let of_host = |host: usize| (hosts >> host & 1) << order[host];
    (0..HOSTS).map(of_host).sum()
}

/// A state of a model.
trait Model: Copy + Debug + Ord + Hash {
    /// Nothing is there.
    fn new() -> Self;
    /// The next states, and whether each came of a crash.
    fn steps(&self) -> Vec<(Self, bool)>;
    /// Panics where something does not hold that must hold in every state.
    fn check(&self);
    /// Whether no host has to do anything more, and nothing is left.
    fn is_over(&self) -> bool;
    /// The state after renumbering the hosts.
    fn reordered(&self, order: [u8; HOSTS]) -> Self;
}

/// What has the name of the ballot, and what hosts may see of that: `STATES` states of it, the present one included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct History<D, const STATES: usize> {
    /// Now and before the last changes, newest first.
    seen: [Option<D>; STATES],
    /// How many changes of others the next listing of each host may miss.
    lags: [u8; HOSTS],
}

impl<D: Copy, const STATES: usize> Default for History<D, STATES> {
    fn default() -> Self {
        Self {
            seen: [None; STATES],
            lags: [0; HOSTS],
        }
    }
}

impl<D: Copy + PartialEq, const STATES: usize> History<D, STATES> {
    fn current(&self) -> Option<D> {
        self.seen[0]
    }

    fn current_mut(&mut self) -> Option<&mut D> {
        self.seen[0].as_mut()
    }

    fn lag_of(&self, host: usize) -> u8 {
        self.lags[host]
    }

    /// Puts another directory in the place of the last one, by a host.
    fn change(&mut self, host: usize, dir: Option<D>) {
        if self.seen[0] == dir {
            return self.note_asked(host);
        }
        self.seen.rotate_right(1);
        self.seen[0] = dir;
        for lag in &mut self.lags {
            *lag = (*lag + 1).min(STATES as u8 - 1);
        }
        self.note_asked(host);
    }

    /// A host has asked the server to change the directory: its next listing is a new one.
    fn note_asked(&mut self, host: usize) {
        self.lags[host] = 0;
        self.forget();
    }

    /// What a host sees whose listing is `lag` changes late. It never sees an older state later.
    fn look(&mut self, host: usize, lag: u8) -> Option<D> {
        let seen = self.seen[usize::from(lag)];
        self.lags[host] = lag;
        self.forget();
        seen
    }

    /// Forgets what no host can see any more.
    fn forget(&mut self) {
        let lag = self.lags.iter().copied().max().unwrap_or(0);
        self.seen[usize::from(lag) + 1..].fill(None);
    }

    fn reordered(&self, order: [u8; HOSTS], reorder: &dyn Fn(D) -> D) -> Self {
        let mut lags = self.lags;
        for (lag, new) in self.lags.iter().zip(order) {
            lags[usize::from(new)] = *lag;
        }
        Self {
            seen: self.seen.map(|dir| dir.map(reorder)),
            lags,
        }
    }
}

/// The directory of a ballot.
trait Directory: Copy + PartialEq {
    /// Which ballot of its name it is of, from 1 on.
    fn number(&self) -> u8;
    /// The directory after renumbering the hosts.
    fn reordered(self, order: [u8; HOSTS]) -> Self;
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Host<P> {
    phase: P,
    /// The ballot whose directory it has open; none is 0.
    number: u8,
}

/// What the server has, and how far each host is: phases `P`, and `CLAIMS` claims on each ballot that may be locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct World<D, P, const CLAIMS: usize, const STATES: usize> {
    /// What has the name of the ballot.
    history: History<D, STATES>,
    /// Locked claims of each ballot, by the host that holds the lock.
    locks: [[Option<u8>; CLAIMS]; BALLOTS_MAX as usize],
    hosts: [Host<P>; HOSTS],
    /// Ballots that were made.
    made: u8,
    crashes: u8,
}

impl<D: Directory, P: Copy + Default, const CLAIMS: usize, const STATES: usize>
    World<D, P, CLAIMS, STATES>
{
    /// Nothing is there, and no host has begun.
    fn empty() -> Self {
        Self {
            history: History::default(),
            locks: [[None; CLAIMS]; BALLOTS_MAX as usize],
            hosts: [Host::default(); HOSTS],
            made: 0,
            crashes: 0,
        }
    }

    /// The directory that a host has open, if it has its name.
    fn dir(&self, host: usize) -> Option<D> {
        let number = self.hosts[host].number;
        self.history.current().filter(|dir| dir.number() == number)
    }

    /// A host changes the directory that it has open. Where that has no name any more the change is lost.
    fn put(&mut self, host: usize, put: impl FnOnce(&mut D)) {
        match self.dir(host) {
            Some(mut dir) => {
                put(&mut dir);
                self.history.change(host, Some(dir));
            }
            None => self.history.note_asked(host),
        }
    }

    fn enter(&mut self, host: usize, phase: P) {
        self.hosts[host].phase = phase;
    }

    /// A host has nothing to do with the ballot any more.
    fn forget_ballot(&mut self, host: usize) {
        self.unlock(host);
        self.hosts[host] = Host::default();
    }

    /// Locks a claim on the ballot whose directory a host has open, and makes its next listing a new one; false:
    /// another host has it locked.
    fn lock(&mut self, host: usize, claim: usize) -> bool {
        let number = usize::from(self.hosts[host].number);
        let locked = &mut self.locks[number - 1][claim];
        if locked.is_some() {
            return false;
        }
        *locked = Some(host as u8);
        self.history.note_asked(host);
        true
    }

    fn unlock(&mut self, host: usize) {
        for claim in self.locks.iter_mut().flatten() {
            claim.take_if(|by| *by == host as u8);
        }
    }

    /// The world after renumbering the hosts.
    fn renumbered(&self, order: [u8; HOSTS]) -> Self {
        let mut hosts = self.hosts;
        for (host, new) in self.hosts.iter().zip(order) {
            hosts[usize::from(new)] = *host;
        }
        let host = |by: Option<u8>| by.map(|host| order[usize::from(host)]);
        Self {
            history: self.history.reordered(order, &|dir| dir.reordered(order)),
            locks: self.locks.map(|of_one| of_one.map(host)),
            hosts,
            ..*self
        }
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

/// The first of the states that differ only in which host is which.
fn canonical<S: Model>(state: &S) -> S {
    let all = ORDERS.map(|order| state.reordered(order));
    all.into_iter().min().unwrap_or(*state)
}

/// All states, and from each those that it leads to without a crash.
fn explore<S: Model>() -> (Vec<S>, Vec<Vec<u32>>) {
    let mut states = vec![S::new()];
    let mut numbers = HashMap::from([(S::new(), 0_u32)]);
    let mut followers = Vec::new();
    let mut at = 0;
    while at < states.len() {
        let mut following = Vec::new();
        for (next, is_crash) in states[at].steps() {
            let number = *numbers.entry(canonical(&next)).or_insert_with_key(|next| {
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
fn count_that_end<S: Model>(states: &[S], followers: &[Vec<u32>]) -> usize {
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

/// Looks at all states of a model, and that each leads to an end.
fn explore_to_the_end<S: Model>() {
    let (states, followers) = explore::<S>();
    println!("{} states", states.len());
    assert_eq!(count_that_end(&states, &followers), states.len());
}
