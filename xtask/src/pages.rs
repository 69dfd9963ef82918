//! Pages that are made from code: docs/CONFIGURATION.md, docs/METRICS.md and the man pages.
//!
//! The man pages are not committed: `firn man --dir DIR` makes them, and packaging calls that.

use std::path::Path;

use anyhow::{Context, Result};
use firn_protocol::figures::{Figure, Figures, Kind};
use firn_protocol::{Scrape, Status};

/// Writes docs/CONFIGURATION.md, docs/METRICS.md and, below target/man, the man pages.
pub fn run() -> Result<()> {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let pages = [
        ("docs/CONFIGURATION.md", firn_config::configuration_page()),
        (METRICS, metrics_page()),
    ];
    for (name, text) in pages {
        let page = root.join(name);
        std::fs::write(&page, text).with_context(|| format!("write {}", page.display()))?;
        eprintln!("xtask: wrote {name}");
    }

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

const METRICS: &str = "docs/METRICS.md";

const METRICS_HEAD: &str = "\
# Metrics

<!-- Generated from the table in crates/firn-protocol/src/status.rs by `cargo xtask pages`. Edit the table. -->

The figures of a mount: `firn status --prometheus` prints them as metrics, `firn status --json` with what they are about.
A counter or a histogram counts from the attach. A histogram is in JSON an object with `bounds`, `counts` (of each bound, not
added up, and of what is above the last one) and `sum`, and as metrics `_bucket`, `_sum` and `_count`. The unit is last in a name; a yes is 1, a no 0. A figure that a mount does not have,
such as one of a spill file, is absent.

Each sample has the labels `host`, `backing` and `mount_point`. A metric with the label `state` has a sample for each state: 1 for
the one that is. The value of `kind` is what is counted.

| metric | kind | more labels | in JSON | says |
|---|---|---|---|---|
";

/// Where a figure is in JSON; the one of collectors is nowhere.
fn json_of(figure: &Figure) -> String {
    if figure.name == "up" {
        String::new()
    } else {
        format!("`{}`", figure.json)
    }
}

/// docs/METRICS.md, made from the table.
fn metrics_page() -> String {
    let mut page = METRICS_HEAD.to_owned();
    let figures = Figures::of([&Status::example()]);
    for figure in figures.with(Figures::of([&Scrape::default()])).iter() {
        let (total, kind) = match figure.kind {
            Kind::Counter => ("_total", "counter"),
            Kind::Gauge => ("", "gauge"),
            Kind::Histogram => ("", "histogram"),
        };
        let keys = figure.samples[0].labels.iter().map(|(key, _)| *key);
        let labels: Vec<String> = keys
            .filter(|key| !["backing", "host", "mount_point"].contains(key))
            .map(|key| format!("`{key}`"))
            .collect();
        page += &format!(
            "| `firn_{}{total}` | {kind} | {} | {} | {} |\n",
            figure.name,
            labels.join(" "),
            json_of(figure),
            figure.help
        );
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_page_of_metrics_is_current() {
        let path = format!("{}/../{METRICS}", env!("CARGO_MANIFEST_DIR"));
        let committed = std::fs::read_to_string(path).expect(METRICS);
        assert!(
            committed == metrics_page(),
            "{METRICS} is stale: run `cargo xtask pages`"
        );
    }
}
