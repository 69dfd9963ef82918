//! `firn agent`: serves `firn pull` on other hosts, so that they can copy files out of this host's memory.
//!
//! A *puller* is a `firn pull` that copies files. A *partner* is a host that keeps copies of the data that another host
//! has only in memory.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{ArgMatches, Args, FromArgMatches, ValueEnum, ValueHint};
use firn_agent::{Agent, AgentOptions, Encrypt, Log, Munge, TransportChoice, server};
use firn_config::parse_size;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::failure::{DONE, FAILED, Failure, INTERRUPTED, USAGE};
use crate::output;
use crate::verb::{NO_CONNECTION, Verb};

pub const VERB: Verb = Verb {
    name: "agent",
    about: "Let other hosts pull checkpoints out of this host's memory",
    long: "Serves `firn pull` on other hosts, in the foreground, until it is interrupted. The agent reads the memory, \
           the spill file and the backing of one mount, and may be killed at any time. Its address and a new key are in \
           .firn/agent-HOST in the backing, a file that only its user can read. Each reader of this file may pull. \
           Bytes are encrypted on the network if one side uses --encrypt yes, or has an address that is not private. \
           `firn pull` without --backing uses ssh, and starts an agent with --stdio by itself.\n\n\
           If the mount has the option `partner`, the agent looks for a partner among the other agents of the backing. \
           The partner's agent then keeps copies of the data that this host holds. In turn, this agent keeps such \
           copies for other hosts, in a directory beside the arena, until their data is drained.",
    examples: &[
        (
            "firn agent /ckpt",
            "`firn pull HOST:/ckpt/step_100 DIR --backing BACKING` works on all hosts that see the backing",
        ),
        (
            "firn agent --listen 10.1.0.5:0 --hold-max 2G /ckpt",
            "on one network only, and with at most 2 GiB of the arena held for pullers",
        ),
    ],
    exits: &[
        (0, "ended by SIGTERM or SIGHUP, or by the end of its ssh"),
        (1, "failed"),
        (2, "an invalid option or argument"),
        (10, "not on a firn mount"),
        NO_CONNECTION,
        (130, "interrupted"),
    ],
    args: AgentArgs::augment_args,
    run,
};

#[derive(Debug, Args)]
struct AgentArgs {
    /// A mount point, or anything below it.
    #[arg(value_hint = ValueHint::AnyPath, required_unless_present = "stdio", conflicts_with = "stdio")]
    path: Option<PathBuf>,
    /// Address at which to listen; port 0 is any free port.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:0")]
    listen: SocketAddr,
    /// Address at which pullers reach this host: a name or IP address, with a port if it is not that of --listen
    /// (default: the address of --listen, or the name of the host).
    #[arg(long, value_name = "ADDRESS")]
    address: Option<String>,
    /// Name by which pullers and partners know this host (default: the mount's option `host`, or the host name).
    #[arg(long, value_name = "NAME")]
    host: Option<String>,
    /// Largest part of the arena that is held for pullers at once; a single file may exceed it (default: a quarter).
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    hold_max: Option<u64>,
    /// Encrypt bytes on the network; `auto`: for pullers whose address is not private.
    #[arg(
        long,
        value_name = "WHEN",
        value_enum,
        default_value = "auto",
        conflicts_with = "stdio"
    )]
    encrypt: EncryptArg,
    /// Largest amount of memory for copies of other hosts' files (default: as much as the arena).
    #[arg(long, value_name = "SIZE", value_parser = parse_size, conflicts_with = "stdio")]
    partner_size: Option<u64>,
    /// Also serve pullers that present a MUNGE credential of this user instead of the key.
    #[arg(long, conflicts_with = "stdio")]
    munge: bool,
    /// The socket of munged, if it is not at the default path.
    #[arg(long, value_name = "PATH", requires = "munge", value_hint = ValueHint::FilePath)]
    munge_socket: Option<PathBuf>,
    /// Transports that pullers may use: `auto`, any that they ask for; `tcp`, only the connection; `ofi` or
    /// `ofi:PROVIDER`, a provider of libfabric, which must be available.
    #[arg(long, value_name = "TRANSPORT", default_value = "auto", value_parser = TransportChoice::from_str, conflicts_with = "stdio")]
    transport: TransportChoice,
    /// Serve one puller over standard input and output. It may pull from all mounts of this user.
    #[arg(long)]
    stdio: bool,
    /// Print each step of the protocol, with its number in figure 3 of the CRUISE paper.
    #[arg(long)]
    verbose: bool,
}

/// Refuses encryption together with a transport that cannot encrypt. The check needs no firnd, so verbs make it first.
pub(super) fn check_encryption(
    transport: &TransportChoice,
    encrypt: Option<EncryptArg>,
) -> Result<(), Failure> {
    if transport.is_ofi() && matches!(encrypt, Some(EncryptArg::Yes)) {
        return Err(Failure::new(
            USAGE,
            format!(
                "--transport {transport} and --encrypt yes: libfabric encrypts nothing; use --transport tcp, or omit --encrypt yes"
            ),
        ));
    }
    Ok(())
}

/// The value of `--encrypt` for agents and for pullers.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum EncryptArg {
    Auto,
    Yes,
    No,
}

impl From<EncryptArg> for Encrypt {
    fn from(arg: EncryptArg) -> Self {
        match arg {
            EncryptArg::Auto => Self::Auto,
            EncryptArg::Yes => Self::Yes,
            EncryptArg::No => Self::No,
        }
    }
}

/// Serves pullers (`firn pull` on other hosts) until a signal ends the process, or with `--stdio` until the puller
/// closes the connection.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = AgentArgs::from_arg_matches(matches)?;
    check_encryption(&args.transport, Some(args.encrypt))?;
    let log = Log::new(
        |text| output::print_message(&format!("agent: {text}")),
        args.verbose,
    );
    let Some(path) = args.path else {
        return serve_pipes(args.hold_max, &log);
    };
    let mut agent = Agent::start(AgentOptions {
        path,
        listen: args.listen,
        address: args.address,
        host: args.host,
        partner_bytes_max: args.partner_size,
        hold_max: args.hold_max,
        encrypt: args.encrypt.into(),
        munge: args.munge.then_some(Munge {
            socket: args.munge_socket,
        }),
        transport: args.transport,
        log,
    })?;
    // At a signal, the remover deletes the agent's key from the backing before the process ends.
    end_on_signals(agent.remover())?;
    output::print_message(&format!("agent: {}", server::greeting(&agent)));
    agent.start_partner_search()?;
    // `serve` returns only with an error, so its success type has no value, and the match has no arm.
    match agent.serve()? {}
}

/// Serves one puller (`firn pull` on another host) over standard input and output until it closes them. `hold_max` is
/// the maximum number of bytes in the mount's memory that stay there for the puller until it has read them.
fn serve_pipes(hold_max: Option<u64>, log: &Log) -> Result<u8, Failure> {
    let to_failure =
        |error: std::io::Error| Failure::new(FAILED, format!("standard input and output: {error}"));
    let stdin = std::io::stdin();
    let input = stdin.as_fd().try_clone_to_owned().map_err(to_failure)?;
    let stdout = std::io::stdout();
    let output = stdout.as_fd().try_clone_to_owned().map_err(to_failure)?;
    match server::serve_pipes(input, output, hold_max, log) {
        Ok(()) => Ok(DONE),
        Err(error) => Err(Failure::new(
            FAILED,
            format!(
                "agent: standard input: {error}; `firn pull` starts an agent with --stdio, users do not"
            ),
        )),
    }
}

/// Removes the agent's key from the backing at SIGTERM, SIGINT or SIGHUP, and then ends the process. Otherwise the key
/// would lead pullers to an agent that no longer exists.
fn end_on_signals(remove_key: impl Fn() + Send + 'static) -> Result<(), Failure> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])
        .map_err(|error| Failure::new(FAILED, format!("cannot wait for signals: {error}")))?;
    std::thread::spawn(move || {
        let Some(signal) = signals.forever().next() else {
            return;
        };
        remove_key();
        let exit_status = if signal == SIGINT { INTERRUPTED } else { DONE };
        std::process::exit(exit_status.into());
    });
    Ok(())
}
