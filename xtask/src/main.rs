//! Development tasks: `cargo xtask TASK`.

mod campaign;
mod links;
mod messages;
mod pages;
mod product;
mod security;
mod semantics;
mod tables;
mod test_files;
mod test_programs;
mod words;

use std::process::ExitCode;

use clap::Parser;

/// Development tasks
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Task {
    /// Runs a test for longer than CI does; seeds are printed
    #[command(subcommand)]
    Campaign(campaign::Campaign),
    /// Writes the pages that are generated from the table of options
    Pages,
    /// Lists the promises of docs/SEMANTICS.md with the tests that prove them
    Semantics,
    /// Checks that comments of the code name their subject
    Words(words::Words),
    /// Prints what each test file shows
    Tests {
        /// Only files whose path or head has this word
        #[arg(default_value = "")]
        word: String,
    },
}

/// Runs the task of the command line, and prints its error.
fn main() -> ExitCode {
    let result = match Task::parse() {
        Task::Campaign(campaign) => campaign.run(),
        Task::Pages => pages::run(),
        Task::Semantics => semantics::run(),
        Task::Words(words) => words.run(),
        Task::Tests { word } => test_files::run(&word),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
