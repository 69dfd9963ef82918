//! Makes the kernel drop names, attributes and pages from its caches before a program could see old ones.
//!
//! Promises
//! * When [`Invalidator::invalidate`] returns, the kernel caches nothing of the object from before the call. This holds
//!   even for answers that were sent before the call and that the kernel had not handled yet.
//! * No reader sees a page from before a write that was answered.
//!
//! A *direct* write or read goes around the kernel's page cache; a *cached* handle or reader uses that cache.
//!
//! **Threads that may invalidate.** To drop a name, the kernel takes the lock of its directory; to drop a page, it
//! waits for the read that fills it. So a thread must not call [`Invalidator::invalidate`] while it has to answer a
//! request, or while it holds a lock that an answering thread needs. The drop of attributes waits for no request.
//!
//! **Pages after a write.** Before the kernel sends a direct write to Firn, it drops the pages of the range. A reader
//! through a cached handle may then fill them again with the bytes from before the write, and these pages would remain
//! in the cache. So a write to a file with cached readers is answered only after its pages were dropped a second time.
//! Linux 6.18 does this itself, but not all older kernels do.
//!
//! **Considered.** Linux 6.16 can drop all names of a mount at once (FUSE_NOTIFY_INC_EPOCH). That also drops the names
//! of current directories of processes, so that their getcwd(2) fails, and unmounts file systems that are mounted
//! below. So names are dropped one by one.

use std::ffi::OsStr;
use std::io;
use std::sync::{Arc, OnceLock};

use firn_backing::Backing;
use firn_engine::{Cached, Engine, HandleId, InodeId};
use firn_workers::{Class, Workers};

use crate::topic::Topic;

/// Length of a range that ends with the file.
pub(crate) const TO_THE_END: u64 = 0;

/// File and offset of a write.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    pub(crate) inode: InodeId,
    pub(crate) handle: HandleId,
    pub(crate) offset: u64,
    /// The kernel writes back a page of its cache. The page is locked, and already contains the bytes of the write.
    pub(crate) from_cache: bool,
}

/// The transport's side: makes the kernel drop data from its caches, or store data there. For an object that the kernel
/// does not know, the result may be ENOENT.
pub(crate) trait Notifier: Send + Sync {
    /// Drops a name, and the names below it.
    fn invalidate_name(&self, parent: InodeId, name: &OsStr) -> io::Result<()>;

    /// Drops the attributes of an inode. Waits for no request.
    fn invalidate_attributes(&self, inode: InodeId) -> io::Result<()>;

    /// Drops the attributes of an inode, and the pages of `len` bytes from `offset`; `len` may be [`TO_THE_END`]. Waits
    /// for reads that fill these pages.
    fn invalidate_pages(&self, inode: InodeId, offset: u64, len: u64) -> io::Result<()>;

    /// Puts bytes into a page of the cache.
    fn store(&self, inode: InodeId, offset: u64, data: &[u8]) -> io::Result<()>;
}

/// Makes the kernel drop cached data. Used by parts of the mount outside this crate.
#[derive(Clone)]
pub struct Invalidator(Arc<dyn Invalidate>);

impl Invalidator {
    pub(crate) fn new<B: Backing>(coherence: Arc<Coherence<B>>) -> Self {
        Self(coherence)
    }

    /// Drops a name, or the attributes and pages of an inode. Returns when the kernel caches no part of them from
    /// before this call. See the head of the file for the threads that may call this.
    pub fn invalidate(&self, cached: &Cached) {
        self.0.invalidate(cached);
    }

    /// Returns when the kernel caches no attributes of the inode from before this call.
    pub fn invalidate_attributes(&self, inode: InodeId) {
        self.0.invalidate_attributes(inode);
    }
}

/// [`Coherence`] without the type of its backing.
trait Invalidate: Send + Sync {
    fn invalidate(&self, cached: &Cached);
    fn invalidate_attributes(&self, inode: InodeId);
}

impl<B: Backing> Invalidate for Coherence<B> {
    fn invalidate(&self, cached: &Cached) {
        // Before the first request the kernel caches nothing.
        let Some(notifier) = self.notifier() else {
            return;
        };
        let result = match cached {
            Cached::Name { parent, name } => notifier.invalidate_name(*parent, name),
            Cached::Inode(inode) => notifier.invalidate_pages(*inode, 0, TO_THE_END),
        };
        if let Err(error) = result.or_else(ignore_unknown_object) {
            tracing::warn!(%error, ?cached, "cannot make the kernel drop cached data: programs may see old data");
        }
    }

    fn invalidate_attributes(&self, inode: InodeId) {
        Coherence::invalidate_attributes(self, inode);
    }
}

/// Keeps the kernel's caches of a mount coherent with its files.
pub(crate) struct Coherence<B: Backing> {
    engine: Arc<Engine<B>>,
    workers: Workers,
    notifier: OnceLock<Arc<dyn Notifier>>,
}

impl<B: Backing> Coherence<B> {
    pub(crate) fn new(engine: Arc<Engine<B>>, workers: Workers) -> Arc<Self> {
        Arc::new(Self {
            engine,
            workers,
            notifier: OnceLock::new(),
        })
    }

    /// Sets the transport's notifier. Called before the first request is served.
    pub(crate) fn start(&self, notifier: Arc<dyn Notifier>) {
        // Called once, so no notifier is set yet.
        let _ = self.notifier.set(notifier);
    }

    pub(crate) fn notifier(&self) -> Option<&Arc<dyn Notifier>> {
        self.notifier.get()
    }

    pub(crate) fn engine(&self) -> &Arc<Engine<B>> {
        &self.engine
    }

    pub(crate) fn workers(&self) -> &Workers {
        &self.workers
    }

    /// Returns when the kernel caches no attributes of the inode from before this call.
    pub(crate) fn invalidate_attributes(&self, inode: InodeId) {
        let Some(notifier) = self.notifier() else {
            return;
        };
        if let Err(error) = notifier
            .invalidate_attributes(inode)
            .or_else(ignore_unknown_object)
        {
            tracing::warn!(%error, inode = inode.0, "cannot make the kernel drop cached attributes: programs may see old ones");
        }
    }

    /// Calls `answer`, which answers a request, after the stale pages of the inode were dropped from the kernel's page
    /// cache. A page is stale if this host has noticed a later change by another host.
    ///
    /// If there are no stale pages, calls `answer` at once.
    pub(crate) fn answer_after_remote_changes(
        self: &Arc<Self>,
        inode: InodeId,
        answer: impl FnOnce() + Send + 'static,
    ) {
        if self.engine.kernel_cache.stale_pages(inode).is_none() {
            return answer();
        }
        let coherence = Arc::clone(self);
        self.workers
            .run_on_topic(Class::Call, Topic::Pages(inode), move || {
                let kernel_cache = &coherence.engine.kernel_cache;
                // Another thread may have dropped the pages meanwhile.
                if let Some(change) = kernel_cache.stale_pages(inode) {
                    Invalidate::invalidate(&*coherence, &Cached::Inode(inode));
                    kernel_cache.record_dropped_pages(inode, change);
                }
                answer();
            });
    }

    /// Calls `answer`, which answers a write of `len` bytes, once no reader can see bytes from before it. Calls it at
    /// once if the kernel's page cache cannot have such bytes: no handle of the file reads through the cache, or the
    /// write came from it.
    pub(crate) fn answer_after_write(
        &self,
        target: Target,
        len: usize,
        answer: impl FnOnce() + Send + 'static,
    ) {
        let Some(notifier) = self.notifier().cloned() else {
            return answer();
        };
        if target.from_cache || !self.engine.kernel_cache.has_cached_readers(target.handle) {
            return answer();
        }
        // On a worker: the drop of a page waits for a read of that page, and this thread may be the one that must
        // answer that read.
        self.workers.run_on_topic(Class::Call, Topic::Pages(target.inode), move || {
            let result = notifier.invalidate_pages(target.inode, target.offset, len as u64);
            if let Err(error) = result.or_else(ignore_unknown_object) {
                tracing::warn!(%error, inode = target.inode.0, "cannot make the kernel drop cached pages after a write: programs may read old bytes");
            }
            answer();
        });
    }
}

/// Ignores the error for an object that the kernel does not know: then nothing of the object is cached.
fn ignore_unknown_object(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound {
        Ok(())
    } else {
        Err(error)
    }
}
