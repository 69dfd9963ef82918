//! Encryption of a connection: the Noise protocol NNpsk0, from its handshake on.
//!
//! ```text
//!   record = length of the rest, 2 bytes, the most significant first │ ciphertext │ tag, 16 bytes
//! ```
//!
//! Messages are sealed on every connection. Bytes of files go between two records: encrypted by their
//! [`DataCipher`], or as they are, and a message says their [`BlockMac`](crate::block_mac::BlockMac).
//!
//! Promises
//! * Each message in either direction is in records that are encrypted and authenticated (ChaCha20-Poly1305).
//! * Records count: one that was changed, left out, repeated, moved, or comes from another connection ends this one,
//!   and nothing of it is handed on. What is cut off is missed by the reader of the rest of an answer.
//! * An attacker that learns the key later cannot read what was recorded before: the records' keys are of an exchange
//!   of ephemeral keys.
//!
//! Sizes and times of records are not hidden.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use snow::{Builder, HandshakeState, TransportState};

use crate::block_mac::BlockKey;
use crate::data_cipher::DataCipher;
use crate::error::WireError;
use crate::transport::Transport;

const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_SHA256";
const TAG_BYTES: usize = 16;
/// Bytes of the length before a record.
const LENGTH_BYTES: usize = 2;
/// Bytes that one record has at most, of those that are encrypted.
const PLAIN_BYTES_MAX: usize = u16::MAX as usize - TAG_BYTES;
/// Bytes of a message of the exchange without its payload: an ephemeral key and a tag.
const EXCHANGE_BYTES: usize = 32 + TAG_BYTES;

/// One side of the exchange of ephemeral keys.
pub(crate) struct Exchange(HandshakeState);

impl Exchange {
    /// Handshake of the puller, which speaks first. Both sides must have said the same before, the prologue.
    pub(crate) fn begin(shared_key: &[u8; 32], prologue: &[u8]) -> Self {
        let begun = builder(shared_key, prologue).and_then(Builder::build_initiator);
        Self(begun.expect("the pattern needs nothing else"))
    }

    /// The agent's side of the handshake.
    pub(crate) fn answer(shared_key: &[u8; 32], prologue: &[u8]) -> Self {
        let begun = builder(shared_key, prologue).and_then(Builder::build_responder);
        Self(begun.expect("the pattern needs nothing else"))
    }

    /// The next message.
    pub(crate) fn write(&mut self, payload: &[u8]) -> Result<Vec<u8>, WireError> {
        let mut message = vec![0; EXCHANGE_BYTES + payload.len()];
        let written = self.0.write_message(payload, &mut message);
        // Nothing but the kernel's random numbers can fail.
        let length = written.map_err(|error| io::Error::other(error.to_string()))?;
        message.truncate(length);
        Ok(message)
    }

    /// What the other side's message says; an error where it does not have the key, or the prologue is another one.
    pub(crate) fn read(&mut self, message: &[u8]) -> Result<Vec<u8>, WireError> {
        let mut payload = vec![0; message.len()];
        let read = self.0.read_message(message, &mut payload);
        payload.truncate(read.map_err(|_| WireError::WrongKey)?);
        Ok(payload)
    }

    /// What encrypts from now on, after both messages.
    pub(crate) fn finish(self) -> Cipher {
        let noise = self.0.into_transport_mode();
        Cipher {
            noise: noise.expect("both messages are over"),
            record: Vec::new(),
            plain: Vec::new(),
            taken: 0,
        }
    }
}

fn builder<'a>(shared_key: &'a [u8; 32], prologue: &'a [u8]) -> Result<Builder<'a>, snow::Error> {
    Builder::new(PATTERN.parse()?)
        .prologue(prologue)?
        .psk(0, shared_key)
}

/// The state of both directions.
pub(crate) struct Cipher {
    noise: TransportState,
    /// As it is on the way, with its length.
    record: Vec<u8>,
    /// The last record that was received and did not fit into what was asked for.
    plain: Vec<u8>,
    /// How much of it was handed on.
    taken: usize,
}

/// A third party between the two sides wrote on the connection.
#[derive(Debug)]
struct Tampered;

impl fmt::Display for Tampered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "what arrived is not what was sent: it was changed, repeated or left out on its way",
        )
    }
}

impl std::error::Error for Tampered {}

pub(crate) fn tampered() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, Tampered)
}

impl Cipher {
    /// Whether a part of the last record was not taken yet.
    fn has_rest(&self) -> bool {
        self.taken < self.plain.len()
    }

    fn send<T: Transport>(
        &mut self,
        inner: &mut T,
        plain: &[u8],
        deadline: Instant,
    ) -> io::Result<()> {
        for plain in plain.chunks(PLAIN_BYTES_MAX) {
            self.record
                .resize(LENGTH_BYTES + plain.len() + TAG_BYTES, 0);
            let written = self
                .noise
                .write_message(plain, &mut self.record[LENGTH_BYTES..]);
            let length = written.map_err(|error| io::Error::other(error.to_string()))?;
            let head = u16::try_from(length).expect("chunks are of that size");
            self.record[..LENGTH_BYTES].copy_from_slice(&head.to_be_bytes());
            inner.send(&self.record, deadline)?;
        }
        Ok(())
    }

    fn receive<T: Transport>(
        &mut self,
        inner: &mut T,
        into: &mut [u8],
        deadline: Instant,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < into.len() {
            let left = &mut into[done..];
            done += match self.plain.len() - self.taken {
                0 => self.receive_record(inner, left, deadline)?,
                ready => {
                    let count = ready.min(left.len());
                    left[..count].copy_from_slice(&self.plain[self.taken..][..count]);
                    self.taken += count;
                    count
                }
            };
        }
        Ok(())
    }

    /// Bytes that went straight into `into`; 0: the record is larger, and is in [`Cipher::plain`].
    fn receive_record<T: Transport>(
        &mut self,
        inner: &mut T,
        into: &mut [u8],
        deadline: Instant,
    ) -> io::Result<usize> {
        let mut length = [0; LENGTH_BYTES];
        inner.receive(&mut length, deadline)?;
        let length = usize::from(u16::from_be_bytes(length));
        // Firn never sends an empty one.
        let plain_bytes = length.checked_sub(TAG_BYTES).filter(|bytes| *bytes > 0);
        let plain_bytes = plain_bytes.ok_or_else(tampered)?;
        self.record.resize(length, 0);
        inner.receive(&mut self.record, deadline)?;
        self.plain.clear();
        self.taken = 0;
        let is_direct = plain_bytes <= into.len();
        let plain = if is_direct {
            &mut into[..plain_bytes]
        } else {
            self.plain.resize(plain_bytes, 0);
            &mut self.plain[..]
        };
        let read = self.noise.read_message(&self.record, plain);
        if read.is_err() {
            self.plain.clear();
            return Err(tampered());
        }
        Ok(if is_direct { plain_bytes } else { 0 })
    }
}

/// A transport that is encrypted once its handshake is over.
pub(crate) struct Sealed<T> {
    inner: T,
    cipher: Option<Box<Cipher>>,
    /// None where bytes of files are not encrypted.
    data: Option<Box<DataCipher>>,
}

impl<T> Sealed<T> {
    /// As it is.
    pub(crate) fn open(inner: T) -> Self {
        Self {
            inner,
            cipher: None,
            data: None,
        }
    }

    /// Encrypts and authenticates messages from now on, and bytes of files where there is a key for them.
    pub(crate) fn seal(&mut self, cipher: Cipher, data_key: Option<BlockKey>) {
        let is_puller = cipher.noise.is_initiator();
        self.data = data_key.map(|key| Box::new(DataCipher::new(key, is_puller)));
        self.cipher = Some(Box::new(cipher));
    }

    /// Whether bytes of files are encrypted.
    pub(crate) fn is_data_encrypted(&self) -> bool {
        self.data.is_some()
    }
}

impl<T: Transport> Sealed<T> {
    /// Bytes of a message.
    pub(crate) fn receive(&mut self, into: &mut [u8], deadline: Instant) -> io::Result<()> {
        // Bytes of files are records of their own.
        if self.data.as_ref().is_some_and(|data| data.has_rest()) {
            return Err(tampered());
        }
        match &mut self.cipher {
            Some(cipher) => cipher.receive(&mut self.inner, into, deadline),
            None => self.inner.receive(into, deadline),
        }
    }

    /// A message.
    pub(crate) fn send(&mut self, bytes: &[u8], deadline: Instant) -> io::Result<()> {
        match &mut self.cipher {
            Some(cipher) => cipher.send(&mut self.inner, bytes, deadline),
            None => self.inner.send(bytes, deadline),
        }
    }

    /// Bytes of a file.
    pub(crate) fn receive_data(&mut self, into: &mut [u8], deadline: Instant) -> io::Result<()> {
        // Messages are records of their own.
        if self.cipher.as_ref().is_some_and(|cipher| cipher.has_rest()) {
            return Err(tampered());
        }
        match &mut self.data {
            Some(data) => data.receive(&mut self.inner, into, deadline),
            None => self.inner.receive(into, deadline),
        }
    }

    /// Bytes of a file.
    pub(crate) fn send_data(&mut self, bytes: &[u8], deadline: Instant) -> io::Result<()> {
        match &mut self.data {
            Some(data) => data.send(&mut self.inner, bytes, deadline),
            None => self.inner.send(bytes, deadline),
        }
    }

    /// Bytes of a file that is here, from `at` on.
    pub(crate) fn send_file(
        &mut self,
        file: BorrowedFd<'_>,
        at: u64,
        bytes: u64,
        deadline: Instant,
    ) -> io::Result<()> {
        match &mut self.data {
            Some(data) => data.send_file(&mut self.inner, file, at..at + bytes, deadline),
            None => self.inner.send_file(file, at, bytes, deadline),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;
    use std::time::Duration;

    use rand::rngs::StdRng;
    use rand::seq::SliceRandom;
    use rand::{RngExt, SeedableRng};

    use super::*;

    const KEY: [u8; 32] = [7; 32];

    /// What was sent, and what is heard.
    #[derive(Default)]
    struct Wire {
        sent: Vec<u8>,
        heard: Vec<u8>,
    }

    impl Transport for Wire {
        fn receive(&mut self, into: &mut [u8], _: Instant) -> io::Result<()> {
            if self.heard.len() < into.len() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let rest = self.heard.split_off(into.len());
            into.copy_from_slice(&self.heard);
            self.heard = rest;
            Ok(())
        }

        fn send(&mut self, bytes: &[u8], _: Instant) -> io::Result<()> {
            self.sent.extend(bytes);
            Ok(())
        }

        fn send_file(&mut self, _: BorrowedFd<'_>, _: u64, _: u64, _: Instant) -> io::Result<()> {
            panic!("bytes of a file leave in the clear");
        }
    }

    fn ciphers(puller_key: &[u8; 32], agent_key: &[u8; 32]) -> Result<(Cipher, Cipher), WireError> {
        let mut puller = Exchange::begin(puller_key, b"said before");
        let mut agent = Exchange::answer(agent_key, b"said before");
        assert_eq!(agent.read(&puller.write(b"")?)?, b"");
        assert_eq!(puller.read(&agent.write(b"and now")?)?, b"and now");
        Ok((puller.finish(), agent.finish()))
    }

    /// Both ends of a connection.
    fn ends() -> [Sealed<Wire>; 2] {
        let (puller, agent) = ciphers(&KEY, &KEY).unwrap();
        let key = BlockKey::random().unwrap();
        [puller, agent].map(|cipher| {
            let mut sealed = Sealed::open(Wire::default());
            sealed.seal(cipher, Some(key.clone()));
            sealed
        })
    }

    /// What is sent in a test.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum Kind {
        Messages,
        Data,
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn who_has_another_key_gets_through_no_exchange() {
        assert!(ciphers(&KEY, &KEY).is_ok());
        let other = ciphers(&KEY, &[8; 32]);
        assert!(matches!(other, Err(WireError::WrongKey)));
        for message in [&[][..], &[0; 48], &[0xff; 64]] {
            assert!(Exchange::answer(&KEY, b"").read(message).is_err());
        }
        let hello = Exchange::begin(&KEY, b"said").write(b"").unwrap();
        assert!(Exchange::answer(&KEY, b"heard").read(&hello).is_err());
        assert!(Exchange::answer(&KEY, b"said").read(&hello).is_ok());
    }

    /// Sends what is random in pieces that are; what was said and the records.
    fn talk(
        generator: &mut StdRng,
        from: &mut Sealed<Wire>,
        kind: Kind,
    ) -> (Vec<u8>, Vec<Vec<u8>>) {
        let mut said = Vec::new();
        for _ in 0..generator.random_range(1..6) {
            let most = [3, 5000, 600_000][generator.random_range(0..3)];
            let mut plain = vec![0; generator.random_range(1..=most)];
            generator.fill(&mut plain[..]);
            if kind == Kind::Messages {
                from.send(&plain, soon()).unwrap();
            } else if generator.random() {
                let file = tempfile::tempfile().unwrap();
                file.write_all_at(&plain, 77).unwrap();
                let bytes = plain.len() as u64;
                from.send_file(file.as_fd(), 77, bytes, soon()).unwrap();
                let beyond = from.send_file(file.as_fd(), 77 + bytes, 1, soon());
                assert_eq!(beyond.unwrap_err().kind(), io::ErrorKind::InvalidData);
            } else {
                from.send_data(&plain, soon()).unwrap();
            }
            said.extend(plain);
        }
        let mut left = std::mem::take(&mut from.inner.sent);
        let mut records = Vec::new();
        while !left.is_empty() {
            let bytes = match kind {
                Kind::Messages => 2 + usize::from(u16::from_be_bytes([left[0], left[1]])),
                Kind::Data => 20 + u32::from_be_bytes(left[..4].try_into().unwrap()) as usize,
            };
            let rest = left.split_off(bytes);
            records.push(std::mem::replace(&mut left, rest));
        }
        (said, records)
    }

    /// Reads pieces that are random until the end, or an error.
    fn hear(
        generator: &mut StdRng,
        to: &mut Sealed<Wire>,
        (wire, kind): (Vec<u8>, Kind),
    ) -> (Vec<u8>, io::Error) {
        to.inner.heard = wire;
        let mut heard = Vec::new();
        loop {
            let most = [1, 100, 300_000][generator.random_range(0..3)];
            let mut piece = vec![0; generator.random_range(1..=most)];
            let received = match kind {
                Kind::Messages => to.receive(&mut piece, soon()),
                Kind::Data => to.receive_data(&mut piece, soon()),
            };
            match received {
                Ok(()) => heard.extend(piece),
                Err(error) => return (heard, error),
            }
        }
    }

    #[test]
    fn what_is_sent_arrives_and_none_of_it_can_be_read_on_its_way() {
        let mut generator = StdRng::seed_from_u64(1);
        let [mut puller, mut agent] = ends();
        for round in 0..100 {
            let kind = [Kind::Messages, Kind::Data][round / 2 % 2];
            let (said, records) = talk(&mut generator, &mut puller, kind);
            let wire = records.concat();
            let probe = &said[..said.len().min(16)];
            assert!(probe.len() < 4 || !wire.windows(probe.len()).any(|part| part == probe));
            agent.inner.heard = wire;
            let mut heard = vec![0; said.len()];
            match kind {
                Kind::Messages => agent.receive(&mut heard, soon()).unwrap(),
                Kind::Data => agent.receive_data(&mut heard, soon()).unwrap(),
            }
            assert!(heard == said);
            std::mem::swap(&mut puller, &mut agent);
        }
    }

    #[test]
    fn a_message_is_no_data_and_data_is_no_message() {
        let [mut puller, mut agent] = ends();
        puller.send(b"a message", soon()).unwrap();
        agent.inner.heard = std::mem::take(&mut puller.inner.sent);
        agent.receive(&mut [0; 4], soon()).unwrap();
        assert!(agent.receive_data(&mut [0; 5], soon()).is_err());
        agent.receive(&mut [0; 5], soon()).unwrap();
        puller.send_data(b"some data", soon()).unwrap();
        agent.inner.heard = std::mem::take(&mut puller.inner.sent);
        agent.receive_data(&mut [0; 4], soon()).unwrap();
        assert!(agent.receive(&mut [0; 5], soon()).is_err());
        agent.receive_data(&mut [0; 5], soon()).unwrap();
    }

    #[test]
    fn of_what_was_changed_on_its_way_nothing_is_handed_on() {
        for seed in 0..800 {
            let kind = [Kind::Messages, Kind::Data][seed as usize % 2];
            let change = seed / 2 % 7;
            let mut generator = StdRng::seed_from_u64(seed);
            let [mut puller, mut agent] = ends();
            let (said, mut records) = talk(&mut generator, &mut puller, kind);
            let before = records.clone();
            let at = generator.random_range(0..records.len());
            match change {
                0 => {
                    let record = &mut records[at];
                    let bit = generator.random_range(0..8 * record.len());
                    record[bit / 8] ^= 1 << (bit % 8);
                }
                1 => drop(records.remove(at)),
                2 => records.insert(at, before[generator.random_range(0..before.len())].clone()),
                3 => records.shuffle(&mut generator),
                4 => records.truncate(at),
                // Of another connection with the same shared key.
                5 => {
                    let [mut other, _] = ends();
                    records[at] = talk(&mut generator, &mut other, kind).1.remove(0);
                }
                // What its sender said is sent back to it.
                _ => std::mem::swap(&mut puller, &mut agent),
            }
            let is_same = change < 6 && records == before;
            let (heard, error) = hear(&mut generator, &mut agent, (records.concat(), kind));
            let told = format!("seed {seed}, {kind:?}");
            assert!(said.starts_with(&heard), "{told}");
            assert!(heard.len() < said.len() || change != 0, "{told}");
            let is_end = error.kind() == io::ErrorKind::UnexpectedEof;
            assert!(
                is_end || error.kind() == io::ErrorKind::InvalidData,
                "{told}: {error}"
            );
            let must_tell = matches!(change, 2 | 5 | 6);
            assert!(is_same || !must_tell || !is_end, "{told}: not noticed");
        }
    }
}
