//! A job: one write to the backing, of parts of one file that may lie in several slabs (parts of the arena, the memory
//! for written data).
//!
//! Invariants
//! * Parts are in the order of their offsets and do not overlap. They are contiguous, unless the backing gathers
//!   distant parts.
//! * If a job is only partly written, its first bytes are written.
//! * The slabs of all parts are pinned (not used again, nor moved) from [`Drainer::pick`](crate::Drainer::pick) until
//!   [`Drainer::complete`](crate::Drainer::complete), and bytes in flight are not overwritten in place.

use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use firn_arena::PieceBytes;
use firn_backing::{Backing, DataPart, Errno, PageAdvice};

use crate::InodeId;
use crate::engine::Engine;
use crate::extents::Extent;
use crate::file::File;
use crate::options::Order;

/// An extent of a job (bytes of one append that are the newest of their file range) and its offset in the file.
pub(super) struct JobPart {
    pub extent: Extent,
    pub offset: u64,
}

impl JobPart {
    /// Returns the file offset after the last byte.
    pub fn end(&self) -> u64 {
        self.offset + self.extent.len
    }
}

/// One write to the backing.
pub struct Job<B: Backing> {
    pub(super) file: Arc<File<B>>,
    pub(super) parts: Vec<JobPart>,
    /// Where the bytes of each part are. The places are valid while the slabs are pinned, which is until the job is
    /// completed. The engine owns the mapping, which outlives the job.
    pub(super) places: Vec<PieceBytes>,
    /// File range from the first part to the end of the last.
    pub(super) span: Range<u64>,
    /// Sum of the bytes of all parts.
    pub(super) bytes: u64,
}

/// Result of a job.
pub struct JobOutcome {
    /// Number of bytes that reached the backing; they are the first bytes of the job.
    pub written_bytes: u64,
    /// Number of calls of the backing that wrote bytes.
    pub write_calls: u64,
    /// Error that ended the job early.
    pub error: Option<Errno>,
    /// Source of the error; meaningless without an error.
    pub error_source: JobErrorSource,
}

/// Source of the error of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobErrorSource {
    /// The backing's file could not be opened or written.
    Backing,
    /// Bytes of the job could not be read from the spill file.
    SpillFile,
}

/// The bytes of a job that are not written yet, as slices, and the runs that they form.
struct RemainingBytes<'a> {
    /// The bytes, in the order of their file offsets.
    slices: Vec<IoSlice<'a>>,
    /// The runs, each of which is one part of the next write.
    runs: Vec<Run>,
}

/// Slices whose bytes are contiguous in the file.
struct Run {
    /// File range of the bytes.
    offsets: Range<u64>,
    /// Indexes of the slices in [`RemainingBytes::slices`].
    slices: Range<usize>,
}

/// The parts of a job before the first part whose bytes cannot be read.
struct LoadedParts {
    /// Bytes of each part; empty for a part in memory.
    spilled: Vec<Vec<u8>>,
    /// Sum of the bytes of these parts.
    bytes: u64,
    /// Error of the first part that cannot be read.
    error: Option<Errno>,
}

impl<B: Backing> Job<B> {
    /// Returns the inode of the file.
    pub fn inode(&self) -> InodeId {
        self.file.inode.id
    }

    /// Returns the file range from the first byte to the end of the last.
    pub fn span(&self) -> Range<u64> {
        self.span.clone()
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// Returns whether the job has no bytes, which is always false.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Writes the bytes of the job to the backing, in several calls if the backing accepts less in one. Opens the file
    /// if it is not open. An error ends the job and is in the result, with the bytes that were written before.
    pub fn execute(&self, engine: &Engine<B>) -> JobOutcome {
        let mut outcome = JobOutcome {
            written_bytes: 0,
            write_calls: 0,
            error: None,
            error_source: JobErrorSource::Backing,
        };
        let writer = match engine.open_files.writer(&self.file) {
            Ok(writer) => writer,
            Err(errno) => {
                outcome.error = Some(errno);
                return outcome;
            }
        };
        let loaded = self.load_spilled_parts();
        self.write_loaded_parts(engine, &writer.file, &loaded, &mut outcome);
        if engine.base.options.order == Order::Sequential && outcome.written_bytes > 0 {
            // Otherwise the kernel would write back several files at once, alternating between them.
            engine
                .base
                .backing
                .advise(&writer.file, self.span(), PageAdvice::WriteOut);
        }
        if outcome.error.is_none() && loaded.error.is_some() {
            outcome.error = loaded.error;
            outcome.error_source = JobErrorSource::SpillFile;
        }
        outcome
    }

    /// Writes the first parts of the job, which are all in memory now, to `file`, until all are written or a write
    /// fails. Adds the results to `outcome`.
    fn write_loaded_parts(
        &self,
        engine: &Engine<B>,
        file: &B::File,
        loaded: &LoadedParts,
        outcome: &mut JobOutcome,
    ) {
        let counters = &engine.base.counters;
        while outcome.written_bytes < loaded.bytes {
            let remaining = self.remaining_bytes(&loaded.spilled, outcome.written_bytes);
            let start = Instant::now();
            let result = engine.base.backing.write_parts(file, &remaining.parts());
            counters.drain_times.observe(start.elapsed());
            match result {
                // A write that accepts nothing would be repeated for ever.
                Ok(0) => {
                    outcome.error = Some(Errno::IO);
                    return;
                }
                Ok(bytes) => {
                    counters.drain_sizes.observe(bytes);
                    outcome.written_bytes += bytes;
                    outcome.write_calls += 1;
                }
                Err(Errno::INTR) => {}
                Err(errno) => {
                    outcome.error = Some(errno);
                    return;
                }
            }
        }
    }

    /// Reads the parts of the job that were moved to the spill file, up to the first one that cannot be read. That
    /// error, and the bytes before it, are in the result.
    fn load_spilled_parts(&self) -> LoadedParts {
        let mut loaded = LoadedParts {
            spilled: Vec::new(),
            bytes: 0,
            error: None,
        };
        for (part, place) in self.parts.iter().zip(&self.places) {
            let result = match place {
                // The bytes are written from the arena itself. The empty buffer keeps one entry for each part.
                PieceBytes::Memory(_) => Ok(Vec::new()),
                PieceBytes::Spill(spill_file, spill_offset) => {
                    let mut buffer = vec![0; part.extent.len as usize];
                    spill_file.read(*spill_offset, &mut buffer).map(|()| buffer)
                }
                PieceBytes::Nowhere => Err(Errno::IO),
            };
            match result {
                Ok(bytes) => loaded.spilled.push(bytes),
                Err(errno) => {
                    loaded.error = Some(errno);
                    break;
                }
            }
            loaded.bytes += part.extent.len;
        }
        loaded
    }

    /// Returns the bytes of the job that are not written yet: those after its first `written_bytes` bytes. `spilled`
    /// has the bytes of the spilled parts, which were read from the spill file.
    fn remaining_bytes<'a>(
        &'a self,
        spilled: &'a [Vec<u8>],
        written_bytes: u64,
    ) -> RemainingBytes<'a> {
        let mut bytes_to_skip = written_bytes as usize;
        let mut remaining = RemainingBytes {
            slices: Vec::with_capacity(self.places.len()),
            runs: Vec::new(),
        };
        for ((part, place), spilled_bytes) in self.parts.iter().zip(&self.places).zip(spilled) {
            let len = part.extent.len as usize;
            if bytes_to_skip >= len {
                bytes_to_skip -= len;
                continue;
            }
            let bytes = match place {
                // SAFETY: the slab is pinned until the job is completed, and bytes in flight are not
                // overwritten in place.
                PieceBytes::Memory(address) => unsafe {
                    std::slice::from_raw_parts(address.add(bytes_to_skip), len - bytes_to_skip)
                },
                _ => &spilled_bytes[bytes_to_skip..],
            };
            remaining.push(part.offset + bytes_to_skip as u64, bytes);
            bytes_to_skip = 0;
        }
        remaining
    }
}

impl<'a> RemainingBytes<'a> {
    /// Adds bytes for a file offset. They join the last run if they follow it.
    fn push(&mut self, offset: u64, bytes: &'a [u8]) {
        let end = offset + bytes.len() as u64;
        let slice_index = self.slices.len();
        self.slices.push(IoSlice::new(bytes));
        match self.runs.last_mut() {
            Some(run) if run.offsets.end == offset => {
                run.offsets.end = end;
                run.slices.end = slice_index + 1;
            }
            _ => self.runs.push(Run {
                offsets: offset..end,
                slices: slice_index..slice_index + 1,
            }),
        }
    }

    /// Returns the runs as parts of one write.
    fn parts(&self) -> Vec<DataPart<'_>> {
        let parts = self.runs.iter().map(|run| DataPart {
            offset: run.offsets.start,
            data: &self.slices[run.slices.clone()],
        });
        parts.collect()
    }
}
