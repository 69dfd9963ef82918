//! Copies of large closed files into memory files, from which the kernel can read them. A *memory file* is a file in
//! memory with all bytes of one large file, in their order. To *settle* a file is to copy it there.
//!
//! A thread calls [`Room::settle_step`](crate::Room::settle_step) until it is idle; each call copies one *chunk*, the
//! unit of the arena (the shared memory for written data). The copy of pending bytes is a new *piece* (a recorded
//! append of bytes), which lies in the memory file. It is published before the older pieces are marked as dead. After a
//! crash in between, new and old pieces have the same bytes, and recovery uses the new one.
//!
//! Promises
//! * A file is settled only while it has no writer and no drain, no program waits for it, and no list of its chunks
//!   is held.
//! * Settling needs one chunk of memory in addition to the file. A part of the slots (the places for one chunk in
//!   memory) remains free for writers.
//! * Settling does not change the file's bytes, times and count of changes.

mod step;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use firn_arena::{Arena, MemoryFile};
use firn_backing::Backing;
use firn_backing::lock::{Mutex, RwLock};

use crate::extents::Extent;
use crate::file::{File, FileState};
use crate::space::UniqueQueue;
use crate::spill::Waker;

/// Result of a call of [`Room::settle_step`](crate::Room::settle_step).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SettleStep {
    /// A chunk was copied, or a file was examined. Call again.
    More,
    /// There is no work for the time `retry`, or until the thread is woken.
    Idle {
        /// Time until the next check for space for a file that is partly copied.
        retry: Option<Duration>,
    },
}

/// The files to settle, and the file that is being settled.
pub(crate) struct Settle<B: Backing> {
    /// Files that may be settled. Each file is in the queue at most once.
    waiting: UniqueQueue<File<B>>,
    /// The file being settled, between two steps.
    task: Mutex<Option<SettleTask<B>>>,
    waker: RwLock<Option<Waker>>,
    /// Bytes copied into memory files since the engine's start.
    settled_bytes: AtomicU64,
}

impl<B: Backing> Default for Settle<B> {
    fn default() -> Self {
        Self {
            waiting: UniqueQueue::default(),
            task: Mutex::default(),
            waker: RwLock::default(),
            settled_bytes: AtomicU64::new(0),
        }
    }
}

impl<B: Backing> Settle<B> {
    /// Returns the bytes copied into memory files since the attach.
    pub(crate) fn settled_bytes(&self) -> u64 {
        self.settled_bytes.load(Ordering::Relaxed)
    }

    /// Wakes the settling thread, if there is one.
    fn wake(&self) {
        if let Some(wake) = &*self.waker.read() {
            wake();
        }
    }
}

/// A file that is being settled.
struct SettleTask<B: Backing> {
    file: Arc<File<B>>,
    memory: Arc<MemoryFile>,
    /// Version of the contents that is copied ([`FileState::changes`]). The task ends when the file has another
    /// version.
    changes: u64,
    /// Length of the file in bytes.
    bytes: u64,
    /// Index, within the file, of the chunk that is copied next.
    next_chunk: u16,
}

/// The extents in the arena that contain all bytes of one chunk of a file.
#[derive(PartialEq, Eq)]
struct ChunkSource {
    /// The extents, each with its file offset.
    parts: Vec<(u64, Extent)>,
    /// Whether the extents are pending; otherwise they are cached.
    is_pending: bool,
}

impl<B: Backing> FileState<B> {
    /// Returns whether the file may be copied to a memory file now: it has no writer, no client with direct access and
    /// no drain under way or requested, and no reader relies on the present places of its bytes.
    fn can_be_copied(&self) -> bool {
        let has_drain_request = self.drain.has_waiters()
            || self
                .pending
                .oldest_sequence()
                .is_some_and(|oldest| self.drain.is_forced(oldest));
        !self.opens.has_writers()
            && !self.opens.has_passthrough()
            && self.view.is_none()
            && !self.direct.has_grant()
            && !self.direct.has_chunk_lists()
            && self.drain.is_idle()
            && !has_drain_request
            && !self.unlinked
    }

    /// Returns the number of the file's bytes in the arena, if they begin at offset 0, have no gap, and are all pending
    /// or all cached. Otherwise returns 0.
    pub(crate) fn contiguous_bytes(&self) -> u64 {
        let pending_bytes = self.pending.bytes();
        let cached_bytes = self.cache.bytes();
        if pending_bytes > 0 && cached_bytes > 0 {
            return 0;
        }
        let bytes = pending_bytes + cached_bytes;
        let end = self.pending.end().max(self.cache.extents().end());
        // Extents do not overlap, so they have a gap if they end after the number of their bytes.
        if bytes == end { bytes } else { 0 }
    }

    /// Returns the memory file (a file in memory with all bytes of one large file) that contains the first `bytes`
    /// bytes of this file, each at its file offset. Returns `None` if no single memory file contains all of them.
    pub(crate) fn memory_file(&self, arena: &Arena, bytes: u64) -> Option<Arc<MemoryFile>> {
        // Pending and cached bytes do not overlap. If they are fewer, some bytes are only in the backing.
        if bytes == 0 || self.pending.bytes() + self.cache.bytes() != bytes {
            return None;
        }
        let mut common_file: Option<Arc<MemoryFile>> = None;
        let mut checked_end = 0;
        for (offset, extent) in self.extents_in_arena(0, usize::MAX) {
            let has_gap = offset != checked_end;
            if has_gap {
                return None;
            }
            checked_end += extent.len;
            let (memory_file, chunk_offset) = arena.memory_file_of(extent.piece.slab.chunk)?;
            let is_in_other_file = common_file
                .as_ref()
                .is_some_and(|common_file| !Arc::ptr_eq(common_file, &memory_file));
            if is_in_other_file || chunk_offset + u64::from(extent.position) != offset {
                return None;
            }
            common_file = Some(memory_file);
        }
        common_file
    }

    /// Returns the extents of `range`, which has the bytes of one chunk. Returns `None` if the arena (shared memory)
    /// does not have all of these bytes as pending ones (not in the backing), or all of them as cached ones.
    fn chunk_source(&self, range: Range<u64>) -> Option<ChunkSource> {
        let is_pending = !self.pending.is_empty();
        let extents = if is_pending {
            self.pending.extents()
        } else {
            self.cache.extents()
        };
        let parts: Vec<_> = extents.within(range.clone()).collect();
        let bytes: u64 = parts.iter().map(|(_, extent)| extent.len).sum();
        if bytes < range.end - range.start {
            return None;
        }
        Some(ChunkSource { parts, is_pending })
    }
}
