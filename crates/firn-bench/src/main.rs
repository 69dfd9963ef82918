//! `firn-bench`, the program of `firn bench`: measures Firn and its baselines in the same run.
//!
//! Promises
//! * Every figure of Firn has a baseline of the same run. The candidates take turns, and the figures are medians.
//! * Every report names the machine and the file system.
//! * Everything that was mounted, started or written is removed at the end, also after a failure or Ctrl-C
//!   ([`firn_bench::supervisor`]).

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use firn_bench::options::Common;
use firn_bench::program::{self, Program};
use firn_bench::report::Report;
use firn_bench::{checkpoint, commit, drain, ingest, meta, network, pull, read, restart, spill};
use firn_bench::{serve, takeover, worker};

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
    Restart(restart::RestartArgs),
    Spill(spill::SpillArgs),
    Drain(drain::DrainArgs),
    Commit(commit::CommitArgs),
    Pull(pull::PullArgs),
    Takeover(takeover::TakeoverArgs),
    /// Runs ingest, checkpoint (on the file system of --dir), read, meta,
    /// restart, spill, drain, commit and takeover, one after the other.
    ///
    /// --json writes one file for each, with the benchmark's name before the extension.
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
    program::main::<CommandLine>(std::env::args_os())
}

impl Program for CommandLine {
    fn is_part(&self) -> bool {
        matches!(
            self.benchmark,
            Benchmark::Worker | Benchmark::Serve | Benchmark::Send(_) | Benchmark::Receive(_)
        )
    }

    fn measure(self) -> anyhow::Result<ExitCode> {
        dispatch(self.benchmark)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Runs a benchmark and publishes its report, or runs this process's part of one.
fn dispatch(benchmark: Benchmark) -> anyhow::Result<()> {
    match benchmark {
        Benchmark::Worker => worker::main::<worker::Task>(),
        Benchmark::Serve => serve::main::<serve::Server>(),
        Benchmark::Send(args) => args.run(),
        Benchmark::Receive(args) => args.run(),
        Benchmark::Ingest(args) => args.common().publish(&args.run()?),
        Benchmark::Checkpoint(args) => args.common().publish(&args.run()?),
        Benchmark::Read(args) => args.common().publish(&args.run()?),
        Benchmark::Meta(args) => args.common().publish(&args.run()?),
        Benchmark::Restart(args) => args.common().publish(&args.run()?),
        Benchmark::Spill(args) => args.common().publish(&args.run()?),
        Benchmark::Drain(args) => args.common().publish(&args.run()?),
        Benchmark::Commit(args) => args.common().publish(&args.run()?),
        Benchmark::Pull(args) => args.common().publish(&args.run()?),
        Benchmark::Takeover(args) => args.common().publish(&args.run()?),
        Benchmark::All(args) => all(&args.common),
    }
}

/// Runs the benchmarks of `firn bench all`, one after the other. `pull`, which needs root, is not among them.
fn all(common: &Common) -> anyhow::Result<()> {
    let publish = |report: Report| {
        let mut common = common.clone();
        let insert = |path: &PathBuf| insert_name(path, &report.benchmark);
        common.json = common.json.as_ref().map(insert);
        common.publish(&report)?;
        println!();
        anyhow::Ok(())
    };
    publish(ingest::IngestArgs::with(common.clone()).run()?)?;
    publish(checkpoint::CheckpointArgs::with(common.clone()).run()?)?;
    publish(read::ReadArgs::with(common.clone()).run()?)?;
    publish(meta::MetaArgs::with(common.clone()).run()?)?;
    publish(restart::RestartArgs::with(common.clone()).run()?)?;
    publish(spill::SpillArgs::with(common.clone()).run()?)?;
    publish(drain::DrainArgs::with(common.clone()).run()?)?;
    publish(commit::CommitArgs::with(common.clone()).run()?)?;
    publish(takeover::TakeoverArgs::with(common.clone()).run()?)
}

/// Inserts the name of a benchmark before the extension: `report.json` becomes `report.read.json`. Returns `-`, which
/// means standard output, unchanged.
fn insert_name(path: &Path, benchmark: &str) -> PathBuf {
    if path.as_os_str() == "-" {
        return path.to_owned();
    }
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    path.with_extension(format!("{benchmark}.{extension}"))
}
