//! The view of a file: a memory file with all its bytes, which the kernel or a mapping of a process reads.
//!
//! Such a reader reads the memory file without a request. So the memory file is the file's *view* until the last such
//! handle is released: the bytes of the file remain there, and each change of the file is also stored there, under the
//! lock of the file and before the change is answered.
//!
//! Such a store never overwrites bytes that are still needed. The newest bytes of a range of the file are either in the
//! view, or elsewhere in the *arena* (the shared memory for written data). In the first case the store replaces them.
//! In the second case the view has only a copy, for its readers.
//!
//! Promises
//! * A reader of the view sees each write(2), truncation and removal of bytes that has returned.
//! * The view is never shorter than the extents of the file in it, because firnd maps the view.

use std::ops::Range;
use std::sync::Arc;

use firn_arena::{Arena, MemoryFile};
use firn_backing::Backing;

use crate::engine::Engine;
use crate::file::{File, FileState};
use crate::intake::Intake;
use crate::open_files::OpenFiles;
use crate::reads::Reads;
use crate::{HandleId, OpenMode, Result, Written};

/// Number of bytes that are stored at a time.
const REFRESH_BYTES: usize = 1 << 20;
/// Number of bytes that are compared at a time. It is small, so that a write seldom comes during a comparison.
const COMPARE_BYTES: usize = 64 << 10;
/// Number of bytes that are compared in one exclusive use, during which no drain is under way.
const EXCLUSIVE_BYTES: u64 = 8 << 20;

impl<B: Backing> FileState<B> {
    /// Returns whether drained bytes may remain in the arena. They may not while a program can store to a mapping of
    /// the memory file: such a store would change cached bytes and never reach the backing.
    pub(crate) fn can_cache(&self) -> bool {
        !self.is_passed_through_memory() || !self.opens.has_writers()
    }

    /// Returns whether the kernel reads the file from its memory file.
    pub(crate) fn is_passed_through_memory(&self) -> bool {
        self.view.is_some() && self.opens.has_passthrough()
    }

    /// Makes the memory file that contains all `size` bytes of the file its view, and returns the memory file. From now
    /// on each change of the file is also stored there.
    ///
    /// Returns `None` if no memory file has all bytes, or if the file is written, read by the kernel itself, or in a
    /// list of chunks. (The bytes in such a list must not change, but a view shows changes.)
    pub(crate) fn create_view(&mut self, arena: &Arena, size: u64) -> Option<Arc<MemoryFile>> {
        let is_used_otherwise = self.opens.has_passthrough()
            || self.opens.has_writers()
            || self.direct.has_grant()
            || self.direct.has_chunk_lists();
        if is_used_otherwise {
            return None;
        }
        let memory_file = self.memory_file(arena, size)?;
        // The memory file gets the length `size`. After a restart, a record of bytes beyond its end would count as
        // damage.
        self.shorten_pieces(arena, &memory_file, size);
        if let Err(errno) = arena.begin_view(&memory_file, size) {
            tracing::debug!(%errno, "cannot make a memory file the view of its file");
            arena.end_view(&memory_file);
            return None;
        }
        self.view = Some(Arc::clone(&memory_file));
        Some(memory_file)
    }

    /// Ends the view if no handle that reads it is left.
    pub(crate) fn end_view(&mut self, arena: &Arena) {
        if self.opens.has_viewers() {
            return;
        }
        if let Some(view) = self.view.take() {
            arena.end_view(&view);
        }
    }

    /// Shortens the records of pieces that reach beyond `len`, the length that their memory file is about to get.
    pub(crate) fn shorten_pieces(&self, arena: &Arena, memory_file: &Arc<MemoryFile>, len: u64) {
        for (_, extent) in self.pending.extents().iter() {
            if let Some((file, chunk_offset)) = arena.memory_file_of(extent.piece.slab.chunk)
                && Arc::ptr_eq(&file, memory_file)
            {
                arena.shorten_piece(extent.piece, len.saturating_sub(chunk_offset));
            }
        }
    }

    /// Allocates memory for bytes that are about to be stored in the view, so that the store cannot fail for lack of
    /// memory.
    pub(crate) fn reserve_view(&self, offset: u64, len: u64) -> Result<()> {
        match &self.view {
            Some(view) => view.reserve(offset, len),
            None => Ok(()),
        }
    }

    /// Stores in the view bytes that a program has just written.
    pub(crate) fn store_in_view(&self, offset: u64, data: &[u8]) {
        if let Some(view) = &self.view {
            log_missed_change(view.store(offset, data));
        }
    }

    /// Sets the length of the view. If the file grows again later, the removed bytes read as zeros.
    pub(crate) fn set_view_len(&self, arena: &Arena, len: u64) {
        let Some(view) = &self.view else { return };
        self.shorten_pieces(arena, view, len);
        log_missed_change(view.set_len(len));
        // These bytes were written while the truncation was under way.
        for (offset, extent) in self.pending.extents().within(len..u64::MAX) {
            let mut bytes = vec![0; extent.len as usize];
            let copied = arena.copy_out(extent.piece.slab, extent.position, &mut bytes);
            log_missed_change(copied.and_then(|()| view.store(offset, &bytes)));
        }
    }
}

/// Logs that a change could not be stored in a view. The change itself remains valid, so it is not refused.
fn log_missed_change(result: Result<()>) {
    if let Err(error) = result {
        tracing::warn!(%error, "cannot store a change where programs read this file directly from memory: they see old \
            bytes");
    }
}

/// Stores all bytes of a file in its view, after a change of bytes that this function's caller does not have.
pub(crate) fn refresh_view<B: Backing>(
    intake: &Arc<Intake<B>>,
    open_files: &Arc<OpenFiles<B>>,
    file: &Arc<File<B>>,
) {
    let Some(view) = file.lock().view.clone() else {
        return;
    };
    let reads = Reads::new(intake, open_files);
    if let Err(error) = copy_file_into_view(&reads, file, &view) {
        tracing::warn!(%error, path = %file.shown(), "cannot store a change where programs read this file directly \
            from memory: they see old bytes");
    }
}

/// Copies the file into its view (a memory file that programs read in place) part by part. A part is read again if the
/// file changed meanwhile. At the end the view gets the file's length.
fn copy_file_into_view<B: Backing>(
    reads: &Reads<B>,
    file: &Arc<File<B>>,
    view: &Arc<MemoryFile>,
) -> Result<()> {
    let mut buffer = vec![0; REFRESH_BYTES];
    let mut offset = 0;
    loop {
        let changes_before = file.lock().changes;
        let read_bytes = reads.read_at_one_moment(file, offset, &mut buffer)?;
        let state = file.lock();
        if state.changes != changes_before {
            continue;
        }
        view.store(offset, &buffer[..read_bytes as usize])?;
        offset += read_bytes;
        let is_at_end = read_bytes < REFRESH_BYTES as u64;
        if is_at_end {
            // The view is never shorter than the extents of the file.
            let extents_end = state.pending.end().max(state.cache.extents().end());
            let len = offset.max(extents_end);
            state.shorten_pieces(&reads.base.arena, view, len);
            return view.set_len(len);
        }
    }
}

impl<B: Backing> OpenFiles<B> {
    /// Returns a descriptor, for the kernel, of the memory file from which a handle is read.
    pub fn memory_fd(&self, handle_id: HandleId) -> Option<std::os::fd::OwnedFd> {
        let handle = self.handle(handle_id).ok()?;
        let state = handle.file.lock();
        let view = state.view.as_ref()?;
        rustix::io::fcntl_dupfd_cloexec(view.file(), 0).ok()
    }

    /// Returns whether programs may have stored bytes to a mapping that only the memory file has. A shared mapping that
    /// allows stores needs a descriptor that reads and writes.
    pub fn can_have_mapping_stores(&self, handle_id: HandleId) -> bool {
        self.handle(handle_id).is_ok_and(|handle| {
            handle.readable && handle.writable && *handle.mode.lock() == OpenMode::Memory
        })
    }
}

/// Bytes that a program stored to a mapping, and their file offset.
struct MappingStore {
    offset: u64,
    bytes: Vec<u8>,
}

impl<B: Backing> Engine<B> {
    /// Finds bytes that programs stored to a shared mapping of a view (a memory file with all bytes of its file), and
    /// writes them to the file. Called when a handle that may write is closed or synced. Does nothing if the file has
    /// no view.
    pub fn write_back_mapping_stores(&self, handle_id: HandleId) -> Result<()> {
        let file = Arc::clone(&self.open_files.handle(handle_id)?.file);
        let Some(view) = file.lock().view.clone() else {
            return Ok(());
        };
        if !self.open_files.can_have_mapping_stores(handle_id) {
            return Ok(());
        }
        let end = self.intake.size_of(&file)?;
        let mut offset = 0;
        while offset < end {
            let window = offset..end.min(offset + EXCLUSIVE_BYTES);
            for store in self.find_stores(&file, &view, window.clone())? {
                self.write_store(handle_id, &store)?;
            }
            offset = window.end;
        }
        Ok(())
    }

    /// Returns the bytes that programs have stored to their mappings in the range `window` of a file. These are the
    /// bytes in which the view (the memory file that the programs map) differs from the file.
    ///
    /// No drain (write of pending bytes to the backing) runs meanwhile. A drain could read a page before a store to it,
    /// and mark the page clean after this comparison.
    fn find_stores(
        &self,
        file: &Arc<File<B>>,
        view: &MemoryFile,
        window: Range<u64>,
    ) -> Result<Vec<MappingStore>> {
        let mut state = file.acquire_exclusive_use();
        let result = state.unlocked(|| {
            let mut stores = Vec::new();
            for offset in window.clone().step_by(COMPARE_BYTES) {
                let len = (window.end - offset).min(COMPARE_BYTES as u64);
                add_differing_bytes(&self.reads, file, view, offset..offset + len, &mut stores)?;
            }
            Ok(stores)
        });
        file.release_exclusive_use(&mut state);
        // A drain may have been refused during the exclusive use.
        self.drainer.drain.enqueue(file, &mut state);
        result
    }

    /// Writes one store to the file, and waits for space if the arena is full.
    fn write_store(&self, handle_id: HandleId, store: &MappingStore) -> Result<()> {
        let mut written_bytes = 0;
        while written_bytes < store.bytes.len() {
            let offset = store.offset + written_bytes as u64;
            let unwritten = &store.bytes[written_bytes..];
            // A store to a mapping removes no privileges, so there is no caller.
            match self.write(handle_id, offset, unwritten, None)? {
                Written::Bytes(count) => written_bytes += count,
                Written::Full => self.room.wait_for_room()?,
            }
        }
        Ok(())
    }
}

/// Compares a range of a file with its view (the memory file that programs map), and adds the differing bytes to
/// `stores`. Compares again if a write(2) came in between, because the write could be the difference. The caller has
/// exclusive use of the file.
fn add_differing_bytes<B: Backing>(
    reads: &Reads<B>,
    file: &Arc<File<B>>,
    view: &MemoryFile,
    range: Range<u64>,
    stores: &mut Vec<MappingStore>,
) -> Result<()> {
    let mut view_bytes = vec![0; (range.end - range.start) as usize];
    let mut file_bytes = view_bytes.clone();
    loop {
        let changes_before = file.lock().changes;
        let view_len = view.load(range.start, &mut view_bytes)?;
        let file_len = reads.read_exclusively(file, range.start, &mut file_bytes)? as usize;
        if file.lock().changes != changes_before {
            continue;
        }
        let len = view_len.min(file_len);
        for run in differing_runs(&view_bytes[..len], &file_bytes[..len]) {
            stores.push(MappingStore {
                offset: range.start + run.start as u64,
                bytes: view_bytes[run].to_vec(),
            });
        }
        return Ok(());
    }
}

/// Returns the runs of bytes in which two slices of the same length differ. The runs contain no equal byte, because
/// other writers may change such a byte meanwhile.
fn differing_runs(a: &[u8], b: &[u8]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    if a == b {
        return runs;
    }
    for index in 0..a.len() {
        if a[index] == b[index] {
            continue;
        }
        match runs.last_mut() {
            Some(run) if run.end == index => run.end += 1,
            _ => runs.push(index..index + 1),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bytes_that_differ_are_in_the_runs() {
        assert_eq!(differing_runs(b"", b""), []);
        assert_eq!(differing_runs(b"same", b"same"), []);
        assert_eq!(differing_runs(b"abcdef", b"xbcyzf"), [0..1, 3..5]);
        assert_eq!(differing_runs(b"abcd", b"xycz"), [0..2, 3..4]);
    }
}
