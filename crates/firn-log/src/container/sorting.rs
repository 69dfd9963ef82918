//! Sorts the indexes of a container: makes tables of their unsorted parts.
//!
//! Sorting only makes reads faster and saves memory. If it fails, the unsorted part stays in memory, and readers use
//! that. So callers get no error.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::{Access, Backing, Errno, Result};
use firn_hosts::own;

use super::Container;
use crate::index_reader::read_part;
use crate::names::Writer;
use crate::sort::Sorter;
use crate::table::Table;

impl<B: Backing> Container<B> {
    /// Makes tables of the unsorted part of an index. Each table is made from at most `bytes` bytes of the index, plus
    /// one frame.
    ///
    /// Does nothing if another thread is sorting in this container. After a failure the index must grow before it is
    /// sorted again.
    pub(super) fn sort(&self, base: &B, writer: &Writer, bytes: u64) {
        if self.is_sorting.swap(true, Ordering::AcqRel) {
            return;
        }
        let outcome = self.sort_parts(base, writer, bytes);
        self.is_sorting.store(false, Ordering::Release);
        if let Err(error) = outcome {
            tracing::debug!(index = writer.index_name(), %error, "an index stays unsorted");
            let mut view = self.view.lock();
            if let Some(state) = view.indexes.get_mut(&writer.id()) {
                state.sort_from = state.offset + self.memory.sort_others_bytes();
            }
        }
    }

    /// Makes tables until the known part of the index is sorted, and merges them.
    fn sort_parts(&self, base: &B, writer: &Writer, bytes: u64) -> Result<()> {
        let sorter = self.sorter(base, writer);
        loop {
            let Some(inode) = own::find_file(base, &self.dir, &writer.index_name())? else {
                return Ok(());
            };
            let index = base.open(&inode, Access::Read)?;
            let (covered, end, limit) = {
                let view = self.view.lock();
                let Some(state) = view.indexes.get(&writer.id()) else {
                    return Ok(());
                };
                (state.covered(), state.offset, view.limit_of(writer))
            };
            if covered >= end.min(limit) {
                return Ok(());
            }
            let part_end = limit.min(end).min(covered.saturating_add(bytes));
            let frames_read = read_part(base, &index, writer.id(), covered, part_end, limit)?;
            if frames_read.to == covered {
                return Ok(());
            }
            sorter.sort(frames_read.frames, covered..frames_read.to)?;
            self.use_new_tables(base, writer)?;
            while sorter.merge_level(&self.tables_of(writer))? {
                self.use_new_tables(base, writer)?;
            }
            if self.covered(writer) <= covered {
                // The new table is not in use, so further tables would not be either.
                return Err(Errno::IO);
            }
        }
    }

    fn sorter<'a>(&'a self, base: &'a B, writer: &'a Writer) -> Sorter<'a, B> {
        Sorter {
            base,
            dir: &self.dir,
            writer,
            turn: self.turn,
        }
    }

    /// Returns the tables in use of an index.
    fn tables_of(&self, writer: &Writer) -> Vec<Arc<Table<B>>> {
        let view = self.view.lock();
        let state = view.indexes.get(&writer.id());
        state.map_or_else(Vec::new, |state| state.cover.clone())
    }

    /// Lists the tables in the container, and uses those of one index.
    fn use_new_tables(&self, base: &B, writer: &Writer) -> Result<()> {
        let names = own::list(base, &self.dir)?;
        let tables = names.iter().filter_map(|(name, ..)| Writer::of_table(name));
        Ok(self.use_tables(base, writer, &tables.collect::<Vec<_>>())?)
    }

    /// Sorts this host's own index when the host ends writing, and merges its tables.
    pub fn sort_own(&self, base: &B) {
        let Some(own) = self.existing_own_log() else {
            return;
        };
        let writer = &own.writer;
        let is_due = {
            let view = self.view.lock();
            let state = view.indexes.get(&writer.id());
            state.is_some_and(|state| state.is_own && state.is_due(self.memory.sort_last_bytes()))
        };
        if is_due {
            self.sort(base, writer, self.memory.sort_bytes());
        }
        let merged = self
            .sorter(base, writer)
            .merge_last(&self.tables_of(writer));
        if let Err(error) = merged.and_then(|()| self.use_new_tables(base, writer)) {
            tracing::debug!(index = writer.index_name(), %error, "it stays in parts");
        }
    }
}
