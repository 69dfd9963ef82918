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
const MISSED_CHANGES_MAX: usize = 2;
/// Largest number of crashes in one sequence of steps. It bounds the number of states.
const CRASHES_MAX: u8 = 2;
/// Name of the only unit of work.
const UNDO: &str = "undo";

/// Protocol of the model. A commit needs no further work; after an abort all hosts stop, and then one host undoes the
/// changes.
struct UndoProtocol;

impl Protocol for UndoProtocol {
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
    /// The decision: `true` to commit, `false` to abort.
    decision: Option<bool>,
    stopped: Hosts,
    /// The host that has claimed the undo.
    claimed: Option<u8>,
    /// Whether the undo is done.
    is_done: bool,
    left: Hosts,
    /// Hosts that began to make changes: they joined, and then saw the ballot open. A host in `joined` may still
    /// withdraw instead. Only the checks use this; no host reads it.
    took_part: Hosts,
}

impl Dir {
    /// Returns what a host sees of the ballot, a decision of several hosts, if it lists the directory in this state.
    ///
    /// `whole_locked_by` is that host, if it has locked the whole ballot to remove the directory, and `None` otherwise.
    fn view(&self, whole_locked_by: Option<u8>) -> View<u8, bool> {
        let mut claimed = BTreeMap::new();
        if let Some(host) = self.claimed {
            let undo = Unit::Part(UNDO.to_owned());
            claimed.insert(undo.claim(), Claimant::Host(host));
        }
        if let Some(host) = whole_locked_by {
            claimed.insert(WHOLE.to_owned(), Claimant::Host(host));
        }
        let mut done = BTreeSet::new();
        if self.is_done {
            done.insert(UNDO.to_owned());
        }
        View {
            joined: hosts_in(self.joined),
            is_closing: false,
            decision: self.decision,
            stopped: hosts_in(self.stopped),
            claimed,
            done,
            left: hosts_in(self.left),
        }
    }
}

/// The call that a host makes next. The host chose it from its last listing ([`Action`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Pending {
    Stop,
    /// Claims the undo.
    Claim,
    /// Begins the undo.
    Work,
    Leave,
    /// Locks the whole ballot, to remove its directory.
    ClaimRemoval,
    /// First step of the removal: checks that the directory still has its name.
    Retire,
    /// Second step of the removal: renames the directory that now has the name.
    Rename,
    /// Removes the directory that now has the name, if it is empty.
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
        /// Whether the host has put the file that says that it takes part.
        has_created_file: bool,
        /// The step that followed from the last listing.
        step: Option<JoinStep>,
    },
    /// The host makes changes that an abort undoes.
    Active,
    /// The host waits for a decision or works after it. It makes the chosen call, or lists the directory if there is
    /// none (`None`).
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
type State = ModelState<Dir, Phase, 1, { MISSED_CHANGES_MAX + 1 }>;
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

    /// Passes the state after a crash of a host to `push_state`. Does nothing if the host is idle or has crashed, or
    /// after [`CRASHES_MAX`] crashes.
    ///
    /// A host that had locked the whole ballot to remove its directory never comes back, so other hosts must finish the
    /// removal.
    fn crash(&self, index: usize, push_state: &mut dyn FnMut(Self)) {
        let has_begun = match &self.hosts[index].phase {
            Phase::Idle | Phase::Crashed { .. } | Phase::Gone => return,
            Phase::Joining { .. } | Phase::Withdrawing | Phase::LeavingUnchanged { .. } => false,
            Phase::Active | Phase::Ending(_) | Phase::Working => true,
        };
        if self.crashes == CRASHES_MAX {
            return;
        }
        let mut next_state = *self;
        next_state.crashes += 1;
        let phase = if self.locks_whole(index) {
            Phase::Gone
        } else {
            Phase::Crashed { has_begun }
        };
        next_state.unlock(index);
        next_state.enter(index, phase);
        push_state(next_state);
    }

    /// Passes each state to `push_state` to which a host's next call or listing of the ballot's directory leads. In a
    /// phase without a chosen step the host lists, and otherwise it makes the chosen call.
    fn step_host(&self, index: usize, push_state: &mut dyn FnMut(Self)) {
        match &self.hosts[index].phase {
            Phase::Gone => {}
            Phase::Idle => self.open_or_create_dir(index, push_state),
            Phase::Joining {
                has_created_file,
                step: None,
            } => self.list_and_choose(index, push_state, &|next_state, dir| {
                let is_open = dir.view(None).is_open() && next_state.dir(index).is_some();
                let step = next_join(is_open, *has_created_file);
                Some(match step {
                    // The host checks whether the last ballot is over, and removes it then.
                    JoinStep::Refused => Phase::Ending(None),
                    step => Phase::Joining {
                        has_created_file: *has_created_file,
                        step: Some(step),
                    },
                })
            }),
            Phase::Joining {
                step: Some(step), ..
            } => self.join(index, *step, push_state),
            Phase::Active => self.decide(index, push_state),
            Phase::Ending(None) => self.list_and_choose(index, push_state, &|next_state, dir| {
                next_state.choose_call(index, dir)
            }),
            Phase::Ending(Some(pending)) => self.make_call(index, *pending, push_state),
            Phase::Working => {
                let mut next_state = *self;
                next_state.put(index, |dir| dir.is_done = true);
                next_state.enter(index, Phase::Ending(None));
                push_state(next_state);
            }
            Phase::Crashed { has_begun } => self.recover(index, *has_begun, push_state),
            Phase::Withdrawing => {
                let mut next_state = *self;
                next_state.put(index, |dir| dir.joined &= !(1 << index));
                next_state.forget_ballot(index);
                push_state(next_state);
            }
            Phase::LeavingUnchanged { has_stopped } => {
                push_state(self.leave_unchanged(index, *has_stopped));
            }
        }
    }

    /// Returns the state after a host that has changed nothing has recorded that it has stopped, or, if it has stopped
    /// already, that it has left.
    fn leave_unchanged(&self, index: usize, has_stopped: bool) -> Self {
        let mut next_state = *self;
        if has_stopped {
            next_state.put(index, |dir| dir.left |= 1 << index);
            next_state.enter(index, Phase::Ending(None));
        } else {
            next_state.put(index, |dir| dir.stopped |= 1 << index);
            next_state.enter(index, Phase::LeavingUnchanged { has_stopped: true });
        }
        next_state
    }

    /// Passes the state to `push_state` after a host has opened the ballot's directory, or has created it if there is
    /// none. Does nothing if it would have to be created, but all ballots of the model were created already.
    fn open_or_create_dir(&self, index: usize, push_state: &mut dyn FnMut(Self)) {
        let mut next_state = *self;
        let number = match self.history.current() {
            Some(dir) => dir.number,
            None if self.ballots_created < BALLOTS_MAX => {
                next_state.ballots_created += 1;
                let dir = Dir {
                    number: next_state.ballots_created,
                    ..Dir::default()
                };
                next_state.history.change(index, Some(dir));
                next_state.ballots_created
            }
            None => return,
        };
        next_state.hosts[index].number = number;
        let joining = Phase::Joining {
            has_created_file: false,
            step: None,
        };
        next_state.enter(index, joining);
        push_state(next_state);
    }

    /// Passes the states to `push_state` after a host has listed its directory, one for each state that the listing may
    /// return.
    ///
    /// `choose` returns the phase that follows from the listed directory. If it returns `None`, or if the directory is
    /// gone, the host has no more work for the ballot.
    fn list_and_choose(
        &self,
        index: usize,
        push_state: &mut dyn FnMut(Self),
        choose: &dyn Fn(&Self, Dir) -> Option<Phase>,
    ) {
        let number = self.hosts[index].number;
        for missed in 0..=self.history.missable_changes(index) {
            let mut next_state = *self;
            let listed_dir = next_state.history.list(index, missed);
            match listed_dir.filter(|dir| dir.number == number) {
                Some(dir) => {
                    let phase = choose(&next_state, dir);
                    next_state.enter_or_forget(index, phase);
                }
                // An outdated listing from before the directory was created tells the host nothing, so it is skipped.
                None if missed > 0 => continue,
                // The directory is being removed, with two outcomes: the listing has no files but the host's own, or it
                // fails.
                None => {
                    let mut partly_removed = next_state;
                    let phase = choose(&partly_removed, self.listed_while_removed(index));
                    partly_removed.enter_or_forget(index, phase);
                    push_state(partly_removed);
                    next_state.forget_ballot(index);
                }
            }
            push_state(next_state);
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
    fn listed_while_removed(&self, index: usize) -> Dir {
        let has_created_file = matches!(
            self.hosts[index].phase,
            Phase::Joining {
                has_created_file: true,
                ..
            }
        );
        Dir {
            number: self.hosts[index].number,
            joined: Hosts::from(has_created_file) << index,
            ..Dir::default()
        }
    }

    /// Passes the state to `push_state` after a host has taken `step` to join the ballot. The host puts its file,
    /// withdraws the file, begins to make changes, or finds that it is refused.
    fn join(&self, index: usize, step: JoinStep, push_state: &mut dyn FnMut(Self)) {
        let mut next_state = *self;
        match step {
            JoinStep::Put => {
                next_state.put(index, |dir| dir.joined |= 1 << index);
                let joining = Phase::Joining {
                    has_created_file: true,
                    step: None,
                };
                next_state.enter(index, joining);
            }
            JoinStep::Withdraw => {
                next_state.put(index, |dir| dir.joined &= !(1 << index));
                next_state.forget_ballot(index);
            }
            JoinStep::Joined => {
                let number = next_state.hosts[index].number;
                if let Some(dir) = next_state.history.current_mut() {
                    assert_eq!(dir.number, number, "it takes part in nothing");
                    dir.took_part |= 1 << index;
                }
                next_state.enter(index, Phase::Active);
            }
            // The host checks whether the last ballot is over, and removes it then.
            JoinStep::Refused => next_state.enter(index, Phase::Ending(None)),
        }
        push_state(next_state);
    }

    /// Passes the states to `push_state` after a host has tried to decide, once for an abort and once for a commit. An
    /// earlier decision remains.
    fn decide(&self, index: usize, push_state: &mut dyn FnMut(Self)) {
        for commit in [false, true] {
            let mut next_state = *self;
            next_state.put(index, |dir| {
                dir.decision.get_or_insert(commit);
            });
            next_state.enter(index, Phase::Ending(None));
            push_state(next_state);
        }
    }

    /// Returns the phase that follows if a host lists its directory as `dir`. The product's function [`next`], which
    /// this model checks, chooses the call. Returns `None` if the host has no more work for the ballot.
    fn choose_call(&self, index: usize, dir: Dir) -> Option<Phase> {
        let whole_locked_by = self.locks_whole(index).then_some(index as u8);
        let pending = match next(&dir.view(whole_locked_by), &(index as u8), &UndoProtocol) {
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

    /// Passes the state to `push_state` after a host has made the call that it chose from its last listing. Other hosts
    /// may have acted since that listing, so the call may come too late.
    fn make_call(&self, index: usize, pending: Pending, push_state: &mut dyn FnMut(Self)) {
        let host = index as u8;
        let mut next_state = *self;
        // `None`: the host has no more work for the ballot.
        let mut next_phase = Some(Phase::Ending(None));
        match pending {
            Pending::Stop => next_state.put(index, |dir| dir.stopped |= 1 << host),
            // The claim of another host, if there is one, remains: a claim is put once.
            Pending::Claim => next_state.put(index, |dir| {
                dir.claimed.get_or_insert(host);
            }),
            Pending::Work => next_phase = Some(Phase::Working),
            Pending::Leave => next_state.put(index, |dir| dir.left |= 1 << host),
            Pending::ClaimRemoval => {
                if !next_state.lock(index, WHOLE_CLAIM) {
                    // Another host removes the directory.
                    next_phase = None;
                }
            }
            Pending::Retire => {
                let has_name = next_state.dir(index).is_some();
                next_phase = has_name.then_some(Phase::Ending(Some(Pending::Rename)));
            }
            Pending::Rename => {
                let dir = next_state.dir(index).expect("another ballot is removed");
                assert_eq!(dir.took_part & !dir.left, 0, "removed before all had left");
                let is_finished = dir.decision == Some(true) || dir.is_done;
                assert!(is_finished, "removed before all was done");
                next_state.history.change(index, None);
                next_phase = None;
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
                if next_state.history.current().is_some_and(is_empty) {
                    next_state.history.change(index, None);
                }
                next_phase = None;
            }
        }
        next_state.enter_or_forget(index, next_phase);
        push_state(next_state);
    }

    /// Passes the states to `push_state` after a crashed host has come back and listed the directory of its ballot, a
    /// decision of several hosts. `has_begun` says whether its transaction had begun.
    ///
    /// A host whose transaction had begun then decides to abort, unless there is a decision. (The model has no prepared
    /// transactions, which could still commit.) A host that had changed nothing withdraws before a decision, and leaves
    /// after one.
    fn recover(&self, index: usize, has_begun: bool, push_state: &mut dyn FnMut(Self)) {
        let takes_part = |dir: Dir| dir.joined & !dir.left & (1 << index) != 0;
        let mut next_states = Vec::new();
        self.list_and_choose(
            index,
            &mut |next_state| next_states.push(next_state),
            &|_, dir| {
                if has_begun || !takes_part(dir) {
                    return Some(Phase::Ending(None));
                }
                Some(match dir.decision {
                    None => Phase::Withdrawing,
                    Some(_) => Phase::LeavingUnchanged { has_stopped: false },
                })
            },
        );
        for mut next_state in next_states {
            let is_ending = next_state.hosts[index].phase == Phase::Ending(None);
            if has_begun && is_ending && next_state.dir(index).is_some_and(takes_part) {
                // The transaction was not prepared, so it is aborted.
                next_state.put(index, |dir| {
                    dir.decision.get_or_insert(false);
                });
            }
            push_state(next_state);
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

    fn steps(&self) -> Vec<NextState<Self>> {
        let mut steps = Vec::new();
        for index in 0..HOSTS {
            self.step_host(index, &mut |next_state| {
                steps.push(NextState {
                    state: next_state,
                    is_crash: false,
                })
            });
            self.crash(index, &mut |next_state| {
                steps.push(NextState {
                    state: next_state,
                    is_crash: true,
                })
            });
        }
        steps
    }

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
        self.ballots_created == BALLOTS_MAX && is_gone && self.hosts.iter().all(is_idle)
    }

    fn reordered(&self, order: [u8; HOSTS]) -> Self {
        self.renumbered(order)
    }
}

#[test]
fn three_hosts_that_crash_and_see_old_listings_keep_all_invariants_and_come_to_an_end() {
    explore_to_the_end::<State>();
}
