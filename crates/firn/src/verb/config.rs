//! `firn config`: shows the value of every option, and which source sets it.

use clap::{Arg, ArgAction, ArgMatches, Command};
use firn_config::{Origin, Resolved};
use serde::Serialize;

use super::mount::{options_list_arg, resolve_options};
use crate::failure::{DONE, Failure};
use crate::output::{self, Paint};
use crate::verb::Verb;

pub const VERB: Verb = Verb {
    name: "config",
    about: "Show the value of every option and where it comes from",
    long: "Shows the values that `firn mount` with the same flags would use, from flags, FIRN_* variables, \
           ~/.config/firn/firn.toml, /etc/firn/firn.toml and defaults, in this order.",
    examples: &[
        ("firn config", "what a mount would use now"),
        (
            "firn config -o close=held,arena-size=1G --json",
            "with these options, for scripts",
        ),
    ],
    exits: &[
        (0, "shown"),
        (
            2,
            "an invalid option or argument; the message names its source",
        ),
    ],
    args,
    run,
};

/// Adds the arguments of `firn config` to its clap command, and returns the command.
fn args(command: Command) -> Command {
    command
        .arg(
            Arg::new("json")
                .long("json")
                .action(ArgAction::SetTrue)
                .help("Print an array of options as JSON"),
        )
        .arg(options_list_arg())
        .args(firn_config::args())
}

/// One option, as JSON.
#[derive(Serialize)]
struct OptionLine {
    /// Name of the option.
    name: &'static str,
    /// The value as a user would write it. An empty text means that the option is not set.
    value: String,
    /// Default value of the option.
    default: &'static str,
    /// Kind of the source: `flag`, `-o`, `environment`, `file`, `implied` or `default`.
    source: &'static str,
    /// The environment variable, the file or the other option that sets the value.
    #[serde(skip_serializing_if = "Option::is_none")]
    place: Option<String>,
    /// Help text of the option.
    help: &'static str,
}

/// Prints the value and the source of each option.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let lines = option_lines(&resolve_options(matches)?);
    if matches.get_flag("json") {
        output::print_json(&lines)?;
    } else {
        output::print(&format_lines(&lines, Paint::stdout()))?;
    }
    Ok(DONE)
}

/// Returns a line for each option, in the order of the table of options.
fn option_lines(resolved: &Resolved) -> Vec<OptionLine> {
    let mut lines = Vec::with_capacity(resolved.origins.len());
    for (row, origin) in &resolved.origins {
        let (source, place) = match origin {
            Origin::Flag => ("flag", None),
            Origin::MinusO => ("-o", None),
            Origin::Environment(variable) => ("environment", Some(variable.clone())),
            Origin::File(path) => ("file", Some(crate::text::path(path))),
            Origin::Implied(other_option) => ("implied", Some((*other_option).to_owned())),
            Origin::Default => ("default", None),
        };
        lines.push(OptionLine {
            name: row.name,
            value: (row.get)(&resolved.options),
            default: row.default,
            source,
            place,
            help: row.help,
        });
    }
    lines
}

/// Returns the lines as text. Options that are set somewhere are bold, even if they are set to their defaults.
fn format_lines(lines: &[OptionLine], paint: Paint) -> String {
    let name_width = lines.iter().map(|line| line.name.len()).max().unwrap_or(0);
    let value_width = lines
        .iter()
        .map(|line| line.value.chars().count())
        .max()
        .unwrap_or(0);
    let mut text = String::new();
    for line in lines {
        let mut line_text = format!(
            "{:<name_width$}  {:<value_width$}  {}",
            line.name, line.value, line.source
        );
        if let Some(place) = &line.place {
            line_text += &format!(" {place}");
        }
        if line.source != "default" {
            line_text = paint.head(&line_text);
        }
        text += &line_text;
        text.push('\n');
    }
    text
}
