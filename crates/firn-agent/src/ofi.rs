//! Reads of another host's memory (RDMA) by libfabric.
//!
//! libfabric is loaded with dlopen(3) at its first use. The same binary therefore runs on hosts without libfabric, and
//! a build needs no headers. Module [`abi`] declares the used part of its ABI, and a test compares the declarations
//! with the headers.
//!
//! A *provider* is libfabric's driver for one kind of network. An *endpoint* is a socket-like object of a provider. To
//! *expose* memory is to let other hosts read it; to *land* bytes is to read them into a local buffer.
//!
//! ```text
//!   exposing host                                   reading host
//!   Endpoint ── expose(memory) ─► Region ········► Endpoint ── land(…) ─► poll() returns the filled buffer
//!       progress(), if the provider has no hardware that answers reads
//! ```
//!
//! Promises
//! * The API is safe: exposed memory and the buffers of reads live until libfabric no longer uses them, even after
//!   errors.
//! * Another host cannot decide where bytes are written, or how many. A read stays within its buffer. The address of an
//!   endpoint is copied to an array that is longer than any address.
//! * After an error an endpoint begins no further read.

pub mod abi;
mod endpoint;
mod error;
mod library;
mod pool;

pub use endpoint::{Endpoint, FilledBuffer, Read, Region, RemoteRegion};
pub use error::{OfiError, Operation};
pub use library::{Library, Provider, has_devices, is_hardware};
pub use pool::{Buffer, Memory, Pool};
