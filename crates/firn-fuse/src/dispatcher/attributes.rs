//! Answers requests about attributes, extended attributes and the figures of the file system.
//!
//! Promises
//! * If this host knows of a change by another host, no answer has an attribute from before that change.
//! * A truncation waits for a transaction (a checkpoint that appears at once) that is being prepared or applied in its
//!   directory. The gate makes it wait ([`enter_change`]).

use std::ffi::OsStr;
use std::sync::Arc;

use firn_backing::{Backing, Caller, Errno};
use firn_engine::{Engine, HandleId, InodeId, RequestObjects, SetAttr};
use firn_format::durability::DurabilityLevel;

use crate::caller::Process;
use crate::dispatcher::{Dispatcher, attributes_for_kernel};
use crate::gate::enter_change;
use crate::reply::{Answer, Reply, Responder};
use crate::topic::Topic;
use crate::watch::{ChangeReporter, WatchedChange};

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
            coherence.answer_after_remote_changes(inode, move || {
                let attr = attr.map(|attr| attributes_for_kernel(&engine, options, inode, attr));
                reply.answer(attr.map(Answer::Attributes));
            });
        });
    }

    /// Answers a setattr: chmod(2), chown(2), utimensat(2) or truncate(2). A change of the contents first waits for
    /// transactions, by a pass of the gate. A truncation is also reported to the commit rules, which recognise a
    /// program's checkpoint by its changes.
    pub(super) fn setattr(&self, caller: Caller, inode: InodeId, set: SetAttr, reply: Reply<R>) {
        let options = self.options;
        let process = Process::from_caller(caller);
        let gate = self.gate.clone();
        let changes_size = set.size.is_some();
        // The kernel sends a setattr that sets nothing before it changes contents by itself.
        let changes_contents = changes_size || set.is_empty();
        let truncation = changes_size.then(|| self.truncations.begin(inode));
        let set_attr = move |engine: &Engine<B>| {
            let gate_for_contents = gate.as_deref().filter(|_| changes_contents);
            let _pass = enter_change(gate_for_contents, inode)?;
            engine.namespace.set_attr(inode, set, Some(&process))
        };
        let call = move |engine: &Engine<B>, reporter: ChangeReporter| {
            match reporter.make_change(|| set_attr(engine)) {
                Ok(attr) => reply.send(Answer::Attributes(attributes_for_kernel(
                    engine, options, inode, attr,
                ))),
                Err(errno) => reply.error(errno),
            }
            // Ends the truncation: short answers to reads wait until the kernel has this answer (`truncations`).
            drop(truncation);
        };
        if changes_size {
            let to_report = self.change_to_report(|| WatchedChange::Cut(inode));
            self.run_reported_change(caller, inode, to_report, call);
        } else {
            // The commit rules concern only changes of names and contents, so nothing is reported.
            let nothing_to_report = None;
            self.run_change(inode, move |engine| {
                call(engine, ChangeReporter::new(nothing_to_report, caller))
            });
        }
    }

    /// Answers a setxattr. If the serving process died before it answered, the kernel sends the request again. An
    /// attribute that the dead process set for it then counts as success.
    pub(super) fn setxattr(
        &self,
        caller: Caller,
        inode: InodeId,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        mut reply: Reply<R>,
    ) {
        if name == STATE_XATTR {
            return reply.error(Errno::OPNOTSUPP);
        }
        let name = name.to_owned();
        let value = value.to_owned();
        let process = Process::from_caller(caller);
        self.run_change(inode, move |engine| {
            let names = &engine.namespace;
            let earlier_attempt = reply.find_attempt_or_record(engine, || change_of_inode(inode));
            let result = names.set_xattr(inode, &name, &value, flags, Some(&process));
            // An earlier firnd may have set the attribute for this request before it died. Then XATTR_CREATE finds the
            // attribute and fails.
            let was_set_earlier = result == Err(Errno::EXIST)
                && earlier_attempt.is_some()
                && names.has_value(inode, &name, &value);
            reply.done(if was_set_earlier { Ok(()) } else { result });
        });
    }

    /// Answers a getxattr. The durability level is not a stored attribute; the engine computes it.
    pub(super) fn getxattr(&self, inode: InodeId, name: &OsStr, size: u32, reply: Reply<R>) {
        let asks_for_durability = name == STATE_XATTR;
        let name = name.to_owned();
        self.run_call(Topic::Inode(inode), move |engine| {
            let value = if asks_for_durability {
                let level = engine.durability.level_of_file(inode);
                level.map(|level| DurabilityLevel::as_str(level).into())
            } else {
                engine.namespace.get_xattr(inode, &name)
            };
            answer_xattr(value, size, reply);
        });
    }

    /// Answers a listxattr.
    pub(super) fn listxattr(&self, inode: InodeId, size: u32, reply: Reply<R>) {
        self.run_call(Topic::Inode(inode), move |engine| {
            answer_xattr(engine.namespace.list_xattr(inode), size, reply);
        });
    }

    /// Answers a removexattr. If the kernel repeats the request of a firnd that died, the attribute may be gone
    /// already.
    pub(super) fn removexattr(&self, inode: InodeId, name: &OsStr, mut reply: Reply<R>) {
        if name == STATE_XATTR {
            return reply.error(Errno::OPNOTSUPP);
        }
        let name = name.to_owned();
        self.run_change(inode, move |engine| {
            let earlier_attempt = reply.find_attempt_or_record(engine, || change_of_inode(inode));
            let result = engine.namespace.remove_xattr(inode, &name);
            // An earlier firnd may have removed the attribute for this request before it died. Then the attribute is
            // missing now.
            let was_removed_earlier = result == Err(Errno::NODATA) && earlier_attempt.is_some();
            reply.done(if was_removed_earlier { Ok(()) } else { result });
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

/// Names the inode that a request changes, for its record in the arena.
pub(super) fn change_of_inode(inode: InodeId) -> RequestObjects {
    RequestObjects {
        node: Some(inode),
        ..RequestObjects::default()
    }
}

/// Answers with the value of an extended attribute, or with its length if `size` is 0. The error is ERANGE if the value
/// is longer than `size`.
fn answer_xattr<R: Responder>(value: Result<Vec<u8>, Errno>, size: u32, reply: Reply<R>) {
    match value {
        Ok(value) if size == 0 => reply.send(Answer::Size(value.len() as u32)),
        Ok(value) if value.len() > size as usize => reply.error(Errno::RANGE),
        Ok(value) => reply.send(Answer::Data(&value)),
        Err(error) => reply.error(error),
    }
}
