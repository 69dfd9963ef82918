//! The program `firn`. Under other names the same binary is firnd, mount.firn and umount.fuse.firn; each verb has a
//! file.
//!
//! Data goes to stdout, and messages go to stderr with `firn: ` before them. docs/OPERATIONS.md lists the exit
//! statuses.

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
