//! `firn completions`.

use clap::{ArgMatches, Args, FromArgMatches};
use clap_complete::Shell;

use crate::failure::{DONE, Failure};
use crate::output;
use crate::verb::{self, Verb};

pub const VERB: Verb = Verb {
    name: "completions",
    about: "Print a completion script for a shell",
    long: "",
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
    /// For which shell.
    #[arg(value_enum)]
    shell: Shell,
}

fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = CompletionsArgs::from_arg_matches(matches)?;
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut verb::command(), "firn", &mut script);
    output::print(&String::from_utf8_lossy(&script))?;
    Ok(DONE)
}
