//! The agent's server: accepts connections, bounds their number and time, and starts a thread for each one.
//!
//! A *stranger* is a peer that has not yet proved that it has the key. After the handshake the connection becomes a
//! session (`crate::session`).
//!
//! Invariants
//! * There are at most `STRANGERS_MAX` strangers, each for at most [`HANDSHAKE_LIMIT`]. A further stranger replaces an
//!   earlier one (`crate::strangers`).
//! * There are at most `SESSIONS_MAX` sessions. A further connection is closed after its handshake.
//! * Refused connections add at most one line to the log in `REFUSAL_LOG_INTERVAL`.
//! * A connection has a thread and a buffer of one frame. The frame of a stranger has at most
//!   [`crate::message::HANDSHAKE_BYTES_MAX`] bytes.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use firn_client::{Connection, Mount};
use firn_format::quote::quoted_path;
use firn_protocol::PartnerStatus;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::auth::{Key, Terms, answer_handshake, answer_handshake_with};
use crate::encryption::Encrypt;
use crate::error::{AgentError, WireError};
use crate::exposure::Offer;
use crate::holds::Holds;
use crate::key_file::{KeyFile, check_host};
use crate::link::Link;
use crate::munge::Munge;
use crate::partner::{Copies, Domains, PartnerService, choose_partners};
use crate::session::{Sent, Session};
use crate::source::default_hold_max;
use crate::strangers::{Stranger, Strangers};
use crate::transport::{Stream, Transport};
use crate::transport_choice::TransportChoice;

/// Maximum time of a handshake.
pub const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
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
    /// The mount's options for partners, and the failure domains. `None` if the mount wants no partner, or after
    /// [`Agent::seek_partner`].
    partner: Option<(PartnerStatus, Domains)>,
    listener: TcpListener,
    key_file: KeyFile,
    shared: Arc<Shared>,
}

/// State that the threads of all connections share.
struct Shared {
    /// Mount point of the served mount.
    scope: PathBuf,
    key: Key,
    encrypt: Encrypt,
    munge: Option<Munge>,
    transport: TransportChoice,
    holds: Arc<Holds>,
    service: Arc<PartnerService>,
    log: Log,
    strangers: Strangers,
    /// Number of sessions.
    sessions: AtomicUsize,
    refusals: Mutex<Refusals>,
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
    /// Begins to listen, and writes the agent's address and key to its record in the backing.
    pub fn start(options: AgentOptions) -> Result<Self, AgentError> {
        options.transport.check()?;
        let mount = firn_client::find(&options.path)?.mount;
        let mut connection = Connection::open(&mount)?;
        let region = connection.region()?;
        let partner = connection.status()?.partner;
        let host = options.host.unwrap_or_else(|| match &partner {
            Some(partner) => partner.this_host.clone(),
            None => name_of_host(),
        });
        check_host(&host)?;
        let partner = partner
            .map(|partner| read_domains(&host, partner))
            .transpose()?;
        let failed = |error| AgentError::Listen {
            address: options.listen.to_string(),
            error,
        };
        let listener = TcpListener::bind(options.listen).map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        // The record keeps the partners of an earlier agent, because they have its copies until a new partner has them.
        let earlier = KeyFile::load(&mount.backing, &host).ok();
        let key_file = KeyFile {
            address: advertised_address(bound, options.address.as_deref(), &host),
            key: Key::random()?,
            partner: earlier.as_ref().and_then(|earlier| earlier.partner.clone()),
            formers: earlier.map_or_else(Vec::new, |earlier| earlier.formers),
        };
        key_file.store(&mount.backing, &host)?;
        let copies = Copies::new(
            Copies::beside(region.path.as_path()),
            options.partner_bytes_max.unwrap_or(region.bytes),
        );
        let service =
            PartnerService::new(host, &mount, copies, options.encrypt, options.log.clone());
        let shared = Shared {
            scope: mount.mount_point.clone(),
            key: key_file.key.clone(),
            encrypt: options.encrypt,
            munge: options.munge,
            transport: options.transport,
            holds: Holds::new(
                options
                    .hold_max
                    .unwrap_or_else(|| default_hold_max(region.bytes)),
            ),
            service: Arc::clone(&service),
            log: options.log,
            strangers: Strangers::default(),
            sessions: AtomicUsize::new(0),
            refusals: Mutex::default(),
        };
        Ok(Self {
            mount,
            service,
            partner,
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
        let file = self.key_file.clone();
        let service = Arc::clone(&self.service);
        move || {
            if let Err(error) = file.remove(&service.backing, &service.host) {
                service.log.say(Level::Event, || error.to_string());
            }
            service.leave();
        }
    }

    /// Starts a thread that looks for a partner, if the mount wants one.
    pub fn seek_partner(&mut self) -> Result<(), AgentError> {
        let Some((wanted, domains)) = self.partner.take() else {
            return Ok(());
        };
        let service = Arc::clone(&self.service);
        // An earlier agent of this host may have copied files of other hosts. This agent follows these hosts again. If
        // a host has another partner now, the copies of its files are dropped.
        for source in service.copies.hosts() {
            if let Err(error) = service.adopt(&source) {
                service
                    .log
                    .say(Level::Event, || format!("{source}: {error}"));
            }
        }
        let key_file = self.key_file.clone();
        std::thread::Builder::new()
            .name("agent-choice".into())
            .spawn(move || choose_partners(&service, &key_file, &wanted, &domains))
            .map_err(|error| AgentError::Io {
                what: "cannot start a thread",
                error,
            })?;
        Ok(())
    }

    /// Accepts connections until an error or the end of the process.
    pub fn serve(&self) -> Result<std::convert::Infallible, AgentError> {
        let failed = |error| AgentError::Io {
            what: "cannot accept connections",
            error,
        };
        self.listener.set_nonblocking(true).map_err(failed)?;
        loop {
            match self.listener.accept() {
                Ok((socket, from)) => self.admit(socket, from),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait_for_connection().map_err(failed)?;
                    self.shared.log_refusals(None);
                }
                Err(error) if is_transient(&error) => std::thread::sleep(ACCEPT_RETRY_PAUSE),
                Err(error) => return Err(failed(error)),
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

    /// Starts a thread for a connection, whose peer is a stranger until its handshake is complete.
    fn admit(&self, socket: TcpStream, from: SocketAddr) {
        let stranger = match self.shared.strangers.admit(&socket) {
            Ok(stranger) => stranger,
            Err(error) => return self.shared.log_refusals(Some((from, &error.to_string()))),
        };
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name("agent-puller".into());
        let started = thread.spawn(move || shared.serve(socket, from, stranger));
        if let Err(error) = started {
            let text = format!("cannot start a thread for the connection: {error}");
            self.shared.log_refusals(Some((from, &text)));
        }
    }
}

impl Shared {
    /// Serves one connection from its handshake to its end: the body of its thread.
    fn serve(self: &Arc<Self>, socket: TcpStream, from: SocketAddr, stranger: Stranger) {
        let started_at = Instant::now();
        let link = match self.greet(socket, from, stranger) {
            Ok(link) => link,
            Err(error) => return self.log_refusals(Some((from, &error.to_string()))),
        };
        match self.serve_link(link, from) {
            Ok(sent) => self
                .log
                .say(Level::Event, || summary(from, sent, started_at)),
            Err(error) => self.log.say(Level::Event, || format!("{from}: {error}")),
        }
    }

    /// Carries out the handshake. Returns the connection, and the transports that its puller may choose.
    fn greet(
        &self,
        socket: TcpStream,
        from: SocketAddr,
        stranger: Stranger,
    ) -> Result<(Link<Stream>, Offer), WireError> {
        let near = Some(socket.local_addr()?.ip());
        let terms = Terms {
            munge: self.munge.as_ref(),
            ..Terms::of_tcp(&socket, &self.key, self.encrypt)?
        };
        let mut link = Link::over(Stream::over_tcp(socket)?);
        let deadline = Instant::now() + HANDSHAKE_LIMIT;
        answer_handshake_with(&mut link, &terms, deadline, &mut || stranger.record_hello())?;
        let suffix = if link.is_encrypted() {
            ", encrypted"
        } else {
            ""
        };
        self.log
            .say(Level::Step, || format!("(1) {from} is connected{suffix}"));
        let transport = self.transport.clone();
        Ok((link, Offer { transport, near }))
    }

    /// Serves a connection after its handshake, unless the number of sessions is at its maximum.
    fn serve_link(
        self: &Arc<Self>,
        (link, offer): (Link<Stream>, Offer),
        from: SocketAddr,
    ) -> Result<Sent, WireError> {
        let Some(_session) = SessionSlot::take(self) else {
            let text = format!("{SESSIONS_MAX} pullers are connected, the maximum");
            self.log_refusals(Some((from, &text)));
            return Err(WireError::Ended);
        };
        let mut session = Session::new(
            link,
            Some(&self.scope),
            Some(&self.holds),
            Some(&self.service),
            &self.log,
        )
        .offering(offer);
        let served = session.serve();
        let sent = session.sent();
        served.map(|()| sent)
    }

    /// Counts a refused connection and stores the reason. Logs the refusals that are due. With `None` it only logs.
    fn log_refusals(&self, refused: Option<(SocketAddr, &str)>) {
        let line = {
            let refusals = self.refusals.lock();
            let mut refusals = refusals.unwrap_or_else(PoisonError::into_inner);
            if let Some((from, reason)) = refused {
                refusals.last = format!("{from}: {reason}");
                refusals.count += 1;
            }
            refusals.next_line(Instant::now())
        };
        if let Some(line) = line {
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
        let others = match std::mem::take(&mut self.count) - 1 {
            0 => String::new(),
            count => format!(" (and {count} more since the last line like this)"),
        };
        Some(std::mem::take(&mut self.last) + &others)
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
    serve_transport(link, hold_max, log)
}

fn serve_transport<T: Transport>(
    mut link: Link<T>,
    hold_max: Option<u64>,
    log: &Log,
) -> Result<(), WireError> {
    let deadline = Instant::now() + HANDSHAKE_LIMIT;
    answer_handshake(&mut link, &Terms::of_pipes(), deadline)?;
    let holds = hold_max.map(Holds::new);
    Session::new(link, None, holds.as_ref(), None, log).serve()
}

/// One of the [`SESSIONS_MAX`] sessions. Dropping it releases the slot.
struct SessionSlot(Arc<Shared>);

impl SessionSlot {
    /// Takes a slot; `None` if all are in use.
    fn take(shared: &Arc<Shared>) -> Option<Self> {
        let one_more = |count| (count < SESSIONS_MAX).then_some(count + 1);
        shared
            .sessions
            .try_update(Ordering::AcqRel, Ordering::Acquire, one_more)
            .ok()?;
        Some(Self(Arc::clone(shared)))
    }
}

impl Drop for SessionSlot {
    fn drop(&mut self) {
        self.0.sessions.fetch_sub(1, Ordering::AcqRel);
    }
}

fn name_of_host() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}

/// Reads the file of failure domains that the mount's options name. Fails if the wanted partner is this host.
fn read_domains(
    host: &str,
    partner: PartnerStatus,
) -> Result<(PartnerStatus, Domains), AgentError> {
    if partner.wanted == host {
        return Err(AgentError::OwnPartner { host: host.into() });
    }
    let Some(path) = &partner.domains else {
        return Ok((partner, Domains::default()));
    };
    let invalid = |why: String| AgentError::Domains {
        path: path.as_path().into(),
        why,
    };
    let text = std::fs::read_to_string(path).map_err(|error| invalid(error.to_string()))?;
    let domains = Domains::parse(&text).map_err(|error| invalid(error.to_string()))?;
    Ok((partner, domains))
}

/// Whether accept(2) may succeed later: the peer is gone, a signal interrupted the call, or descriptors or memory are
/// short.
fn is_transient(error: &io::Error) -> bool {
    let shortages = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM];
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted
    ) || error
        .raw_os_error()
        .is_some_and(|errno| shortages.contains(&errno))
}

/// Returns the address to which pullers must connect.
///
/// `configured` may be a name, an IPv4 or IPv6 address, or a name with a port. If it is `None`, the bound address is
/// used, or the host's name if the bound address is unspecified.
fn advertised_address(bound: SocketAddr, configured: Option<&str>, host: &str) -> String {
    let port = bound.port();
    match configured {
        Some(address)
            if address.contains(':') && address.parse::<std::net::Ipv6Addr>().is_err() =>
        {
            address.to_owned()
        }
        Some(address) if address.contains(':') => format!("[{address}]:{port}"),
        Some(address) => format!("{address}:{port}"),
        None if bound.ip().is_unspecified() => format!("{host}:{port}"),
        None => bound.to_string(),
    }
}

/// Returns the log line for the end of a session.
fn summary(from: SocketAddr, sent: Sent, started_at: Instant) -> String {
    let Sent { files, bytes } = sent;
    let seconds = started_at.elapsed().as_secs_f64();
    let mib = bytes as f64 / f64::from(1 << 20);
    format!(
        "{from}: {files} files, {mib:.1} MiB in {seconds:.1} s ({:.0} MiB/s)",
        mib / seconds.max(1e-3)
    )
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
