//! A picture of a report: one panel per figure, grouped bars, the baseline first in each group.
//!
//! Written by hand because bars with labels are a page of code, and a drawing crate would weigh more
//! than the rest of the benchmark.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context;

use crate::report::{Metric, Report, figure};

const WIDTH: f64 = 960.0;
const PANEL_HEIGHT: f64 = 260.0;
const MARGIN_LEFT: f64 = 60.0;
const MARGIN_TOP: f64 = 56.0;
/// Room below the bars for slanted case names.
const LABELS_HEIGHT: f64 = 90.0;
/// Distinct for colour-blind readers too (Okabe and Ito's palette).
const COLOURS: [&str; 6] = ["#999999", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9"];

/// Writes the picture of `report` to `path`.
pub fn write(report: &Report, path: &Path) -> anyhow::Result<()> {
    std::fs::write(path, draw(report)).with_context(|| format!("cannot write {}", path.display()))
}

/// The picture as text.
pub fn draw(report: &Report) -> String {
    let columns = columns(report);
    let panel = PANEL_HEIGHT + LABELS_HEIGHT;
    let height = MARGIN_TOP + columns.len() as f64 * panel + 10.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let title = format!("firn bench {}", report.benchmark);
    text(&mut out, 10.0, 18.0, "start", 15, &title);
    text(&mut out, 10.0, 34.0, "start", 11, &report.machine.to_string());
    legend(&mut out, report);
    for (index, (name, unit)) in columns.iter().enumerate() {
        draw_panel(&mut out, report, name, unit, MARGIN_TOP + index as f64 * panel);
    }
    out + "</svg>\n"
}

fn columns(report: &Report) -> Vec<(&'static str, &'static str)> {
    let mut seen: Vec<(&str, &str)> = Vec::new();
    let metrics = report.cases.iter().flat_map(|c| &c.candidates).flat_map(|c| &c.metrics);
    for metric in metrics {
        if !seen.contains(&(metric.name, metric.unit)) {
            seen.push((metric.name, metric.unit));
        }
    }
    seen
}

fn candidate_names(report: &Report) -> Vec<&str> {
    let mut seen: Vec<&str> = Vec::new();
    for candidate in report.cases.iter().flat_map(|c| &c.candidates) {
        if !seen.contains(&candidate.name.as_str()) {
            seen.push(&candidate.name);
        }
    }
    seen
}

fn colour(report: &Report, candidate: &str) -> &'static str {
    let index = candidate_names(report).iter().position(|name| *name == candidate);
    COLOURS[index.unwrap_or(0) % COLOURS.len()]
}

fn legend(out: &mut String, report: &Report) {
    let mut x = 10.0;
    for name in candidate_names(report) {
        bar(out, x, 42.0, 10.0, 10.0, colour(report, name));
        text(out, x + 14.0, 51.0, "start", 11, name);
        x += 30.0 + 7.0 * name.chars().count() as f64;
    }
}

fn draw_panel(out: &mut String, report: &Report, name: &str, unit: &str, top: f64) {
    let floor = top + PANEL_HEIGHT;
    let room = PANEL_HEIGHT - 44.0;
    let found = |m: &&Metric| m.name == name && m.unit == unit;
    let medians = report.cases.iter().flat_map(|c| &c.candidates);
    let peak = medians.filter_map(|c| c.metrics.iter().find(found)).map(|m| m.median);
    let peak = peak.fold(f64::MIN_POSITIVE, f64::max);
    text(out, MARGIN_LEFT - 50.0, top + 20.0, "start", 13, &format!("{name} [{unit}]"));
    let _ = writeln!(
        out,
        "<line x1=\"{MARGIN_LEFT}\" y1=\"{floor}\" x2=\"{WIDTH}\" y2=\"{floor}\" stroke=\"#444\"/>"
    );
    let group = (WIDTH - MARGIN_LEFT - 10.0) / report.cases.len().max(1) as f64;
    for (index, case) in report.cases.iter().enumerate() {
        let left = MARGIN_LEFT + index as f64 * group;
        let width = (group * 0.8 / case.candidates.len().max(1) as f64).min(60.0);
        for (place, candidate) in case.candidates.iter().enumerate() {
            let Some(metric) = candidate.metrics.iter().find(found) else { continue };
            let (x, height) = (left + place as f64 * width, room * metric.median / peak);
            bar(out, x, floor - height, width - 2.0, height, colour(report, &candidate.name));
            let label = match metric.ratio {
                Some(ratio) => format!("{ratio:.2}×"),
                None => figure(metric.median),
            };
            text(out, x + width / 2.0, floor - height - 4.0, "middle", 9, &label);
        }
        slanted(out, left + 6.0, floor + 14.0, &case.name);
    }
}

fn bar(out: &mut String, x: f64, y: f64, width: f64, height: f64, colour: &str) {
    let _ = writeln!(
        out,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{colour}\"/>"
    );
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, size: u32, content: &str) {
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\">{}</text>",
        escape(content)
    );
}

fn slanted(out: &mut String, x: f64, y: f64, content: &str) {
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"10\" transform=\"rotate(22 {x:.1} {y:.1})\">{}</text>",
        escape(content)
    );
}

fn escape(content: &str) -> String {
    content.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
