//! The head of a container (a directory with logs of one file): its version, its file and what lies below it. A file
//! has one container for each generation. The head exists before the first write.
//!
//! The head is a symbolic link, `head`, with the text below. One call makes the link with all of its text, and fails if
//! another host was faster. A link has no data that must be synced before it counts. So making a container waits for no
//! device.
//!
//! ```text
//! firn-log-5 INO-BIRTH-GENERATION BASE CRC
//!
//! INO-BIRTH-GENERATION   name of the container
//! BASE                   bytes of the plain file that count below it; - if it lies over another generation
//! CRC                    CRC32C of the text before it
//! ```

use std::ffi::OsStr;

use firn_backing::{Access, Backing, Errno};
use firn_hosts::OwnError;
use firn_hosts::own::{self, own_caller};

use crate::file_id::FileId;
use crate::frame::{Change, Frame};
use crate::index_reader::find_frame;
use crate::lag::is_gone;
use crate::names::Writer;
use crate::run::FILE_BYTES_MAX;
use crate::seal::{CLOSING, SEAL_NAME};

/// Text before the version.
const MAGIC: &str = "firn-log-";
/// Version of the containers that this Firn makes and reads.
pub const VERSION: u32 = 5;
/// Version of the containers whose head was a regular file.
const VERSION_OF_FILES: u32 = 1;

/// The contents of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    pub(crate) file: FileId,
    pub(crate) generation: u32,
    /// Number of bytes of the plain file that count below the first generation. `None` for later generations, which lie
    /// over an earlier one.
    pub(crate) plain_bytes: Option<u64>,
}

/// Name of the head in a container.
pub(crate) const HEAD: &str = "head";

/// Why a container cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeadError {
    /// The head is missing, although the container was synced.
    #[error("it is missing: the directory of these logs is half removed")]
    Missing,
    /// The text of the head is damaged.
    #[error("it is damaged")]
    Damaged,
    /// Another version of Firn made the container.
    #[error(
        "it has version {0} and this Firn reads {VERSION}: run `firn flatten` of the Firn that wrote it"
    )]
    Version(u32),
    /// The head names another container: this one was renamed, or copied with its file.
    #[error(
        "this directory of logs was renamed: rename it back to the name in its head, or move it away"
    )]
    Foreign,
}

impl Head {
    /// Makes the head of a container. `plain_bytes` of the plain file count below the first generation.
    pub(crate) fn new(file: FileId, generation: u32, plain_bytes: u64) -> Self {
        Self {
            file,
            generation,
            plain_bytes: (generation == 0).then_some(plain_bytes),
        }
    }

    /// Returns the text of the link.
    pub(crate) fn encode(&self) -> String {
        let name = self.file.container_name(self.generation);
        let plain_bytes = self
            .plain_bytes
            .map_or_else(|| "-".to_owned(), |bytes| bytes.to_string());
        let text = format!("{MAGIC}{VERSION} {name} {plain_bytes}");
        let checksum = crc32c::crc32c(text.as_bytes());
        format!("{text} {checksum:08x}")
    }

    /// Decodes a head from the text of its link. Fails if the text is damaged, or if its version is not this one.
    pub fn decode(text: &[u8]) -> Result<Self, HeadError> {
        let text = std::str::from_utf8(text).map_err(|_| HeadError::Damaged)?;
        let mut fields = text
            .strip_prefix(MAGIC)
            .ok_or(HeadError::Damaged)?
            .split(' ');
        let mut field = || fields.next().ok_or(HeadError::Damaged);
        let version = field()?.parse().map_err(|_| HeadError::Damaged)?;
        if version != VERSION {
            return Err(HeadError::Version(version));
        }
        let name = field()?;
        let plain_bytes = match field()? {
            "-" => None,
            bytes => Some(bytes.parse().map_err(|_| HeadError::Damaged)?),
        };
        let (file, generation) =
            FileId::parse_container_name(name.as_bytes()).ok_or(HeadError::Damaged)?;
        let head = Self {
            file,
            generation,
            plain_bytes,
        };
        // Only generation 0 lies over the plain file.
        let has_right_field = plain_bytes.is_some() == (generation == 0);
        let is_valid =
            has_right_field && plain_bytes <= Some(FILE_BYTES_MAX) && head.encode() == text;
        is_valid.then_some(head).ok_or(HeadError::Damaged)
    }

    /// Decodes the text of a link, and checks that it names this file and generation.
    pub(crate) fn decode_for(
        text: &[u8],
        file: FileId,
        generation: u32,
    ) -> Result<Self, HeadError> {
        let head = Self::decode(text)?;
        if (head.file, head.generation) == (file, generation) {
            Ok(head)
        } else {
            Err(HeadError::Foreign)
        }
    }

    /// Puts the head into a container. Does nothing if another host has put one.
    pub(crate) fn publish<B: Backing>(&self, backing: &B, dir: &B::Inode) -> Result<(), Errno> {
        let text = self.encode();
        let created = backing.symlink(&own_caller(), dir, OsStr::new(HEAD), OsStr::new(&text));
        match created {
            Ok(_) | Err(Errno::EXIST) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// The state of a container's head.
pub(crate) enum HeadState {
    /// The container has a valid head.
    Valid(Head),
    /// The container has no head yet. No bytes in it were synced.
    BeingMade,
    /// The head cannot be used.
    Unusable(HeadError),
}

impl From<Result<Head, HeadError>> for HeadState {
    fn from(decoded: Result<Head, HeadError>) -> Self {
        match decoded {
            Ok(head) => Self::Valid(head),
            Err(error) => Self::Unusable(error),
        }
    }
}

/// Reads the head of a container. Fails only if the backing fails or the object is not trusted.
///
/// The first sync of bytes in a container also makes its name and its head durable. So a power loss takes the head only
/// from a container without synced bytes, which counts as being made. If a container was synced and has no head, the
/// head is unusable ([`HeadError::Missing`]).
pub(crate) fn load<B: Backing>(
    backing: &B,
    dir: &B::Inode,
    file: FileId,
    generation: u32,
) -> Result<HeadState, OwnError> {
    let read_head = || -> Result<Option<Result<Head, HeadError>>, OwnError> {
        match own::read_link(backing, dir, HEAD) {
            Ok(text) => Ok(text.map(|text| Head::decode_for(&text, file, generation))),
            // A regular file is not trusted as a link: it is the head of an earlier version.
            Err(OwnError::Distrusted { .. }) if own::find_file(backing, dir, HEAD)?.is_some() => {
                Ok(Some(Err(HeadError::Version(VERSION_OF_FILES))))
            }
            Err(error) => Err(error),
        }
    };
    if let Some(decoded) = read_head()? {
        return Ok(decoded.into());
    }
    if !was_synced(backing, dir)? {
        return Ok(HeadState::BeingMade);
    }
    // The head may have been put after the first read, before the sync that was found.
    match read_head()? {
        Some(decoded) => Ok(decoded.into()),
        None => Ok(HeadState::Unusable(HeadError::Missing)),
    }
}

/// Returns whether a container has an index. False if the container is removed.
pub(crate) fn has_index<B: Backing>(backing: &B, dir: &B::Inode) -> Result<bool, Errno> {
    let names = list(backing, dir)?;
    Ok(names
        .iter()
        .any(|name| Writer::from_index_name(name).is_some()))
}

/// Lists the names in a container. Empty if the container is removed.
fn list<B: Backing>(backing: &B, dir: &B::Inode) -> Result<Vec<Vec<u8>>, Errno> {
    match own::list(backing, dir) {
        Ok(names) => Ok(names.into_iter().map(|(name, ..)| name).collect()),
        Err(error) if is_gone(error) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Returns whether a container was synced: it is closing or sealed, or an index (list of a host's changes) has an entry
/// that notes a sync.
fn was_synced<B: Backing>(backing: &B, dir: &B::Inode) -> Result<bool, OwnError> {
    let names = list(backing, dir)?;
    let is_ending = names
        .iter()
        .any(|name| *name == CLOSING.as_bytes() || *name == SEAL_NAME.as_bytes());
    if is_ending {
        return Ok(true);
    }
    for name in &names {
        let Some(writer) = Writer::from_index_name(name) else {
            continue;
        };
        let Some(inode) = own::find_file(backing, dir, &writer.index_name())? else {
            continue;
        };
        let index = backing.open(&inode, Access::Read)?;
        let is_sync_note = |frame: &Frame| frame.change == Change::Synced;
        if find_frame(backing, &index, 0, &is_sync_note)?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_read_as_it_was_written_and_no_other() {
        let file = FileId { ino: 7, birth: 9 };
        for (generation, plain_bytes) in [(0, 0), (0, 4711), (3, 4711)] {
            let head = Head::new(file, generation, plain_bytes);
            let text = head.encode().into_bytes();
            assert_eq!(Head::decode_for(&text, file, generation), Ok(head));
            assert_eq!(Head::decode_for(&text, file, 4), Err(HeadError::Foreign));
            for bit in 0..text.len() * 8 {
                let mut bad = text.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                assert!(Head::decode(&bad).is_err(), "bit {bit}");
            }
            for len in 0..text.len() {
                assert!(Head::decode(&text[..len]).is_err(), "{len} bytes");
            }
            let mut later = text.clone();
            for other in [VERSION - 1, VERSION + 1] {
                later[MAGIC.len()] = b'0' + other as u8;
                let expected = HeadError::Version(other);
                assert_eq!(Head::decode(&later), Err(expected));
            }
        }
    }
}
