//! A model of a disk that seeks, as I/O servers had in 2010, behind a real file server.
//!
//! What is written and read passes through a FUSE mount and is stored in a directory; the model says how long it takes,
//! and the mount lets it take so long. It is a model: no figure that was taken with it is one of a disk.
//!
//! | assumption | value | source |
//! |---|---|---|
//! | a seek, whatever its distance | 8.5 ms | average of a 250 GB SATA disk of the paper's time (Hitachi 7K250) |
//! | a gap | passed over at the disk's rate where that is no slower than a seek | – |
//! | rate on one track after another | 80 MB/s | outer tracks of such disks, whose mean was 60 to 65 MB/s (Barracuda 7200.8) |
//! | cache of what was written, for all streams | 256 MiB | 5 % of the paper's 8 GB nodes are 400 MB |
//! | write-back begins | at half of the cache, at a sync, or when a writer waits | `dirty_background_ratio` was half of `dirty_ratio` |
//! | what the elevator sees and sorts at a time | 64 MiB, in the order of arrival | queue of 128 requests of 512 KiB; writers that had to wait wrote back themselves, each its own file (Linux before 3.2) |
//! | a file reserves | 4 MiB at a time, at the first free place; its close gives the rest back | ext3: 1027 blocks at most |
//! | sync of a file | waits for all that arrived before it | ext3 with `data=ordered` |
//! | a server that syncs | each write returns when it is on the disk; meanwhile others arrive, and the next sweep takes them all. What goes on where the last sweep ended has missed its turn: 8.3 ms | 7,200 rotations a minute; `TroveSyncData` of PVFS2 is `yes` by default (`server-config.c`), and "wait a full rotation before the next small write" (log-based writing, section III) |
//! | readers | one file for 100 ms at most, 8 ms of waiting for its next request, then the one that waits longest | CFQ: `slice_sync`, `slice_idle` |
//!
//! Not modelled: journal and metadata, the network, rotation otherwise, defects, a full disk, reads that a cache answers.
//!
//! Invariants
//! * A writer waits while the cache is full; a request larger than the cache waits until it is empty.
//! * The disk moves one run at a time, and the sum of what moved is the sum of what was written.

use std::time::Duration;

mod disk;
mod layout;
mod readers;
mod served;

pub use disk::{Disk, Run};
pub use served::SeekingDisk;

/// How slow a disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskModel {
    /// Time until the head is elsewhere.
    pub seek: Duration,
    /// Bytes a second while the head stays on its way.
    pub bytes_per_s: u64,
    /// Bytes that were written and are not on the disk yet, at most.
    pub cache_bytes: u64,
    /// Bytes that are sorted at a time.
    pub queue_bytes: u64,
    /// Bytes that a file reserves at a time.
    pub window_bytes: u64,
    /// Each write is synced before it returns.
    pub is_synced: bool,
    /// Until the sector that just went past comes again.
    pub rotation: Duration,
    /// How long one reader has the disk while others wait.
    pub read_slice: Duration,
    /// How long its next request is waited for.
    pub read_idle: Duration,
}

impl DiskModel {
    /// A SATA disk of the paper's time, and the kernel before it.
    pub const SATA_2010: Self = Self {
        seek: Duration::from_micros(8500),
        bytes_per_s: 80_000_000,
        cache_bytes: 256 << 20,
        queue_bytes: 64 << 20,
        window_bytes: 4 << 20,
        is_synced: false,
        rotation: Duration::from_micros(8333),
        read_slice: Duration::from_millis(100),
        read_idle: Duration::from_millis(8),
    };

    /// The same disk behind a server that syncs each write.
    pub fn synced(self) -> Self {
        Self {
            is_synced: true,
            ..self
        }
    }

    /// The same disk for files of a `divisor`-th: every time and every size is divided, the rate stays. So whatever is
    /// done with it takes a `divisor`-th of the time, exactly.
    pub fn scaled(self, divisor: u32) -> Self {
        let bytes = u64::from(divisor);
        Self {
            seek: self.seek / divisor,
            bytes_per_s: self.bytes_per_s,
            cache_bytes: self.cache_bytes / bytes,
            queue_bytes: self.queue_bytes / bytes,
            window_bytes: self.window_bytes / bytes,
            is_synced: self.is_synced,
            rotation: self.rotation / divisor,
            read_slice: self.read_slice / divisor,
            read_idle: self.read_idle / divisor,
        }
    }

    /// Time to move `bytes` bytes without a seek.
    pub fn transfer_time(&self, bytes: u64) -> Duration {
        Duration::from_secs_f64(bytes as f64 / self.bytes_per_s as f64)
    }
}
