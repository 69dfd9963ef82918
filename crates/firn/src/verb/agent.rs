//! `firn agent`: serves `firn pull` on other hosts, so that they can copy files out of this host's memory.

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
    about: "Let other hosts pull checkpoints out of this one's memory",
    long: "Serves `firn pull` on other hosts, in the foreground, until it is interrupted. It reads memory, spill file \
               and backing of one mount, and may be killed at any time. Its address and a new key are in \
               .firn/agent-HOST in the backing, a file that only its user can read. Every reader of the file may pull. Bytes \
               are encrypted on their way where one side says --encrypt yes, or has an address that is not private. \
               `firn pull` without --backing goes over ssh, which starts an agent by itself, with --stdio.\n\n\
               Where the mount has the option `partner`, it looks for a partner among the other agents of the backing, whose \
               agent then keeps copies of what this host holds; and it keeps such copies of others, in a directory beside \
               the arena, until they are drained.",
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
    /// Where to listen; port 0 is any free one.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:0")]
    listen: SocketAddr,
    /// How pullers reach this host: a name or address, with a port if that is another one (default: that of --listen,
    /// or the name of the host).
    #[arg(long, value_name = "ADDRESS")]
    address: Option<String>,
    /// What pullers and partners call this host (default: the mount's option `host`, or its name).
    #[arg(long, value_name = "NAME")]
    host: Option<String>,
    /// The most memory of the arena that is held for pullers at once; one file may take more (default: a quarter).
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    hold_max: Option<u64>,
    /// Encrypt bytes on their way; `auto`: for pullers whose address is not private.
    #[arg(
        long,
        value_name = "WHEN",
        value_enum,
        default_value = "auto",
        conflicts_with = "stdio"
    )]
    encrypt: EncryptArg,
    /// The most memory that copies of other hosts' files take here (default: as much as the arena).
    #[arg(long, value_name = "SIZE", value_parser = parse_size, conflicts_with = "stdio")]
    partner_size: Option<u64>,
    /// Serve also pullers that show a credential of MUNGE of this user instead of the key.
    #[arg(long, conflicts_with = "stdio")]
    munge: bool,
    /// The socket of munged, if it is not where MUNGE has it by default.
    #[arg(long, value_name = "PATH", requires = "munge", value_hint = ValueHint::FilePath)]
    munge_socket: Option<PathBuf>,
    /// What pullers may have bytes carried by: `auto`, whatever they ask for; `tcp`, the connection only; `ofi` or
    /// `ofi:PROVIDER`, a provider of libfabric that must be there.
    #[arg(long, value_name = "TRANSPORT", default_value = "auto", value_parser = TransportChoice::from_str, conflicts_with = "stdio")]
    transport: TransportChoice,
    /// Serve the one puller at the other end of standard input and output, which may pull from all mounts of this user.
    #[arg(long)]
    stdio: bool,
    /// Say each step of the protocol, by its number in figure 3 of the CRUISE paper.
    #[arg(long)]
    verbose: bool,
}

/// Refuses encryption together with a transport that cannot encrypt. This check needs no firnd, so it comes first.
pub(super) fn check_encryption(
    transport: &TransportChoice,
    encrypt: Option<EncryptArg>,
) -> Result<(), Failure> {
    if transport.is_ofi() && matches!(encrypt, Some(EncryptArg::Yes)) {
        return Err(Failure::new(
            USAGE,
            format!(
                "--transport {transport} and --encrypt yes: libfabric encrypts nothing; use --transport tcp, or do without encryption"
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

/// Serves pullers until a signal ends the process, or with `--stdio` until the puller closes the connection.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = AgentArgs::from_arg_matches(matches)?;
    check_encryption(&args.transport, Some(args.encrypt))?;
    let log = Log::new(|text| output::say(&format!("agent: {text}")), args.verbose);
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
    end_on_signals(agent.remover())?;
    output::say(&format!("agent: {}", server::greeting(&agent)));
    agent.seek_partner()?;
    match agent.serve()? {}
}

/// Serves the one puller at the other end of standard input and output until it closes them.
fn serve_pipes(hold_max: Option<u64>, log: &Log) -> Result<u8, Failure> {
    let own = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned();
    let pipes = own(std::io::stdin().as_fd())
        .and_then(|input| Ok((input, own(std::io::stdout().as_fd())?)));
    let (input, output) = pipes
        .map_err(|error| Failure::new(FAILED, format!("standard input and output: {error}")))?;
    match server::serve_pipes(input, output, hold_max, log) {
        Ok(()) => Ok(DONE),
        Err(error) => Err(Failure::new(
            FAILED,
            format!("agent: standard input: {error}; --stdio is for `firn pull`, which starts it"),
        )),
    }
}

/// Removes the agent's key from the backing at SIGTERM, SIGINT or SIGHUP, and then ends the process. A key that stays
/// would lead pullers to an agent that no longer exists.
fn end_on_signals(remove_key: impl Fn() + Send + 'static) -> Result<(), Failure> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])
        .map_err(|error| Failure::new(FAILED, format!("cannot wait for signals: {error}")))?;
    std::thread::spawn(move || {
        let Some(signal) = signals.forever().next() else {
            return;
        };
        remove_key();
        let code = if signal == SIGINT { INTERRUPTED } else { DONE };
        std::process::exit(code.into());
    });
    Ok(())
}
