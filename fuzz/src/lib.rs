//! Inputs that several targets share.

use arbitrary::Arbitrary;
use firn_format::sealed::Seal;

/// Bytes for the parser of a sealed structure.
#[derive(Arbitrary, Debug)]
pub enum Input {
    /// Bytes as they are.
    Bytes(Vec<u8>),
    /// A payload behind a header that is right: what stands behind the checksum is tried.
    Sealed(Vec<u8>),
}

impl Input {
    /// The bytes to parse.
    pub fn bytes(self, seal: &Seal) -> Vec<u8> {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Sealed(payload) => seal.seal(&payload),
        }
    }
}
