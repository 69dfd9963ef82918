//! Protocol of agents: whoever does not have the key gets through no handshake, on neither side, whatever is sent; what
//! is read as a message is written as a frame that reads the same; a list makes a plan that stays in its directory, or
//! none.
#![no_main]

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use arbitrary::Arbitrary;
use firn_agent::message::{Entry, EntryKind, FRAME_BYTES_MAX, Reply, Request};
use firn_agent::{Key, Link, Transport, answer_handshake, begin_handshake, check_list};
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
    assert!(answer_handshake(&mut link(), Some(key), until).is_err());
    assert!(begin_handshake(&mut link(), Some(key), until).is_err());
    let mut link = link();
    while link.receive::<Request>(FRAME_BYTES_MAX, until).is_ok() {}
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
