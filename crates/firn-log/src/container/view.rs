//! The view: what this host has read of the indexes of a container.
//!
//! Invariants
//! * The tables of an index follow each other without gaps from the beginning of the index.
//! * The resolver holds changes of bytes only from where the tables end. It holds all cuts and growths.
//! * An index is read at least as far as its tables reach.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use firn_backing::Backing;

use crate::frame::{Change, Frame};
use crate::names::Writer;
use crate::resolve::{ChangeKey, Resolver, WriterId};
use crate::seal::Seal;
use crate::table::Table;

/// The tables in use, of all indexes. Shared with readers, so that a new list replaces it.
pub(super) type Tables<B> = Arc<Vec<Arc<Table<B>>>>;

/// The state of a container as read from its indexes and tables.
pub(super) struct View<B: Backing> {
    /// Changes of bytes that are in no table, and all cuts and growths.
    pub(super) resolver: Resolver,
    pub(super) tables: Tables<B>,
    pub(super) indexes: BTreeMap<WriterId, IndexState<B>>,
    /// Blocks of logs whose checksum was right: the change that wrote them, and the block's number in it
    /// ([`CHECKED_BYTES`](crate::frame::CHECKED_BYTES)).
    pub(super) checked: HashSet<(ChangeKey, u64)>,
    /// The seal, once the container has one.
    pub(super) seal: Option<Arc<Seal>>,
    /// Names of tables that are damaged, so that they are not opened again.
    pub(super) rejected: HashSet<String>,
}

impl<B: Backing> View<B> {
    pub(super) fn new(plain_bytes: u64) -> Self {
        Self {
            resolver: Resolver::new(plain_bytes),
            tables: Tables::default(),
            indexes: BTreeMap::new(),
            checked: HashSet::new(),
            seal: None,
            rejected: HashSet::new(),
        }
    }

    /// Returns how many bytes of an index count: all of them before the container is sealed.
    pub(super) fn limit_of(&self, writer: &Writer) -> u64 {
        self.seal
            .as_ref()
            .map_or(u64::MAX, |seal| seal.limit_of(writer))
    }

    /// Adds a frame that was read or appended at `offset` of an index, unless it is in a table already.
    pub(super) fn add(&mut self, writer: WriterId, offset: u64, frame: Frame) {
        let changes_length = matches!(frame.change, Change::Cut(_) | Change::Grown(_));
        let state = self.indexes.get(&writer);
        if !changes_length && state.is_some_and(|state| offset < state.covered()) {
            return;
        }
        self.resolver.add(writer, offset, frame);
        if changes_length {
            self.update_tables_end();
        }
    }

    /// Replaces the tables in use of one index. Returns the old list of all tables: the caller drops it without the
    /// lock, because that closes files.
    #[must_use]
    pub(super) fn set_tables(&mut self, id: WriterId, cover: Vec<Arc<Table<B>>>) -> Tables<B> {
        let ends = cover.iter().map(|table| table.part().end);
        let follow = std::iter::once(0).chain(ends).zip(&cover);
        debug_assert!(
            follow
                .into_iter()
                .all(|(end, table)| table.part().start == end && table.writer == id),
            "sorted indexes follow each other from the beginning of one index"
        );
        let Some(state) = self.indexes.get_mut(&id) else {
            return Tables::default();
        };
        self.resolver.update_length_changes(|length_changes| {
            for table in &cover {
                table.directory.cuts.apply_to(id, length_changes);
            }
        });
        state.cover = cover;
        state.offset = state.offset.max(state.covered());
        debug_assert!(state.covered() <= state.offset, "what is sorted is known");
        self.resolver.drop_changes_before(id, state.covered());
        let covers = self.indexes.values().flat_map(|state| state.cover.iter());
        let tables = Arc::new(covers.map(Arc::clone).collect());
        let old = std::mem::replace(&mut self.tables, tables);
        self.update_tables_end();
        old
    }

    /// Updates the length of the file by the tables, as far as their ends are known without reading blocks.
    pub(super) fn update_tables_end(&mut self) {
        let length_changes = self.resolver.length_changes();
        let end = |table: &Arc<Table<B>>| table.end(length_changes.limits_of(table.writer));
        let known_ends = self.tables.iter().filter_map(end);
        self.resolver.set_tables_end(known_ends.max().unwrap_or(0));
    }

    /// Copies this host's own changes from `old`. This host knows them from its appends, which may be ahead of what it
    /// read.
    pub(super) fn copy_own(&mut self, old: &Self) {
        for (id, state) in old.indexes.iter().filter(|(_, state)| state.is_own) {
            let new = || IndexState::new(state.writer.clone(), true);
            let new_state = self.indexes.entry(*id).or_insert_with(new);
            new_state.is_own = true;
            new_state.offset = new_state.offset.max(state.offset);
            let covered = new_state.covered();
            debug_assert!(covered <= new_state.offset, "what is sorted is known");
            self.resolver.copy_from(&old.resolver, *id, covered);
        }
        self.update_tables_end();
    }

    /// Returns how far the index of each other host was read, in bytes.
    pub(super) fn read_offsets(&self) -> BTreeMap<Writer, u64> {
        let others = self.indexes.values().filter(|state| !state.is_own);
        let read = others.filter(|state| state.offset > 0);
        read.map(|state| (state.writer.clone(), state.offset))
            .collect()
    }

    /// Returns the largest epoch of all changes that were read.
    pub(super) fn last_epoch(&self) -> Option<u64> {
        let sorted = self.tables.iter().map(|table| table.directory.last_epoch);
        self.resolver.last_epoch().max(sorted.max())
    }
}

/// How far one index was read, and its open files.
pub(super) struct IndexState<B: Backing> {
    pub(super) writer: Writer,
    /// Whether this process writes the index. It knows its own frames without reading them.
    pub(super) is_own: bool,
    /// The open index, or `None` before it is first read.
    pub(super) index: Option<Arc<B::File>>,
    /// The tables in use, in order from the beginning of the index.
    pub(super) cover: Vec<Arc<Table<B>>>,
    /// Position in the index up to which all frames are known.
    pub(super) offset: u64,
    /// The index is not sorted before it has this many bytes. Raised after sorting failed.
    pub(super) sort_from: u64,
    /// Open logs of the writer, by their number.
    pub(super) logs: HashMap<u32, Arc<B::File>>,
}

impl<B: Backing> IndexState<B> {
    pub(super) fn new(writer: Writer, is_own: bool) -> Self {
        Self {
            writer,
            is_own,
            index: None,
            cover: Vec::new(),
            offset: 0,
            sort_from: 0,
            logs: HashMap::new(),
        }
    }

    /// Returns how many bytes of the index are in tables.
    pub(super) fn covered(&self) -> u64 {
        self.cover.last().map_or(0, |table| table.part().end)
    }

    /// Returns whether at least `bytes` bytes of the index are in no table, so that it should be sorted.
    pub(super) fn is_due(&self, bytes: u64) -> bool {
        self.offset >= self.sort_from && self.offset - self.covered() >= bytes
    }
}
