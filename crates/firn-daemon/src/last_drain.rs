//! The last drains: at the end of a mount, or in a recovery, all bytes that only the arena has are copied to the
//! backing. The arena is the host's shared memory, and the backing is the directory that is served.

use std::time::Instant;

use firn_backing::{Backing, Errno};
use firn_engine::Engine;
use firn_format::durability::DurabilityLevel;

use crate::end_timeout::FORCED_TIMEOUT;
use crate::store::Store;

/// Decides whether a drain makes progress or has stopped.
pub(crate) struct ProgressCheck {
    bytes_left: u64,
    last_change: Instant,
}

impl ProgressCheck {
    pub(crate) fn new() -> Self {
        Self {
            bytes_left: u64::MAX,
            last_change: Instant::now(),
        }
    }

    /// Returns whether the number of bytes left has changed in the last [`FORCED_TIMEOUT`]. New data counts as a
    /// change, too.
    pub(crate) fn has_progress(&mut self, bytes_left: u64) -> bool {
        if self.bytes_left != bytes_left {
            *self = Self {
                bytes_left,
                last_change: Instant::now(),
            };
        }
        self.last_change.elapsed() < FORCED_TIMEOUT
    }
}

/// Drains all held data at the end of a mount. With `is_forced` it stops when the backing takes no more data. What is
/// left stays in the arena.
pub(crate) fn drain_last(engine: &Engine<Store>, is_forced: bool) {
    let mut progress = ProgressCheck::new();
    let drained = drain_remaining(engine, DurabilityLevel::Drained, &mut |bytes, _| {
        !is_forced || progress.has_progress(bytes)
    });
    if let Err(error) = drained {
        tracing::error!(%error, "data that cannot be drained stays in the arena");
    }
}

/// Drains all data that is in memory only: copies it to the backing, and syncs it there if `level` demands that. Works
/// in rounds until no such data is left, or a round drains none. If one file fails, the other files are still drained.
///
/// `progress` gets the bytes and files that are left; if it returns false, the drain ends with ECANCELED. Any other
/// error is that of the last round.
pub(crate) fn drain_remaining<B: Backing>(
    engine: &Engine<B>,
    level: DurabilityLevel,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<(), Errno> {
    loop {
        let held_before = engine.held_bytes();
        let result = engine.durability.wait_tree(b"", level, progress);
        let held_after = engine.held_bytes();
        let has_drained = held_after < held_before;
        match result {
            Ok(()) if held_after == 0 || !has_drained => return Ok(()),
            Err(Errno::CANCELED) => return Err(Errno::CANCELED),
            Err(error) if !has_drained => return Err(error),
            // Another round may drain files that failed in this one, and data that has arrived meanwhile.
            _ => {}
        }
    }
}
