//! The report of one run of a benchmark, which is printed as a table and written as JSON.
//!
//! Terms
//! * case: one setting of the benchmark, measured for several candidates.
//! * candidate: one way to do the work, such as `native` or `firn`. The first candidate of a case is the baseline.
//! * metric: one figure of a candidate, such as its throughput.
//! * sample: the metrics of a candidate in one repeat.
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
    /// The machine on which it ran.
    pub machine: Machine,
    /// Sentences that describe the run, so that a reader can repeat it and judge its figures.
    pub notes: Vec<String>,
    /// The figures.
    pub cases: Vec<Case>,
    /// The goals of the benchmark, and whether they were reached.
    pub goals: Vec<Goal>,
}

/// A limit for a figure, and the figure that was found.
#[derive(Debug, Serialize)]
pub struct Goal {
    /// What is compared, with its unit.
    pub name: String,
    /// The limit.
    pub limit: Limit,
    /// The figure found: the worst of all cases to which the goal applies.
    pub found: f64,
    /// Whether the figure is within the limit.
    pub reached: bool,
}

/// A lower or upper limit for a figure.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// The figure must not be below this.
    Least(f64),
    /// The figure must not be above this.
    Most(f64),
}

impl Limit {
    /// Returns whether a figure is within the limit.
    fn is_kept(self, found: f64) -> bool {
        match self {
            Self::Least(limit) => found >= limit,
            Self::Most(limit) => found <= limit,
        }
    }

    /// Returns the figure of `found` that is worst for this limit. Returns `None` if `found` is empty.
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

/// The position of a case in a line chart.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Point {
    /// Title of the chart.
    pub plot: String,
    /// Title of the x axis of the chart.
    pub axis: &'static str,
    /// Label of the point on the x axis.
    pub x: String,
    /// Sort key of the point. The points of a chart have equal distances.
    pub order: f64,
}

/// One setting, measured for several candidates.
#[derive(Debug, Serialize)]
pub struct Case {
    /// Name of the setting, for example `1M writes, chunk 4M, arena 256M`.
    pub name: String,
    /// The candidates. The first is the baseline.
    pub candidates: Vec<Candidate>,
    /// The points of the case in line charts. If there are none, the case is drawn as bars.
    pub points: Vec<Point>,
}

impl Case {
    /// Returns the median of a metric of a candidate. Returns `None` if the candidate or the metric does not exist.
    pub fn median(&self, candidate: &str, metric: &str) -> Option<f64> {
        let candidate = self.candidates.iter().find(|c| c.name == candidate)?;
        candidate
            .metrics
            .iter()
            .find(|m| m.name == metric)
            .map(|m| m.median)
    }

    /// Returns the median of a metric of one candidate divided by that of another. Returns `None` if one of them does
    /// not exist or the divisor is 0.
    pub fn ratio(&self, candidate: &str, to: &str, metric: &str) -> Option<f64> {
        let to = self.median(to, metric).filter(|median| *median > 0.0)?;
        Some(self.median(candidate, metric)? / to)
    }
}

/// One way to do the work, with its figures.
#[derive(Debug, Serialize)]
pub struct Candidate {
    /// Name of the candidate: `native`, `sink`, `firn`, …
    pub name: String,
    /// Its metrics in the order of the columns of the table.
    pub metrics: Vec<Metric>,
}

/// One metric of a candidate with all its values.
#[derive(Debug, Serialize)]
pub struct Metric {
    /// Column title.
    pub name: &'static str,
    /// Unit, shown after the figure.
    pub unit: &'static str,
    /// Median of `samples`.
    pub median: f64,
    /// `median` divided by the median of the baseline. `None` for the baseline.
    pub ratio: Option<f64>,
    /// The values of all repeats, in the order in which they were measured.
    pub samples: Vec<f64>,
}

/// The metrics of one candidate in one repeat. Each metric is its name, its unit and its value.
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

    /// Adds a case that is drawn as bars. `candidates` contains the name and the samples of each candidate; the
    /// baseline comes first.
    pub fn add(&mut self, name: impl Into<String>, candidates: Vec<(String, Vec<Sample>)>) {
        self.add_points(name, Vec::new(), candidates);
    }

    /// Adds a case as [`Report::add`] does. The case is drawn as `points` of line charts.
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
            let metrics = metrics_of(&samples, baseline);
            case.candidates.push(Candidate { name, metrics });
        }
        self.cases.push(case);
    }

    /// Adds a goal for the worst figure of `found`. Adds nothing if `found` is empty.
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

    /// Prints the report as a table.
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

    /// Writes the report as JSON to a file.
    pub fn write_json(&self, path: &Path) -> anyhow::Result<()> {
        std::fs::write(path, self.json()?)
            .with_context(|| format!("cannot write {}", path.display()))
    }
}

/// Returns the name and the unit of each metric of these cases, in the order in which the metrics appear.
pub fn columns<'a>(cases: impl Iterator<Item = &'a Case>) -> Vec<(&'static str, &'static str)> {
    let mut seen: Vec<(&str, &str)> = Vec::new();
    for metric in cases.flat_map(|c| &c.candidates).flat_map(|c| &c.metrics) {
        if !seen.contains(&(metric.name, metric.unit)) {
            seen.push((metric.name, metric.unit));
        }
    }
    seen
}

/// Returns the median of the values. For an even number of values, this is the mean of the two in the middle. Returns 0
/// if there are no values.
pub fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

/// Returns the metrics of a candidate from its samples. All samples have the same metrics in the same order.
fn metrics_of(samples: &[Sample], baseline: Option<&Candidate>) -> Vec<Metric> {
    let Some(first) = samples.first() else {
        return Vec::new();
    };
    let mut metrics = Vec::new();
    for (column, &(name, unit, _)) in first.iter().enumerate() {
        let values: Vec<f64> = samples.iter().map(|sample| sample[column].2).collect();
        let median = median(&values);
        let of_baseline = baseline.and_then(|b| b.metrics.iter().find(|m| m.name == name));
        let ratio = of_baseline
            .filter(|of_baseline| of_baseline.median > 0.0)
            .map(|of_baseline| median / of_baseline.median);
        metrics.push(Metric {
            name,
            unit,
            median,
            ratio,
            samples: values,
        });
    }
    metrics
}

/// Returns the table of a case: one row for each candidate, one column for each metric.
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
    /// Returns the cell of a metric in the table. Returns a dash if the candidate does not have the metric.
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

/// Returns a number with about three significant digits and without an exponent.
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
