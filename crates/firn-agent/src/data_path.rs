//! How the bytes of an answer reach a puller.
//!
//! [`DataPath`] is the seam. [`InLine`] is always there: bytes follow on the connection. [`Told`] says where they are,
//! and the puller reads them by libfabric.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use crate::block_mac::BlockHasher;
use crate::error::WireError;
use crate::link::Link;
use crate::message::{BLOCK_BYTES, Reply};
use crate::transport::Transport;

/// A part of the arena that a list holds.
pub(crate) struct MemoryPart<'a> {
    /// From the start of the data region.
    pub(crate) at: u64,
    /// The bytes, mapped.
    pub(crate) bytes: &'a [u8],
}

/// The arena: its file, and where the data region begins in it.
#[derive(Clone, Copy)]
pub(crate) struct ArenaFile<'a> {
    pub(crate) file: BorrowedFd<'a>,
    pub(crate) start: u64,
}

/// See the head of this file. Parts of an answer come in their order, then its end, once.
pub(crate) trait DataPath<T> {
    /// Parts that are in memory, and stay as they are while their list is held.
    fn send_memory(
        &mut self,
        link: &mut Link<T>,
        arena: ArenaFile<'_>,
        parts: &[MemoryPart<'_>],
    ) -> Result<(), WireError>;

    /// Bytes that were read into a buffer.
    fn send_copy(&mut self, link: &mut Link<T>, bytes: &[u8]) -> Result<(), WireError>;

    /// Sends `bytes` zeros.
    fn send_zeros(&mut self, link: &mut Link<T>, bytes: u64) -> Result<(), WireError>;

    /// The end of the answer.
    fn end(&mut self, link: &mut Link<T>) -> Result<(), WireError>;
}

/// Bytes that were read into a buffer; nothing but how many where they are all zeros, as holes are that no list tells.
pub(crate) fn send_bytes_or_zeros<T>(
    data: &mut dyn DataPath<T>,
    link: &mut Link<T>,
    bytes: &[u8],
) -> Result<(), WireError> {
    if bytes.iter().all(|byte| *byte == 0) {
        data.send_zeros(link, bytes.len() as u64)
    } else {
        data.send_copy(link, bytes)
    }
}

/// Bytes follow their messages.
pub(crate) struct InLine {
    /// None: they are encrypted.
    hasher: Option<BlockHasher>,
    deadline: Instant,
}

impl InLine {
    /// For one answer.
    pub(crate) fn begin(hasher: Option<BlockHasher>, deadline: Instant) -> Self {
        Self { hasher, deadline }
    }

    fn hash(&mut self, bytes: &[u8]) {
        if let Some(hasher) = &mut self.hasher {
            hasher.update(bytes);
        }
    }
}

impl<T: Transport> DataPath<T> for InLine {
    fn send_memory(
        &mut self,
        link: &mut Link<T>,
        arena: ArenaFile<'_>,
        parts: &[MemoryPart<'_>],
    ) -> Result<(), WireError> {
        let bytes = parts.iter().map(|part| part.bytes.len() as u64).sum();
        link.send(&Reply::Bytes { bytes }, self.deadline)?;
        for part in parts {
            let at = arena.start + part.at;
            let bytes = part.bytes.len() as u64;
            link.send_file(arena.file, at, bytes, self.deadline)?;
            // While the network has the bytes, which stay as they are.
            self.hash(part.bytes);
        }
        Ok(())
    }

    fn send_copy(&mut self, link: &mut Link<T>, copy: &[u8]) -> Result<(), WireError> {
        self.hash(copy);
        let bytes = copy.len() as u64;
        link.send(&Reply::Bytes { bytes }, self.deadline)?;
        link.send_data(copy, self.deadline)
    }

    fn send_zeros(&mut self, link: &mut Link<T>, bytes: u64) -> Result<(), WireError> {
        link.send(&Reply::Zeros { bytes }, self.deadline)
    }

    fn end(&mut self, link: &mut Link<T>) -> Result<(), WireError> {
        let mac = self.hasher.take().map(BlockHasher::finish);
        link.send(&Reply::End { mac }, self.deadline)
    }
}

/// The puller is told where bytes are: where they lie in the arena, or in a staging buffer, in which what lies
/// elsewhere and what is small is gathered.
pub(crate) struct Told<'a> {
    staging: &'a mut [u8],
    /// Of the staging buffer, among those of the connection.
    staging_at: u64,
    staged: usize,
    told: usize,
    /// None: the puller wants no MAC.
    hasher: Option<BlockHasher>,
    deadline: Instant,
}

/// A part that is smaller is gathered: a message and a read of its own would take longer than the copy.
const PART_BYTES_MIN: usize = 64 << 10;
/// Fewer zeros are gathered like other bytes: they make no hole in a file, and a block has few parts.
const ZEROS_BYTES_MIN: u64 = 4096;
/// Parts of an answer: what is in memory, what is gathered between them, and zeros.
pub(crate) const PARTS_MAX: usize =
    2 * (BLOCK_BYTES / PART_BYTES_MIN as u64 + BLOCK_BYTES / ZEROS_BYTES_MIN + 1) as usize;

impl<'a> Told<'a> {
    /// For one answer, with a staging buffer that is as large as the largest one.
    pub(crate) fn begin(
        staging: &'a mut [u8],
        staging_at: u64,
        hasher: Option<BlockHasher>,
        deadline: Instant,
    ) -> Self {
        Self {
            staging,
            staging_at,
            staged: 0,
            told: 0,
            hasher,
            deadline,
        }
    }

    fn hash(&mut self, bytes: &[u8]) {
        if let Some(hasher) = &mut self.hasher {
            hasher.update(bytes);
        }
    }

    fn stage(&mut self, bytes: &[u8]) {
        let end = self.staged + bytes.len();
        self.staging[self.staged..end].copy_from_slice(bytes);
        self.staged = end;
    }

    /// Tells of what was gathered since the last time.
    fn tell_staged<T: Transport>(&mut self, link: &mut Link<T>) -> Result<(), WireError> {
        let bytes = (self.staged - self.told) as u64;
        if bytes == 0 {
            return Ok(());
        }
        let reply = Reply::Staged {
            at: self.staging_at + self.told as u64,
            bytes,
        };
        self.told = self.staged;
        link.send(&reply, self.deadline)
    }
}

impl<T: Transport> DataPath<T> for Told<'_> {
    fn send_memory(
        &mut self,
        link: &mut Link<T>,
        _arena: ArenaFile<'_>,
        parts: &[MemoryPart<'_>],
    ) -> Result<(), WireError> {
        let are_adjacent =
            |a: &MemoryPart<'_>, b: &MemoryPart<'_>| a.at + a.bytes.len() as u64 == b.at;
        for run in parts.chunk_by(are_adjacent) {
            let bytes: usize = run.iter().map(|part| part.bytes.len()).sum();
            let is_gathered = bytes < PART_BYTES_MIN;
            for part in run {
                self.hash(part.bytes);
                if is_gathered {
                    self.stage(part.bytes);
                }
            }
            if !is_gathered {
                self.tell_staged(link)?;
                let at = run[0].at;
                let bytes = bytes as u64;
                link.send(&Reply::InMemory { at, bytes }, self.deadline)?;
            }
        }
        Ok(())
    }

    fn send_copy(&mut self, _link: &mut Link<T>, copy: &[u8]) -> Result<(), WireError> {
        self.hash(copy);
        self.stage(copy);
        Ok(())
    }

    fn send_zeros(&mut self, link: &mut Link<T>, bytes: u64) -> Result<(), WireError> {
        if bytes < ZEROS_BYTES_MIN {
            let zeros = &[0; ZEROS_BYTES_MIN as usize][..bytes as usize];
            return self.send_copy(link, zeros);
        }
        self.tell_staged(link)?;
        link.send(&Reply::Zeros { bytes }, self.deadline)
    }

    fn end(&mut self, link: &mut Link<T>) -> Result<(), WireError> {
        self.tell_staged(link)?;
        let mac = self.hasher.take().map(BlockHasher::finish);
        link.send(&Reply::Placed { mac }, self.deadline)
    }
}
