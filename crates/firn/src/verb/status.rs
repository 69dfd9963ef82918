//! `firn status`: shows the held and drained data, the errors and the rates of mounts, or of all hosts of a job.
//!
//! *Held* data is in memory only. *Drained* data is in the backing, the directory in which files end up.

use std::ffi::OsStr;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use clap::{ArgMatches, Args, FromArgMatches, ValueHint};
use firn_client::{ClientError, Connection, Mount};
use firn_config::Options;
use firn_protocol::path::BytePath;
use firn_protocol::{FileStatus, Request, Status};
use serde::Serialize;

use crate::ask::parallel_map;
use crate::failure::{DONE, FAILED, Failure, PARTLY};
use crate::job::{Job, hosts_text, status_text};
use crate::metrics::{self, MountScrape};
use crate::output::{self, Paint};
use crate::output_file;
use crate::text::{bytes, count};
use crate::verb::hosts::{DEFAULT_TIMEOUT, job_exit_status};
use crate::verb::wait::parse_timeout_ms;
use crate::verb::{NO_CONNECTION, Verb, connect};
use block::StatusDetail;

mod block;
mod list;

/// Interval of `--watch`: firnd samples its rates equally often.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);
/// Escape sequences that clear the terminal (ECMA-48 CUP, ED).
const CLEAR: &str = "\x1b[H\x1b[2J";

pub const VERB: Verb = Verb {
    name: "status",
    about: "Show how much data is held and drained, errors and throughput",
    long: "Without PATH, lists all mounts of this user, and arenas that killed mounts left in the runtime directory. \
           With a path below a mount, also lists files that are not drained yet.",
    examples: &[
        ("firn status", "all mounts, one line each"),
        (
            "firn status /ckpt",
            "one mount in five lines; problems come first",
        ),
        (
            "firn status --verbose /ckpt",
            "the same with all figures and options",
        ),
        (
            "firn status --watch /ckpt",
            "the same, updated every second",
        ),
        (
            "firn status --job /scratch/run42",
            "all hosts that share the backing: sums, and a line for each host, hosts in trouble first",
        ),
        ("firn status --json /ckpt | jq .held_bytes", "for scripts"),
        (
            "firn status --prometheus --output /var/lib/node_exporter/firn.prom",
            "for a metrics collector; the file is replaced atomically",
        ),
    ],
    exits: &[
        (0, "shown"),
        (
            1,
            "the mount of PATH does not answer; the message says what to do",
        ),
        (
            2,
            "with --job and without PATH: no backing, or more than one, is mounted here",
        ),
        (
            3,
            "some mounts, or with --job the backing or the firnd of this host, do not answer; the others are shown",
        ),
        (10, "PATH is not on a firn mount"),
        NO_CONNECTION,
    ],
    args: StatusArgs::augment_args,
    run,
};

#[derive(Debug, Args)]
struct StatusArgs {
    /// A mount point, anything below it, or a backing.
    #[arg(value_hint = ValueHint::AnyPath)]
    path: Option<PathBuf>,
    /// Print JSON: an object for PATH, or an array of all mounts; with --watch, one line each second.
    #[arg(long)]
    json: bool,
    /// Update every second.
    #[arg(short, long)]
    watch: bool,
    /// Print metrics in the Prometheus text format.
    #[arg(long, visible_alias = "metrics", conflicts_with_all = ["json", "watch"])]
    prometheus: bool,
    /// Show all figures of each mount, and all options that change promises.
    #[arg(short, long, conflicts_with_all = ["json", "prometheus"])]
    verbose: bool,
    /// With --prometheus: write to FILE, which is replaced atomically.
    #[arg(long, value_name = "FILE", requires = "prometheus", value_hint = ValueHint::FilePath)]
    output: Option<PathBuf>,
    /// Show the job: sums over all hosts that share the backing of PATH (default: of the only mount here), and a line
    /// for each host. The backing need not be mounted here.
    #[arg(long, conflicts_with_all = ["prometheus", "clear_errors"])]
    job: bool,
    /// With --job: time limit for the answer of the backing and of this host's firnd.
    #[arg(long, value_name = "DURATION", default_value = DEFAULT_TIMEOUT, requires = "job", value_parser = parse_timeout_ms)]
    timeout: u64,
    /// Clear the recorded errors; their data is kept, and its drain is still retried.
    #[arg(long, requires = "path", conflicts_with_all = ["watch", "prometheus", "json"])]
    clear_errors: bool,
}

impl StatusArgs {
    /// Returns how much of each mount is shown.
    fn detail(&self) -> StatusDetail {
        if self.verbose {
            StatusDetail::All
        } else {
            StatusDetail::Short
        }
    }
}

/// A mount as it was found. As JSON, it is the status object of the protocol, or the facts that are known without an
/// answer.
#[derive(Serialize)]
#[serde(untagged)]
enum FoundMount {
    Alive {
        #[serde(flatten)]
        status: Box<Status>,
        /// The undrained files, if the user gave a path below the mount point.
        #[serde(skip_serializing_if = "Option::is_none")]
        files: Option<Vec<FileStatus>>,
    },
    Silent {
        mount_point: BytePath,
        backing: BytePath,
        error: String,
        /// Whether its socket is in another runtime directory, so that this process cannot ask its firnd.
        #[serde(skip)]
        is_unreachable: bool,
    },
    /// The arena that a killed firnd left, without a mount.
    Left {
        arena: BytePath,
        backing: BytePath,
        held_bytes: u64,
    },
}

impl FoundMount {
    /// Returns what the user should do if firnd, the daemon of the mount, does not respond or has left its arena (the
    /// file in memory with the mount's data). Returns `None` if it responds.
    fn advice(&self) -> Option<String> {
        match self {
            Self::Alive { .. } => None,
            // The text of the error says what to do.
            Self::Silent { error, .. } => Some(error.clone()),
            Self::Left {
                arena,
                backing,
                held_bytes,
            } => {
                let held = bytes(*held_bytes);
                Some(if is_backing_of_run(backing.as_path()) {
                    format!(
                        "{arena} holds {held} of a run that failed: the same `firn run` uses them again; `firn recover \
                        --discard {backing}` deletes them"
                    )
                } else {
                    format!(
                        "{arena} holds {held} of a firnd that was killed, or was ended with the data kept: `firn recover \
                        {backing}` drains them; if that backing is lost for good, `firn recover --discard {backing}` \
                        deletes them"
                    )
                })
            }
        }
    }
}

/// Returns whether a backing has only the names of files of a `firn run`, whose data is in memory.
fn is_backing_of_run(backing: &Path) -> bool {
    backing.extension() == Some(OsStr::new(super::run::NAMES_SUFFIX))
}

/// Shows the status, or clears errors, according to the flags. With `--watch` it repeats until it is interrupted.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = StatusArgs::from_arg_matches(matches)?;
    if args.clear_errors {
        let path = args.path.as_deref().expect("clap demands it");
        let (_, mut connection) = connect(path)?;
        connection.request_done(&Request::ClearErrors)?;
        return Ok(DONE);
    }
    if args.prometheus {
        return print_metrics(args.path.as_deref(), args.output.as_deref());
    }
    if !args.watch {
        return print_once(&args);
    }
    loop {
        print_once(&args)?;
        sleep(WATCH_INTERVAL);
    }
}

/// Prints the metrics of the mount of `path`, or of all mounts, or writes them to a file. Returns [`PARTLY`] if a
/// mount did not answer.
fn print_metrics(path: Option<&Path>, file: Option<&Path>) -> Result<u8, Failure> {
    let (scrapes, exit_status) = match path {
        None => scrape_mounts()?,
        Some(path) => {
            let (_, mut connection) = connect(path)?;
            let status = Box::new(connection.status()?);
            (vec![MountScrape::Up(status)], DONE)
        }
    };
    let text = metrics::text(&scrapes);
    match file {
        None => output::print(&text)?,
        Some(file) => output_file::write(file, text.as_bytes()).map_err(|error| {
            let file = crate::text::path(file);
            Failure::new(FAILED, format!("cannot write {file}: {error}"))
        })?,
    }
    Ok(exit_status)
}

/// Shows the sums over the hosts of a job, and a row for each.
fn print_job(args: &StatusArgs) -> Result<u8, Failure> {
    let job = Job::inspect(args.path.as_deref(), Duration::from_millis(args.timeout))?;
    if args.json {
        print_as_json(args, &job)?;
    } else {
        let paint = Paint::stdout();
        let mut text = status_text(&job, paint);
        if args.verbose {
            text += &format!("\n{}", hosts_text(&job, paint));
        }
        print_text(args, &text)?;
    }
    Ok(job_exit_status(&job))
}

/// Shows the status once: of a job, of the mount of a path, or of all mounts and the arenas (files in memory) that
/// earlier mounts left. For all mounts it returns [`PARTLY`] if one did not answer.
fn print_once(args: &StatusArgs) -> Result<u8, Failure> {
    if args.job {
        return print_job(args);
    }
    if let Some(path) = &args.path {
        let mount = ask_mount_at(path)?;
        if args.json {
            print_as_json(args, &mount)?
        } else {
            let text = block::format_mount(&mount, args.detail(), Paint::stdout());
            print_text(args, &text)?
        }
        return Ok(DONE);
    }
    let mounts = firn_client::mounts()?;
    let mut found_mounts = parallel_map(&mounts, ask_mount);
    found_mounts.extend(find_unmounted_arenas(&mounts)?);
    if args.json {
        print_as_json(args, &found_mounts)?
    } else {
        print_text(args, &format_mounts(args, &found_mounts))?
    }
    let has_unresponsive_mount = found_mounts
        .iter()
        .any(|mount| matches!(mount, FoundMount::Silent { .. }));
    Ok(if has_unresponsive_mount { PARTLY } else { DONE })
}

/// Returns a table of all mounts. With full detail, it returns each mount as if the user had asked for that mount
/// alone.
fn format_mounts(args: &StatusArgs, mounts: &[FoundMount]) -> String {
    let paint = Paint::stdout();
    match args.detail() {
        StatusDetail::Short => list::format_table(mounts, paint),
        StatusDetail::All => {
            let blocks: Vec<String> = mounts
                .iter()
                .map(|mount| block::format_mount(mount, StatusDetail::All, paint))
                .collect();
            blocks.join("\n")
        }
    }
}

/// Prints a value as JSON: indented, or with `--watch` on one line.
fn print_as_json(args: &StatusArgs, value: &impl Serialize) -> Result<(), Failure> {
    if args.watch {
        output::print_json_line(value)
    } else {
        output::print_json(value)
    }
}

/// Prints a text. With `--watch` on a terminal, the text replaces the previous one.
fn print_text(args: &StatusArgs, text: &str) -> Result<(), Failure> {
    if args.watch && io::stdout().is_terminal() {
        return output::print(&format!("{CLEAR}{text}"));
    }
    output::print(text)
}

/// Asks the firnd of the mount of `path` for its status, and for the undrained files if `path` is below the mount
/// point.
fn ask_mount_at(path: &Path) -> Result<FoundMount, Failure> {
    let (location, mut connection) = connect(path)?;
    let status = Box::new(connection.status()?);
    // The relative path of the mount point itself is empty.
    let files = if location.relative.is_empty() {
        None
    } else {
        Some(connection.files(&location.relative)?)
    };
    Ok(FoundMount::Alive { status, files })
}

/// Returns the arenas in this user's runtime directory that belong to no running firnd and to no mount.
fn find_unmounted_arenas(mounts: &[Mount]) -> Result<impl Iterator<Item = FoundMount>, Failure> {
    let arenas = firn_daemon::list_arenas(&Options::default())?;
    let mounted_arenas: Vec<PathBuf> = mounts.iter().map(|mount| mount.files().arena).collect();
    Ok(arenas
        .into_iter()
        .filter(move |report| !report.in_use && !mounted_arenas.contains(&report.arena))
        .map(|report| FoundMount::Left {
            arena: report.arena.as_path().into(),
            backing: report.backing.unwrap_or_default(),
            held_bytes: report.held_bytes,
        }))
}

/// Asks the firnd of a mount for its status. A mount that does not answer becomes `FoundMount::Silent`.
fn ask_mount(mount: &Mount) -> FoundMount {
    let answer = Connection::open(mount).and_then(|mut connection| connection.status());
    match answer {
        Ok(status) => FoundMount::Alive {
            status: Box::new(status),
            files: None,
        },
        Err(error) => FoundMount::Silent {
            mount_point: mount.mount_point.as_path().into(),
            backing: mount.backing.as_path().into(),
            is_unreachable: matches!(error, ClientError::NoSocket { .. }),
            error: error.to_string(),
        },
    }
}

/// Returns one sentence about all mounts whose firnd has its socket in another runtime directory.
fn describe_unreachable(mount_count: usize) -> Option<String> {
    let verb = match mount_count {
        0 => return None,
        1 => "uses",
        _ => "use",
    };
    let mounts = count(mount_count as u64, "mount");
    Some(format!(
        "{mounts} {verb} another FIRN_RUNTIME_DIR: to see them, set it to the value that it had at the mount (`firn \
        status MOUNT_POINT` has the details)"
    ))
}

/// Returns the metrics of all mounts, and an exit status. A message names the mounts that did not answer, with the
/// reason.
fn scrape_mounts() -> Result<(Vec<MountScrape>, u8), Failure> {
    let mounts = firn_client::mounts()?;
    let answers = parallel_map(&mounts, |mount| Connection::open(mount)?.status());
    let mut scrapes = Vec::new();
    // Mounts with a socket in another runtime directory, so that this process cannot ask them.
    let mut unreachable_count = 0;
    // Mounts that failed to answer for another reason.
    let mut unanswered = Vec::new();
    for (mount, answer) in mounts.iter().zip(answers) {
        match answer {
            Ok(status) => scrapes.push(MountScrape::Up(Box::new(status))),
            Err(error) => {
                scrapes.push(MountScrape::down(mount));
                if matches!(error, ClientError::NoSocket { .. }) {
                    unreachable_count += 1;
                } else {
                    unanswered.push((mount, error));
                }
            }
        }
    }
    let down_count = unreachable_count + unanswered.len();
    let exit_status = if down_count == 0 {
        DONE
    } else if down_count == mounts.len() {
        FAILED
    } else {
        PARTLY
    };
    if let Some(text) = describe_unreachable(unreachable_count) {
        output::print_message(&text);
    }
    if let Some(text) = describe_unanswered(&unanswered, mounts.len()) {
        output::print_message(&text);
    }
    Ok((scrapes, exit_status))
}

/// Returns one line about all mounts that did not answer. A collector asks every minute, so more lines would fill its
/// log.
fn describe_unanswered(unanswered: &[(&Mount, ClientError)], mount_count: usize) -> Option<String> {
    match unanswered {
        [] => None,
        [(_, error)] => Some(error.to_string()),
        several => {
            let names: Vec<String> = several
                .iter()
                .map(|(mount, _)| crate::text::path(&mount.mount_point))
                .collect();
            Some(format!(
                "{} of {mount_count} mounts do not answer, and `firn status` says what to do: {}",
                several.len(),
                names.join(", ")
            ))
        }
    }
}
