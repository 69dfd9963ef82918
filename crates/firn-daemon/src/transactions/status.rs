//! Transactions in the status of a mount.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use firn_protocol::{BackupStatus, TransactionStage, TransactionStatus};
use firn_transact::Stage;
use firn_transact::backup::Progress;

use crate::gate::TransactionGate;
use crate::owners::Owners;

/// Returns the status of each transaction of the mount.
pub(crate) fn status(gate: &Arc<TransactionGate>, owners: &Owners) -> Vec<TransactionStatus> {
    let stage = |stage| match stage {
        Stage::Open | Stage::Ended => (TransactionStage::Open, None),
        Stage::Prepared(id) => (TransactionStage::Prepared, Some(id)),
        Stage::Decided(id) => (TransactionStage::Decided, Some(id)),
    };
    let pending = |scope: &[u8]| gate.engine().held_bytes_below(scope);
    let one = |found: firn_transact::TransactionFigures| TransactionStatus {
        owner: owners.owner_status(&found.scope),
        age_seconds: owners.age_seconds(&found.scope),
        bytes: found.written_bytes + pending(&found.path_now),
        scope: found.path_now.as_slice().into(),
        stage: stage(found.stage).0,
        id: stage(found.stage).1,
        objects: found.objects,
        states: found
            .states
            .iter()
            .map(|(state, count)| (state.to_string(), *count))
            .collect(),
        recovered: found.is_recovered,
        here: match found.stage {
            Stage::Prepared(id) => here(gate, id, &found.scope),
            _ => Vec::new(),
        },
        // The commit rules set these fields later.
        rule: None,
        waits_for: None,
        error: found.trouble,
        backup: found.backup.map(backup_status),
    };
    let transactions = gate.store().transactions();
    transactions.into_iter().map(one).collect()
}

/// Returns the hosts that have published their vote about a transaction. If the backing does not answer at once, the
/// result is empty, because the status must not wait.
fn here(gate: &Arc<TransactionGate>, id: u64, scope: &[u8]) -> Vec<String> {
    /// Timeout of the read; a server that is up answers in about a millisecond.
    const PATIENCE: Duration = Duration::from_millis(50);
    /// Number of threads that read now. At the limit no more are started, because the backing hangs.
    static ASKING: AtomicUsize = AtomicUsize::new(0);
    const ASKING_MAX: usize = 4;
    if gate.store().lower.members().is_none() {
        return Vec::new();
    }
    if ASKING.fetch_add(1, Ordering::AcqRel) >= ASKING_MAX {
        ASKING.fetch_sub(1, Ordering::AcqRel);
        return Vec::new();
    }
    let (tell, told) = mpsc::channel();
    let gate = Arc::clone(gate);
    let scope = scope.to_owned();
    let asked = std::thread::Builder::new()
        .name("firn-hosts".into())
        .spawn(move || {
            let hosts = gate.store().votes.hosts_published(id, &scope);
            let _ = tell.send(hosts.unwrap_or_default());
            ASKING.fetch_sub(1, Ordering::AcqRel);
        });
    if asked.is_err() {
        ASKING.fetch_sub(1, Ordering::AcqRel);
    }
    told.recv_timeout(PATIENCE).unwrap_or_default()
}

fn backup_status(progress: Progress) -> BackupStatus {
    BackupStatus {
        whole: progress.is_complete,
        age_seconds: progress.age.map(|age| age.as_secs_f64()),
        copied_bytes: progress.copied_bytes,
        left_bytes: progress.left_bytes,
        error: progress.error,
    }
}
