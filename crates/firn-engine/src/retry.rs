//! How long the engine waits before it tries again what failed.

use std::time::Duration;

use firn_backing::backoff::Backoff;

/// Between tries of a drain or a spill.
pub(crate) const RETRY: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(30));
