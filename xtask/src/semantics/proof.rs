//! Finds the words `Proves S-write-1.` in doc comments of Rust sources. They say which promise of docs/SEMANTICS.md a
//! test proves.

/// A doc comment with `Proves`, and the item that it documents.
#[derive(Debug, PartialEq, Eq)]
pub enum Proof {
    /// The item is a test, or an entry of a macro that makes tests.
    Test {
        /// Numbers of the promises.
        numbers: Vec<String>,
        /// Name of the test.
        test: String,
    },
    /// The item is no test.
    NoTest {
        /// First line of the item, counted from 1.
        line: usize,
    },
}

/// Returns all doc comments with `Proves` in a Rust source. The list of numbers after the word ends at a full stop, and
/// may go over several lines.
pub fn proofs(source: &str) -> Vec<Proof> {
    let mut found = Vec::new();
    let mut comment = String::new();
    let mut is_test = false;
    for (index, line) in source.lines().map(str::trim).enumerate() {
        if let Some(text) = line.strip_prefix("///") {
            comment += text;
        } else if line.starts_with("#[") {
            is_test |= line == "#[test]";
        } else if !line.starts_with("//") {
            let numbers = proven(&comment);
            if !numbers.is_empty() {
                found.push(match name(line, is_test) {
                    Some(test) => Proof::Test {
                        numbers,
                        test: test.to_owned(),
                    },
                    None => Proof::NoTest { line: index + 1 },
                });
            }
            (comment, is_test) = (String::new(), false);
        }
    }
    found
}

/// Returns the numbers after each `Proves` in a comment.
fn proven(comment: &str) -> Vec<String> {
    let sentences = comment
        .split("Proves ")
        .skip(1)
        .filter_map(|rest| rest.split('.').next());
    sentences.flat_map(numbers).collect()
}

/// Returns the name of the test that begins on a line: `fn NAME(` after `#[test]`, or `NAME: function(…);` in a macro.
/// Returns `None` if the line begins no test.
fn name(line: &str, is_test: bool) -> Option<&str> {
    let name = match line.strip_prefix("fn ") {
        Some(rest) => rest.split('(').next().filter(|_| is_test),
        None => line
            .split_once(": ")
            .filter(|(_, call)| call.ends_with(");"))
            .map(|(name, _)| name),
    };
    name.filter(|name| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'))
}

/// Returns the numbers of promises in a text. A number is `S-`, lower-case letters, `-` and digits.
pub fn numbers(text: &str) -> impl Iterator<Item = String> + '_ {
    text.match_indices("S-").filter_map(|(at, _)| {
        let before = text[..at].chars().next_back();
        if before.is_some_and(|c| c.is_ascii_alphanumeric()) {
            return None;
        }
        let (area, rest) = text[at + 2..].split_once('-')?;
        let digits = rest
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(rest.len());
        let is_number =
            digits > 0 && !area.is_empty() && area.chars().all(|c| c.is_ascii_lowercase());
        is_number.then(|| format!("S-{area}-{}", &rest[..digits]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(text: &str) -> Vec<String> {
        numbers(text).collect()
    }

    #[test]
    fn only_whole_numbers_are_taken() {
        assert_eq!(
            all("(S-write-1), S-fsync-12; S-x"),
            ["S-write-1", "S-fsync-12"]
        );
        assert_eq!(all("TLS-a-1 S-A-1 S--1 S-a- S-a-b S-"), [] as [&str; 0]);
    }

    #[test]
    fn a_quotation_goes_over_lines_and_attributes_to_its_test() {
        let source = "/// Says why. Proves S-a-1,\n/// S-b-2. Not S-c-3.\n#[test]\n#[ignore]\nfn it_is_so() {";
        let expected = Proof::Test {
            numbers: vec!["S-a-1".into(), "S-b-2".into()],
            test: "it_is_so".into(),
        };
        assert_eq!(proofs(source), [expected]);
    }

    #[test]
    fn an_entry_of_a_macro_counts_and_a_helper_does_not() {
        let test = Proof::Test {
            numbers: vec!["S-a-1".into()],
            test: "on_ext4".into(),
        };
        assert_eq!(
            proofs("/// Proves S-a-1.\non_ext4: suite_on(Ext4);"),
            [test]
        );
        assert_eq!(
            proofs("/// Proves S-a-1.\nfn helper() {}"),
            [Proof::NoTest { line: 2 }]
        );
    }
}
