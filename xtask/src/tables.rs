//! Test: tables in the documentation that list crates, threads and test files agree with the source.
//!
//! A table is found on any page of docs/ by its header row:
//! * `| crate | is |`: the crates, each below the crates that it depends on;
//! * `| thread | number | does |`: the threads, by the names that `ps -L` and `top -H` show;
//! * `| about | system tests | tests of crates |`: the test files by subject.

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    const CRATES: &str = "crate | is";
    /// Threads of the pool, and other threads.
    const THREADS: [&str; 2] = ["thread | number | does", "thread | does"];
    const TESTS: &str = "about | system tests | tests of crates";
    /// Crates whose threads users never see.
    const WORKSHOP: [&str; 2] = ["firn-bench", "firn-testfs"];

    /// Where the threads of the pool get their names.
    const POOL_CLASSES: &str = "firn-workers/src/class.rs";

    fn repository() -> &'static Path {
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
    }

    /// Files below `dir` with this extension.
    fn find_files(dir: &Path, extension: &str) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut dirs = vec![dir.to_owned()];
        while let Some(dir) = dirs.pop() {
            for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
                let path = entry.path();
                if path.is_dir() {
                    dirs.push(path);
                } else if path.extension().is_some_and(|of| of == extension) {
                    found.push(path);
                }
            }
        }
        found.sort();
        found
    }

    /// The rows of all tables with this header row, as cells.
    fn rows(pages: &[String], header: &str) -> Vec<Vec<String>> {
        let cells = |line: &str| -> Vec<String> {
            let line = line.trim().trim_matches('|');
            line.split('|').map(|cell| cell.trim().to_owned()).collect()
        };
        let header = cells(header);
        let mut rows = Vec::new();
        for page in pages {
            let mut lines = page.lines();
            while let Some(line) = lines.next() {
                if line.starts_with('|') && cells(line) == header {
                    let table = lines.by_ref().take_while(|line| line.starts_with('|'));
                    rows.extend(table.skip(1).map(cells));
                }
            }
        }
        rows
    }

    fn table(header: &str) -> Vec<Vec<String>> {
        let pages: Vec<_> = find_files(&repository().join("docs"), "md")
            .iter()
            .map(|page| fs::read_to_string(page).expect("a page"))
            .collect();
        let rows = rows(&pages, header);
        assert!(!rows.is_empty(), "docs/ has no table | {header} |");
        rows
    }

    /// What stands between backticks.
    fn code(cell: &str) -> impl Iterator<Item = &str> {
        cell.split('`').skip(1).step_by(2)
    }

    /// What is in one list and not in the other, or twice in the first, a sentence each.
    fn compare(documented: &[String], real: &BTreeSet<String>) -> Vec<String> {
        let mut seen = BTreeSet::new();
        let mut faults = Vec::new();
        for name in documented {
            if !real.contains(name) {
                faults.push(format!("the table has {name}, which is not in the tree"));
            }
            if !seen.insert(name.clone()) {
                faults.push(format!("the table has {name} twice"));
            }
        }
        let missing = real.difference(&seen);
        faults.extend(missing.map(|name| format!("the table lacks {name}")));
        faults
    }

    #[track_caller]
    fn assert_none(faults: &[String]) {
        assert!(faults.is_empty(), "{}", faults.join("\n"));
    }

    /// Crates of `crates/`, each with the crates of Firn that it depends on.
    fn crates() -> Vec<(String, BTreeSet<String>)> {
        let output = Command::new(env!("CARGO"))
            .current_dir(repository())
            .args([
                "metadata",
                "--offline",
                "--no-deps",
                "--format-version",
                "1",
            ])
            .output()
            .expect("cargo runs");
        let metadata: serde_json::Value =
            serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
        let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        let mut crates = Vec::new();
        for package in metadata["packages"].as_array().expect("packages") {
            if !text(&package["manifest_path"]).contains("/crates/") {
                continue;
            }
            let dependencies = package["dependencies"].as_array().expect("dependencies");
            let names = dependencies
                .iter()
                .filter(|dependency| dependency["kind"].is_null())
                .map(|dependency| text(&dependency["name"]))
                .filter_map(|name| name.strip_prefix("firn-").map(str::to_owned));
            crates.push((text(&package["name"]), names.collect()));
        }
        crates
    }

    #[test]
    fn the_table_of_crates_is_that_of_the_workspace() {
        let crates = crates();
        let rows = table(CRATES);
        let documented: Vec<_> = rows
            .iter()
            .flat_map(|row| code(&row[0]))
            .map(str::to_owned)
            .collect();
        let real = crates.iter().map(|(name, _)| name.clone()).collect();
        let mut faults = compare(&documented, &real);
        let place = |name: &str| documented.iter().position(|one| one == name);
        for (name, dependencies) in &crates {
            for dependency in dependencies {
                if place(&format!("firn-{dependency}")) > place(name) {
                    faults.push(format!(
                        "{name} depends on {dependency}, which stands below it"
                    ));
                }
            }
        }
        assert_none(&faults);
    }

    /// Where the name of a thread follows: what makes threads, and the names of the pool's classes.
    fn name_markers(path: &str, source: &str) -> Vec<&'static str> {
        let mut markers = Vec::new();
        if source.contains("thread::Builder") {
            markers.push(".name(");
        }
        markers.extend(["spawn_thread(", "parallel::map(", "try_map("]);
        if path.ends_with(POOL_CLASSES) {
            markers.push("=> ");
        }
        markers
    }

    /// Names that threads get in a source file; what is put into a name by `format!` is an `N`.
    fn thread_names(source: &str, marker: &str) -> Vec<String> {
        let mut names = Vec::new();
        for part in source.split(marker).skip(1) {
            let literal = part.trim_start().trim_start_matches("format!(");
            let Some(name) = literal
                .strip_prefix('"')
                .and_then(|rest| rest.split('"').next())
            else {
                continue;
            };
            let (before, variable) = name.split_once('{').unwrap_or((name, ""));
            names.push(if variable.is_empty() {
                before.to_owned()
            } else {
                format!("{before}N")
            });
        }
        names
    }

    #[test]
    fn the_table_of_threads_has_every_name_of_the_code() {
        let mut real = BTreeSet::new();
        for file in find_files(&repository().join("crates"), "rs") {
            let path = file.display().to_string();
            let is_product =
                path.contains("/src/") && !WORKSHOP.iter().any(|name| path.contains(name));
            let source = fs::read_to_string(&file).expect("a source file");
            let production = source.split("#[cfg(test)]\nmod ").next();
            if let Some(production) = production.filter(|_| is_product) {
                let is_code = |line: &&str| !line.trim_start().starts_with("//");
                let code: Vec<_> = production.lines().filter(is_code).collect();
                let code = code.join("\n");
                for marker in name_markers(&path, &code) {
                    real.extend(thread_names(&code, marker));
                }
            }
        }
        assert!(real.len() > 5, "the code is not understood: {real:?}");
        let rows: Vec<_> = THREADS.iter().copied().flat_map(table).collect();
        let documented: Vec<_> = rows
            .iter()
            .flat_map(|row| code(&row[0]))
            .map(str::to_owned)
            .collect();
        assert_none(&compare(&documented, &real));
    }

    fn file_names(dir: &Path) -> BTreeSet<String> {
        let files = crate::test_files::files_of(dir);
        let names = files.iter().filter_map(|file| file.file_name());
        names
            .map(|name| name.to_string_lossy().into_owned())
            .collect()
    }

    /// The files that one column of the table of tests names.
    fn documented_tests(column: usize) -> Vec<String> {
        table(TESTS)
            .iter()
            .flat_map(|row| code(&row[column]))
            .map(str::to_owned)
            .collect()
    }

    #[test]
    fn the_table_of_tests_has_every_system_test() {
        let real = file_names(&repository().join("tests/tests"));
        assert_none(&compare(&documented_tests(1), &real));
    }

    #[test]
    fn the_table_of_tests_has_every_test_of_a_crate() {
        let mut real = BTreeSet::new();
        for name in fs::read_dir(repository().join("crates"))
            .expect("crates")
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
        {
            let files = file_names(&repository().join("crates").join(&name).join("tests"));
            let short = name.strip_prefix("firn-").unwrap_or(&name);
            real.extend(files.iter().map(|file| format!("{short}/{file}")));
        }
        assert_none(&compare(&documented_tests(2), &real));
    }

    #[test]
    fn what_is_missing_or_gone_or_twice_is_named() {
        let page = "| about | system tests | tests of crates |\n|---|---|---|\n| one | `a.rs`, `b.rs` | |\n| two | `a.rs` | |\n\n| no | `c.rs` | |\n";
        let rows = rows(&[page.to_owned()], TESTS);
        assert_eq!(rows.len(), 2);
        let documented: Vec<_> = rows
            .iter()
            .flat_map(|row| code(&row[1]))
            .map(str::to_owned)
            .collect();
        let real = BTreeSet::from(["a.rs".to_owned(), "c.rs".to_owned()]);
        assert_eq!(
            compare(&documented, &real),
            [
                "the table has b.rs, which is not in the tree",
                "the table has a.rs twice",
                "the table lacks c.rs",
            ]
        );
        let source = r#"builder.name("firn-end".into()); other.name(format!("firn-io-{index}")); verb.name("#;
        assert_eq!(thread_names(source, ".name("), ["firn-end", "firn-io-N"]);
    }
}
