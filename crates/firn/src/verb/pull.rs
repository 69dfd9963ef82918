//! `firn pull`: copies a file or a directory out of another host's memory, lists it, or follows it (copies each new
//! checkpoint when it is complete).
//!
//! An *agent* is the process on the other host that serves the files of its mount.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant, SystemTime};

use clap::{ArgAction, ArgMatches, Args, FromArgMatches, ValueHint, value_parser};
use firn_agent::{
    DataTransport, Encrypt, FollowEvent, FollowRequest, Munge, Outcome, PullRequest, PullSource,
    Route, TransportChoice, UnitTotals,
};
use firn_config::parse_duration_ms;
use firn_protocol::path::BytePath;
use serde::Serialize;

use crate::failure::{DONE, FAILED, Failure, PARTLY, USAGE};
use crate::output::{self, Paint};
use crate::progress::ProgressMeter;
use crate::text;
use crate::verb::Verb;
use crate::verb::agent::{EncryptArg, check_encryption};

pub const VERB: Verb = Verb {
    name: "pull",
    about: "Copy a checkpoint from another host's memory",
    long: "Copies a file or a directory of a mount on another host to DIR, which must not exist yet. The copy appears \
           when all of it is there, verified by checksums, and durable. (On a firn mount the copy is held, like all \
           data that is written there.) If DIR ends with a slash, it is the directory into which the copy goes, under \
           the same name. An interrupted pull leaves .firn-pull-NAME beside DIR, from which the same command continues. \
           Files that are open for writing or cut are refused without --cut. Modification times and permissions are \
           copied; owners and extended attributes are not.\n\n\
           With --follow, copies each checkpoint of a directory when it becomes complete, keeps the newest ones, and \
           runs until it is interrupted. Run on another host, into a directory in its memory or on its disk, it makes \
           copies that survive the loss of HOST.\n\n\
           Without --backing, --key-file and --munge, ssh starts the agent. With one of them, `firn agent` must run \
           there; that is faster, and encrypted if one side uses --encrypt yes, or if the addresses are not private.",
    examples: &[
        (
            "firn pull n17:/ckpt/step_100 /scratch/saved/",
            "over ssh; the copy is /scratch/saved/step_100",
        ),
        (
            "firn pull --backing /scratch/run42 n17:/ckpt/step_100 step_100",
            "from the agent on n17, found through the backing",
        ),
        (
            "firn pull --follow --keep 2 --backing /scratch/run42 n17:/ckpt /dev/shm/of-n17",
            "copies of the newest two checkpoints, in this host's memory",
        ),
        (
            "firn pull --backing /scratch/run42 n18:n17/step_100 /scratch/saved/",
            "when n17 is lost: its files, from the memory of its partner n18",
        ),
        (
            "firn pull --munge --address n17:7431 n17:/ckpt/step_100 step_100",
            "from an agent that was started with --munge, without a shared backing",
        ),
        (
            "firn pull --list n17:/ckpt",
            "the files and directories there, and whether they are complete",
        ),
    ],
    exits: &[
        (0, "the copy is complete"),
        (1, "failed; the next try continues with what was copied"),
        (2, "an invalid option or argument"),
        (
            3,
            "the copy is complete, but files changed during the pull, or objects other than files, directories and links were left out",
        ),
        (11, "DIR exists, or another pull to it is in progress"),
    ],
    args: PullArgs::augment_args,
    run,
};

#[derive(Debug, Args)]
struct PullArgs {
    /// HOST and the path of a file or directory on a mount there; or a partner host and OTHER-HOST/NAME of a copy that
    /// it has.
    #[arg(value_name = "HOST:PATH")]
    source: String,
    /// Name of the copy.
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath, required_unless_present = "list", conflicts_with = "list")]
    target: Option<PathBuf>,
    /// Only list the content of the directory; without a path: of the agent's mount.
    #[arg(long)]
    list: bool,
    /// Copy each file or directory that is directly in PATH into DIR, as it becomes complete, until interrupted.
    #[arg(long, conflicts_with_all = ["list", "cut"])]
    follow: bool,
    /// Number of copies that --follow keeps; older copies are removed from DIR.
    #[arg(long, value_name = "N", default_value_t = 2, requires = "follow", value_parser = value_parser!(u32).range(1..))]
    keep: u32,
    /// Interval at which --follow checks for new checkpoints.
    #[arg(long, value_name = "DURATION", default_value = "2s", requires = "follow", value_parser = parse_duration_ms)]
    every: u64,
    /// The backing, in which the agent on HOST stored its address and key.
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, conflicts_with = "key_file")]
    backing: Option<PathBuf>,
    /// A copy of the file .firn/agent-HOST, which the agent stored in the backing.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    key_file: Option<PathBuf>,
    /// Address at which the agent listens: with --munge, or if it differs from the address in the key file.
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with = "backing")]
    address: Option<String>,
    /// Present a MUNGE credential instead of a key, to an agent that was started with --munge.
    #[arg(long, requires = "address", conflicts_with_all = ["key_file", "ssh"])]
    munge: bool,
    /// The socket of munged, if it is not at the default path.
    #[arg(long, value_name = "PATH", requires = "munge", value_hint = ValueHint::FilePath)]
    munge_socket: Option<PathBuf>,
    /// Encrypt bytes on the network if ssh is not used; `auto`: if the address of HOST is not private.
    #[arg(long, value_name = "WHEN", value_enum, conflicts_with = "ssh")]
    encrypt: Option<EncryptArg>,
    /// Command for ssh, with options.
    #[arg(long, value_name = "COMMAND", default_value = "ssh", conflicts_with_all = ["backing", "key_file"])]
    ssh: String,
    /// Command for firn on the other host, over ssh.
    #[arg(long, value_name = "PATH", default_value = "firn")]
    remote_firn: String,
    /// Transport of bytes: `tcp`, the connection; `ofi` or `ofi:PROVIDER`, reads of the source's memory by libfabric;
    /// `auto`, such reads if hardware of both hosts supports them, else the connection.
    #[arg(long, value_name = "TRANSPORT", default_value = "auto", value_parser = TransportChoice::from_str)]
    transport: TransportChoice,
    /// Whether the agent's CPU computes checksums of the bytes that libfabric reads; `no`: rely on those of the
    /// network.
    #[arg(long, value_name = "yes|no", default_value = "yes", action = ArgAction::Set, value_parser = parse_yes_no)]
    verify: bool,
    /// Also copy files that are open for writing or cut, in their present state.
    #[arg(long)]
    cut: bool,
    /// Time limit without a received byte: after a broken connection, or while the agent serves its maximum of pullers.
    /// A host without an agent is reported at once.
    #[arg(long, value_name = "DURATION", default_value = "1min", value_parser = parse_duration_ms)]
    patience: u64,
    /// Print the outcome, or the list, as JSON.
    #[arg(long)]
    json: bool,
}

/// The result of a copy, as JSON.
#[derive(Serialize)]
struct PullResult<'a> {
    /// Name of the source host.
    host: &'a str,
    /// Path on the source host.
    source: &'a BytePath,
    /// Path of the copy.
    target: BytePath,
    /// How much was copied.
    #[serde(flatten)]
    outcome: &'a Outcome,
    /// Seconds that the copy took.
    elapsed_s: f64,
}

/// Copies, follows or lists the files of another host, according to the flags.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = PullArgs::from_arg_matches(matches)?;
    check_encryption(&args.transport, args.encrypt)?;
    let (host, source) = parse_source(&args.source, args.list || args.follow)?;
    let route = choose_route(&args)?;
    let data_transport = DataTransport {
        transport: args.transport,
        sums: args.verify,
    };
    match &args.target {
        Some(target) if args.follow => {
            let request = FollowRequest {
                host,
                route,
                source,
                carriage: data_transport,
                target: target.clone(),
                keep: args.keep as usize,
                every: Duration::from_millis(args.every),
            };
            follow_source(&request, args.json)
        }
        Some(target) => {
            let target = path_of_copy(target, &source)?;
            let request = PullRequest {
                host,
                route,
                source: PullSource::Path(source.clone()),
                carriage: data_transport,
                target,
                cut: args.cut,
                patience: Duration::from_millis(args.patience),
                bytes_max: None,
            };
            pull_once(&request, &source, args.json)
        }
        None => print_listing(&firn_agent::list(&host, &route, &source)?, args.json),
    }
}

/// An event of `--follow`, as JSON.
#[derive(Serialize)]
#[serde(rename_all = "snake_case", tag = "event")]
enum FollowLine<'a> {
    Copied {
        name: &'a BytePath,
        #[serde(flatten)]
        outcome: &'a Outcome,
        elapsed_s: f64,
        lag_s: f64,
    },
    Removed {
        name: &'a BytePath,
    },
}

/// Copies new checkpoints until it is interrupted, and prints an event for each.
fn follow_source(request: &FollowRequest, json: bool) -> Result<u8, Failure> {
    if !request.target.is_dir() {
        let target = text::path(&request.target);
        let message = format!("{target} is not a directory: make a directory for the copies first");
        return Err(Failure::new(FAILED, message));
    }
    match firn_agent::follow(request, &mut |event| print_event(&event, json)) {
        Ok(never) => match never {},
        Err(error) => Err(error.into()),
    }
}

/// Prints an event of `firn pull --follow`: as JSON on stdout, or as a message on stderr. A problem is always a
/// message.
fn print_event(event: &FollowEvent<'_>, as_json: bool) {
    let line = match *event {
        FollowEvent::Failed { problem } => {
            output::print_message(problem);
            return;
        }
        FollowEvent::Copied {
            name,
            outcome,
            elapsed,
            lag_s,
        } => FollowLine::Copied {
            name,
            outcome,
            elapsed_s: elapsed.as_secs_f64(),
            lag_s,
        },
        FollowEvent::Removed { name } => FollowLine::Removed { name },
    };
    if as_json {
        // Errors of the output are ignored, so that the pull goes on even if nothing reads the lines.
        let _ = output::print_json_line(&line);
        return;
    }
    output::print_message(&match line {
        FollowLine::Copied {
            name,
            outcome,
            elapsed_s,
            ..
        } => format!("{name}: {}", summarize(outcome, elapsed_s)),
        FollowLine::Removed { name } => format!("{name}: removed, because there are newer copies"),
    });
}

/// Copies the source with a progress bar, and prints the result. Returns [`PARTLY`] if files changed during the copy or
/// were left out.
fn pull_once(request: &PullRequest, source: &BytePath, as_json: bool) -> Result<u8, Failure> {
    let start = Instant::now();
    let mut meter = ProgressMeter::new();
    let outcome = firn_agent::pull(request, &mut |progress| {
        meter.show(progress.left_bytes, progress.left_files, "pulling");
    })?;
    // The bar disappears before a message is printed.
    drop(meter);
    let elapsed_s = start.elapsed().as_secs_f64();
    if as_json {
        output::print_json(&PullResult {
            host: &request.host,
            source,
            target: request.target.clone().into(),
            outcome: &outcome,
            elapsed_s,
        })?;
    } else {
        output::print_message(&summarize(&outcome, elapsed_s));
    }
    for path in &outcome.changed {
        output::print_message(&format!(
            "{path} was changed during the pull: the copy has the state from when the file was opened"
        ));
    }
    for path in &outcome.left_out {
        output::print_message(&format!(
            "{path} is not a file, directory or link: it was left out"
        ));
    }
    let is_exact_copy = outcome.changed.is_empty() && outcome.left_out.is_empty();
    Ok(if is_exact_copy { DONE } else { PARTLY })
}

/// Returns a sentence about a finished copy.
fn summarize(outcome: &Outcome, elapsed_s: f64) -> String {
    let mut sentence = format!(
        "{} of {} in {} ({})",
        text::bytes(outcome.bytes),
        text::count(outcome.files, "file"),
        text::seconds(elapsed_s),
        text::rate(outcome.received_bytes as f64 / elapsed_s.max(1e-3))
    );
    if outcome.transport.starts_with("ofi:") {
        sentence += &format!(" by {}", outcome.transport);
    }
    if outcome.reused_bytes > 0 {
        sentence += &format!(", {} were there already", text::bytes(outcome.reused_bytes));
    }
    if outcome.reconnects > 0 {
        sentence += &format!(
            ", connected again {}",
            text::count(outcome.reconnects, "time")
        );
    }
    if outcome.damaged_blocks > 0 {
        sentence += &format!(
            ", {} arrived damaged and were sent again",
            text::count(outcome.damaged_blocks, "block")
        );
    }
    sentence
}

/// Prints what a directory of the other host contains.
fn print_listing(entries: &[UnitTotals], as_json: bool) -> Result<u8, Failure> {
    if as_json {
        output::print_json(&entries)?;
        return Ok(DONE);
    }
    // The rows have the same widths.
    let head = format!(
        "{:<7} {:>10} {:>7} {:>14} {}",
        "STATE", "BYTES", "FILES", "AGE", "NAME"
    );
    let mut table = Paint::stdout().head(&head) + "\n";
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    let now_s = now.as_secs() as i64;
    for entry in entries {
        // A time in the future counts as now.
        let age_s = now_s.saturating_sub(entry.mtime_s).max(0);
        table += &format!(
            "{:<7} {:>10} {:>7} {:>14} {}\n",
            entry.ending.as_str(),
            text::bytes(entry.bytes),
            entry.files,
            text::seconds(age_s as f64),
            entry.name
        );
    }
    output::print(&table)?;
    Ok(DONE)
}

/// Returns how to reach the agent, the process that serves the other host's files.
///
/// The first of these flags decides: `--backing` (the key is in that directory), `--key-file`, `--address` with
/// `--munge`. Without them it is ssh. Fails if flags do not fit together.
fn choose_route(args: &PullArgs) -> Result<Route, Failure> {
    let encrypt = args.encrypt.map_or(Encrypt::Auto, Encrypt::from);
    if let Some(dir) = &args.backing {
        return Ok(Route::Backing {
            dir: dir.clone(),
            encrypt,
        });
    }
    if let Some(path) = &args.key_file {
        return Ok(Route::KeyFile {
            path: path.clone(),
            address: args.address.clone(),
            encrypt,
        });
    }
    if let Some(address) = &args.address
        && args.munge
    {
        return Ok(Route::Munge {
            address: address.clone(),
            munge: Munge {
                socket: args.munge_socket.clone(),
            },
            encrypt,
        });
    }
    if args.address.is_some() {
        let text = "--address needs --key-file or --munge: over ssh, HOST is the address";
        return Err(Failure::new(USAGE, text));
    }
    if args.encrypt.is_some() {
        let text = "--encrypt is for pulls from `firn agent`: ssh always encrypts";
        return Err(Failure::new(USAGE, text));
    }
    let command: Vec<String> = args.ssh.split_whitespace().map(str::to_owned).collect();
    if command.is_empty() {
        return Err(Failure::new(USAGE, "--ssh needs a command"));
    }
    Ok(Route::Ssh {
        command,
        firn: args.remote_firn.clone(),
    })
}

/// Parses a value that is `yes` or `no`.
fn parse_yes_no(text: &str) -> Result<bool, &'static str> {
    match text {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err("write yes or no"),
    }
}

/// Parses `HOST:PATH`, or for a list `HOST` alone. Returns the host and the path.
///
/// PATH is absolute, as in `n17:/ckpt/step_100`, or names a partner copy, as in `n18:n17/step_100`: the copy of data
/// from the memory of n17 that n18 keeps.
fn parse_source(text: &str, is_list: bool) -> Result<(String, BytePath), Failure> {
    let usage_failure = |reason: &str| {
        Failure::new(
            USAGE,
            format!("`{text}` is not HOST:PATH ({reason}), such as n17:/ckpt/step_100"),
        )
    };
    let (host, path) = match text.split_once(':') {
        Some((host, path)) => (host, path),
        None if is_list => (text, ""),
        None => return Err(usage_failure("there is no colon")),
    };
    // ssh would take a host that begins with a dash for a flag.
    if host.is_empty() || host.starts_with('-') {
        return Err(usage_failure("there is no host"));
    }
    let is_absolute = path.starts_with('/');
    let is_whole_mount = is_list && path.is_empty();
    if !is_absolute && !is_whole_mount && !is_partner_copy(path, is_list) {
        return Err(usage_failure(
            "the path is neither absolute nor a partner copy, HOST/NAME",
        ));
    }
    Ok((host.to_owned(), path.into()))
}

/// Returns whether a path has the form HOST/NAME, which names a copy on a partner host. For a list HOST suffices.
fn is_partner_copy(path: &str, is_list: bool) -> bool {
    let owner = path.split('/').next().unwrap_or_default();
    let has_name = path.len() > owner.len() + 1;
    firn_agent::check_host(owner).is_ok() && (is_list || has_name)
}

/// Returns the path of the copy. A target that ends in a slash is the directory into which the source is copied.
fn path_of_copy(target: &Path, source: &BytePath) -> Result<PathBuf, Failure> {
    if !target.as_os_str().as_encoded_bytes().ends_with(b"/") {
        return Ok(target.to_owned());
    }
    match source.as_path().file_name() {
        Some(name) => Ok(target.join(name)),
        None => Err(Failure::new(
            USAGE,
            "the copy needs a name: write DIR without a slash at its end",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_a_host_and_an_absolute_path() {
        let parsed = |text, is_list| parse_source(text, is_list).ok();
        let both = |host: &str, path: &str| Some((host.to_owned(), BytePath::from(path)));
        assert_eq!(parsed("n1:/ckpt/a:b", false), both("n1", "/ckpt/a:b"));
        assert_eq!(parsed("me@n1:/c", false), both("me@n1", "/c"));
        assert_eq!(parsed("n1", true), both("n1", ""));
        assert_eq!(parsed("n1:", true), both("n1", ""));
        for text in [
            "n1",
            "n1:",
            "n1:ckpt",
            ":/ckpt",
            "-oProxyCommand=x:/ckpt",
            "",
        ] {
            assert_eq!(parsed(text, false), None, "{text}");
        }
    }

    #[test]
    fn a_slash_at_the_end_means_into() {
        let source = BytePath::from("/ckpt/step_100");
        let named = |target: &str| path_of_copy(Path::new(target), &source).unwrap();
        assert_eq!(named("/a/b"), Path::new("/a/b"));
        assert_eq!(named("/a/b/"), Path::new("/a/b/step_100"));
        assert!(path_of_copy(Path::new("/a/"), &BytePath::from("/")).is_err());
    }
}
