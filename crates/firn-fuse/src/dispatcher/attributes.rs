//! Answers requests about attributes, extended attributes and the figures of the file system.
//!
//! Promises
//! * If this host knows of a change by another host, no answer has an attribute from before that change.
//! * A truncation waits for a transaction that is being prepared or applied in its directory.

use std::ffi::OsStr;
use std::sync::Arc;

use firn_backing::{Backing, Caller, Errno};
use firn_engine::{Engine, HandleId, InodeId, SetAttr, Subjects};
use firn_format::durability::DurabilityLevel;

use crate::caller::Process;
use crate::dispatcher::{Dispatcher, attributes_of};
use crate::gate::enter_change;
use crate::reply::{Answer, Reply, Responder};
use crate::topic::Topic;
use crate::watch::{Watched, WatchedChange};

/// Extended attribute whose value is the durability level of a file. It can be read only.
const STATE_XATTR: &str = "user.firn.state";

impl<B: Backing, R: Responder> Dispatcher<B, R> {
    /// Answers a getattr, once the kernel has no page that another host has changed.
    pub(super) fn getattr(&self, inode: InodeId, handle: Option<HandleId>, reply: Reply<R>) {
        let options = self.options;
        let coherence = Arc::clone(&self.coherence);
        self.run_call(Topic::Inode(inode), move |engine| {
            let attr = engine.namespace.attr(inode, handle);
            let engine = Arc::clone(coherence.engine());
            coherence.after_changes_by_others(inode, move || {
                let attr = attr.map(|attr| attributes_of(&engine, options, inode, attr));
                reply.answer(attr.map(Answer::Attributes));
            });
        });
    }

    /// Answers a setattr: chmod(2), chown(2), utimensat(2) or truncate(2).
    pub(super) fn setattr(&self, caller: Caller, inode: InodeId, set: SetAttr, reply: Reply<R>) {
        let options = self.options;
        let process = Process::of(caller);
        let gate = self.gate.clone();
        // The kernel sends a setattr that sets nothing before it changes contents by itself.
        let changes_contents = set.size.is_some() || set.is_empty();
        let changes_size = set.size.is_some();
        let truncation = set.size.map(|_| self.truncations.begin(inode));
        let set_attr = move |engine: &Engine<B>| {
            let gate = gate.as_deref().filter(|_| changes_contents);
            let _pass = enter_change(gate, inode)?;
            engine.namespace.set_attr(inode, set, Some(&process))
        };
        let call = move |engine: &Engine<B>, watched: Watched| {
            reply.answer(
                watched
                    .make(|| set_attr(engine))
                    .map(|attr| Answer::Attributes(attributes_of(engine, options, inode, attr))),
            );
            // Short reads wait until the kernel has this answer (`truncations`).
            drop(truncation);
        };
        if changes_size {
            let watched = self.watch_of(|| WatchedChange::Cut(inode));
            self.run_watched(caller, inode, watched, call);
        } else {
            self.run_change(inode, move |engine| {
                call(engine, Watched::new(None, caller))
            });
        }
    }

    /// Answers a setxattr.
    pub(super) fn setxattr(
        &self,
        caller: Caller,
        inode: InodeId,
        (name, value, flags): (&OsStr, &[u8], i32),
        mut reply: Reply<R>,
    ) {
        if name == STATE_XATTR {
            return reply.error(Errno::OPNOTSUPP);
        }
        let name = name.to_owned();
        let value = value.to_owned();
        let process = Process::of(caller);
        self.run_change(inode, move |engine| {
            let names = &engine.namespace;
            let noted = reply.begin_once(engine, || Subjects {
                node: Some(inode),
                ..Subjects::default()
            });
            let set = names.set_xattr(inode, &name, &value, flags, Some(&process));
            // An earlier firnd may have set the attribute for this request before it died. Then XATTR_CREATE finds the
            // attribute and fails.
            let was_set = set == Err(Errno::EXIST)
                && noted.is_some()
                && names.has_value(inode, &name, &value);
            reply.done(if was_set { Ok(()) } else { set });
        });
    }

    /// Answers a getxattr. The durability level is not a stored attribute; the engine computes it.
    pub(super) fn getxattr(&self, inode: InodeId, name: &OsStr, size: u32, reply: Reply<R>) {
        if name == STATE_XATTR {
            return self.run_call(Topic::Inode(inode), move |engine| {
                let level = engine.durability.state_of(inode);
                answer_xattr(
                    level.map(|level| DurabilityLevel::as_str(level).into()),
                    size,
                    reply,
                );
            });
        }
        let name = name.to_owned();
        self.run_call(Topic::Inode(inode), move |engine| {
            answer_xattr(engine.namespace.get_xattr(inode, &name), size, reply);
        });
    }

    /// Answers a listxattr.
    pub(super) fn listxattr(&self, inode: InodeId, size: u32, reply: Reply<R>) {
        self.run_call(Topic::Inode(inode), move |engine| {
            answer_xattr(engine.namespace.list_xattr(inode), size, reply);
        });
    }

    /// Answers a removexattr.
    pub(super) fn removexattr(&self, inode: InodeId, name: &OsStr, mut reply: Reply<R>) {
        if name == STATE_XATTR {
            return reply.error(Errno::OPNOTSUPP);
        }
        let name = name.to_owned();
        self.run_change(inode, move |engine| {
            let noted = reply.begin_once(engine, || Subjects {
                node: Some(inode),
                ..Subjects::default()
            });
            let removed = engine.namespace.remove_xattr(inode, &name);
            // An earlier firnd may have removed the attribute for this request before it died. Then the attribute is
            // missing now.
            let was_removed = removed == Err(Errno::NODATA) && noted.is_some();
            reply.done(if was_removed { Ok(()) } else { removed });
        });
    }

    /// Answers a statfs(2).
    pub(super) fn statfs(&self, reply: Reply<R>) {
        self.run_call(Topic::Backing, move |engine| {
            let figures = engine.namespace.statfs();
            reply.answer(figures.as_ref().map(Answer::FileSystem).map_err(|e| *e));
        });
    }
}

/// Answers with the value of an extended attribute, or with its length if `size` is 0. ERANGE: it is longer than `size`.
fn answer_xattr<R: Responder>(value: Result<Vec<u8>, Errno>, size: u32, reply: Reply<R>) {
    match value {
        Ok(value) if size == 0 => reply.send(Answer::Size(value.len() as u32)),
        Ok(value) if value.len() > size as usize => reply.error(Errno::RANGE),
        Ok(value) => reply.send(Answer::Data(&value)),
        Err(error) => reply.error(error),
    }
}
