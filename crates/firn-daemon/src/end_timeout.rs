//! Timeouts for calls of the backing at the end of a mount.
//!
//! A slow backing makes progress, but a backing that never answers must not prevent the end of the mount. So each call
//! that may never return has its own thread, and after a timeout the mount ends without waiting for that thread.

use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

/// Timeout of a forced unmount: without progress of the backing for this long, the backing is given up.
pub(crate) const FORCED_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between two calls of the `give_up` function of [`run_unless_given_up`].
const GIVE_UP_CHECK_EVERY: Duration = Duration::from_millis(20);

/// Runs `work` on a thread of its own, because `work` may wait for ever if the server of the backing directory does not
/// answer.
///
/// Returns the result of `work`. `give_up` is called every [`GIVE_UP_CHECK_EVERY`]; once it returns true, the result is
/// `None` and the thread continues alone. The result is also `None` if the thread cannot be started or panics.
pub(crate) fn run_unless_given_up<T: Send + 'static>(
    mut give_up: impl FnMut() -> bool,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (sender, receiver) = std::sync::mpsc::channel();
    let thread = std::thread::Builder::new().name("firn-end".into());
    if let Err(error) = thread.spawn(move || drop(sender.send(work()))) {
        tracing::warn!(%error, "cannot start a thread to end the mount");
        return None;
    }
    loop {
        match receiver.recv_timeout(GIVE_UP_CHECK_EVERY) {
            Ok(result) => return Some(result),
            Err(RecvTimeoutError::Timeout) if !give_up() => {}
            Err(_) => return None,
        }
    }
}

/// Returns a function that returns true once [`FORCED_TIMEOUT`] has passed since this call.
pub(crate) fn forced_timeout() -> impl FnMut() -> bool {
    let deadline = Instant::now() + FORCED_TIMEOUT;
    move || Instant::now() >= deadline
}

/// Runs `work`, which may wait for the backing. If the unmount is forced, `work` is given up after [`FORCED_TIMEOUT`].
/// Returns whether `work` has ended.
pub(crate) fn run_with_end_timeout(is_forced: bool, work: impl FnOnce() + Send + 'static) -> bool {
    if is_forced {
        return run_unless_given_up(forced_timeout(), work).is_some();
    }
    work();
    true
}
