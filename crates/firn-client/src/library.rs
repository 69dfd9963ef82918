//! The preload library, as a file.

use std::path::{Path, PathBuf};

/// Its file name.
pub const NAME: &str = "libfirn_preload.so";

/// The library that belongs to `program`: beside it, or where a package puts it.
pub fn beside(program: &Path) -> Option<PathBuf> {
    let dir = program.parent()?;
    let places = [
        dir.join(NAME),
        dir.join("../lib").join(NAME),
        dir.join("../lib/firn").join(NAME),
    ];
    places
        .into_iter()
        .find_map(|place| place.canonicalize().ok())
}
