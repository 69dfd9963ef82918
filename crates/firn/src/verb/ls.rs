//! `firn ls`: lists the files of a mount with their durability levels, and whether they were closed.

mod checkpoints;

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use clap::{ArgMatches, Args, FromArgMatches, ValueHint};
use firn_client::levels::Levels;
use firn_format::durability::DurabilityLevel;
use firn_format::record::Ending;
use firn_protocol::path::BytePath;
use serde::Serialize;

use crate::failure::{DONE, FAILED, Failure};
use crate::verb::{NO_CONNECTION, Verb, connect};
use crate::{output, text};

pub const VERB: Verb = Verb {
    name: "ls",
    about: "List files, where their data is, and whether they were closed",
    long: "Prints one line per file: its durability level (held, spilled, partnered, logged, drained or durable); \
           `closed` if its writers closed it, `open` if one of them still has it open, `cut` if one of them, or firnd, \
           was killed before it closed the file; its size; how many of its bytes are held, that is, not in the backing; \
           and its path. A file counts as durable only if the present firnd saw it synced; a file that was synced \
           before this mount counts as `drained`. A cut file is an unfinished checkpoint. Works without FUSE, too, \
           where ls(1) shows empty files.\n\n\
           With --checkpoints, on a mount with the option `rules`, prints one line per checkpoint of a rule, the newest \
           step last: its step, its rule, its number of files, its size, how many of its files are open for writing, \
           whether it is complete (a rule has committed it, or it existed before), whether it is durable, the time \
           since its last modification, and its name. A checkpoint that a program renames when it is complete is listed \
           under its old name only; `firn history` shows the new name.",
    examples: &[
        ("firn ls /ckpt", "all files of the mount"),
        (
            "firn ls --state cut /ckpt",
            "files that a restart must not use",
        ),
        (
            "firn ls --checkpoints /ckpt",
            "checkpoints by commit rules, and which of them are complete",
        ),
    ],
    exits: &[
        (0, "done"),
        (1, "failed"),
        (10, "not on a firn mount"),
        NO_CONNECTION,
    ],
    args: LsArgs::augment_args,
    run,
};

#[derive(Debug, Args)]
struct LsArgs {
    /// A mount point, or a file or directory below it.
    #[arg(value_hint = ValueHint::AnyPath)]
    path: PathBuf,
    /// List only files in this state.
    #[arg(long, value_name = "STATE", value_parser = ["held", "spilled", "partnered", "logged", "drained", "durable", "open", "closed", "cut"])]
    state: Option<String>,
    /// List checkpoints of the mount's commit rules instead of files.
    #[arg(long, conflicts_with = "state")]
    checkpoints: bool,
    /// Print the list as JSON.
    #[arg(long)]
    json: bool,
}

/// A file, as JSON.
#[derive(Serialize)]
struct ListedFile {
    /// Path below the mount point.
    path: BytePath,
    /// Size of the file in bytes.
    size: u64,
    #[serde(flatten)]
    status: FileState,
}

/// The status of a file.
#[derive(Clone, Copy, Serialize)]
struct FileState {
    /// The file's durability level.
    level: DurabilityLevel,
    /// How the last program left the file: still open, closed, or cut off before its close.
    ending: Ending,
    /// Bytes of the file that are not in the backing.
    held_bytes: u64,
}

impl FileState {
    /// Returns whether `state` is the word for the level or for the ending of the file.
    fn matches_word(&self, state: &str) -> bool {
        self.level.as_str() == state || self.ending.as_str() == state
    }
}

/// Lists files with their levels, or the checkpoints of commit rules.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = LsArgs::from_arg_matches(matches)?;
    let (place, mut connection) = connect(&args.path)?;
    let mut paths = Vec::new();
    walk(&place.mount.mount_point.join(&place.relative), &mut paths)?;
    paths.sort_by(|one, other| one.path.cmp(&other.path));
    // Ask for the status after the walk, because a lookup during the walk makes a file known to firnd.
    let status = connection.status()?;
    let levels = Levels::ask(&mut connection, &place, &status)?;
    if args.checkpoints {
        let listed = checkpoints::list(&paths, &place, &status, &levels)?;
        return checkpoints::print(&listed, args.json).map(|()| DONE);
    }
    let mut listed = Vec::new();
    for FoundFile { path, size, .. } in paths {
        let relative = path.strip_prefix(&place.mount.mount_point).unwrap_or(&path);
        let known = levels.known(relative);
        let status = FileState {
            level: levels.level(relative),
            ending: levels.ending(relative),
            held_bytes: known.map_or(0, |file| file.held_bytes),
        };
        let size = levels.size(relative, size);
        if args
            .state
            .as_ref()
            .is_none_or(|state| status.matches_word(state))
        {
            listed.push(ListedFile {
                path: relative.into(),
                size,
                status,
            });
        }
    }
    if args.json {
        output::print_json(&listed)?;
        return Ok(DONE);
    }
    for ListedFile { path, size, status } in &listed {
        let level = status.level.as_str();
        let ending = status.ending.as_str();
        let size = text::bytes(*size);
        let held = text::bytes(status.held_bytes);
        output::print(&format!(
            "{level:<8} {ending:<7} {size:>10} {held:>10} {path}\n"
        ))?;
    }
    Ok(DONE)
}

/// A regular file that the walk found.
struct FoundFile {
    path: PathBuf,
    size: u64,
    /// Time of the last modification, in seconds since 1970.
    modified_s: f64,
}

/// Adds the regular files at or below `path` to `found`. A file that vanishes during the walk is left out.
fn walk(path: &Path, found: &mut Vec<FoundFile>) -> Result<(), Failure> {
    let failed =
        |error: std::io::Error| Failure::new(FAILED, format!("{}: {error}", text::path(path)));
    let metadata = match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        metadata => metadata.map_err(failed)?,
    };
    if metadata.is_file() {
        found.push(FoundFile {
            path: path.to_owned(),
            size: metadata.len(),
            modified_s: metadata.mtime() as f64 + metadata.mtime_nsec() as f64 / 1e9,
        });
    } else if metadata.is_dir() {
        for entry in std::fs::read_dir(path).map_err(failed)? {
            walk(&entry.map_err(failed)?.path(), found)?;
        }
    }
    Ok(())
}
