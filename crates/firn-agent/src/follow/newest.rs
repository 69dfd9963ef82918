//! `firn pull --follow`: the newest checkpoints of a host that knows nothing of its copies.
//!
//! Promises
//! * A copy is removed only when as many newer ones as are kept are whole. Whatever becomes of the source, copies stay.
//! * The directory of the copies is one in which no other user may replace names. What other users put into it is no
//!   copy and is not removed, and what they put into a copy makes that no newer, whatever its dates are.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use firn_backing::backoff::Backoff;
use firn_protocol::path::BytePath;
use firn_trust::visit_own;
use rustix::fs::FileType;

use crate::copy_directory::{CopyDirectory, is_name};
use crate::error::PullError;
use crate::follow::{Follower, LookReport, Policy, Step};
use crate::peer::{Peer, Route};
use crate::pull::{Listed, Outcome, PullRequest, PullSource, check_entries};
use crate::source::join;
use crate::transport_choice::Carriage;
use crate::units::{Unit, group_by_name};

/// What is followed.
pub struct FollowRequest {
    /// Name of the source host.
    pub host: String,
    /// How its agent is reached.
    pub route: Route,
    /// The directory there whose entries are checkpoints; empty: the mount of the agent.
    pub source: BytePath,
    /// What carries bytes.
    pub carriage: Carriage,
    /// Where the copies are: a directory for them alone.
    pub target: PathBuf,
    /// How many are kept.
    pub keep: usize,
    /// Between two looks.
    pub every: Duration,
}

/// What happened.
pub enum FollowEvent<'a> {
    /// There is a new copy.
    Copied {
        /// Its name.
        name: &'a BytePath,
        /// What came.
        outcome: &'a Outcome,
        /// How long the pull took.
        elapsed: Duration,
        /// Seconds from the last change of the source to the copy.
        lag_s: f64,
    },
    /// An old copy is gone.
    Removed {
        /// Its name.
        name: &'a BytePath,
    },
    /// Something failed; it is tried again. The same failure is told once.
    Failed {
        /// What.
        problem: &'a str,
    },
}

/// Follows until `tell` ends the process. An error: the directory of the copies cannot be used.
pub fn follow(
    request: &FollowRequest,
    tell: &mut dyn FnMut(FollowEvent<'_>),
) -> Result<std::convert::Infallible, PullError> {
    let policy = KeepNewest {
        request,
        directory: CopyDirectory::open(&request.target)?,
        chosen: 0,
        tell,
    };
    Err(Follower::new(policy).run())
}

/// See the head of this file.
struct KeepNewest<'a> {
    request: &'a FollowRequest,
    directory: CopyDirectory,
    /// Complete checkpoints of this look that were found so far.
    chosen: usize,
    tell: &'a mut dyn FnMut(FollowEvent<'_>),
}

impl Policy for KeepNewest<'_> {
    /// An agent serves few pullers at once: the connection for a list ends with it.
    type Connection = ();
    type Room = ();

    fn retry(&self) -> Backoff {
        Backoff::new(self.request.every, self.request.every)
    }

    fn connect(&mut self) -> Result<(), PullError> {
        Ok(())
    }

    fn list(&mut self, (): &mut ()) -> Result<Vec<Unit>, PullError> {
        let mut peer = Peer::connect(&self.request.host, &self.request.route)?;
        let (_, entries) = peer.list(&self.request.source)?;
        let entries = check_entries(entries).map_err(|what| peer.implausible(what))?;
        let mut units = group_by_name(&entries);
        units.retain(|unit| is_name(unit.file_name()) && Listed::of(unit).files > 0);
        self.chosen = 0;
        Ok(units)
    }

    fn plan_copy(&mut self, (): &mut (), unit: &Unit) -> Result<Step<()>, PullError> {
        if self.chosen == self.request.keep {
            return Ok(Step::Skip);
        }
        self.chosen += 1;
        let name = unit.file_name();
        if self.directory.has(name) && self.find_copy(name)? == Listed::of(unit) {
            return Ok(Step::Skip);
        }
        let request = PullRequest {
            host: self.request.host.clone(),
            route: self.request.route.clone(),
            source: PullSource::Path(join(&self.request.source, unit.name.as_path())),
            carriage: self.request.carriage.clone(),
            target: self.directory.begin(name)?,
            cut: false,
            patience: Duration::ZERO,
            bytes_max: None,
        };
        Ok(Step::Pull { request, room: () })
    }

    fn finish_copy(
        &mut self,
        (): &mut (),
        unit: &Unit,
        outcome: Outcome,
        elapsed: Duration,
    ) -> Result<(), PullError> {
        self.directory.finish(unit.file_name())?;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        (self.tell)(FollowEvent::Copied {
            name: &unit.name,
            outcome: &outcome,
            elapsed,
            lag_s: now.map_or(0.0, |now| now.as_secs_f64()) - Listed::of(unit).mtime_s as f64,
        });
        Ok(())
    }

    fn remove_unneeded(&mut self, (): &mut (), _now: &[Unit]) -> Result<Vec<PullError>, PullError> {
        let mut failures = self.directory.sweep();
        let mut dated = Vec::new();
        for name in self.directory.names()? {
            match self.find_copy(&name) {
                Ok(copy) => dated.push((copy.mtime_s, name)),
                Err(error) => failures.push(error),
            }
        }
        dated.sort_by(|a, b| b.cmp(a));
        for (_, name) in dated.into_iter().skip(self.request.keep) {
            failures.extend(self.remove(&name).err());
        }
        Ok(failures)
    }

    fn tell_problem(&mut self, problem: &str) {
        (self.tell)(FollowEvent::Failed { problem });
    }

    fn wait(&mut self, (): &mut (), _look: LookReport) -> Result<(), PullError> {
        std::thread::sleep(self.request.every);
        Ok(())
    }
}

impl KeepNewest<'_> {
    /// What has this name here, as far as it belongs to the user, in the words of a list.
    fn find_copy(&self, name: &OsStr) -> Result<Listed, PullError> {
        let mut found = Listed::new(Path::new(name).into());
        let uid = rustix::process::geteuid().as_raw();
        visit_own(&self.directory, name, uid, &mut |_, stat| {
            if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
                found.files += 1;
                found.bytes += stat.st_size as u64;
            }
            // The width of this field differs between architectures.
            #[allow(clippy::unnecessary_cast)]
            let seconds = stat.st_mtime as i64;
            found.mtime_s = found.mtime_s.max(seconds);
        })
        .map_err(self.directory.failed(name))?;
        Ok(found)
    }

    fn remove(&mut self, name: &OsString) -> Result<(), PullError> {
        self.directory.remove(name)?;
        (self.tell)(FollowEvent::Removed {
            name: &BytePath::from(Path::new(name)),
        });
        Ok(())
    }
}
