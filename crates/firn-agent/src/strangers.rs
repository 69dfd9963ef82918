//! Connections whose other side has not shown the key.
//!
//! Invariants
//! * At most [`STRANGERS_MAX`] are served. One more ends the one that has not said its hello for the longest, or if all
//!   have, the one that said it first: silent peers do not keep others out.
//! * At most as many again are on their way out: with a thread, and maybe a process of MUNGE, but no connection.

use std::collections::BTreeMap;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const STRANGERS_MAX: usize = 32;

/// See the head of this file.
#[derive(Default)]
pub(crate) struct Strangers {
    places: Arc<Mutex<Places>>,
}

#[derive(Default)]
struct Places {
    last: u64,
    served: BTreeMap<u64, Served>,
    leaving: usize,
}

struct Served {
    socket: TcpStream,
    has_spoken: bool,
}

/// The place of one of them; given back when it is dropped.
pub(crate) struct Stranger {
    places: Arc<Mutex<Places>>,
    number: u64,
}

fn lock(places: &Mutex<Places>) -> MutexGuard<'_, Places> {
    places.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Strangers {
    /// A place for a new connection.
    pub(crate) fn admit(&self, socket: &TcpStream) -> io::Result<Stranger> {
        let socket = socket.try_clone()?;
        let mut places = lock(&self.places);
        if places.served.len() >= STRANGERS_MAX {
            if places.leaving >= STRANGERS_MAX {
                return Err(io::Error::other("too many connections"));
            }
            places.end_idlest();
        }
        places.last += 1;
        let number = places.last;
        let served = Served {
            socket,
            has_spoken: false,
        };
        places.served.insert(number, served);
        Ok(Stranger {
            places: Arc::clone(&self.places),
            number,
        })
    }
}

impl Places {
    fn end_idlest(&mut self) {
        let order = |(number, served): &(&u64, &Served)| (served.has_spoken, **number);
        let idlest = self.served.iter().min_by_key(order);
        if let Some(number) = idlest.map(|(number, _)| *number)
            && let Some(served) = self.served.remove(&number)
        {
            self.leaving += 1;
            // Its thread finds the end.
            let _ = served.socket.shutdown(Shutdown::Both);
        }
    }
}

impl Stranger {
    /// It has said its hello.
    pub(crate) fn hear(&self) {
        if let Some(served) = lock(&self.places).served.get_mut(&self.number) {
            served.has_spoken = true;
        }
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let mut places = lock(&self.places);
        if places.served.remove(&self.number).is_none() {
            places.leaving -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;

    use super::*;

    /// Both ends of a connection.
    fn pair(listener: &TcpListener) -> (TcpStream, TcpStream) {
        let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (listener.accept().unwrap().0, there)
    }

    fn is_ended(there: &TcpStream) -> bool {
        there.set_nonblocking(true).unwrap();
        matches!((&*there).read(&mut [0]), Ok(0))
    }

    #[test]
    fn for_each_that_comes_the_longest_silent_one_goes() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let strangers = Strangers::default();
        let admit = || {
            let (here, there) = pair(&listener);
            (strangers.admit(&here), there)
        };
        let mut all: Vec<_> = (0..STRANGERS_MAX).map(|_| admit()).collect();
        all[0].0.as_ref().unwrap().hear();
        let more: Vec<_> = (0..STRANGERS_MAX).map(|_| admit()).collect();
        // The one that spoke stays, and the last that came.
        let ended: Vec<_> = all.iter().map(|(_, there)| is_ended(there)).collect();
        assert_eq!(ended.iter().position(|ended| !ended), Some(0));
        assert_eq!(ended.iter().filter(|ended| !**ended).count(), 1);
        let ended = more.iter().filter(|(_, there)| is_ended(there)).count();
        assert_eq!(ended, 1, "31 were silent before them");
        // As long as the threads of those that ended are there, no more come.
        assert!(admit().0.is_err());
        all.truncate(1);
        assert!(admit().0.is_ok());
        drop((all, more));
        assert_eq!(lock(&strangers.places).leaving, 0);
        assert!(lock(&strangers.places).served.is_empty());
    }
}
