//! `firn begin`, `prepare`, `commit`, `abort` and `restore`.

use std::path::{Path, PathBuf};

use clap::{ArgMatches, Args, FromArgMatches, ValueHint};
use firn_format::quote::quoted_path;
use firn_protocol::path::BytePath;
use firn_protocol::{Owner, Request};
use serde::Serialize;

use crate::failure::{DONE, FAILED, Failure};
use crate::output;
use crate::verb::{Verb, connect};

const EXITS: &[(u8, &str)] = &[
    (0, "done"),
    (
        1,
        "failed; the transaction is as it was, and the message says what to do",
    ),
    (2, "an option or argument that cannot be"),
    (11, "another transaction is in the way"),
    (10, "not on a firn mount"),
];

pub const BEGIN: Verb = Verb {
    name: "begin",
    about: "Begin a transaction in a directory",
    long: "From now on the backing shows nothing of what changes at or below PATH until `firn commit`; programs on \
           the mount see their changes at once. Needs a mount with drain=commit. With --owner the transaction is \
           aborted as soon as that process has ended, unless it was prepared; without, it stays open until somebody \
           commits or aborts it.",
    examples: &[
        ("firn begin /work", "the whole mount"),
        (
            "firn begin /work/step_100",
            "one directory; others may have their own transactions",
        ),
        (
            "firn begin /work --owner $$",
            "in a job script: nothing half is left open when the script ends",
        ),
    ],
    exits: EXITS,
    args: BeginArgs::augment_args,
    run: begin,
};

pub const PREPARE: Verb = Verb {
    name: "prepare",
    about: "Make a transaction durable and leave its outcome open",
    long: "When this returns, a commit can no longer fail for lack of space, and both outcomes survive any crash. \
           Now take the checkpoint of the job's memory with the same number. Changes at or below PATH wait until \
           `firn commit` or `firn abort`.",
    examples: &[(
        "firn prepare /work --id 17",
        "before checkpoint 17 of the job's memory is taken",
    )],
    exits: EXITS,
    args: NumberArgs::augment_args,
    run: prepare,
};

pub const COMMIT: Verb = Verb {
    name: "commit",
    about: "Make the changes of a transaction count, all of them",
    long: "When this returns, all changes since `firn begin` are durable in the backing. After a crash in between \
           the next mount has all of them or none. With --async it returns once that is decided, durably: all of \
           them count and programs see them. firnd carries them to their places behind the job, during which \
           other changes of names and attributes below PATH wait; `firn status` shows what is left.",
    examples: &[
        (
            "firn commit /work",
            "with the number it was prepared with, or the next one",
        ),
        (
            "firn commit /work --id 17 --begin",
            "and begin the next before anything can change",
        ),
        (
            "firn commit /work --async --begin",
            "and go on once it is decided, durably",
        ),
    ],
    exits: EXITS,
    args: CommitArgs::augment_args,
    run: commit,
};

pub const ABORT: Verb = Verb {
    name: "abort",
    about: "Throw the changes of a transaction away",
    long: "The files at or below PATH are as they were at `firn begin`. Open files that did not exist then give \
           ESTALE.",
    examples: &[("firn abort /work", "back to the last commit")],
    exits: EXITS,
    args: PlaceArgs::augment_args,
    run: abort,
};

pub const RESTORE: Verb = Verb {
    name: "restore",
    about: "Make the files those of a checkpoint",
    long: "For a job that restarts from checkpoint ID of its memory: finishes the transaction that was prepared \
           with this number, or throws away what came after the commit with this number.",
    examples: &[(
        "firn restore /work --id 17",
        "before the job is restarted from checkpoint 17",
    )],
    exits: EXITS,
    args: NumberArgs::augment_args,
    run: restore,
};

#[derive(Debug, Args)]
struct PlaceArgs {
    /// A mount point, or a directory below it.
    #[arg(value_hint = ValueHint::DirPath)]
    path: PathBuf,
    /// Print the outcome as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct BeginArgs {
    #[command(flatten)]
    place: PlaceArgs,
    /// Process that the transaction belongs to: it is aborted when PID ends before it is prepared.
    #[arg(long, value_name = "PID")]
    owner: Option<u32>,
}

#[derive(Debug, Args)]
struct NumberArgs {
    #[command(flatten)]
    place: PlaceArgs,
    /// Number of the checkpoint.
    #[arg(long)]
    id: u64,
}

#[derive(Debug, Args)]
struct CommitArgs {
    #[command(flatten)]
    place: PlaceArgs,
    /// Number of the checkpoint.
    #[arg(long)]
    id: Option<u64>,
    /// Begin the next transaction at once.
    #[arg(long)]
    begin: bool,
    /// Return once it is decided, and carry it out behind programs that read and write on.
    #[arg(long = "async")]
    behind: bool,
}

#[derive(Serialize)]
struct Outcome<'a> {
    mount_point: BytePath,
    /// Below the mount point; empty: all of it.
    scope: &'a BytePath,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<u64>,
    /// Hosts that have not carried the commit out yet.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    behind: Vec<String>,
}

/// Sends a request about the transaction at a path, and says what came of it.
fn ask(
    path: &Path,
    json: bool,
    request: impl FnOnce(BytePath) -> Request,
    words: impl FnOnce(&str, Option<u64>) -> String,
) -> Result<u8, Failure> {
    let (place, mut connection) = connect(path)?;
    let (id, behind) = connection
        .transaction(&request(place.relative.clone()))?
        .unzip();
    let behind = behind.unwrap_or_default();
    let mount_point = place.mount.mount_point.into();
    if json {
        output::print_json(&Outcome {
            mount_point,
            scope: &place.relative,
            id,
            behind,
        })?;
    } else {
        output::say(&words(&quoted_path(path), id));
        if !behind.is_empty() {
            let which = behind.join(", ");
            output::say(&format!(
                "not yet carried out on {which}: it is when firnd runs there again, or by firn recover --host"
            ));
        }
    }
    Ok(DONE)
}

fn begin(matches: &ArgMatches) -> Result<u8, Failure> {
    let BeginArgs { place, owner } = BeginArgs::from_arg_matches(matches)?;
    let owner = match owner {
        None => Owner::None,
        Some(pid) => firn_client::owner_process(pid).map_err(|error| {
            Failure::new(
                FAILED,
                format!("--owner {pid}: this process cannot own a transaction: {error}; give one that runs"),
            )
        })?,
    };
    ask(
        &place.path,
        place.json,
        |path| Request::Begin { path, owner },
        |at, _| format!("{at}: a transaction is open"),
    )
}

fn prepare(matches: &ArgMatches) -> Result<u8, Failure> {
    let NumberArgs { place, id } = NumberArgs::from_arg_matches(matches)?;
    let words = |at: &str, _| format!("{at}: prepared as {id}; firn commit or firn abort decides");
    ask(
        &place.path,
        place.json,
        |path| Request::Prepare { path, id },
        words,
    )
}

fn commit(matches: &ArgMatches) -> Result<u8, Failure> {
    let CommitArgs {
        place,
        id,
        begin,
        behind,
    } = CommitArgs::from_arg_matches(matches)?;
    let words = |at: &str, id: Option<u64>| {
        let how = if behind {
            "; it is carried out behind"
        } else {
            ""
        };
        let next = if begin {
            "; the next transaction is open"
        } else {
            ""
        };
        format!("{at}: committed as {}{how}{next}", id.unwrap_or_default())
    };
    ask(
        &place.path,
        place.json,
        |path| Request::Commit {
            path,
            id,
            begin,
            behind,
        },
        words,
    )
}

fn abort(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = PlaceArgs::from_arg_matches(matches)?;
    ask(
        &args.path,
        args.json,
        |path| Request::Abort { path },
        |at, _| format!("{at}: as it was at its begin"),
    )
}

fn restore(matches: &ArgMatches) -> Result<u8, Failure> {
    let NumberArgs { place, id } = NumberArgs::from_arg_matches(matches)?;
    let words = |at: &str, _| format!("{at}: the files are those of checkpoint {id}");
    ask(
        &place.path,
        place.json,
        |path| Request::Restore { path, id },
        words,
    )
}
