//! Finds the file of the preload library, which dynamically linked programs load so that their calls reach Firn
//! without the kernel.

use std::path::{Path, PathBuf};

/// File name of the library.
pub const NAME: &str = "libfirn_preload.so";

/// Path of the library's directory in the Python package, relative to a directory of Python packages.
const IN_PYTHON_PACKAGE: &str = "firnfs/_lib";

/// Returns the path of the library that belongs to `program`. The library is beside the program or in the place where
/// a package installs it.
pub fn find_beside(program: &Path) -> Option<PathBuf> {
    let program_dir = program.parent()?;
    let mut candidates = vec![
        program_dir.join(NAME),
        // If both `lib` and `lib/firn` have the library, `lib` belongs to the same installation, because only
        // packages for /usr use `lib/firn`.
        program_dir.join("../lib").join(NAME),
        program_dir.join("../lib64").join(NAME),
        program_dir.join("../lib/firn").join(NAME),
    ];
    candidates.extend(paths_in_python_packages(program_dir));
    candidates
        .into_iter()
        .find_map(|candidate| candidate.canonicalize().ok())
}

/// Returns the paths where pip installs the library together with a program in `program_dir`.
///
/// The paths cover each Python below the same prefix. Packages of this version come first.
fn paths_in_python_packages(program_dir: &Path) -> Vec<PathBuf> {
    // pip install --target DIR: DIR/bin/firn and DIR/firnfs.
    let mut package_dirs = vec![program_dir.join("..")];
    for lib in ["../lib", "../lib64"] {
        let Ok(entries) = std::fs::read_dir(program_dir.join(lib)) else {
            continue;
        };
        for entry in entries.flatten() {
            let is_python_dir = entry.file_name().as_encoded_bytes().starts_with(b"python");
            if is_python_dir {
                package_dirs.push(entry.path().join("site-packages"));
                package_dirs.push(entry.path().join("dist-packages"));
            }
        }
    }
    // Packages of other versions come last. Otherwise packages are sorted by path, so that the order is stable.
    let this_version = concat!("firnfs-", env!("CARGO_PKG_VERSION"), ".dist-info");
    package_dirs.sort_by_key(|dir| {
        let has_other_version = !dir.join(this_version).is_dir();
        (has_other_version, dir.clone())
    });
    let libraries = package_dirs
        .into_iter()
        .map(|dir| dir.join(IN_PYTHON_PACKAGE).join(NAME));
    libraries.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_found_beside_the_program_and_where_packages_put_it() {
        let root = tempfile::tempdir().unwrap();
        let program = root.path().join("bin/firn");
        std::fs::create_dir(root.path().join("bin")).unwrap();
        assert_eq!(find_beside(&program), None);
        // In reverse order of the search, so each new place is found before the earlier ones.
        for place in [
            "lib/python3.9/site-packages/firnfs/_lib",
            "lib/python3.11/dist-packages/firnfs/_lib",
            "firnfs/_lib",
            "lib/firn",
            "lib64",
            "lib",
            "bin",
        ] {
            let dir = root.path().join(place);
            std::fs::create_dir_all(&dir).unwrap();
            std::fs::write(dir.join(NAME), "").unwrap();
            let expected = dir.join(NAME).canonicalize().unwrap();
            assert_eq!(find_beside(&program), Some(expected), "{place}");
        }
    }

    #[test]
    fn of_several_pythons_the_one_with_this_version_counts() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("bin")).unwrap();
        let packages = |python: &str| root.path().join("lib").join(python).join("site-packages");
        for python in ["python3.10", "python3.9"] {
            let dir = packages(python).join(IN_PYTHON_PACKAGE);
            std::fs::create_dir_all(&dir).unwrap();
            std::fs::write(dir.join(NAME), "").unwrap();
        }
        let version = env!("CARGO_PKG_VERSION");
        for (python, version) in [("python3.10", "0.0.1"), ("python3.9", version)] {
            let info = format!("firnfs-{version}.dist-info");
            std::fs::create_dir(packages(python).join(info)).unwrap();
        }
        let found = find_beside(&root.path().join("bin/firn")).unwrap();
        assert!(found.to_str().unwrap().contains("python3.9"), "{found:?}");
    }
}
