//! The entry point of all programs in this binary: chooses the program by the name of the call (`argv[0]`). For `firn`
//! it runs the verb (the subcommand), and turns the result into an exit status.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::failure::{DONE, Failure, USAGE};
use crate::output::{self, Paint};
use crate::overview::overview;
use crate::verb::{self, Verb, verbs};

/// The beginning of the hint at the end of clap's error messages.
const MORE_HELP: &str = "For more information, try";

/// The role of the binary, which depends on the name that it is called by.
#[derive(Debug, PartialEq, Eq)]
enum Role {
    /// The command line of a user.
    Firn,
    /// The daemon that serves a mount.
    Firnd,
    /// The process that holds the descriptors of a mount, and starts the next firnd.
    Keeper,
    /// The helper of mount(8).
    MountFirn,
    /// The helper of umount(8).
    UmountFirn,
    /// The part of `firn run` on one host.
    RunHost,
}

/// Runs the role that `args` ask for. The first of `args` is the name by which the binary was called.
pub fn main(args: Vec<OsString>) -> ExitCode {
    match role_from_arguments(&args) {
        Role::Firnd => firn_daemon::firnd_main(),
        Role::Keeper => firn_daemon::keeper_main(),
        Role::MountFirn => {
            warn_of_misspelt_variables();
            verb::mount_firn::main(args.get(1..).unwrap_or_default()).into()
        }
        Role::UmountFirn => verb::umount_firn::main(args.get(1..).unwrap_or_default()).into(),
        Role::RunHost => report_result(verb::run_host(args.get(2..).unwrap_or_default())).into(),
        Role::Firn => report_result(run_command_line(args)).into(),
    }
}

/// Returns the role for these arguments. The name by which the binary was called decides, or else a hidden verb.
fn role_from_arguments(args: &[OsString]) -> Role {
    let program_name = args
        .first()
        .and_then(|path| Path::new(path).file_name())
        .and_then(|name| name.to_str());
    match program_name {
        Some("firnd") => Role::Firnd,
        Some(firn_daemon::KEEPER_NAME) => Role::Keeper,
        Some("mount.firn") => Role::MountFirn,
        // umount(8) derives the helper's name from the mount's type in the kernel.
        Some("umount.fuse.firn" | "umount.firn") => Role::UmountFirn,
        // Some callers cannot choose argv[0] (debuggers, wrappers). For them a hidden verb gives the same role.
        _ if args.get(1).is_some_and(|verb| verb == "firnd") => Role::Firnd,
        _ if args.get(1).is_some_and(|verb| verb == verb::RUN_HOST) => Role::RunHost,
        _ => Role::Firn,
    }
}

/// Runs the verb (subcommand) that `args` name, and returns the exit status. Without a verb it prints the overview.
fn run_command_line(args: Vec<OsString>) -> Result<u8, Failure> {
    if args.len() <= 1 {
        return output::print(&overview(Paint::stdout())).map(|()| DONE);
    }
    let typed_verb = args[1].clone();
    let matches = match verb::command().try_get_matches_from(args) {
        Ok(matches) => matches,
        Err(error) => {
            let verb = verbs().find(|verb| typed_verb == verb.name);
            return handle_parse_error(error, verb);
        }
    };
    let (verb_name, verb_matches) = matches.subcommand().expect("clap demands a verb");
    let verb = verbs()
        .find(|verb| verb.name == verb_name)
        .expect("clap knows the verbs of the table alone");
    warn_of_misspelt_variables();
    (verb.run)(verb_matches)
}

/// Warns of environment variables that look like misspelt variables of Firn. A misspelt variable has no effect, which
/// is hard to notice otherwise.
fn warn_of_misspelt_variables() {
    for text in firn_config::misspelt_variables() {
        output::print_message(&text);
    }
}

/// Handles arguments that clap did not parse into a verb and its options.
///
/// clap reports help and the version as errors too: they are printed, and the status is [`DONE`]. For any other error,
/// returns the failure of `verb`, or of `firn` if the user named no verb.
fn handle_parse_error(mut error: clap::Error, verb: Option<&Verb>) -> Result<u8, Failure> {
    match error.kind() {
        ErrorKind::InvalidSubcommand => Err(Failure::new(USAGE, unknown_verb_message(&error))),
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            output::print(&render_clap_error(&error, Paint::stdout())).map(|()| DONE)
        }
        _ => {
            // `firn mount --frontned` is a misspelling. clap would suggest to treat the word as a value that begins
            // with a dash.
            error.remove(ContextKind::Suggested);
            let clap_text = render_clap_error(&error, Paint::stderr());
            Err(Failure::new(USAGE, usage_message(&clap_text, verb)))
        }
    }
}

/// Returns clap's text for an error, coloured as `paint` says.
fn render_clap_error(error: &clap::Error, paint: Paint) -> String {
    let styled_text = error.render();
    if paint.is_coloured() {
        styled_text.ansi().to_string()
    } else {
        styled_text.to_string()
    }
}

/// Returns the message for a usage error: clap's text, with a hint to Firn's help in place of clap's own hint.
fn usage_message(clap_text: &str, verb: Option<&Verb>) -> String {
    let explanation = without_error_word(clap_text);
    let explanation = match explanation.find(MORE_HELP) {
        Some(hint_offset) => &explanation[..hint_offset],
        None => explanation,
    };
    let help_hint = match verb {
        Some(verb) => format!("`firn {} --help` explains the verb.", verb.name),
        None => "`firn --help` lists the verbs.".into(),
    };
    format!("{}\n\n{help_hint}", explanation.trim_end())
}

/// Returns the message for an unknown verb. It suggests the verb of Firn that does what a verb of another program does,
/// or else the most similar verb.
fn unknown_verb_message(error: &clap::Error) -> String {
    let typed_verb = match error.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(typed_verb)) => typed_verb.as_str(),
        _ => "",
    };
    let suggestion = if let Some(firn_verb) = translate_foreign_verb(typed_verb) {
        format!("did you mean {firn_verb}? ")
    } else if let Some(similar_verb) = most_similar_verb(error) {
        format!("did you mean `{similar_verb}`? ")
    } else {
        String::new()
    };
    format!("no verb is called `{typed_verb}`: {suggestion}`firn --help` lists the verbs")
}

/// Returns the verb that clap finds most similar to an unknown verb, or `None` if it finds none.
fn most_similar_verb(error: &clap::Error) -> Option<&str> {
    let Some(ContextValue::Strings(similar_verbs)) = error.get(ContextKind::SuggestedSubcommand)
    else {
        return None;
    };
    // clap lists similar verbs in ascending order of similarity.
    similar_verbs.last().map(String::as_str)
}

/// Verbs of other programs, and the words for the same thing in Firn.
const FOREIGN_VERBS: &[(&[&str], &str)] = &[
    (
        &[
            "stop",
            "unmount",
            "detach",
            "eject",
            "end",
            "fusermount",
            "fusermount3",
        ],
        "`umount`",
    ),
    (&["start", "attach", "open"], "`mount`"),
    (
        &["list", "dir", "files"],
        "`ls` (files) or `status` (mounts)",
    ),
    (
        &["mounts", "info", "show", "df", "ps", "stat", "state"],
        "`status`",
    ),
    (
        &["stats", "watch", "monitor", "iostat"],
        "`top` (a screen) or `status --watch`",
    ),
    (
        &["nodes", "members", "cluster", "job"],
        "`hosts` (who) or `status --job` (sums)",
    ),
    (&["fsck", "verify", "scrub"], "`check`"),
    (&["repair", "fix", "rescue", "salvage"], "`recover`"),
    (&["sync", "fsync", "barrier"], "`wait --until durable`"),
    (
        &["flush", "writeback", "upload", "stage-out", "stageout"],
        "`drain`",
    ),
    (
        &["rm", "remove", "delete", "clean", "cleanup", "gc", "purge"],
        "`prune`, which removes old checkpoints (single files go with rm(1))",
    ),
    (
        &["cp", "copy", "get", "fetch", "download"],
        "`pull`, which copies from another host's memory (else use cp(1))",
    ),
    (&["free", "drop", "forget"], "`evict`"),
    (&["lock", "keep"], "`pin`"),
    (&["exec", "launch"], "`run`"),
    (&["options", "settings", "conf", "set"], "`config`"),
    (
        &["rollback", "undo", "revert", "cancel"],
        "`abort` (what is open) or `restore` (what was committed)",
    ),
    (
        &["save", "checkpoint", "snapshot", "transaction"],
        "`begin`, then `commit`",
    ),
    (&["benchmark", "perf"], "`bench`"),
    (&["completion", "complete"], "`completions`"),
];

/// Returns the words of Firn for a verb of another program, or `None` if none is known.
fn translate_foreign_verb(typed_verb: &str) -> Option<&'static str> {
    let typed_verb = typed_verb.to_lowercase();
    FOREIGN_VERBS
        .iter()
        .find(|(foreign_verbs, _)| foreign_verbs.contains(&&*typed_verb))
        .map(|(_, firn_words)| *firn_words)
}

/// Returns clap's text without the word `error: ` at its start, coloured or not. Errors of Firn begin with `firn: `.
fn without_error_word(text: &str) -> &str {
    match text.split_once("error:") {
        Some((colour, message)) if colour.is_empty() || colour.starts_with('\x1b') => message
            .strip_prefix("\x1b[0m")
            .unwrap_or(message)
            .trim_start(),
        _ => text,
    }
}

/// Prints the message of a failure on stderr. Returns the exit status for the result of a verb.
pub fn report_result(result: Result<u8, Failure>) -> u8 {
    match result {
        Ok(code) => code,
        Err(Failure::OutputClosed) => DONE,
        Err(Failure::Message { text, code }) => {
            // A usage message has several lines. It quotes only what the caller typed, so it is printed unescaped.
            if code == USAGE {
                output::print_raw_message(&text)
            } else {
                output::print_message(&text)
            }
            code
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    #[test]
    fn the_name_it_is_called_by_decides_what_it_is() {
        assert_eq!(
            role_from_arguments(&args(&["/usr/sbin/mount.firn", "a", "b"])),
            Role::MountFirn
        );
        assert_eq!(
            role_from_arguments(&args(&["/sbin/umount.fuse.firn", "/m", "-f"])),
            Role::UmountFirn
        );
        assert_eq!(role_from_arguments(&args(&["firnd"])), Role::Firnd);
        assert_eq!(
            role_from_arguments(&args(&["/usr/bin/firn", "firnd"])),
            Role::Firnd
        );
        assert_eq!(
            role_from_arguments(&args(&["/usr/bin/firn", "status"])),
            Role::Firn
        );
        assert_eq!(role_from_arguments(&[]), Role::Firn);
    }

    #[test]
    fn the_definition_of_the_command_line_is_sound() {
        verb::command().debug_assert();
    }

    #[test]
    fn usage_errors_begin_as_all_errors_do() {
        for words in [
            &["firn", "mount"][..],
            &["firn", "frobnicate"],
            &["firn", "wait", "--until", "eternal", "/"],
        ] {
            let Err(Failure::Message { text, code }) = run_command_line(args(words)) else {
                panic!("{words:?} was taken")
            };
            assert_eq!(code, USAGE);
            assert!(
                !text.starts_with("error") && !text.ends_with('\n'),
                "{text}"
            );
        }
        let Err(Failure::Message { text, .. }) = run_command_line(args(&["firn", "statsu"])) else {
            panic!("statsu is no verb");
        };
        assert_eq!(
            text,
            "no verb is called `statsu`: did you mean `status`? `firn --help` lists the verbs"
        );
        let Err(Failure::Message { text, .. }) =
            run_command_line(args(&["firn", "mount", "--frontned"]))
        else {
            panic!("--frontned is no option");
        };
        assert!(text.contains("--frontend"), "{text}");
        assert!(
            text.ends_with("`firn mount --help` explains the verb."),
            "{text}"
        );
        assert_eq!(without_error_word("\x1b[1m\x1b[31merror:\x1b[0m no"), "no");
    }

    #[test]
    fn a_word_of_another_program_leads_to_the_verb_and_is_none_itself() {
        for (words, ours) in FOREIGN_VERBS {
            for word in *words {
                let Err(Failure::Message { text, code }) = run_command_line(args(&["firn", word]))
                else {
                    panic!("{word} was taken");
                };
                assert_eq!(code, USAGE);
                assert!(text.contains(&format!("did you mean {ours}? ")), "{text}");
            }
            // Text in backquotes is a command line of Firn.
            for line in ours.split('`').skip(1).step_by(2) {
                let name = line.split(' ').next().unwrap();
                assert!(verbs().any(|verb| verb.name == name), "{line}");
            }
        }
    }

    #[test]
    fn help_is_one_text_however_it_is_asked_for() {
        let alone = overview(Paint::stdout());
        for word in ["--help", "-h", "help"] {
            let error = verb::command()
                .try_get_matches_from(["firn", word])
                .unwrap_err();
            assert_eq!(error.kind(), ErrorKind::DisplayHelp);
            assert_eq!(error.render().to_string(), alone, "firn {word}");
        }
    }
}
