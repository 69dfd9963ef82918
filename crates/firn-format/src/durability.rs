//! Durability levels.

use serde::{Deserialize, Serialize};

/// What all bytes of a file survive; each level survives what the one before does, and more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DurabilityLevel {
    /// In the arena: survives the death of every process.
    Held,
    /// In the spill file: the same, memory is free again.
    Spilled,
    /// In the arena or the spill file, and copied into the memory of a partner host: survives the loss of one host.
    Partnered,
    /// In a log in the backing, as after write(2): survives the loss of the host, and only Firn can read it.
    Logged,
    /// In the backing, as after write(2).
    Drained,
    /// In the backing, as after fsync(2).
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

    /// The level of a word that [`DurabilityLevel::as_str`] gives.
    pub fn parse(word: &[u8]) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|level| level.as_str().as_bytes() == word)
    }

    /// The word for it.
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
