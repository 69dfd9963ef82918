//! Words that comments of the code do not use: `cargo xtask words`, part of `make check`.
//!
//! A comment names its subject (the thread, the host, the caller) and its parameter. [`WORDS`] stand for all of them and
//! for none. Code in a comment, between backquotes, may use them: `nobody` is a user.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

/// Words and shapes that a comment does not use, in lower case.
const WORDS: [&str; 5] = ["who", "whoever", "somebody", "nobody", "so many"];

/// Comments that use one all the same: the file, the word, and why.
const EXCEPTIONS: [(&str, &str, &str); 1] = [(
    "crates/firn-format/src/piece.rs",
    "who",
    "name of a field in the map of a piece record",
)];

/// Directories with code, below the top of the repository.
const DIRS: [&str; 5] = ["crates", "fuzz", "lab", "tests", "xtask"];

/// Checks the comments of the code
#[derive(clap::Args)]
pub(crate) struct Words {}

impl Words {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let complaints = complaints(&find_uses(&root)?);
        if !complaints.is_empty() {
            bail!("comments\n{complaints}");
        }
        Ok(())
    }
}

/// A word of [`WORDS`] in a comment.
struct Use {
    file: String,
    line: usize,
    word: &'static str,
}

/// One line for each use.
fn complaints(uses: &[Use]) -> String {
    let mut text = String::new();
    for Use { file, line, word } in uses {
        let _ = writeln!(text, "{file}:{line}: \"{word}\": name the subject");
    }
    text
}

fn find_uses(root: &Path) -> anyhow::Result<Vec<Use>> {
    let mut uses = Vec::new();
    for path in source_files(root) {
        let file = path.strip_prefix(root)?.display().to_string();
        let source = fs::read_to_string(&path).with_context(|| format!("cannot read {file}"))?;
        for (line, word) in words_in(&source) {
            let is_exception = |one: &(&str, &str, &str)| one.0 == file && one.1 == word;
            if !EXCEPTIONS.iter().any(is_exception) {
                let file = file.clone();
                uses.push(Use { file, line, word });
            }
        }
    }
    Ok(uses)
}

/// All `.rs` files below [`DIRS`], sorted, without what was built.
fn source_files(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut dirs: Vec<_> = DIRS.iter().map(|dir| root.join(dir)).collect();
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() && entry.file_name() != "target" {
                dirs.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// The [`WORDS`] in comments of `source`, with their lines. A shape may go over the end of a line.
fn words_in(source: &str) -> Vec<(usize, &'static str)> {
    let mut found = Vec::new();
    let mut before = String::new();
    for (index, line) in source.lines().enumerate() {
        let Some(comment) = comment_of(line) else {
            before.clear();
            continue;
        };
        let prose: String = comment.split('`').step_by(2).collect::<Vec<_>>().join("`");
        let is_letter = |c: char| c.is_alphanumeric() || c == '\'';
        for word in prose
            .split(|c| !is_letter(c))
            .filter(|word| !word.is_empty())
        {
            let word = word.to_lowercase();
            let pair = format!("{before} {word}");
            let used = WORDS.iter().filter(|used| **used == word || **used == pair);
            found.extend(used.map(|used| (index + 1, *used)));
            before = word;
        }
    }
    found
}

/// The comment on a line. `//` in an address of a string follows a colon.
fn comment_of(line: &str) -> Option<&str> {
    let at = line.find("//")?;
    let is_comment = line[..at]
        .chars()
        .next_back()
        .is_none_or(char::is_whitespace);
    is_comment.then(|| line[at..].trim_start_matches(['/', '!']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_in_comments_only() {
        let lines = [
            "/// Tells who asks, so",
            "/// many times.",
            "let who = 1;\t// Nobody's, and nobody.",
            "let url = http://who;",
            "/// As `nobody`, whose files stay.",
        ];
        let expected = [(1, "who"), (2, "so many"), (3, "nobody")];
        assert_eq!(words_in(&lines.join("\n")), expected);
    }
}
