//! Reads: pending bytes over cached ones over those of the backing, as the file is at one moment.

use std::ops::Range;
use std::sync::Arc;

use firn_backing::Backing;

use crate::Result;
use crate::base::Base;
use crate::drain::Drain;
use crate::extents::Extents;
use crate::file::File;
use crate::intake::Intake;
use crate::open_files::OpenFiles;

/// A file that is cut or written while it is read is read anew so often, and then without being changed meanwhile.
const LOOKS_MAX: usize = 10;

/// What a read has found.
#[derive(Default)]
struct Look {
    bytes: u64,
    /// How the file was before bytes of the backing were read, if any were.
    before: Option<FileChanges>,
    /// The backing had less than it should by what is pending after it.
    has_filled_gap: bool,
}

/// How often a file was changed.
#[derive(Clone, Copy)]
struct FileChanges {
    changes: u64,
    backing_changes: u32,
}

/// Reads files.
pub(crate) struct Reads<B: Backing> {
    pub(crate) base: Arc<Base<B>>,
    pub(crate) drain: Arc<Drain<B>>,
    pub(crate) intake: Arc<Intake<B>>,
    pub(crate) open_files: Arc<OpenFiles<B>>,
}

impl<B: Backing> Reads<B> {
    pub(crate) fn new(intake: &Arc<Intake<B>>, open_files: &Arc<OpenFiles<B>>) -> Self {
        Self {
            base: Arc::clone(&intake.base),
            drain: Arc::clone(&intake.drain),
            intake: Arc::clone(intake),
            open_files: Arc::clone(open_files),
        }
    }

    pub(crate) fn read_at_one_moment(
        &self,
        file: &Arc<File<B>>,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<u64> {
        for _ in 0..LOOKS_MAX {
            let look = self.read_once(file, offset, buf)?;
            if self.is_one_look(file, &look) {
                return Ok(look.bytes);
            }
        }
        // Programs cut and write the file faster than it is read.
        let mut state = file.begin_exclusive();
        let bytes = state.unlocked(|| self.read_exclusively(file, offset, buf));
        file.end_exclusive(&mut state);
        self.drain.enqueue(file, &mut state);
        bytes
    }

    /// Reads a file that no drain writes to and nothing cuts, as the caller has seen to.
    pub(crate) fn read_exclusively(
        &self,
        file: &Arc<File<B>>,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<u64> {
        self.read_once(file, offset, buf).map(|look| look.bytes)
    }

    /// Whether what was read is the file at some moment. Bytes of the backing are read after it was looked what is pending:
    /// where the file was cut and written again meanwhile, and a part of that was drained, the backing has holes that were
    /// never in the file. Waits for a truncation under way.
    fn is_one_look(&self, file: &Arc<File<B>>, look: &Look) -> bool {
        let Some(before) = look.before else {
            return true;
        };
        let mut state = file.lock();
        self.intake.ingest_published(file, &mut state);
        if state.drain.is_exclusive() && look.has_filled_gap {
            drop(state);
            drop(file.lock_settled());
            return false;
        }
        let is_changed = state.changes != before.changes;
        !is_changed || state.drain.backing_changes() == before.backing_changes
    }

    fn read_once(&self, file: &Arc<File<B>>, offset: u64, buf: &mut [u8]) -> Result<Look> {
        let end = offset.saturating_add(buf.len() as u64).min(i64::MAX as u64);
        let mut look = Look::default();
        if offset >= end {
            return Ok(look);
        }
        let mut state = file.lock();
        self.intake.revoke_grant(file, &mut state);
        let before = FileChanges {
            changes: state.changes,
            backing_changes: state.drain.backing_changes(),
        };
        // Up to here the file exists, whatever the backing's size says.
        let mut known_end = state.pending.end().min(end);
        #[allow(
            clippy::single_range_in_vec_init,
            reason = "a list of gaps that is one gap at first"
        )]
        let mut gaps = vec![offset..end];
        gaps = self.read_extents(state.pending.extents(), gaps, offset, buf)?;
        // What is cached is in the backing too, should the spill file not give it.
        if !state.cache.is_empty()
            && let Ok(left) = self.read_extents(state.cache.extents(), gaps.clone(), offset, buf)
        {
            gaps = left;
        }
        if gaps.last().is_none_or(|gap| gap.end < end) {
            known_end = end;
        }
        let source = state.open_reader();
        drop(state);
        if !gaps.is_empty() {
            look.before = Some(before);
            let source = source.map_or_else(|| self.open_files.reader(file), Ok)?;
            for gap in gaps {
                let out = &mut buf[(gap.start - offset) as usize..(gap.end - offset) as usize];
                let n = self.base.backing.read_at(&source.file, out, gap.start)?;
                out[n..].fill(0);
                let read_end = gap.start + n as u64;
                look.has_filled_gap |= read_end < gap.end.min(known_end);
                known_end = known_end.max(read_end);
            }
        }
        look.bytes = known_end.max(offset).min(end) - offset;
        Ok(look)
    }

    /// Fills the parts of `gaps` that `extents` have; `buf` begins at `offset` of the file. Returns what is
    /// left of the gaps.
    fn read_extents(
        &self,
        extents: &Extents,
        gaps: Vec<Range<u64>>,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<Vec<Range<u64>>> {
        let mut left = Vec::new();
        for gap in gaps {
            let mut at = gap.start;
            for (start, extent) in extents.within(gap.clone()) {
                if start > at {
                    left.push(at..start);
                }
                let out = &mut buf[(start - offset) as usize..][..extent.len as usize];
                self.base
                    .arena
                    .copy_out(extent.piece.slab, extent.position, out)?;
                at = start + extent.len;
            }
            if at < gap.end {
                left.push(at..gap.end);
            }
        }
        Ok(left)
    }
}
