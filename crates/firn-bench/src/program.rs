//! How a program of benchmarks takes its arguments, starts and ends.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::supervisor;

/// A program of benchmarks, as its command line is parsed.
pub trait Program: clap::Parser {
    /// Returns whether this process is a part of a benchmark that another process has started.
    fn is_part(&self) -> bool;

    /// Returns the firn program to measure where neither an argument nor the environment names one. It is found before
    /// the benchmark starts. None: the program beside this one.
    fn find_firn(&self) -> anyhow::Result<Option<PathBuf>> {
        Ok(None)
    }

    /// Measures and reports.
    fn measure(self) -> anyhow::Result<ExitCode>;
}

/// Runs the program with these arguments, of which the first is its name.
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

/// Prints help and version as answers, anything else as an error of usage (exit status 2).
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

fn run(program: impl Program) -> anyhow::Result<ExitCode> {
    if !program.is_part() && !supervisor::is_supervised()? {
        return supervisor::supervise(program.find_firn()?.as_deref());
    }
    // The plain passthrough holds a descriptor for each file that the kernel knows, as firnd does. Without more of
    // them a benchmark that needs them says so.
    let _ = firn_backing::raise_descriptor_limit();
    program.measure()
}
