//! README.md and docs/GUIDE.md: every command that a newcomer types, as it stands, and what is seen.
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
