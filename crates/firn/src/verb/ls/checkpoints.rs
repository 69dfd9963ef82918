//! `firn ls --checkpoints`: the checkpoints that the commit rules of a mount make of its files.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::ffi::OsStrExt;
use std::time::SystemTime;

use firn_client::find::Place;
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
    rule: String,
    /// Number of the checkpoint. `None` means that its name has no number.
    step: Option<String>,
    files: u64,
    bytes: u64,
    /// Files of the checkpoint that are open for writing.
    open: u64,
    /// Whether no commit is pending: a rule has committed the checkpoint, or it existed before.
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
    /// Adds a file to the figures of the checkpoint. `path` is relative to the mount point.
    fn add(&mut self, path: &BytePath, file: &FoundFile, levels: &Levels) {
        let path = path.as_path();
        self.files += 1;
        self.bytes += levels.size(path, file.size);
        self.open += u64::from(levels.ending(path) == Ending::Open);
        let level = levels.level(path);
        self.level = Some(self.level.map_or(level, |lowest| lowest.min(level)));
        self.modified_unix_seconds = self.modified_unix_seconds.max(file.modified_s);
    }

    /// Returns the sort key. A checkpoint without a step comes after all others.
    fn order(&self) -> (f64, &BTreeSet<BytePath>) {
        let step = self.step.as_ref().and_then(|step| step.parse().ok());
        (step.unwrap_or(f64::INFINITY), &self.paths)
    }
}

/// Returns the checkpoints of these files, with the highest steps last.
pub(super) fn list(
    files: &[FoundFile],
    place: &Place,
    status: &Status,
    levels: &Levels,
) -> Result<Vec<ListedCheckpoint>, Failure> {
    let rules = rules_of_mount(status)?;
    let mut found: BTreeMap<String, ListedCheckpoint> = BTreeMap::new();
    for file in files {
        let top = &place.mount.mount_point;
        let relative = file.path.strip_prefix(top).unwrap_or(&file.path);
        let Some(checkpoint) = rules.checkpoint_of(relative.as_os_str().as_bytes()) else {
            continue;
        };
        let listed = found.entry(checkpoint.group).or_insert(ListedCheckpoint {
            paths: BTreeSet::new(),
            rule: checkpoint.rule,
            step: checkpoint.step,
            files: 0,
            bytes: 0,
            open: 0,
            complete: true,
            durable: true,
            level: None,
            modified_unix_seconds: 0.0,
            waits_for: None,
        });
        listed.paths.insert(checkpoint.top.into());
        listed.add(&relative.into(), file, levels);
    }
    let mut listed: Vec<ListedCheckpoint> = found.into_values().collect();
    for checkpoint in &mut listed {
        let mut transactions = status.transactions.iter();
        let open = transactions.find(|open| checkpoint.paths.contains(&open.scope));
        checkpoint.complete = open.is_none();
        checkpoint.waits_for = open.and_then(|open| open.waits_for.clone());
        // A commit by a rule makes its files durable. Files that existed before were synced earlier.
        let is_drained = checkpoint
            .level
            .is_some_and(|level| level >= DurabilityLevel::Drained);
        checkpoint.durable = checkpoint.complete && is_drained;
    }
    listed.sort_by(|a, b| {
        let ((step_a, paths_a), (step_b, paths_b)) = (a.order(), b.order());
        step_a.total_cmp(&step_b).then_with(|| paths_a.cmp(paths_b))
    });
    Ok(listed)
}

const HEAD: [&str; 9] = [
    "STEP", "RULE", "FILES", "SIZE", "OPEN", "COMPLETE", "DURABLE", "AGE", "NAME",
];

/// Returns the word for a boolean.
fn yes_or_no(is_so: bool) -> String {
    if is_so { "yes" } else { "no" }.to_owned()
}

/// Returns the cells of a checkpoint's row.
fn row(listed: &ListedCheckpoint) -> [String; HEAD.len()] {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let now = now.map_or(0.0, |since| since.as_secs_f64());
    let names: Vec<String> = listed.paths.iter().map(BytePath::to_string).collect();
    [
        listed.step.clone().unwrap_or_else(|| "-".to_owned()),
        listed.rule.clone(),
        listed.files.to_string(),
        text::bytes(listed.bytes),
        listed.open.to_string(),
        yes_or_no(listed.complete),
        yes_or_no(listed.durable),
        text::seconds((now - listed.modified_unix_seconds).max(0.0)),
        names.join(" "),
    ]
}

/// Prints the checkpoints as JSON or as a table. Prints no table if there are none.
pub(super) fn print(listed: &[ListedCheckpoint], as_json: bool) -> Result<(), Failure> {
    if as_json {
        return output::print_json(&listed);
    }
    if listed.is_empty() {
        return Ok(());
    }
    let mut rows = vec![HEAD.map(str::to_owned)];
    rows.extend(listed.iter().map(row));
    text::pad_columns(&mut rows, &["STEP", "FILES", "SIZE", "OPEN"]);
    let lines = rows.iter().map(|row| row.join("  ") + "\n");
    output::print(&lines.collect::<String>())
}
