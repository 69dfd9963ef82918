//! `firn version`: prints the versions of the program, of its protocol and of its arena format.

use clap::{ArgMatches, Args, FromArgMatches};
use firn_protocol::PROTOCOL_VERSION;
use serde::Serialize;

use crate::failure::{DONE, Failure};
use crate::output;
use crate::verb::Verb;

pub const VERB: Verb = Verb {
    name: "version",
    about: "Print the versions of firn, its protocol and its arena format",
    long: "",
    examples: &[("firn version --json", "for scripts")],
    exits: &[(0, "printed")],
    args: VersionArgs::augment_args,
    run,
};

#[derive(Debug, Args)]
struct VersionArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The versions, as JSON.
#[derive(Serialize)]
struct Versions {
    version: &'static str,
    /// Version of the protocol of the control socket.
    protocol: u32,
    /// Version of the arena's format.
    arena: u32,
}

/// Prints the versions, as a sentence or as JSON.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = VersionArgs::from_arg_matches(matches)?;
    let versions = Versions {
        version: env!("CARGO_PKG_VERSION"),
        protocol: PROTOCOL_VERSION,
        arena: firn_format::superblock::VERSION,
    };
    if args.json {
        output::print_json(&versions)?;
    } else {
        let Versions {
            version,
            protocol,
            arena,
        } = versions;
        output::print(&format!(
            "firn {version} (protocol {protocol}, arena format {arena})\n"
        ))?;
    }
    Ok(DONE)
}
