//! One end of a connection between two hosts: sends and receives messages as *frames* (a length and the message), and
//! bytes of files between the frames.
//!
//! A link begins in the clear. After the handshake it encrypts messages; bytes of files are encrypted too, or plain
//! with a message authentication code (MAC). The sender guarantees that a message fits into a frame. A receiver checks
//! the length of a frame before it allocates memory for it.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::block_mac::{BlockHasher, BlockKey};
use crate::error::WireError;
use crate::message::FRAME_BYTES_MAX;
use crate::sealed::{Cipher, Sealed};
use crate::transport::Transport;

/// Bytes of the length before a frame.
const LENGTH_BYTES: usize = 4;

/// One end of a connection.
pub struct Link<T> {
    transport: Sealed<T>,
    /// Key of the MACs of plain bytes of files. `None` if they are encrypted, or before the end of the handshake.
    block_key: Option<BlockKey>,
    /// The last frame that was sent or received.
    frame: Vec<u8>,
}

impl<T: Transport> Link<T> {
    /// Makes a link over a transport on which nothing was sent yet.
    pub fn over(transport: T) -> Self {
        Self {
            transport: Sealed::unencrypted(transport),
            block_key: None,
            frame: Vec::new(),
        }
    }

    /// Whether bytes of files are encrypted. Messages always are.
    pub fn is_encrypted(&self) -> bool {
        self.transport.is_data_encrypted()
    }

    /// Begins to encrypt messages. If `is_encrypted`, the key encrypts the bytes of files. Otherwise it makes their
    /// MACs.
    pub(crate) fn seal(&mut self, cipher: Cipher, key: BlockKey, is_encrypted: bool) {
        if is_encrypted {
            self.transport.seal(cipher, Some(key));
        } else {
            self.block_key = Some(key);
            self.transport.seal(cipher, None);
        }
    }

    /// Returns the hasher for the MAC of one answer; `None` if bytes of files are encrypted.
    pub fn block_hasher(&self) -> Option<BlockHasher> {
        self.block_key.as_ref().map(BlockHasher::new)
    }

    /// Sends a message.
    pub fn send(&mut self, message: &impl Serialize, deadline: Instant) -> Result<(), WireError> {
        self.frame.clear();
        self.frame.resize(LENGTH_BYTES, 0);
        serde_json::to_writer(&mut self.frame, message).expect("a message is plain JSON");
        let message_bytes = self.frame.len() - LENGTH_BYTES;
        assert!(
            message_bytes <= FRAME_BYTES_MAX,
            "a message fits into a frame"
        );
        self.frame[..LENGTH_BYTES].copy_from_slice(&(message_bytes as u32).to_be_bytes());
        let sent = self.transport.send(&self.frame, deadline);
        sent.map_err(wire_error)
    }

    /// Receives the next message, whose frame has at most `bytes_max` bytes.
    pub fn receive<M: DeserializeOwned>(
        &mut self,
        bytes_max: usize,
        deadline: Instant,
    ) -> Result<M, WireError> {
        let frame = self.receive_frame(bytes_max, deadline)?;
        serde_json::from_slice(frame).map_err(|error| WireError::Nonsense(error.to_string()))
    }

    /// Receives the next frame (a length and a message) and returns the message without decoding it. The bytes are
    /// valid until the next call.
    ///
    /// Fails if the message has more than `bytes_max` bytes; no memory is allocated for it.
    pub(crate) fn receive_frame(
        &mut self,
        bytes_max: usize,
        deadline: Instant,
    ) -> Result<&[u8], WireError> {
        let mut length_field = [0; LENGTH_BYTES];
        let received = self.transport.receive(&mut length_field, deadline);
        received.map_err(wire_error)?;
        let length = u32::from_be_bytes(length_field) as usize;
        if length > bytes_max {
            return Err(WireError::TooLong { length, bytes_max });
        }
        self.frame.resize(length, 0);
        // An end of the stream within a frame is no regular end of the connection, so it stays an I/O error.
        self.transport.receive(&mut self.frame, deadline)?;
        Ok(&self.frame)
    }

    /// Sends bytes of a file that a message has announced.
    pub fn send_data(&mut self, bytes: &[u8], deadline: Instant) -> Result<(), WireError> {
        Ok(self.transport.send_data(bytes, deadline)?)
    }

    /// Sends `bytes` of an open file, from `offset` on. If they are not encrypted, they are not copied.
    pub fn send_file(
        &mut self,
        file: BorrowedFd<'_>,
        offset: u64,
        bytes: u64,
        deadline: Instant,
    ) -> Result<(), WireError> {
        Ok(self.transport.send_file(file, offset, bytes, deadline)?)
    }

    /// Fills a buffer with bytes of a file that a message has announced.
    pub fn receive_data(&mut self, buffer: &mut [u8], deadline: Instant) -> Result<(), WireError> {
        Ok(self.transport.receive_data(buffer, deadline)?)
    }
}

/// Converts an I/O error between two frames. Errors that mean that the other side is gone become [`WireError::Ended`].
fn wire_error(error: io::Error) -> WireError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::BrokenPipe
        | io::ErrorKind::ConnectionReset => WireError::Ended,
        _ => error.into(),
    }
}
