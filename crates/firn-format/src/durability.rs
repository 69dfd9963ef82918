//! The durability levels of files, from "in this host's memory" to "synced in the backing", the directory that a mount
//! serves. A level says which failures the bytes of a file survive.

use serde::{Deserialize, Serialize};

/// The durability level of a file. All its bytes have at least this level. Each level survives all failures that the
/// level before it survives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DurabilityLevel {
    /// The bytes are in the arena, a file of shared memory. They survive the death of every process.
    Held,
    /// The bytes are in the spill file on a local disk. They survive the same failures, and use no memory.
    Spilled,
    /// The bytes are in the arena or the spill file, and a partner host has a copy in memory. They survive the loss of
    /// one host.
    Partnered,
    /// The bytes are in a log in the backing, as after write(2). They survive the loss of the host. Only Firn can read
    /// them.
    Logged,
    /// The bytes are in the backing, as after write(2).
    Drained,
    /// The bytes are in the backing, as after fsync(2).
    Durable,
}

impl DurabilityLevel {
    /// All levels, the least durable first.
    pub const ALL: [Self; 6] = [
        Self::Held,
        Self::Spilled,
        Self::Partnered,
        Self::Logged,
        Self::Drained,
        Self::Durable,
    ];

    /// Parses a word that [`DurabilityLevel::as_str`] returns.
    pub fn parse(word: &[u8]) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|level| level.as_str().as_bytes() == word)
    }

    /// Returns the word for the level.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Spilled => "spilled",
            Self::Partnered => "partnered",
            Self::Logged => "logged",
            Self::Drained => "drained",
            Self::Durable => "durable",
        }
    }
}
