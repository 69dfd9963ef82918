//! `firn upgrade`: replaces the firnd of a mount by this version of the program, while programs keep their open files.
//!
//! Terms
//! * *firnd* is the daemon that serves a mount.
//! * The *keeper* is a process that holds the descriptors of the mount, and starts the next firnd when one ends. The
//!   next firnd continues the mount; this is a *takeover*.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Arg, ArgMatches, Command, ValueHint, value_parser};
use firn_client::{ClientError, Connection, Mount, MountLocation};
use firn_config::{Unknown, parse_minus_o};
use firn_protocol::Status;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::failure::{DONE, FAILED, Failure, USAGE};
use crate::verb::mount::options_list_arg;
use crate::verb::{NO_CONNECTION, Verb, find_mount};
use crate::{output, text};

/// Interval between two requests to find out whether the next firnd answers.
const ASK_INTERVAL: Duration = Duration::from_millis(20);
/// Time for further requests after the keeper has ended. A firnd that it started just before may still begin to answer.
const TIME_AFTER_KEEPER_END: Duration = Duration::from_secs(10);

pub const VERB: Verb = Verb {
    name: "upgrade",
    about: "Replace the firnd of a mount by this version, while programs use the mount",
    long: "Replaces firnd by the program that runs this command. Programs wait for a moment, and keep their open files, \
           locks and mappings. The mount needs takeover=auto, and no open transaction. Files may be open and requests \
           in progress. If the new firnd refuses the mount, the previous one is started again, and the exit status is \
           1. `-o` changes options. An option on which the kernel, the arena or open files depend cannot change; an \
           error message names it.",
    examples: &[
        (
            "/opt/firn-2.0/bin/firn upgrade /ckpt",
            "version 2.0 continues the mount",
        ),
        (
            "firn upgrade /ckpt -o io-threads=8,drain-age=5s",
            "the same version, with other options",
        ),
    ],
    exits: &[
        (0, "the new firnd serves the mount"),
        (
            1,
            "failed: the previous firnd continues, unless the message says that the mount has ended",
        ),
        (2, "an invalid option or argument; nothing was done"),
        (10, "not a firn mount"),
        (
            11,
            "a transaction is open or prepared: commit or abort it first; nothing was done",
        ),
        NO_CONNECTION,
    ],
    args,
    run,
};

/// Adds the arguments of `firn upgrade` to its clap command, and returns the command.
fn args(command: Command) -> Command {
    command
        .arg(
            Arg::new("path")
                .value_name("DIR")
                .help("The mount point, or the backing")
                .required(true)
                .value_hint(ValueHint::DirPath)
                .value_parser(value_parser!(PathBuf)),
        )
        .arg(options_list_arg().help("Options to change, as after `firn mount -o`"))
}

/// Replaces firnd, the daemon of a mount, and waits for the next firnd, which the keeper process starts. Fails if that
/// is not of this version.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let path: &PathBuf = matches.get_one("path").expect("clap demands it");
    let options = join_options(matches)?;
    let MountLocation { mount, relative } = find_mount(path)?;
    if !relative.is_empty() {
        let path = text::path(path);
        let point = text::path(&mount.mount_point);
        return Err(Failure::new(
            USAGE,
            format!("{path} is inside the mount at {point}: run `firn upgrade {point}`"),
        ));
    }
    let mut connection = Connection::open_of_any_version(&mount)?;
    let previous_pid = connection.pid;
    let previous_version = connection.version.clone();
    let keeper_pid = connection.upgrade(&options)?;
    let upgrade = Upgrade::new(&mount, previous_pid, keeper_pid);
    let status = upgrade.wait_for_next_firnd()?;
    check_new_firnd(&status)?;
    output::print_message(&format!(
        "firn {} continues {} (before: {previous_version}); programs waited {:.0} ms",
        status.version,
        text::path(&mount.mount_point),
        status.takeover_last_seconds * 1e3
    ));
    Ok(DONE)
}

/// Joins all `-o` into one list. Returns a failure if a word is no option of this version.
fn join_options(matches: &ArgMatches) -> Result<String, Failure> {
    let lists = matches.get_many::<OsString>("minus-o").unwrap_or_default();
    let mut list_texts = Vec::new();
    for list in lists {
        parse_minus_o(list, Unknown::Refuse)?;
        let Some(list_text) = list.to_str() else {
            return Err(Failure::new(USAGE, "an option is not UTF-8"));
        };
        list_texts.push(list_text);
    }
    Ok(list_texts.join(","))
}

/// An upgrade under way.
struct Upgrade<'a> {
    /// The mount under upgrade.
    mount: &'a Mount,
    /// Process id of the firnd that served before the upgrade.
    previous_pid: u32,
    /// Descriptor of the keeper's process. `None` means that the keeper has ended.
    keeper: Option<OwnedFd>,
}

impl<'a> Upgrade<'a> {
    /// Begins to watch an upgrade, with the process ids of the previous firnd and of its keeper.
    fn new(mount: &'a Mount, previous_pid: u32, keeper_pid: u32) -> Self {
        // An error means that the keeper has ended already.
        let keeper = Pid::from_raw(keeper_pid as i32)
            .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        Self {
            mount,
            previous_pid,
            keeper,
        }
    }

    /// Waits for the next firnd (the daemon of the mount) and returns its status. It may be of the new version, or of
    /// the old one if the new one could not serve the mount. Fails if the mount has ended.
    ///
    /// The keeper is the process that starts the next firnd. There is no timeout while it runs, because a slow file
    /// system can delay the start for any time.
    fn wait_for_next_firnd(&self) -> Result<Status, Failure> {
        // `None` while the keeper runs.
        let mut deadline = None;
        loop {
            match self.ask_next_firnd() {
                Ok(Some(status)) => return Ok(status),
                Err(error) if deadline.is_some_and(|deadline| deadline <= Instant::now()) => {
                    let mount_point = text::path(&self.mount.mount_point);
                    return Err(Failure::new(
                        FAILED,
                        format!(
                            "no firnd continues {mount_point}, and the mount has ended: {error}"
                        ),
                    ));
                }
                // The previous firnd still serves, or none answers yet.
                Ok(None) | Err(_) => {}
            }
            // A firnd that the keeper started just before its end may still begin to answer.
            if deadline.is_none() && self.has_keeper_ended() {
                deadline = Some(Instant::now() + TIME_AFTER_KEEPER_END);
            }
            std::thread::sleep(ASK_INTERVAL);
        }
    }

    /// Asks for the status of the next firnd. Returns `None` while the previous firnd still serves.
    fn ask_next_firnd(&self) -> Result<Option<Status>, ClientError> {
        let mut connection = Connection::open_of_any_version(self.mount)?;
        // The previous firnd answers until it hands over.
        if connection.pid == self.previous_pid {
            return Ok(None);
        }
        connection.status().map(Some)
    }

    /// Returns whether the process of the keeper has ended.
    fn has_keeper_ended(&self) -> bool {
        let Some(keeper) = &self.keeper else {
            return true;
        };
        let no_wait = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // The descriptor of a process becomes readable when the process ends.
        let mut fds = [PollFd::new(keeper, PollFlags::IN)];
        poll(&mut fds, Some(&no_wait)).is_ok_and(|ready_count| ready_count > 0)
    }
}

/// Returns a failure if the firnd of this status is not of this version.
fn check_new_firnd(status: &Status) -> Result<(), Failure> {
    let reason = match status.upgrade.strip_prefix("refused: ") {
        Some(refusal) => refusal,
        None if status.upgrade == "done" && runs_this_program(status.pid) => return Ok(()),
        None => "another `firn upgrade`, or a new mount, has replaced it meanwhile",
    };
    let version = &status.version;
    Err(Failure::new(
        FAILED,
        format!("firn {version} continues the mount as before: {reason}"),
    ))
}

/// Returns whether a process runs the same program file as this process.
fn runs_this_program(pid: u32) -> bool {
    let program_identity = |process: &str| {
        let metadata = std::fs::metadata(format!("/proc/{process}/exe")).ok()?;
        Some((metadata.dev(), metadata.ino()))
    };
    let Some(own_identity) = program_identity("self") else {
        return false;
    };
    program_identity(&pid.to_string()) == Some(own_identity)
}
