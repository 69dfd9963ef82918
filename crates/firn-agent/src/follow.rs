//! Following a host: repeatedly copies its checkpoints that have become complete.
//!
//! Terms
//! * *source*: the followed host.
//! * *unit*: a name in the followed directory with everything below it, usually one checkpoint.
//! * *round*: lists the units of the source once, copies units, and removes copies.
//! * *pull*: copies one unit over the network.
//! * *commit*: gives the complete copy its name.
//!
//! ```text
//!   connect ─► list ─► closed, and unchanged since the last round? ─► plan ─► pull ─► commit ─► remove unneeded copies
//!      ▲         ▲                                                                                       │
//!      │         └───────────────────────────── wait for the next round ◄────────────────────────────────┘
//!      └── after a failure, with a backoff
//! ```
//!
//! A [`Policy`] decides which units are copied, where to, which hosts are notified, and which copies are removed. There
//! are two: [`newest`] keeps the newest checkpoints of a source that is not notified (`firn pull --follow`).
//! `partner::CopyHeld` keeps copies of the files that its source holds in memory, and reports to the source which files
//! have a copy.
//!
//! Promises
//! * A unit is copied only if all of its files are closed, and none has changed since the last round on this
//!   connection.
//! * A copy is made by [`pull`]: it appears complete or not at all.
//! * A failed step is tried again in the next round. A failure is reported unless the same one occurred in the round
//!   before.
//! * If this host fails to copy or remove one unit, the other units are still copied and removed. A failure of the
//!   connection or of the source ends the round.

pub(crate) mod newest;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use firn_backing::backoff::{Backoff, Waits};
use firn_protocol::path::BytePath;

use crate::error::PullError;
use crate::pull::{Outcome, PullRequest, pull};
use crate::units::Unit;

/// The decisions of one kind of following.
pub(crate) trait Policy {
    /// Connection to the source that a round uses.
    type Connection;
    /// Reservation of space for a copy that is being made. It is dropped when the copy is complete or aborted.
    type Reservation;

    /// Returns the pauses after failures.
    fn retry_backoff(&self) -> Backoff;

    /// Connects to the source.
    fn connect(&mut self) -> Result<Self::Connection, PullError>;

    /// Whether to stop following a source after a failure to connect. `time_unreachable` is the time since the last
    /// connection ended.
    fn should_stop(&self, _error: &PullError, _time_unreachable: Duration) -> bool {
        false
    }

    /// Lists the units of the source.
    fn list_units(&mut self, connection: &mut Self::Connection) -> Result<Vec<Unit>, PullError>;

    /// Returns whether this host has a complete copy of the unit as it is now. If so, first notifies all hosts that
    /// need to know of the copy.
    fn confirm_copy(
        &mut self,
        _connection: &mut Self::Connection,
        _unit: &Unit,
    ) -> Result<bool, PullError> {
        Ok(false)
    }

    /// Decides what to do with a unit that is closed and unchanged.
    fn plan_copy(
        &mut self,
        connection: &mut Self::Connection,
        unit: &Unit,
    ) -> Result<CopyPlan<Self::Reservation>, PullError>;

    /// Called often while a copy is made. An error aborts the copy.
    fn on_progress(&mut self, _connection: &mut Self::Connection) -> Result<(), PullError> {
        Ok(())
    }

    /// Renames a complete copy to its name, and notifies the hosts that need to know of it.
    fn commit_copy(
        &mut self,
        connection: &mut Self::Connection,
        unit: &Unit,
        outcome: Outcome,
        elapsed: Duration,
    ) -> Result<(), PullError>;

    /// Removes the unfinished copy of a unit.
    fn abort_copy(&mut self, _unit: &Unit) -> Result<(), PullError> {
        Ok(())
    }

    /// Describes a failure of this host to copy one unit.
    fn describe_failure(&self, _unit: &Unit, error: &PullError) -> String {
        error.to_string()
    }

    /// Removes copies that are no longer needed. `units` are the present units of the source. Returns one error for
    /// each copy that could not be removed.
    fn remove_unneeded(
        &mut self,
        connection: &mut Self::Connection,
        units: &[Unit],
    ) -> Result<Vec<PullError>, PullError>;

    /// Reports a problem to the user.
    fn show_problem(&mut self, problem: &str);

    /// Reports all problems of a round to the source.
    fn report_to_source(
        &mut self,
        _connection: &mut Self::Connection,
        _problems: &[String],
    ) -> Result<(), PullError> {
        Ok(())
    }

    /// Waits until the next round.
    fn wait_for_next_round(
        &mut self,
        connection: &mut Self::Connection,
        last_round: RoundResult,
    ) -> Result<(), PullError>;
}

/// The decision about a unit that is complete at the source.
pub(crate) enum CopyPlan<R> {
    /// The unit is not to be copied.
    Skip,
    /// The unit cannot be copied, for this reason.
    Refuse(String),
    /// The unit is to be copied.
    Pull {
        /// The pull that makes the copy.
        request: PullRequest,
        /// Space that is reserved for the copy.
        reservation: R,
    },
}

/// Result of a round, on which the time of the next one depends.
pub(crate) struct RoundResult {
    /// Time that the list took.
    pub(crate) list_time: Duration,
    /// Whether a unit is closed but has changed since the previous round. The next round may copy it.
    pub(crate) has_changed_unit: bool,
}

/// Follows one host.
pub(crate) struct Follower<P> {
    policy: P,
    /// Units that the previous round on this connection listed, by name.
    previous_units: BTreeMap<BytePath, Unit>,
    problems: Problems,
    retry_backoff: Waits,
}

/// Problems of this round and the previous one. A problem that persists is reported once.
#[derive(Default)]
struct Problems {
    previous_round: BTreeSet<String>,
    /// Problems of this round, in the order in which they occurred.
    this_round: Vec<String>,
}

impl Problems {
    /// Makes the problems of this round those of the previous one.
    fn start_round(&mut self) {
        let ended_round = std::mem::take(&mut self.this_round);
        self.previous_round = ended_round.into_iter().collect();
    }

    /// Adds a problem. Returns whether the problem is new, and must therefore be reported.
    fn add(&mut self, problem: &str) -> bool {
        if self.this_round.iter().any(|known| known == problem) {
            return false;
        }
        self.this_round.push(problem.to_owned());
        !self.previous_round.contains(problem)
    }
}

impl<P: Policy> Follower<P> {
    /// Makes a follower that has no list of its source yet.
    pub(crate) fn new(policy: P) -> Self {
        Self {
            retry_backoff: policy.retry_backoff().start(),
            policy,
            previous_units: BTreeMap::new(),
            problems: Problems::default(),
        }
    }

    /// Copies the checkpoints of the followed host, the *source*, again and again. Connects anew after each failure.
    ///
    /// Ends only when an attempt to connect fails and `self.policy` then decides to stop. Returns the error of that
    /// attempt.
    pub(crate) fn run(mut self) -> PullError {
        let mut last_connected_at = Instant::now();
        loop {
            match self.policy.connect() {
                Ok(connection) => {
                    let error = self.follow_connection(connection);
                    last_connected_at = Instant::now();
                    // The next connection may be to a restarted server. Its change counters start again, so they cannot
                    // be compared with those of the last list.
                    self.previous_units.clear();
                    self.add_problem(&error.to_string());
                }
                Err(error) if self.policy.should_stop(&error, last_connected_at.elapsed()) => {
                    return error;
                }
                Err(error) => {
                    self.problems.start_round();
                    self.add_problem(&error.to_string());
                }
            }
            self.retry_backoff.sleep();
        }
    }

    /// Makes rounds over one connection until one fails. Returns its error.
    fn follow_connection(&mut self, mut connection: P::Connection) -> PullError {
        loop {
            if let Err(error) = self.make_round_and_wait(&mut connection) {
                return error;
            }
        }
    }

    fn make_round_and_wait(&mut self, connection: &mut P::Connection) -> Result<(), PullError> {
        self.problems.start_round();
        let round = self.make_round(connection)?;
        self.retry_backoff.reset();
        self.policy.wait_for_next_round(connection, round)
    }

    /// Makes one round: lists the units (names at the top, usually checkpoints) of the source once, copies complete
    /// ones, and removes unneeded copies.
    ///
    /// A unit is copied if all of its files are closed and none has changed since the previous round. Fails only if the
    /// connection or the source fails.
    fn make_round(&mut self, connection: &mut P::Connection) -> Result<RoundResult, PullError> {
        let started_at = Instant::now();
        let units = self.policy.list_units(connection)?;
        let list_time = started_at.elapsed();
        let mut has_changed_unit = false;
        for unit in &units {
            // Nothing to do: there is a copy of this state already, or a program still writes.
            if self.policy.confirm_copy(connection, unit)? || unit.is_open() {
                continue;
            }
            match self.previous_units.get(&unit.name) {
                Some(previous_unit) if previous_unit.has_same_files(unit) => {
                    self.copy(connection, unit)?;
                }
                _ => has_changed_unit = true,
            }
        }
        for error in self.policy.remove_unneeded(connection, &units)? {
            self.add_problem(&error.to_string());
        }
        self.policy
            .report_to_source(connection, &self.problems.this_round)?;
        let units_by_name = units.into_iter().map(|unit| (unit.name.clone(), unit));
        self.previous_units = units_by_name.collect();
        Ok(RoundResult {
            list_time,
            has_changed_unit,
        })
    }

    /// Copies a unit. Returns only a failure of the connection or of the source; other failures become problems.
    fn copy(&mut self, connection: &mut P::Connection, unit: &Unit) -> Result<(), PullError> {
        let Err(error) = self.try_to_copy(connection, unit) else {
            return Ok(());
        };
        if error.is_change_of_source() {
            // A later round finds the unit complete again.
            return self.policy.abort_copy(unit);
        }
        if error.is_of_target() || error.is_full() {
            let problem = self.policy.describe_failure(unit, &error);
            self.add_problem(&problem);
            return self.policy.abort_copy(unit);
        }
        Err(error)
    }

    /// Copies one unit (a name at the source with everything below it): the policy decides whether and where to, then
    /// the files are pulled over the network, and then the copy gets its name.
    ///
    /// Returns `Ok` also if the policy decides against a copy.
    fn try_to_copy(
        &mut self,
        connection: &mut P::Connection,
        unit: &Unit,
    ) -> Result<(), PullError> {
        // The reserved space is needed until the copy is complete or aborted.
        let (request, _reservation) = match self.policy.plan_copy(connection, unit)? {
            CopyPlan::Skip => return Ok(()),
            CopyPlan::Refuse(reason) => {
                self.add_problem(&reason);
                return Ok(());
            }
            CopyPlan::Pull {
                request,
                reservation,
            } => (request, reservation),
        };
        let started_at = Instant::now();
        let mut progress_error = None;
        // After the first error of `on_progress` the pull still runs to its end, but its result is not used.
        let pulled = pull(&request, &mut |_| {
            if progress_error.is_none() {
                progress_error = self.policy.on_progress(connection).err();
            }
        });
        if let Some(error) = progress_error {
            return Err(error);
        }
        self.policy
            .commit_copy(connection, unit, pulled?, started_at.elapsed())
    }

    /// Adds a problem to this round, and reports it if it is new.
    fn add_problem(&mut self, problem: &str) {
        if self.problems.add(problem) {
            self.policy.show_problem(problem);
        }
    }
}

#[cfg(test)]
mod tests {
    use firn_format::record::Ending;

    use super::*;
    use crate::error::WireError;
    use crate::message::{Entry, EntryKind};

    /// The units that a round lists; `None` if the list fails.
    type Round = Option<Vec<Unit>>;

    /// A policy with scripted rounds, and a record of the calls.
    #[derive(Default)]
    struct Script {
        rounds: std::collections::VecDeque<Round>,
        planned: Vec<String>,
        reported: Vec<String>,
    }

    fn connection_lost() -> PullError {
        PullError::Wire {
            host: "n1".into(),
            error: WireError::Ended,
        }
    }

    impl Policy for &mut Script {
        type Connection = ();
        type Reservation = ();

        fn retry_backoff(&self) -> Backoff {
            Backoff::new(Duration::ZERO, Duration::ZERO)
        }

        fn connect(&mut self) -> Result<(), PullError> {
            let next = self.rounds.front().ok_or_else(connection_lost);
            next.map(drop)
        }

        fn should_stop(&self, _error: &PullError, _time_unreachable: Duration) -> bool {
            true
        }

        fn list_units(&mut self, (): &mut ()) -> Result<Vec<Unit>, PullError> {
            self.rounds
                .pop_front()
                .flatten()
                .ok_or_else(connection_lost)
        }

        fn plan_copy(&mut self, (): &mut (), unit: &Unit) -> Result<CopyPlan<()>, PullError> {
            self.planned.push(unit.name.to_string());
            match self.planned.len() {
                1 => Ok(CopyPlan::Refuse("no room".into())),
                _ => Err(PullError::Busy {
                    path: unit.name.as_path().into(),
                }),
            }
        }

        fn commit_copy(
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
            _units: &[Unit],
        ) -> Result<Vec<PullError>, PullError> {
            Ok(Vec::new())
        }

        fn show_problem(&mut self, problem: &str) {
            self.reported.push(problem.to_owned());
        }

        fn wait_for_next_round(
            &mut self,
            (): &mut (),
            _round: RoundResult,
        ) -> Result<(), PullError> {
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

    /// Follows the scripted rounds until they end.
    fn follow(rounds: impl IntoIterator<Item = Round>) -> Script {
        let mut script = Script {
            rounds: rounds.into_iter().collect(),
            ..Script::default()
        };
        let _ = Follower::new(&mut script).run();
        script
    }

    #[test]
    fn a_unit_that_is_closed_and_unchanged_in_two_rounds_is_copied() {
        let closed = |bytes| unit("step", bytes, Ending::Closed);
        let open = || unit("open", 1, Ending::Open);
        let script = follow([Some(vec![closed(1), open()]), Some(vec![closed(2), open()])]);
        assert!(script.planned.is_empty(), "{:?}", script.planned);
        let script = follow([Some(vec![closed(1), open()]), Some(vec![closed(1), open()])]);
        assert_eq!(script.planned, ["step"]);
    }

    #[test]
    fn a_round_before_a_failure_does_not_count() {
        let closed = || Some(vec![unit("step", 1, Ending::Closed)]);
        assert!(follow([closed(), None, closed()]).planned.is_empty());
        assert_eq!(
            follow([closed(), None, closed(), closed()]).planned,
            ["step"]
        );
    }

    #[test]
    fn a_failure_of_one_copy_does_not_stop_others_and_is_reported_once() {
        let both = || {
            let names = ["one", "two"];
            Some(names.map(|name| unit(name, 1, Ending::Closed)).to_vec())
        };
        let script = follow([both(), both(), both(), both()]);
        assert_eq!(script.planned, ["one", "two", "one", "two", "one", "two"]);
        let busy = |name: &str| format!("another `firn pull` to {name} is under way");
        // The fourth report is the lost connection at the end of the script.
        assert_eq!(
            script.reported[..3],
            ["no room".to_owned(), busy("two"), busy("one")]
        );
        assert_eq!(script.reported.len(), 4, "{:?}", script.reported);
    }
}
