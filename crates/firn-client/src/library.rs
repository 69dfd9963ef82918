//! Finds the file of the preload library.

use std::path::{Path, PathBuf};

/// File name of the library.
pub const NAME: &str = "libfirn_preload.so";

/// Path of the library's directory in the Python package, relative to a directory of Python packages.
const IN_PYTHON_PACKAGE: &str = "firnfs/_lib";

/// Returns the path of the library that belongs to `program`. The library is beside the program or in the place where
/// a package installs it.
pub fn beside(program: &Path) -> Option<PathBuf> {
    let dir = program.parent()?;
    let places = [
        dir.join(NAME),
        // If both `lib` and `lib/firn` have the library, `lib` belongs to the same installation, because only
        // packages for /usr use `lib/firn`.
        dir.join("../lib").join(NAME),
        dir.join("../lib64").join(NAME),
        dir.join("../lib/firn").join(NAME),
    ];
    places
        .into_iter()
        .chain(in_python_packages(dir))
        .find_map(|place| place.canonicalize().ok())
}

/// Returns the paths where pip installs the library together with a program in `dir`.
///
/// The paths cover each Python below the same prefix. Packages of this version come first.
fn in_python_packages(dir: &Path) -> Vec<PathBuf> {
    // pip install --target DIR: DIR/bin/firn and DIR/firnfs.
    let mut packages = vec![dir.join("..")];
    for lib in ["../lib", "../lib64"] {
        let Ok(entries) = std::fs::read_dir(dir.join(lib)) else {
            continue;
        };
        for entry in entries.flatten() {
            if entry.file_name().as_encoded_bytes().starts_with(b"python") {
                packages.push(entry.path().join("site-packages"));
                packages.push(entry.path().join("dist-packages"));
            }
        }
    }
    // Packages of other versions come last. Otherwise packages are sorted by path, so that the order is stable.
    let of_this_version = concat!("firnfs-", env!("CARGO_PKG_VERSION"), ".dist-info");
    packages.sort_by_key(|package| (!package.join(of_this_version).is_dir(), package.clone()));
    let places = packages
        .into_iter()
        .map(|package| package.join(IN_PYTHON_PACKAGE).join(NAME));
    places.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_found_beside_the_program_and_where_packages_put_it() {
        let root = tempfile::tempdir().unwrap();
        let program = root.path().join("bin/firn");
        std::fs::create_dir(root.path().join("bin")).unwrap();
        assert_eq!(beside(&program), None);
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
            assert_eq!(beside(&program), Some(expected), "{place}");
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
        let found = beside(&root.path().join("bin/firn")).unwrap();
        assert!(found.to_str().unwrap().contains("python3.9"), "{found:?}");
    }
}
