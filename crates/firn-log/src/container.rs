//! The logs of all hosts for one file: a directory that each host appends to in files of its own.
//!
//! Promises
//! * What a host wrote is seen by its own reads when the write has returned, and by other hosts after they looked
//!   ([`Container::refresh`]).
//! * Whatever the order in which hosts look, they come to the same bytes ([`crate::resolve`]).
//! * Bytes that are not what was written (a log that lost its end with the power) are an error to whoever reads them,
//!   and never shown.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::OsStr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use firn_backing::lock::Mutex;
use firn_backing::{Access, Backing, DataPart, Errno, Result};
use firn_rendezvous::own;
use parking_lot::Condvar;

use crate::frame::{CHECKED_BYTES, Change, FRAME_BYTES_MAX, Frame, MAGIC, Next, Span};
use crate::names::Writer;
use crate::resolve::{Key, Layers, Resolver, Segment, Source, WriterId};
use crate::run::Piece;
use crate::seal::{CLOSING, Lost, SEAL_NAME, Seal};
use crate::sort::Sorter;
use crate::table::{BlockCache, Table};
use crate::writer::{Appended, OwnLog};

/// Bytes of an index that are read at once; larger than any frame.
pub(crate) const INDEX_READ_BYTES: usize = 2 << 20;
/// A range of so many bytes is found at once, whatever its pieces are.
const WALK_BYTES_MIN: u64 = 4096;
/// Blocks whose checksums were right that are remembered.
const CHECKED_MAX: usize = 1 << 16;
/// Pieces of a log that are no further from each other are read together: a call costs more than so many bytes.
const GAP_BYTES_MAX: u64 = 4096;
/// So much of a log is read at once.
const TOGETHER_BYTES_MAX: u64 = 1 << 20;
/// So much is read of a log that is read from its beginning to its end.
const AHEAD_BYTES: u64 = 64 << 10;
/// Logs of which so much is in memory: 4 MiB.
const WINDOWS_MAX: usize = 64;
/// A sorted index that is found to be damaged is read unsorted; there are only so many.
const TRIES_MAX: usize = 1000;

/// See the module.
pub struct Container<B: Backing> {
    /// Among those that this process has opened.
    number: u64,
    pub(crate) dir: B::Inode,
    /// In messages.
    name: String,
    pub(crate) host: String,
    memory: Arc<Memory>,
    /// Says which lane this host's files go to, where there are lanes.
    turn: u64,
    view: Mutex<View<B>>,
    own: Mutex<OwnState<B>>,
    own_made: Condvar,
    is_sorting: AtomicBool,
    /// That of what this host writes.
    epoch: AtomicU64,
}

/// How much is in memory of indexes, of all containers that share it.
pub struct Memory {
    blocks: BlockCache,
    ahead: ReadAhead,
    bytes: u64,
}

impl Memory {
    /// With at most so many bytes of sorted indexes. What is unsorted, and what one call needs, is a part of that for
    /// each host that writes.
    pub fn new(bytes: u64) -> Arc<Self> {
        let blocks = BlockCache::new(bytes);
        let ahead = ReadAhead::default();
        Arc::new(Self {
            blocks,
            ahead,
            bytes,
        })
    }

    /// A host that has so much of its index unsorted sorts it.
    fn sort_bytes(&self) -> u64 {
        self.bytes / 128
    }

    /// What a host has unsorted when it ends writing is sorted from this size on: less costs readers little.
    fn sort_last_bytes(&self) -> u64 {
        self.bytes / 512
    }

    /// Whoever finds so much of another host's index unsorted sorts it: that host died, or could not.
    fn sort_others_bytes(&self) -> u64 {
        self.bytes / 32
    }

    /// Pieces of a file that are found at once.
    fn pieces_max(&self) -> u64 {
        self.bytes / 512
    }
}

enum OwnState<B: Backing> {
    /// This host has written nothing.
    None,
    /// A thread is making its index.
    Making,
    Made(Arc<OwnLog<B>>),
}

/// Sorted indexes that are used.
type Tables<B> = Arc<Vec<Arc<Table<B>>>>;

/// What was read of the indexes.
struct View<B: Backing> {
    /// What is unsorted, and all cuts.
    resolver: Resolver,
    tables: Tables<B>,
    tails: BTreeMap<WriterId, Tail<B>>,
    /// Blocks of [`CHECKED_BYTES`] of a change whose checksum was right.
    checked: HashSet<(Key, u64)>,
    /// What counts of each index, once that is decided.
    seal: Option<Arc<Seal>>,
    /// Sorted indexes that are not whole.
    rejected: HashSet<String>,
}

impl<B: Backing> View<B> {
    fn new(base_bytes: u64) -> Self {
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
    fn limit_of(&self, writer: &Writer) -> u64 {
        self.seal
            .as_ref()
            .map_or(u64::MAX, |seal| seal.limit_of(writer))
    }

    /// Takes a change that is not in a sorted index.
    fn add(&mut self, writer: WriterId, offset: u64, frame: Frame) {
        let is_cut = matches!(frame.change, Change::Cut(_));
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
    fn set_cover(&mut self, id: WriterId, cover: Vec<Arc<Table<B>>>) -> Tables<B> {
        let Some(tail) = self.tails.get_mut(&id) else {
            return Tables::default();
        };
        for table in &cover {
            for cut in &table.directory.cuts {
                let key = Key {
                    epoch: cut.epoch,
                    writer: id,
                    frame: cut.frame,
                };
                self.resolver.add_cut(key, cut.len);
            }
        }
        tail.cover = cover;
        tail.offset = tail.offset.max(tail.covered());
        self.resolver.forget(id, tail.covered());
        let covers = self.tails.values().flat_map(|tail| tail.cover.iter());
        let tables = Arc::new(covers.map(Arc::clone).collect());
        let old = std::mem::replace(&mut self.tables, tables);
        self.note_tables_end();
        old
    }

    /// The file is as long as sorted indexes say, as far as that is known without reading them.
    fn note_tables_end(&mut self) {
        let cut = self.resolver.last_cut();
        let known = self.tables.iter().filter_map(|table| table.end_after(cut));
        self.resolver.set_outside_end(known.max().unwrap_or(0));
    }

    /// Takes what a process that writes has appended and `old` knows, which may be more than what was read.
    fn keep_own(&mut self, old: &Self) {
        for (id, tail) in old.tails.iter().filter(|(_, tail)| tail.is_own) {
            let new = || Tail::new(tail.writer.clone(), true);
            let kept = self.tails.entry(*id).or_insert_with(new);
            kept.is_own = true;
            kept.offset = kept.offset.max(tail.offset);
            let covered = kept.covered();
            self.resolver.take_changes(&old.resolver, *id, covered);
        }
        self.note_tables_end();
    }

    fn last_epoch(&self) -> Option<u64> {
        let sorted = self.tables.iter().map(|table| table.directory.last_epoch);
        self.resolver.last_epoch().max(sorted.max())
    }
}

/// An index, and how far it was read.
struct Tail<B: Backing> {
    writer: Writer,
    /// This host writes it now, and knows it without reading.
    is_own: bool,
    /// Not open before it is read.
    index: Option<Arc<B::File>>,
    /// Sorted indexes from its beginning on, each where the one before ends.
    cover: Vec<Arc<Table<B>>>,
    offset: u64,
    /// It is not sorted before it has so many bytes.
    sort_from: u64,
    logs: HashMap<u32, Arc<B::File>>,
}

impl<B: Backing> Tail<B> {
    fn new(writer: Writer, is_own: bool) -> Self {
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
    fn covered(&self) -> u64 {
        self.cover.last().map_or(0, |table| table.part().end)
    }

    /// Whether there is so much to sort that it should be.
    fn is_due(&self, bytes: u64) -> bool {
        self.offset >= self.sort_from && self.offset - self.covered() >= bytes
    }
}

/// Bytes of a change that are to be read.
struct Wanted<'a> {
    key: Key,
    /// In the log.
    position: u64,
    buf: &'a mut [u8],
}

/// Where the bytes of a change are.
struct KeyLog<B: Backing> {
    /// None if it is gone.
    file: Option<Arc<B::File>>,
    span: Arc<Span>,
    /// Blocks that were given up.
    lost: BTreeSet<u64>,
    is_own: bool,
}

/// Bytes of a log that are to be read.
struct LogPiece<'a, B: Backing> {
    /// Whose log, which, and where in it.
    place: (WriterId, u32, u64),
    /// Up to here the log has bytes that are as they were written.
    limit: u64,
    file: Arc<B::File>,
    buf: &'a mut [u8],
}

impl<B: Backing> LogPiece<'_, B> {
    /// Where it ends in the log.
    fn end(&self) -> u64 {
        self.place.2 + self.buf.len() as u64
    }
}

/// A container as this process has numbered it, and a log in it.
type LogId = (u64, WriterId, u32);

/// What was read last of each log, of all containers.
#[derive(Default)]
struct ReadAhead(Mutex<HashMap<LogId, Arc<Window>>>);

impl ReadAhead {
    fn find(&self, id: LogId) -> Option<Arc<Window>> {
        self.0.lock().get(&id).cloned()
    }

    fn keep(&self, id: LogId, window: &Arc<Window>) {
        let mut windows = self.0.lock();
        if windows.len() >= WINDOWS_MAX && !windows.contains_key(&id) {
            windows.clear();
        }
        windows.insert(id, Arc::clone(window));
    }
}

/// Bytes of a log, which do not change once a frame names them.
struct Window {
    start: u64,
    bytes: Vec<u8>,
}

impl Window {
    fn read<B: Backing>(base: &B, file: &B::File, range: Range<u64>) -> Result<Self> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        let count = base.read_at(file, &mut bytes, range.start)?;
        bytes.truncate(count);
        let start = range.start;
        Ok(Self { start, bytes })
    }

    fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    fn has(&self, range: Range<u64>) -> bool {
        self.start <= range.start && range.end <= self.end()
    }

    fn is_followed_by(&self, position: u64) -> bool {
        (self.start..=self.end() + GAP_BYTES_MAX).contains(&position)
    }
}

/// Frames of one index that were not known.
pub(crate) struct News {
    writer: WriterId,
    from: u64,
    /// Where the last one ends.
    pub(crate) to: u64,
    /// With where they begin.
    frames: Vec<(u64, Frame)>,
    /// Nothing followed them.
    is_all: bool,
}

/// A part of a file in a block of a log that cannot be read.
pub(crate) struct Unreadable {
    /// In the file.
    pub(crate) file: Range<u64>,
    pub(crate) host: String,
    pub(crate) log: String,
    /// Where the block begins in the log.
    pub(crate) block: u64,
}

/// Goes through the segments of a range with little memory ([`Container::find_next`]).
pub struct Walk {
    range: Range<u64>,
    /// Bytes that are found at once.
    step: u64,
}

impl Walk {
    /// Through `range`, as far as the file has it.
    pub fn new(range: Range<u64>) -> Self {
        let step = range.end.saturating_sub(range.start);
        Self {
            range,
            step: step.max(WALK_BYTES_MIN),
        }
    }

    fn part(&self) -> Range<u64> {
        let end = self.range.start.saturating_add(self.step);
        self.range.start..end.min(self.range.end)
    }
}

impl<B: Backing> Container<B> {
    /// The container in the directory `dir` with this name, seen by `host`. The plain file has `base_bytes` that count.
    pub fn open(
        base: &B,
        dir: B::Inode,
        name: &str,
        host: &str,
        base_bytes: u64,
        memory: &Arc<Memory>,
    ) -> Result<Self> {
        let container = Self::open_unread(dir, name, host, base_bytes, memory);
        container.take_epoch(base)?;
        Ok(container)
    }

    /// The same, of which nothing is read yet.
    pub(crate) fn open_unread(
        dir: B::Inode,
        name: &str,
        host: &str,
        base_bytes: u64,
        memory: &Arc<Memory>,
    ) -> Self {
        Self::unread(dir, name, host, memory, View::new(base_bytes))
    }

    /// The same; what this host writes goes to the lane of this turn.
    pub(crate) fn in_turn(self, turn: u64) -> Self {
        Self { turn, ..self }
    }

    fn unread(dir: B::Inode, name: &str, host: &str, memory: &Arc<Memory>, view: View<B>) -> Self {
        static OPENED: AtomicU64 = AtomicU64::new(0);
        Self {
            number: OPENED.fetch_add(1, Ordering::Relaxed),
            dir,
            name: name.to_owned(),
            host: host.to_owned(),
            memory: Arc::clone(memory),
            turn: 0,
            view: Mutex::new(view),
            own: Mutex::new(OwnState::None),
            own_made: Condvar::new(),
            is_sorting: AtomicBool::new(false),
            epoch: AtomicU64::new(0),
        }
    }

    /// The file below has so many bytes now.
    pub(crate) fn set_base(&self, bytes: u64) {
        self.view.lock().resolver.set_base(bytes);
    }

    /// Bytes of the file, as far as this host has looked.
    pub fn len(&self) -> u64 {
        self.view.lock().resolver.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What this host writes from now on is newer than all that others published until now. To be called when the file
    /// is opened for writing, and after it was synced.
    pub fn take_epoch(&self, base: &B) -> Result<()> {
        self.refresh(base)?;
        let last = self.view.lock().last_epoch();
        let next = last.map_or(0, |last| last + 1);
        self.epoch.fetch_max(next, Ordering::AcqRel);
        Ok(())
    }

    /// Writes bytes that do not overlap and are not empty, with one frame. After an error none of them counts.
    pub fn write(&self, base: &B, parts: &[DataPart<'_>]) -> Result<()> {
        let own = self.own_log(base)?;
        let appended = own.write(base, self.epoch.load(Ordering::Acquire), parts)?;
        self.add_own(base, &own, appended)
    }

    /// Cuts the file, or makes it longer.
    pub fn set_len(&self, base: &B, len: u64) -> Result<()> {
        let own = self.own_log(base)?;
        self.take_epoch(base)?;
        let appended = own.note(base, self.epoch.load(Ordering::Acquire), Change::Cut(len))?;
        self.add_own(base, &own, appended)?;
        // What this host writes next is newer than the cut, whatever others do at the same time.
        self.epoch.fetch_add(1, Ordering::AcqRel);
        self.settle_len(base)
    }

    /// Makes bytes zero, as far as the file has them.
    pub fn zero(&self, base: &B, piece: Piece) -> Result<()> {
        let own = self.own_log(base)?;
        let change = Change::Zeroed(piece);
        let appended = own.note(base, self.epoch.load(Ordering::Acquire), change)?;
        self.add_own(base, &own, appended)
    }

    /// Makes what this host wrote durable and known to others.
    pub fn sync(&self, base: &B) -> Result<()> {
        if let Some(own) = self.made_own() {
            let appended = own.sync(base, self.epoch.load(Ordering::Acquire))?;
            if let Some(appended) = appended {
                self.note_appended(&own, appended);
            }
        }
        self.take_epoch(base)
    }

    /// Reads until `buf` is full or the file ends. `below` reads the file as it was when the container was made, into
    /// a buffer from an offset, and says how many bytes it has there.
    pub fn read(
        &self,
        base: &B,
        below: &dyn Fn(&mut [u8], u64) -> Result<usize>,
        buf: &mut [u8],
        offset: u64,
    ) -> Result<usize> {
        let mut walk = Walk::new(offset..offset.saturating_add(buf.len() as u64));
        let mut rest = buf;
        let mut done = 0;
        loop {
            let segments = self.find_next(base, &mut walk)?;
            if segments.is_empty() {
                return Ok(done);
            }
            let mut wanted = Vec::new();
            for segment in segments {
                let len = (segment.file.end - segment.file.start) as usize;
                let (part, later) = rest.split_at_mut(len);
                rest = later;
                done += len;
                match segment.source {
                    Source::Hole | Source::Zeros => part.fill(0),
                    Source::Plain => {
                        let count = below(part, segment.file.start)?;
                        // Cut by somebody who does not know of the container.
                        part[count..].fill(0);
                    }
                    Source::Log { position, key, .. } => wanted.push(Wanted {
                        key,
                        position,
                        buf: part,
                    }),
                }
            }
            self.read_logs(base, wanted)?;
        }
    }

    /// Reads bytes of a segment that is in a log, from the file's offset `start` on.
    pub(crate) fn read_segment(
        &self,
        base: &B,
        segment: &Segment,
        start: u64,
        buf: &mut [u8],
    ) -> Result<()> {
        let Source::Log { position, key, .. } = segment.source else {
            return Err(Errno::INVAL);
        };
        let position = position + (start - segment.file.start);
        self.read_logs(base, vec![Wanted { key, position, buf }])
    }

    /// Bytes of the file below that count.
    pub(crate) fn base_end(&self) -> u64 {
        self.view.lock().resolver.base_end()
    }

    /// Where the next bytes of a walk are, in order and without gaps; nothing at its end or that of the file.
    pub fn find_next(&self, base: &B, walk: &mut Walk) -> Result<Vec<Segment>> {
        for _ in 0..TRIES_MAX {
            match self.find_part(base, walk) {
                Err(Errno::STALE) if self.has_damaged() => self.read_again(base, None)?,
                outcome => return outcome,
            }
        }
        Err(Errno::IO)
    }

    fn find_part(&self, base: &B, walk: &mut Walk) -> Result<Vec<Segment>> {
        loop {
            let mut range = walk.part();
            let pieces_max = self.memory.pieces_max();
            let mut layers = Layers::new(match range.end - range.start {
                ..=WALK_BYTES_MIN => u64::MAX,
                _ => pieces_max,
            });
            let (outline, tables, mut fits) = {
                let view = self.view.lock();
                range.end = range.end.min(view.resolver.len());
                if range.start >= range.end {
                    return Ok(Vec::new());
                }
                let fits = view.resolver.collect(&range, &mut layers);
                (view.resolver.outline(), Arc::clone(&view.tables), fits)
            };
            for table in tables.iter() {
                fits = fits && table.collect(base, &self.memory.blocks, &range, &mut layers)?;
            }
            if !fits {
                walk.step = (walk.step.min(range.end - range.start) / 2).max(WALK_BYTES_MIN);
                continue;
            }
            if layers.pieces() < pieces_max / 4 {
                walk.step = walk.step.saturating_mul(2);
            }
            walk.range.start = range.end;
            return Ok(outline.paint(range, layers));
        }
    }

    /// Whether a sorted index that is used was found to be damaged.
    fn has_damaged(&self) -> bool {
        let view = self.view.lock();
        view.tables.iter().any(|table| table.is_damaged())
    }

    /// Reads all indexes anew: damaged sorted ones unsorted, and what counts of them by `seal`. Meanwhile others read
    /// by what was known.
    fn read_again(&self, base: &B, seal: Option<Arc<Seal>>) -> Result<()> {
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
                Err(Errno::STALE) if fresh.has_damaged() => damaged = fresh.damaged(),
                Err(error) => return Err(error),
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
        drop(view);
        // Its files are closed after the lock is free.
        drop(old);
    }

    /// Reads what the other hosts have appended since the last time.
    pub fn refresh(&self, base: &B) -> Result<()> {
        match self.look(base) {
            Err(Errno::STALE) if self.has_damaged() => self.read_again(base, None),
            outcome => outcome,
        }
    }

    fn look(&self, base: &B) -> Result<()> {
        let names = own::list(base, &self.dir)?;
        if self.view.lock().seal.is_none()
            && names.iter().any(|(name, ..)| name == SEAL_NAME.as_bytes())
        {
            return self.take_seal(base, Seal::load(base, &self.dir)?);
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

    /// Uses the sorted indexes that there are of an index.
    fn take_tables(
        &self,
        base: &B,
        writer: &Writer,
        listed: &[(Writer, Range<u64>)],
    ) -> Result<()> {
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
            match self.find_ends(base, &found) {
                Ok(()) => break found,
                // One that is not used yet.
                Err(Errno::STALE) if self.reject_damaged(&found) => {}
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
            view.tails.entry(writer.id()).or_insert_with(new);
            let old = view.set_cover(writer.id(), found);
            drop(view);
            drop(old);
        }
        Ok(())
    }

    /// Finds how long the file is by tables that are to be used, after the last cut that there will be.
    fn find_ends(&self, base: &B, tables: &[Arc<Table<B>>]) -> Result<()> {
        let known = self.view.lock().resolver.last_cut();
        let cuts = tables.iter().filter_map(|table| table.last_cut());
        let last = cuts.max().max(known);
        for table in tables {
            if let Some(cut) = last {
                table.find_end_after(base, cut)?;
            }
        }
        Ok(())
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
        loop {
            if self.is_own(writer.id()) {
                return Ok(());
            }
            let found = match self.find_tail(writer) {
                Some(found) => Some(found),
                None => self.open_index(base, writer)?,
            };
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
                return match is_all && limit == u64::MAX {
                    true => Ok(()),
                    false => self.check_end(base, &index, writer, offset, limit),
                };
            }
        }
    }

    /// Goes on behind a part of an index that was given up as lost; whether there is one at `offset`.
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
        tracing::error!(
            container = self.name,
            index = writer.index_name(),
            "an index that counts is missing: the file cannot be read"
        );
        Err(Errno::IO)
    }

    /// EIO where the index has less than counts of it, or a frame that was synced is not whole.
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
        tracing::error!(
            container = self.name,
            index = writer.index_name(),
            offset,
            "a frame of an index that counts is not whole: the file cannot be read"
        );
        Err(Errno::IO)
    }

    /// An index that is open, and how far it was read.
    fn find_tail(&self, writer: &Writer) -> Option<(Arc<B::File>, u64)> {
        let view = self.view.lock();
        let tail = view.tails.get(&writer.id())?;
        Some((tail.index.clone()?, tail.offset))
    }

    /// Finds how long the file is by sorted indexes, where that takes reading them.
    fn settle_len(&self, base: &B) -> Result<()> {
        loop {
            let (cut, tables) = {
                let view = self.view.lock();
                (view.resolver.last_cut(), Arc::clone(&view.tables))
            };
            if let Some(cut) = cut {
                for table in tables.iter() {
                    table.find_end_after(base, cut)?;
                }
            }
            let mut view = self.view.lock();
            if view.resolver.last_cut() == cut && Arc::ptr_eq(&view.tables, &tables) {
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

    /// What counts of each index, as far as this host has looked.
    pub fn seal(&self) -> Option<Arc<Seal>> {
        self.view.lock().seal.clone()
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

    /// Bytes of an index that are in sorted ones which are used.
    pub(crate) fn covered(&self, writer: &Writer) -> u64 {
        let view = self.view.lock();
        view.tails.get(&writer.id()).map_or(0, Tail::covered)
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

    /// Takes what was read; whether there is so much unsorted that it is to be sorted.
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
        let is_due = tail.is_due(self.memory.sort_others_bytes());
        for (offset, frame) in news.frames {
            view.add(news.writer, offset, frame);
        }
        is_due
    }

    /// Sorts what is unsorted of an index, in parts of at most `bytes` and a frame. What cannot be sorted is in memory
    /// instead, so no failure of it is one of the caller's.
    fn sort(&self, base: &B, writer: &Writer, bytes: u64) {
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
        self.take_tables(base, writer, &tables.collect::<Vec<_>>())
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

    fn made_own(&self) -> Option<Arc<OwnLog<B>>> {
        match &*self.own.lock() {
            OwnState::Made(own) => Some(Arc::clone(own)),
            OwnState::None | OwnState::Making => None,
        }
    }

    /// This host's own logs, made if it has none.
    fn own_log(&self, base: &B) -> Result<Arc<OwnLog<B>>> {
        if self.view.lock().seal.is_some() {
            return Err(Errno::STALE);
        }
        let mut own = self.own.lock();
        loop {
            match &*own {
                OwnState::Made(log) => return Ok(Arc::clone(log)),
                OwnState::Making => own.wait(&self.own_made),
                OwnState::None => {
                    *own = OwnState::Making;
                    let made = own.unlocked(|| self.make_own(base));
                    *own = match &made {
                        Ok(log) => OwnState::Made(Arc::clone(log)),
                        Err(_) => OwnState::None,
                    };
                    self.own_made.notify_all();
                    return made;
                }
            }
        }
    }

    /// Begins a life of this host in the container.
    fn make_own(&self, base: &B) -> Result<Arc<OwnLog<B>>> {
        let names = own::list(base, &self.dir)?;
        let lives = names.iter().filter_map(|(name, ..)| Writer::of_index(name));
        let own_lives = lives.filter(|writer| writer.host() == self.host);
        let last = own_lives.map(|writer| writer.id().life).max().unwrap_or(0);
        let writer = Writer::new(&self.host, last + 1);
        let made = Arc::new(OwnLog::create(base, &self.dir, writer.clone(), self.turn)?);
        let tail = Tail::new(writer.clone(), true);
        self.view.lock().tails.insert(writer.id(), tail);
        Ok(made)
    }

    /// ESTALE if what counts may have been decided without this frame: who decides it puts `closing` before he looks
    /// how long indexes are, so a frame that is there before `closing` counts, whatever he believes of this host.
    fn add_own(&self, base: &B, own: &OwnLog<B>, appended: Appended) -> Result<()> {
        if own::find(base, &self.dir, OsStr::new(CLOSING))?.is_some() {
            return Err(Errno::STALE);
        }
        if self.view.lock().seal.is_some() {
            return Err(Errno::STALE);
        }
        let is_due = self.note_appended(own, appended);
        if is_due {
            self.sort(base, &own.writer, self.memory.sort_bytes());
        }
        Ok(())
    }

    /// Takes what this host appended; whether there is so much unsorted that it is to be sorted.
    fn note_appended(&self, own: &OwnLog<B>, appended: Appended) -> bool {
        let Appended {
            frame,
            offset,
            bytes,
        } = appended;
        let id = own.writer.id();
        let mut view = self.view.lock();
        if view.seal.is_some() {
            return false;
        }
        view.add(id, offset, frame);
        let Some(tail) = view.tails.get_mut(&id) else {
            return false;
        };
        tail.offset = tail.offset.max(offset + bytes);
        tail.is_due(self.memory.sort_bytes())
    }

    /// Reads bytes of changes, which must be as they were written. Those that were given up as lost are zeros. What lies
    /// near each other in a log is read at once, whatever its order in the file is.
    fn read_logs(&self, base: &B, wanted: Vec<Wanted<'_>>) -> Result<()> {
        let mut logs: HashMap<Key, KeyLog<B>> = HashMap::new();
        let mut pieces = Vec::with_capacity(wanted.len());
        for wanted in wanted {
            let log = match logs.entry(wanted.key) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(self.find_log(base, wanted.key)?),
            };
            self.read_checked(base, log, wanted, &mut pieces)?;
        }
        pieces.sort_unstable_by_key(|piece| piece.place);
        let mut together = Vec::new();
        for piece in pieces {
            if !goes_with(&together, &piece) {
                self.read_together(base, std::mem::take(&mut together))?;
            }
            together.push(piece);
        }
        self.read_together(base, together)
    }

    /// Where the bytes of a change are.
    fn find_log(&self, base: &B, key: Key) -> Result<KeyLog<B>> {
        let span = self.find_span(base, key)?;
        Ok(KeyLog {
            file: self.open_log(base, key.writer, span.log)?,
            lost: self.lost_blocks(key.writer, span.log),
            is_own: self.is_own(key.writer),
            span,
        })
    }

    /// Reads what is in blocks that nobody has looked at, or that are lost, and leaves the rest to be read with others.
    fn read_checked<'a>(
        &self,
        base: &B,
        log: &KeyLog<B>,
        wanted: Wanted<'a>,
        pieces: &mut Vec<LogPiece<'a, B>>,
    ) -> Result<()> {
        let Wanted { key, position, buf } = wanted;
        let span = &log.span;
        let start = position.checked_sub(span.position).ok_or(Errno::IO)?;
        let end = start + buf.len() as u64;
        if end > span.bytes {
            return Err(Errno::IO);
        }
        let mut rest = buf;
        for block in start / CHECKED_BYTES..end.div_ceil(CHECKED_BYTES) {
            let at = block * CHECKED_BYTES;
            let from = at.max(start);
            let to = (at + CHECKED_BYTES).min(end);
            let (part, later) = rest.split_at_mut((to - from) as usize);
            rest = later;
            if log.lost.contains(&(span.position + at)) {
                part.fill(0);
            } else if log.is_own || self.view.lock().checked.contains(&(key, block)) {
                pieces.push(LogPiece {
                    place: (key.writer, span.log, span.position + from),
                    limit: span.position + (at + CHECKED_BYTES).min(span.bytes),
                    file: log.file.clone().ok_or(Errno::IO)?,
                    buf: part,
                });
            } else {
                let whole = self.load_block(base, key, span, block)?;
                let whole = whole.ok_or(Errno::IO)?;
                part.copy_from_slice(&whole[(from - at) as usize..(to - at) as usize]);
            }
        }
        Ok(())
    }

    /// Reads pieces that lie near each other in one log. Where they follow what was read last, more is read ahead: who
    /// reads a file in its order, or his own pieces of it, goes through each log in its order.
    fn read_together(&self, base: &B, pieces: Vec<LogPiece<'_, B>>) -> Result<()> {
        let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else {
            return Ok(());
        };
        let (writer, log, start) = first.place;
        let end = last.end();
        let limit = last.limit;
        let file = Arc::clone(&first.file);
        let id = (self.number, writer, log);
        let is_small = end - start <= AHEAD_BYTES;
        let known = is_small.then(|| self.memory.ahead.find(id)).flatten();
        let window = match known {
            Some(known) if known.has(start..end) => known,
            known => {
                let goes_on = known.is_some_and(|known| known.is_followed_by(start));
                let to = match goes_on {
                    true => (start + AHEAD_BYTES).min(limit).max(end),
                    false => end,
                };
                let window = Arc::new(Window::read(base, &file, start..to)?);
                if is_small {
                    self.memory.ahead.keep(id, &window);
                }
                window
            }
        };
        for piece in pieces {
            let at = (piece.place.2 - window.start) as usize;
            let bytes = window.bytes.get(at..at + piece.buf.len());
            // The end of the log went with the power.
            piece.buf.copy_from_slice(bytes.ok_or(Errno::IO)?);
        }
        Ok(())
    }

    /// A block of a change; none if it is not as it was written.
    fn load_block(&self, base: &B, key: Key, span: &Span, block: u64) -> Result<Option<Vec<u8>>> {
        let at = block * CHECKED_BYTES;
        let mut whole = vec![0; CHECKED_BYTES.min(span.bytes - at) as usize];
        let count = match self.open_log(base, key.writer, span.log)? {
            Some(file) => base.read_at(&file, &mut whole, span.position + at)?,
            None => 0,
        };
        if count < whole.len() || crc32c::crc32c(&whole) != span.checksums[block as usize] {
            self.tell_damage(&key, span.log, span.position + at);
            return Ok(None);
        }
        let mut view = self.view.lock();
        if view.checked.len() >= CHECKED_MAX {
            view.checked.clear();
        }
        view.checked.insert((key, block));
        Ok(Some(whole))
    }

    /// Blocks of a log that were given up as lost, by where they begin.
    fn lost_blocks(&self, writer: WriterId, log: u32) -> BTreeSet<u64> {
        let view = self.view.lock();
        let Some(seal) = view.seal.as_ref().filter(|seal| !seal.lost.is_empty()) else {
            return BTreeSet::new();
        };
        let tail = view.tails.get(&writer);
        let name = tail.map(|tail| tail.writer.log_name(log));
        name.map_or_else(BTreeSet::new, |name| seal.lost.blocks_of(&name))
    }

    /// The parts of a segment, block by block, that are not as they were written, if it is in a log. `known` are blocks
    /// of which that is known. Where the backing fails nothing is said of them.
    pub(crate) fn find_unreadable(
        &self,
        base: &B,
        segment: &Segment,
        known: &Lost,
    ) -> Result<Vec<Unreadable>> {
        let Source::Log { position, key, .. } = segment.source else {
            return Ok(Vec::new());
        };
        let span = self.find_span(base, key)?;
        let (host, log) = self.log_of(key.writer, span.log)?;
        let start = position.checked_sub(span.position).ok_or(Errno::IO)?;
        let end = start + (segment.file.end - segment.file.start);
        let mut found = Vec::new();
        for block in start / CHECKED_BYTES..end.min(span.bytes).div_ceil(CHECKED_BYTES) {
            let at = block * CHECKED_BYTES;
            let position = span.position + at;
            let is_lost = known.has_block(&log, position)
                || (!self.view.lock().checked.contains(&(key, block))
                    && self.load_block(base, key, &span, block)?.is_none());
            if !is_lost {
                continue;
            }
            let from = at.max(start);
            let to = (at + CHECKED_BYTES).min(end);
            found.push(Unreadable {
                file: segment.file.start + (from - start)..segment.file.start + (to - start),
                host: host.clone(),
                log: log.clone(),
                block: position,
            });
        }
        Ok(found)
    }

    /// The host that wrote a log, and the log's name.
    fn log_of(&self, writer: WriterId, log: u32) -> Result<(String, String)> {
        let view = self.view.lock();
        let writer = &view.tails.get(&writer).ok_or(Errno::STALE)?.writer;
        Ok((writer.host().to_owned(), writer.log_name(log)))
    }

    fn tell_damage(&self, key: &Key, log: u32, offset: u64) {
        let name = {
            let view = self.view.lock();
            view.tails
                .get(&key.writer)
                .map(|tail| tail.writer.log_name(log))
        };
        tracing::error!(
            container = self.name,
            log = name,
            offset,
            "a log does not have the bytes that its index says: they are not read"
        );
    }

    /// What a change wrote, by sound indexes.
    fn find_span(&self, base: &B, key: Key) -> Result<Arc<Span>> {
        loop {
            match self.span(base, key) {
                Err(Errno::STALE) if self.has_damaged() => self.read_again(base, None)?,
                found => return found,
            }
        }
    }

    /// The same; ESTALE if it is not known any more.
    fn span(&self, base: &B, key: Key) -> Result<Arc<Span>> {
        let tables = {
            let view = self.view.lock();
            if let Some(span) = view.resolver.span(key) {
                return Ok(span);
            }
            Arc::clone(&view.tables)
        };
        let table = tables.iter().find(|table| table.has(key));
        let span = match table {
            Some(table) => table.span(base, &self.memory.blocks, key)?,
            None => None,
        };
        span.ok_or(Errno::STALE)
    }

    fn is_own(&self, writer: WriterId) -> bool {
        let view = self.view.lock();
        view.tails.get(&writer).is_some_and(|tail| tail.is_own)
    }

    /// None if it is gone.
    fn open_log(&self, base: &B, writer: WriterId, log: u32) -> Result<Option<Arc<B::File>>> {
        let name = {
            let view = self.view.lock();
            let tail = view.tails.get(&writer).ok_or(Errno::STALE)?;
            if let Some(file) = tail.logs.get(&log) {
                return Ok(Some(Arc::clone(file)));
            }
            tail.writer.log_name(log)
        };
        let Some(inode) = own::find_file(base, &self.dir, &name)? else {
            return Ok(None);
        };
        let file = Arc::new(base.open(&inode, Access::Read)?);
        if let Some(tail) = self.view.lock().tails.get_mut(&writer) {
            tail.logs.entry(log).or_insert_with(|| Arc::clone(&file));
        }
        Ok(Some(file))
    }
}

/// The next frames of an index in a range, as far as they are whole: one reading of them.
pub(crate) fn read_index<B: Backing>(
    base: &B,
    index: &B::File,
    writer: WriterId,
    range: Range<u64>,
) -> Result<News> {
    read_part(base, index, writer, range.start, range.end, range.end)
}

/// The next frames of an index that begin between `from` and `to` and end no later than `limit`.
fn read_part<B: Backing>(
    base: &B,
    index: &B::File,
    writer: WriterId,
    from: u64,
    to: u64,
    limit: u64,
) -> Result<News> {
    let mut news = News {
        writer,
        from,
        to: from,
        frames: Vec::new(),
        is_all: false,
    };
    let mut buf = vec![0; INDEX_READ_BYTES];
    let count = base.read_at(index, &mut buf, from)?;
    let mut rest = &buf[..count];
    while news.to < to
        && let Next::Frame(frame, bytes) = Frame::decode(rest)
        && news.to + bytes as u64 <= limit
    {
        news.frames.push((news.to, frame));
        news.to += bytes as u64;
        rest = &rest[bytes..];
    }
    news.is_all = rest.is_empty() && count < buf.len();
    Ok(news)
}

/// Whether an index goes on after `offset`, where no whole frame is, with one that says that there was one.
pub(crate) fn has_synced_frame_after<B: Backing>(
    base: &B,
    index: &B::File,
    offset: u64,
) -> Result<bool> {
    // An index that ends there, or is being appended to, is the usual case.
    let mut first = [0; 64];
    let count = base.read_at(index, &mut first, offset)?;
    // Unless there is another one behind it: then it is damaged where it says how long it is.
    let is_last =
        count < first.len() && find_magic(first[..count].get(1..).unwrap_or(&[])).is_none();
    if is_last && matches!(Frame::decode(&first[..count]), Next::Incomplete) {
        return Ok(false);
    }
    let is_later = |frame: &Frame| frame.synced > offset;
    Ok(find_frame_after(base, index, offset, &is_later)?.is_some())
}

/// Where the first whole frame begins behind `offset` that is wanted.
pub(crate) fn find_frame_after<B: Backing>(
    base: &B,
    index: &B::File,
    offset: u64,
    is_wanted: &dyn Fn(&Frame) -> bool,
) -> Result<Option<u64>> {
    let mut at = offset + 1;
    let mut buf = vec![0; INDEX_READ_BYTES];
    loop {
        let count = base.read_at(index, &mut buf, at)?;
        let is_last = count < buf.len();
        // A frame that begins before here is whole in `buf`.
        let starts = match is_last {
            true => count,
            false => count - FRAME_BYTES_MAX,
        };
        let mut from = 0;
        while let Some(found) = find_magic(&buf[from..count]).map(|found| from + found) {
            if found >= starts {
                break;
            }
            match Frame::decode(&buf[found..count]) {
                Next::Frame(frame, _) if is_wanted(&frame) => return Ok(Some(at + found as u64)),
                _ => from = found + 1,
            }
        }
        if is_last {
            return Ok(None);
        }
        at += starts as u64;
    }
}

fn find_magic(bytes: &[u8]) -> Option<usize> {
    bytes
        .windows(MAGIC.len())
        .position(|window| window == MAGIC)
}

/// Whether the bytes of a piece are read with those before it, which come earlier in the same log.
fn goes_with<B: Backing>(together: &[LogPiece<'_, B>], piece: &LogPiece<'_, B>) -> bool {
    let (Some(first), Some(last)) = (together.first(), together.last()) else {
        return true;
    };
    let (writer, log, _) = last.place;
    (writer, log) == (piece.place.0, piece.place.1)
        && piece.place.2 <= last.end() + GAP_BYTES_MAX
        && piece.end() <= first.place.2 + TOGETHER_BYTES_MAX
}

pub(crate) fn read_exact<B: Backing>(
    base: &B,
    file: &B::File,
    buf: &mut [u8],
    offset: u64,
) -> Result<()> {
    match base.read_at(file, buf, offset)? {
        count if count == buf.len() => Ok(()),
        // The end of the log went with the power.
        _ => Err(Errno::IO),
    }
}
