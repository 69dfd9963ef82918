//! Ends what runs beside a test.
//!
//! A scope waits for its threads, also after a panic. A thread that goes on until it is told to stop has to be told then
//! too, or the test hangs where it should fail.

use std::sync::atomic::{AtomicBool, Ordering};

/// Sets a flag when it is dropped: at the end of a test, and where it fails.
#[must_use = "it sets the flag at once"]
pub struct StopAtEnd<'a>(pub &'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_beside_a_test_that_fails_is_told_to_stop() {
        let caught = std::panic::catch_unwind(|| {
            let stop = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let _ended = StopAtEnd(&stop);
                scope.spawn(|| {
                    while !stop.load(Ordering::Acquire) {
                        std::thread::yield_now();
                    }
                });
                panic!("as a failed assertion");
            })
        });
        assert!(caught.is_err());
    }
}
