//! `firn flatten`: makes plain files from files that are stored in logs (layout=log).
//!
//! With layout=log, the backing has logs of the writes to a file. To flatten the file is to copy its logs into the
//! plain file.

use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint, value_parser};
use firn_client::ClientError;
use firn_config::Kind;
use firn_protocol::Request;
use rustix::io::Errno;

use super::mount::{options_list_arg, resolve_options};
use crate::failure::{DONE, Failure, NO_MOUNT, PARTLY, USAGE};
use crate::output;
use crate::progress::ProgressMeter;
use crate::text::path as path_text;
use crate::verb::{NO_CONNECTION, Verb, connect};

pub const VERB: Verb = Verb {
    name: "flatten",
    about: "Make plain files from files in logs (layout=log)",
    long: "With layout=log, a file is stored in logs of the hosts that write it, until the last of them has closed it. \
           With flatten=demand, read or off, and after hosts died, this verb makes the plain file: it drains the held \
           bytes of the files at or below PATH, and waits until the files are flat. With --backing no mount is needed, \
           and PATH is below DIR.",
    examples: &[
        (
            "firn flatten /ckpt/step_100",
            "the files of this checkpoint, through the mount at /ckpt",
        ),
        (
            "firn flatten --all /ckpt",
            "all files in logs of the mount at /ckpt",
        ),
        (
            "firn flatten --backing /scratch/run42 --all",
            "without a mount, before files are used elsewhere",
        ),
        (
            "firn flatten --backing /scratch/run42 --accept-loss lost.json step_100",
            "after a power loss: unreadable ranges of step_100 become zeros, and lost.json lists them",
        ),
    ],
    exits: &[
        (0, "all requested files are plain"),
        (1, "failed; every byte is kept in the logs"),
        (2, "an invalid option or argument"),
        (
            3,
            "files that programs on this or other hosts have open for writing remain in logs; or the mount is read-only; or \
             bytes were lost (--accept-loss)",
        ),
        (10, "not on a firn mount, or no such backing"),
        (11, "with --backing: this host has it mounted"),
        NO_CONNECTION,
    ],
    args,
    run,
};

/// Adds the arguments of `firn flatten` to its clap command, and returns the command.
fn args(command: Command) -> Command {
    command
        .arg(
            Arg::new("path")
                .value_name("PATH")
                .help("A file, or a directory with all below it; with --all any path of the mount")
                .required_unless_present("all")
                .value_hint(ValueHint::AnyPath)
                .value_parser(value_parser!(PathBuf)),
        )
        .arg(
            Arg::new("all")
                .long("all")
                .action(ArgAction::SetTrue)
                .help("All files of the mount of PATH (default: the mount of the working directory), or of the backing"),
        )
        .arg(
            Arg::new("backing")
                .long("backing")
                .value_name("DIR")
                .help("Work on this backing, without a mount")
                .value_hint(ValueHint::DirPath)
                .value_parser(value_parser!(PathBuf)),
        )
        .arg(
            Arg::new("accept-loss")
                .long("accept-loss")
                .value_name("REPORT")
                .requires("backing")
                .help("Drop damaged ranges of logs for good: they become zeros, and the new file REPORT lists them")
                .value_hint(ValueHint::FilePath)
                .value_parser(value_parser!(PathBuf)),
        )
        .arg(
            Arg::new("host-name")
                .long("host")
                .value_name("NAME")
                .requires("backing")
                .help("With --backing: the name of this host, if its mounts had host=NAME [default: its host name]")
                .value_parser(|text: &str| Kind::Host.parse(text).map(|_| text.to_owned())),
        )
        .arg(options_list_arg())
        .args(firn_config::table::row("arena-dir").map(firn_config::arg))
}

/// Flattens files, through the firnd of a mount or, with `--backing`, in this process.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let path = matches.get_one::<PathBuf>("path").map(PathBuf::as_path);
    let is_all = matches.get_flag("all");
    let Some(backing) = matches.get_one::<PathBuf>("backing") else {
        return flatten_mounted(path.unwrap_or(Path::new(".")), is_all);
    };
    if is_all && path.is_some() {
        return Err(Failure::new(
            USAGE,
            "with --backing, use either PATH or --all",
        ));
    }
    flatten_backing(backing, path.unwrap_or(Path::new("")), matches)?;
    Ok(DONE)
}

/// Flattens the files at or below `path` in this process: copies their logs into plain files. The backing must not be
/// mounted on this host. With `--accept-loss`, bytes that cannot be read are given up.
fn flatten_backing(backing: &Path, path: &Path, matches: &ArgMatches) -> Result<(), Failure> {
    let relative_path = relative_to_backing(backing, path)?;
    let mut print_notice = |text: String| output::print_message(&text);
    let mut options = resolve_options(matches)?.options;
    if let Some(host) = matches.get_one::<String>("host-name") {
        options.host = Some(host.clone());
    }
    match matches.get_one::<PathBuf>("accept-loss") {
        None => firn_daemon::flatten(backing, &relative_path, &options, &mut print_notice)?,
        Some(loss_report) => {
            firn_daemon::flatten_with_loss(
                backing,
                &relative_path,
                &options,
                loss_report,
                &mut print_notice,
            )?;
        }
    }
    Ok(())
}

/// Asks firnd, the daemon of a mount, to flatten files (copy their logs into plain files), and shows progress. Fails
/// with [`PARTLY`] if files are still in use.
fn flatten_mounted(path: &Path, is_all: bool) -> Result<u8, Failure> {
    let (location, mut connection) = connect(path)?;
    // The empty path means all files of the mount.
    let path = if is_all { "".into() } else { location.relative };
    let mut meter = ProgressMeter::new();
    let result = connection.wait(&Request::Flatten { path }, &mut |progress| {
        meter.show(progress.bytes_left, progress.files_left, &progress.phase)
    });
    // The bar disappears before a message is printed.
    drop(meter);
    match result {
        Ok(()) => Ok(DONE),
        Err(ClientError::Refused { errno, message }) if errno == Errno::BUSY.raw_os_error() => {
            Err(Failure::new(PARTLY, message))
        }
        Err(error) => Err(error.into()),
    }
}

/// Returns `path` relative to the backing. Fails if it is absolute, and does not begin with the path of the backing.
fn relative_to_backing(backing: &Path, path: &Path) -> Result<PathBuf, Failure> {
    if path.is_relative() {
        return Ok(path.to_owned());
    }
    let shown_backing = path_text(backing);
    let canonical_backing = backing
        .canonicalize()
        .map_err(|error| Failure::new(NO_MOUNT, format!("{shown_backing}: {error}")))?;
    let relative_path = path
        .strip_prefix(backing)
        .or_else(|_| path.strip_prefix(&canonical_backing));
    match relative_path {
        Ok(relative_path) => Ok(relative_path.to_owned()),
        Err(_) => {
            let path = path_text(path);
            let text = format!("{path} is not below the backing {shown_backing}");
            Err(Failure::new(USAGE, text))
        }
    }
}
