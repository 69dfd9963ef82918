//! Makes tables from the frames of an index, and merges small tables into larger ones (as a log-structured merge tree
//! does).
//!
//! An *index* lists the changes that one host made to a file, and a *frame* is one of its entries. A *table* is a part
//! of an index, sorted by offset in the file.
//!
//! A host sorts a part of its index before the part becomes too long for the memory of other hosts. It sorts the rest
//! when it ends writing. Tables of like size are then merged. So an index of any length is sorted with little memory.
//!
//! Merged tables are not removed. When all hosts have ended writing, one of them decides how much of each index counts.
//! If that is less than a merged table covers, the smaller ones are used.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;
use std::sync::Arc;

use firn_backing::{Backing, Errno, Result};

use crate::cut::Growth;
use crate::frame::{Change, Frame, Span};
use crate::names::Writer;
use crate::resolve::{ChangeKey, Layer, layers_of};
use crate::table::{StoredLengthChanges, Table, TableWriter};

/// Number of tables of one level that are merged into one of the next level.
const MERGED_TABLES: usize = 16;
/// When a host ends writing, its last tables are merged. A table is kept, and not merged, if it is more than this many
/// times as long as all tables after it together.
const KEEP_LENGTH_RATIO: u64 = 4;

/// Sorts one index: the container's directory, and the writer of the index.
pub(crate) struct Sorter<'a, B: Backing> {
    pub(crate) backing: &'a B,
    pub(crate) dir: &'a B::Inode,
    pub(crate) writer: &'a Writer,
    /// Turn of the sorting host, which selects the lane of its tables.
    pub(crate) turn: u64,
}

impl<B: Backing> Sorter<'_, B> {
    /// Writes the changes in a part of the index to a new table, a file with these changes sorted by file offset.
    /// `frames` are the entries of that part, each with its position in the index.
    ///
    /// A change of bytes becomes *layers* (its pieces of the file) and, unless the bytes are zeros, a *span* (their
    /// place in a log). Changes of the length are stored apart.
    pub(crate) fn sort(&self, frames: Vec<(u64, Frame)>, part: Range<u64>) -> Result<()> {
        let mut layers = Vec::new();
        let mut spans = Vec::new();
        let mut length_changes = StoredLengthChanges::default();
        let mut last_epoch = 0;
        for (offset, frame) in frames {
            last_epoch = last_epoch.max(frame.epoch);
            let key = ChangeKey {
                epoch: frame.epoch,
                writer: self.writer.id(),
                frame: offset,
            };
            match frame.change {
                Change::Cut(cut) => length_changes.add_cut(self.writer, offset, cut),
                Change::Grown(len) => length_changes.growths.add(Growth { frame: offset, len }),
                Change::Synced => {}
                change @ (Change::Written(_) | Change::Zeroed(_)) => {
                    let (span, runs) = change.split();
                    for layer in layers_of(key, span.as_ref(), &runs) {
                        // A run of few pieces is stored as one layer for each piece.
                        layers.extend(layer.split_if_short());
                    }
                    spans.extend(span.map(|span| (offset, span)));
                }
            }
        }
        layers.sort_unstable_by_key(sort_key);
        let contents = TableContents {
            layers: layers.into_iter().map(Ok),
            spans: spans.into_iter().map(Ok),
            length_changes,
            last_epoch,
        };
        // The contents of this table were never merged.
        let level = 0;
        self.write_table(level, part, contents)
    }

    /// Merges the last [`MERGED_TABLES`] tables of an index if they have the same level. Returns whether they had.
    pub(crate) fn merge_level(&self, tables: &[Arc<Table<B>>]) -> Result<bool> {
        let Some(first_merged) = tables.len().checked_sub(MERGED_TABLES) else {
            return Ok(false);
        };
        let last_tables = &tables[first_merged..];
        let level = last_tables[0].directory.level;
        if last_tables
            .iter()
            .any(|table| table.directory.level != level)
        {
            return Ok(false);
        }
        self.merge(last_tables)?;
        Ok(true)
    }

    /// Merges the last tables (sorted parts) of an index into one, so that readers have few tables to search. Called
    /// when the host has ended writing.
    ///
    /// A long table is not copied for a few short ones: the merge takes tables from the end, and stops before a table
    /// that is much longer than all after it together ([`KEEP_LENGTH_RATIO`]).
    pub(crate) fn merge_final(&self, tables: &[Arc<Table<B>>]) -> Result<()> {
        let mut merged_bytes = 0u64;
        let mut first_merged = tables.len();
        for (index, table) in tables.iter().enumerate().rev() {
            let table_bytes = table.part().end - table.part().start;
            let is_much_longer = table_bytes / KEEP_LENGTH_RATIO > merged_bytes;
            // The last table has none after it to compare with.
            let is_last_table = merged_bytes == 0;
            if !is_last_table && is_much_longer {
                break;
            }
            merged_bytes += table_bytes;
            first_merged = index;
        }
        if tables.len() - first_merged > 1 {
            self.merge(&tables[first_merged..])?;
        }
        Ok(())
    }

    /// Makes one table of several that cover adjacent parts of the index. A table is a sorted copy of a part.
    pub(crate) fn merge<'t>(&'t self, tables: &'t [Arc<Table<B>>]) -> Result<()> {
        let (Some(first), Some(last)) = (tables.first(), tables.last()) else {
            return Ok(());
        };
        let part = first.part().start..last.part().end;
        let mut level = 0;
        let mut last_epoch = 0;
        let mut length_changes = StoredLengthChanges::default();
        for table in tables {
            level = level.max(table.directory.level);
            last_epoch = last_epoch.max(table.directory.last_epoch);
            length_changes.merge(&table.directory.length_changes);
        }
        let layers_of_table = |table: &'t Arc<Table<B>>| {
            table
                .layers(self.backing)
                .map(|layer| layer.map_err(Errno::from))
        };
        let spans = tables
            .iter()
            .flat_map(|table| table.spans(self.backing))
            .map(|span| span.map_err(Errno::from));
        let contents = TableContents {
            layers: MergedLayers::new(tables.iter().map(layers_of_table))?,
            spans,
            length_changes,
            last_epoch,
        };
        self.write_table(level.saturating_add(1), part, contents)
    }

    /// Writes a new table, the sorted copy of a part of the index. Removes it after an error. `level` is how often its
    /// contents were merged.
    fn write_table(
        &self,
        level: u8,
        part: Range<u64>,
        contents: TableContents<
            impl Iterator<Item = Result<Layer>>,
            impl Iterator<Item = Result<(u64, Span)>>,
        >,
    ) -> Result<()> {
        let mut table = TableWriter::create(self.backing, self.dir, level, part, self.turn)?;
        match contents.write_to(&mut table) {
            Ok(()) => table.finish(self.writer),
            Err(error) => {
                table.abandon();
                Err(error)
            }
        }
    }
}

/// What a table is to hold.
struct TableContents<L, S> {
    /// The layers, in the order of the table.
    layers: L,
    /// The spans, each with the position of its frame, in the order of the index.
    spans: S,
    length_changes: StoredLengthChanges,
    /// The largest epoch of all changes.
    last_epoch: u64,
}

impl<L: Iterator<Item = Result<Layer>>, S: Iterator<Item = Result<(u64, Span)>>>
    TableContents<L, S>
{
    /// Adds the contents to an empty table.
    fn write_to<B: Backing>(self, table: &mut TableWriter<'_, B>) -> Result<()> {
        table.set_length_changes(self.length_changes);
        table.record_epoch(self.last_epoch);
        for layer in self.layers {
            table.push_layer(&layer?)?;
        }
        for span in self.spans {
            let (frame, span) = span?;
            table.push_span(frame, &span)?;
        }
        Ok(())
    }
}

/// Sort key of a layer: its first byte, its change, and its length, which makes the order complete.
type SortKey = (u64, ChangeKey, u64);

/// Returns the sort key of a layer.
fn sort_key(layer: &Layer) -> SortKey {
    (layer.run.offset(), layer.key, layer.run.len())
}

/// Merges several sorted sources of layers into one.
struct MergedLayers<I> {
    sources: Vec<I>,
    /// The next layer of each source; `None` at its end.
    heads: Vec<Option<Layer>>,
    /// Sort keys of the next layers, each with the index of its source.
    queue: BinaryHeap<Reverse<(SortKey, usize)>>,
}

impl<I: Iterator<Item = Result<Layer>>> MergedLayers<I> {
    /// Merges sources of layers. Fails if the first layer of a source cannot be read.
    fn new(sources: impl Iterator<Item = I>) -> Result<Self> {
        let mut merged = Self {
            sources: sources.collect(),
            heads: Vec::new(),
            queue: BinaryHeap::new(),
        };
        merged.heads.resize_with(merged.sources.len(), || None);
        for index in 0..merged.sources.len() {
            merged.advance(index)?;
        }
        Ok(merged)
    }

    /// Reads the next layer of a source.
    fn advance(&mut self, index: usize) -> Result<()> {
        let next_layer = self.sources[index].next().transpose()?;
        if let Some(layer) = &next_layer {
            self.queue.push(Reverse((sort_key(layer), index)));
        }
        self.heads[index] = next_layer;
        Ok(())
    }

    /// Removes and returns the first of the next layers.
    fn pop_first(&mut self) -> Result<Option<Layer>> {
        let Some(Reverse((_, index))) = self.queue.pop() else {
            return Ok(None);
        };
        let layer = self.heads[index].take().ok_or(Errno::IO)?;
        self.advance(index)?;
        Ok(Some(layer))
    }
}

impl<I: Iterator<Item = Result<Layer>>> Iterator for MergedLayers<I> {
    type Item = Result<Layer>;

    fn next(&mut self) -> Option<Self::Item> {
        self.pop_first().transpose()
    }
}
