//! Makes sorted indexes: of frames, and of smaller sorted indexes.
//!
//! A host sorts its own frames when there are too many for other hosts to keep in memory, and the rest when it ends
//! writing. So an index of any length is sorted with little memory: a part at a time, and parts of like size are
//! merged. Smaller parts stay: a host that was told that less of the index counts uses them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;
use std::sync::Arc;

use firn_backing::{Backing, Errno, Result};

use crate::cut::Growth;
use crate::frame::{Change, Frame, Span};
use crate::names::Writer;
use crate::resolve::{Key, Layer, layers_of};
use crate::table::{Cuts, Table, TableWriter};

/// This many tables of one level become one of the next.
const MERGED_TABLES: usize = 16;
/// A table that is this many times as long as those after it together stays as it is when a host ends writing.
const MUCH_LONGER: u64 = 4;

/// An index's place: the container's directory, and whose it is.
pub(crate) struct Sorter<'a, B: Backing> {
    pub(crate) base: &'a B,
    pub(crate) dir: &'a B::Inode,
    pub(crate) writer: &'a Writer,
    /// Turn of the host that sorts.
    pub(crate) turn: u64,
}

impl<B: Backing> Sorter<'_, B> {
    /// Makes a table of frames, which are with where they begin: those of `part` of the index.
    pub(crate) fn sort(&self, frames: Vec<(u64, Frame)>, part: Range<u64>) -> Result<()> {
        let (mut layers, mut spans, mut cuts) = (Vec::new(), Vec::new(), Cuts::default());
        let last_epoch = frames.iter().map(|(_, frame)| frame.epoch).max();
        for (offset, frame) in frames {
            let key = Key {
                epoch: frame.epoch,
                writer: self.writer.id(),
                frame: offset,
            };
            match frame.change {
                Change::Cut(cut) => cuts.add_cut(self.writer, offset, cut),
                Change::Grown(len) => cuts.growths.add(Growth { frame: offset, len }),
                Change::Synced => {}
                change @ (Change::Written(_) | Change::Zeroed(_)) => {
                    let (span, runs) = change.split();
                    let whole = layers_of(key, span.as_ref(), &runs);
                    layers.extend(whole.flat_map(Layer::split_if_short));
                    spans.extend(span.map(|span| (offset, span)));
                }
            }
        }
        layers.sort_unstable_by_key(order);
        let layers = layers.into_iter().map(Ok);
        let rest = (cuts, last_epoch.unwrap_or(0));
        self.make(0, part, layers, spans.into_iter().map(Ok), rest)
    }

    /// Merges the last tables of a cover where there are enough of a level; false if there are not.
    pub(crate) fn merge_level(&self, cover: &[Arc<Table<B>>]) -> Result<bool> {
        let Some(start) = cover.len().checked_sub(MERGED_TABLES) else {
            return Ok(false);
        };
        let last = &cover[start..];
        let level = last[0].directory.level;
        if last.iter().any(|table| table.directory.level != level) {
            return Ok(false);
        }
        self.merge(last)?;
        Ok(true)
    }

    /// Merges the last tables of a cover, from the first one that is not much longer than all after it together.
    pub(crate) fn merge_last(&self, cover: &[Arc<Table<B>>]) -> Result<()> {
        let mut bytes = 0u64;
        let mut start = cover.len();
        for (number, table) in cover.iter().enumerate().rev() {
            let own = table.part().end - table.part().start;
            if bytes > 0 && own / MUCH_LONGER > bytes {
                break;
            }
            bytes += own;
            start = number;
        }
        match cover.len() - start {
            0 | 1 => Ok(()),
            _ => self.merge(&cover[start..]),
        }
    }

    /// Makes one table of several, which follow each other.
    pub(crate) fn merge<'t>(&'t self, tables: &'t [Arc<Table<B>>]) -> Result<()> {
        let (Some(first), Some(last)) = (tables.first(), tables.last()) else {
            return Ok(());
        };
        let part = first.part().start..last.part().end;
        let levels = tables.iter().map(|table| table.directory.level);
        let level = levels.max().unwrap_or(0).saturating_add(1);
        let layers_of = |table: &'t Arc<Table<B>>| {
            let layers = table.layers(self.base);
            layers.map(|layer| layer.map_err(Errno::from))
        };
        let sources = tables.iter().map(layers_of);
        let layers = Merged::new(sources)?;
        let spans = tables.iter().flat_map(|table| table.spans(self.base));
        let spans = spans.map(|span| span.map_err(Errno::from));
        let mut cuts = Cuts::default();
        for table in tables {
            cuts.merge(&table.directory.cuts);
        }
        let epochs = tables.iter().map(|table| table.directory.last_epoch);
        let rest = (cuts, epochs.max().unwrap_or(0));
        self.make(level, part, layers, spans, rest)
    }

    fn make(
        &self,
        level: u8,
        part: Range<u64>,
        layers: impl Iterator<Item = Result<Layer>>,
        spans: impl Iterator<Item = Result<(u64, Span)>>,
        (cuts, last_epoch): (Cuts, u64),
    ) -> Result<()> {
        let mut table = TableWriter::create(self.base, self.dir, level, part, self.turn)?;
        table.set_cuts(cuts);
        table.note_epoch(last_epoch);
        match fill(&mut table, layers, spans) {
            Ok(()) => table.finish(self.writer),
            Err(error) => {
                table.abandon();
                Err(error)
            }
        }
    }
}

fn fill<B: Backing>(
    table: &mut TableWriter<'_, B>,
    layers: impl Iterator<Item = Result<Layer>>,
    spans: impl Iterator<Item = Result<(u64, Span)>>,
) -> Result<()> {
    for layer in layers {
        table.push_layer(&layer?)?;
    }
    for span in spans {
        let (frame, span) = span?;
        table.push_span(frame, &span)?;
    }
    Ok(())
}

/// First byte, key and length.
type Order = (u64, Key, u64);

fn order(layer: &Layer) -> Order {
    (layer.run.offset(), layer.key, layer.run.len())
}

/// Layers of several sorted sources, in order.
struct Merged<I> {
    sources: Vec<I>,
    heads: Vec<Option<Layer>>,
    /// The head of each source, by its order.
    queue: BinaryHeap<Reverse<(Order, usize)>>,
}

impl<I: Iterator<Item = Result<Layer>>> Merged<I> {
    fn new(sources: impl Iterator<Item = I>) -> Result<Self> {
        let mut merged = Self {
            sources: sources.collect(),
            heads: Vec::new(),
            queue: BinaryHeap::new(),
        };
        merged.heads.resize_with(merged.sources.len(), || None);
        for number in 0..merged.sources.len() {
            merged.advance(number)?;
        }
        Ok(merged)
    }

    fn advance(&mut self, number: usize) -> Result<()> {
        let next = self.sources[number].next().transpose()?;
        if let Some(layer) = &next {
            self.queue.push(Reverse((order(layer), number)));
        }
        self.heads[number] = next;
        Ok(())
    }

    fn take(&mut self) -> Result<Option<Layer>> {
        let Some(Reverse((_, number))) = self.queue.pop() else {
            return Ok(None);
        };
        let layer = self.heads[number].take().ok_or(Errno::IO)?;
        self.advance(number)?;
        Ok(Some(layer))
    }
}

impl<I: Iterator<Item = Result<Layer>>> Iterator for Merged<I> {
    type Item = Result<Layer>;

    fn next(&mut self) -> Option<Self::Item> {
        self.take().transpose()
    }
}
