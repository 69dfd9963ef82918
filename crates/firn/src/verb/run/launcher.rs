//! Launchers: one for each resource manager (Slurm, PBS, Flux) or remote shell that can start processes on hosts.
//!
//! A [`Launcher`] lists the hosts of a run, and makes the commands (`srun`, `ssh`) that start one process on each of
//! them. It does nothing else. Each of these processes mounts, reports and unmounts in the same way under any launcher
//! ([`super::host_part`]), and ends when its standard input ends.

mod flux;
mod local;
mod remote_shell;
mod slurm;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use clap::{ArgMatches, ValueEnum};
use firn_process::{ExcessOutput, Limits};

use self::flux::Flux;
use self::local::Local;
use self::remote_shell::RemoteShell;
use self::slurm::Slurm;
use crate::failure::{FAILED, Failure};

/// Where the hosts of a run come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum LauncherKind {
    /// The job that the command runs in, or this host if there is none.
    Auto,
    /// This host.
    Local,
    /// The Slurm job that SLURM_JOB_ID names, by `srun`.
    Slurm,
    /// The hosts in the file that PBS_NODEFILE names, by the remote shell.
    Pbs,
    /// The Flux instance that FLUX_URI names, by `flux exec`.
    Flux,
}

/// Lists the hosts of a run, and makes the commands that start one process on each host.
pub(super) trait Launcher {
    /// Returns the names of the hosts, each of them once.
    fn hosts(&self) -> &[String];

    /// Returns the local commands that together start `program` once on each host.
    fn launch_commands(&self, program: &Program) -> Vec<LaunchCommand>;

    /// Returns a command line that runs `line` on a host, for the user to copy.
    fn line_on_host(&self, host: &str, line: &str) -> String;

    /// Returns whether the hosts still belong to the user when the command has ended. A host of a batch job does not.
    fn keeps_hosts(&self) -> bool;

    /// Returns the name of the default mount point. It differs between jobs that may share a host.
    fn default_prefix(&self) -> String {
        "run".into()
    }
}

/// A command on this host, such as `ssh`, which starts the program on some of the hosts.
pub(super) struct LaunchCommand {
    /// The command, which is not started yet.
    pub(super) command: Command,
    /// The hosts on which it starts the program, as indices into [`Launcher::hosts`].
    pub(super) hosts: Vec<usize>,
}

/// The program that is started on each host. Its file has the same path on all hosts.
pub(super) struct Program {
    /// Program file and arguments.
    pub(super) words: Vec<OsString>,
    /// Variables that the program needs. A launcher that passes on the whole environment need not set them.
    pub(super) variables: Vec<(OsString, OsString)>,
}

impl Program {
    /// Appends program file and arguments to a command such as `srun`, which runs them elsewhere.
    fn append_to(&self, command: &mut Command) {
        command.args(&self.words);
    }
}

/// Returns the launcher that the command line and the environment ask for. It lists the hosts of the run, and starts
/// processes on them.
///
/// By default, the hosts are those of the enclosing job of a resource manager. Outside such a job, the run has this
/// host only. Fails if the hosts of the job or of the user's file cannot be read.
pub(super) fn choose_launcher(matches: &ArgMatches) -> Result<Box<dyn Launcher>, Failure> {
    let shell_words: Vec<String> = matches
        .get_one::<String>("remote-shell")
        .map_or("", String::as_str)
        .split_whitespace()
        .map(str::to_owned)
        .collect();
    if let Some(file) = matches.get_one::<PathBuf>("hosts") {
        return Ok(Box::new(RemoteShell::from_file(file, shell_words)?));
    }
    let kind = matches.get_one::<LauncherKind>("launcher").copied();
    Ok(match kind.unwrap_or(LauncherKind::Auto) {
        LauncherKind::Auto => choose_by_environment(shell_words)?,
        LauncherKind::Local => Box::new(Local::new()),
        LauncherKind::Slurm => Box::new(Slurm::from_job()?),
        LauncherKind::Pbs => Box::new(RemoteShell::from_pbs_job(shell_words)?),
        LauncherKind::Flux => Box::new(Flux::from_instance()?),
    })
}

/// Returns the launcher, which starts processes on the hosts, for the job of a resource manager in which this process
/// runs, or else for this host only.
fn choose_by_environment(shell_words: Vec<String>) -> Result<Box<dyn Launcher>, Failure> {
    if slurm::is_in_job() {
        return Ok(Box::new(Slurm::from_job()?));
    }
    if flux::is_in_instance() {
        return Ok(Box::new(Flux::from_instance()?));
    }
    if remote_shell::is_in_pbs_job() {
        let pbs_job = RemoteShell::from_pbs_job(shell_words)?;
        // A PBS job on one host needs no remote shell.
        if pbs_job.hosts().len() > 1 {
            return Ok(Box::new(pbs_job));
        }
    }
    Ok(Box::new(Local::new()))
}

/// Returns an environment variable, or `None` if it is unset, empty, or not valid text.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Timeout for a resource manager to name the hosts of a job.
const HOST_QUERY_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum size in bytes of a list of hosts: 100,000 hosts with names of 40 bytes.
const HOSTS_BYTES_MAX: usize = 4 << 20;

/// Runs a command of a resource manager that prints words, such as host names. Returns the words.
///
/// Fails if the command fails, exceeds its timeout, or prints no word. The error then names the options that the user
/// can use instead of the command.
fn query_words(command: Command) -> Result<Vec<String>, Failure> {
    let program = command.get_program().to_string_lossy().into_owned();
    let failure = |reason: &str| {
        let text = format!(
            "cannot get the hosts of the job from `{program}`: {reason}. Name them with --hosts FILE, or mount on this host only with --launcher local"
        );
        Failure::new(FAILED, text)
    };
    let limits = Limits {
        input: b"",
        output_bytes_max: HOSTS_BYTES_MAX,
        excess: ExcessOutput::Refuse,
        deadline: Instant::now() + HOST_QUERY_TIMEOUT,
    };
    let output = firn_process::run(command, limits).map_err(|error| failure(&error.to_string()))?;
    if !output.status.success() {
        return Err(failure(&output.text()));
    }
    let hosts: Vec<String> = output
        .text()
        .split_whitespace()
        .map(str::to_owned)
        .collect();
    if hosts.is_empty() {
        return Err(failure("it prints no host"));
    }
    Ok(hosts)
}
