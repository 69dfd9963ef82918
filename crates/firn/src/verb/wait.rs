//! `firn wait`: waits until files have reached a durability level.
//!
//! The level of a file says how safe its data is. The main levels are *drained* (the data is in the backing, as after
//! write(2)) and *durable* (as after fsync(2)).

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::{ArgMatches, Args, FromArgMatches, ValueEnum, ValueHint};
use firn_client::ClientError;
use firn_format::durability::DurabilityLevel;
use firn_protocol::Request;
use firn_protocol::path::BytePath;
use rustix::io::Errno;
use serde::Serialize;

use crate::failure::{DONE, Failure, PARTLY};
use crate::output;
use crate::progress::{ProgressMeter, WaitSummary};
use crate::text;
use crate::verb::{NO_CONNECTION, Verb, connect};

pub const VERB: Verb = Verb {
    name: "wait",
    about: "Wait until files are in the directory (drained) or on its disks (durable)",
    long: "Drains everything at or below PATH now, and waits until that is done. With --until durable, it also has the \
           effect of fsync(2) on every file and on the directories that name it. Files in logs (layout=log) are \
           flattened for `drained` and `durable`; files that are open for writing remain logged. With --until \
           partnered, nothing is drained: it waits until a partner host (option `partner`) has copies in its memory.",
    examples: &[
        (
            "firn wait --until durable /ckpt/step_100",
            "before older checkpoints are removed",
        ),
        (
            "firn wait --until drained --timeout 5min /ckpt",
            "at the end of a job, with a time limit",
        ),
    ],
    exits: &[
        (
            0,
            "the files are partnered, logged, drained or durable, as requested",
        ),
        (1, "failed; the data is kept and `firn status` says why"),
        (2, "an invalid option or argument"),
        (
            3,
            "timed out, and the drain continues; or a file is only logged, because a program has it open for writing or the \
            mount is read-only",
        ),
        (10, "not on a firn mount"),
        NO_CONNECTION,
    ],
    args: WaitArgs::augment_args,
    run,
};

#[derive(Debug, Args)]
struct WaitArgs {
    /// A mount point, or a file or directory below it.
    #[arg(value_hint = ValueHint::AnyPath)]
    path: PathBuf,
    /// Durability level to wait for.
    #[arg(long, value_name = "LEVEL", value_enum, default_value = "durable")]
    until: WaitLevel,
    /// Stop waiting after this time (`30s`, `5min`; a plain number means seconds).
    #[arg(long, value_name = "DURATION", value_parser = parse_timeout_ms)]
    timeout: Option<u64>,
    /// Print the outcome as JSON.
    #[arg(long)]
    json: bool,
    /// Print neither a summary nor progress.
    #[arg(short, long)]
    quiet: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum WaitLevel {
    /// Held, and copied to the memory of a partner host; survives the loss of one host.
    Partnered,
    /// In the backing, in the file or in a log (layout=log); survives the loss of the host, and other hosts see it
    /// through their mounts.
    Logged,
    /// In the backing, as after write(2); visible to other hosts.
    Drained,
    /// In the backing, as after fsync(2); survives a failure of the host.
    Durable,
}

impl WaitLevel {
    /// Returns the level of the protocol.
    fn level(self) -> DurabilityLevel {
        match self {
            Self::Partnered => DurabilityLevel::Partnered,
            Self::Logged => DurabilityLevel::Logged,
            Self::Drained => DurabilityLevel::Drained,
            Self::Durable => DurabilityLevel::Durable,
        }
    }
}

/// The result of a wait, as JSON.
#[derive(Debug, Serialize)]
struct WaitResult<'a> {
    /// The mount point.
    mount_point: BytePath,
    /// Path below the mount point. An empty path means the whole mount.
    path: &'a BytePath,
    /// The level that was waited for.
    until: DurabilityLevel,
    /// Whether the level was reached.
    reached: bool,
    /// Seconds that the wait took.
    elapsed_s: f64,
    /// Bytes that firnd last reported as left.
    bytes_left: u64,
}

/// Parses a timeout. Returns milliseconds; a plain number counts as seconds.
pub fn parse_timeout_ms(text: &str) -> Result<u64, String> {
    if let Ok(seconds) = text.parse::<u64>()
        && let Some(milliseconds) = seconds.checked_mul(1000)
    {
        return Ok(milliseconds);
    }
    firn_config::parse_duration_ms(text)
}

/// Waits according to the flags, and prints the result.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = WaitArgs::from_arg_matches(matches)?;
    let wait_output = WaitOutput {
        json: args.json,
        quiet: args.quiet,
    };
    wait_until(&args.path, args.until.level(), args.timeout, wait_output)
}

/// What is printed of the result.
#[derive(Clone, Copy, Debug)]
pub struct WaitOutput {
    /// Print JSON on stdout.
    pub json: bool,
    /// Print neither a summary nor progress on stderr.
    pub quiet: bool,
}

/// Waits until all files at or below `path` have reached a durability level, and prints the result.
///
/// Returns [`DONE`] if the level was reached. Fails with [`PARTLY`] at the timeout, or if files stay in logs because
/// programs have them open.
pub fn wait_until(
    path: &Path,
    level: DurabilityLevel,
    timeout_ms: Option<u64>,
    wait_output: WaitOutput,
) -> Result<u8, Failure> {
    let (location, mut connection) = connect(path)?;
    let start = Instant::now();
    let mut meter = ProgressMeter::with_quiet(wait_output.quiet);
    let request = Request::Wait {
        path: location.relative.clone(),
        until: level,
        timeout_ms,
    };
    let result = connection.wait(&request, &mut |progress| {
        meter.show(progress.bytes_left, progress.files_left, &progress.phase)
    });
    let bytes_left = if result.is_ok() {
        0
    } else {
        meter.remaining_bytes()
    };
    let waited = meter.summary();
    // The bar disappears before a message is printed.
    drop(meter);
    if wait_output.json {
        output::print_json(&WaitResult {
            mount_point: location.mount.mount_point.into(),
            path: &location.relative,
            until: level,
            reached: result.is_ok(),
            elapsed_s: start.elapsed().as_secs_f64(),
            bytes_left,
        })?;
    }
    match result {
        Ok(()) => {}
        Err(ClientError::Refused { errno, message }) if is_incomplete(errno) => {
            return Err(Failure::new(PARTLY, message));
        }
        Err(error) => return Err(error.into()),
    }
    if !wait_output.quiet && !wait_output.json {
        output::print_message(&summarize_wait(path, level, &waited));
    }
    Ok(DONE)
}

/// Returns a sentence about what this call waited for. Files that had the level before are not counted, because firnd
/// does not know all of them.
fn summarize_wait(path: &Path, level: DurabilityLevel, waited: &WaitSummary) -> String {
    let level = level.as_str();
    let time = waited.time_text();
    let path = text::path(path);
    if waited.files > 0 {
        let amount = waited.amount_text();
        return format!("everything at {path} is {level}: {amount} were left to write, {time}");
    }
    format!("everything at {path} is {level}: nothing was left to write, {time}")
}

/// Returns whether an error means that the wait is incomplete without a failure: it timed out, or files stay in logs.
fn is_incomplete(errno: i32) -> bool {
    [Errno::TIMEDOUT, Errno::BUSY]
        .map(Errno::raw_os_error)
        .contains(&errno)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_may_be_plain_seconds() {
        assert_eq!(parse_timeout_ms("1"), Ok(1000));
        assert_eq!(parse_timeout_ms("500ms"), Ok(500));
        assert_eq!(parse_timeout_ms("2min"), Ok(120_000));
        assert!(parse_timeout_ms("soon").is_err());
    }

    #[test]
    fn the_summary_counts_what_was_waited_for() {
        let waited = |bytes, files| WaitSummary {
            bytes,
            files,
            time: std::time::Duration::from_millis(700),
        };
        let path = std::path::Path::new("/ckpt/step_1");
        assert_eq!(
            summarize_wait(path, DurabilityLevel::Durable, &waited(768 << 20, 32)),
            "everything at /ckpt/step_1 is durable: 768.0 MiB in 32 files were left to write, 700 ms"
        );
        assert_eq!(
            summarize_wait(path, DurabilityLevel::Drained, &waited(0, 0)),
            "everything at /ckpt/step_1 is drained: nothing was left to write, 700 ms"
        );
    }
}
