//! Bounds the number of *unauthenticated connections* of an agent, which serves files to other hosts. The other side of
//! such a connection has not yet proved that it has the key. The *hello* is the first message of the proof.
//!
//! Silent peers must not block others. If the bound is reached, a new connection therefore replaces an old one.
//!
//! Invariants
//! * At most [`UNAUTHENTICATED_MAX`] unauthenticated connections are open. A further one replaces the oldest one that
//!   has not sent its hello. If all have sent it, the oldest one of all is replaced.
//! * At most the same number of them are *closing*: the socket is shut down, but the connection's thread, and possibly
//!   a process of MUNGE, has not ended yet.

use std::collections::BTreeMap;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum number of open unauthenticated connections.
const UNAUTHENTICATED_MAX: usize = 32;

/// All unauthenticated connections of an agent; see the head of this file.
#[derive(Default)]
pub(crate) struct UnauthenticatedConnections {
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    last_number: u64,
    /// Open connections by their number, which grows with each connection.
    open: BTreeMap<u64, OpenConnection>,
    /// Number of closing connections.
    closing: usize,
}

struct OpenConnection {
    socket: TcpStream,
    /// Whether the other side has sent a whole hello.
    has_sent_hello: bool,
}

/// One unauthenticated connection. It is dropped when its handshake is over, and then does not count any more.
pub(crate) struct UnauthenticatedConnection {
    state: Arc<Mutex<State>>,
    number: u64,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl UnauthenticatedConnections {
    /// Adds a new connection: its other side has not proved yet that it has the key. The connection counts until the
    /// result is dropped.
    ///
    /// If [`UNAUTHENTICATED_MAX`] connections are open, first closes the oldest one without a hello, or the oldest of
    /// all if each has sent its hello. Fails instead if the threads of as many closed connections have not ended yet.
    pub(crate) fn add(&self, socket: &TcpStream) -> io::Result<UnauthenticatedConnection> {
        let socket = socket.try_clone()?;
        let mut state = lock(&self.state);
        if state.open.len() >= UNAUTHENTICATED_MAX {
            if state.closing >= UNAUTHENTICATED_MAX {
                return Err(io::Error::other("too many connections"));
            }
            state.close_oldest();
        }
        state.last_number += 1;
        let number = state.last_number;
        let connection = OpenConnection {
            socket,
            has_sent_hello: false,
        };
        state.open.insert(number, connection);
        Ok(UnauthenticatedConnection {
            state: Arc::clone(&self.state),
            number,
        })
    }
}

impl State {
    /// Shuts down the oldest connection without a hello, or the oldest of all if each has sent its hello.
    fn close_oldest(&mut self) {
        let close_order =
            |(number, connection): &(&u64, &OpenConnection)| (connection.has_sent_hello, **number);
        let Some((&number, _)) = self.open.iter().min_by_key(close_order) else {
            return;
        };
        let Some(connection) = self.open.remove(&number) else {
            return;
        };
        self.closing += 1;
        // The connection's thread then sees the end of the stream, and drops its `UnauthenticatedConnection`.
        let _ = connection.socket.shutdown(Shutdown::Both);
    }
}

impl UnauthenticatedConnection {
    /// Records that the other side has sent its hello.
    pub(crate) fn record_hello(&self) {
        if let Some(connection) = lock(&self.state).open.get_mut(&self.number) {
            connection.has_sent_hello = true;
        }
    }
}

impl Drop for UnauthenticatedConnection {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        let was_closed = state.open.remove(&self.number).is_none();
        if was_closed {
            state.closing -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;

    use super::*;

    /// Both ends of a connection: the agent's and the other side's.
    fn socket_pair(listener: &TcpListener) -> (TcpStream, TcpStream) {
        let peer_socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (listener.accept().unwrap().0, peer_socket)
    }

    fn is_closed(peer_socket: &TcpStream) -> bool {
        peer_socket.set_nonblocking(true).unwrap();
        matches!((&*peer_socket).read(&mut [0]), Ok(0))
    }

    #[test]
    fn a_further_connection_replaces_the_one_that_is_silent_longest() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connections = UnauthenticatedConnections::default();
        let connect = || {
            let (socket, peer_socket) = socket_pair(&listener);
            (connections.add(&socket), peer_socket)
        };
        let mut first: Vec<_> = (0..UNAUTHENTICATED_MAX).map(|_| connect()).collect();
        first[0].0.as_ref().unwrap().record_hello();
        let second: Vec<_> = (0..UNAUTHENTICATED_MAX).map(|_| connect()).collect();
        // Of the first connections, only the one with a hello is still open.
        let closed: Vec<_> = first.iter().map(|(_, socket)| is_closed(socket)).collect();
        assert_eq!(closed.iter().position(|closed| !closed), Some(0));
        assert_eq!(closed.iter().filter(|closed| !**closed).count(), 1);
        let closed = second
            .iter()
            .filter(|(_, socket)| is_closed(socket))
            .count();
        assert_eq!(closed, 1, "31 of the first were silent longer");
        // No further connection is added as long as the closed ones are not dropped.
        assert!(connect().0.is_err());
        first.truncate(1);
        assert!(connect().0.is_ok());
        drop((first, second));
        assert_eq!(lock(&connections.state).closing, 0);
        assert!(lock(&connections.state).open.is_empty());
    }
}
