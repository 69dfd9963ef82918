//! Reads of another host's memory (RDMA) by libfabric.
//!
//! libfabric is loaded with dlopen(3) when it is first asked for, so one binary runs where there is none and needs no
//! headers to be built. What is used of its ABI is declared in [`abi`], and compared with the headers by a test.
//!
//! ```text
//!   exposing host                                   reading host
//!   Endpoint ── expose(memory) ─► Region ········► Endpoint ── land(buffer, reads) ─► poll() gives the buffer back
//!       progress(), where the provider has no hardware for it
//! ```
//!
//! Promises
//! * Safe to call: memory that is exposed, and buffers that bytes arrive in, live until libfabric has let go of them,
//!   whatever fails.
//! * Nothing that another host sends decides where bytes land or how many: a read has the bounds of its buffer. Its
//!   address is copied into room for the longest one.
//! * An endpoint that met an error reads no more.

pub mod abi;
mod endpoint;
mod error;
mod library;
mod pool;

pub use endpoint::{Endpoint, Landed, Read, Region, RemoteRegion};
pub use error::{OfiError, Operation};
pub use library::{Library, Provider, has_devices, is_hardware};
pub use pool::{Buffer, Memory, Pool};
