//! fallocate(2), lseek(2) for holes, and copy_file_range(2): calls that the backing (the directory that the mount
//! serves) carries out. So all bytes of the file are written there first.

use firn_backing::{Backing, Errno, Seek};

use crate::engine::Engine;
use crate::{HandleId, Result};

impl<B: Backing> Engine<B> {
    /// Allocates or frees space of a file (fallocate(2)).
    ///
    /// The file is drained first, even if its contents do not change. Otherwise a later drain would replace the time
    /// that the backing sets by the time of the last write.
    pub fn allocate(&self, handle_id: HandleId, mode: i32, offset: u64, len: u64) -> Result<()> {
        let handle = self.open_files.handle(handle_id)?;
        if !handle.writable {
            return Err(Errno::BADF);
        }
        self.intake.end_grant(&handle.file);
        self.drainer.drain_and_wait(&handle.file)?;
        self.exclusive
            .with_exclusive_file(&handle.file, |backing_file| {
                self.base.backing.allocate(backing_file, mode, offset, len)
            })
    }

    /// Returns the offset of the next data or hole of the backing's file (lseek(2) with `SEEK_DATA` or `SEEK_HOLE`).
    /// The file is drained first.
    pub fn seek(&self, handle_id: HandleId, offset: u64, what: Seek) -> Result<u64> {
        let handle = self.open_files.handle(handle_id)?;
        self.drainer.drain_and_wait(&handle.file)?;
        let source = self.open_files.reader(&handle.file)?;
        self.base.backing.seek(&source.file, offset, what)
    }

    /// Copies a range between two files of the mount (copy_file_range(2)), and returns the number of bytes copied. The
    /// backing makes the copy, so the pending bytes of both files are written there first.
    pub fn copy_range(
        &self,
        from: HandleId,
        from_offset: u64,
        to: HandleId,
        to_offset: u64,
        len: u64,
    ) -> Result<u64> {
        let source = self.open_files.handle(from)?;
        let target = self.open_files.handle(to)?;
        if !source.readable || !target.writable {
            return Err(Errno::BADF);
        }
        // Client processes with a grant must not write the files directly any more.
        self.intake.end_grant(&source.file);
        self.intake.end_grant(&target.file);
        self.drainer.drain_and_wait(&source.file)?;
        self.drainer.drain_and_wait(&target.file)?;
        let reader = self.open_files.reader(&source.file)?;
        self.exclusive
            .with_exclusive_file(&target.file, |backing_file| {
                self.base.backing.copy_range(
                    &reader.file,
                    from_offset,
                    backing_file,
                    to_offset,
                    len,
                )
            })
    }

    /// Returns whether the file has pending bytes, for which the calls of this module would wait.
    pub fn needs_drain(&self, handle_id: HandleId) -> bool {
        self.open_files.handle(handle_id).is_ok_and(|h| {
            let mut state = h.file.lock();
            self.intake.ingest_published(&h.file, &mut state);
            !state.pending.is_empty()
        })
    }
}
