//! `firn drain`.

use std::path::PathBuf;

use clap::{ArgMatches, Args, FromArgMatches, ValueHint};
use firn_format::durability::DurabilityLevel;
use firn_protocol::Request;
use firn_protocol::path::BytePath;
use serde::Serialize;

use super::wait::wait;
use crate::failure::{DONE, Failure};
use crate::output;
use crate::verb::{NO_CONNECTION, Verb, connect};

pub const VERB: Verb = Verb {
    name: "drain",
    about: "Start draining files now, without waiting for full chunks",
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
            "with --wait: logged (layout=log), and somebody has it open for writing",
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
    /// Wait until it is drained.
    #[arg(long)]
    wait: bool,
    /// Print the outcome as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Begun {
    mount_point: BytePath,
    /// Below the mount point; empty: all of it.
    path: BytePath,
    /// Files that had undrained bytes when it began.
    held_files: usize,
    /// Those bytes.
    held_bytes: u64,
}

fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = DrainArgs::from_arg_matches(matches)?;
    if args.wait {
        return wait(&args.path, DurabilityLevel::Drained, None, args.json);
    }
    let (place, mut connection) = connect(&args.path)?;
    let files = if args.json {
        connection.files(&place.relative)?
    } else {
        Vec::new()
    };
    connection.done(&Request::Drain {
        path: place.relative.clone(),
    })?;
    if args.json {
        output::print_json(&Begun {
            mount_point: place.mount.mount_point.into(),
            path: place.relative,
            held_files: files.len(),
            held_bytes: files.iter().map(|file| file.held_bytes).sum(),
        })?;
    }
    Ok(DONE)
}
