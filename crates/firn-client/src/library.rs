//! The preload library, as a file.

use std::path::{Path, PathBuf};

/// Its file name.
pub const NAME: &str = "libfirn_preload.so";

/// The library that belongs to `program`: beside it, or where a package puts it.
pub fn beside(program: &Path) -> Option<PathBuf> {
    let dir = program.parent()?;
    let places = [
        dir.join(NAME),
        // Where both are, the first is that of the same installation: only packages for /usr have the second.
        dir.join("../lib").join(NAME),
        dir.join("../lib64").join(NAME),
        dir.join("../lib/firn").join(NAME),
    ];
    places
        .into_iter()
        .find_map(|place| place.canonicalize().ok())
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
        // From the last to be looked at to the first.
        for place in ["lib/firn", "lib64", "lib", "bin"] {
            let dir = root.path().join(place);
            std::fs::create_dir_all(&dir).unwrap();
            std::fs::write(dir.join(NAME), "").unwrap();
            let expected = dir.join(NAME).canonicalize().unwrap();
            assert_eq!(beside(&program), Some(expected), "{place}");
        }
    }
}
