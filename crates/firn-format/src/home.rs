//! Where a chunk's data is: one word in the chunk's header.
//!
//! The low half is the index of a slot, the high half the CRC32C of kind, chunk and slot. One word, so that
//! a chunk moves with one store; a sum, because a flipped bit that led to another slot would give one
//! file's bytes to another. The kind is known by its sum: up to seven flipped bits are found.

const MEMORY: u32 = 1;
const SPILL: u32 = 2;

/// A slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Home {
    /// This slot of the arena.
    Memory(u32),
    /// This slot of the spill file.
    Spill(u32),
}

impl Home {
    /// The stored word of `chunk`; never 0, which stands in a free chunk.
    pub fn to_word(self, chunk: u32) -> u64 {
        let (kind, slot) = match self {
            Self::Memory(slot) => (MEMORY, slot),
            Self::Spill(slot) => (SPILL, slot),
        };
        u64::from(slot) | u64::from(sum(kind, chunk, slot)) << 32
    }

    /// From the stored word of `chunk`; `None` is damage, or no home.
    pub fn from_word(word: u64, chunk: u32) -> Option<Self> {
        let slot = word as u32;
        let found = (word >> 32) as u32;
        if found == sum(MEMORY, chunk, slot) {
            Some(Self::Memory(slot))
        } else if found == sum(SPILL, chunk, slot) {
            Some(Self::Spill(slot))
        } else {
            None
        }
    }
}

fn sum(kind: u32, chunk: u32, slot: u32) -> u32 {
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
