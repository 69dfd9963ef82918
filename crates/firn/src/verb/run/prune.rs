//! `firn run --keep`: removes old checkpoints in a loop while the command runs.

use std::collections::HashSet;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use firn_client::checkpoints::Directory;

use crate::failure::Failure;
use crate::prune::{self, Verdict};

/// Interval at which a directory is examined. It is long compared with the cost, and short enough that the next
/// checkpoint finds free space.
const PRUNE_INTERVAL: Duration = Duration::from_secs(1);

/// Removes old checkpoints at an interval, until all senders of `on_end` are dropped. `keep` is the number of
/// checkpoints that stay. A failure is passed to `show` once, and stops nothing.
pub(super) fn prune_until(
    on_end: &Receiver<()>,
    prefix: &Path,
    keep: usize,
    show: &mut dyn FnMut(String),
) {
    let mut reported = HashSet::new();
    while on_end.recv_timeout(PRUNE_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        let failures = prune_once(prefix, keep).unwrap_or_else(|failure| vec![failure]);
        for text in failures.iter().filter_map(Failure::text) {
            if reported.insert(text.clone()) {
                show(format!("cannot remove old checkpoints: {text}"));
            }
        }
    }
}

/// Removes old checkpoints once. Returns the failures to remove a checkpoint. Fails if firnd cannot list the
/// checkpoints.
fn prune_once(prefix: &Path, keep: usize) -> Result<Vec<Failure>, Failure> {
    let directory = Directory::open(firn_client::find(prefix)?)?;
    // With at most `keep` entries no checkpoint can be too old, so firnd need not be asked.
    let entries = std::fs::read_dir(prefix).map_or(0, Iterator::count);
    if entries <= keep {
        return Ok(Vec::new());
    }
    let mut failures = prune::finish_removals(&directory)?;
    let judged = prune::judge_directory(&directory, keep)?;
    failures.extend(judged.failures);
    for checkpoint in &judged.checkpoints {
        if checkpoint.verdict == Verdict::Remove {
            failures.extend(prune::remove_checkpoint(&directory, checkpoint).err());
        }
    }
    Ok(failures)
}
