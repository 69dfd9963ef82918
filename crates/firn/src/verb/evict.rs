//! `firn evict`: frees the memory of drained files. Their data is also in the backing, so no data is lost.

use std::path::PathBuf;

use clap::{ArgMatches, Args, FromArgMatches, ValueHint};
use serde::Serialize;

use crate::failure::{DONE, Failure};
use crate::verb::{NO_CONNECTION, Verb, connect};
use crate::{output, text};

pub const VERB: Verb = Verb {
    name: "evict",
    about: "Free the memory of files that are drained",
    long: "With drain=demand, drained files stay in memory, so that they can be read again, until their space \
           is needed. Data that is not drained is never evicted: run `firn drain --wait` first. Neither \
           is data that a program reads through a chunk list.",
    examples: &[
        (
            "firn evict /ckpt/step_100",
            "when this checkpoint will not be read again",
        ),
        ("firn evict /ckpt", "free the memory of all drained files"),
    ],
    exits: &[
        (0, "done, or there was nothing to free"),
        (1, "failed"),
        (10, "not on a firn mount"),
        NO_CONNECTION,
    ],
    args: EvictArgs::augment_args,
    run,
};

#[derive(Debug, Args)]
struct EvictArgs {
    /// A mount point, or a file or directory below it.
    #[arg(value_hint = ValueHint::AnyPath)]
    path: PathBuf,
    /// Print the outcome as JSON.
    #[arg(long)]
    json: bool,
}

/// The result, as JSON.
#[derive(Serialize)]
struct EvictResult {
    /// Bytes of memory freed.
    freed_bytes: u64,
    /// Bytes that remain in memory: they are not drained, or a program reads them through a chunk list of libfirn.
    held_bytes: u64,
}

/// Frees the memory of drained data, which is also in the backing. Prints how much was freed and how much stays.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = EvictArgs::from_arg_matches(matches)?;
    let (location, mut connection) = connect(&args.path)?;
    let (freed_bytes, held_bytes) = connection.evict(&location.relative)?;
    if args.json {
        output::print_json(&EvictResult {
            freed_bytes,
            held_bytes,
        })?;
        return Ok(DONE);
    }
    let mut summary = format!("{} freed", text::bytes(freed_bytes));
    if held_bytes > 0 {
        summary += &format!(
            "; {} stay in memory: not drained, or in use by a chunk list",
            text::bytes(held_bytes)
        );
    }
    output::print_message(&summary);
    Ok(DONE)
}
