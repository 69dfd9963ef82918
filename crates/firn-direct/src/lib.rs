//! Direct access: a client process writes and reads the arena itself, the shared memory with the bytes that are in no
//! file of the backing yet.
//!
//! This crate is linked into the preload library, which is loaded into every program. The crate therefore depends
//! only on the wire format of the data socket and on the check of the listener's user. It does not contain the JSON
//! of the control protocol.
//!
//! Modules: [`connection`] requests grants (rights to access a file), leases (rights to fill a slab of the arena) and
//! lists of a file's extents from firnd, the process that serves the mount. [`arena_map`] maps the arena.
//! [`slab_writer`] fills a leased slab. [`copy()`] copies bytes into and out of the arena. [`syscall`](mod@syscall) has
//! the system calls that the other modules use.

pub mod arena_map;
pub mod connection;
mod copy;
pub mod processor;
pub mod slab_writer;
pub mod syscall;

pub use copy::copy;
