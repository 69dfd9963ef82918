//! Piece records: what passes the check lies within its slab and its file, and is what was sealed.
#![no_main]

use arbitrary::Arbitrary;
use firn_format::piece::{
    CheckedPiece, FILE_MAX, FROZEN, Piece, RawPiece, SEQUENCE_MAX, dead_seal,
};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Input {
    words: (u64, u64, u64),
    position: u32,
    /// `None`: the right seal for `len`.
    seal: Option<u64>,
    len: u32,
    generation: u64,
    slab: (u32, u32),
}

fuzz_target!(|input: Input| {
    let file = input.words.0 & FILE_MAX;
    let offset = input.words.1;
    let sequence = input.words.2 & SEQUENCE_MAX;
    let piece = Piece {
        file,
        offset,
        sequence,
        position: input.position,
        len: input.len,
    };
    let seal = input.seal.unwrap_or_else(|| piece.seal(input.generation));
    let raw = RawPiece {
        seal,
        ..piece.to_raw(input.generation)
    };
    let is_dead = seal == dead_seal(input.generation);
    let start = u64::from(input.slab.0);
    let end = u64::from(input.slab.1);
    let fits = piece.len > 0
        && u64::from(piece.len) < FROZEN
        && u64::from(piece.position) >= start
        && u64::from(piece.position) + u64::from(piece.len) <= end
        && piece.offset <= i64::MAX as u64 - u64::from(piece.len);
    match raw.check(input.generation, start, end) {
        Ok(CheckedPiece::Live(found)) => {
            assert!(!is_dead);
            assert_eq!(found.seal(input.generation), seal & !FROZEN);
            assert!(u64::from(found.position) >= start);
            assert!(u64::from(found.position) + u64::from(found.len) <= end);
            assert!(found.offset + u64::from(found.len) <= i64::MAX as u64);
            assert!(input.seal.is_some() || (fits && found == piece));
        }
        Ok(CheckedPiece::Dead) => assert!(is_dead),
        Err(_) => assert!(
            input.seal.is_some() || !fits,
            "a sealed piece that fits its slab is refused"
        ),
    }
});
