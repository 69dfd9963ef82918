//! Draining what is left when a mount ends or an arena is recovered.

use std::time::Instant;

use firn_backing::{Backing, Errno};
use firn_engine::Engine;
use firn_format::durability::DurabilityLevel;

use crate::patience::FORCED_PATIENCE;
use crate::store::Store;

/// Tells a drain that goes on from one that has stopped.
pub(crate) struct Progress {
    bytes_left: u64,
    since: Instant,
}

impl Progress {
    pub(crate) fn new() -> Self {
        Self {
            bytes_left: u64::MAX,
            since: Instant::now(),
        }
    }

    /// Whether bytes were drained within [`FORCED_PATIENCE`].
    pub(crate) fn goes_on(&mut self, bytes_left: u64) -> bool {
        if self.bytes_left != bytes_left {
            *self = Self {
                bytes_left,
                since: Instant::now(),
            };
        }
        self.since.elapsed() < FORCED_PATIENCE
    }
}

/// Drains the rest at the end of a mount. A forced end does not wait for a backing that takes nothing.
pub(crate) fn drain_last(engine: &Engine<Store>, force: bool) {
    let mut progress = Progress::new();
    let drained = drain_rest(engine, DurabilityLevel::Drained, &mut |bytes, _| {
        !force || progress.goes_on(bytes)
    });
    if let Err(error) = drained {
        tracing::error!(%error, "data that cannot be drained stays in the arena");
    }
}

/// Drains until nothing is held or nothing more can be drained. A file that fails does not keep the
/// others from being drained. `progress` ends it with false.
pub(crate) fn drain_rest<B: Backing>(
    engine: &Engine<B>,
    until: DurabilityLevel,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<(), Errno> {
    loop {
        let before = engine.held_bytes();
        let result = engine.durability.wait_tree(b"", until, progress);
        let after = engine.held_bytes();
        match result {
            Ok(()) if after == 0 || after >= before => return Ok(()),
            Err(Errno::CANCELED) => return Err(Errno::CANCELED),
            Err(error) if after >= before => return Err(error),
            _ => {}
        }
    }
}
