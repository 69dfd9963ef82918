//! The benchmarks without the rest of `firn`: `cargo run --release -p firn-bench --example firn-bench --
//! bench ingest --baseline-only`. What mounts Firn needs `--firn PROGRAM` then.

use clap::{Parser, Subcommand};

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    Bench(firn_bench::BenchArgs),
}

fn main() -> anyhow::Result<()> {
    let Verb::Bench(args) = Cli::parse().verb;
    firn_bench::main_from_cli(args)
}
