//! Records when each checkpoint began, was closed, was drained (all bytes are in the backing) and became durable
//! (synced there), from the events of its files.
//!
//! A checkpoint is identified by its parent directory and its step. So a checkpoint that is renamed from `step_5.tmp`
//! to `step_5` stays one checkpoint.
//!
//! Times are seconds since the start of the mount.
//!
//! Invariants
//! * At most [`CHECKPOINTS_MAX`] checkpoints and [`FILES_MAX`] files are tracked. Checkpoints, files and events beyond
//!   that are counted as forgotten.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::Instant;

use firn_engine::{FileChange, FileEvent, InodeId};
use firn_format::step::step_of_unfinished;
use firn_protocol::record::{CHECKPOINTS_MAX, CheckpointRecord};

/// Limit of tracked files that are not durable; each takes about 100 bytes of memory.
const FILES_MAX: usize = 1 << 16;

/// Identifies a checkpoint.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
struct CheckpointKey {
    parent_dir: Vec<u8>,
    step: u64,
}

/// The checkpoint that a path belongs to.
struct CheckpointPath<'a> {
    parent_dir: &'a [u8],
    /// Path of the checkpoint itself.
    path: &'a [u8],
    step: u64,
}

/// One checkpoint, and which of its files are not yet finished.
#[derive(Default)]
struct TrackedCheckpoint {
    key: CheckpointKey,
    record: CheckpointRecord,
    /// Files that are open for writing.
    open: HashSet<InodeId>,
    /// Files with data that is in the arena only.
    held: HashSet<InodeId>,
    /// Files with bytes or names that are not known to be synced in the backing.
    not_durable: HashSet<InodeId>,
}

/// The checkpoints of one mount.
pub(crate) struct CheckpointLog {
    began: Instant,
    /// The checkpoints by number; numbers grow in the order in which checkpoints begin.
    tracked: BTreeMap<u64, TrackedCheckpoint>,
    numbers_by_key: HashMap<CheckpointKey, u64>,
    /// Number of the checkpoint of each file that is not durable.
    checkpoint_of_file: HashMap<InodeId, u64>,
    next_number: u64,
    forgotten: u64,
}

impl CheckpointLog {
    pub(crate) fn new(began: Instant) -> Self {
        Self {
            began,
            tracked: BTreeMap::new(),
            numbers_by_key: HashMap::new(),
            checkpoint_of_file: HashMap::new(),
            next_number: 0,
            forgotten: 0,
        }
    }

    /// Returns the records of all tracked checkpoints.
    pub(crate) fn records(&self) -> Vec<CheckpointRecord> {
        let records = self.tracked.values().map(|tracked| tracked.record.clone());
        records.collect()
    }

    /// Returns the number of forgotten checkpoints, files and events.
    pub(crate) fn forgotten(&self) -> u64 {
        self.forgotten
    }

    /// Applies events of files, in the order of time. `dropped` is the number of events that were lost before.
    pub(crate) fn apply(&mut self, events: Vec<FileEvent>, dropped: u64) {
        self.forgotten += dropped;
        for event in events {
            self.apply_event(&event);
        }
    }

    /// Records what one event of a file means for its checkpoint. An open or new data may begin to track a checkpoint;
    /// other events of files without a tracked checkpoint are ignored.
    fn apply_event(&mut self, event: &FileEvent) {
        let seconds = event.at.saturating_duration_since(self.began).as_secs_f64();
        let begins_work = matches!(event.change, FileChange::Opened | FileChange::Held);
        let number = match event.path.as_deref().and_then(find_checkpoint) {
            Some(checkpoint) if begins_work => Some(self.find_or_add(&checkpoint, seconds)),
            Some(checkpoint) => self.find_and_update_path(&checkpoint),
            None => self.checkpoint_of_file.get(&event.inode).copied(),
        };
        let Some(number) = number else {
            return;
        };
        if begins_work && !self.checkpoint_of_file.contains_key(&event.inode) {
            if self.checkpoint_of_file.len() >= FILES_MAX {
                self.forgotten += 1;
                return;
            }
            self.checkpoint_of_file.insert(event.inode, number);
            if let Some(tracked) = self.tracked.get_mut(&number) {
                tracked.record.files += 1;
            }
        }
        let Some(tracked) = self.tracked.get_mut(&number) else {
            return;
        };
        tracked.apply_change(event.inode, event.change, seconds);
        // A durable, closed file needs no entry: its next change adds it again.
        if !tracked.has_unfinished(event.inode) {
            self.checkpoint_of_file.remove(&event.inode);
        }
    }

    /// Returns the number of a tracked checkpoint, and stores its newest path; `None` if it is not tracked.
    fn find_and_update_path(&mut self, checkpoint: &CheckpointPath<'_>) -> Option<u64> {
        let number = *self.numbers_by_key.get(&checkpoint.key())?;
        if let Some(tracked) = self.tracked.get_mut(&number)
            && tracked.record.path.as_bytes() != checkpoint.path
        {
            tracked.record.path = checkpoint.path.to_vec().into();
        }
        Some(number)
    }

    /// Returns the number of a checkpoint, and stores its newest path. If it is not tracked, it is added as one that
    /// began at `began_seconds`. The oldest checkpoint is dropped if the table is full.
    fn find_or_add(&mut self, checkpoint: &CheckpointPath<'_>, began_seconds: f64) -> u64 {
        if let Some(number) = self.find_and_update_path(checkpoint) {
            return number;
        }
        if self.tracked.len() >= CHECKPOINTS_MAX {
            self.drop_oldest();
        }
        let number = self.next_number;
        self.next_number += 1;
        let key = checkpoint.key();
        let record = CheckpointRecord {
            path: checkpoint.path.to_vec().into(),
            step: checkpoint.step,
            began_seconds,
            ..CheckpointRecord::default()
        };
        self.numbers_by_key.insert(key.clone(), number);
        self.tracked.insert(
            number,
            TrackedCheckpoint {
                key,
                record,
                ..TrackedCheckpoint::default()
            },
        );
        number
    }

    /// Stops tracking the oldest checkpoint and its files, and counts it as forgotten.
    fn drop_oldest(&mut self) {
        let Some((oldest_number, oldest)) = self.tracked.pop_first() else {
            return;
        };
        self.numbers_by_key.remove(&oldest.key);
        self.checkpoint_of_file
            .retain(|_, number| *number != oldest_number);
        self.forgotten += 1;
    }
}

impl CheckpointPath<'_> {
    fn key(&self) -> CheckpointKey {
        CheckpointKey {
            parent_dir: self.parent_dir.to_vec(),
            step: self.step,
        }
    }
}

impl TrackedCheckpoint {
    /// Returns whether a file is open, or has data that is not durable yet.
    fn has_unfinished(&self, inode: InodeId) -> bool {
        let sets = [&self.open, &self.held, &self.not_durable];
        sets.iter().any(|set| set.contains(&inode))
    }

    /// Records one change of a file of this checkpoint. A new open or a new write makes the checkpoint unfinished
    /// again.
    ///
    /// Held bytes are in the arena, the host's memory, only; drained bytes are in the backing; durable bytes are synced
    /// there.
    fn apply_change(&mut self, inode: InodeId, change: FileChange, seconds: f64) {
        let record = &mut self.record;
        match change {
            FileChange::Opened => {
                self.open.insert(inode);
                record.closed_seconds = None;
            }
            FileChange::Held => {
                self.held.insert(inode);
                self.not_durable.insert(inode);
                record.drained_seconds = None;
                record.durable_seconds = None;
            }
            FileChange::Closed => {
                if self.open.remove(&inode) && self.open.is_empty() {
                    record.closed_seconds = Some(seconds);
                }
            }
            FileChange::Drained => {
                if self.held.remove(&inode) && self.held.is_empty() {
                    record.drained_seconds = Some(seconds);
                }
            }
            FileChange::Durable => {
                let is_last = self.not_durable.remove(&inode) && self.not_durable.is_empty();
                if is_last && self.held.is_empty() {
                    record.durable_seconds = Some(seconds);
                }
            }
        }
    }
}

/// Returns the checkpoint that a path belongs to: the path up to the first component that is named like `step_5`, or
/// like the unfinished `step_5.tmp`. `None` if no component has such a name.
fn find_checkpoint(path: &[u8]) -> Option<CheckpointPath<'_>> {
    let mut name_start = 0;
    for name in path.split(|byte| *byte == b'/') {
        let name_end = name_start + name.len();
        if let Some(step) = step_of_unfinished(OsStr::from_bytes(name)) {
            return Some(CheckpointPath {
                // The parent ends before the slash.
                parent_dir: &path[..name_start.saturating_sub(1)],
                path: &path[..name_end],
                step,
            });
        }
        name_start = name_end + 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    struct Script {
        log: CheckpointLog,
        began: Instant,
    }

    impl Script {
        fn new() -> Self {
            let began = Instant::now();
            Self {
                log: CheckpointLog::new(began),
                began,
            }
        }

        fn event(&mut self, second: u64, inode: u64, path: Option<&str>, change: FileChange) {
            let event = FileEvent {
                inode: InodeId(inode),
                path: path.map(|path| path.as_bytes().to_vec()),
                change,
                at: self.began + Duration::from_secs(second),
            };
            self.log.apply(vec![event], 0);
        }
    }

    #[test]
    fn a_checkpoint_goes_from_open_to_durable_with_the_last_of_its_files() {
        use FileChange::*;
        let mut script = Script::new();
        let a = Some("run/step_5.tmp/a");
        let b = Some("run/step_5.tmp/b");
        script.event(1, 10, a, Opened);
        script.event(1, 10, a, Held);
        script.event(2, 11, b, Opened);
        script.event(2, 11, b, Held);
        script.event(3, 10, a, Closed);
        script.event(4, 11, b, Closed);
        // The file was renamed, and then its inode was forgotten.
        script.event(5, 10, Some("run/step_5/a"), Drained);
        script.event(6, 11, None, Drained);
        script.event(7, 10, None, Durable);
        let records = script.log.records();
        assert_eq!(records.len(), 1, "{records:?}");
        assert_eq!(records[0].durable_seconds, None);
        script.event(8, 11, None, Durable);
        let expected = CheckpointRecord {
            path: "run/step_5".into(),
            step: 5,
            began_seconds: 1.0,
            closed_seconds: Some(4.0),
            drained_seconds: Some(6.0),
            durable_seconds: Some(8.0),
            files: 2,
        };
        assert_eq!(script.log.records(), [expected]);
        assert_eq!(script.log.forgotten(), 0);
        assert!(script.log.checkpoint_of_file.is_empty());
    }

    #[test]
    fn more_checkpoints_than_fit_are_counted_and_leave_nothing_behind() {
        let mut script = Script::new();
        for step in 0..CHECKPOINTS_MAX as u64 + 10 {
            let path = format!("step_{step}");
            script.event(step, step + 2, Some(&path), FileChange::Opened);
        }
        let records = script.log.records();
        assert_eq!(records.len(), CHECKPOINTS_MAX);
        assert_eq!(script.log.forgotten(), 10);
        assert_eq!(records[0].step, 10);
        assert_eq!(script.log.checkpoint_of_file.len(), CHECKPOINTS_MAX);
        assert_eq!(script.log.numbers_by_key.len(), CHECKPOINTS_MAX);
    }

    #[test]
    fn the_first_name_with_a_step_is_the_checkpoint() {
        let found = |path: &'static str| {
            let checkpoint = find_checkpoint(path.as_bytes())?;
            Some((checkpoint.parent_dir, checkpoint.path, checkpoint.step))
        };
        assert_eq!(found("step_1/rank_2"), Some((&b""[..], &b"step_1"[..], 1)));
        assert_eq!(
            found("a/b/ckpt_7.pt"),
            Some((&b"a/b"[..], &b"a/b/ckpt_7.pt"[..], 7))
        );
        assert_eq!(found("log/out"), None);
    }
}
