//! Completes an unfinished list after `-o`, for a shell.

use crate::table::TABLE;
use crate::value::Kind;

/// Words of `-o` that are not in the table: `ro`, `rw`, and flags of the kernel.
const FLAGS: [&str; 13] = [
    "ro", "rw", "dev", "nodev", "suid", "nosuid", "exec", "noexec", "atime", "noatime", "sync",
    "async", "dirsync",
];

/// Returns all lists that complete `list` by one word. The last word is a name, or a value of an option whose values
/// are words. A name that needs a value ends with `=`.
pub fn complete_minus_o(list: &str) -> Vec<String> {
    let (finished_words, last_word) = match list.rfind(',') {
        Some(comma) => list.split_at(comma + 1),
        None => ("", list),
    };
    let completions = match last_word.split_once('=') {
        Some((name, start_of_value)) => complete_value(name, start_of_value),
        None => complete_name(finished_words, last_word),
    };
    completions
        .into_iter()
        .map(|word| format!("{finished_words}{word}"))
        .collect()
}

/// Returns `name=value` for each value that begins with `start`; none unless the values are words.
fn complete_value(name: &str, start: &str) -> Vec<String> {
    let Some(row) = crate::table::row(name) else {
        return Vec::new();
    };
    let words: &[&str] = match row.kind {
        Kind::Choice(words) => words,
        Kind::Switch => &["yes", "no"],
        _ => return Vec::new(),
    };
    words
        .iter()
        .filter(|word| word.starts_with(start))
        .map(|word| format!("{name}={word}"))
        .collect()
}

/// Returns the names that begin with `start` and are not in the list `finished_words`.
fn complete_name(finished_words: &str, start: &str) -> Vec<String> {
    let is_in_list = |name: &str| {
        let mut words = finished_words.split(',');
        words.any(|word| word.split('=').next() == Some(name))
    };
    let options = TABLE.iter().map(|row| match row.kind {
        Kind::Switch => row.name.to_owned(),
        _ => format!("{}=", row.name),
    });
    options
        .chain(FLAGS.map(str::to_owned))
        .filter(|word| word.starts_with(start) && !is_in_list(word.trim_end_matches('=')))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::minus_o::{Unknown, parse_minus_o};

    #[test]
    fn names_and_words_are_completed_after_commas() {
        assert_eq!(complete_minus_o("clo"), ["close="]);
        assert_eq!(complete_minus_o("close=h"), ["close=held"]);
        assert_eq!(
            complete_minus_o("close=held,drain=d"),
            ["close=held,drain=demand"]
        );
        assert_eq!(complete_minus_o("noex"), ["noexec"]);
        assert!(complete_minus_o("arena-size=").is_empty());
        assert!(complete_minus_o("close=held,clo").is_empty(), "it is there");
        assert!(complete_minus_o("").len() > TABLE.len());
    }

    /// The parser accepts each completion.
    #[test]
    fn every_word_that_is_offered_is_an_option() {
        for word in complete_minus_o("") {
            if !word.ends_with('=') {
                parse_minus_o(&word, Unknown::Refuse).expect(&word);
                continue;
            }
            for whole in complete_minus_o(&word) {
                parse_minus_o(&whole, Unknown::Refuse).expect(&whole);
            }
        }
    }
}
