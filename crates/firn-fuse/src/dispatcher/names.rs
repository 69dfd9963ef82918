//! Names: looked up, made, moved and removed.

use std::ffi::{OsStr, OsString};

use firn_backing::{Backing, Caller, Errno, Kind, RenameFlags};
use firn_engine::{Creation, Engine, Entry, InodeId, MadeObject, Subjects};
use firn_format::live::Moment;

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
        let new = NewObject {
            at: at.clone(),
            kind: Kind::from_mode(mode.mode).unwrap_or(Kind::File),
            target: None,
            mode: mode.mode,
            umask,
        };
        self.run_creation(caller, new, reply, move |engine| {
            let mode = masked(engine, at.parent, mode.mode, umask);
            engine
                .namespace
                .mknod(&caller, at.parent, &at.name, mode, device)
        });
    }

    pub(super) fn mkdir(&self, caller: Caller, at: Name<'_>, mode: NewMode, reply: Reply<R>) {
        let at = at.to_owned();
        let umask = self.umask_to_apply(mode);
        let new = NewObject {
            at: at.clone(),
            kind: Kind::Dir,
            target: None,
            mode: mode.mode,
            umask,
        };
        self.run_creation(caller, new, reply, move |engine| {
            let mode = masked(engine, at.parent, mode.mode, umask);
            engine.namespace.mkdir(&caller, at.parent, &at.name, mode)
        });
    }

    pub(super) fn symlink(&self, caller: Caller, at: Name<'_>, target: &OsStr, reply: Reply<R>) {
        let at = at.to_owned();
        let target = target.to_owned();
        let new = NewObject {
            at: at.clone(),
            kind: Kind::Symlink,
            target: Some(target.clone()),
            mode: 0o777,
            umask: None,
        };
        self.run_creation(caller, new, reply, move |engine| {
            engine
                .namespace
                .symlink(&caller, at.parent, &at.name, &target)
        });
    }

    pub(super) fn link(&self, caller: Caller, inode: InodeId, at: Name<'_>, mut reply: Reply<R>) {
        let at = at.to_owned();
        let options = self.options;
        let watched = self.watch_of(|| WatchedChange::Make(at.parent, at.name.clone()));
        self.run_watched(caller, at.parent, watched, move |engine, watched| {
            let before = reply.begin_once(engine, || Subjects {
                node: Some(inode),
                ..Subjects::default()
            });
            let linked = watched.make(|| {
                if before.is_some() {
                    engine.namespace.link_again(inode, at.parent, &at.name)
                } else {
                    engine.namespace.link(inode, at.parent, &at.name)
                }
            });
            answer_entry(engine, options, linked, reply);
        });
    }

    pub(super) fn unlink(&self, caller: Caller, at: Name<'_>, reply: Reply<R>) {
        self.remove_name(caller, at, Kind::File, reply);
    }

    pub(super) fn rmdir(&self, caller: Caller, at: Name<'_>, reply: Reply<R>) {
        self.remove_name(caller, at, Kind::Dir, reply);
    }

    /// Removes a name of a directory, or of anything else.
    fn remove_name(&self, caller: Caller, at: Name<'_>, kind: Kind, mut reply: Reply<R>) {
        let at = at.to_owned();
        let watched = self.watch_of(|| WatchedChange::Remove(at.parent, at.name.clone()));
        self.run_watched(caller, at.parent, watched, move |engine, watched| {
            let names = &engine.namespace;
            let before = reply.begin_once(engine, || Subjects {
                subject: names.identify_name(at.parent, &at.name),
                ..Subjects::default()
            });
            let remove = || match (before, kind) {
                (None, Kind::Dir) => names.rmdir(at.parent, &at.name),
                (None, _) => names.unlink(at.parent, &at.name),
                (Some(before), kind) => names.remove_again(at.parent, &at.name, kind, before),
            };
            reply.done(watched.make(remove));
        });
    }

    pub(super) fn rename(
        &self,
        caller: Caller,
        from: Name<'_>,
        to: Name<'_>,
        flags: u32,
        mut reply: Reply<R>,
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
            let names = &engine.namespace;
            let before = reply.begin_once(engine, || Subjects {
                subject: names.identify_name(from.parent, &from.name),
                other: names.identify_name(to.parent, &to.name),
                node: None,
            });
            let rename = || match before {
                None => names.rename(from.parent, &from.name, to.parent, &to.name, flags),
                Some(before) => names.rename_again(
                    (from.parent, &from.name),
                    (to.parent, &to.name),
                    flags,
                    before,
                ),
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
        new: NewObject,
        mut reply: Reply<R>,
        create: impl FnOnce(&Engine<B>) -> Result<Entry, Errno> + Send + 'static,
    ) {
        let options = self.options;
        let parent = new.at.parent;
        let watched = self.watch_of(|| WatchedChange::Make(parent, new.at.name.clone()));
        self.run_watched(caller, parent, watched, move |engine, watched| {
            let before = reply.begin_once(engine, Subjects::default);
            let made = before.and_then(|before| new.find(engine, &caller, before.began));
            let created = watched.make(|| match made {
                Some(entry) => Ok(entry),
                None => create(engine),
            });
            answer_entry(engine, options, created, reply);
        });
    }
}

/// What a request makes in a directory.
struct NewObject {
    at: OwnedName,
    kind: Kind,
    /// Where it leads, of a symbolic link.
    target: Option<OsString>,
    mode: u32,
    umask: Option<u32>,
}

impl NewObject {
    /// What the same request made before firnd died, if it did.
    fn find<B: Backing>(
        &self,
        engine: &Engine<B>,
        caller: &Caller,
        began: Moment,
    ) -> Option<Entry> {
        let made = MadeObject {
            parent: self.at.parent,
            name: &self.at.name,
            kind: self.kind,
            target: self.target.as_deref(),
        };
        let mode = masked(engine, self.at.parent, self.mode, self.umask);
        let by = Creation {
            caller,
            mode,
            began,
        };
        engine.namespace.find_made(made, by)
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
