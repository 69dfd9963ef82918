//! Which figures there are: a table, from which come the subcommands of figures and what `all` does.
//!
//! A subcommand of a figure is a short name for an experiment with arguments; more arguments may follow it.

use std::ffi::OsString;
use std::fmt::Write as _;

/// A figure or a table that is made anew.
pub struct Figure {
    /// Subcommand, and the file name of its report and its picture.
    pub name: &'static str,
    /// The paper and the figure's number there; what the laboratory adds has none.
    pub paper: &'static str,
    /// The experiment and its arguments.
    pub experiment: &'static [&'static str],
}

const fn figure(
    name: &'static str,
    paper: &'static str,
    experiment: &'static [&'static str],
) -> Figure {
    Figure {
        name,
        paper,
        experiment,
    }
}

/// In the order of the papers.
pub const FIGURES: [Figure; 18] = [
    figure("crfs-figure-5", "CRFS, figure 5", &["ingest"]),
    figure("crfs-table-1", "CRFS, table I", &["checkpoint"]),
    figure("cruise-figures-6-7", "CRUISE, figures 6 and 7", &["memory"]),
    figure("cruise-table-3", "CRUISE, table 3", &["spill"]),
    figure("cruise-restart", "CRUISE, added", &["restart"]),
    figure(
        "cprfs-figure-6",
        "CprFS, figure 6",
        &["commit", "--parts", "records"],
    ),
    figure(
        "cprfs-figure-6-network",
        "CprFS, figure 6",
        &["commit", "--backing", "sshfs-async"],
    ),
    figure("cprfs-figure-7", "CprFS, figure 7", &["conflict"]),
    figure("cprfs-application", "CprFS, added", &["app"]),
    figure(
        "orchestration-figure-2",
        "orchestration, figures 2a and 2b",
        &["orchestrate", "--figure", "2a,2b"],
    ),
    figure(
        "orchestration-figure-3",
        "orchestration, figures 3a and 3b",
        &["orchestrate", "--figure", "3a,3b"],
    ),
    figure(
        "orchestration-in-step",
        "orchestration, figure 3a",
        &["orchestrate", "--figure", "3a-in-step"],
    ),
    figure(
        "orchestration-restart",
        "orchestration, its last conjecture",
        &["orchestrate", "--figure", "restart"],
    ),
    figure(
        "orchestration-added",
        "orchestration, added",
        &["orchestrate", "--figure", "tokens,local"],
    ),
    figure(
        "orchestration-moosefs",
        "orchestration, added",
        &["orchestrate", "--figure", "moosefs"],
    ),
    figure(
        "log-figures-3-6",
        "log-based writing, figures 3 to 6",
        &["shared"],
    ),
    figure("alternatives", "none", &["alternatives"]),
    figure("partner", "none", &["partner"]),
];

/// A subcommand of a figure, replaced by its experiment and arguments; anything else as it is.
pub fn expand(mut args: Vec<OsString>) -> Vec<OsString> {
    let named = |name: &OsString| FIGURES.iter().find(|figure| name == figure.name);
    if let Some(figure) = args.get(1).and_then(named) {
        args.splice(1..2, figure.experiment.iter().map(OsString::from));
    }
    args
}

/// The table, for `--help`.
pub fn help() -> String {
    let mut text = "Figures, each a subcommand too:\n".to_owned();
    for figure in &FIGURES {
        let experiment = figure.experiment.join(" ");
        let Figure { name, paper, .. } = figure;
        let _ = writeln!(text, "  {name:23} {experiment} ({paper})");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::Experiment;

    #[test]
    fn each_figure_is_an_experiment_and_has_its_row_in_the_page() {
        let page = std::fs::read_to_string(crate::product::repository().join("lab/README.md"));
        let page = page.expect("the page");
        for figure in &FIGURES {
            let args = ["firn-lab", figure.name].map(OsString::from);
            let experiment = Experiment::parse(expand(args.to_vec())).expect(figure.name);
            assert!(experiment.common().is_some(), "{}", figure.name);
            let row = format!(
                "| `{}` | {} | `{}` |",
                figure.name,
                figure.paper,
                figure.experiment.join(" ")
            );
            assert!(page.contains(&row), "lab/README.md has no row {row}");
        }
        let section = page
            .split("\n## ")
            .find(|part| part.starts_with("Figures\n"));
        let section = section.expect("the section of figures");
        let rows = section
            .lines()
            .filter(|line| line.starts_with("| `"))
            .count();
        assert_eq!(rows, FIGURES.len(), "rows of figures that are gone");
    }

    #[test]
    fn names_of_figures_are_no_names_of_others() {
        let names: BTreeSet<&str> = FIGURES.iter().map(|figure| figure.name).collect();
        assert_eq!(names.len(), FIGURES.len());
    }

    #[test]
    fn arguments_follow_the_name_of_a_figure() {
        let args = ["firn-lab", "cprfs-figure-6", "--quick"].map(OsString::from);
        let expanded = ["firn-lab", "commit", "--parts", "records", "--quick"];
        assert_eq!(expand(args.to_vec()), expanded.map(OsString::from));
    }
}
