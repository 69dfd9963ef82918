//! An arena with all its memory, and the plain copy into it that the others are compared with.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use firn_arena::{Arena, Identity, SlabRef};
use firn_format::geometry::Geometry;
use firn_format::slab::Class;

/// Beyond the caches of one core, and little on a machine of 2 GiB.
const CHUNKS: u64 = 8;
const CHUNK_BYTES: u64 = 4 << 20;
/// Bytes that are written before they are dropped again: room is left for slabs that end early.
pub const FILL_BYTES: usize = 24 << 20;

/// Returns an arena on tmpfs; the directory goes with it.
pub fn arena() -> (tempfile::TempDir, Arena) {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on tmpfs");
    let identity = Identity {
        backing: PathBuf::from("/backing"),
        dev: 1,
        ino: 1,
    };
    let geometry = Geometry::new(CHUNKS * CHUNK_BYTES, CHUNK_BYTES).expect("a valid geometry");
    let arena = Arena::create(&dir.path().join("arena"), geometry, &identity).expect("an arena");
    arena.populate(&|| true).expect("memory for it");
    (dir, arena)
}

/// Copies of `data` behind each other into an arena, over as many bytes as the other side writes before
/// it drops them, and from the start again.
pub struct Copies {
    arena: Arena,
    slabs: Vec<SlabRef>,
    span_bytes: usize,
    next: usize,
    _dir: tempfile::TempDir,
}

impl Copies {
    pub fn over(span_bytes: usize) -> Self {
        assert!(span_bytes <= FILL_BYTES);
        let (dir, arena) = arena();
        let leases = std::iter::from_fn(|| arena.lease_slab(Class::Whole));
        // The leases end with the process, without being given back.
        let slabs = leases.map(|lease| lease.slab()).collect();
        Self {
            arena,
            slabs,
            span_bytes,
            next: 0,
            _dir: dir,
        }
    }

    pub fn copy(&mut self, data: &[u8]) {
        if self.next + data.len() > self.span_bytes {
            self.next = 0;
        }
        let mut position = self.next % CHUNK_BYTES as usize;
        if position + data.len() > CHUNK_BYTES as usize {
            self.next += CHUNK_BYTES as usize - position;
            position = 0;
        }
        let chunk = self.next / CHUNK_BYTES as usize;
        self.arena
            .fill_slab(self.slabs[chunk], position as u32, data);
        self.next += data.len();
    }
}

/// Times `count` steps in rounds of at most `round`; between two rounds `reset` is not timed.
pub fn in_rounds(
    count: u64,
    round: usize,
    mut step: impl FnMut(usize),
    mut reset: impl FnMut(),
) -> Duration {
    let mut elapsed = Duration::ZERO;
    let mut left = count;
    while left > 0 {
        let now = left.min(round as u64);
        let begin = Instant::now();
        (0..now as usize).for_each(&mut step);
        elapsed += begin.elapsed();
        left -= now;
        reset();
    }
    elapsed
}
