//! Snapshot tests: texts that tests compare with files in `crates/firn/snapshots/`. `FIRN_RECORD=1` writes the files
//! anew.

use std::path::Path;

/// Compares a text with the snapshot of this name, or writes the snapshot with `FIRN_RECORD=1`.
pub fn compare(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("snapshots")
        .join(name);
    if std::env::var_os("FIRN_RECORD").is_some() {
        std::fs::create_dir_all(path.parent().expect("a directory")).expect("make the directory");
        std::fs::write(&path, text).expect("record");
        return;
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        text == expected,
        "{name} differs from what was recorded (FIRN_RECORD=1 records it anew).\n--- is:\n{text}\n--- was:\n{expected}"
    );
}
