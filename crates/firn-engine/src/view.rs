//! Memory files that the kernel reads by itself, while programs have the file open.
//!
//! The kernel cannot take a memory file back from an open descriptor. So as long as one is open, whatever changes the file is
//! stored in the memory file too, under the lock of the file and before the change is answered: its *view*. Where the bytes
//! still lie in that memory file they are stored where they are; where newer ones lie elsewhere, the older ones that the
//! view had there are of no extent any more.
//!
//! Promises
//! * Who reads the view sees each write(2), truncation and removal of bytes that returned before.
//! * The view is never shorter than what an extent of the file has in it: firnd maps it.

use std::ops::Range;
use std::sync::Arc;

use firn_arena::{Arena, MemoryFile};
use firn_backing::{Backing, Errno};

use crate::engine::Engine;
use crate::file::{File, FileState};
use crate::intake::Intake;
use crate::open_files::OpenFiles;
use crate::reads::Reads;
use crate::{HandleId, OpenMode, Result, Written};

/// Bytes that are stored at once.
const PART_BYTES: usize = 1 << 20;
/// Bytes that are compared at once: few, so that writers seldom come between.
const COMPARED_BYTES: usize = 64 << 10;

impl<B: Backing> FileState<B> {
    /// Stores bytes that were just taken in what the kernel reads.
    pub(crate) fn show(&self, offset: u64, data: &[u8]) {
        if let Some(view) = &self.view {
            warn_of(view.store(offset, data));
        }
    }

    /// Makes what the kernel reads as long as the file is, of which nothing before a cut lies beyond.
    pub(crate) fn show_len(&self, arena: &Arena, len: u64) {
        let Some(view) = &self.view else { return };
        warn_of(view.set_len(len));
        // Written while the cut was under way.
        for (offset, extent) in self.pending.extents().within(len..u64::MAX) {
            let mut bytes = vec![0; extent.len as usize];
            let copied = arena.copy_out(extent.piece.slab, extent.position, &mut bytes);
            warn_of(copied.and_then(|()| view.store(offset, &bytes)));
        }
    }
}

fn warn_of(result: std::result::Result<(), Errno>) {
    if let Err(error) = result {
        tracing::warn!(%error, "a program that has a file open in memory does not see a change");
    }
}

/// Stores all that a file has in what the kernel reads, after a change that told of no bytes.
pub(crate) fn refresh_view<B: Backing>(
    intake: &Arc<Intake<B>>,
    open_files: &Arc<OpenFiles<B>>,
    file: &Arc<File<B>>,
) {
    let Some(view) = file.lock().view.clone() else {
        return;
    };
    let reads = Reads::new(intake, open_files);
    if let Err(error) = refresh(&reads, file, &view) {
        tracing::warn!(%error, path = %file.shown(), "a program that has a file open in memory does not see a change");
    }
}

fn refresh<B: Backing>(reads: &Reads<B>, file: &Arc<File<B>>, view: &MemoryFile) -> Result<()> {
    let mut buffer = vec![0; PART_BYTES];
    let mut offset = 0;
    loop {
        let changes = file.lock().changes;
        let bytes = reads.read_at_one_moment(file, offset, &mut buffer)?;
        let state = file.lock();
        if state.changes != changes {
            continue;
        }
        view.store(offset, &buffer[..bytes as usize])?;
        offset += bytes;
        if bytes < PART_BYTES as u64 {
            let in_arena = state.pending.end().max(state.cache.extents().end());
            return view.set_len(offset.max(in_arena));
        }
    }
}

impl<B: Backing> OpenFiles<B> {
    /// A descriptor of the memory file that a handle is read from, for the kernel.
    pub fn memory_fd(&self, handle: HandleId) -> Option<std::os::fd::OwnedFd> {
        let handle = self.handle(handle).ok()?;
        let state = handle.file.lock();
        let view = state.view.as_ref()?;
        rustix::io::fcntl_dupfd_cloexec(view.file(), 0).ok()
    }

    /// Whether programs may have stored to a mapping of this handle's file what only the memory file has.
    pub fn may_have_stores(&self, handle: HandleId) -> bool {
        self.handle(handle)
            .is_ok_and(|handle| handle.writable && *handle.mode.lock() == OpenMode::Memory)
    }
}

impl<B: Backing> Engine<B> {
    /// Takes what programs stored to a shared mapping of a file that the kernel reads from a memory file as written. To be
    /// called when a handle that may write is closed or synced.
    pub fn take_stores(&self, handle: HandleId) -> Result<()> {
        let file = Arc::clone(&self.open_files.handle(handle)?.file);
        let view = file.lock().view.clone();
        let Some(view) = view.filter(|_| self.open_files.may_have_stores(handle)) else {
            return Ok(());
        };
        let mut stored = vec![0; COMPARED_BYTES];
        let mut known = vec![0; COMPARED_BYTES];
        let mut offset = 0;
        loop {
            let changes = file.lock().changes;
            let bytes = view.load(offset, &mut stored)?;
            let bytes = self.read(handle, offset, &mut known)?.min(bytes);
            if file.lock().changes != changes {
                // What differs may be what a write(2) has changed between the two.
                continue;
            }
            for run in differing_runs(&stored[..bytes], &known[..bytes]) {
                self.take_store(handle, offset + run.start as u64, &stored[run])?;
            }
            if bytes < COMPARED_BYTES {
                return Ok(());
            }
            offset += bytes as u64;
        }
    }

    fn take_store(&self, handle: HandleId, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            match self.write(handle, offset + done as u64, &bytes[done..], None)? {
                Written::Bytes(count) => done += count,
                Written::Full => return Err(Errno::NOSPC),
            }
        }
        Ok(())
    }
}

/// The runs of bytes in which two pieces of the same length differ. No byte more: others may write those meanwhile.
fn differing_runs(one: &[u8], other: &[u8]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    if one == other {
        return runs;
    }
    for at in (0..one.len()).filter(|&at| one[at] != other[at]) {
        match runs.last_mut() {
            Some(last) if last.end == at => last.end += 1,
            _ => runs.push(at..at + 1),
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
