//! One end of a connection: sends and receives messages as frames, and bytes of files between the frames.
//!
//! A link begins in the clear. After the handshake it encrypts messages; bytes of files are encrypted too, or plain
//! with a MAC. The sender guarantees that a message fits into a frame. A receiver checks the length of a frame before
//! it allocates memory for it.

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
    buffer: Vec<u8>,
}

impl<T: Transport> Link<T> {
    /// Makes a link over a transport on which nothing was sent yet.
    pub fn over(transport: T) -> Self {
        Self {
            transport: Sealed::open(transport),
            block_key: None,
            buffer: Vec::new(),
        }
    }

    /// Whether bytes of files are encrypted. Messages always are.
    pub fn is_encrypted(&self) -> bool {
        self.transport.is_data_encrypted()
    }

    /// Begins to encrypt messages. `key` encrypts the bytes of files if `is_encrypted`, else it makes their MACs.
    pub(crate) fn seal(&mut self, cipher: Cipher, key: BlockKey, is_encrypted: bool) {
        self.block_key = (!is_encrypted).then(|| key.clone());
        self.transport.seal(cipher, is_encrypted.then_some(key));
    }

    /// Returns the hasher for the MAC of one answer; `None` if bytes of files are encrypted.
    pub fn block_hasher(&self) -> Option<BlockHasher> {
        self.block_key.as_ref().map(BlockHasher::new)
    }

    /// Sends a message.
    pub fn send(&mut self, message: &impl Serialize, deadline: Instant) -> Result<(), WireError> {
        self.buffer.clear();
        self.buffer.resize(LENGTH_BYTES, 0);
        serde_json::to_writer(&mut self.buffer, message).expect("a message is plain JSON");
        let length = self.buffer.len() - LENGTH_BYTES;
        assert!(length <= FRAME_BYTES_MAX, "a message fits into a frame");
        self.buffer[..LENGTH_BYTES].copy_from_slice(&(length as u32).to_be_bytes());
        self.transport.send(&self.buffer, deadline).map_err(ended)
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

    /// Receives the next frame without decoding it.
    pub(crate) fn receive_frame(
        &mut self,
        bytes_max: usize,
        deadline: Instant,
    ) -> Result<&[u8], WireError> {
        let mut length = [0; LENGTH_BYTES];
        self.transport
            .receive(&mut length, deadline)
            .map_err(ended)?;
        let length = u32::from_be_bytes(length) as usize;
        if length > bytes_max {
            return Err(WireError::TooLong { length, bytes_max });
        }
        self.buffer.resize(length, 0);
        self.transport.receive(&mut self.buffer, deadline)?;
        Ok(&self.buffer)
    }

    /// Sends bytes of a file that a message has announced.
    pub fn send_data(&mut self, bytes: &[u8], deadline: Instant) -> Result<(), WireError> {
        Ok(self.transport.send_data(bytes, deadline)?)
    }

    /// Sends `bytes` of an open file from the offset `at` on. If they are not encrypted, they are not copied.
    pub fn send_file(
        &mut self,
        file: BorrowedFd<'_>,
        at: u64,
        bytes: u64,
        deadline: Instant,
    ) -> Result<(), WireError> {
        Ok(self.transport.send_file(file, at, bytes, deadline)?)
    }

    /// Fills `into` with bytes of a file that a message has announced.
    pub fn receive_data(&mut self, into: &mut [u8], deadline: Instant) -> Result<(), WireError> {
        Ok(self.transport.receive_data(into, deadline)?)
    }
}

/// Converts the errors by which the kernel reports that the other side is gone to [`WireError::Ended`].
fn ended(error: io::Error) -> WireError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::BrokenPipe
        | io::ErrorKind::ConnectionReset => WireError::Ended,
        _ => error.into(),
    }
}
