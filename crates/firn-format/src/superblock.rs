//! The superblock: the first page of an arena. It identifies the arena and its backing, and gives the sizes from which the
//! layout follows.
//!
//! ```text
//! 0     magic "FIRNAREN"        8
//! 8     version u32, reserved u32
//! 16    uuid                    16
//! 32    chunk_bytes u64, chunk_count u32, spill_count u32, journal_half_bytes u64
//! 56    backing_dev u64, backing_ino u64, created_s i64
//! 80    path_len u32, path      at most 3072 bytes
//! 3160  path_len u32, path of the spill file, at most 920 bytes
//! 4092  CRC32C of all before
//! ```
//!
//! The superblock is written once, when the arena is made. Values that change (sequence, epoch, holder) are in the
//! state page after it.

use crate::FormatError;
use crate::geometry::Geometry;

/// First bytes of an arena.
pub const MAGIC: [u8; 8] = *b"FIRNAREN";
/// Version of the whole arena format.
pub const VERSION: u32 = 5;
/// Length of the superblock in bytes.
pub const SUPERBLOCK_BYTES: usize = 4096;
/// Bound on the stored path of a backing. A longer path is cut.
pub const PATH_MAX: usize = 3072;
/// Bound on the path of a spill file.
pub const SPILL_PATH_MAX: usize = 920;
/// Offset of the length of the spill file's path.
const SPILL_PATH_OFFSET: usize = 3160;

/// Offsets of words in the state page that follows the superblock.
pub mod state_word {
    /// `u64`: sequence of the last write.
    pub const SEQUENCE: u64 = 4096;
    /// `u64`: number of firnds that the arena has had.
    pub const EPOCH: u64 = 4096 + 8;
    /// `u64`: generation of the last lease.
    pub const GENERATION: u64 = 4096 + 16;
    /// `u32`: process id of firnd, for messages only.
    pub const HOLDER_PID: u64 = 4096 + 24;
    /// `u32` length and bytes of the mount point, for messages only.
    pub const HOLDER_PATH: u64 = 4096 + 28;
    /// Bound on the stored mount point. A longer one is cut.
    pub const HOLDER_PATH_MAX: usize = 4000;
}

/// A superblock that was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Identifies this arena.
    pub uuid: [u8; 16],
    /// The layout of the arena.
    pub geometry: Geometry,
    /// Device number of the backing directory when the arena was made.
    pub backing_dev: u64,
    /// Inode number of the backing directory.
    pub backing_ino: u64,
    /// When the arena was made, in seconds since 1970.
    pub created_s: i64,
    /// Canonical path of the backing directory, cut at [`PATH_MAX`].
    pub backing_path: Vec<u8>,
    /// Absolute path of the spill file, at most [`SPILL_PATH_MAX`] bytes; empty if there is none.
    pub spill_path: Vec<u8>,
}

impl Superblock {
    /// Encodes the superblock.
    pub fn encode(&self) -> [u8; SUPERBLOCK_BYTES] {
        let mut page = [0u8; SUPERBLOCK_BYTES];
        page[0..8].copy_from_slice(&MAGIC);
        page[8..12].copy_from_slice(&VERSION.to_le_bytes());
        page[16..32].copy_from_slice(&self.uuid);
        page[32..40].copy_from_slice(&self.geometry.chunk_bytes.to_le_bytes());
        page[40..44].copy_from_slice(&self.geometry.chunk_count.to_le_bytes());
        page[48..56].copy_from_slice(&self.geometry.journal_half_bytes.to_le_bytes());
        page[56..64].copy_from_slice(&self.backing_dev.to_le_bytes());
        page[64..72].copy_from_slice(&self.backing_ino.to_le_bytes());
        page[72..80].copy_from_slice(&self.created_s.to_le_bytes());
        let path = &self.backing_path[..self.backing_path.len().min(PATH_MAX)];
        page[80..84].copy_from_slice(&(path.len() as u32).to_le_bytes());
        page[84..84 + path.len()].copy_from_slice(path);
        page[44..48].copy_from_slice(&self.geometry.spill_count.to_le_bytes());
        let path = &self.spill_path[..self.spill_path.len().min(SPILL_PATH_MAX)];
        page[SPILL_PATH_OFFSET..SPILL_PATH_OFFSET + 4]
            .copy_from_slice(&(path.len() as u32).to_le_bytes());
        page[SPILL_PATH_OFFSET + 4..SPILL_PATH_OFFSET + 4 + path.len()].copy_from_slice(path);
        let crc = crc32c::crc32c(&page[..SUPERBLOCK_BYTES - 4]);
        page[SUPERBLOCK_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
        page
    }

    /// Decodes and checks a superblock. The version is checked before the checksum: an arena of another version is
    /// reported as such, and not as damaged.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let truncated = || FormatError::Truncated {
            what: "superblock",
            found: bytes.len() as u64,
            expected: SUPERBLOCK_BYTES as u64,
        };
        let page: &[u8; SUPERBLOCK_BYTES] = bytes
            .get(..SUPERBLOCK_BYTES)
            .and_then(|page| page.try_into().ok())
            .ok_or_else(truncated)?;
        let u32_at =
            |at: usize| u32::from_le_bytes(page[at..at + 4].try_into().expect("four bytes"));
        let u64_at =
            |at: usize| u64::from_le_bytes(page[at..at + 8].try_into().expect("eight bytes"));
        if page[0..8] != MAGIC {
            return Err(FormatError::Magic);
        }
        let found = u32_at(SUPERBLOCK_BYTES - 4);
        let expected = crc32c::crc32c(&page[..SUPERBLOCK_BYTES - 4]);
        if u32_at(8) != VERSION {
            return Err(FormatError::Version {
                found: u32_at(8),
                expected: VERSION,
            });
        }
        if found != expected {
            return Err(FormatError::Checksum {
                what: "superblock",
                found,
                expected,
            });
        }
        let field = |why: &str| FormatError::Field {
            what: "superblock",
            why: why.into(),
        };
        let geometry = Geometry {
            chunk_bytes: u64_at(32),
            chunk_count: u32_at(40),
            spill_count: u32_at(44),
            journal_half_bytes: u64_at(48),
        };
        let bytes_of = |count: u32| {
            geometry
                .chunk_bytes
                .checked_mul(u64::from(count))
                .ok_or_else(|| field("size overflows"))
        };
        let arena_bytes = bytes_of(geometry.chunk_count)?;
        let spill_bytes = bytes_of(geometry.spill_count)?;
        if Geometry::with_spill(arena_bytes, geometry.chunk_bytes, spill_bytes)? != geometry {
            return Err(field("geometry does not follow from its sizes"));
        }
        let path_len = u32_at(80) as usize;
        let spill_len = u32_at(SPILL_PATH_OFFSET) as usize;
        if path_len > PATH_MAX || spill_len > SPILL_PATH_MAX {
            return Err(field("path longer than its field"));
        }
        Ok(Self {
            uuid: page[16..32].try_into().expect("sixteen bytes"),
            geometry,
            backing_dev: u64_at(56),
            backing_ino: u64_at(64),
            created_s: u64_at(72) as i64,
            backing_path: page[84..84 + path_len].to_vec(),
            spill_path: page[SPILL_PATH_OFFSET + 4..][..spill_len].to_vec(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Superblock {
        Superblock {
            uuid: [7; 16],
            geometry: Geometry::with_spill(16 << 20, 4 << 20, 64 << 20).unwrap(),
            backing_dev: 1,
            backing_ino: 2,
            created_s: 3,
            backing_path: b"/scratch/run42".to_vec(),
            spill_path: b"/local/nvme/firn.spill".to_vec(),
        }
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        assert_eq!(Superblock::decode(&sample().encode()), Ok(sample()));
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let page = sample().encode();
        for bit in 0..page.len() * 8 {
            let mut bad = page;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Superblock::decode(&bad).is_err(), "bit {bit}");
        }
    }

    /// Proves S-crash-9.
    #[test]
    fn another_version_is_named_as_such() {
        for other in [1, 9] {
            let mut page = sample().encode();
            page[8] = other;
            let error = FormatError::Version {
                found: other.into(),
                expected: VERSION,
            };
            assert_eq!(Superblock::decode(&page), Err(error));
        }
    }

    #[test]
    fn a_short_page_is_truncated() {
        assert!(matches!(
            Superblock::decode(&sample().encode()[..100]),
            Err(FormatError::Truncated { .. })
        ));
    }
}
