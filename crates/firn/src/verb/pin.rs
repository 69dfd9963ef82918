//! `firn pin`: keeps files in memory even after they are drained (written to the backing), or ends that.

use std::path::PathBuf;

use clap::{ArgMatches, Args, FromArgMatches, ValueHint};
use serde::Serialize;

use crate::failure::{DONE, FAILED, Failure};
use crate::verb::{NO_CONNECTION, Verb, connect};
use crate::{output, text};

pub const VERB: Verb = Verb {
    name: "pin",
    about: "Keep files in memory after they are drained",
    long: "With drain=demand, drained files leave memory when new files need the space, in the order in which they were \
           drained. Pinned files remain in memory until `firn pin --off`, `firn evict` or the end of the mount. Only \
           files that are in memory now can be pinned.",
    examples: &[
        (
            "firn pin /ckpt/step_100",
            "keep a checkpoint that a restart will read",
        ),
        (
            "firn pin --off /ckpt/step_100",
            "allow its memory to be reused",
        ),
    ],
    exits: &[
        (0, "done"),
        (
            1,
            "no byte of the files is in memory, or the request failed",
        ),
        (10, "not on a firn mount"),
        NO_CONNECTION,
    ],
    args: PinArgs::augment_args,
    run,
};

#[derive(Debug, Args)]
struct PinArgs {
    /// A mount point, or a file or directory below it.
    #[arg(value_hint = ValueHint::AnyPath)]
    path: PathBuf,
    /// Undo an earlier pin.
    #[arg(long)]
    off: bool,
    /// Print the outcome as JSON.
    #[arg(long)]
    json: bool,
}

/// The result, as JSON.
#[derive(Serialize)]
struct PinResult {
    /// Whether the files are pinned now.
    pinned: bool,
    /// Number of files in memory that the path means.
    files: u64,
    /// Bytes of these files in memory.
    bytes: u64,
}

/// Pins files, so that their data stays in memory after it is in the backing, or unpins them. Prints how many. Fails if
/// there is nothing in memory to pin.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = PinArgs::from_arg_matches(matches)?;
    let pins = !args.off;
    let (location, mut connection) = connect(&args.path)?;
    let (files, bytes) = connection.pin(&location.relative, pins)?;
    if args.json {
        output::print_json(&PinResult {
            pinned: pins,
            files,
            bytes,
        })?;
    }
    if pins && files == 0 {
        let path = text::path(&args.path);
        return Err(Failure::new(
            FAILED,
            format!("nothing of {path} is in memory"),
        ));
    }
    if !args.json {
        let state = if pins { "pinned" } else { "no longer pinned" };
        output::print_message(&format!("{files} files, {}: {state}", text::bytes(bytes)));
    }
    Ok(DONE)
}
