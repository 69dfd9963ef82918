//! Kernel request to engine call, error to errno, over the fuser crate.
//!
//! [`Adapter`] only translates; what an operation means is the engine's. [`Session`] is the seam to
//! the transport: mounting, the request loop and unmounting. Requests that have to wait (a full
//! arena, a close that drains, an fsync) are answered from callbacks and workers. Others ask the backing on
//! the thread that read them, as long as another one is left that reads (`serving`): whatever hangs there,
//! requests are read and carried out.

mod adapter;
mod caller;
mod coherence;
mod convert;
mod device;
mod door;
mod failures;
mod listing;
mod negotiate;
mod passthrough;
mod serving;
mod session;
mod stall;
mod workers;

pub use adapter::{Adapter, AdapterOptions};
pub use coherence::Forgetter;
pub use device::detach;
pub use failures::Failures;
pub use session::{Session, SessionError, SessionOptions};
