//! Describes the transactions of a mount for its status: the scope, stage, owner and size of each, and why it waits.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use firn_protocol::{BackupStatus, TransactionStage, TransactionStatus};
use firn_transact::backup::Progress;
use firn_transact::{Stage, TransactionFigures};

use crate::gate::TransactionGate;
use crate::owners::Owners;

/// Returns the status of each transaction of the mount.
pub(crate) fn transaction_statuses(
    gate: &Arc<TransactionGate>,
    owners: &Owners,
) -> Vec<TransactionStatus> {
    let figures = gate.store().transactions();
    figures
        .into_iter()
        .map(|figures| transaction_status(gate, owners, figures))
        .collect()
}

/// Returns the status of one transaction, from the `figures` of the layer of transactions, its owner, and its pending
/// bytes, which are in the arena (the host's memory) only. `bytes` is the sum of the pending bytes and of those that
/// the layer has got.
fn transaction_status(
    gate: &Arc<TransactionGate>,
    owners: &Owners,
    figures: TransactionFigures,
) -> TransactionStatus {
    let (stage, id) = match figures.stage {
        // A transaction that ends at this moment is still shown as open.
        Stage::Open | Stage::Ended => (TransactionStage::Open, None),
        Stage::Prepared(id) => (TransactionStage::Prepared, Some(id)),
        Stage::Decided(id) => (TransactionStage::Decided, Some(id)),
    };
    let pending_bytes = gate.engine().held_bytes_below(&figures.path_now);
    let states = figures
        .states
        .iter()
        .map(|(state, count)| (state.to_string(), *count));
    let owner = owners.owner_status(&figures.scope);
    let age_seconds = owners.age_seconds(&figures.scope);
    // This may wait for the backing, so it comes after the state of the owner.
    let voted_hosts = match figures.stage {
        Stage::Prepared(id) => list_voted_hosts(gate, id, &figures.scope),
        _ => Vec::new(),
    };
    TransactionStatus {
        owner,
        age_seconds,
        bytes: figures.written_bytes + pending_bytes,
        scope: figures.path_now.as_slice().into(),
        stage,
        id,
        objects: figures.objects,
        states: states.collect(),
        recovered: figures.is_recovered,
        here: voted_hosts,
        // The commit rules set these fields later.
        rule: None,
        waits_for: None,
        error: figures.trouble,
        backup: figures.backup.map(backup_status),
    }
}

/// Returns the hosts that have published their vote (that they are prepared) about a transaction of several hosts. If
/// the backing does not answer at once, the result is empty, because the status must not wait.
fn list_voted_hosts(gate: &Arc<TransactionGate>, id: u64, scope: &[u8]) -> Vec<String> {
    /// Timeout of the read; a server that is up answers in about a millisecond.
    const READ_TIMEOUT: Duration = Duration::from_millis(50);
    /// Number of threads that read now. At the limit no more are started, because the backing hangs.
    static READING_THREADS: AtomicUsize = AtomicUsize::new(0);
    const READING_THREADS_MAX: usize = 4;
    if gate.store().lower.members().is_none() {
        return Vec::new();
    }
    if READING_THREADS.fetch_add(1, Ordering::AcqRel) >= READING_THREADS_MAX {
        READING_THREADS.fetch_sub(1, Ordering::AcqRel);
        return Vec::new();
    }
    let (hosts_sender, hosts_receiver) = mpsc::channel();
    let gate = Arc::clone(gate);
    let scope = scope.to_owned();
    let started = std::thread::Builder::new()
        .name("firn-hosts".into())
        .spawn(move || {
            let hosts = gate.store().votes.hosts_published(id, &scope);
            // The caller may have stopped waiting.
            let _ = hosts_sender.send(hosts.unwrap_or_default());
            READING_THREADS.fetch_sub(1, Ordering::AcqRel);
        });
    if started.is_err() {
        READING_THREADS.fetch_sub(1, Ordering::AcqRel);
    }
    hosts_receiver
        .recv_timeout(READ_TIMEOUT)
        .unwrap_or_default()
}

/// Converts the progress of a transaction's backup.
fn backup_status(progress: Progress) -> BackupStatus {
    BackupStatus {
        whole: progress.is_complete,
        age_seconds: progress.age.map(|age| age.as_secs_f64()),
        copied_bytes: progress.copied_bytes,
        left_bytes: progress.left_bytes,
        error: progress.error,
    }
}
