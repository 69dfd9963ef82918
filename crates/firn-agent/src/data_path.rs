//! The two ways by which a host sends the bytes of a file to another host.
//!
//! The *agent* answers requests for ranges of files. The *puller*, on the other host, sends these requests.
//!
//! [`DataPath`] is the interface. With [`StreamAnswer`] the bytes follow on the connection. With [`AddressAnswer`] the
//! agent sends their addresses, and the puller reads them by libfabric (RDMA).
//!
//! Terms
//! * *arena*: the shared memory of a mount, for bytes that are not yet in the served directory. Its *data region* has
//!   only bytes of files.
//! * *chunk list*: says where each byte of a file is. While a process has one, these bytes in memory do not change.

use std::time::Instant;

use firn_client::ArenaFile;

use crate::block_mac::BlockHasher;
use crate::error::WireError;
use crate::link::Link;
use crate::message::{BLOCK_BYTES, Reply};
use crate::transport::Transport;

/// A range of the arena's data region. Its bytes do not change while the agent has the chunk list of its file.
pub(crate) struct MemoryPart<'a> {
    /// Offset from the start of the data region.
    pub(crate) region_offset: u64,
    /// The mapped bytes.
    pub(crate) bytes: &'a [u8],
}

/// Sends the bytes of one answer. The caller passes the parts of the answer in their order, and then calls `end` once.
pub(crate) trait DataPath<T> {
    /// Sends parts of the arena, if possible without a copy. The caller must have the chunk list of their file until
    /// the answer has ended, so that the bytes do not change.
    fn send_arena_parts(
        &mut self,
        link: &mut Link<T>,
        arena_file: ArenaFile<'_>,
        parts: &[MemoryPart<'_>],
    ) -> Result<(), WireError>;

    /// Sends bytes that were read into a buffer. The buffer may change after the call.
    fn send_buffer(&mut self, link: &mut Link<T>, bytes: &[u8]) -> Result<(), WireError>;

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
        data_path.send_buffer(link, bytes)
    }
}

/// Sends the bytes of an answer over the connection, after the messages that announce them.
pub(crate) struct StreamAnswer {
    /// Hasher for the MAC; `None` if bytes are encrypted.
    hasher: Option<BlockHasher>,
    deadline: Instant,
}

impl StreamAnswer {
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

impl<T: Transport> DataPath<T> for StreamAnswer {
    /// Sends a message with the number of bytes, and then the bytes, without a copy, from `arena_file` (the shared
    /// memory of the mount). The caller has the file's chunk list, a lock that keeps the bytes from changing.
    fn send_arena_parts(
        &mut self,
        link: &mut Link<T>,
        arena_file: ArenaFile<'_>,
        parts: &[MemoryPart<'_>],
    ) -> Result<(), WireError> {
        let total_bytes = parts.iter().map(|part| part.bytes.len() as u64).sum();
        link.send(&Reply::Bytes { bytes: total_bytes }, self.deadline)?;
        for part in parts {
            let file_offset = arena_file.region_start + part.region_offset;
            let part_bytes = part.bytes.len() as u64;
            link.send_file(arena_file.file, file_offset, part_bytes, self.deadline)?;
            // The bytes are hashed after the call, while the network sends them. The chunk list keeps them unchanged.
            self.hash(part.bytes);
        }
        Ok(())
    }

    fn send_buffer(&mut self, link: &mut Link<T>, bytes: &[u8]) -> Result<(), WireError> {
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
pub(crate) struct AddressAnswer<'a> {
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

impl<'a> AddressAnswer<'a> {
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

impl<T: Transport> DataPath<T> for AddressAnswer<'_> {
    /// Sends the address of each run of adjacent parts. The puller, the host that copies files, then reads them from
    /// this host's memory.
    ///
    /// A short run is copied to the staging buffer, because a remote read of few bytes is slower than the copy. The
    /// puller reads the staging buffer as one range.
    fn send_arena_parts(
        &mut self,
        link: &mut Link<T>,
        _arena_file: ArenaFile<'_>,
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
                // The puller receives the parts of a block in their order. Bytes that were staged before this run are
                // therefore announced first.
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

    fn send_buffer(&mut self, _link: &mut Link<T>, bytes: &[u8]) -> Result<(), WireError> {
        self.hash(bytes);
        self.stage(bytes);
        Ok(())
    }

    fn send_zeros(&mut self, link: &mut Link<T>, bytes: u64) -> Result<(), WireError> {
        if bytes < ZEROS_BYTES_MIN {
            let zeros = &[0; ZEROS_BYTES_MIN as usize][..bytes as usize];
            return self.send_buffer(link, zeros);
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
