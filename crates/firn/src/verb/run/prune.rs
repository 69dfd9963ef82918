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

/// Removes old checkpoints at an interval, until all senders of `stop_receiver` are dropped. `prefix` is the mount
/// point, and `keep` the number of complete checkpoints that stay. A failure is passed to `print_notice` once, and
/// stops nothing.
pub(super) fn prune_until_stopped(
    stop_receiver: &Receiver<()>,
    prefix: &Path,
    keep: usize,
    print_notice: &mut dyn FnMut(String),
) {
    let mut reported_texts = HashSet::new();
    while stop_receiver.recv_timeout(PRUNE_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        let failures = prune_once(prefix, keep).unwrap_or_else(|failure| vec![failure]);
        for text in failures.iter().filter_map(Failure::text) {
            let is_new = reported_texts.insert(text.clone());
            if is_new {
                print_notice(format!("cannot remove old checkpoints: {text}"));
            }
        }
    }
}

/// Removes old checkpoints in the root directory of the mount once, and keeps at least `keep` complete ones. Returns
/// the failures to remove a checkpoint. Fails if firnd, the daemon of the mount, cannot list the checkpoints.
fn prune_once(prefix: &Path, keep: usize) -> Result<Vec<Failure>, Failure> {
    let directory = Directory::open(firn_client::find(prefix)?)?;
    // With at most `keep` entries no checkpoint can be too old, so firnd need not be asked.
    let entry_count = std::fs::read_dir(prefix).map_or(0, Iterator::count);
    if entry_count <= keep {
        return Ok(Vec::new());
    }
    let mut failures = prune::finish_removals(&directory)?;
    let decisions = prune::decide_removals(&directory, keep)?;
    failures.extend(decisions.failures);
    for checkpoint in &decisions.checkpoints {
        if checkpoint.verdict != Verdict::Remove {
            continue;
        }
        if let Err(failure) = prune::remove_checkpoint(&directory, checkpoint) {
            failures.push(failure);
        }
    }
    Ok(failures)
}
