//! The main function of a program of benchmarks: parses the arguments, starts the supervisor, and reports errors.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::supervisor;

/// The parsed command line of a program of benchmarks.
pub trait Program: clap::Parser {
    /// Returns whether this process is a worker or a server of a benchmark, which another process started.
    fn is_part(&self) -> bool;

    /// Returns the firn program to measure if neither an argument nor the environment names one. `None` means the
    /// program beside this one. The function is called before the benchmark starts.
    fn find_firn(&self) -> anyhow::Result<Option<PathBuf>> {
        Ok(None)
    }

    /// Runs the benchmark and reports its figures.
    fn measure(self) -> anyhow::Result<ExitCode>;
}

/// Runs the program with these arguments and returns its exit code. The first argument is the name of the program.
pub fn main<P: Program>(args: impl IntoIterator<Item = std::ffi::OsString>) -> ExitCode {
    let program = match P::try_parse_from(args) {
        Ok(program) => program,
        Err(error) => return report_usage(&error),
    };
    match run(program) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("firn: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Prints help and version on standard output, and anything else as a usage error (exit code 2).
fn report_usage(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        // A reader that closed standard output does not want the rest.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    eprintln!("firn: {}", text.trim_end());
    ExitCode::from(2)
}

/// Runs the benchmark under a supervisor, or runs this process's part of it.
fn run(program: impl Program) -> anyhow::Result<ExitCode> {
    if !program.is_part() && !supervisor::is_supervised()? {
        return supervisor::supervise(program.find_firn()?.as_deref());
    }
    // The plain passthrough file system holds a descriptor for each file that the kernel knows, as firnd does. If the
    // limit cannot be raised, a benchmark that needs more descriptors fails with an error.
    let _ = firn_backing::raise_descriptor_limit();
    program.measure()
}
