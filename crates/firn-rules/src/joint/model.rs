//! Model check of [`next_step`]: all interleavings of two hosts that commit one checkpoint together.
//!
//! The *event* is the change that completes the checkpoint. An *attempt* is one try of the hosts to commit it.
//!
//! In the model, programs write and close files, end or are killed, and hosts die. A host reads the shared state and
//! acts on it in two separate steps, so it may act on a state that is no longer true.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::{Attempt, HostState, JointStep, JointView, OwnPart, next_step};

/// Names of the two hosts of the model.
const HOSTS: [&str; 2] = ["a", "b"];
/// Maximum number of attempts. More would only add states that are equal to earlier ones.
const ATTEMPTS_MAX: u64 = 3;

/// Callback that receives one possible change of the present world, which leads to a next world.
type PushWorld<'p> = dyn FnMut(&dyn Fn(&mut World)) + 'p;

/// A host and its programs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Host {
    is_alive: bool,
    /// The host acts as a participant of the checkpoint.
    has_joined: bool,
    /// The host has stored its name, and must check once more whether it may take part.
    is_joining: bool,
    changes: u64,
    open: usize,
    living: usize,
    has_event: bool,
    has_failed: bool,
    /// The part that the host has prepared for an attempt.
    prepared: Option<PreparedPart>,
    /// How the host's part has ended; `None` if it has not.
    end: Option<PartEnd>,
    /// Number of changes that programs may still make.
    changes_left: u64,
    /// The step that the host has chosen from the shared state. That state may have changed since.
    planned_step: Option<JointStep>,
}

/// How a host's part has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum PartEnd {
    Committed,
    Aborted,
}

/// A host's part that is prepared for a commit, so that it must not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct PreparedPart {
    attempt: u64,
    /// Number of changes in the part.
    changes: u64,
}

/// The state that a host has published of its part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct PublishedState {
    changes: u64,
    open: usize,
    living: usize,
}

/// An attempt to commit.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ModelAttempt {
    changes: BTreeMap<usize, u64>,
    published: BTreeSet<usize>,
    is_clear: Option<bool>,
}

/// The state that both hosts see in the backing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct SharedState {
    joined: BTreeSet<usize>,
    states: BTreeMap<usize, PublishedState>,
    has_event: bool,
    attempts: Vec<ModelAttempt>,
    decision: Option<bool>,
}

/// A state of the model.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    hosts: [Host; 2],
    shared: SharedState,
}

/// Returns the name of the host with this index.
fn name(host: usize) -> String {
    HOSTS[host].to_owned()
}

/// Returns the index of the host with this name.
fn number(host: &str) -> usize {
    HOSTS
        .iter()
        .position(|known| *known == host)
        .expect("a host")
}

impl World {
    /// Returns the shared state of both hosts, converted to the argument of [`next_step`], which this model checks. In
    /// the model no parts conflict.
    fn joint_view(&self) -> JointView {
        let attempt = self.shared.attempts.last().map(|attempt| Attempt {
            number: self.shared.attempts.len() as u64,
            changes: attempt
                .changes
                .iter()
                .map(|(host, changes)| (name(*host), *changes))
                .collect(),
            published: attempt.published.iter().map(|host| name(*host)).collect(),
            is_clear: attempt.is_clear,
            is_conflict: false,
        });
        let named_state = |(host, published): (&usize, &PublishedState)| {
            let state = HostState {
                changes: published.changes,
                open: published.open,
                living: published.living,
                ..HostState::default()
            };
            (name(*host), state)
        };
        JointView {
            joined: self.shared.joined.iter().map(|host| name(*host)).collect(),
            states: self.shared.states.iter().map(named_state).collect(),
            has_event: self.shared.has_event,
            attempt,
            decision: self.shared.decision,
        }
    }

    fn has_open_attempt(&self) -> bool {
        let last = self.shared.attempts.last();
        last.is_some_and(|last| last.is_clear != Some(false))
    }

    /// Returns one host's part of the checkpoint, converted to the argument of [`next_step`], which this model checks.
    fn own_part(&self, index: usize) -> OwnPart {
        let host = &self.hosts[index];
        OwnPart {
            state: HostState {
                changes: host.changes,
                open: host.open,
                living: host.living,
                ..HostState::default()
            },
            has_event: host.has_event,
            has_failed: host.has_failed,
            // The model leaves out rules without an event, and hosts that are too slow.
            ends_with_writers: false,
            prepared_for: host.prepared.map(|prepared| prepared.attempt),
            is_late: false,
        }
    }

    /// Returns the next step of a host in the present state.
    fn find_next(&self, index: usize) -> JointStep {
        let dead = (0..2)
            .filter(|host| !self.hosts[*host].is_alive)
            .map(name)
            .collect();
        next_step(
            &self.joint_view(),
            HOSTS[index],
            &self.own_part(index),
            &dead,
            &|_| None,
        )
    }

    /// Takes the step that a host has planned from an earlier read of the shared state. That state may have changed
    /// since. Panics if the host has no planned step.
    ///
    /// The variants of [`JointStep`] say what each step means.
    fn take_planned_step(&mut self, index: usize) {
        let step = self.hosts[index]
            .planned_step
            .take()
            .expect("the host has a planned step");
        match step {
            JointStep::Wait(_) => {}
            JointStep::PutEvent => self.shared.has_event = true,
            JointStep::PutState => {
                let host = &self.hosts[index];
                let published = PublishedState {
                    changes: host.changes,
                    open: host.open,
                    living: host.living,
                };
                self.shared.states.insert(index, published);
            }
            JointStep::Try(attempt) => {
                // If another host has begun this attempt already, the step has no effect.
                let next_number = self.shared.attempts.len() as u64 + 1;
                if attempt.number == next_number && next_number <= ATTEMPTS_MAX {
                    let changes = attempt
                        .changes
                        .iter()
                        .map(|(host, changes)| (number(host), *changes))
                        .collect();
                    self.shared.attempts.push(ModelAttempt {
                        changes,
                        published: BTreeSet::new(),
                        is_clear: None,
                    });
                }
            }
            JointStep::Publish(attempt) => self.publish(index, attempt),
            JointStep::GiveUp { number, .. } => self.store_verdict(number, false),
            JointStep::Judge(attempt) => self.store_verdict(attempt.number, true),
            JointStep::Decide { commit, .. } => {
                if self.shared.decision.is_none() {
                    self.shared.decision = Some(commit);
                    self.check_decision();
                }
            }
            JointStep::Reopen(_) => self.hosts[index].prepared = None,
            JointStep::Apply => {
                let host = &mut self.hosts[index];
                let prepared = host.prepared.expect("only a prepared part is committed");
                assert_eq!(
                    prepared.changes, host.changes,
                    "the part has not changed since"
                );
                host.end = Some(PartEnd::Committed);
            }
            JointStep::Undo => self.hosts[index].end = Some(PartEnd::Aborted),
        }
    }

    /// Prepares and publishes the part of a host for an attempt, or fails the attempt if the part has changed.
    fn publish(&mut self, index: usize, number: u64) {
        let host = &mut self.hosts[index];
        let attempt = &mut self.shared.attempts[number as usize - 1];
        if host.open > 0 || attempt.changes.get(&index) != Some(&host.changes) {
            return self.store_verdict(number, false);
        }
        host.prepared = Some(PreparedPart {
            attempt: number,
            changes: host.changes,
        });
        attempt.published.insert(index);
    }

    /// Stores the verdict of an attempt, unless it has one.
    fn store_verdict(&mut self, number: u64, is_clear: bool) {
        let verdict = &mut self.shared.attempts[number as usize - 1].is_clear;
        if verdict.is_none() {
            *verdict = Some(is_clear);
        }
    }

    /// Asserts that each host that takes part is prepared when the commit is decided.
    fn check_decision(&self) {
        if self.shared.decision != Some(true) {
            return;
        }
        for index in &self.shared.joined {
            let host = &self.hosts[*index];
            assert!(
                host.is_joining || host.prepared.is_some(),
                "a host that takes part is in the commit: {self:#?}"
            );
        }
    }

    /// Returns the worlds (states of both hosts and of what they share) that may come next: each is one step of a host
    /// or of its programs further.
    fn next_worlds(&self) -> Vec<Self> {
        let mut all = Vec::new();
        for index in 0..2 {
            let host = &self.hosts[index];
            if !host.is_alive || host.end.is_some() {
                continue;
            }
            let mut push = |change: &dyn Fn(&mut Self)| {
                let mut next = self.clone();
                change(&mut next);
                all.push(next);
            };
            if host.planned_step.is_some() {
                push(&|world| world.take_planned_step(index));
            } else if host.has_joined {
                let step = self.find_next(index);
                push(&|world| world.hosts[index].planned_step = Some(step.clone()));
            }
            if host.is_joining {
                push(&|world| world.end_join(index));
            } else if !host.has_joined && self.shared.decision.is_none() {
                push(&|world| {
                    world.shared.joined.insert(index);
                    world.hosts[index].is_joining = true;
                });
            }
            self.push_program_steps(index, &mut push);
        }
        all
    }

    /// Ends the join of a host. The host does not take part if an attempt or the decision was faster.
    fn end_join(&mut self, index: usize) {
        let is_late = self.has_open_attempt() || self.shared.decision.is_some();
        let host = &mut self.hosts[index];
        host.is_joining = false;
        host.has_joined = !is_late;
        if is_late {
            self.shared.joined.remove(&index);
        }
    }

    /// Passes each change to `add_next_world` that the programs of a host may make next, and the death of the host.
    fn push_program_steps(&self, index: usize, add_next_world: &mut PushWorld<'_>) {
        let host = &self.hosts[index];
        let may_change = host.has_joined && host.prepared.is_none() && host.living > 0;
        // A program opens the host's only file.
        if may_change && host.changes_left > 0 && host.open == 0 {
            add_next_world(&|world| {
                let host = &mut world.hosts[index];
                host.open = 1;
                host.changes += 1;
                host.changes_left -= 1;
            });
        }
        // A program closes the file.
        if may_change && host.open > 0 {
            add_next_world(&|world| {
                let host = &mut world.hosts[index];
                host.open = 0;
                host.changes += 1;
                // The close of a file on the first host is the event.
                host.has_event |= index == 0;
            });
        }
        // The programs end with success.
        if may_change && host.open == 0 && host.changes > 0 {
            add_next_world(&|world| {
                world.hosts[index].living = 0;
                world.hosts[index].changes += 1;
            });
        }
        // The programs are killed while the file is open.
        if may_change && !host.has_failed && host.open > 0 {
            add_next_world(&|world| {
                let host = &mut world.hosts[index];
                host.has_failed = true;
                host.living = 0;
                host.open = 0;
                host.changes += 1;
            });
        }
        // The host dies. One host at most does.
        if self.hosts.iter().all(|host| host.is_alive) {
            add_next_world(&|world| world.hosts[index].is_alive = false);
        }
    }
}

/// Explores all states that two hosts and their programs can reach. If both hosts have ended, both have committed or
/// both have not.
#[test]
fn two_hosts_commit_together_or_not_at_all_in_every_interleaving() {
    let host = Host {
        is_alive: true,
        has_joined: false,
        is_joining: false,
        changes: 0,
        open: 0,
        living: 1,
        has_event: false,
        has_failed: false,
        prepared: None,
        end: None,
        changes_left: 1,
        planned_step: None,
    };
    let start = World {
        hosts: [host.clone(), host],
        shared: SharedState::default(),
    };
    let mut known_worlds = HashSet::from([start.clone()]);
    let mut unexplored = vec![start];
    let (mut commits, mut aborts, mut alone) = (0, 0, 0);
    while let Some(world) = unexplored.pop() {
        let ends: Vec<PartEnd> = world.hosts.iter().filter_map(|host| host.end).collect();
        assert!(ends.windows(2).all(|pair| pair[0] == pair[1]), "{world:#?}");
        let is_over = world
            .hosts
            .iter()
            .all(|host| host.end.is_some() || !host.is_alive);
        if is_over {
            match world.shared.decision {
                Some(true) if world.shared.joined.len() == 2 => commits += 1,
                Some(true) => alone += 1,
                _ => aborts += 1,
            }
        }
        for next_world in world.next_worlds() {
            if known_worlds.insert(next_world.clone()) {
                unexplored.push(next_world);
            }
        }
    }
    println!(
        "{} states; ends: {commits} commits of both, {alone} of one, {aborts} aborts",
        known_worlds.len()
    );
    assert!(commits > 0 && aborts > 0);
}
