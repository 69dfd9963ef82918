//! Encryption of a connection by the Noise protocol NNpsk0: its key exchange, and the records after it.
//!
//! The two sides are the *puller*, which connects to copy files, and the *agent* on another host, which serves the
//! files of a mount. Both have the *shared key* before they begin.
//!
//! ```text
//!   record = length of ciphertext and tag, 2 bytes, most significant first │ ciphertext │ tag, 16 bytes
//! ```
//!
//! Messages (requests and replies) are encrypted on every connection. Bytes of files are sent between two records of
//! messages. They are encrypted by a [`DataCipher`]; or they are plain, and a message has their message authentication
//! code ([`BlockMac`](crate::block_mac::BlockMac)).
//!
//! Promises
//! * All messages in both directions are sent in records that are encrypted and authenticated (ChaCha20-Poly1305).
//! * Records are numbered. A record ends the connection if it was changed, left out, repeated or moved, or comes from
//!   another connection; no byte of it is returned. A cut connection is detected, because the end of an answer is
//!   missing.
//! * An attacker that learns the shared key later cannot read earlier recordings, because the keys of records are
//!   derived from ephemeral keys.
//!
//! The sizes and times of records are not hidden.

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
/// Maximum number of plain bytes of a record.
const PLAIN_BYTES_MAX: usize = u16::MAX as usize - TAG_BYTES;
/// Bytes of an ephemeral public key (Curve25519).
const PUBLIC_KEY_BYTES: usize = 32;
/// Bytes of a message of the key exchange without its payload.
const EXCHANGE_BYTES: usize = PUBLIC_KEY_BYTES + TAG_BYTES;

/// One side of the key exchange. Each side writes one message and reads one; the puller writes first.
pub(crate) struct Exchange(HandshakeState);

impl Exchange {
    /// Begins the puller's side. `prologue` is the data that was exchanged before; it must be equal on both sides.
    pub(crate) fn begin(shared_key: &[u8; 32], prologue: &[u8]) -> Self {
        let state = builder(shared_key, prologue).and_then(Builder::build_initiator);
        Self(state.expect("the pattern needs a prologue and a shared key only"))
    }

    /// Begins the agent's side.
    pub(crate) fn answer(shared_key: &[u8; 32], prologue: &[u8]) -> Self {
        let state = builder(shared_key, prologue).and_then(Builder::build_responder);
        Self(state.expect("the pattern needs a prologue and a shared key only"))
    }

    /// Returns this side's message, with `payload` in it.
    pub(crate) fn write(&mut self, payload: &[u8]) -> Result<Vec<u8>, WireError> {
        let mut message = vec![0; EXCHANGE_BYTES + payload.len()];
        let written = self.0.write_message(payload, &mut message);
        // The only possible failure is that the kernel supplies no random numbers.
        let message_bytes = written.map_err(|error| io::Error::other(error.to_string()))?;
        message.truncate(message_bytes);
        Ok(message)
    }

    /// Reads the other side's message and returns its payload. Fails if the other side has another key or another
    /// prologue.
    pub(crate) fn read(&mut self, message: &[u8]) -> Result<Vec<u8>, WireError> {
        let mut payload = vec![0; message.len()];
        let Ok(payload_bytes) = self.0.read_message(message, &mut payload) else {
            return Err(WireError::WrongKey);
        };
        payload.truncate(payload_bytes);
        Ok(payload)
    }

    /// Returns the cipher of the connection, after both messages.
    pub(crate) fn finish(self) -> Cipher {
        let noise = self.0.into_transport_mode();
        Cipher {
            noise: noise.expect("both messages were exchanged"),
            record: Vec::new(),
            unread: UnreadBytes::default(),
        }
    }
}

fn builder<'a>(shared_key: &'a [u8; 32], prologue: &'a [u8]) -> Result<Builder<'a>, snow::Error> {
    Builder::new(PATTERN.parse()?)
        .prologue(prologue)?
        .psk(0, shared_key)
}

/// Encrypts and decrypts the messages of a connection.
pub(crate) struct Cipher {
    noise: TransportState,
    /// Buffer for one record in its encrypted form, with its length.
    record: Vec<u8>,
    unread: UnreadBytes,
}

/// Plain bytes of the last received record that were not returned yet. There are some if a reader asked for fewer bytes
/// than the record has.
#[derive(Default)]
pub(crate) struct UnreadBytes {
    bytes: Vec<u8>,
    /// Number of these bytes that were returned already.
    read_bytes: usize,
}

impl UnreadBytes {
    pub(crate) fn is_empty(&self) -> bool {
        self.read_bytes == self.bytes.len()
    }

    /// Fills the beginning of a buffer with the next bytes. Returns their number.
    pub(crate) fn read(&mut self, buffer: &mut [u8]) -> usize {
        let unread = &self.bytes[self.read_bytes..];
        let count = unread.len().min(buffer.len());
        buffer[..count].copy_from_slice(&unread[..count]);
        self.read_bytes += count;
        count
    }

    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        self.read_bytes = 0;
    }

    /// Returns space for the plain bytes of the next record. All earlier bytes must have been cleared.
    pub(crate) fn allocate(&mut self, bytes: usize) -> &mut [u8] {
        self.bytes.resize(bytes, 0);
        &mut self.bytes
    }
}

/// Error: a record was changed on its way, or is not the next record.
#[derive(Debug)]
struct Tampered;

impl fmt::Display for Tampered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "a received record is not what was sent: it was changed, repeated or left out on its way",
        )
    }
}

impl std::error::Error for Tampered {}

pub(crate) fn tampered() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, Tampered)
}

impl Cipher {
    /// Whether all bytes of the last record were returned.
    fn is_at_record_end(&self) -> bool {
        self.unread.is_empty()
    }

    /// Encrypts bytes and sends them in as many records as they need. A record is a length, the ciphertext and a tag.
    fn send<T: Transport>(
        &mut self,
        transport: &mut T,
        bytes: &[u8],
        deadline: Instant,
    ) -> io::Result<()> {
        for plain in bytes.chunks(PLAIN_BYTES_MAX) {
            self.record
                .resize(LENGTH_BYTES + plain.len() + TAG_BYTES, 0);
            let ciphertext = &mut self.record[LENGTH_BYTES..];
            let written = self.noise.write_message(plain, ciphertext);
            let ciphertext_bytes = written.map_err(|error| io::Error::other(error.to_string()))?;
            let length_field = u16::try_from(ciphertext_bytes)
                .expect("a chunk and its tag are at most u16::MAX bytes")
                .to_be_bytes();
            self.record[..LENGTH_BYTES].copy_from_slice(&length_field);
            transport.send(&self.record, deadline)?;
        }
        Ok(())
    }

    /// Fills a buffer with the next decrypted bytes. Receives as many records as necessary. Bytes of a record that do
    /// not fit are returned by the next call.
    fn receive<T: Transport>(
        &mut self,
        transport: &mut T,
        buffer: &mut [u8],
        deadline: Instant,
    ) -> io::Result<()> {
        let mut filled_bytes = 0;
        while filled_bytes < buffer.len() {
            let unfilled = &mut buffer[filled_bytes..];
            if self.unread.is_empty() {
                filled_bytes += self.receive_record(transport, unfilled, deadline)?;
            } else {
                filled_bytes += self.unread.read(unfilled);
            }
        }
        Ok(())
    }

    /// Receives the next record. If it fits into the buffer, decrypts it there and returns its size. Otherwise decrypts
    /// it into [`Cipher::unread`] and returns 0.
    ///
    /// Fails if the record is not the next one that the other side has sent. The caller has used up the bytes in
    /// `unread`.
    fn receive_record<T: Transport>(
        &mut self,
        transport: &mut T,
        buffer: &mut [u8],
        deadline: Instant,
    ) -> io::Result<usize> {
        let mut length_field = [0; LENGTH_BYTES];
        transport.receive(&mut length_field, deadline)?;
        let ciphertext_bytes = usize::from(u16::from_be_bytes(length_field));
        // Neither side sends an empty record.
        if ciphertext_bytes <= TAG_BYTES {
            return Err(tampered());
        }
        let plain_bytes = ciphertext_bytes - TAG_BYTES;
        self.record.resize(ciphertext_bytes, 0);
        transport.receive(&mut self.record, deadline)?;
        self.unread.clear();
        let fits_into_buffer = plain_bytes <= buffer.len();
        let plain = if fits_into_buffer {
            &mut buffer[..plain_bytes]
        } else {
            self.unread.allocate(plain_bytes)
        };
        if self.noise.read_message(&self.record, plain).is_err() {
            self.unread.clear();
            return Err(tampered());
        }
        Ok(if fits_into_buffer { plain_bytes } else { 0 })
    }
}

/// A transport that encrypts from the end of the handshake on.
pub(crate) struct Sealed<T> {
    transport: T,
    /// Cipher of messages; `None` before the end of the handshake.
    message_cipher: Option<Box<Cipher>>,
    /// Cipher of files' bytes; `None` if they are not encrypted.
    data_cipher: Option<Box<DataCipher>>,
}

impl<T> Sealed<T> {
    /// Makes a transport that does not encrypt yet.
    pub(crate) fn unencrypted(transport: T) -> Self {
        Self {
            transport,
            message_cipher: None,
            data_cipher: None,
        }
    }

    /// Begins to encrypt messages. With a `data_key` it begins to encrypt bytes of files too.
    pub(crate) fn seal(&mut self, message_cipher: Cipher, data_key: Option<BlockKey>) {
        let is_puller = message_cipher.noise.is_initiator();
        self.data_cipher = data_key.map(|key| Box::new(DataCipher::new(key, is_puller)));
        self.message_cipher = Some(Box::new(message_cipher));
    }

    /// Whether bytes of files are encrypted.
    pub(crate) fn is_data_encrypted(&self) -> bool {
        self.data_cipher.is_some()
    }
}

impl<T: Transport> Sealed<T> {
    /// Receives bytes of a message.
    pub(crate) fn receive(&mut self, buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
        // A message begins after the last record of data. If bytes of that record are unread, the announced length was
        // wrong.
        if let Some(cipher) = &self.data_cipher
            && !cipher.is_at_record_end()
        {
            return Err(tampered());
        }
        match &mut self.message_cipher {
            Some(cipher) => cipher.receive(&mut self.transport, buffer, deadline),
            None => self.transport.receive(buffer, deadline),
        }
    }

    /// Sends a message.
    pub(crate) fn send(&mut self, bytes: &[u8], deadline: Instant) -> io::Result<()> {
        match &mut self.message_cipher {
            Some(cipher) => cipher.send(&mut self.transport, bytes, deadline),
            None => self.transport.send(bytes, deadline),
        }
    }

    /// Receives bytes of a file.
    pub(crate) fn receive_data(&mut self, buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
        // Data begins after the last record of a message. If bytes of that record are unread, the announced length was
        // wrong.
        if let Some(cipher) = &self.message_cipher
            && !cipher.is_at_record_end()
        {
            return Err(tampered());
        }
        match &mut self.data_cipher {
            Some(cipher) => cipher.receive(&mut self.transport, buffer, deadline),
            None => self.transport.receive(buffer, deadline),
        }
    }

    /// Sends bytes of a file that are in memory.
    pub(crate) fn send_data(&mut self, bytes: &[u8], deadline: Instant) -> io::Result<()> {
        match &mut self.data_cipher {
            Some(cipher) => cipher.send(&mut self.transport, bytes, deadline),
            None => self.transport.send(bytes, deadline),
        }
    }

    /// Sends `bytes` of an open file, from `offset` on.
    pub(crate) fn send_file(
        &mut self,
        file: BorrowedFd<'_>,
        offset: u64,
        bytes: u64,
        deadline: Instant,
    ) -> io::Result<()> {
        match &mut self.data_cipher {
            Some(cipher) => {
                let range = offset..offset + bytes;
                cipher.send_file(&mut self.transport, file, range, deadline)
            }
            None => self.transport.send_file(file, offset, bytes, deadline),
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

    /// A transport in memory: the bytes that were sent, and those that are to be received.
    #[derive(Default)]
    struct Wire {
        sent: Vec<u8>,
        incoming: Vec<u8>,
    }

    impl Transport for Wire {
        fn receive(&mut self, into: &mut [u8], _: Instant) -> io::Result<()> {
            if self.incoming.len() < into.len() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let rest = self.incoming.split_off(into.len());
            into.copy_from_slice(&self.incoming);
            self.incoming = rest;
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

    /// Ciphers of both sides after a key exchange.
    fn ciphers(puller_key: &[u8; 32], agent_key: &[u8; 32]) -> Result<(Cipher, Cipher), WireError> {
        let mut puller = Exchange::begin(puller_key, b"said before");
        let mut agent = Exchange::answer(agent_key, b"said before");
        assert_eq!(agent.read(&puller.write(b"")?)?, b"");
        assert_eq!(puller.read(&agent.write(b"and now")?)?, b"and now");
        Ok((puller.finish(), agent.finish()))
    }

    /// Makes the two ends of a connection with encrypted data: the puller's and the agent's.
    fn ends() -> [Sealed<Wire>; 2] {
        let (puller, agent) = ciphers(&KEY, &KEY).unwrap();
        let key = BlockKey::random().unwrap();
        [puller, agent].map(|cipher| {
            let mut sealed = Sealed::unencrypted(Wire::default());
            sealed.seal(cipher, Some(key.clone()));
            sealed
        })
    }

    /// The kind of records that a test sends.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum Kind {
        Messages,
        Data,
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn a_side_with_another_key_or_prologue_gets_through_no_exchange() {
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

    /// Sends random bytes in pieces of random size. Returns the plain bytes and the records.
    fn send_random(
        generator: &mut StdRng,
        from: &mut Sealed<Wire>,
        kind: Kind,
    ) -> (Vec<u8>, Vec<Vec<u8>>) {
        let mut sent = Vec::new();
        for _ in 0..generator.random_range(1..6) {
            let bytes_max = [3, 5000, 600_000][generator.random_range(0..3)];
            let mut plain = vec![0; generator.random_range(1..=bytes_max)];
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
            sent.extend(plain);
        }
        let mut left = std::mem::take(&mut from.transport.sent);
        let mut records = Vec::new();
        while !left.is_empty() {
            let bytes = match kind {
                Kind::Messages => 2 + usize::from(u16::from_be_bytes([left[0], left[1]])),
                Kind::Data => 20 + u32::from_be_bytes(left[..4].try_into().unwrap()) as usize,
            };
            let rest = left.split_off(bytes);
            records.push(std::mem::replace(&mut left, rest));
        }
        (sent, records)
    }

    /// Receives pieces of random size until an error, which is the last item of the result.
    fn receive_random(
        generator: &mut StdRng,
        to: &mut Sealed<Wire>,
        (wire, kind): (Vec<u8>, Kind),
    ) -> (Vec<u8>, io::Error) {
        to.transport.incoming = wire;
        let mut received = Vec::new();
        loop {
            let bytes_max = [1, 100, 300_000][generator.random_range(0..3)];
            let mut piece = vec![0; generator.random_range(1..=bytes_max)];
            let result = match kind {
                Kind::Messages => to.receive(&mut piece, soon()),
                Kind::Data => to.receive_data(&mut piece, soon()),
            };
            match result {
                Ok(()) => received.extend(piece),
                Err(error) => return (received, error),
            }
        }
    }

    #[test]
    fn sent_bytes_arrive_and_cannot_be_read_on_the_way() {
        let mut generator = StdRng::seed_from_u64(1);
        let [mut puller, mut agent] = ends();
        for round in 0..100 {
            let kind = [Kind::Messages, Kind::Data][round / 2 % 2];
            let (sent, records) = send_random(&mut generator, &mut puller, kind);
            let wire = records.concat();
            let probe = &sent[..sent.len().min(16)];
            assert!(probe.len() < 4 || !wire.windows(probe.len()).any(|part| part == probe));
            agent.transport.incoming = wire;
            let mut received = vec![0; sent.len()];
            match kind {
                Kind::Messages => agent.receive(&mut received, soon()).unwrap(),
                Kind::Data => agent.receive_data(&mut received, soon()).unwrap(),
            }
            assert!(received == sent);
            std::mem::swap(&mut puller, &mut agent);
        }
    }

    #[test]
    fn a_message_is_not_received_as_data_and_data_not_as_a_message() {
        let [mut puller, mut agent] = ends();
        puller.send(b"a message", soon()).unwrap();
        agent.transport.incoming = std::mem::take(&mut puller.transport.sent);
        agent.receive(&mut [0; 4], soon()).unwrap();
        assert!(agent.receive_data(&mut [0; 5], soon()).is_err());
        agent.receive(&mut [0; 5], soon()).unwrap();
        puller.send_data(b"some data", soon()).unwrap();
        agent.transport.incoming = std::mem::take(&mut puller.transport.sent);
        agent.receive_data(&mut [0; 4], soon()).unwrap();
        assert!(agent.receive(&mut [0; 5], soon()).is_err());
        agent.receive_data(&mut [0; 5], soon()).unwrap();
    }

    #[test]
    fn no_byte_of_a_changed_record_is_returned() {
        for seed in 0..800 {
            let kind = [Kind::Messages, Kind::Data][seed as usize % 2];
            let change = seed / 2 % 7;
            let mut generator = StdRng::seed_from_u64(seed);
            let [mut puller, mut agent] = ends();
            let (sent, mut records) = send_random(&mut generator, &mut puller, kind);
            let before = records.clone();
            let index = generator.random_range(0..records.len());
            match change {
                0 => {
                    let record = &mut records[index];
                    let bit = generator.random_range(0..8 * record.len());
                    record[bit / 8] ^= 1 << (bit % 8);
                }
                1 => drop(records.remove(index)),
                2 => records.insert(
                    index,
                    before[generator.random_range(0..before.len())].clone(),
                ),
                3 => records.shuffle(&mut generator),
                4 => records.truncate(index),
                // A record of another connection with the same shared key.
                5 => {
                    let [mut other, _] = ends();
                    records[index] = send_random(&mut generator, &mut other, kind).1.remove(0);
                }
                // The records are sent back to their sender.
                _ => std::mem::swap(&mut puller, &mut agent),
            }
            let is_same = change < 6 && records == before;
            let wire = (records.concat(), kind);
            let (received, error) = receive_random(&mut generator, &mut agent, wire);
            let case = format!("seed {seed}, {kind:?}");
            assert!(sent.starts_with(&received), "{case}");
            assert!(received.len() < sent.len() || change != 0, "{case}");
            let is_end = error.kind() == io::ErrorKind::UnexpectedEof;
            assert!(
                is_end || error.kind() == io::ErrorKind::InvalidData,
                "{case}: {error}"
            );
            let must_be_noticed = matches!(change, 2 | 5 | 6);
            assert!(
                is_same || !must_be_noticed || !is_end,
                "{case}: not noticed"
            );
        }
    }
}
