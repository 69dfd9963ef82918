//! README.md, docs/GUIDE.md and docs/features: every command that a newcomer types, as it stands, and what is seen.
//!
//! Each page is typed into one shell, in a new home directory beside which there is nothing but a clone of the
//! repository at `~/firn`. How blocks are read and compared: `firn_tests::page`.

use std::path::Path;

use firn_tests::Sandbox;
use firn_tests::page::Page;
use firn_tests::sandbox::{is_mounted, preload_library};

fn type_page(name: &str, page: &str) {
    preload_library();
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let repository = repository.canonicalize().expect("the repository");
    let sandbox = Sandbox::new(name);
    std::os::unix::fs::symlink(&repository, sandbox.join("firn")).expect("a clone");
    Page::read(&repository.join(page)).type_commands(&sandbox);
    // A reader that has typed all of a page has cleaned up.
    assert!(!is_mounted(&sandbox.join("ckpt")), "{page} leaves a mount");
    assert_eq!(sandbox.arenas(), Vec::<std::path::PathBuf>::new());
}

#[test]
fn the_commands_of_the_readme_show_what_it_says() {
    type_page("readme", "README.md");
}

#[test]
fn the_commands_of_the_guide_show_what_it_says() {
    type_page("guide", "docs/GUIDE.md");
}

/// Pages of features, which have their commands typed below.
const FEATURES: [&str; 10] = [
    "backups",
    "copies",
    "hosts",
    "memory",
    "placement",
    "rules",
    "shared-files",
    "stub-trees",
    "transactions",
    "watching",
];

#[test]
fn the_commands_of_each_feature_show_what_its_page_says() {
    for name in FEATURES {
        type_page(name, &format!("docs/features/{name}.md"));
    }
}

#[test]
fn the_commands_of_operations_show_what_it_says() {
    type_page("operations", "docs/OPERATIONS.md");
}

#[test]
fn each_page_of_a_feature_is_typed() {
    let pages = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/features");
    let entries = std::fs::read_dir(pages).expect("the pages").flatten();
    let mut names: Vec<_> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    assert_eq!(names, FEATURES.map(|name| format!("{name}.md")));
}
