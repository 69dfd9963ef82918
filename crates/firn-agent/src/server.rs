//! The server of an *agent*, the process that serves the files of a mount to other hosts. It accepts connections,
//! bounds their number and time, and starts a thread for each one.
//!
//! A connection is *unauthenticated* until its other side has proved in the handshake that it has the key. Then the
//! connection becomes a session (`crate::session`).
//!
//! Invariants
//! * The number of unauthenticated connections is bounded, and each is closed after [`HANDSHAKE_TIMEOUT`]. A further
//!   one replaces an earlier one (`crate::unauthenticated`).
//! * There are at most `SESSIONS_MAX` sessions. A further connection is closed after its handshake.
//! * Refused connections add at most one line to the log in `REFUSAL_LOG_INTERVAL`.
//! * A connection has a thread and a buffer of one frame. Before authentication a frame has at most
//!   [`crate::message::HANDSHAKE_BYTES_MAX`] bytes.

use std::io;
use std::net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use firn_client::{Connection, Mount};
use firn_format::quote::quoted_path;
use firn_protocol::PartnerStatus;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::auth::{HandshakeInputs, Key, answer_handshake, answer_handshake_with_hello_callback};
use crate::encryption::Encrypt;
use crate::error::{AgentError, WireError};
use crate::exposure::FabricOffer;
use crate::hold_budget::HoldBudget;
use crate::key_file::{KeyFile, check_host};
use crate::link::Link;
use crate::munge::Munge;
use crate::partner::{CopyStore, Domains, PartnerService, run_partner_search};
use crate::session::{Sent, Session, SessionContext};
use crate::source::default_hold_max;
use crate::transport::{Stream, Transport};
use crate::transport_choice::TransportChoice;
use crate::unauthenticated::{UnauthenticatedConnection, UnauthenticatedConnections};

/// Maximum time of a handshake.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of sessions. Each session uses one of the 64 connections that a firnd serves.
const SESSIONS_MAX: usize = 16;
/// Minimum time between two log lines about refused connections.
const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Pause after a failed accept(2), because a lack of descriptors or memory may persist.
const ACCEPT_RETRY_PAUSE: Duration = Duration::from_millis(50);

/// Level of a line of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// An event that an operator should know of.
    Event,
    /// A step of the protocol, with its number in figure 3 of the CRUISE paper.
    Step,
}

/// The log of an agent.
#[derive(Clone)]
pub struct Log {
    write: Arc<dyn Fn(&str) + Send + Sync>,
    with_steps: bool,
}

impl Log {
    /// Makes a log that passes its lines to `write`. Lines of [`Level::Step`] are omitted unless `with_steps`.
    pub fn new(write: impl Fn(&str) + Send + Sync + 'static, with_steps: bool) -> Self {
        Self {
            write: Arc::new(write),
            with_steps,
        }
    }

    /// Writes a line if lines of its level are enabled. Only then is `text` called.
    pub(crate) fn say(&self, level: Level, text: impl FnOnce() -> String) {
        if level == Level::Event || self.with_steps {
            (self.write)(&text());
        }
    }
}

/// Options of an agent.
pub struct AgentOptions {
    /// A path on the mount to serve.
    pub path: PathBuf,
    /// Address to listen at.
    pub listen: SocketAddr,
    /// Name or address at which pullers reach this host. `None` means the address of `listen`, or the host's name if
    /// `listen` is unspecified.
    pub address: Option<String>,
    /// Name of this host for pullers and partners. `None` means the name in the mount's options, or otherwise the
    /// system's name.
    pub host: Option<String>,
    /// Maximum size of the partner copies of other hosts' files. `None` means the size of the arena.
    pub partner_bytes_max: Option<u64>,
    /// Maximum number of bytes of the arena that the agent holds. `None` means a quarter of the arena.
    pub hold_max: Option<u64>,
    /// Whether bytes of files are encrypted.
    pub encrypt: Encrypt,
    /// MUNGE, if pullers may present a MUNGE credential instead of the key.
    pub munge: Option<Munge>,
    /// Transports that pullers may choose.
    pub transport: TransportChoice,
    /// Log of the agent.
    pub log: Log,
}

/// An agent that listens for connections.
pub struct Agent {
    mount: Mount,
    service: Arc<PartnerService>,
    /// `None` if the mount wants no partner, or after [`Agent::start_partner_search`].
    partner_config: Option<PartnerConfig>,
    listener: TcpListener,
    key_file: KeyFile,
    shared: Arc<Shared>,
}

/// The partner that a mount wants.
struct PartnerConfig {
    /// The mount's options for partners.
    options: PartnerStatus,
    domains: Domains,
}

/// State that the threads of all connections share.
struct Shared {
    /// Mount point of the served mount.
    mount_point: PathBuf,
    key: Key,
    encrypt: Encrypt,
    munge: Option<Munge>,
    transport: TransportChoice,
    hold_budget: Arc<HoldBudget>,
    service: Arc<PartnerService>,
    log: Log,
    unauthenticated: UnauthenticatedConnections,
    session_count: AtomicUsize,
    refusals: Mutex<Refusals>,
}

/// A connection after its handshake.
struct AuthenticatedConnection {
    link: Link<Stream>,
    /// Transports that the puller may choose.
    fabric_offer: FabricOffer,
}

/// Refused connections that are not yet in the log.
#[derive(Default)]
struct Refusals {
    /// When the log mentioned a refusal last.
    logged_at: Option<Instant>,
    /// Address and reason of the last refusal.
    last: String,
    count: u64,
}

impl Agent {
    /// Makes an agent, which serves the files of a mount to other hosts. Begins to listen, and writes the agent's
    /// address and key to its record in the backing (the directory that the mount serves), where other hosts find them.
    ///
    /// Connections are not accepted before [`Agent::serve`].
    pub fn start(options: AgentOptions) -> Result<Self, AgentError> {
        options.transport.check()?;
        let mount = firn_client::find(&options.path)?.mount;
        let mut connection = Connection::open(&mount)?;
        let region = connection.region()?;
        let partner_options = connection.status()?.partner;
        let host = choose_host_name(options.host, partner_options.as_ref());
        check_host(&host)?;
        // With this option of the mount, another host keeps copies of its files in memory.
        let partner_config = match partner_options {
            Some(partner_options) => Some(PartnerConfig::new(partner_options, &host)?),
            None => None,
        };
        let (listener, bound_address) = listen(options.listen)?;
        let address = advertised_address(bound_address, options.address.as_deref(), &host);
        let key_file = make_key_file(&mount, &host, address)?;
        key_file.store(&mount.backing, &host)?;
        let copies = CopyStore::new(
            CopyStore::path_beside_arena(region.path.as_path()),
            options.partner_bytes_max.unwrap_or(region.bytes),
        );
        let service =
            PartnerService::new(host, &mount, copies, options.encrypt, options.log.clone());
        let hold_max = options
            .hold_max
            .unwrap_or_else(|| default_hold_max(region.bytes));
        let shared = Shared {
            mount_point: mount.mount_point.clone(),
            key: key_file.key.clone(),
            encrypt: options.encrypt,
            munge: options.munge,
            transport: options.transport,
            hold_budget: HoldBudget::new(hold_max),
            service: Arc::clone(&service),
            log: options.log,
            unauthenticated: UnauthenticatedConnections::default(),
            session_count: AtomicUsize::new(0),
            refusals: Mutex::default(),
        };
        Ok(Self {
            mount,
            service,
            partner_config,
            listener,
            key_file,
            shared: Arc::new(shared),
        })
    }

    /// Address at which pullers reach this agent.
    pub fn address(&self) -> &str {
        &self.key_file.address
    }

    /// Mount point of the served mount.
    pub fn mount_point(&self) -> &Path {
        &self.mount.mount_point
    }

    /// Returns a function for the end of the agent. The function removes the record from the backing, and unneeded
    /// copies from memory. It may be called from any thread.
    pub fn remover(&self) -> impl Fn() + Send + 'static {
        let key_file = self.key_file.clone();
        let service = Arc::clone(&self.service);
        move || {
            if let Err(error) = key_file.remove(&service.backing, &service.host) {
                service.log.say(Level::Event, || error.to_string());
            }
            service.remove_drained_copies();
        }
    }

    /// Follows again the hosts of which this host has copies of files. Then starts the thread that searches for a
    /// partner, a host that keeps copies of this host's files in memory.
    ///
    /// Does nothing if the mount wants no partner, or if the thread was started before.
    pub fn start_partner_search(&mut self) -> Result<(), AgentError> {
        let Some(PartnerConfig { options, domains }) = self.partner_config.take() else {
            return Ok(());
        };
        let service = Arc::clone(&self.service);
        resume_following(&service);
        let key_file = self.key_file.clone();
        std::thread::Builder::new()
            .name("agent-choice".into())
            .spawn(move || run_partner_search(&service, &key_file, &options, &domains))
            .map_err(|error| AgentError::Io {
                what: "cannot start a thread",
                error,
            })?;
        Ok(())
    }

    /// Accepts connections of other hosts, and starts a thread for each, until an error or the end of the process. Also
    /// writes the log lines about refused connections that became due while no connection came.
    pub fn serve(&self) -> Result<std::convert::Infallible, AgentError> {
        let accept_error = |error| AgentError::Io {
            what: "cannot accept connections",
            error,
        };
        self.listener.set_nonblocking(true).map_err(accept_error)?;
        loop {
            match self.listener.accept() {
                Ok((socket, peer_address)) => self.start_connection(socket, peer_address),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait_for_connection().map_err(accept_error)?;
                    self.shared.log_due_refusals(self.shared.lock_refusals());
                }
                Err(error) if is_accept_retryable(&error) => std::thread::sleep(ACCEPT_RETRY_PAUSE),
                Err(error) => return Err(accept_error(error)),
            }
        }
    }

    /// Waits for a connection, at most until the next log line about refusals may be due.
    fn wait_for_connection(&self) -> io::Result<()> {
        let timeout = Timespec::try_from(REFUSAL_LOG_INTERVAL).ok();
        let mut listener = [PollFd::new(&self.listener, PollFlags::IN)];
        match poll(&mut listener, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Starts a thread that serves a new connection.
    fn start_connection(&self, socket: TcpStream, peer_address: SocketAddr) {
        let unauthenticated = match self.shared.unauthenticated.add(&socket) {
            Ok(unauthenticated) => unauthenticated,
            Err(error) => return self.shared.record_refusal(peer_address, &error.to_string()),
        };
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name("agent-puller".into());
        let started = thread.spawn(move || shared.serve(socket, peer_address, unauthenticated));
        if let Err(error) = started {
            let reason = format!("cannot start a thread for the connection: {error}");
            self.shared.record_refusal(peer_address, &reason);
        }
    }
}

/// Returns this host's name: the agent's option, otherwise the mount's option for partners, otherwise the system's
/// name.
fn choose_host_name(option: Option<String>, partner_options: Option<&PartnerStatus>) -> String {
    match (option, partner_options) {
        (Some(host), _) => host,
        (None, Some(partner_options)) => partner_options.this_host.clone(),
        (None, None) => system_host_name(),
    }
}

/// Follows again the hosts from which an earlier agent of this host has copied files: connects to them to copy files.
/// If such a host has another partner now, the copies of its files are dropped. Errors are logged.
fn resume_following(service: &Arc<PartnerService>) {
    for source in service.copies.hosts() {
        if let Err(error) = service.start_following(&source) {
            service
                .log
                .say(Level::Event, || format!("{source}: {error}"));
        }
    }
}

impl PartnerConfig {
    /// Takes the options of a mount for its partner, the host that keeps copies of its files in memory. Reads the file
    /// of failure domains (hosts that fail together) if the options name one.
    ///
    /// Fails if the wanted partner is this host, or if the file cannot be read or parsed.
    fn new(options: PartnerStatus, this_host: &str) -> Result<Self, AgentError> {
        if options.wanted == this_host {
            return Err(AgentError::OwnPartner {
                host: this_host.into(),
            });
        }
        let Some(path) = &options.domains else {
            let domains = Domains::default();
            return Ok(Self { options, domains });
        };
        let domains_error = |why: String| AgentError::Domains {
            path: path.as_path().into(),
            why,
        };
        let text =
            std::fs::read_to_string(path).map_err(|error| domains_error(error.to_string()))?;
        let domains = Domains::parse(&text).map_err(|error| domains_error(error.to_string()))?;
        Ok(Self { options, domains })
    }
}

impl Shared {
    /// Serves one connection of another host from its handshake to its end: the body of its thread. Errors are logged.
    /// `unauthenticated` counts the connection against its maximum until the handshake is over.
    fn serve(
        self: &Arc<Self>,
        socket: TcpStream,
        peer_address: SocketAddr,
        unauthenticated: UnauthenticatedConnection,
    ) {
        let started_at = Instant::now();
        let connection = match self.authenticate(socket, peer_address, unauthenticated) {
            Ok(connection) => connection,
            Err(error) => return self.record_refusal(peer_address, &error.to_string()),
        };
        match self.serve_session(connection, peer_address) {
            Ok(sent) => self.log.say(Level::Event, || {
                session_summary(peer_address, sent, started_at)
            }),
            Err(error) => self
                .log
                .say(Level::Event, || format!("{peer_address}: {error}")),
        }
    }

    /// Carries out the handshake, in which the other host proves that it has the key. Returns the encrypted connection.
    ///
    /// The connection counts against the maximum of unauthenticated ones until this function returns, because it owns
    /// `unauthenticated`.
    fn authenticate(
        &self,
        socket: TcpStream,
        peer_address: SocketAddr,
        unauthenticated: UnauthenticatedConnection,
    ) -> Result<AuthenticatedConnection, WireError> {
        let local_ip = Some(socket.local_addr()?.ip());
        let inputs = HandshakeInputs {
            munge: self.munge.as_ref(),
            ..HandshakeInputs::of_tcp(&socket, &self.key, self.encrypt)?
        };
        let mut link = Link::over(Stream::over_tcp(socket)?);
        let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
        answer_handshake_with_hello_callback(&mut link, &inputs, deadline, &mut || {
            unauthenticated.record_hello()
        })?;
        let suffix = if link.is_encrypted() {
            ", encrypted"
        } else {
            ""
        };
        self.log.say(Level::Step, || {
            format!("(1) {peer_address} is connected{suffix}")
        });
        let fabric_offer = FabricOffer {
            transport: self.transport.clone(),
            local_ip,
        };
        Ok(AuthenticatedConnection { link, fabric_offer })
    }

    /// Answers the requests of an authenticated connection (a session) until it ends. Returns what was sent. If the
    /// number of sessions is at its maximum, refuses the connection and fails with `Ended`.
    fn serve_session(
        self: &Arc<Self>,
        connection: AuthenticatedConnection,
        peer_address: SocketAddr,
    ) -> Result<Sent, WireError> {
        let Some(_slot) = SessionSlot::acquire(self) else {
            let reason = format!("{SESSIONS_MAX} pullers are connected, the maximum");
            self.record_refusal(peer_address, &reason);
            return Err(WireError::Ended);
        };
        let context = SessionContext {
            mount_point: Some(&self.mount_point),
            hold_budget: Some(&self.hold_budget),
            service: Some(&self.service),
            log: &self.log,
        };
        let mut session =
            Session::new(connection.link, context).with_fabric_offer(connection.fabric_offer);
        session.serve()?;
        Ok(session.sent())
    }

    fn lock_refusals(&self) -> MutexGuard<'_, Refusals> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a refused connection and stores the reason. Logs the counted refusals if they are due.
    fn record_refusal(&self, peer_address: SocketAddr, reason: &str) {
        let mut refusals = self.lock_refusals();
        refusals.last = format!("{peer_address}: {reason}");
        refusals.count += 1;
        self.log_due_refusals(refusals);
    }

    /// Logs the counted refusals if they are due. The lock is released before the line is written.
    fn log_due_refusals(&self, mut refusals: MutexGuard<'_, Refusals>) {
        let due_line = refusals.next_line(Instant::now());
        drop(refusals);
        if let Some(line) = due_line {
            self.log.say(Level::Event, || line);
        }
    }
}

impl Refusals {
    /// Returns the line to log now, and resets the counted refusals. Returns `None` if there are none, or if the last
    /// line is too recent.
    fn next_line(&mut self, now: Instant) -> Option<String> {
        let is_recent = |logged_at: Instant| now.duration_since(logged_at) < REFUSAL_LOG_INTERVAL;
        if self.count == 0 || self.logged_at.is_some_and(is_recent) {
            return None;
        }
        self.logged_at = Some(now);
        let last = std::mem::take(&mut self.last);
        match std::mem::take(&mut self.count) {
            1 => Some(last),
            count => Some(format!(
                "{last} (and {} more since the last line like this)",
                count - 1
            )),
        }
    }
}

/// Serves one puller over the pipes of an ssh connection that started this agent. ssh has authenticated the puller.
pub fn serve_pipes(
    input: OwnedFd,
    output: OwnedFd,
    hold_max: Option<u64>,
    log: &Log,
) -> Result<(), WireError> {
    let link = Link::over(Stream::over_pipes(input, output)?);
    serve_ssh_connection(link, hold_max, log)
}

/// Serves the single connection of an agent that ssh has started for one puller, the process that copies files: the
/// handshake, and then requests until the connection ends.
///
/// `hold_max` bounds the bytes in memory that the agent may pin for the puller; `None` means the default. Such an agent
/// is not bound to one mount: the path that the puller lists determines it. The agent has no partners.
fn serve_ssh_connection<T: Transport>(
    mut link: Link<T>,
    hold_max: Option<u64>,
    log: &Log,
) -> Result<(), WireError> {
    let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
    answer_handshake(&mut link, &HandshakeInputs::of_pipes(), deadline)?;
    let hold_budget = hold_max.map(HoldBudget::new);
    let context = SessionContext {
        mount_point: None,
        hold_budget: hold_budget.as_ref(),
        service: None,
        log,
    };
    Session::new(link, context).serve()
}

/// One of the [`SESSIONS_MAX`] sessions. Dropping it releases the slot.
struct SessionSlot(Arc<Shared>);

impl SessionSlot {
    /// Acquires a slot. Returns `None` if all are in use.
    fn acquire(shared: &Arc<Shared>) -> Option<Self> {
        let increment = |count| (count < SESSIONS_MAX).then_some(count + 1);
        let sessions = &shared.session_count;
        let updated = sessions.try_update(Ordering::AcqRel, Ordering::Acquire, increment);
        if updated.is_err() {
            return None;
        }
        Some(Self(Arc::clone(shared)))
    }
}

impl Drop for SessionSlot {
    fn drop(&mut self) {
        self.0.session_count.fetch_sub(1, Ordering::AcqRel);
    }
}

fn system_host_name() -> String {
    let system = rustix::system::uname();
    system.nodename().to_string_lossy().into_owned()
}

/// Listens at an address. Returns the listener and its actual address, which has the chosen port if `address` has
/// port 0.
fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr), AgentError> {
    let listen_error = |error| AgentError::Listen {
        address: address.to_string(),
        error,
    };
    let listener = TcpListener::bind(address).map_err(listen_error)?;
    let bound_address = listener.local_addr().map_err(listen_error)?;
    Ok((listener, bound_address))
}

/// Makes the record of an agent on `host`, with a new key.
///
/// The record keeps the partners of an earlier agent, because they have its copies until a new partner has them.
fn make_key_file(mount: &Mount, host: &str, address: String) -> Result<KeyFile, AgentError> {
    let (partner, formers) = match KeyFile::load(&mount.backing, host) {
        Ok(earlier) => (earlier.partner, earlier.formers),
        Err(_) => (None, Vec::new()),
    };
    Ok(KeyFile {
        address,
        key: Key::random()?,
        partner,
        formers,
    })
}

/// Whether accept(2) may succeed later: the peer is gone, a signal interrupted the call, or descriptors or memory are
/// short.
fn is_accept_retryable(error: &io::Error) -> bool {
    let is_aborted_or_interrupted = matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted
    );
    let is_shortage = matches!(
        error.raw_os_error(),
        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)
    );
    is_aborted_or_interrupted || is_shortage
}

/// Returns the address for the agent's record, to which pullers (processes that copy files) on other hosts connect.
/// `bound` is the address on which the agent listens.
///
/// `configured` may be a name, an IPv4 or IPv6 address, or a name with a port. If it is `None`, the bound address is
/// used, or the host's name if the bound address is unspecified.
fn advertised_address(bound: SocketAddr, configured: Option<&str>, host: &str) -> String {
    let port = bound.port();
    let Some(configured) = configured else {
        return if bound.ip().is_unspecified() {
            format!("{host}:{port}")
        } else {
            bound.to_string()
        };
    };
    if !configured.contains(':') {
        return format!("{configured}:{port}");
    }
    let is_ipv6_address = configured.parse::<Ipv6Addr>().is_ok();
    if is_ipv6_address {
        format!("[{configured}]:{port}")
    } else {
        // The colon separates a name from its port.
        configured.to_owned()
    }
}

/// Returns the log line for the end of a session.
fn session_summary(peer_address: SocketAddr, sent: Sent, started_at: Instant) -> String {
    let Sent { files, bytes } = sent;
    let seconds = started_at.elapsed().as_secs_f64();
    let mib = bytes as f64 / f64::from(1 << 20);
    // A session shorter than a millisecond must not show an absurd rate.
    let mib_per_s = mib / seconds.max(1e-3);
    format!("{peer_address}: {files} files, {mib:.1} MiB in {seconds:.1} s ({mib_per_s:.0} MiB/s)")
}

/// Returns the first line of an agent's log.
pub fn greeting(agent: &Agent) -> String {
    format!(
        "serves the mount at {} at {}",
        quoted_path(agent.mount_point()),
        agent.address()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_refused_strangers_cost_one_line_in_ten_seconds() {
        let mut refusals = Refusals::default();
        let started_at = Instant::now();
        let mut lines = Vec::new();
        // 1,000 refusals per second for 25 seconds.
        for number in 0..25_000_u64 {
            refusals.last = format!("stranger {number}");
            refusals.count += 1;
            lines.extend(refusals.next_line(started_at + Duration::from_millis(number)));
        }
        lines.extend(refusals.next_line(started_at + Duration::from_secs(60)));
        assert_eq!(
            lines,
            [
                "stranger 0",
                "stranger 10000 (and 9999 more since the last line like this)",
                "stranger 20000 (and 9999 more since the last line like this)",
                "stranger 24999 (and 4998 more since the last line like this)",
            ]
        );
        assert_eq!(
            refusals.next_line(started_at + Duration::from_secs(90)),
            None
        );
    }
}
