//! `firn prune`: removes old checkpoints of a directory. [`crate::prune`] decides which, and removes them.

use std::path::{Path, PathBuf};

use clap::{ArgMatches, Args, FromArgMatches, ValueHint, value_parser};
use firn_client::checkpoints::Directory;
use firn_protocol::path::BytePath;
use serde::Serialize;

use crate::failure::{DONE, Failure, PARTLY};
use crate::prune::{self, Removal, Verdict};
use crate::verb::{NO_CONNECTION, Verb, find_mount};
use crate::{output, text};

pub const VERB: Verb = Verb {
    name: "prune",
    about: "Delete old checkpoints, and keep the newest",
    long: "Each of your directories directly below DIR counts as a checkpoint. Directories of other users, and what \
           other users put into yours, do not count, whatever their dates are. The newest N whole checkpoints are kept, \
           and older ones are removed. A checkpoint is whole if it has files, none of them is open for writing or cut \
           (its writer was killed before it closed the file), and no open transaction may have changed it. The newest \
           checkpoint is always kept, because its job may still be writing to it. It is one of the N only if it has as \
           many files as the whole checkpoint before it. A checkpoint with an open file is never removed, nor is one to \
           which a symbolic link in DIR points. The age of a checkpoint is the newest modification time in it. Names \
           that begin with a dot are ignored. DIR must be on a firn mount, because only its firnd knows which files are \
           open or cut. If one checkpoint cannot be removed, the others are still removed.",
    examples: &[
        (
            "firn prune --keep 2 --dry-run /ckpt",
            "show what would be removed",
        ),
        (
            "firn prune --keep 2 /ckpt",
            "from cron, or between the steps of a job",
        ),
    ],
    exits: &[
        (0, "done, or there was nothing to remove"),
        (1, "failed"),
        (
            3,
            "a checkpoint could not be examined or removed; messages name it",
        ),
        (10, "not on a firn mount"),
        NO_CONNECTION,
    ],
    args: PruneArgs::augment_args,
    run,
};

#[derive(Debug, Args)]
struct PruneArgs {
    /// The directory that holds the checkpoints.
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    dir: PathBuf,
    /// Number of whole checkpoints to keep.
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..))]
    keep: u32,
    /// Show what would be removed, but remove nothing.
    #[arg(long)]
    dry_run: bool,
    /// Print the outcome as JSON.
    #[arg(long)]
    json: bool,
}

/// The result, as JSON.
#[derive(Serialize)]
struct PruneResult {
    /// Names of the checkpoints that were removed, or that would be.
    removed: Vec<BytePath>,
    /// Names of the checkpoints that stay, the newest first, each with the reason.
    kept: Vec<KeptCheckpoint>,
    /// Why some checkpoints could not be examined or removed.
    failures: Vec<String>,
}

/// A checkpoint that stays, and the reason in one word.
#[derive(Serialize)]
struct KeptCheckpoint {
    /// Name of the checkpoint in its directory.
    name: BytePath,
    /// Why it stays.
    why: &'static str,
}

/// Removes old checkpoints, or shows with `--dry-run` what would be removed. Returns [`PARTLY`] if one failed.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = PruneArgs::from_arg_matches(matches)?;
    let directory = Directory::open(find_mount(&args.dir)?)?;
    let result = prune_directory(&directory, args.keep as usize, args.dry_run)?;
    for failure in &result.failures {
        output::print_message(failure);
    }
    let exit_status = if result.failures.is_empty() {
        DONE
    } else {
        PARTLY
    };
    if args.json {
        output::print_json(&result)?;
    } else {
        print_summary(&result, args.dry_run)?;
    }
    Ok(exit_status)
}

/// Removes old checkpoints of a directory, and keeps at least `keep` complete ones. A dry run removes nothing.
///
/// Fails if the directory cannot be examined. A checkpoint that cannot be examined or removed stays, and the result has
/// the failure.
fn prune_directory(
    directory: &Directory,
    keep: usize,
    is_dry_run: bool,
) -> Result<PruneResult, Failure> {
    let mut failures = if is_dry_run {
        Vec::new()
    } else {
        prune::finish_removals(directory)?
    };
    let decisions = prune::decide_removals(directory, keep)?;
    failures.extend(decisions.failures);
    let mut removed = Vec::new();
    let mut kept = Vec::new();
    for checkpoint in decisions.checkpoints {
        let mut verdict = checkpoint.verdict;
        if verdict == Verdict::Remove && !is_dry_run {
            match prune::remove_checkpoint(directory, &checkpoint) {
                Ok(Removal::Removed) => {}
                Ok(Removal::Opened) => verdict = Verdict::Open,
                Err(failure) => {
                    // The checkpoint is neither removed nor kept for a reason, so it is in no list.
                    failures.push(failure);
                    continue;
                }
            }
        }
        let name = BytePath::from(Path::new(&checkpoint.name));
        match verdict {
            Verdict::Remove => removed.push(name),
            reason => kept.push(KeptCheckpoint {
                name,
                why: reason.as_str(),
            }),
        }
    }
    Ok(PruneResult {
        removed,
        kept,
        failures: failures.iter().filter_map(Failure::text).collect(),
    })
}

/// Prints the name of each checkpoint that was removed (or would be, with `--dry-run`), and how many stay.
fn print_summary(result: &PruneResult, is_dry_run: bool) -> Result<(), Failure> {
    let action = if is_dry_run {
        "would be removed"
    } else {
        "removed"
    };
    for name in &result.removed {
        output::print(&format!("{action}: {name}\n"))?;
    }
    let removed = text::count(result.removed.len() as u64, "checkpoint");
    let kept_count = result.kept.len();
    output::print_message(&format!("{removed} {action}, {kept_count} kept"));
    Ok(())
}
