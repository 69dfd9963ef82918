//! The home of a chunk: the word in the chunk's header that says where the chunk's data is.
//!
//! The *arena* is shared memory with the bytes of files that are not in the backing directory yet. A *chunk* is the
//! unit in which it is allocated, and a *slot* has space for the data of one chunk. A slot is in the arena's memory, or
//! in the *spill file* on a local disk. The low half of the word is the index of the slot. The high half is the CRC32C
//! of the kind of slot, the chunk and the slot.
//! * The home is one word, so that one store moves a chunk.
//! * It has a checksum, because a flipped bit would otherwise lead to the bytes of another file. Up to seven flipped
//!   bits are found.
//! * The kind of slot is not stored. It is the kind for which the checksum matches.

/// Number that stands for a slot in memory in the input of the checksum.
const MEMORY: u32 = 1;
/// Number that stands for a slot in the spill file.
const SPILL: u32 = 2;

/// The slot with the data of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Home {
    /// A slot of the arena's memory.
    Memory(u32),
    /// A slot of the spill file.
    Spill(u32),
}

impl Home {
    /// Encodes the home of `chunk`. The word is never 0, because 0 stands for a free chunk.
    pub fn to_word(self, chunk: u32) -> u64 {
        let (kind, slot) = match self {
            Self::Memory(slot) => (MEMORY, slot),
            Self::Spill(slot) => (SPILL, slot),
        };
        u64::from(slot) | u64::from(checksum(kind, chunk, slot)) << 32
    }

    /// Decodes the home of `chunk`. Returns `None` if the word is 0 or damaged.
    pub fn from_word(word: u64, chunk: u32) -> Option<Self> {
        let slot = word as u32;
        let stored_checksum = (word >> 32) as u32;
        if stored_checksum == checksum(MEMORY, chunk, slot) {
            Some(Self::Memory(slot))
        } else if stored_checksum == checksum(SPILL, chunk, slot) {
            Some(Self::Spill(slot))
        } else {
            None
        }
    }
}

/// Computes the checksum of a home.
fn checksum(kind: u32, chunk: u32, slot: u32) -> u32 {
    let mut bytes = [0u8; 12];
    bytes[0..4].copy_from_slice(&kind.to_le_bytes());
    bytes[4..8].copy_from_slice(&chunk.to_le_bytes());
    bytes[8..12].copy_from_slice(&slot.to_le_bytes());
    crc32c::crc32c(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOTS: [u32; 6] = [0, 1, 2, 77, 65_536, u32::MAX];

    #[test]
    fn what_is_stored_comes_back() {
        for (chunk, slot) in SLOTS.iter().flat_map(|c| SLOTS.map(|s| (*c, s))) {
            for home in [Home::Memory(slot), Home::Spill(slot)] {
                assert_eq!(Home::from_word(home.to_word(chunk), chunk), Some(home));
                assert_ne!(home.to_word(chunk), 0);
            }
        }
    }

    #[test]
    fn one_or_two_flipped_bits_are_never_another_home() {
        for chunk in SLOTS {
            for home in SLOTS
                .iter()
                .flat_map(|s| [Home::Memory(*s), Home::Spill(*s)])
            {
                let word = home.to_word(chunk);
                for (a, b) in (0..64).flat_map(|a| (0..64).map(move |b| (a, b))) {
                    let flipped = if a == b {
                        word ^ 1 << a
                    } else {
                        word ^ 1 << a ^ 1 << b
                    };
                    assert_eq!(
                        Home::from_word(flipped, chunk),
                        None,
                        "{home:?} bits {a} {b}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_word_of_one_chunk_is_no_home_of_another() {
        assert_eq!(Home::from_word(Home::Memory(3).to_word(3), 4), None);
        assert_eq!(Home::from_word(0, 0), None);
    }
}
