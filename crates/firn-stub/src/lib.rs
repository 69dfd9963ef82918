//! The stub tree: what a prefix is where there is no FUSE.
//!
//! The prefix is a directory of empty files on tmpfs. The kernel does the names, links, modes, owners, times and locks
//! of these *stubs*; the bytes of a stub are a file of the engine, which processes write and read through the preload
//! library and the data socket. This crate ties the two together. It knows which stub is which file ([`StubId`]), and
//! brings into the backing what programs did to the tree ([`Tree::reconcile`]).
//!
//! Promises
//! * A stub is known by its inode number and generation, never by its name or its number alone: a number
//!   that is used again is another stub.
//! * The bytes of a stub are dropped only when the stub itself is gone: no name leads to it and no known process has it
//!   open.
//! * Whatever renames, removals and links happen meanwhile, a [`Tree::reconcile`] that finds the tree quiet
//!   makes the backing look like it.
//! * What is known survives firnd in a log beside the arena (`map`); each change is logged before it
//!   is made in the backing.
//!
//! What it relies on: the tree and the arena lie in the same host's memory, and are lost together.

mod bring;
mod fill;
mod id;
mod map;
mod open;
mod path;
mod place;
mod tree;

pub use id::StubId;
pub use map::Changes;
pub use open::{Adopted, StubAttr};
pub use place::{PlaceError, check_place};
pub use tree::{Tree, TreeError, TreeOptions, remove_left_tree};
