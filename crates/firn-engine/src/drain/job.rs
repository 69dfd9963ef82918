//! One write to the backing: parts of one file that lie beside each other, in several slabs perhaps.
//!
//! Invariant: the slabs of all parts are pinned from [`Engine::pick`](crate::Engine::pick) until
//! [`Engine::complete`](crate::Engine::complete), and bytes in flight are not overwritten in place.

use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;

use firn_arena::Place;
use firn_backing::{Backing, Errno};

use crate::InodeId;
use crate::engine::Engine;
use crate::extents::Extent;
use crate::file::File;
use crate::options::Order;

pub(super) struct Part {
    pub extent: Extent,
    pub offset: u64,
}

/// One write to the backing.
pub struct Job<B: Backing> {
    pub(super) file: Arc<File<B>>,
    pub(super) parts: Vec<Part>,
    /// Where the parts are, and their bytes; valid while the slabs are pinned, that is until the job is
    /// completed. The mapping outlives the job: the engine owns it.
    pub(super) places: Vec<(Place, usize)>,
    pub(super) range: Range<u64>,
}

/// Bytes written before the end or the error.
pub struct JobOutcome {
    /// Bytes that reached the backing.
    pub written: u64,
    /// Calls that did something.
    pub writes: u64,
    /// Why it stopped early.
    pub error: Option<Errno>,
    /// The error is that of the spill file.
    pub unreadable: bool,
}

/// The spilled parts of a job.
struct Loaded {
    /// Their bytes; empty for a part in memory.
    spilled: Vec<Vec<u8>>,
    /// Bytes of all parts, those in memory too, before the first that cannot be read.
    bytes: u64,
    error: Option<Errno>,
}

impl<B: Backing> Job<B> {
    /// The file that it is of.
    pub fn inode(&self) -> InodeId {
        self.file.inode.id
    }
    /// Offset in the file.
    pub fn offset(&self) -> u64 {
        self.range.start
    }
    /// Bytes.
    pub fn len(&self) -> u64 {
        self.range.end - self.range.start
    }
    /// Never: a job has bytes.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Does the write: one vectored call, more where the backing takes less at once. Opens the file if need be.
    pub fn execute(&self, engine: &Engine<B>) -> JobOutcome {
        let mut outcome = JobOutcome {
            written: 0,
            writes: 0,
            error: None,
            unreadable: false,
        };
        let target = match engine.writer(&self.file) {
            Ok(target) => target,
            Err(errno) => {
                return JobOutcome {
                    error: Some(errno),
                    ..outcome
                };
            }
        };
        let loaded = self.load();
        while outcome.written < loaded.bytes {
            let slices = self.slices(&loaded.spilled, outcome.written);
            match engine
                .backing
                .write_at(&target.file, &slices, self.range.start + outcome.written)
            {
                Ok(0) => {
                    outcome.error = Some(Errno::IO);
                    break;
                }
                Ok(n) => {
                    outcome.written += n as u64;
                    outcome.writes += 1;
                }
                Err(Errno::INTR) => {}
                Err(errno) => {
                    outcome.error = Some(errno);
                    break;
                }
            }
        }
        if engine.options.order == Order::Sequential && outcome.written > 0 {
            // Else the kernel writes back several files at once, in turns of its own.
            let offset = self.range.start;
            engine
                .backing
                .begin_sync(&target.file, offset, outcome.written);
        }
        if outcome.error.is_none() && loaded.error.is_some() {
            outcome.error = loaded.error;
            outcome.unreadable = true;
        }
        outcome
    }

    /// Reads what is spilled, up to the first part that cannot be read.
    fn load(&self) -> Loaded {
        let mut loaded = Loaded {
            spilled: Vec::new(),
            bytes: 0,
            error: None,
        };
        for (place, len) in &self.places {
            let part = match place {
                Place::Memory(_) => Ok(Vec::new()),
                Place::Spill(file, at) => {
                    let mut part = vec![0; *len];
                    file.read(*at, &mut part).map(|()| part)
                }
                Place::Nowhere => Err(Errno::IO),
            };
            match part {
                Ok(part) => loaded.spilled.push(part),
                Err(errno) => {
                    loaded.error = Some(errno);
                    break;
                }
            }
            loaded.bytes += *len as u64;
        }
        loaded
    }

    fn slices<'a>(&'a self, spilled: &'a [Vec<u8>], skip: u64) -> Vec<IoSlice<'a>> {
        let mut skip = skip as usize;
        let mut slices = Vec::with_capacity(self.places.len());
        for ((place, len), part) in self.places.iter().zip(spilled) {
            if skip >= *len {
                skip -= len;
                continue;
            }
            let bytes = match place {
                // SAFETY: the slab is pinned until the job is completed, and bytes in flight are not
                // overwritten in place.
                Place::Memory(address) => unsafe {
                    std::slice::from_raw_parts(address.add(skip), len - skip)
                },
                _ => &part[skip..],
            };
            slices.push(IoSlice::new(bytes));
            skip = 0;
        }
        slices
    }
}
