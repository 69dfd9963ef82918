//! Direct access: a client process writes and reads the arena itself.
//!
//! This crate is linked into the preload library, and so loaded into every program: it has no dependency
//! beyond the wire format of the data socket, and none of the control protocol's JSON.
//!
//! Layout: [`slab_writer`] fills a leased slab; [`copy()`] is the copy into and out of the arena.

mod copy;
pub mod slab_writer;

pub use copy::copy;
