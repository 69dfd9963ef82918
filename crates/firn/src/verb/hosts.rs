//! `firn hosts`: lists the hosts that have a backing (a shared directory) mounted, and what to do about them.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgMatches, Args, FromArgMatches, ValueEnum, ValueHint};

use super::wait::parse_timeout_ms;
use crate::failure::{DONE, Failure, PARTLY};
use crate::job::{Job, hosts_text, inspect_backing, inspect_own_mount};
use crate::output::{self, Paint};
use crate::verb::Verb;

/// Default timeout for the backing to answer. With the start of a child process it stays below two seconds.
pub const DEFAULT_TIMEOUT: &str = "1500ms";

pub const VERB: Verb = Verb {
    name: "hosts",
    about: "List the hosts that have a backing mounted, alive or dead, and what to do about them",
    long: "Reads the leases and reports that hosts write to BACKING; no host is asked. A host is `alive` if it sends heartbeats \
           (renews its lease), `silent` if its process exists but sends none (it is stopped, or its backing hangs), \
           and `dead` if its process is gone. If the locks of the backing cannot show this, a host that sends no heartbeat \
           is `silent` for 30 s, then `dead`. The age of a heartbeat is measured by the clock of the backing's file system. \
           Lines below the table show the evidence for a state, options in which a host differs from the others, the \
           host that has the token of a lane, hosts that keep files in logs from being flattened, the partner of each \
           host, and the commands that recover the data of dead hosts. Hosts are visible if they mount with \
           participants, tokens, placement, partner or layout=log; otherwise only this host's own mount is shown. \
           BACKING need not be mounted here.",
    examples: &[
        ("firn hosts /scratch/run42", "hosts that have it mounted"),
        (
            "firn hosts --json /scratch/run42 | jq -r '.hosts[] | select(.state == \"dead\") | .advice[]'",
            "the commands for hosts that died",
        ),
    ],
    exits: &[
        (0, "listed, even if there is no host"),
        (1, "the backing does not answer, or cannot be read"),
        (
            2,
            "without BACKING: nothing of this user is mounted here, or more than one backing is",
        ),
        (
            3,
            "the backing, or the firnd of this host, does not answer; what is known is shown",
        ),
    ],
    args: HostsArgs::augment_args,
    run,
};

#[derive(Debug, Args)]
struct HostsArgs {
    /// The backing, or a mount point (default: the only mount on this host).
    #[arg(value_hint = ValueHint::DirPath)]
    backing: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// How long the backing and the firnd of this host may take to answer.
    #[arg(long, value_name = "DURATION", default_value = DEFAULT_TIMEOUT, value_parser = parse_timeout_ms)]
    timeout: u64,
    /// For the child process: ask one source, and print its answer.
    #[arg(long, value_enum, hide = true)]
    only: Option<ChildSource>,
}

/// A source of facts about hosts, which a child process asks.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum ChildSource {
    /// The leases and reports of hosts in the backing.
    Backing,
    /// The status of this host's mount.
    Mount,
}

/// Prints the hosts of a job, which share a backing. With the hidden `--only`, this is a child process that asks one
/// source of facts, the backing or this host's mount, and prints the answer as JSON.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = HostsArgs::from_arg_matches(matches)?;
    let path = args.backing.as_deref();
    match args.only {
        Some(ChildSource::Backing) => {
            output::print_json_line(&inspect_backing(path)?).map(|()| DONE)
        }
        Some(ChildSource::Mount) => {
            output::print_json_line(&inspect_own_mount(path)?).map(|()| DONE)
        }
        None => {
            let job = Job::inspect(path, Duration::from_millis(args.timeout))?;
            if args.json {
                output::print_json(&job)?;
            } else {
                output::print(&hosts_text(&job, Paint::stdout()))?;
            }
            Ok(job_exit_status(&job))
        }
    }
}

/// Returns the exit status: [`PARTLY`] if the backing or this host's firnd did not answer.
pub fn job_exit_status(job: &Job) -> u8 {
    if job.is_partial { PARTLY } else { DONE }
}
