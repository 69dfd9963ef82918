//! Bounds the number of *strangers*: connections whose other side has not yet proved that it has the key.
//!
//! Silent peers must not block others. If the bound is reached, a new connection therefore replaces an old one.
//!
//! Invariants
//! * At most [`STRANGERS_MAX`] strangers are connected. A further stranger replaces the oldest one that has not sent
//!   its hello. If all have sent it, the oldest one of all is replaced.
//! * At most the same number of strangers are *closing*: their connection is shut down, but their thread, and possibly
//!   a process of MUNGE, has not ended yet.

use std::collections::BTreeMap;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum number of connected strangers.
const STRANGERS_MAX: usize = 32;

/// All strangers of an agent; see the head of this file.
#[derive(Default)]
pub(crate) struct Strangers {
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    last_number: u64,
    /// Connected strangers by their number, which grows with each connection.
    connected: BTreeMap<u64, Connected>,
    /// Number of closing strangers.
    closing: usize,
}

struct Connected {
    socket: TcpStream,
    /// Whether the stranger has sent a whole hello.
    sent_hello: bool,
}

/// One stranger. It is dropped when its handshake is over, and then does not count any more.
pub(crate) struct Stranger {
    state: Arc<Mutex<State>>,
    number: u64,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Strangers {
    /// Admits a new connection. Replaces another one if the bound is reached. Fails if too many are closing.
    pub(crate) fn admit(&self, socket: &TcpStream) -> io::Result<Stranger> {
        let socket = socket.try_clone()?;
        let mut state = lock(&self.state);
        if state.connected.len() >= STRANGERS_MAX {
            if state.closing >= STRANGERS_MAX {
                return Err(io::Error::other("too many connections"));
            }
            state.close_oldest();
        }
        state.last_number += 1;
        let number = state.last_number;
        let connected = Connected {
            socket,
            sent_hello: false,
        };
        state.connected.insert(number, connected);
        Ok(Stranger {
            state: Arc::clone(&self.state),
            number,
        })
    }
}

impl State {
    /// Shuts down the oldest connection without a hello, or the oldest of all if each has sent its hello.
    fn close_oldest(&mut self) {
        let order = |(number, stranger): &(&u64, &Connected)| (stranger.sent_hello, **number);
        let oldest = self.connected.iter().min_by_key(order);
        if let Some(number) = oldest.map(|(number, _)| *number)
            && let Some(stranger) = self.connected.remove(&number)
        {
            self.closing += 1;
            // The stranger's thread then sees the end of the stream, and drops the `Stranger`.
            let _ = stranger.socket.shutdown(Shutdown::Both);
        }
    }
}

impl Stranger {
    /// Records that the stranger has sent its hello.
    pub(crate) fn record_hello(&self) {
        if let Some(stranger) = lock(&self.state).connected.get_mut(&self.number) {
            stranger.sent_hello = true;
        }
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        if state.connected.remove(&self.number).is_none() {
            state.closing -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;

    use super::*;

    /// Both ends of a connection: the agent's and the stranger's.
    fn pair(listener: &TcpListener) -> (TcpStream, TcpStream) {
        let stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (listener.accept().unwrap().0, stranger)
    }

    fn is_closed(stranger: &TcpStream) -> bool {
        stranger.set_nonblocking(true).unwrap();
        matches!((&*stranger).read(&mut [0]), Ok(0))
    }

    #[test]
    fn a_further_stranger_replaces_the_one_that_is_silent_longest() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let strangers = Strangers::default();
        let admit = || {
            let (socket, stranger) = pair(&listener);
            (strangers.admit(&socket), stranger)
        };
        let mut first: Vec<_> = (0..STRANGERS_MAX).map(|_| admit()).collect();
        first[0].0.as_ref().unwrap().record_hello();
        let second: Vec<_> = (0..STRANGERS_MAX).map(|_| admit()).collect();
        // Of the first connections, only the one with a hello is still open.
        let closed: Vec<_> = first.iter().map(|(_, socket)| is_closed(socket)).collect();
        assert_eq!(closed.iter().position(|closed| !closed), Some(0));
        assert_eq!(closed.iter().filter(|closed| !**closed).count(), 1);
        let closed = second
            .iter()
            .filter(|(_, socket)| is_closed(socket))
            .count();
        assert_eq!(closed, 1, "31 of the first were silent longer");
        // No further connection is admitted as long as the closed ones are not dropped.
        assert!(admit().0.is_err());
        first.truncate(1);
        assert!(admit().0.is_ok());
        drop((first, second));
        assert_eq!(lock(&strangers.state).closing, 0);
        assert!(lock(&strangers.state).connected.is_empty());
    }
}
