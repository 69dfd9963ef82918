//! Names: looked up, made, moved and removed.

use std::ffi::OsStr;

use firn_backing::{Backing, Caller, Errno, RenameFlags};
use firn_engine::{Engine, Entry, InodeId};

use crate::caller::masked;
use crate::dispatcher::{AdapterOptions, Dispatcher, attributes_of};
use crate::reply::{Answer, Reply, Responder};
use crate::request::{Name, NewMode, OwnedName};
use crate::topic::Topic;
use crate::watch::WatchedChange;

impl<B: Backing, R: Responder> Dispatcher<B, R> {
    pub(super) fn lookup(&self, at: Name<'_>, reply: Reply<R>) {
        let options = self.options;
        let topic = Topic::name(at.parent, at.name);
        let at = at.to_owned();
        self.run_call(topic, move |engine| {
            let entry = engine.namespace.lookup(at.parent, &at.name);
            answer_entry(engine, options, entry, reply);
        });
    }

    pub(super) fn readlink(&self, inode: InodeId, reply: Reply<R>) {
        self.run_call(Topic::Inode(inode), move |engine| {
            match engine.namespace.readlink(inode) {
                Ok(target) => reply.send(Answer::Data(&target)),
                Err(error) => reply.error(error),
            }
        });
    }

    pub(super) fn mknod(
        &self,
        caller: Caller,
        at: Name<'_>,
        mode: NewMode,
        device: u64,
        reply: Reply<R>,
    ) {
        let at = at.to_owned();
        let umask = self.umask_to_apply(mode);
        self.run_creation(caller, &at.clone(), reply, move |engine| {
            let mode = masked(engine, at.parent, mode.mode, umask);
            engine
                .namespace
                .mknod(&caller, at.parent, &at.name, mode, device)
        });
    }

    pub(super) fn mkdir(&self, caller: Caller, at: Name<'_>, mode: NewMode, reply: Reply<R>) {
        let at = at.to_owned();
        let umask = self.umask_to_apply(mode);
        self.run_creation(caller, &at.clone(), reply, move |engine| {
            let mode = masked(engine, at.parent, mode.mode, umask);
            engine.namespace.mkdir(&caller, at.parent, &at.name, mode)
        });
    }

    pub(super) fn symlink(&self, caller: Caller, at: Name<'_>, target: &OsStr, reply: Reply<R>) {
        let at = at.to_owned();
        let target = target.to_owned();
        self.run_creation(caller, &at.clone(), reply, move |engine| {
            engine
                .namespace
                .symlink(&caller, at.parent, &at.name, &target)
        });
    }

    pub(super) fn link(&self, caller: Caller, inode: InodeId, at: Name<'_>, reply: Reply<R>) {
        let at = at.to_owned();
        self.run_creation(caller, &at.clone(), reply, move |engine| {
            engine.namespace.link(inode, at.parent, &at.name)
        });
    }

    pub(super) fn unlink(&self, caller: Caller, at: Name<'_>, reply: Reply<R>) {
        let at = at.to_owned();
        let watched = self.watch_of(|| WatchedChange::Remove(at.parent, at.name.clone()));
        self.run_watched(caller, at.parent, watched, move |engine, watched| {
            let remove = || engine.namespace.unlink(at.parent, &at.name);
            reply.done(watched.make(remove));
        });
    }

    pub(super) fn rmdir(&self, caller: Caller, at: Name<'_>, reply: Reply<R>) {
        let at = at.to_owned();
        let watched = self.watch_of(|| WatchedChange::Remove(at.parent, at.name.clone()));
        self.run_watched(caller, at.parent, watched, move |engine, watched| {
            let remove = || engine.namespace.rmdir(at.parent, &at.name);
            reply.done(watched.make(remove));
        });
    }

    pub(super) fn rename(
        &self,
        caller: Caller,
        from: Name<'_>,
        to: Name<'_>,
        flags: u32,
        reply: Reply<R>,
    ) {
        let Some(flags) = RenameFlags::from_bits(flags) else {
            return reply.error(Errno::INVAL);
        };
        let from = from.to_owned();
        let to = to.to_owned();
        let watched = self.watch_of(|| {
            WatchedChange::Rename(
                (from.parent, from.name.clone()),
                (to.parent, to.name.clone()),
            )
        });
        self.run_watched(caller, from.parent, watched, move |engine, watched| {
            let rename = || {
                engine
                    .namespace
                    .rename(from.parent, &from.name, to.parent, &to.name, flags)
            };
            reply.done(watched.make(rename));
        });
    }

    /// The umask, where the kernel has not applied it.
    pub(super) fn umask_to_apply(&self, mode: NewMode) -> Option<u32> {
        self.negotiated.applies_umask.then_some(mode.umask)
    }

    /// Runs a change that answers with what it made in a directory.
    fn run_creation(
        &self,
        caller: Caller,
        at: &OwnedName,
        reply: Reply<R>,
        create: impl FnOnce(&Engine<B>) -> Result<Entry, Errno> + Send + 'static,
    ) {
        let options = self.options;
        let watched = self.watch_of(|| WatchedChange::Make(at.parent, at.name.clone()));
        self.run_watched(caller, at.parent, watched, move |engine, watched| {
            let created = watched.make(|| create(engine));
            answer_entry(engine, options, created, reply);
        });
    }
}

fn answer_entry<B: Backing, R: Responder>(
    engine: &Engine<B>,
    options: AdapterOptions,
    entry: Result<Entry, Errno>,
    reply: Reply<R>,
) {
    reply.answer(
        entry.map(|entry| Answer::Entry(attributes_of(engine, options, entry.inode, entry.attr))),
    );
}
