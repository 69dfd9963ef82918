//! Pruning: which checkpoints of a directory may be removed, and how they are removed.
//!
//! A checkpoint is a directory or a file with a step in its name, such as `step_100`. It is complete if it has files,
//! all of them were closed, and no open transaction may have changed it. Only directories are removed.
//!
//! Invariants
//! * The newest checkpoint stays, because its job may not have finished it. It counts as complete only if it has at
//!   least as many files as the complete checkpoint before it.
//! * A checkpoint stays if a program has one of its files open, or if a symbolic link beside it leads to it.
//! * At least the wanted number of complete checkpoints stay.
//! * No reader sees half a checkpoint under its name: it is renamed before anything in it is removed. The next pruning
//!   finishes an interrupted removal.
//! * The directory that is removed is the directory that was examined: its device and inode number are compared.
//! * A checkpoint that cannot be examined or removed stays, and does not prevent the removal of other checkpoints.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use firn_client::checkpoints::{Checkpoint, CheckpointState, Directory, failed};
use firn_trust::{ObjectId, list_names, remove_object};
use rustix::fs::{FileType, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::failure::Failure;

/// A checkpoint under removal is named `.NAME` and this suffix.
const REMOVED_SUFFIX: &[u8] = b".pruned";

/// Whether a checkpoint is removed, or why it stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is removed.
    Remove,
    /// It stays, because it is the newest: its job may still write to it.
    Newest,
    /// It stays, because it is one of the complete checkpoints to keep.
    Kept,
    /// It stays, because a program has one of its files open.
    Open,
    /// It stays, because a symbolic link in the same directory leads to it.
    Linked,
    /// It stays, because another user made it.
    Foreign,
    /// It stays, because something in it cannot be examined. A separate failure reports the cause.
    Unknown,
}

/// A checkpoint, and the verdict on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointDecision {
    /// Name of the checkpoint in its directory.
    pub name: OsString,
    /// Whether the checkpoint is removed or why it stays.
    pub verdict: Verdict,
    /// Device and inode number of the directory that was examined.
    object: ObjectId,
}

/// Result of the removal of one checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// The checkpoint is removed.
    Removed,
    /// A program opened one of its files after the verdict, so the checkpoint stays.
    Opened,
}

/// The verdicts on all checkpoints of a directory.
pub struct DirectoryDecision {
    /// The user's checkpoints, the newest first, and then those that do not count (of other users, or unexamined).
    pub checkpoints: Vec<CheckpointDecision>,
    /// Why some checkpoints could not be examined.
    pub failures: Vec<Failure>,
}

/// Decides for each checkpoint of a directory whether it is removed or why it stays. Removes nothing.
///
/// `keep` is the number of complete checkpoints that must stay. A checkpoint that cannot be examined stays, and the
/// result has the failure. Fails if the directory itself cannot be examined.
pub fn decide_removals(directory: &Directory, keep: usize) -> Result<DirectoryDecision, Failure> {
    let listing = directory.list_checkpoints()?;
    let mut failures = Vec::new();
    let mut skipped = Vec::new();
    for (name, object) in listing.foreign {
        skipped.push(CheckpointDecision {
            name,
            verdict: Verdict::Foreign,
            object,
        });
    }
    for (name, object, failure) in listing.failed {
        failures.push(failure.into());
        skipped.push(CheckpointDecision {
            name,
            verdict: Verdict::Unknown,
            object,
        });
    }
    skipped.sort_by(|a, b| a.name.cmp(&b.name));
    // A file with a step in its name is a checkpoint too, but only directories are removed.
    let mut removable = listing.checkpoints;
    removable.retain(|checkpoint| checkpoint.is_dir);
    let mut checkpoints = decide_for_checkpoints(&removable, keep);
    checkpoints.extend(skipped);
    Ok(DirectoryDecision {
        checkpoints,
        failures,
    })
}

/// Removes a checkpoint for which [`decide_removals`] has returned [`Verdict::Remove`].
///
/// First renames the checkpoint, so that programs can no longer open it. Then checks its identity and its open files
/// again. If a check fails, the checkpoint gets its name back. If the process is killed, the checkpoint stays renamed,
/// and [`finish_removals`] removes it later.
pub fn remove_checkpoint(
    directory: &Directory,
    checkpoint: &CheckpointDecision,
) -> Result<Removal, Failure> {
    let name = &checkpoint.name;
    let removal_name = removal_name(name);
    rename_checkpoint(directory, name, &removal_name)?;
    match may_remove_renamed(directory, &removal_name, checkpoint) {
        Ok(true) => {
            remove_renamed(directory, &removal_name, checkpoint.object)?;
            Ok(Removal::Removed)
        }
        not_removable => {
            rename_checkpoint(directory, &removal_name, name)?;
            not_removable.map(|_| Removal::Opened)
        }
    }
}

/// Returns whether a checkpoint may be removed that was renamed to `removal_name`; false if a program has opened one of
/// its files since the decision. Fails with ESTALE if another directory had been moved to its name.
fn may_remove_renamed(
    directory: &Directory,
    removal_name: &OsStr,
    checkpoint: &CheckpointDecision,
) -> Result<bool, Failure> {
    let is_same_directory = directory
        .stat_name(removal_name)?
        .is_some_and(|stat| ObjectId::from_stat(&stat) == checkpoint.object);
    if !is_same_directory {
        let path = directory.path().join(&checkpoint.name);
        return Err(failed(&path)(Errno::STALE).into());
    }
    Ok(!directory.is_open(removal_name)?)
}

/// Finishes removals that were interrupted: a checkpoint under removal was renamed first, and is recognised by its new
/// name. Returns the reason for each that could not be finished.
pub fn finish_removals(directory: &Directory) -> Result<Vec<Failure>, Failure> {
    let mut failures = Vec::new();
    for name in list_names(directory.dir()).map_err(failed(directory.path()))? {
        if !is_removal_name(&name) {
            continue;
        }
        let Some(stat) = directory.stat_name(&name)? else {
            // Another process has removed it in the meantime.
            continue;
        };
        let is_dir = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if !is_dir || stat.st_uid != directory.uid() || directory.is_open(&name)? {
            continue;
        }
        if let Err(failure) = remove_renamed(directory, &name, ObjectId::from_stat(&stat)) {
            failures.push(failure);
        }
    }
    Ok(failures)
}

/// Renames within the directory, and fails if the new name exists.
fn rename_checkpoint(directory: &Directory, from: &OsStr, to: &OsStr) -> Result<(), Failure> {
    let dir = directory.dir();
    renameat_with(dir, from, dir, to, RenameFlags::NOREPLACE)
        .map_err(failed(&directory.path().join(from)))?;
    Ok(())
}

/// Removes the directory `name`, if it is still `object`.
fn remove_renamed(directory: &Directory, name: &OsStr, object: ObjectId) -> Result<(), Failure> {
    remove_object(directory.dir(), name, object).map_err(failed(&directory.path().join(name)))?;
    Ok(())
}

/// Decides for each checkpoint whether it is removed or why it stays. The checkpoints are directories of this user,
/// with the newest first. `keep` is the number of complete checkpoints that must stay.
fn decide_for_checkpoints(checkpoints: &[Checkpoint], keep: usize) -> Vec<CheckpointDecision> {
    let is_complete = |checkpoint: &Checkpoint| checkpoint.wholeness == CheckpointState::Whole;
    // Between two files of its newest checkpoint, a job may have no file open, and the checkpoint then looks complete.
    // It counts as complete only if it has at least as many files as the complete checkpoint before it.
    let expected_files = checkpoints
        .iter()
        .skip(1)
        .find(|checkpoint| is_complete(checkpoint))
        .map(|checkpoint| checkpoint.files);
    let mut complete_count = 0;
    let mut decisions = Vec::with_capacity(checkpoints.len());
    for (index, checkpoint) in checkpoints.iter().enumerate() {
        let is_newest = index == 0;
        let verdict = if is_newest {
            Verdict::Newest
        } else if checkpoint.is_open {
            Verdict::Open
        } else if checkpoint.is_linked {
            Verdict::Linked
        } else if complete_count >= keep {
            Verdict::Remove
        } else {
            Verdict::Kept
        };
        let has_expected_files =
            !is_newest || expected_files.is_none_or(|files| checkpoint.files >= files);
        if is_complete(checkpoint) && has_expected_files {
            complete_count += 1;
        }
        decisions.push(CheckpointDecision {
            name: checkpoint.name.clone(),
            verdict,
            object: checkpoint.object,
        });
    }
    decisions
}

/// Returns the name that a checkpoint has while it is removed.
fn removal_name(name: &OsStr) -> OsString {
    OsString::from_vec([b".", name.as_bytes(), REMOVED_SUFFIX].concat())
}

/// Returns whether a name is that of a checkpoint whose removal has begun.
fn is_removal_name(name: &OsStr) -> bool {
    let name = name.as_bytes();
    name.starts_with(b".")
        && name.ends_with(REMOVED_SUFFIX)
        && name.len() > 1 + REMOVED_SUFFIX.len()
}

impl Verdict {
    /// Returns the verdict as one word, for lists and JSON.
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
    use firn_client::checkpoints::Checkpoint;
    use rustix::fs::{AtFlags, statat};

    /// Returns a checkpoint. Lists of checkpoints in these tests begin with the newest.
    fn found(name: &str, wholeness: CheckpointState) -> Checkpoint {
        let stat = statat(rustix::fs::CWD, "/", AtFlags::empty()).expect("stat");
        Checkpoint {
            name: name.into(),
            object: ObjectId::from_stat(&stat),
            is_dir: true,
            step: None,
            modified: (0, 0),
            bytes: 2,
            held_bytes: 0,
            durable_bytes: 0,
            files: 2,
            wholeness,
            is_open: wholeness == CheckpointState::Written,
            level: None,
            is_linked: name.ends_with('@'),
        }
    }

    fn verdicts(found: &[Checkpoint], keep: usize) -> Vec<(String, Verdict)> {
        let decisions = decide_for_checkpoints(found, keep).into_iter();
        decisions
            .map(|one| (one.name.into_string().expect("UTF-8"), one.verdict))
            .collect()
    }

    fn told(list: &[(&str, Verdict)]) -> Vec<(String, Verdict)> {
        list.iter()
            .map(|(name, verdict)| ((*name).to_owned(), *verdict))
            .collect()
    }

    const STEPS: [&str; 5] = ["step5", "step4", "step3", "step2", "step1"];

    /// Proves S-prune-1.
    #[test]
    fn the_newest_whole_ones_stay() {
        let all = STEPS.map(|name| found(name, CheckpointState::Whole));
        let [newest, kept, remove] = [Verdict::Newest, Verdict::Kept, Verdict::Remove];
        for keep in 1..=6 {
            let expected: Vec<_> = STEPS
                .iter()
                .enumerate()
                .map(|(index, name)| match index {
                    0 => (*name, newest),
                    index if index < keep => (*name, kept),
                    _ => (*name, remove),
                })
                .collect();
            assert_eq!(verdicts(&all, keep), told(&expected), "--keep {keep}");
        }
    }

    /// Proves S-prune-1.
    #[test]
    fn one_that_was_cut_off_makes_no_other_go_and_goes_with_the_older_ones() {
        let all = [
            found("e", CheckpointState::Whole),
            found("d", CheckpointState::Cut),
            found("c", CheckpointState::Whole),
            found("b", CheckpointState::Cut),
            found("a", CheckpointState::Whole),
        ];
        assert_eq!(
            verdicts(&all, 2),
            told(&[
                ("e", Verdict::Newest),
                ("d", Verdict::Kept),
                ("c", Verdict::Kept),
                ("b", Verdict::Remove),
                ("a", Verdict::Remove),
            ])
        );
    }

    /// Proves S-prune-6.
    #[test]
    fn the_newest_does_not_count_while_it_may_be_in_the_making() {
        let expected = told(&[
            ("c", Verdict::Newest),
            ("b", Verdict::Kept),
            ("a", Verdict::Remove),
        ]);
        let unfinished = [
            CheckpointState::Written,
            CheckpointState::Cut,
            CheckpointState::InTransaction,
            CheckpointState::Empty,
        ];
        let older = [
            found("b", CheckpointState::Whole),
            found("a", CheckpointState::Whole),
        ];
        for wholeness in unfinished {
            let all = [&[found("c", wholeness)][..], &older].concat();
            assert_eq!(verdicts(&all, 1), expected, "{wholeness:?}");
        }
        let fewer_files = Checkpoint {
            files: 1,
            ..found("c", CheckpointState::Whole)
        };
        assert_eq!(
            verdicts(&[&[fewer_files][..], &older].concat(), 1),
            expected
        );
    }

    /// Proves S-prune-1, S-prune-3.
    #[test]
    fn what_is_open_or_linked_stays_and_only_what_is_linked_counts() {
        let all = [
            found("d", CheckpointState::Whole),
            found("c", CheckpointState::Written),
            found("latest@", CheckpointState::Whole),
            found("a", CheckpointState::Whole),
        ];
        assert_eq!(
            verdicts(&all, 2),
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
        assert!(is_removal_name(&removal_name(OsStr::new("step1"))));
        for name in ["step1", ".pruned", "..pruned.", "step1.pruned", ".step1"] {
            assert!(!is_removal_name(OsStr::new(name)), "{name}");
        }
    }
}
