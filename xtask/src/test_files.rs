//! `cargo xtask tests`: lists the test files, each with the first sentences of its head, which say what it tests.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Prints the path and the head of each test file in which the word occurs, in either of them.
pub fn run(word: &str) -> Result<()> {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    for file in test_files(root)? {
        let head = read_head(&file)?;
        let name = file.strip_prefix(root).unwrap_or(&file).display();
        let text = format!("{name}\n    {head}\n");
        if text.to_lowercase().contains(&word.to_lowercase()) {
            print!("{text}");
        }
    }
    Ok(())
}

/// Returns the test files in a directory: single-file test programs, and the modules of programs with a `main.rs`.
pub fn files_of(dir: &Path) -> Vec<PathBuf> {
    let entries = |dir: &Path| fs::read_dir(dir).into_iter().flatten().flatten();
    let mut dirs = vec![dir.to_owned()];
    let programs = entries(dir).map(|entry| entry.path());
    dirs.extend(programs.filter(|path| path.join("main.rs").is_file()));
    let mut files: Vec<_> = dirs
        .iter()
        .flat_map(|dir| entries(dir).map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|of| of == "rs") && !path.ends_with("main.rs"))
        .collect();
    files.sort();
    files
}

/// Returns the files of the system tests, and then those of each crate.
fn test_files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut files = files_of(&root.join("tests/tests"));
    let crates = root.join("crates");
    let entries = fs::read_dir(&crates).with_context(|| format!("read {}", crates.display()))?;
    let mut dirs: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    dirs.sort();
    files.extend(dirs.iter().flat_map(|dir| files_of(&dir.join("tests"))));
    Ok(files)
}

/// Returns the first paragraph of the comment at the top of a file, as one line.
fn read_head(file: &Path) -> Result<String> {
    let text = fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
    let lines = text.lines().map_while(|line| line.strip_prefix("//!"));
    let paragraph: Vec<_> = lines
        .map(str::trim)
        .take_while(|line| !line.is_empty())
        .collect();
    Ok(paragraph.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_test_file_says_what_it_shows() {
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        let files = test_files(root).expect("the repository is readable");
        assert!(files.len() > 50, "the tree is not understood: {files:?}");
        let silent: Vec<_> = files
            .iter()
            .filter(|file| read_head(file).expect("a test file").is_empty())
            .collect();
        assert!(silent.is_empty(), "these have no head: {silent:?}");
    }
}
