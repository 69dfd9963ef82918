//! Allocates the arena's memory at the start of a mount, and removes the arena's file at the end or leaves it. The
//! arena is shared memory with the bytes that are not in the backing yet.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use firn_client::paths::RuntimeFiles;
use firn_engine::Engine;
use firn_format::quote::quoted_path;
use firn_workers::{Class, Workers};

use crate::error::MountError;
use crate::part::{ArenaEnd, Part, Parts, StopContext};
use crate::store::Store;

/// Returns the number of bytes that only the arena has.
pub(crate) fn count_remaining_bytes(engine: &Engine<Store>) -> u64 {
    let figures = engine.figures();
    figures.held_bytes + figures.lost_file_bytes
}

/// The file of an arena, and its spill file.
pub(crate) struct ArenaFile {
    pub(crate) engine: Arc<Engine<Store>>,
    pub(crate) files: RuntimeFiles,
    /// Parts of the arena could not be read, so it is renamed at the end instead of removed.
    pub(crate) is_damaged: bool,
}

impl ArenaFile {
    /// Renames a damaged arena so that a person can examine it and the next mount makes a new one.
    fn keep_damaged_arena(&self, spill: Option<&Path>) {
        let new_path = self.files.arena.with_extension("damaged");
        if let Err(error) = std::fs::rename(&self.files.arena, &new_path) {
            tracing::warn!(%error, "cannot rename the damaged arena");
            return;
        }
        // The arena was drained, so the backing has all data of these files.
        firn_arena::remove_memory_files(&self.files.arena);
        if let Some(spill) = spill {
            // With its old name, the spill file would look like that of a removed arena.
            let _ = std::fs::rename(spill, spill.with_extension("spill.damaged"));
        }
        tracing::warn!(arena = %quoted_path(&new_path), "parts of the arena were damaged, so the arena is kept: examine it with `firn check`, then remove it");
    }

    /// Removes the arena with its other files.
    fn remove(&self, spill: Option<&Path>) -> io::Result<()> {
        // The arena goes first: without it the other files are useless, and a later mount replaces them.
        std::fs::remove_file(&self.files.arena)?;
        firn_arena::remove_memory_files(&self.files.arena);
        if let Some(spill) = spill
            && let Err(error) = std::fs::remove_file(spill)
        {
            tracing::warn!(%error, file = %quoted_path(spill), "cannot remove the spill file");
        }
        Ok(())
    }
}

impl Part for ArenaFile {
    /// Removes the arena (the host's memory with bytes that the backing lacks) at the end of the mount, if it is to be
    /// discarded, or if it is empty and no call of the backing may still need it. An empty, damaged arena is renamed
    /// instead. `context` gets the number of bytes that stay in the arena.
    fn stop(&self, context: &mut StopContext) {
        // These bytes are in the arena (the host's memory) only.
        let remaining_bytes = count_remaining_bytes(&self.engine);
        context.remaining_bytes = remaining_bytes;
        let discards = context.arena_end == ArenaEnd::Discard;
        // A call of the backing that is in progress may still need the arena, but not if its data is discarded.
        let must_stay = context.has_backing_call_in_progress
            || context.arena_end == ArenaEnd::Keep
            || remaining_bytes > 0;
        if must_stay && !discards {
            return;
        }
        let spill = self.engine.arena().spill_file();
        let spill = spill.map(|file| file.path().to_owned());
        if self.is_damaged && !discards {
            // A person may want to examine the damage.
            return self.keep_damaged_arena(spill.as_deref());
        }
        match self.remove(spill.as_deref()) {
            Ok(()) if remaining_bytes > 0 => {
                tracing::warn!(
                    bytes = remaining_bytes,
                    "held data was dropped, as requested"
                );
                context.remaining_bytes = 0;
            }
            Ok(()) => {}
            Err(error) => {
                tracing::warn!(%error, arena = %quoted_path(&self.files.arena), "cannot remove the arena")
            }
        }
    }
}

/// Allocates the arena's memory in the background, so that the first writers do not wait for it. A failure only costs
/// time.
pub(crate) struct ArenaMemory {
    engine: Arc<Engine<Store>>,
    workers: Workers,
    may_continue: Arc<AtomicBool>,
}

impl ArenaMemory {
    pub(crate) fn new(engine: &Arc<Engine<Store>>, workers: &Workers) -> Arc<Self> {
        Arc::new(Self {
            engine: Arc::clone(engine),
            workers: workers.clone(),
            may_continue: Arc::new(AtomicBool::new(true)),
        })
    }
}

impl Part for ArenaMemory {
    fn start(&self, _: &Parts) -> Result<(), MountError> {
        let engine = Arc::clone(&self.engine);
        let may_continue = Arc::clone(&self.may_continue);
        let started = self.workers.try_run(Class::Job, move || {
            if let Err(error) = engine.arena().populate(&|| may_continue.load(Ordering::Relaxed)) {
                tracing::info!(%error, "cannot allocate the arena's memory in advance: it is allocated at first use");
            }
        });
        if let Err(error) = started {
            tracing::info!(%error, "cannot allocate the arena's memory in advance: it is allocated at first use");
        }
        Ok(())
    }

    fn stop(&self, _: &mut StopContext) {
        self.may_continue.store(false, Ordering::Relaxed);
    }
}
