//! Looks what the indexes of all hosts say, and how long the file is by them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::{Access, Backing, Errno, Result};
use firn_hosts::own;

use super::view::{Tail, View};
use super::{Container, TRIES_MAX};
use crate::frame::Change;
use crate::index_reader::{News, has_synced_frame_after, read_index};
use crate::names::Writer;
use crate::resolve::{Outline, WriterId};
use crate::seal::{ALL, SEAL_NAME, Seal};
use crate::table::{Table, TableError, TableResult};
use crate::times;

/// A look while others go on writing finds something new each time. After this many looks in a row, something earlier
/// may have been missed; a longer streak is most unlikely.
const SETTLING_LOOKS_MAX: usize = 16;

impl<B: Backing> Container<B> {
    /// Whether a sorted index that is used was found to be damaged.
    pub(super) fn has_damaged(&self) -> bool {
        let view = self.view.lock();
        view.tables.iter().any(|table| table.is_damaged())
    }

    /// Reads all indexes anew: damaged sorted ones unsorted, and what counts of them by `seal`. Meanwhile others read
    /// by what was known.
    pub(super) fn read_again(&self, base: &B, seal: Option<Arc<Seal>>) -> Result<()> {
        let (base_bytes, mut rejected, seal) = {
            let view = self.view.lock();
            let seal = seal.or_else(|| view.seal.clone());
            (view.resolver.base_bytes(), view.rejected.clone(), seal)
        };
        let mut damaged = self.damaged();
        for _ in 0..TRIES_MAX {
            rejected.extend(damaged);
            let mut view = View::new(base_bytes);
            view.seal = seal.clone();
            view.rejected = rejected.clone();
            let fresh = Self::unread(self.dir.clone(), &self.name, &self.host, &self.memory, view);
            match fresh.look(base) {
                Err(TableError::Damaged) => damaged = fresh.damaged(),
                Err(error) => return Err(error.into()),
                Ok(()) => {
                    let read = std::mem::replace(&mut *fresh.view.lock(), View::new(0));
                    self.exchange_view(read);
                    return Ok(());
                }
            }
        }
        Err(Errno::IO)
    }

    /// How many sorted indexes were found that are not used.
    pub(crate) fn count_rejected(&self) -> usize {
        self.view.lock().rejected.len()
    }

    fn damaged(&self) -> Vec<String> {
        let view = self.view.lock();
        let damaged = view.tables.iter().filter(|table| table.is_damaged());
        damaged.map(|table| table.name.clone()).collect()
    }

    fn exchange_view(&self, mut new: View<B>) {
        let mut view = self.view.lock();
        new.resolver.set_base(view.resolver.base_bytes());
        if new.seal.is_none() {
            new.keep_own(&view);
        }
        let old = std::mem::replace(&mut *view, new);
        self.note_news();
        drop(view);
        // Its files are closed after the lock is free.
        drop(old);
    }

    /// Reads what the other hosts have appended since the last time.
    pub fn refresh(&self, base: &B) -> Result<()> {
        match self.look(base) {
            Err(TableError::Damaged) => self.read_again(base, None),
            outcome => Ok(outcome?),
        }
    }

    /// Looks until all is seen that comes before what is seen: what another host wrote after it had read a third one's
    /// bytes may be read before those. How much was read of the indexes of others.
    pub(super) fn see_settled(&self, base: &B) -> Result<BTreeMap<Writer, u64>> {
        let mut seen = self.view.lock().seen();
        for _ in 0..SETTLING_LOOKS_MAX {
            self.refresh(base)?;
            let before = std::mem::replace(&mut seen, self.view.lock().seen());
            if before == seen {
                break;
            }
        }
        Ok(seen)
    }

    fn look(&self, base: &B) -> TableResult<()> {
        let names = own::list(base, &self.dir)?;
        if names.iter().any(|(name, ..)| name == ALL.as_bytes()) {
            self.was_seen_flat.store(true, Ordering::Release);
        }
        self.look_at_time(
            base,
            times::last(names.iter().map(|(name, ..)| name.as_slice())),
        )?;
        if self.view.lock().seal.is_none()
            && names.iter().any(|(name, ..)| name == SEAL_NAME.as_bytes())
        {
            return Ok(self.take_seal(base, Seal::load(base, &self.dir)?)?);
        }
        let tables: Vec<_> = names
            .iter()
            .filter_map(|(name, ..)| Writer::of_table(name))
            .collect();
        let mut writers: BTreeMap<String, Writer> = BTreeMap::new();
        let listed = names.iter().filter_map(|(name, ..)| Writer::of_index(name));
        // An index that counts and has no name any more is missed.
        let counting = self.seal().map_or_else(Vec::new, |seal| seal.writers());
        writers.extend(
            listed
                .chain(counting)
                .map(|writer| (writer.index_name(), writer)),
        );
        for writer in writers.values() {
            self.take_tables(base, writer, &tables)?;
            self.read_tail(base, writer)?;
        }
        self.settle_len(base)
    }

    /// Reads the last record of the file's time.
    pub(crate) fn look_at_time(&self, base: &B, last: Option<u64>) -> Result<()> {
        let known = (*self.time.lock()).map(|(number, _)| number);
        if let Some(last) = last.filter(|_| last > known)
            && let Some(record) = times::load(base, &self.dir, last)?
        {
            self.note_time(last, record);
        }
        Ok(())
    }

    /// Uses the sorted indexes that there are of an index.
    pub(super) fn take_tables(
        &self,
        base: &B,
        writer: &Writer,
        listed: &[(Writer, Range<u64>)],
    ) -> TableResult<()> {
        let of_writer = listed.iter().filter(|(of, _)| of == writer);
        let parts: Vec<&Range<u64>> = of_writer.map(|(_, part)| part).collect();
        if parts.is_empty() {
            return Ok(());
        }
        let (known, limit) = {
            let view = self.view.lock();
            let tail = view.tails.get(&writer.id());
            let known = tail.map_or_else(Vec::new, |tail| tail.cover.clone());
            (known, view.limit_of(writer))
        };
        let found = loop {
            let found = self.find_cover(base, writer, &parts, limit, &known)?;
            match self.find_ends(base, writer.id(), &found) {
                Ok(()) => break found,
                // One that is not used yet.
                Err(TableError::Damaged) if self.reject_damaged(&found) => {}
                Err(error) => return Err(error),
            }
        };
        let end = |cover: &[Arc<Table<B>>]| cover.last().map_or(0, |table| table.part().end);
        let is_better = match end(&found).cmp(&end(&known)) {
            std::cmp::Ordering::Greater => true,
            std::cmp::Ordering::Equal => found.len() < known.len(),
            std::cmp::Ordering::Less => false,
        };
        if is_better {
            let mut view = self.view.lock();
            let new = || Tail::new(writer.clone(), false);
            let tail = view.tails.entry(writer.id()).or_insert_with(new);
            let is_more = end(&found) > tail.offset;
            let old = view.set_cover(writer.id(), found);
            if is_more {
                self.note_news();
            }
            drop(view);
            drop(old);
        }
        Ok(())
    }

    /// Finds how long the file is by tables of `writer` that are to be used, after all cuts that there will be.
    fn find_ends(&self, base: &B, writer: WriterId, tables: &[Arc<Table<B>>]) -> TableResult<()> {
        let known = self.view.lock().resolver.outline();
        let mut outline = Outline::clone(&known);
        for table in tables {
            table.directory.cuts.tell(writer, &mut outline);
        }
        find_ends(base, tables, &outline)
    }

    /// Uses none of these that is damaged; whether there was one that is not in use.
    fn reject_damaged(&self, tables: &[Arc<Table<B>>]) -> bool {
        let mut view = self.view.lock();
        let is_used =
            |table: &Arc<Table<B>>| view.tables.iter().any(|used| Arc::ptr_eq(used, table));
        let damaged = tables
            .iter()
            .filter(|table| table.is_damaged() && !is_used(table));
        let damaged: Vec<String> = damaged.map(|table| table.name.clone()).collect();
        let is_any = !damaged.is_empty();
        view.rejected.extend(damaged);
        is_any
    }

    /// Finds the fewest tables that follow each other from the beginning of an index.
    fn find_cover(
        &self,
        base: &B,
        writer: &Writer,
        parts: &[&Range<u64>],
        limit: u64,
        known: &[Arc<Table<B>>],
    ) -> Result<Vec<Arc<Table<B>>>> {
        let mut cover: Vec<Arc<Table<B>>> = Vec::new();
        loop {
            let at = cover.last().map_or(0, |table| table.part().end);
            let next = parts
                .iter()
                .filter(|part| part.start == at && part.end <= limit);
            let mut next: Vec<_> = next.collect();
            next.sort_unstable_by_key(|part| std::cmp::Reverse(part.end));
            let before = cover.len();
            for part in next {
                let same = known
                    .iter()
                    .find(|table| table.part() == **part && !table.is_damaged());
                let table = match same {
                    Some(table) => Some(Arc::clone(table)),
                    None => self.open_table(base, writer, part)?,
                };
                if let Some(table) = table {
                    cover.push(table);
                    break;
                }
            }
            if cover.len() == before {
                return Ok(cover);
            }
        }
    }

    fn open_table(
        &self,
        base: &B,
        writer: &Writer,
        part: &Range<u64>,
    ) -> Result<Option<Arc<Table<B>>>> {
        let name = writer.table_name(part);
        if self.view.lock().rejected.contains(&name) {
            return Ok(None);
        }
        let table = Table::open(base, &self.dir, writer, part.clone())?;
        if table.is_none() {
            self.view.lock().rejected.insert(name);
        }
        Ok(table.map(Arc::new))
    }

    /// Reads the frames of another host's index that are not known yet.
    fn read_tail(&self, base: &B, writer: &Writer) -> Result<()> {
        let mut is_asked = false;
        loop {
            if self.is_own(writer.id()) {
                return Ok(());
            }
            let found = match self.find_tail(writer) {
                Some(found) => Some(found),
                None => self.open_index(base, writer)?,
            };
            if let Some((index, _)) = &found
                && !std::mem::replace(&mut is_asked, true)
            {
                // Else it is read as far as the client knew it.
                base.attr_of_file_now(index)?;
            }
            let limit = self.view.lock().limit_of(writer);
            let Some((index, offset)) = found else {
                return self.check_missing(writer, limit);
            };
            if self.skip_lost(writer, offset) {
                continue;
            }
            let news = read_index(base, &index, writer.id(), offset..limit)?;
            let is_end = news.to == offset;
            let is_all = news.is_all;
            let is_due = self.add_news(news);
            if is_due {
                self.sort(base, writer, self.memory.sort_others_bytes());
            }
            if is_end {
                return if is_all && limit == u64::MAX {
                    Ok(())
                } else {
                    self.check_end(base, &index, writer, offset, limit)
                };
            }
        }
    }

    /// Skips a part of an index that was given up as lost; returns whether there is one at `offset`.
    fn skip_lost(&self, writer: &Writer, offset: u64) -> bool {
        let mut view = self.view.lock();
        let seal = view.seal.clone();
        let end = seal.and_then(|seal| seal.lost.end_of_part(writer, offset));
        let tail = view.tails.get_mut(&writer.id());
        match (end, tail) {
            (Some(end), Some(tail)) => {
                tail.offset = tail.offset.max(end);
                true
            }
            _ => false,
        }
    }

    /// EIO where an index that counts is not there, and no sorted ones have all of it.
    fn check_missing(&self, writer: &Writer, limit: u64) -> Result<()> {
        let is_lost = |covered| {
            let seal = self.seal();
            seal.and_then(|seal| seal.lost.end_of_part(writer, covered)) == Some(limit)
        };
        let covered = self.covered(writer);
        if limit == u64::MAX || covered >= limit || is_lost(covered) {
            return Ok(());
        }
        self.note_fault(format!(
            "an index that counts is missing: the file cannot be read: container {}, index {}",
            self.name,
            writer.index_name()
        ));
        Err(Errno::IO)
    }

    /// EIO where the index is shorter than what counts of it, or a synced frame is not whole.
    fn check_end(
        &self,
        base: &B,
        index: &B::File,
        writer: &Writer,
        offset: u64,
        limit: u64,
    ) -> Result<()> {
        let is_damaged = match limit {
            u64::MAX => has_synced_frame_after(base, index, offset)?,
            limit => offset < limit,
        };
        if !is_damaged {
            return Ok(());
        }
        self.note_fault(format!(
            "a frame of an index that counts is not whole: the file cannot be read: container {}, index {}, offset {offset}",
            self.name,
            writer.index_name()
        ));
        Err(Errno::IO)
    }

    /// An index that is open, and how far it was read.
    fn find_tail(&self, writer: &Writer) -> Option<(Arc<B::File>, u64)> {
        let view = self.view.lock();
        let tail = view.tails.get(&writer.id())?;
        Some((tail.index.clone()?, tail.offset))
    }

    /// Finds how long the file is by sorted indexes, where that takes reading them.
    pub(super) fn settle_len(&self, base: &B) -> TableResult<()> {
        loop {
            let (outline, tables) = {
                let view = self.view.lock();
                (view.resolver.outline(), Arc::clone(&view.tables))
            };
            find_ends(base, &tables, &outline)?;
            let mut view = self.view.lock();
            let is_same = Arc::ptr_eq(&view.resolver.outline(), &outline);
            if is_same && Arc::ptr_eq(&view.tables, &tables) {
                view.note_tables_end();
                return Ok(());
            }
        }
    }

    /// From now on only that counts which the seal has. What was read beyond, of a host that was taken for dead, is
    /// forgotten with all else, and read again.
    pub(crate) fn take_seal(&self, base: &B, seal: Seal) -> Result<()> {
        if self.seal().is_some_and(|known| *known == seal) {
            return self.refresh(base);
        }
        self.read_again(base, Some(Arc::new(seal)))
    }

    /// How many bytes of each index are whole frames, durably.
    pub(crate) fn index_lengths(&self, base: &B) -> Result<Vec<(Writer, u64)>> {
        self.refresh(base)?;
        let mut lengths = Vec::new();
        for (name, ..) in own::list(base, &self.dir)? {
            let Some(writer) = Writer::of_index(&name) else {
                continue;
            };
            let Some(inode) = own::find_file(base, &self.dir, &writer.index_name())? else {
                continue;
            };
            let index = base.open(&inode, Access::Read)?;
            // What is decided to count is durable before that decision.
            base.sync(&index, true)?;
            base.attr_of_file_now(&index)?;
            let mut end = self.covered(&writer);
            loop {
                let news = read_index(base, &index, writer.id(), end..u64::MAX)?;
                if news.to == end {
                    break;
                }
                end = news.to;
            }
            lengths.push((writer, end));
        }
        Ok(lengths)
    }

    /// The last change in the last index that this host has made.
    pub(crate) fn last_change_of_own_index(&self, base: &B) -> Result<Option<Change>> {
        let names = own::list(base, &self.dir)?;
        let indexes = names.iter().filter_map(|(name, ..)| Writer::of_index(name));
        let own = indexes.filter(|writer| writer.host() == self.host);
        let Some(writer) = own.max_by_key(|writer| writer.id().life) else {
            return Ok(None);
        };
        let Some(inode) = own::find_file(base, &self.dir, &writer.index_name())? else {
            return Ok(None);
        };
        let index = base.open(&inode, Access::Read)?;
        let mut last = None;
        let mut end = 0;
        loop {
            let news = read_index(base, &index, writer.id(), end..u64::MAX)?;
            if news.to == end {
                return Ok(last);
            }
            end = news.to;
            let mut changes = news.frames.into_iter().map(|(_, frame)| frame.change);
            let last_of_these = changes.rfind(|change| *change != Change::Synced);
            last = last_of_these.or(last);
        }
    }

    /// Opens the index of another host, and says how far it was read; none if it is gone by now.
    fn open_index(&self, base: &B, writer: &Writer) -> Result<Option<(Arc<B::File>, u64)>> {
        let Some(inode) = own::find_file(base, &self.dir, &writer.index_name())? else {
            return Ok(None);
        };
        let index = Arc::new(base.open(&inode, Access::Read)?);
        let mut view = self.view.lock();
        let new = || Tail::new(writer.clone(), false);
        let tail = view.tails.entry(writer.id()).or_insert_with(new);
        let known = match &tail.index {
            Some(known) => Arc::clone(known),
            None => {
                tail.index = Some(Arc::clone(&index));
                index
            }
        };
        Ok(Some((known, tail.offset)))
    }

    /// Takes what was read; returns whether enough is unsorted to be sorted.
    fn add_news(&self, news: News) -> bool {
        let mut view = self.view.lock();
        let view = &mut *view;
        let Some(tail) = view.tails.get_mut(&news.writer) else {
            return false;
        };
        // Another thread may have read them too.
        if tail.offset != news.from {
            return false;
        }
        tail.offset = news.to;
        let is_more = !news.frames.is_empty();
        let is_due = tail.is_due(self.memory.sort_others_bytes());
        for (offset, frame) in news.frames {
            view.add(news.writer, offset, frame);
        }
        if is_more {
            self.note_news();
        }
        is_due
    }
}

/// Finds how long the file is by each of these tables, by what cuts left.
fn find_ends<B: Backing>(base: &B, tables: &[Arc<Table<B>>], outline: &Outline) -> TableResult<()> {
    let find = |table: &Arc<Table<B>>| table.find_end(base, outline.limits_of(table.writer));
    tables.iter().try_for_each(find)
}
