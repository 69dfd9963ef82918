//! Journal frames: what was framed is found in its place and nowhere else; arbitrary bytes are no frame
//! or lie within the bytes given.
#![no_main]

use arbitrary::Arbitrary;
use firn_format::journal::{decode_frame, encode_frame, frame_bytes, peek_frame};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Input {
    generation: u64,
    sequence: u64,
    payload: Vec<u8>,
    before: Vec<u8>,
    after: Vec<u8>,
    bytes: Vec<u8>,
}

fuzz_target!(|input: Input| {
    let Input {
        generation,
        sequence,
        payload,
        before,
        after,
        bytes,
    } = input;
    if let Some((found, payload)) = peek_frame(generation, &bytes) {
        let mut again = Vec::new();
        encode_frame(generation, found, payload, &mut again);
        assert_eq!(decode_frame(generation, found, &again), Some(payload));
        let same = again.len().min(bytes.len());
        assert_eq!(
            again[..16 + payload.len()],
            bytes[..same.min(16 + payload.len())]
        );
    }

    let mut out = before.clone();
    encode_frame(generation, sequence, &payload, &mut out);
    assert_eq!(out[..before.len()], before);
    assert_eq!(out.len() - before.len(), frame_bytes(payload.len()));
    out.extend_from_slice(&after);
    let frame = &out[before.len()..];
    // A frame without a payload would look like the zeros of a fresh region, so it counts as none.
    let expected = (!payload.is_empty()).then_some(payload.as_slice());
    assert_eq!(decode_frame(generation, sequence, frame), expected);
    assert_eq!(
        decode_frame(generation, sequence.wrapping_add(1), frame),
        None
    );
    assert_eq!(
        decode_frame(generation.wrapping_add(1), sequence, frame),
        None
    );
});
