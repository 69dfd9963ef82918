//! Policies of a mount: what the engine does when, and how much of what it keeps.

use std::time::Duration;

/// When close(2) returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClosePolicy {
    /// When the file is in the backing.
    Drain,
    /// At once.
    Held,
}

/// What fsync(2) means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FsyncPolicy {
    /// Durable in the backing.
    Durable,
    /// Held in the arena, as after write(2).
    Held,
}

/// When pending data goes to the backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainPolicy {
    /// As it comes.
    Eager,
    /// On request: [`Durability::drain_tree`](crate::Durability::drain_tree),
    /// [`Durability::wait_tree`](crate::Durability::wait_tree), fsync(2). Drained bytes stay in memory until their room
    /// is needed. A full arena is ENOSPC.
    Demand,
}

/// In which order a lane's files are drained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// In turns of one write each.
    Interleaved,
    /// One after the other.
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
    /// Data older than this is drained, however little.
    pub drain_age: Duration,
    /// Fewest bytes of an unforced write to the backing: one chunk.
    pub drain_write_bytes_min: u64,
    /// Most bytes of one write to the backing.
    pub drain_write_bytes_max: u64,
    /// Most bytes of one write if the backing gathers pieces of a file ([`firn_backing::Facts::gathers`]); never more
    /// than a quarter of the arena.
    pub drain_gathered_bytes_max: u64,
    /// Percent of memory in use above which sealed chunks move to the spill file, where there is one.
    pub spill_upper_percent: u32,
    /// Percent of memory in use down to which they move.
    pub spill_lower_percent: u32,
    /// Let the kernel read files that have nothing pending.
    pub passthrough: bool,
    /// Bytes from which on a file gets a memory file of its own once it is closed, where what is written stays in
    /// memory (`DrainPolicy::Demand`); 0: none does.
    pub memory_file_bytes_min: u64,
    /// Every read of a program comes to the engine: the kernel caches no bytes, and no process is told where bytes lie.
    pub serves_every_read: bool,
    /// Objects of the backing (descriptors) held beside those of files in use. The kernel may know more;
    /// they are looked up again when used.
    pub objects_max: usize,
    /// Files of the backing that stay open (one or two descriptors each) for those that programs have open. More
    /// are closed and opened again when used.
    pub open_files_max: usize,
}

impl EngineOptions {
    /// The defaults for chunks of `chunk_bytes`.
    pub fn new(chunk_bytes: u64) -> Self {
        Self {
            drain: DrainPolicy::Eager,
            order: Order::Interleaved,
            close: ClosePolicy::Drain,
            fsync: FsyncPolicy::Durable,
            drain_age: Duration::from_secs(5),
            drain_write_bytes_min: chunk_bytes,
            // Four chunks: larger ones gained nothing on any backing measured and hold the lane longer.
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
