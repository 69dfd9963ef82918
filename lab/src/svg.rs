//! A picture of a report: lines for cases that are points of a plot, grouped bars for the others.
//!
//! Written by hand: `plotters` is the one crate that draws such pictures without a browser, and its latest release
//! (0.3.7, 2024) has one maintainer with little time (its issues 345 and 680). What it would take over is the ticks; the
//! layout of legend, rows of bars and wrapped names would still be here.
//!
//! Invariants
//! * A candidate has one colour throughout; the first candidate of the first case is grey.
//! * Nothing overlaps: a row of bars takes as many cases as have room for their labels, the rest follow below.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context;

use firn_bench::report::Report;

mod axis;
mod bars;
mod lines;

const WIDTH: f64 = 960.0;
const MARGIN: f64 = 12.0;
/// Height of the lines of text at the top.
const HEAD: f64 = 44.0;
const LEGEND_LINE: f64 = 18.0;
/// Mean width of a letter of the 11 px font.
const LETTER: f64 = 6.1;
/// Distinct for colour-blind readers too (Okabe and Ito's palette).
const COLOURS: [&str; 8] = [
    "#888888", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#000000",
];

/// Writes the picture of `report` to `path`.
pub fn write(report: &Report, path: &Path) -> anyhow::Result<()> {
    std::fs::write(path, draw(report)).with_context(|| format!("cannot write {}", path.display()))
}

/// The picture as text.
pub fn draw(report: &Report) -> String {
    let mut page = Page {
        report,
        body: String::new(),
        y: HEAD,
    };
    legend(&mut page);
    lines::draw(&mut page);
    bars::draw(&mut page);
    let height = page.y;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height:.0}\" width=\"{WIDTH}\" \
         height=\"{height:.0}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    text(
        &mut out,
        MARGIN,
        19.0,
        "start",
        15,
        &format!("firn-lab {}", report.benchmark),
    );
    text(
        &mut out,
        MARGIN,
        36.0,
        "start",
        11,
        &report.machine.to_string(),
    );
    out + &page.body + "</svg>\n"
}

/// What is drawn so far, and where it ends.
struct Page<'a> {
    report: &'a Report,
    body: String,
    y: f64,
}

impl Page<'_> {
    fn colour(&self, candidate: &str) -> &'static str {
        let index = candidate_names(self.report)
            .iter()
            .position(|name| *name == candidate);
        COLOURS[index.unwrap_or(0) % COLOURS.len()]
    }
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

fn legend(page: &mut Page<'_>) {
    let mut x = MARGIN;
    for name in candidate_names(page.report) {
        let width = 26.0 + LETTER * name.chars().count() as f64;
        if x + width > WIDTH - MARGIN {
            (x, page.y) = (MARGIN, page.y + LEGEND_LINE);
        }
        let colour = page.colour(name);
        rect(&mut page.body, (x, page.y), (10.0, 10.0), colour);
        text(&mut page.body, x + 14.0, page.y + 9.0, "start", 11, name);
        x += width;
    }
    page.y += LEGEND_LINE;
}

fn rect(out: &mut String, (x, y): (f64, f64), (width, height): (f64, f64), colour: &str) {
    let _ = writeln!(
        out,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{colour}\"/>"
    );
}

fn line(out: &mut String, (x1, y1): (f64, f64), (x2, y2): (f64, f64), colour: &str) {
    let _ = writeln!(
        out,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\"/>"
    );
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, size: u32, content: &str) {
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\">{}</text>",
        escape(content)
    );
}

fn escape(content: &str) -> String {
    content
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_bench::report::Point;

    fn report() -> Report {
        let mut report = Report::new("test");
        let sample = |v| vec![vec![("throughput", "GiB/s", v)]];
        for (x, rate) in [(2.0, 4.0), (1.0, 0.0), (4.0, 8.0)] {
            let point = Point {
                plot: "a <plot>".into(),
                axis: "processes",
                x: x.to_string(),
                order: x,
            };
            let candidates = vec![
                ("one".into(), sample(rate)),
                ("other".into(), sample(rate / 2.0)),
            ];
            report.add_points(format!("{x} processes"), vec![point], candidates);
        }
        for case in 0..30 {
            report.add(
                format!("a case with a long name, {case}"),
                vec![("one".into(), sample(1.0))],
            );
        }
        report
    }

    #[test]
    fn a_picture_has_every_name_and_no_number_that_is_none() {
        let drawn = draw(&report());
        for wanted in [
            "a &lt;plot&gt;",
            "processes",
            "one",
            "other",
            "throughput",
            "name,",
            "polyline",
        ] {
            assert!(drawn.contains(wanted), "{wanted}");
        }
        assert!(!drawn.contains("NaN") && !drawn.contains("inf"), "{drawn}");
    }

    #[test]
    fn nothing_is_drawn_outside_of_the_picture() {
        let drawn = draw(&report());
        let number = |tag: &str, key: &str| -> Option<f64> {
            tag.split_once(&format!(" {key}=\""))?
                .1
                .split_once('"')?
                .0
                .parse()
                .ok()
        };
        let head = drawn.lines().next().unwrap();
        let width = number(head, "width").unwrap();
        let height = number(head, "height").unwrap();
        for tag in drawn.lines().skip(2) {
            let x = number(tag, "x").unwrap_or(0.0) + number(tag, "width").unwrap_or(0.0);
            let y = number(tag, "y").unwrap_or(0.0) + number(tag, "height").unwrap_or(0.0);
            assert!(
                (0.0..=width).contains(&x) && (0.0..=height).contains(&y),
                "{tag}"
            );
        }
    }
}
