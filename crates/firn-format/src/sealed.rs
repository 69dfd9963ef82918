//! Sealed files: small files with a header of magic number, version and checksum before their *payload*. Messages call
//! such a file a record.
//!
//! A reader learns from the header that a file is of another kind or version, or that it was cut off or changed. The
//! reader then parses the payload itself.
//!
//! ```text
//! 0   8 bytes   magic
//! 8   u32       version
//! 12  u32       CRC32C of the payload
//! 16  u64       length of the payload
//! 24            payload
//! ```

/// Length of the header in bytes.
const HEADER_BYTES: usize = 24;

/// Why sealed bytes are not valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// The magic number is missing.
    #[error("not a record of this kind (the magic number is missing)")]
    Magic,
    /// Another version of Firn made the file.
    #[error("record version {found}, this firn reads version {wanted}")]
    Version {
        /// Version in the file.
        found: u32,
        /// Version that this Firn reads.
        wanted: u32,
    },
    /// The file was cut off or changed.
    #[error("the record is damaged")]
    Damaged,
}

/// The magic number and version of one kind of sealed file.
#[derive(Clone, Copy, Debug)]
pub struct Seal {
    /// First bytes of the file.
    pub magic: [u8; 8],
    /// Version, raised when the payload changes.
    pub version: u32,
}

impl Seal {
    /// Returns the header followed by `payload`.
    pub fn seal(&self, payload: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
        bytes.extend_from_slice(&self.magic);
        bytes.extend_from_slice(&self.version.to_le_bytes());
        bytes.extend_from_slice(&crc32c::crc32c(payload).to_le_bytes());
        bytes.extend_from_slice(&(payload.len() as u64).to_le_bytes());
        bytes.extend_from_slice(payload);
        bytes
    }

    /// Checks the header of a sealed file, and returns the payload after it. `bytes` is the whole file. Fails if the
    /// magic number, the version, the length or the checksum is not as expected.
    pub fn unseal<'a>(&self, bytes: &'a [u8]) -> Result<&'a [u8], SealError> {
        let (header, payload) = bytes
            .split_at_checked(HEADER_BYTES)
            .ok_or(SealError::Damaged)?;
        if header[..8] != self.magic {
            return Err(SealError::Magic);
        }
        let version = u32::from_le_bytes(header[8..12].try_into().expect("four bytes"));
        let checksum = u32::from_le_bytes(header[12..16].try_into().expect("four bytes"));
        let len = u64::from_le_bytes(header[16..24].try_into().expect("eight bytes"));
        if version != self.version {
            return Err(SealError::Version {
                found: version,
                wanted: self.version,
            });
        }
        if len != payload.len() as u64 || checksum != crc32c::crc32c(payload) {
            return Err(SealError::Damaged);
        }
        Ok(payload)
    }
}
