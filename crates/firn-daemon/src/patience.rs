//! Timeouts for the backing at the end of a mount.

use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

/// Timeout of a forced unmount for a backing that takes no data. A slow backing makes progress; a backing that never
/// answers must not keep the mount.
pub(crate) const FORCED_PATIENCE: Duration = Duration::from_secs(10);
/// Runs `work` on a thread of its own, because it may wait for a backing that does not answer.
///
/// Returns the result of `work`. `give_up` is called some times a second; if it returns true, the result is `None` and
/// the thread is left alone.
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

/// Returns a function that returns true once [`FORCED_PATIENCE`] has passed.
pub(crate) fn patience_ends() -> impl FnMut() -> bool {
    let deadline = Instant::now() + FORCED_PATIENCE;
    move || Instant::now() >= deadline
}

/// Runs `work`, which may wait for the backing; with `force` only for [`FORCED_PATIENCE`]. Returns whether `work` has
/// ended.
pub(crate) fn with_patience(force: bool, work: impl FnOnce() + Send + 'static) -> bool {
    if force {
        return unless(patience_ends(), work).is_some();
    }
    work();
    true
}
