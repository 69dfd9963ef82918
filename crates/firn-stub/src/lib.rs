//! Stub trees: mount points without FUSE.
//!
//! The mount point (the *prefix*) is a directory on tmpfs with empty files, the *stubs*. The kernel manages the names,
//! links, modes, owners, times and locks of stubs. The bytes of a stub are in a file of the *engine*, the part of firnd
//! (the process that serves the mount) that stores data. Processes write and read these bytes through the preload
//! library, which intercepts their calls and sends them to firnd over the *data socket*.
//!
//! This crate connects stubs and files. It records which stub is which file ([`StubId`]). It brings the names and
//! attributes of the tree to the *backing*, the directory that the mount serves ([`Tree::reconcile`]).
//!
//! Promises
//! * A stub is identified by inode number and generation, never by its name or its number alone. If tmpfs uses a number
//!   again, the new stub has another generation.
//! * The bytes of a stub are dropped only when the stub is gone: it has no name, and no known process has it open.
//! * If no program changes the tree during a [`Tree::reconcile`], the backing then has the same names and attributes,
//!   whatever was renamed, removed and linked before.
//! * The log of names (`map`) survives firnd. A new name or a rename is logged before it is made in the backing.
//!
//! Relies on: the tree and the arena (the shared memory with bytes that are not in the backing yet) are in the memory
//! of the same host, and are lost together.

mod fill;
mod id;
mod map;
mod open;
mod path;
mod place;
mod sync_names;
mod tree;

pub use id::StubId;
pub use map::Changes;
pub use open::{Adopted, StubAttr};
pub use place::{PlaceError, check_place};
pub use tree::{Tree, TreeError, TreeOptions, remove_left_tree};
