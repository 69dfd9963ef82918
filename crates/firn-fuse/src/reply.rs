//! The obligation to answer a request, and the answer itself.
//!
//! Promises
//! * A [`Reply`] is answered exactly once, because the answer consumes it. A reply that is dropped instead (a task
//!   panicked, or a queue ended) answers EIO and leaves a line in the log.
//! * If the caller has already got an early answer ([`Unanswered`]), the later answer is discarded. Look-ups and
//!   handles in it, which the kernel will not get, are returned to the engine, which counts them ([`ReclaimUnsent`]). A
//!   *look-up* is one reference of the kernel to an inode.
//! * Each answer that is an error is logged and counted here, and nowhere else ([`Failures`]).

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_backing::{Attr, Backing, Errno, Kind, StatFs};
use firn_engine::{Engine, HandleId, InodeId, RecordedRequest, RequestObjects, RequestTimes};
use firn_format::histogram::TimeHistogram;
use firn_format::live::Request as EarlierAttempt;
use firn_hosts::ConflictingLock;

use crate::failures::Failures;
use crate::repeated::{RepeatedRequests, UNIQUE_RESEND};
use crate::request::{OperationKind, Request};
use crate::unanswered::{CallerStatus, EarlyAnswer, Unanswered, Withdraw};

/// An answer that takes longer is logged at level debug.
const SLOW: Duration = Duration::from_millis(500);

/// The transport's side of one request: takes the one answer.
pub(crate) trait Responder: Sized + Send + 'static {
    /// A registered file that the kernel may read itself. A drop ends the registration.
    type BackingId: Send + Sync + 'static;

    /// Sends an answer. An answer that does not fit the operation is a bug, and is sent as EIO.
    fn send(self, answer: Answer<'_, Self::BackingId>);

    /// Sends an error.
    fn refuse(self, errno: Errno);

    /// Adds an entry to the answer to readdir. Returns false if there is no room for the entry.
    fn add_entry(&mut self, entry: &ListedEntry<'_>) -> bool;

    /// Adds an entry to the answer to readdirplus. Returns false if there is no room for the entry.
    fn add_entry_plus(&mut self, entry: &ListedEntry<'_>, attributes: &Attributes) -> bool;

    /// Returns an object that can answer this request early, while another thread still uses the responder.
    fn early_answer(&self) -> Arc<dyn EarlyAnswer>;

    /// Registers a file with the kernel, which may then read it itself.
    fn register_backing(&self, file: OwnedFd) -> io::Result<Self::BackingId>;

    /// Returns the number under which the kernel has a registered file.
    fn backing_number(id: &Self::BackingId) -> i32;
}

/// Takes back look-ups and handles that a discarded answer contains: the kernel does not get them.
pub(crate) trait ReclaimUnsent: Send + Sync {
    /// Takes back one look-up of an inode.
    fn forget(&self, inode: InodeId);

    /// Releases a file handle.
    fn release(&self, handle: HandleId);

    /// Releases a directory handle.
    fn release_dir(&self, handle: HandleId);
}

/// Parts that all replies of a mount share.
pub(crate) struct Replies {
    pub(crate) times: Arc<RequestTimes>,
    pub(crate) failures: Arc<Failures>,
    pub(crate) unanswered: Arc<Unanswered>,
    pub(crate) reclaim: Box<dyn ReclaimUnsent>,
    pub(crate) repeated: RepeatedRequests,
}

/// Attributes of an inode, and how long the kernel may keep them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attributes {
    pub(crate) inode: InodeId,
    pub(crate) attr: Attr,
    /// How long the kernel may keep the attributes without asking.
    pub(crate) ttl: Duration,
    /// How long the kernel may keep the name that led to the inode.
    pub(crate) name_ttl: Duration,
}

/// An entry of a directory.
pub(crate) struct ListedEntry<'a> {
    /// Inode number, as readdir(3) shows it.
    pub(crate) ino: u64,
    /// Position from which the listing resumes after this entry.
    pub(crate) cookie: i64,
    /// Kind of the object; `None` (unknown) counts as a file.
    pub(crate) kind: Option<Kind>,
    pub(crate) name: &'a OsStr,
}

/// What serves reads and writes of an open file.
pub(crate) enum HandleMode<I> {
    /// Firn serves each read and write.
    Direct,
    /// The kernel's page cache serves them, after the kernel has dropped the file's pages.
    Cached,
    /// The kernel's page cache serves them, and keeps the pages of the file that it has.
    CachedKeep,
    /// The kernel serves them from this file.
    Passthrough(Arc<I>),
    /// The kernel serves mappings from this file; Firn serves reads and writes.
    PassthroughMappings(Arc<I>),
}

/// Whether a close(2) of an open file sends a request to Firn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CloseBehavior {
    /// The close sends a FLUSH and waits for the answer.
    SendsFlush,
    /// The close sends nothing. Only the last close is reported, by RELEASE.
    SendsNothing,
}

/// A successful answer.
pub(crate) enum Answer<'a, I> {
    /// Success without data.
    Done,
    /// The answer to getattr and setattr.
    Attributes(Attributes),
    /// The answer to each operation that looks up or makes a name.
    Entry(Attributes),
    /// The answer to open and opendir.
    Opened {
        handle: HandleId,
        mode: HandleMode<I>,
        close_behavior: CloseBehavior,
    },
    /// The answer to create.
    Created {
        entry: Attributes,
        handle: HandleId,
        mode: HandleMode<I>,
    },
    /// The answer to read, readlink and getxattr: bytes of the file, the target, the value.
    Data(&'a [u8]),
    /// The answer to getxattr and listxattr: how many bytes the value has.
    Size(u32),
    /// The answer to write and copy_file_range: how many bytes were written.
    Written(u32),
    /// The answer to lseek: the offset that was found.
    Position(u64),
    /// The answer to statfs.
    FileSystem(&'a StatFs),
    /// The answer to ioctl.
    Ioctl(&'a [u8]),
    /// The answer to getlk: a conflicting lock, if there is any.
    Lock(Option<ConflictingLock>),
    /// The answer to readdir and readdirplus: the entries that were added before.
    Listed,
}

/// The obligation to answer one request. See the head of this file.
pub(crate) struct Reply<R: Responder> {
    /// `None` once the request was answered.
    responder: Option<R>,
    unique: u64,
    description: RequestDescription,
    /// Inodes that a readdirplus has looked up: its answer transfers these look-ups to the kernel.
    looked_up: Vec<InodeId>,
    replies: Arc<Replies>,
    /// The record of the request in the arena; it is removed after the answer was sent.
    record: Option<RecordedRequest>,
    /// When the request was read. `None` if its time is neither counted nor logged.
    started_at: Option<Instant>,
    /// Span of the request, which each of its log lines names; exists only at level debug.
    span: tracing::Span,
}

/// Returns the histogram of an operation's durations; `None` if they are not counted, which saves a read of the clock.
fn duration_histogram(times: &RequestTimes, operation: OperationKind) -> Option<&TimeHistogram> {
    match operation {
        OperationKind::Write => Some(&times.write),
        OperationKind::Flush => Some(&times.close),
        OperationKind::Fsync => Some(&times.fsync),
        _ => None,
    }
}

/// What a request is about, for the log.
pub(crate) struct RequestDescription {
    pub(crate) operation: OperationKind,
    pub(crate) inode: InodeId,
    /// Name in the directory `inode`, if the operation is about a name.
    pub(crate) name: Option<OsString>,
}

impl<R: Responder> Reply<R> {
    /// Makes the reply to a request that was just read: the obligation to answer it once. From now on the request may
    /// get an early answer: an error because of a signal to its caller, while the work goes on.
    pub(crate) fn new(request: &Request<'_>, responder: R, replies: &Arc<Replies>) -> Self {
        let unique = request.unique;
        let pid = request.caller.pid;
        let kind = request.operation.kind();
        let (inode, name) = request.operation.inode_and_name();
        let early_answer = responder.early_answer();
        replies.unanswered.add(unique, pid, kind, early_answer);
        let span = tracing::debug_span!("request", unique, operation = kind.name(), pid);
        let is_timed = duration_histogram(&replies.times, kind).is_some();
        let is_logged = !span.is_disabled();
        Self {
            responder: Some(responder),
            unique,
            description: RequestDescription {
                operation: kind,
                inode,
                name: name.map(OsStr::to_owned),
            },
            looked_up: Vec::new(),
            replies: Arc::clone(replies),
            record: None,
            started_at: (is_timed || is_logged).then(Instant::now),
            span,
        }
    }

    /// Returns the span of the request, for a thread that works on it to enter.
    pub(crate) fn span(&self) -> tracing::Span {
        self.span.clone()
    }

    /// Counts how long the request took, and logs a slow one.
    fn record_duration(&self) {
        let Some(started_at) = self.started_at else {
            return;
        };
        let elapsed = started_at.elapsed();
        if let Some(histogram) = duration_histogram(&self.replies.times, self.description.operation)
        {
            histogram.observe(elapsed);
        }
        let span = &self.span;
        if elapsed >= SLOW && !span.is_disabled() {
            let path = self.replies.failures.path_of(&self.description);
            tracing::debug!(parent: span, ?elapsed, %path, "a request was slow");
        }
    }

    /// Answers with success.
    pub(crate) fn send(mut self, answer: Answer<'_, R::BackingId>) {
        let Some(responder) = self.responder.take() else {
            return;
        };
        self.record_duration();
        if self.replies.unanswered.remove(self.unique) {
            responder.send(answer);
        } else {
            self.reclaim_unsent(answer);
        }
    }

    /// Returns look-ups and handles of an unsent answer to the engine, which counts them: the kernel will not get them,
    /// so it will not release them.
    fn reclaim_unsent(&mut self, answer: Answer<'_, R::BackingId>) {
        let reclaim = &self.replies.reclaim;
        match answer {
            Answer::Entry(entry) => reclaim.forget(entry.inode),
            Answer::Opened { handle, .. } => self.release_handle(handle),
            Answer::Created { entry, handle, .. } => {
                // Always the handle of a file; that of `Opened` may be one of a directory.
                reclaim.release(handle);
                reclaim.forget(entry.inode);
            }
            Answer::Listed => {
                for inode in std::mem::take(&mut self.looked_up) {
                    reclaim.forget(inode);
                }
            }
            Answer::Done
            | Answer::Attributes(_)
            | Answer::Data(_)
            | Answer::Size(_)
            | Answer::Written(_)
            | Answer::Position(_)
            | Answer::Lock(_)
            | Answer::FileSystem(_)
            | Answer::Ioctl(_) => {}
        }
    }

    /// Releases a handle that this request, or an earlier try of it, has opened and the kernel never got.
    fn release_handle(&self, handle: HandleId) {
        if self.description.operation == OperationKind::Opendir {
            self.replies.reclaim.release_dir(handle);
        } else {
            self.replies.reclaim.release(handle);
        }
    }

    /// Returns an object that tells whether the caller still waits for the answer.
    pub(crate) fn caller_status(&self) -> CallerStatus {
        CallerStatus::new(&self.replies.unanswered, self.unique)
    }

    /// Whether the kernel sent the request again, because the firnd that had read it died.
    pub(crate) fn is_repeated(&self) -> bool {
        self.unique & UNIQUE_RESEND != 0
    }

    /// The number of the request, the same when the kernel sends it again.
    pub(crate) fn number(&self) -> u64 {
        self.unique & !UNIQUE_RESEND
    }

    /// Returns the attempt of an earlier firnd at the same request, if there was one. Otherwise records the request in
    /// shared memory, with the objects that `identify` returns, and returns `None`.
    ///
    /// Called for a request that must not take effect twice. If firnd, which serves the mount, dies, the kernel sends
    /// its unanswered requests to the next firnd again. That firnd finds the record, which lives as long as the reply.
    pub(crate) fn find_attempt_or_record<B: Backing>(
        &mut self,
        engine: &Engine<B>,
        identify: impl FnOnce() -> RequestObjects,
    ) -> Option<EarlierAttempt> {
        if self.is_repeated()
            && let Some(earlier) = self.replies.repeated.take_request(self.number())
        {
            self.record = engine.continue_request_record(&earlier);
            return Some(earlier.request);
        }
        // Without a live table, the memory for these records, no next firnd continues the mount.
        if engine.live().is_some() {
            self.record = engine.record_request(self.number(), identify());
        }
        None
    }

    /// Records the offset at which an append that was begun ([`Reply::find_attempt_or_record`]) writes.
    pub(crate) fn record_append_offset(&mut self, offset: u64) {
        if let Some(record) = &mut self.record {
            record.record_append(offset);
        }
    }

    /// Records that all bytes of an append are written.
    pub(crate) fn record_append_done(&mut self) {
        if let Some(record) = &mut self.record {
            record.record_append_done();
        }
    }

    /// Records in the arena that the request is under way. Used if the kernel does not send requests again: the next
    /// firnd then ends the request.
    pub(crate) fn record_in_progress<B: Backing>(&mut self, engine: &Engine<B>) {
        self.record = engine.record_request(self.number(), RequestObjects::default());
    }

    /// Releases the handle that an earlier firnd opened for the same request. The kernel never got that handle.
    pub(crate) fn release_earlier_handle(&self) {
        if self.is_repeated()
            && let Some(handle) = self.replies.repeated.take_handle(self.number())
        {
            self.release_handle(handle);
        }
    }

    /// Abandons the try of an earlier firnd, because the repeated request is refused: releases the handle that it has
    /// opened, and drops its record.
    pub(crate) fn abandon_earlier_attempt<B: Backing>(&mut self, engine: &Engine<B>) {
        if !self.is_repeated() {
            return;
        }
        self.release_earlier_handle();
        self.record = match self.replies.repeated.take_request(self.number()) {
            Some(earlier) => engine.continue_request_record(&earlier),
            None => None,
        };
    }

    /// The kernel's number of the request, with the bit of a repeated one.
    pub(crate) fn unique(&self) -> u64 {
        self.unique
    }

    /// Sets the function that removes the request from the queue in which it waits, if its caller is to get an early
    /// answer.
    pub(crate) fn set_withdraw(&self, withdraw: Withdraw) {
        self.replies.unanswered.set_withdraw(self.unique, withdraw);
    }

    /// Records that the caller is a process that exits. Such a caller waits only while the drain makes progress.
    pub(crate) fn record_exiting_caller(&self) {
        self.replies.unanswered.record_exiting_caller(self.unique);
    }

    /// Answers with an error.
    pub(crate) fn error(mut self, errno: Errno) {
        self.refuse(errno);
    }

    /// Answers with success or with an error.
    pub(crate) fn answer(self, result: Result<Answer<'_, R::BackingId>, Errno>) {
        match result {
            Ok(answer) => self.send(answer),
            Err(errno) => self.error(errno),
        }
    }

    /// Answers an operation whose success has no data.
    pub(crate) fn done(self, result: Result<(), Errno>) {
        self.answer(result.map(|()| Answer::Done));
    }

    /// [`Responder::add_entry`].
    pub(crate) fn add_entry(&mut self, entry: &ListedEntry<'_>) -> bool {
        let responder = self.responder.as_mut();
        responder.is_some_and(|responder| responder.add_entry(entry))
    }

    /// [`Responder::add_entry_plus`].
    pub(crate) fn add_entry_plus(
        &mut self,
        entry: &ListedEntry<'_>,
        attributes: &Attributes,
    ) -> bool {
        let responder = self.responder.as_mut();
        let is_added =
            responder.is_some_and(|responder| responder.add_entry_plus(entry, attributes));
        // The kernel counts no look-up of `.` and `..`, nor of an entry whose look-up failed.
        let is_looked_up = attributes.inode.0 != 0 && entry.name != "." && entry.name != "..";
        if is_added && is_looked_up {
            self.looked_up.push(attributes.inode);
        }
        is_added
    }

    /// [`Responder::register_backing`].
    pub(crate) fn register_backing(&self, file: OwnedFd) -> io::Result<R::BackingId> {
        match &self.responder {
            Some(responder) => responder.register_backing(file),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Answers with an error, which is logged and counted here. No other code does so.
    fn refuse(&mut self, errno: Errno) {
        if let Some(responder) = self.responder.take()
            && self.replies.unanswered.remove(self.unique)
        {
            self.record_duration();
            self.replies.failures.record(&self.description, errno);
            responder.refuse(errno);
        }
    }
}

impl<R: Responder> Drop for Reply<R> {
    fn drop(&mut self) {
        if self.responder.is_some() {
            tracing::error!(
                operation = self.description.operation.name(),
                path = %self.replies.failures.path_of(&self.description),
                "a request was dropped without an answer; its caller gets EIO"
            );
            self.refuse(Errno::IO);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::request::Operation;

    /// Sends each answer, put in words, to the test that has the other end.
    pub(crate) struct Recorded(pub(crate) mpsc::Sender<Result<String, Errno>>);

    impl Responder for Recorded {
        type BackingId = ();

        fn send(self, answer: Answer<'_, ()>) {
            let words = match answer {
                Answer::Data(data) => String::from_utf8_lossy(data).into_owned(),
                Answer::Written(bytes) => format!("{bytes} written"),
                Answer::Opened { handle, .. } => format!("handle {}", handle.0),
                Answer::Created { handle, entry, .. } => {
                    format!("inode {} handle {}", entry.inode.0, handle.0)
                }
                Answer::Entry(entry) | Answer::Attributes(entry) => {
                    format!("inode {} of {} bytes", entry.inode.0, entry.attr.size)
                }
                _ => "done".to_owned(),
            };
            let _ = self.0.send(Ok(words));
        }

        fn refuse(self, errno: Errno) {
            let _ = self.0.send(Err(errno));
        }

        fn add_entry(&mut self, _: &ListedEntry<'_>) -> bool {
            true
        }

        fn add_entry_plus(&mut self, _: &ListedEntry<'_>, _: &Attributes) -> bool {
            true
        }

        fn early_answer(&self) -> Arc<dyn EarlyAnswer> {
            Arc::new(Recorded(self.0.clone()))
        }

        fn register_backing(&self, _: OwnedFd) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn backing_number((): &()) -> i32 {
            0
        }
    }

    impl EarlyAnswer for Recorded {
        fn refuse(&self, _: u64, errno: Errno) {
            let _ = self.0.send(Err(errno));
        }

        fn accept(&self, _: u64) {
            let _ = self.0.send(Ok("done".to_owned()));
        }
    }

    /// Records what is given back.
    #[derive(Clone, Default)]
    struct GivenBack(Arc<parking_lot::Mutex<Vec<String>>>);

    impl ReclaimUnsent for GivenBack {
        fn forget(&self, inode: InodeId) {
            self.0.lock().push(format!("inode {}", inode.0));
        }

        fn release(&self, handle: HandleId) {
            self.0.lock().push(format!("file {}", handle.0));
        }

        fn release_dir(&self, handle: HandleId) {
            self.0.lock().push(format!("directory {}", handle.0));
        }
    }

    fn replies() -> (Arc<Replies>, GivenBack) {
        let given_back = GivenBack::default();
        let replies = Replies {
            times: Arc::default(),
            failures: Arc::default(),
            unanswered: Unanswered::new(|| 0),
            reclaim: Box::new(given_back.clone()),
            repeated: RepeatedRequests::default(),
        };
        (Arc::new(replies), given_back)
    }

    /// The kernel's number of each request in these tests.
    const UNIQUE: u64 = 2;

    fn reply_to(
        operation: Operation<'_>,
        replies: &Arc<Replies>,
    ) -> (Reply<Recorded>, mpsc::Receiver<Result<String, Errno>>) {
        let (answered, answers) = mpsc::channel();
        let request = Request {
            unique: UNIQUE,
            caller: firn_backing::Caller {
                uid: 0,
                gid: 0,
                pid: 0,
            },
            operation,
        };
        (Reply::new(&request, Recorded(answered), replies), answers)
    }

    fn reply(replies: &Arc<Replies>) -> (Reply<Recorded>, mpsc::Receiver<Result<String, Errno>>) {
        reply_to(Operation::Readlink { inode: InodeId(1) }, replies)
    }

    #[test]
    fn what_comes_after_an_early_answer_is_given_back() {
        let attr = crate::dispatcher::listing::bare_attributes(7, None, Duration::ZERO);
        let handle = HandleId(9);
        let mode = || HandleMode::Direct;
        let inode = InodeId(1);
        let opened = |entry| match entry {
            None => Answer::Opened {
                handle,
                mode: mode(),
                close_behavior: CloseBehavior::SendsFlush,
            },
            Some(entry) => Answer::Created {
                entry,
                handle,
                mode: mode(),
            },
        };
        let name = crate::request::Name {
            parent: inode,
            name: OsStr::new("x"),
        };
        let cases: [(Operation<'_>, Answer<'_, ()>, &[&str]); 5] = [
            (Operation::Lookup(name), Answer::Entry(attr), &["inode 7"]),
            (
                Operation::Open { inode, flags: 0 },
                opened(None),
                &["file 9"],
            ),
            (Operation::Opendir { inode }, opened(None), &["directory 9"]),
            (
                Operation::Create {
                    child: name,
                    mode: crate::request::NewMode { mode: 0, umask: 0 },
                    flags: 0,
                },
                opened(Some(attr)),
                &["file 9", "inode 7"],
            ),
            (Operation::Readlink { inode }, Answer::Data(b"x"), &[]),
        ];
        for (operation, answer, expected) in cases {
            let (replies, given_back) = replies();
            let (reply, answers) = reply_to(operation, &replies);
            replies.unanswered.interrupt(UNIQUE);
            assert!(!reply.caller_status().is_waiting());
            reply.send(answer);
            assert_eq!(*given_back.0.lock(), expected);
            drop(replies);
            assert_eq!(answers.iter().collect::<Vec<_>>(), [Err(Errno::INTR)]);
        }
    }

    #[test]
    fn look_ups_of_a_listing_that_nobody_gets_are_given_back() {
        let (replies, given_back) = replies();
        let operation = Operation::Readdirplus {
            inode: InodeId(1),
            handle: HandleId(3),
            cookie: 0,
        };
        let (mut reply, _answers) = reply_to(operation, &replies);
        for (number, name) in [(1, "."), (2, ".."), (7, "found"), (0, "not found")] {
            let entry = ListedEntry {
                ino: 5,
                cookie: 1,
                kind: None,
                name: OsStr::new(name),
            };
            let attributes =
                crate::dispatcher::listing::bare_attributes(number, None, Duration::ZERO);
            reply.add_entry_plus(&entry, &attributes);
        }
        replies.unanswered.interrupt(UNIQUE);
        reply.send(Answer::Listed);
        assert_eq!(*given_back.0.lock(), ["inode 7"]);
    }

    #[test]
    fn a_reply_that_is_dropped_answers_eio_once_and_is_counted() {
        let (replies, _) = replies();
        let (unanswered, answers) = reply(&replies);
        drop(unanswered);
        assert_eq!(answers.iter().collect::<Vec<_>>(), [Err(Errno::IO)]);
        assert_eq!(replies.failures.figures().get("readlink"), Some(&1));
    }

    #[test]
    fn an_answer_is_sent_once_and_only_errors_are_counted() {
        let (replies, _) = replies();
        let (answered, answers) = reply(&replies);
        answered.send(Answer::Data(b"target"));
        assert_eq!(
            answers.iter().collect::<Vec<_>>(),
            [Ok("target".to_owned())]
        );
        assert!(replies.failures.figures().is_empty());
        let (refused, answers) = reply(&replies);
        refused.error(Errno::NOENT);
        assert_eq!(answers.iter().collect::<Vec<_>>(), [Err(Errno::NOENT)]);
        assert_eq!(replies.failures.figures().get("readlink"), Some(&1));
    }

    #[test]
    fn a_task_that_panics_answers_eio() {
        let (replies, _) = replies();
        let (held, answers) = reply(&replies);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let _held = held;
            panic!("on purpose");
        }));
        assert!(panicked.is_err());
        assert_eq!(answers.iter().collect::<Vec<_>>(), [Err(Errno::IO)]);
    }
}
