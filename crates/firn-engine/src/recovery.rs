//! Recovery: makes data that an earlier firnd left in the arena (shared memory) pending again, after a crash or
//! restart. An *attach* is the start of an engine on an arena.
//!
//! Terms
//! * A *known* file has a file id in the journal, with its identity and its names.
//! * A *piece* is a record in the arena that describes written bytes of a file.
//! * A *lost* file is a known file that is not found although its removal had not begun. Its pieces remain in the
//!   arena, and the status shows the file.
//!
//! Steps
//! 1. [`StoredArena::open`] takes every complete piece from the arena and replays the journal.
//! 2. [`StoredArena::drop_files_below`] drops the pieces of transactions that have ended, without a call of the
//!    backing. The caller removes the records of these transactions only afterwards, so after a crash in between the
//!    step is repeated.
//! 3. Each known file is searched for in the backing by its names, and recognised by inode number and birth time.
//! 4. Each truncation that was begun in the backing is completed.
//! 5. The pieces of a file are laid over each other in the order of their sequences, and drained ranges are removed.
//! 6. The bytes that are left are pending again, and are drained without a request.
//!
//! Promise: a crash during an attach loses nothing, because each step may be repeated.
//!
//! Relies on: the arena does not use the slabs of stored pieces again until the attach ends.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use firn_arena::journal::{DrainedRange, Journal, KnownFile, PathState, Replay};
use firn_arena::{Arena, JournalRegion, PieceRef, StoredPiece};
use firn_backing::{Access, Backing, Errno, Resize, SetTime, Time, is_below};
use firn_format::record::Record;

use crate::engine::{Engine, EngineError};
use crate::extents::{Extent, Extents};
use crate::file::{File, FileId, LastWrite, Pending, PieceLayers, PieceUse, latest_ns};
use crate::live::{Resumed, ResumedRequests};
use crate::lost::LostFile;
use crate::names::{Inode, ObjectKey};
use crate::options::{DrainPolicy, EngineOptions};
use crate::small_map::SmallMap;

/// Result of an attach.
#[derive(Debug, Default)]
pub struct Recovered {
    /// Requests that the kernel had sent to an earlier firnd, if its mount is taken over.
    pub requests: Option<ResumedRequests>,
    /// Number of files with data that is pending again.
    pub files: u64,
    /// Bytes that are pending again.
    pub bytes: u64,
    /// Bytes that were dropped because their transaction had ended.
    pub dropped_bytes: u64,
    /// Files whose data could not become pending again; the data remains in the arena.
    pub lost: Vec<LostFile>,
    /// Descriptions of damage that was found in the journal.
    pub damage: Vec<String>,
}

/// An arena with the data of an earlier firnd, before any of it is pending again.
pub struct StoredArena {
    arena: Arena,
    /// All complete pieces: each with its record, the place of the record, and its time. Their slabs are kept until the
    /// attach ends.
    stored: Vec<StoredPiece>,
    journal: Journal<JournalRegion>,
    replay: Replay,
    /// File ids whose pieces were dropped.
    dropped: BTreeSet<u64>,
    dropped_bytes: u64,
}

impl StoredArena {
    /// Reads the journal of an arena. `stored` are the pieces that were found when the arena was attached.
    pub fn open(arena: Arena, stored: Vec<StoredPiece>) -> Self {
        let (journal, replay) = Journal::open(arena.journal_region());
        Self {
            arena,
            stored,
            journal,
            replay,
            dropped: BTreeSet::new(),
            dropped_bytes: 0,
        }
    }

    /// Returns the arena.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Permanently drops the pieces (recorded appends of bytes) of files at or below one of `scopes`, the paths of
    /// ended transactions: no later recovery finds them.
    ///
    /// The call may be repeated, also after a crash. If it fails with `JournalFull`, some of the pieces may already be
    /// dropped.
    pub fn drop_files_below(&mut self, scopes: &[Vec<u8>]) -> Result<(), EngineError> {
        for file_id in self.files_below(scopes) {
            let pieces_of_file = self
                .stored
                .iter()
                .filter(|stored| stored.piece.file == file_id);
            for stored in pieces_of_file {
                self.arena.mark_dead(stored.record);
                self.dropped_bytes += u64::from(stored.piece.len);
            }
            // The pieces are marked as dead before the file id ends. In the other order, a crash in between would leave
            // pieces without a file id, which count as data of a lost file.
            //
            // The end of the file id also ends any truncation of the file that was under way.
            self.journal
                .append_end(&Record::FileIdEnd { file: file_id })
                .map_err(|_| EngineError::JournalFull)?;
            self.dropped.insert(file_id);
        }
        Ok(())
    }

    /// Returns the ids (numbers in the journal) of the files that may have a path at or below one of `scopes`. The
    /// empty scope is the whole tree.
    fn files_below(&self, scopes: &[Vec<u8>]) -> Vec<u64> {
        let is_in_scope = |path: &[u8]| {
            scopes
                .iter()
                .any(|scope| scope.is_empty() || is_below(path, scope))
        };
        let ledger = self.journal.ledger();
        let mut file_ids = Vec::new();
        for (file_id, known) in ledger.files() {
            let paths = ledger.possible_paths(known);
            if paths.iter().any(|(path, _)| is_in_scope(path)) {
                file_ids.push(file_id);
            }
        }
        file_ids
    }
}

/// Result of the search for a file in the backing.
enum FileSearch<B: Backing> {
    /// The file is in the backing.
    Found(Arc<Inode<B>>),
    /// The file is not in the backing, and an earlier firnd had begun to remove it.
    Removed,
    /// The file was not found although no removal had begun.
    Lost(LossReason),
}

/// Result of [`Recovery::finish_truncations`].
struct FinishedTruncations {
    /// The truncations that count for the file's data, each with its sequence and the new length. Includes one that
    /// failed now, because its data is retained for the next recovery.
    counted: Vec<(u64, u64)>,
    /// The error of a truncation that could not be completed, if there is one.
    failure: Option<Errno>,
}

/// Why the data of a file cannot become pending again.
struct LossReason {
    /// Whether the backing answered that it does not have the file. Otherwise a later attach may find the file.
    is_certain: bool,
    /// The reason in words, as a part of a sentence for the user.
    text: String,
}

impl<B: Backing> Engine<B> {
    /// Makes an engine on a new arena.
    pub fn begin(
        backing: B,
        arena: Arena,
        options: EngineOptions,
    ) -> Result<Arc<Self>, EngineError> {
        // The journal is made together with the arena, so that no arena is ever without a journal.
        let journal = Journal::open(arena.journal_region()).0;
        arena.remove_unused_memory_files();
        let engine = Self::assemble(backing, arena, journal, options)?;
        Ok(engine.start())
    }

    /// Makes an engine on the arena of an earlier firnd, with the pieces that were found in it. Returns what was
    /// recovered.
    pub fn attach(
        backing: B,
        arena: Arena,
        stored: &[StoredPiece],
        options: EngineOptions,
    ) -> Result<(Arc<Self>, Recovered), EngineError> {
        Self::attach_stored(
            backing,
            StoredArena::open(arena, stored.to_vec()),
            options,
            None,
        )
    }

    /// Makes an engine on an arena (shared memory) of an earlier firnd, from which pieces (recorded appends) may have
    /// been dropped. `resumed`: state of the mount in the kernel, if the mount outlived the earlier firnd.
    pub fn attach_stored(
        backing: B,
        from: StoredArena,
        options: EngineOptions,
        resumed: Option<&Resumed>,
    ) -> Result<(Arc<Self>, Recovered), EngineError> {
        let StoredArena {
            arena,
            stored,
            journal,
            mut replay,
            dropped,
            dropped_bytes,
        } = from;
        // It is not known whether a rename without an end record was made. So its files are searched under both names.
        replay.ledger.settle_all_renames();
        let mut engine = Self::assemble(backing, arena, journal, options)?;
        // Handles are restored before the data: a file with an open handle does not count as closed by its writers.
        let requests = resumed.map(|resumed| engine.resume(resumed));
        engine.base.arena.remove_unused_memory_files();
        // No new file gets the id of an earlier one, from the journal or from a piece.
        let file_ids_of_pieces = stored.iter().map(|stored| stored.piece.file);
        let last_file_id = file_ids_of_pieces.max().unwrap_or(0).max(replay.last_file);
        engine.base.journal.set_last_file_id(last_file_id);
        let mut recovery = Recovery {
            engine: &engine,
            recovered: Recovered {
                dropped_bytes,
                damage: replay.damage.iter().map(ToString::to_string).collect(),
                requests,
                ..Recovered::default()
            },
            restored: Vec::new(),
        };
        recovery.recover_files(&replay, &dropped, &stored);
        let Recovery {
            recovered,
            restored,
            ..
        } = recovery;
        // The recovery above has kept the slabs of pieces that still count. The other slabs are freed.
        engine.base.arena.free_unkept_slabs(&stored);
        engine.recovered_bytes = recovered.bytes;
        let started_engine = engine.start();
        started_engine.drain_restored_files(restored);
        Ok((started_engine, recovered))
    }

    /// Counts the pending bytes of restored files, and begins to drain or to settle the files (to copy them into memory
    /// files).
    fn drain_restored_files(&self, files: Vec<RestoredFile<B>>) {
        for RestoredFile { file, bytes } in files {
            self.drain.record_pending_change(&file, 0, bytes);
            let mut state = file.lock();
            if self.base.options.drain == DrainPolicy::Eager {
                self.drain.force(&file, &mut state);
            }
            drop(state);
            self.room.queue_for_memory_file(&file);
        }
    }

    /// Makes the arena wake waiting writers whenever a slab is freed, and returns the engine for use by several
    /// threads.
    fn start(self) -> Arc<Self> {
        let wake_writers = self.room.space.waiters.freed_callback();
        self.base.arena.on_free(wake_writers);
        Arc::new(self)
    }
}

/// A file whose data is pending again.
struct RestoredFile<B: Backing> {
    file: Arc<File<B>>,
    /// Number of its pending bytes.
    bytes: u64,
}

/// An attach that is under way.
struct Recovery<'a, B: Backing> {
    engine: &'a Engine<B>,
    /// The result so far.
    recovered: Recovered,
    /// The files that were restored so far.
    restored: Vec<RestoredFile<B>>,
}

impl<B: Backing> Recovery<'_, B> {
    /// Recovers each file that has a file id in the journal, except for the `dropped` ones of ended transactions.
    /// Pieces (recorded appends) without such a file are retained as data of lost files.
    fn recover_files(&mut self, replay: &Replay, dropped: &BTreeSet<u64>, stored: &[StoredPiece]) {
        let mut pieces_by_file: BTreeMap<u64, Vec<StoredPiece>> = BTreeMap::new();
        for piece in stored {
            let file_id = piece.piece.file;
            if !dropped.contains(&file_id) {
                pieces_by_file.entry(file_id).or_default().push(*piece);
            }
        }
        for (file_id, known_file) in replay.ledger.files() {
            if dropped.contains(&file_id) {
                continue;
            }
            // A damaged journal record may have the number 0, which no file has. Pieces with the number 0 are retained
            // below.
            let Some(valid_id) = FileId::new(file_id) else {
                continue;
            };
            let pieces = pieces_by_file.remove(&file_id).unwrap_or_default();
            self.recover_file(valid_id, known_file, pieces);
        }
        for (file_id, pieces) in pieces_by_file {
            let lost_file = LostFile {
                file: file_id,
                path: Vec::new(),
                bytes: 0,
                is_certain: true,
                reason: "the journal has no record of the file".into(),
            };
            self.retain_lost_file(lost_file, lay_pieces(&pieces, &[]));
        }
    }

    /// Retains the pieces of a lost file in the arena, and reports the file.
    fn retain_lost_file(&mut self, file: LostFile, layers: PieceLayers) {
        let lost_file = self.engine.lost.retain(file, layers);
        self.recovered.lost.push(lost_file);
    }

    /// Marks the pieces as dead of which all bytes were drained or overwritten. Without this mark they would outlive
    /// the file id.
    fn mark_pieces_without_bytes(&self, pieces: &[StoredPiece], layers: &PieceLayers) {
        for piece in pieces {
            let has_bytes = layers.pieces.get(&piece.record).is_some();
            if !has_bytes {
                self.engine.base.arena.mark_dead(piece.record);
            }
        }
    }

    /// Recovers the data of one file after a crash or restart. There are three cases:
    /// * The file was found in the backing: those bytes that only the arena has become pending again.
    /// * The file was removed: its bytes are dropped.
    /// * The file was not found: its bytes are retained for the user.
    ///
    /// `pieces` are all recorded appends of the file. `known` is its state in the journal.
    fn recover_file(&mut self, id: FileId, known: &KnownFile, pieces: Vec<StoredPiece>) {
        let search = self.find_file(known);
        let truncations = match &search {
            FileSearch::Found(inode) => self.finish_truncations(id, known, inode),
            // Programs have already seen these truncations, so they count even if the backing did not make them.
            FileSearch::Removed | FileSearch::Lost(_) => FinishedTruncations {
                counted: known.truncating.to_vec(),
                failure: None,
            },
        };
        let layers = lay_pieces(&pieces, &drained_ranges_of(known, &truncations.counted));
        let last_write = self.repair_and_find_last_write(known, &pieces, &layers);
        self.mark_pieces_without_bytes(&pieces, &layers);
        let is_all_drained = layers.extents.is_empty() && known.truncating.is_empty();
        let inode = match search {
            FileSearch::Found(inode) => inode,
            FileSearch::Removed => {
                for (piece, _) in layers.pieces.iter() {
                    self.engine.base.arena.mark_dead(*piece);
                }
                return self.end_file_id(id);
            }
            // The arena has no data of the file, so nothing is lost.
            FileSearch::Lost(_) if is_all_drained => return self.end_file_id(id),
            FileSearch::Lost(reason) => {
                return self.retain_lost_file(describe_lost_file(id, known, reason), layers);
            }
        };
        if let Some(errno) = truncations.failure {
            let reason = LossReason {
                is_certain: false,
                text: format!("its truncation could not be finished: {errno}"),
            };
            return self.retain_lost_file(describe_lost_file(id, known, reason), layers);
        }
        if is_all_drained && let Some(mtime) = last_write.mtime {
            // The earlier firnd may have died before it set the file's time. If the backing refuses the time, that of
            // the drain remains.
            let _ = self.set_mtime(&inode, mtime);
        }
        self.restore_pending(id, known, &inode, layers, last_write);
    }

    /// Sets the modification time of a file in the backing.
    fn set_mtime(&self, inode: &Inode<B>, mtime: Time) -> Result<(), Errno> {
        let object = self.engine.tree.object(inode)?;
        self.engine
            .base
            .backing
            .set_times(&object, SetTime::Keep, SetTime::At(mtime))
    }

    /// Records in the journal that no piece of a file is left.
    fn end_file_id(&self, id: FileId) {
        self.engine
            .base
            .journal
            .append_note(&Record::FileIdEnd { file: id.get() });
    }

    /// Makes bytes that recovery found in the arena pending again, for a file that was found in the backing. `layers`
    /// has the newest bytes of each file range. If there are none, ends the file id (the file's number in the journal).
    fn restore_pending(
        &mut self,
        id: FileId,
        known: &KnownFile,
        inode: &Arc<Inode<B>>,
        layers: PieceLayers,
        last_write: LastWrite,
    ) {
        let file = self.engine.open_files.acquire_file_with(inode, |state| {
            for (piece, piece_use) in layers.pieces.iter() {
                let live_bytes = piece_use.live as u32;
                self.engine.base.arena.keep_piece(*piece, live_bytes);
            }
            let drained_ranges = known.drained_ranges.len() as u32;
            state.pending = Pending::recovered(id, layers, drained_ranges, last_write);
            state.opens.restore_ending(known.ending);
            // Handles that survived the restart remain open, so the journal must record the file as open.
            self.engine.base.journal.update_ending(state);
        });
        // A cut file is incomplete: a writer was killed, or firnd died while a writer had the file open.
        inode.record_cut(file.lock().opens.is_cut());
        self.engine.open_files.remember_cut_inode(inode);
        let bytes = {
            let mut state = file.lock();
            if state.pending.is_empty() {
                state.pending.set_mtime(None);
                self.engine.base.journal.end_file_id(&mut state);
            } else {
                self.engine
                    .drain
                    .set_oldest(&file, &mut state, Some(Instant::now()));
            }
            state.pending.bytes()
        };
        if bytes > 0 {
            self.recovered.files += 1;
            self.recovered.bytes += bytes;
            self.restored.push(RestoredFile { file, bytes });
        } else {
            self.engine.open_files.drop_if_unused(&file);
        }
    }

    /// Returns the time of the last write of a file, from the records of its pieces (recorded appends) and the journal.
    ///
    /// Also repairs the records. A time in the future is replaced by the present time: the record is damaged, or the
    /// clock was set back since. A piece that remains gets the time of the last write, so that the next recovery finds
    /// it there.
    fn repair_and_find_last_write(
        &self,
        known: &KnownFile,
        pieces: &[StoredPiece],
        layers: &PieceLayers,
    ) -> LastWrite {
        let arena = &self.engine.base.arena;
        let now_ns = Time::now().to_ns();
        let latest_possible_ns = latest_ns();
        let mut recorded_ns = 0;
        for piece in pieces {
            let is_in_future = piece.modified > latest_possible_ns;
            if is_in_future {
                arena.set_modified(piece.record, now_ns);
            }
            let modified_ns = if is_in_future { now_ns } else { piece.modified };
            recorded_ns = recorded_ns.max(modified_ns);
        }
        // The caller marks the other pieces as dead only after this, because only one of them may have the time.
        if let Some((remaining_piece, _)) = layers.pieces.iter().next() {
            arena.set_modified(*remaining_piece, recorded_ns);
        }
        match known.modified_at.as_deref() {
            // A program set the time after the last write (`written` is the time of the last write at that moment).
            Some(set) if recorded_ns <= set.written => {
                let (sec, nsec) = set.time;
                LastWrite {
                    mtime: Some(Time { sec, nsec }),
                    recorded_ns: set.written,
                }
            }
            _ if recorded_ns > 0 => LastWrite {
                mtime: Some(Time::from_ns(recorded_ns)),
                recorded_ns,
            },
            // No piece has a time.
            _ => LastWrite {
                mtime: None,
                recorded_ns: 0,
            },
        }
    }

    /// Completes the truncations of a file that were begun in the backing, and ends them in the journal. A truncation
    /// that never began in the backing did not change the file, so it does not count.
    fn finish_truncations(
        &self,
        id: FileId,
        known: &KnownFile,
        inode: &Arc<Inode<B>>,
    ) -> FinishedTruncations {
        let mut finished = FinishedTruncations {
            counted: Vec::new(),
            failure: None,
        };
        for &(sequence, size) in known.truncating.iter() {
            match self.finish_truncation(inode, size) {
                Ok(was_begun) => {
                    self.engine.base.journal.append_note(&Record::TruncateEnd {
                        file: id.get(),
                        sequence,
                        size,
                        done: was_begun,
                    });
                    if was_begun {
                        finished.counted.push((sequence, size));
                    }
                }
                Err(errno) => {
                    // The caller retains the data, and the next recovery tries the truncation again.
                    finished.counted.push((sequence, size));
                    finished.failure = Some(errno);
                }
            }
        }
        finished
    }

    /// Completes the truncation of a file to `size` in the backing. Returns false if the truncation never began there.
    fn finish_truncation(&self, inode: &Inode<B>, size: u64) -> Result<bool, Errno> {
        let backing = &self.engine.base.backing;
        let file = backing.open(&self.engine.tree.object(inode)?, Access::Write)?;
        backing.resize(&file, Resize::Finish(size))
    }

    /// Searches for a known file (one with a record in the journal): among the open files without a name, and then
    /// under each of its names. A file that is not found counts as removed if each of its names was being removed or
    /// renamed, else as lost.
    fn find_file(&self, known: &KnownFile) -> FileSearch<B> {
        let key = ObjectKey {
            dev: known.identity.dev,
            ino: known.identity.ino,
        };
        if let Some(nameless) = self.engine.find_nameless(key)
            && is_same_object(known, &nameless)
        {
            return FileSearch::Found(nameless);
        }
        match self.find_by_names(known) {
            Ok(inode) => FileSearch::Found(inode),
            // A name is doubtful while its removal or rename is under way.
            Err(reason) => {
                let mut paths = known.paths.iter();
                if paths.all(|(_, state)| *state == PathState::Doubtful) {
                    FileSearch::Removed
                } else {
                    FileSearch::Lost(reason)
                }
            }
        }
    }

    /// Searches for a known file (one with a record in the journal) under each of its names. Returns the reason if no
    /// name leads to it.
    fn find_by_names(&self, known: &KnownFile) -> Result<Arc<Inode<B>>, LossReason> {
        let mut found_inode = None;
        let mut reason = LossReason {
            is_certain: true,
            text: "it has no name".into(),
        };
        // Of several reasons the last one is reported, but "no file" does not replace "another file".
        let mut is_replaced = false;
        for (path, _) in &known.paths {
            match self.engine.tree.inode_at(path) {
                // The search continues after a match, because `inode_at` also records the name. If a name were not
                // recorded, the removal of another one could count as the removal of the last name.
                Ok(inode) if is_same_object(known, &inode) => found_inode = Some(inode),
                Ok(_) => {
                    is_replaced = true;
                    reason.text = "another file has its name".into();
                }
                Err(Errno::NOENT | Errno::NOTDIR) => {
                    if !is_replaced {
                        reason.text = "no file has its name any more".into();
                    }
                }
                Err(errno) => {
                    reason.is_certain = false;
                    reason.text = format!("its name cannot be looked up: {errno}");
                }
            }
        }
        found_inode.ok_or(reason)
    }
}

/// Returns the drained ranges of a file. A truncation counts as a drain of all bytes beyond the new length: it has
/// removed all older bytes there.
fn drained_ranges_of(known: &KnownFile, truncations: &[(u64, u64)]) -> Vec<DrainedRange> {
    let mut drained_ranges = known.drained_ranges.to_vec();
    for &(sequence, size) in truncations {
        drained_ranges.push(DrainedRange {
            offset: size,
            len: u64::MAX - size,
            sequence,
        });
    }
    drained_ranges
}

/// Returns whether an inode is the known file, by inode number and birth time.
fn is_same_object<B: Backing>(known: &KnownFile, inode: &Inode<B>) -> bool {
    let birth_time = inode.btime.map(|time| (time.sec, time.nsec));
    // The device is not compared: it may have another number after the backing was mounted again.
    known.identity.ino == inode.key.ino && known.identity.btime == birth_time
}

/// Describes a lost file. Its bytes are counted later, when its pieces are retained.
fn describe_lost_file(id: FileId, known: &KnownFile, reason: LossReason) -> LostFile {
    let path = match known.paths.first() {
        Some((path, _)) => path.to_vec(),
        None => Vec::new(),
    };
    LostFile {
        file: id.get(),
        path,
        bytes: 0,
        is_certain: reason.is_certain,
        reason: reason.text,
    }
}

/// Lays pieces (recorded appends of bytes to one file) over each other, oldest first, and removes drained ranges.
/// Returns the newest bytes of each range, with their pieces.
fn lay_pieces(stored: &[StoredPiece], drained_ranges: &[DrainedRange]) -> PieceLayers {
    let mut oldest_first: Vec<&StoredPiece> = stored.iter().collect();
    oldest_first.sort_by_key(|stored| stored.piece.sequence);
    let mut extents = Extents::default();
    // The bytes that a newer piece replaces need no action, because no piece counts as used yet.
    let ignore_replaced_bytes = &mut |_, _| {};
    for StoredPiece { record, piece, .. } in oldest_first {
        let extent = Extent {
            len: u64::from(piece.len),
            piece: *record,
            position: piece.position,
            sequence: piece.sequence,
        };
        extents.insert(piece.offset, extent, ignore_replaced_bytes);
    }
    for drained in drained_ranges {
        let range = drained.offset..drained.offset.saturating_add(drained.len);
        extents.remove(range, &mut |_, extent| extent.sequence <= drained.sequence);
    }
    // First the live bytes of each piece are counted, from the extents. Then its length is added, from its record.
    let mut pieces: SmallMap<PieceRef, PieceUse> = SmallMap::default();
    for (_, extent) in extents.iter() {
        let live = pieces.get(&extent.piece).map_or(0, |known| known.live) + extent.len;
        pieces.insert(extent.piece, PieceUse { len: 0, live });
    }
    for stored in stored {
        if let Some(piece_use) = pieces.get_mut(&stored.record) {
            piece_use.len = u64::from(stored.piece.len);
        }
    }
    PieceLayers { extents, pieces }
}
