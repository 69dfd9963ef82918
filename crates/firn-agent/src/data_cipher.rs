//! Encryption of the bytes of files: AEGIS-128L (RFC 10032) with the [`BlockKey`] of the connection.
//!
//! ```text
//!   data record = length of the ciphertext, 4 bytes, most significant first │ ciphertext │ tag, 16 bytes
//! ```
//!
//! Noise uses records of 64 KiB and ChaCha20-Poly1305, which is slower than a fast network. Noise therefore encrypts
//! only messages, and the bytes of files have a cipher that is fast enough for the network.
//!
//! Promises
//! * The nonce of a data record consists of its direction and its number, so no nonce is used twice. A record is
//!   refused if it was changed, left out, repeated or moved, or belongs to another connection or direction. No byte of
//!   a refused record is returned.
//! * The agent makes a random key for each connection and sends it encrypted by Noise. An attacker that learns the
//!   shared key later can therefore not read earlier recordings.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use aegis::aegis128l::Aegis128L;

use crate::block_mac::BlockKey;
use crate::sealed::tampered;
use crate::transport::Transport;

/// Maximum number of plain bytes of a data record: few enough that they are still in the processor's cache when they
/// are encrypted.
const PLAIN_BYTES_MAX: usize = 256 << 10;
const TAG_BYTES: usize = 16;
const LENGTH_BYTES: usize = 4;
const NONCE_BYTES: usize = 16;

/// Numbering of the data records of one direction.
struct Direction {
    /// Whether the puller sends these records.
    is_of_puller: bool,
    /// Number of the next record.
    next_number: u64,
}

impl Direction {
    /// Returns the cipher of the next record, and counts the record.
    fn next(&mut self, key: &BlockKey) -> Aegis128L<TAG_BYTES> {
        let mut nonce = [0; NONCE_BYTES];
        nonce[0] = u8::from(self.is_of_puller);
        let number = self.next_number.to_be_bytes();
        nonce[NONCE_BYTES - number.len()..].copy_from_slice(&number);
        self.next_number += 1;
        Aegis128L::new(key.bytes(), &nonce)
    }
}

/// Encrypts and decrypts the bytes of files on a connection.
pub(crate) struct DataCipher {
    key: BlockKey,
    sent: Direction,
    received: Direction,
    /// Buffer for a record that is sent: length, bytes and tag.
    record: Vec<u8>,
    /// Plain bytes of the last received record, if a reader asked for fewer than the record has.
    plain: Vec<u8>,
    /// Bytes of `plain` that were returned already.
    plain_used: usize,
}

impl DataCipher {
    pub(crate) fn new(key: BlockKey, is_puller: bool) -> Self {
        let direction = |is_of_puller| Direction {
            is_of_puller,
            next_number: 0,
        };
        Self {
            key,
            sent: direction(is_puller),
            received: direction(!is_puller),
            record: Vec::new(),
            plain: Vec::new(),
            plain_used: 0,
        }
    }

    /// Whether some bytes of the last record were not returned yet.
    pub(crate) fn has_rest(&self) -> bool {
        self.plain_used < self.plain.len()
    }

    /// Sends bytes in as many records as they need.
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

    /// Sends a range of an open file. Fails if the file is shorter.
    pub(crate) fn send_file<T: Transport>(
        &mut self,
        inner: &mut T,
        file: BorrowedFd<'_>,
        range: std::ops::Range<u64>,
        deadline: Instant,
    ) -> io::Result<()> {
        let mut offset = range.start;
        while offset < range.end {
            let left = usize::try_from(range.end - offset).unwrap_or(usize::MAX);
            let bytes_max = left.min(PLAIN_BYTES_MAX);
            match rustix::io::pread(file, self.record_of(bytes_max), offset) {
                // The chunk list has a piece beyond the end of the arena.
                Ok(0) => return Err(io::ErrorKind::InvalidData.into()),
                Ok(count) => {
                    self.send_record(inner, count, deadline)?;
                    offset += count as u64;
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Returns the part of the record's buffer for `bytes` plain bytes.
    fn record_of(&mut self, bytes: usize) -> &mut [u8] {
        self.record.resize(LENGTH_BYTES + bytes + TAG_BYTES, 0);
        &mut self.record[LENGTH_BYTES..][..bytes]
    }

    /// Encrypts the first `bytes` that [`DataCipher::record_of`] returned, and sends the record.
    fn send_record<T: Transport>(
        &mut self,
        inner: &mut T,
        bytes: usize,
        deadline: Instant,
    ) -> io::Result<()> {
        let length = u32::try_from(bytes).expect("a record has at most PLAIN_BYTES_MAX bytes");
        let length = length.to_be_bytes();
        let cipher = self.sent.next(&self.key);
        let (head, rest) = self.record.split_at_mut(LENGTH_BYTES);
        head.copy_from_slice(&length);
        let tag = cipher.encrypt_in_place(&mut rest[..bytes], &length);
        rest[bytes..][..TAG_BYTES].copy_from_slice(&tag);
        inner.send(&self.record[..LENGTH_BYTES + bytes + TAG_BYTES], deadline)
    }

    /// Fills `into` with the next bytes. Receives as many records as necessary.
    pub(crate) fn receive<T: Transport>(
        &mut self,
        inner: &mut T,
        into: &mut [u8],
        deadline: Instant,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < into.len() {
            let left = &mut into[done..];
            let available = self.plain.len() - self.plain_used;
            if available == 0 {
                done += self.receive_record(inner, left, deadline)?;
                continue;
            }
            let count = available.min(left.len());
            left[..count].copy_from_slice(&self.plain[self.plain_used..][..count]);
            self.plain_used += count;
            done += count;
        }
        Ok(())
    }

    /// Receives the next record. If it fits into `into`, decrypts it there and returns its size. Otherwise decrypts it
    /// into `plain` and returns 0.
    fn receive_record<T: Transport>(
        &mut self,
        inner: &mut T,
        into: &mut [u8],
        deadline: Instant,
    ) -> io::Result<usize> {
        let mut length = [0; LENGTH_BYTES];
        inner.receive(&mut length, deadline)?;
        let bytes = u32::from_be_bytes(length) as usize;
        // Neither side sends an empty record.
        if !(1..=PLAIN_BYTES_MAX).contains(&bytes) {
            return Err(tampered());
        }
        self.plain.clear();
        self.plain_used = 0;
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
            // The decrypted bytes are not authentic. They are erased, because the caller may keep its buffer.
            plain.fill(0);
            self.plain.clear();
            return Err(tampered());
        }
        Ok(if is_direct { bytes } else { 0 })
    }
}
