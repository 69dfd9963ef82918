//! The header of a spill file: which arena the file belongs to.
//!
//! ```text
//! 0     magic "FIRNSPIL"        8
//! 8     version u32, slot_count u32
//! 16    uuid of the arena       16
//! 32    slot_bytes u64          bytes of a chunk
//! 40    path_len u32, path      path of the arena, at most 4000 bytes
//! 4092  CRC32C of all before
//! ```
//!
//! The header is written once, when the file is made. Slot *i* begins at [`SPILL_DATA_OFFSET`] + *i* × `slot_bytes`.
//! The tables of the arena say what is in each slot, so a spill file without its arena has no meaning.

use crate::FormatError;
use crate::superblock::VERSION;

/// First bytes of a spill file.
pub const SPILL_MAGIC: [u8; 8] = *b"FIRNSPIL";
/// Length of the header in bytes.
pub const SPILL_HEADER_BYTES: usize = 4096;
/// Offset of the first slot. It is aligned for direct I/O on devices with any size of block.
pub const SPILL_DATA_OFFSET: u64 = 64 << 10;
/// Bound on the stored path of an arena. A longer path is cut.
const PATH_MAX: usize = 4000;

/// A header that was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpillHeader {
    /// UUID of the arena.
    pub uuid: [u8; 16],
    /// Length of a slot in bytes.
    pub slot_bytes: u64,
    /// Number of slots.
    pub slot_count: u32,
    /// Path at which the arena was made, cut at 4000 bytes. By this path Firn checks whether the arena still exists.
    pub arena_path: Vec<u8>,
}

impl SpillHeader {
    /// Encodes the header.
    pub fn encode(&self) -> [u8; SPILL_HEADER_BYTES] {
        let mut page = [0u8; SPILL_HEADER_BYTES];
        page[0..8].copy_from_slice(&SPILL_MAGIC);
        page[8..12].copy_from_slice(&VERSION.to_le_bytes());
        page[12..16].copy_from_slice(&self.slot_count.to_le_bytes());
        page[16..32].copy_from_slice(&self.uuid);
        page[32..40].copy_from_slice(&self.slot_bytes.to_le_bytes());
        let path = &self.arena_path[..self.arena_path.len().min(PATH_MAX)];
        page[40..44].copy_from_slice(&(path.len() as u32).to_le_bytes());
        page[44..44 + path.len()].copy_from_slice(path);
        let crc = crc32c::crc32c(&page[..SPILL_HEADER_BYTES - 4]);
        page[SPILL_HEADER_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
        page
    }

    /// Decodes and checks a header.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let truncated = || FormatError::Truncated {
            what: "spill header",
            found: bytes.len() as u64,
            expected: SPILL_HEADER_BYTES as u64,
        };
        let page: &[u8; SPILL_HEADER_BYTES] = bytes
            .get(..SPILL_HEADER_BYTES)
            .and_then(|page| page.try_into().ok())
            .ok_or_else(truncated)?;
        let u32_at =
            |at: usize| u32::from_le_bytes(page[at..at + 4].try_into().expect("four bytes"));
        let field = |why: &str| FormatError::Field {
            what: "spill header",
            why: why.into(),
        };
        if page[0..8] != SPILL_MAGIC {
            return Err(field("the magic number is missing"));
        }
        if u32_at(8) != VERSION {
            return Err(FormatError::Version {
                found: u32_at(8),
                expected: VERSION,
            });
        }
        let found = u32_at(SPILL_HEADER_BYTES - 4);
        let expected = crc32c::crc32c(&page[..SPILL_HEADER_BYTES - 4]);
        if found != expected {
            return Err(FormatError::Checksum {
                what: "spill header",
                found,
                expected,
            });
        }
        let path_len = u32_at(40) as usize;
        if path_len > PATH_MAX {
            return Err(field("path longer than its field"));
        }
        Ok(Self {
            uuid: page[16..32].try_into().expect("sixteen bytes"),
            slot_bytes: u64::from_le_bytes(page[32..40].try_into().expect("eight bytes")),
            slot_count: u32_at(12),
            arena_path: page[44..44 + path_len].to_vec(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> SpillHeader {
        let arena_path = b"/dev/shm/firn-0/1.arena".to_vec();
        SpillHeader {
            uuid: [9; 16],
            slot_bytes: 4 << 20,
            slot_count: 64,
            arena_path,
        }
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        assert_eq!(SpillHeader::decode(&sample().encode()), Ok(sample()));
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let page = sample().encode();
        for bit in 0..page.len() * 8 {
            let mut bad = page;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(SpillHeader::decode(&bad).is_err(), "bit {bit}");
        }
        assert!(SpillHeader::decode(&page[..4095]).is_err());
    }
}
