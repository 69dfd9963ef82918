//! `mount.firn BACKING DIR [-sfnv] [-o OPTIONS]`: the helper that mount(8) calls for a line of fstab.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use clap::{Arg, ArgAction, Command};
use firn_config::{MinusO, ProcessSources, Sources, Unknown, parse_minus_o};
use firn_daemon::MountRequest;
use firn_format::quote::quoted;

use super::mount::options_list_arg;
use crate::cli::report_result;
use crate::failure::{DONE, Failure, INTERRUPTED, USAGE};
use crate::{output, text};

/// Command line for usage errors and for the man page.
pub const SYNOPSIS: &str = "mount.firn BACKING DIR [-sfnv] [-o OPTION[=VALUE],…]";

/// Examples for the man page.
pub const EXAMPLES: &[(&str, &str)] = &[
    (
        "/scratch/run42 /ckpt firn arena-size=4G,close=held,nofail 0 0",
        "a line of /etc/fstab",
    ),
    (
        "mount -t firn -o arena-size=4G /scratch/run42 /ckpt",
        "from the command line, as root",
    ),
];

/// Exit statuses for the man page.
pub const EXITS: &[(u8, &str)] = &[
    (0, "the mount is usable"),
    (1, "an invalid option or argument"),
    (8, "interrupted"),
    (32, "the mount failed; the message says why"),
];

/// Returns the command line's definition for the man page.
pub fn man_page_command() -> Command {
    let flag = |name: &'static str, help: &'static str| {
        Arg::new(name)
            .short(name.chars().next())
            .action(ArgAction::SetTrue)
            .help(help)
    };
    Command::new("mount.firn")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Helper of mount(8) for Firn")
        .long_about("mount(8) calls this program for file systems of type firn. It returns when the mount is usable.")
        .disable_help_flag(true)
        .disable_version_flag(true)
        .arg(Arg::new("BACKING").required(true).help("Directory where the files end up"))
        .arg(Arg::new("DIR").required(true).help("Directory where programs see the files"))
        .arg(flag("sloppy", "Skip unknown options instead of refusing them"))
        .arg(flag("fake", "Check the options, but do not mount"))
        .arg(flag("n", "Accepted for compatibility; no effect"))
        .arg(flag("verbose", "Print what is done"))
        .arg(options_list_arg().help("Options: those of firn-mount(1) without `--`, those that mount(8) accepts for every file system, and _netdev, nofail, noauto, user, x-*"))
}

/// The call of mount(8).
#[derive(Debug, Default)]
struct MountCall {
    /// The arguments that are no flags: the backing and the mount point.
    operands: Vec<PathBuf>,
    /// Lists of options after `-o`.
    option_lists: Vec<OsString>,
    /// Whether unknown options are skipped (`-s`).
    is_sloppy: bool,
    /// Whether nothing is mounted (`-f`).
    is_fake: bool,
    /// Whether messages are printed (`-v`).
    is_verbose: bool,
}

/// Mounts a backing. Returns an exit status of mount(8).
pub fn main(args: &[OsString]) -> u8 {
    mount_8_status(report_result(parse_call(args).and_then(mount)))
}

/// Returns mount(8)'s exit status for one of Firn.
fn mount_8_status(firn_status: u8) -> u8 {
    match firn_status {
        DONE => 0,
        // mount(8): incorrect invocation.
        USAGE => 1,
        // mount(8): user interrupt.
        INTERRUPTED => 8,
        // mount(8): mount failure.
        _ => 32,
    }
}

/// Parses the arguments of mount(8). Flags and names may be in any order.
fn parse_call(args: &[OsString]) -> Result<MountCall, Failure> {
    let mut call = MountCall::default();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match arg.as_bytes() {
            [b'-', flags @ ..] if !flags.is_empty() => call.parse_flags(flags, &mut args)?,
            _ => call.operands.push(arg.into()),
        }
    }
    Ok(call)
}

impl MountCall {
    /// Parses the flags of one argument. A value is attached to its flag, or is the next one of `later_args`. Fails if
    /// a flag is unknown or lacks its value.
    fn parse_flags<'a>(
        &mut self,
        flags: &[u8],
        later_args: &mut impl Iterator<Item = &'a OsString>,
    ) -> Result<(), Failure> {
        for (index, flag) in flags.iter().enumerate() {
            match flag {
                b's' => self.is_sloppy = true,
                b'f' => self.is_fake = true,
                b'v' => self.is_verbose = true,
                // Modern systems have no /etc/mtab that a helper would write, so `-n` needs no action.
                b'n' => {}
                b'r' => self.option_lists.push("ro".into()),
                b'w' => self.option_lists.push("rw".into()),
                b'o' | b't' | b'N' => {
                    let attached_value = &flags[index + 1..];
                    let value = flag_value(*flag, attached_value, later_args)?;
                    // `-t` and `-N` are skipped: the type is known, and mount(8) has entered the namespace already.
                    if *flag == b'o' {
                        self.option_lists.push(value);
                    }
                    return Ok(());
                }
                _ => {
                    return Err(usage_failure(&format!(
                        "unknown flag -{}",
                        quoted(&flags[index..])
                    )));
                }
            }
        }
        Ok(())
    }

    /// Parses all lists after `-o`. Fails if an option is unknown, unless the call is sloppy (`-s`).
    fn parse_option_lists(&self) -> Result<MinusO, Failure> {
        let unknown_options = if self.is_sloppy {
            Unknown::Tolerate
        } else {
            Unknown::Refuse
        };
        let mut options = MinusO::default();
        for list in &self.option_lists {
            options.extend(parse_minus_o(list, unknown_options)?);
        }
        Ok(options)
    }
}

/// Returns the value of a flag: the text that is attached to the flag, or else the next argument. Fails if there is
/// neither.
fn flag_value<'a>(
    flag: u8,
    attached_value: &[u8],
    later_args: &mut impl Iterator<Item = &'a OsString>,
) -> Result<OsString, Failure> {
    if !attached_value.is_empty() {
        return Ok(OsStr::from_bytes(attached_value).to_owned());
    }
    match later_args.next() {
        Some(value) => Ok(value.clone()),
        None => Err(usage_failure(&format!(
            "-{} needs a value",
            quoted(&[flag])
        ))),
    }
}

/// Mounts as mount(8) asks. With `-f` the options are only checked. With `-s` unknown options are skipped. Options come
/// from the command line, the environment and the configuration files.
fn mount(call: MountCall) -> Result<u8, Failure> {
    let listed_options = call.parse_option_lists()?;
    let [backing, mount_point] = &call.operands[..] else {
        return Err(usage_failure(&format!(
            "expected BACKING and DIR, found {} names",
            call.operands.len()
        )));
    };
    let skipped_options = listed_options.tolerated.join(",");
    let sources = Sources {
        minus_o: listed_options,
        surroundings: ProcessSources::of_process(),
        ..Sources::default()
    };
    let options = sources.resolve()?.options;
    if call.is_verbose && !skipped_options.is_empty() {
        output::print_message(&format!("skipped unknown options: {skipped_options}"));
    }
    if call.is_fake {
        return Ok(DONE);
    }
    let request = MountRequest {
        backing: backing.clone(),
        mount_point: mount_point.clone(),
        options,
        foreground: false,
        ends_with_parent: false,
        changes: Vec::new(),
    };
    firn_daemon::mount_with_notices(request, &mut |text| output::print_message(&text))?;
    if call.is_verbose {
        output::print_message(&format!(
            "{} mounted on {}",
            text::path(backing),
            text::path(mount_point)
        ));
    }
    Ok(DONE)
}

/// Returns the failure for an invalid call.
fn usage_failure(problem: &str) -> Failure {
    Failure::new(USAGE, format!("{problem}; usage: {SYNOPSIS}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(words: &[&str]) -> Result<MountCall, Failure> {
        parse_call(&words.iter().map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn the_words_of_mount_8_are_understood_in_any_order() {
        let parsed = call(&[
            "/b",
            "/m",
            "-sfnv",
            "-o",
            "rw,close=held",
            "-t",
            "firn",
            "-oro",
        ])
        .unwrap();
        assert_eq!(parsed.operands, [PathBuf::from("/b"), PathBuf::from("/m")]);
        assert!(parsed.is_sloppy && parsed.is_fake && parsed.is_verbose);
        assert_eq!(parsed.option_lists, ["rw,close=held", "ro"]);
    }

    #[test]
    fn unknown_words_are_refused_unless_sloppy() {
        assert!(call(&["/b", "/m", "-x"]).is_err());
        assert!(call(&["/b", "/m", "-o"]).is_err());
        assert!(
            call(&["/b", "/m", "-o", "qwertyuiop"])
                .unwrap()
                .parse_option_lists()
                .is_err()
        );
        assert!(
            call(&["/b", "/m", "-s", "-o", "qwertyuiop"])
                .unwrap()
                .parse_option_lists()
                .is_ok()
        );
    }

    #[test]
    fn exit_statuses_are_those_of_mount_8() {
        assert_eq!(
            [0, 1, 2, 3, 10, 11, 130].map(mount_8_status),
            [0, 32, 1, 32, 32, 32, 8]
        );
    }

    #[test]
    fn a_fake_mount_touches_nothing() {
        assert_eq!(
            mount(call(&["/no/such", "/neither", "-f"]).unwrap()).unwrap(),
            DONE
        );
    }
}
