//! `firn`, and by another name firnd and mount.firn: one binary, a verb per file.
//!
//! Data goes to stdout, messages to stderr with `firn: ` before them. Exit status: docs/OPERATIONS.md.

mod cli;
mod doctor;
mod failure;
mod output;
mod overview;
mod progress;
mod prune;
mod text;
mod verb;

fn main() -> std::process::ExitCode {
    cli::main(std::env::args_os().collect())
}
