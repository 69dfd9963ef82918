//! A flame front in a cube of fuel, computed by several processes that checkpoint.
//!
//! This is the unmodified program of the demo: it knows nothing of Firn. Its checkpoints look like
//! those of real jobs (one file a rank; many small writes, a few large ones; a marker renamed into
//! place), and its result is one hash that depends on size and steps alone, so that a run that was
//! killed and restarted can be compared bit for bit with one that was not.

mod checkpoint;
mod control;
mod crc32;
mod field;
mod launcher;
mod options;
mod report;
mod worker;

use std::process::ExitCode;

use options::{Mode, Options};

fn main() -> ExitCode {
    let options = match Options::from_args(std::env::args_os().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => {
            print!("{}", options::USAGE);
            return ExitCode::SUCCESS;
        }
        Err(message) => {
            eprintln!("heat: {message}\n\n{}", options::USAGE);
            return ExitCode::from(2);
        }
    };
    let outcome = match &options.mode {
        Mode::Launch => launcher::run(&options),
        Mode::Worker(place) => worker::run(&options, place),
        Mode::Verify => launcher::verify(&options),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("heat: {message}");
            ExitCode::FAILURE
        }
    }
}
