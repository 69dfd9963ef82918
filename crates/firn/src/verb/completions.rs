//! `firn completions`: prints a completion script for a shell.
//!
//! clap generates the scripts for verbs, flags and the fixed values of flags. During completion the scripts ask `firn`
//! for everything else: the options after `-o`, and the mount points. clap's own engine for such values is not stable
//! yet (clap_complete 4.6, `unstable-dynamic`).

use std::fmt::Write;

use clap::{ArgMatches, Args, FromArgMatches, ValueEnum};
use clap_complete::Shell;

use crate::failure::{DONE, Failure};
use crate::output;
use crate::text;
use crate::verb::{self, Verb, verbs};

pub const VERB: Verb = Verb {
    name: "completions",
    about: "Print a completion script for a shell",
    long: "The script completes verbs, flags and their values, the options after `-o`, and mount points.",
    examples: &[
        (
            "firn completions bash > /etc/bash_completion.d/firn",
            "for all bash users",
        ),
        (
            "firn completions fish > ~/.config/fish/completions/firn.fish",
            "for your own fish shell",
        ),
    ],
    exits: &[(0, "printed"), (2, "no such shell")],
    args: CompletionsArgs::augment_args,
    run,
};

#[derive(Debug, Args)]
struct CompletionsArgs {
    /// Shell that will run the script.
    #[arg(value_enum, required_unless_present = "candidates")]
    shell: Option<Shell>,
    /// For the scripts: print the candidates for a word, one on each line.
    #[arg(long, value_enum, hide = true, conflicts_with = "shell")]
    candidates: Option<Candidates>,
    /// The typed part of the word.
    #[arg(
        long,
        hide = true,
        requires = "candidates",
        default_value = "",
        allow_hyphen_values = true
    )]
    word: String,
}

/// The words for which a completion script asks.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Candidates {
    /// Lists after `-o`.
    Options,
    /// Mount points.
    Mounts,
}

/// Verbs whose path argument usually is a mount point.
const VERBS_WITH_MOUNT_POINT: [&str; 12] = [
    "umount", "status", "top", "hosts", "wait", "drain", "ls", "evict", "begin", "prepare",
    "commit", "abort",
];

/// Returns the verbs that take a list of options after `-o`. A verb whose `-o` also has a long name means something
/// else.
fn verbs_with_option_list() -> Vec<&'static str> {
    let takes_option_list = |verb: &&Verb| {
        verb.command()
            .get_arguments()
            .any(|arg| arg.get_short() == Some('o') && arg.get_long().is_none())
    };
    verbs()
        .filter(takes_option_list)
        .map(|verb| verb.name)
        .collect()
}

/// Prints the completion script of a shell. With the hidden `--candidates`, prints the candidates for a word instead.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = CompletionsArgs::from_arg_matches(matches)?;
    if let Some(candidates) = args.candidates {
        output::print(&list_candidates(candidates, &args.word))?;
        return Ok(DONE);
    }
    let shell = args.shell.expect("clap demands it");
    output::print(&completion_script(shell))?;
    Ok(DONE)
}

/// Returns the candidates for a word, one per line.
fn list_candidates(candidates: Candidates, word: &str) -> String {
    let candidates = match candidates {
        Candidates::Options => firn_config::complete_minus_o(word),
        // If the mounts cannot be listed, there are no candidates.
        Candidates::Mounts => firn_client::mounts()
            .unwrap_or_default()
            .iter()
            .filter(|mount| !mount.is_of_another_user())
            .map(|mount| text::path(&mount.mount_point))
            .filter(|path| path.starts_with(word))
            .collect(),
    };
    candidates
        .iter()
        .map(|candidate| format!("{candidate}\n"))
        .collect()
}

/// Returns clap's script for a shell, with functions that ask `firn` for options and mount points.
fn completion_script(shell: Shell) -> String {
    let mut script_bytes = Vec::new();
    clap_complete::generate(shell, &mut verb::command(), "firn", &mut script_bytes);
    let clap_script = String::from_utf8_lossy(&script_bytes).into_owned();
    match shell {
        Shell::Bash => clap_script + &bash_function(),
        Shell::Zsh => change_zsh_actions(&clap_script),
        Shell::Fish => clap_script + &fish_lines(),
        _ => clap_script,
    }
}

/// Returns a bash function that completes mount options and mount points, and calls clap's function for all else.
///
/// bash splits words at `=` and `:`. So the function takes the typed word from the command line itself, and removes
/// from each candidate the part (`cut`) that bash has split off.
fn bash_function() -> String {
    let verbs_with_option_list = verbs_with_option_list().join("|");
    let verbs_with_mount_point = VERBS_WITH_MOUNT_POINT.join("|");
    format!(
        r#"
_firn_words() {{
    local line=${{COMP_LINE:0:COMP_POINT}}
    local word=${{line##*[[:space:]]}}
    local before=${{line%"$word"}}
    local cut=${{word%"${{word##*[=:]}}"}}
    local verb=${{COMP_WORDS[1]}}
    case $verb in
        {verbs_with_option_list})
            if [[ $before =~ [[:space:]]-o[[:space:]]+$ ]]; then
                mapfile -t COMPREPLY < <("$1" completions --candidates options --word "$word" 2>/dev/null)
                COMPREPLY=( "${{COMPREPLY[@]#"$cut"}}" )
                [[ ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace 2>/dev/null
                return 0
            fi
            ;;
        {verbs_with_mount_point})
            if [[ $COMP_CWORD -ge 2 && $word != -* && ${{COMP_WORDS[COMP_CWORD-1]}} != -* ]]; then
                mapfile -t COMPREPLY < <(
                    "$1" completions --candidates mounts --word "$word" 2>/dev/null
                    compgen -f -- "$word"
                )
                compopt -o filenames 2>/dev/null
                return 0
            fi
            ;;
    esac
    _firn "$@"
}}

complete -F _firn_words -o bashdefault -o default firn
"#
    )
}

/// Returns clap's script with other actions for the list after `-o` and for paths of mounts.
fn change_zsh_actions(clap_script: &str) -> String {
    let functions = r#"
_firn_options() {
    local -a lists
    lists=(${(f)"$(firn completions --candidates options --word "$PREFIX" 2>/dev/null)"})
    compadd -S '' -- $lists
}

_firn_mounts() {
    local -a mounts
    mounts=(${(f)"$(firn completions --candidates mounts 2>/dev/null)"})
    compadd -- $mounts
    _files
}

"#;
    let mut script = String::new();
    let mut current_verb = "";
    for line in clap_script.lines() {
        let trimmed_line = line.trim();
        // The part of a verb begins with the verb in parentheses.
        if let Some(verb) = trimmed_line
            .strip_prefix('(')
            .and_then(|line| line.strip_suffix(')'))
        {
            current_verb = verb;
        }
        let takes_mount_point = VERBS_WITH_MOUNT_POINT.contains(&current_verb);
        let changed_line = if trimmed_line.starts_with("'*-o+[") {
            line.replace(":_default'", ":_firn_options'")
        } else if takes_mount_point && trimmed_line.starts_with("':") {
            line.replace(":_files -/'", ":_firn_mounts'")
                .replace(":_files'", ":_firn_mounts'")
        } else {
            line.to_owned()
        };
        let _ = writeln!(script, "{changed_line}");
    }
    match script.split_once('\n') {
        // zsh requires `#compdef firn` on the first line.
        Some((first_line, other_lines)) => format!("{first_line}\n{functions}{other_lines}"),
        None => script,
    }
}

/// Returns the lines that ask `firn` for options and mount points, to be added to clap's script.
fn fish_lines() -> String {
    let mut script = String::new();
    for verb in verbs_with_option_list() {
        let _ = writeln!(
            script,
            "complete -c firn -n \"__fish_firn_using_subcommand {verb}\" -s o -x -a \"(firn completions --candidates options --word (commandline -ct | string collect) 2>/dev/null)\""
        );
    }
    for verb in VERBS_WITH_MOUNT_POINT {
        let _ = writeln!(
            script,
            "complete -c firn -n \"__fish_firn_using_subcommand {verb}\" -a \"(firn completions --candidates mounts 2>/dev/null)\" -d \"mount point\""
        );
    }
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verbs_whose_words_are_asked_for_are_verbs() {
        assert!(verbs_with_option_list().contains(&"mount"));
        for name in VERBS_WITH_MOUNT_POINT {
            assert!(verbs().any(|verb| verb.name == name), "{name}");
        }
    }

    #[test]
    fn zsh_asks_for_options_and_mount_points() {
        let script = completion_script(Shell::Zsh);
        assert!(script.starts_with("#compdef firn\n"));
        let uses = |action: &str| script.matches(action).count();
        assert_eq!(uses(":_firn_options'"), verbs_with_option_list().len());
        assert_eq!(uses(":_firn_mounts'"), VERBS_WITH_MOUNT_POINT.len());
    }

    #[test]
    fn fish_asks_for_options_and_mount_points() {
        let script = completion_script(Shell::Fish);
        let uses = |what: &str| script.matches(what).count();
        assert_eq!(uses("--candidates options"), verbs_with_option_list().len());
        assert_eq!(uses("--candidates mounts"), VERBS_WITH_MOUNT_POINT.len());
    }
}
