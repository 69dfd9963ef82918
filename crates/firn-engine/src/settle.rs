//! Large closed files move into memory files, where their bytes lie in order.
//!
//! The moving thread of the drain calls [`Room::settle_step`](crate::Room::settle_step) until it is idle; each call moves one
//! chunk. A settled chunk is a piece of the arena like any other, in a slot of a memory file. Settling writes the same bytes
//! once more: the new piece is published, and then the older ones die. A crash between the two leaves both, with the same
//! bytes, and the newer one counts.
//!
//! Promises
//! * A file is settled only while it has no writer and no drain, no program waits for it, and no list of its chunks is held.
//! * Settling takes one chunk of memory beside the file, and leaves the last free slots to writers.
//! * Its bytes, their times and its count of changes stay what they are.

mod step;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use firn_arena::{Arena, MemoryFile};
use firn_backing::Backing;
use firn_backing::lock::{Mutex, RwLock};

use crate::extents::Extent;
use crate::file::{File, FileState};
use crate::space::EvictionQueue;

/// What a call of [`Room::settle_step`](crate::Room::settle_step) did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SettleStep {
    /// A chunk moved, or a file was looked at: call again.
    More,
    /// Nothing now; look again after `retry`, or when woken.
    Idle {
        /// Time until it is seen whether there is room for what is half moved.
        retry: Option<Duration>,
    },
}

/// Called when there may be something to settle.
pub(crate) type Waker = Arc<dyn Fn() + Send + Sync>;

/// Which files are to be settled, and the one that is.
pub(crate) struct Settle<B: Backing> {
    waiting: EvictionQueue<File<B>>,
    task: Mutex<Option<Task<B>>>,
    waker: RwLock<Option<Waker>>,
    settled_bytes: AtomicU64,
}

impl<B: Backing> Default for Settle<B> {
    fn default() -> Self {
        Self {
            waiting: EvictionQueue::default(),
            task: Mutex::default(),
            waker: RwLock::default(),
            settled_bytes: AtomicU64::new(0),
        }
    }
}

impl<B: Backing> Settle<B> {
    /// Bytes moved into memory files since the attach.
    pub(crate) fn settled_bytes(&self) -> u64 {
        self.settled_bytes.load(Ordering::Relaxed)
    }

    fn wake(&self) {
        if let Some(wake) = &*self.waker.read() {
            wake();
        }
    }
}

/// A file that is being settled.
struct Task<B: Backing> {
    file: Arc<File<B>>,
    memory: Arc<MemoryFile>,
    /// The file's when it began: once it is another one, the task is over.
    changes: u64,
    bytes: u64,
    /// The chunk of the file that moves next.
    next: u16,
}

/// What the arena has of one chunk of a file.
#[derive(PartialEq, Eq)]
struct Source {
    parts: Vec<(u64, Extent)>,
    is_pending: bool,
}

impl<B: Backing> FileState<B> {
    /// Whether the file has no writer and no drain, and no list or view relies on where its bytes lie.
    fn may_be_settled(&self) -> bool {
        let is_asked_for = self.drain.has_waiters()
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
            && !is_asked_for
            && !self.unlinked
    }

    /// Bytes from the start of the file that the arena has without a gap, all of them pending or all of them drained; 0:
    /// there are none.
    pub(crate) fn whole_bytes(&self) -> u64 {
        let (pending, cached) = (self.pending.bytes(), self.cache.bytes());
        let (bytes, end) = if pending == 0 {
            (cached, self.cache.extents().end())
        } else {
            (pending, self.pending.end())
        };
        let is_mixed = pending > 0 && cached > 0;
        if is_mixed || bytes != end { 0 } else { bytes }
    }

    /// The memory file that has the first `bytes` of the file, each where it is in the file.
    pub(crate) fn memory_file(&self, arena: &Arena, bytes: u64) -> Option<Arc<MemoryFile>> {
        if bytes == 0 || self.pending.bytes() + self.cache.bytes() != bytes {
            return None;
        }
        let mut found: Option<Arc<MemoryFile>> = None;
        let mut end = 0;
        for (offset, extent) in self.extents_in_arena(0, usize::MAX) {
            if offset != end {
                return None;
            }
            end += extent.len;
            let (file, start) = arena.memory_file_of(extent.piece.slab.chunk)?;
            let is_same = found.as_ref().is_none_or(|known| Arc::ptr_eq(known, &file));
            if !is_same || start + u64::from(extent.position) != offset {
                return None;
            }
            found = Some(file);
        }
        found
    }

    /// The bytes of `range`, if the arena has all of them.
    fn source(&self, range: std::ops::Range<u64>) -> Option<Source> {
        let is_pending = !self.pending.is_empty();
        let extents = if is_pending {
            self.pending.extents()
        } else {
            self.cache.extents()
        };
        let parts: Vec<_> = extents.within(range.clone()).collect();
        let bytes: u64 = parts.iter().map(|(_, extent)| extent.len).sum();
        (bytes == range.end - range.start).then_some(Source { parts, is_pending })
    }
}
