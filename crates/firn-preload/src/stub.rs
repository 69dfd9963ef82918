//! Stubs: descriptors of empty files on tmpfs, whose bytes firnd has.
//!
//! There is no kernel to leave a call to. What goes neither into a lease nor by a list goes to firnd over the data
//! socket. Where firnd is gone, the call waits for the next one, for a while, and fails with EIO. Nothing is ever
//! written into the stub itself.
//!
//! The stub's offset in the kernel counts while the descriptor may be shared: a range of it is reserved by one
//! lseek(2), which is atomic. A descriptor that is not shared has a private offset, as with a mount.

mod attributes;
mod data;
mod enter;
mod map;
mod open;
mod request;
mod socket;
pub(crate) mod state;
mod write;

pub(crate) use attributes::{
    Attr, allocate_range, attr_of_fd, attr_of_path, sync_stub, truncate_stub,
};
pub(crate) use data::{Append, count_unread, read_stub, seek_stub, write_stub};
pub(crate) use map::map_copy;
pub(crate) use open::{
    close_stub, find_inherited, flags_changed, register_copy, register_open, share_offset,
};
pub(crate) use request::set_patience;
pub(crate) use write::{new_memory_file, write_memory_file};
