//! The writes of one checkpoint, after table I of the CRFS paper.
//!
//! The table counts the writes of LU.C.64 under BLCR: 8 processes a host, 23 MB and about 975 writes
//! each. It gives, per class of size, the share of writes and the share of bytes. An image of another
//! size here has the same two shares, so its number of writes is proportional to its bytes.

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

/// Share of writes in percent, share of bytes in percent, smallest and largest size in bytes.
const TABLE: [(f64, f64, u64, u64); 10] = [
    (50.86, 0.04, 1, 64),
    (0.61, 0.00, 64, 256),
    (0.25, 0.01, 256, 1 << 10),
    (9.46, 1.53, 1 << 10, 4 << 10),
    (36.49, 11.36, 4 << 10, 16 << 10),
    (0.74, 0.77, 16 << 10, 64 << 10),
    (0.49, 3.79, 64 << 10, 256 << 10),
    (0.25, 3.58, 256 << 10, 512 << 10),
    (0.61, 17.72, 512 << 10, 1 << 20),
    (0.25, 61.21, 1 << 20, u64::MAX),
];
const TABLE_IMAGE_BYTES: f64 = 23e6;
const TABLE_WRITES: f64 = 975.0;

/// Sizes of the writes of one image, in the order they are made; they add up to `image_bytes`. The same
/// seed gives the same sizes.
pub fn of_image(image_bytes: u64, seed: u64) -> Vec<u64> {
    let mut rng = StdRng::seed_from_u64(seed);
    let writes = TABLE_WRITES * image_bytes as f64 / TABLE_IMAGE_BYTES;
    let mut sizes = Vec::new();
    for (writes_share, bytes_share, min, max) in TABLE {
        // No class disappears from a small image: the largest one holds most of the bytes.
        let count = (writes * writes_share / 100.0).round().max(1.0);
        let mean = image_bytes as f64 * bytes_share / 100.0 / count;
        for _ in 0..count as u64 {
            let size = mean * rng.random_range(0.75..1.25);
            sizes.push((size as u64).clamp(min, max - 1));
        }
    }
    settle(&mut sizes, image_bytes);
    sizes.shuffle(&mut rng);
    sizes
}

/// Makes the largest write take up what rounding left over or used too much.
fn settle(sizes: &mut [u64], image_bytes: u64) {
    let total: u64 = sizes.iter().sum();
    let largest = sizes.iter_mut().max().expect("the table has classes");
    *largest = (*largest + image_bytes).saturating_sub(total).max(1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sizes_add_up_to_the_image() {
        for image_bytes in [7_000_000, 15_000_000, 23_000_000, 107_000_000] {
            for seed in 0..20 {
                assert_eq!(of_image(image_bytes, seed).iter().sum::<u64>(), image_bytes);
            }
        }
    }

    #[test]
    fn the_shares_of_the_table_come_out_again() {
        let sizes = of_image(23_000_000, 1);
        let share = |min: u64, max: u64| {
            let class = sizes.iter().filter(|s| (min..max).contains(*s)).count();
            100.0 * class as f64 / sizes.len() as f64
        };
        assert!((970..985).contains(&sizes.len()), "{} writes", sizes.len());
        assert!((share(1, 64) - 50.86).abs() < 2.0, "{}", share(1, 64));
        assert!((share(4 << 10, 16 << 10) - 36.49).abs() < 2.0);
        let large: u64 = sizes.iter().filter(|s| **s > 1 << 20).sum();
        assert!((large as f64 / 23e6 - 0.6121).abs() < 0.06, "{large}");
    }
}
