//! Superblock: any page is refused or read; what is read is written back with the same meaning.
#![no_main]

use arbitrary::Arbitrary;
use firn_format::geometry::Geometry;
use firn_format::superblock::{MAGIC, PATH_MAX, SUPERBLOCK_BYTES, Superblock, VERSION};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
enum Input {
    /// A page as it is.
    Bytes(Vec<u8>),
    /// A page of this version whose checksum is right: what stands behind the checksum is tried.
    Sealed(Vec<u8>),
    /// A superblock.
    Value {
        uuid: [u8; 16],
        arena_bytes: u64,
        chunk_shift: u8,
        backing: (u64, u64),
        created_s: i64,
        path: Vec<u8>,
        path_repeat: u16,
    },
}

fuzz_target!(|input: Input| match input {
    Input::Bytes(bytes) => survives(&bytes),
    Input::Sealed(bytes) => survives(&sealed(&bytes)),
    Input::Value {
        uuid,
        arena_bytes,
        chunk_shift,
        backing,
        created_s,
        path,
        path_repeat,
    } => {
        let Ok(geometry) = Geometry::new(arena_bytes, 1 << (chunk_shift % 64)) else {
            return;
        };
        let mut backing_path = path.repeat(usize::from(path_repeat % 512));
        backing_path.truncate(2 * PATH_MAX);
        let (backing_dev, backing_ino) = backing;
        let spill_path = Vec::new();
        let mut value = Superblock {
            uuid,
            geometry,
            backing_dev,
            backing_ino,
            created_s,
            backing_path,
            spill_path,
        };
        let page = value.encode();
        value.backing_path.truncate(PATH_MAX);
        assert_eq!(Superblock::decode(&page), Ok(value));
    }
});

fn survives(bytes: &[u8]) {
    if let Ok(value) = Superblock::decode(bytes) {
        let geometry = value.geometry;
        assert!(geometry.file_bytes() - geometry.data_offset() == geometry.data_bytes());
        assert_eq!(Superblock::decode(&value.encode()), Ok(value));
    }
}

fn sealed(bytes: &[u8]) -> [u8; SUPERBLOCK_BYTES] {
    const CRC_AT: usize = SUPERBLOCK_BYTES - 4;
    const FIELDS_AT: usize = 16;
    let mut page = [0; SUPERBLOCK_BYTES];
    page[..8].copy_from_slice(&MAGIC);
    page[8..12].copy_from_slice(&VERSION.to_le_bytes());
    let len = bytes.len().min(CRC_AT - FIELDS_AT);
    page[FIELDS_AT..FIELDS_AT + len].copy_from_slice(&bytes[..len]);
    let crc = crc32c::crc32c(&page[..CRC_AT]);
    page[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
    page
}
