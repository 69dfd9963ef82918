//! The two ways by which a host sends the bytes of a file to another host.
//!
//! The *agent* answers requests for ranges of files. The *puller*, on the other host, sends these requests. Bytes that
//! are not in the served directory yet are in the *arena*, a shared memory; its *data region* has files' bytes only.
//!
//! [`DataPath`] is the interface. With [`InlineAnswer`] the bytes follow on the connection. With [`PlacedAnswer`] the
//! agent sends their addresses, and the puller reads them by libfabric (RDMA).

use std::time::Instant;

use firn_client::ArenaFile;

use crate::block_mac::BlockHasher;
use crate::error::WireError;
use crate::link::Link;
use crate::message::{BLOCK_BYTES, Reply};
use crate::transport::Transport;

/// A range of the arena's data region. It does not change while the agent holds the chunk list of its file, by which
/// firnd, the process that serves the mount, keeps the file's bytes in memory.
pub(crate) struct MemoryPart<'a> {
    /// Offset from the start of the data region.
    pub(crate) region_offset: u64,
    /// The mapped bytes.
    pub(crate) bytes: &'a [u8],
}

/// Sends one answer. The caller passes the parts of the answer in their order, and then calls `end` once.
pub(crate) trait DataPath<T> {
    /// Sends parts in memory. They must not change while their chunk list is held.
    fn send_memory(
        &mut self,
        link: &mut Link<T>,
        arena: ArenaFile<'_>,
        parts: &[MemoryPart<'_>],
    ) -> Result<(), WireError>;

    /// Sends bytes that were read into a buffer.
    fn send_copy(&mut self, link: &mut Link<T>, bytes: &[u8]) -> Result<(), WireError>;

    /// Sends a run of `bytes` zeros. Only their number is transferred.
    fn send_zeros(&mut self, link: &mut Link<T>, bytes: u64) -> Result<(), WireError>;

    /// Ends the answer, with its MAC if it has one.
    fn end(&mut self, link: &mut Link<T>) -> Result<(), WireError>;
}

/// Sends bytes that were read into a buffer. If all are zeros, sends only their number: the backing may have holes that
/// no chunk list shows.
pub(crate) fn send_bytes_or_zeros<T>(
    data_path: &mut dyn DataPath<T>,
    link: &mut Link<T>,
    bytes: &[u8],
) -> Result<(), WireError> {
    if bytes.iter().all(|byte| *byte == 0) {
        data_path.send_zeros(link, bytes.len() as u64)
    } else {
        data_path.send_copy(link, bytes)
    }
}

/// Sends the bytes of an answer over the connection, after the messages that announce them.
pub(crate) struct InlineAnswer {
    /// Hasher for the MAC; `None` if bytes are encrypted.
    hasher: Option<BlockHasher>,
    deadline: Instant,
}

impl InlineAnswer {
    /// Begins an answer.
    pub(crate) fn begin(hasher: Option<BlockHasher>, deadline: Instant) -> Self {
        Self { hasher, deadline }
    }

    fn hash(&mut self, bytes: &[u8]) {
        if let Some(hasher) = &mut self.hasher {
            hasher.update(bytes);
        }
    }
}

impl<T: Transport> DataPath<T> for InlineAnswer {
    /// Sends a message with the number of bytes, and then the bytes from the file of the arena (the shared memory of
    /// the mount), without a copy. The caller holds the chunk list of the file, so the bytes do not change.
    fn send_memory(
        &mut self,
        link: &mut Link<T>,
        arena: ArenaFile<'_>,
        parts: &[MemoryPart<'_>],
    ) -> Result<(), WireError> {
        let total_bytes = parts.iter().map(|part| part.bytes.len() as u64).sum();
        link.send(&Reply::Bytes { bytes: total_bytes }, self.deadline)?;
        for part in parts {
            let file_offset = arena.region_start + part.region_offset;
            let part_bytes = part.bytes.len() as u64;
            link.send_file(arena.file, file_offset, part_bytes, self.deadline)?;
            // The bytes are hashed after the call, while the network sends them. Their chunk list is held, so they do
            // not change.
            self.hash(part.bytes);
        }
        Ok(())
    }

    fn send_copy(&mut self, link: &mut Link<T>, bytes: &[u8]) -> Result<(), WireError> {
        self.hash(bytes);
        let announcement = Reply::Bytes {
            bytes: bytes.len() as u64,
        };
        link.send(&announcement, self.deadline)?;
        link.send_data(bytes, self.deadline)
    }

    fn send_zeros(&mut self, link: &mut Link<T>, bytes: u64) -> Result<(), WireError> {
        link.send(&Reply::Zeros { bytes }, self.deadline)
    }

    fn end(&mut self, link: &mut Link<T>) -> Result<(), WireError> {
        let mac = self.hasher.take().map(BlockHasher::finish);
        link.send(&Reply::End { mac }, self.deadline)
    }
}

/// Sends the addresses of the bytes of an answer: in the arena, or in a staging buffer of the agent.
///
/// Small parts, and bytes that are not in memory, are copied to the staging buffer one after the other.
pub(crate) struct PlacedAnswer<'a> {
    staging_buffer: &'a mut [u8],
    /// Offset of this staging buffer from the first one of the connection.
    staging_start: u64,
    /// Number of bytes that were copied to the staging buffer.
    staged_bytes: usize,
    /// Number of these bytes that the puller was already notified of.
    announced_bytes: usize,
    /// Hasher for the MAC; `None` if the puller wants no MAC.
    hasher: Option<BlockHasher>,
    deadline: Instant,
}

/// Parts with fewer bytes are copied to the staging buffer: a message and a read for each of them would take longer
/// than the copy.
const PART_BYTES_MIN: usize = 64 << 10;
/// Runs of fewer zeros are copied to the staging buffer too. They would make no hole in a file, but would divide a
/// block into more parts.
const ZEROS_BYTES_MIN: u64 = 4096;
/// Maximum number of parts of an answer: parts in memory, runs of zeros, and after each of these one staged part.
pub(crate) const PARTS_MAX: usize =
    2 * (BLOCK_BYTES / PART_BYTES_MIN as u64 + BLOCK_BYTES / ZEROS_BYTES_MIN + 1) as usize;

impl<'a> PlacedAnswer<'a> {
    /// Begins an answer. The staging buffer has room for the longest answer.
    pub(crate) fn begin(
        staging_buffer: &'a mut [u8],
        staging_start: u64,
        hasher: Option<BlockHasher>,
        deadline: Instant,
    ) -> Self {
        Self {
            staging_buffer,
            staging_start,
            staged_bytes: 0,
            announced_bytes: 0,
            hasher,
            deadline,
        }
    }

    fn hash(&mut self, bytes: &[u8]) {
        if let Some(hasher) = &mut self.hasher {
            hasher.update(bytes);
        }
    }

    /// Copies bytes to the staging buffer.
    fn stage(&mut self, bytes: &[u8]) {
        let end = self.staged_bytes + bytes.len();
        self.staging_buffer[self.staged_bytes..end].copy_from_slice(bytes);
        self.staged_bytes = end;
    }

    /// Notifies the puller of the bytes that were staged since the last call.
    fn announce_staged<T: Transport>(&mut self, link: &mut Link<T>) -> Result<(), WireError> {
        let new_bytes = (self.staged_bytes - self.announced_bytes) as u64;
        if new_bytes == 0 {
            return Ok(());
        }
        let reply = Reply::Staged {
            at: self.staging_start + self.announced_bytes as u64,
            bytes: new_bytes,
        };
        self.announced_bytes = self.staged_bytes;
        link.send(&reply, self.deadline)
    }
}

impl<T: Transport> DataPath<T> for PlacedAnswer<'_> {
    /// Sends the address of each run of adjacent parts, so that the puller, the host that copies files, can read them
    /// from memory. A short run is copied to the staging buffer (memory for such bytes) instead.
    fn send_memory(
        &mut self,
        link: &mut Link<T>,
        _arena: ArenaFile<'_>,
        parts: &[MemoryPart<'_>],
    ) -> Result<(), WireError> {
        let are_adjacent = |part: &MemoryPart<'_>, next_part: &MemoryPart<'_>| {
            part.region_offset + part.bytes.len() as u64 == next_part.region_offset
        };
        for run in parts.chunk_by(are_adjacent) {
            let run_bytes: usize = run.iter().map(|part| part.bytes.len()).sum();
            let is_copied = run_bytes < PART_BYTES_MIN;
            for part in run {
                self.hash(part.bytes);
                if is_copied {
                    self.stage(part.bytes);
                }
            }
            if !is_copied {
                // The puller receives the parts of a block in their order, so the staged ones come first.
                self.announce_staged(link)?;
                let reply = Reply::InMemory {
                    at: run[0].region_offset,
                    bytes: run_bytes as u64,
                };
                link.send(&reply, self.deadline)?;
            }
        }
        Ok(())
    }

    fn send_copy(&mut self, _link: &mut Link<T>, bytes: &[u8]) -> Result<(), WireError> {
        self.hash(bytes);
        self.stage(bytes);
        Ok(())
    }

    fn send_zeros(&mut self, link: &mut Link<T>, bytes: u64) -> Result<(), WireError> {
        if bytes < ZEROS_BYTES_MIN {
            let zeros = &[0; ZEROS_BYTES_MIN as usize][..bytes as usize];
            return self.send_copy(link, zeros);
        }
        self.announce_staged(link)?;
        link.send(&Reply::Zeros { bytes }, self.deadline)
    }

    fn end(&mut self, link: &mut Link<T>) -> Result<(), WireError> {
        self.announce_staged(link)?;
        let mac = self.hasher.take().map(BlockHasher::finish);
        link.send(&Reply::Placed { mac }, self.deadline)
    }
}
