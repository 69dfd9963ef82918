//! All interleavings of two hosts at one checkpoint: programs that write, close, end or are killed, hosts that die, and
//! looks that are older than what is done after them.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::{Attempt, HostState, JointStep, JointView, OwnPart, next_step};

const HOSTS: [&str; 2] = ["a", "b"];

/// Takes a change of the world that may come next.
type Push<'p> = dyn FnMut(&dyn Fn(&mut World)) + 'p;

/// A host and its programs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Host {
    is_alive: bool,
    /// Takes part, as it believes.
    has_joined: bool,
    /// It has put its name and must look once more.
    is_joining: bool,
    changes: u64,
    open: usize,
    living: usize,
    has_event: bool,
    has_failed: bool,
    /// Changes that its prepared part has, and the attempt.
    prepared: Option<(u64, u64)>,
    end: Option<bool>,
    /// Changes that programs make at most.
    left: u64,
    next: Option<JointStep>,
}

/// What a host says of its part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Said {
    changes: u64,
    open: usize,
    living: usize,
}

/// An attempt to commit.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Tried {
    changes: BTreeMap<usize, u64>,
    published: BTreeSet<usize>,
    is_clear: Option<bool>,
}

/// What lies in the backing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Shared {
    joined: BTreeSet<usize>,
    states: BTreeMap<usize, Said>,
    has_event: bool,
    attempts: Vec<Tried>,
    decision: Option<bool>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    hosts: [Host; 2],
    shared: Shared,
}

fn name(host: usize) -> String {
    HOSTS[host].to_owned()
}

fn number(host: &str) -> usize {
    HOSTS.iter().position(|one| *one == host).expect("a host")
}

impl World {
    fn view(&self) -> JointView {
        let attempt = self.shared.attempts.last().map(|tried| Attempt {
            number: self.shared.attempts.len() as u64,
            changes: tried
                .changes
                .iter()
                .map(|(host, changes)| (name(*host), *changes))
                .collect(),
            published: tried.published.iter().map(|host| name(*host)).collect(),
            is_clear: tried.is_clear,
            is_conflict: false,
        });
        let state = |(host, said): (&usize, &Said)| {
            let state = HostState {
                changes: said.changes,
                open: said.open,
                living: said.living,
                ..HostState::default()
            };
            (name(*host), state)
        };
        JointView {
            joined: self.shared.joined.iter().map(|host| name(*host)).collect(),
            states: self.shared.states.iter().map(state).collect(),
            has_event: self.shared.has_event,
            attempt,
            decision: self.shared.decision,
        }
    }

    fn has_open_attempt(&self) -> bool {
        let last = self.shared.attempts.last();
        last.is_some_and(|last| last.is_clear != Some(false))
    }

    fn own(&self, at: usize) -> OwnPart {
        let host = &self.hosts[at];
        OwnPart {
            state: HostState {
                changes: host.changes,
                open: host.open,
                living: host.living,
                ..HostState::default()
            },
            has_event: host.has_event,
            has_failed: host.has_failed,
            ends_with_writers: false,
            prepared_for: host.prepared.map(|(attempt, _)| attempt),
            is_late: false,
        }
    }

    fn find_next(&self, at: usize) -> JointStep {
        let dead = (0..2)
            .filter(|host| !self.hosts[*host].is_alive)
            .map(name)
            .collect();
        next_step(&self.view(), HOSTS[at], &self.own(at), &dead, &|_| None)
    }

    /// Does what an earlier look said.
    fn act(&mut self, at: usize) {
        let step = self.hosts[at].next.take().expect("it has looked");
        match step {
            JointStep::Wait(_) => {}
            JointStep::PutEvent => self.shared.has_event = true,
            JointStep::PutState => {
                let host = &self.hosts[at];
                let said = Said {
                    changes: host.changes,
                    open: host.open,
                    living: host.living,
                };
                self.shared.states.insert(at, said);
            }
            JointStep::Try(attempt) => {
                // More of them are no different.
                if self.shared.attempts.len() as u64 + 1 == attempt.number && attempt.number <= 3 {
                    let changes = attempt
                        .changes
                        .iter()
                        .map(|(host, n)| (number(host), *n))
                        .collect();
                    self.shared.attempts.push(Tried {
                        changes,
                        published: BTreeSet::new(),
                        is_clear: None,
                    });
                }
            }
            JointStep::Publish(attempt) => self.publish(at, attempt),
            JointStep::GiveUp { number, .. } => self.judge(number, false),
            JointStep::Judge(attempt) => self.judge(attempt.number, true),
            JointStep::Decide { commit, .. } => {
                if self.shared.decision.is_none() {
                    self.shared.decision = Some(commit);
                    self.check_decision();
                }
            }
            JointStep::Reopen(_) => self.hosts[at].prepared = None,
            JointStep::Apply => {
                let host = &mut self.hosts[at];
                let prepared = host.prepared.expect("a commit is of what was prepared");
                assert_eq!(prepared.1, host.changes, "it has not changed since");
                host.end = Some(true);
            }
            JointStep::Undo => self.hosts[at].end = Some(false),
        }
    }

    fn publish(&mut self, at: usize, number: u64) {
        let host = &mut self.hosts[at];
        let attempt = &mut self.shared.attempts[number as usize - 1];
        if host.open > 0 || attempt.changes.get(&at) != Some(&host.changes) {
            return self.judge(number, false);
        }
        host.prepared = Some((number, host.changes));
        attempt.published.insert(at);
    }

    fn judge(&mut self, number: u64, is_clear: bool) {
        let verdict = &mut self.shared.attempts[number as usize - 1].is_clear;
        if verdict.is_none() {
            *verdict = Some(is_clear);
        }
    }

    fn check_decision(&self) {
        if self.shared.decision != Some(true) {
            return;
        }
        for at in &self.shared.joined {
            let host = &self.hosts[*at];
            assert!(
                host.is_joining || host.prepared.is_some(),
                "who takes part is in the commit: {self:#?}"
            );
        }
    }

    /// All that may happen next.
    fn followers(&self) -> Vec<Self> {
        let mut all = Vec::new();
        for at in 0..2 {
            let host = &self.hosts[at];
            if !host.is_alive || host.end.is_some() {
                continue;
            }
            let mut push = |change: &dyn Fn(&mut Self)| {
                let mut next = self.clone();
                change(&mut next);
                all.push(next);
            };
            if host.next.is_some() {
                push(&|world| world.act(at));
            } else if host.has_joined {
                let step = self.find_next(at);
                push(&|world| world.hosts[at].next = Some(step.clone()));
            }
            if host.is_joining {
                push(&|world| world.end_join(at));
            } else if !host.has_joined && self.shared.decision.is_none() {
                push(&|world| {
                    world.shared.joined.insert(at);
                    world.hosts[at].is_joining = true;
                });
            }
            self.push_programs(at, &mut push);
        }
        all
    }

    fn end_join(&mut self, at: usize) {
        let is_late = self.has_open_attempt() || self.shared.decision.is_some();
        let host = &mut self.hosts[at];
        host.is_joining = false;
        host.has_joined = !is_late;
        if is_late {
            self.shared.joined.remove(&at);
        }
    }

    fn push_programs(&self, at: usize, push: &mut Push<'_>) {
        let host = &self.hosts[at];
        let may_change = host.has_joined && host.prepared.is_none() && host.living > 0;
        if may_change && host.left > 0 && host.open == 0 {
            push(&|world| {
                let host = &mut world.hosts[at];
                (host.open, host.changes, host.left) = (1, host.changes + 1, host.left - 1);
            });
        }
        if may_change && host.open > 0 {
            push(&|world| {
                let host = &mut world.hosts[at];
                host.open = 0;
                host.changes += 1;
                // The first host has the file that is the event.
                host.has_event |= at == 0;
            });
        }
        if host.has_joined
            && host.living > 0
            && host.open == 0
            && host.changes > 0
            && host.prepared.is_none()
        {
            push(&|world| {
                world.hosts[at].living = 0;
                world.hosts[at].changes += 1;
            });
        }
        if host.has_joined
            && host.living > 0
            && !host.has_failed
            && host.prepared.is_none()
            && host.open > 0
        {
            push(&|world| {
                let host = &mut world.hosts[at];
                (host.has_failed, host.living, host.open) = (true, 0, 0);
                host.changes += 1;
            });
        }
        if self.hosts.iter().all(|host| host.is_alive) {
            push(&|world| world.hosts[at].is_alive = false);
        }
    }
}

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
        left: 1,
        next: None,
    };
    let start = World {
        hosts: [host.clone(), host],
        shared: Shared::default(),
    };
    let mut seen = HashSet::from([start.clone()]);
    let mut next = vec![start];
    let (mut commits, mut aborts, mut alone) = (0, 0, 0);
    while let Some(world) = next.pop() {
        let ends: Vec<bool> = world.hosts.iter().filter_map(|host| host.end).collect();
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
        for follower in world.followers() {
            if seen.insert(follower.clone()) {
                next.push(follower);
            }
        }
    }
    println!(
        "{} states; ends: {commits} commits of both, {alone} of one, {aborts} aborts",
        seen.len()
    );
    assert!(commits > 0 && aborts > 0);
}
