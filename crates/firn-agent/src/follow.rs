//! Following: what another host has is copied as it becomes complete, for as long as that host has something new.
//!
//! ```text
//!   connect ─► list ─► closed, and the same as at the last look? ─► plan ─► pull ─► finish ─► remove what is not needed
//!      ▲                                                                                                │
//!      └────────────── after a failure, the next wait of a backoff ◄─── wait for the next look ◄────────┘
//! ```
//!
//! What is wanted, where a copy goes, which hosts are told, and what is removed when, is a [`Policy`]. There are two:
//! [`newest`] keeps the newest checkpoints of a host that knows nothing of it (`firn pull --follow`), and
//! `partner::CopyHeld` keeps what its source holds, and marks it there.
//!
//! Promises
//! * Nothing is copied that is open or was cut off, or was different at the last look over the same connection.
//! * A copy is made as by [`pull`]: whole or not there.
//! * Whatever fails is tried again, and told when it has not failed at the look before. What fails here, at one name,
//!   keeps no other one from being copied or removed; what fails on the way or at the source ends the look.

pub(crate) mod newest;

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::time::{Duration, Instant};

use firn_backing::backoff::{Backoff, Waits};
use firn_protocol::path::BytePath;

use crate::error::PullError;
use crate::pull::{Outcome, PullRequest, pull};
use crate::units::Unit;

/// What makes one kind of following different from another.
pub(crate) trait Policy {
    /// What a look goes by.
    type Connection;
    /// What a copy in the making holds until it is whole or given up.
    type Room;

    /// Waits after failures.
    fn retry(&self) -> Backoff;

    /// Reaches the source.
    fn connect(&mut self) -> Result<Self::Connection, PullError>;

    /// Whether a source that could not be reached is followed no more.
    fn is_over(&self, _error: &PullError, _unreached_for: Duration) -> bool {
        false
    }

    /// Lists what the source has.
    fn list(&mut self, connection: &mut Self::Connection) -> Result<Vec<Unit>, PullError>;

    /// Whether a whole copy of these entries is here already, and every host that needs to know of it does.
    fn confirm_copy(
        &mut self,
        _connection: &mut Self::Connection,
        _unit: &Unit,
    ) -> Result<bool, PullError> {
        Ok(false)
    }

    /// Decides what becomes of something that is complete.
    fn plan_copy(
        &mut self,
        connection: &mut Self::Connection,
        unit: &Unit,
    ) -> Result<Step<Self::Room>, PullError>;

    /// Is called all the time while a copy is made.
    fn tick(&mut self, _connection: &mut Self::Connection) -> Result<(), PullError> {
        Ok(())
    }

    /// Gives a copy that is whole its name, and tells the hosts that need to know.
    fn finish_copy(
        &mut self,
        connection: &mut Self::Connection,
        unit: &Unit,
        outcome: Outcome,
        elapsed: Duration,
    ) -> Result<(), PullError>;

    /// Gives up what was begun of a copy.
    fn abandon_copy(&mut self, _unit: &Unit) -> Result<(), PullError> {
        Ok(())
    }

    /// Says that something cannot be copied, which keeps nothing else from it.
    fn describe_failure(&self, _unit: &Unit, error: &PullError) -> String {
        error.to_string()
    }

    /// Removes copies that are not needed beside what the source has now. Returns what could not be removed.
    fn remove_unneeded(
        &mut self,
        connection: &mut Self::Connection,
        now: &[Unit],
    ) -> Result<Vec<PullError>, PullError>;

    /// Tells a person of a problem.
    fn tell_problem(&mut self, problem: &str);

    /// Tells the source of all problems of a look.
    fn report_problems(
        &mut self,
        _connection: &mut Self::Connection,
        _problems: &[String],
    ) -> Result<(), PullError> {
        Ok(())
    }

    /// Waits for the next look.
    fn wait(
        &mut self,
        connection: &mut Self::Connection,
        look: LookReport,
    ) -> Result<(), PullError>;
}

/// What becomes of something that is complete at the source.
pub(crate) enum Step<R> {
    /// Nothing is to be copied.
    Skip,
    /// Nothing can be copied; why.
    Refuse(String),
    /// It is copied.
    Pull {
        /// What is pulled.
        request: PullRequest,
        /// What the copy holds meanwhile.
        room: R,
    },
}

/// What the time of the next look depends on.
pub(crate) struct LookReport {
    /// How long the source took to list what it has.
    pub(crate) listed_in: Duration,
    /// Something is closed that has changed since the look before.
    pub(crate) is_settling: bool,
}

/// Follows one host.
pub(crate) struct Follower<P> {
    policy: P,
    /// At the last look over the same connection, by name.
    seen: BTreeMap<BytePath, Unit>,
    problems: Problems,
    waits: Waits,
}

/// What failed, each told once for as long as it fails at every look.
#[derive(Default)]
struct Problems {
    before: BTreeSet<String>,
    /// At this look, in the order in which it was found.
    now: Vec<String>,
}

impl Problems {
    fn begin_look(&mut self) {
        self.before = std::mem::take(&mut self.now).into_iter().collect();
    }

    /// Whether it is to be told.
    fn add(&mut self, problem: &str) -> bool {
        if self.now.iter().any(|known| known == problem) {
            return false;
        }
        self.now.push(problem.to_owned());
        !self.before.contains(problem)
    }
}

impl<P: Policy> Follower<P> {
    /// Nothing is known of the source yet.
    pub(crate) fn new(policy: P) -> Self {
        Self {
            waits: policy.retry().start(),
            policy,
            seen: BTreeMap::new(),
            problems: Problems::default(),
        }
    }

    /// Follows until the policy says that it is over. Returns what it ended with.
    pub(crate) fn run(mut self) -> PullError {
        let mut reached_at = Instant::now();
        loop {
            match self.policy.connect() {
                Ok(connection) => {
                    let Err(error) = self.follow_connection(connection);
                    reached_at = Instant::now();
                    // The next connection may be to another firnd, which counts changes anew.
                    self.seen.clear();
                    self.add_problem(&error.to_string());
                }
                Err(error) if self.policy.is_over(&error, reached_at.elapsed()) => return error,
                Err(error) => {
                    self.problems.begin_look();
                    self.add_problem(&error.to_string());
                }
            }
            self.waits.sleep();
        }
    }

    /// Looks again and again, until something fails.
    fn follow_connection(
        &mut self,
        mut connection: P::Connection,
    ) -> Result<Infallible, PullError> {
        loop {
            self.problems.begin_look();
            let look = self.look(&mut connection)?;
            self.waits.reset();
            self.policy.wait(&mut connection, look)?;
        }
    }

    fn look(&mut self, connection: &mut P::Connection) -> Result<LookReport, PullError> {
        let begun = Instant::now();
        let now = self.policy.list(connection)?;
        let mut look = LookReport {
            listed_in: begun.elapsed(),
            is_settling: false,
        };
        for unit in &now {
            if self.policy.confirm_copy(connection, unit)? || unit.is_open() {
                continue;
            }
            let earlier = self.seen.get(&unit.name);
            if earlier.is_some_and(|earlier| earlier.has_same_files(unit)) {
                self.copy(connection, unit)?;
            } else {
                look.is_settling = true;
            }
        }
        for error in self.policy.remove_unneeded(connection, &now)? {
            self.add_problem(&error.to_string());
        }
        self.policy
            .report_problems(connection, &self.problems.now)?;
        let by_name = now.into_iter().map(|unit| (unit.name.clone(), unit));
        self.seen = by_name.collect();
        Ok(look)
    }

    fn copy(&mut self, connection: &mut P::Connection, unit: &Unit) -> Result<(), PullError> {
        match self.try_copy(connection, unit) {
            Err(error) if error.is_change_of_source() => self.policy.abandon_copy(unit),
            Err(error) if error.is_of_target() || error.is_full() => {
                let problem = self.policy.describe_failure(unit, &error);
                self.add_problem(&problem);
                self.policy.abandon_copy(unit)
            }
            copied => copied,
        }
    }

    fn try_copy(&mut self, connection: &mut P::Connection, unit: &Unit) -> Result<(), PullError> {
        let (request, _room) = match self.policy.plan_copy(connection, unit)? {
            Step::Skip => return Ok(()),
            Step::Refuse(why) => {
                self.add_problem(&why);
                return Ok(());
            }
            Step::Pull { request, room } => (request, room),
        };
        let begun = Instant::now();
        let mut lost = None;
        let pulled = pull(&request, &mut |_| {
            if lost.is_none() {
                lost = self.policy.tick(connection).err();
            }
        });
        if let Some(error) = lost {
            return Err(error);
        }
        self.policy
            .finish_copy(connection, unit, pulled?, begun.elapsed())
    }

    fn add_problem(&mut self, problem: &str) {
        if self.problems.add(problem) {
            self.policy.tell_problem(problem);
        }
    }
}

#[cfg(test)]
mod tests {
    use firn_format::record::Ending;

    use super::*;
    use crate::error::WireError;
    use crate::message::{Entry, EntryKind};

    /// What a look finds; none: the source cannot be reached.
    type Look = Option<Vec<Unit>>;

    /// A source of which everything is known, and what it was asked for.
    #[derive(Default)]
    struct Script {
        looks: std::collections::VecDeque<Look>,
        planned: Vec<String>,
        told: Vec<String>,
    }

    fn lost() -> PullError {
        PullError::Wire {
            host: "n1".into(),
            error: WireError::Ended,
        }
    }

    impl Policy for &mut Script {
        type Connection = ();
        type Room = ();

        fn retry(&self) -> Backoff {
            Backoff::new(Duration::ZERO, Duration::ZERO)
        }

        fn connect(&mut self) -> Result<(), PullError> {
            let next = self.looks.front().ok_or_else(lost);
            next.map(drop)
        }

        fn is_over(&self, _error: &PullError, _unreached_for: Duration) -> bool {
            true
        }

        fn list(&mut self, (): &mut ()) -> Result<Vec<Unit>, PullError> {
            self.looks.pop_front().flatten().ok_or_else(lost)
        }

        fn plan_copy(&mut self, (): &mut (), unit: &Unit) -> Result<Step<()>, PullError> {
            self.planned.push(unit.name.to_string());
            match self.planned.len() {
                1 => Ok(Step::Refuse("no room".into())),
                _ => Err(PullError::Busy {
                    path: unit.name.as_path().into(),
                }),
            }
        }

        fn finish_copy(
            &mut self,
            (): &mut (),
            _unit: &Unit,
            _outcome: Outcome,
            _elapsed: Duration,
        ) -> Result<(), PullError> {
            unreachable!("nothing is pulled")
        }

        fn remove_unneeded(
            &mut self,
            (): &mut (),
            _now: &[Unit],
        ) -> Result<Vec<PullError>, PullError> {
            Ok(Vec::new())
        }

        fn tell_problem(&mut self, problem: &str) {
            self.told.push(problem.to_owned());
        }

        fn wait(&mut self, (): &mut (), _look: LookReport) -> Result<(), PullError> {
            Ok(())
        }
    }

    fn unit(name: &str, bytes: u64, ending: Ending) -> Unit {
        Unit {
            name: name.into(),
            entries: vec![Entry {
                kind: EntryKind::File { bytes, ending },
                ..Entry::directory()
            }],
        }
    }

    fn follow(looks: impl IntoIterator<Item = Look>) -> Script {
        let mut script = Script {
            looks: looks.into_iter().collect(),
            ..Script::default()
        };
        let _ = Follower::new(&mut script).run();
        script
    }

    #[test]
    fn what_is_closed_and_the_same_twice_is_copied() {
        let closed = |bytes| unit("step", bytes, Ending::Closed);
        let open = || unit("open", 1, Ending::Open);
        let script = follow([Some(vec![closed(1), open()]), Some(vec![closed(2), open()])]);
        assert!(script.planned.is_empty(), "{:?}", script.planned);
        let script = follow([Some(vec![closed(1), open()]), Some(vec![closed(1), open()])]);
        assert_eq!(script.planned, ["step"]);
    }

    #[test]
    fn what_was_seen_before_a_failure_does_not_count() {
        let closed = || Some(vec![unit("step", 1, Ending::Closed)]);
        assert!(follow([closed(), None, closed()]).planned.is_empty());
        assert_eq!(
            follow([closed(), None, closed(), closed()]).planned,
            ["step"]
        );
    }

    #[test]
    fn a_failure_of_one_copy_keeps_no_other_one_and_is_told_once() {
        let both = || {
            let names = ["one", "two"];
            Some(names.map(|name| unit(name, 1, Ending::Closed)).to_vec())
        };
        let script = follow([both(), both(), both(), both()]);
        assert_eq!(script.planned, ["one", "two", "one", "two", "one", "two"]);
        let cannot = |name: &str| format!("another `firn pull` to {name} is under way");
        // The last one is the end of the script.
        assert_eq!(
            script.told[..3],
            ["no room".to_owned(), cannot("two"), cannot("one")]
        );
        assert_eq!(script.told.len(), 4, "{:?}", script.told);
    }
}
