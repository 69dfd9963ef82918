//! Test: the installed programs contain no code that is for developers only (benchmarks, test servers, simulated disk).
//!
//! If cargo builds several packages together, it enables a feature for all of them. So the test asks cargo only about
//! the packages that `make install` builds.

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    /// What `make install` builds.
    const PRODUCT: [&str; 3] = ["firn", "firn-preload", "firn-c"];
    /// Crates for developers of Firn.
    const WORKSHOP: [&str; 4] = ["firn-bench", "firn-sim", "firn-testfs", "firn-tests"];

    /// Returns a sentence for each crate or feature in `packages` that users do not need, and the number of crates of
    /// Firn.
    fn find_faults(packages: &[&str]) -> (Vec<String>, usize) {
        let tree = list_dependencies(packages);
        let mut lines: Vec<_> = tree
            .lines()
            .map(|line| line.trim_end_matches(" (*)"))
            .filter(|line| line.starts_with("firn"))
            .collect();
        lines.sort_unstable();
        lines.dedup();
        let mut faults = Vec::new();
        let mut count = 0;
        for line in lines {
            let (name, rest) = line.split_once(' ').expect("a name and more");
            match rest.strip_prefix("feature ") {
                Some("\"default\"") => {}
                Some(feature) => faults.push(format!("{name} has the feature {feature}")),
                None => count += 1,
            }
            if WORKSHOP.contains(&name) {
                faults.push(format!("{name} is part of it"));
            }
        }
        faults.dedup();
        (faults, count)
    }

    fn list_dependencies(packages: &[&str]) -> String {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
        cargo.args(["tree", "--offline", "--prefix", "none", "--format", "{p}"]);
        cargo.args(["--edges", "normal,build,features"]);
        for package in packages {
            cargo.args(["--package", package]);
        }
        let output = cargo.output().expect("cargo runs");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "cargo tree failed: {errors}");
        String::from_utf8(output.stdout).expect("cargo prints UTF-8")
    }

    #[test]
    fn the_product_has_no_simulator_and_no_benchmarks() {
        let (faults, count) = find_faults(&PRODUCT);
        assert!(
            count > 10,
            "cargo's answer is not understood: {count} crates"
        );
        assert!(faults.is_empty(), "{}", faults.join("\n"));
    }

    #[test]
    fn crates_for_tests_are_found() {
        let (faults, _) = find_faults(&["firn-tests"]);
        assert!(faults.contains(&"firn-sim is part of it".into()));
        assert!(faults.contains(&"firn-tests is part of it".into()));
    }
}
