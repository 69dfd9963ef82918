//! Stubs: descriptors of empty files on tmpfs with their bytes in firnd, the process that serves a mount.
//!
//! The kernel cannot serve calls of a stub. Its bytes are moved in the shared memory, by a *lease* (the right to write
//! into a range) or a *list* (the places of the file's bytes). All other bytes go to firnd over the data socket. If
//! firnd is gone, a call waits some time for the next one, and then fails with EIO. No byte is ever written to the stub
//! itself.
//!
//! While a stub may be shared with other processes or descriptors, the kernel's offset is the valid one. A call claims
//! its range by one lseek(2), which is atomic. A stub that is not shared has a private offset, which this process
//! keeps, like a descriptor of a mount.
//!
//! Each open stub must be *adopted*: firnd gets a copy of its descriptor and assigns a token (a number) to it.

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
    Attr, allocate_range, request_attr, request_attr_at_path, sync_stub, truncate_stub,
};
pub(crate) use data::{Append, count_unread, read_stub, seek_stub, write_stub};
pub(crate) use map::map_copy;
pub(crate) use open::{
    close_stub, find_inherited, register_copy, register_open, share_offset, update_flags,
};
pub(crate) use request::set_wait_limit;
pub(crate) use write::{new_memory_file, write_memory_file};
