//! The waits between the tries of an operation that failed: a write to the backing, or a move to the spill file.

use std::time::Duration;

use firn_backing::backoff::Backoff;

/// Time between tries of a drain (a write to the backing) or a spill (a move to a local disk): 0.1 s at first, then
/// growing to 30 s.
pub(crate) const RETRY: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(30));
