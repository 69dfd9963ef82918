//! The names of memory files, and the word that stores in which memory file a slot is.
//!
//! The *arena* is a file of shared memory with the bytes that are not in the backing directory yet. A *slot* is memory
//! in it, of fixed size, which is allocated as a whole. A *memory file* is a tmpfs file beside the arena that has the
//! bytes of one large file in order. Its memory replaces that of slots in the arena's own file.
//!
//! Each slot has a *location word*. The low half is the number of the memory file and the index of the slot in it. The
//! high half is the CRC32C of the arena's UUID, the slot and the low half.
//! * The location is one word, so that one store moves a slot.
//! * It has a checksum, because a flipped bit would otherwise lead to the bytes of another file.

use std::ffi::{OsStr, OsString};

/// Bound on the slots of one memory file, because an index has 16 bits.
pub const MEMORY_FILE_SLOTS_MAX: u32 = 1 << 16;

/// The location word of a slot whose bytes are in the arena's own file.
pub const IN_ARENA_FILE: u64 = 0;

/// The memory file of a slot, and the slot's index in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemoryFileLocation {
    /// Number of the memory file, which is part of its name.
    pub file: u16,
    /// Index of the slot. The slot begins at this many times the length of a chunk.
    pub index: u16,
}

impl MemoryFileLocation {
    /// Encodes the location of `slot` in the arena `uuid`. The word is never [`IN_ARENA_FILE`].
    pub fn to_word(self, slot: u32, uuid: &[u8; 16]) -> u64 {
        let packed_location = u32::from(self.file) << 16 | u32::from(self.index);
        u64::from(packed_location) | u64::from(checksum(packed_location, slot, uuid)) << 32
    }

    /// Decodes the location of `slot`. Returns `None` if the word is [`IN_ARENA_FILE`] or damaged.
    pub fn from_word(word: u64, slot: u32, uuid: &[u8; 16]) -> Option<Self> {
        let packed_location = word as u32;
        let stored_checksum = (word >> 32) as u32;
        if word == IN_ARENA_FILE || stored_checksum != checksum(packed_location, slot, uuid) {
            return None;
        }
        Some(Self {
            file: (packed_location >> 16) as u16,
            index: packed_location as u16,
        })
    }
}

/// Computes the high half of a location word, whose low half is `packed_location`.
fn checksum(packed_location: u32, slot: u32, uuid: &[u8; 16]) -> u32 {
    let mut bytes = [0u8; 24];
    bytes[0..16].copy_from_slice(uuid);
    bytes[16..20].copy_from_slice(&slot.to_le_bytes());
    bytes[20..24].copy_from_slice(&packed_location.to_le_bytes());
    let checksum = crc32c::crc32c(&bytes);
    // The word must not be `IN_ARENA_FILE`, which is 0.
    if packed_location == 0 && checksum == 0 {
        1
    } else {
        checksum
    }
}

/// Returns the name of memory file `number`. It lies beside its arena.
pub fn memory_file_name(arena: &OsStr, number: u16) -> OsString {
    let mut name = arena.to_owned();
    name.push(format!(".m{number}"));
    name
}

/// Returns the number of a memory file by its name, or `None` if the name is not of a memory file of this arena.
pub fn memory_file_number(arena: &OsStr, name: &OsStr) -> Option<u16> {
    let arena = arena.as_encoded_bytes();
    let suffix = name.as_encoded_bytes().strip_prefix(arena)?;
    let digits = std::str::from_utf8(suffix.strip_prefix(b".m")?).ok()?;
    let number: u16 = digits.parse().ok()?;
    // A number with leading zeros is not a name that `memory_file_name` gives.
    (number.to_string() == digits).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: [u8; 16] = [7; 16];

    #[test]
    fn what_is_stored_comes_back_and_is_no_place_of_another_slot_or_arena() {
        for (file, index) in [(0, 0), (1, 0), (0, 1), (u16::MAX, u16::MAX)] {
            for slot in [0, 1, 77, u32::MAX] {
                let place = MemoryFileLocation { file, index };
                let word = place.to_word(slot, &UUID);
                assert_ne!(word, 0);
                assert_eq!(
                    MemoryFileLocation::from_word(word, slot, &UUID),
                    Some(place)
                );
                assert_eq!(MemoryFileLocation::from_word(word, slot ^ 1, &UUID), None);
                assert_eq!(MemoryFileLocation::from_word(word, slot, &[8; 16]), None);
            }
        }
        assert_eq!(MemoryFileLocation::from_word(0, 0, &UUID), None);
    }

    #[test]
    fn one_flipped_bit_is_never_another_place() {
        let word = MemoryFileLocation { file: 3, index: 9 }.to_word(5, &UUID);
        for bit in 0..64 {
            let flipped = word ^ 1 << bit;
            assert_eq!(
                MemoryFileLocation::from_word(flipped, 5, &UUID),
                None,
                "bit {bit}"
            );
        }
    }

    #[test]
    fn names_are_those_of_one_arena() {
        let arena = OsStr::new("ab.arena");
        let name = memory_file_name(arena, 12);
        assert_eq!(memory_file_number(arena, &name), Some(12));
        for other in [
            "ab.arena",
            "ab.arena.m",
            "ab.arena.m012",
            "ab.arena.m70000",
            "b.arena.m1",
        ] {
            assert_eq!(
                memory_file_number(arena, OsStr::new(other)),
                None,
                "{other}"
            );
        }
    }
}
