//! Protocol of agents, for any bytes that are sent:
//! * a peer without the key gets through no handshake, on either side;
//! * what is read as a message is written as a frame that reads the same;
//! * a list makes a plan that stays in its directory, or none;
//! * after the hello only what was said is heard, from its start on, whatever is changed on its way.
#![no_main]

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use arbitrary::Arbitrary;
use firn_agent::message::{Entry, EntryKind, FRAME_BYTES_MAX, Reply, Request};
use firn_agent::{
    Encryption, HandshakeInputs, Key, Link, Side, Transport, answer_handshake, begin_handshake,
    check_list,
};
use firn_format::record::Ending;
use libfuzzer_sys::fuzz_target;
use serde::Serialize;
use serde::de::DeserializeOwned;

#[derive(Arbitrary, Debug)]
enum Input {
    /// Bytes as they come.
    Bytes(Vec<u8>),
    /// Each with its length before it.
    Frames(Vec<Vec<u8>>),
    /// A list.
    Entries(Vec<(Vec<u8>, Kind)>),
    /// Messages over an encrypted connection, and what is done to them on their way.
    Sealed(Vec<Vec<u8>>, Vec<Change>),
}

#[derive(Arbitrary, Debug)]
enum Change {
    Flip { at: u16, bit: u8 },
    Insert { at: u16, bytes: Vec<u8> },
    Repeat { from: u16, bytes: u16, at: u16 },
    Remove { at: u16, bytes: u16 },
}

#[derive(Arbitrary, Debug)]
enum Kind {
    Directory,
    File(u64),
    Link(Vec<u8>),
    Other,
}

/// What the other side sent, and nothing that waits.
struct Heard {
    bytes: Vec<u8>,
    at: usize,
}

impl Transport for Heard {
    fn receive(&mut self, into: &mut [u8], _: Instant) -> io::Result<()> {
        let end = self.at + into.len();
        let found = self.bytes.get(self.at..end);
        into.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        self.at = end;
        Ok(())
    }

    fn send(&mut self, _: &[u8], _: Instant) -> io::Result<()> {
        Ok(())
    }

    fn send_file(&mut self, _: BorrowedFd<'_>, _: u64, _: u64, _: Instant) -> io::Result<()> {
        panic!("nothing was asked for");
    }
}

fuzz_target!(|input: Input| {
    match input {
        Input::Bytes(bytes) => hear(bytes),
        Input::Frames(frames) => {
            for frame in &frames {
                returns::<Request>(frame);
                returns::<Reply>(frame);
            }
            hear(frames.iter().flat_map(|frame| framed(frame)).collect());
        }
        Input::Entries(entries) => list(entries),
        Input::Sealed(paths, changes) => overhear(paths, &changes),
    }
});

fn hear(bytes: Vec<u8>) {
    static KEY: OnceLock<Key> = OnceLock::new();
    let key = KEY.get_or_init(|| Key::random().expect("random bytes"));
    let until = Instant::now() + Duration::from_secs(60);
    let link = || {
        Link::over(Heard {
            bytes: bytes.clone(),
            at: 0,
        })
    };
    for encryption in [
        Encryption::Refused,
        Encryption::Possible,
        Encryption::Required,
    ] {
        let terms = terms(key, encryption);
        assert!(answer_handshake(&mut link(), &terms, until).is_err());
        assert!(begin_handshake(&mut link(), &terms, until).is_err());
    }
    let mut link = link();
    while link.receive::<Request>(FRAME_BYTES_MAX, until).is_ok() {}
}

fn terms(key: &Key, encryption: Encryption) -> HandshakeInputs<'_> {
    let side = Side {
        encryption,
        here: None,
        there: None,
    };
    HandshakeInputs {
        key: Some(key),
        munge: None,
        side,
    }
}

fn framed(bytes: &[u8]) -> Vec<u8> {
    let mut frame = (bytes.len() as u32).to_be_bytes().to_vec();
    frame.extend(bytes);
    frame
}

fn returns<M: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(bytes: &[u8]) {
    let Ok(message) = serde_json::from_slice::<M>(bytes) else {
        return;
    };
    let written = serde_json::to_vec(&message).expect("a message can be written");
    let mut link = Link::over(Heard {
        bytes: framed(&written),
        at: 0,
    });
    let until = Instant::now() + Duration::from_secs(60);
    let again: M = link.receive(usize::MAX, until).expect("it can be read");
    assert_eq!(again, message);
}

fn list(entries: Vec<(Vec<u8>, Kind)>) {
    let entry = |(path, kind): (Vec<u8>, Kind)| Entry {
        path: path.into(),
        kind: match kind {
            Kind::Directory => EntryKind::Directory,
            Kind::File(bytes) => EntryKind::File {
                bytes,
                ending: Ending::Closed,
            },
            Kind::Link(target) => EntryKind::Link {
                target: target.into(),
            },
            Kind::Other => EntryKind::Other,
        },
        mode: 0o644,
        mtime_s: 0,
        mtime_ns: 0,
        held: None,
    };
    let entries: Vec<Entry> = entries.into_iter().map(entry).collect();
    if check_list(entries.clone()).is_ok() {
        for entry in &entries[1..] {
            let names = entry.path.as_bytes().split(|byte| *byte == b'/');
            assert!(names.clone().all(firn_trust::is_component));
            let parent = entry.path.as_path().parent().expect("not the top");
            let above = entries.iter().find(|above| above.path.as_path() == parent);
            assert_eq!(above.map(|above| &above.kind), Some(&EntryKind::Directory));
        }
    }
}

/// One end of a connection between two threads.
struct End {
    to: Sender<Vec<u8>>,
    from: Receiver<Vec<u8>>,
    heard: Vec<u8>,
}

impl Transport for End {
    fn receive(&mut self, into: &mut [u8], _: Instant) -> io::Result<()> {
        while self.heard.len() < into.len() {
            let more = self.from.recv();
            self.heard
                .extend(more.map_err(|_| io::ErrorKind::UnexpectedEof)?);
        }
        let rest = self.heard.split_off(into.len());
        into.copy_from_slice(&self.heard);
        self.heard = rest;
        Ok(())
    }

    fn send(&mut self, bytes: &[u8], _: Instant) -> io::Result<()> {
        self.to.send(bytes.to_vec()).map_err(io::Error::other)
    }

    fn send_file(&mut self, _: BorrowedFd<'_>, _: u64, _: u64, _: Instant) -> io::Result<()> {
        panic!("bytes of a file leave in the clear");
    }
}

fn overhear(paths: Vec<Vec<u8>>, changes: &[Change]) {
    let key = Key::random().expect("random bytes");
    // Messages are encrypted whatever becomes of bytes.
    let terms = terms(&key, Encryption::Possible);
    let until = Instant::now() + Duration::from_secs(60);
    let (to_agent, at_agent) = channel();
    let (to_puller, at_puller) = channel();
    // What the puller sends passes through here.
    let (to_wire, at_wire) = channel();
    let mut puller = Link::over(End {
        to: to_wire,
        from: at_puller,
        heard: Vec::new(),
    });
    let mut agent = Link::over(End {
        to: to_puller,
        from: at_agent,
        heard: Vec::new(),
    });
    let said: Vec<Request> = paths
        .into_iter()
        .filter(|path| path.len() < 4096)
        .map(|path| Request::List { path: path.into() })
        .collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            begin_handshake(&mut puller, &terms, until).expect("the key");
            for request in &said {
                puller.send(request, until).expect("send");
            }
            drop(puller);
        });
        scope.spawn(move || {
            to_agent
                .send(at_wire.recv().expect("the hello"))
                .expect("the agent");
            // The end of the handshake, and all that is said.
            let mut wire: Vec<u8> = at_wire.iter().flatten().collect();
            for change in changes {
                change.apply(&mut wire);
            }
            let _ = to_agent.send(wire);
        });
        let answered = answer_handshake(&mut agent, &terms, until);
        assert!(answered.is_ok() || !changes.is_empty());
        let mut left = said.iter();
        while answered.is_ok()
            && let Ok(heard) = agent.receive::<Request>(FRAME_BYTES_MAX, until)
        {
            assert_eq!(Some(&heard), left.next());
        }
        assert!(left.next().is_none() || !changes.is_empty());
    });
}

impl Change {
    fn apply(&self, wire: &mut Vec<u8>) {
        let within = |at: u16| usize::from(at).min(wire.len());
        match self {
            Self::Flip { at, bit } => {
                if let Some(byte) = wire.get_mut(usize::from(*at)) {
                    *byte ^= 1 << (bit % 8);
                }
            }
            Self::Insert { at, bytes } => {
                let at = within(*at);
                wire.splice(at..at, bytes.iter().copied());
            }
            Self::Repeat { from, bytes, at } => {
                let (from, at) = (within(*from), within(*at));
                let copy = wire[from..(from + usize::from(*bytes)).min(wire.len())].to_vec();
                wire.splice(at..at, copy);
            }
            Self::Remove { at, bytes } => {
                let at = within(*at);
                wire.drain(at..(at + usize::from(*bytes)).min(wire.len()));
            }
        }
    }
}
