//! The verbs of transactions: `firn begin`, `prepare`, `commit`, `abort` and `restore`.
//!
//! A transaction covers the changes at or below one path, its *scope*. They take effect together at the commit, or not
//! at all. A *prepared* transaction is durable, and waits for the decision to commit or abort. Each verb sends one
//! request to firnd, the daemon of the mount, and prints the result.

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

/// Exit statuses of the verbs, for their help and man pages.
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
    run: run_begin,
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
    run: run_prepare,
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
    run: run_commit,
};

pub const ABORT: Verb = Verb {
    name: "abort",
    about: "Undo all changes of a transaction",
    long: "Restores the files at or below PATH to their state at `firn begin`. Calls on open files that did not exist \
           then fail with ESTALE.",
    examples: &[("firn abort /work", "back to the last commit")],
    exits: EXITS,
    args: ScopeArgs::augment_args,
    run: run_abort,
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
    run: run_restore,
};

#[derive(Debug, Args)]
struct ScopeArgs {
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
    scope: ScopeArgs,
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
    scope: ScopeArgs,
    /// Number of the checkpoint.
    #[arg(long)]
    id: u64,
}

#[derive(Debug, Args)]
struct CommitArgs {
    #[command(flatten)]
    scope: ScopeArgs,
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

/// Mode of a directory that `--create` makes, before the umask is subtracted.
const DIRECTORY_MODE: u32 = 0o777;
/// Most verbs have no flag `--quiet`.
const NOT_QUIET: bool = false;

/// The result of a request, as JSON.
#[derive(Serialize)]
struct RequestResult<'a> {
    /// The mount point.
    mount_point: BytePath,
    /// Path of the transaction below the mount point. An empty path means the whole mount.
    scope: &'a BytePath,
    /// Id of the commit. `None` means that the request commits nothing.
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
    fn from_flags(is_json: bool, is_quiet: bool) -> Self {
        if is_json {
            Self::Json
        } else if is_quiet {
            Self::UnfinishedOnly
        } else {
            Self::Sentence
        }
    }
}

/// Returns how much the transaction at `path` has changed, such as `5 objects with 24.0 MiB`. Returns `None` if no
/// such transaction is open.
fn describe_changes(path: &Path) -> Result<Option<String>, Failure> {
    let location = firn_client::find(path)?;
    let status = Connection::open(&location.mount)?.status()?;
    let open_transaction = status.transactions.iter().find(|transaction| {
        transaction.scope == location.relative && transaction.stage != TransactionStage::Decided
    });
    let Some(transaction) = open_transaction else {
        return Ok(None);
    };
    let objects = text::count(transaction.objects, "object");
    let changed_bytes = text::bytes(transaction.bytes);
    Ok(Some(format!("{objects} with {changed_bytes}")))
}

/// Sends a request about the transaction at a path to firnd, the daemon of the mount, and prints the result.
///
/// `make_request` makes the request from the path below the mount point. `make_message` makes the message for the
/// user from the path and the id of the commit, which is `None` if the request commits nothing.
fn send_request(
    path: &Path,
    result_output: ResultOutput,
    make_request: impl FnOnce(BytePath) -> Request,
    make_message: impl FnOnce(&str, Option<u64>) -> String,
) -> Result<u8, Failure> {
    let (location, mut connection) = connect(path)?;
    let request = make_request(location.relative.clone());
    // Only a request that commits returns an id, and the hosts that have not applied the commit yet.
    let (id, not_applied_on) = match connection.transaction(&request)? {
        Some((id, not_applied_on)) => (Some(id), not_applied_on),
        None => (None, Vec::new()),
    };
    if let ResultOutput::Json = result_output {
        output::print_json(&RequestResult {
            mount_point: location.mount.mount_point.into(),
            scope: &location.relative,
            id,
            not_applied_on,
        })?;
        return Ok(DONE);
    }
    if let ResultOutput::Sentence = result_output {
        output::print_message(&make_message(&quoted_path(path), id));
    }
    if !not_applied_on.is_empty() {
        let hosts = not_applied_on.join(", ");
        output::print_message(&format!(
            "not yet applied on {hosts}: firnd applies it when it runs there again; `firn recover --host` does so on any host"
        ));
    }
    Ok(DONE)
}

/// Begins a transaction. With `--owner`, firnd (the daemon of the mount) aborts it if that process ends before the
/// transaction is prepared, which makes it durable and ready for the decision.
fn run_begin(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = BeginArgs::from_arg_matches(matches)?;
    let create_mode = if args.create {
        Some(firn_client::without_umask(DIRECTORY_MODE))
    } else {
        None
    };
    let owner = match args.owner {
        None => Owner::None,
        Some(pid) => firn_client::owner_process(pid).map_err(|error| {
            Failure::new(
                FAILED,
                format!("--owner {pid}: this process cannot own a transaction: {error}; name a process that is running"),
            )
        })?,
    };
    send_request(
        &args.scope.path,
        ResultOutput::from_flags(args.scope.json, NOT_QUIET),
        |path| Request::Begin {
            path,
            owner,
            create: create_mode,
        },
        |path, _| format!("{path}: a transaction is open"),
    )
}

/// Prepares a transaction: makes it durable, so that it can be committed or aborted later.
fn run_prepare(matches: &ArgMatches) -> Result<u8, Failure> {
    let NumberArgs { scope, id } = NumberArgs::from_arg_matches(matches)?;
    send_request(
        &scope.path,
        ResultOutput::from_flags(scope.json, NOT_QUIET),
        |path| Request::Prepare { path, id },
        |path, _| format!("{path}: prepared as {id}; `firn commit` or `firn abort` ends it"),
    )
}

/// Commits a transaction (the changes at or below one path), and prints how much it changed. With `--begin` the next
/// transaction of the path is open afterwards.
fn run_commit(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = CommitArgs::from_arg_matches(matches)?;
    // The commit ends the transaction, so its changes are counted before.
    let changes = if args.quiet || args.scope.json {
        None
    } else {
        describe_changes(&args.scope.path)?
    };
    let start = Instant::now();
    send_request(
        &args.scope.path,
        ResultOutput::from_flags(args.scope.json, args.quiet),
        |path| Request::Commit {
            path,
            id: args.id,
            begin: args.begin,
            apply_later: args.apply_later,
        },
        |path, id| {
            let time = text::seconds(start.elapsed().as_secs_f64());
            let progress = match changes {
                _ if args.apply_later => "it is applied in the background".to_owned(),
                Some(changes) => format!("{changes} are durable, {time}"),
                None => format!("its changes are durable, {time}"),
            };
            let next = if args.begin {
                "; the next transaction is open"
            } else {
                ""
            };
            let id = id.unwrap_or_default();
            format!("{path}: committed as {id}; {progress}{next}")
        },
    )
}

/// Aborts a transaction, which undoes its changes.
fn run_abort(matches: &ArgMatches) -> Result<u8, Failure> {
    let scope = ScopeArgs::from_arg_matches(matches)?;
    send_request(
        &scope.path,
        ResultOutput::from_flags(scope.json, NOT_QUIET),
        |path| Request::Abort { path },
        |path, _| format!("{path}: all changes are undone"),
    )
}

/// Restores the files as they were at a checkpoint.
fn run_restore(matches: &ArgMatches) -> Result<u8, Failure> {
    let NumberArgs { scope, id } = NumberArgs::from_arg_matches(matches)?;
    send_request(
        &scope.path,
        ResultOutput::from_flags(scope.json, NOT_QUIET),
        |path| Request::Restore { path, id },
        |path, _| format!("{path}: the files are those of checkpoint {id}"),
    )
}
