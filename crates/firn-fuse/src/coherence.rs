//! What the kernel has cached and is to drop.
//!
//! Promises
//! * [`Invalidator::invalidate`] returns when nothing of what it was told is left in the kernel, also of a request
//!   that was answered before the call and that the kernel has not dealt with yet.
//! * A reader sees no page from before a write that was answered.
//!
//! **Which threads may call.** The kernel drops a name under the lock of its directory, and a page after the read that
//! fills it. So no thread may call [`Invalidator::invalidate`] that a request is waiting for: neither one that answers
//! the kernel nor one that holds a lock which such a thread takes. Dropping attributes waits for no other request.
//!
//! **Names one by one.** Linux 6.16 can drop all names of a mount at once (FUSE_NOTIFY_INC_EPOCH). That takes the
//! names away from directories that processes are in, so that getcwd(2) fails, and unmounts what is mounted below;
//! and older kernels do not have it.
//!
//! **Pages after a write.** The kernel drops the pages of a range before it sends a direct write of it here. A reader through a
//! cached handle may fill them again with what was there before the write, and would keep that. So a
//! write to a file with cached readers is answered only after its pages were dropped once more. (Linux
//! 6.18 does so itself; older kernels do not all.)

use std::ffi::OsStr;
use std::io;
use std::sync::{Arc, OnceLock};

use firn_backing::Backing;
use firn_engine::{Cached, Engine, HandleId, InodeId};
use firn_workers::{Class, Workers};

use crate::topic::Topic;

/// Where a write went.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    pub(crate) inode: InodeId,
    pub(crate) handle: HandleId,
    pub(crate) offset: u64,
    /// The kernel writes a page of its cache back: it is locked, and what is in it is what is written.
    pub(crate) from_cache: bool,
}

/// How a transport tells the kernel what to drop from its caches, or to put there. What the kernel does not know may
/// be an error (ENOENT) or not.
pub(crate) trait Notifier: Send + Sync {
    /// Drops a name, and with it what is below.
    fn invalidate_name(&self, parent: InodeId, name: &OsStr) -> io::Result<()>;

    /// Drops the attributes of an inode, without waiting.
    fn invalidate_attributes(&self, inode: InodeId) -> io::Result<()>;

    /// Drops attributes and the pages of `len` bytes from `offset`; `len` 0: all after it. Waits for reads that fill
    /// them.
    fn invalidate_pages(&self, inode: InodeId, offset: u64, len: u64) -> io::Result<()>;

    /// Puts bytes into a page.
    fn store(&self, inode: InodeId, offset: u64, data: &[u8]) -> io::Result<()>;
}

/// Makes the kernel drop what it has cached.
#[derive(Clone)]
pub struct Invalidator(Arc<dyn Invalidate>);

impl Invalidator {
    pub(crate) fn new<B: Backing>(coherence: Arc<Coherence<B>>) -> Self {
        Self(coherence)
    }

    /// Returns when nothing of it from before this call is left.
    pub fn invalidate(&self, cached: &Cached) {
        self.0.invalidate(cached);
    }

    /// Returns when no attribute of the inode from before this call is left.
    pub fn invalidate_attributes(&self, inode: InodeId) {
        self.0.invalidate_attributes(inode);
    }
}

trait Invalidate: Send + Sync {
    fn invalidate(&self, cached: &Cached);
    fn invalidate_attributes(&self, inode: InodeId);
}

impl<B: Backing> Invalidate for Coherence<B> {
    fn invalidate(&self, cached: &Cached) {
        let Some(notifier) = self.notifier() else {
            return;
        };
        let dropped = match cached {
            Cached::Name { parent, name } => notifier.invalidate_name(*parent, name),
            Cached::Inode(inode) => notifier.invalidate_pages(*inode, 0, 0),
        };
        if let Err(error) = dropped.or_else(ignore_unknown) {
            tracing::warn!(%error, ?cached, "the kernel did not drop what it has cached");
        }
    }

    fn invalidate_attributes(&self, inode: InodeId) {
        Coherence::invalidate_attributes(self, inode);
    }
}

/// Drops pages after writes, and more when it is asked to.
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

    /// To be called before the first request is served.
    pub(crate) fn start(&self, notifier: Arc<dyn Notifier>) {
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

    /// Returns when no attribute of the inode from before this call is left.
    pub(crate) fn invalidate_attributes(&self, inode: InodeId) {
        let Some(notifier) = self.notifier() else {
            return;
        };
        if let Err(error) = notifier
            .invalidate_attributes(inode)
            .or_else(ignore_unknown)
        {
            tracing::warn!(%error, inode = inode.0, "the kernel did not drop attributes");
        }
    }

    /// Calls `answer` once no reader can see what was there before a change by another host that this one has learnt of.
    pub(crate) fn after_changes_by_others(
        self: &Arc<Self>,
        inode: InodeId,
        answer: impl FnOnce() + Send + 'static,
    ) {
        if self.engine.kernel_cache.stale_pages(inode).is_none() {
            return answer();
        }
        let coherence = Arc::clone(self);
        self.workers
            .run_about(Class::Call, Topic::Pages(inode), move || {
                // Another one may have dropped them meanwhile.
                if let Some(change) = coherence.engine.kernel_cache.stale_pages(inode) {
                    Invalidate::invalidate(&*coherence, &Cached::Inode(inode));
                    coherence
                        .engine
                        .kernel_cache
                        .note_pages_dropped(inode, change);
                }
                answer();
            });
    }

    /// Calls `answer` once no reader can see what was there before the write of `len` bytes.
    pub(crate) fn after_write(
        &self,
        target: Target,
        len: usize,
        answer: impl FnOnce() + Send + 'static,
    ) {
        let notifier = match self.notifier.get() {
            Some(notifier)
                if !target.from_cache
                    && self.engine.kernel_cache.has_cached_readers(target.handle) =>
            {
                Arc::clone(notifier)
            }
            _ => return answer(),
        };
        // Not on this thread: dropping a page waits for a read of it that a FUSE thread must answer.
        self.workers.run_about(Class::Call, Topic::Pages(target.inode), move || {
            let dropped = notifier.invalidate_pages(target.inode, target.offset, len as u64);
            if let Err(error) = dropped.or_else(ignore_unknown) {
                tracing::warn!(%error, inode = target.inode.0, "cannot drop cached pages after a write");
            }
            answer();
        });
    }
}

/// What the kernel does not know is not cached there.
fn ignore_unknown(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound {
        Ok(())
    } else {
        Err(error)
    }
}
