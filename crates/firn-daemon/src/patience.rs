//! How long the end of a mount waits for a backing.

use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

/// How long a forced end waits for a backing that takes nothing: one that is slow goes on, one that never answers
/// must not keep the mount.
pub(crate) const FORCED_PATIENCE: Duration = Duration::from_secs(10);
/// Runs `work` on a thread of its own, for it may ask a backing that does not answer. `None` where `give_up`, which is
/// asked some times a second, said so before it ended.
pub(crate) fn unless<T: Send + 'static>(
    mut give_up: impl FnMut() -> bool,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    const LOOK_AGAIN: Duration = Duration::from_millis(20);
    let (sender, receiver) = std::sync::mpsc::channel();
    let thread = std::thread::Builder::new().name("firn-end".into());
    if let Err(error) = thread.spawn(move || drop(sender.send(work()))) {
        tracing::warn!(%error, "cannot start a thread to end the mount");
        return None;
    }
    loop {
        match receiver.recv_timeout(LOOK_AGAIN) {
            Ok(done) => return Some(done),
            Err(RecvTimeoutError::Timeout) if !give_up() => {}
            Err(_) => return None,
        }
    }
}

/// Whether a forced end has waited long enough.
pub(crate) fn patience_ends() -> impl FnMut() -> bool {
    let deadline = Instant::now() + FORCED_PATIENCE;
    move || Instant::now() >= deadline
}

/// Runs what may ask the backing; a forced end does not wait for ever. Whether it ended.
pub(crate) fn with_patience(force: bool, work: impl FnOnce() + Send + 'static) -> bool {
    if force {
        return unless(patience_ends(), work).is_some();
    }
    work();
    true
}
