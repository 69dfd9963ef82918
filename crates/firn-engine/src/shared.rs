//! Files that programs of several hosts share under file locks.
//!
//! The holder of a lock must see all writes of the last holder, which may be on another host. So a host that gets a
//! lock calls [`Engine::read_published_changes`], and a host calls [`Engine::publish_writes`] before it releases a
//! lock.
//!
//! Promise: bytes that are appended here are in the backing (the directory that all hosts share) when the append
//! returns. Otherwise a host that dies would write them only after its restart, and so over newer bytes of other hosts.

use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::{Backing, Errno};

use crate::engine::Engine;
use crate::file::File;
use crate::{Appended, HandleId, Principal, Result};

/// An append to a file that several hosts use. Its caller holds the lock of the file's end.
pub struct SharedAppend<'a> {
    /// The bytes.
    pub data: &'a [u8],
    /// The file does not grow beyond this length.
    pub size_max: u64,
    /// The process that appends; its writes remove set-id bits and capabilities of the file. `None`: they remain.
    pub by: Option<&'a dyn Principal>,
    /// Offset at which an earlier firnd may have written the bytes. The bytes are written there again. `None`: the
    /// bytes are written at the end.
    pub repeated_at: Option<u64>,
    /// Called with the offset before the first byte is written.
    pub note_offset: &'a mut (dyn FnMut(u64) + Send),
}

impl<B: Backing> Engine<B> {
    /// Makes changes that other hosts published to a file visible here. Later writes of this host are newer than these
    /// changes.
    pub fn read_published_changes(&self, handle_id: HandleId) -> Result<()> {
        let handle = self.open_files.handle(handle_id)?;
        let file = &handle.file;
        self.open_files
            .with_descriptor(|| self.open_backing_file(file, handle.writable))?;
        self.room.evict_if_backing_changed(file)
    }

    /// Makes the drained writes of this host to a file visible to hosts that catch up from now on.
    pub fn publish_writes(&self, handle_id: HandleId) -> Result<()> {
        let handle = self.open_files.handle(handle_id)?;
        let data_only = true;
        self.open_files
            .with_descriptor(|| self.durability.sync_data(&handle.file, data_only))?;
        self.kernel_cache.drop_kernel_attributes(&handle.file);
        Ok(())
    }

    /// Appends bytes to a file in the backing, and makes them visible to other hosts. Returns their position and
    /// number. The caller holds the lock of the file's end, so no other host appends meanwhile.
    ///
    /// Only as many bytes are written as fit into a file of `size_max` bytes. Fails with EFBIG if no byte fits. If an
    /// earlier drain failed, and no program has got its error yet, fails with that error.
    pub fn append_known(&self, handle_id: HandleId, append: SharedAppend<'_>) -> Result<Appended> {
        let handle = self.open_files.handle(handle_id)?;
        let file = &handle.file;
        if !handle.writable {
            return Err(Errno::BADF);
        }
        if append.data.is_empty() {
            let offset = self.intake.size_of(file)?;
            return Ok(Appended { offset, len: 0 });
        }
        // A client process with a grant must not write the file directly any more.
        self.intake.end_grant(file);
        if let Some(errno) = file.lock().drain.take_unreported_failure() {
            return Err(errno);
        }
        if let Some(principal) = append.by {
            self.privilege_rules.drop_privileges_of(file, principal)?;
        }
        // The end of the backing's file counts, so this host's pending bytes go there first.
        self.drainer.drain_and_wait(file)?;
        // Other hosts may have appended since, so the end is read again.
        self.read_published_changes(handle.id)?;
        let appended = self
            .exclusive
            .with_exclusive_file(file, |target| self.append_to_backing(file, target, append))?;
        self.base.counters.count_ingest(appended.len);
        self.base
            .counters
            .drain_bytes
            .fetch_add(appended.len, Ordering::Relaxed);
        self.kernel_cache.drop_kernel_attributes(file);
        Ok(appended)
    }

    /// Writes the bytes of an append to `target`, the backing's file of `file`, and syncs it. Fails with EFBIG if no
    /// byte fits below `size_max`.
    ///
    /// The caller has exclusive use of the file. Otherwise a program of this host could write beyond the end after the
    /// end was read here.
    fn append_to_backing(
        &self,
        file: &Arc<File<B>>,
        target: &B::File,
        append: SharedAppend<'_>,
    ) -> Result<Appended> {
        let offset = match append.repeated_at {
            Some(offset) => offset,
            None => self.intake.size_of(file)?,
        };
        let bytes_that_fit = append.size_max.saturating_sub(offset);
        let len_max = usize::try_from(bytes_that_fit).unwrap_or(usize::MAX);
        let data = &append.data[..append.data.len().min(len_max)];
        if data.is_empty() {
            return Err(Errno::FBIG);
        }
        // If firnd dies during the write, the next firnd writes the bytes at this offset again.
        (append.note_offset)(offset);
        self.write_all_to_backing(target, data, offset)?;
        let data_only = true;
        self.base.backing.sync(target, data_only)?;
        let len = data.len() as u64;
        Ok(Appended { offset, len })
    }

    /// Writes all of `data` at `offset` of the backing's file. Fails with EIO if the backing accepts no byte.
    fn write_all_to_backing(&self, target: &B::File, data: &[u8], offset: u64) -> Result<()> {
        let mut written_bytes = 0;
        while written_bytes < data.len() {
            let remaining_data = [IoSlice::new(&data[written_bytes..])];
            let write_offset = offset + written_bytes as u64;
            let count = self
                .base
                .backing
                .write_at(target, &remaining_data, write_offset)?;
            if count == 0 {
                return Err(Errno::IO);
            }
            written_bytes += count;
        }
        Ok(())
    }
}
