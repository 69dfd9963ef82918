//! Model check: all interleavings of three hosts at ballots of one name, with crashes and outdated listings.
//!
//! A *ballot* is one decision of several hosts, taken by creating files in a shared directory.
//!
//! A state has the content of the server and the phase of each host. A step is either one call that changes the server,
//! or one listing after which a host chooses its next call. So other hosts may act between a host's listing and the
//! call that follows from it. The choices are made by the functions of the product ([`next`], [`next_join`],
//! [`next_decision`]); a model only carries them out. There is one model for each [`Participation`].
//!
//! Assumptions
//! * A host may crash before and after each call. The number of crashes is bounded. A crash frees the host's locks.
//! * A listing may miss the last one or two changes of other hosts. It has all changes before the host's own last
//!   change. Locks are never outdated, nor is the answer whether a directory still has its name.
//! * A put into a directory that was removed meanwhile is lost without an error. A host that has the removed directory
//!   open may list it as empty but for its own puts.
//! * A directory is renamed by its name, which may lead to a later directory.
//!
//! All hosts have the same role. Of states that differ only in the numbering of the hosts, only one is explored.

use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;

use super::*;

mod kept;
mod living;

const HOSTS: usize = 3;
/// Number of ballots under the same name, one after the other.
const BALLOTS_MAX: u8 = 2;

/// A set of hosts, as bits.
type Hosts = u8;

/// Returns the hosts of a set.
fn hosts_in(hosts: Hosts) -> BTreeSet<u8> {
    (0..HOSTS as u8)
        .filter(|host| hosts & (1 << host) != 0)
        .collect()
}

/// Returns the set after renumbering: host `i` becomes `order[i]`.
fn reordered(hosts: Hosts, order: [u8; HOSTS]) -> Hosts {
    let of_host = |host: usize| (hosts >> host & 1) << order[host];
    (0..HOSTS).map(of_host).sum()
}

/// A state to which one step of a model leads.
struct NextState<S> {
    state: S,
    /// Whether the step is the crash of a host.
    is_crash: bool,
}

/// A state of a model.
trait Model: Copy + Debug + Ord + Hash {
    /// Returns the state at the start: no directory exists.
    fn new() -> Self;
    /// Returns the states to which one step leads.
    fn steps(&self) -> Vec<NextState<Self>>;
    /// Panics if an invariant does not hold in this state.
    fn check(&self);
    /// Returns whether this state is an end: every host is finished, and no directory is left that must be removed.
    fn is_over(&self) -> bool;
    /// Returns the state after renumbering the hosts.
    fn reordered(&self, order: [u8; HOSTS]) -> Self;
}

/// The present state of the ballot's directory and its latest earlier states, `STATES` in all. A host's listing may
/// return any of them that the host is allowed to see, so a listing may be outdated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct History<D, const STATES: usize> {
    /// The present state and the earlier ones, newest first. `None` stands for no directory.
    recent_states: [Option<D>; STATES],
    /// For each host: the largest number of the latest changes of other hosts that its next listing may miss.
    missable: [u8; HOSTS],
}

impl<D: Copy, const STATES: usize> Default for History<D, STATES> {
    fn default() -> Self {
        Self {
            recent_states: [None; STATES],
            missable: [0; HOSTS],
        }
    }
}

impl<D: Copy + PartialEq, const STATES: usize> History<D, STATES> {
    fn current(&self) -> Option<D> {
        self.recent_states[0]
    }

    fn current_mut(&mut self) -> Option<&mut D> {
        self.recent_states[0].as_mut()
    }

    fn missable_changes(&self, host: usize) -> u8 {
        self.missable[host]
    }

    /// Records that a host has replaced the present directory by `dir`.
    fn change(&mut self, host: usize, dir: Option<D>) {
        if self.recent_states[0] == dir {
            return self.note_call(host);
        }
        self.recent_states.rotate_right(1);
        self.recent_states[0] = dir;
        for missed in &mut self.missable {
            *missed = (*missed + 1).min(STATES as u8 - 1);
        }
        self.note_call(host);
    }

    /// Records that a host has called the server to change the directory. Its next listing misses no change.
    fn note_call(&mut self, host: usize) {
        self.missable[host] = 0;
        self.forget_unseen();
    }

    /// Returns the directory in a listing of a host that misses the last `missed` changes. Later listings of the host
    /// miss at most as many.
    fn list(&mut self, host: usize, missed: u8) -> Option<D> {
        let listed = self.recent_states[usize::from(missed)];
        self.missable[host] = missed;
        self.forget_unseen();
        listed
    }

    /// Drops the old states that no listing can return any more.
    fn forget_unseen(&mut self) {
        let missed = self.missable.iter().copied().max().unwrap_or(0);
        self.recent_states[usize::from(missed) + 1..].fill(None);
    }

    /// Returns the history after renumbering the hosts. `reorder` renumbers the hosts in one directory.
    fn reordered(&self, order: [u8; HOSTS], reorder: &dyn Fn(D) -> D) -> Self {
        let mut missable = self.missable;
        for (missed, new) in self.missable.iter().zip(order) {
            missable[usize::from(new)] = *missed;
        }
        Self {
            recent_states: self.recent_states.map(|dir| dir.map(reorder)),
            missable,
        }
    }
}

/// The content of a ballot's directory at one time.
trait Directory: Copy + PartialEq {
    /// Returns the number of the ballot, counted from 1 among the ballots of the name.
    fn number(&self) -> u8;
    /// Returns the directory after renumbering the hosts.
    fn reordered(self, order: [u8; HOSTS]) -> Self;
}

/// One host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Host<P> {
    phase: P,
    /// Number of the ballot whose directory the host has open; 0 for none.
    number: u8,
}

/// A state of the model: the directory and the locks on the server, and the phase of each host.
///
/// `D` is the content of the directory, and `P` is the phase of a host. `CLAIMS` is the number of claims of a ballot
/// that can be locked. `STATES` is the number of states that a listing may return.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct ModelState<D, P, const CLAIMS: usize, const STATES: usize> {
    /// The directory that has the name of the ballot.
    history: History<D, STATES>,
    /// For each ballot and claim: the host that has locked it.
    locks: [[Option<u8>; CLAIMS]; BALLOTS_MAX as usize],
    hosts: [Host<P>; HOSTS],
    /// Number of ballots that were created so far.
    ballots_created: u8,
    /// Number of crashes so far.
    crashes: u8,
}

impl<D: Directory, P: Copy + Default, const CLAIMS: usize, const STATES: usize>
    ModelState<D, P, CLAIMS, STATES>
{
    /// Returns the start: no directory exists, and no host has begun.
    fn empty() -> Self {
        Self {
            history: History::default(),
            locks: [[None; CLAIMS]; BALLOTS_MAX as usize],
            hosts: [Host::default(); HOSTS],
            ballots_created: 0,
            crashes: 0,
        }
    }

    /// Returns the directory that a host has open, if the directory still has its name.
    fn dir(&self, host: usize) -> Option<D> {
        let number = self.hosts[host].number;
        self.history.current().filter(|dir| dir.number() == number)
    }

    /// Changes the directory that a host has open. The change is lost if the directory no longer has its name.
    fn put(&mut self, host: usize, put: impl FnOnce(&mut D)) {
        match self.dir(host) {
            Some(mut dir) => {
                put(&mut dir);
                self.history.change(host, Some(dir));
            }
            None => self.history.note_call(host),
        }
    }

    /// Sets the phase of a host.
    fn enter(&mut self, host: usize, phase: P) {
        self.hosts[host].phase = phase;
    }

    /// Ends a host's work for the ballot, and frees the host's locks.
    fn forget_ballot(&mut self, host: usize) {
        self.unlock(host);
        self.hosts[host] = Host::default();
    }

    /// Locks a claim on the ballot whose directory a host has open. Returns false if a host has locked it already.
    /// A lock makes the host's next listing current.
    fn lock(&mut self, host: usize, claim: usize) -> bool {
        let number = usize::from(self.hosts[host].number);
        let locked = &mut self.locks[number - 1][claim];
        if locked.is_some() {
            return false;
        }
        *locked = Some(host as u8);
        self.history.note_call(host);
        true
    }

    /// Frees all locks of a host.
    fn unlock(&mut self, host: usize) {
        for claim in self.locks.iter_mut().flatten() {
            claim.take_if(|by| *by == host as u8);
        }
    }

    /// Returns the state after renumbering the hosts.
    fn renumbered(&self, order: [u8; HOSTS]) -> Self {
        let mut hosts = self.hosts;
        for (host, new) in self.hosts.iter().zip(order) {
            hosts[usize::from(new)] = *host;
        }
        let renumber = |holder: Option<u8>| holder.map(|host| order[usize::from(host)]);
        Self {
            history: self.history.reordered(order, &|dir| dir.reordered(order)),
            locks: self.locks.map(|claims| claims.map(renumber)),
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

/// Returns the smallest of the states that differ only in the numbers of hosts.
fn canonical<S: Model>(state: &S) -> S {
    let renumbered = ORDERS.map(|order| state.reordered(order));
    renumbered.into_iter().min().unwrap_or(*state)
}

/// Explores all states of the model that can be reached, and checks the invariants in each. Returns the states, and for
/// each the indexes of the states to which a step without a crash leads.
fn explore<S: Model>() -> (Vec<S>, Vec<Vec<u32>>) {
    let mut states = vec![S::new()];
    let mut indexes = HashMap::from([(S::new(), 0_u32)]);
    let mut successors = Vec::new();
    let mut explored_count = 0;
    while explored_count < states.len() {
        let mut successors_of_state = Vec::new();
        for NextState { state, is_crash } in states[explored_count].steps() {
            let index = *indexes
                .entry(canonical(&state))
                .or_insert_with_key(|new_state| {
                    new_state.check();
                    states.push(*new_state);
                    states.len() as u32 - 1
                });
            if !is_crash {
                successors_of_state.push(index);
            }
        }
        successors.push(successors_of_state);
        explored_count += 1;
    }
    (states, successors)
}

/// Returns how many of the states lead to an end if no more hosts crash and all crashed hosts come back. At an end,
/// every host is finished, and nothing is left to remove. `successors` are those of [`explore`].
fn count_that_end<S: Model>(states: &[S], successors: &[Vec<u32>]) -> usize {
    let mut predecessors = vec![Vec::new(); states.len()];
    for (index, successors_of_state) in successors.iter().enumerate() {
        for successor in successors_of_state {
            predecessors[*successor as usize].push(index as u32);
        }
    }
    // Search backwards from the states that are an end.
    let mut queue: Vec<usize> = (0..states.len())
        .filter(|index| states[*index].is_over())
        .collect();
    let mut was_queued = vec![false; states.len()];
    for index in &queue {
        was_queued[*index] = true;
    }
    let mut count = 0;
    while let Some(index) = queue.pop() {
        count += 1;
        for &predecessor in &predecessors[index] {
            let predecessor = predecessor as usize;
            if !was_queued[predecessor] {
                was_queued[predecessor] = true;
                queue.push(predecessor);
            }
        }
    }
    count
}

/// Explores all states of a model, and asserts that each leads to an end.
fn explore_to_the_end<S: Model>() {
    let (states, successors) = explore::<S>();
    println!("{} states", states.len());
    assert_eq!(count_that_end(&states, &successors), states.len());
}
