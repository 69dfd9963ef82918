//! Grouped bars: one panel a figure, the baseline first in each group, ratios above the others.

use super::axis::Axis;
use super::{LETTER, MARGIN, Page, WIDTH, line, rect, text};
use firn_bench::report::{Case, Metric, columns, figure};

const LEFT: f64 = MARGIN + 44.0;
const TITLE: f64 = 30.0;
const HEIGHT: f64 = 170.0;
/// Room above the highest bar for its label.
const LABEL: f64 = 12.0;
/// A label of six characters has room above its bar.
const BAR_MIN: f64 = 36.0;
const BAR_MAX: f64 = 60.0;
const GROUP_GAP: f64 = 18.0;
const NAME_LINE: f64 = 13.0;

pub(super) fn draw(page: &mut Page<'_>) {
    let report = page.report;
    let cases: Vec<&Case> = report
        .cases
        .iter()
        .filter(|case| case.points.is_empty())
        .collect();
    for (name, unit) in columns(cases.iter().copied()) {
        let is_it = move |m: &&Metric| m.name == name && m.unit == unit;
        let has = |case: &&&Case| {
            case.candidates
                .iter()
                .any(|c| c.metrics.iter().any(|m| is_it(&m)))
        };
        let here: Vec<&Case> = cases.iter().filter(has).copied().collect();
        let figures = here.iter().flat_map(|case| &case.candidates);
        let figures = figures
            .filter_map(|c| c.metrics.iter().find(is_it))
            .map(|m| m.median);
        let axis = Axis::of(&figures.collect::<Vec<f64>>(), true);
        text(
            &mut page.body,
            MARGIN,
            page.y + 18.0,
            "start",
            13,
            &format!("{name} [{unit}]"),
        );
        page.y += TITLE;
        for row in rows(&here) {
            draw_row(page, row, &axis, &is_it);
        }
    }
}

/// As many cases in a row as fit with bars that are wide enough for their labels.
fn rows<'a, 'b>(cases: &'b [&'a Case]) -> Vec<&'b [&'a Case]> {
    let mut rows = Vec::new();
    let mut from = 0;
    let mut width = 0.0;
    for (index, case) in cases.iter().enumerate() {
        let more = case.candidates.len() as f64 * BAR_MIN + GROUP_GAP;
        if index > from && width + more > WIDTH - LEFT - MARGIN {
            rows.push(&cases[from..index]);
            (from, width) = (index, 0.0);
        }
        width += more;
    }
    if from < cases.len() {
        rows.push(&cases[from..]);
    }
    rows
}

fn draw_row(page: &mut Page<'_>, row: &[&Case], axis: &Axis, is_it: &impl Fn(&&Metric) -> bool) {
    let floor = page.y + LABEL + HEIGHT;
    axis.draw(&mut page.body, (LEFT, WIDTH - MARGIN), (floor, HEIGHT));
    let bars: usize = row.iter().map(|case| case.candidates.len()).sum();
    let room = WIDTH - LEFT - MARGIN - GROUP_GAP * row.len() as f64;
    let width = (room / bars.max(1) as f64).min(BAR_MAX);
    let mut left = LEFT + GROUP_GAP / 2.0;
    let mut lines = 1;
    for case in row {
        for (place, candidate) in case.candidates.iter().enumerate() {
            let Some(metric) = candidate.metrics.iter().find(is_it) else {
                continue;
            };
            let x = left + place as f64 * width;
            let height = HEIGHT * axis.share(metric.median);
            let colour = page.colour(&candidate.name);
            rect(
                &mut page.body,
                (x, floor - height),
                (width - 2.0, height),
                colour,
            );
            let label = match metric.ratio {
                Some(ratio) => format!("{}×", figure(ratio)),
                None => figure(metric.median),
            };
            text(
                &mut page.body,
                x + width / 2.0 - 1.0,
                floor - height - 4.0,
                "middle",
                9,
                &label,
            );
        }
        let group = case.candidates.len() as f64 * width;
        let name = wrapped(
            &case.name,
            ((group + GROUP_GAP - 4.0) / (LETTER * 0.95)) as usize,
        );
        for (index, part) in name.iter().enumerate() {
            let y = floor + 15.0 + index as f64 * NAME_LINE;
            text(
                &mut page.body,
                left + group / 2.0 - 1.0,
                y,
                "middle",
                10,
                part,
            );
        }
        lines = lines.max(name.len());
        left += group + GROUP_GAP;
    }
    line(
        &mut page.body,
        (LEFT, floor),
        (WIDTH - MARGIN, floor),
        "#444444",
    );
    page.y = floor + 18.0 + lines as f64 * NAME_LINE;
}

/// Words in lines of at most `most` characters, where a word is no longer than that.
fn wrapped(name: &str, most: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in name.split(' ') {
        match lines.last_mut() {
            Some(last) if last.chars().count() + 1 + word.chars().count() <= most => {
                last.push(' ');
                last.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}
