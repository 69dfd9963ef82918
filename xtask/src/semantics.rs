//! Checks that each promise of docs/SEMANTICS.md has a test, and lists the tests of each promise.
//!
//! Each promise has a number, such as S-write-1. The doc comment of a test that proves promises names their numbers:
//! `/// Proves S-write-1, S-write-3.`
//!
//! What is checked
//! * docs/SEMANTICS.md states each number once, and states every number that a comment or another page mentions.
//! * `Proves` is in the doc comment of a test, and not in that of another function.
//! * Each promise has a test, or a reason in docs/TESTING.md why it has none, and not both.

mod proof;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use proof::{Proof, numbers, proofs};

/// The page that states the promises.
const PROMISES: &str = "docs/SEMANTICS.md";
/// The page with the reasons why promises have no test.
const REASONS: &str = "docs/TESTING.md";

/// Files and directories that are searched for tests, and for numbers of promises.
const PLACES: [&str; 7] = [
    "crates",
    "tests",
    "xtask",
    "examples",
    "fuzz",
    "docs",
    "CONTRIBUTING.md",
];

/// Prints each promise with its tests, and then the promises without a test. Fails if a check fails.
pub fn run() -> Result<()> {
    let report = Report::of(&repository())?;
    print!("{}", report.text());
    ensure!(report.faults.is_empty(), "{}", report.faults.join("\n"));
    Ok(())
}

/// Returns the top directory of the repository.
fn repository() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).to_owned()
}

/// The promises, their tests, and the faults that the checks have found.
#[derive(Default)]
struct Report {
    /// Number and sentence of each promise, in the order of the page.
    promises: Vec<(String, String)>,
    /// The tests of each number, as `file: name`.
    tests: BTreeMap<String, BTreeSet<String>>,
    /// The reason why a number has no test.
    reasons: BTreeMap<String, String>,
    /// A sentence for each fault.
    faults: Vec<String>,
}

impl Report {
    /// Reads the pages and sources of the repository at `root`, and makes all checks.
    fn of(root: &Path) -> Result<Self> {
        let page = |name: &str| {
            std::fs::read_to_string(root.join(name)).with_context(|| format!("read {name}"))
        };
        let mut report = Self {
            promises: stated(&page(PROMISES)?),
            reasons: reasons(&page(REASONS)?),
            ..Self::default()
        };
        report.look_for_twins();
        for place in PLACES {
            for file in files_below(&root.join(place))? {
                let text = std::fs::read_to_string(&file)
                    .with_context(|| format!("read {}", file.display()))?;
                let name = file
                    .strip_prefix(root)
                    .unwrap_or(&file)
                    .display()
                    .to_string();
                report.take_in(&name, &text);
            }
        }
        report.compare();
        Ok(report)
    }

    fn is_stated(&self, number: &str) -> bool {
        self.promises.iter().any(|(stated, _)| stated == number)
    }

    /// Records a fault for each number that is stated twice.
    fn look_for_twins(&mut self) {
        let mut seen = BTreeSet::new();
        for (number, _) in &self.promises {
            if !seen.insert(number) {
                self.faults
                    .push(format!("{PROMISES}: {number} is stated twice"));
            }
        }
    }

    /// Records the tests in a source file, and a fault for each number that no promise has. `name` is the path of the
    /// file; in a page (`.md`) only the numbers are checked.
    fn take_in(&mut self, name: &str, text: &str) {
        let is_page = name.ends_with(".md");
        for (index, line) in text.lines().enumerate() {
            if is_page || line.trim_start().starts_with("//") {
                for number in numbers(line)
                    .filter(|number| !self.is_stated(number))
                    .collect::<Vec<_>>()
                {
                    self.faults.push(format!(
                        "{name}:{}: {number} is not in {PROMISES}",
                        index + 1
                    ));
                }
            }
        }
        if is_page {
            return;
        }
        for proof in proofs(text) {
            match proof {
                Proof::Test { numbers, test } => {
                    for number in numbers {
                        self.tests
                            .entry(number)
                            .or_default()
                            .insert(format!("{name}: {test}"));
                    }
                }
                Proof::NoTest { line } => {
                    self.faults
                        .push(format!("{name}:{line}: `Proves` stands on what is no test"));
                }
            }
        }
    }

    /// Records a fault for each promise with neither a test nor a reason, or with both.
    fn compare(&mut self) {
        for (number, _) in &self.promises {
            let fault = match (
                self.tests.contains_key(number),
                self.reasons.contains_key(number),
            ) {
                (false, false) => format!("{number} has neither a test nor a reason in {REASONS}"),
                (true, true) => format!("{number} has a test: its reason in {REASONS} can go"),
                _ => continue,
            };
            self.faults.push(fault);
        }
    }

    /// Returns the list of promises with their tests, and then that of promises without a test, with the reasons.
    fn text(&self) -> String {
        let mut text = String::new();
        for (number, sentence) in &self.promises {
            if let Some(tests) = self.tests.get(number) {
                text += &format!("{number}  {sentence}\n");
                tests
                    .iter()
                    .for_each(|test| text += &format!("    {test}\n"));
            }
        }
        let untested: Vec<_> = self
            .promises
            .iter()
            .filter(|(n, _)| !self.tests.contains_key(n))
            .collect();
        text += &format!(
            "\n{} of {} promises are quoted by no test:\n",
            untested.len(),
            self.promises.len()
        );
        for (number, _) in untested {
            let reason = self
                .reasons
                .get(number)
                .map_or("no reason given", String::as_str);
            text += &format!("    {number}  {reason}\n");
        }
        text
    }
}

/// Returns number and text of each promise on a page. A promise is a list item or a row of a table, with its number in
/// bold: `* **S-write-1** When …` or `| **S-write-1** | … |`. Promises on one line have the same text.
fn stated(page: &str) -> Vec<(String, String)> {
    page.lines().flat_map(stated_in_line).collect()
}

fn stated_in_line(line: &str) -> Vec<(String, String)> {
    let (mut in_bold, mut text) = (Vec::new(), String::new());
    for (index, part) in line.split("**").enumerate() {
        let number = numbers(part).next().filter(|number| number == part);
        match number.filter(|_| index % 2 == 1) {
            Some(number) => in_bold.push(number),
            None => text += part,
        }
    }
    let text = text.trim_matches(['*', '|', ' ']).to_owned();
    in_bold.into_iter().map(|n| (n, text.clone())).collect()
}

/// Returns the reason for each number in the table of reasons, with rows such as `| S-attr-6 | … |`.
fn reasons(page: &str) -> BTreeMap<String, String> {
    let mut reasons = BTreeMap::new();
    for row in page.lines().filter(|line| line.starts_with("| S-")) {
        let mut cells = row.trim_matches('|').splitn(2, '|').map(str::trim);
        let (Some(first), Some(reason)) = (cells.next(), cells.next()) else {
            continue;
        };
        reasons.extend(numbers(first).map(|number| (number, reason.to_owned())));
    }
    reasons
}

/// Returns the Rust sources and pages at or below `place`, in the order of their names. Build directories and inputs of
/// fuzzing are left out.
fn files_below(place: &Path) -> Result<Vec<PathBuf>> {
    if place.is_file() {
        return Ok(vec![place.to_owned()]);
    }
    let entries = std::fs::read_dir(place).with_context(|| format!("read {}", place.display()))?;
    let mut paths = entries.map(|e| Ok(e?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() {
            let skipped = path
                .file_name()
                .is_some_and(|name| name == "target" || name == "corpus");
            files.extend(if skipped {
                Vec::new()
            } else {
                files_below(&path)?
            });
        } else if path.extension().is_some_and(|e| e == "rs" || e == "md") {
            files.push(path);
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_promise_has_a_test_or_a_reason() {
        let report = Report::of(&repository()).expect("the repository is readable");
        assert!(
            report.promises.len() > 50,
            "the page is not understood: {:?}",
            report.promises
        );
        assert!(report.faults.is_empty(), "{}", report.faults.join("\n"));
    }

    fn report(promises: &str, reasons_page: &str, source: &str) -> Report {
        let mut report = Report {
            promises: stated(promises),
            reasons: reasons(reasons_page),
            ..Report::default()
        };
        report.look_for_twins();
        report.take_in("a.rs", source);
        report.compare();
        report
    }

    #[test]
    fn promises_are_stated_in_bold_in_sentences_and_rows() {
        let page = "* **S-a-1** **S-a-2** One (S-a-9).\n| **S-a-3** | three | **3** |\n";
        let expected = [
            ("S-a-1", "One (S-a-9)."),
            ("S-a-2", "One (S-a-9)."),
            ("S-a-3", "three | 3"),
        ];
        assert_eq!(
            stated(page),
            expected.map(|(n, s)| (n.to_owned(), s.to_owned()))
        );
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        let page = "* **S-a-1** One.\n* **S-a-2** Two.\n";
        let test = "/// Proves S-a-1.\n#[test]\nfn one() {}\n";
        let because = "| S-a-2 | nobody can |\n";
        assert_eq!(report(page, because, test).faults, [] as [&str; 0]);
        assert_eq!(
            report(page, "", test).faults,
            ["S-a-2 has neither a test nor a reason in docs/TESTING.md"]
        );
        let both = report(page, "| S-a-1, S-a-2 | no |\n", test).faults;
        assert_eq!(
            both,
            ["S-a-1 has a test: its reason in docs/TESTING.md can go"]
        );
        let unknown = report(page, because, &test.replace("S-a-1", "S-a-1, S-a-9")).faults;
        assert_eq!(unknown, ["a.rs:1: S-a-9 is not in docs/SEMANTICS.md"]);
        let helper = report(
            page,
            because,
            &format!("{test}/// Proves S-a-1.\nfn two() {{}}\n"),
        )
        .faults;
        assert_eq!(helper, ["a.rs:5: `Proves` stands on what is no test"]);
        let twice = report(&format!("{page}* **S-a-1** Again.\n"), because, test).faults;
        assert_eq!(twice, ["docs/SEMANTICS.md: S-a-1 is stated twice"]);
    }
}
