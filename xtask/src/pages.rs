//! Pages that are made from code: docs/CONFIGURATION.md and the man pages.
//!
//! The man pages are not committed: `firn man --dir DIR` makes them, and packaging calls that.

use std::path::Path;

use anyhow::{Context, Result};

/// Writes docs/CONFIGURATION.md and, below target/man, the man pages.
pub fn run() -> Result<()> {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let page = root.join("docs/CONFIGURATION.md");
    std::fs::write(&page, firn_config::configuration_page())
        .with_context(|| format!("write {}", page.display()))?;
    eprintln!("xtask: wrote docs/CONFIGURATION.md");

    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = std::process::Command::new(cargo)
        .args([
            "run",
            "-q",
            "-p",
            "firn",
            "--",
            "man",
            "--dir",
            "target/man",
        ])
        .current_dir(root)
        .status()
        .context("run `firn man`")?;
    anyhow::ensure!(
        status.success(),
        "`firn man --dir target/man` failed: {status}"
    );
    eprintln!("xtask: wrote the man pages to target/man");
    Ok(())
}
