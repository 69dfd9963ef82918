//! Queue of events of files, such as the first open for writing, or the arrival of all bytes in the backing.
//!
//! A recorder of checkpoints empties the queue several times a second.
//!
//! Promises
//! * Nothing is queued before the first request for events. The queue has at most [`EVENTS_MAX`] events; further events
//!   are only counted.
//! * The lock of the queue is a leaf: a file's lock may be held when it is taken, and no lock is taken under it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use firn_backing::Backing;
use firn_backing::lock::Mutex;

use crate::InodeId;
use crate::engine::Engine;
use crate::names::Inode;

/// Maximum number of events in the queue, of 40 bytes each. A file normally has four events, so this is enough for
/// 8,000 files between two calls of [`Engine::take_file_events`].
const EVENTS_MAX: usize = 1 << 15;

/// Kind of an event of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileChange {
    /// The first writer opened the file.
    Opened,
    /// The file got pending bytes, and had none before.
    Held,
    /// The last writer closed the file.
    Closed,
    /// All bytes of the file are in the backing, or were dropped.
    Drained,
    /// The file's bytes and names were synced in the backing.
    Durable,
}

/// An event of a file.
#[derive(Clone, Debug)]
pub struct FileEvent {
    /// The file.
    pub inode: InodeId,
    /// Its present path from the root of the mount; `None` if the file has no name, or firnd no longer knows it.
    pub path: Option<Vec<u8>>,
    /// What happened.
    pub change: FileChange,
    /// Time of the event.
    pub at: Instant,
}

/// An event in the queue.
struct QueuedEvent<B: Backing> {
    inode: InodeId,
    weak_inode: Weak<Inode<B>>,
    change: FileChange,
    at: Instant,
}

/// The queue of events.
pub(crate) struct FileEvents<B: Backing> {
    /// Whether events are queued, because they were requested before.
    is_requested: AtomicBool,
    queue: Mutex<Vec<QueuedEvent<B>>>,
    /// Number of events since the last request that did not fit into the queue.
    dropped: AtomicU64,
}

impl<B: Backing> Default for FileEvents<B> {
    fn default() -> Self {
        Self {
            is_requested: AtomicBool::new(false),
            queue: Mutex::new(Vec::new()),
            dropped: AtomicU64::new(0),
        }
    }
}

impl<B: Backing> FileEvents<B> {
    /// Adds an event of a file to the queue, if events were requested before. If the queue is full, only counts the
    /// event.
    pub(crate) fn record(&self, inode: &Arc<Inode<B>>, change: FileChange) {
        if !self.is_requested.load(Ordering::Relaxed) {
            return;
        }
        let mut queue = self.queue.lock();
        if queue.len() >= EVENTS_MAX {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        queue.push(QueuedEvent {
            inode: inode.id,
            weak_inode: Arc::downgrade(inode),
            change,
            at: Instant::now(),
        });
    }

    /// Records an event if the first byte of a file became pending, or if no byte is pending any more.
    pub(crate) fn record_pending_change(
        &self,
        inode: &Arc<Inode<B>>,
        bytes_before: u64,
        bytes_after: u64,
    ) {
        match (bytes_before, bytes_after) {
            (0, 1..) => self.record(inode, FileChange::Held),
            (1.., 0) => self.record(inode, FileChange::Drained),
            _ => {}
        }
    }
}

impl<B: Backing> Engine<B> {
    /// Returns the events since the last call, and the number of events that did not fit into the queue. Events are
    /// collected from the first call on, and must be taken several times a second.
    pub fn take_file_events(&self) -> (Vec<FileEvent>, u64) {
        let events = &self.base.file_events;
        events.is_requested.store(true, Ordering::Relaxed);
        let queued_events = std::mem::take(&mut *events.queue.lock());
        let mut file_events = Vec::with_capacity(queued_events.len());
        for queued in queued_events {
            let inode = queued.weak_inode.upgrade();
            file_events.push(FileEvent {
                inode: queued.inode,
                path: inode.and_then(|inode| inode.paths().into_iter().next()),
                change: queued.change,
                at: queued.at,
            });
        }
        let dropped_count = events.dropped.swap(0, Ordering::Relaxed);
        (file_events, dropped_count)
    }
}
