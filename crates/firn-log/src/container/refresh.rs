//! Refreshes a container: reads what other hosts added to their indexes, and finds the length of the file.
//!
//! One pass lists the directory, then handles each index: it opens new tables and reads the frames after them. After
//! the seal was found, only the bytes of each index that the seal names count.
//!
//! Races
//! * Two threads may read the same frames. The second one finds that the position has moved, and drops its frames.
//! * Another host may remove files of the container once it is flat. If a refresh fails, callers check for this case.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::{Access, Backing, Errno, Result};
use firn_hosts::own;

use super::view::{IndexState, View};
use super::{Container, REBUILDS_MAX};
use crate::frame::Change;
use crate::index_reader::{FramesRead, has_synced_frame_after, read_index};
use crate::names::Writer;
use crate::resolve::{LengthChanges, WriterId};
use crate::seal::{DONE_ALL, SEAL_NAME, Seal};
use crate::table::{Table, TableError, TableResult};
use crate::times;

/// Bound on the passes that look for a state without new changes. Each pass may find new changes while other hosts
/// write. Sixteen such passes in a row are most unlikely, and then an earlier change may be missed.
const REFRESHES_MAX: usize = 16;

impl<B: Backing> Container<B> {
    /// Returns whether a table in use was found to be damaged.
    pub(super) fn has_damaged_table(&self) -> bool {
        let view = self.view.lock();
        view.tables.iter().any(|table| table.is_damaged())
    }

    /// Builds a new view from all indexes, and replaces the old view with it. Damaged tables are left out. With a seal,
    /// only the bytes that it names count.
    ///
    /// Other threads use the old view meanwhile. An index whose table is damaged is read unsorted.
    pub(super) fn rebuild_view(&self, backing: &B, seal: Option<Arc<Seal>>) -> Result<()> {
        let (plain_bytes, mut rejected, seal) = {
            let view = self.view.lock();
            let seal = seal.or_else(|| view.seal.clone());
            (view.resolver.plain_bytes(), view.rejected.clone(), seal)
        };
        let mut damaged = self.damaged_tables();
        for _ in 0..REBUILDS_MAX {
            rejected.extend(damaged);
            let mut view = View::new(plain_bytes);
            view.seal = seal.clone();
            view.rejected = rejected.clone();
            let fresh =
                Self::with_view(self.dir.clone(), &self.name, &self.host, &self.memory, view);
            match fresh.read_indexes(backing) {
                Err(TableError::Damaged) => damaged = fresh.damaged_tables(),
                Err(error) => return Err(error.into()),
                Ok(()) => {
                    let view = std::mem::replace(&mut *fresh.view.lock(), View::new(0));
                    self.replace_view(view);
                    return Ok(());
                }
            }
        }
        Err(Errno::IO)
    }

    /// Returns how many tables were rejected because they are damaged.
    pub(crate) fn rejected_table_count(&self) -> usize {
        self.view.lock().rejected.len()
    }

    /// Returns the names of the tables in use that are damaged.
    fn damaged_tables(&self) -> Vec<String> {
        let view = self.view.lock();
        let damaged = view.tables.iter().filter(|table| table.is_damaged());
        damaged.map(|table| table.name.clone()).collect()
    }

    /// Replaces the view with `new`, which gets this host's own changes from the old one.
    fn replace_view(&self, mut new: View<B>) {
        let mut view = self.view.lock();
        new.resolver.set_plain_bytes(view.resolver.plain_bytes());
        if new.seal.is_none() {
            new.copy_own(&view);
        }
        let old = std::mem::replace(&mut *view, new);
        self.record_change_by_others();
        drop(view);
        // The old view is dropped after the lock is released, because that closes files.
        drop(old);
    }

    /// Reads what other hosts have appended to their indexes since the last call.
    pub fn refresh(&self, backing: &B) -> Result<()> {
        match self.read_indexes(backing) {
            Err(TableError::Damaged) => self.rebuild_view(backing, None),
            outcome => Ok(outcome?),
        }
    }

    /// Refreshes until a pass finds nothing new, and returns how far the index of each other host was read.
    ///
    /// Race: host A may write after it has read a change of host B. One pass may read A's index after B's, and so see
    /// A's change without B's. The next pass sees B's change.
    pub(super) fn refresh_until_stable(&self, backing: &B) -> Result<BTreeMap<Writer, u64>> {
        let mut offsets = self.view.lock().read_offsets();
        for _ in 0..REFRESHES_MAX {
            self.refresh(backing)?;
            let before = std::mem::replace(&mut offsets, self.view.lock().read_offsets());
            if before == offsets {
                break;
            }
        }
        Ok(offsets)
    }

    /// Makes one pass over all indexes.
    fn read_indexes(&self, backing: &B) -> TableResult<()> {
        let names = own::list(backing, &self.dir)?;
        if names.iter().any(|(name, ..)| name == DONE_ALL.as_bytes()) {
            self.was_seen_flat.store(true, Ordering::Release);
        }
        self.load_time(
            backing,
            times::last_record_number(names.iter().map(|(name, ..)| name.as_slice())),
        )?;
        if self.view.lock().seal.is_none()
            && names.iter().any(|(name, ..)| name == SEAL_NAME.as_bytes())
        {
            return Ok(self.apply_seal(backing, Seal::load(backing, &self.dir)?)?);
        }
        let tables: Vec<_> = names
            .iter()
            .filter_map(|(name, ..)| Writer::parse_table_name(name))
            .collect();
        let mut writers: BTreeMap<String, Writer> = BTreeMap::new();
        let listed = names
            .iter()
            .filter_map(|(name, ..)| Writer::from_index_name(name));
        // An index that the seal names is handled also if its file is gone, so that its absence is noticed.
        let sealed = self.seal().map_or_else(Vec::new, |seal| seal.writers());
        writers.extend(
            listed
                .chain(sealed)
                .map(|writer| (writer.index_name(), writer)),
        );
        for writer in writers.values() {
            self.use_tables(backing, writer, &tables)?;
            self.read_new_frames(backing, writer)?;
        }
        self.update_len(backing)
    }

    /// Reads record `last` of the file's modification time, if it is newer than the known one.
    pub(crate) fn load_time(&self, backing: &B, last: Option<u64>) -> Result<()> {
        let known_number = (*self.time.lock()).map(|(number, _)| number);
        if let Some(last) = last.filter(|_| last > known_number)
            && let Some(record) = times::load(backing, &self.dir, last)?
        {
            self.store_known_time(last, record);
        }
        Ok(())
    }

    /// Uses the tables in `listed` that cover more of the index of `writer` than those in use, or as much with fewer
    /// tables.
    pub(super) fn use_tables(
        &self,
        backing: &B,
        writer: &Writer,
        listed: &[(Writer, Range<u64>)],
    ) -> TableResult<()> {
        let of_writer = listed
            .iter()
            .filter(|(table_writer, _)| table_writer == writer);
        let parts: Vec<&Range<u64>> = of_writer.map(|(_, part)| part).collect();
        if parts.is_empty() {
            return Ok(());
        }
        let (in_use, limit) = {
            let view = self.view.lock();
            let state = view.indexes.get(&writer.id());
            let in_use = state.map_or_else(Vec::new, |state| state.cover.clone());
            (in_use, view.limit_of(writer))
        };
        let cover = loop {
            let cover = self.find_adjacent_tables(backing, writer, &parts, limit, &in_use)?;
            match self.find_ends(backing, writer.id(), &cover) {
                Ok(()) => break cover,
                // The damaged table is not in use yet: it is rejected, and the others are tried.
                Err(TableError::Damaged) if self.reject_damaged(&cover) => {}
                Err(error) => return Err(error),
            }
        };
        let end = |cover: &[Arc<Table<B>>]| cover.last().map_or(0, |table| table.part().end);
        let is_better = match end(&cover).cmp(&end(&in_use)) {
            std::cmp::Ordering::Greater => true,
            std::cmp::Ordering::Equal => cover.len() < in_use.len(),
            std::cmp::Ordering::Less => false,
        };
        if is_better {
            let mut view = self.view.lock();
            let new = || IndexState::new(writer.clone(), false);
            let state = view.indexes.entry(writer.id()).or_insert_with(new);
            let has_more = end(&cover) > state.offset;
            let old = view.set_tables(writer.id(), cover);
            if has_more {
                self.record_change_by_others();
            }
            drop(view);
            drop(old);
        }
        Ok(())
    }

    /// Finds where each of `tables` ends in the file, with the cuts and growths that these tables add.
    fn find_ends(
        &self,
        backing: &B,
        writer: WriterId,
        tables: &[Arc<Table<B>>],
    ) -> TableResult<()> {
        let present = self.view.lock().resolver.length_changes();
        let mut length_changes = LengthChanges::clone(&present);
        for table in tables {
            table.directory.cuts.apply_to(writer, &mut length_changes);
        }
        find_ends(backing, tables, &length_changes)
    }

    /// Rejects the damaged ones of `tables`, unless they are in use. Returns whether there were any.
    fn reject_damaged(&self, tables: &[Arc<Table<B>>]) -> bool {
        let mut view = self.view.lock();
        let is_used =
            |table: &Arc<Table<B>>| view.tables.iter().any(|used| Arc::ptr_eq(used, table));
        let damaged = tables
            .iter()
            .filter(|table| table.is_damaged() && !is_used(table));
        let damaged: Vec<String> = damaged.map(|table| table.name.clone()).collect();
        let has_new_damage = !damaged.is_empty();
        view.rejected.extend(damaged);
        has_new_damage
    }

    /// Returns adjacent tables that cover an index from its beginning, up to `limit`. Prefers the longest ones, so they
    /// are few.
    fn find_adjacent_tables(
        &self,
        backing: &B,
        writer: &Writer,
        parts: &[&Range<u64>],
        limit: u64,
        in_use: &[Arc<Table<B>>],
    ) -> Result<Vec<Arc<Table<B>>>> {
        let mut cover: Vec<Arc<Table<B>>> = Vec::new();
        loop {
            let covered = cover.last().map_or(0, |table| table.part().end);
            let next = parts
                .iter()
                .filter(|part| part.start == covered && part.end <= limit);
            let mut next: Vec<_> = next.collect();
            next.sort_unstable_by_key(|part| std::cmp::Reverse(part.end));
            let before = cover.len();
            for part in next {
                let same = in_use
                    .iter()
                    .find(|table| table.part() == **part && !table.is_damaged());
                let table = match same {
                    Some(table) => Some(Arc::clone(table)),
                    None => self.open_table(backing, writer, part)?,
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

    /// Opens a table. Returns `None` if it is rejected or damaged.
    fn open_table(
        &self,
        backing: &B,
        writer: &Writer,
        part: &Range<u64>,
    ) -> Result<Option<Arc<Table<B>>>> {
        let name = writer.table_name(part);
        if self.view.lock().rejected.contains(&name) {
            return Ok(None);
        }
        let table = Table::open(backing, &self.dir, writer, part.clone())?;
        if table.is_none() {
            self.view.lock().rejected.insert(name);
        }
        Ok(table.map(Arc::new))
    }

    /// Reads new frames of another host's index, and checks that the index has all bytes that count.
    fn read_new_frames(&self, backing: &B, writer: &Writer) -> Result<()> {
        let mut has_asked_length = false;
        loop {
            if self.is_own(writer.id()) {
                return Ok(());
            }
            let opened = match self.find_open_index(writer) {
                Some(opened) => Some(opened),
                None => self.open_index(backing, writer)?,
            };
            if let Some((index, _)) = &opened
                && !std::mem::replace(&mut has_asked_length, true)
            {
                // Asks the server for the length. A read would otherwise end at the length that the client has cached.
                backing.attr_of_file_now(index)?;
            }
            let limit = self.view.lock().limit_of(writer);
            let Some((index, offset)) = opened else {
                return self.check_missing(writer, limit);
            };
            if self.skip_lost(writer, offset) {
                continue;
            }
            let frames_read = read_index(backing, &index, writer.id(), offset..limit)?;
            let has_read_none = frames_read.to == offset;
            let reached_end = frames_read.reached_end;
            let is_due = self.add_frames(frames_read);
            if is_due {
                self.sort(backing, writer, self.memory.foreign_sort_threshold());
            }
            if has_read_none {
                return if reached_end && limit == u64::MAX {
                    Ok(())
                } else {
                    self.check_end(backing, &index, writer, offset, limit)
                };
            }
        }
    }

    /// Skips a part of an index that was given up as lost. Returns whether such a part begins at `offset`.
    fn skip_lost(&self, writer: &Writer, offset: u64) -> bool {
        let mut view = self.view.lock();
        let seal = view.seal.clone();
        let end = seal.and_then(|seal| seal.lost.end_of_lost_part(writer, offset));
        let state = view.indexes.get_mut(&writer.id());
        match (end, state) {
            (Some(end), Some(state)) => {
                state.offset = state.offset.max(end);
                true
            }
            _ => false,
        }
    }

    /// Fails with EIO if an index has no file, but has bytes that count and that neither tables nor given-up parts
    /// replace.
    fn check_missing(&self, writer: &Writer, limit: u64) -> Result<()> {
        let is_lost = |covered| {
            let seal = self.seal();
            seal.and_then(|seal| seal.lost.end_of_lost_part(writer, covered)) == Some(limit)
        };
        let covered = self.covered(writer);
        if limit == u64::MAX || covered >= limit || is_lost(covered) {
            return Ok(());
        }
        self.record_fault(format!(
            "an index with bytes that count is missing, so the logged file cannot be read: container {}, index {}",
            self.name,
            writer.index_name()
        ));
        Err(Errno::IO)
    }

    /// Fails with EIO if the frames of an index end at `offset`, before the bytes that count end or before a synced
    /// frame.
    fn check_end(
        &self,
        backing: &B,
        index: &B::File,
        writer: &Writer,
        offset: u64,
        limit: u64,
    ) -> Result<()> {
        let is_damaged = match limit {
            u64::MAX => has_synced_frame_after(backing, index, offset)?,
            limit => offset < limit,
        };
        if !is_damaged {
            return Ok(());
        }
        self.record_fault(format!(
            "a frame that counts is damaged or missing, so the logged file cannot be read: container {}, index {}, offset {offset}",
            self.name,
            writer.index_name()
        ));
        Err(Errno::IO)
    }

    /// Returns the file of an open index, and how far it was read.
    fn find_open_index(&self, writer: &Writer) -> Option<(Arc<B::File>, u64)> {
        let view = self.view.lock();
        let state = view.indexes.get(&writer.id())?;
        Some((state.index.clone()?, state.offset))
    }

    /// Finds the length of the file by the tables. Reads blocks of tables where a cut hides their last bytes.
    ///
    /// Race: another thread may change the tables or cuts meanwhile. Then the search begins again.
    pub(super) fn update_len(&self, backing: &B) -> TableResult<()> {
        loop {
            let (length_changes, tables) = {
                let view = self.view.lock();
                (view.resolver.length_changes(), Arc::clone(&view.tables))
            };
            find_ends(backing, &tables, &length_changes)?;
            let mut view = self.view.lock();
            let is_same = Arc::ptr_eq(&view.resolver.length_changes(), &length_changes);
            if is_same && Arc::ptr_eq(&view.tables, &tables) {
                view.update_tables_end();
                return Ok(());
            }
        }
    }

    /// Applies a seal: from now on only the bytes of each index that the seal names count.
    ///
    /// This host may have read more bytes of the index of a host that was taken for dead. So the view is built again.
    pub(crate) fn apply_seal(&self, backing: &B, seal: Seal) -> Result<()> {
        if self.seal().is_some_and(|known| *known == seal) {
            return self.refresh(backing);
        }
        self.rebuild_view(backing, Some(Arc::new(seal)))
    }

    /// Syncs each index, and returns how many bytes of it are complete frames.
    pub(crate) fn sync_and_measure_indexes(&self, backing: &B) -> Result<Vec<(Writer, u64)>> {
        self.refresh(backing)?;
        let mut lengths = Vec::new();
        for (name, ..) in own::list(backing, &self.dir)? {
            let Some(writer) = Writer::from_index_name(&name) else {
                continue;
            };
            let Some(inode) = own::find_file(backing, &self.dir, &writer.index_name())? else {
                continue;
            };
            let index = backing.open(&inode, Access::Read)?;
            // The seal is made from these lengths, so the bytes are durable before the seal.
            backing.sync(&index, true)?;
            backing.attr_of_file_now(&index)?;
            let mut end = self.covered(&writer);
            loop {
                let frames_read = read_index(backing, &index, writer.id(), end..u64::MAX)?;
                if frames_read.to == end {
                    break;
                }
                end = frames_read.to;
            }
            lengths.push((writer, end));
        }
        Ok(lengths)
    }

    /// Returns the last change in this host's last index, other than a note of a sync.
    pub(crate) fn last_change_of_own_index(&self, backing: &B) -> Result<Option<Change>> {
        let names = own::list(backing, &self.dir)?;
        let indexes = names
            .iter()
            .filter_map(|(name, ..)| Writer::from_index_name(name));
        let own = indexes.filter(|writer| writer.host() == self.host);
        let Some(writer) = own.max_by_key(|writer| writer.id().life) else {
            return Ok(None);
        };
        let Some(inode) = own::find_file(backing, &self.dir, &writer.index_name())? else {
            return Ok(None);
        };
        let index = backing.open(&inode, Access::Read)?;
        let mut last = None;
        let mut end = 0;
        loop {
            let frames_read = read_index(backing, &index, writer.id(), end..u64::MAX)?;
            if frames_read.to == end {
                return Ok(last);
            }
            end = frames_read.to;
            let mut changes = frames_read
                .frames
                .into_iter()
                .map(|(_, frame)| frame.change);
            let last_read = changes.rfind(|change| *change != Change::Synced);
            last = last_read.or(last);
        }
    }

    /// Opens another host's index. Returns its file and how far it was read, or `None` if there is no such file.
    fn open_index(&self, backing: &B, writer: &Writer) -> Result<Option<(Arc<B::File>, u64)>> {
        let Some(inode) = own::find_file(backing, &self.dir, &writer.index_name())? else {
            return Ok(None);
        };
        let index = Arc::new(backing.open(&inode, Access::Read)?);
        let mut view = self.view.lock();
        let new = || IndexState::new(writer.clone(), false);
        let state = view.indexes.entry(writer.id()).or_insert_with(new);
        let file = match &state.index {
            Some(file) => Arc::clone(file),
            None => {
                state.index = Some(Arc::clone(&index));
                index
            }
        };
        Ok(Some((file, state.offset)))
    }

    /// Adds frames that were read to the view. Returns whether the index has enough unsorted bytes to be sorted.
    fn add_frames(&self, frames_read: FramesRead) -> bool {
        let mut view = self.view.lock();
        let view = &mut *view;
        let Some(state) = view.indexes.get_mut(&frames_read.writer) else {
            return false;
        };
        // Another thread has read these frames meanwhile.
        if state.offset != frames_read.from {
            return false;
        }
        state.offset = frames_read.to;
        let has_new_frames = !frames_read.frames.is_empty();
        let is_due = state.is_due(self.memory.foreign_sort_threshold());
        for (offset, frame) in frames_read.frames {
            view.add(frames_read.writer, offset, frame);
        }
        if has_new_frames {
            self.record_change_by_others();
        }
        is_due
    }
}

/// Finds where each of the tables ends in the file, after all cuts.
fn find_ends<B: Backing>(
    backing: &B,
    tables: &[Arc<Table<B>>],
    length_changes: &LengthChanges,
) -> TableResult<()> {
    let find =
        |table: &Arc<Table<B>>| table.compute_end(backing, length_changes.limits_of(table.writer));
    tables.iter().try_for_each(find)
}
