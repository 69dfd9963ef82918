//! etcd on free ports of this machine, and a network between it and a host that can be cut.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::command::wait_until;
use crate::sandbox::kill;

/// Only what hangs takes longer to start.
const START_LIMIT: Duration = Duration::from_secs(60);
/// Another process may have taken a port meanwhile.
const TRIES: usize = 5;

/// A cluster of one; ends with the value.
pub struct Etcd {
    dir: tempfile::TempDir,
    client: SocketAddr,
    peer: SocketAddr,
    child: Option<Child>,
}

impl Etcd {
    /// Starts it, and waits until it serves.
    pub fn start() -> Self {
        for _ in 0..TRIES {
            let mut etcd = Self {
                dir: tempfile::Builder::new()
                    .prefix("firn-test-etcd-")
                    .tempdir()
                    .expect("a temporary directory"),
                client: free_address(),
                peer: free_address(),
                child: None,
            };
            if etcd.run() {
                return etcd;
            }
        }
        panic!("etcd does not start");
    }

    /// HOST:PORT for clients.
    pub fn endpoint(&self) -> String {
        self.client.to_string()
    }

    /// From now on it answers nothing, and takes connections.
    pub fn stall(&self) {
        self.signal(libc::SIGSTOP);
    }

    /// Ends [`Etcd::stall`].
    pub fn go_on(&self) {
        self.signal(libc::SIGCONT);
    }

    /// kill -9.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("kill etcd");
            child.wait().expect("wait for etcd");
        }
    }

    /// Starts it again after [`Etcd::kill`], with what it knew.
    pub fn restart(&mut self) {
        assert!(self.run(), "etcd does not start again");
    }

    fn signal(&self, signal: i32) {
        kill(self.child.as_ref().expect("it runs").id(), signal);
    }

    /// False: it ended at once.
    fn run(&mut self) -> bool {
        let url = |address: SocketAddr| format!("http://{address}");
        let log = std::fs::File::create(self.dir.path().join("log")).expect("its log");
        let child = Command::new("etcd")
            .arg("--data-dir")
            .arg(self.dir.path().join("data"))
            .args(["--listen-client-urls", &url(self.client)])
            .args(["--advertise-client-urls", &url(self.client)])
            .args(["--listen-peer-urls", &url(self.peer)])
            .args(["--initial-advertise-peer-urls", &url(self.peer)])
            .args(["--initial-cluster", &format!("default={}", url(self.peer))])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("etcd is missing: {error} (scripts/setup installs it)"));
        let child = self.child.insert(child);
        let mut has_ended = false;
        let client = self.client;
        wait_until("etcd serves", START_LIMIT, || {
            has_ended = child.try_wait().expect("waitpid").is_some();
            has_ended || is_healthy(client)
        });
        !has_ended
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

fn free_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("its address")
}

fn is_healthy(address: SocketAddr) -> bool {
    let asked = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(START_LIMIT))?;
        stream.write_all(b"GET /health HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    asked().is_ok_and(|answer| answer.contains(r#""health":"true""#))
}

/// A cable to a server: what goes over it can be stopped, as if packets were lost. Its threads end with the connections,
/// which it cuts when it is dropped.
pub struct Cable {
    address: SocketAddr,
    state: Arc<CableState>,
}

#[derive(Default)]
struct CableState {
    is_cut: AtomicBool,
    has_ended: AtomicBool,
}

impl Cable {
    /// To the server at `to`, HOST:PORT.
    pub fn to(to: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("its address");
        let state = Arc::new(CableState::default());
        let kept = Arc::clone(&state);
        let to = to.to_owned();
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                if kept.has_ended.load(Ordering::SeqCst) {
                    return;
                }
                let Ok(far) = TcpStream::connect(&to) else {
                    continue;
                };
                carry(&near, &far, &kept);
                carry(&far, &near, &kept);
            }
        });
        Self { address, state }
    }

    /// HOST:PORT of the near end.
    pub fn endpoint(&self) -> String {
        self.address.to_string()
    }

    /// From now on nothing arrives.
    pub fn cut(&self) {
        self.state.is_cut.store(true, Ordering::SeqCst);
    }

    /// Ends [`Cable::cut`].
    pub fn mend(&self) {
        self.state.is_cut.store(false, Ordering::SeqCst);
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        self.state.has_ended.store(true, Ordering::SeqCst);
        // Its listener waits for a connection.
        let _ = TcpStream::connect(self.address);
    }
}

fn carry(from: &TcpStream, to: &TcpStream, state: &Arc<CableState>) {
    const LOOK_EVERY: Duration = Duration::from_millis(20);
    let mut from = from.try_clone().expect("dup");
    let mut to = to.try_clone().expect("dup");
    let state = Arc::clone(state);
    from.set_read_timeout(Some(LOOK_EVERY)).expect("a timeout");
    std::thread::spawn(move || {
        let mut buffer = [0; 16 << 10];
        while !state.has_ended.load(Ordering::SeqCst) {
            let count = match from.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
                Err(_) => break,
            };
            while state.is_cut.load(Ordering::SeqCst) && !state.has_ended.load(Ordering::SeqCst) {
                std::thread::sleep(LOOK_EVERY);
            }
            if to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
    });
}
