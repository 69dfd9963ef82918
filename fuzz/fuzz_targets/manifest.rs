//! Manifest of a backup: any bytes are refused or read; what is read is written back with the same meaning.
#![no_main]

use arbitrary::Arbitrary;
use firn_held::backup::manifest::Manifest;
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
enum Input {
    /// Bytes as they are.
    Bytes(Vec<u8>),
    /// A payload behind a header that is right: what stands behind the checksum is tried.
    Sealed(Vec<u8>),
}

fuzz_target!(|input: Input| {
    let bytes = match input {
        Input::Bytes(bytes) => bytes,
        Input::Sealed(payload) => {
            let mut bytes = b"FIRNBKUP".to_vec();
            bytes.extend_from_slice(&1u32.to_le_bytes());
            bytes.extend_from_slice(&crc32c::crc32c(&payload).to_le_bytes());
            bytes.extend_from_slice(&(payload.len() as u64).to_le_bytes());
            bytes.extend_from_slice(&payload);
            bytes
        }
    };
    if let Ok(manifest) = Manifest::decode(&bytes) {
        assert_eq!(Manifest::decode(&manifest.encode()), Ok(manifest));
    }
});
