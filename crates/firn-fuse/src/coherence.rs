//! What the kernel has cached and is to drop.
//!
//! Promises
//! * [`Forgetter::forget`] returns when nothing of what it was told is left in the kernel, also of a request that
//!   was answered before the call and that the kernel has not dealt with yet.
//! * A reader sees no page from before a write that was answered.
//!
//! **Who may call.** The kernel drops a name under the lock of its directory, and a page after whoever fills it. So
//! no thread may call [`Forgetter::forget`] that a request is waiting for: neither one that answers the kernel nor
//! one that holds a lock which such a thread takes. Dropping attributes waits for nobody.
//!
//! **Names one by one.** Linux 6.16 can drop all names of a mount at once (FUSE_NOTIFY_INC_EPOCH). That takes the
//! names away from directories that processes are in, so that getcwd(2) fails, and unmounts what is mounted below;
//! and older kernels do not have it.
//!
//! **Pages after a write.** The kernel drops the pages of a range before it sends a direct write of it here. A reader through a
//! cached handle may fill them again with what was there before the write, and would keep that. So a
//! write to a file with cached readers is answered only after its pages were dropped once more. (Linux
//! 6.18 does so itself; older kernels do not all.)

use std::sync::{Arc, OnceLock};

use firn_backing::Backing;
use firn_engine::{Cached, Engine, HandleId, InodeId};
use fuser::{INodeNo, Notifier};

use crate::workers::{Topic, Workers};

/// Where a write went.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    pub(crate) inode: INodeNo,
    pub(crate) handle: HandleId,
    pub(crate) offset: u64,
    /// The kernel writes a page of its cache back: it is locked, and what is in it is what is written.
    pub(crate) from_cache: bool,
}

/// Makes the kernel drop what it has cached.
#[derive(Clone)]
pub struct Forgetter(Arc<dyn Forget>);

impl Forgetter {
    pub(crate) fn new<B: Backing>(coherence: Arc<Coherence<B>>) -> Self {
        Self(coherence)
    }

    /// Returns when nothing of it from before this call is left.
    pub fn forget(&self, cached: &Cached) {
        self.0.forget(cached);
    }

    /// Returns when no attribute of the inode from before this call is left.
    pub fn forget_attributes(&self, inode: InodeId) {
        self.0.forget_attributes(inode);
    }
}

trait Forget: Send + Sync {
    fn forget(&self, cached: &Cached);
    fn forget_attributes(&self, inode: InodeId);
}

impl<B: Backing> Forget for Coherence<B> {
    fn forget(&self, cached: &Cached) {
        let Some(notifier) = self.notifier() else {
            return;
        };
        // What the kernel does not know is no error to the notifier.
        let dropped = match cached {
            Cached::Name { parent, name } => notifier.inval_entry(INodeNo(parent.0), name),
            Cached::Inode(inode) => notifier.inval_inode(INodeNo(inode.0), 0, 0),
        };
        if let Err(error) = dropped {
            tracing::warn!(%error, ?cached, "the kernel did not drop what it has cached");
        }
    }

    fn forget_attributes(&self, inode: InodeId) {
        Coherence::forget_attributes(self, inode);
    }
}

/// Drops pages after writes, and more when it is asked to.
pub(crate) struct Coherence<B: Backing> {
    engine: Arc<Engine<B>>,
    workers: Workers,
    notifier: OnceLock<Notifier>,
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
    pub(crate) fn start(&self, notifier: Notifier) {
        let _ = self.notifier.set(notifier);
    }

    pub(crate) fn notifier(&self) -> Option<&Notifier> {
        self.notifier.get()
    }
    pub(crate) fn engine(&self) -> &Arc<Engine<B>> {
        &self.engine
    }
    pub(crate) fn workers(&self) -> &Workers {
        &self.workers
    }

    /// Returns when no attribute of the inode from before this call is left.
    pub(crate) fn forget_attributes(&self, inode: InodeId) {
        let Some(notifier) = self.notifier() else {
            return;
        };
        if let Err(error) = notifier.inval_inode(INodeNo(inode.0), -1, 0) {
            tracing::warn!(%error, inode = inode.0, "the kernel did not drop attributes");
        }
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
                if !target.from_cache && self.engine.has_cached_readers(target.handle) =>
            {
                notifier.clone()
            }
            _ => return answer(),
        };
        // Not on this thread: dropping a page waits for a read of it that a FUSE thread must answer.
        self.workers.run_about(Topic::Pages(InodeId(target.inode.0)), move || {
            let dropped = notifier.inval_inode(target.inode, target.offset as i64, len as i64);
            if let Err(error) = dropped
                && error.kind() != std::io::ErrorKind::NotFound
            {
                tracing::warn!(%error, inode = target.inode.0, "cannot drop cached pages after a write");
            }
            answer();
        });
    }
}
