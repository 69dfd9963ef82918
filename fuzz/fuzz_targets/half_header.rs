//! Half headers: what was written is read; what is read differs from what would be written in nothing
//! but bytes behind the header.
#![no_main]

use firn_format::journal::{HALF_HEADER_BYTES, decode_half_header, encode_half_header};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u64, Vec<u8>, Option<(u8, u8)>)| {
    let (generation, bytes, damage) = input;
    if let Some(found) = decode_half_header(&bytes) {
        assert_eq!(decode_half_header(&encode_half_header(found)), Some(found));
    }

    let mut header = encode_half_header(generation);
    assert_eq!(decode_half_header(&header), Some(generation));
    if let Some((at, bits)) = damage {
        header[usize::from(at) % HALF_HEADER_BYTES] ^= bits;
        assert_eq!(
            decode_half_header(&header),
            (bits == 0).then_some(generation)
        );
    }
});
