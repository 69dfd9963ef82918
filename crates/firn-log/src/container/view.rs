//! What a process has read of the indexes of a container.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use firn_backing::Backing;

use crate::frame::{Change, Frame};
use crate::names::Writer;
use crate::resolve::{Key, Resolver, WriterId};
use crate::seal::Seal;
use crate::table::Table;

/// Sorted indexes that are used.
pub(super) type Tables<B> = Arc<Vec<Arc<Table<B>>>>;

/// What was read of the indexes.
pub(super) struct View<B: Backing> {
    /// What is unsorted, and all cuts and growths.
    pub(super) resolver: Resolver,
    pub(super) tables: Tables<B>,
    pub(super) tails: BTreeMap<WriterId, Tail<B>>,
    /// Blocks of [`CHECKED_BYTES`](crate::frame::CHECKED_BYTES) of a change whose checksum was right.
    pub(super) checked: HashSet<(Key, u64)>,
    /// What counts of each index, once that is decided.
    pub(super) seal: Option<Arc<Seal>>,
    /// Sorted indexes that are not whole.
    pub(super) rejected: HashSet<String>,
}

impl<B: Backing> View<B> {
    pub(super) fn new(base_bytes: u64) -> Self {
        Self {
            resolver: Resolver::new(base_bytes),
            tables: Tables::default(),
            tails: BTreeMap::new(),
            checked: HashSet::new(),
            seal: None,
            rejected: HashSet::new(),
        }
    }

    /// Bytes of an index that count.
    pub(super) fn limit_of(&self, writer: &Writer) -> u64 {
        self.seal
            .as_ref()
            .map_or(u64::MAX, |seal| seal.limit_of(writer))
    }

    /// Takes a change that is not in a sorted index.
    pub(super) fn add(&mut self, writer: WriterId, offset: u64, frame: Frame) {
        let is_cut = matches!(frame.change, Change::Cut(_) | Change::Grown(_));
        let tail = self.tails.get(&writer);
        if !is_cut && tail.is_some_and(|tail| offset < tail.covered()) {
            return;
        }
        self.resolver.add(writer, offset, frame);
        if is_cut {
            self.note_tables_end();
        }
    }

    /// The sorted indexes of a writer are these from now on. All that were used until now are returned: files are not
    /// closed with a lock held.
    #[must_use]
    pub(super) fn set_cover(&mut self, id: WriterId, cover: Vec<Arc<Table<B>>>) -> Tables<B> {
        let ends = cover.iter().map(|table| table.part().end);
        let follow = std::iter::once(0).chain(ends).zip(&cover);
        debug_assert!(
            follow
                .into_iter()
                .all(|(end, table)| table.part().start == end && table.writer == id),
            "sorted indexes follow each other from the beginning of one index"
        );
        let Some(tail) = self.tails.get_mut(&id) else {
            return Tables::default();
        };
        self.resolver.change_outline(|outline| {
            for table in &cover {
                table.directory.cuts.tell(id, outline);
            }
        });
        tail.cover = cover;
        tail.offset = tail.offset.max(tail.covered());
        debug_assert!(tail.covered() <= tail.offset, "what is sorted is known");
        self.resolver.forget(id, tail.covered());
        let covers = self.tails.values().flat_map(|tail| tail.cover.iter());
        let tables = Arc::new(covers.map(Arc::clone).collect());
        let old = std::mem::replace(&mut self.tables, tables);
        self.note_tables_end();
        old
    }

    /// The file is as long as sorted indexes say, as far as that is known without reading them.
    pub(super) fn note_tables_end(&mut self) {
        let outline = self.resolver.outline();
        let end = |table: &Arc<Table<B>>| table.end(outline.limits_of(table.writer));
        let known = self.tables.iter().filter_map(end);
        self.resolver.set_outside_end(known.max().unwrap_or(0));
    }

    /// Takes what a process that writes has appended and `old` knows, which may be more than what was read.
    pub(super) fn keep_own(&mut self, old: &Self) {
        for (id, tail) in old.tails.iter().filter(|(_, tail)| tail.is_own) {
            let new = || Tail::new(tail.writer.clone(), true);
            let kept = self.tails.entry(*id).or_insert_with(new);
            kept.is_own = true;
            kept.offset = kept.offset.max(tail.offset);
            let covered = kept.covered();
            debug_assert!(covered <= kept.offset, "what is sorted is known");
            self.resolver.take_changes(&old.resolver, *id, covered);
        }
        self.note_tables_end();
    }

    /// What other hosts' indexes were read of, as far as it was.
    pub(super) fn seen(&self) -> BTreeMap<Writer, u64> {
        let others = self.tails.values().filter(|tail| !tail.is_own);
        let read = others.filter(|tail| tail.offset > 0);
        read.map(|tail| (tail.writer.clone(), tail.offset))
            .collect()
    }

    pub(super) fn last_epoch(&self) -> Option<u64> {
        let sorted = self.tables.iter().map(|table| table.directory.last_epoch);
        self.resolver.last_epoch().max(sorted.max())
    }
}

/// An index, and how far it was read.
pub(super) struct Tail<B: Backing> {
    pub(super) writer: Writer,
    /// This host writes it now, and knows it without reading.
    pub(super) is_own: bool,
    /// Not open before it is read.
    pub(super) index: Option<Arc<B::File>>,
    /// Sorted indexes from its beginning on, each where the one before ends.
    pub(super) cover: Vec<Arc<Table<B>>>,
    pub(super) offset: u64,
    /// The index is sorted once it has this many bytes.
    pub(super) sort_from: u64,
    pub(super) logs: HashMap<u32, Arc<B::File>>,
}

impl<B: Backing> Tail<B> {
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

    /// Bytes of the index that are in sorted indexes.
    pub(super) fn covered(&self) -> u64 {
        self.cover.last().map_or(0, |table| table.part().end)
    }

    /// Whether enough is unsorted to be sorted.
    pub(super) fn is_due(&self, bytes: u64) -> bool {
        self.offset >= self.sort_from && self.offset - self.covered() >= bytes
    }
}
