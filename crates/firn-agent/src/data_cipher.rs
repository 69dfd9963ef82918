//! Encryption of the bytes of files between an agent, which sends the files of a mount, and a puller, which copies them
//! to another host. The cipher is AEGIS-128L (RFC 10032) with the [`BlockKey`] of the connection.
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
use crate::sealed::{UnreadBytes, tampered};
use crate::transport::Transport;

/// Maximum number of plain bytes of a data record: few enough that they are still in the processor's cache when they
/// are encrypted.
const PLAIN_BYTES_MAX: usize = 256 << 10;
const TAG_BYTES: usize = 16;
const LENGTH_BYTES: usize = 4;
const NONCE_BYTES: usize = 16;

/// Numbering of the data records of one direction.
struct RecordNumbers {
    /// Whether the puller sends these records.
    is_sent_by_puller: bool,
    /// Number of the next record.
    next_number: u64,
}

impl RecordNumbers {
    /// Returns the cipher of the next record, and counts the record.
    fn next_cipher(&mut self, key: &BlockKey) -> Aegis128L<TAG_BYTES> {
        let mut nonce = [0; NONCE_BYTES];
        nonce[0] = u8::from(self.is_sent_by_puller);
        let number = self.next_number.to_be_bytes();
        nonce[NONCE_BYTES - number.len()..].copy_from_slice(&number);
        self.next_number += 1;
        Aegis128L::new(key.bytes(), &nonce)
    }
}

/// Encrypts and decrypts the bytes of files on a connection.
pub(crate) struct DataCipher {
    key: BlockKey,
    sent_records: RecordNumbers,
    received_records: RecordNumbers,
    /// Buffer for a record that is sent: length, bytes and tag.
    record: Vec<u8>,
    unread: UnreadBytes,
}

impl DataCipher {
    pub(crate) fn new(key: BlockKey, is_puller: bool) -> Self {
        let first_record = |is_sent_by_puller| RecordNumbers {
            is_sent_by_puller,
            next_number: 0,
        };
        Self {
            key,
            sent_records: first_record(is_puller),
            received_records: first_record(!is_puller),
            record: Vec::new(),
            unread: UnreadBytes::default(),
        }
    }

    /// Whether all bytes of the last record were returned.
    pub(crate) fn is_at_record_end(&self) -> bool {
        self.unread.is_empty()
    }

    /// Sends bytes in as many records as they need.
    pub(crate) fn send<T: Transport>(
        &mut self,
        transport: &mut T,
        bytes: &[u8],
        deadline: Instant,
    ) -> io::Result<()> {
        for plain in bytes.chunks(PLAIN_BYTES_MAX) {
            self.plain_part(plain.len()).copy_from_slice(plain);
            self.send_record(transport, plain.len(), deadline)?;
        }
        Ok(())
    }

    /// Encrypts a range of an open file and sends it in as many records as it needs. Fails with `InvalidData` if the
    /// file ends before the range does.
    pub(crate) fn send_file<T: Transport>(
        &mut self,
        transport: &mut T,
        file: BorrowedFd<'_>,
        range: std::ops::Range<u64>,
        deadline: Instant,
    ) -> io::Result<()> {
        let mut offset = range.start;
        while offset < range.end {
            let unsent_bytes = usize::try_from(range.end - offset).unwrap_or(usize::MAX);
            let bytes_max = unsent_bytes.min(PLAIN_BYTES_MAX);
            match rustix::io::pread(file, self.plain_part(bytes_max), offset) {
                // The file ends before the range does.
                Ok(0) => return Err(io::ErrorKind::InvalidData.into()),
                Ok(count) => {
                    self.send_record(transport, count, deadline)?;
                    offset += count as u64;
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Returns the part of the record's buffer for `bytes` plain bytes.
    fn plain_part(&mut self, bytes: usize) -> &mut [u8] {
        self.record.resize(LENGTH_BYTES + bytes + TAG_BYTES, 0);
        &mut self.record[LENGTH_BYTES..][..bytes]
    }

    /// Encrypts the first `bytes` of [`DataCipher::plain_part`], and sends the record: its length, the ciphertext and
    /// the authentication tag. The caller has put the bytes there; they are overwritten by the ciphertext.
    fn send_record<T: Transport>(
        &mut self,
        transport: &mut T,
        bytes: usize,
        deadline: Instant,
    ) -> io::Result<()> {
        let record = &mut self.record[..LENGTH_BYTES + bytes + TAG_BYTES];
        let (length_field, plain_and_tag) = record.split_at_mut(LENGTH_BYTES);
        let (plain, tag_field) = plain_and_tag.split_at_mut(bytes);
        let length = u32::try_from(bytes).expect("a record has at most PLAIN_BYTES_MAX bytes");
        length_field.copy_from_slice(&length.to_be_bytes());
        let cipher = self.sent_records.next_cipher(&self.key);
        let tag = cipher.encrypt_in_place(plain, length_field);
        tag_field.copy_from_slice(&tag);
        transport.send(record, deadline)
    }

    /// Fills a buffer with the next decrypted bytes. Receives as many records as necessary. Bytes of a record that do
    /// not fit are returned by the next call.
    pub(crate) fn receive<T: Transport>(
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
    /// it into [`DataCipher::unread`] and returns 0.
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
        let bytes = u32::from_be_bytes(length_field) as usize;
        // Neither side sends an empty record.
        if !(1..=PLAIN_BYTES_MAX).contains(&bytes) {
            return Err(tampered());
        }
        self.unread.clear();
        let fits_into_buffer = bytes <= buffer.len();
        let record_bytes = if fits_into_buffer {
            &mut buffer[..bytes]
        } else {
            self.unread.allocate(bytes)
        };
        let mut tag = [0; TAG_BYTES];
        transport.receive(record_bytes, deadline)?;
        transport.receive(&mut tag, deadline)?;
        let cipher = self.received_records.next_cipher(&self.key);
        let decrypted = cipher.decrypt_in_place(record_bytes, &tag, &length_field);
        if decrypted.is_err() {
            // The decrypted bytes are not authentic. They are erased, because the caller may keep its buffer.
            record_bytes.fill(0);
            self.unread.clear();
            return Err(tampered());
        }
        Ok(if fits_into_buffer { bytes } else { 0 })
    }
}
