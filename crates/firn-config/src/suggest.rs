//! The name that somebody probably meant.

use crate::table::TABLE;

/// The option whose name is nearest to `name`, if one is near.
pub fn nearest(name: &str) -> Option<&'static str> {
    let name = name.replace('_', "-").to_lowercase();
    let (row, distance) = TABLE.iter().map(|row| (row, distance(&name, row.name))).min_by_key(|(_, d)| *d)?;
    (distance <= 1 + row.name.len() / 4).then_some(row.name)
}

/// Levenshtein's distance, one row at a time.
fn distance(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut costs: Vec<usize> = (0..=to.len()).collect();
    for (i, a) in from.chars().enumerate() {
        let mut diagonal = costs[0];
        costs[0] = i + 1;
        for (j, b) in to.iter().enumerate() {
            let replace = diagonal + usize::from(a != *b);
            diagonal = costs[j + 1];
            costs[j + 1] = replace.min(diagonal + 1).min(costs[j] + 1);
        }
    }
    costs[to.len()]
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
