//! Partner copies: each checkpoint of another host, as it becomes complete.
//!
//! ```text
//!   list ─► complete, and the same as at the last look? ─► not here yet, or another? ─► pull ─► remove the oldest
//! ```
//!
//! Promises
//! * A copy is made as by [`pull`]: whole or not there. One that its source has changed since is exchanged for a whole
//!   new one by one rename.
//! * A copy is removed only when as many newer ones as are kept are whole.
//! * Whatever becomes of the source, copies stay; whatever fails is told and tried again, and what fails here keeps no
//!   other copy from being made or removed.
//! * The directory of the copies is one in which nobody else may replace names. What other users put into it is no
//!   copy and is not removed, and what they put into a copy makes that no newer, whatever its dates are.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use firn_format::record::Ending;
use firn_protocol::path::BytePath;
use firn_trust::{ObjectId, names_in, remove_object, visit_own};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, Stat, renameat_with, statat};
use rustix::io::Errno;

use crate::error::PullError;
use crate::peer::Route;
use crate::pull::{Listed, Outcome, PullRequest, PullSource, list, local, pull};
use crate::transport_choice::Carriage;

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
        error: &'a PullError,
    },
}

/// What tells one state of a checkpoint from another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Fingerprint {
    files: u64,
    bytes: u64,
    mtime_s: i64,
}

impl Fingerprint {
    fn of(listed: &Listed) -> Self {
        Self {
            files: listed.files,
            bytes: listed.bytes,
            mtime_s: listed.mtime_s,
        }
    }

    /// Of what is here, as far as it belongs to the user.
    fn of_tree(dir: &OwnedFd, name: &OsStr, uid: u32) -> Result<Self, Errno> {
        let mut found = Self::default();
        visit_own(dir, name, uid, &mut |stat| {
            if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
                found.files += 1;
                found.bytes += stat.st_size as u64;
            }
            // The width of this field differs between architectures.
            #[allow(clippy::unnecessary_cast)]
            let seconds = stat.st_mtime as i64;
            found.mtime_s = found.mtime_s.max(seconds);
        })?;
        Ok(found)
    }
}

/// Follows until `tell` ends the process. An error: the directory of the copies cannot be used.
pub fn follow(
    request: &FollowRequest,
    tell: &mut dyn FnMut(FollowEvent<'_>),
) -> Result<std::convert::Infallible, PullError> {
    let mut follower = Follower {
        request,
        copies: Copies::open(&request.target)?,
        seen: BTreeMap::new(),
        told: BTreeSet::new(),
    };
    loop {
        let told_before = std::mem::take(&mut follower.told);
        if let Err(error) = follower.look(&told_before, tell) {
            follower.tell_failure(&error, &told_before, tell);
        }
        std::thread::sleep(request.every);
    }
}

struct Follower<'a> {
    request: &'a FollowRequest,
    copies: Copies,
    /// What each checkpoint was at the last look.
    seen: BTreeMap<BytePath, Fingerprint>,
    /// What failed at this look.
    told: BTreeSet<String>,
}

/// The directory of the copies.
struct Copies {
    path: PathBuf,
    dir: OwnedFd,
    uid: u32,
}

impl Copies {
    fn open(path: &Path) -> Result<Self, PullError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(path, flags, Mode::empty());
        let dir = dir.map_err(|errno| local(path)(errno.into()))?;
        firn_trust::check_shared_parent(&dir, path)?;
        Ok(Self {
            path: path.to_owned(),
            dir,
            uid: rustix::process::geteuid().as_raw(),
        })
    }

    /// What has this name, where it is the user's.
    fn look_at(&self, name: &OsStr) -> Option<Stat> {
        let found = statat(&self.dir, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        (found.st_uid == self.uid).then_some(found)
    }

    fn fingerprint(&self, name: &OsStr) -> Result<Fingerprint, PullError> {
        Fingerprint::of_tree(&self.dir, name, self.uid).map_err(self.failed(name))
    }

    fn rename(&self, from: &OsStr, to: &OsStr, flags: RenameFlags) -> Result<(), PullError> {
        renameat_with(&self.dir, from, &self.dir, to, flags).map_err(self.failed(to))
    }

    /// Removes what is the user's under this name; nothing may be there.
    fn remove(&self, name: &OsStr) -> Result<(), PullError> {
        let Some(found) = self.look_at(name) else {
            return Ok(());
        };
        remove_object(&self.dir, name, ObjectId::of(&found)).map_err(self.failed(name))
    }

    fn failed(&self, name: &OsStr) -> impl Fn(Errno) -> PullError {
        let path = self.path.join(name);
        move |errno| local(&path)(errno.into())
    }
}

impl Follower<'_> {
    fn look(
        &mut self,
        told_before: &BTreeSet<String>,
        tell: &mut dyn FnMut(FollowEvent<'_>),
    ) -> Result<(), PullError> {
        let request = self.request;
        let mut listed = list(&request.host, &request.route, &request.source)?;
        listed.retain(|listed| is_name(listed.name.as_path().as_os_str()) && listed.files > 0);
        let now: BTreeMap<_, _> = listed
            .iter()
            .map(|listed| (listed.name.clone(), Fingerprint::of(listed)))
            .collect();
        let before = std::mem::replace(&mut self.seen, now);
        // The newest first: it is the one that a restart wants.
        listed.sort_by(|a, b| (b.mtime_s, &b.name).cmp(&(a.mtime_s, &a.name)));
        let is_settled = |listed: &&Listed| {
            listed.ending == Ending::Closed
                && before.get(&listed.name) == Some(&Fingerprint::of(listed))
        };
        for listed in listed.iter().filter(is_settled).take(request.keep) {
            match self.copy(listed, tell) {
                Err(error) if error.is_of_target() => {
                    self.tell_failure(&error, told_before, tell);
                }
                copied => copied?,
            }
        }
        self.remove_old(told_before, tell)
    }

    /// Tells what did not fail at the last look already.
    fn tell_failure(
        &mut self,
        error: &PullError,
        told_before: &BTreeSet<String>,
        tell: &mut dyn FnMut(FollowEvent<'_>),
    ) {
        let text = error.to_string();
        if !told_before.contains(&text) && !self.told.contains(&text) {
            tell(FollowEvent::Failed { error });
        }
        self.told.insert(text);
    }

    fn copy(
        &self,
        listed: &Listed,
        tell: &mut dyn FnMut(FollowEvent<'_>),
    ) -> Result<(), PullError> {
        let request = self.request;
        let copies = &self.copies;
        let name = listed.name.as_path().as_os_str();
        let is_here = copies.look_at(name).is_some();
        if is_here && copies.fingerprint(name)? == Fingerprint::of(listed) {
            return Ok(());
        }
        let next = match is_here {
            true => hidden(name, ".next"),
            false => name.to_owned(),
        };
        // One that an earlier follower did not come to exchange.
        if is_here {
            copies.remove(&next)?;
        }
        let begun = Instant::now();
        let outcome = pull(
            &PullRequest {
                host: request.host.clone(),
                route: request.route.clone(),
                source: PullSource::Path(request.source.as_path().join(&listed.name).into()),
                carriage: request.carriage.clone(),
                target: request.target.join(&next),
                cut: false,
                patience: Duration::ZERO,
                bytes_max: None,
            },
            &mut |_| {},
        )?;
        if is_here {
            copies.rename(&next, name, RenameFlags::EXCHANGE)?;
            copies.remove(&next)?;
        }
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        tell(FollowEvent::Copied {
            name: &listed.name,
            outcome: &outcome,
            elapsed: begun.elapsed(),
            lag_s: now.map_or(0.0, |now| now.as_secs_f64()) - listed.mtime_s as f64,
        });
        Ok(())
    }

    fn remove_old(
        &mut self,
        told_before: &BTreeSet<String>,
        tell: &mut dyn FnMut(FollowEvent<'_>),
    ) -> Result<(), PullError> {
        let dir = &self.copies.path;
        let names = names_in(&self.copies.dir).map_err(|errno| local(dir)(errno.into()))?;
        let (mut found, mut failures) = (Vec::new(), Vec::new());
        for name in names {
            if is_removed_name(&name) {
                failures.extend(self.copies.remove(&name).err());
            } else if is_name(&name) && self.copies.look_at(&name).is_some() {
                match self.copies.fingerprint(&name) {
                    Ok(copy) => found.push((copy.mtime_s, name)),
                    Err(error) => failures.push(error),
                }
            }
        }
        found.sort_by(|a, b| b.cmp(a));
        for (_, name) in found.into_iter().skip(self.request.keep) {
            match self.remove_copy(&name) {
                Ok(()) => tell(FollowEvent::Removed {
                    name: &BytePath::from(Path::new(&name)),
                }),
                Err(error) => failures.push(error),
            }
        }
        for error in failures {
            self.tell_failure(&error, told_before, tell);
        }
        Ok(())
    }

    /// Under a name of its own first: nothing is seen in part.
    fn remove_copy(&self, name: &OsStr) -> Result<(), PullError> {
        let removed = hidden(name, REMOVED);
        self.copies.rename(name, &removed, RenameFlags::empty())?;
        self.copies.remove(&removed)
    }
}

/// What is behind the name of a copy that is being removed.
const REMOVED: &str = ".removed";

/// Whether something of this name is a checkpoint.
fn is_name(name: &OsStr) -> bool {
    !name.is_empty() && !name.as_bytes().starts_with(b".")
}

fn is_removed_name(name: &OsStr) -> bool {
    let name = name.as_bytes();
    name.starts_with(b".") && name.ends_with(REMOVED.as_bytes())
}

fn hidden(name: &OsStr, suffix: &str) -> OsString {
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(suffix);
    hidden
}
