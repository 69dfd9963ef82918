//! Direct access: a client process writes and reads the arena itself.
//!
//! This crate is linked into the preload library, and so loaded into every program. It depends only on the wire format
//! of the data socket and the check of the listener's user, and has none of the control protocol's JSON.
//!
//! Layout: [`connection`] asks firnd for grants, leases and lists; [`arena_map`] maps the arena; [`slab_writer`]
//! fills a leased slab; [`copy()`] is the copy into and out of the arena; [`syscall`](mod@syscall) is below them.

pub mod arena_map;
pub mod connection;
mod copy;
pub mod processor;
pub mod slab_writer;
pub mod syscall;

pub use copy::copy;
