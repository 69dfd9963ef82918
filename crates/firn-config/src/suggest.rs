//! Suggests the option that an unknown name probably means.

use crate::table::TABLE;

/// Returns the option whose name is most similar to `name`, or `None` if none is similar enough.
pub fn nearest(name: &str) -> Option<&'static str> {
    let name = name.replace('_', "-").to_lowercase();
    let (row, distance) = TABLE
        .iter()
        .map(|row| (row, strsim::levenshtein(&name, row.name)))
        .min_by_key(|(_, distance)| *distance)?;
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
