//! Sorts the indexes of a container when there is much unsorted.

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
    /// Sorts what is unsorted of an index, in parts of at most `bytes` and a frame. What cannot be sorted is in memory
    /// instead, so no failure of it is one of the caller's.
    pub(super) fn sort(&self, base: &B, writer: &Writer, bytes: u64) {
        if self.is_sorting.swap(true, Ordering::AcqRel) {
            return;
        }
        let outcome = self.sort_parts(base, writer, bytes);
        self.is_sorting.store(false, Ordering::Release);
        if let Err(error) = outcome {
            tracing::debug!(index = writer.index_name(), %error, "an index stays unsorted");
            let mut view = self.view.lock();
            if let Some(tail) = view.tails.get_mut(&writer.id()) {
                tail.sort_from = tail.offset + self.memory.sort_others_bytes();
            }
        }
    }

    fn sort_parts(&self, base: &B, writer: &Writer, bytes: u64) -> Result<()> {
        let sorter = self.sorter(base, writer);
        loop {
            let Some(inode) = own::find_file(base, &self.dir, &writer.index_name())? else {
                return Ok(());
            };
            let index = base.open(&inode, Access::Read)?;
            let (covered, end, limit) = {
                let view = self.view.lock();
                let Some(tail) = view.tails.get(&writer.id()) else {
                    return Ok(());
                };
                (tail.covered(), tail.offset, view.limit_of(writer))
            };
            if covered >= end.min(limit) {
                return Ok(());
            }
            let part_end = limit.min(end).min(covered.saturating_add(bytes));
            let news = read_part(base, &index, writer.id(), covered, part_end, limit)?;
            if news.to == covered {
                return Ok(());
            }
            sorter.sort(news.frames, covered..news.to)?;
            self.take_own_tables(base, writer)?;
            while sorter.merge_level(&self.cover(writer))? {
                self.take_own_tables(base, writer)?;
            }
            if self.covered(writer) <= covered {
                // It was made, and is not used: nothing comes of going on.
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

    fn cover(&self, writer: &Writer) -> Vec<Arc<Table<B>>> {
        let view = self.view.lock();
        let tail = view.tails.get(&writer.id());
        tail.map_or_else(Vec::new, |tail| tail.cover.clone())
    }

    fn take_own_tables(&self, base: &B, writer: &Writer) -> Result<()> {
        let names = own::list(base, &self.dir)?;
        let tables = names.iter().filter_map(|(name, ..)| Writer::of_table(name));
        Ok(self.take_tables(base, writer, &tables.collect::<Vec<_>>())?)
    }

    /// Sorts what this host has written, which writes no more. A reader does without, and the container may be gone: no
    /// failure of it is one of the caller's.
    pub fn sort_own(&self, base: &B) {
        let Some(own) = self.made_own() else {
            return;
        };
        let writer = &own.writer;
        let is_due = {
            let view = self.view.lock();
            let tail = view.tails.get(&writer.id());
            tail.is_some_and(|tail| tail.is_own && tail.is_due(self.memory.sort_last_bytes()))
        };
        if is_due {
            self.sort(base, writer, self.memory.sort_bytes());
        }
        let merged = self.sorter(base, writer).merge_last(&self.cover(writer));
        if let Err(error) = merged.and_then(|()| self.take_own_tables(base, writer)) {
            tracing::debug!(index = writer.index_name(), %error, "it stays in parts");
        }
    }
}
