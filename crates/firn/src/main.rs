//! `firn`, and by another name firnd and mount.firn: one binary, a verb per file.
//!
//! Data goes to stdout, messages to stderr with `firn: ` before them. Exit status: docs/OPERATIONS.md.

mod ask;
mod cli;
mod doctor;
mod exporter;
mod failure;
mod job;
mod metrics;
mod output;
mod output_file;
mod overview;
mod progress;
mod prune;
mod report;
#[cfg(test)]
mod snapshot;
mod text;
mod top;
mod verb;

fn main() -> std::process::ExitCode {
    cli::main(std::env::args_os().collect())
}
