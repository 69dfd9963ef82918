//! The answer to a request.
//!
//! Promises
//! * A [`Reply`] is answered exactly once: answering consumes it, and one that is dropped (by a task that panicked,
//!   or by a queue that ends) answers EIO and leaves a line in the log.
//! * Each answer that is an error is traced and counted here, and nowhere else ([`Failures`]).

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use firn_backing::{Attr, Errno, Kind, StatFs};
use firn_engine::{HandleId, InodeId};

use crate::failures::Failures;
use crate::request::{Operation, OperationKind};

/// How a transport takes the one answer to a request.
pub(crate) trait Responder: Sized + Send + 'static {
    /// A file that the kernel reads itself; the kernel lets go of it when this is dropped.
    type BackingId: Send + Sync + 'static;

    /// Sends the answer. One that does not belong to the operation is a bug of the caller, and sent as EIO.
    fn send(self, answer: Answer<'_, Self::BackingId>);

    /// Sends an error.
    fn refuse(self, errno: Errno);

    /// Adds an entry to the answer to readdir; false: there is no room, and it is not in it.
    fn add_entry(&mut self, entry: &ListedEntry<'_>) -> bool;

    /// Adds an entry to the answer to readdirplus; false: there is no room, and it is not in it.
    fn add_entry_plus(&mut self, entry: &ListedEntry<'_>, attributes: &Attributes) -> bool;

    /// Gives the kernel a file that it may read itself.
    fn register_backing(&self, file: OwnedFd) -> io::Result<Self::BackingId>;
}

/// Attributes of an inode as the kernel is told of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attributes {
    pub(crate) inode: InodeId,
    pub(crate) attr: Attr,
    /// How long the kernel may keep them, and the name that led to them, without asking.
    pub(crate) ttl: Duration,
}

/// An entry of a directory.
pub(crate) struct ListedEntry<'a> {
    /// The number that readdir(3) shows.
    pub(crate) ino: u64,
    /// Where a listing goes on after this entry.
    pub(crate) cookie: i64,
    /// Unknown kinds count as files.
    pub(crate) kind: Option<Kind>,
    pub(crate) name: &'a OsStr,
}

/// Who serves reads and writes of an open file.
pub(crate) enum HandleMode<I> {
    /// Firn, each of them.
    Direct,
    /// The kernel's page cache, which begins empty.
    Cached,
    /// The kernel's page cache, with what it has of the file.
    CachedKeep,
    /// The kernel, from the backing's own file.
    Passthrough(Arc<I>),
}

/// A successful answer.
pub(crate) enum Answer<'a, I> {
    /// Nothing to tell.
    Done,
    /// Of getattr and setattr.
    Attributes(Attributes),
    /// Of whatever looks up or makes a name.
    Entry(Attributes),
    /// Of open and opendir.
    Opened {
        handle: HandleId,
        mode: HandleMode<I>,
    },
    /// Of create.
    Created {
        entry: Attributes,
        handle: HandleId,
        mode: HandleMode<I>,
    },
    /// Of read and readlink, and the value of an extended attribute.
    Data(&'a [u8]),
    /// Bytes of an extended attribute.
    Size(u32),
    /// Bytes taken by write or copy_file_range.
    Written(u32),
    /// Of lseek.
    Position(u64),
    /// Of statfs.
    FileSystem(&'a StatFs),
    /// Of ioctl.
    Ioctl(&'a [u8]),
    /// The entries that were added.
    Listed,
}

/// The obligation to answer one request.
pub(crate) struct Reply<R: Responder> {
    /// None once it was answered.
    responder: Option<R>,
    subject: Subject,
    failures: Arc<Failures>,
}

/// What a request is about, for those who read the log.
pub(crate) struct Subject {
    pub(crate) operation: OperationKind,
    pub(crate) inode: InodeId,
    /// In that directory.
    pub(crate) name: Option<OsString>,
}

impl<R: Responder> Reply<R> {
    pub(crate) fn new(operation: &Operation<'_>, responder: R, failures: &Arc<Failures>) -> Self {
        let (inode, name) = operation.subject();
        Self {
            responder: Some(responder),
            subject: Subject {
                operation: operation.kind(),
                inode,
                name: name.map(OsStr::to_owned),
            },
            failures: Arc::clone(failures),
        }
    }

    /// Answers with success.
    pub(crate) fn send(mut self, answer: Answer<'_, R::BackingId>) {
        if let Some(responder) = self.responder.take() {
            responder.send(answer);
        }
    }

    /// Answers with an error.
    pub(crate) fn error(mut self, errno: Errno) {
        self.refuse(errno);
    }

    /// Answers with either.
    pub(crate) fn answer(self, result: Result<Answer<'_, R::BackingId>, Errno>) {
        match result {
            Ok(answer) => self.send(answer),
            Err(errno) => self.error(errno),
        }
    }

    /// Answers an operation that has nothing to tell.
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
        responder.is_some_and(|responder| responder.add_entry_plus(entry, attributes))
    }

    /// [`Responder::register_backing`].
    pub(crate) fn register_backing(&self, file: OwnedFd) -> io::Result<R::BackingId> {
        match &self.responder {
            Some(responder) => responder.register_backing(file),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// The one place where a request fails.
    fn refuse(&mut self, errno: Errno) {
        if let Some(responder) = self.responder.take() {
            self.failures.record(&self.subject, errno);
            responder.refuse(errno);
        }
    }
}

impl<R: Responder> Drop for Reply<R> {
    fn drop(&mut self) {
        if self.responder.is_some() {
            tracing::error!(
                operation = self.subject.operation.name(),
                path = %self.failures.path_of(&self.subject),
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

    /// Answers in words, to whoever listens.
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

        fn register_backing(&self, _: OwnedFd) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }
    }

    fn reply(failures: &Arc<Failures>) -> (Reply<Recorded>, mpsc::Receiver<Result<String, Errno>>) {
        let (answered, answers) = mpsc::channel();
        let operation = Operation::Readlink { inode: InodeId(1) };
        (
            Reply::new(&operation, Recorded(answered), failures),
            answers,
        )
    }

    #[test]
    fn a_reply_that_is_dropped_answers_eio_once_and_is_counted() {
        let failures = Arc::<Failures>::default();
        let (unanswered, answers) = reply(&failures);
        drop(unanswered);
        assert_eq!(answers.iter().collect::<Vec<_>>(), [Err(Errno::IO)]);
        assert_eq!(failures.figures().get("readlink"), Some(&1));
    }

    #[test]
    fn an_answer_is_sent_once_and_only_errors_are_counted() {
        let failures = Arc::<Failures>::default();
        let (answered, answers) = reply(&failures);
        answered.send(Answer::Data(b"target"));
        assert_eq!(
            answers.iter().collect::<Vec<_>>(),
            [Ok("target".to_owned())]
        );
        assert!(failures.figures().is_empty());
        let (refused, answers) = reply(&failures);
        refused.error(Errno::NOENT);
        assert_eq!(answers.iter().collect::<Vec<_>>(), [Err(Errno::NOENT)]);
        assert_eq!(failures.figures().get("readlink"), Some(&1));
    }

    #[test]
    fn a_task_that_panics_answers_eio() {
        let failures = Arc::<Failures>::default();
        let (held, answers) = reply(&failures);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let _held = held;
            panic!("on purpose");
        }));
        assert!(panicked.is_err());
        assert_eq!(answers.iter().collect::<Vec<_>>(), [Err(Errno::IO)]);
    }
}
