//! Generates the pages that come from tables in the code: docs/CONFIGURATION.md, docs/METRICS.md and the man pages.
//!
//! The man pages are not committed. `firn man --dir DIR` writes them, also for packages.

use std::path::Path;

use anyhow::{Context, Result};
use firn_protocol::figures::{Figures, Kind};
use firn_protocol::{Scrape, Status};

/// Writes docs/CONFIGURATION.md and docs/METRICS.md, and the man pages below target/man.
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

/// The page of metrics.
const METRICS: &str = "docs/METRICS.md";

/// The text before the table of metrics, and the head of the table.
const METRICS_HEAD: &str = "\
# Metrics

<!-- Generated from the table in crates/firn-protocol/src/status.rs by `cargo xtask pages`. Edit the table. -->

`firn status --prometheus` prints a mount's figures as metrics, `firn status --json` as fields. A name ends with the
unit; 1 means yes. A figure that a mount does not have is absent.

* A `_total` starts at 0 when firnd attaches, and only grows. A *histogram* has `_bucket`, `_sum` and `_count`, in JSON
  `bounds`, `sum` and `counts`; a count of JSON does not include lower buckets. All other metrics are gauges. A rate is
  an average over the last seconds.
* In JSON `firn_lane_held_bytes` is `.lanes[].held_bytes`, `firn_spill_moved_bytes_total` is `.spill.moved_bytes`.
  `firn_up` is for collectors alone.
* All samples have the labels `host`, `backing` and `mount_point`; those of a lane `lane` and `path`, of a NUMA node
  `numa_node`, of a transaction `scope`, of an error `error`, `path` and `errno`.
* The label `state` has one sample for each state, 1 for the present one and else 0; `kind` has one for each kind.

| metric | more labels | says |
|---|---|---|
";

/// Labels that the text before the table explains, so that the rows do not repeat them.
const COMMON_LABELS: [&str; 9] = [
    "backing",
    "host",
    "mount_point",
    "lane",
    "path",
    "numa_node",
    "scope",
    "error",
    "errno",
];

/// Returns the text of docs/METRICS.md, with a row for each figure of a mount's status and of the exporter.
fn metrics_page() -> String {
    let mut page = METRICS_HEAD.to_owned();
    let figures = Figures::from_statuses([&Status::example()]);
    for figure in figures
        .with(Figures::from_statuses([&Scrape::default()]))
        .iter()
    {
        let total = if matches!(figure.kind, Kind::Counter) {
            "_total"
        } else {
            ""
        };
        let keys = figure.samples[0].labels.iter().map(|(key, _)| *key);
        let mut labels: Vec<String> = keys
            .filter(|key| !COMMON_LABELS.contains(key))
            .map(|key| format!("`{key}`"))
            .collect();
        if matches!(figure.kind, Kind::Histogram) {
            labels.push("histogram".to_owned());
        }
        page += &format!(
            "| `firn_{}{total}` | {} | {} |\n",
            figure.name,
            labels.join(" "),
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
