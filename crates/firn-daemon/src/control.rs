//! The control socket: one JSON request per line, answered by a [`Service`].
//!
//! Promises
//! * Only the user whose firnd this is, and root, are answered (SO_PEERCRED).
//! * A broken or slow client costs one thread and no more; at most [`CONNECTIONS_MAX`] are served.
//! * What a client holds ([`Lists`]) ends with its connection.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use firn_format::protocol::{Reply, Request};
use parking_lot::Mutex;
use rustix::fs::Mode;

use crate::chunks::Lists;

const CONNECTIONS_MAX: usize = 64;
/// Longest request: a path of PATH_MAX, escaped, and some words.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// A client that does not take its answer for so long is given up.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// Answers requests.
pub(crate) trait Service: Send + Sync + 'static {
    /// The final reply; `say` sends progress before it and is false once the client is gone. `lists` are
    /// those of this connection.
    fn answer(&self, request: Request, lists: &mut Lists, say: &mut dyn FnMut(Reply) -> bool) -> Reply;
    /// A final reply to `request` has left.
    fn answered(&self, request: &Request);
}

/// A socket that is listened on; removed when dropped.
pub(crate) struct Control {
    path: PathBuf,
    stop: Arc<AtomicBool>,
}

impl Control {
    /// Listens at `path`, in place of what a dead firnd left there.
    pub(crate) fn start(path: &Path, service: Arc<dyn Service>) -> io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // The umask is the process's: nothing else creates files yet, and one start at a time changes it.
        static UMASK: Mutex<()> = Mutex::new(());
        let alone = UMASK.lock();
        let umask = rustix::process::umask(Mode::from_raw_mode(0o177));
        let listener = UnixListener::bind(path);
        rustix::process::umask(umask);
        drop(alone);
        let listener = listener?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        std::thread::Builder::new()
            .name("firn-control".into())
            .spawn(move || accept(&listener, &service, &stopped))?;
        Ok(Self { path: path.into(), stop })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // Wakes the thread in accept(2).
        let _ = UnixStream::connect(&self.path);
        let _ = std::fs::remove_file(&self.path);
    }
}

fn accept(listener: &UnixListener, service: &Arc<dyn Service>, stop: &AtomicBool) {
    let connections = Arc::new(AtomicUsize::new(0));
    for stream in listener.incoming() {
        if stop.load(Ordering::Acquire) {
            return;
        }
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(%error, "control socket");
                // Out of descriptors, most likely: without a pause this would spin.
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        if connections.fetch_add(1, Ordering::AcqRel) >= CONNECTIONS_MAX {
            refuse(&stream, "too many connections to this firnd: try again");
            connections.fetch_sub(1, Ordering::AcqRel);
            continue;
        }
        let (service, count) = (Arc::clone(service), Arc::clone(&connections));
        let thread = std::thread::Builder::new().name("firn-client".into());
        let served = thread.spawn(move || {
            let _ = serve(stream, &*service);
            count.fetch_sub(1, Ordering::AcqRel);
        });
        if served.is_err() {
            connections.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

fn refuse(mut stream: &UnixStream, message: &str) {
    let _ = send(&mut stream, &Reply::Error { errno: libc::EAGAIN, message: message.into() });
}

fn serve(stream: UnixStream, service: &dyn Service) -> io::Result<()> {
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    let peer = rustix::net::sockopt::socket_peercred(&stream)?;
    if peer.uid != rustix::process::geteuid() && !peer.uid.is_root() {
        let message = "this firnd belongs to another user".into();
        return send(&mut &stream, &Reply::Error { errno: libc::EPERM, message });
    }
    let mut reader = BufReader::new(&stream);
    let mut lists = Lists::default();
    loop {
        let mut line = Vec::new();
        (&mut reader).take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
        if line.is_empty() {
            return Ok(());
        }
        let request: Request = match serde_json::from_slice(&line) {
            Ok(request) => request,
            Err(error) => {
                let message = format!("not a request that this firnd understands: {error}");
                return send(&mut &stream, &Reply::Error { errno: libc::EINVAL, message });
            }
        };
        let say = &mut |reply| send(&mut &stream, &reply).is_ok();
        let last = service.answer(request.clone(), &mut lists, say);
        let sent = send(&mut &stream, &last);
        service.answered(&request);
        sent?;
    }
}

fn send(stream: &mut &UnixStream, reply: &Reply) -> io::Result<()> {
    let mut line = serde_json::to_vec(reply)?;
    line.push(b'\n');
    stream.write_all(&line)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Echo;

    impl Service for Echo {
        fn answer(&self, request: Request, _: &mut Lists, say: &mut dyn FnMut(Reply) -> bool) -> Reply {
            if matches!(request, Request::Metrics) {
                assert!(say(Reply::Progress { bytes_left: 1, files_left: 1, phase: "draining".into() }));
            }
            Reply::Done
        }
        fn answered(&self, _: &Request) {}
    }

    fn exchange(stream: &mut UnixStream, line: &str, replies: usize) -> Vec<Reply> {
        stream.write_all(line.as_bytes()).unwrap();
        let reader = BufReader::new(stream.try_clone().unwrap());
        reader.lines().take(replies).map(|l| serde_json::from_str(&l.unwrap()).unwrap()).collect()
    }

    #[test]
    fn many_requests_are_answered_on_one_connection_and_nonsense_ends_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sock");
        let control = Control::start(&path, Arc::new(Echo)).unwrap();
        let mut stream = UnixStream::connect(&path).unwrap();
        assert_eq!(exchange(&mut stream, "{\"request\":\"hello\"}\n", 1), [Reply::Done]);
        let replies = exchange(&mut stream, "{\"request\":\"metrics\"}\n", 2);
        assert!(matches!(replies[..], [Reply::Progress { .. }, Reply::Done]));
        let replies = exchange(&mut stream, "nonsense\n", 9);
        assert!(matches!(replies[..], [Reply::Error { errno: libc::EINVAL, .. }]), "{replies:?}");
        drop(control);
        assert!(!path.exists());
    }

    #[test]
    fn the_socket_is_for_its_owner_only() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sock");
        let _control = Control::start(&path, Arc::new(Echo)).unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
    }
}
