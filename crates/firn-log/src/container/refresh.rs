//! Refreshes what this host knows of a file in logs: reads what other hosts added to their indexes, and finds the
//! length of the file.
//!
//! Terms
//! * A *container* is a directory with the logs and indexes of all hosts, for one file.
//! * An *index* lists the changes of one host. Each entry is a *frame*.
//! * A *table* is a part of an index, sorted by offset in the file.
//! * The *seal* says how many bytes of each index count, once no host may write to the container any more.
//!
//! One pass lists the directory, then handles each index: it opens new tables and reads the frames after them. Once
//! there is a seal, the pass ignores bytes of an index beyond the length that the seal has for it.
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

use super::view::View;
use super::{Container, REBUILDS_MAX};
use crate::frame::Change;
use crate::index_reader::{FramesRead, has_synced_frame_after, read_index};
use crate::names::Writer;
use crate::resolve::{LengthChanges, WriterId};
use crate::seal::{DONE_ALL, SEAL_NAME, Seal};
use crate::table::{Table, TableError, TableResult};
use crate::times::{self, LastRecord};

/// Bound on the passes of a refresh that repeats until a pass finds nothing new ([`Container::refresh_until_stable`]).
/// While other hosts write all the time, each pass may find new changes. After this many passes, the refresh ends all
/// the same, and may have missed a change that precedes one that it found.
const REFRESHES_MAX: usize = 16;

impl<B: Backing> Container<B> {
    /// Returns whether a table in use was found to be damaged.
    pub(super) fn has_damaged_table(&self) -> bool {
        let view = self.view.lock();
        view.tables.iter().any(|table| table.is_damaged())
    }

    /// Reads all indexes anew into a new *view* (what this host knows of all indexes), and replaces the old view with
    /// it. Other threads use the old view meanwhile.
    ///
    /// Damaged tables are left out; the unsorted index is read in their place. With a seal, bytes of an index that do
    /// not count are left out too.
    pub(super) fn rebuild_view(&self, backing: &B, new_seal: Option<Arc<Seal>>) -> Result<()> {
        let (plain_bytes, mut rejected, seal) = {
            let view = self.view.lock();
            let seal = new_seal.or_else(|| view.seal.clone());
            (view.resolver.plain_bytes(), view.rejected.clone(), seal)
        };
        let mut damaged_tables = self.damaged_tables();
        for _ in 0..REBUILDS_MAX {
            rejected.extend(damaged_tables);
            let mut empty_view = View::new(plain_bytes);
            empty_view.seal = seal.clone();
            empty_view.rejected = rejected.clone();
            // `read_indexes` fills the view of a container. This second object of the same container has the new view
            // only, so that other threads never see a part of it.
            let rebuilt = Self::with_view(
                self.dir.clone(),
                &self.name,
                &self.host,
                &self.memory,
                empty_view,
            );
            match rebuilt.read_indexes(backing) {
                Ok(()) => {
                    // Take the filled view out of the second object, which is not used any more.
                    let new_view = std::mem::replace(&mut *rebuilt.view.lock(), View::new(0));
                    self.replace_view(new_view);
                    return Ok(());
                }
                Err(TableError::Damaged) => damaged_tables = rebuilt.damaged_tables(),
                Err(error) => return Err(error.into()),
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
        view.tables
            .iter()
            .filter(|table| table.is_damaged())
            .map(|table| table.name.clone())
            .collect()
    }

    /// Replaces the view with `new`, which gets this host's own changes from the old one.
    fn replace_view(&self, mut new_view: View<B>) {
        let mut view = self.view.lock();
        new_view
            .resolver
            .set_plain_bytes(view.resolver.plain_bytes());
        // A seal names all bytes that count, also those of this host.
        if new_view.seal.is_none() {
            new_view.copy_own(&view);
        }
        let old_view = std::mem::replace(&mut *view, new_view);
        self.record_change_by_others();
        drop(view);
        // The old view is dropped after the lock is released, because that closes files.
        drop(old_view);
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
            let new_offsets = self.view.lock().read_offsets();
            if new_offsets == offsets {
                break;
            }
            offsets = new_offsets;
        }
        Ok(offsets)
    }

    /// Reads what is new in all indexes (the lists of changes, one of each host), in one pass.
    fn read_indexes(&self, backing: &B) -> TableResult<()> {
        let entries = own::list(backing, &self.dir)?;
        let names: Vec<&[u8]> = entries.iter().map(|(name, ..)| name.as_slice()).collect();
        if names.contains(&DONE_ALL.as_bytes()) {
            self.was_seen_flat.store(true, Ordering::Release);
        }
        let last_time = times::last_record_number(names.iter().copied());
        self.load_time(backing, last_time)?;
        if self.view.lock().seal.is_none() && names.contains(&SEAL_NAME.as_bytes()) {
            // Applying the seal reads the indexes again, as far as they count.
            return Ok(self.apply_seal(backing, Seal::load(backing, &self.dir)?)?);
        }
        let tables: Vec<_> = names
            .iter()
            .filter_map(|name| Writer::parse_table_name(name))
            .collect();
        for writer in self.writers_to_read(&names).values() {
            self.select_tables(backing, writer, &tables)?;
            self.read_new_frames(backing, writer)?;
        }
        self.update_len(backing)
    }

    /// Returns the writers of all indexes, by the names of the indexes. An index that the seal names is included even
    /// if its file is gone, so that its absence is noticed.
    fn writers_to_read(&self, names: &[&[u8]]) -> BTreeMap<String, Writer> {
        let mut writers = BTreeMap::new();
        for name in names {
            if let Some(writer) = Writer::from_index_name(name) {
                writers.insert(writer.index_name(), writer);
            }
        }
        if let Some(seal) = self.seal() {
            for writer in seal.writers() {
                writers.insert(writer.index_name(), writer);
            }
        }
        writers
    }

    /// Reads record `last_number` of the file's modification time, if it is newer than the known one.
    pub(crate) fn load_time(&self, backing: &B, last_number: Option<u64>) -> Result<()> {
        let known_number = self.last_time_number();
        let Some(number) = last_number else {
            return Ok(());
        };
        if last_number <= known_number {
            return Ok(());
        }
        if let Some(record) = times::load(backing, &self.dir, number)? {
            self.store_last_time(LastRecord { number, record });
        }
        Ok(())
    }

    /// Selects the tables (sorted files, each with a part of the index) that reads use for the index of `writer`. The
    /// tables in use are replaced if others cover more of the index, or as much with fewer tables. Damaged tables are
    /// left out.
    ///
    /// `listed` are the tables of all indexes that the directory has.
    pub(super) fn select_tables(
        &self,
        backing: &B,
        writer: &Writer,
        listed: &[(Writer, Range<u64>)],
    ) -> TableResult<()> {
        let parts: Vec<&Range<u64>> = listed
            .iter()
            .filter(|(table_writer, _)| table_writer == writer)
            .map(|(_, part)| part)
            .collect();
        if parts.is_empty() {
            return Ok(());
        }
        let (tables_in_use, limit) = {
            let view = self.view.lock();
            let index = view.indexes.get(&writer.id());
            let tables = index.map_or_else(Vec::new, |index| index.tables.clone());
            (tables, view.limit_of(writer))
        };
        let new_tables = loop {
            let tables =
                self.choose_adjacent_tables(backing, writer, &parts, limit, &tables_in_use)?;
            match self.compute_ends_of_new(backing, writer.id(), &tables) {
                Ok(()) => break tables,
                // A new table is damaged. It is rejected now, and the loop selects again without it.
                Err(TableError::Damaged) if self.reject_damaged(&tables) => {}
                Err(error) => return Err(error),
            }
        };
        if is_better_cover(&new_tables, &tables_in_use) {
            self.replace_tables(writer, new_tables);
        }
        Ok(())
    }

    /// Replaces the tables in use of one index.
    fn replace_tables(&self, writer: &Writer, new_tables: Vec<Arc<Table<B>>>) {
        let mut view = self.view.lock();
        let index = view.find_or_add_index(writer, false);
        let has_unread_frames = end_of(&new_tables) > index.offset;
        let replaced_tables = view.install_tables(writer.id(), new_tables);
        if has_unread_frames {
            self.record_change_by_others();
        }
        drop(view);
        // The old tables are dropped after the lock is released, because that closes files.
        drop(replaced_tables);
    }

    /// Makes each of `tables` (sorted parts of an index) find and store where its last visible byte ends in the file,
    /// so that the length of the file is known without a further read. Fails with `Damaged` if a block is damaged.
    ///
    /// The tables are not in use yet, so the cuts and growths that they contain are applied here to a copy of the known
    /// ones.
    fn compute_ends_of_new(
        &self,
        backing: &B,
        writer: WriterId,
        tables: &[Arc<Table<B>>],
    ) -> TableResult<()> {
        let known_changes = self.view.lock().resolver.length_changes();
        let mut length_changes = LengthChanges::clone(&known_changes);
        for table in tables {
            table
                .directory
                .length_changes
                .apply_to(writer, &mut length_changes);
        }
        compute_ends(backing, tables, &length_changes)
    }

    /// Rejects the damaged ones of `tables`, unless they are in use. Returns whether there were any.
    fn reject_damaged(&self, tables: &[Arc<Table<B>>]) -> bool {
        let mut view = self.view.lock();
        let mut has_rejected = false;
        for table in tables {
            let is_in_use = view.tables.iter().any(|used| Arc::ptr_eq(used, table));
            if table.is_damaged() && !is_in_use {
                view.rejected.insert(table.name.clone());
                has_rejected = true;
            }
        }
        has_rejected
    }

    /// Returns adjacent tables (sorted parts) that cover an index from its beginning, up to `limit`. Prefers the
    /// longest ones, so they are few.
    fn choose_adjacent_tables(
        &self,
        backing: &B,
        writer: &Writer,
        parts: &[&Range<u64>],
        limit: u64,
        tables_in_use: &[Arc<Table<B>>],
    ) -> Result<Vec<Arc<Table<B>>>> {
        let mut tables: Vec<Arc<Table<B>>> = Vec::new();
        loop {
            let sorted_end = end_of(&tables);
            let mut candidates: Vec<_> = parts
                .iter()
                .filter(|part| part.start == sorted_end && part.end <= limit)
                .collect();
            candidates.sort_unstable_by_key(|part| std::cmp::Reverse(part.end));
            let mut next_table = None;
            for part in candidates {
                next_table = self.find_or_open_table(backing, writer, part, tables_in_use)?;
                if next_table.is_some() {
                    break;
                }
            }
            let Some(table) = next_table else {
                return Ok(tables);
            };
            tables.push(table);
        }
    }

    /// Returns the table of a part of an index, which may be in use already. Returns `None` if it is rejected or
    /// damaged.
    fn find_or_open_table(
        &self,
        backing: &B,
        writer: &Writer,
        part: &Range<u64>,
        tables_in_use: &[Arc<Table<B>>],
    ) -> Result<Option<Arc<Table<B>>>> {
        let in_use = tables_in_use
            .iter()
            .find(|table| table.part() == *part && !table.is_damaged());
        match in_use {
            Some(table) => Ok(Some(Arc::clone(table))),
            None => self.open_table(backing, writer, part),
        }
    }

    /// Opens a table, a sorted part of an index. Returns `None` if it is damaged or was rejected before.
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

    /// Reads new frames (changes) of another host's index, and checks that the index has all bytes that count. Before
    /// the container is sealed, those are all synced bytes. Fails with EIO if bytes that count are missing or damaged.
    fn read_new_frames(&self, backing: &B, writer: &Writer) -> Result<()> {
        let mut has_asked_length = false;
        // Each pass reads the state again: another thread may read the same index or apply a seal meanwhile.
        loop {
            // The view gets this host's own changes when they are made.
            if self.is_own(writer.id()) {
                return Ok(());
            }
            let open_index = match self.find_open_index(writer) {
                Some(open_index) => Some(open_index),
                None => self.open_index(backing, writer)?,
            };
            if let Some(OpenIndex { file, .. }) = &open_index
                && !has_asked_length
            {
                // Asks the server for the length. A read would otherwise end at the length that the client has cached.
                has_asked_length = true;
                backing.attr_of_file_now(file)?;
            }
            // How many bytes of the index count: the largest number before the container is sealed.
            let limit = self.view.lock().limit_of(writer);
            let Some(OpenIndex { file, offset }) = open_index else {
                return self.check_missing(writer, limit);
            };
            // Frames follow again after a part that was given up as damaged.
            if self.skip_lost(writer, offset) {
                continue;
            }
            let frames_read = read_index(backing, &file, writer.id(), offset..limit)?;
            let has_read_none = frames_read.end == offset;
            let reached_end = frames_read.reached_end;
            let should_sort = self.add_frames(frames_read);
            if should_sort {
                self.sort(backing, writer, self.memory.foreign_sort_threshold());
            }
            if has_read_none {
                let is_sealed = limit != u64::MAX;
                // The index ends with a complete frame, and no seal says that more bytes of it count.
                if reached_end && !is_sealed {
                    return Ok(());
                }
                return self.check_end(backing, &file, writer, offset, limit);
            }
        }
    }

    /// Skips a part of an index that was given up as lost. Returns whether such a part begins at `offset`.
    fn skip_lost(&self, writer: &Writer, offset: u64) -> bool {
        let mut view = self.view.lock();
        let Some(seal) = &view.seal else {
            return false;
        };
        let Some(lost_end) = seal.lost.end_of_lost_part(writer, offset) else {
            return false;
        };
        let Some(index) = view.indexes.get_mut(&writer.id()) else {
            return false;
        };
        index.offset = index.offset.max(lost_end);
        true
    }

    /// Fails with EIO if the file of an index (list of a host's changes) is missing although bytes of it count. It may
    /// be missing if tables, its sorted copies, have all these bytes, or if the rest was given up as damaged.
    fn check_missing(&self, writer: &Writer, limit: u64) -> Result<()> {
        let is_sealed = limit != u64::MAX;
        let sorted_end = self.sorted_end(writer);
        if !is_sealed || sorted_end >= limit {
            return Ok(());
        }
        if let Some(seal) = self.seal()
            && seal.lost.end_of_lost_part(writer, sorted_end) == Some(limit)
        {
            return Ok(());
        }
        self.record_fault(format!(
            "the logged file cannot be read, because an index of its logs is missing: container {}, index {}",
            self.name,
            writer.index_name()
        ));
        Err(Errno::IO)
    }

    /// Fails with EIO if the frames (entries) of an index end at `offset`, before the bytes that count end or before a
    /// synced frame.
    fn check_end(
        &self,
        backing: &B,
        index: &B::File,
        writer: &Writer,
        offset: u64,
        limit: u64,
    ) -> Result<()> {
        let is_sealed = limit != u64::MAX;
        let is_damaged = if is_sealed {
            offset < limit
        } else {
            has_synced_frame_after(backing, index, offset)?
        };
        if !is_damaged {
            return Ok(());
        }
        self.record_fault(format!(
            "the logged file cannot be read, because an entry of an index of its logs is damaged or missing: container \
             {}, index {}, offset {offset}",
            self.name,
            writer.index_name()
        ));
        Err(Errno::IO)
    }

    /// Returns another host's index if it is open.
    fn find_open_index(&self, writer: &Writer) -> Option<OpenIndex<B>> {
        let view = self.view.lock();
        let state = view.indexes.get(&writer.id())?;
        Some(OpenIndex {
            file: Arc::clone(state.file.as_ref()?),
            offset: state.offset,
        })
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
            compute_ends(backing, &tables, &length_changes)?;
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

    /// Syncs each index, so that a seal can count it. Returns how many bytes of it are complete frames (entries), by
    /// the name of the index.
    pub(crate) fn sync_and_measure_indexes(&self, backing: &B) -> Result<BTreeMap<String, u64>> {
        self.refresh(backing)?;
        let mut lengths = BTreeMap::new();
        for (name, ..) in own::list(backing, &self.dir)? {
            let Some(writer) = Writer::from_index_name(&name) else {
                continue;
            };
            let index_name = writer.index_name();
            let Some(inode) = own::find_file(backing, &self.dir, &index_name)? else {
                continue;
            };
            let index = backing.open(&inode, Access::Read)?;
            // The seal is made from these lengths, so the bytes are durable before the seal.
            let is_data_only = true;
            backing.sync(&index, is_data_only)?;
            // Asks the server for the length, as in `read_new_frames`.
            backing.attr_of_file_now(&index)?;
            let sorted_end = self.sorted_end(&writer);
            let end = find_end_of_frames(backing, &index, writer.id(), sorted_end)?;
            lengths.insert(index_name, end);
        }
        Ok(lengths)
    }

    /// Returns the last change in this host's last index, other than a note of a sync. Returns `None` if this host has
    /// changed nothing in the container.
    pub(crate) fn last_change_of_own_index(&self, backing: &B) -> Result<Option<Change>> {
        let last_writer = own::list(backing, &self.dir)?
            .iter()
            .filter_map(|(name, ..)| Writer::from_index_name(name))
            .filter(|writer| writer.host() == self.host)
            .max_by_key(|writer| writer.id().life);
        let Some(writer) = last_writer else {
            return Ok(None);
        };
        let Some(inode) = own::find_file(backing, &self.dir, &writer.index_name())? else {
            return Ok(None);
        };
        let index = backing.open(&inode, Access::Read)?;
        let mut last_change = None;
        let mut offset = 0;
        loop {
            let frames_read = read_index(backing, &index, writer.id(), offset..u64::MAX)?;
            if frames_read.end == offset {
                return Ok(last_change);
            }
            offset = frames_read.end;
            for (_, frame) in frames_read.frames {
                if frame.change != Change::Synced {
                    last_change = Some(frame.change);
                }
            }
        }
    }

    /// Opens another host's index. Returns `None` if it has no file.
    fn open_index(&self, backing: &B, writer: &Writer) -> Result<Option<OpenIndex<B>>> {
        let Some(inode) = own::find_file(backing, &self.dir, &writer.index_name())? else {
            return Ok(None);
        };
        let new_file = Arc::new(backing.open(&inode, Access::Read)?);
        let mut view = self.view.lock();
        let state = view.find_or_add_index(writer, false);
        // Another thread may have opened the index meanwhile. Its file is used then. The new one is dropped after the
        // lock is released, because that closes it.
        let file = state.file.get_or_insert_with(|| Arc::clone(&new_file));
        Ok(Some(OpenIndex {
            file: Arc::clone(file),
            offset: state.offset,
        }))
    }

    /// Adds frames (changes) that were read to the view, what this host knows of all indexes. Returns whether the index
    /// has enough unsorted bytes to be sorted.
    fn add_frames(&self, frames_read: FramesRead) -> bool {
        let mut view = self.view.lock();
        let Some(index) = view.indexes.get_mut(&frames_read.writer) else {
            return false;
        };
        // Another thread has read these frames meanwhile.
        if index.offset != frames_read.start {
            return false;
        }
        index.offset = frames_read.end;
        let should_sort = index.should_sort(self.memory.foreign_sort_threshold());
        let has_new_frames = !frames_read.frames.is_empty();
        for (offset, frame) in frames_read.frames {
            view.add(frames_read.writer, offset, frame);
        }
        if has_new_frames {
            self.record_change_by_others();
        }
        should_sort
    }
}

/// An open index of another host.
struct OpenIndex<B: Backing> {
    file: Arc<B::File>,
    /// Position in the index up to which it was read.
    offset: u64,
}

/// Returns the position in the index where the last of these tables ends.
fn end_of<B: Backing>(tables: &[Arc<Table<B>>]) -> u64 {
    tables.last().map_or(0, |table| table.part().end)
}

/// Returns whether new tables cover more of an index than those in use, or as much with fewer tables.
fn is_better_cover<B: Backing>(
    new_tables: &[Arc<Table<B>>],
    tables_in_use: &[Arc<Table<B>>],
) -> bool {
    let (new_end, used_end) = (end_of(new_tables), end_of(tables_in_use));
    new_end > used_end || (new_end == used_end && new_tables.len() < tables_in_use.len())
}

/// Finds where each of the tables ends in the file, after all cuts.
fn compute_ends<B: Backing>(
    backing: &B,
    tables: &[Arc<Table<B>>],
    length_changes: &LengthChanges,
) -> TableResult<()> {
    for table in tables {
        table.compute_visible_end(backing, length_changes.limits_of(table.writer))?;
    }
    Ok(())
}

/// Returns where the complete frames of an index end, which are read from `offset` on.
fn find_end_of_frames<B: Backing>(
    backing: &B,
    index: &B::File,
    writer: WriterId,
    offset: u64,
) -> Result<u64> {
    let mut end = offset;
    loop {
        let frames_read = read_index(backing, index, writer, end..u64::MAX)?;
        if frames_read.end == end {
            return Ok(end);
        }
        end = frames_read.end;
    }
}
