//! How long to wait before something that failed is tried again: twice as long each time, up to a bound.

use std::time::Duration;

/// Before the second try; the wait doubles with each failure.
const RETRY_FIRST: Duration = Duration::from_millis(100);
/// Longest wait.
const RETRY_MAX: Duration = Duration::from_secs(30);

/// How long to wait before the next try after `count` failures in a row.
pub(crate) fn retry_wait(count: u32) -> Duration {
    let doublings = count.saturating_sub(1).min(16);
    RETRY_FIRST.saturating_mul(1 << doublings).min(RETRY_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_for_retries_double_up_to_a_bound() {
        assert_eq!(retry_wait(1), RETRY_FIRST);
        assert_eq!(retry_wait(2), 2 * RETRY_FIRST);
        assert_eq!(retry_wait(3), 4 * RETRY_FIRST);
        assert_eq!(retry_wait(100), RETRY_MAX);
    }
}
