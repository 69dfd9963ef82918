//! `firn pull --follow`: keeps copies of the newest checkpoints of another host, the *source*. The source is not
//! notified of the copies.
//!
//! Promises
//! * A copy is removed only if there are enough newer complete copies (`keep`). The end or loss of the source removes
//!   no copy.
//! * No other user may replace names in the directory of the copies. Files of other users there do not count as copies,
//!   and are not removed. Files that other users put into a copy do not influence its age.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use firn_backing::backoff::Backoff;
use firn_protocol::path::BytePath;
use firn_trust::visit_own;
use rustix::fs::FileType;

use crate::copy_directory::{CopyDirectory, is_copy_name};
use crate::error::PullError;
use crate::follow::{CopyPlan, Follower, Policy, RoundResult};
use crate::peer::{Peer, Route};
use crate::pull::{Outcome, PullRequest, PullSource, UnitTotals, check_entries};
use crate::source::join;
use crate::transport_choice::DataTransport;
use crate::units::{Unit, group_by_name};

/// The source, the target and the options of `firn pull --follow`.
pub struct FollowRequest {
    /// Name of the source host.
    pub host: String,
    /// How to reach the agent of the source host.
    pub route: Route,
    /// Directory of the source host whose entries are checkpoints; empty means the mount that the agent serves.
    pub source: BytePath,
    /// Transport of the files' bytes: the connection, or libfabric (RDMA).
    pub carriage: DataTransport,
    /// Directory of the copies. It contains nothing else.
    pub target: PathBuf,
    /// Number of copies to keep.
    pub keep: usize,
    /// Time between two rounds.
    pub every: Duration,
}

/// An event that is reported to a user.
pub enum FollowEvent<'a> {
    /// A new copy is complete.
    Copied {
        /// Name of the copy.
        name: &'a BytePath,
        /// Result of the pull.
        outcome: &'a Outcome,
        /// Time that the pull took.
        elapsed: Duration,
        /// Seconds from the last change of the source to the complete copy.
        lag_s: f64,
    },
    /// An old copy was removed.
    Removed {
        /// Name of the copy.
        name: &'a BytePath,
    },
    /// A step failed and will be tried again. A failure that persists is reported once.
    Failed {
        /// Description of the failure.
        problem: &'a str,
    },
}

/// Follows a host until the process ends. `report` is called for each event. Returns only if the directory of the
/// copies cannot be used.
pub fn follow(
    request: &FollowRequest,
    report: &mut dyn FnMut(FollowEvent<'_>),
) -> Result<std::convert::Infallible, PullError> {
    let policy = KeepNewest {
        request,
        directory: CopyDirectory::open(&request.target)?,
        chosen_count: 0,
        report,
    };
    Err(Follower::new(policy).run())
}

/// The policy that keeps the newest checkpoints; see the head of this file.
struct KeepNewest<'a> {
    request: &'a FollowRequest,
    directory: CopyDirectory,
    /// Number of complete checkpoints that this round has chosen so far. The newest ones are chosen first.
    chosen_count: usize,
    report: &'a mut dyn FnMut(FollowEvent<'_>),
}

impl Policy for KeepNewest<'_> {
    /// Between rounds there is no connection, because an agent serves few pullers at once. Each list connects again.
    type Connection = ();
    type Reservation = ();

    fn retry_backoff(&self) -> Backoff {
        Backoff::new(self.request.every, self.request.every)
    }

    fn connect(&mut self) -> Result<(), PullError> {
        Ok(())
    }

    fn list_units(&mut self, (): &mut ()) -> Result<Vec<Unit>, PullError> {
        let mut peer = Peer::connect(&self.request.host, &self.request.route)?;
        let list = peer.list(&self.request.source)?;
        let entries = check_entries(list.entries).map_err(|what| peer.implausible(what))?;
        let mut units = group_by_name(&entries);
        units
            .retain(|unit| is_copy_name(unit.file_name()) && UnitTotals::from_unit(unit).files > 0);
        self.chosen_count = 0;
        Ok(units)
    }

    /// Decides whether to copy one unit, usually a checkpoint, of the followed host. A unit is a name in the listed
    /// directory with everything below it.
    ///
    /// Each list begins with the newest unit. Its first `keep` units are copied, except those with a current copy: one
    /// with the same number of files and bytes and the same newest time.
    fn plan_copy(&mut self, (): &mut (), unit: &Unit) -> Result<CopyPlan<()>, PullError> {
        if self.chosen_count == self.request.keep {
            return Ok(CopyPlan::Skip);
        }
        self.chosen_count += 1;
        let name = unit.file_name();
        if self.directory.has_copy(name)
            && self.summarize_copy(name)? == UnitTotals::from_unit(unit)
        {
            return Ok(CopyPlan::Skip);
        }
        let request = PullRequest {
            host: self.request.host.clone(),
            route: self.request.route.clone(),
            source: PullSource::Path(join(&self.request.source, unit.name.as_path())),
            carriage: self.request.carriage.clone(),
            target: self.directory.begin_copy(name)?,
            // A unit with an open file is an error.
            cut: false,
            // A stalled pull ends at once. The next round tries again.
            patience: Duration::ZERO,
            bytes_max: None,
        };
        // This policy bounds no space, so nothing is reserved.
        Ok(CopyPlan::Pull {
            request,
            reservation: (),
        })
    }

    /// Gives the complete copy of a unit (usually a checkpoint) its name, and reports it to the user. The report has
    /// the seconds from the last change of the unit at the source, the followed host, until now.
    fn commit_copy(
        &mut self,
        (): &mut (),
        unit: &Unit,
        outcome: Outcome,
        elapsed: Duration,
    ) -> Result<(), PullError> {
        self.directory.commit_copy(unit.file_name())?;
        let time_since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now_s = time_since_epoch.map_or(0.0, |time| time.as_secs_f64());
        (self.report)(FollowEvent::Copied {
            name: &unit.name,
            outcome: &outcome,
            elapsed,
            lag_s: now_s - UnitTotals::from_unit(unit).mtime_s as f64,
        });
        Ok(())
    }

    /// Removes leftovers of interrupted copies, and all copies but the newest `keep`. What the source (the followed
    /// host) has now does not matter. Returns one error for each copy that could not be examined or removed.
    fn remove_unneeded(
        &mut self,
        (): &mut (),
        _units: &[Unit],
    ) -> Result<Vec<PullError>, PullError> {
        let mut failures = self.directory.remove_leftovers();
        let mut copies_by_time = Vec::new();
        for name in self.directory.copy_names()? {
            match self.summarize_copy(&name) {
                Ok(summary) => copies_by_time.push((summary.mtime_s, name)),
                Err(error) => failures.push(error),
            }
        }
        // The newest copy comes first.
        copies_by_time.sort_by(|a, b| b.cmp(a));
        for (_, name) in copies_by_time.into_iter().skip(self.request.keep) {
            if let Err(error) = self.remove_copy(&name) {
                failures.push(error);
            }
        }
        Ok(failures)
    }

    fn show_problem(&mut self, problem: &str) {
        (self.report)(FollowEvent::Failed { problem });
    }

    fn wait_for_next_round(
        &mut self,
        (): &mut (),
        _last_round: RoundResult,
    ) -> Result<(), PullError> {
        std::thread::sleep(self.request.every);
        Ok(())
    }
}

impl KeepNewest<'_> {
    /// Computes the totals of a local copy: number of files, bytes and newest time, as for a unit (a checkpoint) at the
    /// followed host. Ignores files of other users.
    fn summarize_copy(&self, name: &OsStr) -> Result<UnitTotals, PullError> {
        let mut summary = UnitTotals::new(Path::new(name).into());
        let uid = rustix::process::geteuid().as_raw();
        visit_own(&self.directory, name, uid, &mut |_, stat| {
            if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
                summary.files += 1;
                summary.bytes += stat.st_size as u64;
            }
            // The width of this field differs between architectures.
            #[allow(clippy::unnecessary_cast)]
            let mtime_s = stat.st_mtime as i64;
            summary.mtime_s = summary.mtime_s.max(mtime_s);
        })
        .map_err(self.directory.error_at(name))?;
        Ok(summary)
    }

    /// Removes a copy and reports it.
    fn remove_copy(&mut self, name: &OsString) -> Result<(), PullError> {
        self.directory.remove_copy(name)?;
        (self.report)(FollowEvent::Removed {
            name: &BytePath::from(Path::new(name)),
        });
        Ok(())
    }
}
