//! Ends a test that hangs, after printing what it hangs on.
//!
//! A thread that waits for an answer from a FUSE mount cannot be interrupted from outside; killing
//! firnd makes the kernel answer with an error, so that the test fails in the ordinary way and its
//! fixtures clean up.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// Longer than any test of CI takes on two busy cores, in seconds.
const TEST_LIMIT_S: u64 = 240;
/// How long the test has to fail by itself after the rescue, before the process is aborted.
const GRACE: Duration = Duration::from_secs(30);

/// How long a test may take: `FIRN_TEST_LIMIT_S`, which campaigns raise, or what CI needs.
pub fn test_limit() -> Duration {
    Duration::from_secs(crate::random::env_count("FIRN_TEST_LIMIT_S", TEST_LIMIT_S))
}

/// Runs an action when for some time it is neither dropped nor told of progress.
pub struct Watchdog {
    alive: Sender<()>,
}

impl Watchdog {
    /// Calls `rescue` after `limit`, and aborts the process half a minute later, unless dropped or told of progress
    /// before.
    pub fn arm(limit: Duration, rescue: impl FnOnce() + Send + 'static) -> Self {
        let (alive, ended) = channel();
        std::thread::Builder::new()
            .name("watchdog".into())
            .spawn(move || watch(limit, &ended, rescue))
            .expect("a thread for the watchdog");
        Self { alive }
    }

    /// The test goes on: the time that it may take begins anew.
    pub fn note_progress(&self) {
        let _ = self.alive.send(());
    }
}

fn watch(limit: Duration, ended: &Receiver<()>, rescue: impl FnOnce()) {
    if !expired(ended, limit) {
        return;
    }
    eprintln!("watchdog: the test takes longer than {limit:?}, or goes on no more");
    rescue();
    if expired(ended, GRACE) {
        eprintln!("watchdog: the test did not end after its mount was killed; aborting");
        std::process::abort();
    }
}

fn expired(ended: &Receiver<()>, limit: Duration) -> bool {
    loop {
        match ended.recv_timeout(limit) {
            Ok(()) => {}
            Err(error) => return error == RecvTimeoutError::Timeout,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn the_rescue_is_called_only_after_the_limit() {
        let called = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&called);
        let dog = Watchdog::arm(Duration::from_millis(50), move || {
            flag.store(true, Ordering::SeqCst)
        });
        crate::wait_until("rescued", Duration::from_secs(5), || {
            called.load(Ordering::SeqCst)
        });
        drop(dog);

        let called = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&called);
        drop(Watchdog::arm(Duration::from_millis(50), move || {
            flag.store(true, Ordering::SeqCst)
        }));
        std::thread::sleep(Duration::from_millis(100));
        assert!(!called.load(Ordering::SeqCst));
    }

    #[test]
    fn progress_puts_the_rescue_off_and_its_end_brings_it() {
        let (alive, ended) = channel();
        (0..1000).for_each(|_| alive.send(()).unwrap());
        let dog = Watchdog { alive };
        dog.note_progress();
        assert!(expired(&ended, Duration::from_millis(20)));
        assert!(ended.try_recv().is_err(), "all progress was seen before");
        drop(dog);
        assert!(!expired(&ended, Duration::from_secs(600)));
    }
}
