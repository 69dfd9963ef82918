//! The shared file: each writer writes its own stripes, with bytes that identify the writer.

use std::collections::BTreeMap;

use rand::RngExt;

use super::WRITERS;

pub const NAME: &str = "shared";
/// Not a multiple or a divisor of the page size, so that writers meet in pages, pieces and runs.
const STRIPE_BYTES: usize = 1700;
const STRIPES: usize = 120;

/// Returns a byte that identifies a writer. The byte is never 0, because holes are 0.
pub fn byte(writer: usize, version: u8) -> u8 {
    (writer as u8 + 1) << 5 | (version & 0x1f)
}

/// Returns whether `writer` may have written this byte; a hole is accepted too.
pub fn is_byte_of(writer: usize, byte: u8) -> bool {
    byte == 0 || usize::from(byte >> 5) == writer + 1
}

pub fn data(writer: usize, version: u8, len: usize) -> Vec<u8> {
    (0..len)
        .map(|index| byte(writer, version.wrapping_add(index as u8 / 5)))
        .collect()
}

/// Returns whether the owner of the stripe at `offset` of the shared file may have written this byte.
pub fn is_byte_of_owner(offset: usize, byte: u8) -> bool {
    is_byte_of(offset / STRIPE_BYTES % WRITERS, byte)
}

/// The bytes that one writer wrote, by stripe.
#[derive(Default)]
pub struct Stripes(BTreeMap<usize, Vec<u8>>);

impl Stripes {
    /// Chooses a part of a stripe of `writer`. Returns its offset in the file and its length.
    pub fn choose(writer: usize, rng: &mut impl RngExt) -> (usize, usize) {
        let stripe = rng.random_range(0..STRIPES / WRITERS) * WRITERS + writer;
        let start = rng.random_range(0..STRIPE_BYTES);
        let len = if rng.random_bool(0.5) {
            STRIPE_BYTES - start
        } else {
            1 + rng.random_range(0..STRIPE_BYTES - start)
        };
        (stripe * STRIPE_BYTES + start, len)
    }

    pub fn write(&mut self, offset: usize, data: &[u8]) {
        let contents = self
            .0
            .entry(offset / STRIPE_BYTES)
            .or_insert_with(|| vec![0; STRIPE_BYTES]);
        contents[offset % STRIPE_BYTES..][..data.len()].copy_from_slice(data);
    }

    pub fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        let contents = self.0.get(&(offset / STRIPE_BYTES));
        contents.map_or_else(
            || vec![0; len],
            |c| c[offset % STRIPE_BYTES..][..len].to_vec(),
        )
    }
}

/// Returns the shared file that results from the stripes of all writers.
pub fn merge<'a>(all: impl Iterator<Item = &'a Stripes>) -> BTreeMap<String, Vec<u8>> {
    let mut contents = vec![0; STRIPES * STRIPE_BYTES];
    let mut end = 0;
    for (stripe, written) in all.flat_map(|stripes| &stripes.0) {
        let start = stripe * STRIPE_BYTES;
        contents[start..start + STRIPE_BYTES].copy_from_slice(written);
        // No writer writes a byte 0, so the last other byte of the stripe ends the written part.
        end = end.max(
            start
                + written
                    .iter()
                    .rposition(|byte| *byte != 0)
                    .map_or(0, |last| last + 1),
        );
    }
    contents.truncate(end);
    BTreeMap::from([(NAME.to_owned(), contents)])
}
