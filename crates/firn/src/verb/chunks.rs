//! `firn chunks`: shows where each byte of a file is: in memory, in the spill file, or in the backing.
//!
//! Terms
//! * A *chunk* is a unit of the arena, the shared memory with data that is not in the backing yet.
//! * The *spill file* is a file on a local disk, to which data moves when memory is short.
//! * A *piece* (extent) is a range of the file with all of its bytes in one place.

use std::path::PathBuf;

use clap::{ArgMatches, Args, FromArgMatches, ValueHint};
use firn_protocol::path::BytePath;
use firn_protocol::{ChunkPiece, DataRegion, Place};
use serde::Serialize;

use crate::failure::{DONE, FAILED, Failure};
use crate::output::{self, Paint};
use crate::text;
use crate::verb::{NO_CONNECTION, Verb, connect};

pub const VERB: Verb = Verb {
    name: "chunks",
    about: "Show where each byte of a file is: memory, spill file or backing",
    long: "Prints one line per piece: its offset in the file, its length, where it is, its chunk, and its position in \
           bytes (in memory: from the start of the data region; in the spill file and in the backing: from the start of \
           the file). A hole is a range that was never written and reads as zeros. --json also prints where the data \
           region is. The list is a snapshot. A program that reads memory by such a list must hold the list through \
           libfirn (firn.h).",
    examples: &[
        ("firn chunks /ckpt/step_100/rank0", "where its bytes are"),
        (
            "firn chunks --json /ckpt/step_100/rank0 | jq .region",
            "the file to map, and the offset to begin at",
        ),
    ],
    exits: &[
        (0, "done"),
        (
            1,
            "no such file, not a regular file, or the file is not held: all of it is in the backing",
        ),
        (10, "not on a firn mount"),
        NO_CONNECTION,
    ],
    args: ChunksArgs::augment_args,
    run,
};

#[derive(Debug, Args)]
struct ChunksArgs {
    /// A file on a mount.
    #[arg(value_hint = ValueHint::FilePath)]
    path: PathBuf,
    /// Print the list as JSON.
    #[arg(long)]
    json: bool,
}

/// The pieces of a file, as JSON.
#[derive(Serialize)]
struct ChunkList {
    /// Path of the file below the mount point.
    path: BytePath,
    /// Size of the file in bytes.
    bytes: u64,
    /// The files in which memory and spilled data lie.
    region: DataRegion,
    /// The pieces of the file in the order of their offsets.
    pieces: Vec<ChunkPiece>,
}

/// Prints the pieces (extents) of a file: the ranges with all of their bytes in one place. Fails if the whole file is
/// in the backing. With `--json` it prints them even then.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = ChunksArgs::from_arg_matches(matches)?;
    let (location, mut connection) = connect(&args.path)?;
    let list = connection.chunks(&location.relative)?;
    let region = connection.region()?;
    let list = ChunkList {
        path: location.relative,
        bytes: list.bytes,
        region,
        pieces: list.pieces,
    };
    if args.json {
        output::print_json(&list)?;
    }
    let is_held = |piece: &ChunkPiece| !matches!(piece.place, Place::Backing | Place::Hole);
    if !list.pieces.iter().any(is_held) {
        let path = text::path(&args.path);
        return Err(Failure::new(
            FAILED,
            format!("{path} is not held: all of it is in the backing"),
        ));
    }
    if !args.json {
        output::print(&format_pieces(&list.pieces, Paint::stdout()))?;
    }
    Ok(DONE)
}

/// Returns a table with a row for each piece (extent) of the file, a range with all of its bytes in one place. OFFSET
/// is its offset in the file, WHERE the place, and AT its offset in that place.
fn format_pieces(pieces: &[ChunkPiece], paint: Paint) -> String {
    let head = format!(
        "{:>16} {:>14} {:<11} {:>8} {:>16}",
        "OFFSET", "BYTES", "WHERE", "CHUNK", "AT"
    );
    let mut table = paint.head(&head) + "\n";
    for piece in pieces {
        let chunk = match piece.chunk {
            Some(chunk) => chunk.to_string(),
            None => "-".to_owned(),
        };
        let offset_in_place = match piece.place {
            Place::Hole => "-".to_owned(),
            _ => piece.at.to_string(),
        };
        table += &format!(
            "{:>16} {:>14} {:<11} {chunk:>8} {offset_in_place:>16}\n",
            piece.offset,
            piece.bytes,
            piece.place.as_str()
        );
    }
    table
}
