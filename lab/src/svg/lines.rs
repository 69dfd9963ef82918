//! Lines: one panel a plot, two in a row, one line a candidate.

use std::fmt::Write as _;

use super::axis::Axis;
use super::{MARGIN, Page, WIDTH, line, text};
use firn_bench::report::{Case, Point, Report, columns};

const GAP: f64 = 16.0;
const PANEL_WIDTH: f64 = (WIDTH - 2.0 * MARGIN - GAP) / 2.0;
const PANEL_HEIGHT: f64 = 270.0;
/// Room left of the floor for figures, above it for the title, below it for the x axis.
const LEFT: f64 = 44.0;
const TOP: f64 = 30.0;
const BELOW: f64 = 44.0;

pub(super) fn draw(page: &mut Page<'_>) {
    let report = page.report;
    let mut plots: Vec<&Point> = Vec::new();
    for point in report.cases.iter().flat_map(|case| &case.points) {
        if !plots
            .iter()
            .any(|known| known.plot == point.plot && known.axis == point.axis)
        {
            plots.push(point);
        }
    }
    let mut count = 0usize;
    for plot in plots {
        let here = cases_of(report, plot);
        let all = columns(here.iter().map(|(case, _)| *case));
        // The first figure is what the plot is about, with others of its unit; the tables have the rest.
        let Some(&(_, unit)) = all.first() else {
            continue;
        };
        for (metric, _) in all.into_iter().filter(|column| column.1 == unit) {
            let left = MARGIN + (count % 2) as f64 * (PANEL_WIDTH + GAP);
            let top = page.y + (count / 2) as f64 * PANEL_HEIGHT;
            panel(page, plot, &here, (metric, unit), (left, top));
            count += 1;
        }
    }
    page.y += count.div_ceil(2) as f64 * PANEL_HEIGHT;
}

/// The cases that are points of a plot, in their order.
fn cases_of<'a>(report: &'a Report, plot: &Point) -> Vec<(&'a Case, &'a Point)> {
    let is_here = |point: &&Point| point.plot == plot.plot && point.axis == plot.axis;
    let found = report
        .cases
        .iter()
        .filter_map(|case| Some((case, case.points.iter().find(is_here)?)));
    let mut here: Vec<_> = found.collect();
    here.sort_by(|a, b| a.1.order.total_cmp(&b.1.order));
    here
}

fn panel(
    page: &mut Page<'_>,
    plot: &Point,
    here: &[(&Case, &Point)],
    (metric, unit): (&str, &str),
    (left, top): (f64, f64),
) {
    let report = page.report;
    let floor = top + PANEL_HEIGHT - BELOW;
    let height = PANEL_HEIGHT - BELOW - TOP;
    let from = left + LEFT;
    let to = left + PANEL_WIDTH;
    let figures = here.iter().flat_map(|(case, _)| &case.candidates);
    let figures = figures.filter_map(|c| c.metrics.iter().find(|m| m.name == metric));
    let axis = Axis::of(&figures.map(|m| m.median).collect::<Vec<f64>>(), false);
    text(
        &mut page.body,
        left,
        top + 14.0,
        "start",
        12,
        &format!("{}: {metric} [{unit}]", plot.plot),
    );
    axis.draw(&mut page.body, (from, to), (floor, height));
    let step = (to - from) / here.len() as f64;
    let x = |index: usize| from + (index as f64 + 0.5) * step;
    for (index, (_, point)) in here.iter().enumerate() {
        text(
            &mut page.body,
            x(index),
            floor + 15.0,
            "middle",
            10,
            &point.x,
        );
    }
    text(
        &mut page.body,
        (from + to) / 2.0,
        floor + 31.0,
        "middle",
        11,
        plot.axis,
    );
    line(&mut page.body, (from, floor), (to, floor), "#444444");
    for name in super::candidate_names(report) {
        let points: Vec<(f64, f64)> = here
            .iter()
            .enumerate()
            .filter_map(|(index, (case, _))| Some((x(index), case.median(name, metric)?)))
            .map(|(x, value)| (x, floor - height * axis.share(value)))
            .collect();
        let colour = page.colour(name);
        polyline(&mut page.body, &points, colour);
    }
}

fn polyline(out: &mut String, points: &[(f64, f64)], colour: &str) {
    let mut path = String::new();
    for (x, y) in points {
        let _ = write!(path, "{x:.1},{y:.1} ");
        let _ = writeln!(
            out,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>"
        );
    }
    let _ = writeln!(
        out,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.8\"/>",
        path.trim_end()
    );
}
