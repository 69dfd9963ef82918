//! The verbs: a file for each, or for those that belong together, and one entry each in [`VERBS`], which feeds parser, help, completions and man pages.

use std::fmt::Write;
use std::path::Path;

use clap::{ArgMatches, Command};
use firn_client::{Connection, Place};

use crate::failure::{Failure, TRY_AGAIN};

pub mod mount_firn;
pub mod umount_firn;

mod agent;
mod bench;
mod check;
mod chunks;
mod completions;
mod config;
mod drain;
mod evict;
mod flatten;
mod ls;
mod man;
mod mount;
mod pin;
mod place;
mod prune;
mod pull;
mod recover;
mod run;
mod status;
mod transaction;
mod umount;
mod version;
mod wait;

/// A verb.
pub struct Verb {
    /// As typed.
    pub name: &'static str,
    /// One line, imperative, no full stop.
    pub about: &'static str,
    /// What else a user should know; may be empty.
    pub long: &'static str,
    /// Command lines and what each is for.
    pub examples: &'static [(&'static str, &'static str)],
    /// What each exit status means here.
    pub exits: &'static [(u8, &'static str)],
    /// Adds its arguments.
    pub args: fn(Command) -> Command,
    /// Does it; `Ok` is the exit status.
    pub run: fn(&ArgMatches) -> Result<u8, Failure>,
}

/// The exit status of each verb that asks firnd and finds no room.
const NO_CONNECTION: (u8, &str) = (TRY_AGAIN, "all connections to firnd are in use: try again");

/// All verbs, in the order of help.
pub static VERBS: &[&Verb] = &[
    &mount::VERB,
    &umount::VERB,
    &run::VERB,
    &status::VERB,
    &ls::VERB,
    &chunks::VERB,
    &wait::VERB,
    &drain::VERB,
    &flatten::VERB,
    &evict::VERB,
    &pin::VERB,
    &place::VERB,
    &prune::VERB,
    &agent::VERB,
    &pull::VERB,
    &transaction::BEGIN,
    &transaction::PREPARE,
    &transaction::COMMIT,
    &transaction::ABORT,
    &transaction::RESTORE,
    &recover::VERB,
    &check::VERB,
    &config::VERB,
    &bench::VERB,
    &version::VERB,
    &completions::VERB,
    &man::VERB,
];

impl Verb {
    /// Its part of the command line.
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

    fn after_help(&self) -> String {
        let mut text = String::from("Examples:\n");
        for (line, what) in self.examples {
            let _ = writeln!(text, "  {line}\n      {what}");
        }
        text += "\nExit status:\n";
        for (code, what) in self.exits {
            let _ = writeln!(text, "  {code:<4} {what}");
        }
        text
    }
}

/// The whole command line.
pub fn command() -> Command {
    Command::new("firn")
        .bin_name("firn")
        .about("File system for checkpoints")
        .version(env!("CARGO_PKG_VERSION"))
        .subcommand_required(true)
        .arg_required_else_help(false)
        .max_term_width(100)
        .subcommand_value_name("VERB")
        .subcommand_help_heading("Verbs")
        .subcommands(VERBS.iter().map(|verb| verb.command()))
}

/// The mount that `path` lies on, and its firnd. Root hears whose mount it is, if it is another user's.
fn connect(path: &Path) -> Result<(Place, Connection), Failure> {
    let place = find(path)?;
    let connection = Connection::open(&place.mount)?;
    Ok((place, connection))
}

/// The mount that `path` lies on.
fn find(path: &Path) -> Result<Place, Failure> {
    let place = firn_client::find(path)?;
    if place.mount.is_of_another_user() {
        let mount_point = crate::text::path(&place.mount.mount_point);
        crate::output::say(&format!(
            "the mount at {mount_point} belongs to user {}",
            place.mount.user_id
        ));
    }
    Ok(place)
}
