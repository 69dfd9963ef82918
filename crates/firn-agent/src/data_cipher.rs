//! Encryption of bytes of files: AEGIS-128L (RFC 10032) with the [`BlockKey`] of the connection.
//!
//! ```text
//!   data record = length of the ciphertext, 4 bytes, the most significant first │ ciphertext │ tag, 16 bytes
//! ```
//!
//! Noise has records of 64 KiB and ChaCha20-Poly1305, which is slower than a fast network. So messages are Noise's, and
//! bytes of files have a cipher that a network does not wait for.
//!
//! Promises
//! * The nonce of a data record is its direction and its number, and each is used once. A record that was changed, left
//!   out, repeated or moved is refused, and so is one of another connection or direction; no byte of it is handed on.
//! * The key is random, made by the agent for the connection, and travels encrypted by Noise: an attacker that learns
//!   the shared key later cannot read what was recorded before.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use aegis::aegis128l::Aegis128L;

use crate::block_mac::BlockKey;
use crate::sealed::tampered;
use crate::transport::Transport;

/// Plain bytes that one data record has at most: they stay in the processor's cache between the copy and the cipher.
const PLAIN_BYTES_MAX: usize = 256 << 10;
const TAG_BYTES: usize = 16;
const LENGTH_BYTES: usize = 4;
const NONCE_BYTES: usize = 16;

/// Data records of one direction.
struct Direction {
    is_of_puller: bool,
    /// Records so far.
    records: u64,
}

impl Direction {
    /// The cipher of the next record.
    fn next(&mut self, key: &BlockKey) -> Aegis128L<TAG_BYTES> {
        let mut nonce = [0; NONCE_BYTES];
        nonce[0] = u8::from(self.is_of_puller);
        nonce[NONCE_BYTES - 8..].copy_from_slice(&self.records.to_be_bytes());
        self.records += 1;
        Aegis128L::new(key.bytes(), &nonce)
    }
}

/// The state of both directions.
pub(crate) struct DataCipher {
    key: BlockKey,
    sent: Direction,
    received: Direction,
    /// The record that is sent.
    record: Vec<u8>,
    /// The last record that was received and did not fit into what was asked for.
    plain: Vec<u8>,
    /// How much of it was handed on.
    taken: usize,
}

impl DataCipher {
    pub(crate) fn new(key: BlockKey, is_puller: bool) -> Self {
        let direction = |is_of_puller| Direction {
            is_of_puller,
            records: 0,
        };
        Self {
            key,
            sent: direction(is_puller),
            received: direction(!is_puller),
            record: Vec::new(),
            plain: Vec::new(),
            taken: 0,
        }
    }

    /// Whether a part of the last record was not taken yet.
    pub(crate) fn has_rest(&self) -> bool {
        self.taken < self.plain.len()
    }

    pub(crate) fn send<T: Transport>(
        &mut self,
        inner: &mut T,
        plain: &[u8],
        deadline: Instant,
    ) -> io::Result<()> {
        for plain in plain.chunks(PLAIN_BYTES_MAX) {
            self.record_of(plain.len()).copy_from_slice(plain);
            self.send_record(inner, plain.len(), deadline)?;
        }
        Ok(())
    }

    /// Sends bytes of a file from `at` on.
    pub(crate) fn send_file<T: Transport>(
        &mut self,
        inner: &mut T,
        file: BorrowedFd<'_>,
        bytes: std::ops::Range<u64>,
        deadline: Instant,
    ) -> io::Result<()> {
        let mut at = bytes.start;
        while at < bytes.end {
            let left = usize::try_from(bytes.end - at).unwrap_or(usize::MAX);
            let most = left.min(PLAIN_BYTES_MAX);
            match rustix::io::pread(file, self.record_of(most), at) {
                // The arena is shorter than its list says.
                Ok(0) => return Err(io::ErrorKind::InvalidData.into()),
                Ok(count) => {
                    self.send_record(inner, count, deadline)?;
                    at += count as u64;
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Room for the plain bytes of the next record.
    fn record_of(&mut self, bytes: usize) -> &mut [u8] {
        self.record.resize(LENGTH_BYTES + bytes + TAG_BYTES, 0);
        &mut self.record[LENGTH_BYTES..][..bytes]
    }

    /// Encrypts the first `bytes` of that room, and sends them.
    fn send_record<T: Transport>(
        &mut self,
        inner: &mut T,
        bytes: usize,
        deadline: Instant,
    ) -> io::Result<()> {
        let length = u32::try_from(bytes).expect("records are of that size");
        let length = length.to_be_bytes();
        let cipher = self.sent.next(&self.key);
        let (head, rest) = self.record.split_at_mut(LENGTH_BYTES);
        head.copy_from_slice(&length);
        let tag = cipher.encrypt_in_place(&mut rest[..bytes], &length);
        rest[bytes..][..TAG_BYTES].copy_from_slice(&tag);
        inner.send(&self.record[..LENGTH_BYTES + bytes + TAG_BYTES], deadline)
    }

    pub(crate) fn receive<T: Transport>(
        &mut self,
        inner: &mut T,
        into: &mut [u8],
        deadline: Instant,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < into.len() {
            let left = &mut into[done..];
            let ready = self.plain.len() - self.taken;
            if ready == 0 {
                done += self.receive_record(inner, left, deadline)?;
                continue;
            }
            let count = ready.min(left.len());
            left[..count].copy_from_slice(&self.plain[self.taken..][..count]);
            self.taken += count;
            done += count;
        }
        Ok(())
    }

    /// Bytes that went straight into `into`; 0: the record is larger, and is in `plain`.
    fn receive_record<T: Transport>(
        &mut self,
        inner: &mut T,
        into: &mut [u8],
        deadline: Instant,
    ) -> io::Result<usize> {
        let mut length = [0; LENGTH_BYTES];
        inner.receive(&mut length, deadline)?;
        let bytes = u32::from_be_bytes(length) as usize;
        // No side of ours sends an empty one.
        if !(1..=PLAIN_BYTES_MAX).contains(&bytes) {
            return Err(tampered());
        }
        self.plain.clear();
        self.taken = 0;
        let is_direct = bytes <= into.len();
        let plain = if is_direct {
            &mut into[..bytes]
        } else {
            self.plain.resize(bytes, 0);
            &mut self.plain[..]
        };
        let mut tag = [0; TAG_BYTES];
        inner.receive(plain, deadline)?;
        inner.receive(&mut tag, deadline)?;
        let cipher = self.received.next(&self.key);
        if cipher.decrypt_in_place(plain, &tag, &length).is_err() {
            plain.fill(0);
            self.plain.clear();
            return Err(tampered());
        }
        Ok(if is_direct { bytes } else { 0 })
    }
}
