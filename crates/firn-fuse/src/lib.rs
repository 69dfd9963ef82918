//! The FUSE frontend: turns requests of the kernel into calls of the engine (which holds the files), and errors into
//! errnos.
//!
//! The life of a request:
//!
//! ```text
//! transport::dev_fuse   reads and parses it: a request::Request and a reply::Responder
//! dispatcher            chooses the thread for it, and calls the engine
//! reply::Reply          sends the answer; counts and logs an error
//! ```
//!
//! [`Session`] mounts, runs the transport and unmounts.
//!
//! Promises
//! * While calls of the backing (the directory that the mount serves) hang, requests are still read and carried out.
//!   The thread that read a request makes its call only if another thread is left to read (`call_slots`). A request
//!   that must wait (for room in the shared memory, or for a close or fsync that writes bytes to the backing) is
//!   answered by a callback or a worker.
//! * A caller can be killed, whatever its request waits for (`unanswered`).

mod adapter;
mod call_slots;
mod caller;
mod coherence;
mod device;
mod direct_access;
mod dispatcher;
mod failures;
mod gate;
mod passthrough;
mod repeated;
mod reply;
mod request;
mod session;
mod stall;
mod topic;
mod transport;
mod truncations;
mod unanswered;
mod watch;

pub use adapter::Adapter;
pub use coherence::Invalidator;
pub use device::{detach, open_control};
pub use dispatcher::AdapterOptions;
pub use failures::Failures;
pub use gate::{ChangedObject, Gate, Pass, RangeAccess};
pub use session::{ResumedConnection, Session, SessionError, SessionOptions};
pub use transport::dev_fuse::{KeepConnection, sends_again};
pub use unanswered::{WaitingThread, WaitingThreads};
pub use watch::{ChangeWatch, WatchTicket, WatchedChange};
