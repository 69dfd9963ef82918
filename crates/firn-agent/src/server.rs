//! The agent: who connects, how many, and for how long.
//!
//! Invariants
//! * At most `STRANGERS_MAX` connections whose puller has not shown the key, each for [`HANDSHAKE_LIMIT`] at most;
//!   at most `SESSIONS_MAX` others. One more is closed at once.
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

use crate::auth::{Key, Terms, answer_handshake};
use crate::encryption::{Encrypt, Encryption};
use crate::error::{AgentError, WireError};
use crate::exposure::Offer;
use crate::holds::Holds;
use crate::key_file::{KeyFile, check_host};
use crate::link::Link;
use crate::munge::Munge;
use crate::partner::{Desk, Domains, Shelf, choose_partners};
use crate::session::{Sent, Session};
use crate::source::default_hold_max;
use crate::transport::{Stream, Transport};
use crate::transport_choice::TransportChoice;

/// How long a stranger has to show the key.
pub const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// Strangers at once.
const STRANGERS_MAX: usize = 16;
/// Pullers at once: a firnd serves 64 connections, and each puller takes one.
const SESSIONS_MAX: usize = 16;
/// How often at most the log says that there are too many connections.
const CROWD_EVERY: Duration = Duration::from_secs(10);

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
    desk: Arc<Desk>,
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
    desk: Arc<Desk>,
    log: Log,
    strangers: AtomicUsize,
    sessions: AtomicUsize,
    crowd_told: Mutex<Option<Instant>>,
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
        let key_file = KeyFile {
            address: advertised(bound, options.address.as_deref(), &host),
            key: Key::random()?,
            // Until there is another one, the copies of an earlier agent are where they were.
            partner: KeyFile::load(&mount.backing, &host)
                .ok()
                .and_then(|earlier| earlier.partner),
        };
        key_file.store(&mount.backing, &host)?;
        let shelf = Shelf::new(
            Shelf::beside(region.path.as_path()),
            options.partner_bytes_max.unwrap_or(region.bytes),
        );
        let desk = Desk::new(host, &mount, shelf, options.encrypt, options.log.clone());
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
            desk: Arc::clone(&desk),
            log: options.log,
            strangers: AtomicUsize::new(0),
            sessions: AtomicUsize::new(0),
            crowd_told: Mutex::new(None),
        };
        Ok(Self {
            mount,
            desk,
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

    /// What takes its key out of the backing, and the copies that nobody needs out of memory, from any thread.
    pub fn remover(&self) -> impl Fn() + Send + 'static {
        let file = self.key_file.clone();
        let desk = Arc::clone(&self.desk);
        move || {
            if let Err(error) = file.remove(&desk.backing, &desk.host) {
                desk.log.say(Level::Event, || error.to_string());
            }
            desk.leave();
        }
    }

    /// Looks for a partner, where the mount wants one, from now on.
    pub fn seek_partner(&mut self) -> Result<(), AgentError> {
        let Some((wanted, domains)) = self.partner.take() else {
            return Ok(());
        };
        let desk = Arc::clone(&self.desk);
        let key_file = self.key_file.clone();
        std::thread::Builder::new()
            .name("agent-choice".into())
            .spawn(move || choose_partners(&desk, &key_file, &wanted, &domains))
            .map_err(|error| AgentError::Io {
                what: "cannot start a thread",
                error,
            })?;
        Ok(())
    }

    /// Serves until the process ends.
    pub fn serve(&self) -> Result<std::convert::Infallible, AgentError> {
        loop {
            match self.listener.accept() {
                Ok((socket, from)) => self.admit(socket, from),
                // The puller was gone before it was let in, or there are no descriptors now.
                Err(error) if is_passing(&error) => std::thread::sleep(Duration::from_millis(50)),
                Err(error) => {
                    return Err(AgentError::Io {
                        what: "cannot take connections",
                        error,
                    });
                }
            }
        }
    }

    fn admit(&self, socket: TcpStream, from: SocketAddr) {
        let Some(slot) = Slot::take(&self.shared, Kind::Stranger) else {
            self.shared.tell_crowd(from);
            return;
        };
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name("agent-puller".into());
        let started = thread.spawn(move || shared.serve(socket, from, slot));
        if let Err(error) = started {
            self.shared.log.say(Level::Event, || {
                format!("{from}: no thread for it: {error}")
            });
        }
    }
}

impl Shared {
    fn serve(self: &Arc<Self>, socket: TcpStream, from: SocketAddr, stranger: Slot) {
        let begun = Instant::now();
        let served = self.serve_link(socket, from, stranger);
        match served {
            Ok(sent) => self.log.say(Level::Event, || summary(from, sent, begun)),
            Err(error) => self.log.say(Level::Event, || format!("{from}: {error}")),
        }
    }

    fn serve_link(
        self: &Arc<Self>,
        socket: TcpStream,
        from: SocketAddr,
        stranger: Slot,
    ) -> Result<Sent, WireError> {
        let near = Some(socket.local_addr()?.ip());
        let mut link = Link::over(Stream::over_tcp(socket)?);
        let until = Instant::now() + HANDSHAKE_LIMIT;
        let terms = Terms {
            key: Some(&self.key),
            munge: self.munge.as_ref(),
            encryption: self.encrypt.towards(from.ip()),
        };
        answer_handshake(&mut link, &terms, until)?;
        drop(stranger);
        let Some(_session) = Slot::take(self, Kind::Session) else {
            self.tell_crowd(from);
            return Err(WireError::Ended);
        };
        let how = if link.is_encrypted() {
            ", encrypted"
        } else {
            ""
        };
        self.log
            .say(Level::Step, || format!("(1) {from} is connected{how}"));
        let transport = self.transport.clone();
        let mut session = Session::new(
            link,
            Some(&self.scope),
            Some(&self.holds),
            Some(&self.desk),
            &self.log,
        )
        .offering(Offer { transport, near });
        let served = session.serve();
        let sent = session.sent();
        served.map(|()| sent)
    }

    fn tell_crowd(&self, from: SocketAddr) {
        let mut told = self
            .crowd_told
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if told.is_none_or(|told| told.elapsed() > CROWD_EVERY) {
            *told = Some(Instant::now());
            self.log.say(Level::Event, || {
                format!("{from}: too many connections: this one and perhaps others were closed")
            });
        }
    }
}

/// Serves one puller that started this agent itself, over ssh: the connection says who it is.
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
    // Who carries the pipes encrypts them.
    let terms = Terms {
        key: None,
        munge: None,
        encryption: Encryption::Refused,
    };
    answer_handshake(&mut link, &terms, Instant::now() + HANDSHAKE_LIMIT)?;
    let holds = hold_max.map(Holds::new);
    Session::new(link, None, holds.as_ref(), None, log).serve()
}

/// What a connection counts as.
#[derive(Clone, Copy)]
enum Kind {
    Stranger,
    Session,
}

/// A connection among those that there may be.
struct Slot {
    shared: Arc<Shared>,
    kind: Kind,
}

impl Slot {
    fn take(shared: &Arc<Shared>, kind: Kind) -> Option<Self> {
        let (count, most) = shared.counter(kind);
        let free = |taken| (taken < most).then_some(taken + 1);
        count
            .try_update(Ordering::AcqRel, Ordering::Acquire, free)
            .ok()?;
        Some(Self {
            shared: Arc::clone(shared),
            kind,
        })
    }
}

impl Shared {
    fn counter(&self, kind: Kind) -> (&AtomicUsize, usize) {
        match kind {
            Kind::Stranger => (&self.strangers, STRANGERS_MAX),
            Kind::Session => (&self.sessions, SESSIONS_MAX),
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.shared
            .counter(self.kind)
            .0
            .fetch_sub(1, Ordering::AcqRel);
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
