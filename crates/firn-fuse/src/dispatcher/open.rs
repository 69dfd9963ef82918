//! Requests that open and release files and directories.
//!
//! An open takes these steps:
//! 1. The engine opens the file.
//! 2. [`Opener::choose_mode`] decides whether the kernel or Firn serves reads and writes.
//! 3. [`record_handle`] records the handle in the arena, the shared memory that outlives firnd (the serving process).
//! 4. The answer is sent. So a later firnd finds every handle that the kernel has.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use firn_backing::{Backing, Caller, Errno, Kind};
use firn_engine::{
    CreatedObject, Creation, Engine, Entry, HandleId, InodeId, OpenMode, Opened, RequestObjects,
};
use firn_hosts::{LockKind, ReleasedLocks};
use firn_workers::Class;

use crate::caller::{IoUringUsers, apply_umask};
use crate::coherence::Coherence;
use crate::dispatcher::{AdapterOptions, Dispatcher, attributes_for_kernel};
use crate::gate::enter_change;
use crate::passthrough::Passthrough;
use crate::reply::{Answer, CloseBehavior, HandleMode, Reply, Responder};
use crate::request::{Name, NewMode};
use crate::topic::Topic;
use crate::watch::{ChangeReporter, WatchedChange};

impl<B: Backing, R: Responder> Dispatcher<B, R> {
    /// Answers an open(2) without O_CREAT. Ignores O_TRUNC: Firn has negotiated that the kernel sends a separate
    /// truncation.
    ///
    /// An open for writing is reported to the commit rules, which recognise a program's checkpoint by its changes. The
    /// report may take long, so a worker makes it. Any other open first waits until changes of ended writers that are
    /// about to be dropped have been dropped.
    pub(super) fn open(&self, caller: Caller, inode: InodeId, flags: i32, reply: Reply<R>) {
        let opener = self.opener(caller);
        let coherence = Arc::clone(&self.coherence);
        let call = move |engine: &Engine<B>, reporter: ChangeReporter| {
            // An earlier firnd may have opened a handle for this request before it died. The kernel never got it.
            reply.release_earlier_handle();
            let open = || engine.open(inode, flags);
            let opened = reporter.make_open(open, |opened| Some(opened.handle));
            if let Ok(opened) = &opened {
                engine.record_opener(opened.handle, caller.pid);
            }
            opener.answer_open(engine, &coherence, inode, flags, opened, reply);
        };
        let is_read_only = flags & libc::O_ACCMODE == libc::O_RDONLY;
        let to_report = if is_read_only {
            None
        } else {
            self.change_to_report(|| WatchedChange::Open(inode))
        };
        if to_report.is_some() {
            self.run_on_worker(Topic::Inode(inode), move |engine| {
                call(engine, ChangeReporter::new(to_report, caller));
            });
        } else {
            self.run_after_settling(inode, move |engine| {
                call(engine, ChangeReporter::new(None, caller));
            });
        }
    }

    /// Answers an open(2) that creates the file, or opens a file that another process has made meanwhile. The change is
    /// reported to the commit rules, which recognise a program's checkpoint by its changes.
    pub(super) fn create(
        &self,
        caller: Caller,
        child: Name<'_>,
        mode: NewMode,
        flags: i32,
        mut reply: Reply<R>,
    ) {
        let child = child.to_owned();
        let umask = self.umask_to_apply(mode);
        let opener = self.opener(caller);
        let gate = self.gate.clone();
        let to_report =
            self.change_to_report(|| WatchedChange::Create(child.parent, child.name.clone()));
        self.run_reported_change(caller, child.parent, to_report, move |engine, reporter| {
            // An earlier firnd may have opened a handle for this request before it died. The kernel never got it.
            reply.release_earlier_handle();
            let new_file = CreatedObject {
                parent: child.parent,
                name: &child.name,
                kind: Kind::File,
                target: None,
            };
            // If an earlier firnd has created the file for this request, the flags must not exclude that file.
            let file_mode = apply_umask(engine, child.parent, mode.mode, umask);
            let flags = flags_to_create(engine, new_file, &caller, file_mode, flags, &mut reply);
            let create = || {
                // Another process may have made the file meanwhile. Then O_TRUNC changes the contents of an existing
                // file, which needs a pass of the gate (it makes changes wait for transactions).
                let may_truncate = flags & libc::O_TRUNC != 0;
                let gate_for_contents = gate.as_deref().filter(|_| may_truncate);
                let _pass = enter_change(gate_for_contents, child.parent)?;
                // Computed again, because the default ACL may have changed while this thread waited for the pass.
                let file_mode = apply_umask(engine, child.parent, mode.mode, umask);
                engine.create(&caller, child.parent, &child.name, file_mode, flags)
            };
            let is_read_only = flags & libc::O_ACCMODE == libc::O_RDONLY;
            let writing_handle =
                |(_, opened): &(Entry, Opened)| (!is_read_only).then_some(opened.handle);
            let created = reporter.make_open(create, writing_handle);
            if let Ok((_, opened)) = &created {
                engine.record_opener(opened.handle, caller.pid);
            }
            opener.answer_create(engine, created, flags, reply);
        });
    }

    /// Answers an opendir(3).
    pub(super) fn opendir(&self, inode: InodeId, reply: Reply<R>) {
        self.run_after_settling(inode, move |engine| {
            reply.release_earlier_handle();
            let opened = engine.namespace.open_dir(inode);
            if let Ok(handle) = opened {
                engine.record_open_directory(handle, inode, reply.number());
            }
            reply.answer(opened.map(|handle| Answer::Opened {
                handle,
                mode: HandleMode::Cached,
                close_behavior: CloseBehavior::SendsFlush,
            }));
        });
    }

    /// Answers a RELEASE, which the kernel sends after the last use of a handle and of its mappings. If the handle has
    /// locks of all hosts, they are released first.
    pub(super) fn release(&self, inode: InodeId, handle: HandleId, reply: Reply<R>) {
        self.report_release(inode, handle);
        // Before the engine's release: once the engine counts no passthrough handle of the inode, it may choose another
        // mode for a new handle. The kernel refuses another mode while the id lives.
        self.passthrough.release(handle);
        let lock_kinds = [LockKind::Bytes, LockKind::Flock];
        let locks_of_handle = ReleasedLocks::Handle(handle.0);
        if self.holds_locks(handle, &lock_kinds, locks_of_handle) {
            let engine = Arc::clone(&self.engine);
            let release = move |_: Result<(), Errno>| {
                release_handle(&engine, handle);
                reply.send(Answer::Done);
            };
            return self.release_locks(inode, handle, &lock_kinds, locks_of_handle, release);
        }
        if let Some(_slot) = self.call_slots.acquire() {
            release_handle(&self.engine, handle);
            reply.send(Answer::Done);
            return;
        }
        // Answered before the work: no program waits for this answer, but while many such answers are missing, the
        // kernel reads ahead in no file of the mount. The live table tells the next firnd what the kernel knows. If
        // this firnd dies before it has released the handle, the next one releases it.
        if let Some(live) = self.engine.live() {
            live.record_release(handle.0);
        }
        reply.send(Answer::Done);
        self.release_elsewhere(inode, handle);
    }

    /// Reports a release to the watch of the commit rules, if it knows the handle.
    fn report_release(&self, inode: InodeId, handle: HandleId) {
        let watch = self.gate.as_ref().and_then(|gate| gate.watch());
        if let Some(watch) = watch
            && watch.knows(handle)
        {
            // On a worker, because the closed file may complete a checkpoint, and its commit takes long.
            self.workers
                .run_on_topic(Class::Call, Topic::Inode(inode), move || {
                    watch.release(handle);
                });
        }
    }

    /// Ends a handle on another thread.
    pub(super) fn release_elsewhere(&self, inode: InodeId, handle: HandleId) {
        let engine = Arc::clone(&self.engine);
        let call = Box::new(move || release_handle(&engine, handle));
        self.call_slots.run_elsewhere(Topic::Inode(inode), call);
    }

    /// Answers the RELEASEDIR of a directory handle.
    pub(super) fn releasedir(&self, handle: HandleId, reply: Reply<R>) {
        self.engine.namespace.release_dir(handle);
        reply.send(Answer::Done);
    }

    fn opener(&self, caller: Caller) -> Opener<R> {
        let passthrough = self
            .negotiated
            .passthrough
            .then(|| Arc::clone(&self.passthrough));
        Opener {
            passthrough,
            io_uring_users: Arc::clone(&self.io_uring_users),
            caller,
            options: self.options,
            keeps_locks: self.locks.is_some(),
        }
    }
}

/// Ends a handle after its last use, including uses by its mappings.
fn release_handle<B: Backing>(engine: &Engine<B>, handle: HandleId) {
    // A handle that was lost with an earlier firnd has no stores.
    if engine.open_files.can_have_mapping_stores(handle)
        && let Err(error) = engine.write_back_mapping_stores(handle)
    {
        tracing::error!(%error, "stores to a mapping of a closed file are lost");
    }
    engine.release(handle);
}

/// Records a handle in the arena for the next firnd. Called before the kernel gets the handle.
fn record_handle<B: Backing, R: Responder>(
    engine: &Engine<B>,
    handle: HandleId,
    flags: i32,
    mode: &HandleMode<R::BackingId>,
    reply: &Reply<R>,
) {
    let passthrough_number = match mode {
        HandleMode::Passthrough(id) | HandleMode::PassthroughMappings(id) => {
            Some(R::backing_number(id))
        }
        HandleMode::Direct | HandleMode::Cached | HandleMode::CachedKeep => None,
    };
    engine.record_open_handle(handle, reply.number(), flags, passthrough_number);
}

/// Returns the flags with which to create a file. They differ from `flags` only with O_EXCL, and only if the kernel
/// sends the request again because the serving process died before it answered.
///
/// If the dead process made the file, O_EXCL would make the repeated open fail. So O_EXCL and O_TRUNC are left out, and
/// that file is opened. The request is recorded in shared memory for the next such case.
fn flags_to_create<B: Backing, R: Responder>(
    engine: &Engine<B>,
    new_file: CreatedObject<'_>,
    caller: &Caller,
    mode: u32,
    flags: i32,
    reply: &mut Reply<R>,
) -> i32 {
    if flags & libc::O_EXCL == 0 {
        return flags;
    }
    let Some(earlier_attempt) = reply.find_attempt_or_record(engine, RequestObjects::default)
    else {
        return flags;
    };
    let creation = Creation {
        caller,
        mode,
        began: earlier_attempt.began,
    };
    let Some(entry) = engine.namespace.find_created_object(new_file, creation) else {
        return flags;
    };
    // The look-up only shows that the file exists; the open that follows counts a look-up of its own.
    engine.namespace.forget(entry.inode, 1);
    flags & !(libc::O_EXCL | libc::O_TRUNC)
}

/// Answers open and create: decides what serves a new handle, and sends the handle to the kernel.
struct Opener<R: Responder> {
    /// `None` unless the kernel may read backing files itself.
    passthrough: Option<Arc<Passthrough<R::BackingId>>>,
    io_uring_users: Arc<IoUringUsers>,
    caller: Caller,
    options: AdapterOptions,
    /// Whether Firn keeps the locks of programs, and not the kernel.
    keeps_locks: bool,
}

impl<R: Responder> Opener<R> {
    /// Answers an open, after the handle is recorded for the next firnd (which serves the mount if this process dies),
    /// and after the kernel has recorded a length of the file that is not too short.
    fn answer_open<B: Backing>(
        &self,
        engine: &Engine<B>,
        coherence: &Coherence<B>,
        inode: InodeId,
        flags: i32,
        opened: Result<Opened, Errno>,
        reply: Reply<R>,
    ) {
        let opened = match opened {
            Ok(opened) => opened,
            Err(error) => return reply.error(error),
        };
        let mode = self.choose_mode(engine, inode, opened, &reply);
        let handle = opened.handle;
        record_handle(engine, handle, flags, &mode, &reply);
        let close_behavior = self.close_behavior(engine, handle, flags, &mode);
        coherence.raise_kernel_size(inode, handle, opened.size, move || {
            reply.send(Answer::Opened {
                handle,
                mode,
                close_behavior,
            });
        });
    }

    /// Answers a create, after the handle is recorded for the next firnd, which serves the mount if this process dies.
    fn answer_create<B: Backing>(
        &self,
        engine: &Engine<B>,
        created: Result<(Entry, Opened), Errno>,
        flags: i32,
        reply: Reply<R>,
    ) {
        let (mut entry, opened) = match created {
            Ok(created) => created,
            Err(error) => return reply.error(error),
        };
        let mode = self.choose_mode(engine, entry.inode, opened, &reply);
        record_handle(engine, opened.handle, flags, &mode, &reply);
        // The kernel always takes the attributes of this answer as the newest, so the size in them must not be too
        // small.
        entry.attr.size = entry.attr.size.max(opened.size.unwrap_or(0));
        reply.send(Answer::Created {
            entry: attributes_for_kernel(engine, self.options, entry.inode, entry.attr),
            handle: opened.handle,
            mode,
        });
    }

    /// Returns whether each close(2) of a handle must send a request. A close waits for pending bytes and ends locks.
    /// So only the close of a read-only handle needs no request, if the file has no pending bytes and the kernel keeps
    /// the locks.
    fn close_behavior<B: Backing>(
        &self,
        engine: &Engine<B>,
        handle: HandleId,
        flags: i32,
        mode: &HandleMode<R::BackingId>,
    ) -> CloseBehavior {
        let is_read_by_kernel = !matches!(mode, HandleMode::Direct);
        let reads_only = flags & libc::O_ACCMODE == libc::O_RDONLY;
        if reads_only && is_read_by_kernel && !self.keeps_locks && !engine.is_pending(handle) {
            CloseBehavior::SendsNothing
        } else {
            CloseBehavior::SendsFlush
        }
    }

    /// Returns what serves reads and writes of a new handle:
    /// * `Direct`: the engine, without the kernel's page cache.
    /// * `Cached`, `CachedKeep`: the engine, through the page cache. `CachedKeep` retains the pages of earlier handles.
    /// * `Passthrough`: the kernel itself, from the file below the mount or from a memory file with all bytes.
    /// * `PassthroughMappings`: the kernel itself for mappings, and the engine for reads and writes. A writer of a
    ///   file in a memory file gets this mode, because the engine must see its writes.
    ///
    /// If the kernel refuses passthrough, notifies the engine and returns `Direct`.
    fn choose_mode<B: Backing>(
        &self,
        engine: &Engine<B>,
        inode: InodeId,
        opened: Opened,
        reply: &Reply<R>,
    ) -> HandleMode<R::BackingId> {
        let handle = opened.handle;
        match opened.mode {
            OpenMode::Engine => {
                let needs_cache = self.io_uring_users.contains(self.caller.pid);
                if needs_cache && engine.kernel_cache.serve_through_cache(handle) {
                    HandleMode::Cached
                } else {
                    HandleMode::Direct
                }
            }
            OpenMode::Cached { keep: true } => HandleMode::CachedKeep,
            OpenMode::Cached { keep: false } => HandleMode::Cached,
            OpenMode::Passthrough => {
                let backing_file = || engine.open_files.backing_fd(handle);
                let Some(id) = self.backing_id(inode, handle, backing_file, reply) else {
                    engine.kernel_cache.no_passthrough(handle);
                    return HandleMode::Direct;
                };
                HandleMode::Passthrough(id)
            }
            OpenMode::Memory => {
                let memory_file = || engine.open_files.memory_fd(handle);
                let Some(id) = self.backing_id(inode, handle, memory_file, reply) else {
                    engine.kernel_cache.no_memory_passthrough(handle);
                    return HandleMode::Direct;
                };
                if engine.open_files.is_writer(handle) {
                    HandleMode::PassthroughMappings(id)
                } else {
                    HandleMode::Passthrough(id)
                }
            }
        }
    }

    /// Returns the id under which the kernel reads the file that `file` opens. `None` if passthrough is off or refused.
    fn backing_id(
        &self,
        inode: InodeId,
        handle: HandleId,
        file: impl Fn() -> Option<OwnedFd>,
        reply: &Reply<R>,
    ) -> Option<Arc<R::BackingId>> {
        let register = |file| reply.register_backing(file);
        self.passthrough
            .as_ref()?
            .acquire(inode, handle, file, register)
    }
}
