//! `firn history` and `firn latest`: the checkpoints of a directory, and the newest complete one.
//!
//! A checkpoint is a directory or a file with a step in its name, such as `step_100`. It is complete (the users' word
//! is *whole*) if it has files, all were closed, and no open transaction may have changed it. Its durability *level*
//! says where its data is: in memory only, in the backing, or synced there.

use std::ffi::OsStr;
use std::io::{self, IsTerminal, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use clap::{ArgMatches, Args, FromArgMatches, ValueHint};
use firn_client::checkpoints::{Checkpoint, CheckpointState, Directory};
use firn_format::durability::DurabilityLevel;
use firn_protocol::path::BytePath;
use serde::{Deserialize, Serialize};

use crate::failure::{DONE, FAILED, Failure, PARTLY};
use crate::output::{self, Paint};
use crate::text;
use crate::verb::{NO_CONNECTION, Verb};

pub const HISTORY: Verb = Verb {
    name: "history",
    about: "List the checkpoints of a directory, the newest first",
    long: "Prints one line per checkpoint: its step, its size, its number of files, whether it is whole, its durability \
           level (the lowest level of its files), the time since its last modification, the host whose memory has the \
           data that is not in the backing, and its name. A checkpoint is a directory or file of yours directly in DIR \
           with a step in its name: step_100, checkpoint-500, ckpt.0000100.h5, global_step20, epoch=3-step=900.ckpt, \
           iter_0001000, or a bare number. It is whole if it has files, none of them is open for writing (`written`) or \
           cut (its writer or firnd was killed before it closed the file), and no open transaction may have changed it \
           (`in-transaction`). Of the time before this mount, only files that were held when the mount began are known. \
           If DIR is not mounted, the state is `unknown`.",
    examples: &[
        ("firn history /ckpt", "the checkpoints of a job"),
        (
            "firn history --json /ckpt | jq '.[] | select(.whole) | .step'",
            "for scripts",
        ),
    ],
    exits: &[
        (0, "done, or there is no checkpoint"),
        (1, "failed"),
        (
            3,
            "some checkpoints could not be examined; messages name them",
        ),
        NO_CONNECTION,
    ],
    args: HistoryArgs::augment_args,
    run: run_history,
};

pub const LATEST: Verb = Verb {
    name: "latest",
    about: "Print the path of the newest whole checkpoint",
    long: "Prints the newest of the checkpoints that `firn history DIR` lists as whole, for scripts that resume. If DIR \
           is not mounted, it is unknown whether files were closed: the newest checkpoint that has files is printed, \
           with a warning. This fails if an earlier mount left data in memory that the backing lacks.",
    examples: &[(
        "train --resume \"$(firn latest /ckpt)\"",
        "resume from the last whole checkpoint",
    )],
    exits: &[
        (0, "the path of a checkpoint was printed"),
        (1, "there is no whole checkpoint, or the search failed"),
        NO_CONNECTION,
    ],
    args: LatestArgs::augment_args,
    run: run_latest,
};

#[derive(Debug, Args)]
struct HistoryArgs {
    /// The directory that holds the checkpoints: on a mount, or in a backing that is not mounted.
    #[arg(value_name = "DIR", default_value = ".", value_hint = ValueHint::DirPath)]
    dir: PathBuf,
    /// Print the list as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct LatestArgs {
    /// The directory that holds the checkpoints: on a mount, or in a backing that is not mounted.
    #[arg(value_name = "DIR", default_value = ".", value_hint = ValueHint::DirPath)]
    dir: PathBuf,
}

/// A checkpoint as JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CheckpointEntry {
    /// Name of the checkpoint in its directory.
    pub name: BytePath,
    /// Absolute path of the checkpoint.
    pub path: BytePath,
    /// Number of the checkpoint.
    pub step: u64,
    /// Size of its files in bytes.
    pub bytes: u64,
    /// The part of `bytes` that is not in the backing yet.
    pub held_bytes: u64,
    /// The part of `bytes` that a sync has made durable.
    pub durable_bytes: u64,
    /// Number of its files.
    pub files: u64,
    /// Whether the checkpoint is complete. `None` means that this is unknown.
    pub whole: Option<bool>,
    /// The word `whole`, or the word for why the checkpoint is not whole.
    pub state: String,
    /// The lowest durability level of its files. `None` means that it has no file.
    pub level: Option<DurabilityLevel>,
    /// Seconds since the last modification of anything in the checkpoint.
    pub age_seconds: f64,
    /// The host whose memory holds what the backing lacks. `None` means that the backing has everything.
    pub host: Option<String>,
}

impl CheckpointEntry {
    /// Returns the entry of a checkpoint, or `None` if its name has no step (number).
    ///
    /// `memory_host` is the name of this host if the directory is on a mount. The entry has it only if the durability
    /// level of the checkpoint is below `Logged`, so that some of its data may be in the memory of this host.
    fn from_checkpoint(
        directory: &Directory,
        checkpoint: &Checkpoint,
        memory_host: Option<&str>,
    ) -> Option<Self> {
        let is_in_memory = checkpoint
            .level
            .is_some_and(|level| level < DurabilityLevel::Logged);
        let step = checkpoint.step?;
        Some(Self {
            name: Path::new(&checkpoint.name).into(),
            path: directory.path().join(&checkpoint.name).into(),
            step,
            bytes: checkpoint.bytes,
            held_bytes: checkpoint.held_bytes,
            durable_bytes: checkpoint.durable_bytes,
            files: checkpoint.files,
            whole: match checkpoint.wholeness {
                CheckpointState::Unknown => None,
                wholeness => Some(wholeness == CheckpointState::Whole),
            },
            state: checkpoint.wholeness.as_str().to_owned(),
            level: checkpoint.level,
            age_seconds: age_seconds(checkpoint.modified),
            host: memory_host.filter(|_| is_in_memory).map(str::to_owned),
        })
    }
}

/// Returns the time since a modification, in seconds. A time in the future counts as now.
fn age_seconds((seconds, nanoseconds): (i64, i64)) -> f64 {
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    (now.as_secs_f64() - seconds as f64 - nanoseconds as f64 / 1e9).max(0.0)
}

/// Prints the checkpoints of a directory. Returns [`PARTLY`] if some could not be examined.
fn run_history(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = HistoryArgs::from_arg_matches(matches)?;
    let directory = Directory::find(&args.dir)?;
    let host = directory.host()?;
    let listing = directory.list_checkpoints()?;
    let entries: Vec<CheckpointEntry> = listing
        .checkpoints
        .iter()
        .filter_map(|checkpoint| {
            CheckpointEntry::from_checkpoint(&directory, checkpoint, host.as_deref())
        })
        .collect();
    for (_, _, error) in &listing.failed {
        output::print_message(&error.to_string());
    }
    warn_of_data_in_memory(&directory);
    if args.json {
        output::print_json(&entries)?;
    } else {
        output::print(&format_entries(&entries, Paint::stdout()))?;
    }
    Ok(if listing.failed.is_empty() {
        DONE
    } else {
        PARTLY
    })
}

/// Warns that an unmounted backing lacks data: an earlier mount left it in memory.
fn warn_of_data_in_memory(directory: &Directory) {
    if !directory.is_mounted()
        && let Some(arena) = directory.find_left_arena()
    {
        output::print_message(&missing_data_warning(directory, &arena));
    }
}

/// Returns the warning that an unmounted backing lacks the data in `arena`.
fn missing_data_warning(directory: &Directory, arena: &Path) -> String {
    format!(
        "{} is not mounted, and {} holds data that an earlier mount left in memory: mount it again, or run `firn recover`",
        text::path(directory.path()),
        text::path(arena)
    )
}

const COLUMN_NAMES: [&str; 8] = [
    "STEP", "SIZE", "FILES", "STATE", "LEVEL", "AGE", "HOST", "NAME",
];

/// A cell for each column.
type TableRow = [String; COLUMN_NAMES.len()];

/// Returns a table of the checkpoints. The name of an incomplete checkpoint has the colour of a warning. Without
/// checkpoints the text is empty.
fn format_entries(entries: &[CheckpointEntry], paint: Paint) -> String {
    if entries.is_empty() {
        return String::new();
    }
    let mut rows = vec![COLUMN_NAMES.map(str::to_owned)];
    rows.extend(entries.iter().map(entry_row));
    text::pad_columns(&mut rows, &["STEP", "SIZE", "FILES"]);
    let mut table = format_row(&rows[0], |name| paint.head(name));
    for (row, entry) in rows[1..].iter().zip(entries) {
        table += &format_row(row, |name| match entry.whole {
            Some(false) => paint.warning(name),
            Some(true) | None => name.to_owned(),
        });
    }
    table
}

/// Returns the line of a row. The last cell, which is the name, goes through `paint_name`.
fn format_row(row: &TableRow, paint_name: impl Fn(&str) -> String) -> String {
    let [cells @ .., name] = row;
    format!("{}  {}\n", cells.join("  "), paint_name(name))
}

/// Returns the cells of a checkpoint in the table.
fn entry_row(entry: &CheckpointEntry) -> TableRow {
    let level = entry.level.map_or("-", DurabilityLevel::as_str);
    [
        entry.step.to_string(),
        text::bytes(entry.bytes),
        entry.files.to_string(),
        entry.state.clone(),
        level.to_owned(),
        text::seconds(entry.age_seconds),
        text::escaped(entry.host.as_deref().unwrap_or("-")),
        entry.name.to_string(),
    ]
}

/// Prints a warning about a directory that is not mounted. Fails if an earlier mount has left its arena (the file in
/// memory with data that is not in the backing): the newest checkpoint may be there, so an older one from the backing
/// would be the wrong answer.
fn check_unmounted_directory(directory: &Directory) -> Result<(), Failure> {
    if let Some(arena) = directory.find_left_arena() {
        let text = missing_data_warning(directory, &arena);
        return Err(Failure::new(FAILED, text));
    }
    let shown_directory = text::path(directory.path());
    output::print_message(&format!(
        "{shown_directory} is not mounted: it is unknown whether the files of its checkpoints were closed"
    ));
    Ok(())
}

/// Prints the path of the newest usable checkpoint, from which a job can resume. Fails if none is usable.
///
/// In an unmounted backing it is unknown whether files were closed, so there any checkpoint with a file counts. Fails
/// if an earlier mount of that backing has left its arena (the file in memory with data that is not in the backing).
fn run_latest(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = LatestArgs::from_arg_matches(matches)?;
    let directory = Directory::find(&args.dir)?;
    let shown_directory = text::path(directory.path());
    if !directory.is_mounted() {
        check_unmounted_directory(&directory)?;
    }
    let listing = directory.list_checkpoints()?;
    for (_, _, error) in &listing.failed {
        output::print_message(&error.to_string());
    }
    let mut checkpoints = listing.checkpoints;
    checkpoints.retain(|checkpoint| checkpoint.step.is_some());
    // The newest checkpoint comes first.
    if let Some(newest) = checkpoints.iter().find(|checkpoint| is_usable(checkpoint)) {
        print_path(&directory.path().join(&newest.name))?;
        return Ok(DONE);
    }
    let text = if checkpoints.is_empty() {
        format!("{shown_directory} has no checkpoint")
    } else {
        format!(
            "none of the {} in {shown_directory} is whole: `firn history {shown_directory}` says why",
            text::count(checkpoints.len() as u64, "checkpoint")
        )
    };
    Err(Failure::new(FAILED, text))
}

/// Returns whether a job can resume from a checkpoint, as far as this is known.
fn is_usable(checkpoint: &Checkpoint) -> bool {
    match checkpoint.wholeness {
        CheckpointState::Whole => true,
        CheckpointState::Unknown => checkpoint.files > 0,
        _ => false,
    }
}

/// Prints a path. A script gets its exact bytes. On a terminal, characters that could steer it are escaped.
fn print_path(path: &Path) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    if stdout.is_terminal() {
        // `output::print` locks standard output again.
        drop(stdout);
        return output::print(&format!("{}\n", text::path(path)));
    }
    let line = [OsStr::as_bytes(path.as_os_str()), b"\n"].concat();
    let result = stdout.write_all(&line).and_then(|()| stdout.flush());
    result.map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => Failure::OutputClosed,
        _ => Failure::new(FAILED, format!("cannot write to standard output: {error}")),
    })
}
