//! The transport over `/dev/fuse`: reads the kernel's requests from this device, and writes answers to it.
//!
//! | module | does |
//! |---|---|
//! | `connection` | reads from the device, writes to it, registers files that the kernel reads itself |
//! | `message` | parses the bytes of a message of the kernel into a [`Message`] |
//! | `responder` | makes the bytes of an answer |
//! | `negotiate` | answers INIT: which capabilities both sides use |
//! | `orphans` | ends requests that a firnd read before it died, if the kernel does not send them again |
//!
//! firnd is the process that serves the mount, of which this is a part.
//!
//! Promises
//! * Every request that has an answer is dispatched, or refused here.
//! * A malformed message ends no thread.

mod abi;
mod connection;
mod message;
mod negotiate;
mod orphans;
mod responder;

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::thread::JoinHandle;

use firn_backing::{Backing, Errno};
use firn_engine::{InodeId, ResumedRequests};
use firn_format::live::InitExchange;
use zerocopy::{FromBytes, IntoBytes};

use crate::coherence::Notifier;
use crate::dispatcher::{Dispatcher, Negotiated};
use crate::transport::dev_fuse::abi::{
    InitOut, InvalEntryOut, InvalInodeOut, StoreOut, notification,
};
use crate::transport::dev_fuse::connection::{Connection, Received};
use crate::transport::dev_fuse::message::{Message, parse};
use crate::transport::dev_fuse::negotiate::{
    RequestedFeatures, WRITE_BYTES_MAX, name_differences, negotiate,
};
use crate::transport::dev_fuse::orphans::OrphanCleanup;
use crate::unanswered::EarlyAnswer;

pub(crate) use responder::Responder;

/// Size of the buffer for one request: the data of the largest write, and its header and arguments.
const BUFFER_BYTES: usize = WRITE_BYTES_MAX as usize + 4096;

/// A connection that is served by its own threads.
pub(crate) struct Served(Vec<JoinHandle<io::Result<()>>>);

impl Served {
    /// Waits until the kernel ends the connection. Returns the first error of a thread, if any.
    pub(crate) fn join(self) -> io::Result<()> {
        let mut outcome = Ok(());
        for thread in self.0 {
            let ended = thread
                .join()
                .unwrap_or_else(|_| Err(io::Error::other("a thread that reads requests panicked")));
            outcome = outcome.and(ended);
        }
        outcome
    }
}

/// How this firnd got the connection.
pub(crate) enum Origin<'a> {
    /// This firnd has just mounted. `keep` gets the INIT exchange before the kernel gets the answer.
    Mounted { keep: &'a dyn KeepConnection },
    /// An earlier firnd served the connection, and left these.
    Resumed {
        exchange: &'a InitExchange,
        left: ResumedRequests,
    },
}

/// Stores the data with which a later firnd can resume a connection.
pub trait KeepConnection {
    /// Stores the connection. `resends`: after the death of a firnd, the kernel sends that firnd's unanswered requests
    /// again.
    fn keep(&self, device: BorrowedFd<'_>, exchange: &InitExchange, resends: bool);
}

/// Negotiates with the kernel behind `device` and serves it from `threads` + 1 threads, so that one can always read.
///
/// For a mount that an earlier firnd (the serving process) has served until it died, restores the capabilities instead,
/// and takes over that firnd's handles and unanswered requests. If the kernel does not send these requests again, they
/// fail. *Orphans* are those among them that the earlier firnd has not recorded.
pub(crate) fn serve<B: Backing>(
    mut dispatcher: Dispatcher<B, Responder>,
    device: OwnedFd,
    origin: Origin<'_>,
    threads: usize,
) -> io::Result<Served> {
    let connection = Connection::new(device);
    let mut orphan_cleanup = OrphanCleanup::not_needed();
    let resumed = match origin {
        Origin::Mounted { keep } => {
            negotiate_new_connection(&mut dispatcher, &connection, keep)?;
            None
        }
        Origin::Resumed { exchange, mut left } => {
            if !resume_negotiated(&mut dispatcher, exchange)?.resends {
                let refuse = |number| connection.refuse_orphan(number);
                dispatcher.fail_unanswered_requests(&mut left, refuse);
                orphan_cleanup = OrphanCleanup::after_restart();
            }
            Some(left)
        }
    };
    dispatcher.set_threads(threads);
    dispatcher
        .coherence()
        .start(Arc::new(KernelCaches(Arc::clone(&connection))));
    if let Some(requests) = resumed {
        dispatcher.resume(requests, |number| connection.adopt_backing(number));
        let does_kernel_resend = !orphan_cleanup.is_pending();
        if does_kernel_resend {
            // The kernel sends requests again after the death of a firnd. The earlier firnd may have read such requests
            // and died too, so the kernel is asked for them once more.
            connection.request_resend()?;
        }
    }
    let orphan_cleanup = Arc::new(orphan_cleanup);
    let dispatcher = Arc::new(dispatcher);
    let start = |index| {
        let dispatcher = Arc::clone(&dispatcher);
        let connection = Arc::clone(&connection);
        let orphan_cleanup = Arc::clone(&orphan_cleanup);
        std::thread::Builder::new()
            .name(format!("firn-fuse-{index}"))
            .spawn(move || serve_requests(&dispatcher, &connection, &orphan_cleanup))
    };
    let threads: io::Result<Vec<_>> = (0..=threads).map(start).collect();
    Ok(Served(threads?))
}

/// Capabilities that this mount asks of the kernel, beside those that every mount asks for.
fn requested_features<B: Backing>(dispatcher: &Dispatcher<B, Responder>) -> RequestedFeatures {
    RequestedFeatures {
        passthrough: dispatcher.wants_passthrough(),
        locks: dispatcher.wants_locks(),
    }
}

/// Restores the capabilities that an earlier firnd (which served this mount and died) has negotiated with the kernel.
/// `exchange` has the kernel's INIT request and the answer to it. Fails if the options of this firnd need another
/// answer: the kernel accepts only one.
fn resume_negotiated<B: Backing>(
    dispatcher: &mut Dispatcher<B, Responder>,
    exchange: &InitExchange,
) -> io::Result<Negotiated> {
    let refused = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
    let Some(Message::Init { init, .. }) = parse(&exchange.asked) else {
        return Err(refused("the stored INIT request is invalid".into()));
    };
    let previous = InitOut::read_from_bytes(&exchange.answered)
        .map_err(|_| refused("the stored answer to INIT is invalid".into()))?;
    let page_bytes = rustix::param::page_size() as u32;
    let (answer, negotiated) = negotiate(&init, requested_features(dispatcher), page_bytes)?;
    if answer != previous {
        let names = name_differences(&previous, &answer);
        return Err(refused(format!(
            "the existing mount was made with other settings, which only an unmount can change: {names}"
        )));
    }
    dispatcher.set_negotiated(negotiated);
    Ok(negotiated)
}

/// Whether the kernel of a kept connection sends unanswered requests again.
pub fn sends_again(exchange: &InitExchange) -> bool {
    match parse(&exchange.asked) {
        Some(Message::Init { init, .. }) => negotiate::offers_resend(&init),
        _ => false,
    }
}

/// Answers INIT, the first request of a connection, with the capabilities that the mount uses. `keep` stores request
/// and answer for the firnd (the serving process) that continues the mount if this one dies. Fails if the kernel is too
/// old.
fn negotiate_new_connection<B: Backing>(
    dispatcher: &mut Dispatcher<B, Responder>,
    connection: &Connection,
    keep: &dyn KeepConnection,
) -> io::Result<()> {
    let buffer = &mut vec![0; BUFFER_BYTES];
    let Received::Request(len) = connection.receive(buffer)? else {
        return Err(io::Error::new(
            io::ErrorKind::NotConnected,
            "the kernel ended the connection before its first request",
        ));
    };
    let Some(Message::Init { unique, init }) = parse(&buffer[..len]) else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the first request of the kernel is not INIT",
        ));
    };
    let page_bytes = rustix::param::page_size() as u32;
    match negotiate(&init, requested_features(dispatcher), page_bytes) {
        Ok((answer, negotiated)) => {
            dispatcher.set_negotiated(negotiated);
            let exchange = InitExchange {
                asked: buffer[..len].to_vec(),
                answered: answer.as_bytes().to_vec(),
            };
            // Stored before the answer, because the kernel sends requests from then on.
            keep.keep(connection.as_fd(), &exchange, negotiated.resends);
            connection.answer(unique, 0, &[answer.as_bytes()]);
            Ok(())
        }
        Err(error) => {
            connection.answer(unique, libc::EPROTO, &[]);
            Err(error)
        }
    }
}

/// What a reading thread does after a message.
enum Next {
    Read,
    End,
}

/// Reads and handles messages of the kernel until it ends the connection. Each reading thread runs this. The first read
/// also ends orphans: requests of an earlier firnd (serving process) that the kernel does not send again.
fn serve_requests<B: Backing>(
    dispatcher: &Dispatcher<B, Responder>,
    connection: &Arc<Connection>,
    orphan_cleanup: &OrphanCleanup,
) -> io::Result<()> {
    // Storing to each byte makes the kernel allocate all pages now. If a SIGKILL came while a read(2) of the device
    // waited for a page, the kernel would end the request with EIO, and the next firnd would not get the request.
    let mut buffer = vec![u8::MAX; BUFFER_BYTES];
    let mut received = orphan_cleanup.receive_first(connection, &mut buffer)?;
    loop {
        let len = match received {
            Received::Request(len) => len,
            Received::Ended => return Ok(()),
        };
        match handle_message(dispatcher, connection, &buffer[..len]) {
            Next::Read => received = connection.receive(&mut buffer)?,
            Next::End => return Ok(()),
        }
    }
}

/// Handles one message of the kernel. Returns whether the thread reads a further one.
fn handle_message<B: Backing>(
    dispatcher: &Dispatcher<B, Responder>,
    connection: &Arc<Connection>,
    bytes: &[u8],
) -> Next {
    match parse(bytes) {
        Some(Message::Request {
            request,
            listing_bytes_max,
        }) => {
            let responder = Responder::new(connection, request.unique, listing_bytes_max);
            dispatcher.dispatch(request, responder);
        }
        Some(Message::Forget(forgotten)) => {
            forgotten.for_each(|(inode, count)| dispatcher.forget(inode, count));
        }
        // An interrupt gets no answer. The kernel would accept two: after EAGAIN it sends the interrupt again, after
        // ENOSYS it never sends an interrupt again.
        Some(Message::Interrupt { unique }) => dispatcher.interrupt(unique),
        Some(Message::Unsupported { unique }) => connection.answer(unique, libc::ENOSYS, &[]),
        Some(Message::Invalid { unique } | Message::Init { unique, .. }) => {
            connection.answer(unique, libc::EINVAL, &[]);
        }
        Some(Message::Destroy { unique }) => {
            connection.answer(unique, 0, &[]);
            return Next::End;
        }
        Some(Message::Ignored) => {}
        None => tracing::error!(
            len = bytes.len(),
            "a message of the kernel is shorter than its header"
        ),
    }
    Next::Read
}

impl EarlyAnswer for Connection {
    fn refuse(&self, unique: u64, errno: Errno) {
        self.answer(unique, errno.raw_os_error(), &[]);
    }

    fn accept(&self, unique: u64) {
        self.answer(unique, 0, &[]);
    }
}

/// Makes the kernel drop data from its caches.
struct KernelCaches(Arc<Connection>);

impl KernelCaches {
    fn invalidate(&self, inode: InodeId, offset: i64, len: i64) -> io::Result<()> {
        let inval = InvalInodeOut {
            nodeid: inode.0,
            offset,
            len,
        };
        self.0
            .notify(notification::INVAL_INODE, &[inval.as_bytes()])
    }
}

impl Notifier for KernelCaches {
    fn invalidate_name(&self, parent: InodeId, name: &OsStr) -> io::Result<()> {
        let inval = InvalEntryOut {
            parent: parent.0,
            name_len: name.len() as u32,
            flags: 0,
        };
        let name = name.as_bytes();
        self.0
            .notify(notification::INVAL_ENTRY, &[inval.as_bytes(), name, b"\0"])
    }

    fn invalidate_attributes(&self, inode: InodeId) -> io::Result<()> {
        // A negative offset drops attributes alone, without the pages (fuse_reverse_inval_inode).
        self.invalidate(inode, -1, 0)
    }

    fn invalidate_pages(&self, inode: InodeId, offset: u64, len: u64) -> io::Result<()> {
        self.invalidate(inode, offset as i64, len as i64)
    }

    fn store(&self, inode: InodeId, offset: u64, data: &[u8]) -> io::Result<()> {
        let store = StoreOut {
            nodeid: inode.0,
            offset,
            size: data.len() as u32,
            padding: 0,
        };
        self.0
            .notify(notification::STORE, &[store.as_bytes(), data])
    }
}
