//! Files that programs of several hosts use at the same time, one after the other by locks.
//!
//! A lock of a file means something on another host only if its holder sees what the last one wrote. So a host that
//! gets a lock calls [`Engine::catch_up`], and one that gives a lock back calls [`Engine::make_known`] before. What is
//! appended is never pending: a host that dies must not write, when it comes back, where others have appended
//! meanwhile.

use std::io::IoSlice;
use std::sync::atomic::Ordering;

use firn_backing::{Backing, Errno};

use crate::engine::Engine;
use crate::{Appended, HandleId, Principal, Result};

impl<B: Backing> Engine<B> {
    /// Makes the published changes of other hosts to a file visible; they are older than later writes of this host.
    pub fn catch_up(&self, handle: HandleId) -> Result<()> {
        let handle = self.open_files.handle(handle)?;
        let file = &handle.file;
        self.open_files
            .with_descriptor(|| self.open_backing(file, handle.writable))?;
        self.room.check_cache(file)
    }

    /// Other hosts see what was written to a file, as far as it is drained, if they look from now on.
    pub fn make_known(&self, handle: HandleId) -> Result<()> {
        let handle = self.open_files.handle(handle)?;
        self.open_files
            .with_descriptor(|| self.durability.sync_data(&handle.file, true))?;
        self.kernel_cache.drop_kernel_attributes(&handle.file);
        Ok(())
    }

    /// Writes at the end of a file, where the caller alone of all hosts appends, and makes that known. All of the bytes are
    /// in the backing then, as far as the file has no more than `size_max`, or an error is returned.
    pub fn append_known(
        &self,
        handle: HandleId,
        data: &[u8],
        size_max: u64,
        by: Option<&dyn Principal>,
    ) -> Result<Appended> {
        let handle = self.open_files.handle(handle)?;
        let file = &handle.file;
        if !handle.writable {
            return Err(Errno::BADF);
        }
        if data.is_empty() {
            let offset = self.intake.size_of(file)?;
            return Ok(Appended { offset, len: 0 });
        }
        self.intake.end_grant(file);
        if let Some(errno) = file.lock().drain.take_unreported_failure() {
            return Err(errno);
        }
        if let Some(by) = by {
            self.privilege_rules.drop_privileges_of(file, by)?;
        }
        self.drainer.drain_and_wait(file)?;
        self.catch_up(handle.id)?;
        let appended = self.exclusive.with_exclusive_file(file, |target| {
            // Others of this host may write behind the end at the same time.
            let offset = self.intake.size_of(file)?;
            let room = size_max.saturating_sub(offset);
            let data = &data[..data.len().min(usize::try_from(room).unwrap_or(usize::MAX))];
            if data.is_empty() {
                return Err(Errno::FBIG);
            }
            let mut done = 0;
            while done < data.len() {
                let rest = [IoSlice::new(&data[done..])];
                done += match self
                    .base
                    .backing
                    .write_at(target, &rest, offset + done as u64)?
                {
                    0 => return Err(Errno::IO),
                    count => count,
                };
            }
            self.base.backing.sync(target, true)?;
            let len = data.len() as u64;
            Ok(Appended { offset, len })
        })?;
        self.base.counters.count_ingest(appended.len);
        self.base
            .counters
            .drain_bytes
            .fetch_add(appended.len, Ordering::Relaxed);
        self.kernel_cache.drop_kernel_attributes(file);
        Ok(appended)
    }
}
