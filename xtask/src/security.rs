//! Test: each test that docs/SECURITY.md names as the proof of a defence exists.
//!
//! The page names a test as `FILE::NAME`, with the path of the file from the top of the repository.

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// The page.
    const PAGE: &str = "docs/SECURITY.md";

    /// Returns a sentence for each test that the page names and that does not exist, and the number of named tests.
    fn check(root: &Path, page: &str) -> (Vec<String>, usize) {
        let mut faults = Vec::new();
        let mut count = 0;
        for (index, line) in page.lines().enumerate() {
            for (file, test) in named_tests(line) {
                count += 1;
                let source = std::fs::read_to_string(root.join(file)).unwrap_or_default();
                if !holds_test(&source, test) {
                    faults.push(format!(
                        "{PAGE}:{}: there is no test {test} in {file}",
                        index + 1
                    ));
                }
            }
        }
        (faults, count)
    }

    /// Returns file and name of each test in a line, written as `` `crates/x/src/y.rs::a_test` ``.
    fn named_tests(line: &str) -> impl Iterator<Item = (&str, &str)> {
        let code = line.split('`').skip(1).step_by(2);
        code.filter_map(|code| code.split_once("::"))
            .filter(|(file, _)| file.ends_with(".rs"))
    }

    /// Returns whether a source has a function with that name, or such an entry of a macro that makes tests.
    fn holds_test(source: &str, test: &str) -> bool {
        let function = format!("fn {test}(");
        let entry = format!("{test}: ");
        source.contains(&function)
            || source
                .lines()
                .any(|line| line.trim_start().starts_with(&entry))
    }

    #[test]
    fn every_test_that_the_security_page_names_is_there() {
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        let page = std::fs::read_to_string(root.join(PAGE)).expect("the page is readable");
        let (faults, count) = check(root, &page);
        assert!(
            count > 20,
            "the page is not understood: it seems to name {count} tests"
        );
        assert!(faults.is_empty(), "{}", faults.join("\n"));
    }

    #[test]
    fn a_test_that_is_gone_is_named() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        std::fs::write(
            dir.path().join("a.rs"),
            "#[test]\nfn one() {}\ntwo: case(1);\n",
        )
        .expect("write");
        let page = "`a.rs::one` and `a.rs::two`, not `std::mem`\n`a.rs::three` `b.rs::one`\n";
        let (faults, count) = check(dir.path(), page);
        assert_eq!(count, 4);
        let expected = [
            "there is no test three in a.rs",
            "there is no test one in b.rs",
        ];
        assert_eq!(faults, expected.map(|fault| format!("{PAGE}:2: {fault}")));
    }
}
