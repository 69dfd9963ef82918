//! Kernel request to engine call, error to errno.
//!
//! A request takes this way, each step knowing only the next:
//!
//! ```text
//! transport::dev_fuse   reads it, makes a request::Request and a reply::Responder of it
//! dispatcher            decides where it runs, and calls the engine
//! reply::Reply          traces and counts it if it failed, and answers
//! ```
//!
//! [`Session`] mounts, runs the transport and unmounts. Requests that have to wait (a full arena, a close that drains,
//! an fsync) are answered from callbacks and workers. Others ask the backing on the thread that read them, as long as
//! another one is left that reads (`call_slots`): whatever hangs there, requests are read and carried out. And whatever
//! a request waits for or hangs in, its caller can be killed (`unanswered`).

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
pub use session::{KeptConnection, Session, SessionError, SessionOptions};
pub use transport::dev_fuse::{KeepConnection, sends_again};
pub use unanswered::{WaitingThread, WaitingThreads};
pub use watch::{ChangeWatch, WatchTicket, WatchedChange};
