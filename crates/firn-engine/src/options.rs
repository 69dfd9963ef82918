//! Policies of a mount: when the engine acts, and how much it keeps. Data is *held* while only the arena (shared
//! memory) has it, and *drained* when the backing (the directory that the mount serves) has it.

use std::time::Duration;

/// When close(2) returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClosePolicy {
    /// When all bytes of the file are in the backing.
    Drain,
    /// At once, with the data held in the arena.
    Held,
}

/// What fsync(2) waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FsyncPolicy {
    /// For the data to be durable in the backing.
    Durable,
    /// fsync(2) does not wait: the data is held in the arena, as after write(2).
    Held,
}

/// When pending data goes to the backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainPolicy {
    /// Without a request, as soon as there is enough data.
    Eager,
    /// On request: [`Durability::drain_tree`](crate::Durability::drain_tree),
    /// [`Durability::wait_tree`](crate::Durability::wait_tree), fsync(2). Drained bytes remain in memory until their
    /// space is needed. Writes to a full arena fail with ENOSPC.
    Demand,
}

/// Order in which the files of a lane (I/O server) are drained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Files alternate, with one write each.
    Interleaved,
    /// One file after the other.
    Sequential,
}

/// Policies of one mount.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// See [`DrainPolicy`].
    pub drain: DrainPolicy,
    /// See [`Order`].
    pub order: Order,
    /// See [`ClosePolicy`].
    pub close: ClosePolicy,
    /// See [`FsyncPolicy`].
    pub fsync: FsyncPolicy,
    /// Age after which data is drained, however few bytes it has.
    pub drain_age: Duration,
    /// Minimum number of new bytes of a file for a drain without a request: one chunk by default.
    pub drain_write_bytes_min: u64,
    /// Maximum number of bytes of one write to the backing.
    pub drain_write_bytes_max: u64,
    /// Maximum number of bytes of one write if the backing gathers pieces of a file ([`firn_backing::Facts::gathers`]).
    /// Limited to a quarter of the arena.
    pub drain_gathered_bytes_max: u64,
    /// Percentage of memory in use above which sealed chunks move to the spill file, if there is one.
    pub spill_upper_percent: u32,
    /// Percentage of memory in use at which moving stops.
    pub spill_lower_percent: u32,
    /// Whether the kernel may read files without pending data itself.
    pub passthrough: bool,
    /// Size in bytes from which a closed file moves into a memory file, if drained bytes remain in memory
    /// (`DrainPolicy::Demand`). 0: no file moves.
    pub memory_file_bytes_min: u64,
    /// Whether every read of a program goes to the engine. If so, the kernel caches no bytes, and no process gets a
    /// list of the places of bytes.
    pub serves_every_read: bool,
    /// Number of objects of the backing (descriptors) that remain open besides the objects of files in use. The kernel
    /// may have references to more objects; these are looked up at their next use.
    pub objects_max: usize,
    /// Number of files of the backing that remain open for files of programs, with one or two descriptors each. Further
    /// files are closed, and opened again at their next use.
    pub open_files_max: usize,
}

impl EngineOptions {
    /// Returns the defaults for an arena with chunks (units of its memory) of `chunk_bytes`.
    pub fn new(chunk_bytes: u64) -> Self {
        Self {
            drain: DrainPolicy::Eager,
            order: Order::Interleaved,
            close: ClosePolicy::Drain,
            fsync: FsyncPolicy::Durable,
            drain_age: Duration::from_secs(5),
            drain_write_bytes_min: chunk_bytes,
            // Four chunks: larger writes were not faster on any measured backing, and occupy the lane longer.
            drain_write_bytes_max: chunk_bytes.saturating_mul(4).clamp(1 << 20, 64 << 20),
            drain_gathered_bytes_max: 64 << 20,
            spill_upper_percent: 80,
            spill_lower_percent: 60,
            passthrough: false,
            memory_file_bytes_min: 0,
            serves_every_read: false,
            objects_max: 4096,
            open_files_max: 4096,
        }
    }
}
