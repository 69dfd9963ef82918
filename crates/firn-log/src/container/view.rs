//! The view: what this host has read of the indexes of a container, a directory with the logs of all hosts for one
//! file.
//!
//! Terms
//! * An *index* lists the changes that one host made to the file of the container.
//! * A *table* is a part of an index, sorted by offset in the file.
//! * The *resolver* finds which change gives each byte its value.
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
        match &self.seal {
            Some(seal) => seal.limit_of(writer),
            None => u64::MAX,
        }
    }

    /// Returns the state of a writer's index. Adds it if the index is not known yet.
    pub(super) fn find_or_add_index(
        &mut self,
        writer: &Writer,
        is_own: bool,
    ) -> &mut IndexState<B> {
        self.indexes
            .entry(writer.id())
            .or_insert_with(|| IndexState::new(writer.clone(), is_own))
    }

    /// Adds a frame that was read or appended at `offset` of an index, unless it is in a table already.
    pub(super) fn add(&mut self, writer: WriterId, offset: u64, frame: Frame) {
        let changes_length = matches!(frame.change, Change::Cut(_) | Change::Grown(_));
        let sorted_end = self.indexes.get(&writer).map_or(0, IndexState::sorted_end);
        let is_in_table = offset < sorted_end;
        // Cuts and growths stay in memory even if a table has them too.
        if is_in_table && !changes_length {
            return;
        }
        self.resolver.add(writer, offset, frame);
        if changes_length {
            self.update_tables_end();
        }
    }

    /// Replaces the tables (sorted parts) in use of one index. Also applies their cuts and growths, drops the changes
    /// that are in the tables from memory, and updates the length of the file.
    ///
    /// Returns the old list of all tables. The caller drops it without the lock, because that closes files.
    #[must_use]
    pub(super) fn install_tables(
        &mut self,
        id: WriterId,
        index_tables: Vec<Arc<Table<B>>>,
    ) -> Tables<B> {
        debug_assert!(
            are_adjacent(&index_tables, id),
            "tables follow each other from the beginning of one index"
        );
        let Some(index) = self.indexes.get_mut(&id) else {
            return Tables::default();
        };
        self.resolver.update_length_changes(|length_changes| {
            for table in &index_tables {
                table.directory.length_changes.apply_to(id, length_changes);
            }
        });
        index.tables = index_tables;
        // The frames in the tables count as read.
        index.offset = index.offset.max(index.sorted_end());
        debug_assert!(
            index.sorted_end() <= index.offset,
            "sorted frames are known"
        );
        self.resolver.drop_changes_before(id, index.sorted_end());
        let all_tables = self
            .indexes
            .values()
            .flat_map(|index| index.tables.iter().map(Arc::clone))
            .collect();
        let replaced_tables = std::mem::replace(&mut self.tables, Arc::new(all_tables));
        self.update_tables_end();
        replaced_tables
    }

    /// Updates the length of the file by the tables, as far as their ends are known without reading blocks.
    pub(super) fn update_tables_end(&mut self) {
        let length_changes = self.resolver.length_changes();
        let last_end = self
            .tables
            .iter()
            .filter_map(|table| table.visible_end(length_changes.limits_of(table.writer)))
            .max();
        self.resolver.set_tables_end(last_end.unwrap_or(0));
    }

    /// Copies this host's own changes from `old`. This host knows them from its appends, which may be ahead of what it
    /// read.
    pub(super) fn copy_own(&mut self, old: &Self) {
        for (id, old_index) in &old.indexes {
            if !old_index.is_own {
                continue;
            }
            let index = self.find_or_add_index(&old_index.writer, true);
            index.is_own = true;
            index.offset = index.offset.max(old_index.offset);
            let sorted_end = index.sorted_end();
            debug_assert!(sorted_end <= index.offset, "sorted frames are known");
            self.resolver.copy_from(&old.resolver, *id, sorted_end);
        }
        self.update_tables_end();
    }

    /// Returns how far the index of each other host was read, in bytes.
    pub(super) fn read_offsets(&self) -> BTreeMap<Writer, u64> {
        self.indexes
            .values()
            .filter(|index| !index.is_own && index.offset > 0)
            .map(|index| (index.writer.clone(), index.offset))
            .collect()
    }

    /// Returns the largest epoch of all changes that were read.
    pub(super) fn last_epoch(&self) -> Option<u64> {
        let last_in_tables = self
            .tables
            .iter()
            .map(|table| table.directory.last_epoch)
            .max();
        self.resolver.last_epoch().max(last_in_tables)
    }
}

/// Returns whether the tables are of one index, and follow each other without gaps from its beginning.
fn are_adjacent<B: Backing>(tables: &[Arc<Table<B>>], writer: WriterId) -> bool {
    let mut end = 0;
    for table in tables {
        if table.writer != writer || table.part().start != end {
            return false;
        }
        end = table.part().end;
    }
    true
}

/// How far one index was read, and its open files.
pub(super) struct IndexState<B: Backing> {
    pub(super) writer: Writer,
    /// Whether this process writes the index. It knows its own frames without reading them.
    pub(super) is_own: bool,
    /// The open index, or `None` before it is first read.
    pub(super) file: Option<Arc<B::File>>,
    /// The tables in use, in order from the beginning of the index.
    pub(super) tables: Vec<Arc<Table<B>>>,
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
            file: None,
            tables: Vec::new(),
            offset: 0,
            sort_from: 0,
            logs: HashMap::new(),
        }
    }

    /// Returns how many bytes of the index are in tables.
    pub(super) fn sorted_end(&self) -> u64 {
        self.tables.last().map_or(0, |table| table.part().end)
    }

    /// Returns whether at least `bytes` bytes of the index are in no table, so that it should be sorted.
    pub(super) fn should_sort(&self, bytes: u64) -> bool {
        self.offset >= self.sort_from && self.offset - self.sorted_end() >= bytes
    }
}
