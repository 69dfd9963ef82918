//! `firn hosts`: lists the hosts that have a backing mounted, and what to do about them.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgMatches, Args, FromArgMatches, ValueEnum, ValueHint};

use super::wait::parse_timeout_ms;
use crate::failure::{DONE, Failure, PARTLY};
use crate::job::{Job, hosts_text, look_at_backing, look_at_mount};
use crate::output::{self, Paint};
use crate::verb::Verb;

/// Default timeout for the backing to answer. With the start of a child process it stays below two seconds.
pub const DEFAULT_TIMEOUT: &str = "1500ms";

pub const VERB: Verb = Verb {
    name: "hosts",
    about: "List the hosts that have a backing mounted, alive or dead, and what to do about them",
    long: "Reads what hosts write beside their leases in BACKING; no host is asked. A host is `alive` if it beats, `silent` if \
           its process is there and does not beat (it is stopped, or its backing hangs), and `dead` if its \
           process is gone. Where locks of the backing do not tell, it is `silent` for 30 s and `dead` then. The age of a beat is measured by the clock of the backing's file system; what a \
           state rests on is said below the table. Shown too: what a host mounts otherwise than the others, which one has \
           the token of a lane, which one keeps files in logs from being flattened, the partner of each, and the commands \
           that recover what dead hosts held. Hosts show themselves with participants, tokens, placement, partner or \
           layout=log; of the others only this host's own mount is seen. BACKING need not be mounted here.",
    examples: &[
        ("firn hosts /scratch/run42", "hosts that have it mounted"),
        (
            "firn hosts --json /scratch/run42 | jq -r '.hosts[] | select(.state == \"dead\") | .advice[]'",
            "what to type for those that died",
        ),
    ],
    exits: &[
        (0, "listed, also if there is none"),
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
    /// The backing, or a mount point; without it that of the only mount here.
    #[arg(value_hint = ValueHint::DirPath)]
    backing: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// How long the backing and the firnd of this host may take to answer.
    #[arg(long, value_name = "DURATION", default_value = DEFAULT_TIMEOUT, value_parser = parse_timeout_ms)]
    timeout: u64,
    /// For a process of its own: look at one thing and print what it says.
    #[arg(long, value_enum, hide = true)]
    only: Option<ChildSource>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ChildSource {
    /// What hosts say in the backing.
    Backing,
    /// What this host's mount says.
    Mount,
}

/// Prints the hosts of a job. With the hidden `--only`, it asks one source in this process, which is then a child
/// process.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = HostsArgs::from_arg_matches(matches)?;
    let path = args.backing.as_deref();
    match args.only {
        Some(ChildSource::Backing) => {
            output::print_json_line(&look_at_backing(path)?).map(|()| DONE)
        }
        Some(ChildSource::Mount) => output::print_json_line(&look_at_mount(path)?).map(|()| DONE),
        None => {
            let job = Job::look(path, Duration::from_millis(args.timeout))?;
            if args.json {
                output::print_json(&job)?;
            } else {
                output::print(&hosts_text(&job, Paint::stdout()))?;
            }
            Ok(exit_code(&job))
        }
    }
}

/// Returns the exit status: [`PARTLY`] if the backing or this host's firnd did not answer.
pub fn exit_code(job: &Job) -> u8 {
    if job.is_partial { PARTLY } else { DONE }
}
