//! The agent: which peers connect, how many, and for how long.
//!
//! Invariants
//! * At most `STRANGERS_MAX` connections whose puller has not shown the key, each for [`HANDSHAKE_LIMIT`] at most. For one
//!   more, the longest idle of them is closed (`crate::strangers`).
//! * At most `SESSIONS_MAX` others. One more is closed at once.
//! * Peers without the key cost the log one line in `TELL_EVERY`.
//! * A connection is a thread and a buffer of at most one frame; a stranger's is one of
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

/// How long a stranger has to show the key.
pub const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// Pullers at once: a firnd serves 64 connections, and each puller takes one.
const SESSIONS_MAX: usize = 16;
/// How often the log at most says something of connections that were not let in.
const TELL_EVERY: Duration = Duration::from_secs(10);

/// What a line of the log is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Worth knowing.
    Event,
    /// A step of the protocol, by its number in figure 3 of CRUISE.
    Step,
}

/// Where an agent says what it does.
#[derive(Clone)]
pub struct Log {
    write: Arc<dyn Fn(&str) + Send + Sync>,
    with_steps: bool,
}

impl Log {
    /// A log; with the steps of the protocol or without.
    pub fn new(write: impl Fn(&str) + Send + Sync + 'static, with_steps: bool) -> Self {
        Self {
            write: Arc::new(write),
            with_steps,
        }
    }

    pub(crate) fn say(&self, level: Level, text: impl FnOnce() -> String) {
        if level == Level::Event || self.with_steps {
            (self.write)(&text());
        }
    }
}

/// How an agent is started.
pub struct AgentOptions {
    /// A path on the mount that it serves.
    pub path: PathBuf,
    /// Where it listens.
    pub listen: SocketAddr,
    /// Name or address by which pullers reach this host; none: that of `listen`, or the name of the host.
    pub address: Option<String>,
    /// What pullers and partners call this host; none: what the mount is told to call it, or the name of the host.
    pub host: Option<String>,
    /// Bytes of other hosts' files that it keeps copies of; none: as many as the arena has.
    pub partner_bytes_max: Option<u64>,
    /// Bytes of the arena that it may hold at once; none: a quarter.
    pub hold_max: Option<u64>,
    /// Whether bytes are encrypted on their way.
    pub encrypt: Encrypt,
    /// Pullers may show a credential of MUNGE instead of the key.
    pub munge: Option<Munge>,
    /// What pullers may have their bytes carried by.
    pub transport: TransportChoice,
    /// Where it says what it does.
    pub log: Log,
}

/// An agent that listens.
pub struct Agent {
    mount: Mount,
    service: Arc<PartnerService>,
    /// What the mount says of partners; none: it wants none.
    partner: Option<(PartnerStatus, Domains)>,
    listener: TcpListener,
    key_file: KeyFile,
    shared: Arc<Shared>,
}

/// What the threads of all connections have.
struct Shared {
    scope: PathBuf,
    key: Key,
    encrypt: Encrypt,
    munge: Option<Munge>,
    transport: TransportChoice,
    holds: Arc<Holds>,
    service: Arc<PartnerService>,
    log: Log,
    strangers: Strangers,
    sessions: AtomicUsize,
    refusals: Mutex<Refusals>,
}

/// Connections that were not let in since the log has said so.
#[derive(Default)]
struct Refusals {
    told_at: Option<Instant>,
    /// Why the last one was not.
    last: String,
    count: u64,
}

impl Agent {
    /// Listens, and leaves address and key in the backing.
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
        // Until there is another partner, the copies of an earlier agent are where they were.
        let earlier = KeyFile::load(&mount.backing, &host).ok();
        let key_file = KeyFile {
            address: advertised(bound, options.address.as_deref(), &host),
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

    /// Where pullers reach it.
    pub fn address(&self) -> &str {
        &self.key_file.address
    }

    /// The mount that it serves.
    pub fn mount_point(&self) -> &Path {
        &self.mount.mount_point
    }

    /// Removes the key from the backing, and copies that are not needed from memory; may be called from any thread.
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

    /// Looks for a partner, where the mount wants one, from now on.
    pub fn seek_partner(&mut self) -> Result<(), AgentError> {
        let Some((wanted, domains)) = self.partner.take() else {
            return Ok(());
        };
        let service = Arc::clone(&self.service);
        // What an earlier agent of this host has copied is followed further, or dropped where its source has another
        // partner now.
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

    /// Serves until the process ends.
    pub fn serve(&self) -> Result<std::convert::Infallible, AgentError> {
        let failed = |error| AgentError::Io {
            what: "cannot take connections",
            error,
        };
        self.listener.set_nonblocking(true).map_err(failed)?;
        loop {
            match self.listener.accept() {
                Ok((socket, from)) => self.admit(socket, from),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait_for_puller().map_err(failed)?;
                    self.shared.tell_refusals(None);
                }
                // The puller was gone before it was let in, or there are no descriptors now.
                Err(error) if is_passing(&error) => std::thread::sleep(Duration::from_millis(50)),
                Err(error) => return Err(failed(error)),
            }
        }
    }

    /// Not longer than what is to be said may wait.
    fn wait_for_puller(&self) -> io::Result<()> {
        let timeout = Timespec::try_from(TELL_EVERY).ok();
        let mut listener = [PollFd::new(&self.listener, PollFlags::IN)];
        match poll(&mut listener, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn admit(&self, socket: TcpStream, from: SocketAddr) {
        let stranger = match self.shared.strangers.admit(&socket) {
            Ok(stranger) => stranger,
            Err(error) => return self.shared.tell_refusals(Some((from, &error.to_string()))),
        };
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name("agent-puller".into());
        let started = thread.spawn(move || shared.serve(socket, from, stranger));
        if let Err(error) = started {
            let text = format!("no thread for it: {error}");
            self.shared.tell_refusals(Some((from, &text)));
        }
    }
}

impl Shared {
    fn serve(self: &Arc<Self>, socket: TcpStream, from: SocketAddr, stranger: Stranger) {
        let begun = Instant::now();
        let link = match self.greet(socket, from, stranger) {
            Ok(link) => link,
            Err(error) => return self.tell_refusals(Some((from, &error.to_string()))),
        };
        match self.serve_link(link, from) {
            Ok(sent) => self.log.say(Level::Event, || summary(from, sent, begun)),
            Err(error) => self.log.say(Level::Event, || format!("{from}: {error}")),
        }
    }

    /// A connection whose other side has shown the key.
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
        answer_handshake_with(&mut link, &terms, deadline, &mut || stranger.hear())?;
        let how = if link.is_encrypted() {
            ", encrypted"
        } else {
            ""
        };
        self.log
            .say(Level::Step, || format!("(1) {from} is connected{how}"));
        let transport = self.transport.clone();
        Ok((link, Offer { transport, near }))
    }

    fn serve_link(
        self: &Arc<Self>,
        (link, offer): (Link<Stream>, Offer),
        from: SocketAddr,
    ) -> Result<Sent, WireError> {
        let Some(_session) = SessionSlot::take(self) else {
            let text = format!("{SESSIONS_MAX} pullers are connected, and no more at once");
            self.tell_refusals(Some((from, &text)));
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

    /// Says that a connection was not let in, or with none what was not said yet: at once, but seldom.
    fn tell_refusals(&self, refused: Option<(SocketAddr, &str)>) {
        let line = {
            let refusals = self.refusals.lock();
            let mut refusals = refusals.unwrap_or_else(PoisonError::into_inner);
            if let Some((from, why)) = refused {
                refusals.last = format!("{from}: {why}");
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
    /// What is to be said now.
    fn next_line(&mut self, now: Instant) -> Option<String> {
        let is_early = |told_at: Instant| now.duration_since(told_at) < TELL_EVERY;
        if self.count == 0 || self.told_at.is_some_and(is_early) {
            return None;
        }
        self.told_at = Some(now);
        let others = match std::mem::take(&mut self.count) - 1 {
            0 => String::new(),
            count => format!(" (and {count} more since the last line like this)"),
        };
        Some(std::mem::take(&mut self.last) + &others)
    }
}

/// Serves one puller that started this agent itself, over ssh: the connection identifies it.
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

/// A puller among those that there may be.
struct SessionSlot(Arc<Shared>);

impl SessionSlot {
    fn take(shared: &Arc<Shared>) -> Option<Self> {
        let free = |taken| (taken < SESSIONS_MAX).then_some(taken + 1);
        let taken = &shared.sessions;
        taken
            .try_update(Ordering::AcqRel, Ordering::Acquire, free)
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

/// The failure domains that a mount names, read before the agent begins.
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
    let refused = |why: String| AgentError::Domains {
        path: path.as_path().into(),
        why,
    };
    let text = std::fs::read_to_string(path).map_err(|error| refused(error.to_string()))?;
    let domains = Domains::parse(&text).map_err(|error| refused(error.to_string()))?;
    Ok((partner, domains))
}

fn is_passing(error: &io::Error) -> bool {
    let no_descriptors = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM];
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted
    ) || error
        .raw_os_error()
        .is_some_and(|errno| no_descriptors.contains(&errno))
}

/// What pullers connect to: an address that listens everywhere is none.
fn advertised(bound: SocketAddr, given: Option<&str>, host: &str) -> String {
    let port = bound.port();
    match given {
        Some(given) if given.contains(':') && given.parse::<std::net::Ipv6Addr>().is_err() => {
            given.to_owned()
        }
        Some(given) if given.contains(':') => format!("[{given}]:{port}"),
        Some(given) => format!("{given}:{port}"),
        None if bound.ip().is_unspecified() => format!("{host}:{port}"),
        None => bound.to_string(),
    }
}

fn summary(from: SocketAddr, sent: Sent, begun: Instant) -> String {
    let Sent { files, bytes } = sent;
    let seconds = begun.elapsed().as_secs_f64();
    let mib = bytes as f64 / f64::from(1 << 20);
    format!(
        "{from}: {files} files, {mib:.1} MiB in {seconds:.1} s ({:.0} MiB/s)",
        mib / seconds.max(1e-3)
    )
}

/// What the line says that an agent begins with.
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
    fn a_crowd_of_strangers_costs_a_line_in_ten_seconds() {
        let mut refusals = Refusals::default();
        let begun = Instant::now();
        let mut lines = Vec::new();
        // 1,000 a second for 25 seconds.
        for at in 0..25_000_u64 {
            refusals.last = format!("stranger {at}");
            refusals.count += 1;
            lines.extend(refusals.next_line(begun + Duration::from_millis(at)));
        }
        lines.extend(refusals.next_line(begun + Duration::from_secs(60)));
        assert_eq!(
            lines,
            [
                "stranger 0",
                "stranger 10000 (and 9999 more since the last line like this)",
                "stranger 20000 (and 9999 more since the last line like this)",
                "stranger 24999 (and 4998 more since the last line like this)",
            ]
        );
        assert_eq!(refusals.next_line(begun + Duration::from_secs(90)), None);
    }
}
