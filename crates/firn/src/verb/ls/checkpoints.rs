//! `firn ls --checkpoints`: the checkpoints that the commit rules of a mount make of its files.
//!
//! A commit rule says which files together are one checkpoint (a *group*), and when the checkpoint is complete. The
//! *level* of a file says where its data is: held in memory only, drained to the backing, or durable there.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::SystemTime;

use firn_client::find::MountLocation;
use firn_client::levels::Levels;
use firn_format::durability::DurabilityLevel;
use firn_format::record::Ending;
use firn_protocol::Status;
use firn_protocol::path::BytePath;
use serde::Serialize;

use super::FoundFile;
use crate::failure::Failure;
use crate::verb::rules::rules_of_mount;
use crate::{output, text};

/// A checkpoint of a commit rule.
#[derive(Serialize)]
pub(super) struct ListedCheckpoint {
    /// Directories and files of the checkpoint, below the mount point.
    paths: BTreeSet<BytePath>,
    /// Name of the commit rule.
    rule: String,
    /// Number of the checkpoint. `None` means that its name has no number.
    step: Option<String>,
    /// Number of its files.
    files: u64,
    /// Size of its files in bytes.
    bytes: u64,
    /// Number of its files that are open for writing.
    open: u64,
    /// Whether the checkpoint is complete: a rule has committed it, or it existed before. No commit is pending then.
    complete: bool,
    /// Whether the checkpoint is complete, and survives a crash.
    durable: bool,
    /// The lowest durability level of its files.
    level: Option<DurabilityLevel>,
    /// Time of the newest modification of its files, in seconds since 1970.
    modified_unix_seconds: f64,
    /// What the commit waits for. `None` means that the checkpoint is complete.
    waits_for: Option<String>,
}

impl ListedCheckpoint {
    /// Returns a checkpoint to which files are added. [`Self::record_commit_state`] then sets `complete` and `durable`.
    fn without_files(rule: String, step: Option<String>) -> Self {
        Self {
            paths: BTreeSet::new(),
            rule,
            step,
            files: 0,
            bytes: 0,
            open: 0,
            complete: true,
            durable: true,
            level: None,
            modified_unix_seconds: 0.0,
            waits_for: None,
        }
    }

    /// Records whether a commit of the checkpoint is pending, and whether its files are durable. All files must have
    /// been added before.
    fn record_commit_state(&mut self, status: &Status) {
        let open_transaction = status
            .transactions
            .iter()
            .find(|transaction| self.paths.contains(&transaction.scope));
        self.complete = open_transaction.is_none();
        self.waits_for = open_transaction.and_then(|transaction| transaction.waits_for.clone());
        // A commit by a rule makes its files durable. Files that existed before were synced earlier.
        let is_drained = self
            .level
            .is_some_and(|level| level >= DurabilityLevel::Drained);
        self.durable = self.complete && is_drained;
    }

    /// Adds a file to the figures of the checkpoint. `path` is relative to the mount point.
    fn add_file(&mut self, path: &Path, file: &FoundFile, levels: &Levels) {
        self.files += 1;
        self.bytes += levels.size(path, file.size);
        self.open += u64::from(levels.ending(path) == Ending::Open);
        let level = levels.level(path);
        self.level = Some(self.level.map_or(level, |lowest| lowest.min(level)));
        self.modified_unix_seconds = self.modified_unix_seconds.max(file.modified_s);
    }

    /// Returns the step as a sort key. A checkpoint without a step comes after all others.
    fn step_order(&self) -> f64 {
        let step = self.step.as_ref().and_then(|step| step.parse().ok());
        step.unwrap_or(f64::INFINITY)
    }
}

/// Returns the checkpoints that the commit rules of the mount make of these files, with the highest steps last. Files
/// that no rule covers are left out. `levels` says what the data of each file survives.
pub(super) fn list_checkpoints(
    files: &[FoundFile],
    location: &MountLocation,
    status: &Status,
    levels: &Levels,
) -> Result<Vec<ListedCheckpoint>, Failure> {
    let rules = rules_of_mount(status)?;
    let mut checkpoints_by_group: BTreeMap<String, ListedCheckpoint> = BTreeMap::new();
    for file in files {
        let mount_point = &location.mount.mount_point;
        let relative_path = file.path.strip_prefix(mount_point).unwrap_or(&file.path);
        let Some(found) = rules.checkpoint_of(relative_path.as_os_str().as_bytes()) else {
            continue;
        };
        let checkpoint = checkpoints_by_group
            .entry(found.group)
            .or_insert_with(|| ListedCheckpoint::without_files(found.rule, found.step));
        checkpoint.paths.insert(found.top.into());
        checkpoint.add_file(relative_path, file, levels);
    }
    let mut checkpoints: Vec<ListedCheckpoint> = checkpoints_by_group.into_values().collect();
    for checkpoint in &mut checkpoints {
        checkpoint.record_commit_state(status);
    }
    checkpoints.sort_by(|a, b| {
        let by_step = a.step_order().total_cmp(&b.step_order());
        by_step.then_with(|| a.paths.cmp(&b.paths))
    });
    Ok(checkpoints)
}

const COLUMN_NAMES: [&str; 9] = [
    "STEP", "RULE", "FILES", "SIZE", "OPEN", "COMPLETE", "DURABLE", "AGE", "NAME",
];

/// Returns the word for a boolean.
fn yes_or_no(is_so: bool) -> String {
    if is_so { "yes" } else { "no" }.to_owned()
}

/// Returns the cells of a checkpoint's row.
fn checkpoint_row(checkpoint: &ListedCheckpoint) -> [String; COLUMN_NAMES.len()] {
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    let age_seconds = now.as_secs_f64() - checkpoint.modified_unix_seconds;
    let names: Vec<String> = checkpoint.paths.iter().map(BytePath::to_string).collect();
    [
        checkpoint.step.clone().unwrap_or_else(|| "-".to_owned()),
        checkpoint.rule.clone(),
        checkpoint.files.to_string(),
        text::bytes(checkpoint.bytes),
        checkpoint.open.to_string(),
        yes_or_no(checkpoint.complete),
        yes_or_no(checkpoint.durable),
        text::seconds(age_seconds.max(0.0)),
        names.join(" "),
    ]
}

/// Prints the checkpoints as JSON or as a table. Prints no table if there are none.
pub(super) fn print_checkpoints(
    checkpoints: &[ListedCheckpoint],
    as_json: bool,
) -> Result<(), Failure> {
    if as_json {
        return output::print_json(&checkpoints);
    }
    if checkpoints.is_empty() {
        return Ok(());
    }
    let mut rows = vec![COLUMN_NAMES.map(str::to_owned)];
    rows.extend(checkpoints.iter().map(checkpoint_row));
    text::pad_columns(&mut rows, &["STEP", "FILES", "SIZE", "OPEN"]);
    let lines = rows.iter().map(|row| row.join("  ") + "\n");
    output::print(&lines.collect::<String>())
}
