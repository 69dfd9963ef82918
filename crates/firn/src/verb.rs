//! The verbs (subcommands) of `firn`. Each verb, or each group of related verbs, has a file below `verb/`. [`GROUPS`]
//! lists all of them, and feeds the parser, the help, the completions and the man pages.

use std::fmt::Write;
use std::path::Path;

use clap::{ArgMatches, Command};
use firn_client::{Connection, MountLocation};

use crate::failure::{Failure, TRY_AGAIN};
use crate::output::Paint;
use crate::overview::overview;

pub mod mount_firn;
pub mod umount_firn;

mod agent;
mod bench;
mod check;
mod chunks;
mod completions;
mod config;
mod doctor;
mod drain;
mod events;
mod evict;
mod exporter;
mod flatten;
pub mod history;
mod hosts;
mod ls;
mod man;
mod mount;
mod pin;
mod place;
mod prune;
mod pull;
mod recover;
mod report;
mod rules;
mod run;
mod status;
mod top;
mod transaction;
mod umount;
mod upgrade;
mod version;
mod wait;

pub use run::host_part::{NAME as RUN_HOST, main as run_host};

/// A verb: its texts for help and man pages, its arguments, and its function.
pub struct Verb {
    /// The word that the user types.
    pub name: &'static str,
    /// One line in the imperative, without a full stop.
    pub about: &'static str,
    /// Further help text; may be empty.
    pub long: &'static str,
    /// Example command lines, each with its purpose.
    pub examples: &'static [(&'static str, &'static str)],
    /// The exit statuses of this verb, each with its meaning.
    pub exits: &'static [(u8, &'static str)],
    /// Adds the verb's arguments to its command.
    pub args: fn(Command) -> Command,
    /// Runs the verb. `Ok` holds the exit status.
    pub run: fn(&ArgMatches) -> Result<u8, Failure>,
}

/// The exit status of verbs that ask firnd, for the case that all of its connections are in use.
const NO_CONNECTION: (u8, &str) = (TRY_AGAIN, "all connections to firnd are in use: try again");

/// A group of related verbs in the help.
pub struct Group {
    /// Heading of the group.
    pub title: &'static str,
    /// The verbs of the group, in the order of the help.
    pub verbs: &'static [&'static Verb],
}

/// All verbs. Each verb has one line here, in one group.
pub static GROUPS: &[Group] = &[
    Group {
        title: "Every day",
        verbs: &[
            &mount::VERB,
            &umount::VERB,
            &upgrade::VERB,
            &run::VERB,
            &status::VERB,
            &top::VERB,
            &ls::VERB,
            &wait::VERB,
            &drain::VERB,
            &history::HISTORY,
            &history::LATEST,
            &prune::VERB,
            &report::VERB,
            &events::VERB,
        ],
    },
    Group {
        title: "Several files as one checkpoint: all or nothing",
        verbs: &[
            &transaction::BEGIN,
            &transaction::PREPARE,
            &transaction::COMMIT,
            &transaction::ABORT,
            &transaction::RESTORE,
            &rules::VERB,
        ],
    },
    Group {
        title: "Several hosts",
        verbs: &[
            &hosts::VERB,
            &agent::VERB,
            &pull::VERB,
            &place::VERB,
            &flatten::VERB,
        ],
    },
    Group {
        title: "Repair",
        verbs: &[&doctor::VERB, &recover::VERB, &check::VERB],
    },
    Group {
        title: "Other",
        verbs: &[
            &evict::VERB,
            &pin::VERB,
            &chunks::VERB,
            &config::VERB,
            &exporter::VERB,
            &bench::VERB,
            &version::VERB,
            &completions::VERB,
            &man::VERB,
        ],
    },
];

/// Returns all verbs, in the order of the help.
pub fn verbs() -> impl Iterator<Item = &'static Verb> {
    GROUPS.iter().flat_map(|group| group.verbs.iter().copied())
}

impl Verb {
    /// Returns the verb's part of the command line.
    pub fn command(&self) -> Command {
        let command = (self.args)(Command::new(self.name))
            .about(self.about)
            .after_help(self.after_help());
        if self.long.is_empty() {
            command
        } else {
            command.long_about(format!("{}\n\n{}", self.about, self.long))
        }
    }

    /// Returns the end of the help: the examples and the exit statuses.
    fn after_help(&self) -> String {
        let mut text = String::from("Examples:\n");
        for (command_line, purpose) in self.examples {
            let _ = writeln!(text, "  {command_line}\n      {purpose}");
        }
        text += "\nExit status:\n";
        for (status, meaning) in self.exits {
            let _ = writeln!(text, "  {status:<4} {meaning}");
        }
        text
    }
}

/// Returns the definition of the whole command line.
pub fn command() -> Command {
    Command::new("firn")
        .bin_name("firn")
        .about("File system for checkpoints")
        .version(env!("CARGO_PKG_VERSION"))
        .subcommand_required(true)
        .arg_required_else_help(false)
        .max_term_width(100)
        .subcommand_value_name("VERB")
        .override_help(overview(Paint::stdout()))
        .subcommands(verbs().map(Verb::command))
}

/// Finds the mount that `path` is on, and connects to its firnd. If root uses another user's mount, a message names
/// that user.
fn connect(path: &Path) -> Result<(MountLocation, Connection), Failure> {
    let location = find_mount(path)?;
    let connection = Connection::open(&location.mount)?;
    Ok((location, connection))
}

/// Finds the mount that `path` is on. If root uses another user's mount, a message names that user. Returns a failure
/// if `path` is on no mount.
fn find_mount(path: &Path) -> Result<MountLocation, Failure> {
    let location = firn_client::find(path)?;
    if location.mount.is_of_another_user() {
        let mount_point = crate::text::path(&location.mount.mount_point);
        crate::output::print_message(&format!(
            "the mount at {mount_point} belongs to user {}",
            location.mount.user_id
        ));
    }
    Ok(location)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Each verb is a constant `VERB`, or another constant, of a file below `verb/`.
    #[test]
    fn each_verb_is_in_exactly_one_group() {
        let mut times: BTreeMap<&str, usize> = BTreeMap::new();
        for verb in verbs() {
            *times.entry(verb.name).or_default() += 1;
        }
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/verb");
        let mut named = 0;
        for entry in std::fs::read_dir(dir).unwrap() {
            let source = std::fs::read_to_string(entry.unwrap().path()).unwrap_or_default();
            let mut lines = source.lines();
            while lines
                .any(|line| line.starts_with("pub const ") && line.ends_with(": Verb = Verb {"))
            {
                let line = lines.next().unwrap().trim();
                let name = line
                    .strip_prefix("name: \"")
                    .and_then(|rest| rest.strip_suffix("\","));
                let name = name.unwrap_or_else(|| panic!("{line} is not the name of a verb"));
                assert_eq!(times.get(name), Some(&1), "groups that have {name}");
                named += 1;
            }
        }
        assert_eq!(named, times.len());
    }
}
