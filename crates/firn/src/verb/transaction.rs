//! The verbs of transactions: `firn begin`, `prepare`, `commit`, `abort` and `restore`.

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::{ArgMatches, Args, FromArgMatches, ValueHint};
use firn_client::Connection;
use firn_format::quote::quoted_path;
use firn_protocol::path::BytePath;
use firn_protocol::{Owner, Request, TransactionStage};
use serde::Serialize;

use crate::failure::{DONE, FAILED, Failure};
use crate::verb::{NO_CONNECTION, Verb, connect};
use crate::{output, text};

const EXITS: &[(u8, &str)] = &[
    (0, "done"),
    (
        1,
        "failed; the transaction is as it was, and the message says what to do",
    ),
    (2, "an invalid option or argument"),
    (10, "not on a firn mount"),
    (11, "another transaction is open at, above or below PATH"),
    NO_CONNECTION,
];

pub const BEGIN: Verb = Verb {
    name: "begin",
    about: "Begin a transaction: the following changes count together or not at all",
    long: "Until `firn commit`, the backing does not show changes at or below PATH; programs on the mount see them at \
           once. (With mode=shadow the backing shows them, and an abort undoes them.) The mount must have drain=commit. \
           With --create, the transaction makes the directory PATH itself: the backing gets it at the commit, and an \
           abort removes it. With --owner, the transaction is aborted as soon as that process ends, unless it was \
           prepared before. Without --owner, the transaction stays open until `firn commit` or `firn abort`.",
    examples: &[
        ("firn begin /work", "the whole mount"),
        (
            "firn begin /work/step_100",
            "one directory; other directories may have separate transactions",
        ),
        (
            "firn begin /work/step_200 --create",
            "a new directory that appears complete or not at all",
        ),
        (
            "firn begin /work --owner $$",
            "in a job script: the transaction is aborted if the script ends before it commits",
        ),
    ],
    exits: EXITS,
    args: BeginArgs::augment_args,
    run: begin,
};

pub const PREPARE: Verb = Verb {
    name: "prepare",
    about: "Make a transaction durable, to be committed or aborted later",
    long: "When this returns, a commit can no longer fail for lack of space, and the transaction survives any crash. \
           Then take the checkpoint of the job's memory, under the same number. Programs that change anything at or \
           below PATH wait until `firn commit` or `firn abort`.",
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
    about: "Commit a transaction: all its changes take effect durably",
    long: "When this returns, all changes since `firn begin` are durable in the backing. After a crash during the \
           commit, the next mount has all of them or none. With --async, returns as soon as the commit is durably \
           decided; firnd then applies the changes in the background, and `firn status` shows how many are left. \
           Meanwhile programs can read and write files, but further changes of names and attributes below PATH wait.",
    examples: &[
        (
            "firn commit /work",
            "under the number with which it was prepared, or the next number",
        ),
        (
            "firn commit /work --id 17 --begin",
            "and begin the next transaction before any program can change files",
        ),
        (
            "firn commit /work --async --begin",
            "continue as soon as the commit is decided",
        ),
    ],
    exits: EXITS,
    args: CommitArgs::augment_args,
    run: commit,
};

pub const ABORT: Verb = Verb {
    name: "abort",
    about: "Undo all changes of a transaction",
    long: "Restores the files at or below PATH to their state at `firn begin`. Calls on open files that did not exist \
           then fail with ESTALE.",
    examples: &[("firn abort /work", "back to the last commit")],
    exits: EXITS,
    args: PlaceArgs::augment_args,
    run: abort,
};

pub const RESTORE: Verb = Verb {
    name: "restore",
    about: "Restore the files to their state at a checkpoint",
    long: "For a job that restarts from checkpoint ID of its memory. If a transaction was prepared as ID, it is \
           committed. If ID was committed, all later commits are undone; the option `history` limits how many commits \
           can be undone.",
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
    /// Process that owns the transaction: if it ends before the prepare, the transaction is aborted.
    #[arg(long, value_name = "PID")]
    owner: Option<u32>,
    /// Make the directory PATH as a part of the transaction; it must not exist.
    #[arg(long)]
    create: bool,
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
    /// Begin the next transaction in the same step.
    #[arg(long)]
    begin: bool,
    /// Return once the commit is decided, and apply it in the background.
    #[arg(long = "async")]
    apply_later: bool,
    /// Print no summary.
    #[arg(short, long)]
    quiet: bool,
}

/// The result of a request, as JSON.
#[derive(Serialize)]
struct RequestResult<'a> {
    mount_point: BytePath,
    /// Path of the transaction below the mount point. An empty path means the whole mount.
    scope: &'a BytePath,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<u64>,
    /// Hosts that have not applied the commit yet.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    not_applied_on: Vec<String>,
}

/// What is printed about a result.
#[derive(Clone, Copy)]
enum ResultOutput {
    /// JSON on stdout.
    Json,
    /// A sentence on stderr.
    Sentence,
    /// Only the hosts that have not applied the commit, for `--quiet`.
    UnfinishedOnly,
}

impl ResultOutput {
    /// Returns what is printed with these flags. `--json` takes precedence over `--quiet`.
    fn from_flags(json: bool, quiet: bool) -> Self {
        match (json, quiet) {
            (true, _) => Self::Json,
            (false, true) => Self::UnfinishedOnly,
            (false, false) => Self::Sentence,
        }
    }
}

/// Returns how much the transaction at `path` has changed, such as `5 objects with 24.0 MiB`. Returns `None` if no
/// such transaction is open.
fn changes_at(path: &Path) -> Result<Option<String>, Failure> {
    let place = firn_client::find(path)?;
    let transactions = Connection::open(&place.mount)?.status()?.transactions;
    let found = transactions.iter().find(|transaction| {
        transaction.scope == place.relative && transaction.stage != TransactionStage::Decided
    });
    Ok(found.map(|transaction| {
        let objects = text::count(transaction.objects, "object");
        format!("{objects} with {}", text::bytes(transaction.bytes))
    }))
}

/// Sends a request about the transaction at a path, and prints the result.
///
/// `words` makes the sentence for the user from the path and the number of the checkpoint.
fn send_request(
    path: &Path,
    output_mode: ResultOutput,
    request: impl FnOnce(BytePath) -> Request,
    words: impl FnOnce(&str, Option<u64>) -> String,
) -> Result<u8, Failure> {
    let (place, mut connection) = connect(path)?;
    let (id, not_applied_on) = connection
        .transaction(&request(place.relative.clone()))?
        .unzip();
    let not_applied_on = not_applied_on.unwrap_or_default();
    let mount_point = place.mount.mount_point.into();
    if let ResultOutput::Json = output_mode {
        output::print_json(&RequestResult {
            mount_point,
            scope: &place.relative,
            id,
            not_applied_on,
        })?;
    } else {
        if let ResultOutput::Sentence = output_mode {
            output::print_message(&words(&quoted_path(path), id));
        }
        if !not_applied_on.is_empty() {
            let hosts = not_applied_on.join(", ");
            output::print_message(&format!(
                "not yet applied on {hosts}: firnd applies it when it runs there again; `firn recover --host` does so on any host"
            ));
        }
    }
    Ok(DONE)
}

/// Begins a transaction. With `--owner`, firnd aborts it when that process ends before the transaction is prepared.
fn begin(matches: &ArgMatches) -> Result<u8, Failure> {
    let BeginArgs {
        place,
        owner,
        create,
    } = BeginArgs::from_arg_matches(matches)?;
    let create = create.then(|| firn_client::without_umask(0o777));
    let owner = match owner {
        None => Owner::None,
        Some(pid) => firn_client::owner_process(pid).map_err(|error| {
            Failure::new(
                FAILED,
                format!("--owner {pid}: this process cannot own a transaction: {error}; name a process that is running"),
            )
        })?,
    };
    send_request(
        &place.path,
        ResultOutput::from_flags(place.json, false),
        |path| Request::Begin {
            path,
            owner,
            create,
        },
        |at, _| format!("{at}: a transaction is open"),
    )
}

/// Prepares a transaction: makes it durable, so that it can be committed or aborted later.
fn prepare(matches: &ArgMatches) -> Result<u8, Failure> {
    let NumberArgs { place, id } = NumberArgs::from_arg_matches(matches)?;
    let words =
        |at: &str, _| format!("{at}: prepared as {id}; `firn commit` or `firn abort` ends it");
    send_request(
        &place.path,
        ResultOutput::from_flags(place.json, false),
        |path| Request::Prepare { path, id },
        words,
    )
}

/// Commits a transaction, and prints how much it changed. Asks for this amount before the commit, which ends the
/// transaction.
fn commit(matches: &ArgMatches) -> Result<u8, Failure> {
    let CommitArgs {
        place,
        id,
        begin,
        apply_later,
        quiet,
    } = CommitArgs::from_arg_matches(matches)?;
    let changed = if quiet || place.json {
        None
    } else {
        changes_at(&place.path)?
    };
    let started = Instant::now();
    let words = |at: &str, id: Option<u64>| {
        let time = text::seconds(started.elapsed().as_secs_f64());
        let how = match (apply_later, &changed) {
            (true, _) => "; it is applied in the background".to_owned(),
            (false, Some(changed)) => format!("; {changed} are durable, {time}"),
            (false, None) => format!("; its changes are durable, {time}"),
        };
        let next = if begin {
            "; the next transaction is open"
        } else {
            ""
        };
        format!("{at}: committed as {}{how}{next}", id.unwrap_or_default())
    };
    send_request(
        &place.path,
        ResultOutput::from_flags(place.json, quiet),
        |path| Request::Commit {
            path,
            id,
            begin,
            apply_later,
        },
        words,
    )
}

/// Aborts a transaction, which undoes its changes.
fn abort(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = PlaceArgs::from_arg_matches(matches)?;
    send_request(
        &args.path,
        ResultOutput::from_flags(args.json, false),
        |path| Request::Abort { path },
        |at, _| format!("{at}: all changes are undone"),
    )
}

/// Restores the files as they were at a checkpoint.
fn restore(matches: &ArgMatches) -> Result<u8, Failure> {
    let NumberArgs { place, id } = NumberArgs::from_arg_matches(matches)?;
    let words = |at: &str, _| format!("{at}: the files are those of checkpoint {id}");
    send_request(
        &place.path,
        ResultOutput::from_flags(place.json, false),
        |path| Request::Restore { path, id },
        words,
    )
}
