//! The program `firn`: the command line of Firn, a file system for checkpoints.
//!
//! Terms
//! * The *backing* is the directory in which files end up. A *mount* shows its files at another directory.
//! * *firnd* is the daemon of one mount. It receives writes in memory, and *drains* them: it writes them to the
//!   backing.
//! * *Held* data is in memory, and not in the backing yet. It lies in the *arena*, a file in shared memory.
//! * A *verb* is a subcommand, such as `firn status`. Each verb has a file below `verb/`.
//!
//! Under other names the same binary is firnd, mount.firn and umount.fuse.firn. Data goes to stdout, and messages go to
//! stderr with `firn: ` before them. docs/OPERATIONS.md lists the exit statuses.

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
