//! `firn mount`: mounts a backing (a directory in which the files end up), and returns when the mount is usable.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint, value_parser};
use firn_config::{MinusO, ProcessSources, Resolved, Sources, Unknown, given_flags, parse_minus_o};
use firn_daemon::MountRequest;

use crate::failure::{DONE, Failure};
use crate::output;
use crate::verb::Verb;

pub const VERB: Verb = Verb {
    name: "mount",
    about: "Mount a directory so that programs can write to it at memory speed",
    long: "Returns when the mount is usable. Data that an earlier mount of the same backing still held is \
               drained automatically. Options are taken from flags, FIRN_* variables, \
               ~/.config/firn/firn.toml, /etc/firn/firn.toml and the defaults, in this order; `firn config` \
               shows the result.",
    examples: &[
        (
            "firn mount /scratch/run42 /ckpt",
            "what programs write to /ckpt ends up in /scratch/run42",
        ),
        (
            "firn mount /scratch/run42 /ckpt -o arena-size=4G,close=held",
            "with 4 GiB of memory; close returns at memory speed, too",
        ),
        (
            "firn mount --frontend=preload /scratch/run42 /ckpt",
            "without FUSE, for programs with LD_PRELOAD=libfirn_preload.so",
        ),
        (
            "firn mount --foreground --log-level=debug /scratch/run42 /ckpt",
            "in the foreground, with a verbose log",
        ),
    ],
    exits: &[
        (0, "the mount is usable (with --foreground: it has ended)"),
        (1, "failed"),
        (2, "an invalid option or argument"),
        (
            10,
            "the arena of this backing cannot be used by this version of firn",
        ),
        (
            11,
            "the backing is mounted already, or the mount point is in use",
        ),
    ],
    args,
    run,
};

/// Adds the arguments of `firn mount` to its clap command, and returns the command.
fn args(command: Command) -> Command {
    let directory = |name: &'static str, id: &'static str, help: &'static str| {
        Arg::new(id)
            .value_name(name)
            .help(help)
            .required(true)
            .value_hint(ValueHint::DirPath)
            .value_parser(value_parser!(PathBuf))
    };
    command
        .arg(directory(
            "BACKING",
            "backing",
            "Directory on any file system, where the files end up",
        ))
        .arg(directory(
            "DIR",
            "mount-point",
            "Existing directory where programs see the files",
        ))
        .arg(options_list_arg())
        .arg(
            Arg::new("foreground")
                .long("foreground")
                .action(ArgAction::SetTrue)
                .help("Stay in the foreground and log to stderr, until unmounted or interrupted"),
        )
        .args(firn_config::args())
}

/// Returns the argument `-o`, which may be given any number of times.
pub fn options_list_arg() -> Arg {
    Arg::new("minus-o")
        .short('o')
        .value_name("OPTION[=VALUE],…")
        .action(ArgAction::Append)
        .value_parser(value_parser!(OsString))
        .help("Options as in fstab: those below without `--`, and ro, nodev, nosuid, noexec, noatime, …")
}

/// Returns the options in force: from flags, `-o`, the environment, the configuration files and the defaults.
pub fn resolve_options(matches: &ArgMatches) -> Result<Resolved, Failure> {
    let mut listed_options = MinusO::default();
    let lists = matches.get_many::<OsString>("minus-o").unwrap_or_default();
    for list in lists {
        listed_options.extend(parse_minus_o(list, Unknown::Refuse)?);
    }
    let sources = Sources {
        flags: given_flags(matches),
        minus_o: listed_options,
        surroundings: ProcessSources::of_process(),
    };
    Ok(sources.resolve()?)
}

/// Mounts as the flags say. Returns when the mount is usable, or with `--foreground` when it has ended.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let required_path = |id: &str| {
        matches
            .get_one::<PathBuf>(id)
            .cloned()
            .expect("clap demands it")
    };
    let request = MountRequest {
        backing: required_path("backing"),
        mount_point: required_path("mount-point"),
        options: resolve_options(matches)?.options,
        foreground: matches.get_flag("foreground"),
        ends_with_parent: false,
        changes: Vec::new(),
    };
    firn_daemon::mount_with_notices(request, &mut |text| output::print_message(&text))?;
    Ok(DONE)
}
