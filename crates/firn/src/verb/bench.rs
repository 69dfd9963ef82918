//! `firn bench`: everything is in firn-bench.

use clap::{ArgMatches, Args, FromArgMatches};
use firn_bench::BenchArgs;

use crate::failure::{DONE, FAILED, Failure};
use crate::verb::Verb;

pub const VERB: Verb = Verb {
    name: "bench",
    about: "Measure Firn beside its baselines",
    long: "Figures depend on the machine, the file system of --dir and whatever else runs. Compare ratios, and \
           quote them with the two lines at the head of the report.",
    examples: &[
        (
            "firn bench checkpoint --dir /scratch",
            "checkpoints through Firn and natively, on that file system",
        ),
        (
            "firn bench memory --quick",
            "files in memory, through each door, beside memcpy and tmpfs",
        ),
        (
            "firn bench ingest --svg ingest.svg",
            "how fast writes are taken in, with a picture",
        ),
    ],
    exits: &[
        (0, "measured"),
        (1, "failed"),
        (130, "interrupted; what was mounted and written is removed"),
    ],
    args: BenchArgs::augment_args,
    run,
};

fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = BenchArgs::from_arg_matches(matches)?;
    firn_bench::main_from_cli(args).map_err(|error| Failure::new(FAILED, format!("{error:#}")))?;
    Ok(DONE)
}
