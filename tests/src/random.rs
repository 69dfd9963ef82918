//! Seeds and reproducible bytes.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// The seed of this run: `FIRN_SEED` if set, else a new one. It is printed so that a failure can be
/// repeated with `FIRN_SEED=<seed>`.
pub fn seed(test: &str) -> u64 {
    let seed = match std::env::var("FIRN_SEED") {
        Ok(text) => text.parse().expect("FIRN_SEED must be a whole number"),
        Err(_) => rand::rng().random(),
    };
    println!("{test}: repeat with FIRN_SEED={seed}");
    seed
}

/// A generator for `seed`.
pub fn generator(seed: u64) -> StdRng {
    StdRng::seed_from_u64(seed)
}

/// A whole number from the environment, for the lengths of campaigns.
pub fn env_count(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{name} must be a whole number")),
        Err(_) => default,
    }
}

/// Fills `buf` with bytes that depend on `key` and the position only, and are never zero (so that a
/// hole cannot pass for data).
pub fn fill(key: u64, buf: &mut [u8]) {
    let mut state = key.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for eight in buf.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let nonzero = state | 0x0101_0101_0101_0101;
        eight.copy_from_slice(&nonzero.to_le_bytes()[..eight.len()]);
    }
}

/// [`fill`] into a new buffer.
pub fn bytes(key: u64, len: usize) -> Vec<u8> {
    let mut buf = vec![0; len];
    fill(key, &mut buf);
    buf
}
