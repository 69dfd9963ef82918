//! `firn upgrade`: replaces the firnd of a mount by this version of the program, while programs keep their open files.
//!
//! A keeper is a process that holds the descriptors of the mount, and starts the next firnd when one ends.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Arg, ArgMatches, Command, ValueHint, value_parser};
use firn_client::{ClientError, Connection, Mount, Place};
use firn_config::{Unknown, parse_minus_o};
use firn_protocol::Status;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::failure::{DONE, FAILED, Failure, USAGE};
use crate::verb::mount::options_list_arg;
use crate::verb::{NO_CONNECTION, Verb, find_mount};
use crate::{output, text};

/// Interval between two requests to find out whether the next firnd answers.
const ASK_EVERY: Duration = Duration::from_millis(20);
/// Time for further requests after the keeper has ended. A firnd that has just started replaces it by a new keeper.
const LAST_QUESTIONS: Duration = Duration::from_secs(10);

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

/// Adds the arguments of the verb to its command.
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

/// Replaces the firnd of a mount, and waits for the next firnd. Fails if that is not of this version.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let path: &PathBuf = matches.get_one("path").expect("clap demands it");
    let options = join_options(matches)?;
    let Place { mount, relative } = find_mount(path)?;
    if !relative.is_empty() {
        let (path, top) = (text::path(path), text::path(&mount.mount_point));
        return Err(Failure::new(
            USAGE,
            format!("{path} is inside the mount at {top}: run `firn upgrade {top}`"),
        ));
    }
    let mut connection = Connection::open_of_any_version(&mount)?;
    let (before, version) = (connection.pid, connection.version.clone());
    let keeper = connection.upgrade(&options)?;
    let status = Upgrade::watch(&mount, before, keeper).wait_for_upgrade()?;
    check_upgraded(&status)?;
    output::print_message(&format!(
        "firn {} continues {} (before: {version}); programs waited {:.0} ms",
        status.version,
        text::path(&mount.mount_point),
        status.takeover_last_seconds * 1e3
    ));
    Ok(DONE)
}

/// Joins all `-o` into one list. Returns a failure if a word is no option of this version.
fn join_options(matches: &ArgMatches) -> Result<String, Failure> {
    let lists: Vec<&OsString> = matches.get_many("minus-o").into_iter().flatten().collect();
    let mut joined = Vec::new();
    for list in lists {
        parse_minus_o(list, Unknown::Refuse)?;
        let list = list.to_str();
        joined.push(list.ok_or_else(|| Failure::new(USAGE, "an option is not UTF-8"))?);
    }
    Ok(joined.join(","))
}

/// An upgrade under way.
struct Upgrade<'a> {
    /// The mount under upgrade.
    mount: &'a Mount,
    /// Process id of the firnd that served before the upgrade.
    before: u32,
    /// Descriptor of the keeper's process. `None` means that the keeper has ended.
    keeper: Option<OwnedFd>,
}

impl<'a> Upgrade<'a> {
    /// Begins to watch an upgrade. `before` is the process id of the previous firnd, and `keeper` that of its keeper.
    fn watch(mount: &'a Mount, before: u32, keeper: u32) -> Self {
        let keeper = Pid::from_raw(keeper as i32);
        Self {
            mount,
            before,
            keeper: keeper.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()),
        }
    }

    /// Waits for the status of the next firnd, which may be of the new version or of the old one. There is no timeout
    /// while the keeper lives, because the backing decides how long firnd takes. Fails if the mount has ended.
    fn wait_for_upgrade(&self) -> Result<Status, Failure> {
        let mut until = None;
        loop {
            match self.ask_status() {
                Ok(Some(status)) => return Ok(status),
                Err(error) if until.is_some_and(|until| until <= Instant::now()) => {
                    let mount_point = text::path(&self.mount.mount_point);
                    return Err(Failure::new(
                        FAILED,
                        format!(
                            "no firnd continues {mount_point}, and the mount has ended: {error}"
                        ),
                    ));
                }
                Ok(None) | Err(_) => {}
            }
            if until.is_none() && self.has_keeper_ended() {
                until = Some(Instant::now() + LAST_QUESTIONS);
            }
            std::thread::sleep(ASK_EVERY);
        }
    }

    /// Asks for the status of the next firnd. Returns `None` while the previous firnd still serves.
    fn ask_status(&self) -> Result<Option<Status>, ClientError> {
        let mut connection = Connection::open_of_any_version(self.mount)?;
        // The previous firnd answers until it hands over.
        if connection.pid == self.before {
            return Ok(None);
        }
        connection.status().map(Some)
    }

    /// Returns whether the process of the keeper has ended.
    fn has_keeper_ended(&self) -> bool {
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let ended = |keeper: &OwnedFd| {
            let mut keeper = [PollFd::new(keeper, PollFlags::IN)];
            poll(&mut keeper, Some(&now)).is_ok_and(|count| count > 0)
        };
        self.keeper.as_ref().is_none_or(ended)
    }
}

/// Returns a failure if the firnd of this status is not of this version.
fn check_upgraded(status: &Status) -> Result<(), Failure> {
    let failed = |why: &str| {
        let version = &status.version;
        Failure::new(
            FAILED,
            format!("firn {version} continues the mount as before: {why}"),
        )
    };
    match status.upgrade.strip_prefix("refused: ") {
        Some(why) => Err(failed(why)),
        None if status.upgrade == "done" && runs_this_program(status.pid) => Ok(()),
        None => Err(failed(
            "another `firn upgrade`, or a new mount, has replaced it meanwhile",
        )),
    }
}

/// Returns whether a process runs the same program file as this process.
fn runs_this_program(pid: u32) -> bool {
    let program = |process: &str| {
        let program = std::fs::metadata(format!("/proc/{process}/exe")).ok()?;
        Some((program.dev(), program.ino()))
    };
    program("self").is_some_and(|own| program(&pid.to_string()) == Some(own))
}
