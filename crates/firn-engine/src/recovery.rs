//! Attach: what an earlier firnd left in the arena becomes pending again.
//!
//! 1. The arena gives every whole piece, the journal every file id.
//! 2. Each known file is looked for under its names and recognised by inode and birth time.
//! 3. A truncation that had begun is done to the end in the backing, or never was.
//! 4. Its pieces are laid over each other in the order of their sequences; drained ranges
//!    are taken out.
//! 5. What is left is pending and drained without being asked.
//!
//! Pieces of a transaction that has ended are dropped before all of that ([`StoredArena::drop_below`]), without the
//! backing. The records of the transaction are removed only afterwards, so that a crash in between drops the rest.
//!
//! A file that is not found although no removal had begun is *lost*: its pieces stay in the arena and
//! the status says so.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use firn_arena::journal::{Journal, KnownFile, PathState, Replay};
use firn_arena::{Arena, JournalRegion, PieceRef, Stored};
use firn_backing::{Access, Backing, Errno, Resize, SetTime, Time, is_below};
use firn_format::record::Record;

use crate::engine::{Engine, EngineError};
use crate::extents::{Extent, Extents};
use crate::file::{File, FileId, Layers, Pending, PieceUse, latest_ns};
use crate::live::{Resumed, ResumedRequests};
use crate::lost::LostFile;
use crate::names::Inode;
use crate::options::{DrainPolicy, EngineOptions};
use crate::small_map::SmallMap;

/// What attach found.
#[derive(Debug, Default)]
pub struct Recovered {
    /// What of the kernel's requests an earlier firnd left, where its mount is taken over.
    pub requests: Option<ResumedRequests>,
    /// Files with data that is pending again.
    pub files: u64,
    /// Its bytes.
    pub bytes: u64,
    /// Bytes that were dropped because their transaction is no more.
    pub dropped_bytes: u64,
    /// Files that could not be found.
    pub lost: Vec<LostFile>,
    /// What was damaged in the journal.
    pub damage: Vec<String>,
}

/// An arena with what an earlier firnd stored in it, before any of it is pending again.
pub struct StoredArena {
    arena: Arena,
    /// All pieces: their slabs are held until the attach.
    stored: Vec<Stored>,
    journal: Journal<JournalRegion>,
    replay: Replay,
    /// File ids that were dropped.
    dropped: BTreeSet<u64>,
    dropped_bytes: u64,
}

impl StoredArena {
    /// `stored`: the pieces that were found when the arena was attached.
    pub fn open(arena: Arena, stored: Vec<Stored>) -> Self {
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

    /// The arena itself.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Drops what was written to files at or below one of `scopes`, for good: when this returns no later attach
    /// finds it. May be repeated, also after it was cut short by a crash.
    pub fn drop_below(&mut self, scopes: &[Vec<u8>]) -> Result<(), EngineError> {
        let is_below_one = |path: &[u8]| {
            scopes
                .iter()
                .any(|top| top.is_empty() || is_below(path, top))
        };
        let ledger = self.journal.ledger();
        let files: Vec<u64> = ledger
            .files()
            .filter(|(_, known)| {
                let paths = ledger.possible_paths(known);
                paths.iter().any(|(path, _)| is_below_one(path))
            })
            .map(|(file, _)| file)
            .collect();
        for file in files {
            for Stored { at, piece, .. } in self
                .stored
                .iter()
                .filter(|stored| stored.piece.file == file)
            {
                self.arena.mark_dead(*at);
                self.dropped_bytes += u64::from(piece.len);
            }
            // After its pieces: without it they would be those of an unknown file. It takes a truncation with it
            // that had begun.
            self.journal
                .append_end(&Record::FileIdEnd { file })
                .map_err(|_| EngineError::JournalFull)?;
            self.dropped.insert(file);
        }
        Ok(())
    }
}

enum Search<N> {
    Found(N),
    /// A removal had begun and the file is gone.
    Removed,
    Lost {
        /// The backing answered, and the file is not there.
        gone: bool,
        reason: String,
    },
}

impl<B: Backing> Engine<B> {
    /// Begins with a fresh arena.
    pub fn begin(
        backing: B,
        arena: Arena,
        options: EngineOptions,
    ) -> Result<Arc<Self>, EngineError> {
        // It was made with the arena: at no instant is there an arena without a journal.
        let journal = Journal::open(arena.journal_region()).0;
        arena.remove_unused_memory_files();
        let engine = Self::assemble(backing, arena, journal, options)?;
        Ok(engine.start())
    }

    /// Goes on with the arena of an earlier firnd and the pieces that were found in it.
    pub fn attach(
        backing: B,
        arena: Arena,
        stored: &[Stored],
        options: EngineOptions,
    ) -> Result<(Arc<Self>, Recovered), EngineError> {
        Self::attach_stored(
            backing,
            StoredArena::open(arena, stored.to_vec()),
            options,
            None,
        )
    }

    /// Attaches to an arena from which some pieces were dropped. `resumed`: what the kernel knows, if it still has
    /// the mount.
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
        // A rename without an end record may have been done: its files are looked for under both names.
        replay.ledger.settle_all_renames();
        let mut engine = Self::assemble(backing, arena, journal, options)?;
        let requests = resumed.map(|resumed| engine.resume(resumed));
        engine.base.arena.remove_unused_memory_files();
        let files = stored.iter().map(|stored| stored.piece.file);
        let highest = files.max().unwrap_or(0).max(replay.last_file);
        engine.base.journal.set_last_file_id(highest);
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
        engine.base.arena.free_unkept_slabs(&stored);
        engine.recovered_bytes = recovered.bytes;
        let engine = engine.start();
        for Restored { file, bytes } in restored {
            engine.drain.count_held(&file, 0, bytes);
            let mut state = file.lock();
            if engine.base.options.drain == DrainPolicy::Eager {
                engine.drain.force(&file, &mut state);
            }
            drop(state);
            engine.room.settle_later(&file);
        }
        Ok((engine, recovered))
    }

    fn start(self) -> Arc<Self> {
        let freed = self.room.space.waiters.freed_callback();
        self.base.arena.on_free(freed);
        Arc::new(self)
    }
}

/// A file that has pending bytes again.
struct Restored<B: Backing> {
    file: Arc<File<B>>,
    bytes: u64,
}

/// An attach under way.
struct Recovery<'a, B: Backing> {
    engine: &'a Engine<B>,
    recovered: Recovered,
    restored: Vec<Restored<B>>,
}

impl<B: Backing> Recovery<'_, B> {
    /// Gives known files their pieces back, and keeps the pieces of unknown files.
    fn recover_files(&mut self, replay: &Replay, dropped: &BTreeSet<u64>, stored: &[Stored]) {
        let mut pieces: BTreeMap<u64, Vec<Stored>> = BTreeMap::new();
        for piece in stored
            .iter()
            .filter(|stored| !dropped.contains(&stored.piece.file))
        {
            pieces.entry(piece.piece.file).or_default().push(*piece);
        }
        for (file, known) in replay
            .ledger
            .files()
            .filter(|(file, _)| !dropped.contains(file))
        {
            // A damaged record may have a number that no file has: its pieces are of an unknown file.
            let Some(id) = FileId::new(file) else {
                continue;
            };
            let stored = pieces.remove(&file).unwrap_or_default();
            self.recover_file(id, known, stored);
        }
        for (file, stored) in pieces {
            let reason = "the journal does not know the file".into();
            let lost = LostFile {
                file,
                path: Vec::new(),
                bytes: 0,
                gone: true,
                reason,
            };
            self.keep_lost(lost, layers(&stored, &[]));
        }
    }

    fn keep_lost(&mut self, lost: LostFile, layers: Layers) {
        let kept = self.engine.lost.keep(lost, layers);
        self.recovered.lost.push(kept);
    }

    /// Makes what is left of a file pending again.
    fn recover_file(&mut self, id: FileId, known: &KnownFile, stored: Vec<Stored>) {
        let found = self.search(known);
        let (truncations, failed) = match &found {
            Search::Found(inode) => self.finish_truncations(id, known, inode),
            // As programs saw the file last.
            Search::Removed | Search::Lost { .. } => (known.truncating.to_vec(), None),
        };
        let mut drained_ranges = known.drained_ranges.clone();
        for (sequence, size) in truncations {
            drained_ranges.push(firn_arena::journal::DrainedRange {
                offset: size,
                len: u64::MAX - size,
                sequence,
            });
        }
        let layers = layers(&stored, &drained_ranges);
        let time = self.last_write(known, &stored, &layers);
        for Stored { at, .. } in &stored {
            // Drained or overwritten: without its mark it would outlive the file id.
            if layers.pieces.get(at).is_none() {
                self.engine.base.arena.mark_dead(*at);
            }
        }
        let inode = match found {
            Search::Found(inode) => inode,
            Search::Removed => {
                for (piece, _) in layers.pieces.iter() {
                    self.engine.base.arena.mark_dead(*piece);
                }
                self.engine
                    .base
                    .journal
                    .append_note(&Record::FileIdEnd { file: id.get() });
                return;
            }
            Search::Lost { .. } if layers.extents.is_empty() && known.truncating.is_empty() => {
                self.engine
                    .base
                    .journal
                    .append_note(&Record::FileIdEnd { file: id.get() });
                return;
            }
            Search::Lost { gone, reason } => {
                let lost = lost(id, known, gone, reason);
                self.keep_lost(lost, layers);
                return;
            }
        };
        if let Some(errno) = failed {
            let reason = format!("its truncation could not be finished: {errno}");
            let lost = lost(id, known, false, reason);
            self.keep_lost(lost, layers);
            return;
        }
        if layers.extents.is_empty()
            && known.truncating.is_empty()
            && let (Some(mtime), _) = time
        {
            // All of it had been drained, and its time may not have been set yet. A refusal leaves the backing's.
            let set = |object| {
                self.engine
                    .base
                    .backing
                    .set_times(&object, SetTime::Keep, SetTime::At(mtime))
            };
            let _ = self.engine.tree.object(&inode).and_then(set);
        }
        self.restore_pending(id, known, &inode, layers, time);
    }

    /// Makes a file that was found pending again, as far as bytes of it are left.
    fn restore_pending(
        &mut self,
        id: FileId,
        known: &KnownFile,
        inode: &Arc<Inode<B>>,
        layers: Layers,
        time: (Option<Time>, u64),
    ) {
        let file = self.engine.open_files.file_with(inode, |state| {
            for (piece, used) in layers.pieces.iter() {
                self.engine.base.arena.keep_piece(*piece, used.live as u32);
            }
            let drained_ranges = known.drained_ranges.len() as u32;
            state.pending = Pending::recovered(id, layers, drained_ranges, time);
            state.opens.restore_ending(known.ending);
            // Handles that survived the restart stay open.
            self.engine.base.journal.update_ending(state);
        });
        inode.note_cut(file.lock().opens.is_cut());
        self.engine.open_files.keep_cut(inode);
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
            self.restored.push(Restored { file, bytes });
        } else {
            self.engine.open_files.drop_if_unused(&file);
        }
    }

    /// The modification time that programs saw last, as far as it is kept, and that of the last write as the records have
    /// it. Times that no write can have had, of a damaged record or of a clock that was set back since, are taken as
    /// now.
    fn last_write(
        &self,
        known: &KnownFile,
        stored: &[Stored],
        layers: &Layers,
    ) -> (Option<Time>, u64) {
        let now = Time::now().to_ns();
        let latest = latest_ns();
        let bounded = |modified: u64| if modified > latest { now } else { modified };
        let last = stored
            .iter()
            .map(|stored| bounded(stored.modified))
            .max()
            .unwrap_or(0);
        for Stored { at, modified, .. } in stored {
            if *modified > latest {
                self.engine.base.arena.set_modified(*at, now);
            }
        }
        // Before any of them is marked dead, which may be the one that tells it.
        if let Some((piece, _)) = layers.pieces.iter().next() {
            self.engine.base.arena.set_modified(*piece, last);
        }
        match known.modified_at.as_deref() {
            Some(kept) if last <= kept.written => (
                Some(Time {
                    sec: kept.time.0,
                    nsec: kept.time.1,
                }),
                kept.written,
            ),
            _ => ((last > 0).then(|| Time::from_ns(last)), last),
        }
    }

    /// Ends the truncations that had begun: those that the file is to be as after, and the error of one that failed.
    fn finish_truncations(
        &self,
        id: FileId,
        known: &KnownFile,
        inode: &Arc<Inode<B>>,
    ) -> (Vec<(u64, u64)>, Option<Errno>) {
        let mut truncations = known.truncating.to_vec();
        let mut failed = None;
        truncations.retain(|&(sequence, size)| {
            let open = || {
                self.engine
                    .base
                    .backing
                    .open(&self.engine.tree.object(inode)?, Access::Write)
            };
            let ended = open()
                .and_then(|file| self.engine.base.backing.resize(&file, Resize::Finish(size)));
            match ended {
                Ok(done) => {
                    self.engine.base.journal.append_note(&Record::TruncateEnd {
                        file: id.get(),
                        sequence,
                        size,
                        done,
                    });
                    done
                }
                Err(error) => {
                    failed = Some(error);
                    true
                }
            }
        });
        (truncations, failed)
    }

    /// Looks for a known file among those that are open without a name, and under its names.
    fn search(&self, known: &KnownFile) -> Search<Arc<Inode<B>>> {
        let key = (known.identity.dev, known.identity.ino);
        let nameless = self.engine.find_nameless(key);
        if let Some(inode) = nameless.filter(|inode| is_same(known, inode)) {
            return Search::Found(inode);
        }
        let mut found = None;
        let mut reason = String::from("it has no name");
        let mut replaced = false;
        let mut gone = true;
        for (path, _) in &known.paths {
            match self.engine.tree.find(path) {
                // All of its names, so that the loss of one is not taken for the loss of the last.
                Ok(inode) if is_same(known, &inode) => found = Some(inode),
                Ok(_) => {
                    replaced = true;
                    reason = "another file has its name".into();
                }
                Err(Errno::NOENT | Errno::NOTDIR) => {
                    if !replaced {
                        reason = "no file has its name any more".into();
                    }
                }
                Err(errno) => {
                    gone = false;
                    reason = format!("its name cannot be looked up: {errno}");
                }
            }
        }
        if let Some(inode) = found {
            return Search::Found(inode);
        }
        if known
            .paths
            .iter()
            .all(|(_, state)| *state == PathState::Doubtful)
        {
            Search::Removed
        } else {
            Search::Lost { gone, reason }
        }
    }
}

fn is_same<B: Backing>(known: &KnownFile, inode: &Inode<B>) -> bool {
    let birth = inode.btime.map(|t| (t.sec, t.nsec));
    // The device may have another number after the backing was mounted again.
    known.identity.ino == inode.key.1 && known.identity.btime == birth
}

/// A known file that was not given back its data; its bytes are counted when it is kept.
fn lost(id: FileId, known: &KnownFile, gone: bool, reason: String) -> LostFile {
    let path = known
        .paths
        .first()
        .map(|(path, _)| path.to_vec())
        .unwrap_or_default();
    LostFile {
        file: id.get(),
        path,
        bytes: 0,
        gone,
        reason,
    }
}

/// Lays pieces over each other, oldest first, and takes out what is drained.
fn layers(stored: &[Stored], drained_ranges: &[firn_arena::journal::DrainedRange]) -> Layers {
    let mut ordered: Vec<&Stored> = stored.iter().collect();
    ordered.sort_by_key(|s| s.piece.sequence);
    let mut extents = Extents::default();
    for Stored { at, piece, .. } in ordered {
        let extent = Extent {
            len: u64::from(piece.len),
            piece: *at,
            position: piece.position,
            sequence: piece.sequence,
        };
        extents.insert(piece.offset, extent, &mut |_, _| {});
    }
    for drained in drained_ranges {
        let range = drained.offset..drained.offset.saturating_add(drained.len);
        extents.remove(range, &mut |_, e| e.sequence <= drained.sequence);
    }
    let mut pieces: SmallMap<PieceRef, PieceUse> = SmallMap::default();
    for (_, extent) in extents.iter() {
        let live = pieces.get(&extent.piece).map_or(0, |used| used.live) + extent.len;
        pieces.insert(extent.piece, PieceUse { len: 0, live });
    }
    for stored in stored {
        if let Some(used) = pieces.get_mut(&stored.at) {
            used.len = u64::from(stored.piece.len);
        }
    }
    Layers { extents, pieces }
}
