//! Flags of the command line (clap) for the options of the table.

use std::ffi::OsString;

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgMatches, value_parser};

use crate::table::{ALIASES, Row, TABLE};
use crate::unchecked_option::UncheckedOption;
use crate::value::Kind;

/// Returns the flags of all options, under the heading `Mount options`.
pub fn args() -> impl Iterator<Item = Arg> {
    TABLE.iter().map(arg)
}

/// Makes the flag `--NAME` of one option; a [`Row`] describes the option. Its short help is one line, and its long help
/// also says which values are allowed.
pub fn arg(row: &'static Row) -> Arg {
    let default = if row.default.is_empty() {
        String::new()
    } else {
        format!(" [default: {}]", row.default)
    };
    let aliases = ALIASES
        .iter()
        .filter(|(_, name)| *name == row.name)
        .map(|(alias, _)| *alias);
    let arg = Arg::new(row.name)
        .long(row.name)
        .value_name(row.kind.value_name())
        .help(format!("{}{default}", row.help))
        .long_help(format!(
            "{}{default}\n\n{}\n\nValue: {}.",
            row.help,
            row.long,
            row.kind.allowed()
        ))
        .help_heading("Mount options")
        .visible_aliases(aliases);
    with_value_parser(arg, row.kind)
}

/// Lets a flag accept the values of a kind, and hint at them in the completions of a shell. For kinds without a parser
/// here, the flag takes any text, which is checked later with the values of other sources.
fn with_value_parser(arg: Arg, kind: Kind) -> Arg {
    match kind {
        Kind::Choice(words) => arg
            .value_parser(PossibleValuesParser::new(words))
            .hide_possible_values(true),
        Kind::Switch => arg
            .num_args(0..=1)
            .require_equals(true)
            .default_missing_value("yes")
            .value_parser(PossibleValuesParser::new(["yes", "no"]))
            .hide_possible_values(true),
        Kind::Directories => arg.value_parser(value_parser!(OsString)),
        Kind::Directory => arg
            .value_hint(clap::ValueHint::DirPath)
            .value_parser(value_parser!(OsString)),
        Kind::Path | Kind::PathOrOff => arg
            .value_hint(clap::ValueHint::AnyPath)
            .value_parser(value_parser!(OsString)),
        Kind::Size { .. }
        | Kind::Duration { .. }
        | Kind::Count { .. }
        | Kind::Servers
        | Kind::Host
        | Kind::Hosts
        | Kind::Patterns
        | Kind::Rules
        | Kind::Endpoints => arg,
    }
}

/// Returns the options that the flags in `matches` (the parsed command line) give. Skips options that are not given,
/// and options that the command does not have as flags.
pub fn given_flags(matches: &ArgMatches) -> Vec<UncheckedOption> {
    let mut options = Vec::new();
    for row in &TABLE {
        // A path is any bytes; all other values are UTF-8.
        let is_path = matches!(
            row.kind,
            Kind::Directory | Kind::Path | Kind::PathOrOff | Kind::Directories
        );
        // An error means that the command does not have the flag.
        let text = if is_path {
            let path = matches.try_get_one::<OsString>(row.name);
            path.ok().flatten().cloned()
        } else {
            let text = matches.try_get_one::<String>(row.name);
            text.ok().flatten().map(OsString::from)
        };
        if let Some(text) = text {
            options.push(UncheckedOption { row, text });
        }
    }
    options
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_may_stand_alone_or_with_its_value() {
        let command = clap::Command::new("t").args(args());
        let matches =
            command.get_matches_from(["t", "--allow-other", "--populate=no", "--arena-size", "1G"]);
        let texts: Vec<_> = given_flags(&matches)
            .into_iter()
            .map(|option| (option.row.name, option.text))
            .collect();
        let expected = [
            ("arena-size", "1G"),
            ("allow-other", "yes"),
            ("populate", "no"),
        ];
        assert_eq!(
            texts,
            expected.map(|(name, text)| (name, OsString::from(text)))
        );
    }
}
