//! The exporter serves the metrics of all mounts to collectors over HTTP.
//!
//! Promises
//! * A firnd that does not answer within [`ANSWER_WITHIN`] counts as down, and does not delay the metrics of other
//!   mounts. At most one question to each firnd is pending.
//! * A client has [`CLIENT_WITHIN`] for its request and the response. A request has at most [`http::REQUEST_BYTES_MAX`]
//!   bytes.
//! * At most [`CLIENTS_MAX`] clients are served at once; each further client is told to retry later.
//! * SIGTERM and SIGINT end the exporter.

mod http;
mod listener;

use std::collections::HashSet;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use firn_client::{ClientError, Connection, Mount};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::failure::{FAILED, Failure};
use crate::metrics::{self, MountScrape};

pub use listener::{Address, Listener};

/// Timeout for the answer of a mount's firnd.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// Maximum age of metrics that are given to another client without asking the mounts again.
const FRESH: Duration = Duration::from_millis(500);
/// Timeout for a client's request and its response together.
const CLIENT_WITHIN: Duration = Duration::from_secs(10);
/// Maximum number of clients that are served at once.
const CLIENTS_MAX: usize = 16;

/// Asks the mounts, and keeps the last metrics.
#[derive(Default)]
pub struct Scraper {
    /// Mount points whose firnd has not answered an earlier question yet.
    asked: Arc<Mutex<HashSet<PathBuf>>>,
    /// The last metrics, and when they were collected.
    last: Mutex<Option<(Instant, Arc<str>)>>,
}

/// Locks a mutex whose data is valid even after a panic of a thread that had it locked.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Scraper {
    /// Returns the metrics of all mounts that this user may ask, as text. They are at most `FRESH` old.
    pub fn text(&self) -> Result<Arc<str>, Failure> {
        // The lock admits one scrape at a time. Clients that wait for it get the same metrics.
        let mut last = lock(&self.last);
        if let Some((at, text)) = &*last
            && at.elapsed() < FRESH
        {
            return Ok(Arc::clone(text));
        }
        let text: Arc<str> = metrics::text(&self.scrape()?).into();
        *last = Some((Instant::now(), Arc::clone(&text)));
        Ok(text)
    }

    /// Asks the firnd of each mount at the same time, and collects the answers until the timeout.
    ///
    /// A mount whose earlier question is still pending is not asked again, and counts as down.
    fn scrape(&self) -> Result<Vec<MountScrape>, Failure> {
        let mounts = firn_client::mounts()?;
        let deadline = Instant::now() + ANSWER_WITHIN;
        let (sender, answers) = channel();
        let mut waits = 0;
        for (index, mount) in mounts.iter().enumerate() {
            // The earlier question still waits for this firnd. A second one would only add a waiting thread.
            if !lock(&self.asked).insert(mount.mount_point.clone()) {
                continue;
            }
            let (sender, asked, mount) = (sender.clone(), Arc::clone(&self.asked), mount.clone());
            let ask = move || {
                let answer = ask_status(&mount);
                lock(&asked).remove(&mount.mount_point);
                let _ = sender.send((index, answer));
            };
            let thread = std::thread::Builder::new().name("firn-scrape".into());
            match thread.spawn(ask) {
                Ok(_) => waits += 1,
                Err(_) => drop(lock(&self.asked).remove(&mounts[index].mount_point)),
            }
        }
        let mut scraped: Vec<Option<MountScrape>> = mounts
            .iter()
            .map(|mount| Some(MountScrape::down(mount)))
            .collect();
        while waits > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok((index, answer)) = answers.recv_timeout(left) else {
                break;
            };
            waits -= 1;
            match answer {
                Ok(status) => scraped[index] = Some(MountScrape::Up(Box::new(status))),
                // The firnd may be healthy, but its socket is in another runtime directory. So the mount is left out,
                // not shown as down.
                Err(ClientError::NoSocket { .. }) => scraped[index] = None,
                Err(_) => {}
            }
        }
        Ok(scraped.into_iter().flatten().collect())
    }
}

/// Asks the firnd of a mount for its status. May wait for longer than [`ANSWER_WITHIN`].
fn ask_status(mount: &Mount) -> Result<firn_protocol::Status, ClientError> {
    Connection::open(mount)?.status()
}

/// Becomes readable when a signal asks the exporter to end.
pub struct EndSignal(UnixStream);

impl EndSignal {
    /// Catches SIGTERM and SIGINT from now on.
    pub fn on_signals() -> Result<Self, Failure> {
        let failed = |error| Failure::new(FAILED, format!("cannot watch for signals: {error}"));
        let (read, write) = UnixStream::pair().map_err(failed)?;
        for signal in [SIGTERM, SIGINT] {
            let write = write.try_clone().map_err(failed)?;
            signal_hook::low_level::pipe::register(signal, write).map_err(failed)?;
        }
        Ok(Self(read))
    }

    /// Waits for a signal, at most for `limit`. Returns whether one came.
    pub fn wait(&self, limit: Duration) -> Result<bool, Failure> {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        wait_for(&mut fds, Some(limit))?;
        Ok(!fds[0].revents().is_empty())
    }
}

/// Waits until a descriptor is ready, a signal arrives, or the limit is over.
fn wait_for(fds: &mut [PollFd<'_>], limit: Option<Duration>) -> Result<(), Failure> {
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    match poll(fds, limit.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(Failure::new(FAILED, format!("cannot wait: {error}"))),
    }
}

/// Serves metrics to the clients of all listeners until a signal comes.
pub fn serve(listeners: &[Listener], ending: &EndSignal) -> Result<(), Failure> {
    let scraper = Arc::new(Scraper::default());
    let clients = Arc::new(AtomicUsize::new(0));
    loop {
        let sockets = listeners.iter().map(|one| PollFd::new(one, PollFlags::IN));
        let mut fds: Vec<PollFd<'_>> = sockets.collect();
        fds.push(PollFd::new(&ending.0, PollFlags::IN));
        wait_for(&mut fds, None)?;
        let is_ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if is_ready[listeners.len()] {
            return Ok(());
        }
        for (listener, _) in listeners.iter().zip(&is_ready).filter(|(_, ready)| **ready) {
            // An error concerns one client: its connection has ended, or no descriptor is free for it. The next client
            // is served.
            match listener.accept() {
                Ok(Some(client)) => begin(client, &scraper, &clients),
                Ok(None) => {}
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }
}

/// Counts a client as long as it is served.
struct ServedClient(Arc<AtomicUsize>);

impl Drop for ServedClient {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Serves a client in a separate thread, or refuses it if [`CLIENTS_MAX`] clients are served already.
fn begin(client: listener::Client, scraper: &Arc<Scraper>, clients: &Arc<AtomicUsize>) {
    let seat = ServedClient(Arc::clone(clients));
    if clients.fetch_add(1, Ordering::AcqRel) >= CLIENTS_MAX {
        // The maximum number of clients is served. The refusal needs no thread, because the request is not read.
        http::refuse(client);
        return;
    }
    let scraper = Arc::clone(scraper);
    let thread = std::thread::Builder::new().name("firn-http".into());
    let serve = move || {
        let _seat = seat;
        http::serve(client, Instant::now() + CLIENT_WITHIN, &|| scraper.text());
    };
    // If no thread can be started, the client sees that its connection is closed.
    let _ = thread.spawn(serve);
}

impl AsFd for Listener {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd()
    }
}
