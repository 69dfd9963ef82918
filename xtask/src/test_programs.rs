//! Test: the `main.rs` of each test program names all files beside it as modules. Tests in any other file would never
//! run.

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    /// Directories of programs with more than one file of tests.
    fn programs() -> Vec<PathBuf> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let crates = entries(&root.join("crates"));
        let all = crates
            .into_iter()
            .chain([root.join("tests")])
            .flat_map(|package| entries(&package.join("tests")));
        all.filter(|program| program.join("main.rs").is_file())
            .collect()
    }

    fn entries(dir: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(dir).into_iter().flatten();
        entries
            .map(|entry| entry.expect("an entry").path())
            .collect()
    }

    #[test]
    fn every_file_of_tests_is_part_of_its_program() {
        let programs = programs();
        assert!(programs.len() > 5, "the programs are not found");
        for program in programs {
            let main = fs::read_to_string(program.join("main.rs")).expect("main.rs");
            for file in entries(&program) {
                let name = file.file_stem().expect("a name").to_string_lossy();
                let is_named = name == "main"
                    || main.contains(&format!("mod {name};"))
                    || main.contains(&format!("mod {name} {{"));
                assert!(is_named, "{} is in no program of tests", file.display());
            }
        }
    }
}
