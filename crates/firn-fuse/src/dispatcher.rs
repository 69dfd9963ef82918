//! Carries out the requests of the kernel: each request becomes a call of the engine, which holds the files.
//!
//! [`Dispatcher::dispatch`] is the one entry. Each operation has a method, which chooses the thread of its call:
//!
//! * An operation that never calls the backing (the directory that the mount serves) runs on the thread that read the
//!   request.
//! * [`Dispatcher::run_call`], for an operation that calls the backing: on that thread, while another one is left to
//!   read requests ([`CallSlots`]).
//! * [`Dispatcher::run_on_worker`], for an operation that takes long or waits until data is drained (written to the
//!   backing): on a worker thread.
//! * [`Dispatcher::run_change`], for a change of names, attributes or length: on a worker thread while the [`Gate`]
//!   makes changes wait for a transaction (a checkpoint that appears at once), else as with `run_call`.
//!
//! The dispatcher relies on the engine for what an operation means, and does not know which transport read the request.

mod attributes;
mod data;
pub(crate) mod listing;
mod locks;
mod names;
mod open;

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use firn_backing::{Backing, Caller};
use firn_engine::{Engine, HandleId, InodeId, ResumedRequests};
use firn_format::data_socket::{IOCTL_TOKEN, Token};
use firn_format::live::ServedBy;
use firn_hosts::FileLocks;
use firn_workers::{Class, Workers};
use zerocopy::IntoBytes;

use crate::call_slots::CallSlots;
use crate::caller::IoUringUsers;
use crate::coherence::Coherence;
use crate::direct_access::{self, DataSocket};
use crate::failures::Failures;
use crate::gate::{Gate, admit, record_accesses};
use crate::passthrough::Passthrough;
use crate::repeated::RepeatedRequests;
use crate::reply::{Answer, Attributes, ReclaimUnsent, Replies, Reply, Responder};
use crate::request::{Operation, Request};
use crate::stall::WriteQueue;
use crate::topic::Topic;
use crate::truncations::Truncations;
use crate::unanswered::{Unanswered, WaitingThreads};
use crate::watch::{ChangeReporter, ChangeToReport, WatchedChange, change_to_report};

/// Options of a mount that concern the answers to the kernel.
#[derive(Clone, Copy, Debug)]
pub struct AdapterOptions {
    /// How long the kernel may keep attributes without asking.
    pub attr_timeout: Duration,
    /// How long the kernel may keep names without asking. Zero if other hosts rename and remove files: an open by name
    /// then gets the file that has the name now.
    pub name_timeout: Duration,
    /// Ask the kernel to read drained files (all bytes are in the backing) itself. The kernel demands CAP_SYS_ADMIN for
    /// that.
    pub passthrough: bool,
}

/// What the transport and the kernel have negotiated.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Negotiated {
    /// The kernel may read backing files itself.
    pub(crate) passthrough: bool,
    /// The kernel does not apply umasks, so the dispatcher must.
    pub(crate) applies_umask: bool,
    /// After the death of a firnd, the kernel sends that firnd's unanswered requests again.
    pub(crate) resends: bool,
}

/// Carries out the requests of one mount. See the head of this file.
pub(crate) struct Dispatcher<B: Backing, R: Responder> {
    engine: Arc<Engine<B>>,
    /// `None` on a mount without transactions.
    gate: Option<Arc<dyn Gate>>,
    options: AdapterOptions,
    negotiated: Negotiated,
    workers: Workers,
    call_slots: CallSlots,
    write_queue: Arc<WriteQueue<B, R>>,
    coherence: Arc<Coherence<B>>,
    truncations: Arc<Truncations>,
    passthrough: Arc<Passthrough<R::BackingId>>,
    data_socket: Option<DataSocket>,
    io_uring_users: Arc<IoUringUsers>,
    /// Locks that reach other hosts. `None`: the kernel keeps locks, and they hold on this host only.
    locks: Option<Arc<FileLocks>>,
    replies: Arc<Replies>,
}

/// Takes back look-ups and handles that a discarded answer contains: the kernel does not get them.
struct ReclaimToEngine<B: Backing, I> {
    engine: Arc<Engine<B>>,
    passthrough: Arc<Passthrough<I>>,
}

impl<B: Backing, I: Send + Sync> ReclaimUnsent for ReclaimToEngine<B, I> {
    fn forget(&self, inode: InodeId) {
        self.engine.namespace.forget(inode, 1);
    }

    fn release(&self, handle: HandleId) {
        self.passthrough.release(handle);
        self.engine.release(handle);
    }

    fn release_dir(&self, handle: HandleId) {
        self.engine.namespace.release_dir(handle);
    }
}

impl<B: Backing, R: Responder> Dispatcher<B, R> {
    /// Makes a dispatcher, which carries out the kernel's requests. `gate` makes changes wait for transactions; `None`
    /// if the mount has none. Also registers a callback of the engine, which drops changed attributes from the kernel.
    ///
    /// Before the first request, the caller must call [`Dispatcher::set_threads`] and [`Dispatcher::set_negotiated`].
    /// The other setters are optional.
    pub(crate) fn new(
        engine: Arc<Engine<B>>,
        gate: Option<Arc<dyn Gate>>,
        options: AdapterOptions,
        workers: Workers,
    ) -> Self {
        let coherence = Coherence::new(Arc::clone(&engine), workers.clone());
        register_attribute_invalidation(&engine, &coherence);
        let passthrough = Arc::<Passthrough<R::BackingId>>::default();
        let replies = Arc::new(new_replies(&engine, &passthrough));
        Self {
            options,
            negotiated: Negotiated::default(),
            call_slots: CallSlots::new(workers.clone()),
            write_queue: WriteQueue::new(
                Arc::clone(&engine),
                gate.clone(),
                workers.clone(),
                Arc::clone(&coherence),
            ),
            gate,
            truncations: Arc::default(),
            coherence,
            passthrough,
            data_socket: None,
            io_uring_users: Arc::default(),
            locks: None,
            replies,
            workers,
            engine,
        }
    }

    /// Sets how many threads of the transport may be in calls of the backing. The transport has one thread more.
    pub(crate) fn set_threads(&self, threads: usize) {
        self.call_slots.set_threads(threads);
    }

    /// Sets what was negotiated with the kernel. Called before the first request.
    pub(crate) fn set_negotiated(&mut self, negotiated: Negotiated) {
        self.negotiated = negotiated;
    }

    /// Lets processes learn that they can access the files of `arena` directly, through requests to `socket`.
    pub(crate) fn set_data_socket(&mut self, arena: [u8; 16], socket: &Path) {
        self.data_socket = DataSocket::new(arena, socket);
    }

    /// Makes locks of programs, and appends, hold for all hosts.
    pub(crate) fn set_locks(&mut self, locks: Arc<FileLocks>) {
        self.locks = Some(locks);
    }

    /// Whether the kernel must send requests for locks to Firn instead of keeping the locks itself.
    pub(crate) fn wants_locks(&self) -> bool {
        self.locks.is_some()
    }

    /// Whether to ask the kernel for passthrough.
    pub(crate) fn wants_passthrough(&self) -> bool {
        self.options.passthrough
    }

    pub(crate) fn coherence(&self) -> Arc<Coherence<B>> {
        Arc::clone(&self.coherence)
    }

    pub(crate) fn workers(&self) -> Workers {
        self.workers.clone()
    }

    /// Returns the counter of writes that now wait for room in the arena.
    pub(crate) fn waiting_writers(&self) -> Arc<AtomicU64> {
        self.write_queue.count()
    }

    pub(crate) fn waiting_threads(&self) -> WaitingThreads {
        WaitingThreads(Arc::clone(&self.replies.unanswered))
    }

    pub(crate) fn failures(&self) -> Arc<Failures> {
        Arc::clone(&self.replies.failures)
    }

    /// Takes over the open handles and unanswered requests of an earlier firnd, which served this mount and died.
    /// Called before the first request.
    ///
    /// A passthrough file is one that the kernel reads itself, and that has a number in the kernel. `adopt_backing`
    /// makes the transport's id from that number.
    pub(crate) fn resume(
        &self,
        resumed: ResumedRequests,
        adopt_backing: impl Fn(i32) -> R::BackingId,
    ) {
        // 1. Registers the passthrough files again. Handles of the same file share one id.
        let mut backing_ids: HashMap<i32, Arc<R::BackingId>> = HashMap::new();
        let mut written_inodes = HashSet::new();
        for handle in &resumed.handles {
            if let ServedBy::Passthrough(number) = handle.served_by {
                let id = backing_ids
                    .entry(number)
                    .or_insert_with(|| Arc::new(adopt_backing(number)));
                self.passthrough.restore(handle.inode, handle.id, id);
            }
            if self.engine.open_files.is_writer(handle.id) {
                written_inodes.insert(handle.inode);
            }
        }
        // 2. Processes wrote these files directly, and the earlier firnd may have died before it made the kernel drop
        // their old attributes.
        for inode in written_inodes {
            self.coherence.invalidate_attributes(inode);
        }
        // 3. The kernel has released these handles, but the earlier firnd died before it had released them too.
        for handle in resumed.handles.iter().filter(|handle| handle.is_released) {
            self.passthrough.release(handle.id);
            self.release_elsewhere(handle.inode, handle.id);
        }
        // 4. Keeps the rest for the requests that the kernel sends again.
        self.replies.repeated.fill(resumed);
    }

    /// Fails the requests that an earlier firnd (which served this mount and died) had begun, on a kernel that does not
    /// send them again. Calls `refuse` with the number of each request, to answer it with an error.
    pub(crate) fn fail_unanswered_requests(
        &self,
        resumed: &mut ResumedRequests,
        refuse: impl Fn(u64),
    ) {
        let count = resumed.requests.len();
        for (number, request) in resumed.requests.drain() {
            refuse(number);
            // The earlier firnd's record of the request is in shared memory. The drop of the result removes it.
            let earlier_record = self.engine.continue_request_record(&request);
            drop(earlier_record);
        }
        tracing::warn!(
            count,
            "requests that an earlier firnd had not answered end with EIO: this kernel does not send them again (Linux 6.9 and later do)"
        );
    }

    /// Records that the caller of a request got a signal.
    pub(crate) fn interrupt(&self, unique: u64) {
        tracing::trace!(unique, "interrupt");
        self.replies.unanswered.interrupt(unique);
    }

    /// Takes back `count` look-ups of `inode` from the kernel.
    pub(crate) fn forget(&self, inode: InodeId, count: u64) {
        tracing::trace!(inode = inode.0, count, "forget");
        self.engine.namespace.forget(inode, count);
    }

    /// Carries out a request. The answer goes to `responder`, before or after this function returns.
    pub(crate) fn dispatch(&self, request: Request<'_>, responder: R) {
        let mut reply = Reply::new(&request, responder, &self.replies);
        if !self.negotiated.resends {
            reply.record_in_progress(&self.engine);
        }
        let _span = reply.span().entered();
        let Request {
            unique,
            caller,
            operation,
        } = request;
        trace(unique, caller, &operation);
        if let Some(gate) = &self.gate {
            if gate.checks_changes()
                && let Err(errno) = admit(&**gate, caller, reply.is_repeated(), &operation)
            {
                reply.abandon_earlier_attempt(&self.engine);
                return reply.error(errno);
            }
            record_accesses(&**gate, caller, &operation);
        }
        match operation {
            Operation::Lookup(child) => self.lookup(child, reply),
            Operation::Getattr { inode, handle } => self.getattr(inode, handle, reply),
            Operation::Setattr { inode, set } => self.setattr(caller, inode, set, reply),
            Operation::Readlink { inode } => self.readlink(inode, reply),
            Operation::Mknod {
                child,
                mode,
                device,
            } => self.mknod(caller, child, mode, device, reply),
            Operation::Mkdir { child, mode } => self.mkdir(caller, child, mode, reply),
            Operation::Unlink(child) => self.unlink(caller, child, reply),
            Operation::Rmdir(child) => self.rmdir(caller, child, reply),
            Operation::Symlink { child, target } => self.symlink(caller, child, target, reply),
            Operation::Rename { from, to, flags } => {
                self.rename(caller, from, to, flags, reply);
            }
            Operation::Link { inode, child } => self.link(caller, inode, child, reply),
            Operation::Open { inode, flags } => self.open(caller, inode, flags, reply),
            Operation::Create { child, mode, flags } => {
                self.create(caller, child, mode, flags, reply)
            }
            Operation::Opendir { inode } => self.opendir(inode, reply),
            Operation::Release { inode, handle } => self.release(inode, handle, reply),
            Operation::Releasedir { handle, .. } => self.releasedir(handle, reply),
            Operation::Read(read) => self.read(read, reply),
            Operation::Write(write) => self.write(caller, write, reply),
            Operation::Flush {
                inode,
                handle,
                owner,
            } => self.flush(caller, inode, handle, owner, reply),
            Operation::Fsync {
                inode,
                handle,
                data_only,
            } => self.fsync(inode, handle, data_only, reply),
            Operation::Fsyncdir { inode } => self.fsyncdir(inode, reply),
            Operation::Fallocate(fallocate) => self.fallocate(caller, fallocate, reply),
            Operation::Lseek {
                inode,
                handle,
                offset,
                whence,
            } => self.lseek(inode, handle, offset, whence, reply),
            Operation::CopyRange(copy) => self.copy_range(caller, copy, reply),
            Operation::Getlk(lock) => self.getlk(lock, reply),
            Operation::Setlk { lock, waits } => self.setlk(lock, waits, reply),
            Operation::Readdir {
                inode,
                handle,
                cookie,
            } => self.readdir(inode, handle, cookie, reply),
            Operation::Readdirplus {
                inode,
                handle,
                cookie,
            } => self.readdirplus(inode, handle, cookie, reply),
            Operation::Statfs { .. } => self.statfs(reply),
            Operation::Setxattr {
                inode,
                name,
                value,
                flags,
            } => self.setxattr(caller, inode, name, value, flags, reply),
            Operation::Getxattr { inode, name, size } => self.getxattr(inode, name, size, reply),
            Operation::Listxattr { inode, size } => self.listxattr(inode, size, reply),
            Operation::Removexattr { inode, name } => self.removexattr(inode, name, reply),
            Operation::Ioctl {
                handle,
                command,
                out_size,
                ..
            } => self.ioctl(caller, handle, command, out_size, reply),
        }
    }

    /// Answers the only ioctl(2) of Firn, which asks how to access the file directly.
    fn ioctl(
        &self,
        caller: Caller,
        handle: HandleId,
        command: u32,
        out_size: u32,
        reply: Reply<R>,
    ) {
        if command != IOCTL_TOKEN || (out_size as usize) < size_of::<Token>() {
            return reply.error(firn_backing::Errno::NOTTY);
        }
        let token = direct_access::token(self.data_socket.as_ref(), caller, handle);
        reply.send(Answer::Ioctl(token.as_bytes()));
    }

    /// Runs work that calls the backing: on this thread if a call slot is free, else on another one. `topic`: what the
    /// call may wait for.
    fn run_call(&self, topic: Topic, call: impl FnOnce(&Engine<B>) + Send + 'static) {
        match self.call_slots.acquire() {
            Some(_slot) => call(&self.engine),
            None => {
                let engine = Arc::clone(&self.engine);
                self.call_slots
                    .run_elsewhere(topic, Box::new(move || call(&engine)));
            }
        }
    }

    /// Runs a call on a worker, because it takes long or waits for a drain.
    fn run_on_worker(&self, topic: Topic, call: impl FnOnce(&Engine<B>) + Send + 'static) {
        let engine = Arc::clone(&self.engine);
        self.workers
            .run_on_topic(Class::Call, topic, move || call(&engine));
    }

    /// Runs a change of an object's attributes, or of the names in a directory. A worker runs it if the change may have
    /// to wait for a transaction, so that the threads that answer the kernel remain free for reads.
    fn run_change(&self, inode: InodeId, call: impl FnOnce(&Engine<B>) + Send + 'static) {
        if self.holds_up_changes() {
            self.run_on_worker(Topic::Inode(inode), call);
        } else {
            self.run_call(Topic::Inode(inode), call);
        }
    }

    /// Returns the watch of the commit rules together with `change`, if the rules concern the change.
    fn change_to_report(&self, change: impl FnOnce() -> WatchedChange) -> Option<ChangeToReport> {
        change_to_report(self.gate.as_deref(), change)
    }

    /// Runs `change`, a modification that a program has requested. If `to_report` is set, the modification is also
    /// reported to the commit rules of the mount, which recognise a program's checkpoint by its changes and commit it.
    ///
    /// Such a report may wait for a commit, so a worker then runs `change`; otherwise it runs as in
    /// [`Dispatcher::run_change`]. `change` must make the modification through the [`ChangeReporter`] that it gets.
    fn run_reported_change(
        &self,
        caller: Caller,
        inode: InodeId,
        to_report: Option<ChangeToReport>,
        change: impl FnOnce(&Engine<B>, ChangeReporter) + Send + 'static,
    ) {
        let may_wait_for_commit = to_report.is_some();
        let reporter = ChangeReporter::new(to_report, caller);
        let call = move |engine: &Engine<B>| change(engine, reporter);
        if may_wait_for_commit {
            self.run_on_worker(Topic::Inode(inode), call);
        } else {
            self.run_change(inode, call);
        }
    }

    /// Runs an open after the object has *settled*: changes by ended writers that are about to be dropped have been
    /// dropped. A worker waits for that if necessary; otherwise the open runs without a wait.
    ///
    /// A look-up must not wait for the drop: the kernel holds the directory's lock during a look-up, and needs the same
    /// lock to drop names of the directory from its cache.
    fn run_after_settling(&self, inode: InodeId, call: impl FnOnce(&Engine<B>) + Send + 'static) {
        let watch = self.gate.as_ref().and_then(|gate| gate.watch());
        match watch.filter(|watch| watch.must_drop_contents(inode)) {
            None => self.run_call(Topic::Inode(inode), call),
            Some(watch) => self.run_on_worker(Topic::Inode(inode), move |engine| {
                watch.settle(inode);
                call(engine);
            }),
        }
    }

    fn holds_up_changes(&self) -> bool {
        self.gate
            .as_ref()
            .is_some_and(|gate| gate.holds_up_changes())
    }

    /// Runs a call that waits until the file is drained. A worker runs it if bytes are pending; else the call takes
    /// only the time of the backing.
    fn run_drained(
        &self,
        inode: InodeId,
        handle: HandleId,
        call: impl FnOnce(&Engine<B>) + Send + 'static,
    ) {
        if self.engine.needs_drain(handle) {
            self.run_on_worker(Topic::Inode(inode), call);
        } else {
            self.run_call(Topic::Inode(inode), call);
        }
    }
}

/// Lets the kernel drop the attributes of an inode whenever the privilege rules have changed them.
fn register_attribute_invalidation<B: Backing>(engine: &Engine<B>, coherence: &Arc<Coherence<B>>) {
    let weak_coherence = Arc::downgrade(coherence);
    let on_change = move |inode| {
        if let Some(coherence) = weak_coherence.upgrade() {
            coherence.invalidate_attributes(inode);
        }
    };
    engine
        .privilege_rules
        .on_attributes_changed(Arc::new(on_change));
}

/// Makes the state that all replies of a mount share: they measure their times, record failures, register as unanswered
/// requests, and find the records of an earlier firnd, the process that served the mount before this one.
fn new_replies<B: Backing, I: Send + Sync + 'static>(
    engine: &Arc<Engine<B>>,
    passthrough: &Arc<Passthrough<I>>,
) -> Replies {
    // A failure is recorded with the path of its object.
    let engine_for_paths = Arc::clone(engine);
    let failures = Failures::new(move |inode, name| engine_for_paths.tree.shown_path(inode, name));
    // The progress of the drain decides when a process that exits stops waiting. The reference is weak, so that the
    // table of unanswered requests, which is also used elsewhere, does not keep the engine alive.
    let weak_engine = Arc::downgrade(engine);
    let drained_bytes = move || {
        weak_engine
            .upgrade()
            .map_or(0, |engine| engine.drained_bytes())
    };
    Replies {
        times: Arc::clone(engine.request_times()),
        failures: Arc::new(failures),
        unanswered: Unanswered::new(drained_bytes),
        reclaim: Box::new(ReclaimToEngine {
            engine: Arc::clone(engine),
            passthrough: Arc::clone(passthrough),
        }),
        repeated: RepeatedRequests::default(),
    }
}

/// Logs a request at level trace.
fn trace(unique: u64, caller: Caller, operation: &Operation<'_>) {
    let (inode, name) = operation.inode_and_name();
    tracing::trace!(
        unique,
        pid = caller.pid,
        operation = operation.kind().name(),
        inode = inode.0,
        ?name,
        "request"
    );
}

/// Returns attributes for the kernel, with the time for which it may keep them.
///
/// That time is zero while processes write the file directly (in shared memory), which the kernel does not see. It is
/// also zero while the kernel has pages that another host has changed, so that the kernel asks for attributes before it
/// reads the pages.
///
/// Must be called after `attr` was read, so that it sees a direct write that began meanwhile.
fn attributes_for_kernel<B: Backing>(
    engine: &Engine<B>,
    options: AdapterOptions,
    inode: InodeId,
    attr: firn_backing::Attr,
) -> Attributes {
    let is_written_directly = engine.kernel_cache.is_written_directly(inode);
    let ttl = if is_written_directly || engine.kernel_cache.stale_pages(inode).is_some() {
        Duration::ZERO
    } else {
        options.attr_timeout
    };
    Attributes {
        inode,
        attr,
        ttl,
        name_ttl: ttl.min(options.name_timeout),
    }
}
