//! Model of a ballot whose hosts take part only while they live ([`Participation::Living`]). An example is a file that
//! hosts write to as logs, and that any host *flattens* once it has no writers: copies the logs into the plain file.
//!
//! A *ballot* is one decision of several hosts, taken by creating files in a shared directory. Here the decision is
//! that all writers are gone. The *units* of work, which one host does each, are a cut, the parts, and the end.
//!
//! A host that crashed comes back without any memory, and removes the file by which it took part. Other hosts see it as
//! dead from its crash until then. The second ballot is created and written to, but never flattened. It shows whether
//! calls for the first ballot that come too late change the second one.

use super::*;

/// Largest number of changes of other hosts that a listing may miss.
const MISSED_CHANGES_MAX: usize = 1;
/// Largest number of crashes in one sequence of steps. It bounds the number of states.
const CRASHES_MAX: u8 = 1;
/// Units of work that several hosts may do at the same time.
const PARTS: [&str; 2] = ["0", "1"];
/// Name of the first unit, which excludes all other work.
const CUT: &str = "cut";
/// Name of the last unit, which excludes all other work.
const END: &str = "all";
/// Number of claims: one for each part, and one for the whole.
const CLAIMS: usize = PARTS.len() + 1;
const WHOLE_CLAIM: usize = PARTS.len();

/// Number of units of work: the cut, the parts, the end. The model numbers them in this order, because a state stores a
/// unit as a number; the product's functions know a unit by its name.
const UNITS: usize = PARTS.len() + 2;
const CUT_UNIT: u8 = 0;
const END_UNIT: u8 = UNITS as u8 - 1;

/// Protocol of the model: one host makes the cut, any hosts do the parts, and one host does the end.
struct Flattening;

impl Protocol for Flattening {
    type Decision = ();

    const PRESENCE: Participation = Participation::Living;

    fn plan(&self, (): &()) -> Plan {
        let parts = PARTS.map(|part| Unit::Part(part.to_owned()));
        Plan {
            stops_first: false,
            stages: vec![
                vec![Unit::Whole(CUT)],
                parts.to_vec(),
                vec![Unit::Whole(END)],
            ],
        }
    }
}

/// Returns the name of a unit of work.
fn unit_name(unit: u8) -> &'static str {
    match unit {
        CUT_UNIT => CUT,
        END_UNIT => END,
        part => PARTS[usize::from(part) - 1],
    }
}

/// Returns the number of a unit of work.
fn unit_number(unit: &Unit) -> u8 {
    let is_named = |number: &u8| unit_name(*number) == unit.name();
    (0..UNITS as u8).find(is_named).expect("a unit of the plan")
}

/// Returns the claim that a host must lock before it does a unit.
fn claim_index(unit: u8) -> usize {
    match unit {
        CUT_UNIT | END_UNIT => WHOLE_CLAIM,
        part => usize::from(part) - 1,
    }
}

/// Returns the name of a claim.
fn claim_name(claim: usize) -> String {
    match claim {
        WHOLE_CLAIM => WHOLE.to_owned(),
        part => Unit::Part(PARTS[part].to_owned()).claim(),
    }
}

/// The directory of a ballot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Dir {
    /// Number of the ballot, counted from 1 among the ballots of this name.
    number: u8,
    joined: Hosts,
    is_closing: bool,
    is_decided: bool,
    /// Units that are done, as bits.
    done: u8,
}

impl Dir {
    fn is_done(&self, unit: u8) -> bool {
        self.done & (1 << unit) != 0
    }

    fn is_all_done(&self) -> bool {
        (0..UNITS as u8).all(|unit| self.is_done(unit))
    }

    /// Returns whether a unit may be done: all units of earlier stages are done.
    fn may_begin(&self, unit: u8) -> bool {
        let earlier = match unit {
            CUT_UNIT => 0..0,
            END_UNIT => 0..END_UNIT,
            _ => 0..1,
        };
        earlier.into_iter().all(|unit| self.is_done(unit))
    }
}

/// The call that a host makes next, as its last listing made it choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Pending {
    Claim(u8),
    Work(u8),
    ClaimRemoval,
    Retire,
    /// Renames the directory that now has the name.
    Rename,
}

/// The phase of a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Phase {
    #[default]
    Idle,
    Joining(JoinStep),
    /// The host has put that it takes part, and must list the directory again.
    Joined,
    Writing,
    /// The host has written, or has found that it may not write.
    Withdrawing,
    /// The host wants a decision, after which it may flatten.
    Closing,
    PuttingClosing,
    Deciding,
    /// The host has seen a decision. It makes the call `pending`, or lists the directory if that is `None`.
    /// `locked_elsewhere` has a bit for each claim that another host had locked when this host tried to lock it.
    Ending {
        locked_elsewhere: u8,
        pending: Option<Pending>,
    },
    Working {
        locked_elsewhere: u8,
        unit: u8,
    },
    Crashed,
}

type State = ModelState<Dir, Phase, CLAIMS, { MISSED_CHANGES_MAX + 1 }>;

impl State {
    /// Frees all locks of a host, and then locks this claim for it. Returns false if another host has locked the claim.
    fn switch_lock_to(&mut self, host: usize, claim: usize) -> bool {
        self.unlock(host);
        self.lock(host, claim)
    }

    /// Returns what a host sees of the ballot, a decision of several hosts, if it lists the directory as `dir`.
    /// `locked_elsewhere` has a bit for each claim (the lock on a unit of work) that the host found locked by another
    /// host.
    fn view(&self, host: usize, dir: Dir, locked_elsewhere: u8) -> View<u8, ()> {
        let number = usize::from(self.hosts[host].number);
        let mut claimed = BTreeMap::new();
        for claim in 0..CLAIMS {
            if self.locks[number - 1][claim] == Some(host as u8) {
                claimed.insert(claim_name(claim), Claimant::Host(host as u8));
            } else if locked_elsewhere & (1 << claim) != 0 {
                claimed.insert(claim_name(claim), Claimant::Unknown);
            }
        }
        let done_units = (0..UNITS as u8).filter(|unit| dir.is_done(*unit));
        View {
            joined: hosts_in(dir.joined),
            is_closing: dir.is_closing,
            decision: dir.is_decided.then_some(()),
            stopped: BTreeSet::new(),
            claimed,
            done: done_units.map(|unit| unit_name(unit).to_owned()).collect(),
            left: BTreeSet::new(),
        }
    }

    /// Passes the state after a crash of a host to `push_state`. Does nothing if the host is idle or has crashed, or
    /// after [`CRASHES_MAX`] crashes.
    fn crash(&self, host: usize, push_state: &mut dyn FnMut(Self)) {
        let is_active = !matches!(self.hosts[host].phase, Phase::Idle | Phase::Crashed);
        if is_active && self.crashes < CRASHES_MAX {
            let mut next_state = *self;
            next_state.crashes += 1;
            next_state.unlock(host);
            next_state.enter(host, Phase::Crashed);
            push_state(next_state);
        }
    }

    /// Passes each state to `push_state` to which a host's next call or listing leads.
    fn step_host(&self, host: usize, push_state: &mut dyn FnMut(Self)) {
        let mut next_state = *self;
        match self.hosts[host].phase {
            Phase::Idle => return self.begin(host, push_state),
            Phase::Joining(step) => return self.join(host, step, push_state),
            Phase::Joined => {
                return self.list_and_choose(host, push_state, &|next_state, dir| {
                    let view = next_state.view(host, dir, 0);
                    let is_open = view.is_open() && next_state.dir(host).is_some();
                    Some(Phase::Joining(next_join(is_open, true)))
                });
            }
            Phase::Writing => next_state.enter(host, Phase::Withdrawing),
            Phase::Withdrawing => {
                next_state.put(host, |dir| dir.joined &= !(1 << host));
                if self.hosts[host].number < BALLOTS_MAX {
                    next_state.enter(host, Phase::Closing);
                } else {
                    next_state.forget_ballot(host);
                }
            }
            Phase::Closing => {
                return self.list_and_choose(host, push_state, &|next_state, dir| {
                    next_state.choose_closing_step(host, dir)
                });
            }
            Phase::PuttingClosing => {
                next_state.put(host, |dir| dir.is_closing = true);
                next_state.enter(host, Phase::Closing);
            }
            Phase::Deciding => {
                next_state.put(host, |dir| dir.is_decided = true);
                next_state.enter(host, Phase::Closing);
            }
            Phase::Ending {
                locked_elsewhere,
                pending: None,
            } => {
                return self.list_and_choose(host, push_state, &|next_state, dir| {
                    next_state.choose_call(host, dir, locked_elsewhere)
                });
            }
            Phase::Ending {
                locked_elsewhere,
                pending: Some(pending),
            } => next_state.make_call(host, locked_elsewhere, pending),
            Phase::Working {
                locked_elsewhere,
                unit,
            } => {
                next_state.put(host, |dir| dir.done |= 1 << unit);
                next_state.unlock(host);
                next_state.enter(host, ending(locked_elsewhere));
            }
            // The host comes back and withdraws what it had put.
            Phase::Crashed => {
                next_state.put(host, |dir| dir.joined &= !(1 << host));
                next_state.forget_ballot(host);
            }
        }
        push_state(next_state);
    }

    /// Passes the states to `push_state` that follow for an idle host: it begins to write to a file, or to flatten the
    /// file (to copy its logs into the plain file). A host flattens only if the ballot's directory exists; a writer
    /// creates the directory if there is none.
    ///
    /// Does nothing if the last ballot of the model exists, or if all ballots were created already.
    fn begin(&self, host: usize, push_state: &mut dyn FnMut(Self)) {
        let mut next_state = *self;
        match self.history.current() {
            Some(dir) if dir.number == BALLOTS_MAX => return,
            Some(dir) => {
                next_state.hosts[host].number = dir.number;
                let mut flattening = next_state;
                flattening.enter(host, Phase::Closing);
                push_state(flattening);
            }
            None if self.ballots_created < BALLOTS_MAX => {
                next_state.ballots_created += 1;
                let dir = Dir {
                    number: next_state.ballots_created,
                    ..Dir::default()
                };
                next_state.history.change(host, Some(dir));
                next_state.hosts[host].number = next_state.ballots_created;
            }
            None => return,
        }
        let is_open = true;
        let has_created_file = false;
        next_state.enter(host, Phase::Joining(next_join(is_open, has_created_file)));
        push_state(next_state);
    }

    /// Passes the state to `push_state` after a host has taken `step` to join.
    fn join(&self, host: usize, step: JoinStep, push_state: &mut dyn FnMut(Self)) {
        let mut next_state = *self;
        match step {
            JoinStep::Put => {
                next_state.put(host, |dir| dir.joined |= 1 << host);
                next_state.enter(host, Phase::Joined);
            }
            JoinStep::Joined => next_state.enter(host, Phase::Writing),
            JoinStep::Withdraw | JoinStep::Refused => next_state.enter(host, Phase::Withdrawing),
        }
        push_state(next_state);
    }

    /// Passes the states to `push_state` after a host has listed its directory, one for each state that the listing may
    /// return.
    ///
    /// `choose` returns the phase that follows from the listed directory, or `None` if the host has no more work for
    /// the ballot.
    fn list_and_choose(
        &self,
        host: usize,
        push_state: &mut dyn FnMut(Self),
        choose: &dyn Fn(&Self, Dir) -> Option<Phase>,
    ) {
        let number = self.hosts[host].number;
        for missed in 0..=self.history.missable_changes(host) {
            let mut next_state = *self;
            let listed_dir = next_state.history.list(host, missed);
            let dir = match listed_dir.filter(|dir| dir.number == number) {
                Some(dir) => dir,
                // An outdated listing from before the directory was created tells the host nothing, so it is skipped.
                None if missed > 0 => continue,
                // A directory that is being removed may be listed as empty.
                None => Dir {
                    number,
                    ..Dir::default()
                },
            };
            match choose(&next_state, dir) {
                Some(phase) => next_state.enter(host, phase),
                None => next_state.forget_ballot(host),
            }
            push_state(next_state);
        }
    }

    /// Returns the phase that follows if a host that wants a decision lists its directory as `dir`. Returns `None` if
    /// it must wait, or if the directory no longer has its name.
    fn choose_closing_step(&self, host: usize, dir: Dir) -> Option<Phase> {
        // A put would have no effect if the directory no longer had its name.
        self.dir(host)?;
        let is_living = |other: &u8| {
            let is_dead = self.hosts[usize::from(*other)].phase == Phase::Crashed;
            usize::from(*other) != host && !is_dead
        };
        let living = hosts_in(dir.joined).into_iter().filter(is_living).collect();
        match next_decision(&self.view(host, dir, 0), living) {
            DecisionStep::Close => Some(Phase::PuttingClosing),
            DecisionStep::Decide => Some(Phase::Deciding),
            DecisionStep::Wait(_) => None,
            DecisionStep::Decided => Some(ending(0)),
        }
    }

    /// Returns the phase that follows if a host lists the directory of a decided ballot as `dir`. Returns `None` if the
    /// host must wait, or if the directory no longer has its name.
    ///
    /// `locked_elsewhere` has a bit for each claim that the host found locked by another host.
    fn choose_call(&self, host: usize, dir: Dir, locked_elsewhere: u8) -> Option<Phase> {
        let action = next(
            &self.view(host, dir, locked_elsewhere),
            &(host as u8),
            &Flattening,
        );
        // The host asks after the listing whether the directory still has its name.
        self.dir(host)?;
        let pending = match action {
            Action::Claim(unit) => Pending::Claim(unit_number(&unit)),
            Action::Work(unit) => Pending::Work(unit_number(&unit)),
            Action::ClaimRemoval => Pending::ClaimRemoval,
            Action::Retire => Pending::Retire,
            // The host begins again later.
            Action::Wait(_) => return None,
            // Only hosts of a `Kept` ballot stop and leave.
            Action::Stop | Action::Leave => panic!("no host waits for dead hosts"),
        };
        Some(Phase::Ending {
            locked_elsewhere,
            pending: Some(pending),
        })
    }

    /// Makes the call that a host decided on by what its last listing showed, and sets the host's next phase.
    ///
    /// `locked_elsewhere` has a bit for each claim (the lock on a unit of work) that the host found locked by another
    /// host.
    fn make_call(&mut self, host: usize, locked_elsewhere: u8, pending: Pending) {
        match pending {
            Pending::Claim(unit) => {
                let claim = claim_index(unit);
                let locked_elsewhere = if self.switch_lock_to(host, claim) {
                    locked_elsewhere
                } else {
                    locked_elsewhere | 1 << claim
                };
                self.enter(host, ending(locked_elsewhere));
            }
            Pending::Work(unit) => self.enter(
                host,
                Phase::Working {
                    locked_elsewhere,
                    unit,
                },
            ),
            Pending::ClaimRemoval => {
                if self.switch_lock_to(host, WHOLE_CLAIM) {
                    self.enter(host, ending(locked_elsewhere));
                } else {
                    self.forget_ballot(host);
                }
            }
            Pending::Retire => match self.dir(host) {
                Some(_) => {
                    let pending = Some(Pending::Rename);
                    self.enter(
                        host,
                        Phase::Ending {
                            locked_elsewhere,
                            pending,
                        },
                    );
                }
                None => self.forget_ballot(host),
            },
            Pending::Rename => {
                let dir = self.dir(host).expect("another ballot is removed");
                assert!(dir.is_all_done(), "removed before all was done");
                self.history.change(host, None);
                self.forget_ballot(host);
            }
        }
    }
}

/// Returns the phase of a host that has seen a decision and must list the directory.
fn ending(locked_elsewhere: u8) -> Phase {
    Phase::Ending {
        locked_elsewhere,
        pending: None,
    }
}

impl Directory for Dir {
    fn number(&self) -> u8 {
        self.number
    }

    fn reordered(self, order: [u8; HOSTS]) -> Self {
        Self {
            joined: reordered(self.joined, order),
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
        for host in 0..HOSTS {
            self.step_host(host, &mut |next_state| {
                steps.push(NextState {
                    state: next_state,
                    is_crash: false,
                })
            });
            self.crash(host, &mut |next_state| {
                steps.push(NextState {
                    state: next_state,
                    is_crash: true,
                })
            });
        }
        steps
    }

    /// Panics if this state breaks a promise of the ballot: no host writes to a file after the copy of its logs has
    /// begun, no two hosts do the same unit of that work, and no unit begins too early or beside one that excludes it.
    fn check(&self) {
        let mut units_at_work = Vec::new();
        for host in 0..HOSTS {
            match self.hosts[host].phase {
                Phase::Writing => {
                    let dir = self.dir(host).expect("what a host writes to is removed");
                    assert!(!dir.is_decided, "a host writes what does not count");
                    assert!(dir.joined & (1 << host) != 0, "others do not see it write");
                }
                Phase::Working { unit, .. } => {
                    let dir = self
                        .dir(host)
                        .expect("a ballot was removed that a host works for");
                    assert!(dir.is_decided, "work without a decision");
                    assert!(!dir.is_done(unit), "work after it was done");
                    assert!(dir.may_begin(unit), "work before that of an earlier stage");
                    units_at_work.push(unit);
                }
                _ => {}
            }
        }
        let is_whole = |unit: &u8| claim_index(*unit) == WHOLE_CLAIM;
        let is_alone = units_at_work.len() <= 1 || !units_at_work.iter().any(is_whole);
        assert!(is_alone, "a host works beside one that has the whole");
        units_at_work.sort_unstable();
        let are_different = units_at_work.is_sorted_by(|unit, next_unit| unit < next_unit);
        assert!(are_different, "two hosts do the same unit");
    }

    fn is_over(&self) -> bool {
        let is_idle = |host: &Host<Phase>| host.phase == Phase::Idle;
        let is_last = |dir: Dir| dir.number == BALLOTS_MAX;
        self.history.current().is_some_and(is_last) && self.hosts.iter().all(is_idle)
    }

    fn reordered(&self, order: [u8; HOSTS]) -> Self {
        self.renumbered(order)
    }
}

#[test]
fn hosts_that_write_while_they_live_and_then_flatten_keep_all_invariants_and_come_to_an_end() {
    explore_to_the_end::<State>();
}
