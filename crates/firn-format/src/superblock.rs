//! The superblock: the first page of an arena. It identifies the arena and its backing, and gives the sizes from which
//! the layout follows. An *arena* is a file of shared memory with written bytes that are not yet in the *backing*, the
//! directory that a mount serves. It is allocated in *chunks*; the *spill file* has further chunks on a local disk.
//!
//! ```text
//! 0     magic "FIRNAREN"        8
//! 8     version u32, reserved u32
//! 16    uuid                    16
//! 32    chunk_bytes u64, chunk_count u32, spill_count u32, journal_half_bytes u64
//! 56    backing_dev u64, backing_ino u64, created_s i64
//! 80    path_len u32, path      at most 3072 bytes
//! 3160  path_len u32, path of the spill file, at most 920 bytes
//! 4092  CRC32C of all bytes before it
//! ```
//!
//! The superblock is written once, when the arena is made. Values that change (sequence, epoch, holder) are in the
//! state page after it.

use crate::FormatError;
use crate::geometry::Geometry;
use crate::page_field::{put, put_u32, put_u64, read_array, read_u32, read_u64};

/// First bytes of an arena.
pub const MAGIC: [u8; 8] = *b"FIRNAREN";
/// Version of the whole arena format.
pub const VERSION: u32 = 5;
/// Length of the superblock in bytes.
pub const SUPERBLOCK_BYTES: usize = 4096;
/// Maximum length of the stored path of a backing. A longer path is cut.
pub const PATH_MAX: usize = 3072;
/// Maximum length of the path of a spill file. An arena with a longer one is not made.
pub const SPILL_PATH_MAX: usize = 920;

/// Offsets of the fields of the superblock.
mod offset {
    pub(super) const VERSION: usize = 8;
    pub(super) const UUID: usize = 16;
    pub(super) const CHUNK_BYTES: usize = 32;
    pub(super) const CHUNK_COUNT: usize = 40;
    pub(super) const SPILL_COUNT: usize = 44;
    pub(super) const JOURNAL_HALF_BYTES: usize = 48;
    pub(super) const BACKING_DEV: usize = 56;
    pub(super) const BACKING_INO: usize = 64;
    pub(super) const CREATED_S: usize = 72;
    /// The length of the path, of 4 bytes, and the path.
    pub(super) const BACKING_PATH: usize = 80;
    /// The same for the path of the spill file.
    pub(super) const SPILL_PATH: usize = 3160;
    pub(super) const CHECKSUM: usize = super::SUPERBLOCK_BYTES - 4;
}

/// Offsets of words in the state page that follows the superblock. The *holder* is the firnd process that has attached
/// the arena last.
pub mod state_word {
    /// Offset of the state page.
    const STATE_PAGE: u64 = super::SUPERBLOCK_BYTES as u64;

    /// `u64`: sequence of the last write.
    pub const SEQUENCE: u64 = STATE_PAGE;
    /// `u64`: number of firnd processes that have attached the arena.
    pub const EPOCH: u64 = STATE_PAGE + 8;
    /// `u64`: generation of the last lease.
    pub const GENERATION: u64 = STATE_PAGE + 16;
    /// `u32`: process id of the holder, for messages only.
    pub const HOLDER_PID: u64 = STATE_PAGE + 24;
    /// `u32` length and bytes of the holder's mount point, for messages only.
    pub const HOLDER_PATH: u64 = STATE_PAGE + 28;
    /// Maximum length of the stored mount point. A longer one is cut, so messages show only its start.
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
    /// Encodes the superblock, the first page of an arena. The last word is the checksum of all before it.
    pub fn encode(&self) -> [u8; SUPERBLOCK_BYTES] {
        let geometry = &self.geometry;
        let mut page = [0u8; SUPERBLOCK_BYTES];
        put(&mut page, 0, &MAGIC);
        put_u32(&mut page, offset::VERSION, VERSION);
        put(&mut page, offset::UUID, &self.uuid);
        put_u64(&mut page, offset::CHUNK_BYTES, geometry.chunk_bytes);
        put_u32(&mut page, offset::CHUNK_COUNT, geometry.chunk_count);
        put_u32(&mut page, offset::SPILL_COUNT, geometry.spill_count);
        let journal_half_bytes = geometry.journal_half_bytes;
        put_u64(&mut page, offset::JOURNAL_HALF_BYTES, journal_half_bytes);
        put_u64(&mut page, offset::BACKING_DEV, self.backing_dev);
        put_u64(&mut page, offset::BACKING_INO, self.backing_ino);
        put_u64(&mut page, offset::CREATED_S, self.created_s as u64);
        put_path(
            &mut page,
            offset::BACKING_PATH,
            &self.backing_path,
            PATH_MAX,
        );
        put_path(
            &mut page,
            offset::SPILL_PATH,
            &self.spill_path,
            SPILL_PATH_MAX,
        );
        let checksum = crc32c::crc32c(&page[..offset::CHECKSUM]);
        put_u32(&mut page, offset::CHECKSUM, checksum);
        page
    }

    /// Returns whether the arena belongs to the backing at `path`. Of a path that is too long for the superblock, only
    /// the stored part is compared. The name of the arena's file is a hash of the whole path.
    pub fn is_for_backing(&self, path: &[u8]) -> bool {
        cut_path(&self.backing_path, PATH_MAX) == cut_path(path, PATH_MAX)
    }

    /// Decodes and checks a superblock, the first page of an arena. The version is checked before the checksum: an
    /// arena of another version is reported as such, and not as damaged.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let Some(page) = bytes.first_chunk::<SUPERBLOCK_BYTES>() else {
            return Err(FormatError::Truncated {
                what: "superblock",
                found: bytes.len() as u64,
                expected: SUPERBLOCK_BYTES as u64,
            });
        };
        if page[0..8] != MAGIC {
            return Err(FormatError::Magic);
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
                what: "superblock",
                found,
                expected,
            });
        }
        let geometry = decode_geometry(page)?;
        let backing_path = read_path(page, offset::BACKING_PATH, PATH_MAX)?;
        let spill_path = read_path(page, offset::SPILL_PATH, SPILL_PATH_MAX)?;
        Ok(Self {
            uuid: read_array(page, offset::UUID),
            geometry,
            backing_dev: read_u64(page, offset::BACKING_DEV),
            backing_ino: read_u64(page, offset::BACKING_INO),
            created_s: read_u64(page, offset::CREATED_S) as i64,
            backing_path,
            spill_path,
        })
    }
}

/// Decodes the layout of the arena from its superblock. Computes it again from the sizes, and fails if a size is not
/// possible or the stored layout differs. Only `journal_half_bytes` can differ.
fn decode_geometry(page: &[u8; SUPERBLOCK_BYTES]) -> Result<Geometry, FormatError> {
    let geometry = Geometry {
        chunk_bytes: read_u64(page, offset::CHUNK_BYTES),
        chunk_count: read_u32(page, offset::CHUNK_COUNT),
        spill_count: read_u32(page, offset::SPILL_COUNT),
        journal_half_bytes: read_u64(page, offset::JOURNAL_HALF_BYTES),
    };
    let bytes_of_chunks = |count: u32| {
        geometry
            .chunk_bytes
            .checked_mul(u64::from(count))
            .ok_or_else(|| field_error("size overflows"))
    };
    let arena_bytes = bytes_of_chunks(geometry.chunk_count)?;
    let spill_bytes = bytes_of_chunks(geometry.spill_count)?;
    if Geometry::with_spill(arena_bytes, geometry.chunk_bytes, spill_bytes)? != geometry {
        return Err(field_error("geometry does not follow from its sizes"));
    }
    Ok(geometry)
}

/// Returns the first `len_max` bytes of a path, the part that a superblock stores.
fn cut_path(path: &[u8], len_max: usize) -> &[u8] {
    &path[..path.len().min(len_max)]
}

/// Stores a path after its length, which takes 4 bytes. A path of more than `len_max` bytes is cut.
fn put_path(page: &mut [u8], offset: usize, path: &[u8], len_max: usize) {
    let stored_path = cut_path(path, len_max);
    put_u32(page, offset, stored_path.len() as u32);
    put(page, offset + 4, stored_path);
}

/// Reads a path after its length, which takes 4 bytes. Fails if it is longer than `len_max`.
fn read_path(page: &[u8], offset: usize, len_max: usize) -> Result<Vec<u8>, FormatError> {
    let len = read_u32(page, offset) as usize;
    if len > len_max {
        return Err(field_error("path longer than its field"));
    }
    Ok(page[offset + 4..][..len].to_vec())
}

/// Returns the error for a field of the superblock that is not valid.
fn field_error(why: &str) -> FormatError {
    FormatError::Field {
        what: "superblock",
        why: why.into(),
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
