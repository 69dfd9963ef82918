//! The header of a spill file: which arena the file belongs to. An *arena* is a file of shared memory with written
//! bytes, allocated in *chunks*. The *spill file*, on a local disk, has *slots* for chunks that no longer fit into
//! memory.
//!
//! ```text
//! 0     magic "FIRNSPIL"        8
//! 8     version u32, slot_count u32
//! 16    uuid of the arena       16
//! 32    slot_bytes u64          bytes of a chunk
//! 40    path_len u32, path      path of the arena, at most 4000 bytes
//! 4092  CRC32C of all bytes before it
//! ```
//!
//! The header is written once, when the file is made. Slot *i* begins at [`SPILL_DATA_OFFSET`] + *i* × `slot_bytes`.
//! The tables of the arena say what is in each slot, so a spill file without its arena has no meaning.

use crate::FormatError;
use crate::page_field::{put, put_u32, put_u64, read_array, read_u32, read_u64};
use crate::superblock::VERSION;

/// First bytes of a spill file.
pub const SPILL_MAGIC: [u8; 8] = *b"FIRNSPIL";
/// Length of the header in bytes.
pub const SPILL_HEADER_BYTES: usize = 4096;
/// Offset of the first slot. It is aligned for direct I/O on devices with any size of block.
pub const SPILL_DATA_OFFSET: u64 = 64 << 10;
/// Maximum length of the stored path of an arena. A longer path is cut: then no arena is found there, and the file
/// counts as left over once no firnd has it locked.
const PATH_MAX: usize = 4000;

/// Offsets of the fields.
mod offset {
    pub(super) const VERSION: usize = 8;
    pub(super) const SLOT_COUNT: usize = 12;
    pub(super) const UUID: usize = 16;
    pub(super) const SLOT_BYTES: usize = 32;
    pub(super) const PATH_LEN: usize = 40;
    pub(super) const PATH: usize = 44;
    pub(super) const CHECKSUM: usize = super::SPILL_HEADER_BYTES - 4;
}

/// A header that was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpillHeader {
    /// UUID of the arena.
    pub uuid: [u8; 16],
    /// Length of a slot in bytes.
    pub slot_bytes: u64,
    /// Number of slots.
    pub slot_count: u32,
    /// Path at which the arena was made, cut at 4000 bytes. Firn looks there to learn whether the arena still exists.
    pub arena_path: Vec<u8>,
}

impl SpillHeader {
    /// Encodes the header.
    pub fn encode(&self) -> [u8; SPILL_HEADER_BYTES] {
        let path = &self.arena_path[..self.arena_path.len().min(PATH_MAX)];
        let mut page = [0u8; SPILL_HEADER_BYTES];
        put(&mut page, 0, &SPILL_MAGIC);
        put_u32(&mut page, offset::VERSION, VERSION);
        put_u32(&mut page, offset::SLOT_COUNT, self.slot_count);
        put(&mut page, offset::UUID, &self.uuid);
        put_u64(&mut page, offset::SLOT_BYTES, self.slot_bytes);
        put_u32(&mut page, offset::PATH_LEN, path.len() as u32);
        put(&mut page, offset::PATH, path);
        let checksum = crc32c::crc32c(&page[..offset::CHECKSUM]);
        put_u32(&mut page, offset::CHECKSUM, checksum);
        page
    }

    /// Decodes and checks the header of a spill file, which has the chunks of an arena that do not fit into memory. The
    /// version is checked before the checksum, so a file of another version is not reported as damaged.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let Some(page) = bytes.first_chunk::<SPILL_HEADER_BYTES>() else {
            return Err(FormatError::Truncated {
                what: "spill header",
                found: bytes.len() as u64,
                expected: SPILL_HEADER_BYTES as u64,
            });
        };
        let invalid = |why: &str| FormatError::Field {
            what: "spill header",
            why: why.into(),
        };
        if page[0..8] != SPILL_MAGIC {
            return Err(invalid("the magic number is missing"));
        }
        let version = read_u32(page, offset::VERSION);
        if version != VERSION {
            return Err(FormatError::Version {
                found: version,
                expected: VERSION,
            });
        }
        let found = read_u32(page, offset::CHECKSUM);
        let expected = crc32c::crc32c(&page[..offset::CHECKSUM]);
        if found != expected {
            return Err(FormatError::Checksum {
                what: "spill header",
                found,
                expected,
            });
        }
        let path_len = read_u32(page, offset::PATH_LEN) as usize;
        if path_len > PATH_MAX {
            return Err(invalid("path longer than its field"));
        }
        Ok(Self {
            uuid: read_array(page, offset::UUID),
            slot_bytes: read_u64(page, offset::SLOT_BYTES),
            slot_count: read_u32(page, offset::SLOT_COUNT),
            arena_path: page[offset::PATH..][..path_len].to_vec(),
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
