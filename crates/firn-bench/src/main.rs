//! `firn-bench`, which `firn bench` starts: Firn beside its baselines, measured in the same run.
//!
//! Promises
//! * Every figure of Firn stands beside a baseline of the same run; the candidates took turns, and
//!   figures are medians.
//! * The machine and the file system are named in every report.
//! * Whatever was mounted, started or written is removed, on failure and on Ctrl-C too (`supervisor`).

use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use crate::options::Common;
use crate::report::Report;

mod alternatives;
mod app;
mod backing;
mod checkpoint;
mod commit;
mod conflict;
mod cpu;
mod discard;
mod drain;
mod durable;
mod firn;
mod ingest;
mod machine;
mod memory;
mod meta;
mod network;
mod options;
mod orchestrate;
mod partner;
mod pull;
mod read;
mod report;
mod restart;
mod serve;
mod shared;
mod sizes;
mod spill;
mod supervisor;
mod svg;
mod worker;

/// Measure Firn beside its baselines.
#[derive(Debug, Parser)]
#[command(
    name = "firn-bench",
    bin_name = "firn bench",
    version,
    max_term_width = 100,
    after_help = "Figures depend on the machine, the file system of --dir and whatever else runs. \
    Compare ratios, and quote them with the two lines at the head of the report."
)]
struct CommandLine {
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(Clone, Debug, Subcommand)]
enum Benchmark {
    Ingest(ingest::IngestArgs),
    Checkpoint(checkpoint::CheckpointArgs),
    Read(read::ReadArgs),
    Meta(meta::MetaArgs),
    Memory(memory::MemoryArgs),
    Restart(restart::RestartArgs),
    Spill(spill::SpillArgs),
    Drain(drain::DrainArgs),
    Commit(commit::CommitArgs),
    Conflict(conflict::ConflictArgs),
    App(app::AppArgs),
    Orchestrate(orchestrate::OrchestrateArgs),
    Shared(shared::SharedArgs),
    Alternatives(alternatives::AlternativesArgs),
    Pull(pull::PullArgs),
    Partner(partner::PartnerArgs),
    /// Runs ingest, checkpoint (on the file system of --dir), read, meta,
    /// memory, restart, spill, drain, commit and conflict, one after the other.
    ///
    /// --json and --svg write one file for each, with the benchmark's name before the extension.
    All(AllArgs),
    #[command(hide = true)]
    Worker,
    #[command(hide = true)]
    Serve,
    #[command(hide = true)]
    Send(network::bare::SendArgs),
    #[command(hide = true)]
    Receive(network::bare::ReceiveArgs),
}

#[derive(Clone, Debug, Args)]
struct AllArgs {
    #[command(flatten)]
    common: Common,
}

fn main() -> ExitCode {
    let command_line = match CommandLine::try_parse() {
        Ok(command_line) => command_line,
        Err(error) => return report_usage(&error),
    };
    match run(command_line.benchmark) {
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
        // Whoever closed standard output does not want to read it.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    eprintln!("firn: {}", text.trim_end());
    ExitCode::from(2)
}

fn run(benchmark: Benchmark) -> anyhow::Result<ExitCode> {
    if !benchmark.is_part() && !supervisor::is_supervised()? {
        return supervisor::supervise();
    }
    measure(benchmark)?;
    Ok(ExitCode::SUCCESS)
}

impl Benchmark {
    /// Whether it is a process of a benchmark that another one has started.
    fn is_part(&self) -> bool {
        matches!(
            self,
            Self::Worker | Self::Serve | Self::Send(_) | Self::Receive(_)
        )
    }
}

fn measure(benchmark: Benchmark) -> anyhow::Result<()> {
    // The plain passthrough holds a descriptor for each file that the kernel knows, as firnd does. Without more of
    // them a benchmark that needs them says so.
    let _ = firn_backing::raise_descriptor_limit();
    match benchmark {
        Benchmark::Worker => worker::main(),
        Benchmark::Serve => serve::main(),
        Benchmark::Send(args) => args.run(),
        Benchmark::Receive(args) => args.run(),
        Benchmark::Ingest(args) => args.common().publish(&args.run()?),
        Benchmark::Checkpoint(args) => args.common().publish(&args.run()?),
        Benchmark::Read(args) => args.common().publish(&args.run()?),
        Benchmark::Meta(args) => args.common().publish(&args.run()?),
        Benchmark::Memory(args) => args.common().publish(&args.run()?),
        Benchmark::Restart(args) => args.common().publish(&args.run()?),
        Benchmark::Spill(args) => args.common().publish(&args.run()?),
        Benchmark::Drain(args) => args.common().publish(&args.run()?),
        Benchmark::Commit(args) => args.common().publish(&args.run()?),
        Benchmark::Conflict(args) => args.common().publish(&args.run()?),
        Benchmark::Alternatives(args) => args.common().publish(&args.run()?),
        Benchmark::Orchestrate(args) => args.common().publish(&args.run()?),
        Benchmark::Pull(args) => args.common().publish(&args.run()?),
        Benchmark::Partner(args) => args.common().publish(&args.run()?),
        Benchmark::Shared(args) => args.common().publish(&args.run()?),
        Benchmark::App(args) => args.common().publish(&args.run()?),
        Benchmark::All(args) => all(&args.common),
    }
}

fn all(common: &Common) -> anyhow::Result<()> {
    let publish = |report: Report| {
        let name = report.benchmark.clone();
        let insert = |path: &std::path::PathBuf| {
            let extension = path
                .extension()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            path.with_extension(format!("{name}.{extension}"))
        };
        let mut common = common.clone();
        common.json = common.json.as_ref().map(insert);
        common.svg = common.svg.as_ref().map(insert);
        common.publish(&report)?;
        println!();
        anyhow::Ok(())
    };
    publish(ingest::IngestArgs::with(common.clone()).run()?)?;
    publish(checkpoint::CheckpointArgs::with(common.clone()).run()?)?;
    publish(read::ReadArgs::with(common.clone()).run()?)?;
    publish(meta::MetaArgs::with(common.clone()).run()?)?;
    publish(memory::MemoryArgs::with(common.clone()).run()?)?;
    publish(restart::RestartArgs::with(common.clone()).run()?)?;
    publish(spill::SpillArgs::with(common.clone()).run()?)?;
    publish(drain::DrainArgs::with(common.clone()).run()?)?;
    publish(commit::CommitArgs::with(common.clone()).run()?)?;
    publish(conflict::ConflictArgs::with(common.clone()).run()?)
}
