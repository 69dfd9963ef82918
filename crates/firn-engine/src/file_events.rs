//! What happened to files, for a recorder of how checkpoints go: a queue that is emptied some times a second.
//!
//! Promises
//! * Nothing is queued before the first request for events, and never more than [`EVENTS_MAX`]: what is beyond is
//!   counted.
//! * The lock of the queue is a leaf: it is taken while a file's state is locked, and no other is taken under it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use firn_backing::Backing;
use firn_backing::lock::Mutex;

use crate::InodeId;
use crate::engine::Engine;
use crate::names::Inode;

/// 40 bytes each. Files are opened, held, closed and drained: enough for 8,000 files in a tick.
const EVENTS_MAX: usize = 1 << 15;

/// What happened to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileChange {
    /// The first writer opened it.
    Opened,
    /// It has bytes that are not in the backing, and had none before.
    Held,
    /// The last writer closed it.
    Closed,
    /// All its bytes are in the backing, or dropped.
    Drained,
    /// Its bytes and names were synced there.
    Durable,
}

/// Something that happened to a file.
#[derive(Clone, Debug)]
pub struct FileEvent {
    /// The file.
    pub inode: InodeId,
    /// Its path from the root of the mount as it is now; none: the file was forgotten meanwhile, or has no name.
    pub path: Option<Vec<u8>>,
    /// What happened.
    pub change: FileChange,
    /// Time of the event.
    pub at: Instant,
}

struct Queued<B: Backing> {
    inode: InodeId,
    weak: Weak<Inode<B>>,
    change: FileChange,
    at: Instant,
}

/// The queue.
pub(crate) struct FileEvents<B: Backing> {
    is_asked_for: AtomicBool,
    queue: Mutex<Vec<Queued<B>>>,
    dropped: AtomicU64,
}

impl<B: Backing> Default for FileEvents<B> {
    fn default() -> Self {
        Self {
            is_asked_for: AtomicBool::new(false),
            queue: Mutex::new(Vec::new()),
            dropped: AtomicU64::new(0),
        }
    }
}

impl<B: Backing> FileEvents<B> {
    pub(crate) fn note(&self, inode: &Arc<Inode<B>>, change: FileChange) {
        if !self.is_asked_for.load(Ordering::Relaxed) {
            return;
        }
        let mut queue = self.queue.lock();
        if queue.len() >= EVENTS_MAX {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        queue.push(Queued {
            inode: inode.id,
            weak: Arc::downgrade(inode),
            change,
            at: Instant::now(),
        });
    }

    /// Notes a change of what is held of a file.
    pub(crate) fn note_held(&self, inode: &Arc<Inode<B>>, before: u64, after: u64) {
        match (before, after) {
            (0, 1..) => self.note(inode, FileChange::Held),
            (1.., 0) => self.note(inode, FileChange::Drained),
            _ => {}
        }
    }
}

impl<B: Backing> Engine<B> {
    /// What happened to files since the last call, and how many events had no room. From the first call on it is
    /// collected, and is to be taken some times a second.
    pub fn take_file_events(&self) -> (Vec<FileEvent>, u64) {
        let events = &self.base.file_events;
        events.is_asked_for.store(true, Ordering::Relaxed);
        let taken = std::mem::take(&mut *events.queue.lock());
        let taken = taken.into_iter().map(|queued| FileEvent {
            inode: queued.inode,
            path: queued
                .weak
                .upgrade()
                .and_then(|inode| inode.paths().into_iter().next()),
            change: queued.change,
            at: queued.at,
        });
        (taken.collect(), events.dropped.swap(0, Ordering::Relaxed))
    }
}
