//! `firn drain`: starts to drain (write to the backing) the files of a mount at once, and optionally waits for the end.

use std::path::{Path, PathBuf};

use clap::{ArgMatches, Args, FromArgMatches, ValueHint};
use firn_format::durability::DurabilityLevel;
use firn_protocol::Request;
use firn_protocol::path::BytePath;
use serde::Serialize;

use super::wait::{WaitOutput, wait_until};
use crate::failure::{DONE, Failure};
use crate::verb::{NO_CONNECTION, Verb, connect};
use crate::{output, text};

pub const VERB: Verb = Verb {
    name: "drain",
    about: "Start writing to the directory now, also chunks that are not full",
    long: "Returns at once; use `firn wait`, or --wait, to wait for the result.",
    examples: &[
        (
            "firn drain /ckpt/step_100",
            "drain this checkpoint now, before other files",
        ),
        (
            "firn drain --wait /ckpt",
            "the same as `firn wait --until drained /ckpt`",
        ),
    ],
    exits: &[
        (0, "started (with --wait: finished)"),
        (1, "failed; the data is kept"),
        (
            3,
            "with --wait: the data is logged (layout=log), and a program has a file open for writing",
        ),
        (10, "not on a firn mount"),
        NO_CONNECTION,
    ],
    args: DrainArgs::augment_args,
    run,
};

#[derive(Debug, Args)]
struct DrainArgs {
    /// A mount point, or a file or directory below it.
    #[arg(value_hint = ValueHint::AnyPath)]
    path: PathBuf,
    /// Wait until the files are drained.
    #[arg(long)]
    wait: bool,
    /// Print the outcome as JSON.
    #[arg(long)]
    json: bool,
    /// Print neither a summary nor progress.
    #[arg(short, long)]
    quiet: bool,
}

/// The undrained data at the start of a drain, as JSON.
#[derive(Serialize)]
struct DrainStarted {
    /// The mount point.
    mount_point: BytePath,
    /// Path below the mount point. An empty path means the whole mount.
    path: BytePath,
    /// Files that had undrained bytes when the drain began.
    held_files: usize,
    /// Undrained bytes when the drain began.
    held_bytes: u64,
}

/// Starts the drain, which writes held data (in memory only) to the backing, and reports what was held at its start.
/// With `--wait` it waits for the end instead.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = DrainArgs::from_arg_matches(matches)?;
    if args.wait {
        let wait_output = WaitOutput {
            json: args.json,
            quiet: args.quiet,
        };
        return wait_until(&args.path, DurabilityLevel::Drained, None, wait_output);
    }
    let (location, mut connection) = connect(&args.path)?;
    // The files are counted before the drain begins, and only if a report is printed.
    let mut held_files = if args.json || !args.quiet {
        connection.files(&location.relative)?
    } else {
        Vec::new()
    };
    held_files.retain(|file| file.held_bytes > 0);
    let held_bytes = held_files.iter().map(|file| file.held_bytes).sum();
    connection.request_done(&Request::Drain {
        path: location.relative.clone(),
    })?;
    if args.json {
        output::print_json(&DrainStarted {
            mount_point: location.mount.mount_point.into(),
            path: location.relative,
            held_files: held_files.len(),
            held_bytes,
        })?;
    } else if !args.quiet {
        let file_count = held_files.len() as u64;
        output::print_message(&summarize_start(&args.path, file_count, held_bytes));
    }
    Ok(DONE)
}

/// Returns a sentence about the drain that was begun.
fn summarize_start(path: &Path, held_files: u64, held_bytes: u64) -> String {
    let path = text::path(path);
    if held_files == 0 {
        return format!("everything at {path} is drained already");
    }
    let bytes = text::bytes(held_bytes);
    let files = text::count(held_files, "file");
    format!("draining {bytes} in {files}; `firn wait {path}` waits until they are durable")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_says_how_much_is_being_drained() {
        let path = Path::new("/ckpt");
        assert_eq!(
            summarize_start(path, 1, 3 << 20),
            "draining 3.0 MiB in 1 file; `firn wait /ckpt` waits until they are durable"
        );
        assert_eq!(
            summarize_start(path, 0, 0),
            "everything at /ckpt is drained already"
        );
    }
}
