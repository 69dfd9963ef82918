//! Which checkpoints of a directory may go, and how they go.
//!
//! A checkpoint is a directory directly below the one that is asked about; files, symbolic links and names that
//! begin with a dot are none. firnd says of each file whether a program has it open, and whether its writers closed
//! it.
//!
//! Invariants
//! * The newest checkpoint stays, whatever its files look like: nobody can tell from outside whether its job has
//!   more to write.
//! * A checkpoint that is open, or that a symbolic link beside it leads to, stays.
//! * As many complete ones as are asked for stay beside the newest one. One that was cut off is not complete.
//! * Nobody sees half a checkpoint under its name: it is renamed before anything in it is removed. What an
//!   interrupted removal left under the other name goes the next time.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};
use std::time::SystemTime;

use firn_client::{Connection, Mount, Place};
use firn_format::record::Ending;
use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::failure::{FAILED, Failure};
use crate::text;

/// A checkpoint that is being removed is called `.NAME` and this.
const REMOVED_SUFFIX: &[u8] = b".pruned";

/// What becomes of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It goes.
    Remove,
    /// It stays: nothing newer was begun, so it may be in the making.
    Newest,
    /// It stays: it is one of those to keep.
    Kept,
    /// It stays: a program has a file of it open.
    Open,
    /// It stays: a symbolic link beside it leads to it.
    Linked,
}

/// A checkpoint, and what becomes of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// Its name in the directory.
    pub name: OsString,
    /// What becomes of it.
    pub verdict: Verdict,
}

/// A checkpoint as it was found.
#[derive(Clone, Debug)]
struct Found {
    name: OsString,
    /// Newest time of modification of anything in it.
    modified: SystemTime,
    is_linked: bool,
    state: State,
}

/// The worst of what firnd says of a checkpoint's files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    #[default]
    Closed,
    /// The writer of a file was killed.
    Cut,
    /// A program has a file open.
    Open,
}

/// A directory of checkpoints on a mount.
#[derive(Debug)]
pub struct Directory {
    mount: Mount,
    path: PathBuf,
}

impl Directory {
    /// The directory at a place of a mount.
    pub fn new(place: Place) -> Self {
        let path = place.mount.mount_point.join(&place.relative);
        Self {
            mount: place.mount,
            path,
        }
    }

    /// Its checkpoints, the newest first, and what becomes of each where `keep` complete ones are to stay.
    pub fn judge(&self, keep: usize) -> Result<Vec<Checkpoint>, Failure> {
        let states = self.read_states(&self.path)?;
        let mut found = Vec::new();
        let mut linked = HashSet::new();
        for entry in std::fs::read_dir(&self.path).map_err(failed(&self.path))? {
            let entry = entry.map_err(failed(&self.path))?;
            let kind = entry.file_type().map_err(failed(&entry.path()))?;
            if kind.is_symlink() {
                linked.extend(self.linked_checkpoint(&entry.path()));
            } else if kind.is_dir() && !entry.file_name().as_bytes().starts_with(b".") {
                let modified = newest_change(&entry.path())?;
                let name = entry.file_name();
                let state = states.get(&name).copied().unwrap_or_default();
                found.push(Found {
                    name,
                    modified,
                    is_linked: false,
                    state,
                });
            }
        }
        for checkpoint in &mut found {
            checkpoint.is_linked = linked.contains(&checkpoint.name);
        }
        Ok(judge(found, keep))
    }

    /// Removes a checkpoint. `false`: a program opened a file of it meanwhile, and it stays.
    pub fn remove(&self, name: &OsStr) -> Result<bool, Failure> {
        let path = self.path.join(name);
        let removed = self.path.join(removed_name(name));
        renameat_with(CWD, &path, CWD, &removed, RenameFlags::NOREPLACE)
            .map_err(|errno| failed(&path)(errno.into()))?;
        if self.is_open(&removed)? {
            renameat_with(CWD, &removed, CWD, &path, RenameFlags::NOREPLACE)
                .map_err(|errno| failed(&removed)(errno.into()))?;
            return Ok(false);
        }
        std::fs::remove_dir_all(&removed).map_err(failed(&removed))?;
        Ok(true)
    }

    /// Removes what interrupted removals left; gives the number of checkpoints.
    pub fn finish_removals(&self) -> Result<usize, Failure> {
        let mut finished = 0;
        for entry in std::fs::read_dir(&self.path).map_err(failed(&self.path))? {
            let entry = entry.map_err(failed(&self.path))?;
            let is_dir = entry.file_type().map_err(failed(&entry.path()))?.is_dir();
            if is_dir && is_removed_name(&entry.file_name()) && !self.is_open(&entry.path())? {
                std::fs::remove_dir_all(entry.path()).map_err(failed(&entry.path()))?;
                finished += 1;
            }
        }
        Ok(finished)
    }

    fn is_open(&self, dir: &Path) -> Result<bool, Failure> {
        let states = self.read_states(dir)?;
        Ok(states.values().any(|state| *state == State::Open))
    }

    /// What firnd says of the files below `dir`, by the name in `dir` that they are below.
    fn read_states(&self, dir: &Path) -> Result<HashMap<OsString, State>, Failure> {
        let relative = dir.strip_prefix(&self.mount.mount_point).unwrap_or(dir);
        let mut states = HashMap::<OsString, State>::new();
        for file in Connection::open(&self.mount)?.files(&relative.into())? {
            let state = match (file.open, file.ending) {
                (true, _) => State::Open,
                (false, Ending::Cut) => State::Cut,
                (false, _) => State::Closed,
            };
            let path = file.path.as_path();
            let below = path.strip_prefix(relative).unwrap_or(path);
            if let Some(Component::Normal(name)) = below.components().next() {
                let worst = states.entry(name.to_owned()).or_default();
                *worst = state.max(*worst);
            }
        }
        Ok(states)
    }

    /// The checkpoint that a symbolic link of this directory leads to or into.
    fn linked_checkpoint(&self, link: &Path) -> Option<OsString> {
        let target = link.canonicalize().ok()?;
        let top = self.path.canonicalize().ok()?;
        match target.strip_prefix(top).ok()?.components().next() {
            Some(Component::Normal(name)) => Some(name.to_owned()),
            _ => None,
        }
    }
}

fn judge(mut found: Vec<Found>, keep: usize) -> Vec<Checkpoint> {
    // Equal times are those of one tick of the clock: then the name decides, so that two runs say the same.
    found.sort_by(|a, b| (b.modified, &b.name).cmp(&(a.modified, &a.name)));
    let mut complete = 0;
    let mut judged = Vec::with_capacity(found.len());
    for (index, checkpoint) in found.into_iter().enumerate() {
        let is_enough = complete >= keep;
        let verdict = match checkpoint.state {
            _ if index == 0 => Verdict::Newest,
            State::Open => Verdict::Open,
            _ if checkpoint.is_linked => Verdict::Linked,
            _ if is_enough => Verdict::Remove,
            _ => Verdict::Kept,
        };
        complete += usize::from(index > 0 && checkpoint.state == State::Closed);
        judged.push(Checkpoint {
            name: checkpoint.name,
            verdict,
        });
    }
    judged
}

fn removed_name(name: &OsStr) -> OsString {
    OsString::from_vec([b".", name.as_bytes(), REMOVED_SUFFIX].concat())
}

fn is_removed_name(name: &OsStr) -> bool {
    let name = name.as_bytes();
    name.starts_with(b".")
        && name.ends_with(REMOVED_SUFFIX)
        && name.len() > 1 + REMOVED_SUFFIX.len()
}

/// Newest time of modification of `path` and, where it is a directory, of anything below it. What vanishes meanwhile
/// does not count.
fn newest_change(path: &Path) -> Result<SystemTime, Failure> {
    let metadata = match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(SystemTime::UNIX_EPOCH),
        metadata => metadata.map_err(failed(path))?,
    };
    let mut newest = metadata.modified().map_err(failed(path))?;
    if metadata.is_dir() {
        for entry in std::fs::read_dir(path).map_err(failed(path))? {
            newest = newest.max(newest_change(&entry.map_err(failed(path))?.path())?);
        }
    }
    Ok(newest)
}

fn failed(path: &Path) -> impl Fn(io::Error) -> Failure {
    let path = text::path(path);
    move |error| Failure::new(FAILED, format!("{path}: {error}"))
}

impl Verdict {
    /// In one word, for lists and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Remove => "remove",
            Self::Newest => "newest",
            Self::Kept => "kept",
            Self::Open => "open",
            Self::Linked => "linked",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn found(name: &str, age: u64, state: State) -> Found {
        let modified = SystemTime::UNIX_EPOCH + Duration::from_secs(1000 - age);
        Found {
            name: name.into(),
            modified,
            is_linked: name.ends_with('@'),
            state,
        }
    }

    fn verdicts(found: Vec<Found>, keep: usize) -> Vec<(String, Verdict)> {
        let judged = judge(found, keep).into_iter();
        judged
            .map(|one| (one.name.into_string().expect("UTF-8"), one.verdict))
            .collect()
    }

    fn told(list: &[(&str, Verdict)]) -> Vec<(String, Verdict)> {
        list.iter()
            .map(|(name, verdict)| ((*name).to_owned(), *verdict))
            .collect()
    }

    /// Proves S-prune-1.
    #[test]
    fn the_newest_complete_ones_stay() {
        let all = || {
            (0..5)
                .map(|age| found(&format!("step{}", 5 - age), age, State::Closed))
                .collect()
        };
        let [newest, kept, remove] = [Verdict::Newest, Verdict::Kept, Verdict::Remove];
        assert_eq!(
            verdicts(all(), 2),
            told(&[
                ("step5", newest),
                ("step4", kept),
                ("step3", kept),
                ("step2", remove),
                ("step1", remove)
            ])
        );
        assert!(
            verdicts(all(), 4)
                .iter()
                .all(|(_, verdict)| *verdict != remove)
        );
    }

    /// Proves S-prune-1.
    #[test]
    fn one_that_was_cut_off_makes_no_other_go_and_goes_with_the_older_ones() {
        let all = vec![
            found("e", 0, State::Closed),
            found("d", 1, State::Cut),
            found("c", 2, State::Closed),
            found("b", 3, State::Cut),
            found("a", 4, State::Closed),
        ];
        assert_eq!(
            verdicts(all, 1),
            told(&[
                ("e", Verdict::Newest),
                ("d", Verdict::Kept),
                ("c", Verdict::Kept),
                ("b", Verdict::Remove),
                ("a", Verdict::Remove),
            ])
        );
    }

    /// Proves S-prune-1, S-prune-3.
    #[test]
    fn what_is_open_or_linked_stays_and_only_what_is_linked_counts() {
        let all = vec![
            found("d", 0, State::Closed),
            found("c", 1, State::Open),
            found("latest@", 2, State::Closed),
            found("a", 3, State::Closed),
        ];
        assert_eq!(
            verdicts(all, 1),
            told(&[
                ("d", Verdict::Newest),
                ("c", Verdict::Open),
                ("latest@", Verdict::Linked),
                ("a", Verdict::Remove),
            ])
        );
    }

    #[test]
    fn only_names_of_a_removal_are_taken_for_one() {
        assert!(is_removed_name(&removed_name(OsStr::new("step1"))));
        for name in ["step1", ".pruned", "..pruned.", "step1.pruned", ".step1"] {
            assert!(!is_removed_name(OsStr::new(name)), "{name}");
        }
    }
}
