//! The laboratory: the figures of the papers that Firn is built after, made anew.
//!
//! It models machines that are not at hand and keeps designs of others to compare with. `firn bench` measures what a
//! user has; the benchmarks that both have are those of `firn-bench`. README.md lists the figures.
//!
//! Promises
//! * As `firn-bench`: each figure stands beside a baseline of the same run, and nothing is left behind.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use firn_bench::options::Common;
use firn_bench::program::{self, Program};
use firn_bench::report::Report;
use firn_bench::{checkpoint, commit, ingest, network, restart, spill};

mod all;
mod alternatives;
mod app;
mod conflict;
mod figures;
mod memory;
mod model;
mod orchestrate;
mod partner;
mod product;
mod serve;
mod shared;
mod svg;
mod worker;

/// Make the figures of the papers anew.
#[derive(Debug, Parser)]
#[command(
    name = "firn-lab",
    version,
    max_term_width = 100,
    after_help = figures::help(),
)]
struct CommandLine {
    /// Also draw the medians to FILE as SVG.
    #[arg(long, value_name = "FILE", global = true)]
    svg: Option<PathBuf>,
    #[command(subcommand)]
    experiment: Experiment,
}

#[derive(Clone, Debug, Subcommand)]
enum Experiment {
    Ingest(ingest::IngestArgs),
    Checkpoint(checkpoint::CheckpointArgs),
    Restart(restart::RestartArgs),
    Spill(spill::SpillArgs),
    Commit(commit::CommitArgs),
    Memory(memory::MemoryArgs),
    Conflict(conflict::ConflictArgs),
    Orchestrate(orchestrate::OrchestrateArgs),
    Shared(shared::SharedArgs),
    Alternatives(alternatives::AlternativesArgs),
    App(app::AppArgs),
    Partner(partner::PartnerArgs),
    All(all::AllArgs),
    #[command(hide = true)]
    Worker,
    #[command(hide = true)]
    Serve,
    #[command(hide = true)]
    Send(network::bare::SendArgs),
    #[command(hide = true)]
    Receive(network::bare::ReceiveArgs),
}

fn main() -> ExitCode {
    program::main::<CommandLine>(figures::expand(std::env::args_os().collect()))
}

impl Program for CommandLine {
    fn is_part(&self) -> bool {
        matches!(
            self.experiment,
            Experiment::Worker | Experiment::Serve | Experiment::Send(_) | Experiment::Receive(_)
        )
    }

    fn find_firn(&self) -> anyhow::Result<Option<PathBuf>> {
        let named = match &self.experiment {
            Experiment::All(args) => args.firn(),
            other => other.common().and_then(|common| common.firn.as_ref()),
        };
        if named.is_some() {
            return Ok(None);
        }
        product::build().map(Some)
    }

    fn measure(self) -> anyhow::Result<ExitCode> {
        match &self.experiment {
            Experiment::Worker => firn_bench::worker::main::<worker::Task>()?,
            Experiment::Serve => firn_bench::serve::main::<serve::Server>()?,
            Experiment::Send(args) => args.run()?,
            Experiment::Receive(args) => args.run()?,
            Experiment::All(args) => return args.run(),
            experiment => experiment.publish(self.svg.as_deref())?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Experiment {
    /// The options that every experiment has; parts of one and `all` have none of them.
    fn common(&self) -> Option<&Common> {
        match self {
            Self::Ingest(args) => Some(args.common()),
            Self::Checkpoint(args) => Some(args.common()),
            Self::Restart(args) => Some(args.common()),
            Self::Spill(args) => Some(args.common()),
            Self::Commit(args) => Some(args.common()),
            Self::Memory(args) => Some(args.common()),
            Self::Conflict(args) => Some(args.common()),
            Self::Orchestrate(args) => Some(args.common()),
            Self::Shared(args) => Some(args.common()),
            Self::Alternatives(args) => Some(args.common()),
            Self::App(args) => Some(args.common()),
            Self::Partner(args) => Some(args.common()),
            Self::All(_) | Self::Worker | Self::Serve | Self::Send(_) | Self::Receive(_) => None,
        }
    }

    fn run(&self) -> anyhow::Result<Report> {
        match self {
            Self::Ingest(args) => args.run(),
            Self::Checkpoint(args) => args.run(),
            Self::Restart(args) => args.run(),
            Self::Spill(args) => args.run(),
            Self::Commit(args) => args.run(),
            Self::Memory(args) => args.run(),
            Self::Conflict(args) => args.run(),
            Self::Orchestrate(args) => args.run(),
            Self::Shared(args) => args.run(),
            Self::Alternatives(args) => args.run(),
            Self::App(args) => args.run(),
            Self::Partner(args) => args.run(),
            Self::All(_) | Self::Worker | Self::Serve | Self::Send(_) | Self::Receive(_) => {
                unreachable!("{self:?} makes no report of its own")
            }
        }
    }

    fn publish(&self, svg: Option<&Path>) -> anyhow::Result<()> {
        let report = self.run()?;
        if let Some(common) = self.common() {
            common.publish(&report)?;
        }
        match svg {
            Some(path) => svg::write(&report, path),
            None => Ok(()),
        }
    }

    /// Of these arguments, of which the first is the program's name.
    fn parse(args: Vec<OsString>) -> anyhow::Result<Self> {
        Ok(CommandLine::try_parse_from(args)?.experiment)
    }
}
