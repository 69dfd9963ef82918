//! The exporter serves the metrics of all mounts to collectors over HTTP.
//!
//! It gets the metrics of a mount from the mount's daemon, firnd.
//!
//! Promises
//! * A firnd that does not answer within [`MOUNT_TIMEOUT`] counts as down, and does not delay the metrics of other
//!   mounts. At most one question to each firnd is pending.
//! * A client has [`CLIENT_TIMEOUT`] for its request and the response. A request has at most
//!   [`http::REQUEST_BYTES_MAX`] bytes.
//! * At most [`CLIENTS_MAX`] clients are served at once; each further client is told to retry later.
//! * SIGTERM and SIGINT end the exporter.

mod http;
mod listener;

use std::collections::HashSet;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use firn_client::{ClientError, Connection, Mount};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::failure::{FAILED, Failure};
use crate::metrics::{self, MountScrape};

pub use listener::{Address, Listener};

/// Timeout for the answer of a mount's firnd.
const MOUNT_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum age of metrics that are given to another client without asking the mounts again.
const METRICS_AGE_MAX: Duration = Duration::from_millis(500);
/// Timeout for a client's request and its response together.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after accept(2) failed. An error that lasts, such as EMFILE, then uses little CPU time.
const ACCEPT_ERROR_PAUSE: Duration = Duration::from_millis(20);
/// Maximum number of clients that are served at once.
const CLIENTS_MAX: usize = 16;

/// Asks the mounts, and stores the last metrics.
#[derive(Default)]
pub struct Scraper {
    /// Mount points whose firnd has not answered an earlier question yet.
    pending_mounts: Arc<Mutex<HashSet<PathBuf>>>,
    /// The last metrics. `None` means that none were collected yet.
    last_metrics: Mutex<Option<CollectedMetrics>>,
}

/// Metrics of all mounts as text.
struct CollectedMetrics {
    /// When the metrics were collected.
    collected_at: Instant,
    /// The metrics in the Prometheus text format.
    text: Arc<str>,
}

/// Locks a mutex whose data is valid even after a panic of a thread that had it locked.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Scraper {
    /// Returns the metrics of all mounts that this user may ask, as text. They are at most `METRICS_AGE_MAX` old.
    pub fn metrics_text(&self) -> Result<Arc<str>, Failure> {
        // The lock admits one scrape at a time. Clients that wait for it get the same metrics.
        let mut last_metrics = lock(&self.last_metrics);
        if let Some(metrics) = &*last_metrics
            && metrics.collected_at.elapsed() < METRICS_AGE_MAX
        {
            return Ok(Arc::clone(&metrics.text));
        }
        let text: Arc<str> = metrics::text(&self.scrape_mounts()?).into();
        *last_metrics = Some(CollectedMetrics {
            collected_at: Instant::now(),
            text: Arc::clone(&text),
        });
        Ok(text)
    }

    /// Asks firnd, the daemon, of all mounts at the same time, and collects the answers until the timeout. Returns a
    /// result for each mount, except those with a firnd that has its socket in another runtime directory.
    ///
    /// A mount whose earlier question is still pending is not asked again, and counts as down.
    fn scrape_mounts(&self) -> Result<Vec<MountScrape>, Failure> {
        let mounts = firn_client::mounts()?;
        let deadline = Instant::now() + MOUNT_TIMEOUT;
        let (answer_sender, answer_receiver) = channel();
        let mut pending_answers = 0;
        for (index, mount) in mounts.iter().enumerate() {
            if self.ask_in_thread(index, mount, &answer_sender) {
                pending_answers += 1;
            }
        }
        // A mount counts as down until its answer arrives. `None` leaves a mount out.
        let mut scrapes: Vec<Option<MountScrape>> = mounts
            .iter()
            .map(|mount| Some(MountScrape::down(mount)))
            .collect();
        while pending_answers > 0 {
            let remaining_time = deadline.saturating_duration_since(Instant::now());
            let Ok(answer) = answer_receiver.recv_timeout(remaining_time) else {
                break;
            };
            pending_answers -= 1;
            match answer.status {
                Ok(status) => {
                    scrapes[answer.mount_index] = Some(MountScrape::Up(Box::new(status)));
                }
                // The firnd may be healthy, but its socket is in another runtime directory. So the mount is left out,
                // not shown as down.
                Err(ClientError::NoSocket { .. }) => scrapes[answer.mount_index] = None,
                Err(_) => {}
            }
        }
        Ok(scrapes.into_iter().flatten().collect())
    }

    /// Starts a thread that asks firnd, the daemon of a mount, for its status, and sends the answer. Returns whether an
    /// answer will come: not if an earlier question is still pending, or if no thread can be started.
    fn ask_in_thread(
        &self,
        mount_index: usize,
        mount: &Mount,
        answer_sender: &Sender<StatusAnswer>,
    ) -> bool {
        // A second question to a firnd that does not answer would only add a waiting thread.
        if !lock(&self.pending_mounts).insert(mount.mount_point.clone()) {
            return false;
        }
        let pending_mounts = Arc::clone(&self.pending_mounts);
        let answer_sender = answer_sender.clone();
        let asked_mount = mount.clone();
        let ask = move || {
            let status = ask_status(&asked_mount);
            lock(&pending_mounts).remove(&asked_mount.mount_point);
            // A scrape that has reached its deadline no longer receives.
            let _ = answer_sender.send(StatusAnswer {
                mount_index,
                status,
            });
        };
        let thread = std::thread::Builder::new().name("firn-scrape".into());
        let is_started = thread.spawn(ask).is_ok();
        if !is_started {
            lock(&self.pending_mounts).remove(&mount.mount_point);
        }
        is_started
    }
}

/// The answer of one mount during a scrape.
struct StatusAnswer {
    /// Index of the mount in the list of the scrape.
    mount_index: usize,
    status: Result<firn_protocol::Status, ClientError>,
}

/// Asks the firnd of a mount for its status. May wait for longer than [`MOUNT_TIMEOUT`].
fn ask_status(mount: &Mount) -> Result<firn_protocol::Status, ClientError> {
    Connection::open(mount)?.status()
}

/// Becomes readable when a signal asks the exporter to end.
pub struct EndSignal(UnixStream);

impl EndSignal {
    /// Catches SIGTERM and SIGINT from now on.
    pub fn on_signals() -> Result<Self, Failure> {
        let failed = |error| Failure::new(FAILED, format!("cannot watch for signals: {error}"));
        let (read_end, write_end) = UnixStream::pair().map_err(failed)?;
        for signal in [SIGTERM, SIGINT] {
            let signal_write_end = write_end.try_clone().map_err(failed)?;
            signal_hook::low_level::pipe::register(signal, signal_write_end).map_err(failed)?;
        }
        Ok(Self(read_end))
    }

    /// Waits for a signal, at most for `timeout`. Returns whether one came.
    pub fn wait(&self, timeout: Duration) -> Result<bool, Failure> {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        poll_fds(&mut fds, Some(timeout))?;
        Ok(!fds[0].revents().is_empty())
    }
}

/// Waits until a descriptor is ready, a signal arrives, or the timeout is over. Without a timeout the wait is
/// unlimited.
fn poll_fds(fds: &mut [PollFd<'_>], timeout: Option<Duration>) -> Result<(), Failure> {
    let timespec = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    match poll(fds, timespec.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(Failure::new(FAILED, format!("cannot wait: {error}"))),
    }
}

/// Serves metrics to the clients of all listeners until a signal (SIGTERM, SIGINT) comes. Fails if poll(2) fails.
pub fn serve(listeners: &[Listener], end_signal: &EndSignal) -> Result<(), Failure> {
    let scraper = Arc::new(Scraper::default());
    let client_count = Arc::new(AtomicUsize::new(0));
    loop {
        let mut fds: Vec<PollFd<'_>> = Vec::with_capacity(listeners.len() + 1);
        for listener in listeners {
            fds.push(PollFd::new(listener, PollFlags::IN));
        }
        let signal_index = fds.len();
        fds.push(PollFd::new(&end_signal.0, PollFlags::IN));
        poll_fds(&mut fds, None)?;
        let is_ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if is_ready[signal_index] {
            return Ok(());
        }
        for (listener, is_ready) in listeners.iter().zip(is_ready) {
            if !is_ready {
                continue;
            }
            // An error concerns one client: its connection has ended, or no descriptor is free for it. The next client
            // is served.
            match listener.accept() {
                Ok(Some(client)) => start_serving(client, &scraper, &client_count),
                Ok(None) => {}
                Err(_) => std::thread::sleep(ACCEPT_ERROR_PAUSE),
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
fn start_serving(
    client: listener::Client,
    scraper: &Arc<Scraper>,
    client_count: &Arc<AtomicUsize>,
) {
    // The count goes down when this value is dropped, on every path.
    let counted_client = ServedClient(Arc::clone(client_count));
    if client_count.fetch_add(1, Ordering::AcqRel) >= CLIENTS_MAX {
        // The refusal needs no thread, because the request is not read.
        http::refuse(client);
        return;
    }
    let scraper = Arc::clone(scraper);
    let thread = std::thread::Builder::new().name("firn-http".into());
    let serve = move || {
        let _counted_client = counted_client;
        let deadline = Instant::now() + CLIENT_TIMEOUT;
        http::serve(client, deadline, &|| scraper.metrics_text());
    };
    // If no thread can be started, the client sees that its connection is closed.
    let _ = thread.spawn(serve);
}

impl AsFd for Listener {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd()
    }
}
