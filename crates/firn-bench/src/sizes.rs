//! Generates the sizes of the writes of one checkpoint, according to table I of the CRFS paper.
//!
//! The table counts the writes of LU.C.64 under BLCR: 8 processes on each host, and for each process 23 MB in about
//! 975 writes. For each class of write sizes it gives the share of writes and the share of bytes. An image of another
//! size gets the same shares, so its number of writes is proportional to its bytes.

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

/// A class of write sizes of the table.
struct SizeClass {
    /// Share of the writes in percent.
    writes_percent: f64,
    /// Share of the bytes in percent.
    bytes_percent: f64,
    /// Smallest size in bytes.
    min: u64,
    /// First size in bytes that is too large for the class.
    end: u64,
}

/// Makes one line of the table.
const fn class(writes_percent: f64, bytes_percent: f64, min: u64, end: u64) -> SizeClass {
    SizeClass {
        writes_percent,
        bytes_percent,
        min,
        end,
    }
}

const TABLE: [SizeClass; 10] = [
    class(50.86, 0.04, 1, 64),
    class(0.61, 0.00, 64, 256),
    class(0.25, 0.01, 256, 1 << 10),
    class(9.46, 1.53, 1 << 10, 4 << 10),
    class(36.49, 11.36, 4 << 10, 16 << 10),
    class(0.74, 0.77, 16 << 10, 64 << 10),
    class(0.49, 3.79, 64 << 10, 256 << 10),
    class(0.25, 3.58, 256 << 10, 512 << 10),
    class(0.61, 17.72, 512 << 10, 1 << 20),
    class(0.25, 61.21, 1 << 20, u64::MAX),
];
/// Bytes of one image of the table.
const TABLE_IMAGE_BYTES: f64 = 23e6;
/// Number of writes of one image of the table.
const TABLE_WRITES: f64 = 975.0;

/// Returns the sizes of the writes of one image, in the order in which they are made. Their sum is `image_bytes`. The
/// same seed gives the same sizes.
pub fn of_image(image_bytes: u64, seed: u64) -> Vec<u64> {
    let mut rng = StdRng::seed_from_u64(seed);
    let writes = TABLE_WRITES * image_bytes as f64 / TABLE_IMAGE_BYTES;
    let mut sizes = Vec::new();
    for class in TABLE {
        // Each class has at least one write, also in a small image, because the class of the largest writes has most
        // of the bytes.
        let count = (writes * class.writes_percent / 100.0).round().max(1.0);
        let mean = image_bytes as f64 * class.bytes_percent / 100.0 / count;
        for _ in 0..count as u64 {
            let size = mean * rng.random_range(0.75..1.25);
            sizes.push((size as u64).clamp(class.min, class.end - 1));
        }
    }
    correct_sum(&mut sizes, image_bytes);
    sizes.shuffle(&mut rng);
    sizes
}

/// Changes the largest write so that the sum of the sizes is `image_bytes` in spite of rounding.
fn correct_sum(sizes: &mut [u64], image_bytes: u64) {
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
