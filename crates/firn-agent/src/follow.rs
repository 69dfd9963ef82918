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
//! * Whatever becomes of the source, copies stay; whatever fails is told and tried again.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use firn_format::record::Ending;
use firn_protocol::path::BytePath;
use rustix::fs::{CWD, RenameFlags};

use crate::error::PullError;
use crate::peer::Route;
use crate::pull::{Listed, Outcome, PullRequest, PullSource, list, local, pull, remove_tree};
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

    /// Of what is here.
    fn of_tree(path: &Path) -> io::Result<Self> {
        let metadata = path.symlink_metadata()?;
        let mut found = Self {
            files: u64::from(metadata.is_file()),
            bytes: if metadata.is_file() {
                metadata.len()
            } else {
                0
            },
            mtime_s: metadata.mtime(),
        };
        if metadata.is_dir() {
            for entry in std::fs::read_dir(path)? {
                let below = Self::of_tree(&entry?.path())?;
                found.files += below.files;
                found.bytes += below.bytes;
                found.mtime_s = found.mtime_s.max(below.mtime_s);
            }
        }
        Ok(found)
    }
}

/// Follows until `tell` ends the process.
pub fn follow(request: &FollowRequest, tell: &mut dyn FnMut(FollowEvent<'_>)) -> ! {
    let mut follower = Follower {
        request,
        seen: BTreeMap::new(),
    };
    let mut told = String::new();
    loop {
        match follower.look(tell) {
            Ok(()) => told.clear(),
            Err(error) => {
                let text = error.to_string();
                if text != told {
                    tell(FollowEvent::Failed { error: &error });
                    told = text;
                }
            }
        }
        std::thread::sleep(request.every);
    }
}

struct Follower<'a> {
    request: &'a FollowRequest,
    /// What each checkpoint was at the last look.
    seen: BTreeMap<BytePath, Fingerprint>,
}

impl Follower<'_> {
    fn look(&mut self, tell: &mut dyn FnMut(FollowEvent<'_>)) -> Result<(), PullError> {
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
            self.copy(listed, tell)?;
        }
        self.remove_old(tell)
    }

    fn copy(
        &self,
        listed: &Listed,
        tell: &mut dyn FnMut(FollowEvent<'_>),
    ) -> Result<(), PullError> {
        let request = self.request;
        let target = request.target.join(&listed.name);
        let here = Fingerprint::of_tree(&target).ok();
        if here == Some(Fingerprint::of(listed)) {
            return Ok(());
        }
        let next = match here {
            Some(_) => request.target.join(hidden(&listed.name, ".next")),
            None => target.clone(),
        };
        // One that an earlier follower did not come to exchange.
        if here.is_some() {
            remove_tree(&next)?;
        }
        let begun = Instant::now();
        let outcome = pull(
            &PullRequest {
                host: request.host.clone(),
                route: request.route.clone(),
                source: PullSource::Path(request.source.as_path().join(&listed.name).into()),
                carriage: request.carriage.clone(),
                target: next.clone(),
                cut: false,
                patience: Duration::ZERO,
            },
            &mut |_| {},
        )?;
        if here.is_some() {
            let exchange = RenameFlags::EXCHANGE;
            rustix::fs::renameat_with(CWD, &next, CWD, &target, exchange)
                .map_err(|errno| local(&target)(errno.into()))?;
            remove_tree(&next)?;
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

    fn remove_old(&self, tell: &mut dyn FnMut(FollowEvent<'_>)) -> Result<(), PullError> {
        let dir = &self.request.target;
        let mut copies = Vec::new();
        for entry in std::fs::read_dir(dir).map_err(local(dir))? {
            let path = entry.map_err(local(dir))?.path();
            let name = path.file_name().unwrap_or_default();
            if name.as_bytes().ends_with(b".removed") && name.as_bytes().starts_with(b".") {
                remove_tree(&path)?;
            } else if is_name(name) {
                let found = Fingerprint::of_tree(&path).map_err(local(&path))?;
                copies.push((found.mtime_s, path));
            }
        }
        copies.sort_by(|a, b| b.cmp(a));
        for (_, path) in copies.into_iter().skip(self.request.keep) {
            let name = BytePath::from(Path::new(path.file_name().unwrap_or_default()));
            // Under a name of its own first: nothing is seen in part.
            let removed = dir.join(hidden(&name, ".removed"));
            std::fs::rename(&path, &removed).map_err(local(&path))?;
            remove_tree(&removed)?;
            tell(FollowEvent::Removed { name: &name });
        }
        Ok(())
    }
}

/// Whether something of this name is a checkpoint.
fn is_name(name: &OsStr) -> bool {
    !name.is_empty() && !name.as_bytes().starts_with(b".")
}

fn hidden(name: &BytePath, suffix: &str) -> OsString {
    let mut hidden = OsString::from(".");
    hidden.push(name.as_path());
    hidden.push(suffix);
    hidden
}
