//! Which checkpoints of a directory may go, and how they go.
//!
//! A checkpoint is a directory of the user directly below the one that is asked about; files, symbolic links and names
//! that begin with a dot are none. What other users made there, or in a checkpoint, does not count, whatever its dates
//! are. firnd says of each file whether a program has it open, and whether its writers closed it.
//!
//! Invariants
//! * The newest checkpoint stays, whatever its files look like: nobody can tell from outside whether its job has
//!   more to write.
//! * A checkpoint that is open, or that a symbolic link beside it leads to, stays.
//! * As many complete ones as are asked for stay beside the newest one. One that was cut off is not complete.
//! * Nobody sees half a checkpoint under its name: it is renamed before anything in it is removed. What an
//!   interrupted removal left under the other name goes the next time.
//! * What is removed is the directory that was judged, by its descriptor, and not what has its name by then.
//! * One that cannot be judged or removed stays, and keeps no other one from going.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use firn_client::{Connection, Mount, Place};
use firn_format::record::Ending;
use firn_trust::{ObjectId, names_in, remove_object, visit_own};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, Stat, renameat_with, statat};
use rustix::io::Errno;

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
    /// It stays: another user made it.
    Foreign,
    /// It stays: something in it cannot be looked at, as was told.
    Unknown,
}

/// A checkpoint, and what becomes of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// Its name in the directory.
    pub name: OsString,
    /// What becomes of it.
    pub verdict: Verdict,
    /// Which directory was judged.
    object: ObjectId,
}

/// What became of a directory that was to be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// It is gone.
    Removed,
    /// A program opened a file of it meanwhile, and it stays.
    Opened,
}

/// A directory of checkpoints, looked at.
pub struct Judged {
    /// The user's checkpoints, the newest first, and then what does not count.
    pub checkpoints: Vec<Checkpoint>,
    /// Why some could not be looked at.
    pub failures: Vec<Failure>,
}

/// A checkpoint as it was found.
#[derive(Clone, Debug)]
struct Found {
    name: OsString,
    object: ObjectId,
    /// Newest time of modification of anything of the user's in it: seconds and nanoseconds.
    modified: (i64, i64),
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
    dir: OwnedFd,
    /// Whose checkpoints count.
    uid: u32,
}

impl Directory {
    /// Opens the directory at a place of a mount.
    pub fn open(place: Place) -> Result<Self, Failure> {
        let path = place.mount.mount_point.join(&place.relative);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(&path, flags, Mode::empty()).map_err(failed(&path))?;
        Ok(Self {
            mount: place.mount,
            path,
            dir,
            uid: rustix::process::geteuid().as_raw(),
        })
    }

    /// Judges its checkpoints where `keep` complete ones are to stay.
    pub fn judge(&self, keep: usize) -> Result<Judged, Failure> {
        let states = self.read_states(&self.path)?;
        let mut found = Vec::new();
        let mut others = Vec::new();
        let mut failures = Vec::new();
        let mut linked = HashSet::new();
        for name in names_in(&self.dir).map_err(failed(&self.path))? {
            let path = self.path.join(&name);
            let Some(stat) = self.look_at(&name)? else {
                continue;
            };
            let kind = FileType::from_raw_mode(stat.st_mode);
            if kind == FileType::Symlink {
                linked.extend(self.linked_checkpoint(&path));
            }
            if kind != FileType::Directory || name.as_bytes().starts_with(b".") {
                continue;
            }
            let object = ObjectId::of(&stat);
            let stays = |verdict| Checkpoint {
                name: name.clone(),
                verdict,
                object,
            };
            if stat.st_uid != self.uid {
                others.push(stays(Verdict::Foreign));
                continue;
            }
            match self.newest_change(&name) {
                Ok(modified) => found.push(Found {
                    state: states.get(&name).copied().unwrap_or_default(),
                    name,
                    object,
                    modified,
                    is_linked: false,
                }),
                Err(errno) => {
                    failures.push(failed(&path)(errno));
                    others.push(stays(Verdict::Unknown));
                }
            }
        }
        for checkpoint in &mut found {
            checkpoint.is_linked = linked.contains(&checkpoint.name);
        }
        let mut checkpoints = judge(found, keep);
        others.sort_by(|a, b| a.name.cmp(&b.name));
        checkpoints.extend(others);
        Ok(Judged {
            checkpoints,
            failures,
        })
    }

    /// Removes a checkpoint that was judged.
    pub fn remove(&self, checkpoint: &Checkpoint) -> Result<Removal, Failure> {
        let name = &checkpoint.name;
        let removed = removed_name(name);
        self.rename(name, &removed)?;
        let is_same = self
            .look_at(&removed)?
            .is_some_and(|stat| ObjectId::of(&stat) == checkpoint.object);
        if !is_same {
            self.rename(&removed, name)?;
            return Err(failed(&self.path.join(name))(Errno::STALE));
        }
        if self.is_open(&removed)? {
            self.rename(&removed, name)?;
            return Ok(Removal::Opened);
        }
        self.remove_renamed(&removed, checkpoint.object)?;
        Ok(Removal::Removed)
    }

    /// Removes what interrupted removals left; gives why something could not be removed.
    pub fn finish_removals(&self) -> Result<Vec<Failure>, Failure> {
        let mut failures = Vec::new();
        for name in names_in(&self.dir).map_err(failed(&self.path))? {
            if !is_removed_name(&name) {
                continue;
            }
            let Some(stat) = self.look_at(&name)? else {
                continue;
            };
            let is_dir = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
            if is_dir && stat.st_uid == self.uid && !self.is_open(&name)? {
                let removed = self.remove_renamed(&name, ObjectId::of(&stat));
                failures.extend(removed.err());
            }
        }
        Ok(failures)
    }

    fn look_at(&self, name: &OsStr) -> Result<Option<Stat>, Failure> {
        match statat(&self.dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(failed(&self.path.join(name))(errno)),
        }
    }

    fn rename(&self, from: &OsStr, to: &OsStr) -> Result<(), Failure> {
        let renamed = renameat_with(&self.dir, from, &self.dir, to, RenameFlags::NOREPLACE);
        renamed.map_err(failed(&self.path.join(from)))
    }

    fn remove_renamed(&self, name: &OsStr, object: ObjectId) -> Result<(), Failure> {
        let removed = remove_object(&self.dir, name, object);
        removed.map_err(failed(&self.path.join(name)))
    }

    /// Newest time of modification of a checkpoint and all of the user's below it.
    fn newest_change(&self, name: &OsStr) -> Result<(i64, i64), Errno> {
        let mut newest = (i64::MIN, 0);
        visit_own(&self.dir, name, self.uid, &mut |stat| {
            // The width of these fields differs between architectures.
            #[allow(clippy::unnecessary_cast)]
            let time = (stat.st_mtime as i64, stat.st_mtime_nsec as i64);
            newest = newest.max(time);
        })?;
        Ok(newest)
    }

    fn is_open(&self, name: &OsStr) -> Result<bool, Failure> {
        let states = self.read_states(&self.path.join(name))?;
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
            object: checkpoint.object,
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

fn failed(path: &Path) -> impl Fn(Errno) -> Failure {
    let path = text::path(path);
    move |errno| {
        let why = match errno {
            Errno::STALE => "somebody put something else in its place meanwhile".to_owned(),
            errno => io::Error::from(errno).to_string(),
        };
        Failure::new(FAILED, format!("{path}: {why}"))
    }
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
            Self::Foreign => "foreign",
            Self::Unknown => "unknown",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(name: &str, age: i64, state: State) -> Found {
        let stat = statat(rustix::fs::CWD, "/", AtFlags::empty()).expect("stat");
        Found {
            name: name.into(),
            object: ObjectId::of(&stat),
            modified: (1000 - age, 0),
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
