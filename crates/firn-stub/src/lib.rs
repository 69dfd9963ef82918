//! Stub trees: mount points without FUSE.
//!
//! The mount point (the *prefix*) is a directory on tmpfs with empty files, the *stubs*. The kernel manages the names,
//! links, modes, owners, times and locks of stubs. The bytes of a stub are in a file of the engine; processes write and
//! read them through the preload library and the data socket. This crate connects stubs and files. It records which
//! stub is which file ([`StubId`]), and brings the names and attributes of the tree to the backing
//! ([`Tree::reconcile`]).
//!
//! Promises
//! * A stub is identified by inode number and generation, never by its name or its number alone. If tmpfs uses a number
//!   again, the new stub has another generation.
//! * The bytes of a stub are dropped only when the stub is gone: it has no name, and no known process has it open.
//! * If no program changes the tree during a [`Tree::reconcile`], the backing then has the same names and attributes,
//!   whatever was renamed, removed and linked before.
//! * A log beside the arena (`map`) survives firnd. Each change is logged before it is made in the backing.
//!
//! Relies on: the tree and the arena are in the memory of the same host, and are lost together.

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
