//! Firn with a drain that drops what it carries: what `ingest` measures.
//!
//! CRFS's figure 5 shows how fast writes are taken in when nothing has to be stored. So the whole of
//! Firn runs here (session, engine, arena, drain threads), and only the last step, the write to the
//! backing, is replaced. It is put together inside the benchmark: no option of `firn mount` loses data.

use std::path::{Path, PathBuf};

use anyhow::bail;
use serde::{Deserialize, Serialize};

/// How the arena is cut, and where names and empty files are made.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Geometry {
    /// Directory that gets the (empty) files.
    pub backing: PathBuf,
    /// Bytes of the arena.
    pub arena_bytes: u64,
    /// Bytes of one chunk.
    pub chunk_bytes: u64,
    /// Threads of the drain.
    pub io_threads: usize,
}

/// A running mount; dropping it unmounts.
pub struct Discarding {}

/// Whether [`mount_discarding`] can work in this build.
pub const AVAILABLE: bool = false;

/// Mounts Firn over a discarding backing.
pub fn mount_discarding(_geometry: &Geometry, _mount_point: &Path) -> anyhow::Result<Discarding> {
    bail!("this build has no Firn to mount yet; measure the baseline alone with --baseline-only")
}
