//! Figures of one run: cases, candidates, samples; as a table and as JSON.
//!
//! Invariants
//! * The first candidate of a case is its baseline; every other one is shown with a ratio to it.
//! * Samples of all candidates of a case were taken in turns, in the same run.

use std::path::Path;

use anyhow::Context;
use serde::Serialize;

use crate::machine::Machine;

/// All figures of one benchmark.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Name of the benchmark: `ingest`, `checkpoint`, …
    pub benchmark: String,
    /// Where it ran.
    pub machine: Machine,
    /// Everything a reader needs to repeat or to doubt it, one sentence each.
    pub notes: Vec<String>,
    /// Figures.
    pub cases: Vec<Case>,
    /// What was aimed at, and what was reached.
    pub goals: Vec<Goal>,
}

/// A limit that a figure was to keep.
#[derive(Debug, Serialize)]
pub struct Goal {
    /// What is compared, with its unit.
    pub name: String,
    /// The limit.
    pub limit: Limit,
    /// What was found: the worst of the cases that it is about.
    pub found: f64,
    /// Whether the limit was kept.
    pub reached: bool,
}

/// On which side of a limit to stay.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// The figure must not be below this.
    Least(f64),
    /// The figure must not be above this.
    Most(f64),
}

impl Limit {
    fn is_kept(self, found: f64) -> bool {
        match self {
            Self::Least(limit) => found >= limit,
            Self::Most(limit) => found <= limit,
        }
    }

    /// Returns the one of `found` that is worst for this limit.
    fn worst(self, found: &[f64]) -> Option<f64> {
        found.iter().copied().reduce(match self {
            Self::Least(_) => f64::min,
            Self::Most(_) => f64::max,
        })
    }
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Least(limit) => write!(f, "at least {limit}"),
            Self::Most(limit) => write!(f, "at most {limit}"),
        }
    }
}

/// Where a case stands in a picture of lines: which picture, and what is written below the point.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Point {
    /// Title of the picture.
    pub plot: String,
    /// Title of its x axis.
    pub axis: &'static str,
    /// Place on it, in words.
    pub x: String,
    /// Points stand in this order, at equal distances.
    pub order: f64,
}

/// One setting, measured for several candidates.
#[derive(Debug, Serialize)]
pub struct Case {
    /// For example `1M writes, chunk 4M, arena 256M`.
    pub name: String,
    /// Baseline first.
    pub candidates: Vec<Candidate>,
    /// Pictures of lines that it is a point of; none: it is drawn as bars.
    pub points: Vec<Point>,
}

impl Case {
    /// Returns the median of a candidate's figure.
    pub fn median(&self, candidate: &str, metric: &str) -> Option<f64> {
        let candidate = self.candidates.iter().find(|c| c.name == candidate)?;
        candidate
            .metrics
            .iter()
            .find(|m| m.name == metric)
            .map(|m| m.median)
    }

    /// Returns the figure of one candidate over that of another.
    pub fn ratio(&self, candidate: &str, to: &str, metric: &str) -> Option<f64> {
        let to = self.median(to, metric).filter(|median| *median > 0.0)?;
        Some(self.median(candidate, metric)? / to)
    }
}

/// One way of doing it.
#[derive(Debug, Serialize)]
pub struct Candidate {
    /// `native`, `sink`, `firn`, …
    pub name: String,
    /// Figures in the order of the table's columns.
    pub metrics: Vec<Metric>,
}

/// One figure with its samples.
#[derive(Debug, Serialize)]
pub struct Metric {
    /// Column title.
    pub name: &'static str,
    /// Unit, shown after the figure.
    pub unit: &'static str,
    /// Median of `samples`.
    pub median: f64,
    /// `median` over the baseline's; absent for the baseline.
    pub ratio: Option<f64>,
    /// Every sample, in the order taken.
    pub samples: Vec<f64>,
}

/// One candidate's figures in one repeat: (column, unit, value).
pub type Sample = Vec<(&'static str, &'static str, f64)>;

impl Report {
    /// Returns an empty report of this machine.
    pub fn new(benchmark: &str) -> Self {
        Self {
            benchmark: benchmark.into(),
            machine: Machine::here(),
            notes: Vec::new(),
            cases: Vec::new(),
            goals: Vec::new(),
        }
    }

    /// Adds a sentence for the reader.
    pub fn note(&mut self, sentence: impl Into<String>) {
        self.notes.push(sentence.into());
    }

    /// Adds a case: per candidate (baseline first) its name and its samples.
    pub fn add(&mut self, name: impl Into<String>, candidates: Vec<(String, Vec<Sample>)>) {
        self.add_points(name, Vec::new(), candidates);
    }

    /// The same, drawn as points of pictures of lines.
    pub fn add_points(
        &mut self,
        name: impl Into<String>,
        points: Vec<Point>,
        candidates: Vec<(String, Vec<Sample>)>,
    ) {
        let mut case = Case {
            name: name.into(),
            candidates: Vec::new(),
            points,
        };
        for (name, samples) in candidates {
            let baseline = case.candidates.first();
            let metrics = metrics(&samples, baseline);
            case.candidates.push(Candidate { name, metrics });
        }
        self.cases.push(case);
    }

    /// Judges the worst of `found`; nothing where nothing was found.
    pub fn judge(&mut self, name: impl Into<String>, limit: Limit, found: &[f64]) {
        if let Some(found) = limit.worst(found) {
            self.goals.push(Goal {
                name: name.into(),
                limit,
                found,
                reached: limit.is_kept(found),
            });
        }
    }

    /// The table for people.
    pub fn print(&self) {
        println!("{} on {}", self.benchmark, self.machine);
        for note in &self.notes {
            println!("  {note}");
        }
        for case in &self.cases {
            println!("\n{}", case.name);
            print!("{}", table(case));
        }
        if !self.goals.is_empty() {
            println!("\ngoals");
        }
        for Goal {
            name,
            limit,
            found,
            reached,
        } in &self.goals
        {
            let verdict = if *reached { "reached" } else { "missed" };
            println!("  {name}: {}, {limit}: {verdict}", figure(*found));
        }
    }

    /// Returns the report as JSON.
    pub fn json(&self) -> anyhow::Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// Writes the report as JSON.
    pub fn write_json(&self, path: &Path) -> anyhow::Result<()> {
        std::fs::write(path, self.json()?)
            .with_context(|| format!("cannot write {}", path.display()))
    }
}

/// Names and units of the figures of these cases, in the order in which candidates have them first.
pub fn columns<'a>(cases: impl Iterator<Item = &'a Case>) -> Vec<(&'static str, &'static str)> {
    let mut seen: Vec<(&str, &str)> = Vec::new();
    for metric in cases.flat_map(|c| &c.candidates).flat_map(|c| &c.metrics) {
        if !seen.contains(&(metric.name, metric.unit)) {
            seen.push((metric.name, metric.unit));
        }
    }
    seen
}

/// Returns the middle one; the mean of the two middle ones for an even number; 0 of none.
pub fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

fn metrics(samples: &[Sample], baseline: Option<&Candidate>) -> Vec<Metric> {
    let columns = samples.first().map_or(&[][..], |first| first.as_slice());
    let metric = |(column, &(name, unit, _)): (usize, &(&'static str, &'static str, f64))| {
        let values: Vec<f64> = samples.iter().map(|sample| sample[column].2).collect();
        let median = median(&values);
        let of = baseline.and_then(|b| b.metrics.iter().find(|m| m.name == name));
        let ratio = of.filter(|m| m.median > 0.0).map(|m| median / m.median);
        Metric {
            name,
            unit,
            median,
            ratio,
            samples: values,
        }
    };
    columns.iter().enumerate().map(metric).collect()
}

fn table(case: &Case) -> String {
    let columns = columns(std::iter::once(case));
    let mut rows = vec![vec!["".to_owned()]];
    rows[0].extend(
        columns
            .iter()
            .map(|(name, unit)| format!("{name} [{unit}]")),
    );
    for candidate in &case.candidates {
        let mut row = vec![candidate.name.clone()];
        row.extend(columns.iter().map(|(name, _)| candidate.cell(name)));
        rows.push(row);
    }
    let width = |column: usize| {
        rows.iter()
            .filter_map(|r| r.get(column))
            .map(|cell| cell.chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    let mut text = String::new();
    for row in &rows {
        for (column, cell) in row.iter().enumerate() {
            let pad = " ".repeat(widths[column] - cell.chars().count());
            // Names to the left, figures to the right.
            match column {
                0 => text += &format!("  {cell}{pad}"),
                _ => text += &format!("   {pad}{cell}"),
            }
        }
        text.push('\n');
    }
    text
}

impl Candidate {
    /// Returns a figure as the table shows it; a dash where this candidate has none.
    fn cell(&self, name: &str) -> String {
        let Some(metric) = self.metrics.iter().find(|metric| metric.name == name) else {
            return "–".into();
        };
        let figure = figure(metric.median);
        match metric.ratio {
            Some(ratio) => format!("{figure} ({ratio:.2}×)"),
            None => figure,
        }
    }
}

/// Three significant digits, never an exponent.
pub fn figure(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        v if v < 0.01 => format!("{value:.4}"),
        v if v < 10.0 => format!("{value:.2}"),
        v if v < 100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_is_between_the_middle_two() {
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), 2.5);
        assert_eq!(median(&[5.0, 1.0, 3.0]), 3.0);
        assert_eq!(median(&[]), 0.0);
    }

    #[test]
    fn every_candidate_after_the_first_has_a_ratio_to_it() {
        let mut report = Report::new("test");
        let sample = |v| vec![vec![("time", "s", v)]];
        report.add(
            "case",
            vec![("native".into(), sample(2.0)), ("firn".into(), sample(1.0))],
        );
        let candidates = &report.cases[0].candidates;
        assert_eq!(candidates[0].metrics[0].ratio, None);
        assert_eq!(candidates[1].metrics[0].ratio, Some(0.5));
        assert_eq!(report.cases[0].ratio("firn", "native", "time"), Some(0.5));
        assert_eq!(report.cases[0].ratio("firn", "nobody", "time"), None);
    }

    #[test]
    fn a_goal_is_judged_by_the_worst_of_its_cases() {
        let mut report = Report::new("test");
        report.judge("rate", Limit::Least(0.9), &[1.2, 0.8, 1.0]);
        report.judge("time", Limit::Most(60.0), &[50.0, 60.0]);
        report.judge("not measured", Limit::Most(1.0), &[]);
        let found: Vec<_> = report
            .goals
            .iter()
            .map(|goal| (goal.found, goal.reached))
            .collect();
        assert_eq!(found, [(0.8, false), (60.0, true)]);
    }
}
