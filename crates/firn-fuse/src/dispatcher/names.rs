//! Requests that look up, make, link, rename and remove names.
//!
//! A change of names must take effect once, although the kernel sends a request again after the death of a firnd (the
//! process that serves the mount). So each change first calls [`Reply::find_attempt_or_record`], which records the
//! request in the arena, the mount's shared memory. For a repeated request it returns the record of the earlier firnd
//! that died. The change is then made only if that firnd had not made it.
//!
//! On a mount with *commit rules*, each change is also reported to them. A rule recognises a program's checkpoint by
//! its changes, collects these in a transaction, and commits it after the last one.

use std::ffi::{OsStr, OsString};

use firn_backing::{Backing, Caller, Errno, Kind, RenameFlags};
use firn_engine::{CreatedObject, Creation, Engine, Entry, InodeId, RequestObjects};
use firn_format::live::FileTime;

use crate::caller::apply_umask;
use crate::dispatcher::attributes::change_of_inode;
use crate::dispatcher::{AdapterOptions, Dispatcher, attributes_for_kernel};
use crate::reply::{Answer, Reply, Responder};
use crate::request::{Name, NewMode, OwnedName};
use crate::topic::Topic;
use crate::watch::WatchedChange;

impl<B: Backing, R: Responder> Dispatcher<B, R> {
    /// Answers a look-up of a name.
    pub(super) fn lookup(&self, child: Name<'_>, reply: Reply<R>) {
        let options = self.options;
        let topic = Topic::name(child.parent, child.name);
        let child = child.to_owned();
        self.run_call(topic, move |engine| {
            let entry = engine.namespace.lookup(child.parent, &child.name);
            answer_entry(engine, options, entry, reply);
        });
    }

    /// Answers a readlink(2).
    pub(super) fn readlink(&self, inode: InodeId, reply: Reply<R>) {
        self.run_call(Topic::Inode(inode), move |engine| {
            match engine.namespace.readlink(inode) {
                Ok(target) => reply.send(Answer::Data(&target)),
                Err(error) => reply.error(error),
            }
        });
    }

    /// Answers a mknod(2), which makes a file, device, socket or FIFO. The umask is applied here, unless the kernel has
    /// applied it or the directory has a default ACL.
    pub(super) fn mknod(
        &self,
        caller: Caller,
        child: Name<'_>,
        mode: NewMode,
        device: u64,
        reply: Reply<R>,
    ) {
        let child = child.to_owned();
        let umask = self.umask_to_apply(mode);
        let new_object = NewObject {
            child: child.clone(),
            kind: Kind::from_mode(mode.mode).unwrap_or(Kind::File),
            target: None,
            mode: mode.mode,
            umask,
        };
        self.run_creation(caller, new_object, reply, move |engine| {
            let mode = apply_umask(engine, child.parent, mode.mode, umask);
            engine
                .namespace
                .mknod(&caller, child.parent, &child.name, mode, device)
        });
    }

    /// Answers a mkdir(2). The umask is applied here, unless the kernel has applied it or the directory has a default
    /// ACL.
    pub(super) fn mkdir(&self, caller: Caller, child: Name<'_>, mode: NewMode, reply: Reply<R>) {
        let child = child.to_owned();
        let umask = self.umask_to_apply(mode);
        let new_object = NewObject {
            child: child.clone(),
            kind: Kind::Dir,
            target: None,
            mode: mode.mode,
            umask,
        };
        self.run_creation(caller, new_object, reply, move |engine| {
            let mode = apply_umask(engine, child.parent, mode.mode, umask);
            engine
                .namespace
                .mkdir(&caller, child.parent, &child.name, mode)
        });
    }

    /// Answers a symlink(2). `child` is the name of the new link, and `target` its contents.
    pub(super) fn symlink(&self, caller: Caller, child: Name<'_>, target: &OsStr, reply: Reply<R>) {
        let child = child.to_owned();
        let target = target.to_owned();
        let new_object = NewObject {
            child: child.clone(),
            kind: Kind::Symlink,
            target: Some(target.clone()),
            mode: 0o777,
            umask: None,
        };
        self.run_creation(caller, new_object, reply, move |engine| {
            engine
                .namespace
                .symlink(&caller, child.parent, &child.name, &target)
        });
    }

    /// Answers a link(2), and reports the change to the commit rules, which recognise a program's checkpoint by its
    /// changes.
    ///
    /// If the serving process died before it answered, the kernel sends the request again. A link that the dead process
    /// made for it then counts as success.
    pub(super) fn link(
        &self,
        caller: Caller,
        inode: InodeId,
        child: Name<'_>,
        mut reply: Reply<R>,
    ) {
        let child = child.to_owned();
        let options = self.options;
        let to_report =
            self.change_to_report(|| WatchedChange::Make(child.parent, child.name.clone()));
        self.run_reported_change(caller, child.parent, to_report, move |engine, reporter| {
            let names = &engine.namespace;
            let earlier_attempt = reply.find_attempt_or_record(engine, || change_of_inode(inode));
            let linked = reporter.make_change(|| {
                if earlier_attempt.is_some() {
                    names.repeat_link(inode, child.parent, &child.name)
                } else {
                    names.link(inode, child.parent, &child.name)
                }
            });
            answer_entry(engine, options, linked, reply);
        });
    }

    /// Answers an unlink(2).
    pub(super) fn unlink(&self, caller: Caller, child: Name<'_>, reply: Reply<R>) {
        self.remove_name(caller, child, Kind::File, reply);
    }

    /// Answers an rmdir(2).
    pub(super) fn rmdir(&self, caller: Caller, child: Name<'_>, reply: Reply<R>) {
        self.remove_name(caller, child, Kind::Dir, reply);
    }

    /// Removes a name: by rmdir(2) if `kind` is [`Kind::Dir`], else by unlink(2). Reports the change to the commit
    /// rules, which recognise a program's checkpoint by its changes.
    ///
    /// If the serving process died before it answered, the kernel sends the request again. If the dead process removed
    /// the name for it, that counts as success.
    fn remove_name(&self, caller: Caller, child: Name<'_>, kind: Kind, mut reply: Reply<R>) {
        let child = child.to_owned();
        let to_report =
            self.change_to_report(|| WatchedChange::Remove(child.parent, child.name.clone()));
        self.run_reported_change(caller, child.parent, to_report, move |engine, reporter| {
            let names = &engine.namespace;
            // The record says which object has the name now, so that a repeated request does not remove a later one.
            let earlier_attempt = reply.find_attempt_or_record(engine, || RequestObjects {
                subject: names.identify_name(child.parent, &child.name),
                ..RequestObjects::default()
            });
            let removed = reporter.make_change(|| match (earlier_attempt, kind) {
                (Some(earlier), kind) => {
                    names.repeat_remove(child.parent, &child.name, kind, earlier)
                }
                (None, Kind::Dir) => names.rmdir(child.parent, &child.name),
                (None, _) => names.unlink(child.parent, &child.name),
            });
            reply.done(removed);
        });
    }

    /// Answers a rename(2), with the flags of renameat2(2). Reports the change to the commit rules, which recognise a
    /// program's checkpoint by its changes.
    ///
    /// If the serving process died before it answered, the kernel sends the request again. If the dead process made the
    /// rename for it, that counts as success.
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
        let to_report = self.change_to_report(|| {
            WatchedChange::Rename(
                (from.parent, from.name.clone()),
                (to.parent, to.name.clone()),
            )
        });
        self.run_reported_change(caller, from.parent, to_report, move |engine, reporter| {
            let names = &engine.namespace;
            // The record says which objects have the names now. If the request is repeated, these show whether the
            // rename was made.
            let earlier_attempt = reply.find_attempt_or_record(engine, || RequestObjects {
                subject: names.identify_name(from.parent, &from.name),
                other: names.identify_name(to.parent, &to.name),
                node: None,
            });
            let renamed = reporter.make_change(|| match earlier_attempt {
                None => names.rename(from.parent, &from.name, to.parent, &to.name, flags),
                Some(earlier) => names.repeat_rename(
                    (from.parent, &from.name),
                    (to.parent, &to.name),
                    flags,
                    earlier,
                ),
            });
            reply.done(renamed);
        });
    }

    /// Returns the umask to apply, or `None` if the kernel has applied it already.
    pub(super) fn umask_to_apply(&self, mode: NewMode) -> Option<u32> {
        self.negotiated.applies_umask.then_some(mode.umask)
    }

    /// Makes an object in a directory by `create`, and answers with its entry. Reports the change to the commit rules,
    /// which recognise a program's checkpoint by its changes.
    ///
    /// If the serving process died before it answered, the kernel sends the request again. If the dead process made the
    /// object for it, the answer has that object, and `create` is not called.
    fn run_creation(
        &self,
        caller: Caller,
        new_object: NewObject,
        mut reply: Reply<R>,
        create: impl FnOnce(&Engine<B>) -> Result<Entry, Errno> + Send + 'static,
    ) {
        let options = self.options;
        let parent = new_object.child.parent;
        let to_report =
            self.change_to_report(|| WatchedChange::Make(parent, new_object.child.name.clone()));
        self.run_reported_change(caller, parent, to_report, move |engine, reporter| {
            // `Some` if an earlier firnd has begun this request.
            let earlier_attempt = reply.find_attempt_or_record(engine, RequestObjects::default);
            let existing_entry = earlier_attempt
                .and_then(|earlier| new_object.find_made(engine, &caller, earlier.began));
            // Reported in both cases: the program makes the object by this request.
            let created = reporter.make_change(|| match existing_entry {
                Some(entry) => Ok(entry),
                None => create(engine),
            });
            answer_entry(engine, options, created, reply);
        });
    }
}

/// An object that a request is to make in a directory.
struct NewObject {
    child: OwnedName,
    kind: Kind,
    /// The target of a symbolic link.
    target: Option<OsString>,
    mode: u32,
    umask: Option<u32>,
}

impl NewObject {
    /// Looks for the object that an earlier serving process made for the same request before it died; `None` if there
    /// is none. `began` is the time at which that process began the request, so an older object was not made for it.
    fn find_made<B: Backing>(
        &self,
        engine: &Engine<B>,
        caller: &Caller,
        began: FileTime,
    ) -> Option<Entry> {
        let made = CreatedObject {
            parent: self.child.parent,
            name: &self.child.name,
            kind: self.kind,
            target: self.target.as_deref(),
        };
        let mode = apply_umask(engine, self.child.parent, self.mode, self.umask);
        let creation = Creation {
            caller,
            mode,
            began,
        };
        engine.namespace.find_created_object(made, creation)
    }
}

/// Answers with the entry of a name, or with the error.
fn answer_entry<B: Backing, R: Responder>(
    engine: &Engine<B>,
    options: AdapterOptions,
    entry: Result<Entry, Errno>,
    reply: Reply<R>,
) {
    reply.answer(entry.map(|entry| {
        Answer::Entry(attributes_for_kernel(
            engine,
            options,
            entry.inode,
            entry.attr,
        ))
    }));
}
