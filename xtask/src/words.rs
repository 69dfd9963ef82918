//! `cargo xtask words`: finds words in comments of the code that do not name a subject. It is part of `make check`.
//!
//! A comment should name its subject, such as the thread, the host or the caller. [`WORDS`] are pronouns that leave the
//! subject open. Code in a comment, between backquotes, may use them: `nobody` is a user.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

/// Words and pairs of words that comments must not use, in lower case.
const WORDS: [&str; 5] = ["who", "whoever", "somebody", "nobody", "so many"];

/// Exceptions: a file, a word that its comments may use, and the reason.
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

/// A place where a comment uses one of [`WORDS`].
struct Use {
    file: String,
    line: usize,
    word: &'static str,
}

/// Returns a line of text for each use.
fn complaints(uses: &[Use]) -> String {
    let mut text = String::new();
    for Use { file, line, word } in uses {
        let _ = writeln!(text, "{file}:{line}: \"{word}\": name the subject");
    }
    text
}

/// Returns all uses in the sources of the repository, without the exceptions.
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

/// Returns all `.rs` files below [`DIRS`], sorted. Build directories are left out.
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

/// Returns the [`WORDS`] that comments of `source` use, with their line numbers. A pair of words may be on two lines.
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

/// Returns the text of the comment on a line; `None` if there is none. A comment begins the line or follows a space, so
/// `//` in an address such as `http://` begins none.
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
