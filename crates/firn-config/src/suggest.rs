//! The name that was probably meant.

use crate::table::TABLE;

/// The option whose name is nearest to `name`, if one is near.
pub fn nearest(name: &str) -> Option<&'static str> {
    let name = name.replace('_', "-").to_lowercase();
    let (row, distance) = TABLE
        .iter()
        .map(|row| (row, strsim::levenshtein(&name, row.name)))
        .min_by_key(|(_, d)| *d)?;
    (distance <= 1 + row.name.len() / 4).then_some(row.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_of_the_finger_finds_its_option() {
        assert_eq!(nearest("arena-sise"), Some("arena-size"));
        assert_eq!(nearest("io_thread"), Some("io-threads"));
        assert_eq!(nearest("nonsense"), None);
    }
}
