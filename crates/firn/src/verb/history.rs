//! `firn history` and `firn latest`: the checkpoints of a directory, and the newest whole one.

use std::ffi::OsStr;
use std::io::{self, IsTerminal, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use clap::{ArgMatches, Args, FromArgMatches, ValueHint};
use firn_client::checkpoints::{Checkpoint, Directory, Wholeness};
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
    /// Whether the checkpoint is whole. `None` means that this is unknown.
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
    /// Returns the entry of a checkpoint, or `None` if its name has no step.
    fn of(directory: &Directory, checkpoint: &Checkpoint, host: Option<&str>) -> Option<Self> {
        let is_in_memory = checkpoint
            .level
            .is_some_and(|level| level < DurabilityLevel::Logged);
        Some(Self {
            name: Path::new(&checkpoint.name).into(),
            path: directory.path().join(&checkpoint.name).into(),
            step: checkpoint.step?,
            bytes: checkpoint.bytes,
            held_bytes: checkpoint.held_bytes,
            durable_bytes: checkpoint.durable_bytes,
            files: checkpoint.files,
            whole: match checkpoint.wholeness {
                Wholeness::Unknown => None,
                wholeness => Some(wholeness == Wholeness::Whole),
            },
            state: checkpoint.wholeness.as_str().to_owned(),
            level: checkpoint.level,
            age_seconds: age_seconds(checkpoint.modified),
            host: host.filter(|_| is_in_memory).map(str::to_owned),
        })
    }
}

/// Returns the time since a modification, in seconds. A time in the future counts as now.
fn age_seconds((seconds, nanoseconds): (i64, i64)) -> f64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let now = now.map_or(0.0, |since| since.as_secs_f64());
    (now - seconds as f64 - nanoseconds as f64 / 1e9).max(0.0)
}

/// Prints the checkpoints of a directory. Returns [`PARTLY`] if some could not be examined.
fn run_history(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = HistoryArgs::from_arg_matches(matches)?;
    let directory = Directory::find(&args.dir)?;
    let host = directory.host()?;
    let looked = directory.look()?;
    let checkpoints = looked.checkpoints.iter();
    let listed: Vec<CheckpointEntry> = checkpoints
        .filter_map(|one| CheckpointEntry::of(&directory, one, host.as_deref()))
        .collect();
    let failures: Vec<String> = looked
        .failed
        .iter()
        .map(|(_, _, error)| error.to_string())
        .collect();
    for failure in &failures {
        output::print_message(failure);
    }
    warn_of_memory(&directory);
    if args.json {
        output::print_json(&listed)?;
    } else {
        output::print(&table(&listed, Paint::stdout()))?;
    }
    Ok(if failures.is_empty() { DONE } else { PARTLY })
}

/// Warns that an unmounted backing lacks data: an earlier mount left it in memory.
fn warn_of_memory(directory: &Directory) {
    if !directory.is_mounted()
        && let Some(arena) = directory.left_arena()
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

const HEAD: [&str; 8] = [
    "STEP", "SIZE", "FILES", "STATE", "LEVEL", "AGE", "HOST", "NAME",
];

/// Returns a table of the checkpoints. The name of one that is not whole has the colour of a warning.
fn table(listed: &[CheckpointEntry], paint: Paint) -> String {
    if listed.is_empty() {
        return String::new();
    }
    let mut rows = vec![HEAD.map(str::to_owned)];
    rows.extend(listed.iter().map(row));
    text::pad_columns(&mut rows, &["STEP", "SIZE", "FILES"]);
    let mut lines = String::new();
    for (index, row) in rows.iter().enumerate() {
        let [cells @ .., name] = row;
        lines += &cells.join("  ");
        lines += "  ";
        lines += &match index.checked_sub(1).map(|at| listed[at].whole) {
            None => paint.head(name),
            Some(Some(false)) => paint.warning(name),
            Some(_) => name.clone(),
        };
        lines.push('\n');
    }
    lines
}

/// Returns the cells of a checkpoint in the table.
fn row(listed: &CheckpointEntry) -> [String; HEAD.len()] {
    let level = listed.level.map_or("-", DurabilityLevel::as_str);
    [
        listed.step.to_string(),
        text::bytes(listed.bytes),
        listed.files.to_string(),
        listed.state.clone(),
        level.to_owned(),
        text::seconds(listed.age_seconds),
        text::name(listed.host.as_deref().unwrap_or("-")),
        listed.name.to_string(),
    ]
}

/// Prints the path of the newest usable checkpoint, or fails if none is usable.
///
/// In an unmounted backing it is unknown whether files were closed, so there any checkpoint with a file counts.
fn run_latest(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = LatestArgs::from_arg_matches(matches)?;
    let directory = Directory::find(&args.dir)?;
    let shown = text::path(directory.path());
    if !directory.is_mounted() {
        // The newest checkpoint may be in that arena, so an older one from the backing would be the wrong answer.
        if let Some(arena) = directory.left_arena() {
            return Err(Failure::new(
                FAILED,
                missing_data_warning(&directory, &arena),
            ));
        }
        output::print_message(&format!(
            "{shown} is not mounted: it is unknown whether the files of its checkpoints were closed"
        ));
    }
    let looked = directory.look()?;
    for (_, _, error) in &looked.failed {
        output::print_message(&error.to_string());
    }
    let with_step = || looked.checkpoints.iter().filter(|one| one.step.is_some());
    let is_usable = |one: &&Checkpoint| match one.wholeness {
        Wholeness::Whole => true,
        Wholeness::Unknown => one.files > 0,
        _ => false,
    };
    match with_step().find(is_usable) {
        Some(newest) => print_path(&directory.path().join(&newest.name)).map(|()| DONE),
        None => {
            let count = with_step().count() as u64;
            let found = match count {
                0 => format!("{shown} has no checkpoint"),
                _ => format!(
                    "none of the {} in {shown} is whole: `firn history {shown}` says why",
                    text::count(count, "checkpoint")
                ),
            };
            Err(Failure::new(FAILED, found))
        }
    }
}

/// Prints a path. A script gets its exact bytes. On a terminal, characters that could steer it are escaped.
fn print_path(path: &Path) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    if stdout.is_terminal() {
        drop(stdout);
        return output::print(&format!("{}\n", text::path(path)));
    }
    let line = [OsStr::as_bytes(path.as_os_str()), b"\n"].concat();
    let written = stdout.write_all(&line).and_then(|()| stdout.flush());
    written.map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => Failure::OutputClosed,
        _ => Failure::new(FAILED, format!("cannot write to standard output: {error}")),
    })
}
