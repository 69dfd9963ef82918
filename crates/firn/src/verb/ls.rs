//! `firn ls`: lists the files of a mount with their durability levels, and whether they were closed.
//!
//! The level of a file says where its data is: *held* data is only in memory, *drained* data is in the backing, and
//! *durable* data is synced there.

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
    /// Durability level and ending of the file, and its bytes in memory.
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

/// Lists files with their durability levels, or the checkpoints that commit rules make.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = LsArgs::from_arg_matches(matches)?;
    let (location, mut connection) = connect(&args.path)?;
    let mut found_files = Vec::new();
    let top = location.mount.mount_point.join(&location.relative);
    collect_files(&top, &mut found_files)?;
    found_files.sort_by(|a, b| a.path.cmp(&b.path));
    // Ask for the status after the files are found, because a lookup makes a file known to firnd.
    let status = connection.status()?;
    let levels = Levels::request(&mut connection, &location, &status)?;
    if args.checkpoints {
        let checkpoints = checkpoints::list_checkpoints(&found_files, &location, &status, &levels)?;
        return checkpoints::print_checkpoints(&checkpoints, args.json).map(|()| DONE);
    }
    let mut files: Vec<ListedFile> = found_files
        .iter()
        .map(|file| list_file(file, &location.mount.mount_point, &levels))
        .collect();
    if let Some(state) = &args.state {
        files.retain(|file| file.status.matches_word(state));
    }
    if args.json {
        output::print_json(&files)?;
        return Ok(DONE);
    }
    for file in &files {
        output::print(&format_file(file))?;
    }
    Ok(DONE)
}

/// Returns the entry of a file: its size and its status. `levels` has the files that firnd, the daemon of the mount,
/// listed. Any other file has no bytes in memory.
fn list_file(file: &FoundFile, mount_point: &Path, levels: &Levels) -> ListedFile {
    let relative_path = file.path.strip_prefix(mount_point).unwrap_or(&file.path);
    let held_bytes = match levels.known(relative_path) {
        Some(known_file) => known_file.held_bytes,
        None => 0,
    };
    ListedFile {
        path: relative_path.into(),
        size: levels.size(relative_path, file.size),
        status: FileState {
            level: levels.level(relative_path),
            ending: levels.ending(relative_path),
            held_bytes,
        },
    }
}

/// Returns the line of a file.
fn format_file(ListedFile { path, size, status }: &ListedFile) -> String {
    let level = status.level.as_str();
    let ending = status.ending.as_str();
    let size = text::bytes(*size);
    let held = text::bytes(status.held_bytes);
    format!("{level:<8} {ending:<7} {size:>10} {held:>10} {path}\n")
}

/// A regular file on the mount.
struct FoundFile {
    /// Path of the file.
    path: PathBuf,
    /// Size in bytes, as the mount shows it.
    size: u64,
    /// Time of the last modification, in seconds since 1970.
    modified_s: f64,
}

/// Adds the regular files at or below `path` to `found_files`. A file that vanishes during the search is left out.
fn collect_files(path: &Path, found_files: &mut Vec<FoundFile>) -> Result<(), Failure> {
    let failed =
        |error: std::io::Error| Failure::new(FAILED, format!("{}: {error}", text::path(path)));
    let metadata = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    if metadata.is_file() {
        found_files.push(FoundFile {
            path: path.to_owned(),
            size: metadata.len(),
            modified_s: metadata.mtime() as f64 + metadata.mtime_nsec() as f64 / 1e9,
        });
    } else if metadata.is_dir() {
        for entry in std::fs::read_dir(path).map_err(failed)? {
            collect_files(&entry.map_err(failed)?.path(), found_files)?;
        }
    }
    Ok(())
}
