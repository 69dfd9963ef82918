//! Kernel request to engine call, error to errno, over the fuser crate.
//!
//! [`Adapter`] only translates; what an operation means is the engine's. [`Session`] is the seam to
//! the transport: mounting, the request loop and unmounting. Requests that have to wait (a full
//! arena, a close that drains, an fsync) are answered from callbacks and workers, so that a FUSE
//! thread never blocks on the backing's speed.

mod adapter;
mod caller;
mod coherence;
mod convert;
mod device;
mod door;
mod listing;
mod negotiate;
mod passthrough;
mod session;
mod stall;
mod workers;

pub use adapter::{Adapter, AdapterOptions};
pub use device::{detach, is_dead};
pub use door::Forgetter;
pub use session::{Session, SessionError, SessionOptions};
