//! Frames over a [`Transport`].

use std::io;
use std::time::Instant;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::WireError;
use crate::message::FRAME_BYTES_MAX;
use crate::sealed::{Cipher, Sealed};
use crate::transport::Transport;

/// Bytes of the length before a frame.
const LENGTH_BYTES: usize = 4;

/// One end of a connection.
pub struct Link<T> {
    transport: Sealed<T>,
    /// Of the last frame.
    buffer: Vec<u8>,
}

impl<T: Transport> Link<T> {
    /// Over a transport on which nothing was said yet.
    pub fn over(transport: T) -> Self {
        Self {
            transport: Sealed::open(transport),
            buffer: Vec::new(),
        }
    }

    /// For the bytes between frames.
    pub fn transport(&mut self) -> &mut Sealed<T> {
        &mut self.transport
    }

    /// Whether all that goes over it is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.transport.is_sealed()
    }

    /// Encrypts all that comes from now on.
    pub(crate) fn seal(&mut self, cipher: Cipher) {
        self.transport.seal(cipher);
    }

    /// Sends a message.
    pub fn send(&mut self, message: &impl Serialize, until: Instant) -> Result<(), WireError> {
        self.buffer.clear();
        self.buffer.resize(LENGTH_BYTES, 0);
        serde_json::to_writer(&mut self.buffer, message).expect("a message is plain JSON");
        let length = self.buffer.len() - LENGTH_BYTES;
        assert!(
            length <= FRAME_BYTES_MAX,
            "whoever makes a message bounds it"
        );
        self.buffer[..LENGTH_BYTES].copy_from_slice(&(length as u32).to_be_bytes());
        self.transport.send(&self.buffer, until).map_err(ended)
    }

    /// The next message, of at most `bytes_max` bytes.
    pub fn receive<M: DeserializeOwned>(
        &mut self,
        bytes_max: usize,
        until: Instant,
    ) -> Result<M, WireError> {
        let mut length = [0; LENGTH_BYTES];
        self.transport.receive(&mut length, until).map_err(ended)?;
        let length = u32::from_be_bytes(length) as usize;
        if length > bytes_max {
            return Err(WireError::TooLong { length, bytes_max });
        }
        self.buffer.resize(length, 0);
        self.transport.receive(&mut self.buffer, until)?;
        serde_json::from_slice(&self.buffer).map_err(|error| WireError::Nonsense(error.to_string()))
    }
}

/// The ways in which the kernel says that the other side is gone.
fn ended(error: io::Error) -> WireError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::BrokenPipe
        | io::ErrorKind::ConnectionReset => WireError::Ended,
        _ => error.into(),
    }
}
