//! Sorts the indexes of a container: makes tables of their unsorted parts.
//!
//! Terms
//! * A *container* is a directory with the logs of all hosts, for one file.
//! * An *index* lists the changes that one writer made to that file, in the order in which they were written.
//! * A *table* is a file with the changes of one part of an index, sorted by file offset.
//! * To *merge* is to make one table of several that cover adjacent parts of an index.
//!
//! Sorting only makes reads faster and saves memory. If it fails, readers use the unsorted part, which stays in memory.
//! So callers get no error.

use std::ops::Range;
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
    pub(super) fn sort(&self, backing: &B, writer: &Writer, bytes: u64) {
        if self.is_sorting.swap(true, Ordering::AcqRel) {
            return;
        }
        let outcome = self.sort_parts(backing, writer, bytes);
        self.is_sorting.store(false, Ordering::Release);
        if let Err(error) = outcome {
            tracing::debug!(index = writer.index_name(), %error, "an index stays unsorted");
            let mut view = self.view.lock();
            if let Some(state) = view.indexes.get_mut(&writer.id()) {
                state.sort_from = state.offset + self.memory.foreign_sort_threshold();
            }
        }
    }

    /// Makes tables (sorted files) until the index is sorted as far as this host has read it. A table is made from at
    /// most `bytes` bytes of the index, plus one frame (entry).
    ///
    /// After each new table, merges the last tables of the index as long as enough of them have the same level (were
    /// merged equally often). Fails with EIO if a new table does not come into use.
    fn sort_parts(&self, backing: &B, writer: &Writer, bytes: u64) -> Result<()> {
        let sorter = self.sorter(backing, writer);
        loop {
            let Some(inode) = own::find_file(backing, &self.dir, &writer.index_name())? else {
                return Ok(());
            };
            let index = backing.open(&inode, Access::Read)?;
            let Some(part) = self.next_unsorted_part(writer, bytes) else {
                return Ok(());
            };
            let sorted_end = part.range.start;
            let frames_read = read_part(backing, &index, writer.id(), part.range, part.limit)?;
            if frames_read.end == sorted_end {
                return Ok(());
            }
            sorter.sort(frames_read.frames, sorted_end..frames_read.end)?;
            self.use_new_tables(backing, writer)?;
            while sorter.merge_level(&self.tables_of(writer))? {
                self.use_new_tables(backing, writer)?;
            }
            if self.sorted_end(writer) <= sorted_end {
                // The new table was rejected as damaged, or is not visible in the listing yet. Tables must be adjacent,
                // so further ones would not come into use either.
                return Err(Errno::IO);
            }
        }
    }

    /// Returns the next part of an index to make a table of. It has at most `bytes` bytes, plus one frame. Returns
    /// `None` if the known part of the index is sorted.
    fn next_unsorted_part(&self, writer: &Writer, bytes: u64) -> Option<UnsortedPart> {
        let view = self.view.lock();
        let index = view.indexes.get(&writer.id())?;
        let limit = view.limit_of(writer);
        let known_end = index.offset.min(limit);
        let sorted_end = index.sorted_end();
        if sorted_end >= known_end {
            return None;
        }
        Some(UnsortedPart {
            range: sorted_end..known_end.min(sorted_end.saturating_add(bytes)),
            limit,
        })
    }

    /// Returns the sorter for the index of a writer.
    fn sorter<'a>(&'a self, backing: &'a B, writer: &'a Writer) -> Sorter<'a, B> {
        Sorter {
            backing,
            dir: &self.dir,
            writer,
            turn: self.turn,
        }
    }

    /// Returns the tables in use of an index.
    fn tables_of(&self, writer: &Writer) -> Vec<Arc<Table<B>>> {
        let view = self.view.lock();
        let state = view.indexes.get(&writer.id());
        state.map_or_else(Vec::new, |state| state.tables.clone())
    }

    /// Lists the tables in the container, and uses those of one index.
    fn use_new_tables(&self, backing: &B, writer: &Writer) -> Result<()> {
        let tables: Vec<_> = own::list(backing, &self.dir)?
            .iter()
            .filter_map(|(name, ..)| Writer::parse_table_name(name))
            .collect();
        Ok(self.select_tables(backing, writer, &tables)?)
    }

    /// Sorts and merges this host's own index after the host has ended writing.
    ///
    /// Sorts the unsorted part only if it has enough bytes to slow readers down. Failures are logged: then readers use
    /// the tables that exist.
    pub fn finish_own_index(&self, backing: &B) {
        let Some(own_log) = self.existing_own_log() else {
            return;
        };
        let writer = &own_log.writer;
        if self.has_slow_unsorted_part(writer) {
            self.sort(backing, writer, self.memory.own_sort_threshold());
        }
        let merged = self
            .sorter(backing, writer)
            .merge_final(&self.tables_of(writer));
        if let Err(error) = merged.and_then(|()| self.use_new_tables(backing, writer)) {
            tracing::debug!(index = writer.index_name(), %error, "the final merge of an index failed; its tables stay separate");
        }
    }

    /// Returns whether this host's index has enough unsorted bytes to slow readers down.
    fn has_slow_unsorted_part(&self, writer: &Writer) -> bool {
        let view = self.view.lock();
        let Some(index) = view.indexes.get(&writer.id()) else {
            return false;
        };
        index.is_own && index.should_sort(self.memory.final_sort_threshold())
    }
}

/// A part of an index that is in no table yet.
struct UnsortedPart {
    range: Range<u64>,
    /// How many bytes of the index count.
    limit: u64,
}
