//! `firn report`: makes a page of HTML that shows how a run went.

use std::io::{self, IsTerminal};
use std::path::PathBuf;

use clap::{ArgMatches, Args, FromArgMatches, ValueHint};

use crate::failure::{DONE, Failure, PARTLY, USAGE};
use crate::report::{self, Run};
use crate::verb::{NO_CONNECTION, Verb};
use crate::{output, text};

pub const VERB: Verb = Verb {
    name: "report",
    about: "Make a page that shows how a run went",
    long: "One page of HTML, which needs no network and no other file: the timeline of writes, drains and waits, each \
           checkpoint on its way to durable, sizes of writes before and after aggregation, time in close and fsync, the \
           time saved compared with direct writes, events and errors. For a mount, the page shows the time since it was \
           mounted; for a backing that is not mounted, the last mount on this host. Other hosts of the job are on the \
           page if they mounted with record-in=backing: in their state at most a minute ago, or at their end.",
    examples: &[
        ("firn report /ckpt -o run.html", "the run until now"),
        (
            "firn report /scratch/run42 -o run.html",
            "the last run of a backing that is not mounted any more",
        ),
        (
            "firn run --memory 8G --report run.html -- ./app",
            "a report when the job has ended",
        ),
        (
            "firn report --json /ckpt | jq '.[].checkpoints'",
            "the records that the page is made of",
        ),
    ],
    exits: &[
        (0, "written"),
        (1, "failed"),
        (
            3,
            "written, but some records could not be read; messages name them",
        ),
        (10, "PATH is neither a mount nor a backing with a record"),
        NO_CONNECTION,
    ],
    args: ReportArgs::augment_args,
    run,
};

#[derive(Debug, Args)]
struct ReportArgs {
    /// A mount point, anything below it, or a backing.
    #[arg(value_name = "PATH", default_value = ".", value_hint = ValueHint::DirPath)]
    path: PathBuf,
    /// Write the page to FILE, which is replaced atomically (default: standard output).
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    output: Option<PathBuf>,
    /// Print the records as JSON instead.
    #[arg(long, conflicts_with = "output")]
    json: bool,
}

/// Makes the report, as a page of HTML or with `--json` as the records (what each mount did). Returns [`PARTLY`] if a
/// part of the run could not be read.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = ReportArgs::from_arg_matches(matches)?;
    if args.output.is_none() && !args.json && io::stdout().is_terminal() {
        let text =
            "a report is a page of HTML: name its file with -o, as in `firn report -o run.html`";
        return Err(Failure::new(USAGE, text));
    }
    let run = Run::find(&args.path)?;
    for failure in &run.failures {
        output::print_message(failure);
    }
    if args.json {
        output::print_json(&run.records)?;
    } else if let Some(file) = &args.output {
        report::write_page(&run, file)?;
        output::print_message(&format!("the report is in {}", text::path(file)));
    } else {
        output::print(&report::render_page(&run))?;
    }
    Ok(if run.failures.is_empty() {
        DONE
    } else {
        PARTLY
    })
}
