//! `firn run`: a job with its files in memory, set up before it and taken down after it.

mod restart;

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Process, ExitStatus};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint, value_parser};
use firn_client::{Connection, Progress};
use firn_config::{Close, Drain, Frontend, Fsync, Options, Origin, Resolved};
use firn_daemon::MountRequest;
use firn_protocol::HeldPolicy;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use super::mount::{minus_o, resolve};
use super::umount::wait_for_end;
use crate::failure::{FAILED, Failure, USAGE};
use crate::progress::Meter;
use crate::prune::{self, Verdict};
use crate::verb::Verb;
use crate::{output, text};
use firn_client::checkpoints::Directory;

pub const VERB: Verb = Verb {
    name: "run",
    about: "Run a job with its checkpoints in memory",
    long: "Mounts, runs COMMAND with FIRN_PREFIX set to the mount point and with the preload library loaded, \
               and unmounts when the command has ended. Files below FIRN_PREFIX are written and read at \
               memory speed. The options are those of `firn mount`, with drain=demand and fsync=held as \
               defaults. If the command succeeds, its files are drained to --backing; without --backing they \
               are removed. If it fails or is killed, its files stay in memory for a restart: run the same \
               command again to find them. Where FUSE cannot be used, the preload library alone serves the \
               files (frontend=preload). Signals are forwarded, and the exit status is that of the command.",
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
            "firn run --restart n17 --memory 8G --backing /scratch/run42 -- ./rank 17",
            "in place of n17, which is lost; its partner has its files",
        ),
        (
            "firn run --memory 8G --backing /scratch/run42 --prefix /tmp/ckpt -- ./app /tmp/ckpt",
            "with a given mount point, and a directory for the results",
        ),
    ],
    exits: &[
        (
            0,
            "the command succeeded, and its files were drained if there is a --backing",
        ),
        (
            1,
            "mounting or unmounting failed (or the command ended with 1)",
        ),
        (127, "the command was not found"),
        (128, "plus the number of the signal that ended the command"),
    ],
    args,
    run,
};

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
            "Directory where the job sees its files; created if missing [default: `run` in the runtime directory]",
        ))
        .arg(directory("backing", "DIR", "Directory where drained files end up; created if missing [default: none]"))
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
                .help("Say nothing of what was done with the files of a command that succeeded, and show no progress"),
        )
        .arg(
            Arg::new("keep")
                .long("keep")
                .value_name("N")
                .help("Remove old checkpoints while the command runs, as by `firn prune --keep N`")
                .value_parser(value_parser!(u32).range(1..)),
        )
        .arg(
            Arg::new("restart")
                .long("restart")
                .value_name("HOST")
                .help("Before the command, bring files that HOST held and that are nowhere nearer from its partner's memory")
                .long_help(
                    "Before the command, bring files that HOST held from the memory of its partner (option `partner`), where \
                     they are neither in this host's memory nor in --backing. HOST is the host that this one replaces, or its \
                     own name after it was started again. Its partner is named in .firn/agent-HOST in the backing and \
                     needs a `firn agent` that runs; `firn run` does not start the command while it cannot be reached.",
                ),
        )
        .arg(minus_o())
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

fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let command: Vec<OsString> = matches
        .get_many::<OsString>("command")
        .into_iter()
        .flatten()
        .cloned()
        .collect();
    let options = defaults_of_a_run(resolve(matches)?);
    let preload = if matches.get_flag("no-preload") {
        None
    } else {
        library()
    };
    let is_tree = options.frontend == Frontend::Preload;
    if is_tree && preload.is_none() {
        let why = "frontend=preload needs the preload library: omit --no-preload, and install the library beside firn";
        return Err(Failure::new(USAGE, why));
    }
    let prefix = matches.get_one("prefix").cloned();
    let backing = matches.get_one("backing").cloned();
    let restart = matches.get_one::<String>("restart");
    if restart.is_some() && (backing.is_none() || is_tree) {
        let why = "--restart needs --backing, in which hosts find each other, and frontend=fuse";
        return Err(Failure::new(USAGE, why));
    }
    let place = Place::new(prefix, backing, is_tree)?;
    let request = MountRequest {
        backing: place.backing.clone(),
        mount_point: place.prefix.clone(),
        options,
        foreground: false,
    };
    firn_daemon::mount_with_notices(request, &mut |text| output::say(&text))?;
    if let Some(host) = restart
        && let Err(failure) = restart::restore(host, &place.prefix, &place.backing)
    {
        place.take_down(None, true)?;
        return Err(failure);
    }
    let keep = matches.get_one::<u32>("keep").map(|keep| *keep as usize);
    let status = std::thread::scope(|scope| {
        let (ended, on_end) = channel::<()>();
        if let Some(keep) = keep {
            let prefix = &place.prefix;
            scope.spawn(move || prune_until(on_end, prefix, keep));
        }
        let status = carry_out(&command, &place, preload.as_deref());
        drop(ended);
        status
    });
    let ended = place.take_down(status.as_ref().ok(), matches.get_flag("quiet"));
    let status = status?;
    ended?;
    Ok(exit_code(status))
}

/// How often a directory is looked at for old checkpoints: seldom beside the time that a checkpoint takes, often enough
/// that one more of them finds room.
const PRUNE_EVERY: Duration = Duration::from_secs(1);

/// Removes old checkpoints again and again until nobody can send to `on_end` any more. Each failure is told once: the
/// job, and the removal of others, go on without.
fn prune_until(on_end: Receiver<()>, prefix: &Path, keep: usize) {
    let mut told = HashSet::new();
    while on_end.recv_timeout(PRUNE_EVERY) == Err(RecvTimeoutError::Timeout) {
        let failures = prune(prefix, keep).unwrap_or_else(|failure| vec![failure]);
        for text in failures.iter().filter_map(Failure::text) {
            if told.insert(text.clone()) {
                output::say(&format!("cannot remove old checkpoints: {text}"));
            }
        }
    }
}

/// Gives what could not be removed.
fn prune(prefix: &Path, keep: usize) -> Result<Vec<Failure>, Failure> {
    let directory = Directory::open(firn_client::find(prefix)?)?;
    // Fewer directories than that: nothing can be too old, and nobody needs to be asked.
    let entries = std::fs::read_dir(prefix).map_or(0, Iterator::count);
    if entries <= keep {
        return Ok(Vec::new());
    }
    let mut failures = prune::finish_removals(&directory)?;
    let judged = prune::judge_directory(&directory, keep)?;
    failures.extend(judged.failures);
    for checkpoint in &judged.checkpoints {
        if checkpoint.verdict == Verdict::Remove {
            failures.extend(prune::remove(&directory, checkpoint).err());
        }
    }
    Ok(failures)
}

/// Memory first: what the user did not choose is chosen for a job whose files live in memory.
fn defaults_of_a_run(resolved: Resolved) -> Options {
    let by_default = |name: &str| {
        resolved
            .origins
            .iter()
            .any(|(row, origin)| row.name == name && matches!(origin, Origin::Default))
    };
    let mut options = resolved.options.clone();
    if by_default("frontend")
        && let Err(why) = fuse()
    {
        output::say(&format!(
            "{why}: without FUSE, the preload library alone serves the files (frontend=preload)"
        ));
        options.frontend = Frontend::Preload;
    }
    if by_default("drain") {
        options.drain = Drain::Demand;
    }
    if by_default("close") && options.drain == Drain::Demand {
        options.close = Close::Held;
    }
    if by_default("fsync") {
        options.fsync = Fsync::Held;
    }
    options
}

/// Whether FUSE can be used here; why not, in words.
fn fuse() -> Result<(), String> {
    if let Some(fault) = crate::doctor::device_fault() {
        return Err(fault);
    }
    let root = rustix::process::geteuid().is_root();
    if root || crate::doctor::find_program("fusermount3").is_some() {
        Ok(())
    } else {
        Err("fusermount3 is not installed".into())
    }
}

/// Ending of the directory that has the names of a run whose files are in memory alone.
pub(super) const NAMES: &str = "names";

/// The two directories of a run.
struct Place {
    prefix: PathBuf,
    backing: PathBuf,
    /// The backing was made for this run's names only: nothing is drained to it.
    memory_only: bool,
    /// The prefix is a stub tree.
    is_tree: bool,
}

impl Place {
    fn new(
        prefix: Option<PathBuf>,
        backing: Option<PathBuf>,
        is_tree: bool,
    ) -> Result<Self, Failure> {
        let prefix = match prefix {
            Some(prefix) => {
                make_private(&prefix)?;
                prefix
            }
            None => default_prefix()?,
        };
        let memory_only = backing.is_none();
        let backing = match backing {
            Some(backing) => backing,
            // The same for the same prefix, so that a restart finds its files.
            None => {
                let runtime = firn_client::paths::create_runtime_dir()?;
                let key = firn_client::Key::of(&absolute(&prefix)?);
                let names = runtime.join(format!("{:016x}.{NAMES}", key.0));
                let made = firn_trust::create_private_dir(rustix::fs::CWD, &names);
                made.map_err(|error| Failure::new(FAILED, error.to_string()))?;
                names
            }
        };
        make_private(&backing)?;
        Ok(Self {
            prefix,
            backing: absolute(&backing)?,
            memory_only,
            is_tree,
        })
    }

    /// Unmounts: drained after success, as it is after a failure; and says how the command ended, which without a
    /// `status` never ran, and where its files are.
    fn take_down(&self, status: Option<&ExitStatus>, quiet: bool) -> Result<(), Failure> {
        let success = status.is_some_and(ExitStatus::success);
        let how = status.map_or_else(
            || "the command did not run".to_owned(),
            |status| describe_end(*status),
        );
        let place = firn_client::find(&self.prefix)?;
        let held_policy = match (success, self.memory_only) {
            (false, _) => HeldPolicy::Keep,
            (true, true) => HeldPolicy::Discard,
            (true, false) => HeldPolicy::Drain,
        };
        let mut connection = Connection::open(&place.mount)?;
        let before = connection.status()?;
        let held = before.held_bytes;
        let arena = PathBuf::from(before.arena);
        let mut meter = Meter::quiet_if(quiet);
        // What the job left behind and still uses files does not keep the mount.
        let show = &mut |p: Progress| meter.show(p.bytes_left, p.files_left, &p.phase);
        let (firnd, ended) = connection.unmount(true, held_policy, show)?;
        let waited = meter.waited();
        drop(meter);
        ended?;
        wait_for_end(&firnd, false);
        let backing = text::path(&self.backing);
        let say = |text: String| {
            if !quiet {
                output::say(&text);
            }
        };
        match (success, self.memory_only) {
            (true, false) if waited.files > 0 => say(format!(
                "{how}; everything is drained to {backing}: {} were left to write, {}",
                waited.amount(),
                waited.seconds()
            )),
            (true, false) => say(format!("{how}; everything is drained to {backing}")),
            (true, true) => {
                std::fs::remove_dir_all(&self.backing).map_err(|error| {
                    Failure::new(FAILED, format!("cannot remove {backing}: {error}"))
                })?;
                say(format!(
                    "{how}; its files were in memory only and are removed (--backing DIR keeps them)"
                ));
            }
            (false, _) if held > 0 => {
                let held = text::bytes(held);
                let arena = text::path(&arena);
                output::say(&format!(
                    "{how}; {held} of its files stay in memory, in {arena}"
                ));
                output::say("run the same `firn run` again to use them, or mount them with:");
                let prefix = text::path(&self.prefix);
                let frontend = if self.is_tree {
                    ",frontend=preload"
                } else {
                    ""
                };
                output::say(&format!(
                    "  firn mount -o drain=demand{frontend} {backing} {prefix}"
                ));
            }
            (false, true) => {
                if status.is_some() {
                    output::say(&format!("{how}; nothing of its files was in memory"));
                }
                let _ = std::fs::remove_file(&arena);
                // Not empty: there are names without data.
                let _ = std::fs::remove_dir(&self.backing);
            }
            (false, false) if status.is_none() => {}
            (false, false) => output::say(&format!("{how}; everything is drained to {backing}")),
        }
        Ok(())
    }
}

/// How the command ended.
fn describe_end(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(0), _) => "the command succeeded".into(),
        (Some(code), _) => format!("the command failed with exit status {code}"),
        (None, Some(signal)) => format!("the command was killed by signal {signal}"),
        (None, None) => "the command failed".into(),
    }
}

/// In the runtime directory, where nobody else can put a symbolic link in its place.
fn default_prefix() -> Result<PathBuf, Failure> {
    let prefix = firn_client::paths::create_runtime_dir()?.join("run");
    match firn_trust::create_private_dir(rustix::fs::CWD, &prefix) {
        Ok(_) => Ok(prefix),
        Err(error) => Err(Failure::new(
            FAILED,
            format!("cannot use the default of --prefix: {error}"),
        )),
    }
}

fn make_private(dir: &Path) -> Result<(), Failure> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|error| {
            Failure::new(
                USAGE,
                format!("cannot make the directory {}: {error}", text::path(dir)),
            )
        })
}

fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    path.canonicalize()
        .map_err(|error| Failure::new(USAGE, format!("cannot find {}: {error}", text::path(path))))
}

/// The preload library that belongs to this program.
fn library() -> Option<PathBuf> {
    let found = firn_client::library::beside(&std::env::current_exe().ok()?);
    if found.is_none() {
        let name = firn_client::library::NAME;
        output::say(&format!(
            "{name} is not installed: all calls go through the mount, which is slower"
        ));
    }
    found
}

/// Whether libuv, and with it Node, uses io_uring; some versions do unless it is `0`.
const LIBUV_USES_IO_URING: &str = "UV_USE_IO_URING";

/// Runs the command to its end and passes signals on.
fn carry_out(
    command: &[OsString],
    place: &Place,
    preload: Option<&Path>,
) -> Result<ExitStatus, Failure> {
    let (program, args) = command.split_first().expect("clap demands one");
    let mut process = Process::new(program);
    process.args(args).env("FIRN_PREFIX", &place.prefix);
    // The preload library sees no io_uring: Node would write into stubs, and on a mount through the kernel's cache.
    if std::env::var_os(LIBUV_USES_IO_URING).is_none() {
        process.env(LIBUV_USES_IO_URING, "0");
    }
    if let Some(library) = preload {
        process.env(
            "LD_PRELOAD",
            with_library(library, std::env::var_os("LD_PRELOAD")),
        );
        // Ranks on other hosts get the environment only if Open MPI is told to pass it.
        if std::env::var_os("OMPI_MCA_mca_base_env_list").is_none() {
            process.env("OMPI_MCA_mca_base_env_list", "LD_PRELOAD;FIRN_PREFIX");
        }
    }
    // Before the child, so that no signal falls between.
    let passed_on = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCONT];
    let signals = Signals::new(passed_on)
        .map_err(|error| Failure::new(FAILED, format!("cannot watch for signals: {error}")))?;
    let child = process.spawn().map_err(|error| {
        let code = if error.kind() == std::io::ErrorKind::NotFound {
            127
        } else {
            126
        };
        Failure::new(
            code,
            format!(
                "cannot run {}: {error}",
                firn_format::quote::quoted(program.as_encoded_bytes())
            ),
        )
    })?;
    wait(child, signals)
}

fn wait(mut child: Child, mut signals: Signals) -> Result<ExitStatus, Failure> {
    let pid = Pid::from_child(&child);
    let handle = signals.handle();
    let passing = std::thread::spawn(move || {
        for signal in signals.forever() {
            // A Ctrl-C reached the whole group already; a second one does no harm.
            if let Some(signal) = Signal::from_named_raw(signal) {
                let _ = kill_process(pid, signal);
            }
        }
    });
    let status = child.wait();
    handle.close();
    let _ = passing.join();
    status.map_err(|error| Failure::new(FAILED, format!("cannot wait for the command: {error}")))
}

fn with_library(library: &Path, before: Option<OsString>) -> OsString {
    let mut list = library.as_os_str().to_owned();
    if let Some(before) = before.filter(|before| !before.is_empty()) {
        list.push(OsStr::new(":"));
        list.push(before);
    }
    list
}

fn exit_code(status: ExitStatus) -> u8 {
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok())
        .unwrap_or(FAILED)
}
