//! `head` and `base`: the first files of a container. The one is whole before the container has its name, the other before
//! anybody writes to it.
//!
//! ```text
//! 0   "FIRNHEAD"
//! 8   u32   version
//! 12  u32   CRC32C of the body
//! 16  body, as postcard writes a `Body`: inode number, birth, generation, whether it is the first
//! ```

use firn_backing::{Backing, Errno};
use firn_rendezvous::own;
use serde::{Deserialize, Serialize};

use crate::file_id::FileId;
use crate::names::Writer;
use crate::run::FILE_BYTES_MAX;

const MAGIC: [u8; 8] = *b"FIRNHEAD";
const HEADER_BYTES: usize = 16;
/// What containers are made and read with.
pub const VERSION: u32 = 1;

/// What a container says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    pub(crate) file: FileId,
    pub(crate) generation: u32,
    /// It lies over the plain file; later ones lie over the one before.
    pub(crate) is_lowest: bool,
}

/// In a container.
pub(crate) const HEAD: &str = "head";
/// Put once: bytes of the plain file that count below the first generation.
pub(crate) const BASE: &str = "base";

/// Why a container cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeadError {
    /// The file is not there.
    #[error("it is missing: the container is half made or half removed")]
    Missing,
    /// It is not as it was written.
    #[error("it is damaged")]
    Damaged,
    /// Another Firn made it.
    #[error(
        "it has version {0} and this Firn reads {VERSION}: flatten it with the Firn that wrote it"
    )]
    Version(u32),
    /// It was renamed, or its file is another one.
    #[error(
        "it says that it is of another file: give the container its own name back, or move it away"
    )]
    Foreign,
}

#[derive(Serialize, Deserialize)]
struct Body {
    ino: u64,
    birth: u64,
    generation: u32,
    is_lowest: bool,
}

impl Head {
    /// That of the container that has a name of this file and generation: the first generation lies over the plain file.
    pub(crate) fn first(file: FileId, generation: u32) -> Self {
        Self {
            file,
            generation,
            is_lowest: generation == 0,
        }
    }

    /// Its bytes.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let body = Body {
            ino: self.file.ino,
            birth: self.file.birth,
            generation: self.generation,
            is_lowest: self.is_lowest,
        };
        let body = postcard::to_allocvec(&body).expect("memory is all that it takes");
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&crc32c::crc32c(&body).to_le_bytes());
        bytes.extend_from_slice(&body);
        bytes
    }

    /// Reads the head of a container.
    pub fn decode(bytes: &[u8]) -> Result<Self, HeadError> {
        let (header, body) = bytes
            .split_at_checked(HEADER_BYTES)
            .ok_or(HeadError::Damaged)?;
        let word =
            |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
        if header[..8] != MAGIC {
            return Err(HeadError::Damaged);
        }
        if word(8) != VERSION {
            return Err(HeadError::Version(word(8)));
        }
        if crc32c::crc32c(body) != word(12) {
            return Err(HeadError::Damaged);
        }
        let (body, rest) =
            postcard::take_from_bytes::<Body>(body).map_err(|_| HeadError::Damaged)?;
        if !rest.is_empty() {
            return Err(HeadError::Damaged);
        }
        Ok(Self {
            file: FileId {
                ino: body.ino,
                birth: body.birth,
            },
            generation: body.generation,
            is_lowest: body.is_lowest,
        })
    }

    /// The head of the container that has a name of this file and generation.
    pub(crate) fn of(
        bytes: Option<&[u8]>,
        file: FileId,
        generation: u32,
    ) -> Result<Self, HeadError> {
        let head = Self::decode(bytes.ok_or(HeadError::Missing)?)?;
        match (head.file, head.generation) == (file, generation) {
            true => Ok(head),
            false => Err(HeadError::Foreign),
        }
    }
}

/// Bytes of `base`: how many bytes of the plain file count below the first generation, and their CRC32C.
pub(crate) fn encode_base(base: u64) -> Vec<u8> {
    let mut bytes = base.to_le_bytes().to_vec();
    bytes.extend_from_slice(&crc32c::crc32c(&bytes).to_le_bytes());
    bytes
}

/// What they say.
pub(crate) fn decode_base(bytes: &[u8]) -> Result<u64, HeadError> {
    let (base, _) = bytes.split_first_chunk().ok_or(HeadError::Damaged)?;
    let base = u64::from_le_bytes(*base);
    match base <= FILE_BYTES_MAX && encode_base(base) == bytes {
        true => Ok(base),
        false => Err(HeadError::Damaged),
    }
}

/// The same of a container; none if nobody has written to it.
pub(crate) fn load_base<B: Backing>(
    base: &B,
    dir: &B::Inode,
) -> Result<Result<Option<u64>, HeadError>, Errno> {
    if let Some(bytes) = own::load(base, dir, BASE)? {
        return Ok(decode_base(&bytes).map(Some));
    }
    if !has_index(base, dir)? {
        return Ok(Ok(None));
    }
    // Put since it was looked for.
    Ok(match own::load(base, dir, BASE)? {
        Some(bytes) => decode_base(&bytes).map(Some),
        None => Err(HeadError::Missing),
    })
}

/// Whether somebody has written to a container, which may be gone.
fn has_index<B: Backing>(base: &B, dir: &B::Inode) -> Result<bool, Errno> {
    match own::list(base, dir) {
        Ok(names) => Ok(names
            .iter()
            .any(|(name, ..)| Writer::of_index(name).is_some())),
        Err(Errno::NOENT | Errno::STALE) => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_read_as_it_was_written_and_no_other() {
        let file = FileId { ino: 7, birth: 9 };
        let head = Head {
            file,
            generation: 3,
            is_lowest: true,
        };
        let bytes = head.encode();
        assert_eq!(Head::of(Some(&bytes), file, 3), Ok(head));
        assert_eq!(Head::of(None, file, 3), Err(HeadError::Missing));
        assert_eq!(Head::of(Some(&bytes), file, 4), Err(HeadError::Foreign));
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Head::decode(&bad).is_err(), "bit {bit}");
        }
        let mut later = bytes.clone();
        later[8] = 2;
        assert_eq!(Head::decode(&later), Err(HeadError::Version(2)));
        assert_eq!(Head::decode(&bytes[..10]), Err(HeadError::Damaged));
    }
}
