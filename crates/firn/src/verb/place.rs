//! `firn place`: shows on which lane a file is, or unregisters a lane.
//!
//! A lane is a storage target: one I/O server, or a directory on it. The backing is the directory that is mounted. It
//! has a list of its lanes.

use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint, value_parser};
use firn_protocol::Explanation;

use super::mount::{options_list_arg, resolve_options};
use crate::failure::{DONE, Failure};
use crate::output;
use crate::text::path as path_text;
use crate::verb::{NO_CONNECTION, Verb, connect};

pub const VERB: Verb = Verb {
    name: "place",
    about: "Show on which I/O server (lane) a file is or would be; forget a lane",
    long: "For mounts with placement. With placement=dirs, a lane that is no longer in the option `lanes` keeps its \
           files, and Firn knows it until you forget it.",
    examples: &[
        (
            "firn place --explain /ckpt/rank_17",
            "where this file is, or where a file of this name would go, and why",
        ),
        (
            "firn place --forget /srv2/x /scratch/run42",
            "when this lane has no files of the backing any more, or is lost for good",
        ),
    ],
    exits: &[
        (0, "done"),
        (1, "failed"),
        (
            2,
            "an invalid option or argument, or not a lane of this backing",
        ),
        (10, "not on a firn mount"),
        (
            11,
            "the lane has files of the backing, or the backing is mounted",
        ),
        NO_CONNECTION,
    ],
    args,
    run,
};

/// Adds the arguments of `firn place` to its clap command, and returns the command.
fn args(command: Command) -> Command {
    command
        .arg(
            Arg::new("explain")
                .long("explain")
                .value_name("PATH")
                .help("Where PATH is, on a mount, or where a file of this name would go")
                .required_unless_present("forget")
                .conflicts_with("forget")
                .value_hint(ValueHint::AnyPath)
                .value_parser(value_parser!(PathBuf)),
        )
        .arg(
            Arg::new("forget")
                .long("forget")
                .value_name("LANE")
                .help("Forget this lane of BACKING, which is not mounted")
                .requires("backing")
                .value_hint(ValueHint::DirPath)
                .value_parser(value_parser!(PathBuf)),
        )
        .arg(
            Arg::new("backing")
                .value_name("BACKING")
                .help("With --forget: the backing directory")
                .requires("forget")
                .value_hint(ValueHint::DirPath)
                .value_parser(value_parser!(PathBuf)),
        )
        .arg(
            Arg::new("json")
                .long("json")
                .action(ArgAction::SetTrue)
                .help("With --explain: print the answer as JSON"),
        )
        .arg(options_list_arg())
        .args(firn_config::table::row("arena-dir").map(firn_config::arg))
}

/// Explains on which lane (I/O server) a file is, or removes a lane from those that a backing knows.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    if let Some(path) = matches.get_one::<PathBuf>("explain") {
        return explain_placement(path, matches.get_flag("json"));
    }
    let required_path = |name| matches.get_one::<PathBuf>(name).expect("clap demands it");
    let lane = required_path("forget");
    let backing = required_path("backing");
    let options = resolve_options(matches)?.options;
    firn_daemon::forget_lane(backing, lane, &options)?;
    output::print_message(&format!(
        "{} is no longer a lane of {}",
        path_text(lane),
        path_text(backing)
    ));
    Ok(DONE)
}

/// Prints the explanation of firnd for the placement of a file.
fn explain_placement(path: &Path, as_json: bool) -> Result<u8, Failure> {
    let (location, mut connection) = connect(path)?;
    let explanation = connection.explain_placement(&location.relative)?;
    if as_json {
        output::print_json(&explanation)?;
    } else {
        output::print(&format_explanation(path, &explanation))?;
    }
    Ok(DONE)
}

/// Returns in words where a file is, to which lane (I/O server) a new file of its name would go, and why.
fn format_explanation(path: &Path, explanation: &Explanation) -> String {
    let path = path_text(path);
    // `file` says most about the place, and `server` more than `exists`. Only the first that is set is shown.
    let present_place = if let Some(file) = &explanation.file {
        format!("{path} is {file}")
    } else if let Some(server) = &explanation.server {
        format!("{path} is on {server}")
    } else if explanation.exists {
        format!("{path} is in the backing itself")
    } else {
        format!("{path} does not exist")
    };
    let new_place = match &explanation.lane {
        Some(lane) => format!("a new file of this name goes to {lane}"),
        None => "the lane of a new file of this name is not fixed".to_owned(),
    };
    format!("{present_place}\n{new_place}: {}\n", explanation.reason)
}
