//! The control socket of firnd (the process that serves a mount): one JSON request per line, answered by a [`Service`].
//!
//! Promises
//! * Only the user of this firnd, and root, are answered (SO_PEERCRED).
//! * A broken or slow client uses one thread and no more. [`slots`] says how many connections are served, and which one
//!   is closed when another one comes.
//! * What a connection holds (lists of a file's bytes, transactions that it owns) ends with it. A connection that holds
//!   something, or has a request that is being answered, is never closed in favour of another. A connection that is
//!   closed in favour of another reads [`Reply::Closed`] last.
//! * The accepting thread never waits for a client.

mod slots;

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::time::Duration;

use firn_protocol::{Holder, Reply, Request};
use firn_workers::{Class, Workers, spawn_thread};
use parking_lot::Mutex;
use rustix::fs::Mode;
use rustix::net::SendFlags;

use crate::chunks::ChunkLists;
use crate::owners::ControlPeer;
use crate::partner::PartnerReporter;
use crate::pulls::PullConnection;
use slots::{AcquiredSlot, Admission, ClosedConnection, ConnectionSlots, SlotState};

/// Longest request in bytes: a path of PATH_MAX, escaped, and some words.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// Pause after a connection could not be accepted.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
/// A client that does not take its reply for this long is disconnected.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// Answers the requests of the control socket.
pub(crate) trait Service: Send + Sync + 'static {
    /// Returns the final reply. `send_progress` sends progress before it, and returns false once the client is gone.
    fn answer(
        &self,
        request: Request,
        client: &mut ControlClient,
        send_progress: &mut dyn FnMut(Reply) -> bool,
    ) -> Answer;
    /// Returns whether the end of this connection would end something that it holds.
    fn holds_state_of(&self, client: &ControlClient) -> bool;
}

/// A connection, and what it holds.
pub(crate) struct ControlClient {
    pub(crate) peer: ControlPeer,
    pub(crate) lists: ChunkLists,
    /// Set if the client is an agent that reports what the partner host has copied.
    pub(crate) partner: Option<PartnerReporter>,
    /// Set if the client is an agent that copies files for another host.
    pub(crate) pull: Option<PullConnection>,
}

/// The final reply to a request.
pub(crate) struct Answer {
    pub(crate) reply: Reply,
    /// Gets a message after the reply was sent or lost; `None` if no thread waits for that.
    pub(crate) sent: Option<Sender<()>>,
}

impl From<Reply> for Answer {
    fn from(reply: Reply) -> Self {
        Self { reply, sent: None }
    }
}

/// A listening control socket. Its drop removes the socket and ends the accepting thread.
pub(crate) struct ControlListener {
    path: PathBuf,
    stop: Arc<AtomicBool>,
}

impl ControlListener {
    /// Starts the control socket at `path`: listens, and accepts connections on a thread. Replaces the socket that an
    /// earlier, dead firnd left there. Only this user may connect.
    pub(crate) fn start(
        path: &Path,
        service: Arc<dyn Service>,
        workers: Workers,
    ) -> io::Result<Self> {
        // bind(2) fails if the path exists.
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // The umask belongs to the whole process. Nothing else creates files at this time, and the lock admits one
        // start.
        static UMASK: Mutex<()> = Mutex::new(());
        let umask_guard = UMASK.lock();
        // Only this user may connect to the socket.
        let umask = rustix::process::umask(Mode::from_raw_mode(0o177));
        let bind_result = UnixListener::bind(path);
        rustix::process::umask(umask);
        // The umask is the old one again.
        drop(umask_guard);
        let listener = bind_result?;
        let stop = Arc::new(AtomicBool::new(false));
        let thread_stop = Arc::clone(&stop);
        spawn_thread("firn-control", move || {
            accept_connections(&listener, &service, &workers, &thread_stop);
        })?;
        Ok(Self {
            path: path.into(),
            stop,
        })
    }
}

impl Drop for ControlListener {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // The connection wakes the thread in accept(2).
        let _ = UnixStream::connect(&self.path);
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Accepts connections of the control socket until the first one after `stop` is set, which only wakes this thread.
fn accept_connections(
    listener: &UnixListener,
    service: &Arc<dyn Service>,
    workers: &Workers,
    stop: &AtomicBool,
) {
    let slots = Arc::new(ConnectionSlots::default());
    for stream in listener.incoming() {
        if stop.load(Ordering::Acquire) {
            return;
        }
        match stream {
            Ok(stream) => admit_connection(Arc::new(stream), &slots, service, workers),
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection on the control socket");
                // The process probably has no free descriptor; without a pause this loop would use a CPU.
                std::thread::sleep(ACCEPT_RETRY_DELAY);
            }
        }
    }
}

/// Returns the process at the other end of a connection. Fails with the reason for a refusal if the process belongs to
/// another user than this process's own or root.
fn authenticate_peer(stream: &Arc<UnixStream>) -> Result<ControlPeer, String> {
    let credentials = match firn_trust::socket_peer(stream) {
        Ok(credentials) => credentials,
        Err(error) => return Err(format!("the connecting process is unknown: {error}")),
    };
    let is_root = credentials.uid == 0;
    if credentials.uid != rustix::process::geteuid().as_raw() && !is_root {
        return Err("this firnd belongs to another user".into());
    }
    Ok(ControlPeer {
        stream: Arc::clone(stream),
        pid: credentials.pid.map_or(0, std::num::NonZeroU32::get),
        uid: credentials.uid,
        gid: credentials.gid,
    })
}

/// Assigns a slot and a thread to a new connection of the control socket, or sends the client the reason why it gets
/// none. Slots limit the connections; if all are used, an idle connection is closed in favour of this one.
fn admit_connection(
    stream: Arc<UnixStream>,
    slots: &Arc<ConnectionSlots>,
    service: &Arc<dyn Service>,
    workers: &Workers,
) {
    let peer = match authenticate_peer(&stream) {
        Ok(peer) => peer,
        Err(message) => {
            let errno = libc::EPERM;
            return try_send_last(&stream, &Reply::Error { errno, message });
        }
    };
    let pid = peer.pid;
    let id = match slots.acquire(&stream, pid) {
        Ok(AcquiredSlot { id, to_close }) => {
            close_idle(to_close);
            id
        }
        Err(holders) => {
            tracing::warn!(
                pid,
                "a connection to the control socket is refused: all connections are in use"
            );
            return try_send_last(&stream, &busy_reply(holders));
        }
    };
    let started = workers.try_run(Class::ControlClient, {
        let stream = Arc::clone(&stream);
        let slots = Arc::clone(slots);
        let service = Arc::clone(service);
        move || {
            // An error means that the client is gone or too slow, and concerns nothing else.
            let _ = serve_connection(peer, id, &slots, &*service);
            // The connection ends for the client now, even if another reference keeps the descriptor open.
            let _ = stream.shutdown(Shutdown::Both);
            slots.release(id);
        }
    });
    if let Err(error) = started {
        slots.release(id);
        // Connections that were closed in favour of others may still have their threads.
        tracing::warn!(pid, %error, "a connection to the control socket is refused: no thread is available");
        try_send_last(&stream, &busy_reply(Vec::new()));
    }
}

/// Returns the reply to a client for which there is no connection left; it names the processes that have them.
fn busy_reply(holders: Vec<Holder>) -> Reply {
    Reply::Busy {
        connections: slots::ORDINARY_SLOTS as u32,
        holders,
    }
}

/// Closes an idle connection. [`Reply::Closed`] tells its client that a request it may have sent was not carried out.
fn close_idle(to_close: Option<ClosedConnection>) {
    let Some(stream) = to_close else { return };
    tracing::debug!("an idle control connection is closed in favour of another one");
    try_send_last(&stream, &Reply::Closed);
    // It fails only if the client has disconnected already.
    let _ = stream.shutdown(Shutdown::Both);
}

/// Sends a last message without waiting, because the client may not read it.
fn try_send_last(stream: &UnixStream, reply: &Reply) {
    if let Ok(line) = encode_line(reply) {
        let _ = rustix::net::send(stream, &line, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }
}

/// Serves one connection of the control socket until the client closes it, a request is invalid, or the connection
/// loses its slot to another one. What the connection holds (such as lists of a file's bytes) is released at the end.
/// The caller releases the slot.
fn serve_connection(
    peer: ControlPeer,
    id: u64,
    slots: &ConnectionSlots,
    service: &dyn Service,
) -> io::Result<()> {
    let stream = &*Arc::clone(&peer.stream);
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    let mut reader = BufReader::new(stream);
    let mut client = ControlClient {
        peer,
        lists: ChunkLists::default(),
        partner: None,
        pull: None,
    };
    loop {
        let mut line = Vec::new();
        (&mut reader)
            .take(LINE_BYTES_MAX)
            .read_until(b'\n', &mut line)?;
        // No bytes are read only if the client has closed the connection: an empty line has its newline.
        if line.is_empty() {
            return Ok(());
        }
        let request: Request = match serde_json::from_slice(&line) {
            Ok(request) => request,
            Err(error) => {
                let errno = libc::EINVAL;
                let message = format!("not a request that this firnd understands: {error}");
                return send_reply(&mut &*stream, &Reply::Error { errno, message });
            }
        };
        match slots.begin_request(id, &request) {
            Admission::Admitted(to_close) => close_idle(to_close),
            Admission::Lost => return Ok(()),
            Admission::Refused(holders) => {
                send_reply(&mut &*stream, &busy_reply(holders))?;
                continue;
            }
        }
        let state = answer_request(request, stream, service, &mut client)?;
        slots.end_request(id, state);
    }
}

/// Answers one request, and returns the state of the connection after that: `Holding` if its end would end something,
/// otherwise `Idle`. Only an idle connection may be closed in favour of another. Fails if the reply cannot be sent.
fn answer_request(
    request: Request,
    stream: &UnixStream,
    service: &dyn Service,
    client: &mut ControlClient,
) -> io::Result<SlotState> {
    let send_progress = &mut |reply| send_reply(&mut &*stream, &reply).is_ok();
    // A client that asks for an unmount may wait for the end of firnd. A connection that is closed in favour of another
    // would look like that end, so it stays open.
    let asks_for_unmount = matches!(request, Request::Unmount { .. });
    let answer = service.answer(request, client, send_progress);
    let send_result = send_reply(&mut &*stream, &answer.reply);
    // The waiting thread continues even if the reply was lost.
    if let Some(sent) = answer.sent {
        // The main loop may have stopped waiting.
        let _ = sent.send(());
    }
    send_result?;
    if asks_for_unmount || service.holds_state_of(client) {
        Ok(SlotState::Holding)
    } else {
        Ok(SlotState::Idle)
    }
}

fn send_reply(stream: &mut &UnixStream, reply: &Reply) -> io::Result<()> {
    stream.write_all(&encode_line(reply)?)
}

fn encode_line(reply: &Reply) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(reply)?;
    line.push(b'\n');
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Echo;

    impl Service for Echo {
        fn answer(
            &self,
            request: Request,
            _: &mut ControlClient,
            send_progress: &mut dyn FnMut(Reply) -> bool,
        ) -> Answer {
            if matches!(request, Request::Status) {
                assert!(send_progress(Reply::Progress {
                    bytes_left: 1,
                    files_left: 1,
                    phase: "draining".into()
                }));
            }
            Reply::Done.into()
        }

        fn holds_state_of(&self, _: &ControlClient) -> bool {
            false
        }
    }

    fn exchange(stream: &mut UnixStream, line: &str, replies: usize) -> Vec<Reply> {
        stream.write_all(line.as_bytes()).unwrap();
        let reader = BufReader::new(stream.try_clone().unwrap());
        reader
            .lines()
            .take(replies)
            .map(|line| serde_json::from_str(&line.unwrap()).unwrap())
            .collect()
    }

    #[test]
    fn many_requests_are_answered_on_one_connection_and_nonsense_ends_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sock");
        let control = ControlListener::start(&path, Arc::new(Echo), Workers::default()).unwrap();
        let mut stream = UnixStream::connect(&path).unwrap();
        assert_eq!(
            exchange(&mut stream, "{\"request\":\"hello\"}\n", 1),
            [Reply::Done]
        );
        let replies = exchange(&mut stream, "{\"request\":\"status\"}\n", 2);
        assert!(matches!(replies[..], [Reply::Progress { .. }, Reply::Done]));
        let replies = exchange(&mut stream, "nonsense\n", 9);
        assert!(
            matches!(
                replies[..],
                [Reply::Error {
                    errno: libc::EINVAL,
                    ..
                }]
            ),
            "{replies:?}"
        );
        drop(control);
        assert!(!path.exists());
    }

    #[test]
    fn the_socket_is_for_its_owner_only() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sock");
        let _control = ControlListener::start(&path, Arc::new(Echo), Workers::default()).unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
    }
}
