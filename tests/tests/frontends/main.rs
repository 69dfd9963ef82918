//! Programs at a mount or under the preload library, and what they see.

mod basic;
mod bytes;
mod chunks;
mod differential;
mod direct_access;
mod frontends;
mod held_pages;
mod kernel_cache;
mod memory_files;
mod preload;
mod programs;
mod promises;
mod seen;
mod set_id;
mod stub;
mod suites;
mod times;
