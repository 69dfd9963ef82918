//! `firn run`: runs a user's command with its files in memory, on one host or on all hosts of a batch job.
//!
//! It mounts on each host, starts the command, and unmounts when the command has ended. The steps are in [`run`].
//!
//! Terms
//! * A *launcher* starts one process on each host of the job ([`launcher`]). This process, the *host part*, mounts and
//!   unmounts there ([`host_part`]).
//! * *Held* files are in memory, and not yet in the backing, the directory in which files end up.
//! * A host is *lost* when its host part has sent nothing for `--host-timeout`.

mod command;
mod hints;
pub mod host_part;
mod job;
mod launcher;
mod message;
mod place;
mod prune;
mod restart;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint, value_parser};
use firn_config::{
    Close, Drain, Frontend, Fsync, Layout, Options, Origin, Partner, RecordPlace, Resolved,
};
use firn_protocol::HeldPolicy;
use firn_protocol::path::BytePath;

use self::command::{Environment, describe_end, exit_status_of};
use self::job::{Job, UnmountSummary};
use self::launcher::{Launcher, LauncherKind, Program};
use self::message::{Keep, MountSetup, MountedHost, ReportWanted, RestartTask};
pub(super) use self::place::NAMES_SUFFIX;
use super::mount::{options_list_arg, resolve_options};
use super::wait::parse_timeout_ms;
use crate::failure::{DONE, FAILED, Failure, USAGE};
use crate::verb::Verb;
use crate::{output, report, text};

pub const VERB: Verb = Verb {
    name: "run",
    about: "Run a job with its checkpoints in memory, on one host or many",
    long: "Mounts, runs COMMAND with FIRN_PREFIX set to the mount point and with the preload library loaded, and \
           unmounts when the command has ended. Files below FIRN_PREFIX are written and read at memory speed. The \
           options are those of `firn mount`. If FUSE cannot be used, the preload library alone serves the files \
           (frontend=preload). Signals are forwarded, and the exit status is that of the command.\n\n\
           One host: drain=demand and fsync=held are defaults. If the command succeeds, its files are made durable in \
           --backing; without --backing they are removed. If it fails or is killed, its files remain in memory for a \
           restart: run the same command again to use them. In a batch job, whose host is released afterwards, they are \
           made durable instead.\n\n\
           Many hosts: in a Slurm, PBS or Flux job of several hosts, and with --hosts, each host has the mount while \
           COMMAND runs. COMMAND itself starts processes there (srun, mpirun). Needs no root, and only this binary at \
           the same path on all hosts. With --backing, layout=log is a default: hosts may write the same files. Then \
           ROMIO_HINTS and OMPI_MCA_fbtl_posix_write_datasieving are set as MPI-IO needs them. At SIGTERM, which is \
           sent before a time limit, all hosts make durable what they hold. If a host is lost, a message at the end \
           names it and the command that recovers its data; the other hosts are drained.",
    examples: &[
        (
            "firn run --memory 8G -- mpirun -n 8 ./app",
            "the application writes below $FIRN_PREFIX",
        ),
        (
            "firn run --memory 8G --keep 2 -- mpirun -n 8 ./app",
            "the same; old checkpoints are removed while it runs, as by `firn prune --keep 2`",
        ),
        (
            "firn run --memory 16G --backing /scratch/run42 -- srun ./app",
            "in a batch script of Slurm, with `#SBATCH --signal=TERM@300`: a mount on each host of the job",
        ),
        (
            "firn run --hosts hosts.txt --memory 16G --backing /scratch/run42 -- mpirun --hostfile hosts.txt ./app",
            "on the hosts that a file lists, by ssh",
        ),
        (
            "firn run --restart n17 --memory 8G --backing /scratch/run42 -- ./rank 17",
            "as the replacement of n17, which is lost; the partner of n17 has its files",
        ),
        (
            "firn run --memory 8G --backing /scratch/run42 --prefix /tmp/ckpt -- ./app /tmp/ckpt",
            "with a given mount point, and a directory for the results",
        ),
    ],
    exits: &[
        (
            0,
            "the command succeeded, and its files are durable if there is a --backing",
        ),
        (
            1,
            "mounting, unmounting or the report failed, or a host is lost (or the command ended with 1)",
        ),
        (
            3,
            "the command succeeded, but some of its data is still in memory",
        ),
        (127, "the command was not found"),
        (128, "plus the number of the signal that ended the command"),
    ],
    args,
    run,
};

/// Adds the arguments of `firn run` to its clap command, and returns the command.
fn args(command: Command) -> Command {
    let directory = |id: &'static str, name: &'static str, help: &'static str| {
        Arg::new(id)
            .long(id)
            .value_name(name)
            .help(help)
            .value_hint(ValueHint::DirPath)
            .value_parser(value_parser!(PathBuf))
    };
    command
        .arg(directory(
            "prefix",
            "DIR",
            "Directory where the job sees its files; created if missing [default: `run` in the runtime directory, on several hosts with the number of the job]",
        ))
        .arg(directory("backing", "DIR", "Directory where drained files end up, the same on all hosts; created if missing [default: none]"))
        .arg(
            Arg::new("no-preload")
                .long("no-preload")
                .action(ArgAction::SetTrue)
                .help("Do not load the preload library: all calls go through the mount"),
        )
        .arg(
            Arg::new("quiet")
                .short('q')
                .long("quiet")
                .action(ArgAction::SetTrue)
                .help("Print neither progress nor, if the command succeeds, a summary about its files"),
        )
        .arg(
            Arg::new("report")
                .long("report")
                .value_name("FILE")
                .help("When the command has ended, write the page of `firn report` about the run to FILE")
                .value_hint(ValueHint::FilePath)
                .value_parser(value_parser!(PathBuf)),
        )
        .arg(
            Arg::new("keep")
                .long("keep")
                .value_name("N")
                .help("Remove old checkpoints while the command runs, as by `firn prune --keep N`")
                .long_help(
                    "Remove old checkpoints while the command runs, as by `firn prune --keep N`. Only directories are removed, \
                    not checkpoints of one file. On several hosts with --backing, the first host removes them, and keeps one \
                    more, because other hosts may still write the newest.",
                )
                .value_parser(value_parser!(u32).range(1..)),
        )
        .arg(
            Arg::new("restart")
                .long("restart")
                .value_name("HOST")
                .help("Before the command, fetch missing files that HOST held from the memory of its partner")
                .long_help(
                    "Before the command, fetch files that HOST held from the memory of its partner (option `partner`), if they \
                    are neither in this host's memory nor in --backing. HOST is the host that this host replaces, or this \
                    host's own name after a reboot. The partner is named in .firn/agent-HOST in the backing, and a `firn agent` \
                    must run there; `firn run` does not start the command while the agent cannot be reached. On several hosts \
                    the files go to HOST, if it is one of them, or else to the first host.",
                ),
        )
        .arg(
            Arg::new("hosts")
                .long("hosts")
                .value_name("FILE")
                .help("Mount on the hosts in FILE, one on each line, which --remote-shell reaches")
                .value_hint(ValueHint::FilePath)
                .conflicts_with("launcher")
                .value_parser(value_parser!(PathBuf)),
        )
        .arg(
            Arg::new("launcher")
                .long("launcher")
                .value_name("NAME")
                .help("Resource manager that lists the hosts to mount on, and starts a process on each")
                .default_value("auto")
                .value_parser(value_parser!(LauncherKind)),
        )
        .arg(
            Arg::new("remote-shell")
                .long("remote-shell")
                .value_name("COMMAND")
                .help("Program that reaches a host of --hosts or of a PBS job; called with the host and one command line")
                .default_value("ssh -o BatchMode=yes")
                .value_hint(ValueHint::CommandString),
        )
        .arg(
            Arg::new("host-timeout")
                .long("host-timeout")
                .value_name("DURATION")
                .help("Time without a message after which a host is lost (`30s`, `5min`; a plain number means seconds); at least 60s before it has mounted")
                .default_value("60s")
                .value_parser(parse_host_timeout_ms),
        )
        .arg(options_list_arg())
        .args(firn_config::args())
        .arg(
            Arg::new("command")
                .value_name("COMMAND")
                .help("The command and its arguments")
                .required(true)
                .num_args(1..)
                .trailing_var_arg(true)
                .allow_hyphen_values(true)
                .value_parser(value_parser!(OsString)),
        )
}

/// Exit status of a program that was ended by signal N, minus N, as shells report it.
const SIGNAL_STATUS_BASE: i32 = 128;
/// Minimum of `--host-timeout` in milliseconds. A busy host would exceed a shorter timeout.
const HOST_TIMEOUT_MIN_MS: u64 = 1000;

fn parse_host_timeout_ms(text: &str) -> Result<u64, String> {
    let timeout_ms = parse_timeout_ms(text)?;
    if timeout_ms < HOST_TIMEOUT_MIN_MS {
        return Err("write at least 1s".into());
    }
    Ok(timeout_ms)
}

/// Mounts on all hosts, runs the command, unmounts, and writes the report. Returns the exit status of the command, or
/// of the first failed host if the command succeeded.
///
/// The failure of the command takes precedence over those of the unmounts, and these over that of the report. The
/// failures of the unmounts are also printed.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let command_words: Vec<OsString> = matches
        .get_many::<OsString>("command")
        .unwrap_or_default()
        .cloned()
        .collect();
    let launcher = launcher::choose_launcher(matches)?;
    let run = Run::new(matches, launcher.as_ref())?;
    let timeout_ms = *matches
        .get_one::<u64>("host-timeout")
        .expect("it has a default");
    let timeout = Duration::from_millis(timeout_ms);
    let mut job = Job::start(launcher.as_ref(), timeout, host_part_program)?;
    let command_result = run.mount_and_run_command(&mut job, &command_words);
    // The mounts are ended even if the command could not be run. Its failure is returned at the end.
    let command_status = command_result.as_ref().ok();
    let held_policy = run.held_policy(command_status);
    let mut unmounts = job.unmount_all(held_policy, run.is_quiet);
    for failure in &unmounts.failures {
        output::print_message(&failure.text);
    }
    run.print_partners_notice(&unmounts.lost);
    let host_count = launcher.hosts().len();
    run.print_summary(host_count, command_status, held_policy, &unmounts);
    let report_result = match &run.report {
        Some(file) if !unmounts.mounted.is_empty() => write_report(&mut unmounts, file),
        _ => Ok(()),
    };
    let exit_status = run_exit_status(command_result?, &unmounts);
    let Err(report_failure) = report_result else {
        return Ok(exit_status);
    };
    if exit_status == DONE {
        return Err(report_failure);
    }
    // The exit status of the command, or of its files, matters more than a report that could not be written.
    if let Some(text) = report_failure.text() {
        output::print_message(&text);
    }
    Ok(exit_status)
}

/// Returns the exit status of a run. A command that failed has the more important status than a host that failed.
fn run_exit_status(command_status: ExitStatus, unmounts: &UnmountSummary) -> u8 {
    match unmounts.failures.first() {
        Some(failure) if command_status.success() => failure.exit_status,
        _ => exit_status_of(command_status),
    }
}

/// Writes the report of a run to `file`, from the records (what each mount did) that its hosts sent. A lost host, which
/// no longer answers, has sent none, but may have left its record in the backing. Fails if no host's record is known,
/// or if the file cannot be written.
fn write_report(unmounts: &mut UnmountSummary, file: &Path) -> Result<(), Failure> {
    let run = &mut unmounts.report;
    if !unmounts.lost.is_empty()
        && let Some(mounted) = unmounts.mounted.first()
    {
        run.add_other_hosts(mounted.backing.as_path());
    }
    run.finish_records();
    for host in &unmounts.lost {
        if !run.records.iter().any(|record| record.host == *host) {
            let text = format!(
                "{host} is lost, and left no record in the backing: the report does not show this host"
            );
            run.failures.push(text);
        }
    }
    if run.records.is_empty() {
        let reasons = run.failures.join("; ");
        return Err(Failure::new(
            FAILED,
            format!("there is no report: {reasons}"),
        ));
    }
    report::write_page(run, file)?;
    output::print_message(&format!("the report is in {}", text::path(file)));
    Ok(())
}

/// The settings of a run, from the command line, the environment and the launcher.
struct Run {
    /// File for the report of the run.
    report: Option<PathBuf>,
    /// Directory where drained files end up. `None` means that files are in memory only.
    backing: Option<PathBuf>,
    /// Mount point that the user has chosen.
    prefix: Option<PathBuf>,
    /// Name of the default mount point.
    default_prefix: String,
    /// Options of the mounts.
    options: Options,
    /// Whether hosts choose the frontend, because the user has not.
    may_choose_frontend: bool,
    /// Whether the command runs with the preload library.
    uses_preload: bool,
    /// Content of the file with ROMIO hints, if files lie in logs.
    romio_hints: Option<String>,
    /// The lost host whose files are restored.
    restart: Option<String>,
    /// Number of checkpoints to keep. `None` means that all stay.
    keep: Option<u32>,
    /// Whether summaries and progress are left out.
    is_quiet: bool,
    /// Whether the hosts still belong to the user after the command. Then the files of a failed command stay in memory.
    keeps_hosts: bool,
}

impl Run {
    /// Returns the run that the command line and the environment ask for. Fails on combinations of options that cannot
    /// work. `launcher` has the hosts of the run.
    fn new(matches: &ArgMatches, launcher: &dyn Launcher) -> Result<Self, Failure> {
        let absolute_path = |id: &str| -> Result<Option<PathBuf>, Failure> {
            let Some(path) = matches.get_one::<PathBuf>(id) else {
                return Ok(None);
            };
            match std::path::absolute(path) {
                Ok(path) => Ok(Some(path)),
                Err(error) => Err(Failure::new(USAGE, format!("--{id}: {error}"))),
            }
        };
        let backing = absolute_path("backing")?;
        let resolved = resolve_options(matches)?;
        let shares_backing = launcher.hosts().len() > 1 && backing.is_some();
        let mut options = run_options(&resolved, shares_backing);
        let report = absolute_path("report")?;
        if report.is_some() && shares_backing && is_default(&resolved, "record-in") {
            // A lost host sends no record. Its record in the backing is then the only one.
            options.record = RecordPlace::Backing;
        }
        let prefix = absolute_path("prefix")?;
        let default_prefix = launcher.default_prefix();
        let romio_hints = if options.layout == Layout::Log {
            Some(hints::hints_without_sieving()?)
        } else {
            None
        };
        let run = Self {
            report,
            backing,
            prefix,
            default_prefix,
            options,
            may_choose_frontend: is_default(&resolved, "frontend"),
            uses_preload: !matches.get_flag("no-preload"),
            romio_hints,
            restart: matches.get_one::<String>("restart").cloned(),
            keep: matches.get_one::<u32>("keep").copied(),
            is_quiet: matches.get_flag("quiet"),
            keeps_hosts: launcher.keeps_hosts(),
        };
        run.check_combinations()?;
        Ok(run)
    }

    /// Refuses combinations of options that cannot work, before any process is started.
    fn check_combinations(&self) -> Result<(), Failure> {
        if let Some(file) = &self.report {
            report::check_target(file)?;
            if let Some(prefix) = &self.prefix
                && file.starts_with(prefix)
            {
                let text = "--report names a file below --prefix, which is empty after the run: name another directory";
                return Err(Failure::new(USAGE, text));
            }
        }
        // The mount would cover the directory into which it drains.
        if let (Some(prefix), Some(backing)) = (&self.prefix, &self.backing)
            && prefix.starts_with(backing)
        {
            let text = format!(
                "the prefix {} is inside the backing directory {}: name another prefix",
                text::path(prefix),
                text::path(backing)
            );
            return Err(Failure::new(USAGE, text));
        }
        let is_without_fuse = self.options.frontend == Frontend::Preload;
        if is_without_fuse && !self.uses_preload {
            return Err(missing_library_failure());
        }
        // A restart fetches lost files from another host, the partner, whose key is in the backing. The files then get
        // their names by renames, which must reach firnd through a FUSE mount.
        if self.restart.is_some() && (self.backing.is_none() || is_without_fuse) {
            let text =
                "--restart needs --backing, in which hosts find each other, and frontend=fuse";
            return Err(Failure::new(USAGE, text));
        }
        Ok(())
    }

    /// Returns what every host mounts, and how. `hosts` are the names that the hosts give themselves.
    ///
    /// All hosts get the same setup. A task in it (to restore, prune or report) names the host that does it. Without a
    /// name, each host does it for its own files.
    fn mount_setup(&self, hosts: &[String]) -> MountSetup {
        MountSetup {
            backing: self.backing.clone().map(Into::into),
            prefix: self.prefix.clone().map(Into::into),
            default_prefix: self.default_prefix.clone(),
            options: self.options.clone(),
            may_choose_frontend: self.may_choose_frontend,
            romio_hints: self.romio_hints.clone(),
            restart: self
                .restart
                .as_ref()
                .map(|lost_host| restart_task(lost_host, hosts)),
            keep: self.keep.map(|count| self.pruning_task(hosts, count)),
            report: self.report.as_ref().map(|_| self.report_task(hosts)),
        }
    }

    /// Returns how many checkpoints stay, and which host removes the others.
    ///
    /// Hosts with one backing see the same checkpoints, so only the first host removes old ones. It keeps one more,
    /// because it does not know whether other hosts still write the newest.
    fn pruning_task(&self, hosts: &[String], count: u32) -> Keep {
        match hosts {
            [first, _, ..] if self.backing.is_some() => Keep {
                count: count.saturating_add(1),
                by: Some(first.clone()),
            },
            _ => Keep { count, by: None },
        }
    }

    /// Returns which host lists the checkpoints for the report. Hosts with one backing see the same checkpoints, so the
    /// first host lists them. Without a backing each host lists its own.
    fn report_task(&self, hosts: &[String]) -> ReportWanted {
        let checkpoints_by = if self.backing.is_some() {
            hosts.first().cloned()
        } else {
            None
        };
        ReportWanted { checkpoints_by }
    }

    /// Mounts on all hosts, runs the command, and returns its status. The mounts stay, also after a failure.
    fn mount_and_run_command(
        &self,
        job: &mut Job<'_>,
        words: &[OsString],
    ) -> Result<ExitStatus, Failure> {
        let mounts = job.mount_all(|hosts| self.mount_setup(hosts))?;
        let environment = self.command_environment(&mounts)?;
        let command = command::start_command(words, &environment)?;
        job.wait_for_command(command)
    }

    /// Returns the environment of the command. `mounts` has at least one mount, and all hosts have mounted.
    ///
    /// Fails if hosts have different mount points, because the command gets only one FIRN_PREFIX. Also fails if a mount
    /// is a stub tree (without FUSE) and there is no preload library, without which programs cannot read such a tree.
    fn command_environment(&self, mounts: &[MountedHost]) -> Result<Environment, Failure> {
        let preload = if self.uses_preload {
            find_preload_library()
        } else {
            None
        };
        // Without FUSE, only the preload library can give the command its files.
        if preload.is_none() && mounts.iter().any(|mount| mount.is_tree) {
            return Err(missing_library_failure());
        }
        let first = &mounts[0];
        let has_other_paths = |mount: &&MountedHost| {
            mount.prefix != first.prefix || mount.romio_hints != first.romio_hints
        };
        if let Some(other) = mounts.iter().find(has_other_paths) {
            let first_prefix = text::path(first.prefix.as_path());
            let other_prefix = text::path(other.prefix.as_path());
            let text = format!(
                "hosts have different runtime directories: {first_prefix} and {other_prefix}; use --prefix, or set the same FIRN_RUNTIME_DIR on all hosts"
            );
            return Err(Failure::new(FAILED, text));
        }
        let to_path_buf = |path: &BytePath| path.as_path().to_owned();
        Ok(Environment {
            prefix: to_path_buf(&first.prefix),
            preload,
            romio_hints: first.romio_hints.as_ref().map(to_path_buf),
        })
    }

    /// Returns what happens to the held files after the command. `command_status` is `None` if the command never ran.
    fn held_policy(&self, command_status: Option<&ExitStatus>) -> HeldPolicy {
        let has_backing = self.backing.is_some();
        let is_successful = command_status.is_some_and(ExitStatus::success);
        match (is_successful, has_backing) {
            // The files of a successful command belong in the backing.
            (true, true) => HeldPolicy::Drain,
            // A successful run without a backing has no further use for its files.
            (true, false) => HeldPolicy::Discard,
            // The batch system gives the host to another user next, so its memory has to be freed.
            (false, true) if !self.keeps_hosts => HeldPolicy::Drain,
            (false, _) => HeldPolicy::Keep,
        }
    }

    /// Prints how the partners' copies of lost hosts' files are used.
    fn print_partners_notice(&self, lost: &[String]) {
        if self.options.partner == Partner::None {
            return;
        }
        for host in lost {
            output::print_message(&format!(
                "--restart {host} at the next run restores the files of which the partner of {host} has copies"
            ));
        }
    }

    /// Prints how the command ended, and where its files are now. Prints nothing if all succeeded and `--quiet` is set.
    ///
    /// Without `command_status`, the command did not run. `held_policy` says what the unmounts did with held data (in
    /// memory only).
    fn print_summary(
        &self,
        host_count: usize,
        command_status: Option<&ExitStatus>,
        held_policy: HeldPolicy,
        unmounts: &UnmountSummary,
    ) {
        let is_successful =
            command_status.is_some_and(ExitStatus::success) && unmounts.failures.is_empty();
        if is_successful && self.is_quiet {
            return;
        }
        let command_end = match command_status {
            Some(status) => describe_end(*status),
            // The failure itself is printed after this.
            None if unmounts.held_bytes == 0 => return,
            None => "the command did not run".into(),
        };
        let everything = match (unmounts.failures.is_empty(), host_count) {
            (false, _) => "everything else".to_owned(),
            (true, 1) => "everything".into(),
            (true, host_count) => format!("everything of {host_count} hosts"),
        };
        let backing = self.backing.as_deref().map(text::path);
        // The first case that fits counts.
        let files_end = match (held_policy, backing) {
            (HeldPolicy::Drain, Some(backing)) if unmounts.waited.files > 0 => format!(
                "{everything} is durable in {backing}: {} were left to write, {}",
                unmounts.waited.amount_text(),
                unmounts.waited.time_text()
            ),
            (HeldPolicy::Discard, _) => {
                "its files were in memory only and are removed (--backing DIR keeps them)".into()
            }
            _ if unmounts.held_bytes > 0 => {
                print_held_notice(&command_end, unmounts);
                return;
            }
            (HeldPolicy::Drain, Some(backing)) => format!("{everything} is durable in {backing}"),
            (_, Some(backing)) => format!("{everything} is drained to {backing}"),
            (_, None) => "none of its files was in memory".into(),
        };
        output::print_message(&format!("{command_end}; {files_end}"));
    }
}

/// Returns which host restores the files of a lost host: the host of that name if it takes part, or else the first
/// host.
fn restart_task(lost_host: &str, hosts: &[String]) -> RestartTask {
    let same_host = hosts.iter().find(|host| *host == lost_host);
    RestartTask {
        lost: lost_host.to_owned(),
        to: same_host.unwrap_or(&hosts[0]).clone(),
    }
}

/// Prints how much of the command's files remains in memory (in the arena of each host), and how to use them.
/// `command_end` says how the command ended.
fn print_held_notice(command_end: &str, unmounts: &UnmountSummary) {
    let held = text::bytes(unmounts.held_bytes);
    let [arena] = unmounts.arenas.as_slice() else {
        output::print_message(&format!(
            "{command_end}; {held} of its files stay in the memory of {} hosts",
            unmounts.arenas.len()
        ));
        output::print_message("run the same `firn run` again, on the same hosts, to use them");
        return;
    };
    let arena = text::path(arena);
    output::print_message(&format!(
        "{command_end}; {held} of its files stay in memory, in {arena}"
    ));
    output::print_message("run the same `firn run` again to use them, or mount them with:");
    for mounted in &unmounts.mounted {
        let prefix = text::path(mounted.prefix.as_path());
        let backing = text::path(mounted.backing.as_path());
        let frontend = if mounted.is_tree {
            ",frontend=preload"
        } else {
            ""
        };
        output::print_message(&format!(
            "  firn mount -o drain=demand{frontend} {backing} {prefix}"
        ));
    }
}

/// Returns whether the user has left the option `name` at its default.
fn is_default(resolved: &Resolved, name: &str) -> bool {
    resolved
        .origins
        .iter()
        .any(|(row, origin)| row.name == name && matches!(origin, Origin::Default))
}

/// Returns the options of a run. Options that the user has not set have the defaults of `firn run`.
///
/// On one host, speed comes first: files are drained (written to the backing) only on demand, and close and fsync do
/// not wait. With several hosts, correctness comes first: files lie in logs, which work on any file system, and each
/// close and fsync makes data visible to others.
fn run_options(resolved: &Resolved, shares_backing: bool) -> Options {
    let mut options = resolved.options.clone();
    if shares_backing && is_default(resolved, "layout") {
        options.layout = Layout::Log;
    }
    // With files in logs, the ordinary defaults of close and fsync make data visible to the other hosts.
    if shares_backing && options.layout == Layout::Log {
        return options;
    }
    if is_default(resolved, "drain") {
        options.drain = Drain::Demand;
    }
    // If the user has set another drain, close keeps its ordinary default.
    if is_default(resolved, "close") && options.drain == Drain::Demand {
        options.close = Close::Held;
    }
    if is_default(resolved, "fsync") {
        options.fsync = Fsync::Held;
    }
    options
}

/// Returns the frontend of a host if the user has chosen none: FUSE if it works, or else preload.
fn choose_frontend(print_notice: &mut dyn FnMut(String)) -> Frontend {
    match check_fuse() {
        Ok(()) => Frontend::Fuse,
        Err(reason) => {
            print_notice(format!(
                "{reason}: without FUSE, the preload library alone serves the files (frontend=preload)"
            ));
            Frontend::Preload
        }
    }
}

/// Returns whether FUSE can be used on this host. The error says why it cannot.
fn check_fuse() -> Result<(), String> {
    if let Some(fault) = crate::doctor::device_fault() {
        return Err(fault);
    }
    let is_root = rustix::process::geteuid().is_root();
    if is_root || crate::doctor::find_program("fusermount3").is_some() {
        Ok(())
    } else {
        Err("fusermount3 is not installed".into())
    }
}

/// Returns the preload library that is installed with this program. A message says where it is missing.
fn find_preload_library() -> Option<PathBuf> {
    let library = firn_client::library::find_beside(&std::env::current_exe().ok()?);
    if library.is_none() {
        let name = firn_client::library::NAME;
        output::print_message(&format!(
            "{name} is not installed: all calls go through the mount, which is slower"
        ));
    }
    library
}

fn missing_library_failure() -> Failure {
    let text = "frontend=preload needs the preload library: omit --no-preload, and install the library beside firn";
    Failure::new(USAGE, text)
}

/// Returns the command line and the variables of the host part. `alive_interval_ms` is the interval of its signs of
/// life.
fn host_part_program(alive_interval_ms: u64) -> Result<Program, Failure> {
    let own_file = std::env::current_exe()
        .map_err(|error| Failure::new(FAILED, format!("cannot find this program: {error}")))?;
    let words = [
        own_file.into_os_string(),
        host_part::NAME.into(),
        alive_interval_ms.to_string().into(),
    ];
    Ok(Program {
        words: words.into(),
        variables: std::env::vars_os()
            .filter(|(name, _)| is_passed_to_hosts(name))
            .collect(),
    })
}

/// Returns whether a variable is set for the host parts as it is set here: `PATH`, and the variables of Firn.
fn is_passed_to_hosts(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    // A launcher may put the name into a line for a shell, so names with other characters are not passed on.
    let is_word_byte = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    name == b"PATH" || name.starts_with(b"FIRN_") && name.iter().all(is_word_byte)
}
