//! Bytes that lie in a file of their own: a header, and a payload that its reader parses.
//!
//! ```text
//! 0   8 bytes   magic
//! 8   u32       version
//! 12  u32       CRC32C of the payload
//! 16  u64       length of the payload
//! 24            payload
//! ```

const HEADER_BYTES: usize = 24;

/// Why bytes are not sealed as they should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// The first bytes are others.
    #[error("not a record of this kind (the magic number is missing)")]
    Magic,
    /// Made by another version.
    #[error("record version {found}, this firn reads version {wanted}")]
    Version {
        /// In the file.
        found: u32,
        /// That this firn reads.
        wanted: u32,
    },
    /// Cut off or changed.
    #[error("the record is damaged")]
    Damaged,
}

/// A payload behind its header.
pub fn seal(magic: &[u8; 8], version: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
    bytes.extend_from_slice(magic);
    bytes.extend_from_slice(&version.to_le_bytes());
    bytes.extend_from_slice(&crc32c::crc32c(payload).to_le_bytes());
    bytes.extend_from_slice(&(payload.len() as u64).to_le_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

/// The payload, if the header is right.
pub fn unseal<'a>(magic: &[u8; 8], wanted: u32, bytes: &'a [u8]) -> Result<&'a [u8], SealError> {
    let (header, payload) = bytes.split_at_checked(HEADER_BYTES).ok_or(SealError::Damaged)?;
    if &header[..8] != magic {
        return Err(SealError::Magic);
    }
    let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
    if word(8) != wanted {
        return Err(SealError::Version { found: word(8), wanted });
    }
    let len = u64::from_le_bytes(header[16..24].try_into().expect("eight bytes"));
    if len != payload.len() as u64 || word(12) != crc32c::crc32c(payload) {
        return Err(SealError::Damaged);
    }
    Ok(payload)
}
